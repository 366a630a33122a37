"""A small application to agree on: a log of numbers, each decided once, and voters that come and go."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from consensus.events import Applied
from consensus.turn import Decided
from consensus.voters import VoterSet
from protocol import codec
from protocol.identity import Signed

ITEMS_PER_BLOCK = 3
GENESIS_ROOT = hashlib.sha256(b"genesis").digest()


@dataclass
class Counter:
    """Items below `CHANGE` are just numbers; `CHANGE + i` makes candidate i a voter, or removes it if it is one."""

    founders: VoterSet
    candidates: tuple[bytes, ...] = ()
    pending: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    height: int = 0
    root: bytes = GENESIS_ROOT
    voters: tuple[VoterSet, VoterSet, VoterSet] = field(init=False)

    CHANGE = 1_000_000

    def __post_init__(self) -> None:
        self.voters = (self.founders,) * 3

    def propose(self, height: int, now_ms: int) -> bytes | None:
        items = sorted(self.pending)[:ITEMS_PER_BLOCK]
        return codec.encode(items) if items else None

    def check(self, height: int, body: bytes, proposer: bytes) -> str | None:
        assert height == self.height + 1
        items = codec.unpack(body, len(body))
        if len(items) > ITEMS_PER_BLOCK:
            return "too many items"
        return "decided before" if self.done & set(items) else None

    def has_work(self) -> bool:
        return bool(self.pending)

    def condense(self, body: bytes) -> bytes:
        return body

    def expand(self, short: bytes) -> bytes | None:
        return short

    def is_member(self, peer: bytes) -> bool:
        return peer in self.candidates

    def knows_until(self) -> int | None:
        return None

    def signed_by(self, peer: bytes) -> tuple[Signed, ...]:
        return ()

    def add(self, item: int) -> None:
        if item not in self.done:
            self.pending.add(item)

    def apply(self, decided: Decided) -> Applied:
        assert decided.height == self.height + 1
        items = codec.unpack(decided.decode().body, 1 << 20)
        self.height = decided.height
        self.root = hashlib.sha256(self.root + decided.digest).digest()
        self.done |= set(items)
        self.pending -= set(items)
        latest = self.voters[2]
        for item in items:
            if item >= self.CHANGE:
                candidate = {self.candidates[item - self.CHANGE]}
                latest = VoterSet.of(set(latest.keys) ^ candidate)
        self.voters = (self.voters[1], self.voters[2], latest)
        return self.applied()

    def applied(self) -> Applied:
        return Applied(self.height, self.root, self.voters)
