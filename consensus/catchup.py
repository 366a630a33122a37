"""What a replica lacks and whom it asks: decisions of heights it missed, bytes of blocks that certificates name."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from consensus.events import Message
from protocol.limits import DECISIONS_PER_REPLY_MAX
from protocol.messages import Decision, GetBlock, GetDecisions, Proposed

PATIENCE_SECONDS = 0.1  # a peer one step ahead is normal: its votes or the block are probably on their way
RETRY_SECONDS = 0.5  # then another peer is asked
CLAIMS_MAX = 1_024  # peers whose height is remembered
FUTURE_MESSAGES_MAX = 16  # per peer, votes of a leader's change and its votes of two heights; large proposals: one per peer
DECISIONS_BYTES_MAX = 8 << 20  # decisions that came before the ones below them, from all peers together
FUTURE_HEIGHTS_MAX = 2  # messages for the next two heights are kept until they are reached, others are asked for again


@dataclass(slots=True)
class CatchUp:
    """Asks one peer at a time for the next decisions. Claims are not trusted: whoever does not deliver is passed over."""

    _claims: OrderedDict[bytes, int] = field(default_factory=OrderedDict)  # peer -> the height it works on
    _height: int = 0
    _asked_below: int = 0  # decisions under this height have been asked for
    _behind_since: float | None = None
    _next: float = 0.0
    _turn: int = 0

    def claim(self, peer: bytes, height: int) -> None:
        self._claims[peer] = max(height, self._claims.pop(peer, 0))
        if len(self._claims) > CLAIMS_MAX:
            self._claims.popitem(last=False)

    def forget(self, peer: bytes) -> None:
        self._claims.pop(peer, None)

    def reached(self, height: int, now: float) -> None:
        """Notes progress: the peer that is being asked delivers."""
        if height > self._height:
            self._height, self._behind_since, self._next = height, None, now + RETRY_SECONDS

    def deadline(self, now: float) -> float | None:
        ahead = max(self._claims.values(), default=0) - self._height
        if ahead <= 0:
            return None
        if self._behind_since is None:
            self._behind_since = now
        if self._height < self._asked_below:
            return self._next
        return self._behind_since + PATIENCE_SECONDS if ahead == 1 else now

    def ask(self, now: float) -> tuple[bytes, GetDecisions]:
        """The next request. Call it when the deadline has come."""
        ahead = [peer for peer, height in self._claims.items() if height > self._height]
        self._turn += 1
        self._next = now + RETRY_SECONDS
        self._asked_below = self._height + DECISIONS_PER_REPLY_MAX
        return ahead[self._turn % len(ahead)], GetDecisions(self._height, DECISIONS_PER_REPLY_MAX)


@dataclass(slots=True)
class BlockFetch:
    """Asks the signers of a certificate, one after another, for the block it names."""

    _digest: bytes | None = None
    _next: float = 0.0
    _turn: int = 0

    def want(self, digest: bytes | None, now: float) -> None:
        if digest != self._digest:
            self._digest, self._next = digest, now + PATIENCE_SECONDS

    def deadline(self) -> float | None:
        return None if self._digest is None else self._next

    def ask(self, height: int, holders: tuple[bytes, ...], now: float) -> tuple[bytes, GetBlock]:
        assert self._digest is not None
        self._turn += 1
        self._next = now + RETRY_SECONDS
        return holders[self._turn % len(holders)], GetBlock(height, self._digest)


@dataclass(slots=True)
class Future:
    """Messages for heights that are not reached yet, unverified, so bounded for each peer they came from."""

    _small: dict[bytes, deque[tuple[int, Message]]] = field(default_factory=dict)
    _proposals: dict[bytes, tuple[int, Message]] = field(default_factory=dict)

    _decisions: dict[int, tuple[bytes, Decision]] = field(default_factory=dict)

    def keep_decision(self, peer: bytes, height: int, decision: Decision) -> None:
        held = sum(len(kept.block) for _, kept in self._decisions.values())
        if held + len(decision.block) <= DECISIONS_BYTES_MAX and len(self._decisions) < DECISIONS_PER_REPLY_MAX:
            self._decisions[height] = (peer, decision)

    def keep(self, peer: bytes, height: int, message: Message) -> None:
        if isinstance(message, Proposed):
            self._proposals[peer] = (height, message)
        else:
            self._small.setdefault(peer, deque(maxlen=FUTURE_MESSAGES_MAX)).append((height, message))

    def forget(self, peer: bytes) -> None:
        self._small.pop(peer, None)
        self._proposals.pop(peer, None)

    def take(self, height: int) -> list[tuple[bytes, Message]]:
        """Removes what is for `height`, and what is for lower ones."""
        taken: list[tuple[bytes, Message]] = []
        if height in self._decisions:
            taken.append(self._decisions[height])
        self._decisions = {of: kept for of, kept in self._decisions.items() if of > height}
        for peer in [peer for peer, (of, _) in self._proposals.items() if of <= height]:
            taken.append((peer, self._proposals.pop(peer)[1]))
        for peer, messages in self._small.items():
            taken.extend((peer, message) for of, message in messages if of == height)
            self._small[peer] = deque(((of, m) for of, m in messages if of > height), maxlen=FUTURE_MESSAGES_MAX)
        return taken
