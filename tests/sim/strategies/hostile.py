"""Liars with traffic that no honest peer sends: floods, replays, and bytes that are not messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from consensus.effects import StepEffects
from consensus.voter_set import VoterSet
from protocol import codec
from protocol.identity import sign_message
from protocol.messages import (
    Certificate,
    Commit,
    CutOff,
    GetBlock,
    GetDecisions,
    GetRememberedStatements,
    GetRound,
    GossipEnvelope,
    Prepare,
    Propose,
    ProposeEnvelope,
    Status,
    Timeout,
    TimeoutEnvelope,
    Transaction,
    Vote,
)
from tests.sim.strategies.base import Liar, Outgoing, Strategy, opened
from tests.sim.strategies.forged import AtEveryHeight

REPLAYED = 12  # old messages a height
REMEMBERED = 400


class Flood(AtEveryHeight):
    """Sends many messages for heights, views and rounds far ahead, and repeats all requests."""

    amount = 12

    def lie(self, replica: Any) -> None:
        voters, height, view = replica._book.voters.hash, replica.height, replica.view
        for i in range(1, self.amount + 1):
            later = self.liar.random.choice((1, 2, 3, 50, 10**9))
            digest = self.liar.made_up()
            messages = (
                Vote(self.liar.sign(Prepare(voters, height + later, i, digest))),
                Vote(self.liar.sign(Commit(voters, height, view + later, digest))),
                TimeoutEnvelope(self.liar.sign(Timeout(voters, height + later, i, -1, None)), None),
                GossipEnvelope(self.liar.sign(CutOff(digest, later, ()))),
                GossipEnvelope(self.liar.sign(self._transaction(later))),
                GetRound(digest, later),
                GetDecisions(1, 32),
                GetBlock(height, digest),
                GetRememberedStatements(),
                Status(height, view),
            )
            self.liar.tell(self.liar.random.choice(messages))

    def _transaction(self, later: int) -> Transaction:
        return Transaction(1_000 + later, self.liar.random.randrange(1, 2_000), "counter/add", codec.encode([1]))


class Deluge(AtEveryHeight):
    """A flood of large messages for later heights, more than a peer may keep."""

    first = 10  # height

    def lie(self, replica: Any) -> None:
        if not self.first <= replica.height < self.first + 6:
            return
        fat = Certificate(bytes(200), {i.to_bytes(32, "big"): self.liar.random.randbytes(64) for i in range(200)})
        for i in range(60):
            timeout = Timeout(self.liar.made_up(), replica.height + 100 + i, 0, 0, self.liar.made_up())
            self.liar.send(self.liar.others[0], TimeoutEnvelope(self.liar.sign(timeout), _distinct(fat, i, replica.height)), 0.0)


def _distinct(fat: Certificate, i: int, height: int) -> Certificate:
    return Certificate(
        bytes(192) + i.to_bytes(4, "big") + height.to_bytes(4, "big"),
        {k: v[:60] + i.to_bytes(4, "big") for k, v in fat.signatures.items()},
    )


class OldEpoch(Strategy):
    """Repeats its own and others' messages of earlier heights, and votes with the voter set of that time."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        self._heard: deque[bytes] = deque(maxlen=REMEMBERED)
        self._height = 0

    def hears(self, peer: bytes, data: bytes) -> bool:
        if self.liar.random.random() < 0.2:
            self._heard.append(data)
        return True

    def turned(self, turn: StepEffects) -> None:
        replica = self.liar.replica
        if replica is None or replica.height == self._height:
            return
        self._height = replica.height
        for data in self.liar.random.sample(list(self._heard), min(REPLAYED, len(self._heard))):
            self.liar.tell(data, self.liar.random.uniform(0, 0.5))


class CrossChain(Strategy):
    """Signs statements for another network, and sends them to half of the peers here."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if self.in_first_half(to) or self.liar.random.random() < 0.5:
            return (message,)
        match message:
            case Vote():
                return (Vote(self._elsewhere(codec.decode_message(message.vote.body, (Prepare, Commit)))),)
            case TimeoutEnvelope():
                return (TimeoutEnvelope(self._elsewhere(codec.decode_message(message.timeout.body, (Timeout,))), message.high),)
            case ProposeEnvelope():
                propose = codec.decode_message(message.propose.body, (Propose,))
                return (ProposeEnvelope(self._elsewhere(propose), message.header, message.compact_body, message.justification),)
        return (message,)

    def _elsewhere(self, statement: Any) -> Any:
        return sign_message(self.liar.signer, bytes(31) + b"\x01", statement)


class Garbage(Strategy):
    """Sends bytes that are not a message, or a non-canonical encoding of one."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if self.liar.random.random() > 0.05:
            return (message,)
        data = codec.encode(message)
        at = self.liar.random.randrange(len(data))
        return (
            self.liar.random.choice(
                (
                    data + b"\x00",
                    data[:at],
                    data[:at] + bytes([data[at] ^ (1 << self.liar.random.randrange(8))]) + data[at + 1 :],
                    self.liar.random.randbytes(at),
                    b"",
                    b"\xdc\x00" + data[:1] + data[1:],
                )
            ),
        )


class EpochEdge(Strategy):
    """Votes with the previous, current and next voter set, and continues after it has lost its vote."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        node = self.liar.node()
        if not isinstance(message, Vote) or message.vote.signer != self.liar.key or node is None:
            return (message,)
        vote = codec.decode_message(message.vote.body, (Prepare, Commit))
        members = node.state.members
        hashes = [VoterSet(keys).hash for keys in (members.previous, members.voters, members.upcoming)]
        other = [h for h in dict.fromkeys(hashes) if h != vote.voters]
        votes = [
            type(vote)(h, vote.height + late, vote.view, vote.block)
            for h in other
            for late in (-1, 0, 1)
            if vote.height + late > 0
        ]
        return (message, *(Vote(self.liar.sign(lie)) for lie in votes))

    def hears(self, peer: bytes, data: bytes) -> bool:
        replica, message = self.liar.replica, opened(data)
        if isinstance(message, ProposeEnvelope) and replica is not None and not replica.is_voter:
            propose = codec.decode_message(message.propose.body, (Propose,))
            for kind in (Prepare, Commit):
                self.liar.tell(Vote(self.liar.sign(kind(propose.voters, propose.height, propose.view, propose.block))), 0.0)
        return True
