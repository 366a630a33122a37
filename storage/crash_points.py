"""Names of the moments before and after each durable write, at which a test can kill a peer.

With `FOLKMOOT_CRASH_AT=before-append-prepare:3` in its environment a process kills itself with SIGKILL when it reaches that point
for the third time. Without the variable the points do nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CRASH_POINT_VARIABLE = "FOLKMOOT_CRASH_AT"

# Name of a durable write -> its command or moment, and its content.
WRITES = {
    "identity.key": "`peer init`, `identity` and `join`: the secret key",
    "identity.next": "`peer rekey`: the key to come",
    "genesis": "`peer init` and `join`: the founding block",
    "store-create": "the first start: an empty database",
    "store-migrate": "the first start of a newer program: the database gets its form",
    "store-count": "how many transactions were committed, in a file beside the database",
    "append-propose": "the journal, in one transaction with all else of the turn: our block for a view",
    "append-prepare": "our vote of the first phase",
    "append-commit": "our vote of the second phase",
    "append-timeout": "our vote to end a view",
    "append-proposal": "our update of a round",
    "append-vouch": "our verdicts on updates of a round that we re-executed",
    "append-ballot": "our verdicts on a round's updates",
    "append-cut-off": "the list of ballots that we hold of a round",
    "append-block": "the bytes of a block that is not decided yet",
    "append-certificate": "the highest prepare certificate",
    "append-decided": "a decided block",
    "append-evidence": "two messages that no honest peer signs both",
    "append-silence": "until which height nothing is signed, because own signatures are missing here",
    "save-state": "the state after a block was applied",
    "rows": "rows of tables, inside the transaction of the state that names their roots",
    "restore": "a snapshot: its state with the decisions that prove it",
    "measure": "figures for people, of a job's last model",
    "blob": "payloads, pieces of data and what a proposal commits to, made durable and then named",
    "blob-part": "a part of a large object that others send, in its place",
    "blob-keep": "a blob that was to pass is kept",
    "model-write": "a model, beside its final name",
    "model-fetched": "the model of a snapshot, beside its final name",
    "model-aside": "a model of the same name moves aside",
    "model-name": "the new model gets its name",
    "model-remove": "what was moved aside goes",
    "file-invitation": "`peer join`: the permission to join",
    "file-toml": "`peer init` and `join`: what the command line said, for a later `peer run`",
    "file-addresses": "where members were reached",
    "file-txt": "a training text, put together from its pieces",
    "file-tokens": "a tokenized text (in the worker process)",
    "file-safetensors": "the parameters of an export",
}
POINTS = tuple(f"{side}-{write}" for write in WRITES for side in ("before", "after"))


def _armed() -> tuple[str, int] | None:
    text = os.environ.get(CRASH_POINT_VARIABLE)
    if not text:
        return None
    name, _, count = text.partition(":")
    if name not in POINTS or not (count or "1").isdecimal():
        sys.exit(f"{CRASH_POINT_VARIABLE}={text}: no such crash point; `python -m scenarios.crash_points --list` shows them")
    return name, int(count or 1)


_trap = _armed()


@contextmanager
def crash_points(write: str) -> Iterator[None]:
    """Reach the point before the block, and the point after it if it raises nothing."""
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
