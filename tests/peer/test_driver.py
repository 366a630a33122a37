from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from ledger.jobs import ClosedRound
from ledger.members import RegisterRoles
from peer.roles.voter import Voter
from peer.runtime.driver import _stored_round
from protocol import codec
from protocol.errors import MissingBlobError, StorageError, UserError
from protocol.identity import Signed, sign_message
from protocol.messages import Ballot, Commit, GetRound, GossipEnvelope, Prepare, Proposal, Vote
from protocol.verdicts import Verdict
from rounds.round_state import RoundResult
from storage.disk_blob_store import DiskBlobStore
from tests.peer.chain import LANGUAGE
from tests.peer.network import SECONDS_MAX, accepted, certified, network, one_root, poll
from tests.waiting import patience
from training.round_context import OpenRoundContext
from training.worker_protocol import WorkerFailed
from transport.network import Priority


async def test_four_voters_decide_a_scratch_job_and_compute_one_root(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        before = made.seats[0].driver.state.state_root
        job = await made.seats[0].start_job()
        assert await one_root(made.seats, job) != before
        assert accepted(made.seats[3], job) == {made.seats[0].public: 1}


async def test_a_silent_voter_does_not_hold_up_three_others(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        seats = [await made.start(seat) for seat in made.seats[:3]]
        for seat in seats:
            job = await seat.start_job()
            await one_root(seats, job)
            assert accepted(seats[0], job) == {seat.public: 1}


async def test_two_of_four_decide_nothing_and_go_on_when_the_third_comes(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        seats = [await made.start(seat) for seat in made.seats[:2]]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(seats[0].start_job)
            await poll(lambda: len(seats[1].driver.node.ledger.mempool) > 0)
            assert [seat.driver.state.height for seat in seats] == [0, 0]
            assert not seats[1].store.read_restart_state().votes, "who has not asked a quorum what it has forgotten signs nothing"
            seats.append(await made.start(made.seats[2]))
        await one_root(seats, next(iter(seats[0].driver.state.jobs.jobs)))


async def test_an_observer_follows_and_applies_what_it_does_not_vote_on(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, observers=1) as made:
        await one_root(made.seats, await made.seats[0].start_job())
        observer = made.seats[-1]
        assert observer.public not in observer.driver.state.members.members
        assert observer.store.read_restart_state().votes == ()
        assert observer.driver.observer.decisions == made.seats[0].driver.state.height


async def test_a_peer_started_again_from_its_disk_has_its_root_and_goes_on_voting(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        root = await one_root(made.seats, await made.seats[0].start_job())
        again = made.seats[2]
        await again.stop()
        await made.start(again)
        assert again.driver.state.state_root == root
        await made.seats[1].stop()  # now every quorum needs the peer that came back
        await one_root([made.seats[n] for n in (0, 2, 3)], await made.seats[0].start_job())


async def test_a_peer_that_was_away_gets_missed_blocks_and_payloads_from_others_than_their_author(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        first = [await made.start(seat) for seat in made.seats[:3]]
        author = first[0]
        jobs = [await author.start_job()]
        await one_root(first, jobs[0])
        jobs.append(await author.start_job())
        await one_root(first, jobs[1])
        await author.stop()
        late = await made.start(made.seats[3])
        await one_root([*first[1:], late], jobs[1])
        assert late.network.traffic().blobs_received > 0
        job = await late.start_job()  # with the late peer and without the author there are three again
        await one_root([*first[1:], late], job)


async def test_two_voters_without_a_link_to_each_other_agree_through_the_others(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        made.mesh.set_conditions(
            made.seats[0].public, made.seats[1].public, replace(made.mesh.conditions_between(b"", b""), loss=1.0)
        )
        for seat in made.seats:
            await made.start(seat)
        await one_root(made.seats, await made.seats[0].start_job())


async def test_a_cut_network_decides_nothing_and_heals(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        await one_root(made.seats, await made.seats[0].start_job())
        height = made.seats[0].driver.state.height
        keys = [seat.public for seat in made.seats]
        made.mesh.partition(keys[:2], keys[2:])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.seats[0].start_job)
            # Wait until this voter has signed a vote for an undecided block. It would decide if two votes sufficed.
            await poll(lambda: bool(made.seats[1].store.read_restart_state().votes))
            assert {seat.driver.state.height for seat in made.seats} == {height}
            made.mesh.heal_partition()
        await one_root(made.seats, max(made.seats[0].driver.state.jobs.jobs.items(), key=lambda item: item[1].started_height)[0])


# Limits of roles and payloads --------------------------------------------------------------------------------------------


class Withheld:
    """A blob store that serves nothing to others until the event is set."""

    def __init__(self, released: trio.Event, blobs: DiskBlobStore) -> None:
        self._released, self._blobs = released, blobs

    def __getattr__(self, name: str) -> object:
        return getattr(self._blobs, name)

    def piece_size(self, digest: bytes) -> int | None:
        return self._blobs.piece_size(digest) if self._released.is_set() else None


async def test_a_payload_that_does_not_come_blocks_no_vote_and_is_judged_when_it_comes(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        released = trio.Event()
        author = await made.start(made.seats[0], serve=partial(Withheld, released))
        others = [await made.start(seat) for seat in made.seats[1:]]
        job = await author.start_job()
        for seat in others:
            await seat.event("proposal", "proposes")
            with patience():
                await seat.author.submit("member/register", RegisterRoles(("trainer",)))
        assert [seat.driver.state.jobs.jobs[job].round for seat in others] == [0, 0, 0]
        released.set()
        await one_root(made.seats, job)
        assert accepted(others[0], job) == {author.public: 1}


async def test_an_old_proposal_that_is_read_back_from_the_disk_is_no_event(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        author = await made.start(made.seats[0], serve=partial(Withheld, trio.Event()))
        others = [await made.start(seat) for seat in made.seats[1:]]
        job = await author.start_job()
        for seat in (author, *others):
            await seat.event("proposal", "proposes")
        await author.stop()
        await made.start(author, serve=partial(Withheld, trio.Event()))
        await poll(lambda: author.public in author.driver.node.rounds.books[job].proposals)
        assert [event.text for event in await author.events.wait_for_events(0, 0.0) if event.kind == "proposal"] == []


class Failing(Voter):
    def __init__(self, error: Exception, at: str) -> None:
        self._error, self._at = error, at

    async def propose(self, round: OpenRoundContext) -> None:
        if self._at == "propose":
            raise self._error
        await super().propose(round)

    async def check_proposal(self, round: OpenRoundContext, signed: Signed, proposal: Proposal) -> Verdict:
        if self._at == "check":
            raise self._error
        return await super().check_proposal(round, signed, proposal)

    async def reexecute(self, round: OpenRoundContext, trainer: bytes, proposal: Proposal) -> Verdict:
        if self._at == "reexecute":
            raise self._error
        return await super().reexecute(round, trainer, proposal)

    async def observe_round(self, round: OpenRoundContext) -> None:
        if self._at == "observe":
            raise self._error


@pytest.mark.parametrize("error", [UserError("no such text"), WorkerFailed("out of memory"), MissingBlobError("it went")])
@pytest.mark.parametrize(("at", "what"), [("check", "checking"), ("reexecute", "re-executing"), ("observe", "measuring")])
async def test_a_role_that_fails_is_a_warning_and_the_peer_goes_on(tmp_path: Path, error: Exception, at: str, what: str) -> None:
    text = f"{what} in round 1 failed"
    async with network(tmp_path, founders=4, start=False) as made:
        failing = await made.start(made.seats[0], Failing(error, at))
        for seat in made.seats[1:]:
            await made.start(seat)
        job = await made.seats[1].start_job()
        while at == "reexecute" and not any(text in event.text for event in failing.events.newest_events(100)):
            await one_root(made.seats, job)  # others were drawn to re-execute it
            job = await made.seats[1].start_job()
        assert str(error) in await failing.event("warning", text)
        await one_root(made.seats, job)


async def test_a_trainer_that_cannot_propose_still_decides_what_the_others_want(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        failing = await made.start(made.seats[0], Failing(WorkerFailed("no memory"), "propose"))
        for seat in made.seats[1:]:
            await made.start(seat)
        await failing.start_job()  # its round stays open: nothing is proposed, so nothing is voted on
        await failing.event("warning", "training in round 1 failed: no memory")
        for seat in made.seats[1:]:
            with patience():
                await seat.author.submit("member/register", RegisterRoles(("trainer",)))
        assert failing.failure is None


async def test_a_disk_that_fails_stops_the_peer_and_only_this_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with network(tmp_path, founders=4) as made:
        broken, *others = made.seats

        def fail(records: object) -> None:
            raise StorageError("the disk is full")

        monkeypatch.setattr(broken.store, "append_records", fail)
        job = await others[0].start_job()
        with patience():
            await broken.ended.wait()
        assert str(broken.failure) == "the disk is full"
        await one_root(others, job)


async def test_a_role_whose_disk_fails_stops_the_peer(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        broken = await made.start(made.seats[0], Failing(StorageError("the disk is full"), "check"))
        for seat in made.seats[1:]:
            await made.start(seat)
        job = await made.seats[1].start_job()
        with patience():
            await broken.ended.wait()
        assert str(broken.failure) == "the disk is full"
        await one_root(made.seats[1:], job)


# Persistent state of the driver -----------------------------------------------------------------------------------------


async def test_what_a_driver_has_sent_is_on_its_disk(tmp_path: Path) -> None:
    """Votes are written before they are sent, so a peer's own store has all of its messages that others hold."""
    async with network(tmp_path, founders=4) as made:
        author = made.seats[0]
        sent: list[Signed] = []
        missing: list[Signed] = []
        deliver = author.network.send

        def spy(peer: bytes, data: bytes, priority: Priority = Priority.CONTROL) -> bool:
            if codec.unpack(data, len(data))[0] == Vote.TAG:
                vote = codec.decode_message(data, (Vote,)).vote
                sent.append(vote)
                durable = {stored.signed.body for stored in author.store.read_restart_state().votes}
                if vote.body not in durable and _height(vote) > author.store.decided_height:
                    missing.append(vote)
            return deliver(peer, data, priority)

        author.network.send = spy  # type: ignore[method-assign]
        await one_root(made.seats, await author.start_job())
        assert sent
        assert missing == []


def _height(vote: Signed) -> int:
    return codec.decode_message(vote.body, (Prepare, Commit)).height


async def test_a_round_message_of_a_stranger_is_counted_and_changes_nothing(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, observers=1, start=False) as made:
        released = trio.Event()
        author = await made.start(made.seats[0], serve=partial(Withheld, released))
        for seat in made.seats[1:]:
            await made.start(seat)
        stranger, judge = made.seats[-1], made.seats[1]
        job = await author.start_job()
        await judge.until(lambda driver: job in driver.state.jobs.jobs)
        root = judge.driver.state.jobs.jobs[job].model_root
        for ballot in (Ballot(job, 0, root, ()), Ballot(job, 0, bytes(32), ())):
            signer = stranger.identity if ballot.model_root == root else made.seats[2].identity
            stranger.network.send(
                judge.public, codec.encode(GossipEnvelope(sign_message(signer, judge.driver.chain_id, ballot))), Priority.VOTE
            )
        await poll(lambda: set(judge.driver.node.refusal_counts) == {"not-a-member", "wrong-round"})
        released.set()
        await one_root(made.seats, job)


async def test_a_message_pays_for_its_turn_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with network(tmp_path, founders=1, observers=1) as made:
        voter, stranger = made.seats
        await one_root(made.seats, await voter.start_job())
        charged: list[tuple[float, float]] = []

        def worked(peer: bytes, seconds: float) -> None:
            charged.append((seconds, sum(voter.driver.node.processor_seconds[peer])))

        monkeypatch.setattr(voter.network, "worked", worked)
        stranger.network.send(voter.public, codec.encode(GetRound(bytes(32), 0)), Priority.VOTE)
        await poll(lambda: charged)
        assert all(seconds > own > 0 for seconds, own in charged)


async def test_a_vote_with_anothers_signature_costs_the_link(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, observers=1) as made:
        stranger, voter = made.seats[-1], made.seats[0]
        await one_root(made.seats, await voter.start_job())
        driver = voter.driver
        voters = driver.replica._chain.voters.get(driver.replica.height)
        assert voters is not None
        forged = sign_message(stranger.identity, driver.chain_id, Prepare(voters.hash, driver.replica.height, 0, bytes(32)))
        stranger.network.send(
            voter.public, codec.encode(Vote(Signed(forged.body, voter.public, forged.signature))), Priority.VOTE
        )
        await poll(lambda: voter.network.refusal_counts().get("bad-signature") == 1)
        assert not any(event.kind == "warning" for event in await voter.events.wait_for_events(0, 0.0)), (
            "it counts, and fills no screen"
        )
        await one_root(made.seats[:-1], await made.seats[1].start_job())


async def test_the_newest_state_is_the_one_that_the_certificate_names(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        await made.seats[1].until(certified(await made.seats[0].start_job()))
        roots = made.seats[1].store.state_roots()
        last = made.seats[1].store.get_decision(made.seats[1].driver.state.height)
        assert last is not None
        assert last.decode().state_root == roots[last.height - 1]


@pytest.mark.real("the machine's clock")
async def test_the_time_goes_on_while_the_machine_sleeps_and_never_back_and_nobody_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awake, wall, slept = time.clock_gettime, time.time, 0.0
    monkeypatch.setattr(time, "clock_gettime", lambda clock: awake(clock) + slept)
    async with network(tmp_path, founders=1) as made:
        driver = made.seats[0].driver
        before = driver.now()
        slept = 3_600.0
        woken = driver.now()
        assert 0.0 <= woken - before - slept < SECONDS_MAX
        monkeypatch.setattr(time, "time", lambda: wall() + 7_200.0)
        slept = 3_599.0  # the reading after a delay between the two clocks
        assert 0.0 <= driver.now() - woken < SECONDS_MAX
        await one_root(made.seats, await made.seats[0].start_job())
        decided = made.seats[0].store.get_decision(1)
        assert decided is not None and woken <= decided.decode().time_ms / 1_000 + 0.001 < woken + SECONDS_MAX


def test_the_list_of_rounds_says_diverging_where_most_updates_are_too_large() -> None:
    keys, nobody = (b"1" * 32, b"2" * 32), frozenset[bytes]()
    outcome = RoundResult(
        {}, dict.fromkeys(keys, Verdict.NORM), nobody, nobody, {}, nobody, nobody, diverging=frozenset(keys[:1])
    )
    jobs = {bytes(32): SimpleNamespace(spec=LANGUAGE.encode(), model_root=bytes(32))}
    state: Any = SimpleNamespace(height=4, jobs=SimpleNamespace(jobs=jobs))
    stored = _stored_round(ClosedRound(bytes(32), 3, outcome, (), ()), state)
    assert stored.verdicts == {keys[0]: "diverging", keys[1]: "norm"} and not stored.stepped
