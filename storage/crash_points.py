"""Names of the moments before and after each durable write, at which a test can kill a peer.

With `FOLKMOOT_CRASH_AT=before-append-prepare:3` in its environment, a process kills itself with SIGKILL when it reaches this
crash point for the third time. Without the variable, crash points have no effect.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CRASH_POINT_VARIABLE = "FOLKMOOT_CRASH_AT"

# For each name of a durable write, the command or the moment of the write, and its content.
WRITES = {
    "identity.key": "`peer init`, `identity` and `join`: the secret key",
    "identity.next": "`peer rekey`: the new key, until the network has decided the rotation",
    "genesis": "`peer init` and `join`: the founding block",
    "store-create": "the first start: an empty database",
    "store-migrate": "the first start of a newer program: the database is migrated to its schema",
    "store-count": "the number of committed transactions, in a file beside the database",
    "append-propose": "our proposal in a view, in one transaction with the other records of the step",
    "append-prepare": "our prepare vote",
    "append-commit": "our commit vote",
    "append-timeout": "our timeout of a view",
    "append-proposal": "our update of a round",
    "append-vouch": "our verdicts on proposals of a round that we re-executed",
    "append-ballot": "our verdicts on a round's proposals",
    "append-cut-off": "our list of a round's ballots",
    "append-block": "the bytes of a block that is not decided yet",
    "append-certificate": "the highest prepare certificate",
    "append-decided": "a decided block",
    "append-evidence": "evidence: two messages of one signer that exclude each other",
    "append-silence": "the height below which this peer signs nothing, because it has lost signatures",
    "save-state": "the state after an applied block",
    "rows": "rows of tables, in the transaction of the state that contains their roots",
    "restore": "a snapshot: its state with the decisions that prove it",
    "measure": "measurements of a job's last model, for people",
    "blob": "a payload, a part of a data set or a trainer's buffer, which becomes durable before it gets its name",
    "blob-part": "a downloaded part of a large object",
    "blob-keep": "a temporary blob becomes permanent",
    "model-write": "a model, under its temporary name",
    "model-fetched": "the model of a snapshot, under its temporary name",
    "model-aside": "an older model of the same name gets a temporary name",
    "model-name": "the new model gets its name",
    "model-remove": "the older model is deleted",
    "file-invitation": "`peer join`: the invitation",
    "file-toml": "`peer init` and `join`: settings from the command line, for a later `peer run`",
    "file-addresses": "the address book",
    "file-txt": "a training text, assembled from its parts",
    "file-tokens": "a tokenized text (in the worker process)",
    "file-safetensors": "the parameters in an export",
}
POINTS = tuple(f"{side}-{write}" for write in WRITES for side in ("before", "after"))


def _armed() -> tuple[str, int] | None:
    text = os.environ.get(CRASH_POINT_VARIABLE)
    if not text:
        return None
    name, _, count = text.partition(":")
    if name not in POINTS or not (count or "1").isdecimal():
        sys.exit(f"{CRASH_POINT_VARIABLE}={text}: unknown crash point; `python -m scenarios.crash_points --list` lists all")
    return name, int(count or 1)


_trap = _armed()


@contextmanager
def crash_points(write: str) -> Iterator[None]:
    """Reach the crash point before the `with` block, and the crash point after it unless the block raises."""
    reach_point("before", write)
    yield
    reach_point("after", write)


def reach_point(side: str, write: str) -> None:
    global _trap
    if _trap is not None and _trap[0] == f"{side}-{write}":
        _trap = (_trap[0], _trap[1] - 1)
        if _trap[1] <= 0:
            os.write(sys.stderr.fileno(), f"crash point {_trap[0]}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
