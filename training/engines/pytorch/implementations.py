"""What PyTorch computes of the objectives and layers of this package."""

from __future__ import annotations

from typing import Final

from torch.nn import functional as F

from training.engine_implementations import EngineImplementations, ObjectiveFunctions
from training.engines.pytorch.layers import TorchAttention, TorchSwiGlu
from training.engines.pytorch.losses import held_out_bits, next_token_loss

IMPLEMENTATIONS: Final = EngineImplementations(
    objectives={"language": ObjectiveFunctions(loss=next_token_loss, metrics=held_out_bits)},
    layers={"dense": F.linear, "attention": TorchAttention, "swiglu": TorchSwiGlu},
)
