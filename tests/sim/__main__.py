"""`python -m tests.sim --seeds 0:50` runs one network per seed and prints `N passed, N failed`."""

from __future__ import annotations

import argparse
import sys

from tests.sim.invariants import Violation
from tests.sim.simulation import Simulation

SIZES = (1, 2, 3, 4, 4, 4, 5, 7, 10)


def run_seed(seed: int) -> str | None:
    """What went wrong; None if nothing did."""
    try:
        Simulation(seed, n=SIZES[seed % len(SIZES)], observers=seed % 3).run()
    except Violation as violation:
        return str(violation)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seeds", default="0:50", help="first:last, the last one excluded")
    first, last = (int(part) for part in parser.parse_args().seeds.split(":"))
    failed = 0
    for seed in range(first, last):
        problem = run_seed(seed)
        if problem is not None:
            failed += 1
            print(f"seed {seed}: {problem}")
    print(f"{last - first - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
