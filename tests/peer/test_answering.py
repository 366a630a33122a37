"""Replies with blocks: in turn, and at the rate that the budgets of links allow. Virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import trio
import trio.testing

from consensus.effects import SendBlock
from peer.runtime.work_queues import REQUESTS_PER_PEER_MAX, BlockServer
from protocol.codec import decode_message
from protocol.messages import BlockBytes
from transport.network import Priority

MODEST, GREEDY, GONE = b"modest", b"greedy", b"gone"


class FakeNetwork:
    def __init__(self) -> None:
        self.cost = 1.0  # seconds that an answer costs its link
        self.until = dict.fromkeys((MODEST, GREEDY), 0.0)
        self.sent: list[tuple[bytes, int, float]] = []
        self.charged = set[bytes]()

    def connected_peers(self) -> frozenset[bytes]:
        return frozenset(self.until)

    def cpu_wait_seconds(self, peer: bytes) -> float:
        return self.until[peer] - trio.current_time()

    def charge_cpu(self, peer: bytes, seconds: float) -> None:
        assert seconds > 0
        self.charged.add(peer)
        self.until[peer] = trio.current_time() + self.cost

    def send(self, peer: bytes, data: bytes, priority: Priority) -> bool:
        self.sent.append((peer, decode_message(data, (BlockBytes,)).height, round(trio.current_time(), 1)))
        return True


class Blocks:
    def get_block(self, digest: bytes) -> bytes:
        return b"block"


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> FakeNetwork:
    async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)  # virtual time does not wait for a thread
    return FakeNetwork()


async def answered(network: FakeNetwork, *requests: SendBlock) -> list[tuple[bytes, int, float]]:
    """Return the receiver, height and time of each reply."""
    answering = BlockServer(cast(Any, Blocks()), cast(Any, network))
    for request in requests:
        answering.enqueue_request(request)
    with trio.move_on_after(1_000):
        await answering.run()
    return network.sent


@pytest.mark.parametrize("cost", [0.0, 1.0])
async def test_who_asks_for_much_is_answered_at_its_own_pace_and_holds_up_nobody(
    network: FakeNetwork, cost: float, autojump_clock: trio.testing.MockClock
) -> None:
    network.cost, network.until = cost, dict.fromkeys((MODEST, GREEDY), trio.current_time())
    started = trio.current_time()
    asked = [SendBlock(GREEDY, height, bytes(32)) for height in range(3)]
    sent = await answered(network, *asked, SendBlock(MODEST, 0, bytes(32)))
    assert [(peer, height, at - started) for peer, height, at in sent] == [
        (GREEDY, 0, 0.0),
        (MODEST, 0, 0.0),
        (GREEDY, 1, cost),
        (GREEDY, 2, 2 * cost),
    ]
    assert network.charged == {GREEDY, MODEST}


async def test_of_one_peer_so_many_requests_wait_and_of_one_that_has_gone_none(
    network: FakeNetwork, autojump_clock: trio.testing.MockClock
) -> None:
    asked = [SendBlock(peer, height, bytes(32)) for peer in (GONE, GREEDY) for height in range(2 * REQUESTS_PER_PEER_MAX)]
    assert [sent[:2] for sent in await answered(network, *asked)] == [(GREEDY, height) for height in range(REQUESTS_PER_PEER_MAX)]
