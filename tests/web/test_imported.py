"""The digest by which a peer knows tasks that it has imported before."""

from __future__ import annotations

from curation.importing import Given
from curation.tasks import Task
from peer.serving.imported import digest_of


def test_texts_and_items_in_their_order_are_the_same_tasks_whatever_their_labels() -> None:
    plain = [Given(Task("a", ("x", "y")), None), Given(Task("b"), None)]
    labelled = [Given(Task("a", ("x", "y"), (1,)), None), Given(Task("b"), (0,))]
    assert digest_of(plain) == digest_of(labelled)
    others = [plain[::-1], plain[:1], [*plain, plain[1]], [Given(Task("a", ("y", "x")), None), plain[1]]]
    assert digest_of(plain) not in map(digest_of, others)
