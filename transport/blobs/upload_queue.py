"""Who gets a blob from here now, and who waits: an uplink carries three copies at a time, and receivers pass the blob on.

| a peer asks for a blob                                          | answer                                                    |
|-----------------------------------------------------------------|-----------------------------------------------------------|
| it has a place, or one is free                                  | the chunk                                                 |
| the uplink carries one copy more within WORTH_SECONDS           | the chunk                                                 |
| it kept a place for too long, less than REST_SECONDS ago        | the chunk, beside the places                              |
| all places are taken, or this peer is only getting the blob     | who else has it or is getting it; it waits for its turn   |
| it was told so less than REPEAT_SECONDS ago                     | none: this is the rest of the same window                 |

| a place ends                                                                    | and then                                  |
|---------------------------------------------------------------------------------|-------------------------------------------|
| its peer says that it has the blob                                              | that peer is named to others              |
| its peer says that it does not want it from here, or its link ends              |                                           |
| its peer was told that it is its turn, and does not ask within ANSWER_SECONDS   |                                           |
| what its peer asked for takes SLOW_FACTOR times as long as others' did, or more | that peer has none for REST_SECONDS, but  |
|                                                                                 | for a stranger, which asks anew           |

So a peer that waits loses a bounded time, whatever others do: a liar can keep a place for so long once in REST_SECONDS.
Strangers have a place of their own: they take none of the others', and how fast they take tells nothing.

| too many blobs are asked for                         | forgotten is the one that was asked for longest ago |
|------------------------------------------------------|-----------------------------------------------------|
| by strangers alone: more than BLOBS_OF_STRANGERS_MAX | of those                                            |
| by others, too: more than BLOBS_MAX                  | of those, and of whoever asked for most of them     |

No I/O, no clock.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low

from protocol.limits import BLOB_CHUNK_BYTES, BLOB_HOLDERS_MAX, UPLINK_MBIT_MIN

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
        """Its link has ended."""
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
        """Ends the places that are over."""
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
        """For this peer."""
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
