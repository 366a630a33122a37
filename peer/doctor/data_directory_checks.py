"""The data directory of a peer: what is there, whose it is, and whether a peer could start with it."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from ledger.core.genesis import Genesis
from peer.doctor.findings import DoctorFinding, fault, fault_of_error, ok, warning
from peer.settings.data_directory import DataDirectory
from protocol.errors import LostVotesError, RemoteProtocolError, UserError
from protocol.identity import peer_id
from storage.ledger_store import ReadOnlyStore

NO_PEER_ADVICE = "make a peer there with `peer init` or `peer join`, or name another place with --data-dir"


def check_key(directory: DataDirectory) -> tuple[bytes | None, list[DoctorFinding]]:
    """The peer's public key, if the peer can sign and nobody else as it."""
    path = directory.identity_key
    if not path.exists():
        return None, [fault("key", f"{path} is not there", NO_PEER_ADVICE)]
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        text = f"{path} has mode {mode:04o}: others of this machine can sign as this peer"
        advice = f"chmod 600 {shlex.quote(str(path))}; if anybody may have read it, stop the peer and give `peer rekey`"
        return None, [fault("key", text, advice)]
    try:
        key = directory.load_identity().public
    except UserError as error:
        return None, [fault_of_error("key", error, "restore it from a copy")]
    found = [ok("key", f"{peer_id(key)}, mode {mode:04o}")]
    if directory.former_key.exists():
        text = f"{directory.former_key} is there: the network has not decided the change of this key yet"
        found.append(warning("key", text, "let the peer run until it has; a quorum of voters must be there"))
    return key, found


def why_unusable(path: Path) -> DoctorFinding | None:
    """Why nothing can be looked at in this place."""
    if not path.is_dir():
        return fault("data", f"{path} is not there", NO_PEER_ADVICE)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return fault("data", f"{path} cannot be used by user {os.getuid()}", f"run as user {path.stat().st_uid}, or chown it")
    return None


def check_folder(path: Path) -> Iterator[DoctorFinding]:
    if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o022:
        yield warning("data", f"{path} has mode {mode:04o}: others of this machine can replace files in it", f"chmod go-w {path}")


def check_network(directory: DataDirectory) -> tuple[Genesis | None, list[DoctorFinding]]:
    """The network that the peer belongs to."""
    if not directory.genesis.exists():
        text = f"{directory.path} belongs to no network yet"
        return None, [fault("data", text, "found one with `peer init`, or `peer join INVITATION`")]
    try:
        genesis = Genesis.decode(directory.genesis.read_bytes())
    except (RemoteProtocolError, OSError) as error:
        return None, [fault("data", f"{directory.genesis} is damaged: {error}", "copy it from a peer of the same network")]
    return genesis, [ok("data", f"{directory.path}, network {genesis.network}")]


def last_block_ms(directory: DataDirectory, genesis: Genesis) -> tuple[int | None, list[DoctorFinding]]:
    """The time in the last block that a stopped peer holds, and what is to be said of its database, which stays as it is.

    The caller holds the directory's lock.
    """
    if not directory.ledger.exists() and not directory.ledger.with_name("ledger.sqlite.committed").exists():
        return None, []  # it has never run
    try:
        with contextlib.closing(ReadOnlyStore(directory.ledger, genesis.chain_id)) as store:
            if store.is_older:
                text = f"{directory.ledger} is whole, of format {store.version}: the next start brings it to the present one"
                return None, [ok("data", f"{text}; its blocks were not read")]
            height = store.decided_height
            decided = store.get_decision(height) if height else None
    except LostVotesError as error:
        return None, [
            fault_of_error("data", error, "give `peer rekey`: with a new key it contradicts nothing that the old one signed")
        ]
    except UserError as error:
        return None, [fault_of_error("data", error, "look at the disk and at the owner of the file")]
    return (None if decided is None else decided.decode().time_ms), []
