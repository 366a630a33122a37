"""Answers whoever asks for a blob: with the chunk, or with who else has it, while it waits for its turn
(`transport.blobs.upload_queue`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

import trio

from protocol.errors import StorageError
from protocol.limits import BLOB_CHUNK_BYTES
from protocol.messages import BlobChunk, BlobElsewhere, GetBlob, HasBlob, NoBlob
from transport.blobs.blob_store import BlobStore
from transport.blobs.upload_queue import UploadDecision, UploadQueue
from transport.wire.framing import Priority

log = logging.getLogger(__name__)

QUEUED_BYTES_MIN = 2 * BLOB_CHUNK_BYTES  # what is smaller is sent at once: a turn costs as much

SendBlobMessage = Callable[[bytes, GetBlob | BlobChunk | NoBlob | BlobElsewhere | HasBlob, Priority], bool]


class BlobServer:
    def __init__(
        self,
        blobs: BlobStore,
        send: SendBlobMessage,
        comes: Callable[[bytes], bool],
        is_stranger: Callable[[bytes], bool],
    ) -> None:
        """`comes`: whether this peer is getting a blob."""
        self._blobs, self._send, self._comes, self._is_stranger = blobs, send, comes, is_stranger
        self._serving = UploadQueue(is_stranger)
        self._served = trio.Event()  # who is served now, or waits, has changed
        self.bytes_sent = 0
        self.audit_bytes_sent = 0  # of them, what serves audits alone
        self.audit_bytes_by_peer = Counter[bytes]()  # bytes of `audit_bytes_sent`, by peer

    async def run(self) -> None:
        """Ends turns that are over."""
        while True:
            self._served = trio.Event()
            with trio.move_on_at(self._serving.next_expiry()):
                await self._served.wait()
            self._offer(self._serving.expire_slots(trio.current_time()))

    def on_get_blob(self, peer: bytes, request: GetBlob) -> None:
        """Whoever does not know how long a blob is asks ahead for more than there is; that is answered by what there is."""
        size = self._blobs.piece_size(request.digest)
        if size is not None and request.offset >= size > 0:
            return
        if self._must_wait(peer, request.digest, size):
            return
        chunk = None if size is None else self._read(request, size)
        if chunk is not None and self._send(peer, chunk, Priority.BULK):
            self.bytes_sent += len(chunk.chunk)
            if self._blobs.is_audit_data(request.digest):
                self.audit_bytes_sent += len(chunk.chunk)
                if not self._is_stranger(peer):  # who has as many keys as it likes
                    self.audit_bytes_by_peer[peer] += len(chunk.chunk)
        else:  # also if the queue is full: "not now" is said at once, rather than left to be found out by a deadline
            self._send(peer, NoBlob(request.digest), Priority.CONTROL)

    def release_slot(self, digest: bytes, peer: bytes) -> None:
        """This peer needs its place no more, and waits no more."""
        self._offer((other, digest) for other in self._serving.on_declined(digest, peer, trio.current_time()))

    def on_peer_has(self, digest: bytes, peer: bytes) -> None:
        """A peer says that it has the blob now."""
        self._offer((other, digest) for other in self._serving.on_peer_has(digest, peer, trio.current_time()))

    def on_blob_stored(self, digest: bytes, size: int) -> None:
        """This peer has the blob now."""
        self._offer((other, digest) for other in self._serving.on_blob_stored(digest, size, trio.current_time()))

    def on_unlinked(self, peer: bytes) -> None:
        """Its link has ended."""
        self._offer(self._serving.on_unlinked(peer, trio.current_time()))

    # Own -------------------------------------------------------------------------------------------------------------

    def _must_wait(self, peer: bytes, digest: bytes, size: int | None) -> bool:
        """Whether it has to wait for its turn. What only audits ask for is sent at once: its asker has a deadline."""
        is_coming = size is None and self._comes(digest)
        if not (is_coming or (size or 0) >= QUEUED_BYTES_MIN) or self._blobs.is_audit_data(digest):
            return False
        answer = self._serving.request_slot(digest, peer, size, trio.current_time())
        if answer is UploadDecision.ELSEWHERE:
            told = BlobElsewhere(digest, size is not None, self._serving.other_holders(digest, peer))
            if not self._send(peer, told, Priority.CONTROL):  # its queue is full: who was told nothing waits for no turn
                self.release_slot(digest, peer)
        # said at once: over a narrow uplink the first chunk takes longer than the asker's patience
        elif answer is UploadDecision.SLOT:
            self._send(peer, HasBlob(digest), Priority.CONTROL)
        if answer is not UploadDecision.CHUNK:
            self._served.set()
        return answer in (UploadDecision.ELSEWHERE, UploadDecision.NOTHING)

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
