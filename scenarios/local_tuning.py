"""A LoRA of a base in plain torch: autograd through W + scale · B·A, and torch's AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from clients.objective import A_SUFFIX, B_SUFFIX, SCALE, adapted_matrices
from training.engines.pytorch.model import GPT
from training.formats.huggingface_model import open_huggingface_model
from training.job_spec import JobSpec
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import layout_of
from training.transformer import EMBEDDING, OUTPUT_MATRIX

Texts = Sequence[Sequence[int]]


class LocalTuning:
    def __init__(self, base_spec: JobSpec, base: ReplicatedModel, run_spec: JobSpec, run: bytes) -> None:
        """Make the loop of a run, which begins with the run's first adapters."""
        self._gpt = GPT(base_spec)
        self._gpt.load_parameters(base.parameters)
        views = layout_of(base_spec).tensor_views(base.parameters)
        self._weights = {name: torch.tensor(values) for name, values in views.items()}
        self._weights.setdefault(OUTPUT_MATRIX, self._weights[EMBEDDING])
        adapters = layout_of(run_spec).tensor_views(ReplicatedModel.initial(run, run_spec).parameters)
        self._tensors = {name: torch.tensor(values, requires_grad=True) for name, values in adapters.items()}
        self._adapted = adapted_matrices(run_spec.model, run_spec.decoded_settings)
        self._scale = SCALE / run_spec.decoded_settings.rank
        self._optimizer: torch.optim.Optimizer | None = None

    @torch.no_grad()
    def base_logprobs(self, texts: Texts) -> Tensor:
        """Return the log-probabilities of the base, shape (texts, tokens - 1)."""
        fresh = GPT(self._gpt.job)
        fresh.parameters.copy_(self._gpt.parameters)
        return _logprobs(fresh, texts)

    @torch.no_grad()
    def logprobs(self, texts: Texts) -> Tensor:
        return self._pass(texts)

    @torch.no_grad()
    def folder_logprobs(self, folder: Path, texts: Texts) -> Tensor:
        """Return the log-probabilities of a model in a folder of `peer model`."""
        found = open_huggingface_model(folder, as_bytes=True)
        gpt = GPT(JobSpec(name="merged", model=found.model))
        values = BytesIO()
        found.write_parameters(gpt.job, values)
        gpt.load_parameters(np.frombuffer(values.getvalue(), dtype=np.float32))
        return _logprobs(gpt, texts)

    def take_step(self, texts: Texts, adam: Mapping[str, float]) -> None:
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(
                self._tensors.values(),
                lr=adam["learning_rate"],
                betas=(adam["beta1"], adam["beta2"]),
                eps=adam["eps"],
                weight_decay=adam["weight_decay"],
            )
        self._optimizer.zero_grad()
        loss = -self._pass(texts).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._tensors.values(), adam["grad_clip_norm"])
        self._optimizer.step()

    def _pass(self, texts: Texts) -> Tensor:
        """Return the log-probabilities of the model with the adapters."""
        for index, layer in enumerate(self._gpt.layers):
            for block in self._gpt.blocks:
                for leaf, names in block.leaves.items():
                    layer[leaf] = torch.cat([self._merged(f"layers.{index}.{name}") for name in names])  # type: ignore[index]
        self._gpt.output_VC = self._merged(OUTPUT_MATRIX)
        return _logprobs(self._gpt, texts)

    def _merged(self, name: str) -> Tensor:
        weight = self._weights[name]
        if name not in self._adapted:
            return weight
        return weight + self._scale * self._tensors[f"{name}{B_SUFFIX}"] @ self._tensors[f"{name}{A_SUFFIX}"]


def _logprobs(gpt: GPT, texts: Texts) -> Tensor:
    tokens_BT = torch.tensor(texts)
    logits_BTV = gpt.logits(gpt.features(tokens_BT[:, :-1]))
    return F.log_softmax(logits_BTV, dim=-1).gather(2, tokens_BT[:, 1:, None])[:, :, 0]
