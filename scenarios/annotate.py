"""`python -m scenarios.annotate --abuse`: whoever cheats or lies gets a code, and changes nothing.

The abuse is in `scenarios/abuse.py`.
"""

from __future__ import annotations

import sys
from functools import partial

from scenarios import abuse, network
from scenarios.trials import arguments, duration


def main() -> int:
    parser = arguments("annotate", __doc__)
    parser.add_argument("--abuse", action="store_true", help="cheat and lie, once in each way")
    parser.add_argument("--minutes", type=duration, default=10.0, metavar="M", help="how long people annotate")
    options = parser.parse_args()
    return network.main(partial(abuse.run, options))


if __name__ == "__main__":
    sys.exit(main())
