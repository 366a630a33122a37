"""A journal in memory that survives the crash of its node."""

from __future__ import annotations

from collections.abc import Sequence

from consensus.evidence import Evidence
from consensus.turn import Decided, Record, Restart, Silence, StoredBlock, StoredCertificate, Voted
from protocol.messages import Certificate


class MemoryJournal:
    def __init__(self) -> None:
        self.decided: dict[int, Decided] = {}
        self.evidence: list[Evidence] = []
        self.silent_below = 0
        self._votes: list[Voted] = []
        self._blocks: dict[bytes, StoredBlock] = {}
        self._prepared: Certificate | None = None

    def append(self, records: Sequence[Record]) -> None:
        for record in records:
            match record:
                case Voted():
                    self._votes.append(record)
                case StoredBlock():
                    self._blocks[record.digest] = record
                case StoredCertificate():
                    self._prepared = record.certificate
                case Decided():
                    self._decide(record)
                case Evidence():
                    self.evidence.append(record)
                case Silence():
                    self.silent_below = max(self.silent_below, record.below)

    def _decide(self, decided: Decided) -> None:
        assert decided.height == len(self.decided) + 1, "decided heights must be contiguous"
        self.decided[decided.height] = decided
        self._votes = [voted for voted in self._votes if voted.slot[1] > decided.height]
        self._blocks, self._prepared = {}, None

    def load(self) -> Restart:
        last = [self.decided[height] for height in sorted(self.decided)[-2:]]
        certificate, blocks = self._prepared, tuple(self._blocks.values())
        return Restart(tuple(last), tuple(self._votes), blocks, certificate, silent_below=self.silent_below)

    def decision(self, height: int) -> Decided | None:
        return self.decided.get(height)

    def block(self, digest: bytes) -> bytes | None:
        stored = self._blocks.get(digest)
        return stored.block if stored else None
