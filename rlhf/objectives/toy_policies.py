"""Policies of the toy, exactly: it is small enough that the value of any policy, and the best one, can be computed.

Arrays have shape (7776,), in the order of `toy_responses`.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from rlhf.objectives.rule_rewards import TOY_BETA, TOY_LENGTH, TOY_VOCABULARY, bigram_table

Float64Array = npt.NDArray[np.float64]


def toy_responses() -> npt.NDArray[np.int64]:
    """All responses, shape (7776, 5): the numbers of base six in their order."""
    return np.array(list(itertools.product(range(TOY_VOCABULARY), repeat=TOY_LENGTH)), dtype=np.int64)


def toy_rewards(seed: int) -> Float64Array:
    responses, table = toy_responses(), np.array(bigram_table(seed), dtype=np.float64)
    rewards: Float64Array = table[responses[:, :-1], responses[:, 1:]].mean(axis=1)
    return rewards


def policy_value(logp: Float64Array, reference: Float64Array, rewards: Float64Array, beta: float = TOY_BETA) -> float:
    """J = E r − β·KL(policy ‖ reference), from the log-probability of each response under both."""
    return float(np.exp(logp) @ (rewards - beta * (logp - reference)))


def optimal_value(reference: Float64Array, rewards: Float64Array, beta: float = TOY_BETA) -> float:
    """J* = β·ln E_reference e^{r/β}: no policy has a larger J."""
    return float(beta * np.logaddexp.reduce(reference + rewards / beta))


def gap_closed(logp: Float64Array, reference: Float64Array, rewards: Float64Array, beta: float = TOY_BETA) -> float:
    """(J − J_ref) / (J* − J_ref): 0 for the reference, 1 for the best policy."""
    start = policy_value(reference, reference, rewards, beta)
    return (policy_value(logp, reference, rewards, beta) - start) / (optimal_value(reference, rewards, beta) - start)
