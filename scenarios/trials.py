"""Common parts of scenarios: trials in one network, one after another, with a table, JSON and an exit status."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import trio
from rich.console import Console
from rich.table import Table

from benchmarks import provenance
from demo.demo_peers import DemoPeer
from features.command_arguments import parse_integer_in
from protocol.errors import UserError
from scenarios import network
from scenarios.network import SMALL_JOB, Network

STARTED = time.time()  # a scenario is a program of its own
WIDTH = 160  # of a table that is not shown on a terminal
COLUMNS_MAX = 10  # of figures, so that the table fits


@dataclass
class Trial:
    what: str
    figures: dict[str, Any] = field(default_factory=dict)  # by column; in seconds unless the name has another unit
    problems: list[str] = field(default_factory=list)

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


Attempt = Callable[[Network, Trial], Awaitable[None]]  # begins and ends with a network in good order
AttemptApart = tuple[str, Attempt, Mapping[str, Any]]  # name, attempt, and arguments of `network.running`


COUNT = parse_integer_in(1)  # a type for argparse: a count of trials; zero trials would check nothing


def duration(text: str) -> float:
    """Parse a positive duration. A type for argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """A help formatter that names each default with a meaning."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, tuple):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        says_nothing = action.default is None or action.default is False or action.default == ""
        return action.help if says_nothing else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the value and the remedy."""

    def __init__(self, name: str, about: str | None, *, package: str = "scenarios") -> None:
        super().__init__(prog=f"python -m {package}.{name}", description=about, formatter_class=Help)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}: run with --help to list the options\n")


def arguments(name: str, about: str | None, *, peers: int | None = 4) -> Parser:
    parser = Parser(name, about)
    if peers is not None:
        parser.add_argument("--peers", type=COUNT, default=peers, metavar="N", help="founders of the network")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of victims and moments")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for the peers' data, which is kept")
    parser.add_argument("--json", metavar="FILE", help="also write the table to this file")
    return parser


async def conduct(
    options: argparse.Namespace,
    title: str,
    attempts: Iterable[tuple[str, Attempt]],
    *,
    dress: Callable[[DemoPeer], None] = lambda peer: None,
    also: Callable[[Network], list[str]] = lambda peers: [],
    vocabulary: int = 0,
    malicious: int = 0,
    attack: str = "sign-flip",
    job: Mapping[str, str] | None = None,
) -> int:
    """Run the attempts in one network that trains meanwhile, and return the exit status. A stuck network ends the run."""
    started, trials = trio.current_time(), list[Trial]()
    running = network.running(options.peers, malicious, seed=options.seed, attack=attack, folder=options.keep, dress=dress)
    async with running as peers:
        await peers.train({**SMALL_JOB, **(job or {}), "seed": str(options.seed)}, vocabulary=vocabulary)
        for what, attempt in attempts:
            trials.append(trial := Trial(what))
            stuck = await tried(peers, attempt, trial)
            print(f"{len(trials)}. {what}: {'; '.join(trial.problems) or 'held'}", file=sys.stderr, flush=True)
            if stuck:
                break
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(peers.stop)
        failures = [f"{trial.what}: {problem}" for trial in trials for problem in trial.problems]
        failures += peers.failures() + also(peers)
    failures += [] if trials else ["no trial ran"]
    seconds = trio.current_time() - started
    title = f"{title}, {options.peers} peers, seed {options.seed}, {seconds:.0f} s in all; seconds"
    return report(
        options, title, *table_of(trials), failures, {"trials": [asdict(trial) for trial in trials], "seconds": seconds}
    )


async def conduct_apart(options: argparse.Namespace, title: str, attempts: Iterable[AttemptApart]) -> int:
    """Run each attempt in a network of its own, and return the exit status."""
    started, trials, failures = trio.current_time(), list[Trial](), list[str]()
    for what, attempt, made in attempts:
        trials.append(trial := Trial(what))
        folder = options.keep / what if options.keep else None
        async with network.running(folder=folder, **{"peers": options.peers, "seed": options.seed, **made}) as peers:
            await tried(peers, attempt, trial)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(peers.stop)
            failures += [f"{what}: {problem}" for problem in (*trial.problems, *peers.failures())]
        print(f"{len(trials)}. {what}: {'; '.join(trial.problems) or 'held'}", file=sys.stderr, flush=True)
    seconds = trio.current_time() - started
    title = f"{title}, {options.peers} peers, seed {options.seed}, {seconds:.0f} s in all"
    return report(
        options, title, *table_of(trials), failures, {"trials": [asdict(trial) for trial in trials], "seconds": seconds}
    )


async def tried(peers: Network, attempt: Attempt, trial: Trial) -> bool:
    """Run one attempt and return whether the network got stuck."""
    try:
        await attempt(peers, trial)
    except trio.TooSlowError:
        heights = {peer.name: await peers.height(peer) for peer in peers.peers}
        trial.problems.append(f"the network made no progress: heights {heights}")
        return True
    except UserError as error:
        trial.problems.append(str(error))
        return True
    return False


def table_of(trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows. If trials have too many different figures, these share one column."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.figures))
    rows = []
    for number, trial in enumerate(trials):
        figures = [_shown(trial.figures.get(name, "")) for name in names]
        if len(names) > COLUMNS_MAX:
            figures = [", ".join(f"{name} {_shown(value)}" for name, value in trial.figures.items())]
        rows.append([str(number + 1), trial.what, *figures, "no" if trial.problems else "yes"])
    return ["", "what", *(names if len(names) <= COLUMNS_MAX else ["figures"]), "held"], rows


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def report(
    options: argparse.Namespace,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    failures: Sequence[str],
    result: dict[str, Any],
) -> int:
    """Print the table and the failures, write the requested JSON file, and return the exit status."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("what", "peer", "figures") else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    for failure in failures:
        console.print(failure, style="red", markup=False)
    console.print("all held" if not failures else f"{len(failures)} failures")
    write(options, {**result, "failures": list(failures)})
    return 1 if failures else 0


def write(options: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Write the result as JSON, with commit, command and machine, if a file was requested."""
    provenance.write(Path(options.json) if options.json else None, STARTED, result)
