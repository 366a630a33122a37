"""Which audits may fetch now, and how long the others have waited where their trainer can help it. Pure.

A peer fetches for one audit of a job and trainer at a time, the oldest first: a window is as long as the least link takes
for one.

| a report waits                                          | its trainer                                   | that time counts |
|---------------------------------------------------------|-----------------------------------------------|------------------|
| for a report that was due while the round was proposed  | could have proposed later                     | yes              |
| for a report that this peer saw due only after that     | did not know of it: it may be drawn late      | no               |
| for a dispute                                           | did not know of it                            | no               |
| because too many other audits fetch                     | can do nothing about it                       | no               |
"""

from __future__ import annotations

from collections.abc import Mapping, Set

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
        self.now: Set[Key] = frozenset()  # the audits that may fetch
        self._seen: dict[Key, int] = {}  # the round that was open when this peer first saw it due
        self._waited: dict[Key, float] = {}  # seconds that count
        self._counting: Set[Key] = frozenset()  # whose time counts since the last look
        self._looked = 0.0

    def forget(self) -> None:
        """This peer was away: nobody has waited for anything."""
        self._waited.clear()
        self._counting = frozenset()

    def follow(
        self,
        due: Mapping[Key, Due],
        idle: Set[Key],
        running: Set[Key],
        opened: Mapping[bytes, int],
        members: MembersState,
        now: float,
    ) -> Set[Key]:
        """The audits that begin now. `idle`: they need nothing of their trainers; `opened`: the open round by job."""
        for key in self._counting:
            self._waited[key] = self._waited.get(key, 0.0) + now - self._looked
        self._looked = now
        self._seen = {key: self._seen.get(key, opened.get(key[0], 0)) for key in due}
        self._waited = {key: seconds for key, seconds in self._waited.items() if key in due}
        turns = in_turn((item for key, item in due.items() if key not in idle), members)[:AT_ONCE_MAX]
        self.now = frozenset(map(key_of, turns))
        firsts = {(item.job, members.current(item.trainer)): item for item in turns}
        waiting = due.keys() - self.now - idle - running
        self._counting = {key for key in waiting if self._counts(due[key], firsts.get((key[0], members.current(key[2]))))}
        return self.now - running

    def _counts(self, waits: Due, first: Due | None) -> bool:
        """`first`: whose turn it is on that trainer."""
        return first is not None and not first.is_dispute and self._seen[key_of(first)] <= waits.round

    def begin(self, key: Key) -> float:
        """Seconds that it has waited at its trainer's cost. If it fails and begins again, it has waited for nothing."""
        return self._waited.pop(key, 0.0)
