"""A job's base is its reference: the worker takes the model that the network decided, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ledger.jobs import ModelReference
from peer import features
from peer.worker.main import WorkerRequestHandler
from protocol import codec
from protocol.errors import FolkmootError
from rlhf.objectives.ppo import PpoSettings
from training import worker_protocol
from training.data.default_text import default_text
from training.engines.engine import DeclaringEngine
from training.engines.pytorch.backend import BACKEND
from training.engines.request_handlers import WorkerContext
from training.job_spec import JobSpec
from training.replicated.replicated_model import ReplicatedModel
from training.transformer import ModelSpec

JOB, OF_BASE = bytes([1]) * 32, bytes([3]) * 32
BASE = JobSpec(name="base", model=ModelSpec(context=16, width=16, layers=1, hidden=16), data=bytes(32), seed=7)


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    features.register_features()


@pytest.fixture
def base(tmp_path: Path) -> ReplicatedModel:
    (tmp_path / "text").write_bytes(default_text()[:20_000])
    model = ReplicatedModel.initial(OF_BASE, BASE.validated())
    model.save(tmp_path / "base")
    return model


def first(folder: Path, root: bytes, directory: Path | None) -> DeclaringEngine:
    own = codec.encode(PpoSettings(reward="rule:vowels", prompt_tokens=4, response_tokens=6))
    spec = replace(
        BASE, name="ppo", objective="ppo", objective_settings=own, local_steps=4, base=ModelReference(OF_BASE, 1, root)
    ).validated()
    jobs = WorkerRequestHandler(WorkerContext(BACKEND, lambda: None, 1))
    path = str(directory) if directory else None
    jobs.handle_request(worker_protocol.OpenJobRequest(JOB, spec.encode(), str(folder / "text"), None, base=path))
    engine = jobs.context.find_engine(JOB)
    assert isinstance(engine, DeclaringEngine)
    return engine


def test_the_reference_is_the_base(tmp_path: Path, base: ReplicatedModel) -> None:
    reference = first(tmp_path, base.root, tmp_path / "base").first_parameters
    assert reference is not None and (reference[: base.layout.size] == base.parameters).all()


def missing(folder: Path) -> Path | None:
    return None


def of_another_seed(folder: Path) -> Path:
    ReplicatedModel.initial(OF_BASE, replace(BASE, seed=8)).save(folder / "other")
    return folder / "other"


def damaged(folder: Path) -> Path:
    """By one bit of one number."""
    file = next((folder / "base").glob("parameters*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return folder / "base"


@pytest.mark.parametrize("planted", [missing, of_another_seed, damaged])
def test_no_other_model_becomes_the_reference(
    tmp_path: Path, base: ReplicatedModel, planted: Callable[[Path], Path | None]
) -> None:
    """Its peer would call every honest trainer a liar."""
    with pytest.raises(FolkmootError, match=r"holds another model|does not hash|was not named"):
        first(tmp_path, base.root, planted(tmp_path))
