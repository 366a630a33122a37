"""The gateway's API and its queues over runs that a test scripts, on virtual time."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from clients.gateway import model_queue, request_store, tinker_api
from clients.gateway.client_runs import LossReport
from clients.gateway.http_routes import ROUTES
from clients.gateway.model_queue import GAP_SECONDS, CreateModel
from clients.gateway.request_store import (
    END_NUMBER,
    ENDED_KEPT_MS,
    RequestKind,
    RequestStore,
    StoredCheckpoint,
    StoredRequest,
    StoredSampler,
    owner_of,
)
from clients.gateway.tinker_api import LOCAL_PROGRAMS, TinkerApi
from clients.ledger.clients_module import StepOutcome
from clients.records import BODY_BYTES_MAX, OptimizerStep, RequestBody
from features.api_keys import ApiKeys
from protocol import codec
from protocol.errors import StorageError, UserError
from storage.api_key_store import ApiKey, ApiKeyStore
from tests.clients.programs import gradient_request, read_losses
from tests.clients.runs import BASE_JOB, body, client_spec
from web.calls import BytesReply, Credentials, HeldReply, HttpProblem
from web.routes import Route
from web.site import Site, SiteHandlers

Json = dict[str, Any]
HOST, STRANGER = "127.0.0.1", "192.0.2.7"
REQUESTS = [body(examples=1 + seed % 3, seed=seed) for seed in range(8)]
STEP = {"learning_rate": 0.5}


@dataclass
class ScriptedRuns:
    """Runs whose steps are decided after `seconds`. Each loss is the number of the pass."""

    seconds: float = 0.0
    passes: list[tuple[bytes, RequestBody, bool]] = field(default_factory=list)
    steps: list[tuple[bytes, int, list[bytes]]] = field(default_factory=list)  # decided ones: run, number, bodies
    opened: int = 0
    ended: list[bytes] = field(default_factory=list)
    fault: Exception | None = None  # of the next pass or step
    places: int = 64  # for unfinished runs

    time_ms: int = 0

    async def open_run(self, base: str, *, rank: int, seed: int, **flags: bool) -> bytes:
        await trio.sleep(self.seconds)
        if base != "base":
            raise UserError(f"base_model {base!r}: no such job")
        if self.opened - len(self.ended) >= self.places:
            raise UserError("no place is left")
        self.opened += 1
        return self.opened.to_bytes(32, "big")

    async def compute_losses(self, key: bytes, data: bytes, *, backward: bool) -> LossReport:
        await trio.sleep(self.seconds)
        self._fail()
        request = codec.decode(RequestBody, data, BODY_BYTES_MAX)
        self.passes.append((key, request, backward))
        return LossReport(float(len(self.passes)), tuple(np.zeros(each.length, "<f4").tobytes() for each in request.examples))

    async def wait_for_turn(self, key: bytes) -> int:
        return sum(run == key for run, _, _ in self.steps)

    async def take_step(
        self, key: bytes, number: int, bodies: Sequence[Callable[[], bytes]], optimizer: OptimizerStep
    ) -> StepOutcome:
        if not any((run, step) == (key, number) for run, step, _ in self.steps):
            assert number == await self.wait_for_turn(key), "the ledger refuses another step than the next one"
            self._fail()
            self.steps.append((key, number, [read() for read in bodies]))
        await trio.sleep(self.seconds)
        return StepOutcome(number, number + 1, True)

    async def end_unused_runs(self, used: Set[bytes]) -> None:
        for key in sorted({run(number) for number in range(1, self.opened + 1)} - used - set(self.ended)):
            await self.end_run(key)

    def is_unfinished(self, key: bytes) -> bool:
        return key not in self.ended

    async def end_run(self, key: bytes) -> None:
        await trio.sleep(self.seconds)
        self._fail()
        self.ended.append(key)

    def _fail(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault


@dataclass
class Caller:
    """A program that calls the API without HTTP."""

    api: TinkerApi
    runs: ScriptedRuns
    key: ApiKey = LOCAL_PROGRAMS

    async def request_model(self, number: int = 0, base: str = "base", optimizer: Json | None = None, **lora: Any) -> str:
        said = await self.api.create_model(self.key, "s", number, base, lora, optimizer or {})
        return str(said["request_id"])

    async def create_model(self, number: int = 0) -> str:
        reply = await self.result(await self.request_model(number))
        return str(reply["model_id"])

    async def request_losses(self, model: str, number: int, request: RequestBody = REQUESTS[0], **fields: Any) -> str:
        said = await self.api.forward_backward(self.key, gradient_request(model, number, request, **fields))
        return str(said["request_id"])

    async def request_step(self, model: str, number: int, terms: Json = STEP, other: Json | None = None) -> str:
        return str((await self.api.optim_step(self.key, model, number, terms, other or {}))["request_id"])

    async def retrieve(self, request: str) -> Any:
        return await self.api.retrieve_future(self.key, request)

    async def result(self, request: str) -> Any:
        with trio.fail_after(1_000):
            while isinstance(reply := await self.retrieve(request), HeldReply):  # noqa: ASYNC110
                await trio.sleep(0.1)
            return reply

    async def fault(self, request: str) -> str:
        reply = await self.result(request)
        assert not isinstance(reply, BytesReply) and reply.keys() == {"error", "category"} and reply["category"] == "user", reply
        return str(reply["error"])


@asynccontextmanager
async def gateway(folder: Path, runs: ScriptedRuns | None = None) -> AsyncIterator[Caller]:
    """Run the API on the database in a folder. It ends as after kill -9: nothing is finished."""
    runs = runs or ScriptedRuns()
    keys = ApiKeys(ApiKeyStore(folder / "keys.sqlite"))
    peer = SimpleNamespace(state=SimpleNamespace(jobs=SimpleNamespace(jobs={})))
    api = TinkerApi(SimpleNamespace(folder=folder, peer=peer, api_keys=keys))
    api._runs = api.rest.runs = api._checkpoints._runs = runs  # type: ignore[assignment, misc]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.run_tasks)
        yield Caller(api, runs)
        nursery.cancel_scope.cancel()


async def refusal(call: Any) -> HttpProblem:
    with pytest.raises(HttpProblem) as caught:
        await call
    return caught.value


# One result a number -------------------------------------------------------------------------------------------------


async def test_a_repeated_request_has_the_same_future_and_result_also_with_another_body(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        model = await program.create_model()
        first = await program.request_losses(model, 1, REQUESTS[1])
        result = await program.result(first)
        assert await program.request_losses(model, 1, REQUESTS[1]) == first
        assert await program.request_losses(model, 1, REQUESTS[2]) == first
        assert await program.request_step(model, 1) == first
        assert await program.result(first) == result
        assert [request for _, request, _ in program.runs.passes] == [REQUESTS[1]]
        step = await program.result(await program.request_step(model, 2))
        assert await program.result(await program.request_step(model, 2, {"learning_rate": 0.1})) == step
        assert len(program.runs.steps) == 1 and step["metrics"] == {"round:max": 1, "refused_rounds:max": 0}


async def test_reordered_requests_are_one_gradient_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        model = await program.create_model()
        began = trio.current_time()
        requests = {number: await program.request_losses(model, number, REQUESTS[number]) for number in (3, 4, 1)}
        await trio.sleep(1)
        requests |= {5: await program.request_step(model, 5), 2: await program.request_losses(model, 2, REQUESTS[2])}
        for number in (1, 2, 3, 4):
            assert read_losses((await program.result(requests[number])).data)[0] == number
        await program.result(requests[5])
        assert trio.current_time() - began < GAP_SECONDS / 2
        assert [request for _, request, _ in program.runs.passes] == REQUESTS[1:5]
        ((_, _, bodies),) = program.runs.steps
        assert bodies == [codec.encode(request) for request in REQUESTS[1:5]]


async def test_numbers_that_are_never_sent_hold_up_the_next_one_once(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        model = await program.create_model()
        began = trio.current_time()
        far = 2**31 - 2
        await program.result(await program.request_losses(model, far))
        assert GAP_SECONDS <= trio.current_time() - began < GAP_SECONDS + 1
        assert "metrics" in await program.result(await program.request_step(model, far + 1))
        assert trio.current_time() - began < GAP_SECONDS + 2
        assert (await refusal(program.retrieve(f"{model}#5"))).code == "not-found", "nobody sent number 5"


async def test_a_late_request_fails_and_leaves_the_gradient_as_it_is(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        model = await program.create_model()
        for number in (1, 3):
            await program.result(await program.request_losses(model, number, REQUESTS[number]))
        late = await program.fault(await program.request_step(model, 2))
        assert late == "request 2 arrived after request 3 was computed: requests are computed in the order of their numbers"
        await program.result(await program.request_step(model, 4))
        ((_, _, bodies),) = program.runs.steps
        assert bodies == [codec.encode(REQUESTS[number]) for number in (1, 3)]


async def test_doubled_reordered_and_altered_requests_have_one_result_a_number(tmp_path: Path) -> None:
    draw = Random(48)
    seen: dict[str, Any] = {}
    async with gateway(tmp_path) as program:
        program.api._store._database.execute("PRAGMA synchronous=OFF")  # waiting for the disk would take most of the time
        models = [await program.create_model(number) for number in range(3)]
        sent: dict[tuple[str, int], int] = {}
        newest = dict.fromkeys(models, 0)
        for _ in range(2_000):
            model = draw.choice(models)
            if draw.random() < 0.04:  # new numbers, in any order
                parts = draw.sample(range(newest[model] + 1, newest[model] + 4), 3)
                newest[model] += 3
            else:
                parts = [draw.randint(1, max(1, newest[model]))]
            for number in parts:
                kind = draw.choice(("gradient", "step", "forward", "invalid")) if number > 1 else "gradient"
                if kind == "step":
                    request = await program.request_step(model, number, {"learning_rate": draw.choice((0.1, "1", None, 10**400))})
                else:
                    fields = {"forward_only": kind == "forward"} | ({"loss_fn": "no"} if kind == "invalid" else {})
                    request = await program.request_losses(model, number, draw.choice(REQUESTS), **fields)
                assert request == f"{model}#{number}"
                sent[model, number] = sent.get((model, number), 0) + 1
                if isinstance(reply := await program.retrieve(request), HeldReply):
                    continue
                assert seen.setdefault(request, reply) == reply
        for model, number in sent:
            request = f"{model}#{number}"
            reply = await program.result(request)
            assert seen.setdefault(request, reply) == reply
    assert len(seen) == len(sent) > 140 and sum(sent.values()) > 2_000
    faults = [reply["error"] for reply in seen.values() if isinstance(reply, dict) and "error" in reply]
    assert not any("internal" in fault for fault in faults)
    assert len(program.runs.passes) == sum(isinstance(reply, BytesReply) for reply in seen.values()) > 30
    assert len(program.runs.steps) == sum(isinstance(reply, dict) and "metrics" in reply for reply in seen.values()) > 1


# Faults of clients ---------------------------------------------------------------------------------------------------

LONG = "x" * 65
MODELS: list[tuple[Json, str]] = [  # arguments of create_model, and the fault
    ({"base": "nobody"}, "base_model 'nobody': no such job"),
    ({"base": ""}, "base_model '' has 0 characters: a name or id of a job has 1 to 64"),
    ({"base": LONG}, "has 65 characters: a name or id of a job has 1 to 64"),
    ({"rank": 0}, "rank must be a whole number in 1..1024, not 0"),
    ({"rank": 2**70}, "rank must be a whole number in 1..1024, not 1180591620717411303424"),
    ({"rank": True}, "rank must be a whole number in 1..1024, not True"),
    ({"rank": None}, "rank must be a whole number in 1..1024, not None"),
    ({"seed": 1.5}, "seed must be a whole number, not 1.5"),
    ({"optimizer": {"type": "dimuon", "version": 1}}, "optimizer 'dimuon' is not supported: use 'adamw'"),
    ({"optimizer": {"type": ["\ud800"]}}, "optimizer ['\\ud800'] is not supported: use 'adamw'"),
]


@pytest.mark.parametrize(("arguments", "fault"), MODELS)
async def test_a_model_that_cannot_be_created_is_a_failed_future(tmp_path: Path, arguments: Json, fault: str) -> None:
    async with gateway(tmp_path) as program:
        request = await program.request_model(0, **arguments)
        assert request == "s:train:0#0" and fault in await program.fault(request)
        assert (await refusal(program.api.get_info(program.key, "s:train:0"))).code == "not-found"
        assert "was not created" in await program.fault(await program.request_losses("s:train:0", 1))
        assert await program.create_model(1) == "s:train:1" and program.runs.opened == 1


@pytest.mark.parametrize("seed", [None, 0, -1, 2**53, 2**70])
async def test_each_whole_number_is_a_seed(tmp_path: Path, seed: int | None) -> None:
    async with gateway(tmp_path) as program:
        assert (await program.result(await program.request_model(0, seed=seed)))["model_id"] == "s:train:0"


STEPS: list[tuple[Json, Json, str]] = [  # adam_params, optimizer_params and the fault
    ({"learning_rate": None}, {}, "learning_rate must be a number, not None"),
    ({"learning_rate": "1"}, {}, "learning_rate must be a number, not '1'"),
    ({"learning_rate": float("nan")}, {}, "learning_rate must be in 0..10, not nan"),
    ({"eps": 0}, {}, "eps must be in 1e-15..1, not 0"),
    ({"grad_clip_norm": -1}, {}, "grad_clip_norm must be in 0..1e+09, not -1"),
    ({"learning_rate": 10**400}, {}, "learning_rate is too large: 1000000000000"),
    ({"beta2": -(10**309)}, {}, "beta2 is too large: -10000000"),
    ({"beta1": 1}, {}, "beta1 must be at least 0 and below 1, not 1"),
    ({"eps": True}, {}, "eps must be a number, not True"),
    ({}, {"type": "dimuon", "learning_rate": 0.1}, "optimizer 'dimuon' is not supported: use AdamParams"),
]


@pytest.mark.parametrize(("terms", "other", "fault"), STEPS)
async def test_an_invalid_step_is_a_failed_future_and_keeps_the_gradient(
    tmp_path: Path, terms: Json, other: Json, fault: str
) -> None:
    async with gateway(tmp_path) as program:
        model = await program.create_model()
        await program.request_losses(model, 1)
        assert fault in await program.fault(await program.request_step(model, 2, terms, other))
        assert "metrics" in await program.result(await program.request_step(model, 3))


async def test_a_step_without_a_gradient_is_refused_in_its_future(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        model, fault = await program.create_model(), "this step has no gradient: call forward_backward before optim_step"
        assert await program.fault(await program.request_step(model, 1)) == fault
        await program.request_losses(model, 2, forward_only=True)
        assert await program.fault(await program.request_step(model, 3)) == fault
        await program.request_losses(model, 4, loss_fn="unknown")
        assert await program.fault(await program.request_step(model, 5)) == fault
        await program.request_losses(model, 6)
        assert "metrics" in await program.result(await program.request_step(model, 7))
        assert await program.fault(await program.request_step(model, 8)) == fault, "a gradient is used once"


@pytest.mark.parametrize(
    ("fault", "error", "category"),
    [
        (UserError("token 300"), "token 300", "user"),
        (StorageError("no disk"), "no disk", "server"),
        (OSError("odd"), "internal error of the gateway: its log has the details", "server"),
    ],
)
async def test_a_fault_of_one_request_is_its_own(tmp_path: Path, fault: Exception, error: str, category: str) -> None:
    async with gateway(tmp_path, ScriptedRuns(fault=fault)) as program:
        model = await program.create_model()
        assert await program.result(await program.request_losses(model, 1)) == {"error": error, "category": category}
        await program.result(await program.request_losses(model, 2))
        program.runs.fault = fault
        assert (await program.result(await program.request_losses(model, 3)))["category"] == category
        assert "metrics" in await program.result(await program.request_step(model, 4))


# Futures and models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_id", ["", "#", "s:train:0#7", "s:train:0#-1", "s:train:0#²", "s:train:9#0", "x", "s:train:0#" + "9" * 5_000]
)
async def test_an_unknown_request_is_not_found(tmp_path: Path, request_id: str) -> None:
    """The status 410 would be an error of the connection in the client's loop: the SDK expects it for samples alone."""
    async with gateway(tmp_path) as program:
        await program.create_model()
        problem = await refusal(program.retrieve(request_id))
        assert problem.code == "not-found" and problem.detail.startswith("no request") and len(problem.detail) < 200


async def test_lost_samples_are_gone(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        program.api._store.add_sampler(StoredSampler("s:sample:0", owner_of(program.key), bytes(32), 0))
        assert (await refusal(program.retrieve("s:sample:0#7"))).code == "gone"
        assert (await refusal(program.retrieve("s:sample:1#7"))).code == "not-found"


async def test_a_model_is_described_as_it_was_loaded(tmp_path: Path) -> None:
    """A checkpoint may have another base and another rank than the model that loads it was created with."""
    async with gateway(tmp_path) as program:
        jobs, rest, loaded = program.api._peer.state.jobs.jobs, program.api.rest, b"l" * 32
        model = await program.create_model()
        jobs[loaded] = SimpleNamespace(spec=client_spec(rank=8, train_mlp=False).encode())
        jobs[BASE_JOB] = SimpleNamespace(name="other")
        program.api._store.set_job(model, loaded, 0)
        info = await program.api.get_info(program.key, model)
        assert (info["model_name"], info["lora_rank"], info["model_data"]["model_name"]) == ("other", 8, "other")
        (listed,) = (await rest.list_training_runs(program.key, 20, 0))["training_runs"]
        assert (listed["base_model"], listed["lora_rank"]) == ("other", 8)
        assert await rest.get_training_run(program.key, model) == listed
        path = f"tinker://{model}/weights/a"
        program.api._store.put_checkpoint(
            StoredCheckpoint(path, owner_of(program.key), model, "weights/a", loaded, 1, bytes(32), 9, 0)
        )
        weights = await rest.show_weights(program.key, path)
        assert (weights["base_model"], weights["lora_rank"]) == ("other", 8)
        assert (weights["train_attn"], weights["train_mlp"], weights["train_unembed"]) == (True, False, True)
        await program.api.load_weights(program.key, path, True, None, None, "s", 1)
        creation = codec.decode(CreateModel, program.api._store.read_payload("s:train:1", 0))
        assert creation == CreateModel("other", 8, 7, True, False, True, path, True)
        del jobs[loaded]
        assert (await refusal(rest.show_weights(program.key, path))).code == "not-found"
        request = await program.api.load_weights(program.key, path, True, None, None, "s", 2)
        assert "the network has deleted their run" in await program.fault(request["request_id"])
        assert (await program.api.get_info(program.key, model))["lora_rank"] == 32, "the run is over and deleted"


async def test_a_model_is_created_once_also_by_calls_at_the_same_time(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedRuns(seconds=1.0)) as program:
        said: list[str] = []

        async def create() -> None:
            said.append(await program.request_model(0))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(create)
        assert set(said) == {"s:train:0#0"}
        assert await program.result(said[0]) == {"type": "create_model", "model_id": "s:train:0"}
        assert await program.request_model(0, rank=8) == said[0]
        await program.result(await program.request_losses("s:train:0", 1))
        assert program.runs.opened == 1 and len(program.runs.passes) == 1
        info = await program.api.get_info(program.key, "s:train:0")
        assert (info["model_id"], info["model_name"], info["lora_rank"], info["model_data"]["model_name"]) == (
            "s:train:0", "base", 32, "base",
        )  # fmt: skip


async def test_a_future_is_held_until_its_queue_announces_it(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedRuns(seconds=2.0)) as program:
        announced: list[str] = []
        program.api.held.announce = announced.append  # type: ignore[assignment, method-assign]
        model = await program.create_model()
        request = await program.request_losses(model, 1)
        held = await program.retrieve(request)
        assert held == HeldReply(request, {"type": "try_again", "request_id": request, "queue_state": "active"})
        assert request not in announced
        await trio.sleep(3)
        assert announced == [f"{model}#0", request] and isinstance(await program.retrieve(request), BytesReply)


# Restarts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
async def test_a_killed_gateway_finishes_each_request_once(tmp_path: Path, seconds: float) -> None:
    runs = ScriptedRuns(seconds=1.0)
    async with gateway(tmp_path, runs) as program:
        requests = [await program.request_model()]
        model = "s:train:0"
        for number in (1, 2, 4, 5):
            requests.append(await program.request_losses(model, number, REQUESTS[number]))
            if number in (2, 5):
                requests.append(await program.request_step(model, number + 1))
        await trio.sleep(seconds)
        before = {request: await program.retrieve(request) for request in requests}
    async with gateway(tmp_path, runs) as program:
        after = {request: await program.result(request) for request in requests}
    assert [number for _, number, _ in runs.steps] == [0, 1], "each step is requested once"
    assert [len(bodies) for _, _, bodies in runs.steps] == [2, 2]
    for request, reply in before.items():
        assert isinstance(reply, HeldReply) or after[request] == reply
    assert all("error" not in reply for reply in after.values() if isinstance(reply, dict))


async def test_a_queue_runs_only_while_its_model_has_requests(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        models = [await program.create_model(number) for number in range(3)]
        for number in (1, 2):
            await program.result(await program.request_losses(models[0], number))
        await trio.testing.wait_all_tasks_blocked()
        assert not program.api._queues
        request = await program.request_losses(models[1], 2)  # number 1 is missing
        await trio.testing.wait_all_tasks_blocked()
        assert list(program.api._queues) == [models[1]]
    async with gateway(tmp_path) as program:
        assert isinstance(await program.result(request), BytesReply)


async def test_a_request_that_comes_while_its_queue_looks_for_one_is_computed(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        model, store = await program.create_model(), program.api._store
        find_pending, is_late = store.find_pending, False

        def find_before_it_comes(model: str) -> StoredRequest | None:
            nonlocal is_late
            found = find_pending(model)
            if found is None and not is_late:
                is_late = store.add_request(model, 2, RequestKind.INVALID, b"late")
                program.api._wake_queue(model)
            return found

        store.find_pending = find_before_it_comes  # type: ignore[method-assign]
        await program.result(await program.request_losses(model, 1))
        await trio.testing.wait_all_tasks_blocked()
        assert is_late and not program.api._queues and await program.fault(f"{model}#2") == "late"


@pytest.mark.parametrize("is_stored", [False, True], ids=["opened", "stored"])
async def test_a_gateway_that_is_killed_while_it_opens_a_run_leaves_no_other_run(tmp_path: Path, is_stored: bool) -> None:
    runs = ScriptedRuns(places=2)
    async with gateway(tmp_path, runs) as program:
        models = [await program.create_model()]
        open_run, store = runs.open_run, program.api._store

        async def open_and_die(*arguments: Any, **more: Any) -> bytes:
            key = await open_run(*arguments, **more)
            if is_stored:
                store.set_job(models[1], key, 0)
            await trio.sleep_forever()
            return key

        runs.open_run = open_and_die  # type: ignore[method-assign]
        models.append("s:train:1")
        await program.request_model(1)
        await trio.testing.wait_all_tasks_blocked()
    runs.open_run = open_run  # type: ignore[method-assign]
    async with gateway(tmp_path, runs) as program:
        await program.result(f"{models[1]}#0")
        jobs = [program.api._store.find_model(model) for model in models]
    assert [job.job for job in jobs if job] == ([run(1), run(2)] if is_stored else [run(1), run(3)])
    assert runs.ended == ([] if is_stored else [run(2)])


async def test_a_load_that_a_killed_gateway_has_made_is_not_repeated(tmp_path: Path) -> None:
    runs = ScriptedRuns()

    async def continue_run(saved: object, *, with_moments: bool) -> bytes:
        return await runs.open_run("base", rank=8, seed=0)

    runs.continue_run = continue_run  # type: ignore[attr-defined]
    async with gateway(tmp_path, runs) as program:
        model, path = await program.create_model(), "tinker://s:train:0/weights/a"
        stored = StoredCheckpoint(path, owner_of(program.key), model, "weights/a", run(1), 1, bytes(32), 9, 5_000)
        program.api._store.put_checkpoint(stored)
        await program.result(await program.request_losses(model, 1))
        end_unused_runs = runs.end_unused_runs

        async def die(used: Set[bytes]) -> None:
            await trio.sleep_forever()

        runs.end_unused_runs = die  # type: ignore[method-assign]
        loaded = (await program.api.load_weights(program.key, path, True, model, 2, None, None))["request_id"]
        await trio.testing.wait_all_tasks_blocked()
    runs.end_unused_runs, runs.time_ms = end_unused_runs, 9_000  # type: ignore[method-assign]
    async with gateway(tmp_path, runs) as program:
        assert (await program.result(loaded))["path"] == path and runs.opened == 2 and runs.ended == [run(1)]
        assert "no gradient" in await program.fault(await program.request_step(model, 3)), "that one was of the former model"


async def test_many_waiting_requests_of_a_model_are_refused_by_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK repeats such a request. A number before a waiting one is accepted longer, since it holds up the others."""
    monkeypatch.setattr(tinker_api, "PENDING_MAX", 4)
    async with gateway(tmp_path, ScriptedRuns(seconds=60.0)) as program:
        model = model_of(await program.request_model())
        for number in (10, 12, 14):
            await program.request_step(model, number)
        problem = await refusal(program.request_step(model, 15))
        assert (problem.code, problem.retry_after) == ("too-many", 1) and "4 requests of 's:train:0'" in problem.detail
        for number in (11, 9, 8, 7):
            await program.request_step(model, number)
        assert (await refusal(program.request_step(model, 6))).code == "too-many"
        await program.api.close_session(program.key, "s")
        await trio.sleep(600.0)
        await program.request_step(model, 15)


def model_of(request: str) -> str:
    return request.partition("#")[0]


def run(number: int) -> bytes:
    """Return the id of the run that was opened as this one, from 1."""
    return number.to_bytes(32, "big")


# Keys ----------------------------------------------------------------------------------------------------------------

ANNA, BEN = ApiKey("anna", 1, 2, 4_000, 100), ApiKey("ben", 1, 2, 4_000, 100)


async def test_models_belong_to_one_key(tmp_path: Path) -> None:
    async with gateway(tmp_path) as anna:
        anna.key = ANNA
        model = await anna.create_model()
        request = await anna.request_losses(model, 1)
        ben = replace(anna, key=BEN)
        for call in (
            ben.request_model(0),
            ben.request_losses(model, 2),
            ben.request_step(model, 2),
            ben.retrieve(request),
            ben.retrieve(f"{model}#77"),
            ben.api.get_info(BEN, model),
        ):
            assert (await refusal(call)).code == "not-found"
        later = replace(anna, key=replace(ANNA, created_ms=2))
        assert (await refusal(later.retrieve(request))).code == "not-found", "a new key of an old name has other models"
        assert isinstance(await anna.result(request), BytesReply) and len(anna.runs.passes) == 1


@pytest.mark.real("a thread")
async def test_keys_are_read_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of keys may wait for the disk, and Trio's thread decides blocks."""
    threads, find_key = set[int](), ApiKeys.find_key

    def find(keys: ApiKeys, secret: str) -> ApiKey | None:
        threads.add(threading.get_ident())
        return find_key(keys, secret)

    monkeypatch.setattr(ApiKeys, "find_key", find)
    async with gateway(tmp_path) as program:
        await program.api.authorize(Credentials("tml-any", HOST, True))
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("route", ROUTES.routes, ids=lambda route: route.operation)
async def test_no_call_serves_a_stranger(tmp_path: Path, route: Route) -> None:
    """The check is that of all routes, so that a new one cannot lack it."""
    desk: Any = SimpleNamespace(folder=tmp_path, peer=None, api_keys=ApiKeys(ApiKeyStore(tmp_path / "keys.sqlite")))
    answer = SiteHandlers(Site((ROUTES,), ()), desk).bind(route)
    assert (await refusal(answer(Credentials("tml-any", STRANGER, False), {}))).code == "unauthorized"


async def test_the_quota_of_models_does_not_count_failed_ones(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        program.key = ANNA
        assert "rank" in await program.fault(await program.request_model(0, rank=0))
        assert "nobody" in await program.fault(await program.request_model(1, "nobody"))
        for number in (2, 3):
            await program.create_model(number)
        assert "the key 'anna' has 2 models, its quota" in await program.fault(await program.request_model(4))
        assert await program.request_model(3) == "s:train:3#0", "a repeated call is no further model"
        assert "model_id" in await program.result("s:train:3#0")
        assert program.runs.opened == 2


async def test_creations_at_the_same_time_do_not_exceed_the_quota_of_models(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        program.key, replies = ANNA, dict[int, Any]()

        async def create(number: int) -> None:
            replies[number] = await program.result(await program.request_model(number))

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(create, number)
        assert sum("model_id" in reply for reply in replies.values()) == program.runs.opened == ANNA.models_max == 2
        assert sum("its quota" in reply.get("error", "") for reply in replies.values()) == 4


async def test_a_run_that_the_network_has_ended_frees_its_place(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        program.key = ANNA
        for number in range(2):
            await program.create_model(number)
        assert "its quota" in await program.fault(await program.request_model(2))
        program.runs.ended.append(run(1))
        assert await program.create_model(3) == "s:train:3"


async def test_requests_at_the_same_time_do_not_exceed_the_quota_of_bytes(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedRuns(seconds=5.0)) as program:
        program.key = replace(ANNA, tokens_per_minute_max=1 << 30)
        model = await program.create_model()
        async with trio.open_nursery() as nursery:
            for number in range(1, 30):
                nursery.start_soon(program.request_losses, model, number, REQUESTS[2])
        kinds = [kind for (kind,) in program.api._store._database.execute("SELECT kind FROM requests WHERE number > 0")]
        size = len(codec.encode(REQUESTS[2]))
        assert kinds.count("gradient") == ANNA.stored_bytes_max // size - 1 > 0, "the rest is for the creation"
        assert kinds.count("invalid") == 29 - kinds.count("gradient")


async def test_models_that_are_over_leave_a_bounded_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_api, "OLD_MODELS_MAX", 2)
    ticks = iter(range(0, 10 * ENDED_KEPT_MS, ENDED_KEPT_MS // 60))
    monkeypatch.setattr(request_store, "wall_ms", lambda: next(ticks))
    async with gateway(tmp_path) as program:
        store = program.api._store
        for number in range(3):
            await program.create_model(number)
            await program.result(await program.request_losses(f"s:train:{number}", 1))
        checkpoint = StoredCheckpoint(
            "tinker://s:train:0/weights/w", "@0", "s:train:0", "weights/w", run(1), 0, b"", 9, 3 * ENDED_KEPT_MS
        )
        store.put_checkpoint(checkpoint)
        await program.api.close_session(program.key, "s")
        await program.result(f"s:train:2#{END_NUMBER}")
        assert store.find_outcome("s:train:2", 1) is not None, "a client may wait for the results of an ended model"
        program.runs.time_ms = 50 * (ENDED_KEPT_MS // 60)
        await program.fault(await program.request_model(9, "nobody"))
        assert store.find_outcome("s:train:2", 1) is not None, "another program may wait for these results"
        program.runs.time_ms = 2 * ENDED_KEPT_MS
        for number in range(3, 7):
            assert "nobody" in await program.fault(await program.request_model(number, "nobody"))
        left = [model for (model,) in store._database.execute("SELECT model FROM models ORDER BY model")]
        # The last one was added before it failed. The first one has a checkpoint.
        assert left == ["s:train:0", "s:train:4", "s:train:5", "s:train:6"]
        assert store.find_outcome("s:train:0", 1) is None and store.find_outcome("s:train:1", 0) is None
        program.runs.time_ms = 3 * ENDED_KEPT_MS
        await program.create_model(8)
        assert store.find_checkpoint(checkpoint.path) is None


def test_expired_checkpoints_are_not_counted(tmp_path: Path) -> None:
    store = RequestStore(tmp_path)
    for name, expires_ms in (("a", 0), ("b", 5)):
        store.put_checkpoint(StoredCheckpoint(name, "anna", "m", "weights/w", bytes(32), 0, b"", 100, expires_ms))
    assert [store.stored_bytes("anna", time_ms) for time_ms in (4, 5)] == [200, 100]


async def test_a_request_that_is_refused_by_http_spends_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_api, "PENDING_MAX", 1)
    async with gateway(tmp_path, ScriptedRuns(seconds=5.0)) as program:
        program.key = replace(ANNA, tokens_per_minute_max=2 * REQUESTS[1].tokens, stored_bytes_max=1 << 20)
        model = await program.create_model()
        await program.request_losses(model, 1, REQUESTS[1])
        for _ in range(8):
            assert (await refusal(program.request_losses(model, 2, REQUESTS[1]))).code == "too-many"
        await trio.sleep(6)
        assert isinstance(await program.result(await program.request_losses(model, 2, REQUESTS[1])), BytesReply)


async def test_late_requests_leave_a_bounded_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_queue, "REQUESTS_KEPT", 8)
    async with gateway(tmp_path) as program:
        model = await program.create_model()
        for number in range(1_000, 900, -1):
            await program.fault(await program.request_step(model, number))
        ((rows,),) = program.api._store._database.execute("SELECT COUNT(*) FROM requests")
        assert rows == 9, "and the creation"


async def test_a_request_spends_its_tokens_once(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        request, quota = REQUESTS[1], 2 * REQUESTS[1].tokens
        program.key = replace(ANNA, tokens_per_minute_max=quota, stored_bytes_max=1 << 20)
        model = await program.create_model()
        for number in (1, 1, 1, 2):
            assert isinstance(await program.result(await program.request_losses(model, number, request)), BytesReply)
        fault = await program.fault(await program.request_losses(model, 3, request))
        assert f"used up its quota of {quota} tokens a minute" in fault
        await trio.sleep(60)
        assert isinstance(await program.result(await program.request_losses(model, 4, request)), BytesReply)


async def test_a_step_is_allowed_beyond_the_quota_of_bytes_and_frees_those_of_its_gradients(tmp_path: Path) -> None:
    request = body(examples=40)
    async with gateway(tmp_path) as program:
        program.key = replace(ANNA, stored_bytes_max=1 << 20, tokens_per_minute_max=1 << 30)
        model = await program.create_model()
        for number in (1, 2, 3):
            assert isinstance(await program.result(await program.request_losses(model, number, request)), BytesReply)
        stored = program.api._store.stored_bytes("anna@1", 0)
        program.key = replace(program.key, stored_bytes_max=stored + 10)
        assert f"the key 'anna' stores {stored:,} bytes, its quota" in await program.fault(
            await program.request_losses(model, 4, request)
        )
        assert "metrics" in await program.result(await program.request_step(model, 5))
        assert program.api._store.stored_bytes("anna@1", 0) < stored - 2 * len(codec.encode(request))
        assert isinstance(await program.result(await program.request_losses(model, 6, request)), BytesReply)
        assert isinstance(await program.result(f"{model}#1"), BytesReply), "results stay"
        ((_, _, bodies),) = program.runs.steps
        assert len(bodies) == 3


async def test_old_results_are_dropped_and_undecided_gradients_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_queue, "REQUESTS_KEPT", 8)
    store = RequestStore(tmp_path)
    async with gateway(tmp_path) as program:
        model = await program.create_model()
        await program.result(await program.request_losses(model, 1, REQUESTS[1]))
        for number in range(2, 13):
            await program.result(await program.request_losses(model, number, REQUESTS[0], forward_only=True))
        assert store.find_outcome(model, 1) is not None and store.find_outcome(model, 2) is None
        await program.result(await program.request_step(model, 13))
        ((_, _, bodies),) = program.runs.steps
        assert bodies == [codec.encode(REQUESTS[1])]
        assert store.find_outcome(model, 1) is None
        assert (await program.api.get_info(program.key, model))["model_name"] == "base"
    store.close()
