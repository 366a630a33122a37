"""Bugs in the rules of sampled audits, beside a liar that challenges everybody."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ledger import jobs
from ledger.audits import assignments, disputes, loss_commitments, loss_openings
from ledger.audits.audit_state import AuditFinding, AuditLogEntry, AuditResult, Dispute
from ledger.audits.audit_tables import AuditTables
from ledger.audits.disputes import suspend_trainer
from ledger.audits.loss_commitments import LossComparisons
from ledger.audits.transitions import AuditEvent
from ledger.jobs import AuditTerms, Job, JobRolledBack, RollbackDue
from ledger.ledger_state import LedgerRules, LedgerState
from ledger.snapshots import snapshot_server
from protocol.verdicts import ReplayFinding
from tests.sim import workload
from tests.sim.audits import Auditor, Blind, Challenges, Cheats, Claims, Distrusts, Frames
from tests.sim.mutants.agreement import with_liar
from tests.sim.mutants.planting import Mutant, Planter, everywhere, replaced, together, wrapped
from tests.sim.mutants.scenarios import Scenario
from tests.sim.simulation import Simulation

CALM_SAMPLED = Scenario(blocks=30)
BLINDED = Scenario(n=7, liars=("signs-again", "signs-again"), blocks=50)
CHALLENGED = with_liar("signs-again", blocks=30)  # whose seeds 1, 4, … have sampled audits
CROWDED = Scenario(n=7, liars=("signs-again", "signs-again"), blocks=60)
FRAMED = with_liar("signs-again", blocks=110)
QUORUM_BACK = Scenario(goes_back=1.0, seconds=3.0, blocks=40)
ONE_TOO_FEW = replace(QUORUM_BACK, goes_back=0.0)
TWO_CHEATS = Scenario(n=7, liars=("signs-again", "signs-again"), blocks=90)
RESTORED = Scenario(joiners=1, joins_at=6.0, seconds=7.0, blocks=60)
HONEST = ("honest suspended",)


def _challenges(simulation: Simulation) -> None:
    for peer in simulation.peers:
        if not peer.is_honest:
            peer.author.auditor = Challenges()


@partial(replaced, disputes, "_weigh_verdicts")
def _one_convicts(tables: AuditTables, dispute: Dispute) -> None:
    tables.disputes[dispute.proposal_key] = dispute
    if dispute.voted_invalid:
        disputes.end_dispute(tables, AuditEvent.GUILTY, dispute)


@partial(wrapped, disputes, "apply_verdict")
def _every_verdict_is_guilty(real: Any, tables: AuditTables, author: bytes, verdict: AuditFinding) -> None:
    real(tables, author, replace(verdict, finding=ReplayFinding.MISMATCH))


@partial(wrapped, disputes, "end_dispute")
def _every_challenge_is_false(real: Any, tables: AuditTables, event: AuditEvent, dispute: Dispute) -> None:
    """Plant: every challenger counts as a liar, even after a guilty verdict."""
    if event is AuditEvent.GUILTY:
        for person in dispute.challenges:
            disputes.hold_against(tables, person)
    real(tables, event, dispute)


def _reports_count(planter: Planter) -> None:
    """Plant: contradictions of one trainer against an auditor count more than once."""

    def compared(before: LossComparisons, trainer: bytes, wrong: bool, faults: int) -> LossComparisons:
        number = before.reports + 1
        return LossComparisons(number, {**before.wrong, number.to_bytes(32, "big"): number} if wrong else before.wrong)

    planter.replace(loss_commitments, "add_comparison", compared)
    planter.replace(loss_commitments, "is_lazy_auditor", lambda known, voters, faults: len(known.wrong) > faults)
    planter.replace(workload, "OPENED_SHARE", 1.0)


ALL_OPENED = replaced(workload, "OPENED_SHARE", 1.0)


@partial(replaced, loss_openings, "lose_reward")
def _shut_is_guilty(tables: AuditTables, number: int, trainer: bytes) -> None:
    """Plant: a trainer that opens its losses too late is suspended, although it may be offline."""
    cause = AuditLogEntry(tables.height, tables.key, number, trainer, trainer, AuditResult.LAZY)
    suspend_trainer(tables, tables.current_key(trainer), cause)


def _frames(simulation: Simulation) -> None:
    for peer in simulation.peers:
        if not peer.is_honest:
            peer.author.auditor = Frames()


def _false_proposals(simulation: Simulation) -> None:
    for peer in simulation.peers:
        peer.author.auditor = Distrusts() if peer.is_honest else Cheats()


@partial(wrapped, disputes, "_with_verdict")
def _unseen_is_false(real: Any, dispute: Dispute, judge: bytes, finding: ReplayFinding) -> Dispute:
    return real(dispute, judge, ReplayFinding.MISMATCH if finding is ReplayFinding.WITHHELD else finding)


@partial(wrapped, disputes, "_weigh_verdicts")
def _few_unseen(real: Any, tables: AuditTables, dispute: Dispute) -> None:
    if len(dispute.voted_withheld) > tables.rounds[dispute.round].faults:
        tables.disputes[dispute.proposal_key] = dispute
        disputes.end_dispute(tables, AuditEvent.UNSEEN, dispute)
    else:
        real(tables, dispute)


@partial(wrapped, jobs, "_rolled_back")
def _number_used_again(real: Any, job: Job, found: RollbackDue, height: int, was_open: bool) -> tuple[Job, JobRolledBack]:
    moved, back = real(job, found, height, was_open)
    number = moved.round - was_open
    return replace(moved, round=number), replace(back, round=number)


@partial(everywhere, snapshot_server.models_in_state)
def _no_anchors_kept(state: LedgerState) -> dict[tuple[bytes, int], bytes]:
    return {(key, job.round): job.model_root for key, job in state.jobs.jobs.items()}


@partial(wrapped, LedgerRules, "decode_state")
def _taken_not_in_snapshots(real: Any, self: LedgerRules, data: bytes) -> LedgerState:
    state = real(self, data)
    reset = {key: replace(job, rounds_in_model=0) for key, job in state.jobs.jobs.items()}
    return state.with_modules(jobs=replace(state.jobs, jobs=reset))


def _cheats(simulation: Simulation) -> None:
    for peer in simulation.peers:
        if not peer.is_honest:
            peer.author.auditor = Cheats()


def _blind(lies: type[Auditor], count: int, simulation: Simulation) -> None:
    """Make some honest judges blind, beside f liars that report the same about all proposals."""
    liars = [peer for peer in simulation.peers if not peer.is_honest]
    for peer in liars:
        peer.author.auditor = lies(tuple(liar.key for liar in liars))
    for peer in simulation.honest[:count]:
        peer.author.auditor = Blind()


def _claims_and_slow(simulation: Simulation) -> None:
    """Make liars claim that several disputed proposals never arrived, while all links are slow."""
    _blind(Claims, 0, simulation)
    _slow(simulation)


def _slow(simulation: Simulation) -> None:
    for peer in simulation.peers:
        peer.author.slowness = 0.9


AUDITS = (
    Mutant(
        "one-convicts",
        "a challenge is enough to suspend somebody",
        ("honest suspended",),
        _one_convicts,
        CHALLENGED,
        change=_challenges,
    ),
    Mutant(
        "every-verdict-guilty",
        "a verdict of innocent is counted as guilty",
        ("honest suspended",),
        _every_verdict_is_guilty,
        CHALLENGED,
        change=_challenges,
    ),
    Mutant(
        "every-challenge-false",
        "a challenger is held for a liar although the proposal is found false",
        ("honest refuted",),
        _every_challenge_is_false,
        CHALLENGED,
        change=_false_proposals,
    ),
    Mutant(
        "unseen-is-false",
        "judges that did not see a proposal count as if they had found it false",
        ("honest suspended",),
        _unseen_is_false,
        BLINDED,
        change=partial(_blind, Challenges, 2),
    ),
    Mutant(
        "one-and-unseen",
        "one judge that finds a proposal false is enough where others did not see it",
        ("honest suspended",),
        replaced(
            disputes, "is_shown_selectively", lambda guilty, unseen, needed, faults: guilty > 0 and guilty + unseen >= needed
        ),
        BLINDED,
        change=partial(_blind, Challenges, 2),
    ),
    Mutant(
        "few-unseen",
        "one more than may lie that did not see a proposal are enough to suspend its trainer",
        ("honest suspended",),
        _few_unseen,
        BLINDED,
        change=partial(_blind, Claims, 1),
    ),
    Mutant(
        "least-link-ignored",
        "auditors say withheld before the least link could have shown anything",
        ("honest suspended",),
        replaced(AuditTerms, "served_ms", lambda self, reexecutors: 0),
        CALM_SAMPLED,
        change=_slow,
    ),
    Mutant(
        "disputes-side-by-side",
        "judges fetch all disputed proposals of a trainer at once",
        HONEST,
        replaced(workload, "first_duty_of_each_trainer", lambda due, members: list(due)),
        CROWDED,
        change=_claims_and_slow,
    ),
    Mutant(
        "one-trainer-convicts",
        "an auditor is lazy if one trainer says so",
        HONEST,
        replaced(loss_commitments, "is_lazy_auditor", lambda known, voters, faults: bool(known.wrong)),
        FRAMED,
        change=_frames,
    ),
    Mutant("reports-count", "an auditor is lazy if one trainer says so often", HONEST, _reports_count, FRAMED, change=_frames),
    Mutant(
        "exact-losses",
        "a loss is wrong if any bit differs",
        HONEST,
        together(ALL_OPENED, replaced(loss_commitments, "is_wrong_loss", lambda reported, opened: reported != opened)),
        FRAMED,
    ),
    Mutant(
        "losses-early",
        "losses may be opened while reports come in",
        ("opened early",),
        together(ALL_OPENED, replaced(loss_openings, "may_open_loss", lambda tables, number, trainer: True)),
        FRAMED,
    ),
    Mutant(
        "number-used-again",
        "the open round's number is used again after a rollback",
        ("round used again", "honest accused"),
        _number_used_again,
        FRAMED,
        change=_cheats,
    ),
    Mutant(
        "anchor-after-the-lie",
        "a rollback goes to an anchor after the lie",
        ("lie stays",),
        replaced(jobs, "newest_anchor_up_to", lambda anchors, number: anchors[-1]),
        FRAMED,
        change=_cheats,
    ),
    Mutant(
        "undone-again",
        "a lie that is undone rolls back again",
        ("rolled back for nothing",),
        replaced(assignments, "undo_rounds", lambda tables, first: None),
        TWO_CHEATS,
        change=_cheats,
    ),
    Mutant(
        "too-few-roll-back",
        "one voter takes a job back",
        ("rolled back for nothing",),
        replaced(jobs, "_voted_back", lambda job, members: max(job.rollback_requests.values(), default=None)),
        ONE_TOO_FEW,
    ),
    Mutant(
        "nobody-rolls-back",
        "what voters want undone stays",
        ("not rolled back",),
        replaced(jobs, "_voted_back", lambda job, members: None),
        QUORUM_BACK,
    ),
    Mutant("no-anchors-kept", "peers keep no models of anchors", ("anchor kept",), _no_anchors_kept, FRAMED, change=_cheats),
    Mutant("taken-not-in-snapshots", "a snapshot has no count of rounds", ("roots",), _taken_not_in_snapshots, RESTORED),
    Mutant("shut-is-guilty", "a trainer that opens nothing is suspended", HONEST, _shut_is_guilty, FRAMED),
)
