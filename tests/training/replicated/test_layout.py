from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from protocol.errors import LocalProtocolError
from tests.training.replicated.support import ODD, RAGGED, SMALL
from training import random_stream
from training.job_spec import JobSpec
from training.objectives.registry import ScratchObjective
from training.replicated.tensor_layout import BLOCK, CHUNK, TensorLayout, initial_parameters, layout_from_shapes, layout_of
from training.transformer import ModelSpec

LAYOUTS = [RAGGED, layout_of(SMALL), layout_of(ODD), layout_of(JobSpec(name="default", data=bytes(32)))]


def test_names_and_shapes_are_those_of_the_model_in_torch_orientation() -> None:
    model = ModelSpec(vocabulary=256, width=64, layers=2, heads=4, kv_heads=2, hidden=192)
    shapes = {tensor.name: tensor.shape for tensor in layout_of(JobSpec(name="job", data=bytes(32), model=model)).tensors}
    first, *_, last = shapes
    assert (first, last) == ("embedding.weight", "final_norm.weight")
    assert shapes["embedding.weight"] == (256, 64)
    assert shapes["layers.1.key.weight"] == shapes["layers.0.value.weight"] == (32, 64)
    assert shapes["layers.0.query.weight"] == shapes["layers.0.output.weight"] == (64, 64)
    assert shapes["layers.0.gate.weight"] == shapes["layers.0.up.weight"] == (192, 64)
    assert shapes["layers.0.down.weight"] == (64, 192)
    assert shapes["layers.0.mlp_norm.weight"] == shapes["layers.1.attention_norm.weight"] == (64,)
    assert len(shapes) == 2 + 2 * 9


def test_an_output_layer_of_its_own_is_one_more_matrix_at_the_end() -> None:
    tied = ModelSpec(vocabulary=256, width=64)
    untied = replace(tied, tied=False)
    layouts = [layout_of(JobSpec(name="job", data=bytes(32), model=model)) for model in (tied, untied)]
    assert layouts[1].tensors[:-1] == layouts[0].tensors
    last = layouts[1].tensors[-1]
    assert (last.name, last.shape, last.decayed) == ("lm_head.weight", (256, 64), True)
    assert [layout.size for layout in layouts] == [tied.parameters, untied.parameters]


def test_the_default_job_has_about_160_thousand_parameters() -> None:
    assert 150_000 < layout_of(JobSpec(name="default", data=bytes(32))).size < 175_000


def test_the_layout_of_the_largest_model_makes_no_list_of_its_chunks() -> None:
    """A stranger's request to start such a job makes every voter compute this layout, even if it is refused."""
    large = ModelSpec(width=8192, heads=64, kv_heads=64, hidden=22_016, layers=10)
    assert large.problem() is None and large.parameters > 2**32
    layout = layout_of(JobSpec(name="large", data=bytes(32), model=large))
    assert layout.size == large.parameters
    assert vars(layout).keys() == {"tensors", "size"}


def test_a_scratch_job_has_one_tensor() -> None:
    layout = layout_of(JobSpec(name="test", objective="scratch"))
    assert [(tensor.name, tensor.shape) for tensor in layout.tensors] == [("scratch", (4096,))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_tile_elements_and_chunks_exactly(layout: TensorLayout) -> None:
    for name, total in (("elements", layout.size), ("chunks", len(layout.chunk_lengths))):
        parts = [getattr(block, name) for block in layout.blocks]
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_lies_within_one_tensor_and_starts_on_a_chunk(layout: TensorLayout) -> None:
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    for block in layout.blocks:
        inside = tensors[block.tensor].elements
        assert inside.start <= block.elements.start < block.elements.stop <= inside.stop
        assert (block.elements.start - inside.start) % BLOCK == 0 and block.size <= BLOCK
        assert layout.chunk_lengths[block.chunks].sum() == block.size


def test_chunks_are_4096_long_but_for_the_last_of_each_tensor() -> None:
    assert RAGGED.chunk_lengths.tolist() == [CHUNK, CHUNK, 6, 3, CHUNK]


def test_views_share_memory_with_the_flat_vector() -> None:
    flat = np.zeros(RAGGED.size, dtype=np.float32)
    RAGGED.tensor_views(flat)["tiny"][2] = 5
    assert flat[8200] == 5 and np.count_nonzero(flat) == 1


def test_a_vector_of_another_size_has_no_view() -> None:
    with pytest.raises(LocalProtocolError, match="8196"):
        layout_from_shapes([("tensor", (2, 4098))]).tensor_views(np.zeros(5, dtype=np.float32))


@pytest.mark.parametrize("spec", [SMALL, ODD, JobSpec(name="default", data=bytes(32))])
def test_the_specification_knows_the_number_of_parameters(spec: JobSpec) -> None:
    assert spec.model.parameters == layout_of(spec).size


@pytest.mark.parametrize(
    "model", [ModelSpec(vocabulary=2**31), ModelSpec(layers=2**31), ModelSpec(width=2**20, heads=1, kv_heads=1)]
)
def test_a_model_beyond_the_bounds_is_named_before_anything_is_laid_out(model: ModelSpec) -> None:
    assert "are more than" in str(model.problem())


# First parameters -----------------------------------------------------------------------------------------------------


DEFAULT = JobSpec(name="default", data=bytes(32))
SCRATCH = JobSpec(name="test", objective="scratch")


def test_the_default_initialisation_has_its_golden_hash() -> None:
    digest = hashlib.sha256(initial_parameters(DEFAULT).tobytes()).hexdigest()
    assert digest == "e389bf823d34f186e444a26b972d7668a0404d786406d3c79d6b6592ec7aa04d"


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("embedding.weight", 0.8 * 64**-0.5),
        ("layers.0.query.weight", 0.5 * 64**-0.5),
        ("layers.2.up.weight", 0.5 * 64**-0.5),
        ("layers.1.output.weight", 0.5 * 64**-0.5 * 6**-0.5),
        ("layers.1.down.weight", 0.5 * 192**-0.5 * 6**-0.5),
    ],
)
def test_matrices_are_centred_with_their_deviation(name: str, deviation: float) -> None:
    values = layout_of(DEFAULT).tensor_views(initial_parameters(DEFAULT))[name]
    assert values.std() == pytest.approx(deviation, rel=0.03)
    assert abs(values.mean()) < 4 * deviation / values.size**0.5


def test_norms_start_at_one_and_scratch_at_zero() -> None:
    views = layout_of(SMALL).tensor_views(initial_parameters(SMALL))
    norms = [view for name, view in views.items() if name.endswith("norm.weight")]
    assert len(norms) == 3 and all(np.all(norm == 1) for norm in norms)
    assert not initial_parameters(SCRATCH).any()


def test_seed_and_tensor_name_both_matter() -> None:
    views = layout_of(SMALL).tensor_views(initial_parameters(SMALL))
    reseeded = layout_of(SMALL).tensor_views(initial_parameters(replace(SMALL, seed=1)))
    assert not np.array_equal(views["layers.0.query.weight"], reseeded["layers.0.query.weight"])
    assert not np.array_equal(views["layers.0.gate.weight"], views["layers.0.up.weight"])


def test_the_stream_is_sha256_in_counter_mode() -> None:
    prefix = (1).to_bytes(8, "little") + b"s"
    blocks = [hashlib.sha256(prefix + counter.to_bytes(8, "little")).digest() for counter in range(2)]
    assert random_stream.random_bytes(40, "s") == b"".join(blocks)[:40]


def test_seed_parts_are_not_just_joined() -> None:
    assert random_stream.random_bytes(32, "ab", "c") != random_stream.random_bytes(32, "a", "bc")


def test_irwin_hall_numbers_look_normal() -> None:
    numbers = random_stream.irwin_hall_integers(100_000, "test") / random_stream.IRWIN_HALL_DEVIATION
    assert abs(numbers.mean()) < 0.02
    assert numbers.std() == pytest.approx(1, abs=0.01)
    assert np.mean(np.abs(numbers) < 1) == pytest.approx(0.675, abs=0.01)  # 0.683 for a normal one


def test_the_known_update_is_exact_and_belongs_to_one_trainer_and_round() -> None:
    layout = layout_of(SCRATCH)
    delta = ScratchObjective().deterministic_update(b"j" * 32, 4, b"t" * 32, layout.size)
    assert delta.dtype == np.float32 and np.array_equal(delta * 256, np.rint(delta * 256))
    assert -0.5 <= delta.min() < -0.49 and 0.49 < delta.max() < 0.5
    for other in (
        ScratchObjective().deterministic_update(b"j" * 32, 5, b"t" * 32, layout.size),
        ScratchObjective().deterministic_update(b"j" * 32, 4, b"u" * 32, layout.size),
    ):
        assert not np.array_equal(delta, other)
