"""The computations of tinygrad for one job: the gradient of a micro-batch, and the logits of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from tinygrad import Tensor, TinyJit

from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engines.gradient_engine import GradientEngine, pad_examples
from training.engines.local_training import Examples
from training.engines.tinygrad.backend import NAME
from training.engines.tinygrad.layers import normalise
from training.engines.transformer_decoder import TransformerDecoder
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of


class TinygradEngine(GradientEngine):
    """A program is compiled for each number of sequences. A smaller micro-batch is padded."""

    name: ClassVar[str] = NAME

    def __init__(self, spec: JobSpec, tokens: TokenizedText, tokenizer: Tokenizer, first: Float32Array | None = None) -> None:
        super().__init__(spec, tokens, tokenizer, first)
        self._decoder = TransformerDecoder(NAME, spec.model, normalise, realised)
        self._layout = layout_of(spec)
        self._gradients: Callable[..., tuple[Tensor, list[Tensor]]] | None = None
        self._rows = 0  # sequences of the program `_gradients`
        self._logits: Callable[..., Tensor] = TinyJit(self._compute_logits)
        self._loaded: tuple[Float32Array, list[Tensor]] | None = None  # last parameters of `logits`, and their tensors

    def gradient(self, parameters: Float32Array, examples: Examples) -> tuple[float, Float32Array]:
        if self._gradients is None or self._rows != self.micro_batch:
            self._gradients, self._rows = TinyJit(self._compute_gradients), self.micro_batch
        arrays, weights = pad_examples(examples, self._rows)
        loss, gradients = self._gradients(realised(weights), *map(realised, arrays), *self._leaves(parameters))
        flat = np.empty_like(parameters)
        for tensor, gradient in zip(self._layout.tensors, gradients, strict=True):
            flat[tensor.elements] = gradient.numpy().ravel()
        return float(loss.numpy()), flat

    def logits(self, parameters: Float32Array, tokens_T: npt.NDArray[np.int64]) -> Float32Array:
        if self._loaded is None or self._loaded[0] is not parameters:
            self._loaded = parameters, self._leaves(parameters)
        found: Float32Array = self._logits(realised(tokens_T[None]), *self._loaded[1]).numpy()
        return found[0]

    def _leaves(self, parameters: Float32Array) -> list[Tensor]:
        """Return the tensors of the model. They are separate inputs of a program, since slices of one would compile slowly."""
        return [realised(parameters[tensor.elements].reshape(tensor.shape)) for tensor in self._layout.tensors]

    def _compute_gradients(self, weights_B: Tensor, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the weighted loss and its gradients, which one call realises."""
        count = len(inputs) - len(self._layout.tensors)
        arrays, leaves = inputs[:count], inputs[count:]
        assert self._functions.loss is not None
        loss: Tensor = (self._functions.loss(lambda x_BT: self._forward(leaves, x_BT), *arrays) * weights_B).sum()
        gradients = loss.gradient(*leaves)
        loss.realize(*gradients)
        return loss, gradients

    def _compute_logits(self, x_BT: Tensor, *leaves: Tensor) -> Tensor:
        return self._forward(leaves, x_BT).realize()

    def _forward(self, leaves: Sequence[Tensor], x_BT: Tensor) -> Tensor:
        named = {tensor.name: leaf for tensor, leaf in zip(self._layout.tensors, leaves, strict=True)}
        return self._decoder.logits(named, x_BT)


def realised(array: npt.NDArray[Any]) -> Tensor:
    """Return a copy of an array on tinygrad's device. Token ids become 32-bit integers, for which its programs are shorter."""
    return Tensor(array.astype(np.int32) if array.dtype == np.int64 else np.ascontiguousarray(array)).realize()
