"""Folders with a model in Llama's shape, as transformers writes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors

from training.replicated.tensor_layout import Float32Array

WIDTH, LAYERS, HEADS, KV, HIDDEN, VOCABULARY = 16, 2, 2, 1, 24, 256
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": WIDTH // HEADS,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "max_position_embeddings": 32,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}


def shapes(tied: bool = False) -> dict[str, tuple[int, ...]]:
    keys = WIDTH // HEADS * KV
    of_layer = {
        "input_layernorm": (WIDTH,),
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (keys, WIDTH),
        "self_attn.v_proj": (keys, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "post_attention_layernorm": (WIDTH,),
        "mlp.gate_proj": (HIDDEN, WIDTH),
        "mlp.up_proj": (HIDDEN, WIDTH),
        "mlp.down_proj": (WIDTH, HIDDEN),
    }
    named = {f"model.layers.{index}.{name}.weight": shape for index in range(LAYERS) for name, shape in of_layer.items()}
    head = {} if tied else {"lm_head.weight": (VOCABULARY, WIDTH)}
    return {"model.embed_tokens.weight": (VOCABULARY, WIDTH), **named, "model.norm.weight": (WIDTH,), **head}


def tensors(tied: bool = False, seed: int = 0) -> dict[str, Float32Array]:
    drawn = np.random.default_rng(seed)
    return {name: (drawn.normal(size=shape) * 0.1).astype("<f4") for name, shape in shapes(tied).items()}


def written(folder: Path, values: dict[str, Any] | None = None, sums: bool = False, **config: Any) -> Path:
    """Write a folder with these tensors, or drawn ones. `sums` adds their SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    tied = config.get("tie_word_embeddings", False)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    safetensors.save_file(tensors(tied) if values is None else values, folder / "model.safetensors")
    if sums:
        files = ("config.json", "model.safetensors")
        lines = (f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in files)
        (folder / "SHA256SUMS").write_text("".join(lines))
    return folder
