"""Requests for missing decisions and blocks, a limit on answers to such requests of peers, and messages of later heights."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from consensus.inputs import AgreementMessage
from protocol import codec
from protocol.limits import DECISIONS_PER_REPLY_MAX
from protocol.messages import Decision, GetBlock, GetDecisions, ProposeEnvelope

# Seconds until the first request: peers are often one height ahead, and the missing messages are probably on their way.
FIRST_REQUEST_DELAY_SECONDS = 0.1
RETRY_SECONDS = 0.5  # seconds to wait for an answer before another peer is asked
RETRY_SECONDS_MAX = 60.0  # maximum seconds between requests to a peer that never answers: its claimed height may be false
RESPONSE_BURST_MAX = 32.0  # answers to one peer without a wait: enough for a peer that is a thousand heights behind
# Answers per second to one peer after the burst: 128 heights, more than a network decides, with little disk access.
RESPONSES_PER_SECOND = 4.0
CLAIMS_MAX = 1_024  # peers whose claimed heights are stored
FUTURE_MESSAGES_MAX = 16  # messages of later heights per peer, beside one proposal: votes of two heights and of a view change
FUTURE_BYTES_MAX = 256 << 10  # bytes of messages of later heights per peer: votes, two timeout certificates of VOTERS_MAX voters
DECISIONS_BYTES_MAX = 8 << 20  # bytes of decisions of later heights, from all peers together
# Bytes of proposals of later heights, from all peers together; a dropped proposal is sent again at its height.
PROPOSALS_BYTES_MAX = 32 << 20
FUTURE_HEIGHTS_MAX = 2  # later heights whose messages are kept; messages of higher heights are dropped, and requested when needed


@dataclass(slots=True)
class PeerHeightClaim:
    """The height that a peer claims to work on, and the time of the next request to that peer."""

    height: int
    # Seconds until the next request to this peer, which double with every request without an answer.
    retry_seconds: float = RETRY_SECONDS
    not_before: float = 0.0
    asked: bool = False


@dataclass(slots=True)
class BlockSync:
    """Requests for the next decisions, sent to one peer at a time.

    A peer that claims a height and does not answer is asked less often.
    """

    _claims: OrderedDict[bytes, PeerHeightClaim] = field(default_factory=OrderedDict)
    _height: int = 0
    _asked_below: int = 0  # height below which all decisions have been requested
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
        """Return the highest height that at least `count` of these peers claim. 0: fewer of them have claimed a height."""
        claims = sorted((claim.height for peer, claim in self._claims.items() if peer in peers), reverse=True)
        return claims[count - 1] if 0 < count <= len(claims) else 0

    def record_own_height(self, height: int, now: float) -> None:
        """Record this replica's height. If it has grown, the asked peer is sending decisions, and the next request waits."""
        if height > self._height:
            self._height, self._behind_since, self._next = height, None, now + RETRY_SECONDS

    def reset_backoff(self, peer: bytes) -> None:
        """Allow an immediate request to a peer that sent a needed decision."""
        claim = self._claims.get(peer)
        if claim is not None:
            claim.retry_seconds, claim.not_before = RETRY_SECONDS, 0.0

    def ignore_until_asked(self, peer: bytes) -> None:
        """Mark a peer that sent a useless decision: `was_asked` returns False for this peer until the next request to it."""
        claim = self._claims.get(peer)
        if claim is not None:
            claim.asked = False

    def was_asked(self, peer: bytes) -> bool:
        claim = self._claims.get(peer)
        return claim is not None and claim.asked

    def _ahead(self) -> list[tuple[bytes, PeerHeightClaim]]:
        return [(peer, claim) for peer, claim in self._claims.items() if claim.height > self._height]

    def deadline(self, now: float) -> float | None:
        """Return the time of the next request for decisions. None: no peer claims to be ahead."""
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
        """Return the next request and its receiver. Call it after the deadline.

        Every second request goes to a voter, if one may be asked: any peer can claim a height, but only few voters are faulty.
        The other requests go to any peer, because the only linked voter may be faulty.
        """
        patient = [(peer, claim) for peer, claim in self._ahead() if claim.not_before <= now]
        self._turn += 1
        if self._turn % 2:
            patient = [(peer, claim) for peer, claim in patient if votes(peer)] or patient
        peer, claim = patient[self._turn // 2 % len(patient)]
        claim.asked = True
        claim.not_before, claim.retry_seconds = now + claim.retry_seconds, min(RETRY_SECONDS_MAX, 2 * claim.retry_seconds)
        self._next = now + RETRY_SECONDS
        self._asked_below = min(self._height + DECISIONS_PER_REPLY_MAX, claim.height)  # this peer has no later decisions
        return peer, GetDecisions(self._height, DECISIONS_PER_REPLY_MAX)


@dataclass(slots=True)
class BlockFetcher:
    """Requests one missing block from the peers that should have it, one after another."""

    _digest: bytes | None = None
    _next: float = 0.0
    _turn: int = 0

    def deadline(self, wanted: bytes | None, now: float) -> float | None:
        """Return the time of the next request for the block with the digest `wanted`. None: no block is missing."""
        if wanted != self._digest:
            self._digest, self._next, self._turn = wanted, now + FIRST_REQUEST_DELAY_SECONDS, 0
        return None if wanted is None else self._next

    def next_request(self, height: int, holders: tuple[bytes, ...], now: float) -> tuple[bytes, GetBlock]:
        """Return the next request and its receiver, which is the next of the `holders` in turn. Call it after the deadline."""
        assert self._digest is not None
        peer = holders[self._turn % len(holders)]
        self._turn += 1
        self._next = now + RETRY_SECONDS
        return peer, GetBlock(height, self._digest)


@dataclass(slots=True)
class ResponseRateLimiter:
    """A token bucket for the requests of each peer: each answer may read `effects.DECISIONS_REPLY_BYTES_MAX` from disk."""

    _left: dict[bytes, tuple[float, float]] = field(default_factory=dict)  # linked peer -> (number of answers left, time)

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
    """Messages of later heights, which wait until their height opens.

    They are not verified yet, so their number and size are bounded.
    """

    # Sender -> (height, message, bytes) of its small messages.
    _small: dict[bytes, deque[tuple[int, AgreementMessage, int]]] = field(default_factory=dict)
    _proposals: dict[bytes, tuple[int, ProposeEnvelope, int]] = field(default_factory=dict)
    _decisions: dict[int, tuple[bytes, Decision]] = field(default_factory=dict)

    def add_decision(self, peer: bytes, height: int, decision: Decision) -> None:
        """Keep the first decision of each height, unverified. `remove_peer` drops it if its sender proves faulty."""
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
        """Return the messages of `height` with their senders. Drop these messages and all messages of lower heights."""
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
