"""Bugs that break no rule of safety: something that must come about never does."""

from __future__ import annotations

import dataclasses
from typing import Any

import ledger.members
from consensus.evidence import Evidence
from consensus.pbft.own_votes import RollbackCheck
from consensus.pbft.vote_set import HeightVoteSet
from consensus.voter_set import VoterSet
from ledger.blocks.application import LedgerApplication
from ledger.members import MembersState, VoterChange
from peer.node.open_rounds import OpenRounds
from protocol.messages import Ballot
from rounds.round_state import OpenRoundState
from tests.sim.mutants.agreement import with_liar
from tests.sim.mutants.planting import Mutant, Planter
from tests.sim.mutants.scenarios import Scenario

FIRST_HEIGHTS = 6  # in which a peer that starts late may still vote where one that starts again never does
TWO_PREPARES = with_liar("two-prepares", blocks=40, work=0.2, jobs=False)
ROUNDS = Scenario(blocks=12)
ONE_RETIRES = Scenario(retires=1.0, blocks=40, jobs=False)
ONE_JOINS = Scenario(joiners=1, blocks=16)
ONE_RESTARTS = Scenario(crashes=1, calm_seconds=2.0, seconds=4.0, blocks=24, jobs=False)


def _no_ballots(planter: Planter) -> None:
    planter.replace(OpenRoundState, "make_ballot_if_due", lambda self, now: None)


def _one_casts_no_ballots(planter: Planter) -> None:
    """As after a start at which a peer takes its rounds for muted."""
    real = OpenRounds._is_mute

    def is_mute(self: OpenRounds, book: OpenRoundState) -> bool:
        return self._signer.public == min(book.terms.voters) or real(self, book)

    planter.replace(OpenRounds, "_is_mute", is_mute)


def _no_closings(planter: Planter) -> None:
    planter.replace(LedgerApplication, "_closings", lambda self, room: ((), room))


def _nothing_is_accepted(planter: Planter) -> None:
    real = OpenRoundState._ballot

    def ballot(self: OpenRoundState) -> Ballot:
        return dataclasses.replace(real(self), judgements=())

    planter.replace(OpenRoundState, "_ballot", ballot)


def _no_evidence(planter: Planter) -> None:
    planter.replace(HeightVoteSet, "_contradiction", lambda *_: None)


def _evidence_of_ballots_lost(planter: Planter) -> None:
    for name in ("add_ballot", "add_proposal"):
        _without_result(planter, name)


def _without_result(planter: Planter, name: str) -> None:
    real = getattr(OpenRoundState, name)

    def add(self: OpenRoundState, *arguments: Any) -> None:
        real(self, *arguments)

    planter.replace(OpenRoundState, name, add)


def _evidence_not_decided(planter: Planter) -> None:
    planter.replace(LedgerApplication, "_evidence", lambda self: ((), self.state))


def _evidence_not_kept(planter: Planter) -> None:
    """It is written down, and told once."""
    told = set[tuple[int, bytes]]()

    def accuse(self: LedgerApplication, evidence: Evidence) -> bool:
        is_new = (id(self), evidence.signer) not in told
        told.add((id(self), evidence.signer))
        return is_new

    planter.replace(LedgerApplication, "add_evidence", accuse)


def _nobody_joins(planter: Planter) -> None:
    planter.replace(ledger.members, "_joins", lambda state: [])


def _approvals_of_all(planter: Planter) -> None:
    real = ledger.members._joins

    def joins(state: MembersState) -> list[bytes]:
        return [key for key in real(state) if len(state.candidates[key]) > len(VoterSet(state.voters))]

    planter.replace(ledger.members, "_joins", joins)


def _expelled_go_on_voting(planter: Planter) -> None:
    real = ledger.members._changes

    def changes(state: MembersState) -> list[VoterChange]:
        return [change for change in real(state) if change.removed is None or not state.is_expelled(change.removed)]

    planter.replace(ledger.members, "_changes", changes)


def _restarted_stay_silent(planter: Planter) -> None:
    real = RollbackCheck._is_answered

    def is_answered(self: RollbackCheck, me: bytes, height: int, voters: VoterSet) -> bool:
        return height <= FIRST_HEIGHTS and real(self, me, height, voters)

    planter.replace(RollbackCheck, "_is_answered", is_answered)


def _newcomers_stay_silent(planter: Planter) -> None:
    real = RollbackCheck.may_sign

    def may_sign(self: RollbackCheck, me: bytes, height: int, voters: VoterSet) -> bool:
        has_joined = len(voters) > ONE_JOINS.n and me == max(voters.keys)
        return not has_joined and real(self, me, height, voters)

    planter.replace(RollbackCheck, "may_sign", may_sign)


def _nobody_is_retired(planter: Planter) -> None:
    planter.replace(ledger.members, "_to_retire", lambda state: None)


def _retired_trainers_are_waited_for(planter: Planter) -> None:
    planter.replace(MembersState, "may_be_awaited", MembersState.is_current_key)


STANDSTILL = (
    Mutant(
        "retired-trainers-are-waited-for",
        "a job whose only trainer was retired stays open for ever",
        ("jobs left",),
        _retired_trainers_are_waited_for,
        Scenario(loner="lost", blocks=40),
    ),
    Mutant("nobody-is-retired", "a quorum's wishes come to nothing", ("changes",), _nobody_is_retired, ONE_RETIRES),
    Mutant("no-ballots", "no ballot is ever cast", ("rounds",), _no_ballots, ROUNDS),
    Mutant("one-casts-no-ballots", "one voter casts no ballot", ("ballots",), _one_casts_no_ballots, ROUNDS),
    Mutant("no-closings", "ballots are cast, and no leader proposes what they decide", ("rounds",), _no_closings, ROUNDS),
    Mutant("nothing-is-accepted", "ballots name no update", ("accepted",), _nothing_is_accepted, ROUNDS),
    Mutant("no-evidence", "no evidence is ever made", ("liars gone",), _no_evidence, TWO_PREPARES),
    Mutant(
        "evidence-of-ballots-lost",
        "two ballots of one voter are no evidence",
        ("liars gone",),
        _evidence_of_ballots_lost,
        with_liar("two-ballots", blocks=80),
    ),
    Mutant(
        "evidence-not-decided",
        "evidence is made, and no leader proposes it",
        ("liars gone",),
        _evidence_not_decided,
        TWO_PREPARES,
    ),
    Mutant(
        "evidence-not-kept",
        "evidence is written down, and forgotten",
        ("liars gone",),
        _evidence_not_kept,
        with_liar("two-commits", blocks=40, jobs=False),
    ),
    Mutant(
        "expelled-go-on-voting",
        "who is expelled keeps its vote",
        ("changes",),
        _expelled_go_on_voting,
        TWO_PREPARES,
    ),
    Mutant("nobody-joins", "nobody ever becomes a voter", ("changes",), _nobody_joins, ONE_JOINS),
    Mutant("approvals-of-all", "a newcomer waits for more approvals than there are", ("changes",), _approvals_of_all, ONE_JOINS),
    Mutant("newcomers-stay-silent", "who has joined says nothing", ("votes", "newcomers"), _newcomers_stay_silent, ONE_JOINS),
    Mutant("restarted-stay-silent", "a peer that started again never votes", ("votes",), _restarted_stay_silent, ONE_RESTARTS),
)
