"""The copies of adapters that a gateway keeps for its samplers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from clients.gateway.request_store import RequestStore
from clients.gateway.samplers import SAMPLERS_OF_MODEL_MAX, Samplers
from training.round_context import TrainingPeer

FIRST, SECOND, OTHER = b"1" * 32, b"2" * 32, b"3" * 32


@dataclass
class ModelPeer:
    """A peer with the models of runs, each a file with the run and the round."""

    folder: Path
    rounds: dict[bytes, int] = field(default_factory=dict)

    @property
    def state(self) -> Any:
        jobs = {key: SimpleNamespace(round=number) for key, number in self.rounds.items()}
        return SimpleNamespace(jobs=SimpleNamespace(jobs=jobs))

    def make_round_context(self, key: bytes, number: int, job: object) -> Any:
        folder = self.folder / f"{key[:1].decode()}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model").write_bytes(b"%s %d" % (key[:1], number))
        return SimpleNamespace(model_directory=folder)


async def test_the_copies_of_the_newest_samplers_of_a_model_stay_until_its_session_is_over(tmp_path: Path) -> None:
    store, peer = RequestStore(tmp_path), ModelPeer(tmp_path / "models")
    copies = tmp_path / "copies"
    samplers = Samplers(cast(TrainingPeer, peer), store, copies, lambda name: None, lambda run: None)

    def kept() -> set[bytes]:
        return {file.read_bytes() for file in copies.rglob("model")}

    store.add_model("m", "s", "anna")
    store.add_model("n", "s", "anna")
    for number, (model, key, round) in enumerate(
        [("n", OTHER, 0)] + [("m", FIRST, round) for round in range(5)] + [("m", SECOND, round) for round in range(5)]
    ):
        peer.rounds[key] = round
        for _ in range(2):  # A restarted gateway opens the sampler again.
            await samplers.open_run(f"s:sample:{number}", model, key)
    newest = {b"1 %d" % round for round in range(2, 5)} | {b"2 %d" % round for round in range(5)}
    assert len(newest) == SAMPLERS_OF_MODEL_MAX and kept() == newest | {b"3 0"}
    await samplers.delete_copies("m")
    assert kept() == {b"3 0"}
    await samplers.delete_copies("n")
    assert list(copies.iterdir()) == []
    store.close()
