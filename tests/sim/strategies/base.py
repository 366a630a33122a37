"""The means of a liar: it runs the real node with its real keys, and changes its input, memory and output."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from consensus.effects import RestartState, StepEffects
from protocol import codec
from protocol.identity import Signed, Signer, sign_message
from protocol.messages import AGREEMENT_MESSAGES, GOSSIP_MESSAGES
from protocol.verdicts import Verdict
from tests.sim.keys import FastSigner, another

if TYPE_CHECKING:
    from peer.node.node import Node

Outgoing = Any  # a message, or bytes that are not a message


@dataclasses.dataclass
class Liar:
    """The parts of a liar that a strategy may use."""

    signer: Signer
    chain_id: bytes
    random: random.Random
    founders: tuple[bytes, ...]
    colluders: tuple[bytes, ...]  # the keys of all liars of this network, this one among them
    shared: dict[str, Any]  # shared knowledge of the liars of one network
    now: Callable[[], float]
    node: Callable[[], Node | None]  # None while it is crashed
    send: Callable[[bytes, Outgoing, float], None]  # (key, message, delay in seconds); bypasses the strategy's own `sends`

    @property
    def key(self) -> bytes:
        return self.signer.public

    def sign(self, message: Any) -> Signed:
        return sign_message(self.signer, self.chain_id, message)

    def sign_again(self, message: Any) -> Signed:
        """Return the same message with other signature bytes, if the scheme allows that."""
        signer = self.signer
        return sign_message(signer.again(), self.chain_id, message) if isinstance(signer, FastSigner) else self.sign(message)

    def stranger(self, name: object) -> Signer:
        """Return a key that was never admitted."""
        return another(self.signer, f"stranger {name}")

    @property
    def others(self) -> tuple[bytes, ...]:
        return tuple(key for key in self.founders if key not in self.colluders)

    @property
    def replica(self) -> Any:
        """The liar's own replica, or None while it is crashed."""
        node = self.node()
        return node.replica if node is not None else None

    def tell(self, message: Outgoing, seconds: float = 0.0) -> None:
        """Send a message to every honest founder."""
        for key in self.others:
            self.send(key, message, seconds)

    def made_up(self) -> bytes:
        """Return a digest without a preimage."""
        return self.random.randbytes(32)


class Strategy:
    """An honest strategy. A subclass overrides the parts about which it lies. Plans name it by its key in the table."""

    leaves_proof = False  # True: a peer that does this long enough is expelled

    def __init__(self, liar: Liar) -> None:
        self.liar = liar

    def started(self) -> None:
        """React to a start or restart of its node."""

    def restart(self, restart: RestartState) -> RestartState:
        """Return the memory that it keeps after a crash."""
        return restart

    def hears(self, peer: bytes, data: bytes) -> bool:
        """Return True if this message reaches its node."""
        return True

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        """Return the messages sent to one peer instead of `message`."""
        return (message,)

    def turned(self, turn: StepEffects) -> None:
        """React to a finished, durable turn of its node."""

    def payload_seconds(self, to: bytes) -> float | None:
        """Return the seconds until its proposal's payload reaches this peer, or None if it never does."""
        return 0.0

    def reveal_seconds(self, to: bytes) -> float | None:
        """Return the seconds until the other data for re-execution reach this peer, or None if they never do."""
        return 0.0

    def finding(self, honest: Verdict) -> Verdict:
        """Return its reported verdict on a proposal that it was called to re-execute."""
        return honest

    def payload(self, honest: bytes) -> bytes:
        """Return the digest of the proposed update. Re-execution detects any but the honest one."""
        return honest

    def in_first_half(self, to: bytes) -> bool:
        founders = self.liar.founders
        return to not in founders or founders.index(to) % 2 == 0


def opened(data: bytes) -> Any:
    """Return the decoded wire message, or None if the bytes are not a message."""
    try:
        return codec.decode_message(data, (*AGREEMENT_MESSAGES, *GOSSIP_MESSAGES))
    except Exception:
        return None


def header_digest(header: bytes) -> bytes:
    return hashlib.sha256(b"folkmoot/block\x00" + header).digest()
