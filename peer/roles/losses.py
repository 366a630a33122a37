"""The losses of this peer's own rounds, as files that nobody can fetch, until they are opened on the log.

They are not durable before the proposal is: whoever loses them cannot open them, which costs a reward.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

from ledger.audits.losses import LOSSES_MAX, Loss
from protocol import codec
from protocol.codec import Length
from protocol.errors import RemoteProtocolError
from storage.blobs import JOB_BYTES

SUFFIX = ".losses"
Losses = Annotated[tuple[Loss, ...], Length(1, LOSSES_MAX)]

log = logging.getLogger("peer")


def keep(folder: Path, job: bytes, number: int, losses: Sequence[int]) -> None:
    _file(folder, job, number).write_bytes(codec.encode(tuple(losses)))


def read(folder: Path, job: bytes, number: int) -> tuple[int, ...] | None:
    """None if they are not here whole."""
    path = _file(folder, job, number)
    try:
        found: tuple[int, ...] = codec.decode(Losses, path.read_bytes())
        return found
    except (OSError, RemoteProtocolError) as error:
        log.warning("%s cannot be opened (%s): what that round earned is lost", path, error)
        return None


def delete(folder: Path, job: bytes, number: int) -> None:
    _file(folder, job, number).unlink(missing_ok=True)


def forget(folder: Path, but: Collection[tuple[bytes, int]]) -> None:
    """Deletes all but those of these jobs' rounds."""
    kept = {_file(folder, *place) for place in but}
    for path in folder.glob(f"*{SUFFIX}"):
        if path not in kept:
            path.unlink(missing_ok=True)


def _file(folder: Path, job: bytes, number: int) -> Path:
    return folder / f"{job[:JOB_BYTES].hex()}-{number}{SUFFIX}"
