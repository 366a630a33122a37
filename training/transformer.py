"""A decoder-only transformer: its sizes, its kinds of layers, and the resulting tensors. This module does not use torch.

A layer of the transformer consists of two blocks: attention, then feed-forward. A block normalises its input and adds its output
to the residual stream. The matrices inside a block are linear layers. `ModelSpec` names the kind in each of these three places. A
kind declares its tensors, initial values, bounds, and names in files of other programs. An engine computes the kinds that it
registers (`training.engine_implementations`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final

from protocol.codec import Between, added_field
from protocol.limits import PARAMETERS_ALLOWED_MAX
from protocol.messages import Name

# Number of tokens without a tokenizer: the bytes, which every tokenizer has, too, so that it can encode any text.
BYTES: Final = 256
BYTES_WITH_END: Final = BYTES + 1  # the bytes, and a token with the id BYTES that ends a text and stands for no byte
VOCABULARY_MAX: Final = 1 << 16  # most tokens of a vocabulary: token ids are stored as uint16
BYTE_VOCABULARIES: Final = (BYTES, BYTES_WITH_END)
PARAMETERS_MAX: Final = PARAMETERS_ALLOWED_MAX  # most parameters of a model: it bounds layouts, sums over a model, and files
# Most parameters of a model that rewards tune, including the vectors that its objective adds. Larger models were not measured.
PARAMETERS_TUNED_MAX: Final = 1 << 27
# Limits of the base of rotary positions. Below 1 the later features would turn faster than the first ones. Above 1e9 the last
# features turn in no context.
ROPE_BASE_MIN: Final = 1.0
ROPE_BASE_MAX: Final = 1e9
NORM_EPSILON_MIN: Final = 1e-12  # least epsilon of RMSNorm: a row of zeros is multiplied by the inverse of its root, a million
# Largest epsilon of RMSNorm: rows have mean squares near one, and a larger epsilon would dominate them.
NORM_EPSILON_MAX: Final = 0.1
LAYERS_MAX: Final = 1_024
LAYER_TENSORS_MAX: Final = 9 * LAYERS_MAX  # most tensors of all layers: the default kinds have nine per layer
# Least window of attention. With 1 a token sees only itself: gradients of queries and keys are rounding errors, and generation by
# transformers with its cache ignores such a window.
WINDOW_MIN: Final = 2
EXPERTS_MAX: Final = 64  # most experts of a layer: replays with more were not measured
# Most tensors of a model: beside its layers it has three, and the vectors of its objective.
TENSORS_MAX: Final = LAYER_TENSORS_MAX + 9
EMBEDDING: Final = "embedding.weight"
FINAL_NORM: Final = "final_norm.weight"
OUTPUT_MATRIX: Final = "lm_head.weight"  # name of a separate output layer
HEAD: Final = "heads."  # prefix of the names of vectors of `width` features that an objective adds after `tensor_shapes`
FIRST_TOKEN_VECTOR: Final = f"{HEAD}first"  # vector that the model adds to the embedding of the first token

# Standard deviations of initial values, in units of 1/√inputs. On the default job (30 rounds, two trainers) they reach 2.17
# held-out bits per byte. An embedding with deviation 1/√width reaches 2.20, and one with GPT-2's 0.02, which is small beside the
# output of the layers, 2.62.
# Deviation of the embedding: it is often the output layer, too, and the first logits then have a deviation below 1.
EMBEDDING_GAIN: Final = 0.8
LINEAR_GAIN: Final = 0.5

Positive = Annotated[int, Between(1, 2**31)]


class LayerPlace(enum.StrEnum):
    """A place of layers in a model. Its value is the field of `ModelSpec` that names the kind of layer."""

    LINEAR = "linear"
    ATTENTION = "attention"
    FEED_FORWARD = "feed_forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes and the kinds of layers of a decoder-only transformer."""

    vocabulary: Positive = BYTES
    """Number of tokens. `peer train` takes 257: the bytes and the end of a text."""
    context: Positive = 128
    """Tokens of a training sequence, and the longest text that the model reads at once."""
    width: Positive = 64
    """Features of the residual stream."""
    layers: Positive = 3
    """Layers, each with attention and feed-forward."""
    heads: Positive = 4
    """Query heads."""
    kv_heads: Positive = 2
    """Key and value heads. Each is shared by `heads` / `kv_heads` query heads."""
    hidden: Positive = 192
    """Features inside the SwiGLU."""
    tied: bool = True
    """True if the output layer is the transposed token embedding."""
    rope_base: float = 10_000.0
    """Base of rotary positions (Su et al. 2021, section 3.2.2)."""
    norm_epsilon: float = 1e-6
    """Term added to the mean square of a row in a norm."""
    linear: Name = "dense"
    """Kind of linear layers."""
    attention: Name = "attention"
    """Kind of attention."""
    feed_forward: Name = "swiglu"
    """Kind of feed-forward layers."""
    experts: Annotated[int, Between(0, EXPERTS_MAX)] = added_field(0)
    """Experts of each feed-forward layer, 2 to 64. 0: none."""
    experts_per_token: Annotated[int, Between(1, EXPERTS_MAX)] = added_field(2)
    """Experts that compute each token. With all of them the layer is a dense mixture."""
    window: Annotated[int, Between(WINDOW_MIN, 2**31)] | None = added_field(None)
    """Last tokens that attention sees, with the token itself. None: all."""

    def layers_problem(self) -> str | None:
        """Return an error's text if a kind of layer is unknown, or a size is impossible for a layer; None if all is valid.

        All other checks read the tensors of the kinds of layers, so this check comes first.
        """
        used = set[str]()
        for place in LayerPlace:
            name = getattr(self, place.value)
            kind = find_layer(name, place)
            if kind is None:
                known = ", ".join(other for other in layer_names() if find_layer(other, place))
                return f"unknown layer model.{place.value} {name!r}: choose one of {known}"
            problem = kind.sizes_problem(self)
            if problem:
                return problem
            used.update(kind.own_fields)
        for other in LAYERS:
            for field in set(other.own_fields) - used:
                if getattr(self, field) != _defaults()[field]:
                    without = f"{field} {getattr(self, field)} has no effect with {other.place} {getattr(self, other.place)!r}"
                    return f"{without}: use {other.place} {other.name!r}"
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
        if not ROPE_BASE_MIN <= self.rope_base <= ROPE_BASE_MAX:  # The comparison also fails for NaN.
            return f"rope_base must be in {ROPE_BASE_MIN:g}..{ROPE_BASE_MAX:g}, not {self.rope_base:g}"
        if not NORM_EPSILON_MIN <= self.norm_epsilon <= NORM_EPSILON_MAX:
            return f"norm_epsilon must be in {NORM_EPSILON_MIN:g}..{NORM_EPSILON_MAX:g}, not {self.norm_epsilon:g}"
        return None

    def with_window(self, window: int | None) -> ModelSpec:
        """Return this model with another window. A window that is not shorter than the context has no effect and is left out."""
        if window is None or window >= self.context:
            return replace(self, attention=GroupedQueryAttention.name, window=None)
        return replace(self, attention=WindowAttention.name, window=window)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers, in the order of `LayerPlace`. `layers_problem` has checked that all are known."""
        found = [find_layer(getattr(self, place.value), place) for place in LayerPlace]
        kinds = tuple(kind for kind in found if kind is not None)
        assert len(kinds) == len(LayerPlace), self
        return kinds

    @property
    def parameters(self) -> int:
        """Number of parameters in `tensor_shapes`."""
        return _count_parameters(self)

    @property
    def pass_parameters(self) -> int:
        """Number of parameters that a pass computes with for each token: all except those of experts that are not chosen."""
        return self.parameters - self.layers * sum(parameter.idle_elements for parameter in layer_parameters(self))


def int8_problem(model: ModelSpec) -> str | None:
    """Return why the model cannot compute with activations of eight bits, for people; None if it can."""
    if any(parameter.is_ternary for parameter in layer_parameters(model)):
        return None
    return f"quantise int8 needs ternary matrices, and this model has linear {model.linear!r}: leave the option out"


# Kinds of layers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerParameter:
    """A tensor of a layer.

    Its initial values are `initial`, or random around zero: nearly normal if `deviation` is positive, and from −`uniform` to
    `uniform` if that is positive.
    """

    name: str  # name of the tensor without the prefix of the layer, such as `query.weight`
    shape: tuple[int, ...]  # shape of the tensor; for a linear layer (outputs, inputs)
    initial: float = 0.0
    deviation: float = 0.0
    uniform: float = 0.0
    # Name of the tensor in a Llama of `transformers`, without the layer's prefix; empty: it has no name there.
    transformers: str = ""
    gguf: str = ""  # name of the tensor in GGUF, without the layer's prefix; empty: it has no name there
    rotary_heads: int = 0  # number of heads in the tensor's rows if rotary positions turn the rows; else 0
    idle_elements: int = 0  # number of elements that take no part in the computation of one token
    is_ternary: bool = False  # True: the model computes with the ternary weights of the tensor (`training.ternary`).


def linear_deviation(inputs: int) -> float:
    """Return the standard deviation of the initial values of a matrix with this many inputs."""
    return LINEAR_GAIN / math.sqrt(inputs)


class LayerKind:
    """A kind of layer. All peers of a network must have the same code for it."""

    name: ClassVar[str]  # name of the kind in `ModelSpec`
    description: ClassVar[str]  # description for people, in one line
    place: ClassVar[LayerPlace]
    # Module of the ledger, and its least version, that a network must run to train models with this layer: all voters then know
    # the layer. Empty: all networks know it.
    module: ClassVar[str] = ""
    version: ClassVar[int] = 1
    # True: gradients of models with this layer were measured in bf16, and replays tell false ones from honest ones.
    is_replayable_in_bf16: ClassVar[bool] = False
    own_fields: ClassVar[tuple[str, ...]] = ()  # fields of `ModelSpec` that only this kind reads

    def sizes_problem(self, model: ModelSpec) -> str | None:
        """Return an error's text if a size of the model is impossible for the layer; None if all sizes are valid."""
        return None


class LinearKind(LayerKind):
    """A kind of linear layer, which is a matrix. An engine may join all matrices of a block that have the same input."""

    place = LayerPlace.LINEAR

    def matrix(
        self,
        model: ModelSpec,
        name: str,
        outputs: int,
        inputs: int,
        *,
        transformers: str,
        gguf: str,
        is_residual: bool = False,
        rotary_heads: int = 0,
    ) -> LayerParameter:
        """Return the tensor of a linear layer. `is_residual` is true if its outputs are added to the residual stream."""
        raise NotImplementedError


class BlockKind(LayerKind):
    def parameters(self, model: ModelSpec, linear: LinearKind) -> Sequence[LayerParameter]:
        """Return the tensors of one layer's block, in the order of the flat vector. Names are unique within the layer."""
        raise NotImplementedError


def norm_weight(name: str, model: ModelSpec, transformers: str, gguf: str) -> LayerParameter:
    """Return the tensor of weights for an RMSNorm of the residual stream."""
    return LayerParameter(name, (model.width,), initial=1.0, transformers=transformers, gguf=gguf)


class DenseLinear(LinearKind):
    name = "dense"
    description = "a matrix of float32 numbers"
    is_replayable_in_bf16 = True

    def matrix(
        self,
        model: ModelSpec,
        name: str,
        outputs: int,
        inputs: int,
        *,
        transformers: str,
        gguf: str,
        is_residual: bool = False,
        rotary_heads: int = 0,
    ) -> LayerParameter:
        deviation = linear_deviation(inputs)
        if is_residual:  # The residual stream adds the outputs of 2 × `layers` such matrices.
            deviation /= math.sqrt(2 * model.layers)
        return LayerParameter(
            f"{name}.weight",
            (outputs, inputs),
            deviation=deviation,
            transformers=f"{transformers}.weight",
            gguf=f"{gguf}.weight",
            rotary_heads=rotary_heads,
        )


class TernaryLinear(DenseLinear):
    """BitNet b1.58 (Ma et al. 2024, arXiv:2402.17764), with activations in float32."""

    name = "ternary"
    description = "a matrix with one scale and elements −1, 0 or 1, which are made from float32 numbers (Ma et al. 2024)"
    module, version = "jobs", 2
    is_replayable_in_bf16 = False

    def matrix(self, *arguments: Any, **names: Any) -> LayerParameter:
        return replace(super().matrix(*arguments, **names), is_ternary=True)


class GroupedQueryAttention(BlockKind):
    name = "attention"
    description = "causal attention with grouped queries (Ainslie 2023) and rotary positions (Su 2021)"
    place = LayerPlace.ATTENTION
    is_replayable_in_bf16 = True

    def sizes_problem(self, model: ModelSpec) -> str | None:
        if model.width % model.heads or (model.width // model.heads) % 2:
            return f"width {model.width} must be an even multiple of heads {model.heads}"
        if model.heads % model.kv_heads:
            return f"heads {model.heads} must be a multiple of kv_heads {model.kv_heads}"
        return None

    def parameters(self, model: ModelSpec, linear: LinearKind) -> Sequence[LayerParameter]:
        width, heads, kv_heads = model.width, model.heads, model.kv_heads
        kv_width = kv_heads * (width // heads)
        return (
            norm_weight("attention_norm.weight", model, "input_layernorm.weight", "attn_norm.weight"),
            linear.matrix(model, "query", width, width, transformers="self_attn.q_proj", gguf="attn_q", rotary_heads=heads),
            linear.matrix(model, "key", kv_width, width, transformers="self_attn.k_proj", gguf="attn_k", rotary_heads=kv_heads),
            linear.matrix(model, "value", kv_width, width, transformers="self_attn.v_proj", gguf="attn_v"),
            linear.matrix(model, "output", width, width, transformers="self_attn.o_proj", gguf="attn_output", is_residual=True),
        )


class WindowAttention(GroupedQueryAttention):
    """Attention with the tensors of `GroupedQueryAttention`, which are those of a Mistral in files of other programs."""

    name = "sliding-window"
    description = "causal attention to the last `window` tokens (Beltagy 2020, arXiv:2004.05150)"
    module, version = "jobs", 2
    is_replayable_in_bf16 = False
    own_fields = ("window",)

    def sizes_problem(self, model: ModelSpec) -> str | None:
        if model.window is None or not WINDOW_MIN <= model.window <= model.context:
            why = ": with 1 a token sees only itself, and attention learns nothing" if model.window == 1 else ""
            return f"window must be in {WINDOW_MIN}..{model.context}, the context, not {model.window}{why}"
        return super().sizes_problem(model)


class SwiGlu(BlockKind):
    name = "swiglu"
    description = "a gated feed-forward network (Shazeer 2020)"
    place = LayerPlace.FEED_FORWARD
    is_replayable_in_bf16 = True

    def parameters(self, model: ModelSpec, linear: LinearKind) -> Sequence[LayerParameter]:
        width, hidden = model.width, model.hidden
        return (
            norm_weight("mlp_norm.weight", model, "post_attention_layernorm.weight", "ffn_norm.weight"),
            linear.matrix(model, "gate", hidden, width, transformers="mlp.gate_proj", gguf="ffn_gate"),
            linear.matrix(model, "up", hidden, width, transformers="mlp.up_proj", gguf="ffn_up"),
            linear.matrix(model, "down", width, hidden, transformers="mlp.down_proj", gguf="ffn_down", is_residual=True),
        )


class Experts(BlockKind):
    """A sparse mixture of SwiGLU networks (Shazeer 2017, arXiv:1701.06538).

    A token's `experts_per_token` experts are those with the largest probabilities p of a router. The weight of the i-th one rises
    from 0 to p_i with its margin 1 − p_(k+1) / p_i. An expert enters and leaves the choice with weight and slope zero, so neither
    outputs nor gradients jump where honest peers, which round differently, choose different experts (decision 150).
    """

    name = "experts"
    description = "a sparse mixture of gated feed-forward networks, weighted continuously"
    place = LayerPlace.FEED_FORWARD
    module, version = "jobs", 2
    is_replayable_in_bf16 = False
    own_fields = ("experts", "experts_per_token")

    def sizes_problem(self, model: ModelSpec) -> str | None:
        if not model.experts:
            return f"feed_forward {self.name!r} needs a number of experts: set experts to 2..{EXPERTS_MAX}"
        if not 2 <= model.experts <= EXPERTS_MAX:
            return f"experts must be in 2..{EXPERTS_MAX}, not {model.experts}: a single network is feed_forward 'swiglu'"
        if model.linear != DenseLinear.name:
            return f"experts {model.experts} need linear {DenseLinear.name!r}, not {model.linear!r}: no others were measured"
        if not 1 <= model.experts_per_token <= model.experts:
            return f"experts_per_token must be in 1..{model.experts}, the experts, not {model.experts_per_token}"
        return None

    def parameters(self, model: ModelSpec, linear: LinearKind) -> Sequence[LayerParameter]:
        norm, *matrices = SwiGlu().parameters(model, linear)
        # The router is always dense: rounded weights would choose other experts.
        router = LayerParameter("router.weight", (model.experts, model.width), deviation=linear_deviation(model.width))
        return replace(norm, transformers="", gguf=""), router, *(_stack(matrix, model) for matrix in matrices)


def _stack(matrix: LayerParameter, model: ModelSpec) -> LayerParameter:
    """Return the tensor of all experts' matrices: one tensor, since the number of tensors of a model is bounded."""
    idle = (model.experts - model.experts_per_token) * math.prod(matrix.shape)
    shape = (model.experts, *matrix.shape)
    return replace(matrix, name=f"experts.{matrix.name}", shape=shape, transformers="", gguf="", idle_elements=idle)


# Registry ------------------------------------------------------------------------------------------------------------

# Layers of this package.
LAYERS: Final[tuple[LayerKind, ...]] = (
    DenseLinear(),
    TernaryLinear(),
    GroupedQueryAttention(),
    WindowAttention(),
    SwiGlu(),
    Experts(),
)

_known = {kind.name: kind for kind in LAYERS}


def register_layers(kinds: Iterable[LayerKind]) -> None:
    """Add a feature's kinds of layers. A second registration changes nothing."""
    for kind in kinds:
        assert kind.module or kind in LAYERS, f"no ledger module declares the layer {kind.name!r}"
        assert isinstance(kind, LinearKind if kind.place is LayerPlace.LINEAR else BlockKind), kind.name
        assert _known.setdefault(kind.name, kind) is kind, f"two layers are called {kind.name!r}"


def find_layer(name: str, place: LayerPlace) -> LayerKind | None:
    """Return the kind of layer with this name; None if it is unknown or belongs to another place."""
    kind = _known.get(name)
    return kind if kind is not None and kind.place is place else None


def layer_names() -> tuple[str, ...]:
    return tuple(_known)


def complete_model_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return these values of a model's fields, and the kinds of layers that read them, except where `values` has a kind."""
    changed = {name for name, value in values.items() if value != _defaults()[name]}
    return {kind.place.value: kind.name for kind in LAYERS if not changed.isdisjoint(kind.own_fields)} | dict(values)


@lru_cache(maxsize=1)
def _defaults() -> Mapping[str, Any]:
    return {field.name: field.default for field in fields(ModelSpec)}


# Tensors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a model, with the number of its layer; None: the tensor is outside the layers."""

    layer: int | None
    parameter: LayerParameter


@lru_cache(maxsize=8)
def layer_parameters(model: ModelSpec) -> tuple[LayerParameter, ...]:
    """Return the tensors that each layer has, in the order of the flat vector."""
    linear, *blocks = model.layer_kinds
    assert isinstance(linear, LinearKind)
    found = [parameter for kind in blocks if isinstance(kind, BlockKind) for parameter in kind.parameters(model, linear)]
    assert len({parameter.name for parameter in found}) == len(found), "two blocks have a tensor of one name"
    return tuple(found)


def outer_parameters(model: ModelSpec) -> tuple[LayerParameter, ...]:
    """Return the tensors outside the layers: embedding, last norm, and the output layer if it is a separate matrix."""
    of_tokens = (model.vocabulary, model.width)
    embedding = LayerParameter(
        EMBEDDING,
        of_tokens,
        deviation=EMBEDDING_GAIN / math.sqrt(model.width),
        transformers="model.embed_tokens.weight",
        gguf="token_embd.weight",
    )
    norm = LayerParameter(FINAL_NORM, (model.width,), initial=1.0, transformers="model.norm.weight", gguf="output_norm.weight")
    output = LayerParameter(
        OUTPUT_MATRIX,
        of_tokens,
        deviation=linear_deviation(model.width),
        transformers="lm_head.weight",
        gguf="output.weight",
    )
    return (embedding, norm) if model.tied else (embedding, norm, output)


@lru_cache(maxsize=256)  # The result is cached, since the terms and the estimates of every job need it.
def _count_parameters(model: ModelSpec) -> int:
    outside = sum(math.prod(parameter.shape) for parameter in outer_parameters(model))
    return outside + model.layers * sum(math.prod(parameter.shape) for parameter in layer_parameters(model))


@lru_cache(maxsize=8)
def model_tensors(model: ModelSpec) -> Mapping[str, ModelTensor]:
    """Return a model's tensors by name, in the order of the flat vector."""
    embedding, *behind = outer_parameters(model)
    of_layer = layer_parameters(model)
    found = {embedding.name: ModelTensor(None, embedding)}
    for layer in range(model.layers):
        found |= {f"layers.{layer}.{parameter.name}": ModelTensor(layer, parameter) for parameter in of_layer}
    return found | {parameter.name: ModelTensor(None, parameter) for parameter in behind}


def tensor_shapes(model: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a model's tensors, in the order of the flat vector.

    The torch model has the same names and shapes.
    """
    return [(name, tensor.parameter.shape) for name, tensor in model_tensors(model).items()]
