"""Feeds of server-sent events: of each block, and of the data on the page `/live`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import trio

from curation.ledger.curation_state import CurationState
from curation.service.access_control import unix_time_ms
from curation.service.annotators.statement_batcher import StatementBatcher
from features.json_output import to_json_value
from features.services import ServiceContext
from protocol.api import AlertCause, PeerView
from protocol.errors import UserError
from protocol.prometheus_metrics import PrometheusMetric
from web.calls import HttpProblem, Json
from web.routes import EventFeed

BLOCK_WAIT_SECONDS: Final = 10.0  # longest wait for a block until a feed reads the state again
CHANGE_WAIT_SECONDS: Final = 10.0  # longest wait for a change until a feed replies with the old data
LOOK_INTERVAL_SECONDS_MIN: Final = 0.25  # shortest time between two observations of the peer without a new block
LOOK_INTERVAL_SECONDS: Final = 1.0  # longest wait for an event before the next observation of the peer
MINUTE_MS: Final = 60_000
ROUNDS, VOTES, BLOCKS = 200, 6, 10  # largest numbers of rounds, votes and blocks on the page `/live`
# Causes of alerts that the page `/live` leaves out: only this machine's operator can fix them. Strangers see no addresses, paths
# or processes either.
OPERATOR_ONLY_CAUSES: Final = (AlertCause.DISK_LOW, AlertCause.NO_ROOM, AlertCause.WORKER_GONE)
STATUS_FIELDS: Final = (
    "peer name network chain_id role version height view state_root voter voters tolerated quorum links halted waiting "
    "suspended unaudited fork module_failure state heights_behind straggling"
)
JOB_FIELDS: Final = (
    "job name objective state round rounds_in_model rounds model_root audit accepted rejected "
    "suspended_until reexecution_limits queue_position"
)
ROUND_FIELDS: Final = "job round height verdicts vouchers ballots stepped model_root held_out_bits_per_byte seconds decision_ms"
PEER_FIELDS: Final = "peer name roles member voter me membership departed"
VOTE_FIELDS: Final = "job round phase height quorum voters trainers proposed votes vouches"
BLOCK_FIELDS: Final = "height digest time_ms proposer view signers voters_count quorum certified_root own_root"


class BlockFeed:
    """Feed for programs: an event for each block and for each project that the block changed. It also returns metrics."""

    def __init__(self, desk: ServiceContext, gatherer: StatementBatcher) -> None:
        self._desk, self._gatherer = desk, gatherer
        self.event_feed = EventFeed(self._wait_for_look, "height", _block_events)

    def metrics(self) -> tuple[PrometheusMetric, ...]:
        state: CurationState = self._desk.state.module_state(CurationState)
        counts = (
            ("annotators", "annotators enrolled in the network", state.annotators_count),
            ("projects", "projects that are not closed", len(state.open)),
            ("annotations_total", "committed answers", state.annotations),
            ("settled_total", "tasks with a label", state.settled),
            ("passed_over_total", "statements of annotators that were ignored, since they did not apply", state.passed_over),
            (
                "statements_waiting",
                "statements of annotators that wait at this peer for a decision",
                self._gatherer.waiting_count,
            ),
        )
        return tuple(PrometheusMetric(name, about, {"": count}) for name, about, count in counts)

    async def _wait_for_look(self, last: Json) -> Json:
        """Return the newest counts, once the height is above that of `last`, or after BLOCK_WAIT_SECONDS."""
        with trio.move_on_after(BLOCK_WAIT_SECONDS):
            await self._desk.wait_for_block_above(last.get("height", -1))
        desk, state = self._desk, self._desk.state.module_state(CurationState)
        rows = [(key, state.projects[key]) for key in state.open]
        counts = [
            {"project": key.hex(), "state": row.phase.value, "tasks": row.tasks, "settled": row.settled, "review": row.review}
            for key, row in rows
        ]
        return {
            "height": desk.height,
            "state_root": desk.state_root.hex(),
            "time_ms": desk.time_ms,
            "settled": state.settled,
            "projects": counts,
        }


def _block_events(before: Json, now: Json) -> Iterator[tuple[str, Json]]:
    yield "block", {name: now[name] for name in ("height", "state_root", "time_ms")}
    known = {row["project"]: row for row in before.get("projects", ())}
    for row in now["projects"]:
        if known.get(row["project"]) != row:
            yield "project", {"height": now["height"], **row}
    if before.get("settled") != now["settled"]:
        yield "settled", {"height": now["height"], "settled": now["settled"]}


class LiveFeed:
    """Feed of the page `/live`. All viewers share its observations of the peer, which leave out the operator's private data."""

    def __init__(self, desk: ServiceContext) -> None:
        self._desk = desk
        self._looking, self._reading = trio.Lock(), trio.Lock()
        self._looked, self._seen, self._height = -math.inf, 0, -1  # time, last event and height of the newest observation
        self._number, self._now = 0, Json()
        self.event_feed = EventFeed(self._wait_for_change, "number", _live_events, is_on_request=True)
        # blocks of the last minute: time of the block, number of answers up to the block
        self._labels: deque[tuple[int, int]] = deque()

    async def run_label_counter(self) -> None:
        while True:
            height, labels = self._desk.height, self._state.annotations
            if not self._labels or self._labels[-1][1] != labels:
                self._labels.append((self._desk.time_ms, labels))
            while len(self._labels) > 1 and self._labels[1][0] < unix_time_ms() - MINUTE_MS:
                self._labels.popleft()
            await self._desk.wait_for_block_above(height)

    async def block_proof(self, height: int) -> Json:
        """Return a block's header with its certificate.

        One call runs at a time: each takes a thread, and the voter needs threads, too.
        """
        try:
            async with self._reading:
                return _only("height header certificate voters", await self._desk.api.block(height))
        except UserError as error:
            raise HttpProblem("not-found", str(error)) from None

    async def live_snapshot(self) -> Json:
        async with self._looking:
            if trio.current_time() - self._looked > LOOK_INTERVAL_SECONDS:
                await self._look()
            return self._now

    async def _wait_for_change(self, last: Json) -> Json:
        """Return the newest observation and its `number`: one above that of `last`, or any after CHANGE_WAIT_SECONDS."""
        after = last.get("number", -1)
        if after < 0:
            await self.live_snapshot()
        with trio.move_on_after(CHANGE_WAIT_SECONDS):
            while self._number <= after:
                async with self._looking:
                    # A new block causes an observation at once, any other event one after LOOK_INTERVAL_SECONDS_MIN.
                    await self._desk.api.events(self._seen, LOOK_INTERVAL_SECONDS)
                    with trio.move_on_at(self._looked + LOOK_INTERVAL_SECONDS_MIN):
                        await self._desk.wait_for_block_above(self._height)
                    await self._look()
        return {"number": self._number, **self._now}

    async def _look(self) -> None:
        """Observe the peer. An observation that fails or is cancelled changes nothing, so the next one sees the same events."""
        api, was, height = self._desk.api, self._now, self._desk.height
        events = await api.events(self._seen, 0.0)
        kinds = {event.kind for event in events}
        status = await api.status()
        alerts = [alert for alert in await api.alerts() if alert.cause not in OPERATOR_ONLY_CAUSES]
        now = was | {"status": _only(STATUS_FIELDS, status), "alerts": to_json_value(alerts)}
        now["peers"] = [_peer(view) for view in await api.peers()]
        now["labels"] = self._labels_a_minute()
        if height != self._height:
            now["jobs"] = [_only(JOB_FIELDS, job) for job in await api.jobs()]
            now["blocks"] = await self._blocks(was.get("blocks", []), status.height)
        if not was or kinds & {"round", "measured"}:
            now["rounds"] = [_only(ROUND_FIELDS, view) for view in await api.rounds(ROUNDS)]
            now["samples"] = to_json_value(await api.saved_samples())
            now["votes"] = [_only(VOTE_FIELDS, view) for view in await api.votes(VOTES)]
        elif kinds & {"proposal", "ballot", "cut-off", "applied"}:
            closed = (view for view in was["votes"] if view["height"] is not None)
            now["votes"] = [*closed, *(_only(VOTE_FIELDS, view) for view in await api.votes(0))]
        self._seen, self._height = events[-1].number if events else self._seen, height
        self._looked = trio.current_time()
        if now != was:
            self._now, self._number = now, self._number + 1

    async def _blocks(self, known: list[Json], height: int) -> list[Json]:
        first = max([1, height - BLOCKS + 1, *(view["height"] + 1 for view in known)])
        for number in range(first, height + 1):
            with suppress(UserError):  # the block is older than a restored snapshot
                known = [*known, _only(BLOCK_FIELDS, await self._desk.api.block(number))]
        return known[-BLOCKS:]

    def _labels_a_minute(self) -> int | None:
        """Return the number of answers in the last minute, or None if no project is open."""
        if not self._state.open or not self._labels:
            return None
        before = [labels for at, labels in self._labels if at < unix_time_ms() - MINUTE_MS] or [self._labels[0][1]]
        return self._state.annotations - before[-1]

    @property
    def _state(self) -> CurationState:
        return self._desk.state.module_state(CurationState)


def _live_events(before: Json, now: Json) -> Iterator[tuple[str, Json]]:
    """Yield one event with all fields that differ from the last observation. Unchanged rounds and blocks are left out."""
    changed = {name: value for name, value in now.items() if name != "number" and (name not in before or before[name] != value)}
    for name in changed.keys() & {"rounds", "blocks"}:
        known = {_key(item): item for item in before.get(name, ())}
        changed[name] = [item for item in changed[name] if known.get(_key(item)) != item]
    yield "live", changed


def _key(item: Json) -> tuple[Any, Any]:
    return item.get("job"), item.get("round", item["height"])


def _only(names: str, view: object) -> Json:
    return {name: to_json_value(getattr(view, name)) for name in names.split()}


def _peer(view: PeerView) -> Json:
    link = view.link
    trip = round(link.round_trip_ms, 1) if link is not None and link.round_trip_ms is not None else None
    return _only(PEER_FIELDS, view) | {"is_linked": link is not None, "round_trip_ms": trip}
