"""Calls that list what a key has at a gateway, and the end of a session, over runs that a test scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from clients.gateway import request_store
from clients.gateway.checkpoints import EXPIRED_MS
from clients.gateway.client_runs import ClientRuns
from clients.gateway.http_routes import ROUTES
from clients.gateway.request_store import StoredCheckpoint, StoredSampler, owner_of
from clients.gateway.rest_api import DECISION_SECONDS
from clients.ledger.clients_module import ClientRun, EndRun
from protocol.errors import UserError
from tests.clients.test_tinker_api import ANNA, BEN, REQUESTS, Caller, Json, ScriptedRuns, gateway, refusal
from web.calls import BytesReply, HeldReply, parse_fields
from web.connection_limits import REQUEST_SECONDS

BEGAN_MS = 1_800_000_000_000


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the store's clock be one second later at each look."""
    ticks = iter(range(BEGAN_MS, BEGAN_MS + 10**9, 1_000))
    monkeypatch.setattr(request_store, "wall_ms", lambda: next(ticks))
    yield


def iso(seconds: int) -> str:
    return datetime.fromtimestamp(BEGAN_MS / 1_000 + seconds, UTC).isoformat(timespec="milliseconds")


async def runs_of(program: Caller, limit: int = 20, offset: int = 0) -> Json:
    return await program.api.rest.list_training_runs(program.key, limit, offset)


async def sessions_of(program: Caller, limit: int = 20, offset: int = 0) -> Json:
    return await program.api.rest.list_sessions(program.key, limit, offset)


async def session_of(program: Caller, session: str = "s") -> Json:
    return await program.api.rest.get_session(program.key, session)


async def finish(program: Caller, session: str = "s") -> None:
    assert await program.api.close_session(program.key, session) == {}


async def create_in(program: Caller, session: str, number: int = 0) -> str:
    said = await program.api.create_model(program.key, session, number, "base", {"rank": 8}, {})
    return str((await program.result(said["request_id"]))["model_id"])


def add_sampler(program: Caller, sampler: str) -> None:
    program.api._store.add_sampler(StoredSampler(sampler, owner_of(program.key), bytes(32), 0, None))


# Lists ---------------------------------------------------------------------------------------------------------------


async def test_models_are_training_runs_the_newest_first(tmp_path: Path, seconds: None) -> None:
    async with gateway(tmp_path) as program:
        program.key = replace(ANNA, models_max=9)
        models = [await program.create_model(), await program.create_model(2), await create_in(program, "t")]
        assert models == ["s:train:0", "s:train:2", "t:train:0"]
        await program.result(await program.request_losses(models[1], 1))
        page = await runs_of(program)
        assert page["cursor"] == {"limit": 20, "offset": 0, "total_count": 3}
        assert [run["training_run_id"] for run in page["training_runs"]] == models[::-1]
        assert page["training_runs"][0] == {
            "training_run_id": "t:train:0",
            "base_model": "base",
            "model_owner": "anna",
            "is_lora": True,
            "lora_rank": 8,
            "last_request_time": iso(2),
            "corrupted": False,
        }
        assert page["training_runs"][1]["last_request_time"] == iso(3) and page["training_runs"][2]["lora_rank"] == 32
        assert await program.api.rest.get_training_run(program.key, models[2]) == page["training_runs"][0]
        second = await runs_of(program, 1, 1)
        assert [run["training_run_id"] for run in second["training_runs"]] == [models[1]]
        assert second["cursor"] == {"limit": 1, "offset": 1, "total_count": 3}
        assert (await runs_of(program, 0))["training_runs"] == (await runs_of(program, 5, 3))["training_runs"] == []


async def test_a_model_that_was_not_created_is_no_training_run(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedRuns(seconds=5.0)) as program:
        for number, arguments in ((0, {"rank": 0}), (1, {"base": "nobody"})):
            await program.fault(await program.request_model(number, **arguments))
        request = await program.request_model(2)
        assert isinstance(await program.retrieve(request), HeldReply)
        assert [run["training_run_id"] for run in (await runs_of(program))["training_runs"]] == ["s:train:2"]
        for missing in ("s:train:0", "s:train:1", "s:train:9", "s"):
            assert (await refusal(program.api.rest.get_training_run(program.key, missing))).code == "not-found"
            assert (await refusal(program.api.rest.list_checkpoints(program.key, missing))).code == "not-found"


async def test_sessions_have_their_models_and_samplers(tmp_path: Path, seconds: None) -> None:
    async with gateway(tmp_path) as program:
        assert await sessions_of(program) == {"sessions": [], "cursor": {"limit": 20, "offset": 0, "total_count": 0}}
        assert (await refusal(session_of(program))).code == "not-found"
        await program.create_model()
        add_sampler(program, "u:sample:0")
        await create_in(program, "t", 4)
        await program.create_model(1)
        add_sampler(program, "s:sample:2")
        add_sampler(program, "s:sample:11")
        page = await sessions_of(program)
        assert page == {"sessions": ["t", "u", "s"], "cursor": {"limit": 20, "offset": 0, "total_count": 3}}
        assert (await sessions_of(program, 2, 1))["sessions"] == ["u", "s"]
        assert await session_of(program) == {
            "training_run_ids": ["s:train:0", "s:train:1"],
            "sampler_ids": ["s:sample:2", "s:sample:11"],
        }
        assert await session_of(program, "t") == {"training_run_ids": ["t:train:4"], "sampler_ids": []}
        assert await session_of(program, "u") == {"training_run_ids": [], "sampler_ids": ["u:sample:0"]}


async def test_a_session_lists_its_newest_entries(tmp_path: Path, seconds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.gateway.rest_api.LISTED_MAX", 3)
    async with gateway(tmp_path) as program:
        for number in range(5):
            add_sampler(program, f"s:sample:{number}")
        assert (await session_of(program))["sampler_ids"] == ["s:sample:2", "s:sample:3", "s:sample:4"]


async def test_a_key_lists_its_own_models_and_sessions(tmp_path: Path) -> None:
    async with gateway(tmp_path) as anna:
        anna.key = ANNA
        model = await anna.create_model()
        add_sampler(anna, "s:sample:0")
        for other in (BEN, replace(ANNA, created_ms=2)):
            ben = replace(anna, key=other)
            assert (await runs_of(ben))["training_runs"] == (await sessions_of(ben))["sessions"] == []
            assert (await runs_of(ben))["cursor"]["total_count"] == (await sessions_of(ben))["cursor"]["total_count"] == 0
            for call in (
                ben.api.rest.get_training_run(other, model),
                ben.api.rest.list_checkpoints(other, model),
                session_of(ben),
            ):
                assert (await refusal(call)).code == "not-found"
            await finish(ben)
        await trio.sleep(1)
        assert anna.runs.ended == [], "a key ends its own runs alone"
        add_sampler(ben, "s:sample:1")
        assert (await sessions_of(ben))["sessions"] == (await sessions_of(anna))["sessions"] == ["s"]
        assert await session_of(ben) == {"training_run_ids": [], "sampler_ids": ["s:sample:1"]}
        assert await session_of(anna) == {"training_run_ids": [model], "sampler_ids": ["s:sample:0"]}


async def test_there_are_no_checkpoints_and_nothing_is_cancelled(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedRuns(seconds=1.0)) as program:
        rest, model = program.api.rest, await program.create_model()
        assert await rest.list_checkpoints(program.key, model) == {"checkpoints": []}
        cursor = {"limit": 100, "offset": 0, "total_count": 0}
        assert await rest.list_all_checkpoints(program.key, 100, 0) == {"checkpoints": [], "cursor": cursor}
        path = f"tinker://{model}/weights/step1"
        problem = await refusal(rest.show_weights(program.key, path))
        assert problem.code == "not-found" and problem.detail == f"no weights {path!r}: they were not saved, or they have expired"
        request = await program.request_losses(model, 1)
        for cancelled in (request, "unknown"):
            assert await program.api.cancel_future(program.key, cancelled) == {}
        assert isinstance(await program.result(request), BytesReply)


async def test_an_undecided_change_of_a_checkpoint_is_a_503_in_time_and_may_be_repeated(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        model, times, seconds = await program.create_model(), list[int](), 0.0
        path, owner = f"tinker://{model}/weights/a", owner_of(program.key)
        program.api._store.put_checkpoint(StoredCheckpoint(path, owner, model, "weights/a", b"j" * 32, 1, bytes(32), 9, 0))

        async def set_expiry(job: bytes, name: str, expires_ms: int) -> bool:
            await trio.sleep(seconds)
            times.append(expires_ms)
            return True

        program.runs.set_expiry = set_expiry  # type: ignore[attr-defined]
        rest, names = program.api.rest, (program.key, model, "weights", "a")
        for call in (lambda: rest.set_checkpoint_ttl(*names, 60), lambda: rest.delete_checkpoint(*names)):
            seconds, began = 120.0, trio.current_time()
            problem = await refusal(call())
            assert problem.code == "no-quorum" and "not decided after 30 s" in problem.detail
            assert trio.current_time() - began == pytest.approx(DECISION_SECONDS) and DECISION_SECONDS < REQUEST_SECONDS - 10
            assert [each["tinker_path"] for each in (await rest.list_checkpoints(program.key, model))["checkpoints"]] == [path]
            seconds = 0.0
            assert await call() == {}
        assert times == [60_000, EXPIRED_MS]
        assert await rest.list_checkpoints(program.key, model) == {"checkpoints": []}


@pytest.mark.parametrize(
    ("path", "limit"), [("training_runs", 20), ("checkpoints", 100), ("sessions", 20)], ids=lambda value: str(value)
)
def test_pages_have_the_sizes_of_the_sdk_unless_it_says_others(path: str, limit: int) -> None:
    (route,) = [route for route in ROUTES.routes if route.path == f"/tinker/api/v1/{path}"]
    assert parse_fields(route.query_fields, {"access_scope": "owned"}) == {"limit": limit, "offset": 0}
    assert parse_fields(route.query_fields, {"limit": "7", "offset": "3"}) == {"limit": 7, "offset": 3}


# The end of a session ------------------------------------------------------------------------------------------------


async def test_a_finished_session_ends_its_runs_after_their_last_requests(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedRuns(seconds=1.0)) as program:
        models = [await program.create_model(), await program.create_model(1), await create_in(program, "t")]
        requests = [await program.request_losses(models[0], 1), await program.request_step(models[0], 2)]
        began = trio.current_time()
        await finish(program)
        assert trio.current_time() == began and program.runs.ended == []
        await trio.sleep(1.5)
        assert program.runs.ended == [(2).to_bytes(32, "big")], "the second model has no requests"
        results = [await program.result(request) for request in requests]
        assert isinstance(results[0], BytesReply) and "metrics" in results[1]
        await trio.sleep(1.5)
        assert program.runs.ended == [(2).to_bytes(32, "big"), (1).to_bytes(32, "big")]
        await finish(program)
        await trio.sleep(5)
        assert len(program.runs.ended) == 2, "each run ends once"
        assert "this model is over, because its session was finished" in await program.fault(
            await program.request_losses(models[0], 3)
        )
        assert [await program.result(request) for request in requests] == results
        assert "metrics" in await program.result(await _step(program, models[2])), "other sessions go on"


async def _step(program: Caller, model: str) -> str:
    await program.request_losses(model, 1)
    return await program.request_step(model, 2)


async def test_results_of_a_finished_session_stay_until_they_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.gateway.model_queue.REQUESTS_KEPT", 10)
    async with gateway(tmp_path) as program:
        model = await program.create_model()
        request = await program.request_losses(model, 1, forward_only=True)
        result = await program.result(request)
        await finish(program)
        await trio.sleep(1)
        assert len(program.runs.ended) == 1 and await program.result(request) == result


async def test_the_end_of_an_unknown_session_or_of_a_failed_model_ends_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        await program.fault(await program.request_model(0, "nobody"))
        for session in ("s", "unknown"):
            await finish(program, session)
        await trio.sleep(1)
        assert program.runs.ended == []


async def test_a_finished_session_frees_the_quotas_of_its_key(tmp_path: Path) -> None:
    """Models and bytes count again only after the ends, and a quota of bytes that is used up prevents no end."""
    async with gateway(tmp_path) as program:
        program.key = replace(ANNA, models_max=2, tokens_per_minute_max=10**6)
        models = [await program.create_model(number) for number in range(2)]
        for number in range(1, 100):
            if "error" in (reply := await _outcome(program, models[0], number)):
                break
        assert "stores" in reply["error"] and program.api._store.stored_bytes(owner_of(program.key), 0) > 3_000
        assert "its quota" in await program.fault(await program.request_model(2))
        await finish(replace(program, key=replace(program.key, stored_bytes_max=1)))
        await trio.sleep(1)
        assert len(program.runs.ended) == 2
        assert await program.create_model(3) == "s:train:3"
        await program.result(await program.request_losses("s:train:3", 1))
        assert len(program.runs.passes) == number, "the last request was computed, too"


async def _outcome(program: Caller, model: str, number: int) -> Any:
    reply = await program.result(await program.request_losses(model, number, REQUESTS[2]))
    return {} if isinstance(reply, BytesReply) else reply


async def test_a_gateway_that_is_killed_before_the_end_ends_the_run_after_its_restart(tmp_path: Path) -> None:
    runs = ScriptedRuns(seconds=1.0)
    async with gateway(tmp_path, runs) as program:
        model = await program.create_model()
        request = await program.request_losses(model, 1)
        await finish(program)
    async with gateway(tmp_path, runs) as program:
        assert isinstance(await program.result(request), BytesReply)
        await trio.sleep(1.5)
        assert runs.ended == [(1).to_bytes(32, "big")]


@pytest.mark.parametrize("is_decided", [True, False])
async def test_an_end_that_is_refused_is_a_fault_only_while_the_run_is_open(is_decided: bool) -> None:
    key, runs, submitted = bytes(32), {bytes(32): ClientRun(bytes(32))}, list[object]()

    async def submit(kind: str, content: object, seconds_max: float) -> None:
        assert seconds_max == math.inf
        submitted.append((kind, content))
        if is_decided:
            runs.clear()
        raise UserError("no run 00000000, or it is over")

    state = SimpleNamespace(module_state=lambda of: SimpleNamespace(runs=runs))
    gateway_runs = ClientRuns(SimpleNamespace(state=state, submit_transaction=submit))  # type: ignore[arg-type]
    if is_decided:
        await gateway_runs.end_run(key)
        await gateway_runs.end_run(key)  # The run is over, so nothing is submitted.
    else:
        with pytest.raises(UserError, match="no run"):
            await gateway_runs.end_run(key)
    assert submitted == [("client/end", EndRun(key))]
