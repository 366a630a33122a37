"""The jobs that a worker process has open. Handlers of requests compute with their engines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from protocol.errors import FolkmootError
from training.engines.engine import Engine, EngineBackend
from training.objectives.objective import Declaration
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
            return engine.local_steps(parameters, job, round, trainer, self.heartbeat, inner, on_state, declaration, taken)

        return update

    def shared_parameters(self, model_directory: str) -> Float32Array:
        """One array for all texts of a model: an engine copies parameters when it is given others than before."""
        model = ReplicatedModel.open(Path(model_directory))
        return self._mapped.setdefault(model.root, model.parameters)
