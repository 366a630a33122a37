"""The durable requests of clients at a gateway, with their results.

A model is the client's name for a run. Each request of a model has a number, and equal numbers are the same request. Numbers may
arrive in any order: a client sends the first part of a large batch last.
"""

from __future__ import annotations

import enum
from dataclasses import astuple, dataclass
from typing import Any, Final

from storage.service_database import ServiceDatabase

CREATE_NUMBER: Final = 0  # number of the request that creates a model; the SDK numbers the others from 1


class RequestKind(enum.StrEnum):
    CREATE = "create"
    FORWARD = "forward"
    GRADIENT = "gradient"  # forward and backward
    STEP = "step"
    SAMPLER = "sampler"  # a sampler of the present model
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


@dataclass(frozen=True, slots=True)
class StoredSampler:
    sampler: str
    owner: str
    job: bytes  # job of the model: a finished job, or a run
    round: int
    model: str | None  # model whose adapters were copied; None: the sampler is a finished job


class RequestStore(ServiceDatabase):
    """Requests and models. Each change is durable when the method returns, which takes some milliseconds."""

    file_name, file_mode = "requests.sqlite", 0o600
    schema = """
        CREATE TABLE IF NOT EXISTS models (
            model TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, job BLOB
        ) WITHOUT ROWID;
        CREATE TABLE IF NOT EXISTS requests (
            model TEXT NOT NULL, number INTEGER NOT NULL, kind TEXT NOT NULL, payload BLOB NOT NULL,
            outcome TEXT NOT NULL DEFAULT 'pending', result BLOB NOT NULL DEFAULT x'', step INTEGER, PRIMARY KEY (model, number)
        );
        CREATE TABLE IF NOT EXISTS samplers (
            sampler TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, job BLOB NOT NULL, round INTEGER NOT NULL, model TEXT
        );
    """

    def add_model(self, model: str, session: str, owner: str) -> None:
        self._database.execute("INSERT OR IGNORE INTO models VALUES (?, ?, ?, NULL)", (model, session, owner))

    def count_models(self, owner: str) -> int:
        """Return the number of an owner's models without those whose creation failed."""
        failed = "SELECT model FROM requests WHERE number = ? AND outcome IN ('client-fault', 'gateway-fault')"
        query = f"SELECT COUNT(*) FROM models WHERE owner = ? AND model NOT IN ({failed})"
        ((count,),) = self._database.execute(query, (owner, CREATE_NUMBER))
        return int(count)

    def stored_bytes(self, owner: str) -> int:
        """Return the bytes of all requests and results of an owner."""
        total = "COALESCE(SUM(LENGTH(payload) + LENGTH(result)), 0)"
        query = f"SELECT {total} FROM requests WHERE model IN (SELECT model FROM models WHERE owner = ?)"
        ((found,),) = self._database.execute(query, (owner,))
        return int(found)

    def set_job(self, model: str, job: bytes) -> None:
        self._database.execute("UPDATE models SET job = ? WHERE model = ?", (job, model))

    def find_model(self, model: str) -> StoredModel | None:
        rows = self._database.execute("SELECT * FROM models WHERE model = ?", (model,)).fetchall()
        return StoredModel(*rows[0]) if rows else None

    def list_models(self) -> list[StoredModel]:
        return [StoredModel(*row) for row in self._database.execute("SELECT * FROM models ORDER BY model")]

    def add_sampler(self, sampler: StoredSampler) -> None:
        """Store a sampler, unless one of this name is there."""
        self._database.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?)", astuple(sampler))

    def find_sampler(self, sampler: str) -> StoredSampler | None:
        rows = self._database.execute("SELECT * FROM samplers WHERE sampler = ?", (sampler,)).fetchall()
        return StoredSampler(*rows[0]) if rows else None

    def list_sampler_rounds(self, model: str, newest: int) -> set[int]:
        """Return the rounds of the newest samplers of a model."""
        query = "SELECT round FROM samplers WHERE model = ? ORDER BY rowid DESC LIMIT ?"
        return {row[0] for row in self._database.execute(query, (model, newest))}

    def add_request(self, model: str, number: int, kind: RequestKind, payload: bytes) -> None:
        """Store a request, unless one of this number is there."""
        row = model, number, kind.value, payload
        self._database.execute("INSERT OR IGNORE INTO requests (model, number, kind, payload) VALUES (?, ?, ?, ?)", row)

    def find_request(self, model: str, number: int) -> StoredRequest | None:
        found = self._select("model = ? AND number = ?", model, number)
        return found[0] if found else None

    def last_number(self, model: str) -> int:
        """Return the largest number of a request with an outcome, or the number before the first request."""
        query = "SELECT MAX(number) FROM requests WHERE model = ? AND outcome != 'pending'"
        ((last,),) = self._database.execute(query, (model,))
        return CREATE_NUMBER - 1 if last is None else int(last)

    def find_pending(self, model: str) -> StoredRequest | None:
        """Return the request without an outcome that has the least number."""
        found = self._select("model = ? AND outcome = 'pending'", model, most=1)
        return found[0] if found else None

    def gradients_since_step(self, model: str, number: int) -> list[StoredRequest]:
        """Return the computed requests for gradients between the last request for a step and request `number`, in order."""
        since = "(SELECT COALESCE(MAX(number), -1) FROM requests WHERE model = ? AND kind = 'step' AND number < ?)"
        condition = f"model = ? AND number < ? AND kind = 'gradient' AND outcome = 'done' AND number > {since}"
        return self._select(condition, model, number, model, number)

    def refuse_request(self, model: str, number: int, fault: bytes) -> None:
        """Make a request invalid, so that it is none of the steps and gradients of its model."""
        changed = RequestKind.INVALID.value, fault, model, number
        self._database.execute("UPDATE requests SET kind = ?, payload = ? WHERE model = ? AND number = ?", changed)

    def set_step(self, model: str, number: int, step: int) -> None:
        self._database.execute("UPDATE requests SET step = ? WHERE model = ? AND number = ?", (step, model, number))

    def drop_bodies(self, model: str, number: int) -> None:
        """Delete the payloads of the gradients before this number, whose step is decided. Their results stay."""
        self._database.execute(
            "UPDATE requests SET payload = x'' WHERE model = ? AND kind = 'gradient' AND number < ?", (model, number)
        )

    def drop_before(self, model: str, number: int) -> None:
        """Delete the requests before this number whose payloads are deleted."""
        self._database.execute("DELETE FROM requests WHERE model = ? AND number < ? AND payload = x''", (model, number))

    def set_outcome(self, model: str, number: int, outcome: Outcome, result: bytes) -> None:
        """Store the outcome of a request, and delete its payload unless it is read again: by a step, or in `get_info`."""
        payload = "CASE WHEN kind = 'create' OR kind = 'gradient' AND ?1 = 'done' THEN payload ELSE x'' END"
        query = f"UPDATE requests SET outcome = ?1, result = ?2, payload = {payload} WHERE model = ?3 AND number = ?4"
        self._database.execute(query, (outcome.value, result, model, number))

    def _select(self, condition: str, *values: Any, most: int = -1) -> list[StoredRequest]:
        columns = "model, number, kind, payload, outcome, result, step"
        query = f"SELECT {columns} FROM requests WHERE {condition} ORDER BY number LIMIT ?"
        rows = self._database.execute(query, (*values, most))
        return [StoredRequest(row[0], row[1], RequestKind(row[2]), row[3], Outcome(row[4]), row[5], row[6]) for row in rows]
