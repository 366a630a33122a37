"""tinygrad's implementations of the objective `language` and of the kinds of layers.

Suffixes name the axes as in `training.engines.pytorch.layers`; R query heads share one key/value head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tinygrad import Tensor, dtypes

from training.engine_implementations import EngineImplementations, ObjectiveFunctions
from training.engines.held_out_evaluation import held_out_bits
from training.engines.transformer_decoder import TransformerDecoder


def dense(x: Tensor, weight: Tensor) -> Tensor:
    return x.linear(weight.T)


def normalise(x_BTC: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    return x_BTC * (x_BTC.square().mean(axis=-1, keepdim=True) + epsilon).rsqrt() * weight_C


def attention(decoder: TransformerDecoder, x_BTC: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    spec, linear = decoder.spec, decoder.linear
    batch, length, width = x_BTC.shape
    features, shared = width // spec.heads, spec.heads // spec.kv_heads

    def rotate(x_BTND: Tensor) -> Tensor:
        half = features // 2
        swapped_BTND = x_BTND[..., half:].cat(x_BTND[..., :half], dim=-1)
        return x_BTND * decoder.cos_TD.unsqueeze(1) + swapped_BTND * decoder.sin_TD.unsqueeze(1)

    normal_BTC = decoder.normalise(x_BTC, weights["attention_norm.weight"])
    q_BTHD, k_BTGD, v_BTGD = (
        linear(normal_BTC, weights[f"{name}.weight"]).reshape(batch, length, -1, features) for name in ("query", "key", "value")
    )
    q_BGRTD = rotate(q_BTHD).reshape(batch, length, spec.kv_heads, shared, features).permute(0, 2, 3, 1, 4)
    k_BG1TD, v_BG1TD = (x_BTGD.permute(0, 2, 1, 3).unsqueeze(2) for x_BTGD in (rotate(k_BTGD), v_BTGD))
    scores_BGRTT = q_BGRTD @ k_BG1TD.transpose(-1, -2) * features**-0.5
    is_later_TT = Tensor.ones(length, length, dtype=dtypes.bool).tril().logical_not()
    out_BGRTD = scores_BGRTT.masked_fill(is_later_TT, -float("inf")).softmax(axis=-1) @ v_BG1TD
    return x_BTC + linear(out_BGRTD.permute(0, 3, 1, 2, 4).reshape(batch, length, width), weights["output.weight"])


def swiglu(decoder: TransformerDecoder, x_BTC: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    normal_BTC = decoder.normalise(x_BTC, weights["mlp_norm.weight"])
    gate_BTF, up_BTF = (decoder.linear(normal_BTC, weights[f"{name}.weight"]) for name in ("gate", "up"))
    return x_BTC + decoder.linear(gate_BTF.silu() * up_BTF, weights["down.weight"])


def next_token_loss(model: Callable[[Tensor], Tensor], x_BT: Tensor, y_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy of each sequence in nats: shape (B,).

    −log p[y] is computed as log(1 + exp z), where z is the log-sum-exp of all other logits minus that of y. Its gradient is exact
    to rounding for any certainty of the model (decision 46).
    """
    logits_BTV = model(x_BT)
    is_right_BTV = Tensor.arange(logits_BTV.shape[-1]) == y_BT.unsqueeze(-1)
    others_BT = is_right_BTV.where(-float("inf"), logits_BTV).logsumexp(axis=-1)
    right_BT = is_right_BTV.where(logits_BTV, 0).sum(axis=-1)
    return (others_BT - right_BT).softplus().mean(axis=-1)


IMPLEMENTATIONS = EngineImplementations(
    objectives={"language": ObjectiveFunctions(loss=next_token_loss, metrics=held_out_bits)},
    layers={"dense": dense, "attention": attention, "swiglu": swiglu},
)
