"""Registry of the objectives, by name. This package has two objectives: text, and updates that can be computed from a hash.

Features add objectives at the program's start (`peer.features.register_features`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from protocol.verdicts import OBJECTIVE_CODES_MAX, VERDICT_MEANINGS, ReplayFinding, Verdict
from training.objectives.objective import JobSpecProtocol, Objective, Shape
from training.transformer import BYTE_VOCABULARIES, BYTES, BYTES_WITH_END, tensor_shapes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SIZE = 4096  # number of parameters of the scratch objective


class LanguageObjective(Objective):
    """Next-token prediction by a decoder-only transformer."""

    name = "language"
    description = "next-token prediction on text"
    starts_from_parameters = True
    is_replayable_in_bf16 = True

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        if job.tokenizer is None and job.model.vocabulary not in BYTE_VOCABULARIES:
            least = max(BYTES_WITH_END + 1, job.model.vocabulary)
            needs = f"model.vocabulary {job.model.vocabulary} needs a tokenizer"
            return f"{needs}: use `train --vocabulary {least}`, or leave it at the {BYTES} bytes"
        if job.data is None and job.is_reexecuted:
            return f"audit {job.audit.value!r} needs shared data: give a text, or use audit 'off' for local data"
        return None

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        return tensor_shapes(job.model)


class ScratchObjective(Objective):
    """An update that every peer can compute from a hash, to test a live network without a model."""

    name = "scratch"
    description = "a known update of one small tensor, to test a live network"
    needs_worker = False
    reads_text = False
    makes_text = False

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        return [("scratch", (SIZE,))]

    def deterministic_update(self, job: bytes, round: int, trainer: bytes, size: int) -> npt.NDArray[np.float32]:
        """Return a vector of multiples of 1/256 from −1/2 to 1/2."""
        import numpy as np

        from training import random_stream

        integers = np.frombuffer(random_stream.random_bytes(size, "scratch", job, round, trainer), dtype=np.int8)
        return integers.astype(np.float32) * np.float32(1 / 256)


OBJECTIVES: tuple[Objective, ...] = (LanguageObjective(), ScratchObjective())  # objectives of this package

_known = {objective.name: objective for objective in OBJECTIVES}


def register_objectives(objectives: Iterable[Objective]) -> None:
    """Add a feature's objectives. A second registration changes nothing."""
    for objective in objectives:
        assert _known.setdefault(objective.name, objective) is objective, f"two objectives are called {objective.name!r}"
        labels = objective.reason_labels
        common = {code.label for code in (*Verdict, *ReplayFinding)} | VERDICT_MEANINGS.keys()
        assert len(set(labels)) == len(labels) <= OBJECTIVE_CODES_MAX and common.isdisjoint(labels), objective.name
        assert objective.declaration_type is None or objective.needs_worker, "an engine makes and checks declarations"


def find_objective(name: str) -> Objective | None:
    return _known.get(name)


def rejection_meanings() -> dict[str, str]:
    """Return the meaning for people of every rejection label."""
    return VERDICT_MEANINGS | {reason.label: reason.meaning for kind in _known.values() for reason in kind.rejection_reasons}


def objective_names() -> tuple[str, ...]:
    return tuple(_known)
