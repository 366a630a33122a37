"""An engine with several processes, one for each device, which are one trainer together.

The leader is the worker process. It starts helper processes by its own command line, and they execute its commands
(`rank_models.py`). Helper processes read commands from their standard input, and end when it is closed at the leader's end. If a
helper process ends, or fails while other processes wait for it, the leader ends, too. The supervisor then starts the leader
again.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from protocol.errors import UserError
from protocol.sampling import SamplingOptions
from training import worker_protocol
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_implementations import objective_functions
from training.engine_resources import EngineResources, ParallelMode
from training.engines.engine import OnProgress
from training.engines.pytorch import device as devices
from training.engines.pytorch.engine import NAME, TorchEngine, is_out_of_memory
from training.engines.pytorch.rank_models import (
    RANK_COMMANDS,
    ArraySpec,
    ClipGradient,
    ComputeGradient,
    GatherVector,
    InitOptimizer,
    LoadParameters,
    OpenRankModel,
    RankModels,
    StepOptimizer,
)
from training.job_spec import InnerOptimizerKind, JobSpec
from training.objectives.objective import Declaration
from training.replay.inner_state import InnerState
from training.replicated.tensor_layout import Float32Array
from training.token_generation import SampledToken
from training.transformer import TernaryLinear

log = logging.getLogger("peer")
# Timeout in seconds of an exchange between all processes: of a layer's tensors, or at most of a model of 30 GB over a bus.
EXCHANGE_SECONDS_MAX = 600.0
END_SECONDS = 5.0  # seconds to wait for the end of another process after a connection to it broke
LOOPBACK = "lo"


def rank_device(resources: EngineResources, rank: int) -> torch.device:
    """Return the device of a process: the GPU with the number `rank`, or the CPU for all processes.

    Raises `UserError` if there are too few GPUs.
    """
    here = devices.cuda_devices()
    if devices.select_device(resources.device) == devices.CPU:
        return devices.CPU
    if len(here) < resources.gpus:
        raise UserError(f"gpus {resources.gpus}: this machine has only {', '.join(map(str, here))}")
    return here[rank]


def _join(store: Path, rank: int, resources: EngineResources, device: torch.device) -> None:
    # All processes are on this machine, so they connect over the loopback interface.
    if any(name == LOOPBACK for _, name in socket.if_nameindex()):
        os.environ.update(GLOO_SOCKET_IFNAME=LOOPBACK, NCCL_SOCKET_IFNAME=LOOPBACK)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(store), resources.gpus),
        rank=rank,
        world_size=resources.gpus,
        timeout=timedelta(seconds=EXCHANGE_SECONDS_MAX),
    )


# Helper processes ---------------------------------------------------------------------------------------------------------


def run_rank(resources: EngineResources, rank: int, store: Path, orders: BinaryIO) -> NoReturn:
    """Execute commands until `orders` is closed, which happens when the leader ends."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    # A thread reads the commands, so that the process notices the end of the leader even while it waits for other processes.
    def read() -> None:
        try:
            while header := orders.read(worker_protocol.FRAME_HEADER_BYTES):
                length, _ = worker_protocol.parse_header(header)
                waiting.put(worker_protocol.parse_body(orders.read(length), RANK_COMMANDS))
        finally:
            shutil.rmtree(store.parent, ignore_errors=True)
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    device = rank_device(resources, rank)
    devices.configure_device(device)
    _join(store, rank, resources, device)
    parts = RankModels(resources, device)
    while True:
        try:
            parts.execute_command(waiting.get())
        except RuntimeError as error:
            if is_out_of_memory(error):  # The supervisor recognizes this signal and halves the micro-batches.
                os.kill(os.getpid(), signal.SIGKILL)
            raise


# The leader ----------------------------------------------------------------------------------------------------------------


def exit_like_failed_rank(status: int) -> None:
    """End this process as the failed helper process ended. The supervisor interprets an unexpected SIGKILL as lack of memory."""
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(1)


class RankProcesses:
    """The leader's handle of the helper processes, with the leader's own parts of the models."""

    def __init__(
        self, resources: EngineResources, command: Sequence[str], fall: Callable[[int], None] = exit_like_failed_rank
    ) -> None:
        """`command` starts a worker with these resources.

        `fall` is called, in any thread, with the exit status of the first helper process that ended. No computation is possible
        afterwards.
        """
        self.device = rank_device(resources, 0)
        self._fall, self.job_numbers, self._is_closed = fall, itertools.count(1), False
        self._status, self._has_ended = 1, threading.Event()  # exit status of the first helper process that ended
        self._folder = Path(tempfile.mkdtemp(prefix="folkmoot-ranks-"))
        store = self._folder / "store"
        self.processes = [
            subprocess.Popen([*command, "--rank", str(rank), "--store", str(store)], stdin=subprocess.PIPE)
            for rank in range(1, resources.gpus)
        ]
        for process in self.processes:
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()
        devices.configure_device(self.device)
        _join(store, 0, resources, self.device)
        self.parts = RankModels(resources, self.device)

    def send_command(self, order: Any, given: Any = None) -> Any:
        """Send a command to all processes and execute it in this process, too. Return this process's result.

        `given` are data that only this process has.
        """
        try:
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(worker_protocol.encode_frame(0, order))
                process.stdin.flush()
            return self.parts.execute_command(order, given)
        except Exception as error:  # The helper processes may now wait for data that this process will never send.
            log.warning("a command failed in one process of this worker: %s: %s", type(error).__name__, error)
            if is_out_of_memory(error):
                self._end(-signal.SIGKILL)
            self._has_ended.wait(END_SECONDS)  # Probably a helper process ended, and its exit status shows the reason.
            self._end(self._status)
            raise

    def _end(self, status: int) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._fall(status)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._is_closed:
            return
        log.warning("a process of this worker ended with status %d", status)
        self._status = status
        self._has_ended.set()
        self._end(status)

    def close(self) -> None:
        self._is_closed = True
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait()
        dist.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)  # torch's process group may have written its file into the folder again.


class _RankOptimizer:
    """The inner optimizer of a model that several processes train together."""

    def __init__(self, crew: RankProcesses, number: int, inner: InnerState | None) -> None:
        self.steps = inner.steps if inner else 0
        self._crew, self._number = crew, number
        crew.send_command(InitOptimizer(number, self.steps, inner is not None), inner.moments if inner else None)

    def step(self, rate: float) -> float:
        self.steps += 1
        return self._crew.send_command(StepOptimizer(self._number, rate))

    @property
    def moments(self) -> torch.Tensor:
        return torch.from_numpy(self._crew.send_command(GatherVector(self._number, "moments")))


class ParallelEngine(TorchEngine):
    """An engine that trains with several processes. Only this process computes metrics, texts and samples.

    If no process has the whole model, the CPU computes these.
    """

    def __init__(
        self,
        spec: JobSpec,
        tokens: TokenizedText,
        tokenizer: Tokenizer,
        first: Float32Array | None,
        crew: RankProcesses,
        resources: EngineResources,
    ) -> None:
        mode, kind = resources.parallel.value, spec.resolved_objective
        if kind.freezes_layers(spec):
            stay = f"parallel {mode!r} does not support the frozen layers of objective {spec.objective!r}"
            raise UserError(f"{stay}: start this peer with parallel off")
        functions = objective_functions(NAME, spec.objective)
        if functions.declarer is not None or functions.reference is not None:
            raise UserError(f"parallel {mode!r} does not support objective {spec.objective!r}: start this peer with parallel off")
        if spec.sam_radius:
            raise UserError(
                f"parallel {mode!r} does not support sam_radius {spec.sam_radius:g}: start this peer with parallel off"
            )
        if resources.parallel is ParallelMode.FSDP and spec.inner is InnerOptimizerKind.MUON:
            raise UserError(
                "parallel 'fsdp' does not support inner 'muon', which needs whole matrices: use parallel ddp or off here, "
                "or inner adamw in the job"
            )
        if spec.model.linear == TernaryLinear.name and not spec.sends_gradients:
            steps = f"parallel {mode!r} does not support local steps of ternary matrices"
            raise UserError(f"{steps}: start this peer with parallel off, or use preset per-step in the job")
        self._crew, self._number = crew, next(crew.job_numbers)
        # A weak reference to the engine that this process uses alone, for metrics and texts.
        self._whole: Callable[[], TorchEngine | None] = lambda: None
        super().__init__(spec, tokens, tokenizer, first, crew.device, resources)

    def _prepare(self) -> None:
        """Do nothing, since the parts of the model are made in all processes by a command."""

    def local_steps_context(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, since ternary matrices have no local steps here."""
        return nullcontext()

    def load_parameters(self, parameters: Float32Array) -> None:
        if self._number not in self._crew.parts.open:
            self._crew.send_command(OpenRankModel(self._number, self.spec.encode(), self._resources.parallel))
        self._crew.send_command(LoadParameters(self._number), parameters)

    def moved_from(self, parameters: Float32Array) -> Float32Array:
        return parameters - self.read_parameters()

    def read_parameters(self) -> Float32Array:
        return self._crew.send_command(GatherVector(self._number, "parameters"))

    def make_optimizer(self, inner: InnerState | None = None) -> Any:
        return _RankOptimizer(self._crew, self._number, inner)

    def clipped_gradient(self) -> Float32Array:
        self._crew.send_command(ClipGradient(self._number))
        return self._crew.send_command(GatherVector(self._number, "gradients"))

    def accumulate_gradient(
        self, drawn: npt.NDArray[np.int64], on_step: OnProgress = lambda: None, declaration: Declaration | None = None
    ) -> float:
        on_step()  # `on_step` may raise, so it must not be called while processes wait for each other.
        examples = list(self.spec.resolved_objective.batch_arrays(self.spec, drawn, self.tokens, declaration))
        order = ComputeGradient(
            self._number, tuple(ArraySpec(array.dtype.str, array.shape) for array in examples), self.micro_batch
        )
        return self._crew.send_command(order, examples)

    def compute_metrics(self, parameters: Float32Array, on_step: OnProgress = lambda: None) -> Mapping[str, float]:
        return self._alone().compute_metrics(parameters, on_step)

    def generate_text(
        self,
        parameters: Float32Array,
        prompt: bytes,
        how: SamplingOptions,
        on_step: OnProgress = lambda: None,
        stop: int | None = None,
    ) -> Iterator[bytes]:
        return self._alone().generate_text(parameters, prompt, how, on_step, stop)

    def generate_tokens(
        self,
        parameters: Float32Array,
        prompt: Sequence[int],
        samples: int,
        how: SamplingOptions,
        ends: Callable[[Sequence[int]], bool],
        on_step: OnProgress = lambda: None,
    ) -> Iterator[Sequence[SampledToken]]:
        return self._alone().generate_tokens(parameters, prompt, samples, how, ends, on_step)

    def score_tokens(self, parameters: Float32Array, tokens: Sequence[int], on_step: OnProgress = lambda: None) -> Float32Array:
        return self._alone().score_tokens(parameters, tokens, on_step)

    def _alone(self) -> TorchEngine:
        """Return the engine that this process uses alone.

        All unfinished texts and samples share it, and its model is freed with the last of them.
        """
        if (alone := self._whole()) is None:
            device = self.device if self._resources.parallel is ParallelMode.DDP else devices.CPU
            alone = TorchEngine(self.spec, self.tokens, self.tokenizer, self.first_parameters, device)
            self._whole = weakref.ref(alone)
        alone.required_model, alone.required_files = self.required_model, self.required_files
        return alone
