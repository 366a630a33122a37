"""The scenario of programs with the SDK `tinker`: its proxy, its verdicts, its liar, and the imports of its program."""

from __future__ import annotations

import argparse
import ast
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import trio

from clients.gateway.http_routes import ROUTES
from clients.pytorch.engine import read_bodies
from clients.records import ListedBody, Manifest, OptimizerStep, RequestBody, StepBrief
from protocol import codec
from protocol.errors import UserError
from scenarios import tinker
from scenarios.http_recorder import Exchange, running_recorder
from scenarios.lying_gateway import make_other_batch
from scenarios.trials import Trial
from tests.clients.runs import MODEL, body
from training.objectives.objective import Brief
from training.worker_protocol import BriefFiles

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
BASE = "/tinker/api/v1"


def request(path: str, retry: int = 0, body: bytes = b"") -> bytes:
    head = f"POST {BASE}{path} HTTP/1.1\r\nX-Stainless-Retry-Count: {retry}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.real("sockets")
async def test_the_recorder_forwards_and_records_each_exchange() -> None:
    replies, seen = [OK, BUSY, b""], list[bytes]()

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            seen.append(await stream.receive_some(1 << 16))
            await stream.send_all(replies[len(seen) - 1])

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), serve, 0)
        server = "127.0.0.1", listener.socket.getsockname()[1]
        async with running_recorder(server, BASE) as recorder, await trio.open_tcp_stream("127.0.0.1", recorder.port) as client:
            await client.send_all(request("/optim_step", body=b"x" * 99))
            assert await client.receive_some(1 << 16) == OK
            await client.send_all(request(f"/sessions/{'ab' * 12}/finish", retry=2))
            assert await client.receive_some(1 << 16) == BUSY
            await client.send_all(request("/retrieve_future"))
            assert await client.receive_some(1 << 16) == b"", "a broken connection breaks the client's"
        nursery.cancel_scope.cancel()
    assert seen[0] == request("/optim_step", body=b"x" * 99)
    assert recorder.exchanges == [
        Exchange("POST /optim_step", 200, 0),
        Exchange("POST /sessions/{id}/finish", 503, 2),
        Exchange("POST /retrieve_future", 0, 0),
    ]


@pytest.mark.parametrize(
    ("exchange", "is_killed", "problems"),
    [
        (Exchange("POST /optim_step", 200, 0), False, []),
        (Exchange("POST /optim_step", 200, 1), False, ["0 calls were broken, and 1 were retries"]),
        (Exchange("POST /optim_step", 0, 0), False, ["1 calls were broken, and 0 were retries"]),
        (Exchange("POST /optim_step", 0, 1), True, []),
        (Exchange("POST /optim_step", 400, 0), False, ["1 × 400 to POST /optim_step"]),
        (Exchange("POST /optim_step", 503, 0), True, ["1 × 503 to POST /optim_step"]),
    ],
)
def test_refused_calls_are_problems(exchange: Exchange, is_killed: bool, problems: list[str]) -> None:
    trial = Trial("planted")
    tinker.judge_calls(trial, [Exchange("POST /get_info", 200, 0), exchange], is_killed=is_killed)
    assert trial.problems == problems


@pytest.mark.parametrize("sdk", tinker.SDKS)
def test_a_route_that_the_program_did_not_call_is_a_problem(sdk: str) -> None:
    def problems(calls: list[str]) -> list[str]:
        tinker.judge_completeness(trial := Trial("planted"), [Exchange(call, 200, 0) for call in calls], sdk)
        return trial.problems

    calls = [f"{route.method} {tinker.PLACEHOLDER.sub('{id}', route.path.removeprefix(BASE))}" for route in ROUTES.routes]
    usual = [call for call in calls if not call.endswith(("/healthz", "/cancel_future"))]
    if sdk == "0.25.0":
        usual.remove("POST /sessions/{id}/finish")
    assert problems(usual) == [] == problems([call for call in usual if not call.endswith(tinker.PERIODIC)])
    usual.remove("PUT /training_runs/{id}/checkpoints/{id}/{id}/ttl")
    usual.remove("GET /checkpoints")
    path = "/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl"
    assert problems([*usual, "POST /cancel_future"]) == [
        "/cancel_future was called",
        f"{path} was not called",
        "/checkpoints was not called",
    ]


def forward(of: str, logprob: float) -> dict[str, object]:
    return {"event": "forward", "of": of, "logprobs": [[logprob, -2.0, -9.0]]}


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, []),
        ({"prompt_logprobs": [None, -1.001, -2.0], "computed": [None, -1.001, -2.0]}, ["a log-probability differs by 1.0e-03"]),
        ({"computed": [None, -1.0, -2.5]}, ["other scores"]),
        ({"tokens": [[1], [2]]}, ["samples without temperature differ"]),
    ],
)
def test_samples_of_another_model_are_a_problem(changes: dict[str, object], problems: list[str]) -> None:
    scores = [None, -1.0, -2.0]
    sampled = {"event": "sampled", "of": "base", "tokens": [[1], [1]], "prompt_logprobs": scores, "computed": scores}
    program = tinker.Program("0.38.0", Path(), [forward("saved", -5.0), sampled | changes])
    tinker.judge_samples(trial := Trial("planted"), program, {"base": forward("base", -1.0)})
    assert trial.problems == [f"sampler base: {problem}" for problem in problems]


def test_the_other_batch_of_a_lying_gateway_has_as_many_tokens_and_other_targets(tmp_path: Path) -> None:
    bodies = [codec.encode(body(seed=seed)) for seed in range(2)]
    files = dict[bytes, str]()
    for data in (*bodies, codec.encode(Manifest(tuple(ListedBody(sha256(each).digest(), len(each)) for each in bodies)))):
        (path := tmp_path / sha256(data).hexdigest()).write_bytes(data)
        files[manifest := sha256(data).digest()] = str(path)
    tokens = sum(codec.decode(RequestBody, data).tokens for data in bodies)
    optimizer = OptimizerStep(1e-3, 0.9, 0.95, 1e-12, 0.0, 0.0)
    brief = BriefFiles(codec.encode(StepBrief(3, manifest, tokens, optimizer)), files)

    def read(of: BriefFiles) -> list[RequestBody]:
        paths = {digest: Path(path) for digest, path in of.files.items()}
        return read_bodies(Brief(of.encoded, paths), MODEL.context, MODEL.vocabulary)

    (first, second), (other, same) = read(brief), read(make_other_batch(brief, tmp_path))
    assert same == second and other.tokens == first.tokens and other != first


async def test_a_missing_sdk_ends_the_scenario_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"tinker 0\.38\.0 is not installed in .*: run `make foreign`"):
        await tinker.run(argparse.Namespace(sdk=tinker.SDKS))


def test_the_program_imports_the_sdk_alone() -> None:
    tree = ast.parse(tinker.PROGRAM.read_bytes())
    named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.partition(".")[0] for name in named} - sys.stdlib_module_names == {"tinker", "torch"}


def test_make_foreign_installs_the_versions_of_the_scenario() -> None:
    makefile = (tinker.ROOT / "Makefile").read_text()
    assert f"FOREIGN := {' '.join(f'.venv-foreign-{sdk}' for sdk in tinker.SDKS)}\n" in makefile
