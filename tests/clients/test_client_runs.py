"""Requests of steps by a gateway that was restarted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clients.gateway.client_runs import ClientRuns
from clients.ledger.clients_module import ClientRun, ClientsState, OpenStep
from clients.records import ListedBody, OptimizerStep, StepBrief
from protocol.errors import UserError
from storage.disk_blob_store import DiskBlobStore
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
