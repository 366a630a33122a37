"""Uploads of blobs. A peer sends a blob to three receivers at a time, each with an upload slot. Receivers pass the blob on.

| a peer requests a blob                                        | answer                                         |
|---------------------------------------------------------------|------------------------------------------------|
| the peer has a slot, or a slot is free                        | the chunk                                      |
| the uplink carries one more copy in IMMEDIATE_COPY_SECONDS    | the chunk                                      |
| the peer kept a slot too long in the last SLOW_PEER_SECONDS   | the chunk, without a slot                      |
| all slots are taken, or the server is still downloading it    | names of other holders; the peer waits         |
| the peer got these names less than REPEAT_SECONDS ago         | none: the request belongs to the same window   |

| a slot ends when                                              | effect                                         |
|---------------------------------------------------------------|------------------------------------------------|
| its peer has the blob                                         | its peer is named to others                    |
| its peer declines the blob, or its link ends                  |                                                |
| its peer was offered it, and requests nothing for ANSWER_SECONDS |                                          |
| its peer takes SLOW_FACTOR times as long as others, or more   | its peer gets none for SLOW_PEER_SECONDS,      |
|                                                               | unless it is a stranger, which may ask again   |

So a peer waits for a bounded time: a faulty peer can occupy a slot too long only once in SLOW_PEER_SECONDS. Strangers have a slot
of their own. They take no slot from other peers, and their speed is not recorded.

| remembered blobs, at most                                     | above it, the least recent one is forgotten of |
|---------------------------------------------------------------|------------------------------------------------|
| BLOBS_OF_STRANGERS_MAX that only strangers requested          | the blobs that only strangers requested        |
| BLOBS_MAX others                                              | the peer with the most requested blobs         |
"""

from __future__ import annotations

import enum
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median_low

import trio

from protocol.errors import StorageError
from protocol.limits import BLOB_CHUNK_BYTES, BLOB_HOLDERS_MAX, UPLINK_MBIT_MIN
from protocol.messages import BlobChunk, BlobElsewhere, GetBlob, HasBlob, NoBlob
from transport.blobs.blob_store import BlobStore
from transport.wire.framing import Priority

log = logging.getLogger(__name__)

UPLOAD_SLOTS = 3  # concurrent receivers of a blob: three copies share the uplink, and after k turns 4^k peers have the blob
STRANGERS_UPLOAD_SLOTS = 1  # slots of strangers, in addition to UPLOAD_SLOTS
IMMEDIATE_COPY_SECONDS = 1.0  # seconds; a copy that takes less is sent without a slot, since waiting for a slot costs round trips
ANSWER_SECONDS = 1.0  # timeout from the offer of a slot to the first request: three round trips of 300 ms
# Largest time between requests of one window; a waiting peer sends new requests after WAIT_SECONDS or later.
REPEAT_SECONDS = 0.25
# A slot may take SLOW_SECONDS (three round trips of 300 ms) plus SLOW_FACTOR times the expected time (for other traffic).
SLOW_SECONDS, SLOW_FACTOR = 1.0, 2.0
SLOW_PEER_SECONDS = 600.0
RATES_MAX = 32  # peers with a remembered rate; this peer's own rate is their median, so faulty peers need a majority
BLOBS_MAX = 256  # remembered blobs that members or guests requested
BLOBS_OF_STRANGERS_MAX = 32  # remembered blobs that only strangers requested: two for each link of a stranger
WAITING_MAX = 256  # waiting peers per blob: VOTERS_MAX; further peers get the same answer, and ask again later
KNOWN_MAX = 64  # peers per blob that announced that they have it
SLOW_MAX = 1_024  # remembered peers that kept slots too long; the oldest is forgotten first

LEAST_RATE = UPLINK_MBIT_MIN * 1_000_000 / 8  # assumed bytes per second before receivers are measured

QUEUED_BYTES_MIN = 2 * BLOB_CHUNK_BYTES  # size from which blobs need a slot: for smaller blobs, waiting for a slot costs as much
SendBlobMessage = Callable[[bytes, GetBlob | BlobChunk | NoBlob | BlobElsewhere | HasBlob, Priority], bool]


class UploadDecision(enum.Enum):
    CHUNK = "chunk"
    SLOT = "place"  # The chunk is sent, and the peer gets a slot.
    ELSEWHERE = "elsewhere"
    NOTHING = "nothing"


@dataclass(slots=True)
class _UploadSlot:
    begun: float
    size: int  # bytes of the blob
    shared: int  # most slots of all blobs in use at a time; strangers' slots count only for a stranger
    asked: int = 0  # bytes of the blob that the peer has requested
    is_offered: bool = False  # The slot was offered, and the peer has not requested a chunk since.


@dataclass(slots=True)
class _Blob:
    by: bytes | None = None  # first peer that requested the blob; strangers do not count
    places: dict[bytes, _UploadSlot] = field(default_factory=dict)
    waiting: OrderedDict[bytes, float] = field(default_factory=OrderedDict)  # waiting peer -> time when it was told to wait
    known: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # peers that announced that they have the blob
    size: int = 0
    named: int = 0  # number of answers that named other holders; each answer names the next ones of the list


class UploadQueue:
    """The upload slots of this peer for all blobs, and the peers that wait for a slot. Sans-IO; time is an argument."""

    def __init__(self, is_stranger: Callable[[bytes], bool] = lambda peer: False) -> None:
        self._is_stranger = is_stranger
        self._blobs: OrderedDict[bytes, _Blob] = OrderedDict()
        self._rates: OrderedDict[bytes, float] = OrderedDict()  # peer -> bytes per second of the whole uplink while it received
        self._slow: OrderedDict[bytes, float] = OrderedDict()  # peer that kept a slot too long -> end of its penalty

    def request_slot(self, digest: bytes, peer: bytes, size: int | None, now: float) -> UploadDecision:
        """Return the decision on a request for a chunk. `size` is None while this peer is still downloading the blob."""
        blob = self._blob(digest, peer)
        place = blob.places.get(peer)
        if place is not None:
            place.asked = min(place.size, place.asked + BLOB_CHUNK_BYTES)
        if size is not None and (place is not None or self._slow.get(peer, -math.inf) > now):
            if place is not None and place.is_offered:
                return self._assign_slot(blob, peer, size, now)
            return UploadDecision.CHUNK
        if now < blob.waiting.get(peer, -math.inf) + REPEAT_SECONDS:
            return UploadDecision.NOTHING
        if size is not None and not self._is_full(blob, size, peer):
            return self._assign_slot(blob, peer, size, now)
        if peer in blob.waiting or len(blob.waiting) < WAITING_MAX:
            blob.waiting[peer] = now
        return UploadDecision.ELSEWHERE

    def other_holders(self, digest: bytes, peer: bytes) -> tuple[bytes, ...]:
        """Return a few peers that have the blob or download it from this peer. Each answer names different ones."""
        blob = self._blob(digest, peer)
        getting = [taker for taker in blob.places if taker not in blob.known]
        found = [other for other in (*blob.known, *getting) if other != peer]
        blob.named += 1
        start = (blob.named - 1) * BLOB_HOLDERS_MAX % len(found) if found else 0
        return tuple((found[start:] + found[:start])[:BLOB_HOLDERS_MAX])

    def on_blob_stored(self, digest: bytes, size: int, now: float) -> list[bytes]:
        """Record that this peer has a blob. Return the peers that get a slot."""
        if digest not in self._blobs:  # No peer has requested it.
            return []
        self._blobs[digest].size = size
        return self._offer_slots(digest, now)

    def on_peer_has(self, digest: bytes, peer: bytes, now: float) -> list[bytes]:
        """Record that another peer has a blob. Return the peers that get a slot."""
        blob = self._blobs.get(digest)
        if blob is None or (peer not in blob.places and peer not in blob.waiting):  # A peer without a request is not recorded.
            return []
        place = blob.places.pop(peer, None)
        if place is not None and not place.is_offered and not self._is_stranger(peer):
            self._note_rate(peer, place, now)
        blob.waiting.pop(peer, None)
        blob.known[peer] = None
        if len(blob.known) > KNOWN_MAX:
            blob.known.popitem(last=False)
        return self._offer_slots(digest, now)

    def on_declined(self, digest: bytes, peer: bytes, now: float) -> list[bytes]:
        """Record that a peer declines a blob, or lacks it. Return the peers that get a slot."""
        blob = self._blobs.get(digest)
        if blob is None:
            return []
        for table in (blob.places, blob.waiting, blob.known):
            table.pop(peer, None)
        return self._offer_slots(digest, now)

    def on_unlinked(self, peer: bytes, now: float) -> list[tuple[bytes, bytes]]:
        for blob in self._blobs.values():
            blob.waiting.pop(peer, None)
            blob.known.pop(peer, None)
        held = [digest for digest, blob in self._blobs.items() if blob.places.pop(peer, None)]
        return [(offered, digest) for digest in held for offered in self._offer_slots(digest, now)]

    def next_expiry(self) -> float:
        """Return the time when the next slot of a blob with waiting peers expires."""
        waited = [blob for blob in self._blobs.values() if blob.waiting]
        return min((self._expiry(place) for blob in waited for place in blob.places.values()), default=math.inf)

    def expire_slots(self, now: float) -> list[tuple[bytes, bytes]]:
        offered = []
        for digest, blob in self._blobs.items():
            for peer, place in [(peer, place) for peer, place in blob.places.items() if self._expiry(place) <= now]:
                del blob.places[peer]
                if not place.is_offered and not self._is_stranger(peer):
                    self._slow[peer] = now + SLOW_PEER_SECONDS
            offered += [(peer, digest) for peer in self._offer_slots(digest, now)]
        while len(self._slow) > SLOW_MAX:
            self._slow.popitem(last=False)
        return offered

    # Internals -------------------------------------------------------------------------------------------------------

    def _blob(self, digest: bytes, peer: bytes) -> _Blob:
        """Return the state of a blob that `peer` requests, and mark it as the most recent."""
        by = None if self._is_stranger(peer) else peer
        blob = self._blobs.get(digest)
        if blob is None or (blob.by is None and by is not None):
            blob = self._blobs[digest] = blob or _Blob()
            blob.by = by
            self._blobs.move_to_end(digest)
            self._forget_one(by)
        elif by is not None or blob.by is None:
            self._blobs.move_to_end(digest)
        return blob

    def _forget_one(self, by: bytes | None) -> None:
        """Forget the least recent blob if there are too many. `by` is the last requester, or None for a stranger."""
        askers = Counter(blob.by for blob in self._blobs.values())
        strangers = askers.pop(None, 0)
        if strangers > BLOBS_OF_STRANGERS_MAX if by is None else askers.total() > BLOBS_MAX:
            most = None if by is None else askers.most_common(1)[0][0]
            del self._blobs[next(digest for digest, blob in self._blobs.items() if blob.by == most)]

    @property
    def _rate(self) -> float:
        return median_low([LEAST_RATE, *self._rates.values()])

    def _is_full(self, blob: _Blob, size: int, peer: bytes) -> bool:
        is_stranger = self._is_stranger(peer)
        alike = sum(self._is_stranger(taker) == is_stranger for taker in blob.places)
        if alike < (STRANGERS_UPLOAD_SLOTS if is_stranger else UPLOAD_SLOTS):
            return False
        return (len(blob.places) + 1) * size > self._rate * IMMEDIATE_COPY_SECONDS

    def _assign_slot(self, blob: _Blob, peer: bytes, size: int, now: float) -> UploadDecision:
        blob.waiting.pop(peer, None)
        blob.size = size
        blob.places[peer] = _UploadSlot(now, size, 0, BLOB_CHUNK_BYTES)
        taken = [(self._is_stranger(taker), place) for other in self._blobs.values() for taker, place in other.places.items()]
        others = sum(not is_stranger for is_stranger, _ in taken)
        for is_stranger, place in taken:
            place.shared = max(place.shared, len(taken) if is_stranger else others)
        return UploadDecision.SLOT

    def _offer_slots(self, digest: bytes, now: float) -> list[bytes]:
        blob, offered = self._blobs[digest], list[bytes]()
        for peer in tuple(blob.waiting) if blob.size else ():
            if self._is_full(blob, blob.size, peer):
                continue
            del blob.waiting[peer]
            blob.places[peer] = _UploadSlot(now, blob.size, 1, is_offered=True)
            offered.append(peer)
        return offered

    def _expiry(self, place: _UploadSlot) -> float:
        if place.is_offered:
            return place.begun + ANSWER_SECONDS
        return place.begun + SLOW_SECONDS + SLOW_FACTOR * place.asked * place.shared / self._rate

    def _note_rate(self, peer: bytes, place: _UploadSlot, now: float) -> None:
        self._rates[peer] = place.size * place.shared / max(now - place.begun, 0.001)
        self._rates.move_to_end(peer)
        if len(self._rates) > RATES_MAX:
            self._rates.popitem(last=False)


class BlobServer:
    def __init__(
        self,
        blobs: BlobStore,
        send: SendBlobMessage,
        comes: Callable[[bytes], bool],
        is_stranger: Callable[[bytes], bool],
    ) -> None:
        """Create a server of `blobs`. `comes(digest)` returns whether this peer is downloading the blob."""
        self._blobs, self._send, self._comes, self._is_stranger = blobs, send, comes, is_stranger
        self._serving = UploadQueue(is_stranger)
        self._served = trio.Event()  # set if slots or waiting peers have changed
        self.bytes_sent = 0
        self.audit_bytes_sent = 0  # bytes of audit data in `bytes_sent`
        self.audit_bytes_by_peer = Counter[bytes]()  # peer -> bytes of `audit_bytes_sent`

    async def run(self) -> None:
        """Free expired slots, and offer them to waiting peers, for ever."""
        while True:
            self._served = trio.Event()
            with trio.move_on_at(self._serving.next_expiry()):
                await self._served.wait()
            self._offer(self._serving.expire_slots(trio.current_time()))

    def on_get_blob(self, peer: bytes, request: GetBlob) -> None:
        """Answer a request for a chunk.

        A request beyond the blob's end gets no answer, since the other peer may not know the blob's size.
        """
        size = self._blobs.piece_size(request.digest)
        if size is not None and request.offset >= size > 0:
            return
        if self._must_wait(peer, request.digest, size):
            return
        chunk = None
        if size is not None:
            try:
                data = self._blobs.read_piece(request.digest, request.offset, min(BLOB_CHUNK_BYTES, size - request.offset))
                chunk = BlobChunk(request.digest, request.offset, size, data)
            # The other peer can ask another holder. This peer stops only if it uses the blob itself.
            except (OSError, StorageError) as error:
                log.warning("cannot read blob %s, which a peer requested: %s", request.digest.hex()[:12], error)
        if chunk is not None and self._send(peer, chunk, Priority.BULK):
            self.bytes_sent += len(chunk.chunk)
            if self._blobs.is_audit_data(request.digest):
                self.audit_bytes_sent += len(chunk.chunk)
                if not self._is_stranger(peer):  # A stranger may have any number of keys, so the table would grow without limit.
                    self.audit_bytes_by_peer[peer] += len(chunk.chunk)
        else:  # Even with a full queue, an immediate refusal spares the other peer a timeout.
            self._send(peer, NoBlob(request.digest), Priority.CONTROL)

    def release_slot(self, digest: bytes, peer: bytes) -> None:
        """Free the slot of a peer, or remove it from the waiting peers."""
        self._offer((other, digest) for other in self._serving.on_declined(digest, peer, trio.current_time()))

    def on_peer_has(self, digest: bytes, peer: bytes) -> None:
        self._offer((other, digest) for other in self._serving.on_peer_has(digest, peer, trio.current_time()))

    def on_blob_stored(self, digest: bytes, size: int) -> None:
        self._offer((other, digest) for other in self._serving.on_blob_stored(digest, size, trio.current_time()))

    def on_unlinked(self, peer: bytes) -> None:
        self._offer(self._serving.on_unlinked(peer, trio.current_time()))

    # Internals -------------------------------------------------------------------------------------------------------

    def _must_wait(self, peer: bytes, digest: bytes, size: int | None) -> bool:
        """Return whether a request must wait, and if so name other holders.

        Audit data never waits, because auditors have deadlines.
        """
        is_coming = size is None and self._comes(digest)
        if not (is_coming or (size or 0) >= QUEUED_BYTES_MIN) or self._blobs.is_audit_data(digest):
            return False
        answer = self._serving.request_slot(digest, peer, size, trio.current_time())
        if answer is UploadDecision.ELSEWHERE:
            told = BlobElsewhere(digest, size is not None, self._serving.other_holders(digest, peer))
            # The queue to the peer is full, and without the answer the peer does not wait.
            if not self._send(peer, told, Priority.CONTROL):
                self.release_slot(digest, peer)
        # The slot is announced in a message, since on a slow uplink the first chunk may come after the other peer's timeout.
        elif answer is UploadDecision.SLOT:
            self._send(peer, HasBlob(digest), Priority.CONTROL)
        if answer is not UploadDecision.CHUNK:
            self._served.set()
        return answer in (UploadDecision.ELSEWHERE, UploadDecision.NOTHING)

    def _offer(self, turns: Iterable[tuple[bytes, bytes]]) -> None:
        for peer, digest in turns:
            self._send(peer, HasBlob(digest), Priority.CONTROL)
        self._served.set()
