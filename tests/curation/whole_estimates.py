"""Whole estimates, after all of their iterations."""

from __future__ import annotations

from curation.estimation import dawid_skene, reputation
from curation.estimation.dawid_skene import NO_GOLD, DawidSkene
from curation.estimation.fixed_point import Ints


def run_dawid_skene(classes: int, tasks: int, annotators: int, votes: Ints, gold: Ints = NO_GOLD) -> DawidSkene:
    """Return the estimate after its last iteration."""
    whole = DawidSkene(classes, tasks, annotators, votes, gold)
    for _ in range(dawid_skene.ITERATIONS):
        whole.run_iteration()
    return whole


def final_confusions(whole: DawidSkene, blind: Ints) -> Ints:
    """Return `Reputation.confusion_counts` after the last iteration."""
    found = reputation.Reputation(whole, blind)
    for _ in range(reputation.ITERATIONS):
        found.run_iteration()
    return found.confusion_counts()
