"""A request of the feature to the worker process, and its handler there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from protocol.codec import Count, Digest
from training.replicated.tensor_layout import layout_of
from training.worker_protocol import WorkerRequest, WorkerRequestKind

if TYPE_CHECKING:
    from training.engines.request_handlers import WorkerContext


@dataclass(frozen=True, slots=True)
class ParametersCounted:
    TAG: ClassVar[str] = "parameters-counted"
    parameters: Count


@dataclass(frozen=True, slots=True)
class CountParameters(WorkerRequest[ParametersCounted]):
    """Request to count the parameters of an open job's model."""

    TAG: ClassVar[str] = "count-parameters"
    job: Digest


REQUESTS = (WorkerRequestKind(CountParameters, ParametersCounted, 3, "tests.notes.requests:count_parameters"),)


def count_parameters(context: WorkerContext, request: CountParameters) -> ParametersCounted:
    return ParametersCounted(layout_of(context.find_engine(request.job).spec).size)
