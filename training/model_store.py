"""The models of a peer's jobs on disk, which blocks advance. Every voter runs this code, with numpy only.

The first model imports numpy and the arithmetic of models, since a voter without jobs needs neither.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from ledger.core.genesis import ModuleVersion
from ledger.jobs import AuditTerms, ClosedRound, Job, JobsModuleV2, JobTerms
from protocol import codec
from protocol.errors import RemoteProtocolError, StorageError, UserError
from protocol.identity import Signed
from protocol.limits import AUDIT_RESPONSE_MS
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from training.job_spec import DECODED_KEPT_MAX, AuditMode, JobSpec
from training.objectives.objective import Objective
from training.replicated import model_files
from training.replicated.parallel_map import ParallelMap, default_thread_count, thread_map

if TYPE_CHECKING:
    from storage.ledger_store import LedgerStore
    from training.parameter_blob import Read
    from training.replicated.model_directory import IncomingModelDirectory
    from training.replicated.replicated_model import ReplicatedModel

ROUNDS_SHOWN_MAX = 8  # most rounds that an error lists
ROUNDS_KEPT = 2  # least number of stored models: of the open round, and of the round before, which a late re-execution may read
# Most bytes of all models that only late audits need. An auditor without the model sends no report.
AUDITED_BYTES_MAX = 16 << 30


@dataclass(frozen=True, slots=True)
class ClosedRoundOutcome:
    """The outcome of a closed round, as far as the model's next step depends on it."""

    job: bytes
    number: int
    accepted: tuple[Signed, ...]  # accepted proposals
    rejected: Mapping[bytes, Verdict]  # verdicts by trainer
    absent: frozenset[bytes]  # trainers of the round without a proposal
    brief: bytes = b""  # brief of the round, in a job on request


def round_directory(folder: Path, job: bytes, number: int) -> Path:
    """Return the directory of the model that round `number` of a job starts from. `folder` contains the models of all jobs."""
    return folder / job.hex()[:32] / f"{number:08d}"


class JobModelStore:
    """The models of all jobs of this peer. It implements `ledger.jobs.JobSpecRules`.

    `apply_round` may run in a thread, one call at a time.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        """`threads` is the number of threads that compute a step of a large model; 0: `default_thread_count`."""
        self._folder, self._threads = folder, threads or default_thread_count()
        self._models: dict[bytes, ReplicatedModel] = {}
        self._served: ReplicatedModel | None = None  # the model from which another peer last requested a part
        # (job, round) of all models in snapshots that other peers may request.
        self._pinned: frozenset[tuple[bytes, int]] = frozenset()
        self._discarded: set[bytes] = set()  # jobs whose models are deleted when no snapshot contains them
        self._unpinned: set[bytes] = set()  # jobs with models that have left all snapshots since the last `take_unpinned_jobs`

    def terms_of_spec(self, spec: bytes) -> JobTerms:
        return _terms(spec, JobSpec.decode(spec).resolved_objective, AUDIT_RESPONSE_MS)

    def why_base_refused(self, base: bytes, spec: bytes) -> str | None:
        before, after = JobSpec.decode(base), JobSpec.decode(spec)
        if before.model != after.model:
            return f"its model has other sizes ({before.model}, expected {after.model})"
        return "it has another tokenizer" if before.tokenizer != after.tokenizer else None

    def why_read_model_refused(self, read: bytes, spec: bytes) -> str | None:
        before, after = JobSpec.decode(read).objective, JobSpec.decode(spec).resolved_objective
        return (
            self.why_base_refused(read, spec)
            if before in after.required_objectives
            else f"it is a {before} job, expected {' or '.join(after.required_objectives)}"
        )

    def why_continuation_refused(self, before: bytes, spec: bytes) -> str | None:
        from training.replicated.tensor_layout import layout_of

        old, new = JobSpec.decode(before), JobSpec.decode(spec)
        if old.resolved_objective.required_model(old) != new.resolved_objective.required_model(new):
            return "it changes the model of another job"
        if layout_of(old) != layout_of(new) or old.outer is not new.outer:
            return "it has other tensors, or another optimizer"
        return None

    def round_directory(self, job: bytes, number: int) -> Path:
        """Return the directory of the model that round `number` starts from."""
        return round_directory(self._folder, job, number)

    def stored_rounds(self, job: bytes) -> list[int]:
        """Return the rounds whose models this peer has, in ascending order."""
        return [of for of, directory in self._directories(job) if directory == self.round_directory(job, of)]

    def open_model(self, job: bytes, number: int) -> ReplicatedModel:
        """Return the model that round `number` starts from. Raises `StorageError` if it is damaged."""
        model = self._models.get(job)
        if model is None or model.round != number:
            model = self._models[job] = self._read_model(job, number)
        return model

    def require_model(self, key: bytes, job: Job, number: int) -> None:
        """Raise `UserError` if this peer lacks the model that round `number` starts from."""
        kept = self.stored_rounds(key)
        if number not in kept:
            shown = [f"@{round}" for round in kept[-ROUNDS_SHOWN_MAX:]]
            has = f"it has {'…, ' * (len(kept) > len(shown))}{', '.join(shown)}" if kept else "it has no model of this job"
            raise UserError(f"this peer does not have the model of job {job.name!r} at round {number}: {has}")

    def open_decided_model(self, store: LedgerStore, key: bytes, job: Job, number: int) -> ReplicatedModel:
        """Return the model that round `number` starts from.

        Raises `UserError` if it is missing or differs from the decided model.
        """
        self.require_model(key, job, number)
        model = self.open_verified_model(key, number)
        closed = None if number == job.round else store.closed_round(key, number - 1)
        decided = job.model_root if number == job.round else closed.model_root if closed else model.root
        if model.root != decided:
            place = self.round_directory(key, number)
            raise UserError(f"{place} holds a model that differs from the decided one: use another round")
        return model

    def open_verified_model(self, job: bytes, number: int) -> ReplicatedModel:
        """Return the model of any round after a check of all hashes. The call may run in another thread.

        A power cut may damage a model that was not durable. Without this check, peers could be blamed for the damage.
        """
        model = self._read_model(job, number)
        with self._sharing(model.spec) as each:
            model.verify(each)
        return model

    def _read_model(self, job: bytes, number: int) -> ReplicatedModel:
        from training.replicated.replicated_model import ReplicatedModel

        return ReplicatedModel.open(self.round_directory(job, number))

    def _sharing(self, spec: JobSpec) -> AbstractContextManager[ParallelMap]:
        from training.replicated.tensor_layout import layout_of

        return thread_map(self._threads, len(layout_of(spec).stretches))

    def create_model(self, job: bytes, spec: bytes, read: Read | None = None) -> bytes:
        """Create the first model of a job and return its root.

        `read` reads a blob; it is needed by a job that starts from a blob.
        """
        from training import parameter_blob
        from training.replicated.replicated_model import ReplicatedModel, first_values

        decoded, directory = JobSpec.decode(spec), self.round_directory(job, 0)
        if decoded.initial_model is not None:
            assert read is not None
            self._models[job] = ReplicatedModel.create_from_values(
                directory, job, decoded, partial(parameter_blob.read_block_values, decoded, read)
            )
            return self._models[job].root
        if (begins := decoded.resolved_objective.first_model(decoded)) is not None:
            named = begins.model
            with self._sharing(decoded) as each:
                saved = ReplicatedModel.open_decided(self.round_directory(named.job, named.round), named.root, each)
            first = saved.as_first_model(job, decoded, with_moments=begins.with_moments)
            first.save(self.round_directory(job, 0))
            self._models[job] = self._read_model(job, 0)
            return self._models[job].root
        base, start = decoded.base, None
        with self._sharing(decoded) as each:
            if base is not None:
                start = ReplicatedModel.open_decided(self.round_directory(base.job, base.round), base.root, each)
            self._models[job] = ReplicatedModel.create_from_values(
                directory, job, decoded, partial(first_values, decoded, start), each
            )
        return self._models[job].root

    def apply_round(self, closed: ClosedRound, payload: Callable[[bytes], bytes]) -> bytes:
        """Apply a closed round and return the new model root. `payload` returns the payload with a given digest."""
        outcome = closed.outcome
        return self._step(
            ClosedRoundOutcome(closed.job, closed.round, closed.proposals, outcome.rejected, outcome.absent, closed.brief),
            payload,
        )

    def _step(self, judged: ClosedRoundOutcome, payload: Callable[[bytes], bytes]) -> bytes:
        from training.replicated.replicated_model import AcceptedProposal

        accepted = []
        for signed in judged.accepted:
            proposal = codec.decode_message(signed.body, (Proposal,))
            accepted.append(AcceptedProposal(signed.signer, proposal, payload(proposal.payload)))
        before, number = self.open_model(judged.job, judged.number), judged.number + 1
        taken = before.rounds_in_model + 1
        # Any model of a job on request may be saved, and saved models are not computed again.
        is_anchor = taken % before.spec.anchor_rounds == 0 or taken == before.spec.rounds
        durable = is_anchor or before.spec.resolved_objective.on_request
        directory = self.round_directory(judged.job, number)
        gone = before.records.keys() - judged.rejected.keys() - judged.absent - {item.trainer for item in accepted}
        with self._sharing(before.spec) as each:
            model = before.apply_round_into(directory, accepted, judged.rejected, durable, gone, each, judged.brief)
        self._models[judged.job] = model
        return model.root

    def roll_back(self, job: bytes, anchor: int, number: int) -> bytes:
        """Use the model of round `anchor` as the model of the later round `number`. Return its root.

        If both rounds are the same, the job has ended, and this model is its last one.
        """
        if number != anchor:
            self._read_model(job, anchor).rolled_back(number).save(self.round_directory(job, number))
        self._models[job] = self._read_model(job, number)
        return self._models[job].root

    # After a restart -------------------------------------------------------------------------------------------------

    def recover_model(
        self, job: bytes, number: int, root: bytes, judged: Callable[[int], ClosedRoundOutcome], payload: Callable[[bytes], bytes]
    ) -> int:
        """Ensure that this peer has the model of round `number` with this root. Return how many rounds were recomputed.

        After a power cut, models that were not durable may be damaged or missing. The model is then recomputed from the last
        durable model. `judged` returns the outcome of a round by its number, and `payload` a payload by its digest. Raises
        `StorageError` if the result has another root.
        """
        self._forget(job)
        # A power cut does not damage a durable model. Other damage is found when the model is read.
        whole = model_files.is_durable(self.round_directory(job, number)) or self.has_model(job, number, root)
        for of, directory in self._directories(job):
            if not model_files.is_durable(directory) and (of > number or not whole):
                model_files.remove_directory(directory)
        if whole:
            return 0
        base = self._last_durable(job, number)
        if base is None:
            raise StorageError(
                f"{self.round_directory(job, number)} is damaged, and this peer has no older model: restore a snapshot"
            )
        for before in range(base, number):
            reached = self._step(judged(before), payload)
        if reached != root:
            raise StorageError(
                f"{self.round_directory(job, base)} does not reproduce the model of round {number}: restore a snapshot"
            )
        return number - base

    def _last_durable(self, job: bytes, number: int) -> int | None:
        """Return the last round up to `number` whose model is durable. Later models can be recomputed from it."""
        durable = [of for of in self.stored_rounds(job) if model_files.is_durable(self.round_directory(job, of))]
        return max((of for of in durable if of <= number), default=None)

    def _directories(self, job: bytes) -> Iterator[tuple[int, Path]]:
        """Yield the directories of the job's models and of leftovers of a crash, each with the number of its round."""
        for directory in sorted(self.round_directory(job, 0).parent.glob("*")):
            of = directory.name.removeprefix(".").partition(".")[0]
            if of.isdigit():
                yield int(of), directory

    # Snapshots: implements `ledger.snapshots.snapshot_server.ModelStore`
    # ------------------------------------------------------------------

    def read_manifest(self, job: bytes, number: int) -> bytes:
        return model_files.read_manifest(self.round_directory(job, number))

    def read_part(self, job: bytes, number: int, index: int) -> bytes:
        served = self._served
        if served is None or (served.job, served.round) != (job, number):
            served = self._served = self._read_model(job, number)
        return served.read_part(index)

    def start_receiving(self, job: bytes, number: int, root: bytes, manifest: bytes) -> IncomingModelDirectory:
        from training.replicated.model_directory import IncomingModelDirectory

        return IncomingModelDirectory(self.round_directory(job, number), job, number, root, manifest, partial(self._forget, job))

    def _forget(self, job: bytes) -> None:
        self._models.pop(job, None)
        self._served = None

    def has_model(self, job: bytes, number: int, root: bytes) -> bool:
        try:
            model = self.open_verified_model(job, number)
        except StorageError:
            return False
        return model.root == root

    def set_pinned_models(self, models: frozenset[tuple[bytes, int]]) -> None:
        self._unpinned |= {job for job, _ in self._pinned - models}
        self._pinned = models
        pinned = {job for job, _ in models}
        for job in self._discarded - pinned:
            shutil.rmtree(self.round_directory(job, 0).parent, ignore_errors=True)
        self._discarded &= pinned

    def discard_job(self, job: bytes) -> None:
        """Delete all models of a job that the ledger has removed, as soon as no snapshot contains them."""
        self._forget(job)
        self._discarded.add(job)

    def take_unpinned_jobs(self) -> set[bytes]:
        """Return the jobs of which a model has left all snapshots since the last call, so that `prune_models` may delete it."""
        jobs, self._unpinned = self._unpinned, set()
        return jobs

    def discard_forgotten_jobs(self, known: Collection[bytes]) -> None:
        """Discard jobs that are not `known`, and whose models do not outlast them.

        The process may have stopped after the block that removed such a job, and before the job's models were deleted.
        """
        stay = {self.round_directory(job, 0).parent for job in known}
        for folder in sorted(set(self._folder.glob("*")) - stay):
            newest = max(folder.glob("[0-9]*"), default=None)
            if newest is not None:
                # A folder that cannot be read stays: it may hold the only copy of a trained model.
                with contextlib.suppress(StorageError, RemoteProtocolError):
                    self._discard_if_useless(newest)

    def _discard_if_useless(self, directory: Path) -> None:
        from training.replicated import model_directory

        state = model_directory.decode_manifest(model_files.read_manifest(directory)).state
        if not (self.terms_of_spec(state.spec.encode()).leaves_model and state.median_norms_squared):
            self.discard_job(state.job)

    def prune_models(
        self,
        job: bytes,
        number: int,
        spec: JobSpec,
        audited: Collection[int] = (),
        earlier: Collection[int] = (),
        is_over: bool = False,
    ) -> None:
        """Delete models that neither round `number` nor audits nor snapshots need, and leftovers of a crash.

        `audited` are rounds whose proposals may still be replayed, however old they are. Models of the rounds `earlier`, which
        are anchors or saved, stay, too. The last durable model stays, since later models can be recomputed from it. If the job is
        over, models of rounds after `number`, which were undone, are deleted. A repeated call has no effect.
        """
        kept = max(ROUNDS_KEPT, spec.rounds_audited + 1)
        base = self._last_durable(job, number)
        pinned = [of for name, of in self._pinned if name == job]
        late = sorted(audited)[-max(1, AUDITED_BYTES_MAX // spec.model_bytes) :]
        needed = {self.round_directory(job, of) for of in (base, *pinned, *late, *earlier) if of is not None}
        for of, directory in list(self._directories(job)):
            if (of <= number - kept or (is_over and of > number)) and directory not in needed:
                model_files.recycle_directory(directory)
        if is_over:
            shutil.rmtree(model_files.spare_directory(self.round_directory(job, number)), ignore_errors=True)


@lru_cache(maxsize=DECODED_KEPT_MAX)  # A job's terms are read often.
def _terms(spec: bytes, kind: Objective, answer_ms: int) -> JobTerms:
    from training.replicated.tensor_layout import layout_from_shapes

    job = JobSpec.decode(spec)
    required = [ModuleVersion(kind.module, kind.version)]
    required += [ModuleVersion(layer.module, layer.version) for layer in job.model.layer_kinds if layer.module]
    # Programs of 0.3.0 refuse replays in bf16, although they know the precision.
    if codec.has_added_value(job) or job.is_reexecuted_in_bf16:
        required.append(ModuleVersion(JobsModuleV2.name, JobsModuleV2.version))
    return JobTerms(
        name=job.name,
        objective=job.objective,
        requires=tuple(dict.fromkeys(required)),
        rounds=job.rounds,
        audited=job.audit is AuditMode.FULL,
        needs_worker=kind.needs_worker,
        anchor_rounds=job.anchor_rounds,
        proposal_seconds=job.proposal_seconds,
        suspension_rounds=job.suspension_rounds,
        audits=_audit_terms(job, answer_ms) if job.audit is AuditMode.SAMPLED else None,
        base=job.base,
        start=job.initial_model,
        read=kind.required_model(job),
        # An objective may have tensors beside those of the model.
        parameters=max(job.model.parameters, layout_from_shapes(kind.tensor_shapes(job, job.decoded_settings)).size),
        pass_parameters=kind.pass_parameters(job),
        trained_parameters=job.trained_parameters,
        role=kind.role,
        on_request=kind.on_request,
        continues=begins.model if (begins := kind.first_model(job)) is not None else None,
    )


def audit_download_bytes_max(job: JobSpec) -> int:
    """Return the most bytes that one auditor fetches for a proposal: two buffers, and the blobs of its declaration."""
    from training.replicated import error_feedback

    return 2 * error_feedback.buffer_bytes(job) + job.resolved_objective.declared_bytes_max(job)


def _audit_terms(job: JobSpec, answer_ms: int) -> AuditTerms:
    # Half of the least uplink is reserved for audits: for each Mbit/s, 500 bits in a millisecond.
    reveal_ms = math.ceil(8 * audit_download_bytes_max(job) / (job.uplink_mbit_min * 500))
    rounds = job.audit_window, job.suspension_rounds
    return AuditTerms(job.audit_rate, job.auditors, *rounds, answer_ms, reveal_ms, job.final_full_audit_rounds)
