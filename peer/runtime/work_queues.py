"""Queues of work for other peers, outside the node's steps, so that votes do not wait for disk reads or many signatures.

Peers are served in turn, one item of work each. A peer that exceeds the processor budget of its link waits until the budget has
grown. So the requests of strangers do not delay a guest.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import trio

from consensus.block import decode_block
from consensus.effects import SendBlock, SendDecisions, read_requested_blocks
from ledger.blocks.mempool import PENDING_BYTES_PER_MEMBER_MAX
from ledger.ledger_state import BlockBody, CurrentState, LedgerRules, decode_body
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.messages import BlockBytes, GossipEnvelope
from storage.ledger_store import LedgerStore
from transport.connections.connection_manager import ConnectionManager
from transport.network import DataReceived, Priority

# Waiting requests of one peer, equal to the node's burst of answers to a peer: peers repeat dropped requests.
REQUESTS_PER_PEER_MAX = 32
# Size above which a thread verifies a message's signatures, a dozen statements: the event loop verifies smaller messages.
LARGE_BYTES = 2_048
# Bytes of waiting messages on one link: further messages are dropped, and their senders repeat them.
BYTES_PER_PEER_MAX = PENDING_BYTES_PER_MEMBER_MAX
BYTES_MAX = 32 << 20  # bytes of waiting messages on all links, a bound of memory
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.001, 1.0  # seconds between two checks of the links' processor budgets
PREVERIFIED_KINDS: tuple[type[Any], ...] = (GossipEnvelope, BlockBytes)
_PREFIXES = tuple(
    bytes([0x90 | fields, 0xA0 | len(tag)]) + tag.encode() for fields, tag in ((2, GossipEnvelope.TAG), (3, BlockBytes.TAG))
)

T = TypeVar("T")


class PeerWorkQueue(Generic[T]):
    def __init__(self, network: ConnectionManager) -> None:
        self._network = network
        self._waiting: OrderedDict[bytes, deque[T]] = OrderedDict()  # peer -> its items; the first peer is served next
        self._more = trio.Event()

    def count(self, peer: bytes) -> int:
        return len(self._waiting.get(peer, ()))

    def add(self, peer: bytes, item: T) -> None:
        self._waiting.setdefault(peer, deque()).append(item)
        self._more.set()

    async def pop(self) -> T:
        """Return the next item of the first peer whose link has processor budget left."""
        while True:
            self._more = trio.Event()
            linked, pause = self._network.connected_peers(), math.inf
            for peer, items in self._waiting.items():
                wait = self._network.cpu_wait_seconds(peer) if peer in linked else 0.0
                if wait > 0:
                    pause = min(pause, wait)
                    continue
                item = items.popleft()
                self._waiting.move_to_end(peer)
                if not items:
                    del self._waiting[peer]
                return item
            with trio.move_on_after(min(max(pause, PAUSE_SECONDS_MIN), PAUSE_SECONDS_MAX) if self._waiting else math.inf):
                await self._more.wait()


async def run_charged(network: ConnectionManager, peer: bytes, function: Callable[..., T], *arguments: Any) -> T:
    """Run `function` in a thread, and charge its processor time to the link of `peer`."""

    def timed() -> tuple[T, float]:
        started = time.thread_time()
        return function(*arguments), time.thread_time() - started

    answer, seconds = await trio.to_thread.run_sync(timed)
    network.charge_cpu(peer, seconds)
    return answer


class BlockServer:
    """A server of blocks to peers that request them."""

    def __init__(self, store: LedgerStore, network: ConnectionManager) -> None:
        self._store, self._network = store, network
        self._queue = PeerWorkQueue[SendDecisions | SendBlock](network)

    def enqueue_request(self, request: SendDecisions | SendBlock) -> None:
        if self._queue.count(request.to) < REQUESTS_PER_PEER_MAX:
            self._queue.add(request.to, request)

    async def run(self) -> None:
        while True:
            request = await self._queue.pop()
            if request.to not in self._network.connected_peers():
                continue
            answers = await run_charged(self._network, request.to, self._read, request)
            priority = Priority.CONTROL if isinstance(request, SendDecisions) else Priority.VOTE
            for data in answers:
                self._network.send(request.to, data, priority)

    def _read(self, request: SendDecisions | SendBlock) -> list[bytes]:
        return [codec.encode(send.message) for send in read_requested_blocks(request, self._store)]


class SignaturePreverifier:
    """A thread that verifies the signatures of large messages before the node handles them.

    A member's transaction or a fetched block may contain hundreds of signed statements. `LedgerRules` caches verified signatures,
    so the node only looks them up. The node itself finds a false signature again, and reports the sender's fault.
    """

    def __init__(
        self,
        rules: LedgerRules,
        network: ConnectionManager,
        applied: CurrentState,
        deliver: Callable[[DataReceived], Awaitable[object]],
    ) -> None:
        self._rules, self._network, self._applied, self._deliver = rules, network, applied, deliver
        self._queue = PeerWorkQueue[DataReceived](network)
        self._bytes_of = Counter[bytes]()  # peer -> bytes of its waiting messages
        self.dropped = 0

    @property
    def bytes_waiting(self) -> int:
        return self._bytes_of.total()

    def should_preverify(self, event: DataReceived) -> bool:
        """Return whether a message is large and its sender a member. Messages of strangers are few and small."""
        is_large = len(event.data) > LARGE_BYTES and event.data.startswith(_PREFIXES)
        return is_large and self._applied.current.members.is_current_key(event.peer)

    def enqueue_message(self, event: DataReceived) -> None:
        size, of_peer = len(event.data), self._bytes_of[event.peer]
        if of_peer and (of_peer + size > BYTES_PER_PEER_MAX or self.bytes_waiting + size > BYTES_MAX):
            self.dropped += 1
            return
        self._bytes_of[event.peer] += size
        self._queue.add(event.peer, event)

    async def run(self) -> None:
        while True:
            event = await self._queue.pop()
            self._bytes_of[event.peer] -= len(event.data)
            if not self._bytes_of[event.peer]:
                del self._bytes_of[event.peer]
            await run_charged(self._network, event.peer, self._verify, event.data)
            await self._deliver(event)

    def _verify(self, data: bytes) -> None:
        with contextlib.suppress(RemoteProtocolError):  # the node finds the false signature again, and reports the sender
            self._rules.preverify_signatures(self._body_in(data))

    def _body_in(self, data: bytes) -> BlockBody:
        """Return the signed parts of a message that the node will verify.

        Without verification, the node refuses relayed transactions of non-members.
        """
        message: Any = codec.decode_message(data, PREVERIFIED_KINDS)
        if not isinstance(message, GossipEnvelope):
            return decode_body(decode_block(message.block).body)
        is_member = message.signed.signer in self._applied.current.members.members
        return BlockBody((), (), (message.signed,) if is_member else ())
