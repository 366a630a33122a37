"""A trace names the steps in which a pair was drawn: those that trainers and auditors draw it in."""

from __future__ import annotations

import pytest

from peer import features
from protocol.errors import UserError
from protocol.identity import peer_id
from rlhf.api import pair_trace
from rlhf.api.pair_trace import find_pair, iter_pair_draws
from rlhf.data.preference_sets import PreferencePair, split_held_out
from rlhf.data.tokenized_records import tokenize_pairs
from tests.rlhf.seat import JOB
from tests.rlhf.test_reward import MEAN, SPEC
from training.data.tokenizer import ByteTokenizer
from training.job_spec import JobSpec
from training.objectives.objective import InnerStep

PAIRS = [PreferencePair(bytes([number]) * 32, f"q{number % 20}", "a", "b", 1000) for number in range(40)]
TRAINERS = {b"t" * 32: True, b"u" * 32: False}
ROUNDS = dict.fromkeys((0, 2), TRAINERS)
EVERYWHERE = [(number, trainer, step) for number in ROUNDS for trainer in TRAINERS for step in range(SPEC.local_steps)]


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    features.register_features()


def drawn(pair: PreferencePair, spec: JobSpec = SPEC) -> set[tuple[int, bytes, int]]:
    """By the objective itself, which draws for the engines."""
    data = tokenize_pairs(spec, PAIRS, ByteTokenizer())
    train, _ = split_held_out(PAIRS, spec.held_out_permille)
    return {
        (number, trainer, step)
        for number, trainer, step in EVERYWHERE
        if pair
        in [
            train[place]
            for place in spec.resolved_objective.draw_examples(spec, InnerStep(JOB, number, trainer, step), spec.batch, data)
        ]
    }


def traced(pair: PreferencePair, spec: JobSpec = SPEC) -> set[tuple[int, bytes, int]]:
    by_id = {peer_id(trainer): trainer for trainer in TRAINERS}
    views = list(iter_pair_draws(JOB, spec, PAIRS, pair, ROUNDS))
    assert all(view.job == JOB.hex() and view.accepted == TRAINERS[by_id[view.trainer]] for view in views)
    assert len(set(views)) == len(views)
    return {(view.round, by_id[view.trainer], view.step) for view in views}


@pytest.mark.parametrize("spec", [SPEC, MEAN], ids=["by a hash", "in turn"])
def test_a_trace_has_the_steps_in_which_a_pair_is_drawn_and_no_others(spec: JobSpec) -> None:
    train, held_out = split_held_out(PAIRS, spec.held_out_permille)
    assert held_out and all(traced(pair, spec) == drawn(pair, spec) for pair in PAIRS)
    assert any(traced(pair, spec) for pair in train) and not any(traced(pair, spec) for pair in held_out)


def test_a_job_of_means_meets_each_pair_once_in_its_first_rounds_whoever_trains() -> None:
    rounds, count = 5, MEAN.batch
    for trainer in TRAINERS:
        steps = [InnerStep(JOB, number, trainer, step) for number in range(rounds) for step in range(MEAN.local_steps)]
        met = [
            int(pair)
            for step in steps
            for pair in MEAN.resolved_objective.draw_example_numbers(MEAN, step, count, len(steps) * count)
        ]
        assert sorted(met) == list(range(len(steps) * count))


def test_a_trace_that_counts_held_out_pairs_or_forgets_the_trainer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(pair_trace, "split_held_out", lambda pairs, permille: (pairs, []))
        assert any(traced(pair) != drawn(pair) for pair in PAIRS)
    monkeypatch.setattr(pair_trace, "InnerStep", lambda job, number, trainer, step: InnerStep(job, number, bytes(32), step))
    assert any(traced(pair) != drawn(pair) for pair in PAIRS)


def test_people_name_a_pair_by_the_beginning_of_its_task_or_by_its_line() -> None:
    lines = [PreferencePair(number.to_bytes(8, "big"), "q", "a", "b", 1) for number in (1, 12, 256)]
    assert [find_pair(lines, text) for text in ("1", "12", "256", "2", "0000000000000001")] == [*lines, None, lines[0]]
    assert (
        find_pair(PAIRS, "0B0B0B0B") == PAIRS[11] and find_pair(PAIRS, "0b0b0b") is None and find_pair(PAIRS, "ff" * 32) is None
    )
    alike = [PreferencePair(bytes([7]) * 31 + bytes([last]), "q", "a", "b", 1) for last in range(2)]
    with pytest.raises(UserError, match="'07070707' fits 2 pairs, such as task 0707070707070707: type more"):
        find_pair(alike, "07070707")
