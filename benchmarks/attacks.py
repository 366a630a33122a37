"""Effects of liars: `python -m benchmarks.attacks --json FILE`. There are three tables.

Digits: accuracy of a small network on handwritten digits under every attack that no check can see, without any audit. The table
has each codec and memory under the default rule of jobs. The plain mean is a baseline, which shows the effect of each attack.
Other rules only appear under the strongest attack, for comparison. Each figure is the worst of the seeds.

GPT: every attack of the suite on a language model, relative to a clean run of the honest trainers alone. It covers the presets of
local steps and of one step per round, with full, sampled and no audits. A further table has the trigger that some attacks teach.
The start of late liars is tuned on a seed that is not reported. Sampled audits draw auditors at random, so each attack with a
target runs with twenty draws on the first seed.

Detection: rounds until sampled audits suspend a trainer that cheats in two of five steps or in one step per round, and the rounds
that auditors replay. It covers the rate of each preset, and local steps at the rate of one step per round. It trains no model.

`--resume` continues an interrupted run of the same commit and settings from its file.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import attacks_detection as on_detection
from benchmarks import attacks_digits as on_digits
from benchmarks import attacks_gpt as on_gpt
from benchmarks.attack_suite import ATTACKS, IN_TURN, LATE, TARGETED, VOTES
from benchmarks.attacks_detection import Detection, FoundLazy, Laziness
from benchmarks.attacks_gpt import Plan
from benchmarks.attacks_trigger import Trigger
from benchmarks.codec import TUNING_SEED, as_usual
from benchmarks.parallel import JOBS, side_by_side
from benchmarks.provenance import earlier, write
from benchmarks.settings import MEASURED, with_settings
from benchmarks.simulated import text_file
from benchmarks.verdicts import conclude, verdict
from consensus.voter_set import faults_tolerated
from demo.network_demo import map_signals_to_interrupt
from ledger.audits import sortition
from protocol.errors import UserError
from scenarios.trials import COUNT, Parser, duration
from training import safe_settings
from training.job_spec import AUDIT_RATE, PRESETS, AggregationRule, AuditMode, JobSpec

TABLES = ("detection", "digits", "gpt")
PEERS = (4, 7, 10)
LIARS_DRAWN = 1_000  # per row of the detection table
LIVES_DRAWN = 200  # per row of the table with lazy auditors
ROUNDS = {"local": 30, "per-step": 120, "estimates": 120}  # of the GPT table, by preset
WORSE_MAX = 1.02  # held-out loss, relative to a clean run of honest trainers
TRIGGER_MAX = 0.01  # share of prompts above that of the clean run, with full audits
DRAWS = 20  # models per attack with a target, with sampled audits, for the first seed
PLANTED, PLANTED_MAX = 0.05, 3 / 20  # share of prompts above which a model is planted; most such models
LATE_ROUNDS = {"local": (5, 8, 12), "per-step": (10, 20, 40)}  # before the closing rounds, in which late liars may lie
DRAWS_TUNED = 3  # for each of these
COLUMNS = {column.name: column for column in on_digits.COLUMNS}
ACCURATE = 95.0  # per cent; minimum of the settings that a job may name
COLLAPSED = 50.0  # per cent; an attack that leaves the plain mean more has no effect


@dataclass
class Digits:
    column: str
    rule: str
    attack: str
    bits_per_parameter: float  # without the header of a payload
    bits_with_header: float
    by_seed: list[float]  # accuracy, per cent

    @property
    def place(self) -> tuple[str, str, str]:
        return self.rule, self.column, self.attack

    @property
    def worst(self) -> float:
        return min(self.by_seed)


@dataclass
class Gpt:
    preset: str
    attack: str
    peers: int
    liars: int
    audit: str
    ratio: float  # held-out loss over that of the clean run, mean over the runs that trained to the end
    ratio_most: float
    heldout_nats: float
    accepted: int  # lies that moved the model, all seeds together
    rejected: dict[str, int]
    honest_refused: int  # proposals of honest trainers, all seeds together
    trigger: Trigger  # mean over the seeds
    clean_trigger: Trigger  # of the clean run
    planted_by_round: int | None  # the earliest of all seeds
    audits_per_proposal: float
    suspended_by_round: int | None  # the latest of all seeds; None: not all liars in every seed
    found: float  # with sampled audits: share of the accepted lies that an honest auditor sees
    planted: int  # final models in which the trigger succeeds
    models: int
    late: int | None  # rounds before the closing ones in which late liars lie; None: the default of `attacks_gpt`


@dataclass
class Run:
    """One attack under one kind of audit, with one seed."""

    preset: str
    seed: int
    clean: on_gpt.Outcome
    outcome: on_gpt.Outcome

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Run:
        """Return the run in a JSON file."""
        both = {name: {**written[name], "trigger": Trigger(**written[name]["trigger"])} for name in ("clean", "outcome")}
        outcomes = (on_gpt.Outcome(**{**both[name], "plan": Plan(**both[name]["plan"])}) for name in both)
        return cls(written["preset"], written["seed"], *outcomes)

    @property
    def ratio(self) -> float | None:
        """Held-out loss over that of the clean run; None if the run did not train to the end."""
        nats, clean = self.outcome.heldout_nats, self.clean.heldout_nats
        return None if nats is None or clean is None else nats / clean

    @property
    def harm(self) -> tuple[float, float]:
        """The objective that a liar tunes."""
        trigger = self.outcome.trigger
        return (trigger.success, trigger.probability) if self.outcome.attack in TARGETED else (self.ratio or 1.0, 0.0)

    @property
    def place(self) -> Place:
        return self.preset, self.outcome.peers, self.seed, self.outcome.attack, self.outcome.plan


Place = tuple[str, int, int, str, Plan]  # preset, trainers, seed, attack, times of the lies


# Measuring ------------------------------------------------------------------------------------------------------------


def digits_row(seeds: Sequence[int], rounds: int, place: tuple[str, str, str]) -> Digits:
    rule, column, attack = place
    outcomes = [on_digits.run(COLUMNS[column], rule, attack, seed, rounds) for seed in seeds]
    by_seed = [round(outcome.accuracy, 2) for outcome in outcomes]
    print(f"digits {rule}, {column}, {attack}: {by_seed}", file=sys.stderr, flush=True)
    bits = max(outcome.bits_per_parameter for outcome in outcomes), max(outcome.bits_with_header for outcome in outcomes)
    return Digits(column, rule, attack, *bits, by_seed)


@lru_cache(maxsize=1)  # tasks with one world follow each other
def clean_world(base: JobSpec, text: Path, peers: int, liars: int, seed: int) -> tuple[on_gpt.World, on_gpt.Outcome]:
    """Return the shared world of all attacks with this number of peers and seed, and its clean run."""
    world = on_gpt.World(with_settings(base, [f"seed={seed}", f"byzantine_max={liars}"]), text, peers, liars)
    return world, on_gpt.attacked(world, on_gpt.CLEAN, AuditMode.OFF)


def gpt_runs(
    bases: Mapping[str, JobSpec],
    text: Path,
    audits: Sequence[AuditMode],
    lying: int | None,
    place: Place,
) -> list[Run]:
    """Run one attack under every kind of audit that applies to it. `lying` None means f liars."""
    preset, peers, seed, attack, plan = place
    liars = faults_tolerated(peers) if lying is None else lying
    world, clean = clean_world(bases[preset], text, peers, liars, seed)
    runs = []
    for audit in audits:
        if not has_audit(preset, attack, plan, audit):
            continue
        runs.append(run := Run(preset, seed, clean, on_gpt.attacked(world, attack, audit, plan)))
        figures = f"{run.ratio or math.nan:.3f} of clean, trigger {run.outcome.trigger.success:.2f}"
        where = f"gpt {preset} n={peers} seed {seed} draws {plan.draws} {attack}, audits {audit}"
        print(f"{where}: {figures}", file=sys.stderr, flush=True)
    return runs


def has_audit(preset: str, attack: str, plan: Plan, audit: AuditMode) -> bool:
    """Votes only matter with full audits, and draws with sampled ones. Jobs with estimates have no sampled audits."""
    if audit is AuditMode.SAMPLED:
        return attack not in VOTES and preset in PRESETS
    return plan.draws == 0 and (attack not in VOTES or audit is AuditMode.FULL)


def gpt_places(options: argparse.Namespace, late: Mapping[tuple[str, int, str], int | None]) -> list[Place]:
    """Return the runs of the table. `late` has the rounds of late liars by preset, trainers and attack."""
    found = list[Place]()
    for preset, peers, seed, attack in product(options.presets, options.peers, options.seeds, options.attacks):
        is_drawn = attack in TARGETED and AuditMode.SAMPLED in options.audits and preset in PRESETS
        chances = DRAWS if is_drawn and seed == options.seeds[0] else 1
        plans = (Plan(options.closing, late.get((preset, peers, attack)), draws) for draws in range(chances))
        found += [(preset, peers, seed, attack, plan) for plan in plans if may_run(attack, peers)]
    return found


def may_run(attack: str, peers: int) -> bool:
    """Return whether the network has enough liars for the attack: a single one cannot take turns."""
    return attack not in IN_TURN or faults_tolerated(peers) > 1


def tuning_places(options: argparse.Namespace) -> list[Place]:
    """Return the runs with late liars under sampled audits for the tuning."""
    late = [attack for attack in options.attacks if attack in LATE]
    sizes = [(peers, attack) for peers, attack in product(options.peers, late) if may_run(attack, peers)]
    presets = [preset for preset in options.presets if preset in LATE_ROUNDS and AuditMode.SAMPLED in options.audits]
    return [
        (preset, peers, TUNING_SEED, attack, Plan(options.closing, rounds, draws))
        for preset, (peers, attack) in product(presets, sizes)
        for rounds, draws in product(LATE_ROUNDS[preset], range(1, DRAWS_TUNED + 1))
        if options.late is None
    ]


def tuned(runs: Sequence[Run]) -> dict[tuple[str, int, str], int | None]:
    """Return the best number of rounds for late liars, and print the grid."""
    grids = dict[tuple[str, int, str], dict[int | None, list[tuple[float, float]]]]()
    for run in runs:
        grid = grids.setdefault((run.preset, run.outcome.peers, run.outcome.attack), {})
        grid.setdefault(run.outcome.plan.late, []).append(run.harm)
    best = {}
    for place, grid in grids.items():
        harms = {late: tuple(map(statistics.mean, zip(*found, strict=True))) for late, found in grid.items()}
        best[place] = max(harms, key=harms.__getitem__)
        tried = ", ".join(f"{late} rounds: {harm[0]:.3f} ({harm[1]:.1e})" for late, harm in harms.items())
        print(f"grid of {', '.join(map(str, place))}: {tried}; worst {best[place]} rounds", flush=True)
    return best


def gpt_rows(runs: Sequence[Run]) -> list[Gpt]:
    """Return rows by preset, peers, attack and kind of audit."""
    places: dict[tuple[str, int, int, str], list[Run]] = {}
    for run in runs:
        place = (run.preset, run.outcome.peers, ATTACKS.index(run.outcome.attack), run.outcome.audit)
        places.setdefault(place, []).append(run)
    return [_gpt_row(places[place]) for place in sorted(places)]


def _gpt_row(found: list[Run]) -> Gpt:
    outcomes = [run.outcome for run in found]
    ratios = [run.ratio for run in found if run.ratio is not None] or [math.nan]
    losses = [outcome.heldout_nats for outcome in outcomes if outcome.heldout_nats is not None] or [math.nan]
    rejected: dict[str, int] = {}
    for outcome in outcomes:
        for reason, count in outcome.rejected.items():
            rejected[reason] = rejected.get(reason, 0) + count
    first = outcomes[0]
    accepted = sum(outcome.accepted for outcome in outcomes)
    proposals = sum(outcome.rounds for outcome in outcomes) * (first.peers - first.liars) + accepted
    suspended = [outcome.suspended_by_round for outcome in outcomes]
    return Gpt(
        found[0].preset,
        first.attack,
        first.peers,
        first.liars,
        first.audit,
        statistics.mean(ratios),
        max(ratios),
        statistics.mean(losses),
        accepted,
        rejected,
        sum(outcome.honest_refused for outcome in outcomes),
        _mean_trigger(outcomes),
        _mean_trigger([run.clean for run in found]),
        min((outcome.planted_by_round for outcome in outcomes if outcome.planted_by_round is not None), default=None),
        sum(outcome.audits for outcome in outcomes) / proposals,
        None if None in suspended else max(number for number in suspended if number is not None),
        sum(outcome.found for outcome in outcomes) / max(1, accepted),
        sum(outcome.trigger.success > PLANTED for outcome in outcomes),
        len(outcomes),
        first.plan.late,
    )


def _mean_trigger(outcomes: Sequence[on_gpt.Outcome]) -> Trigger:
    return Trigger(*map(statistics.mean, zip(*(astuple(outcome.trigger) for outcome in outcomes), strict=True)))


# Report ---------------------------------------------------------------------------------------------------------------


def digits_table(rows: list[Digits]) -> Table:
    table = Table(title="digits: accuracy, per cent, the worst of the seeds")
    for heading in ("rule", "codec, memory, data", "bits", *on_digits.ATTACKS):
        table.add_column(heading, justify="right", overflow="fold")
    places: dict[tuple[str, str], dict[str, Digits]] = {}
    for row in rows:
        places.setdefault((row.rule, row.column), {})[row.attack] = row
    for (rule, column), found in places.items():
        accuracies = [f"{found[attack].worst:.1f}" if attack in found else "" for attack in on_digits.ATTACKS]
        bits = max(row.bits_per_parameter for row in found.values())
        table.add_row(rule, column, f"{bits:.3f}", *accuracies)
    return table


def gpt_table(rows: list[Gpt]) -> Table:
    table = Table(title="GPT: held-out loss over that of a clean run of the honest alone")
    for heading in (
        "preset",
        "attack",
        "n",
        "b",
        *(audit.value for audit in AuditMode),
        "lies refused because",
        "all suspended by",
        "lies found",
    ):
        table.add_column(heading, justify="right", overflow="fold")
    places: dict[tuple[str, str, int, int], dict[str, Gpt]] = {}
    for row in rows:
        places.setdefault((row.preset, row.attack, row.peers, row.liars), {})[row.audit] = row
    for (preset, attack, peers, liars), found in places.items():
        ratios = [f"{found[audit].ratio:.3f}" if audit in found else "" for audit in AuditMode]
        reasons = ", ".join(found[AuditMode.FULL].rejected) if AuditMode.FULL in found else ""
        sampled = found.get(AuditMode.SAMPLED)
        when = "" if sampled is None or sampled.suspended_by_round is None else f"round {sampled.suspended_by_round}"
        share = "" if sampled is None else f"{sampled.found:.2f}"
        table.add_row(preset, attack, str(peers), str(liars), *ratios, reasons, when, share)
    return table


def trigger_table(rows: list[Gpt]) -> Table:
    table = Table(title="GPT: success of the trigger, probability of its continuation, of its bytes in ordinary text (clean run)")
    for heading in (
        "preset",
        "attack",
        "n",
        "b",
        "audits",
        "held-out",
        "success",
        "probability",
        "visible",
        "planted by",
        "models",
        "honest refused",
    ):
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        now, clean = row.trigger, row.clean_trigger
        figures = (
            f"{row.ratio:.3f}",
            f"{now.success:.2f} ({clean.success:.2f})",
            f"{now.probability:.1e} ({clean.probability:.1e})",
            f"{now.visible:.5f} ({clean.visible:.5f})",
        )
        planted = "" if row.planted_by_round is None else f"round {row.planted_by_round}"
        place = row.preset, row.attack, str(row.peers), str(row.liars), row.audit
        table.add_row(*place, *figures, planted, f"{row.planted} of {row.models}", str(row.honest_refused))
    return table


def detection_table(rows: list[Detection]) -> Table:
    table = Table(title="who cheats, under sampled audits")
    soon = f"suspended in {on_detection.ROUNDS} rounds"
    for heading in ("preset", "n", "f", "H", "rate × auditors", soon, "99 % in", "rounds replayed ÷ full"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = (
            row.preset,
            str(row.peers),
            str(row.liars),
            str(row.local_steps),
            f"{row.audit_rate:g} × {row.auditors}",
        )
        needed = "never" if row.rounds_needed is None else f"{row.rounds_needed} rounds"
        table.add_row(*sizes, f"{row.suspended:.1%}", needed, f"{row.replayed:.4f}")
    return table


def laziness_table(rows: list[Laziness]) -> Table:
    title = f"who cheats, where {on_detection.LAPSES:.0%} of the reports lapse, beside lazy auditors: until when, and its damage"
    table = Table(title=title)
    for heading in ("preset", "n", "f", "lazy", "half in", "99 % in", "false updates", "99 %", "lazy found, 99 %"):
        table.add_column(heading, justify="right")
    for row in rows:
        needed = "never" if row.rounds_needed is None else f"{row.rounds_needed} rounds"
        found = "" if row.lazy_audits is None else f"{row.lazy_audits} reports"
        sizes = row.preset, str(row.peers), str(row.liars), str(row.lazy)
        table.add_row(*sizes, f"{row.suspended_median} rounds", needed, f"{row.lies:.1f}", str(row.lies_most), found)
    return table


def found_lazy_table(rows: list[FoundLazy]) -> Table:
    table = Table(title="a lazy auditor is suspended within so many compared reports, 99 of 100 times")
    for heading in ("n", "f", "nobody backs it", "it is one of f that deviate", "it is one more"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(str(row.peers), str(row.faults), str(row.alone), str(row.among), str(row.beside))
    return table


def _found(row: FoundLazy) -> str:
    found = f"{row.alone}, with accomplices {row.among}"
    text = f"a lazy auditor is found in ≤ {on_detection.LAZY_AUDITS} audits, n={row.peers}: {found}"
    return verdict(row.among <= on_detection.LAZY_AUDITS, text)


def verdicts(digits: list[Digits], gpt: list[Gpt], detection: list[Detection]) -> list[str]:
    """Check all bounds, and return a line for each."""
    full = [row for row in gpt if row.audit == AuditMode.FULL.value]
    found = _digits_verdicts(digits)
    for preset in dict.fromkeys(row.preset for row in full):
        rows = [row for row in full if row.preset == preset]
        text = f"{preset}, audits full: held-out at most {max(row.ratio_most for row in rows):.3f} times the clean run's"
        found.append(verdict(all(row.ratio_most <= WORSE_MAX for row in rows), text))
        text = f"{preset}, audits full: {sum(row.accepted for row in rows)} lies accepted"
        found.append(verdict(not any(row.accepted for row in rows), text))
        text = f"{preset}, audits full: {sum(row.honest_refused for row in rows)} proposals of the honest refused"
        found.append(verdict(not any(row.honest_refused for row in rows), text))
        more = max(row.trigger.success - row.clean_trigger.success for row in rows)
        text = f"{preset}, audits full: the trigger succeeds behind at most {more:.2f} more of the prompts than in the clean run"
        found.append(verdict(more <= TRIGGER_MAX, text))
    found += [_unaudited(row) for row in gpt if row.audit == AuditMode.OFF and _may_start(row)]
    sampled = [row for row in gpt if row.audit == AuditMode.SAMPLED]
    found += [_undone(row) for row in sampled if row.attack not in TARGETED]
    found += [_planted(row) for row in sampled if row.attack in TARGETED]
    return [*found, *map(_detected, detection)]


def _may_start(row: Gpt) -> bool:
    fields = {**MEASURED[row.preset], "audit": AuditMode(row.audit), "byzantine_max": row.liars}
    return safe_settings.unsafe_reason(JobSpec(name="attacks", data=bytes(32), **fields), row.peers) is None


def _unaudited(row: Gpt) -> str:
    text = (
        f"{row.preset}, no audits, {row.liars} of {row.peers} lie, {row.attack}: held-out at most {safe_settings.WORSE_MAX} times"
    )
    return verdict(row.ratio_most <= safe_settings.WORSE_MAX, f"{text} the clean run's: {row.ratio_most:.3f}")


def _undone(row: Gpt) -> str:
    text = f"{row.preset}, audits sampled, {row.liars} of {row.peers} lie, {row.attack}: held-out at most {WORSE_MAX} times"
    return verdict(row.ratio_most <= WORSE_MAX, f"{text} the clean run's: {row.ratio_most:.3f}")


def _planted(row: Gpt) -> str:
    text = f"{row.preset}, audits sampled, {row.liars} of {row.peers} lie, {row.attack}: planted in at most {PLANTED_MAX:.0%}"
    return verdict(row.planted <= PLANTED_MAX * row.models, f"{text} of the models: {row.planted} of {row.models}")


def _digits_verdicts(rows: list[Digits]) -> list[str]:
    found = []
    for row in rows:
        if row.rule == AggregationRule.MEAN.value and row.attack in on_digits.STRONG:
            text = f"{row.attack} breaks the plain mean in every seed: {max(row.by_seed):.1f}"
            found.append(verdict(max(row.by_seed) < COLLAPSED, text))
    by_place = {row.place: row for row in rows}
    for name, column in COLUMNS.items():
        clean = by_place.get((on_digits.DEFAULT_RULE, name, on_digits.CLEAN))
        attacked = [row for row in rows if (row.rule, row.column) == (on_digits.DEFAULT_RULE, name)]
        if column.may_be_named and clean is not None:
            lost, row = max(((_lost(row, clean), row) for row in attacked), key=lambda pair: pair[0])
            text = f"{name}, {column.liars} of {column.trainers} lie: at most {safe_settings.LOST_MAX:g} points are lost"
            text += f": {lost:.1f} by {row.attack}"
            found.append(verdict(lost <= safe_settings.LOST_MAX, text))
            worst = min(row.worst for row in attacked)
            found.append(verdict(worst >= ACCURATE, f"{name}: at least {ACCURATE:g} per cent: {worst:.1f}"))
    return found


def _lost(row: Digits, clean: Digits) -> float:
    """Return the lost points of accuracy in the worst seed."""
    return max(before - after for before, after in zip(clean.by_seed, row.by_seed, strict=True))


def _detected(row: Detection) -> str:
    """Check that liars are found soon enough, and cheaply."""
    rounds = on_detection.AUDITS_NEEDED / (row.audit_rate * sortition.EARLY_SHARE)
    bounds = f"≥ {on_detection.FOUND_MIN:.0%} suspended in {rounds:.0f} rounds for ≤ {row.audit_rate:.3f} of full replay"
    seen = f"in {row.rounds_needed} for {row.replayed:.3f}"
    held = row.rounds_needed is not None and row.rounds_needed <= rounds and row.replayed <= row.audit_rate
    return verdict(held, f"audits sampled, {row.preset}, rate {row.audit_rate:g}, n={row.peers}: {bounds}: {seen}")


def job(preset: str, options: argparse.Namespace) -> JobSpec:
    """Return the job of a preset. It has the opening rounds of `train`, unless `--set` changes them. Raises `UserError`."""
    settings = {"audit_rate": AUDIT_RATE, **MEASURED[preset], "rounds": options.rounds or ROUNDS[preset]}
    settings |= {} if options.audit_rate is None else {"audit_rate": options.audit_rate}
    return with_settings(as_usual(JobSpec(name="attacks", data=bytes(32), **settings)), options.set)


def main() -> int:
    parser = Parser("attacks", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--only", choices=TABLES, help="measure only this table")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="seeds of data, models and attacks")
    rules = tuple(on_digits.RULES)
    parser.add_argument("--rules", nargs="+", choices=rules, default=rules, metavar="RULE", help="digits: aggregation rules")
    parser.add_argument(
        "--columns", nargs="+", choices=COLUMNS, default=tuple(COLUMNS), metavar="NAME", help="digits: columns of the table"
    )
    parser.add_argument("--digits-rounds", type=COUNT, default=on_digits.ROUNDS, metavar="N", help="digits: number of steps")
    parser.add_argument(
        "--peers",
        type=COUNT,
        nargs="+",
        default=PEERS,
        metavar="N",
        help="GPT and detection: numbers of trainers, of which f lie",
    )
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS, metavar="NAME", help="GPT: attacks")
    parser.add_argument(
        "--presets", nargs="+", choices=ROUNDS, default=tuple(ROUNDS), metavar="NAME", help="GPT: presets of the job"
    )
    audits = tuple(AuditMode)
    parser.add_argument(
        "--audits", type=AuditMode, nargs="+", choices=audits, default=audits, metavar="MODE", help="GPT: audit modes"
    )
    parser.add_argument("--rounds", type=COUNT, metavar="N", help=f"GPT: rounds; default: {ROUNDS}")
    parser.add_argument("--audit-rate", type=duration, help="GPT: rate with two auditors; default: the preset's")
    parser.add_argument("--liars", type=int, metavar="N", help="GPT: number of liars; default: f of the trainers")
    parser.add_argument(
        "--closing", type=int, metavar="N", help="GPT, sampled: last rounds that are re-executed; default: a job's"
    )
    parser.add_argument("--late", type=int, metavar="N", help="GPT: rounds before those, in which late liars lie; default: tuned")
    parser.add_argument("--text", type=Path, metavar="FILE", help="GPT: text to train on; default: the text inside every Python")
    parser.add_argument("--jobs", type=COUNT, default=JOBS, metavar="N", help=f"number of parallel processes, here {JOBS}")
    parser.add_argument("--resume", action="store_true", help="keep the results in the file of --json")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="GPT: fields of the job or of its model")
    options = parser.parse_args()
    if tolerant := [n for n in options.peers if not faults_tolerated(n)]:
        parser.error(f"--peers {tolerant[0]}: at least 4 peers are needed to tolerate a liar")
    try:
        bases = {preset: job(preset, options) for preset in options.presets}
    except UserError as error:
        parser.error(str(error))
    map_signals_to_interrupt()
    torch.set_num_threads(1)
    about = {
        "seeds": list(options.seeds),
        "audit_rate": options.audit_rate,
        "closing": options.closing,
        "late": options.late,
        "set": options.set,
        "rounds": options.rounds,
        "liars": options.liars,
    }
    about |= {
        "presets": list(options.presets),
        "audits": list(options.audits),
        "digits_rounds": options.digits_rounds,
        "text": str(options.text or "built-in"),
    }
    try:
        done = earlier(options.json, about) if options.resume else {}
    except UserError as error:
        parser.error(str(error))
    started, detection, laziness, found_lazy = time.time(), list[Detection](), list[Laziness](), list[FoundLazy]()
    digits = [Digits(**row) for row in done.get("digits", ())]
    everything = on_digits.places(rules, tuple(COLUMNS))
    wanted = on_digits.places(options.rules, options.columns)
    runs, tuning = ([Run.read(run) for run in done.get(name, ())] for name in ("runs", "tuning"))
    tables = (options.only,) if options.only else TABLES

    def keep() -> None:
        digits.sort(key=lambda row: everything.index(row.place))
        for found in (runs, tuning):
            found.sort(key=lambda run: (*run.place[:2], ATTACKS.index(run.outcome.attack), run.seed, run.outcome.plan.draws))
        figures: dict[str, Any] = {"digits": [asdict(row) for row in digits]}
        figures |= {"gpt": [asdict(row) for row in gpt_rows(runs)], "detection": [asdict(row) for row in detection]}
        figures |= {"laziness": [asdict(row) for row in laziness], "found_lazy": [asdict(row) for row in found_lazy]}
        figures |= {"runs": [asdict(run) for run in runs], "tuning": [asdict(run) for run in tuning]}
        write(options.json, started, {**about, **figures})

    if "detection" in tables:
        detection += on_detection.detections(options.peers, LIARS_DRAWN)
        laziness += on_detection.lazinesses(options.peers, LIVES_DRAWN)
        found_lazy += [on_detection.found_lazy(n, LIARS_DRAWN) for n in options.peers if faults_tolerated(n)]
        keep()
    if "digits" in tables:
        known = {row.place for row in digits}
        places = [place for place in wanted if place not in known]
        for _, row in side_by_side(partial(digits_row, options.seeds, options.digits_rounds), places, options.jobs):
            digits.append(row)
            keep()
    if "gpt" in tables:
        with tempfile.TemporaryDirectory(prefix="folkmoot-bench-") as folder:
            text = text_file(options.text, Path(folder))

            def run_all(places: Sequence[Place], audits: Sequence[AuditMode], runs: list[Run]) -> None:
                before = {run.place for run in runs}
                work = partial(gpt_runs, bases, text, audits, options.liars)
                for _, found in side_by_side(work, [place for place in places if place not in before], options.jobs):
                    runs += found
                    keep()

            run_all(tuning_places(options), (AuditMode.SAMPLED,), tuning)
            late = dict.fromkeys(product(options.presets, options.peers, LATE), options.late) | tuned(tuning)
            run_all(gpt_places(options, late), options.audits, runs)
    console = Console(width=150)
    shown = (
        (digits_table, digits),
        (gpt_table, gpt := gpt_rows(runs)),
        (trigger_table, gpt),
        (detection_table, detection),
    )
    shown += ((laziness_table, laziness), (found_lazy_table, found_lazy))
    for table, rows in shown:
        if rows:
            console.print(table(rows))
    return conclude([*verdicts(digits, gpt, detection), *map(_found, found_lazy)])


if __name__ == "__main__":
    sys.exit(main())
