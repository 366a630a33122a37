"""Kinds of layers: their tensors, initial values, bounds, and names in files of other programs. No torch.

A layer of the transformer is two blocks: attention, then feed-forward. A block normalises its input and adds its output to the
residual stream. The matrices inside a block are linear layers. `training.transformer.ModelSpec` names the kind in each of these
three places. An engine computes the kinds that it registers (`training.engine_implementations`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

# Deviations in units of 1/√input. Measured on the default job, 30 rounds of two trainers: 2.17 bits/byte held out, against
# 2.20 with 1/√width for the embedding and 2.62 with GPT-2's 0.02 for it, where the tokens drown in what the layers add.
EMBEDDING_GAIN: Final = 0.8  # the output layer is often the same matrix: first logits have a deviation below 1
LINEAR_GAIN: Final = 0.5


class LayerPlace(enum.StrEnum):
    """Where a kind of layer stands in a model: the field of `ModelSpec` that names it."""

    LINEAR = "linear"
    ATTENTION = "attention"
    FEED_FORWARD = "feed_forward"


class ModelSizes(Protocol):
    """What a kind of layer reads of a model (`training.transformer.ModelSpec`)."""

    @property
    def context(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def hidden(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LayerParameter:
    """One tensor. All its values begin at `initial`, or they are random around zero where there is a deviation."""

    name: str  # of a layer's tensor behind the layer's prefix, such as `query.weight`
    shape: tuple[int, ...]  # of a linear layer's matrix: outputs, inputs
    initial: float = 0.0
    deviation: float = 0.0
    transformers: str = ""  # its name in a Llama of `transformers`, behind the layer's prefix; empty: it has no place there
    gguf: str = ""  # the same in GGUF
    rotary_heads: int = 0  # heads that its rows belong to, if rotary positions turn these rows


def linear_deviation(inputs: int) -> float:
    """The initial deviation of a matrix that takes so many inputs."""
    return LINEAR_GAIN / math.sqrt(inputs)


class LayerKind:
    """Everybody who runs a network must find the same here for the same model."""

    name: ClassVar[str]  # in `ModelSpec`
    description: ClassVar[str]  # for people, in one line
    place: ClassVar[LayerPlace]
    # A network trains models with this layer if it runs this module, in this version or a later one: so all its voters know the
    # layer. Empty: each network does.
    module: ClassVar[str] = ""
    version: ClassVar[int] = 1

    def sizes_problem(self, model: ModelSizes) -> str | None:
        """Names the size that the layer cannot have; None if there is none."""
        return None


class LinearKind(LayerKind):
    """A matrix. An engine may be given the matrices of one block that have the same input as one, side by side."""

    place = LayerPlace.LINEAR

    def matrix(
        self,
        model: ModelSizes,
        name: str,
        outputs: int,
        inputs: int,
        *,
        transformers: str,
        gguf: str,
        is_residual: bool = False,
        rotary_heads: int = 0,
    ) -> LayerParameter:
        """The tensor of a linear layer. With `is_residual` its outputs are added to the residual stream."""
        raise NotImplementedError


class BlockKind(LayerKind):
    def parameters(self, model: ModelSizes, linear: LinearKind) -> Sequence[LayerParameter]:
        """The tensors of one layer's block, in the order of the flat vector. No other block of the layer has their names."""
        raise NotImplementedError


def norm_weight(name: str, model: ModelSizes, transformers: str, gguf: str) -> LayerParameter:
    """The weights of an RMSNorm of the residual stream."""
    return LayerParameter(name, (model.width,), initial=1.0, transformers=transformers, gguf=gguf)


class DenseLinear(LinearKind):
    name = "dense"
    description = "a matrix of float32 numbers"

    def matrix(
        self,
        model: ModelSizes,
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
        if is_residual:  # 2 × layers of them add up
            deviation /= math.sqrt(2 * model.layers)
        return LayerParameter(
            f"{name}.weight",
            (outputs, inputs),
            deviation=deviation,
            transformers=f"{transformers}.weight",
            gguf=f"{gguf}.weight",
            rotary_heads=rotary_heads,
        )


class GroupedQueryAttention(BlockKind):
    name = "attention"
    description = "causal attention with grouped queries (Ainslie 2023) and rotary positions (Su 2021)"
    place = LayerPlace.ATTENTION

    def sizes_problem(self, model: ModelSizes) -> str | None:
        if model.width % model.heads or (model.width // model.heads) % 2:
            return f"width {model.width} must be an even multiple of heads {model.heads}"
        if model.heads % model.kv_heads:
            return f"heads {model.heads} must be a multiple of kv_heads {model.kv_heads}"
        return None

    def parameters(self, model: ModelSizes, linear: LinearKind) -> Sequence[LayerParameter]:
        width, heads, kv_heads = model.width, model.heads, model.kv_heads
        kv_width = kv_heads * (width // heads)
        return (
            norm_weight("attention_norm.weight", model, "input_layernorm.weight", "attn_norm.weight"),
            linear.matrix(model, "query", width, width, transformers="self_attn.q_proj", gguf="attn_q", rotary_heads=heads),
            linear.matrix(model, "key", kv_width, width, transformers="self_attn.k_proj", gguf="attn_k", rotary_heads=kv_heads),
            linear.matrix(model, "value", kv_width, width, transformers="self_attn.v_proj", gguf="attn_v"),
            linear.matrix(model, "output", width, width, transformers="self_attn.o_proj", gguf="attn_output", is_residual=True),
        )


class SwiGlu(BlockKind):
    name = "swiglu"
    description = "a gated feed-forward network (Shazeer 2020)"
    place = LayerPlace.FEED_FORWARD

    def parameters(self, model: ModelSizes, linear: LinearKind) -> Sequence[LayerParameter]:
        width, hidden = model.width, model.hidden
        return (
            norm_weight("mlp_norm.weight", model, "post_attention_layernorm.weight", "ffn_norm.weight"),
            linear.matrix(model, "gate", hidden, width, transformers="mlp.gate_proj", gguf="ffn_gate"),
            linear.matrix(model, "up", hidden, width, transformers="mlp.up_proj", gguf="ffn_up"),
            linear.matrix(model, "down", width, hidden, transformers="mlp.down_proj", gguf="ffn_down", is_residual=True),
        )


# Registry ------------------------------------------------------------------------------------------------------------

LAYERS: Final[tuple[LayerKind, ...]] = (DenseLinear(), GroupedQueryAttention(), SwiGlu())  # of this package

_known = {kind.name: kind for kind in LAYERS}


def register_layers(kinds: Iterable[LayerKind]) -> None:
    """Layers of a feature. Registering one again changes nothing."""
    for kind in kinds:
        assert kind.module or kind in LAYERS, f"no module says that a network knows the layer {kind.name!r}"
        assert isinstance(kind, LinearKind if kind.place is LayerPlace.LINEAR else BlockKind), kind.name
        assert _known.setdefault(kind.name, kind) is kind, f"two layers are called {kind.name!r}"


def find_layer(name: str, place: LayerPlace) -> LayerKind | None:
    """None: this program knows no such layer for this place."""
    kind = _known.get(name)
    return kind if kind is not None and kind.place is place else None


def layer_names() -> tuple[str, ...]:
    return tuple(_known)
