"""Which audits may fetch now, and how long the others have waited at their trainer's cost. Pure.

A peer fetches for one audit of a job and trainer at a time, the oldest first: a window is as long as the least link takes for
one. `WithheldDeadlines` counts the seconds for which that audit asks its trainer. They also count for the reports behind it, if
the trainer could have proposed these later.

| a report waits                                          | its trainer                                         | seconds count |
|---------------------------------------------------------|-----------------------------------------------------|---------------|
| for a report that was due while the round was proposed  | knew what it still had to show                      | yes           |
| for a report that this peer saw due only after that     | may not have known of it: it may be drawn late      | no            |
| for a dispute                                           | did not know of it                                  | no            |
| because too many other audits fetch                     | can do nothing about it                             | no            |
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from ledger.audits.audit_state import AuditDuty, first_duty_of_each_trainer
from ledger.members import MembersState
from transport.blobs.blob_exchange import AUDIT_TRANSFERS_MAX

AuditKey = tuple[bytes, int, bytes, bool]

# Audits that fetch side by side, each one blob at a time, for which the exchange has a turn. In a job they are of different
# trainers: a trainer that shows its buffers slowly holds up its own audits alone, and its uplink carries one at a time for each.
FETCHING_AUDITS_MAX = 16

assert FETCHING_AUDITS_MAX < AUDIT_TRANSFERS_MAX  # otherwise a trainer that sends slowly would hold up what others send


def audit_key(due: AuditDuty) -> AuditKey:
    return due.job, *due.proposal_key, due.is_dispute


class AuditScheduler:
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
