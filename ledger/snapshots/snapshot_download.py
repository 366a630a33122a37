"""The download of a snapshot from several peers at once: assignment of requests, timeouts and retries. Sans-IO.

Each peer's offer is proven separately, so that a false offer does not affect the others. The best proven snapshot (`_choose`)
is downloaded from all peers that offer it. A peer that contradicts the certificates is reported as faulty and never asked
again. A slow peer is not asked for a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from consensus.effects import DecidedBlock, PeerFault
from consensus.light_client import LightClient, TrustedBlock, VerifiedHeader
from consensus.voter_set import VoterSet
from ledger.ledger_state import LedgerRules, LedgerState
from ledger.snapshots.snapshot_assembly import RestoredSnapshot, SnapshotAssembly, SnapshotPartKey
from ledger.snapshots.snapshot_server import SNAPSHOT_HEIGHT_MIN, SNAPSHOT_HEIGHTS, ModelStore
from protocol.errors import RemoteProtocolError
from protocol.identity import Verifier
from protocol.limits import SNAPSHOT_PART_BYTES_MAX
from protocol.messages import GetSnapshot, GetSnapshotPart, LightBlock, NoSnapshot, SnapshotOffer, SnapshotPart

# Voters that are asked for offers at once, and also the number of other peers; a peer that fails is replaced.
SOURCES_MAX: Final = 8
REQUEST_WINDOW: Final = 4  # open requests for parts to one peer: 4 MiB are in transit while one part is checked
# Seconds after which a peer without a proven snapshot makes room for another peer, because many may be silent.
OFFER_SECONDS: Final = 1.0
OFFERS_SECONDS: Final = 0.3  # seconds to wait for better offers after the first proven one
# Maximum of OFFERS_SECONDS, which doubles after each stalled snapshot, because its holders may be slow.
OFFERS_SECONDS_MAX: Final = 5.0
OFFER_RETRY_SECONDS: Final = 1.0  # seconds until a peer without an offer is asked again, when the network has advanced
STALL_SECONDS: Final = 10.0  # seconds without data after which a peer has stalled: 4 MiB take this long at 3 Mbit/s
# Maximum seconds without requests to a peer that stalled or refused; each failure doubles the time.
BACKOFF_SECONDS_MAX: Final = 120.0
SLOW_PART_SECONDS: Final = 5.0  # seconds after which a part with missing pieces is also requested from an idle peer
HEDGE_SECONDS: Final = 1.0  # seconds without data for a part, after which an idle peer is asked for the part, too
# Seconds without a complete part, after which another snapshot is chosen, from other peers if possible.
SNAPSHOT_TIMEOUT_SECONDS: Final = 15.0
OFFERLESS_SECONDS: Final = 10.0  # seconds to wait for a proven snapshot before single blocks are downloaded

SnapshotRequest = GetSnapshot | GetSnapshotPart
SnapshotAnswer = SnapshotOffer | NoSnapshot | SnapshotPart


@dataclass(slots=True)
class DownloadStep:
    """The result of one event of a download: requests to send, and faults of peers."""

    sends: list[tuple[bytes, SnapshotRequest]] = field(default_factory=list)
    faults: list[PeerFault] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrustBasis:
    """The trusted data of a download: the voters of the height after `height`, and a block through which the proof must lead."""

    chain_id: bytes
    verifier: Verifier
    height: int
    voters: VoterSet
    anchor: TrustedBlock | None = None

    def make_light_client(self) -> LightClient:
        return LightClient(self.chain_id, self.verifier, self.height, self.voters, self.anchor)


def make_trust_basis(
    rules: LedgerRules, state: LedgerState | None, last: DecidedBlock | None, invited: TrustedBlock | None
) -> TrustBasis:
    """Return the trust basis of a peer, which trusts the `last` block that it decided and its applied `state`.

    A `state` of None is wrong and not trusted. If the peer's invitation names a later block, the peer trusts only this block and
    the genesis: retired voters could have led it to a fork.
    """
    if invited is not None and invited.height > (last.height if last else 0):
        return TrustBasis(rules.chain_id, rules.verifier, 0, rules.genesis.voters, invited)
    anchor = TrustedBlock(last.height, last.digest) if last else None
    if state is None:
        return TrustBasis(rules.chain_id, rules.verifier, 0, rules.genesis.voters, anchor)
    return TrustBasis(rules.chain_id, rules.verifier, state.height, VoterSet(state.members.voters), anchor)


def request_order(peers: Iterable[bytes], voters: VoterSet, last: bytes) -> list[bytes]:
    """Return the peers in the order of requests: voters first, because few of them are faulty, then round robin after `last`."""
    return sorted(peers, key=lambda peer: (peer not in voters, peer <= last, peer))


@dataclass(slots=True)
class _PendingPart:
    """An open request for one part to one peer."""

    asked: float  # time of the last request for a piece of the part
    begun: float  # time of the first request for the part
    pieces: list[bytes] = field(default_factory=list)
    pieces_asked: int = 1

    @property
    def hedge_at(self) -> float:
        """Time from which an idle peer is also asked for this part.

        The time is limited even if pieces of the part arrive slowly.
        """
        return min(self.asked + HEDGE_SECONDS, self.begun + SLOW_PART_SECONDS)


@dataclass(slots=True)
class _SnapshotSource:
    path: LightClient
    waits: bool = False  # whether this peer's answer to GetSnapshot is awaited
    since: float | None = None  # time of the first request for an offer whose proof is not complete; None: no such request
    again: float = 0.0  # time from which this peer may be asked for an offer
    rested: float = 0.0  # time from which this peer may be asked for anything
    stall: float = STALL_SECONDS  # seconds without requests after this peer's next stall
    # Seconds without requests after this peer refuses a snapshot that it offered: it has dropped the snapshot, or never had it.
    refusal: float = OFFER_RETRY_SECONDS
    links: list[LightBlock] = field(default_factory=list)
    tip: tuple[VerifiedHeader, ...] = ()  # proven headers of the offered snapshot
    digests: dict[str, bytes] = field(default_factory=dict)
    pending: dict[SnapshotPartKey, _PendingPart] = field(default_factory=dict)
    heard: float = 0.0  # time of this peer's last message, or of a later request to it while it was idle


class SnapshotDownload:
    """The download of one snapshot.

    Call `add_peer` for each peer, then the method of each event, and `handle_tick` when `deadline` is reached. Every call returns
    the next steps. At the end `restored` is set, or `conflict` if the chain itself is forked.
    """

    def __init__(self, rules: LedgerRules, models: ModelStore, basis: TrustBasis, wanted: int = 0, now: float = 0.0) -> None:
        self.restored: RestoredSnapshot | None = None
        # Text about two certified blocks of one height, which more than f voters have signed; None: there are none.
        self.conflict: str | None = None
        self.asked_last = b""  # peer that was last asked for an offer
        self.trusted_height = basis.height  # height of the trusted basis, from which on everything is proven
        # Links from the trusted basis to the chosen snapshot, one for each change of the voter set.
        self.light_blocks: tuple[LightBlock, ...] = ()
        self._rules, self._models, self._basis = rules, models, basis
        self._wanted = max(wanted, SNAPSHOT_HEIGHT_MIN)
        self._sources: dict[bytes, _SnapshotSource] = {}
        self._liars: set[bytes] = set()
        self._assembly: SnapshotAssembly | None = None
        self._voters = basis.voters  # latest proven voter set
        self._voters_of = basis.height
        self._first_offer: float | None = None
        self._offers_seconds = OFFERS_SECONDS
        # Times when the snapshot was chosen, when its last part arrived, and when a peer last offered it.
        self._chosen = self._last_part = self._held = 0.0
        self._tips: dict[int, bytes] = {}  # height -> digest of the certified block after it
        self._step = DownloadStep()
        self._now = self._sought = now  # time of the last event, and start of the last search for a snapshot

    @property
    def progress(self) -> tuple[int, int]:
        """Height of the chosen snapshot (0: none is chosen), and the number of its missing parts."""
        return (self._assembly.height, len(self._assembly.missing)) if self._assembly else (0, 0)

    def has_no_source(self, now: float) -> bool:
        """Return whether no usable snapshot was offered in time, so that the caller must download single blocks."""
        has_offers = any(source.tip for source in self._sources.values())
        return self._assembly is None and not has_offers and now - self._sought > OFFERLESS_SECONDS

    # Events ----------------------------------------------------------------------------------------------------------

    def add_peer(self, peer: bytes, now: float) -> DownloadStep:
        if peer not in self._liars and peer not in self._sources:
            self._sources[peer] = _SnapshotSource(self._basis.make_light_client())
        return self._finish(now)

    def remove_peer(self, peer: bytes, now: float) -> DownloadStep:
        self._note(now)
        self._sources.pop(peer, None)
        return self._finish(now)

    def handle_answer(self, peer: bytes, message: SnapshotAnswer, now: float) -> DownloadStep:
        source = self._sources.get(peer)
        self._note(now)
        if source is not None and self.restored is None:
            try:
                match message:
                    case SnapshotOffer():
                        if source.waits:
                            source.waits = False
                            self._take_offer(source, message)
                    case NoSnapshot():
                        offered = source.tip[1].header.height if source.tip else None
                        if message.height == offered:
                            self._withdraw(source, self._now)
                            source.rested = self._now + source.refusal
                            source.refusal = min(BACKOFF_SECONDS_MAX, 2 * source.refusal)
                        elif source.waits:
                            # The answer may belong to a request for an earlier snapshot that was abandoned.
                            is_of_before = source.heard < self._sought
                            self._withdraw(source, self._now if is_of_before else self._now + OFFER_RETRY_SECONDS)
                    case SnapshotPart():
                        self._take_part(source, message)
            except RemoteProtocolError as error:
                self._liars.add(peer)
                del self._sources[peer]
                self._step.faults.append(PeerFault(peer, error))
        return self._finish(now)

    def handle_tick(self, now: float) -> DownloadStep:
        self._note(now)
        return self._finish(now)

    def _note(self, now: float) -> None:
        """Record the time of an event, and whether a peer offers the chosen snapshot.

        Must run before the event changes the sources.
        """
        self._now = now
        if self._assembly is not None and self._holders:
            self._held = now

    @property
    def deadline(self) -> float:
        return min(self._deadlines(), default=float("inf"))

    def discard_parts(self) -> None:
        """Delete downloaded parts that are not installed."""
        if self._assembly is not None:
            self._assembly.discard_parts()

    def _finish(self, now: float) -> DownloadStep:
        self._now = now
        if self.restored is None and self.conflict is None:
            for source in self._sources.values():
                if (source.waits or source.pending) and source.heard + STALL_SECONDS <= self._now:
                    self._rest(source)
            self._ask_for_offers()
            self._choose()
            self._ask_for_parts()
            self.restored = self._assembly.restored_snapshot() if self._assembly else None
        step, self._step = self._step, DownloadStep()
        return step

    def _deadlines(self) -> Iterator[float]:
        if self.restored is not None or self.conflict is not None:
            return
        busy = self._busy
        for peer, source in self._sources.items():
            if source.waits or source.pending:
                yield source.heard + STALL_SECONDS
            elif not source.tip and busy[peer in self._voters] < SOURCES_MAX:
                yield max(source.again, source.rested)
            if not source.tip and source.since is not None and self._holds_place(source):
                yield source.since + OFFER_SECONDS
        if self._assembly is None and self._first_offer is not None and any(source.tip for source in self._sources.values()):
            yield self._first_offer + self._offers_seconds
        if self._assembly is not None:
            yield self._leaves
        if any(source.tip and not source.pending for source in self._sources.values()):
            yield from (pending.hedge_at for _, pending in self._asked_of_one())

    # Answers ---------------------------------------------------------------------------------------------------------

    def _take_offer(self, source: _SnapshotSource, offer: SnapshotOffer) -> None:
        proven = [source.path.verify_light_block(link) for link in offer.light_blocks]
        if source.path.height > self._voters_of:
            self._voters, self._voters_of = source.path.voters, source.path.height
        source.links += [link for link in offer.light_blocks if link.next_voters]
        source.heard, source.again = self._now, self._now
        if not offer.modules:
            return  # the proof continues: this peer is asked at once for further links
        tip = tuple(proven[-3:])
        if [of.header.height for of in tip] != [offer.height - 1, offer.height, offer.height + 1] or offer.height < self._wanted:
            raise RemoteProtocolError("bad-offer", f"the proof does not end around height {offer.height}")
        if source.path.pending_trusted_height:
            raise RemoteProtocolError(
                "foreign-chain", f"the proof ends before the trusted block of height {source.path.pending_trusted_height}"
            )
        # Called for its checks: raises if the module digests do not match the state root.
        SnapshotAssembly(self._rules, self._models, tip, offer.modules)
        source.tip, source.digests = tip, offer.modules
        if self._tips.setdefault(offer.height, tip[-1].digest) != tip[-1].digest:
            self.conflict = f"two different blocks are certified at height {offer.height + 1}"
        self._first_offer = self._now if self._first_offer is None else self._first_offer

    def _withdraw(self, source: _SnapshotSource, again: float) -> None:
        source.path, source.links, source.tip, source.digests = self._basis.make_light_client(), [], (), {}
        source.pending.clear()
        source.waits, source.since, source.again = False, None, again

    def _take_part(self, source: _SnapshotSource, part: SnapshotPart) -> None:
        key = SnapshotPartKey(part.content, part.name, 0)
        key = key if key.in_pieces else SnapshotPartKey(part.content, part.name, part.index)
        pending = source.pending.get(key)
        if pending is None or self._assembly is None or part.height != self._assembly.height:
            return  # the piece is too late, because another peer was asked for the part
        source.heard = pending.asked = self._now
        if not key.in_pieces:
            del source.pending[key]
            self._finish_key(source, key, part.data)
        elif part.index == len(pending.pieces):
            pending.pieces.append(part.data)
            # A single piece of a part cannot be verified. It counts as progress only if more than f voters offer the snapshot.
            if sum(peer in self._voters for peer in self._holders) > self._voters.faults_tolerated:
                self._last_part = self._now
            size_max = self._assembly.size_max(key)
            if sum(map(len, pending.pieces)) > size_max:
                raise RemoteProtocolError("oversized", f"{key.content.value} larger than {size_max} bytes")
            if len(part.data) < SNAPSHOT_PART_BYTES_MAX:
                del source.pending[key]
                self._finish_key(source, key, b"".join(pending.pieces))

    def _finish_key(self, source: _SnapshotSource, key: SnapshotPartKey, data: bytes) -> None:
        assert self._assembly is not None
        self._assembly.add_part(key, data)
        self._last_part, source.stall = self._now, STALL_SECONDS

    # Rules -----------------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> Counter[bool]:
        """Number of places for offers that voters (True) and other peers (False) take. Strangers thus cannot displace voters."""
        return Counter(peer in self._voters for peer, source in self._sources.items() if self._holds_place(source))

    def _holds_place(self, source: _SnapshotSource) -> bool:
        return bool(source.tip) or (source.since is not None and self._now < source.since + OFFER_SECONDS)

    def _ask_for_offers(self) -> None:
        """Request offers, first from the peers that waited longest.

        A proof that has begun continues even if all places for offers are taken.
        """
        busy = self._busy
        for peer, source in sorted(self._sources.items(), key=lambda item: item[1].again):
            if source.waits or source.tip or max(source.again, source.rested) > self._now:
                continue
            if source.since is None and busy[peer in self._voters] >= SOURCES_MAX:
                continue
            if source.since is None:
                busy[peer in self._voters] += 1
                source.since, self.asked_last = self._now, peer
            source.waits, source.heard = True, self._now
            wanted = self._assembly.height if self._assembly else self._wanted
            self._step.sends.append((peer, GetSnapshot(source.path.height, source.path.pending_trusted_height, wanted)))

    def _choose(self) -> None:
        """Choose a proven snapshot, after all peers had time to offer a better one.

        The order of preference:

        - a snapshot that more than f voters offer, so that a few faulty peers cannot have an unavailable one chosen again and
          again;
        - one at a multiple of `SNAPSHOT_HEIGHTS`, which all peers come to hold, while few peers hold another height;
        - the one that most voters offer;
        - the highest.
        """
        if self._assembly is not None and self._leaves <= self._now:
            for source in self._holders.values():
                self._rest(source)
            self._assembly.discard_parts()
            for source in self._sources.values():
                source.again = self._now  # the peer did not have the abandoned snapshot, but may have another one
            self._assembly, self._sought = None, self._now
            self._offers_seconds = min(OFFERS_SECONDS_MAX, 2 * self._offers_seconds)
            self._first_offer = self._now if any(source.tip for source in self._sources.values()) else None
        if self._assembly is not None or self._first_offer is None:
            return
        offers = [source for source in self._sources.values() if source.tip]
        waiting = any(source.waits for source in self._sources.values())
        if not offers or (waiting and self._now < self._first_offer + self._offers_seconds):
            return
        voters = Counter(of.tip[-1].digest for peer, of in self._sources.items() if of.tip and peer in self._voters)

        def rank(source: _SnapshotSource) -> tuple[bool, bool, int, int]:
            height, count = source.tip[1].header.height, voters[source.tip[-1].digest]
            return count > self._voters.faults_tolerated, height % SNAPSHOT_HEIGHTS == 0, count, height

        best = max(offers, key=rank)
        self._assembly = SnapshotAssembly(self._rules, self._models, best.tip, best.digests)
        self.light_blocks = tuple(best.links)
        self._chosen = self._last_part = self._held = self._now
        for source in offers:
            if source.tip[-1].digest != self._assembly.snapshot_id:
                self._withdraw(source, self._now)  # the peer may also have the chosen snapshot

    @property
    def _holders(self) -> dict[bytes, _SnapshotSource]:
        """The peers that offer the chosen snapshot."""
        assert self._assembly is not None
        offered = self._assembly.snapshot_id
        return {peer: source for peer, source in self._sources.items() if source.tip and source.tip[-1].digest == offered}

    @property
    def _leaves(self) -> float:
        """Time at which the chosen snapshot is abandoned unless a part arrives.

        If no peer offers the snapshot now, a peer with it may still connect. The wait is then as long as the download took so
        far.
        """
        starved = self._last_part + SNAPSHOT_TIMEOUT_SECONDS
        return starved if self._holders else min(starved, self._held + self._last_part - self._chosen)

    def _rest(self, source: _SnapshotSource) -> None:
        self._withdraw(source, self._now)
        source.rested = self._now + source.stall
        source.stall = min(BACKOFF_SECONDS_MAX, 2 * source.stall)

    def _ask_for_parts(self) -> None:
        assembly = self._assembly
        if assembly is None:
            return
        for peer, source in self._sources.items():
            if source.tip and source.tip[-1].digest != assembly.snapshot_id:
                self._withdraw(source, self._now + OFFER_RETRY_SECONDS)
            source.pending = {key: pending for key, pending in source.pending.items() if key in assembly.missing}
            for part, pending in source.pending.items():
                if len(pending.pieces) == pending.pieces_asked:
                    self._send_request(peer, part, pending.pieces_asked)
                    pending.pieces_asked += 1
        asked = {key for source in self._sources.values() for key in source.pending}
        fresh = iter([key for key in assembly.missing if key not in asked])
        # Each peer is asked for one part in turn, so that all peers share the work.
        askable = [
            (peer, source) for peer, source in self._sources.items() if source.tip and len(source.pending) < REQUEST_WINDOW
        ]
        while askable:
            peer, source = askable.pop(0)
            key = next(fresh, None) or self._hedge(source)
            if key is not None:
                if not source.pending:
                    source.heard = self._now
                source.pending[key] = _PendingPart(self._now, self._now)
                self._send_request(peer, key, 0 if key.in_pieces else key.index)
                if len(source.pending) < REQUEST_WINDOW:
                    askable.append((peer, source))

    def _send_request(self, peer: bytes, key: SnapshotPartKey, index: int) -> None:
        assert self._assembly is not None
        self._step.sends.append((peer, GetSnapshotPart(self._assembly.height, key.content, key.name, index)))

    def _asked_of_one(self) -> list[tuple[SnapshotPartKey, _PendingPart]]:
        """Return the open requests for parts that were sent to one peer only, the oldest first."""
        pending = [item for source in self._sources.values() for item in source.pending.items()]
        counts = Counter(key for key, _ in pending)
        return sorted((item for item in pending if counts[item[0]] == 1), key=lambda item: item[1].asked)

    def _hedge(self, source: _SnapshotSource) -> SnapshotPartKey | None:
        """Return a part that is late at another peer and may be requested from this idle peer.

        None: the peer is busy, or no part is late.
        """
        if source.pending:
            return None
        late = (key for key, pending in self._asked_of_one() if pending.hedge_at <= self._now)
        return next(late, None)
