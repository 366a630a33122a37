"""Audits that this peer asks for: it volunteers to re-execute rounds before its training loss jumped."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import pairwise

from ledger.audits.audit_state import VOLUNTEER_KIND, AuditVolunteering
from ledger.ledger_state import LedgerState
from peer.runtime.audits.audit_scheduler import WithheldDeadlines, result_before
from peer.runtime.driver import Driver
from peer.runtime.transaction_submitter import TransactionSubmitter
from protocol.errors import FolkmootError, StorageError
from protocol.units import display_round_number

log = logging.getLogger("peer")

LOOKBACK_ROUNDS = 8
KNOWN_MIN = 4  # rounds before a jump can be told from chance
# A round's mean loss over ten batches of 1,024 bytes differs by 0.03 of itself between rounds; that of one batch, by 0.07.
SPIKE_FACTOR = 1.1
SPIKE_CHANGES = 4  # times the usual change from round to round: of one batch, one honest round in seventy is above
CHANCE_MAX = 1 / 3  # of the usual loss: liars could make it change as much as they like


class AuditVolunteer:
    """`run` it beside the auditor."""

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
