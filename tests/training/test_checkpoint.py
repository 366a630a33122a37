from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as safetensors
from safetensors import safe_open

from protocol.errors import UserError
from training.formats import checkpoint
from training.formats.checkpoint import CheckpointOrigin
from training.job_spec import JobSpec
from training.replicated.tensor_layout import initial_parameters, layout_of
from training.transformer import ModelSpec

SPEC = JobSpec(name="t", data=bytes(32), model=ModelSpec(context=32, width=32, layers=1, heads=2, kv_heads=1, hidden=48))
ORIGIN = CheckpointOrigin(b"j" * 32, 12, b"r" * 32)


def refused(why: str, path: Path) -> None:
    with pytest.raises(UserError, match=why):
        checkpoint.read_checkpoint(path)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    checkpoint.write_checkpoint(path, SPEC, initial_parameters(SPEC), ORIGIN)
    return path


def test_what_was_exported_is_read_back_bit_for_bit_with_its_origin(exported: Path) -> None:
    spec, parameters, origin = checkpoint.read_checkpoint(exported)
    assert (spec, origin) == (SPEC, ORIGIN)
    assert parameters.tobytes() == initial_parameters(SPEC).tobytes()


def test_others_find_the_tensors_by_name_and_shape(exported: Path) -> None:
    tensors = safetensors.load_file(exported)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {t.name: t.shape for t in layout_of(SPEC).tensors}


def test_an_export_leaves_nothing_else_behind(exported: Path) -> None:
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]


@pytest.mark.real("processes")
def test_one_model_has_one_file(exported: Path, tmp_path: Path) -> None:
    """Every process writes the same bytes, because a replay compares them. The library's metadata order is random."""
    program = (
        "import sys; from pathlib import Path; from tests.training.test_checkpoint import *; "
        "checkpoint.write_checkpoint(Path(sys.argv[1]), SPEC, initial_parameters(SPEC), ORIGIN)"
    )
    again = tmp_path / "again"
    subprocess.run([sys.executable, "-c", program, str(again)], check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert again.read_bytes() == exported.read_bytes()
    with safe_open(exported, framework="numpy") as file:
        assert list(file.metadata()) == [checkpoint.METADATA]


ABOUT = {"format": checkpoint.FORMAT, "job": "00" * 32, "round": 1, "model_root": "00" * 32, "spec": SPEC.encode().hex()}
FOREIGN = [{"format": 9}, {"spec": "zz"}, {"spec": "00"}, {"spec": 1}, {"job": "0"}, {"job": None}, {"round": "one"}]


def metadata(**changed: object) -> dict[str, str]:
    return {checkpoint.METADATA: json.dumps(ABOUT | changed)}


def test_the_metadata_of_these_tests_is_that_of_a_real_checkpoint(tmp_path: Path) -> None:
    safetensors.save_file(dict(layout_of(SPEC).tensor_views(initial_parameters(SPEC))), tmp_path / "a", metadata())
    assert checkpoint.read_checkpoint(tmp_path / "a")[2] == CheckpointOrigin(bytes(32), 1, bytes(32))


@pytest.mark.parametrize("about", [None, {}, {"other": "x"}, {checkpoint.METADATA: "x"}, {checkpoint.METADATA: "[]"}])
def test_a_safetensors_file_of_another_kind_is_refused_by_name(tmp_path: Path, about: dict[str, str] | None) -> None:
    safetensors.save_file(dict(layout_of(SPEC).tensor_views(initial_parameters(SPEC))), tmp_path / "a", about)
    refused("is not a checkpoint", tmp_path / "a")


@pytest.mark.parametrize("changed", FOREIGN)
def test_a_checkpoint_that_says_nonsense_of_its_origin_is_refused_by_name(tmp_path: Path, changed: dict[str, object]) -> None:
    safetensors.save_file(dict(layout_of(SPEC).tensor_views(initial_parameters(SPEC))), tmp_path / "a", metadata(**changed))
    refused("is not a checkpoint", tmp_path / "a")


def test_tensors_of_another_shape_or_type_are_refused(tmp_path: Path) -> None:
    wrong = dict(layout_of(SPEC).tensor_views(initial_parameters(SPEC)))
    wrong["final_norm.weight"] = wrong["final_norm.weight"].astype(np.float64)
    safetensors.save_file(wrong, tmp_path / "a", metadata())
    refused(r"final_norm\.weight is float64", tmp_path / "a")


@pytest.mark.parametrize("content", [b"", b"text", b"\xff" * 100])
def test_any_other_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    refused("/a ", tmp_path / "a")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    refused("nowhere", tmp_path / "nowhere")


def test_a_cut_checkpoint_is_refused(exported: Path) -> None:
    exported.write_bytes(exported.read_bytes()[:-1])
    refused("is not a checkpoint", exported)
