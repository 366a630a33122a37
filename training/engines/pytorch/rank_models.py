"""The part of one process in a model that several processes train: the whole model (`ddp`) or a piece of every tensor (`fsdp`).

The leader sends the same commands to all processes and executes them itself. Between two commands no process waits for another.
Each process computes the gradient of its part of a batch, and torch's DDP or `fully_shard` combines the gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from protocol.codec import Between, Count, Length
from protocol.limits import TRANSACTION_BYTES_MAX
from protocol.messages import Name
from training.engine_implementations import objective_functions
from training.engine_resources import EngineResources, ParallelMode
from training.engines.adamw import weight_decay_mask
from training.engines.pytorch.device import to_device, to_numpy
from training.engines.pytorch.engine import autocast_context, no_subnormal_numbers
from training.engines.pytorch.inner_optimizers import adamw_step, clip_gradients, make_inner_optimizer
from training.engines.pytorch.layers import ForwardPass
from training.engines.pytorch.model import GPT, KEEPING_INPUTS, NAME
from training.job_spec import BATCH_MAX, JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import FIRST_TOKEN_VECTOR

JOBS_MAX = 8  # jobs with models in memory: beyond, all processes drop the model of the least recently used job
DIMENSIONS_MAX = 8  # most dimensions of an array
ARRAYS_MAX = 16  # most arrays that an objective makes from a batch

# Commands ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The type and the shape of an array of examples."""

    kind: Name  # numpy's name of the element type
    shape: Annotated[tuple[Count, ...], Length(1, DIMENSIONS_MAX)]


@dataclass(frozen=True, slots=True)
class OpenRankModel:
    TAG: ClassVar[str] = "open-rank-model"
    number: Count
    spec: Annotated[bytes, Length(1, TRANSACTION_BYTES_MAX)]
    parallel: ParallelMode


@dataclass(frozen=True, slots=True)
class LoadParameters:
    """The command to load the leader's parameters."""

    TAG: ClassVar[str] = "load-parameters"
    number: Count


@dataclass(frozen=True, slots=True)
class InitOptimizer:
    """The command to make an optimizer in its state after `steps` steps, with the leader's moments or with zeros."""

    TAG: ClassVar[str] = "init-optimizer"
    number: Count
    steps: Count
    has_moments: bool


@dataclass(frozen=True, slots=True)
class ComputeGradient:
    """The command to compute the gradient of the leader's batch, whose arrays have these types and shapes."""

    TAG: ClassVar[str] = "compute-gradient"
    number: Count
    examples: Annotated[tuple[ArraySpec, ...], Length(1, ARRAYS_MAX)]
    micro_batch: Annotated[int, Between(1, BATCH_MAX)]  # most examples in one pass of a process


@dataclass(frozen=True, slots=True)
class ClipGradient:
    TAG: ClassVar[str] = "clip-gradient"
    number: Count


@dataclass(frozen=True, slots=True)
class StepOptimizer:
    TAG: ClassVar[str] = "step-optimizer"
    number: Count
    rate: float


@dataclass(frozen=True, slots=True)
class GatherVector:
    """The command to send parameters, gradients or moments to the leader."""

    TAG: ClassVar[str] = "gather-vector"
    number: Count
    what: Name


RANK_COMMANDS: tuple[type[Any], ...] = (
    OpenRankModel,
    LoadParameters,
    InitOptimizer,
    ComputeGradient,
    ClipGradient,
    StepOptimizer,
    GatherVector,
)
LeaderVector = Float32Array | None  # a vector in the leader; other processes pass None and receive its parts

# The model as torch's modules --------------------------------------------------------------------------------------------


class _ModuleGPT(GPT):
    """A model whose tensors are parameters of modules, which torch can split."""

    def __init__(self, job: JobSpec, device: torch.device, parallel: ParallelMode) -> None:
        self.places = dict[int, slice]()  # range of each parameter in the flat vector, by the `id` of the parameter
        self._is_whole = parallel is ParallelMode.DDP
        super().__init__(job, device)

    def _allocate(self, size: int) -> None:
        if self._is_whole:
            super()._allocate(size)

    def _view(self, *names: str, learns: bool = True) -> Tensor:
        assert learns, "`ParallelEngine` refuses jobs whose layers stay"
        place, shape = self._place(*names)
        if self._is_whole:
            leaf = nn.Parameter(self.parameters[place].view(shape))
            leaf.grad = self.gradients[place].view(shape)
        else:
            leaf = nn.Parameter(torch.empty(shape, device="meta"))  # No process ever has the whole tensor.
        self.places[id(leaf)] = place
        return leaf

    def _through(self, layer: Any, x_BTC: Tensor, at: ForwardPass) -> Tensor:
        assert at.cache is None and at.last is None, "nothing but losses is computed by several processes"
        return layer(x_BTC)


class _LayerModule(nn.Module):
    """A module with the leaves of a layer as parameters of the same names.

    `fully_shard` gathers the parameters while the layer runs.
    """

    def __init__(self, gpt: _ModuleGPT, layer: Mapping[str, Tensor], recompute: bool) -> None:
        super().__init__()
        self.gpt, self.recompute = gpt, recompute
        for name, leaf in layer.items():
            self.register_parameter(name, cast(nn.Parameter, leaf))

    def __getitem__(self, name: str) -> Tensor:
        """Return the current tensor of the leaf with this name."""
        return getattr(self, name)

    def forward(self, x_BTC: Tensor) -> Tensor:
        at = ForwardPass(penalties=self.gpt.penalties)
        if self.recompute:
            return checkpoint(GPT._through, self.gpt, self, x_BTC, at, **KEEPING_INPUTS)
        return GPT._through(self.gpt, self, x_BTC, at)


class _LossModule(nn.Module):
    """A module that computes the objective's loss from examples."""

    def __init__(self, gpt: _ModuleGPT, recompute: bool) -> None:
        super().__init__()
        loss = objective_functions(NAME, gpt.job.objective).loss
        assert loss is not None, f"objective {gpt.job.objective!r} has an engine of its own"
        self.gpt, self.loss, self.head_names = gpt, loss, list(gpt.heads)
        self.embedding, self.final_norm = gpt.embedding_VC, gpt.final_norm_C
        self.output = None if gpt.spec.tied else gpt.output_VC
        self.heads = nn.ParameterList(gpt.heads.values())
        self.blocks = nn.ModuleList(_LayerModule(gpt, layer, recompute) for layer in gpt.layers)

    def forward(self, *examples: Tensor) -> Tensor:
        gpt = self.gpt  # The model's attributes are set to the current tensors of the parameters.
        gpt.embedding_VC, gpt.final_norm_C = self.embedding, self.final_norm
        gpt.output_VC = self.embedding if self.output is None else self.output
        gpt.heads = dict(zip(self.head_names, self.heads, strict=True))
        gpt.first_C, gpt.layers = gpt.heads.get(FIRST_TOKEN_VECTOR), self.blocks
        return self.loss(gpt, *examples)


# Models of one process ---------------------------------------------------------------------------------------------------


class RankModel(ABC):
    mode: ClassVar[ParallelMode]

    def __init__(self, spec: JobSpec, resources: EngineResources, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.is_leader, self.processes = dist.get_rank() == 0, dist.get_world_size()
        self._gpt = _ModuleGPT(spec, device, self.mode)
        self._net: Any = _LossModule(self._gpt, resources.recompute)
        self._places = [self._gpt.places[id(parameter)] for parameter in self._net.parameters()]

    def load_parameters(self, given: LeaderVector) -> None:
        for place, parameter in self._placed():
            self._keep(parameter, self._told(given, place, parameter.shape))

    def _placed(self) -> Iterator[tuple[slice, Any]]:
        return zip(self._places, self._net.parameters(), strict=True)

    def _told(self, given: LeaderVector, place: slice, shape: Any) -> Tensor:
        """Broadcast a range of the leader's vector. Return it in all processes."""
        if given is None:
            told = torch.empty(shape, device=self.device)
        else:
            told = to_device(np.array(given[place], dtype=np.float32), self.device).view(shape)
        dist.broadcast(told, 0)
        return told

    def accumulate_gradient(self, order: ComputeGradient, given: Sequence[npt.NDArray[Any]] | None) -> float:
        """Accumulate the gradient of a batch. Return the mean loss over the batch, in every process."""
        self._forget_gradients()
        batch = [self._shared(form, None if given is None else given[index]) for index, form in enumerate(order.examples)]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        share = split_batch(len(batch[0]), self.processes, order.micro_batch)[dist.get_rank()]
        for index, (rows, weight) in enumerate(share):
            with self._syncing(index == len(share) - 1):
                with autocast_context(self.spec, self.device):
                    # Torch divides the sum over the processes by their number.
                    loss = self._net(*(tensor[rows] for tensor in batch)) * (weight * self.processes)
                loss.backward()
            total += loss.detach().double() / self.processes
        dist.all_reduce(total)
        return float(total)

    def _shared(self, form: ArraySpec, array: npt.NDArray[Any] | None) -> Tensor:
        """Broadcast the leader's array, as bytes. Return it in all processes."""
        of = np.empty(form.shape, form.kind) if array is None else np.ascontiguousarray(array)
        told = to_device(of.reshape(-1).view(np.uint8), self.device)
        dist.broadcast(told, 0)
        return told.view(torch.from_numpy(of[:0]).dtype).view(form.shape)

    @abstractmethod
    def _keep(self, parameter: Any, whole: Tensor) -> None: ...

    @abstractmethod
    def _forget_gradients(self) -> None: ...

    @abstractmethod
    def _syncing(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return a context that exchanges gradients only in the last pass of a step."""

    @abstractmethod
    def init_optimizer(self, steps: int, has_moments: bool, given: LeaderVector) -> None: ...

    @abstractmethod
    def clip_gradient(self) -> float:
        """Clip the gradient. Return the norm of the whole gradient before clipping."""

    @abstractmethod
    def step_optimizer(self, rate: float) -> float:
        """Take a step. Return the norm of the whole gradient before clipping."""

    @abstractmethod
    def gather_vector(self, what: str) -> LeaderVector:
        """Return the whole vector to the leader, and None to other processes."""


class DdpRankModel(RankModel):
    """A model that every process has as a whole. All processes take the same steps."""

    mode = ParallelMode.DDP

    def __init__(self, spec: JobSpec, resources: EngineResources, device: torch.device) -> None:
        super().__init__(spec, resources, device)
        self._decayed = to_device(weight_decay_mask(spec), device)
        devices = [device.index] if device.type == "cuda" else None
        # If the model makes no text, its loss may not use a separate output layer.
        self._net = DistributedDataParallel(self._net, devices, find_unused_parameters=not spec.resolved_objective.makes_text)

    def _keep(self, parameter: Any, whole: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(whole)

    def _forget_gradients(self) -> None:
        self._gpt.gradients.zero_()

    def _syncing(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self._net.no_sync()

    def init_optimizer(self, steps: int, has_moments: bool, given: LeaderVector) -> None:
        self._optimizer = make_inner_optimizer(self.spec, self._gpt, self._decayed, None, steps)
        if has_moments:
            moments = self._optimizer.moments
            moments.copy_(self._told(given, slice(0, len(moments)), moments.shape))

    def clip_gradient(self) -> float:
        return clip_gradients(self._gpt.gradients, self.spec.gradient_clip)

    def step_optimizer(self, rate: float) -> float:
        return self._optimizer.step(rate)

    def gather_vector(self, what: str) -> LeaderVector:
        if not self.is_leader:
            return None
        found: Float32Array = to_numpy(self._optimizer.moments if what == "moments" else getattr(self._gpt, what))
        return found.copy()


class FsdpRankModel(RankModel):
    """A model of which each process has some rows of each tensor and of its moments."""

    mode = ParallelMode.FSDP

    def __init__(self, spec: JobSpec, resources: EngineResources, device: torch.device) -> None:
        super().__init__(spec, resources, device)
        self._mesh = init_device_mesh(device.type, (self.processes,))
        for block in self._net.blocks:
            fully_shard(block, mesh=self._mesh)
        fully_shard(self._net, mesh=self._mesh)
        self._net.to_empty(device=device)
        self._steps, self._moments = 0, list[tuple[Tensor, Tensor]]()

    def _keep(self, parameter: Any, whole: Tensor) -> None:
        with torch.no_grad():
            own = parameter.to_local()
            if len(own):
                own.copy_(whole.chunk(self.processes)[dist.get_rank()])

    def _forget_gradients(self) -> None:
        self._net.zero_grad(set_to_none=True)

    def _syncing(self, is_last: bool) -> AbstractContextManager[Any]:
        self._net.set_requires_gradient_sync(is_last)
        return nullcontext()

    def init_optimizer(self, steps: int, has_moments: bool, given: LeaderVector) -> None:
        """Make an AdamW optimizer. In `given`, the first moments of all parameters precede the second ones."""
        self._steps, self._moments = steps, []
        size = layout_of(self.spec).size
        for place, parameter in self._placed():
            both = []
            for start in (0, size):
                own = torch.zeros_like(parameter.to_local())
                if has_moments:
                    moved = slice(start + place.start, start + place.stop)
                    whole = self._told(given, moved, parameter.shape)
                    own = whole.chunk(self.processes)[dist.get_rank()].clone() if len(own) else own
                both.append(own.detach())
            self._moments.append((both[0], both[1]))

    def clip_gradient(self) -> float:
        gradients = [_gradient_of(parameter) for parameter in self._net.parameters()]
        total = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
        dist.all_reduce(total)
        norm = float(total.sqrt())
        if norm > self.spec.gradient_clip:
            for gradient in gradients:
                gradient.mul_(self.spec.gradient_clip / norm)
        return norm

    @torch.no_grad()
    def step_optimizer(self, rate: float) -> float:
        norm = self.clip_gradient()
        self._steps += 1
        for parameter, (first, second) in zip(self._net.parameters(), self._moments, strict=True):
            decays = first.new_ones(()) if parameter.ndim > 1 else None
            adamw_step(parameter.to_local(), _gradient_of(parameter), first, second, decays, self.spec, rate, self._steps)
        return norm

    @torch.no_grad()
    def gather_vector(self, what: str) -> LeaderVector:
        size = layout_of(self.spec).size
        out = np.empty(2 * size if what == "moments" else size, dtype=np.float32) if self.is_leader else None
        for number, (place, parameter) in enumerate(self._placed()):
            if what == "moments":
                for start, own in zip((0, size), self._moments[number], strict=True):
                    moment = DTensor.from_local(own, self._mesh, [Shard(0)], shape=parameter.shape, stride=parameter.stride())
                    _write(out, slice(start + place.start, start + place.stop), moment)
            elif what == "parameters":
                _write(out, place, parameter)
            # This condition has the same value in all processes, and `_write` needs all of them.
            elif parameter.grad is not None:
                _write(out, place, parameter.grad)
            elif out is not None:
                out[place] = 0.0
        return out


def _gradient_of(parameter: Any) -> Tensor:
    """Return the gradient of this process's rows; zero if the loss does not depend on them."""
    return torch.zeros_like(parameter.to_local()) if parameter.grad is None else parameter.grad.to_local()


def _write(out: LeaderVector, place: slice, tensor: Any) -> None:
    whole = tensor.full_tensor()  # `full_tensor` waits for all processes.
    if out is not None:
        out[place] = to_numpy(whole).ravel()


class RankModels:
    """The parts of all jobs' models in one process. The same commands have the same effect in each process."""

    def __init__(self, resources: EngineResources, device: torch.device) -> None:
        self._resources, self._device = resources, device
        self.open = OrderedDict[int, RankModel]()

    def execute_command(self, order: Any, given: Any = None) -> Any:
        if isinstance(order, OpenRankModel):
            kind = DdpRankModel if order.parallel is ParallelMode.DDP else FsdpRankModel
            self.open[order.number] = kind(JobSpec.decode(order.spec), self._resources, self._device)
            while len(self.open) > JOBS_MAX:
                self.open.popitem(last=False)
            return None
        self.open.move_to_end(order.number)
        part = self.open[order.number]
        with no_subnormal_numbers():
            match order:
                case LoadParameters():
                    return part.load_parameters(given)
                case InitOptimizer():
                    return part.init_optimizer(order.steps, order.has_moments, given)
                case ComputeGradient():
                    return part.accumulate_gradient(order, given)
                case ClipGradient():
                    return part.clip_gradient()
                case StepOptimizer():
                    return part.step_optimizer(order.rate)
                case GatherVector():
                    return part.gather_vector(order.what)
        raise AssertionError(order)


def split_batch(drawn: int, processes: int, micro_batch: int) -> list[list[tuple[slice, float]]]:
    """Return, for each process, the rows of its micro-batches, and the weight of each micro-batch in the mean over the batch.

    All processes have the same number of micro-batches, since each exchanges gradients. A process without an example for a
    micro-batch computes another example with weight zero.
    """
    parts = np.array_split(np.arange(drawn), processes)
    count = -(-len(parts[0]) // micro_batch)
    pieces = (np.array_split(part, count) for part in parts)
    return [
        [(slice(int(piece[0]), int(piece[-1]) + 1), len(piece) / drawn) if len(piece) else (slice(0, 1), 0.0) for piece in share]
        for share in pieces
    ]
