"""One SQLite file with everything that must survive: decided blocks, own votes, the state, evidence, what was measured.

Write-ahead log with `synchronous=FULL`: a commit that returned is on disk. One connection, used by one thread at a time.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from consensus.block import block_digest
from consensus.evidence import Evidence
from consensus.turn import Decided, Record, Restart, StoredBlock, StoredCertificate, Voted
from ledger.durable import sync_directory
from protocol import codec
from protocol.codec import Count, Digest, Key
from protocol.errors import LocalProtocolError, RemoteProtocolError, StorageError
from protocol.identity import Signed
from protocol.messages import Certificate

T = TypeVar("T")

SCHEMA_VERSION = 1
DIGEST_BYTES = 32  # SHA-256
EXPLANATION_CHARACTERS_MAX = 120  # of what SQLite says, which may quote the damaged bytes
EVIDENCE_MAX = 1_000  # pairs kept; one proves the fault, more only fill the disk

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE blocks (height INTEGER PRIMARY KEY, digest BLOB NOT NULL, block BLOB NOT NULL, certificate BLOB NOT NULL);
CREATE TABLE votes (tag TEXT, height INTEGER, view INTEGER, signed BLOB NOT NULL, PRIMARY KEY (height, view, tag)) WITHOUT ROWID;
CREATE TABLE undecided (digest BLOB PRIMARY KEY, height INTEGER NOT NULL, block BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE prepared (id INTEGER PRIMARY KEY CHECK (id = 0), height INTEGER NOT NULL, certificate BLOB NOT NULL);
CREATE TABLE round_votes (tag TEXT, job BLOB, round INTEGER, signed BLOB NOT NULL, PRIMARY KEY (job, round, tag)) WITHOUT ROWID;
CREATE TABLE evidence (id BLOB PRIMARY KEY, pair BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE roots (height INTEGER PRIMARY KEY, state_root BLOB NOT NULL);
CREATE TABLE rounds (
    job BLOB, round INTEGER, height INTEGER NOT NULL, closed BLOB NOT NULL, PRIMARY KEY (job, round)
) WITHOUT ROWID;
CREATE TABLE measured (job BLOB, round INTEGER, name TEXT, value REAL, PRIMARY KEY (job, round, name)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class RoundVoted:
    """Our one Proposal, Ballot or CutOff of a round."""

    tag: str
    job: bytes
    round: int
    signed: Signed


@dataclass(frozen=True, slots=True)
class StoredRound:
    """A closed round as people want to see it."""

    job: Digest
    round: Count
    height: Count
    verdicts: dict[Key, str]  # trainer -> "accept", a reason, or "absent"
    ballots: tuple[Key, ...]
    stepped: bool
    model_root: Digest


class Store:
    """Implements `consensus.turn.Journal`. Raises `StorageError` for whatever the disk does wrong: the peer then stops."""

    def __init__(self, path: Path, chain_id: bytes) -> None:
        self.path = path
        self._lock = threading.Lock()
        # Says that votes may have been cast: a database that is gone afterwards must not be begun anew.
        self._marker = path.with_name(path.name + ".begun")
        if self._marker.exists() and not (path.exists() and path.stat().st_size):
            raise StorageError(f"{path} is gone or empty, and with it what this peer voted: {_WAY_OUT}")
        with self._explained():
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._open(chain_id)
            except BaseException:
                self._database.close()
                raise

    def _open(self, chain_id: bytes) -> None:
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("PRAGMA cache_size=-2048")  # KiB; the default for 2 MB pages of blocks is plenty
        broken = self._database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if broken != "ok":
            raise sqlite3.DatabaseError(broken)
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._create(chain_id)
        elif version != SCHEMA_VERSION:
            raise StorageError(f"{self.path} has format {version}, this program reads format {SCHEMA_VERSION}")
        if self._get("chain") != chain_id:
            raise StorageError(f"{self.path} belongs to another network: use the data directory made for this one")
        self._mark()

    def _create(self, chain_id: bytes) -> None:
        if self._rows("SELECT name FROM sqlite_schema"):
            raise StorageError(f"{self.path} is the database of another program: use another data directory")
        with self._transaction() as database:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                database.execute(statement)
            database.execute("INSERT INTO meta VALUES ('chain', ?)", (chain_id,))
            database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _mark(self) -> None:
        if self._marker.exists():
            return
        try:
            self._marker.touch()
            sync_directory(self._marker.parent)
        except OSError as error:
            raise StorageError(f"cannot write {self._marker}: {error.strerror}") from error

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(_explanation(self.path, error)) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._explained():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def _rows(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        with self._lock, self._explained():
            return self._database.execute(query, arguments).fetchall()

    def _first(self, query: str, *arguments: object) -> Any:
        """The first column of the first row; None if there is none."""
        rows = self._rows(query, *arguments)
        return rows[0][0] if rows else None

    def _decoded(self, kind: type[T], data: bytes) -> T:
        try:
            return codec.decode(kind, data, len(data))
        except RemoteProtocolError:
            raise self._damaged(f"a {kind.__name__} in it has no valid form") from None

    def _damaged(self, what: str) -> StorageError:
        return StorageError(f"{self.path} is damaged ({what}); {_WAY_OUT}")

    # Journal

    def append(self, records: Sequence[Record | RoundVoted]) -> None:
        with self._transaction() as database:
            for record in records:
                self._write(database, record)

    def _write(self, database: sqlite3.Connection, record: Record | RoundVoted) -> None:
        match record:
            case Voted(slot=(tag, height, view), signed=signed):
                self._write_once(database, "votes", {"tag": tag, "height": height, "view": view}, signed)
            case RoundVoted(tag=tag, job=job, round=number, signed=signed):
                self._write_once(database, "round_votes", {"tag": tag, "job": job, "round": number}, signed)
            case StoredBlock(height=height, digest=digest, block=block):
                database.execute("INSERT OR IGNORE INTO undecided VALUES (?, ?, ?)", (digest, height, block))
            case StoredCertificate(height=height, certificate=certificate):
                database.execute("INSERT OR REPLACE INTO prepared VALUES (0, ?, ?)", (height, codec.encode(certificate)))
            case Decided(height=height, digest=digest, block=block, certificate=certificate):
                self._require_same_block(database, height, digest)
                row = (height, digest, block, codec.encode(certificate))
                database.execute("INSERT OR IGNORE INTO blocks VALUES (?, ?, ?, ?)", row)
                for table in ("votes", "undecided", "prepared"):
                    database.execute(f"DELETE FROM {table} WHERE height <= ?", (height,))
            case Evidence():
                pair = codec.encode(record)
                if database.execute("SELECT count(*) FROM evidence").fetchone()[0] < EVIDENCE_MAX:
                    key = record.first.signature + record.second.signature
                    database.execute("INSERT OR IGNORE INTO evidence VALUES (?, ?)", (key, pair))

    def _require_same_block(self, database: sqlite3.Connection, height: int, digest: bytes) -> None:
        found = database.execute("SELECT digest FROM blocks WHERE height = ?", (height,)).fetchone()
        if found and found[0] != digest:
            raise LocalProtocolError(f"height {height} is decided already, with another block")

    def _write_once(self, database: sqlite3.Connection, table: str, slot: dict[str, object], signed: Signed) -> None:
        """The last line of defence: a slot that holds other bytes is never overwritten, and nothing is sent."""
        where = " AND ".join(f"{column} = ?" for column in slot)
        found = database.execute(f"SELECT signed FROM {table} WHERE {where}", tuple(slot.values())).fetchone()
        if found and self._decoded(Signed, found[0]).body != signed.body:
            raise LocalProtocolError(f"a second, different vote for {slot}")
        columns = ", ".join((*slot, "signed"))
        marks = ", ".join("?" * (len(slot) + 1))
        database.execute(f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({marks})", (*slot.values(), codec.encode(signed)))

    def load(self) -> Restart:
        last = self.decided_height
        decided = [self.decision(height) for height in range(max(1, last - 1), last + 1)]
        votes = self._rows("SELECT tag, height, view, signed FROM votes WHERE height > ? ORDER BY height, view, tag", last)
        blocks = self._rows("SELECT height, digest, block FROM undecided WHERE height > ? ORDER BY height", last)
        prepared = self._first("SELECT certificate FROM prepared WHERE height > ?", last)
        return Restart(
            decided=tuple(item for item in decided if item),
            votes=tuple(Voted((tag, height, view), self._decoded(Signed, signed)) for tag, height, view, signed in votes),
            blocks=tuple(StoredBlock(height, digest, self._same(digest, block)) for height, digest, block in blocks),
            prepared=self._decoded(Certificate, prepared) if prepared else None,
        )

    @property
    def decided_height(self) -> int:
        height: int | None = self._first("SELECT max(height) FROM blocks")
        return height or 0

    def decision(self, height: int) -> Decided | None:
        rows = self._rows("SELECT digest, block, certificate FROM blocks WHERE height = ?", height)
        if not rows:
            return None
        digest, block, certificate = rows[0]
        return Decided(height, digest, self._same(digest, block), self._decoded(Certificate, certificate))

    def block(self, digest: bytes) -> bytes | None:
        block: bytes | None = self._first("SELECT block FROM undecided WHERE digest = ?", digest)
        return None if block is None else self._same(digest, block)

    def _same(self, digest: bytes, block: bytes) -> bytes:
        """SQLite does not notice other bytes inside a value; the digest does."""
        if block_digest(block) != digest:
            raise self._damaged(f"block {digest.hex()[:16]} has other bytes")
        return block

    # Rounds

    def round_votes(self, job: bytes, number: int) -> dict[str, Signed]:
        """What we signed in this round, by message tag."""
        rows = self._rows("SELECT tag, signed FROM round_votes WHERE job = ? AND round = ?", job, number)
        return {tag: self._decoded(Signed, signed) for tag, signed in rows}

    def forget_round_votes(self, job: bytes, before: int) -> None:
        with self._transaction() as database:
            database.execute("DELETE FROM round_votes WHERE job = ? AND round < ?", (job, before))

    def evidence(self) -> list[tuple[Signed, Signed]]:
        pairs = [self._decoded(Evidence, pair) for (pair,) in self._rows("SELECT pair FROM evidence ORDER BY id")]
        return [(pair.first, pair.second) for pair in pairs]

    # State

    def save_state(self, height: int, root: bytes, encoded: bytes, rounds: Sequence[StoredRound] = ()) -> None:
        """Replaces the applied state; the block of `height` must be decided. `rounds` are those that it closed."""
        assert height <= self.decided_height
        with self._transaction() as database:
            stored = hashlib.sha256(encoded).digest() + encoded  # SQLite does not notice other bytes inside a value
            database.execute("INSERT OR REPLACE INTO meta VALUES ('state', ?)", (stored,))
            database.execute("INSERT OR REPLACE INTO roots VALUES (?, ?)", (height, root))
            rows = [(item.job, item.round, height, codec.encode(item)) for item in rounds]
            database.executemany("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?)", rows)

    def roots(self) -> dict[int, bytes]:
        """The state root that this peer itself computed after each height."""
        return dict(self._rows("SELECT height, state_root FROM roots ORDER BY height"))

    def rounds(self, last: int) -> list[StoredRound]:
        """The rounds closed last, oldest first."""
        rows = self._rows("SELECT closed FROM rounds ORDER BY height DESC, job DESC LIMIT ?", last)
        return [self._decoded(StoredRound, row[0]) for row in reversed(rows)]

    def state(self) -> bytes | None:
        stored = self._get("state")
        if stored is None:
            return None
        digest, encoded = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        if hashlib.sha256(encoded).digest() != digest:
            raise self._damaged("the applied state has other bytes")
        return encoded

    def _get(self, key: str) -> bytes | None:
        value: bytes | None = self._first("SELECT value FROM meta WHERE key = ?", key)
        return value

    # Measurements: nobody votes on them

    def measure(self, job: bytes, number: int, figures: dict[str, float]) -> None:
        with self._transaction() as database:
            rows = [(job, number, name, value) for name, value in figures.items()]
            database.executemany("INSERT OR REPLACE INTO measured VALUES (?, ?, ?, ?)", rows)

    def measured(self, job: bytes) -> dict[int, dict[str, float]]:
        result: dict[int, dict[str, float]] = {}
        for number, name, value in self._rows("SELECT round, name, value FROM measured WHERE job = ? ORDER BY round", job):
            result.setdefault(number, {})[name] = value
        return result


_WAY_OUT = "move the data directory away and `peer join` again, or restore a copy that was never used for voting since"


def _explanation(path: Path, error: sqlite3.Error) -> str:
    """One line: what the disk did wrong, which file, and the way out."""
    text = " ".join(str(error).encode("ascii", "replace").decode().split())[:EXPLANATION_CHARACTERS_MAX]
    if "full" in text:
        return f"the disk that holds {path} is full: nothing was lost, free some space and start again"
    if "readonly" in text or "unable to open" in text or "permission" in text:
        return f"cannot write {path}: {text}; check the owner and permissions of its folder"
    if "locked" in text or "busy" in text:
        return f"{path} is in use by another program: stop it first"
    if "I/O" in text:
        return f"the disk does not read or write {path} ({text}): check the disk, then start again"
    return f"{path} is damaged ({text}); {_WAY_OUT}"
