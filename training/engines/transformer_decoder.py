"""The transformer of text models, for engines whose layers are functions: rotary positions, and the pass through all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from training.engine_implementations import layer_implementation
from training.replicated.tensor_layout import Float32Array
from training.transformer import EMBEDDING, FINAL_NORM, OUTPUT_MATRIX, ModelSpec

Tensor = Any  # a tensor of the engine's library
# The implementation of a kind of linear layer: a function of inputs (…, inputs) and one matrix (outputs, inputs).
LinearFunction = Callable[[Tensor, Tensor], Tensor]


class TransformerDecoder:
    """A decoder with the layers that an engine registers under its name.

    A kind of block is a function of this object, the residual stream, and the layer's tensors by name. It returns the residual
    stream after the block.
    """

    def __init__(
        self,
        engine: str,
        spec: ModelSpec,
        normalise: Callable[[Tensor, Tensor, float], Tensor],
        make_tensor: Callable[[Float32Array], Tensor],
    ) -> None:
        """`normalise` is RMSNorm: a function of inputs (B, T, C), weights (C,) and the epsilon."""
        self.spec, self._normalise = spec, normalise
        self.linear: LinearFunction = layer_implementation(engine, spec.linear)
        self.cos_TD, self.sin_TD = map(make_tensor, rotary_tables(spec))
        self._blocks = [layer_implementation(engine, name) for name in (spec.attention, spec.feed_forward)]

    def normalise(self, x_BTC: Tensor, weight_C: Tensor) -> Tensor:
        return self._normalise(x_BTC, weight_C, self.spec.norm_epsilon)

    def logits(self, tensors: Mapping[str, Tensor], x_BT: Tensor) -> Tensor:
        """Return the logits of each next token, (B, T, V). `tensors` are those of the model by name, and T is the context."""
        x_BTC = tensors[EMBEDDING][x_BT]
        for number in range(self.spec.layers):
            prefix = f"layers.{number}."
            layer = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            for block in self._blocks:
                x_BTC = block(self, x_BTC, layer)
        output_VC = tensors[EMBEDDING if self.spec.tied else OUTPUT_MATRIX]
        return self.linear(self.normalise(x_BTC, tensors[FINAL_NORM]), output_VC)


def rotary_tables(spec: ModelSpec) -> tuple[Float32Array, Float32Array]:
    """Return cosines and signed sines of rotary positions (Su et al. 2021, section 3.2.2), of shape (T, D) for the whole context.

    A vector x of features D at position t becomes x · cos[t] + roll(x, D/2) · sin[t].
    """
    half = spec.width // spec.heads // 2
    frequency_D = spec.rope_base ** (-np.arange(half, dtype=np.float64) / half)
    angle_TD = np.arange(spec.context, dtype=np.float64)[:, None] * frequency_D
    cos_TD, sin_TD = np.cos(angle_TD), np.sin(angle_TD)
    cosines, sines = np.concatenate((cos_TD, cos_TD), axis=1), np.concatenate((-sin_TD, sin_TD), axis=1)
    return cosines.astype(np.float32), sines.astype(np.float32)
