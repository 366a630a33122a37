"""Learning from given responses in the worker: losses on their tokens alone, and what is measured on those held out.

Axes: B texts, S tokens of a text, N pairs, 2 responses of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf.data.tokenized_records import TokenizedResponses, dpo_batch, response_batch, text_numbers
from rlhf.pair_accuracy import MEASURED_PAIRS_MAX, PAIRS
from rlhf.pytorch import losses
from rlhf.pytorch.reward_model import TOKENS_AT_ONCE, preference_metrics
from training.data.token_sequences import TokenizedText
from training.engines.engine import OnProgress
from training.engines.pytorch.engine import TorchEngine
from training.engines.pytorch.model import GPT
from training.job_spec import JobSpec


def response_logp(model: GPT, x_BS: Tensor, y_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """(B,): log-probability of each response behind its prompt. Logits are made for its tokens alone."""
    x_BS, y_BS, mask_BS = (tensor.to(model.device) for tensor in (x_BS, y_BS, mask_BS))
    logits_MV = model.logits(model.features(x_BS)[mask_BS])
    logp_M = losses.log_probabilities(logits_MV[None], y_BS[mask_BS][None])[0]
    row_M = mask_BS.nonzero()[:, 0]
    return logp_M.new_zeros(len(x_BS)).index_add(0, row_M, logp_M)


def instruct_loss(model: GPT, x_BS: Tensor, y_BS: Tensor, mask_BS: Tensor, tokens_B: Tensor) -> Tensor:
    return (-response_logp(model, x_BS, y_BS, mask_BS) / tokens_B).mean()


def held_out_nats(model: GPT, spec: JobSpec, tokens: TokenizedText, on_step: OnProgress) -> Mapping[str, float]:
    assert isinstance(tokens, TokenizedResponses)
    nats, count = 0.0, 0
    for chosen in _held_out(tokens, spec):
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
    """Those of a reward model, of the implicit reward: β times the log-ratio of policy and reference."""
    assert isinstance(tokens, TokenizedResponses)
    differences, ps = list[Tensor](), list[Tensor]()
    for chosen in _held_out(tokens, spec):
        *texts, reference_N2, p_N = map(torch.from_numpy, dpo_batch(tokens, chosen, is_held_out=True))
        reward_N2 = spec.decoded_settings.beta * (_logp_of_pairs(model, *texts).cpu() - reference_N2)
        differences.append(reward_N2[:, 0] - reward_N2[:, 1])
        ps.append(p_N)
        on_step()
    of_set = tokens.statistics.figures if tokens.statistics else {}
    return of_set | (preference_metrics(torch.cat(differences), torch.cat(ps)) if ps else {PAIRS: 0.0})


def fill_reference_log_probabilities(engine: TorchEngine, drawn: npt.NDArray[np.int64] | None, on_step: OnProgress) -> None:
    """Writes into the data what the reference gives both responses of these pairs (None: those held out), where it is not known
    yet: so each pair is passed over once, and an auditor passes over no others than those of the rounds that it replays.
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
            for part in np.array_split(missing, -(-len(missing) // _at_once(engine.spec))):
                found_B = response_logp(engine.model, *map(torch.from_numpy, response_batch(tokens, side, part)))
                side.reference[part] = found_B.cpu().numpy()
                on_step()
    finally:
        engine.load_parameters(kept)


def _logp_of_pairs(model: GPT, x_N2S: Tensor, y_N2S: Tensor, mask_N2S: Tensor) -> Tensor:
    return response_logp(model, *(array.flatten(0, 1) for array in (x_N2S, y_N2S, mask_N2S))).view(-1, 2)


def _held_out(tokens: TokenizedResponses, spec: JobSpec) -> Iterator[npt.NDArray[np.int64]]:
    """Numbers of held-out records, always the same ones together."""
    chosen = _chosen(tokens)
    for start in range(0, len(chosen), _at_once(spec)):
        yield chosen[start : start + _at_once(spec)]


def _chosen(tokens: TokenizedResponses) -> npt.NDArray[np.int64]:
    """Of those held out, evenly spaced."""
    count = min(len(tokens.held_out_split), MEASURED_PAIRS_MAX)
    return np.linspace(0, max(0, len(tokens.held_out_split) - 1), count).astype(np.int64)


def _at_once(spec: JobSpec) -> int:
    return max(1, TOKENS_AT_ONCE // (2 * spec.model.context))
