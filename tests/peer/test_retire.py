"""A person retires a peer that is gone: what is said to whom, and what a peer that was retired alive does by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from ledger.core.genesis import TRAINER
from ledger.members import ApproveVoter
from peer.runtime.membership.membership import Membership
from peer.runtime.telemetry.event_log import EventLog
from protocol.errors import UserError
from protocol.identity import short_id
from tests.ledger.world import NEW, PEOPLE, World, stood
from tests.peer.network import Seat, network, service_of


def membership_of(seat: Seat, stands: bool = True, approve_invited: int = 0) -> Membership:
    return Membership(seat.driver, seat.author, "", (TRAINER,), stands, approve_invited, None)


async def test_it_is_said_how_many_wishes_there_are_and_are_needed_and_f_is_kept_unless_all_say_so(tmp_path: Path) -> None:
    async with network(tmp_path, 4, roles=(TRAINER,)) as founders:
        services: list[Any] = [service_of(seat) for seat in founders.seats]
        gone = founders.seats[3]
        name = short_id(gone.public)
        with pytest.raises(UserError, match="0 may lie, not 1 as now: it takes a quorum that says --lower-tolerance"):
            await services[0].retire_member(name, False)
        assert (await services[0].retire_member(name, True)).startswith(f"1 of the 3 voters needed want {name} retired;")
        moved = await services[0].retire_member(short_id(founders.seats[2].public), True)
        assert f"Your wish about {name} is withdrawn by this one" in moved
        for service, count in zip(services[:2], (1, 2), strict=True):
            assert (await service.retire_member(name, True)).startswith(f"{count} of the 3")
        await founders.seats[2].until(lambda driver: len(driver.state.members.retirement_votes) == 2)
        view = next(view for view in await services[2].peers() if view.peer.startswith(name))
        assert "2 of 3 want it retired" in view.membership
        assert f"{name} is retired: it loses its vote and roles" in await services[2].retire_member(name, True)
        await founders.seats[0].until(lambda driver: gone.public not in driver.state.members.voters)
        view = next(view for view in await services[0].peers() if view.peer.startswith(name))
        assert (view.roles, view.voter, view.member) == ((), False, True) and "retired at height" in view.membership


async def test_a_peer_that_is_retired_alive_trains_and_stands_again_and_no_policy_gives_its_vote_back(tmp_path: Path) -> None:
    async with network(tmp_path, 4, roles=(TRAINER,)) as founders, trio.open_nursery() as nursery:
        seats, gone = founders.seats, founders.seats[3]
        for number, seat in enumerate(seats):
            nursery.start_soon(membership_of(seat, approve_invited=9 * (number < 3)).run)
        for seat in seats[:3]:
            await service_of(seat).retire_member(short_id(gone.public), True)
        await seats[0].until(lambda driver: gone.public in driver.state.members.candidates)
        await seats[0].until(lambda driver: driver.state.members.members[gone.public].roles == (TRAINER,))
        assert seats[0].driver.state.members.candidates[gone.public] == ()
        await gone.event("member", f"{short_id(gone.public)} was retired at height")
        await seats[2].event("member", f"`peer retire {short_id(gone.public)} --lower-tolerance` says so, too")
        for seat in seats[:2]:
            await seat.author.submit("member/approve", ApproveVoter(gone.public))
        await gone.until(lambda driver: gone.public in driver.state.members.voters)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("retired", "approvals"), [(None, 1), (7, 0)])
async def test_the_policy_skips_whom_people_have_retired(retired: int | None, approvals: int) -> None:
    world, asked = World(), list[object]()
    stood(world)
    members = world.state.members
    member = replace(members.members[NEW.public], retired=retired)
    state = world.state.with_modules(members=replace(members, members={**members.members, NEW.public: member}))

    async def submit(kind: str, content: object) -> None:
        asked.append(content)

    driver: Any = SimpleNamespace(signer=PEOPLE[0], state=state, events=EventLog())
    author: Any = SimpleNamespace(submit=submit)
    await Membership(driver, author, "", (TRAINER,), True, 9, None)._approve()
    assert len(asked) == approvals
