"""Findings of `peer doctor` and their levels. Each check has one or more findings."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from features import exit_statuses


class FindingLevel(enum.StrEnum):
    """Levels of findings, the most severe last."""

    OK = "ok"
    WARNING = "warning"  # the peer works, but may fail later
    FAULT = "fault"  # the peer cannot run, or takes no part in the network


# Exit status of `peer doctor` for the most severe level that it found.
EXIT_STATUS = {
    FindingLevel.OK: exit_statuses.SUCCESS,
    FindingLevel.WARNING: exit_statuses.DEGRADED,
    FindingLevel.FAULT: exit_statuses.UNUSABLE,
}


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    check: str  # name of the check, one word
    level: str  # severity, a `FindingLevel`
    text: str  # result of the check in words
    advice: str = ""  # remedy for the user; empty if the level is `ok`


def ok(check: str, text: str) -> DoctorFinding:
    return DoctorFinding(check, FindingLevel.OK, text)


def warning(check: str, text: str, advice: str) -> DoctorFinding:
    return DoctorFinding(check, FindingLevel.WARNING, text, advice)


def fault(check: str, text: str, advice: str) -> DoctorFinding:
    return DoctorFinding(check, FindingLevel.FAULT, text, advice)


def fault_of_error(check: str, error: Exception, advice: str = "correct it, and run `peer doctor` again") -> DoctorFinding:
    """Return a fault with the two parts of an error's message, `what happened; what to do`.

    `advice` replaces a missing second part.
    """
    text, _, way_out = str(error).partition("; ")
    return fault(check, text, way_out or advice)


def gravest_level(findings: Iterable[DoctorFinding]) -> FindingLevel:
    order = list(FindingLevel)
    return max((FindingLevel(finding.level) for finding in findings), key=order.index, default=FindingLevel.OK)
