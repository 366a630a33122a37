"""Grokfast by hand, with every outer optimizer, and its slow gradient in the life of a model."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol import codec as codec_of_records
from protocol.errors import RemoteProtocolError, StorageError, UserError
from tests.training.replicated.support import JOB, RAGGED, SMALL, aggregate_updates, buffer, round_of, trainer
from tests.training.replicated.test_outer import NORMAL, TINY, Flushing, stepped
from training.job_spec import OUTER_SLOTS, SLOW_GRADIENT, FeedbackMemory, JobSpec, OuterOptimizerKind
from training.model_store import JobModelStore
from training.replicated import codec, outer_optimizer
from training.replicated.model_directory import vector_names
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array

FACTOR, DECAY = 2.5, 0.9
VALID = replace(SMALL, model=replace(SMALL.model, vocabulary=256))
GROKFAST = replace(VALID, local_steps=1, grokfast=FACTOR, grokfast_decay=DECAY, rounds=20)
one = np.float32


def spec_of(kind: OuterOptimizerKind, spec: JobSpec = GROKFAST) -> JobSpec:
    return replace(spec, outer=kind)


def make_outer(spec: JobSpec, powers: tuple[float, ...], taken: int) -> outer_optimizer.OuterOptimizer:
    return outer_optimizer.make_outer_optimizer(spec, taken, powers)


def slow_after(slow: Float32Array, gradient: Float32Array) -> Float32Array:
    """Return α·slow + (1 − α)·g, for values that are too large to be flushed."""
    found: Float32Array = slow * one(DECAY) + gradient * one(1 - DECAY)
    return found


@pytest.mark.parametrize("kind", OuterOptimizerKind)
def test_grokfast_equals_the_plain_optimizer_on_gradients_amplified_by_hand(kind: OuterOptimizerKind) -> None:
    spec, plain = spec_of(kind), replace(spec_of(kind), grokfast=0.0, grokfast_decay=0.98)
    assert spec.outer_slots == (*OUTER_SLOTS[kind], SLOW_GRADIENT) and plain.outer_slots == OUTER_SLOTS[kind]
    start = buffer(RAGGED, "parameters", deviation=1.0)
    ours = [start, *(np.zeros_like(start) for _ in spec.outer_slots)]
    theirs, slow = [start, *(np.zeros_like(start) for _ in plain.outer_slots)], np.zeros_like(start)
    powers = outer_optimizer.initial_beta_powers(spec)
    for number in range(8):
        powers, gradient = outer_optimizer.next_beta_powers(spec, powers), buffer(RAGGED, "gradient", number)
        slow = slow_after(slow, gradient)
        ours = stepped(make_outer(spec, powers, number), *ours, gradient)
        theirs = stepped(make_outer(plain, powers, number), *theirs, gradient + one(FACTOR) * slow)
        assert np.array_equal(ours[-1], slow) and all(map(np.array_equal, ours, theirs))
    assert not np.array_equal(ours[0], start)


def test_a_gradient_that_stays_is_amplified_up_to_one_plus_the_factor_and_one_that_alternates_is_not() -> None:
    """The paper's purpose: components that change slowly over the steps grow, and the others stay."""
    spec = replace(spec_of(OuterOptimizerKind.SGD), outer_rate=1.0)
    steady = stepped(make_outer(spec, (), 0), *(np.zeros(2, dtype=np.float32),) * 2, np.ones(2, dtype=np.float32))
    moved = steady[0]
    for number in range(1, 200):
        before, sign = moved, one(-1 if number % 2 else 1)
        steady = stepped(make_outer(spec, (), number), *steady, np.array([1, sign], dtype=np.float32))
        moved = steady[0]
    assert before[0] - moved[0] == pytest.approx(1 + FACTOR, rel=1e-4)
    assert abs(before[1] - moved[1]) == pytest.approx(1, abs=FACTOR * (1 - DECAY))


@pytest.mark.parametrize("kind", OuterOptimizerKind)
@pytest.mark.parametrize("factor", [1e-6, 0.5, 100.0])
@pytest.mark.parametrize("decay", [0.0, 1e-6, 0.999, 1 - 2.0**-53])
def test_nothing_becomes_subnormal_or_depends_on_a_flush_to_zero(kind: OuterOptimizerKind, factor: float, decay: float) -> None:
    spec = replace(spec_of(kind), grokfast=factor, grokfast_decay=decay)
    floor = outer_optimizer.FLUSH_BELOW
    gradients = [np.where(np.abs(g) < floor, one(0), g) for g in (TINY, np.zeros_like(TINY), -np.roll(TINY, 7))]
    plain = [np.zeros(len(TINY), dtype=np.float32) for _ in vector_names(spec)]
    flushed = [vector.view(Flushing) for vector in plain]
    powers = outer_optimizer.initial_beta_powers(spec)
    for number in range(40):
        powers, gradient = outer_optimizer.next_beta_powers(spec, powers), gradients[min(number, 2)]
        plain = stepped(make_outer(spec, powers, number), *plain, gradient)
        flushed = stepped(make_outer(spec, powers, number), *flushed, gradient.view(Flushing))
        for ours, theirs in zip(plain, flushed, strict=True):
            assert np.array_equal(ours, np.asarray(theirs)) and not np.any((ours != 0) & (np.abs(ours) < NORMAL))


def test_the_optimizer_behind_it_never_gets_a_magnitude_that_would_be_flushed() -> None:
    """g + λ·slow has tiny values where one of both is zero, and where they nearly cancel."""
    seen = list[Float32Array]()

    class Recorder(outer_optimizer.OuterSgd):
        def step(self, parameters: Float32Array, slots: Any, gradient: Float32Array, decayed: bool) -> None:
            seen.append(gradient.copy())

    tiny = np.where(np.abs(TINY) < outer_optimizer.FLUSH_BELOW, one(0), TINY)
    optimizer = outer_optimizer.Grokfast(Recorder(1.0), 2.0**-30, 0.5)
    slots = [np.zeros(len(TINY), dtype=np.float32)]
    for gradient in (tiny, np.zeros_like(tiny), -np.roll(tiny, 7)):
        optimizer.step(np.zeros(len(TINY), dtype=np.float32), slots, gradient.copy(), False)
    assert seen[1].any() and not any(np.any((g != 0) & (np.abs(g) < outer_optimizer.FLUSH_BELOW)) for g in seen)


# In the life of a model -----------------------------------------------------------------------------------------------


def applied(model: ReplicatedModel, slow: Float32Array) -> tuple[ReplicatedModel, Float32Array]:
    """Return the next model, and the slow gradient by hand."""
    items = round_of(model, 3)
    updates = [codec.decode_payload(item.payload, model.header(item.trainer), model.layout) for item in items]
    aggregate = aggregate_updates(updates, model.layout, model.spec.rule, model.spec.byzantine_max)
    return model.apply_round(items, {}), slow_after(slow, aggregate)


@pytest.mark.parametrize("kind", [OuterOptimizerKind.NESTEROV, OuterOptimizerKind.ADAMW])
def test_the_slow_gradient_goes_back_with_a_rollback_and_on_from_there(kind: OuterOptimizerKind, tmp_path: Path) -> None:
    model = ReplicatedModel.initial(JOB, spec_of(kind))
    slow = np.zeros(model.layout.size, dtype=np.float32)
    for _ in range(2):
        model, slow = applied(model, slow)
    model.save(tmp_path / "anchor")
    anchor, at_anchor = ReplicatedModel.open(tmp_path / "anchor"), slow
    anchor.verify()
    for _ in range(2):
        model, slow = applied(model, slow)
    assert np.array_equal(model.vectors[SLOW_GRADIENT], slow) and not np.array_equal(slow, at_anchor)
    back = anchor.rolled_back(model.round + 1)
    assert np.array_equal(back.vectors[SLOW_GRADIENT], at_anchor) and at_anchor.any()
    following, expected = applied(back, at_anchor)
    assert np.array_equal(following.vectors[SLOW_GRADIENT], expected)


def test_a_round_without_a_step_leaves_the_slow_gradient() -> None:
    model, _ = applied(ReplicatedModel.initial(JOB, replace(GROKFAST, accepted_min=2)), np.zeros(1, dtype=np.float32))
    assert np.array_equal(model.apply_round(round_of(model, 1), {}).vectors[SLOW_GRADIENT], model.vectors[SLOW_GRADIENT])


@pytest.mark.parametrize("kind", OuterOptimizerKind)
def test_the_model_on_disk_is_that_in_memory(kind: OuterOptimizerKind, tmp_path: Path) -> None:
    first = ReplicatedModel.initial(JOB, spec_of(kind))
    items = round_of(first, 3)
    by_blocks, whole = first.apply_round_into(tmp_path / "1", items, {}), first.apply_round(items, {})
    assert by_blocks.root == whole.root and (tmp_path / "1" / "slow.f32").stat().st_size == 4 * first.layout.size
    assert whole.vectors[SLOW_GRADIENT].any()


def test_the_root_covers_the_slow_gradient_and_a_flipped_bit_is_named(tmp_path: Path) -> None:
    model, _ = applied(ReplicatedModel.initial(JOB, GROKFAST), np.zeros(1, dtype=np.float32))
    other = {name: np.array(vector) for name, vector in model.vectors.items()}
    other[SLOW_GRADIENT][5] += one(1)
    assert ReplicatedModel.from_vectors(model.state, other).root != model.root
    model.save(tmp_path / "model")
    file = tmp_path / "model" / "slow.f32"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(StorageError, match=r"slow of embedding\.weight"):
        ReplicatedModel.open(tmp_path / "model").verify()


def test_a_newcomer_gets_the_slow_gradient_with_the_model(tmp_path: Path) -> None:
    source, host = JobModelStore(tmp_path / "from"), JobModelStore(tmp_path / "to")
    source.create_model(JOB, GROKFAST.encode())
    first = source.open_model(JOB, 0)
    second = first.apply_round_into(source.round_directory(JOB, 1), round_of(first, 3), {})
    incoming = host.start_receiving(JOB, 1, second.root, source.read_manifest(JOB, 1))
    for index in range(incoming.parts):
        incoming.add_part(index, source.read_part(JOB, 1, index))
    incoming.install()
    there = host.open_model(JOB, 1)
    there.verify()
    assert np.array_equal(there.vectors[SLOW_GRADIENT], second.vectors[SLOW_GRADIENT]) and there.vectors[SLOW_GRADIENT].any()
    assert there.apply_round(round_of(there, 3), {}).root == second.apply_round(round_of(second, 3), {}).root


def test_another_job_with_the_same_tensors_begins_with_a_slow_gradient_or_with_zeros() -> None:
    model, _ = applied(ReplicatedModel.initial(JOB, GROKFAST), np.zeros(1, dtype=np.float32))
    for with_moments in (True, False):
        first = model.as_first_model(trainer(0), replace(GROKFAST, seed=3), with_moments=with_moments)
        assert first.vectors[SLOW_GRADIENT].any() == with_moments


def test_a_model_and_its_audits_take_one_vector_more() -> None:
    plain = replace(GROKFAST, grokfast=0.0, grokfast_decay=0.98)
    assert GROKFAST.model_bytes - plain.model_bytes == 4 * GROKFAST.model.parameters


# Specifications -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OuterOptimizerKind)
def test_a_job_of_any_outer_optimizer_may_have_it(kind: OuterOptimizerKind) -> None:
    spec = replace(spec_of(kind), outer_rate=0.01)
    assert JobSpec.decode(spec.encode()) == spec
    assert replace(spec, memory=FeedbackMemory.ESTIMATES).validated()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"grokfast": -1.0}, "grokfast must be at least 0, not -1.0"),
        ({"grokfast": float("nan")}, "grokfast must be a number up to 100, not nan"),
        ({"grokfast": 101.0}, "grokfast must be at most 100, not 101.0"),
        # As float32 these numbers are subnormal, and a processor that flushes them would compute another model.
        ({"grokfast": 1e-38}, "grokfast must be 0 or at least 1e-06, not 1e-38"),
        ({"grokfast_decay": 1e-38}, "grokfast_decay must be 0 or at least 1e-06, not 1e-38"),
        ({"grokfast_decay": 1.0}, "grokfast_decay must be at least 0 and below 1, not 1.0"),
        ({"grokfast_decay": float("nan")}, "grokfast_decay must be at least 0 and below 1, not nan"),
        ({"grokfast": 0.0}, "grokfast_decay 0.9 has no effect without grokfast: set grokfast above 0, or leave it out"),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused_in_a_line(said: dict[str, float], why: str) -> None:
    spec = replace(GROKFAST, **said)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"^job 'small': {re.escape(why)}$"):
        spec.validated()
    if "nan" not in why:
        with pytest.raises(RemoteProtocolError):
            JobSpec.decode(spec.encode())


def test_a_job_without_it_has_the_bytes_of_a_job_before_the_fields() -> None:
    fields = {name: getattr(VALID, name) for name in ("sam_radius", "grokfast", "grokfast_decay")}
    assert fields == {"sam_radius": 0.0, "grokfast": 0.0, "grokfast_decay": 0.98}
    assert len(codec_of_records.to_plain(VALID)) == len(dataclasses.fields(JobSpec)) - 3
