"""The training of many in one process: real updates, payloads and models, nothing of a network. For benchmarks of learning."""

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
    """What is trained on: the file a person named, or the text inside every Python, written into `folder`."""
    if given is not None:
        return given.absolute()
    file = folder / "text.txt"
    file.write_bytes(default_text())
    return file


def trainer_key(number: int) -> bytes:
    return hashlib.sha256(b"trainer %d" % number).digest()


def held_out_nats(engine: TorchEngine, parameters: Float32Array) -> float:
    """Per byte, which is a token here."""
    bits = engine.compute_main_metric(parameters)
    assert bits is not None, "these jobs hold text out"
    return bits * math.log(2)


@dataclass(frozen=True, eq=False)
class Update:
    """What an honest trainer computes in a round: its buffer, and what it continues from."""

    delta: Float32Array
    m: Float32Array
    inner: InnerState | None
    loss: float = 0.0  # mean over its steps


class Rounds:
    """The trainers of one job, and the replicated model; everybody that is accepted moves it on."""

    def __init__(self, spec: JobSpec, engine: TorchEngine) -> None:
        self.spec, self.engine = spec, engine
        self.model = ReplicatedModel.initial(JOB, spec)
        self.payload_bytes: list[int] = []
        self._sent: dict[bytes, tuple[codec.QuantizedUpdate | None, bytes]] = {}  # of each trainer's last accepted proposal
        self._inner: dict[bytes, InnerState] = {}

    def update(self, trainer: bytes, engine: TorchEngine | None = None) -> Update:
        """With another `engine`, as if the trainer's data were another."""
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
        """What the trainer's buffer says of m. `LocalProtocolError` if m has no levels."""
        buffer = self.buffer(trainer, m)
        return m if buffer is None else buffer.dequantize()

    def buffer(self, trainer: bytes, m: Float32Array) -> codec.QuantizedUpdate | None:
        """What the trainer commits to in this round. The m that a buffer says gives the same buffer."""
        return error_feedback.make_buffer(m, self.model.header(trainer), self.spec)

    def remainder(self, trainer: bytes) -> Float32Array:
        """e, or the momentum, from which the trainer continues."""
        return self.model.feedback_of(trainer, *self._sent.get(trainer, (None, None)))

    def encode(self, trainer: bytes, m: Float32Array) -> bytes:
        return self.model.encode_payload(trainer, m)

    def given(self, trainer: bytes, payload: bytes) -> codec.QuantizedUpdate:
        """What the rule is given of a trainer after this payload."""
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
        """To this model, before the next round begins."""
        self.model = anchor.rolled_back(self.model.round)
        self._sent, self._inner = {}, {}

    def run(self, trainers: Sequence[bytes], after: Callable[[], object] = lambda: None) -> None:
        """All rounds of the job, by honest trainers."""
        while self.model.round < self.spec.rounds:
            self.close([self.honest(trainer) for trainer in trainers], {})
            after()

    def held_out(self) -> float:
        return held_out_nats(self.engine, np.array(self.model.parameters))


class InnerStates:
    """Keeps the last one that it is told."""

    inner: InnerState | None = None

    def take(self, parameters: Float32Array, inner: InnerState) -> None:
        self.inner = inner
