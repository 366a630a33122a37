from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from tests.training.replicated.support import SMALL
from training import random_stream
from training.job_spec import JobSpec
from training.objectives.registry import ScratchObjective
from training.replicated.tensor_layout import initial_parameters, layout_of

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
