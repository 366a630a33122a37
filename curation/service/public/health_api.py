"""What machines watch: health, metrics, and news of each block."""

from __future__ import annotations

from typing import Final

import trio

from curation.ledger.curation_state import CurationState
from curation.service.annotators.statement_batcher import StatementBatcher
from features.services import ServiceContext
from ledger.members import MembersState
from protocol.prometheus_metrics import PrometheusMetric, peer_metrics, why_unhealthy
from web.api_backend import Json
from web.stats_cache import StatsCache

BLOCK_WAIT_SECONDS: Final = 10.0  # a call waits that long for a block


class HealthApi:
    def __init__(self, desk: ServiceContext, gatherer: StatementBatcher) -> None:
        self._desk, self._gatherer = desk, gatherer
        self._stats = StatsCache(desk.api).stats

    async def health_problem(self) -> str:
        return why_unhealthy((await self._stats()).status)

    async def metrics(self) -> tuple[PrometheusMetric, ...]:
        state: CurationState = self._desk.state.module_state(CurationState)
        counts = (
            ("annotators", "enrolled in the network", state.annotators_count),
            ("projects", "that are not closed", len(state.open)),
            ("annotations_total", "answers that are committed", state.annotations),
            ("settled_total", "tasks that have a label", state.settled),
            ("passed_over_total", "statements that did not apply", state.passed_over),
            ("statements_waiting", "of annotators, that wait here for a decision", self._gatherer.waiting_count),
        )
        members = len(self._desk.state.module_state(MembersState).members)
        return peer_metrics(await self._stats(), members) + tuple(
            PrometheusMetric(name, about, {"": count}) for name, about, count in counts
        )

    async def wait_for_block(self, after: int) -> Json:
        with trio.move_on_after(BLOCK_WAIT_SECONDS):
            await self._desk.wait_for_block_above(after)
        desk, state = self._desk, self._desk.state.module_state(CurationState)
        body: Json = {"height": desk.height, "state_root": desk.state_root.hex(), "time_ms": desk.time_ms}
        return body | {"settled": state.settled, "projects": [self._counts(state, key) for key in state.open]}

    def _counts(self, state: CurationState, key: bytes) -> Json:
        row = state.projects.get_record(key)
        assert row is not None
        return {"project": key.hex(), "state": row.phase.value, "tasks": row.tasks, "settled": row.settled, "review": row.review}
