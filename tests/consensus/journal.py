"""Consensus and the layers above: a journal in memory, which survives the crash of its replica and can be copied."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from consensus.effects import DecidedBlock, JournalRecord, OwnStatement, RestartState, StoredBlock, StoredCertificate, VotePause
from consensus.evidence import Evidence
from protocol.messages import Certificate


class MemoryJournal:
    def __init__(self) -> None:
        self.decided: dict[int, DecidedBlock] = {}
        self.evidence: list[Evidence] = []
        self.silent_below = 0
        self.votes: list[OwnStatement] = []
        self.blocks: dict[bytes, StoredBlock] = {}
        self.prepared: Certificate | None = None

    def copy(self) -> MemoryJournal:
        other = copy(self)
        other.decided, other.evidence = dict(self.decided), list(self.evidence)
        other.votes, other.blocks = list(self.votes), dict(self.blocks)
        return other

    def append_records(self, records: Sequence[JournalRecord]) -> None:
        for record in records:
            match record:
                case OwnStatement():
                    self.votes.append(record)
                case StoredBlock():
                    self.blocks[record.digest] = record
                case StoredCertificate():
                    self.prepared = record.certificate
                case DecidedBlock():
                    self._decide(record)
                case Evidence():
                    self.evidence.append(record)
                case VotePause():
                    self.silent_below = max(self.silent_below, record.below)

    def _decide(self, decided: DecidedBlock) -> None:
        assert decided.height == len(self.decided) + 1, "decided heights must be contiguous"
        self.decided[decided.height] = decided
        self.votes = [voted for voted in self.votes if voted.slot[1] > decided.height]
        self.blocks, self.prepared = {}, None

    def read_restart_state(self) -> RestartState:
        last = [self.decided[height] for height in sorted(self.decided)[-2:]]
        certificate, blocks = self.prepared, tuple(self.blocks.values())
        return RestartState(tuple(last), tuple(self.votes), blocks, certificate, no_votes_below=self.silent_below)

    def get_decision(self, height: int) -> DecidedBlock | None:
        return self.decided.get(height)

    def get_block(self, digest: bytes) -> bytes | None:
        stored = self.blocks.get(digest)
        return stored.block if stored else None
