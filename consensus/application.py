"""What consensus asks of whatever it decides about."""

from __future__ import annotations

from typing import Protocol

from protocol.identity import Signed


class Application(Protocol):
    """Answers must be quick (they run inside a step) and refer to the state after the last `CurrentState` event."""

    def make_body(self, height: int, now_ms: int) -> bytes | None:
        """The body of a block for `height`, at most `block.BODY_BYTES_MAX` long; None: nothing is worth a block now."""

    def why_body_refused(self, height: int, body: bytes, proposer: bytes) -> str | None:
        """Why a fresh body must not be prepared; None: nothing is wrong. Asked again after `WorkChangedInput`."""

    def has_work(self) -> bool:
        """Whether a block is due, which `make_body` would then make: view timers run only while it is."""

    def make_compact_body(self, body: bytes) -> bytes:
        """The body with whatever others should hold already replaced by its digest: a pure function of the body."""

    def expand_body(self, short: bytes) -> bytes | None:
        """The body that was condensed to `short`; None: some part is not here. Asked again after `WorkChangedInput`.

        Raises `RemoteProtocolError` if this is no valid short form. Whether it is the right body is checked by its digest.
        """

    def is_member(self, peer: bytes) -> bool:
        """Whether the leader sends decided blocks to this peer though it does not vote; strangers have to ask for them."""

    def last_supported_height(self) -> int | None:
        """The last height that this program can judge. Nothing is signed above it. None: there is no such height."""

    def statements_signed_by(self, peer: bytes) -> tuple[Signed, ...]:
        """What this peer has signed in rounds that are open here, or may soon be: it may have forgotten that with its disk."""
