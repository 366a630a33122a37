"""Traces of a preference pair: the training steps that drew it.

Draws are hashes, so they follow from the set and from the trainers of each round.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from features.export_query import ExportedSets
from features.text_tables import pluralize
from ledger.jobs import JobsState
from ledger.ledger_state import StateTransition
from ledger.network_governance import NetworkState
from protocol.errors import UserError
from protocol.identity import peer_id
from protocol.limits import DATA_SHARD_BYTES
from protocol.verdicts import ABSENT
from rlhf.data.preference_sets import PreferencePair, decode_records, split_held_out
from rlhf.data.tokenized_records import record_label
from rlhf.ledger.preference_set_attestation import AttestedPreferenceSet
from rlhf.ledger.rlhf_module import RlhfState
from rlhf.objectives.ppo import MODULE
from rlhf.objectives.supervised_objectives import PAIR_OBJECTIVES, PairObjective
from rlhf.rpc import PairDrawView, PairTraceView
from storage.ledger_store import LedgerStore
from training.corpus import read_manifest
from training.job_spec import JobSpec
from training.objectives.objective import InnerStep

ID_DIGITS_MIN = 8  # least number of digits of a task's id; a shorter number is the number of a line
LINE_BYTES = 8  # bytes of a pair's id if the id is the number of a line
ACCEPTED = "accept"  # verdict of accepted proposals in stored rounds

Read = Callable[[bytes, int], bytes]  # reads a blob: (digest, maximum size in bytes)


Trainers = dict[bytes, bool]  # trainer with a proposal -> True if the proposal was accepted


@dataclass(frozen=True, slots=True)
class TracedJob:
    """A job that learns from a preference set, with its closed rounds that are known."""

    job: bytes
    spec: JobSpec
    rounds: dict[int, Trainers] = field(default_factory=dict)
    unknown: int = 0  # number of closed rounds of which no record is stored


def read_preference_set(data: bytes, read: Read) -> list[PreferencePair]:
    shards = read_manifest(data, read).shards
    return decode_records(io.BytesIO(b"".join(read(shard, DATA_SHARD_BYTES) for shard in shards)), PreferencePair)


def trace_pair(jobs: Sequence[TracedJob], sets: Mapping[bytes, AttestedPreferenceSet], read: Read, text: str) -> PairTraceView:
    """Return the steps that drew a pair in `jobs`, which are in the order of their starts.

    Raises `UserError` if no set has the pair.
    """
    view: PairTraceView | None = None
    for learned in jobs:
        data = learned.spec.data
        assert data is not None, "a job that learns from a set names it"
        pairs = read_preference_set(data, read)
        pair = find_pair(pairs, text)
        if pair is None:
            continue
        view = PairTraceView(
            pair=pair.id.hex(),
            height=sets[data].source.height if data in sets else None,
            set=data.hex(),
            held_out=pair not in split_held_out(pairs, learned.spec.held_out_permille)[0],
            draws=(*(view.draws if view else ()), *iter_pair_draws(learned.job, learned.spec, pairs, pair, learned.rounds)),
            unknown_rounds=(view.unknown_rounds if view else 0) + learned.unknown,
        )
    if view is None:
        raise UserError(
            f"unknown pair {text!r}: the preference sets of {pluralize(len(jobs), 'job')} do not have it; "
            "give the id of a task, or the line number of a file"
        )
    return view


def find_pair(pairs: Sequence[PreferencePair], text: str) -> PreferencePair | None:
    """Return the pair with this beginning of its task's id, or with this line number in a file.

    None: no pair has. Raises `UserError` for an ambiguous id.
    """
    wanted = text.strip().lower()
    if wanted.isdecimal() and len(wanted) < ID_DIGITS_MIN:
        line = int(wanted).to_bytes(LINE_BYTES, "big")
        return next((pair for pair in pairs if pair.id == line), None)
    alike = [pair for pair in pairs if len(wanted) >= ID_DIGITS_MIN and pair.id.hex().startswith(wanted)]
    if len(alike) > 1:
        raise UserError(f"{text!r} matches {len(alike)} pairs, such as {record_label(alike[0])}: type more of the id")
    return alike[0] if alike else None


def iter_pair_draws(
    job: bytes, spec: JobSpec, pairs: Sequence[PreferencePair], pair: PreferencePair, rounds: Mapping[int, Trainers]
) -> Iterator[PairDrawView]:
    """Yield the steps that drew a pair, in the order of rounds, trainers and steps.

    A step that drew the pair twice appears once.
    """
    train = [other.id for other in split_held_out(pairs, spec.held_out_permille)[0]]
    if pair.id not in train:
        return
    kind = spec.resolved_objective
    assert isinstance(kind, PairObjective)
    place = train.index(pair.id)
    hits = list[tuple[int, bytes, int, bool]]()
    # The loop handles one trainer after another, so that the cache of draw orders holds the trainer's order.
    for trainer in sorted(set[bytes]().union(*rounds.values())):
        for number, trainers in rounds.items():
            if trainer in trainers:
                for step in range(spec.local_steps):
                    if place in kind.draw_example_numbers(spec, InnerStep(job, number, trainer, step), spec.batch, len(train)):
                        hits.append((number, trainer, step, trainers[trainer]))
    for number, trainer, step, accepted in sorted(hits):
        yield PairDrawView(job.hex(), number, peer_id(trainer), step, accepted)


def jobs_with_preferences(jobs: JobsState, store: LedgerStore) -> Iterator[TracedJob]:
    """Yield the jobs that learn from preferences, in the order of their starts."""
    for key, job in sorted(jobs.jobs.items(), key=lambda item: item[1].started_height):
        spec = JobSpec.decode(job.spec)
        if spec.objective in PAIR_OBJECTIVES:
            closed = {number: found for number in range(job.round) if (found := store.closed_round(key, number)) is not None}
            rounds = {
                number: {trainer: said == ACCEPTED for trainer, said in found.verdicts.items() if said != ABSENT}
                for number, found in closed.items()
            }
            yield TracedJob(key, spec, rounds, job.round - len(rounds))


@dataclass
class ExportedPairTrace:
    """A query of an exported ledger (`features.export_query`): the trace of a pair."""

    pair: str
    jobs: dict[bytes, TracedJob] = field(default_factory=dict)
    sets: dict[bytes, AttestedPreferenceSet] = field(default_factory=dict)

    def observe_block(self, transition: StateTransition) -> None:
        state = transition.state
        for job in transition.started_jobs:
            spec = JobSpec.decode(state.jobs.jobs[job].spec)
            if spec.objective in PAIR_OBJECTIVES:
                self.jobs[job] = TracedJob(job, spec)
        for closed in transition.closed_rounds:
            if closed.job in self.jobs:
                judged = dict.fromkeys(closed.outcome.accepted, True) | dict.fromkeys(closed.outcome.rejected, False)
                self.jobs[closed.job].rounds[closed.round] = judged
        if state.module_state(NetworkState).module_version(MODULE):
            self.sets.update(state.module_state(RlhfState).sets)

    def answer(self, sets: ExportedSets) -> PairTraceView:
        """Return the trace. Raises `UserError` if no set of the export has the pair."""
        there = [learned for learned in self.jobs.values() if learned.spec.data and sets.has_set(learned.spec.data)]
        if self.jobs and not there:
            raise UserError(f"{sets.folder} has no preference set: the exporting peer had none, or one of its pairs is redacted")
        return trace_pair(there, self.sets, sets.read_set, self.pair)
