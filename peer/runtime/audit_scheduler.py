"""When this peer audits: which audits may fetch now, when it says `withheld`, and for which rounds it volunteers."""

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

# Audits that fetch side by side, each one blob at a time, for which the exchange has a turn. In a job they are of different
# trainers: a trainer that shows its buffers slowly holds up its own audits alone, and its uplink carries one at a time for each.
FETCHING_AUDITS_MAX = 16

assert FETCHING_AUDITS_MAX < AUDIT_TRANSFERS_MAX  # otherwise a trainer that sends slowly would hold up what others send


# an auditor asks at least so long before it says `withheld`, if earlier audits of that trainer took its time
FETCH_SECONDS_MIN = 10.0
LOOP_DELAY_SECONDS_MAX = 0.1  # by which this process wakes too late where it is not short of a processor: loops of ours take less
# An auditor waits at least so long before it says `withheld`: a holder has a second for its first answer, then the others are
# asked, then the holder again. If a whole window is shorter, the report lapses: a job's pace must suspend nobody.
WITHHELD_SECONDS_MIN = 2.0
# After a job's last round no opening round says that the window ends. An auditor then waits as long as the last rounds took, and
# at least so long: a trainer may need it to start again.
ENDED_JOB_WAIT_SECONDS = 30.0

T = TypeVar("T")

log = logging.getLogger("peer")

LOOKBACK_ROUNDS = 8
KNOWN_MIN = 4  # rounds before a jump can be told from chance
# A round's mean loss over ten batches of 1,024 bytes differs by 0.03 of itself between rounds; that of one batch, by 0.07.
SPIKE_FACTOR = 1.1
SPIKE_CHANGES = 4  # times the usual change from round to round: of one batch, one honest round in seventy is above
CHANCE_MAX = 1 / 3  # of the usual loss: liars could make it change as much as they like


def audit_key(due: AuditDuty) -> AuditKey:
    return due.job, *due.proposal_key, due.is_dispute


class AuditScheduler:
    """Which audits may fetch now, and how long the others have waited at their trainer's cost. Pure.

    A peer fetches for one audit of a job and trainer at a time, the oldest first: a window is as long as the least link takes for
    one. `WithheldDeadlines` counts the seconds for which that audit asks its trainer. They also count for the reports behind it,
    if the trainer could have proposed these later.

    | a report waits                                          | its trainer                                      | seconds count |
    |---------------------------------------------------------|--------------------------------------------------|---------------|
    | for a report that was due while the round was proposed  | knew what it still had to show                   | yes           |
    | for a report that this peer saw due only after that     | may not have known of it: it may be drawn late   | no            |
    | for a dispute                                           | did not know of it                               | no            |
    | because too many other audits fetch                     | can do nothing about it                          | no            |
    """

    def __init__(self) -> None:
        self.fetching: Set[AuditKey] = frozenset()  # the audits that may fetch
        self._seen: dict[AuditKey, int] = {}  # the round that was open when this peer first saw it due
        self._behind: dict[AuditKey, AuditKey] = {}  # whose seconds count for it
        self._waited: dict[AuditKey, float] = {}  # seconds that count

    def schedule_audits(
        self,
        due: Mapping[AuditKey, AuditDuty],
        idle: Set[AuditKey],
        running: Set[AuditKey],
        opened: Mapping[bytes, int],
        members: MembersState,
    ) -> Set[AuditKey]:
        """The audits that begin now. `idle`: they need nothing of their trainers; `opened`: the open round by job."""
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
        """This audit has asked its trainer for so long."""
        for key in [key for key, other in self._behind.items() if other == first]:
            self._waited[key] = self._waited.get(key, 0.0) + seconds

    def take_waited_seconds(self, key: AuditKey) -> float:
        """Seconds that it has waited at its trainer's cost. If it fails and begins again, it has waited for nothing."""
        return self._waited.pop(key, 0.0)


class WithheldDeadlines:
    """When an auditor says `withheld`: how long it asks the trainer for what it has to replay."""

    def __init__(self, driver: Driver, scheduler: AuditScheduler) -> None:
        self._driver, self._scheduler = driver, scheduler
        self.is_behind = True  # decided blocks are not applied here: this peer cannot tell how long rounds have been open
        self._entered: dict[bytes, int] = {}  # by job, the round that was open when this peer had caught up

    def note_progress(self) -> bool:
        """Whether the applied state is that of the last decided block. An older one may show as due what is settled."""
        state, decided = self._driver.state, self._driver.replica.height - 1
        if state.height < decided:
            self.is_behind |= state.height + 1 < decided  # one block is decided while a closing is applied
            return False
        if self.is_behind:
            self._entered = {key: job.round for key, job in state.jobs.unfinished().items()}
            self.is_behind = False
        return True

    async def wait_until_late(self, key: AuditKey, due: AuditDuty, job: Job, window: int, queued: float) -> None:
        """Returns once what has not come is withheld. `queued` are seconds for which this audit has waited at its trainer's cost.

        A report has waited so long already for other reports on that trainer, which a trainer can help: it proposes when it has
        time.
        """
        if due.is_second_verdict:  # it said `withheld` once
            await trio.sleep_forever()
        state, seconds = self._driver.state, 0.0
        audits = state.audits.jobs.get(due.job)
        until = withheld_deadline_round(due, window, job.round + (self._entered.get(due.job) == job.round))
        if audits is not None and due.round in audits.rounds:
            # The least link shows the proposal to everybody in this time.
            terms = self._driver.rules.jobs_module.rules.terms_of_spec(job.spec).audits
            assert terms is not None
            served = terms.served_ms(len(audits.rounds[due.round].reexecutors)) / 1_000
            seconds = max(served - queued, min(served, FETCH_SECONDS_MIN))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_for_round, due.job, until, window)
            nursery.start_soon(self._wait_requested_seconds, key, seconds)

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
            is_in_touch = sum(other in heard or other == self._driver.signer.public for other in voters) >= quorum(len(voters))
            if is_in_touch and not is_late and not self.is_behind and key in self._scheduler.fetching:
                # A trainer's uplink shows something of each job side by side.
                current = self._driver.state.members.current_key
                step /= len({of[0] for of in self._scheduler.fetching if current(of[2]) == current(key[2])})
                self._scheduler.add_waited_seconds(key, step)
                seconds -= step


def withheld_deadline_round(due: AuditDuty, window: int, now: int) -> int:
    """The auditor says WITHHELD when this round opens. It has been fetching since the opening of the round `now`.

    | window       | the round                                                                                    |
    | one round    | the next one: no round is left to wait for                                                   |
    | more rounds  | the last but one of the window: one round is left to be heard in, which any block may close  |
    | begun late   | a whole round after `now`; if the window is over by then, the report lapses                  |

    An auditor begins late if it was drawn for a round that its ballot had missed, or after a restart.
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
                error = raised  # outside the nursery it is no group
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error
        return found
    return None


class AuditVolunteer:
    """Audits that this peer asks for: it volunteers to re-execute rounds before its training loss jumped.

    `run` it beside the auditor.
    """

    def __init__(self, driver: Driver, author: TransactionSubmitter, deadlines: WithheldDeadlines) -> None:
        self._driver, self._author, self._deadlines = driver, author, deadlines

    async def run(self) -> None:
        """Has this peer drawn for one of the last rounds after the other, while its own loss is far above that of earlier ones.
        The audits may have missed a lie that did much harm.
        """
        refused = set[tuple[bytes, int, int]]()  # (job, round, open round)
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
            if not suspected:  # a lie has to be found before its round is out of reach, so a new loss is looked at once
                await result_before(applied.wait, noted.wait())

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
        mine = self._driver.rules.audits_module.proposals_to_volunteer_for(self._driver.signer.public, state)
        left = {(due.job, due.round) for due in mine} - refused
        for key, jump in jumps.items():
            rounds = [number for of, number in left if of == key]
            if rounds:
                yield key, jump, most_suspect_round(rounds, jump)


def spike_threshold(losses: Mapping[int, float], number: int) -> float:
    """The loss above which this round is no chance. `losses`: by round; infinite while too few of them are known."""
    before = [loss for other, loss in sorted(losses.items()) if other < number][-LOOKBACK_ROUNDS:]
    if len(before) < KNOWN_MIN:
        return math.inf
    usual, change = statistics.median(before), statistics.median(abs(b - a) for a, b in pairwise(before))
    return max(SPIKE_FACTOR * usual, usual + min(SPIKE_CHANGES * change, CHANCE_MAX * usual))


def first_spike(losses: Mapping[int, float], opened: int) -> int | None:
    """The first of the newest rounds whose losses are all far above those before them.

    None: the newest loss is as usual, or older than that of the round before the one that is open.
    """
    first = None
    for number, loss in sorted(losses.items(), reverse=True):
        if loss <= spike_threshold(losses, number):
            break
        first = number
    return first if losses and max(losses) >= opened - 1 else None


def most_suspect_round(rounds: Iterable[int], jump: int) -> int:
    """Which of these a jump most likely comes from: the one before it, and then the nearest."""
    return min(rounds, key=lambda number: (abs(jump - 1 - number), number))
