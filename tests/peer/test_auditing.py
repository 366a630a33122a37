"""Sampled audits between whole peers in one process. The workers compute with numpy."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from consensus.block import decode_header
from demo.lying_trainer import Liar
from ledger.audits import sortition
from ledger.audits.audit_state import (
    FALSE_CHALLENGES_MAX,
    AuditDuty,
    AuditResult,
    JobAudits,
    MemberAuditRecord,
    audit_duties,
    auditable_proposals_of_others,
    proposals_to_serve,
)
from ledger.audits.loss_commitments import LossOpening
from ledger.core.genesis import TRAINER
from ledger.ledger_state import LedgerState
from peer.roles import voter
from peer.roles.trainer import Trainer
from peer.roles.voter import fetch_audit_data
from peer.runtime import audit_scheduler, auditor
from peer.runtime.audit_scheduler import WithheldDeadlines
from peer.runtime.auditor import RETRY_SECONDS, AuditedProposals, Auditor, describe_audit_entry, suspension_reason
from peer.runtime.driver import Driver
from peer.runtime.transaction_submitter import TransactionSubmitter
from protocol.errors import MissingBlobError, UserError
from protocol.identity import peer_id, short_id
from protocol.limits import AUDIT_RESPONSE_MS, BLOB_PART_BYTES
from protocol.messages import GetBlob, NoBlob
from protocol.verdicts import ReplayFinding
from storage.disk_blob_store import JOB_BYTES, DiskBlobStore
from storage.multipart_objects import MultipartStore
from tests.ledger.court import Court, withheld
from tests.ledger.world import AUDITS, LOSS, PEOPLE, secret_of
from tests.peer import network as network_module
from tests.peer.network import (
    Network,
    Seat,
    accepted,
    assert_same,
    has_finished,
    has_trained,
    network,
    poll,
    service_of,
    settled,
)
from tests.waiting import patience
from training import corpus as data
from training import model_store, worker_protocol
from training.job_spec import AuditMode, InnerStatePolicy, JobSpec
from training.replay import proposal_replay
from training.replay.inner_state import InnerState, OnState
from training.round_context import OpenRoundContext, ReplayResult, RoundContext, audit_owner
from training.transformer import ModelSpec
from transport.network import Priority

pytestmark = pytest.mark.virtual(threads=True)

MODEL = ModelSpec(context=8, width=8, layers=1, heads=2, kv_heads=1, hidden=8)
TEXT = b"Nobody is above the others. " * 40


class Sums:
    """A worker whose updates depend on round, trainer and step alone. It re-executes the first round, before the ballot."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.open_jobs = set[bytes]()
        self.spec: JobSpec | None = None
        self.failures = 0  # the number of coming audits that fail
        self.may_replay = trio.Event()
        self.may_replay.set()

    @property
    def audits(self) -> list[worker_protocol.AuditRequest]:
        """The audits after the first round."""
        return [request for request in self.asked if isinstance(request, worker_protocol.AuditRequest) and request.round]

    async def ask(self, request: Any) -> Any:
        self.asked.append(request)
        if isinstance(request, worker_protocol.OpenJobRequest):
            self.spec = JobSpec.decode(request.spec)
            self.open_jobs.add(request.job)
            return worker_protocol.OpenJobReply(1, 1, 1)
        if isinstance(request, worker_protocol.ProposeRequest):
            return await trio.to_thread.run_sync(proposal_replay.make_proposal, request, self._update)
        if self.failures and request.round:
            self.failures -= 1
            raise OSError("a file went meanwhile")
        if request.round:
            await self.may_replay.wait()
        return await trio.to_thread.run_sync(proposal_replay.audit_proposal, request, self._update)

    def _update(
        self,
        parameters: Any,
        job: bytes,
        round: int,
        trainer: bytes,
        inner: InnerState | None,
        on_state: OnState | None,
        **_: object,
    ) -> tuple[Any, Sequence[float]]:
        assert self.spec is not None
        steps = range(self.spec.local_steps)
        moved = [np.random.default_rng([round, trainer[0], step]).standard_normal(len(parameters)) for step in steps]
        if on_state is not None:
            before = inner or InnerState.fresh(self.spec)
            moments = before.moments + np.float32(1 + trainer[0] / 256)  # different moments for each trainer
            on_state(parameters, InnerState(before.steps + len(steps), moments))
        return -sum(moved).astype(np.float32), [loss_of(round, trainer, step) for step in steps]


def loss_of(number: int, trainer: bytes, step: int) -> float:
    return 3.0 - number / 1_000 + trainer[0] / 1_000 + step / 7


ENDLESS = 400  # rounds; a suspension is visible only while the job runs, and a busy machine looks late
SPEC = JobSpec(
    name="sums",
    model=MODEL,
    rounds=3,  # nothing is drawn in the first round, which is re-executed before the ballot
    local_steps=5,
    batch=1,
    micro_batch=1,
    outer_rate=0.1,
    initial_norm=1e6,
    byzantine_max=1,
    audit=AuditMode.SAMPLED,
    auditors=6,  # half of them in early rounds
    audit_window=40,  # rounds are very short here
    held_out_permille=0,
    uplink_mbit_min=1_000,  # leaves audits no time beside their rounds
)


@pytest.fixture(autouse=True)
def links_that_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows last as long as their rounds."""
    monkeypatch.setattr(model_store, "AUDIT_RESPONSE_MS", 0)


@pytest.fixture
def links_that_take_their_time(links_that_answer_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows last at least half a minute, so after a job's last round they end by time alone."""
    monkeypatch.setattr(model_store, "AUDIT_RESPONSE_MS", AUDIT_RESPONSE_MS)


class LateLiar(Liar):
    """A trainer that is honest in the first round, so that the others wait for it in the next one."""

    async def propose(self, round: OpenRoundContext) -> None:
        await (super() if round.number else super(Liar, self)).propose(round)


class Trainers(Network):
    """Four founders with workers. The last one may lie."""

    workers: dict[bytes, Sums]

    def role(self, seat: Seat, attack: str = "") -> Trainer:
        worker, texts = self.workers.setdefault(seat.public, Sums()), seat.folder / "texts"
        seat.folder.mkdir(exist_ok=True)
        texts.mkdir(exist_ok=True)
        return LateLiar(worker, texts, attack=attack) if attack else Trainer(worker, texts)  # type: ignore[arg-type]

    async def train(self, spec: JobSpec) -> bytes:
        keep = self.seats[0].blobs.add_bytes
        spec = replace(spec, data=keep(data.split_into_shards(iter([TEXT]), keep).encode())).validated()
        return await self.seats[0].start_job(spec)


@asynccontextmanager
async def trainers(folder: Path, attack: str = "") -> AsyncIterator[Trainers]:
    async with network(folder, founders=4, start=False, roles=(TRAINER,)) as made:
        made.__class__ = Trainers
        assert isinstance(made, Trainers)
        made.workers = {}
        for number, seat in enumerate(made.seats):
            await made.start(seat, made.role(seat, attack if number == 3 else ""))
        yield made


async def trained_with_reports_of(made: Trainers, auditor: Seat) -> bytes:
    """Return a trained job with open audit duties of this auditor. An auditor draws nothing in rounds that are closed without its
    ballot, so another job may precede.
    """
    while True:
        job = await made.train(SPEC)
        await made.seats[0].until(has_trained(job))
        if any(due.job == job for due in audit_duties(auditor.public, made.seats[0].driver.state)):
            return job


async def ended(made: Trainers, job: bytes) -> None:
    for seat in made.seats:
        await seat.until(settled(job))
    assert_same(made.seats)


def results(seat: Seat) -> list[AuditResult]:
    return [entry.result for entry in seat.driver.state.audits.log]


def standing(made: Trainers, number: int) -> MemberAuditRecord:
    return made.seats[0].driver.state.audits.member_records.get(made.seats[number].public, MemberAuditRecord())


@pytest.mark.usefixtures("links_that_take_their_time")
@pytest.mark.parametrize("steps", [1, 5])
async def test_every_drawn_proposal_of_honest_trainers_is_replayed_and_passes(tmp_path: Path, steps: int) -> None:
    async with trainers(tmp_path) as made:
        await ended(made, await made.train(replace(SPEC, local_steps=steps)))
        assert set(results(made.seats[0])) == {AuditResult.PASSED}
        standings = [standing(made, number) for number in range(4)]
        assert sum(of.reports for of in standings) == len(results(made.seats[0])) > 4
        assert [(of.rewards, of.rewards_lost, of.suspensions, of.lapsed) for of in standings] == [(SPEC.rounds, 0, 0, 0)] * 4
        assert {entry.round for entry in made.seats[0].driver.state.audits.log} == {1, 2}, "the first round was re-executed"
        received = made.seats[0].network.traffic()
        assert 0 < received.audit_bytes_received <= received.blobs_received
        assert received.audit_bytes_sent > 0


@pytest.mark.usefixtures("links_that_take_their_time")
@pytest.mark.large
@pytest.mark.parametrize(
    "how",
    [
        {"audit": AuditMode.FULL, "local_steps": 1, "uplink_mbit_min": 2, "inner_state": InnerStatePolicy.KEEP},
        {"local_steps": 2, "uplink_mbit_min": 100},
    ],
    ids=str,
)
async def test_what_is_larger_than_a_part_is_audited_like_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Inner states and buffers of several parts are audited too."""
    monkeypatch.setattr(network_module, "SECONDS_MAX", 300.0)
    took, came = MultipartStore.store_part, list[bytes]()
    monkeypatch.setattr(MultipartStore, "store_part", lambda folder, part, *file: (came.append(part), took(folder, part, *file)))
    model = replace(MODEL, vocabulary=256, width=512, heads=4, kv_heads=4, layers=7, hidden=1024)
    assert model.parameters > BLOB_PART_BYTES
    async with trainers(tmp_path) as made:
        job = await made.train(replace(SPEC, model=model, **how))
        await ended(made, job)
        assert set(accepted(made.seats[0], job)) == {seat.public for seat in made.seats}
        state = made.seats[0].driver.state
        assert not [describe_audit_entry(entry, state) for entry in state.audits.log if entry.result is not AuditResult.PASSED]
        assert len(came) >= 8, "two parts of a state, or more, at each of four"


@pytest.mark.long
async def test_an_auditor_that_replays_nothing_is_suspended_by_the_losses_that_trainers_open(tmp_path: Path) -> None:
    async with trainers(tmp_path, "lazy") as made:
        job = await made.train(replace(SPEC, rounds=ENDLESS, audit_window=8))
        for seat in made.seats:
            await seat.until(lambda driver: bool(driver.state.audits.suspensions_in(job)))
        lazy, state = made.seats[3].public, made.seats[0].driver.state
        assert set(state.audits.suspensions_in(job)) == {lazy}
        assert state.audits.jobs[job].suspension_causes[lazy].result is AuditResult.LAZY
        assert [standing(made, number).wrong_losses for number in range(3)] == [0] * 3
        assert standing(made, 3).reports <= 60 and standing(made, 3).wrong_losses >= 2
        await made.seats[0].event("audit", "is suspended: more trainers contradict its reported losses")
        await made.seats[3].event("warning", "its audits reported other losses")


@pytest.mark.long
async def test_losses_that_were_lost_are_not_opened_and_cost_rewards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trainers(tmp_path) as made:
        kept = voter.save_opening

        def keep(folder: Path, opening: LossOpening) -> None:
            if folder.parent != made.seats[3].folder:
                kept(folder, opening)

        monkeypatch.setattr(voter, "save_opening", keep)
        monkeypatch.setattr(model_store, "AUDIT_RESPONSE_MS", 0)  # otherwise it has half a minute to open them
        job = await made.train(replace(SPEC, rounds=ENDLESS, audit_window=4))
        for seat in made.seats[:3]:
            await seat.until(lambda driver: standing(made, 3).rewards_lost > 2)
        assert not made.seats[0].driver.state.audits.suspensions_in(job)
        # Without half a minute an honest opening may be late on a busy machine.
        assert max(standing(made, number).rewards_lost for number in range(3)) < standing(made, 3).rewards_lost


async def test_an_audit_that_waits_for_the_worker_keeps_no_other_from_fetching(tmp_path: Path) -> None:
    """Otherwise the delay would be held against the trainer, which has served all requests."""
    async with trainers(tmp_path) as made:
        seat = made.seats[0]
        worker = made.workers[seat.public]
        worker.may_replay = trio.Event()
        await made.train(replace(SPEC, rounds=ENDLESS))
        await seat.until(lambda driver: max(Counter(key[2] for key in seat.auditing._fetched).values(), default=0) > 2)
        assert len(worker.audits) == 1, "one at a time, and it is not over"
        worker.may_replay.set()


async def test_every_peer_says_at_the_start_what_link_sampled_audits_need(tmp_path: Path) -> None:
    async with trainers(tmp_path) as made:
        await made.train(replace(SPEC, rounds=1))
        for seat in made.seats:
            await seat.event("warning", "needs a steady uplink")


async def test_a_lie_in_the_last_rounds_is_refused_before_the_vote_and_honest_work_is_not(tmp_path: Path) -> None:
    async with trainers(tmp_path, "false-update") as made:
        job = await made.train(replace(SPEC, final_full_audit_rounds=2))
        await ended(made, job)
        found = made.seats[0].driver.state.jobs.jobs[job]
        assert {who for who, of in found.rejected.items() if "replay" in of} == {made.seats[3].public}
        assert [found.accepted[seat.public] for seat in made.seats] == [*[SPEC.rounds] * 3, 1] and not found.undone_rounds


@pytest.mark.usefixtures("links_that_take_their_time")
async def test_a_scratch_job_is_audited_without_any_worker(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        job = await made.seats[1].start_job(rounds=3, audit=AuditMode.SAMPLED, audit_window=40)
        for seat in made.seats:
            await seat.until(settled(job))
        assert set(results(made.seats[0])) == {AuditResult.PASSED}


@pytest.mark.parametrize(
    ("attack", "found"),
    [
        ("false-update", {ReplayFinding.MISMATCH}),
        ("false-pass", {ReplayFinding.MISMATCH}),
        ("free-rider", {ReplayFinding.MISMATCH}),
        ("sign-flip", {ReplayFinding.MISMATCH}),
        pytest.param("withhold", {ReplayFinding.WITHHELD}, marks=pytest.mark.real("rounds that go on while a fetch waits")),
    ],
)
async def test_who_lies_where_nobody_looks_before_the_vote_is_suspended_by_all_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str, found: set[ReplayFinding]
) -> None:
    monkeypatch.setattr(audit_scheduler, "WITHHELD_SECONDS_MIN", 0.5)
    spec = replace(SPEC, rounds=ENDLESS, audit_window=4 if attack == "withhold" else 40, auditors=4)
    async with trainers(tmp_path, attack) as made:
        job = await made.train(spec)
        for seat in made.seats:
            await seat.until(lambda driver: bool(driver.state.audits.suspensions_in(job)))
        # The log forgets causes within some rounds.
        causes = [seat.driver.state.audits.jobs[job].suspension_causes for seat in made.seats]
        ((trainer, entry),) = causes[0].items()
        assert trainer == entry.trainer == made.seats[3].public and {entry.finding} == found
        assert entry.result is AuditResult.SUSPENDED and causes == [{trainer: entry}] * 4, "at one height, too"
        assert {standing(made, number).suspensions for number in range(3)} == {0}
        assert standing(made, 3).suspensions == 1
        told = await made.seats[3].event("warning", "suspended until round")
        assert f"replay {entry.finding.label if entry.finding else ''} found by" in told
        assert suspension_reason(made.seats[3].public, made.seats[0].driver.state) in told
        assert made.seats[0].driver.state.audits.suspensions_in(job)


@pytest.mark.parametrize(
    ("window", "patience"), [(2, [2, 3, 4]), (3, [2, 3, 4, 5]), (4, [3, 3, 4, 5, 6]), (5, [4, 4, 4, 5, 6, 7])]
)
def test_whoever_begins_an_audit_waits_for_a_round_or_until_it_lapses(window: int, patience: list[int]) -> None:
    """An auditor drawn late, or after a restart, may begin in each round of the window, and after the last one."""
    due = AuditDuty(b"", 7, b"", None, False, 7)  # type: ignore[arg-type]
    assert [audit_scheduler.withheld_deadline_round(due, window, 7 + begun) - 7 for begun in range(1, window + 2)] == patience


def test_a_window_of_one_round_leaves_no_such_time() -> None:
    assert audit_scheduler.withheld_deadline_round(AuditDuty(b"", 7, b"", None, False, 7), 1, 8) == 8  # type: ignore[arg-type]


async def test_seconds_in_which_an_auditor_has_no_processor_are_held_against_nobody(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, sleep, me, key = [0.05, 0.5, 0.5], trio.sleep_until, bytes(32), (b"job", 1, b"trainer", False)
    monkeypatch.setattr(trio, "sleep_until", lambda at: sleep(at + (late.pop() if late else 0.0)))
    members = SimpleNamespace(round_voters=(me,), current_key=lambda of: of)
    signer, network = SimpleNamespace(public=me), SimpleNamespace(connected_peers=dict)
    driver = SimpleNamespace(state=SimpleNamespace(members=members), network=network, signer=signer)
    turns = SimpleNamespace(fetching={key}, add_waited_seconds=lambda *_: None)
    double: Any = SimpleNamespace(_driver=driver, is_behind=False, _scheduler=turns)
    began = trio.current_time()
    await WithheldDeadlines._wait_requested_seconds(double, key, 3.0)
    assert trio.current_time() - began == pytest.approx(2 * 1.5 + 1.05 + 2.0)


async def test_an_audit_that_is_due_late_finds_what_is_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(me: bytes, state: LedgerState) -> list[AuditDuty]:
        return [due if due.is_dispute else replace(due, since=due.since - SPEC.audit_window) for due in audit_duties(me, state)]

    monkeypatch.setattr(auditor, "audit_duties", late)
    async with trainers(tmp_path, "false-update") as made:
        job = await made.train(replace(SPEC, rounds=ENDLESS, auditors=4))
        await made.seats[0].until(lambda driver: bool(driver.state.audits.suspensions_in(job)))


async def test_an_audit_that_is_due_late_calls_nothing_withheld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is an audit drawn for rounds without the auditor's ballot, since honest states would have two seconds to arrive."""
    window = 6

    def late(me: bytes, state: LedgerState) -> list[AuditDuty]:
        return [due for due in audit_duties(me, state) if state.jobs.jobs[due.job].round > due.since + window - 1]

    monkeypatch.setattr(auditor, "audit_duties", late)
    monkeypatch.setattr(audit_scheduler, "WITHHELD_SECONDS_MIN", 0.0)
    async with trainers(tmp_path, "withhold") as made:
        job = await made.train(replace(SPEC, rounds=ENDLESS, auditors=4, audit_window=window))
        await made.seats[0].until(lambda driver: driver.state.jobs.jobs[job].round >= 11)
        assert AuditResult.LAPSED in results(made.seats[0]) and AuditResult.CHALLENGED not in results(made.seats[0])


@pytest.mark.real("rounds that go on while a fetch waits")
async def test_nothing_is_called_withheld_before_the_least_link_had_its_time_however_many_rounds_go_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "AUDIT_RESPONSE_MS", 2_000)
    monkeypatch.setattr(audit_scheduler, "WITHHELD_SECONDS_MIN", 0.0)
    async with trainers(tmp_path, "withhold") as made:
        job, driver = await made.train(replace(SPEC, rounds=ENDLESS, audit_window=2)), made.seats[0].driver
        await made.seats[0].until(lambda driver: bool(driver.state.audits.suspensions_in(job)))
        at = {entry.height: entry for entry in driver.state.audits.log if entry.result is AuditResult.CHALLENGED}
        (height, entry), *_ = sorted(at.items())
        closed = next(item.height for item in driver.store.closed_rounds(ENDLESS) if item.round == entry.round)
        times = [decode_header(driver.store.get_header(of) or b"").time_ms for of in (closed, height)]
        assert times[1] - times[0] >= 2_000 and entry.finding is ReplayFinding.WITHHELD
        assert driver.state.jobs.jobs[job].round > entry.round + 2
        assert {standing(made, number).suspensions for number in range(3)} == {0}


def refuse_reveals(monkeypatch: pytest.MonkeyPatch, seat: Seat, refused: Callable[[bytes], bool]) -> None:
    holder: Any = seat.network._exchange.server  # type: ignore[attr-defined]
    answer = holder.on_get_blob

    def answer_some(peer: bytes, request: GetBlob) -> None:
        if refused(peer) and seat.blobs.is_audit_data(request.digest):
            holder._send(peer, NoBlob(request.digest), Priority.CONTROL)
        else:
            answer(peer, request)

    monkeypatch.setattr(holder, "on_get_blob", answer_some)


@pytest.mark.usefixtures("links_that_take_their_time")
async def test_a_proposal_that_is_shown_to_one_auditor_alone_is_shown_to_the_judges_by_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trainers(tmp_path, "false-update") as made:
        *honest, liar = made.seats
        drawn, finished = set[bytes](), trio.Event()

        def draw_one(tickets: Mapping[bytes, bytes], *_: Any) -> tuple[bytes, ...]:
            """Draw one auditor from those whose ballot closed the round. Any one voter's ballot may be missing."""
            one = () if liar.public in tickets else (min(tickets),)
            drawn.update(one)
            return one

        monkeypatch.setattr(sortition, "draw_auditors", draw_one)
        # The first round, of which nothing is drawn, has all reveals. Trainers accepted there are awaited in the next.
        refuse_reveals(monkeypatch, liar, lambda peer: bool(drawn) and peer not in drawn)
        for seat in honest:
            refuse_reveals(monkeypatch, seat, lambda peer: bool(drawn) and not finished.is_set())
        job = await made.train(replace(SPEC, rounds=2))
        await made.seats[0].until(lambda driver: bool(driver.state.audits.jobs.get(job, JobAudits()).disputes))
        (dispute, *_) = made.seats[0].driver.state.audits.jobs[job].disputes
        (seat,) = [seat for seat in honest if seat.public in dispute.challenges]
        await poll(lambda: (job, dispute.round) not in {key[:2] for key in seat.auditing._running})
        await trio.to_thread.run_sync(seat.driver.round_executor.delete_expired_files)
        finished.set()
        await ended(made, job)
        (entry,) = [entry for entry in made.seats[0].driver.state.audits.log if entry.result is AuditResult.SUSPENDED]
        assert entry.finding is ReplayFinding.MISMATCH and entry.trainer == liar.public
        await poll(lambda: not seat.auditing._shown)


async def test_a_quorum_of_voters_takes_a_job_back_to_an_anchor_and_all_go_on_from_it(tmp_path: Path) -> None:
    async with trainers(tmp_path) as made:
        job = await made.train(replace(SPEC, rounds=ENDLESS, local_steps=5, audit_window=30))
        for seat in made.seats:
            await seat.until(lambda driver: driver.state.jobs.jobs[job].round >= 10)
        services = [service_of(seat) for seat in made.seats]
        with pytest.raises(UserError, match="choose one of @0, @8"):
            await services[0].request_rollback("sums", 5)
        said = [await service.request_rollback("sums", 8) for service in services[:3]]
        assert said[0] == "1 of 3 needed votes to roll back job 'sums' to @8; run this command at other voters, too"
        assert "a quorum of the voters requested a rollback" in said[2]
        (undone,) = made.seats[2].driver.state.jobs.jobs[job].undone_rounds  # the others may not have applied that block
        for seat in made.seats:
            await seat.until(lambda driver: driver.state.jobs.jobs[job].round >= undone.last + 3)
            of = seat.driver.state.jobs.jobs[job]
            assert (undone.first, of.rounds_in_model) == (8, of.round - undone.last - 1 + 8)
        await services[0].cancel_job("sums")
        await ended(made, job)


async def test_after_a_restart_the_round_that_is_open_is_no_time_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The open round may be closed at once."""
    begun: list[int] = []

    def noted(due: AuditDuty, window: int, now: int) -> int:
        begun.append(now)
        return 10_000

    async with trainers(tmp_path) as made:
        away = made.seats[2]
        made.workers[away.public].failures = 10_000  # it still has something to report
        job = await made.train(replace(SPEC, rounds=200))
        # Rounds may be closed without its ballot.
        await away.until(lambda driver: bool([*audit_duties(away.public, driver.state)]))
        for seat in made.seats:
            await seat.stop()
        monkeypatch.setattr(audit_scheduler, "withheld_deadline_round", noted)
        await made.start(away, made.role(away))
        await poll(lambda: bool(begun))
        assert set(begun) == {away.driver.state.jobs.jobs[job].round + 1}


@pytest.mark.usefixtures("links_that_take_their_time")
async def test_a_lie_in_the_last_round_is_found_after_the_jobs_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sortition, "draw_auditors", lambda tickets, *_: (min(tickets),))
    async with trainers(tmp_path, "false-update") as made:
        await ended(made, await made.train(replace(SPEC, rounds=2)))
        assert standing(made, 3).suspensions == 1 and standing(made, 3).rewards == 0
        assert not any(standing(made, number).refuted for number in range(3))


def backwards(worker: Sums) -> Callable[..., tuple[Any, Sequence[float]]]:
    """Return the update of the second round with the opposite sign."""
    honest = worker._update

    def update(*place: Any, **named: Any) -> tuple[Any, Sequence[float]]:
        delta, said = honest(*place, **named)
        _, _, number, *_ = place
        return (-delta if number == 1 else delta), said

    return update


@pytest.mark.usefixtures("links_that_take_their_time")
async def test_of_two_liars_in_a_round_neither_update_stays_in_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with trainers(tmp_path) as made:
        honest = {seat.public for seat in made.seats[:2]}
        monkeypatch.setattr(sortition, "draw_auditors", lambda tickets, *_: tuple(sorted(honest & tickets.keys())))
        for number in (2, 3):
            liar = made.workers[made.seats[number].public]
            monkeypatch.setattr(liar, "_update", backwards(liar))
        job = await made.train(replace(SPEC, rounds=6))  # if one round is closed without its ballot, it draws for it later
        await ended(made, job)
        suspensions = [standing(made, number).suspensions for number in range(4)]
        assert suspensions[:2] == [0, 0] and sum(suspensions) in (1, 2), "the first conviction may end the audit of the second"
        (undone, *_) = made.seats[0].driver.state.jobs.jobs[job].undone_rounds
        assert undone.first <= 1 <= undone.last


@pytest.mark.long
@pytest.mark.usefixtures("links_that_take_their_time")
async def test_after_the_jobs_end_nothing_is_withheld_sooner_than_a_window_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_scheduler, "ENDED_JOB_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(audit_scheduler, "WITHHELD_SECONDS_MIN", 0.0)
    async with trainers(tmp_path) as made:
        seat, rounds, window = made.seats[0], 6, 3
        job = await made.train(replace(SPEC, rounds=rounds, audit_window=window))
        await seat.until(has_finished(job))
        closed = {item.round: item.height for item in seat.driver.store.closed_rounds(rounds)}
        times = [decode_header(seat.driver.store.get_header(closed[number]) or b"").time_ms for number in (2, 5)]
        over = seat.driver.state.jobs.jobs[job]
        deadlines = seat.auditing._deadlines
        assert deadlines._seconds_of(job, over, window) == (times[1] - times[0]) / 1_000 > 0
        begun = decode_header(seat.driver.store.get_header(over.started_height) or b"").time_ms
        assert deadlines._seconds_of(job, over, rounds) == (times[1] - begun) / 1_000, "of all its rounds: since it began"
        monkeypatch.setattr(deadlines, "_seconds_of", lambda key, job, count: 1e6 * count)
        with trio.move_on_after(0.5) as waiting:
            await deadlines._wait_for_round(job, rounds + 1, window)
        assert waiting.cancelled_caught
        monkeypatch.setattr(audit_scheduler, "POST_JOB_AUDIT_HEIGHTS", 0)
        with patience():  # the audits themselves would be over by now
            await deadlines._wait_for_round(job, rounds + 1, window)


async def test_a_suspended_trainer_trains_no_more_in_that_job(tmp_path: Path) -> None:
    async with trainers(tmp_path, "false-update") as made:
        job = await made.train(replace(SPEC, rounds=ENDLESS))
        liar = made.seats[3]
        await liar.until(lambda driver: bool(driver.state.audits.suspensions_in(job)))
        job_then = liar.driver.state.jobs.jobs[job]
        await liar.until(lambda driver: driver.state.jobs.jobs[job].round >= job_then.round + 4)
        proposed = [
            request.round for request in made.workers[liar.public].asked if isinstance(request, worker_protocol.ProposeRequest)
        ]
        assert max(proposed) <= job_then.round
        assert liar.public not in liar.driver.state.jobs.jobs[job].trainers


async def test_who_challenges_honest_work_pays_and_nobody_is_suspended(tmp_path: Path) -> None:
    async with trainers(tmp_path, "false-challenge") as made:
        await made.train(replace(SPEC, auditors=4, rounds=ENDLESS))
        for seat in made.seats:
            await seat.until(lambda driver: AuditResult.REFUTED in [entry.result for entry in driver.state.audits.log])
        assert [standing(made, number).suspensions for number in range(4)] == [0] * 4
        assert standing(made, 3).refuted > 0
        assert [standing(made, number).refuted for number in range(3)] == [0] * 3


@pytest.mark.parametrize(("tolerances", "said"), [(1.5, AuditResult.PASSED), (2.5, AuditResult.CHALLENGED)])
async def test_a_drawn_auditor_does_not_challenge_what_others_might_tolerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tolerances: float, said: AuditResult
) -> None:
    async def off(self: Trainer, round: Any, request: Any) -> ReplayResult:
        return ReplayResult(ReplayFinding.MISMATCH, tolerances * SPEC.replay_tolerance, 0)

    monkeypatch.setattr(Trainer, "replay", off)
    async with trainers(tmp_path) as made:
        await made.train(SPEC)
        await made.seats[0].until(lambda driver: bool(driver.state.audits.log))
        assert results(made.seats[0])[0] is said


@pytest.mark.usefixtures("links_that_take_their_time")
async def test_an_audit_whose_own_worker_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor, "RETRY_SECONDS", 0.05)
    async with trainers(tmp_path) as made:
        worker = made.workers[made.seats[1].public]
        worker.failures = 2
        while worker.failures:
            await ended(made, await made.train(SPEC))
        assert set(results(made.seats[0])) == {AuditResult.PASSED}


async def test_what_an_audit_fetched_is_there_after_the_round_was_closed(tmp_path: Path) -> None:
    """A peer that comes back opens and closes rounds while it audits them."""
    blobs, data = DiskBlobStore(tmp_path / "kept", tmp_path / "passing"), b"a state"
    model: Any = SimpleNamespace(job=b"j" * 32, round=3)

    async def fetch(digest: bytes, size_max: int, sources: Iterable[bytes]) -> None:
        blobs.add_bytes(data)

    await fetch_audit_data(
        RoundContext(b"m" * 32, SPEC, model, tmp_path, blobs, fetch), hashlib.sha256(data).digest(), 100, b"t" * 32
    )
    blobs.release_owner((model.job, model.round))
    blobs.delete_unowned(set())
    assert blobs.size(hashlib.sha256(data).digest()) == len(data)
    blobs.release_owner(audit_owner(model.job, model.round))
    blobs.delete_unowned(set())
    assert blobs.size(hashlib.sha256(data).digest()) is None


@pytest.mark.usefixtures("links_that_take_their_time")
async def test_an_auditor_that_was_away_reports_when_it_is_back(tmp_path: Path) -> None:
    async with trainers(tmp_path) as made:
        away = made.seats[2]
        made.workers[away.public].failures = 10_000  # it reports nothing earlier
        job = await trained_with_reports_of(made, away)
        await away.stop()
        before = standing(made, 2).reports
        made.workers[away.public].failures = 0
        await made.start(away, made.role(away))
        await ended(made, job)
        assert before == 0 < standing(made, 2).reports
        assert set(results(made.seats[0])) == {AuditResult.PASSED}


@pytest.mark.usefixtures("links_that_take_their_time")
async def test_buffers_are_served_while_they_may_be_asked_for_and_deleted_afterwards(tmp_path: Path) -> None:
    async with trainers(tmp_path) as made:
        author = made.seats[1]
        made.workers[made.seats[2].public].failures = 10_000
        job = await trained_with_reports_of(made, made.seats[2])
        await author.until(has_trained(job))
        asked = proposals_to_serve(author.public, author.driver.state)
        assert asked, "seat 2 has not reported"
        for proposal in asked:
            assert proposal.buffer is not None
            assert author.blobs.size(proposal.buffer) is not None
        made.workers[made.seats[2].public].failures = 0
        await made.seats[2].stop()
        await made.start(made.seats[2], made.role(made.seats[2]))
        await ended(made, job)
        for seat in made.seats:
            await poll(lambda seat=seat: seat.blobs.retained_rounds() == [])  # type: ignore[misc]
            await poll(lambda seat=seat: list((seat.folder / "buffers").iterdir()) == [])  # type: ignore[misc]


async def test_a_trainer_that_starts_again_shows_its_buffers_but_for_one_that_its_disk_has_damaged(tmp_path: Path) -> None:
    async with trainers(tmp_path) as made:
        author, asking = made.seats[1], made.seats[2]
        await made.train(UNDRAWN)
        await author.until(lambda driver: len(proposals_to_serve(author.public, driver.state)) > 2)
        await author.stop()
        damaged, other = (of.buffer for of in proposals_to_serve(author.public, author.driver.state)[:2])
        assert damaged is not None and other is not None and not asking.blobs.size(damaged) and not asking.blobs.size(other)
        author.blobs.path(damaged).write_bytes(b"torn")
        await made.start(author, made.role(author))
        await poll(lambda: author.blobs.size(other) is not None)
        assert author.blobs.size(damaged) is None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asking.network.fetch_blob, damaged, 1 << 20, (author.public,))
            with patience():
                await asking.network.fetch_blob(other, 1 << 20, (author.public,))
            nursery.cancel_scope.cancel()
        assert author.public in asking.network.connected_peers(), "it answers that it does not have the damaged one"


async def test_where_nothing_is_drawn_the_buffers_go_with_the_window(tmp_path: Path) -> None:
    async with trainers(tmp_path) as made:
        job = await made.train(replace(SPEC, audit_rate=1e-9, audit_window=2, rounds=8))
        await made.seats[0].until(lambda driver: driver.state.jobs.jobs[job].round >= 4)
        kept = [number for _, number in made.seats[0].blobs.retained_rounds()]
        assert {2, 3} <= set(kept), "somebody may volunteer for them"
        await poll(lambda: not {0, 1} & {number for _, number in made.seats[0].blobs.retained_rounds()})
        await ended(made, job)
        for seat in made.seats:
            await poll(lambda seat=seat: seat.blobs.retained_rounds() == [])  # type: ignore[misc]
        assert results(made.seats[0]) == []


# Volunteers -----------------------------------------------------------------------------------------

UNDRAWN = replace(SPEC, audit_rate=1e-9, local_steps=8, rounds=200, audit_window=100)


async def volunteering(seat: Seat, *trainers: bytes) -> None:
    """Wait until this seat may volunteer for proposals of these trainers."""
    await seat.until(
        lambda driver: {due.trainer for due in auditable_proposals_of_others(seat.public, driver.state)} >= set(trainers)
    )


@pytest.mark.parametrize("steps", [1, 8])
async def test_a_person_has_a_round_re_executed_and_all_confirm_what_is_false(tmp_path: Path, steps: int) -> None:
    async with trainers(tmp_path, "false-update") as made:
        job = await made.train(replace(UNDRAWN, local_steps=steps))
        asked, liar = made.seats[0], made.seats[3].public
        await volunteering(asked, liar)
        with patience():
            told = await service_of(asked).challenge_trainer(peer_id(liar), None)
        assert told.startswith(f"{short_id(asked.public)} challenges {short_id(liar)} in round ")
        assert "(mismatch); " in told and "% of its length" in told
        for seat in made.seats:
            await seat.until(lambda driver: bool(driver.state.audits.suspensions_in(job)))
        assert set(made.seats[0].driver.state.audits.suspensions_in(job)) == {liar}
        assert standing(made, 0).upheld == 1 and not any(standing(made, number).refuted for number in range(3))


@pytest.mark.parametrize(("attack", "found"), [("false-update", ReplayFinding.MISMATCH), ("withhold", ReplayFinding.WITHHELD)])
async def test_a_lie_that_nobody_drew_is_found_once_the_loss_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str, found: ReplayFinding
) -> None:
    """A peer that sees the jump volunteers, and is drawn for the last rounds. A falling loss causes no re-execution."""
    jump = 12
    # The loss continues to rise, since a jump would be over before slow audits notice it.
    monkeypatch.setitem(globals(), "loss_of", lambda number, *_: 2.0 + (number if number >= jump else -number / 1_000))
    monkeypatch.setattr(audit_scheduler, "WITHHELD_SECONDS_MIN", 0.5)
    async with trainers(tmp_path, attack) as made:
        job = await made.train(UNDRAWN)
        liar = made.seats[3].public
        for seat in made.seats:
            await seat.until(lambda driver: bool(driver.state.jobs.jobs[job].undone_rounds))
        await made.seats[0].event("audit", "the training loss jumped in round")
        assert min(request.round for seat in made.seats for request in made.workers[seat.public].audits) >= jump // 2
        undone, *_ = made.seats[0].driver.state.jobs.jobs[job].undone_rounds
        assert undone.trainer == liar and undone.first == 8
        await made.seats[0].event("audit", f"({found.label})")
        assert {standing(made, number).refuted for number in range(3)} == {0}


async def test_a_person_has_honest_rounds_re_executed_one_after_the_other(tmp_path: Path) -> None:
    async with trainers(tmp_path) as made:
        job = await made.train(UNDRAWN)
        asked, trainer = made.seats[0], made.seats[3].public
        await volunteering(asked, trainer, made.seats[2].public)
        service = service_of(asked)
        with patience():
            told = await service.challenge_trainer(peer_id(trainer), None)
            (entry,) = (entry for entry in asked.driver.state.audits.log if entry.trainer == trainer)
            assert told == f"{short_id(asked.public)} re-executed {short_id(trainer)} in round {entry.round + 1}: passed; " + (
                "the re-executed update differs by 0 % of its length (tolerance 0.2 %)"
            )
            await asked.until(lambda driver: driver.state.jobs.jobs[job].round > entry.round + 1)
            again = await service.challenge_trainer(peer_id(made.seats[2].public), entry.round + 1)
        assert f"{short_id(made.seats[2].public)} in round {entry.round + 2}: passed" in again
        rounds = asked.driver.state.audits.jobs[job].rounds
        assert [number for number, of in rounds.items() if of.volunteers] == [entry.round, entry.round + 1]
        assert not asked.auditing.asked


def test_who_could_not_be_reached_by_too_many_is_told_so_and_not_that_it_was_found_false() -> None:
    court = Court(auditors=6, window=20, suspension_rounds=100)
    for challenger in PEOPLE[1:3]:
        for _ in range(FALSE_CHALLENGES_MAX):
            withheld(court, challenger, PEOPLE[0].public)
    *_, entry = court.state.audits.log
    assert describe_audit_entry(entry, court.state).startswith(f"{short_id(entry.trainer)} is suspended: too many")
    assert suspension_reason(entry.trainer, court.state) == (
        f"suspended until round {court.audits.suspended[entry.trainer] + 1}: too many auditors could not get its buffers"
    )


# Losses, without a network ---------------------------------------------------------------------------------------------------


def parts_of(court: Court, folder: Path) -> tuple[Driver, TransactionSubmitter]:
    """Return person 0's parts on the court's state, with its losses in `folder`."""
    role = SimpleNamespace(worker_client=SimpleNamespace(text_folder=folder))
    nobody = SimpleNamespace(retained_rounds=set, delete_rounds=lambda unasked: None)
    shop = SimpleNamespace(participant=role, delete_expired_files=lambda: None)
    driver: Any = SimpleNamespace(signer=PEOPLE[0], chain_id=court.chain, state=court.state, round_executor=shop, blobs=nobody)
    author: Any = SimpleNamespace()
    return driver, author


def kept_losses(folder: Path, key: bytes, number: int) -> LossOpening:
    opening = LossOpening(key, number, PEOPLE[0].public, secret_of(PEOPLE[0].public, number), LOSS)
    voter.save_opening(folder, opening)
    return opening


async def test_what_a_person_asked_for_goes_before_what_was_drawn(tmp_path: Path) -> None:
    court, turns = Court(), list[bool]()
    court.round()
    due, other = (due for _, due in court.due()[:2])
    audits = Auditor(*parts_of(court, tmp_path))

    @asynccontextmanager
    async def turn(is_first: Callable[[], bool]) -> AsyncIterator[None]:
        audits.asked.append((due.job, due.proposal_key))  # a person may ask during the wait
        turns.append(is_first())
        audits.asked.clear()
        yield

    async def anything(*_: object) -> Any:
        return ReplayResult(ReplayFinding.MATCH)

    audits._replaying = SimpleNamespace(hold=turn)  # type: ignore[assignment]
    audits._driver.round_executor.participant.replay = anything  # type: ignore[method-assign]
    for item in (due, other, replace(other, is_dispute=True)):
        await audits._replay(item, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    assert turns == [True, False, True]


async def test_losses_of_a_round_that_opens_while_files_are_deleted_stay(tmp_path: Path) -> None:
    court = Court()
    first = court.job(court.key).round
    kept_losses(tmp_path, court.key, first)
    court.round(AUDITS.window + 2)  # nobody reported, so no loss of that round will be opened
    audited = AuditedProposals(*parts_of(court, tmp_path))

    def kept_together() -> set[tuple[bytes, int]]:
        return {(court.key[:JOB_BYTES], first)}

    def delete_rounds(unasked: list[tuple[bytes, int]]) -> None:
        court.round()
        audited._driver.state = court.state
        kept_losses(tmp_path, court.key, court.job(court.key).round)

    audited._driver.blobs = SimpleNamespace(retained_rounds=kept_together, delete_rounds=delete_rounds)
    await audited.delete_expired_files()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {voter.opening_path(tmp_path, court.key, court.job(court.key).round, PEOPLE[0].public).name}


async def test_losses_that_are_still_to_be_opened_stay(tmp_path: Path) -> None:
    court = Court()
    first = court.job(court.key).round
    for number in range(first, first + AUDITS.window + 2):
        kept_losses(tmp_path, court.key, number)
        court.round()
        court.report()
    former = LossOpening(court.key, first, PEOPLE[5].public, bytes(32), LOSS)
    voter.save_opening(tmp_path, former)
    voter.save_opening(tmp_path, replace(former, round=99))
    await AuditedProposals(*parts_of(court, tmp_path)).delete_expired_files()
    assert len(list(tmp_path.iterdir())) == AUDITS.window + 3, "also those of another key in such a round"


async def test_an_opening_that_is_refused_is_tried_again_while_it_is_due(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    court, said, failures = Court(), list[object](), 3
    opening = kept_losses(tmp_path, court.key, court.job(court.key).round)
    court.round()
    court.report()
    court.round(AUDITS.window)
    audited = AuditedProposals(*parts_of(court, tmp_path))
    (due,) = court.rules.audits_module.loss_openings_due(PEOPLE[0].public, court.state)

    async def submit(kind: str, content: object, seconds: float) -> None:
        said.append(content)
        if len(said) <= failures:
            raise UserError("not now")

    audited._author.submit = submit  # type: ignore[method-assign,assignment]
    audited._opening = {due}
    await audited._open_loss(due)
    assert said == [opening] * (failures + 1) and not list(tmp_path.iterdir())
    assert trio.current_time() >= (1 + 2 + 4) * RETRY_SECONDS, "each pause is twice the last"

    kept_losses(tmp_path, court.key, due.round)
    failures = 100
    async with trio.open_nursery() as nursery:
        nursery.start_soon(audited._open_loss, due)
        await trio.sleep(RETRY_SECONDS / 2)
        audited._opening = set()
    assert len(said) == 5, "its time is over"


async def test_what_is_fetched_comes_before_patience_ends_or_not_at_all() -> None:

    async def late() -> None:
        await trio.sleep(10)

    async def fetched(seconds: float, error: Exception | None = None) -> Any:
        await trio.sleep(seconds)
        if error is not None:
            raise error
        return "here"

    assert await audit_scheduler.result_before(late, fetched(9)) == "here"
    assert await audit_scheduler.result_before(late, fetched(11)) is None
    for error in (MissingBlobError("gone"), OSError("a shortage")):
        with pytest.raises(type(error)):  # itself, not an exception group
            await audit_scheduler.result_before(late, fetched(1, error))
