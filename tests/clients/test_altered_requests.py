"""Requests of all kinds that are repeated, altered and damaged: one result a number, and no failure of the gateway itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import trio

from clients.gateway.checkpoints import checkpoint_path
from clients.gateway.request_store import StoredSampler, owner_of
from ledger.jobs import ModelReference
from tests.clients.programs import gradient_request
from tests.clients.test_tinker_api import REQUESTS, Caller, ScriptedRuns, gateway
from tests.clients.test_wire import changed
from web.calls import STATUS_BY_CODE, BytesReply, HeldReply, HttpProblem

REQUESTS_DRAWN = 10_000
NUMBERS_AT_ONCE = 4  # new numbers that arrive in any order
STRANGE: tuple[Any, ...] = (None, -1, 0, 1.5, 10**400, float("nan"), "", "a/b", "..", "ä", [], {}, True, "x" * 300, 2**63)


@dataclass
class SavingRuns(ScriptedRuns):
    """Scripted runs with checkpoints."""

    def model_bytes(self, key: bytes) -> int:
        return 9

    async def save_model(self, key: bytes, name: str, expires_ms: int) -> ModelReference:
        return ModelReference(key, 1, key)

    def is_present_model(self, model: ModelReference, key: bytes) -> bool:
        return model.job == key

    async def set_expiry(self, key: bytes, name: str, expires_ms: int) -> bool:
        await trio.sleep(self.seconds)
        return True

    async def continue_run(self, saved: ModelReference, *, with_moments: bool) -> bytes:
        return await self.open_run("base", rank=1, seed=0)


@dataclass
class Sender:
    """A client that draws its requests. Each method sends one, and returns the id of its future."""

    program: Caller
    draw: Random

    async def send(self, model: str, number: int) -> str:
        kinds: tuple[Callable[[str, int], Awaitable[Any]], ...] = (
            self._gradient, self._damaged, self._step, self._save, self._save_sampler, self._load
        )  # fmt: skip
        said = await self.draw.choice(kinds)(model, number)
        return said if isinstance(said, str) else str(said["request_id"])

    async def _gradient(self, model: str, number: int) -> Any:
        fields = self.draw.choice(({}, {}, {}, {"forward_only": True}, {"loss_fn": "no"}))
        return await self.program.request_losses(model, number, self.draw.choice(REQUESTS), **fields)

    async def _damaged(self, model: str, number: int) -> Any:
        """Send a request with other bytes behind its model and its number."""
        data = gradient_request(model, number, self.draw.choice(REQUESTS))
        head = gradient_request(model, number, REQUESTS[0])[: 2 + len(model) + (3 if number > 127 else 2)]
        assert data.startswith(head)
        return await self.program.api.forward_backward(self.program.key, head + changed(data[len(head) :], self.draw))

    async def _step(self, model: str, number: int) -> Any:
        return await self.program.request_step(model, number, {"learning_rate": self.draw.choice((0.1, 0.2, *STRANGE))})

    async def _save(self, model: str, number: int) -> Any:
        name, seconds = self.draw.choice(("a", "b", "c", *STRANGE)), self.draw.choice((None, 9_000, *STRANGE))
        return await self.program.api.save_weights(self.program.key, model, number, name, seconds, self.draw.random() < 0.5)

    async def _save_sampler(self, model: str, number: int) -> Any:
        name, place = self.draw.choice((None, "a", "b", *STRANGE)), self.draw.choice((None, 0, 1, 2))
        return await self.program.api.save_weights_for_sampler(self.program.key, model, number, name, None, place)

    async def _load(self, model: str, number: int) -> Any:
        path = checkpoint_path(
            model, self.draw.choice(("weights/a", "weights/b", "sampler_weights/a", "weights/none", "x" * 300))
        )
        return await self.program.api.load_weights(self.program.key, path, True, model, number, None, None)


async def test_altered_and_damaged_requests_have_one_result_a_number(tmp_path: Path) -> None:
    sent, seen, refused = set[str](), dict[str, Any](), 0
    async with gateway(tmp_path, SavingRuns()) as program:
        store = program.api._store
        store._database.execute("PRAGMA synchronous=OFF")  # waiting for the disk would take most of the time

        async def open_run(sampler: str, model: str, key: bytes) -> None:
            store.add_sampler(StoredSampler(sampler, owner_of(program.key), key, 0, model))

        program.api._samplers.open_run = open_run  # type: ignore[method-assign]
        sender = Sender(program, Random(48))
        models = [await program.create_model(number) for number in range(3)]
        newest = dict.fromkeys(models, 0)
        for _ in range(REQUESTS_DRAWN):
            model = sender.draw.choice(models)
            number = sender.draw.randint(max(1, newest[model] - 9), newest[model] + NUMBERS_AT_ONCE)
            if number > newest[model] and sender.draw.random() < 0.7:
                continue  # numbers grow slowly, so that most are repeated
            newest[model] = max(newest[model], number)
            try:
                request = await sender.send(model, number)
            except HttpProblem as problem:
                assert STATUS_BY_CODE[problem.code] in (400, 404), problem.code
                refused += 1
                continue
            sent.add(request)
            if not isinstance(reply := await program.retrieve(request), HeldReply):
                assert seen.setdefault(request, reply) == reply
        for request in sent:
            reply = await program.result(request)
            assert seen.setdefault(request, reply) == reply
    faults = [reply["error"] for reply in seen.values() if isinstance(reply, dict) and "error" in reply]
    results = [reply for reply in seen.values() if isinstance(reply, dict) and "error" not in reply]
    assert not any("internal" in fault or ("is not" in fault and "Error" in fault) for fault in faults)
    assert refused < 50, "only a damaged model or number is refused by HTTP"
    assert sum(isinstance(reply, BytesReply) for reply in seen.values()) == len(program.runs.passes) > 50
    kinds = {"metrics"}, {"path"}, {"type", "model_id", "path"}, {"type", "sampling_session_id"}
    assert {frozenset(result) for result in results} == set(map(frozenset, kinds)), "each kind of request was computed"
