"""Sampled audits in the daemon: this peer re-executes the proposals that it was drawn for or has to judge, and reports on them.

The audits that are due follow from the applied state alone (`ledger.audits.audit_state.audit_duties`), so a restart forgets none.
Audits fetch concurrently, so that a trainer that withholds data delays no other trainer's audit. They re-execute one at a time,
because the worker also trains. No task of this module delays a vote.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from ledger.audits.audit_state import (
    LOSS_OPENING_KIND,
    AuditDuty,
    AuditFinding,
    AuditLogEntry,
    AuditResult,
    LossOpeningDuty,
    ProposalKey,
    audit_duties,
    loss_opening_duties,
    proposals_to_serve,
)
from ledger.ledger_state import LedgerState
from peer.node.audit_secrets import AuditSecrets
from peer.roles import voter
from peer.runtime.audit_scheduler import (
    AuditKey,
    AuditScheduler,
    AuditVolunteer,
    WithheldDeadlines,
    audit_key,
    result_before,
)
from peer.runtime.driver import Driver
from peer.runtime.transaction_submitter import TransactionSubmitter
from protocol.errors import FolkmootError, MissingBlobError, RemoteProtocolError, StorageError
from protocol.identity import short_id
from protocol.units import display_round_number
from protocol.verdicts import INVALID_UPDATES_REASON, OBJECTIVE_CODES_FIRST, ReplayFinding, verdict_label
from storage.disk_blob_store import JOB_BYTES
from training.job_spec import JobSpec
from training.round_context import ReplayResult, RoundContext, audit_owner
from training.worker_protocol import AuditRequest

# Least error of a challenge, in multiples of the job's tolerance. A smaller error may be within the tolerance on other machines:
# a faulty trainer could choose it so that honest challenges are refuted. Judges of a dispute use the tolerance itself, so they
# uphold these challenges.
CHALLENGE_MARGIN = 2

log = logging.getLogger("peer")

RETRY_SECONDS = 5.0  # pause of an audit after a failure of this peer's worker or a refused transaction; each failure doubles it
RETRY_SECONDS_MAX = 300.0


class _CannotAudit(FolkmootError):
    """An error: this peer cannot do an audit, now or at all."""


class Auditor:
    """The task that does the sampled audits of this peer. `run` is called once and runs beside the driver."""

    def __init__(self, driver: Driver, author: TransactionSubmitter) -> None:
        self._driver, self._author, self._me = driver, author, driver.signer.public
        self._secrets, self._events = AuditSecrets(driver.signer, driver.chain_id), AuditEventLog(driver)
        self._scheduler = AuditScheduler()
        self._deadlines = WithheldDeadlines(driver, self._scheduler)
        self._running: dict[AuditKey, trio.CancelScope] = {}
        self._fetched = set[AuditKey]()  # running audits that have fetched all data and wait for the worker or a block
        # Failed audit that is still due -> (time of its retry, its last pause).
        self._rests: dict[AuditKey, tuple[float, float]] = {}
        # (job, round) of proposals that this peer found false: judges may fetch their data from this peer
        self._shown: set[tuple[bytes, int]] = set()
        self._has_ended = False  # True if an audit has ended whose files are not yet deleted
        self._replaying = LotteryLock()
        self.asked = list[tuple[bytes, ProposalKey]]()  # (job, key) of proposals that a user wants re-executed first
        # Set when other audits may fetch; set when the audits that are due may have changed.
        self._turned, self._wake = trio.Event(), trio.Event()

    async def run(self) -> None:
        audited = AuditedProposals(self._driver, self._author)
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._wake_when_applied)
            self._nursery.start_soon(AuditVolunteer(self._driver, self._author, self._deadlines).run)
            verify = partial(trio.to_thread.run_sync, self._driver.blobs.verify_retained, abandon_on_cancel=True)
            self._nursery.start_soon(verify)  # checks stored audit data in a task of its own, because it may read many gigabytes
            while True:
                self._wake = trio.Event()
                # Release the data of proposals that no dispute and no running audit needs.
                disputes = {(job, of.round) for job, audits in self._driver.state.audits.jobs.items() for of in audits.disputes}
                for of in self._shown - disputes - {key[:2] for key in self._running}:
                    self._shown.remove(of)
                    self._driver.blobs.release_owner(audit_owner(*of))
                if self._has_ended and not self._running:
                    self._has_ended = False
                    await trio.to_thread.run_sync(self._driver.round_executor.delete_expired_files)
                await audited.delete_expired_files()
                self._events.log_results()
                due = {audit_key(item): item for item in audit_duties(self._me, self._driver.state)}
                for key in self._running.keys() - due.keys():
                    self._running[key].cancel()
                if self._deadlines.note_progress():
                    self._begin_audits(due)
                    audited.open_losses(self._nursery)
                now = trio.current_time()
                with trio.move_on_at(min((at for at, _ in self._rests.values() if at > now), default=math.inf)):
                    await self._wake.wait()

    async def _wake_when_applied(self) -> None:
        while True:
            applied = self._driver.block_applied
            self._wake.set()
            await applied.wait()

    def _begin_audits(self, due: dict[AuditKey, AuditDuty]) -> None:
        state, now = self._driver.state, trio.current_time()
        self._rests = {key: rest for key, rest in self._rests.items() if key in due}
        self._fetched &= due.keys()
        idle = self._fetched | {key for key, (again, _) in self._rests.items() if again > now}
        opened = {key: job.round for key, job in state.jobs.jobs.items()}
        begins = self._scheduler.schedule_audits(due, idle, self._running.keys(), opened, state.members)
        self._turned.set()
        self._turned = trio.Event()
        for key in begins:
            self._running[key] = trio.CancelScope()
            self._nursery.start_soon(self._audit, key, due[key], self._scheduler.take_waited_seconds(key))

    # One audit: download, re-execution, report

    async def _audit(self, key: AuditKey, due: AuditDuty, queued: float) -> None:
        try:
            with self._running[key]:
                past = await self._open_past_round(key, due)
                job = self._driver.state.jobs.jobs.get(due.job)
                if job is None:
                    return  # the ledger has forgotten the job
                late = partial(self._deadlines.wait_until_late, key, due, job, past.spec.audit_window, queued)
                found = await self._download(due, past, late)
                if isinstance(found, AuditRequest):
                    # Other audits of this trainer may fetch now, while this audit waits for the worker or for a block.
                    self._fetched.add(key)
                    self._wake.set()
                    found = await self._replay(due, past, found)
                await self._report(due, past.spec, found)
        except (FolkmootError, OSError) as error:
            # No fault of the disk: the end of another audit may have deleted fetched buffers.
            went = isinstance(error, MissingBlobError)
            if isinstance(error, StorageError) and not went:
                raise
            pause = min(RETRY_SECONDS_MAX, 2 * self._rests.get(key, (0.0, RETRY_SECONDS / 2))[1])
            self._rests[key] = trio.current_time() + pause, pause
            log.info("audit of %s in round %d: %s", short_id(due.trainer), display_round_number(due.round), error)
        finally:
            del self._running[key]
            self._fetched.discard(key)
            if (due.job, due.round) not in (*self._shown, *(key[:2] for key in self._running)):
                self._driver.blobs.release_owner(audit_owner(due.job, due.round))
            self._has_ended = True
            self._wake.set()

    async def _open_past_round(self, key: AuditKey, due: AuditDuty) -> RoundContext:
        driver = self._driver
        try:
            model = await trio.to_thread.run_sync(driver.host.open_verified_model, due.job, due.round)
        except StorageError as error:
            # The model was deleted or damaged, or this peer began with a snapshot of a later round.
            raise _CannotAudit(str(error)) from None
        if model.root != due.proposal.model_root:
            raise _CannotAudit(f"the model of this peer before round {display_round_number(due.round)} has another root")
        directory, fetch = driver.host.round_directory(due.job, due.round), partial(self._fetch_in_turn, key)
        return RoundContext(self._me, model.spec, model, directory, driver.blobs, fetch)

    async def _fetch_in_turn(self, key: AuditKey, digest: bytes, size_max: int, sources: Iterable[bytes]) -> None:
        while key not in self._scheduler.fetching:
            await self._turned.wait()
        await self._driver.network.fetch_blob(digest, size_max, sources)

    async def _download(
        self, due: AuditDuty, past: RoundContext, late: Callable[[], Awaitable[None]]
    ) -> AuditRequest | ReplayResult:
        """Fetch the data of an audit and return the request to the worker.

        Return the finding MALFORMED if the data is invalid, or WITHHELD if a part of the data is missing when `late` returns.
        """
        try:
            request = await result_before(late, voter.audit_request(past, due.trainer, due.proposal))
        except RemoteProtocolError:
            return ReplayResult(ReplayFinding.MALFORMED)
        return request or ReplayResult(ReplayFinding.WITHHELD)

    async def _replay(self, due: AuditDuty, past: RoundContext, request: AuditRequest) -> ReplayResult:
        async with self._replaying.hold(lambda: due.is_dispute or (due.job, due.proposal_key) in self.asked):
            return await self._driver.round_executor.participant.replay(past, request)

    async def _report(self, due: AuditDuty, spec: JobSpec, replayed: ReplayResult) -> None:
        """Submit the result of a re-execution: a verdict in a dispute, otherwise a report.

        The report of a match contains the sealed loss.
        """
        finding, loss, error = replayed.finding, None, replayed.relative_error
        if finding is not ReplayFinding.MATCH:
            self._shown.add((due.job, due.round))
        if not due.is_dispute:
            is_doubtful = spec.replay_tolerance < error <= CHALLENGE_MARGIN * spec.replay_tolerance
            finding = ReplayFinding.MATCH if is_doubtful else finding
            if finding is ReplayFinding.MATCH and replayed.last_loss is not None:
                loss = self._secrets.seal_loss(due, replayed.last_loss)
        said = AuditFinding(due.job, *due.proposal_key, finding, round(1e6 * error), loss)
        kind = "audit/verdict" if due.is_dispute else "audit/report"
        await self._author.submit(kind, said, math.inf)  # submitted without a timeout, because the duration of rounds is unknown


class LotteryLock:
    """A lock whose next holder is drawn by lot.

    In the order of arrival, a trainer could delay its buffers to be audited last each time.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: dict[trio.Event, Callable[[], bool]] = {}  # event of a waiting task -> whether the task has priority

    @asynccontextmanager
    async def hold(self, is_first: Callable[[], bool]) -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        if self._is_held:
            await self._draw(is_first)
        self._is_held = True
        try:
            yield
        finally:
            self._pass_on()

    async def _draw(self, is_first: Callable[[], bool]) -> None:
        self._waiting[drawn := trio.Event()] = is_first
        try:
            await drawn.wait()
        except trio.Cancelled:
            if self._waiting.pop(drawn, None) is None:  # this task was drawn as the next holder before its cancellation
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Draw the next holder. The lock stays locked until that task runs, so that no other task locks it first."""
        self._is_held = bool(self._waiting)
        if self._waiting:
            drawn = random.choice([event for event, is_first in self._waiting.items() if is_first()] or list(self._waiting))
            del self._waiting[drawn]
            drawn.set()


class AuditedProposals:
    def __init__(self, driver: Driver, author: TransactionSubmitter) -> None:
        self._driver, self._author, self._me = driver, author, driver.signer.public
        self._opening: set[LossOpeningDuty] = set()  # openings of losses that have begun, also those that this peer cannot make

    def open_losses(self, nursery: trio.Nursery) -> None:
        """Start a task for each opening of a loss that is newly due."""
        begun, audits = self._opening, self._driver.rules.audits_module
        self._opening = set(audits.loss_openings_due(self._me, self._driver.state))
        for due in self._opening - begun:
            nursery.start_soon(self._open_loss, due)

    async def _open_loss(self, due: LossOpeningDuty) -> None:
        """Submit the opening of a loss, with retries while it is due.

        Without an opening in time, the trainer only loses a reward.
        """
        computing, pause = self._driver.round_executor.participant.worker_client, RETRY_SECONDS
        kept = voter.read_opening(computing.text_folder, due.job, due.round, due.trainer) if computing else None
        while computing is not None and kept is not None and due in self._opening:
            try:
                await self._author.submit(LOSS_OPENING_KIND, kept, math.inf)
                voter.delete_files([voter.opening_path(computing.text_folder, due.job, due.round, due.trainer)])
                return
            except StorageError:
                raise
            except FolkmootError as error:
                log.info("the loss of round %d is not opened yet: %s", display_round_number(due.round), error)
            await trio.sleep(pause)
            pause = min(RETRY_SECONDS_MAX, 2 * pause)

    async def delete_expired_files(self) -> None:
        """Delete buffers that no auditor can request any more, and stored openings of losses that cannot become due.

        The audit window bounds the number of stored rounds. `training.job_spec.AUDIT_BYTES_MAX` bounds their size when a job
        starts.
        """
        # Files are listed before the state is read, so that the files of a round that opens meanwhile stay.
        kept = await trio.to_thread.run_sync(self._driver.blobs.retained_rounds)
        computing = self._driver.round_executor.participant.worker_client
        sealed = await trio.to_thread.run_sync(voter.list_opening_files, computing.text_folder) if computing else ()
        state = self._driver.state
        served, running = proposals_to_serve(self._me, state), state.jobs.unfinished()
        asked = {(proposal.job[:JOB_BYTES], proposal.round) for proposal in served}
        opened = {key[:JOB_BYTES]: job.round for key, job in running.items()}
        unasked = [entry for entry in kept if entry not in asked and entry[1] < opened.get(entry[0], entry[1] + 1)]
        if unasked:
            await trio.to_thread.run_sync(self._driver.blobs.delete_rounds, unasked)
        if sealed:
            mine = {(due.job, due.round) for due in loss_opening_duties(self._me, state)}
            mine |= {(proposal.job, proposal.round) for proposal in served} | {(key, job.round) for key, job in running.items()}
            prefixes = tuple(voter.round_file_prefix(*place) for place in mine)
            unneeded = [path for path in sealed if not path.name.startswith(prefixes)]
            await trio.to_thread.run_sync(voter.delete_files, unneeded)


class AuditEventLog:
    """The writer of events for new entries of the ledger's audit log, and for suspensions of this peer."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._height = driver.state.height  # events were written for entries up to this height
        self._suspended: dict[bytes, int] = {}

    def log_results(self) -> None:
        state, events, me = self._driver.state, self._driver.events, self._driver.signer.public
        for entry in state.audits.log:
            if entry.height > self._height:
                tell = events.add_detail if entry.result is AuditResult.PASSED else events.add
                tell("audit", describe_audit_entry(entry, state), job=entry.job, round=entry.round, peer=entry.trainer)
        self._height = state.height
        suspended = dict(_suspensions(me, state))
        for job, until in suspended.items():
            if self._suspended.get(job) != until:
                events.add(
                    "warning",
                    f"{suspension_reason(me, state)}; this peer does not train {state.jobs.jobs[job].name!r} until then",
                    job=job,
                )
        self._suspended = suspended


def describe_audit_entry(entry: AuditLogEntry, state: LedgerState) -> str:
    """Return a line for people with the result of an audit."""
    auditor, trainer = (short_id(state.members.current_key(key)) for key in (entry.auditor, entry.trainer))
    where = f"{trainer} in round {display_round_number(entry.round)}"
    found = f" ({finding_label(entry, state)})" if entry.finding is not None else ""
    match entry.result:
        case AuditResult.PASSED:
            return f"{auditor} re-executed {where}: passed"
        case AuditResult.CHALLENGED:
            return f"{auditor} challenges {where}{found}"
        case AuditResult.LAPSED:
            return f"{auditor} did not report on {where} in time"
        case AuditResult.SUSPENDED:
            return f"{trainer} is suspended: most auditors confirm the challenge of {auditor}{found}"
        case AuditResult.REFUTED:
            return f"the challenge of {auditor} is refuted: most auditors find no fault with {where}{found}"
        case AuditResult.SHUNNED:
            return f"{trainer} is suspended: too many auditors could not get its buffers, although most find no fault"
        case AuditResult.DROPPED:
            return f"the challenge of {auditor} is dropped: too few auditors judged {where}{found}"
        case AuditResult.WRONG_LOSS:
            return f"{auditor} reported another loss for {where} than {trainer} opened: one of the two is wrong"
        case AuditResult.LAZY:
            return f"{auditor} is suspended: more trainers contradict its reported losses than can be faulty, lastly {where}"


def finding_label(entry: AuditLogEntry, state: LedgerState) -> str:
    """Return the label of an entry's finding, or an empty string without a finding."""
    if entry.finding is None or entry.finding < OBJECTIVE_CODES_FIRST:
        return entry.finding.label if entry.finding is not None else ""
    job = state.jobs.jobs.get(entry.job)
    return verdict_label(entry.finding, JobSpec.decode(job.spec).resolved_objective.reason_labels if job else ())


def _suspensions(person: bytes, state: LedgerState) -> Iterator[tuple[bytes, int]]:
    """Yield (running job, first round in which the member may train again) for each suspension of this member."""
    for key, job in state.jobs.running().items():
        until = max(state.audits.suspensions_in(key).get(person, 0), job.suspended_trainers.get(person, 0))
        if until > job.round:
            yield key, until


def suspension_reason(person: bytes, state: LedgerState) -> str:
    """Return a text with the end and the reason of this member's suspension, or an empty string if the member may train."""
    for job, until in _suspensions(person, state):
        since = f"suspended until round {display_round_number(until)}"
        if state.audits.suspensions_in(job).get(person) != until:
            return f"{since}: {INVALID_UPDATES_REASON}"
        cause = state.audits.jobs[job].suspension_causes[person]
        if cause.result is AuditResult.SHUNNED:
            return f"{since}: too many auditors could not get its buffers"
        if cause.result is AuditResult.LAZY:
            return f"{since}: its audits reported other losses than the trainers"
        found = finding_label(cause, state) or "failed"
        return f"{since}: replay {found} found by {short_id(state.members.current_key(cause.auditor))}"
    return ""
