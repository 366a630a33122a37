"""PyTorch's implementations of the kinds of layers, and the cache that attention keeps for generation.

Suffixes name the axes: B sequences, T tokens, C features (width), H query heads, G key/value heads, D features of one head,
N heads of queries, keys and values together, F features inside the feed-forward network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from training.engines.pytorch.device import CPU
from training.transformer import ModelSpec

ROWS = 4  # of a matrix: a library takes a product of fewer in another order, one of more in the same
KEYS = 64  # a piece of keys: attention takes the sums over whole ones in the same order

# The implementation of a kind of linear layer: inputs (…, inputs) and weights (outputs, inputs) give (…, outputs). The weights
# may be those of several matrices side by side, so each row is computed on its own.
TorchLinear = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Where a block stands in a pass over the model."""

    layer: int = 0
    start: int = 0  # tokens before those of the pass
    cache: KVCache | None = None
    last: int | None = None  # positions at the end that anybody looks at behind this layer; None: all


class TorchBlock(ABC):
    """The implementation of a kind of block. One object serves all layers of a model, and holds no parameters."""

    # Leaf of autograd -> parameters of the block, behind the layer's prefix, that lie side by side in the flat vector and are one
    # tensor there. The leaves hold all parameters of the block.
    leaves: ClassVar[Mapping[str, tuple[str, ...]]]

    def __init__(self, spec: ModelSpec, linear: TorchLinear, device: torch.device) -> None:
        self.spec, self.linear = spec, linear

    @abstractmethod
    def forward(self, x_BTC: Tensor, weights: Mapping[str, Tensor], at: ForwardPass) -> Tensor:
        """The residual stream behind the block. `weights` has the leaves of the layer's blocks by name."""

    @staticmethod
    @abstractmethod
    def saved_floats(spec: ModelSpec) -> int:
        """float32 numbers of each token that a pass keeps for the gradient."""

    def normalise(self, x_BTC: Tensor, weight_C: Tensor) -> Tensor:
        return F.rms_norm(x_BTC, weight_C.shape, weight_C, self.spec.norm_epsilon)


class TorchAttention(TorchBlock):
    leaves: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention_norm": ("attention_norm.weight",),  # (C,)
        "query_key_value": ("query.weight", "key.weight", "value.weight"),  # (H·D + 2·G·D, C)
        "output": ("output.weight",),  # (C, H·D)
    }

    def __init__(self, spec: ModelSpec, linear: TorchLinear, device: torch.device) -> None:
        super().__init__(spec, linear, device)
        self.cos_TD, self.sin_TD = (table.to(device) for table in rotary_tables(spec))

    @staticmethod
    def saved_floats(spec: ModelSpec) -> int:
        # Inputs, normalised inputs with and without weights, queries before and behind the rotation, the output of the heads;
        # keys before and behind the rotation, values; the sums of the attention's weights, and the root of the norm.
        kv_width = spec.kv_heads * spec.width // spec.heads
        return 6 * spec.width + 3 * kv_width + 2 * spec.heads

    def forward(self, x_BTC: Tensor, weights: Mapping[str, Tensor], at: ForwardPass) -> Tensor:
        heads_BTC = self._attend(self.normalise(x_BTC, weights["attention_norm"]), weights["query_key_value"], at)
        if at.last is not None:
            x_BTC, heads_BTC = x_BTC[:, -at.last :], heads_BTC[:, -at.last :]
        return x_BTC + self.linear(heads_BTC, weights["output"])

    def _attend(self, x_BTC: Tensor, query_key_value: Tensor, at: ForwardPass) -> Tensor:
        """What all heads found, side by side: (B, T, C)."""
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        batch, length, width = x_BTC.shape
        packed_BTND = self.linear(x_BTC, query_key_value).view(batch, length, heads + 2 * kv_heads, width // heads)
        rotated_BTND = self._rotate(packed_BTND[:, :, : heads + kv_heads], at.start)
        q_BHTD, k_BGTD = rotated_BTND.transpose(1, 2).split((heads, kv_heads), dim=1)
        v_BGTD = packed_BTND[:, :, heads + kv_heads :].transpose(1, 2)
        if at.cache:
            k_BGTD, v_BGTD = at.cache.extend(at.layer, k_BGTD, v_BGTD)
        if q_BHTD.is_cuda:  # in float32 no kernel that shares keys and values does without all weights of the attention in memory
            k_BGTD, v_BGTD = (repeat_kv_heads(tensor, heads) for tensor in (k_BGTD, v_BGTD))
        # A single new token may look at everything before it; others only at their own past.
        is_shared, mask_TT = k_BGTD.shape[1] != heads, None
        if length > 1 and at.cache and (at.start or at.cache.is_steady):
            mask_TT = torch.ones(length, k_BGTD.shape[2], dtype=torch.bool, device=x_BTC.device).tril(at.start)
        is_causal = length > 1 and mask_TT is None
        out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, mask_TT, is_causal=is_causal, enable_gqa=is_shared)
        return out_BHTD.transpose(1, 2).reshape(batch, length, width)

    def _rotate(self, x_BTND: Tensor, start: int) -> Tensor:
        """Turns each pair of features (d, d + D/2) by an angle that grows with the position."""
        length, half = x_BTND.shape[1], x_BTND.shape[3] // 2
        cos_TD, sin_TD = (table[start : start + length, None] for table in (self.cos_TD, self.sin_TD))
        return (x_BTND * cos_TD + x_BTND.roll(half, -1) * sin_TD).type_as(x_BTND)


class TorchSwiGlu(TorchBlock):
    leaves: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "mlp_norm": ("mlp_norm.weight",),  # (C,)
        "gate_up": ("gate.weight", "up.weight"),  # (2·F, C)
        "down": ("down.weight",),  # (C, F)
    }

    @staticmethod
    def saved_floats(spec: ModelSpec) -> int:
        # Inputs, normalised inputs with and without weights; gate, up, the gate's activation, and their product.
        return 3 * spec.width + 4 * spec.hidden

    def forward(self, x_BTC: Tensor, weights: Mapping[str, Tensor], at: ForwardPass) -> Tensor:
        gate_BTF, up_BTF = self.linear(self.normalise(x_BTC, weights["mlp_norm"]), weights["gate_up"]).chunk(2, dim=-1)
        return x_BTC + self.linear(F.silu(gate_BTF) * up_BTF, weights["down"])


class KVCache:
    """Keys and values of the tokens seen so far, per layer.

    Where it is steady, and every pass is over a multiple of `ROWS` tokens, the bits of a processor's results do not depend on how
    many tokens each pass was over: a library adds in another order for fewer rows, and for another number of keys. So keys and
    values are given in whole pieces, zeros at their end. The last `beyond` tokens of a pass are no part of the text.
    """

    def __init__(self, spec: ModelSpec, sequences: int = 1, device: torch.device = CPU, is_steady: bool = False) -> None:
        tokens = -(-(spec.context + ROWS - 1) // KEYS) * KEYS if is_steady else spec.context
        shape = (spec.layers, sequences, spec.kv_heads, tokens, spec.width // spec.heads)
        made = torch.zeros if is_steady else torch.empty  # what is behind `length` is masked, or never read
        self.keys, self.values = made(shape, device=device), made(shape, device=device)
        self.is_steady, self.length, self.beyond = is_steady, 0, 0

    def keep_sequences(self, sequences: list[int]) -> None:
        """From now on of these alone."""
        self.keys, self.values = self.keys[:, sequences], self.values[:, sequences]

    def extend(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        stop = self.length + k_BGTD.shape[2]
        self.keys[layer, :, :, self.length : stop] = k_BGTD
        self.values[layer, :, :, self.length : stop] = v_BGTD
        seen = -(-(stop - self.beyond) // KEYS) * KEYS if self.is_steady else stop
        return self.keys[layer, :, :, :seen], self.values[layer, :, :, :seen]


def repeat_kv_heads(x_BGTD: Tensor, heads: int) -> Tensor:
    """(B, H, T, D): keys or values, once for each of the query heads that share them."""
    if x_BGTD.shape[1] == heads:
        return x_BGTD
    return x_BGTD.repeat_interleave(heads // x_BGTD.shape[1], dim=1)


def rotary_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of shape (T, D), for the whole context and what a steady cache reads beyond."""
    half = spec.width // spec.heads // 2
    frequency_D = spec.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle_TD = torch.arange(spec.context + ROWS - 1, dtype=torch.float64)[:, None] * frequency_D
    cos_TD, sin_TD = angle_TD.cos().float(), angle_TD.sin().float()
    return torch.cat((cos_TD, cos_TD), dim=1), torch.cat((-sin_TD, sin_TD), dim=1)
