"""The runs of a gateway: it opens them, computes the losses of requests, and takes steps for its clients.

All methods of `ClientRuns` raise `UserError` for a fault of the client, with the value, and `WorkerFailed` for one of the worker.
They wait without a timeout until the network has decided their transactions. So a refusal is final, and a network without a
quorum delays requests, and fails none.
"""

from __future__ import annotations

import itertools
import logging
import math
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from clients.gateway.threads import decode_in_thread, run_in_thread
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
from clients.records import (
    BODIES_MAX,
    BODY_BYTES_MAX,
    AdapterSettings,
    ListedBody,
    Manifest,
    OptimizerStep,
    RequestBody,
    StepBrief,
)
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
        # Number of undecided steps that need a blob, by its digest: several models may compute the same request.
        self._served = Counter[bytes]()
        self._blobs_lock = trio.Lock()

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
        return await self._open(spec)

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
        return await self._open(replace(spec, objective_settings=codec.encode(settings)))

    async def _open(self, spec: JobSpec) -> bytes:
        transaction = await self._peer.submit_transaction("client/open", OpenRun(spec.validated().encode()), math.inf)
        key = job_id(self._peer.me, transaction)
        if key not in self._peer.state.jobs.jobs:
            raise UserError("the network refused the run: it has as many runs as are allowed, or cannot train its base now")
        return key

    @property
    def time_ms(self) -> int:
        """Time of this machine or of the last block in milliseconds, whichever is later. An idle network decides no blocks."""
        return max(time.time_ns() // 1_000_000, self._peer.state.time_ms)

    def is_present_model(self, model: ModelReference, key: bytes) -> bool:
        """Return whether a run has this model now."""
        job, _ = self._job(key)
        return model == ModelReference(key, job.round, job.model_root)

    def model_bytes(self, key: bytes) -> int:
        """Return the bytes of a saved model of a run."""
        return self._job(key)[1].model_bytes

    async def save_model(self, key: bytes, name: str, expires_ms: int) -> ModelReference:
        """Let every peer keep the present model of a run until `expires_ms` (0: for ever), and return a reference to it."""
        job, _ = self._job(key)
        await self._peer.submit_transaction("client/save", SaveModel(key, name, expires_ms), math.inf)
        return ModelReference(key, job.round, job.model_root)

    async def set_expiry(self, key: bytes, name: str, expires_ms: int) -> bool:
        """Set when a saved model expires. A time in the past deletes it. Return False if it has expired already."""
        try:
            await self._peer.submit_transaction("client/expire", SetExpiry(key, name, expires_ms), math.inf)
        except UserError:
            run = self._peer.state.module_state(ClientsState).runs.get(key)
            if run is not None and name in run.checkpoints:
                raise
            return False
        return True

    async def compute_losses(self, key: bytes, data: bytes, *, backward: bool) -> LossReport:
        """Compute an encoded request body on the present model of a run.

        With `backward`, the worker keeps its gradient for the next step.
        """
        job, spec = self._job(key)
        context, worker = self._peer.make_round_context(key, job.round, job), self._worker()
        lengths = await decode_in_thread(_example_lengths, data, spec)
        with tempfile.TemporaryDirectory(dir=worker.text_folder) as folder:
            file, out = Path(folder) / "body", Path(folder) / "logprobs"
            await run_in_thread(file.write_bytes, data)
            request = PassRequest(key, job.round, str(context.model_directory), str(file), str(out), backward)
            done = await worker.ask_worker(context, request)
            numbers = await run_in_thread(out.read_bytes)
        ends = [4 * end for end in itertools.accumulate(lengths, initial=0)]
        return LossReport(done.loss, tuple(numbers[start:end] for start, end in itertools.pairwise(ends)))

    async def wait_for_turn(self, key: bytes) -> int:
        """Wait until no step of a run is open, and return the number of its next one."""
        while (run := self.find_run(key)).open_step is not None:
            await self._wait_for_block()
        return run.next_step

    async def take_step(
        self, key: bytes, number: int, bodies: Sequence[Callable[[], bytes]], optimizer: OptimizerStep
    ) -> StepOutcome:
        """Take step `number` of a run with the gradients of encoded request bodies, which are read one after the other.

        The step is requested once, also by a gateway that is restarted meanwhile. Raises `UserError` if no trainer's update was
        accepted.
        """
        if not 0 < len(bodies) <= BODIES_MAX:
            raise UserError(f"a step has 1 to {BODIES_MAX} requests with a gradient, not {len(bodies)}")
        if problem := optimizer.problem():
            raise UserError(problem)
        async with AsyncExitStack() as served:
            listed, tokens = list[ListedBody](), 0
            for read in bodies:
                data = await run_in_thread(read)
                listed.append(ListedBody(await served.enter_async_context(self._serving(data)), len(data)))
                tokens += await decode_in_thread(_count_tokens, data)
            manifest = await served.enter_async_context(self._serving(codec.encode(Manifest(tuple(listed)))))
            await self._request_step(key, StepBrief(number, manifest, tokens, optimizer))
            while (run := self.find_run(key)).next_step <= number:
                await self._wait_for_block()
        outcome = run.last
        assert outcome is not None and outcome.step == number, "one step at a time is open"
        if not outcome.is_accepted:
            why = rejections_text(outcome.rejected, ClientObjective().reason_labels)
            raise UserError(f"step {number} failed, and the model is unchanged: no trainer's update was accepted ({why})")
        return outcome

    async def _request_step(self, key: bytes, brief: StepBrief) -> None:
        """Request a step, unless this gateway requested it before it was restarted."""
        while self.find_run(key).next_step < brief.step:  # A restarted peer lacks the last blocks.
            await self._wait_for_block()
        if self._is_requested(key, brief):
            return
        if self.find_run(key).open_step is not None:
            raise UserError(f"step {brief.step} is open with other data: call optim_step again")
        try:
            await self._peer.submit_transaction("client/step", RequestStep(key, brief), math.inf)
        except UserError:
            # The request from before the restart was decided while this one waited. The ledger refuses the second one.
            if not self._is_requested(key, brief):
                raise

    def _is_requested(self, key: bytes, brief: StepBrief) -> bool:
        run = self.find_run(key)
        return run.next_step > brief.step or (run.open_step is not None and run.open_step.brief == brief)

    async def _wait_for_block(self) -> None:
        desk = self._peer.service_context("serve")
        await desk.wait_for_block_above(desk.height)

    def _store_blob(self, data: bytes) -> bytes:
        digest = self._peer.blobs.add_bytes(data)
        # A step of another gateway with the same request may have made it temporary.
        self._peer.blobs.keep_temporary(digest)
        return digest

    @asynccontextmanager
    async def _serving(self, data: bytes) -> AsyncIterator[bytes]:
        """Serve a blob to the other trainers and the re-executors of a step, and yield its digest.

        Other peers delete it with the round, and so does this one if it needs the blob for a step of another gateway.
        """
        async with self._blobs_lock:
            digest = await run_in_thread(self._store_blob, data)
            self._served[digest] += 1
        try:
            yield digest
        finally:
            self._served[digest] -= 1
            if not self._served[digest]:
                del self._served[digest]
                async with self._blobs_lock:
                    if digest not in self._served:
                        await run_in_thread(self._peer.blobs.drop_blobs, (digest,))

    async def end_unused_runs(self, used: Set[bytes]) -> None:
        """End this gateway's unfinished runs except those in `used`."""
        runs = self._peer.state.module_state(ClientsState).runs
        for key in [key for key, run in runs.items() if run.owner == self._peer.me and not run.is_over and key not in used]:
            try:
                await self.end_run(key)
            except UserError as error:
                log.warning("run %s, which no model has, is not ended: %s", key.hex()[:8], error)

    async def end_run(self, key: bytes) -> None:
        """End a run, unless it is over."""
        if self.is_unfinished(key):
            try:
                await self._peer.submit_transaction("client/end", EndRun(key), math.inf)
            except UserError:
                # An end that the process before this one requested, or a quorum that cancelled the job, may be decided first.
                if self.is_unfinished(key):
                    raise

    def find_run(self, key: bytes) -> ClientRun:
        """Return the ledger's record of an unfinished run."""
        if not self.is_unfinished(key):
            raise UserError(f"run {key.hex()[:8]} is over")
        return self._peer.state.module_state(ClientsState).runs[key]

    def is_unfinished(self, key: bytes) -> bool:
        run = self._peer.state.module_state(ClientsState).runs.get(key)
        return run is not None and not run.is_over

    def _job(self, key: bytes) -> tuple[Job, JobSpec]:
        self.find_run(key)
        job = self._peer.state.jobs.jobs[key]
        return job, JobSpec.decode(job.spec)

    def _worker(self) -> WorkerClient:
        if self._peer.worker_client is None:
            raise UserError("this peer has no worker, which a gateway needs: run it with --role full")
        return self._peer.worker_client


def _example_lengths(data: bytes, spec: JobSpec) -> list[int]:
    """Return the number of tokens of each example. Raises `UserError` if a model of this job cannot compute the request."""
    body = codec.decode(RequestBody, data, BODY_BYTES_MAX)
    if problem := body.problem(spec.model.context, spec.model.vocabulary):
        raise UserError(problem)
    return [example.length for example in body.examples]


def _count_tokens(data: bytes) -> int:
    return codec.decode(RequestBody, data, BODY_BYTES_MAX).tokens


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
