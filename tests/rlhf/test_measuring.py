"""A peer measures the last models of jobs, and reports on the reward models that plans wait for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peer import features
from peer.daemon.daemon import restart_on_fault
from protocol.errors import UserError
from rlhf.api.rlhf_rpc_handler import RlhfRpcHandler
from rlhf.ledger import tuning_plans
from rlhf.pair_accuracy import PairAccuracy
from rlhf.rpc import StageView
from rlhf.services import FinalModelEvaluator
from storage.ledger_store import LedgerStore
from tests.ledger.world import PEOPLE
from tests.rlhf.desk import WorldDesk
from tests.rlhf.test_plans import NOVICE, Tuned
from training.worker_protocol import WorkerFailed

VOTER = PEOPLE[1]


class Desk(WorldDesk):
    """Of one member of the world; what it submits is decided at once."""

    def __init__(self, world: Tuned, me: bytes = VOTER.public, problem: str = "", halves: int = 136) -> None:
        super().__init__(world, me)
        self.problem, self.halves = problem, halves
        self.api: Any = SimpleNamespace(measure_last_model=self.measure)
        self.measured: list[tuple[str, bool]] = []
        self.refused = 0
        self.faults: list[Exception] = []  # of the next measurements

    async def measure(self, job: str, asked: bool) -> StageView:
        self.measured.append((job, asked))
        await trio.lowlevel.checkpoint()
        if asked and self.faults:
            raise self.faults.pop()
        if self.problem:
            raise UserError(self.problem)
        return StageView("reward", job, "finished", 2, 2, "", held_out_accuracy=self.halves / 192, held_out_pairs=96)

    async def submit_transaction(self, kind: str, content: Any) -> None:
        assert kind == "rlhf/report-accuracy"
        if self.refused:
            self.refused -= 1
            raise UserError("too many wait")
        person = next(person for person in PEOPLE if person.public == self.me)
        self.world.decide(self.world.tx(person, kind, content))


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    features.register_features()


async def run(desk: Desk, *more: Desk) -> None:
    """All that these peers have to do."""
    async with trio.open_nursery() as nursery:
        for each in (desk, *more):
            nursery.start_soon(FinalModelEvaluator(each).run)
        await trio.sleep(15)
        nursery.cancel_scope.cancel()


def trained(world: Tuned) -> tuple[bytes, str]:
    key = world.planned(world.begin(ignores_accuracy=False))
    reward = tuning_plans.stage_job_id(key, 0)
    world.close(reward)
    return key, reward.hex()


async def test_voters_measure_a_reward_model_and_the_policy_begins(tmp_path: Path, autojump_clock: MockClock) -> None:
    world = Tuned(tmp_path)
    key, reward = trained(world)
    first, second = Desk(world), Desk(world, PEOPLE[2].public)
    await run(first)
    assert world.plan(key).reports == {VOTER.public: PairAccuracy(136, 96)} and (reward, True) in first.measured
    await run(first, second)
    assert first.measured.count((reward, True)) == 1, "a peer that is started again reports no second time"
    assert tuning_plans.stage_job_id(key, 1) in world.state.jobs.jobs


async def test_a_report_that_was_not_decided_is_made_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    world = Tuned(tmp_path)
    key, _ = trained(world)
    desk = Desk(world)
    desk.refused = 2
    await run(desk)
    assert world.plan(key).reports.keys() == {VOTER.public}


@pytest.mark.parametrize("fault", [UserError("the worker is out of memory"), OSError("the disk is full")])
async def test_a_measurement_that_failed_is_tried_again(tmp_path: Path, fault: Exception, autojump_clock: MockClock) -> None:
    world = Tuned(tmp_path)
    key, _ = trained(world)
    desk = Desk(world)
    desk.faults = [fault]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(restart_on_fault, "the part", FinalModelEvaluator(desk).run, lambda text: None)
        await trio.sleep(15)
        nursery.cancel_scope.cancel()
    assert world.plan(key).reports.keys() == {VOTER.public}


@pytest.mark.parametrize("who", ["no worker", "no voter"])
async def test_other_peers_report_nothing(tmp_path: Path, who: str, autojump_clock: MockClock) -> None:
    world = Tuned(tmp_path)
    world.decide(world.admission(NOVICE))
    key, reward = trained(world)
    desk = Desk(world, NOVICE.public) if who == "no voter" else Desk(world, problem="this peer has no worker")
    await run(desk)
    assert not world.plan(key).reports and ((reward, True) in desk.measured) is (who == "no worker")


async def test_each_finished_job_is_measured_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    world = Tuned(tmp_path)
    key = world.planned()
    reward, policy = (tuning_plans.stage_job_id(key, stage) for stage in range(2))
    desk = Desk(world)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(FinalModelEvaluator(desk).run)
        await trio.sleep(1)
        assert desk.measured == []
        world.close(reward)
        await trio.sleep(1)
        assert desk.measured == [(reward.hex(), False)]
        world.decide()
        world.close(policy)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert desk.measured == [(reward.hex(), False), (policy.hex(), False)]


class Worker:
    """Of one peer: it fails so many times, and then measures."""

    def __init__(self, store: LedgerStore, failures: int) -> None:
        self.store, self.failures, self.asked = store, failures, 0

    async def evaluate_model(self, place: tuple[bytes, int]) -> None:
        self.asked += 1
        if self.asked <= self.failures:
            raise WorkerFailed("out of memory")
        self.store.save_measurements(*place, {"held_out_accuracy": 136 / 192, "held_out_pairs": 96.0, "evaluation_seconds": 1.0})


async def test_a_model_that_the_worker_failed_to_measure_gives_no_figures_and_is_measured_again(tmp_path: Path) -> None:
    world = Tuned(tmp_path)
    _, reward = trained(world)
    store = LedgerStore(tmp_path / "ledger.db", world.chain)
    worker = Worker(store, failures=2)
    models = SimpleNamespace(round_directory=lambda *place: tmp_path)
    peer: Any = SimpleNamespace(state=world.state, store=store, models=models, worker_client=worker, evaluates_models=True)
    peer.make_round_context = lambda job, round, of: (job, round)
    answers = RlhfRpcHandler(peer)
    # Figures of an earlier round are no figures of the last model.
    store.save_measurements(
        bytes.fromhex(reward), 1, {"held_out_accuracy": 0.5, "held_out_pairs": 96.0, "evaluation_seconds": 1.0}
    )
    for asked in (False, True):
        with pytest.raises(UserError, match="cannot be measured: out of memory"):
            await answers.measure_last_model(reward, asked)
    assert (await answers.measure_last_model(reward, True)).held_out_accuracy == 136 / 192
    store.close()
