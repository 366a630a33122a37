"""Which audits may fetch now, and how long the others have waited where their trainer can help it. Pure.

A peer fetches for one audit of a job and trainer at a time, the oldest first: a window is as long as the least link takes
for one.

| a report waits               | its trainer                                                        | that time counts |
|------------------------------|--------------------------------------------------------------------|------------------|
| for a report that was due    | could have proposed later: it knew what it still had to show       | yes              |
| for a dispute                | knew nothing of it when it proposed                                | no               |
| for a report drawn late      | knew nothing of it: the ballot of this peer had missed that round  | no               |
| and was drawn late itself    | the same                                                           | no               |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ledger.audits.state import Due, in_turn
from ledger.members import MembersState
from transport.exchange import REVEALS_MAX

Key = tuple[bytes, int, bytes, int, bool]

# Audits that fetch side by side, each one blob at a time, for which the exchange has a turn. In a job they are of different
# trainers: a trainer that shows its states slowly holds up its own audits alone, and its uplink carries one at a time for each.
AT_ONCE_MAX = 16

assert AT_ONCE_MAX < REVEALS_MAX  # otherwise a trainer that sends slowly would hold up what others send


def key_of(due: Due) -> Key:
    return due.job, *due.place, due.is_dispute


class Turns:
    def __init__(self) -> None:
        self.now = frozenset[Key]()  # the audits that may fetch
        self._since: dict[Key, float] = {}  # by waiting report: when the time began that counts
        self._known = frozenset[Key]()
        self._late = frozenset[Key]()  # drawn in a later round than the one after theirs

    def forget(self) -> None:
        """This peer was away: it cannot tell what trainers knew. What is older than the last round counts as drawn late."""
        self._known = frozenset()

    def follow(
        self,
        due: Mapping[Key, Due],
        idle: Collection[Key],
        running: Collection[Key],
        opened: Mapping[bytes, int],
        members: MembersState,
        now: float,
    ) -> frozenset[Key]:
        """The audits that begin now. `idle`: they need nothing of their trainers; `opened`: the open round by job."""
        new = due.keys() - self._known
        late = frozenset(key for key in new if not due[key].is_dispute and opened.get(key[0], 0) > due[key].since + 1)
        self._known, self._late = frozenset(due), (self._late & due.keys()) | late
        turns = in_turn((item for key, item in due.items() if key not in idle), members)
        self.now = frozenset(key_of(item) for item in turns[:AT_ONCE_MAX])
        unforeseen = {
            (item.job, members.current(item.trainer)) for item in turns if item.is_dispute or key_of(item) in self._late
        }
        for key in due.keys() - self.now - set(idle):
            waits_unforeseen = key in self._late or (key[0], members.current(key[2])) in unforeseen
            self._since[key] = now if waits_unforeseen else self._since.get(key, now)
        self._since = {key: since for key, since in self._since.items() if key in due}
        return self.now - set(running)

    def begin(self, key: Key, now: float) -> float:
        """Seconds for which it has waited, as counts against its trainer."""
        return now - self._since.pop(key, now)
