"""Curation as a feature: its module, and the role that serves annotators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from features.feature import Feature
from features.roles import Role

if TYPE_CHECKING:
    from ledger.core.module import Module
    from ledger.jobs import JobRules


def _modules(rules: JobRules) -> tuple[Module[Any], ...]:
    from curation.module import CurationModule

    return (CurationModule(),)


CURATION = Feature(
    name="curation",
    about="what people said of tasks",
    modules=_modules,
    roles=(Role("annotator", "serves people who annotate; it never loads torch", registers=("annotator",)),),
)
