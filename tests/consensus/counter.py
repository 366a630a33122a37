"""Consensus: a small application, a log of numbers that are decided once each, with voters that join and leave."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from consensus.effects import DecidedBlock
from consensus.inputs import AppliedInput
from consensus.voter_set import VoterSet
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed

ITEMS_PER_BLOCK = 3
Numbers = tuple[int, ...]
Names = tuple[codec.Digest, ...]
GENESIS_ROOT = hashlib.sha256(b"genesis").digest()


@dataclass
class Counter:
    """Items below `CHANGE` are numbers. `CHANGE + i` makes candidate i a voter, or removes it if it is one."""

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

    def make_body(self, height: int, now_ms: int) -> bytes | None:
        items = sorted(self.pending)[:ITEMS_PER_BLOCK]
        return codec.encode(items) if items else None

    def why_body_refused(self, height: int, body: bytes, proposer: bytes) -> str | None:
        assert height == self.height + 1
        try:
            items = codec.decode(Numbers, body)
        except RemoteProtocolError as error:
            return str(error)
        if len(items) > ITEMS_PER_BLOCK:
            return "too many items"
        return "decided before" if self.done & set(items) else None

    def has_work(self) -> bool:
        return bool(self.pending)

    def make_compact_body(self, body: bytes) -> bytes:
        return body

    def expand_body(self, short: bytes) -> bytes | None:
        return short

    def is_member(self, peer: bytes) -> bool:
        return peer in self.candidates

    def last_supported_height(self) -> int | None:
        return None

    def statements_signed_by(self, peer: bytes) -> tuple[Signed, ...]:
        return ()

    def add(self, item: int) -> None:
        if item not in self.done:
            self.pending.add(item)

    def apply(self, decided: DecidedBlock) -> AppliedInput:
        assert decided.height == self.height + 1
        items = codec.decode(Numbers, decided.decode().body)
        self.height = decided.height
        self.root = hashlib.sha256(self.root + decided.digest).digest()
        self.done |= set(items)
        self.pending -= set(items)
        latest = self.voters[2]
        for item in items:
            if item >= self.CHANGE:
                candidate = {self.candidates[item - self.CHANGE]}
                latest = VoterSet.from_keys(set(latest.keys) ^ candidate)
        self.voters = (self.voters[1], self.voters[2], latest)
        return self.applied()

    def applied(self) -> AppliedInput:
        return AppliedInput(self.height, self.root, self.voters)


@dataclass
class Log(Counter):
    """Its short form names each number by its digest. A peer that lacks a number cannot expand the body."""

    known: dict[bytes, int] = field(default_factory=dict)

    def hear(self, item: int) -> None:
        self.known[digest_of(item)] = item
        self.add(item)

    def make_compact_body(self, body: bytes) -> bytes:
        return codec.encode(tuple(map(digest_of, codec.decode(Numbers, body))))

    def expand_body(self, short: bytes) -> bytes | None:
        items = [self.known.get(digest) for digest in codec.decode(Names, short)]
        return None if None in items else codec.encode(items)

    def is_member(self, peer: bytes) -> bool:
        return True

    def apply(self, decided: DecidedBlock) -> AppliedInput:
        applied = super().apply(decided)
        for item in codec.decode(Numbers, decided.decode().body):
            self.hear(item)
        return applied


def digest_of(item: int) -> bytes:
    return hashlib.sha256(codec.encode(item)).digest()
