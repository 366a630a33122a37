"""Vouching: some voters re-execute a proposal and sign a Vouch, and the other voters rely on it.

At most f of a round's voters lie. A false proposal needs k accepting vouches of different voters other than its trainer, and k is
so large that an honest voter is among them:

| the trainer of a false update | other liars | k     |
| votes: it is one of the f     | f − 1       | f     |
| does not vote                 | f           | f + 1 |

The keys that count are those of the round as it was opened or renewed last. Where f is 0, one other voter re-executes all the
same, if there is one with a worker. Nothing proves that a voter which vouches has re-executed anything.
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

# rounds with the same order of calls: a re-executor fetches two buffers of each trainer that is new to it
REEXECUTOR_ORDER_ROUNDS = 8


def _accepts(verdict: Verdict) -> bool:
    return verdict is Verdict.ACCEPT


def _rejects(verdict: Verdict) -> bool:
    """UNJUDGED is no rejection."""
    return verdict not in (Verdict.ACCEPT, Verdict.UNJUDGED)


def is_replay_rejection(verdict: Verdict) -> bool:
    """Whether re-execution is the reason of a rejection. It is also that of the reasons which an objective adds."""
    return verdict is Verdict.REPLAY or verdict >= OBJECTIVE_CODES_FIRST


def vouches_needed(terms: RoundTerms, trainer: bytes) -> int:
    """k: how many accepting vouches a proposal of this trainer needs."""
    if trainer not in terms.trainers_to_vouch_for:
        return 0
    key = terms.voting_key(trainer)
    if key not in terms.voters:
        return terms.faults + 1
    return max(terms.faults, 1) if terms.reexecutors - {key} else terms.faults


def reexecutor_order(terms: RoundTerms, trainer: bytes) -> tuple[bytes, ...]:
    """The voters that may vouch for a proposal of this trainer, in the order in which they are called.

    They are the voters with a worker in a ring, from the trainer on. A hash orders the ring anew every `REEXECUTOR_ORDER_ROUNDS`
    rounds. So each re-executor has as many trainers before it as the others have, and nobody can choose its trainers.
    """
    seed = b"folkmoot/ring\x00" + terms.job + (terms.round // REEXECUTOR_ORDER_ROUNDS).to_bytes(8, "big")
    key = terms.voting_key(trainer)
    place = {voter: hashlib.sha256(seed + voter).digest() for voter in terms.reexecutors | {key}}
    ring = sorted(terms.reexecutors - {key}, key=lambda voter: (place[voter] < place[key], place[voter]))
    if len(terms.reexecutors - terms.suspended) > 2 * terms.faults:
        ring = [voter for voter in ring if voter not in terms.suspended]
    return tuple(sorted(ring, key=lambda voter: (voter in terms.suspended, voter in terms.called_last)))


def check_vouch(terms: RoundTerms, voter: bytes, vouch: Vouch) -> None:
    """Raises `RemoteProtocolError` unless this vouch may be counted in this round."""
    if voter not in terms.reexecutors:
        raise RemoteProtocolError("not-a-voter", f"vouch of {short_id(voter)}, which re-executes nothing in this round")
    if (vouch.job, vouch.round) != (terms.job, terms.round):
        raise RemoteProtocolError("wrong-round", f"vouch of {short_id(voter)} for round {display_round_number(vouch.round)}")
    check_judgements(terms.trainers_to_vouch_for, vouch.judgements, f"vouch of {short_id(voter)}")


def check_judgements(trainers: Set[bytes], judgements: Sequence[Judgement], what: str) -> None:
    """Raises `RemoteProtocolError` unless they ascend by trainer and name only these trainers."""
    names = [judgement.trainer for judgement in judgements]
    if any(left >= right for left, right in pairwise(names)):
        raise RemoteProtocolError("non-canonical", "judgements must ascend by trainer, each once")
    if not trainers >= set(names):
        raise RemoteProtocolError("not-a-trainer", what)


@dataclass(slots=True)
class VouchSet:
    """The vouches of one round that are known. Those of a trainer for itself count for nothing."""

    terms: RoundTerms
    # (trainer, proposal) -> voter -> its verdict
    verdicts: dict[tuple[bytes, bytes], dict[bytes, Verdict]] = field(default_factory=dict)
    _rings: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)

    @classmethod
    def from_vouches(cls, terms: RoundTerms, said: Iterable[tuple[bytes, Vouch]]) -> VouchSet:
        made = cls(terms)
        for voter, vouch in said:
            made.add_vouch(voter, vouch)
        return made

    def add_vouch(self, voter: bytes, vouch: Vouch) -> None:
        """The vouch was checked. The first verdict of a voter on a proposal counts."""
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
        """k, and f + 1 if nothing of this trainer was accepted in the last round: it takes so many to reject a proposal."""
        needed = vouches_needed(self.terms, trainer)
        return needed if trainer in self.terms.awaited else max(needed, self.terms.faults + 1)

    def accepting_voters(self, trainer: bytes, proposal: bytes) -> list[bytes]:
        """The voters that vouch for it, in the order of calls."""
        return self._with(trainer, proposal, _accepts)

    def rejecting_voters(self, trainer: bytes, proposal: bytes) -> list[bytes]:
        """The voters that reject it: first those that found it false by re-execution, then in the order of calls."""
        verdicts = self._of(trainer, proposal)
        return sorted(self._with(trainer, proposal, _rejects), key=lambda voter: not is_replay_rejection(verdicts[voter]))

    def _with(self, trainer: bytes, proposal: bytes, fits: Callable[[Verdict], bool]) -> list[bytes]:
        place = {voter: at for at, voter in enumerate(self.reexecutors(trainer))}
        found = [voter for voter, verdict in self._of(trainer, proposal).items() if fits(verdict)]
        return sorted(found, key=lambda voter: (place.get(voter, len(place)), voter))

    def has_enough_vouches(self, trainer: bytes, proposal: bytes) -> bool:
        return sum(map(_accepts, self._of(trainer, proposal).values())) >= vouches_needed(self.terms, trainer)

    def is_settled(self, trainer: bytes, proposal: bytes) -> bool:
        """Whether a further vouch would change nothing: k accept it, or more than f reject it."""
        return self.has_enough_vouches(trainer, proposal) or self.rejection_reason(trainer, proposal) is not None

    def can_get_enough_vouches(self, trainer: bytes, proposal: bytes) -> bool:
        """False if further vouches could not be enough, or more than f voters are unsure."""
        verdicts = self._of(trainer, proposal)
        silent = len(set(self.reexecutors(trainer)) - verdicts.keys())
        accepts, unsure = sum(map(_accepts, verdicts.values())), sum(verdict is Verdict.UNJUDGED for verdict in verdicts.values())
        return unsure <= self.terms.faults and accepts + silent >= vouches_needed(self.terms, trainer)

    def rejection_reason(self, trainer: bytes, proposal: bytes) -> Verdict | None:
        """The reason that most give, if more than f voters reject it: fewer may be liars. Ties go to the lower code."""
        reasons = Counter(filter(_rejects, self._of(trainer, proposal).values()))
        if reasons.total() <= self.terms.faults:
            return None
        return max(reasons, key=lambda verdict: (reasons[verdict], -verdict))

    def assigned_reexecutors(self, trainer: bytes, proposal: bytes, is_late: bool) -> tuple[bytes, ...]:
        """The re-executors that are asked for a vouch so far: some at once, and one more for each of these that does not accept.

        If vouches are late, n − q more are asked, less the number of rejections. So many voters may be down while the others
        decide. At most f liars are silent or reject, and f is at most n − q.
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
        """The trainers with a proposal that was not accepted, and that more than f voters re-executed and found false.

        One voter is never enough, even if f is 0: its machine may be broken. A rejection by a cheap check does not count: the
        norm of honest updates is refused, too, where training diverges.
        """
        needed = max(1, self.terms.faults) + 1
        return frozenset(
            trainer
            for (trainer, proposal), verdicts in self.verdicts.items()
            if accepted.get(trainer) != proposal and sum(map(is_replay_rejection, verdicts.values())) >= needed
        )

    def wrong_vouchers(self, accepted: Mapping[bytes, bytes]) -> frozenset[bytes]:
        """The voters that rejected a proposal which was accepted, or accepted one that more than f reject."""
        against = [set(self.rejecting_voters(trainer, proposal)) for trainer, proposal in accepted.items()]
        refused = [key for key in self.verdicts if accepted.get(key[0]) != key[1] and self.rejection_reason(*key) is not None]
        return frozenset().union(*against, *(self.accepting_voters(*key) for key in refused))

    def silent_reexecutors(self, accepted: Mapping[bytes, bytes]) -> frozenset[bytes]:
        """The first k of the ring for an accepted proposal, if they gave no vouch. k may be enough before others are done."""
        missing = set[bytes]()
        for trainer, proposal in accepted.items():
            first = self.reexecutors(trainer)[: vouches_needed(self.terms, trainer)]
            missing |= set(first) - self._of(trainer, proposal).keys()
        return frozenset(missing)


@dataclass(slots=True)
class VouchState:
    """The vouches of one open round at one peer, and the peer's own re-executions. Sans-IO, as `rounds.round_state`.

    `me` is None for a peer that does not vote in the round.
    """

    terms: RoundTerms
    me: bytes | None
    vouches: VouchSet
    signed: dict[tuple[bytes, bytes], Signed] = field(default_factory=dict)  # by signer and body, in order of arrival
    double_vouchers: set[bytes] = field(default_factory=set)
    own_judgements: dict[bytes, Judgement] = field(default_factory=dict)  # trainer -> our own verdict, signed or not yet
    assigned_at: dict[bytes, float] = field(default_factory=dict)  # trainer -> moment of our call to re-execute its proposal
    started: set[bytes] = field(default_factory=set)  # trainers of these whose buffers were here, too
    vouch_seconds: list[float] = field(default_factory=list)  # from delivery to vouch, of each voter that was called at once
    _said: dict[tuple[bytes, bytes], tuple[Judgement, Signed]] = field(default_factory=dict)  # by voter and trainer

    # What comes in

    def new_judgements(self, voter: bytes, vouch: Vouch) -> list[Judgement]:
        """The judgements on trainers that this voter has not judged before; none if the vouch contradicts a former one."""
        if self._contradicted(voter, vouch) is not None:
            return []
        return [judgement for judgement in vouch.judgements if (voter, judgement.trainer) not in self._said]

    def _contradicted(self, voter: bytes, vouch: Vouch) -> Signed | None:
        """The voter's former vouch that names one of these trainers, if it is another one."""
        known = (said for judgement in vouch.judgements if (said := self._said.get((voter, judgement.trainer))))
        return next((before for _, before in known if before.body != encode(vouch)), None)

    def add_vouch(self, signed: Signed, vouch: Vouch) -> tuple[Signed, Signed] | None:
        """Keeps a new vouch. Two different vouches of one voter that name one trainer are evidence, and the first one counts."""
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
        """Keeps the time if the voter was called at once, for a trainer that votes.

        The call of other voters depends on former measurements. Any number of trainers that do not vote may be slow on purpose.
        """
        if self.terms.voting_key(trainer) in self.terms.voters and voter in self.vouches.first_assigned(trainer):
            self.vouch_seconds.append(seconds)

    def record_own_judgement(self, judgement: Judgement) -> None:
        """Our own verdict. The first one on a trainer is final: a second one would be evidence against us."""
        self.own_judgements.setdefault(judgement.trainer, judgement)

    def import_from(self, other: VouchState) -> None:
        """Takes the vouches of present re-executors from the book of this round with its former voters."""
        for signed in other.signed.values():
            if signed.signer in self.terms.reexecutors:
                self.add_vouch(signed, decode_message(signed.body, (Vouch,)))
        self.double_vouchers |= other.double_vouchers
        if self.me == other.me and self.me in self.terms.reexecutors:
            self.own_judgements = other.own_judgements | self.own_judgements

    # What goes out

    def is_assigned(self, trainer: bytes, proposal: bytes, is_late: bool) -> bool:
        """Whether we re-execute this proposal from now on."""
        if trainer in self.own_judgements or self.vouches.is_settled(trainer, proposal):
            return False
        return self.me is not None and self.me in self.vouches.assigned_reexecutors(trainer, proposal, is_late)

    def make_vouch_if_due(self) -> Vouch | None:
        """Our next vouch.

        While other re-executions go on, it waits until it has as many verdicts as the former ones: a block has room for few
        signatures.
        """
        own = {trainer for voter, trainer in self._said if voter == self.me}
        new = sorted(self.own_judgements.keys() - own)
        if not new or (self.started - self.own_judgements.keys() and len(new) < len(own)):
            return None
        return Vouch(self.terms.job, self.terms.round, tuple(self.own_judgements[trainer] for trainer in new))

    def vouches_for_certificate(self, sure: Mapping[bytes, bytes], named: Iterable[tuple[bytes, bytes]]) -> tuple[Signed, ...]:
        """Selects the signed vouches of a closing.

        | proposal                           | vouches                                                                      |
        | it has q accepts and its vouches   | k that accept, and all of voters called at once: an unsure one is not silent |
        | another one that a ballot names    | f + 1 that reject, and f + 1 that accept if more than f reject               |
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
        """The vouches of voters that did not contradict themselves."""
        made = VouchSet(self.terms)
        for key, verdicts in self.vouches.verdicts.items():
            made.verdicts[key] = {voter: said for voter, said in verdicts.items() if voter not in self.double_vouchers}
        return made
