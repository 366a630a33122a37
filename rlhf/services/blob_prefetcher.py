"""What only a later job reads, a peer gets while an earlier one runs: when the later one begins, whoever has it may be away."""

from __future__ import annotations

import trio

from features.services import ServiceContext
from ledger.jobs import JobsState
from ledger.network_governance import NetworkState
from protocol import codec
from rlhf.ledger.rlhf_module import RlhfState
from rlhf.objectives.ppo import MODULE
from training.job_spec import JobSpec

FETCHING_SECONDS = 10.0  # before the state is looked at again: the plan may be over


class BlobPrefetcher:
    def __init__(self, desk: ServiceContext) -> None:
        self._desk = desk
        self._begun: set[bytes] = set()

    async def run(self) -> None:
        self._begun.clear()  # a fault of the system may have ended the last run
        async with trio.open_nursery() as nursery:
            while True:
                height = self._desk.height
                for digest in self._named().keys() - self._begun:
                    self._begun.add(digest)
                    nursery.start_soon(self._get, digest)
                await self._desk.wait_for_block_above(height)

    def _named(self) -> dict[bytes, int]:
        """Digest -> size at most of each file of a job in line, and of a stage that has not begun."""
        state = self._desk.state
        if not state.module_state(NetworkState).module_version(MODULE):
            return {}
        specs = [waiting.spec for waiting in state.module_state(JobsState).queue]
        specs += [
            stage.spec for plan in state.module_state(RlhfState).running_plans().values() for stage in plan.stages if stage.spec
        ]
        jobs = [codec.decode(JobSpec, spec) for spec in specs]  # a stage's may be open yet: its reward model is not known
        return {digest: size for job in jobs for digest, size in job.resolved_objective.required_files(job).items()}

    async def _get(self, digest: bytes) -> None:
        while (size := self._named().get(digest)) is not None:
            with trio.move_on_after(FETCHING_SECONDS):
                await self._desk.fetch_blob(digest, size)
                return  # it stays; `_begun` says that it is here
        self._begun.discard(digest)
