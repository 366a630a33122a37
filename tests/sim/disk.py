"""The disk of one simulated peer: a byte log that a crash may tear, and the decided and applied blocks.

One append is one frame: length, check of the length, digest, payload. A torn last frame is cut off when the
log is read. Any other mismatch is damage, and stops the peer.
"""

from __future__ import annotations

import hashlib
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from consensus import effects
from consensus.block import decode_header, encode_header, make_header
from consensus.effects import (
    DecidedBlock,
    JournalRecord,
    OwnRoundStatement,
    OwnStatement,
    RestartState,
    StoredBlock,
    StoredCertificate,
    VotePause,
)
from consensus.evidence import Evidence
from ledger.ledger_state import LedgerState
from protocol import codec
from protocol.errors import LocalProtocolError, StorageError
from protocol.identity import Signed
from protocol.messages import Ballot, LightBlock

KINDS: tuple[type, ...] = typing.get_args(effects.JournalRecord)
HEADER_BYTES = 4 + 4  # length of the payload, and the first bytes of its SHA-256: a wrong length must not look like a torn tail
DIGEST_BYTES = 16


def frame(records: Sequence[JournalRecord]) -> bytes:
    payload = codec.encode([[KINDS.index(type(record)), codec.encode(record)] for record in records])
    length = len(payload).to_bytes(4, "big")
    return length + _check(length, 4) + _check(payload, DIGEST_BYTES) + payload


def _check(data: bytes, size: int) -> bytes:
    return hashlib.sha256(data).digest()[:size]


def read(log: bytes) -> Iterator[list[JournalRecord]]:
    """Return the records of each whole frame. Raises `StorageError` for damage that no crash explains."""
    at = 0
    while len(log) - at >= HEADER_BYTES + DIGEST_BYTES:
        length, check = log[at : at + 4], log[at + 4 : at + HEADER_BYTES]
        if _check(length, 4) != check:
            raise StorageError(f"the log is damaged at byte {at}: a length has other bytes")
        begin = at + HEADER_BYTES + DIGEST_BYTES
        end = begin + int.from_bytes(length, "big")
        if end > len(log):
            return
        payload = log[begin:end]
        if _check(payload, DIGEST_BYTES) != log[at + HEADER_BYTES : begin]:
            if end == len(log):
                return  # the last frame: its sectors may reach the disk in any order
            raise StorageError(f"the log is damaged at byte {at}: a frame has other bytes")
        yield [codec.decode(KINDS[kind], data) for kind, data in codec.unpack(payload, len(payload))]
        at = end


class Disk:
    """An implementation of `consensus.effects.Journal`. Frames are encoded only when needed, at a crash or restart."""

    def __init__(self) -> None:
        self.decided: dict[int, DecidedBlock] = {}
        self.applied: dict[int, LedgerState] = {}
        self.evidence: list[Evidence] = []
        self.silent_below = 0
        self.rounds: dict[tuple[bytes, int], dict[str, Signed]] = {}
        self.accepted: dict[tuple[bytes, int], tuple[Signed, ...]] = {}  # proposals of others, by a ballot of this peer
        self.links_by_height: dict[int, LightBlock] = {}  # of heights whose next voter set differs
        self.headers: dict[int, bytes] = {}  # of heights below the decided ones, after a snapshot
        self.fails = False  # the next append cannot be made durable
        self._frames: list[tuple[JournalRecord, ...]] = []  # records of undecided heights
        self._tail = b""  # of an append that a crash interrupted
        self._bytes: dict[int, bytes] | None = None  # overwritten bytes, by position: damage
        self._damaged_row = False  # of a table; each row carries its digest, so that it is noticed

    def image(self) -> Disk:
        """Return a copy of the disk's current content, to be restored later."""
        other = Disk()
        other.decided, other.applied, other.evidence = dict(self.decided), dict(self.applied), list(self.evidence)
        other.rounds = {key: dict(value) for key, value in self.rounds.items()}
        other.accepted = dict(self.accepted)
        other.links_by_height, other.headers = dict(self.links_by_height), dict(self.headers)
        other._frames, other._tail = list(self._frames), self._tail
        return other

    # Journal ---------------------------------------------------------------------------------------------------------

    def append_records(self, records: Sequence[JournalRecord]) -> None:
        if self.fails:
            raise StorageError("fsync failed")
        assert not self._tail, "a torn log was not read before it is written again"
        self._frames.append(tuple(records))
        self._settle(len(self._frames) - 1)

    def read_restart_state(self) -> RestartState:
        if self._damaged_row:
            raise StorageError("a row has other bytes than its digest says")
        self._frames = [tuple(records) for records in read(self._log())]
        self._tail = b""
        self._settle(0)
        last = [self.decided[height] for height in sorted(self.decided)[-2:]]
        kept = self.undecided()
        votes = tuple(record for record in kept if isinstance(record, OwnStatement))
        blocks = tuple(record for record in kept if isinstance(record, StoredBlock))
        certificates = [record.certificate for record in kept if isinstance(record, StoredCertificate)]
        certificate = certificates[-1] if certificates else None
        return RestartState(tuple(last), votes, blocks, certificate, tuple(self.evidence), self.silent_below)

    def get_decision(self, height: int) -> DecidedBlock | None:
        return self.decided.get(height)

    def get_block(self, digest: bytes) -> bytes | None:
        for records in self._frames:
            for record in records:
                if isinstance(record, StoredBlock) and record.digest == digest:
                    return record.block
        return None

    def undecided(self) -> list[JournalRecord]:
        return [record for records in self._frames for record in records]

    def round_votes(self) -> list[OwnRoundStatement]:
        return [
            OwnRoundStatement(tag, *key, signed, self.accepted_in(*key) if tag == Ballot.TAG else ())
            for key, table in self.rounds.items()
            for tag, signed in table.items()
        ]

    def spoken(self, job: bytes, number: int) -> dict[str, Signed]:
        return dict(self.rounds.get((job, number), {}))

    def accepted_in(self, job: bytes, number: int) -> tuple[Signed, ...]:
        return self.accepted.get((job, number), ())

    @property
    def last(self) -> int:
        """The last decided height."""
        return max(self.decided, default=0)

    def decided_above(self, height: int) -> list[DecidedBlock]:
        return [self.decided[of] for of in range(height + 1, self.last + 1)]

    # Snapshots -------------------------------------------------------------------------------------------------------

    def get_header(self, height: int) -> bytes | None:
        decided = self.decided.get(height)
        return encode_header(make_header(decided.decode())) if decided else self.headers.get(height)

    def light_blocks(self, after: int, until: int) -> Iterator[LightBlock]:
        return (link for height, link in sorted(self.links_by_height.items()) if after < height <= until)

    def restore(
        self, decided: Sequence[DecidedBlock], state: LedgerState, headers: Iterable[bytes], links: Iterable[LightBlock]
    ) -> None:
        """Install a certified state, and keep the records that this peer signed above the last decision."""
        if self.last < decided[0].height - 1:
            self.decided = {}
        self.decided |= {item.height: item for item in decided}
        self.applied = {state.height: state}
        self.headers |= {decode_header(header).height: header for header in headers}
        self.links_by_height |= {decode_header(link.header).height: link for link in links}
        last = self.last
        self._frames = [rest for records in self._frames if (rest := tuple(r for r in records if _height(r) > last))]

    # Faults ----------------------------------------------------------------------------------------------------------

    def tear(self, records: Sequence[JournalRecord], fraction: float, garbled: bool) -> None:
        """Crash during the append of `records`: this share of its bytes is written, and its last ones may be wrong."""
        data = frame(records)
        kept = data[: int(len(data) * fraction)]
        if garbled and kept:
            kept = kept[:-1] + bytes([kept[-1] ^ 0x55])
        self._tail = kept

    def damage(self, position: int) -> None:
        """Flip a durable byte."""
        self._bytes = {position: 0xFF}

    def damage_middle(self, where: float) -> None:
        """Flip a byte before the last frame, which might be torn. Without earlier frames flip one in a table."""
        before = len(self._log()) - len(self._tail) - (len(frame(self._frames[-1])) if self._frames else 0)
        if before:
            self.damage(int(where * before))
        else:
            self._damaged_row = True

    @property
    def is_damaged(self) -> bool:
        return self._damaged_row or self._bytes is not None

    def _log(self) -> bytes:
        log = b"".join(frame(records) for records in self._frames)
        for position, flipped in (self._bytes or {}).items():
            log = log[:position] + bytes([log[position] ^ flipped]) + log[position + 1 :]
        return log + self._tail

    # Tables ----------------------------------------------------------------------------------------------------------

    def _settle(self, first: int) -> None:
        """Move records of decided heights to the tables, and drop those that a decision made obsolete.

        Frames before number `first` were processed when they were written. After that only a decision changes them.
        """
        height = before = self.last
        kept = self._frames[:first]
        for records in self._frames[first:]:
            rest: list[JournalRecord] = []
            for record in records:
                match record:
                    case DecidedBlock():
                        height = self._decide(record)
                    case OwnRoundStatement():
                        self._speak(record)
                    case Evidence():
                        self.evidence.append(record)
                    case VotePause():
                        self.silent_below = max(self.silent_below, record.below)
                    case _:
                        rest.append(record)
            if rest:
                kept.append(tuple(rest))
        if height > before:
            kept = [rest for records in kept if (rest := tuple(r for r in records if _height(r) > height))]
        self._frames = kept

    def _decide(self, decided: DecidedBlock) -> int:
        assert decided.height == self.last + 1, "decided heights must be contiguous"
        self.decided[decided.height] = decided
        return decided.height

    def _speak(self, voted: OwnRoundStatement) -> None:
        table = self.rounds.setdefault((voted.job, voted.round), {})
        if table.setdefault(voted.tag, voted.signed).body != voted.signed.body:
            raise LocalProtocolError(f"a second {voted.tag} of round {voted.round}")
        if voted.accepted:
            self.accepted.setdefault((voted.job, voted.round), voted.accepted)


def _height(record: Any) -> int:
    return int(record.slot[1]) if isinstance(record, OwnStatement) else int(record.height)
