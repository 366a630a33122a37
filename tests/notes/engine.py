"""An engine of the feature, in numpy. Its model is the share of each byte in the text."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from protocol.sampling import EndReason, SamplingOptions
from tests.notes.objective import Counted
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_implementations import EngineImplementations, ObjectiveFunctions, objective_functions
from training.engine_resources import EngineResources
from training.engines.engine import EngineBackend, OnProgress, RequiredModel
from training.job_spec import JobSpec
from training.objectives.objective import Brief, Declaration, InnerStep, RejectionReason
from training.replay.inner_state import InnerState, OnState
from training.replicated.tensor_layout import Float32Array, layout_of
from training.token_generation import SampledToken
from training.worker_protocol import WorkerInfo

RATE = np.float32(0.5)


@dataclass
class Slate:
    spec: JobSpec
    tokens: TokenizedText
    tokenizer: Tokenizer
    functions: ObjectiveFunctions
    micro_batch: int = 1
    first_parameters: Float32Array | None = None
    required_model: RequiredModel | None = None
    required_files: Mapping[bytes, Path] = field(default_factory=dict)

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
        now, losses = parameters, list[float]()
        assert declaration is not None
        counts = np.fromfile(declaration.files[declaration.record.counts], "<i8")
        for _ in range(self.spec.local_steps):
            gradient, loss = self.functions.loss(now, (counts / counts.sum()).astype(np.float32))
            now = now - RATE * gradient
            losses.append(loss)
            on_step()
        return parameters - now, losses

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
        counts = self._counts(job, round, trainer).astype("<i8")
        digest = hashlib.sha256(counts.tobytes()).digest()
        counts.tofile(folder / digest.hex())
        return Declaration(Counted(digest, int(counts.sum())), {digest: folder / digest.hex()})

    def why_declaration_refused(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = lambda: None,
    ) -> RejectionReason | None:
        said = declaration.files[declaration.record.counts].read_bytes()
        return (
            None
            if said == self._counts(job, round, trainer).astype("<i8").tobytes()
            else self.spec.resolved_objective.rejection_reasons[0]
        )

    def derive_step_data(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = lambda: None,
    ) -> Declaration:
        return declaration

    def _counts(self, job: bytes, round: int, trainer: bytes) -> npt.NDArray[np.int64]:
        """Count each byte value in the sequences of the round."""
        kind, spec = self.spec.resolved_objective, self.spec
        drawn = [
            kind.draw_examples(spec, InnerStep(job, round, trainer, step), spec.batch, self.tokens)
            for step in range(spec.local_steps)
        ]
        (seen,) = kind.batch_arrays(spec, np.concatenate(drawn), self.tokens)
        return np.bincount(seen.ravel(), minlength=layout_of(self.spec).size)

    def compute_metrics(self, parameters: Float32Array, on_step: OnProgress = lambda: None) -> Mapping[str, float]:
        assert self.functions.metrics is not None
        return self.functions.metrics(parameters, self.tokens)

    def generate_text(
        self,
        parameters: Float32Array,
        prompt: bytes,
        how: SamplingOptions,
        on_step: OnProgress = lambda: None,
        stop: int | None = None,
    ) -> Iterator[bytes]:
        return repeat(bytes([int(parameters.argmax())]), how.max_tokens)

    def generate_tokens(
        self,
        parameters: Float32Array,
        prompt: Sequence[int],
        samples: int,
        how: SamplingOptions,
        ends: Callable[[Sequence[int]], bool],
        on_step: OnProgress = lambda: None,
    ) -> Iterator[Sequence[SampledToken]]:
        likeliest = int(parameters.argmax())
        logprob = float(np.log(parameters[likeliest]))
        return iter([[SampledToken(number, likeliest, logprob, EndReason.LENGTH) for number in range(samples)]])

    def score_tokens(self, parameters: Float32Array, tokens: Sequence[int], on_step: OnProgress = lambda: None) -> Float32Array:
        return np.log(parameters[tokens[1:]])


class Slates:
    name = "slate"

    def start_backend(self, resources: EngineResources, command: Sequence[str]) -> None:
        """Do nothing: numpy needs no start."""

    def run_rank(self, resources: EngineResources, rank: int, store: Path, orders: BinaryIO) -> None:
        raise NotImplementedError("it works alone")

    def describe_worker(self) -> WorkerInfo:
        return WorkerInfo("slate beside torch" if "torch" in sys.modules else "slate alone", 1)

    def open_engine(self, spec: JobSpec, tokens: TokenizedText, tokenizer: Tokenizer, first: Float32Array | None) -> Slate:
        return Slate(spec, tokens, tokenizer, objective_functions(self.name, spec.objective))

    def is_out_of_memory(self, error: BaseException) -> bool:
        return False


def distance(parameters: Float32Array, shares: Float32Array) -> tuple[Float32Array, float]:
    """Return the gradient and the value of ½‖parameters − shares‖²."""
    gap = parameters - shares
    return gap, float(gap @ gap) / 2


def distance_from_all(parameters: Float32Array, tokens: TokenizedText) -> Mapping[str, float]:
    """Return the distance of the parameters from the bytes' shares in the whole text."""
    shares = np.bincount(tokens.train, minlength=len(parameters)) / len(tokens.train)
    return {"distance_from_all": float(np.linalg.norm(parameters - shares))}


KIND: EngineBackend = Slates()
IMPLEMENTATIONS = EngineImplementations(objectives={"letters": ObjectiveFunctions(loss=distance, metrics=distance_from_all)})
