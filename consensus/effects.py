"""One step's effects, and the one way they are carried out: first everything is durable, then it is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from consensus.block import Block, decode_block
from consensus.evidence import Evidence
from consensus.inputs import AgreementMessage
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed
from protocol.limits import MESSAGE_BYTES_MAX
from protocol.messages import BlockBytes, Certificate, Decision, EvidenceMessage, GetRound, GossipEnvelope

DECISIONS_REPLY_BYTES_MAX = MESSAGE_BYTES_MAX  # decisions sent at one request; whoever lags asks again

VoteSlot = tuple[str, int, int]  # message tag, height, view: what may be signed once


@dataclass(frozen=True, slots=True)
class OwnStatement:
    slot: VoteSlot
    signed: Signed


@dataclass(frozen=True, slots=True)
class OwnRoundStatement:
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
class DecidedBlock:
    """`height` is decided. The executor applies it after the turn is durable and answers with `CurrentState`."""

    height: int
    digest: bytes
    block: bytes
    certificate: Certificate

    def decode(self) -> Block:
        return decode_block(self.block)


@dataclass(frozen=True, slots=True)
class VotePause:
    """Statements of ours turned up that the journal lacks: nothing is signed at heights below `below`."""

    below: int


JournalRecord = OwnStatement | OwnRoundStatement | StoredBlock | StoredCertificate | DecidedBlock | Evidence | VotePause


OutgoingMessage = AgreementMessage | GossipEnvelope | GetRound | EvidenceMessage


@dataclass(frozen=True, slots=True)
class SendMessage:
    to: tuple[bytes, ...] | None  # None: every link; those without a link miss it
    message: OutgoingMessage


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
class PeerFault:
    """This peer sent what no correct peer sends: drop it and count the reason."""

    peer: bytes
    error: RemoteProtocolError


@dataclass(frozen=True, slots=True)
class StepEffects:
    records: tuple[JournalRecord, ...] = ()  # durable before anything is sent
    sends: tuple[SendMessage | SendDecisions | SendBlock, ...] = ()
    deadline: float | None = None  # call again with `TickInput` at this time; replaces the one of the turn before
    faults: tuple[PeerFault, ...] = ()
    # own round messages as others remember them; one that the journal lacks mutes its round
    remembered_round_messages: tuple[Signed, ...] = ()

    @property
    def decided_blocks(self) -> tuple[DecidedBlock, ...]:
        return tuple([record for record in self.records if isinstance(record, DecidedBlock)]) if self.records else ()

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        return tuple([record for record in self.records if isinstance(record, Evidence)]) if self.records else ()


def merge_effects(turns: Sequence[StepEffects], deadline: float | None) -> StepEffects:
    """Several consecutive turns as one, so that they cost one fsync."""
    return StepEffects(
        tuple(record for turn in turns for record in turn.records),
        tuple(send for turn in turns for send in turn.sends),
        deadline,
        tuple(fault for turn in turns for fault in turn.faults),
        tuple(signed for turn in turns for signed in turn.remembered_round_messages),
    )


@dataclass(frozen=True, slots=True)
class RestartState:
    """What a replica must know to go on where it stopped."""

    decided: tuple[DecidedBlock, ...] = ()  # the last two decided heights, and those that are not applied yet, ascending
    votes: tuple[OwnStatement, ...] = ()  # every vote above the last decided height
    blocks: tuple[StoredBlock, ...] = ()  # every stored block above the last decided height
    prepared: Certificate | None = None  # the highest prepare certificate above the last decided height
    evidence: tuple[Evidence, ...] = ()  # all of it
    no_votes_below: int = 0  # the highest `VotePause`


NEVER_VOTED = RestartState()


class Journal(Protocol):
    """Durable memory of one replica. What belongs to a decided height, other than the decision and evidence, may be dropped."""

    def append_records(self, records: Sequence[JournalRecord]) -> None:
        """Durable, all or none, when it returns. Raises `StorageError`: then nothing may be sent and the peer stops."""

    def read_restart_state(self) -> RestartState: ...

    def get_decision(self, height: int) -> DecidedBlock | None: ...

    def get_block(self, digest: bytes) -> bytes | None:
        """The bytes of a stored undecided block."""


def load_restart_state(journal: Journal, applied: int) -> RestartState:
    """With every decided block that is not applied yet: whichever of them names another state than we find must be noticed."""
    restart = journal.read_restart_state()
    first_held = restart.decided[0].height if restart.decided else 0
    waiting = [journal.get_decision(height) for height in range(applied + 1, first_held)]
    return replace(restart, decided=(*(decided for decided in waiting if decided), *restart.decided))


class MessageSender(Protocol):
    def send(self, to: tuple[bytes, ...] | None, message: OutgoingMessage) -> None:
        """Queue for each of `to` that has a link, None for every link; never blocks."""


def persist_effects(turn: StepEffects, journal: Journal) -> tuple[SendMessage, ...]:
    """All input and output of a turn that touches the disk; what it returns may be sent from then on."""
    if turn.records:
        journal.append_records(turn.records)
    sends: list[SendMessage] = []
    for wanted in turn.sends:
        if isinstance(wanted, SendMessage):
            sends.append(wanted)
        else:
            sends += read_requested_blocks(wanted, journal)
    return tuple(sends)


def send_messages(sends: Iterable[SendMessage], outlet: MessageSender) -> None:
    for send in sends:
        outlet.send(send.to, send.message)


async def execute_effects_in_thread(
    turn: StepEffects, journal: Journal, outlet: MessageSender, run_in_thread: Callable[..., Awaitable[Any]]
) -> None:
    """For a caller that must not block: `run_in_thread(function, *arguments)` does the part with the disk, if any."""
    needs_disk = bool(turn.records) or not all(isinstance(send, SendMessage) for send in turn.sends)
    send_messages(await run_in_thread(persist_effects, turn, journal) if needs_disk else persist_effects(turn, journal), outlet)


def read_requested_blocks(wanted: SendDecisions | SendBlock, journal: Journal) -> Iterable[SendMessage]:
    """What is sent of what was asked for, as far as it is there. Reads the disk."""
    if isinstance(wanted, SendBlock):
        block = journal.get_block(wanted.digest)
        if block is not None:
            yield SendMessage((wanted.to,), BlockBytes(wanted.height, block))
    else:
        size = 0
        for height in range(wanted.first, wanted.first + wanted.count):
            decided = journal.get_decision(height)
            if decided is None or size > DECISIONS_REPLY_BYTES_MAX:
                return
            size += len(decided.block)
            yield SendMessage((wanted.to,), Decision(decided.block, decided.certificate))
