"""Reports, disputes, suspension, rewards: the rules of sampled audits, on a ledger without a network."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from ledger.audits import assignments, state_machine
from ledger.audits.audit_state import (
    AUDIT_LOG_MAX,
    CHALLENGES_OPEN_MAX,
    FALSE_CHALLENGES_MAX,
    VOLUNTEER_KIND,
    AuditFinding,
    AuditResult,
    AuditsState,
    AuditVolunteering,
    MemberAuditRecord,
    audit_duties,
    first_duty_of_each_trainer,
    proposals_to_serve,
)
from ledger.audits.sortition import commit_nonce, sortition_ticket
from ledger.audits.state_machine import POST_JOB_AUDIT_HEIGHTS
from ledger.core.module import Refused
from ledger.jobs import JobPhase, StopJob
from ledger.ledger_state import BlockBody, decode_body
from ledger.members import RegisterRoles, ResignAsVoter
from protocol import codec
from protocol.identity import Signed
from protocol.verdicts import ReplayFinding, Verdict
from rounds.round_state import RoundCertificate
from tests.ledger.court import LONG, MATCH, MISMATCH, WITHHELD, A, B, C, Court, D, withheld
from tests.ledger.world import AUDITS, BY_KEY, PEOPLE, SAMPLED, SCRATCH, UNAUDITED, World, nonce_of, world_with_job
from tests.sim.keys import FastSigner


@pytest.fixture
def court() -> Court:
    return Court()


@pytest.fixture
def ongoing() -> Court:
    """Return a court with two closed rounds."""
    return Court(rounds=2)


@pytest.fixture
def drawn() -> Court:
    """Return a court with one closed round, so that auditors are drawn."""
    return Court(rounds=1)


def test_no_audits_end_for_those_of_other_jobs_while_something_is_disputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a liar that starts sixteen jobs could end the dispute about its own proposal with the sixteenth."""
    monkeypatch.setattr(state_machine, "WINDING_UP_MAX", 2)
    court = Court(4, SAMPLED + b":9")
    first = court.key
    court.challenge(A)
    court.decide(court.tx(PEOPLE[0], "job/stop", StopJob(first)))
    for author in PEOPLE[:4]:
        court.key = court.start(author, SAMPLED + b":9")
        court.round(2)
        court.report()
        court.decide(court.tx(author, "job/stop", StopJob(court.key)))
        assert court.audits.unopened_losses, "its audits are not over"
    court.key = first
    assert court.audits.disputes and len(court.state.audits.jobs) == 2
    court.judge(MISMATCH, 1)
    assert court.standing(A).suspensions == 1


# Drawing -----------------------------------------------------------------------------------------------------------------


def test_every_accepted_proposal_is_audited_by_reexecutors_other_than_its_trainer(court: Court) -> None:
    court.round(3)
    for of in court.audits.rounds.values():
        assert of.proposals.keys() == {A, B, C, D} and of.reexecutors == (A, B, C, D) and of.faults == 1
        for trainer, drawn in of.proposals.items():
            assert trainer not in drawn.pending_auditors
            assert drawn.proposal.job == court.key
    assert {auditor for of in court.audits.rounds.values() for auditor in of.proposals[A].pending_auditors} == {B, C, D}


def test_the_first_round_has_no_draws_and_the_next_ones_have_nonces_of_all_who_voted() -> None:
    court = Court(is_new=True)
    assert court.job(court.key).fully_audited and court.job(court.key).round_terms(court.key).trainers_to_vouch_for == {
        A,
        B,
        C,
        D,
    }
    court.round()
    assert not court.audits.rounds and not court.job(court.key).fully_audited
    court.round(2)
    assert [(number, of.nonce_count) for number, of in court.audits.rounds.items()] == [(1, 4), (2, 4)]
    assert {voter: known.round for voter, known in court.audits.commitments.items()} == dict.fromkeys((A, B, C, D), 2)


def closing_with(court: Court, nonces: dict[bytes, tuple[bytes | None, bytes | None]]) -> RoundCertificate:
    """Return a closing by all voters, some of which reveal and commit to the given nonces."""
    honest = court.nonces
    court.nonces = lambda key, voter: nonces.get(voter, honest(key, voter))  # type: ignore[method-assign]
    try:
        return court.closing(court.key)
    finally:
        court.nonces = honest  # type: ignore[method-assign]


def test_accomplices_that_grind_their_nonces_displace_nobody() -> None:
    """With places for the lowest tickets, 200 tries a round keep all honest re-executors away from A."""
    fair, ground = Court(10), Court(10)
    chosen: dict[tuple[bytes, int], bytes] = {}

    def nonce(voter: bytes, number: int) -> bytes:
        if voter not in (B, C):
            return nonce_of(voter, number)
        if (voter, number) not in chosen:
            tries = [hashlib.sha256(voter + bytes([number, i])).digest()[:16] for i in range(200)]
            chosen[voter, number] = min(tries, key=lambda tried: sortition_ticket(ground.key, number + 1, tried, voter, A))
        return chosen[voter, number]

    def nonces(key: bytes, voter: bytes) -> tuple[bytes | None, bytes | None]:
        known = ground.audits.commitments.get(voter)
        return (nonce(voter, known.round) if known else None), commit_nonce(nonce(voter, ground.job(key).round))

    ground.nonces = nonces  # type: ignore[method-assign]
    by_honest = 0
    for number in range(1, 13):
        fair.round()
        ground.round()
        drawn, expected = (
            [key for key in court.audits.rounds[number].proposals[A].pending_auditors if key not in (B, C)]
            for court in (ground, fair)
        )
        assert drawn == expected
        by_honest += len(drawn)
        assert number == 1 or {B, C} <= set(ground.audits.rounds[number].proposals[A].pending_auditors)
    assert by_honest > 8


def test_a_reveal_that_is_not_what_was_committed_to_draws_nothing_for_its_voter(court: Court) -> None:
    commitment = commit_nonce(nonce_of(A, 1))
    court.decide(closings=(closing_with(court, {A: (bytes(16), commitment), B: (None, commitment)}),))
    of = court.audits.rounds[1]
    assert of.nonce_count == 2
    assert {auditor for drawn in of.proposals.values() for auditor in drawn.pending_auditors} <= {C, D}


def test_a_voter_that_commits_to_nothing_draws_nothing_in_the_next_round(court: Court) -> None:
    court.decide(closings=(closing_with(court, {A: (None, None)}),))
    assert A not in court.audits.commitments
    court.round()
    assert court.audits.rounds[2].nonce_count == 3


def test_a_voter_whose_ballot_was_not_decided_is_bound_to_what_it_said_last(court: Court) -> None:
    court.vote(court.key, dict.fromkeys((A, B, C, D), Verdict.ACCEPT), voters=(A, B, C))
    closing = court.ledger.rounds[court.key].certificate()
    assert closing is not None
    court.decide(closings=(closing,))
    assert court.audits.commitments[D].round == 0 and court.audits.commitments[A].round == 1
    court.round()
    assert court.audits.rounds[2].nonce_count == 4


def left_out(court: Court, *voters: bytes) -> None:
    """Close a round without the ballots of these voters."""
    court.decide(closings=(court.closing_without(*voters),))


def awaited(court: Court, number: int) -> dict[bytes, tuple[bytes, ...]]:
    return {trainer: drawn.pending_auditors for trainer, drawn in court.audits.rounds[number].proposals.items()}


def test_a_leader_that_leaves_out_who_would_find_its_like_delays_that_until_their_next_ballots() -> None:
    fair, led = Court(10, window=9), Court(10, window=9)
    fair.round(2)
    found = [key for key in awaited(fair, 1)[A] if key not in (B, C)]
    assert 0 < len(found) <= 3
    left_out(led, *found)
    assert not set(found) & set(awaited(led, 1)[A]) and led.audits.rounds[1].nonce_count == 10 - len(found)
    led.round()
    assert awaited(led, 1) == awaited(fair, 1) and led.audits.rounds[1].nonce_count == 10
    assert all(list(drawn) == sorted(drawn) for drawn in awaited(led, 1).values()), "as after a snapshot"
    led.round()
    assert awaited(led, 1) == awaited(fair, 1), "and only once"


def test_who_is_left_out_for_long_is_drawn_for_all_rounds_that_are_open_and_can_still_report() -> None:
    court = Court(auditors=3)
    for _ in range(AUDITS.window + 1):
        left_out(court, D)
    court.round()
    assert {number: D in awaited(court, number)[A] for number in court.audits.rounds} == {3: True, 4: True, 5: True}
    due = next(due for person, due in court.due(A) if person.public == D)
    assert due.round == 3 and court.problem(court.said(PEOPLE[3], due)) is None


def test_who_is_left_out_is_not_drawn_for_a_round_that_is_only_kept_for_a_dispute() -> None:
    court = Court(auditors=3)
    left_out(court, D)
    left_out(court, D)
    left_out(court, D)
    court.say(*next(item for item in court.due(A) if item[1].round == 1), MISMATCH)
    for auditor, due in court.due(A):
        court.say(auditor, due)
    left_out(court, D)
    court.round()
    assert awaited(court, 1) == {A: ()} and D in awaited(court, 3)[A]


def test_where_all_were_drawn_by_the_model_root_nobody_is_drawn_again() -> None:
    court = Court(auditors=3)
    court.nonces = lambda key, voter: (None, commit_nonce(nonce_of(voter, 1)))  # type: ignore[method-assign]
    left_out(court, D)
    del court.nonces  # type: ignore[misc]
    foreseen = awaited(court, 1)
    assert court.audits.rounds[1].nonce_count == 0 and D in foreseen[A]
    court.round()
    assert awaited(court, 1) == foreseen and court.audits.rounds[1].nonce_count == 0


def test_only_jobs_with_sampled_audits_draw_any() -> None:
    world, key = world_with_job(spec=UNAUDITED, voters=4, trainers=4)
    world.decide(closings=(world.closing(key),))
    assert world.state.audits == AuditsState()


def test_what_was_not_accepted_is_not_audited(court: Court) -> None:
    court.decide(closings=(court.closing(court.key, {A: Verdict.ACCEPT, B: Verdict.NORM}),))
    assert court.audits.rounds[1].proposals.keys() == {A}


def test_a_job_with_sampled_audits_needs_more_reexecutors_than_twice_the_liars() -> None:
    world = World(7, 4)
    with pytest.raises(Refused, match="'sampled' needs 5 voters with a worker, found 4"):
        world.start(spec=SAMPLED)
    enough = World(7, 5)
    assert len(enough.job(enough.start(spec=SAMPLED)).reexecutors) == 5


def test_such_a_round_is_judged_without_reexecution(court: Court) -> None:
    job = court.job(court.key)
    assert job.reexecutors == (A, B, C, D)
    assert job.round_terms(court.key).reexecutors == frozenset() and not job.round_terms(court.key).trainers_to_vouch_for


def test_the_first_round_and_the_last_ones_are_reexecuted_before_the_ballot_and_nothing_is_drawn_of_them() -> None:
    court = Court(4, SAMPLED + b":5", is_new=True, closing=2, window=9)
    seen, drawn = list[tuple[int, int]](), dict[int, set[bytes]]()
    while court.job(court.key).phase is JobPhase.RUNNING:
        terms = court.job(court.key).round_terms(court.key)
        seen.append((len(terms.trainers_to_vouch_for), len(terms.reexecutors)))
        court.round()
        drawn |= {number: set(of.proposals) for number, of in court.audits.rounds.items()}
    assert seen == [(4, 4), (0, 0), (0, 0), (4, 4), (4, 4)]
    assert drawn == {1: {A, B, C, D}, 2: {A, B, C, D}}


# Reports -----------------------------------------------------------------------------------------------------------------


def test_a_report_is_logged_and_awaited_once(drawn: Court) -> None:
    auditor, due = drawn.due()[0]
    drawn.decide(drawn.said(auditor, due))
    assert drawn.log == [(AuditResult.PASSED, due.trainer, auditor.public)]
    entry = drawn.state.audits.log[0]
    assert (entry.finding, entry.relative_error_ppm) == (MATCH, 7)
    assert drawn.standing(auditor.public) == MemberAuditRecord(reports=1)
    assert due not in audit_duties(auditor.public, drawn.state)
    assert "is expected" in (drawn.problem(drawn.said(auditor, due)) or "")


def test_who_was_not_drawn_reports_nothing(drawn: Court) -> None:
    auditor, due = drawn.due()[0]
    assert "is expected" in (drawn.problem(drawn.said(auditor, replace(due, round=9))) or "")
    assert "is expected" in (drawn.problem(drawn.said(drawn.people[due.trainer], due)) or "")
    assert "has no open audits" in (drawn.problem(drawn.said(auditor, replace(due, job=bytes(32)))) or "")


def test_an_audit_that_is_not_reported_in_time_lapses_and_is_held_against_its_auditor() -> None:
    court = Court(auditors=3, rounds=AUDITS.window)
    auditor, due = court.due()[0]
    assert due.round == 1 and court.problem(court.said(auditor, due)) is None
    court.round()
    assert "is expected" in (court.problem(court.said(auditor, due)) or "")
    assert {result for result, _, _ in court.log} == {AuditResult.LAPSED} and len(court.log) == 12
    assert [court.standing(key).lapsed for key in (A, B, C, D)] == [3, 3, 3, 3]
    assert list(court.audits.rounds) == [2, 3, 4]


# time of blocks that are a millisecond apart: four re-executors have 28 of them
TIMED = {"response_ms": 8, "serving_ms_per_reexecutor": 4}


def test_an_audit_is_awaited_while_time_is_left_however_many_rounds_go_by() -> None:
    court = Court(auditors=3, rounds=1, **TIMED)
    auditor, due = court.due()[0]
    other, of_other = court.due()[-1]
    court.round(1 + 28 - 1)
    assert court.problem(court.said(auditor, due)) is None
    assert 1 in court.audits.rounds
    assert len(court.audits.unvested_rounds[due.trainer]) == 29, "no reward is its trainer's own while a report is awaited"
    court.say(auditor, due)
    court.round()
    assert "is expected" in (court.problem(court.said(other, of_other)) or "")
    assert {result for result, _, _ in court.log} == {AuditResult.PASSED, AuditResult.LAPSED}
    assert 1 not in court.audits.rounds


def test_once_all_have_reported_only_rounds_keep_a_proposal() -> None:
    court = Court(rounds=1, **TIMED)
    for auditor, due in court.due():
        court.say(auditor, due)
    court.round(AUDITS.window - 1)
    assert 1 in court.audits.rounds, "somebody may volunteer for it"
    court.round()
    assert 1 not in court.audits.rounds


def test_a_dispute_is_open_while_time_is_left_however_many_rounds_go_by() -> None:
    court = Court(rounds=1, **TIMED)
    court.challenge(A)
    (dispute,) = court.audits.disputes
    court.round(2)
    assert court.audits.disputes[0].opened_ms > court.audits.rounds[dispute.round].closed_ms > 0
    court.round(28 - 1)
    assert court.audits.disputes
    court.round()
    assert not court.audits.disputes and AuditResult.DROPPED in [result for result, _, _ in court.log]


def test_the_next_dispute_about_a_trainer_has_a_window_of_its_own_once_the_one_before_it_is_over() -> None:
    """Judges fetch one disputed proposal of a trainer at a time, and f liars may dispute several at once."""
    court = Court(auditors=3, rounds=2, **TIMED)
    for number in (1, 2):
        auditor, due = next(item for item in court.due(A) if item[1].round == number)
        court.say(auditor, due, WITHHELD)
    court.round(1 + 28)
    first, second = court.audits.disputes
    assert (first.round, second.round) == (1, 2) and first.opened_ms and not second.opened_ms
    court.round()
    assert [dispute.round for dispute in court.audits.disputes] == [2]
    court.round(28)
    (second,) = court.audits.disputes
    assert second.opened_ms > first.opened_ms + 28
    court.round(2)
    assert not court.audits.disputes


def test_the_time_for_reports_on_a_trainer_begins_anew_after_a_dispute_about_it() -> None:
    court = Court(auditors=3, rounds=2, **TIMED)
    court.say(*next(item for item in court.due(A) if item[1].round == 1), WITHHELD)
    auditor, due = next(item for item in court.due(A) if item[1].round == 2)
    other, of_other = next(item for item in court.due(B) if item[1].round == 2)
    court.round(1 + 28)
    assert court.audits.disputes and court.problem(court.said(auditor, due)) is None
    assert "is expected" in (court.problem(court.said(other, of_other)) or ""), "on others it does not wait"
    court.round()
    assert not court.audits.disputes
    court.round(28)
    assert court.problem(court.said(auditor, due)) is None
    court.round(2)
    assert "is expected" in (court.problem(court.said(auditor, due)) or "")


def test_liars_that_dispute_again_and_again_do_not_put_off_a_reward_for_ever() -> None:
    """After a number of disputes, the pending reports of the liars lapse like all others."""
    court = Court(4, SAMPLED + b":2000", auditors=3, suspension_rounds=1, response_ms=2, serving_ms_per_reexecutor=1, rounds=1)
    for _ in range(2 * FALSE_CHALLENGES_MAX + 1):
        assert court.audits.rounds[1].proposals[A].pending_auditors, "it waits for the disputes"
        court.round()
        auditor, due = [item for item in court.due(A) if item[0].public in (C, D)][-1]
        court.say(auditor, due, WITHHELD)
        court.round(1 + 7)
        court.judge(MATCH, 2, A)
        assert not court.audits.disputes and not court.suspended(A)
    court.round(7 + 2)
    assert 1 not in court.audits.rounds and 1 not in court.audits.unvested_rounds[A]


def test_a_dispute_in_another_job_holds_up_nothing(drawn: Court) -> None:
    mine = audit_duties(A, drawn.state)
    other = [replace(due, job=bytes(32), is_dispute=True) for due in mine]
    assert first_duty_of_each_trainer([*other, *mine], drawn.state.members) == [
        *other,
        *first_duty_of_each_trainer(mine, drawn.state.members),
    ]


def test_one_proposal_of_each_trainer_is_fetched_at_a_time_and_disputes_come_first(court: Court) -> None:
    court.round(3)
    court.challenge(B)
    for key in (A, B, C, D):
        due = audit_duties(key, court.state)
        turns = first_duty_of_each_trainer(due, court.state.members)
        assert len({item.trainer for item in turns}) == len(turns) == len({item.trainer for item in due})
        for turn in turns:
            others = [item for item in due if item.trainer == turn.trainer]
            assert turn == min(others, key=lambda item: (not item.is_dispute, item.round))


def test_a_judge_that_did_not_see_a_proposal_judges_once_more_if_somebody_found_it_false() -> None:
    """A liar may show its proposal to exactly f honest judges, at the last moment. They serve it to the others."""
    court = Court(7, **TIMED)
    court.challenge(A)
    court.judge(WITHHELD, 3)
    (dispute,) = court.audits.disputes
    assert (len(dispute.voted_invalid), len(dispute.voted_withheld)) == (1, 3)
    waiting = court.due(A, disputes=True)
    assert sorted(due.is_second_verdict for _, due in waiting) == [False] * 2 + [True] * 3
    seconds = [(person, due) for person, due in waiting if due.is_second_verdict]
    assert "has already given its verdict" in (court.problem(court.said(*seconds[0], WITHHELD)) or "")
    court.round(1 + 40 + 1)
    assert court.audits.disputes, "they have a second window"
    court.say(*seconds[0], MISMATCH)
    assert "has already given its verdict" in (court.problem(court.said(*seconds[0], MATCH)) or "")
    court.say(*seconds[1], MISMATCH)
    assert court.suspended(A), "more than may lie found it false, and the last one did not see it"


def test_a_judge_that_did_not_see_a_proposal_waits_for_nobody_if_nobody_found_it_false() -> None:
    court = Court(7, **TIMED)
    court.challenge(A, WITHHELD)
    court.judge(WITHHELD, 1)
    assert not any(due.is_second_verdict for _, due in court.due(A, disputes=True))
    court.round(1 + 40 + 1)
    assert not court.audits.disputes


def test_the_time_of_a_window_begins_when_its_round_is_closed_and_not_with_an_older_block() -> None:
    court = Court(auditors=3, **TIMED)
    court.decide_body(codec.encode(BlockBody((court.closing(court.key),), (), ())), after_ms=1_000)
    auditor, due = court.due()[0]
    court.round(AUDITS.window + 1)
    assert court.problem(court.said(auditor, due)) is None


@pytest.mark.parametrize(("serving_ms_per_reexecutor", "refused"), [(190_000, None), (191_000, "10 minutes over")])
def test_a_job_of_which_the_least_link_shows_too_little_in_time_does_not_start(
    serving_ms_per_reexecutor: int, refused: str | None
) -> None:
    world = World(4, 4, replace(AUDITS, response_ms=15_000, serving_ms_per_reexecutor=serving_ms_per_reexecutor))
    if refused is None:
        assert world.start(spec=SAMPLED) in world.state.audits.jobs
    else:
        with pytest.raises(Refused, match=f"{refused}.*higher uplink_mbit_min"):
            world.start(spec=SAMPLED)


def test_the_log_keeps_the_last_results_only(court: Court) -> None:
    court.round(AUDITS.window + 12)
    assert len(court.log) == AUDIT_LOG_MAX and court.state.audits.log[-1].round == 12


# Disputes ----------------------------------------------------------------------------------------------------------------


def test_a_failed_report_opens_a_dispute_that_all_reexecutors_but_the_accused_judge(court: Court) -> None:
    court.challenge(B)
    waiting = court.due(disputes=True)
    challenger = next(iter(court.audits.disputes[0].challenges))
    assert {person.public for person, _ in waiting} == {A, C, D} - {challenger}
    assert all((item.trainer, item.round) == (B, 1) for _, item in waiting)
    assert court.log[-1] == (AuditResult.CHALLENGED, B, challenger)


@pytest.mark.parametrize(("n", "needed"), [(2, 1), (3, 2), (4, 2), (5, 3), (7, 4), (10, 5)])
def test_more_than_half_of_the_judges_convict_and_one_less_does_not(n: int, needed: int) -> None:
    """The challenge counts as the first verdict."""
    court = Court(n)
    court.challenge(A)
    court.judge(MISMATCH, max(0, needed - 2))
    assert court.suspended(A) == (needed == 1)
    if needed > 1:
        court.judge(ReplayFinding.MALFORMED, 1)
    assert court.suspended(A) and court.log[-1][:2] == (AuditResult.SUSPENDED, A)


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ("dddd", (AuditResult.SUSPENDED, MISMATCH)),
        # it showed its proposal to some: three of seven are one honest judge at least
        ("dddu", (AuditResult.SUSPENDED, MISMATCH)),
        ("dduuu", None),  # two may be liars, and the judges without the proposal may have had no time
        ("dduum", None),
        ("duuuu", (AuditResult.SUSPENDED, WITHHELD)),
        ("uuuu", (AuditResult.SUSPENDED, WITHHELD)),
        ("uuumm", None),
        ("uummmm", (AuditResult.REFUTED, WITHHELD)),
        ("duummm", None),
    ],
)
def test_judges_that_did_not_see_a_proposal_did_not_find_it_false(
    said: str, ends: tuple[AuditResult, ReplayFinding] | None
) -> None:
    """Seven voters tolerate two liars. Six judge, and four are their majority. The first verdict is the challenge."""
    court, verdicts = Court(7), {"d": MISMATCH, "u": WITHHELD, "m": MATCH}
    court.challenge(A, verdicts[said[0]])
    for letter in said[1:]:
        assert court.audits.disputes, "not decided yet"
        court.judge(verdicts[letter], 1)
    entry = court.state.audits.log[-1]
    assert (ends is None) == bool(court.audits.disputes)
    assert ends is None or (entry.result, entry.finding) == ends
    assert court.suspended(A) == (ends is not None and ends[0] is AuditResult.SUSPENDED)


@pytest.mark.parametrize(("n", "needed"), [(4, 2), (7, 4), (10, 5)])
def test_more_than_half_of_the_judges_refute_and_one_less_does_not(n: int, needed: int) -> None:
    court = Court(n)
    court.challenge(A)
    challenger = next(iter(court.audits.disputes[0].challenges))
    court.judge(MATCH, needed - 1)
    assert court.audits.disputes and not court.standing(challenger).refuted
    court.judge(MATCH, 1)
    assert not court.audits.disputes and court.log[-1] == (AuditResult.REFUTED, A, challenger)
    assert court.standing(challenger).refuted == 1 and not court.suspended(A)


def test_where_few_reexecute_half_of_them_is_not_enough_if_they_could_all_be_liars() -> None:
    """n = 7, f = 2: with two of five re-executors left besides the accused, three must agree, so nothing is decided."""
    court = Court(7)
    for person in PEOPLE[3:7]:
        court.decide(court.tx(person, "member/register", RegisterRoles(())))
    court.round(2)
    assert court.audits.rounds[2].reexecutors == (A, B, C)
    auditor, due = next((person, due) for person, due in court.due(A) if due.round == 2)
    court.say(auditor, due, MISMATCH)
    court.judge(MISMATCH)
    assert not court.suspended(A) and court.audits.disputes


def test_neither_the_accused_nor_a_stranger_judges_and_nobody_twice() -> None:
    court = Court(7, rounds=1)
    due = replace(court.challenge(A), is_dispute=True)
    judges = court.due(disputes=True)
    assert "is not a judge" in (court.problem(court.said(PEOPLE[0], due, MATCH)) or "")
    court.decide(court.admission(PEOPLE[8]))
    assert "is not a judge" in (court.problem(court.said(PEOPLE[8], due, MISMATCH)) or "")
    challenger = court.people[next(iter(court.audits.disputes[0].challenges))]
    assert "given its verdict" in (court.problem(court.said(challenger, due, MISMATCH)) or "")
    court.say(*judges[0])
    for finding in (MATCH, MISMATCH):
        assert "given its verdict" in (court.problem(court.said(judges[0][0], due, finding)) or "")
    assert "no dispute" in (court.problem(court.said(judges[1][0], replace(due, round=9))) or "")


def test_a_verdict_after_the_end_is_refused(court: Court) -> None:
    court.challenge(A)
    late = court.due(disputes=True)
    court.judge(MATCH, 2)
    assert "no dispute" in (court.problem(court.said(*late[-1])) or "")


def test_a_dispute_that_finds_no_majority_in_time_ends_without_consequence(court: Court) -> None:
    court.challenge(A)
    (person, due), *_ = court.due(disputes=True)
    court.say(person, due, MATCH)
    court.round(AUDITS.window)
    assert court.audits.disputes
    court.round()
    assert not court.audits.disputes and AuditResult.DROPPED in {result for result, _, _ in court.log}
    assert not court.suspended(A) and not any(court.standing(key).refuted for key in (A, B, C, D))
    assert "no dispute" in (court.problem(court.said(person, due)) or "")


def test_a_second_auditor_of_the_same_proposal_joins_the_dispute() -> None:
    court = Court(7, auditors=6, rounds=1)
    court.challenge(A)
    court.challenge(A)
    (dispute,) = court.audits.disputes
    assert len(dispute.challenges) == 2 and set(dispute.voted_invalid) == dispute.challenges.keys()
    court.judge(MATCH, 4)
    assert [court.standing(key).refuted for key in dispute.challenges] == [1, 1]


def test_a_judge_that_is_drawn_for_the_disputed_proposal_too_counts_once() -> None:
    court = Court(7, auditors=6, rounds=1)
    (first, due), (second, again) = court.due(A)[:2]
    court.say(first, due, MISMATCH)
    court.say(second, replace(again, is_dispute=True), MISMATCH)
    court.say(second, again, MISMATCH)
    (dispute,) = court.audits.disputes
    assert len(dispute.voted_invalid) == 2 and len(dispute.challenges) == 2


# Suspension --------------------------------------------------------------------------------------------------------------


def test_a_convicted_trainer_sits_out_its_rounds_is_not_awaited_and_comes_back(ongoing: Court) -> None:
    ongoing.convict(A)
    for _ in range(AUDITS.suspension_rounds):
        job = ongoing.job(ongoing.key)
        assert A not in job.trainers and A not in job.awaited and ongoing.suspended(A)
        ongoing.round()
    job = ongoing.job(ongoing.key)
    assert A in job.trainers and A in job.awaited and not ongoing.audits.suspended


def test_what_a_member_is_suspended_for_is_told_for_as_long_as_it_is_however_much_is_logged_meanwhile() -> None:
    court = Court(suspension_rounds=20, rounds=2)
    court.convict(A)
    (cause,) = [entry for entry in court.state.audits.log if entry.result is AuditResult.SUSPENDED]
    court.round(18, trainers=(B, C, D))
    rotated(court, PEOPLE[0])
    court.round(trainers=(B, C, D))
    assert len(court.log) == AUDIT_LOG_MAX and cause not in court.state.audits.log
    assert court.audits.suspension_causes == {NEW.public: cause}
    assert court.read_back().audits == court.state.audits
    court.round(trainers=(B, C, D))
    assert not court.audits.suspended and not court.audits.suspension_causes


def test_what_was_last_accepted_of_a_trainer_is_longer_ago_than_a_suspension_when_it_trains_again(ongoing: Court) -> None:
    """Models can detect by this interval alone which updates to discard, also if the last verdict comes with a closing."""
    ongoing.challenge(A)
    person, due = ongoing.due(A, disputes=True)[0]
    last = ongoing.job(ongoing.key).round
    accepted = dict.fromkeys(ongoing.job(ongoing.key).trainers, Verdict.ACCEPT)
    ongoing.decide(ongoing.said(person, due, MISMATCH), closings=(ongoing.closing(ongoing.key, accepted),))
    assert ongoing.suspended(A) and A in accepted
    while A not in ongoing.job(ongoing.key).trainers:
        ongoing.round()
    assert ongoing.job(ongoing.key).round - last == AUDITS.suspension_rounds + 1


def test_each_suspension_is_twice_as_long_as_the_one_before_also_in_the_next_job(court: Court) -> None:
    """In the same job its updates are re-executed before the ballot."""
    for times in range(3):
        court.round()
        assert A in court.job(court.key).trainers
        opened = court.job(court.key).round
        court.convict(A)
        assert court.audits.suspended[A] == opened + 1 + (AUDITS.suspension_rounds << times)
        court.decide(court.tx(court.people[court.job(court.key).author], "job/stop", StopJob(court.key)))
        court.key = court.start(PEOPLE[1], LONG)
        court.round()


def test_a_suspended_trainer_neither_audits_nor_judges(ongoing: Court) -> None:
    ongoing.convict(A)
    ongoing.round(2)
    of = ongoing.audits.rounds[ongoing.job(ongoing.key).round - 1]
    assert of.reexecutors == (B, C, D) and all(A not in drawn.pending_auditors for drawn in of.proposals.values())


def test_who_was_right_is_credited_and_who_lied_loses_what_was_not_its_own_yet(ongoing: Court) -> None:
    ongoing.convict(A)
    assert sum(ongoing.standing(key).upheld for key in (B, C, D)) == 1
    assert ongoing.standing(A).rewards_lost == 2 and ongoing.standing(A).rewards == 0


# False challenges --------------------------------------------------------------------------------------------------------


def refute(court: Court, liar: bytes, finding: ReplayFinding = MISMATCH) -> None:
    """Make one false challenge of this liar, which is refuted."""
    while not any(person.public == liar for person, _ in court.due()):
        court.round()
    person, due = next((person, due) for person, due in court.due() if person.public == liar)
    court.say(person, due, finding)
    court.judge(MATCH, 2)
    assert not court.audits.disputes


def test_who_challenges_falsely_too_often_is_neither_drawn_nor_heard_for_a_while(court: Court) -> None:
    for _ in range(FALSE_CHALLENGES_MAX):
        refute(court, D)
    assert court.standing(D).refuted == FALSE_CHALLENGES_MAX
    court_round = court.job(court.key).round
    assert court.audits.ignored_challengers == {D: court_round + 1 + AUDITS.suspension_rounds}
    for due in [due for person, due in court.due() if person.public == D]:
        assert "too many of its challenges were refuted" in (court.problem(court.said(PEOPLE[3], due, MISMATCH)) or "")
        assert court.problem(court.said(PEOPLE[3], due, MATCH)) is None
    court.round()
    assert D not in court.audits.rounds[court_round].reexecutors
    assert all(D not in drawn.pending_auditors for drawn in court.audits.rounds[court_round].proposals.values())
    assert D in court.job(court.key).trainers
    court.round(AUDITS.suspension_rounds + 1)
    assert D in court.audits.rounds[court.job(court.key).round - 1].reexecutors


def test_what_others_can_get_is_not_held_against_who_could_not(court: Court) -> None:
    refute(court, D, WITHHELD)
    assert court.standing(D).refuted == 0


def apart(court: Court, trainer: bytes) -> set[bytes]:
    return {key for key, rounds in court.audits.withheld_claims.get(trainer, {}).items() if len(rounds) == FALSE_CHALLENGES_MAX}


def drawn_for(court: Court, trainer: bytes) -> set[bytes]:
    """Return the auditors of the last round for this trainer."""
    return set(court.audits.rounds[court.job(court.key).round - 1].proposals[trainer].pending_auditors)


def test_who_says_too_often_that_a_trainer_withholds_what_others_have_is_not_drawn_for_it_any_more() -> None:
    """Neither is penalized: one of the two lies, and nobody can tell which one."""
    court = Court(auditors=2, window=20, suspension_rounds=100)
    withheld(court, PEOPLE[3], A, FALSE_CHALLENGES_MAX)
    assert apart(court, A) == {D} and not court.audits.ignored_challengers
    assert not court.suspended(A) and not court.standing(D).refuted
    court.round()
    assert drawn_for(court, A) == {B, C}, "both are drawn for sure now: as many audits as before"
    court.round(8)
    assert all(
        D not in of.proposals[A].pending_auditors
        for number, of in court.audits.rounds.items()
        if number > court.job(court.key).round - 9
    )
    assert any(D in of.proposals[B].pending_auditors for of in court.audits.rounds.values())


@pytest.mark.parametrize(("n", "faults"), [(4, 1), (7, 2)])
def test_a_trainer_that_serves_all_but_more_reexecutors_than_can_lie_is_suspended(n: int, faults: int) -> None:
    court = Court(n, auditors=6, window=20, suspension_rounds=100)
    for auditor in PEOPLE[1 : 1 + faults]:
        withheld(court, auditor, A, FALSE_CHALLENGES_MAX)
    assert not court.suspended(A) and apart(court, A) == {person.public for person in PEOPLE[1 : 1 + faults]}
    for said in range(FALSE_CHALLENGES_MAX):
        assert not court.suspended(A), said
        withheld(court, PEOPLE[1 + faults], A)
    assert court.suspended(A) and not court.audits.withheld_claims, "it begins anew"
    assert court.log[-1][:2] == (AuditResult.SHUNNED, A) and court.audits.suspension_causes[A].result is AuditResult.SHUNNED
    assert not any(court.standing(person.public).upheld for person in PEOPLE[:n]), "most others could get it"


def others_leave(court: Court, *leaving: FastSigner) -> None:
    """Let these members leave, and close rounds until no round in a window has them as re-executors."""
    court.decide(*(court.tx(person, "member/resign", ResignAsVoter()) for person in leaving))
    for person in leaving:
        court.people.pop(person.public)
    while any(person.public in court.state.members.voters for person in leaving):
        court.decide()
    while any(person.public in of.reexecutors for of in court.audits.rounds.values() for person in leaving):
        court.round()


def test_who_is_gone_does_not_count_among_those_that_could_not_get_what_a_trainer_commits_to() -> None:
    """Once the voters are fewer, the earlier number f would exceed the current one."""
    court = Court(7, auditors=6, window=3, suspension_rounds=100)
    for liar in PEOPLE[5:7]:
        withheld(court, liar, A, FALSE_CHALLENGES_MAX)
    others_leave(court, *PEOPLE[5:7])
    assert court.audits.rounds[court.job(court.key).round - 1].faults == 1 and len(apart(court, A)) == 2
    withheld(court, PEOPLE[1], A, FALSE_CHALLENGES_MAX)
    assert apart(court, A) == {B, PEOPLE[5].public, PEOPLE[6].public} and not court.suspended(A)
    for _ in range(FALSE_CHALLENGES_MAX):
        assert not court.suspended(A)
        withheld(court, PEOPLE[2], A)
    assert court.suspended(A), "of those who are here, two of five"


def test_only_who_could_not_get_something_has_it_counted_how_many_could_not() -> None:
    """If the voters became fewer, a false challenge of another kind would suspend the accused trainer."""
    court = Court(7, auditors=6, window=3, suspension_rounds=100)
    for liar in PEOPLE[1:3]:
        withheld(court, liar, A, FALSE_CHALLENGES_MAX)
    others_leave(court, *PEOPLE[5:7])
    assert court.audits.rounds[court.job(court.key).round - 1].faults == 1 and apart(court, A) == {B, C}
    auditor, due = next(item for item in court.due(A) if item[0] is PEOPLE[3])
    court.say(auditor, due, MISMATCH)
    while court.audits.disputes:
        court.judge(MATCH, 1)
    assert court.log[-1] == (AuditResult.REFUTED, A, D) and not court.suspended(A)


def test_that_something_could_not_be_got_is_forgotten_after_as_many_rounds_as_a_first_suspension_takes() -> None:
    """Otherwise bad days of years would add up, and an auditor with three false reports would never be drawn again."""
    court = Court(auditors=3, window=3, suspension_rounds=10)
    withheld(court, PEOPLE[3], A)
    first = court.job(court.key).round
    assert court.audits.withheld_claims == {A: {D: (first,)}}
    court.round(9)
    withheld(court, PEOPLE[3], A)
    assert court.audits.withheld_claims == {A: {D: (first, first + 9)}}
    court.round()
    assert court.audits.withheld_claims == {A: {D: (first, first + 9)}}
    court.round()
    assert court.audits.withheld_claims == {A: {D: (first + 9,)}}
    withheld(court, PEOPLE[3], A, FALSE_CHALLENGES_MAX - 1)
    assert apart(court, A) == {D}
    assert court.read_back().audits == court.state.audits
    while apart(court, A):
        court.round()
        assert court.job(court.key).round <= first + 21
    court.round()
    assert D in drawn_for(court, A)
    court.round(4)
    assert not court.audits.withheld_claims


def test_of_what_was_said_to_be_withheld_the_last_claims_are_kept() -> None:
    """Audits that were drawn before the third claim may add some."""
    court = Court(auditors=3, window=6, suspension_rounds=50, rounds=FALSE_CHALLENGES_MAX + 2)
    for _ in range(FALSE_CHALLENGES_MAX + 1):
        withheld(court, PEOPLE[3], A)
        court.round()
    last = court.job(court.key).round - 1
    assert court.audits.withheld_claims == {A: {D: tuple(range(last + 1 - FALSE_CHALLENGES_MAX, last + 1))}}


def test_who_is_not_drawn_for_a_trainer_any_more_is_not_with_new_keys_either() -> None:
    court = Court(auditors=3, window=20, suspension_rounds=100)
    withheld(court, PEOPLE[3], A, FALSE_CHALLENGES_MAX)
    rotated(court, PEOPLE[3])
    assert apart(court, A) == {NEW.public} and len(court.audits.withheld_claims[A]) == 1
    court.round(4)
    assert drawn_for(court, A) == {B, C} and NEW.public in drawn_for(court, B)
    assert court.read_back().audits == court.state.audits


def test_an_auditor_stays_apart_from_a_trainer_whatever_else_of_it_is_refuted() -> None:
    """Its fourth refuted challenge does not exclude it, so draws alone keep it from the trainer."""
    court = Court(auditors=3, window=20, suspension_rounds=20)
    for _ in range(FALSE_CHALLENGES_MAX):
        refute(court, D)
    court.round(court.audits.ignored_challengers[D] - court.job(court.key).round + 1)
    withheld(court, PEOPLE[3], A, FALSE_CHALLENGES_MAX)
    assert apart(court, A) == {D} and not court.audits.ignored_challengers
    noted = court.audits.withheld_claims
    refute(court, D)
    assert court.standing(D).refuted == FALSE_CHALLENGES_MAX + 1 and not court.audits.ignored_challengers
    assert court.audits.withheld_claims == noted
    court.round()
    assert drawn_for(court, A) == {B, C} and D in drawn_for(court, B)
    for _ in range(FALSE_CHALLENGES_MAX - 1):
        refute(court, D)
    assert court.audits.withheld_claims == noted and D in court.audits.ignored_challengers, "unheard again, and apart still"


def test_an_auditor_that_is_apart_draws_nothing_late_for_that_trainer_either() -> None:
    court = Court(auditors=3, window=20, suspension_rounds=100)
    withheld(court, PEOPLE[3], A, FALSE_CHALLENGES_MAX)
    assert apart(court, A) == {D}
    left_out(court, D)
    assert D not in drawn_for(court, B)
    court.round()
    missed = court.audits.rounds[court.job(court.key).round - 2]
    assert D in missed.proposals[B].pending_auditors and D not in missed.proposals[A].pending_auditors


def test_a_challenger_has_only_so_many_disputes_open_at_once() -> None:
    court = Court(4, window=20, rounds=12)
    mine = [due for person, due in court.due() if person.public == D]
    for due in mine[:CHALLENGES_OPEN_MAX]:
        court.say(PEOPLE[3], due, MISMATCH)
    assert "open challenges, the maximum" in (court.problem(court.said(PEOPLE[3], mine[CHALLENGES_OPEN_MAX], MISMATCH)) or "")
    assert court.problem(court.said(PEOPLE[3], mine[CHALLENGES_OPEN_MAX], MATCH)) is None
    while len(court.audits.disputes) == CHALLENGES_OPEN_MAX:
        court.judge(MATCH, 1)
    assert court.problem(court.said(PEOPLE[3], mine[CHALLENGES_OPEN_MAX], MISMATCH)) is None


# Volunteers ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def undrawn() -> Court:
    """Return a court with four closed rounds, three of them in the window, and without drawn auditors."""
    return Court(rate=0.0, rounds=AUDITS.window + 1)


def volunteered(court: Court, person: FastSigner, number: int = 4) -> Signed:
    return court.tx(person, VOLUNTEER_KIND, AuditVolunteering(court.key, number))


def accused(court: Court, person: FastSigner, trainer: bytes, number: int = 4, finding: ReplayFinding = MISMATCH) -> None:
    """Volunteer with this finding about one proposal, and a match for the others."""
    court.decide(volunteered(court, person, number))
    for due in [due for who, due in court.due() if who is person and due.round == number]:
        court.say(person, due, finding if due.trainer == trainer else MATCH)


def test_who_volunteers_is_drawn_for_all_other_proposals_of_the_round(undrawn: Court) -> None:
    undrawn.decide(volunteered(undrawn, PEOPLE[1]))
    assert {(person.public, due.round, due.trainer) for person, due in undrawn.due()} == {(B, 4, A), (B, 4, C), (B, 4, D)}
    assert not undrawn.audits.disputes and not undrawn.log
    undrawn.report()
    assert not undrawn.due() and undrawn.standing(B).reports == 3


@pytest.mark.parametrize("finding", [MISMATCH, WITHHELD])
def test_a_volunteer_challenges_as_any_drawn_auditor_and_the_others_judge(undrawn: Court, finding: ReplayFinding) -> None:
    accused(undrawn, PEOPLE[1], A, finding=finding)
    (dispute,) = undrawn.audits.disputes
    assert dispute.challenges == {B: finding} and dispute.judges_heard == (B,) and dispute.proposal_key == (4, A)
    assert undrawn.log[0] == (AuditResult.CHALLENGED, A, B)
    assert {person.public for person, _ in undrawn.due(disputes=True)} == {C, D}
    undrawn.judge(finding, 1)
    assert undrawn.suspended(A) and not undrawn.suspended(B)
    assert undrawn.standing(B) == MemberAuditRecord(rewards=1, reports=3, upheld=1)


def test_a_false_challenge_of_a_volunteer_is_held_against_it(undrawn: Court) -> None:
    for refuted in range(1, FALSE_CHALLENGES_MAX + 1):
        accused(undrawn, PEOPLE[3], A, undrawn.job(undrawn.key).round - 2)
        undrawn.judge(MATCH, 2)
        assert undrawn.standing(D).refuted == refuted and not undrawn.audits.disputes
        undrawn.round()
    assert undrawn.audits.ignored_challengers.keys() == {D}
    assert "too many of its challenges were refuted" in (
        undrawn.problem(volunteered(undrawn, PEOPLE[3], undrawn.job(undrawn.key).round - 2)) or ""
    )


def test_a_proposal_that_was_judged_is_challenged_again_at_the_cost_of_its_challenger(undrawn: Court) -> None:
    for person in PEOPLE[1:3]:
        accused(undrawn, person, A)
        undrawn.judge(MATCH, 2)
    assert [undrawn.standing(key).refuted for key in (B, C)] == [1, 1] and not undrawn.suspended(A)


def test_nobody_volunteers_for_what_it_proposed_with_its_former_key(undrawn: Court) -> None:
    rotated(undrawn, PEOPLE[0])
    undrawn.decide(volunteered(undrawn, NEW))
    assert {due.trainer for person, due in undrawn.due() if person is NEW} == {B, C, D}


def test_who_volunteers_and_says_nothing_lets_its_reports_lapse_and_holds_up_no_reward(undrawn: Court) -> None:
    undrawn.decide(volunteered(undrawn, PEOPLE[1]))
    undrawn.round(AUDITS.window + 1)
    assert undrawn.standing(B).lapsed == 3 and 4 not in undrawn.audits.unvested_rounds[A]


def test_a_reexecutor_volunteers_once_for_a_round_also_with_a_new_key(undrawn: Court) -> None:
    undrawn.decide(volunteered(undrawn, PEOPLE[1]))
    undrawn.report()
    assert "already" in (undrawn.problem(volunteered(undrawn, PEOPLE[1])) or "")
    undrawn.decide(volunteered(undrawn, PEOPLE[1], 3))
    assert "must first report on all its proposals of round 4" in (undrawn.problem(volunteered(undrawn, PEOPLE[1], 2)) or "")
    undrawn.report()
    assert undrawn.problem(volunteered(undrawn, PEOPLE[1], 2)) is None
    rotated(undrawn, PEOPLE[1])
    assert "already" in (undrawn.problem(volunteered(undrawn, NEW)) or "")


def test_nobody_volunteers_for_rounds_that_are_over_open_or_undone_and_no_stranger_for_any(undrawn: Court) -> None:
    for number in (0, 1, 5, 99):
        assert "can be audited now" in (undrawn.problem(volunteered(undrawn, PEOPLE[1], number)) or "")
    undrawn.decide(undrawn.admission(PEOPLE[8], by=PEOPLE[1]))
    assert "was not a re-executor" in (undrawn.problem(volunteered(undrawn, PEOPLE[8])) or "")
    accused(undrawn, PEOPLE[1], A, 3)
    accused(undrawn, PEOPLE[2], D, 4)
    undrawn.judge(MISMATCH, 1, A)  # the job goes back, and the other dispute goes on
    assert undrawn.audits.rounds[4].undone
    assert "round 5 has no proposal left" in (undrawn.problem(volunteered(undrawn, PEOPLE[1], 4)) or "")


def test_nobody_volunteers_for_a_round_whose_rounds_are_over_while_time_is_left() -> None:
    """No nonce draws an auditor so late, either."""
    court = Court(rate=0.0, rounds=AUDITS.window + 1, **TIMED)
    court.decide(volunteered(court, PEOPLE[1], 2))
    court.round()
    assert court.audits.rounds[2].proposals[A].pending_auditors == (B,)
    assert "can be audited now" in (court.problem(volunteered(court, PEOPLE[2], 2)) or "")


def test_who_is_suspended_does_not_volunteer() -> None:
    court = Court(rate=0.0, anchor_rounds=1, rounds=AUDITS.window + 1)
    accused(court, PEOPLE[1], A)
    court.judge(MISMATCH, 1)
    assert court.suspended(A) and not court.audits.rounds[3].undone
    assert "was not a re-executor" in (court.problem(volunteered(court, PEOPLE[0], 3)) or "")
    assert court.problem(volunteered(court, PEOPLE[1], 3)) is None


def test_a_volunteer_is_drawn_for_nothing_that_is_disputed(undrawn: Court) -> None:
    accused(undrawn, PEOPLE[2], D)
    undrawn.decide(volunteered(undrawn, PEOPLE[1]))
    assert {due.trainer for _, due in undrawn.due()} == {A, C}


def test_a_volunteer_is_not_drawn_for_a_trainer_that_it_is_apart_from(undrawn: Court) -> None:
    for _ in range(FALSE_CHALLENGES_MAX):
        accused(undrawn, PEOPLE[3], A, undrawn.job(undrawn.key).round - 1, WITHHELD)
        undrawn.judge(MATCH, 2)
        undrawn.round()
    assert apart(undrawn, A) == {D}
    undrawn.decide(volunteered(undrawn, PEOPLE[3], undrawn.job(undrawn.key).round - 1))
    assert {due.trainer for person, due in undrawn.due() if person is PEOPLE[3]} == {B, C}


def drawn_as_said(court: Court) -> None:
    """Check that exactly the rounds with proposals to volunteer for accept a volunteer, for each member."""
    for key, person in court.people.items():
        told: dict[int, set[bytes]] = {}
        for due in court.rules.audits_module.proposals_to_volunteer_for(key, court.state):
            told.setdefault(due.round, set()).add(due.trainer)
        for number in court.audits.rounds:
            assert (number in told) == (court.problem(volunteered(court, person, number)) is None)


def test_a_peer_is_told_what_it_may_volunteer_for(undrawn: Court) -> None:
    def told(key: bytes) -> list[tuple[int, bytes]]:
        return [(due.round, due.trainer) for due in undrawn.rules.audits_module.proposals_to_volunteer_for(key, undrawn.state)]

    assert told(B) == [(number, trainer) for number in (2, 3, 4) for trainer in sorted((A, C, D))]
    accused(undrawn, PEOPLE[2], D)
    drawn_as_said(undrawn)
    assert told(B)[-2:] == [(4, trainer) for trainer in sorted((A, C))], "one is disputed"
    undrawn.decide(volunteered(undrawn, PEOPLE[1]))
    assert told(B) == [], "it has to report first"
    drawn_as_said(undrawn)
    undrawn.report()
    rotated(undrawn, PEOPLE[1])
    assert told(B) == [] and {number for number, _ in told(NEW.public)} == {2, 3}
    drawn_as_said(undrawn)
    undrawn.judge(MISMATCH, 1)
    assert undrawn.suspended(D) and told(D) == []
    drawn_as_said(undrawn)


def test_who_has_reported_on_a_proposal_does_not_volunteer_for_it_again() -> None:
    court = Court(rate=1.5)
    court.until_drawn(A)
    auditor, due = court.due(A)[0]
    number, others = due.round, {key for key in (A, B, C, D) if key not in (A, auditor.public)}
    court.say(auditor, due)
    court.decide(volunteered(court, auditor, number))
    assert {due.trainer for person, due in court.due() if person is auditor and due.round == number} == others


def test_who_is_drawn_by_its_nonce_may_volunteer_before_it_has_reported() -> None:
    court = Court(rate=1.5)
    court.until_drawn(A)
    auditor, due = court.due(A)[0]
    court.decide(volunteered(court, auditor, due.round))
    assert {item.trainer for person, item in court.due() if person is auditor and item.round == due.round} == {
        key for key in (A, B, C, D) if key != auditor.public
    }


def test_nobody_volunteers_once_all_rounds_are_taken() -> None:
    court = Court(4, SAMPLED + b":3", rate=0.0, rounds=2, **TIMED)
    assert court.audits.rounds and court.job(court.key).is_trained
    assert "can be audited now" in (court.problem(volunteered(court, PEOPLE[1], 2)) or "")


def test_a_round_that_a_volunteer_disputes_keeps_its_reward_open_and_takes_no_more_volunteers_after_its_window(
    undrawn: Court,
) -> None:
    assert undrawn.audits.unvested_rounds[A] == (2, 3, 4)
    accused(undrawn, PEOPLE[1], A, 2)
    undrawn.round()
    assert 2 in undrawn.audits.unvested_rounds[A], "it is disputed"
    late = undrawn.problem(volunteered(undrawn, PEOPLE[2], 2))
    assert "can be audited now" in (late or ""), "or one dispute after the other kept it open"
    undrawn.judge(MISMATCH, 1)
    assert undrawn.standing(A).rewards_lost == 4 and undrawn.standing(A).rewards == 1


def test_a_volunteer_has_only_so_many_disputes_open_too() -> None:
    court = Court(rate=0.0, window=20, rounds=CHALLENGES_OPEN_MAX + 1)
    for number in range(1, CHALLENGES_OPEN_MAX + 1):
        accused(court, PEOPLE[3], A, number)
    assert "open challenges, the maximum" in (court.problem(volunteered(court, PEOPLE[3], CHALLENGES_OPEN_MAX + 1)) or "")


def test_all_reexecutors_may_be_drawn_for_one_proposal_and_join_the_dispute_that_another_opened() -> None:
    """The wanted number of auditors is only the mean."""
    court = Court(12, auditors=8)
    tries = [bytes([number]) * 16 for number in range(256)]
    nonces = {
        key: next(tried for tried in tries if sortition_ticket(court.key, 2, tried, key, A)[0] < 128) for key in court.people
    }
    court.decide(closings=(closing_with(court, {key: (None, commit_nonce(nonces[key])) for key in nonces}),))
    court.decide(closings=(closing_with(court, {key: (nonces[key], None) for key in nonces}),))
    reports = [(auditor, due) for auditor, due in court.due(A) if due.round == 2]
    assert len(reports) == 11
    court.say(*reports[9], MISMATCH)
    for auditor, due in reports[:5]:
        court.say(auditor, replace(due, is_dispute=True))
    for auditor, due in reports[:9]:
        court.say(auditor, due, MISMATCH)
    (dispute,) = court.audits.disputes
    assert len(dispute.challenges) == 10 and len(dispute.voted_invalid) == 5 and len(dispute.voted_valid) == 5
    assert court.read_back().audits == court.state.audits


def test_a_job_of_which_nothing_was_drawn_is_settled_by_the_block_after_its_last_round() -> None:
    court = Court(4, SAMPLED + b":3", rate=0.0, rounds=1)
    assert proposals_to_serve(A, court.state), "somebody may volunteer for it"
    court.round()
    court.decide()
    assert court.key not in court.state.audits.jobs and not proposals_to_serve(A, court.state)
    assert [court.standing(key).rewards for key in (A, B, C, D)] == [2, 2, 2, 2]


# Rewards -----------------------------------------------------------------------------------------------------------------


def test_a_reward_is_the_trainers_own_when_the_window_of_its_round_has_passed(court: Court) -> None:
    court.round(AUDITS.window)
    assert court.audits.unvested_rounds[A] == (1, 2, 3) and court.standing(A).rewards == 0
    court.round()
    assert court.audits.unvested_rounds[A] == (2, 3, 4) and court.standing(A).rewards == 1


def test_the_reward_of_a_disputed_round_waits_for_the_end_of_the_dispute(court: Court) -> None:
    court.round(AUDITS.window)
    assert court.challenge(A).round == 1
    court.round(2)
    assert court.audits.unvested_rounds[A] == (1, 2, 3, 4, 5) and court.standing(A).rewards == 0, "reports on it wait, too"
    assert court.standing(B).rewards == 2
    court.judge(MATCH, 2)
    court.round()
    assert court.standing(A).rewards == 3


# Ends --------------------------------------------------------------------------------------------------------------------


def test_the_audits_of_a_job_go_on_after_its_last_round_until_all_is_said_and_then_the_rest_is_paid() -> None:
    court = Court(4, SAMPLED + b":2", response_ms=1_000, rounds=1)
    assert court.job(court.key).phase is JobPhase.SETTLING
    court.challenge(A)
    court.judge(MATCH, 2)
    while court.due():
        court.say(*court.due()[0])
        assert court.key in court.state.audits.jobs and not any(court.standing(key).rewards for key in (A, B, C, D))
    court.open_losses()
    assert court.job(court.key).phase is JobPhase.FINISHED and court.key not in court.state.audits.jobs
    assert [court.standing(key).rewards for key in (A, B, C, D)] == [1, 1, 1, 1]


def test_the_disputes_of_a_job_that_was_stopped_go_on_and_then_the_rest_is_paid() -> None:
    court = Court(4, SAMPLED + b":9", rounds=1)
    court.challenge(A)
    court.decide(court.tx(PEOPLE[0], "job/stop", StopJob(court.key)))
    assert court.job(court.key).phase is JobPhase.FINISHED and not court.due() and court.audits.disputes
    court.judge(MISMATCH, 1)
    assert court.standing(A) == MemberAuditRecord(suspensions=1, rewards_lost=1, reports=court.standing(A).reports)
    assert court.key not in court.state.audits.jobs
    assert [court.standing(key).rewards for key in (A, B, C, D)] == [0, 1, 1, 1]


def test_what_nobody_reports_of_a_job_after_its_last_round_lapses_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_machine, "POST_JOB_AUDIT_HEIGHTS", 5)
    assert POST_JOB_AUDIT_HEIGHTS > 100
    court = Court(4, SAMPLED + b":2", response_ms=100_000, rounds=1)
    for _ in range(5):
        court.decide()
        assert court.key in court.state.audits.jobs and court.job(court.key).phase is JobPhase.SETTLING
    court.decide()
    assert court.job(court.key).phase is JobPhase.FINISHED and court.state.audits.jobs == {}
    assert [court.standing(key).rewards for key in (A, B, C, D)] == [1, 1, 1, 1]


def test_an_expelled_trainer_draws_nothing_and_is_paid_nothing_and_its_last_update_is_audited(ongoing: Court) -> None:
    """Its update is in the model."""
    ongoing.decide(closings=(ongoing.closing(ongoing.key),), evidence=(ongoing.double(PEOPLE[1]),))
    of = ongoing.audits.rounds[3]
    assert (
        of.proposals[B].pending_auditors
        and B not in of.reexecutors
        and not any(B in drawn.pending_auditors for drawn in of.proposals.values())
    )
    assert 3 in ongoing.audits.unvested_rounds[A] and 3 not in ongoing.audits.unvested_rounds[B]


def test_the_oldest_rounds_lapse_where_too_much_would_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignments, "AUDITABLE_PROPOSALS_MAX", 9)
    court = Court(4, window=50, auditors=3, rounds=5)
    assert sum(len(of.proposals) for of in court.audits.rounds.values()) == 8
    assert "can be audited now" in (court.problem(volunteered(court, PEOPLE[1], 3)) or "")
    assert list(court.audits.rounds) == [4, 5] and sum(court.standing(key).lapsed for key in (A, B, C, D)) == 36


def test_where_too_much_would_be_open_no_audit_lapses_as_long_as_there_is_what_nobody_awaits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pending report may find a lie, so proposals that are kept for volunteers go first. Disputed ones stay."""
    monkeypatch.setattr(assignments, "AUDITABLE_PROPOSALS_MAX", 9)
    court = Court(4, window=50, auditors=3, rounds=2)
    reports = [(auditor, due) for auditor, due in court.due() if due.round == 2]
    accused = next(due for _, due in reports if due.trainer == A)
    for auditor, due in reports:
        court.say(auditor, due, MISMATCH if due is accused else MATCH)
    court.round()
    assert {number: set(of.proposals) for number, of in court.audits.rounds.items()} == {1: {A, B, C, D}, 2: {A}, 3: {A, B, C, D}}
    assert not any(court.standing(key).lapsed for key in (A, B, C, D)) and court.audits.disputes
    court.round()
    assert list(court.audits.rounds) == [2, 3, 4], "all the others are awaited: the oldest round lapses"
    assert [court.standing(key).lapsed for key in (A, B, C, D)] == [3, 3, 3, 3]


# Rotated keys ------------------------------------------------------------------------------------------------------------

NEW = FastSigner("rotated")
BY_KEY[NEW.public] = NEW


def rotated(court: Court, person: FastSigner) -> None:
    court.decide(court.rotation(person, NEW))
    court.people.pop(person.public)
    court.people[NEW.public] = NEW


def test_an_auditor_with_a_new_key_reports_and_the_old_key_says_nothing(drawn: Court) -> None:
    auditor, due = drawn.due()[0]
    rotated(drawn, auditor)
    assert due in audit_duties(NEW.public, drawn.state) and audit_duties(auditor.public, drawn.state) == []
    drawn.say(NEW, due)
    assert drawn.standing(NEW.public).reports == 1


def test_a_judge_with_a_new_key_does_not_vote_again() -> None:
    court = Court(7, rounds=1)
    court.challenge(A)
    judge, due = court.due(disputes=True)[0]
    court.say(judge, due)
    rotated(court, judge)
    assert "given its verdict" in (court.problem(court.said(NEW, due)) or "")


def test_the_accused_does_not_judge_with_a_new_key_and_is_suspended_with_it(ongoing: Court) -> None:
    due = replace(ongoing.challenge(A), is_dispute=True)
    rotated(ongoing, PEOPLE[0])
    assert "is not a judge" in (ongoing.problem(ongoing.said(NEW, due)) or "")
    assert proposals_to_serve(NEW.public, ongoing.state) and not proposals_to_serve(A, ongoing.state)
    ongoing.judge(MISMATCH, 1)
    assert ongoing.suspended(NEW.public) and ongoing.standing(NEW.public).rewards_lost == 2


def test_a_suspended_trainer_does_not_come_back_into_a_round_that_its_new_key_makes_others_take_over(ongoing: Court) -> None:
    """After a rotation one of four voters is missing, so that the open round is renewed in the same block."""
    ongoing.convict(A)
    ongoing.round(trainers=(B, C, D))
    opened = ongoing.job(ongoing.key).opened_height
    rotated(ongoing, PEOPLE[0])
    job = ongoing.job(ongoing.key)
    assert job.opened_height > opened and NEW.public in job.voters
    assert job.trainers == job.awaited == (B, C, D)


@pytest.mark.parametrize("in_the_closing_block", [False, True])
def test_a_suspended_trainer_does_not_come_back_with_a_new_key(ongoing: Court, in_the_closing_block: bool) -> None:
    ongoing.convict(A)
    if in_the_closing_block:
        closing = ongoing.closing(ongoing.key, dict.fromkeys((B, C, D), Verdict.ACCEPT))
        ongoing.decide(ongoing.rotation(PEOPLE[0], NEW), closings=(closing,))
    else:
        ongoing.decide(ongoing.rotation(PEOPLE[0], NEW))
        ongoing.round(trainers=(B, C, D))
    assert not {A, NEW.public} & set(ongoing.job(ongoing.key).trainers)
    assert ongoing.suspended(NEW.public) and ongoing.standing(NEW.public).suspensions == 1


# The state ---------------------------------------------------------------------------------------------------------------


def test_the_state_is_the_same_after_a_snapshot_and_goes_on_alike(ongoing: Court) -> None:
    ongoing.challenge(A)
    ongoing.convict(B)
    again = ongoing.read_back()
    assert again.audits == ongoing.state.audits and again.state_root == ongoing.state.state_root
    signed = ongoing.said(*ongoing.due(disputes=True)[0])
    one, other = (ongoing.rules.apply_transaction(state, signed).audits for state in (again, ongoing.state))
    assert one == other


def test_an_empty_block_changes_nothing(ongoing: Court) -> None:
    ongoing.challenge(A)
    root = ongoing.state.state_root
    ongoing.decide()
    assert ongoing.state.state_root == root


def test_the_same_history_gives_the_same_state() -> None:
    def history() -> bytes:
        court = Court(rounds=2)
        court.convict(C)
        court.round(2, trainers=(A, B, D))
        return hashlib.sha256(court.state.encoded_module("audits")).digest()

    assert history() == history()


# When blocks are made for it ---------------------------------------------------------------------------------------------


def proposed(court: Court) -> BlockBody | None:
    assert court.ledger.has_work() == (court.ledger.make_body(court.state.height + 1, 0) is not None)
    body = court.ledger.make_body(court.state.height + 1, 0)
    return None if body is None else decode_body(body)


def test_a_report_waits_for_the_block_that_closes_the_open_round(drawn: Court) -> None:
    auditor, due = drawn.due()[0]
    report = drawn.said(auditor, due)
    drawn.ledger.mempool.add_transaction(report)
    assert proposed(drawn) is None
    drawn.vote(drawn.key, dict.fromkeys(drawn.job(drawn.key).trainers, Verdict.ACCEPT))
    body = proposed(drawn)
    assert body is not None and body.round_certificates and body.transactions == (report,)


def test_what_is_in_a_hurry_takes_a_report_along(drawn: Court) -> None:
    auditor, due = drawn.due()[0]
    report = drawn.said(auditor, due)
    person = next(person for person in PEOPLE[:4] if person is not auditor)
    drawn.ledger.mempool.add_transaction(report)
    drawn.ledger.mempool.add_transaction(drawn.tx(person, "member/register", RegisterRoles(())))
    body = proposed(drawn)
    assert body is not None and report in body.transactions and len(body.transactions) == 2


def test_reports_are_decoded_when_they_come_and_not_again_each_time_somebody_asks_for_work(
    drawn: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[object] = []
    decode = codec.decode
    monkeypatch.setattr(codec, "decode", lambda kind, *rest: decoded.append(kind) or decode(kind, *rest))
    for auditor, due in drawn.due():
        drawn.ledger.mempool.add_transaction(drawn.said(auditor, due))
        assert not drawn.ledger.has_work()
    assert decoded == [AuditFinding] * len(drawn.due()) and len(decoded) > 4


def test_verdicts_of_a_job_that_ended_do_not_wait_for_the_rounds_of_another(drawn: Court) -> None:
    other = drawn.start(PEOPLE[1], SCRATCH)
    drawn.challenge(A)
    auditor, due = drawn.due(disputes=True)[0]
    drawn.ledger.mempool.add_transaction(drawn.said(auditor, due))
    assert proposed(drawn) is None, "its own job's round is open"
    drawn.decide(drawn.tx(PEOPLE[0], "job/stop", StopJob(drawn.key)))
    drawn.ledger.mempool.prune_transactions(drawn.rules, drawn.state)
    drawn.ledger.mempool.add_transaction(drawn.said(auditor, due))
    assert list(drawn.state.jobs.running()) == [other]
    body = proposed(drawn)
    assert body is not None and not body.round_certificates and len(body.transactions) == 1


def test_where_no_round_is_open_a_verdict_gets_its_own_block(court: Court) -> None:
    court.challenge(A)
    auditor, due = court.due(disputes=True)[0]
    court.decide(court.tx(PEOPLE[0], "job/stop", StopJob(court.key)))
    while not court.state.jobs.running() and court.ledger.make_body(court.state.height + 1, 0) is not None:
        court.decide()  # the block that certifies the last root
    court.ledger.mempool.add_transaction(court.said(auditor, due))
    body = proposed(court)
    assert body is not None and len(body.transactions) == 1
