"""What a step keeps in memory, and what bounds it: the result stays the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.training.engines.test_engine import SPEC, delta_of, difference
from training.corpus import open_tokens
from training.data.tokenizer import ByteTokenizer
from training.engine_resources import EngineResources
from training.engines.pytorch.device import CPU
from training.engines.pytorch.engine import FLOAT_BYTES, KEPT, MB, TorchEngine, sequence_bytes, sequences_that_fit
from training.engines.pytorch.model import GPT
from training.job_spec import JobSpec
from training.replicated.tensor_layout import layout_of
from training.transformer import ModelSpec

DEEP = ModelSpec(context=32, width=32, layers=6, heads=4, kv_heads=2, hidden=48)


def kept_bytes(model: ModelSpec, recompute: bool) -> int:
    """What a forward pass of one sequence keeps for the backward pass."""
    net, kept = GPT(replace(SPEC, model=model)), dict[int, int]()
    net.recompute = recompute
    own = net.parameters.untyped_storage().data_ptr()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = 0 if storage.data_ptr() == own else storage.nbytes()
        return tensor

    x_BT = torch.zeros(1, model.context, dtype=torch.int64)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = net.loss(x_BT, x_BT)
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("model", [ModelSpec(), DEEP, ModelSpec(width=128, heads=4, kv_heads=4, hidden=96, layers=2)])
def test_the_estimate_is_what_a_pass_keeps_and_something_for_the_logits(model: ModelSpec) -> None:
    assert kept_bytes(model, False) < sequence_bytes(model, False) < 1.5 * kept_bytes(model, False)


def test_recompute_keeps_far_less_and_gives_the_same_update(text: Path) -> None:
    assert kept_bytes(DEEP, True) < 0.4 * kept_bytes(DEEP, False)
    assert kept_bytes(DEEP, True) < sequence_bytes(DEEP, True) < 0.6 * sequence_bytes(DEEP, False)
    deep = replace(SPEC, model=DEEP)
    assert np.array_equal(delta_of(engine_with(text, deep, recompute=True)), delta_of(engine_with(text, deep)))


def test_a_bound_on_memory_makes_micro_batches_smaller_says_so_once_and_changes_no_result(
    text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = KEPT * FLOAT_BYTES * layout_of(SPEC).size + 2.5 * sequence_bytes(SPEC.model, False)
    wide = replace(SPEC, batch=40, micro_batch=40)
    with caplog.at_level(logging.WARNING, "peer"):
        bound = engine_with(text, wide, memory_mb_max=int(room / MB) + 1)
    assert bound.micro_batch < 40 and "in the place of 40" in caplog.text and len(caplog.records) == 1
    assert difference(delta_of(bound), delta_of(engine_with(text, wide))) < 1e-5


def test_without_a_bound_nothing_is_counted_and_a_model_that_cannot_fit_is_tried_with_one_sequence() -> None:
    assert sequences_that_fit(SPEC, EngineResources()) is None
    large = replace(SPEC, model=ModelSpec(width=512, layers=8, heads=8, kv_heads=8, hidden=2048))
    assert sequences_that_fit(large, EngineResources(memory_mb_max=1)) == 1


def engine_with(text: Path, spec: JobSpec, **resources: int) -> TorchEngine:
    tokenizer = ByteTokenizer()
    return TorchEngine(spec, open_tokens(spec, text, tokenizer), tokenizer, None, CPU, EngineResources(**resources))  # type: ignore[arg-type]
