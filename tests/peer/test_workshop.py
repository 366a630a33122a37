"""The work of a role in open rounds begins and ends with them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from peer.node.open_rounds import OpenRounds, RoundEffects
from peer.runtime.round_executor import RoundExecutor, _figure
from peer.runtime.telemetry.event_log import EventLog
from protocol import codec
from protocol.identity import Identity, Signed, sign_message
from protocol.messages import Ballot, Judgement, Proposal, Vouch
from protocol.verdicts import Verdict
from rlhf.objectives.ppo import PPO
from rounds.round_terms import signed_body_digest
from tests.peer.chain import LANGUAGE, Chain
from training.round_context import OpenRoundContext
from training.worker_protocol import WorkerFailed


class Busy:
    """A role that trains for ever."""

    computing = None

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.began = trio.Event()

    async def propose(self, round: OpenRoundContext) -> None:
        self.begun += 1
        self.began.set()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled += 1

    async def check(self, round: OpenRoundContext, signed: Signed, proposal: Proposal) -> Verdict:
        return Verdict.UNJUDGED

    async def reexecute(self, round: OpenRoundContext, trainer: bytes, proposal: Proposal) -> Verdict:
        return Verdict.UNJUDGED

    async def observe_round(self, round: OpenRoundContext) -> None:
        return


def shop_of(chain: Chain, role: Busy, rounds: OpenRounds | None = None, call: Any = None) -> RoundExecutor:
    nothing: Any = SimpleNamespace(fetch_blob=None, audit_bytes_sent_by_peer=dict)  # no network access
    me, events = chain.people[0], EventLog()
    rooms = chain.store, chain.blobs, chain.host, nothing
    rounds = rounds or OpenRounds(me, chain.id, {})
    return RoundExecutor(me.public, role, rounds, *rooms, events, lambda: 0.0, call, chain.ledger.applied)


async def test_a_round_that_is_given_to_others_as_soon_as_it_was_opened_is_worked_on_once(tmp_path: Path) -> None:
    chain, role = Chain(tmp_path / "chain"), Busy()
    key = chain.start(LANGUAGE)
    job = chain.ledger.state.jobs.jobs[key]
    shop = shop_of(chain, role)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(shop.run)
            shop.open_round((key, 0), job, False)
            shop.close_round((key, 0))
            shop.open_round((key, 0), job, False)
            await role.began.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert (role.begun, role.cancelled) == (1, 0)
            nursery.cancel_scope.cancel()
    chain.close()


@pytest.mark.virtual(threads=True)
async def test_tidying_that_comes_rounds_too_late_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, role = Chain(tmp_path / "chain"), Busy()
    spec = replace(LANGUAGE, rounds=9)
    key = chain.start(spec)
    chain.play(key)
    shop, prune, released = shop_of(chain, role), chain.host.prune_models, threading.Event()
    began = trio.Event()

    def late(*asked: Any) -> None:
        trio.from_thread.run_sync(began.set)
        released.wait(90)
        prune(*asked)

    monkeypatch.setattr(chain.host, "prune_models", late)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(shop.run)
            shop.open_round((key, 1), chain.ledger.state.jobs.jobs[key], False)
            await began.wait()
            shop.close_round((key, 1))
            for _ in range(3):
                chain.play(key)
            prune(key, 4, spec)
            assert not chain.host.round_directory(key, 1).exists()
            released.set()
            nursery.cancel_scope.cancel()  # waits for the thread, and raises its error
    assert chain.host.round_directory(key, 4).exists()
    chain.close()


def test_figures_are_told_in_words() -> None:
    assert _figure("held_out_bits_per_byte", 2.5, 3, "nats/token") == "before round 4: held-out loss 2.500 bits/byte"
    assert _figure("worker_seconds", 1.25, 3, "nats/token") == "in round 4: the worker took 1.2 s"
    assert _figure("training_nats", 1.25, 3, "nats/token") == "in round 4: training loss 1.2500 nats/token"
    assert _figure("training_loss", -0.5, 3, PPO.loss_unit) == "in round 4: training loss -0.5000 (clipped surrogate)"


# Checks and re-executions ---------------------------------------------------------------------------------------------


class Judge(Busy):
    """A role that proposes nothing. Each re-execution begins at once, and ends when the test ends it."""

    def __init__(self, error: Exception | None = None, checks: Verdict = Verdict.ACCEPT) -> None:
        super().__init__()
        self.error, self.checks = error, checks
        self.checked, self.reexecuted = list[bytes](), list[bytes]()
        self.done = trio.Event()

    async def propose(self, round: OpenRoundContext) -> None:
        return

    async def check_proposal(self, round: OpenRoundContext, signed: Signed, proposal: Proposal) -> Verdict:
        assert signed.signer not in self.checked
        self.checked.append(signed.signer)
        return self.checks

    async def reexecute(self, round: OpenRoundContext, trainer: bytes, proposal: Proposal) -> Verdict:
        self.reexecuted.append(trainer)
        await round.record_replay_start(trainer)
        try:
            await self.done.wait()
        except trio.Cancelled:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return Verdict.ACCEPT


class OneRound:
    """The first round of a job, with its workshop at the first person. `turn` stands for the driver."""

    def __init__(self, chain: Chain, role: Judge) -> None:
        self.chain, self.role, self.key, self.now = chain, role, chain.start(LANGUAGE), 0.0
        self.job = chain.ledger.state.jobs.jobs[self.key]
        self.rounds = OpenRounds(chain.people[0], chain.id, {})
        self.shop = shop_of(chain, role, self.rounds, self._call)
        self.sent = list[Signed]()

    async def _call(self, action: Callable[[], RoundEffects | None]) -> None:
        action()
        await self.turn()

    async def turn(self) -> None:
        self.sent += self.rounds.sign_due_messages(self.now).sends
        self.shop.judge_proposals()
        await trio.lowlevel.checkpoint()

    def open(self) -> None:
        self.rounds.apply_state(self.chain.ledger.state)
        self.rounds.open_round(self.key, self.job, self.now, {}, LANGUAGE.proposal_seconds)
        self.shop.open_round((self.key, 0), self.job, False)

    def renew(self) -> None:
        """Apply a later block that gives the round to the same peers again."""
        state = self.chain.ledger.state
        self.job = replace(self.job, opened_height=state.height + 1)
        self.rounds.apply_state(state.with_modules(jobs=replace(state.jobs, jobs={self.key: self.job})))
        self.rounds.open_round(self.key, self.job, self.now, {}, LANGUAGE.proposal_seconds)
        self.shop.close_round((self.key, 0))
        self.shop.open_round((self.key, 0), self.job, False)

    async def hear(self, signed: Signed) -> None:
        message: Any = codec.decode_message(signed.body, (Proposal, Vouch, Ballot))
        self.rounds.receive_message(signed, message, self.now)
        await self.settle()

    async def settle(self) -> None:
        await self.turn()
        await trio.testing.wait_all_tasks_blocked()

    async def finish_reexecutions(self) -> None:
        self.role.done.set()
        await self.settle()

    def proposal(self, trainer: Identity) -> Signed:
        return self.chain.proposal(self.key, trainer)

    def unsure(self, voter: Identity, proposal: Signed) -> Signed:
        judgement = Judgement(proposal.signer, signed_body_digest(proposal), Verdict.UNJUDGED)
        return sign_message(voter, self.chain.id, Vouch(self.key, 0, (judgement,)))

    def place(self, trainer: Identity) -> int:
        """Return this peer's index in the order of re-executors for a proposal of this trainer."""
        return self.rounds.books[self.key].vouching.vouches.reexecutors(trainer.public).index(self.chain.people[0].public)

    def at(self, place: int) -> Identity:
        return next(person for person in self.chain.people[1:] if self.place(person) == place)

    @property
    def said(self) -> list[Ballot | Vouch]:
        return [codec.decode_message(signed.body, (Ballot, Vouch)) for signed in self.sent]

    def verdicts(self, kind: type[Ballot | Vouch]) -> dict[bytes, Verdict]:
        found = [message for message in self.said if isinstance(message, kind)]
        return {judgement.trainer: judgement.verdict for message in found for judgement in message.judgements}


@asynccontextmanager
async def one_round(folder: Path, role: Judge) -> AsyncIterator[OneRound]:
    chain = Chain(folder / "chain")
    try:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                made = OneRound(chain, role)
                await nursery.start(made.shop.run)
                made.open()
                await trio.testing.wait_all_tasks_blocked()
                yield made
                nursery.cancel_scope.cancel()
    finally:
        chain.close()


@pytest.fixture
def role() -> Judge:
    return Judge()


async def test_each_proposal_is_checked_once_and_re_executed_where_this_voter_is_called(tmp_path: Path, role: Judge) -> None:
    async with one_round(tmp_path, role) as made:
        others = made.chain.people[1:]
        for person in others:
            await made.hear(made.proposal(person))
        for _ in range(3):
            await made.settle()
        assert sorted(role.checked) == [person.public for person in others]
        assert role.reexecuted == [made.at(0).public]
        await made.finish_reexecutions()
        assert made.verdicts(Vouch) == {made.at(0).public: Verdict.ACCEPT}
        await made.settle()
        assert len(role.checked) == 3 and len(role.reexecuted) == 1


async def test_a_voter_begins_when_the_vouch_of_another_calls_it(tmp_path: Path, role: Judge) -> None:
    async with one_round(tmp_path, role) as made:
        signed = made.proposal(made.at(1))
        await made.hear(signed)
        assert role.checked == [signed.signer] and role.reexecuted == []
        first, *_ = made.rounds.books[made.key].vouching.vouches.reexecutors(signed.signer)
        await made.hear(made.unsure(next(person for person in made.chain.people if person.public == first), signed))
        assert role.reexecuted == [signed.signer]


async def test_a_voter_that_is_called_rejects_a_proposal_that_fails_its_checks_without_re_execution(
    tmp_path: Path,
) -> None:
    """A liar causes the same vote, since its checks fail for each honest proposal."""
    role = Judge(checks=Verdict.REPLAY)
    async with one_round(tmp_path, role) as made:
        for person in made.chain.people[1:]:
            await made.hear(made.proposal(person))
        assert len(role.checked) == 3 and role.reexecuted == []
        assert made.verdicts(Vouch) == {made.at(0).public: Verdict.REPLAY}


async def test_a_re_execution_goes_on_after_the_ballot(tmp_path: Path, role: Judge) -> None:
    async with one_round(tmp_path, role) as made:
        trainer = made.at(0)
        await made.hear(made.proposal(trainer))
        made.now = made.rounds.books[made.key].cut_off_due_at
        await made.settle()
        assert made.verdicts(Ballot) == {trainer.public: Verdict.UNJUDGED} and made.verdicts(Vouch) == {}
        await made.finish_reexecutions()
        assert role.cancelled == 0
        assert made.verdicts(Vouch) == {trainer.public: Verdict.ACCEPT}


async def test_a_voter_whose_re_execution_fails_is_unsure(tmp_path: Path) -> None:
    role = Judge(WorkerFailed("no memory"))
    async with one_round(tmp_path, role) as made:
        trainer = made.at(0)
        await made.hear(made.proposal(trainer))
        await made.finish_reexecutions()
        assert made.verdicts(Vouch) == {trainer.public: Verdict.UNJUDGED} and role.reexecuted == [trainer.public]
        (warning,) = made.shop.disk_space.events.newest_events(10)
        assert warning.text == "re-executing in round 1 failed: no memory"


async def test_a_re_execution_ends_with_its_round(tmp_path: Path, role: Judge) -> None:
    async with one_round(tmp_path, role) as made:
        await made.hear(made.proposal(made.at(0)))
        made.shop.close_round((made.key, 0))
        await trio.testing.wait_all_tasks_blocked()
        assert role.cancelled == 1
        await made.finish_reexecutions()
        assert made.said == [] and len(role.reexecuted) == 1


async def test_a_re_execution_begins_again_after_a_renewal(tmp_path: Path, role: Judge) -> None:
    async with one_round(tmp_path, role) as made:
        trainer = made.at(0)
        await made.hear(made.proposal(trainer))
        made.renew()
        await made.settle()
        assert role.checked == [trainer.public], "the result of the check is kept"
        assert role.cancelled == 1 and role.reexecuted == [trainer.public] * 2
        await made.finish_reexecutions()
        assert made.verdicts(Vouch) == {trainer.public: Verdict.ACCEPT}
