"""Liars. Each runs the real node with its real keys, and changes what it hears, remembers and says."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from consensus.turn import Restart, Turn
from protocol import codec
from protocol.identity import Signer, sign
from protocol.messages import NO_VIEW, Commit, Prepare, Propose, Proposed, TimedOut, Timeout, Vote

if TYPE_CHECKING:
    from peer.node import Node

Outgoing = Any  # a message, or bytes that are none


@dataclasses.dataclass
class Liar:
    """What a strategy may use."""

    signer: Signer
    chain_id: bytes
    random: random.Random
    founders: tuple[bytes, ...]
    colluders: tuple[bytes, ...]  # the keys of all liars of this network, this one among them
    shared: dict[str, Any]  # what the liars of one network know together
    now: Callable[[], float]
    node: Callable[[], Node | None]  # None while it is crashed
    send: Callable[[bytes, Outgoing, float], None]  # to a key, after so many seconds, past the strategy's own `sends`

    @property
    def key(self) -> bytes:
        return self.signer.public

    def sign(self, message: Any) -> Any:
        return sign(self.signer, self.chain_id, message)

    @property
    def others(self) -> tuple[bytes, ...]:
        return tuple(key for key in self.founders if key not in self.colluders)


class Strategy:
    """Honest as it stands. A subclass overrides what it lies about; its name in the table is how plans and people call it."""

    def __init__(self, liar: Liar) -> None:
        self.liar = liar

    def started(self) -> None:
        """Its node has started, or started again."""

    def restart(self, restart: Restart) -> Restart:
        """What it remembers after a crash."""
        return restart

    def hears(self, peer: bytes, data: bytes) -> bool:
        """Whether this message reaches its node."""
        return True

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        """What goes out to one peer instead of `message`."""
        return (message,)

    def turned(self, turn: Turn) -> None:
        """Its node has finished a turn, which is durable."""

    def payload_seconds(self, to: bytes) -> float | None:
        """How long the payload of its proposal takes to reach this peer; None: it never does."""
        return 0.0

    def payload(self, honest: bytes) -> bytes:
        """The digest of the update it proposes; any but the honest one is found out by who re-executes it."""
        return honest


class Silent(Strategy):
    """Says nothing."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        return ()


class SilentLeader(Strategy):
    """Votes, but proposes nothing."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        return () if isinstance(message, Proposed) else (message,)


class WithheldLock(Strategy):
    """Gives up views as if nothing had been prepared."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if not isinstance(message, TimedOut):
            return (message,)
        timeout = codec.decode_message(message.timeout.body, (Timeout,))
        without = dataclasses.replace(timeout, high_view=NO_VIEW, high_block=None)
        return (TimedOut(self.liar.sign(without), None),)


class TwoBlocks(WithheldLock):
    """Proposes two blocks, each to one half, and votes in both phases for what each half has."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if not isinstance(message, Proposed):
            return super().sends(to, message)
        propose = codec.decode_message(message.propose.body, (Propose,))
        first_half = self.liar.founders.index(to) % 2 == 0 if to in self.liar.founders else True
        if not first_half:
            message, propose = self._other(message, propose)
        votes = [
            Vote(self.liar.sign(kind(propose.voters, propose.height, propose.view, propose.block))) for kind in (Prepare, Commit)
        ]
        return (message, *votes)

    def _other(self, message: Proposed, propose: Propose) -> tuple[Proposed, Propose]:
        header = codec.unpack(message.header, len(message.header))
        header[2] += 1  # its time
        data = codec.encode(header)
        other = dataclasses.replace(propose, block=_header_digest(data))
        return dataclasses.replace(message, propose=self.liar.sign(other), header=data), other


def _header_digest(header: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(b"folkmoot/block\x00" + header).digest()


class Fork(TwoBlocks):
    """Tells each half of the honest that everybody who lies is with them: 2q − n such peers decide two blocks at once."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        liar.shared[liar.key.hex()] = liar  # each signs for all

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if not isinstance(message, Proposed) or to not in self.liar.others:
            return (message,)
        propose = codec.decode_message(message.propose.body, (Propose,))
        if self.liar.others.index(to) % 2:
            message, propose = self._other(message, propose)
        said: list[Outgoing] = [message]
        for kind in (Prepare, Commit):
            vote = kind(propose.voters, propose.height, propose.view, propose.block)
            said += [Vote(colluder.sign(vote)) for _, colluder in sorted(self.liar.shared.items())]
        return said


class Amnesia(Strategy):
    """After a restart it has forgotten all it signed."""

    def restart(self, restart: Restart) -> Restart:
        return dataclasses.replace(restart, votes=(), blocks=(), prepared=None)


class WithheldPayload(Strategy):
    """Proposes updates whose payload only half of the others can fetch."""

    def payload_seconds(self, to: bytes) -> float | None:
        return 0.0 if to[-1] % 2 else None


STRATEGIES: dict[str, type[Strategy]] = {
    "silent": Silent,
    "silent-leader": SilentLeader,
    "withheld-lock": WithheldLock,
    "two-blocks": TwoBlocks,
    "amnesia": Amnesia,
    "withheld-payload": WithheldPayload,
    "fork": Fork,
}
HONEST_MAJORITY = tuple(STRATEGIES)  # what at most f liars of an ordinary history draw from
