"""What a role does in open rounds begins and ends with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing

from peer.eventlog import EventLog
from peer.roles.base import Judged, OpenRound
from peer.rounds import Rounds
from peer.workshop import Workshop
from protocol.identity import Signed
from protocol.messages import Proposal
from protocol.reasons import Verdict
from tests.peer.chain import LANGUAGE, Chain


class Busy:
    """A role that trains for ever."""

    registered = ()

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.began = trio.Event()

    async def propose(self, round: OpenRound) -> None:
        self.begun += 1
        self.began.set()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled += 1

    async def judge(self, round: OpenRound, signed: Signed, proposal: Proposal) -> Judged:
        return Judged(Verdict.UNJUDGED)

    async def observe(self, round: OpenRound) -> None:
        return


async def test_a_round_that_is_given_to_others_as_soon_as_it_was_opened_is_worked_on_once(tmp_path: Path) -> None:
    chain, role = Chain(tmp_path / "chain"), Busy()
    key = chain.start(LANGUAGE)
    job = chain.ledger.state.jobs.jobs[key]
    rounds = Rounds(chain.people[0], chain.id, {})
    nothing: Any = SimpleNamespace(fetch=None)  # nobody asks the network, or calls the driver
    me, log = chain.people[0].public, EventLog()
    shop = Workshop(me, role, rounds, chain.store, chain.blobs, chain.host, nothing, log, nothing, lambda: 0.0)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(shop.run)
            shop.open((key, 0), job, False)
            shop.close((key, 0))
            shop.open((key, 0), job, False)
            await role.began.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert (role.begun, role.cancelled) == (1, 0)
            nursery.cancel_scope.cancel()
    chain.close()
