"""Metrics of a model that learned from pairs, as the card of the model says them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

ACCURACY: Final = "held_out_accuracy"
CALIBRATION: Final = "calibration_error"


def pair_metric_rows(metrics: Mapping[str, float], missing: str) -> Iterator[tuple[str, str]]:
    """As `Objective.metric_rows`, with those of the set of preferences."""
    from rlhf.data.preference_set_statistics import CONTRADICTORY, IDENTICAL, PAIRS, WORD_COUNT
    from rlhf.pair_accuracy import PairAccuracy

    is_measured = ACCURACY in metrics and PAIRS in metrics
    accuracy = PairAccuracy.from_share(metrics[ACCURACY], int(metrics[PAIRS])) if is_measured else None
    held_out = [] if accuracy is None else [f"accuracy {accuracy}"]
    for name, value in sorted(metrics.items()):
        if name not in (ACCURACY, PAIRS) and (name.startswith("held_out") or name == CALIBRATION):
            held_out.append(f"{name.removeprefix('held_out_').replace('_', ' ')} {value:.4g}")
    yield "held out", ", ".join(held_out) or missing
    words = metrics.get(WORD_COUNT)
    if accuracy is not None and words is not None:
        warning = ": more than this model, which is worse than counting words" if words > accuracy.share else ""
        yield "word-count model", f"{words:.2f} of the same pairs{warning}"
    identical, contradictory = (int(metrics.get(name, 0)) for name in (IDENTICAL, CONTRADICTORY))
    if identical or contradictory:
        yield "odd pairs", f"{identical} of identical responses, {contradictory} that contradict one another"
