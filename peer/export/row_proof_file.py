"""The file that proves one row of a ledger's table.

A peer writes the file, and anybody can check it without a peer or a network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from features.json_output import to_json_value
from ledger.core.genesis import Genesis
from ledger.ledger_state import LedgerState
from ledger.row_proofs import PROOF_FILE_BYTES_MAX, VerifiedRow, chain_id_of_proof, make_row_proof, verify_row_proof_file
from peer.features import known_modules
from protocol import codec
from protocol.api import RowProofView
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Ed25519Verifier
from protocol.limits import MESSAGE_BYTES_MAX, ROW_KEY_BYTES_MAX
from protocol.messages import LightBlock
from storage.regular_files import open_regular


def write_row_proof(
    genesis: Genesis, state: LedgerState, links: tuple[LightBlock, ...], table: str, key: bytes, path: Path
) -> RowProofView:
    """Write a proof to a new file, after a check of its content.

    Raises `UserError` if the table or the key is invalid, or the file cannot be written.
    """
    if table not in state.tables:
        known = f"it has {', '.join(state.tables)}" if state.tables else "its modules have no tables"
        raise UserError(f"this network has no table {table!r}: {known}")
    if not 1 <= len(key) <= ROW_KEY_BYTES_MAX:
        raise UserError(f"the key has {len(key)} bytes: keys of tables have 1 to {ROW_KEY_BYTES_MAX}")
    data = make_row_proof(genesis, state, links, table, key)
    found = _checked(data, "this proof")
    _write(path, data)
    row_bytes = len(codec.encode(state.tables[table].prove_key(key)))
    return RowProofView(str(path), found.height, found.value is not None, len(data), row_bytes)


def _write(path: Path, data: bytes) -> None:
    try:
        with open(path, "xb") as stream:
            try:
                stream.write(data)
                stream.flush()
            except OSError:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise UserError(f"{path} already exists: choose a new file") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """The facts that a proof file proves, for people and programs. Bytes are in hex."""

    network: str
    chain_id: str
    trust: str  # source of the trusted chain id, in words
    height: int  # height of the block after which the state contains the row
    state_root: str
    certified_by: int  # height of the block that contains this state root
    certified_ms: int  # time of that block in ms
    signatures: int
    voters: int
    links: int  # number of changes of the voter set that lead from the genesis to that block
    table: str
    is_table: bool  # False if this program does not know the module: only the file then claims that the field is a table
    rows: int
    key: str
    has_row: bool
    value: str  # value of the row; empty if the table has no such row
    record: Any  # fields of the value, or None without a row or if this program does not know the type of the value


def verify_row_proof(path: Path, trusted: str, genesis: Path | None, unknown_module: bool = False) -> RowVerdict:
    """Check a proof file and return its facts. Raises `UserError` with the reason if the proof is invalid.

    `trusted` is the known chain id in hex, and `genesis` is a file with the known genesis. These two are optional.
    `unknown_module` allows a module that this program does not know: the caller then trusts the file's claim that the field is a
    table.
    """
    data = _read(path, PROOF_FILE_BYTES_MAX)
    chain_id, trust = _chain_of(data, str(path)), ""
    if genesis is not None:
        _require_same(path, chain_id, _chain_id(genesis), str(genesis))
        trust = f"the genesis in {genesis}"
    if trusted:
        if not re.fullmatch("[0-9a-fA-F]{64}", trusted):
            raise UserError(f"--chain-id {trusted!r} is not a chain id: it must have 64 hexadecimal digits")
        _require_same(path, chain_id, trusted.lower(), "--chain-id")
        trust = trust or "the given chain id"
    found = _checked(data, str(path))
    module, field = found.table.split("/")
    if not (found.is_known or unknown_module):
        lacks = f"this program does not know {module} {found.version}"
        way_out = "install a release that does, or trust the file with --unknown-module"
        raise UserError(f"{path}: {lacks} and cannot tell whether its field {field} is a table: {way_out}")
    assert found.genesis.chain_id.hex() == chain_id
    header = found.certified.header
    return RowVerdict(
        network=found.genesis.network,
        chain_id=chain_id,
        trust=trust or "only the file: compare the chain id with one from a person you trust, or give --genesis or --chain-id",
        height=found.height,
        state_root=header.state_root.hex(),
        certified_by=header.height,
        certified_ms=header.time_ms,
        signatures=len(found.certified.certificate.signatures),
        voters=len(found.voters),
        links=found.voter_set_change_count,
        table=found.table,
        is_table=found.is_known,
        rows=found.root.rows,
        key=found.key.hex(),
        has_row=found.value is not None,
        value=found.value.hex() if found.value is not None else "",
        record=to_json_value(found.record),
    )


def _chain_of(data: bytes, what: str) -> str:
    try:
        return chain_id_of_proof(data).hex()
    except RemoteProtocolError as error:
        raise UserError(f"{what} is invalid: {error}") from None


def _checked(data: bytes, what: str) -> VerifiedRow:
    try:
        return verify_row_proof_file(data, known_modules(), Ed25519Verifier())
    except RemoteProtocolError as error:
        raise UserError(f"{what} is invalid: {error}") from None


def _chain_id(path: Path) -> str:
    try:
        return Genesis.decode(_read(path, MESSAGE_BYTES_MAX)).chain_id.hex()
    except RemoteProtocolError as error:
        raise UserError(f"{path} is not a genesis: {error}") from None


def _require_same(path: Path, found: str, trusted: str, where: str) -> None:
    if found != trusted:
        raise UserError(f"{path} belongs to another network: its chain is {found[:16]}…, that of {where} is {trusted[:16]}…")


def _read(path: Path, size_max: int) -> bytes:
    try:
        with open_regular(path) as stream:
            data = stream.read(size_max + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > size_max:
        raise UserError(f"{path} has more than {size_max} bytes")
    return data
