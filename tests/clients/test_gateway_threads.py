"""Programs that send more work than a gateway has threads: the ledger of the same process has threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from clients.gateway import tinker_api
from clients.gateway.request_store import RequestStore
from clients.gateway.threads import DECODERS_AT_ONCE, DISK_CALLS_AT_ONCE
from tests.clients.test_tinker_api import Caller, gateway
from tests.waiting import patience
from web.calls import HttpProblem

pytestmark = pytest.mark.real("threads")
CALLS = 60  # more than the 40 threads of Trio


class BlockedFunction:
    """A function whose calls block their threads until the test sets `released`. Then they refuse the program's call."""

    def __init__(self) -> None:
        self.released, self._lock = threading.Event(), threading.Lock()
        self.running = self.running_max = 0

    def __call__(self, *_: Any) -> None:
        with self._lock:
            self.running += 1
            self.running_max = max(self.running, self.running_max)
        self.released.wait()
        with self._lock:
            self.running -= 1
        raise HttpProblem("gone", "the test is over")


async def refused(call: Callable[[], Any]) -> None:
    with suppress(HttpProblem):
        await call()


async def decode(program: Caller) -> None:
    await program.api.forward_backward(program.key, b"body")


async def find_model(program: Caller) -> None:
    await program.api.get_info(program.key, "model")


async def list_runs(program: Caller) -> None:
    await program.api.rest.list_training_runs(program.key, 1, 0)


async def find_sampler(program: Caller) -> None:
    await program.api.get_sampler(program.key, "sampler")


@pytest.mark.parametrize(
    ("call", "owner", "function", "most"),
    [
        (decode, tinker_api, "decode_gradient_request", DECODERS_AT_ONCE),
        (find_model, RequestStore, "find_model", DISK_CALLS_AT_ONCE),
        (find_sampler, RequestStore, "find_sampler", DISK_CALLS_AT_ONCE),
        (list_runs, RequestStore, "list_created_models", DISK_CALLS_AT_ONCE),
    ],
)
async def test_calls_of_programs_occupy_few_threads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Caller], Any],
    owner: object,
    function: str,
    most: int,
) -> None:
    blocked = BlockedFunction()
    monkeypatch.setattr(owner, function, blocked)
    async with gateway(tmp_path) as program:
        with patience():
            async with trio.open_nursery() as nursery:
                try:
                    for _ in range(CALLS):
                        nursery.start_soon(refused, partial(call, program))
                    while blocked.running < most:  # noqa: ASYNC110
                        await trio.sleep(0.001)
                    await trio.testing.wait_all_tasks_blocked()
                    assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
                finally:
                    blocked.released.set()
        assert blocked.running_max == most
