"""`python -m tests.sim.mutants` hunts every planted bug, then runs the used seeds on unchanged code, which must pass."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import provenance
from tests.sim.mutants import LINES, MUTANTS, ChangedLine, Mutant
from tests.sim.mutants.hunts import work

Bug = Mutant | ChangedLine
ALL: tuple[Bug, ...] = (*MUTANTS, *LINES)
SEEDS_MAX = 2_000  # histories; a bug that none of them finds counts as missed
QUICK_SEEDS = 6  # show most bugs; these need more, or take long:
SLOW = (
    "parent-certificate-unchecked",
    "snapshot-root-unchecked",
    "no-answers",
    "old-commits-ignored",
    "notices-ignored",
    "order-of-dictionaries",
    "spoken-forgotten",
    "step-of-an-over-run",
    "failed-step-stays-open",
    "absent-trainer-stops-a-step",
    "checkpoints-end-with-their-run",
    "job-of-checkpoints-forgotten",
    "saved-models-not-kept",
    "lost-time-not-forgiven",
)
RARE = (
    "first-certificate",
    "certificates-of-any-height",
    "leader-by-certificate",
    "timeouts-of-any-view",
    "forgets-votes",
    "signs-although-wrong",
    "many-changes",
    "votes-by-looks",
    "commitment-replaced",
    "annotation-unsigned",
    "number-used-again",
    "anchor-after-the-lie",
)
HUNTS_OF_A_PROCESS = 10  # of quick bugs: the start of a process takes as long as three of them


def main() -> int:
    options, started = _options(), time.time()
    chosen = [mutant for mutant in ALL if not options.only or mutant.name in options.only]
    if options.quick:
        chosen, options.seeds_max = list(filter(_is_quick, chosen)), QUICK_SEEDS
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:30} {' or '.join(mutant.expects):36} {mutant.what}")
        return 0
    with multiprocessing.get_context("spawn").Pool(
        options.jobs, maxtasksperchild=HUNTS_OF_A_PROCESS if options.quick else 1
    ) as pool:
        hunts: list[dict[str, Any]] = []
        print(f"{'mutant':30} {'invariant':16} {'seed':>5} {'seconds':>8}")
        for found in pool.imap(work, [(mutant.name, mutant.scenario, options.seeds_max) for mutant in chosen]):
            hunts.append(found)
            print(f"{found['mutant']:30} {found['rule'] or 'MISSED':16} {found['seed']:>5} {found['seconds']:>8.1f}", flush=True)
    seeds = sorted(
        {(mutant.scenario, seed) for mutant, found in zip(chosen, hunts, strict=True) for seed in range(found["seed"] + 1)},
        key=repr,
    )
    if options.quick:  # the step `virtual` of `.ci/run` runs the tests of changed lines on unchanged code
        seeds = [(scenario, seed) for scenario, seed in seeds if scenario is not None]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:  # nothing is planted in these
        unharmed = pool.map(work, [("", scenario, seed) for scenario, seed in seeds], chunksize=1)
    failures = [
        {"scenario": repr(scenario), **found}
        for (scenario, _), found in zip(seeds, unharmed, strict=True)
        if found["rule"] is not None
    ]
    for failure in failures:
        print(f"FAILS UNHARMED: {failure['scenario']} seed {failure['seed']}: {failure['problem']}")
    missed = sum(found["rule"] is None for found in hunts)
    print(f"{len(hunts) - missed} caught, {missed} missed; unharmed: {len(seeds) - len(failures)} passed, {len(failures)} failed")
    figures = {"seeds_max": options.seeds_max, "hunts": hunts, "unharmed": len(seeds), "failures": failures}
    provenance.write(options.json, started, figures)
    return 1 if missed or failures else 0


def _is_quick(mutant: Bug) -> bool:
    return mutant.name not in (*RARE, *SLOW) and not mutant.name.startswith(("rollback-", "forgotten-", "snapshot-"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__)
    parser.add_argument("--list", action="store_true", help="the planted bugs and what must notice them")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", choices=[mutant.name for mutant in ALL])
    parser.add_argument("--quick", action="store_true", help=f"those that {QUICK_SEEDS} seeds show in a few seconds")
    parser.add_argument("--seeds-max", type=int, default=SEEDS_MAX, metavar="N", help=f"histories at most for each ({SEEDS_MAX})")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
