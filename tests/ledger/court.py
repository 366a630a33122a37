"""Ledger without consensus: a world with one job of sampled audits, in which all peers vote and train."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ledger.audits.audit_state import (
    LOSS_OPENING_KIND,
    AuditDuty,
    AuditFinding,
    AuditResult,
    JobAudits,
    MemberAuditRecord,
    audit_duties,
)
from ledger.audits.loss_commitments import LossOpening, SealedLoss, seal_loss
from ledger.core.module import Module
from protocol.identity import Signed
from protocol.verdicts import ReplayFinding, Verdict
from rounds.round_state import RoundCertificate
from tests.ledger.world import AUDITS, LOSS, PEOPLE, SAMPLED, World, secret_of
from tests.sim.keys import FastSigner

MATCH, MISMATCH, WITHHELD = ReplayFinding.MATCH, ReplayFinding.MISMATCH, ReplayFinding.WITHHELD
LONG = SAMPLED + b":200"


class Court(World):
    """A running job with sampled audits, in which all peers vote and train. Round 0 is closed without a proposal."""

    def __init__(
        self,
        n: int = 4,
        spec: bytes = LONG,
        *,
        is_new: bool = False,
        anchor_rounds: int = 8,
        modules: tuple[Module[Any], ...] = (),
        rounds: int = 0,
        **terms: object,
    ) -> None:
        """Close `rounds` rounds after round 0, which stays open if `is_new`."""
        audits = replace(AUDITS, **terms)  # type: ignore[arg-type]
        super().__init__(n, n, audits, modules, anchor_rounds)
        self.key = self.start(PEOPLE[0], spec)
        self.people = {person.public: person for person in PEOPLE}
        if not is_new:
            self.round(trainers=())
        self.round(rounds)

    @property
    def audits(self) -> JobAudits:
        return self.state.audits.jobs[self.key]

    @property
    def log(self) -> list[tuple[AuditResult, bytes, bytes]]:
        return [(entry.result, entry.trainer, entry.auditor) for entry in self.state.audits.log]

    def standing(self, key: bytes) -> MemberAuditRecord:
        return self.state.audits.member_records.get(key, MemberAuditRecord())

    def suspended(self, key: bytes) -> bool:
        return key in self.audits.suspended

    def round(self, count: int = 1, trainers: Iterable[bytes] | None = None) -> None:
        """Close rounds in which all trainers, or `trainers`, proposed and were accepted."""
        for _ in range(count):
            who = self.job(self.key).trainers if trainers is None else trainers
            self.decide(closings=(self.closing(self.key, dict.fromkeys(who, Verdict.ACCEPT)),))

    def closing_without(self, *absent: bytes) -> RoundCertificate:
        """Close the round without the ballots of these voters. All trainers are accepted."""
        job = self.job(self.key)
        voters = tuple(voter for voter in job.voters if voter not in absent)
        self.vote(self.key, dict.fromkeys(job.trainers, Verdict.ACCEPT), voters)
        closing = self.ledger.rounds[self.key].certificate()
        assert closing is not None
        return closing

    def until_drawn(self, trainer: bytes) -> None:
        """Close rounds until an auditor is drawn for this trainer, since some rounds draw none."""
        while not self.due(trainer):
            self.round()

    def due(self, trainer: bytes | None = None, disputes: bool = False) -> list[tuple[FastSigner, AuditDuty]]:
        """Return the open audit duties with their auditors."""
        everybody = [(person, due) for key, person in self.people.items() for due in audit_duties(key, self.state)]
        return [
            (person, due)
            for person, due in everybody
            if due.is_dispute is disputes and (trainer is None or due.trainer == trainer)
        ]

    def said(self, person: FastSigner, due: AuditDuty, finding: ReplayFinding = MATCH) -> Signed:
        kind = "audit/verdict" if due.is_dispute else "audit/report"
        loss = None if due.is_dispute or finding is not MATCH else self.seal(person, due)
        return self.tx(person, kind, AuditFinding(due.job, *due.proposal_key, finding, 7, loss))

    def seal(self, person: FastSigner, due: AuditDuty, loss: int | None = None) -> SealedLoss | None:
        """Return the sealed loss of the update, unless another one is given."""
        if due.proposal.loss is None:
            return None
        said, secret = LOSS if loss is None else loss, secret_of(person.public + due.trainer, due.round)
        return seal_loss(said, due.job, due.round, due.trainer, due.auditor, due.proposal.loss, secret)

    def report(self) -> None:
        """Report a match for every drawn audit."""
        for person, due in self.due():
            self.say(person, due)

    def open_losses(self, but: Iterable[bytes] = ()) -> None:
        """Open all losses that may be opened, except those of the trainers `but`."""
        for key, person in self.people.items():
            for due in self.rules.audits_module.loss_openings_due(key, self.state) if key not in but else ():
                self.decide(self.tx(person, LOSS_OPENING_KIND, self.opening(due.round, due.trainer)))

    def opening(self, number: int, trainer: bytes) -> LossOpening:
        """Open the loss of the proposal of that key in that round."""
        return LossOpening(self.key, number, trainer, secret_of(trainer, number), self.losses.get(trainer) or LOSS)

    def say(self, person: FastSigner, due: AuditDuty, finding: ReplayFinding = MATCH) -> None:
        self.decide(self.said(person, due, finding))

    def challenge(self, trainer: bytes, finding: ReplayFinding = MISMATCH) -> AuditDuty:
        """Report a mismatch by an auditor of this trainer, as soon as one is drawn."""
        self.until_drawn(trainer)
        auditor, due = min(self.due(trainer), key=lambda item: (item[1].round, item[0].public))
        self.say(auditor, due, finding)
        return due

    def judge(self, finding: ReplayFinding, count: int | None = None, trainer: bytes | None = None) -> None:
        """Record the same verdict of `count` awaited judges, or of all."""
        for person, due in [item for item in self.due(trainer, disputes=True) if not item[1].is_second_verdict][:count]:
            self.say(person, due, finding)

    def convict(self, trainer: bytes) -> None:
        self.challenge(trainer)
        while self.due(trainer, disputes=True) and not self.suspended(trainer):
            self.judge(MISMATCH, 1, trainer)
        assert self.suspended(trainer)


A, B, C, D = (person.public for person in PEOPLE[:4])


def withheld(court: Court, auditor: FastSigner, trainer: bytes, times: int = 1) -> None:
    """Report `times` times that a trainer withholds a proposal which the auditor was drawn for. The others can replay it."""
    for _ in range(times):
        while not any(person is auditor for person, _ in court.due(trainer)):
            court.round()
        court.say(auditor, next(due for person, due in court.due(trainer) if person is auditor), WITHHELD)
        while court.audits.disputes and not court.suspended(trainer):
            court.judge(MATCH, 1)
