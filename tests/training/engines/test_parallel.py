"""Two processes that train as one trainer, on CPUs with gloo. A peer with several GPUs does the same with NCCL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from peer import features
from peer.settings.process_resources import child_processes
from peer.worker.supervisor import WorkerSupervisor
from protocol import codec
from protocol.errors import UserError
from protocol.sampling import SamplingOptions
from protocol.verdicts import Verdict
from rlhf.data import tokenized_records
from rlhf.objectives.ppo import PPO
from rlhf.objectives.supervised_objectives import MEAN_REWARD, SCORE_HEAD, MeanRewardSettings
from tests.rlhf.test_reward import SPEC as REWARD
from tests.rlhf.test_reward import some_pairs
from tests.training.engines.stepping import inner_step
from tests.training.engines.test_engine import JOB, PER_STEP, SPEC, TRAINER, difference, engine_of
from tests.waiting import patience, run_process
from training import worker_protocol
from training.corpus import open_tokens
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import ByteTokenizer
from training.engine_resources import EngineResources, ParallelMode
from training.engines.pytorch.engine import TorchEngine
from training.engines.pytorch.parallel_engine import ParallelEngine, RankProcesses
from training.engines.pytorch.rank_models import DdpRankModel, FsdpRankModel, RankModel, split_batch
from training.job_spec import AuditMode, InnerOptimizerKind, JobSpec
from training.objectives.objective import InnerStep
from training.replay import proposal_replay
from training.replay.inner_state import InnerState
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array, initial_parameters, layout_of
from training.worker_protocol import WorkerDied

pytestmark = pytest.mark.real("processes")

TEN = replace(SPEC, local_steps=10, batch=5, micro_batch=2)  # shares of 3 and 2: one process has a micro-batch of one
BOTH = [ParallelMode.DDP, ParallelMode.FSDP]


@pytest.fixture(scope="module")
def crew() -> Iterator[RankProcesses]:
    fallen = list[int]()
    command = [sys.executable, "-m", "peer.worker.main", "--gpus", "2", "--threads", "1", "--parallel", "ddp"]
    crew = RankProcesses(EngineResources(gpus=2, threads=1, parallel=ParallelMode.DDP), command, fallen.append)
    yield crew
    crew.close()
    assert fallen == []


def engine_in(
    crew: RankProcesses, text: Path, spec: JobSpec, parallel: ParallelMode, tokens: TokenizedText | None = None
) -> ParallelEngine:
    tokenizer = ByteTokenizer()
    found = open_tokens(spec, text, tokenizer) if tokens is None else tokens
    return ParallelEngine(spec, found, tokenizer, None, crew, EngineResources(gpus=2, parallel=parallel))


def updates_of(engine: TorchEngine) -> proposal_replay.ComputeUpdate:
    def update(*arguments: Any, taken: int, declaration: Any = None) -> tuple[Float32Array, Sequence[float]]:
        parameters, job, round, trainer, inner, on_state = arguments
        return engine.local_steps(parameters, job, round, trainer, inner=inner, on_state=on_state, taken=taken)

    return update


@pytest.mark.parametrize("parallel", BOTH)
def test_ten_steps_of_two_processes_are_those_of_one_whose_full_audit_accepts_them(
    crew: RankProcesses, text: Path, tmp_path: Path, parallel: ParallelMode
) -> None:
    together, alone = engine_in(crew, text, TEN, parallel), engine_of(text, TEN)
    model, buffer = tmp_path / "model", tmp_path / "buffer"
    ReplicatedModel.initial(JOB, TEN).save(model)
    asked = worker_protocol.ProposeRequest(JOB, 0, TRAINER, str(model), None, None, str(buffer))
    proposal_replay.make_proposal(asked, updates_of(together))
    audit = worker_protocol.AuditRequest(JOB, 0, TRAINER, str(model), asked.payload_out, str(buffer), None, None)
    audited = proposal_replay.audit_proposal(audit, updates_of(alone))
    assert audited.verdict is Verdict.ACCEPT and audited.relative_error < 1e-4
    start = initial_parameters(TEN)
    deltas = [engine.local_steps(start, JOB, 0, TRAINER) for engine in (together, alone)]
    assert 0 < difference(deltas[0][0], deltas[1][0]) < 1e-4
    assert deltas[0][1] == pytest.approx(deltas[1][1], rel=1e-5)


@pytest.mark.parametrize("parallel", BOTH)
def test_two_processes_train_experts_behind_a_window_with_their_balance_loss(
    crew: RankProcesses, text: Path, parallel: ParallelMode
) -> None:
    model = replace(TEN.model, feed_forward="experts", experts=3).with_window(9)
    spec = replace(TEN, local_steps=3, model=model)
    start = initial_parameters(spec)
    engines = engine_in(crew, text, spec, parallel), engine_of(text, spec)
    (delta, losses), (alone, others) = (engine.local_steps(start, JOB, 0, TRAINER) for engine in engines)
    assert difference(delta, alone) < 1e-4 and losses == pytest.approx(others, rel=1e-5)


@pytest.mark.parametrize("parallel", BOTH)
def test_one_process_computes_samples_and_scores(crew: RankProcesses, text: Path, parallel: ParallelMode) -> None:
    start, how, found = initial_parameters(TEN), SamplingOptions(max_tokens=5, temperature=1.0), list[object]()
    for engine in (engine_in(crew, text, TEN, parallel), engine_of(text, TEN)):
        samples = engine.generate_tokens(start, [1, 2], 2, how, lambda made: False)
        found.append(([*samples], engine.score_tokens(start, [1, 2, 3]).tolist()))
    assert found[0] == found[1]


def local_numbers(part: RankModel) -> int:
    """Return the numbers of parameters and moments in this process, between two requests."""
    if isinstance(part, DdpRankModel):
        return len(part._gpt.parameters) + len(part._optimizer.moments)
    assert isinstance(part, FsdpRankModel)
    parameters = sum(parameter.to_local().numel() for parameter in part._net.parameters())
    return parameters + sum(first.numel() + second.numel() for first, second in part._moments)


def test_with_fsdp_a_process_holds_half_of_parameters_and_moments_and_with_ddp_all(crew: RankProcesses, text: Path) -> None:
    everything, held = 3 * layout_of(TEN).size, dict[ParallelMode, float]()
    for parallel in BOTH:
        engine = engine_in(crew, text, TEN, parallel)
        engine.local_steps(initial_parameters(TEN), JOB, 0, TRAINER)
        held[parallel] = local_numbers(crew.parts.open[engine._number]) / everything
    assert held[ParallelMode.DDP] == 1 and 0.4 < held[ParallelMode.FSDP] < 0.6


@pytest.mark.parametrize("parallel", BOTH)
def test_states_are_gathered_after_each_step_and_a_step_goes_on_from_one(
    crew: RankProcesses, text: Path, parallel: ParallelMode
) -> None:
    spec, states = replace(TEN, local_steps=3), dict[str, list[tuple[Float32Array, InnerState]]]()
    engines = {"together": engine_in(crew, text, spec, parallel), "alone": engine_of(text, spec)}
    for name, engine in engines.items():
        states[name] = []

        def take(parameters: Float32Array, inner: InnerState, name: str = name) -> None:
            states[name].append((parameters.copy(), InnerState(inner.steps, inner.moments.copy())))

        engine.local_steps(initial_parameters(spec), JOB, 0, TRAINER, on_state=take)
    for (ours, inner), (theirs, other) in zip(states["together"], states["alone"], strict=True):
        assert np.allclose(ours, theirs, atol=1e-5) and inner.steps == other.steps
        assert difference(inner.moments, other.moments) < 1e-4
    parameters, inner = inner_step(engines["together"], *states["alone"][1], InnerStep(JOB, 0, TRAINER, 2))
    assert np.allclose(parameters, states["alone"][2][0], atol=1e-5) and inner.steps == 3


@pytest.mark.parametrize(
    "spec, parallel", [(PER_STEP, mode) for mode in BOTH] + [(replace(TEN, inner=InnerOptimizerKind.MUON), ParallelMode.DDP)]
)
def test_clipped_gradients_and_muon_are_those_of_one_process(
    crew: RankProcesses, text: Path, spec: JobSpec, parallel: ParallelMode
) -> None:
    clipped, start = replace(spec, gradient_clip=0.1), initial_parameters(spec)
    together, alone = engine_in(crew, text, clipped, parallel), engine_of(text, clipped)
    deltas = [engine.local_steps(start, JOB, 0, TRAINER)[0] for engine in (together, alone)]
    assert difference(*deltas) < 1e-4
    assert together.compute_main_metric(start) == alone.compute_main_metric(start)


@pytest.mark.parametrize("parallel", BOTH)
def test_a_reward_models_head_is_trained_as_by_one_process_and_an_output_layer_without_a_loss_stays(
    crew: RankProcesses, text: Path, parallel: ParallelMode
) -> None:
    features.register_features()
    spec = replace(REWARD, model=replace(REWARD.model, tied=False), audit=AuditMode.FULL)
    found, tokenizer = tokenized_records.tokenize_pairs(spec, some_pairs(), ByteTokenizer()), ByteTokenizer()
    engines = engine_in(crew, text, spec, parallel, found), TorchEngine(spec, found, tokenizer)
    deltas = [engine.local_steps(initial_parameters(spec), JOB, 0, TRAINER)[0] for engine in engines]
    assert difference(*deltas) < 1e-4 and layout_of(spec).tensor_views(deltas[0])[SCORE_HEAD].any()


def test_every_example_is_in_one_share_with_its_weight_and_all_exchange_gradients_equally_often() -> None:
    for drawn, processes, micro_batch in ((5, 2, 2), (1, 2, 4), (7, 3, 1), (8, 2, 8)):
        found, weighed = split_batch(drawn, processes, micro_batch), np.zeros(drawn)
        for rows, weight in (piece for share in found for piece in share):
            assert 1 <= rows.stop - rows.start <= micro_batch
            weighed[rows] += weight / (rows.stop - rows.start)
        assert np.allclose(weighed, 1 / drawn) and len({len(share) for share in found}) == 1


def test_what_several_processes_cannot_train_yet_is_refused_in_one_line(crew: RankProcesses, text: Path) -> None:
    features.register_features()
    nothing = TokenizedText.without_text(ByteTokenizer().token_bytes)
    with pytest.raises(UserError, match="parallel 'ddp' does not support objective 'ppo': start this peer with parallel off"):
        engine_in(crew, text, JobSpec(name="p", objective=PPO.name), ParallelMode.DDP, nothing)
    words = JobSpec(name="r", objective=MEAN_REWARD.name, objective_settings=codec.encode(MeanRewardSettings()))
    with pytest.raises(UserError, match="parallel 'fsdp' does not support the frozen layers of objective"):
        engine_in(crew, text, words, ParallelMode.FSDP, nothing)
    with pytest.raises(UserError, match="inner 'muon', which needs whole matrices"):
        engine_in(crew, text, replace(TEN, inner=InnerOptimizerKind.MUON), ParallelMode.FSDP, nothing)
    for mode in (ParallelMode.DDP, ParallelMode.FSDP):
        with pytest.raises(UserError, match=r"does not support sam_radius 0\.05: start this peer with parallel off"):
            engine_in(crew, text, replace(TEN, sam_radius=0.05), mode, nothing)


# A worker of two processes -------------------------------------------------------------------------------------------------


@pytest.mark.large
async def test_a_killed_process_ends_the_worker_and_the_next_round_has_the_trainer_again(text: Path, tmp_path: Path) -> None:
    model, buffer = str(tmp_path / "model"), str(tmp_path / "buffer")
    ReplicatedModel.initial(JOB, TEN).save(tmp_path / "model")
    worker, asked = (
        WorkerSupervisor(EngineResources(threads=1, gpus=2, parallel=ParallelMode.FSDP)),
        worker_protocol.ProposeRequest(JOB, 0, TRAINER, model, None, None, buffer),
    )
    with patience(120.0):
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            await worker.ask(worker_protocol.OpenJobRequest(JOB, replace(TEN, local_steps=10_000).encode(), str(text), None))
            (rank,) = child_processes(worker.pid or 0)

            async def killed() -> None:
                with pytest.raises(WorkerDied):
                    await worker.ask(asked)

            async with trio.open_nursery() as busy:
                busy.start_soon(killed)
                await trio.sleep(1)  # the worker ends at any point of the round
                os.kill(rank, signal.SIGKILL)
            await worker.ask(worker_protocol.OpenJobRequest(JOB, TEN.encode(), str(text), None))
            done = await worker.ask(asked)
            assert worker.restarts == 1 and done.payload_bytes > 0
            leader, (rank,) = worker.pid, child_processes(worker.pid or 0)
            assert leader is not None
            os.kill(leader, signal.SIGKILL)
            with patience(120.0):
                while Path(f"/proc/{rank}").exists():  # noqa: ASYNC110
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()


@pytest.mark.large
def test_more_gpus_than_are_here_are_refused_before_anything_starts() -> None:
    command = [sys.executable, "-m", "peer.worker.main", "--device", "cuda", "--gpus", "2", "--parallel", "ddp"]
    ended = run_process(command, stdin=subprocess.DEVNULL, capture_output=True, idle=300.0)
    assert b"this machine has no device 'cuda'" in ended.stdout or b"gpus 2: this machine has only" in ended.stdout
