"""Signatures of large messages, verified in a thread before the node handles them: no vote waits for that.

A member's batch may hold hundreds of signed statements, and so may a block that this voter had to fetch. The rules remember what
was verified here, so the node's turn only looks it up. It finds a false signature anew, and names the sender as at fault. The
processor time is charged to the link that brought the message, in turn among peers.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from consensus.block import decode_block
from ledger.blocks.mempool import PENDING_BYTES_PER_MEMBER_MAX
from ledger.ledger_state import BlockBody, CurrentState, LedgerRules, decode_body
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.messages import BlockBytes, GossipEnvelope
from transport.connections.connection_manager import ConnectionManager
from transport.network import DataReceived

LARGE_BYTES = 2_048  # a dozen statements: the event loop verifies fewer than those itself
BYTES_PER_PEER_MAX = PENDING_BYTES_PER_MEMBER_MAX  # waiting, of one link: what is beyond is dropped, and told again
BYTES_MAX = 32 << 20  # of all links
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.001, 1.0  # until budgets are looked at again
PREVERIFIED_KINDS: tuple[type[Any], ...] = (GossipEnvelope, BlockBytes)
_PREFIXES = tuple(
    bytes([0x90 | fields, 0xA0 | len(tag)]) + tag.encode() for fields, tag in ((2, GossipEnvelope.TAG), (3, BlockBytes.TAG))
)


class SignaturePreverifier:
    def __init__(
        self,
        rules: LedgerRules,
        network: ConnectionManager,
        applied: CurrentState,
        deliver: Callable[[DataReceived], Awaitable[object]],
    ) -> None:
        self._rules, self._network, self._applied, self._deliver = rules, network, applied, deliver
        self._waiting: OrderedDict[bytes, deque[DataReceived]] = OrderedDict()  # by peer, whose turn it is first
        self._bytes_of: dict[bytes, int] = {}
        self._more = trio.Event()
        self.dropped = 0

    @property
    def bytes_waiting(self) -> int:
        return sum(self._bytes_of.values())

    def should_preverify(self, event: DataReceived) -> bool:
        """Whether a message is verified here first. Strangers' messages are few and small."""
        is_large = len(event.data) > LARGE_BYTES and event.data.startswith(_PREFIXES)
        return is_large and self._applied.current.members.is_current_key(event.peer)

    def enqueue_message(self, event: DataReceived) -> None:
        size, of_peer = len(event.data), self._bytes_of.get(event.peer, 0)
        if of_peer and (of_peer + size > BYTES_PER_PEER_MAX or self.bytes_waiting + size > BYTES_MAX):
            self.dropped += 1
            return
        self._bytes_of[event.peer] = of_peer + size
        self._waiting.setdefault(event.peer, deque()).append(event)
        self._more.set()

    async def run(self) -> None:
        while True:
            self._more = trio.Event()
            event, pause = self._next()
            if event is None:
                with trio.move_on_after(pause):
                    await self._more.wait()
                continue
            seconds = await trio.to_thread.run_sync(self._verify, event.data)
            self._network.charge_cpu(event.peer, seconds)
            await self._deliver(event)

    def _next(self) -> tuple[DataReceived | None, float]:
        """The next message, or the seconds until a link has paid for those before."""
        linked, pause = self._network.connected_peers(), math.inf
        for peer, events in tuple(self._waiting.items()):
            wait = self._network.cpu_wait_seconds(peer) if peer in linked else 0.0
            if wait > 0:
                pause = min(pause, wait)
                continue
            event = events.popleft()
            self._bytes_of[peer] -= len(event.data)
            self._waiting.move_to_end(peer)
            if not events:
                del self._waiting[peer], self._bytes_of[peer]
            return event, 0.0
        return None, min(max(pause, PAUSE_SECONDS_MIN), PAUSE_SECONDS_MAX) if self._waiting else math.inf

    def _verify(self, data: bytes) -> float:
        """The processor time that it took."""
        started = time.thread_time()
        with contextlib.suppress(RemoteProtocolError):  # the node finds it, and says who is at fault
            self._rules.preverify_signatures(self._body_in(data))
        return time.thread_time() - started

    def _body_in(self, data: bytes) -> BlockBody:
        """The signed parts that the node will verify. It refuses a relayed transaction of a stranger before that."""
        message: Any = codec.decode_message(data, PREVERIFIED_KINDS)
        if not isinstance(message, GossipEnvelope):
            return decode_body(decode_block(message.block).body)
        is_member = message.signed.signer in self._applied.current.members.members
        return BlockBody((), (), (message.signed,) if is_member else ())
