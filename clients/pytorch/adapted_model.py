"""A finished model with adapters, in PyTorch.

The model computes with merged matrices, W + (`SCALE` / rank) · B·A. The gradients of A and B follow from the gradient of the
merged matrix by the chain rule. So all kinds of layers work with adapters, and a model with B = 0 is the base, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clients.objective import A_SUFFIX, B_SUFFIX, SCALE, adapted_matrices, untied_model
from clients.pytorch.losses import token_losses
from clients.records import AdapterSettings, Example, RequestBody
from training.engines.engine import RequiredModel
from training.engines.pytorch.device import to_device, to_numpy
from training.engines.pytorch.log_probabilities import log_probabilities
from training.engines.pytorch.model import GPT
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import EMBEDDING


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of a pass over a request body."""

    loss: float  # sum of the losses of all tokens
    magnitude: float  # sum of their absolute values, which rounding errors are relative to
    logprobs: tuple[Float32Array, ...]  # for each example, the log-probabilities of its targets, shape (tokens,)


class AdaptedModel:
    def __init__(self, spec: JobSpec, base: RequiredModel, device: torch.device) -> None:
        """Make the model of a client job. `base` is the finished model that it adapts."""
        settings: AdapterSettings = spec.decoded_settings
        model = untied_model(base.spec.model, settings)
        self._layout, self._device, self._micro_batch = layout_of(spec), device, spec.micro_batch
        self.gpt = GPT(replace(base.spec, model=model), device)
        self._scale = SCALE / settings.rank
        self._names = tuple(adapted_matrices(spec.model, settings))
        self._places = layout_of(replace(base.spec, model=model)).slots_by_name
        of_base = layout_of(base.spec).tensor_views(base.parameters)
        self._base = torch.empty_like(self.gpt.parameters)
        for name, tensor in self._places.items():
            values = of_base[name if name in of_base else EMBEDDING]
            self._base[tensor.elements] = torch.from_numpy(np.array(values).ravel()).to(device)
        self._adapters = torch.zeros(self._layout.size, device=device)
        # The array of the merged adapters, if it is known never to change; None: other adapters.
        self.loaded: Float32Array | None = None
        self._require_gradients()

    def _require_gradients(self) -> None:
        """Let autograd skip the tensors that have no adapter."""
        gpt, adapted = self.gpt, [self._places[name].elements for name in self._names]
        leaves = [gpt.embedding_VC, gpt.output_VC, gpt.final_norm_C, *(leaf for layer in gpt.layers for leaf in layer.values())]
        for leaf in leaves:
            start = leaf.storage_offset()
            leaf.requires_grad_(any(start <= place.start < start + leaf.numel() for place in adapted))

    def load_adapters(self, adapters: Float32Array) -> None:
        """Merge adapters, shape (parameters,) of the client job, into the base."""
        self.loaded = None  # The caller may change the array.
        self._adapters.copy_(torch.from_numpy(np.array(adapters)))
        with torch.no_grad():
            self.gpt.parameters.copy_(self._base)
            for name in self._names:
                place, (a, b) = self._places[name], self._adapter(name, self._adapters)
                self.gpt.parameters[place.elements].view(place.shape).addmm_(b, a, alpha=self._scale)

    def _adapter(self, name: str, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return A (rank, inputs) and B (outputs, rank) of a matrix, as views of a flat vector."""
        tensors = (self._layout.slots_by_name[f"{name}{suffix}"] for suffix in (A_SUFFIX, B_SUFFIX))
        a, b = (flat[tensor.elements].view(tensor.shape) for tensor in tensors)
        return a, b

    def clear_gradient(self) -> None:
        self.gpt.gradients.zero_()

    def read_gradient(self) -> Float32Array:
        """Return the gradient of the adapters that the passes since `clear_gradient` have added up, shape (parameters,)."""
        found = torch.zeros_like(self._adapters)
        for name in self._names:
            place = self._places[name]
            (a, b), of_matrix = self._adapter(name, self._adapters), self.gpt.gradients[place.elements].view(place.shape)
            of_a, of_b = self._adapter(name, found)
            of_a.addmm_(b.T, of_matrix, alpha=self._scale)
            of_b.addmm_(of_matrix, a.T, alpha=self._scale)
        return np.array(to_numpy(found))

    def run_pass(self, body: RequestBody, *, backward: bool, on_step: Callable[[], None] = lambda: None) -> PassResult:
        """Compute the losses of a valid request body. With `backward`, add their gradient to that of earlier passes."""
        loss = magnitude = 0.0
        logprobs = list[Float32Array]()
        for start in range(0, len(body.examples), self._micro_batch):
            part = body.examples[start : start + self._micro_batch]
            arrays = _padded(part)
            tokens_BT, targets_BT, mask_BT = (to_device(arrays[name], self._device) for name in ("tokens", "targets", "mask"))
            inputs = {name: to_device(arrays[name], self._device) for name in part[0].inputs}
            with torch.set_grad_enabled(backward):
                logp_BT = log_probabilities(self.gpt.logits(self.gpt.features(tokens_BT)), targets_BT)
                losses_BT = token_losses(body.loss, logp_BT, inputs, mask_BT, body.config)
                if backward:
                    losses_BT.sum().backward()
            found_BT = losses_BT.detach().double()
            loss, magnitude = loss + float(found_BT.sum()), magnitude + float(found_BT.abs().sum())
            said_BT = to_numpy(logp_BT.detach())
            logprobs += [np.array(row[: example.length]) for row, example in zip(said_BT, part, strict=True)]
            on_step()
        return PassResult(loss, magnitude, tuple(logprobs))


def _padded(examples: Sequence[Example]) -> Mapping[str, npt.NDArray[np.generic]]:
    """Return tokens, targets, inputs and a mask of these examples, each of shape (examples, longest example)."""
    shape = len(examples), max(example.length for example in examples)
    tokens, targets = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    inputs = {name: np.zeros(shape, dtype=np.float32) for name in examples[0].inputs}
    for row, example in enumerate(examples):
        tokens[row, : example.length] = np.frombuffer(example.tokens, dtype="<u2")
        targets[row, : example.length] = np.frombuffer(example.targets, dtype="<u2")
        mask[row, : example.length] = True
        for name, numbers in example.inputs.items():
            inputs[name][row, : example.length] = np.frombuffer(numbers, dtype="<f4")
    return {"tokens": tokens, "targets": targets, "mask": mask, **inputs}
