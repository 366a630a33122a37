"""Retention of models: the task that deletes those that snapshots have kept beyond their use."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from peer.runtime.driver import Driver


@dataclass
class ModelPruner:
    """The task that deletes models when they have left the last snapshot that contains them.

    A round deletes old models when it opens, but a checkpoint may expire later, in particular if its run is idle or over. The
    snapshots of this peer contain such a model for some more heights. Models of forgotten jobs are deleted by the model store.
    """

    driver: Driver

    async def run(self) -> None:
        """Delete the unneeded models of all jobs, and then of each job of which a model has left the snapshots."""
        due = set(self.driver.state.jobs.jobs)  # the process may have stopped before a deletion
        while True:
            applied, jobs = self.driver.block_applied, self.driver.state.jobs.jobs
            for key in sorted(due & jobs.keys()):
                delete = self.driver.round_executor.delete_old_models
                await trio.to_thread.run_sync(delete, (key, jobs[key].round), jobs[key])
            await applied.wait()
            due = self.driver.host.take_unpinned_jobs()
