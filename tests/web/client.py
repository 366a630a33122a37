"""An annotator's program that shares no code with Folkmoot. It knows docs/protocol/values.md and the table of the HTTP API.

It writes its own msgpack and signs with Ed25519. Its calls block, so a caller with an event loop runs them in a thread.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from tests.waiting import in_time, patience_seconds

Answer = tuple[int, ...]


def encode(value: Any) -> bytes:
    """Encode a value of a statement: a boolean, a whole number of 0 or more, text, bytes, or an array of these."""
    if value is False or value is True:
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        if value < 0x80:
            return bytes([value])
        size = next(size for size in (1, 2, 4, 8) if value < 1 << 8 * size)
        return {1: b"\xcc", 2: b"\xcd", 4: b"\xce", 8: b"\xcf"}[size] + value.to_bytes(size, "big")
    if isinstance(value, str):
        data = value.encode()
        return (bytes([0xA0 + len(data)]) if len(data) < 32 else bytes([0xD9, len(data)])) + data
    if isinstance(value, bytes):
        return bytes([0xC4, len(value)]) + value
    return bytes([0x90 + len(value)]) + b"".join(map(encode, value))


def committed(assignment: bytes, salt: bytes, answer: Answer) -> bytes:
    return hashlib.sha256(b"folkmoot/answer\0" + assignment + salt + encode(list(answer))).digest()


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)

    @property
    def code(self) -> str:
        """The code of a problem. Raises `AssertionError` if the reply is not a problem."""
        assert self.headers["content-type"].partition(";")[0] == "application/problem+json", (self.status, self.text)
        problem = self.body
        assert problem["status"] == self.status and problem["title"] and problem["detail"], problem
        code: str = problem["code"]
        return code


@dataclass
class Site:
    """One serving peer."""

    host: str
    port: int
    seconds: float = field(default_factory=patience_seconds)
    source: str = ""  # the address of this machine that requests come from
    _network: dict[str, Any] = field(default_factory=dict)

    def ask(
        self, method: str, path: str, body: Any = None, token: str = "", headers: Mapping[str, str | bytes] | None = None
    ) -> Reply:
        """Send a request and return the reply. Raises `OSError` or `http.client.HTTPException` if nobody answers."""
        source = (self.source, 0) if self.source else None
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.seconds, source_address=source)
        sent = {"Authorization": f"Bearer {token}"} if token else {}
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        with closing(connection), in_time():
            connection.request(method, path, data, {**sent, **(headers or {})})
            response = connection.getresponse()
            return Reply(
                response.status, {name.lower(): value for name, value in response.getheaders()}, response.read().decode()
            )

    def get(self, path: str, token: str = "") -> Reply:
        return self.ask("GET", path, None, token)

    @property
    def network(self) -> dict[str, Any]:
        """The chain id and the identity of this peer."""
        if not self._network:
            self._network = self.get("/api/v1/network").body
        return self._network

    @property
    def peer_key(self) -> bytes:
        return bytes.fromhex(self.network["peer_key"])

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/api/stats").body
        return found

    def leaderboard(self, limit: int = 100) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/api/leaderboard?limit={limit}").body
        return found

    def annotation(self, assignment: str) -> Reply:
        return self.get(f"/api/v1/annotations/{assignment}")

    def export(self, project: str, form: str = "jsonl") -> Reply:
        return self.get(f"/api/v1/projects/{project}/export?format={form}")


class Person:
    """An annotator with a key, at one site or several."""

    def __init__(self, name: str, seed: bytes | None = None) -> None:
        self.name, self._secret = name, SigningKey(seed or os.urandom(32))
        self.key = bytes(self._secret.verify_key)
        self._tokens: dict[int, str] = {}  # by site

    def sign(self, chain_id: str, tag: str, *fields: Any) -> bytes:
        return self._secret.sign(f"folkmoot/2/{tag}\0".encode() + bytes.fromhex(chain_id) + encode([tag, *fields])).signature

    def enrol(self, site: Site, invitation: str = "") -> Reply:
        signature = self.sign(site.network["chain_id"], "enrol", self.name, site.peer_key, False)
        body = {"key": self.key.hex(), "name": self.name, "signature": signature.hex()}
        return site.ask("POST", "/api/v1/annotators", body | ({"invitation": invitation} if invitation else {}))

    def challenge(self, site: Site) -> Reply:
        return site.ask("POST", "/api/v1/challenges", {"key": self.key.hex()})

    def begin(self, site: Site, nonce: str, expires_ms: int, signature: bytes | None = None) -> Reply:
        if signature is None:
            signature = self.sign(site.network["chain_id"], "session", site.peer_key, bytes.fromhex(nonce), expires_ms)
        return site.ask(
            "POST",
            "/api/v1/sessions",
            {"key": self.key.hex(), "nonce": nonce, "expires_ms": expires_ms, "signature": signature.hex()},
        )

    def token(self, site: Site, *, anew: bool = False) -> str:
        """Return the token of the session at this site. Begin a session if there is none."""
        if anew or id(site) not in self._tokens:
            challenge = self.challenge(site).body
            self._tokens[id(site)] = self.begin(site, challenge["nonce"], challenge["expires_ms"]).body["token"]
        return self._tokens[id(site)]

    def tasks(self, site: Site, limit: int = 1, project: str = "") -> Reply:
        return site.get(f"/api/tasks?limit={limit}" + (f"&project={project}" if project else ""), self.token(site))

    def statement(self, site: Site, assignment: str, answer: Answer, salt: bytes) -> dict[str, Any]:
        """Return the body of a submission."""
        key = bytes.fromhex(assignment)
        signature = self.sign(site.network["chain_id"], "annotation", key, committed(key, salt, answer))
        return {"assignment": assignment, "answer": list(answer), "salt": salt.hex(), "signature": signature.hex()}

    def submit(self, site: Site, assignment: str, answer: Answer, salt: bytes = b"s" * 16) -> Reply:
        return site.ask("POST", "/api/submit", self.statement(site, assignment, answer, salt), self.token(site))

    def skip(self, site: Site, assignment: str, reason: str) -> Reply:
        return site.ask("POST", f"/api/v1/assignments/{assignment}/skip", {"reason": reason}, self.token(site))

    def release(self, site: Site, assignment: str) -> Reply:
        return site.ask("POST", f"/api/v1/assignments/{assignment}/release", None, self.token(site))


def receipt_holds(text: str, site: Site, annotation: str, commitment: bytes, height: int) -> bool:
    """Return True if the site's peer signed that it saw this commitment decided at this height."""
    body = encode(["annotation-receipt", bytes.fromhex(annotation), commitment, height])
    try:
        signed = b"folkmoot/2/annotation-receipt\0" + bytes.fromhex(site.network["chain_id"]) + body
        data = bytes.fromhex(text)
        VerifyKey(site.peer_key).verify(signed, data[-64:])
    except (BadSignatureError, ValueError):
        return False
    return data == encode([body, site.peer_key, data[-64:]])
