"""PyTorch's implementations of the kinds of layers, and the cache of attention for generation.

Suffixes name the axes:

- B sequences, T tokens, C features (width)
- H query heads, G key/value heads, D features of one head
- N heads of queries, keys and values together
- F features inside the feed-forward network
- E experts, K experts of a token, M pairs of a token and one of its experts, sorted by expert
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from training.engines.pytorch.device import CPU
from training.transformer import ModelSpec

ROWS = 4  # least rows of a matrix in a product: with fewer rows, libraries add in another order
KEYS = 64  # keys and values of a block of the cache: over whole blocks, attention always adds in the same order
# Square of the margin at which an expert's weight is about half of its probability. A margin is (p_i − p_(k+1)) / p_i.
HALF_MARGIN_SQUARED = 0.1
PROBABILITY_MIN = 1e-12  # replaces smaller probabilities in margins, since a probability may be 0
BALANCE_WEIGHT = 0.01  # weight of the loss that keeps experts equally busy (Fedus 2021, arXiv:2101.03961, section 2.2)

# The product of a kind of linear layer: a function of inputs (…, inputs) and weights (outputs, inputs), which returns (…,
# outputs). The weights may consist of several matrices, one below the other, so the result of each row must not depend on other
# rows.
TorchLinear = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TorchLinearKind:
    """The implementation of a kind of linear layer."""

    product: TorchLinear
    # A function of parameters and of the numbers of rows of their matrices, one below the other. It returns the weights for the
    # product. None: the parameters are the weights.
    make_weights: Callable[[Tensor, Sequence[int]], Tensor] | None = None
    # A function of the same arguments, with the parameters at the start of a round. It returns a function from the parameters of
    # a later local step to the weights for the product.
    start_round: Callable[[Tensor, Sequence[int]], Callable[[Tensor], Tensor]] | None = None
    product_int8: TorchLinear | None = None  # product with activations of eight bits, for inference; None: the kind has none


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The arguments of a block that depend on its layer and on the pass over the model."""

    layer: int = 0
    start: int = 0  # number of tokens before the first token of the pass
    cache: KVCache | None = None
    last: int | None = None  # Later layers use only this number of positions at the end. None: all.
    # Losses of blocks, which a training loss may add. A pass with gradients appends them. None: nobody reads them.
    penalties: list[Tensor] | None = None


class TorchBlock(ABC):
    """The implementation of a kind of block. One object serves all layers of a model, and has no parameters."""

    # For each leaf of autograd, the names of its parameters without the layer's prefix. The parameters of a leaf are neighbours
    # in the flat vector and form one tensor. All leaves together contain all parameters of the block.
    leaves: ClassVar[Mapping[str, tuple[str, ...]]]

    def __init__(self, spec: ModelSpec, linear: TorchLinear, device: torch.device) -> None:
        self.spec, self.linear = spec, linear

    @abstractmethod
    def forward(self, x_BTC: Tensor, weights: Mapping[str, Tensor], at: ForwardPass) -> Tensor:
        """Return the residual stream after the block. `weights` contains the leaves of all blocks of the layer, by name."""

    @staticmethod
    @abstractmethod
    def saved_floats(spec: ModelSpec) -> int:
        """Return how many float32 numbers a pass keeps for the gradient of each token."""

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
        # Floats of size `width`: inputs, normalised inputs with and without weights, queries before and after the rotation,
        # outputs of the heads. Floats of size `kv_width`: keys before and after the rotation, values. Floats of size `heads`:
        # sums of the attention weights, and roots of the norm.
        kv_width = spec.kv_heads * spec.width // spec.heads
        return 6 * spec.width + 3 * kv_width + 2 * spec.heads

    def forward(self, x_BTC: Tensor, weights: Mapping[str, Tensor], at: ForwardPass) -> Tensor:
        heads_BTC = self._attend(self.normalise(x_BTC, weights["attention_norm"]), weights["query_key_value"], at)
        if at.last is not None:
            x_BTC, heads_BTC = x_BTC[:, -at.last :], heads_BTC[:, -at.last :]
        return x_BTC + self.linear(heads_BTC, weights["output"])

    def _attend(self, x_BTC: Tensor, query_key_value: Tensor, at: ForwardPass) -> Tensor:
        """Return the outputs of all heads side by side: (B, T, C)."""
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        batch, length, width = x_BTC.shape
        packed_BTND = self.linear(x_BTC, query_key_value).view(batch, length, heads + 2 * kv_heads, width // heads)
        rotated_BTND = self._rotate(packed_BTND[:, :, : heads + kv_heads], at.start)
        q_BHTD, k_BGTD = rotated_BTND.transpose(1, 2).split((heads, kv_heads), dim=1)
        v_BGTD = packed_BTND[:, :, heads + kv_heads :].transpose(1, 2)
        if at.cache:
            k_BGTD, v_BGTD = at.cache.extend(at.layer, k_BGTD, v_BGTD)
        if q_BHTD.is_cuda:  # In float32, kernels that share keys and values need memory for all attention weights.
            k_BGTD, v_BGTD = (repeat_kv_heads(tensor, heads) for tensor in (k_BGTD, v_BGTD))
        is_shared, mask_TT = k_BGTD.shape[1] != heads, self._mask(length, k_BGTD.shape[2], at, x_BTC.device)
        is_causal = length > 1 and mask_TT is None
        out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, mask_TT, is_causal=is_causal, enable_gqa=is_shared)
        return out_BHTD.transpose(1, 2).reshape(batch, length, width)

    def _mask(self, length: int, keys: int, at: ForwardPass, device: torch.device) -> Tensor | None:
        """Return true for the keys that each token of the pass attends to, (T, keys). None: for all keys up to the token's."""
        # A single new token attends to all tokens before it; several tokens need a causal mask.
        if length > 1 and at.cache and (at.start or at.cache.is_steady):
            return torch.ones(length, keys, dtype=torch.bool, device=device).tril(at.start)
        return None

    def _rotate(self, x_BTND: Tensor, start: int) -> Tensor:
        """Return the tensor with each pair of features (d, d + D/2) turned by an angle that grows with the position."""
        length, half = x_BTND.shape[1], x_BTND.shape[3] // 2
        cos_TD, sin_TD = (table[start : start + length, None] for table in (self.cos_TD, self.sin_TD))
        return (x_BTND * cos_TD + x_BTND.roll(half, -1) * sin_TD).type_as(x_BTND)


class TorchWindowAttention(TorchAttention):
    @staticmethod
    def saved_floats(spec: ModelSpec) -> int:
        return TorchAttention.saved_floats(spec) + spec.context  # the mask

    def _mask(self, length: int, keys: int, at: ForwardPass, device: torch.device) -> Tensor:
        assert self.spec.window is not None, "`ModelSpec.problem` requires a window"
        # The padding of a steady cache may have no key in its window. Nobody reads its results, and a later pass replaces it.
        mask_TT = torch.ones(length, keys, dtype=torch.bool, device=device)
        return mask_TT.tril_(at.start).triu_(at.start - self.spec.window + 1)


class TorchSwiGlu(TorchBlock):
    leaves: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "mlp_norm": ("mlp_norm.weight",),  # (C,)
        "gate_up": ("gate.weight", "up.weight"),  # (2·F, C)
        "down": ("down.weight",),  # (C, F)
    }

    @staticmethod
    def saved_floats(spec: ModelSpec) -> int:
        # Floats of size `width`: inputs, normalised inputs with and without weights. Floats of size `hidden`: gate, up, the
        # gate's activation, and the product of up and activation.
        return 3 * spec.width + 4 * spec.hidden

    def forward(self, x_BTC: Tensor, weights: Mapping[str, Tensor], at: ForwardPass) -> Tensor:
        gate_BTF, up_BTF = self.linear(self.normalise(x_BTC, weights["mlp_norm"]), weights["gate_up"]).chunk(2, dim=-1)
        return x_BTC + self.linear(F.silu(gate_BTF) * up_BTF, weights["down"])


class TorchExperts(TorchBlock):
    leaves: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "mlp_norm": ("mlp_norm.weight",),  # (C,)
        "router": ("router.weight",),  # (E, C)
        "gate": ("experts.gate.weight",),  # (E, F, C)
        "up": ("experts.up.weight",),  # (E, F, C)
        "down": ("experts.down.weight",),  # (E, C, F)
    }

    @staticmethod
    def saved_floats(spec: ModelSpec) -> int:
        # As in a SwiGLU, whose gate, up, activation and product each expert of a token keeps. Floats of size `width` for each
        # expert: its inputs and outputs. Floats of each expert: eight from its probability to its weight, its weight before
        # and after the sort, and five integers of 64 bits for its number, the sort and its token. Floats of size `experts`:
        # probabilities.
        of_expert = 2 * spec.width + 4 * spec.hidden + 20
        return 3 * spec.width + spec.experts_per_token * of_expert + spec.experts

    def forward(self, x_BTC: Tensor, weights: Mapping[str, Tensor], at: ForwardPass) -> Tensor:
        y_BTC = self.normalise(x_BTC, weights["mlp_norm"])
        with torch.autocast(x_BTC.device.type, enabled=False):  # Coarse probabilities would be equal for many experts.
            p_BTE = F.linear(y_BTC.float(), weights["router"]).softmax(dim=-1)
        chosen_BTK, degree_BTK = self.choose_experts(p_BTE)
        tokens_BE = _count_tokens(chosen_BTK, self.spec.experts)
        if at.penalties is not None and torch.is_grad_enabled():
            at.penalties.append(balance_loss(p_BTE, chosen_BTK, degree_BTK))
        share_BTK = degree_BTK * p_BTE.gather(-1, chosen_BTK)
        order_M = chosen_BTK.flatten().sort(stable=True).indices
        token_M = order_M // self.spec.experts_per_token
        parts = y_BTC.flatten(0, 1).index_select(0, token_M).split(tokens_BE.sum(dim=0).tolist())
        # `unbind` joins the gradients of all experts. An index would make a gradient of the whole stack for each expert.
        experts = zip(parts, *(weights[name].unbind() for name in ("gate", "up", "down")), strict=True)
        out_MC = torch.cat([self._compute_expert(*expert) for expert in experts if len(expert[0])])
        out_MC = out_MC * share_BTK.flatten()[order_M, None]
        # A token's experts are added in the order of their numbers.
        return x_BTC + torch.zeros_like(x_BTC).flatten(0, 1).index_add(0, token_M, out_MC.type_as(x_BTC)).view_as(x_BTC)

    def choose_experts(self, p_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the experts of each token, the likeliest first, and the degrees of their choice: each (B, T, K).

        A degree in 0..1 rises from 0 at the edge of the choice, with slope 0 there: gradients do not jump, either.
        """
        count = self.spec.experts_per_token
        best = p_BTE.topk(min(count + 1, self.spec.experts))
        # Probability of the likeliest other expert; 0 if there is none. Its gradient would jump to another expert at a tie.
        threshold_BT1 = best.values[..., count:].sum(dim=-1, keepdim=True).detach()
        p_BTK = best.values[..., :count]
        margin_BTK = ((p_BTK - threshold_BT1) / p_BTK.clamp_min(PROBABILITY_MIN)).square()
        return best.indices[..., :count], (1 + HALF_MARGIN_SQUARED) * margin_BTK / (margin_BTK + HALF_MARGIN_SQUARED)

    def _compute_expert(self, x_NC: Tensor, gate_FC: Tensor, up_FC: Tensor, down_CF: Tensor) -> Tensor:
        rows = len(x_NC)
        # Libraries add in another order for fewer rows. So a generated token gets the bits that it has inside a prompt.
        x_NC = F.pad(x_NC, (0, 0, 0, -rows % ROWS))
        return self.linear(F.silu(self.linear(x_NC, gate_FC)) * self.linear(x_NC, up_FC), down_CF)[:rows]


def _count_tokens(chosen_BTK: Tensor, experts: int) -> Tensor:
    """Return the number of tokens of each expert in each sequence, (B, E)."""
    batch = len(chosen_BTK)
    first_B11 = experts * torch.arange(batch, device=chosen_BTK.device)[:, None, None]
    return torch.bincount((chosen_BTK + first_B11).flatten(), minlength=batch * experts).view(batch, experts)


def balance_loss(p_BTE: Tensor, chosen_BTK: Tensor, degree_BTK: Tensor) -> Tensor:
    """Return 0.01 · E · Σ f_e · P_e of a layer, in the mean over sequences.

    f_e is the mean degree to which a sequence's tokens choose an expert, and P_e its mean probability in the sequence. Means
    over a micro-batch would depend on its size, and honest replays choose other sizes.
    """
    batch, length, experts = p_BTE.shape
    degrees_BE = p_BTE.new_zeros(batch, experts).scatter_add(1, chosen_BTK.flatten(1), degree_BTK.detach().flatten(1))
    return BALANCE_WEIGHT * experts * (degrees_BE / length * p_BTE.mean(dim=1)).sum(dim=-1).mean()


class KVCache:
    """The cache of attention: keys and values of all earlier tokens, for each layer.

    With `is_steady`, and passes over multiples of `ROWS` tokens, the bits of results on a CPU do not depend on how the tokens
    were divided into passes. A library adds in another order for fewer rows, and for another number of keys. Keys and values are
    therefore used in whole blocks with zeros at their end. The last `beyond` tokens of a pass do not belong to the text.
    """

    def __init__(self, spec: ModelSpec, sequences: int = 1, device: torch.device = CPU, is_steady: bool = False) -> None:
        tokens = -(-(spec.context + ROWS - 1) // KEYS) * KEYS if is_steady else spec.context
        shape = (spec.layers, sequences, spec.kv_heads, tokens, spec.width // spec.heads)
        # A steady cache reads zeros beyond `length`, which are masked. Other caches never read there.
        made = torch.zeros if is_steady else torch.empty
        self.keys, self.values = made(shape, device=device), made(shape, device=device)
        self.is_steady, self.length, self.beyond = is_steady, 0, 0

    def keep_sequences(self, sequences: list[int]) -> None:
        """Keep only the keys and values of these sequences, in this order."""
        self.keys, self.values = self.keys[:, sequences], self.values[:, sequences]

    def extend(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        stop = self.length + k_BGTD.shape[2]
        self.keys[layer, :, :, self.length : stop] = k_BGTD
        self.values[layer, :, :, self.length : stop] = v_BGTD
        seen = -(-(stop - self.beyond) // KEYS) * KEYS if self.is_steady else stop
        return self.keys[layer, :, :, :seen], self.values[layer, :, :, :seen]


def repeat_kv_heads(x_BGTD: Tensor, heads: int) -> Tensor:
    """Return keys or values, repeated for each query head that shares them: (B, H, T, D)."""
    if x_BGTD.shape[1] == heads:
        return x_BGTD
    return x_BGTD.repeat_interleave(heads // x_BGTD.shape[1], dim=1)


def rotary_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines of shape (T, D), for the whole context and the additional tokens of a steady cache."""
    half = spec.width // spec.heads // 2
    frequency_D = spec.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle_TD = torch.arange(spec.context + ROWS - 1, dtype=torch.float64)[:, None] * frequency_D
    cos_TD, sin_TD = angle_TD.cos().float(), angle_TD.sin().float()
    return torch.cat((cos_TD, cos_TD), dim=1), torch.cat((-sin_TD, sin_TD), dim=1)
