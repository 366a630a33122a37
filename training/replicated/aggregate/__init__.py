"""Robust aggregation in exact integers.

An update is an integer level per element and an integer scale per chunk under one exponent. Dot products of updates are exact
integers (`gram`). From them, and before any coordinate is looked at, a rule says with which integer factor each update takes part
and which ones it is mixed with (`rules`). The factors rescale the chunks' scales onto one grid of integers (`plan`); mixing,
trimming and summing then add and compare integers, block by block (`columns`, `selection`). Only the last division and the
conversion to float32 round, once each. The divisor depends on how many updates there are, never on how many of them say something
of a coordinate: else one liar would own a coordinate that nobody else has selected.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.errors import LocalProtocolError
from training.replicated.aggregate.gram import gram
from training.replicated.aggregate.plan import Plan, onto_grid
from training.replicated.aggregate.rules import combination, is_plain_mean, tolerated
from training.replicated.codec import Update
from training.replicated.each import Each, one_by_one
from training.replicated.layout import Float32Array, Layout
from training.spec import Rule

__all__ = ["Plan", "aggregate", "gram", "is_plain_mean", "plan", "tolerated"]


def plan(updates: Sequence[Update], rule: Rule, liars: int, each: Each = one_by_one) -> Plan:
    """How to aggregate `updates` (at least one, one per trainer) of which at most `liars` lie."""
    ordered = tuple(sorted(updates, key=lambda update: update.origin))
    if not ordered or len({update.origin for update in ordered}) < len(ordered):
        raise LocalProtocolError(f"{len(ordered)} updates: need at least one, and one per trainer")
    return onto_grid(ordered, combination(ordered, rule, liars, each))


def aggregate(updates: Sequence[Update], layout: Layout, rule: Rule, liars: int) -> Float32Array:
    """The whole aggregate as one vector."""
    planned = plan(updates, rule, liars)
    result = np.empty(layout.size, dtype=np.float32)
    for block, values in zip(layout.blocks, planned.values(layout.blocks), strict=True):
        result[block.elements] = values
    return result
