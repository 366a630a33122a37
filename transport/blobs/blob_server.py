"""Who gets a blob from here now, and who waits: an uplink carries three copies at a time, and receivers pass the blob on.

| a peer asks for a blob                                      | answer                                                  |
|-------------------------------------------------------------|---------------------------------------------------------|
| it has a place, or one is free                              | the chunk                                               |
| the uplink carries one copy more in IMMEDIATE_COPY_SECONDS  | the chunk                                               |
| it kept a place too long, less than SLOW_PEER_SECONDS ago   | the chunk, beside the places                            |
| all places are taken, or this peer is only getting the blob | who else has it or is getting it; it waits for its turn |
| it was told so less than REPEAT_SECONDS ago                 | none: this is the rest of the same window               |

| a place ends                                                                    | and then                                  |
|---------------------------------------------------------------------------------|-------------------------------------------|
| its peer says that it has the blob                                              | that peer is named to others              |
| its peer says that it does not want it from here, or its link ends              |                                           |
| its peer was told that it is its turn, and does not ask within ANSWER_SECONDS   |                                           |
| what its peer asked for takes SLOW_FACTOR times as long as others' did, or more | that peer has none for SLOW_PEER_SECONDS, |
|                                                                                 | but for a stranger, which asks anew       |

So a peer that waits loses a bounded time, whatever others do: a liar can keep a place for so long once in SLOW_PEER_SECONDS.
Strangers have a place of their own: they take none of the others', and how fast they take tells nothing.

| too many blobs are asked for                         | forgotten is the one that was asked for longest ago |
|------------------------------------------------------|-----------------------------------------------------|
| by strangers alone: more than BLOBS_OF_STRANGERS_MAX | of those                                            |
| by others, too: more than BLOBS_MAX                  | of those, and of whoever asked for most of them     |
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

UPLOAD_SLOTS = 3  # receivers of one blob at a time: after k turns 4^k peers have it, and three copies share an uplink
STRANGERS_UPLOAD_SLOTS = 1  # beside those
IMMEDIATE_COPY_SECONDS = 1.0  # a copy that is sent sooner is sent at once: to wait for a turn costs round trips
ANSWER_SECONDS = 1.0  # from "your turn" to the first request: three round trips of 300 ms
REPEAT_SECONDS = 0.25  # a window's requests leave together; a peer that waits asks again after WAIT_SECONDS at the earliest
SLOW_SECONDS, SLOW_FACTOR = 1.0, 2.0  # three round trips of 300 ms, and an uplink that other things share
SLOW_PEER_SECONDS = 600.0
RATES_MAX = 32  # peers whose last rate is remembered: the median of them is this peer's, so most of them would have to lie
BLOBS_MAX = 256  # of which members or guests get copies, or have got them
BLOBS_OF_STRANGERS_MAX = 32  # of which strangers alone do: two for each link that they may have
WAITING_MAX = 256  # of one blob: as many voters as there can be; others are told the same, and ask again
KNOWN_MAX = 64  # peers that said they have a blob
SLOW_MAX = 1_024  # peers that kept places; the first is forgotten

LEAST_RATE = UPLINK_MBIT_MIN * 1_000_000 / 8  # bytes a second, until receivers have shown another

QUEUED_BYTES_MIN = 2 * BLOB_CHUNK_BYTES  # what is smaller is sent at once: a turn costs as much
SendBlobMessage = Callable[[bytes, GetBlob | BlobChunk | NoBlob | BlobElsewhere | HasBlob, Priority], bool]


class UploadDecision(enum.Enum):
    CHUNK = "chunk"
    SLOT = "place"  # the same, and it is the first one
    ELSEWHERE = "elsewhere"
    NOTHING = "nothing"


@dataclass(slots=True)
class _UploadSlot:
    begun: float
    size: int  # bytes of the blob
    shared: int  # the most places of all blobs that were taken at once meanwhile; strangers' count for strangers alone
    asked: int = 0  # bytes of it
    is_offered: bool = False  # it is this peer's turn, and it has not asked yet


@dataclass(slots=True)
class _Blob:
    by: bytes | None = None  # who asked for it first, of those that are no strangers
    places: dict[bytes, _UploadSlot] = field(default_factory=dict)
    waiting: OrderedDict[bytes, float] = field(default_factory=OrderedDict)  # who was told to look elsewhere, and when last
    known: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # who said that it has it
    size: int = 0
    named: int = 0  # so that not all are sent to the same holder


class UploadQueue:
    # No I/O, no clock.

    def __init__(self, is_stranger: Callable[[bytes], bool] = lambda peer: False) -> None:
        self._is_stranger = is_stranger
        self._blobs: OrderedDict[bytes, _Blob] = OrderedDict()
        self._rates: OrderedDict[bytes, float] = OrderedDict()  # by peer, bytes a second of the whole uplink
        self._slow: OrderedDict[bytes, float] = OrderedDict()  # peer -> until

    def request_slot(self, digest: bytes, peer: bytes, size: int | None, now: float) -> UploadDecision:
        """`size`: None while this peer is only getting the blob."""
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
        """Who has the blob, or is getting it from here, as far as this peer knows: a few, to each asker others."""
        blob = self._blob(digest, peer)
        getting = [taker for taker in blob.places if taker not in blob.known]
        found = [other for other in (*blob.known, *getting) if other != peer]
        blob.named += 1
        start = (blob.named - 1) * BLOB_HOLDERS_MAX % len(found) if found else 0
        return tuple((found[start:] + found[:start])[:BLOB_HOLDERS_MAX])

    def on_blob_stored(self, digest: bytes, size: int, now: float) -> list[bytes]:
        """This peer has the blob now. Whose turn it is."""
        if digest not in self._blobs:  # nobody has asked for it
            return []
        self._blobs[digest].size = size
        return self._offer_slots(digest, now)

    def on_peer_has(self, digest: bytes, peer: bytes, now: float) -> list[bytes]:
        """A peer says that it has the blob now. Whose turn it is."""
        blob = self._blobs.get(digest)
        if blob is None or (peer not in blob.places and peer not in blob.waiting):  # who never asked here is named to nobody
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
        """A peer does not want the blob from here, or has not got it. Whose turn it is."""
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
        """When the next place ends for which somebody waits."""
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

    # Own -------------------------------------------------------------------------------------------------------------

    def _blob(self, digest: bytes, peer: bytes) -> _Blob:
        """One that this peer asks for."""
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
        """If there are too many since this peer asks for one more; None: a stranger."""
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
        chunk = None
        if size is not None:
            try:
                data = self._blobs.read_piece(request.digest, request.offset, min(BLOB_CHUNK_BYTES, size - request.offset))
                chunk = BlobChunk(request.digest, request.offset, size, data)
            except (OSError, StorageError) as error:  # whoever needs the store for itself will stop over it; the asker goes on
                log.warning("cannot read blob %s, which a peer asked for: %s", request.digest.hex()[:12], error)
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
        self._offer((other, digest) for other in self._serving.on_peer_has(digest, peer, trio.current_time()))

    def on_blob_stored(self, digest: bytes, size: int) -> None:
        self._offer((other, digest) for other in self._serving.on_blob_stored(digest, size, trio.current_time()))

    def on_unlinked(self, peer: bytes) -> None:
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
