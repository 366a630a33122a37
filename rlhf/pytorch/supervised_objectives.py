"""Objectives that learn from sets, in the worker: scores, losses, and metrics on held-out records.

Axes: N pairs, 2 responses of each, B texts, S tokens of a text, C features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf.data.tokenized_records import TokenizedPairs, TokenizedResponses, dpo_batch, pair_batch, response_batch, text_numbers
from rlhf.objectives.supervised_objectives import MEAN_REWARD, SCORE_HEAD
from rlhf.pair_accuracy import ACCURACY, CALIBRATION, MEASURED_PAIRS_MAX, PAIRS
from rlhf.pytorch import losses
from training.data.token_sequences import TokenizedText
from training.engines.engine import OnProgress, RequiredModel
from training.engines.pytorch.device import CPU
from training.engines.pytorch.engine import TorchEngine
from training.engines.pytorch.log_probabilities import log_probabilities
from training.engines.pytorch.model import GPT
from training.job_spec import JobSpec

TOKENS_AT_ONCE: Final = 8_192  # tokens in one forward pass without gradients
DEVIATION_MIN: Final = 1e-2  # least divisor of scores: their differences of 1e-6 between processors stay within the tolerance
BINS: Final = 10  # bins of probabilities in the calibration error
Floats = npt.NDArray[np.floating[Any]]


def calibration_error(chances: Floats, p: Floats) -> float:
    """Return the expected calibration error (Guo et al. 2017, arXiv:1706.04599) of N pairs.

    `chances` (N,) is the model's probability σ(d) that the first response is better, and `p` (N,) is the share of people who
    prefer it. Each pair counts in both orders, so the order of the responses does not matter.
    """
    said, right = np.concatenate([chances, 1 - chances]).astype(np.float64), np.concatenate([p, 1 - p]).astype(np.float64)
    bins = np.minimum((said * BINS).astype(np.int64), BINS - 1)
    # A bin contributes its share of the pairs, times the difference between the mean probability and the mean p of its pairs.
    gaps = np.bincount(bins, weights=said - right, minlength=BINS)
    return float(np.abs(gaps).sum() / len(said))


def text_scores(model: GPT, x_BS: Tensor, last_B: Tensor) -> Tensor:
    """Return the score of each text (B,): the head's output at the last token, or for `reward-mean` its mean over all tokens.

    Attention is causal, so padding after the last token has no effect.
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
    """Return the scores (N, 2) of pairs without gradients. Takes and returns tensors on the CPU."""
    with torch.no_grad():
        texts = (tensor.flatten(0, 1).to(model.device) for tensor in (x_N2S, last_N2))
        return text_scores(model, *texts).view(-1, 2).cpu()


def held_out_scores(model: GPT, tokens: TokenizedPairs, on_step: OnProgress) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (scores (N, 2), p (N,)) of the measured held-out pairs, always in the same parts."""
    for chosen in _held_out(tokens, model.spec.context):
        x_N2S, last_N2, p_N = map(torch.from_numpy, pair_batch(tokens.held_out, tokens.held_out_split, chosen))
        yield scores_of_pairs(model, x_N2S, last_N2), p_N
        on_step()


class NormalizedRewardModel:
    """A finished reward model whose scores have mean 0 and deviation 1 over the held-out responses.

    So `beta` and `score_clip` have the same effect with every model. Without held-out pairs the scores are not normalized.
    """

    def __init__(self, other: RequiredModel, on_step: OnProgress, device: torch.device = CPU) -> None:
        assert isinstance(other.data, TokenizedPairs)
        self._model = GPT(other.spec, device)
        self._model.load_parameters(other.parameters)
        parts = [score_N2.double().flatten() for score_N2, _ in held_out_scores(self._model, other.data, on_step)]
        found = torch.cat(parts) if parts else torch.tensor([-1.0, 1.0])
        self._mean, self._deviation = float(found.mean()), max(DEVIATION_MIN, float(found.std(correction=0)))

    def scores(self, x_BS: Tensor, last_B: Tensor, on_step: OnProgress) -> Tensor:
        """Return the normalized score of each text (B,)."""
        at_once, found = max(1, TOKENS_AT_ONCE // x_BS.shape[1]), list[Tensor]()
        with torch.no_grad():
            for start in range(0, len(x_BS), at_once):
                part = slice(start, start + at_once)
                of_part = (tensor[part].to(self._model.device) for tensor in (x_BS, last_B))
                found.append((text_scores(self._model, *of_part).cpu() - self._mean) / self._deviation)
                on_step()
        return torch.cat(found)


def reward_metrics(model: GPT, spec: JobSpec, tokens: TokenizedText, on_step: OnProgress) -> Mapping[str, float]:
    """Return the statistics of a preference set, and the metrics of its reward model on held-out pairs (`preference_metrics`)."""
    assert isinstance(tokens, TokenizedPairs)
    parts = list(held_out_scores(model, tokens, on_step))
    if not parts:
        return tokens.statistics.figures | {PAIRS: 0.0}
    d_N = torch.cat([score_N2[:, 0] - score_N2[:, 1] for score_N2, _ in parts])
    return tokens.statistics.figures | preference_metrics(d_N, torch.cat([p_N for _, p_N in parts]))


def preference_metrics(d_N: Tensor, p_N: Tensor) -> dict[str, float]:
    """Return the metrics of a model from the differences `d_N` of its scores.

    The accuracy is the share of pairs whose better response scores higher. Pairs with equal scores count half, and pairs that
    people called a tie are left out. The accuracy is missing if all pairs are ties. The calibration error is over all pairs.
    """
    d_N = torch.nan_to_num(d_N)  # A diverged model has NaN, which counts as equal scores.
    right_N = ((1 + torch.sign(d_N) * torch.sign(p_N - 0.5)) / 2)[p_N != 0.5]
    found = {CALIBRATION: calibration_error(torch.sigmoid(d_N).numpy(), p_N.numpy()), PAIRS: float(len(right_N))}
    return ({ACCURACY: float(right_N.double().mean())} if len(right_N) else {}) | found


def response_logp(model: GPT, x_BS: Tensor, y_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Return the log-probability of each response after its prompt (B,). Logits are computed for response tokens only."""
    x_BS, y_BS, mask_BS = (tensor.to(model.device) for tensor in (x_BS, y_BS, mask_BS))
    logits_MV = model.logits(model.features(x_BS)[mask_BS])
    logp_M = log_probabilities(logits_MV[None], y_BS[mask_BS][None])[0]
    row_M = mask_BS.nonzero()[:, 0]
    return logp_M.new_zeros(len(x_BS)).index_add(0, row_M, logp_M)


def instruct_loss(model: GPT, x_BS: Tensor, y_BS: Tensor, mask_BS: Tensor, tokens_B: Tensor) -> Tensor:
    return (-response_logp(model, x_BS, y_BS, mask_BS) / tokens_B).mean()


def held_out_nats(model: GPT, spec: JobSpec, tokens: TokenizedText, on_step: OnProgress) -> Mapping[str, float]:
    assert isinstance(tokens, TokenizedResponses)
    nats, count = 0.0, 0
    for chosen in _held_out(tokens, spec.model.context):
        x_BS, y_BS, mask_BS = map(torch.from_numpy, response_batch(tokens.held_out, tokens.held_out_split, chosen))
        nats -= float(response_logp(model, x_BS, y_BS, mask_BS).double().sum())
        count += int(mask_BS.sum())
        on_step()
    return {spec.resolved_objective.main_metric: nats / count} if count else {}


def dpo_loss(model: GPT, x_N2S: Tensor, y_N2S: Tensor, mask_N2S: Tensor, reference_N2: Tensor, p_N: Tensor) -> Tensor:
    logp_2N, reference_2N = _logp_of_pairs(model, x_N2S, y_N2S, mask_N2S).T, reference_N2.T
    both = (logp_2N[0], logp_2N[1], reference_2N[0], reference_2N[1])
    return losses.dpo_losses(*both, p_N, beta=model.job.decoded_settings.beta).mean()


def dpo_figures(model: GPT, spec: JobSpec, tokens: TokenizedText, on_step: OnProgress) -> Mapping[str, float]:
    """Return the metrics of a policy's implicit reward, like a reward model's: β times the log-ratio of policy and reference."""
    assert isinstance(tokens, TokenizedResponses)
    differences, ps = list[Tensor](), list[Tensor]()
    for chosen in _held_out(tokens, spec.model.context):
        *texts, reference_N2, p_N = map(torch.from_numpy, dpo_batch(tokens, chosen, is_held_out=True))
        reward_N2 = spec.decoded_settings.beta * (_logp_of_pairs(model, *texts).cpu() - reference_N2)
        differences.append(reward_N2[:, 0] - reward_N2[:, 1])
        ps.append(p_N)
        on_step()
    of_set = tokens.statistics.figures if tokens.statistics else {}
    return of_set | (preference_metrics(torch.cat(differences), torch.cat(ps)) if ps else {PAIRS: 0.0})


def fill_reference_log_probabilities(engine: TorchEngine, drawn: npt.NDArray[np.int64] | None, on_step: OnProgress) -> None:
    """Compute the missing log-probabilities of the `drawn` pairs under the reference, and store them in the engine's data.

    None stands for the held-out pairs that are measured. Each pair is computed only once. An auditor computes only the pairs of
    the rounds that it re-executes.
    """
    data, kept = engine.tokens, engine.read_parameters()
    assert isinstance(data, TokenizedResponses) and engine.first_parameters is not None
    tokens, side = (data.held_out, data.held_out_split) if drawn is None else (data.train, data.train_split)
    texts = text_numbers(_chosen(data) if drawn is None else np.unique(drawn))
    missing = texts[np.isnan(side.reference[texts])]
    if not len(missing):
        return
    kept = kept.copy()
    engine.load_parameters(engine.first_parameters)
    try:
        with torch.no_grad():
            for part in np.array_split(missing, -(-len(missing) // _at_once(engine.spec.model.context))):
                found_B = response_logp(engine.model, *map(torch.from_numpy, response_batch(tokens, side, part)))
                side.reference[part] = found_B.cpu().numpy()
                on_step()
    finally:
        engine.load_parameters(kept)


def _logp_of_pairs(model: GPT, x_N2S: Tensor, y_N2S: Tensor, mask_N2S: Tensor) -> Tensor:
    return response_logp(model, *(array.flatten(0, 1) for array in (x_N2S, y_N2S, mask_N2S))).view(-1, 2)


def _held_out(tokens: TokenizedPairs | TokenizedResponses, context: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield numbers of the measured held-out records, always in the same parts."""
    chosen = _chosen(tokens)
    for start in range(0, len(chosen), _at_once(context)):
        yield chosen[start : start + _at_once(context)]


def _chosen(tokens: TokenizedPairs | TokenizedResponses) -> npt.NDArray[np.int64]:
    """Return the numbers of the held-out records to measure, evenly spaced."""
    count = min(len(tokens.held_out_split), MEASURED_PAIRS_MAX)
    return np.linspace(0, max(0, len(tokens.held_out_split) - 1), count).astype(np.int64)


def _at_once(context: int) -> int:
    return max(1, TOKENS_AT_ONCE // (2 * context))
