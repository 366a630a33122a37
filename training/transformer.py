"""A decoder-only transformer: its sizes, and the tensors that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from protocol import codec
from protocol.codec import Between
from protocol.limits import PARAMETERS_ALLOWED_MAX, PLAIN_BLOB_BYTES_MAX

BYTES: Final = 256  # tokens without a tokenizer; with one every byte is a token, too, so that nothing is unknown
BYTES_WITH_END: Final = BYTES + 1  # the same, and a token that ends a text and stands for no byte: its id is BYTES
BYTE_VOCABULARIES: Final = (BYTES, BYTES_WITH_END)
PARAMETERS_MAX: Final = PARAMETERS_ALLOWED_MAX  # what layout, sums over a model and files are made for
# Of a model that is tuned by rewards, with the vectors that its objective adds.
PARAMETERS_TUNED_MAX: Final = PLAIN_BLOB_BYTES_MAX // 4
# Rotary positions: below 1 later features would turn faster, and beyond 1e9 no context turns the last ones at all.
ROPE_BASE_MIN: Final = 1.0
ROPE_BASE_MAX: Final = 1e9
NORM_EPSILON_MIN: Final = 1e-12  # a row of zeros is multiplied by the inverse of its root: a million
NORM_EPSILON_MAX: Final = 0.1  # rows have mean squares near one: more would be no norm
LAYERS_MAX: Final = 1_024  # bounds the number of tensors, whatever their size
EMBEDDING: Final = "embedding.weight"
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
    tied: bool = codec.added_field(True)  # the output layer is the transposed token embedding
    rope_base: float = codec.added_field(10_000.0)  # of rotary positions: Su et al. 2021, section 3.2.2
    norm_epsilon: float = codec.added_field(1e-6)  # added to the mean square of a row

    def problem(self) -> str | None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            return f"width {self.width} must be an even multiple of heads {self.heads}"
        if self.heads % self.kv_heads:
            return f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}"
        if self.layers > LAYERS_MAX:
            return f"layers {self.layers} are more than {LAYERS_MAX}"
        if self.parameters > PARAMETERS_MAX:
            return f"{self.parameters} parameters are more than {PARAMETERS_MAX}"
        if not ROPE_BASE_MIN <= self.rope_base <= ROPE_BASE_MAX:  # also if it is not a number
            return f"rope_base {self.rope_base:g} must lie in {ROPE_BASE_MIN:g}..{ROPE_BASE_MAX:g}"
        if not NORM_EPSILON_MIN <= self.norm_epsilon <= NORM_EPSILON_MAX:
            return f"norm_epsilon {self.norm_epsilon:g} must lie in {NORM_EPSILON_MIN:g}..{NORM_EPSILON_MAX:g}"
        return None

    @property
    def parameters(self) -> int:
        """How many the model has; `tensor_shapes` lists them."""
        kv_width = self.kv_heads * (self.width // self.heads)
        layer = 2 * self.width + 2 * self.width * (self.width + kv_width) + 3 * self.width * self.hidden
        matrices = 1 if self.tied else 2  # of the vocabulary
        return matrices * self.vocabulary * self.width + self.layers * layer + self.width

    @property
    def is_first_form(self) -> bool:
        """Whether the programs before `tied`, `rope_base` and `norm_epsilon` have such models, too."""
        usual = ModelSpec()
        return (self.tied, self.rope_base, self.norm_epsilon) == (usual.tied, usual.rope_base, usual.norm_epsilon)


def tensor_shapes(model: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of its tensors, in the order of the flat vector. Names and shapes are those of the torch model."""
    layers = [(f"layers.{i}.{name}", shape) for i in range(model.layers) for name, shape in _layer(model)]
    of_tokens = (model.vocabulary, model.width)
    output = [] if model.tied else [(OUTPUT_MATRIX, of_tokens)]
    return [(EMBEDDING, of_tokens), *layers, ("final_norm.weight", (model.width,)), *output]


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
