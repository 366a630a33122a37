"""Our tensors and sizes under the names of Llama (Touvron 2023) as `transformers` has them, both ways.

The tensors themselves are the same, bit for bit: rotary halves, RMSNorm, SwiGLU and grouped queries are Llama's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from protocol.errors import UserError
from training.transformer import ModelSpec, ModelTensor, model_tensors

# What a model may have that ours has not; a configuration that says so is refused by the name of its field.
_ABSENT: Final = ("attention_bias", "mlp_bias", "quantization_config", "sliding_window", "use_sliding_window", "rope_scaling")
_SIZES: Final = {
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
}
ACTIVATION: Final = "silu"
SCORE: Final = "score.weight"  # (1, width): what gives a text a number, in a model that gives nothing else
# As `transformers` reads a configuration that does not say them.
_EPSILON, _ROPE_BASE = 1e-6, 10_000.0


def llama_tensor_names(model: ModelSpec) -> dict[str, str]:
    """Llama's names of our tensors, by ours. `UserError` for a layer that a Llama does not have."""
    return {name: _llama_name(name, tensor) for name, tensor in model_tensors(model).items()}


def _llama_name(name: str, tensor: ModelTensor) -> str:
    theirs = tensor.parameter.transformers
    if not theirs:
        raise UserError(f"a Llama of transformers has no place for the tensor {name!r}")
    return theirs if tensor.layer is None else f"model.layers.{tensor.layer}.{theirs}"


def llama_config(model: ModelSpec, stop: int | None) -> dict[str, Any]:
    """`config.json`; `stop` is the token that ends a text. `transformers` before 5.0 has other names for rotary base and type."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width // model.heads,
        "hidden_act": ACTIVATION,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "tie_word_embeddings": model.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": stop,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def sequence_classification_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a model that gives a text a score, by the features of its last token."""
    return {**config, "architectures": ["LlamaForSequenceClassification"], "num_labels": 1}


def model_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The sizes that a `config.json` says. `UserError` names the first field that our models cannot follow."""
    if config.get("model_type") != "llama":
        raise UserError(f"model_type {config.get('model_type')!r} is not 'llama'")
    for name in _ABSENT:
        if config.get(name):
            raise UserError(f"{name} {config[name]!r} is something that our models do not have")
    if config.get("hidden_act", ACTIVATION) != ACTIVATION:
        raise UserError(f"hidden_act {config['hidden_act']!r} is not {ACTIVATION!r}")
    sizes: dict[str, Any] = {ours: _whole(config, theirs) for ours, theirs in _SIZES.items()}
    heads = sizes["heads"]
    kv_heads = heads if config.get("num_key_value_heads") is None else _whole(config, "num_key_value_heads")
    model = ModelSpec(
        **sizes,
        kv_heads=kv_heads,
        tied=_flag(config, "tie_word_embeddings"),
        rope_base=_rope_base(config),
        norm_epsilon=_number(config, "rms_norm_eps", _EPSILON),
    )
    problem = model.problem()
    if problem:
        raise UserError(problem)
    if config.get("head_dim") not in (None, model.width // heads):
        raise UserError(f"head_dim {config['head_dim']!r} is not hidden_size / num_attention_heads = {model.width // heads}")
    return model


def _rope_base(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters")
    if rope is None:
        return _number(config, "rope_theta", _ROPE_BASE)
    if (
        not isinstance(rope, Mapping)
        or rope.get("rope_type", "default") != "default"
        or rope.keys() - {"rope_type", "rope_theta"}
    ):
        raise UserError(f"rope_parameters {rope!r} say more than a rope_theta: our models have no rope_scaling")
    return _number(rope, "rope_theta", _number(config, "rope_theta", _ROPE_BASE))


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= 2**31:
        raise UserError(f"{name} must be a positive whole number, is {value!r}")
    return value


def _number(config: Mapping[str, Any], name: str, usual: float) -> float:
    value = usual if config.get(name) is None else config[name]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UserError(f"{name} must be a number, is {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name) or False
    if type(value) is not bool:
        raise UserError(f"{name} must be true or false, is {value!r}")
    return value
