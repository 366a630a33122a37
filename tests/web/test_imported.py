"""The digest by which a peer knows tasks that it has imported before."""

from __future__ import annotations

from curation.import_export.task_import import TaskWithGold
from curation.service.project_author import digest_tasks
from curation.tasks.task_pages import AnnotationTask


def test_texts_and_items_in_their_order_are_the_same_tasks_whatever_their_labels() -> None:
    plain = [TaskWithGold(AnnotationTask("a", ("x", "y")), None), TaskWithGold(AnnotationTask("b"), None)]
    labelled = [TaskWithGold(AnnotationTask("a", ("x", "y"), (1,)), None), TaskWithGold(AnnotationTask("b"), (0,))]
    assert digest_tasks(plain) == digest_tasks(labelled)
    others = [plain[::-1], plain[:1], [*plain, plain[1]], [TaskWithGold(AnnotationTask("a", ("y", "x")), None), plain[1]]]
    assert digest_tasks(plain) not in map(digest_tasks, others)
