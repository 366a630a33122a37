"""Vouching: some voters re-execute a proposal and sign a Vouch, and other voters rely on the vouches.

At most f of a round's voters are faulty. A proposal needs accepting vouches of k voters other than its trainer. k is so large
that at least one of these voters is honest:

| the trainer of a false update | other faulty voters | k     |
| votes: it is one of the f     | f − 1               | f     |
| does not vote                 | f                   | f + 1 |

The round's terms, as opened or last renewed, define which keys vote. If f is 0, one other voter with a worker must vouch
nevertheless, if there is one. A vouch does not prove that its voter has re-executed the proposal.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

from protocol.codec import decode_message, encode
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, short_id
from protocol.messages import Judgement, Vouch
from protocol.units import display_round_number
from protocol.verdicts import OBJECTIVE_CODES_FIRST, Verdict
from rounds.round_terms import RoundTerms

# Number of consecutive rounds with the same order of calls. After a change, re-executors have to fetch two buffers of each new
# trainer.
REEXECUTOR_ORDER_ROUNDS = 8


def _accepts(verdict: Verdict) -> bool:
    return verdict is Verdict.ACCEPT


def _rejects(verdict: Verdict) -> bool:
    """Return whether a verdict is a rejection. UNJUDGED is no rejection."""
    return verdict not in (Verdict.ACCEPT, Verdict.UNJUDGED)


def is_replay_rejection(verdict: Verdict) -> bool:
    """Return whether a verdict is a rejection after re-execution: REPLAY, or a reason of the objective."""
    return verdict is Verdict.REPLAY or verdict >= OBJECTIVE_CODES_FIRST


def vouches_needed(terms: RoundTerms, trainer: bytes) -> int:
    """Return k, the number of accepting vouches that a proposal of this trainer needs."""
    if trainer not in terms.trainers_to_vouch_for:
        return 0
    key = terms.voting_key(trainer)
    if key not in terms.voters:
        return terms.faults + 1
    return max(terms.faults, 1) if terms.reexecutors - {key} else terms.faults


def reexecutor_order(terms: RoundTerms, trainer: bytes) -> tuple[bytes, ...]:
    """Return the voters that may vouch for a proposal of this trainer, in the order in which they are called to re-execute it.

    All voters with a worker form a ring, and the calls begin behind the trainer's place. A hash orders the ring anew every
    `REEXECUTOR_ORDER_ROUNDS` rounds. So the work is distributed evenly, and no voter can choose the trainers whose proposals it
    re-executes.
    """
    seed = b"folkmoot/ring\x00" + terms.job + (terms.round // REEXECUTOR_ORDER_ROUNDS).to_bytes(8, "big")
    key = terms.voting_key(trainer)
    place = {voter: hashlib.sha256(seed + voter).digest() for voter in terms.reexecutors | {key}}
    ring = sorted(terms.reexecutors - {key}, key=lambda voter: (place[voter] < place[key], place[voter]))
    if len(terms.reexecutors - terms.suspended) > 2 * terms.faults:
        ring = [voter for voter in ring if voter not in terms.suspended]
    return tuple(sorted(ring, key=lambda voter: (voter in terms.suspended, voter in terms.called_last)))


def check_vouch(terms: RoundTerms, voter: bytes, vouch: Vouch) -> None:
    """Raise `RemoteProtocolError` if a vouch does not count in a round with these terms."""
    if voter not in terms.reexecutors:
        raise RemoteProtocolError("not-a-voter", f"vouch of {short_id(voter)}, which is not a re-executor in this round")
    if (vouch.job, vouch.round) != (terms.job, terms.round):
        raise RemoteProtocolError("wrong-round", f"vouch of {short_id(voter)} for round {display_round_number(vouch.round)}")
    check_judgements(terms.trainers_to_vouch_for, vouch.judgements, f"vouch of {short_id(voter)}")


def check_judgements(trainers: Set[bytes], judgements: Sequence[Judgement], what: str) -> None:
    """Raise `RemoteProtocolError` unless the judgements ascend by trainer and name only these trainers."""
    names = [judgement.trainer for judgement in judgements]
    if any(left >= right for left, right in pairwise(names)):
        raise RemoteProtocolError("non-canonical", "judgements must ascend by trainer, without duplicates")
    if not trainers >= set(names):
        raise RemoteProtocolError("not-a-trainer", what)


@dataclass(slots=True)
class VouchSet:
    """The known vouches of one round. A trainer's vouch for its own proposal does not count."""

    terms: RoundTerms
    # By (trainer, proposal digest): the verdict of each voter.
    verdicts: dict[tuple[bytes, bytes], dict[bytes, Verdict]] = field(default_factory=dict)
    _rings: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)

    @classmethod
    def from_vouches(cls, terms: RoundTerms, said: Iterable[tuple[bytes, Vouch]]) -> VouchSet:
        made = cls(terms)
        for voter, vouch in said:
            made.add_vouch(voter, vouch)
        return made

    def add_vouch(self, voter: bytes, vouch: Vouch) -> None:
        """Add a vouch that passed `check_vouch`. Only a voter's first verdict on a proposal counts."""
        for judgement in vouch.judgements:
            if voter != self.terms.voting_key(judgement.trainer):
                self.verdicts.setdefault((judgement.trainer, judgement.proposal), {}).setdefault(voter, judgement.verdict)

    def _of(self, trainer: bytes, proposal: bytes) -> Mapping[bytes, Verdict]:
        return self.verdicts.get((trainer, proposal), {})

    def reexecutors(self, trainer: bytes) -> tuple[bytes, ...]:
        if trainer not in self._rings:
            self._rings[trainer] = reexecutor_order(self.terms, trainer)
        return self._rings[trainer]

    def first_assigned(self, trainer: bytes) -> tuple[bytes, ...]:
        return self.reexecutors(trainer)[: self._at_once(trainer)]

    def _at_once(self, trainer: bytes) -> int:
        """Return how many re-executors are called at once: k, or at least f + 1 for a trainer that is not awaited."""
        needed = vouches_needed(self.terms, trainer)
        return needed if trainer in self.terms.awaited else max(needed, self.terms.faults + 1)

    def accepting_voters(self, trainer: bytes, proposal: bytes) -> list[bytes]:
        """Return the voters whose vouches accept a proposal, in the order of calls."""
        return self._with(trainer, proposal, _accepts)

    def rejecting_voters(self, trainer: bytes, proposal: bytes) -> list[bytes]:
        """Return the voters whose vouches reject a proposal, in the order of calls.

        Voters that re-executed it precede all others.
        """
        verdicts = self._of(trainer, proposal)
        return sorted(self._with(trainer, proposal, _rejects), key=lambda voter: not is_replay_rejection(verdicts[voter]))

    def _with(self, trainer: bytes, proposal: bytes, fits: Callable[[Verdict], bool]) -> list[bytes]:
        place = {voter: at for at, voter in enumerate(self.reexecutors(trainer))}
        found = [voter for voter, verdict in self._of(trainer, proposal).items() if fits(verdict)]
        return sorted(found, key=lambda voter: (place.get(voter, len(place)), voter))

    def has_enough_vouches(self, trainer: bytes, proposal: bytes) -> bool:
        return sum(map(_accepts, self._of(trainer, proposal).values())) >= vouches_needed(self.terms, trainer)

    def is_settled(self, trainer: bytes, proposal: bytes) -> bool:
        """Return whether k voters accept the proposal or f + 1 reject it, so that a further vouch changes nothing."""
        return self.has_enough_vouches(trainer, proposal) or self.rejection_reason(trainer, proposal) is not None

    def can_get_enough_vouches(self, trainer: bytes, proposal: bytes) -> bool:
        """Return whether further vouches may bring the accepting vouches to k.

        The result is false if more than f voters are unsure.
        """
        verdicts = self._of(trainer, proposal)
        silent = len(set(self.reexecutors(trainer)) - verdicts.keys())
        accepts, unsure = sum(map(_accepts, verdicts.values())), sum(verdict is Verdict.UNJUDGED for verdict in verdicts.values())
        return unsure <= self.terms.faults and accepts + silent >= vouches_needed(self.terms, trainer)

    def rejection_reason(self, trainer: bytes, proposal: bytes) -> Verdict | None:
        """Return the most frequent reason if f + 1 voters reject the proposal, else None. In a tie the lower code wins."""
        reasons = Counter(filter(_rejects, self._of(trainer, proposal).values()))
        if reasons.total() <= self.terms.faults:
            return None
        return max(reasons, key=lambda verdict: (reasons[verdict], -verdict))

    def assigned_reexecutors(self, trainer: bytes, proposal: bytes, is_late: bool) -> tuple[bytes, ...]:
        """Return the re-executors that are called so far: some at once, and one more for each called voter that does not accept.

        If vouches are late, as many more are called as voters may be down (`spare_voters`), or one for each rejection if that is
        more. This covers all faulty voters, which reject or are silent: f is at most `spare_voters`.
        """
        ring, verdicts = self.reexecutors(trainer), self._of(trainer, proposal)
        count, before, needed = self._at_once(trainer), -1, vouches_needed(self.terms, trainer)
        while count != before:
            given = [verdicts[voter] for voter in ring[:count] if voter in verdicts]
            unsure, rejections = given.count(Verdict.UNJUDGED), sum(map(_rejects, given))
            before = count
            wanted = needed + unsure + (max(rejections, self.terms.spare_voters) if is_late else rejections)
            count = max(count, wanted)
        return ring[:count]

    def trainers_with_invalid_updates(self, accepted: Mapping[bytes, bytes]) -> frozenset[bytes]:
        """Return the trainers of proposals that were not accepted and that f + 1 voters found false by re-execution.

        At least two voters are needed, even if f is 0, since one machine may be broken. Rejections by cheap checks do not count:
        if training diverges, honest updates are rejected for their norm, too.
        """
        needed = max(1, self.terms.faults) + 1
        return frozenset(
            trainer
            for (trainer, proposal), verdicts in self.verdicts.items()
            if accepted.get(trainer) != proposal and sum(map(is_replay_rejection, verdicts.values())) >= needed
        )

    def wrong_vouchers(self, accepted: Mapping[bytes, bytes]) -> frozenset[bytes]:
        """Return the voters whose vouch rejects an accepted proposal, or accepts a proposal that f + 1 voters rejected."""
        against = [set(self.rejecting_voters(trainer, proposal)) for trainer, proposal in accepted.items()]
        refused = [key for key in self.verdicts if accepted.get(key[0]) != key[1] and self.rejection_reason(*key) is not None]
        return frozenset().union(*against, *(self.accepting_voters(*key) for key in refused))

    def silent_reexecutors(self, accepted: Mapping[bytes, bytes]) -> frozenset[bytes]:
        """Return the voters that were among the first k called for an accepted proposal and sent no vouch for it.

        Voters after the first k do not count, since k vouches may suffice before these voters finish.
        """
        missing = set[bytes]()
        for trainer, proposal in accepted.items():
            first = self.reexecutors(trainer)[: vouches_needed(self.terms, trainer)]
            missing |= set(first) - self._of(trainer, proposal).keys()
        return frozenset(missing)


@dataclass(slots=True)
class VouchState:
    """The vouches of one open round at one peer, and the peer's own re-executions. This class does no I/O.

    `me` is the peer's key; None for a peer that does not vote in the round.
    """

    terms: RoundTerms
    me: bytes | None
    vouches: VouchSet
    signed: dict[tuple[bytes, bytes], Signed] = field(default_factory=dict)  # vouches by (signer, body), in order of arrival
    double_vouchers: set[bytes] = field(default_factory=set)
    # Our own verdict by trainer, even before we have signed it in a vouch.
    own_judgements: dict[bytes, Judgement] = field(default_factory=dict)
    # Time at which we were called to re-execute a proposal, by trainer.
    assigned_at: dict[bytes, float] = field(default_factory=dict)
    started: set[bytes] = field(default_factory=set)  # trainers whose buffers have arrived, so that our re-execution has begun
    # Seconds from delivery of a payload to a vouch, of voters that were called at once.
    vouch_seconds: list[float] = field(default_factory=list)
    # By (voter, trainer): judgement, signed vouch.
    _said: dict[tuple[bytes, bytes], tuple[Judgement, Signed]] = field(default_factory=dict)

    # Input

    def new_judgements(self, voter: bytes, vouch: Vouch) -> list[Judgement]:
        """Return the judgements in a vouch on trainers that this voter has not judged before.

        Empty if the vouch contradicts a former one.
        """
        if self._contradicted(voter, vouch) is not None:
            return []
        return [judgement for judgement in vouch.judgements if (voter, judgement.trainer) not in self._said]

    def _contradicted(self, voter: bytes, vouch: Vouch) -> Signed | None:
        """Return a former, different vouch of this voter that names a trainer of `vouch`, or None."""
        known = (said for judgement in vouch.judgements if (said := self._said.get((voter, judgement.trainer))))
        return next((before for _, before in known if before.body != encode(vouch)), None)

    def add_vouch(self, signed: Signed, vouch: Vouch) -> tuple[Signed, Signed] | None:
        """Add a vouch. Raises `RemoteProtocolError` if it does not count in this round.

        Two different vouches of one voter that name the same trainer are evidence, which is returned once. The first vouch
        counts.
        """
        check_vouch(self.terms, signed.signer, vouch)
        voter = signed.signer
        other = self._contradicted(voter, vouch)
        if other is not None:
            is_known = voter in self.double_vouchers
            self.double_vouchers.add(voter)
            return None if is_known else (other, signed)
        if self.new_judgements(voter, vouch):
            self.signed[voter, signed.body] = signed
            self.vouches.add_vouch(voter, vouch)
            for judgement in vouch.judgements:
                self._said.setdefault((voter, judgement.trainer), (judgement, signed))
            if voter == self.me:
                self.own_judgements |= {judgement.trainer: judgement for judgement in vouch.judgements}
        return None

    def record_vouch_seconds(self, voter: bytes, trainer: bytes, seconds: float) -> None:
        """Record the seconds from delivery to vouch, if the voter was called at once and the trainer votes.

        The times of voters that were called later depend on earlier measurements. Trainers that do not vote may all be liars, and
        slow on purpose.
        """
        if self.terms.voting_key(trainer) in self.terms.voters and voter in self.vouches.first_assigned(trainer):
            self.vouch_seconds.append(seconds)

    def record_own_judgement(self, judgement: Judgement) -> None:
        """Record our own verdict on a trainer. The first verdict is final, since a second one would be evidence against us."""
        self.own_judgements.setdefault(judgement.trainer, judgement)

    def import_from(self, other: VouchState) -> None:
        """Import the vouches of current re-executors from `other`, the state of this round before its terms were renewed."""
        for signed in other.signed.values():
            if signed.signer in self.terms.reexecutors:
                self.add_vouch(signed, decode_message(signed.body, (Vouch,)))
        self.double_vouchers |= other.double_vouchers
        if self.me == other.me and self.me in self.terms.reexecutors:
            self.own_judgements = other.own_judgements | self.own_judgements

    # Output

    def is_assigned(self, trainer: bytes, proposal: bytes, is_late: bool) -> bool:
        """Return whether this peer must re-execute the proposal now."""
        if trainer in self.own_judgements or self.vouches.is_settled(trainer, proposal):
            return False
        return self.me is not None and self.me in self.vouches.assigned_reexecutors(trainer, proposal, is_late)

    def make_vouch_if_due(self) -> Vouch | None:
        """Return our next vouch, with all our verdicts that we have not signed yet, or None.

        While further re-executions of ours run, the vouch waits until it has as many verdicts as all our former vouches together.
        Each vouch adds a signature to the block, whose size is bounded.
        """
        own = {trainer for voter, trainer in self._said if voter == self.me}
        new = sorted(self.own_judgements.keys() - own)
        if not new or (self.started - self.own_judgements.keys() and len(new) < len(own)):
            return None
        return Vouch(self.terms.job, self.terms.round, tuple(self.own_judgements[trainer] for trainer in new))

    def vouches_for_certificate(self, sure: Mapping[bytes, bytes], named: Iterable[tuple[bytes, bytes]]) -> tuple[Signed, ...]:
        """Select the signed vouches of a round certificate.

        | proposal                         | vouches                                                                           |
        | it has q accepts and its vouches | k that accept, and all of voters called at once: an unsure one is then not silent |
        | another one that a ballot names  | f + 1 that reject; and f + 1 that accept, if f + 1 reject                         |
        """
        most = self.terms.faults + 1
        voters = [
            (voter, trainer)
            for trainer, proposal in sure.items()
            for voter in (
                *self.vouches.first_assigned(trainer),
                *self.vouches.accepting_voters(trainer, proposal)[: vouches_needed(self.terms, trainer)],
            )
            if (voter, trainer) in self._said
        ]
        for trainer, proposal in set(named) - sure.items():
            against = self.vouches.rejecting_voters(trainer, proposal)[:most]
            false = self.vouches.accepting_voters(trainer, proposal)[:most] if len(against) == most else []
            voters += [(voter, trainer) for voter in (*against, *false)]
        chosen = {(signed.signer, signed.body): signed for _, signed in (self._said[place] for place in voters)}
        return tuple(signed for _, signed in sorted(chosen.items()))

    def without_double_vouchers(self) -> VouchSet:
        """Return the set of vouches without those of voters that signed contradictory vouches."""
        made = VouchSet(self.terms)
        for key, verdicts in self.vouches.verdicts.items():
            made.verdicts[key] = {voter: said for voter, said in verdicts.items() if voter not in self.double_vouchers}
        return made
