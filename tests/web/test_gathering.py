"""Batches of a serving peer, at a real network of one."""

from __future__ import annotations

from pathlib import Path

import trio

from curation.contents import LeaseWish
from curation.limits import BATCH_MAX, LEASES_MAX, WITHOUT_MAX
from peer.features import founding_modules
from peer.serving.gathering import Gatherer
from peer.settings.config import load
from tests.peer.network import network
from tests.web.test_sealed import desk_of


async def test_statements_that_no_single_transaction_takes_go_into_several_batches(tmp_path: Path) -> None:
    """Else the peer tries the same batch for ever, and none of its annotators gets or answers a task any more."""
    without = tuple(bytes([number]) * 32 for number in range(WITHOUT_MAX))
    async with network(tmp_path, 1, roles=("annotator",), modules=founding_modules()) as made, trio.open_nursery() as nursery:
        (seat,) = made.seats
        gatherer = Gatherer(desk_of(seat, load({"data_directory": seat.folder}, {"HOME": str(tmp_path)}).config))
        wishes = [LeaseWish(number.to_bytes(32), bytes(16), 1, bytes(64), LEASES_MAX, without) for number in range(BATCH_MAX)]
        decided = [gatherer.put(wish) for wish in wishes]
        nursery.start_soon(gatherer.run)
        with trio.fail_after(60):
            for event in decided:
                await event.wait()
        assert gatherer.waiting == 0
        nursery.cancel_scope.cancel()
