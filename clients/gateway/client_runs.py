"""The runs of a gateway: it opens them, computes the losses of requests, and requests steps for its clients.

All methods of `ClientRuns` raise `UserError` for a fault of the client, with the value, and `WorkerFailed` for one of the worker.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from clients.ledger.clients_module import (
    ClientRun,
    ClientsState,
    EndRun,
    OpenRun,
    RequestStep,
    SaveModel,
    SetExpiry,
    StepOutcome,
)
from clients.objective import BASES, MODULE, PROPOSAL_SECONDS_MAX, ClientObjective
from clients.records import BODIES_MAX, AdapterSettings, ListedBody, Manifest, OptimizerStep, RequestBody, StepBrief
from clients.worker_requests import PassRequest
from ledger.jobs import Job, JobPhase, ModelReference, job_id
from ledger.network_governance import NetworkState
from protocol import codec
from protocol.errors import UserError
from training.api.initial_model import resolve_base_job
from training.api.job_notes import rejections_text
from training.job_spec import ROUNDS_MAX, AggregationRule, AuditMode, JobSpec, OuterOptimizerKind
from training.round_context import TrainingPeer, WorkerClient

log = logging.getLogger("site")


@dataclass(frozen=True, slots=True)
class LossReport:
    """The losses of one request body."""

    loss: float  # sum over all tokens
    logprobs: tuple[bytes, ...]  # for each example, the log-probabilities of its targets, float32, little-endian


class ClientRuns:
    def __init__(self, peer: TrainingPeer) -> None:
        self._peer = peer
        # Number of undecided steps that list a request body, by its digest: several models may compute the same request.
        self._listed = Counter[bytes]()
        self._bodies_lock = trio.Lock()
        self._opened = set[bytes]()  # unfinished runs that this process has opened
        self._openings = 0  # runs that are being opened

    def list_bases(self) -> list[tuple[str, int]]:
        """Return the name and the context of each finished job whose model can have adapters."""
        finished = [job for job in self._peer.state.jobs.jobs.values() if job.phase is JobPhase.FINISHED and job.round]
        specs = [JobSpec.decode(job.spec) for job in finished]
        return sorted((spec.name, spec.model.context) for spec in specs if spec.objective in BASES)

    def base_of(self, key: bytes) -> str:
        """Return the name of the finished job that a run changes, or that this job itself is."""
        jobs = self._peer.state.jobs.jobs
        job = jobs.get(key)
        reference = JobSpec.decode(job.spec).resolved_objective.required_model(JobSpec.decode(job.spec)) if job else None
        found = jobs.get(reference.job) if reference else job
        if found is None:
            raise UserError(f"the network has deleted job {key.hex()[:8]}")
        return found.name

    async def open_run(
        self, base: str, *, rank: int, seed: int, train_attn: bool = True, train_mlp: bool = True, train_unembed: bool = True
    ) -> bytes:
        """Open a run of adapters for a finished job, given by its name or id, and return the id of the run's job."""
        self._peer.require_member()
        if not self._peer.state.module_state(NetworkState).module_version(MODULE):
            raise UserError(f"this network does not run the module {MODULE}: a quorum of voters must run `upgrade {MODULE} 1`")
        self._worker()
        model, _, of_base = resolve_base_job(self._peer, base, "base_model")
        if of_base.objective not in BASES:
            raise UserError(f"base_model {base!r} is a {of_base.objective} job, expected {' or '.join(BASES)}")
        own = AdapterSettings(rank=rank, train_attn=train_attn, train_mlp=train_mlp, train_unembed=train_unembed, base=model)
        spec = make_run_spec(of_base, own, seed)
        return await self.open_spec(spec)

    async def continue_run(self, saved: ModelReference, *, with_moments: bool) -> bytes:
        """Open a run that begins with a saved model of another run. Return the id of the run's job.

        The optimizer's moments are those of the saved model, or zero.
        """
        self._worker()
        known = self._peer.state.jobs.jobs.get(saved.job)
        if known is None:
            raise UserError(f"the network has deleted the models of run {saved.job.hex()[:8]}")
        spec = JobSpec.decode(known.spec)
        settings = replace(spec.decoded_settings, start=saved, start_moments=with_moments)
        return await self.open_spec(replace(spec, objective_settings=codec.encode(settings)))

    async def open_spec(self, spec: JobSpec) -> bytes:
        """Open a run with this specification, and return the id of its job."""
        self._openings += 1
        try:
            transaction = await self._peer.submit_transaction("client/open", OpenRun(spec.validated().encode()))
            key = job_id(self._peer.me, transaction)
            self._opened.add(key)
        finally:
            self._openings -= 1
        if key not in self._peer.state.jobs.jobs:
            raise UserError("the network refused the run: it has as many runs as are allowed, or cannot train its base now")
        return key

    async def end_unclaimed_runs(self, claimed: Set[bytes]) -> None:
        """End the runs that no model has, since an earlier process was killed after it had opened them.

        Call it when this process has opened a run: a transaction of an earlier process is decided by then, or never will be.
        """
        if self._openings:  # The ledger may have a run that is not in `_opened` yet.
            return
        runs = self._peer.state.module_state(ClientsState).runs
        mine = {key for key, run in runs.items() if run.owner == self._peer.me and not run.is_over}
        self._opened &= mine
        for key in sorted(mine - self._opened - claimed):
            try:
                await self.end_run(key)
            except UserError as error:
                log.warning("run %s of an earlier process is not ended: %s", key.hex()[:8], error)

    @property
    def time_ms(self) -> int:
        """Time of this machine or of the last block in milliseconds, whichever is later. An idle network decides no blocks."""
        return max(time.time_ns() // 1_000_000, self._peer.state.time_ms)

    def is_present_model(self, model: ModelReference, key: bytes) -> bool:
        """Return whether a run has this model now."""
        job, _ = self._job(key)
        return model == ModelReference(key, job.round, job.model_root)

    async def save_model(self, key: bytes, name: str, expires_ms: int) -> tuple[ModelReference, int]:
        """Let every peer keep the present model of a run until `expires_ms` (0: for ever). Return a reference, and its bytes."""
        job, spec = self._job(key)
        await self._peer.submit_transaction("client/save", SaveModel(key, name, expires_ms))
        return ModelReference(key, job.round, job.model_root), spec.model_bytes

    async def set_expiry(self, key: bytes, name: str, expires_ms: int) -> None:
        """Set when a saved model expires, unless it has expired. A time in the past deletes it."""
        try:
            await self._peer.submit_transaction("client/expire", SetExpiry(key, name, expires_ms))
        except UserError:
            run = self._peer.state.module_state(ClientsState).runs.get(key)
            if run is not None and name in run.checkpoints:
                raise

    async def compute_losses(self, key: bytes, body: RequestBody, *, backward: bool) -> LossReport:
        """Compute a request on the present model of a run. With `backward`, its gradient is kept for the next step."""
        job, spec = self._job(key)
        if problem := body.problem(spec.model.context, spec.model.vocabulary):
            raise UserError(problem)
        context, worker = self._peer.make_round_context(key, job.round, job), self._worker()
        with tempfile.TemporaryDirectory(dir=worker.text_folder) as folder:
            file, out = Path(folder) / "body", Path(folder) / "logprobs"
            await trio.to_thread.run_sync(file.write_bytes, codec.encode(body))
            request = PassRequest(key, job.round, str(context.model_directory), str(file), str(out), backward)
            done = await worker.ask_worker(context, request)
            numbers = await trio.to_thread.run_sync(out.read_bytes)
        logprobs, at = [], 0
        for example in body.examples:
            logprobs.append(numbers[at : at + 4 * example.length])
            at += 4 * example.length
        return LossReport(done.loss, tuple(logprobs))

    async def store_body(self, body: RequestBody) -> ListedBody:
        """Store a request body durably, so that other trainers can fetch it, and return its entry of a manifest."""
        data = codec.encode(body)
        async with self._bodies_lock:
            digest = await trio.to_thread.run_sync(self._peer.blobs.add_bytes, data)
            self._listed[digest] += 1
        return ListedBody(digest, len(data))

    async def delete_body(self, listed: ListedBody) -> None:
        """Delete a stored request body whose step is decided, unless another step lists it.

        Other peers have deleted it with the round.
        """
        async with self._bodies_lock:
            self._listed[listed.digest] -= 1
            if not self._listed[listed.digest]:
                del self._listed[listed.digest]
                await trio.to_thread.run_sync(self._peer.blobs.delete_blob, listed.digest)

    async def request_step(
        self, key: bytes, number: int, bodies: Sequence[ListedBody], tokens: int, optimizer: OptimizerStep
    ) -> None:
        """Request step `number`, the next one of a run. `wait_for_outcome` has its outcome."""
        if not 0 < len(bodies) <= BODIES_MAX:
            raise UserError(f"a step has 1 to {BODIES_MAX} requests with a gradient, not {len(bodies)}")
        if problem := optimizer.problem():
            raise UserError(problem)
        manifest = codec.encode(Manifest(tuple(bodies)))
        digest = await trio.to_thread.run_sync(self._peer.blobs.add_bytes, manifest)
        try:
            await self._peer.submit_transaction("client/step", RequestStep(key, StepBrief(number, digest, tokens, optimizer)))
        except UserError:
            # A gateway that was restarted may lack the block with its earlier request. The refusal's block is a later one.
            if not self.is_step_requested(key, number):
                raise

    def is_step_requested(self, key: bytes, number: int) -> bool:
        """Return whether the ledger has a request for step `number`."""
        run = self.find_run(key)
        return run.next_step > number or run.open_step is not None

    async def wait_for_outcome(self, key: bytes, number: int) -> StepOutcome:
        """Wait until step `number` is decided. Raises `UserError` if no trainer's update was accepted."""
        desk = self._peer.service_context("serve")
        while (run := self.find_run(key)).next_step <= number:
            await desk.wait_for_block_above(desk.height)
        outcome = run.last
        assert outcome is not None and outcome.step == number, "one step at a time is open"
        if not outcome.is_accepted:
            why = rejections_text(outcome.rejected, ClientObjective().reason_labels)
            raise UserError(f"step {number} failed, and the model is unchanged: no trainer's update was accepted ({why})")
        return outcome

    async def end_run(self, key: bytes) -> None:
        """End a run, unless it is over."""
        if not self._is_over(key):
            try:
                await self._peer.submit_transaction("client/end", EndRun(key))
            except UserError:
                # An end that the process before this one requested, or a quorum that cancelled the job, may be decided first.
                if not self._is_over(key):
                    raise

    def find_run(self, key: bytes) -> ClientRun:
        """Return the ledger's record of an unfinished run."""
        run = self._peer.state.module_state(ClientsState).runs.get(key)
        if run is None or run.is_over:
            raise UserError(f"run {key.hex()[:8]} is over")
        return run

    def _is_over(self, key: bytes) -> bool:
        run = self._peer.state.module_state(ClientsState).runs.get(key)
        return run is None or run.is_over

    def _job(self, key: bytes) -> tuple[Job, JobSpec]:
        self.find_run(key)
        job = self._peer.state.jobs.jobs[key]
        return job, JobSpec.decode(job.spec)

    def _worker(self) -> WorkerClient:
        if self._peer.worker_client is None:
            raise UserError("this peer has no worker, which a gateway needs: run it with --role full")
        return self._peer.worker_client


def make_run_spec(base: JobSpec, settings: AdapterSettings, seed: int) -> JobSpec:
    """Return the specification of a run that changes the model of a job."""
    return JobSpec(
        name=f"{base.name[:40]}-run",
        objective=ClientObjective.name,
        model=base.model,
        tokenizer=base.tokenizer,
        seed=seed,
        rounds=ROUNDS_MAX,
        local_steps=1,
        warmup_rounds=0,
        bits=16,
        feedback_decay=0.0,
        outer=OuterOptimizerKind.ADAMW,
        rule=AggregationRule.MEAN,
        byzantine_max=0,
        audit=AuditMode.FULL,
        proposal_seconds=PROPOSAL_SECONDS_MAX,
        objective_settings=codec.encode(settings),
    )
