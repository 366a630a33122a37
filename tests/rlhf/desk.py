"""The desk of one member of a world of the ledger, for parts of a peer that follow its state."""

from __future__ import annotations

from typing import Any

import trio

from tests.ledger.world import World


class WorldDesk:
    def __init__(self, world: World, me: bytes) -> None:
        self.world, self.me = world, me

    @property
    def state(self) -> Any:
        return self.world.state

    @property
    def height(self) -> int:
        return self.world.state.height

    async def wait_for_block_above(self, height: int) -> None:
        while self.height <= height:  # noqa: ASYNC110
            await trio.sleep(0.01)
