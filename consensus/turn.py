"""One step's effects, and the one way they are carried out: first everything is durable, then it is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from consensus.block import Block, decode_block
from consensus.events import Message
from consensus.evidence import Evidence
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed
from protocol.limits import MESSAGE_BYTES_MAX
from protocol.messages import BlockBytes, Certificate, Decision, EvidenceMessage, GetRound, GossipEnvelope

REPLY_BYTES_MAX = MESSAGE_BYTES_MAX  # decisions sent at one request; whoever lags asks again

Slot = tuple[str, int, int]  # message tag, height, view: what may be signed once


@dataclass(frozen=True, slots=True)
class Voted:
    slot: Slot
    signed: Signed


@dataclass(frozen=True, slots=True)
class RoundVoted:
    """This peer's one Proposal, Ballot or CutOff of a round, or one of its Vouches, whose `tag` names a trainer, too."""

    tag: str
    job: bytes
    round: int
    signed: Signed
    accepted: tuple[Signed, ...] = ()  # with a Ballot: the proposals of others that it accepts, which stay as long


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The bytes of an undecided block, kept because this voter prepared it or a certificate names it."""

    height: int
    digest: bytes
    block: bytes


@dataclass(frozen=True, slots=True)
class StoredCertificate:
    """The highest prepare certificate of the undecided height; it replaces the one before."""

    height: int
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class Decided:
    """`height` is decided. The executor applies it after the turn is durable and answers with `Applied`."""

    height: int
    digest: bytes
    block: bytes
    certificate: Certificate

    def decode(self) -> Block:
        return decode_block(self.block)


@dataclass(frozen=True, slots=True)
class Silence:
    """Statements of ours turned up that the journal lacks: nothing is signed at heights below `below`."""

    below: int


Record = Voted | RoundVoted | StoredBlock | StoredCertificate | Decided | Evidence | Silence


Outgoing = Message | GossipEnvelope | GetRound | EvidenceMessage


@dataclass(frozen=True, slots=True)
class Send:
    to: tuple[bytes, ...] | None  # None: every link; those without a link miss it
    message: Outgoing


@dataclass(frozen=True, slots=True)
class SendDecisions:
    """Send the decisions of `first`, `first + 1`, … as far as they exist, `count` at most."""

    to: bytes
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class SendBlock:
    """Send the stored bytes of an undecided block, if they are stored."""

    to: bytes
    height: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """This peer sent what no correct peer sends: drop it and count the reason."""

    peer: bytes
    error: RemoteProtocolError


@dataclass(frozen=True, slots=True)
class Turn:
    records: tuple[Record, ...] = ()  # durable before anything is sent
    sends: tuple[Send | SendDecisions | SendBlock, ...] = ()
    deadline: float | None = None  # call again with `Tick` at this time; replaces the one of the turn before
    faults: tuple[Fault, ...] = ()
    heard: tuple[Signed, ...] = ()  # own round messages as others remember them; one that the journal lacks mutes its round

    @property
    def decided(self) -> tuple[Decided, ...]:
        return tuple([record for record in self.records if isinstance(record, Decided)]) if self.records else ()

    @property
    def touches_disk(self) -> bool:
        return bool(self.records) or not all(isinstance(send, Send) for send in self.sends)

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        return tuple([record for record in self.records if isinstance(record, Evidence)]) if self.records else ()


def merge(turns: Sequence[Turn], deadline: float | None) -> Turn:
    """Several consecutive turns as one, so that they cost one fsync."""
    records: list[Record] = []
    sends: list[Send | SendDecisions | SendBlock] = []
    faults: list[Fault] = []
    heard: list[Signed] = []
    for turn in turns:
        records += turn.records
        sends += turn.sends
        faults += turn.faults
        heard += turn.heard
    return Turn(tuple(records), tuple(sends), deadline, tuple(faults), tuple(heard))


@dataclass(frozen=True, slots=True)
class Restart:
    """What a replica must know to go on where it stopped."""

    decided: tuple[Decided, ...] = ()  # the last two decided heights, and those that are not applied yet, ascending
    votes: tuple[Voted, ...] = ()  # every vote above the last decided height
    blocks: tuple[StoredBlock, ...] = ()  # every stored block above the last decided height
    prepared: Certificate | None = None  # the highest prepare certificate above the last decided height
    evidence: tuple[Evidence, ...] = ()  # all of it
    silent_below: int = 0  # the highest `Silence`


NEVER_VOTED = Restart()


class Journal(Protocol):
    """Durable memory of one replica. What belongs to a decided height, other than the decision and evidence, may be dropped."""

    def append(self, records: Sequence[Record]) -> None:
        """Durable, all or none, when it returns. Raises `StorageError`: then nothing may be sent and the peer stops."""

    def load(self) -> Restart: ...

    def decision(self, height: int) -> Decided | None: ...

    def block(self, digest: bytes) -> bytes | None:
        """The bytes of a stored undecided block."""


def restart_of(journal: Journal, applied: int) -> Restart:
    """With every decided block that is not applied yet: whichever of them names another state than we find must be noticed."""
    restart = journal.load()
    first_held = restart.decided[0].height if restart.decided else 0
    waiting = [journal.decision(height) for height in range(applied + 1, first_held)]
    return replace(restart, decided=(*(decided for decided in waiting if decided), *restart.decided))


class Outlet(Protocol):
    def send(self, to: tuple[bytes, ...] | None, message: Outgoing) -> None:
        """Queue for each of `to` that has a link, None for every link; never blocks."""


def persist(turn: Turn, journal: Journal) -> tuple[Send, ...]:
    """All input and output of a turn that touches the disk; what it returns may be sent from then on."""
    if turn.records:
        journal.append(turn.records)
    sends: list[Send] = []
    for wanted in turn.sends:
        if isinstance(wanted, Send):
            sends.append(wanted)
        else:
            sends += resolve(wanted, journal)
    return tuple(sends)


def deliver(sends: Iterable[Send], outlet: Outlet) -> None:
    for send in sends:
        outlet.send(send.to, send.message)


def execute(turn: Turn, journal: Journal, outlet: Outlet) -> None:
    deliver(persist(turn, journal), outlet)


async def execute_in_thread(turn: Turn, journal: Journal, outlet: Outlet, run_in_thread: Callable[..., Awaitable[Any]]) -> None:
    """`execute` for a caller that must not block: `run_in_thread(function, *arguments)` does the part with the disk, if any."""
    sends = await run_in_thread(persist, turn, journal) if turn.touches_disk else persist(turn, journal)
    deliver(sends, outlet)


def resolve(wanted: SendDecisions | SendBlock, journal: Journal) -> Iterable[Send]:
    """What is sent of what was asked for, as far as it is there. Reads the disk."""
    if isinstance(wanted, SendBlock):
        block = journal.block(wanted.digest)
        if block is not None:
            yield Send((wanted.to,), BlockBytes(wanted.height, block))
    else:
        size = 0
        for height in range(wanted.first, wanted.first + wanted.count):
            decided = journal.decision(height)
            if decided is None or size > REPLY_BYTES_MAX:
                return
            size += len(decided.block)
            yield Send((wanted.to,), Decision(decided.block, decided.certificate))
