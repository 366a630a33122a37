"""Last models of RLHF jobs: a peer with a worker measures them, and a voter reports on the reward models that plans wait for.

The work that is due follows from the applied state and the stored figures, so a restart forgets nothing.
"""

from __future__ import annotations

import logging
from typing import cast

import trio

from features.services import ServiceContext
from ledger.jobs import JobPhase, JobsState
from ledger.members import MembersState
from ledger.network_governance import NetworkState
from protocol.errors import UserError
from rlhf.ledger import tuning_plans
from rlhf.ledger.preference_set_attestation import current_voters
from rlhf.ledger.rlhf_module import RlhfState
from rlhf.ledger.tuning_plans import ReportAccuracy
from rlhf.objectives.ppo import MODULE
from rlhf.pair_accuracy import PairAccuracy
from rlhf.rpc import RlhfRpc
from training.job_spec import JobSpec

RETRY_SECONDS = 5.0  # after this peer's report was not decided, or a measurement failed; then twice as long each time
RETRY_SECONDS_MAX = 600.0

log = logging.getLogger("peer")


class FinalModelEvaluator:
    def __init__(self, desk: ServiceContext) -> None:
        self._desk = desk
        self._begun: set[bytes] = set()  # plans and jobs

    async def run(self) -> None:
        self._begun.clear()  # a fault of the system may have ended the last run
        async with trio.open_nursery() as nursery:
            while True:
                height = self._desk.height
                for plan in self._reports_due().keys() - self._begun:
                    self._begun.add(plan)
                    nursery.start_soon(self._report, plan)
                for job in self._finished() - self._begun:
                    self._begun.add(job)
                    nursery.start_soon(self._measure, job)
                await self._desk.wait_for_block_above(height)

    def _reports_due(self) -> dict[bytes, bytes]:
        """Plan -> job of the reward model that this peer has to report on as a voter."""
        state, me = self._desk.state, self._desk.me
        if not state.module_state(NetworkState).module_version(MODULE) or me not in current_voters(
            state.module_state(MembersState)
        ):
            return {}
        running, jobs = state.module_state(RlhfState).running_plans(), state.module_state(JobsState)
        waiting = {key: plan for key, plan in running.items() if tuning_plans.awaits_reports(plan, jobs)}
        return {key: plan.current.job for key, plan in waiting.items() if me not in plan.reports}

    def _finished(self) -> set[bytes]:
        known = self._desk.state.module_state(JobsState).jobs
        finished = {key: job for key, job in known.items() if job.phase is JobPhase.FINISHED}
        return {key for key, job in finished.items() if JobSpec.decode(job.spec).resolved_objective.module == MODULE}

    async def _report(self, key: bytes) -> None:
        pause = RETRY_SECONDS
        while (job := self._reports_due().get(key)) is not None:
            try:
                found = await self._calls.measure_last_model(job.hex(), True)
            except UserError as error:
                log.info("no report on the reward model of plan %s: %s", key.hex()[:8], error)
                await trio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS_MAX)
                continue
            accuracy = PairAccuracy.from_share(found.held_out_accuracy or 0.0, found.held_out_pairs or 0)
            try:
                await self._desk.submit_transaction("rlhf/report-accuracy", ReportAccuracy(key, accuracy))
            except UserError as error:
                log.info("the report on the reward model of plan %s: %s", key.hex()[:8], error)
                await trio.sleep(RETRY_SECONDS)
        self._begun.discard(key)

    async def _measure(self, job: bytes) -> None:
        try:
            await self._calls.measure_last_model(job.hex(), False)
        except UserError as error:
            log.debug("%s", error)

    @property
    def _calls(self) -> RlhfRpc:
        return cast(RlhfRpc, self._desk.api)
