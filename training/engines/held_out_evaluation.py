"""Windows of a held-out part that all engines measure, and the measurement in numpy for engines without a faster one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.data.token_sequences import TokenizedText, sequence_batch
from training.engines.engine import OnProgress
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array

# Most held-out tokens in one measurement: with torch it takes less than 0.2 s on one thread with the default model.
EVALUATION_TOKENS_MAX: Final = 16_384
# A function from the tokens of one sequence, at most as many as the context, to the logits of each next token: shape (T, V).
Logits = Callable[[npt.NDArray[np.int64]], Float32Array]


def evaluation_windows(held_out: int, context: int, tokens_max: int = EVALUATION_TOKENS_MAX) -> npt.NDArray[np.int64]:
    """Return the starts of windows in a held-out part.

    The windows are adjacent in a small part, and spread evenly over a large one.
    """
    count = min((held_out - 1) // context, max(1, tokens_max // context))
    return np.linspace(0, held_out - 1 - context, count).astype(np.int64)


def held_out_bits(logits: Logits, spec: JobSpec, tokens: TokenizedText, on_step: OnProgress) -> Mapping[str, float]:
    """Return the held-out bits per byte over fixed windows, by the metric's name; nothing if the job has no held-out part."""
    held_out, context = tokens.held_out, spec.model.context
    if len(held_out) <= context:
        return {}
    nats, bytes_seen = 0.0, 0
    for start in evaluation_windows(len(held_out), context):
        (x_T,), (y_T,) = sequence_batch(held_out, np.array([start]), context)
        nats -= float(log_probabilities(logits(x_T), y_T).sum(dtype=np.float64))
        bytes_seen += int(tokens.token_bytes[y_T].sum())
        on_step()
    return {spec.resolved_objective.main_metric: nats / math.log(2) / bytes_seen}


def log_probabilities(logits_TV: Float32Array, tokens_T: npt.NDArray[Any]) -> Float32Array:
    """Return the log-probability of each token under the logits of its position: shape (T,)."""
    shifted_TV = logits_TV - logits_TV.max(axis=-1, keepdims=True)
    chosen_T = np.take_along_axis(shifted_TV, tokens_T[:, None], axis=-1)[:, 0]
    return np.asarray(chosen_T - np.log(np.exp(shifted_TV).sum(axis=-1)), dtype=np.float32)
