"""`peer tasks verify DIR`: reads a folder of proven labels and checks it, without a peer."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path

from curation.import_export.export_proofs import (
    FILE_BYTES_MAX,
    LABELS,
    LABELS_PROOF,
    PAGES,
    LabelProofVerifier,
    VerifiedExport,
    iter_frames,
)
from curation.ledger.curation_module import CurationModule
from features.text_tables import KeyValueTable, pluralize
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Ed25519Verifier
from storage.regular_files import open_regular


def verify_folder(directory: Path, chain_id: str) -> VerifiedExport:
    """Raises `UserError`, which names the file, the line and what does not fit. `chain_id` is in hex; empty: any chain."""
    if chain_id and not re.fullmatch("[0-9a-fA-F]{64}", chain_id):
        raise UserError(f"--chain-id {chain_id!r} is no chain id, which has 64 hexadecimal digits")

    def read(name: str) -> bytes:
        path = directory / name
        if name.startswith(f"{PAGES}/") and not path.exists():
            return b""
        with open_regular(path) as stream:
            return stream.read(FILE_BYTES_MAX)

    try:
        folder = LabelProofVerifier(read, (CurationModule(),), Ed25519Verifier())
        found = folder.row.genesis.chain_id.hex()
        if chain_id and found != chain_id.lower():
            raise UserError(f"{directory} proves nothing here: it is of the chain {found[:16]}…, --chain-id is {chain_id[:16]}…")
        with (
            TextIOWrapper(open_regular(directory / LABELS), encoding="utf-8", newline="\n") as labels,
            open_regular(directory / LABELS_PROOF) as proofs,
        ):
            return folder.verify_lines(labels, iter_frames(proofs))
    except OSError as error:
        raise UserError(
            f"cannot read {error.filename}: {error.strerror}; `tasks export PROJECT --proofs` writes such a folder"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{directory / LABELS} is no text in UTF-8") from None
    except RemoteProtocolError as error:
        raise UserError(f"{directory}: {error.detail or error}") from None


def verification_table(found: VerifiedExport, trusted: str) -> KeyValueTable:
    row, header = found.row, found.row.certified.header
    at = f"{datetime.fromtimestamp(header.time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    signed = f"{len(row.certified.certificate.signatures)} of {len(row.voters)} voters signed"
    lines = pluralize(found.lines, "label")
    return KeyValueTable(
        {
            "network": f"{row.genesis.network}, chain id {row.genesis.chain_id.hex()}",
            "trust from": "the chain id that you gave"
            if trusted
            else "the folder alone: compare the chain id, or say --chain-id",
            "state": f"after height {row.height}, root {header.state_root.hex()}",
            "certified": f"by block {header.height} of {at}, which {signed}",
            "project": f"{row.key.hex()} ({found.project.spec.name})",
            "labels": f"{lines}, each as decided, with every vote; none is missing"
            + (f"; {found.without_text} without its text" if found.without_text else ""),
        }
    )
