"""Learning from given responses in the worker: losses on their tokens alone, and what is measured on those held out.

Axes: B texts, S tokens of a text, N pairs, 2 responses of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf import losses
from rlhf.accuracy import MEASURED_PAIRS_MAX
from rlhf.pytorch.reward import TOKENS_AT_ONCE, figures_of
from rlhf.responses import Responses, rows
from rlhf.set_figures import PAIRS
from rlhf.supervised import of_pairs, texts_of
from training.engines.engine import Beat
from training.engines.pytorch.engine import Engine
from training.engines.pytorch.model import GPT
from training.sequences import Tokens
from training.spec import JobSpec


def response_logp(model: GPT, x_BS: Tensor, y_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """(B,): log-probability of each response behind its prompt. Logits are made for its tokens alone."""
    x_BS, y_BS, mask_BS = (tensor.to(model.device) for tensor in (x_BS, y_BS, mask_BS))
    logits_MV = model.logits(model.features(x_BS)[mask_BS])
    logp_M = losses.log_probabilities(logits_MV[None], y_BS[mask_BS][None])[0]
    row_M = mask_BS.nonzero()[:, 0]
    return logp_M.new_zeros(len(x_BS)).index_add(0, row_M, logp_M)


def instruct_loss(model: GPT, x_BS: Tensor, y_BS: Tensor, mask_BS: Tensor, tokens_B: Tensor) -> Tensor:
    return (-response_logp(model, x_BS, y_BS, mask_BS) / tokens_B).mean()


def held_out_nats(model: GPT, spec: JobSpec, tokens: Tokens, on_step: Beat) -> Mapping[str, float]:
    assert isinstance(tokens, Responses)
    nats, count = 0.0, 0
    for chosen in _held_out(tokens, spec):
        x_BS, y_BS, mask_BS = map(torch.from_numpy, rows(tokens.held_out, tokens.measured, chosen))
        nats -= float(response_logp(model, x_BS, y_BS, mask_BS).double().sum())
        count += int(mask_BS.sum())
        on_step()
    return {spec.kind.figure: nats / count} if count else {}


def dpo_loss(model: GPT, x_N2S: Tensor, y_N2S: Tensor, mask_N2S: Tensor, reference_N2: Tensor, p_N: Tensor) -> Tensor:
    logp_2N, reference_2N = _logp_of_pairs(model, x_N2S, y_N2S, mask_N2S).T, reference_N2.T
    both = (logp_2N[0], logp_2N[1], reference_2N[0], reference_2N[1])
    return losses.dpo_losses(*both, p_N, beta=model.job.own.beta).mean()


def dpo_figures(model: GPT, spec: JobSpec, tokens: Tokens, on_step: Beat) -> Mapping[str, float]:
    """Those of a reward model, of the implicit reward: β times the log-ratio of policy and reference."""
    assert isinstance(tokens, Responses)
    differences, ps = list[Tensor](), list[Tensor]()
    for chosen in _held_out(tokens, spec):
        *texts, reference_N2, p_N = map(torch.from_numpy, of_pairs(tokens, chosen, is_held_out=True))
        reward_N2 = spec.own.beta * (_logp_of_pairs(model, *texts).cpu() - reference_N2)
        differences.append(reward_N2[:, 0] - reward_N2[:, 1])
        ps.append(p_N)
        on_step()
    of_set = tokens.of_set.figures if tokens.of_set else {}
    return of_set | (figures_of(torch.cat(differences), torch.cat(ps)) if ps else {PAIRS: 0.0})


def refer(engine: Engine, drawn: npt.NDArray[np.int64] | None, on_step: Beat) -> None:
    """Writes into the data what the reference gives both responses of these pairs (None: those held out), where it is not known
    yet: so each pair is passed over once, and an auditor passes over no others than those of the rounds that it replays.
    """
    data, kept = engine.tokens, engine.read()
    assert isinstance(data, Responses) and engine.first is not None
    tokens, side = (data.held_out, data.measured) if drawn is None else (data.train, data.trained)
    texts = texts_of(_chosen(data) if drawn is None else np.unique(drawn))
    missing = texts[np.isnan(side.reference[texts])]
    if not len(missing):
        return
    kept = kept.copy()
    engine.load(engine.first)
    try:
        with torch.no_grad():
            for part in np.array_split(missing, -(-len(missing) // _at_once(engine.spec))):
                found_B = response_logp(engine.model, *map(torch.from_numpy, rows(tokens, side, part)))
                side.reference[part] = found_B.cpu().numpy()
                on_step()
    finally:
        engine.load(kept)


def _logp_of_pairs(model: GPT, x_N2S: Tensor, y_N2S: Tensor, mask_N2S: Tensor) -> Tensor:
    return response_logp(model, *(array.flatten(0, 1) for array in (x_N2S, y_N2S, mask_N2S))).view(-1, 2)


def _held_out(tokens: Responses, spec: JobSpec) -> Iterator[npt.NDArray[np.int64]]:
    """Numbers of held-out records, always the same ones together."""
    chosen = _chosen(tokens)
    for start in range(0, len(chosen), _at_once(spec)):
        yield chosen[start : start + _at_once(spec)]


def _chosen(tokens: Responses) -> npt.NDArray[np.int64]:
    """Of those held out, evenly spaced."""
    count = min(len(tokens.measured), MEASURED_PAIRS_MAX)
    return np.linspace(0, max(0, len(tokens.measured) - 1), count).astype(np.int64)


def _at_once(spec: JobSpec) -> int:
    return max(1, TOKENS_AT_ONCE // (2 * spec.model.context))
