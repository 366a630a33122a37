"""What consensus asks of whatever it decides about."""

from __future__ import annotations

from typing import Protocol


class Application(Protocol):
    """Answers must be quick (they run inside a step) and refer to the state after the last `Applied` event."""

    def propose(self, height: int, now_ms: int) -> bytes | None:
        """The body of a block for `height`, at most `block.BODY_BYTES_MAX` long; None: nothing is worth a block now."""

    def check(self, height: int, body: bytes, proposer: bytes) -> str | None:
        """Why a fresh body must not be prepared; None: nothing is wrong. Asked again after `WorkChanged`."""

    def has_work(self) -> bool:
        """Whether a block is due, which `propose` would then make: view timers run only while it is."""

    def participants(self, body: bytes) -> frozenset[bytes] | None:
        """The voters that cast a ballot in a decided body, a pure function of it; None if it closes no round."""
