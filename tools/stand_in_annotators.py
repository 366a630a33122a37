"""`python -m tools.stand_in_annotators ADDRESS`: three people who answer tasks at a peer until none is left, for tests of pages.

The three people send the same HTTP requests as the pages, each with an own key, and always choose the first option.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from typing import Final

from curation.simulated_annotators import ServingPeerClient, SimulatedAnnotator
from protocol.identity import Identity

PEOPLE: Final = 3
IDLE_SECONDS: Final = 8.0  # time without a new answer after which the program ends: each answer waits for a block
SECONDS_MAX: Final = 120.0


def main() -> int:
    about = "Three people answer the tasks of a peer."
    parser = argparse.ArgumentParser(prog="python -m tools.stand_in_annotators", description=about)
    parser.add_argument("address", metavar="ADDRESS", help="URL of the peer's pages, such as http://127.0.0.1:7780")
    address = parser.parse_args().address
    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    site = ServingPeerClient(host, int(port))
    people = [
        SimulatedAnnotator(f"person {number + 1}", Identity(bytes([number + 1] * 32)), 1.0, site, defaultdict(int), 0.0)
        for number in range(PEOPLE)
    ]
    ends = time.monotonic() + SECONDS_MAX
    last_answer, answers = time.monotonic(), 0
    while time.monotonic() < min(ends, last_answer + IDLE_SECONDS) or not answers:
        for person in people:
            person.run_step()
        if (count := sum(len(person.sent_answers) for person in people)) > answers:
            last_answer, answers = time.monotonic(), count
        if time.monotonic() > ends:
            break
        time.sleep(0.2)
    print(f"{answers} answers")
    return 0 if answers else 1


if __name__ == "__main__":
    sys.exit(main())
