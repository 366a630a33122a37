"""A decoder-only transformer: its sizes, and the tensors that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from protocol.codec import Between
from protocol.limits import BLOB_BYTES_MAX

BYTES: Final = 256  # tokens without a tokenizer; with one every byte is a token, too, so that nothing is unknown
PARAMETERS_MAX: Final = BLOB_BYTES_MAX // 4  # a committed buffer of float32 must fit a blob
LAYERS_MAX: Final = 1_024  # bounds the number of tensors, whatever their size
HEAD: Final = "heads."  # begins the names of vectors of `width` features that an objective adds behind `shapes`
FIRST: Final = f"{HEAD}first"  # such a vector, which the model adds to the embedding of the first token

Positive = Annotated[int, Between(1, 2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer; the output layer is the transposed token embedding."""

    vocabulary: Positive = BYTES
    context: Positive = 128  # tokens per training sequence
    width: Positive = 64  # features of the residual stream
    layers: Positive = 3
    heads: Positive = 4  # query heads
    kv_heads: Positive = 2  # key/value heads, shared by heads // kv_heads query heads each
    hidden: Positive = 192  # features inside the SwiGLU

    def problem(self) -> str | None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            return f"width {self.width} must be an even multiple of heads {self.heads}"
        if self.heads % self.kv_heads:
            return f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}"
        if self.layers > LAYERS_MAX:
            return f"layers {self.layers} are more than {LAYERS_MAX}"
        if self.parameters > PARAMETERS_MAX:
            return f"{self.parameters} parameters are more than {PARAMETERS_MAX}"
        return None

    @property
    def parameters(self) -> int:
        """How many the model has; `shapes` lists them."""
        kv_width = self.kv_heads * (self.width // self.heads)
        layer = 2 * self.width + 2 * self.width * (self.width + kv_width) + 3 * self.width * self.hidden
        return self.vocabulary * self.width + self.layers * layer + self.width


def shapes(model: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of its tensors, in the order of the flat vector. Names and shapes are those of the torch model."""
    layers = [(f"layers.{i}.{name}", shape) for i in range(model.layers) for name, shape in _layer(model)]
    return [("embedding.weight", (model.vocabulary, model.width)), *layers, ("final_norm.weight", (model.width,))]


def _layer(model: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Weights of linear layers are output × input, as torch has them."""
    width, hidden = model.width, model.hidden
    kv_width = model.kv_heads * (width // model.heads)
    return [
        ("attention_norm.weight", (width,)),
        ("query.weight", (width, width)),
        ("key.weight", (kv_width, width)),
        ("value.weight", (kv_width, width)),
        ("output.weight", (width, width)),
        ("mlp_norm.weight", (width,)),
        ("gate.weight", (hidden, width)),
        ("up.weight", (hidden, width)),
        ("down.weight", (width, hidden)),
    ]
