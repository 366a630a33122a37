"""The runs of a gateway over a ledger that a test scripts: restarts, late decisions and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from clients.gateway.client_runs import ClientRuns
from clients.ledger.clients_module import ClientRun, ClientsState, OpenStep, StepOutcome
from clients.records import ListedBody, Manifest, OptimizerStep, StepBrief
from protocol import codec
from protocol.blob_digest import blob_digest
from protocol.errors import UserError
from storage.disk_blob_store import DiskBlobStore
from tests.clients.runs import body
from training.round_context import TrainingPeer

JOB, GATEWAY = b"j" * 32, b"g" * 32
ADAMW = OptimizerStep(1e-2, 0.9, 0.95, 1e-12, 0.0, 0.0)
BODIES = [codec.encode(body(seed=seed)) for seed in range(2)]
TOKENS = sum(body(seed=seed).tokens for seed in range(2))
ANOTHER = OpenStep(StepBrief(3, b"m" * 32, 5, ADAMW), 7)
DECIDED = ClientRun(GATEWAY, 4, last=StepOutcome(3, 3, True))


@dataclass
class ScriptedPeer:
    """A peer whose ledger has one run. `on_submit` is what happens to a transaction, `seconds` after its submission."""

    folder: Path
    run: ClientRun = field(default_factory=lambda: ClientRun(GATEWAY, next_step=3))
    on_submit: Callable[[object], None] = lambda content: None
    seconds: float = 0.0
    submitted: list[object] = field(default_factory=list)
    others: dict[bytes, ClientRun] = field(default_factory=dict)
    height: int = 0
    me: bytes = GATEWAY
    _block: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.blobs = DiskBlobStore(self.folder / "kept", self.folder / "passing")
        self.state = self

    def module_state(self, of: object) -> ClientsState:
        return ClientsState({JOB: self.run, **self.others})

    def service_context(self, name: str) -> ScriptedPeer:
        return self

    async def wait_for_block_above(self, height: int) -> None:
        while self.height <= height:
            await self._block.wait()

    def apply(self, run: ClientRun) -> None:
        """Apply a block after which the run is this one."""
        self.run, self.height = run, self.height + 1
        block, self._block = self._block, trio.Event()
        block.set()

    async def submit_transaction(self, kind: str, content: object, seconds_max: float = 120.0) -> None:
        self.submitted.append(content)
        with trio.move_on_after(seconds_max) as scope:
            await trio.sleep(self.seconds)
        if scope.cancelled_caught:
            raise UserError("is not decided")
        self.on_submit(content)

    @property
    def blob_sizes(self) -> list[int]:
        return sorted(path.stat().st_size for path in (self.folder / "kept").rglob("*") if path.is_file())


def refuse(content: object) -> None:
    raise UserError("refused")


async def take_step(peer: ScriptedPeer, runs: ClientRuns | None = None) -> StepOutcome:
    runs = runs or ClientRuns(cast(TrainingPeer, peer))
    return await runs.take_step(JOB, 3, [lambda data=data: data for data in BODIES], ADAMW)  # type: ignore[misc]


def manifest_of(brief: StepBrief) -> bytes:
    listed = [ListedBody(blob_digest(data), len(data)) for data in BODIES]
    return codec.encode(Manifest(tuple(listed)))


async def run_step(peer: ScriptedPeer, then: Callable[[], Any]) -> list[StepOutcome]:
    """Take the step, call `then` once everything waits, and return the outcome."""
    outcomes = list[StepOutcome]()

    async def run() -> None:
        outcomes.append(await take_step(peer))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        then()
    return outcomes


async def test_a_step_lists_its_bodies_and_serves_them_until_it_is_decided(tmp_path: Path) -> None:
    peer, sizes = ScriptedPeer(tmp_path), list[int]()

    def decide() -> None:
        sizes.extend(peer.blob_sizes)
        peer.apply(DECIDED)

    (outcome,) = await run_step(peer, decide)
    ((key, brief),) = [(said.job, said.brief) for said in peer.submitted]  # type: ignore[attr-defined]
    assert (outcome, key) == (DECIDED.last, JOB) and brief == StepBrief(3, brief.manifest, TOKENS, ADAMW)
    assert sizes == sorted([*map(len, BODIES), len(manifest_of(brief))]) and blob_digest(manifest_of(brief)) == brief.manifest
    assert peer.blob_sizes == []


async def test_a_body_of_two_steps_is_served_until_both_are_decided(tmp_path: Path) -> None:
    peer = ScriptedPeer(tmp_path)
    runs = ClientRuns(cast(TrainingPeer, peer))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_step, peer, runs)
        await trio.testing.wait_all_tasks_blocked()
        async with runs._serving(BODIES[0]):
            peer.apply(DECIDED)
            await trio.testing.wait_all_tasks_blocked()
            assert not peer._block.statistics().tasks_waiting and peer.blob_sizes == [len(BODIES[0])]
    assert peer.blob_sizes == []


async def test_bodies_stay_when_the_gateway_stops(tmp_path: Path) -> None:
    peer = ScriptedPeer(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_step, peer)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert len(peer.blob_sizes) == 3, "the step may still be decided, and a restarted gateway serves them again"


@pytest.mark.parametrize("applied", ["open", "decided"])
@pytest.mark.parametrize("when", ["before", "while it is submitted"])
async def test_a_step_that_was_requested_before_a_restart_is_taken_once(tmp_path: Path, applied: str, when: str) -> None:
    first = ScriptedPeer(tmp_path / "first")
    await run_step(first, lambda: first.apply(DECIDED))
    (brief,) = [said.brief for said in first.submitted]  # type: ignore[attr-defined]
    requested = ClientRun(GATEWAY, 3, OpenStep(brief, 7)) if applied == "open" else DECIDED

    def apply_missing(content: object) -> None:
        peer.apply(requested)
        raise UserError("step 3 is open: request the next step after its outcome")

    if when == "before":
        peer = ScriptedPeer(tmp_path, requested, refuse)
    else:
        peer = ScriptedPeer(tmp_path, on_submit=apply_missing)
    (outcome,) = await run_step(peer, lambda: peer.apply(DECIDED))
    assert outcome == DECIDED.last and len(peer.submitted) == (when != "before")


async def test_another_refusal_of_a_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="refused"):
        await take_step(ScriptedPeer(tmp_path, on_submit=refuse))


async def test_a_step_waits_for_a_network_without_a_quorum(tmp_path: Path) -> None:
    peer = ScriptedPeer(tmp_path, on_submit=lambda content: peer.apply(DECIDED), seconds=10_000)
    assert await take_step(peer) == DECIDED.last


async def test_a_restarted_gateway_waits_for_the_blocks_that_it_lacks(tmp_path: Path) -> None:
    behind = ClientRun(GATEWAY, 2, OpenStep(StepBrief(2, b"m" * 32, 5, ADAMW), 7))
    peer = ScriptedPeer(tmp_path, behind, on_submit=lambda content: peer.apply(DECIDED))
    assert await run_step(peer, lambda: peer.apply(ClientRun(GATEWAY, 3))) == [DECIDED.last]
    assert len(peer.submitted) == 1


async def test_the_outcome_of_another_step_with_this_number_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="step 3 is open with other data"):
        await take_step(ScriptedPeer(tmp_path, ClientRun(GATEWAY, 3, ANOTHER)))


async def test_a_new_step_gets_its_number_after_the_open_one(tmp_path: Path) -> None:
    peer, numbers = ScriptedPeer(tmp_path, ClientRun(GATEWAY, 3, ANOTHER)), list[int]()

    async def wait() -> None:
        numbers.append(await ClientRuns(cast(TrainingPeer, peer)).wait_for_turn(JOB))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert numbers == []
        peer.apply(DECIDED)
    assert numbers == [4]


async def test_runs_without_a_model_are_ended_and_others_stay(tmp_path: Path) -> None:
    mine, over, others = ClientRun(GATEWAY), ClientRun(GATEWAY, is_over=True), ClientRun(b"o" * 32)
    peer = ScriptedPeer(tmp_path, others={b"1" * 32: mine, b"2" * 32: mine, b"3" * 32: over, b"4" * 32: others})
    peer.run = replace(mine, next_step=9)
    await ClientRuns(cast(TrainingPeer, peer)).end_unused_runs({JOB, b"2" * 32})
    assert [said.job for said in peer.submitted] == [b"1" * 32]  # type: ignore[attr-defined]
