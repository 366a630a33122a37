"""A peer that exists only in memory, for tests of everything built on `PeerApi`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import trio

from clients.rpc import ClientRunView, StepOutcomeView
from curation.rpc import ProjectView
from protocol.api import (
    AlertView,
    AuditRecordView,
    AuditsView,
    AuditView,
    BlockView,
    DeviceView,
    DiskView,
    EngineView,
    EventView,
    InvitationView,
    JobView,
    LimitView,
    LinkView,
    LivenessMatrix,
    ModelFilesView,
    ModuleView,
    PeerView,
    RoundView,
    RoundVotesView,
    RowProofView,
    RunExportView,
    SampleView,
    StatsView,
    StatusView,
    SuspensionView,
    TextPieceView,
    TrainRequest,
)
from protocol.errors import UserError
from protocol.sampling import SamplingOptions

ME, OTHER = "abcd" + "a" * 48, "abce" + "b" * 48
PROJECTS = (ProjectView("5" * 64, "shuffled", "label", "open", ME, 3, 40, 9, 4, 1),)
STATUS = StatusView(
    ME, "anna", "lab", "c" * 64, "trainer", "0.1.0", "127.0.0.1:7700", "/data", 4711, 12, 0, "d" * 64, True, 4, 1, 3, 2, "", 61.5
)
REACH: LivenessMatrix = {ME: {OTHER: 2.4}, OTHER: {ME: 0.0}}
STANDING = AuditRecordView(ME, 3, 0, 0, 2, 1, 1, 0)
STATS = StatsView(
    STATUS, 12, 41.0, None, 3.5, {"vote": 1_000_000}, {"bulk": 5}, {"bad-signature": 2}, (), 0, "ready", 130.0, (), STANDING
)
PEERS = (
    PeerView(ME, "anna", ("trainer",), True, True, True, True, None, (), "height 12"),
    PeerView(
        OTHER, "[bold]ben", ("voter",), True, False, False, False, LinkView(OTHER, "h:1", True, 1.0, 2.5, 10, 20), (ME,), ""
    ),
)
STARTED = "1" * 64  # the id that `start_job` returns
JOBS = (
    JobView(
        "e" * 64,
        "text",
        "language",
        "running",
        3,
        80,
        "f" * 64,
        "full",
        "0" * 64,
        {ME: 3},
        {OTHER: {"replay": 2}},
        1,
        {OTHER: 23},
        rounds_in_model=3,
    ),
)
ROUNDS = (RoundView("e" * 64, 2, 11, {ME: "accept", OTHER: "replay"}, (ME, OTHER), True, True, "f" * 64, 2.5, None, 1.25, 40.0),)

AUDITS = AuditsView(
    (STANDING, AuditRecordView(OTHER, 0, 4, 1, 0, 0, 0, 2)),
    (
        AuditView(9, "e" * 64, 1, ME, OTHER, "lapsed", "", None),
        AuditView(11, "e" * 64, 2, OTHER, ME, "challenged", "mismatch", 0.25),
    ),
    (SuspensionView(23, AuditView(3, "e" * 64, 1, OTHER, ME, "suspended", "mismatch", 0.5)),),
)

INVITATIONS = (
    InvitationView(ME, "used", 1_700_000_000_000, 1_700_604_800_000, ("192.0.2.7:7700",)),
    InvitationView(OTHER, "open", 1_700_000_000_000, 1_700_604_800_000, ("192.0.2.7:7700", "[::1]:2")),
)

LIMITS = (
    LimitView(
        "parameters",
        1 << 27,
        ("1 of 3 needed votes that the model of a new job may have at most 300000000 parameters",),
        "the model of a new job may have at most 134217728 parameters",
    ),
)
MODULES = (
    ModuleView("members", "core", "what every network has", 1, (1,), 0, 0, ()),
    ModuleView("curation", "", "", 1, (), 2, 812, ("1 of 3 needed votes for version 3 from height 900",)),
)

ALERTS = (
    AlertView("disk-low", "", "warning", "17 MiB are free on the disk of this peer", 1_700_000_000_000),
    AlertView(
        "liar-found", OTHER, "info", "expelled at height 9: it signed two statements that exclude each other", 1_700_000_000_000
    ),
)
DISK = DiskView(5 << 20, 7 << 30, 9 << 30)
CLIENT_RUNS = (ClientRunView("f" * 64, "base", ME, "paused", 2, None, StepOutcomeView(1, True, {})),)
ENGINES = (
    EngineView(
        "pytorch",
        True,
        "torch 9.9, 2 threads",
        2,
        {"torch": "9.9", "cuda": "13.0"},
        (
            DeviceView("cpu", "x86_64", 16_000, 9_000, 700, False),
            DeviceView("cuda:0", "a GPU", 80_000, 60_000, 19_000, True),
            DeviceView("cuda:1", "a GPU", 80_000, None, 0, False),
        ),
    ),
    EngineView("slate", False, "", versions={"slate": "0.1"}, missing="the compiler was not found: install it"),
    EngineView("tinygrad", False, "", versions={"tinygrad": "0.14.0"}, compiler="/usr/bin/clang"),
)
SAMPLES = (SampleView("e" * 64, 10, "The Tsh"), SampleView("e" * 64, 20, "The end."))
BLOCK = BlockView(12, "d" * 64, 1_700_000_000_000, ME, 1, (ME, OTHER), 4, 3, "f" * 64, "f" * 64, 3, "aa" * 8, "bb" * 8, "cc" * 8)
VOTES = (
    RoundVotesView("e" * 64, 2, "closed", 11, 0, (), (), (ME, OTHER), {ME: {ME: "accept", OTHER: "replay"}}),
    RoundVotesView("e" * 64, 3, "training", None, 3, (ME, OTHER), (ME,), (), {}, 0.5),
)


@dataclass
class FakeApi:
    asked: list[object] = field(default_factory=list)
    log: list[EventView] = field(default_factory=list)
    stopped: bool = False
    waiting: trio.Event = field(default_factory=trio.Event)
    cancelled: trio.Event = field(default_factory=trio.Event)

    async def status(self) -> StatusView:
        return STATUS

    async def stats(self) -> StatsView:
        return STATS

    async def alerts(self) -> tuple[AlertView, ...]:
        return ALERTS

    async def disk_usage(self) -> DiskView:
        return DISK

    async def client_runs(self) -> tuple[ClientRunView, ...]:
        return CLIENT_RUNS

    async def engines(self) -> tuple[EngineView, ...]:
        return ENGINES

    async def block(self, height: int) -> BlockView:
        return BLOCK

    async def votes(self, last: int) -> tuple[RoundVotesView, ...]:
        return VOTES

    async def saved_samples(self) -> tuple[SampleView, ...]:
        return SAMPLES

    async def peers(self) -> tuple[PeerView, ...]:
        return PEERS

    async def jobs(self) -> tuple[JobView, ...]:
        asked = [request for request in self.asked if isinstance(request, TrainRequest)]
        audits = ["off" if request.data == "local" else request.overrides.get("audit", "full") for request in asked]
        return (*JOBS, *(replace(JOBS[0], job=STARTED, audit=audit) for audit in audits[-1:]))

    async def rounds(self, last: int) -> tuple[RoundView, ...]:
        return ROUNDS[-last:]

    async def audits(self, last: int) -> AuditsView:
        return AuditsView(AUDITS.records, AUDITS.results[-last:], AUDITS.suspensions)

    async def events(self, after: int, wait_seconds: float) -> tuple[EventView, ...]:
        if after < 0:
            return tuple(self.log[after:])
        return tuple(event for event in self.log if event.number > after)

    async def start_job(self, request: TrainRequest) -> str:
        self.asked.append(request)
        return STARTED

    async def run_test_round(self) -> str:
        number = len(self.log)
        self.log.append(EventView(number + 1, 0, "round", "a round of somebody else", {"job": "3" * 64}))
        for kind in ("decided", "proposal", "ballot", "decided", "round", "applied", "decided"):
            number += 1
            fields = {"height": str(12 + number // 4), "signers": "abcd"} if kind in ("decided", "applied") else {"job": "2" * 64}
            fields |= {"height": "13"} if kind == "round" else {}
            self.log.append(EventView(number + 1, 0, kind, f"phase {kind}", fields))
        return "2" * 64

    async def dial_address(self, address: str) -> str:
        self.asked.append(address)
        if address.endswith(":1"):
            raise UserError(f"cannot reach {address}: no route to host")
        return f"connected to {address}"

    async def create_invitation(self, days: int, addresses: tuple[str, ...] = ()) -> str:
        self.asked.append(days)
        return "invitation-string"

    async def invitations(self) -> tuple[InvitationView, ...]:
        return INVITATIONS

    async def revoke_invitation(self, token: str) -> str:
        self.asked.append(token)
        return f"{token} is revoked"

    async def request_rollback(self, job: str, round: int) -> str:
        self.asked.append((job, round))
        return f"1 of 3 needed votes to roll back {job} to @{round}"

    async def cancel_job(self, job: str) -> str:
        self.asked.append(job)
        return "1 of 3 needed votes"

    async def approve_voter(self, peer: str) -> str:
        self.asked.append(peer)
        return "1 of 3 approvals"

    async def retire_member(self, peer: str, lower_tolerance: bool) -> str:
        self.asked.append((peer, lower_tolerance))
        return "1 of 3 needed votes"

    async def challenge_trainer(self, trainer: str, round: int | None) -> str:
        self.asked.append((trainer, round))
        return f"no false step of {trainer}"

    async def resign_as_voter(self) -> str:
        raise UserError("the last voter cannot resign")

    async def sample_text(
        self, prompt: str, how: SamplingOptions, job: str = "", turns: tuple[str, ...] | None = None
    ) -> AsyncGenerator[TextPieceView, None]:
        """Sample a text. The prompt `wait` never ends, `bug` fails as a bug would, and text behind `secret` may be withheld."""
        self.asked.append((prompt, how, job, turns))
        if prompt == "wait":
            yield TextPieceView("once")
            self.waiting.set()
            try:
                await trio.sleep_forever()
            finally:
                self.cancelled.set()
        if prompt == "bug":
            raise KeyError(prompt)
        if "secret" in prompt:
            yield TextPieceView("", is_checked=True)
            yield TextPieceView("", is_withheld=True)
            return
        for word in (prompt, " goes", " on"):
            yield TextPieceView(word)

    async def voter_liveness(self) -> LivenessMatrix:
        return REACH

    async def modules(self) -> tuple[ModuleView, ...]:
        return MODULES

    async def limits(self) -> tuple[LimitView, ...]:
        return LIMITS

    async def set_limit(self, name: str, most: int) -> str:
        return f"1 of 3 needed votes that the model of a new job may have at most {most} {name}"

    async def request_upgrade(self, module: str, version: int, height: int) -> str:
        self.asked.append((module, version, height))
        return f"1 of 3 needed votes for version {version} from height {height}"

    async def projects(self) -> tuple[ProjectView, ...]:
        return PROJECTS

    async def export_run(self, path: str) -> RunExportView:
        return RunExportView(path, 12, "d" * 64, "f" * 64, 7, 123_456)

    async def export_model(self, path: str, job: str, format: str) -> ModelFilesView:
        return ModelFilesView(path, "1" * 64, job.partition("@")[0], 12, "f" * 64, format, 6, 1_234_567, ("heads.value",))

    async def prove_row(self, table: str, key: bytes, path: str) -> RowProofView:
        return RowProofView(path, 12, key == b"here", 3_000, 690)

    async def stop_peer(self) -> None:
        self.stopped = True
