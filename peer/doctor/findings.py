"""What `peer doctor` says: a finding for each thing that it looked at."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class FindingLevel(enum.StrEnum):
    """The gravest last."""

    OK = "ok"
    WARNING = "warning"  # it works, and will not for ever
    FAULT = "fault"  # the peer cannot run, or takes no part


# The exit status of `peer doctor`, like those of `peer status`; 2 is a command line that cannot be read.
EXIT_STATUS = {FindingLevel.OK: 0, FindingLevel.WARNING: 3, FindingLevel.FAULT: 4}


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    check: str  # what was looked at, in a word
    level: str  # of `FindingLevel`
    text: str  # what was found
    advice: str = ""  # what to do; empty where nothing is wrong


def ok(check: str, text: str) -> DoctorFinding:
    return DoctorFinding(check, FindingLevel.OK, text)


def warning(check: str, text: str, advice: str) -> DoctorFinding:
    return DoctorFinding(check, FindingLevel.WARNING, text, advice)


def fault(check: str, text: str, advice: str) -> DoctorFinding:
    return DoctorFinding(check, FindingLevel.FAULT, text, advice)


def fault_of_error(check: str, error: Exception, advice: str = "mend that, and ask again") -> DoctorFinding:
    """Of an error whose line says what happened and then, behind `; `, what to do."""
    text, _, way_out = str(error).partition("; ")
    return fault(check, text, way_out or advice)


def gravest_level(findings: Iterable[DoctorFinding]) -> FindingLevel:
    order = list(FindingLevel)
    return max((FindingLevel(finding.level) for finding in findings), key=order.index, default=FindingLevel.OK)
