"""The findings of `peer doctor`: one or more for each check."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from features import exit_statuses


class FindingLevel(enum.StrEnum):
    """Levels of findings, the most severe last."""

    OK = "ok"
    WARNING = "warning"  # it works now, but not forever
    FAULT = "fault"  # the peer cannot run or cannot take part


# The exit status of `peer doctor`
EXIT_STATUS = {
    FindingLevel.OK: exit_statuses.SUCCESS,
    FindingLevel.WARNING: exit_statuses.DEGRADED,
    FindingLevel.FAULT: exit_statuses.UNUSABLE,
}


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    check: str  # subject, in a word
    level: str  # a `FindingLevel`
    text: str  # the observation
    advice: str = ""  # the remedy; empty if nothing is wrong


def ok(check: str, text: str) -> DoctorFinding:
    return DoctorFinding(check, FindingLevel.OK, text)


def warning(check: str, text: str, advice: str) -> DoctorFinding:
    return DoctorFinding(check, FindingLevel.WARNING, text, advice)


def fault(check: str, text: str, advice: str) -> DoctorFinding:
    return DoctorFinding(check, FindingLevel.FAULT, text, advice)


def fault_of_error(check: str, error: Exception, advice: str = "mend that, and ask again") -> DoctorFinding:
    """Return a fault for an error whose message is `what happened; what to do`. `advice` replaces a missing remedy."""
    text, _, way_out = str(error).partition("; ")
    return fault(check, text, way_out or advice)


def gravest_level(findings: Iterable[DoctorFinding]) -> FindingLevel:
    order = list(FindingLevel)
    return max((FindingLevel(finding.level) for finding in findings), key=order.index, default=FindingLevel.OK)
