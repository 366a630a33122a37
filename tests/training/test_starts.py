"""Starts of jobs from anything but another job's model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ledger.jobs import ModelReference
from protocol.errors import StorageError
from storage.disk_blob_store import DiskBlobStore
from training import parameter_blob
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array, initial_parameters, layout_of
from training.transformer import ModelSpec

JOB = bytes(31) + b"j"
SPEC = JobSpec(
    name="t", data=bytes(32), model=ModelSpec(context=16, width=16, layers=1, heads=2, kv_heads=1, hidden=24, tied=False)
)
SIZE = layout_of(SPEC).size


@pytest.fixture
def blobs(tmp_path: Path) -> DiskBlobStore:
    return DiskBlobStore(tmp_path / "kept", tmp_path / "passing")


def on(blobs: DiskBlobStore, values: Float32Array) -> JobSpec:
    return replace(SPEC, initial_model=blobs.add_bytes(values.astype("<f4").tobytes()))


def problem(blobs: DiskBlobStore, spec: JobSpec) -> str | None:
    assert spec.initial_model is not None
    return parameter_blob.blob_problem(spec, blobs.size(spec.initial_model) or 0, blobs.read_range)


def own() -> Float32Array:
    return initial_parameters(replace(SPEC, seed=9)) * np.float32(1.5)


def test_the_first_model_has_the_parameters_of_the_blob_and_else_what_all_first_models_have(
    blobs: DiskBlobStore, tmp_path: Path
) -> None:
    spec, hosts = on(blobs, own()), [JobModelStore(tmp_path / name) for name in ("a", "b")]
    assert problem(blobs, spec) is None and JobSpec.decode(spec.encode()) == spec
    roots = {host.create_model(JOB, spec.encode(), blobs.read_range) for host in hosts}
    model = ReplicatedModel.open(hosts[0].round_directory(JOB, 0))
    assert roots == {model.root} and np.array_equal(model.parameters, own())
    assert (model.round, model.records) == (0, {}) and not model.vectors["momentum"].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, SIZE - 1])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(blobs: DiskBlobStore, tmp_path: Path, bad: float, at: int) -> None:
    values = own()
    values[at] = bad
    spec = on(blobs, values)
    assert "has a non-finite number" in (problem(blobs, spec) or "")
    with pytest.raises(StorageError, match="non-finite"):
        JobModelStore(tmp_path).create_model(JOB, spec.encode(), blobs.read_range)


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_another_length_is_found(blobs: DiskBlobStore, size: int) -> None:
    assert f"{SIZE} parameters need {4 * SIZE}" in (problem(blobs, on(blobs, np.ones(size, np.float32))) or "")


def test_the_ledger_is_told_the_digest_of_the_parameters(blobs: DiskBlobStore, tmp_path: Path) -> None:
    spec = on(blobs, own())
    assert JobModelStore(tmp_path).terms_of_spec(spec.encode()).start == spec.initial_model is not None


def test_a_job_starts_from_one_model_and_only_where_all_its_tensors_are_a_models() -> None:
    both = replace(SPEC, initial_model=bytes(32), base=ModelReference(bytes(32), 1, bytes(32)))
    assert "give only one" in (both.problem() or "")
    scratch = JobSpec(name="test", objective="scratch", initial_model=bytes(32))
    assert "cannot start from a folder with parameters" in (scratch.problem() or "")
