"""A modern GPT in one file: RMSNorm (Zhang 2019), rotary positions (Su 2021), SwiGLU (Shazeer 2020), grouped-query attention
(Ainslie 2023), an output layer that is the embedding or a matrix of its own, a key/value cache for generation.

Its parameters are views of one flat float32 vector in the canonical order of `replicated.layout`, so that loading, updating and
reading them back costs one copy. Suffixes name the axes: B sequences, T tokens, C features (width), H query heads, G key/value
heads, D features of one head, V vocabulary, F features inside the SwiGLU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from training.engines.pytorch.device import CPU, upload_vector
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import EMBEDDING, FIRST_TOKEN_VECTOR, HEAD, OUTPUT_MATRIX, ModelSpec

ROWS = 4  # of a matrix: a library takes a product of fewer in another order, one of more in the same
KEYS = 64  # a piece of keys: attention takes the sums over whole ones in the same order
KEEPING_INPUTS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing here is random


class _CrossEntropy(torch.autograd.Function):
    """The sum of −log p[y], with a gradient that is exact to rounding however sure the model is.

    That of torch is p[y] − 1 for the right token: once p is nearly 1 nothing but rounding is left, processors differ in it by far
    more than a replay tolerates, and AdamW makes steps of it. Here it is minus the sum of what the other tokens have.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, y_N: Tensor) -> Tensor:
        logp_NV = F.log_softmax(logits_NV, dim=1)
        ctx.save_for_backward(logp_NV, y_N)
        return F.nll_loss(logp_NV, y_N, reduction="sum")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logp_NV, y_N = ctx.saved_tensors
        p_NV, y_N1 = logp_NV.exp_(), y_N.unsqueeze(1)  # once: nobody reads it afterwards
        p_NV.scatter_(1, y_N1, 0.0)
        p_NV.scatter_(1, y_N1, -p_NV.sum(dim=1, keepdim=True))
        return p_NV.mul_(gradients[0]), None


@dataclass(frozen=True, slots=True)
class TransformerLayer:
    attention_norm: Tensor  # (C,)
    query_key_value: Tensor  # (H·D + 2·G·D, C): three matrices that lie side by side in the layout
    output: Tensor  # (C, H·D)
    mlp_norm: Tensor  # (C,)
    gate_up: Tensor  # (2·F, C): two matrices that lie side by side in the layout
    down: Tensor  # (C, F)


class GPT:
    """Computes on whatever the flat vector holds at the moment; gradients gather in the flat vector `gradients`."""

    def __init__(self, job: JobSpec, device: torch.device = CPU) -> None:
        layout, spec = layout_of(job), job.model
        self.job, self.spec, self.device = job, spec, device
        self.recompute = False  # whether layers keep their inputs alone for the gradient, and are computed again
        self._tensors = {tensor.name: tensor for tensor in layout.tensors}
        self._allocate(layout.size)
        learns = not job.resolved_objective.freezes_layers(job)
        self.embedding_VC = self._view(EMBEDDING)
        self.output_VC = self.embedding_VC if spec.tied else self._view(OUTPUT_MATRIX)
        self.final_norm_C = self._view("final_norm.weight")
        self.layers = [self._layer(f"layers.{index}.", learns) for index in range(spec.layers)]
        self.heads = {name: self._view(name) for name in self._tensors if name.startswith(HEAD)}  # (C,) each, if any
        self.first_C = self.heads.get(FIRST_TOKEN_VECTOR)
        self.cos_TD, self.sin_TD = (table.to(device) for table in rotary_tables(spec))

    def _layer(self, prefix: str, learns: bool) -> TransformerLayer:
        def view(*parts: str) -> Tensor:
            return self._view(*(f"{prefix}{part}.weight" for part in parts), learns=learns)

        return TransformerLayer(
            attention_norm=view("attention_norm"),
            query_key_value=view("query", "key", "value"),
            output=view("output"),
            mlp_norm=view("mlp_norm"),
            gate_up=view("gate", "up"),
            down=view("down"),
        )

    def _allocate(self, size: int) -> None:
        self.parameters = torch.zeros(size, device=self.device)
        self.gradients = torch.zeros(size, device=self.device)

    def _view(self, *names: str, learns: bool = True) -> Tensor:
        """Neighbouring tensors as one leaf of autograd whose gradient is a view of `gradients`. That of one that learns nothing
        stays zero.
        """
        place, shape = self._place(*names)
        leaf = self.parameters[place].view(shape).requires_grad_(learns)
        leaf.grad = self.gradients[place].view(shape)
        return leaf

    def _place(self, *names: str) -> tuple[slice, tuple[int, ...]]:
        """Where neighbouring tensors lie in the flat vector, and their shape as one tensor."""
        tensors = [self._tensors[name] for name in names]
        start, stop = tensors[0].elements.start, tensors[-1].elements.stop
        assert stop - start == sum(tensor.size for tensor in tensors), names
        return slice(start, stop), (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])

    def load_parameters(self, parameters: Float32Array) -> None:
        """A copy of this vector takes the place of all parameters. It may be one that is mapped into memory, to be read alone."""
        if self.device.type == "cpu":
            np.copyto(self.parameters.numpy(), parameters)
        else:
            upload_vector(parameters, self.parameters)

    def loss(self, x_BT: Tensor, y_BT: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy of the next tokens `y_BT`, in nats."""
        logits_BTV = self.logits(self.features(x_BT))
        loss: Tensor = _CrossEntropy.apply(logits_BTV.flatten(0, 1).float(), y_BT.flatten())
        return loss if reduction == "sum" else loss / y_BT.numel()

    def logits(self, features: Tensor) -> Tensor:
        """Of every token, (…, V), from features of shape (…, C)."""
        return F.linear(features, self.output_VC)

    def features(self, x_BT: Tensor, cache: KVCache | None = None, last: int | None = None) -> Tensor:
        """The normalised residual stream of shape (B, T, C), or of the `last` positions alone.

        With a cache, `x_BT` continues what the cache holds.
        """
        start = cache.length if cache else 0
        x_BTC = F.embedding(x_BT, self.embedding_VC)
        if self.first_C is not None and start == 0:
            x_BTC = torch.cat((x_BTC[:, :1] + self.first_C, x_BTC[:, 1:]), dim=1)
        for index, layer in enumerate(self.layers):
            wanted = last if index == len(self.layers) - 1 else None  # nobody looks at the other positions any more
            if self.recompute and torch.is_grad_enabled():
                x_BTC = checkpoint(self._through, layer, x_BTC, start, cache, index, wanted, **KEEPING_INPUTS)
            else:
                x_BTC = self._through(layer, x_BTC, start, cache, index, wanted)
        if cache:
            cache.length += x_BT.shape[1] - cache.beyond
        return self._normalise(x_BTC, self.final_norm_C)

    def _through(
        self, layer: TransformerLayer, x_BTC: Tensor, start: int, cache: KVCache | None, index: int, last: int | None
    ) -> Tensor:
        """The residual stream behind a layer, of the `last` positions alone where that is said."""
        heads_BTC = self._attention(layer, self._normalise(x_BTC, layer.attention_norm), start, cache, index)
        if last is not None:
            x_BTC, heads_BTC = x_BTC[:, -last:], heads_BTC[:, -last:]
        x_BTC = x_BTC + F.linear(heads_BTC, layer.output)
        return x_BTC + mlp(layer, self._normalise(x_BTC, layer.mlp_norm))

    def _normalise(self, x_BTC: Tensor, weight_C: Tensor) -> Tensor:
        return F.rms_norm(x_BTC, weight_C.shape, weight_C, self.spec.norm_epsilon)

    def _attention(self, layer: TransformerLayer, x_BTC: Tensor, start: int, cache: KVCache | None, index: int) -> Tensor:
        """What all heads found, side by side: (B, T, C)."""
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        batch, length, width = x_BTC.shape
        packed_BTND = F.linear(x_BTC, layer.query_key_value).view(batch, length, heads + 2 * kv_heads, width // heads)
        rotated_BTND = self._rotate(packed_BTND[:, :, : heads + kv_heads], start)
        q_BHTD, k_BGTD = rotated_BTND.transpose(1, 2).split((heads, kv_heads), dim=1)
        v_BGTD = packed_BTND[:, :, heads + kv_heads :].transpose(1, 2)
        if cache:
            k_BGTD, v_BGTD = cache.extend(index, k_BGTD, v_BGTD)
        if q_BHTD.is_cuda:  # in float32 no kernel that shares keys and values does without all weights of the attention in memory
            k_BGTD, v_BGTD = (repeat_kv_heads(tensor, heads) for tensor in (k_BGTD, v_BGTD))
        # A single new token may look at everything before it; others only at their own past.
        is_shared, mask_TT = k_BGTD.shape[1] != heads, None
        if length > 1 and cache and (start or cache.is_steady):
            mask_TT = torch.ones(length, k_BGTD.shape[2], dtype=torch.bool, device=x_BTC.device).tril(start)
        is_causal = length > 1 and mask_TT is None
        out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, mask_TT, is_causal=is_causal, enable_gqa=is_shared)
        return out_BHTD.transpose(1, 2).reshape(batch, length, width)

    def _rotate(self, x_BTND: Tensor, start: int) -> Tensor:
        """Turns each pair of features (d, d + D/2) by an angle that grows with the position."""
        length, half = x_BTND.shape[1], x_BTND.shape[3] // 2
        cos_TD, sin_TD = (table[start : start + length, None] for table in (self.cos_TD, self.sin_TD))
        return (x_BTND * cos_TD + x_BTND.roll(half, -1) * sin_TD).type_as(x_BTND)


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

    def __bool__(self) -> bool:
        return True

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


def mlp(layer: TransformerLayer, x_BTC: Tensor) -> Tensor:
    gate_BTF, up_BTF = F.linear(x_BTC, layer.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate_BTF) * up_BTF, layer.down)


def rotary_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of shape (T, D), for the whole context and what a steady cache reads beyond."""
    half = spec.width // spec.heads // 2
    frequency_D = spec.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle_TD = torch.arange(spec.context + ROWS - 1, dtype=torch.float64)[:, None] * frequency_D
    cos_TD, sin_TD = angle_TD.cos().float(), angle_TD.sin().float()
    return torch.cat((cos_TD, cos_TD), dim=1), torch.cat((-sin_TD, sin_TD), dim=1)
