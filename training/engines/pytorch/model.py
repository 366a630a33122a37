"""A decoder-only transformer in PyTorch.

It has an embedding, layers of the kinds that the job names (`training.engines.pytorch.layers`), RMSNorm (Zhang 2019), and an
output layer, which is the embedding or a separate matrix.

Its parameters are views of one flat float32 vector in the canonical order of `training.replicated.tensor_layout`. One copy is
enough to load, update or read all parameters. Suffixes name the axes: B sequences, T tokens, C features (width), V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from protocol.errors import UserError
from training.engine_implementations import layer_implementation
from training.engines.pytorch.device import CPU, upload_vector
from training.engines.pytorch.layers import ForwardPass, KVCache, TorchBlock, TorchLinear, TorchLinearKind
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import EMBEDDING, FINAL_NORM, FIRST_TOKEN_VECTOR, HEAD, OUTPUT_MATRIX, int8_problem, layer_parameters

NAME = "pytorch"  # name of the engine
# Arguments of torch's `checkpoint`. The model has no random operation.
KEEPING_INPUTS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


class _CrossEntropy(torch.autograd.Function):
    """The sum of −log p[y], with a gradient that is exact to rounding for any certainty of the model.

    torch's gradient for the right token is p[y] − 1. If p is nearly 1, only rounding errors are left. Processors differ in these
    errors by far more than a replay tolerates, and AdamW turns the errors into steps. The gradient of this class is minus the sum
    of p over all other tokens.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, y_N: Tensor) -> Tensor:
        logp_NV = F.log_softmax(logits_NV, dim=1)
        ctx.save_for_backward(logp_NV, y_N)
        return F.nll_loss(logp_NV, y_N, reduction="sum")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logp_NV, y_N = ctx.saved_tensors
        p_NV, y_N1 = logp_NV.exp_(), y_N.unsqueeze(1)  # exp is computed in place, since nothing reads `logp_NV` afterwards.
        p_NV.scatter_(1, y_N1, 0.0)
        p_NV.scatter_(1, y_N1, -p_NV.sum(dim=1, keepdim=True))
        return p_NV.mul_(gradients[0]), None


class GPT:
    """A transformer that computes on the flat vector `parameters`. Gradients accumulate in the flat vector `gradients`."""

    def __init__(self, job: JobSpec, device: torch.device = CPU) -> None:
        layout, spec = layout_of(job), job.model
        self.job, self.spec, self.device = job, spec, device
        self.recompute = False  # True if a pass stores only the inputs of layers, and computes the layers again for the gradient.
        self._tensors = {tensor.name: tensor for tensor in layout.tensors}
        self._allocate(layout.size)
        learns = not job.resolved_objective.freezes_layers(job)
        self.embedding_VC = self._view(EMBEDDING)
        self.output_VC = self.embedding_VC if spec.tied else self._view(OUTPUT_MATRIX)
        self.final_norm_C = self._view(FINAL_NORM)
        self._linear: TorchLinearKind = layer_implementation(NAME, spec.linear)
        self.blocks = self._make_blocks(self._linear.product)
        self._ternary_rows = self._rows_of_ternary_leaves()
        # For each layer, functions from leaves to weights during the local steps of a round; empty outside of them.
        self._moving: list[Mapping[str, Callable[[Tensor], Tensor]]] = []
        self.layers = [self._layer(f"layers.{index}.", learns) for index in range(spec.layers)]
        # Vectors of shape (C,) by name, for objectives that have heads.
        self.heads = {name: self._view(name) for name in self._tensors if name.startswith(HEAD)}
        self.first_C = self.heads.get(FIRST_TOKEN_VECTOR)
        # Losses of blocks in the last pass, which a training loss may add (`ForwardPass.penalties`).
        self.penalties = list[Tensor]()

    def _make_blocks(self, linear: TorchLinear) -> list[TorchBlock]:
        """Return the attention and the feed-forward block, which all layers share."""
        kinds: list[type[TorchBlock]] = [
            layer_implementation(NAME, name) for name in (self.spec.attention, self.spec.feed_forward)
        ]
        return [kind(self.spec, linear, self.device) for kind in kinds]

    def _rows_of_ternary_leaves(self) -> Mapping[str, tuple[int, ...]]:
        """Return the numbers of rows of the matrices in each leaf whose parameters are not the weights of the product."""
        known, found = {parameter.name: parameter for parameter in layer_parameters(self.spec)}, dict[str, tuple[int, ...]]()
        for block in self.blocks:
            for leaf, names in block.leaves.items():
                kinds = {known[name].is_ternary for name in names}
                assert len(kinds) == 1, f"the leaf {leaf!r} joins ternary matrices with others"
                if kinds == {True}:
                    found[leaf] = tuple(known[name].shape[0] for name in names)
        return found

    def with_int8_activations(self) -> GPT:
        """Return a model on the same parameters whose linear layers read activations of eight bits. It is for inference only.

        Raises `UserError` if the model's matrices are not ternary.
        """
        problem = int8_problem(self.spec)
        if problem:
            raise UserError(problem)
        assert self._linear.product_int8 is not None, self.spec.linear
        found = copy.copy(self)
        found.blocks = self._make_blocks(self._linear.product_int8)
        return found

    def _layer(self, prefix: str, learns: bool) -> Mapping[str, Tensor]:
        """Return the tensors (leaves of autograd) of a layer's blocks by name."""
        leaves = {leaf: names for block in self.blocks for leaf, names in block.leaves.items()}
        found = {leaf: self._view(*(f"{prefix}{name}" for name in names), learns=learns) for leaf, names in leaves.items()}
        assert sum(map(len, leaves.values())) == len(layer_parameters(self.spec)), "a block leaves out a parameter"
        return found

    def _allocate(self, size: int) -> None:
        self.parameters = torch.zeros(size, device=self.device)
        self.gradients = torch.zeros(size, device=self.device)

    def _view(self, *names: str, learns: bool = True) -> Tensor:
        """Return neighbouring tensors as one tensor, a leaf of autograd whose gradient is a view of `gradients`.

        The gradient of a leaf that does not learn stays zero.
        """
        place, shape = self._place(*names)
        leaf = self.parameters[place].view(shape).requires_grad_(learns)
        leaf.grad = self.gradients[place].view(shape)
        return leaf

    def _place(self, *names: str) -> tuple[slice, tuple[int, ...]]:
        """Return the range of neighbouring tensors in the flat vector, and their shape as one tensor."""
        tensors = [self._tensors[name] for name in names]
        start, stop = tensors[0].elements.start, tensors[-1].elements.stop
        assert stop - start == sum(tensor.size for tensor in tensors), names
        return slice(start, stop), (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])

    def load_parameters(self, parameters: Float32Array) -> None:
        """Copy the vector `parameters`, which may be a read-only memory map, into the model."""
        if self.device.type == "cpu":
            np.copyto(self.parameters.numpy(), parameters)
        else:
            upload_vector(parameters, self.parameters)

    def loss(self, x_BT: Tensor, y_BT: Tensor, reduction: str = "mean") -> Tensor:
        """Return the cross-entropy of the next tokens `y_BT`, in nats."""
        logits_BTV = self.logits(self.features(x_BT))
        loss: Tensor = _CrossEntropy.apply(logits_BTV.flatten(0, 1).float(), y_BT.flatten())
        return loss if reduction == "sum" else loss / y_BT.numel()

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of every token, (…, V), from features of shape (…, C)."""
        return F.linear(features, self.output_VC)

    def features(self, x_BT: Tensor, cache: KVCache | None = None, last: int | None = None) -> Tensor:
        """Return the normalised residual stream of shape (B, T, C), or of the `last` positions only.

        With a cache, `x_BT` continues the cached tokens.
        """
        self.penalties.clear()
        start = cache.length if cache else 0
        x_BTC = F.embedding(x_BT, self.embedding_VC)
        if self.first_C is not None and start == 0:
            x_BTC = torch.cat((x_BTC[:, :1] + self.first_C, x_BTC[:, 1:]), dim=1)
        for index, layer in enumerate(self.layers):
            wanted = last if index == len(self.layers) - 1 else None  # After the last layer, only these positions are read.
            at = ForwardPass(index, start, cache, wanted, self.penalties)
            if self.recompute and torch.is_grad_enabled():
                x_BTC = checkpoint(self._through, layer, x_BTC, at, **KEEPING_INPUTS)
            else:
                x_BTC = self._through(layer, x_BTC, at)
        if cache:
            cache.length += x_BT.shape[1] - cache.beyond
        return F.rms_norm(x_BTC, self.final_norm_C.shape, self.final_norm_C, self.spec.norm_epsilon)

    def _ternary_layer(self, layer: Any, index: int) -> Mapping[str, Tensor]:
        """Return the leaves of a layer, with the weights for the product in the place of latent weights."""
        found = {leaf: layer[leaf] for block in self.blocks for leaf in block.leaves}
        moving = self._moving[index] if self._moving and torch.is_grad_enabled() else {}
        for leaf, rows in self._ternary_rows.items():
            if moving:
                found[leaf] = moving[leaf](found[leaf])
            else:
                assert self._linear.make_weights is not None, self.spec.linear
                found[leaf] = self._linear.make_weights(found[leaf], rows)
        return found

    @contextmanager
    def local_steps(self) -> Iterator[None]:
        """Let ternary weights move without jumps in passes with gradients, from their values at the present parameters."""
        if self._ternary_rows:
            start = self._linear.start_round
            assert start is not None, self.spec.linear
            self._moving = [
                {leaf: start(layer[leaf], rows) for leaf, rows in self._ternary_rows.items()} for layer in self.layers
            ]
        try:
            yield
        finally:
            self._moving = []

    def _through(self, layer: Any, x_BTC: Tensor, at: ForwardPass) -> Tensor:
        """Return the residual stream after a layer. If `at.last` is set, it has only this number of positions, the last ones."""
        if self._ternary_rows:
            layer = self._ternary_layer(layer, at.layer)
        for block in self.blocks:
            x_BTC = block.forward(x_BTC, layer, at)
        return x_BTC
