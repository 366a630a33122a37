"""Where a pair was drawn: it follows from the set and from who trained in which round, as every draw does."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from features.tables import counted
from protocol.errors import UserError
from protocol.identity import peer_id
from protocol.limits import DATA_SHARD_BYTES
from rlhf.calls import DrawView, TraceView
from rlhf.pairs import name
from rlhf.preferences import Pair, parted, unpacked
from rlhf.reward import RewardModel
from rlhf.sets import DecidedSet
from rlhf.supervised import Dpo
from training.data.corpus import read_manifest
from training.objectives.objective import Step
from training.spec import JobSpec

ID_DIGITS_MIN = 8  # of a task's id; a shorter number is that of a line
LINE_BYTES = 8  # of a line's number, where it is the id of a pair

Read = Callable[[bytes, int], bytes]  # a blob by its digest, of at most so many bytes


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    trainers: Mapping[bytes, bool]  # that proposed something -> whether it was accepted


@dataclass(frozen=True, slots=True)
class Learned:
    """A job that learns from a set, and its closed rounds as far as they are known."""

    job: bytes
    spec: JobSpec
    rounds: list[Round] = field(default_factory=list)
    unknown: int = 0


def set_of(data: bytes, read: Read) -> list[Pair]:
    shards = read_manifest(data, read).shards
    return unpacked(io.BytesIO(b"".join(read(shard, DATA_SHARD_BYTES) for shard in shards)), Pair)


def traced(jobs: Sequence[Learned], sets: Mapping[bytes, DecidedSet], read: Read, text: str) -> TraceView:
    """The jobs stand in the order in which they were started. Raises `UserError` for a pair that no set has."""
    view: TraceView | None = None
    for learned in jobs:
        data = learned.spec.data
        assert data is not None, "a job that learns from a set names it"
        pairs = set_of(data, read)
        pair = found(pairs, text)
        if pair is None:
            continue
        view = TraceView(
            pair=pair.id.hex(),
            height=sets[data].source.height if data in sets else None,
            set=data.hex(),
            held_out=pair not in parted(pairs, learned.spec.held_out_permille)[0],
            draws=(*(view.draws if view else ()), *draws(learned.job, learned.spec, pairs, pair, learned.rounds)),
            unknown=(view.unknown if view else 0) + learned.unknown,
        )
    if view is None:
        said = "name a task by its id, or the number of a file's line"
        raise UserError(f"{text!r} is in no set of {counted(len(jobs), 'job')} with preferences: {said}")
    return view


def found(pairs: Sequence[Pair], text: str) -> Pair | None:
    """The pair that a person means: by its task, or how its id begins; of a file by its line. Raises `UserError`."""
    wanted = text.strip().lower()
    if wanted.isdecimal() and len(wanted) < ID_DIGITS_MIN:
        line = int(wanted).to_bytes(LINE_BYTES, "big")
        return next((pair for pair in pairs if pair.id == line), None)
    alike = [pair for pair in pairs if len(wanted) >= ID_DIGITS_MIN and pair.id.hex().startswith(wanted)]
    if len(alike) > 1:
        raise UserError(f"{text!r} fits {len(alike)} pairs, such as {name(alike[0])}: type more of the id")
    return alike[0] if alike else None


def draws(job: bytes, spec: JobSpec, pairs: Sequence[Pair], pair: Pair, rounds: Iterable[Round]) -> Iterator[DrawView]:
    """In the order of rounds, trainers and steps. A pair that a step has drawn twice is named once."""
    train = [other.id for other in parted(pairs, spec.held_out_permille)[0]]
    if pair.id not in train:
        return
    kind = spec.kind
    assert isinstance(kind, RewardModel | Dpo)
    place, known = train.index(pair.id), list(rounds)
    hits = list[tuple[int, bytes, int, bool]]()
    for trainer in sorted({trainer for at in known for trainer in at.trainers}):  # one after the other: its order is found once
        for at in known:
            if trainer in at.trainers:
                for step in range(spec.local_steps):
                    if place in kind.drawn(spec, Step(job, at.number, trainer, step), spec.batch, len(train)):
                        hits.append((at.number, trainer, step, at.trainers[trainer]))
    for number, trainer, step, accepted in sorted(hits):
        yield DrawView(job.hex(), number, peer_id(trainer), step, accepted)
