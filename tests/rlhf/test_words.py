"""What a person types to tune a model, and what is refused before anything is asked."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from features.words import Asked
from peer.api.rlhf import RlhfAnswers
from peer.commands.grammar import parse
from peer.commands.words import words
from protocol.errors import UserError
from rlhf.words import rlhf


def say(*typed: str) -> None:
    parser, nothing = argparse.ArgumentParser(), {}
    rlhf.add_arguments(parser)
    unused: Any = None
    trio.run(rlhf.do, Asked(unused, parser.parse_args(["start", *typed]), print, unused, unused, nothing, unused))


@pytest.mark.parametrize(
    "typed, problem",
    [
        (("--set", "beta"), "write FIELD=VALUE"),
        (("--set", "beta=1", "beta=2"), "say one"),
        (("--set", "rounds=3"), "--ppo-iterations 3"),
        (("The first ",), "is no part of it"),
    ],
)
def test_a_tuning_is_said_clearly(typed: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        say(*typed, "--base", "base", "--reward", "rule:vowels")


def test_train_rlhf_at_the_prompt_is_rlhf_start() -> None:
    said = parse(words(), "train rlhf --base base --reward rule:vowels")
    assert said is not None and (said.command, said.do, said.base, said.reward) == ("rlhf", "start", "base", "rule:vowels")
    language = parse(words(), "train --name rlhf")
    assert language is not None and (language.command, language.name) == ("train", "rlhf")


@pytest.mark.parametrize(("begun", "way"), [([], "begin with `rlhf start`"), ([(b"job", None)], "`rlhf status` says how far")])
async def test_whoever_compares_too_early_is_told_what_to_do(begun: list[Any], way: str) -> None:
    worker = SimpleNamespace(role=SimpleNamespace(computing=True))
    asked: Any = SimpleNamespace(peer=SimpleNamespace(driver=SimpleNamespace(workshop=worker, host=None)), _tuned=lambda: begun)
    with pytest.raises(UserError, match=f"no model has been tuned yet: {way}"):
        await RlhfAnswers.compare_policy(asked, "The ", 1, 1.0, 0)
