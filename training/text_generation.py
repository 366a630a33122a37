"""Generation of texts for people in short slices, so that requests of rounds need not wait for a whole text.

A slice is an ordinary request with a reply. Texts therefore wait behind proposals and audits in the daemon's only queue, and a
slow reader blocks nobody. Between slices this module keeps the state of a text that its next token needs.
"""

from __future__ import annotations

import codecs
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from training import worker_protocol

# Seconds of a slice: a proposal waits at most this long plus one forward pass, and readers see the text grow ten times a second.
SLICE_SECONDS: Final = 0.1
OPEN_MAX: Final = 8  # most unfinished texts, more than the daemon allows at once: beyond, the least recently used text is dropped


class StopSequenceDecoder:
    """A decoder from the bytes of tokens to text, which ends before the first complete stop text.

    It holds back bytes that may begin a stop text, and bytes of an incomplete character. The text is therefore independent of the
    boundaries between tokens. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.has_ended = False
        self._stops = [stop.encode() for stop in stops]
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed_bytes(self, data: bytes) -> str:
        """Decode further bytes. Return the text among them that certainly precedes any stop text."""
        assert not self.has_ended
        self._held += data
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.has_ended = bool(found)
        seen = min(found)[1] if found else len(self._held) - self._begun()
        text = self._decoder.decode(self._held[:seen], final=self.has_ended)
        self._held = self._held[seen:]
        return text

    def flush_text(self) -> str:
        """Return the rest of the text, which was held back. Call it after the last token."""
        return self._decoder.decode(self._held, final=True)

    def _begun(self) -> int:
        """Return how many of the last undecoded bytes may begin a stop text."""
        begun = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
        return max(begun, default=0)


class TextGenerations:
    def __init__(self) -> None:
        # Unfinished texts by the daemon's number, the least recently used text first.
        self._open: OrderedDict[int, TextGeneration] = OrderedDict()

    def next_slice(
        self, request: worker_protocol.GenerateRequest, begin: Callable[[], TextGeneration]
    ) -> worker_protocol.GenerateReply:
        """Return the next slice of the requested text.

        A text that is not in memory, for example after a restart, is generated again from its start by `begin`. The first
        `told_characters` characters are the same as before, so they are skipped. An exception in the generation drops the text
        from memory. This happens, for example, when no reader waits for the text.
        """
        text = self._open.pop(request.text_number, None)
        if text is None or text.told != request.told_characters:
            text = begin()
        piece = text.make_slice(time.monotonic() + SLICE_SECONDS)
        if not text.is_over:
            self._open[request.text_number] = text
            while len(self._open) > OPEN_MAX:
                self._open.popitem(last=False)
        return worker_protocol.GenerateReply(piece, text.is_over, text.is_withheld)


class TextGeneration:
    """The state of one unfinished text."""

    def __init__(
        self, pieces: Iterator[bytes], stops: StopSequenceDecoder, told: int, withholds: Callable[[bytes], bool] | None = None
    ) -> None:
        """`pieces` are the bytes of the next tokens. The first `told` characters were returned before.

        If people must not see some texts, `withholds` judges the whole text, and no part of the text is returned before.
        """
        self.told = told
        self.is_over = self.is_withheld = False
        self._pieces, self._stops, self._known, self._withholds = pieces, stops, told, withholds
        self._whole, self._bytes = "", 0

    def make_slice(self, until: float) -> str:
        """Return the next slice: the text of one token, and of more until the text ends or `time.monotonic` reaches `until`."""
        parts = [self._next()]
        while not self.is_over and time.monotonic() < until:
            parts.append(self._next())
        text = "".join(parts)
        if self._withholds is not None:
            self._whole += text
            text = self._whole if self.is_over else ""
            self.is_withheld = self.is_over and self._withholds(text.encode())
            text = "" if self.is_withheld else text
        piece, self._known = text[self._known :], max(0, self._known - len(text))
        self.told += len(piece)
        return piece

    def _next(self) -> str:
        data = next(self._pieces, None)
        if data is not None:
            self._bytes += len(data)
        if data is None or self._bytes > worker_protocol.TEXT_BYTES_MAX:
            self.is_over = True
            return self._stops.flush_text()
        text = self._stops.feed_bytes(data)
        self.is_over = self._stops.has_ended
        return text
