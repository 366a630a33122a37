"""The main job, several times with different seeds: `peer demo` as a person runs it, and the results in its reports.

The rival is one process in the same run that trains the same model on the same number of accepted samples. It uses the best of
three learning rates, or of further ones if the best is at an edge. The result is a ratio. With `--preset per-step` it has a
bound. Figures depend on the whole machine, so quote medians, and name the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from demo.shutdown_signals import map_signals_to_interrupt
from peer.commands.definitions.job_commands import PRESETS
from scenarios.trials import COUNT, Parser
from training import rate_sweep

WORSE_MAX = 1.02  # held-out loss relative to one process alone on the same number of samples, when every step is exchanged


def build_parser() -> Parser:
    parser = Parser("demo", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="seeds, with a run for each")
    parser.add_argument("--peers", type=COUNT, default=4, metavar="N", help="number of processes, which all vote")
    parser.add_argument("--malicious", type=int, default=1, metavar="N", help="number of peers that lie")
    parser.add_argument("--trainers", type=int, default=0, metavar="N", help="number of trainers; default: that of the demo")
    parser.add_argument("--preset", choices=PRESETS, help="preset of the job")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="any other field of the job, or model.FIELD")
    parser.add_argument("--data", type=Path, metavar="PATH", help="text to train on; default: the text inside every Python")
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="rounds of the job; default: those of the demo")
    parser.add_argument("--no-baseline", dest="baseline", action="store_false", help="skip the baseline of one process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return parser


def main() -> int:
    options = build_parser().parse_args()
    map_signals_to_interrupt()
    started, reports = time.time(), list[dict[str, Any]]()
    about: dict[str, Any] = {"seeds": list(options.seeds), "data": str(options.data or "built-in")}
    if options.data and options.data.is_file():
        about["data_sha256"] = hashlib.sha256(options.data.read_bytes()).hexdigest()
    for seed in options.seeds:
        reports.append(run(options, seed))
        print(f"seed {seed}: {reports[-1]['seconds_total']:.0f} s", file=sys.stderr, flush=True)
        figures = {name: [figure(report) for report in reports] for name, figure in FIGURES.items()}
        write(options.json, started, {**about, "figures": figures, "reports": reports})
    show(figures)
    return conclude(verdicts(options.preset, reports))


def run(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="folkmoot-bench-") as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "peer.cli", *arguments(options, seed, Path(folder)), "--json", str(file)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                status = process.wait()
            except BaseException:
                process.terminate()  # it ends its peers; this process waits for it
                raise
        if not file.exists():
            sys.exit(f"{' '.join(command)} ended with status {status} and no report")
        report: dict[str, Any] = json.loads(file.read_text())
        return report


def arguments(options: argparse.Namespace, seed: int, folder: Path) -> list[str]:
    """Return the arguments of `peer`, as a person would type them."""
    words = ["demo", "--no-web", "--seed", str(seed), "--peers", str(options.peers), "--malicious", str(options.malicious)]
    words += ["--report", str(folder / "report")]
    for name in ("trainers", "preset", "data", "rounds"):
        words += [f"--{name}", str(getattr(options, name))] if getattr(options, name) else []
    words += [f"--set={setting}" for setting in options.set]
    return [*words, "--baseline"] if options.baseline else words


def _ratio(report: dict[str, Any]) -> float | None:
    alone = report["baseline_bits_per_byte"]
    return report["heldout_bits_per_byte"][-1] / alone if alone else None


def _largest(report: dict[str, Any], kind: str) -> float | None:
    return max((size for name, size in report["pss_mb_per_peer"].items() if name.startswith(kind)), default=None)


FIGURES: dict[str, Any] = {
    "seconds in all": lambda report: report["seconds_total"],
    "seconds to the first decision": lambda report: report["seconds_to_first_decision"],
    "held-out bits/byte at the end": lambda report: report["heldout_bits_per_byte"][-1],
    "the same, nats/byte": lambda report: report["heldout_bits_per_byte"][-1] * math.log(2),
    "the same, × one process alone": _ratio,
    "decision, ms, median": lambda report: report["decision_ms_p50"],
    "decision, ms, p99": lambda report: report["decision_ms_p99"],
    "MB sent per peer and round": lambda report: report["bytes_sent_per_peer_per_round"] / 1e6,
    "PSS of a trainer and its worker, MB": lambda report: _largest(report, "trainer"),
    "PSS of a light voter, MB": lambda report: _largest(report, "voter"),
}


def verdicts(preset: str | None, reports: list[dict[str, Any]]) -> Iterator[str]:
    """Check all promises of the demo, and with one step per round the loss of one process alone."""
    failures = [f"seed {report['seed']}: {failure}" for report in reports for failure in report["failures"]]
    yield verdict(not failures, "; ".join(["equal roots, every liar found, a lower loss", *failures]))
    edges = [
        report
        for report in reports
        if rate_sweep.is_best_at_edge({float(r): bits for r, bits in report["baseline_rates"].items()})
    ]
    if edges:
        yield verdict(False, f"one process alone: its best rate is the last that was tried with {len(edges)} of the seeds")
    ratios = [ratio for report in reports if (ratio := _ratio(report)) is not None]
    if preset == "per-step" and ratios:
        text = f"H=1, {len(reports[0]['malicious'])} lying, equal accepted samples: held-out ≤ {WORSE_MAX} × one process alone"
        yield verdict(max(ratios) <= WORSE_MAX, f"{text}: {max(ratios):.3f}")


def show(figures: dict[str, list[float | None]]) -> None:
    table = Table("figure", "least", "median", "most")
    for name, values in figures.items():
        seen = [value for value in values if value is not None]
        table.add_row(name, *(f"{value:.3g}" for value in (min(seen), median(seen), max(seen))) if seen else ("–", "–", "–"))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
