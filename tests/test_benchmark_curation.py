"""That the benchmark of curation measures what it says, and notices what is missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.curation import ASKED, PROJECT_TASKS, VOTES, Batches, Chain, Closing, Figures, Filler, timed, verdicts
from benchmarks.verdicts import MISSED
from curation.ledger.curation_state import CurationState


def test_a_small_network_is_filled_and_takes_batches_as_a_large_one(tmp_path: Path) -> None:
    Filler(tmp_path / "peer", annotators=1_000, answers=200 * VOTES, open_tasks=3_000).fill()
    chain = Chain(tmp_path / "peer")
    before = chain.ledger.state.module_state(CurationState)
    assert (before.settled, before.annotations, len(before.assignments), before.annotators_count) == (200, 1_000, 1_000, 1_000)
    batches = timed(chain, annotators=1_000, count=2)
    chain.store.close()
    assert len(batches.batch_ms) == 2 and batches.acted == batches.statements == 2 * 512
    assert batches.parts_ms["author"] > batches.parts_ms["propose"]


def test_what_is_missed_is_said() -> None:
    daemon = Closing(100.0, 400.0, 300.0, 60.0, 70, 5.0, 90.0, 80.0, 90.0, ASKED.price * PROJECT_TASKS)
    batches = Batches([200.0], 190.0, {}, 512, 512)
    held = Figures(10_000, 1_000_000, 100_000, 400.0, 100.0, 3.0, batches, daemon)
    assert not any(line.startswith(MISSED) for line in verdicts(held))
    slow, lost = replace(batches, batch_ms=[206.0]), replace(batches, acted=511)
    worse = replace(daemon, closed_mb=400.1, close_seconds=5.1, paid=daemon.paid - 1)
    lines = list(verdicts(replace(held, batches=slow, daemon=worse)))
    assert [line.startswith(MISSED) for line in lines] == [True, True, True, True, True, False]
    assert list(verdicts(replace(held, batches=lost)))[-1].startswith(MISSED)
