"""Samples and log-probabilities by token ids, for every engine whose model is a GPT."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from protocol.sampling import SamplingOptions
from training.engines.engine import OnProgress
from training.engines.pytorch import sampling
from training.engines.pytorch.device import to_numpy
from training.engines.pytorch.log_probabilities import sequence_log_probabilities
from training.engines.pytorch.model import GPT
from training.replicated.tensor_layout import Float32Array
from training.token_generation import SampledToken


class TokenEngine(ABC):
    """The part of an engine that `training.engines.engine.Engine` describes with `generate_tokens` and `score_tokens`."""

    @abstractmethod
    def model_with(self, parameters: Float32Array) -> GPT:
        """Return the engine's model, always the same object, with these parameters of the job.

        The array must not change as long as it exists: parameters that the model has already are not loaded again.
        """

    def generate_tokens(
        self,
        parameters: Float32Array,
        prompt: Sequence[int],
        samples: int,
        how: SamplingOptions,
        ends: Callable[[Sequence[int]], bool],
        on_step: OnProgress = lambda: None,
    ) -> Iterator[Sequence[SampledToken]]:
        def before_pass() -> None:
            on_step()
            self.model_with(parameters)  # Another computation may have replaced the model's parameters since the last pass.

        return sampling.sample_sequences(self.model_with(parameters), prompt, samples, how, ends, before_pass)

    def score_tokens(self, parameters: Float32Array, tokens: Sequence[int], on_step: OnProgress = lambda: None) -> Float32Array:
        return to_numpy(sequence_log_probabilities(self.model_with(parameters), tokens, on_step))
