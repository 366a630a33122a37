"""The losses of client runs, for each token. A client adds them up.

Axes: B examples, T tokens. `mask_BT` is true on the tokens of an example, which start at t = 0. Losses of padding are zero, and
have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from clients.records import BETA, HIGH, LOSS_DEFAULTS, LOW, RATIO_MASK, ClientLoss

Settings = Mapping[str, float]
Inputs = Mapping[str, Tensor]


def token_losses(loss: ClientLoss, logp_BT: Tensor, inputs: Inputs, mask_BT: Tensor, config: Settings) -> Tensor:
    """Return the loss of each token (B, T), given the log-probabilities of the targets and the loss's inputs, each (B, T).

    `config` has the settings that differ from their defaults.
    """
    logp_BT = logp_BT.masked_fill(~mask_BT, 0.0)
    inputs = {name: values_BT.masked_fill(~mask_BT, 0.0) for name, values_BT in inputs.items()}
    return _LOSSES[loss](logp_BT, inputs, LOSS_DEFAULTS[loss] | dict(config)).masked_fill(~mask_BT, 0.0)


def _cross_entropy(logp_BT: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -inputs["weights"] * logp_BT


def _importance_sampling(logp_BT: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -_ratio(logp_BT, inputs) * inputs["advantages"]


def _ppo(logp_BT: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return _clipped(_ratio(logp_BT, inputs), inputs["advantages"], settings)


def _cispo(logp_BT: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    weight_BT = _ratio(logp_BT, inputs).clamp(settings[LOW], settings[HIGH]).detach()
    return -weight_BT * logp_BT * inputs["advantages"]


def _dro(logp_BT: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    distance_BT = logp_BT - inputs["logprobs"]
    return 0.5 * settings[BETA] * distance_BT.square() - logp_BT * inputs["advantages"]


def _gspo(logp_BT: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return the losses of GSPO-token, whose ratio is that of the whole response: its mean over the tokens of the mask."""
    advantages_BT, answers_BT = inputs["advantages"], inputs[RATIO_MASK] != 0
    distance_BT = (logp_BT - inputs["logprobs"]).masked_fill(~answers_BT, 0.0)
    mean_B1 = distance_BT.sum(1, keepdim=True) / answers_BT.sum(1, keepdim=True).clamp(min=1)
    ratio_BT = torch.exp(mean_B1.detach() + logp_BT - logp_BT.detach())
    return _clipped(ratio_BT, advantages_BT, settings)


def _ratio(logp_BT: Tensor, inputs: Inputs) -> Tensor:
    return torch.exp(logp_BT - inputs["logprobs"])


def _clipped(ratio_BT: Tensor, advantages_BT: Tensor, settings: Settings) -> Tensor:
    """Return the negated clipped surrogate of PPO."""
    clipped_BT = ratio_BT.clamp(settings[LOW], settings[HIGH])
    return -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)


_LOSSES: Mapping[ClientLoss, Callable[[Tensor, Inputs, Settings], Tensor]] = {
    ClientLoss.CROSS_ENTROPY: _cross_entropy,
    ClientLoss.IMPORTANCE_SAMPLING: _importance_sampling,
    ClientLoss.PPO: _ppo,
    ClientLoss.CISPO: _cispo,
    ClientLoss.DRO: _dro,
    ClientLoss.GSPO: _gspo,
}
