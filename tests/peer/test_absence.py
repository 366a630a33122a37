"""Peers that are silent for days, the absence claims that follow, and a person who retires a lost peer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ledger.core.genesis import TRAINER
from ledger.members import ApproveVoter, MembersState, RetireMember
from peer.runtime.membership import inactivity
from peer.runtime.membership.inactivity import DAY_SECONDS, InactivityTracker, load_silences
from peer.runtime.membership.membership import Membership
from peer.runtime.telemetry.event_log import EventLog
from protocol.errors import UserError
from protocol.identity import short_id
from tests.ledger.world import FAR_MS, NEW, PEOPLE, World, stood
from tests.peer.network import Seat, network, poll, service_of
from tests.peer.network import network as daemons
from tests.sim.keys import FastSigner

DAYS = 1
LOOK_SECONDS = 600  # the days pass in fewer observations
FIVE = PEOPLE[:5]
GONE = PEOPLE[4]


class Voters:
    """Voters on a shared clock. `links` holds the groups of people that are connected."""

    def __init__(self, folder: Path, people: Iterable[FastSigner] = FIVE) -> None:
        self.people, self.folder = list(people), folder
        self.world = World(voters=len(self.people), trainers=0)
        self.links: list[list[FastSigner]] = [self.people]
        self.signed: set[bytes] = set()
        self.told: list[str] = []
        self.peers = {person: self.start(person) for person in self.people}

    def start(self, person: FastSigner) -> InactivityTracker:
        def heard() -> frozenset[bytes]:
            together = [group for group in self.links if person in group]
            return frozenset(other.public for group in together for other in group if other is not person)

        network: Any = SimpleNamespace(me=person.public, live_peers=heard)
        author: Any = SimpleNamespace(has_pending=False, submit=partial(self.submit, person))
        file = self.folder / short_id(person.public)
        peer = InactivityTracker(
            network, self.world.ledger.applied, lambda: self.signed, author, DAYS, file, lambda text, key: self.told.append(text)
        )
        peer.load_saved()
        return peer

    async def submit(self, person: FastSigner, kind: str, content: RetireMember) -> None:
        if problem := self.world.problem(self.world.tx(person, kind, content)):
            raise UserError(problem)
        self.world.decide(self.world.tx(person, kind, content))

    @property
    def members(self) -> MembersState:
        return self.world.state.members

    def wishes(self) -> dict[bytes, bytes]:
        return {voter: wish.subject for voter, wish in self.members.retirement_votes.items()}

    def seconds(self, observer: FastSigner, person: FastSigner) -> int:
        return self.peers[observer]._silent.get(person.public, 0)

    def wish(self, person: FastSigner, subject: FastSigner, lower: bool = False) -> None:
        self.world.decide(self.world.tx(person, "member/retire", RetireMember(subject.public, lower, FAR_MS)))

    def live(self, days: float, running: Iterable[FastSigner] | None = None) -> None:
        """Let these peers observe for some days and act at once."""
        chosen = self.people if running is None else list(running)
        for _ in range(round(days * DAY_SECONDS / LOOK_SECONDS)):
            for person in chosen:
                subject = self.peers[person].observe_members()
                if subject is not None:
                    trio.run(self.peers[person]._submit_retirement, subject)

    def restart(self) -> None:
        for peer in self.peers.values():
            peer.save()
        self.peers = {person: self.start(person) for person in self.people}


@pytest.fixture(autouse=True)
def seldom_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inactivity, "OBSERVE_SECONDS", LOOK_SECONDS)


@pytest.fixture
def voters(tmp_path: Path) -> Voters:
    return Voters(tmp_path)


def without(*gone: FastSigner) -> list[FastSigner]:
    return [person for person in FIVE if person not in gone]


@pytest.mark.virtual
def test_a_member_that_a_quorum_has_not_heard_for_the_days_is_retired_and_not_before(voters: Voters) -> None:
    voters.links = [without(GONE)]
    voters.live(DAYS - 0.1, without(GONE))
    assert voters.wishes() == {} and GONE.public in voters.members.upcoming
    voters.live(0.2, without(GONE))
    assert GONE.public not in voters.members.upcoming and voters.members.members[GONE.public].retired is not None
    assert voters.members.is_current_key(GONE.public), "it stays a member"


@pytest.mark.virtual
def test_whoever_was_heard_once_begins_anew(voters: Voters) -> None:
    for heard in (lambda: voters.links.append([FIVE[0], GONE]), lambda: voters.signed.add(GONE.public)):
        voters.links, voters.signed = [without(GONE)], set()
        voters.live(DAYS - 0.1, without(GONE))
        heard()  # over a link, or under a decision that others have relayed
        voters.live(2 * LOOK_SECONDS / DAY_SECONDS, without(GONE))
        assert voters.seconds(FIVE[0], GONE) == 0
        voters.links, voters.signed = [without(GONE)], set()
        voters.live(0.2, without(GONE))
        assert FIVE[0].public not in voters.wishes() and GONE.public in voters.members.upcoming
        voters.links = [FIVE]
        voters.live(0.01)


@pytest.mark.virtual
def test_a_peer_that_hears_no_quorum_counts_nothing(voters: Voters) -> None:
    """Anna is connected to one other for longer than the limit. Then all are connected again."""
    anna, bert = FIVE[:2]
    voters.links = [[anna, bert], without(anna, bert)]
    voters.live(DAYS + 1)
    assert voters.wishes() == {}, "nobody heard a quorum"
    assert all(voters.seconds(one, other) == 0 for one in FIVE for other in FIVE)
    voters.links = [without(GONE)]
    voters.live(DAYS - 0.5, without(GONE))
    assert voters.wishes() == {}


@pytest.mark.virtual
def test_a_restart_forgets_no_silence_and_adds_none(voters: Voters) -> None:
    voters.links = [without(GONE)]
    voters.live(0.6 * DAYS, without(GONE))
    voters.restart()  # it may have been off for any time, which nothing records
    voters.live(0.3 * DAYS, without(GONE))
    assert voters.wishes() == {}
    voters.live(0.15 * DAYS, without(GONE))
    assert GONE.public not in voters.members.upcoming


@pytest.mark.virtual
def test_one_operator_without_days_and_nobody_is_retired(voters: Voters) -> None:
    voters.links = [without(GONE)]
    voters.live(DAYS + 1, without(GONE, FIVE[3]))
    assert set(voters.wishes().values()) == {GONE.public} and len(voters.wishes()) == 3
    assert GONE.public in voters.members.upcoming


@pytest.mark.virtual
def test_f_never_falls_by_itself_and_the_operator_is_told_once_a_day(tmp_path: Path) -> None:
    voters = Voters(tmp_path, PEOPLE[:4])
    voters.links = [PEOPLE[:3]]
    voters.live(DAYS + 0.5, PEOPLE[:3])
    assert voters.wishes() == {} and len(voters.told) == 3
    assert f"`peer retire {short_id(PEOPLE[3].public)} --lower-tolerance`" in voters.told[0]


@pytest.mark.virtual
def test_half_of_the_days_before_its_operator_is_told_day_by_day(voters: Voters) -> None:
    voters.peers[FIVE[0]]._seconds_max = 4 * DAY_SECONDS
    voters.links = [without(GONE)]
    voters.live(3.9, FIVE[:1])
    name = short_id(GONE.public)
    assert voters.told == [
        f"{name} has been silent at this peer for {days} days: after 4 days this peer votes to retire it" for days in (2, 3)
    ]


@pytest.mark.virtual
def test_what_a_person_has_said_stays(voters: Voters) -> None:
    anna, bert = FIVE[:2]
    voters.wish(anna, bert)
    voters.links = [without(GONE)]
    voters.live(DAYS + 0.1, without(GONE))
    assert voters.wishes()[anna.public] == bert.public and GONE.public in voters.members.upcoming


@pytest.mark.virtual
def test_all_wish_about_the_same_one_of_several(tmp_path: Path) -> None:
    eight = PEOPLE[:8]  # q is 6, so two may be silent, and a second retirement would lower f
    voters = Voters(tmp_path, eight)
    voters.links = [eight[2:]]
    voters.live(0.1, eight[4:])
    voters.live(DAYS + 0.1, eight[2:])
    assert voters.members.members[eight[0].public].retired is not None, "the smaller key"
    assert voters.members.members[eight[1].public].retired is None
    assert any("lowers the number of tolerated faulty voters" in text for text in voters.told)


@pytest.mark.virtual
async def test_an_end_of_silence_is_on_disk_at_once_and_silence_within_the_hour(
    voters: Voters, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(save: Callable[[], None]) -> None:
        save()

    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)  # the clock would run on during a thread
    peer, file = voters.peers[FIVE[0]], voters.folder / short_id(FIVE[0].public)
    voters.links = [without(GONE)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.run)
        await trio.sleep(2 * inactivity.SAVE_OBSERVATIONS * LOOK_SECONDS)
        assert load_silences(file, pytest.fail)[GONE.public] >= inactivity.SAVE_OBSERVATIONS * LOOK_SECONDS
        voters.links = [FIVE]
        await trio.sleep(3 * LOOK_SECONDS)
        assert load_silences(file, pytest.fail) == {}
        nursery.cancel_scope.cancel()


@pytest.mark.virtual
async def test_voters_retire_a_stopped_one_by_their_own_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inactivity, "OBSERVE_SECONDS", DAYS * DAY_SECONDS // 2)
    async with daemons(tmp_path, 5, roles=(TRAINER,)) as founders, trio.open_nursery() as nursery:
        *seats, gone = founders.seats
        peers = [
            InactivityTracker(
                seat.network,
                seat.applied,
                seat.driver.observer.take_signers,
                seat.author,
                DAYS,
                seat.folder / "silences",
                lambda text, key: None,
            )
            for seat in seats
        ]
        await poll(lambda: all(len(seat.network.live_peers()) == 4 for seat in seats))  # no block announces it
        await gone.stop()
        for _ in range(4):  # the first learns of it under a decision, the second begins
            wanted = [peer.observe_members() for peer in peers]
        assert wanted == [gone.public] * 4
        for peer in peers:
            nursery.start_soon(peer._submit_retirement, gone.public)
        await seats[0].until(lambda driver: gone.public not in driver.state.members.voters)
        assert seats[0].driver.state.members.members[gone.public].roles == ()
        nursery.cancel_scope.cancel()


@pytest.mark.virtual
def test_a_line_that_cannot_be_read_is_told_and_its_silence_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "silences").write_text("nobody 5\n")
    told: list[str] = []
    assert load_silences(tmp_path / "silences", told.append) == {} and "counts from now" in told[0]


def membership_of(seat: Seat, stands: bool = True, approve_invited: int = 0) -> Membership:
    return Membership(seat.driver, seat.author, "", (TRAINER,), stands, approve_invited, None)


async def test_it_is_said_how_many_wishes_there_are_and_are_needed_and_f_is_kept_unless_all_say_so(tmp_path: Path) -> None:
    async with network(tmp_path, 4, roles=(TRAINER,)) as founders:
        services: list[Any] = [service_of(seat) for seat in founders.seats]
        gone = founders.seats[3]
        name = short_id(gone.public)
        with pytest.raises(UserError, match=r"3 voters tolerate 0 faulty, 4 tolerate 1: .*a quorum vote with --lower-tolerance"):
            await services[0].retire_member(name, False)
        assert (await services[0].retire_member(name, True)).startswith(f"1 of 3 needed votes to retire {name};")
        moved = await services[0].retire_member(short_id(founders.seats[2].public), True)
        assert f"It replaces your vote to retire {name}" in moved
        for service, count in zip(services[:2], (1, 2), strict=True):
            assert (await service.retire_member(name, True)).startswith(f"{count} of 3")
        await founders.seats[2].until(lambda driver: len(driver.state.members.retirement_votes) == 2)
        view = next(view for view in await services[2].peers() if view.peer.startswith(name))
        assert "2 of 3 votes to retire it" in view.membership
        assert f"{name} is retired: it loses its vote and its roles" in await services[2].retire_member(name, True)
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
        await seats[2].event("member", f"to agree, run `peer retire {short_id(gone.public)} --lower-tolerance`")
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
