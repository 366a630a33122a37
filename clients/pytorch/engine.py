"""The engine of client jobs: the gradient of a step's request bodies, and the declaration of its tokens and its loss."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from clients.objective import LOSS_DIFFERS, TOKENS_DIFFER
from clients.pytorch.adapted_model import AdaptedModel, PassResult
from clients.records import (
    BODY_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    Manifest,
    RequestBody,
    StepBrief,
    StepDeclaration,
    loss_millionths,
)
from protocol import codec
from protocol.errors import RemoteProtocolError, UserError
from protocol.sampling import SamplingOptions
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_resources import EngineResources
from training.engines.engine import OnProgress, RequiredModel
from training.engines.pytorch.engine import no_subnormal_numbers
from training.engines.pytorch.model import GPT
from training.engines.pytorch.token_engine import TokenEngine
from training.job_spec import JobSpec
from training.objectives.objective import Brief, Declaration, RejectionReason
from training.replay.inner_state import InnerState, OnState
from training.replicated.tensor_layout import Float32Array

# Bytes of gradients in memory, each of one request body. A trainer computes a body once for its client and once for the proposal,
# so a gradient that is dropped costs one more pass.
GRADIENTS_BYTES_MAX: Final = 256 << 20
# Largest difference of two honest sums of losses, relative to the sum of their absolute values: float32 log-probabilities differ
# by some 1e-7 between processors.
LOSS_TOLERANCE: Final = 2e-6
MILLIONTHS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of all request bodies of a step."""

    gradient: Float32Array  # sum of the gradients of the adapters, shape (parameters,)
    tokens: int
    loss: float
    magnitude: float  # sum of the absolute values of the losses


class ClientEngine(TokenEngine):
    """An implementation of `training.engines.engine.DeclaringEngine` for client jobs."""

    def __init__(
        self,
        spec: JobSpec,
        tokens: TokenizedText,
        tokenizer: Tokenizer,
        first: Float32Array | None,
        device: torch.device,
        resources: EngineResources,
    ) -> None:
        self.spec, self.tokenizer, self.device = spec, tokenizer, device
        self.micro_batch, self.first_parameters = spec.micro_batch, first
        self.required_model: RequiredModel | None = None
        self.required_files: Mapping[bytes, Path] = {}
        self._adapted: AdaptedModel | None = None  # made at its first use, when the engine has the base
        # Gradient and result of each request body, by round and encoded body. A request is used more than once.
        self._gradients = OrderedDict[tuple[int, bytes], tuple[Float32Array, PassResult]]()

    def adapted_model(self) -> AdaptedModel:
        """Return the model with the adapters that were loaded last."""
        if self._adapted is None:
            assert self.required_model is not None, "the worker opened the job with its base"
            self._adapted = AdaptedModel(self.spec, self.required_model, self.device)
        return self._adapted

    def model_with(self, parameters: Float32Array) -> GPT:
        model = self.adapted_model()
        if model.loaded is not parameters:
            model.load_adapters(parameters)
            model.loaded = parameters
        return model.gpt

    def local_steps(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        on_step: OnProgress = lambda: None,
        inner: InnerState | None = None,
        on_state: OnState | None = None,
        declaration: Declaration | None = None,
        taken: int | None = None,
    ) -> tuple[Float32Array, Sequence[float]]:
        """Return the clipped sum of gradients that the declaration's brief requests, and the mean loss of a token."""
        assert declaration is not None and declaration.brief is not None
        result: StepResult = declaration.step_data
        clip = codec.decode(StepBrief, declaration.brief.encoded).optimizer.clip
        return clip_gradient(result.gradient, clip), (result.loss / max(1, result.tokens),)

    def compute_metrics(self, parameters: Float32Array, on_step: OnProgress = lambda: None) -> Mapping[str, float]:
        return {}

    def generate_text(
        self,
        parameters: Float32Array,
        prompt: bytes,
        how: SamplingOptions,
        on_step: OnProgress = lambda: None,
        stop: int | None = None,
    ) -> Iterator[bytes]:
        raise UserError(f"the adapters of {self.spec.name!r} generate no text: clients sample from them")

    @no_subnormal_numbers()
    def make_declaration(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        folder: Path,
        on_step: OnProgress = lambda: None,
        brief: Brief | None = None,
    ) -> Declaration:
        assert brief is not None, "a job on request has a brief in each round"
        result = self._compute(parameters, round, brief, on_step)
        return Declaration(StepDeclaration(result.tokens, loss_millionths(result.loss) or 0), {}, brief=brief)

    @no_subnormal_numbers()
    def why_declaration_refused(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = lambda: None,
    ) -> RejectionReason | None:
        assert declaration.brief is not None
        result, said = self._compute(parameters, round, declaration.brief, on_step), declaration.record
        if said.tokens != result.tokens:
            return TOKENS_DIFFER
        allowed = MILLIONTHS * LOSS_TOLERANCE * result.magnitude + 1
        # The comparison also fails for NaN.
        return None if abs(said.loss - MILLIONTHS * result.loss) <= allowed else LOSS_DIFFERS

    @no_subnormal_numbers()
    def derive_step_data(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = lambda: None,
    ) -> Declaration:
        assert declaration.brief is not None
        return replace(declaration, step_data=self._compute(parameters, round, declaration.brief, on_step))

    def _compute(self, parameters: Float32Array, round: int, brief: Brief, on_step: OnProgress) -> StepResult:
        """Return the result of a brief, which does not depend on the trainer.

        Raises `RemoteProtocolError` for malformed request bodies, or another number of tokens than the brief's.
        """
        bodies = read_bodies(brief, self.spec.model.context, self.spec.model.vocabulary)
        gradient = np.zeros(len(parameters), dtype=np.float32)
        loss = magnitude = 0.0
        for body in bodies:
            of_body, found = self._compute_gradient(parameters, round, body, on_step)
            gradient += of_body
            loss, magnitude = loss + found.loss, magnitude + found.magnitude
        return StepResult(gradient, sum(body.tokens for body in bodies), loss, magnitude)

    @no_subnormal_numbers()
    def run_pass(
        self, parameters: Float32Array, round: int, body: RequestBody, *, backward: bool, on_step: OnProgress = lambda: None
    ) -> PassResult:
        """Return the losses of a valid request body on the model of a round. With `backward`, keep its gradient for the step."""
        if backward:
            return self._compute_gradient(parameters, round, body, on_step)[1]
        model = self.adapted_model()
        model.load_adapters(parameters)
        return model.run_pass(body, backward=False, on_step=on_step)

    def _compute_gradient(
        self, parameters: Float32Array, round: int, body: RequestBody, on_step: OnProgress
    ) -> tuple[Float32Array, PassResult]:
        key = round, codec.encode(body)
        if key not in self._gradients:
            for earlier in [known for known in self._gradients if known[0] < round]:  # of models that no step changes any more
                del self._gradients[earlier]
            model = self.adapted_model()
            model.load_adapters(parameters)
            model.clear_gradient()
            found = model.run_pass(body, backward=True, on_step=on_step)
            self._gradients[key] = model.read_gradient(), found
            while len(self._gradients) > max(1, GRADIENTS_BYTES_MAX // parameters.nbytes):
                self._gradients.popitem(last=False)
        return self._gradients[key]


def read_bodies(brief: Brief, context: int, vocabulary: int) -> list[RequestBody]:
    """Return the request bodies of a brief, in order. Raises `RemoteProtocolError` if one is malformed or invalid."""
    step = codec.decode(StepBrief, brief.encoded)
    listed = codec.decode(Manifest, brief.files[step.manifest].read_bytes(), MANIFEST_BYTES_MAX).bodies
    bodies = [codec.decode(RequestBody, brief.files[body.digest].read_bytes(), BODY_BYTES_MAX) for body in listed]
    for body in bodies:
        if problem := body.problem(context, vocabulary):
            raise RemoteProtocolError("bad-request", problem)
    tokens = sum(body.tokens for body in bodies)
    if tokens != step.tokens:
        raise RemoteProtocolError("bad-request", f"the step has {tokens} tokens, and its brief names {step.tokens}")
    return bodies


def clip_gradient(gradient: Float32Array, clip: float) -> Float32Array:
    """Return the gradient, scaled down to the norm `clip` if it is longer. 0: no limit."""
    norm = math.sqrt(float(np.sum(np.square(gradient, dtype=np.float64))))
    return gradient * np.float32(clip / norm) if clip and norm > clip else gradient
