"""Proofs of one row: with the genesis alone, true ones are accepted and false ones are refused."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.core.genesis import Genesis
from ledger.core.module import Module
from ledger.ledger_state import core_modules
from ledger.row_proofs import RowProof, RowProofFile, VerifiedRow, encode_row_proof_file, make_row_proof, verify_row_proof_file
from ledger.tables import KeyProof, Table, TableRoot
from protocol import codec
from protocol.errors import RemoteProtocolError
from tests.ledger.notebook import Note, NotebookModule
from tests.ledger.snapshots import Chain, lived
from tests.ledger.tables import records
from tests.ledger.world import PEOPLE, PlainJobs
from tests.sim.keys import FastVerifier

HERE, MISSING = b"7", b"nobody wrote this"
KNOWN: tuple[Module[Any], ...] = (*core_modules(PlainJobs()), NotebookModule())
TABLE = "notebook/notes"


def refused(why: str, *proof: Any) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        checked(*proof)


@pytest.fixture(scope="module")
def chain() -> Chain:
    return lived(40)


def made(chain: Chain, key: bytes) -> bytes:
    shelf = chain.shelf()
    newest = shelf.newest_snapshot
    assert newest is not None
    return make_row_proof(chain.genesis, newest.state, shelf.light_blocks_to(newest.height), TABLE, key)


def checked(data: bytes, modules: tuple[Module[Any], ...] = KNOWN) -> VerifiedRow:
    return verify_row_proof_file(data, modules, FastVerifier())


def opened(data: bytes) -> RowProof:
    return codec.decode(RowProof, codec.decode_message(data, (RowProofFile,)).content)


# Proven statements ---------------------------------------------------------------------------------------------------


def test_a_row_is_proven_at_the_newest_certified_height_by_the_genesis_alone(chain: Chain) -> None:
    found = checked(made(chain, HERE))
    assert found.genesis == chain.genesis and found.genesis.chain_id == chain.chain
    assert found.height == chain.state.height - 1
    assert found.certified.digest == chain.decided[chain.state.height].digest
    assert found.certified.header.state_root == chain.states[found.height].state_root
    assert found.voter_set_change_count > 0, "voters came and went in this history"
    assert found.voters.keys == chain.states[found.height].members.voters
    assert (found.table, found.root) == (TABLE, chain.states[found.height].tables[TABLE].root)
    assert (found.key, found.record) == (HERE, chain.state.tables[TABLE].get_record(HERE))
    assert isinstance(found.record, Note) and found.value == codec.encode(found.record)


def test_that_a_key_has_no_row_is_proven_too(chain: Chain) -> None:
    found = checked(made(chain, MISSING))
    assert (found.key, found.value, found.record) == (MISSING, None, None)


def test_what_the_last_block_wrote_is_not_proven_before_a_block_certifies_it() -> None:
    chain = Chain()
    chain.write({b"first": b"a"})
    chain.decide()
    chain.write({b"late": b"b"})
    assert checked(made(chain, b"late")).value is None
    chain.decide()
    assert checked(made(chain, b"late")).record.text == b"b"


def test_the_state_before_the_first_block_is_certified_by_it() -> None:
    chain = Chain()
    assert chain.shelf().newest_snapshot is None
    chain.decide()
    found = checked(make_row_proof(chain.genesis, chain.states[0], chain.shelf().light_blocks_to(0), TABLE, HERE))
    assert (found.height, found.value, found.root.rows) == (0, None, 0)


def test_whoever_does_not_know_the_module_learns_the_bytes_and_the_place_of_the_field(chain: Chain) -> None:
    found = checked(made(chain, HERE), core_modules(PlainJobs()))
    assert (found.table, found.is_known, found.record) == ("notebook/1", False, None)
    assert found.value == codec.encode(chain.state.tables[TABLE].get_record(HERE))


def test_a_version_of_the_module_that_the_network_does_not_run_names_no_fields(chain: Chain) -> None:
    class Later(NotebookModule):
        version = 2

    assert checked(made(chain, HERE), (*core_modules(PlainJobs()), Later())).record is None


# Refused proofs ------------------------------------------------------------------------------------------------------


def is_refused(data: bytes) -> bool:
    try:
        checked(data)
    except RemoteProtocolError:
        return True
    return False


def flipped(data: bytes, at: int, by: int) -> bytes:
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


@pytest.mark.parametrize("key", [HERE, MISSING])
def test_a_changed_byte_anywhere_in_the_file_is_refused(chain: Chain, key: bytes) -> None:
    data = made(chain, key)
    for at in range(len(data)):
        assert is_refused(flipped(data, at, 1 + at % 255)), at


@pytest.fixture(scope="module")
def honest_ones(chain: Chain) -> list[bytes]:
    return [codec.decode_message(made(chain, key), (RowProofFile,)).content for key in (HERE, MISSING)]


@given(st.data())
@settings(max_examples=500)
def test_a_liar_who_mends_the_digest_proves_nothing_with_a_changed_byte(
    chain: Chain, honest_ones: list[bytes], data: st.DataObject
) -> None:
    """A key without a row may turn into another key without a row, whose proof is true as well."""
    honest = data.draw(st.sampled_from(honest_ones))
    changed = flipped(honest, data.draw(st.integers(0, len(honest) - 1)), data.draw(st.integers(1, 255)))
    assert_proves_no_lie(chain, codec.encode(RowProofFile(changed, hashlib.sha256(changed).digest())))


def assert_proves_no_lie(chain: Chain, data: bytes) -> None:
    try:
        found = checked(data)
    except RemoteProtocolError:
        return
    rows = chain.states[found.height].tables[TABLE]
    assert found.genesis == chain.genesis and found.table == TABLE and found.root == rows.root
    assert found.value is None and found.key != MISSING and rows.get_record(found.key) is None


def test_every_single_byte_of_a_row_s_proof_is_bound_also_without_the_digest(chain: Chain) -> None:
    honest = codec.decode_message(made(chain, HERE), (RowProofFile,)).content
    draw = random.Random(5)
    for at in range(len(honest)):
        changed = flipped(honest, at, draw.randint(1, 255))
        assert is_refused(codec.encode(RowProofFile(changed, hashlib.sha256(changed).digest()))), at


def test_every_cut_is_refused(chain: Chain) -> None:
    data = made(chain, HERE)
    for size in range(0, len(data), 7):
        assert is_refused(data[:size])
    assert is_refused(data + b"\x00")


Change = Callable[[Chain, RowProof], RowProof]


def _other_root(chain: Chain, proof: RowProof) -> RowProof:
    """Return a proof that is consistent, except for the header that the voters signed."""
    lie = chain.fork()
    lie.write({HERE: b"a lie"})
    lie.decide()
    return replace(opened(made(lie, HERE)), light_blocks=proof.light_blocks)


def _own_voters(chain: Chain, proof: RowProof) -> RowProof:
    """Return a proof from a chain of the same genesis that other keys signed."""
    lie = chain.fork()
    lie.signers = lambda voters: PEOPLE[7 : 7 + voters.quorum]
    lie.write({HERE: b"a lie"})
    lie.decide()
    return opened(made(lie, HERE))


def _too_few(chain: Chain, proof: RowProof) -> RowProof:
    lie = chain.fork()
    honest = chain.signers
    lie.signers = lambda voters: list(honest(voters))[: voters.quorum - 1]
    lie.decide()
    return opened(made(lie, HERE))


def _at(index: int, **changes: Any) -> Change:
    def change(chain: Chain, proof: RowProof) -> RowProof:
        links = list(proof.light_blocks)
        links[index] = replace(links[index], **changes)
        return replace(proof, light_blocks=tuple(links))

    return change


def _older_network(chain: Chain, proof: RowProof) -> RowProof:
    return replace(proof, network=codec.encode(replace(chain.states[0].modules["network"], upgrade_votes={}, modules=())))


def _fake_table(chain: Chain, proof: RowProof) -> RowProof:
    """Return the bytes of a state with one false row, and a proof that matches it."""
    value = codec.encode(Note(bytes(32), b"a lie", 1))
    root = TableRoot(records.root({HERE: value}), 1, 40)
    return replace(proof, state=codec.encode((1, root)), value=value, proof=KeyProof((), None))


LIES: dict[str, tuple[Change, str]] = {
    "another root": (_other_root, "the modules do not match the state root"),
    "signed by others": (_own_voters, "not-a-voter"),
    "signed by too few": (_too_few, "no-quorum"),
    "a link is missing": (lambda _, proof: replace(proof, light_blocks=proof.light_blocks[1:]), "foreign-voters"),
    "the last link is missing": (
        lambda _, proof: replace(proof, light_blocks=proof.light_blocks[:-1]),
        "the modules do not match",
    ),
    "a link twice": (
        lambda _, proof: replace(proof, light_blocks=(proof.light_blocks[0], *proof.light_blocks)),
        "bad-proof: height",
    ),
    "no next voters": (_at(0, next_voters=()), "next voters"),
    "other next voters": (
        _at(0, next_voters=tuple(sorted(person.public for person in PEOPLE[5:9]))),
        "the next voters do not match",
    ),
    "the certificate of another block": (
        lambda _, proof: replace(
            proof, light_blocks=(*proof.light_blocks[:-1], replace(proof.light_blocks[-1], header=proof.light_blocks[-2].header))
        ),
        "bad-proof",
    ),
    "a state of its own": (_fake_table, "the module 'notebook' does not match the state root"),
    "other versions": (_older_network, "the module 'network' does not match the state root"),
    "a module more": (lambda _, proof: replace(proof, digests={**proof.digests, "zoo": bytes(32)}), "the modules do not match"),
    "a module less": (
        lambda _, proof: replace(proof, digests={k: v for k, v in proof.digests.items() if k != "audits"}),
        "the modules do not match",
    ),
    "a module that is not there": (lambda _, proof: replace(proof, module="zoo"), "the module 'zoo' does not match"),
    "another module": (lambda _, proof: replace(proof, module="jobs"), "the module 'jobs' does not match"),
    "a field that is no table": (lambda _, proof: replace(proof, field=0), "field 0 of the module 'notebook' is not a table"),
    "a field that is not there": (lambda _, proof: replace(proof, field=9), "field 9 of the module 'notebook' is not a table"),
    "another key": (lambda _, proof: replace(proof, key=b"8"), "the row does not match the root"),
    "another value": (lambda _, proof: replace(proof, value=b"\x00"), "the row does not match the root"),
    "no row": (lambda _, proof: replace(proof, value=None), "the proof does not exclude a row"),
    "a shorter way": (
        lambda _, proof: replace(proof, proof=KeyProof(proof.proof.siblings[:-1], None)),
        "the row does not match the root",
    ),
}


@pytest.mark.parametrize(("change", "why"), LIES.values(), ids=LIES)
def test_a_lie_is_refused_by_what_does_not_fit(chain: Chain, change: Change, why: str) -> None:
    proof = opened(made(chain, HERE))
    assert checked(encode_row_proof_file(proof)).record is not None
    refused(why, encode_row_proof_file(change(chain, proof)))


@dataclass(frozen=True, slots=True)
class _Decoy:
    claimed: TableRoot  # a record of three fields, as a transaction may contain it
    notes: Table[Note]


class _DecoyModule(Module[_Decoy]):
    name = "decoy"
    contents: ClassVar[Mapping[str, type]] = {}
    state_type = _Decoy

    def genesis_state(self, genesis: Genesis) -> _Decoy:
        return _Decoy(TableRoot(records.root({HERE: codec.encode(Note(bytes(32), b"a lie", 1))}), 1, 40), Table(Note))


def test_a_field_that_only_looks_like_a_table_is_none_to_whoever_knows_the_module() -> None:
    """A client without the module gets the number of the field instead of the name of a table."""
    chain = Chain(modules=(_DecoyModule(),))
    chain.decide()
    honest = opened(make_row_proof(chain.genesis, chain.states[0], chain.shelf().light_blocks_to(0), "decoy/notes", HERE))
    lie = encode_row_proof_file(replace(honest, field=0, value=codec.encode(Note(bytes(32), b"a lie", 1))))
    refused("field 0 of the module 'decoy' is not a table", lie, (*core_modules(PlainJobs()), _DecoyModule()))
    found = checked(lie, core_modules(PlainJobs()))
    assert (found.table, found.is_known, found.record) == ("decoy/0", False, None)


def test_no_field_of_the_core_s_modules_is_a_table(chain: Chain) -> None:
    proof = opened(made(chain, HERE))
    for name, field in itertools.product(proof.digests, range(12)):
        if (name, field) != ("notebook", 1):
            refused(
                "is not a table",
                encode_row_proof_file(replace(proof, module=name, state=chain.states[39].encoded_module(name), field=field)),
            )


def test_another_genesis_is_another_chain(chain: Chain) -> None:
    """A client compares the chain id with one that it knows: no other genesis has this chain id."""
    proof = opened(made(chain, HERE))
    refused("bad-signature", encode_row_proof_file(replace(proof, genesis=codec.encode(replace(chain.genesis, salt=b"x" * 16)))))


def test_a_file_of_another_format_is_named(chain: Chain) -> None:
    refused("unknown-message: 'row-proof-2'", made(chain, HERE).replace(b"row-proof-1", b"row-proof-2", 1))
