"""`python -m tests.sim --seeds 0:200` runs one network per seed and prints `N passed, N failed`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from features.command_arguments import parse_integer_in
from peer.commands.command_line_parser import CommandLineParser
from protocol.errors import UserError
from tests.sim import campaign, heartbeats, shrink
from tests.sim.plan import BLOCKS

EXAMPLES = """examples:
  python -m tests.sim --seeds 0:200 --jobs 2              two hundred histories of four peers
  python -m tests.sim --seeds 0:20000 --json out.json     the same, with figures; --resume goes on after an interruption
  python -m tests.sim --n 7 --seed 12                     one history, with the list of its faults
  python -m tests.sim --seed 12 --shrink                  which of its faults make it fail
  python -m tests.sim --seed 12 --keep 3,9,14             one history with only these faults
  python -m tests.sim --twins 0:200                       two machines with one key, and partitions view by view
  python -m tests.sim --partitions 0:500                  splits, healed and flapping
  python -m tests.sim --heartbeats                        an hour of pings on bad links, then one peer falls silent
"""


def main(arguments: list[str] | None = None) -> int:
    try:
        options = _options(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if options.seed is not None:
        return _one(options)
    if options.keep is not None or options.shrink:
        print("--keep and --shrink are about one history: name it with --seed", file=sys.stderr)
        return 2
    if options.heartbeats is not None:
        return heartbeats.run(options.heartbeats, options.n or heartbeats.N, options.json)
    for kind in ("seeds", "twins", "partitions"):
        span = getattr(options, kind)
        if span is not None:
            return campaign.run(kind, span, options.n, options.jobs, options.json, options.resume, options.verbose)
    return campaign.run("seeds", (0, 50), options.n, options.jobs, options.json, options.resume, options.verbose)


def _one(options: argparse.Namespace) -> int:
    kind = "twins" if options.twins else "partitions" if options.partitions else "seeds"
    if options.shrink:
        return shrink.shrink(kind, options.seed, options.n)
    return campaign.replay(kind, options.seed, options.n, options.keep)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = CommandLineParser(
        prog="python -m tests.sim",
        description=f"Whole networks of real peers in virtual time: one seed is one history of at least {BLOCKS} blocks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=_span, metavar="FIRST:LAST", help="histories to run, the last one excluded (0:50)")
    parser.add_argument("--twins", type=_span, metavar="FIRST:LAST", help="Twins scenarios to run")
    parser.add_argument("--partitions", type=_span, metavar="FIRST:LAST", help="partition scenarios to run")
    about = f"hours of pings to run, on clean links and on bad ones ({':'.join(map(str, heartbeats.SEEDS))})"
    parser.add_argument("--heartbeats", type=_span, nargs="?", const=heartbeats.SEEDS, metavar="FIRST:LAST", help=about)
    parser.add_argument(
        "--n", type=parse_integer_in(2), help="founding voters (4; of partitions 4 and 7 by turns, of heartbeats 7)"
    )
    parser.add_argument("--seed", type=int, help="run this one and say what happens in it")
    parser.add_argument("--keep", type=_numbers, metavar="N,N,…", help="with --seed: only the faults of these numbers")
    parser.add_argument("--shrink", action="store_true", help="with --seed: the fewest faults that still break the same rule")
    parser.add_argument("--jobs", type=parse_integer_in(1), default=1, help="processes (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, every 20 s and at the end")
    parser.add_argument("--resume", action="store_true", help="with --json: go on where FILE ends")
    parser.add_argument("--verbose", action="store_true", help="a line for every history")
    return parser.parse_args(arguments)


def _span(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, such as 0:50")
    if int(first) >= int(last):
        raise argparse.ArgumentTypeError(f"{text!r} is empty: LAST is excluded, {first}:{int(first) + 1} is one history")
    return int(first), int(last)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _until_nobody_reads() -> int:
    """Run `main`, and exit quietly when a reader such as `head` closes the pipe."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the interpreter's own flush fails again
        return 1
    return status


if __name__ == "__main__":
    sys.exit(_until_nobody_reads())
