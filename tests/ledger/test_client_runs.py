"""Runs of clients: a round opens for a requested step alone, and takes turns with other jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from clients.ledger import clients_module
from clients.ledger.clients_module import (
    ATTEMPTS_MAX,
    RUNS_OF_MEMBER_MAX,
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
from ledger.core.module import BlockContext, DecodedTransaction, Module, StateChange, StateReader
from ledger.jobs import UNTRAINED_KEPT_MAX, Job, JobHold, JobPhase, JobsModule, StartJob, StopJob, job_id
from ledger.snapshots.snapshot_server import models_in_state
from protocol import codec
from protocol.codec import Digest
from protocol.identity import Signed
from protocol.verdicts import Verdict
from tests.ledger.world import BY_KEY, CLIENT, LANGUAGE, PEOPLE, SCRATCH, PlainJobs, World
from tests.sim.keys import FastSigner

OWNER, OTHER = PEOPLE[0], PEOPLE[1]
SPEC = CLIENT + b":1000"
ADAMW = OptimizerStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
ACCEPT, REPLAY = Verdict.ACCEPT, Verdict.REPLAY


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


class Clients(World):
    def __init__(self, voters: int = 4, trainers: int = 3) -> None:
        super().__init__(voters, trainers, modules=(HoldsModule(), ClientsModule(PlainJobs())))

    def hold(self, *jobs: bytes) -> None:
        self.decide(self.tx(PEOPLE[2], "holds/set", Holds(jobs)))

    def open(self, owner: FastSigner = OWNER) -> bytes:
        signed = self.tx(owner, "client/open", OpenRun(SPEC))
        self.decide(signed)
        return job_id(owner.public, self.rules.open_transaction(signed))

    def step(self, key: bytes, number: int, owner: FastSigner = OWNER, ahead: int = 1) -> Signed:
        return self.tx(owner, "client/step", RequestStep(key, StepBrief(number, bytes([number]) * 32, 100, ADAMW)), ahead)

    def request(self, key: bytes, number: int, owner: FastSigner = OWNER) -> None:
        self.decide(self.step(key, number, owner))

    def run(self, key: bytes) -> ClientRun:
        return self.state.module_state(ClientsState).runs[key]

    def close(self, key: bytes, verdict: Verdict = ACCEPT, *transactions: Signed) -> None:
        """Close the open round of a job with this verdict on all its trainers."""
        self.decide(*transactions, closings=(self.closing(key, dict.fromkeys(self.job(key).trainers, verdict)),))

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


def test_saved_models_are_bounded_for_each_run_and_member_and_in_bytes(world: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients_module, "SAVED_MODELS_MAX", 2)
    monkeypatch.setattr(clients_module, "SAVING_RUNS_OF_MEMBER_MAX", 2)
    monkeypatch.setattr(clients_module, "SAVING_MAX", 3)
    keys = [world.open() for _ in range(3)]

    def problem(key: bytes, owner: FastSigner = OWNER) -> str:
        return str(world.problem(world.tx(owner, "client/save", SaveModel(key, "last", 0))))

    save(world, keys[0])
    save(world, keys[0], "two")
    assert "has 2 checkpoints, the maximum" in problem(keys[0])
    save(world, keys[0], "two")
    save(world, keys[1])
    assert "2 of your runs have checkpoints" in problem(keys[2])
    others = [world.open(owner) for owner in (OTHER, PEOPLE[2])]
    save(world, others[0], owner=OTHER)
    assert "3 runs of this network have checkpoints" in problem(others[1], PEOPLE[2])
    monkeypatch.setattr(clients_module, "SAVED_BYTES_OF_MEMBER_MAX", -1)
    assert "0.0 GB of checkpoints would be kept for you" in problem(keys[1])


def test_nothing_can_be_done_with_a_run_in_the_block_that_opens_it(world: Clients) -> None:
    opens = world.tx(OWNER, "client/open", OpenRun(SPEC))
    key = job_id(OWNER.public, world.rules.open_transaction(opens))
    for kind, content in (("client/end", EndRun(key)), ("client/save", SaveModel(key, "one", 0))):
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


def test_a_run_whose_job_the_voters_stop_is_over(world: Clients) -> None:
    key = world.open()
    world.decide(*(world.tx(person, "job/stop", StopJob(key)) for person in PEOPLE[1:4]))
    assert world.job(key).phase is JobPhase.FINISHED and not world.state.module_state(ClientsState).runs


def test_a_member_has_a_bounded_number_of_runs(world: Clients) -> None:
    keys = [world.open() for _ in range(RUNS_OF_MEMBER_MAX)]
    assert len(set(keys)) == RUNS_OF_MEMBER_MAX and all(is_waiting(world.job(key)) for key in keys)
    assert "the maximum: end one" in str(world.problem(world.tx(OWNER, "client/open", OpenRun(SPEC))))
    world.decide(world.tx(OWNER, "client/end", EndRun(keys[0])))
    world.open()


def test_a_network_has_a_bounded_number_of_unfinished_runs(world: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledger.jobs.ON_REQUEST_MAX", 2)
    first = world.open()
    world.open(OTHER)
    assert "2 jobs on request are unfinished" in str(world.problem(world.tx(PEOPLE[2], "client/open", OpenRun(SPEC))))
    world.decide(world.tx(OWNER, "client/end", EndRun(first)))
    world.open(PEOPLE[2])


def test_a_run_is_a_job_on_request(world: Clients) -> None:
    assert "a run is a job of the objective" in str(world.problem(world.tx(OWNER, "client/open", OpenRun(LANGUAGE))))
