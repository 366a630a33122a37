"""Reports and openings of losses across a key rotation, a job's end, an expulsion and a leave, and inside one block.

No report may follow the opening of its proposal: its auditor could copy the loss.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from consensus.voter_set import VoterSet
from ledger.audits.audit_state import LOSS_OPENING_KIND, AuditDuty, AuditFinding, audit_duties
from ledger.audits.loss_commitments import LossOpening
from ledger.jobs import JobPhase, StopJob
from ledger.members import ResignAsVoter
from protocol import codec
from protocol.identity import Signed
from rounds.round_state import RoundCertificate
from tests.ledger.court import MATCH, MISMATCH, A, B, C, Court, D
from tests.ledger.world import AUDITS, BY_KEY, NEW, PEOPLE
from tests.sim.keys import FastSigner

ANN, BEN, CID, DEE = PEOPLE[:4]
SPARE = [FastSigner(f"spare {number}") for number in range(40)]
WALKS, STEPS = 8, 50


def everybody_audits(rounds: int = 1) -> Court:
    """Draw each re-executor for every proposal of the others, with time for a thousand blocks."""
    return Court(rounds=rounds, auditors=3, response_ms=1_000)


def report(court: Court, person: FastSigner, number: int, trainer: bytes, loss: int | None = None, ahead: int = 1) -> Signed:
    """Return this person's report that this proposal matches."""
    due = due_of(court, person.public, number, trainer)
    said = AuditFinding(due.job, *due.proposal_key, MATCH, 0, court.seal(person, due, loss))
    return court.tx(person, "audit/report", said, ahead)


def due_of(court: Court, key: bytes, number: int, trainer: bytes) -> AuditDuty:
    (due,) = (
        due for due in audit_duties(key, court.state) if (due.round, due.trainer) == (number, trainer) and not due.is_dispute
    )
    return due


def report_all(court: Court, but: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Decide every awaited report except those of these auditors on these trainers."""
    left = set(but)
    for person, due in court.due():
        if (due.auditor, due.trainer) not in left:
            court.say(person, due)


def opened(court: Court, person: FastSigner, number: int, trainer: bytes, ahead: int = 1) -> Signed:
    return court.tx(person, LOSS_OPENING_KIND, court.opening(number, trainer), ahead)


def stop(court: Court, ahead: int = 1) -> Signed:
    return court.tx(ANN, "job/stop", StopJob(court.key), ahead)


def due_openings(court: Court, key: bytes) -> list[tuple[int, bytes]]:
    return [(due.round, due.trainer) for due in court.rules.audits_module.loss_openings_due(key, court.state)]


# The key in the round -----------------------------------------------------------------------------------------------------


def rotated_in_a_round() -> Court:
    """A voter that rotates renews the open round, so both keys of Ben are trainers of round 1."""
    court = everybody_audits(0)
    court.decide(court.rotation(BEN, NEW))
    assert {B, NEW.public} <= set(court.job(court.key).trainers)
    return court


def test_a_member_that_rotates_in_a_round_has_one_update_and_one_reward_in_it() -> None:
    court = rotated_in_a_round()
    court.round()
    assert set(court.audits.rounds[1].proposals) == {A, C, D, NEW.public}
    assert court.audits.unvested_rounds[NEW.public] == (1,)


@pytest.mark.parametrize("key", [B, NEW.public], ids=["former key", "present key"])
def test_losses_are_opened_by_the_member_of_the_key_that_they_name(key: bytes) -> None:
    court, other = rotated_in_a_round(), B if key == NEW.public else NEW.public
    court.round(trainers=sorted({A, C, D, key}))
    report_all(court, but=[(A, key)])
    court.round(AUDITS.window)
    assert "are still possible" in (court.problem(opened(court, NEW, 1, key)) or "")
    court.decide(report(court, ANN, 1, key))
    assert "has no loss of" in (court.problem(opened(court, NEW, 1, other)) or "")
    assert "has no loss of" in (court.problem(opened(court, ANN, 1, key)) or "")
    assert due_openings(court, NEW.public) == [(1, key)]
    court.decide(opened(court, NEW, 1, key))
    assert not any(court.standing(person).wrong_losses for person in court.people)
    assert "has no loss of" in (court.problem(opened(court, NEW, 1, key)) or "")


# Rotations between report and opening --------------------------------------------------------------------------------------


@pytest.fixture
def court() -> Court:
    return everybody_audits()


def test_a_trainer_that_rotates_after_the_reports_opens_with_its_new_key_also_in_that_block(court: Court) -> None:
    report_all(court)
    court.round(AUDITS.window)
    rotation = court.rotation(BEN, NEW)
    assert court.problem(opened(court, NEW, 1, B)), "this key is nobody's yet"
    assert "was replaced by a new key" in (court.problem(rotation, opened(court, BEN, 1, B, 2)) or "")
    court.decide(rotation, opened(court, NEW, 1, B))
    assert B not in court.audits.unopened_losses[1] and not any(court.standing(key).wrong_losses for key in court.people)


@pytest.mark.parametrize("loss", [None, 0])
def test_an_auditor_that_rotates_is_compared_under_its_new_key(court: Court, loss: int | None) -> None:
    court.decide(report(court, BEN, 1, A, loss))
    court.decide(court.rotation(BEN, NEW), report(court, CID, 1, A))
    report_all(court)
    court.round(AUDITS.window)
    court.decide(opened(court, ANN, 1, A))
    assert court.standing(NEW.public).wrong_losses == (loss is not None)
    assert court.audits.loss_comparisons[NEW.public].reports == 1 and B not in court.audits.loss_comparisons


def test_an_auditor_that_rotates_before_its_report_keeps_the_losses_shut_until_it_reports(court: Court) -> None:
    report_all(court, but=[(B, A)])
    court.round(AUDITS.window)
    rotation = court.rotation(BEN, NEW)
    assert "are still possible" in (court.problem(rotation, opened(court, ANN, 1, A)) or "")
    court.decide(rotation)
    assert "are still possible" in (court.problem(opened(court, ANN, 1, A)) or "")
    late = report(court, NEW, 1, A)
    assert "are still possible" in (court.problem(opened(court, ANN, 1, A), late) or "")
    court.decide(late, opened(court, ANN, 1, A))
    assert court.audits.loss_comparisons[NEW.public].reports == 1 and not court.standing(NEW.public).wrong_losses


def test_a_report_and_its_rotation_in_one_block_with_the_opening(court: Court) -> None:
    report_all(court, but=[(B, A)])
    court.round(AUDITS.window)
    court.decide(report(court, BEN, 1, A), court.rotation(BEN, NEW, 2), opened(court, ANN, 1, A))
    assert court.audits.loss_comparisons[NEW.public].reports == 1 and not court.standing(NEW.public).wrong_losses


# One block -------------------------------------------------------------------------------------------------------------------


def test_in_one_block_the_last_report_comes_before_the_opening_or_the_block_is_refused(court: Court) -> None:
    report_all(court, but=[(B, A)])
    court.round(AUDITS.window)
    late, opening = report(court, BEN, 1, A), opened(court, ANN, 1, A)
    assert "are still possible" in (court.problem(opening, late) or "")
    assert court.problem(late, opening) is None
    court.decide(late, opening)
    assert "no report" in (court.problem(court.tx(BEN, "audit/report", AuditFinding(court.key, 1, A, MATCH, 0))) or "")


def test_the_window_of_a_round_ends_with_the_block_after_the_closing_that_ends_it(court: Court) -> None:
    report_all(court)
    court.round(AUDITS.window - 1)
    opening = opened(court, ANN, 1, A)
    assert "are still possible" in (court.problem(opening, closings=(court.closing(court.key),)) or "")
    court.round()
    assert court.problem(opening, closings=(court.closing(court.key),)) is None


# The end of a job -----------------------------------------------------------------------------------------------------------


def test_after_the_last_round_the_open_reports_come_first_and_then_the_losses_at_once() -> None:
    court = Court(spec=b"sampled:2", auditors=3, response_ms=1_000, rounds=1)
    report_all(court, but=[(B, A)])
    assert court.job(court.key).phase is JobPhase.SETTLING
    assert (1, C) in due_openings(court, C) and not due_openings(court, A)
    court.decide(opened(court, CID, 1, C))
    late, opening = report(court, BEN, 1, A), opened(court, ANN, 1, A)
    assert "are still possible" in (court.problem(opening) or "") and "are still possible" in (court.problem(opening, late) or "")
    court.decide(late, opening)
    assert court.audits.loss_comparisons[B].reports == 2 and not court.standing(B).wrong_losses


def test_after_a_stop_no_report_comes_any_more_and_losses_are_opened_at_once(court: Court) -> None:
    report_all(court, but=[(B, A)])
    late = report(court, BEN, 1, A)
    assert "are still possible" in (court.problem(opened(court, CID, 1, C)) or "")
    court.decide(stop(court))
    assert "no report" in (court.problem(late) or ""), "the round is undone"
    assert due_openings(court, A) == [(1, A)] and due_openings(court, C) == [(1, C)]
    court.decide(opened(court, CID, 1, C), opened(court, ANN, 1, A))
    assert court.audits.loss_comparisons[B].reports == 1 and court.audits.loss_comparisons[D].reports == 2


def test_losses_stay_shut_in_the_block_that_stops_the_job_since_its_closing_may_still_draw() -> None:
    """A re-executor that missed round 1 draws for it at the closing of round 2. The dispute keeps the proposal until then."""
    court = everybody_audits(0)
    court.decide(closings=(court.closing_without(C),))
    court.say(BEN, due_of(court, B, 1, A), MISMATCH)
    court.say(DEE, due_of(court, D, 1, A))
    closing = court.closing(court.key)
    opening = opened(court, ANN, 1, A, 2)
    assert "are still possible" in (court.problem(stop(court), opening, closings=(closing,)) or "")
    court.decide(stop(court), closings=(closing,))
    assert (1, A) in due_openings(court, A), "the round is undone, and no report on it is awaited"
    court.decide(opened(court, ANN, 1, A))
    assert not any(court.standing(key).wrong_losses for key in (B, C, D))


def test_the_last_closing_of_a_job_draws_before_any_losses_are_opened() -> None:
    court = Court(spec=b"sampled:3", auditors=3)
    court.decide(closings=(court.closing_without(C),))
    court.say(DEE, due_of(court, D, 1, A))
    court.say(BEN, due_of(court, B, 1, A))
    last = court.closing(court.key)
    assert "are still possible" in (court.problem(opened(court, ANN, 1, A), closings=(last,)) or "")
    court.decide(closings=(last,))
    assert "are still possible" in (court.problem(opened(court, ANN, 1, A)) or "")
    court.decide(report(court, CID, 1, A), opened(court, ANN, 1, A))


# Expulsions and leaves -----------------------------------------------------------------------------------------------------


def test_an_expelled_auditor_is_not_compared_and_does_not_report(court: Court) -> None:
    court.decide(report(court, BEN, 1, A, 0))
    report_all(court, but=[(B, C)])
    court.decide(evidence=(court.double(BEN),))
    court.round(AUDITS.window)
    assert "is expelled" in (court.problem(report(court, BEN, 1, C)) or "")
    assert "are still possible" in (court.problem(opened(court, CID, 1, C)) or ""), "its time has to run out first"
    court.decide(opened(court, ANN, 1, A))
    assert B not in court.audits.loss_comparisons and not court.standing(B).wrong_losses


def test_an_expelled_trainer_opens_nothing_and_its_auditors_are_not_compared(court: Court) -> None:
    report_all(court)
    court.round(AUDITS.window)
    opening = opened(court, BEN, 1, B)
    assert "is expelled" in (court.problem(opening, evidence=(court.double(BEN),)) or ""), "evidence acts first"
    court.decide(evidence=(court.double(BEN),))
    assert "is expelled" in (court.problem(opening) or "")
    assert not court.audits.loss_comparisons


def test_whoever_leaves_the_voters_still_reports_and_opens(court: Court) -> None:
    report_all(court, but=[(D, A)])
    court.decide(court.tx(DEE, "member/resign", ResignAsVoter()))
    court.round(AUDITS.window)
    assert D not in court.state.members.voters
    assert "are still possible" in (court.problem(opened(court, ANN, 1, A)) or "")
    court.decide(report(court, DEE, 1, A), opened(court, ANN, 1, A), opened(court, DEE, 1, D, 2))
    assert court.audits.loss_comparisons[D].reports == 1


# Any order -------------------------------------------------------------------------------------------------------------------


class Walk(Court):
    """Closings, reports, openings, rotations, leaves, an expulsion and the stop of the job in any order, several in a block."""

    def __init__(self, seed: int) -> None:
        super().__init__(5, auditors=4, response_ms=5)
        self.random, self.spare = random.Random(f"openings {seed}"), list(SPARE)
        self.opened = set[tuple[int, bytes]]()

    def block(self) -> None:
        is_running = self.key in self.state.jobs.running()
        closings = (self._closing(),) if is_running and self.random.random() < 0.5 else ()
        liar = self.random.choice(self.state.members.voters)
        is_one_too_many = any(member.expelled for member in self.state.members.members.values())
        evidence = (self.double(self.people[liar]),) if not is_one_too_many and self.random.random() < 0.02 else ()
        said, opened = list[Signed](), set[tuple[int, bytes]]()
        members = [key for key in self.people if self.state.members.is_current_key(key)]
        for key in self.random.sample(members, len(members)):
            signed = self._said(self.people[key])
            if signed is not None and self.problem(*said, signed, closings=closings, evidence=evidence) is None:
                said.append(signed)
                content = self.rules.open_transaction(signed)
                if content.kind == LOSS_OPENING_KIND:
                    opening = codec.decode(LossOpening, content.content)
                    opened.add((opening.round, opening.trainer))
        self.decide(*said, closings=closings, evidence=evidence)
        assert not opened & self.opened, "losses are opened once"
        self.opened |= opened

    def _closing(self) -> RoundCertificate:
        voters = self.job(self.key).voters
        is_one_spare = len(voters) > VoterSet(voters).quorum
        absent = [self.random.choice(voters)] if is_one_spare and self.random.random() < 0.5 else []
        return self.closing_without(*absent)

    def _said(self, person: FastSigner) -> Signed | None:
        current = self.state.members.current_key
        unopened = [(n, key) for n, of in self.audits.unopened_losses.items() for key in of if current(key) == person.public]
        due = [item for item in audit_duties(person.public, self.state) if not item.is_second_verdict]
        match self.random.choices(("audit", "open", "rotate", "leave", "stop", None), (60, 30, 2, 0.5, 0.5, 5))[0]:
            case "audit" if due:
                return self.said(person, self.random.choice(due), MATCH if self.random.random() < 0.95 else MISMATCH)
            case "open" if unopened:
                return opened(self, person, *self.random.choice(unopened))
            case "rotate" if self.spare:
                new = self.spare.pop()
                self.people[new.public] = new
                return self.rotation(person, new)
            case "leave":
                return self.tx(person, "member/resign", ResignAsVoter())
            case "stop":
                return self.tx(person, "job/stop", StopJob(self.key))
        return None

    def check(self) -> None:
        awaited = {(due.round, due.trainer) for _, due in self.due()}
        assert not awaited & self.opened, "a report on losses that are open is awaited"
        for key in (key for key in self.people if self.state.members.is_current_key(key)):
            for due in self.rules.audits_module.loss_openings_due(key, self.state):
                assert (due.round, due.trainer) not in self.opened, "losses that are open are due"
                assert self.problem(opened(self, self.people[key], due.round, due.trainer)) is None, "what is due is refused"


def test_no_report_follows_the_opening_of_its_proposal_in_any_order_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    for person in SPARE:
        monkeypatch.setitem(BY_KEY, person.public, person)
    openings = 0
    for seed in range(WALKS):
        walk = Walk(seed)
        for _ in range(STEPS):
            walk.block()
            if walk.key not in walk.state.audits.jobs:
                break
            walk.check()
        openings += len(walk.opened)
    assert openings > 10 * WALKS
