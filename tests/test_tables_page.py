"""docs/protocol/tables.md has the test vectors that the code computes, and a second implementation computes them, too.

`python -m tests.test_tables_page --write` puts them there.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ledger.row_proofs import make_row_proof
from ledger.tables import KeyProof, RangeProof, Table, TableRoot
from ledger.tables.table_proofs import RANGE_BYTES, OtherLeaf
from protocol import codec
from protocol.limits import ROW_BYTES_MAX, ROW_KEY_BYTES_MAX
from tests.ledger.snapshots import lived
from tests.ledger.tables import records
from tests.sim.keys import FastVerifier

PAGE = Path(__file__).parents[1] / "docs" / "protocol" / "tables.md"
WIDTH = 96  # characters of a vector in one line
COUNT = 40
SEVENTH, BESIDE, ALONE = b"\x00\x07", b"\xff\xff", b"\x00\x28"


def key(number: int) -> bytes:
    return number.to_bytes(2, "big")


def table(count: int) -> Table[int]:
    return Table(int).with_rows({key(number): number for number in range(count)})


def vectors() -> dict[str, str]:
    whole = table(COUNT)
    one = table(1).root.hash
    found = {
        "path of 00 00": records.sha256(key(0)),
        "row of 00 00": one,
        "hash of 0 rows": table(0).root.hash,
        "hash of 1 row": one,
        "hash of 2 rows": table(2).root.hash,
        "hash of 40 rows": whole.root.hash,
        "root of 40 rows": codec.encode(whole.root),
        "hash of 40 rows without 00 07": whole.with_rows({SEVENTH: None}).root.hash,
        "proof of 00 07": codec.encode(whole.prove_key(SEVENTH)),
        "proof that ff ff is not there": codec.encode(whole.prove_key(BESIDE)),
        "proof that 00 28 is not there": codec.encode(whole.prove_key(ALONE)),
        "range 010 of 40 rows": codec.encode(whole.prove_range("010")),
        "range 00000000 of 40 rows": codec.encode(whole.prove_range("00000000")),
    }
    return {name: value.hex() for name, value in found.items()}


def shown(value: str) -> str:
    return "".join(f"    {value[start : start + WIDTH]}\n" for start in range(0, len(value), WIDTH))


def rewritten(page: str) -> str:
    for name, value in vectors().items():
        page = re.sub(rf"(?m)^({re.escape(name)}:\n)(?:[ \t]+[^\n]+\n)*\n?", rf"\g<1>{shown(value)}\n", page)
    return page.rstrip("\n") + "\n"


def on_the_page(name: str) -> bytes:
    found = re.search(rf"^{re.escape(name)}:((?:\n[ \t]+[^\n]+)+)$", PAGE.read_text(), re.MULTILINE)
    assert found, f"no test vector {name!r}"
    return bytes.fromhex("".join(found[1].split()))


@pytest.mark.parametrize(("name", "value"), list(vectors().items()), ids=list(vectors()))
def test_vectors_on_the_page_are_what_the_code_computes(name: str, value: str) -> None:
    assert on_the_page(name).hex() == value


# By the page alone: nothing below calls `ledger.tables` -------------------------------------------------------------------

ROWS = {key(number): bytes([number]) for number in range(COUNT)}  # an integer this small is its own encoding


def plain(name: str) -> list[Any]:
    value: list[Any] = msgpack.unpackb(on_the_page(name))
    return value


def test_a_second_implementation_makes_the_same_hashes() -> None:
    assert on_the_page("path of 00 00") == records.sha256(key(0))
    assert on_the_page("row of 00 00") == records.row(key(0), b"\x00")
    for count in (0, 1, 2, 40):
        assert on_the_page(f"hash of {count} row" + ("s" if count != 1 else "")) == records.root(dict(list(ROWS.items())[:count]))
    assert on_the_page("hash of 40 rows without 00 07") == records.root(
        {other: value for other, value in ROWS.items() if other != SEVENTH}
    )
    size = sum(len(of) + len(value) + 6 for of, value in ROWS.items())
    assert plain("root of 40 rows") == [records.root(ROWS), COUNT, size]


def test_a_second_implementation_takes_the_proofs() -> None:
    root = on_the_page("hash of 40 rows")
    siblings, other = plain("proof of 00 07")
    assert other is None
    assert records.climbed(records.bits(SEVENTH), siblings, records.row(SEVENTH, b"\x07")) == root
    siblings, other = plain("proof that ff ff is not there")
    path, value = other
    assert f"{int.from_bytes(path, 'big'):0256b}"[: len(siblings)] == records.bits(BESIDE)[: len(siblings)]
    assert path != records.sha256(BESIDE)
    assert records.climbed(records.bits(BESIDE), siblings, records.sha256(b"folkmoot/row\0", path, value)) == root
    siblings, other = plain("proof that 00 28 is not there")
    assert other is None
    assert records.climbed(records.bits(ALONE), siblings, bytes(32)) == root


def test_a_second_implementation_takes_the_ranges() -> None:
    root = on_the_page("hash of 40 rows")
    siblings, other, rows = plain("range 010 of 40 rows")
    expected = {of: value for of, value in ROWS.items() if records.bits(of).startswith("010")}
    assert dict(rows) == expected and len(rows) > 2
    assert [of for of, _ in rows] == sorted(expected, key=records.bits)
    assert other is None and records.climbed("010", siblings, records.root(expected, depth=3)) == root
    siblings, other, rows = plain("range 00000000 of 40 rows")
    assert rows == [] and len(siblings) < 8
    end = records.sha256(b"folkmoot/row\0", *other) if other else bytes(32)
    assert records.climbed("00000000", siblings, end) == root


def shown_by(data: bytes) -> tuple[bytes, int, bytes, bytes | None]:
    """Return chain id, height, key and value that the file of one row proves. Raises `AssertionError` if it proves nothing."""
    tag, packed, digest = msgpack.unpackb(data)
    assert tag == "row-proof-1" and records.sha256(packed) == digest
    genesis, links, digests, network, module, state, field, key, value, (siblings, other) = msgpack.unpackb(packed)
    chain = records.sha256(b"folkmoot/genesis\0", genesis)
    voters, height, root = sorted(key for key, _ in msgpack.unpackb(genesis)[3]), 0, b""
    for header, (vote, signatures), following in links:
        fields, n = msgpack.unpackb(header), len(voters)
        assert fields[0] > height and fields[4] == voters_hash(voters)
        assert msgpack.unpackb(vote)[:3] == ["commit", fields[4], fields[0]]
        assert msgpack.unpackb(vote)[4] == records.sha256(b"folkmoot/block\0", header)
        assert len(dict(signatures)) * 2 >= n + (n - 1) // 3 + 1 and set(dict(signatures)) <= set(voters)
        signed = b"folkmoot/2/commit\0" + chain + vote
        assert all(FastVerifier().verify(signer, signed, signature) for signer, signature in signatures)
        assert fields[5] == (voters_hash(following) if following else fields[4])
        voters, height, root = following or voters, fields[0], fields[6]
    assert merkle_root([records.sha256(b"\0", name.encode(), b"\0", digest) for name, digest in digests]) == root
    assert dict(digests)["network"] == records.sha256(network) and dict(digests)[module] == records.sha256(state)
    end = records.row(key, value) if value is not None else records.sha256(b"folkmoot/row\0", *other) if other else bytes(32)
    assert other is None or (value is None and other[0] != records.sha256(key))
    way = records.bits(key)[: len(siblings)]
    assert other is None or f"{int.from_bytes(other[0], 'big'):0256b}".startswith(way)
    assert records.climbed(records.bits(key), siblings, end) == msgpack.unpackb(state)[field][0]
    return chain, height - 1, key, value


def voters_hash(keys: list[bytes]) -> bytes:
    return records.sha256(b"folkmoot/voters\0", msgpack.packb(keys))


def merkle_root(level: list[bytes]) -> bytes:
    """Return the root by RFC 6962: the left subtree has the largest power of two below the number of leaves."""
    if len(level) == 1:
        return level[0]
    half = 1 << (len(level) - 1).bit_length() - 1
    return records.sha256(b"\1", merkle_root(level[:half]), merkle_root(level[half:]))


@pytest.mark.parametrize("key", [b"7", b"nobody wrote this"])
def test_a_second_implementation_takes_the_file_of_one_row(key: bytes) -> None:
    chain = lived(40)
    state = chain.states[39]
    data = make_row_proof(chain.genesis, state, chain.shelf().light_blocks_to(39), "notebook/notes", key)
    assert shown_by(data) == (chain.chain, 39, key, state.tables["notebook/notes"].encoded_record(key))


# Other claims of the page -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TableRoot, KeyProof, OtherLeaf, RangeProof])
def test_the_fields_on_the_page_are_those_of_the_code(kind: type) -> None:
    section = PAGE.read_text().split(f"\n#### {kind.__name__}\n")[1].split("\n#")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [field.name for field in dataclasses.fields(kind)]


def test_the_bounds_on_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert f"keys of 1 to {ROW_KEY_BYTES_MAX} bytes" in page and f"(bytes, 1..{ROW_KEY_BYTES_MAX})" in page
    assert f"most {ROW_BYTES_MAX:,} bytes" in page and f"(bytes, 1..{ROW_BYTES_MAX})" in page
    assert f"⌊max(0, size − 1) / {RANGE_BYTES:,}⌋" in page
    assert f"`size` + {TableRoot(bytes(32), 0, 0).part_bytes_max:,} bytes" in page


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(rewritten(PAGE.read_text()))
    else:
        print("\n".join(f"{name}:\n{shown(value)}" for name, value in vectors().items()))
