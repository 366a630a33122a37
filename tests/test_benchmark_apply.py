from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import apply
from training.replicated.model import ReplicatedModel
from training.spec import ModelSpec, Outer


def test_a_round_is_measured_as_a_whole_and_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(apply.MODELS, "tiny", ModelSpec(width=16, layers=1, heads=2, kv_heads=1, hidden=16))
    case = apply.Case(4, 1, "tiny", "sparse k=64", outer=Outer.ADAMW)
    apply.make(case, tmp_path, seed=1)
    row = apply.measure(case, tmp_path)
    assert row.root == ReplicatedModel.open(tmp_path / "next").root.hex()
    assert {"decode", "plan", "values", "outer step", "hash"} <= set(row.seconds)
    assert row.total_seconds > 0 and row.peak_extra_megabytes > 4 * row.payload_bytes / 1e6
    assert all(aim.verdict([row]) for aim in apply.AIMS)
