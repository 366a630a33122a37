"""Rounds that are undone by liars that want to be convicted: `python -m benchmarks.griefers --json FILE`.

A griefer lies once, is convicted, and lies again after each suspension. Every conviction returns the job to an anchor. No model
is trained: the draws follow the ledger's own rates (`ledger.audits.sortition`), and the undone rounds follow its anchors.
Griefers choose the distance of their lies from an anchor, and whether they lie together or in turn. This is tuned on seeds that
are not reported. The row without probation shows the effect of probation, and the row without griefers the cost of audits.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.attacks_detection import LAPSES
from benchmarks.attacks_gpt import DISPUTE_ROUNDS
from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from ledger.audits import sortition
from scenarios.trials import COUNT, Parser
from training.job_spec import PRESETS, AuditMode, JobSpec, complete_fields

ROUNDS = 200
TUNED_ON = 200  # the first seeds; the others are reported
GROUPS = ((4, 0), (4, 1), (7, 2))  # trainers, griefers
MORE_MAX = {1: 0.10, 2: 0.15}  # by griefers: undone rounds, relative to those of the job


@dataclass(frozen=True)
class Plan:
    behind: int  # rounds between an anchor and a lie
    in_turn: bool  # one griefer lies after the conviction of the other


@dataclass
class Row:
    peers: int
    griefers: int
    probation: bool
    behind: int
    in_turn: bool
    undone: float  # rounds, mean over the seeds
    undone_most: int
    convictions: float


class Job:
    """One job of `ROUNDS` rounds in the model."""

    def __init__(self, spec: JobSpec, peers: int, griefers: int, plan: Plan, probation: bool, seed: int) -> None:
        self.spec, self.peers, self.griefers, self.plan, self.probation = spec, peers, griefers, plan, probation
        self.chance = random.Random(f"griefers {seed}")
        self.round = self.taken = self.undone = 0
        self.back_in, self.times = dict[int, int](), Counter[int]()
        self.pending: list[tuple[int, int, int]] = []  # (round of the conviction, griefer, rounds taken before the lie)
        self.waits = dict[int, int]()  # round until which a griefer does not lie again

    def run(self) -> Job:
        closing = self.spec.rounds - self.spec.usual_final_full_audit_rounds
        while self.taken < ROUNDS or self.pending:
            if 0 < self.taken < closing:
                for griefer in self._lying():
                    self._lie(griefer)
            self.round, self.taken = self.round + 1, self.taken + 1
            self._convict()
        return self

    def _lying(self) -> list[int]:
        able = [
            griefer
            for griefer in range(self.griefers)
            if max(self.back_in.get(griefer, 0), self.waits.get(griefer, 0)) <= self.round
            and not (self.probation and self.times[griefer])
        ]
        if self.taken % self.spec.anchor_rounds != self.plan.behind:
            return []
        return able[:1] if self.plan.in_turn else able

    def _lie(self, griefer: int) -> None:
        """Lie, and wait until no auditor can be drawn for this lie."""
        self.waits[griefer] = self.round + self.spec.audit_window + 1
        rate = sortition.audit_rate_of_round(
            self.spec.audit_rate, self.taken, self.spec.rounds, self.spec.usual_final_full_audit_rounds
        )
        chance = min(1.0, rate * self.spec.auditors / (self.peers - 1)) * (1 - LAPSES)
        if any(self.chance.random() < chance for _ in range(self.peers - self.griefers)):
            self.pending.append((self.round + 1 + DISPUTE_ROUNDS, griefer, self.taken))

    def _convict(self) -> None:
        due = [item for item in self.pending if item[0] <= self.round or self.taken >= ROUNDS]
        self.pending = [item for item in self.pending if item not in due]
        for _, griefer, _ in due:
            self.back_in[griefer] = self.round + 1 + (self.spec.suspension_rounds << self.times[griefer])
            self.times[griefer] += 1
        lies = [lie for _, _, lie in due if lie < self.taken]
        if lies:
            anchor = min(lies) // self.spec.anchor_rounds * self.spec.anchor_rounds
            self.undone += self.taken - anchor
            self.round, self.taken = self.round + 1, anchor
            self.pending = [item for item in self.pending if item[2] < anchor]


def measured(spec: JobSpec, peers: int, griefers: int, probation: bool, seeds: Sequence[int]) -> Row:
    """Measure the plan that undoes most rounds in the first seeds."""
    plans = [Plan(behind, in_turn) for behind, in_turn in product(range(spec.anchor_rounds), (False, True))]

    def jobs(plan: Plan, seeds: Sequence[int]) -> list[Job]:
        return [Job(spec, peers, griefers, plan, probation, seed).run() for seed in seeds]

    best = max(plans, key=lambda plan: sum(job.undone for job in jobs(plan, range(TUNED_ON))))
    found = jobs(best, seeds)
    undone = [job.undone for job in found]
    convictions = statistics.mean(sum(job.times.values()) for job in found)
    return Row(peers, griefers, probation, best.behind, best.in_turn, statistics.mean(undone), max(undone), convictions)


def job_of_local() -> JobSpec:
    fields = {**PRESETS["local"], "audit": AuditMode.SAMPLED, "rounds": ROUNDS}
    return JobSpec(name="griefers", data=bytes(32), **complete_fields(fields))


def undone_share(peers: int, griefers: int) -> float:
    """Return the undone rounds with this number of griefers, relative to a job of `ROUNDS` rounds."""
    seeds = range(TUNED_ON, 2 * TUNED_ON)
    return measured(job_of_local(), peers, griefers, probation=True, seeds=seeds).undone / ROUNDS


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title=f"rounds undone in a job of {ROUNDS}")
    for heading in ("n", "griefers", "probation", "lie behind an anchor", "in turn", "undone", "most", "convictions"):
        table.add_column(heading, justify="right")
    for row in rows:
        who = str(row.peers), str(row.griefers), "yes" if row.probation else "no"
        plan = f"{row.behind} rounds", "yes" if row.in_turn else "no"
        table.add_row(*who, *plan, f"{row.undone:.1f}", str(row.undone_most), f"{row.convictions:.2f}")
    return table


def verdicts(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        if row.probation and row.griefers:
            most = MORE_MAX[row.griefers]
            text = f"{row.griefers} of {row.peers}: at most {most:.0%} more rounds: {row.undone / ROUNDS:.1%}"
            found.append(verdict(row.undone / ROUNDS <= most, text))
    return found


def main() -> int:
    parser = Parser("griefers", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--seeds", type=COUNT, default=1_000, metavar="N", help="number of jobs of each row (default 1000)")
    options: argparse.Namespace = parser.parse_args()
    spec, started = job_of_local(), time.time()
    seeds = range(TUNED_ON, TUNED_ON + options.seeds)
    rows = [measured(spec, *group, probation, seeds) for group, probation in product(GROUPS, (True, False))]
    write(options.json, started, {"rounds": ROUNDS, "seeds": options.seeds, "rows": [asdict(row) for row in rows]})
    Console(width=120).print(table_of(rows))
    print(f"tuned on {TUNED_ON} other seeds: rounds behind an anchor 0 to {spec.anchor_rounds - 1}, together or in turn")
    return conclude(verdicts(rows))


if __name__ == "__main__":
    sys.exit(main())
