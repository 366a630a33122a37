"""A program that uses a given share of one processor: `python -m scenarios.burn SHARE`, a part of `scenarios.hostile`.

It prints nothing and ends with its standard input.
"""

from __future__ import annotations

import select
import sys
import time

PAUSE_SECONDS = 0.002


def main(share: float) -> None:
    started, before = time.monotonic(), time.process_time()
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        while time.process_time() - before < share * (time.monotonic() - started):
            """Also what others kept it from."""


if __name__ == "__main__":
    main(float(sys.argv[1]))
