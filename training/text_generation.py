"""Generation of texts for people in short slices, so that requests of rounds need not wait for a whole text.

A slice is an ordinary request with a reply. Texts therefore wait behind proposals and audits in the daemon's only queue, and a
slow reader blocks nobody. Between slices this module keeps the state of a text that its next token needs.
"""

from __future__ import annotations

import codecs
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Generic, Protocol, TypeVar

from training import worker_protocol

# Seconds of a slice: a proposal waits at most this long plus one forward pass, and readers see the text grow ten times a second.
SLICE_SECONDS: Final = 0.1
# Most unfinished generations of a kind, more than the daemon allows at once: beyond, the least recently used one is dropped.
OPEN_MAX: Final = 8


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


class Generation(Protocol):
    told: int  # characters or tokens that were returned

    @property
    def is_over(self) -> bool: ...


G = TypeVar("G", bound=Generation)


class UnfinishedGenerations(Generic[G]):
    """Generations between two of their slices, by the daemon's number, the least recently used one first."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, G] = OrderedDict()

    @contextmanager
    def resume_generation(self, number: int, told: int, begin: Callable[[], G]) -> Iterator[G]:
        """Provide a generation for its next slice, and keep it afterwards if it is not over.

        A generation that is not in memory, for example after a restart, is made again from its start by `begin`. Its first part,
        of the length `told`, is the same as before, so it is skipped. An exception in the generation drops it from memory. This
        happens, for example, when nobody waits for the request any more.
        """
        generation = self._open.pop(number, None)
        if generation is None or generation.told != told:
            generation = begin()
        yield generation
        if not generation.is_over:
            self._open[number] = generation
            while len(self._open) > OPEN_MAX:
                self._open.popitem(last=False)


class TextGenerations(UnfinishedGenerations["TextGeneration"]):
    def next_slice(
        self, request: worker_protocol.GenerateRequest, begin: Callable[[], TextGeneration]
    ) -> worker_protocol.GenerateReply:
        """Return the next slice of the requested text."""
        with self.resume_generation(request.text_number, request.told_characters, begin) as text:
            piece = text.make_slice(time.monotonic() + SLICE_SECONDS)
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
