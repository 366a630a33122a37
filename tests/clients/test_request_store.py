"""The durable requests of a gateway."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from clients.gateway import request_store
from clients.gateway.request_store import Outcome, RequestKind, RequestStore, StoredSampler

MODEL = "session:train:0"


def test_the_oldest_samplers_of_an_owner_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_store, "SAMPLERS_OF_OWNER_MAX", 3)
    with closing(RequestStore(tmp_path)) as store:
        for owner in ("anna", "ben"):
            for number in range(5):
                store.add_sampler(StoredSampler(f"{owner}:sample:{number}", owner, bytes(32), 0))
        for owner in ("anna", "ben"):
            kept = [store.find_sampler(f"{owner}:sample:{number}") is not None for number in range(5)]
            assert kept == [False, False, True, True, True]


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
