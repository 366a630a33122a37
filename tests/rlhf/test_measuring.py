"""A peer measures the last models of jobs and reports: accuracy of a reward model, its interval and its calibration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peer.daemon.daemon import restart_on_fault
from protocol.errors import UserError
from rlhf.api.rlhf_rpc_handler import RlhfRpcHandler
from rlhf.ledger import tuning_plans
from rlhf.pair_accuracy import MEASURED_PAIRS_MAX, PairAccuracy, agreed_accuracy, can_beat_chance
from rlhf.pytorch.supervised_objectives import BINS, calibration_error
from rlhf.rpc import StageView
from rlhf.services import FinalModelEvaluator
from storage.ledger_store import LedgerStore
from tests.ledger.world import PEOPLE
from tests.rlhf.seat import WorldDesk
from tests.rlhf.test_plans import NOVICE, Tuned
from training.worker_protocol import WorkerFailed

VOTER = PEOPLE[1]


class Desk(WorldDesk):
    """The desk of one member of the world: its transactions are decided at once."""

    def __init__(self, world: Tuned, me: bytes = VOTER.public, problem: str = "", halves: int = 136) -> None:
        super().__init__(world, me)
        self.problem, self.halves = problem, halves
        self.api: Any = SimpleNamespace(measure_last_model=self.measure)
        self.measured: list[tuple[str, bool]] = []
        self.refused = 0
        self.faults: list[Exception] = []  # errors of the next measurements

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


async def run(desk: Desk, *more: Desk) -> None:
    """Run all pending work of these peers."""
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


@pytest.fixture
def world(tmp_path: Path) -> Tuned:
    return Tuned(tmp_path)


async def test_voters_measure_a_reward_model_and_the_policy_begins(autojump_clock: MockClock, world: Tuned) -> None:
    key, reward = trained(world)
    first, second = Desk(world), Desk(world, PEOPLE[2].public)
    await run(first)
    assert world.plan(key).reports == {VOTER.public: PairAccuracy(136, 96)} and (reward, True) in first.measured
    await run(first, second)
    assert first.measured.count((reward, True)) == 1, "a peer that is started again reports no second time"
    assert tuning_plans.stage_job_id(key, 1) in world.state.jobs.jobs


async def test_a_report_that_was_not_decided_is_made_again(autojump_clock: MockClock, world: Tuned) -> None:
    key, _ = trained(world)
    desk = Desk(world)
    desk.refused = 2
    await run(desk)
    assert world.plan(key).reports.keys() == {VOTER.public}


@pytest.mark.parametrize("fault", [UserError("the worker is out of memory"), OSError("the disk is full")])
async def test_a_measurement_that_failed_is_tried_again(fault: Exception, autojump_clock: MockClock, world: Tuned) -> None:
    key, _ = trained(world)
    desk = Desk(world)
    desk.faults = [fault]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(restart_on_fault, "the part", FinalModelEvaluator(desk).run, lambda text: None)
        await trio.sleep(15)
        nursery.cancel_scope.cancel()
    assert world.plan(key).reports.keys() == {VOTER.public}


@pytest.mark.parametrize("who", ["no worker", "no voter"])
async def test_other_peers_report_nothing(who: str, autojump_clock: MockClock, world: Tuned) -> None:
    world.decide(world.admission(NOVICE))
    key, reward = trained(world)
    desk = Desk(world, NOVICE.public) if who == "no voter" else Desk(world, problem="this peer has no worker")
    await run(desk)
    assert not world.plan(key).reports and ((reward, True) in desk.measured) is (who == "no worker")


async def test_each_finished_job_is_measured_once(autojump_clock: MockClock, world: Tuned) -> None:
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
    """The worker of one peer: it fails `failures` times, and then measures."""

    def __init__(self, store: LedgerStore, failures: int) -> None:
        self.store, self.failures, self.asked = store, failures, 0

    async def evaluate_model(self, place: tuple[bytes, int]) -> None:
        self.asked += 1
        if self.asked <= self.failures:
            raise WorkerFailed("out of memory")
        self.store.save_measurements(*place, {"held_out_accuracy": 136 / 192, "held_out_pairs": 96.0, "evaluation_seconds": 1.0})


async def test_a_model_that_the_worker_failed_to_measure_gives_no_figures_and_is_measured_again(
    tmp_path: Path, world: Tuned
) -> None:
    _, reward = trained(world)
    store = LedgerStore(tmp_path / "ledger.db", world.chain)
    worker = Worker(store, failures=2)
    models = SimpleNamespace(round_directory=lambda *place: tmp_path)
    peer: Any = SimpleNamespace(state=world.state, store=store, models=models, worker_client=worker, evaluates_models=True)
    peer.make_round_context = lambda job, round, of: (job, round)
    answers = RlhfRpcHandler(peer)
    # Figures of an earlier round do not describe the last model.
    store.save_measurements(
        bytes.fromhex(reward), 1, {"held_out_accuracy": 0.5, "held_out_pairs": 96.0, "evaluation_seconds": 1.0}
    )
    for asked in (False, True):
        with pytest.raises(UserError, match="cannot be measured: out of memory"):
            await answers.measure_last_model(reward, asked)
    assert (await answers.measure_last_model(reward, True)).held_out_accuracy == 136 / 192
    store.close()


def test_an_accuracy_says_of_how_many_pairs_it_is() -> None:
    assert str(PairAccuracy(136, 96)) == "0.71 of 96 pairs, interval 0.61–0.79"
    assert str(PairAccuracy(0, 0)) == "0.50 of 0 pairs, interval 0.00–1.00"
    assert PairAccuracy.from_share(0.75, 2) == PairAccuracy(3, 2), "equal scores count half"


@pytest.mark.parametrize("pairs", [1, 2, 3, 4, 5, 10, 33, 96, 600, MEASURED_PAIRS_MAX])
def test_a_model_is_better_than_chance_where_its_interval_lies_above_a_half(pairs: int) -> None:
    for halves in range(2 * pairs + 1):
        found = PairAccuracy(halves, pairs)
        low, high = found.interval
        assert found.is_better_than_chance is (low > 0.5) and 0 <= low <= found.share <= high <= 1


def test_few_pairs_can_show_nothing() -> None:
    assert [pairs for pairs in range(8) if can_beat_chance(pairs)] == [4, 5, 6, 7] and can_beat_chance(10**6)


def test_one_liar_of_four_voters_decides_nothing_and_moves_no_median() -> None:
    voters, good, bad = [bytes([n]) for n in range(4)], PairAccuracy(150, 100), PairAccuracy(110, 100)
    assert agreed_accuracy({voters[0]: bad}, voters) is None
    assert agreed_accuracy({voters[0]: bad, voters[1]: good}, voters) is None
    assert agreed_accuracy({voters[0]: bad, voters[1]: good, voters[2]: good}, voters) == good
    assert agreed_accuracy({voters[0]: PairAccuracy(200, 100), voters[1]: good}, voters) == good
    assert agreed_accuracy({bytes([9]): good, voters[1]: good}, voters) is None, "one that votes no more"
    assert agreed_accuracy({b"a": good}, [b"a"]) == good


def error(chances: list[float], p: list[float]) -> float:
    return calibration_error(np.array(chances), np.array(p))


@pytest.mark.parametrize(
    ("chances", "p", "expected"),
    [
        ([0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], [1.0] * 9 + [0.0], 0.0),  # right in nine of ten, as it predicts
        ([0.95, 0.95], [1.0, 0.0], 0.45),  # overconfident
        ([0.55], [1.0], 0.45),  # underconfident
        ([0.5, 0.5], [1.0, 1.0], 0.0),  # no preference, and the order of the responses has no effect
        ([0.7], [0.7], 0.0),  # people are as unsure
        ([0.95, 0.65], [1.0, 0.0], (0.05 + 0.65) / 2),  # separate bins
        ([1.0, 0.0], [1.0, 0.0], 0.0),
    ],
)
def test_the_error_is_how_far_what_is_said_is_from_what_is_right(chances: list[float], p: list[float], expected: float) -> None:
    assert error(chances, p) == pytest.approx(expected)


def test_the_order_of_responses_changes_nothing() -> None:
    draw = np.random.default_rng(0)
    chances, p, turned = draw.random(100), draw.random(100), draw.random(100) < 0.5
    swapped = calibration_error(np.where(turned, 1 - chances, chances), np.where(turned, 1 - p, p))
    assert calibration_error(chances, p) == pytest.approx(swapped)


def test_bins_are_the_usual_ones_where_both_orders_are_written_out() -> None:
    """The definition: the weighted mean of the gaps of ten bins."""
    draw = np.random.default_rng(1)
    chances, p = draw.random(200), draw.random(200)
    said, right = np.concatenate([chances, 1 - chances]), np.concatenate([p, 1 - p])
    expected = 0.0
    for number in range(BINS):
        inside = (said >= number / BINS) & (said < (number + 1) / BINS)
        if inside.any():
            expected += inside.mean() * abs(said[inside].mean() - right[inside].mean())
    assert calibration_error(chances, p) == pytest.approx(expected)
