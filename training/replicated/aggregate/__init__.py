"""Robust aggregation in exact integers.

An update is an integer level per element and an integer scale per chunk under one exponent. Dot products of updates are exact
integers (`gram_matrix`). From these products a rule derives an integer factor for each update, and the updates that it is mixed
with, before any coordinate is read (`robust_rules`). The factors rescale the chunks' scales onto one grid of integers
(`aggregation_plan`). Mixing, trimming and summing then add and compare integers, block by block (`level_matrix`,
`select_middle`). Only the last division and the conversion to float32 round, once each.
"""

from training.replicated.aggregate.aggregation_plan import AggregationPlan, plan_aggregation
from training.replicated.aggregate.level_matrix import gram_matrix
from training.replicated.aggregate.robust_rules import is_plain_mean, tolerated_faults

__all__ = ["AggregationPlan", "gram_matrix", "is_plain_mean", "plan_aggregation", "tolerated_faults"]
