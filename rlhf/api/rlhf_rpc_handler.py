"""Handler of the RPC calls of RLHF: starts and controls plans, and reports their progress and results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import trio

from consensus.voter_set import VoterSet
from curation.ledger.curation_module import runs_curation
from curation.ledger.curation_state import CurationState
from curation.service.curation_rpc_handler import resolve_project
from curation.tasks.answers import QuestionKind
from features.text_tables import pluralize
from ledger.jobs import Job, JobPhase, QueuedJob, job_id
from ledger.ledger_state import LedgerState
from ledger.network_governance import NetworkState
from protocol.errors import StorageError, UserError
from protocol.sampling import SamplingOptions
from rlhf.api.pair_trace import jobs_with_preferences, trace_pair
from rlhf.api.supervised_jobs import TruncationSide
from rlhf.api.tuning_plan_builder import BuiltPlan, TuningPlanBuilder, pack_word_file
from rlhf.data.preference_sets import PreferencePair
from rlhf.ledger import tuning_plans
from rlhf.ledger.preference_set_attestation import NO_PROJECT, PreferenceSetSource
from rlhf.ledger.rlhf_module import RlhfModule, RlhfState
from rlhf.objectives import policy_monitors
from rlhf.objectives.policy_monitors import PolicyHistory
from rlhf.objectives.ppo import MODULE, PpoSettings, current_beta
from rlhf.objectives.supervised_objectives import DPO, INSTRUCT, NATS, PAIR_OBJECTIVES
from rlhf.pair_accuracy import ACCURACY, CALIBRATION, CONTRADICTORY, IDENTICAL, PAIRS, WORD_COUNT, PairAccuracy
from rlhf.preference_derivation import derive_pairs
from rlhf.rpc import (
    FINISHED,
    MEASURING,
    CompareView,
    PairTraceView,
    PolicyMetricsView,
    PreferencesView,
    RlhfRpc,
    RlhfView,
    StageView,
)
from training import worker_protocol
from training.api.job_builder import BLOB_FETCH_SECONDS_MAX, fetch_job_blob, parse_field
from training.api.job_notes import no_progress_text, preparation_notes
from training.job_spec import JobSpec
from training.replicated.replicated_model import ReplicatedModel
from training.round_context import EVALUATION_SECONDS, TrainingPeer
from training.worker_protocol import WorkerFailed

EVALUATION_FAILED = "evaluation_failed"  # name of the figure that marks a model as not measurable by the worker
EVALUATION_ENDS = (EVALUATION_SECONDS, EVALUATION_FAILED)  # one of these figures is stored at the end of a measurement
PREFERENCE_SET_STATISTICS = (WORD_COUNT, IDENTICAL, CONTRADICTORY)
MEASURED_OBJECTIVES = (*PAIR_OBJECTIVES, INSTRUCT.name)  # objectives whose models a peer measures after the last round


@dataclass(frozen=True)
class RlhfRpcHandler(RlhfRpc):
    peer: TrainingPeer

    async def start_rlhf_training(
        self,
        base: str,
        reward: str = "",
        ppo_iterations: int = 10,
        name: str = "",
        overrides: dict[str, str] | None = None,
        preferences: str = "",
        reward_epochs: int = 3,
        project: str = "",
        blocklist: str = "",
        algorithm: str = "",
        skip_bad: bool = False,
        truncate: str = "",
        ignore_accuracy: bool = False,
    ) -> str:
        self.peer.require_member()
        if not self._is_run():
            raise UserError(f"this network does not run the module {MODULE}: a quorum of voters must run `upgrade {MODULE} 1`")
        if [reward, preferences, project].count("") != 2:
            raise UserError("give one source of rewards: --reward rule:NAME, --project PROJECT or --preferences FILE")
        said, is_dpo = dict(overrides or {}), algorithm == DPO.name
        if is_dpo and (reward or blocklist):
            raise UserError(
                f"dpo takes no {'--reward' if reward else '--blocklist'}: it learns from pairs and generates no responses"
            )
        if ignore_accuracy and (is_dpo or reward or not ppo_iterations):
            raise UserError("--ignore-accuracy needs a policy that is tuned by a reward model: leave it out")
        if algorithm and not is_dpo:
            said["algorithm"] = algorithm
        listed = await trio.to_thread.run_sync(pack_word_file, blocklist) if blocklist else b""
        cut = parse_field(TruncationSide, "--truncate", truncate)
        if (skip_bad or cut) and not preferences:
            raise UserError("--skip-bad and --truncate apply to a file: use them with --preferences FILE")
        tuning = TuningPlanBuilder(
            self.peer, base, name, ppo_iterations, reward_epochs, said, listed, skip_bad, cut, ignore_accuracy
        )
        if reward:
            return await self._begun(tuning.build_rule_plan, reward)
        if not is_dpo:
            tuning.check_preferences()
        source, found = await self._decided(project) if project else (None, preferences)
        return await self._begun(tuning.build_dpo_plan if is_dpo else tuning.build_reward_model_plan, found, source)

    async def _begun(self, make: Callable[..., BuiltPlan], *how: Any) -> str:
        """Build a plan in a thread, submit it, and return the id of its first job once it is decided."""
        begin, odd = await trio.to_thread.run_sync(make, *how)
        transaction = await self.peer.submit_transaction("rlhf/start", begin)
        job = tuning_plans.stage_job_id(job_id(self.peer.me, transaction), 0)
        self.peer.store.queue_measurements(job, 0, odd)
        return job.hex()

    async def cancel_rlhf_training(self, job: str = "") -> str:
        key, plan = self._plan_of(job) if job else self._own_plan()
        await self.peer.submit_transaction("rlhf/cancel", tuning_plans.CancelPlan(key))
        after = self.peer.state.module_state(RlhfState).plans.get(key)
        if after is None or after.phase is not tuning_plans.PlanPhase.RUNNING:
            return f"the plan is cancelled in the stage {plan.current.objective}"
        needed = VoterSet(self.peer.state.members.voters).quorum
        votes = f"{len(after.stop_requests)} of {needed} needed votes to cancel the plan"
        return f"{votes}; run this command at other voters, too"

    async def pause_rlhf_training(self) -> str:
        key, plan = self._own_plan()
        await self.peer.submit_transaction("rlhf/pause", tuning_plans.PausePlan(key))
        return f"the plan is paused: the open round of {plan.current.objective} is the last one until `rlhf resume`"

    async def resume_rlhf_training(self) -> str:
        key, plan = self._own_plan()
        await self.peer.submit_transaction("rlhf/resume", tuning_plans.ResumePlan(key))
        return f"the plan continues with {plan.current.objective}"

    def _running_plans(self) -> dict[bytes, tuning_plans.TuningPlan]:
        return self.peer.state.module_state(RlhfState).running_plans() if self._is_run() else {}

    def _own_plan(self) -> tuple[bytes, tuning_plans.TuningPlan]:
        """Return this member's running plan. Raises `UserError` if there is none."""
        members = self.peer.state.members
        for key, plan in self._running_plans().items():
            if members.current_key(plan.author) == self.peer.me:
                return key, plan
        raise UserError("this peer has no running plan: `cancel JOB` ends a job")

    def _plan_of(self, job: str) -> tuple[bytes, tuning_plans.TuningPlan]:
        """Return the running plan whose current job's id is or begins with `job`.

        Raises `UserError` unless exactly one plan has.
        """
        running = self._running_plans()
        found = [(key, plan) for key, plan in running.items() if plan.current.job.hex().startswith(job)]
        if len(found) != 1:
            there = ", ".join(plan.current.job.hex()[:8] for plan in running.values()) or "none"
            raise UserError(f"{job!r} matches {len(found) or 'no'} running plans (choices: {there})")
        return found[0]

    async def _decided(self, text: str) -> tuple[PreferenceSetSource, list[PreferencePair]]:
        """Return the pairs that people have decided in a project so far, with their source.

        Raises `UserError` if there are none.
        """
        state = self.peer.state
        if not runs_curation(state):
            raise UserError("this network does not run the module curation: a quorum of voters must run `upgrade curation 1`")
        curation = state.module_state(CurationState)
        project, row = resolve_project(text, curation)
        if row.spec.kind is not QuestionKind.PAIR:
            raise UserError(NO_PROJECT.format(f"--project {text!r}"))
        if project in curation.closing:
            raise UserError(f"--project {text!r} is being closed, which may change its labels: try again when it is closed")
        source = PreferenceSetSource(project, state.height)
        with trio.move_on_after(BLOB_FETCH_SECONDS_MAX):
            found = await derive_pairs(self.peer.service_context("sets"), source)
            if not found:
                raise UserError(f"--project {text!r}: it has no usable pair yet: none is decided, or all are redacted or bad")
            return source, found
        raise UserError(f"--project {text!r}: no connected peer has all tasks of {row.spec.name!r}")

    async def rlhf_status(self) -> RlhfView:
        known = self.peer.state.module_state(RlhfState).plans.values() if self._is_run() else ()
        plan = max(known, key=lambda plan: plan.start_height, default=None)
        planned = {stage.job for plan in known for stage in plan.stages}
        lone = [(key, job) for key, job in self._tuned() if key not in planned]
        last = lone[-1][1] if lone else None
        decided = 0 if last is None else last.started_height if isinstance(last, Job) else last.since
        if plan is not None and plan.start_height >= decided:
            state = "paused" if plan.phase is tuning_plans.PlanPhase.RUNNING and plan.paused_at is not None else plan.phase.value
            stages = [await self._measured(self._planned(plan, stage)) for stage in plan.stages]
            return RlhfView(MEASURING if state == FINISHED and stages[-1].state == MEASURING else state, tuple(stages))
        stages = [await self._measured(_stage(key, job)) for key, job in lone[-1:]]
        return RlhfView(stages[-1].state if stages else "none", tuple(stages))

    def _planned(self, plan: tuning_plans.TuningPlan, stage: tuning_plans.PlanStage) -> StageView:
        jobs = self.peer.state.jobs
        live = jobs.jobs.get(stage.job) or next((waiting for waiting in jobs.queue if waiting.job == stage.job), None)
        failed = tuning_plans.failure_text(plan) if stage == plan.current else ""
        if live is not None:
            view = _stage(stage.job, live)
        elif stage.root is not None:  # the ledger has dropped the job
            view = StageView(stage.objective, stage.job.hex(), FINISHED, stage.rounds, stage.rounds, stage.root.hex())
        else:
            state = "failed" if failed else "waiting" if stage.spec else "forgotten"
            refusal = self._why_waiting(plan, stage) if plan.phase is tuning_plans.PlanPhase.RUNNING else ""
            view = StageView(stage.objective, stage.job.hex(), state, 0, stage.rounds, "", start_refusal=refusal)
        if stage.accuracy is not None:  # The voters have decided an accuracy.
            view = _with_accuracy(view, stage.accuracy, stage.rounds)
        return replace(view, failure=failed)

    def _why_waiting(self, plan: tuning_plans.TuningPlan, stage: tuning_plans.PlanStage) -> str:
        """Return why a due stage has not started. Empty: it is not due."""
        state = self.peer.state
        if stage == plan.current:
            return RlhfModule(self.peer.models).start_refusal(plan, state, state.height + 1)
        if not tuning_plans.awaits_reports(plan, state.jobs):
            return ""
        needed = VoterSet(state.members.voters).faults_tolerated + 1
        better = sum(found.is_better_than_chance for found in plan.reports.values())
        measured = f"{pluralize(len(plan.reports), 'report')} of voters"
        return f"{better} of {measured} found it better than chance, {needed} needed"

    async def _measured(self, stage: StageView) -> StageView:
        """Return the stage with figures of the newest model that this peer has measured. Add the origin of its preferences."""
        found = await trio.to_thread.run_sync(self.peer.store.measurements, bytes.fromhex(stage.job))
        told = add_metrics(stage, found)
        is_known = stage.state == FINISHED and bytes.fromhex(stage.job) in self.peer.state.jobs.jobs
        if is_known and self._measures(stage.objective) and found.get(stage.round, {}).keys().isdisjoint(EVALUATION_ENDS):
            told = replace(told, state=MEASURING)
        if stage.objective not in PAIR_OBJECTIVES:
            return told
        return replace(told, preferences=describe_preference_source(self.peer.state, bytes.fromhex(stage.job)))

    def _measures(self, objective: str) -> bool:
        """Return True if this peer measures the last models of jobs with this objective without a request."""
        has_worker = self.peer.worker_client is not None
        return has_worker and self.peer.evaluates_models and objective in MEASURED_OBJECTIVES

    async def measure_last_model(self, job: str, asked: bool) -> StageView:
        peer, key = self.peer, bytes.fromhex(job)
        worker, known = peer.worker_client, peer.state.jobs.jobs.get(key)
        if worker is None:
            raise UserError("this peer has no worker to measure models: use a peer with --role rlhf or full")
        if known is None or known.phase is not JobPhase.FINISHED:
            raise UserError(f"job {job[:8]} is not a finished job")
        place = key, known.round
        found = await trio.to_thread.run_sync(peer.store.measurements, key)
        stage = _stage(key, known)
        figures = found.get(known.round, {})
        # A voter reports a measurement that it requested, so a failed one is repeated.
        is_due = (
            EVALUATION_SECONDS not in figures
            if asked
            else self._measures(stage.objective) and figures.keys().isdisjoint(EVALUATION_ENDS)
        )
        if is_due:
            problem = "this peer does not have it"
            if peer.models.round_directory(*place).exists():
                try:
                    await worker.evaluate_model(peer.make_round_context(*place, known))
                except WorkerFailed as error:
                    problem = str(error)
            found = await trio.to_thread.run_sync(peer.store.measurements, key)
            if EVALUATION_SECONDS not in found.get(known.round, {}):
                await trio.to_thread.run_sync(peer.store.save_measurements, *place, {EVALUATION_FAILED: 1.0})
                raise UserError(f"the last model of job {job[:8]} cannot be measured: {problem}")
        return add_metrics(stage, found)

    async def policy_metrics(self) -> tuple[PolicyMetricsView, ...]:
        if not self._is_run():
            return ()
        known = self.peer.state.module_state(RlhfState).jobs
        found = [(key, job) for key, job in self._tuned()[-1:] if isinstance(job, Job) and key in known]
        return tuple([await trio.to_thread.run_sync(self._figures, key, job, known[key]) for key, job in found])

    def _figures(self, key: bytes, job: Job, course: PolicyHistory) -> PolicyMetricsView:
        spec, found = JobSpec.decode(job.spec), policy_monitors.metrics_view(key, job.spec, course.rounds[-1])
        own: PpoSettings = spec.decoded_settings
        beta = None
        if job.phase is not JobPhase.FINISHED:
            with contextlib.suppress(StorageError):  # a new round has replaced the model meanwhile
                beta = current_beta(
                    ReplicatedModel.open(self.peer.models.round_directory(key, job.round)).state.steering, own.beta
                )
        stop = own.kl_stop if job.rounds < spec.rounds else None
        return replace(found, beta=beta, kl_stop=stop, warning=policy_monitors.diversity_warning(course, job.spec))

    def _is_run(self) -> bool:
        return self.peer.state.module_state(NetworkState).module_version(MODULE) > 0

    def _tuned(self) -> list[tuple[bytes, Job | QueuedJob]]:
        """Return jobs with objectives of this feature, the newest last."""
        jobs = self.peer.state.jobs
        started = sorted(jobs.jobs.items(), key=lambda item: item[1].started_height)
        found: list[tuple[bytes, Job | QueuedJob]] = [*started, *((waiting.job, waiting) for waiting in jobs.queue)]
        return [(key, job) for key, job in found if JobSpec.decode(job.spec).resolved_objective.module == MODULE]

    async def trace_pair(self, pair: str) -> PairTraceView:
        def trace() -> PairTraceView:
            jobs = list(jobs_with_preferences(state.jobs, self.peer.store))
            sets = state.module_state(RlhfState).sets
            return trace_pair(jobs, sets, partial(fetch_job_blob, self.peer, what="the set"), pair)

        if not self._is_run():
            raise UserError("this network has no tuning plans, so there are no pairs")
        state = self.peer.state
        return await trio.to_thread.run_sync(trace)

    async def compare_policy(self, prompt: str, tokens: int, temperature: float, seed: int) -> CompareView:
        worker = self.peer.worker_client
        if worker is None:
            raise UserError("this peer has no worker to generate texts: use a peer with --role rlhf or full")
        begun = self._tuned()
        tuned = [
            (key, job) for key, job in begun if isinstance(job, Job) and JobSpec.decode(job.spec).resolved_objective.makes_text
        ]
        if not tuned:
            way = "`rlhf status` shows the progress of the plan" if begun else "start with `rlhf start`"
            raise UserError(f"no model has been tuned yet: {way}")
        key, job = tuned[-1]
        opened = self.peer.make_round_context(key, job.round, job)
        how = SamplingOptions(max_tokens=tokens, temperature=temperature, seed=seed).validated()
        ask = partial(worker.ask_worker, opened)
        told: dict[str, str] = {}
        withheld: list[str] = []
        for name, directory in (("policy", str(self.peer.models.round_directory(key, job.round))), ("reference", None)):
            try:
                done = await worker_protocol.generate_text(
                    ask,
                    worker_protocol.GenerateRequest(
                        key, directory, prompt, how, opened.spec.resolved_objective.stop_token(opened.spec)
                    ),
                )
            except WorkerFailed:
                if opened.base_directory is None or opened.base_directory.exists():
                    raise
                base = opened.base_directory.parent.name[:8]
                raise UserError(
                    f"the reference model of job {base} is deleted: peers keep it only until the tuning has finished"
                ) from None
            told[name] = done.text
            withheld += [name] * done.is_withheld
        return CompareView(key.hex(), job.round, **told, withheld=tuple(withheld))


def _stage(key: bytes, job: Job | QueuedJob) -> StageView:
    spec = JobSpec.decode(job.spec)
    if isinstance(job, QueuedJob):
        return StageView(spec.objective, key.hex(), "waiting", 0, spec.rounds, "", notes=preparation_notes(spec))
    return StageView(
        objective=spec.objective,
        job=key.hex(),
        state="failed" if job.failed_rounds else job.phase.value,
        round=job.rounds_in_model,
        rounds=spec.rounds,
        model_root=job.model_root.hex(),
        notes=preparation_notes(spec),
        failure=no_progress_text(job.failed_rounds, job.rejections, spec.resolved_objective.reason_labels)
        if job.failed_rounds
        else "",
    )


def _with_accuracy(view: StageView, found: PairAccuracy, rounds: int) -> StageView:
    return replace(
        view,
        measured_rounds=rounds,
        held_out_accuracy=found.share,
        held_out_pairs=found.pairs,
        held_out_interval=found.interval,
    )


def add_metrics(stage: StageView, found: Mapping[int, Mapping[str, float]]) -> StageView:
    """Return the stage with stored figures: figures of the set from any round, and of the model from the last measured round."""
    of_set = {
        name: value
        for _, figures in sorted(found.items())
        for name, value in figures.items()
        if name in PREFERENCE_SET_STATISTICS
    }
    words, *odd = (of_set.get(name) for name in PREFERENCE_SET_STATISTICS)
    identical, contradictory = (None if count is None else int(count) for count in odd)
    stage = replace(stage, word_count_accuracy=words, identical_pairs=identical, contradictory_pairs=contradictory)
    measured = [number for number, figures in found.items() if not {ACCURACY, CALIBRATION, NATS}.isdisjoint(figures)]
    if not measured:
        return stage
    figures = found[max(measured)]
    stage = replace(stage, measured_rounds=max(measured), held_out_nats=figures.get(NATS))
    if ACCURACY not in figures:
        return stage
    accuracy = PairAccuracy.from_share(figures[ACCURACY], int(figures[PAIRS]))
    return replace(_with_accuracy(stage, accuracy, max(measured)), calibration_error=figures.get(CALIBRATION))


def describe_preference_source(state: LedgerState, job: bytes) -> PreferencesView | None:
    """Describe the origin of the preferences of a started or planned job. None: the ledger has dropped the job and its plan."""
    known = state.module_state(RlhfState)
    plan = next((plan for plan in known.plans.values() if plan.stages[0].job == job), None)
    lined: dict[bytes, Job | QueuedJob] = {**{waiting.job: waiting for waiting in state.jobs.queue}, **state.jobs.jobs}
    spec = lined[job].spec if job in lined else plan.stages[0].spec if plan else b""
    claim = plan.claim if plan else None
    data = claim.set if claim else JobSpec.decode(spec).data if spec else None
    if data is None:
        return None
    decided = known.sets.get(data)
    source = decided.source if decided else claim.source if claim else None
    if source is None:
        return PreferencesView(data.hex(), False)
    agree = sum(found == data for found in claim.attestations.values()) if claim else 0
    return PreferencesView(
        set=data.hex(),
        decided_by_annotators=decided is not None or (claim is not None and claim.is_decided),
        project=source.project.hex(),
        height=source.height,
        redacted=decided.redacted if decided else 0,
        attesting_voters=agree,
        dissenting_voters=len(claim.attestations) - agree if claim else 0,
    )
