"""The vouches of one open round at one peer, and the peer's own re-executions. Sans-IO, as `rounds.round_state`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from protocol.codec import decode_message, encode
from protocol.identity import Signed
from protocol.messages import Judgement, Vouch
from rounds.round_terms import RoundTerms
from rounds.vouch_set import VouchSet, check_vouch, vouches_needed


@dataclass(slots=True)
class VouchState:
    """`me` is None for a peer that does not vote in the round."""

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
