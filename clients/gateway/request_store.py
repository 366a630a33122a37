"""The durable requests of clients at a gateway, with their results.

A model is the client's name for a run. Each request of a model has a number, and equal numbers are the same request. Clients that
obey the flag `parallel_fwdbwd_chunks: false` send them in order, but some numbers never arrive.
"""

from __future__ import annotations

import enum
import time
from dataclasses import astuple, dataclass, replace
from typing import Any, Final

from clients.wire.gradient_request import SEQ_ID_MAX
from storage.api_key_store import ApiKey
from storage.service_database import ServiceDatabase

CREATE_NUMBER: Final = 0  # number of the request that creates a model; the SDK numbers the others from 1
END_NUMBER: Final = SEQ_ID_MAX + 1  # number of the request that ends a model's run: it follows all requests of the client
SAMPLER_PART: Final = ":sample:"  # part of a sampler's id between its session and its number


# Samplers of one key: more than the sampling steps of a loop. A program cannot draw samples from older ones.
SAMPLERS_OF_OWNER_MAX: Final = 4_096
# Time for which the results of an ended model stay: another program with the same key may still wait for them.
ENDED_KEPT_MS: Final = 600_000
# SQL for the bytes of all requests, results and unexpired checkpoints of an owner.
STORED_BYTES: Final = """(
    (SELECT COALESCE(SUM(LENGTH(payload) + LENGTH(result)), 0) FROM requests
        WHERE model IN (SELECT model FROM models WHERE owner = :owner))
    + (SELECT COALESCE(SUM(bytes), 0) FROM checkpoints WHERE owner = :owner AND (expires_ms = 0 OR expires_ms > :time_ms))
)"""


class RequestKind(enum.StrEnum):
    CREATE = "create"
    FORWARD = "forward"
    GRADIENT = "gradient"  # forward and backward
    STEP = "step"
    SAMPLER = "sampler"  # a sampler of the present model
    SAVE = "save"  # a checkpoint of the present model
    LOAD = "load"  # the model of a checkpoint, which replaces the present one
    END = "end"  # the end of the model's run
    INVALID = "invalid"  # The payload is the fault of the client, in UTF-8.


class Outcome(enum.StrEnum):
    PENDING = "pending"
    DONE = "done"
    CLIENT_FAULT = "client-fault"
    GATEWAY_FAULT = "gateway-fault"


@dataclass(frozen=True, slots=True)
class StoredRequest:
    model: str
    number: int
    kind: RequestKind
    payload: bytes
    outcome: Outcome = Outcome.PENDING
    result: bytes = b""  # encoded result, or the fault in UTF-8
    step: int | None = None  # number of the run's step that the request asks for


@dataclass(frozen=True, slots=True)
class StoredModel:
    model: str
    session: str
    owner: str  # API key that the model belongs to
    job: bytes | None  # run of the model; None: it is not open yet
    opened_by: int | None  # number of the request for which this run was opened


@dataclass(frozen=True, slots=True)
class CreatedModel:
    """A model that is created, or whose creation is requested."""

    model: str
    creation: bytes  # payload of the request that creates it
    job: bytes | None  # run of the model; None: it is not open yet
    last_request_ms: int  # time of the model's newest request


@dataclass(frozen=True, slots=True)
class StoredSampler:
    sampler: str
    owner: str
    job: bytes  # job of the model: a finished job, or a run
    round: int
    model: str | None = None  # model whose adapters were copied; None: peers keep the model
    path: str | None = None  # checkpoint that the model is

    @property
    def session(self) -> str:
        return self.sampler.rpartition(SAMPLER_PART)[0]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    path: str
    owner: str
    model: str
    checkpoint: str  # name in the ledger
    job: bytes  # run that the model had when it was saved
    round: int
    root: bytes
    bytes: int  # size of the saved model
    expires_ms: int  # time of the network at which the checkpoint expires; 0: never
    created_ms: int = 0

    def is_expired(self, time_ms: int) -> bool:
        return 0 < self.expires_ms <= time_ms


class RequestStore(ServiceDatabase):
    """Requests and models. Each change is durable when the method returns, which takes some milliseconds."""

    file_name, file_mode = "requests.sqlite", 0o600
    schema = """
        CREATE TABLE IF NOT EXISTS models (
            model TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, job BLOB, opened_by INTEGER
        ) WITHOUT ROWID;
        CREATE TABLE IF NOT EXISTS requests (
            model TEXT NOT NULL, number INTEGER NOT NULL, kind TEXT NOT NULL, added_ms INTEGER NOT NULL,
            outcome TEXT NOT NULL DEFAULT 'pending', step INTEGER, payload BLOB NOT NULL, result BLOB NOT NULL DEFAULT x'',
            PRIMARY KEY (model, number)
        );
        CREATE TABLE IF NOT EXISTS samplers (
            sampler TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, job BLOB NOT NULL, round INTEGER NOT NULL, model TEXT,
            path TEXT, session TEXT NOT NULL, created_ms INTEGER NOT NULL
        );
        CREATE INDEX IF NOT EXISTS requests_by_age ON requests (model);
        CREATE INDEX IF NOT EXISTS samplers_by_age ON samplers (owner);
        CREATE TABLE IF NOT EXISTS checkpoints (
            path TEXT PRIMARY KEY, owner TEXT NOT NULL, model TEXT NOT NULL, checkpoint TEXT NOT NULL, job BLOB NOT NULL,
            round INTEGER NOT NULL, root BLOB NOT NULL, bytes INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
            created_ms INTEGER NOT NULL
        ) WITHOUT ROWID;
        CREATE VIEW IF NOT EXISTS created_models AS
            SELECT models.model, session, owner, job, payload AS creation, added_ms AS created_ms,
                (SELECT MAX(added_ms) FROM requests AS every WHERE every.model = models.model) AS last_request_ms
            FROM models JOIN requests ON requests.model = models.model AND number = 0
            WHERE kind = 'create' AND outcome IN ('pending', 'done');
        CREATE VIEW IF NOT EXISTS sessions AS
            SELECT owner, session, MIN(created_ms) AS created_ms FROM (
                SELECT owner, session, created_ms FROM created_models
                UNION ALL SELECT owner, session, created_ms FROM samplers
            ) GROUP BY owner, session;
    """

    def add_model(self, model: str, session: str, owner: str) -> None:
        self._database.execute("INSERT OR IGNORE INTO models (model, session, owner) VALUES (?, ?, ?)", (model, session, owner))

    def list_owner_jobs(self, owner: str) -> list[bytes | None]:
        """Return the job of each created model of an owner; None for a model that is being created."""
        query = """
            SELECT CASE outcome WHEN 'done' THEN job END FROM models JOIN requests USING (model)
            WHERE owner = ? AND number = ? AND kind = 'create' AND outcome IN ('pending', 'done')
        """
        return [job for (job,) in self._database.execute(query, (owner, CREATE_NUMBER))]

    def list_jobs(self) -> set[bytes]:
        """Return the runs of all models."""
        return {job for (job,) in self._database.execute("SELECT job FROM models WHERE job IS NOT NULL")}

    def drop_old_models(self, owner: str, newest: int, time_ms: int) -> None:
        """Delete the results of models that an owner has ended for `ENDED_KEPT_MS`, and its expired checkpoints.

        The `newest` ended and failed models stay. Older ones stay if they have a checkpoint.
        """
        ended = "SELECT model FROM requests WHERE number = ?2 AND outcome = 'done'"
        owned = "SELECT model FROM models WHERE owner = ?1"
        self._database.execute(
            f"DELETE FROM requests WHERE model IN ({owned}) AND model IN ({ended} AND added_ms <= ?4) "
            "AND number NOT IN (?2, ?3) AND outcome != 'pending'",
            (owner, END_NUMBER, CREATE_NUMBER, time_ms - ENDED_KEPT_MS),
        )
        self._database.execute("DELETE FROM checkpoints WHERE owner = ? AND expires_ms BETWEEN 1 AND ?", (owner, time_ms))
        needed = "SELECT model FROM checkpoints UNION SELECT model FROM requests WHERE outcome = 'pending'"
        over = f"""
            SELECT model FROM models JOIN requests USING (model)
            WHERE owner = ?1 AND number = ?3 AND (outcome IN ('client-fault', 'gateway-fault') OR model IN ({ended}))
            AND model NOT IN ({needed}) ORDER BY added_ms DESC LIMIT -1 OFFSET ?4
        """
        self._database.execute(f"DELETE FROM models WHERE model IN ({over})", (owner, END_NUMBER, CREATE_NUMBER, newest))
        self._database.execute("DELETE FROM requests WHERE model NOT IN (SELECT model FROM models)")

    def list_created_models(self, owner: str, limit: int, offset: int) -> tuple[list[CreatedModel], int]:
        """Return a page of an owner's models, the newest first, and the number of all of them."""
        rows = self._database.execute(
            "SELECT model, creation, job, last_request_ms FROM created_models WHERE owner = ? "
            "ORDER BY created_ms DESC, model LIMIT ? OFFSET ?",
            (owner, limit, offset),
        )
        return [CreatedModel(*row) for row in rows], self._count("created_models", owner)

    def find_created_model(self, owner: str, model: str) -> CreatedModel | None:
        query = "SELECT model, creation, job, last_request_ms FROM created_models WHERE owner = ? AND model = ?"
        rows = self._database.execute(query, (owner, model)).fetchall()
        return CreatedModel(*rows[0]) if rows else None

    def list_sessions(self, owner: str, limit: int, offset: int) -> tuple[list[str], int]:
        """Return a page of the owner's sessions that have a model or a sampler, the newest first, and the number of all."""
        query = "SELECT session FROM sessions WHERE owner = ? ORDER BY created_ms DESC, session LIMIT ? OFFSET ?"
        rows = self._database.execute(query, (owner, limit, offset))
        return [session for (session,) in rows], self._count("sessions", owner)

    def list_session_models(self, owner: str, session: str, newest: int) -> list[str]:
        """Return the newest created models of a session, the oldest first."""
        return self._list_newest("created_models", "model", owner, session, newest)

    def list_session_samplers(self, owner: str, session: str, newest: int) -> list[str]:
        """Return the newest samplers of a session, the oldest first."""
        return self._list_newest("samplers", "sampler", owner, session, newest)

    def list_unended_models(self, owner: str, session: str) -> list[str]:
        """Return the models of a session whose end is not requested."""
        ended = "SELECT model FROM requests WHERE number = ?"
        query = f"SELECT model FROM models WHERE owner = ? AND session = ? AND model NOT IN ({ended}) ORDER BY model"
        return [model for (model,) in self._database.execute(query, (owner, session, END_NUMBER))]

    def _list_newest(self, table: str, column: str, owner: str, session: str, newest: int) -> list[str]:
        query = f"SELECT {column} FROM {table} WHERE owner = ? AND session = ? ORDER BY created_ms DESC, {column} DESC LIMIT ?"
        return [name for (name,) in self._database.execute(query, (owner, session, newest))][::-1]

    def _count(self, table: str, owner: str) -> int:
        ((count,),) = self._database.execute(f"SELECT COUNT(*) FROM {table} WHERE owner = ?", (owner,))
        return int(count)

    def stored_bytes(self, owner: str, time_ms: int) -> int:
        """Return the bytes of all requests, results and unexpired checkpoints of an owner."""
        ((found,),) = self._database.execute(f"SELECT {STORED_BYTES}", {"owner": owner, "time_ms": time_ms})
        return int(found)

    def set_job(self, model: str, job: bytes, number: int) -> None:
        """Store the run that was opened for request `number` of a model."""
        self._database.execute("UPDATE models SET job = ?, opened_by = ? WHERE model = ?", (job, number, model))

    def find_model(self, model: str) -> StoredModel | None:
        rows = self._database.execute("SELECT * FROM models WHERE model = ?", (model,)).fetchall()
        return StoredModel(*rows[0]) if rows else None

    def list_pending_models(self) -> list[str]:
        """Return the models that have a request without an outcome."""
        return [model for (model,) in self._database.execute("SELECT DISTINCT model FROM requests WHERE outcome = 'pending'")]

    def add_sampler(self, sampler: StoredSampler) -> None:
        """Store a sampler, unless one of this name is there, and forget the oldest ones of its owner."""
        row = (*astuple(sampler), sampler.session, wall_ms())
        self._database.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        oldest = "SELECT rowid FROM samplers WHERE owner = ?1 ORDER BY rowid DESC LIMIT 1 OFFSET ?2"
        query = f"DELETE FROM samplers WHERE owner = ?1 AND rowid <= ({oldest})"
        self._database.execute(query, (sampler.owner, SAMPLERS_OF_OWNER_MAX))

    def find_sampler(self, sampler: str) -> StoredSampler | None:
        query = "SELECT sampler, owner, job, round, model, path FROM samplers WHERE sampler = ?"
        rows = self._database.execute(query, (sampler,)).fetchall()
        return StoredSampler(*rows[0]) if rows else None

    def list_copied_models(self, model: str) -> list[tuple[bytes, int]]:
        """Return the job and the round of each sampler of a client's model, the newest first."""
        return self._database.execute("SELECT job, round FROM samplers WHERE model = ? ORDER BY rowid DESC", (model,)).fetchall()

    def put_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        """Store a checkpoint. It replaces one with the same path."""
        row = astuple(replace(checkpoint, created_ms=wall_ms()))
        self._database.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def find_checkpoint(self, path: str) -> StoredCheckpoint | None:
        rows = self._database.execute("SELECT * FROM checkpoints WHERE path = ?", (path,)).fetchall()
        return StoredCheckpoint(*rows[0]) if rows else None

    def list_checkpoints(self, owner: str, time_ms: int, model: str | None = None) -> list[StoredCheckpoint]:
        """Return the checkpoints of an owner that have not expired, or those of one of its models, the newest first."""
        query = "SELECT * FROM checkpoints WHERE owner = ? AND (? IS NULL OR model = ?) AND (expires_ms = 0 OR expires_ms > ?)"
        rows = self._database.execute(f"{query} ORDER BY created_ms DESC, path", (owner, model, model, time_ms))
        return [StoredCheckpoint(*row) for row in rows]

    def set_checkpoint_expiry(self, path: str, expires_ms: int) -> None:
        self._database.execute("UPDATE checkpoints SET expires_ms = ? WHERE path = ?", (expires_ms, path))

    def drop_checkpoint(self, path: str) -> None:
        self._database.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def add_request(
        self, model: str, number: int, kind: RequestKind, payload: bytes, owner: str = "", time_ms: int = 0, stored_max: int = -1
    ) -> bool:
        """Store a request, unless one of this number is there. Return whether it is stored.

        With `stored_max`, a request is not stored if its owner would store more bytes than these.
        """
        values = {"model": model, "number": number, "kind": kind.value, "added_ms": wall_ms(), "payload": payload}
        quota = {"owner": owner, "time_ms": time_ms, "stored_max": stored_max}
        self._database.execute(
            f"""
            INSERT OR IGNORE INTO requests (model, number, kind, added_ms, payload)
            SELECT :model, :number, :kind, :added_ms, :payload
            WHERE :stored_max < 0 OR {STORED_BYTES} + LENGTH(:payload) <= :stored_max
            """,
            values | quota,
        )
        return self.find_outcome(model, number) is not None

    def find_outcome(self, model: str, number: int) -> StoredRequest | None:
        """Return a request without its payload, which may have megabytes: programs ask again and again for its outcome."""
        found = self._select("model = ? AND number = ?", model, number, payload="x''")
        return found[0] if found else None

    def last_number(self, model: str) -> int:
        """Return the largest number of a request with an outcome, or the number before the first request."""
        query = "SELECT MAX(number) FROM requests WHERE model = ? AND outcome != 'pending'"
        ((last,),) = self._database.execute(query, (model,))
        return CREATE_NUMBER - 1 if last is None else int(last)

    def count_pending(self, model: str) -> tuple[int, int]:
        """Return how many requests of a model have no outcome, except its end, and the largest number of them, or -1."""
        query = "SELECT COUNT(*), COALESCE(MAX(number), -1) FROM requests WHERE model = ? AND outcome = 'pending' AND number < ?"
        ((count, largest),) = self._database.execute(query, (model, END_NUMBER))
        return int(count), int(largest)

    def find_pending(self, model: str) -> StoredRequest | None:
        """Return the request without an outcome that has the least number."""
        found = self._select("model = ? AND outcome = 'pending'", model, most=1)
        return found[0] if found else None

    def gradients_since_step(self, model: str, number: int) -> list[int]:
        """Return the computed requests for gradients between the last step, or the last load, and request `number`, in order."""
        ends = "(kind = 'step' OR kind = 'load' AND outcome = 'done')"
        since = f"(SELECT COALESCE(MAX(number), -1) FROM requests WHERE model = ?1 AND {ends} AND number < ?2)"
        computed = f"model = ?1 AND number < ?2 AND kind = 'gradient' AND outcome = 'done' AND number > {since}"
        rows = self._database.execute(f"SELECT number FROM requests WHERE {computed} ORDER BY number", (model, number))
        return [found for (found,) in rows]

    def read_payload(self, model: str, number: int) -> bytes:
        query = "SELECT payload FROM requests WHERE model = ? AND number = ?"
        ((payload,),) = self._database.execute(query, (model, number))
        assert isinstance(payload, bytes)
        return payload

    def refuse_request(self, model: str, number: int, fault: bytes) -> None:
        """Make a request invalid, so that it is none of the steps and gradients of its model."""
        changed = RequestKind.INVALID.value, fault, model, number
        self._database.execute("UPDATE requests SET kind = ?, payload = ? WHERE model = ? AND number = ?", changed)

    def set_step(self, model: str, number: int, step: int) -> None:
        self._database.execute("UPDATE requests SET step = ? WHERE model = ? AND number = ?", (step, model, number))

    def drop_bodies(self, model: str, number: int) -> None:
        """Delete the payloads of the gradients before this number, whose step is decided. Their results stay."""
        # Without the last condition, SQLite would read the results of all earlier gradients in each step.
        condition = "model = ? AND kind = 'gradient' AND number < ? AND payload != x''"
        self._database.execute(f"UPDATE requests SET payload = x'' WHERE {condition}", (model, number))

    def drop_old_requests(self, model: str, newest: int) -> None:
        """Delete the requests of a model whose payloads are deleted, except the newest ones, its creation and its end."""
        oldest = "SELECT rowid FROM requests WHERE model = ?1 ORDER BY rowid DESC LIMIT 1 OFFSET ?2"
        decided = "outcome != 'pending' AND number NOT IN (?3, ?4) AND payload = x''"
        query = f"DELETE FROM requests WHERE model = ?1 AND rowid <= ({oldest}) AND {decided}"
        self._database.execute(query, (model, newest, CREATE_NUMBER, END_NUMBER))

    def set_outcome(self, model: str, number: int, outcome: Outcome, result: bytes) -> None:
        """Store the outcome of a request, and delete its payload unless it is read again: by a step, or in `get_info`."""
        payload = "CASE WHEN kind = 'create' OR kind = 'gradient' AND ?1 = 'done' THEN payload ELSE x'' END"
        query = f"UPDATE requests SET outcome = ?1, result = ?2, payload = {payload} WHERE model = ?3 AND number = ?4"
        self._database.execute(query, (outcome.value, result, model, number))

    def _select(self, condition: str, *values: Any, most: int = -1, payload: str = "payload") -> list[StoredRequest]:
        columns = f"model, number, kind, {payload}, outcome, result, step"
        query = f"SELECT {columns} FROM requests WHERE {condition} ORDER BY number LIMIT ?"
        rows = self._database.execute(query, (*values, most))
        return [StoredRequest(row[0], row[1], RequestKind(row[2]), row[3], Outcome(row[4]), row[5], row[6]) for row in rows]


def owner_of(key: ApiKey) -> str:
    """Return the name under which models belong to a key. A later key of the same name has another one."""
    return f"{key.name}@{key.created_ms}"


def wall_ms() -> int:
    return time.time_ns() // 1_000_000
