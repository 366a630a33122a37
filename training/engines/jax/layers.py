"""JAX's implementations of the objective `language` and of the kinds of layers.

Suffixes name the axes as in `training.engines.pytorch.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array

from training.engine_implementations import EngineImplementations, ObjectiveFunctions
from training.engines.held_out_evaluation import held_out_bits
from training.engines.transformer_decoder import TransformerDecoder


def dense(x: Array, weight: Array) -> Array:
    return x @ weight.T


def normalise(x_BTC: Array, weight_C: Array, epsilon: float) -> Array:
    return x_BTC * jax.lax.rsqrt(jnp.square(x_BTC).mean(axis=-1, keepdims=True) + epsilon) * weight_C


def attention(decoder: TransformerDecoder, x_BTC: Array, weights: Mapping[str, Array]) -> Array:
    batch, length, width = x_BTC.shape
    features = width // decoder.spec.heads

    def rotate(x_BTND: Array) -> Array:
        return x_BTND * decoder.cos_TD[:, None] + jnp.roll(x_BTND, features // 2, axis=-1) * decoder.sin_TD[:, None]

    normal_BTC = decoder.normalise(x_BTC, weights["attention_norm.weight"])
    q_BTHD, k_BTGD, v_BTGD = (
        decoder.linear(normal_BTC, weights[f"{name}.weight"]).reshape(batch, length, -1, features)
        for name in ("query", "key", "value")
    )
    out_BTHD = jax.nn.dot_product_attention(rotate(q_BTHD), rotate(k_BTGD), v_BTGD, is_causal=True)
    return x_BTC + decoder.linear(out_BTHD.reshape(batch, length, width), weights["output.weight"])


def swiglu(decoder: TransformerDecoder, x_BTC: Array, weights: Mapping[str, Array]) -> Array:
    normal_BTC = decoder.normalise(x_BTC, weights["mlp_norm.weight"])
    gate_BTF, up_BTF = (decoder.linear(normal_BTC, weights[f"{name}.weight"]) for name in ("gate", "up"))
    return x_BTC + decoder.linear(jax.nn.silu(gate_BTF) * up_BTF, weights["down.weight"])


def next_token_loss(model: Callable[[Array], Array], x_BT: Array, y_BT: Array) -> Array:
    """Return the mean cross-entropy of each sequence in nats: shape (B,).

    −log p[y] is computed as log(1 + exp z), where z is the log-sum-exp of all other logits minus that of y. Its gradient is exact
    to rounding for any certainty of the model (decision 46).
    """
    logits_BTV = model(x_BT)
    is_right_BTV = jnp.arange(logits_BTV.shape[-1]) == y_BT[..., None]
    others_BT = jax.nn.logsumexp(logits_BTV, axis=-1, where=~is_right_BTV)
    right_BT = jnp.where(is_right_BTV, logits_BTV, 0).sum(axis=-1)
    return jax.nn.softplus(others_BT - right_BT).mean(axis=-1)


IMPLEMENTATIONS = EngineImplementations(
    objectives={"language": ObjectiveFunctions(loss=next_token_loss, metrics=held_out_bits)},
    layers={"dense": dense, "attention": attention, "swiglu": swiglu},
)
