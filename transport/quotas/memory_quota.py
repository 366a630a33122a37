"""Limits of the memory that links use: one budget for all strangers, and one for all other peers.

The account of a peer counts messages that are queued, incomplete, or received and not delivered yet. It also counts records of
the peer's circuits, both in a relay and at the ends. Each peer has an equal share of its budget, and may use more while the
budget is not full. So a peer within its share never loses its link because others exceed theirs.

| budget is full, and a peer      | a message to it                     | a message from it                     |
|---------------------------------|-------------------------------------|---------------------------------------|
| would exceed its share          | is refused                          | ends its link                         |
| stays within its share          | ends the link of the largest holder | ends the link of the largest holder   |
"""

from __future__ import annotations

import math

from protocol.limits import MESSAGE_BYTES_MAX, SNAPSHOT_PART_BYTES_MAX
from transport.peer_policy import PeerClass

# Bytes for all peers except strangers. Without this budget each of 512 links could fill its queues with 48 MiB, 24 GiB in all.
# With it, 200 voters have a share of 2.5 MiB each, and seven peers can still fill their queues.
MEMBERS_BYTES = 512 << 20
STRANGERS_BYTES = 32 << 20
STRANGERS_MAX = 16  # links of strangers, since each costs work at every height; a new one evicts another

assert MEMBERS_BYTES > STRANGERS_BYTES >= 2 * MESSAGE_BYTES_MAX, "one message is no reason to end a link"
assert STRANGERS_BYTES // STRANGERS_MAX > SNAPSHOT_PART_BYTES_MAX + (64 << 10), "a share holds a part of a snapshot"


class MemoryBudget:
    def __init__(self, bytes_max: float = math.inf) -> None:
        self.bytes_max, self.held = bytes_max, 0
        self.accounts: dict[bytes, MemoryAccount] = {}


class MemoryAccount:
    """The bytes that one peer holds: its link's queues, its undelivered messages, and records of its circuits."""

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
        """Return the account to evict before `size` more bytes are added to this account.

        It may be this account itself. None: the budget has room.
        """
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
        """Return the account of a peer, and move it to the budget of the peer's class `standing`."""
        budget = self._strangers if standing is PeerClass.STRANGER else self._members
        found = self._members.accounts.get(owner) or self._strangers.accounts.get(owner)
        if found is None:
            return MemoryAccount(owner, budget)
        found.move_to_budget(budget)
        return found
