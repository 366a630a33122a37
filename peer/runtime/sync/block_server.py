"""Decided blocks for those that ask, beside the node's turns: no vote waits while this peer reads its disk for somebody.

Askers take turns, one request at a time, and whoever has taken more processor time than its link has waits until that is paid
back. So strangers can ask for as much as they like, and a newcomer that has shown its invitation does not stand behind them.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque

import trio

from consensus.effects import SendBlock, SendDecisions, read_requested_blocks
from protocol import codec
from storage.ledger_store import LedgerStore
from transport.connections.connection_manager import ConnectionManager
from transport.network import Priority

REQUESTS_PER_PEER_MAX = 32  # of one peer, as many as the node grants at once; what is beyond is asked for again
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.001, 1.0  # until budgets are looked at again

Request = SendDecisions | SendBlock


class BlockServer:
    def __init__(self, store: LedgerStore, network: ConnectionManager) -> None:
        self._store, self._network = store, network
        self._asked: OrderedDict[bytes, deque[Request]] = OrderedDict()  # by peer, whose turn it is first
        self._more = trio.Event()

    def enqueue_request(self, request: Request) -> None:
        requests = self._asked.setdefault(request.to, deque())
        if len(requests) < REQUESTS_PER_PEER_MAX:
            requests.append(request)
        self._more.set()

    async def run(self) -> None:
        while True:
            self._more = trio.Event()
            request, pause = self._next()
            if request is None:
                with trio.move_on_after(pause):
                    await self._more.wait()
                continue
            answers, seconds = await trio.to_thread.run_sync(self._read, request)
            self._network.charge_cpu(request.to, seconds)
            priority = Priority.CONTROL if isinstance(request, SendDecisions) else Priority.VOTE
            for data in answers:
                self._network.send(request.to, data, priority)

    def _next(self) -> tuple[Request | None, float]:
        """What is answered now; or in how many seconds something may be."""
        linked, pause = self._network.connected_peers(), math.inf
        for peer, requests in tuple(self._asked.items()):
            wait = self._network.cpu_wait_seconds(peer) if peer in linked else 0.0
            if wait > 0:
                pause = min(pause, wait)
                continue
            request = requests.popleft()
            self._asked.move_to_end(peer)
            if not requests or peer not in linked:
                del self._asked[peer]
            if peer in linked:
                return request, 0.0
        return None, min(max(pause, PAUSE_SECONDS_MIN), PAUSE_SECONDS_MAX) if self._asked else math.inf

    def _read(self, request: Request) -> tuple[list[bytes], float]:
        """And the processor time that it took."""
        started = time.thread_time()
        answers = [codec.encode(send.message) for send in read_requested_blocks(request, self._store)]
        return answers, time.thread_time() - started
