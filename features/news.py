"""News: what a block changed that people want to know, as lines of the event log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class News:
    kind: str  # of an event: member, job, figures or warning
    text: str
    about: bytes  # the member, or the job
