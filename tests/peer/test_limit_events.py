"""Event lines about limits that voters set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from clients.ledger.clients_module import FLOPS_LIMIT, STEPS_LIMIT
from peer.runtime.membership.membership import Membership
from tests.ledger.test_client_runs import Clients
from tests.ledger.world import PEOPLE
from tests.sim.keys import FastSigner


def told(world: Clients, me: FastSigner, name: str, most: int, *voters: FastSigner) -> list[str]:
    """Return the lines that a peer shows after these votes."""
    lines, before = list[str](), world.state
    world.vote_for(name, most, *voters)
    events = SimpleNamespace(add=lambda kind, text: lines.append(text))
    membership = SimpleNamespace(driver=SimpleNamespace(signer=me, events=events, rules=world.rules))
    Membership._report_limits(cast(Any, membership), before, world.state)
    return lines


def test_voters_see_votes_of_others_and_all_see_the_decision() -> None:
    world, me, guest = Clients(), PEOPLE[0], PEOPLE[9]
    agree = "a voter voted for the limit client_flops 900: to agree, run `peer limit client_flops 900`"
    assert told(world, me, FLOPS_LIMIT, 900, PEOPLE[1]) == [agree]
    assert told(world, me, FLOPS_LIMIT, 900, PEOPLE[2]) == [], "it has seen this number"
    assert told(world, me, STEPS_LIMIT, 5, me) == [], "it is its own vote"
    assert told(world, guest, STEPS_LIMIT, 6, PEOPLE[1]) == [], "it does not vote"
    decided = "decided: a step of a client run may need at most 900 floating-point operations"
    assert told(world, guest, FLOPS_LIMIT, 900, me) == [decided]
