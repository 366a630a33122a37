"""Commands that tune a model: their input, errors found before any request, and figures of a preference set."""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from features.commands import CommandContext
from peer.commands.command_line_parser import parse_line
from peer.commands.definitions import all_commands
from protocol.errors import UserError
from rlhf.api.rlhf_rpc_handler import RlhfRpcHandler
from rlhf.commands import _show_status, rlhf
from rlhf.data import preference_set_statistics
from rlhf.data.preference_set_statistics import (
    CONTRADICTORY,
    IDENTICAL,
    WORD_COUNT,
    PreferenceSetStatistics,
    evenly_spaced,
    odd_pairs,
)
from rlhf.data.preference_sets import PreferencePair
from rlhf.pair_accuracy import PairAccuracy
from rlhf.rpc import PolicyMetricsView, PreferencesView, RlhfView, StageView


def say(*typed: str) -> None:
    parser, nothing = argparse.ArgumentParser(), {}
    rlhf.add_arguments(parser)
    unused: Any = None
    trio.run(rlhf.run, CommandContext(unused, parser.parse_args(["start", *typed]), print, unused, unused, nothing, unused))


@pytest.mark.virtual
@pytest.mark.parametrize(
    "typed, problem",
    [
        (("--set", "beta"), "write FIELD=VALUE"),
        (("--set", "beta=1", "beta=2"), "give one of them"),
        (("--set", "rounds=3"), "--ppo-iterations 3"),
        (("The first ",), "is no part of it"),
    ],
)
def test_a_tuning_is_said_clearly(typed: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        say(*typed, "--base", "base", "--reward", "rule:vowels")


@pytest.mark.virtual
def test_train_rlhf_at_the_prompt_is_rlhf_start() -> None:
    said = parse_line(all_commands(), "train rlhf --base base --reward rule:vowels")
    assert said is not None and (said.command, said.do, said.base, said.reward) == ("rlhf", "start", "base", "rule:vowels")
    language = parse_line(all_commands(), "train --name rlhf")
    assert language is not None and (language.command, language.name) == ("train", "rlhf")


REWARD = StageView(
    "reward",
    "aa" * 32,
    "finished",
    10,
    10,
    "bb" * 32,
    held_out_accuracy=0.71,
    held_out_pairs=96,
    held_out_interval=PairAccuracy(136, 96).interval,
    measured_rounds=10,
    word_count_accuracy=0.7,
    preferences=PreferencesView("", False),
    identical_pairs=0,
    contradictory_pairs=0,
)


def told(*stages: StageView, state: str = "finished", figures: tuple[PolicyMetricsView, ...] = ()) -> str:
    shown = list[str]()
    asked: Any = SimpleNamespace(show=lambda what: shown.append(what if isinstance(what, str) else ""))
    _show_status(asked, RlhfView(state, stages), figures)
    return "\n".join(shown)


@pytest.mark.virtual
def test_status_says_of_how_many_pairs_and_after_which_round_a_figure_is() -> None:
    assert "aaaaaaaa, after round 10: the better response scores higher in 0.71 of 96 pairs, interval 0.61–0.79" in told(REWARD)
    earlier = told(replace(REWARD, state="measuring", measured_rounds=8), state="measuring")
    assert "aaaaaaaa, after round 8: the better" in earlier and "round 10 is being measured" in earlier
    assert "before round 1: the better" in told(replace(REWARD, measured_rounds=0))
    assert "after round 3: 2.500 nats" in told(replace(REWARD, objective="instruct", held_out_nats=2.5, measured_rounds=3))
    missing = replace(REWARD, measured_rounds=None, held_out_accuracy=None, held_out_pairs=None, held_out_interval=None)
    assert "this peer has not measured it" in told(missing) and "not measured" not in told(REWARD)


@pytest.mark.virtual
def test_status_warns_where_word_counts_rank_more_pairs_alike() -> None:
    assert "a word-count model: 0.70 of the same pairs" in told(REWARD) and "warning" not in told(REWARD)
    better = told(replace(REWARD, word_count_accuracy=0.945))
    assert "warning: a word-count model ranks 0.94 of the same pairs as people do, more than this model" in better


@pytest.mark.virtual
def test_status_counts_identical_and_contradictory_pairs() -> None:
    assert "identical" not in told(REWARD) and "contradict" not in told(REWARD)
    odd = told(replace(REWARD, identical_pairs=1, contradictory_pairs=4))
    assert "of its set 1 pair has identical responses and 4 pairs contradict one another" in odd


@pytest.mark.virtual
def test_status_says_why_a_stage_failed() -> None:
    failed = told(
        replace(REWARD, state="failed", failure="no update was accepted in 2 rounds of reward: 8 replay"), state="failed"
    )
    assert "the plan failed" in told(REWARD, replace(REWARD, objective="ppo", state="waiting"), state="failed")
    assert "aaaaaaaa failed: no update was accepted in 2 rounds of reward: 8 replay" in failed


@pytest.mark.virtual
def test_status_counts_rounds_of_a_policy_from_1() -> None:
    figures = PolicyMetricsView("cc" * 32, 0, 3, 0.5, 1.0, 8.0, 0.0, 0.9, 0.0)
    assert "a response of round 1 " in told(REWARD, figures=(figures,))


@pytest.mark.virtual
@pytest.mark.parametrize(("begun", "way"), [([], "begin with `rlhf start`"), ([(b"job", None)], "`rlhf status` says how far")])
async def test_whoever_compares_too_early_is_told_what_to_do(begun: list[Any], way: str) -> None:
    asked: Any = SimpleNamespace(peer=SimpleNamespace(worker_client=True), _tuned=lambda: begun)
    with pytest.raises(UserError, match=f"no model has been tuned yet: {way}"):
        await RlhfRpcHandler.compare_policy(asked, "The ", 1, 1.0, 0)


def pair(number: int, prompt: str, first: str, second: str, p: int = 1000) -> PreferencePair:
    return PreferencePair(number.to_bytes(8, "big"), prompt, first, second, p)


@pytest.mark.parametrize(
    "others, identical, contradictory",
    [
        ([], 0, 0),
        ([("q", "a", "b", 1000)], 0, 0),  # the same pair twice
        ([("q", "b", "a", 0)], 0, 0),  # the same answer in the other order
        ([("q", "b", "a", 1000)], 0, 2),
        ([("q", "a", "b", 0)], 0, 2),  # the same order, the other response
        ([("q", "a", "b", 400), ("q", "a", "b", 700)], 0, 3),  # two against one: all three are contradicted
        ([("other", "b", "a", 1000)], 0, 0),  # another prompt
        ([("q", "b", "a", 500)], 0, 0),  # a tie contradicts nobody
        ([("q", "b", "c", 1000), ("q", "c", "a", 1000)], 0, 0),  # a circle of three
        ([("q", "a", "a", 1000), ("r", "b", "b", 0)], 2, 0),
    ],
)
def test_odd_pairs_are_counted(others: list[tuple[str, str, str, int]], identical: int, contradictory: int) -> None:
    assert odd_pairs([pair(number, *said) for number, said in enumerate([("q", "a", "b", 1000), *others])]) == {
        IDENTICAL: identical,
        CONTRADICTORY: contradictory,
    }


def test_the_word_count_model_learns_from_what_is_trained_and_is_measured_on_what_is_held_out() -> None:
    learned = [pair(number, f"q{number}", f"good x{number}", f"bad y{number}") for number in range(50)]
    measured = [pair(number, f"m{number}", "a good film", "a bad film", 1000 if number else 0) for number in range(4)]
    assert PreferenceSetStatistics(learned, measured).figures == {IDENTICAL: 0, CONTRADICTORY: 0, WORD_COUNT: 0.75}
    assert WORD_COUNT not in PreferenceSetStatistics(learned, [pair(0, "m", "a", "b", 500)]).figures
    assert WORD_COUNT not in PreferenceSetStatistics(learned, []).figures


def test_a_large_set_is_learned_from_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference_set_statistics, "CHARACTERS_MAX", 40)
    learned = [pair(number, f"q{number}", "good", "bad!") for number in range(50)]
    found = PreferenceSetStatistics(learned, learned)
    assert len(found._trained) == 5 and found._trained[-1] == learned[-1]
    assert evenly_spaced([], 3) == [] and evenly_spaced([1, 2], 3) == [1, 2] and evenly_spaced(range(7), 3) == [0, 3, 6]
