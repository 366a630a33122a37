"""Liars that send nothing, too little, too late, or not to all peers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from consensus.effects import StepEffects
from consensus.voter_set import quorum
from ledger.blocks.application import CompactBody
from protocol import codec
from protocol.messages import (
    Ballot,
    BlockBytes,
    CutOff,
    GossipEnvelope,
    ProposeEnvelope,
    RememberedStatements,
    TimeoutEnvelope,
    Vote,
    Vouch,
)
from protocol.verdicts import Verdict
from tests.sim.strategies.base import Liar, Outgoing, Strategy, opened


class Silent(Strategy):
    """Sends nothing."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        return ()


class SilentLeader(Strategy):
    """Votes, but proposes nothing."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        return () if isinstance(message, ProposeEnvelope) else (message,)


class CrashAtStep(Strategy):
    """Stops for good in the middle of a broadcast: some peers have received its message, and others have not."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        self._kind = liar.random.choice((ProposeEnvelope, Vote, TimeoutEnvelope, GossipEnvelope))
        self._left = liar.random.randint(1, 60)

    def hears(self, peer: bytes, data: bytes) -> bool:
        return self._left > 0

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if self._left <= 0:
            return ()
        self._left -= isinstance(message, self._kind)
        return (message,)


class Selective(Strategy):
    """Sends only to q − 1 others. With it they are a quorum, and the rest must learn everything from them."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        others = [key for key in liar.founders if key != liar.key]
        self._friends = set(liar.random.sample(others, min(len(others), quorum(len(liar.founders)) - 1)))

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        return (message,) if to in self._friends else ()


class JustInTime(Strategy):
    """Sends everything shortly before the timeouts of the others."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        replica = self.liar.replica
        seconds = replica._pacemaker.view_seconds() if replica is not None else 1.0
        self.liar.send(to, message, 0.9 * seconds)
        return ()


class WithheldParts(Strategy):
    """Proposes blocks whose parts no peer has, and ignores requests for them."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if isinstance(message, BlockBytes):
            return ()
        if isinstance(message, ProposeEnvelope):
            short = codec.encode(CompactBody((), (), (self.liar.made_up(),)))
            return (type(message)(message.propose, message.header, short, message.justification),)
        return (message,)


class WithheldPayload(Strategy):
    """Proposes updates whose payload only half of the others can fetch."""

    def payload_seconds(self, to: bytes) -> float | None:
        return 0.0 if to[-1] % 2 else None


class LatePayload(Strategy):
    """Proposes updates whose payload arrives late, after a different delay at each peer."""

    def payload_seconds(self, to: bytes) -> float | None:
        return self.liar.random.uniform(0.0, 6.0)


class WithheldBuffer(Strategy):
    """Proposes updates that all peers can fetch, and none can re-execute."""

    def reveal_seconds(self, to: bytes) -> float | None:
        return None


class SilentVoucher(Strategy):
    """Ignores all calls to re-execute."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        return () if _own_tag(self.liar.key, message) == Vouch.TAG else (message,)


class BallotlessVoucher(Strategy):
    """Vouches for everything and casts no ballot: without its vouches honest updates would be lost."""

    def finding(self, honest: Verdict) -> Verdict:
        return Verdict.ACCEPT

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        return () if _own_tag(self.liar.key, message) == Ballot.TAG else (message,)


def _own_tag(key: bytes, message: Any) -> str:
    if not isinstance(message, GossipEnvelope) or message.signed.signer != key:
        return ""
    return str(codec.unpack(message.signed.body, len(message.signed.body))[0])


class Censor(Strategy):
    """Ignores one victim's messages, also relayed ones: its blocks have no transaction, ballot or commit of the victim."""

    def hears(self, peer: bytes, data: bytes) -> bool:
        message, victim = opened(data), self.liar.others[-1]
        signed = message.signed if isinstance(message, GossipEnvelope) else message.vote if isinstance(message, Vote) else None
        return signed is None or signed.signer != victim


class CensoredHeight(Strategy):
    """Returns an empty list when it is asked for remembered statements."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        return (RememberedStatements(message.height, ()),) if isinstance(message, RememberedStatements) else (message,)


class Veto(Strategy):
    """Casts no ballot, and votes to cut off every round as soon as it opens."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        self._cut: set[tuple[bytes, int]] = set()

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        return () if _own_tag(self.liar.key, message) in (Ballot.TAG, CutOff.TAG) else (message,)

    def turned(self, turn: StepEffects) -> None:
        node = self.liar.node()
        for job, book in node.ledger.rounds.items() if node is not None else ():
            if (job, book.terms.round) not in self._cut:
                self._cut.add((job, book.terms.round))
                self.liar.tell(GossipEnvelope(self.liar.sign(CutOff(job, book.terms.round, ()))))
