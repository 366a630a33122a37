"""Steps and runs of a gateway that was restarted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from clients.gateway.client_runs import ClientRuns
from clients.ledger.clients_module import ClientRun, ClientsState, OpenStep
from clients.records import ListedBody, OptimizerStep, StepBrief
from ledger.jobs import job_id
from protocol.errors import UserError
from protocol.messages import Transaction
from storage.disk_blob_store import DiskBlobStore
from tests.clients.runs import client_spec
from training.round_context import TrainingPeer

JOB, GATEWAY = b"j" * 32, b"g" * 32
ADAMW = OptimizerStep(1e-2, 0.9, 0.95, 1e-12, 0.0, 0.0)
STEP = OpenStep(StepBrief(3, b"m" * 32, 5, ADAMW), 7)


class BehindPeer:
    """A peer that refuses a transaction, since it has applied the missing blocks meanwhile."""

    def __init__(self, folder: Path, applied: ClientRun) -> None:
        self.blobs = DiskBlobStore(folder / "kept", folder / "passing")
        self._run, self._applied = ClientRun(GATEWAY, next_step=3), applied

    @property
    def state(self) -> Any:
        return SimpleNamespace(module_state=lambda _: ClientsState({JOB: self._run}))

    async def submit_transaction(self, kind: str, content: object) -> None:
        self._run = self._applied
        raise UserError("refused")


@pytest.mark.parametrize("applied", [ClientRun(GATEWAY, 3, STEP), ClientRun(GATEWAY, 4)], ids=["open", "decided"])
async def test_a_step_that_was_requested_before_a_restart_is_not_refused(tmp_path: Path, applied: ClientRun) -> None:
    runs = ClientRuns(cast(TrainingPeer, BehindPeer(tmp_path, applied)))
    await runs.request_step(JOB, 3, [ListedBody(b"b" * 32, 9)], 5, ADAMW)
    assert runs.is_step_requested(JOB, 3)


async def test_another_refusal_of_a_step_is_an_error(tmp_path: Path) -> None:
    runs = ClientRuns(cast(TrainingPeer, BehindPeer(tmp_path, ClientRun(GATEWAY, 3))))
    with pytest.raises(UserError, match="refused"):
        await runs.request_step(JOB, 3, [ListedBody(b"b" * 32, 9)], 5, ADAMW)


class OwnerPeer:
    """The peer of a gateway, whose ledger ends runs."""

    def __init__(self, runs: dict[bytes, ClientRun]) -> None:
        self.me, self.runs, self.ended, self.fault = GATEWAY, runs, list[bytes](), ""

    @property
    def state(self) -> Any:
        return SimpleNamespace(module_state=lambda _: ClientsState(self.runs), jobs=SimpleNamespace(jobs=self.runs))

    async def submit_transaction(self, kind: str, content: Any) -> Transaction:
        await trio.sleep(1)
        if kind == "client/open":
            transaction = Transaction(len(self.runs), 9, kind, content.spec)
            self.runs[job_id(self.me, transaction)] = ClientRun(self.me)
            await trio.sleep(1)  # The block is applied earlier than the transaction returns.
            return transaction
        if self.fault:
            raise UserError(self.fault)
        self.ended.append(content.job)
        self.runs[content.job] = ClientRun(self.me, is_over=True)
        return Transaction(0, 9, kind, b"")


async def test_runs_that_a_killed_process_opened_for_no_model_are_ended() -> None:
    lost, claimed, over, stranger = (bytes([number]) * 32 for number in range(4))
    mine = ClientRun(GATEWAY)
    peer = OwnerPeer({lost: mine, claimed: mine, over: ClientRun(GATEWAY, is_over=True), stranger: ClientRun(b"s" * 32)})
    await ClientRuns(cast(TrainingPeer, peer)).end_unclaimed_runs({claimed})
    assert peer.ended == [lost]


async def test_a_run_of_this_process_is_not_ended_before_its_model_claims_it() -> None:
    lost, opened = b"l" * 32, list[bytes]()
    peer = OwnerPeer({lost: ClientRun(GATEWAY)})
    runs = ClientRuns(cast(TrainingPeer, peer))

    async def open_run() -> None:
        opened.append(await runs.open_spec(client_spec()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_run)
        await trio.sleep(1.5)
        assert len(peer.runs) == 2
        await runs.end_unclaimed_runs(set())
    await runs.end_unclaimed_runs(set())
    assert peer.ended == [lost] and not peer.runs[opened[0]].is_over


async def test_a_run_that_cannot_be_ended_now_is_no_failure_of_another_one() -> None:
    peer = OwnerPeer({b"l" * 32: ClientRun(GATEWAY)})
    peer.fault = "client/end is not decided after 120 s"
    await ClientRuns(cast(TrainingPeer, peer)).end_unclaimed_runs(set())
    assert not peer.ended
