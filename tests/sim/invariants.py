"""What must hold after every event, whatever the network and the liars do."""

from __future__ import annotations

from dataclasses import dataclass, field

from consensus.evidence import KINDS
from consensus.turn import Decided
from protocol import codec
from protocol.identity import Signed
from protocol.messages import Certificate, Commit, Decision, Prepare, Prepared, Proposed, TimedOut, Timeout, ViewEnded, Vote


class Violation(AssertionError):
    """The protocol broke a promise."""


@dataclass
class Invariants:
    """Watches all that honest nodes decide and send, over their restarts."""

    honest: set[bytes]
    decided: dict[int, bytes] = field(default_factory=dict)
    certified: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    signed: dict[tuple[bytes, str, int, int], bytes] = field(default_factory=dict)
    timed_out: dict[tuple[bytes, int], int] = field(default_factory=dict)
    last: dict[bytes, int] = field(default_factory=dict)

    def on_decided(self, node: bytes, decided: Decided) -> None:
        if decided.height != self.last.get(node, 0) + 1:
            raise Violation(f"height {decided.height} decided after {self.last.get(node, 0)}")
        self.last[node] = decided.height
        if self.decided.setdefault(decided.height, decided.digest) != decided.digest:
            raise Violation(f"two blocks decided at height {decided.height}")
        self._on_certificate(decided.certificate, Commit)

    def on_restart(self, node: bytes, height: int) -> None:
        self.last[node] = height

    def on_accused(self, culprit: bytes) -> None:
        if culprit in self.honest:
            raise Violation("evidence against an honest voter")

    def on_sent(self, node: bytes, message: object) -> None:
        match message:
            case Proposed(propose, _, justification):
                self._on_signed(node, propose)
                self._on_prepared(justification.high if justification else None)
            case Vote(vote):
                self._on_signed(node, vote)
            case TimedOut(timeout, high):
                self._on_signed(node, timeout)
                self._on_prepared(high)
            case Prepared(certificate):
                self._on_prepared(certificate)
            case ViewEnded(certificate):
                self._on_prepared(certificate.high)
            case Decision(_, certificate):
                self._on_certificate(certificate, Commit)

    def _on_prepared(self, certificate: Certificate | None) -> None:
        if certificate is not None:
            self._on_certificate(certificate, Prepare)

    def _on_certificate(self, certificate: Certificate, kind: type[Prepare] | type[Commit]) -> None:
        vote = codec.decode_message(certificate.vote, (kind,))
        if self.certified.setdefault((kind.TAG, vote.height, vote.view), vote.block) != vote.block:
            raise Violation(f"two {kind.TAG} certificates at {vote.height}.{vote.view}")

    def _on_signed(self, node: bytes, signed: Signed) -> None:
        if signed.signer != node:
            return  # passed on
        statement = codec.decode_message(signed.body, KINDS)
        slot = (node, statement.TAG, statement.height, statement.view)
        new = slot not in self.signed
        if self.signed.setdefault(slot, signed.body) != signed.body:
            raise Violation(f"an honest voter signed twice at {slot[1:]}")
        given_up = self.timed_out.get((node, statement.height), -1)
        if isinstance(statement, Timeout):
            self.timed_out[node, statement.height] = max(given_up, statement.view)
        elif new and isinstance(statement, (Prepare, Commit)) and given_up >= statement.view:
            raise Violation(f"{statement.TAG} at {statement.height}.{statement.view} after a timeout of view {given_up}")
