"""Bugs that break liveness and no rule of safety."""

from __future__ import annotations

import dataclasses
from functools import partial
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
from tests.sim.mutants.planting import Mutant, Planter, replaced, together, wrapped
from tests.sim.mutants.scenarios import Scenario

FIRST_HEIGHTS = 6  # in which a peer that starts late may still vote where one that starts again never does
TWO_PREPARES = with_liar("two-prepares", blocks=40, work=0.2, jobs=False)
ROUNDS = Scenario(blocks=12)
ONE_RETIRES = Scenario(retires=1.0, blocks=40, jobs=False)
ONE_JOINS = Scenario(joiners=1, blocks=16)
ONE_RESTARTS = Scenario(crashes=1, calm_seconds=2.0, seconds=4.0, blocks=24, jobs=False)


@partial(wrapped, OpenRounds, "_is_mute")
def _one_casts_no_ballots(real: Any, self: OpenRounds, book: OpenRoundState) -> bool:
    """Plant: one voter casts no ballots, because all its rounds count as muted."""
    return self._signer.public == min(book.terms.voters) or real(self, book)


@partial(wrapped, OpenRoundState, "_ballot")
def _nothing_is_accepted(real: Any, self: OpenRoundState) -> Ballot:
    return dataclasses.replace(real(self), judgements=())


def _without_result(real: Any, self: OpenRoundState, *arguments: Any) -> None:
    real(self, *arguments)


def _evidence_not_kept(planter: Planter) -> None:
    """Plant: evidence is written to the disk, and sent only once."""
    told = set[tuple[int, bytes]]()

    def accuse(self: LedgerApplication, evidence: Evidence) -> bool:
        is_new = (id(self), evidence.signer) not in told
        told.add((id(self), evidence.signer))
        return is_new

    planter.replace(LedgerApplication, "add_evidence", accuse)


@partial(wrapped, ledger.members, "_joins")
def _approvals_of_all(real: Any, state: MembersState) -> list[bytes]:
    return [key for key in real(state) if len(state.candidates[key]) > len(VoterSet(state.voters))]


@partial(wrapped, ledger.members, "_changes")
def _expelled_go_on_voting(real: Any, state: MembersState) -> list[VoterChange]:
    return [change for change in real(state) if change.removed is None or not state.is_expelled(change.removed)]


@partial(wrapped, RollbackCheck, "_is_answered")
def _restarted_stay_silent(real: Any, self: RollbackCheck, me: bytes, height: int, voters: VoterSet) -> bool:
    return height <= FIRST_HEIGHTS and real(self, me, height, voters)


@partial(wrapped, RollbackCheck, "may_sign")
def _newcomers_stay_silent(real: Any, self: RollbackCheck, me: bytes, height: int, voters: VoterSet) -> bool:
    has_joined = len(voters) > ONE_JOINS.n and me == max(voters.keys)
    return not has_joined and real(self, me, height, voters)


STANDSTILL = (
    Mutant(
        "retired-trainers-are-waited-for",
        "a job whose only trainer was retired stays open for ever",
        ("jobs left",),
        replaced(MembersState, "may_be_awaited", MembersState.is_current_key),
        Scenario(loner="lost", blocks=40),
    ),
    Mutant(
        "nobody-is-retired",
        "a quorum's wishes come to nothing",
        ("changes",),
        replaced(ledger.members, "_to_retire", lambda state: None),
        ONE_RETIRES,
    ),
    Mutant(
        "no-ballots",
        "no ballot is ever cast",
        ("rounds",),
        replaced(OpenRoundState, "make_ballot_if_due", lambda self, now: None),
        ROUNDS,
    ),
    Mutant("one-casts-no-ballots", "one voter casts no ballot", ("ballots",), _one_casts_no_ballots, ROUNDS),
    Mutant(
        "no-closings",
        "ballots are cast, and no leader proposes what they decide",
        ("rounds",),
        replaced(LedgerApplication, "_closings", lambda self, room: ((), room)),
        ROUNDS,
    ),
    Mutant("nothing-is-accepted", "ballots name no update", ("accepted",), _nothing_is_accepted, ROUNDS),
    Mutant(
        "no-evidence",
        "no evidence is ever made",
        ("liars gone",),
        replaced(HeightVoteSet, "_contradiction", lambda *_: None),
        TWO_PREPARES,
    ),
    Mutant(
        "evidence-of-ballots-lost",
        "two ballots of one voter are no evidence",
        ("liars gone",),
        together(*(wrapped(OpenRoundState, name, _without_result) for name in ("add_ballot", "add_proposal"))),
        with_liar("two-ballots", blocks=80),
    ),
    Mutant(
        "evidence-not-decided",
        "evidence is made, and no leader proposes it",
        ("liars gone",),
        replaced(LedgerApplication, "_evidence", lambda self: ((), self.state)),
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
    Mutant(
        "nobody-joins",
        "nobody ever becomes a voter",
        ("changes",),
        replaced(ledger.members, "_joins", lambda state: []),
        ONE_JOINS,
    ),
    Mutant("approvals-of-all", "a newcomer waits for more approvals than there are", ("changes",), _approvals_of_all, ONE_JOINS),
    Mutant("newcomers-stay-silent", "who has joined says nothing", ("votes", "newcomers"), _newcomers_stay_silent, ONE_JOINS),
    Mutant("restarted-stay-silent", "a peer that started again never votes", ("votes",), _restarted_stay_silent, ONE_RESTARTS),
)
