"""One row of a table, or that a key has none, shown to somebody who knows a genesis and asks nobody.

docs/protocol/tables.md has the file byte by byte. What hangs on what: the genesis names the first voters; links lead from them
to the voters of the last header, whose certificate they signed; that header names the state root after the height before it;
under the root lie the digests of all modules; the module's own bytes hold the root of the table, under which the row lies.
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

PROOF_LINKS_MAX: Final = 1 << 16  # a network that changes its voters every hour needs so many after seven years
# Two modules of the size that a newcomer fetches, of which the network's own is a thousandth, and links of ordinary voter sets.
# Whoever reads a liar's file spends that much memory, once.
PROOF_FILE_BYTES_MAX: Final = 2 * SNAPSHOT_MODULE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class RowProof:
    genesis: Annotated[bytes, Length(1, MESSAGE_BYTES_MAX)]
    light_blocks: Annotated[tuple[LightBlock, ...], Length(1, PROOF_LINKS_MAX)]  # the last one's header names the state root
    digests: Annotated[dict[Name, Digest], Length(1, MODULES_MAX)]  # of all modules
    network: Annotated[bytes, Length(1, SNAPSHOT_MODULE_BYTES_MAX)]  # the module that says which versions run
    module: Name
    state: Annotated[bytes, Length(1, SNAPSHOT_MODULE_BYTES_MAX)]  # the module that holds the table
    field: Count  # the table's place among the fields of `state`
    key: RowKey
    value: RowValue | None  # nil: the key has no row
    proof: KeyProof


@dataclass(frozen=True, slots=True)
class RowProofFile:
    """A file of format 1. The digest finds accidents; it proves nothing, since anybody can compute it."""

    TAG: ClassVar[str] = "row-proof-1"
    content: Annotated[bytes, Length(1, PROOF_FILE_BYTES_MAX)]  # a `RowProof`
    digest: Digest


@dataclass(frozen=True, slots=True)
class VerifiedRow:
    """All that a file proves to somebody who trusts its genesis. `record` is None where `value` is, or its type is unknown."""

    genesis: Genesis
    height: int  # the row is that of the state after it
    certified: VerifiedHeader  # the next block, whose header names that state
    voters: VoterSet  # that decided it
    voter_set_change_count: int  # changes of the voters since the genesis
    version: int  # of the module that holds the table
    is_known: bool  # whether the program knows this version. If not, nothing but the file says that the field is a table
    table: str  # module/field; the field is a number, from 0 on, where the program does not know the module
    root: TableRoot
    key: bytes
    value: bytes | None
    record: Any
    state: bytes  # encoding of the module's state, with the roots of its other tables

    def root_of(self, state_type: type, field: str) -> TableRoot:
        """Of another table of the same module, whose state is of this type. Raises `RemoteProtocolError`."""
        names = [of.name for of in fields(state_type)]
        return _table_root(self.state, self.table.split("/")[0], names.index(field))


# Making ------------------------------------------------------------------------------------------------------------------


def make_row_proof(genesis: Genesis, state: LedgerState, links: tuple[LightBlock, ...], table: str, key: bytes) -> bytes:
    """The file of one row of a table of `state`, which the last link certifies. Reading the row may raise `StorageError`."""
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
    """The chain that a file says it is of, before anything else is checked. Raises `RemoteProtocolError`."""
    file = decode_message(data, (RowProofFile,), PROOF_FILE_BYTES_MAX)
    return Genesis.decode(decode(RowProof, file.content, PROOF_FILE_BYTES_MAX).genesis).chain_id


def verify_row_proof_file(data: bytes, modules: Iterable[Module[Any]], verifier: Verifier) -> VerifiedRow:
    """Raises `RemoteProtocolError`, which names what does not fit. `modules` are those that this program knows.

    Whether the genesis is the right one is for the caller to say: its hash is the chain id, and everything hangs on it.
    """
    file = decode_message(data, (RowProofFile,), PROOF_FILE_BYTES_MAX)
    if hashlib.sha256(file.content).digest() != file.digest:
        raise _bad("the file has other bytes than whoever made it wrote")
    content = decode(RowProof, file.content, PROOF_FILE_BYTES_MAX)
    genesis = Genesis.decode(content.genesis)
    for name in (content.module, *content.digests):
        if "/" in name or name_problem(name):
            raise _bad(f"{name!a} is no name of a module")
    path = LightClient(genesis.chain_id, verifier, 0, genesis.voters, None)
    for link in content.light_blocks[:-1]:
        path.verify_light_block(link)
    voters = path.voters  # of the last link's block
    certified = path.verify_light_block(content.light_blocks[-1])
    if state_root_over(content.digests) != certified.header.state_root:
        raise _bad(f"the modules are not those under the state root in block {certified.header.height}")
    network = _module(content, NetworkModule.name, content.network)
    state = _module(content, content.module, content.state)
    root = _table_root(state, content.module, content.field)
    if not verify_key(root.hash, content.key, content.value, content.proof):
        raise _bad("the row is not under the root of the table" if content.value is not None else "the key may have a row")
    version = decode(NetworkState, network, len(network)).module_version(content.module)
    kind = next((of.state_type for of in modules if (of.name, of.version) == (content.module, version)), None)
    field, record = str(content.field), None
    if kind is not None:
        field = dict(enumerate(of.name for of in fields(kind))).get(content.field, "")
        if field not in table_fields(kind):
            raise _bad(f"field {content.field} of the module {content.module!r} is no table")
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
        raise _bad(f"the module {name!r} is not the one under the state root")
    return encoded


def _table_root(state: bytes, module: str, field: int) -> TableRoot:
    """No other part of a module's state has to be understood."""
    try:
        found = encoded_item(state, field)
        root = decode(TableRoot, found, len(found))
    except RemoteProtocolError:
        raise _bad(f"field {field} of the module {module!r} is no table") from None
    return root


def _bad(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError("bad-proof", detail)
