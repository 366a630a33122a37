"""Answers whoever asks for a blob: with the chunk, or with who else has it, while it waits for its turn (`transport.serving`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

import trio

from protocol.errors import StorageError
from protocol.limits import BLOB_CHUNK_BYTES
from protocol.messages import BlobChunk, BlobElsewhere, GetBlob, HasBlob, NoBlob
from transport.blobs import BlobStore
from transport.framing import Priority
from transport.serving import Answer, Serving

log = logging.getLogger(__name__)

TURNS_BYTES_MIN = 2 * BLOB_CHUNK_BYTES  # what is smaller is sent at once: a turn costs as much

Send = Callable[[bytes, GetBlob | BlobChunk | NoBlob | BlobElsewhere | HasBlob, Priority], bool]


class Holder:
    def __init__(
        self,
        blobs: BlobStore,
        send: Send,
        comes: Callable[[bytes], bool],
        takes_turns: Callable[[bytes], bool],
        is_stranger: Callable[[bytes], bool],
    ) -> None:
        """`comes`: whether this peer is getting a blob. `takes_turns`: whether a peer's link knows the messages about turns."""
        self._blobs, self._send, self._comes = blobs, send, comes
        self._takes_turns, self._is_stranger = takes_turns, is_stranger
        self._serving = Serving(is_stranger)
        self._served = trio.Event()  # who is served now, or waits, has changed
        self.bytes_sent = 0
        self.reveals_sent = 0  # of them, what serves audits alone
        self.reveals_to = Counter[bytes]()  # bytes of `reveals_sent`, by peer

    async def run(self) -> None:
        """Ends turns that are over."""
        while True:
            self._served = trio.Event()
            with trio.move_on_at(self._serving.due()):
                await self._served.wait()
            self._offer(self._serving.lapse(trio.current_time()))

    def on_get_blob(self, peer: bytes, request: GetBlob) -> None:
        """Whoever does not know how long a blob is asks ahead for more than there is; that is answered by what there is."""
        size = self._blobs.piece_size(request.digest)
        if size is not None and request.offset >= size > 0:
            return
        if self._puts_off(peer, request.digest, size):
            return
        chunk = None if size is None else self._read(request, size)
        if chunk is not None and self._send(peer, chunk, Priority.BULK):
            self.bytes_sent += len(chunk.chunk)
            if self._blobs.is_reveal(request.digest):
                self.reveals_sent += len(chunk.chunk)
                if not self._is_stranger(peer):  # who has as many keys as it likes
                    self.reveals_to[peer] += len(chunk.chunk)
            if not self._takes_turns(peer) and request.offset + len(chunk.chunk) == size:  # it never says that it has it
                self.given_back(request.digest, peer)
        else:  # also if the queue is full: "not now" is said at once, rather than left to be found out by a deadline
            self._send(peer, NoBlob(request.digest), Priority.CONTROL)

    def given_back(self, digest: bytes, peer: bytes) -> None:
        """This peer needs its place no more, and waits no more."""
        self._offer((other, digest) for other in self._serving.declined(digest, peer, trio.current_time()))

    def has(self, digest: bytes, peer: bytes) -> None:
        """A peer says that it has the blob now."""
        self._offer((other, digest) for other in self._serving.has(digest, peer, trio.current_time()))

    def came(self, digest: bytes, size: int) -> None:
        """This peer has the blob now."""
        self._offer((other, digest) for other in self._serving.came(digest, size, trio.current_time()))

    def left(self, peer: bytes) -> None:
        """Its link has ended."""
        self._offer(self._serving.left(peer, trio.current_time()))

    # Own -------------------------------------------------------------------------------------------------------------

    def _puts_off(self, peer: bytes, digest: bytes, size: int | None) -> bool:
        """Whether it has to wait for its turn. What only audits ask for is sent at once: its asker has a deadline."""
        is_coming = size is None and self._comes(digest)
        waits_in_turn = self._takes_turns(peer) or self._is_stranger(peer)
        if not waits_in_turn or not (is_coming or (size or 0) >= TURNS_BYTES_MIN) or self._blobs.is_reveal(digest):
            return False
        answer = self._serving.ask(digest, peer, size, trio.current_time())
        if answer is Answer.ELSEWHERE:
            told = BlobElsewhere(digest, size is not None, self._serving.others(digest, peer))
            if not self._send(peer, told, Priority.CONTROL):  # a stranger of wire version 2 hears "not now", and asks again
                self.given_back(digest, peer)
                self._send(peer, NoBlob(digest), Priority.CONTROL)
        elif answer is Answer.PLACE:  # said at once: over a narrow uplink the first chunk takes longer than the asker's patience
            self._send(peer, HasBlob(digest), Priority.CONTROL)
        if answer is not Answer.CHUNK:
            self._served.set()
        return answer in (Answer.ELSEWHERE, Answer.NOTHING)

    def _offer(self, turns: Iterable[tuple[bytes, bytes]]) -> None:
        for peer, digest in turns:
            self._send(peer, HasBlob(digest), Priority.CONTROL)
        self._served.set()

    def _read(self, request: GetBlob, size: int) -> BlobChunk | None:
        try:
            chunk = self._blobs.read_piece(request.digest, request.offset, min(BLOB_CHUNK_BYTES, size - request.offset))
        except (OSError, StorageError) as error:  # whoever needs the store for itself will stop over it; the asker goes on
            log.warning("cannot read blob %s, which a peer asked for: %s", request.digest.hex()[:12], error)
            return None
        return BlobChunk(request.digest, request.offset, size, chunk)
