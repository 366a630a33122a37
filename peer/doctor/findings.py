"""What `peer doctor` says: a finding for each thing that it looked at."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Level(enum.StrEnum):
    """The gravest last."""

    OK = "ok"
    WARNING = "warning"  # it works, and will not for ever
    FAULT = "fault"  # the peer cannot run, or takes no part


# The exit status of `peer doctor`, like those of `peer status`; 2 is a command line that cannot be read.
EXIT_STATUS = {Level.OK: 0, Level.WARNING: 3, Level.FAULT: 4}


@dataclass(frozen=True, slots=True)
class Finding:
    check: str  # what was looked at, in a word
    level: str  # of `Level`
    text: str  # what was found
    advice: str = ""  # what to do; empty where nothing is wrong


def ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def warning(check: str, text: str, advice: str) -> Finding:
    return Finding(check, Level.WARNING, text, advice)


def fault(check: str, text: str, advice: str) -> Finding:
    return Finding(check, Level.FAULT, text, advice)


def refused(check: str, error: Exception, advice: str = "mend that, and ask again") -> Finding:
    """Of an error whose line says what happened and then, behind `; `, what to do."""
    text, _, way_out = str(error).partition("; ")
    return fault(check, text, way_out or advice)


def gravest(findings: Iterable[Finding]) -> Level:
    order = list(Level)
    return max((Level(finding.level) for finding in findings), key=order.index, default=Level.OK)
