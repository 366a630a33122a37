"""What only a later job of a plan reads, a peer gets while an earlier one runs: when that begins, whoever has it may be away."""

from __future__ import annotations

import trio

from features.parts import Desk
from ledger.network import NetworkState
from protocol import codec
from rlhf.module import RlhfState
from rlhf.objective import MODULE
from training.spec import JobSpec

FETCHING_SECONDS = 10.0  # before the state is looked at again: the plan may be over


class Ahead:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._begun: set[bytes] = set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                height = self._desk.height
                for digest in self._named().keys() - self._begun:
                    self._begun.add(digest)
                    nursery.start_soon(self._get, digest)
                await self._desk.block_above(height)

    def _named(self) -> dict[bytes, int]:
        """Digest -> size at most of each file of a stage that has not begun."""
        state = self._desk.state
        if not state.of(NetworkState).version(MODULE):
            return {}
        plans = state.of(RlhfState).running().values()
        # The reward model of a policy is left open until its job begins: it is no sound job before.
        jobs = [codec.decode(JobSpec, stage.spec) for plan in plans for stage in plan.stages if stage.spec]
        return {digest: size for job in jobs for digest, size in job.kind.files(job).items()}

    async def _get(self, digest: bytes) -> None:
        while (size := self._named().get(digest)) is not None:
            with trio.move_on_after(FETCHING_SECONDS):
                await self._desk.fetch(digest, size)
                return  # it stays; `_begun` says that it is here
        self._begun.discard(digest)
