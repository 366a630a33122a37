"""Derivation of the pairs that people decided in a project. Every voter derives the same pairs from equal states and pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from curation.estimation.rank_aggregation import FIRST, TIE
from curation.import_export.export_formats import preference_share
from curation.ledger.curation_state import CurationState, TaskPageRow, TaskRow
from curation.tasks.task_pages import TaskPageBlob, assignment_id
from rlhf.data.preference_sets import PERMILLE, PreferencePair
from rlhf.ledger.preference_set_attestation import decided_pages

PageOf = Callable[[bytes, TaskPageRow], TaskPageBlob | None]


def decided_pairs(state: CurationState, project: bytes, height: int, page: PageOf) -> list[PreferencePair]:
    """Return the pairs of a project that people decided up to `height`, sorted by id. Equal states give equal pairs.

    `page` returns the tasks of a page by its key and row, or None if the blob is not a valid page. Pairs with two bad responses
    and redacted pairs are left out. p is the first response's share of the votes, where a tie counts as half. The labelled
    response gets at least 1/2, because the label weighs the votes and can change when the project closes. It gets 1 if a
    reviewer decided without votes. Raises `UserError` if the project does not compare pairs.
    """
    pairs: list[PreferencePair] = []
    for key, entry, settled in decided_pages(state, project, height):
        tasks = page(key, entry)
        if tasks is None:
            continue
        for index, task, row in settled:
            text = tasks.entries[index].task
            if text is not None and all(text.items):
                first, second = text.items
                pairs.append(PreferencePair(task, text.text, first, second, _share(state, task, row)))
    return sorted(pairs, key=lambda pair: pair.id)


def _share(state: CurationState, task: bytes, row: TaskRow) -> int:
    assert row.label is not None
    label = row.label[0]
    if label == TIE:
        return PERMILLE // 2
    votes = (state.assignments.get_record(assignment_id(task, annotator)) for annotator in row.annotators)
    said = preference_share(label, [vote.answer[0] for vote in votes if vote is not None and vote.answer is not None])
    permille = math.floor(PERMILLE * said + Fraction(1, 2))
    return permille if label == FIRST else PERMILLE - permille
