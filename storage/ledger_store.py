"""One SQLite file with all durable data of the ledger: decided blocks, own votes, the state, evidence, measurements.

The database has a write-ahead log with `synchronous=FULL`, so that a finished commit is on disk. One thread at a time uses the
connection.

Lost or changed data of a commit raises `StorageError`:
- `storage.ledger_integrity` checks the log before SQLite does, since SQLite ignores all transactions behind a damaged frame;
- the number of committed transactions is in the database and in a file beside it, where it may lag but is never ahead;
- each row has a digest of its table and values, since SQLite does not detect changed bytes.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from consensus.block import decode_header, encode_header, make_header
from consensus.effects import (
    DecidedBlock,
    JournalRecord,
    OwnRoundStatement,
    OwnStatement,
    RestartState,
    StoredBlock,
    StoredCertificate,
    VotePause,
)
from consensus.evidence import Evidence
from ledger.tables import Table
from protocol import codec
from protocol.codec import Count, Digest, Key, added_field
from protocol.errors import LocalProtocolError, LostVotesError, RemoteProtocolError, StorageError
from protocol.identity import Signed
from protocol.messages import Certificate, LightBlock
from storage.crash_points import crash_points, reach_point
from storage.ledger_integrity import (
    REKEY_ADVICE,
    HighWaterMark,
    damage_error,
    explain_sqlite_errors,
    find_log_damage,
    insert_row,
    row_digest,
)
from storage.sqlite_rows import SCHEMA as ROWS_SCHEMA
from storage.sqlite_rows import SqliteBucketStore, TableChange

T = TypeVar("T")
StoredRow = tuple[Any, ...]
Tables = Mapping[str, Table[Any]]

SCHEMA_VERSION = 8
FIRST_SCHEMA_VERSION = 8  # oldest version of the schema that releases from 0.3.0 on can read
# For each version of the schema, the migration to the next version. No migration is ever removed. A migration that changes
# columns creates the table anew with the SQL text of `_SCHEMA`, and computes each row's digest again.
MIGRATIONS: Final[dict[int, Callable[[sqlite3.Connection], None]]] = {}
ACCEPTED = "accepted"  # value of `tag` in the table `round_votes` for other trainers' proposals that an own ballot accepts
# Most entries of the queue of measurements: beyond, the oldest is dropped. A round adds three, and its transactions write all.
MEASUREMENTS_MAX = 256
EVIDENCE_MAX = 1_000  # most stored pairs of evidence: one pair proves a fault, and more only fill the disk

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL, seal BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE blocks (
    height INTEGER PRIMARY KEY, digest BLOB NOT NULL, block BLOB NOT NULL, certificate BLOB NOT NULL, seal BLOB NOT NULL
);
CREATE TABLE votes (
    tag TEXT, height INTEGER, view INTEGER, signed BLOB NOT NULL, seal BLOB NOT NULL, PRIMARY KEY (height, view, tag)
) WITHOUT ROWID;
CREATE TABLE undecided (digest BLOB PRIMARY KEY, height INTEGER NOT NULL, block BLOB NOT NULL, seal BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE prepared (
    id INTEGER PRIMARY KEY CHECK (id = 0), height INTEGER NOT NULL, certificate BLOB NOT NULL, seal BLOB NOT NULL
);
CREATE TABLE round_votes (
    tag TEXT, job BLOB, round INTEGER, signer BLOB, signed BLOB NOT NULL, seal BLOB NOT NULL,
    PRIMARY KEY (job, round, tag, signer)
) WITHOUT ROWID;
CREATE TABLE evidence (id BLOB PRIMARY KEY, pair BLOB NOT NULL, seal BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE roots (height INTEGER PRIMARY KEY, state_root BLOB NOT NULL, seal BLOB NOT NULL);
CREATE TABLE rounds (
    job BLOB, round INTEGER, height INTEGER NOT NULL, closed BLOB NOT NULL, seal BLOB NOT NULL, PRIMARY KEY (job, round)
) WITHOUT ROWID;
CREATE TABLE links (height INTEGER PRIMARY KEY, link BLOB NOT NULL, seal BLOB NOT NULL);
CREATE TABLE headers (height INTEGER PRIMARY KEY, header BLOB NOT NULL, seal BLOB NOT NULL);
CREATE TABLE measured (
    job BLOB, round INTEGER, name TEXT, value REAL, seal BLOB NOT NULL, PRIMARY KEY (job, round, name)
) WITHOUT ROWID;
"""
_TABLES = (*(statement.strip() for statement in _SCHEMA.split(";") if statement.strip()), ROWS_SCHEMA)
# Names of writes in `storage.crash_points` by kind of record, except own statements.
_KINDS: Final[dict[type[JournalRecord], str]] = {
    StoredBlock: "block",
    StoredCertificate: "certificate",
    DecidedBlock: "decided",
    Evidence: "evidence",
    VotePause: "silence",
}
# Tables that are checked completely at a start: a lookup by key does not find a row with a damaged key. The tables are small.
_SEALS_CHECKED_AT_START = ("meta", "votes", "undecided", "prepared", "round_votes", "evidence")
_TRANSACTIONS = "SELECT * FROM meta WHERE key = 'transactions'"


@dataclass(frozen=True, slots=True)
class StoredRound:
    """The record of a closed round, for pages and commands."""

    job: Digest
    round: Count
    height: Count
    verdicts: dict[Key, str]  # by trainer: "accept", the reason of a rejection, or "absent"
    ballots: tuple[Key, ...]
    stepped: bool
    model_root: Digest
    vouchers: dict[Key, tuple[Key, ...]]  # by accepted trainer, the voters whose accepting vouches are in the block
    brief: bytes = added_field(b"")  # brief of the round, in a job on request


class LedgerStore:
    """An implementation of `consensus.effects.Journal`. Raises `StorageError` for errors of the disk, which stop the peer."""

    def __init__(self, path: Path, chain_id: bytes) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._failure: StorageError | None = None
        # Queue of measurements to write: (job, round, figures).
        self._measured = deque[tuple[bytes, int, dict[str, float]]](maxlen=MEASUREMENTS_MAX)
        # If this file exists, this peer may have cast votes, so a missing database must not be created anew.
        self._committed = HighWaterMark(path.with_name(path.name + ".committed"))
        if self._committed.exists() and not (path.exists() and path.stat().st_size):
            raise LostVotesError(f"{path} is missing or empty: {REKEY_ADVICE}")
        self._require_whole_log()
        with explain_sqlite_errors(self.path):
            self._database = self._connect()
            try:
                self._open(chain_id)
            except BaseException:
                self._database.close()
                raise

    def _require_whole_log(self) -> None:
        log = self.path.with_name(self.path.name + "-wal")
        try:
            damage = find_log_damage(log.read_bytes()) if log.exists() else None
        except OSError as error:
            raise StorageError(f"cannot read {log}: {error.strerror}; check the disk, then start again") from error
        if damage:
            raise damage_error(log, damage)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)

    def _open(self, chain_id: bytes) -> None:
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("PRAGMA cache_size=-2048")  # 2,048 KiB, SQLite's default: the pages of a 2 MB block fit.
        # The log is copied into the database after 4,000 pages (16 MB). A block with 512 statements writes 1,400 pages, and with
        # SQLite's default of 1,000 each such block would cause a copy.
        self._database.execute("PRAGMA wal_autocheckpoint=4000")
        version = self._check(chain_id)
        if version < SCHEMA_VERSION:  # `_check` has verified that this version can be migrated.
            self._migrate(version)
            self._check_schema()
        self._committed.open(self._get("transactions"))
        self.rows = SqliteBucketStore(self.path)

    def _check(self, chain_id: bytes) -> int:
        """Check the database, create its tables if it is empty, and return the version of its schema."""
        broken = self._database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if broken != "ok":
            raise sqlite3.DatabaseError(broken)
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._create(chain_id)
            version = SCHEMA_VERSION
        elif version < FIRST_SCHEMA_VERSION:
            before = f"{self.path} has format {version}, from a program before 0.3.0"
            raise StorageError(f"{before}; continue its network with that program, or found a new network with this one")
        elif version > SCHEMA_VERSION:
            newer = f"{self.path} has format {version}, but this program reads formats up to {SCHEMA_VERSION}"
            raise StorageError(f"{newer}; install the newer program that wrote it")
        elif version == SCHEMA_VERSION:
            self._check_schema()
        self._check_content()
        if self._get("chain") != chain_id:
            raise StorageError(f"{self.path} belongs to another network: use the data directory of this network")
        return int(version)

    def _create(self, chain_id: bytes) -> None:
        if self._rows("SELECT name FROM sqlite_schema"):
            raise StorageError(f"{self.path} is the database of another program: use another data directory")
        with crash_points("store-create"), self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            for statement in _TABLES:
                self._database.execute(statement)
            insert_row(self._database, "INSERT", "meta", "chain", chain_id)
            insert_row(self._database, "INSERT", "meta", "transactions", 0)
            self._database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            self._database.execute("COMMIT")

    def _migrate(self, version: int) -> None:
        """Migrate the database in one transaction, so that a crash leaves the old or the new version."""
        with crash_points("store-migrate"), self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            for old in range(version, SCHEMA_VERSION):
                MIGRATIONS[old](self._database)
            self._database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            self._database.execute("COMMIT")

    def _check_schema(self) -> None:
        if not {(table,) for table in _TABLES} <= set(self._rows("SELECT sql FROM sqlite_schema")):
            raise self._damaged("its schema does not match this program")

    def _check_content(self) -> None:
        """Check the rows of `_SEALS_CHECKED_AT_START`, and that no height of a block is missing.

        It works before a migration, too. All heights between the lowest and the highest stored block must be stored. Raises
        `LostVotesError`.
        """
        for table in _SEALS_CHECKED_AT_START:
            self._checked_rows(table)
        count, first, last = self._rows("SELECT count(*), min(height), max(height) FROM blocks")[0]
        if count and count != last - first + 1:
            raise self._damaged("decided blocks are missing")
        if self._get("transactions") < self._committed.read_value():
            raise self._damaged(f"it has {self._get('transactions')} of at least {self._committed.read_value()} transactions")

    def close(self) -> None:
        if self._measured and self._failure is None:
            with self._transaction():
                pass
        self._committed.close()
        self.rows.close()
        self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                with explain_sqlite_errors(self.path), self._committing():
                    yield self._database
            except StorageError as error:
                # No write is tried again: after a failed fsync the kernel may treat lost pages as written, and a second fsync
                # would succeed without them.
                self._failure = error
                raise

    @contextmanager
    def _committing(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            while self._measured:
                job, number, figures = self._measured.popleft()
                for figure in figures.items():
                    insert_row(self._database, "INSERT OR REPLACE", "measured", job, number, *figure)
            count = self._check_rows("meta", self._database.execute(_TRANSACTIONS).fetchall())[0][1] + 1
            insert_row(self._database, "INSERT OR REPLACE", "meta", "transactions", count)
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        self._committed.write_value(count)

    def _rows(self, query: str, *arguments: object) -> list[StoredRow]:
        with self._lock, explain_sqlite_errors(self.path):
            return self._database.execute(query, arguments).fetchall()

    def _checked_rows(self, table: str, rest: str = "", *arguments: object) -> list[StoredRow]:
        """Return rows of a table without their digests, after a check of the digests."""
        return self._check_rows(table, self._rows(f"SELECT * FROM {table} {rest}", *arguments))

    def _check_rows(self, table: str, rows: Sequence[StoredRow]) -> list[StoredRow]:
        for *values, written in rows:
            if row_digest(table, values) != written:
                raise self._damaged(f"a row of {table} does not match its digest")
        return [row[:-1] for row in rows]

    def _decoded(self, kind: type[T], data: bytes) -> T:
        try:
            return codec.decode(kind, data, len(data))
        except RemoteProtocolError:
            raise self._damaged(f"it contains an invalid {kind.__name__}") from None

    def _damaged(self, what: str) -> LostVotesError:
        return damage_error(self.path, what)

    # Journal

    def append_records(self, records: Sequence[JournalRecord]) -> None:
        for record in records:
            reach_point("before", f"append-{_kind(record)}")
        with self._transaction() as database:
            for record in records:
                self._write(database, record)
        for record in records:
            reach_point("after", f"append-{_kind(record)}")

    def _write(self, database: sqlite3.Connection, record: JournalRecord) -> None:
        match record:
            case OwnStatement(slot=(tag, height, view), signed=signed):
                self._write_once(database, "votes", {"tag": tag, "height": height, "view": view}, signed)
            case OwnRoundStatement(tag=tag, job=job, round=number, signed=signed, accepted=accepted):
                slot = {"tag": tag, "job": job, "round": number, "signer": signed.signer}
                self._write_once(database, "round_votes", slot, signed)
                for proposal in accepted:
                    row = ACCEPTED, job, number, proposal.signer, codec.encode(proposal)
                    insert_row(database, "INSERT OR IGNORE", "round_votes", *row)
            case StoredBlock(height=height, digest=digest, block=block):
                insert_row(database, "INSERT OR IGNORE", "undecided", digest, height, block)
            case StoredCertificate(height=height, certificate=certificate):
                insert_row(database, "INSERT OR REPLACE", "prepared", 0, height, codec.encode(certificate))
            case DecidedBlock():
                self._write_decided(database, record)
            case Evidence():
                if database.execute("SELECT count(*) FROM evidence").fetchone()[0] < EVIDENCE_MAX:
                    key = record.first.signature + record.second.signature
                    insert_row(database, "INSERT OR IGNORE", "evidence", key, codec.encode(record))
            case VotePause(below=below):
                insert_row(database, "INSERT OR REPLACE", "meta", "silent", below)

    def _write_decided(self, database: sqlite3.Connection, decided: DecidedBlock) -> None:
        height, digest = decided.height, decided.digest
        found = database.execute("SELECT digest FROM blocks WHERE height = ?", (height,)).fetchone()
        if found and found[0] != digest:
            raise LocalProtocolError(f"height {height} is already decided with a different block")
        certificate = codec.encode(decided.certificate)
        insert_row(database, "INSERT OR IGNORE", "blocks", height, digest, decided.block, certificate)
        for table in ("votes", "undecided", "prepared"):
            database.execute(f"DELETE FROM {table} WHERE height <= ?", (height,))

    def _write_once(self, database: sqlite3.Connection, table: str, slot: dict[str, object], signed: Signed) -> None:
        """Write a vote to its slot.

        Raises `LocalProtocolError` if the slot has a different vote, so that no second vote is sent.
        """
        where = " AND ".join(f"{column} = ?" for column in slot)
        found = database.execute(f"SELECT * FROM {table} WHERE {where}", tuple(slot.values())).fetchall()
        for *_, written in self._check_rows(table, found):
            if self._decoded(Signed, written).body != signed.body:
                raise LocalProtocolError(f"a second, different vote for {slot}")
        insert_row(database, "INSERT OR IGNORE", table, *slot.values(), codec.encode(signed))

    def read_restart_state(self) -> RestartState:
        last = self.decided_height
        decided = [self.get_decision(height) for height in range(max(1, last - 1), last + 1)]
        votes = self._checked_rows("votes", "WHERE height > ? ORDER BY height, view, tag", last)
        blocks = self._checked_rows("undecided", "WHERE height > ? ORDER BY height", last)
        prepared = self._checked_rows("prepared", "WHERE height > ?", last)
        return RestartState(
            decided=tuple(item for item in decided if item),
            votes=tuple(OwnStatement((tag, height, view), self._decoded(Signed, signed)) for tag, height, view, signed in votes),
            blocks=tuple(StoredBlock(height, digest, block) for digest, height, block in blocks),
            prepared=self._decoded(Certificate, prepared[0][2]) if prepared else None,
            evidence=tuple(self.evidence()),
            no_votes_below=self._get("silent") or 0,
        )

    @property
    def decided_height(self) -> int:
        height: int | None = self._rows("SELECT max(height) FROM blocks")[0][0]
        return height or 0

    def get_decision(self, height: int) -> DecidedBlock | None:
        """Return the decided block of a height; None if it is not decided, or older than the restored snapshot."""
        rows = self._rows("SELECT * FROM blocks WHERE height = ?", height)
        for *values, written in rows:
            # The two newest blocks are needed at each start. `_check_rows` below checks them.
            if row_digest("blocks", values) != written and height < self.decided_height - 1:
                # A lost old block is not a lost vote, so this error does not ask for a new key.
                raise StorageError(
                    f"{self.path} is damaged (the decided block of height {height} does not match its digest): this peer's "
                    "signatures are not lost, and other peers have that block; check the disk, and take exports from one of them"
                )
        for _, digest, block, certificate in self._check_rows("blocks", rows):
            return DecidedBlock(height, digest, block, self._decoded(Certificate, certificate))
        return None

    def get_block(self, digest: bytes) -> bytes | None:
        rows = self._checked_rows("undecided", "WHERE digest = ?", digest)
        return rows[0][2] if rows else None

    def restore_snapshot(
        self,
        decided: Sequence[DecidedBlock],
        height: int,
        root: bytes,
        encoded: bytes,
        headers: Sequence[bytes] = (),
        links: Sequence[LightBlock] = (),
        disproved: int | None = None,
        *,
        tables: Tables,
    ) -> None:
        """Replace the state by the certified state after `height`.

        `decided` are consecutive decided blocks that prove the state, with the block of `height` among them. Older blocks stay if
        no block between is missing. Own votes above the last decided block stay. `headers` (of the heights before `decided`,
        descending) and `links` (all light blocks) are for peers that restore a snapshot from this one. Own state roots and closed
        rounds are deleted from height `disproved` on; by default from `height` on. `tables` are all tables of the state.
        """
        changes = self.rows.plan_changes(tables)
        with crash_points("restore"), self._transaction() as database:
            last = database.execute("SELECT max(height) FROM blocks").fetchone()[0] or 0
            if last < decided[0].height - 1:
                database.execute("DELETE FROM blocks")
            for item in decided:
                self._write_decided(database, item)
            for table in ("roots", "rounds"):
                database.execute(f"DELETE FROM {table} WHERE height >= ?", (height if disproved is None else disproved,))
            self._write_state(database, height, root, encoded, changes)
            for below, header in enumerate(headers, 1):
                insert_row(database, "INSERT OR REPLACE", "headers", decided[0].height - below, header)
            database.execute("DELETE FROM links")
            for link in links:
                self._write_link(database, link)
        self.rows.apply_committed(changes)

    def _write_link(self, database: sqlite3.Connection, link: LightBlock) -> None:
        insert_row(database, "INSERT OR REPLACE", "links", decode_header(link.header).height, codec.encode(link))

    def light_blocks(self, after: int, until: int) -> Iterator[LightBlock]:
        """Yield the stored light blocks from `after`, exclusive, to `until`, inclusive.

        The method belongs to the interface `ledger.snapshots.snapshot_server.BlockArchive`, as do `get_decision` and
        `get_header`.
        """
        query = "WHERE height > ? AND height <= ? ORDER BY height LIMIT 64"
        while rows := self._checked_rows("links", query, after, until):
            yield from (self._decoded(LightBlock, link) for _, link in rows)
            after = rows[-1][0]

    def get_header(self, height: int) -> bytes | None:
        decided = self.get_decision(height)
        if decided is not None:
            return encode_header(make_header(decided.decode()))
        rows = self._checked_rows("headers", "WHERE height = ?", height)
        return rows[0][1] if rows else None

    # Rounds

    def round_votes(self, signer: bytes, job: bytes, number: int) -> dict[str, Signed]:
        """Return own statements of a round, by message tag, that are signed with the key `signer`.

        `peer rekey` may have changed our key since.
        """
        rows = self._checked_rows("round_votes", "WHERE job = ? AND round = ? AND signer = ?", job, number, signer)
        return {tag: self._decoded(Signed, signed) for tag, *_, signed in rows if tag != ACCEPTED}

    def accepted_proposals(self, job: bytes, number: int) -> tuple[Signed, ...]:
        """Return the proposals of other trainers that an own ballot of this round accepts."""
        rows = self._checked_rows("round_votes", "WHERE job = ? AND round = ? AND tag = ?", job, number, ACCEPTED)
        return tuple(self._decoded(Signed, signed) for *_, signed in rows)

    def evidence(self) -> list[Evidence]:
        return [self._decoded(Evidence, pair) for _, pair in self._checked_rows("evidence", "ORDER BY id")]

    # State

    def save_state(
        self,
        height: int,
        root: bytes,
        encoded: bytes,
        rounds: Sequence[StoredRound] = (),
        link: LightBlock | None = None,
        *,
        tables: Tables,
    ) -> None:
        """Replace the applied state by the state after the decided block of `height`.

        The block closed `rounds`, and own statements of these rounds are deleted. `link` is the light block of this height if the
        block changes the voter set. `tables` are all tables of the state.
        """
        assert height <= self.decided_height
        changes = self.rows.plan_changes(tables)
        with crash_points("save-state"), self._transaction() as database:
            self._write_state(database, height, root, encoded, changes)
            for item in rounds:
                insert_row(database, "INSERT OR REPLACE", "rounds", item.job, item.round, height, codec.encode(item))
                database.execute("DELETE FROM round_votes WHERE job = ? AND round <= ?", (item.job, item.round))
            if link is not None:
                self._write_link(database, link)
        self.rows.apply_committed(changes)

    def _write_state(
        self, database: sqlite3.Connection, height: int, root: bytes, encoded: bytes, changes: Sequence[TableChange]
    ) -> None:
        insert_row(database, "INSERT OR REPLACE", "meta", "state", encoded)
        insert_row(database, "INSERT OR REPLACE", "roots", height, root)
        with crash_points("rows"):
            self.rows.write_changes(database, changes)

    def state_roots(self) -> dict[int, bytes]:
        """Return the state roots that this peer computed, by height."""
        return dict(self._checked_rows("roots", "ORDER BY height"))

    def state_root(self, height: int) -> bytes | None:
        """Return the state root that this peer computed after a height; None if it did not, as for a restored snapshot."""
        rows = self._checked_rows("roots", "WHERE height = ?", height)
        return rows[0][1] if rows else None

    def closed_rounds(self, last: int) -> list[StoredRound]:
        """Return the most recent closed rounds, `last` in number, oldest first."""
        rows = self._checked_rows("rounds", "ORDER BY height DESC, job DESC LIMIT ?", last)
        return [self._decoded(StoredRound, closed) for *_, closed in reversed(rows)]

    def closed_round(self, job: bytes, number: int) -> StoredRound | None:
        rows = self._checked_rows("rounds", "WHERE job = ? AND round = ?", job, number)
        return self._decoded(StoredRound, rows[0][3]) if rows else None

    def last_round_by_job(self) -> dict[bytes, tuple[int, int]]:
        """Return, by job, the number of the last closed round and its height, also for jobs that the state has deleted."""
        rows = self._rows("SELECT job, MAX(round), MAX(height) FROM rounds GROUP BY job")
        return {job: (number, height) for job, number, height in rows}

    def encoded_state(self) -> bytes | None:
        encoded: bytes | None = self._get("state")
        return encoded

    def _get(self, key: str) -> Any:
        rows = self._checked_rows("meta", "WHERE key = ?", key)
        return rows[0][1] if rows else None

    # Measurements, on which nobody votes

    def save_measurements(self, job: bytes, number: int, figures: Mapping[str, float]) -> None:
        self.queue_measurements(job, number, figures)
        with crash_points("measure"), self._transaction():
            pass

    def queue_measurements(self, job: bytes, number: int, figures: Mapping[str, float]) -> None:
        """Add figures to the next transaction, without blocking. A running job has transactions in each round.

        Readers in other threads see either all figures of a call or none.
        """
        self._measured.append((job, number, {name: float(value) for name, value in figures.items()}))

    def measurements(self, job: bytes) -> dict[int, dict[str, float]]:
        result: dict[int, dict[str, float]] = {}
        waiting = [(number, figures) for of, number, figures in self._measured.copy() if of == job]
        for _, number, name, value in self._checked_rows("measured", "WHERE job = ? ORDER BY round", job):
            result.setdefault(number, {})[name] = value
        for number, figures in waiting:
            result.setdefault(number, {}).update(figures)
        return result


def _kind(record: JournalRecord) -> str:
    match record:
        case OwnStatement(slot=(tag, _, _)) | OwnRoundStatement(tag=tag):
            return tag.partition(":")[0]
    return _KINDS[type(record)]


class ReadOnlyStore(LedgerStore):
    """A ledger store for reading: the database is checked as at a start, but neither created nor migrated.

    The caller holds the lock of the data directory.
    """

    def _connect(self) -> sqlite3.Connection:
        log = self.path.with_name(self.path.name + "-wal")
        # Without a log, `immutable` opens the database without new files beside it.
        way = "mode=ro" if log.exists() else "immutable=1"
        return sqlite3.connect(f"{self.path.absolute().as_uri()}?{way}", uri=True, isolation_level=None)

    def _open(self, chain_id: bytes) -> None:
        self.version = self._check(chain_id)
        # True if the database is older than this program: its tables may have another schema.
        self.is_older = self.version < SCHEMA_VERSION

    def _create(self, chain_id: bytes) -> None:
        raise StorageError(f"{self.path} is empty: `peer run` creates its content")

    def close(self) -> None:
        self._database.close()
