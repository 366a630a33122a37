"""The losses of objectives, each a function of the model and a batch."""

from __future__ import annotations

from torch import Tensor

from training.engines.pytorch.model import GPT


def next_token(model: GPT, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats."""
    return model.loss(x_BT, y_BT)
