"""Records of trainers: a trainer whose updates re-executors reject before the vote is suspended for some rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

import pytest

from ledger.jobs import (
    INVALID_UPDATE_ROUNDS,
    INVALID_UPDATES_MAX,
    NO_PROGRESS_ROUNDS,
    SUSPENSION_DOUBLINGS_MAX,
    JobPhase,
    JobsModule,
    TrainerRecord,
)
from protocol.verdicts import Verdict
from rounds.round_state import RoundResult
from tests.ledger.world import LANGUAGE, NEW, PEOPLE, PlainJobs, World

ACCEPT, NORM, REPLAY, UNJUDGED = Verdict.ACCEPT, Verdict.NORM, Verdict.REPLAY, Verdict.UNJUDGED
SUSPENSION = 7  # rounds
DEFAULT_SUSPENSION = PlainJobs().terms_of_spec(LANGUAGE).suspension_rounds
LIAR = PEOPLE[1].public
NO_RECORD = TrainerRecord()


def after(rounds: Iterable[int], record: TrainerRecord = NO_RECORD) -> TrainerRecord:
    for number in rounds:
        record = record.after_invalid_update(number, SUSPENSION)
    return record


def test_three_false_updates_within_twenty_rounds_suspend_a_trainer() -> None:
    assert (INVALID_UPDATES_MAX, INVALID_UPDATE_ROUNDS) == (3, 20)
    assert after([0, 10]) == TrainerRecord(invalid_update_rounds=(0, 10))
    assert after([0, 10, 19]) == TrainerRecord(suspended_until=20 + SUSPENSION, suspensions=1)
    assert after([0, 10, 20]) == TrainerRecord(invalid_update_rounds=(10, 20)), "the first one is too old"


def test_each_suspension_is_twice_as_long_as_the_last_one() -> None:
    record, lengths = NO_RECORD, []
    for _ in range(SUSPENSION_DOUBLINGS_MAX + 3):
        last = record.suspended_until + 2
        record = after(range(last - 2, last + 1), record)
        lengths.append((record.suspended_until - last - 1) // SUSPENSION)
    assert lengths == [2 ** min(of, SUSPENSION_DOUBLINGS_MAX) for of in range(SUSPENSION_DOUBLINGS_MAX + 3)]


# Closings ---------------------------------------------------------------------------------------------------------------


def started(rounds: int = 200) -> tuple[World, bytes]:
    """Start a job with four voters, three of which train and re-execute."""
    world = World()
    return world, world.start(spec=b"%b:%d" % (LANGUAGE, rounds))


def close(
    world: World, key: bytes, bad: Mapping[bytes, Verdict], away: Set[bytes] = frozenset(), rejecting: int = 9, times: int = 1
) -> None:
    """Close rounds in which these proposals are refused: `rejecting` re-executors vouch for that, the others do not judge."""
    for _ in range(times):
        job, terms = world.job(key), world.job(key).round_terms(key)
        verdicts = {trainer: bad.get(trainer, ACCEPT) for trainer in job.trainers if trainer not in away}
        says = {
            voter: {
                trainer: verdict if verdict is ACCEPT or place < rejecting else UNJUDGED
                for trainer, verdict in verdicts.items()
                if trainer != voter
            }
            for place, voter in enumerate(sorted(terms.reexecutors, key=lambda voter: (voter in bad, voter)))
        }
        world.vouch(key, {voter: said for voter, said in says.items() if said})
        world.cast(key, verdicts)
        closing = world.ledger.rounds[key].certificate()
        assert closing is not None and not closing.cut_offs
        world.decide(closings=(closing,))
        assert world.job(key).round == job.round + 1


def lie(world: World, key: bytes, times: int, reason: Verdict = REPLAY) -> None:
    close(world, key, {LIAR: reason}, times=times)


def test_a_trainer_whose_updates_are_found_false_does_not_train_for_a_while() -> None:
    world, key = started()
    lie(world, key, INVALID_UPDATES_MAX - 1)
    assert LIAR in world.job(key).trainers and world.job(key).trainer_records == {
        LIAR: TrainerRecord(invalid_update_rounds=(0, 1))
    }
    lie(world, key, 1)
    for _ in range(DEFAULT_SUSPENSION):
        job = world.job(key)
        assert job.suspended_trainers == {LIAR: 3 + DEFAULT_SUSPENSION}
        assert LIAR not in job.trainers and LIAR in job.reexecutors, "it may still re-execute"
        close(world, key, {})
    assert LIAR in world.job(key).trainers and not world.job(key).suspended_trainers
    lie(world, key, INVALID_UPDATES_MAX)
    assert world.job(key).suspended_trainers == {LIAR: world.job(key).round + 2 * DEFAULT_SUSPENSION}


def test_what_no_more_than_f_re_executors_reject_counts_for_nothing() -> None:
    """f liars may reject honest work, and other honest re-executors may have left it unjudged."""
    world, key = started()
    close(world, key, {LIAR: REPLAY}, rejecting=1, times=2 * INVALID_UPDATES_MAX)
    assert world.job(key).rejected[LIAR] and world.job(key).trainer_records == {}


@pytest.mark.parametrize("reason", [NORM, Verdict.STALE, Verdict.COMMITMENT, Verdict.MALFORMED])
def test_what_a_cheap_check_refuses_costs_no_re_execution_and_suspends_nobody(reason: Verdict) -> None:
    """Honest updates can exceed the norm bound too, where training diverges."""
    world, key = started()
    lie(world, key, 2 * INVALID_UPDATES_MAX, reason)
    assert world.job(key).rejected[LIAR] == {reason.label: 2 * INVALID_UPDATES_MAX} and world.job(key).trainer_records == {}


def test_reasons_of_the_objective_are_found_by_re_execution() -> None:
    world, key = started()
    lie(world, key, INVALID_UPDATES_MAX, Verdict.OWN_0)
    assert world.job(key).suspended_trainers.keys() == {LIAR}


def test_suspended_trainers_train_where_no_other_update_is_accepted() -> None:
    """The others may be absent, and then the round would never close. Their suspension becomes no longer by that."""
    world, key = started()
    everybody = world.job(key).trainers
    close(world, key, dict.fromkeys(everybody, REPLAY), times=NO_PROGRESS_ROUNDS - 1)
    assert world.job(key).trainers == everybody == world.job(key).awaited and not world.job(key).suspended_trainers
    assert all(record.suspensions == 1 for record in world.job(key).trainer_records.values())
    close(world, key, {LIAR: REPLAY})
    assert world.job(key).trainers == everybody, "both others are suspended, too, so who may train?"


@pytest.mark.parametrize("away", [frozenset[bytes](), frozenset({PEOPLE[0].public})])
def test_a_trainer_that_is_away_does_not_keep_suspended_ones_from_training(away: frozenset[bytes]) -> None:
    world, key = started()
    everybody = world.job(key).trainers
    bad = dict.fromkeys(set(everybody) - away, REPLAY)
    close(world, key, bad, away, times=INVALID_UPDATES_MAX)
    assert world.job(key).trainers == everybody
    close(world, key, bad, away)


def test_a_trainer_that_was_suspended_is_not_awaited_when_it_comes_back() -> None:
    """Otherwise the others would wait for a liar until T1, and fewer would re-execute its update at once."""
    world, key = started()
    lie(world, key, INVALID_UPDATES_MAX)
    close(world, key, {}, times=DEFAULT_SUSPENSION)
    job = world.job(key)
    assert LIAR in job.trainers and set(job.awaited) == set(job.trainers) - {LIAR}


def test_somebody_is_awaited_when_the_only_awaited_trainer_is_suspended_after_an_audit() -> None:
    world, key = started()
    job = replace(world.job(key), awaited=(LIAR,))
    nothing = RoundResult({}, {}, frozenset(job.trainers), frozenset(), {}, frozenset(), frozenset())
    opened = JobsModule(PlainJobs()).open_round(job, world.state.members, 9, nothing, {LIAR: 50})
    assert opened.awaited == opened.trainers == tuple(sorted(set(job.trainers) - {LIAR}))


def test_old_false_updates_are_forgotten() -> None:
    world, key = started()
    lie(world, key, 1)
    for _ in range(INVALID_UPDATE_ROUNDS - 1):
        assert world.job(key).trainer_records
        close(world, key, {})
    assert world.job(key).trainer_records == {}


def test_a_paused_job_shows_who_is_suspended() -> None:
    world, key = started()
    lie(world, key, INVALID_UPDATES_MAX)
    assert replace(world.job(key), phase=JobPhase.PAUSED, trainers=(LIAR,)).suspended_trainers.keys() == {LIAR}


def test_a_suspension_follows_the_next_key_of_its_member() -> None:
    world, key = started()
    lie(world, key, INVALID_UPDATES_MAX - 1)
    world.decide(world.rotation(PEOPLE[1], NEW), empty_after=4)  # until the new key votes
    close(world, key, {})
    assert world.job(key).trainer_records == {NEW.public: TrainerRecord(invalid_update_rounds=(0, 1))}
    close(world, key, {NEW.public: REPLAY})
    assert world.job(key).suspended_trainers.keys() == {NEW.public} and NEW.public not in world.job(key).trainers
