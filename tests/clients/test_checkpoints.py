"""The checkpoints of a gateway over runs that a test scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from clients.gateway.checkpoints import EXPIRED_MS, Checkpoints
from clients.gateway.client_runs import ClientRuns
from clients.gateway.request_store import RequestStore
from ledger.jobs import ModelReference
from protocol.errors import UserError

RUN, LOADED = b"r" * 32, b"l" * 32
BYTES = 100


@dataclass
class ScriptedRuns:
    round: int = 3
    time_ms: int = 1_000
    kept: dict[tuple[bytes, str], int] = field(default_factory=dict)  # expiry of each checkpoint in the ledger

    def model_bytes(self, key: bytes) -> int:
        return BYTES

    def is_present_model(self, model: ModelReference, key: bytes) -> bool:
        return model == ModelReference(key, self.round, bytes(32))

    async def save_model(self, key: bytes, name: str, expires_ms: int) -> ModelReference:
        self.kept[key, name] = expires_ms
        return ModelReference(key, self.round, bytes(32))

    async def set_expiry(self, key: bytes, name: str, expires_ms: int) -> bool:
        if (key, name) not in self.kept:
            return False
        self.kept[key, name] = expires_ms
        if expires_ms == EXPIRED_MS:
            del self.kept[key, name]
        return True


@dataclass
class Saved:
    runs: ScriptedRuns
    store: RequestStore
    checkpoints: Checkpoints

    async def save(
        self, name: str = "a", expires_ms: int = 0, *, job: bytes = RUN, overwrite: bool = False, most: int = 250
    ) -> str:
        return await self.checkpoints.save_model("m", job, f"weights/{name}", expires_ms, overwrite=overwrite, stored_max=most)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Saved]:
    store, runs = RequestStore(tmp_path), ScriptedRuns()
    store.add_model("m", "s", "anna")
    yield Saved(runs, store, Checkpoints(cast(ClientRuns, runs), store))
    store.close()


async def test_a_save_that_is_repeated_after_a_restart_is_the_same_one(saved: Saved) -> None:
    assert await saved.save(expires_ms=9_000) == await saved.save(expires_ms=9_000) == "tinker://m/weights/a"


@pytest.mark.parametrize(("expires_ms", "round"), [(0, 3), (9_000, 4)], ids=["longer", "another model"])
async def test_weights_are_replaced_only_if_the_program_says_so(saved: Saved, expires_ms: int, round: int) -> None:
    await saved.save(expires_ms=9_000)
    saved.runs.round = round
    with pytest.raises(UserError, match="there are weights 'tinker://m/weights/a' already"):
        await saved.save(expires_ms=expires_ms)
    await saved.save(expires_ms=expires_ms, overwrite=True)
    assert saved.runs.kept == {(RUN, "weights/a"): expires_ms}


async def test_a_checkpoint_of_a_former_run_is_deleted_when_it_is_replaced(saved: Saved) -> None:
    await saved.save()
    await saved.save(job=LOADED, overwrite=True)
    assert saved.runs.kept == {(LOADED, "weights/a"): 0}


async def test_checkpoints_count_in_the_quota_of_their_key(saved: Saved) -> None:
    for name in ("a", "b"):
        await saved.save(name)
    with pytest.raises(UserError, match="the weights have 100 bytes, and your key stores 200 of 250: delete some"):
        await saved.save("c")
    saved.runs.round = 4
    await saved.save("b", overwrite=True)
    await saved.save("c", most=300)


async def test_an_expiry_that_comes_too_late_changes_nothing(saved: Saved) -> None:
    path = await saved.save(expires_ms=9_000)
    found = await saved.checkpoints.find_checkpoint("anna", path)
    saved.runs.kept.clear()
    assert not await saved.checkpoints.set_expiry(found, 99_000)
    with pytest.raises(UserError, match="no weights"):
        await saved.checkpoints.find_checkpoint("anna", path)
