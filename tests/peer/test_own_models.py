"""Four daemons, three of which train: a model in a folder is a job's first one, a round of it another's; all of it audits."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trio

from ledger.core.genesis import TRAINER, Founder, Genesis
from peer.export.export_replay import audit_export
from peer.features import founding_modules
from peer.settings.data_directory import DataDirectory
from protocol import codec
from protocol.api import JobView
from protocol.identity import Identity
from tests.peer.processes import Daemon, command, daemons
from tests.training.folders import tensors, written
from tests.waiting import patience
from training.formats import llama_mapping
from training.model_store import JobModelStore

ROLES = {"ada": TRAINER, "bea": TRAINER, "cyd": TRAINER, "dan": "voter"}
SECONDS_MAX = 300.0  # for what takes ten seconds on a machine that has time
FAST = ("--set", "local_steps=1", "batch=2")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[list[Daemon]]:
    identities = {name: Identity.generate() for name in ROLES}
    founders = {one.public: Founder(name, (TRAINER,) * (ROLES[name] == TRAINER)) for name, one in identities.items()}
    genesis = Genesis("lab", int(time.time() * 1000), secrets.token_bytes(16), dict(sorted(founders.items())), founding_modules())
    for name, identity in identities.items():
        directory = DataDirectory.create(tmp_path / name)
        directory.write_identity(identity)
        directory.write_genesis(codec.encode(genesis))
    with daemons([tmp_path / name for name in ROLES]) as made:
        yield made


async def start(network: list[Daemon]) -> None:
    bootstrap: list[str] = []
    for daemon, role in zip(network, ROLES.values(), strict=True):
        daemon.start("run", "--listen", "127.0.0.1:0", "--role", role, "--no-evaluate", *bootstrap)
        if not bootstrap:
            bootstrap = ["--bootstrap", (await daemon.answers()).address]


def train(daemon: Daemon, *arguments: str) -> tuple[int, str, str]:
    return command("train", "--data-dir", str(daemon.directory), *arguments)


async def finished(daemon: Daemon, name: str) -> JobView:
    while True:
        for view in await daemon.client.jobs():
            if view.name == name and view.state == "finished":
                return view
        await trio.sleep(0.05)


WRONG = {
    "missing": "tensor 'model.norm.weight' is missing",
    "shape": "has shape [17, 16], config.json asks for [16, 16]",
    "nan": "has a number that is not finite",
    "flipped": "is damaged: its SHA-256 is not",
}


def wrong_folders(folder: Path) -> dict[str, Path]:
    values = tensors()
    missing = {name: array for name, array in values.items() if name != "model.norm.weight"}
    shape = values | {"model.layers.0.self_attn.q_proj.weight": np.ones((17, 16), "<f4")}
    nan = values | {"lm_head.weight": np.full((256, 16), np.nan, "<f4")}
    made = {name: written(folder / name, of) for name, of in (("missing", missing), ("shape", shape), ("nan", nan))}
    made["flipped"] = written(folder / "flipped", values, sums=True)
    file = made["flipped"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    return made


@pytest.mark.real("processes")
@pytest.mark.large
async def test_a_model_of_ones_own_is_trained_on_and_a_round_of_it_and_both_audit(network: list[Daemon], tmp_path: Path) -> None:
    first, values = network[0], tensors()
    own = written(tmp_path / "mine", values)
    with patience(SECONDS_MAX):
        await start(network)
        for name, folder in wrong_folders(tmp_path).items():
            status, _, told = train(first, "--from", str(folder))
            assert status != 0 and WRONG[name] in told and told.count("\n") == 1 and str(folder) in told
        assert await first.client.jobs() == ()
        assert train(first, "--from", str(own), "--name", "own", "--rounds", "2", *FAST)[0] == 0
        await finished(first, "own")
        told = train(first, "--from", "own@7")[2]
        assert "at round 7 is not here: this peer keeps" in told and told.endswith(" 1, 2\n")  # 0 may not be gone yet
        assert train(first, "--from", "own@1", "--name", "earlier", "--rounds", "1", *FAST)[0] == 0
        await finished(first, "earlier")
        assert train(first, "--from", "own@2", "--name", "later", "--rounds", "1", *FAST)[0] == 0
        examples = tmp_path / "examples.jsonl"
        examples.write_text("".join(json.dumps({"prompt": f"{n}: ", "response": "aeiou"}) + "\n" for n in range(40)))
        assert train(first, str(examples), "--from", str(own), "--name", "helpful", "--rounds", "1", *FAST)[0] == 0
        await finished(first, "helpful")
        assert (await first.client.compare_policy("7: ", 8, 0.0, 0)).round == 1
        jobs = {name: bytes.fromhex((await finished(first, name)).job) for name in ("own", "earlier", "later", "helpful")}
        for daemon in network:
            await finished(daemon, "helpful")
        export = tmp_path / "export"
        await network[3].client.export_run(str(export))
    verdict = audit_export(export)
    assert set(verdict.models) == {job.hex() for job in jobs.values()}
    own_job = jobs["own"].hex()
    assert verdict.initial_models == {jobs["earlier"].hex(): (own_job, 1)}, "the last round's model is named as such"
    assert all(daemon.terminate() == 0 for daemon in network)
    hosts = [JobModelStore(daemon.directory / "models") for daemon in network]
    for host in hosts:
        assert np.array_equal(host.open_model(jobs["own"], 1).parameters, host.open_model(jobs["earlier"], 0).parameters)
        assert np.array_equal(host.open_model(jobs["own"], 2).parameters, host.open_model(jobs["later"], 0).parameters)
        assert np.array_equal(host.open_model(jobs["own"], 0).parameters, host.open_model(jobs["helpful"], 0).parameters)
    blobs = {path.read_bytes() for path in (network[3].directory / "blobs").iterdir()}
    model = hosts[3].open_model(jobs["own"], 2)
    names = llama_mapping.llama_tensor_names(model.spec.model)
    assert b"".join(values[names[tensor.name]].tobytes() for tensor in model.layout.tensors) in blobs
