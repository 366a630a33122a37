"""The computations of JAX for one job: the gradient of a micro-batch, and the logits of a sequence."""

from __future__ import annotations

from typing import ClassVar

import jax
import numpy as np
import numpy.typing as npt
from jax import Array

from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engines.gradient_engine import GradientEngine, pad_examples
from training.engines.jax.backend import NAME, is_out_of_memory
from training.engines.jax.layers import normalise
from training.engines.local_training import Examples
from training.engines.transformer_decoder import TransformerDecoder
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of


class JaxEngine(GradientEngine):
    """A program is compiled for each number of sequences. A smaller micro-batch is padded."""

    name: ClassVar[str] = NAME

    def __init__(self, spec: JobSpec, tokens: TokenizedText, tokenizer: Tokenizer, first: Float32Array | None = None) -> None:
        super().__init__(spec, tokens, tokenizer, first)
        self._decoder = TransformerDecoder(NAME, spec.model, normalise, np.asarray)
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
        return np.asarray(self._logits(self._loaded[1], tokens_T[None]))[0]

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_memory(error)

    def release_memory(self) -> None:
        self._gradients.clear_cache()

    def _weighted_loss(self, parameters: Array, weights_B: Array, *arrays: Array) -> Array:
        assert self._functions.loss is not None
        losses_B: Array = self._functions.loss(lambda x_BT: self._forward(parameters, x_BT), *arrays)
        return losses_B @ weights_B

    def _forward(self, parameters: Array, x_BT: Array) -> Array:
        layout = layout_of(self.spec)
        # The gradient of a split is one concatenation. The gradient of a slice would be a vector of the whole size.
        parts = jax.lax.split(parameters, [tensor.size for tensor in layout.tensors])
        named = {tensor.name: part.reshape(tensor.shape) for tensor, part in zip(layout.tensors, parts, strict=True)}
        return self._decoder.logits(named, x_BT)
