"""Sealed answers: whoever carries a commitment seals its answer for two more serving peers, which open it if the carrier is gone.

They are drawn by hash, so that everybody knows whose turn it is. Nothing decided looks into a seal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from curation.annotator_statements import Salt
from curation.ledger.curation_state import Choices
from curation.limits import SEALS_MAX


@dataclass(frozen=True, slots=True)
class OpeningSecret:
    """What opens a commitment."""

    salt: Salt
    answer: Choices


def seal_recipients(serving: Iterable[bytes], assignment: bytes, carrier: bytes) -> tuple[bytes, ...]:
    """The serving peers that this answer is sealed for, in the order in which they open it."""
    others = (key for key in serving if key != carrier)
    return tuple(sorted(others, key=lambda key: hashlib.sha256(b"folkmoot/seal\x00" + assignment + key).digest())[:SEALS_MAX])
