"""Models as parts of snapshots: split, checked part by part, and reassembled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import RemoteProtocolError, StorageError
from protocol.limits import SNAPSHOT_PART_BYTES_MAX
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.replicated import model_directory
from training.replicated.replicated_model import ReplicatedModel
from training.transformer import ModelSpec

JOB = b"j" * 32
MODEL = ModelSpec(vocabulary=4_096, context=8, width=64, layers=1, heads=2, kv_heads=1, hidden=64)
SPEC = JobSpec(name="several parts", tokenizer=bytes(32), data=bytes(32), model=MODEL, byzantine_max=0)


def made(folder: Path) -> tuple[JobModelStore, bytes]:
    host = JobModelStore(folder)
    return host, host.create_model(JOB, SPEC.encode())


def test_a_model_arrives_in_parts_in_any_order_and_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    source, root = made(tmp_path / "from")
    host = JobModelStore(tmp_path / "to")
    incoming = host.start_receiving(JOB, 0, root, source.read_manifest(JOB, 0))
    assert incoming.parts > 2
    for index in reversed(range(incoming.parts)):
        part = source.read_part(JOB, 0, index)
        assert len(part) <= SNAPSHOT_PART_BYTES_MAX
        incoming.add_part(index, part)
    assert not host.has_model(JOB, 0, root)
    incoming.install()
    assert host.has_model(JOB, 0, root)
    model = host.open_model(JOB, 0)
    model.verify()
    assert np.array_equal(model.parameters, source.open_model(JOB, 0).parameters)
    assert {path.name for path in host.round_directory(JOB, 0).parent.iterdir()} == {"00000000"}


@pytest.mark.parametrize("damage", ["bit", "short", "long", "other part", "nothing"])
def test_a_part_with_other_bytes_is_refused_and_the_right_one_taken_after_it(tmp_path: Path, damage: str) -> None:
    source, root = made(tmp_path / "from")
    host = JobModelStore(tmp_path / "to")
    incoming = host.start_receiving(JOB, 0, root, source.read_manifest(JOB, 0))
    right = source.read_part(JOB, 0, 0)
    wrong = {
        "bit": right[:-1] + bytes([right[-1] ^ 1]),
        "short": right[:-4],
        "long": right + bytes(4),
        "other part": source.read_part(JOB, 0, 1),
        "nothing": b"",
    }[damage]
    with pytest.raises(RemoteProtocolError, match="bad-part"):
        incoming.add_part(0, wrong)
    for index in range(incoming.parts):
        incoming.add_part(index, source.read_part(JOB, 0, index))
    incoming.install()
    assert host.has_model(JOB, 0, root)


def test_a_manifest_that_is_not_under_the_root_is_refused(tmp_path: Path) -> None:
    source, root = made(tmp_path / "from")
    other = replace(SPEC, seed=SPEC.seed + 1)
    host = JobModelStore(tmp_path / "to")
    with pytest.raises(RemoteProtocolError, match="bad-part"):
        host.start_receiving(
            JOB, 0, JobModelStore(tmp_path / "other").create_model(JOB, other.encode()), source.read_manifest(JOB, 0)
        )
    with pytest.raises(RemoteProtocolError):
        host.start_receiving(JOB, 0, root, source.read_manifest(JOB, 0)[:-1])
    saved, *_ = model_directory.read_model(source.round_directory(JOB, 0))
    lying = replace(saved, leaves=(bytes(32), *saved.leaves[1:]))
    with pytest.raises(RemoteProtocolError, match="bad-part"):
        host.start_receiving(JOB, 0, root, model_directory.codec.encode(lying))


def test_what_is_asked_for_and_does_not_exist_is_the_askers_fault(tmp_path: Path) -> None:
    host, _ = made(tmp_path)
    with pytest.raises(RemoteProtocolError, match="bad-request"):
        host.read_part(JOB, 0, 10_000)


def test_a_damaged_model_is_neither_served_nor_taken_for_held(tmp_path: Path) -> None:
    """A peer that fetches a damaged model would take this honest peer for a liar."""
    host, root = made(tmp_path)
    file = host.round_directory(JOB, 0) / "parameters.f32"
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with pytest.raises(StorageError):
        host.read_part(JOB, 0, 0)
    assert not host.has_model(JOB, 0, root)
    with pytest.raises(StorageError):
        host.read_manifest(b"another job" * 4, 0)


def test_an_installed_model_takes_the_place_of_a_wrong_one_of_the_same_round(tmp_path: Path) -> None:
    source, root = made(tmp_path / "from")
    host, _ = made(tmp_path / "to")
    right = host.open_model(JOB, 0)
    wrong = ReplicatedModel.from_vectors(right.state, {name: vector + np.float32(1) for name, vector in right.vectors.items()})
    wrong.save(host.round_directory(JOB, 0))
    host._models.clear()
    assert host.open_model(JOB, 0).root == wrong.root != root
    incoming = host.start_receiving(JOB, 0, root, source.read_manifest(JOB, 0))
    for index in range(incoming.parts):
        incoming.add_part(index, source.read_part(JOB, 0, index))
    assert host.open_model(JOB, 0).root == wrong.root, "until it is installed, nothing changes"
    assert host.read_part(JOB, 0, 0) != source.read_part(JOB, 0, 0)
    incoming.install()
    assert host.open_model(JOB, 0).root == root
    assert host.read_part(JOB, 0, 0) == source.read_part(JOB, 0, 0)
    host.open_model(JOB, 0).verify()


def test_what_was_abandoned_leaves_nothing_behind(tmp_path: Path) -> None:
    source, root = made(tmp_path / "from")
    host = JobModelStore(tmp_path / "to")
    incoming = host.start_receiving(JOB, 0, root, source.read_manifest(JOB, 0))
    incoming.add_part(0, source.read_part(JOB, 0, 0))
    incoming.discard_parts()
    assert list(host.round_directory(JOB, 0).parent.iterdir()) == []
    again = host.start_receiving(JOB, 0, root, source.read_manifest(JOB, 0))  # and the next one begins anew
    for index in range(again.parts):
        again.add_part(index, source.read_part(JOB, 0, index))
    again.install()
    assert host.has_model(JOB, 0, root)


def test_pinned_models_outlive_their_rounds(tmp_path: Path) -> None:
    host, _ = made(tmp_path)
    for number in range(1, 6):
        model = host.open_model(JOB, number - 1)
        vectors = {name: np.array(vector) for name, vector in model.vectors.items()}
        ReplicatedModel.from_vectors(replace(model.state, round=number), vectors).save(host.round_directory(JOB, number))
    host.set_pinned_models(frozenset({(JOB, 1), (b"other" + bytes(27), 2)}))
    host.prune_models(JOB, 5, SPEC)
    assert sorted(path.name for path in host.round_directory(JOB, 0).parent.glob("0*")) == [f"{of:08d}" for of in (1, 4, 5)]
    host.set_pinned_models(frozenset())
    host.round_directory(JOB, 0).with_name(".00000002.incoming").mkdir()  # the process was killed while it fetched this model
    host.prune_models(JOB, 5, SPEC)
    assert sorted(path.name for path in host.round_directory(JOB, 0).parent.glob("[0.][0-9]*")) == ["00000004", "00000005"]
