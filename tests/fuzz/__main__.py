"""`python -m tests.fuzz --minutes 10`: the checks of the test suite with other values, for the given time."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from itertools import count

from tests.fuzz import checks, links, wire
from tests.fuzz.decoders import LOCAL, decoders

VALUES = 60  # of each decoder in one pass
LINKS, RUNS = "links", 20  # of links that hear messages in any order


def look(name: str, number: int) -> None:
    if name == LINKS:
        links.hear_anything(RUNS, number)
        return
    decoder = decoders()[name]
    kinds = [kind for kind in (*wire.messages(), *wire.records()) if name == f"{kind.__module__}.{kind.__qualname__}"]
    for kind in kinds:
        checks.decodes_to_itself(kind, VALUES, number)
        checks.keeps_to_its_bounds(kind, 2, number)
    checks.survives_mutations(decoder, VALUES, number)
    checks.survives_random_bytes(decoder, number)
    if name not in LOCAL:
        checks.keeps_to_its_memory(decoder, 3, number)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--only", metavar="NAME", choices=[*decoders(), LINKS], help=f"one decoder, or {LINKS}")
    parser.add_argument("--seed", type=int, default=1, help="of the first pass")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    names = [options.only] if options.only else [*decoders(), LINKS]
    for number in count(options.seed):
        for name in names:
            try:
                look(name, number)
            except Exception:  # any error is shown with the command that repeats it
                traceback.print_exc()
                print(f"1 failed: python -m tests.fuzz --only '{name}' --seed {number}")
                return 1
            if time.monotonic() >= end:
                print(f"{len(names)} readers, {number - options.seed + 1} passes begun, 0 failed")
                return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
