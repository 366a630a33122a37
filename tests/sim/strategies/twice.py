"""Liars that sign two statements where an honest peer signs one. A peer that receives both has proof of the lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from consensus.effects import RestartState
from protocol import codec
from protocol.messages import (
    NO_VIEW,
    Ballot,
    Commit,
    CutOff,
    GossipEnvelope,
    Judgement,
    Prepare,
    Proposal,
    Propose,
    ProposeEnvelope,
    Timeout,
    TimeoutEnvelope,
    Vote,
    Vouch,
)
from protocol.verdicts import Verdict
from tests.sim.strategies.base import Liar, Outgoing, Strategy, header_digest

LATER_SECONDS = 0.05  # delay of the second message to the first half, which still remembers the height


class WithheldLock(Strategy):
    """Gives up views without naming the prepared block."""

    leaves_proof = True  # if it has committed in a view that it gives up

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if not isinstance(message, TimeoutEnvelope):
            return (message,)
        timeout = codec.decode_message(message.timeout.body, (Timeout,))
        return (TimeoutEnvelope(self.liar.sign(dataclasses.replace(timeout, high_view=NO_VIEW, high_block=None)), None),)


class TwoBlocks(WithheldLock):
    """Proposes a different block to each half, and votes for both in both phases."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if not isinstance(message, ProposeEnvelope):
            return super().sends(to, message)
        propose = codec.decode_message(message.propose.body, (Propose,))
        if not self.in_first_half(to):
            message, propose = self._other(message, propose)
        votes = [
            Vote(self.liar.sign(kind(propose.voters, propose.height, propose.view, propose.block))) for kind in (Prepare, Commit)
        ]
        return (message, *votes)

    def _other(self, message: ProposeEnvelope, propose: Propose) -> tuple[ProposeEnvelope, Propose]:
        header = codec.unpack(message.header, len(message.header))
        header[2] += 1  # its time
        data = codec.encode(header)
        other = dataclasses.replace(propose, block=header_digest(data))
        return dataclasses.replace(message, propose=self.liar.sign(other), header=data), other


class Fork(TwoBlocks):
    """Votes with each half of the honest peers, as all liars do: 2q − n such peers decide two blocks at once."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        liar.shared[liar.key.hex()] = liar  # each signs for all

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if not isinstance(message, ProposeEnvelope) or to not in self.liar.others:
            return (message,)
        propose = codec.decode_message(message.propose.body, (Propose,))
        if self.liar.others.index(to) % 2:
            message, propose = self._other(message, propose)
        said: list[Outgoing] = [message]
        for kind in (Prepare, Commit):
            vote = kind(propose.voters, propose.height, propose.view, propose.block)
            said += [Vote(colluder.sign(vote)) for _, colluder in sorted(self.liar.shared.items())]
        return said


class Amnesia(Strategy):
    """Forgets all its signatures at a restart."""

    def restart(self, restart: RestartState) -> RestartState:
        return dataclasses.replace(restart, votes=(), blocks=(), prepared=None)


class Equivocator(Strategy):
    """Sends its real message to one half and another one to the rest. The first half receives that one later, too."""

    leaves_proof = True

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        other = self.other(message)
        if other is None:
            return (message,)
        if not self.in_first_half(to):
            return (other,)
        self.liar.send(to, other, LATER_SECONDS)
        return (message,)

    def other(self, message: Any) -> Any:
        """Return the false message, or None if it does not lie in messages of this kind."""
        raise NotImplementedError

    def digest(self, *of: Any) -> bytes:
        """Return one made-up digest for each subject, so that the lie is consistent."""
        return header_digest(codec.encode([self.liar.key, *of]))


class TwoVotes(Equivocator):
    kind: type[Prepare] | type[Commit]

    def other(self, message: Any) -> Any:
        if not isinstance(message, Vote) or message.vote.signer != self.liar.key:
            return None
        vote = codec.decode_message(message.vote.body, (Prepare, Commit))
        if not isinstance(vote, self.kind):
            return None
        return Vote(self.liar.sign(dataclasses.replace(vote, block=self.digest(vote.height, vote.view))))


class TwoPrepares(TwoVotes):
    """Prepares two blocks, one of which does not exist."""

    kind = Prepare


class TwoCommits(TwoVotes):
    """Commits two blocks, one of which does not exist."""

    kind = Commit


class TwoTimeouts(Equivocator):
    """Gives up one view twice, with and without the block that it had prepared."""

    def other(self, message: Any) -> Any:
        if not isinstance(message, TimeoutEnvelope):
            return None
        timeout = codec.decode_message(message.timeout.body, (Timeout,))
        named = self.digest(timeout.height) if timeout.high_view == NO_VIEW else None
        return TimeoutEnvelope(self.liar.sign(dataclasses.replace(timeout, high_view=NO_VIEW, high_block=named)), None)


class TwoProposes(Equivocator):
    """Leads with two blocks of different times."""

    def other(self, message: Any) -> Any:
        if not isinstance(message, ProposeEnvelope) or message.propose.signer != self.liar.key:
            return None
        header = codec.unpack(message.header, len(message.header))
        header[2] += 1  # its time
        data = codec.encode(header)
        propose = codec.decode_message(message.propose.body, (Propose,))
        return dataclasses.replace(
            message, propose=self.liar.sign(dataclasses.replace(propose, block=header_digest(data))), header=data
        )


class TwoOfARound(Equivocator):
    kind: type[Proposal] | type[Ballot] | type[Vouch] | type[CutOff]

    def other(self, message: Any) -> Any:
        if not isinstance(message, GossipEnvelope) or message.signed.signer != self.liar.key:
            return None
        if codec.unpack(message.signed.body, len(message.signed.body))[0] != self.kind.TAG:
            return None
        lie = self.lie(codec.decode_message(message.signed.body, (self.kind,)))
        return None if lie is None else GossipEnvelope(self.liar.sign(lie))

    def lie(self, said: Any) -> Any:
        raise NotImplementedError


class TwoProposals(TwoOfARound):
    """Proposes two updates in one round."""

    kind = Proposal

    def lie(self, said: Proposal) -> Proposal:
        return dataclasses.replace(said, payload=self.digest(said.job, said.round))


class TwoBallots(TwoOfARound):
    """Casts two ballots: one accepts everything, and one accepts nothing. Each half receives one of them."""

    kind = Ballot

    def lie(self, said: Ballot) -> Ballot | None:
        flipped = tuple(
            Judgement(old.trainer, old.proposal, Verdict.NORM if old.verdict is Verdict.ACCEPT else Verdict.ACCEPT)
            for old in said.judgements
        )
        return dataclasses.replace(said, judgements=flipped) if flipped else None


class TwoVouches(TwoOfARound):
    """Vouches for a proposal to one half, and against it to the other."""

    kind = Vouch

    def lie(self, said: Vouch) -> Vouch:
        flipped = tuple(
            dataclasses.replace(old, verdict=Verdict.REPLAY if old.verdict is Verdict.ACCEPT else Verdict.ACCEPT)
            for old in said.judgements
        )
        return dataclasses.replace(said, judgements=flipped)


class TwoCutOffs(TwoOfARound):
    """Cuts off a round twice, with different ballots. It also votes to cut off rounds without need."""

    kind = CutOff

    def lie(self, said: CutOff) -> CutOff:
        return dataclasses.replace(said, ballots=(self.digest(said.job, said.round),))

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if isinstance(message, GossipEnvelope) and message.signed.signer == self.liar.key:
            tag, *fields = codec.unpack(message.signed.body, len(message.signed.body))
            if tag == Ballot.TAG:
                for ballots in ((), (self.digest("second"),)):
                    cut_off = GossipEnvelope(self.liar.sign(CutOff(fields[0], fields[1], ballots)))
                    self.liar.send(to, cut_off, 0.0 if self.in_first_half(to) == (not ballots) else LATER_SECONDS)
        return super().sends(to, message)


class VouchesForAll(Strategy):
    """Vouches for every proposal and re-executes none."""

    def finding(self, honest: Verdict) -> Verdict:
        return Verdict.ACCEPT


class RejectsInBallots(Strategy):
    """Accepts nothing in its ballots, not even updates that it vouches for."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if not isinstance(message, GossipEnvelope) or message.signed.signer != self.liar.key:
            return (message,)
        if codec.unpack(message.signed.body, len(message.signed.body))[0] != Ballot.TAG:
            return (message,)
        ballot = codec.decode_message(message.signed.body, (Ballot,))
        judgements = tuple(Judgement(old.trainer, old.proposal, Verdict.REPLAY) for old in ballot.judgements)
        return (GossipEnvelope(self.liar.sign(dataclasses.replace(ballot, judgements=judgements))),)


class RejectsAll(RejectsInBallots):
    """Rejects all updates of all trainers."""

    def finding(self, honest: Verdict) -> Verdict:
        return Verdict.REPLAY


class SignsAgain(Strategy):
    """Sends everything twice, with two different signatures under equal statements. This is no contradiction."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if isinstance(message, Vote) and message.vote.signer == self.liar.key:
            return (message, Vote(self.liar.sign_again(codec.decode_message(message.vote.body, (Prepare, Commit)))))
        if isinstance(message, GossipEnvelope) and message.signed.signer == self.liar.key:
            tag = codec.unpack(message.signed.body, len(message.signed.body))[0]
            kind = {kind.TAG: kind for kind in (Proposal, Ballot, Vouch, CutOff)}.get(tag)
            if kind is not None:
                return (message, GossipEnvelope(self.liar.sign_again(codec.decode_message(message.signed.body, (kind,)))))
        return (message,)


class BadPayload(Strategy):
    """Proposes updates that re-execution cannot reproduce."""

    def payload(self, honest: bytes) -> bytes:
        return header_digest(honest)
