"""Sealed losses, which bind an auditor to its re-execution, on a ledger without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from consensus.voter_set import faults_tolerated
from ledger.audits import audit_tables
from ledger.audits.audit_state import (
    AUDITABLE_PROPOSALS_MAX,
    DISPUTES_MAX,
    LOSS_OPENING_KIND,
    UNOPENED_MAX,
    AuditDuty,
    AuditFinding,
    AuditResult,
    AuditsState,
    JobAudits,
)
from ledger.audits.audit_tables import AuditTables
from ledger.audits.loss_commitments import (
    LOSS_DIFFERENCE_MAX,
    LOSS_MAX,
    REPORTS_PER_CONTRADICTION,
    LossComparisons,
    LossOpening,
    SealedLoss,
    UnopenedLosses,
    add_comparison,
    commit_loss,
    is_lazy_auditor,
    is_valid_opening,
    is_wrong_loss,
    nats_to_millionths,
    seal_loss,
    unseal_loss,
)
from ledger.audits.state_machine import AuditsModule
from ledger.ledger_state import BlockBody
from ledger.members import ResignAsVoter
from protocol import codec
from protocol.limits import AUDIT_WINDOW_MAX, VOTERS_MAX
from protocol.messages import LossCommitment
from tests.ledger.court import MATCH, MISMATCH, A, B, C, Court
from tests.ledger.world import AUDITS, LOSS, NEW, PEOPLE
from tests.sim.keys import FastSigner

JOB, S, T = b"j" * 32, b"s" * 32, b"t" * 32
FALSE = LOSS + 50_000
PEOPLE_KEYS = [person.public for person in PEOPLE]
AUDITS_MAX = 20  # audits of a lazy auditor before it is detected
ALL_LOSSES = Callable[[FastSigner, AuditDuty], "int | None"]


def right(person: FastSigner, due: AuditDuty) -> int | None:
    return None


class Bound(Court):
    """A court in which all report in the block after a closing, with these losses, and open the losses that may be opened."""

    def __init__(self, n: int = 4, said: ALL_LOSSES = right, silent: Iterable[bytes] = (), **terms: object) -> None:
        super().__init__(n, **terms)
        self.said_of, self.silent = said, tuple(silent)

    def audited_round(self, count: int = 1) -> None:
        for _ in range(count):
            self.round()
            for person, due in self.due():
                loss = self.seal(person, due, self.said_of(person, due))
                self.decide(self.tx(person, "audit/report", AuditFinding(due.job, *due.proposal_key, MATCH, 7, loss)))
            self.open_losses(but=self.silent)

    def results(self, auditor: bytes, *results: AuditResult) -> int:
        return sum(entry.auditor == auditor and entry.result in results for entry in self.state.audits.log)


def lazy(*who: bytes) -> ALL_LOSSES:
    """Return losses that these auditors guess. They are wrong by more than the difference of honest re-executions."""
    return lambda person, due: LOSS + 2_500 if person.public in who else None


# Sealing and comparing -----------------------------------------------------------------------------------------------------


def test_only_whoever_has_the_secret_of_the_commitment_reads_a_sealed_loss_and_only_as_its_author_s() -> None:
    commitment = commit_loss(JOB, 3, T, S, LOSS)
    for loss in (0, -1, 2_345_678, LOSS_MAX, -LOSS_MAX):
        said = seal_loss(loss, JOB, 3, T, A, commitment, b"a" * 32)
        assert unseal_loss(said, JOB, 3, T, A, S) == loss
        others = [(4, T, A, S), (3, S, A, S), (3, T, B, S), (3, T, A, b"x" * 32)]
        assert all(unseal_loss(said, JOB, *other) != loss for other in others)
    assert unseal_loss(SealedLoss(bytes(32), bytes(8)), JOB, 3, T, A, S) is None, "a key of small order seals nothing"
    assert seal_loss(1, JOB, 3, T, A, LossCommitment(bytes(32), bytes(32)), b"a" * 32), "and nobody fails over a trainer's"


def test_a_commitment_is_opened_by_its_secret_and_its_loss_alone() -> None:
    commitment = commit_loss(JOB, 3, T, S, LOSS)
    opening = LossOpening(JOB, 3, T, S, LOSS)
    assert is_valid_opening(commitment, opening)
    others = (
        replace(opening, loss=FALSE),
        replace(opening, secret=T),
        replace(opening, round=4),
        replace(opening, trainer=A),
    )
    assert not any(is_valid_opening(commitment, other) for other in others)


def test_losses_are_the_same_up_to_a_thousandth_of_a_nat_or_a_ten_thousandth_of_the_loss() -> None:
    assert not is_wrong_loss(2_000_000 + LOSS_DIFFERENCE_MAX, 2_000_000) and is_wrong_loss(
        2_000_001 + LOSS_DIFFERENCE_MAX, 2_000_000
    )
    assert not is_wrong_loss(50_005_000, 50_000_000) and is_wrong_loss(50_005_001, 50_000_000)
    assert is_wrong_loss(None, 0) and not is_wrong_loss(-LOSS_MAX, -LOSS_MAX) and is_wrong_loss(-2_000_000, 2_000_000)
    assert nats_to_millionths(1.23456789) == 1_234_568 and nats_to_millionths(-0.5) == -500_000
    assert nats_to_millionths(float("nan")) == nats_to_millionths(float("inf")) == LOSS_MAX


@pytest.mark.parametrize("faults", [0, 1, 4])
def test_an_auditor_is_lazy_once_more_voters_than_may_lie_contradict_it_within_its_last_reports(faults: int) -> None:
    voters = [bytes([number]) * 32 for number in range(3 * faults + 1)]
    window = REPORTS_PER_CONTRADICTION * (faults + 1)
    known = LossComparisons()
    for number in range(3 * window):  # the liars frame it in every report on them, all others are right
        known = add_comparison(known, voters[number % len(voters)], number % len(voters) < faults, faults)
        assert not is_lazy_auditor(known, voters, faults)
    assert len(known.wrong) == faults
    once = add_comparison(known, voters[faults], True, faults)
    assert is_lazy_auditor(once, voters, faults) and not is_lazy_auditor(once, voters[1:], max(faults, 1)), "only voters count"
    for _ in range(window):
        once = add_comparison(once, voters[-1], False, faults)
    assert not once.wrong, "what is older than its last reports is forgotten"


@pytest.mark.parametrize("faults", [1, 2])
def test_an_auditor_is_suspended_exactly_where_no_liars_that_there_may_be_explain_what_was_opened(faults: int) -> None:
    """No honest auditor is suspended, for any openings of liars. No other such rule could suspend a lazy auditor earlier."""
    voters = [bytes([number]) * 32 for number in range(3 * faults + 1)]
    trainers = voters[1:]
    may_lie = [set(liars) for liars in combinations(trainers, faults)]
    for openings in product([*trainers, None], repeat=faults + 2):  # None: a report that is right
        known = LossComparisons()
        for trainer in openings:
            known = add_comparison(known, trainer or trainers[0], trainer is not None, faults)
        contradict = {trainer for trainer in openings if trainer}
        assert is_lazy_auditor(known, voters, faults) is not any(contradict <= liars for liars in may_lie)


# Reports -------------------------------------------------------------------------------------------------------------------


def test_a_match_carries_a_sealed_loss_and_nothing_else_does() -> None:
    court = Court(rounds=1)
    person, due = court.due()[0]
    loss = court.seal(person, due)

    def problem(kind: str, said: AuditFinding, author: FastSigner = person) -> str:
        return court.problem(court.tx(author, kind, said)) or ""

    match = AuditFinding(due.job, *due.proposal_key, MATCH, 0)
    assert "a match must contain" in problem("audit/report", match) and not problem("audit/report", replace(match, loss=loss))
    false = replace(match, finding=MISMATCH)
    assert "must not contain a loss" in problem("audit/report", replace(false, loss=loss)) and not problem("audit/report", false)
    court.say(person, due, MISMATCH)
    judge, disputed = court.due(disputes=True)[0]
    verdict = AuditFinding(disputed.job, *disputed.proposal_key, MATCH, 0)
    assert "must not contain a loss" in problem("audit/verdict", replace(verdict, loss=loss), judge)
    assert not problem("audit/verdict", verdict, judge)


def test_honest_auditors_are_compared_and_nothing_follows() -> None:
    court = Bound(7)
    court.audited_round(12)
    counts = [court.audits.loss_comparisons[key].reports for key in court.job(court.key).voters]
    assert min(counts) > 5 and not any(known.wrong for known in court.audits.loss_comparisons.values())
    assert not court.audits.suspended and all(
        standing.wrong_losses == 0 for standing in court.state.audits.member_records.values()
    )
    vested = 12 - AUDITS.window  # one less where the last of them was opened after the last closing
    assert all(vested - 1 <= court.standing(key).rewards <= vested for key in court.job(court.key).voters)


@pytest.mark.parametrize(("n", "many"), [(4, 1), (4, 4), (7, 2), (10, 3)])
def test_a_lazy_auditor_is_suspended_within_twenty_audits_however_many_are_lazy(n: int, many: int) -> None:
    who = [person.public for person in PEOPLE[:many]]
    court = Bound(n, lazy(*who))
    while any(
        not court.standing(key).suspensions and len({*court.job(court.key).trainers} - {key}) > (n - 1) // 3 for key in who
    ):
        court.audited_round()
        assert all(court.standing(key).wrong_losses <= AUDITS_MAX for key in who)
    found = [key for key in who if court.standing(key).suspensions]
    assert len(found) >= min(many, 2)
    honest = [key for key in court.people if key not in who]
    assert not any(court.standing(key).suspensions or court.standing(key).wrong_losses for key in honest)
    assert all(court.standing(key).rewards_lost for key in found), "or laziness would cost nothing"
    assert any(entry.result is AuditResult.LAZY for entry in court.audits.suspension_causes.values())


def test_a_suspended_auditor_is_not_drawn_and_does_not_train() -> None:
    court = Bound(4, lazy(A))
    while not court.suspended(A):
        court.audited_round()
    court.round(2)
    last = court.audits.rounds[court.job(court.key).round - 1]
    assert A not in last.reexecutors and A not in last.proposals and A not in court.job(court.key).trainers
    assert court.results(A, AuditResult.WRONG_LOSS, AuditResult.LAZY) == court.standing(A).wrong_losses


def test_a_copied_report_is_noise_for_whoever_sends_it() -> None:
    court = Court(rounds=1)
    (first, due), (second, copied) = [(person, due) for person, due in court.due() if due.trainer == A][:2]
    loss = court.seal(first, due)
    court.decide(court.tx(first, "audit/report", AuditFinding(due.job, *due.proposal_key, MATCH, 0, loss)))
    court.decide(court.tx(second, "audit/report", AuditFinding(copied.job, *copied.proposal_key, MATCH, 0, loss)))
    court.round(AUDITS.window)
    court.open_losses()
    assert court.standing(first.public).wrong_losses == 0 and court.standing(second.public).wrong_losses == 1


@pytest.mark.parametrize(("n", "liars"), [(4, 1), (7, 2)])
def test_trainers_that_open_false_losses_suspend_nobody(n: int, liars: int) -> None:
    court = Bound(n)
    court.losses = {person.public: FALSE for person in PEOPLE[:liars]}
    court.audited_round(25)
    assert not court.audits.suspended
    framed = [key for key in court.people if court.standing(key).wrong_losses]
    assert len(framed) >= n - liars, "each of them was contradicted, again and again"


# Openings ------------------------------------------------------------------------------------------------------------------


def test_losses_are_opened_once_after_the_window_by_their_trainer_and_as_they_were_committed() -> None:
    court = Court(rounds=1)
    court.report()

    def problem(author: FastSigner, said: LossOpening) -> str:
        return court.problem(court.tx(author, LOSS_OPENING_KIND, said)) or ""

    mine = court.opening(1, A)
    for _ in range(AUDITS.window - 1):
        assert "are still possible" in problem(PEOPLE[0], mine), "or an auditor could copy them"
        court.round()
    assert "are still possible" in problem(PEOPLE[0], mine)
    court.round()
    assert "has no loss of" in problem(PEOPLE[0], replace(mine, round=2)), "nobody reported on that"
    assert "has no loss of" in problem(PEOPLE[1], mine), "another's"
    assert "does not match" in problem(PEOPLE[1], replace(mine, trainer=B))
    assert "does not match" in problem(PEOPLE[0], replace(mine, loss=FALSE))
    court.decide(court.tx(PEOPLE[0], LOSS_OPENING_KIND, mine))
    assert "has no loss of" in problem(PEOPLE[0], mine)


def test_a_trainer_that_never_opens_loses_what_was_reported_on_and_is_not_suspended() -> None:
    court = Bound(4, silent=[A])
    court.audited_round(4 * AUDITS.window)
    assert court.standing(A).rewards == 0 and court.standing(A).rewards_lost == 4 * AUDITS.window - 2 * AUDITS.window
    vested = 3 * AUDITS.window  # one less where the last of them was opened after the last closing
    assert not court.audits.suspended and vested - 1 <= court.standing(B).rewards <= vested
    assert len(court.audits.unopened_losses) <= 2 * AUDITS.window, "nothing piles up"


def test_a_proposal_without_a_commitment_earns_nothing_and_is_audited_all_the_same() -> None:
    court = Court()
    court.losses = {A: None}
    court.round(AUDITS.window)
    assert any(due.trainer == A for _, due in court.due())
    court.report()
    court.round(3)
    assert A not in court.audits.unvested_rounds and not court.standing(A).rewards and not court.standing(A).rewards_lost
    assert all(A not in of for of in court.audits.unopened_losses.values()) and any(
        B in of for of in court.audits.unopened_losses.values()
    )


def test_the_oldest_sealed_losses_go_where_too_many_proposals_wait_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state with more of them could not be decoded again."""
    monkeypatch.setattr(audit_tables, "UNOPENED_MAX", 6)
    court = Bound(4, silent=PEOPLE_KEYS, window=4, auditors=3)
    for _ in range(8):
        court.audited_round()
        assert sum(map(len, court.audits.unopened_losses.values())) <= 6
    assert list(court.audits.unopened_losses) == [7, 8], "of round 7 two proposals"
    assert [court.standing(key).rewards_lost for key in court.job(court.key).voters] == [0] * 4
    assert sum(court.standing(key).rewards for key in court.job(court.key).voters) == 16, "rounds 1 to 4"


def test_a_state_with_as_much_as_the_rules_let_wait_can_be_read_again() -> None:
    unopened = UnopenedLosses(commit_loss(JOB, 0, A, S, LOSS), {}, VOTERS_MAX)
    rounds = AUDIT_WINDOW_MAX + AUDITABLE_PROPOSALS_MAX + DISPUTES_MAX + UNOPENED_MAX
    wrong = {
        number.to_bytes(32, "big"): number for number in range(REPORTS_PER_CONTRADICTION * (faults_tolerated(VOTERS_MAX) + 1))
    }
    audits = JobAudits(
        unvested_rounds={A: tuple(range(rounds))},
        unopened_losses={number: {A: unopened} for number in range(UNOPENED_MAX)},
        loss_comparisons={A: LossComparisons(len(wrong), wrong)},
    )
    assert codec.decode(JobAudits, codec.encode(audits)) == audits


def test_a_trainer_has_as_long_to_open_as_its_round_had_re_executors_also_if_they_are_fewer_by_now() -> None:
    """Otherwise a trainer could lose a promised reward when fewer re-executors are left."""
    # seven: 160 ms, four: 100 ms
    court = Bound(7, silent=[A], window=1, auditors=6, response_ms=20, serving_ms_per_reexecutor=20)
    court.audited_round()
    court.decide(*(court.tx(person, "member/resign", ResignAsVoter()) for person in PEOPLE[4:7]))
    while len(court.job(court.key).reexecutors) > 4:
        court.audited_round()
    court.round()
    known = court.audits.unopened_losses[1][A]
    assert known.since is not None and known.reexecutors == 7

    def closed_after(ms: int) -> bool:
        court.decide_body(codec.encode(BlockBody((), (), ())), after_ms=known.since_ms + ms - court.state.time_ms)
        court.round()
        return court.standing(A).rewards_lost > 0

    assert not closed_after(159) and closed_after(160)


def test_one_copy_of_the_tables_of_a_job_tells_all_openings_that_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    court = Bound(4, silent=PEOPLE_KEYS)
    court.audited_round(2 * AUDITS.window)
    made, tables_of = list[bytes](), AuditsModule._job_tables

    def counted(self: AuditsModule, state: AuditsState, key: bytes, *rest: Any) -> AuditTables:
        made.append(key)
        return tables_of(self, state, key, *rest)

    monkeypatch.setattr(AuditsModule, "_job_tables", counted)
    assert len(court.rules.audits_module.loss_openings_due(A, court.state)) > 1 and made == [court.key]


def test_records_follow_keys_of_now() -> None:
    court = Bound(4, lazy(B), silent=[A, C])  # one alone contradicts it
    while not any(B in known.wrong or key == B for key, known in court.audits.loss_comparisons.items()):
        court.audited_round()
    before = court.audits.loss_comparisons[B]
    court.decide(court.rotation(PEOPLE[1], NEW))
    assert court.audits.loss_comparisons[NEW.public] == before and B not in court.audits.loss_comparisons
