"""What a replica lacks and whom it asks: decisions of heights it missed, bytes of blocks that certificates name."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from consensus.inputs import AgreementMessage
from protocol import codec
from protocol.limits import DECISIONS_PER_REPLY_MAX
from protocol.messages import Decision, GetBlock, GetDecisions, ProposeEnvelope

FIRST_REQUEST_DELAY_SECONDS = 0.1  # a peer one step ahead is normal: its votes or the block are probably on their way
RETRY_SECONDS = 0.5  # then another peer is asked
RETRY_SECONDS_MAX = 60.0  # for a peer that has never delivered: it claims what nobody has, or its answers do not get through
RESPONSE_BURST_MAX = 32.0  # catching up a thousand heights needs no waiting
RESPONSES_PER_SECOND = 4.0  # then 128 heights a second: more than a network decides, and little disk
CLAIMS_MAX = 1_024  # peers whose height is remembered
FUTURE_MESSAGES_MAX = 16  # per peer, votes of a leader's change and its votes of two heights; large proposals: one per peer
FUTURE_BYTES_MAX = 256 << 10  # of those messages: two timeout certificates of VOTERS_MAX voters, and votes; the oldest go
DECISIONS_BYTES_MAX = 8 << 20  # decisions that came before the ones below them, from all peers together
PROPOSALS_BYTES_MAX = 32 << 20  # of later heights, from all peers together; what does not fit is sent again when it is due
FUTURE_HEIGHTS_MAX = 2  # messages for the next two heights are kept until they are reached, others are asked for again


@dataclass(slots=True)
class PeerHeightClaim:
    """What a peer says of itself, and how patient we are with it."""

    height: int
    retry_seconds: float = RETRY_SECONDS  # grows with every request that it leaves unanswered
    not_before: float = 0.0
    asked: bool = False


@dataclass(slots=True)
class BlockSync:
    """Asks one peer at a time for the next decisions. Claims are not trusted: a silent peer is asked less often."""

    _claims: OrderedDict[bytes, PeerHeightClaim] = field(default_factory=OrderedDict)
    _height: int = 0
    _asked_below: int = 0  # decisions under this height have been asked for
    _behind_since: float | None = None
    _next: float = 0.0
    _turn: int = 0

    def record_claim(self, peer: bytes, height: int) -> None:
        claim = self._claims.pop(peer, None) or PeerHeightClaim(height)
        claim.height = max(height, claim.height)
        self._claims[peer] = claim
        if len(self._claims) > CLAIMS_MAX:
            self._claims.popitem(last=False)

    def remove_peer(self, peer: bytes) -> None:
        self._claims.pop(peer, None)

    @property
    def highest_claimed_height(self) -> int:
        return max([claim.height for claim in self._claims.values()], default=0)

    def height_claimed_by(self, peers: Set[bytes], count: int) -> int:
        """The height that so many of these peers, or more, say they work on; 0 if fewer are ahead: the others say nothing."""
        claims = sorted((claim.height for peer, claim in self._claims.items() if peer in peers), reverse=True)
        return claims[count - 1] if 0 < count <= len(claims) else 0

    def record_own_height(self, height: int, now: float) -> None:
        """Notes progress: the peer that is being asked delivers."""
        if height > self._height:
            self._height, self._behind_since, self._next = height, None, now + RETRY_SECONDS

    def reset_backoff(self, peer: bytes) -> None:
        """This peer sent a decision that was needed: it may be asked again at once."""
        claim = self._claims.get(peer)
        if claim is not None:
            claim.retry_seconds, claim.not_before = RETRY_SECONDS, 0.0

    def ignore_until_asked(self, peer: bytes) -> None:
        """This peer sent something useless. Nothing of it is kept for later until it is asked again."""
        claim = self._claims.get(peer)
        if claim is not None:
            claim.asked = False

    def was_asked(self, peer: bytes) -> bool:
        claim = self._claims.get(peer)
        return claim is not None and claim.asked

    def _ahead(self) -> list[tuple[bytes, PeerHeightClaim]]:
        return [(peer, claim) for peer, claim in self._claims.items() if claim.height > self._height]

    def deadline(self, now: float) -> float | None:
        ahead = self._ahead() if self._claims else None
        if not ahead:
            return None
        if self._behind_since is None:
            self._behind_since = now
        one_step = max(claim.height for _, claim in ahead) == self._height + 1
        due = self._behind_since + FIRST_REQUEST_DELAY_SECONDS if one_step else now
        if self._height < self._asked_below:
            due = self._next
        return max(due, min(claim.not_before for _, claim in ahead))

    def next_request(self, now: float, votes: Callable[[bytes], bool] = lambda peer: False) -> tuple[bytes, GetDecisions]:
        """The next request. Every second one goes to a voter, if one may be asked: anybody can claim anything, few voters lie.
        The others go to any peer: a single voter that is linked may be a liar.

        Call it when the deadline has come.
        """
        patient = [(peer, claim) for peer, claim in self._ahead() if claim.not_before <= now]
        self._turn += 1
        if self._turn % 2:
            patient = [(peer, claim) for peer, claim in patient if votes(peer)] or patient
        peer, claim = patient[self._turn // 2 % len(patient)]
        claim.asked = True
        claim.not_before, claim.retry_seconds = now + claim.retry_seconds, min(RETRY_SECONDS_MAX, 2 * claim.retry_seconds)
        self._next = now + RETRY_SECONDS
        self._asked_below = min(self._height + DECISIONS_PER_REPLY_MAX, claim.height)  # it has no more
        return peer, GetDecisions(self._height, DECISIONS_PER_REPLY_MAX)


@dataclass(slots=True)
class BlockFetcher:
    """Asks those that should have a block that is missing here, one after another."""

    _digest: bytes | None = None
    _next: float = 0.0
    _turn: int = 0

    def deadline(self, wanted: bytes | None, now: float) -> float | None:
        """When the next request for the `wanted` block is due; None: there is none."""
        if wanted != self._digest:
            self._digest, self._next, self._turn = wanted, now + FIRST_REQUEST_DELAY_SECONDS, 0
        return None if wanted is None else self._next

    def next_request(self, height: int, holders: tuple[bytes, ...], now: float) -> tuple[bytes, GetBlock]:
        """The first of `holders` is asked first. Call it when the deadline has come."""
        assert self._digest is not None
        peer = holders[self._turn % len(holders)]
        self._turn += 1
        self._next = now + RETRY_SECONDS
        return peer, GetBlock(height, self._digest)


@dataclass(slots=True)
class ResponseRateLimiter:
    """How many requests of each peer are answered: an answer is up to `effects.DECISIONS_REPLY_BYTES_MAX` read from disk."""

    _left: dict[bytes, tuple[float, float]] = field(default_factory=dict)  # peer with a link -> answers left, at what time

    def allows(self, peer: bytes, now: float) -> bool:
        left, since = self._left.get(peer, (RESPONSE_BURST_MAX, now))
        left = min(RESPONSE_BURST_MAX, left + (now - since) * RESPONSES_PER_SECOND)
        allowed = left >= 1.0
        self._left[peer] = (left - 1.0 if allowed else left, now)
        return allowed

    def remove_peer(self, peer: bytes) -> None:
        self._left.pop(peer, None)


@dataclass(slots=True)
class FutureHeightMessages:
    """Messages for heights that are not reached yet, unverified, so bounded for each peer they came from."""

    _small: dict[bytes, deque[tuple[int, AgreementMessage, int]]] = field(default_factory=dict)  # height, message, bytes
    _proposals: dict[bytes, tuple[int, ProposeEnvelope, int]] = field(default_factory=dict)
    _decisions: dict[int, tuple[bytes, Decision]] = field(default_factory=dict)

    def add_decision(self, peer: bytes, height: int, decision: Decision) -> None:
        """The first one for each height, unverified: `remove_peer` takes it back when its sender turns out to lie."""
        if height in self._decisions:
            return
        held = sum(len(kept.block) for _, kept in self._decisions.values())
        if held + len(decision.block) <= DECISIONS_BYTES_MAX and len(self._decisions) < DECISIONS_PER_REPLY_MAX:
            self._decisions[height] = (peer, decision)

    def add_message(self, peer: bytes, height: int, message: AgreementMessage) -> None:
        size = len(codec.encode(message))
        if isinstance(message, ProposeEnvelope):
            held = sum(of_kept for of, (_, _, of_kept) in self._proposals.items() if of != peer)
            if held + size <= PROPOSALS_BYTES_MAX:
                self._proposals[peer] = (height, message, size)
        elif size <= FUTURE_BYTES_MAX:
            kept = self._small.setdefault(peer, deque(maxlen=FUTURE_MESSAGES_MAX))
            while sum(of_kept for _, _, of_kept in kept) + size > FUTURE_BYTES_MAX:
                kept.popleft()
            kept.append((height, message, size))

    def remove_peer(self, peer: bytes) -> None:
        self._small.pop(peer, None)
        self._proposals.pop(peer, None)
        self._decisions = {height: kept for height, kept in self._decisions.items() if kept[0] != peer}

    def pop_height(self, height: int) -> list[tuple[bytes, AgreementMessage]]:
        """Removes what is for `height`, and what is for lower ones."""
        taken: list[tuple[bytes, AgreementMessage]] = []
        if height in self._decisions:
            taken.append(self._decisions[height])
        self._decisions = {of: kept for of, kept in self._decisions.items() if of > height}
        for peer in [peer for peer, (of, _, _) in self._proposals.items() if of <= height]:
            taken.append((peer, self._proposals.pop(peer)[1]))
        for peer, messages in self._small.items():
            taken.extend((peer, message) for of, message, _ in messages if of == height)
            self._small[peer] = deque((kept for kept in messages if kept[0] > height), maxlen=FUTURE_MESSAGES_MAX)
        return taken
