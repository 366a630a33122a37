"""Reward models in the worker: scores, their loss, and how often they agree with people.

Axes: N pairs, 2 responses of each, B texts, S tokens of a text, C features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rlhf.calibration import calibration_error
from rlhf.data.tokenized_records import TokenizedPairs, pair_batch
from rlhf.objectives.supervised_objectives import MEAN_REWARD, SCORE_HEAD
from rlhf.pair_accuracy import ACCURACY, CALIBRATION, MEASURED_PAIRS_MAX, PAIRS
from rlhf.pytorch import losses
from training.data.token_sequences import TokenizedText
from training.engines.engine import OnProgress, RequiredModel
from training.engines.pytorch.device import CPU
from training.engines.pytorch.model import GPT
from training.job_spec import JobSpec

TOKENS_AT_ONCE: Final = 8_192  # in one pass where nothing is trained
DEVIATION_MIN: Final = 1e-2  # processors differ by 1e-6 of a score: divided by this it stays below what auditors tolerate


def text_scores(model: GPT, x_BS: Tensor, last_B: Tensor) -> Tensor:
    """(B,): of each text, at its last token or the mean of all up to it, as the job says.

    What is behind it changes nothing: the model looks at the past alone.
    """
    features_BSC = model.features(x_BS)
    if model.job.objective == MEAN_REWARD.name:
        is_text_BS = torch.arange(x_BS.shape[1], device=x_BS.device) <= last_B[:, None]
        return (features_BSC @ model.heads[SCORE_HEAD] * is_text_BS).sum(dim=1) / (last_B + 1)
    return features_BSC[torch.arange(len(x_BS), device=x_BS.device), last_B] @ model.heads[SCORE_HEAD]


def reward_loss(model: GPT, x_N2S: Tensor, last_N2: Tensor, p_N: Tensor) -> Tensor:
    score_N2 = text_scores(model, x_N2S.flatten(0, 1), last_N2.flatten()).view(-1, 2)
    return losses.reward_model_losses(score_N2[:, 0], score_N2[:, 1], p_N).mean()


def scores_of_pairs(model: GPT, x_N2S: Tensor, last_N2: Tensor) -> Tensor:
    """(N, 2), of pairs that nothing is trained on. Those of a processor go in and come out."""
    with torch.no_grad():
        texts = (tensor.flatten(0, 1).to(model.device) for tensor in (x_N2S, last_N2))
        return text_scores(model, *texts).view(-1, 2).cpu()


def held_out_scores(model: GPT, tokens: TokenizedPairs, on_step: OnProgress) -> Iterator[tuple[Tensor, Tensor]]:
    """(scores (N, 2), p (N,)) of held-out pairs, a part at a time: always the same pairs, in the same parts."""
    count = min(len(tokens.held_out_split), MEASURED_PAIRS_MAX)
    chosen = np.linspace(0, len(tokens.held_out_split) - 1, count).astype(np.int64) if count else np.empty(0, dtype=np.int64)
    at_once = max(1, TOKENS_AT_ONCE // (2 * model.spec.context))
    for start in range(0, count, at_once):
        x_N2S, last_N2, p_N = map(
            torch.from_numpy, pair_batch(tokens.held_out, tokens.held_out_split, chosen[start : start + at_once])
        )
        yield scores_of_pairs(model, x_N2S, last_N2), p_N
        on_step()


class NormalizedRewardModel:
    """A finished reward model. Its scores are normalised: over the held-out responses they have mean 0 and deviation 1.

    So `beta` and `score_clip` mean the same whatever a model's scores are. Where nothing is held out they stay as they are.
    """

    def __init__(self, other: RequiredModel, on_step: OnProgress, device: torch.device = CPU) -> None:
        assert isinstance(other.data, TokenizedPairs)
        self._model = GPT(other.spec, device)
        self._model.load_parameters(other.parameters)
        parts = [score_N2.double().flatten() for score_N2, _ in held_out_scores(self._model, other.data, on_step)]
        found = torch.cat(parts) if parts else torch.tensor([-1.0, 1.0])
        self._mean, self._deviation = float(found.mean()), max(DEVIATION_MIN, float(found.std(correction=0)))

    def scores(self, x_BS: Tensor, last_B: Tensor, on_step: OnProgress) -> Tensor:
        """(B,)."""
        at_once, found = max(1, TOKENS_AT_ONCE // x_BS.shape[1]), list[Tensor]()
        with torch.no_grad():
            for start in range(0, len(x_BS), at_once):
                part = slice(start, start + at_once)
                of_part = (tensor[part].to(self._model.device) for tensor in (x_BS, last_B))
                found.append((text_scores(self._model, *of_part).cpu() - self._mean) / self._deviation)
                on_step()
        return torch.cat(found)


def reward_metrics(model: GPT, spec: JobSpec, tokens: TokenizedText, on_step: OnProgress) -> Mapping[str, float]:
    """Of the held-out pairs: with a better response, the share whose better one scores higher, where equal scores count half;
    and of all, whether chances are as people's. A figure is left out if there is no such pair. Figures of the set stand beside.
    """
    assert isinstance(tokens, TokenizedPairs)
    parts = list(held_out_scores(model, tokens, on_step))
    if not parts:
        return tokens.statistics.figures | {PAIRS: 0.0}
    d_N = torch.cat([score_N2[:, 0] - score_N2[:, 1] for score_N2, _ in parts])
    return tokens.statistics.figures | preference_metrics(d_N, torch.cat([p_N for _, p_N in parts]))


def preference_metrics(d_N: Tensor, p_N: Tensor) -> dict[str, float]:
    """Of differences of scores, and of p that people give."""
    d_N = torch.nan_to_num(d_N)  # a diverged model ranks no pair
    right_N = ((1 + torch.sign(d_N) * torch.sign(p_N - 0.5)) / 2)[p_N != 0.5]
    found = {CALIBRATION: calibration_error(torch.sigmoid(d_N).numpy(), p_N.numpy()), PAIRS: float(len(right_N))}
    return ({ACCURACY: float(right_N.double().mean())} if len(right_N) else {}) | found
