"""What liars can do: `python -m benchmarks.attacks --json FILE`.

Three tables. Digits: a small network on handwritten digits, 13 trainers, the accuracy under the worst of the attacks that no
check can see, for every aggregation rule (the plain mean as the negative control), without any audit; the worst is over means of
the seeds, and rules that are there only for comparison get the first seed alone, as their rows say. GPT: every attack of the
suite on a language model, under the presets of local steps and of a step a round, with audits full, sampled and off, against a
clean run of the honest trainers alone. Detection: how soon sampled audits, at the rate of each preset, and local steps at the
rate of a step a round, suspend who cheats in two of five steps, or in one of a round, and what they replay; nothing is trained
for it. `--resume` goes on where an ended run of the same commit and settings has left its file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from benchmarks.attack_suite import ATTACKS
from benchmarks.attacks_detection import Detection
from benchmarks.parallel import JOBS, side_by_side
from benchmarks.provenance import earlier, write
from benchmarks.settings import with_settings
from benchmarks.simulated import text_file
from benchmarks.verdicts import conclude, verdict
from consensus.quorum import faults_tolerated
from peer.demo.demo import end_like_ctrl_c
from protocol.errors import UserError
from scenarios.trials import COUNT, Parser, duration
from training.spec import PRESETS, AuditMode, JobSpec, Rule

TABLES = ("detection", "digits", "gpt")
PEERS = (4, 7, 10)
LIARS_DRAWN = 1_000  # for each row of the detection table
ROUNDS = {"local": 30, "per-step": 120}  # GPT, by preset
AUDIT_RATE = 0.2  # with two auditors: .4 replayed steps for each accepted proposal
WORSE_MAX = 1.02  # held-out, of a clean run of the honest
ACCURACY_MIN, ACCURACY_AIM, BITS_MAX = 93.0, 96.0, 0.3
COLUMNS = {column.name: column for column in on_digits.COLUMNS}
SMALL = ("IID top 1/28", "IID top 1/56")  # with the bits of a payload's body, and with those of its header too
DEFAULT_RULE = Rule.ARC_NNM_TRIM.value
COLLAPSED = 50.0  # per cent: the plain mean must not be better under its worst attack


@dataclass
class Digits:
    column: str
    rule: str
    bits_per_parameter: float  # without the header of a payload
    bits_with_header: float
    accuracy: dict[str, float]  # by attack, per cent, mean over the seeds
    by_seed: dict[str, list[float]]

    @property
    def worst(self) -> float:
        return min(self.accuracy.values())

    @property
    def seeds(self) -> int:
        return len(self.by_seed[on_digits.ATTACKS[0]])


@dataclass
class Gpt:
    preset: str
    attack: str
    peers: int
    liars: int
    audit: str
    ratio: float  # held-out loss over that of the clean run, mean over the seeds
    ratio_most: float
    heldout_nats: float
    accepted: int  # lies that moved the model, all seeds together
    rejected: dict[str, int]
    audits_per_proposal: float
    suspended_by_round: int | None  # the latest of all seeds; None: not all liars in every seed
    found: dict[str, float]  # with sampled audits: share of the accepted lies in which that kind of liar is found


@dataclass
class Run:
    """Of one attack under one kind of audit, with one seed."""

    preset: str
    seed: int
    clean_nats: float  # held-out loss of the clean run
    outcome: on_gpt.Outcome

    @property
    def place(self) -> Place:
        return (self.preset, self.outcome.peers, self.seed, self.outcome.attack)


Place = tuple[str, int, int, str]  # preset, trainers, seed, attack


# Measuring ------------------------------------------------------------------------------------------------------------


def digits_row(seeds: Sequence[int], rounds: int, place: tuple[str, str]) -> Digits:
    rule, column = place[0], COLUMNS[place[1]]
    if rule != DEFAULT_RULE:
        seeds = seeds[:1]
    runs = {name: [on_digits.run(column, rule, name, seed, rounds) for seed in seeds] for name in on_digits.ATTACKS}
    by_seed = {name: [outcome.accuracy for outcome in found] for name, found in runs.items()}
    outcomes = [outcome for found in runs.values() for outcome in found]
    bits = max(outcome.bits_per_parameter for outcome in outcomes), max(outcome.bits_with_header for outcome in outcomes)
    print(f"digits {rule} {column.name}", file=sys.stderr, flush=True)
    return Digits(column.name, rule, *bits, {name: statistics.mean(found) for name, found in by_seed.items()}, by_seed)


@lru_cache(maxsize=1)  # tasks of one world follow each other
def clean_world(base: JobSpec, text: Path, peers: int, seed: int) -> tuple[on_gpt.World, float]:
    """What all attacks of so many peers with this seed share, and the held-out loss of the clean run."""
    liars = faults_tolerated(peers)
    world = on_gpt.World(with_settings(base, [f"seed={seed}", f"liars={liars}"]), text, peers, liars)
    return world, on_gpt.attacked(world, on_gpt.CLEAN, AuditMode.OFF).heldout_nats


def gpt_runs(bases: Mapping[str, JobSpec], text: Path, place: Place) -> list[Run]:
    """One attack of so many peers with this seed, under every kind of audit."""
    preset, peers, seed, attack = place
    world, clean = clean_world(bases[preset], text, peers, seed)
    runs = []
    for audit in AuditMode:
        runs.append(Run(preset, seed, clean, outcome := on_gpt.attacked(world, attack, audit)))
        said = f"gpt {preset} n={peers} seed {seed} {attack}, audits {audit}: {outcome.heldout_nats / clean:.3f} of clean"
        print(said, file=sys.stderr, flush=True)
    return runs


def gpt_rows(bases: Mapping[str, JobSpec], runs: Sequence[Run]) -> list[Gpt]:
    """By preset, peers, attack and kind of audit."""
    places: dict[tuple[str, int, int, str], list[Run]] = {}
    for run in runs:
        place = (run.preset, run.outcome.peers, ATTACKS.index(run.outcome.attack), run.outcome.audit)
        places.setdefault(place, []).append(run)
    return [_gpt_row(bases[place[0]].rounds, places[place]) for place in sorted(places)]


def _gpt_row(rounds: int, found: list[Run]) -> Gpt:
    outcomes = [run.outcome for run in found]
    ratios = [run.outcome.heldout_nats / run.clean_nats for run in found]
    rejected: dict[str, int] = {}
    for outcome in outcomes:
        for reason, count in outcome.rejected.items():
            rejected[reason] = rejected.get(reason, 0) + count
    first = outcomes[0]
    accepted = sum(outcome.accepted for outcome in outcomes)
    proposals = len(outcomes) * rounds * (first.peers - first.liars) + accepted
    suspended = [outcome.suspended_by_round for outcome in outcomes]
    return Gpt(
        found[0].preset,
        first.attack,
        first.peers,
        first.liars,
        first.audit,
        statistics.mean(ratios),
        max(ratios),
        statistics.mean(outcome.heldout_nats for outcome in outcomes),
        accepted,
        rejected,
        sum(outcome.audits for outcome in outcomes) / proposals,
        None if None in suspended else max(number for number in suspended if number is not None),
        {lie: sum(outcome.found[lie] for outcome in outcomes) / max(1, accepted) for lie in on_detection.LIES},
    )


# Report ---------------------------------------------------------------------------------------------------------------


def digits_table(rows: list[Digits]) -> Table:
    columns = list(dict.fromkeys(row.column for row in rows))
    table = Table(title="digits: accuracy under the worst attack (and without any), per cent")
    for heading in ("rule", *columns):
        table.add_column(heading, justify="right")
    for rule in dict.fromkeys(row.rule for row in rows):
        found = {row.column: row for row in rows if row.rule == rule}
        cells = [f"{found[c].worst:.1f} ({found[c].accuracy['none']:.1f})" if c in found else "" for c in columns]
        seeds = min(row.seeds for row in found.values())
        table.add_row(f"{rule}, {seeds} {'seed' if seeds == 1 else 'seeds'}", *cells)
    largest = {row.column: row for row in rows}
    table.add_section()
    table.add_row("bits/parameter", *(f"{largest[column].bits_per_parameter:.3f}" for column in columns))
    table.add_row("header included", *(f"{largest[column].bits_with_header:.3f}" for column in columns))
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
        *on_detection.LIES,
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
        shares = ["" if sampled is None else f"{sampled.found[lie]:.2f}" for lie in on_detection.LIES]
        table.add_row(preset, attack, str(peers), str(liars), *ratios, reasons, when, *shares)
    return table


def detection_table(rows: list[Detection]) -> Table:
    table = Table(title="who cheats, under sampled audits")
    soon = f"suspended in {on_detection.ROUNDS} rounds"
    for heading in ("preset", "n", "f", "H", "cheats in", "rate × auditors", soon, "99 % in", "steps replayed ÷ full"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = (
            row.preset,
            str(row.peers),
            str(row.liars),
            str(row.local_steps),
            row.lie,
            f"{row.audit_rate:g} × {row.auditors}",
        )
        needed = "never" if row.rounds_needed is None else f"{row.rounds_needed} rounds"
        table.add_row(*sizes, f"{row.suspended:.1%}", needed, f"{row.replayed:.4f}")
    return table


def verdicts(digits: list[Digits], gpt: list[Gpt], detection: list[Detection]) -> list[str]:
    """What must hold, and whether it did."""
    small = [row for row in digits if row.rule == DEFAULT_RULE and row.column in SMALL]
    means = [row for row in digits if row.rule == Rule.MEAN.value]
    full = [row for row in gpt if row.audit == AuditMode.FULL.value]
    found = []
    for row in small:
        text = f"{row.column}: worst of all attacks ≥ {ACCURACY_MIN} (aim {ACCURACY_AIM}): {row.worst:.1f}"
        found.append(verdict(row.worst >= ACCURACY_MIN, text))
        whole = row.column == SMALL[-1]
        bits, header = (row.bits_with_header, "included") if whole else (row.bits_per_parameter, "left out")
        text = f"{row.column}: ≤ {BITS_MAX} bit per parameter, the header {header}: {bits:.3f}"
        found.append(verdict(bits <= BITS_MAX, text))
    if means:
        text = f"the plain mean collapses: {max(row.worst for row in means):.1f}"
        found.append(verdict(all(row.worst < COLLAPSED for row in means), text))
    for preset in dict.fromkeys(row.preset for row in full):
        rows = [row for row in full if row.preset == preset]
        text = f"{preset}, audits full: held-out at most {max(row.ratio_most for row in rows):.3f} times the clean run's"
        found.append(verdict(all(row.ratio_most <= WORSE_MAX for row in rows), text))
        text = f"{preset}, audits full: {sum(row.accepted for row in rows)} lies accepted"
        found.append(verdict(not any(row.accepted for row in rows), text))
    return [*found, *(_detected(row) for row in detection if row.lie == on_detection.MANY_STEPS)]


def _detected(row: Detection) -> str:
    """One bound: found soon enough, and cheaply."""
    bounds = (
        f"≥ {on_detection.FOUND_MIN:.0%} suspended in {on_detection.ROUNDS} rounds for ≤ {row.replayed_max:.3f} of full replay"
    )
    seen = f"{row.suspended:.1%} for {row.replayed:.3f}"
    held = row.suspended >= on_detection.FOUND_MIN and row.replayed <= row.replayed_max
    return verdict(held, f"audits sampled, {row.preset}, rate {row.audit_rate:g}, n={row.peers}: {bounds}: {seen}")


def job(preset: str, options: argparse.Namespace) -> JobSpec:
    """Raises `UserError`."""
    settings = {**PRESETS[preset], "rounds": options.rounds or ROUNDS[preset], "audit_rate": options.audit_rate}
    return with_settings(JobSpec(name="attacks", data=bytes(32), **settings), options.set)


def main() -> int:
    parser = Parser("attacks", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--only", choices=TABLES, help="just this table")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="of data, models and chance")
    rules = tuple(on_digits.RULES)
    parser.add_argument("--rules", nargs="+", choices=rules, default=rules, metavar="RULE", help="digits")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=tuple(COLUMNS), metavar="NAME", help="digits")
    parser.add_argument("--digits-rounds", type=COUNT, default=on_digits.ROUNDS, metavar="N", help="digits: steps")
    parser.add_argument("--peers", type=COUNT, nargs="+", default=PEERS, metavar="N", help="not digits: trainers, of whom f lie")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS, metavar="NAME", help="GPT")
    parser.add_argument("--presets", nargs="+", choices=ROUNDS, default=tuple(ROUNDS), metavar="NAME", help="GPT: of the job")
    parser.add_argument("--rounds", type=COUNT, metavar="N", help=f"GPT; default: {ROUNDS}")
    parser.add_argument("--audit-rate", type=duration, default=AUDIT_RATE, help="GPT: times two auditors")
    parser.add_argument("--text", type=Path, metavar="FILE", help="GPT: to train on; default: the text inside every Python")
    parser.add_argument("--jobs", type=COUNT, default=JOBS, metavar="N", help=f"processes side by side, here {JOBS}")
    parser.add_argument("--resume", action="store_true", help="keep what the file of --json has already")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="GPT: fields of the job or of its model")
    options = parser.parse_args()
    if tolerant := [n for n in options.peers if not faults_tolerated(n)]:
        parser.error(f"--peers {tolerant[0]}: of fewer than four nobody may lie")
    try:
        bases = {preset: job(preset, options) for preset in options.presets}
    except UserError as error:
        parser.error(str(error))
    end_like_ctrl_c()
    torch.set_num_threads(1)
    about = {"seeds": list(options.seeds), "audit_rate": options.audit_rate, "set": options.set, "rounds": options.rounds}
    about |= {"presets": list(options.presets), "digits_rounds": options.digits_rounds, "text": str(options.text or "built-in")}
    try:
        done = earlier(options.json, about) if options.resume else {}
    except UserError as error:
        parser.error(str(error))
    started, detection = time.time(), list[Detection]()
    digits = [Digits(**{name: row[name] for name in Digits.__dataclass_fields__}) for row in done.get("digits", ())]
    runs = [Run(**{**run, "outcome": on_gpt.Outcome(**run["outcome"])}) for run in done.get("runs", ())]
    tables = (options.only,) if options.only else TABLES

    def keep() -> None:
        digits.sort(key=lambda row: (list(on_digits.RULES).index(row.rule), list(COLUMNS).index(row.column)))
        runs.sort(key=lambda run: (run.preset, run.outcome.peers, ATTACKS.index(run.outcome.attack), run.seed))
        figures: dict[str, Any] = {"digits": [{**asdict(row), "worst": row.worst} for row in digits]}
        figures |= {"gpt": [asdict(row) for row in gpt_rows(bases, runs)], "detection": [asdict(row) for row in detection]}
        write(options.json, started, {**about, **figures, "runs": [asdict(run) for run in runs]})

    if "detection" in tables:
        detection += on_detection.detections(options.peers, LIARS_DRAWN)
        keep()
    if "digits" in tables:
        known = {(row.rule, row.column) for row in digits}
        places = [place for place in product(options.rules, options.columns) if place not in known]
        for _, row in side_by_side(partial(digits_row, options.seeds, options.digits_rounds), places, options.jobs):
            digits.append(row)
            keep()
    if "gpt" in tables:
        before = {run.place for run in runs}
        tasks = [
            place for place in product(options.presets, options.peers, options.seeds, options.attacks) if place not in before
        ]
        with tempfile.TemporaryDirectory(prefix="folkmoot-bench-") as folder:
            work = partial(gpt_runs, bases, text_file(options.text, Path(folder)))
            for _, found in side_by_side(work, tasks, options.jobs):
                runs += found
                keep()
    console = Console(width=130)
    shown = ((digits_table, digits), (gpt_table, gpt := gpt_rows(bases, runs)), (detection_table, detection))
    for table, rows in shown:
        if rows:
            console.print(table(rows))
    return conclude(verdicts(digits, gpt, detection))


if __name__ == "__main__":
    sys.exit(main())
