"""The ledger's module of RLHF: tuning plans, attested preference sets, and the figures of each policy's last rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final

from curation.ledger.curation_module import runs_curation
from curation.ledger.curation_state import CurationState
from features.feature import EventLine
from features.peer_names import SHORT_ID_LENGTH
from ledger.audits.audit_state import AuditsState
from ledger.core.genesis import Genesis
from ledger.core.module import BlockContext, DecodedTransaction, Module, Refused, StateChange, StateReader
from ledger.jobs import (
    FINISHED_KEPT_MAX,
    QUEUE_MAX,
    RUNNING_MAX,
    ClosedRound,
    JobHalt,
    JobLastRound,
    JobLaunch,
    JobPhase,
    JobsModule,
    JobSpecRules,
    JobsState,
    add_stop_request,
    job_id,
)
from ledger.members import MembersState
from ledger.network_governance import NetworkState
from protocol import codec
from protocol.codec import Digest, Length
from protocol.errors import RemoteProtocolError
from protocol.identity import short_id
from protocol.messages import Proposal
from protocol.units import display_round_number
from rlhf.ledger import preference_set_attestation, tuning_plans
from rlhf.ledger.preference_set_attestation import AttestedPreferenceSet, AttestPreferenceSet, ClaimStatus
from rlhf.ledger.tuning_plans import CancelPlan, PausePlan, PlanPhase, ReportAccuracy, ResumePlan, StartPlan, TuningPlan
from rlhf.objectives import policy_monitors
from rlhf.objectives.policy_monitors import PolicyHistory, RoundMedians, round_medians
from rlhf.objectives.ppo import MODULE, PPO, PpoSettings, RolloutDeclaration, exceeds_kl_stop, nats_per_response
from training.api.job_notes import FAILURE_ALERT_HEIGHTS
from training.job_spec import AuditMode, JobSpec

# Largest number of preference sets in the state: SETS_KEPT_MAX unused sets, and one for each job and each running plan.
SETS_MAX: Final = (
    preference_set_attestation.SETS_KEPT_MAX + RUNNING_MAX + FINISHED_KEPT_MAX + QUEUE_MAX + tuning_plans.PLANS_RUNNING_MAX
)


@dataclass(frozen=True, slots=True)
class RlhfState:
    jobs: Annotated[dict[Digest, PolicyHistory], Length(0, RUNNING_MAX + FINISHED_KEPT_MAX)] = field(default_factory=dict)
    plans: Annotated[dict[Digest, TuningPlan], Length(0, tuning_plans.PLANS_RUNNING_MAX + tuning_plans.PLANS_KEPT_MAX)] = field(
        default_factory=dict
    )
    # decided preference sets, by digest of the manifest, which is a job's `data`
    sets: Annotated[dict[Digest, AttestedPreferenceSet], Length(0, SETS_MAX)] = field(default_factory=dict)

    def running_plans(self) -> dict[bytes, TuningPlan]:
        return {key: plan for key, plan in self.plans.items() if plan.phase is PlanPhase.RUNNING}


class RlhfModule(Module[RlhfState]):
    name = "rlhf"
    contents: ClassVar[Mapping[str, type]] = {
        "rlhf/start": StartPlan,
        "rlhf/attest-set": AttestPreferenceSet,
        "rlhf/report-accuracy": ReportAccuracy,
        "rlhf/pause": PausePlan,
        "rlhf/resume": ResumePlan,
        "rlhf/cancel": CancelPlan,
    }
    # Like the start of a job, the start of a plan reads all members that can train.
    costs: ClassVar[Mapping[str, int]] = {"rlhf/start": 64} | dict.fromkeys(
        ("rlhf/attest-set", "rlhf/report-accuracy", "rlhf/pause", "rlhf/resume", "rlhf/cancel"), 2
    )
    state_type = RlhfState

    def __init__(self, rules: JobSpecRules) -> None:
        self._rules, self._jobs = rules, JobsModule(rules)

    def genesis_state(self, genesis: Genesis) -> RlhfState:
        return RlhfState()

    def apply_transaction(
        self, state: RlhfState, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        members = view.module_state(MembersState)
        match said.content:
            case StartPlan() as begin:
                key = job_id(said.author, said.transaction)
                plan = tuning_plans.create_plan(self._rules, key, said.author, begin, view, context.height)
                mine = sum(members.current_key(other.author) == said.author for other in state.running_plans().values())
                if mine >= tuning_plans.PLANS_OF_MEMBER_MAX:
                    raise Refused(
                        f"a plan of {short_id(said.author)} is already running: `rlhf status` shows it, `rlhf cancel` ends it"
                    )
                if len(state.running_plans()) >= tuning_plans.PLANS_RUNNING_MAX:
                    raise Refused(f"{tuning_plans.PLANS_RUNNING_MAX} plans are running, the maximum: wait until one ends")
                first = plan.current
                # A refusal in `settle_block` is silent, so this trial start reports the reason to the author.
                self._jobs.start_job(view.module_state(JobsState), view, first.job, first.spec, said.author, context.height)
                return StateChange(replace(state, plans={**state.plans, key: plan}))
            case AttestPreferenceSet(key, found):
                running = state.running_plans().get(key)
                claim = preference_set_attestation.add_attestation(
                    running.claim if running else None, preference_set_attestation.current_voters(members), said.author, found
                )
                assert running is not None
                return StateChange(replace(state, plans={**state.plans, key: replace(running, claim=claim)}))
            case ReportAccuracy(key, accuracy):
                jobs, voters = view.module_state(JobsState), preference_set_attestation.current_voters(members)
                plan = tuning_plans.add_report(state.running_plans().get(key), jobs, voters, said.author, accuracy)
                return StateChange(replace(state, plans={**state.plans, key: plan}))
            case PausePlan(key) | ResumePlan(key):
                plan = _own(state, members, key, said.author)
                follow = tuning_plans.pause_plan if isinstance(said.content, PausePlan) else tuning_plans.resume_plan
                return StateChange(replace(state, plans={**state.plans, key: follow(plan, context.height)}))
            case CancelPlan(key):
                plan = _running(state, key)
                stops, is_over = add_stop_request(plan.author, plan.stop_requests, members, said.author)
                plan = replace(plan, stop_requests=stops, phase=PlanPhase.CANCELLED if is_over else plan.phase)
                facts = (JobHalt(plan.current.job, members.current_key(plan.author)),) if is_over else ()
                return StateChange(replace(state, plans={**state.plans, key: plan}), facts)
        raise AssertionError(said.content)

    def start_refusal(self, plan: TuningPlan, view: StateReader, height: int) -> str:
        """Return the reason why a block at this height would refuse the due job of a running plan.

        Empty: the block would start or queue the job, or no job of the plan is due.
        """
        wanted = tuning_plans.plan_requests(plan, view.module_state(MembersState).current_key(plan.author))
        try:
            for due in (fact for fact in wanted if isinstance(fact, JobLaunch)):
                self._jobs.start_job(view.module_state(JobsState), view, due.job, due.spec, due.author, height)
        except (Refused, RemoteProtocolError) as error:
            return str(error)
        return ""

    def settle_block(self, state: RlhfState, view: StateReader, context: BlockContext) -> StateChange:
        """Decide preference sets, advance plans, request the plans' due jobs, and retain the models that audits need."""
        jobs, members = view.module_state(JobsState), view.module_state(MembersState)
        voters = preference_set_attestation.current_voters(members)
        state = _decided(state, view, context.height) if runs_curation(view) else state
        facts: list[Any] = [*tuning_plans.models_needed_by_audits(self._rules, view.module_state(AuditsState).jobs, jobs)]
        moved = {key: tuning_plans.advance_stage(plan, jobs, voters, context.height) for key, plan in state.plans.items()}
        for key, plan in moved.items():
            author = members.current_key(plan.author)
            if plan.phase is PlanPhase.RUNNING and tuning_plans.has_pause_expired(plan, context.height):
                moved[key] = replace(plan, phase=PlanPhase.CANCELLED)
                facts.append(JobHalt(plan.current.job, author))
            elif plan.phase is PlanPhase.RUNNING and members.is_current_key(author):
                facts += tuning_plans.plan_requests(plan, author)
            elif plan.phase is PlanPhase.RUNNING:  # The author was expelled: later stages do not start, and a paused job ends.
                moved[key] = replace(plan, phase=PlanPhase.CANCELLED)
                facts += [JobHalt(plan.current.job, author)] * (plan.paused_at is not None)
        facts += [JobLastRound(job) for job, spec, found in self._closed(view, context) if _is_last(spec, found)]
        return StateChange(replace(state, plans=moved), tuple(facts))

    def end_block(self, state: RlhfState, view: StateReader, context: BlockContext) -> StateChange:
        kept = view.module_state(JobsState).jobs
        jobs = dict(state.jobs)
        for job, spec, found in self._closed(view, context):
            before = jobs.get(job)
            jobs[job] = (
                before.with_round(found, PPO.responses_per_round(spec, spec.decoded_settings))
                if before
                else PolicyHistory((found,))
            )
        followed = {
            key: tuning_plans.update_after_block(plan, view.module_state(JobsState), context.height)
            for key, plan in state.plans.items()
        }
        left = {job: found for job, found in jobs.items() if job in kept}
        return StateChange(replace(state, jobs=left, plans=tuning_plans.drop_oldest_plans(followed)))

    def follow_key_rotations(self, state: RlhfState, current: Callable[[bytes], bytes]) -> RlhfState:
        """Move attestations, reports and stop requests to the new keys of their voters."""
        moved = {key: _rekeyed(plan, current) for key, plan in state.plans.items()}
        return replace(state, plans=moved) if moved != state.plans else state

    def _closed(self, view: StateReader, context: BlockContext) -> Iterator[tuple[bytes, JobSpec, RoundMedians]]:
        """Yield (job, specification, figures) of each policy whose round closes in this block with an accepted proposal."""
        known = view.module_state(JobsState).jobs
        for closed in context.facts_of(ClosedRound):
            job = known.get(closed.job)
            if job is not None and closed.proposals and self._rules.terms_of_spec(job.spec).objective == PPO.name:
                # A quorum accepted these proposals, so honest voters have decoded them.
                bodies = [codec.decode_message(signed.body, (Proposal,)) for signed in closed.proposals]
                said = [codec.decode(RolloutDeclaration, body.declaration) for body in bodies]
                yield closed.job, JobSpec.decode(job.spec), round_medians(closed.round, said)


def _rekeyed(plan: TuningPlan, current: Callable[[bytes], bytes]) -> TuningPlan:
    said = {} if plan.claim is None else {current(voter): found for voter, found in plan.claim.attestations.items()}
    claim = None if plan.claim is None else replace(plan.claim, attestations=said)
    reports = {current(voter): found for voter, found in plan.reports.items()}
    return replace(plan, claim=claim, stop_requests=tuple(sorted(map(current, plan.stop_requests))), reports=reports)


def _decided(state: RlhfState, view: StateReader, height: int) -> RlhfState:
    """Tally the voters' attestations: record decided sets, and cancel plans with refused sets."""
    voters, curation = (
        preference_set_attestation.current_voters(view.module_state(MembersState)),
        view.module_state(CurationState),
    )
    after, known = dict(state.plans), dict(state.sets)
    for key, plan in state.running_plans().items():
        if plan.claim is None or plan.claim.is_decided:
            continue
        claim, heard = preference_set_attestation.tally_claim(plan.claim, voters, curation)
        if heard is ClaimStatus.DECIDED:
            known[claim.set] = AttestedPreferenceSet(claim.source, height, claim.redactions_seen)
        after[key] = replace(plan, claim=claim, phase=PlanPhase.CANCELLED if heard is ClaimStatus.REFUSED else plan.phase)
    return replace(
        state,
        plans=after,
        sets=preference_set_attestation.update_attested_sets(
            known, curation, _named(view.module_state(JobsState)) | _claimed(state)
        ),
    )


def _named(jobs: JobsState) -> set[bytes]:
    """Return the digests of the data of all known jobs, including finished jobs."""
    specs = [job.spec for job in jobs.jobs.values()] + [waiting.spec for waiting in jobs.queue]
    return {spec.data for spec in map(JobSpec.decode, specs) if spec.data is not None}


def _claimed(state: RlhfState) -> set[bytes]:
    return {plan.claim.set for plan in state.running_plans().values() if plan.claim is not None}


def preference_set_origin(view: StateReader, data: bytes) -> str:
    """Return a text for people about the origin of a preference set."""
    found = view.module_state(RlhfState).sets.get(data)
    if found is None:
        return "not decided by annotators"
    return f"decided by annotators (project {found.source.project.hex()[:16]}, height {found.source.height})"


def _running(state: RlhfState, key: bytes) -> TuningPlan:
    if key not in state.running_plans():
        raise Refused("no such plan is running")
    return state.plans[key]


def _own(state: RlhfState, members: MembersState, key: bytes, author: bytes) -> TuningPlan:
    """Return the running plan `key` for a transaction of its author. Raises `Refused` if another member sent the transaction."""
    plan = _running(state, key)
    if members.current_key(plan.author) != author:
        raise Refused("only the author may do this: a quorum of voters can cancel the plan with `rlhf cancel JOB`")
    return plan


def _is_last(spec: JobSpec, found: RoundMedians) -> bool:
    """Return True if this round is the job's last one: the median distance from the reference reaches `kl_stop`.

    With sampled audits, false figures can be accepted. They cannot determine the median of more than 2 · `byzantine_max`
    proposals, so a median of fewer proposals is ignored.
    """
    own: PpoSettings = spec.decoded_settings
    is_theirs = spec.audit is AuditMode.SAMPLED and found.accepted <= 2 * spec.byzantine_max
    return not is_theirs and exceeds_kl_stop(nats_per_response(found.k1, PPO.responses_per_round(spec, own)), own.kl_stop)


def outdated_sets(state: RlhfState) -> set[bytes]:
    """Return the digests of outdated preference sets: sets with a redacted pair, and undecided sets of plans that ended."""
    claims = [plan.claim for plan in state.plans.values() if plan.claim is not None and plan.phase is not PlanPhase.RUNNING]
    refused = {claim.set for claim in claims if not claim.is_decided} - state.sets.keys()
    return refused | {key for key, found in state.sets.items() if found.redacted}


def sets_in_use(view: StateReader) -> set[bytes]:
    """Return the digests of the preference sets of unfinished jobs, audited jobs, their reward models, and running plans."""
    state, jobs, audited = view.module_state(RlhfState), view.module_state(JobsState), view.module_state(AuditsState).jobs
    live = [job.spec for key, job in jobs.jobs.items() if job.phase is not JobPhase.FINISHED or key in audited]
    live += [waiting.spec for waiting in jobs.queue]
    named = {plan.stages[0].job for plan in state.running_plans().values()}
    named |= {
        read.job for spec in map(JobSpec.decode, live) if (read := spec.resolved_objective.required_model(spec)) is not None
    }
    live += [jobs.jobs[key].spec for key in sorted(named) if key in jobs.jobs]
    return _claimed(state) | {spec.data for spec in map(JobSpec.decode, live) if spec.data is not None}


def is_exported(view: StateReader, data: bytes) -> bool:
    """Return True unless a text of the preference set is redacted.

    Exports of jobs include the set, so that draws can be traced.
    """
    found = view.module_state(RlhfState).sets.get(data)
    return found is None or not found.redacted


def policy_event_lines(before: StateReader, after: StateReader) -> Iterator[EventLine]:
    """Yield event lines: the figures of each closed round of a policy, and once per job the warning of lost diversity."""
    if not all(state.module_state(NetworkState).module_version(MODULE) for state in (before, after)):
        return
    old, jobs = before.module_state(RlhfState).jobs, after.module_state(JobsState).jobs
    for key, course in after.module_state(RlhfState).jobs.items():
        known = old.get(key)
        if known == course:
            continue
        spec, newest = jobs[key].spec, course.rounds[-1]
        yield EventLine(
            "figures",
            (
                f"round {display_round_number(newest.round)} of job {jobs[key].name}: "
                f"{policy_monitors.metrics_view(key, spec, newest).summary_line}"
            ),
            key,
        )
        if course.warned is not None and (known is None or known.warned is None):
            yield EventLine("warning", policy_monitors.diversity_warning(course, spec), key)


def find_failed_plans(view: StateReader, height: int) -> Iterator[str]:
    """Yield a text about each plan that failed recently because of its reward model's accuracy."""
    known = view.module_state(RlhfState).plans if view.module_state(NetworkState).module_version(MODULE) else {}
    for plan in known.values():
        failure = plan.failure
        if failure is not None and failure.accuracy is not None and height - failure.height < FAILURE_ALERT_HEIGHTS:
            yield f"plan of job {plan.current.job.hex()[:SHORT_ID_LENGTH]}: {tuning_plans.failure_text(plan)}"
