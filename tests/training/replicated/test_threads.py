"""A model computed by several threads equals that of one thread, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import StorageError
from protocol.verdicts import Verdict
from tests.training.replicated.support import JOB, ODD, round_of
from training.job_spec import ESTIMATES
from training.replicated import codec, error_feedback, model_directory
from training.replicated.aggregate.level_matrix import HALF, gram_matrix, sum_halves
from training.replicated.codec.quantization import TOP
from training.replicated.parallel_map import ParallelMap, Part, Result, default_thread_count, serial_map, thread_map
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import BLOCK, CHUNK, THREAD_BLOCKS, initial_block, layout_from_shapes, layout_of
from training.transformer import PARAMETERS_MAX

# Many small tensors behind one of several blocks: three stretches, and runs of blocks that end inside of them.
MANY = replace(ODD, model=replace(ODD.model, vocabulary=22_000, layers=15))
SETTINGS: dict[str, dict[str, Any]] = {
    "one bit": {"bits": 1},
    "two bits": {"bits": 2},
    "estimates": ESTIMATES,
}


def backwards(work: Callable[[Part], Result], parts: Iterable[Part], /) -> Iterable[Result]:
    """The last part is done first."""
    return reversed([work(part) for part in reversed(list(parts))])


def side_by_side(count: int) -> ParallelMap:
    def each(work: Callable[[Part], Result], parts: Iterable[Part], /) -> Iterable[Result]:
        waiting = list(parts)
        with thread_map(count, len(waiting)) as shared:
            return list(shared(work, waiting))

    return each


WAYS = {"one thread": serial_map, "backwards": backwards, "two threads": side_by_side(2), "three threads": side_by_side(3)}


@pytest.mark.parametrize("settings", SETTINGS)
def test_any_number_of_threads_in_any_order_makes_the_same_models(settings: str, tmp_path: Path) -> None:
    spec = replace(MANY, **SETTINGS[settings])
    assert len(layout_of(spec).stretches) == 3
    first = ReplicatedModel.initial(JOB, spec)
    second = first.apply_round(round_of(first, 4), {})
    rounds = round_of(first, 4), round_of(second, 4)
    third = second.apply_round(rounds[1], {})
    for number, each in enumerate(WAYS.values()):
        models = [ReplicatedModel.create_from_values(tmp_path / f"{number}-0", JOB, spec, partial(initial_block, spec), each)]
        for at, accepted in enumerate(rounds, 1):
            models.append(models[-1].apply_round_into(tmp_path / f"{number}-{at}", accepted, {}, each=each))
        assert [model.root for model in models] == [first.root, second.root, third.root]
        models[-1].verify(each)
        assert models[0].apply_round(rounds[0], {}, each=each).root == second.root


def test_a_block_that_a_thread_writes_at_anothers_place_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, write = ReplicatedModel.initial(JOB, MANY), model_directory.ModelDirectoryWriter.write_bytes_at
    later = first.layout.stretches[1][7]

    def misplaced(fresh: model_directory.ModelDirectoryWriter, part: str, start: int, data: Any) -> None:
        write(fresh, part, 0 if start == 4 * later.elements.start else start, data)

    monkeypatch.setattr(model_directory.ModelDirectoryWriter, "write_bytes_at", misplaced)
    after = first.apply_round_into(tmp_path / "1", round_of(first, 4), {}, each=side_by_side(2))
    for each in WAYS.values():
        with pytest.raises(StorageError, match="does not match the model root"):
            after.verify(each)


def test_what_fails_in_a_thread_fails_for_all_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ReplicatedModel.initial(JOB, MANY)
    later = first.layout.stretches[2][0]

    def full(_fresh: model_directory.ModelDirectoryWriter, _part: str, start: int, _data: Any) -> None:
        if start == 4 * later.elements.start:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_directory.ModelDirectoryWriter, "write_bytes_at", full)
    with pytest.raises(StorageError, match="No space left"):
        first.apply_round_into(tmp_path / "1", round_of(first, 4), {}, each=side_by_side(2))
    assert not (tmp_path / "1").exists()


def test_the_largest_products_of_the_largest_model_are_summed_exactly() -> None:
    """One stretch with only the largest level and scale is counted as often as the largest model has stretches."""
    layout = layout_from_shapes([("largest", (THREAD_BLOCKS * BLOCK,))])
    levels, codes = np.full(layout.size, TOP[8], dtype=np.uint8), np.full(THREAD_BLOCKS * BLOCK // CHUNK, 255, dtype=np.uint8)
    update = codec.QuantizedUpdate(8, bytes(32), layout, 0, codes, levels)
    negative = codec.QuantizedUpdate(8, bytes(31) + b"-", layout, 0, codes, (-levels.view(np.int8)).view(np.uint8))
    square = layout.size * (TOP[8] * int(update.scales[0])) ** 2
    assert gram_matrix([update, negative]) == [[square, -square], [-square, square]]

    lower = layout.size * TOP[8] ** 2 * (int(update.scales[0]) ** 2 & (1 << HALF) - 1)
    part = np.array([[[lower]], [[square - lower >> HALF]]])
    times = PARAMETERS_MAX // layout.size
    assert times * layout.size == PARAMETERS_MAX and times * square >> HALF >= 1 << 63  # even its upper half overflows
    assert sum_halves(itertools.repeat(part, times)) == [[times * square]]


def test_carries_between_the_halves_are_kept() -> None:
    parts = [np.array([[[(1 << 63) - 1]], [[(1 << 63) - 1]]])] * 5 + [np.array([[[-(1 << 63)]], [[-3]]])]
    assert sum_halves(parts) == [[5 * ((1 << 63) - 1) * (1 + (1 << HALF)) - (1 << 63) - (3 << HALF)]]


def test_few_parts_get_no_threads_and_somebody_who_says_nothing_gets_a_few() -> None:
    for count, parts in ((1, 9), (8, 1), (8, 0)):
        with thread_map(count, parts) as each:
            assert each is serial_map
    assert 1 <= default_thread_count() <= 4


def test_estimates_that_are_too_large_for_memory_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ReplicatedModel.initial(JOB, replace(ODD, **ESTIMATES))
    second = first.apply_round(round_of(first, 4), {})
    accepted = round_of(second, 4)
    third = second.apply_round(accepted, {})
    second.save(tmp_path / "2")
    monkeypatch.setattr(error_feedback, "WHOLE_MAX", 0)
    monkeypatch.setattr(model_directory, "MAPPED_BYTES_MIN", 0)
    rooms, room = list[Path](), model_directory.scratch_array

    def noted(folder: Path, size: int) -> Any:
        rooms.append(folder)
        return room(folder, size)

    monkeypatch.setattr(model_directory, "scratch_array", noted)
    opened = ReplicatedModel.open(tmp_path / "2")
    assert opened.check_proposal(accepted[0].trainer, accepted[0].proposal, accepted[0].payload) is Verdict.ACCEPT
    after = opened.apply_round_into(tmp_path / "3", accepted, {})
    after.verify()
    assert after.root == third.root and rooms == [tmp_path] * 4, "the one that was checked is made once"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
