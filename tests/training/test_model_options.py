"""Sparse experts and attention windows in a job's specification: their bounds, tensors, encodings and formats."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.objective import adapted_matrices
from clients.records import AdapterSettings
from ledger.core.genesis import ModuleVersion
from ledger.jobs import ModelReference
from protocol import codec
from protocol.errors import UserError
from training.api.job_builder import parse_overrides
from training.data.tokenizer import load_vocabulary
from training.formats import gguf, huggingface_model
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.replicated.tensor_layout import initial_parameters, layout_of
from training.transformer import LAYER_TENSORS_MAX, ModelSpec, layer_parameters, tensor_shapes

JOB = JobSpec(name="t", data=bytes(32))
EXPERTS = ModelSpec(feed_forward="experts", experts=8, experts_per_token=3)
WINDOW = ModelSpec(attention="sliding-window", window=32)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"experts": 65}, r"experts must be in 2\.\.64, not 65: a single network is feed_forward 'swiglu'"),
        ({"experts": 8, "linear": "ternary"}, "experts 8 need linear 'dense', not 'ternary': "),
        ({"experts": 1}, r"experts must be in 2\.\.64, not 1: "),
        ({"feed_forward": "experts"}, r"feed_forward .experts. needs a number of experts: set experts to 2\.\.64"),
        ({"experts": -1}, r"experts must be in 2\.\.64, not -1: "),
        ({"experts": 4, "experts_per_token": 5}, r"experts_per_token must be in 1\.\.4, the experts, not 5"),
        ({"experts": 4, "experts_per_token": 0}, r"experts_per_token must be in 1\.\.4, the experts, not 0"),
        ({"experts": 4, "experts_per_token": -2}, r"experts_per_token must be in 1\.\.4, the experts, not -2"),
        ({"experts_per_token": 3}, "needs a number of experts"),
        ({"window": 0}, r"window must be in 2\.\.128, the context, not 0"),
        ({"window": 129}, r"window must be in 2\.\.128, the context, not 129"),
        ({"window": 1}, r"window must be in 2\.\.128, the context, not 1: with 1 a token sees only itself"),
        ({"window": -1}, r"window must be in 2\.\.128, the context, not -1"),
        ({"attention": "sliding-window"}, r"window must be in 2\.\.128, the context, not None"),
        (
            {"experts": 8, "feed_forward": "swiglu"},
            "experts 8 has no effect with feed_forward 'swiglu': use feed_forward 'experts'",
        ),
        ({"window": 8, "attention": "attention"}, "window 8 has no effect with attention 'attention': use attention 'sliding"),
    ],
)
def test_experts_and_windows_out_of_bounds_are_refused_in_one_line(said: dict[str, Any], why: str) -> None:
    overrides = parse_overrides({f"model.{name}": str(value) for name, value in said.items()})
    with pytest.raises(UserError, match=why) as refused:
        replace(JOB, **overrides).validated()
    assert "\n" not in str(refused.value)


def test_who_sets_experts_or_a_window_gets_the_layer_that_reads_it() -> None:
    found = parse_overrides({"model.experts": "8", "model.experts_per_token": "3"})
    assert found == {"model": EXPERTS} and replace(JOB, **found).validated()
    assert parse_overrides({"model.window": "32"}) == {"model": WINDOW}
    assert parse_overrides({"model.width": "32"}) == {"model": ModelSpec(width=32)}
    assert parse_overrides({"model.experts": "0", "model.experts_per_token": "2", "model.window": "none"}) == {
        "model": ModelSpec()
    }


def test_a_window_that_is_not_shorter_than_the_context_is_left_out() -> None:
    assert WINDOW.with_window(None) == WINDOW.with_window(128) == ModelSpec() and WINDOW.with_window(127).window == 127


@pytest.mark.parametrize("model", [EXPERTS, WINDOW, replace(EXPERTS, attention="sliding-window", window=7)])
def test_experts_and_windows_survive_the_wire_and_need_the_second_version_of_jobs(model: ModelSpec, tmp_path: Path) -> None:
    spec = replace(JOB, model=model)
    assert JobSpec.decode(spec.encode()) == spec
    assert ModuleVersion("jobs", 2) in JobModelStore(tmp_path).terms_of_spec(spec.encode()).requires


def test_a_model_without_experts_and_window_has_the_released_encoding() -> None:
    assert len(codec.to_plain(ModelSpec())) == 13


def test_experts_are_one_tensor_of_a_layer_and_initialized_like_single_networks() -> None:
    spec = replace(JOB, model=EXPERTS)
    layout = layout_of(spec)
    shapes = {tensor.name.removeprefix("layers.1."): tensor.shape for tensor in layout.tensors if "layers.1." in tensor.name}
    assert shapes["router.weight"] == (8, 64) and shapes["mlp_norm.weight"] == (64,)
    assert shapes["experts.gate.weight"] == shapes["experts.up.weight"] == (8, 192, 64)
    assert shapes["experts.down.weight"] == (8, 64, 192)
    assert layout.size == EXPERTS.parameters == sum(math.prod(shape) for _, shape in tensor_shapes(EXPERTS))
    views = layout.tensor_views(initial_parameters(spec))
    for view in views["layers.1.experts.down.weight"]:
        assert view.std() == pytest.approx(0.5 * 192**-0.5 * 6**-0.5, rel=0.05)
    assert not np.array_equal(*views["layers.1.experts.up.weight"][:2])
    assert views["layers.1.router.weight"].std() == pytest.approx(0.5 / 8, rel=0.1)
    assert len(layer_parameters(replace(EXPERTS, experts=64))) * 800 <= LAYER_TENSORS_MAX


def test_a_pass_computes_with_the_experts_of_a_token_only() -> None:
    dense, expert = ModelSpec(), 3 * 64 * 192
    assert dense.pass_parameters == dense.parameters
    assert EXPERTS.parameters == dense.parameters + 3 * (7 * expert + 8 * 64)
    assert EXPERTS.pass_parameters == dense.parameters + 3 * (2 * expert + 8 * 64)
    assert replace(EXPERTS, experts_per_token=8).pass_parameters == EXPERTS.parameters
    assert JOB.resolved_objective.pass_parameters(replace(JOB, model=EXPERTS)) == EXPERTS.pass_parameters


def test_a_model_of_too_many_experts_is_refused_by_its_parameters() -> None:
    large = ModelSpec(width=8192, heads=64, kv_heads=64, hidden=22_016, layers=10, feed_forward="experts", experts=64)
    assert "parameters are more than" in str(large.problem())


def test_adapters_leave_the_experts_alone() -> None:
    base = ModelReference(bytes(32), 1, bytes(32))
    names = adapted_matrices(EXPERTS, AdapterSettings(rank=4, train_mlp=False, base=base))
    assert "layers.0.query.weight" in names and not any("expert" in name or "router" in name for name in names)


# Formats of other programs -------------------------------------------------------------------------------------------


def test_models_with_experts_are_refused_by_name_in_formats_that_have_none() -> None:
    with pytest.raises(UserError, match=r"the Llama model of transformers has no tensor for 'layers\.0\.mlp_norm\.weight'"):
        huggingface_model.llama_tensor_names(EXPERTS)
    values = [(name, np.zeros(shape, "<f4")) for name, shape in tensor_shapes(EXPERTS)]
    with pytest.raises(UserError, match=r"GGUF does not support .*: it takes models with feed_forward 'swiglu'"):
        gguf.write_gguf(BytesIO(), {}, EXPERTS, values, is_half=False)
    config = huggingface_model.llama_config(ModelSpec(), None) | {"model_type": "mixtral"}
    with pytest.raises(UserError, match="model_type 'mixtral' is not supported, only 'llama' and 'mistral'"):
        huggingface_model.model_spec_from_config(config)


def test_a_model_with_a_window_is_a_mistral_and_comes_back() -> None:
    config = json.loads(json.dumps(huggingface_model.llama_config(WINDOW, None)))
    assert (config["architectures"], config["model_type"], config["sliding_window"]) == (["MistralForCausalLM"], "mistral", 32)
    assert huggingface_model.model_spec_from_config(config) == WINDOW
    assert huggingface_model.model_spec_from_config(config | {"sliding_window": None}) == ModelSpec()
    assert huggingface_model.model_spec_from_config(config | {"sliding_window": 128}) == ModelSpec(), "the whole context"
    del config["sliding_window"]  # Programs then use 4,096.
    assert huggingface_model.model_spec_from_config(config | {"max_position_embeddings": 8192}).window == 4096
    for value in (0, -1, "32"):
        with pytest.raises(UserError, match="sliding_window must be a positive whole number"):
            huggingface_model.model_spec_from_config(config | {"sliding_window": value})
    with pytest.raises(UserError, match=r"window must be in 2\.\.128, the context, not 1"):
        huggingface_model.model_spec_from_config(config | {"sliding_window": 1})
    with pytest.raises(UserError, match="sliding_window 32 is not supported for model_type 'llama', only for 'mistral'"):
        huggingface_model.model_spec_from_config(huggingface_model.llama_config(ModelSpec(), None) | {"sliding_window": 32})


def test_a_model_with_a_window_is_no_gguf_since_its_llama_has_none() -> None:
    with pytest.raises(UserError, match=r"GGUF does not support attention 'sliding-window': .* use --format transformers"):
        gguf.gguf_metadata(WINDOW, load_vocabulary(None, 256), "t", None, True)
