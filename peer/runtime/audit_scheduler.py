"""The schedule of this peer's audits: audits that may fetch data now, deadlines for the finding `withheld`, rounds to volunteer
for."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Set
from itertools import pairwise
from typing import TypeVar

import trio

from consensus.block import decode_header
from consensus.voter_set import quorum
from ledger.audits.audit_state import VOLUNTEER_KIND, AuditDuty, AuditVolunteering, first_duty_of_each_trainer
from ledger.audits.state_machine import POST_JOB_AUDIT_HEIGHTS
from ledger.jobs import Job, JobPhase
from ledger.ledger_state import LedgerState
from ledger.members import MembersState
from peer.runtime.driver import Driver
from peer.runtime.transaction_submitter import TransactionSubmitter
from protocol.errors import FolkmootError, StorageError
from protocol.units import display_round_number
from transport.blobs.blob_exchange import AUDIT_TRANSFERS_MAX

AuditKey = tuple[bytes, int, bytes, bool]

# Audits that fetch concurrently, one blob each. A job has at most one of them for each trainer, so that a slow trainer delays
# only its own audits, and a trainer's uplink serves each auditor one audit at a time.
FETCHING_AUDITS_MAX = 16

assert FETCHING_AUDITS_MAX < AUDIT_TRANSFERS_MAX  # otherwise slow trainers would delay the transfers of others


# least seconds of requests for an audit before a report of `withheld`, if earlier audits of the trainer took the rest of its time
FETCH_SECONDS_MIN = 10.0
LOOP_DELAY_SECONDS_MAX = 0.1  # delay of a wake-up above which this machine lacks processor time: our own loops take less
# Least wait before a report of `withheld`: a peer with the data has a second for its first answer, then other peers are asked,
# then the first again. If the whole audit window is shorter, the report lapses: fast rounds must not suspend trainers.
WITHHELD_SECONDS_MIN = 2.0
# After a job's last round, no later round marks the end of the audit window. An auditor then waits for the duration of the last
# rounds, and at least for this time, because a trainer may have to restart first.
ENDED_JOB_WAIT_SECONDS = 30.0

T = TypeVar("T")

log = logging.getLogger("peer")

LOOKBACK_ROUNDS = 8  # earlier rounds whose losses define the usual loss and the usual change
KNOWN_MIN = 4  # least number of earlier losses: with fewer, a jump of the loss cannot be distinguished from chance
# A jump is a loss of at least this factor times the usual loss. Between honest rounds, the mean loss of ten batches of 1,024
# bytes changes by 3 %, and the loss of one batch by 7 %.
SPIKE_FACTOR = 1.1
# A jump also exceeds the usual loss by this many usual changes between rounds. With one batch, this holds for one honest round in
# seventy.
SPIKE_CHANGES = 4
# Upper bound of these SPIKE_CHANGES changes, as a fraction of the usual loss. Without it, faulty trainers could hide a jump
# behind large changes.
CHANCE_MAX = 1 / 3


def audit_key(due: AuditDuty) -> AuditKey:
    return due.job, *due.proposal_key, due.is_dispute


class AuditScheduler:
    """The audits that may fetch now, and the time that other audits waited because of their trainer. Without I/O and clock.

    A peer fetches for one audit per job and trainer at a time, the oldest first, because the slowest allowed link needs a whole
    audit window for one audit. `WithheldDeadlines` counts the seconds in which the fetching audit requests data from its trainer.
    These seconds also count for audits of this trainer that wait, if the trainer could have delayed the proposals.

    | a report waits                                          | its trainer                                      | seconds count |
    |---------------------------------------------------------|--------------------------------------------------|---------------|
    | for a report that was due while the round was proposed  | knew of its remaining uploads                    | yes           |
    | for a report that this peer saw due only after that     | may not have known of the late draw              | no            |
    | for a dispute                                           | did not know of it                               | no            |
    | because too many other audits fetch                     | has no influence on that                         | no            |
    """

    def __init__(self) -> None:
        self.fetching: Set[AuditKey] = frozenset()  # audits that may fetch now
        self._seen: dict[AuditKey, int] = {}  # audit -> open round when this peer first saw that the audit is due
        # Waiting audit -> fetching audit of the same trainer, whose seconds count for the waiting one.
        self._behind: dict[AuditKey, AuditKey] = {}
        self._waited: dict[AuditKey, float] = {}  # waiting audit -> seconds that count for it

    def schedule_audits(
        self,
        due: Mapping[AuditKey, AuditDuty],
        idle: Set[AuditKey],
        running: Set[AuditKey],
        opened: Mapping[bytes, int],
        members: MembersState,
    ) -> Set[AuditKey]:
        """Return the audits that begin now.

        `idle` are the audits that need no data from trainers now; `opened` is job -> open round.
        """
        self._seen = {key: self._seen.get(key, opened.get(key[0], 0)) for key in due}
        self._waited = {key: seconds for key, seconds in self._waited.items() if key in due}
        turns = first_duty_of_each_trainer((item for key, item in due.items() if key not in idle), members)[:FETCHING_AUDITS_MAX]
        self.fetching = frozenset(map(audit_key, turns))
        firsts = {(item.job, members.current_key(item.trainer)): item for item in turns}
        self._behind = {}
        for key in due.keys() - self.fetching - idle - running:
            first = firsts.get((key[0], members.current_key(key[2])))
            if first is not None and not first.is_dispute and self._seen[audit_key(first)] <= due[key].round:
                self._behind[key] = audit_key(first)
        return self.fetching - running

    def add_waited_seconds(self, first: AuditKey, seconds: float) -> None:
        """Count seconds in which the audit `first` requested data from its trainer, for the audits that wait behind `first`."""
        for key in [key for key, other in self._behind.items() if other == first]:
            self._waited[key] = self._waited.get(key, 0.0) + seconds

    def take_waited_seconds(self, key: AuditKey) -> float:
        """Return and reset the audit's waiting seconds that count against its trainer. A retry of the audit begins at zero."""
        return self._waited.pop(key, 0.0)


class WithheldDeadlines:
    """The deadlines after which this auditor reports missing data as `withheld`."""

    def __init__(self, driver: Driver, scheduler: AuditScheduler) -> None:
        self._driver, self._scheduler = driver, scheduler
        # True while this peer must still apply decided blocks. It cannot measure the duration of rounds in this time.
        self.is_behind = True
        self._entered: dict[bytes, int] = {}  # job -> open round when this peer had applied all decided blocks

    def note_progress(self) -> bool:
        """Return whether this peer has applied all decided blocks. Before that, audits that seem due may be settled already."""
        state, decided = self._driver.state, self._driver.replica.height - 1
        if state.height < decided:
            self.is_behind |= state.height + 1 < decided  # one block more is no backlog: it may be decided at any time
            return False
        if self.is_behind:
            self._entered = {key: job.round for key, job in state.jobs.unfinished().items()}
            self.is_behind = False
        return True

    async def wait_until_late(self, key: AuditKey, due: AuditDuty, job: Job, window: int, queued: float) -> None:
        """Wait until missing data of an audit counts as withheld.

        `queued` are the seconds for which this audit has waited for other audits of its trainer. They shorten the wait, because
        the trainer could have proposed later.
        """
        if due.is_second_verdict:  # this peer has already reported this proposal's data as `withheld`
            await trio.sleep_forever()
        state, seconds = self._driver.state, 0.0
        audits = state.audits.jobs.get(due.job)
        until = withheld_deadline_round(due, window, job.round + (self._entered.get(due.job) == job.round))
        if audits is not None and due.round in audits.rounds:
            # Time in which the slowest allowed link sends the proposal's data to all re-executors.
            terms = self._driver.rules.jobs_module.rules.terms_of_spec(job.spec).audits
            assert terms is not None
            served = terms.served_ms(len(audits.rounds[due.round].reexecutors)) / 1_000
            seconds = max(served - queued, min(served, FETCH_SECONDS_MIN))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_for_round, due.job, until, window)
            nursery.start_soon(self._wait_requested_seconds, key, seconds)

    async def _wait_for_round(self, key: bytes, until: int, window: int) -> None:
        """Wait until the round `until` of the job has opened, or all rounds of the job are closed.

        After the job's end, wait for the duration of `window` rounds, or for half of the heights in which reports are still
        accepted.
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
        """Return the seconds that the last `count` rounds of an ended job took, by the times of blocks.

        Return 0 if this time is unknown.
        """
        store, last = self._driver.store, job.round - 1
        first = store.closed_round(key, last - count)
        begun, closed = first.height if first else job.started_height if last < count else None, store.closed_round(key, last)
        times = list[int]()
        for height in (begun, closed.height if closed else None):
            header = None if height is None else store.get_header(height)
            if header is None:
                return 0.0  # the block is older than this peer's snapshot
            times.append(decode_header(header).time_ms)
        return (times[1] - times[0]) / 1_000

    async def _wait_requested_seconds(self, key: AuditKey, seconds: float) -> None:
        """Wait for `seconds` in which the trainer could have served this audit.

        Time counts only if this audit may fetch, this peer is linked to a quorum of the round's voters and has applied all
        decided blocks, and it woke up in time. Otherwise, the cause may be this peer's own link or machine. The time is divided
        among the jobs in which audits fetch from this trainer.
        """
        while seconds > 0:
            step = min(1.0, seconds)
            await trio.sleep_until(due := trio.current_time() + step)
            # After a late wake-up, received data may still wait to be read, which is no fault of the trainer.
            is_late = trio.current_time() > due + LOOP_DELAY_SECONDS_MAX
            voters, heard = self._driver.state.members.round_voters, self._driver.network.connected_peers()
            is_in_touch = sum(other in heard or other == self._driver.signer.public for other in voters) >= quorum(len(voters))
            if is_in_touch and not is_late and not self.is_behind and key in self._scheduler.fetching:
                # The trainer's uplink serves its jobs concurrently, so each job counts for a part of the time.
                current = self._driver.state.members.current_key
                step /= len({of[0] for of in self._scheduler.fetching if current(of[2]) == current(key[2])})
                self._scheduler.add_waited_seconds(key, step)
                seconds -= step


def withheld_deadline_round(due: AuditDuty, window: int, now: int) -> int:
    """Return the round at whose opening the auditor reports WITHHELD.

    `now` is the open round when the auditor begins to fetch, or the next one if it begins within that round.

    | window       | the round                                                                                    |
    | one round    | the next one                                                                                 |
    | more rounds  | the last but one of the window, because the report needs a round to be decided in            |
    | begun late   | with more rounds, a whole round after `now`; if the window is over by then, the report lapses |

    An auditor begins late after a restart, or if it was drawn for a round that its ballot had missed.
    """
    return due.since + 1 if window == 1 else max(due.since + window - 1, now + 1)


async def result_before(late: Callable[[], Awaitable[None]], fetched: Awaitable[T]) -> T | None:
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
                error = raised  # the error is raised below, outside the nursery, which would wrap it in an exception group
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error
        return found
    return None


class AuditVolunteer:
    """The volunteer, which audits rounds before a jump of this peer's training loss. `run` runs beside the auditor."""

    def __init__(self, driver: Driver, author: TransactionSubmitter, deadlines: WithheldDeadlines) -> None:
        self._driver, self._author, self._deadlines = driver, author, deadlines

    async def run(self) -> None:
        """Volunteer for recent rounds, one after the other, while this peer's training loss is far above that of earlier rounds.

        The sampled audits may have missed a false proposal that harms the model.
        """
        refused = set[tuple[bytes, int, int]]()  # (job, refused round, open round at the refusal)
        while True:
            applied, noted, state = self._driver.block_applied, self._driver.round_executor.loss_recorded, self._driver.state
            opened = {key: job.round for key, job in state.jobs.jobs.items()}
            refused = {of for of in refused if opened.get(of[0]) == of[2]}
            suspected = [] if self._deadlines.is_behind else list(self._suspected(state, {of[:2] for of in refused}))
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
            if not suspected:  # wakes up at each new loss: a false proposal must be found within its audit window
                await result_before(applied.wait, noted.wait())

    def _suspected(self, state: LedgerState, refused: Set[tuple[bytes, int]]) -> Iterator[tuple[bytes, int, int]]:
        """Yield (job, round in which the loss jumped, round to re-execute next) for jobs in which this peer may volunteer."""
        jumps = dict[bytes, int]()
        for key in state.audits.jobs if self._driver.round_executor.participant.worker_client is not None else ():
            job = state.jobs.jobs[key]
            undone = [(of.first, of.last) for of in job.undone_rounds]
            jump = first_spike(self._driver.round_executor.loss_history.losses(key, undone), job.round)
            jumps |= {} if jump is None else {key: jump}
        if not jumps:
            return
        mine = self._driver.rules.audits_module.proposals_to_volunteer_for(self._driver.signer.public, state)
        left = {(due.job, due.round) for due in mine} - refused
        for key, jump in jumps.items():
            rounds = [number for of, number in left if of == key]
            if rounds:
                yield key, jump, most_suspect_round(rounds, jump)


def spike_threshold(losses: Mapping[int, float], number: int) -> float:
    """Return the least loss of round `number` that is a jump, or infinity with fewer than KNOWN_MIN earlier losses.

    `losses` is round -> training loss.
    """
    before = [loss for other, loss in sorted(losses.items()) if other < number][-LOOKBACK_ROUNDS:]
    if len(before) < KNOWN_MIN:
        return math.inf
    usual, change = statistics.median(before), statistics.median(abs(b - a) for a, b in pairwise(before))
    return max(SPIKE_FACTOR * usual, usual + min(SPIKE_CHANGES * change, CHANCE_MAX * usual))


def first_spike(losses: Mapping[int, float], opened: int) -> int | None:
    """Return the first round of a jump: its loss and all later losses are far above the losses before the jump.

    Return None if the newest loss is as usual, or is older than the last closed round. `opened` is the open round.
    """
    first = None
    for number, loss in sorted(losses.items(), reverse=True):
        if loss <= spike_threshold(losses, number):
            break
        first = number
    return first if losses and max(losses) >= opened - 1 else None


def most_suspect_round(rounds: Iterable[int], jump: int) -> int:
    """Return the round that most likely caused the jump: the round before the jump, otherwise the round nearest to that one."""
    return min(rounds, key=lambda number: (abs(jump - 1 - number), number))
