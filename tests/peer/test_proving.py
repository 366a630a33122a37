"""`peer prove` and `peer verify`, with their messages to a person."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from features.feature import Feature
from ledger.row_proofs import PROOF_FILE_BYTES_MAX, make_row_proof
from peer import cli
from peer.commands.definitions import all_commands
from peer.export import row_proof_file
from peer.export.row_proof_file import write_row_proof
from peer.features import FEATURES
from protocol import codec
from protocol.errors import UserError
from tests.ledger.notebook import NotebookModule
from tests.ledger.snapshots import Chain, lived
from tests.sim.keys import FastVerifier

NOTEBOOK = Feature(name="notebook", about="notes", modules=lambda rules: (NotebookModule(),))
TABLE = "notebook/notes"
Told = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def chain() -> Chain:
    return lived(40)


@pytest.fixture(autouse=True)
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A program that knows the module, and the signatures of tests."""
    monkeypatch.setattr(row_proof_file, "Ed25519Verifier", FastVerifier)
    FEATURES.append(NOTEBOOK)
    yield
    FEATURES.remove(NOTEBOOK)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    def run(*words: str) -> tuple[int, str, str]:
        status = cli.main(words)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def written(chain: Chain, folder: Path, key: bytes = b"7") -> Path:
    path = folder / "row.proof"
    path.write_bytes(make_row_proof(chain.genesis, chain.states[39], chain.shelf().light_blocks_to(39), TABLE, key))
    return path


def test_verify_says_what_is_proven_and_where_its_trust_comes_from(chain: Chain, tmp_path: Path, told: Told) -> None:
    status, out, err = told("verify", str(written(chain, tmp_path)))
    assert (status, err) == (0, "")
    for part in (
        f"world, chain id {chain.chain.hex()}",
        "only the file: compare the chain id",
        f"after height 39, root {chain.states[39].state_root.hex()}",
        "by block 40 of 1970-01-01",
        "signed by 4 of 4 voters; 2 changes of voters since the genesis",
        "notebook/notes, 60 rows",
        "0x37 ('7')",
        f"text '{b'note 7'.hex()}'",
    ):
        assert part in out


def test_a_key_without_a_row_is_told_as_such(chain: Chain, tmp_path: Path, told: Told) -> None:
    _, out, _ = told("verify", str(written(chain, tmp_path, b"nothing")))
    assert "none (no row with this key)" in out


def test_programs_get_the_same_as_json(chain: Chain, tmp_path: Path, told: Told) -> None:
    found = json.loads(told("verify", str(written(chain, tmp_path)), "--json")[1])
    assert (found["chain_id"], found["height"], found["key"], found["has_row"]) == (chain.chain.hex(), 39, "37", True)
    assert found["record"]["text"] == b"note 7".hex() and len(found["record"]["author"]) == 64


def test_the_genesis_and_the_chain_id_say_which_network_is_meant(chain: Chain, tmp_path: Path, told: Told) -> None:
    proof, genesis = written(chain, tmp_path), tmp_path / "genesis"
    genesis.write_bytes(codec.encode(chain.genesis))
    assert f"the genesis in {genesis}" in told("verify", str(proof), "--genesis", str(genesis))[1]
    assert "the given chain id" in told("verify", str(proof), "--chain-id", chain.chain.hex().upper())[1]
    other = hashlib.sha256(b"another").hexdigest()
    status, out, err = told("verify", str(proof), "--genesis", str(genesis), "--chain-id", other)
    assert (status, out) == (2, "") and f"its chain is {chain.chain.hex()[:16]}…, that of --chain-id is {other[:16]}…" in err
    genesis.write_bytes(codec.encode(Chain(voters=5).genesis))
    assert "belongs to another network" in told("verify", str(proof), "--genesis", str(genesis))[2]


@pytest.mark.parametrize(
    ("change", "options", "why"),
    [
        (lambda path: path.unlink(), [], "cannot read"),
        (lambda path: path.write_bytes(b""), [], "is invalid: unknown-message"),
        (lambda path: path.write_bytes(b"text"), [], "is invalid: unknown-message"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), [], "is truncated"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"row-proof-1", b"row-proof-2")), [], "'row-proof-2'"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\0"), [], "its content does not match its digest"),
        (lambda path: None, ["--chain-id", "12"], "'12' is not a chain id: it must have 64 hexadecimal digits"),
        (lambda path: None, ["--genesis", "/nowhere"], "cannot read /nowhere"),
        (lambda path: None, ["--genesis", __file__], "is not a genesis"),
    ],
)
def test_bad_input_costs_one_line(
    chain: Chain, tmp_path: Path, told: Told, change: Callable[[Path], object], options: list[str], why: str
) -> None:
    path = written(chain, tmp_path)
    change(path)
    status, out, err = told("verify", str(path), *options)
    assert (status, out, err.count("\n")) == (2, "", 1) and why in err


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "long"
    with open(path, "wb") as stream:
        stream.truncate(PROOF_FILE_BYTES_MAX + 1)
    assert "has more than" in told("verify", str(path))[2]


def test_what_a_stranger_wrote_into_a_key_moves_no_cursor(tmp_path: Path, told: Told) -> None:
    chain, key = Chain(), b"\x1b[2J\xe2\x80\xaeabc"
    chain.write({key: b"x"})
    chain.decide()
    path = tmp_path / "row.proof"
    path.write_bytes(make_row_proof(chain.genesis, chain.states[1], chain.shelf().light_blocks_to(1), TABLE, key))
    out = told("verify", str(path))[1]
    assert f"0x{key.hex()}" in out and "\x1b" not in out and "\u202e" not in out


# Writing of proofs ---------------------------------------------------------------------------------------------------


def test_a_peer_writes_a_new_file_and_says_what_is_in_it(chain: Chain, tmp_path: Path) -> None:
    path = tmp_path / "row.proof"
    view = write_row_proof(chain.genesis, chain.states[39], chain.shelf().light_blocks_to(39), TABLE, b"7", path)
    assert (view.height, view.has_row, view.bytes) == (39, True, len(path.read_bytes())) and view.row_bytes < 1_000
    with pytest.raises(UserError, match="exists: choose a new file"):
        write_row_proof(chain.genesis, chain.states[39], chain.shelf().light_blocks_to(39), TABLE, b"8", path)


@pytest.mark.parametrize(
    ("table", "key", "place", "why"),
    [
        ("notebook/pages", b"7", "row.proof", "no table 'notebook/pages': it has notebook/notes"),
        ("notebook", b"7", "row.proof", "no table 'notebook'"),
        (TABLE, b"", "row.proof", "the key has 0 bytes: keys of tables have 1 to 64"),
        (TABLE, b"x" * 65, "row.proof", "the key has 65 bytes"),
        (TABLE, b"7", "nowhere/row.proof", "cannot write"),
    ],
)
def test_what_cannot_be_proven_leaves_no_file(chain: Chain, tmp_path: Path, table: str, key: bytes, place: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        write_row_proof(chain.genesis, chain.states[39], chain.shelf().light_blocks_to(39), table, key, tmp_path / place)
    assert list(tmp_path.iterdir()) == []


def test_a_peer_hands_out_no_file_that_proves_nothing(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="this proof is invalid"):
        write_row_proof(chain.genesis, chain.states[39], chain.shelf().light_blocks_to(12), TABLE, b"7", tmp_path / "row.proof")
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_text_or_hex(told: Told) -> None:
    words = all_commands()["prove"]
    parser = cli.CommandLineParser(prog="prove")
    words.add_arguments(parser)
    assert parser.parse_args([TABLE, "cafe"]).key == b"cafe"
    assert parser.parse_args([TABLE, "0xcafe"]).key == b"\xca\xfe"
    with pytest.raises(UserError, match="'0xcaf' is not hexadecimal: write 0x and two digits for each byte"):
        parser.parse_args([TABLE, "0xcaf"])
