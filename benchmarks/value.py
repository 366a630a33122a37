"""Held-out loss at equal machine time, of networks and of one machine: `python -m benchmarks.value --json FILE`.

All machines are equally fast and take samples of one text. Each has the time that one machine alone needs for `--steps` steps of
AdamW. A machine of a network spends it on its own steps, on re-executed proposals, on applied rounds and on waiting. So the
audits decide how many rounds a network has:

| audit   | re-executed proposals of one machine in a round                                                   |
|---------|---------------------------------------------------------------------------------------------------|
| full    | n - 1, those of all others                                                                        |
| vouched | f = (n - 1) // 3                                                                                  |
| sampled | audit_rate x auditors on average; f in the first and the closing rounds, re-executed before the vote |

Rows `griefers` have fewer rounds, by the share that f griefers have undone by their convictions (`benchmarks.griefers`). A job
with sampled audits is final some seconds after its last round, in which its machines are free.

Own steps, re-execution and application are processor time of one thread. Waiting is a round of real daemons on loopback whose
workers have their updates ready (`benchmarks.free`), less the application. Those daemons share the cores of this machine, but a
network has a machine for each; so the time that they queue for the cores is subtracted. Links have no delay here.

Row `alone` is one machine without a network. Row `all` is one process with the samples of n machines, in n times the steps or
with n times the batch. Its time is not limited: it bounds every network. Each kind of row has the best learning rates and inner
optimizer of a grid of eight (`all`: of four). The grids have a seed of their own and a third of the time, and networks of all
sizes take the rates of the smallest.

`--step-seconds` has a small model stand for one with longer steps: own steps and re-execution are multiplied, application and
waiting are those of the small model. `--clock` takes all seconds from the file of an earlier run, because times need an idle
machine and losses do not. `--resume` keeps the results in the file of `--json`. `--all` adds 13 machines, a text of Python
programs, and networks in which f machines lie.
"""

from __future__ import annotations

import bisect
import itertools
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import griefers
from benchmarks.attacks_gpt import CLEAN, World, attacked
from benchmarks.codec import INNER_RATES, MUON_RATES, TUNING_SEED, WARMUP, Budget, as_usual, diloco, train
from benchmarks.parallel import JOBS, side_by_side
from benchmarks.provenance import earlier, write
from benchmarks.round import Row as FreeRound
from benchmarks.round import Task, attempt
from benchmarks.settings import with_settings
from benchmarks.simulated import JOB, Rounds, engine_of, text_file, trainer_key
from benchmarks.verdicts import conclude, verdict
from consensus.voter_set import faults_tolerated
from demo.shutdown_signals import map_signals_to_interrupt
from ledger.audits import sortition
from peer.commands.definitions.job_commands import preset_overrides
from protocol.errors import UserError
from scenarios.trials import COUNT, Parser, duration
from training import rate_sweep
from training.api.job_builder import parse_overrides
from training.job_spec import AuditMode, InnerOptimizerKind, JobSpec, complete_fields
from training.replicated.replicated_model import AcceptedProposal

Rates = Mapping[str, Any]  # the tuned fields of a job; for `all` also its shape

ALONE, ALL, NONE = "alone", "all", "none"
PRESETS = ("local", "per-step")
FULL, VOUCHED, SAMPLED = "full", "vouched", "sampled"
AUDITS = (FULL, VOUCHED, SAMPLED)
KINDS = tuple(itertools.product(PRESETS, AUDITS))
PEERS, MORE_PEERS = (4, 7), 13
STEPS = 1_200
LIE, GRIEFERS = "ipm", "griefers"
TEXTS = ("built-in", "programs")
TUNING_SHARE = 1 / 3
ROUNDS_TIMED = 4  # the first of them is not counted
ROUNDS_WAITED = 12
SECOND_TEXT_BYTES = 465_000  # the length of the first text
VOUCHED_LESS = 0.08  # nats, with 4 machines
STEPS_SHAPE, BATCH_SHAPE = "steps", "batch"  # of `all`: n times as many steps, or n times as large batches
LINES: dict[InnerOptimizerKind, tuple[float, ...]] = {
    InnerOptimizerKind.ADAMW: INNER_RATES,
    InnerOptimizerKind.MUON: (6e-3, *MUON_RATES),
}
GRIDS: dict[str, tuple[Rates, ...]] = {
    ALONE: tuple({"inner": inner, "inner_rate": rate} for inner, line in LINES.items() for rate in line),
    "local": tuple(
        {"inner": inner, "inner_rate": rate, "outer_rate": outer_rate}
        for inner, line in ((InnerOptimizerKind.ADAMW, (3e-3, 6e-3)), (InnerOptimizerKind.MUON, (1.5e-2, 3e-2)))
        for rate, outer_rate in itertools.product(line, (1.0, 1.4))
    ),
    # Trainers send gradients, so there is no inner optimizer to choose, but twice as many rates.
    "per-step": tuple({"inner_rate": rate} for rate in (2.1e-3, 3e-3, 4.2e-3, 6e-3, 8.5e-3, 1.2e-2, 1.7e-2, 2.4e-2)),
}
HEADINGS = ("", "audit", "n", "nats", "least", "most", "rounds", "steps", "own s", "replays", "apply", "waiting", "rates")


# Time -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds of one machine in a round; `replay` is of one re-executed proposal."""

    own: float
    replay: float
    apply: float
    waiting: float

    def spent(self, rounds: int, replays: float) -> dict[str, float]:
        """Seconds by field of `Row`; `replays` counts the re-executed proposals of all rounds."""
        return {
            "own_seconds": rounds * self.own,
            "replay_seconds": replays * self.replay,
            "apply_seconds": rounds * self.apply,
            "waiting_seconds": rounds * self.waiting,
        }


@dataclass(frozen=True)
class Network:
    preset: str
    audit: str
    n: int

    @property
    def liars(self) -> int:
        return faults_tolerated(self.n)

    def spec(self, rounds: int, seed: int, rates: Rates, changes: Sequence[str] = ()) -> JobSpec:
        """The job as `train --preset` starts it, with these rates; its closing rounds are counted by `replays` alone."""
        fields = parse_overrides(preset_overrides(self.preset, {}))
        fields |= {"audit": AuditMode.SAMPLED if self.audit == SAMPLED else AuditMode.FULL, "byzantine_max": self.liars}
        fields |= {"rounds": rounds, "seed": seed, **rates}
        whole = {"name": "value", "data": bytes(32), **complete_fields(fields), "warmup_rounds": round(WARMUP * rounds)}
        return as_usual(with_settings(JobSpec(**whole), changes))

    def replays(self, rounds: int) -> float:
        """Average number of proposals that one machine re-executes in the whole job."""
        if self.audit != SAMPLED:
            return rounds * (self.liars if self.audit == VOUCHED else self.n - 1)
        spec = self.spec(rounds, 0, {})
        closing = min(rounds, spec.usual_final_full_audit_rounds)
        rates = [sortition.audit_rate_of_round(spec.audit_rate, taken, rounds, closing) for taken in range(1, rounds - closing)]
        return sum(rates) * spec.auditors + (1 + closing) * self.liars

    def undone(self) -> float:
        """Return the rounds that griefers undo, relative to those of the job."""
        return griefers.undone_share(self.n, self.liars) if self.audit == SAMPLED else 0.0


def rounds_within(seconds: float, costs: Costs, replays: Callable[[int], float]) -> int:
    """Return the largest number of rounds that fit. Raises `UserError` if none does."""

    def needed(rounds: int) -> float:
        return sum(costs.spent(rounds, replays(rounds)).values())

    most = int(seconds / (costs.own + costs.apply + costs.waiting))
    fitting = bisect.bisect_right(range(1, most + 1), seconds, key=needed)
    if not fitting:
        raise UserError(f"one round takes {needed(1):.3g} s, and a machine has {seconds:.3g} s: increase --steps")
    return fitting


def waiting_seconds(free: FreeRound, cores: int) -> float:
    """Return the seconds of a round with free updates, if each daemon had cores of its own.

    Raises `UserError` if none was measured.
    """
    if free.seconds is None or free.daemon_seconds is None or free.worker_seconds is None:
        raise UserError(f"no round of {free.peers} daemons was measured: {free.reason}")
    own = free.daemon_seconds + free.worker_seconds
    return max(own, free.seconds - max(0.0, free.peers / cores - 1) * own)


# Measuring ------------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Collects processor seconds of this process under names."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, what: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        self.seconds.setdefault(what, []).append(time.process_time() - started)
        return result

    def median(self, what: str) -> float:
        """Return the median without the first of every `ROUNDS_TIMED`."""
        found = self.seconds[what]
        return statistics.median(found[len(found) // ROUNDS_TIMED :])


def own_steps(rounds: Rounds, number: int) -> None:
    rounds.engine.local_steps(np.array(rounds.model.parameters), JOB, number, trainer_key(0))


def step_seconds(budget: Budget, inner: InnerOptimizerKind) -> float:
    """Processor seconds of one step without a network."""
    spec, watch = budget.spec(10, 0, inner=inner), Stopwatch()
    rounds = Rounds(spec, engine_of(spec, budget.text))
    for number in range(ROUNDS_TIMED):
        watch.time("own", partial(own_steps, rounds, number))
    return watch.median("own") / spec.local_steps


def reexecute(rounds: Rounds, accepted: AcceptedProposal) -> None:
    rounds.update(accepted.trainer)
    rounds.given(accepted.trainer, accepted.payload)


def compute_costs(network: Network, rates: Rates, budget: Budget, step: float, waiting: float) -> Costs:
    """Costs on a machine with steps of `step` seconds; `waiting` includes the application of a round."""
    spec, watch = network.spec(max(budget.steps, ROUNDS_TIMED), 0, rates, budget.changes), Stopwatch()
    rounds = Rounds(spec, engine_of(spec, budget.text))
    for number in range(ROUNDS_TIMED):
        watch.time("alone", partial(own_steps, rounds, number))
        proposals = [watch.time("own", partial(rounds.honest, trainer_key(number))) for number in range(network.n)]
        watch.time("replay", partial(reexecute, rounds, proposals[0][0]))
        watch.time("apply", partial(rounds.close, proposals, {}))
    # The speed of a shared machine changes between two measurements, so these are relative to steps of the same moment.
    speed = step * spec.local_steps / watch.median("alone")
    own, replay, apply = (speed * watch.median(what) for what in ("own", "replay", "apply"))
    return Costs(own, replay, apply, max(0.0, waiting - apply))


def free_round(network: Network, model: JobSpec) -> FreeRound:
    """A round of real daemons with this preset and audit, whose updates take no time."""
    spec = network.spec(ROUNDS_WAITED, 0, {})
    settings = {"audit": spec.audit.value, "outer": spec.outer.value, "bits": str(spec.bits)}
    if network.audit == SAMPLED:
        settings |= {"audit_rate": str(spec.audit_rate), "auditors": str(spec.auditors)}
    return attempt(f"{network.preset}, {network.audit}", settings, Task(network.n, ROUNDS_WAITED, 0, model.model))


class Clock:
    """Seconds of steps, of rounds and of the time that each machine has."""

    def __init__(self, budget: Budget, sizes: Sequence[int], known: Mapping[str, Any], step: float | None = None) -> None:
        """`known` are figures of an earlier run, which are not measured again. `step` is the seconds of a step of AdamW."""
        found = known.get("step_seconds", {})
        self.step = {inner: found.get(inner) or step_seconds(budget, inner) for inner in InnerOptimizerKind}
        self.scale = step / self.step[InnerOptimizerKind.ADAMW] if step else 1.0
        self.seconds = budget.steps * self.scale * self.step[InnerOptimizerKind.ADAMW]
        self.free = {name: FreeRound(**row) for name, row in known.get("free_rounds", {}).items()}
        self.costs = {name: Costs(**costs) for name, costs in known.get("costs", {}).items()}
        steps = ", ".join(f"{1e3 * seconds:.1f} ms ({inner})" for inner, seconds in self.step.items())
        print(f"each machine has {self.seconds:.1f} s; a step alone takes {steps}", flush=True)
        for n, (preset, audit) in itertools.product(sizes, KINDS):
            if audit != VOUCHED:
                self._measure(Network(preset, audit, n), budget)

    def _measure(self, network: Network, budget: Budget) -> None:
        for rates in {rates.get("inner"): rates for rates in GRIDS[network.preset]}.values():
            if (name := self._name(network, rates)) in self.costs:
                continue
            free = self._name(network, {})
            self.free[free] = self.free.get(free) or free_round(network, budget.spec(1, 0))
            waiting = waiting_seconds(self.free[free], os.cpu_count() or 1)
            self.costs[name] = compute_costs(
                network, rates, budget, self.step[rates.get("inner", InnerOptimizerKind.ADAMW)], waiting
            )
            said = ", ".join(f"{what} {seconds:.3f} s" for what, seconds in asdict(self.costs[name]).items())
            print(f"{name}: {said}", flush=True)

    def _name(self, network: Network, rates: Rates) -> str:
        """Vouched audits have the payloads, the rule and at most the waiting of full ones."""
        audit = FULL if network.audit == VOUCHED else network.audit
        return ", ".join((network.preset, audit, f"n={network.n}", *([rates["inner"].value] if "inner" in rates else [])))

    def of(self, network: Network, rates: Rates) -> Costs:
        costs = self.costs[self._name(network, rates)]
        return replace(costs, own=self.scale * costs.own, replay=self.scale * costs.replay)

    def figures(self) -> dict[str, Any]:
        costs, free = ({name: asdict(of) for name, of in found.items()} for found in (self.costs, self.free))
        return {"budget_seconds": self.seconds, "step_seconds": self.step, "costs": costs, "free_rounds": free}

    def rounds(self, network: Network, rates: Rates, share: float = 1.0) -> int:
        return rounds_within(share * self.seconds, self.of(network, rates), network.replays)

    def steps_alone(self, rates: Rates, share: float = 1.0) -> int:
        return int(share * self.seconds / self.step_alone(rates) + 1e-6)

    def step_alone(self, rates: Rates) -> float:
        return self.scale * self.step[rates["inner"]]


# Training -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training; `network` None: one process with the samples of `n` machines."""

    n: int
    network: Network | None
    rounds: int  # one process: its steps
    rates: Rates
    seed: int
    attack: str = CLEAN
    text: int = 0  # its place among the texts

    @property
    def row(self) -> str:
        if self.network:
            return self.network.preset
        return ALL if "shape" in self.rates else ALONE

    @property
    def audit(self) -> str:
        return self.network.audit if self.network else NONE

    @property
    def place(self) -> tuple[str, str, str, str, int, int]:
        return TEXTS[self.text], self.attack, self.row, self.audit, self.n, self.seed


def nats(texts: Sequence[Path], changes: tuple[str, ...], run: Run) -> float:
    budget = Budget(texts[run.text], run.rounds, run.n, changes)
    if run.network is None:
        tuned = {"keep": 1.0, "inner_rate": run.rates["inner_rate"]}
        return diloco(of_one(budget, run.rates), 1, run.seed, tuned, 1.0, 0.0, run.rates["inner"])[0]
    spec = run.network.spec(run.rounds, run.seed, run.rates, changes)
    if run.attack in (CLEAN, GRIEFERS):
        return train(budget, spec)[0]
    return attacked(World(spec, budget.text, run.n, run.network.liars), run.attack, spec.audit).heldout_nats


def of_one(budget: Budget, rates: Rates) -> Budget:
    """One process; if the shape is `BATCH_SHAPE`, its batches are those of all trainers."""
    if rates.get("shape") != BATCH_SHAPE:
        return replace(budget, trainers=1)
    batch = budget.trainers * budget.spec(1, 0).batch
    others = [change for change in budget.changes if not change.startswith("batch=")]
    return replace(budget, trainers=1, changes=(*others, f"batch={batch}"))


def tuning_runs(kind: Network | str, clock: Clock, n: int, alone: Rates) -> list[Run]:
    """The grid of one kind of row. That of `all` begins with the rates of `alone`, in two shapes."""
    if isinstance(kind, Network):
        grids = GRIDS[kind.preset]
        return [Run(n, kind, clock.rounds(kind, rates, TUNING_SHARE), rates, TUNING_SEED) for rates in grids]
    if kind == ALONE:
        return [Run(1, None, clock.steps_alone(rates, TUNING_SHARE), rates, TUNING_SEED) for rates in GRIDS[ALONE]]
    best = alone["inner_rate"]
    shapes = ((STEPS_SHAPE, best), (STEPS_SHAPE, best / 2), (BATCH_SHAPE, best), (BATCH_SHAPE, best * 2))
    return [in_one_process(clock, n, {**alone, "inner_rate": rate, "shape": shape}, TUNING_SHARE) for shape, rate in shapes]


def in_one_process(clock: Clock, n: int, rates: Rates, share: float = 1.0, seed: int = TUNING_SEED, text: int = 0) -> Run:
    """Return a run with the samples of n machines that spend all their time on steps."""
    steps = clock.steps_alone(rates, share) * (n if rates["shape"] == STEPS_SHAPE else 1)
    return Run(n, None, steps, rates, seed, text=text)


def label(rates: Rates) -> str:
    return " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in rates.values())


def best_of(name: str, runs: Sequence[Run], losses: Sequence[float]) -> Rates:
    """Return the rates with the smallest loss, and print the grid."""
    best = runs[int(np.nanargmin(losses))].rates
    line = {
        run.rates["inner_rate"]: loss
        for run, loss in zip(runs, losses, strict=True)
        if {**run.rates, "inner_rate": 0} == {**best, "inner_rate": 0}
    }
    edge = "; the best rate is the last of its line" if len(line) > 2 and rate_sweep.is_best_at_edge(line) else ""
    tried = ", ".join(f"{label(run.rates)}: {loss:.3f}" for run, loss in zip(runs, losses, strict=True))
    print(f"grid of {name}: {tried}; best {label(best)}{edge}", flush=True)
    return best


# Report ---------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    row: str
    audit: str
    n: int
    seed: int
    heldout_nats: float
    rounds: int
    steps: int  # of one machine; `all`: of the process
    own_seconds: float
    replay_seconds: float = 0.0
    apply_seconds: float = 0.0
    waiting_seconds: float = 0.0
    attack: str = CLEAN
    text: str = TEXTS[0]
    rates: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[str, str, str, str, int]:
        return self.text, self.attack, self.row, self.audit, self.n


def row_of(run: Run, loss: float, clock: Clock) -> Row:
    common: dict[str, Any] = {"seed": run.seed, "heldout_nats": loss, "rounds": run.rounds, "attack": run.attack}
    common |= {"rates": dict(run.rates), "text": TEXTS[run.text]}
    if run.network is None:
        of_batch = run.n if run.rates.get("shape") == BATCH_SHAPE else 1
        own = run.rounds * of_batch * clock.step_alone(run.rates)
        return Row(run.row, NONE, run.n, steps=run.rounds, own_seconds=own, **common)
    spec, costs = run.network.spec(run.rounds, run.seed, run.rates), clock.of(run.network, run.rates)
    spent: dict[str, Any] = {**costs.spent(run.rounds, run.network.replays(run.rounds))}
    return Row(run.row, run.audit, run.n, steps=run.rounds * spec.local_steps, **common, **spent)


def show(rows: Sequence[Row], about: str) -> None:
    table = Table(title=about)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for (text, attack, name, audit, n), found in by_kind(rows).items():
        losses, first = [row.heldout_nats for row in found], found[0]
        spent = (first.own_seconds, first.replay_seconds, first.apply_seconds, first.waiting_seconds)
        marks = "".join(f", {mark}" for mark, usual in ((text, TEXTS[0]), (attack, CLEAN)) if mark != usual)
        cells = [f"{value:.3f}" for value in (statistics.mean(losses), min(losses), max(losses))]
        cells += [str(first.rounds), str(first.steps), *(f"{seconds:.1f}" for seconds in spent), label(first.rates)]
        table.add_row(f"{name}{marks}", audit, str(n), *cells)
    Console(width=140).print(table)


def by_kind(rows: Sequence[Row]) -> dict[tuple[str, str, str, str, int], list[Row]]:
    found: dict[tuple[str, str, str, str, int], list[Row]] = {}
    for row in rows:
        found.setdefault(row.kind, []).append(row)
    return found


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Check the bounds by means over the seeds, on the first text. The better preset of a network counts."""
    first = [row for row in rows if row.attack in (CLEAN, GRIEFERS) and row.text == TEXTS[0]]
    means = {kind[1:]: statistics.mean(row.heldout_nats for row in found) for kind, found in by_kind(first).items()}
    honest = {kind: loss for kind, loss in means.items() if kind[0] == CLEAN and kind[1] != ALL}
    best = ", ".join(map(str, min(honest, key=honest.__getitem__, default=())[1:]))

    def better(audit: str, n: int, attack: str = CLEAN) -> tuple[float, str] | None:
        found = ((loss, row) for (under, row, of, size), loss in means.items() if (under, of, size) == (attack, audit, n))
        return min(found, default=None)

    vouched, full = better(VOUCHED, 4), better(FULL, 4)
    if vouched and full:
        less = full[0] - vouched[0]
        text = f"vouched ({vouched[1]}), n=4: at least {VOUCHED_LESS} nats below full ({full[1]}): {-less:+.3f}"
        yield verdict(less >= VOUCHED_LESS, text + ("" if less >= VOUCHED_LESS else f"; the best row is {best}"))
    alone = better(NONE, 1)
    for n, attack in itertools.product(sorted({row.n for row in first}), (CLEAN, GRIEFERS)):
        sampled = better(SAMPLED, n, attack)
        if alone and sampled:
            more, way = sampled[0] - alone[0], alone[0] - means.get((CLEAN, ALL, NONE, n), alone[0])
            text = (
                f"sampled ({sampled[1]}), n={n}{', ' + attack if attack != CLEAN else ''}: below one machine alone: {more:+.3f}"
            )
            text += f", {-more / way:.0%} of the way to all samples" if way > 0 else ""
            yield verdict(more < 0, text + ("" if more < 0 else f"; the best row is {best}"))


def programs(folder: Path) -> Path:
    """A second text: modules of the standard library."""
    file, library = folder / "programs.txt", Path(sysconfig.get_path("stdlib"))
    file.write_bytes(b"\n".join(path.read_bytes() for path in sorted(library.glob("*.py")))[:SECOND_TEXT_BYTES])
    return file


def main() -> int:
    parser = Parser("value", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="seeds of initialisation and batches"
    )
    parser.add_argument(
        "--steps", type=COUNT, default=STEPS, metavar="N", help="steps of one machine alone, which set the time of all rows"
    )
    parser.add_argument("--peers", type=COUNT, nargs="+", default=PEERS, metavar="N", help="sizes of networks")
    parser.add_argument("--all", action="store_true", help=f"also measure {MORE_PEERS} machines, a second text, and liars")
    parser.add_argument("--jobs", type=COUNT, default=JOBS, metavar="N", help=f"number of parallel processes, here {JOBS}")
    slower = "seconds of an AdamW step, to imitate a larger model; default: as measured"
    parser.add_argument("--step-seconds", type=duration, metavar="S", help=slower)
    parser.add_argument(
        "--clock", type=Path, metavar="FILE", help="file of a run of the same commit and settings, whose seconds are used"
    )
    parser.add_argument("--resume", action="store_true", help="keep the results in the file of --json")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="change fields of all jobs or of their model")
    options = parser.parse_args()
    if options.clock and not options.clock.exists():
        parser.error(f"--clock {options.clock} does not exist")
    map_signals_to_interrupt()
    torch.set_num_threads(1)
    try:
        rows = measured(options)
    except UserError as error:
        parser.error(str(error))
    return conclude(verdicts(rows))


def measured(options: Any) -> list[Row]:
    started = time.time()
    sizes = [*options.peers, *((MORE_PEERS,) if options.all else ())]
    changes = tuple(options.set)
    with tempfile.TemporaryDirectory(prefix="folkmoot-bench-") as name:
        texts = [text_file(None, Path(name)), *((programs(Path(name)),) if options.all else ())]
        budget = Budget(texts[0], options.steps, 1, changes)
        about = {"parameters": budget.spec(1, 0).model.parameters, "steps": options.steps, "set": list(changes)}
        done = earlier(options.json, about) if options.resume else {}
        grids: dict[str, dict[str, float]] = done.get("grids", {})
        clock = Clock(budget, sizes, done or earlier(options.clock, about), options.step_seconds)
        rows = {(*row.kind, row.seed): row for row in (Row(**row) for row in done.get("rows", ()))}

        def keep() -> None:
            found = [asdict(row) for row in rows.values()]
            write(
                options.json, started, {**about, "seeds": list(options.seeds), **clock.figures(), "grids": grids, "rows": found}
            )

        keep()
        losses_of = partial(nats, texts, changes)
        rates = tuned(clock, min(sizes), losses_of, options.jobs, grids, keep)
        runs = list(planned(clock, rates, sizes, options.seeds, len(texts), options.all))
        left = [run for run in runs if run.place not in rows]
        for number, loss in side_by_side(losses_of, left, options.jobs):
            rows[left[number].place] = row_of(left[number], loss, clock)
            keep()
            print(f"{', '.join(map(str, left[number].place))}: {loss:.3f} nats", file=sys.stderr, flush=True)
    found = [rows[run.place] for run in runs]
    step = 1e3 * clock.seconds / options.steps
    show(found, f"{about['parameters']:,} parameters, {clock.seconds:.1f} s of each machine, {step:.1f} ms a step")
    return found


def planned(
    clock: Clock, rates: Mapping[tuple[str, str], Rates], sizes: Sequence[int], seeds: Sequence[int], texts: int, lied_to: bool
) -> Iterator[Run]:
    networks = [Network(preset, audit, n) for n in sizes for preset, audit in KINDS]
    undone = {network: network.undone() for network in networks}
    alone, together = rates[ALONE, NONE], rates[ALL, NONE]
    for text, seed in itertools.product(range(texts), seeds):
        yield Run(1, None, clock.steps_alone(alone), alone, seed, text=text)
        for network in networks:
            of = rates[network.preset, network.audit]
            rounds = clock.rounds(network, of)
            yield Run(network.n, network, rounds, of, seed, text=text)
            if undone[network] and text == 0:
                yield Run(network.n, network, int(rounds / (1 + undone[network])), of, seed, GRIEFERS)
            if lied_to and text == 0 and network.audit != FULL:
                yield Run(network.n, network, rounds, of, seed, LIE)
        yield from (in_one_process(clock, n, together, seed=seed, text=text) for n in sizes)


def grid_name(run: Run) -> str:
    return f"{run.row}, {run.audit}"


def tuned(
    clock: Clock,
    n: int,
    losses_of: Callable[[Run], float],
    jobs: int,
    grids: dict[str, dict[str, float]],
    keep: Callable[[], None],
) -> dict[tuple[str, str], Rates]:
    """Return the best rates of each kind of row, by (row, audit). `grids` gets the losses that it lacks; `keep` writes them."""
    found: dict[tuple[str, str], Rates] = {}
    networks = [Network(preset, audit, n) for preset, audit in KINDS]
    stages: tuple[list[Network | str], ...] = ([ALONE, *networks], [ALL])  # `all` begins with the rates of `alone`
    for kinds in stages:
        lines = [tuning_runs(kind, clock, n, found.get((ALONE, NONE), {})) for kind in kinds]
        left = [run for line in lines for run in line if label(run.rates) not in grids.get(grid_name(run), {})]
        for number, loss in side_by_side(losses_of, left, jobs):
            grids.setdefault(grid_name(left[number]), {})[label(left[number].rates)] = loss
            keep()
        for line in lines:
            of_line = [grids[grid_name(run)][label(run.rates)] for run in line]
            found[line[0].row, line[0].audit] = best_of(grid_name(line[0]), line, of_line)
    return found


if __name__ == "__main__":
    sys.exit(main())
