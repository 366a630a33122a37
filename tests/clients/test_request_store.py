"""The durable requests of a gateway."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from clients.gateway.request_store import Outcome, RequestKind, RequestStore

MODEL = "session:train:0"


def test_the_bodies_of_a_step_are_deleted_once(tmp_path: Path) -> None:
    """Earlier rows stay untouched: SQLite would read their results, which are as large as the batches of all steps."""
    with closing(RequestStore(tmp_path)) as store:
        store.add_model(MODEL, "session", "")
        for number in (1, 2, 4):
            store.add_request(MODEL, number, RequestKind.GRADIENT, b"body")
            store.set_outcome(MODEL, number, Outcome.DONE, b"losses")
        store.drop_bodies(MODEL, 3)
        assert [store.read_payload(MODEL, number) for number in (1, 2, 4)] == [b"", b"", b"body"]
        found = [store.find_outcome(MODEL, number) for number in (1, 2, 4)]
        assert [each and (each.payload, each.result) for each in found] == [(b"", b"losses")] * 3
        before = store._database.total_changes
        store.drop_bodies(MODEL, 5)
        assert store._database.total_changes == before + 1
