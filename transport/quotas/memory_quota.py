"""The memory that links may hold: two budgets, one for all strangers and one for everybody else.

What is counted: messages that wait to be sent, messages that came in part, messages that nobody has taken yet, and records of
circuits, inside a relay and at their end. Within a budget
every peer has an equal share, and may hold more while there is room. So whoever keeps to its share loses nothing, whatever the
others do.

| the budget is full, and a peer needs room  | a message to it                          | a message of it, which is here already |
|--------------------------------------------|------------------------------------------|----------------------------------------|
| it would hold more than its share          | is refused                               | ends its link                          |
| it keeps to its share                      | ends the link of the one that holds most | does so, too                           |
"""

from __future__ import annotations

import math

from protocol.limits import MESSAGE_BYTES_MAX, SNAPSHOT_PART_BYTES_MAX
from transport.peer_policy import PeerClass

# Each of 512 links could hold 48 MiB of queues: 24 GiB. Now 200 voters have a share of 2.5 MiB each, and seven peers hold as much
# as they ever could.
MEMBERS_BYTES = 512 << 20
STRANGERS_BYTES = 32 << 20
STRANGERS_MAX = 16  # links: then one gives way for the next; each of them costs work at every height

assert MEMBERS_BYTES > STRANGERS_BYTES >= 2 * MESSAGE_BYTES_MAX, "one message is no reason to end a link"
assert STRANGERS_BYTES // STRANGERS_MAX > SNAPSHOT_PART_BYTES_MAX + (64 << 10), "a share holds a part of a snapshot"


class MemoryBudget:
    def __init__(self, bytes_max: float = math.inf) -> None:
        self.bytes_max, self.held = bytes_max, 0
        self.accounts: dict[bytes, MemoryAccount] = {}


class MemoryAccount:
    """What one peer holds, in bytes: its link's queues, messages of it that nobody has taken yet, records of its circuits."""

    def __init__(self, owner: bytes = b"", budget: MemoryBudget | None = None) -> None:
        self.owner, self.held = owner, 0
        self.is_linked = False
        self._budget = budget or MemoryBudget()
        self._budget.accounts[owner] = self

    def add_bytes(self, size: int) -> None:
        self.held += size
        self._budget.held += size
        assert self.held >= 0
        if not self.held and not self.is_linked and self._budget.accounts.get(self.owner) is self:
            del self._budget.accounts[self.owner]

    def account_to_evict(self, size: int = 0) -> MemoryAccount | None:
        """Who must give way so that there is room for `size` bytes more of this one, itself perhaps; None: there is room."""
        budget = self._budget
        if budget.held + size <= budget.bytes_max:
            return None
        if self.held + size > budget.bytes_max / max(1, len(budget.accounts)):
            return self
        return max(budget.accounts.values(), key=lambda account: account.held)

    def move_to_budget(self, budget: MemoryBudget) -> None:
        if budget is not self._budget:
            self._budget.held -= self.held
            self._budget.accounts.pop(self.owner, None)
            self._budget = budget
            budget.held += self.held
            budget.accounts[self.owner] = self


class MemoryQuota:
    def __init__(self, members: int = MEMBERS_BYTES, strangers: int = STRANGERS_BYTES) -> None:
        self._members, self._strangers = MemoryBudget(members), MemoryBudget(strangers)

    @property
    def held(self) -> int:
        return self._members.held + self._strangers.held

    def account_of(self, owner: bytes, standing: PeerClass) -> MemoryAccount:
        """The one account of this peer, from now on in the budget that its standing gives it."""
        budget = self._strangers if standing is PeerClass.STRANGER else self._members
        found = self._members.accounts.get(owner) or self._strangers.accounts.get(owner)
        if found is None:
            return MemoryAccount(owner, budget)
        found.move_to_budget(budget)
        return found
