from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.tables import (
    RangeProof,
    Table,
    TableAssembly,
    fetch_ranges,
    table_proofs,
    verify_key,
    verify_range,
)
from ledger.tables.bucket_changes import StoredBucket, load_tree
from ledger.tables.sparse_merkle_tree import BUCKET_ROWS_MAX, Branch, Bucket, Node, buckets, hash_of
from ledger.tables.table import DECODED_RECORDS_MAX
from ledger.tables.table_proofs import KeyProof, OtherLeaf
from protocol import codec
from protocol.codec import Length
from protocol.errors import RemoteProtocolError, StorageError
from protocol.limits import ROW_BYTES_MAX, ROW_KEY_BYTES_MAX
from tests.ledger.tables import records
from tests.ledger.tables.memory_store import MemoryBucketStore
from tests.ledger.tables.records import Note

KEYS = [f"key {number}".encode() for number in range(60)]
Changes = dict[bytes, Note | None]
CHANGES = st.dictionaries(st.sampled_from(KEYS), st.none() | st.builds(Note, st.integers(0, 3)), max_size=30)
HISTORIES = st.lists(CHANGES, max_size=12)
Rows = dict[bytes, Note]


def verify_row(root: bytes, key: bytes, value: Note | None, proof: KeyProof) -> bool:
    return verify_key(root, key, None if value is None else codec.encode(value), proof)


def table_of(rows: Rows) -> Table[Note]:
    return Table(Note).with_rows(dict(rows))


def many(count: int, seed: int = 0) -> Rows:
    draw = random.Random(seed)
    return {
        draw.randbytes(draw.randint(4, ROW_KEY_BYTES_MAX)): Note(number, "x" * draw.randint(0, 40)) for number in range(count)
    }


def reference(rows: Rows) -> bytes:
    return records.root({key: codec.encode(value) for key, value in rows.items()})


def nodes(node: Node) -> Iterator[Branch | Bucket]:
    if node is not None:
        yield node
        if len(node) == 5:
            yield from nodes(node[3])
            yield from nodes(node[4])


def node_of(table: Table[Note]) -> Node:
    return table.hashed_tree()[0]


def hashes_of(table: Table[Note]) -> list[bytes]:
    return [node[0] for node in nodes(node_of(table))]


def buckets_of(table: Table[Note]) -> list[Bucket]:
    return list(buckets(node_of(table)))


# Definition of a table ---------------------------------------------------------------------------------------------------


def refused(why: str, *proof: Any) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        verify_range(*proof)


@given(HISTORIES, st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_a_table_is_what_a_dictionary_is_whatever_was_asked_on_the_way(history: list[Changes], asked: Any) -> None:
    table, rows, store = Table(Note), Rows(), MemoryBucketStore()
    for changes in history:
        table = table.with_rows(changes)
        rows = {key: value for key, value in {**rows, **changes}.items() if value is not None}
        match asked.randrange(4):
            case 0:
                assert table.root.hash == reference(rows)
            case 1:
                store.save_table(table)
            case 2:
                store.save_table(table)
                table = store.load_table(Note)
        assert {key: table.get_record(key) for key in KEYS} == {key: rows.get(key) for key in KEYS}
    assert dict(table.items()) == rows
    assert len(table) == len(rows)
    assert table.root.hash == reference(rows)


@given(HISTORIES, HISTORIES)
@settings(max_examples=100)
def test_two_histories_that_end_in_the_same_rows_have_one_tree(one: list[Changes], other: list[Changes]) -> None:
    """The tree depends neither on earlier rows nor on the steps in which it was hashed."""
    rows = many(40)
    tables = []
    for history in (one, other):
        table, store = Table(Note), MemoryBucketStore()
        for changes in history:
            table = table.with_rows(changes)
            store.save_table(table)
        table = table.with_rows({**dict.fromkeys(KEYS), **rows})
        store.save_table(table)
        tables.append(store.load_table(Note))
    assert tables[0].root == tables[1].root == table_of(rows).root
    assert list(tables[0].items()) == list(tables[1].items())
    assert hashes_of(tables[0]) == hashes_of(tables[1])


@pytest.mark.parametrize("count", [0, 1, 2, BUCKET_ROWS_MAX, BUCKET_ROWS_MAX + 1, 500])
def test_the_root_is_that_of_the_definition(count: int) -> None:
    rows = many(count)
    assert table_of(rows).root.hash == reference(rows)
    assert table_of(rows).root.rows == count


@pytest.fixture
def rows() -> dict[bytes, Note]:
    return many(300)


def test_size_is_what_the_rows_take_at_most(rows: dict[bytes, Note]) -> None:
    encoded = codec.encode(tuple((key, codec.encode(value)) for key, value in rows.items()))
    size = table_of(rows).root.size
    assert size == sum(len(key) + len(codec.encode(value)) + 6 for key, value in rows.items())
    assert len(encoded) <= size + 5


def test_buckets_are_the_highest_subtrees_that_fit() -> None:
    table = table_of(many(1_000))
    keys = [key for key, _ in table.items()]
    for after in (table, table.with_rows(dict.fromkeys(keys[20:])), table.with_rows(dict.fromkeys(keys[::2]))):
        for node in nodes(node_of(after)):
            assert (len(node) == 4) == (node[1] <= BUCKET_ROWS_MAX)


@pytest.mark.parametrize("left", [0, 1, 2, 5, BUCKET_ROWS_MAX, 40])
def test_few_rows_of_many_have_the_root_that_they_have_alone(rows: dict[bytes, Note], left: int) -> None:
    few = dict(list(rows.items())[:left])
    gone = [key for key in rows if key not in few]
    whole = one_by_one = table_of(rows)
    assert len(whole) == 300  # it is a tree now
    at_once = whole.with_rows(dict.fromkeys(gone))
    for key in gone:
        one_by_one = one_by_one.with_rows({key: None})
        assert one_by_one.root.hash
    assert at_once.root == one_by_one.root == table_of(few).root
    assert at_once.root.hash == reference(few)
    assert hashes_of(at_once) == hashes_of(one_by_one) == hashes_of(table_of(few))


def test_rows_that_are_put_as_they_are_change_no_node() -> None:
    rows = many(200)
    table = table_of(rows)
    before = node_of(table)
    assert node_of(table.with_rows({**rows, b"never here": None})) is before


BODIES = st.lists(st.tuples(st.lists(CHANGES, min_size=1, max_size=3), st.integers(0, 2)), max_size=8)


@given(BODIES, st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_bodies_of_one_height_that_are_hashed_in_any_order_have_the_roots_of_their_rows_alone(blocks: Any, order: Any) -> None:
    """Most bodies are never decided, and older tables are used again. The cache of one table does not affect another."""
    rows = many(40)
    store, table = MemoryBucketStore(), table_of(rows)
    seen = [(table, rows)]
    for bodies, decided in blocks:
        judged = []
        for changes in bodies:
            after = {key: value for key, value in {**rows, **changes}.items() if value is not None}
            judged.append((table.with_rows(changes), after))
        for body, after in order.sample(judged, len(judged)):
            assert body.root.hash == reference(after)
        table, rows = judged[decided % len(judged)]
        store.save_table(table)
        seen += judged
    for earlier, after in order.sample(seen, len(seen)):
        fresh = table_of(after)
        assert hashes_of(earlier) == hashes_of(fresh) and earlier.root == fresh.root
        assert dict(earlier.items()) == after
    if blocks:
        assert store.load_table(Note).root == table.root


# Copies ------------------------------------------------------------------------------------------------------------------


def test_an_earlier_table_is_never_changed_by_a_later_one() -> None:
    tables, dictionaries = [Table(Note)], [Rows()]
    draw = random.Random(1)
    for step in range(200):
        changes = {draw.choice(KEYS): draw.choice([None, Note(step)]) for _ in range(draw.randint(0, 5))}
        if step % 40 == 0:
            assert tables[-1].root.hash == reference(dictionaries[-1])
        tables.append(tables[-1].with_rows(changes))
        dictionaries.append({key: value for key, value in {**dictionaries[-1], **changes}.items() if value is not None})
    for table, rows in zip(tables, dictionaries, strict=True):
        assert {key: value for key in KEYS if (value := table.get_record(key)) is not None} == rows
        assert table.root.hash == reference(rows)


def test_what_is_not_decided_leaves_nothing_in_the_store_or_the_table() -> None:
    store, rows = MemoryBucketStore(), many(300)
    table = table_of(rows)
    store.save_table(table)
    kept, tree = dict(store.kept), node_of(table)
    body = table.with_rows({**dict.fromkeys(list(rows)[:100]), b"new": Note(1)})
    assert body.root != table.root and body.get_record(b"new") == Note(1) and body.prove_key(b"new").other is None
    assert store.kept == kept
    assert node_of(table) is tree
    assert table.get_record(b"new") is None
    assert dict(table.items()) == rows


def test_a_table_of_an_earlier_height_is_read_while_later_ones_are_stored() -> None:
    store, rows = MemoryBucketStore(), many(400)
    table = table_of(rows)
    store.save_table(table)
    snapshot, snapshot_root = table, table.root
    for step in range(10):
        table = table.with_rows({**dict.fromkeys(list(rows)[30 * step : 30 * step + 20]), b"%d" % step: Note(step)})
        store.save_table(table)
    assert dict(snapshot.items()) == rows
    assert snapshot.root == snapshot_root
    assert all(verify_row(snapshot_root.hash, key, value, snapshot.prove_key(key)) for key, value in rows.items())


def test_a_stored_table_holds_no_rows_in_memory() -> None:
    store = MemoryBucketStore()
    table = table_of(many(500))
    for step in range(5):
        table = table.with_rows({b"%d" % step: Note(step)})
        store.save_table(table)
        assert all(isinstance(place, int) for *_, place in buckets_of(table))


def test_a_block_writes_the_buckets_that_it_changes_and_no_others() -> None:
    store, rows = MemoryBucketStore(), many(2_000)
    table = table_of(rows)
    store.save_table(table)
    keys = random.Random(2).sample(list(rows), 10)
    changed = store.save_table(table.with_rows({key: Note(-7) for key in keys}))
    assert len(changed.puts) <= 10 and not changed.drops
    assert not store.save_table(table.with_rows({key: Note(-7) for key in keys})).puts


def test_slots_of_rows_that_are_gone_are_used_again_or_dropped() -> None:
    store, rows = MemoryBucketStore(), many(1_000)
    table = table_of(rows)
    for _ in range(4):
        store.save_table(table)
        assert len(store.kept) == len(buckets_of(table))
        rows = dict(list(rows.items())[: len(rows) // 3])
        table = table.with_rows({key: None for key, _ in table.items() if key not in rows})


def test_two_stores_take_the_same_table(rows: dict[bytes, Note]) -> None:
    """Simulated peers may hold one and the same state."""
    table = table_of(rows)
    one, other = MemoryBucketStore(), MemoryBucketStore()
    one.save_table(table)
    other.save_table(table)
    after = table.with_rows({key: Note(3) for key in list(rows)[:50]})
    other.save_table(after)
    one.save_table(after)
    assert one.load_table(Note).root == other.load_table(Note).root == after.root
    assert dict(one.load_table(Note).items()) == dict(other.load_table(Note).items())


def test_a_store_that_lost_or_doubled_a_bucket_is_noticed() -> None:
    store = MemoryBucketStore()
    table = table_of(many(300))
    store.save_table(table)
    places = [stored for stored, _ in store.kept.values()]
    assert hash_of(load_tree(places)) == table.root.hash
    noticed = set()
    for lost in places:
        try:
            noticed.add(hash_of(load_tree([place for place in places if place is not lost])) != table.root.hash)
        except StorageError as error:
            noticed.add(str(error))
    assert noticed == {True, "buckets of a table are missing"}
    for extra in (places[0]._replace(slot=999), StoredBucket(bytes(32), 0, 1, 10, bytes(32), 999)):
        with pytest.raises(StorageError, match="overlap"):
            load_tree([*places, extra])


def test_what_was_read_is_kept_decoded_but_not_without_bound() -> None:
    store, rows = MemoryBucketStore(), {b"%d" % number: Note(number) for number in range(DECODED_RECORDS_MAX + 100)}
    store.save_table(table_of(rows))
    table = store.load_table(Note)
    assert table.get_record(b"1") is table.get_record(b"1") is table.with_rows({b"2": Note(0)}).get_record(b"1")
    for key in rows:
        table.get_record(key)
    assert len(table._now[3]) <= DECODED_RECORDS_MAX


# Proofs ------------------------------------------------------------------------------------------------------------------


@given(CHANGES, st.sampled_from(KEYS))
@settings(max_examples=150)
def test_every_row_and_its_absence_is_proven(changes: Changes, key: bytes) -> None:
    table = Table(Note).with_rows(changes)
    root, value, proof = table.root.hash, changes.get(key), table.prove_key(key)
    assert codec.decode(KeyProof, codec.encode(proof)) == proof
    assert verify_row(root, key, value, proof)
    for lie in (None, Note(7), Note(0, "x")):
        assert verify_row(root, key, lie, proof) == (lie == value)


def test_a_proof_shows_no_other_key_value_or_root(rows: dict[bytes, Note]) -> None:
    table = table_of(rows)
    root, absent = table.root.hash, [bytes([1, number]) for number in range(200)]
    shown = {key: table.prove_key(key) for key in (*rows, *absent)}
    assert {shown[key].other is None for key in absent} == {True, False}
    for key, other in zip(rows, [*list(rows)[1:], next(iter(rows))], strict=True):
        assert verify_row(root, key, rows[key], shown[key])
        assert not verify_row(root, other, rows[other], shown[key])
        assert not verify_row(root, other, rows[key], shown[key])
        assert not verify_row(root, other, None, shown[key])
        assert not verify_row(root, key, None, shown[key])
        assert not verify_row(bytes(32), key, rows[key], shown[key])
    for key in absent:
        assert verify_row(root, key, None, shown[key])
        assert not verify_row(root, key, Note(0), shown[key])
        assert not any(verify_row(root, other, None, shown[key]) for other in list(rows)[:50])


def test_a_row_that_was_deleted_is_not_proven_any_more(rows: dict[bytes, Note]) -> None:
    table = table_of(rows)
    for key in list(rows)[:100]:
        proof = table.prove_key(key)
        after = table.with_rows({key: None})
        assert not verify_row(after.root.hash, key, rows[key], proof)
        assert not verify_row(after.root.hash, key, rows[key], after.prove_key(key))
        assert verify_row(after.root.hash, key, None, after.prove_key(key))
        assert after.prove_key(key) == table_of({other: value for other, value in rows.items() if other != key}).prove_key(key)


def test_a_proof_that_says_more_than_it_must_is_refused() -> None:
    rows = {b"%d" % number: Note(number) for number in range(40)}
    table = table_of(rows)
    root, key = table.root.hash, max(rows, key=lambda key: table.prove_key(key).siblings.count(None))
    proof = table.prove_key(key)
    leaf = OtherLeaf(records.sha256(key), records.sha256(codec.encode(rows[key])))
    assert not verify_row(root, key, rows[key], replace(proof, other=leaf))
    assert not verify_row(root, key, None, replace(proof, other=leaf))
    zeros = tuple(beside or bytes(32) for beside in proof.siblings)
    assert zeros != proof.siblings and not verify_row(root, key, rows[key], replace(proof, siblings=zeros))


def test_the_first_bits_of_two_keys_may_agree_for_long() -> None:
    alike = [b"%d" % number for number in range(20_000) if records.sha256(b"%d" % number)[:1] == b"\x00"]
    rows = {key: Note(number) for number, key in enumerate(alike)}
    table = table_of(rows)
    assert table.root.hash == reference(rows)
    assert all(verify_row(table.root.hash, key, value, table.prove_key(key)) for key, value in rows.items())
    assert max(len(table.prove_key(key).siblings) for key in rows) > 16


# Ranges ------------------------------------------------------------------------------------------------------------------


def fetched(table: Table[Note], of: str) -> tuple[tuple[bytes, bytes], ...]:
    """Fetch the ranges as a newcomer does."""
    data = codec.encode(table.prove_range(of))
    assert len(data) <= table.root.part_bytes_max
    return verify_range(table.root.hash, of, codec.decode(RangeProof, data))


@pytest.mark.parametrize("count", [0, 1, 2, 17, 3_000])
@pytest.mark.parametrize("depth", [0, 1, 5, 9])
def test_a_table_comes_whole_by_ranges(count: int, depth: int) -> None:
    rows = many(count)
    table = table_of(rows)
    of = [f"{index:0{depth}b}" if depth else "" for index in range(1 << depth)]
    got = [row for part in of for row in fetched(table, part)]
    assert {key: codec.decode(Note, value) for key, value in got} == rows
    assert len(got) == count


def test_ranges_are_cut_by_the_size_that_the_root_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_proofs, "RANGE_BYTES", 1_000)
    assert fetch_ranges(Table(Note).root) == [""]
    rows = many(1_000)
    table = table_of(rows)
    cut = fetch_ranges(table.root)
    assert table.root.size / 1_000 <= len(cut) < 2 * table.root.size / 1_000
    assert {key: codec.decode(Note, value) for of in cut for key, value in fetched(table, of)} == rows


def test_a_part_with_other_rows_is_refused() -> None:
    table = table_of(many(500))
    root, part = table.root.hash, table.prove_range("01")
    assert len(part.rows) > 4 and verify_range(root, "01", part) == part.rows
    first, second = part.rows[:2]
    new = next(key for key in KEYS if records.bits(key).startswith("01"))
    others = {
        "one is missing": part.rows[1:],
        "none is there": (),
        "one has another value": ((first[0], b"\x92\x00\xa0"), *part.rows[1:]),
        "one is there twice": (first, *part.rows),
        "two are in another order": (second, first, *part.rows[2:]),
        "one is new": tuple(sorted((*part.rows, (new, b"\x92\x00\xa0")), key=lambda row: records.bits(row[0]))),
    }
    for shown in others.values():
        refused("bad-part", root, "01", replace(part, rows=shown))
    for of in ("0", "00", "010", "011"):
        refused("bad-part", root, of, part)
    refused("bad-part", table.with_rows({first[0]: None}).root.hash, "01", part)


def test_a_part_does_not_hide_the_row_of_its_range_as_another() -> None:
    """With one row in the range its path may end above the range. The proof must then show this row inside the range."""
    key = KEYS[0]
    table = table_of({key: Note(1)})
    of = records.bits(key)[:3]
    hidden = RangeProof((), OtherLeaf(records.sha256(key), records.sha256(codec.encode(Note(1)))), ())
    refused("bad-part", table.root.hash, of, hidden)
    beside = of[:2] + ("0" if of[2] == "1" else "1")
    assert verify_range(table.root.hash, beside, hidden) == ()
    refused("bad-part", table.root.hash, beside, table.prove_range(of))


def test_a_way_goes_on_as_long_as_there_are_several_rows() -> None:
    keys = [key for key in map(str, range(2_000)) if records.bits(key.encode()).startswith("01011")]
    table = table_of({key.encode(): Note(0) for key in keys})
    part = table.prove_range("01011")
    assert len(part.rows) > 2 and part.siblings == (None,) * 5
    refused("bad-part", table.root.hash, "01011", replace(part, siblings=()))


# Types of rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WithDictionary:
    votes: Annotated[dict[bool, bool], Length(0, 2)]


@dataclass(frozen=True)
class Unbounded:
    text: bytes


@dataclass(frozen=True)
class Largest:
    data: Annotated[bytes, Length(0, ROW_BYTES_MAX - 30)]
    pair: tuple[bool, int | None]


@pytest.mark.parametrize("kind", [WithDictionary, Unbounded])
def test_records_whose_bytes_have_no_bound_or_no_one_order_are_no_rows(kind: type) -> None:
    with pytest.raises(AssertionError):
        Table(kind)


def test_the_largest_row_fits() -> None:
    row = Largest(bytes(ROW_BYTES_MAX - 30), (True, -(2**63) + 1))
    table = Table(Largest).with_rows({b"k": row})
    assert table.root.rows == 1
    assert table.get_record(b"k") == row


@pytest.mark.parametrize("key", [b"", bytes(ROW_KEY_BYTES_MAX + 1)])
def test_keys_have_a_length(key: bytes) -> None:
    with pytest.raises(AssertionError):
        Table(Note).with_rows({key: Note(1)})
    with pytest.raises(RemoteProtocolError):
        codec.decode(RangeProof, codec.encode(RangeProof((), None, ((key, b"\x00"),))))


def test_a_proof_is_checked_without_the_type_of_the_record() -> None:
    table = table_of({b"a": Note(1)})
    assert verify_key(table.root.hash, b"a", codec.encode(Note(1)), table.prove_key(b"a"))


@pytest.mark.real("threads")
def test_a_table_is_read_while_the_next_one_is_hashed_in_another_thread() -> None:
    """A block's table is hashed beside the loop, which judges the next transactions by the table before it."""
    rows = {b"%d" % number: Note(number) for number in range(4_000)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    before, stop, failures = table_of(rows), threading.Event(), list[BaseException]()

    def hash_the_next() -> None:
        try:
            while not stop.is_set():
                assert before.with_rows({b"%d" % number: Note(3) for number in range(50)}).root
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=hash_the_next)
    thread.start()
    deadline = time.monotonic() + 1.5
    number = 0
    while time.monotonic() < deadline and not failures:
        number += 1
        before.get_record(b"%d" % (number % 20_000))
    stop.set()
    thread.join()
    sys.setswitchinterval(interval)
    assert not failures


@pytest.mark.real("threads")
def test_a_table_is_exported_in_another_thread_while_it_and_later_ones_are_hashed_and_stored() -> None:
    """The export begins before the tree exists, and continues while later blocks take its slots."""
    store, rows, draw = MemoryBucketStore(), many(1_000), random.Random(3)
    table, keys = table_of(rows), list(rows)
    shared, failures, stop = [(table, rows)], list[BaseException](), threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def export() -> None:
        try:
            while not stop.is_set():
                taken, held = shared[0]
                assert dict(taken.items()) == held
                assert taken.get_record(keys[0]) == held.get(keys[0])
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=export)
    thread.start()
    deadline = time.monotonic() + 1.5
    while (not store.kept or time.monotonic() < deadline) and not failures:
        changes = {draw.choice(keys): draw.choice([None, Note(7)]) for _ in range(40)}
        table, rows = table.with_rows(changes), {k: v for k, v in {**rows, **changes}.items() if v is not None}
        shared[0] = table, rows
        store.save_table(table)
    stop.set()
    thread.join()
    sys.setswitchinterval(interval)
    assert not failures
    assert table.root.hash == store.load_table(Note).root.hash == reference(rows)


class Overtaken(dict[int, Any]):
    """The kept data of a version, with commits of another thread right after the first look-up of a slot."""

    def __init__(self, commits: Callable[[], None]) -> None:
        self._commits: Callable[[], None] | None = commits

    def get(self, slot: int, default: Any = None) -> Any:
        found, commits, self._commits = super().get(slot, default), self._commits, None
        if commits is not None:
            commits()
        return found


@pytest.mark.parametrize("last", [Note(2), None])
def test_a_reader_that_several_commits_overtake_gets_the_rows_of_its_own_table(last: Note | None) -> None:
    """One row is one bucket, in a slot that each commit takes or frees."""
    store, table = MemoryBucketStore(), table_of({b"key": Note(0)})
    store.save_table(table)

    def commits() -> None:
        after = table
        for note in (Note(1), last):
            after = after.with_rows({b"key": note})
            store.save_table(after)

    version = table._now[1]
    assert version is not None
    version.superseded = Overtaken(commits)
    assert dict(table.items()) == {b"key": Note(0)}


def test_more_rows_than_a_table_has_are_refused_before_they_are_read() -> None:
    incoming = TableAssembly(Table.from_wire(table_of(many(30)).root, Note))
    flood = codec.encode(RangeProof((), None, tuple((b"%d" % number, b"x") for number in range(31))))
    with pytest.raises(RemoteProtocolError, match="31 rows in a range of a table with 30 rows"):
        incoming.add_range("", flood)


class CrossedKey(bytes):
    """A key whose second hash simulates another thread, which reads rows and clears the full cache of known records."""

    def __new__(cls, key: bytes, table: Table[Note]) -> CrossedKey:
        made = super().__new__(cls, key)
        made.table, made.hashed = table, 0
        return made

    table: Table[Note]
    hashed: int

    def __hash__(self) -> int:
        self.hashed += 1
        if self.hashed == 2:
            self.table._now[3].clear()
        return super().__hash__()


def test_a_row_is_read_although_another_thread_forgets_the_known_ones() -> None:
    """A `KeyError` of one machine alone would pass for a bug of the module, which all peers would see."""
    rows = many(5)
    table = table_of(rows)
    _ = table.root
    key, value = next(iter(rows.items()))
    assert table.get_record(key) == value, "now it is known"
    assert table.get_record(CrossedKey(key, table)) == value
