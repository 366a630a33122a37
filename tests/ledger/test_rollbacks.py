"""Rollbacks: effects of a conviction, a stop and the last round on the rounds that audits may still undo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ledger.audits import sortition
from ledger.audits.audit_state import AuditResult
from ledger.audits.state_machine import AuditsModule
from ledger.core.genesis import Genesis
from ledger.core.module import BlockContext, DecodedTransaction, Module, StateChange, StateReader
from ledger.jobs import Job, JobHold, JobLastRound, JobPhase, RequestRollback, StopJob, _voted_back
from ledger.ledger_state import EMPTY_BODY, BlockBody
from ledger.members import ResignAsVoter
from ledger.model_anchors import (
    ANCHORS_MAX,
    UNDONE_KEPT,
    ModelAnchor,
    UndoneRounds,
    UndoReason,
    anchors_to_keep,
    newest_anchor_up_to,
)
from protocol.codec import Digest
from protocol.identity import Signed
from protocol.verdicts import ReplayFinding, Verdict
from tests.ledger.blocks import compute_transition
from tests.ledger.court import LONG, MATCH, MISMATCH, WITHHELD, A, B, C, Court, D, withheld
from tests.ledger.test_losses import Bound, lazy
from tests.ledger.world import BY_KEY, LANGUAGE, PEOPLE, SAMPLED, SAMPLED_SCRATCH, world_with_job
from tests.sim.keys import FastSigner
from tests.training.replicated.support import JOB, SMALL, round_of
from training.job_spec import AuditMode, FeedbackMemory
from training.replicated.model_directory import ModelState
from training.replicated.replicated_model import ReplicatedModel

ANN, BEN, CID, DEE = PEOPLE[:4]
NEW = FastSigner("rotated")
BY_KEY[NEW.public] = NEW
EVERY = 4  # rounds from one anchor to the next


def court_of(spec: bytes = LONG, **terms: Any) -> Court:
    """Return a court in which all auditors draw all updates and have long to report. Every fourth model is an anchor."""
    return Court(4, spec, **{"anchor_rounds": EVERY, "auditors": 3, "window": 20, **terms})


def accuse(court: Court, person: FastSigner, number: int, trainer: bytes, finding: ReplayFinding = MISMATCH) -> None:
    """Report by an auditor of this update that it is false."""
    court.say(person, next(due for by, due in court.due(trainer) if by is person and due.round == number), finding)


def verdict(court: Court, person: FastSigner, number: int, trainer: bytes, finding: ReplayFinding = MISMATCH) -> Signed:
    due = next(due for by, due in court.due(trainer, disputes=True) if by is person and due.round == number)
    return court.said(person, due, finding)


def convict(court: Court, number: int, trainer: bytes, finding: ReplayFinding = MISMATCH) -> None:
    """Convict the trainer with two of three judges."""
    first, second = [person for person in PEOPLE[:4] if person.public in court.audits.rounds[number].reexecutors][-2:]
    assert trainer not in (first.public, second.public)
    accuse(court, first, number, trainer, finding)
    court.decide(verdict(court, second, number, trainer, finding))


def place(job: Job) -> tuple[int, int]:
    return job.round, job.rounds_in_model


def anchored(court: Court) -> list[tuple[int, int]]:
    """Return for each anchor its round and the rounds taken before it."""
    return [(anchor.round, anchor.rounds_in_model) for anchor in court.job(court.key).anchors]


@dataclass(frozen=True, slots=True)
class Dial:
    """`dial/turn`, and the state of its module: the effect of the next blocks on a job."""

    job: Digest = bytes(32)
    is_held: bool = False
    is_last: bool = False


class DialModule(Module[Dial]):
    """A module that holds a job, or ends it with the next closed round, as modules of applications do."""

    name = "dial"
    contents: ClassVar[Mapping[str, type]] = {"dial/turn": Dial}
    state_type = Dial

    def genesis_state(self, genesis: Genesis) -> Dial:
        return Dial()

    def apply_transaction(self, state: Dial, said: DecodedTransaction, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(said.content)

    def settle_block(self, state: Dial, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(state, (JobHold(state.job),) * state.is_held + (JobLastRound(state.job),) * state.is_last)


def turn(court: Court, **said: bool) -> Signed:
    return court.tx(ANN, "dial/turn", Dial(court.key, **said))


# Convictions of rounds in the model ---------------------------------------------------------------------------------------


def test_a_conviction_takes_the_job_back_to_the_newest_anchor_at_or_before_the_false_round() -> None:
    court, roots = court_of(), dict[int, bytes]()
    for _ in range(9):
        roots[court.job(court.key).round] = court.job(court.key).model_root
        court.round()
    assert place(court.job(court.key)) == (10, 10) and anchored(court) == [(0, 0), (4, 4), (8, 8)]
    convict(court, 6, A)
    job = court.job(court.key)
    assert place(job) == (11, 4) and job.phase is JobPhase.RUNNING
    assert job.undone_rounds == (UndoneRounds(4, 10, court.state.height, UndoReason.FALSE, A),)
    assert anchored(court) == [(0, 0), (4, 4)] and job.anchors[1].root == roots[4]
    assert job.model_root not in roots.values(), "the number of the round is in the root"
    assert set(court.ledger.rounds) == {court.key} and court.ledger.rounds[court.key].terms.round == 11


@pytest.fixture
def court() -> Court:
    return court_of(rounds=9)


@pytest.mark.parametrize(("false", "anchor"), [(3, 0), (4, 4), (7, 4), (8, 8)])
def test_an_anchor_is_before_the_round_that_begins_with_it(court: Court, false: int, anchor: int) -> None:
    convict(court, false, A)
    assert place(court.job(court.key)) == (11, anchor)


def test_the_round_after_a_rollback_is_reexecuted_before_the_ballot_and_the_next_one_is_not() -> None:
    """Ballots of the undone round have revealed nonces and may be known, so that everybody could foresee the draws."""
    court = court_of(rounds=5)
    convict(court, 5, A)
    job = court.job(court.key)
    assert job.fully_audited and job.round_terms(court.key).trainers_to_vouch_for == set(job.trainers) == {B, C, D}
    court.round()
    assert job.round not in court.audits.rounds and not court.job(court.key).fully_audited
    court.round()
    assert court.audits.rounds[job.round + 1].nonce_count == 3, "the convicted one draws nothing"


def test_later_anchors_are_counted_in_rounds_of_the_models_own_line() -> None:
    court = court_of(rounds=8)
    convict(court, 6, A)
    assert place(court.job(court.key)) == (10, 4)
    court.round(4)
    assert place(court.job(court.key)) == (14, 8) and anchored(court) == [(0, 0), (4, 4), (14, 8)]
    convict(court, 12, B)
    assert place(court.job(court.key)) == (15, 4), "round 12 came after the anchor of round 4"
    assert [(undone.first, undone.last) for undone in court.job(court.key).undone_rounds] == [(4, 9), (4, 14)]


def test_awaited_reports_on_undone_rounds_end_and_those_on_earlier_ones_stay(court: Court) -> None:
    late = court.said(*next(item for item in court.due(B) if item[1].round == 7))
    convict(court, 6, A)
    assert list(court.audits.rounds) == [1, 2, 3] and not any(of.undone for of in court.audits.rounds.values())
    assert {due.round for _, due in court.due()} == {1, 2, 3}
    assert "is expected" in (court.problem(late) or "")


def test_a_conviction_in_the_block_that_closes_the_open_round_undoes_that_round_and_uses_the_next_number(court: Court) -> None:
    accuse(court, DEE, 6, A)
    last, closing = verdict(court, CID, 6, A), court.closing(court.key)
    state, body = court.state, BlockBody((closing,), (), (last,))
    transition = compute_transition(court.rules, state, state.height + 1, state.time_ms + 1, state.state_root, body)
    assert [closed.round for closed in transition.closed_rounds] == [10] and not transition.model_steps
    assert (transition.rolled_back[court.key].anchor.round, transition.rolled_back[court.key].round) == (4, 11)
    court.decide(last, closings=(closing,))
    job = court.job(court.key)
    assert place(job) == (11, 4) and (job.undone_rounds[-1].first, job.undone_rounds[-1].last) == (4, 10)
    assert list(court.audits.rounds) == [1, 2, 3] and job.accepted[A] == 10
    assert A not in job.trainers and job.fully_audited and anchored(court) == [(0, 0), (4, 4)]


def test_a_block_that_closes_the_round_before_an_anchor_and_undoes_it_makes_no_anchor() -> None:
    court = court_of(rounds=6)
    accuse(court, DEE, 6, A)
    court.decide(verdict(court, CID, 6, A), closings=(court.closing(court.key),))
    assert place(court.job(court.key)) == (8, 4) and anchored(court) == [(0, 0), (4, 4)]


@pytest.mark.parametrize("earlier_first", [False, True])
def test_two_convictions_in_one_block_go_to_the_earlier_anchor(court: Court, earlier_first: bool) -> None:
    accuse(court, DEE, 6, A)
    accuse(court, ANN, 2, B)
    said = [verdict(court, CID, 6, A), verdict(court, DEE, 2, B)]
    court.decide(*(reversed(said) if earlier_first else said))
    job = court.job(court.key)
    assert place(job) == (11, 0) and job.undone_rounds == (UndoneRounds(0, 10, court.state.height, UndoReason.FALSE, B),)
    assert court.suspended(A) and court.suspended(B) and job.trainers == (C, D) and not court.audits.rounds


def test_a_conviction_of_an_undone_round_convicts_and_does_not_roll_back_again(court: Court) -> None:
    accuse(court, DEE, 6, A)
    accuse(court, ANN, 7, B)
    court.decide(verdict(court, CID, 6, A))
    assert court.audits.rounds[7].undone and court.audits.first_contestable_round == 1
    (dispute,) = court.audits.disputes
    assert dispute.proposal_key == (7, B)
    court.round()
    before = court.job(court.key)
    court.decide(verdict(court, DEE, 7, B))
    assert court.suspended(B) and not court.audits.disputes and 7 not in court.audits.rounds
    assert replace(court.job(court.key), distrusted_members=before.distrusted_members) == before
    court.round()
    assert court.job(court.key).distrusted_members == (A, B) and len(court.job(court.key).undone_rounds) == 1


def test_a_dispute_about_an_undone_round_puts_nothing_in_doubt(court: Court) -> None:
    accuse(court, DEE, 2, A)
    accuse(court, ANN, 7, B)
    court.decide(verdict(court, CID, 2, A))
    assert court.audits.disputes and court.audits.first_contestable_round is None
    court.round()
    court.decide(court.tx(BEN, "job/stop", StopJob(court.key)), court.tx(CID, "job/stop", StopJob(court.key)))
    court.decide(court.tx(DEE, "job/stop", StopJob(court.key)))
    job = court.job(court.key)
    assert job.phase is JobPhase.FINISHED and place(job) == (12, 1) and len(job.undone_rounds) == 1


def test_nobody_draws_late_for_an_undone_round() -> None:
    """A re-executor whose ballots were omitted draws for the missed rounds, except for the undone ones."""
    court = court_of(rounds=5)
    court.decide(closings=(court.closing_without(D),))
    accuse(court, CID, 6, A)
    accuse(court, CID, 6, B)
    court.decide(verdict(court, DEE, 6, A))
    assert court.audits.rounds[6].undone and D not in court.audits.rounds[6].proposals[B].pending_auditors
    court.round(2)
    assert court.audits.disputes and not court.audits.rounds[6].proposals[B].pending_auditors


def test_so_many_rollbacks_are_remembered() -> None:
    """The state is bounded, and older rollbacks are in the blocks."""
    court = court_of(suspension_rounds=0)
    for number in range(UNDONE_KEPT + 2):
        trainer = PEOPLE[number % 2].public
        court.round(2)
        while trainer in court.job(court.key).trainers_to_vouch_for or trainer not in court.job(court.key).trainers:
            jobs = {court.key: replace(court.job(court.key), distrusted_members=(), trainers_to_vouch_for=())}
            court.ledger.applied.current = court.state.with_modules(jobs=replace(court.state.jobs, jobs=jobs))
            court.follow()
            court.round()
        convict(court, court.job(court.key).round - 1, trainer)
    undone = court.job(court.key).undone_rounds
    assert len(undone) == UNDONE_KEPT and undone[-1].height == court.state.height
    assert court.read_back().jobs == court.state.jobs


# Suspended trainers -------------------------------------------------------------------------------------------------------


def test_other_disputes_and_reports_about_a_suspended_trainer_go_on_and_a_second_conviction_does_not_suspend_again(
    court: Court,
) -> None:
    """Each may concern another false update in the model."""
    accuse(court, DEE, 6, A)
    accuse(court, DEE, 2, A)
    court.decide(verdict(court, CID, 6, A))
    until, lost = court.audits.suspended[A], court.standing(A).rewards_lost
    assert [dispute.proposal_key for dispute in court.audits.disputes] == [(2, A)]
    assert {due.round for _, due in court.due(A)} == {1, 2, 3}
    court.round(2)
    court.decide(verdict(court, BEN, 2, A))
    assert place(court.job(court.key)) == (14, 0) and court.audits.suspended[A] == until
    assert court.standing(A).suspensions == 1 and court.standing(A).rewards_lost == lost == 9
    assert [undone.first for undone in court.job(court.key).undone_rounds] == [4, 0]
    assert [court.standing(key).upheld for key in (B, C, D)] == [0, 0, 2]


def test_updates_of_a_trainer_that_was_convicted_are_reexecuted_before_the_ballot_for_the_rest_of_the_job() -> None:
    court = court_of(suspension_rounds=2, rounds=5)
    convict(court, 5, A)
    court.round(2)
    assert not court.audits.suspended
    for _ in range(3):
        job = court.job(court.key)
        terms = job.round_terms(court.key)
        assert job.distrusted_members == job.trainers_to_vouch_for == (A,) and not job.fully_audited
        assert terms.trainers_to_vouch_for == {A} and terms.reexecutors == {A, B, C, D}
        court.round()
        assert court.audits.rounds[job.round].proposals.keys() == {B, C, D} and job.round in court.audits.unvested_rounds[A]
    court.cast(court.key, dict.fromkeys((A, B, C, D), Verdict.ACCEPT))
    assert court.ledger.rounds[court.key].certificate() is None, "without vouches its update is not settled"


def test_a_trainer_on_probation_stays_on_it_with_a_new_key_and_not_in_another_job() -> None:
    court = court_of(suspension_rounds=2, rounds=5)
    convict(court, 5, A)
    court.decide(court.rotation(ANN, NEW))
    court.people[NEW.public] = court.people.pop(A)
    court.round(2)
    job = court.job(court.key)
    assert (
        job.distrusted_members == job.trainers_to_vouch_for == (NEW.public,)
        and NEW.public in job.trainers
        and not job.fully_audited
    )
    court.round()
    assert court.audits.rounds[job.round].proposals.keys() == {B, C, D}
    court.decide(court.tx(NEW, "job/stop", StopJob(court.key)))
    court.key = court.start(BEN, LONG)
    assert NEW.public in court.job(court.key).trainers and not court.job(court.key).distrusted_members


def test_a_probationer_that_rotates_in_the_round_is_vouched_for_under_both_keys() -> None:
    """The rotation renews the open round, since one of four voters is missing."""
    court = court_of(suspension_rounds=2, rounds=5)
    convict(court, 5, A)
    court.round(2)
    court.decide(court.rotation(ANN, NEW))
    court.people[NEW.public] = court.people.pop(A)
    job = court.job(court.key)
    assert {A, NEW.public} <= set(job.trainers) and job.round_terms(court.key).trainers_to_vouch_for == {A, NEW.public}


@pytest.mark.parametrize(("finding", "reason"), [(MISMATCH, UndoReason.FALSE), (WITHHELD, UndoReason.WITHHELD)])
def test_a_false_update_rolls_back_and_a_withheld_one_too(finding: ReplayFinding, reason: UndoReason) -> None:
    court = court_of(rounds=5)
    convict(court, 5, A, finding)
    assert place(court.job(court.key)) == (7, 4) and court.job(court.key).undone_rounds[0].reason is reason


def test_a_shunned_trainer_rolls_nothing_back_and_is_on_probation_all_the_same() -> None:
    """Most judges found its updates correct."""
    court = court_of(suspension_rounds=100)
    for auditor in (BEN, CID):
        withheld(court, auditor, A, 3)
    assert court.suspended(A) and court.log[-1][0] is AuditResult.SHUNNED
    job = court.job(court.key)
    court.round()
    assert not court.job(court.key).undone_rounds and place(court.job(court.key)) == (job.round + 1, job.rounds_in_model + 1)
    assert court.job(court.key).distrusted_members == (A,)


def test_a_lazy_auditor_rolls_nothing_back() -> None:
    court = Bound(4, lazy(A))
    while not court.suspended(A):
        court.audited_round()
    assert court.audits.suspension_causes[A].result is AuditResult.LAZY
    assert not court.job(court.key).undone_rounds and court.job(court.key).rounds_in_model == court.job(court.key).round


def test_a_refuted_or_dropped_dispute_rolls_nothing_back() -> None:
    court = court_of(window=4, rounds=3)
    accuse(court, DEE, 3, A)
    court.judge(MATCH, 2)
    accuse(court, DEE, 3, B)
    court.round(6)
    assert {AuditResult.REFUTED, AuditResult.DROPPED} <= {result for result, _, _ in court.log}
    assert not court.job(court.key).undone_rounds and place(court.job(court.key)) == (10, 10)


def test_honest_trainers_are_paid_for_undone_rounds_and_the_liar_is_not() -> None:
    court = court_of(window=5, suspension_rounds=100, rounds=8)
    convict(court, 6, A)
    assert 7 in court.audits.unvested_rounds[B], "its window is not over"
    court.round(12)
    accepted = court.job(court.key).accepted
    for key in (B, C):  # these have accused nobody, or nobody has reported on them
        waiting = len(court.audits.unvested_rounds[key])
        assert court.standing(key).rewards + waiting == accepted[key] == 20 and not court.standing(key).rewards_lost
    assert court.standing(A).rewards + court.standing(A).rewards_lost == accepted[A] == 8 and court.standing(A).rewards_lost >= 5


# Paused jobs --------------------------------------------------------------------------------------------------------------


def test_a_paused_job_rolls_back_and_stays_paused() -> None:
    court = court_of(rounds=8, modules=(DialModule(),))
    court.decide(turn(court, is_held=True), closings=(court.closing(court.key),))
    assert court.job(court.key).phase is JobPhase.PAUSED and place(court.job(court.key)) == (10, 10)
    convict(court, 6, A)
    job = court.job(court.key)
    assert job.phase is JobPhase.PAUSED and place(job) == (11, 4), "the undone model has the number 10"
    court.decide(turn(court))
    job = court.job(court.key)
    assert job.phase is JobPhase.RUNNING and place(job) == (11, 4) and A not in job.trainers
    court.round()
    assert place(court.job(court.key)) == (12, 5)


def test_a_job_that_a_block_holds_and_rolls_back_goes_on_with_a_round_that_is_reexecuted() -> None:
    """Ballots of the undone open round have revealed nonces, for any length of the pause."""
    court = court_of(rounds=9, modules=(DialModule(),))
    accuse(court, DEE, 6, A)
    court.decide(verdict(court, CID, 6, A), turn(court, is_held=True))
    assert court.job(court.key).phase is JobPhase.PAUSED and place(court.job(court.key)) == (11, 4)
    court.decide()
    court.decide(turn(court))
    assert court.job(court.key).phase is JobPhase.RUNNING and court.job(court.key).fully_audited


# Jobs after their last round ----------------------------------------------------------------------------------------------

SIX = SAMPLED + b":6"
TIMED = {"response_ms": 20}  # a window of twice the number of blocks


def test_a_job_settles_while_audits_may_undo_rounds_and_is_final_then() -> None:
    court = court_of(SIX, rounds=5, **TIMED)
    job = court.job(court.key)
    assert job.phase is JobPhase.SETTLING and place(job) == (6, 6) and not court.ledger.rounds and job.anchors
    assert court.problem(court.said(*court.due()[0])) is None, "reports are heard"
    while court.job(court.key).phase is JobPhase.SETTLING:
        assert court.audits.first_contestable_round is not None
        court.decide_body(EMPTY_BODY, after_ms=100)
    ended = court.job(court.key)
    terms = court.rules.audits_module.rules.terms_of_spec(job.spec)
    assert terms.audits is not None
    usual = terms.audits.window_ms(4) + 1_000 * terms.audits.window * terms.proposal_seconds
    assert usual <= 100 * (court.state.height - job.opened_height) <= usual + 400, "time alone ends the windows"
    assert (
        ended.phase is JobPhase.FINISHED and ended.model_root == job.model_root and not ended.anchors and not ended.undone_rounds
    )
    assert ended.opened_height == court.state.height and AuditResult.LAPSED in {result for result, _, _ in court.log}


def test_a_settling_job_is_over_as_soon_as_all_is_said() -> None:
    court = court_of(SIX, response_ms=1_000, rounds=5)
    court.report()
    assert court.job(court.key).phase is JobPhase.FINISHED and court.audits.unopened_losses, "losses are opened after it"
    assert not court.job(court.key).undone_rounds and court.job(court.key).rounds_in_model == 6


def test_no_other_job_takes_the_place_of_one_that_settles() -> None:
    court = court_of(SIX, response_ms=1_000, rounds=5)
    waiting = court.start(BEN, LONG)
    assert waiting not in court.state.jobs.jobs and [other.job for other in court.state.jobs.queue] == [waiting]
    court.report()
    assert court.state.jobs.jobs[waiting].phase is JobPhase.RUNNING


def test_a_conviction_reopens_a_settling_job() -> None:
    court = court_of(SIX, rounds=5, **TIMED)
    convict(court, 5, A)
    job = court.job(court.key)
    assert job.phase is JobPhase.RUNNING and place(job) == (7, 4) and job.fully_audited and A not in job.trainers
    assert (job.undone_rounds[0].first, job.undone_rounds[0].reason) == (4, UndoReason.FALSE)
    court.round()
    assert court.job(court.key).phase is JobPhase.RUNNING
    court.round()
    job = court.job(court.key)
    assert job.phase is JobPhase.SETTLING and place(job) == (9, 6)
    while court.job(court.key).phase is JobPhase.SETTLING:
        court.decide()
    assert place(court.job(court.key)) == (9, 6) and court.job(court.key).rounds == 6


def test_a_conviction_in_the_block_that_takes_the_last_round_opens_another() -> None:
    court = court_of(SIX, rounds=4, **TIMED)
    accuse(court, DEE, 3, A)
    court.decide(verdict(court, CID, 3, A), closings=(court.closing(court.key),))
    assert court.job(court.key).phase is JobPhase.RUNNING and place(court.job(court.key)) == (6, 0)


def test_a_job_of_which_nothing_is_in_doubt_is_over_with_its_last_round() -> None:
    court = court_of(SAMPLED + b":3", closing=2, rounds=2)
    assert court.job(court.key).phase is JobPhase.FINISHED and place(court.job(court.key)) == (3, 3)


# Jobs that end while an update is contestable -----------------------------------------------------------------------------


def settled_court(number: int, spec: bytes = LONG, **terms: Any) -> Court:
    """Return a court whose first contestable round has this number."""
    court = court_of(spec, window=4, **terms)
    while court.audits.first_contestable_round is None or court.audits.first_contestable_round < number:
        court.round()
    return court


def test_a_job_that_is_stopped_ends_with_its_newest_final_model() -> None:
    court = settled_court(6)
    before = court.job(court.key)
    assert place(before) == (10, 10) and anchored(court) == [(4, 4), (8, 8)]
    accuse(court, DEE, 9, A)
    court.decide(court.tx(ANN, "job/stop", StopJob(court.key)))
    job = court.job(court.key)
    assert job.phase is JobPhase.FINISHED and place(job) == (4, 4) and job.model_root == before.anchors[0].root
    assert (
        job.undone_rounds == (UndoneRounds(4, 10, court.state.height, UndoReason.STOPPED),)
        and job.rounds == 200
        and not job.anchors
    )
    assert not court.due() and list(court.audits.rounds) == [9] and court.audits.rounds[9].undone
    court.judge(MISMATCH, 1)
    assert court.standing(A).suspensions == 1 and court.job(court.key) == job, "a dispute about it convicts all the same"


def test_a_job_that_is_stopped_without_doubt_keeps_its_model() -> None:
    court = court_of()
    before = court.job(court.key)
    assert place(before) == (1, 1) and court.audits.first_contestable_round is None
    court.decide(court.tx(ANN, "job/stop", StopJob(court.key)))
    job = court.job(court.key)
    assert (
        job.phase is JobPhase.FINISHED and place(job) == (1, 1) and job.model_root == before.model_root and not job.undone_rounds
    )


def test_a_conviction_in_the_block_that_stops_the_job_is_before_its_last_model() -> None:
    court = settled_court(9)
    assert anchored(court)[0] == (8, 8)
    accuse(court, DEE, 10, A)
    court.decide(court.tx(ANN, "job/stop", StopJob(court.key)), verdict(court, CID, 10, A))
    assert place(court.job(court.key)) == (8, 8) and court.job(court.key).phase is JobPhase.FINISHED


def test_a_stop_does_not_save_the_update_that_the_same_block_finds_false() -> None:
    """No other update is contestable any more."""
    court = court_of(SIX, response_ms=1_000, rounds=5)
    root = court.job(court.key).anchors[1].root
    accuse(court, DEE, 5, A)
    court.report()
    court.decide(court.tx(ANN, "job/stop", StopJob(court.key)), verdict(court, CID, 5, A))
    job = court.job(court.key)
    assert job.phase is JobPhase.FINISHED and place(job) == (4, 4) and job.model_root == root and court.suspended(A)


def test_a_stop_in_the_block_that_closes_a_round_undoes_that_round_too() -> None:
    court = settled_court(6)
    root = court.job(court.key).anchors[0].root
    court.decide(court.tx(ANN, "job/stop", StopJob(court.key)), closings=(court.closing(court.key),))
    job = court.job(court.key)
    assert place(job) == (4, 4) and job.model_root == root and (job.undone_rounds[0].first, job.undone_rounds[0].last) == (4, 10)


def test_a_settling_job_that_is_stopped_ends_with_its_newest_final_model() -> None:
    court = court_of(SIX, rounds=5, **TIMED)
    court.decide(court.tx(ANN, "job/stop", StopJob(court.key)))
    job = court.job(court.key)
    assert job.phase is JobPhase.FINISHED and place(job) == (0, 0) and job.undone_rounds[0].reason is UndoReason.STOPPED
    assert job.rounds == 6, "it has not taken all that its specification asks for"


def test_the_last_round_that_an_application_asks_for_leaves_no_rounds_over() -> None:
    court = settled_court(6, modules=(DialModule(),))
    court.decide(turn(court, is_last=True), closings=(court.closing(court.key),))
    job = court.job(court.key)
    assert job.phase is JobPhase.FINISHED and place(job) == (4, 4) and job.rounds == 4
    assert job.undone_rounds[0].reason is UndoReason.STOPPED


def test_a_job_that_nobody_trains_any_more_ends_with_its_newest_final_model() -> None:
    court = settled_court(6, SAMPLED_SCRATCH + b":99")
    root = court.job(court.key).anchors[0].root
    court.decide(evidence=(court.double(ANN),))
    job = court.job(court.key)
    assert job.phase is JobPhase.FINISHED and place(job) == (4, 4) and job.model_root == root
    assert job.undone_rounds == (UndoneRounds(4, 10, court.state.height, UndoReason.STOPPED),)


def test_a_job_whose_only_trainer_is_convicted_ends_with_its_newest_final_model() -> None:
    court = settled_court(6, SAMPLED_SCRATCH + b":99")
    root = court.job(court.key).anchors[0].root
    convict(court, 9, A)
    job = court.job(court.key)
    assert job.phase is JobPhase.FINISHED and place(job) == (4, 4) and job.model_root == root
    assert [(undone.first, undone.reason) for undone in job.undone_rounds] == [(8, UndoReason.FALSE), (4, UndoReason.STOPPED)]


# Anchors ------------------------------------------------------------------------------------------------------------------


def test_anchors_before_the_newest_final_one_are_forgotten() -> None:
    court, seen = court_of(window=4), set[int]()
    for _ in range(30):
        court.round()
        first, job = court.audits.first_contestable_round, court.job(court.key)
        rounds = [anchor.round for anchor in job.anchors]
        final = max(number for number in range(0, job.round + 1, EVERY) if number <= first)
        assert rounds == list(range(final, job.round + 1, EVERY))
        assert [anchor.root for anchor in job.anchors if anchor.round == job.round] in ([], [job.model_root])
        seen.add(rounds[0])
    assert seen == set(range(0, 28, EVERY))


def test_the_first_model_is_an_anchor_and_where_nothing_is_in_doubt_the_newest_one_alone_is_kept() -> None:
    court = court_of(is_new=True, rate=0.0, window=1, anchor_rounds=2)
    assert anchored(court) == [(0, 0)] and court.job(court.key).anchors[0].root == court.job(court.key).model_root
    world, key = world_with_job(spec=b"language:9", anchor_rounds=2)
    for number in range(1, 6):
        world.decide(closings=(world.closing(key),))
        world.decide()  # the block that makes an anchor knows its root when it ends
        assert [anchor.round for anchor in world.job(key).anchors] == [number - number % 2]


def test_there_are_so_many_anchors_and_one_may_come_on_top() -> None:
    court = court_of(window=200, anchor_rounds=1)
    for _ in range(2 * ANCHORS_MAX):
        court.round()
        assert len(court.job(court.key).anchors) <= ANCHORS_MAX
    rounds = [anchor.round for anchor in court.job(court.key).anchors]
    assert (
        rounds == sorted(set(rounds))
        and rounds[0] == 1 == court.audits.first_contestable_round
        and rounds[-1] == court.job(court.key).round
    )
    assert len(rounds) == ANCHORS_MAX
    again = court.read_back()
    assert again.jobs == court.state.jobs and again.state_root == court.state.state_root


def test_of_too_many_anchors_those_in_between_go_and_no_rollback_becomes_much_longer() -> None:
    kept: tuple[ModelAnchor, ...] = ()
    for number in range(0, 400, 8):
        kept = anchors_to_keep((*kept, ModelAnchor(number, number, bytes(32))), 3)
        assert kept[0].round == 0 and kept[-1].round == number and len(kept) < ANCHORS_MAX
    gaps = [later.rounds_in_model - earlier.rounds_in_model for earlier, later in pairwise(kept)]
    assert max(gaps) <= 2 * 400 / ANCHORS_MAX
    assert newest_anchor_up_to(kept, 399) == kept[-1] and newest_anchor_up_to(kept, kept[1].round - 1) == kept[0]


def test_rounds_go_on_after_a_step_of_the_audits_has_failed_and_a_rollback_goes_to_the_oldest_anchor_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In that block the audits report no contestable round."""

    def broken(*given: object) -> StateChange:
        raise ValueError("planted")

    court = court_of(rounds=9)
    with monkeypatch.context() as patch:
        patch.setattr(AuditsModule, "settle_block", broken)
        court.decide()
    assert anchored(court) == [(8, 8)] and court.audits.first_contestable_round == 1
    court.round()
    assert place(court.job(court.key)) == (11, 11)
    convict(court, 3, A)
    assert place(court.job(court.key)) == (12, 8)


# Rollback by a quorum of voters --------------------------------------------------------------------------------------------


def wish(court: Court, person: FastSigner, number: int) -> Signed:
    return court.tx(person, "job/rollback", RequestRollback(court.key, number, court.job(court.key).last_rollback))


def test_a_quorum_of_voters_takes_a_job_back_to_an_anchor(court: Court) -> None:
    root = court.job(court.key).anchors[1].root
    court.decide(wish(court, ANN, 4), wish(court, BEN, 8))
    court.round()
    court.decide(wish(court, CID, 4))
    assert place(court.job(court.key)) == (11, 11), "two of four agree"
    court.decide(wish(court, DEE, 4))
    job = court.job(court.key)
    assert place(job) == (12, 4) and anchored(court) == [(0, 0), (4, 4)] and job.anchors[1].root == root
    assert job.undone_rounds == (UndoneRounds(4, 11, court.state.height, UndoReason.VOTED),)
    assert job.fully_audited and not job.rollback_requests and not job.distrusted_members
    court.round(2)
    assert place(court.job(court.key)) == (14, 6), "once"


def test_who_changes_its_mind_counts_once_and_who_votes_no_more_counts_not(court: Court) -> None:
    court.decide(wish(court, ANN, 4), wish(court, BEN, 4), wish(court, DEE, 8))
    court.decide(wish(court, ANN, 8))
    assert court.job(court.key).rollback_requests == {ANN.public: 8, BEN.public: 4, DEE.public: 8}
    court.decide(court.tx(DEE, "member/resign", ResignAsVoter()), empty_after=2)
    assert place(court.job(court.key))[1] >= 10, "nobody else asks for the same as Ann"


def test_a_rollback_needs_a_voter_a_job_that_goes_on_and_an_earlier_model_that_is_kept(court: Court) -> None:
    for number in (3, 9):
        assert "choose one of @0, @4, @8" in (court.problem(wish(court, ANN, number)) or "")
    court.decide(court.tx(DEE, "member/resign", ResignAsVoter()))
    court.round(2)
    assert "is not a voter" in (court.problem(wish(court, DEE, 4)) or "")
    assert "is the current model" in (court.problem(wish(court, ANN, 12)) or "")
    court.decide(court.tx(PEOPLE[0], "job/stop", StopJob(court.key)))
    assert "is final" in (court.problem(wish(court, ANN, 4)) or "")


def test_nothing_more_is_undone_where_the_anchor_is_kept_no_longer(court: Court) -> None:
    """Surplus anchors are dropped, and voters may have requested one of them meanwhile."""
    job, members = court.job(court.key), court.state.members
    wanted = replace(job, rollback_requests=dict.fromkeys(members.voters, 4))
    assert _voted_back(wanted, members) == 4
    assert _voted_back(replace(wanted, anchors=(job.anchors[0], job.anchors[2])), members) is None


def test_a_request_is_about_the_line_that_its_author_saw(court: Court) -> None:
    """It may be decided after the requested rollback, and then requests no further one."""
    late = court.tx(ANN, "job/rollback", RequestRollback(court.key, 4))
    court.decide(*(wish(court, person, 4) for person in (BEN, CID, DEE)))
    court.round()
    assert "was rolled back in the meantime" in (court.problem(late) or "")
    assert court.problem(wish(court, ANN, 4)) is None


def test_a_voter_takes_its_request_back(court: Court) -> None:
    court.decide(wish(court, ANN, 4), wish(court, BEN, 4))
    assert "has no rollback request to withdraw" in (court.problem(wish(court, CID, 10)) or "")
    court.decide(wish(court, ANN, 10))
    assert court.job(court.key).rollback_requests == {BEN.public: 4}
    court.decide(wish(court, CID, 4), wish(court, DEE, 8))
    assert place(court.job(court.key)) == (10, 10)
    court.decide(wish(court, ANN, 4))
    assert place(court.job(court.key)) == (11, 4)
    assert "@4 is the current model" in (court.problem(wish(court, ANN, 4)) or "")


def test_a_job_that_is_stopped_in_the_block_of_the_last_request_ends(court: Court) -> None:
    author = court.people[court.job(court.key).author]
    first, second, third = [person for person in PEOPLE[:4] if person is not author]
    court.decide(wish(court, first, 4), wish(court, second, 4))
    court.decide(wish(court, third, 4), court.tx(author, "job/stop", StopJob(court.key)))
    job = court.job(court.key)
    assert (
        job.phase is JobPhase.FINISHED
        and not job.rollback_requests
        and UndoReason.VOTED not in {of.reason for of in job.undone_rounds}
    )


def test_a_job_that_is_held_goes_back_and_waits() -> None:
    court = court_of(rounds=8, modules=(DialModule(),))
    court.decide(turn(court, is_held=True))
    court.round()
    assert court.job(court.key).phase is JobPhase.PAUSED
    court.decide(*(wish(court, person, 4) for person in (BEN, CID, DEE)))
    assert (court.job(court.key).phase, court.job(court.key).rounds_in_model) == (JobPhase.PAUSED, 4)


def test_with_full_audits_the_newest_anchor_alone_is_kept() -> None:
    court = court_of(LANGUAGE + b":200", rounds=9)
    assert anchored(court) == [(8, 8)]
    court.decide(*(wish(court, person, 8) for person in (BEN, CID, DEE)))
    assert place(court.job(court.key)) == (11, 8)
    court.round()
    court.decide(wish(court, BEN, 8))
    court.decide(court.tx(court.people[court.job(court.key).author], "job/stop", StopJob(court.key)))
    assert not court.job(court.key).rollback_requests, "of a job that is over"


def test_of_a_conviction_and_a_quorum_in_one_block_the_earlier_model_counts() -> None:
    for number, taken in ((0, 0), (8, 4)):
        court = court_of(rounds=9)
        accuse(court, DEE, 6, A)
        court.decide(verdict(court, CID, 6, A), *(wish(court, person, number) for person in (ANN, BEN, DEE)))
        assert court.job(court.key).rounds_in_model == taken and len(court.job(court.key).undone_rounds) == 1


def test_a_job_with_all_rounds_taken_goes_on_after_a_rollback() -> None:
    court = court_of(SAMPLED + b":9")
    while not court.job(court.key).is_trained:
        court.round()
    assert court.job(court.key).phase is JobPhase.SETTLING
    court.decide(*(wish(court, person, 4) for person in (BEN, CID, DEE)))
    assert (court.job(court.key).phase, court.job(court.key).rounds_in_model) == (JobPhase.RUNNING, 4)


# Restored and kept fields -------------------------------------------------------------------------------------------------

RESTORED = {"rounds_in_model", "model_root", "anchors"}
OPENED = {  # fields of the round that opens after the rollback
    "phase",
    "round",
    "opened_height",
    "fully_audited",
    "voters",
    "reexecutors",
    "trainers",
    "awaited",
    "successors",
    "voting_keys",
    "trainers_to_vouch_for",
    "brief",
}
NOTED = {"undone_rounds", "distrusted_members"}
RESET = {"refused_rounds", "rollback_requests"}
KEPT = {
    "saved_models",
    "spec",
    "name",
    "author",
    "started_height",
    "rounds",
    "base_job",
    "stop_requests",
    "timeout_doublings",
    "accepted",
    "rejected",
    "vouch_records",
    "trainer_records",
}


def test_each_field_of_a_job_is_restored_by_a_rollback_or_kept() -> None:
    """A new field belongs into one of the tables."""
    names = [{part.name for part in fields(Job)}, RESTORED | OPENED | NOTED | RESET | KEPT]
    assert names[0] == names[1] and len(names[0]) == sum(map(len, (RESTORED, OPENED, NOTED, RESET, KEPT)))
    court = court_of(rounds=4)
    then = court.job(court.key)
    court.decide(court.tx(BEN, "job/stop", StopJob(court.key)), wish(court, ANN, 0))
    court.round(2)
    court.decide(closings=(court.closing(court.key, {A: Verdict.ACCEPT, B: Verdict.NORM, C: Verdict.ACCEPT}),))
    court.round(2)
    court.decide(closings=(court.closing(court.key, dict.fromkeys((A, B, C, D), Verdict.NORM)),))
    accuse(court, DEE, 6, A)
    before = court.job(court.key)
    court.decide(verdict(court, CID, 6, A))
    after = court.job(court.key)
    assert before.stop_requests and before.rejected and before.accepted
    for name in KEPT:
        assert getattr(after, name) == getattr(before, name), name
    assert all(getattr(before, name) and not getattr(after, name) for name in RESET)
    assert (after.rounds_in_model, after.anchors) == (4, before.anchors[:2]) and after.model_root != before.model_root
    assert then.round == before.anchors[1].round + 1
    assert after.undone_rounds != before.undone_rounds and after.round == before.round + 1
    court.round()
    assert court.job(court.key).distrusted_members == (A,)


STATE_RESTORED = {"rounds_in_model", "median_norms_squared", "beta_powers", "steering"}
STATE_KEPT = {"job", "spec"}  # never changes
STATE_OPENED = {"round"}
STATE_DROPPED = {"records"}  # residue of undone payloads; in jobs with estimates it is that of the anchor


@pytest.mark.parametrize("memory", [FeedbackMemory.RESIDUAL, FeedbackMemory.ESTIMATES])
def test_each_field_of_a_model_is_restored_by_a_rollback_or_kept(memory: FeedbackMemory, tmp_path: Path) -> None:
    """A new field belongs into one of the tables."""
    tables = STATE_RESTORED, STATE_KEPT, STATE_OPENED, STATE_DROPPED
    names = {part.name for part in fields(ModelState)}
    assert names == set().union(*tables) and len(names) == sum(map(len, tables))
    first = ReplicatedModel.initial(JOB, replace(SMALL, audit=AuditMode.OFF, memory=memory))
    second = first.apply_round(round_of(first, 3), {})
    state = replace(second.state, median_norms_squared=(1.0,), beta_powers=(0.5, 0.25), steering=b"as it was")
    anchor = ReplicatedModel.from_vectors(state, second.vectors, second.estimates)
    later = anchor.apply_round(round_of(anchor, 3), {})
    anchor.rolled_back(5).save(tmp_path / "5")
    back = ReplicatedModel.open(tmp_path / "5")
    back.verify()
    for name in STATE_RESTORED | STATE_KEPT:
        assert getattr(back.state, name) == getattr(anchor.state, name), name
    assert (
        back.state.round == 5 and back.root not in (anchor.root, later.root) and later.rounds_in_model == back.rounds_in_model + 1
    )
    assert anchor.state.records and back.state.records == (anchor.state.records if memory is FeedbackMemory.ESTIMATES else {})
    assert all((back.vectors[name] == vector).all() for name, vector in anchor.vectors.items())
    assert {key: bytes(of) for key, of in back.estimates.items()} == {key: bytes(of) for key, of in anchor.estimates.items()}
    assert ReplicatedModel.open(tmp_path / "5").root == back.root


def test_the_newest_final_model_is_an_anchor_that_no_audit_reaches(court: Court) -> None:
    reached, job = court.audits.first_contestable_round, court.job(court.key)
    assert reached is not None
    final = court.state.final_round(court.key)
    assert final == max(anchor.round for anchor in job.anchors if anchor.round <= reached) < job.round


def test_late_rounds_have_four_times_the_rate_of_early_ones_and_the_mean_is_that_of_the_job() -> None:
    rates = [sortition.audit_rate_of_round(0.125, taken, 70, 10) for taken in range(60)]
    assert sum(rates) / 60 == 0.125 and rates[39:41] == [0.0625, 0.25], "beside closing rounds"
