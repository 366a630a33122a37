"""Records of re-executors: for some rounds, silent ones are called last and those with false vouches are suspended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from ledger.jobs import (
    CALLED_LAST_ROUNDS,
    MISSED_VOUCHES_MAX,
    WRONG_VOUCH_ROUNDS,
    WRONG_VOUCHES_MAX,
    Job,
    VouchRecord,
    _by_present_key,
    _vouch_severity,
)
from protocol.verdicts import Verdict
from rounds.vouch_set import reexecutor_order
from tests.ledger.world import LANGUAGE, NEW, PEOPLE, PlainJobs, World

ACCEPT, REPLAY, UNJUDGED = Verdict.ACCEPT, Verdict.REPLAY, Verdict.UNJUDGED
SUSPENSION = 7  # rounds
DEFAULT_SUSPENSION = PlainJobs().terms_of_spec(LANGUAGE).suspension_rounds
LIAR, OTHERS = PEOPLE[1].public, (PEOPLE[0].public, PEOPLE[2].public)
NO_RECORD = VouchRecord()


def after(rounds: Iterable[int], what: str, record: VouchRecord = NO_RECORD) -> VouchRecord:
    """Return the record after silent, false or true vouches in these rounds."""
    for number in rounds:
        record = record.after_round(number, what == "false", what == "silent", SUSPENSION)
    return record


# Pure rules -------------------------------------------------------------------------------------------------------------


def test_three_silences_in_a_row_call_a_re_executor_last_for_twenty_rounds() -> None:
    assert (MISSED_VOUCHES_MAX, CALLED_LAST_ROUNDS) == (3, 20)
    assert after([5, 6], "silent") == VouchRecord(missed_vouches=2)
    assert after([5, 6, 7], "silent") == VouchRecord(assigned_last_until=28), "rounds 8 to 27"
    assert after([5, 6, 900], "silent").assigned_last_until == 921, "in a row of the rounds in which it was called"


def test_a_vouch_between_silences_resets_their_count() -> None:
    twice = after([0, 1], "silent")
    assert after([2], "true", twice) == VouchRecord() == after([], "true")
    assert after([3, 4], "silent", after([2], "true", twice)) == VouchRecord(missed_vouches=2)


def test_a_re_executor_that_stays_silent_is_called_last_again_and_again() -> None:
    assert after(range(6), "silent") == VouchRecord(assigned_last_until=5 + 21)
    assert after([8], "true", after(range(3), "silent")).assigned_last_until == 23, "one vouch does not end it"


def test_three_false_vouches_within_twenty_rounds_suspend_a_re_executor() -> None:
    assert (WRONG_VOUCHES_MAX, WRONG_VOUCH_ROUNDS) == (3, 20)
    assert after([0, 10], "false") == VouchRecord(wrong_vouch_rounds=(0, 10))
    assert after([0, 10, 19], "false") == VouchRecord(suspended_until=20 + SUSPENSION)
    assert after([0, 10, 20], "false") == VouchRecord(wrong_vouch_rounds=(10, 20)), "the first one is too old"


def test_true_vouches_and_silences_between_false_ones_change_nothing_about_them() -> None:
    between = after([1, 3], "true", after([0], "false"))
    assert after([4, 5], "silent", between) == VouchRecord(missed_vouches=2, wrong_vouch_rounds=(0,))
    assert after([6, 7], "false", after([4, 5], "silent", between)) == VouchRecord(suspended_until=8 + SUSPENSION)


@pytest.mark.parametrize("what", ["true", "silent"])
def test_old_false_vouches_are_forgotten(what: str) -> None:
    assert after([21], what, after([1, 2], "false")).wrong_vouch_rounds == (2,)
    assert after([22], what, after([1, 2], "false")).wrong_vouch_rounds == ()


@pytest.mark.parametrize(
    ("record", "first"),
    [
        (VouchRecord(), 0),
        (VouchRecord(missed_vouches=1), None),
        (VouchRecord(wrong_vouch_rounds=(3, 5)), 5 + WRONG_VOUCH_ROUNDS),
        (VouchRecord(assigned_last_until=9), 9),
        (VouchRecord(suspended_until=9), 9),
        (VouchRecord(assigned_last_until=4, suspended_until=9), 9),
    ],
)
def test_a_record_is_kept_until_it_says_nothing_more(record: VouchRecord, first: int | None) -> None:
    """`first` is the first round that the record does not affect."""
    assert [number for number in range(100) if record.is_expired(number)] == list(range(100 if first is None else first, 100))


# Closings ---------------------------------------------------------------------------------------------------------------


def started(rounds: int = 90) -> tuple[World, bytes]:
    """Start a job with four voters, three of which train and re-execute. Each proposal needs one vouch."""
    world = World()
    return world, world.start(spec=b"%b:%d" % (LANGUAGE, rounds))


def close(world: World, key: bytes, verdicts: Callable[[bytes, bytes], Verdict | None], times: int = 1) -> None:
    """Close a round in which all proposals are accepted. `verdicts(voter, trainer)` are the vouches, None for no vouch."""

    def said(job: Job, voter: bytes) -> Mapping[bytes, Verdict]:
        found = {trainer: verdicts(voter, trainer) for trainer in job.trainers if trainer != voter}
        return {trainer: verdict for trainer, verdict in found.items() if verdict is not None}

    for _ in range(times):
        job, terms = world.job(key), world.job(key).round_terms(key)
        world.vouch(key, {voter: said(job, voter) for voter in terms.reexecutors if said(job, voter)})
        world.cast(key, dict.fromkeys(job.trainers, ACCEPT))
        closing = world.ledger.rounds[key].certificate()
        assert closing is not None and not closing.cut_offs
        world.decide(closings=(closing,))
        assert world.job(key).round == job.round + 1
        assert sum(world.job(key).accepted.values()) == sum(job.accepted.values()) + 3 and not world.job(key).rejected


def liar_rejects(voter: bytes, trainer: bytes) -> Verdict:
    return REPLAY if voter == LIAR else ACCEPT


def all_accept(voter: bytes, trainer: bytes) -> Verdict:
    return ACCEPT


def test_a_closing_in_which_all_re_executors_vouch_leaves_no_record() -> None:
    world, key = started()
    close(world, key, all_accept, times=4)
    assert world.job(key).vouch_records == {}


def test_a_re_executor_that_rejects_what_is_accepted_is_suspended_after_three_closings() -> None:
    world, key = started()
    for number in range(2):
        close(world, key, liar_rejects)
        assert world.job(key).vouch_records == {LIAR: VouchRecord(wrong_vouch_rounds=tuple(range(number + 1)))}
        assert world.job(key).round_terms(key).suspended == frozenset()
    close(world, key, liar_rejects)
    assert world.job(key).vouch_records == {LIAR: VouchRecord(suspended_until=3 + DEFAULT_SUSPENSION)}
    for _ in range(DEFAULT_SUSPENSION):
        terms = world.job(key).round_terms(key)
        assert terms.suspended == {LIAR} and all(reexecutor_order(terms, trainer)[-1] == LIAR for trainer in OTHERS)
        close(world, key, all_accept)
    assert world.job(key).round_terms(key).suspended == frozenset() and world.job(key).vouch_records == {}


def test_a_re_executor_that_was_called_and_never_vouches_is_called_last_for_a_while() -> None:
    world, key = started()
    for number in range(MISSED_VOUCHES_MAX):
        assert world.job(key).round_terms(key).called_last == frozenset()
        close(world, key, lambda voter, trainer: None if voter == LIAR else ACCEPT)
        assert (LIAR in world.job(key).vouch_records) and number < MISSED_VOUCHES_MAX
    for _ in range(CALLED_LAST_ROUNDS):
        terms = world.job(key).round_terms(key)
        assert terms.called_last == {LIAR} and all(reexecutor_order(terms, trainer)[-1] == LIAR for trainer in OTHERS)
        close(world, key, lambda voter, trainer: None if voter == LIAR else ACCEPT)
    assert world.job(key).round_terms(key).called_last == frozenset() and world.job(key).vouch_records == {}


def test_a_re_executor_that_is_unsure_is_not_suspended() -> None:
    world, key = started()
    for _ in range(2 * WRONG_VOUCHES_MAX):
        close(world, key, lambda voter, trainer: UNJUDGED if voter == LIAR else ACCEPT)
        assert all(record.wrong_vouch_rounds == () for record in world.job(key).vouch_records.values())
        assert world.job(key).round_terms(key).suspended == frozenset()


def test_a_record_follows_the_next_key_of_its_member() -> None:
    world, key = started()
    close(world, key, liar_rejects)
    world.decide(world.rotation(PEOPLE[1], NEW), empty_after=4)  # until the new key votes
    close(world, key, all_accept)
    assert world.job(key).vouch_records == {NEW.public: VouchRecord(wrong_vouch_rounds=(0,))}
    close(world, key, lambda voter, trainer: REPLAY if voter == NEW.public else ACCEPT, times=2)
    assert world.job(key).round_terms(key).suspended == {NEW.public}


def test_of_two_records_of_one_member_the_longer_suspension_stays() -> None:
    """The voter rotated while its job was paused, and was recorded under both keys."""
    world, _ = started()
    world.decide(world.rotation(PEOPLE[1], NEW))
    longer, shorter = VouchRecord(suspended_until=9), VouchRecord(missed_vouches=2, assigned_last_until=30)
    for old, new in ((longer, shorter), (shorter, longer)):
        assert _by_present_key({LIAR: old, NEW.public: new}, world.state.members, _vouch_severity) == {NEW.public: longer}


def test_a_suspended_re_executor_is_suspended_under_its_next_key_too() -> None:
    world, key = started()
    close(world, key, liar_rejects, times=WRONG_VOUCHES_MAX)
    world.decide(world.rotation(PEOPLE[1], NEW), empty_after=4)
    assert NEW.public in world.job(key).reexecutors
    assert world.job(key).round_terms(key).suspended == {NEW.public}
