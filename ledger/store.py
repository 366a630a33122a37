"""One SQLite file with everything that must survive: decided blocks, own votes, the state, evidence, what was measured.

Write-ahead log with `synchronous=FULL`: a commit that returned is on disk. One connection, used by one thread at a time.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from consensus.evidence import Evidence
from consensus.turn import Decided, Record, Restart, StoredBlock, StoredCertificate, Voted
from protocol import codec
from protocol.codec import Count, Digest, Key
from protocol.errors import LocalProtocolError, StorageError
from protocol.identity import Signed
from protocol.messages import Certificate

SCHEMA_VERSION = 1
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
CREATE TABLE rounds (job BLOB, round INTEGER, height INTEGER NOT NULL, closed BLOB NOT NULL, PRIMARY KEY (job, round)) WITHOUT ROWID;
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
        with self._explained():
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._open(chain_id)

    def _open(self, chain_id: bytes) -> None:
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("PRAGMA cache_size=-2048")  # KiB; the default for 2 MB pages of blocks is plenty
        broken = self._database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if broken != "ok":
            raise sqlite3.DatabaseError(broken)
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
            self._put("chain", chain_id)
        elif version != SCHEMA_VERSION:
            raise StorageError(f"{self.path} has format {version}, this program reads format {SCHEMA_VERSION}")
        if self._get("chain") != chain_id:
            raise StorageError(f"{self.path} belongs to another network: use the data directory made for this one")

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

    def _rows(self, query: str, *arguments: object) -> list[tuple[object, ...]]:
        with self._lock, self._explained():
            return self._database.execute(query, arguments).fetchall()

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
                row = (height, digest, block, codec.encode(certificate))
                database.execute("INSERT OR IGNORE INTO blocks VALUES (?, ?, ?, ?)", row)
                for table in ("votes", "undecided", "prepared"):
                    database.execute(f"DELETE FROM {table} WHERE height <= ?", (height,))
            case Evidence():
                pair = codec.encode((record.first, record.second))
                if database.execute("SELECT count(*) FROM evidence").fetchone()[0] < EVIDENCE_MAX:
                    key = record.first.signature + record.second.signature
                    database.execute("INSERT OR IGNORE INTO evidence VALUES (?, ?)", (key, pair))

    def _write_once(self, database: sqlite3.Connection, table: str, slot: dict[str, object], signed: Signed) -> None:
        """The last line of defence: a slot that holds other bytes is never overwritten, and nothing is sent."""
        where = " AND ".join(f"{column} = ?" for column in slot)
        found = database.execute(f"SELECT signed FROM {table} WHERE {where}", tuple(slot.values())).fetchone()
        if found and codec.decode(Signed, found[0]).body != signed.body:
            raise LocalProtocolError(f"a second, different vote for {slot}")
        columns = ", ".join((*slot, "signed"))
        marks = ", ".join("?" * (len(slot) + 1))
        database.execute(f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({marks})", (*slot.values(), codec.encode(signed)))

    def load(self) -> Restart:
        decided = [self.decision(height) for height in range(max(1, self.decided_height - 1), self.decided_height + 1)]
        votes = self._rows("SELECT tag, height, view, signed FROM votes ORDER BY height, view, tag")
        blocks = self._rows("SELECT height, digest, block FROM undecided ORDER BY height")
        prepared = self._rows("SELECT certificate FROM prepared")
        return Restart(
            decided=tuple(item for item in decided if item),
            votes=tuple(Voted((tag, height, view), codec.decode(Signed, signed)) for tag, height, view, signed in votes),  # type: ignore[arg-type]
            blocks=tuple(StoredBlock(*row) for row in blocks),  # type: ignore[arg-type]
            prepared=codec.decode(Certificate, prepared[0][0]) if prepared else None,  # type: ignore[arg-type]
        )

    @property
    def decided_height(self) -> int:
        height: int | None = self._rows("SELECT max(height) FROM blocks")[0][0]  # type: ignore[assignment]
        return height or 0

    def decision(self, height: int) -> Decided | None:
        rows = self._rows("SELECT digest, block, certificate FROM blocks WHERE height = ?", height)
        if not rows:
            return None
        digest, block, certificate = rows[0]
        return Decided(height, digest, block, codec.decode(Certificate, certificate))  # type: ignore[arg-type]

    def block(self, digest: bytes) -> bytes | None:
        rows = self._rows("SELECT block FROM undecided WHERE digest = ?", digest)
        return rows[0][0] if rows else None  # type: ignore[return-value]

    # Rounds

    def round_votes(self, job: bytes, number: int) -> dict[str, Signed]:
        """What we signed in this round, by message tag."""
        rows = self._rows("SELECT tag, signed FROM round_votes WHERE job = ? AND round = ?", job, number)
        return {tag: codec.decode(Signed, signed) for tag, signed in rows}  # type: ignore[misc, arg-type]

    def forget_round_votes(self, job: bytes, before: int) -> None:
        with self._transaction() as database:
            database.execute("DELETE FROM round_votes WHERE job = ? AND round < ?", (job, before))

    def evidence(self) -> list[tuple[Signed, Signed]]:
        rows = self._rows("SELECT pair FROM evidence ORDER BY id")
        return [tuple(codec.from_plain(Signed, part) for part in codec.unpack(pair, len(pair))) for (pair,) in rows]  # type: ignore[misc, arg-type]

    # State

    def save_state(self, height: int, root: bytes, encoded: bytes, rounds: Sequence[StoredRound] = ()) -> None:
        """Replaces the applied state; the block of `height` must be decided. `rounds` are those that it closed."""
        assert height <= self.decided_height
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO meta VALUES ('state', ?)", (encoded,))
            database.execute("INSERT OR REPLACE INTO roots VALUES (?, ?)", (height, root))
            rows = [(item.job, item.round, height, codec.encode(item)) for item in rounds]
            database.executemany("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?)", rows)

    def roots(self) -> dict[int, bytes]:
        """The state root that this peer itself computed after each height."""
        return dict(self._rows("SELECT height, state_root FROM roots ORDER BY height"))  # type: ignore[arg-type]

    def rounds(self, last: int) -> list[StoredRound]:
        """The rounds closed last, oldest first."""
        rows = self._rows("SELECT closed FROM rounds ORDER BY height DESC, job LIMIT ?", last)
        return [codec.decode(StoredRound, row[0]) for row in reversed(rows)]  # type: ignore[arg-type]

    def state(self) -> bytes | None:
        return self._get("state")

    def _get(self, key: str) -> bytes | None:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", key)
        return rows[0][0] if rows else None  # type: ignore[return-value]

    def _put(self, key: str, value: bytes) -> None:
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    # Measurements: nobody votes on them

    def measure(self, job: bytes, number: int, figures: dict[str, float]) -> None:
        with self._transaction() as database:
            rows = [(job, number, name, value) for name, value in figures.items()]
            database.executemany("INSERT OR REPLACE INTO measured VALUES (?, ?, ?, ?)", rows)

    def measured(self, job: bytes) -> dict[int, dict[str, float]]:
        result: dict[int, dict[str, float]] = {}
        for number, name, value in self._rows("SELECT round, name, value FROM measured WHERE job = ? ORDER BY round", job):
            result.setdefault(number, {})[name] = value  # type: ignore[arg-type, index, assignment]
        return result


def _explanation(path: Path, error: sqlite3.Error) -> str:
    text = str(error)
    if "full" in text:
        return f"the disk that holds {path} is full: nothing was lost, free some space and start again"
    if "readonly" in text or "unable to open" in text or "permission" in text:
        return f"cannot write {path}: {text}; check the owner and permissions of its folder"
    return (
        f"{path} is damaged ({text}); move the data directory away and `peer join` again, "
        "or restore a copy that was never used for voting since"
    )
