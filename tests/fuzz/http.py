"""`python -m tests.fuzz.http --seconds 120`: valid and invalid requests of strangers to a serving peer, on real sockets.

No reply may be a server error, except a 503 with `no-quorum`. The peer keeps running, logs no complaint, and its memory does
not grow with the number of requests.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import re
import secrets
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import trio

from clients.wire.wire_format import encode_bytes, encode_entry, encode_varint
from tests.peer.processes import command, daemons
from tests.web.client import Person, Site

WORKERS = 24
REPLY_SECONDS = (0.2, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 15.0)  # drawn from these; a call waits at most 10 s for a decision
GROWTH_MB_MAX = 48.0  # after the first quarter of the time
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "G\x00T", "X" * 300, "", "PRI")
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**31, 2**53, 2**63, 2**64, 10**400, -(10**400), "", " ", "x" * 70_000, "\x00", "\ud800",
    "ß" * 33, "‮evil", "{}", "0" * 64, "f" * 64, "F" * 64, [], {}, [[]], [0] * 17, [256], [-1], [0.0], [True], [None], ["0"],
    [10**30], {"": {}}, {"key": None},
)  # fmt: skip
PATHS = (
    "/", "/healthz", "/metrics", "/api/v1/openapi.json", "/api/v1/events", "/api/v1/projects", "/static/annotate.js", "/static/",
    "/static/../app.py", "/static/%2e%2e/app.py", "/static/%00", "/static/" + "a" * 5_000, "/vendor/..%2f..%2fpyproject.toml",
    "//", "/%", "/%ff%fe", "/api//tasks", "*", "http://other/api/stats", "/api/v1/annotations/", "/\xe2\x82\xac",
    "/api/leaderboard?limit=" + "9" * 5_000, "/api/leaderboard?limit=%F0%9D%9F%99", "/api/leaderboard?limit=-0&limit=1",
    "/api/tasks?limit=1;2", "/api/stats#x", "/static", "/static/annotate.js/x", "/static/\\..\\x",
    "/?" + "&".join("a=1" for _ in range(500)),
)  # fmt: skip
HOSTS = (*("localhost",) * 9, "127.0.0.1:80", "[::1]", "elsewhere", "[", "[::1", "", "\xff")
FORMATS = ("jsonl", "csv", "label-studio", "preferences", "", "parquet")
PASSPHRASES = ("correct horse", "wrong horse", "short", "x" * 257, "\ud800" * 9)
PROJECTS: tuple[dict[str, Any], ...] = (
    {"name": "moods", "kind": "label", "options": ["glad", "sad"], "guidelines": "Be fair.", "tasks": [{"text": "a"}]},
    {"name": "pairs", "kind": "pair", "votes": 3, "price": 0, "tasks": [{"text": "q", "items": ["a", "b"], "suggestion": [1]}]},
    {"name": "ranks", "kind": "ranking", "many": False, "suggests_first": True, "tasks": [{"items": ["a", "b", "c"]}]},
)
FILES = (
    b'{"text": "one"}\n{"text": "two", "gold": "sad"}\n',
    b'text,gold\none,glad\n"a\nb",sad\n',
    b'text\n"',
    b"text,text\na,b\n",
    b"",
    b'[{"data": {"text": "one"}, "predictions": [{"result": [{"value": {"choices": ["sad"]}}]}]}]',
    b'[{"data": [], "predictions": 5}, {"predictions": {"result": 1}}, 1, null, {}]',
    b"[" * 30_000,
    b'{"text": 1}\n[]\nnull\n{"text": "a", "suggestion": {}, "gold": [[]]}\n{"text": "\\ud800"}\n{"text": "a", "items": "b"}',
    b"\xff\xfe\x00" + b"\x00" * 999,
    b"text\n" + b"a\r" * 999,
)
HEADERS = (
    "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 5\r\nContent-Length: 7", "Content-Length: x",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: nonsense", "Content-Encoding: gzip",
    "Content-Encoding: deflate", "Content-Encoding: br", "Content-Encoding: zstd", "Content-Encoding: nonsense",
    "Expect: 100-continue", "Expect: everything", "Upgrade: websocket\r\nConnection: Upgrade", "Upgrade: h2c", "Range: bytes=9-1",
    "Range: bytes=0-,5-6", "Range: lines=1", "If-Modified-Since: yesterday", "If-None-Match: *", 'If-Match: "x"', "If-Range: x",
    "Content-Type: text/plain; charset=nonsense", "Content-Type: multipart/form-data", "Accept-Encoding: gzip;q=x, *",
    "Authorization: Bearer", "Authorization: Bearer  x", "Authorization: Basic eA==", "Cookie: a=b; c", "Cookie: folkmoot=x",
    "Origin: http://[", "Origin: null",
    "X: " + "y" * 9_000, "No colon here", ": nothing", "A\x00B: c", "Host: a\r\nHost: b", " folded: x",
    "Connection: keep-alive, close", "Authorization: Bearer \xff\xfe", "Expect: \xff\xfe",
)  # fmt: skip


@dataclass
class Seen:
    statuses: Counter[int] = field(default_factory=Counter)
    requests: int = 0
    unanswered: int = 0  # connections that were open and silent at the end
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Known:
    """An honest annotator's knowledge of a site. Requests are made from it."""

    site: Site
    person: Person
    token: str
    operator: str  # another token
    project: str
    assignments: tuple[str, ...]


def requests_of(known: Known, random: Random) -> tuple[str, str, Any]:
    """Return method, path and body of a possible request of a client."""
    person, site = known.person, known.site
    key, assignment = person.key.hex(), random.choice(known.assignments)
    stranger = Person("eve", random.randbytes(32))
    return random.choice(
        (
            lambda: ("GET", "/api/v1/network", None),
            lambda: ("POST", "/api/v1/annotators", {"key": key, "name": "ann", "signature": "00" * 64, "custodial": True}),
            lambda: ("POST", "/api/v1/annotators", _enrolment(stranger, site)),
            lambda: ("POST", "/api/v1/challenges", {"key": key}),
            lambda: (
                "POST",
                f"/api/v1/sign-{random.choice(('up', 'in'))}",
                {"name": "eve", "passphrase": random.choice(PASSPHRASES)},
            ),
            lambda: (*random.choice((("POST", "/api/v1/sign-out"), ("GET", "/api/v1/session"))), None),
            lambda: ("POST", "/api/v1/sessions", {"key": key, "nonce": "00" * 16, "expires_ms": 2**42, "signature": "00" * 64}),
            lambda: ("GET", f"/api/tasks?limit={random.randint(1, 8)}", None),
            lambda: ("POST", "/api/submit", person.statement(site, assignment, (random.randint(0, 2),), random.randbytes(16))),
            lambda: ("POST", f"/api/v1/assignments/{assignment}/skip", {"reason": "no"}),
            lambda: ("POST", f"/api/v1/assignments/{assignment}/release", None),
            lambda: (
                "POST",
                "/api/v1/heartbeat",
                {"assignments": random.choice(([assignment], [], ["00" * 32] * 9, assignment))},
            ),
            lambda: ("GET", f"/api/v1/annotations/{assignment}", None),
            lambda: ("GET", "/api/stats", None),
            lambda: ("GET", f"/api/leaderboard?limit={random.randint(0, 1001)}", None),
            lambda: ("GET", f"/api/v1/projects/{known.project}/export?format={random.choice(FORMATS)}", None),
            lambda: ("GET", f"/api/v1/projects/{known.project}/{random.choice(('agreement', 'guidelines', ''))}", None),
            lambda: ("POST", f"/api/v1/projects/{known.project}/{random.choice(('pause', 'open'))}", None),
            lambda: ("POST", f"/api/v1/projects/{assignment}/close", None),
            lambda: ("GET", random.choice(("/api/v1/projects", f"/api/v1/projects/{known.project}", "/api/v1/live")), None),
            lambda: ("GET", f"/api/v1/blocks/{random.choice((0, 1, 2, 9, 2**53, 2**64))}", None),
            lambda: ("POST", "/api/v1/projects", random.choice(PROJECTS)),
            lambda: ("POST", f"/api/v1/projects/{known.project}/tasks", {"tasks": [{"text": "more"}]}),
            lambda: ("GET", random.choice(PATHS), None),
            lambda: _of_operators(known, random),
            lambda: _of_programs(random),
        )
    )()


def _of_programs(random: Random) -> tuple[str, str, Any]:
    session, number = random.choice("st"), random.randint(0, 30)
    model, sampler = f"{session}:train:{random.randint(0, 3)}", f"{session}:sample:{random.randint(0, 3)}"
    samples = {"prompt": random.choice(STRANGE), "num_samples": random.choice(STRANGE), "sampling_params": random.choice(STRANGE)}
    targets = encode_bytes(2, encode_bytes(1, bytes(16)) + encode_varint(3, 2))  # two tokens, as int64
    example = encode_bytes(1, encode_bytes(1, encode_bytes(1, bytes(8)))) + encode_entry(2, "target_tokens", targets)
    loss = random.choice((b"cross_entropy", b"ppo", b"no"))
    gradient = encode_bytes(1, model.encode()) + encode_varint(2, number) + encode_bytes(3, example) + encode_bytes(4, loss)
    ids = {"session_id": session, "model_seq_id": random.randint(0, 3)}
    lora, rates = {"rank": random.choice(STRANGE), "seed": random.choice(STRANGE)}, {"learning_rate": random.choice(STRANGE)}
    listed = random.choice(
        ("training_runs", f"training_runs/{model}", "training_runs/%00", "checkpoints", "sessions", "sessions/s")
    )
    page = random.choice(("", "?limit=1&offset=1", "?limit=-1", "?offset=9999999999"))
    method, call, body = random.choice(
        (
            (
                "POST",
                random.choice(("client/config", "client/dynamic_config", "create_session", "telemetry")),
                {"sdk_version": "0"},
            ),
            ("POST", "session_heartbeat", ids),
            ("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}),
            ("GET", random.choice(("healthz", "get_server_capabilities", f"samplers/{sampler}", "samplers/%2F")), None),
            ("GET", f"{listed}{page}", None),
            ("GET", f"training_runs/{model}/checkpoints", None),
            (
                "POST",
                "save_weights",
                {"model_id": model, "seq_id": number, "path": random.choice(STRANGE), "ttl_seconds": number},
            ),
            ("POST", "load_weights", {"model_id": model, "seq_id": number, "path": f"tinker://{model}/weights/a"}),
            ("POST", "load_weights", ids | {"path": f"tinker://{model}/weights/a", "optimizer": True}),
            ("DELETE", f"training_runs/{model}/checkpoints/weights/{random.choice('ab')}", None),
            ("PUT", f"training_runs/{model}/checkpoints/weights/a/ttl", {"ttl_seconds": random.choice(STRANGE)}),
            ("POST", "weights_info", {"tinker_path": random.choice(("tinker://s:train:0/weights/a", "x"))}),
            ("POST", "cancel_future", {"request_id": f"{model}#{number}"}),
            ("POST", "create_model", ids | {"base_model": "base", "lora_config": lora, "optimizer_config": {"type": "adamw"}}),
            ("POST", "get_info", {"model_id": model}),
            ("POST", "save_weights_for_sampler", {"model_id": model, "seq_id": number, "sampling_session_seq_id": number}),
            ("POST", "create_sampling_session", {"session_id": session, "sampling_session_seq_id": number, "base_model": "base"}),
            ("POST", "asample", {"sampling_session_id": sampler, "seq_id": number} | samples),
            ("POST", "forward_backward", gradient),
            ("POST", "optim_step", {"model_id": model, "seq_id": number, "adam_params": rates, "optimizer_params": {}}),
            (
                "POST",
                "retrieve_future",
                {"request_id": f"{random.choice((model, sampler))}#{random.choice((number, '9' * 5_000))}"},
            ),
        )
    )
    return method, f"/tinker/api/v1/{call}", body


def _of_operators(known: Known, random: Random) -> tuple[str, str, Any]:
    def one(*values: Any) -> Any:
        return random.choice(values)

    admin, projects, project = "/api/v1/admin", "/api/v1/projects", f"/api/v1/projects/{known.project}"
    key, task, number = known.person.key.hex(), random.choice(known.assignments), random.randint(0, 2)
    form = f"format={one('', 'jsonl', 'csv', 'json', 'xml')}&check={number}&many={number}"
    asked = f"kind={one('label', 'pair', 'no')}&options={one('', 'glad%0Asad', 'a%0Aa', '%ED%A0%80')}"
    job = {"name": "a", "data": "built-in", "rounds": 2, "overrides": {"model.width": "9"}}
    return random.choice(
        (
            lambda: ("GET", f"{admin}/{one('health', 'alerts', 'jobs')}", None),
            lambda: ("GET", f"{admin}/log?before={number}&limit={random.randint(0, 201)}", None),
            lambda: ("GET", f"{admin}/people?search={one('', 'a', '%F0%9D', key)}&offset={one(0, 9, 10**6)}", None),
            lambda: ("POST", f"{admin}/sign-in", {"token": one(known.operator, known.token, "x")}),
            lambda: ("POST", f"{admin}/{one('sign-out', 'invite')}", None),
            lambda: ("POST", f"{admin}/people/{one(key, task)}/{one('refuse', 'allow', 'allow')}", None),
            lambda: ("POST", f"{admin}/jobs", job),
            lambda: ("POST", f"{admin}/jobs/{task}/cancel", None),
            lambda: ("GET", f"{project}/review?state={one('', 'begun', 'no')}&after={number}:{number}&label={number}", None),
            lambda: ("GET", f"{project}/review?search={one('1', '%00', '%E2%82')}&annotator=ann&limit={number}", None),
            lambda: ("GET", f"{project}/confusions", None),
            lambda: ("POST", f"{project}/tasks/{task}/decide", {"answer": [number]}),
            lambda: ("POST", f"{project}/redact", {"task": one(5, 2**20), "reason": "r"}),
            lambda: ("POST", f"{project}/tasks?{form}", one(*FILES)),
            lambda: ("POST", f"{projects}/check?{form}&{asked}", one(*FILES)),
        )
    )()


def _enrolment(person: Person, site: Site) -> dict[str, Any]:
    signature = person.sign(site.network["chain_id"], "enrol", person.name, site.peer_key, False)
    return {"key": person.key.hex(), "name": person.name, "signature": signature.hex()}


def made(known: Known, random: Random, *, last: bool) -> bytes:
    """Return one request as bytes, changed in some places or in none."""
    method, path, body = requests_of(known, random)
    if random.random() < 0.15:
        method = random.choice(METHODS)
    if random.random() < 0.2:
        path = _path(path, random)
    data = b"" if body is None else _body(body, random)
    headers = [f"Host: {random.choice(HOSTS)}"]
    if random.random() < 0.8:
        headers.append(f"Authorization: Bearer {random.choice((known.token, known.token, known.operator))}")
    if last and random.random() < 0.95:
        headers.append("Connection: close")
    if random.random() < 0.15:
        data, headers = _chunked(data, random), [*headers, "Transfer-Encoding: chunked"]
    elif random.random() < 0.05:
        data = random.choice((gzip.compress(data), gzip.compress(bytes(2_000_000)), data[:9], gzip.compress(data)[:20]))
        headers += ["Content-Encoding: gzip", f"Content-Length: {len(data)}"]
    elif data or random.random() < 0.1:
        headers.append(f"Content-Length: {max(0, len(data) + random.choice((0,) * 30 + (1, -1, 70_000)))}")
    headers += random.sample(HEADERS, random.choice((0, 0, 0, 1, 1, 2)))
    version = random.choice(("HTTP/1.1",) * 20 + ("HTTP/1.0", "HTTP/2.0", "HTTP/9.9", "http", ""))
    line = f"{method} {path} {version}\r\n" + "".join(header + "\r\n" for header in headers) + "\r\n"
    found = line.encode("latin-1", "replace") + data
    if random.random() < 0.03:
        at = random.randrange(len(found))
        found = found[:at] + random.randbytes(random.randint(1, 8)) + found[at + random.randint(0, 3) :]
    return found


def _path(path: str, random: Random) -> str:
    at = random.randint(0, len(path))
    added = random.choice(("%00", "%", "/", "..", "%2f", "é", "?", "&limit=1", "%ED%A0%80", quote("☃"), "x" * 9_000, " ", "0"))
    return path[:at] + added + path[at + random.randint(0, 2) :]


def _body(body: dict[str, Any] | bytes, random: Random) -> bytes:
    if isinstance(body, bytes):
        at = random.randint(0, len(body))
        return body if random.random() < 0.5 else body[:at] + random.randbytes(random.randint(0, 3)) + body[at:]
    changed, names = dict(body), list(body) or ["key"]
    chance = random.random()
    if chance < 0.4:
        changed[random.choice(names)] = random.choice(STRANGE)
    elif chance < 0.5:
        changed.pop(random.choice(names), None)
    elif chance < 0.6:
        return random.choice(
            (
                b"", b"null", b"[]", b"0", b'"x"', b"NaN", b"{", b"[" * 30_000, b'{"a":' * 10_000, b'{"a":' + b"9" * 6_000 + b"}",
                b"\xff\xfe{\x00}\x00", b"\x80", b'{"key":"\xed\xa0\x80"}', b"{" + b" " * 70_000 + b"}", bytes(100),
            )
        )  # fmt: skip
    data = json.dumps(changed, allow_nan=True).encode()
    if random.random() < 0.05:
        data = data.decode().encode(random.choice(("utf-16", "utf-32", "utf-8-sig")))
    return data


def _chunked(data: bytes, random: Random) -> bytes:
    found = b""
    while data:
        size = random.randint(1, len(data))
        found += b"%x\r\n" % size + data[:size] + b"\r\n"
        data = data[size:]
    if random.random() < 0.2:
        return found + random.choice(
            (b"-1\r\n\r\n", b"fffffffffffffffff\r\n", b"5;x=y\r\nab\r\n", b"zz\r\n", b"\r\n", b"40000000\r\nx")
        )
    return found + b"0\r\n\r\n"


async def hammer(known: Known, seconds: float, seed: int) -> Seen:
    """Send requests for some seconds over several connections at once. Return the results."""
    seen, end = Seen(), trio.current_time() + seconds

    async def send(worker: int) -> None:
        random = Random(f"{seed}/{worker}")
        while trio.current_time() < end and len(seen.problems) < 5:
            count = random.choice((1, 1, 1, 1, 2, 5))
            data = b"".join(made(known, random, last=number == count - 1) for number in range(count))
            if random.random() < 0.05:
                data = data[: random.randrange(len(data))]
            seen.requests += count
            limit = min(random.choice(REPLY_SECONDS), end + 1.0 - trio.current_time())
            _judge(seen, data, await _reply(seen, known.site, data, limit))

    async with trio.open_nursery() as nursery:
        for worker in range(WORKERS):
            nursery.start_soon(send, worker)
    return seen


async def _reply(seen: Seen, site: Site, data: bytes, limit: float) -> bytes:
    found = b""
    try:
        stream = await trio.open_tcp_stream(site.host, site.port)
    except OSError as error:
        seen.problems.append(f"nobody listens any more: {error}")
        return found
    with trio.move_on_after(limit) as waiting:
        async with stream:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(data)
                while part := await stream.receive_some(1 << 16):
                    found += part
                    if len(found) > 1 << 23:
                        break
    seen.unanswered += waiting.cancelled_caught and not found
    return found


def _judge(seen: Seen, data: bytes, reply: bytes) -> None:
    for match in STATUS.finditer(reply):
        status = int(match[1])
        seen.statuses[status] += 1
        if status >= 500 and not (status == 503 and b'"code": "no-quorum"' in reply):
            seen.problems.append(f"{status} to {data[:600]!r}: {reply[match.start() : match.start() + 300]!r}")


# Without other requests -----------------------------------------------------------------------------------------------


def memory_mb(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def known_at(site: Site, project: str, operator: str) -> Known:
    """Take an annotator's first steps at this site."""
    person = Person("ann")
    assert person.enrol(site).status == 201
    tasks = person.tasks(site, 8).body["tasks"]
    return Known(site, person, person.token(site), operator, project, tuple(task["assignment"] for task in tasks))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="folkmoot-fuzz-") as folder:
        yield Path(folder)


async def run(seconds: float, seed: int) -> int:
    with _folder() as folder, daemons([folder / "peer"]) as (daemon,):
        assert command("init", "--network", "lab", "--data-dir", str(daemon.directory))[0] == 0
        port = free_port()
        serving = ("--role", "annotator", "--web-listen", f"127.0.0.1:{port}", "--sign-up", "open")
        await daemon.start("run", "--listen", "127.0.0.1:0", *serving).answers()
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(2_000)))
        said = command("tasks", "import", str(tasks), "--options", "glad,sad", "--data-dir", str(daemon.directory))
        assert said[0] == 0, said
        said = command("web", "token", "--data-dir", str(daemon.directory))
        assert said[0] == 0, said
        site = Site("127.0.0.1", port)
        project = (await trio.to_thread.run_sync(site.stats))["projects"][0]["project"]
        known = await trio.to_thread.run_sync(known_at, site, project, said[1].strip())
        started, first = time.monotonic(), await hammer(known, seconds / 4, seed)
        before = memory_mb(daemon.pid)
        seen = await hammer(known, seconds * 3 / 4, seed + 1)
        seen.problems += first.problems
        after = memory_mb(daemon.pid)
        if daemon.process is None or daemon.process.poll() is not None:
            seen.problems.append(f"the peer ended: {daemon.log[-2000:]}")
        elif (await trio.to_thread.run_sync(site.get, "/api/stats")).status != 200:
            seen.problems.append("the peer does not answer any more")
        if "Traceback" in daemon.log:
            seen.problems.append(f"the peer complained: {daemon.log[daemon.log.index('Traceback') :][:2000]}")
        if after - before > GROWTH_MB_MAX:
            seen.problems.append(f"memory grew from {before:.0f} to {after:.0f} MB")
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted((first.statuses + seen.statuses).items()))
        print(f"{first.requests + seen.requests} requests in {time.monotonic() - started:.0f} s; {statuses}")
        print(f"{seen.unanswered + first.unanswered} connections got no reply; memory {before:.0f} MB, then {after:.0f} MB")
        for problem in seen.problems:
            print(problem)
        print(f"{len(seen.problems)} failed" + (f": python -m tests.fuzz.http --seed {seed}" if seen.problems else ""))
        return 1 if seen.problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.http", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10_000), help="of what is sent (default: any)")
    options = parser.parse_args()
    return trio.run(run, options.seconds, options.seed)


if __name__ == "__main__":
    sys.exit(main())
