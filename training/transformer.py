"""A decoder-only transformer: its sizes, and the tensors that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final

from protocol.codec import Between
from protocol.limits import PARAMETERS_ALLOWED_MAX
from protocol.messages import Name
from training.layers import (
    EMBEDDING_GAIN,
    BlockKind,
    LayerKind,
    LayerParameter,
    LayerPlace,
    LinearKind,
    find_layer,
    layer_names,
    linear_deviation,
)

BYTES: Final = 256  # tokens without a tokenizer; with one every byte is a token, too, so that nothing is unknown
BYTES_WITH_END: Final = BYTES + 1  # the same, and a token that ends a text and stands for no byte: its id is BYTES
VOCABULARY_MAX: Final = 1 << 16  # token ids are kept as uint16
BYTE_VOCABULARIES: Final = (BYTES, BYTES_WITH_END)
PARAMETERS_MAX: Final = PARAMETERS_ALLOWED_MAX  # what layout, sums over a model and files are made for
# Of a model that is tuned by rewards, with the vectors that its objective adds; larger ones were not measured.
PARAMETERS_TUNED_MAX: Final = 1 << 27
# Rotary positions: below 1 later features would turn faster, and beyond 1e9 no context turns the last ones at all.
ROPE_BASE_MIN: Final = 1.0
ROPE_BASE_MAX: Final = 1e9
NORM_EPSILON_MIN: Final = 1e-12  # a row of zeros is multiplied by the inverse of its root: a million
NORM_EPSILON_MAX: Final = 0.1  # rows have mean squares near one: more would be no norm
LAYERS_MAX: Final = 1_024
LAYER_TENSORS_MAX: Final = 9 * LAYERS_MAX  # of all layers together: as many as the usual kinds of layers have
TENSORS_MAX: Final = LAYER_TENSORS_MAX + 9  # with those outside the layers: three of the model, and vectors of its objective
EMBEDDING: Final = "embedding.weight"
FINAL_NORM: Final = "final_norm.weight"
OUTPUT_MATRIX: Final = "lm_head.weight"  # of a model whose output layer is a matrix of its own
HEAD: Final = "heads."  # begins the names of vectors of `width` features that an objective adds behind `tensor_shapes`
FIRST_TOKEN_VECTOR: Final = f"{HEAD}first"  # such a vector, which the model adds to the embedding of the first token

Positive = Annotated[int, Between(1, 2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer."""

    vocabulary: Positive = BYTES
    context: Positive = 128  # tokens per training sequence
    width: Positive = 64  # features of the residual stream
    layers: Positive = 3
    heads: Positive = 4  # query heads
    kv_heads: Positive = 2  # key/value heads, shared by heads // kv_heads query heads each
    hidden: Positive = 192  # features inside the SwiGLU
    tied: bool = True  # the output layer is the transposed token embedding
    rope_base: float = 10_000.0  # of rotary positions: Su et al. 2021, section 3.2.2
    norm_epsilon: float = 1e-6  # added to the mean square of a row
    # Kinds of layers, by their names (`training.layers`).
    linear: Name = "dense"
    attention: Name = "attention"
    feed_forward: Name = "swiglu"

    def layers_problem(self) -> str | None:
        """Names a kind of layer that this program does not know, or a size that a layer cannot have.

        Everything else asks the kinds for their tensors, so this check comes first.
        """
        for place in LayerPlace:
            name = getattr(self, place.value)
            kind = find_layer(name, place)
            if kind is None:
                known = ", ".join(other for other in layer_names() if find_layer(other, place))
                return f"model.{place.value} {name!r} is no layer that this program knows: {known}"
            problem = kind.sizes_problem(self)
            if problem:
                return problem
        return None

    def problem(self) -> str | None:
        problem = self.layers_problem()
        if problem:
            return problem
        if self.layers > LAYERS_MAX:
            return f"layers {self.layers} are more than {LAYERS_MAX}"
        tensors = self.layers * len(layer_parameters(self))
        if tensors > LAYER_TENSORS_MAX:
            return f"{tensors} tensors in {self.layers} layers are more than {LAYER_TENSORS_MAX}"
        if self.parameters > PARAMETERS_MAX:
            return f"{self.parameters} parameters are more than {PARAMETERS_MAX}"
        if not ROPE_BASE_MIN <= self.rope_base <= ROPE_BASE_MAX:  # also if it is not a number
            return f"rope_base {self.rope_base:g} must lie in {ROPE_BASE_MIN:g}..{ROPE_BASE_MAX:g}"
        if not NORM_EPSILON_MIN <= self.norm_epsilon <= NORM_EPSILON_MAX:
            return f"norm_epsilon {self.norm_epsilon:g} must lie in {NORM_EPSILON_MIN:g}..{NORM_EPSILON_MAX:g}"
        return None

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds in their places. `layers_problem` has found none missing."""
        found = [find_layer(getattr(self, place.value), place) for place in LayerPlace]
        kinds = tuple(kind for kind in found if kind is not None)
        assert len(kinds) == len(LayerPlace), self
        return kinds

    @property
    def parameters(self) -> int:
        """How many the model has; `tensor_shapes` lists them."""
        return _count_parameters(self)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a model, and the number of its layer; None: it is outside the layers."""

    layer: int | None
    parameter: LayerParameter


@lru_cache(maxsize=8)
def layer_parameters(model: ModelSpec) -> tuple[LayerParameter, ...]:
    """The tensors of each layer, in the order of the flat vector."""
    linear, *blocks = model.layer_kinds
    assert isinstance(linear, LinearKind)
    found = [parameter for kind in blocks if isinstance(kind, BlockKind) for parameter in kind.parameters(model, linear)]
    assert len({parameter.name for parameter in found}) == len(found), "two blocks have a tensor of one name"
    return tuple(found)


def outer_parameters(model: ModelSpec) -> tuple[LayerParameter, ...]:
    """The tensors before and behind the layers: embedding, last norm, and the output layer if it is a matrix of its own."""
    of_tokens = (model.vocabulary, model.width)
    deviation = EMBEDDING_GAIN / math.sqrt(model.width)
    embedding = LayerParameter(
        EMBEDDING, of_tokens, deviation=deviation, transformers="model.embed_tokens.weight", gguf="token_embd.weight"
    )
    norm = LayerParameter(FINAL_NORM, (model.width,), initial=1.0, transformers="model.norm.weight", gguf="output_norm.weight")
    deviation = linear_deviation(model.width)
    output = LayerParameter(OUTPUT_MATRIX, of_tokens, deviation=deviation, transformers="lm_head.weight", gguf="output.weight")
    return (embedding, norm) if model.tied else (embedding, norm, output)


@lru_cache(maxsize=256)  # terms and estimates of every job ask for it
def _count_parameters(model: ModelSpec) -> int:
    outside = sum(math.prod(parameter.shape) for parameter in outer_parameters(model))
    return outside + model.layers * sum(math.prod(parameter.shape) for parameter in layer_parameters(model))


@lru_cache(maxsize=8)
def model_tensors(model: ModelSpec) -> Mapping[str, ModelTensor]:
    """Its tensors by name, in the order of the flat vector."""
    embedding, *behind = outer_parameters(model)
    of_layer = layer_parameters(model)
    found = {embedding.name: ModelTensor(None, embedding)}
    for layer in range(model.layers):
        found |= {f"layers.{layer}.{parameter.name}": ModelTensor(layer, parameter) for parameter in of_layer}
    return found | {parameter.name: ModelTensor(None, parameter) for parameter in behind}


def tensor_shapes(model: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of its tensors, in the order of the flat vector. Names and shapes are those of the torch model."""
    return [(name, tensor.parameter.shape) for name, tensor in model_tensors(model).items()]
