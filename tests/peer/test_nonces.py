"""Commitments of voters and trainers in sampled audits: the nonces that a ballot reveals, and when losses are hidden."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from ledger.audits.audit_state import LOSS_OPENING_KIND
from ledger.audits.loss_commitments import commit_loss, is_valid_opening, is_wrong_loss, unseal_loss
from ledger.audits.sortition import commit_nonce
from peer.node.audit_secrets import NONCE_DOMAIN, AuditSecrets
from peer.node.open_rounds import CHECK_SECONDS, CHECKS_FACTOR, REPLAYS_FACTOR, VOUCH_SECONDS_START, OpenRounds
from peer.roles import voter
from protocol import codec, messages
from protocol.identity import Identity, Signed, derive_secret, sign_message
from protocol.messages import Ballot, Proposal, Vouch
from protocol.verdicts import Verdict
from tests.ledger.court import Court
from tests.ledger.world import AUDITS, BY_KEY, LANGUAGE, LOSS, NEW, PEOPLE, SAMPLED, UNAUDITED, World
from tests.sim.keys import FastSigner

NOW = 100.0


def ballot_of(world: World, key: bytes, person: FastSigner, name: str = "") -> Ballot:
    """Return this person's ballot of the open round after a restart, when only decided data is known."""
    rounds = OpenRounds(person, world.chain, {})
    rounds.apply_state(world.state)
    job = world.job(key)
    rounds.open_round(key, job, NOW, {}, 60.0)
    for trainer in job.trainers:
        signed = world.proposal(key, trainer)
        proposal = codec.decode_message(signed.body, (Proposal,))
        if trainer == person.public:
            rounds.publish_proposal(proposal, NOW)
        else:
            rounds.receive_message(signed, proposal, NOW)
        rounds.record_verdict((key, job.round), trainer, Verdict.ACCEPT, NOW)
    vouch = Vouch(
        key, job.round, world.judgements(key, dict.fromkeys(job.round_terms(key).trainers_to_vouch_for, Verdict.ACCEPT))
    )
    for public in job.reexecutors if vouch.judgements else ():
        rounds.books[key].add_vouch(sign_message(BY_KEY[public], world.chain, vouch), vouch, NOW)
    ballots = [signed for signed in rounds.sign_due_messages(NOW).sends if signed.signer == person.public]
    return codec.decode_message(ballots[0].body, (Ballot,))


def decide_round(world: World, key: bytes, ballots: dict[bytes, Ballot]) -> None:
    world.nonces = lambda key, voter: (ballots[voter].reveal, ballots[voter].commitment)  # type: ignore[method-assign]
    world.decide(closings=(world.closing(key),))


@pytest.fixture
def world() -> World:
    return World(4, 4)


def test_each_ballot_commits_to_a_nonce_that_the_next_decided_one_reveals(world: World) -> None:
    key = world.start(spec=SAMPLED + b":9")
    before: dict[bytes, Ballot] = {}
    for number in range(3):
        ballots = {person.public: ballot_of(world, key, person) for person in PEOPLE[:4]}
        for public, ballot in ballots.items():
            reveal = before[public].commitment if number else None
            assert (commit_nonce(ballot.reveal) if ballot.reveal else None) == reveal
        decide_round(world, key, ballots)
        audits = world.state.audits.jobs[key].rounds
        assert audits[number].nonce_count == 4 if number else not audits, "the first round is re-executed before the ballot"
        before = ballots
    assert len({ballot.commitment for ballot in before.values()}) == 4


def test_a_ballot_that_was_not_decided_leaves_the_last_decided_commitment_in_force(world: World) -> None:
    key = world.start(spec=SAMPLED + b":9")
    first = {person.public: ballot_of(world, key, person) for person in PEOPLE[:4]}
    decide_round(world, key, first)
    missing = PEOPLE[3].public
    ballots = {person.public: ballot_of(world, key, person) for person in PEOPLE[:4]}
    world.nonces = lambda key, voter: (ballots[voter].reveal, ballots[voter].commitment)  # type: ignore[method-assign]
    world.vote(key, dict.fromkeys(world.job(key).trainers, Verdict.ACCEPT), voters=tuple(person.public for person in PEOPLE[:3]))
    closing = world.ledger.rounds[key].certificate()
    assert closing is not None
    world.decide(closings=(closing,))
    again = ballot_of(world, key, PEOPLE[3])
    assert again.reveal is not None and commit_nonce(again.reveal) == first[missing].commitment
    assert again.commitment not in (first[missing].commitment, ballots[missing].commitment)


def test_a_restart_says_the_same_bytes_again(world: World) -> None:
    key = world.start(spec=SAMPLED)
    assert ballot_of(world, key, PEOPLE[0]) == ballot_of(world, key, PEOPLE[0])


@pytest.mark.parametrize("spec", [LANGUAGE, UNAUDITED])
def test_where_audits_are_not_sampled_ballots_carry_no_nonces(spec: bytes, world: World) -> None:
    key = world.start(spec=spec)
    rounds = AuditSecrets(PEOPLE[0], world.chain)
    rounds.update_state(world.state)
    ballot = Ballot(key, 0, world.job(key).model_root, ())
    assert rounds.with_nonce(ballot) is ballot


def test_a_secret_differs_by_key_domain_chain_and_body_and_is_the_same_after_a_restart() -> None:
    one, other = (Identity(hashlib.sha256(name).digest()) for name in (b"one", b"other"))
    chain = bytes(32)
    secrets = [
        derive_secret(one, "a", chain, b"body"),
        derive_secret(other, "a", chain, b"body"),
        derive_secret(one, "b", chain, b"body"),
        derive_secret(one, "a", bytes([1]) * 32, b"body"),
        derive_secret(one, "a", chain, b"other"),
    ]
    assert len(set(secrets)) == 5
    assert secrets[0] == derive_secret(Identity(one.seed), "a", chain, b"body")


def test_no_message_has_the_domain_of_the_nonces_as_its_tag() -> None:
    """Otherwise such a message could request the signature from which a nonce is derived."""
    assert NONCE_DOMAIN not in {getattr(kind, "TAG", None) for kind in vars(messages).values()}


CHECKS = CHECKS_FACTOR * 4 * CHECK_SECONDS  # for four proposals
REPLAYS = REPLAYS_FACTOR * VOUCH_SECONDS_START


@pytest.mark.parametrize(
    ("spec", "number", "seconds"),
    [(LANGUAGE, 0, REPLAYS), (SAMPLED + b":9", 0, REPLAYS), (SAMPLED + b":9", 1, CHECKS), (UNAUDITED, 0, CHECKS)],
)
def test_only_a_round_whose_proposals_are_reexecuted_before_the_ballot_waits_for_vouches(
    spec: bytes, number: int, seconds: float, world: World
) -> None:
    key = world.start(spec=spec)
    for _ in range(number):
        world.decide(closings=(world.closing(key),))
    rounds = OpenRounds(PEOPLE[0], world.chain, {})
    rounds.apply_state(world.state)
    rounds.open_round(key, world.job(key), NOW, {}, 60.0)
    assert rounds.books[key].timers.replay_seconds == seconds and CHECKS < REPLAYS
    assert rounds.books[key].is_reexecutor


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
    """A world whose trainers commit as this program does."""

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
    assert not is_wrong_loss(unseal_loss(loss, court.key, due.round, trainer.public, auditor.public, opening.secret), LOSS)
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
    """A second proposal would expel it."""
    court = Court()
    rounds = OpenRounds(PEOPLE[0], court.chain, {})
    own = replace(
        proposal_of(court, court.key), loss=commit_loss(court.key, court.job(court.key).round, PEOPLE[0].public, bytes(32), LOSS)
    )
    assert rounds.receive_message(sign_message(PEOPLE[0], court.chain, own), own, 0.0) is None
    rounds.apply_state(court.state)
    rounds.open_round(court.key, court.job(court.key), 0.0, {}, 60.0)
    assert (court.key, court.job(court.key).round) in rounds.muted
