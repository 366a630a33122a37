"""HTTP calls for operators about the peer's health, its annotators and its jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import trio

from curation.estimation.annotator_agreement import value_count
from curation.estimation.reputation import WEIGHT_ONE
from curation.ledger.curation_state import Annotator, CurationState, ProjectPhase
from curation.service.access_control import NO_INVITATION_NEEDED, AccessControl, Operators, wait_for_decision
from curation.service.annotators.statement_batcher import StatementBatcher
from features.services import ServiceContext
from ledger.members import MembersState
from protocol.api import DiskView, TrainRequest
from protocol.identity import WIRE_VERSION
from protocol.prometheus_metrics import why_unhealthy
from web.calls import HttpProblem, Json

DISK_CACHE_SECONDS: Final = 60.0  # time between two measurements of the data directory: it has thousands of files
REPUTATION_PROJECTS_MAX: Final = 64  # projects that count for the reputation in a list of annotators: unclosed projects first
LOCAL: Final = "local"


class AdminApi:
    def __init__(self, desk: ServiceContext, doors: AccessControl, operators: Operators, gatherer: StatementBatcher) -> None:
        self._desk, self._doors, self._operators, self._gatherer = desk, doors, operators, gatherer
        self._measuring = trio.Lock()
        self._measured: tuple[float, DiskView] | None = None

    async def operator_sign_in(self, token: str, before: str) -> Json:
        try:
            operator = self._operators.require_operator(token)
        except HttpProblem:
            await self._operators.log_stranger()
            raise
        async with self._operators.log_action(operator, "sign in", ""):
            begun = await trio.to_thread.run_sync(self._doors.begin_operator_session, token)
            if begun is None:
                raise HttpProblem("unauthorized", "a session cannot begin another one: use a token from `peer web token`")
            await trio.to_thread.run_sync(self._doors.end_operator_session, before)
        return {"operator": operator, "seconds": begun[1] // 1_000, "token": begun[0]}

    async def operator_sign_out(self, operator: str, token: str) -> Json:
        async with self._operators.log_action(operator, "sign out", ""):
            await trio.to_thread.run_sync(self._doors.end_operator_session, token)
        return {}

    async def admin_health(self, operator: str) -> Json:
        stats, modules = await self._desk.api.stats(), await self._desk.api.modules()
        status = stats.status
        names = ("state", "height", "heights_behind", "decided_seconds_ago", "links", "uptime_seconds")
        return {name: getattr(status, name) for name in names} | {
            "problem": why_unhealthy(status),
            "memory_bytes": int(stats.memory_mb * 1_048_576),
            "disk": dataclasses.asdict(await self._disk()),
            "queues": {"statements_waiting": self._gatherer.waiting_count, "transactions_pending": stats.transactions_pending},
            "versions": {
                "program": status.version,
                "wire": WIRE_VERSION,
                "modules": [
                    {"module": row.module, "active_version": row.active_version, "known_versions": list(row.known_versions)}
                    for row in modules
                ],
            },
        }

    async def _disk(self) -> DiskView:
        async with self._measuring:
            if self._measured is None or self._measured[0] + DISK_CACHE_SECONDS < trio.current_time():
                self._measured = trio.current_time(), await self._desk.api.disk_usage()
            return self._measured[1]

    async def list_alerts(self, operator: str) -> Json:
        return {"alerts": [dataclasses.asdict(alert) for alert in await self._desk.api.alerts()]}

    async def operator_log(self, operator: str, before: int, limit: int) -> Json:
        return {"entries": await trio.to_thread.run_sync(self._operators.list_entries, before, limit)}

    # People --------------------------------------------------------------------------------------------------------------

    async def list_annotators(self, operator: str, search: str, offset: int, limit: int) -> Json:
        state = self._desk.state.module_state(CurationState)
        return await trio.to_thread.run_sync(self._people, state, search.casefold(), offset, limit)

    def _people(self, state: CurationState, search: str, offset: int, limit: int) -> Json:
        rows = [
            (key, row)
            for key, row in state.annotators.items()
            if search in row.name.casefold() or (search and key.hex().startswith(search))
        ]
        rows.sort(key=lambda item: (-item[1].annotations, item[0]))
        projects = sorted(state.projects.items(), key=lambda item: item[1].phase is ProjectPhase.CLOSED)[:REPUTATION_PROJECTS_MAX]
        classes = {key: value_count(row.spec.kind, len(row.spec.options), row.spec.many) for key, row in projects}
        shown = rows[offset : offset + limit]
        return {"count": len(rows), "people": [self._person(state, key, row, classes) for key, row in shown]}

    def _person(self, state: CurationState, key: bytes, row: Annotator, classes: dict[bytes, int]) -> Json:
        told = right = 0
        weights = []
        for project, of in classes.items():
            skill = state.skills.get_record(project + key)
            if skill is None:
                continue
            told += sum(skill.counts)
            right += sum(skill.counts[place] for place in _right(len(skill.counts), of))
            if skill.weight:
                weights.append(skill.weight / WEIGHT_ONE)
        here = self._desk.state.module_state(MembersState).current_key(row.peer) == self._desk.me
        counts = {"answers": row.annotations, "accepted": row.accepted, "points": row.points, "leases": len(row.leases)}
        return {"annotator": key.hex(), "name": row.name, "custodial": row.custodial, "is_here": here} | counts | {
            "agreement": round(right / told, 3) if told else None,
            "weight": round(sum(weights) / len(weights), 3) if weights else None,
            "is_refused": self._doors.is_refused(key),
        }  # fmt: skip

    async def create_invitation(self, operator: str) -> Json:
        async with self._operators.log_action(operator, "invite", "an annotator"):
            if self._desk.get_setting("sign_up") == "open":
                raise HttpProblem("refused", NO_INVITATION_NEEDED)
            code = await trio.to_thread.run_sync(self._doors.create_invitation)
        return {"invitation": code, "path": f"/join#{code}"}

    async def refuse_annotator(self, operator: str, annotator: bytes) -> Json:
        return await self._let(operator, annotator, "refuse", self._doors.refuse_annotator)

    async def allow_annotator(self, operator: str, annotator: bytes) -> Json:
        return await self._let(operator, annotator, "allow", self._doors.allow_annotator)

    async def _let(self, operator: str, annotator: bytes, action: str, do: Callable[[bytes], None]) -> Json:
        row = self._desk.state.module_state(CurationState).annotators.get_record(annotator)
        if row is None:
            raise HttpProblem("not-found", "unknown annotator")
        async with self._operators.log_action(operator, action, f"{row.name} {annotator.hex()[:8]}"):
            await trio.to_thread.run_sync(do, annotator)
        return {"annotator": annotator.hex(), "is_refused": self._doors.is_refused(annotator)}

    # Jobs ----------------------------------------------------------------------------------------------------------------

    async def list_jobs(self, operator: str) -> Json:
        return {"jobs": [dataclasses.asdict(job) for job in await self._desk.api.jobs()]}

    async def start_job(self, operator: str, name: str, data: str, rounds: int, overrides: Mapping[str, str]) -> Json:
        request = TrainRequest(name, LOCAL if data == LOCAL else "", rounds, 0, dict(overrides))
        async with self._operators.log_action(operator, "train", f"{name}: {rounds} rounds on {data} text"):
            return {"job": await wait_for_decision(self._desk.api.start_job(request))}

    async def cancel_job(self, operator: str, job: bytes) -> Json:
        async with self._operators.log_action(operator, "cancel", f"job {job.hex()[:8]}"):
            return {"said": await wait_for_decision(self._desk.api.cancel_job(job.hex()))}


def _right(counts: int, classes: int) -> Iterator[int]:
    """Yield the indexes in `AnnotatorSkill.counts` at which the vote equals the label."""
    for first in range(0, counts, classes**2):
        yield from range(first, first + classes**2, classes + 1)
