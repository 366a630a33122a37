"""Checks agreement.pml with spin: `make model`. Prints what held, what broke, and how many states that took.

A row that ends otherwise than it should makes the exit status 1. A search that is cut short counts as neither.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).with_name("agreement.pml")
MEMORY_MEGABYTES = 4_000
DEPTH_MAX = 100_000  # steps of one run; the deepest seen has 610
HOLDS, BROKEN, REACHED = "holds", "broken", "reached"


@dataclass(frozen=True)
class Row:
    name: str
    expected: str
    flags: tuple[str, ...]


SAFETY = ("AGREEMENT", "ONE_CERTIFICATE", "ONE_SIGNATURE")
ROWS = (
    Row("agreement, one certificate per view and phase, one signature per slot", HOLDS, SAFETY),
    Row("view 0: all honest voters commit", REACHED, ("REACH_VIEW_0",)),
    Row("view 1: they commit after a silent leader", REACHED, ("REACH_SILENT_LEADER",)),
    Row("view 1: they commit the block that one of them committed in view 0", REACHED, ("REACH_CARRY_OVER",)),
    Row("bug: quorum of 2", BROKEN, ("AGREEMENT", "QUORUM=2")),
    Row("bug: quorum of 2f + 1 = 3 with n = 6", BROKEN, ("AGREEMENT", "HONEST=5")),
    Row("bug: two faulty voters of four", BROKEN, ("AGREEMENT", "HONEST=2", "LIARS=2")),
    Row("bug: one voter counted twice", BROKEN, ("AGREEMENT", "BUG_DUPLICATES")),
    Row("bug: timeouts name no certificate", BROKEN, ("AGREEMENT", "BUG_FORGOTTEN_LOCK")),
    Row("bug: prepare certificate lost in a crash", BROKEN, ("AGREEMENT", "BUG_VOLATILE_LOCK")),
    Row("bug: signatures lost in a crash", BROKEN, ("ONE_SIGNATURE", "BUG_AMNESIA")),
    Row("bug: signatures lost in a crash, seen in decisions", BROKEN, ("AGREEMENT", "BUG_AMNESIA")),
    Row("bug: commit after a timeout", BROKEN, ("AGREEMENT", "BUG_COMMIT_AFTER_TIMEOUT")),
    Row("bug: prepared block need not be proposed again", BROKEN, ("AGREEMENT", "BUG_NO_CARRY_OVER")),
    Row("bug: phase left out of the signature", BROKEN, ("AGREEMENT", "BUG_PHASE_UNSIGNED")),
    Row("bug: view left out of the signature (3 views)", BROKEN, ("AGREEMENT", "BUG_VIEW_UNSIGNED", "VIEWS=3")),
    Row("bug: timeouts of an older view justify a proposal (3 views)", BROKEN, ("AGREEMENT", "BUG_STALE_TIMEOUTS", "VIEWS=3")),
    Row("bug: some certificate instead of the highest (3 views)", BROKEN, ("AGREEMENT", "BUG_FIRST_CERTIFICATE", "VIEWS=3")),
    Row("no bug for agreement: prepare after a timeout", HOLDS, ("AGREEMENT", "BUG_PREPARE_AFTER_TIMEOUT")),
)


def main() -> int:
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        print(f"make model needs {' and '.join(missing)}; on Debian: apt-get install spin gcc", file=sys.stderr)
        return 2
    print(f"{'what':<72} {'should be':>9} {'is':>10} {'states':>11} {'seconds':>8}", flush=True)
    wrong = [row.name for row in ROWS if not shown(row)]
    return 1 if wrong else 0


def shown(row: Row) -> bool:
    print(f"{row.name:<72} {row.expected:>9} ", end="", flush=True)
    started = time.monotonic()
    errors, states = search(row.flags)
    seconds = time.monotonic() - started
    found = {None: "incomplete", 0: HOLDS}.get(errors, REACHED if row.expected == REACHED else BROKEN)
    print(f"{found:>10} {states:>11,} {seconds:>8.1f}", flush=True)
    return found == row.expected


def search(flags: tuple[str, ...]) -> tuple[int | None, int]:
    """Errors found, None if the search could not be finished; and the states that were seen."""
    with tempfile.TemporaryDirectory() as folder:
        run(folder, "spin", "-a", *(f"-D{flag}" for flag in flags), str(MODEL))
        run(folder, "gcc", "-O2", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MEGABYTES}", "-o", "pan", "pan.c")
        output = run(folder, "./pan", f"-m{DEPTH_MAX}")
    states = re.search(r"^ *([\d.e+]+) states, stored", output, re.MULTILINE)
    errors = re.search(r"errors: (\d+)", output)
    if states is None or errors is None or re.search(r"max search depth too small|reached -DMEMLIM|out of memory", output):
        return None, 0
    whole = "Search not completed" not in output
    count = int(errors[1])
    return (count if whole or count else None), int(float(states[1]))


def run(folder: str, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode and command[0] != "./pan":
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
