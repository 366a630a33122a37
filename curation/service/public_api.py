"""Public HTTP calls of a serving peer. A result depends on the height alone, and is computed once for all callers."""

from __future__ import annotations

import heapq
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import BufferedRandom
from itertools import chain
from typing import Any, Final

import trio

from curation.import_export.export_formats import FORMATS
from curation.ledger.curation_module import project_alpha
from curation.ledger.curation_state import Annotator, CurationState
from curation.limits import PROJECTS_MAX
from curation.rpc import AgreementView
from curation.service.project_tasks import compute_agreement, require_project, write_export
from features.services import ServiceContext
from ledger.tables import Table
from protocol.errors import UserError
from protocol.identity import WIRE_VERSION
from web.calls import FileReply, HttpProblem, Json

LEADERS_MAX: Final = 1_000  # annotators in a reply with the leaderboard
TURN_WAIT_SECONDS: Final = 20.0  # longest wait of a caller for exports and agreements of other callers
RETRY_AFTER_SECONDS: Final = 10  # seconds until a refused caller may try again
OPEN_EXPORTS_MAX: Final = 8  # exports that are sent at the same time: a slow client occupies disk space for one export


class SingleFlightCache:
    """Cache of one query's result at the newest height. Concurrent callers wait for the same computation."""

    def __init__(self, desk: ServiceContext, make: Callable[[CurationState, int, bytes], Json]) -> None:
        """`make` computes the result from the state, its height and its root. It runs in a thread."""
        self._desk, self._make, self._lock = desk, make, trio.Lock()
        self._known: tuple[tuple[int, bytes], Json] | None = None

    async def get_or_compute(self) -> Json:
        async with self._lock:
            state, at = self._desk.state.module_state(CurationState), (self._desk.height, self._desk.state_root)
            if self._known is None or self._known[0] != at:
                self._known = at, await trio.to_thread.run_sync(self._make, state, *at)
            return self._known[1]


class LeaderboardCache:
    """Leaderboard: annotators by points. Unchanged groups of the table's rows are not read again."""

    def __init__(self) -> None:
        self._known: dict[bytes, list[tuple[int, int, bytes, str]]] = {}

    def top_annotators(self, annotators: Table[Annotator]) -> list[Json]:
        seen, self._known = self._known, {}
        for name, rows in annotators.row_groups():
            known = seen.get(name)
            self._known[name] = known or [(-row.points, -row.accepted, key, row.name) for key, row in rows()]
        first = heapq.nsmallest(LEADERS_MAX, chain.from_iterable(self._known.values()))
        return [
            {"rank": rank, "annotator": key.hex(), "name": name, "accepted": -accepted, "points": -points}
            for rank, (points, accepted, key, name) in enumerate(first, 1)
        ]


class PublicApi:
    def __init__(self, desk: ServiceContext) -> None:
        self._desk = desk
        self._leaders, self._turn = LeaderboardCache(), trio.Lock()
        self._stats, self._board = SingleFlightCache(desk, _network_stats), SingleFlightCache(desk, self._leaderboard)
        self._agreements: dict[bytes, tuple[object, AgreementView]] = {}
        self._files = threading.BoundedSemaphore(OPEN_EXPORTS_MAX)

    @property
    def _state(self) -> CurationState:
        return self._desk.state.module_state(CurationState)

    async def network_info(self) -> Json:
        desk = self._desk
        return {
            "name": desk.network,
            "wire": WIRE_VERSION,
            "chain_id": desk.chain_id.hex(),
            "peer_key": desk.me.hex(),
            "height": desk.height,
            "time_ms": desk.time_ms,
            "sign_up": "open" if desk.get_setting("sign_up") == "open" else "invited",
        }

    async def network_stats(self) -> Json:
        return await self._stats.get_or_compute()

    async def show_leaderboard(self, limit: int) -> Json:
        board = await self._board.get_or_compute()
        return board | {"rows": board["rows"][:limit]}

    def _leaderboard(self, state: CurationState, height: int, root: bytes) -> Json:
        return {"height": height, "rows": self._leaders.top_annotators(state.annotators)}

    @asynccontextmanager
    async def _hold_turn(self) -> AsyncIterator[None]:
        """Hold the peer's only slot for long computations. Raises `HttpProblem` if it is not free within TURN_WAIT_SECONDS."""
        with trio.move_on_after(TURN_WAIT_SECONDS) as waiting:
            await self._turn.acquire()
        if waiting.cancelled_caught:
            raise HttpProblem("too-many", "this peer is computing other exports: try again in 10 s", RETRY_AFTER_SECONDS)
        try:
            yield
        finally:
            self._turn.release()

    async def project_agreement(self, project: bytes) -> Json:
        """Return measures of the agreement of a project's annotators. They are computed again only after a task was settled."""
        require_project(self._state, project)
        async with self._hold_turn():
            state, height, found = self._state, self._desk.height, require_project(self._state, project)
            follows_from = found.settled, state.agreements.get_record(project)
            known = self._agreements.pop(project, None)
            if known is None or known[0] != follows_from:
                known = follows_from, await trio.to_thread.run_sync(compute_agreement, state, project, found)
            self._agreements[project] = known
            if len(self._agreements) > PROJECTS_MAX:
                del self._agreements[next(iter(self._agreements))]
        view = known[1]
        pairs = [
            {"first": row.first, "second": row.second, "common": row.common, "kappa": row.kappa or None} for row in view.pairs
        ]
        return {"project": view.project, "height": height, "alpha": view.alpha or None, "pairs": pairs}

    async def export_project(self, project: bytes, format: str) -> FileReply:
        """Return an export as a temporary file, which is deleted when it is closed."""
        require_project(self._state, project)
        async with self._hold_turn():
            state, found = self._state, require_project(self._state, project)

            def write() -> BufferedRandom:
                file = self._file()
                try:
                    write_export(file, state, project, found, self._desk.read_blob, format)
                except BaseException:
                    file.close()
                    raise
                file.seek(0)
                return file

            try:
                return FileReply(FORMATS[format].content_type, await trio.to_thread.run_sync(write))
            except UserError as error:
                raise HttpProblem("misfit", str(error)) from None

    def _file(self) -> BufferedRandom:
        if not self._files.acquire(blocking=False):
            raise HttpProblem(
                "too-many", f"this peer is already sending {OPEN_EXPORTS_MAX} exports: try again in 10 s", RETRY_AFTER_SECONDS
            )
        return _CountedFile(tempfile.TemporaryFile(dir=self._desk.folder, buffering=0), self._files)


class _CountedFile(BufferedRandom):
    def __init__(self, raw: Any, places: threading.BoundedSemaphore) -> None:
        super().__init__(raw)
        self._places = places

    def close(self) -> None:
        """Close the file, so that another export can be sent. This also happens when the file is garbage-collected."""
        was_open = not self.closed
        super().close()
        if was_open:
            self._places.release()


def _network_stats(state: CurationState, height: int, root: bytes) -> Json:
    return {
        "height": height,
        "state_root": root.hex(),
        "annotators": state.annotators_count,
        "annotations": state.annotations,
        "settled": state.settled,
        "projects": [_project_view(state, key) for key in state.open],
    }


def _project_view(state: CurationState, key: bytes) -> Json:
    row = state.projects[key]
    alpha = project_alpha(state, key)
    return {
        "project": key.hex(),
        "name": row.spec.name,
        "kind": row.spec.kind.value,
        "tasks": row.tasks,
        "settled": row.settled,
        "review": row.review,
        # The float nearest to a fraction is the same at every peer.
        "alpha": None if alpha is None else round(float(alpha), 4),
    }
