from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ledger.tables import Table
from ledger.tables.sparse_merkle_tree import buckets
from protocol.errors import StorageError
from storage import sqlite_rows as storage_rows
from storage.sqlite_rows import SCHEMA, SqliteBucketStore
from tests.ledger.tables.records import Note

NAME = "notes"


class Disk:
    """A database with rows, as in `storage.ledger_store`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.database.execute("PRAGMA journal_mode=WAL")
        if not self.database.execute("SELECT 1 FROM sqlite_schema").fetchall():
            self.database.execute(SCHEMA)
        self.rows = SqliteBucketStore(path)

    def save(self, **tables: Table[Note]) -> None:
        changes = self.rows.plan_changes(tables)
        self.database.execute("BEGIN IMMEDIATE")
        self.rows.write_changes(self.database, changes)
        self.database.execute("COMMIT")
        self.rows.apply_committed(changes)

    def again(self) -> Disk:
        self.close()
        return Disk(self.path)

    def load(self, name: str = NAME) -> Table[Note]:
        return self.rows.table(name, Note)

    def close(self) -> None:
        self.rows.close()
        self.database.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with closing(Disk(tmp_path / "ledger.sqlite")) as disk:
        yield disk


def many(count: int) -> dict[bytes, Note]:
    return {b"%d" % number: Note(number, "x" * (number % 40)) for number in range(count)}


def test_tables_are_there_again_after_a_restart(disk: Disk) -> None:
    rows, draw = many(2_000), random.Random(0)
    table, other = Table(Note).with_rows(dict(rows)), Table(Note).with_rows({b"a": Note(1)})
    disk.save(notes=table, other=other)
    for step in range(6):
        changes = {key: draw.choice([None, Note(-step)]) for key in draw.sample(list(rows), 300)}
        table = table.with_rows(changes)
        rows |= {key: value for key, value in changes.items() if value is not None}
        rows = {key: value for key, value in rows.items() if changes.get(key, value) is not None}
        disk.save(notes=table, other=other)
        if step % 2:
            disk = disk.again()
            assert disk.load().root == table.root
            table, other = disk.load(), disk.load("other")
        assert dict(table.items()) == rows
    assert dict(disk.load("other").items()) == {b"a": Note(1)}
    assert len(disk.load("nothing")) == 0
    disk.close()


def test_a_transaction_that_does_not_end_leaves_the_tables_before_it(disk: Disk) -> None:
    table = Table(Note).with_rows(dict(many(500)))
    disk.save(notes=table)
    changes = disk.rows.plan_changes({NAME: table.with_rows({**dict.fromkeys(list(many(100))), b"new": Note(1)})})
    disk.database.execute("BEGIN IMMEDIATE")
    disk.rows.write_changes(disk.database, changes)
    disk.database.execute("ROLLBACK")
    assert dict(table.items()) == many(500)
    again = disk.again()
    assert again.load().root == table.root
    assert dict(again.load().items()) == many(500)
    again.close()


def test_a_table_of_an_earlier_height_is_read_after_its_slots_were_written_again(disk: Disk) -> None:
    disk.save(notes=Table(Note).with_rows(dict(many(1_000))))
    disk = disk.again()
    snapshot = disk.load()
    disk.save(notes=snapshot.with_rows({key: Note(-1) for key in many(1_000)}))
    assert dict(snapshot.items()) == many(1_000)
    disk.close()


def test_a_reader_that_comes_between_the_commit_and_its_end_finds_the_rows_of_its_table(disk: Disk) -> None:
    disk.save(notes=Table(Note).with_rows(dict(many(300))))
    disk = disk.again()
    snapshot = disk.load()
    waiting = list(buckets(snapshot.hashed_tree()[0]))
    changes = disk.rows.plan_changes({NAME: snapshot.with_rows({key: Note(-1) for key in many(300)})})
    disk.database.execute("BEGIN IMMEDIATE")
    disk.rows.write_changes(disk.database, changes)
    disk.database.execute("COMMIT")
    disk.rows._recent.clear()
    for hash, *_, slot in waiting:  # a reader that missed the kept data reads the disk, which has other rows
        assert isinstance(slot, int) and disk.rows.read_bucket(slot, hash) is None
    assert dict(snapshot.items()) == many(300)
    disk.close()


def test_what_was_read_of_a_slot_before_is_not_taken_for_what_is_there_now(disk: Disk) -> None:
    table = Table(Note).with_rows(dict(many(300)))
    disk.save(notes=table)
    before = [(slot, hash) for hash, *_, slot in buckets(table.hashed_tree()[0]) if isinstance(slot, int)]
    assert all(disk.rows.read_bucket(slot, hash) for slot, hash in before)
    disk.save(notes=table.with_rows({key: Note(-1) for key in many(300)}))
    assert not any(disk.rows.read_bucket(slot, hash) for slot, hash in before)


def test_new_rows_get_slots_of_their_own_after_a_restart(disk: Disk) -> None:
    rows = many(200)
    disk.save(notes=Table(Note).with_rows(dict(rows)))
    for step in range(5):
        disk = disk.again()
        new = {b"%d %d" % (step, number): Note(step) for number in range(200)}
        disk.save(notes=disk.load().with_rows(dict(new)))
        rows |= new
        disk = disk.again()
        assert dict(disk.load().items()) == rows
    disk.close()


def test_a_table_that_the_state_has_no_more_takes_no_room(disk: Disk) -> None:
    disk.save(notes=Table(Note).with_rows(dict(many(200))), other=Table(Note).with_rows({b"a": Note(1)}))
    disk.save(other=disk.load("other"))
    assert disk.database.execute("SELECT DISTINCT name FROM rows_1").fetchall() == [("other",)]
    disk = disk.again()
    assert len(disk.load()) == 0 and len(disk.load("other")) == 1
    disk.close()


def test_readers_in_other_threads_see_their_own_table_while_blocks_are_written(disk: Disk) -> None:
    rows = many(600)
    disk.save(notes=Table(Note).with_rows(dict(rows)))
    disk = disk.again()
    table = snapshot = disk.load()
    wrong: list[object] = []

    def read() -> None:
        for _ in range(20):
            if dict(snapshot.items()) != rows:
                wrong.append("other rows")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(20):
        table = table.with_rows({key: Note(-step) for key in list(rows)[step::20]})
        disk.save(notes=table)
    for reader in readers:
        reader.join()
    assert not wrong
    disk.close()


@pytest.mark.parametrize("column", ["name", "start", "depth", "rows", "size", "hash", "data", "digest"])
def test_no_other_bytes_in_a_row_are_ever_taken_for_rows(disk: Disk, column: str) -> None:
    table = Table(Note).with_rows(dict(many(400)))
    disk.save(notes=table)
    other = {"depth": "depth + 1", "rows": "rows + 1", "size": "size + 1", "name": "'notez'"}
    change = other.get(column, f"CAST(substr({column}, 1, length({column}) - 1) || x'07' AS BLOB)")
    disk.database.execute(f"UPDATE rows_1 SET {column} = {change} WHERE slot = 3")
    disk.close()
    with pytest.raises((StorageError, AssertionError), match=r"damaged|root"), closing(Disk(disk.path)) as again:
        found = again.load()
        assert found.root == table.root, "root"  # a store compares them with those of its state
        list(found.items())


def test_rows_of_another_layout_are_not_read(disk: Disk) -> None:
    disk.save(notes=Table(Note).with_rows(dict(many(10))))
    disk.database.execute("ALTER TABLE rows_1 RENAME TO rows_2")
    with pytest.raises(StorageError, match=r"rows_2.*this program reads rows_1"):
        SqliteBucketStore(disk.path)


def test_what_was_read_lately_has_a_bound(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_rows, "RECENT_BYTES_MAX", 5_000)
    table = Table(Note).with_rows(dict(many(1_000)))
    disk.save(notes=table)
    for step in range(3):
        assert len(dict(table.items())) == 1_000
        table = table.with_rows({b"%d" % step: Note(-1)})
        disk.save(notes=table)
    kept = [data for _, data in disk.rows._recent.values()]
    assert 0 < sum(map(len, kept)) == disk.rows._recent_bytes <= 5_000
