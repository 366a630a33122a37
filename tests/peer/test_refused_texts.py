"""Texts that a worker refuses, such as those with an option that its engine lacks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer.api.handlers import model_handler
from protocol.errors import UserError
from protocol.sampling import SamplingOptions
from training.job_spec import JobSpec
from training.worker_protocol import WorkerFailed


async def test_a_person_reads_why_the_worker_refuses_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask_worker(round: Any, request: Any) -> Any:
        raise WorkerFailed("beams 2: the engine 'jax' only draws texts, so leave beams out")

    job = SimpleNamespace(name="story", round=1)
    executor = SimpleNamespace(
        participant=SimpleNamespace(worker_client=SimpleNamespace(ask_worker=ask_worker)),
        make_context=lambda key, job: SimpleNamespace(spec=JobSpec(name="story", data=bytes(32))),
    )
    driver = SimpleNamespace(
        state=SimpleNamespace(jobs=SimpleNamespace(jobs={bytes(32): job})),
        host=SimpleNamespace(round_directory=lambda key, number: Path("model")),
        round_executor=executor,
    )
    monkeypatch.setattr(model_handler, "choose_model", lambda state, host, job: (bytes(32), 1, 0))
    handler: Any = model_handler.ModelRpcHandler(
        SimpleNamespace(driver=driver, text_slot=contextlib.nullcontext)  # type: ignore[arg-type]
    )
    with pytest.raises(UserError, match=r"^job 'story': beams 2: the engine 'jax' only draws texts, so leave beams out$"):
        async for _ in handler.sample_text("The ", SamplingOptions(beams=2, temperature=0.0), "story"):
            pass
