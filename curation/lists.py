"""Two lists of task numbers of each project, from which tasks are drawn: an element goes and comes at the cost of two rows.

The list of fresh tasks is every number from `Project.drawn` on, except where a row says otherwise: the first element takes the
place of the one that was drawn. The list of begun tasks with a free place is dense: the last element takes the place of the one
that goes.
"""

from __future__ import annotations

from typing import Final

FRESH_LIST: Final = b"f"
BEGUN_LIST: Final = b"b"


def index_slot_key(project: bytes, which: bytes, place: int) -> bytes:
    return project + which + place.to_bytes(4, "big")
