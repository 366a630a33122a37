"""Runs at a real daemon with a real worker: from a base to decided steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from clients.gateway.client_runs import ClientRuns, LossReport
from clients.ledger.clients_module import StepOutcome
from clients.records import OptimizerStep, RequestBody
from peer import cli
from peer.api.running_peer import RunningPeer
from peer.daemon.daemon import running_daemon
from peer.settings.config import load_settings
from protocol import codec
from protocol.api import TrainRequest
from protocol.errors import UserError
from tests.clients.runs import body, floats
from tests.waiting import patience
from training.data.default_text import default_text

pytestmark = pytest.mark.real("sockets, and a worker process")

MODEL = {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "hidden": 24, "context": 24}
SETTINGS = {f"model.{name}": str(value) for name, value in MODEL.items()} | {"local_steps": "1", "batch": "2"}
ADAMW = OptimizerStep(1e-2, 0.9, 0.95, 1e-12, 0.0, 0.0)


async def train_base(daemon: RunningPeer, folder: Path) -> None:
    text = folder / "text"
    text.write_bytes(default_text()[:20_000])
    await daemon.api.start_job(TrainRequest("base", str(text), 2, 0, SETTINGS))
    while not any(job.state == "finished" for job in await daemon.api.jobs()):
        await daemon.driver.block_applied.wait()


def certain(request: RequestBody) -> RequestBody:
    return replace(
        request, examples=tuple(replace(each, inputs={"weights": floats([1.0] * each.length)}) for each in request.examples)
    )


async def take_step(runs: ClientRuns, key: bytes, number: int, request: RequestBody) -> tuple[LossReport, StepOutcome]:
    data = codec.encode(request)
    report = await runs.compute_losses(key, data, backward=True)
    return report, await runs.take_step(key, number, [lambda: data], ADAMW)


async def test_steps_of_a_run_lower_the_loss_and_leave_the_base(tmp_path: Path) -> None:
    with patience():
        assert (
            await trio.to_thread.run_sync(
                cli.main, ["init", "--data-dir", str(tmp_path / "peer"), "--network", "lab", "--listen", "127.0.0.1:0"]
            )
            == 0
        )
        config = load_settings({"data_directory": tmp_path / "peer", "role": "trainer"}, {"HOME": str(tmp_path)}).config
        async with running_daemon(config) as daemon:
            await train_base(daemon, tmp_path)
            ((base, before),) = daemon.state.jobs.jobs.items()
            runs, request, losses = ClientRuns(daemon), certain(body(examples=6)), []
            key = await runs.open_run("base", rank=4, seed=7)
            for number in range(4):
                report, outcome = await take_step(runs, key, number, request)
                losses.append(report.loss)
                assert outcome.is_accepted and outcome.rejected == {}
            said = np.frombuffer(b"".join(report.logprobs), dtype="<f4")
            assert report.loss == pytest.approx(-float(said.sum(dtype=np.float64)), rel=1e-6)
            assert losses == sorted(losses, reverse=True) and losses[-1] < 0.95 * losses[0]
            job = daemon.state.jobs.jobs[key]
            assert job.round == 4 and daemon.driver.host.open_model(key, 4).root == job.model_root
            assert daemon.state.jobs.jobs[base] == before
            with pytest.raises(UserError, match="weights contain nan at token 0"):
                wrong = replace(request.examples[0], inputs={"weights": floats([float("nan")] * request.examples[0].length)})
                await runs.compute_losses(key, codec.encode(replace(request, examples=(wrong,))), backward=False)
            assert daemon.state.jobs.jobs[key] == job
            saved, size = await runs.save_model(key, "four", 0), runs.model_bytes(key)
            await take_step(runs, key, 4, request)
            after_five = np.array(daemon.driver.host.open_model(key, 5).parameters)
            for number in range(5, 9):  # a job keeps the models of two rounds, unless they are saved
                await take_step(runs, key, number, request)
            await runs.end_run(key)
            height = daemon.state.height
            await runs.end_run(key)
            assert daemon.state.height == height, "a run that is over needs no second end"
            with pytest.raises(UserError, match="is over"):
                runs.find_run(key)
            host = daemon.driver.host
            # Deletions may be cancelled by the next round, and a snapshot may protect the model. Here neither is the case.
            host.set_pinned_models(frozenset())
            daemon.driver.round_executor._delete_old_files((key, 9), daemon.state.jobs.jobs[key])
            kept = host.open_decided_model(daemon.store, key, daemon.state.jobs.jobs[key], 4)
            assert size >= sum(vector.nbytes for vector in kept.vectors.values())
            assert (kept.round, kept.root) == (saved.round, saved.root) == (4, job.model_root)
            continued, fresh = [await runs.continue_run(saved, with_moments=kept_moments) for kept_moments in (True, False)]
            first = {run: host.open_model(run, 0) for run in (continued, fresh)}
            for run, moments in ((continued, kept.vectors), (fresh, dict.fromkeys(kept.vectors, np.float32(0)))):
                assert daemon.state.jobs.jobs[run].model_root == first[run].root
                for name, vector in first[run].vectors.items():
                    assert np.array_equal(vector, kept.vectors[name] if name == "parameters" else moments[name] + 0 * vector)
            assert first[continued].state.beta_powers == kept.state.beta_powers != first[fresh].state.beta_powers == (1.0, 1.0)
            # A run that continues with the moments takes the steps that the first run took.
            await take_step(runs, continued, 0, request)
            again = host.open_model(continued, 1).parameters
            await take_step(runs, fresh, 0, request)
            with pytest.raises(UserError, match="has no saved model"):
                await runs.continue_run(replace(saved, round=5), with_moments=True)
            assert not np.array_equal(again, host.open_model(fresh, 1).parameters)
            assert np.array_equal(again, after_five)
            await runs.set_expiry(key, "four", 1)
            number = 1
            while 4 in host.stored_rounds(key):  # Snapshots contain the model for some more heights.
                await take_step(runs, continued, number, request)
                number += 1
