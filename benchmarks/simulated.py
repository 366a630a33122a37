"""The training of many in one process: real updates, payloads and models, without a network. For benchmarks of learning."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protocol.messages import Proposal
from protocol.verdicts import Verdict
from training.corpus import open_tokens
from training.data.default_text import default_text
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.engine import TorchEngine
from training.job_spec import JobSpec
from training.replay.inner_state import InnerState
from training.replicated import codec, error_feedback
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import Float32Array

JOB = hashlib.sha256(b"folkmoot/benchmarks/simulated").digest()


def engine_of(spec: JobSpec, text: Path) -> TorchEngine:
    return TorchEngine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer())


def text_file(given: Path | None, folder: Path) -> Path:
    """Return the given text file, or write the text inside every Python into `folder`."""
    if given is not None:
        return given.absolute()
    file = folder / "text.txt"
    file.write_bytes(default_text())
    return file


def trainer_key(number: int) -> bytes:
    return hashlib.sha256(b"trainer %d" % number).digest()


def held_out_nats(engine: TorchEngine, parameters: Float32Array) -> float:
    """Return the held-out loss in nats per byte, which is a token here."""
    bits = engine.compute_main_metric(parameters)
    assert bits is not None, "these jobs hold text out"
    return bits * math.log(2)


@dataclass(frozen=True, eq=False)
class Update:
    """An honest trainer's update of a round, with the state from which it continues."""

    delta: Float32Array
    m: Float32Array
    inner: InnerState | None
    loss: float = 0.0  # mean over its steps


class Rounds:
    """The trainers of one job, and the replicated model, which all accepted updates change."""

    def __init__(self, spec: JobSpec, engine: TorchEngine) -> None:
        self.spec, self.engine = spec, engine
        self.model = ReplicatedModel.initial(JOB, spec)
        self.payload_bytes: list[int] = []
        self._sent: dict[bytes, tuple[codec.QuantizedUpdate | None, bytes]] = {}  # of each trainer's last accepted proposal
        self._inner: dict[bytes, InnerState] = {}

    def update(self, trainer: bytes, engine: TorchEngine | None = None) -> Update:
        """Compute a trainer's update. Another `engine` gives the trainer other data."""
        model, last = self.model, InnerStates()
        on_state = last.take if self.spec.keeps_inner_state else lambda parameters, inner: None
        delta, losses = (engine or self.engine).local_steps(
            np.array(model.parameters),
            JOB,
            model.round,
            trainer,
            inner=self._inner.get(trainer),
            on_state=on_state,
            taken=model.rounds_in_model,
        )
        m = error_feedback.accumulate_feedback(self.remainder(trainer), delta, self.spec.feedback_decay, self.spec.update_weight)
        return Update(delta, self.committed(trainer, m), last.inner, sum(losses) / len(losses))

    def committed(self, trainer: bytes, m: Float32Array) -> Float32Array:
        """Return m as the trainer's buffer encodes it. Raises `LocalProtocolError` if m exceeds the levels."""
        buffer = self.buffer(trainer, m)
        return m if buffer is None else buffer.dequantize()

    def buffer(self, trainer: bytes, m: Float32Array) -> codec.QuantizedUpdate | None:
        """Return the trainer's committed buffer of this round. The m of a buffer gives the same buffer."""
        return error_feedback.make_buffer(m, self.model.header(trainer), self.spec)

    def remainder(self, trainer: bytes) -> Float32Array:
        """Return e, or the momentum, from which the trainer continues."""
        return self.model.feedback_of(trainer, *self._sent.get(trainer, (None, None)))

    def encode(self, trainer: bytes, m: Float32Array) -> bytes:
        return self.model.encode_payload(trainer, m)

    def given(self, trainer: bytes, payload: bytes) -> codec.QuantizedUpdate:
        """Return the rule's input from a trainer after this payload."""
        update = codec.decode_payload(payload, self.model.header(trainer), self.model.layout)
        return error_feedback.update_estimate(self.model.estimate(trainer), update) if self.spec.has_estimates else update

    def proposal(self, trainer: bytes, m: Float32Array, payload: bytes, inner: InnerState | None) -> AcceptedProposal:
        spec, record = self.spec, self.model.records.get(trainer)
        committed, buffer = b"".join(inner.iter_bytes()) if inner and spec.keeps_inner_state else None, self.buffer(trainer, m)
        proposal = Proposal(
            JOB,
            self.model.round,
            self.model.root,
            hashlib.sha256(payload).digest(),
            len(payload),
            None if buffer is None else error_feedback.buffer_digest(buffer),
            record.buffer if record else None,
            inner=hashlib.sha256(committed).digest() if committed else None,
            inner_from=record.inner if record else None,
        )
        return AcceptedProposal(trainer, proposal, payload)

    def honest(self, trainer: bytes) -> tuple[AcceptedProposal, Update]:
        made = self.update(trainer)
        return self.proposal(trainer, made.m, self.encode(trainer, made.m), made.inner), made

    def close(self, accepted: Sequence[tuple[AcceptedProposal, Update]], rejected: Mapping[bytes, Verdict]) -> None:
        self._sent |= {item.trainer: (self.buffer(item.trainer, made.m), item.payload) for item, made in accepted}
        self.model = self.model.apply_round([item for item, _ in accepted], rejected)
        self.payload_bytes += [len(item.payload) for item, _ in accepted]
        for item, made in accepted:
            if made.inner is not None and self.spec.keeps_inner_state:
                self._inner[item.trainer] = made.inner

    def roll_back(self, anchor: ReplicatedModel) -> None:
        """Return to this model before the next round begins."""
        self.model = anchor.rolled_back(self.model.round)
        self._sent, self._inner = {}, {}

    def run(self, trainers: Sequence[bytes], after: Callable[[], object] = lambda: None) -> None:
        """Run all rounds of the job with honest trainers."""
        while self.model.round < self.spec.rounds:
            self.close([self.honest(trainer) for trainer in trainers], {})
            after()

    def held_out(self) -> float:
        return held_out_nats(self.engine, np.array(self.model.parameters))


class InnerStates:
    """A receiver that keeps the last state."""

    inner: InnerState | None = None

    def take(self, parameters: Float32Array, inner: InnerState) -> None:
        self.inner = inner
