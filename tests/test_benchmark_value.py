from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import provenance, round, value
from benchmarks.codec import Budget
from benchmarks.simulated import text_file
from benchmarks.value import ALL, ALONE, FULL, NONE, SAMPLED, VOUCHED, Costs, Network, Row, Run
from protocol.errors import UserError
from training.job_spec import AggregationRule, InnerOptimizerKind

TINY = ("width=16", "layers=1", "heads=2", "kv_heads=1", "hidden=16", "context=16", "batch=2")
COSTS = Costs(own=1.0, replay=1.0, apply=0.1, waiting=0.4)
ADAMW = {"inner": InnerOptimizerKind.ADAMW, "inner_rate": 3e-3}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return text_file(None, tmp_path)


@pytest.mark.parametrize(
    ("network", "rounds"),
    [
        (Network("local", FULL, 4), 22),  # 100 / (1.5 + 3)
        (Network("local", VOUCHED, 4), 40),  # 100 / (1.5 + 1)
        (Network("local", SAMPLED, 4), 52),  # 1.5 rounds + 27 / 8 + 14 / 2 + 11, of 41 sampled rounds
        (Network("local", FULL, 7), 13),
        (Network("local", VOUCHED, 7), 28),
        (Network("local", SAMPLED, 7), 46),  # 1.5 rounds + 23 / 8 + 12 / 2 + 2 * 11, of 35
        (Network("local", VOUCHED, 13), 18),
        (Network("per-step", SAMPLED, 4), 52),
    ],
)
def test_rounds_follow_from_the_time_of_a_machine(network: Network, rounds: int) -> None:
    assert value.rounds_within(100.0, COSTS, network.replays) == rounds
    for count, fits in ((rounds, True), (rounds + 1, False)):
        assert (sum(COSTS.spent(count, network.replays(count)).values()) <= 100.0) == fits


def test_a_time_without_a_single_round_is_an_error() -> None:
    with pytest.raises(UserError, match=r"one round takes 4\.5 s, and a machine has 4\.4 s"):
        value.rounds_within(4.4, COSTS, Network("local", FULL, 4).replays)
    assert value.rounds_within(4.6, COSTS, Network("local", FULL, 4).replays) == 1


@pytest.mark.parametrize(
    ("peers", "cores", "seconds", "waiting"),
    [(4, 2, 0.20, 0.15), (4, 8, 0.20, 0.20), (7, 2, 0.35, 0.225), (7, 2, 0.10, 0.05)],
)
def test_daemons_that_queue_for_cores_are_not_waited_for(peers: int, cores: int, seconds: float, waiting: float) -> None:
    free = round.Row("", peers, 0, 0, 0, seconds=seconds, daemon_seconds=0.04, worker_seconds=0.01)
    assert value.waiting_seconds(free, cores) == pytest.approx(waiting)
    with pytest.raises(UserError, match="full disk"):
        value.waiting_seconds(replace(free, seconds=None, reason="full disk"), cores)


@pytest.mark.parametrize(
    ("preset", "audit", "rule"),
    [
        ("local", FULL, AggregationRule.MEAN),
        ("local", VOUCHED, AggregationRule.MEAN),
        ("local", SAMPLED, AggregationRule.ARC_NNM_TRIM),
        ("per-step", FULL, AggregationRule.MEAN),
        ("per-step", SAMPLED, AggregationRule.CENTERED_CLIPPING),
    ],
)
def test_a_network_has_the_rule_of_its_audits_and_a_schedule_of_its_rounds(
    preset: str, audit: str, rule: AggregationRule
) -> None:
    spec = Network(preset, audit, 7).spec(200, 3, value.GRIDS[preset][0])
    assert (spec.rule, spec.byzantine_max, spec.seed) == (rule, 2, 3)
    assert (spec.rounds, spec.warmup_rounds, spec.inner_rate) == (200, 10, value.GRIDS[preset][0]["inner_rate"])
    assert spec.compression_warmup_rounds == spec.usual_compression_warmup_rounds


def test_both_sides_are_tuned_on_as_many_settings() -> None:
    grids = [[tuple(rates.items()) for rates in line] for line in value.GRIDS.values()]
    assert {len(set(line)) for line in grids} == {8} == {2 * len(line) for line in value.LINES.values()}


@pytest.mark.parametrize(
    "run",
    [
        Run(1, None, 30, ADAMW, 0),
        Run(1, None, 30, {"inner": InnerOptimizerKind.MUON, "inner_rate": 1.2e-2}, 0),
        Run(4, None, 30, {"shape": "batch", **ADAMW}, 0),
        *(Run(4, Network(preset, SAMPLED, 4), 5, value.GRIDS[preset][0], 0) for preset in value.PRESETS),
        Run(4, Network("local", VOUCHED, 4), 5, value.GRIDS["local"][0], 0, value.LIE),
    ],
    ids=lambda run: f"{run.row} {run.rates.get('inner', '')} {run.attack}",
)
def test_every_kind_of_row_trains(run: Run, text: Path) -> None:
    assert 0 < value.nats([text], TINY, run) < 6.1


def test_all_samples_in_larger_batches_are_other_training_than_one_share(text: Path) -> None:
    one = value.nats([text], TINY, Run(1, None, 30, ADAMW, 0))
    assert value.nats([text], TINY, Run(4, None, 30, {"shape": "steps", **ADAMW}, 0)) == one, "as many steps of the same batches"
    assert value.nats([text], TINY, Run(4, None, 30, {"shape": "batch", **ADAMW}, 0)) != one


def test_liars_are_rejected_by_vouched_audits(text: Path) -> None:
    network = Network("local", VOUCHED, 4)
    lied_to = value.nats([text], TINY, Run(4, network, 5, value.GRIDS["local"][0], 0, value.LIE))
    three = value.train(Budget(text, 5, 3, TINY), network.spec(5, 0, value.GRIDS["local"][0], TINY))[0]
    assert lied_to == three, "the model of the three honest machines"


def test_costs_are_those_of_a_machine_with_the_given_step(text: Path) -> None:
    network, budget = Network("local", FULL, 4), Budget(text, 30, 1, TINY)
    costs = value.compute_costs(network, value.GRIDS["local"][0], budget, 1_000.0, 1e6)
    assert min(costs.own, costs.replay) > 1_000.0, "ten steps of 1,000 s, whatever this machine takes for them"
    assert 0 < costs.apply == pytest.approx(1e6 - costs.waiting), "application is no part of waiting"


# Verdicts -------------------------------------------------------------------------------------------------------------


def table(vouched: float, sampled: float) -> list[Row]:
    def row(name: str, audit: str, n: int, nats: float, **other: str) -> Row:
        return Row(name, audit, n, 0, nats, 10, 100, 1.0, **other)  # type: ignore[arg-type]

    return [
        row(ALONE, NONE, 1, 1.7),
        row(ALL, NONE, 4, 1.5),
        row("local", FULL, 4, 2.0),
        row("per-step", FULL, 4, 2.5),
        row("local", VOUCHED, 4, vouched),
        row("per-step", VOUCHED, 4, 2.4),
        row("local", SAMPLED, 4, sampled),
        row("per-step", SAMPLED, 4, 2.3),
        row("local", SAMPLED, 7, 1.6),
        row("local", SAMPLED, 7, 9.0, attack=value.LIE),
        row("local", SAMPLED, 4, 0.1, text="programs"),
    ]


def missed(rows: list[Row]) -> list[str]:
    return [line for line in value.verdicts(rows) if line.startswith("MISSED")]


def test_a_network_is_held_to_one_machine_and_vouching_to_full_audits() -> None:
    assert missed(table(1.9, 1.65)) == [] and len(list(value.verdicts(table(1.9, 1.65)))) == 3
    assert missed(table(1.93, 1.65)) == [
        "MISSED vouched (local), n=4: at least 0.08 nats below full (local): -0.070; the best row is local, sampled, 7"
    ]
    assert missed(table(1.9, 1.75)) == [
        "MISSED sampled (local), n=4: below one machine alone: +0.050, -25% of the way to all samples; "
        "the best row is local, sampled, 7"
    ]
    assert list(value.verdicts([])) == []


def test_the_better_preset_counts() -> None:
    better = [
        replace(row, heldout_nats=1.0) if row.row == "per-step" and row.audit == SAMPLED else row for row in table(1.9, 1.9)
    ]
    assert missed(better) == []


def test_what_griefers_have_undone_counts_as_well() -> None:
    rows = table(1.9, 1.65)
    griefed = [replace(row, attack=value.GRIEFERS, heldout_nats=1.75) for row in rows if row.audit == SAMPLED and row.n == 4]
    (line,) = missed(rows + griefed)
    assert line.startswith("MISSED sampled (local), n=4, griefers: below one machine alone: +0.050")


def test_griefers_leave_the_same_time_for_fewer_rounds() -> None:
    assert 0.04 < Network("local", SAMPLED, 4).undone() < 0.06 and Network("local", VOUCHED, 4).undone() == 0


def test_the_mean_of_the_seeds_counts() -> None:
    def twice(nats: float) -> list[Row]:
        return [replace(row, seed=1, heldout_nats=nats) for row in table(1.9, 0.0)[6:7]]

    assert missed(table(1.9, 1.65) + twice(1.74)) == [] != missed(table(1.9, 1.65) + twice(1.76))


def test_a_run_goes_on_where_it_was_ended_and_measures_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, trained = tmp_path / "value.json", list[Run]()
    ends = [50, 60, 70, 0]  # in the grids, after them, in the rows, not at all

    def nats(_: object, __: object, run: Run) -> float:
        if len(trained) == ends[0]:
            raise KeyboardInterrupt
        trained.append(run)
        return 1.0 + len(trained) / 1_000

    free = round.Row("free", 4, 1, 1, 0, seconds=0.2, daemon_seconds=0.1, worker_seconds=0.1)
    monkeypatch.setattr(provenance, "_commit", lambda: "one")
    monkeypatch.setattr(provenance, "provenance", lambda started: {"commit": "one"})
    times = {"step_seconds": lambda *_: 0.1, "free_round": lambda *_: free, "compute_costs": lambda *_: COSTS}
    monkeypatch.setattr(Network, "undone", lambda self: 0.1)
    for name, made in {**times, "nats": nats}.items():
        monkeypatch.setattr(value, name, made)
    command = ["value", "--json", str(file), "--seeds", "0", "1", "--peers", "4", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--resume"])
    while ends[0]:
        with pytest.raises(KeyboardInterrupt):
            value.main()
        ends.pop(0)
    for name in times:
        monkeypatch.setattr(value, name, None)
    assert value.main() in (0, 1)
    rows = json.loads(file.read_text())["rows"]
    assert len(trained) == len({(run.place, run.rounds, str(run.rates)) for run in trained}) == 60 + len(rows)
    assert {row["seed"] for row in rows} == {0, 1} and [row["heldout_nats"] for row in rows] == [
        1.0 + number / 1_000 for number in range(61, 61 + len(rows))
    ]


@pytest.mark.large
@pytest.mark.real("daemons, processes")
def test_a_row_names_what_its_machines_spend_their_time_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "value.json"
    command = ["value", "--json", str(file), "--seeds", "0", "--peers", "4", "--steps", "300", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--step-seconds", "0.5", "--set", *TINY])
    assert value.main() in (0, 1)
    said, figures = capsys.readouterr().out, json.loads(file.read_text())
    assert said.count("grid of") == len(value.KINDS) + 2 and ("held" in said or "MISSED" in said)
    kinds = {(row["row"], row["audit"], row["n"], row["seed"]) for row in figures["rows"]}
    networks = {(preset, audit, 4, 0) for preset, audit in value.KINDS}
    assert kinds == {(ALONE, NONE, 1, 0), (ALL, NONE, 4, 0)} | networks
    for row in figures["rows"]:
        spent = sum(row[f"{what}_seconds"] for what in ("own", "replay", "apply", "waiting"))
        assert row["row"] == ALL or 0 < spent <= figures["budget_seconds"] * 1.001
        assert (row["row"] in value.PRESETS) == (row["waiting_seconds"] > 0)
