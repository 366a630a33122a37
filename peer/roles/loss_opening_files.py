"""What this peer's proposals commit to and it has to open, as files that nobody can fetch, until they are opened on the log.

A file holds the secret, too: a peer that has changed its key cannot make that again. It is not durable before the proposal is:
whoever loses it cannot open anything, which costs a reward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from ledger.audits.loss_commitments import LossOpening
from protocol import codec
from protocol.errors import RemoteProtocolError
from storage.disk_blob_store import JOB_BYTES

SUFFIX = ".losses"

log = logging.getLogger("peer")


def save_opening(folder: Path, opening: LossOpening) -> None:
    opening_path(folder, opening.job, opening.round, opening.trainer).write_bytes(codec.encode(opening))


def read_opening(folder: Path, job: bytes, number: int, trainer: bytes) -> LossOpening | None:
    """None if it is not here whole."""
    path = opening_path(folder, job, number, trainer)
    try:
        found: LossOpening = codec.decode(LossOpening, path.read_bytes())
        return found
    except (OSError, RemoteProtocolError) as error:
        log.warning("%s cannot be opened (%s): what that round earned is lost", path, error)
        return None


def list_opening_files(folder: Path) -> set[Path]:
    return set(folder.glob(f"*{SUFFIX}"))


def delete_files(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def opening_path(folder: Path, job: bytes, number: int, trainer: bytes) -> Path:
    return folder / f"{round_file_prefix(job, number)}{trainer.hex()}{SUFFIX}"


def round_file_prefix(job: bytes, number: int) -> str:
    """Begins the names of all files of a round. A peer that changed its key may have proposed with both keys."""
    return f"{job[:JOB_BYTES].hex()}-{number}-"
