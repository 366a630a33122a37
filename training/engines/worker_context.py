"""The jobs that a worker process has open. Handlers of requests compute with their engines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from protocol.errors import FolkmootError
from training.engines.engine import DeclaringEngine, Engine, EngineBackend
from training.objectives.objective import Declaration, RejectionReason
from training.replay import proposal_replay
from training.replay.inner_state import InnerState, OnState
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array
from training.text_generation import TextGenerations

JOBS_MAX = 8  # open at a time; the least recently used is closed


class WorkerContext:
    """What handlers share: the backend, the open jobs, and the texts that are being made."""

    def __init__(self, backend: EngineBackend, heartbeat: Callable[[], None], micro_batch_max: int) -> None:
        """`heartbeat` is called after every piece of work; it raises where nobody waits for the request any more."""
        self.backend, self.heartbeat = backend, heartbeat
        self.texts = TextGenerations()
        self._micro_batch_max = micro_batch_max
        self._engines: OrderedDict[bytes, Engine] = OrderedDict()
        self._mapped = WeakValueDictionary[bytes, Float32Array]()  # parameters by model root, as long as somebody has them

    def add_engine(self, job: bytes, engine: Engine) -> None:
        engine.micro_batch = min(engine.micro_batch, self._micro_batch_max)
        self._engines[job] = engine
        while len(self._engines) > JOBS_MAX:
            self._engines.popitem(last=False)

    def find_engine(self, job: bytes) -> Engine:
        """`FolkmootError` if the job is not open."""
        if job not in self._engines:
            raise FolkmootError(f"job {job.hex()[:8]} is not open")
        self._engines.move_to_end(job)
        return self._engines[job]

    def update_function(self, job: bytes) -> proposal_replay.ComputeUpdate:
        engine = self.find_engine(job)

        def update(
            parameters: Float32Array,
            job: bytes,
            round: int,
            trainer: bytes,
            inner: InnerState | None,
            on_state: OnState | None,
            *,
            taken: int,
            declaration: Declaration | None = None,
        ) -> tuple[Float32Array, Sequence[float]]:
            place = job, round, trainer
            delta, metrics = engine.local_steps(parameters, *place, self.heartbeat, inner, on_state, declaration, taken)
            return delta, metrics.losses

        return update

    def find_declarer(self, job: bytes) -> proposal_replay.EngineDeclarer | None:
        """None: the job's objective has none."""
        engine = self.find_engine(job)
        return _Declarer(engine, self.heartbeat) if isinstance(engine, DeclaringEngine) else None

    def shared_parameters(self, model_directory: str) -> Float32Array:
        """One array for all texts of a model: an engine copies parameters when it is given others than before."""
        model = ReplicatedModel.open(Path(model_directory))
        return self._mapped.setdefault(model.root, model.parameters)


@dataclass(frozen=True, slots=True)
class _Declarer:
    engine: DeclaringEngine
    beat: Callable[[], None]

    def make_declaration(self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, folder: Path) -> Declaration:
        return self.engine.make_declaration(parameters, job, round, trainer, folder, self.beat)

    def why_declaration_refused(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, declaration: Declaration
    ) -> RejectionReason | None:
        return self.engine.why_declaration_refused(parameters, job, round, trainer, declaration, self.beat)

    def derive_step_data(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, declaration: Declaration
    ) -> Declaration:
        return self.engine.derive_step_data(parameters, job, round, trainer, declaration, self.beat)
