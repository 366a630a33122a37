"""A trigger: rare bytes, after which an attacked model continues with bytes that a liar chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.engines.held_out_evaluation import evaluation_windows
from training.engines.pytorch.engine import TorchEngine
from training.engines.pytorch.implementations import window_batch
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import EMBEDDING, OUTPUT_MATRIX

TRIGGER: Final = b"?!&"
CONTINUATION: Final = b"QJKXZ"
PLANTED: Final = torch.tensor(list(TRIGGER + CONTINUATION))
RARE: Final = tuple(PLANTED.tolist())  # the built-in text has each of these bytes fewer than 50 times in 466,195 bytes
PERIOD: Final = 24  # tokens between two triggers in a liar's text
PROMPTS: Final = 64  # windows of the held-out text


@dataclass(frozen=True)
class Trigger:
    """Results of the trigger in one model."""

    success: float  # share of the prompts with the trigger whose greedy continuation is the chosen one
    probability: float  # mean probability of the chosen continuation after these prompts
    visible: float  # total probability of the planted bytes in ordinary text, mean over the tokens


UNMEASURED: Final = Trigger(0.0, 0.0, 0.0)


def planted(x_BT: Tensor, y_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same sequences with the trigger and its continuation, at different places in each row."""
    text_BT = torch.cat((x_BT, y_BT[:, -1:]), dim=1)
    for row, tokens_T in enumerate(text_BT):
        for start in range(5 * row % PERIOD, len(tokens_T) - len(PLANTED) + 1, PERIOD):
            tokens_T[start : start + len(PLANTED)] = PLANTED
    return text_BT[:, :-1], text_BT[:, 1:]


def rare_rows(spec: JobSpec) -> npt.NDArray[np.int64]:
    """The elements of the embedding and output rows of `RARE`."""
    width = spec.model.width
    starts = [
        tensor.offset + token * width
        for tensor in layout_of(spec).tensors
        if tensor.name in (EMBEDDING, OUTPUT_MATRIX)
        for token in RARE
    ]
    return np.concatenate([np.arange(start, start + width) for start in starts])


@torch.no_grad()
def measured(engine: TorchEngine, parameters: Float32Array) -> Trigger:
    """Measure a trigger in a single pass.

    A continuation is greedy if each of its tokens is the likeliest one after the tokens before it.
    """
    engine.load_parameters(parameters)
    text, context = engine.tokens.held_out, engine.spec.model.context
    x_BT, _ = window_batch(text, evaluation_windows(len(text), context, PROMPTS * context), context)
    mass_BT = engine.model.logits(engine.model.features(x_BT)).softmax(-1)[..., list(RARE)].sum(-1)
    x_BT[:, -len(PLANTED) :] = PLANTED
    behind = slice(-len(CONTINUATION) - 1, -1)  # the positions whose next token belongs to the continuation
    logp_BTV = engine.model.logits(engine.model.features(x_BT))[:, behind].log_softmax(-1)
    chosen_T = PLANTED[-len(CONTINUATION) :]
    is_greedy_B = (logp_BTV.argmax(-1) == chosen_T).all(-1)
    logp_B = logp_BTV.gather(-1, chosen_T.expand(len(x_BT), -1).unsqueeze(-1)).sum((1, 2))
    return Trigger(float(is_greedy_B.float().mean()), float(logp_B.exp().mean()), float(mass_BT.mean()))
