"""Sampled audits in the daemon: this peer replays the proposals that it was drawn for or has to judge, says what it found, and
keeps its own buffers for others' audits.

The work that is due follows from the applied state alone (`ledger.audits.audit_state.audit_duties`), so a restart forgets
nothing. Audits fetch side by side: a trainer that withholds something holds up no other's audit. They replay one at a time: the
worker has its own training to do. Nothing here delays a vote.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from consensus.block import decode_header
from consensus.quorum import quorum
from ledger.audits.audit_state import (
    LOSS_OPENING_KIND,
    VOLUNTEER_KIND,
    AuditDuty,
    AuditFinding,
    AuditLogEntry,
    AuditResult,
    AuditVolunteering,
    LossOpeningDuty,
    ProposalKey,
    audit_duties,
    loss_opening_duties,
    proposals_to_serve,
)
from ledger.audits.state_machine import POST_JOB_AUDIT_HEIGHTS
from ledger.jobs import Job, JobPhase
from ledger.ledger_state import LedgerState
from peer.node.loss_sealer import LossSealer
from peer.roles import loss_opening_files
from peer.roles.voter import audit_request
from peer.runtime.audits.audit_scheduler import AuditKey, AuditScheduler, audit_key
from peer.runtime.audits.lottery_lock import LotteryLock
from peer.runtime.driver import Driver
from peer.runtime.rounds.loss_spikes import first_spike, most_suspect_round
from peer.runtime.transaction_submitter import TransactionSubmitter
from protocol.errors import FolkmootError, MissingBlobError, RemoteProtocolError, StorageError
from protocol.identity import short_id
from protocol.units import display_round_number
from protocol.verdicts import INVALID_UPDATES_REASON, OBJECTIVE_CODES_FIRST, ReplayFinding, verdict_label
from storage.disk_blob_store import JOB_BYTES
from training.job_spec import JobSpec
from training.round_context import FetchBlob, ReplayResult, RoundContext, audit_owner

# an auditor asks at least so long before it says `withheld`, if earlier audits of that trainer took its time
FETCH_SECONDS_MIN = 10.0
LOOP_DELAY_SECONDS_MAX = 0.1  # by which this process wakes too late where it is not short of a processor: loops of ours take less
RETRY_SECONDS = 5.0  # after this peer's own worker failed, or its transaction was refused; doubled each time
RETRY_SECONDS_MAX = 300.0
# An auditor waits at least so long before it says `withheld`: a holder has a second for its first answer, then the others are
# asked, then the holder again. If a whole window is shorter, the report lapses: a job's pace must suspend nobody.
WITHHELD_SECONDS_MIN = 2.0
# After a job's last round no opening round says that the window ends. An auditor then waits as long as the last rounds took, and
# at least so long: a trainer may need it to start again.
ENDED_JOB_WAIT_SECONDS = 30.0
# An auditor challenges only an error above so many tolerances: a smaller one may be below the tolerance on other machines, and a
# liar could place it there to have honest challenges refuted. Judges use the tolerance itself, so they uphold these challenges.
CHALLENGE_MARGIN = 2

T = TypeVar("T")

log = logging.getLogger("peer")


class _CannotAudit(FolkmootError):
    """This peer cannot do what is due, now or at all."""


class Auditor:
    """`run` it once, beside the driver."""

    def __init__(self, driver: Driver, author: TransactionSubmitter) -> None:
        self._driver, self._author = driver, author
        self._me = driver.signer.public
        self._sealing = LossSealer(driver.signer, driver.chain_id)
        self._opening: set[LossOpeningDuty] = set()  # what this peer is opening, or cannot open
        self._running: dict[AuditKey, trio.CancelScope] = {}
        self._fetched = set[AuditKey]()  # audits that need no more of the trainer; what they say may wait for a block
        self._turns = AuditScheduler()
        self._turned = trio.Event()  # others may fetch now
        # job and round of what was found false here: judges may fetch it from this peer
        self._shown: set[tuple[bytes, int]] = set()
        self._rests: dict[AuditKey, tuple[float, float]] = {}  # by audit that failed and is still due: (again at, last pause)
        self._is_behind = True  # decided blocks are not applied here: this peer cannot tell how long rounds have been open
        self._entered: dict[bytes, int] = {}  # by job, the round that was open when this peer had caught up
        self._replaying = LotteryLock()
        self.asked = list[tuple[bytes, ProposalKey]]()  # jobs and places of proposals that people want replayed first
        self._wake = trio.Event()
        self._has_ended = False  # an audit has, and its files are to be deleted
        self._told = driver.state.height  # entries of the log up to here have been shown to people
        self._suspended: dict[bytes, int] = {}

    async def run(self) -> None:
        self._opening = set()  # a fault of the system may have ended the last run
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._wake_when_applied)
            self._nursery.start_soon(self._volunteer)
            verify = partial(trio.to_thread.run_sync, self._driver.blobs.verify_retained, abandon_on_cancel=True)
            self._nursery.start_soon(verify)  # beside the votes: it may be many gigabytes
            while True:
                self._wake = trio.Event()
                await self._delete_expired_files()
                self._log_results(self._driver.state)
                self._update_running_audits(self._driver.state)
                now = trio.current_time()
                with trio.move_on_at(min((at for at, _ in self._rests.values() if at > now), default=math.inf)):
                    await self._wake.wait()

    async def _wake_when_applied(self) -> None:
        while True:
            applied = self._driver.block_applied
            self._wake.set()
            await applied.wait()

    # Auditing --------------------------------------------------------------------------------------------------------

    def _update_running_audits(self, state: LedgerState) -> None:
        """Begins audits that are due and ends those that are not any more."""
        due = {audit_key(item): item for item in audit_duties(self._me, state)}
        for key in self._running.keys() - due.keys():
            self._running[key].cancel()
        now = trio.current_time()
        waiting = {key: rest for key, rest in self._rests.items() if key in due and rest[0] > now}
        if state.height + 1 < self._driver.replica.height:
            self._is_behind |= state.height + 2 < self._driver.replica.height  # one block is decided while a closing is applied
            return  # a decided block that is not applied yet may have settled what seems due now
        if self._is_behind:
            self._entered = {key: job.round for key, job in state.jobs.unfinished().items()}
            self._is_behind = False
        self._fetched &= due.keys()
        opened, idle = {key: job.round for key, job in state.jobs.jobs.items()}, self._fetched | waiting.keys()
        begins = self._turns.schedule_audits(due, idle, self._running.keys(), opened, state.members)
        self._turned.set()
        self._turned = trio.Event()
        for key in begins:
            self._running[key] = trio.CancelScope()
            self._nursery.start_soon(self._audit, key, due[key], self._turns.take_waited_seconds(key))
        self._rests = {key: rest for key, rest in self._rests.items() if key in due}
        begun, self._opening = self._opening, set(self._driver.rules.audits_module.loss_openings_due(self._me, state))
        for opening in self._opening - begun:
            self._nursery.start_soon(self._open_loss, opening)

    async def _open_loss(self, due: LossOpeningDuty) -> None:
        """Tried again, with pauses, while it is due: what is not opened in time costs a reward, and no more."""
        computing = self._driver.round_executor.participant.worker_client
        kept = loss_opening_files.read_opening(computing.text_folder, due.job, due.round, due.trainer) if computing else None
        pause = RETRY_SECONDS
        while computing is not None and kept is not None and due in self._opening:
            try:
                await self._author.submit(LOSS_OPENING_KIND, kept, math.inf)
                loss_opening_files.delete_files(
                    [loss_opening_files.opening_path(computing.text_folder, due.job, due.round, due.trainer)]
                )
                return
            except StorageError:
                raise
            except FolkmootError as error:
                log.info("the loss of round %d is not opened yet: %s", display_round_number(due.round), error)
            await trio.sleep(pause)
            pause = min(RETRY_SECONDS_MAX, 2 * pause)

    async def _audit(self, key: AuditKey, due: AuditDuty, queued: float) -> None:
        waiting, late = trio.CancelScope(), trio.Event()
        try:
            with self._running[key]:
                past = await self._past_round(due)
                past = replace(past, fetch=partial(self._fetch_in_turn, key, past.fetch))
                job = self._driver.state.jobs.jobs.get(due.job)
                if job is None:
                    return  # nobody awaits it any more
                if not due.is_second_verdict:  # it said `withheld` once
                    begun = job.round + (self._entered.get(due.job) == job.round)
                    until = withheld_deadline_round(due, past.spec.audit_window, begun)
                    opened = partial(self._wait_for_round, due.job, until, past.spec.audit_window)
                    seconds = self._shown_seconds(due, queued)
                    self._nursery.start_soon(
                        self._note_late, waiting, late, opened, partial(self._wait_requested_seconds, key, seconds)
                    )
                replayed = await self._replayed(due, past, late.wait, partial(self._has_fetched, key))
                if replayed.finding is not ReplayFinding.MATCH:
                    self._shown.add((due.job, due.round))
                if not due.is_dispute and _is_doubtful(replayed, past.spec):
                    replayed = replace(replayed, finding=ReplayFinding.MATCH)
                await self._submit_finding("audit/verdict" if due.is_dispute else "audit/report", due, replayed)
        except (FolkmootError, OSError) as error:
            went = isinstance(error, MissingBlobError)  # buffers that were fetched for an audit are deleted after it
            if isinstance(error, StorageError) and not went:
                raise
            self._schedule_retry(key, due, error)
        finally:
            waiting.cancel()
            del self._running[key]
            self._fetched.discard(key)
            self._release(due)

    def _shown_seconds(self, due: AuditDuty, queued: float) -> float:
        """How long this auditor fetches before it says `withheld`: the least link shows the proposal to everybody meanwhile.

        A report has waited so long already for other reports on that trainer, which a trainer can help: it proposes when it has
        time.
        """
        state = self._driver.state
        audits, job = state.audits.jobs.get(due.job), state.jobs.jobs.get(due.job)
        of = audits.rounds.get(due.round) if audits else None
        if of is None or job is None:
            return 0.0
        terms = self._driver.rules.jobs_module.rules.terms_of_spec(job.spec).audits
        assert terms is not None
        served = terms.served_ms(len(of.reexecutors)) / 1_000
        return max(served - queued, min(served, FETCH_SECONDS_MIN))

    async def _fetch_in_turn(
        self, key: AuditKey, fetch: FetchBlob, digest: bytes, size_max: int, sources: Iterable[bytes]
    ) -> None:
        while key not in self._turns.fetching:
            await self._turned.wait()
        await fetch(digest, size_max, sources)

    def _has_fetched(self, key: AuditKey) -> None:
        """Others on this trainer may fetch, while this one waits for the worker, or for a block."""
        self._fetched.add(key)
        self._wake.set()

    async def _note_late(self, waiting: trio.CancelScope, late: trio.Event, *waits: Callable[[], Awaitable[None]]) -> None:
        """Sets `late` when what has not come by then is withheld."""
        with waiting:
            async with trio.open_nursery() as nursery:
                for wait in waits:
                    nursery.start_soon(wait)
            late.set()

    async def _wait_requested_seconds(self, key: AuditKey, seconds: float) -> None:
        """Returns after so many seconds in which this audit could fetch, this peer could hear most voters, and its machine had
        time for it: otherwise its own link is dead, or it cannot take what comes.
        """
        while seconds > 0:
            step = min(1.0, seconds)
            await trio.sleep_until(due := trio.current_time() + step)
            # what has come waits to be read: the trainer cannot help that
            is_late = trio.current_time() > due + LOOP_DELAY_SECONDS_MAX
            voters, heard = self._driver.state.members.round_voters, self._driver.network.connected_peers()
            is_in_touch = sum(other in heard or other == self._me for other in voters) >= quorum(len(voters))
            if is_in_touch and not is_late and not self._is_behind and key in self._turns.fetching:
                # A trainer's uplink shows something of each job side by side.
                current = self._driver.state.members.current_key
                step /= len({of[0] for of in self._turns.fetching if current(of[2]) == current(key[2])})
                self._turns.add_waited_seconds(key, step)
                seconds -= step

    def _schedule_retry(self, key: AuditKey, due: AuditDuty, error: Exception) -> None:
        pause = min(RETRY_SECONDS_MAX, 2 * self._rests.get(key, (0.0, RETRY_SECONDS / 2))[1])
        self._rests[key] = trio.current_time() + pause, pause
        log.info("audit of %s in round %d: %s", short_id(due.trainer), display_round_number(due.round), error)

    async def _submit_finding(self, kind: str, due: AuditDuty, replayed: ReplayResult) -> None:
        is_match, last_loss = kind == "audit/report" and replayed.finding is ReplayFinding.MATCH, replayed.last_loss
        loss = None if last_loss is None or not is_match else self._sealing.seal_loss(due, last_loss)
        said = AuditFinding(due.job, *due.proposal_key, replayed.finding, round(1e6 * replayed.relative_error), loss)
        await self._author.submit(kind, said, math.inf)  # rounds take as long as they take

    def _release(self, due: AuditDuty) -> None:
        if (due.job, due.round) not in (*self._shown, *(key[:2] for key in self._running)):
            self._driver.blobs.release_owner(audit_owner(due.job, due.round))
        self._has_ended = True
        self._wake.set()

    async def _replayed(
        self, due: AuditDuty, past: RoundContext, late: Callable[[], Awaitable[None]], came: Callable[[], None]
    ) -> ReplayResult:
        """The finding is WITHHELD if something is not here when `late` returns. `came` is called once all is here."""
        try:
            request = await _before(late, audit_request(past, due.trainer, due.proposal))
        except RemoteProtocolError:
            return ReplayResult(ReplayFinding.MALFORMED)
        if request is None:
            return ReplayResult(ReplayFinding.WITHHELD)
        came()
        async with self._replaying.hold(lambda: due.is_dispute or (due.job, due.proposal_key) in self.asked):
            return await self._driver.round_executor.participant.replay(past, request)

    async def _past_round(self, due: AuditDuty) -> RoundContext:
        driver = self._driver
        try:
            model = await trio.to_thread.run_sync(driver.host.open_verified_model, due.job, due.round)
        except StorageError as error:
            raise _CannotAudit(str(error)) from None  # pruned, damaged, or this peer began with a snapshot of a later round
        if model.root != due.proposal.model_root:
            raise _CannotAudit(f"the model before round {display_round_number(due.round)} that is here has another root")
        directory = driver.host.round_directory(due.job, due.round)
        return RoundContext(self._me, model.spec, model, directory, driver.blobs, driver.network.fetch_blob)

    async def _wait_for_round(self, key: bytes, until: int, window: int) -> None:
        """Returns when that round of the job has opened, or all rounds are taken. After the job's end it returns once as much
        time has passed as a window took, or half of the heights in which audits are still heard.
        """
        started = trio.current_time()
        await trio.sleep(WITHHELD_SECONDS_MIN)
        while True:
            applied, job = self._driver.block_applied, self._driver.state.jobs.jobs.get(key)
            if job is None:
                return
            if job.phase is JobPhase.FINISHED:
                took = await trio.to_thread.run_sync(self._seconds_of, key, job, window)
                with trio.move_on_at(started + max(ENDED_JOB_WAIT_SECONDS, took)):
                    while self._driver.state.height < job.opened_height + POST_JOB_AUDIT_HEIGHTS // 2:
                        await self._driver.block_applied.wait()
                return
            if job.round >= until or job.phase is JobPhase.SETTLING:
                return
            await applied.wait()

    def _seconds_of(self, key: bytes, job: Job, count: int) -> float:
        """How long the last so many rounds of a job that ended took, by the times of the blocks that began and closed them."""
        store, last = self._driver.store, job.round - 1
        first = store.closed_round(key, last - count)
        begun, closed = first.height if first else job.started_height if last < count else None, store.closed_round(key, last)
        times = list[int]()
        for height in (begun, closed.height if closed else None):
            header = None if height is None else store.get_header(height)
            if header is None:
                return 0.0  # the block is from before this peer came
            times.append(decode_header(header).time_ms)
        return (times[1] - times[0]) / 1_000

    # Volunteering ----------------------------------------------------------------------------------------------------

    async def _volunteer(self) -> None:
        """Has this peer drawn for one of the last rounds after the other, while its own loss is far above that of earlier ones.
        The audits may have missed a lie that did much harm.
        """
        refused = set[tuple[bytes, int, int]]()  # (job, round, open round)
        while True:
            applied, noted, state = self._driver.block_applied, self._driver.round_executor.loss_recorded, self._driver.state
            opened = {key: job.round for key, job in state.jobs.jobs.items()}
            refused = {of for of in refused if opened.get(of[0]) == of[2]}
            suspected = [] if self._is_behind else list(self._suspected(state, {of[:2] for of in refused}))
            for job, jump, number in suspected:
                try:
                    await self._author.submit(VOLUNTEER_KIND, AuditVolunteering(job, number), math.inf)
                except StorageError:
                    raise
                except FolkmootError as error:
                    log.info("round %d is not re-executed: %s", display_round_number(number), error)
                    refused.add((job, number, opened[job]))
                    continue
                text = (
                    f"this peer re-executes round {display_round_number(number)}: the training loss jumped "
                    f"in round {display_round_number(jump)}"
                )
                self._driver.events.add("audit", text, job=job, round=number)
            if not suspected:  # a lie has to be found before its round is out of reach, so a new loss is looked at once
                await _before(applied.wait, noted.wait())

    def _suspected(self, state: LedgerState, refused: Set[tuple[bytes, int]]) -> Iterator[tuple[bytes, int, int]]:
        """(job, round in which the loss jumped, round to re-execute next) of jobs in which this peer may volunteer."""
        jumps = dict[bytes, int]()
        for key in state.audits.jobs if self._driver.round_executor.participant.worker_client is not None else ():
            job = state.jobs.jobs[key]
            undone = [(of.first, of.last) for of in job.undone_rounds]
            jump = first_spike(self._driver.round_executor.loss_history.losses(key, undone), job.round)
            jumps |= {} if jump is None else {key: jump}
        if not jumps:
            return
        left = {
            (due.job, due.round) for due in self._driver.rules.audits_module.proposals_to_volunteer_for(self._me, state)
        } - refused
        for key, jump in jumps.items():
            rounds = [number for of, number in left if of == key]
            if rounds:
                yield key, jump, most_suspect_round(rounds, jump)

    # Being audited ---------------------------------------------------------------------------------------------------

    async def _delete_expired_files(self) -> None:
        """Deletes files of this peer's audits that are over, and own buffers that no auditor may ask for any more.

        The audit window bounds the buffers that may be asked for; `training.job_spec.AUDIT_BYTES_MAX` bounds them when a job
        begins.
        """
        disputes = {(job, of.round) for job, audits in self._driver.state.audits.jobs.items() for of in audits.disputes}
        busy = {*disputes, *(key[:2] for key in self._running)}
        for of in [of for of in self._shown if of not in busy]:
            self._shown.remove(of)
            self._driver.blobs.release_owner(audit_owner(*of))
        if self._has_ended and not self._running:
            self._has_ended = False
            await trio.to_thread.run_sync(self._driver.round_executor.delete_expired_files)
        # What is here is listed before the state is looked at: the files of a round that opens meanwhile stay.
        kept = await trio.to_thread.run_sync(self._driver.blobs.retained_rounds)
        computing = self._driver.round_executor.participant.worker_client
        sealed = (
            await trio.to_thread.run_sync(loss_opening_files.list_opening_files, computing.text_folder)
            if computing
            else set[Path]()
        )
        state = self._driver.state
        asked = {(proposal.job[:JOB_BYTES], proposal.round) for proposal in proposals_to_serve(self._me, state)}
        opened = {key[:JOB_BYTES]: job.round for key, job in state.jobs.unfinished().items()}
        unasked = [entry for entry in kept if entry not in asked and entry[1] < opened.get(entry[0], entry[1] + 1)]
        if unasked:
            await trio.to_thread.run_sync(self._driver.blobs.delete_rounds, unasked)
        if computing and sealed:
            mine = {(due.job, due.round) for due in loss_opening_duties(self._me, state)}
            mine |= {(proposal.job, proposal.round) for proposal in proposals_to_serve(self._me, state)}
            mine |= {(key, job.round) for key, job in state.jobs.unfinished().items()}
            prefixes = tuple(loss_opening_files.round_file_prefix(*place) for place in mine)
            await trio.to_thread.run_sync(
                loss_opening_files.delete_files, [path for path in sealed if not path.name.startswith(prefixes)]
            )

    # Telling people --------------------------------------------------------------------------------------------------

    def _log_results(self, state: LedgerState) -> None:
        events = self._driver.events
        for entry in state.audits.log:
            if entry.height > self._told:
                tell = events.add_detail if entry.result is AuditResult.PASSED else events.add
                tell("audit", describe_audit_entry(entry, state), job=entry.job, round=entry.round, peer=entry.trainer)
        self._told = state.height
        suspended = dict(_suspensions(self._me, state))
        for job, until in suspended.items():
            if self._suspended.get(job) != until:
                text = f"{suspension_reason(self._me, state)}; this peer does not train {state.jobs.jobs[job].name!r} until then"
                events.add("warning", text, job=job)
        self._suspended = suspended


def withheld_deadline_round(due: AuditDuty, window: int, now: int) -> int:
    """The auditor says WITHHELD when this round opens. It has been fetching since the opening of the round `now`.

    | window       | the round                                                                                    |
    | one round    | the next one: no round is left to wait for                                                   |
    | more rounds  | the last but one of the window: one round is left to be heard in, which any block may close  |
    | begun late   | a whole round after `now`; if the window is over by then, the report lapses                  |

    An auditor begins late if it was drawn for a round that its ballot had missed, or after a restart.
    """
    return due.since + 1 if window == 1 else max(due.since + window - 1, now + 1)


def _is_doubtful(replayed: ReplayResult, spec: JobSpec) -> bool:
    return spec.replay_tolerance < replayed.relative_error <= CHALLENGE_MARGIN * spec.replay_tolerance


# In words ------------------------------------------------------------------------------------------------------------


def describe_audit_entry(entry: AuditLogEntry, state: LedgerState) -> str:
    """One result of an audit, as a line."""
    auditor, trainer = (short_id(state.members.current_key(key)) for key in (entry.auditor, entry.trainer))
    where = f"{trainer} in round {display_round_number(entry.round)}"
    found = f" ({finding_label(entry, state)})" if entry.finding is not None else ""
    match entry.result:
        case AuditResult.PASSED:
            return f"{auditor} replayed {where}: passed"
        case AuditResult.CHALLENGED:
            return f"{auditor} challenges {where}{found}"
        case AuditResult.LAPSED:
            return f"{auditor} did not report on {where} in time"
        case AuditResult.SUSPENDED:
            return f"{trainer} is suspended: most re-executors confirm what {auditor} found{found}"
        case AuditResult.REFUTED:
            return f"most re-executors find nothing wrong with {where}, which {auditor} challenged{found}"
        case AuditResult.SHUNNED:
            return f"{trainer} is suspended: too many could not get what it commits to, though most find nothing wrong"
        case AuditResult.DROPPED:
            return f"too few judged {where}, which {auditor} challenged{found}: nothing follows"
        case AuditResult.WRONG_LOSS:
            return f"{auditor} reported another loss of {where} than {trainer} opened: one of the two is wrong"
        case AuditResult.LAZY:
            return (
                f"{auditor} is suspended: more trainers contradict the losses that it reports than may lie, the last is {where}"
            )


def finding_label(entry: AuditLogEntry, state: LedgerState) -> str:
    """Empty if it has no finding."""
    if entry.finding is None or entry.finding < OBJECTIVE_CODES_FIRST:
        return entry.finding.label if entry.finding is not None else ""
    job = state.jobs.jobs.get(entry.job)
    return verdict_label(entry.finding, JobSpec.decode(job.spec).resolved_objective.reason_labels if job else ())


def _suspensions(person: bytes, state: LedgerState) -> Iterator[tuple[bytes, int]]:
    """(running job, the first round in which this member trains again)."""
    for key, job in state.jobs.running().items():
        until = max(state.audits.suspensions_in(key).get(person, 0), job.suspended_trainers.get(person, 0))
        if until > job.round:
            yield key, until


def suspension_reason(person: bytes, state: LedgerState) -> str:
    """Until when and why this member does not train; empty if it may."""
    for job, until in _suspensions(person, state):
        since = f"suspended until round {display_round_number(until)}"
        if state.audits.suspensions_in(job).get(person) != until:
            return f"{since}: {INVALID_UPDATES_REASON}"
        cause = state.audits.jobs[job].suspension_causes[person]
        if cause.result is AuditResult.SHUNNED:
            return f"{since}: too many could not get what it commits to"
        if cause.result is AuditResult.LAZY:
            return f"{since}: it reported other losses than the trainers had, as if it replayed nothing"
        found = finding_label(cause, state) or "failed"
        return f"{since}: replay {found} found by {short_id(state.members.current_key(cause.auditor))}"
    return ""


async def _before(late: Callable[[], Awaitable[None]], fetched: Awaitable[T]) -> T | None:
    """Return the result of `fetched`, or None if `late` returns first."""
    with trio.CancelScope() as fetching:

        async def lose_patience() -> None:
            await late()
            fetching.cancel()

        error: FolkmootError | OSError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose_patience)
            try:
                found = await fetched
            except (FolkmootError, OSError) as raised:
                error = raised  # outside the nursery it is no group
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error
        return found
    return None
