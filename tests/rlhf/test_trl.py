"""The losses beside what TRL's own trainers computed once. `python -m benchmarks.rlhf_oracle --write` makes it anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from benchmarks import rlhf_oracle
from benchmarks.rlhf_oracle import GOLDEN, Row, cases, compare, read
from benchmarks.verdicts import MISSED
from rlhf.pytorch import losses

TENSORS, VERSIONS = read(GOLDEN)


def test_losses_and_gradients_are_those_of_trl() -> None:
    rows, found = compare(0, TENSORS), cases(TENSORS)
    assert VERSIONS["trl"] == "1.12.0" and len(rows) == 18
    assert [line for line in rlhf_oracle.verdicts(rows, found) if line.startswith(MISSED)] == []


def one_token_late(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    advantage, returns = real(*arguments, **named)
    return advantage.roll(1, dims=1), returns


def without_mask(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    *others, mask = arguments
    return real(*others, mask | True, **named)


def not_clipped(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return real(*arguments, clip=1e9, **named)


def ramped(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return real(*arguments, ramp=0.5, **named)


def of_whole_pairs(real: Callable[..., Any], first: Tensor, second: Tensor, *others: Tensor, **named: Any) -> Any:
    """As if every pair's first response were better for sure."""
    return real(first, second, *others[:-1], others[-1] * 0 + 1, **named)


PLANTED = [
    ("token_rewards", without_mask, "rewards"),
    ("gae_advantages", one_token_late, "GAE"),
    ("whiten_advantages", without_mask, "whitening"),
    ("policy_losses", not_clipped, "policy loss"),
    ("policy_losses", ramped, "gradient of the logits"),
    ("value_losses", not_clipped, "value loss"),
    ("value_losses", ramped, "gradient of the values"),
    ("token_mean", lambda real, x, mask: x.mean(), "loss"),
    ("reward_model_losses", of_whole_pairs, "reward model"),
    ("dpo_losses", of_whole_pairs, "DPO"),
]


@pytest.mark.parametrize(("name", "wrong", "what"), PLANTED, ids=[f"{name}, {wrong.__name__}" for name, wrong, _ in PLANTED])
def test_trl_differs_from_a_wrong_variant(
    name: str, wrong: Callable[..., Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(losses, name)
    monkeypatch.setattr(losses, name, lambda *arguments, **named: wrong(real, *arguments, **named))
    off: list[Row] = [row for row in compare(0, TENSORS) if row.largest > row.most]
    assert off and any(what in row.what for row in off)
