"""From the bytes of tokens to the text that a person may see already."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopSequenceDecoder:
    """Bytes come in as tokens have them; text goes out up to the first stop text that is complete.

    Held back is what a stop text may begin with, and the bytes of a character that is not complete. So the text is the same
    wherever one token ends and the next one begins. Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.has_ended = False
        self._stops = [stop.encode() for stop in stops]
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed_bytes(self, data: bytes) -> str:
        """What may be seen now and could not before."""
        assert not self.has_ended
        self._held += data
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.has_ended = bool(found)
        seen = min(found)[1] if found else len(self._held) - self._begun()
        text = self._decoder.decode(self._held[:seen], final=self.has_ended)
        self._held = self._held[seen:]
        return text

    def flush_text(self) -> str:
        """What is held back, once no token comes any more."""
        return self._decoder.decode(self._held, final=True)

    def _begun(self) -> int:
        """Bytes at the end that a stop text may begin with."""
        begun = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
        return max(begun, default=0)
