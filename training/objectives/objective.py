"""What an objective is: the tensors it trains, what it asks of a job, and how an update is computed."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from protocol.codec import Digest
from training.transformer import ModelSpec

Float32Array = npt.NDArray[np.float32]
Shape = tuple[int, ...]


class Job(Protocol):
    """What an objective reads of a job's specification (`training.spec.JobSpec`)."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def tokenizer(self) -> Digest | None: ...

    @property
    def data(self) -> Digest | None: ...

    @property
    def audit(self) -> enum.StrEnum: ...

    @property
    def is_reexecuted(self) -> bool: ...

    @property
    def local_steps(self) -> int: ...


class Objective:
    """Everybody who runs a network must find the same here for the same job: whether it is sound, its tensors, its steps.

    An objective whose update takes no training has `known_update`, and every voter computes it. All others name, for each engine
    that can train them, the function that gives the loss.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # for people, in one line
    # A network trains for this objective if it runs this module, in this version or a later one: so all its voters know it.
    module: ClassVar[str] = "jobs"
    version: ClassVar[int] = 1
    settings: ClassVar[type | None] = None  # record of what such a job says beside what all jobs have
    needs_worker: ClassVar[bool] = True  # only members with a worker train, and re-execute
    reads_text: ClassVar[bool] = True  # the job names a text, or each trainer has its own
    makes_text: ClassVar[bool] = True  # people can ask its model for text, and take it home
    losses: ClassVar[Mapping[str, str]] = {}  # engine -> `module:function`, imported by the worker alone

    def problem(self, job: Job, settings: Any) -> str | None:
        """What is wrong with a job, naming the value; None if nothing is. `settings` is its own record, or None."""
        return None

    def tensors(self, job: Job, settings: Any) -> Sequence[tuple[str, Shape]]:
        """Names and shapes, in the order of the flat vector."""
        raise NotImplementedError

    def steps(self, job: Job) -> int:
        """Inner steps of a round, of which a sampled audit replays one."""
        return job.local_steps

    def known_update(self, job: bytes, round: int, trainer: bytes, size: int) -> Float32Array:
        """Δ of one trainer in one round, exact on any machine."""
        raise NotImplementedError
