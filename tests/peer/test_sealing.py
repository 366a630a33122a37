"""What a node hides of losses, and when: its commitments and its seals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ledger.audits.audit_state import LOSS_OPENING_KIND
from ledger.audits.loss_commitments import commit_loss, is_valid_opening, is_wrong_loss, unseal_loss
from peer.node.audit_secrets import AuditSecrets
from peer.node.open_rounds import OpenRounds
from peer.roles import voter
from protocol.identity import Signed, sign_message
from protocol.messages import Proposal
from tests.ledger.court import Court
from tests.ledger.world import AUDITS, BY_KEY, LOSS, NEW, PEOPLE, UNAUDITED
from tests.sim.keys import FastSigner


def sealing_of(court: Court, person: FastSigner) -> AuditSecrets:
    sealing = AuditSecrets(person, court.chain)
    sealing.update_state(court.state)
    return sealing


def proposal_of(court: Court, key: bytes) -> Proposal:
    job = court.job(key)
    return Proposal(key, job.round, job.model_root, bytes(32), 1, bytes(32), None)


def test_a_proposal_commits_where_audits_are_sampled() -> None:
    court = Court()
    bare = proposal_of(court, court.key)
    said = committing(court, PEOPLE[0])
    assert said.loss is not None and replace(said, loss=None) == bare
    assert sealing_of(court, PEOPLE[0]).with_commitment(bare, None) == bare
    assert committing(Court(spec=UNAUDITED), PEOPLE[0]).loss is None


class Committing(Court):
    """Its trainers commit as this program does."""

    def proposal(self, key: bytes, trainer: bytes) -> Signed:
        return sign_message(BY_KEY[trainer], self.chain, committing(self, BY_KEY[trainer]))


def committing(court: Court, person: FastSigner) -> Proposal:
    sealing, bare = sealing_of(court, person), proposal_of(court, court.key)
    return sealing.with_commitment(bare, sealing.make_opening(bare.job, bare.round, LOSS))


def test_after_a_restart_a_trainer_opens_what_it_had_committed_to_and_reads_what_was_sealed_for_it() -> None:
    court = Court()
    trainer = PEOPLE[0]
    said = committing(court, trainer)
    court.round()
    auditor, due = next(iter(court.due(trainer.public)))
    assert said.loss is not None
    loss = sealing_of(court, auditor).seal_loss(replace(due, proposal=said), LOSS)
    opening = sealing_of(court, trainer).make_opening(court.key, due.round, LOSS)
    assert is_valid_opening(said.loss, opening) and loss is not None
    found = unseal_loss(loss, court.key, due.round, trainer.public, auditor.public, opening.secret)
    assert not is_wrong_loss(found, LOSS)
    assert sealing_of(court, auditor).seal_loss(replace(due, proposal=replace(said, loss=None)), 0) is None


def test_a_trainer_opens_with_a_new_key_what_it_had_committed_to_with_its_former_one(tmp_path: Path) -> None:
    court, trainer = Committing(), PEOPLE[0]
    voter.save_opening(tmp_path, sealing_of(court, trainer).make_opening(court.key, court.job(court.key).round, LOSS))
    court.round()
    court.report()
    court.decide(court.rotation(trainer, NEW))
    court.round(AUDITS.window, trainers=[])
    (due,) = court.rules.audits_module.loss_openings_due(NEW.public, court.state)
    kept = voter.read_opening(tmp_path, due.job, due.round, due.trainer)
    assert kept is not None and court.problem(court.tx(NEW, LOSS_OPENING_KIND, kept)) is None
    assert sealing_of(court, NEW).make_opening(court.key, due.round, LOSS) != kept, "it could not make that again"


@pytest.mark.parametrize("last", [PEOPLE[1], NEW], ids=["former key", "present key"])
def test_a_trainer_that_changes_its_key_in_a_round_opens_what_the_accepted_key_had_committed_to(
    tmp_path: Path, last: FastSigner
) -> None:
    court, trainer = Committing(auditors=3), PEOPLE[1]
    voter.save_opening(tmp_path, sealing_of(court, trainer).make_opening(court.key, court.job(court.key).round, LOSS))
    court.decide(court.rotation(trainer, NEW))
    voter.save_opening(tmp_path, sealing_of(court, NEW).make_opening(court.key, court.job(court.key).round, LOSS))
    court.round(trainers=sorted((PEOPLE[0].public, last.public)))
    court.report()
    court.round(AUDITS.window, trainers=[])
    (due,) = court.rules.audits_module.loss_openings_due(NEW.public, court.state)
    assert due.trainer == last.public
    kept = voter.read_opening(tmp_path, due.job, due.round, due.trainer)
    assert kept is not None and court.problem(court.tx(NEW, LOSS_OPENING_KIND, kept)) is None


def test_a_trainer_whose_disk_is_from_before_the_job_is_told_what_it_has_proposed_and_proposes_nothing_else() -> None:
    """It would be expelled for a second proposal."""
    court = Court()
    rounds = OpenRounds(PEOPLE[0], court.chain, {})
    commitment = commit_loss(court.key, court.job(court.key).round, PEOPLE[0].public, bytes(32), LOSS)
    own = replace(proposal_of(court, court.key), loss=commitment)
    assert rounds.receive_message(sign_message(PEOPLE[0], court.chain, own), own, 0.0) is None
    rounds.apply_state(court.state)
    rounds.open_round(court.key, court.job(court.key), 0.0, {}, 60.0)
    assert (court.key, court.job(court.key).round) in rounds.muted
