"""Where a pair was drawn, from the rounds and the sets that this peer has."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

from ledger.jobs import Job
from ledger.state import State
from protocol.errors import UserError
from protocol.limits import DATA_SHARD_BYTES, MESSAGE_BYTES_MAX
from rlhf import tracing
from rlhf.calls import TraceView
from rlhf.module import RlhfState
from rlhf.preferences import Pair, is_held_out, unpacked
from rlhf.reward import REWARD
from storage.store import Store
from training.data.corpus import Manifest
from training.spec import JobSpec

ABSENT, ACCEPTED = "absent", "accept"  # among the verdicts of a round that is stored
Read = Callable[[bytes, int], bytes]  # a blob of at most so many bytes


def set_of(manifest: bytes, read: Read) -> list[Pair]:
    named = Manifest.decode(read(manifest, MESSAGE_BYTES_MAX))
    return unpacked(io.BytesIO(b"".join(read(shard, DATA_SHARD_BYTES) for shard in named.shards)))


def traced(state: State, store: Store, read: Read, text: str) -> TraceView:
    """It may run in a thread. Raises `UserError` for a pair that no set has."""
    known = [(key, job, JobSpec.decode(job.spec)) for key, job in state.jobs.jobs.items()]
    learning = sorted((job.started, key, job, spec) for key, job, spec in known if spec.objective == REWARD.name and spec.data)
    view: TraceView | None = None
    for _, key, job, spec in learning:
        assert spec.data is not None
        pairs = set_of(spec.data, read)
        pair = tracing.found(pairs, text)
        if pair is None:
            continue
        rounds = list(_rounds(store, key, job))
        before = view.draws if view else ()
        unknown = (view.unknown if view else 0) + job.round - len(rounds)
        decided = state.of(RlhfState).sets.get(spec.data)
        view = TraceView(
            pair=pair.id.hex(),
            height=decided.source.height if decided else None,
            set=spec.data.hex(),
            held_out=is_held_out(pair.prompt, spec.held_out_permille),
            draws=(*before, *tracing.draws(key, spec, pairs, pair, rounds)),
            unknown=unknown,
        )
    if view is None:
        raise UserError(f"{text!r} is in no set of a job that this network knows: name a task by its id, or a line of a file")
    return view


def _rounds(store: Store, key: bytes, job: Job) -> Iterator[tracing.Round]:
    for number in range(job.round):
        if (closed := store.round(key, number)) is not None:
            said = {trainer: verdict for trainer, verdict in closed.verdicts.items() if verdict != ABSENT}
            yield tracing.Round(number, {trainer: verdict == ACCEPTED for trainer, verdict in said.items()})
