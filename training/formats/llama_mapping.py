"""Our tensors and sizes under the names of Llama (Touvron 2023) as `transformers` has them, both ways.

The tensors themselves are the same, bit for bit: rotary halves, RMSNorm, SwiGLU and grouped queries are Llama's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from protocol.errors import UserError
from training.transformer import EMBEDDING, OUTPUT_MATRIX, ModelSpec

_LAYER: Final = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_OUTSIDE: Final = {
    EMBEDDING: "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    OUTPUT_MATRIX: "lm_head.weight",
}
_OUR_LAYER: Final = {theirs: ours for ours, theirs in _LAYER.items()}
_OUR_OUTSIDE: Final = {theirs: ours for ours, theirs in _OUTSIDE.items()}

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


def llama_tensor_name(name: str) -> str | None:
    """Llama's name of one of our tensors; None of a vector that an objective has added to the model."""
    layer = re.fullmatch(r"layers\.(\d+)\.(\w+)\.weight", name)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.weight"
    return _OUTSIDE.get(name)


def canonical_tensor_name(name: str) -> str | None:
    """Our name of one of Llama's tensors; None of one that our models do not have, such as a bias."""
    layer = re.fullmatch(r"model\.layers\.(0|[1-9]\d*)\.([\w.]+)\.weight", name)
    if layer and layer[2] in _OUR_LAYER:
        return f"layers.{layer[1]}.{_OUR_LAYER[layer[2]]}.weight"
    return _OUR_OUTSIDE.get(name)


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
    sizes = {ours: _whole(config, theirs) for ours, theirs in _SIZES.items()}
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
