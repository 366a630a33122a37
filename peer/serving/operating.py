"""What operators of this peer ask by HTTP, with a token of `peer web token`."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable
from typing import Any, TypeVar

import trio

from curation.answers import Kind, options_problem
from curation.importing import tasks_of
from curation.state import Asked, CurationState, Phase, Project
from features.parts import Desk
from peer.serving.annotating import DECIDED_SECONDS
from peer.serving.doors import Doors
from peer.serving.founding import Founding
from protocol.errors import UserError
from web.problems import Problem
from web.site import Json

T = TypeVar("T")


class Operating:
    def __init__(self, desk: Desk, doors: Doors, annotates: Any) -> None:
        """`annotates`: whether a token is an annotator's."""
        self._desk, self._doors, self._annotates = desk, doors, annotates
        self._founding = Founding(desk)

    async def projects(self, token: str) -> Json:
        self._require_operator(token)
        return {"projects": [dataclasses.asdict(row) for row in self._founding.views()]}

    async def project(self, token: str, project: bytes) -> Json:
        self._require_operator(token)
        self._row(project)
        return self._view(project)

    async def found(
        self,
        token: str,
        name: str,
        kind: str,
        options: tuple[str, ...],
        many: bool,
        votes: int,
        price: int,
        guidelines: str,
        suggests_first: bool,
        tasks: list[Json],
    ) -> Json:
        self._require_operator(token)
        asked_kind = Kind(kind)
        problem = options_problem(asked_kind, options, many)
        if problem:
            raise Problem("misfit", problem)
        read = _read(tasks, asked_kind, options, many)
        asked = Asked(name, asked_kind, options, many, len(read[0].task.items), None, votes, price, suggests_first)
        return self._view(await _decided(self._founding.found(asked, guidelines.encode(), read)))

    async def add(self, token: str, project: bytes, tasks: list[Json]) -> Json:
        self._require_operator(token)
        asked = self._row(project).asked
        await _decided(self._founding.add(project, _read(tasks, asked.kind, asked.options, asked.many)))
        return self._view(project)

    async def pause(self, token: str, project: bytes) -> Json:
        return await self._move(token, project, Phase.PAUSED)

    async def open(self, token: str, project: bytes) -> Json:
        return await self._move(token, project, Phase.OPEN)

    async def close(self, token: str, project: bytes) -> Json:
        return await self._move(token, project, Phase.CLOSED)

    async def _move(self, token: str, project: bytes, phase: Phase) -> Json:
        self._require_operator(token)
        self._row(project)
        await _decided(self._founding.move(project, phase))
        return self._view(project)

    def _require_operator(self, token: str) -> None:
        if self._doors.is_operator(token):
            return
        if self._annotates(token):
            raise Problem("forbidden", "this token is an annotator's: `peer web token` prints one for operators")
        raise Problem("unauthorized", "no operator has this token, or it is over: `peer web token` prints one")

    def _row(self, project: bytes) -> Project:
        found: Project | None = self._desk.state.of(CurationState).projects.get(project)
        if found is None:
            raise Problem("not-found", "no such project")
        return found

    def _view(self, project: bytes) -> Json:
        return dataclasses.asdict(self._founding.view(project))


def _read(tasks: list[Json], kind: Kind, options: tuple[str, ...], many: bool) -> Any:
    try:
        return tasks_of("tasks", ((f"task {number}", row) for number, row in enumerate(tasks, 1)), kind, options, many)
    except UserError as error:
        raise Problem("misfit", str(error)) from None


async def _decided(work: Awaitable[T]) -> T:
    """What is not decided in time may be decided later."""
    try:
        with trio.move_on_after(DECIDED_SECONDS):
            return await work
    except UserError as error:
        raise Problem("refused", str(error)) from None
    raise Problem("no-quorum", "the network has not decided it yet, and may still: look at the projects", 10)
