"""Each loss against its formula in plain Python and recorded results of TRL, and wrong variants that both must notice.

`python -m benchmarks.rlhf_oracle --write` makes the figures of TRL anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import rlhf_oracle
from benchmarks.rlhf_oracle import GOLDEN, Row, cases, compare, read
from benchmarks.verdicts import MISSED
from rlhf.objectives.ppo import CLIP_RANGE
from rlhf.pytorch import losses
from training.engines.pytorch import log_probabilities

LENGTHS = (5, 1, 3, 2)
B, T, V = len(LENGTHS), max(LENGTHS), 7
MASK = torch.tensor([[t < length for t in range(T)] for length in LENGTHS])
PLACES = [(b, t) for b, length in enumerate(LENGTHS) for t in range(length)]
P = torch.tensor([1.0, 0.5, 0.25, 0.0])


def drawn(name: str, *shape: int, spread: float = 0.5, padding: float = math.nan) -> Tensor:
    """Return numbers drawn from a seed. Padding must not matter, so it has the worst possible values."""
    made = torch.randn(shape or (B, T), generator=torch.Generator().manual_seed(sum(name.encode()))) * spread
    return made if shape else made.masked_fill(~MASK, padding)


LOGP, OLD, REFERENCE = (drawn(name) - 2 for name in ("logp", "old", "reference"))
VALUE, OLD_VALUE, REWARD, RETURN, ADVANTAGE = (drawn(name) for name in ("value", "old value", "reward", "return", "advantage"))
SCORE = drawn("score", B, spread=3.0)


def same(found: Tensor, wanted: dict[tuple[int, int], float] | list[float]) -> None:
    """Compare values of shape (B, T), with zeros on padding, or of shape (B,)."""
    if isinstance(wanted, dict):
        wanted = [wanted.get((b, t), 0.0) for b in range(B) for t in range(T)]
    torch.testing.assert_close(found.flatten(), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


# The formula of each function --------------------------------------------------------------------------------------------


def check_rewards() -> None:
    found = losses.token_rewards(LOGP, REFERENCE, SCORE, MASK, beta=0.3, score_clip=2.0)
    assert (SCORE.abs() > 2).any() and (SCORE.abs() < 2).any()
    last = {(b, length - 1): min(2.0, max(-2.0, float(SCORE[b]))) for b, length in enumerate(LENGTHS)}
    same(found, {at: -0.3 * float(LOGP[at] - REFERENCE[at]) + last.get(at, 0.0) for at in PLACES})


def check_advantages() -> None:
    """Compare advantages with the sum over later steps (GAE, equation 16), not with the recursion that computes it."""
    advantage, returns = losses.gae_advantages(REWARD, VALUE, MASK, discount=0.9, decay=0.8)

    def delta(b: int, t: int) -> float:
        following = float(VALUE[b, t + 1]) if t + 1 < LENGTHS[b] else 0.0
        return float(REWARD[b, t]) + 0.9 * following - float(VALUE[b, t])

    wanted = {(b, t): sum(0.72 ** (later - t) * delta(b, later) for later in range(t, LENGTHS[b])) for b, t in PLACES}
    same(advantage, wanted)
    same(returns, {at: wanted[at] + float(VALUE[at]) for at in PLACES})


def check_whitening() -> None:
    values = [float(ADVANTAGE[at]) for at in PLACES]
    same(losses.whiten_advantages(ADVANTAGE, MASK), {at: (float(ADVANTAGE[at]) - fmean(values)) / stdev(values) for at in PLACES})


def check_groups() -> None:
    pairs = [(float(SCORE[b]), float(SCORE[b ^ 1])) for b in range(B)]  # neighbours, two to a prompt
    same(losses.group_advantages(SCORE, 2), [a - fmean((a, b)) for a, b in pairs])
    same(losses.group_advantages(SCORE, 2, by_deviation=True), [(a - fmean((a, b))) / (stdev((a, b)) + 1e-4) for a, b in pairs])


def check_policy() -> None:
    def wanted(b: int, t: int) -> float:
        ratio, advantage = math.exp(float(LOGP[b, t] - OLD[b, t])), float(ADVANTAGE[b, t])
        return -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)

    same(losses.policy_losses(LOGP, OLD, ADVANTAGE, MASK), {at: wanted(*at) for at in PLACES})


def check_value() -> None:
    def wanted(b: int, t: int) -> float:
        value, old, to = float(VALUE[b, t]), float(OLD_VALUE[b, t]), float(RETURN[b, t])
        return 0.5 * max((value - to) ** 2, (min(max(value, old - 0.2), old + 0.2) - to) ** 2)

    same(losses.value_losses(VALUE, OLD_VALUE, RETURN, MASK), {at: wanted(*at) for at in PLACES})


def check_mean() -> None:
    wanted = fmean(float(ADVANTAGE[at]) for at in PLACES)
    same(losses.token_mean(ADVANTAGE, MASK), [wanted])
    parts = [losses.token_mean(ADVANTAGE[rows], MASK[rows], len(PLACES)) for rows in (slice(1), slice(1, B))]
    same(sum(parts, torch.zeros(())), [wanted])


def check_reward_model() -> None:
    def wanted(a: float, b: float, p: float) -> float:
        return -p * math.log(sigmoid(a - b)) - (1 - p) * math.log(sigmoid(b - a)) + 0.01 * (a + b) ** 2

    other = drawn("other score", B)
    rows = zip(SCORE.tolist(), other.tolist(), P.tolist(), strict=True)
    same(losses.reward_model_losses(SCORE, other, P), [wanted(*row) for row in rows])


def check_dpo() -> None:
    def wanted(a: float, b: float, c: float, d: float, p: float) -> float:
        margin = 0.2 * ((a - c) - (b - d))
        return -p * math.log(sigmoid(margin)) - (1 - p) * math.log(sigmoid(-margin))

    sums = [drawn(name, B, spread=4.0) for name in ("first", "second", "reference first", "reference second")]
    rows = zip(*(x.tolist() for x in (*sums, P)), strict=True)
    same(losses.dpo_losses(*sums, P, beta=0.2), [wanted(*row) for row in rows])


def check_k3() -> None:
    differences = {at: float(REFERENCE[at] - LOGP[at]) for at in PLACES}
    same(
        losses.kl_estimate_k3(LOGP, REFERENCE, MASK),
        [sum(math.exp(d) - 1 - d for (row, _), d in differences.items() if row == b) for b in range(B)],
    )


def check_log_probabilities() -> None:
    logits = drawn("logits", B, T, V, spread=2.0).requires_grad_()
    tokens = torch.arange(B * T).view(B, T) % V
    found = log_probabilities.log_probabilities(logits, tokens)
    wanted = torch.log_softmax(logits, 2).gather(2, tokens[..., None])[..., 0]
    weights = drawn("weights", B, T)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad((x * weights).sum(), logits)[0] for x in (found, wanted)))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


CHECKS: dict[str, Callable[[], None]] = {
    "token_rewards": check_rewards,
    "gae_advantages": check_advantages,
    "whiten_advantages": check_whitening,
    "group_advantages": check_groups,
    "policy_losses": check_policy,
    "value_losses": check_value,
    "token_mean": check_mean,
    "reward_model_losses": check_reward_model,
    "dpo_losses": check_dpo,
    "kl_estimate_k3": check_k3,
    "log_probabilities": check_log_probabilities,
}


@pytest.mark.parametrize("name", CHECKS)
def test_it_is_what_its_formula_says(name: str) -> None:
    CHECKS[name]()


# Wrong variants: of each function one that the comparison sees ------------------------------------------------------------

EVERYWHERE = torch.ones_like(MASK)


def without_mask(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return real(*(EVERYWHERE if x is MASK else x for x in arguments), **named)


def score_after_the_end(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return real(*arguments, **named).roll(1, dims=1)


def one_token_late(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    advantage, returns = real(*arguments, **named)
    return advantage.roll(1, dims=1).masked_fill(~MASK, 0), returns


def swapped(real: Callable[..., Any], first: Tensor, second: Tensor, *others: Any, **named: Any) -> Any:
    return real(second, first, *others, **named)


def one_group(real: Callable[..., Any], total: Tensor, group: int, **named: Any) -> Any:
    return real(total, len(total), **named)


def never_clipped(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return real(*arguments, clip=1e9, **named)


def k1(real: Callable[..., Any], logp: Tensor, reference: Tensor, mask: Tensor) -> Any:
    return (logp - reference).masked_fill(~mask, 0).sum(1)


def mean_of_rows(real: Callable[..., Any], x: Tensor, mask: Tensor, tokens: Any = None) -> Any:
    rows = x.masked_fill(~mask, 0).sum(1) / mask.sum(1)
    return rows.mean()


def next_tokens(real: Callable[..., Any], logits: Tensor, tokens: Tensor) -> Any:
    return real(logits, tokens.roll(1, dims=1))


def certain(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Plant: treat labels as if all annotators had agreed."""
    return real(*(x.round() if x is P else x for x in arguments), **named)


PLANTED = [
    ("token_rewards", score_after_the_end),
    ("token_rewards", swapped),
    ("token_rewards", without_mask),
    ("gae_advantages", one_token_late),
    ("gae_advantages", without_mask),
    ("gae_advantages", swapped),
    ("whiten_advantages", without_mask),
    ("group_advantages", one_group),
    ("policy_losses", never_clipped),
    ("policy_losses", swapped),
    ("policy_losses", without_mask),
    ("value_losses", never_clipped),
    ("value_losses", without_mask),
    ("token_mean", mean_of_rows),
    ("token_mean", without_mask),
    ("reward_model_losses", swapped),
    ("reward_model_losses", certain),
    ("dpo_losses", swapped),
    ("dpo_losses", certain),
    ("kl_estimate_k3", k1),
    ("kl_estimate_k3", swapped),
    ("log_probabilities", next_tokens),
]


@pytest.mark.parametrize(("name", "wrong"), PLANTED, ids=[f"{name}: {wrong.__name__}" for name, wrong in PLANTED])
def test_the_comparison_notices(name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    home = log_probabilities if name == "log_probabilities" else losses
    real = getattr(home, name)
    monkeypatch.setattr(home, name, lambda *arguments, **named: wrong(real, *arguments, **named))
    with pytest.raises(AssertionError):
        CHECKS[name]()


def test_every_loss_has_a_wrong_variant() -> None:
    assert {name for name, _ in PLANTED} == set(CHECKS)


# Ramps --------------------------------------------------------------------------------------------------------------------

ONE = torch.ones(1, 1, dtype=torch.bool)
STEP = 1e-3
RAMP = 0.05


def gradients(loss: Callable[[Tensor], Tensor], low: float, high: float) -> Tensor:
    """Return the gradients of a single token's loss at points from `low` to `high` that lie `STEP` apart."""
    x = torch.arange(low, high, STEP).view(-1, 1).requires_grad_()
    (found,) = torch.autograd.grad(loss(x).sum(), x)
    return found[:, 0]


def policy_line(advantage: float, ramp: float) -> Tensor:
    """Return the policy loss as a function of the ratio."""

    def loss(ratio: Tensor) -> Tensor:
        old, mask = torch.zeros_like(ratio), torch.ones_like(ratio, dtype=torch.bool)
        return losses.policy_losses(ratio.log(), old, torch.full_like(ratio, advantage), mask, ramp=ramp)

    return gradients(loss, 0.5, 1.5)


def value_line(wanted: float, ramp: float) -> Tensor:
    def loss(value: Tensor) -> Tensor:
        old, mask = torch.zeros_like(value), torch.ones_like(value, dtype=torch.bool)
        return losses.value_losses(value, old, torch.full_like(value, wanted), mask, ramp=ramp)

    return gradients(loss, -2.0, 2.0)


def largest_jump(line: Tensor) -> float:
    return float(line.diff().abs().max())


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.1])
def test_the_gradient_of_the_ratio_jumps_at_an_edge_and_with_a_ramp_it_does_not(advantage: float) -> None:
    textbook, ramped = policy_line(advantage, 0.0), policy_line(advantage, RAMP)
    assert largest_jump(textbook) > 0.9 * abs(advantage)
    assert largest_jump(ramped) < 1.1 * abs(advantage) * STEP / RAMP
    differs = (textbook - ramped).abs() > 1e-6
    assert 0 < differs.sum() <= RAMP / STEP + 1, "nothing else differs from the textbook"


@pytest.mark.parametrize("wanted", [0.9, -0.9, 0.25, 0.19, 0.2, 0.0])
def test_the_gradient_of_a_value_jumps_where_its_return_lies_beyond_an_edge_and_with_a_ramp_it_does_not(wanted: float) -> None:
    beyond = max(0.0, abs(wanted) - CLIP_RANGE)
    textbook, ramped = value_line(wanted, 0.0), value_line(wanted, RAMP)
    assert largest_jump(textbook) == pytest.approx(beyond, abs=2 * STEP)
    assert largest_jump(ramped) < 4 * STEP * (1 + beyond / RAMP)


def test_a_ramp_of_no_width_is_the_textbook_and_an_extreme_ratio_is_no_invalid_number() -> None:
    logp = torch.tensor([[60.0, -60.0, 0.0, 60.0]], requires_grad=True)
    advantage = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
    loss = losses.policy_losses(logp, torch.zeros(1, 4), advantage, torch.ones(1, 4, dtype=torch.bool))
    assert loss.tolist() == [pytest.approx([-1.2, 0.8, 0.0, 0.0])]
    assert torch.autograd.grad(loss.sum(), logp)[0].tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_the_gradient_of_a_sure_model_is_exact_to_rounding() -> None:
    """1 − p[y] of float32 would be zero here, or a multiple of 2⁻²⁴."""
    logits = torch.tensor([[[20.0, 0.0, 0.0]]], requires_grad=True)
    log_probabilities.log_probabilities(logits, torch.zeros(1, 1, dtype=torch.long)).sum().backward()
    other = math.exp(-20) / (1 + 2 * math.exp(-20))
    assert logits.grad is not None and logits.grad.tolist() == [[pytest.approx([2 * other, -other, -other], rel=1e-5)]]


def test_one_token_alone_is_whitened_to_zero() -> None:
    assert losses.whiten_advantages(torch.tensor([[3.0, math.nan]]), torch.tensor([[True, False]])).tolist() == [[0.0, 0.0]]


TENSORS, VERSIONS = read(GOLDEN)


def test_losses_and_gradients_are_those_of_trl() -> None:
    rows, found = compare(0, TENSORS), cases(TENSORS)
    assert VERSIONS["trl"] == "1.12.0" and len(rows) == 18
    assert [line for line in rlhf_oracle.verdicts(rows, found) if line.startswith(MISSED)] == []


def advantages_one_token_late(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    advantage, returns = real(*arguments, **named)
    return advantage.roll(1, dims=1), returns


def without_last_mask(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    *others, mask = arguments
    return real(*others, mask | True, **named)


def ramped(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return real(*arguments, ramp=0.5, **named)


def of_whole_pairs(real: Callable[..., Any], first: Tensor, second: Tensor, *others: Tensor, **named: Any) -> Any:
    """Plant: treat every pair's first response as certainly better."""
    return real(first, second, *others[:-1], others[-1] * 0 + 1, **named)


PLANTED_BESIDE_TRL = [
    ("token_rewards", without_last_mask, "rewards"),
    ("gae_advantages", advantages_one_token_late, "GAE"),
    ("whiten_advantages", without_last_mask, "whitening"),
    ("policy_losses", never_clipped, "policy loss"),
    ("policy_losses", ramped, "gradient of the logits"),
    ("value_losses", never_clipped, "value loss"),
    ("value_losses", ramped, "gradient of the values"),
    ("token_mean", lambda real, x, mask: x.mean(), "loss"),
    ("reward_model_losses", of_whole_pairs, "reward model"),
    ("dpo_losses", of_whole_pairs, "DPO"),
]


@pytest.mark.parametrize(
    ("name", "wrong", "what"), PLANTED_BESIDE_TRL, ids=[f"{name}, {wrong.__name__}" for name, wrong, _ in PLANTED_BESIDE_TRL]
)
def test_trl_differs_from_a_wrong_variant(
    name: str, wrong: Callable[..., Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = log_probabilities if name == "log_probabilities" else losses
    real = getattr(home, name)
    monkeypatch.setattr(home, name, lambda *arguments, **named: wrong(real, *arguments, **named))
    off: list[Row] = [row for row in compare(0, TENSORS) if row.largest > row.most]
    assert off and any(what in row.what for row in off)
