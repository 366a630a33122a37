"""One process's part of a model that several processes train: all of it (`ddp`) or a piece of every tensor (`fsdp`).

The leader sends the same orders to all processes and obeys them itself; between two orders no process waits for another. Each one
computes the gradient of its share of a batch, and torch's own DDP or `fully_shard` makes one gradient of them.
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
from training.engines.pytorch.device import to_device, to_numpy
from training.engines.pytorch.engine import autocast_context, no_subnormal_numbers
from training.engines.pytorch.inner_optimizers import adamw_step, clip_gradients, make_inner_optimizer, weight_decay_mask
from training.engines.pytorch.layers import ForwardPass
from training.engines.pytorch.model import GPT, KEEPING_INPUTS, NAME
from training.job_spec import BATCH_MAX, JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import FIRST_TOKEN_VECTOR

JOBS_MAX = 8  # whose models are held; the least recently used one goes, in all processes alike
DIMENSIONS_MAX = 8  # of an array
ARRAYS_MAX = 16  # that an objective makes of a batch

# Orders --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Of an array of examples."""

    kind: Name  # as numpy calls it
    shape: Annotated[tuple[Count, ...], Length(1, DIMENSIONS_MAX)]


@dataclass(frozen=True, slots=True)
class OpenRankModel:
    TAG: ClassVar[str] = "open-rank-model"
    number: Count
    spec: Annotated[bytes, Length(1, TRANSACTION_BYTES_MAX)]
    parallel: ParallelMode


@dataclass(frozen=True, slots=True)
class LoadParameters:
    """The parameters that the leader has."""

    TAG: ClassVar[str] = "load-parameters"
    number: Count


@dataclass(frozen=True, slots=True)
class InitOptimizer:
    """An optimizer after so many steps, with the moments that the leader has, or none."""

    TAG: ClassVar[str] = "init-optimizer"
    number: Count
    steps: Count
    has_moments: bool


@dataclass(frozen=True, slots=True)
class ComputeGradient:
    """Of a batch that the leader has, whose arrays have these forms."""

    TAG: ClassVar[str] = "compute-gradient"
    number: Count
    examples: Annotated[tuple[ArraySpec, ...], Length(1, ARRAYS_MAX)]
    micro_batch: Annotated[int, Between(1, BATCH_MAX)]  # examples in one pass of a process at most


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
    """What the leader reads: parameters, gradients or moments."""

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
LeaderVector = Float32Array | None  # the leader's numbers; the others get them from it

# The model as torch's modules --------------------------------------------------------------------------------------------


class _ModuleGPT(GPT):
    """Its tensors are parameters of modules, which `torch` may take apart."""

    def __init__(self, job: JobSpec, device: torch.device, parallel: ParallelMode) -> None:
        self.places = dict[int, slice]()  # where in the flat vector a parameter lies, by its identity
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
            leaf = nn.Parameter(torch.empty(shape, device="meta"))  # no process ever has all of it
        self.places[id(leaf)] = place
        return leaf

    def _through(self, layer: Any, x_BTC: Tensor, at: ForwardPass) -> Tensor:
        assert at.cache is None and at.last is None, "nothing but losses is computed by several processes"
        return layer(x_BTC)


class _LayerModule(nn.Module):
    """The leaves of a layer as parameters, by the same names. `fully_shard` gathers them for as long as it runs."""

    def __init__(self, gpt: _ModuleGPT, layer: Mapping[str, Tensor], recompute: bool) -> None:
        super().__init__()
        self.gpt, self.recompute = gpt, recompute
        for name, leaf in layer.items():
            self.register_parameter(name, cast(nn.Parameter, leaf))

    def __getitem__(self, name: str) -> Tensor:
        """What stands for the leaf at the moment."""
        return getattr(self, name)

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(GPT._through, self.gpt, self, x_BTC, ForwardPass(), **KEEPING_INPUTS)
        return GPT._through(self.gpt, self, x_BTC, ForwardPass())


class _LossModule(nn.Module):
    """Examples in, the objective's loss out."""

    def __init__(self, gpt: _ModuleGPT, recompute: bool) -> None:
        super().__init__()
        self.gpt, self.loss, self.head_names = (
            gpt,
            objective_functions(NAME, gpt.job.objective).loss,
            list(gpt.heads),
        )
        self.embedding, self.final_norm = gpt.embedding_VC, gpt.final_norm_C
        self.output = None if gpt.spec.tied else gpt.output_VC
        self.heads = nn.ParameterList(gpt.heads.values())
        self.blocks = nn.ModuleList(_LayerModule(gpt, layer, recompute) for layer in gpt.layers)

    def forward(self, *examples: Tensor) -> Tensor:
        gpt = self.gpt  # which computes with whatever stands for the parameters at the moment
        gpt.embedding_VC, gpt.final_norm_C = self.embedding, self.final_norm
        gpt.output_VC = self.embedding if self.output is None else self.output
        gpt.heads = dict(zip(self.head_names, self.heads, strict=True))
        gpt.first_C, gpt.layers = gpt.heads.get(FIRST_TOKEN_VECTOR), self.blocks
        return self.loss(gpt, *examples)


# Parts -------------------------------------------------------------------------------------------------------------------


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
        """What the leader's vector holds there, in all processes."""
        if given is None:
            told = torch.empty(shape, device=self.device)
        else:
            told = to_device(np.array(given[place], dtype=np.float32), self.device).view(shape)
        dist.broadcast(told, 0)
        return told

    def accumulate_gradient(self, order: ComputeGradient, given: Sequence[npt.NDArray[Any]] | None) -> float:
        """And the mean loss over the batch, in every process."""
        self._forget_gradients()
        batch = [self._shared(form, None if given is None else given[index]) for index, form in enumerate(order.examples)]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        share = split_batch(len(batch[0]), self.processes, order.micro_batch)[dist.get_rank()]
        for index, (rows, weight) in enumerate(share):
            with self._syncing(index == len(share) - 1):
                with autocast_context(self.spec, self.device):
                    loss = self._net(*(tensor[rows] for tensor in batch)) * (weight * self.processes)  # torch takes the mean
                loss.backward()
            total += loss.detach().double() / self.processes
        dist.all_reduce(total)
        return float(total)

    def _shared(self, form: ArraySpec, array: npt.NDArray[Any] | None) -> Tensor:
        """The leader's array, in all processes. Its bytes go through, whatever it holds."""
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
        """Gradients are exchanged once a step."""

    @abstractmethod
    def init_optimizer(self, steps: int, has_moments: bool, given: LeaderVector) -> None: ...

    @abstractmethod
    def clip_gradient(self) -> float:
        """The norm of the whole gradient before it was clipped."""

    @abstractmethod
    def step_optimizer(self, rate: float) -> float:
        """The norm of the whole gradient before it was clipped."""

    @abstractmethod
    def gather_vector(self, what: str) -> LeaderVector:
        """The whole vector, for the leader."""


class DdpRankModel(RankModel):
    """Every process has the whole model and takes the same steps."""

    mode = ParallelMode.DDP

    def __init__(self, spec: JobSpec, resources: EngineResources, device: torch.device) -> None:
        super().__init__(spec, resources, device)
        self._decayed = to_device(weight_decay_mask(spec), device)
        devices = [device.index] if device.type == "cuda" else None
        # A loss without logits leaves an output layer of its own unused.
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
    """Every process has some rows of each tensor, and of its moments."""

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
        """The moments given are those of AdamW: the first ones of all parameters, then the second ones."""
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
            elif parameter.grad is not None:  # in all processes alike
                _write(out, place, parameter.grad)
            elif out is not None:
                out[place] = 0.0
        return out


def _gradient_of(parameter: Any) -> Tensor:
    """Of the rows that are here; zero where the loss does not depend on them."""
    return torch.zeros_like(parameter.to_local()) if parameter.grad is None else parameter.grad.to_local()


def _write(out: LeaderVector, place: slice, tensor: Any) -> None:
    whole = tensor.full_tensor()  # all processes take part
    if out is not None:
        out[place] = to_numpy(whole).ravel()


class RankModels:
    """The parts of one process: the same orders do the same in every one."""

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
    """For each process the rows of its micro-batches, and the weight of each in the mean over the batch.

    All have as many, since all exchange gradients equally often: a process without an example for one passes over some other at
    weight zero.
    """
    parts = np.array_split(np.arange(drawn), processes)
    count = -(-len(parts[0]) // micro_batch)
    pieces = (np.array_split(part, count) for part in parts)
    return [
        [(slice(int(piece[0]), int(piece[-1]) + 1), len(piece) / drawn) if len(piece) else (slice(0, 1), 0.0) for piece in share]
        for share in pieces
    ]
