"""Many histories: run in processes, counted, and saved so that an interrupted campaign can continue."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.sim import partitions, twins
from tests.sim.invariants import Violation
from tests.sim.plan import Plan, expand
from tests.sim.simulation import Simulation
from tests.sim.strategies import HONEST_MAJORITY

WRITTEN_EVERY_SECONDS = 20.0
CHUNK = 4  # histories a process takes at a time
N = 4
COVERED_FROM = 200  # histories: the rarest of these is in one of thirty
COVERED = {
    kind: tuple(text.split(", "))
    for kind, text in {
        "seeds": "liar, crash, rollback, damage, wrong-state, join, rotate, skew, clock, stop, several leaves, link kept, "
        "voted rollback, restored, rounds closed, liars expelled, newcomers voted, tasks settled, votes forfeited, "
        "leases expired, projects closed, points paid, texts redacted, gold said, "
        "steps accepted, steps accepted later, steps failed, checkpoints saved, checkpoints expired, attempts at runs",
        "twins": "twin, split, crash, liars expelled",
        "partitions": "partition, flap, rounds closed",
    }.items()
}
# Counted beside faults.
OUTCOMES = ("liar", "transfer", "restored", "disk damaged", "torn", "fsync failed", "justified", "unseen", "job stopped")
CURATED = ("tasks settled", "votes forfeited", "leases expired", "projects closed", "points paid", "texts redacted", "gold said")
CLIENT_RUNS = (
    "runs opened",
    "runs continued",
    "runs ended",
    "steps requested",
    "rounds of steps",
    "steps accepted",
    "steps accepted later",
    "steps failed",
    "checkpoints saved",
    "checkpoints expired",
    "attempts at runs",
)
CAME_ABOUT = (
    "blocks",
    "rounds closed",
    "ballots decided",
    "updates accepted",
    "liars expelled",
    "newcomers voted",
    *CURATED,
    *CLIENT_RUNS,
)


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    n: int
    rule: str | None  # the broken rule; "crash": a peer raised an unexpected error; None: the history passed
    problem: str
    blocks: int
    messages: int
    virtual: float  # seconds
    cpu: float  # seconds
    history: str  # hash
    faults: dict[str, int]
    liars: dict[str, int] = field(default_factory=dict)  # by strategy


def prepare(kind: str, seed: int, n: int | None) -> Simulation:
    """Return the simulation of one seed, not run yet."""
    if kind == "twins":
        return twins.simulation(twins.expand(seed, n or N))
    if kind == "partitions":
        return partitions.simulation(partitions.expand(seed, n))
    return Simulation(expand(seed, n or N, HONEST_MAJORITY))


def keeping(simulation: Simulation, numbers: Sequence[int]) -> Simulation:
    """Return the same history with only some of its faults."""
    return type(simulation)(simulation.plan.keep(numbers))


def run_one(simulation: Simulation) -> Result:
    start, rule, problem = time.process_time(), None, ""
    try:
        simulation.run()
    except Violation as violation:
        rule, problem = violation.rule, str(violation)
    except Exception as error:  # a peer raised an unexpected error
        rule = "crash"
        problem = "".join(traceback.format_exception(error, limit=-4))
    return Result(
        simulation.plan.seed,
        simulation.plan.n,
        rule,
        problem,
        simulation.height,
        simulation.network.messages,
        round(simulation.now, 3),
        round(time.process_time() - start, 4),
        simulation.history.hexdigest(),
        dict(sorted(simulation.counts.items())),
        dict(Counter(simulation.plan.liars.values())),
    )


def command(kind: str, seed: int, n: int | None, keep: Iterable[int] | None = None) -> str:
    """Return the command that runs one history again."""
    parts = ["python -m tests.sim"]
    if kind != "seeds":
        parts.append(f"--{kind} 0:1")
    if n is not None:
        parts.append(f"--n {n}")
    parts.append(f"--seed {seed}")
    if keep is not None:
        parts.append(f"--keep {','.join(map(str, keep)) or ','}")
    return " ".join(parts)


# One -----------------------------------------------------------------------------------------------------------------


def replay(kind: str, seed: int, n: int | None, keep: Sequence[int] | None) -> int:
    simulation = prepare(kind, seed, n)
    if keep is not None:
        simulation = keeping(simulation, keep)
    describe(simulation.plan)
    result = run_one(simulation)
    print(f"{result.blocks} blocks, {result.messages} messages, {result.virtual:.1f} virtual s, history {result.history}")
    print(f"seed {seed} {'passed' if result.rule is None else 'FAILED: ' + result.problem}")
    return 0 if result.rule is None else 1


def describe(plan: Plan) -> None:
    print(f"n={plan.n}, {plan.joiners} join later, healed after {plan.heal_at} s, delay {plan.delay[0]}–{plan.delay[1]} s")
    for fault in plan.faults:
        print(f"  {fault}")


# Many ----------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Results of a campaign so far: the content of its JSON file."""

    kind: str
    first: int
    last: int
    n: int | None
    command: str
    commit: str
    next: int = 0  # the first seed that has not been run
    passed: int = 0
    failed: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    blocks: int = 0
    messages: int = 0
    virtual_seconds: float = 0.0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    by_n: dict[str, dict[str, float]] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    liars: dict[str, int] = field(default_factory=dict)  # by strategy
    histories: dict[str, int] = field(default_factory=dict)  # that had at least one of these
    machine: str = ""

    def add(self, result: Result) -> None:
        self.next = result.seed + 1
        self.blocks += result.blocks
        self.messages += result.messages
        self.virtual_seconds = round(self.virtual_seconds + result.virtual, 3)
        self.cpu_seconds = round(self.cpu_seconds + result.cpu, 3)
        for total, drawn in ((self.faults, result.faults), (self.liars, result.liars)):
            for what, count in drawn.items():
                total[what] = total.get(what, 0) + count
        for what, count in result.faults.items():
            self.histories[what] = self.histories.get(what, 0) + bool(count)
        of = self.by_n.setdefault(str(result.n), {"histories": 0, "cpu_seconds": 0.0})
        of["histories"] += 1
        of["cpu_seconds"] = round(of["cpu_seconds"] + result.cpu, 3)
        of["histories_per_hour_and_core"] = round(3_600 * of["histories"] / max(of["cpu_seconds"], 1e-9))
        if result.rule is None:
            self.passed += 1
        else:
            self.failed += 1
            again = command(self.kind, result.seed, self.n)
            self.failures.append({"seed": result.seed, "rule": result.rule, "problem": result.problem, "replay": again})

    def coverage(self) -> str:
        """Summarize in one line the faults and events of the histories."""
        faults = {
            what: count
            for what, count in self.faults.items()
            if what not in (*OUTCOMES, *CAME_ABOUT) and not what.startswith("dropped ")
        }
        restored, justified, unseen = (self.faults.get(what, 0) for what in ("restored", "justified", "unseen"))
        return (
            f"{len(self.liars)} kinds of liars{_listed(self.liars)}; faults{_listed(faults)}; snapshots restored: {restored}; "
            f"prepares in later views: {justified} with a reason that was checked, {unseen} of leaders that sent none"
        )

    def missing(self) -> tuple[str, ...]:
        """Return the required events that no history of a long campaign had: the generator no longer draws them."""
        if self.passed + self.failed < COVERED_FROM or self.n not in (None, N):
            return ()
        return tuple(what for what in COVERED.get(self.kind, ()) if not self.histories.get(what))

    def write(self, path: Path) -> None:
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(temporary, path)


def _listed(counts: dict[str, int]) -> str:
    return ": " + (", ".join(f"{what} {count}" for what, count in sorted(counts.items())) or "none")


def run(kind: str, span: tuple[int, int], n: int | None, jobs: int, path: Path | None, resume: bool, verbose: bool) -> int:
    tally = _begin(kind, span, n, path if resume else None)
    started, before, written = time.monotonic(), tally.wall_seconds, time.monotonic()
    for result in _results(kind, range(tally.next, span[1]), n, jobs):
        tally.add(result)
        tally.wall_seconds = round(before + time.monotonic() - started, 1)
        if verbose or result.rule is not None:
            _print(kind, n, result)
        if path is not None and time.monotonic() - written >= WRITTEN_EVERY_SECONDS:
            written = time.monotonic()
            tally.write(path)
    if path is not None:
        tally.write(path)
    for size, figures in sorted(tally.by_n.items(), key=lambda item: int(item[0])):
        rate = f"{figures['histories_per_hour_and_core']:.0f} histories an hour and core"
        print(f"n={size}: {figures['histories']:.0f} histories, {rate}")
    print(f"{tally.blocks} blocks, {tally.messages} messages, {tally.wall_seconds:.0f} s")
    print(tally.coverage())
    print(f"histories with{_listed({what: of for what, of in tally.histories.items() if not what.startswith('dropped ')})}")
    missing = tally.missing()
    if missing:
        print(f"NOT COVERED: no history had {', '.join(missing)}")
    print(f"{tally.passed} passed, {tally.failed} failed")
    return 1 if tally.failed or missing else 0


def _begin(kind: str, span: tuple[int, int], n: int | None, path: Path | None) -> Tally:
    spoken = shlex.join(["python", "-m", "tests.sim", *sys.argv[1:]])
    fresh = Tally(kind, span[0], span[1], n, spoken, _commit(), next=span[0], machine=_machine())
    if path is None or not path.exists():
        return fresh
    tally = Tally(**json.loads(path.read_text()))
    if (tally.kind, tally.first, tally.n) != (kind, span[0], n):
        raise SystemExit(f"{path} is of another campaign: {tally.command}")
    if tally.commit != fresh.commit:
        raise SystemExit(f"{path} was begun with commit {tally.commit}, this is {fresh.commit}")
    tally.last = span[1]
    return tally


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(("git", *words), capture_output=True, text=True, check=False).stdout.strip()

    changed = "-changed" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (git("rev-parse", "HEAD") or "unknown") + changed


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _results(kind: str, seeds: range, n: int | None, jobs: int) -> Iterator[Result]:
    work = [(kind, seed, n) for seed in seeds]
    if jobs <= 1:
        yield from map(_work, work)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_work, work, chunksize=CHUNK)


def _work(task: tuple[str, int, int | None]) -> Result:
    return run_one(prepare(*task))


def _print(kind: str, n: int | None, result: Result) -> None:
    if result.rule is None:
        print(f"seed {result.seed}: {result.blocks} blocks, {result.cpu:.2f} s, {result.history}", flush=True)
    else:
        again = command(kind, result.seed, n)
        print(f"seed {result.seed} FAILED: {result.problem}\n  again: {again}\n  fewer faults: {again} --shrink", flush=True)
