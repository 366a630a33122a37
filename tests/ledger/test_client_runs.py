"""Runs of clients: a round opens for a requested step alone, and takes turns with other jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from clients.ledger import clients_module
from clients.ledger.clients_module import (
    ATTEMPTS_MAX,
    FLOPS_ALLOWED,
    FLOPS_LIMIT,
    LOST_MS_MAX,
    LOST_PART,
    STEPS_ALLOWED,
    STEPS_ALLOWED_MAX,
    STEPS_LIMIT,
    ClientLimit,
    ClientRun,
    ClientsModule,
    ClientsState,
    EndRun,
    OpenRun,
    RequestStep,
    SaveModel,
    SetExpiry,
    trainers_in_order,
)
from clients.records import OptimizerStep, StepBrief
from ledger import jobs
from ledger.core.genesis import TRAINER
from ledger.core.module import BlockContext, DecodedTransaction, Module, StateChange, StateReader
from ledger.core.voted_limit import VotedLimit
from ledger.jobs import (
    BASES_ON_REQUEST_MAX,
    ON_REQUEST_MAX,
    UNTRAINED_KEPT_MAX,
    Job,
    JobHold,
    JobPhase,
    JobsModule,
    JobTerms,
    ModelReference,
    RequestRollback,
    StartJob,
    StopJob,
    job_id,
)
from ledger.ledger_state import LedgerState, core_modules, newest_module_versions
from ledger.members import RegisterRoles, ResignAsVoter, RetireMember
from ledger.network_governance import PARAMETERS_LIMIT
from ledger.snapshots.snapshot_server import models_in_state
from protocol import codec
from protocol.codec import Digest
from protocol.identity import Signed
from protocol.verdicts import Verdict
from tests.ledger.world import BY_KEY, CLIENT, FAR_MS, LANGUAGE, PEOPLE, SCRATCH, PlainJobs, World, admitted
from tests.sim.keys import FastSigner

OWNER, OTHER = PEOPLE[0], PEOPLE[1]
SPEC = CLIENT + b":1000"
ADAMW = OptimizerStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
ACCEPT, REPLAY = Verdict.ACCEPT, Verdict.REPLAY
PASS_PARAMETERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Holds:
    held: tuple[Digest, ...] = ()


class HoldsModule(Module[Holds]):
    """Another module that holds jobs, as a paused tuning plan does."""

    name, contents, state_type = "holds", {"holds/set": Holds}, Holds

    def apply_transaction(self, state: Holds, said: DecodedTransaction, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(said.content)

    def settle_block(self, state: Holds, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(state, tuple(map(JobHold, state.held)))


class SizedJobs(PlainJobs):
    """Jobs whose passes compute with `PASS_PARAMETERS` parameters. `SPEC@JOB,ROUND,ROOT` reads the model of a finished job."""

    def terms_of_spec(self, spec: bytes) -> JobTerms:
        plain, at, of = spec.partition(b"@")
        terms = replace(super().terms_of_spec(plain), pass_parameters=PASS_PARAMETERS)
        return replace(terms, read=ModelReference(of[:32], of[32], of[33:])) if at else terms


class Clients(World):
    def __init__(self, voters: int = 4, trainers: int = 3, holds_last: bool = False) -> None:
        """`holds_last`: the network has got the module `holds` by an upgrade, so it acts after the module of client runs."""
        self.block_ms = 1  # time from one block to the next
        super().__init__(voters, trainers)
        rules = SizedJobs()
        others: tuple[Module[Any], ...] = (HoldsModule(), ClientsModule(rules))
        known = *core_modules(rules), *(reversed(others) if holds_last else others)
        self.start_chain(replace(self.genesis, modules=newest_module_versions(known)), known)

    def decide_body(self, body: bytes, after_ms: int | None = None) -> LedgerState:
        state = super().decide_body(body, self.block_ms if after_ms is None else after_ms)
        assert not self.failures
        return state

    def hold(self, *jobs: bytes) -> None:
        self.decide(self.tx(PEOPLE[2], "holds/set", Holds(jobs)))

    def open(self, owner: FastSigner = OWNER, spec: bytes = SPEC) -> bytes:
        signed = self.tx(owner, "client/open", OpenRun(spec))
        self.decide(signed)
        return job_id(owner.public, self.rules.open_transaction(signed))

    def step(self, key: bytes, number: int, owner: FastSigner = OWNER, ahead: int = 1, tokens: int = 100) -> Signed:
        return self.tx(owner, "client/step", RequestStep(key, StepBrief(number, bytes([number]) * 32, tokens, ADAMW)), ahead)

    def request(self, key: bytes, number: int, owner: FastSigner = OWNER) -> None:
        self.decide(self.step(key, number, owner))

    @property
    def clients(self) -> ClientsState:
        return self.state.module_state(ClientsState)

    def run(self, key: bytes) -> ClientRun:
        return self.clients.runs[key]

    def vote_for(self, name: str, most: int, *voters: FastSigner) -> None:
        self.decide(*(self.limit_vote(voter, name, most) for voter in voters))

    def limit_vote(self, voter: FastSigner, name: str, most: int) -> Signed:
        return self.tx(voter, "client/limit", ClientLimit(name, most))

    def close(self, key: bytes, verdict: Verdict = ACCEPT, *transactions: Signed) -> None:
        """Close the open round of a job with this verdict on all its trainers."""
        self.decide(*transactions, closings=(self.closing(key, dict.fromkeys(self.job(key).trainers, verdict)),))

    def with_base(self) -> bytes:
        """Return the specification of a run that changes the model of a job which is finished now."""
        base = self.start(OTHER, LANGUAGE + b":1")
        self.close(base)
        return SPEC + b"@" + base + bytes([self.job(base).round]) + self.job(base).model_root

    def open_jobs(self) -> set[bytes]:
        return set(self.state.jobs.running())


@pytest.fixture
def world() -> Clients:
    return Clients()


def is_waiting(job: Job) -> bool:
    return job.phase is JobPhase.PAUSED and not job.round


# Idle runs ---------------------------------------------------------------------------------------------------------------


def test_an_idle_run_opens_no_round(world: Clients) -> None:
    key = world.open()
    assert is_waiting(world.job(key)) and world.job(key).model_root != bytes(32)
    world.decide_empty(100)
    assert is_waiting(world.job(key)) and not world.open_jobs()
    assert world.read_back() == world.state


def test_a_run_starts_beside_a_job_that_trains_and_takes_no_place(world: Clients) -> None:
    trains = world.start(OTHER, LANGUAGE + b":9")
    key = world.open()
    assert is_waiting(world.job(key))
    world.close(trains)
    assert world.open_jobs() == {trains}
    assert world.start(OTHER, SCRATCH) in world.open_jobs()


# Steps -------------------------------------------------------------------------------------------------------------------


def test_a_requested_step_is_a_round_of_one_trainer_which_is_the_gateway(world: Clients) -> None:
    key = world.open()
    world.request(key, 0)
    job = world.job(key)
    assert job.phase is JobPhase.RUNNING and job.trainers == job.awaited == (OWNER.public,) and job.fully_audited
    assert set(job.reexecutors) == {person.public for person in PEOPLE[:3]}
    assert codec.decode(StepBrief, job.brief) == StepBrief(0, bytes(32), 100, ADAMW)
    before = job.model_root
    world.close(key)
    job, run = world.job(key), world.run(key)
    assert job.phase is JobPhase.PAUSED and job.round == 1 and job.model_root != before
    assert (run.next_step, run.open_step) == (1, None) and run.last is not None
    assert (run.last.step, run.last.round, run.last.is_accepted, run.last.rejected) == (0, 0, True, {})
    world.decide_empty(20)
    assert not world.open_jobs()
    world.request(key, 1)
    assert codec.decode(StepBrief, world.job(key).brief).step == 1


@pytest.mark.parametrize(
    ("owner", "number", "words"),
    [(OTHER, 0, "only the member that opened"), (OWNER, 1, "step 1 is not the next one, which is 0")],
)
def test_a_step_of_somebody_else_or_out_of_order_is_refused(world: Clients, owner: FastSigner, number: int, words: str) -> None:
    key = world.open()
    assert words in str(world.problem(world.step(key, number, owner)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate", 11.0),
        ("rate", -1e-9),
        ("rate", 1e-13),
        ("beta2", 1e-40),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("epsilon", 0.0),
        ("weight_decay", 101.0),
        ("clip", -1.0),
    ],
)
def test_a_step_with_a_term_out_of_its_range_is_refused_by_name(world: Clients, name: str, value: float) -> None:
    key = world.open()
    brief = StepBrief(0, bytes(32), 100, replace(ADAMW, **{name: value}))
    assert f"{name} must be" in str(world.problem(world.tx(OWNER, "client/step", RequestStep(key, brief))))


def test_a_run_is_not_rolled_back(world: Clients) -> None:
    key = world.open()
    for number in range(2):
        world.request(key, number)
        world.close(key)
    assert "a job on request is not rolled back" in str(world.problem(world.tx(OTHER, "job/rollback", RequestRollback(key, 0))))


def test_a_step_twice_is_refused(world: Clients) -> None:
    key = world.open()
    assert "step 0 is open" in str(world.problem(world.step(key, 0), world.step(key, 0, ahead=2)))
    world.request(key, 0)
    assert "step 0 is open" in str(world.problem(world.step(key, 0)))
    world.close(key)
    assert "step 0 is not the next one, which is 1" in str(world.problem(world.step(key, 0)))


def test_a_step_that_is_refused_goes_to_another_trainer_and_the_model_stays(world: Clients) -> None:
    key = world.open()
    world.request(key, 0)
    order = trainers_in_order(world.job(key), key, world.run(key), world.state.members)
    trained = []
    for attempt in range(3):
        assert codec.decode(StepBrief, world.job(key).brief).step == 0
        trained.append(world.job(key).trainers)
        world.close(key, REPLAY)
        run = world.run(key)
        assert run.last is not None and run.last.rejected == {"replay": attempt + 1} and not run.last.is_accepted
    assert trained == [(member,) for member in order] and len(order) == 3 and order[0] == OWNER.public
    assert (run.open_step, run.next_step) == (None, 1), "all three trainers have failed, and the number is used up"
    assert world.job(key).phase is JobPhase.PAUSED and not world.open_jobs() and not world.job(key).accepted
    assert not world.job(key).refused_rounds
    world.request(key, 1)
    assert world.open_jobs() == {key}


@pytest.mark.parametrize("rotates", [False, True])
def test_each_trainer_has_one_attempt_also_if_one_is_suspended_or_gets_another_key_meanwhile(
    rotates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = FastSigner("new key of a trainer that has tried")
    monkeypatch.setitem(BY_KEY, new.public, new)
    world = Clients(4, 4)
    key = world.open()
    for number in range(jobs.INVALID_UPDATES_MAX - 1):
        world.request(key, number)
        world.close(key, REPLAY)
        world.close(key, ACCEPT)
    world.request(key, jobs.INVALID_UPDATES_MAX - 1)
    asked = list[bytes]()
    while world.run(key).open_step is not None:
        (trainer,) = world.job(key).trainers
        asked.append(trainer)
        world.close(key, REPLAY)
        if rotates and len(asked) == 2:
            world.decide(world.rotation(BY_KEY[trainer], new))
    assert OWNER.public in world.job(key).suspended_trainers
    assert len(asked) == len(set(asked)) == 4 and world.run(key).next_step == jobs.INVALID_UPDATES_MAX


def test_the_second_trainer_s_update_ends_the_step(world: Clients) -> None:
    key = world.open()
    world.request(key, 0)
    world.decide(closings=(world.closing(key, {}),))  # nobody has a proposal of the gateway
    assert world.job(key).trainers != (OWNER.public,)
    world.close(key)
    run = world.run(key)
    assert run.last is not None and run.last.is_accepted and run.last.rejected == {"absent": 1} and run.next_step == 1


def test_a_step_has_eight_rounds_at_most_and_the_job_goes_on_after_them() -> None:
    world = Clients(voters=10, trainers=10)
    key = world.open()
    world.request(key, 0)
    for _ in range(ATTEMPTS_MAX):
        assert world.open_jobs() == {key}
        world.close(key, REPLAY)
    assert not world.open_jobs() and world.run(key).next_step == 1 and world.job(key).phase is JobPhase.PAUSED


def test_a_trainer_that_leaves_during_its_round_is_replaced_in_it(world: Clients) -> None:
    key = world.open()
    world.request(key, 0)
    new = FastSigner("new key of the owner")
    world.decide(world.rotation(OWNER, new))
    job = world.job(key)
    assert new.public in job.trainers and job.awaited == (new.public,) and job.round == 0, "the owner has another key"
    assert codec.decode(StepBrief, job.brief).step == 0
    assert world.run(key).owner == new.public


@pytest.mark.parametrize("seed", range(4))  # the hash of the new key may give the same place
def test_a_later_trainer_keeps_its_round_under_its_new_key(seed: int) -> None:
    world = Clients(voters=7, trainers=7)
    key = world.open()
    world.request(key, 0)
    world.close(key, REPLAY)
    (second,) = world.job(key).trainers
    new = FastSigner(f"new key {seed} of the second trainer")
    world.decide(world.rotation(BY_KEY[second], new))
    assert world.job(key).awaited == (new.public,) and world.job(key).successors == {second: new.public}


def test_a_round_whose_voters_have_left_keeps_its_trainer_and_its_brief(world: Clients) -> None:
    key = world.open()
    world.request(key, 0)
    before = world.job(key)
    for old, new in zip(PEOPLE[1:3], PEOPLE[8:10], strict=True):
        world.decide(world.rotation(old, new))
        world.decide_empty(4)
    job = world.job(key)
    assert job.opened_height > before.opened_height and PEOPLE[8].public in job.voters
    assert (job.trainers, job.awaited, job.brief) == (before.trainers, before.awaited, before.brief)


def rotated(world: Clients, old: FastSigner, name: str, monkeypatch: pytest.MonkeyPatch) -> FastSigner:
    """Rotate a member to a key of this name, and return the key."""
    new = FastSigner(name)
    monkeypatch.setitem(BY_KEY, new.public, new)
    world.decide(world.rotation(old, new))
    return new


def close_empty(world: Clients, key: bytes) -> None:
    """Close the open round without an update."""
    world.decide(closings=(world.closing(key, {}),))


@pytest.mark.parametrize("rotations", [1, ATTEMPTS_MAX + 1])
def test_an_owner_that_rotates_during_its_round_has_used_one_attempt(rotations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Clients(4, 4)
    world.decide(*(world.tx(OWNER, "member/resign", ResignAsVoter()),), empty_after=2)  # its keys do not wait for a vote
    key, owner = world.open(), OWNER
    world.request(key, 0)
    for number in range(rotations):
        owner = rotated(world, owner, f"key {number} of the owner", monkeypatch)
    others = {person.public for person in PEOPLE[1:4]}
    close_empty(world, key)
    for _ in range(3):
        run = world.run(key)
        assert run.open_step is not None and run.last is not None
        assert run.last.rejected == {"absent": run.open_step.attempts}
        (trainer,) = world.job(key).trainers
        others.remove(trainer)
        close_empty(world, key)
    run = world.run(key)
    assert run.open_step is None and run.last is not None and run.last.rejected == {"absent": 4} and not others


@pytest.mark.parametrize("step", range(4))  # each step has another order of trainers
def test_a_trainer_that_succeeds_an_expelled_one_in_its_round_has_used_its_attempt(step: int) -> None:
    world = Clients(voters=7, trainers=7)
    key = world.open()
    train(world, key, step)
    world.request(key, step)
    close_empty(world, key)
    (second,) = world.job(key).awaited
    world.decide(evidence=(world.double(BY_KEY[second]),))
    (third,) = world.job(key).awaited
    close_empty(world, key)
    open_step = world.run(key).open_step
    assert open_step is not None and open_step.tried == (OWNER.public, third)
    assert not {*world.job(key).trainers} & {OWNER.public, second, third}
    for attempts in range(2, 6):
        assert world.run(key).open_step is not None, f"{6 - attempts} trainers have not tried"
        close_empty(world, key)
    assert world.run(key).open_step is None and world.job(key).phase is JobPhase.PAUSED


def test_a_trainer_that_is_left_has_its_attempt_if_the_block_with_the_last_round_expels_its_trainer(world: Clients) -> None:
    key = world.open()
    world.request(key, 0)
    close_empty(world, key)
    (second,) = world.job(key).trainers
    world.decide(closings=(world.closing(key, {}),), evidence=(world.double(BY_KEY[second]),))
    assert world.open_jobs() == {key} and not {*world.job(key).trainers} & {OWNER.public, second}


def test_the_only_trainer_that_is_left_tries_again_and_the_step_fails_after_it(world: Clients) -> None:
    trains, key = world.start(OTHER, LANGUAGE + b":9"), world.open()
    world.request(key, 0)
    world.close(trains)
    close_empty(world, key)
    world.decide(*(world.tx(person, "member/register", RegisterRoles(())) for person in PEOPLE[1:3]))
    world.close(trains)
    assert world.open_jobs() == {key} and world.job(key).trainers == (OWNER.public,)
    close_empty(world, key)
    assert world.run(key).open_step is None and world.run(key).next_step == 1


def test_a_round_whose_trainer_gives_up_its_role_closes_when_its_voters_have_left_too(world: Clients) -> None:
    key = world.open()
    world.request(key, 0)
    world.decide(world.tx(OWNER, "member/register", RegisterRoles(())))
    for old, new in zip(PEOPLE[1:3], PEOPLE[8:10], strict=True):
        world.decide(world.rotation(old, new))
        world.decide_empty(4)
    assert not world.job(key).awaited
    close_empty(world, key)
    assert world.job(key).trainers != (OWNER.public,) and world.open_jobs() == {key}


# Turns -------------------------------------------------------------------------------------------------------------------


def test_a_step_has_the_next_round_and_the_other_job_the_one_after_it(world: Clients) -> None:
    trains, key = world.start(OTHER, LANGUAGE + b":9"), world.open()
    world.request(key, 0)
    assert world.open_jobs() == {trains}
    world.close(trains)
    assert world.open_jobs() == {key} and world.job(trains).phase is JobPhase.PAUSED
    world.close(key)
    assert world.open_jobs() == {trains}, "it goes on by itself"
    world.request(key, 1)
    for _ in range(3):
        world.close(trains)
        assert world.open_jobs() == {key}
        world.close(key)
        assert world.open_jobs() == {trains}
        world.request(key, world.run(key).next_step)


def test_steps_of_several_runs_come_in_the_order_of_their_requests(world: Clients) -> None:
    owners = {world.open(): OWNER, world.open(OTHER): OTHER, world.open(PEOPLE[2]): PEOPLE[2]}
    *later, first = sorted(owners)
    for key in (first, *reversed(later)):
        world.request(key, 0, owners[key])
    for key in (first, *reversed(later)):
        assert world.open_jobs() == {key}
        world.close(key)
    assert not world.open_jobs()


def test_a_step_of_a_run_comes_after_an_older_one_of_another_run(world: Clients) -> None:
    first, second = world.open(), world.open(OTHER)
    world.request(second, 0, OTHER)
    world.request(first, 0)
    assert world.open_jobs() == {second}
    world.close(second)
    assert world.open_jobs() == {first}
    world.request(second, 1, OTHER)
    world.close(first)
    assert world.open_jobs() == {second}


def test_steps_do_not_keep_a_queued_job_waiting(world: Clients) -> None:
    key, second = world.open(), world.open(OTHER)
    world.request(key, 0)
    world.request(second, 0, OTHER)
    queued = world.start(OTHER, LANGUAGE + b":9")
    assert world.state.jobs.queue and world.open_jobs() == {key}
    world.close(key)
    assert world.open_jobs() == {queued}
    world.close(queued)
    assert world.open_jobs() == {second}


def test_steps_do_not_wait_for_jobs_that_another_module_holds(world: Clients) -> None:
    trains, key = world.start(OTHER, LANGUAGE + b":9"), world.open()
    queued = world.start(OTHER, LANGUAGE + b":9")
    world.hold(trains, queued)
    world.close(trains)
    assert not world.open_jobs()
    second = world.open(OTHER)
    world.request(key, 0)
    world.request(second, 0, OTHER)
    world.close(key)
    assert world.open_jobs() == {second}
    world.hold()
    world.close(second)
    assert world.open_jobs() == {trains}


def test_a_step_does_not_wait_for_audits_of_another_job(world: Clients) -> None:
    """A job whose audits are open may go on after a rollback, so other jobs wait for it."""
    rules, settling = PlainJobs(), replace(world.job(world.start()), phase=JobPhase.SETTLING)
    has_place = {
        spec: JobsModule(rules)._has_place({bytes(32): settling}, rules.terms_of_spec(spec)) for spec in (SPEC, LANGUAGE)
    }
    assert has_place == {SPEC: True, LANGUAGE: False}


ENDS = {"client/end": EndRun, "job/stop": StopJob}  # kinds of transactions with which an owner ends its run


@pytest.mark.parametrize("kind", ENDS)
def test_the_next_step_begins_in_the_block_that_ends_the_run_with_the_open_round(world: Clients, kind: str) -> None:
    key, other = world.open(), world.open(OTHER)
    world.request(key, 0)
    world.request(other, 0, OTHER)
    world.decide(world.tx(OWNER, kind, ENDS[kind](key)))
    assert world.open_jobs() == {other}


def test_the_next_step_begins_in_the_block_that_closes_the_last_round_of_a_run(world: Clients) -> None:
    key, other = world.open(spec=CLIENT + b":1"), world.open(OTHER)
    world.request(key, 0)
    world.request(other, 0, OTHER)
    world.close(key, REPLAY)
    assert world.job(key).phase is JobPhase.FINISHED and world.open_jobs() == {other}


@pytest.mark.parametrize("kind", ENDS)
def test_a_paused_job_goes_on_in_the_block_that_ends_the_run_with_the_open_round(world: Clients, kind: str) -> None:
    trains, key, other = world.start(OTHER, LANGUAGE + b":9"), world.open(), world.open(OTHER)
    world.request(key, 0)
    world.request(other, 0, OTHER)
    world.close(trains)
    assert world.open_jobs() == {key}
    world.decide(world.tx(OWNER, kind, ENDS[kind](key)))
    assert world.open_jobs() == {trains}
    world.close(trains)
    assert world.open_jobs() == {other}


@pytest.mark.parametrize("kind", ENDS)
def test_a_run_that_ends_before_its_step_began_holds_no_other_job(world: Clients, kind: str) -> None:
    trains, key = world.start(OTHER, LANGUAGE + b":9"), world.open()
    world.request(key, 0)
    world.close(trains, ACCEPT, world.tx(OWNER, kind, ENDS[kind](key)))
    assert world.open_jobs() == {trains}


def test_a_refused_step_waits_one_round_of_the_other_job(world: Clients) -> None:
    trains, key = world.start(OTHER, LANGUAGE + b":9"), world.open()
    world.request(key, 0)
    world.close(trains)
    world.close(key, REPLAY)
    assert world.open_jobs() == {trains}
    world.close(trains)
    assert world.open_jobs() == {key} and world.job(key).trainers != (OWNER.public,)


# Checkpoints -------------------------------------------------------------------------------------------------------------


def save(world: Clients, key: bytes, name: str = "one", expires_ms: int = 0, owner: FastSigner = OWNER) -> None:
    world.decide(world.tx(owner, "client/save", SaveModel(key, name, expires_ms)))


def train(world: Clients, key: bytes, steps: int = 1) -> None:
    for _ in range(steps):
        world.request(key, world.run(key).next_step)
        world.close(key)


def test_a_saved_model_stays_under_its_name_while_the_run_goes_on(world: Clients) -> None:
    key = world.open()
    train(world, key, 2)
    first = world.job(key).model_root
    save(world, key)
    save(world, key, "same")
    train(world, key)
    save(world, key, "two")
    train(world, key)
    job, run = world.job(key), world.run(key)
    assert [(model.round, model.root) for model in job.saved_models] == [(2, first), (3, run.checkpoints["two"].model.root)]
    assert run.checkpoints.keys() == {"one", "same", "two"} and run.checkpoints["one"] == run.checkpoints["same"]
    assert models_in_state(world.state).items() > {(key, 2): first}.items(), "new peers get it with the state"
    assert world.read_back() == world.state
    save(world, key)
    assert [model.round for model in world.job(key).saved_models] == [2, 3, 4], "the name has another model now"
    save(world, key, "same")
    assert [model.round for model in world.job(key).saved_models] == [3, 4]


def test_a_checkpoint_expires_by_the_clock_of_the_network(world: Clients) -> None:
    key = world.open()
    save(world, key, "brief", world.state.time_ms + 50)
    save(world, key, "long")
    assert "no checkpoint 'none'" in str(world.problem(world.tx(OWNER, "client/expire", SetExpiry(key, "none", 1))))
    while "brief" in world.run(key).checkpoints:
        assert world.job(key).saved_models and world.state.time_ms < world.run(key).checkpoints["brief"].expires_ms + 50
        world.decide_empty(1)
    assert world.run(key).checkpoints.keys() == {"long"} and len(world.job(key).saved_models) == 1
    world.decide(world.tx(OWNER, "client/expire", SetExpiry(key, "long", 1)))
    assert not world.run(key).checkpoints and not world.job(key).saved_models


def test_only_the_owner_saves_and_expires_and_not_during_a_step(world: Clients) -> None:
    key = world.open()
    save(world, key)
    for kind, content in (("client/save", SaveModel(key, "two", 0)), ("client/expire", SetExpiry(key, "one", 1))):
        assert "only the member that opened" in str(world.problem(world.tx(OTHER, kind, content)))
    world.request(key, 0)
    assert "step 0 is open" in str(world.problem(world.tx(OWNER, "client/save", SaveModel(key, "two", 0))))
    world.decide(world.tx(OWNER, "client/expire", SetExpiry(key, "one", 1)))
    assert not world.run(key).checkpoints and world.open_jobs() == {key}


def test_checkpoints_stay_when_the_run_is_over_and_the_run_goes_with_the_last(world: Clients) -> None:
    key = world.open()
    train(world, key)
    save(world, key)
    world.decide(world.tx(OWNER, "client/end", EndRun(key)))
    assert world.run(key).is_over and "or it is over" in str(world.problem(world.step(key, 1)))
    assert "or it is over" in str(world.problem(world.tx(OWNER, "client/save", SaveModel(key, "two", 0))))
    for _ in range(UNTRAINED_KEPT_MAX + 2):  # later runs of its owner, without checkpoints, do not displace it
        other = world.open()
        world.decide(world.tx(OWNER, "client/end", EndRun(other)))
    assert other in world.state.jobs.jobs and world.job(key).saved_models and world.job(key).phase is JobPhase.FINISHED
    assert len(world.state.jobs.jobs) == UNTRAINED_KEPT_MAX + 1
    job = world.job(key)
    assert job.accepted and not world.rules.jobs_module.has_trained(job), "its files go with it"
    world.decide(world.tx(OWNER, "client/expire", SetExpiry(key, "one", 1)))
    assert key not in world.state.module_state(ClientsState).runs


def test_a_run_that_the_voters_stop_keeps_its_checkpoints(world: Clients) -> None:
    key = world.open()
    save(world, key)
    world.request(key, 0)
    world.decide(*(world.tx(person, "job/stop", StopJob(key)) for person in PEOPLE[1:4]))
    assert world.run(key).is_over and world.run(key).open_step is None and world.run(key).checkpoints
    world.decide_empty(5)
    assert not world.open_jobs() and world.job(key).saved_models
    world.open()


def refused_save(world: Clients, key: bytes, owner: FastSigner = OWNER) -> str:
    return str(world.problem(world.tx(owner, "client/save", SaveModel(key, "last", 0))))


def test_a_run_has_a_bounded_number_of_checkpoints(world: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients_module, "SAVED_MODELS_MAX", 2)
    key = world.open()
    save(world, key)
    save(world, key, "two")
    assert "has 2 checkpoints, the maximum" in refused_save(world, key)
    save(world, key, "two")


def test_runs_with_checkpoints_of_one_member_leave_half_of_the_places_to_others(
    world: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "SAVING_MAX", 4)
    keys, others = [world.open() for _ in range(3)], [world.open(OTHER) for _ in range(2)]
    for key in keys[:2]:
        save(world, key)
    assert "2 of 4 runs with checkpoints, 2 of them yours" in refused_save(world, keys[2])
    save(world, keys[1], "another of the same run")
    save(world, others[0], owner=OTHER)
    assert "3 of 4 runs with checkpoints, 1 of them yours" in refused_save(world, others[1], OTHER)
    last = world.open(PEOPLE[2])
    save(world, last, owner=PEOPLE[2])
    assert "4 of 4 runs with checkpoints, 0 of them yours" in refused_save(world, world.open(PEOPLE[3]), PEOPLE[3])
    world.decide(world.tx(OWNER, "client/expire", SetExpiry(keys[0], "one", 1)))
    assert "3 of 4 runs with checkpoints, 1 of them yours" in refused_save(world, keys[2])


def test_saved_bytes_of_one_member_leave_half_of_the_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = SizedJobs.terms_of_spec
    monkeypatch.setattr(SizedJobs, "terms_of_spec", lambda self, spec: replace(terms(self, spec), trained_parameters=10**8))
    monkeypatch.setattr(clients_module, "SAVED_BYTES_MAX", 5 * 12 * 10**8)
    world = Clients()
    key, other = world.open(), world.open(OTHER)
    save(world, key)
    save(world, key, "the same model again")
    train(world, key)
    save(world, key, "two")
    train(world, key)
    assert "would have 3.6 GB, 3.6 GB of them yours, of 6.0 GB" in refused_save(world, key)
    save(world, other, owner=OTHER)
    world.request(other, 0, OTHER)
    world.close(other)
    assert "would have 4.8 GB, 2.4 GB of them yours, of 6.0 GB" in refused_save(world, other, OTHER)
    last = world.open(PEOPLE[2])
    save(world, last, owner=PEOPLE[2])


def test_a_member_replaces_its_checkpoint_although_others_have_taken_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = SizedJobs.terms_of_spec
    monkeypatch.setattr(SizedJobs, "terms_of_spec", lambda self, spec: replace(terms(self, spec), trained_parameters=10**8))
    monkeypatch.setattr(clients_module, "SAVED_BYTES_MAX", 5 * 12 * 10**8)
    world = Clients()
    key = world.open()
    save(world, key)
    train(world, key)
    save(world, key, "two")
    for other in (OTHER, PEOPLE[2]):
        save(world, world.open(other), owner=other)
    train(world, key)
    assert "would have 6.0 GB, 3.6 GB of them yours" in refused_save(world, key)
    save(world, key, "two")
    assert [model.round for model in world.job(key).saved_models] == [0, 2]
    save(world, key, "the same model again")


def test_nothing_can_be_done_with_a_run_in_the_block_that_opens_it(world: Clients) -> None:
    opens = world.tx(OWNER, "client/open", OpenRun(SPEC))
    key = job_id(OWNER.public, world.rules.open_transaction(opens))
    first = RequestStep(key, StepBrief(0, bytes(32), 100, ADAMW))
    for kind, content in (("client/end", EndRun(key)), ("client/save", SaveModel(key, "one", 0)), ("client/step", first)):
        assert "begins in this block" in str(world.problem(opens, world.tx(OWNER, kind, content, 2)))


def test_a_run_may_end_in_the_block_that_closes_its_round(world: Clients) -> None:
    key, other = world.open(), world.open(OTHER)
    save(world, key)
    world.request(key, 0)
    world.request(other, 0, OTHER)
    world.close(key, ACCEPT, world.tx(OWNER, "client/end", EndRun(key)))
    assert world.open_jobs() == {other}, "the module settles the block"
    assert world.run(key).is_over and world.job(key).phase is JobPhase.FINISHED and world.job(key).saved_models
    assert world.run(key).last is None, "the run was over when the round closed"


def test_a_job_on_request_is_not_started_by_a_person(world: Clients) -> None:
    assert "started by the module" in str(world.problem(world.tx(OWNER, "job/start", StartJob(SPEC))))


# Limits that voters set ----------------------------------------------------------------------------------------------------


def test_a_step_beyond_the_limit_of_operations_is_refused_with_the_way_out(world: Clients) -> None:
    key = world.open()
    most = FLOPS_ALLOWED // (6 * PASS_PARAMETERS)
    told = str(world.problem(world.step(key, 0, tokens=most + 1)))
    assert f"step 0 needs 6 · {PASS_PARAMETERS} parameters · {most + 1} tokens = {6 * PASS_PARAMETERS * (most + 1)} " in told
    assert f"this network allows {FLOPS_ALLOWED}: send fewer tokens, or" in told and "`peer limit client_flops N`" in told
    assert world.problem(world.step(key, 0, tokens=most)) is None
    world.request(key, 0)
    assert world.open_jobs() == {key}, "the run goes on with a smaller step"


def test_a_quorum_sets_the_operations_of_a_step_and_a_minority_does_not(world: Clients) -> None:
    key, more = world.open(), 5 * FLOPS_ALLOWED
    costly = FLOPS_ALLOWED // (6 * PASS_PARAMETERS) + 1
    world.vote_for(FLOPS_LIMIT, more, PEOPLE[0], PEOPLE[1])
    world.vote_for(FLOPS_LIMIT, more + 1, PEOPLE[2])
    assert world.clients.flops == VotedLimit(
        FLOPS_ALLOWED, {PEOPLE[0].public: more, PEOPLE[1].public: more, PEOPLE[2].public: more + 1}
    )
    assert world.problem(world.step(key, 0, tokens=costly)) and world.read_back() == world.state
    decides = world.limit_vote(PEOPLE[2], FLOPS_LIMIT, more)
    assert world.problem(decides, world.step(key, 0, tokens=costly)) is None, "it applies from the next transaction on"
    world.decide(decides)
    assert world.clients.flops == VotedLimit(more) and world.clients.runs.keys() == {key}
    world.vote_for(FLOPS_LIMIT, 6 * PASS_PARAMETERS * 100 - 1, *PEOPLE[:3])
    assert world.problem(world.step(key, 0)), "voters can lower it, too"


def test_a_run_has_as_many_steps_as_voters_allow(world: Clients) -> None:
    assert world.clients.steps == VotedLimit(STEPS_ALLOWED)
    world.vote_for(STEPS_LIMIT, 2, *PEOPLE[:3])
    key = world.open()
    train(world, key)
    world.request(key, 1)
    for _ in range(3):
        world.close(key, REPLAY)
    told = str(world.problem(world.step(key, 2)))
    assert f"run {key.hex()[:8]} has had 2 steps, and this network allows 2: save its model" in told
    assert "`peer limit client_steps N`" in told
    train(world, world.open(), 2)
    world.vote_for(STEPS_LIMIT, 3, *PEOPLE[:3])
    train(world, key)


def test_a_voter_has_one_vote_for_each_limit_and_can_withdraw_it(world: Clients) -> None:
    world.vote_for(FLOPS_LIMIT, 7, OWNER)
    world.vote_for(STEPS_LIMIT, 7, OWNER)
    assert (world.clients.flops.votes, world.clients.steps.votes) == ({OWNER.public: 7}, {OWNER.public: 7})
    world.vote_for(STEPS_LIMIT, STEPS_ALLOWED, OWNER)
    assert (world.clients.flops.votes, world.clients.steps.votes) == ({OWNER.public: 7}, {})
    assert f"already allows {STEPS_ALLOWED} client_steps" in str(
        world.problem(world.limit_vote(OWNER, STEPS_LIMIT, STEPS_ALLOWED))
    )


def test_only_voters_set_limits_that_there_are(world: Clients) -> None:
    assert "unknown limit 'parameters'" in str(world.problem(world.limit_vote(OWNER, PARAMETERS_LIMIT, 5)))
    admitted(world, PEOPLE[7])
    assert "is not a voter" in str(world.problem(world.limit_vote(PEOPLE[7], STEPS_LIMIT, 5)))
    assert world.problem(world.limit_vote(OWNER, STEPS_LIMIT, STEPS_ALLOWED_MAX)) is None
    assert f"at most {STEPS_ALLOWED_MAX}" in str(world.problem(world.limit_vote(OWNER, STEPS_LIMIT, STEPS_ALLOWED_MAX + 1)))


def test_votes_go_with_their_author_s_vote(world: Clients) -> None:
    world.vote_for(FLOPS_LIMIT, 5_000, PEOPLE[3])
    world.vote_for(STEPS_LIMIT, 5_000, PEOPLE[3])
    world.decide(world.tx(PEOPLE[3], "member/resign", ResignAsVoter()), empty_after=2)
    assert not world.clients.flops.votes and not world.clients.steps.votes


def test_limits_stay_when_runs_end_and_keys_change(world: Clients) -> None:
    world.vote_for(STEPS_LIMIT, 7, *PEOPLE[:3])
    world.vote_for(FLOPS_LIMIT, 7, OTHER)
    key = world.open()
    save(world, key)
    world.decide(world.rotation(OWNER, owner := FastSigner("new key of the owner")))
    assert world.run(key).owner == owner.public
    world.decide(world.tx(owner, "client/end", EndRun(key)))
    world.decide(world.tx(owner, "client/expire", SetExpiry(key, "one", 1)), empty_after=1)
    assert world.clients == ClientsState({}, VotedLimit(FLOPS_ALLOWED, {OTHER.public: 7}), VotedLimit(7))


def test_only_a_network_with_client_runs_has_their_limits(world: Clients) -> None:
    assert list(world.rules.voted_limits(world.state)) == [PARAMETERS_LIMIT, FLOPS_LIMIT, STEPS_LIMIT]
    plain = World()
    assert list(plain.rules.voted_limits(plain.state)) == [PARAMETERS_LIMIT]


# Ends --------------------------------------------------------------------------------------------------------------------


def test_a_run_ends_by_its_owner_with_its_last_model(world: Clients) -> None:
    key = world.open()
    world.request(key, 0)
    world.close(key)
    root = world.job(key).model_root
    assert "only the member that opened" in str(world.problem(world.tx(OTHER, "client/end", EndRun(key))))
    world.decide(world.tx(OWNER, "client/end", EndRun(key)))
    assert world.job(key).phase is JobPhase.FINISHED and world.job(key).model_root == root
    assert key not in world.state.module_state(ClientsState).runs
    assert "no run" in str(world.problem(world.step(key, 1)))


@pytest.mark.parametrize("is_expelled", [False, True], ids=["ended by their owner", "ended by its expulsion"])
def test_a_block_may_end_all_runs_of_a_member_while_it_closes_a_round_of_one(world: Clients, is_expelled: bool) -> None:
    keys = sorted(world.open() for _ in range(UNTRAINED_KEPT_MAX + 4))
    world.request(keys[0], 0)
    closing = world.closing(keys[0], dict.fromkeys(world.job(keys[0]).trainers, ACCEPT))
    ends = [world.tx(OWNER, "client/end", EndRun(key), number) for number, key in enumerate(keys, start=1)]
    if is_expelled:
        world.decide(closings=(closing,), evidence=(world.double(OWNER),))
    else:
        world.decide(*ends, closings=(closing,))
    assert world.job(keys[0]).round == 1 and world.job(keys[0]).phase is JobPhase.FINISHED, "the block gives it a model"
    world.decide_empty(1)
    assert len(world.state.jobs.jobs) == UNTRAINED_KEPT_MAX and not world.state.module_state(ClientsState).runs


def test_a_run_whose_job_the_voters_stop_is_over(world: Clients) -> None:
    key = world.open()
    world.decide(*(world.tx(person, "job/stop", StopJob(key)) for person in PEOPLE[1:4]))
    assert world.job(key).phase is JobPhase.FINISHED and not world.state.module_state(ClientsState).runs


@pytest.mark.parametrize("has_round", [False, True])
def test_a_run_ends_also_if_its_owner_rotates_in_the_same_block(world: Clients, has_round: bool) -> None:
    key = world.open()
    if has_round:
        world.request(key, 0)
    new = FastSigner("new key of the owner")
    world.decide(world.tx(OWNER, "client/end", EndRun(key)), world.rotation(OWNER, new, 2))
    assert world.job(key).phase is JobPhase.FINISHED and not world.clients.runs and not world.open_jobs()


def refused_open(world: Clients, owner: FastSigner = OWNER, spec: bytes = SPEC) -> str:
    return str(world.problem(world.tx(owner, "client/open", OpenRun(spec))))


def test_each_member_leaves_half_of_the_places_for_unfinished_runs_to_others(world: Clients) -> None:
    places = ON_REQUEST_MAX
    for owner in PEOPLE[:3]:  # three members together leave places to further ones
        keys = [world.open(owner) for _ in range(places // 2)]
        places -= len(keys)
        assert len(set(keys)) == len(keys) and all(is_waiting(world.job(key)) for key in keys)
        assert f"{ON_REQUEST_MAX - places} of 64 unfinished runs, {len(keys)} of them yours" in refused_open(world, owner)
    assert places == 8
    world.decide(world.tx(owner, "client/end", EndRun(keys[0])))
    world.open(owner)


def test_a_network_has_a_bounded_number_of_unfinished_runs(world: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledger.jobs.ON_REQUEST_MAX", 2)
    first = world.open()
    world.open(OTHER)
    assert "2 jobs on request are unfinished" in refused_open(world, PEOPLE[2])
    world.decide(world.tx(OWNER, "client/end", EndRun(first)))
    world.open(PEOPLE[2])


# Bases -------------------------------------------------------------------------------------------------------------------


def base_of(spec: bytes) -> bytes:
    return spec.partition(b"@")[2][:32]


def test_the_base_stays_while_a_run_or_a_checkpoint_needs_it(world: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledger.jobs.TRAINED_KEPT_MAX", 1)
    spec = world.with_base()
    key, base = world.open(spec=spec), base_of(spec)
    world.with_base()
    world.with_base()
    assert base in world.state.jobs.jobs, "an unfinished run needs it"
    save(world, key)
    world.decide(world.tx(OWNER, "client/end", EndRun(key)))
    world.decide_empty(5)
    assert world.run(key).is_over and base in world.state.jobs.jobs, "its model is needed to sample from the checkpoint"
    world.open(spec=spec)
    world.decide(world.tx(OWNER, "client/expire", SetExpiry(key, "one", 1)))
    (last,) = world.state.module_state(ClientsState).runs
    assert base in world.state.jobs.jobs
    world.decide(world.tx(OWNER, "client/end", EndRun(last)))
    assert base not in world.state.jobs.jobs, "nothing needs it any more, and newer jobs have its place"


def test_runs_that_are_over_keep_a_bounded_number_of_bases(world: Clients) -> None:
    specs = [world.with_base() for _ in range(BASES_ON_REQUEST_MAX)]
    for spec in specs[:4]:
        key = world.open(spec=spec)
        save(world, key)
        world.decide(world.tx(OWNER, "client/end", EndRun(key)))
    assert "4 of 8 models that runs change, 4 of them yours" in refused_open(world, spec=specs[4])
    for spec in specs[:4]:
        world.open(spec=spec)  # bases that stay anyway
    world.open(OTHER, specs[0])
    world.open(spec=specs[4])
    assert "5 of 8 models that runs change, 4 of them yours" in refused_open(world, spec=specs[5])


def test_bases_of_runs_take_no_place_of_those_of_other_jobs(world: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledger.jobs.BASES_MAX", 1)
    specs = [world.with_base() for _ in range(2)]
    for spec in specs:
        world.open(spec=spec)
    world.start(OTHER, specs[0].replace(SPEC, LANGUAGE))
    refused = world.problem(world.tx(OTHER, "job/start", StartJob(specs[1].replace(SPEC, LANGUAGE))))
    assert "other jobs already use 1 models" in str(refused)


# Members that are gone ---------------------------------------------------------------------------------------------------

GONE = PEOPLE[5]


def join(world: Clients) -> None:
    admitted(world, GONE)
    assert "it must register a role before it opens a run" in refused_open(world, GONE), "nobody could retire it"
    world.decide(world.tx(GONE, "member/register", RegisterRoles((TRAINER,))))


def abandoned(world: Clients) -> tuple[bytes, bytes]:
    """Return an idle run of `GONE`, and one that is over; both have a checkpoint."""
    join(world)
    idle, over = world.open(GONE), world.open(GONE)
    for key in (idle, over):
        save(world, key, owner=GONE)
    world.decide(world.tx(GONE, "client/end", EndRun(over)))
    return idle, over


def test_runs_and_checkpoints_go_with_an_expelled_owner(world: Clients) -> None:
    idle, over = abandoned(world)
    kept = world.open(OTHER)
    save(world, kept, owner=OTHER)
    world.request(idle, 0, GONE)
    world.decide(evidence=(world.double(GONE),))
    assert world.state.module_state(ClientsState).runs.keys() == {kept} and world.run(kept).checkpoints
    for key in (idle, over):
        assert world.job(key).phase is JobPhase.FINISHED and not world.job(key).saved_models
    assert not world.open_jobs() and world.read_back() == world.state


def test_runs_and_checkpoints_go_with_a_retired_owner_until_it_registers_again(world: Clients) -> None:
    idle, over = abandoned(world)
    world.decide(*(world.tx(person, "member/retire", RetireMember(GONE.public, False, FAR_MS)) for person in PEOPLE[:3]))
    assert world.state.members.members[GONE.public].retired is not None
    assert not world.state.module_state(ClientsState).runs and world.job(idle).phase is JobPhase.FINISHED
    assert not world.job(idle).saved_models and not world.job(over).saved_models
    assert "it must register a role" in refused_open(world, GONE)
    world.decide(world.tx(GONE, "member/register", RegisterRoles((TRAINER,))))
    world.open(GONE)


def test_runs_of_a_voter_stay_while_its_vote_waits_for_its_new_key() -> None:
    world = Clients(voters=5, trainers=3)
    owners = PEOPLE[3:5]  # they have no role
    keys = [world.open(owner) for owner in owners]
    for key, owner in zip(keys, owners, strict=True):
        save(world, key, owner=owner)
    new = [FastSigner(f"new key {number}") for number in range(2)]
    world.decide(*map(world.rotation, owners, new))
    assert sum(of.public in world.state.members.upcoming for of in new) == 1, "one vote moves with each block"
    for key, owner in zip(keys, new, strict=True):
        assert is_waiting(world.job(key)) and world.run(key).checkpoints
        assert world.problem(world.tx(owner, "client/open", OpenRun(SPEC))) is None


def test_runs_go_with_an_expelled_voter_although_its_vote_stays_for_a_block(world: Clients) -> None:
    key = world.open(PEOPLE[3])
    world.decide(evidence=tuple(world.double(person) for person in PEOPLE[2:4]))
    assert PEOPLE[3].public in world.state.members.upcoming
    assert world.job(key).phase is JobPhase.FINISHED and not world.clients.runs


def test_a_run_that_opens_in_the_block_that_retires_its_owner_ends_in_the_next_one(world: Clients) -> None:
    join(world)
    votes = [world.tx(person, "member/retire", RetireMember(GONE.public, False, FAR_MS)) for person in PEOPLE[:3]]
    opens = world.tx(GONE, "client/open", OpenRun(SPEC))
    key = job_id(GONE.public, world.rules.open_transaction(opens))
    world.decide(*votes, opens)
    world.decide_empty(1)
    assert world.job(key).phase is JobPhase.FINISHED and not world.state.module_state(ClientsState).runs


# Lost time ---------------------------------------------------------------------------------------------------------------

SLOW_MS, FAST_MS = 60_000, 5_000  # length of a round without a proposal, and of a round of the other job


class Saboteur:
    """A gateway that withholds the bodies of its steps beside a job that trains. Each of its rounds lasts for a minute."""

    def __init__(self, world: Clients, ends: tuple[str, type] | None = None, runs: int = 3) -> None:
        """`ends` is the transaction that ends each run during its round. None: the rounds close, and accept nothing."""
        self.world, self.ends = world, ends
        self.trains = world.start(OTHER, LANGUAGE + b":100000")
        self.keys = [world.open() for _ in range(runs)]
        self.lost_ms = self.rounds = 0

    def request(self) -> None:
        for key in self.keys:
            if self.world.run(key).open_step is None:
                self.world.request(key, self.world.run(key).next_step)

    def play(self) -> None:
        """Close the open round: that of the other job, or one of the gateway's."""
        world, (key,) = self.world, self.world.open_jobs()
        if key == self.trains:
            world.block_ms = FAST_MS
            world.close(key)
            self.rounds += 1
        elif self.ends is not None:
            world.block_ms = SLOW_MS
            world.decide(world.tx(OWNER, self.ends[0], self.ends[1](key)))
            world.block_ms = 1
            self.keys[self.keys.index(key)] = world.open()
            self.lost_ms += SLOW_MS
        else:
            world.block_ms = SLOW_MS
            world.close(key, REPLAY)
            self.lost_ms += SLOW_MS
        world.block_ms = 1


@pytest.mark.parametrize("ends", [None, ("client/end", EndRun), ("job/stop", StopJob)], ids=["closed", "ended", "stopped"])
def test_rounds_that_accept_nothing_take_a_tenth_of_the_time_from_a_job_that_trains(
    world: Clients, ends: tuple[str, type] | None
) -> None:
    saboteur, start = Saboteur(world, ends), world.state.time_ms
    for _ in range(300):
        saboteur.request()
        saboteur.play()
        passed = world.state.time_ms - start
        assert saboteur.lost_ms <= LOST_MS_MAX + passed / LOST_PART + SLOW_MS
    assert saboteur.rounds > 280 and saboteur.lost_ms > 3 * SLOW_MS, "its steps have their turns, too"


def late_run(world: Clients) -> tuple[Saboteur, bytes]:
    """Return a gateway with too much lost time, and its only run, while the other job's round is open."""
    saboteur = Saboteur(world, runs=1)
    for _ in range(6):
        saboteur.request()
        saboteur.play()
    assert saboteur.lost_ms == 3 * SLOW_MS and world.open_jobs() == {saboteur.trains}
    return saboteur, saboteur.keys[0]


def test_a_late_step_begins_in_the_block_that_ends_the_other_job(world: Clients) -> None:
    saboteur, key = late_run(world)
    saboteur.request()
    saboteur.play()
    assert world.open_jobs() == {saboteur.trains}
    world.decide(world.tx(OTHER, "job/stop", StopJob(saboteur.trains)))
    assert world.open_jobs() == {key}, "no later block might come"


def test_a_late_step_begins_with_the_last_round_of_the_other_job_unless_one_is_queued(world: Clients) -> None:
    saboteur, key = late_run(world)
    saboteur.request()
    queued = world.start(OTHER, LANGUAGE + b":1")
    world.decide(world.tx(OTHER, "job/stop", StopJob(saboteur.trains)))
    assert world.open_jobs() == {queued}
    world.close(queued)
    assert world.job(queued).phase is JobPhase.FINISHED and world.open_jobs() == {key}


@pytest.mark.parametrize("holds_last", [False, True])
def test_a_late_step_does_not_wait_for_a_job_that_another_module_holds(holds_last: bool) -> None:
    world = Clients(holds_last=holds_last)
    saboteur, key = late_run(world)
    world.hold(saboteur.trains)
    saboteur.request()
    world.close(saboteur.trains)
    world.decide_empty(1)
    assert world.job(saboteur.trains).phase is JobPhase.PAUSED and world.open_jobs() == {key}
    close_empty(world, key)
    world.decide_empty(1)
    assert world.open_jobs() == {key} and world.run(key).open_step is not None


def test_steps_of_other_members_come_before_a_late_one_and_do_not_wait_longer(world: Clients) -> None:
    saboteur, _ = late_run(world)
    saboteur.request()
    other = world.open(PEOPLE[2])
    world.request(other, 0, PEOPLE[2])
    saboteur.play()
    assert world.open_jobs() == {other}
    world.close(other)
    assert world.open_jobs() == {saboteur.trains}


@pytest.mark.parametrize("rotates", [False, True])
def test_an_absent_trainer_has_one_round_of_a_run_and_does_not_make_its_owner_late(
    rotates: bool, world: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, absent = PEOPLE[3], {PEOPLE[0].public}  # the owner votes, and does not train
    world.start(OTHER, LANGUAGE + b":100000")
    key, lost = world.open(owner), 0
    for number in range(10):
        world.request(key, number, owner)
        while world.run(key).open_step is not None:
            (running,) = world.open_jobs()
            is_lost = running == key and not absent.isdisjoint(world.job(key).trainers)
            world.block_ms, lost = (SLOW_MS, lost + 1) if is_lost else (FAST_MS, lost)
            if is_lost:
                close_empty(world, key)
                if rotates and len(absent) == 1:
                    absent.add(rotated(world, PEOPLE[0], "new key of the absent trainer", monkeypatch).public)
            else:
                world.close(running)
        last = world.run(key).last
        assert last is not None and last.is_accepted
    assert lost == 1


def test_lost_time_is_forgiven_and_follows_the_key_of_the_member(world: Clients) -> None:
    _, key = late_run(world)
    new = FastSigner("next key of the gateway")
    world.decide(world.rotation(OWNER, new))
    (owner,) = world.state.module_state(ClientsState).lost
    assert owner == new.public and world.read_back() == world.state
    world.block_ms = 3 * SLOW_MS * LOST_PART
    world.decide_empty(2)
    assert not world.state.module_state(ClientsState).lost
    assert world.run(key).owner == new.public


def test_the_time_of_a_round_counts_from_its_opening_to_its_end_whatever_blocks_come_between(world: Clients) -> None:
    key = world.open()
    world.request(key, 0)
    for attempt in range(1, 3):
        world.block_ms = 20_000
        world.decide_empty(2)
        world.close(key, REPLAY)
        world.block_ms = 0
        world.decide_empty(1)
        (lost,) = world.state.module_state(ClientsState).lost.values()
        since_first = (attempt - 1) * 60_000
        assert lost.ms == attempt * 60_000 - since_first // LOST_PART


def test_an_outage_during_a_round_does_not_hold_up_later_steps_for_days(world: Clients) -> None:
    key = world.open()
    world.request(key, 0)
    world.block_ms = 24 * 3_600_000
    world.close(key, REPLAY)
    world.block_ms = 1
    world.decide_empty(1)
    (lost,) = world.state.module_state(ClientsState).lost.values()
    assert lost.ms == 30 * 60_000


def test_an_accepted_step_loses_no_time(world: Clients) -> None:
    key = world.open()
    world.request(key, 0)
    world.block_ms = 10 * LOST_MS_MAX
    world.close(key)
    assert not world.state.module_state(ClientsState).lost


def lost_ms(world: Clients, owner: FastSigner = OWNER) -> int:
    """Return the lost time of a member after one further block, with the round that the last one ended."""
    world.block_ms = 0
    world.decide_empty(1)
    lost = world.clients.lost.get(owner.public)
    return lost.ms if lost is not None else 0


@pytest.mark.parametrize("is_expelled", [False, True])
def test_a_member_that_leaves_during_its_round_loses_the_time(world: Clients, is_expelled: bool) -> None:
    join(world)
    key = world.open(GONE)
    world.request(key, 0, GONE)
    world.block_ms = SLOW_MS
    if is_expelled:
        world.decide(evidence=(world.double(GONE),))
    else:
        world.decide(world.tx(GONE, "member/register", RegisterRoles(())))
    assert not world.clients.runs and lost_ms(world, GONE) == SLOW_MS


@pytest.mark.parametrize("kind", ENDS)
def test_the_end_of_a_step_that_waits_for_its_round_loses_no_time(world: Clients, kind: str) -> None:
    world.start(OTHER, LANGUAGE + b":9")
    key = world.open()
    world.block_ms = SLOW_MS
    world.request(key, 0)
    world.decide_empty(1)
    world.decide(world.tx(OWNER, kind, ENDS[kind](key)))
    assert not lost_ms(world)


@pytest.mark.parametrize("verdict", [ACCEPT, REPLAY])
@pytest.mark.parametrize("kind", ENDS)
def test_a_run_that_ends_as_its_round_closes_loses_the_time_if_nothing_is_accepted(
    world: Clients, kind: str, verdict: Verdict
) -> None:
    key = world.open()
    world.request(key, 0)
    world.block_ms = SLOW_MS
    world.close(key, verdict, world.tx(OWNER, kind, ENDS[kind](key)))
    assert lost_ms(world) == (SLOW_MS if verdict is REPLAY else 0)


def test_a_run_is_a_job_on_request(world: Clients) -> None:
    assert "a run is a job of the objective" in str(world.problem(world.tx(OWNER, "client/open", OpenRun(LANGUAGE))))
