"""The objectives that this program knows, by name. Features add theirs when the program starts
(`peer.features.register_features`).
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.verdicts import OBJECTIVE_CODES_MAX, VERDICT_MEANINGS, ReplayFinding, Verdict
from training.objectives.builtin_objectives import LanguageObjective, ScratchObjective
from training.objectives.objective import Objective

OBJECTIVES: tuple[Objective, ...] = (LanguageObjective(), ScratchObjective())  # of this package

_known = {objective.name: objective for objective in OBJECTIVES}


def register_objectives(objectives: Iterable[Objective]) -> None:
    """Objectives of a feature. Adding one again changes nothing."""
    for objective in objectives:
        assert _known.setdefault(objective.name, objective) is objective, f"two objectives are called {objective.name!r}"
        labels = objective.reason_labels
        common = {code.label for code in (*Verdict, *ReplayFinding)} | VERDICT_MEANINGS.keys()
        assert len(set(labels)) == len(labels) <= OBJECTIVE_CODES_MAX and common.isdisjoint(labels), objective.name
        assert objective.declaration_type is None or objective.needs_worker, "an engine makes and checks declarations"


def find_objective(name: str) -> Objective | None:
    return _known.get(name)


def rejection_meanings() -> dict[str, str]:
    """Of all labels that a rejection may have, for people."""
    return VERDICT_MEANINGS | {reason.label: reason.meaning for kind in _known.values() for reason in kind.rejection_reasons}


def objective_names() -> tuple[str, ...]:
    return tuple(_known)
