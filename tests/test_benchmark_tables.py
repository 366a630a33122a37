"""That the benchmark of tables measures what it says, and notices what is missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.verdicts import MISSED
from ledger.tables import Table, sparse_merkle_tree


def test_a_small_table_is_measured_as_a_large_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    tables.fill(path, 2_000)
    figures = tables.measure(path, 2_000, changes=100, blocks=3)
    assert len(figures.block_ms) == 3 and figures.block_ms == sorted(figures.block_ms)
    assert figures.root_ms + figures.commit_ms > 0
    assert 0 < figures.proof_bytes <= figures.proof_bytes_max
    assert figures.ranges == 1 and figures.range_bytes_max > 2_000 * 70
    held = list(tables.verdicts(replace(figures, memory_mb=200.0, block_ms=[150.0], proof_bytes_max=1_000)))
    assert len(held) == 3 and not any(line.startswith(MISSED) for line in held)
    worse = replace(figures, memory_mb=200.1, block_ms=[150.1], proof_bytes_max=1_001)
    assert all(line.startswith(MISSED) for line in tables.verdicts(worse))


@pytest.mark.parametrize("seed", range(50))
def test_a_history_holds(seed: int) -> None:
    assert tables.history(seed) is None


def test_a_history_notices_rows_that_stay_and_roots_that_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Table.with_rows
    monkeypatch.setattr(Table, "with_rows", lambda self, rows: real(self, {k: v for k, v in rows.items() if v is not None}))
    assert "other rows than the dictionary's" in str([tables.history(seed) for seed in range(20)])
    monkeypatch.undo()
    joined = sparse_merkle_tree.join_nodes
    monkeypatch.setattr(
        sparse_merkle_tree, "join_nodes", lambda left, right, read: joined(left, right, read) if left and right else left or right
    )
    assert "another root" in str([tables.history(seed) for seed in range(100)])
