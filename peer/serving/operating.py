"""What operators of this peer ask by HTTP, with a token of `peer web token`."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from curation.answers import Kind, options_problem
from curation.importing import tasks_of
from curation.state import Asked, CurationState, Phase, Project
from features.parts import Desk
from peer.serving.founding import Founding
from peer.serving.operators import Operators, decided
from protocol.errors import UserError
from web.problems import Problem
from web.site import Json

ACTIONS: Final = {Phase.PAUSED: "pause", Phase.OPEN: "open", Phase.CLOSED: "close"}


class Operating:
    def __init__(self, desk: Desk, operators: Operators) -> None:
        self._desk, self._operators = desk, operators
        self._founding = Founding(desk)

    async def projects(self, token: str) -> Json:
        self._operators.require(token)
        return {"projects": [dataclasses.asdict(row) for row in self._founding.views()]}

    async def project(self, token: str, project: bytes) -> Json:
        self._operators.require(token)
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
        operator = self._operators.require(token)
        asked_kind = Kind(kind)
        problem = options_problem(asked_kind, options, many)
        if problem:
            raise Problem("misfit", problem)
        read = _read(tasks, asked_kind, options, many)
        asked = Asked(name, asked_kind, options, many, len(read[0].task.items), None, votes, price, suggests_first)
        async with self._operators.doing(operator, "make", f"project {name!r}, {len(read)} tasks"):
            return self._view(await decided(self._founding.found(asked, guidelines.encode(), read)))

    async def add(self, token: str, project: bytes, tasks: list[Json]) -> Json:
        operator = self._operators.require(token)
        asked = self._row(project).asked
        read = _read(tasks, asked.kind, asked.options, asked.many)
        async with self._operators.doing(operator, "add tasks", f"{len(read)} to project {asked.name!r}"):
            await decided(self._founding.add(project, read))
        return self._view(project)

    async def pause(self, token: str, project: bytes) -> Json:
        return await self._move(token, project, Phase.PAUSED)

    async def open(self, token: str, project: bytes) -> Json:
        return await self._move(token, project, Phase.OPEN)

    async def close(self, token: str, project: bytes) -> Json:
        return await self._move(token, project, Phase.CLOSED)

    async def _move(self, token: str, project: bytes, phase: Phase) -> Json:
        operator, asked = self._operators.require(token), self._row(project).asked
        async with self._operators.doing(operator, ACTIONS[phase], f"project {asked.name!r}"):
            await decided(self._founding.move(project, phase))
        return self._view(project)

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
