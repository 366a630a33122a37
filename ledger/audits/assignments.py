"""Assignment of audits: draws when a round closes, volunteers, and the end of the wait for reports.

Decision 0028 explains the draws, and `ledger.audits.sortition` implements the lots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from consensus.voter_set import faults_tolerated
from ledger.audits import sortition
from ledger.audits.audit_state import AUDITABLE_PROPOSALS_MAX, AuditableProposal, AuditFinding, RoundAudits
from ledger.audits.audit_tables import AuditTables
from ledger.audits.disputes import auditors_apart, require_may_challenge
from ledger.audits.transitions import AUDIT_TRANSITIONS, AuditEffect, AuditEvent, AuditStage, AuditTransition
from ledger.core.module import Refused
from ledger.jobs import ClosedRound
from protocol.identity import short_id
from protocol.messages import Proposal
from protocol.units import display_round_number

# Draws ------------------------------------------------------------------------------------------------------------------


def assign_audits(tables: AuditTables, closed: ClosedRound, accepted: Mapping[bytes, Proposal]) -> None:
    """Draw the audits of a closed round. Updates that were re-executed before the ballot are not audited.

    `accepted` maps trainers to their accepted proposals.
    """
    job = tables.job
    revealed = sortition.matching_reveals(closed.reveals, tables.commitments)
    # Re-executors with omitted ballots draw now for the rounds that they missed. A leader that omits the ballots of its
    # accomplice's auditors only delays their draws by a round.
    for number, audits in tables.rounds.items():
        missed = (key for key in audits.reexecutors if key in revealed and tables.commitments[key].round < number)
        nonces = {key: revealed[key] for key in missed}
        # Without nonces, the model root determined all draws.
        if audits.nonce_count and tables.has_rounds(number) and not audits.undone:
            added = {
                trainer: _with_auditors(old, *_draw_auditors(tables, number, trainer, audits.reexecutors, nonces))
                for trainer, old in audits.proposals.items()
            }
            tables.rounds[number] = replace(audits, nonce_count=audits.nonce_count + len(nonces), proposals=added)
    reexecutors = tuple(
        key for key in job.reexecutors if tables.is_trusted(key) and tables.current_key(key) not in tables.ignored_challengers
    )
    nonces = {key: revealed[key] for key in reexecutors if key in revealed}
    # Honest re-executors reveal nonces. Without any nonce, the model root determines all draws, so every peer can foresee them.
    tickets, vouched = nonces or dict.fromkeys(reexecutors, job.model_root), job.round_terms(tables.key).trainers_to_vouch_for
    drawn = {
        trainer: AuditableProposal(proposal, _draw_auditors(tables, closed.round, trainer, reexecutors, tickets))
        for trainer, proposal in accepted.items()
        if trainer not in vouched
    }
    tables.rounds[closed.round] = RoundAudits(len(nonces), faults_tolerated(len(job.voters)), reexecutors, drawn)
    # A voter whose ballot was not decided keeps its earlier commitment.
    kept = {key: known for key, known in tables.commitments.items() if key in job.voters and key not in closed.ballots}
    new = {key: sortition.NonceCommitment(closed.round, digest) for key, digest in closed.commitments.items()}
    tables.commitments = dict(sorted({**kept, **new}.items()))
    # If more than AUDITABLE_PROPOSALS_MAX proposals are under audit, the oldest are dropped: first those without an awaited
    # report, then those with one.
    tables.forget_proposals()
    excess = sum(len(audits.proposals) for audits in tables.rounds.values()) - AUDITABLE_PROPOSALS_MAX
    for forget in (tables.forget_unawaited, lambda number: lapse_reports(tables, number)):
        for number, audits in sorted(tables.rounds.items()):
            if excess > 0:
                forget(number)
                excess -= len(audits.proposals) - len(tables.rounds[number].proposals)


def _draw_auditors(
    tables: AuditTables, number: int, trainer: bytes, reexecutors: tuple[bytes, ...], nonces: Mapping[bytes, bytes]
) -> tuple[bytes, ...]:
    """Return the re-executors, out of the owners of these nonces, that are drawn for this trainer's proposal."""
    terms, job, person = tables.terms, tables.job, tables.current_key(trainer)
    barred = {person, *auditors_apart(tables.withheld_claims.get(person, {}))}
    others = [key for key in reexecutors if tables.current_key(key) not in barred]
    tickets = sortition.lottery_tickets(tables.key, number, nonces, trainer, others)
    rate = sortition.audit_rate_of_round(terms.rate, job.rounds_in_model, job.rounds, terms.closing)
    return sortition.draw_auditors(tickets, len(others), terms.auditors, rate)


def _with_auditors(drawn: AuditableProposal, *auditors: bytes) -> AuditableProposal:
    return replace(drawn, pending_auditors=tuple(sorted({*drawn.pending_auditors, *auditors})))


# Volunteers -------------------------------------------------------------------------------------------------------------


def apply_volunteering(tables: AuditTables, author: bytes, number: int) -> None:
    """Draw the author, a re-executor, for all proposals of this round on which it has not reported."""
    auditor, trainers = proposals_left_to(tables, author, number)
    assert AUDIT_TRANSITIONS[AuditStage.UNDISPUTED, AuditEvent.VOLUNTEERED] == AuditTransition(AuditStage.AWAITED)
    audits = tables.rounds[number]
    drawn = {trainer: _with_auditors(audits.proposals[trainer], auditor) for trainer in trainers}
    tables.rounds[number] = replace(audits, proposals={**audits.proposals, **drawn}, volunteers=(*audits.volunteers, auditor))


def proposals_left_to(tables: AuditTables, author: bytes, number: int) -> tuple[bytes, list[bytes]]:
    """Return the author's key in that round, and the trainers whose proposals it would audit as a volunteer. Raises `Refused`.

    A volunteer must finish its reports on one round before it volunteers for another. Otherwise faulty volunteers could keep
    every round waiting for their reports, and delay the results of honest auditors.
    """
    audits = tables.rounds.get(number)
    if audits is None or not tables.has_rounds(number) or tables.job.is_trained:
        raise Refused(f"no proposal of round {display_round_number(number)} can be audited now")
    auditor = tables.find_key(audits.reexecutors, author)
    if auditor is None or not tables.is_trusted(author):
        raise Refused(f"{short_id(author)} is suspended or was not a re-executor in round {display_round_number(number)}")
    require_may_challenge(tables, author)
    for other, of in tables.rounds.items():
        key = tables.find_key(of.volunteers, author)
        if key is not None and other == number:
            raise Refused(f"{short_id(author)} has already volunteered for round {display_round_number(number)}")
        if key is not None and any(key in drawn.pending_auditors for drawn in of.proposals.values()):
            raise Refused(f"{short_id(author)} must first report on all its proposals of round {display_round_number(other)}")
    current, sealed = tables.current_key, tables.unopened_losses.get(number, {})
    found = [
        trainer
        for trainer in audits.proposals
        if author not in {current(trainer), *auditors_apart(tables.withheld_claims.get(current(trainer), {}))}
        and (number, trainer) not in tables.disputes
        and (trainer not in sealed or auditor not in sealed[trainer].reports)
    ]
    if not found:
        raise Refused(f"round {display_round_number(number)} has no proposal left that {short_id(author)} can audit")
    return auditor, found


# End of the wait for reports ---------------------------------------------------------------------------------------------


def take_report(tables: AuditTables, author: bytes, report: AuditFinding) -> tuple[bytes, Proposal]:
    """Record that this auditor's report has arrived.

    Return the auditor's key in the round, and the proposal. Raises `Refused`.
    """
    drawn = tables.find_proposal(report.proposal_key)
    auditor = tables.find_key(drawn.pending_auditors, author) if drawn else None
    if drawn is None or auditor is None:
        raise Refused(f"no report of {short_id(author)} on this proposal is expected")
    pending = tuple(key for key in drawn.pending_auditors if key != auditor)
    audits = tables.rounds[report.round]
    proposals = {**audits.proposals, report.trainer: replace(drawn, pending_auditors=pending)}
    tables.rounds[report.round] = replace(audits, proposals=proposals)
    return auditor, drawn.proposal


def lapse_reports(tables: AuditTables, number: int, held_up: frozenset[bytes] = frozenset()) -> None:
    """Stop waiting for reports on this round's proposals, except those of trainers in `held_up`.

    Proposals with an open dispute stay in the tables.
    """
    moved, kept = AUDIT_TRANSITIONS[AuditStage.AWAITED, AuditEvent.TIME], dict[bytes, AuditableProposal]()
    assert moved.effects == (AuditEffect.COUNT_LAPSE,)
    for trainer, drawn in tables.rounds[number].proposals.items():
        if tables.current_key(trainer) in held_up:
            kept[trainer] = drawn
            continue
        for auditor in drawn.pending_auditors:
            tables.log_result((number, trainer), auditor, moved.result)
            tables.count(tables.current_key(auditor), lapsed=1)
        if (number, trainer) in tables.disputes:
            kept[trainer] = replace(drawn, pending_auditors=())
    tables.rounds[number] = replace(tables.rounds[number], proposals=kept)


def undo_rounds(tables: AuditTables, first: int) -> None:
    """Stop waiting for reports on undone rounds, from round `first` on. Disputes about their proposals continue."""
    assert AUDIT_TRANSITIONS[AuditStage.AWAITED, AuditEvent.UNDONE] == AuditTransition(AuditStage.OVER)
    for number, audits in list(tables.rounds.items()):
        if number >= first:
            drawn = {trainer: replace(of, pending_auditors=()) for trainer, of in audits.proposals.items()}
            tables.rounds[number] = replace(audits, proposals=drawn, undone=True)
            tables.forget_unawaited(number)
