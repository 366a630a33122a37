"""Where a pair was drawn: it follows from the set and from who trained in which round, as every draw does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from protocol.errors import UserError
from protocol.identity import peer_id
from rlhf.calls import DrawView
from rlhf.pairs import name
from rlhf.preferences import Pair, is_held_out, pairs_of_step
from training.spec import JobSpec

SHORT = 8  # digits of an id, at least: fewer are taken for the number of a line


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    trainers: Mapping[bytes, bool]  # that proposed something -> whether it was accepted


def found(pairs: Sequence[Pair], text: str) -> Pair | None:
    """The pair that a person means: by its task, or how its id begins; of a file by its line. Raises `UserError`."""
    wanted = text.strip().lower()
    if wanted.isdecimal() and len(wanted) < SHORT:
        line = int(wanted).to_bytes(SHORT, "big")
        return next((pair for pair in pairs if pair.id == line), None)
    alike = [pair for pair in pairs if len(wanted) >= SHORT and pair.id.hex().startswith(wanted)]
    if len(alike) > 1:
        raise UserError(f"{text!r} fits {len(alike)} pairs, such as {name(alike[0])}: type more of the id")
    return alike[0] if alike else None


def draws(job: bytes, spec: JobSpec, pairs: Sequence[Pair], pair: Pair, rounds: Iterable[Round]) -> Iterator[DrawView]:
    """In the order of rounds, trainers and steps. A pair that a step has drawn twice is named once."""
    train = [other.id for other in pairs if not is_held_out(other.prompt, spec.held_out_permille)]
    if pair.id not in train:
        return
    place = train.index(pair.id)
    for at in rounds:
        for trainer in sorted(at.trainers):
            for step in range(spec.local_steps):
                drawn = pairs_of_step(job, at.number, trainer, step, count=spec.batch, pairs=len(train), seed=spec.seed)
                if np.any(drawn == place):
                    yield DrawView(job.hex(), at.number, peer_id(trainer), step, at.trainers[trainer])
