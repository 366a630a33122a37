from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import apply
from training.job_spec import OuterOptimizerKind
from training.replicated.replicated_model import ReplicatedModel
from training.transformer import ModelSpec


def test_a_round_is_measured_as_a_whole_and_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(apply.MODELS, "tiny", ModelSpec(width=16, layers=1, heads=2, kv_heads=1, hidden=16))
    case = apply.Case(4, 1, "tiny", 4, outer=OuterOptimizerKind.ADAMW)
    apply.make(case, tmp_path, seed=1)
    row = apply.measure(case, tmp_path)
    assert row.root == ReplicatedModel.open(tmp_path / "next").root.hex()
    assert {"decode", "plan", "values", "outer step", "hash"} <= set(row.seconds)
    assert row.total_seconds > 0 and row.peak_extra_megabytes > 4 * row.payload_bytes / 1e6
    assert row.encode_extra_megabytes > 0 and row.total_wall_seconds > 0 and row.encode_wall_seconds > 0


def test_every_bound_of_a_round_is_held_and_missed() -> None:
    def row(n: int, parameters: int, seconds: float, megabytes: float, outer: str = "nesterov") -> apply.Row:
        common = {"bits": 1, "rule": "arc-nnm-trim", "outer": outer, "payload_bytes": 1}
        times = {"total_seconds": seconds, "total_wall_seconds": seconds, "encode_seconds": 0.0, "encode_wall_seconds": 0.0}
        return apply.Row(n, parameters, **common, **times, peak_extra_megabytes=1.0, encode_extra_megabytes=megabytes)

    def said(*rows: apply.Row) -> list[str]:
        return [aim.verdict(list(rows)).split()[0] for aim in apply.AIMS]

    assert said() == ["not"] * len(apply.AIMS)
    large, every_step, largest = (4, 100_000_000), (4, 1_000_000, 0.05, 1.0, "adamw"), row(4, 300_000_000, 7.0, 1.0)
    good = (row(13, 4_200_000, 0.9, 1.0), row(*large, 9.0, 190.0), row(100, 1_000_000, 1.0, 1.0), row(*every_step), largest)
    assert said(*good) == ["held"] * len(apply.AIMS)
    assert said(row(13, 4_200_000, 1.1, 1.0), *good[1:])[0] == "MISSED"
    assert said(good[0], row(*large, 11.0, 210.0), *good[2:])[1:3] == ["MISSED", "MISSED"]
    greedy = replace(good[2], peak_extra_megabytes=30.0)
    heavy = replace(largest, total_seconds=9.0, anonymous_megabytes=201.0)
    assert said(*good[:2], greedy, replace(good[3], total_seconds=0.07), heavy)[3:] == ["MISSED"] * 4
