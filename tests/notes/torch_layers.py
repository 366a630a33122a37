"""PyTorch's implementation of the feature's layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from training.engine_implementations import EngineImplementations
from training.engines.pytorch.layers import ForwardPass, TorchBlock
from training.transformer import ModelSpec


class TorchSquares(TorchBlock):
    leaves: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "squares_norm": ("squares_norm.weight",),
        "rise": ("rise.weight",),
        "scale": ("scale.weight",),
        "fall": ("fall.weight",),
    }

    @staticmethod
    def saved_floats(spec: ModelSpec) -> int:
        return 3 * spec.width + 4 * spec.hidden

    def forward(self, x_BTC: Tensor, weights: Mapping[str, Tensor], at: ForwardPass) -> Tensor:
        rise_BTF = self.linear(self.normalise(x_BTC, weights["squares_norm"]), weights["rise"])
        return x_BTC + self.linear(F.relu(rise_BTF).square() * weights["scale"], weights["fall"])


IMPLEMENTATIONS = EngineImplementations(layers={"squares": TorchSquares})
