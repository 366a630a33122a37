"""A peer of a scenario that serves annotators: `python -m scenarios.serving run …`. Its links go through the scenario's proxy."""

from __future__ import annotations

import os
import sys

from demo.demo_peers import DemoPeer
from scenarios import proxy

VARIABLE = "FOLKMOOT_SERVING"  # its role


def dress(peer: DemoPeer, port: int) -> None:
    peer.module = ("scenarios.serving",)
    peer.environment |= {
        VARIABLE: "full" if peer.trains else "annotator",
        "PEER_WEB_LISTEN": f"127.0.0.1:{port}",
        "PEER_SIGN_UP": "open",
    }


if __name__ == "__main__":
    sys.argv += ["--role", os.environ[VARIABLE]]  # the last option counts
    sys.exit(proxy.main())
