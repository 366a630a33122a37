"""Plans in blocks: a policy begins automatically, and only with the reward model that the network has decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ledger import jobs
from ledger.audits import state_machine
from ledger.blocks.application import LedgerApplication
from ledger.core.genesis import TRAINER, Founder, Genesis
from ledger.core.module import BlockContext, Module, StateChange, StateReader
from ledger.jobs import NO_PROGRESS_ROUNDS, JobPhase, JobsState, ModelReference, StartJob, StopJob, job_id
from ledger.ledger_state import CurrentState, LedgerRules, core_modules, newest_module_versions
from protocol import codec
from protocol.identity import Signed, sign_message
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from rlhf.ledger import tuning_plans
from rlhf.ledger.rlhf_module import RlhfModule, RlhfState, find_failed_plans
from rlhf.ledger.tuning_plans import CancelPlan, ReportAccuracy, StartPlan, TuningPlan
from rlhf.objectives.ppo import MILLIONTHS, MODEL_REWARD, PpoSettings, RolloutDeclaration
from rlhf.objectives.supervised_objectives import MeanRewardSettings
from rlhf.pair_accuracy import PairAccuracy
from tests.ledger.world import BY_KEY, PEOPLE, World
from tests.sim.keys import FastSigner, FastVerifier
from training.api.job_notes import FAILURE_ALERT_HEIGHTS, find_failed_jobs, find_stalled_jobs
from training.job_spec import AuditMode, JobSpec
from training.model_store import JobModelStore
from training.transformer import ModelSpec

AUTHOR, OTHER = PEOPLE[:2]
NOVICE = PEOPLE[5]
TINY = ModelSpec(context=16, width=16, layers=1, hidden=16)
SAMPLES = RolloutDeclaration(bytes(32), 100, 0, 0, 0, 0, 0)
OWN = PpoSettings(reward=MODEL_REWARD, prompt_tokens=4, response_tokens=6, epochs=2)
BASE = JobSpec(name="base", model=TINY, data=bytes(32), rounds=1)
REWARD = replace(BASE, name="reward", objective="reward", rounds=2)
POLICY = replace(BASE, name="policy", objective="ppo", rounds=2, local_steps=4, objective_settings=codec.encode(OWN))


class Tuned(World):
    """Four founders who all train."""

    def __init__(self, folder: Path, kind: type[RlhfModule] = RlhfModule, modules: tuple[Module[Any], ...] = ()) -> None:
        super().__init__()
        self.samples = SAMPLES
        rules = JobModelStore(folder)
        known = (*core_modules(rules), *modules, kind(rules))
        founders = {person.public: Founder("founder", (TRAINER, "annotator", "rlhf")) for person in PEOPLE[:4]}
        self.genesis = Genesis("tuned", 1_000, bytes(16), founders, newest_module_versions(known))
        self.rules, self.chain = LedgerRules(self.genesis, FastVerifier(), known), self.genesis.chain_id
        self.ledger = LedgerApplication(
            self.rules, CurrentState(self.rules.genesis_state()), self.rules.genesis_state().state_root
        )
        self.base = self.start(AUTHOR, BASE.encode())
        self.decide(closings=(self.closing(self.base),))

    def proposal(self, key: bytes, trainer: bytes) -> Signed:
        said = codec.decode_message(super().proposal(key, trainer).body, (Proposal,))
        is_policy = JobSpec.decode(self.job(key).spec).objective == "ppo"
        return sign_message(
            BY_KEY[trainer], self.chain, replace(said, declaration=codec.encode(self.samples) if is_policy else b"")
        )

    def on(self, spec: JobSpec, **other: Any) -> bytes:
        job = self.job(self.base)
        return replace(spec, base=ModelReference(self.base, job.round, job.model_root), **other).encode()

    def begin(self, reward: JobSpec = REWARD, policy: JobSpec | None = POLICY, ignores_accuracy: bool = True) -> StartPlan:
        return StartPlan(self.on(reward), self.on(policy) if policy else b"", ignores_accuracy=ignores_accuracy)

    def planned(self, said: StartPlan | None = None) -> bytes:
        signed = self.tx(AUTHOR, "rlhf/start", said or self.begin())
        self.decide(signed)
        return job_id(AUTHOR.public, self.rules.open_transaction(signed))

    def plan(self, key: bytes) -> TuningPlan:
        return self.state.module_state(RlhfState).plans[key]

    def close(self, key: bytes, verdict: Verdict = Verdict.ACCEPT, blocks: int = 0) -> None:
        """Close all remaining rounds of a job, and decide `blocks` more blocks."""
        while self.job(key).phase is JobPhase.RUNNING:
            self.decide(closings=(self.closing(key, dict.fromkeys(self.job(key).trainers, verdict)),))
        for _ in range(blocks):
            self.decide()

    def report(self, key: bytes, person: FastSigner, halves: int, pairs: int) -> str | None:
        """Decide a voter's report on a plan's reward model, or return the reason for its refusal."""
        signed = self.tx(person, "rlhf/report-accuracy", ReportAccuracy(key, PairAccuracy(halves, pairs)))
        problem = self.problem(signed)
        if problem is None:
            self.decide(signed)
        return problem


@pytest.fixture
def world(tmp_path: Path) -> Tuned:
    return Tuned(tmp_path)


def tuned(world: Tuned) -> str:
    """Run a plan, and return for each block after its start the stages with a job, and the plan's status."""
    key, told = world.planned(), ""
    reward, policy = (tuning_plans.stage_job_id(key, stage) for stage in range(2))
    for _ in range(8):
        there = [name for name, job in (("r", reward), ("p", policy)) if job in world.state.jobs.jobs]
        told += "".join(there) + {"running": " ", "finished": ".", "cancelled": "!", "failed": "x"}[world.plan(key).phase]
        for name in world.state.jobs.running():
            if name == policy:
                own, done = JobSpec.decode(world.job(policy).spec).decoded_settings, world.job(reward)
                assert done.phase is JobPhase.FINISHED and own.reward_model == ModelReference(
                    reward, done.rounds, done.model_root
                )
        world.decide(closings=tuple(world.closing(key) for key in world.state.jobs.running()))
    return told


def test_a_policy_begins_by_itself_in_the_block_that_names_the_root_of_its_reward(world: Tuned) -> None:
    """Two rounds of the reward model; a block that closes none; two rounds of the policy."""
    assert tuned(world) == "r r r rp rp rp.rp.rp."


class Hasty(RlhfModule):
    """Plant: the plan continues in the block that closes the last round, before its model is computed."""

    def end_block(self, state: RlhfState, view: StateReader, context: BlockContext) -> StateChange:
        state = super().end_block(state, view, context).state
        jobs = view.module_state(JobsState)
        return StateChange(
            replace(
                state,
                plans={key: tuning_plans.advance_stage(plan, jobs, (), context.height + 1) for key, plan in state.plans.items()},
            )
        )


def test_a_plan_that_goes_on_before_the_root_of_its_reward_is_certified_is_found_out(tmp_path: Path) -> None:
    """The planted bug: jobs refuse the root of another round, and the policy never begins."""
    assert tuned(Tuned(tmp_path, Hasty)) == "r " * 8


def test_a_plan_without_a_policy_ends_with_its_reward_model(world: Tuned) -> None:
    key = world.planned(world.begin(policy=None))
    world.close(tuning_plans.stage_job_id(key, 0))
    assert world.plan(key).phase is tuning_plans.PlanPhase.FINISHED and world.plan(key).stage_index == 0


@pytest.mark.parametrize("nats, rounds", [(2.0, 1), (1.99, 2)])
def test_a_policy_ends_early_as_finished_when_it_is_as_far_as_it_may_go(world: Tuned, nats: float, rounds: int) -> None:
    """The plan ends as finished, too, and the job counts as complete: others may start from its model."""
    world.samples = replace(SAMPLES, k1=round(16 * nats * MILLIONTHS))
    key = world.planned(world.begin(policy=replace(POLICY, objective_settings=codec.encode(replace(OWN, kl_stop=2.0)))))
    world.close(tuning_plans.stage_job_id(key, 0), blocks=1)
    world.close(tuning_plans.stage_job_id(key, 1))
    job = world.job(tuning_plans.stage_job_id(key, 1))
    assert (job.phase, job.round, job.rounds) == (JobPhase.FINISHED, rounds, rounds)
    assert world.plan(key).phase is tuning_plans.PlanPhase.FINISHED


@pytest.mark.parametrize("audit, liars, rounds", [("sampled", 1, 1), ("sampled", 2, 2), ("full", 2, 1)])
def test_figures_that_may_be_the_liars_end_no_job(world: Tuned, audit: str, liars: int, rounds: int) -> None:
    """With sampled audits, two of four accepted proposals may be false, and one of the two is a middle value."""
    world.samples = replace(SAMPLES, k1=16 * 2 * MILLIONTHS)
    key = world.planned(
        world.begin(
            policy=replace(
                POLICY, objective_settings=codec.encode(replace(OWN, kl_stop=2.0)), audit=AuditMode(audit), byzantine_max=liars
            )
        )
    )
    world.close(tuning_plans.stage_job_id(key, 0), blocks=1)
    world.close(tuning_plans.stage_job_id(key, 1))
    assert world.job(tuning_plans.stage_job_id(key, 1)).rounds == rounds


@pytest.fixture
def key(world: Tuned) -> bytes:
    return world.planned()


def test_stages_wait_their_turn_behind_jobs_of_others(world: Tuned) -> None:
    other = world.start(OTHER, replace(BASE, name="other").encode())
    key = world.planned()
    reward, policy = (tuning_plans.stage_job_id(key, stage) for stage in range(2))
    assert [waiting.job for waiting in world.state.jobs.queue] == [reward] and not world.plan(key).current.spec
    world.close(other)
    third = world.tx(OTHER, "job/start", StartJob(replace(BASE, name="third").encode()))
    world.decide(third)
    world.close(reward, blocks=1)
    assert [waiting.job for waiting in world.state.jobs.queue] == [policy]
    world.close(job_id(OTHER.public, world.rules.open_transaction(third)))
    world.close(policy)
    assert world.plan(key).phase is tuning_plans.PlanPhase.FINISHED


@pytest.mark.parametrize("how", ["job/stop", "rlhf/cancel"])
@pytest.mark.parametrize("stage", [0, 1])
def test_whoever_ends_a_stage_ends_the_plan(world: Tuned, stage: int, how: str, key: bytes) -> None:
    if stage == 1:
        world.close(tuning_plans.stage_job_id(key, 0), blocks=1)
    job = tuning_plans.stage_job_id(key, stage)
    world.decide(world.tx(AUTHOR, how, StopJob(job) if how == "job/stop" else CancelPlan(key)))
    assert world.plan(key).phase is tuning_plans.PlanPhase.CANCELLED and world.job(job).phase is JobPhase.FINISHED
    world.decide()
    assert len(world.state.jobs.jobs) == 2 + stage and not world.state.jobs.queue


def test_a_plan_can_be_cancelled_in_the_block_before_its_second_stage(world: Tuned, key: bytes) -> None:
    world.close(tuning_plans.stage_job_id(key, 0))
    world.decide(world.tx(AUTHOR, "rlhf/cancel", CancelPlan(key)))
    world.decide()
    assert (
        world.plan(key).phase is tuning_plans.PlanPhase.CANCELLED
        and tuning_plans.stage_job_id(key, 1) not in world.state.jobs.jobs
    )


def test_what_a_plan_needs_is_not_forgotten_before_it_is_over(world: Tuned, monkeypatch: pytest.MonkeyPatch, key: bytes) -> None:
    monkeypatch.setattr(jobs, "TRAINED_KEPT_MAX", 0)
    reward = tuning_plans.stage_job_id(key, 0)
    world.close(reward)
    for _ in range(3):
        assert {world.base, reward} <= world.state.jobs.jobs.keys()
        world.decide()
    world.close(tuning_plans.stage_job_id(key, 1), blocks=1)
    assert not world.state.jobs.jobs


def test_what_audits_of_a_policy_read_is_not_forgotten_before_they_are_over(
    world: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without base and reward model no auditor could judge a dispute, and a lie in the last rounds would go unpunished."""
    for kept in ("TRAINED_KEPT_MAX", "UNTRAINED_KEPT_MAX"):
        monkeypatch.setattr(jobs, kept, 0)
    monkeypatch.setattr(state_machine, "POST_JOB_AUDIT_HEIGHTS", 3)
    key = world.planned(world.begin(policy=replace(POLICY, audit=AuditMode.SAMPLED)))
    reward, policy = (tuning_plans.stage_job_id(key, stage) for stage in range(2))
    world.close(reward, blocks=1)
    world.close(policy)
    for _ in range(3):
        assert world.job(policy).phase is JobPhase.SETTLING and world.plan(key).phase is tuning_plans.PlanPhase.RUNNING
        world.decide()
        assert world.state.audits.jobs[policy].rounds and {world.base, reward, policy} == world.state.jobs.jobs.keys()
    for _ in range(2):  # the audits end, and then nobody needs these jobs
        world.decide()
    assert world.plan(key).phase is tuning_plans.PlanPhase.FINISHED
    assert not world.state.audits.jobs and not world.state.jobs.jobs


def test_a_plan_may_train_a_reward_model_whose_score_is_a_mean(world: Tuned) -> None:
    key = world.planned(
        world.begin(
            replace(REWARD, objective="reward-mean", objective_settings=codec.encode(MeanRewardSettings()), weight_decay=0.0)
        )
    )
    for stage in range(2):
        world.close(tuning_plans.stage_job_id(key, stage), blocks=2)
    assert world.plan(key).phase is tuning_plans.PlanPhase.FINISHED


READS = codec.encode(replace(OWN, reward_model=ModelReference(bytes(32), 1, bytes(32))))
REFUSED: dict[str, tuple[Callable[[Tuned], StartPlan], str]] = {
    "reward": (lambda world: StartPlan(world.on(BASE)), "begins with a job of the objective 'reward'"),
    "rewarded": (
        lambda world: StartPlan(world.on(POLICY, objective_settings=READS)),
        "has only this job, with a rule as its reward",
    ),
    "base": (lambda world: StartPlan(REWARD.encode()), "starts from another's model"),
    "policy": (
        lambda world: StartPlan(world.on(REWARD), world.on(REWARD)),
        "must be a `ppo` job with the reward 'model' and without reward_model",
    ),
    "its base": (lambda world: StartPlan(world.on(REWARD), POLICY.encode()), "starts from the same model"),
    "sizes": (lambda world: world.begin(policy=replace(POLICY, model=replace(TINY, hidden=32))), "its model has other sizes"),
    "rule": (
        lambda world: world.begin(policy=replace(POLICY, objective_settings=codec.encode(replace(OWN, reward="rule:vowels")))),
        "must be a `ppo` job with the reward 'model' and without reward_model",
    ),
    "steps": (lambda world: world.begin(policy=replace(POLICY, local_steps=3)), "must be a multiple of epochs"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_plan_that_could_never_end_well_is_refused_before_it_begins(world: Tuned, what: str) -> None:
    said, why = REFUSED[what]
    assert why in (world.problem(world.tx(AUTHOR, "rlhf/start", said(world))) or "")


def test_nobody_has_two_plans_or_cancels_those_of_others(world: Tuned, key: bytes) -> None:
    world.decide(world.admission(NOVICE))
    assert "is already running" in (world.problem(world.tx(AUTHOR, "rlhf/start", world.begin())) or "")
    assert world.problem(world.tx(OTHER, "rlhf/start", world.begin())) is None
    assert "is neither its author nor a voter" in (world.problem(world.tx(NOVICE, "rlhf/cancel", CancelPlan(key))) or "")
    assert "no such plan" in (world.problem(world.tx(AUTHOR, "rlhf/cancel", CancelPlan(bytes(32)))) or "")


def test_a_policy_reads_no_model_but_one_that_the_network_decided(world: Tuned) -> None:
    """Here the policy is a separate job without a plan."""
    reward = tuning_plans.stage_job_id(world.planned(world.begin(policy=None)), 0)
    world.close(reward)
    model = ModelReference(reward, 2, world.job(reward).model_root)
    for named, why in (
        (replace(model, root=bytes(32)), "which is that of round 2"),
        (replace(model, job=bytes(32)), "no finished job"),
        (ModelReference(world.base, 1, world.job(world.base).model_root), "it is a language job, expected reward"),
    ):
        spec = world.on(POLICY, objective_settings=codec.encode(replace(OWN, reward_model=named)))
        assert why in (world.problem(world.tx(AUTHOR, "job/start", StartJob(spec))) or "")
    spec = world.on(POLICY, objective_settings=codec.encode(replace(OWN, reward_model=model)))
    assert world.job(world.start(AUTHOR, spec)).phase is JobPhase.RUNNING


def refusal(world: Tuned, key: bytes) -> str:
    """Return the reason why the next block would not start a plan's job."""
    return RlhfModule(world.rules.jobs_module.rules).start_refusal(world.plan(key), world.state, world.state.height + 1)


@pytest.mark.parametrize("refused", [4, 5])
def test_a_stage_that_is_refused_is_tried_again_for_so_many_blocks(
    world: Tuned, monkeypatch: pytest.MonkeyPatch, refused: int, key: bytes
) -> None:
    """Only its author can cancel a plan without a job, and the plan occupies a place and two models."""
    monkeypatch.setattr(tuning_plans, "REFUSED_HEIGHTS_MAX", 4)
    world.close(tuning_plans.stage_job_id(key, 0))
    with monkeypatch.context() as full:
        full.setattr(jobs, "BASES_MAX", 1)  # the policy needs two
        for _ in range(refused):
            assert tuning_plans.stage_job_id(key, 1) not in world.state.jobs.jobs
            world.decide()
            told = refusal(world, key)
            assert told.startswith("other jobs already use 1 models") or world.plan(key).phase is tuning_plans.PlanPhase.CANCELLED
    assert refusal(world, key) == ""
    world.decide()  # a place is free now
    assert (tuning_plans.stage_job_id(key, 1) in world.state.jobs.jobs) == (refused == 4)
    assert world.plan(key).phase is (tuning_plans.PlanPhase.RUNNING if refused == 4 else tuning_plans.PlanPhase.CANCELLED)


# A stage that trained nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_a_plan_fails_with_a_stage_of_which_every_round_was_rejected(world: Tuned, stage: int, key: bytes) -> None:
    if stage == 1:
        world.close(tuning_plans.stage_job_id(key, 0), blocks=1)
    world.close(tuning_plans.stage_job_id(key, stage), Verdict.REPLAY, blocks=1)
    plan = world.plan(key)
    assert plan.phase is tuning_plans.PlanPhase.FAILED and plan.failure is not None
    assert plan.failure.height == world.job(tuning_plans.stage_job_id(key, stage)).opened_height
    assert tuning_plans.failure_text(plan) == "no update was accepted in 2 rounds: 8 replay"
    assert list(find_failed_jobs(world.state, world.state.height)) == [
        f"job {REWARD.name if stage == 0 else POLICY.name}: {tuning_plans.failure_text(plan)}"
    ]
    assert not list(find_failed_jobs(world.state, world.state.height + FAILURE_ALERT_HEIGHTS))
    assert (tuning_plans.stage_job_id(key, 1) in world.state.jobs.jobs) == (stage == 1)
    world.planned()  # its author has a place again


@pytest.mark.parametrize("accepted", [0, 1, 12])  # the last: with all its rounds closed
def test_a_plan_fails_with_a_stage_that_makes_no_progress(world: Tuned, accepted: int) -> None:
    key = world.planned(world.begin(replace(REWARD, rounds=20)))
    reward = tuning_plans.stage_job_id(key, 0)
    for number in range(accepted + NO_PROGRESS_ROUNDS):
        verdict = Verdict.ACCEPT if number < accepted else Verdict.NORM
        world.decide(closings=(world.closing(reward, dict.fromkeys(world.job(reward).trainers, verdict)),))
    assert world.job(reward).phase is JobPhase.FINISHED and world.plan(key).phase is tuning_plans.PlanPhase.FAILED
    assert tuning_plans.failure_text(world.plan(key)) == "no update was accepted in 8 rounds: 32 diverging"
    assert not list(find_failed_jobs(world.state, world.state.height)), "`no-progress` is its alert"
    (told,) = find_stalled_jobs(world.state, world.state.height)
    assert told.endswith("learning rate below 0.003: `peer rlhf start --set inner_rate=0.0003`")


def test_a_plan_goes_on_with_a_stage_of_which_one_round_was_accepted(world: Tuned, key: bytes) -> None:
    reward = tuning_plans.stage_job_id(key, 0)
    world.decide(closings=(world.closing(reward, dict.fromkeys(world.job(reward).trainers, Verdict.REPLAY)),))
    world.close(reward, blocks=1)
    assert tuning_plans.stage_job_id(key, 1) in world.state.jobs.jobs and world.plan(key).failure is None


# Reports on a reward model --------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(world: Tuned) -> bytes:
    """Return a plan whose reward model is trained but not measured."""
    key = world.planned(world.begin(ignores_accuracy=False))
    world.close(tuning_plans.stage_job_id(key, 0), blocks=3)
    assert (
        tuning_plans.stage_job_id(key, 1) not in world.state.jobs.jobs and world.plan(key).phase is tuning_plans.PlanPhase.RUNNING
    )
    return key


def test_a_policy_begins_once_enough_voters_find_its_reward_better_than_chance(world: Tuned, measured: bytes) -> None:
    """Four voters tolerate one liar, so one report decides nothing."""
    assert world.report(measured, PEOPLE[0], 118, 100) is None
    assert world.report(measured, PEOPLE[1], 136, 96) is None, "one that says otherwise"
    assert tuning_plans.stage_job_id(measured, 1) not in world.state.jobs.jobs
    assert world.report(measured, PEOPLE[2], 138, 96) is None
    assert tuning_plans.stage_job_id(measured, 1) in world.state.jobs.jobs
    assert world.plan(measured).stages[0].accuracy == PairAccuracy(136, 96) and not world.plan(measured).reports


def test_a_plan_fails_where_its_reward_is_not_better_than_chance(world: Tuned, measured: bytes) -> None:
    assert world.report(measured, PEOPLE[0], 104, 96) is None
    assert world.report(measured, PEOPLE[1], 106, 96) is None
    plan = world.plan(measured)
    assert plan.phase is tuning_plans.PlanPhase.FAILED
    assert tuning_plans.failure_text(plan) == (
        "its reward model is not better than chance: 0.54 of 96 pairs, interval 0.44–0.64; "
        "give more pairs, or let the policy start with `rlhf start … --ignore-accuracy`"
    )
    assert list(find_failed_plans(world.state, world.state.height)) == [
        f"plan of job {plan.current.job.hex()[:8]}: {tuning_plans.failure_text(plan)}"
    ]
    assert not list(find_failed_plans(world.state, world.state.height + FAILURE_ALERT_HEIGHTS))
    world.decide()
    assert tuning_plans.stage_job_id(measured, 1) not in world.state.jobs.jobs


def test_reports_that_nobody_may_make_are_refused(world: Tuned, measured: bytes) -> None:
    world.decide(world.admission(NOVICE))
    assert "only voters" in (world.report(measured, NOVICE, 136, 96) or "")
    assert "half pairs are more than" in (world.report(measured, PEOPLE[0], 193, 96) or "")
    assert world.report(measured, PEOPLE[0], 136, 96) is None
    assert "has already reported" in (world.report(measured, PEOPLE[0], 136, 96) or "")
    assert "no plan waits" in (world.report(bytes(32), PEOPLE[1], 136, 96) or "")
    assert world.report(measured, PEOPLE[1], 136, 96) is None
    assert "no plan waits" in (world.report(measured, PEOPLE[2], 136, 96) or ""), "the policy has begun"


def test_no_report_is_taken_before_the_model_is_trained_nor_of_a_plan_that_goes_on_anyway(world: Tuned) -> None:
    key = world.planned(world.begin(ignores_accuracy=False))
    assert "no plan waits" in (world.report(key, PEOPLE[0], 136, 96) or "")
    world.decide(world.tx(AUTHOR, "rlhf/cancel", CancelPlan(key)))
    key = world.planned()
    world.close(tuning_plans.stage_job_id(key, 0))
    assert "no plan waits" in (world.report(key, PEOPLE[0], 136, 96) or "")


@pytest.mark.parametrize("waits", [4, 5])
def test_a_plan_whose_reward_nobody_measures_is_cancelled(world: Tuned, monkeypatch: pytest.MonkeyPatch, waits: int) -> None:
    monkeypatch.setattr(tuning_plans, "REFUSED_HEIGHTS_MAX", 4)
    key = world.planned(world.begin(ignores_accuracy=False))
    world.close(tuning_plans.stage_job_id(key, 0), blocks=waits - 1)
    assert world.plan(key).phase is (tuning_plans.PlanPhase.RUNNING if waits == 4 else tuning_plans.PlanPhase.CANCELLED)


def test_a_report_goes_on_with_the_key_of_its_voter(world: Tuned, measured: bytes) -> None:
    assert world.report(measured, PEOPLE[0], 136, 96) is None
    moved = RlhfModule(world.rules.jobs_module.rules).follow_key_rotations(
        world.state.module_state(RlhfState), lambda key: NOVICE.public if key == PEOPLE[0].public else key
    )
    assert moved.plans[measured].reports == {NOVICE.public: PairAccuracy(136, 96)}
