"""Durability of the ledger store: a turn is written whole or not at all, a slot has one vote, and damage is reported."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

import storage.ledger_store
from consensus.effects import (
    NEVER_VOTED,
    OwnRoundStatement,
    RestartState,
    SendMessage,
    StepEffects,
    StoredCertificate,
    VotePause,
    persist_effects,
    send_messages,
)
from consensus.evidence import Evidence
from protocol.errors import LocalProtocolError, LostVotesError, StorageError
from protocol.identity import Signed, sign_message
from protocol.messages import Ballot, CutOff, GetRound
from protocol.verdicts import Verdict
from storage.crash_points import CRASH_POINT_VARIABLE
from storage.ledger_integrity import HighWaterMark, insert_row
from storage.ledger_store import MEASUREMENTS_MAX, LedgerStore, ReadOnlyStore, StoredRound
from tests.packages import ROOT
from tests.sim.keys import FastSigner
from tests.storage.records import (
    CHAIN,
    JOB,
    ME,
    certificate,
    decided,
    digest_of,
    fill,
    round_vote,
    stored_block,
    vote,
    vouch_record,
)
from tests.waiting import run_process


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    opened = LedgerStore(tmp_path / "ledger.db", CHAIN)
    yield opened
    opened.close()


def reopened(store: LedgerStore) -> LedgerStore:
    """Return the store as after a kill: nothing was closed properly."""
    return LedgerStore(store.path, CHAIN)


@contextmanager
def opened_again(store: LedgerStore) -> Iterator[LedgerStore]:
    again = reopened(store)
    try:
        yield again
    finally:
        again.close()


# Journal --------------------------------------------------------------------------------------------------------------


def test_a_new_journal_has_never_voted(store: LedgerStore) -> None:
    assert store.read_restart_state() == NEVER_VOTED and store.decided_height == 0 and store.get_decision(1) is None


def test_after_a_kill_everything_is_there_that_a_replica_needs_and_nothing_else(store: LedgerStore) -> None:
    store.append_records([vote(1), stored_block(1), StoredCertificate(1, certificate(1))])
    store.append_records([decided(1)])
    store.append_records([vote(2), decided(2)])
    store.append_records([decided(3), vote(4), stored_block(4, b"x")])
    store.append_records([vote(4, view=1), StoredCertificate(4, certificate(4))])
    store.append_records([stored_block(5, b"y"), vote(5), VotePause(7)])
    with opened_again(store) as again:
        assert again.read_restart_state() == RestartState(
            decided=(decided(2), decided(3)),
            votes=(vote(4), vote(4, view=1), vote(5)),
            blocks=(stored_block(4, b"x"), stored_block(5, b"y")),
            prepared=certificate(4),
            no_votes_below=7,
        )
        assert [again.get_decision(height) for height in (1, 4)] == [decided(1), None]
        assert again.get_block(digest_of(b"x")) == b"x" and again.get_block(digest_of(b"block")) is None


def test_votes_for_a_height_that_is_decided_do_not_come_back_even_if_they_were_written_after_it(store: LedgerStore) -> None:
    store.append_records([decided(1)])
    store.append_records([vote(1), stored_block(1), StoredCertificate(1, certificate(1))])
    assert store.read_restart_state() == RestartState(decided=(decided(1),))


def test_the_highest_certificate_replaces_the_one_before(store: LedgerStore) -> None:
    for height in (1, 2):
        store.append_records([StoredCertificate(height, certificate(height))])
    assert store.read_restart_state().prepared == certificate(2)


def test_the_same_vote_is_kept_once_and_another_one_in_its_slot_is_never_written(store: LedgerStore) -> None:
    store.append_records([vote(1)])
    store.append_records([vote(1)])
    with pytest.raises(LocalProtocolError, match="a second, different vote"):
        store.append_records([stored_block(1), vote(1, block=b"other".ljust(32))])
    assert store.read_restart_state() == RestartState(votes=(vote(1),)), "all or none: nothing of the bad turn is there"
    store.append_records([vote(1, view=1, block=b"other".ljust(32))])


def test_another_block_for_a_decided_height_is_never_written(store: LedgerStore) -> None:
    store.append_records([decided(1)])
    store.append_records([decided(1)])
    with pytest.raises(LocalProtocolError, match="height 1 is already decided"):
        store.append_records([decided(1, b"fork"), vote(2)])
    assert store.get_decision(1) == decided(1) and store.read_restart_state().votes == ()


def test_a_turn_that_fails_in_the_middle_leaves_nothing(store: LedgerStore) -> None:
    store.append_records([vote(1)])
    with pytest.raises(LocalProtocolError):
        store.append_records([decided(1), vote(5), vote(5, block=b"other".ljust(32))])
    with opened_again(store) as again:
        assert again.read_restart_state() == RestartState(votes=(vote(1),)) and again.decided_height == 0


def test_one_ballot_one_cut_off_and_a_vouch_for_each_trainer_per_round_are_kept_until_the_round_is_over(
    store: LedgerStore,
) -> None:
    job = b"j" * 32
    first, second = (round_vote("ballot", n, Ballot(job, n, b"r" * 32, ())) for n in (0, 1))
    cut = round_vote("cut-off", 1, CutOff(job, 1, ()))
    vouches = [vouch_record(1, trainer * 32) for trainer in (b"t", b"u")]
    store.append_records([first, second, cut, first, *vouches, vouches[0], vouch_record(0, b"t" * 32)])
    with pytest.raises(LocalProtocolError, match="a second, different vote"):
        store.append_records([round_vote("ballot", 1, Ballot(job, 1, b"s" * 32, ()))])
    with pytest.raises(LocalProtocolError, match="a second, different vote"):
        store.append_records([vouch_record(1, b"t" * 32, Verdict.REPLAY)])
    store.append_records([decided(1)])
    closed = StoredRound(job, 0, 1, {}, (), stepped=True, model_root=b"m" * 32, vouchers={})
    store.save_state(1, b"r" * 32, b"state", [closed], tables={})
    with opened_again(store) as again:
        assert again.round_votes(ME.public, job, 0) == {} == again.round_votes(ME.public, b"k" * 32, 1)
        kept = {record.tag: record.signed for record in (second, cut, *vouches)}
        assert again.round_votes(ME.public, job, 1) == kept and len(kept) == 4


def test_a_new_key_has_a_ballot_of_its_own_in_a_round_in_which_the_old_one_voted(store: LedgerStore) -> None:
    job, successor = b"j" * 32, FastSigner("my new key")
    old, new = (
        OwnRoundStatement("ballot", job, 1, sign_message(signer, CHAIN, Ballot(job, 1, root * 32, ())))
        for signer, root in ((ME, b"r"), (successor, b"s"))
    )
    store.append_records([old])
    store.append_records([new])
    with opened_again(store) as again:
        assert again.round_votes(ME.public, job, 1) == {"ballot": old.signed}
        assert again.round_votes(successor.public, job, 1) == {"ballot": new.signed}
        with pytest.raises(LocalProtocolError, match="a second, different vote"):
            again.append_records(
                [OwnRoundStatement("ballot", job, 1, sign_message(successor, CHAIN, Ballot(job, 1, b"t" * 32, ())))]
            )


def test_evidence_is_kept_once_and_bounded(store: LedgerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.ledger_store.EVIDENCE_MAX", 2)
    pairs = [Evidence(vote(i).signed, vote(i, block=bytes(32)).signed) for i in range(3)]
    store.append_records([pairs[0], pairs[0], *pairs])
    assert sorted(p.first.body for p in store.evidence()) == sorted(p.first.body for p in pairs[:2])
    assert all(isinstance(part, Signed) for pair in store.evidence() for part in (pair.first, pair.second))


# State ----------------------------------------------------------------------------------------------------------------


def test_the_applied_state_is_replaced_and_the_rounds_and_roots_are_remembered(store: LedgerStore) -> None:
    trainer, voter = b"t" * 32, b"v" * 32
    vouchers = {trainer: (voter, trainer[::-1])}
    rounds = [StoredRound(b"j" * 32, n, n + 1, {trainer: "accept"}, (voter,), True, bytes([n]) * 32, vouchers) for n in range(3)]
    assert store.encoded_state() is None
    for n in range(3):
        store.append_records([decided(n + 1)])
        store.save_state(n + 1, bytes([n]) * 32, b"state %d" % n, rounds[n : n + 1], tables={})
    store.save_measurements(b"j" * 32, 1, {"nats": 2.5})
    store.save_measurements(b"j" * 32, 1, {"nats": 2.0, "bits": 1.0})
    with opened_again(store) as again:
        assert again.encoded_state() == b"state 2" and again.closed_rounds(2) == rounds[1:] and again.closed_rounds(9) == rounds
        assert again.state_roots() == {n + 1: bytes([n]) * 32 for n in range(3)}
        assert again.measurements(b"j" * 32) == {1: {"nats": 2.0, "bits": 1.0}}


def test_figures_that_can_wait_are_seen_at_once_and_written_with_the_next_transaction(store: LedgerStore) -> None:
    store.queue_measurements(b"j" * 32, 1, {"nats": 2.5})
    store.queue_measurements(b"j" * 32, 1, {"nats": 2.0})
    assert store.measurements(b"j" * 32) == {1: {"nats": 2.0}} and store.measurements(b"k" * 32) == {}
    with opened_again(store) as before:
        assert before.measurements(b"j" * 32) == {}
    store.append_records([vote(1)])
    store.queue_measurements(b"j" * 32, 2, {"nats": 1.0})
    with opened_again(store) as again:
        assert again.measurements(b"j" * 32) == {1: {"nats": 2.0}}
    store.close()
    with closing(LedgerStore(store.path, CHAIN)) as last:
        assert last.measurements(b"j" * 32)[2] == {"nats": 1.0}


@pytest.mark.parametrize("writes", [False, True])
def test_all_figures_of_a_measurement_are_seen_or_none(store: LedgerStore, writes: bool) -> None:
    class Read(dict[str, float]):
        """Figures that are read from the store between any two of them, as another thread may do."""

        def items(self) -> Any:
            for item in super().items():
                yield item
                if writes:
                    store.append_records([vote(len(seen) + 1)])
                seen.append(store.measurements(JOB))

    seen: list[dict[int, dict[str, float]]] = []
    store.queue_measurements(JOB, 1, Read(accuracy=0.5, pairs=96.0))
    assert seen == [{}, {}] and store.measurements(JOB) == {1: {"accuracy": 0.5, "pairs": 96.0}}


def test_measurements_that_are_too_many_are_dropped_whole(store: LedgerStore) -> None:
    for number in range(MEASUREMENTS_MAX + 1):
        store.queue_measurements(JOB, number, {"accuracy": 0.5, "pairs": 96.0})
    kept = store.measurements(JOB)
    assert min(kept) == 1 and len(kept) == MEASUREMENTS_MAX and all(len(figures) == 2 for figures in kept.values())


# Disks that fail ------------------------------------------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[StorageError], path: Path, *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text and str(path) in text
    assert ("peer rekey" in text) == isinstance(error.value, LostVotesError), "only lost votes ask for a new key"
    for word in words:
        assert word in text, text


@contextmanager
def refused(path: Path, *words: str) -> Iterator[None]:
    with pytest.raises(StorageError) as error:
        yield
    one_line(error, path, *words)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Return a closed database of some hundred pages."""
    store = LedgerStore(tmp_path / "ledger.db", CHAIN)
    for height in range(1, 60):
        store.append_records([decided(height, os.urandom(3_000) + bytes([height])), vote(height + 1)])
    store.save_state(59, bytes(32), os.urandom(9_000), tables={})
    store.close()
    return tmp_path / "ledger.db"


def open_store(path: Path) -> LedgerStore:
    store = LedgerStore(path, CHAIN)
    store.close()
    return store


def test_another_chains_database_and_another_format_are_refused(filled: Path) -> None:
    with refused(filled, "another network"):
        LedgerStore(filled, b"d" * 32)
    change(filled, "PRAGMA user_version=9")
    with refused(filled, "format 9, but this program reads formats up to 8; install the newer program that wrote it"):
        LedgerStore(filled, CHAIN)
    change(filled, "PRAGMA user_version=7")
    with refused(filled, "format 7, from a program before 0.3.0; continue its network with that program"):
        LedgerStore(filled, CHAIN)


LATER = """
import sys
from pathlib import Path
from storage import ledger_store
from tests.storage.test_store import CHAIN, later
with later():
    ledger_store.LedgerStore(Path(sys.argv[1]), CHAIN).close()
"""


@contextmanager
def later() -> Iterator[None]:
    """Simulate a later program with two more schema versions: a unit per measurement, then a table of units."""
    real = storage.ledger_store.SCHEMA_VERSION, storage.ledger_store._TABLES
    (old,) = (table for table in real[1] if "TABLE measured" in table)
    wide, units = old.replace("value REAL,", "value REAL, unit TEXT,"), "CREATE TABLE units (unit TEXT PRIMARY KEY)"

    def widen(database: sqlite3.Connection) -> None:
        database.execute("ALTER TABLE measured RENAME TO before")
        database.execute(wide)
        for job, round, name, value, _ in database.execute("SELECT * FROM before").fetchall():
            insert_row(database, "INSERT", "measured", job, round, name, value, "nats")
        database.execute("DROP TABLE before")

    storage.ledger_store.SCHEMA_VERSION = real[0] + 2
    storage.ledger_store._TABLES = (*(wide if table == old else table for table in real[1]), units)
    storage.ledger_store.MIGRATIONS.update({real[0]: widen, real[0] + 1: lambda database: database.execute(units)})
    try:
        yield
    finally:
        storage.ledger_store.SCHEMA_VERSION, storage.ledger_store._TABLES = real
        storage.ledger_store.MIGRATIONS.clear()


def test_a_database_of_an_earlier_form_is_migrated_with_all_that_is_in_it(filled: Path) -> None:
    with closing(LedgerStore(filled, CHAIN)) as before:
        before.save_measurements(JOB, 3, {"loss": 2.5})
        decided = before.decided_height
    with later(), closing(LedgerStore(filled, CHAIN)) as store:
        assert store.decided_height == decided
        assert store._rows("PRAGMA user_version")[0][0] == storage.ledger_store.FIRST_SCHEMA_VERSION + 2
        for table in (
            "meta",
            "blocks",
            "votes",
            "undecided",
            "prepared",
            "round_votes",
            "evidence",
            "roots",
            "rounds",
            "measured",
        ):
            store._checked_rows(table)
        assert (3, "loss", 2.5, "nats") in [tuple(row[1:5]) for row in store._checked_rows("measured")]
    with pytest.raises(StorageError, match="install the newer program"):
        LedgerStore(filled, CHAIN)


def test_a_database_that_is_looked_at_stays_as_it_is(filled: Path) -> None:
    """The peer ended well or was killed, and the schema is the current one or an earlier one."""
    with closing(LedgerStore(filled, CHAIN)) as store:
        decided = store.decided_height
        killed = filled.parent / "killed"
        shutil.copytree(filled.parent, killed, ignore=shutil.ignore_patterns("*-shm", "killed"))
    for folder in (filled.parent, killed):
        for program, is_later in ((nullcontext(), False), (later(), True)):
            before = _bytes_in(folder)
            with program, closing(ReadOnlyStore(folder / filled.name, CHAIN)) as looked:
                assert looked.is_older == is_later and (is_later or looked.decided_height == decided)
            after = _bytes_in(folder)
            assert {name: after[name] for name in before} == before
            assert folder == killed or after == before, "nothing is made beside a log that is not there"


def _bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.name.endswith("-shm")}


@pytest.mark.parametrize("how", ["another network", "a damaged vote"])
def test_a_database_is_migrated_only_if_it_is_whole_and_of_this_network(filled: Path, how: str) -> None:
    if how == "a damaged vote":
        with closing(sqlite3.connect(filled, isolation_level=None)) as database:
            database.execute("UPDATE round_votes SET signed = x'00'")
            database.execute("UPDATE votes SET signed = x'00'")
    with later(), pytest.raises(StorageError):
        LedgerStore(filled, CHAIN if how == "a damaged vote" else b"d" * 32)
    with closing(sqlite3.connect(filled)) as database:
        assert database.execute("PRAGMA user_version").fetchone()[0] == storage.ledger_store.FIRST_SCHEMA_VERSION


@pytest.mark.real("processes")
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_crash_while_a_database_is_migrated_leaves_the_old_form_or_the_new_one(filled: Path, side: str) -> None:
    environment = {**os.environ, CRASH_POINT_VARIABLE: f"{side}-store-migrate", "PYTHONPATH": str(ROOT)}
    assert run_process([sys.executable, "-c", LATER, str(filled)], env=environment).returncode == -signal.SIGKILL
    with closing(sqlite3.connect(filled)) as database:
        version = database.execute("PRAGMA user_version").fetchone()[0]
    assert version == storage.ledger_store.FIRST_SCHEMA_VERSION + (0 if side == "before" else 2)
    with later():
        LedgerStore(filled, CHAIN).close()


def test_a_migration_that_fails_changes_nothing(filled: Path) -> None:
    def fails(database: sqlite3.Connection) -> None:
        database.execute("DROP TABLE measured")
        raise sqlite3.OperationalError("disk I/O error")

    with later():
        storage.ledger_store.MIGRATIONS[storage.ledger_store.FIRST_SCHEMA_VERSION + 1] = fails
        with pytest.raises(StorageError):
            LedgerStore(filled, CHAIN)
    LedgerStore(filled, CHAIN).close()


def test_there_is_a_migration_from_each_earlier_form() -> None:
    assert sorted(storage.ledger_store.MIGRATIONS) == list(
        range(storage.ledger_store.FIRST_SCHEMA_VERSION, storage.ledger_store.SCHEMA_VERSION)
    )


def test_the_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    change(path, "CREATE TABLE theirs (x)")
    with refused(path, "another program"):
        LedgerStore(path, CHAIN)


@pytest.mark.parametrize("content", [b"this is not a database at all", b"SQLite format 3\x00" + b"\xff" * 4_080])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(content)
    with refused(path, "is damaged", "peer rekey"):
        LedgerStore(path, CHAIN)


def test_a_torn_page_anywhere_in_the_tree_is_found_at_the_start(filled: Path) -> None:
    data = filled.read_bytes()
    pages = len(data) // 4_096
    assert pages > 50
    trees = [page for page in range(1, pages) if data[page * 4_096] in (2, 5, 10, 13)]
    found = 0
    for page in trees[:: max(1, len(trees) // 12)]:
        filled.write_bytes(data[: page * 4_096] + b"\xa5" * 4_096 + data[(page + 1) * 4_096 :])
        with refused(filled, "is damaged", "peer rekey"):
            open_store(filled)
        found += 1
    assert found >= 5


def test_a_database_that_was_cut_is_found_at_the_start(filled: Path) -> None:
    data = filled.read_bytes()
    for length in (len(data) // 2, len(data) - 4_096, 5_000, 100):
        filled.write_bytes(data[:length])
        with refused(filled, "is damaged"):
            open_store(filled)


def test_a_database_that_is_gone_or_empty_is_not_begun_anew_for_a_key_that_may_have_voted(filled: Path) -> None:
    for lose in (lambda: filled.write_bytes(b""), filled.unlink):
        lose()
        with refused(filled, "missing or empty", "peer rekey"):
            LedgerStore(filled, CHAIN)


def change(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)
    database.close()


WRITTEN_ANEW = {  # reading -> change of the row that is read
    "decided block": ("UPDATE blocks SET block = x'6f74686572' WHERE height = 2", lambda store: store.get_decision(2)),
    "its certificate": ("UPDATE blocks SET certificate = x'00' WHERE height = 2", lambda store: store.read_restart_state()),
    "its height": ("UPDATE blocks SET height = -height", lambda store: store.get_decision(-2)),
    "vote": ("UPDATE votes SET signed = x'00'", None),
    "height of a vote": ("UPDATE votes SET height = 1", None),
    "undecided block": ("UPDATE undecided SET block = x'00'", None),
    "height of an undecided block": ("UPDATE undecided SET height = 2", None),
    "prepare certificate": ("UPDATE prepared SET certificate = x'00'", None),
    "round vote": ("UPDATE round_votes SET signed = x'00'", None),
    "job of a round vote": ("UPDATE round_votes SET job = x'00'", None),
    "signer of a round vote": ("UPDATE round_votes SET signer = x'00'", None),
    "evidence": ("UPDATE evidence SET pair = x'00'", None),
    "state": ("UPDATE meta SET value = CAST(value || x'78' AS BLOB) WHERE key = 'state'", None),
    "number of transactions": ("UPDATE meta SET value = value + 1 WHERE key = 'transactions'", None),
    "root": ("UPDATE roots SET state_root = x'00'", lambda store: store.state_roots()),
    "round": ("UPDATE rounds SET closed = x'00'", lambda store: store.closed_rounds(1)),
    "figure": ("UPDATE measured SET value = 3.0", lambda store: store.measurements(JOB)),
}


@pytest.mark.parametrize("what", WRITTEN_ANEW)
def test_other_bytes_in_any_row_are_found_at_the_start_or_when_the_row_is_read(tmp_path: Path, what: str) -> None:
    path = tmp_path / "ledger.db"
    store = LedgerStore(path, CHAIN)
    fill(store)
    store.close()
    statement, read = WRITTEN_ANEW[what]
    change(path, statement)
    with refused(path, "does not match", "peer rekey", "restore"):
        opened = LedgerStore(path, CHAIN)
        try:
            assert read is not None, "found at the start"
            read(opened)
        finally:
            opened.close()


def test_an_old_decided_block_that_is_damaged_is_named_and_costs_no_key(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with closing(LedgerStore(path, CHAIN)) as store:
        for height in range(1, 5):
            store.append_records([decided(height)])
    change(path, "UPDATE blocks SET block = x'6f74686572' WHERE height IN (2, 3)")
    with closing(LedgerStore(path, CHAIN)) as store:
        with pytest.raises(StorageError) as old:
            store.get_decision(2)
        with pytest.raises(StorageError) as needed_to_start:
            store.get_decision(3)
    one_line(old, path, "block of height 2 does not match its digest", "other peers have that block")
    assert "rekey" not in str(old.value)
    one_line(needed_to_start, path, "does not match", "peer rekey")


def test_decided_blocks_that_are_missing_are_found_at_the_start(filled: Path) -> None:
    change(filled, "DELETE FROM blocks WHERE height = 30")
    with refused(filled, "decided blocks are missing"):
        LedgerStore(filled, CHAIN)


def test_a_log_that_is_gone_is_missed(store: LedgerStore) -> None:
    """The database itself does not show that the log had more."""
    store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = store.path.read_bytes()
    store.append_records([vote(1)])
    store.close()
    store.path.write_bytes(before)
    with refused(store.path, "0 of at least 1 transactions", "peer rekey"):
        reopened(store)


def test_a_count_that_lags_behind_or_is_damaged_stops_nobody(store: LedgerStore, tmp_path: Path) -> None:
    count = tmp_path / "ledger.db.committed"
    early = count.read_bytes()
    store.append_records([vote(1)])
    for content in (early, b"", b"9" * len(early), early[:-3]):
        count.write_bytes(content)
        with opened_again(store) as again:
            assert again.read_restart_state().votes == (vote(1),)
    count.unlink()
    with opened_again(store) as again:
        assert again.read_restart_state().votes == (vote(1),)


def test_a_restored_state_stands_on_its_decisions_and_older_votes_are_gone(store: LedgerStore) -> None:
    store.append_records([decided(1), vote(2)])
    taken = [decided(height) for height in (7, 8, 9)]
    store.append_records([vote(8), vote(10)])
    store.restore_snapshot(taken, 8, b"r" * 32, b"state", tables={})
    with opened_again(store) as again:
        assert again.decided_height == 9 and again.encoded_state() == b"state" and again.state_roots() == {8: b"r" * 32}
        assert again.read_restart_state() == RestartState(decided=tuple(taken[1:]), votes=(vote(10),))
        assert [again.get_decision(height) for height in (1, 6, 7)] == [None, None, taken[0]]
        again.append_records([decided(10)])
        assert again.decided_height == 10
    store.restore_snapshot([decided(10), decided(11)], 10, b"s" * 32, b"newer", tables={})
    assert store.get_decision(7) == taken[0] and store.decided_height == 11, "nothing is missing between: older blocks stay"
    with pytest.raises(LocalProtocolError, match="already decided"):
        store.restore_snapshot([decided(11, b"fork")], 11, bytes(32), b"", tables={})


def test_nothing_is_written_after_a_write_that_failed(store: LedgerStore) -> None:
    """A second fsync may succeed although the pages of the first one are lost."""
    store.append_records([vote(1)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.path.with_name("ledger.db-wal").stat().st_size, hard))
    try:
        with pytest.raises(StorageError) as error:
            store.append_records([vote(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one_line(error, store.path, "failed to read or write", "check the disk")
    with pytest.raises(StorageError) as again:
        store.append_records([vote(2)])
    assert str(again.value) == str(error.value)
    with opened_again(store) as reopened:
        assert reopened.read_restart_state().votes == (vote(1),)


def test_nothing_is_sent_when_the_disk_fails_to_sync(store: LedgerStore) -> None:
    class FailingSync:
        """A connection whose commits do not reach the disk."""

        def __init__(self, database: sqlite3.Connection) -> None:
            self._database = database

        def execute(self, statement: str, *arguments: object) -> sqlite3.Cursor:
            if statement == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return self._database.execute(statement, *arguments)

        def __getattr__(self, name: str) -> object:
            return getattr(self._database, name)

    class Wire:
        sent: ClassVar[list[object]] = []

        def send(self, to: object, message: object) -> None:
            self.sent.append(message)

    whole, store._database = store._database, FailingSync(store._database)  # type: ignore[assignment]
    turn = StepEffects((vote(1),), (SendMessage(None, GetRound(JOB, 0)),))
    for _ in range(2):
        with pytest.raises(StorageError):
            send_messages(persist_effects(turn, store), Wire())
        store._database = whole
    assert Wire.sent == [] and store.read_restart_state().votes == ()


def test_a_full_disk_is_said_and_what_was_durable_stays(store: LedgerStore) -> None:
    store.append_records([decided(1), vote(2)])
    store._database.execute("PRAGMA max_page_count=1")
    with refused(store.path, "full", "nothing was lost"):
        for height in range(2, 40):
            store.append_records([decided(height, os.urandom(9_000)), vote(height + 1)])
    reached = store.decided_height
    with opened_again(store) as again:
        assert again.decided_height == reached and again.read_restart_state().votes == (vote(reached + 1),)
        again.append_records([decided(reached + 1)])


def test_a_database_that_cannot_be_written_is_said(store: LedgerStore) -> None:
    store._database.execute("PRAGMA query_only=1")
    with refused(store.path, "cannot write", "permissions"):
        store.append_records([vote(1)])


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "ledger.db"
    with refused(path, "cannot write"):
        LedgerStore(path, CHAIN)


def test_a_database_that_another_program_holds_is_said_to_be_in_use(filled: Path) -> None:
    holder = sqlite3.connect(filled, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    store = LedgerStore(filled, CHAIN)
    store._database.execute("PRAGMA busy_timeout=1")
    with refused(filled, "in use"):
        store.append_records([vote(90)])
    store.close()
    holder.close()


def test_a_crash_while_the_database_is_made_leaves_nothing_that_stops_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    path = tmp_path / "ledger.db"
    with monkeypatch.context() as patch:
        patch.setattr(HighWaterMark, "open", kill)
        with pytest.raises(Killed):
            LedgerStore(path, CHAIN)
        patch.undo()
    open_store(path)


def test_a_commit_waits_for_the_disk(store: LedgerStore) -> None:
    """FULL is 2. In the write-ahead log a lower level loses the last votes in a power failure."""
    assert store._rows("PRAGMA synchronous") == [(2,)] and store._rows("PRAGMA journal_mode") == [("wal",)]
