"""Texts that a worker makes for people, a slice at a time: what a round waits for goes in between.

A slice is a request with a reply like any other, so texts wait behind proposals and audits in the daemon's one queue, and nobody
who reads slowly is waited for. Between slices a text lies here, with all that its next token needs.
"""

from __future__ import annotations

import codecs
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from training import worker_protocol

SLICE_SECONDS: Final = 0.1  # so long a proposal may wait for a text, and one pass longer; ten times a second people see it grow
OPEN_MAX: Final = 8  # more than the daemon lets people begin at once: those that nobody reads any more go first


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


class TextGenerations:
    def __init__(self) -> None:
        self._open: OrderedDict[int, TextGeneration] = OrderedDict()  # by the daemon's number; the least recently used first

    def next_slice(
        self, request: worker_protocol.GenerateRequest, begin: Callable[[], TextGeneration]
    ) -> worker_protocol.GenerateReply:
        """The text's next slice. One that is not here, as after a restart, begins anew, and what was told of it is passed over:
        it comes to the same text. An exception, such as that nobody waits for the text any more, drops it.
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
    """One text, as far as it is made."""

    def __init__(
        self, pieces: Iterator[bytes], stops: StopSequenceDecoder, told: int, withholds: Callable[[bytes], bool] | None = None
    ) -> None:
        """`pieces` are the bytes of the next tokens. The first `told` characters were told before.

        Where people may not see some texts, `withholds` judges a whole one, and nothing of it is told before.
        """
        self.told = told
        self.is_over = self.is_withheld = False
        self._pieces, self._stops, self._known, self._withholds = pieces, stops, told, withholds
        self._whole, self._bytes = "", 0

    def make_slice(self, until: float) -> str:
        """What is to be told, when it is over or this time has come, as `time.monotonic` has it; one token at least."""
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
