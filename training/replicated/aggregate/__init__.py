"""Robust aggregation in exact integers.

An update is an integer level per element and an integer scale per chunk under one exponent. Dot products of updates are exact
integers (`gram_matrix`). From them, and before any coordinate is looked at, a rule says with which integer factor each update
takes part and which ones it is mixed with (`robust_rules`). The factors rescale the chunks' scales onto one grid of integers
(`plan_aggregation`); mixing, trimming and summing then add and compare integers, block by block (`level_matrix`,
`select_middle`). Only the last division and the conversion to float32 round, once each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.errors import LocalProtocolError
from training.job_spec import AggregationRule
from training.replicated.aggregate.aggregation_plan import AggregationPlan, plan_on_grid
from training.replicated.aggregate.gram import gram_matrix
from training.replicated.aggregate.robust_rules import combine_updates, is_plain_mean, tolerated_faults
from training.replicated.codec import QuantizedUpdate
from training.replicated.parallel_map import ParallelMap, serial_map
from training.replicated.tensor_layout import Float32Array, TensorLayout

__all__ = ["AggregationPlan", "aggregate_updates", "gram_matrix", "is_plain_mean", "plan_aggregation", "tolerated_faults"]


def plan_aggregation(
    updates: Sequence[QuantizedUpdate], rule: AggregationRule, liars: int, each: ParallelMap = serial_map
) -> AggregationPlan:
    """How to aggregate `updates` (at least one, one per trainer) of which at most `liars` lie."""
    ordered = tuple(sorted(updates, key=lambda update: update.origin))
    if not ordered or len({update.origin for update in ordered}) < len(ordered):
        raise LocalProtocolError(f"{len(ordered)} updates: need at least one, and one per trainer")
    return plan_on_grid(ordered, combine_updates(ordered, rule, liars, each))


def aggregate_updates(
    updates: Sequence[QuantizedUpdate], layout: TensorLayout, rule: AggregationRule, liars: int
) -> Float32Array:
    """The whole aggregate as one vector."""
    planned = plan_aggregation(updates, rule, liars)
    result = np.empty(layout.size, dtype=np.float32)
    for block, values in zip(layout.blocks, planned.iter_aggregate(layout.blocks), strict=True):
        result[block.elements] = values
    return result
