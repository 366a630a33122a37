"""The effects of one step of a replica, and their execution: records become durable before any message is sent."""

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

# Bytes after which an answer with decisions ends; a peer that needs more asks again.
DECISIONS_REPLY_BYTES_MAX = MESSAGE_BYTES_MAX

VoteSlot = tuple[str, int, int]  # message tag, height and view: a voter signs at most one statement for each slot


@dataclass(frozen=True, slots=True)
class OwnStatement:
    slot: VoteSlot
    signed: Signed


@dataclass(frozen=True, slots=True)
class OwnRoundStatement:
    """A Proposal, Ballot, CutOff or Vouch that this peer signed in a round. The `tag` of a Vouch also contains a trainer."""

    tag: str
    job: bytes
    round: int
    signed: Signed
    accepted: tuple[Signed, ...] = ()  # other trainers' proposals that a Ballot accepts, which are stored with the ballot


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The bytes of an undecided block that this voter has proposed or prepared."""

    height: int
    digest: bytes
    block: bytes


@dataclass(frozen=True, slots=True)
class StoredCertificate:
    """The highest prepare certificate of the undecided height. The record replaces the former one."""

    height: int
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class DecidedBlock:
    """The decision of `height`. When the record is durable, the executor applies the block and returns `AppliedInput`."""

    height: int
    digest: bytes
    block: bytes
    certificate: Certificate

    def decode(self) -> Block:
        return decode_block(self.block)


@dataclass(frozen=True, slots=True)
class VotePause:
    """A record that the journal has lost own statements, which another peer returned.

    This voter signs nothing at heights below `below`.
    """

    below: int


JournalRecord = OwnStatement | OwnRoundStatement | StoredBlock | StoredCertificate | DecidedBlock | Evidence | VotePause


OutgoingMessage = AgreementMessage | GossipEnvelope | GetRound | EvidenceMessage


@dataclass(frozen=True, slots=True)
class SendMessage:
    to: tuple[bytes, ...] | None  # receivers; None: all connected peers. A peer without a link misses the message
    message: OutgoingMessage


@dataclass(frozen=True, slots=True)
class SendDecisions:
    """Effect: send at most `count` decisions from height `first` on, as far as the journal has them."""

    to: bytes
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class SendBlock:
    """Effect: send the bytes of an undecided block, if the journal has them."""

    to: bytes
    height: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PeerFault:
    """Effect: close the link to `peer`, because a message of that peer violates the protocol, and count the reason."""

    peer: bytes
    error: RemoteProtocolError


@dataclass(frozen=True, slots=True)
class StepEffects:
    records: tuple[JournalRecord, ...] = ()  # records that must be durable before any message is sent
    sends: tuple[SendMessage | SendDecisions | SendBlock, ...] = ()
    deadline: float | None = None  # time at which a `TickInput` is due; it replaces the former deadline
    faults: tuple[PeerFault, ...] = ()
    # Own messages of rounds that other peers returned. If the journal lacks one of them, this peer signs nothing more in that
    # round.
    remembered_round_messages: tuple[Signed, ...] = ()

    @property
    def decided_blocks(self) -> tuple[DecidedBlock, ...]:
        return tuple([record for record in self.records if isinstance(record, DecidedBlock)]) if self.records else ()

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        return tuple([record for record in self.records if isinstance(record, Evidence)]) if self.records else ()


def merge_effects(turns: Sequence[StepEffects], deadline: float | None) -> StepEffects:
    """Merge the effects of consecutive steps, so that one fsync makes all their records durable."""
    return StepEffects(
        tuple(record for turn in turns for record in turn.records),
        tuple(send for turn in turns for send in turn.sends),
        deadline,
        tuple(fault for turn in turns for fault in turn.faults),
        tuple(signed for turn in turns for signed in turn.remembered_round_messages),
    )


@dataclass(frozen=True, slots=True)
class RestartState:
    """The part of the journal that a replica needs to continue after a restart."""

    decided: tuple[DecidedBlock, ...] = ()  # decisions of the last two heights and of all heights that are not applied, ascending
    votes: tuple[OwnStatement, ...] = ()  # own statements above the last decided height
    blocks: tuple[StoredBlock, ...] = ()  # undecided blocks above the last decided height
    prepared: Certificate | None = None  # the highest prepare certificate above the last decided height
    evidence: tuple[Evidence, ...] = ()
    no_votes_below: int = 0  # the highest `below` of all `VotePause` records


NEVER_VOTED = RestartState()


class Journal(Protocol):
    """The durable memory of one replica. Records of decided heights may be dropped, except decisions and evidence."""

    def append_records(self, records: Sequence[JournalRecord]) -> None:
        """Make all records durable, or none. After a `StorageError` the peer stops without sending anything."""

    def read_restart_state(self) -> RestartState: ...

    def get_decision(self, height: int) -> DecidedBlock | None: ...

    def get_block(self, digest: bytes) -> bytes | None:
        """Return the bytes of an undecided block, or None if the journal does not have them."""


def load_restart_state(journal: Journal, applied: int) -> RestartState:
    """Return the restart state with all decided blocks that are not applied.

    The caller must compare their states with its own.
    """
    restart = journal.read_restart_state()
    first_held = restart.decided[0].height if restart.decided else 0
    waiting = [journal.get_decision(height) for height in range(applied + 1, first_held)]
    return replace(restart, decided=(*(decided for decided in waiting if decided), *restart.decided))


class MessageSender(Protocol):
    def send(self, to: tuple[bytes, ...] | None, message: OutgoingMessage) -> None:
        """Queue a message for each peer in `to` that has a link. None: for all links. Never blocks."""


def persist_effects(turn: StepEffects, journal: Journal) -> tuple[SendMessage, ...]:
    """Write the records and read the requested blocks, which is all disk access of a step.

    Return the messages that may now be sent.
    """
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
    """Execute a step's effects without blocking. `run_in_thread(function, *arguments)` does any disk access."""
    needs_disk = bool(turn.records) or not all(isinstance(send, SendMessage) for send in turn.sends)
    send_messages(await run_in_thread(persist_effects, turn, journal) if needs_disk else persist_effects(turn, journal), outlet)


def read_requested_blocks(wanted: SendDecisions | SendBlock, journal: Journal) -> Iterable[SendMessage]:
    """Yield the requested block or decisions as messages, as far as the journal has them. Reads the disk."""
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
