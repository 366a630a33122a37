"""Small benchmarks measure their stated quantities.

They are: reviews as preferences, application of blocks, curation, tables, options of optimizers, and steps of programs.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from benchmarks import apply, grokking, request_times, reviews, rlhf_text, tables, tinker, tolerance
from benchmarks.curation import ASKED, PROJECT_TASKS, VOTES, Batches, Chain, Closing, Figures, Filler, timed, verdicts
from benchmarks.request_times import RequestTimes, read_times
from benchmarks.simulated import Rounds, engine_of, text_file, trainer_key
from benchmarks.verdicts import MISSED
from curation.ledger.curation_state import CurationState
from ledger.tables import Table, sparse_merkle_tree
from peer.worker.supervisor import WorkerSupervisor
from rlhf.data import preference_set_statistics
from tests.waiting import patience
from training.data.tokenizer import ByteTokenizer
from training.job_spec import BF16_TOLERANCE, AuditMode, OuterOptimizerKind, Precision
from training.replicated import codec, error_feedback
from training.replicated.replicated_model import ReplicatedModel
from training.transformer import ModelSpec
from training.worker_protocol import AuditRequest, PingRequest, WorkerFailed

COUNT = 40
LONGEST = 1_000  # tokens: no pair is left out
SAID = {1: "What a good film this is! I liked every minute of it", 0: "What a bad film this was! I hated every minute of it"}


def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("text", "label", "source"))
        for number in range(COUNT):
            label = number % 2
            table.writerow((f"Number {number}.<br />" + f"{SAID[label]}, and {number} more. " * 8, label, "imdb"))
        table.writerow(("short and elsewhere", 1, "rotten_tomatoes"))
    return path


def test_preferences_of_reviews(tmp_path: Path) -> None:
    ours, others = reviews.halves(corpus(tmp_path))
    assert len(ours) + len(others) == COUNT and len(ours) > 5 < len(others), "only those that are long"
    assert not {review.text for review in ours} & {review.text for review in others}
    assert all(review.likes == ("good" in review.text) and "<br" not in review.text for review in ours)
    made = [list(reviews.pairs(ours, 200, wrong, ByteTokenizer(), LONGEST)) for wrong in (0, 250)]
    assert all("bad" not in pair.first and "good" not in pair.second for pair in made[0])
    turned = [(a.first, a.second) == (b.second, b.first) for a, b in zip(*made, strict=True)]
    assert 30 < sum(turned) < 70, "a quarter of 200"
    kind = [not {"bad", "hated", "was!"} & set(pair.prompt.split()) for pair in made[0]]
    assert 60 < sum(kind) < 140, "prompts come from either side alike"
    longest = max(len(pair.prompt + response) for pair in made[0] for response in (pair.first, pair.second))
    assert len(list(reviews.pairs(ours, 20, 0, ByteTokenizer(), longest - 1))) == 20, "too long ones are passed over"


def test_a_judge_prefers_what_reads_kinder(tmp_path: Path) -> None:
    samples = [("good good", "bad bad"), ("good film", "good film"), ("bad", "good")]
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join([json.dumps({"prompt": "", "policy": ours, "reference": theirs}) for ours, theirs in samples]))
    judge = np.zeros(preference_set_statistics.FEATURES)
    judge[list(preference_set_statistics.hash_features("good"))] = 1.0
    assert rlhf_text.judged(judge, file) == {"preferred": 0.5, "distinct_2": 1.0, "reference_distinct_2": 1.0}
    assert rlhf_text.distinct(["a b a b"]) == 2 / 3 and rlhf_text.distinct(["a"]) == 0.0


def test_what_is_set_of_the_jobs_counts() -> None:
    usual, said = rlhf_text.settings([]), rlhf_text.settings(["beta=0.3", "reward.rounds=7"])
    assert "base.vocabulary=8192" in usual and "reward.rounds=168" in usual and "stop_token=none" in usual
    assert "beta=0.3" in said and "reward.rounds=7" in said and "reward.rounds=168" not in said


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
    assert (
        said(
            *good[:2],
            greedy,
            replace(good[3], total_seconds=0.07),
            replace(largest, total_seconds=9.0, anonymous_megabytes=201.0),
        )[3:]
        == ["MISSED"] * 4
    )


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
    lines = list(
        verdicts(replace(held, batches=slow, daemon=replace(daemon, closed_mb=400.1, close_seconds=5.1, paid=daemon.paid - 1)))
    )
    assert [line.startswith(MISSED) for line in lines] == [True, True, True, True, True, False]
    assert list(verdicts(replace(held, batches=lost)))[-1].startswith(MISSED)


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


# A pair of round 7: a pass and a proposal of the gateway, and two re-executions that overlap.
GATEWAY = (
    RequestTimes("pass", 7, 100.5, 102.0),
    RequestTimes("propose", 7, 102.5, 103.0),
    RequestTimes("ping", None, 100.0, 109.0),
)
OTHERS = (
    RequestTimes("audit", 7, 104.0, 107.0),
    RequestTimes("audit", 7, 105.0, 106.0),
    RequestTimes("audit", 6, 100.0, 109.0),
)


def test_the_parts_of_a_pair_are_its_time_and_other_rounds_are_not_in_it() -> None:
    pair = tinker.Pair(100.0, 108.0, 7, 0)
    assert list(tinker.phases_of(pair, GATEWAY, OTHERS).values()) == [0.5, 1.5, 0.5, 0.5, 1.0, 3.0, 1.0]
    assert tinker.outside_seconds(pair, (*GATEWAY, *OTHERS)) == 0.5 + 0.5 + 1.0 + 1.0
    alone = tinker.phases_of(pair, GATEWAY, ())
    assert list(alone.values()) == [0.5, 1.5, 0.5, 0.5, 0.0, 0.0, 5.0]
    late = (*OTHERS, RequestTimes("audit", 7, 107.5, 120.0), RequestTimes("audit", 7, 109.0, 121.0))  # the vote needs neither
    assert list(tinker.phases_of(pair, GATEWAY, late).values()) == [0.5, 1.5, 0.5, 0.5, 1.0, 4.0, 0.0]
    assert tinker.outside_seconds(pair, (*GATEWAY, *late)) == 0.5 + 0.5 + 1.0 + 0.5
    assert tinker.outside_seconds(pair, ()) == pair.seconds


@pytest.mark.real("processes")
async def test_a_worker_writes_down_when_it_computed_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "times"
    assert read_times(file) == []
    monkeypatch.setenv(request_times.FILE, str(file))
    worker = WorkerSupervisor(command=[sys.executable, "-m", "benchmarks.request_times", request_times.WORKER])
    with patience():
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            before = time.monotonic()
            await worker.ask(PingRequest())
            after = time.monotonic()
            with pytest.raises(WorkerFailed):
                await worker.ask(AuditRequest(bytes(32), 7, bytes(32), "no model", "no payload", None, None, None))
            nursery.cancel_scope.cancel()
    ping, audit = read_times(file)
    assert (ping.request, ping.round, audit.request, audit.round) == ("ping", None, "audit", 7)
    assert before <= ping.began <= ping.ended <= after <= audit.began


def test_every_bound_of_a_program_s_steps_is_held_and_missed() -> None:
    torch = tinker.Row(tinker.TORCH, 0, 30, 0.2, 0.2, loss=100.0)
    alone = tinker.Row(tinker.ALONE, 0, 30, 9.0, 9.0, 9.0, loss=100.1)  # a single peer has no bound of time
    row = tinker.Row("network of 4", 0, 30, 1.5, 1.0, 0.6, loss=50.0)
    idle = tinker.IdleRow(0, 32, 60.0, 0, 0, 8, 0, [1.0], [1.0], [9.0], [9.0])
    lines = list(tinker.verdicts([torch, alone, row], [idle]))
    assert len(lines) == 5 and not any(line.startswith(MISSED) for line in lines)
    worse = [replace(torch, loss=99.9), alone, replace(row, seconds=1.501, outside_seconds=0.601, refused_rounds=1)]
    idles = [replace(idle, rounds=1), replace(idle, requests=1)]
    lines = list(tinker.verdicts(worse, idles))
    assert len(lines) == 6 and all(line.startswith(MISSED) for line in lines)


@pytest.mark.parametrize("arm", grokking.ADDITION_ARMS)
def test_rows_of_the_addition_have_one_start_and_differ_by_their_option_alone(arm: str) -> None:
    row, again = (grokking.addition(arm, 0, 1.0, 2 * grokking.EVALUATED_STEPS) for _ in range(2))
    assert replace(row, seconds=0.0) == replace(again, seconds=0.0)
    assert (row.steps, row.passes) == (20, 40 if arm == "sam" else 20) and row.generalized is None
    specs = [replace(grokking.ADDITION, **options) for options in grokking.ADDITION_ARMS.values()]  # type: ignore[arg-type]
    assert len({spec.encode() for spec in specs}) == len(specs)
    examples, held_out = grokking.pairs(0)
    sets = [set(map(tuple, part.tolist())) for part in (examples, held_out)]
    assert not sets[0] & sets[1] and len(sets[0] | sets[1]) == grokking.MODULUS**2 and len(sets[0]) == grokking.MODULUS**2 // 2


def test_an_easy_sum_is_seen_to_be_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a held-out part that differs from the examples, both counts are the same step."""
    examples, _ = grokking.pairs(0)
    monkeypatch.setattr(grokking, "pairs", lambda seed: (examples, examples))
    row = grokking.addition("plain", 0, 0.0, 300)
    assert row.learned == row.generalized is not None and grokking.cells(row)[1] == str(row.generalized)
    assert grokking.cells(grokking.addition("plain", 0, 0.0, 10))[1] == "not within 10"


def test_rows_on_text_take_equal_steps_or_equal_passes() -> None:
    rows = {arm: grokking.on_text(arm, 0, 0.1, 1) for arm in ("plain", "sam, equal passes")}
    assert {arm: (row.steps, row.passes) for arm, row in rows.items()} == {"plain": (10, 10), "sam, equal passes": (5, 10)}
    bits = {arm: row.bits for arm, row in rows.items()}
    assert all(value is not None and 1 < value < 8 for value in bits.values()) and len(set(bits.values())) == 2


def test_rows_are_planned_at_equal_weight_decay() -> None:
    arms: dict[tuple[str, int, float], list[str]] = {}
    for task, arm, seed, decay in grokking.planned(grokking.TASKS, (0, 1)):
        arms.setdefault((task, seed, decay), []).append(arm)
    assert {place[0]: of for place, of in arms.items()} == {"addition": [*grokking.ADDITION_ARMS], "text": [*grokking.TEXT_ARMS]}
    assert len(arms) == 2 * (len(grokking.WEIGHT_DECAYS) + 1) and all("plain" in of for of in arms.values())


@pytest.mark.parametrize("times", [1, 2])
def test_a_lie_uses_the_tolerance_of_audited_bf16_and_goes_against_the_descent(times: int, tmp_path: Path) -> None:
    spec = tolerance.spec_of(AuditMode.SAMPLED, Precision.BF16, 0, 20)
    rounds, key = Rounds(spec, engine_of(spec, text_file(None, tmp_path))), trainer_key(3)
    own = rounds.update(key).delta
    payload, moved = tolerance.false_payload(rounds, key, own, own, times)
    said = codec.decode_payload(payload, rounds.model.header(key), rounds.model.layout)
    distance, norm = error_feedback.payload_distances(said, own)
    assert 0.9 * times * BF16_TOLERANCE < distance / norm <= times * BF16_TOLERANCE and 0.05 < moved < 0.2
    honest = codec.decode_payload(rounds.encode(key, own), rounds.model.header(key), rounds.model.layout)
    assert float(own @ said.dequantize()) < 0.99 * float(own @ honest.dequantize())
