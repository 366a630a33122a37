"""The tables of one job's audits while a block changes them. The rules are functions of these tables, in several files:

| file                         | rules                                                                                 |
|------------------------------|---------------------------------------------------------------------------------------|
| `assignments`                | draws, volunteers, and reports that arrive, lapse or become void                      |
| `disputes`                   | challenges, verdicts, ends of disputes, claims that data were withheld, rewards and   |
|                              | suspensions                                                                           |
| `loss_openings`              | losses that reports seal and trainers open                                            |
| `state_machine`              | order of these steps in each transaction and each block; ends of windows              |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from ledger.audits.audit_state import (
    AUDIT_LOG_MAX,
    UNOPENED_MAX,
    AuditableProposal,
    AuditLogEntry,
    AuditResult,
    AuditsState,
    JobAudits,
    MemberAuditRecord,
    ProposalKey,
)
from ledger.jobs import Job, JobPhase, JobTerms, RollbackDue
from ledger.members import MembersState
from protocol.verdicts import ReplayFinding

# Round number after all rounds of a job: no round is left to close, so windows end by time alone.
LATER_THAN_ANY_ROUND = 2**53 - 1

T = TypeVar("T")


class AuditTables:
    """The tables of `JobAudits`, under the names of its fields, while rules change them.

    Discard an object after a rule has raised `Refused`, because some of its tables may be changed.
    """

    def __init__(self, state: AuditsState, key: bytes, job: Job, terms: JobTerms, members: MembersState, height: int) -> None:
        assert terms.audits is not None
        self.key, self.job, self.members, self.height = key, job, members, height
        self.current_key, self.terms = members.current_key, terms.audits
        # Maximum time of the rounds in a window, in ms.
        self.window_rounds_ms = round(1_000 * terms.proposal_seconds * terms.audits.window)
        self.is_rewarded = terms.needs_worker  # updates of a scratch job are public and need no work: no rewards
        self.closed = job.round - 1  # the last closed round
        self._before = follow_key_rotations(state, members.current_key)
        self.member_records, self.log = dict(self._before.member_records), list(state.log)
        self.rollbacks_due: list[RollbackDue] = []  # rollbacks that this block must apply to undo false updates in the model
        audits = self._before.jobs[key]
        self.rounds, self.commitments = dict(audits.rounds), dict(audits.commitments)
        self.disputes = {dispute.proposal_key: dispute for dispute in audits.disputes}  # in the order in which the disputes began
        self.suspended, self.suspension_causes = dict(audits.suspended), dict(audits.suspension_causes)
        self.ignored_challengers, self.withheld_claims = dict(audits.ignored_challengers), dict(audits.withheld_claims)
        self.unvested_rounds, self.loss_comparisons = dict(audits.unvested_rounds), dict(audits.loss_comparisons)
        self.unopened_losses = {number: dict(of) for number, of in audits.unopened_losses.items()}

    def new_state(self) -> AuditsState:
        """Return the changed state. Drops proposals that can get no report, and the oldest sealed losses beyond UNOPENED_MAX."""
        self.forget_proposals()
        waiting = [(number, trainer) for number, of in sorted(self.unopened_losses.items()) for trainer in of]
        for number, trainer in waiting[: max(0, len(waiting) - UNOPENED_MAX)]:
            del self.unopened_losses[number][trainer]
        assert self.suspension_causes.keys() == self.suspended.keys(), "every suspension has a cause"
        for dispute in self.disputes.values():
            assert dispute.trainer in self.rounds[dispute.round].proposals, "the proposal of a dispute is kept"
            assert dispute.opened <= self.job.round or self.job.phase is JobPhase.FINISHED, (
                "only the end of a job lowers its round"
            )
        audits = JobAudits(
            rounds=self.rounds,
            disputes=tuple(self.disputes.values()),
            commitments=self.commitments,
            suspended=self.suspended,
            ignored_challengers=self.ignored_challengers,
            unvested_rounds={trainer: rounds for trainer, rounds in self.unvested_rounds.items() if rounds},
            withheld_claims=self.withheld_claims,
            suspension_causes=self.suspension_causes,
            unopened_losses={number: of for number, of in self.unopened_losses.items() if of},
            loss_comparisons=self.loss_comparisons,
        )
        return AuditsState({**self._before.jobs, self.key: audits}, self.member_records, tuple(self.log[-AUDIT_LOG_MAX:]))

    # Queries

    def has_rounds(self, number: int) -> bool:
        """Return whether rounds are left in the window of this round: the `terms.window` rounds after it."""
        return number + self.terms.window > self.closed

    def find_proposal(self, place: ProposalKey) -> AuditableProposal | None:
        audits = self.rounds.get(place[0])
        return audits.proposals.get(place[1]) if audits else None

    def find_key(self, keys: Iterable[bytes], author: bytes) -> bytes | None:
        """Return the one of these keys of a round that belongs to the author, or None."""
        return next((key for key in keys if self.current_key(key) == author), None)

    def rounds_awaiting_reports(self, trainer: bytes) -> set[int]:
        """Return the rounds in which reports on this trainer's proposals are awaited."""
        return {
            number
            for number, audits in self.rounds.items()
            if any(drawn.pending_auditors and self.current_key(key) == trainer for key, drawn in audits.proposals.items())
        }

    def is_trusted(self, key: bytes) -> bool:
        person = self.current_key(key)
        return person not in self.suspended and not self.members.is_expelled(person)

    # Changes

    def forget_proposals(self) -> None:
        """Forget proposals that can get no further report, verdict or draw."""
        for number, audits in list(self.rounds.items()):
            if self.job.is_trained or audits.undone or not self.has_rounds(number):
                self.forget_unawaited(number)
        self.rounds = {number: audits for number, audits in self.rounds.items() if audits.proposals}

    def forget_unawaited(self, number: int) -> None:
        """Forget the round's proposals without an awaited report or a dispute."""
        audits = self.rounds[number]
        kept = {
            trainer: drawn
            for trainer, drawn in audits.proposals.items()
            if drawn.pending_auditors or (number, trainer) in self.disputes
        }
        self.rounds[number] = replace(audits, proposals=kept)

    def member_record(self, person: bytes) -> MemberAuditRecord:
        return self.member_records.get(person, MemberAuditRecord())

    def count(self, person: bytes, **more: int) -> None:
        """Increase the counts of a member's record that `more` names."""
        known = self.member_record(person)
        if any(more.values()):
            self.member_records[person] = replace(known, **{name: getattr(known, name) + count for name, count in more.items()})

    def log_result(
        self,
        place: ProposalKey,
        auditor: bytes,
        result: AuditResult | None,
        finding: ReplayFinding | None = None,
        ppm: int | None = None,
    ) -> None:
        assert result is not None
        self.log.append(AuditLogEntry(self.height, self.key, *place, auditor, result, finding, ppm))


def follow_key_rotations(state: AuditsState, current: Callable[[bytes], bytes]) -> AuditsState:
    """Return the state with its tables of members under their present keys."""
    persons: list[Iterable[bytes]] = [state.member_records]
    for audits in state.jobs.values():
        persons += [audits.suspended, audits.ignored_challengers, audits.unvested_rounds, *audits.withheld_claims.values()]
        persons += [audits.withheld_claims, audits.loss_comparisons, *(known.wrong for known in audits.loss_comparisons.values())]
    if all(current(key) == key for table in persons for key in table):
        return state

    def rekeyed(table: Mapping[bytes, T]) -> dict[bytes, T]:
        followed = {current(key): value for key, value in table.items()}
        assert len(followed) == len(table)  # the new key of a rotation was not a member's key before
        return followed

    jobs = {
        key: replace(
            audits,
            suspended=rekeyed(audits.suspended),
            ignored_challengers=rekeyed(audits.ignored_challengers),
            unvested_rounds=rekeyed(audits.unvested_rounds),
            suspension_causes=rekeyed(audits.suspension_causes),
            loss_comparisons=rekeyed(
                {key: replace(known, wrong=rekeyed(known.wrong)) for key, known in audits.loss_comparisons.items()}
            ),
            withheld_claims=rekeyed({key: rekeyed(claims) for key, claims in audits.withheld_claims.items()}),
        )
        for key, audits in state.jobs.items()
    }
    return replace(state, jobs=jobs, member_records=rekeyed(state.member_records))
