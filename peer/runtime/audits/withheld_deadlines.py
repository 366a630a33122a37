"""When an auditor says `withheld`: how long it asks the trainer for what it has to replay."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from consensus.block import decode_header
from consensus.voter_set import quorum
from ledger.audits.audit_state import AuditDuty
from ledger.audits.state_machine import POST_JOB_AUDIT_HEIGHTS
from ledger.jobs import Job, JobPhase
from peer.runtime.audits.audit_scheduler import AuditKey, AuditScheduler
from peer.runtime.driver import Driver
from protocol.errors import FolkmootError

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


class WithheldDeadlines:
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
