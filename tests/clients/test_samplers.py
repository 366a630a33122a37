"""The copies of adapters that a gateway keeps for its samplers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from clients.gateway.request_store import RequestStore, StoredSampler
from clients.gateway.samplers import SAMPLERS_OF_MODEL_MAX, WAITING_MAX, SampleFault, Samplers
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


async def test_a_key_has_half_of_the_waiting_requests_that_others_leave(tmp_path: Path) -> None:
    store = RequestStore(tmp_path)
    samplers = Samplers(cast(TrainingPeer, ModelPeer(tmp_path)), store, tmp_path, lambda name: None, lambda run: None)

    def request(owner: str, count: int) -> int:
        """Return how many of these requests are accepted."""
        for number in range(count):
            try:
                sampler = StoredSampler(f"{owner}:sample:0", owner, FIRST, 0)
                samplers.request_samples(f"{owner}:sample:0#{number}", sampler, {}, lambda tokens: None)
            except OverflowError:
                return number
        return count

    assert (request("a", 2_000), request("b", 2_000), request("c", 2_000)) == (512, 256, 128)
    assert request("a", 512) == 512, "a repeated request needs no further place"
    for number in range(512):
        samplers._store_result(f"a:sample:0#{number}", SampleFault("", is_of_client=True))
    assert request("b", 2_000) == (WAITING_MAX - 128) // 2
    store.close()
