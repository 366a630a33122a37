"""What machines watch: counts of curation for monitors, and the events of each block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import trio

from curation.ledger.curation_state import CurationState
from curation.service.annotators.statement_batcher import StatementBatcher
from features.services import ServiceContext
from protocol.prometheus_metrics import PrometheusMetric
from web.replies import Json
from web.routes import EventFeed

BLOCK_WAIT_SECONDS: Final = 10.0  # a call waits that long for a block


class BlockFeed:
    def __init__(self, desk: ServiceContext, gatherer: StatementBatcher) -> None:
        self._desk, self._gatherer = desk, gatherer
        self.event_feed = EventFeed(self._wait_for_look, "height", _events_between)

    def metrics(self) -> tuple[PrometheusMetric, ...]:
        state: CurationState = self._desk.state.module_state(CurationState)
        counts = (
            ("annotators", "enrolled in the network", state.annotators_count),
            ("projects", "that are not closed", len(state.open)),
            ("annotations_total", "answers that are committed", state.annotations),
            ("settled_total", "tasks that have a label", state.settled),
            ("passed_over_total", "statements that did not apply", state.passed_over),
            ("statements_waiting", "of annotators, that wait here for a decision", self._gatherer.waiting_count),
        )
        return tuple(PrometheusMetric(name, about, {"": count}) for name, about, count in counts)

    async def _wait_for_look(self, last: Json) -> Json:
        """The newest state, once there is a block above the last look, or after some seconds."""
        with trio.move_on_after(BLOCK_WAIT_SECONDS):
            await self._desk.wait_for_block_above(last.get("height", -1))
        desk, state = self._desk, self._desk.state.module_state(CurationState)
        body: Json = {"height": desk.height, "state_root": desk.state_root.hex(), "time_ms": desk.time_ms}
        return body | {"settled": state.settled, "projects": [self._counts(state, key) for key in state.open]}

    def _counts(self, state: CurationState, key: bytes) -> Json:
        row = state.projects.get_record(key)
        assert row is not None
        return {"project": key.hex(), "state": row.phase.value, "tasks": row.tasks, "settled": row.settled, "review": row.review}


def _events_between(before: Json, now: Json) -> Iterator[tuple[str, Json]]:
    yield "block", {name: now[name] for name in ("height", "state_root", "time_ms")}
    known = {row["project"]: row for row in before.get("projects", ())}
    for row in now["projects"]:
        if known.get(row["project"]) != row:
            yield "project", {"height": now["height"], **row}
    if before.get("settled") != now["settled"]:
        yield "settled", {"height": now["height"], "settled": now["settled"]}
