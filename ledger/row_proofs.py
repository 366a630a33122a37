"""Proofs of one row of a table, or of its absence, for a verifier that knows only a genesis and is offline.

`docs/protocol/tables.md` defines the file byte by byte. Each step of the proof depends on the former step:

- The genesis names the first voters.
- Links lead from them to the voters of the last header, who signed its certificate.
- That header names the state root after the height before it.
- The state root covers the digests of all modules.
- The module's bytes contain the root of the table, which covers the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Final

from consensus.light_client import LightClient, VerifiedHeader
from consensus.voter_set import VoterSet
from ledger.core.genesis import MODULES_MAX, Genesis
from ledger.core.module import Module
from ledger.ledger_state import LedgerState, module_digest, state_root_over
from ledger.network_governance import NetworkModule, NetworkState
from ledger.snapshots.snapshot_assembly import SNAPSHOT_MODULE_BYTES_MAX
from ledger.tables import KeyProof, TableRoot, record_type, table_fields, verify_key
from ledger.tables.table_proofs import RowKey, RowValue
from protocol.codec import Count, Digest, Length, decode, decode_message, encode, encoded_item
from protocol.errors import RemoteProtocolError
from protocol.identity import Verifier
from protocol.limits import MESSAGE_BYTES_MAX, ROW_BYTES_MAX
from protocol.messages import LightBlock, Name
from protocol.name_validation import name_problem

# Light blocks in one file: enough for seven years of a network that changes its voters every hour.
PROOF_LINKS_MAX: Final = 1 << 16
# Maximum bytes of a file: two modules of the largest size. The `network` module needs a thousandth of that, which leaves room
# for the links. The reader of a malicious file allocates this memory once.
PROOF_FILE_BYTES_MAX: Final = 2 * SNAPSHOT_MODULE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class RowProof:
    genesis: Annotated[bytes, Length(1, MESSAGE_BYTES_MAX)]
    # Links from the genesis on; the last header names the state root.
    light_blocks: Annotated[tuple[LightBlock, ...], Length(1, PROOF_LINKS_MAX)]
    digests: Annotated[dict[Name, Digest], Length(1, MODULES_MAX)]  # module name -> digest of the module's state
    # Encoded state of the module `network`, with the versions of all modules.
    network: Annotated[bytes, Length(1, SNAPSHOT_MODULE_BYTES_MAX)]
    module: Name
    state: Annotated[bytes, Length(1, SNAPSHOT_MODULE_BYTES_MAX)]  # encoded state of the module with the table
    field: Count  # index of the table among the fields of `state`
    key: RowKey
    value: RowValue | None  # encoded record; nil: the key has no row
    proof: KeyProof


@dataclass(frozen=True, slots=True)
class RowProofFile:
    """A file with a row proof, in format 1.

    The digest detects accidental damage. It proves nothing, because anybody can compute it.
    """

    TAG: ClassVar[str] = "row-proof-1"
    content: Annotated[bytes, Length(1, PROOF_FILE_BYTES_MAX)]  # a `RowProof`
    digest: Digest


@dataclass(frozen=True, slots=True)
class VerifiedRow:
    """The facts that a row proof proves to a verifier that trusts its genesis.

    `record` is None without a value or a known type.
    """

    genesis: Genesis
    height: int  # height of the last block in the proven state: the ledger's state that the row belongs to
    certified: VerifiedHeader  # header of the next block, which contains the root of the proven state
    voters: VoterSet  # voters that decided the next block
    voter_set_change_count: int  # number of changes of the voter set since the genesis
    version: int  # version of the module that has the table
    is_known: bool  # whether this program knows that version; otherwise only the file states that the field is a table
    table: str  # table as "module/field"; the field is an index from 0 if this program does not know the version
    root: TableRoot
    key: bytes
    value: bytes | None
    record: Any
    state: bytes  # encoded state of the module, with the roots of its other tables

    def root_of(self, state_type: type, field: str) -> TableRoot:
        """Return the root of another table of the same module, whose state has this type. Raises `RemoteProtocolError`."""
        names = [of.name for of in fields(state_type)]
        return _table_root(self.state, self.table.split("/")[0], names.index(field))


# Making ------------------------------------------------------------------------------------------------------------------


def make_row_proof(genesis: Genesis, state: LedgerState, links: tuple[LightBlock, ...], table: str, key: bytes) -> bytes:
    """Return a file that proves one row of a table of `state`, whose root the last link certifies. May raise `StorageError`."""
    name, _, field = table.partition("/")
    value = state.modules[name]
    rows = state.tables[table]
    content = RowProof(
        genesis=encode(genesis),
        light_blocks=links,
        digests={of: module_digest(state.encoded_module(of)) for of in sorted(state.modules)},
        network=state.encoded_module(NetworkModule.name),
        module=name,
        state=state.encoded_module(name),
        field=[item.name for item in fields(value)].index(field),
        key=key,
        value=rows.encoded_record(key),
        proof=rows.prove_key(key),
    )
    return encode_row_proof_file(content)


def encode_row_proof_file(content: RowProof) -> bytes:
    data = encode(content)
    return encode(RowProofFile(data, hashlib.sha256(data).digest()))


# Checking ----------------------------------------------------------------------------------------------------------------


def chain_id_of_proof(data: bytes) -> bytes:
    """Return the chain id that a file claims, before any other check. Raises `RemoteProtocolError`."""
    file = decode_message(data, (RowProofFile,), PROOF_FILE_BYTES_MAX)
    return Genesis.decode(decode(RowProof, file.content, PROOF_FILE_BYTES_MAX).genesis).chain_id


def verify_row_proof_file(data: bytes, modules: Iterable[Module[Any]], verifier: Verifier) -> VerifiedRow:
    """Verify a file and return its facts. Raises `RemoteProtocolError` with the step that failed.

    `modules` are those of this program. The caller must check the genesis, whose hash is the chain id: the whole proof depends on
    it.
    """
    file = decode_message(data, (RowProofFile,), PROOF_FILE_BYTES_MAX)
    if hashlib.sha256(file.content).digest() != file.digest:
        raise _bad("the file is damaged: its content does not match its digest")
    content = decode(RowProof, file.content, PROOF_FILE_BYTES_MAX)
    genesis = Genesis.decode(content.genesis)
    for name in (content.module, *content.digests):
        if "/" in name or name_problem(name):
            raise _bad(f"{name!a} is not a valid module name")
    path = LightClient(genesis.chain_id, verifier, 0, genesis.voters, None)
    for link in content.light_blocks[:-1]:
        path.verify_light_block(link)
    voters = path.voters  # voters of the block in the last link
    certified = path.verify_light_block(content.light_blocks[-1])
    if state_root_over(content.digests) != certified.header.state_root:
        raise _bad(f"the modules do not match the state root in block {certified.header.height}")
    network = _module(content, NetworkModule.name, content.network)
    state = _module(content, content.module, content.state)
    root = _table_root(state, content.module, content.field)
    if not verify_key(root.hash, content.key, content.value, content.proof):
        has_row = content.value is not None
        raise _bad("the row does not match the root of its table" if has_row else "the proof does not exclude a row")
    version = decode(NetworkState, network, len(network)).module_version(content.module)
    kind = next((of.state_type for of in modules if (of.name, of.version) == (content.module, version)), None)
    field, record = str(content.field), None
    if kind is not None:
        field = dict(enumerate(of.name for of in fields(kind))).get(content.field, "")
        if field not in table_fields(kind):
            raise _bad(f"field {content.field} of the module {content.module!r} is not a table")
        record = None if content.value is None else decode(record_type(kind, field), content.value, ROW_BYTES_MAX)
    return VerifiedRow(
        genesis=genesis,
        height=certified.header.height - 1,
        certified=certified,
        voters=voters,
        voter_set_change_count=len(content.light_blocks) - 1,
        version=version,
        is_known=kind is not None,
        table=f"{content.module}/{field}",
        root=root,
        key=content.key,
        value=content.value,
        record=record,
        state=state,
    )


def _module(content: RowProof, name: str, encoded: bytes) -> bytes:
    if content.digests.get(name) != module_digest(encoded):
        raise _bad(f"the module {name!r} does not match the state root")
    return encoded


def _table_root(state: bytes, module: str, field: int) -> TableRoot:
    """Return the root of a table, without decoding the other fields of the module's state."""
    try:
        found = encoded_item(state, field)
        root = decode(TableRoot, found, len(found))
    except RemoteProtocolError:
        raise _bad(f"field {field} of the module {module!r} is not a table") from None
    return root


def _bad(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError("bad-proof", detail)
