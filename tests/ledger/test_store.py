"""What survives: all of a turn or nothing, one vote per slot, and one clear line when the disk is not to be trusted."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from consensus.block import block_digest
from consensus.evidence import Evidence
from consensus.turn import NEVER_VOTED, Decided, Restart, StoredBlock, StoredCertificate, Voted
from ledger.store import RoundVoted, Store, StoredRound
from protocol import codec
from protocol.errors import LocalProtocolError, StorageError
from protocol.identity import Signed, sign
from protocol.messages import Ballot, Certificate, CutOff, Prepare
from tests.sim.keys import FastSigner

CHAIN, ME = b"c" * 32, FastSigner("me")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "ledger.db", CHAIN)
    yield opened
    opened.close()


def reopened(store: Store) -> Store:
    """As after a kill: nothing was closed properly."""
    return Store(store.path, CHAIN)


@contextmanager
def opened_again(store: Store) -> Iterator[Store]:
    again = reopened(store)
    try:
        yield again
    finally:
        again.close()


def vote(height: int, view: int = 0, block: bytes = b"b" * 32) -> Voted:
    return Voted(("prepare", height, view), sign(ME, CHAIN, Prepare(b"v" * 32, height, view, block)))


def certificate(height: int) -> Certificate:
    return Certificate(codec.encode(Prepare(b"v" * 32, height, 0, b"b" * 32)), {bytes([i]) * 32: bytes(64) for i in range(3)})


def stored_block(height: int, block: bytes = b"block") -> StoredBlock:
    return StoredBlock(height, block_digest(block), block)


def decided(height: int, block: bytes | None = None) -> Decided:
    content = b"block %d" % height if block is None else block
    return Decided(height, block_digest(content), content, certificate(height))


# Journal --------------------------------------------------------------------------------------------------------------


def test_a_new_journal_has_never_voted(store: Store) -> None:
    assert store.load() == NEVER_VOTED and store.decided_height == 0 and store.decision(1) is None


def test_after_a_kill_everything_is_there_that_a_replica_needs_and_nothing_else(store: Store) -> None:
    store.append([vote(1), stored_block(1), StoredCertificate(1, certificate(1))])
    store.append([decided(1)])
    store.append([vote(2), decided(2)])
    store.append([decided(3), vote(4), stored_block(4, b"x")])
    store.append([vote(4, view=1), StoredCertificate(4, certificate(4))])
    store.append([stored_block(5, b"y"), vote(5)])
    with opened_again(store) as again:
        assert again.load() == Restart(
            decided=(decided(2), decided(3)),
            votes=(vote(4), vote(4, view=1), vote(5)),
            blocks=(stored_block(4, b"x"), stored_block(5, b"y")),
            prepared=certificate(4),
        )
        assert [again.decision(height) for height in (1, 4)] == [decided(1), None]
        assert again.block(block_digest(b"x")) == b"x" and again.block(block_digest(b"block")) is None


def test_votes_for_a_height_that_is_decided_do_not_come_back_even_if_they_were_written_after_it(store: Store) -> None:
    store.append([decided(1)])
    store.append([vote(1), stored_block(1), StoredCertificate(1, certificate(1))])
    assert store.load() == Restart(decided=(decided(1),))


def test_the_highest_certificate_replaces_the_one_before(store: Store) -> None:
    for height in (1, 2):
        store.append([StoredCertificate(height, certificate(height))])
    assert store.load().prepared == certificate(2)


def test_the_same_vote_is_kept_once_and_another_one_in_its_slot_is_never_written(store: Store) -> None:
    store.append([vote(1)])
    store.append([vote(1)])
    with pytest.raises(LocalProtocolError, match="a second, different vote"):
        store.append([stored_block(1), vote(1, block=b"other".ljust(32))])
    assert store.load() == Restart(votes=(vote(1),)), "all or none: nothing of the bad turn is there"
    store.append([vote(1, view=1, block=b"other".ljust(32))])


def test_another_block_for_a_decided_height_is_never_written(store: Store) -> None:
    store.append([decided(1)])
    store.append([decided(1)])
    with pytest.raises(LocalProtocolError, match="height 1 is decided already"):
        store.append([decided(1, b"fork"), vote(2)])
    assert store.decision(1) == decided(1) and store.load().votes == ()


def test_a_turn_that_fails_in_the_middle_leaves_nothing(store: Store) -> None:
    store.append([vote(1)])
    with pytest.raises(LocalProtocolError):
        store.append([decided(1), vote(5), vote(5, block=b"other".ljust(32))])
    with opened_again(store) as again:
        assert again.load() == Restart(votes=(vote(1),)) and again.decided_height == 0


def round_vote(tag: str, number: int, message: Ballot | CutOff) -> RoundVoted:
    return RoundVoted(tag, b"j" * 32, number, sign(ME, CHAIN, message))


def test_one_ballot_and_one_cut_off_per_round_are_kept_until_the_round_is_over(store: Store) -> None:
    job = b"j" * 32
    first, second = (round_vote("ballot", n, Ballot(job, n, b"r" * 32, ())) for n in (0, 1))
    cut = round_vote("cut-off", 1, CutOff(job, 1, ()))
    store.append([first, second, cut, first])
    with pytest.raises(LocalProtocolError, match="a second, different vote"):
        store.append([round_vote("ballot", 1, Ballot(job, 1, b"s" * 32, ()))])
    store.forget_round_votes(job, 1)
    with opened_again(store) as again:
        assert again.round_votes(job, 0) == {} == again.round_votes(b"k" * 32, 1)
        assert again.round_votes(job, 1) == {"ballot": second.signed, "cut-off": cut.signed}


def test_evidence_is_kept_once_and_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledger.store.EVIDENCE_MAX", 2)
    pairs = [Evidence(vote(i).signed, vote(i, block=bytes(32)).signed) for i in range(3)]
    store.append([pairs[0], pairs[0], *pairs])
    assert sorted(p[0].body for p in store.evidence()) == sorted(p.first.body for p in pairs[:2])
    assert all(isinstance(part, Signed) for pair in store.evidence() for part in pair)


# State ----------------------------------------------------------------------------------------------------------------


def test_the_applied_state_is_replaced_and_the_rounds_and_roots_are_remembered(store: Store) -> None:
    rounds = [StoredRound(b"j" * 32, n, n + 1, {b"t" * 32: "accept"}, (b"v" * 32,), True, bytes([n]) * 32) for n in range(3)]
    assert store.state() is None
    for n in range(3):
        store.append([decided(n + 1)])
        store.save_state(n + 1, bytes([n]) * 32, b"state %d" % n, rounds[n : n + 1])
    store.measure(b"j" * 32, 1, {"nats": 2.5})
    store.measure(b"j" * 32, 1, {"nats": 2.0, "bits": 1.0})
    with opened_again(store) as again:
        assert again.state() == b"state 2" and again.rounds(2) == rounds[1:] and again.rounds(9) == rounds
        assert again.roots() == {n + 1: bytes([n]) * 32 for n in range(3)}
        assert again.measured(b"j" * 32) == {1: {"nats": 2.0, "bits": 1.0}}


# Disks that fail ------------------------------------------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[StorageError], path: Path, *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text and str(path) in text
    for word in words:
        assert word in text, text


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A closed database of some hundred pages."""
    store = Store(tmp_path / "ledger.db", CHAIN)
    for height in range(1, 60):
        store.append([decided(height, os.urandom(3_000) + bytes([height])), vote(height + 1)])
    store.save_state(59, bytes(32), os.urandom(9_000))
    store.close()
    return tmp_path / "ledger.db"


def open_store(path: Path) -> Store:
    store = Store(path, CHAIN)
    store.close()
    return store


def test_another_chains_database_and_another_format_are_refused(filled: Path) -> None:
    with pytest.raises(StorageError) as error:
        Store(filled, b"d" * 32)
    one_line(error, filled, "another network")
    with sqlite3.connect(filled) as database:
        database.execute("PRAGMA user_version=9")
    database.close()
    with pytest.raises(StorageError) as error:
        Store(filled, CHAIN)
    one_line(error, filled, "format 9")


def test_the_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE theirs (x)")
    database.close()
    with pytest.raises(StorageError) as error:
        Store(path, CHAIN)
    one_line(error, path, "another program")


@pytest.mark.parametrize("content", [b"this is not a database at all", b"SQLite format 3\x00" + b"\xff" * 4_080])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(content)
    with pytest.raises(StorageError) as error:
        Store(path, CHAIN)
    one_line(error, path, "is damaged", "peer join")


def test_a_torn_page_anywhere_in_the_tree_is_found_at_the_start(filled: Path) -> None:
    data = filled.read_bytes()
    pages = len(data) // 4_096
    assert pages > 50
    trees = [page for page in range(1, pages) if data[page * 4_096] in (2, 5, 10, 13)]
    found = 0
    for page in trees[:: max(1, len(trees) // 12)]:
        filled.write_bytes(data[: page * 4_096] + b"\xa5" * 4_096 + data[(page + 1) * 4_096 :])
        with pytest.raises(StorageError) as error:
            open_store(filled)
        one_line(error, filled, "is damaged", "peer join")
        found += 1
    assert found >= 5


def test_a_database_that_was_cut_is_found_at_the_start(filled: Path) -> None:
    data = filled.read_bytes()
    for length in (len(data) // 2, len(data) - 4_096, 5_000, 100):
        filled.write_bytes(data[:length])
        with pytest.raises(StorageError) as error:
            open_store(filled)
        one_line(error, filled, "is damaged")


def test_a_database_that_is_gone_or_empty_is_not_begun_anew_for_a_key_that_may_have_voted(filled: Path) -> None:
    for lose in (lambda: filled.write_bytes(b""), filled.unlink):
        lose()
        with pytest.raises(StorageError) as error:
            Store(filled, CHAIN)
        one_line(error, filled, "gone or empty", "peer join")


def replace_in(path: Path, column: str, table: str, value: bytes) -> None:
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT max(rowid) FROM {table})", (value,))
    database.close()


def test_other_bytes_inside_a_block_a_certificate_or_the_state_are_found_when_they_are_read(filled: Path) -> None:
    replace_in(filled, "block", "blocks", b"other")
    store = Store(filled, CHAIN)
    with pytest.raises(StorageError) as error:
        store.load()
    one_line(error, filled, "has other bytes")
    store.close()
    replace_in(filled, "certificate", "blocks", b"other")
    with sqlite3.connect(filled) as database:
        database.execute("UPDATE meta SET value = CAST(value || x'78' AS BLOB) WHERE key = 'state'")
        database.execute("UPDATE blocks SET block = x'', digest = ? WHERE height = 59", (block_digest(b""),))
    database.close()
    store = Store(filled, CHAIN)
    with pytest.raises(StorageError) as error:
        store.state()
    one_line(error, filled, "the applied state has other bytes")
    with pytest.raises(StorageError) as error:
        store.decision(59)
    one_line(error, filled, "no valid form")
    store.close()


def test_a_full_disk_is_said_and_what_was_durable_stays(store: Store) -> None:
    store.append([decided(1), vote(2)])
    store._database.execute("PRAGMA max_page_count=1")
    with pytest.raises(StorageError) as error:
        for height in range(2, 40):
            store.append([decided(height, os.urandom(9_000)), vote(height + 1)])
    one_line(error, store.path, "full", "nothing was lost")
    reached = store.decided_height
    with opened_again(store) as again:
        assert again.decided_height == reached and again.load().votes == (vote(reached + 1),)
        again.append([decided(reached + 1)])


def test_a_database_that_cannot_be_written_is_said(store: Store) -> None:
    store._database.execute("PRAGMA query_only=1")
    with pytest.raises(StorageError) as error:
        store.append([vote(1)])
    one_line(error, store.path, "cannot write", "permissions")


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "ledger.db"
    with pytest.raises(StorageError) as error:
        Store(path, CHAIN)
    one_line(error, path, "cannot write")


def test_a_database_that_another_program_holds_is_said_to_be_in_use(filled: Path) -> None:
    holder = sqlite3.connect(filled, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    store = Store(filled, CHAIN)
    store._database.execute("PRAGMA busy_timeout=1")
    with pytest.raises(StorageError) as error:
        store.append([vote(90)])
    one_line(error, filled, "in use")
    store.close()
    holder.close()


def test_a_crash_while_the_database_is_made_leaves_nothing_that_stops_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(self: Store) -> None:
        raise Killed

    path = tmp_path / "ledger.db"
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_mark", kill)
        with pytest.raises(Killed):
            Store(path, CHAIN)
        patch.undo()
    open_store(path)


def test_a_commit_waits_for_the_disk(store: Store) -> None:
    """FULL is 2: in the write-ahead log, anything less loses the last votes with the power."""
    assert store._rows("PRAGMA synchronous") == [(2,)] and store._rows("PRAGMA journal_mode") == [("wal",)]
