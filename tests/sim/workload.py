"""Transactions of the simulated people: numbers to add, jobs, membership. Each peer has one undecided transaction at a time."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ledger.audits.audit_state import (
    LOSS_OPENING_KIND,
    VOLUNTEER_KIND,
    AuditDuty,
    AuditFinding,
    AuditVolunteering,
    LossOpeningDuty,
    audit_duties,
    first_duty_of_each_trainer,
)
from ledger.audits.loss_commitments import SealedLoss
from ledger.core.genesis import TRAINER
from ledger.core.module import Refused
from ledger.jobs import RequestRollback, StartJob, StopJob
from ledger.ledger_state import LedgerState
from ledger.members import (
    AdmitMember,
    ApproveVoter,
    Invitation,
    RegisterRoles,
    RenameMember,
    ResignAsVoter,
    RetireMember,
    RevokeInvitation,
    RotateKey,
    StandAsVoter,
    rotation_preimage,
    token_preimage,
)
from peer.node.audit_secrets import AuditSecrets
from peer.node.node import StepAction
from peer.node.open_rounds import RoundEffects
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, Signer, sign_message
from protocol.messages import Transaction
from protocol.verdicts import ReplayFinding
from tests.sim.audits import Auditor
from tests.sim.crowd import Desk
from tests.sim.gateways import Gateway
from tests.sim.keys import FastSigner, another
from tests.sim.ledgers import AUDITS, Add

if TYPE_CHECKING:
    from tests.sim.simulation import Peer

LIFETIME_HEIGHTS = 30  # of a transaction; a lost one is made anew
UNTIL_MS = 2**53 - 1
REVOKED_FOR_MS = 5_000  # so that some revocations expire within a history
RENAMED, REVOKED = 10, 15  # of a hundred numbers to add: those below are a new name, those below that an invitation taken back
CURATED_SHARE = 0.6  # of the moments at which a peer could put something forward
OPENED_SHARE = 0.3  # of the moments at which losses could be opened: otherwise reports would wait for all of them
VOLUNTEERED_SHARE = 0.3  # of the chances to volunteer; a refused peer does other work as well


@dataclass
class Fetching:
    """Audit data that one peer fetches. A trainer's uplink carries one audit at a time for each other peer."""

    since: float = 0.0  # seconds
    turns: list[AuditDuty] = field(default_factory=list)  # audits being fetched since then
    asked: dict[Any, float] = field(default_factory=dict)  # seconds by proposal, divided among the trainer's jobs
    shared: dict[Any, float] = field(default_factory=dict)  # seconds by proposal, divided among all audits of that trainer

    def go_on(self, now: float, turns: list[AuditDuty]) -> None:
        sharing = Counter(due.trainer for due in self.turns)
        jobs = Counter(trainer for _, trainer in {(due.job, due.trainer) for due in self.turns})
        for due in self.turns:
            key, seconds = (due.job, *due.proposal_key, due.is_dispute), now - self.since
            self.asked[key] = self.asked.get(key, 0.0) + seconds / jobs[due.trainer]
            self.shared[key] = self.shared.get(key, 0.0) + seconds / sharing[due.trainer]
        self.since, self.turns = now, turns

    def of(self, due: AuditDuty) -> tuple[float, float]:
        key = (due.job, *due.proposal_key, due.is_dispute)
        return self.asked.get(key, 0.0), self.shared.get(key, 0.0)


@dataclass
class Author:
    """Transactions of one peer, as its operator and `peer.runtime.membership.membership` would submit them."""

    signer: Signer
    random: random.Random
    work: float  # probability of a new number after each block
    invitation: AdmitMember | None = None  # of a peer that is no founder
    wishes: deque[tuple[str, Any]] = field(default_factory=deque)
    auditor: Auditor = field(default_factory=Auditor)
    slowness: float = 0.0  # of its link: share of the slowest link's time that it takes to show a proposal
    trainers: Callable[[bytes], Author | None] = lambda key: None  # by key
    now: Callable[[], float] = lambda: 0.0  # seconds
    fetching: Fetching = field(default_factory=lambda: Fetching())
    desk: Desk | None = None  # where the network curates
    gateway: Gateway | None = None  # of a peer that serves clients
    openings: Callable[[LedgerState], list[LossOpeningDuty]] = lambda state: []  # of losses, that may come now
    volunteering: Callable[[LedgerState], list[AuditDuty]] = lambda state: []  # proposals that it may volunteer for now
    formers: dict[bytes, Signer] = field(default_factory=dict)  # keys that it had before
    outstanding: Signed | None = None
    submitted: int = 0
    returns: bool = False  # it applies for vote and roles when it has none, even as a founder

    def next(self, state: LedgerState, chain_id: bytes) -> Signed | None:
        """Return the next transaction, or None if there is nothing to submit or the last one may still be decided."""
        member = state.members.members.get(self.signer.public)
        nonce = member.nonce if member else 0
        if self.outstanding is not None:
            waiting = codec.decode_message(self.outstanding.body, (Transaction,))
            if waiting.nonce > nonce and waiting.expires > state.height:
                return None
        wanted = self._wanted(state, chain_id) if member is None or state.members.is_current_key(self.signer.public) else None
        if wanted is None:
            return None
        kind, content = wanted
        transaction = Transaction(nonce + 1, state.height + LIFETIME_HEIGHTS, kind, codec.encode(content))
        self.outstanding = sign_message(self.signer, chain_id, transaction)
        self.submitted += 1
        return self.outstanding

    def _wanted(self, state: LedgerState, chain_id: bytes) -> tuple[str, Any] | None:
        me, members = self.signer.public, state.members
        member = members.members.get(me)
        if member is None:
            return ("member/admit", self.invitation) if self.invitation is not None else None
        if self.invitation is not None or self.returns:  # it joined, and wants to train and vote
            if TRAINER not in member.roles:
                return "member/register", RegisterRoles((TRAINER,))
            if me not in members.upcoming and me not in members.candidates and state.certified_roots:
                height = max(state.certified_roots)
                return "member/stand", StandAsVoter(height, state.certified_roots[height])
        if me in members.voters:
            for candidate, approvals in members.candidates.items():
                if me not in approvals:
                    return "member/approve", ApproveVoter(candidate)
        if self.wishes:
            return self.wishes.popleft()
        sealing = AuditSecrets(self.signer, chain_id)
        openings = self.openings(state) if self.auditor.opens() else []
        due_now = first_duty_of_each_trainer(audit_duties(me, state), members)
        self.fetching.go_on(self.now(), due_now)
        is_judge = bool(due_now) and due_now[0].is_dispute
        if openings and not is_judge and self.random.random() < OPENED_SHARE:
            job, number, trainer = openings[0].job, openings[0].round, openings[0].trainer
            kept = AuditSecrets(self.formers.get(trainer, self.signer), chain_id)  # with its key at that time, as in its file
            return LOSS_OPENING_KIND, kept.make_opening(job, number, self.auditor.own_loss(job, number, trainer))
        for due in due_now:
            finding = self._found(due, state)
            if finding is not None:
                loss = (
                    sealing.seal_loss(due, self.auditor.loss(due))
                    if finding is ReplayFinding.MATCH and not due.is_dispute
                    else None
                )
                return said_of(due, finding, loss)
        for due in self.volunteering(state):
            if self.auditor.volunteers(due) and self.random.random() < VOLUNTEERED_SHARE:
                return VOLUNTEER_KIND, AuditVolunteering(due.job, due.round)
        if self.gateway is not None and self.work and (said := self.gateway.wanted(state)) is not None:
            return said
        if self.desk is not None and self.work and self.desk.random.random() < CURATED_SHARE:
            return self.desk.wanted(state)
        if self.random.random() < self.work:
            number = self.random.randrange(100)
            if number < RENAMED:
                return "member/rename", RenameMember(f"name {number}")
            if number < REVOKED:
                return "member/revoke", _revocation(chain_id, self.signer, f"revoked {number}", state.time_ms)
            return "counter/add", Add(number)
        return None

    def _found(self, due: AuditDuty, state: LedgerState) -> ReplayFinding | None:
        """Return the finding, once the proposal has arrived or the slowest link would have delivered it."""
        asked, shared = self.fetching.of(due)
        reexecutors = len(state.audits.jobs[due.job].rounds[due.round].reexecutors)
        # seconds that the slowest link takes
        least = (AUDITS.response_ms + AUDITS.serving_ms_per_reexecutor * (reexecutors - 1)) / 1_000
        trainer = self.trainers(due.trainer)
        shown = trainer is None or shared >= max(trainer.slowness, trainer.auditor.shows(due, self.signer.public)) * least
        is_late = asked >= AUDITS.served_ms(reexecutors) / 1_000 and not due.is_second_verdict
        return self.auditor.says(due, shown, is_late)

    def restarted(self) -> None:
        """Submit waiting transactions again: the pool was in memory."""
        self.outstanding = None
        self.fetching = Fetching(self.now())


def invitation(chain_id: bytes, voter: Signer, newcomer: bytes, name: str) -> AdmitMember:
    token = another(voter, f"token {name}")
    permission = sign_message(voter, chain_id, Invitation(token.public, UNTIL_MS))
    return AdmitMember(permission, token.sign(token_preimage(chain_id, newcomer)), name, ())


def _revocation(chain_id: bytes, voter: Signer, name: str, now_ms: int) -> RevokeInvitation:
    return RevokeInvitation(sign_message(voter, chain_id, Invitation(FastSigner(name).public, now_ms + REVOKED_FOR_MS)))


def start_job(kind: str, rounds: int, alone: bool = False) -> tuple[str, StartJob]:
    """Start a job. `alone`: only its author trains."""
    return "job/start", StartJob(f"{kind}:{rounds}{':alone' * alone}".encode())


def stop_job(job: bytes) -> tuple[str, StopJob]:
    return "job/stop", StopJob(job)


def roll_back(job: bytes, number: int, last: int) -> tuple[str, RequestRollback]:
    return "job/rollback", RequestRollback(job, number, last)


def said_of(due: AuditDuty, finding: ReplayFinding, loss: SealedLoss | None = None) -> tuple[str, AuditFinding]:
    return "audit/verdict" if due.is_dispute else "audit/report", AuditFinding(due.job, *due.proposal_key, finding, 0, loss)


def leave() -> tuple[str, ResignAsVoter]:
    return "member/resign", ResignAsVoter()


def retire(subject: bytes, lowers_tolerance: bool) -> tuple[str, RetireMember]:
    return "member/retire", RetireMember(subject, lowers_tolerance, UNTIL_MS)


def rotate(chain_id: bytes, old: bytes, successor: Signer) -> tuple[str, RotateKey]:
    return "member/rotate", RotateKey(successor.public, successor.sign(rotation_preimage(chain_id, old)))


def submit(peer: Peer, signed: Signed) -> None:
    """Submit a transaction only if it would be accepted now, as `peer.runtime.transaction_submitter` does."""
    node = peer.node
    assert node is not None

    def put() -> RoundEffects | None:
        try:
            node.rules.apply_transaction(node.state, signed)
        except (Refused, RemoteProtocolError):
            peer.author.outstanding = None
            return None
        node.ledger.mempool.add_transaction(signed)
        peer.simulation.note_submitted(peer, signed)
        return RoundEffects(sends=[signed])

    peer.give(StepAction(put))
