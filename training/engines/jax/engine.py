"""The computations of JAX for one job: the gradient of a micro-batch, and the logits of a sequence."""

from __future__ import annotations

from typing import ClassVar

import jax
import numpy as np
import numpy.typing as npt
from jax import Array

from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_implementations import layer_implementation
from training.engines.gradient_engine import GradientEngine, pad_examples
from training.engines.jax.backend import NAME, is_out_of_memory
from training.engines.jax.layers import JaxBlock, JaxLinear, normalise
from training.engines.local_training import Examples
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import EMBEDDING, FINAL_NORM, OUTPUT_MATRIX


class JaxEngine(GradientEngine):
    """A program is compiled for each number of sequences. A smaller micro-batch is padded."""

    name: ClassVar[str] = NAME

    def __init__(self, spec: JobSpec, tokens: TokenizedText, tokenizer: Tokenizer, first: Float32Array | None = None) -> None:
        super().__init__(spec, tokens, tokenizer, first)
        self._linear: JaxLinear = layer_implementation(NAME, spec.model.linear)
        blocks = spec.model.attention, spec.model.feed_forward
        self._blocks: list[JaxBlock] = [layer_implementation(NAME, name) for name in blocks]
        self._gradients = jax.jit(jax.value_and_grad(self._weighted_loss))
        self._logits = jax.jit(self._forward)
        self._loaded: tuple[Float32Array, Array] | None = None  # last parameters of `logits`, and their copy on the device

    def gradient(self, parameters: Float32Array, examples: Examples) -> tuple[float, Float32Array]:
        arrays, weights_B = pad_examples(examples, self.micro_batch)
        loss, gradient = self._gradients(parameters, weights_B, *arrays)
        return float(loss), np.asarray(gradient)

    def logits(self, parameters: Float32Array, tokens_T: npt.NDArray[np.int64]) -> Float32Array:
        if self._loaded is None or self._loaded[0] is not parameters:
            self._loaded = parameters, jax.device_put(parameters)
        # Attention is causal, so the tokens after the sequence have no effect on its logits.
        padded_T = np.pad(tokens_T, (0, self.spec.model.context - len(tokens_T)))
        return np.asarray(self._logits(self._loaded[1], padded_T[None]))[0, : len(tokens_T)]

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_memory(error)

    def release_memory(self) -> None:
        self._gradients.clear_cache()

    def _weighted_loss(self, parameters: Array, weights_B: Array, *arrays: Array) -> Array:
        assert self._functions.loss is not None
        losses_B: Array = self._functions.loss(lambda x_BT: self._forward(parameters, x_BT), *arrays)
        return losses_B @ weights_B

    def _forward(self, parameters: Array, x_BT: Array) -> Array:
        """Return the logits of each next token: shape (B, T, V)."""
        model, found = self.spec.model, layout_of(self.spec).tensors
        # The gradient of a split is one concatenation. The gradient of a slice would be a vector of the whole size.
        parts = jax.lax.split(parameters, [tensor.size for tensor in found])
        tensors = {tensor.name: part.reshape(tensor.shape) for tensor, part in zip(found, parts, strict=True)}
        x_BTC = tensors[EMBEDDING][x_BT]
        for number in range(model.layers):
            prefix = f"layers.{number}."
            layer = {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
            for block in self._blocks:
                x_BTC = block(model, self._linear, x_BTC, layer)
        normal_BTC = normalise(x_BTC, tensors[FINAL_NORM], model.norm_epsilon)
        return self._linear(normal_BTC, tensors[EMBEDDING if model.tied else OUTPUT_MATRIX])
