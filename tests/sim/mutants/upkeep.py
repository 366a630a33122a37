"""Bugs in what lies around a height: the disk, restarts, voters that change, evidence, rounds, the ledger, snapshots."""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from typing import Any
from unittest import mock

import consensus.evidence
import ledger.audits.state_machine
import ledger.ledger_state
import ledger.members
import ledger.snapshots.snapshot_assembly
import peer.node.node
from consensus.effects import StepEffects, merge_effects
from consensus.evidence import Evidence, are_conflicting
from consensus.pbft.chain import Chain
from consensus.pbft.own_votes import RollbackCheck
from consensus.pbft.replica_state import ReplicaState
from consensus.pbft.vote_set import HeightVoteSet
from consensus.voter_set import faults_tolerated
from ledger.audits.audit_state import AuditsState
from ledger.audits.state_machine import AuditsModule
from ledger.blocks.application import LedgerApplication
from ledger.ledger_state import LedgerRules, LedgerState, StateTransition
from ledger.members import MembersState, expel_member
from ledger.snapshots.snapshot_assembly import RestoredSnapshot, SnapshotAssembly, SnapshotPartKey
from ledger.snapshots.snapshot_download import SnapshotDownload
from ledger.tables import RangeProof, Table, TableAssembly
from ledger.tables.sparse_merkle_tree import build_tree, path_of
from peer.node.node import Node
from peer.node.open_rounds import OpenRounds
from protocol import codec
from protocol.messages import Ballot, Commit, SnapshotContent, Timeout
from rounds import round_state, vouch_set
from rounds.round_terms import RoundTerms
from rounds.vouch_set import VouchSet
from tests.sim.audits import Withholds
from tests.sim.disk import Disk
from tests.sim.mutants.agreement import LOST, with_liar
from tests.sim.mutants.planting import Mutant, Plant, Planter, everywhere, replaced, together, wrapped
from tests.sim.mutants.scenarios import Scenario
from tests.sim.simulation import Simulation
from tests.sim.workload import start_job, stop_job

RETIRES = Scenario(retires=1.0, blocks=24, jobs=False)
CRASHES = dataclasses.replace(LOST, seconds=8.0, lost=0.8, crashes=4, blackouts=3)
CHANGES = Scenario(joiners=1, rotates=True, leaves=1, blocks=24, jobs=False)
ROLLED_BACK = dataclasses.replace(LOST, seconds=8.0, lost=1.0, rollbacks=1)
FAR_BACK = dataclasses.replace(ROLLED_BACK, seconds=6.0, lost=0.3, rolled_back_far=True, blocks=12)
FORGOTTEN_BALLOT = dataclasses.replace(ROLLED_BACK, rolled_back_after=Ballot.TAG, calm_seconds=1.0, jobs=True)
WRONG = Scenario(seconds=6.0, lost=0.8, wrong_states=1, calm_seconds=1.0, blocks=16, jobs=True)
LATE = Scenario(joiners=2, joins_at=3.0, seconds=4.0, blocks=40, jobs=False)
REAL_CHECK = round_state.why_round_certificate_invalid
STOPPED_AT = 2.5  # seconds: some rounds are over by then

# The disk ------------------------------------------------------------------------------------------------------------


def _sends_before_sync(simulation: Simulation) -> None:
    simulation.sends_before_sync = True


@partial(wrapped, OpenRounds, "_sign_message")
def _round_votes_not_durable(real: Any, self: OpenRounds, book: Any, message: Any, now: float, effects: Any) -> None:
    before = len(effects.records)
    real(self, book, message, now, effects)
    del effects.records[before:]


@partial(wrapped, OpenRounds, "_sign_message")
def _accepted_not_durable(real: Any, self: OpenRounds, book: Any, message: Any, now: float, effects: Any) -> None:
    before = len(effects.records)
    real(self, book, message, now, effects)
    effects.records[before:] = [dataclasses.replace(record, accepted=()) for record in effects.records[before:]]


def _forgets(**nothing: Any) -> Plant:
    return wrapped(Disk, "read_restart_state", lambda real, self: dataclasses.replace(real(self), **nothing))


# Old disks -----------------------------------------------------------------------------------------------------------


@partial(wrapped, RollbackCheck, "record_forgotten_statement")
def _silence_shortened(real: Any, self: RollbackCheck, height: int) -> bool:
    """Plant: a peer stays silent below the last forgotten height, not below the highest."""
    before = self.no_votes_below
    self.no_votes_below = 0
    real(self, height)
    return self.no_votes_below > before


def _rounds_unchecked(planter: Planter) -> None:
    """Plant: peers sign round messages at once, and do not restore those that others remember."""
    planter.replace(Node, "may_sign_round_messages", property(lambda self: True))
    planter.replace(OpenRounds, "_restore_own_message", lambda *_: None)


def _spoken_forgotten(planter: Planter) -> None:
    """Plant: peers forget their own round messages, and the proposals from which they would sign the same ballot again."""
    planter.replace(Disk, "spoken", lambda *_: {})
    planter.replace(Disk, "accepted_in", lambda *_: ())


# No bug here empties `OpenRounds.muted`: histories would not find it. After a rollback it is a second safeguard. Statements that
# other peers name are restored to the book, which prevents a second signature; no peer knows of the others. It is needed for a
# ballot that the book refuses: on a model that was wrong here and was restored while the round is still open. A snapshot comes
# with every eighth height, and the round is over by then. `tests/peer/test_rounds.py` tests this case.

# Wrong states --------------------------------------------------------------------------------------------------------


@partial(wrapped, ReplicaState, "_may_sign")
def _signs_although_wrong(real: Any, self: ReplicaState, book: HeightVoteSet) -> bool:
    divergence, self._chain.divergence = self._chain.divergence, None
    try:
        return real(self, book)
    finally:
        self._chain.divergence = divergence


# Voters --------------------------------------------------------------------------------------------------------------


@partial(wrapped, peer.node.node, "_applied_event")
def _old_voters(real: Any, state: Any) -> Any:
    event = real(state)
    founders = [key for key, member in state.members.members.items() if member.admitted == 0 and member.invited_by is None]
    old = type(event.voters[0])(tuple(sorted(founders)))
    return dataclasses.replace(event, voters=(old, old, old))


@partial(wrapped, ledger.members, "advance_voter_sets")
def _acts_at_once(real: Any, state: Any, height: int, time_ms: int) -> Any:
    after = real(state, height, time_ms)
    return dataclasses.replace(after, voters=after.upcoming)


# Evidence ------------------------------------------------------------------------------------------------------------


def _evidence_of_signatures(planter: Planter) -> None:
    """Plant: one statement under two signatures counts as a contradiction."""
    add = HeightVoteSet.add_statement

    def by_signature(self: HeightVoteSet, signed: Any, statement: Any) -> Any:
        said = self._statements.get(signed.signer, {}).get((statement.TAG, statement.view))
        evidence = add(self, signed, statement)
        if said is not None and said[1] == statement and said[0].signature != signed.signature:
            return Evidence(said[0], signed)
        return evidence

    planter.everywhere(are_conflicting, lambda first, second: first == second or are_conflicting(first, second))
    planter.replace(HeightVoteSet, "add_statement", by_signature)


@partial(everywhere, are_conflicting)
def _timeout_after_commit(first: Any, second: Any) -> bool:
    """Plant: a peer that gives up a view in which it committed is accused, even if its timeout names the block."""
    for one, other in ((first, second), (second, first)):
        if isinstance(one, Commit) and isinstance(other, Timeout) and one.height == other.height:
            return other.view >= one.view
    return are_conflicting(first, second)


# Rounds and the ledger -----------------------------------------------------------------------------------------------


@partial(everywhere, REAL_CHECK)
def _ballots_twice(terms: Any, closing: Any, *parts: Any) -> Any:
    once = {ballot.signer: ballot for ballot in closing.ballots}
    return REAL_CHECK(terms, dataclasses.replace(closing, ballots=tuple(once[key] for key in sorted(once))), *parts)


@partial(everywhere, REAL_CHECK)
def _few_ballots(terms: Any, closing: Any, counted: Any, *parts: Any) -> Any:
    problem = REAL_CHECK(terms, closing, counted, *parts)
    return None if len(counted) < terms.quorum else problem


@partial(everywhere, round_state.is_round_settled)
def _settled_too_soon(terms: RoundTerms, counted: Any, vouches: VouchSet) -> bool:
    enough = len(terms.voters) - terms.quorum
    return all(
        (verdicts[round_state.Verdict.ACCEPT] >= terms.quorum and vouches.has_enough_vouches(*named))
        or len(counted) - verdicts[round_state.Verdict.ACCEPT] >= enough
        for named, verdicts in round_state.tally_ballots(counted.values()).items()
    )


@partial(wrapped, ledger.members, "use_nonce")
def _nonce_unchecked(real: Any, state: Any, transaction: Any, author: bytes) -> Any:
    member = state.members.get(author)
    if member is None or not state.is_current_key(author):
        return real(state, transaction, author)
    return real(state, dataclasses.replace(transaction, nonce=member.nonce + 1), author)


def _applies_differently(simulation: Simulation) -> None:
    """Plant: a block's effect depends on the peer that applies it, as with a clock, a random number, or the order of a set."""
    real = simulation.apply

    def apply(of: Any, state: Any, decided: Any) -> Any:
        transition, after = real(of, state, decided)
        if of.number == 1 and after.height == 6:
            counter = after.modules["counter"]
            after = after.with_modules(counter=dataclasses.replace(counter, total=counter.total + 1))
        return transition, after

    simulation.apply = apply  # type: ignore[method-assign]


def _tosses_a_coin(planter: Planter) -> None:
    """Plant: a block's effect is random. One shared computation for all peers cannot show this."""
    apply, coins = LedgerRules.apply_block, random.Random(0)

    def toss(self: LedgerRules, state: LedgerState, block: Any) -> StateTransition:
        made = apply(self, state, block)
        counter = made.state.modules["counter"]
        added = dataclasses.replace(counter, total=counter.total + coins.getrandbits(1))
        return dataclasses.replace(made, state=made.state.with_modules(counter=added))

    planter.replace(LedgerRules, "apply_block", toss)


@partial(wrapped, AuditsModule, "end_block")
def _in_given_order(real: Any, self: AuditsModule, state: AuditsState, *parts: Any) -> AuditsState:
    """Plant: a block's effect depends on the order in which jobs began. A state decoded from bytes has lost this order."""
    with mock.patch.object(ledger.audits.state_machine, "sorted", list, create=True):
        return real(self, state, *parts)


def _two_jobs_that_nobody_audits(simulation: Simulation) -> None:
    """Prepare two unaudited jobs that end in one block."""
    authors = simulation.honest[:2]
    for machine, alone in zip(authors, (False, True), strict=True):
        machine.author.wishes.append(start_job("sampled", 1_000 + simulation.plan.seed, alone))
        machine.author.work = 0.0  # they have no other open transaction when they stop
    for machine in simulation.peers:
        machine.author.auditor = Withholds()

    def stop() -> None:
        for key, job in simulation.decided_state.jobs.running().items():
            author = next(machine for machine in authors if machine.key == job.author)
            author.author.wishes.appendleft(stop_job(key))
            author.submit()

    simulation.after(STOPPED_AT, stop, ())


# Snapshots -----------------------------------------------------------------------------------------------------------


class Whatever:
    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


@partial(wrapped, SnapshotAssembly, "__init__")
def _snapshot_names_unchecked(real: Any, self: SnapshotAssembly, rules: LedgerRules, models: Any, tip: Any, digests: Any) -> None:
    names = sorted(version.name for version in rules.genesis.modules)
    real(self, rules, models, tip, dict(zip(names, digests.values(), strict=True)) if len(digests) == len(names) else digests)
    self._digests = digests
    kept = {key: None for key in self.missing if key.content is not SnapshotContent.MODULE}
    self.missing = kept | {SnapshotPartKey(SnapshotContent.MODULE, name.encode()): None for name in digests}


@partial(replaced, SnapshotAssembly, "_take_module")
def _snapshot_part_unchecked(self: SnapshotAssembly, name: str, data: bytes) -> None:
    self._modules[name] = data


def _snapshot_rows_unchecked(planter: Planter) -> None:
    def put(self: TableAssembly, of: str, data: bytes) -> None:
        self._taken = codec.decode(RangeProof, data, len(data)).rows  # type: ignore[attr-defined]

    def install(self: TableAssembly) -> None:
        rows = sorted((path_of(key), key, value) for key, value in self._taken)  # type: ignore[attr-defined]
        self._table._now = (build_tree(rows), None, (), {})

    planter.replace(TableAssembly, "add_range", put)
    planter.replace(TableAssembly, "install_rows", install)


@partial(wrapped, Table, "with_rows")
def _body_leaves_rows(real: Any, self: Table[Any], changes: Any) -> Table[Any]:
    """Plant: judging a body changes the tables of the state before it."""
    after = real(self, changes)
    self._now = after._now
    return after


def _snapshot_overtaken(planter: Planter) -> None:
    """Plant: blocks that were applied one by one are applied again, starting at the snapshot."""
    planter.replace(RestoredSnapshot, "is_overtaken", lambda self, applied, repairs: False)
    planter.replace(SnapshotDownload, "progress", property(lambda self: (0, 0)))  # and no peer checks its progress meanwhile


def _decision_skipped(planter: Planter) -> None:
    """Plant: now and then a turn does not report the block that it has decided."""
    coins = random.Random(0)

    class Silent(StepEffects):
        decided_blocks = ()

    def lossy(turns: Any, deadline: float | None) -> StepEffects:
        turn = merge_effects(turns, deadline)
        return (
            Silent(turn.records, turn.sends, deadline, turn.faults, turn.remembered_round_messages)
            if coins.random() < 0.02
            else turn
        )

    planter.everywhere(merge_effects, lossy)


@partial(everywhere, expel_member)
def _expels_another(state: MembersState, culprit: bytes, height: int) -> MembersState:
    return expel_member(state, next(key for key in state.voters if key != culprit), height)


UPKEEP = (
    Mutant("sends-before-sync", "messages leave before the turn is durable", ("durable",), change=_sends_before_sync),
    Mutant(
        "block-not-durable",
        "a block is prepared before its bytes are durable",
        ("durable",),
        replaced(ReplicaState, "_store", lambda self, height, digest, block: self._hold(digest, block)),
    ),
    Mutant(
        "certificate-not-durable",
        "a block is committed before its prepare certificate is durable",
        ("durable",),
        replaced(ReplicaState, "_adopt", lambda self, book, certificate, vote: book.adopt_prepare_certificate(certificate, vote)),
    ),
    Mutant("round-votes-not-durable", "ballots are sent before they are durable", ("durable",), _round_votes_not_durable),
    Mutant(
        "accepted-not-durable",
        "ballots are sent before the proposals that they accept are durable",
        ("durable",),
        _accepted_not_durable,
    ),
    Mutant(
        "forgets-votes",
        "a restarted peer knows nothing of what it signed",
        ("one per slot", "timed out"),
        _forgets(votes=()),
        CRASHES,
    ),
    Mutant(
        "forgets-lock",
        "a restarted peer knows no prepare certificate",
        ("lock", "agreement", "certificate"),
        _forgets(prepared=None),
        CRASHES,
    ),
    Mutant(
        "silence-shortened",
        "a lower forgotten height shortens the silence",
        ("silence", "rolled back"),
        _silence_shortened,
        FAR_BACK,
    ),
    Mutant(
        "rollback-unchecked",
        "a peer with an old disk speaks at once",
        ("rolled back",),
        replaced(RollbackCheck, "may_sign", lambda *_: True),
        ROLLED_BACK,
    ),
    Mutant(
        "forgotten-ignored",
        "a peer that sees signatures it forgot goes on",
        ("rolled back",),
        replaced(RollbackCheck, "record_forgotten_statement", lambda *_: None),
        ROLLED_BACK,
    ),
    Mutant(
        "rollback-unchecked-in-rounds",
        "a peer with an old disk casts ballots at once",
        ("rolled back", "honest accused"),
        _rounds_unchecked,
        FORGOTTEN_BALLOT,
    ),
    Mutant(
        "spoken-forgotten",
        "a restarted peer knows nothing of what it said in open rounds",
        ("one per slot",),
        _spoken_forgotten,
        dataclasses.replace(CRASHES, lost=1.0, blackouts=4, calm_seconds=1.0, jobs=True),
    ),
    Mutant(
        "difference-ignored",
        "nobody compares its state with the decided one",
        ("wrong state", "progress"),
        replaced(Chain, "_compare", lambda self: None),
        WRONG,
    ),
    Mutant("signs-although-wrong", "a peer signs with a wrong state", ("wrong state",), _signs_although_wrong, WRONG),
    Mutant(
        "notices-ignored",
        "leaders in a row may pass over a transaction for as long as they lead",
        ("passed over",),
        replaced(LedgerApplication, "_censors", lambda *_: None),
        Scenario(n=22, liars=("censor",) * 7, in_a_row=True, seconds=0.1, work=11.0, blocks=70, jobs=False),
    ),
    Mutant(
        "old-voters",
        "the founders go on deciding after a change",
        ("voter sets", "certificate", "progress"),
        _old_voters,
        CHANGES,
    ),
    Mutant("acts-at-once", "a change of the voters acts one height too early", ("voter sets",), _acts_at_once, CHANGES),
    Mutant(
        "retired-by-few",
        "one voter less than a quorum retires a member",
        ("honest expelled",),
        wrapped(ledger.members, "retirement_vote_count", lambda real, state, subject: real(state, subject) + 1),
        RETIRES,
    ),
    Mutant(
        "tolerance-unsaid",
        "a quorum that did not say so lowers f",
        ("tolerance",),
        replaced(ledger.members, "lowers_tolerance", lambda state, subject: False),
        dataclasses.replace(RETIRES, retires=0.0),
    ),
    Mutant(
        "many-changes",
        "more than max(1, f) voters change at once",
        ("voter sets",),
        replaced(ledger.members, "faults_tolerated", lambda n: n),
        Scenario(n=6, leaves=3, blocks=14, jobs=False),
    ),
    Mutant(
        "evidence-of-signatures",
        "the same words signed twice are a contradiction",
        ("validity",),
        _evidence_of_signatures,
        with_liar("signs-again"),
    ),
    Mutant(
        "evidence-unverified",
        "whoever is accused is expelled",
        ("honest accused",),
        replaced(ledger.ledger_state, "verify_evidence", lambda evidence, *_: evidence.signer),
        with_liar("forged-evidence"),
    ),
    Mutant(
        "any-two-statements",
        "any two statements of a voter are a contradiction",
        ("honest accused",),
        replaced(consensus.evidence, "are_conflicting", lambda first, second: first != second),
        with_liar("forged-evidence"),
    ),
    Mutant(
        "timeout-after-commit",
        "a timeout that names the committed block is a contradiction, too",
        ("honest accused",),
        _timeout_after_commit,
        LOST,
    ),
    Mutant(
        "ballots-twice",
        "a block may count a ballot twice",
        ("validity",),
        _ballots_twice,
        with_liar("doubled-ballots", blocks=20),
    ),
    Mutant(
        "few-ballots",
        "a round may close without a quorum of ballots",
        ("rounds", "validity"),
        _few_ballots,
        with_liar("few-ballots", blocks=20),
    ),
    Mutant(
        "settled-too-soon",
        "a round closes although one ballot could change it",
        ("rounds",),
        _settled_too_soon,
        with_liar("rejects-all", blocks=16),
    ),
    Mutant(
        "nobody-vouches",
        "a proposal that nobody has re-executed is accepted",
        ("false work",),
        everywhere(vouch_set.vouches_needed, lambda terms, trainer: 0),
        with_liar("bad-payload", blocks=20),
    ),
    Mutant(
        "accepts-by-n-minus-f",
        "n − f accepts are asked for where q are enough",
        ("rounds",),
        replaced(RoundTerms, "quorum", property(lambda terms: len(terms.voters) - faults_tolerated(len(terms.voters)))),
        Scenario(n=6, liars=("rejects-in-ballots", "rejects-in-ballots"), blocks=14),
    ),
    Mutant(
        "nonce-unchecked",
        "a transaction may be decided twice",
        ("validity",),
        _nonce_unchecked,
        with_liar("repeated-transactions", blocks=20),
    ),
    Mutant(
        "transactions-unverified",
        "nobody checks who signed a transaction",
        ("validity",),
        replaced(
            ledger.ledger_state, "open_signed", lambda signed, chain_id, verifier, kinds: codec.decode_message(signed.body, kinds)
        ),
        with_liar("forged-relays"),
    ),
    Mutant("applies-differently", "one peer finds another state", ("roots",), change=_applies_differently),
    Mutant("tosses-a-coin", "what a block does depends on chance", ("roots",), _tosses_a_coin),
    Mutant(
        "order-of-dictionaries",
        "what a block does depends on the order in which something came to be in the state",
        ("roots",),
        together(
            replaced(ledger.ledger_state, "with_sorted_dictionaries", lambda new, old: new),
            _in_given_order,
            # otherwise the history would need a thousand more heights
            replaced(ledger.audits.state_machine, "POST_JOB_AUDIT_HEIGHTS", -1),
        ),
        Scenario(jobs=False, seconds=4.0, work=4.0, blocks=20),
        change=_two_jobs_that_nobody_audits,
    ),
    Mutant(
        "snapshot-root-unchecked",
        "a snapshot need not be the certified state",
        ("roots", "honest dropped"),
        replaced(ledger.snapshots.snapshot_assembly, "state_root_over", lambda digests: Whatever()),
        dataclasses.replace(LATE, liars=("bad-offers",)),
    ),
    Mutant(
        "snapshot-overtaken",
        "a snapshot takes the place of a state that is newer, and its blocks are applied twice",
        ("applied once",),
        _snapshot_overtaken,
        LATE,
    ),
    Mutant("decision-skipped", "a decided block does not reach who applies it", ("contiguous",), _decision_skipped),
    Mutant(
        "expels-another",
        "evidence expels another one than who signed it",
        ("honest expelled",),
        _expels_another,
        with_liar("two-prepares"),
    ),
    Mutant(
        "snapshot-names-unchecked",
        "an offer may give the modules any names",
        ("honest dropped",),
        _snapshot_names_unchecked,
        dataclasses.replace(LATE, liars=("renamed-modules",)),
    ),
    Mutant(
        "snapshot-rows-unchecked",
        "the rows of a snapshot need not be those under the root of their table",
        ("roots",),
        _snapshot_rows_unchecked,
        dataclasses.replace(LATE, liars=("bad-rows",)),
    ),
    Mutant(
        "body-leaves-rows", "a body that is judged and not decided leaves its rows in tables", ("roots",), _body_leaves_rows, LOST
    ),
    Mutant(
        "snapshot-part-unchecked",
        "a part of a snapshot need not be the one that was proven",
        ("roots",),
        _snapshot_part_unchecked,
        dataclasses.replace(LATE, liars=("bad-parts",)),
    ),
)
