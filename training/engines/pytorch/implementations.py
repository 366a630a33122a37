"""PyTorch's implementations of the objectives and layers of this package.

Losses and metrics are functions of the model and of the arrays or data that the objective names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from training.data.token_sequences import TokenArray, TokenizedText, sequence_batch
from training.engine_implementations import EngineImplementations, ObjectiveFunctions
from training.engines.engine import OnProgress
from training.engines.held_out_evaluation import evaluation_windows
from training.engines.pytorch.layers import TorchAttention, TorchExperts, TorchLinearKind, TorchSwiGlu, TorchWindowAttention
from training.engines.pytorch.model import GPT
from training.engines.pytorch.ternary import MovingWeights, linear_int8, ternary_weights
from training.job_spec import JobSpec

EVALUATION_BATCH_TOKENS = 4_096  # tokens of one forward pass: the largest tensor, the logits, has 4 MB if tokens are bytes


def next_token_loss(model: GPT, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token, in nats, and the penalties of layers."""
    loss = model.loss(x_BT, y_BT)  # Subclasses of the model may have another loss.
    return sum(model.penalties, start=loss)


def held_out_bits(model: GPT, spec: JobSpec, tokens: TokenizedText, on_step: OnProgress) -> Mapping[str, float]:
    """Return the held-out bits per byte over fixed windows, by the metric's name; nothing if the job has no held-out part."""
    held_out, context = tokens.held_out, spec.model.context
    if len(held_out) <= context:
        return {}
    nats, bytes_seen = total_nats(model, held_out, evaluation_windows(len(held_out), context), tokens.token_bytes, on_step)
    return {spec.resolved_objective.main_metric: nats / math.log(2) / bytes_seen}


def total_nats(
    model: GPT,
    tokens: TokenArray,
    starts: npt.NDArray[np.int64],
    token_bytes: npt.NDArray[np.int64],
    on_step: OnProgress = lambda: None,
) -> tuple[float, int]:
    """Return the summed loss in nats over these windows, and the number of bytes of the predicted tokens."""
    context, nats, bytes_seen = model.spec.context, 0.0, 0
    for batch in np.array_split(starts, max(1, len(starts) * context // EVALUATION_BATCH_TOKENS)):
        x_BT, y_BT = (tensor.to(model.device) for tensor in window_batch(tokens, batch, context))
        nats += float(model.loss(x_BT, y_BT, reduction="sum"))
        bytes_seen += int(token_bytes[y_BT.cpu().numpy()].sum())
        on_step()
    return nats, bytes_seen


def window_batch(tokens: TokenArray, starts: npt.NDArray[np.int64], context: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and the next-token targets of these windows as tensors of shape (B, T)."""
    x_BT, y_BT = sequence_batch(tokens, starts, context)
    return torch.from_numpy(x_BT), torch.from_numpy(y_BT)


IMPLEMENTATIONS: Final = EngineImplementations(
    objectives={"language": ObjectiveFunctions(loss=next_token_loss, metrics=held_out_bits)},
    layers={
        "dense": TorchLinearKind(F.linear),
        "ternary": TorchLinearKind(F.linear, ternary_weights, MovingWeights, linear_int8),
        "attention": TorchAttention,
        "sliding-window": TorchWindowAttention,
        "swiglu": TorchSwiGlu,
        "experts": TorchExperts,
    },
)
