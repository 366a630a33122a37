"""Devices of tensors. `meta` stands for an accelerator: its tensors have a shape and no numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from peer import features
from peer.worker.supervisor import WorkerSupervisor
from protocol.errors import UserError
from rlhf.pytorch import supervised_objectives
from tests.rlhf.test_reward import SPEC as REWARD
from tests.waiting import run_process
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import ByteTokenizer
from training.engine_resources import EngineResources, ParallelMode, device_problem, parallel_problem
from training.engines.pytorch import device, engine
from training.engines.pytorch.engine import TorchEngine
from training.engines.pytorch.layers import KVCache, repeat_kv_heads
from training.engines.pytorch.model import GPT
from training.job_spec import JobSpec
from training.replicated.tensor_layout import initial_parameters
from training.transformer import ModelSpec

META = torch.device("meta")
SPEC = JobSpec(name="t", data=bytes(32), model=ModelSpec(context=16, width=16, layers=2, heads=2, kv_heads=1, hidden=24))


def test_loss_gradient_and_cache_are_where_the_model_is() -> None:
    model, x_BT = GPT(SPEC, META), torch.zeros(2, 16, dtype=torch.int64, device=META)
    model.load_parameters(initial_parameters(SPEC))
    model.loss(x_BT, x_BT).backward()
    assert model.features(x_BT, KVCache(SPEC.model, 2, META), last=1).device == META
    with pytest.raises(RuntimeError, match="device cpu"):
        GPT(SPEC, META).features(x_BT).add(GPT(SPEC).features(torch.zeros(2, 16, dtype=torch.int64)))


@pytest.mark.parametrize("length", [1, 6, 7, 8, 14, 15, 40])
def test_a_vector_goes_to_a_device_and_what_it_moved_comes_back_piece_by_piece(length: int) -> None:
    drawn = np.random.default_rng(length)
    given, other = (drawn.standard_normal(length).astype(np.float32) for _ in range(2))
    given.flags.writeable = False  # as in a memory-mapped array
    there = torch.full((length,), torch.nan)
    device.upload_vector(given, there, elements=7)
    assert there.numpy().tobytes() == given.tobytes()
    assert device.subtract_device_vector(other, there, elements=7).tobytes() == (other - given).tobytes()


def test_keys_and_values_for_each_head_give_what_shared_ones_give() -> None:
    q_BHTD, k_BGTD, v_BGTD = (torch.randn(2, count, 5, 8) for count in (4, 2, 2))
    whole = F.scaled_dot_product_attention(q_BHTD, repeat_kv_heads(k_BGTD, 4), repeat_kv_heads(v_BGTD, 4), is_causal=True)
    assert torch.allclose(
        whole, F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=True), atol=1e-6
    )


def test_the_score_of_a_reward_model_is_where_it_is() -> None:
    features.register_features()
    model = GPT(REWARD, META)
    x_BS, last_B = (torch.zeros(shape, dtype=torch.int64, device=META) for shape in ((2, 16), (2,)))
    assert supervised_objectives.text_scores(model, x_BS, last_B).device == META


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_auto_is_the_processor_where_no_gpu_is_and_another_device_is_refused_with_what_there_is() -> None:
    assert device.select_device("auto") == device.select_device("cpu") == device.CPU
    for name in ("cuda", "cuda:1"):
        with pytest.raises(UserError, match=rf"this machine has no device '{name}', only cpu"):
            device.select_device(name)


def test_a_setting_that_can_be_no_device_is_refused_before_any_engine_starts() -> None:
    assert all(device_problem(name) is None for name in ("auto", "cpu", "cuda", "cuda:0", "cuda:12"))
    assert all(device_problem(name) for name in ("", "gpu", "cuda:", "cuda:x", "CPU", "cpu:0", "cuda:0 "))


def test_what_the_daemon_says_of_resources_is_what_the_worker_reads() -> None:
    assert WorkerSupervisor(EngineResources()).arguments()[-2:] == ["--engine", "pytorch"]
    said = WorkerSupervisor(EngineResources(threads=3, device="cuda:1")).arguments()
    assert said[said.index("--threads") :] == ["--threads", "3", "--device", "cuda:1"]


@pytest.mark.real("processes")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_worker_whose_device_is_not_here_says_so_in_one_frame_and_ends() -> None:
    command = [sys.executable, "-m", "peer.worker.main", "--device", "cuda:1"]
    ended = run_process(command, stdin=subprocess.DEVNULL, capture_output=True, env=os.environ, idle=300.0)
    assert ended.returncode == 0 and re.search(rb"failed.*this machine has no device 'cuda:1', only cpu", ended.stdout)


@pytest.mark.parametrize(
    "said, why",
    [
        ({"gpus": 2}, "gpus 2 needs parallel ddp or fsdp, not off"),
        ({"gpus": 65}, "gpus 65 is outside 0..64"),
        ({"parallel": ParallelMode.DDP}, "parallel ddp needs gpus 2 or more, not 0"),
        ({"parallel": ParallelMode.FSDP, "gpus": 2, "device": "cuda:1"}, "uses the first 2 GPUs, not cuda:1: use device cuda"),
        ({"parallel": ParallelMode.FSDP, "gpus": 2, "compile": True}, "compile with parallel fsdp is not supported"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(said: dict[str, Any], why: str) -> None:
    assert why in str(parallel_problem(EngineResources(**said)))
    assert parallel_problem(EngineResources(gpus=2, parallel=ParallelMode.FSDP, device="cuda")) is None


def test_where_torch_has_no_algorithm_for_equal_bits_it_takes_another_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, start = np.arange(64, dtype=np.uint16), initial_parameters(SPEC)
    here = TorchEngine(SPEC, TokenizedText(tokens, tokens[:0], np.ones(259, dtype=np.int64)), ByteTokenizer())
    expected, modes = here.local_steps(start, bytes(32), 0, bytes(32))[0], list[bool]()
    monkeypatch.setattr(engine, "deterministic_algorithms", lambda _: device.deterministic_algorithms(torch.device("cuda")))
    computed = here._loss

    def loss(*arguments: Any) -> torch.Tensor:
        modes.append(torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled())
        if modes[-1]:
            raise RuntimeError("sum_cuda does not have a deterministic implementation")
        return computed(*arguments)

    monkeypatch.setattr(here, "_loss", loss)
    try:
        assert np.array_equal(here.local_steps(start, bytes(32), 0, bytes(32))[0], expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert modes.index(False) == 1 and not any(modes[1:]), "strict until it cannot be"
    assert "may differ between executions: sum_cuda" in caplog.text
