"""Reactions of three honest daemons to a fourth founder, and to strangers, that break every rule of the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import pytest
import trio

from consensus.pbft.chain import LeaderSchedule
from consensus.voter_set import VoterSet
from ledger.blocks.mempool import PENDING_PER_MEMBER_MAX
from ledger.core.genesis import Founder, Genesis
from ledger.jobs import StartJob, job_id
from peer.settings.data_directory import DataDirectory
from protocol import codec
from protocol.api import JobView, PeerApi
from protocol.identity import Identity, Signed, peer_id, sign_message
from protocol.messages import (
    NO_VIEW,
    Ballot,
    Certificate,
    Commit,
    Decision,
    EvidenceMessage,
    GossipEnvelope,
    Judgement,
    Prepare,
    Prepared,
    Proposal,
    Propose,
    ProposeEnvelope,
    Status,
    Timeout,
    TimeoutCertificate,
    TimeoutEnvelope,
    Transaction,
    ViewEnded,
    Vote,
)
from protocol.verdicts import Verdict
from tests.ledger.world import MODULES
from tests.peer.hostile import Hostile, Masquerade, connection, link
from tests.peer.network import SCRATCH
from tests.peer.processes import Daemon, daemons, poll
from tests.waiting import patience
from transport.wire.framing import Channel

MAGIC_BYTES = 8
# The attacker is silent while tests wait for decisions. This must not end a link.
RUN = ("run", "--role", "voter", "--listen", "127.0.0.1:0", "--suspect-seconds", "60")


@dataclass
class Target:
    """Three daemons. The attacker has the fourth founder's key."""

    honest: list[Daemon]
    addresses: list[str]
    genesis: Genesis
    founder: Identity

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def chain_id(self) -> bytes:
        return self.genesis.chain_id

    @property
    def client(self) -> PeerApi:
        return self.honest[0].client

    @property
    def voters(self) -> VoterSet:
        return self.genesis.voters

    async def refused(self, reason: str) -> int:
        return (await self.client.stats()).refused.get(reason, 0)

    async def counts_more(self, reason: str, before: int) -> bool:
        return await self.refused(reason) > before

    async def decides(self) -> None:
        """Assert that a scratch round completes, and that all three have one root."""
        job = await self.client.run_test_round()
        with patience():
            while True:
                jobs = [item for daemon in self.honest for item in await daemon.client.jobs() if item.job == job]
                statuses = [await daemon.client.status() for daemon in self.honest]
                over = len(jobs) == 3 and all(item.state == "finished" for item in jobs)
                if over and len({(status.height, status.state_root) for status in statuses}) == 1:
                    assert not any(status.halted for status in statuses)
                    return
                await trio.sleep(0.05)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("wire")
    keys = [Identity.generate() for _ in range(4)]
    genesis = Genesis(
        "wire",
        1_000,
        bytes(16),
        {key.public: Founder("founder", ()) for key in sorted(keys, key=lambda key: key.public)},
        MODULES,
    )
    for number, key in enumerate(keys[:3]):
        directory = DataDirectory.create(folder / str(number))
        directory.write_identity(key)
        directory.write_genesis(codec.encode(genesis))
    with daemons([folder / str(number) for number in range(3)]) as made:
        addresses: list[str] = []
        for daemon in made:
            daemon.start(*RUN, "--bootstrap", ",".join(addresses))
            addresses.append(trio.run(daemon.answers).address)
        yield Target(made, addresses, genesis, keys[3])


@asynccontextmanager
async def ended_for(target: Target, reason: str, connected: AbstractAsyncContextManager[Hostile]) -> AsyncIterator[Hostile]:
    """Assert that the body's actions on this connection end it, and that the reason is counted once more and shown."""
    before = await target.refused(reason)
    async with connected as hostile:
        yield hostile
        await hostile.closed()
        await poll(lambda: target.counts_more(reason, before))
        assert await target.refused(reason) == before + 1


# Connections -------------------------------------------------------------------------------------------------------------


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]


@pytest.mark.real("sockets")
@pytest.mark.parametrize(
    ("position", "reason"),
    [(0, "not-folkmoot"), (MAGIC_BYTES + 1, "wrong-version"), (MAGIC_BYTES + 2, "wrong-chain")],
)
async def test_a_preamble_with_one_wrong_bit_is_refused(target: Target, position: int, reason: str) -> None:
    async with ended_for(target, reason, connection(target.address, target.chain_id)) as hostile:
        await hostile.write(flipped(hostile.session.data_to_send(), position))


@pytest.mark.real("processes")
async def test_another_chain_is_refused(target: Target) -> None:
    async with ended_for(target, "wrong-chain", connection(target.address, bytes(32))) as hostile:
        await hostile.write(hostile.session.data_to_send())


@pytest.mark.real("processes")
async def test_a_handshake_with_a_flipped_bit_is_refused(target: Target) -> None:
    async with ended_for(target, "handshake", connection(target.address, target.chain_id)) as hostile:
        await hostile.write(hostile.session.data_to_send())
        with patience():
            while hostile.session.peer is None:
                hostile.session.receive(await hostile.stream.receive_some(1 << 16))
        await hostile.write(flipped(hostile.session.data_to_send(), 20))


@pytest.mark.real("processes")
async def test_a_key_that_is_claimed_and_not_proven_is_refused(target: Target) -> None:
    async with ended_for(
        target, "bad-signature", connection(target.address, target.chain_id, Masquerade(target.founder.public))
    ) as hostile:
        await hostile.shake_hands()


@pytest.mark.real("processes")
async def test_garbage_instead_of_a_handshake_is_refused(target: Target) -> None:
    async with ended_for(target, "not-folkmoot", connection(target.address, target.chain_id)) as hostile:
        await hostile.write(b"GET / HTTP/1.1\r\n\r\n")


# Frames ------------------------------------------------------------------------------------------------------------------


async def flip(hostile: Hostile) -> None:
    frame = hostile.sealed(b"\x00\x00\x01\x00")
    await hostile.write(flipped(frame, len(frame) - 1))


async def replay(hostile: Hostile) -> None:
    hostile.session.outbox.push(Channel.APPLICATION, codec.encode(Status(1, 0)), 0)
    frame = hostile.session.data_to_send()
    await hostile.write(frame + frame)


async def empty_frame(hostile: Hostile) -> None:
    await hostile.write(b"\x00\x00")


async def bad_record(hostile: Hostile) -> None:
    await hostile.write(hostile.sealed(b"\xff\x00\x01x"))


@pytest.mark.real("processes")
@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (flip, "bad-tag"),
        (replay, "bad-tag"),
        (empty_frame, "bad-frame"),
        (bad_record, "bad-record"),
    ],
)
async def test_a_bad_frame_ends_the_connection(target: Target, attack: Callable[[Hostile], Any], reason: str) -> None:
    async with ended_for(target, reason, link(target.address, target.chain_id)) as hostile:
        await attack(hostile)


# Messages ----------------------------------------------------------------------------------------------------------------


def statement(target: Target, height: int, kind: Any = Prepare, view: int = 0) -> Any:
    return kind(target.voters.hash, height, view, bytes(32))


def forged(target: Target, height: int, signers: int, kind: Any = Commit) -> Certificate:
    """Return a certificate whose signatures are the attacker's own under the names of others."""
    vote = codec.encode(statement(target, height, kind))
    return Certificate(vote, {key: target.founder.sign(vote) for key in target.voters.keys[:signers]})


def of_strangers(target: Target, height: int) -> Certificate:
    strangers = [Identity.generate() for _ in range(3)]
    vote = statement(target, height, Commit)
    signatures = {key.public: sign_message(key, target.chain_id, vote).signature for key in strangers}
    return Certificate(codec.encode(vote), dict(sorted(signatures.items())))


def gave_up(target: Target, height: int, high_view: int) -> TimeoutEnvelope:
    timeout = Timeout(target.voters.hash, height, 0, high_view, None if high_view == NO_VIEW else bytes(32))
    return TimeoutEnvelope(sign_message(target.founder, target.chain_id, timeout), None)


def another(target: Target) -> bytes:
    return next(key for key in target.voters.keys if key != target.founder.public)


def relay(target: Target, message: Any, signer: Identity | None = None) -> GossipEnvelope:
    return GossipEnvelope(sign_message(signer or target.founder, target.chain_id, message))


MESSAGES: list[tuple[str, str, Callable[[Target, int], Any]]] = [
    ("garbage", "unknown-message", lambda target, height: b"\xc1\x00garbage"),
    ("nothing", "unknown-message", lambda target, height: b""),
    ("an unknown message", "unknown-message", lambda target, height: msgpack.packb(["surprise", 1])),
    ("no message at all", "unknown-message", lambda target, height: msgpack.packb(7)),
    ("too few fields", "mistyped", lambda target, height: msgpack.packb(["status", 1])),
    ("another type", "mistyped", lambda target, height: msgpack.packb(["status", "one", 0])),
    ("a number in a longer form", "non-canonical", lambda target, height: b"\x93\xa6status\xcd\x00\x01\x00"),
    (
        "the vote of a stranger",
        "not-a-voter",
        lambda target, height: Vote(sign_message(Identity.generate(), target.chain_id, statement(target, height))),
    ),
    (
        "a vote in another's name",
        "bad-signature",
        lambda target, height: Vote(
            replace(sign_message(target.founder, target.chain_id, statement(target, height)), signer=another(target))
        ),
    ),
    (
        "a vote signed for another chain",
        "bad-signature",
        lambda target, height: Vote(sign_message(target.founder, bytes(32), statement(target, height))),
    ),
    (
        "a vote for another voter set",
        "foreign-voters",
        lambda target, height: Vote(sign_message(target.founder, target.chain_id, Prepare(bytes(32), height, 0, bytes(32)))),
    ),
    ("a decision with too few signatures", "no-quorum", lambda target, height: Decision(b"block", forged(target, height, 2))),
    ("a decision with forged signatures", "bad-signature", lambda target, height: Decision(b"block", forged(target, height, 3))),
    ("a decision of strangers", "not-a-voter", lambda target, height: Decision(b"block", of_strangers(target, height))),
    (
        "a forged prepare certificate",
        "bad-signature",
        lambda target, height: Prepared(forged(target, height, 3, Prepare)),
    ),
    ("a timeout without its certificate", "bad-timeout", lambda target, height: gave_up(target, height, 0)),
    (
        "a view ended by one",
        "no-quorum",
        lambda target, height: ViewEnded(TimeoutCertificate((gave_up(target, height, NO_VIEW).timeout,), None)),
    ),
    (
        "an accusation that proves nothing",
        "no-evidence",
        lambda target, height: EvidenceMessage(*2 * (sign_message(target.founder, target.chain_id, statement(target, height)),)),
    ),
    (
        "a ballot in another's name",
        "bad-signature",
        lambda target, height: GossipEnvelope(
            Signed(codec.encode(Ballot(bytes(32), 0, bytes(32), ())), another(target), bytes(64)),
        ),
    ),
]


@pytest.mark.real("processes")
@pytest.mark.parametrize(("name", "reason", "make"), MESSAGES, ids=[name for name, _, _ in MESSAGES])
async def test_a_bad_message_ends_the_connection(
    target: Target, name: str, reason: str, make: Callable[[Target, int], Any]
) -> None:
    async with ended_for(target, reason, link(target.address, target.chain_id)) as hostile:
        message = make(target, (await target.client.status()).height + 1)
        await hostile.say(message if isinstance(message, bytes) else codec.encode(message))


@pytest.mark.real("sockets")
async def test_garbage_on_the_transports_own_channel_ends_the_connection(target: Target) -> None:
    async with ended_for(target, "unknown-message", link(target.address, target.chain_id)) as hostile:
        await hostile.say(b"\xc1", Channel.LINK)


@pytest.mark.real("processes")
async def test_whoever_misbehaved_is_not_let_in_again_at_once(target: Target) -> None:
    identity = Identity.generate()
    async with link(target.address, target.chain_id, identity) as hostile:
        await hostile.say(b"\xc1")
        await hostile.closed()
    async with ended_for(target, "banned", connection(target.address, target.chain_id, identity)) as hostile:
        await hostile.shake_hands()


# Messages that depend on a peer's applied height: counted without a penalty ------------------------------------------------


async def open_round(target: Target, hostile: Hostile) -> JobView:
    """Start a scratch job of the attacker's own. Its round stays open until the attacker proposes."""
    height = (await target.client.status()).height
    nonce = 1 + sum(job.name == "hostile" for job in await target.client.jobs())
    transaction = Transaction(nonce, height + 100, "job/start", codec.encode(StartJob(replace(SCRATCH, name="hostile").encode())))
    job = job_id(target.founder.public, transaction).hex()
    await hostile.say(codec.encode(relay(target, transaction)))
    with patience():
        while True:
            for view in await target.client.jobs():
                if view.job == job:
                    return view
            await trio.sleep(0.02)


async def counted(target: Target, reason: str, before: int) -> None:
    await poll(lambda: target.counts_more(reason, before))


@pytest.mark.real("sockets")
async def test_round_messages_of_the_wrong_people_and_rounds_are_counted(target: Target) -> None:
    async with link(target.address, target.chain_id, target.founder) as hostile:
        view = await open_round(target, hostile)
        job, root = bytes.fromhex(view.job), bytes.fromhex(view.model_root)
        stranger = Identity.generate()
        for reason, message in (
            ("not-a-member", relay(target, Ballot(job, 0, root, ()), stranger)),
            ("not-a-member", relay(target, Proposal(job, 0, root, bytes(32), 1, bytes(32), None), stranger)),
            ("wrong-round", relay(target, Ballot(job, 0, bytes(32), ()))),
            ("not-a-trainer", relay(target, Ballot(job, 0, root, (Judgement(stranger.public, bytes(32), Verdict.ACCEPT),)))),
        ):
            before = await target.refused(reason)
            await hostile.say(codec.encode(message))
            await counted(target, reason, before)
        await target.decides()


@pytest.mark.real("sockets")
async def test_old_votes_replayed_and_messages_from_far_ahead_change_nothing(target: Target) -> None:
    async with link(target.address, target.chain_id, target.founder) as hostile:
        await target.decides()
        with patience():
            while not (old := [message for message in hostile.heard if isinstance(message, (Vote, Decision, ProposeEnvelope))]):
                await hostile.read()
        await target.decides()
        height = (await target.client.status()).height
        ahead = Vote(sign_message(target.founder, target.chain_id, statement(target, height + 1_000, view=60)))
        for message in [*old, *old, ahead, Status(2**40, 2**40)]:
            await hostile.say(codec.encode(message))
        await target.decides()
        assert {view.peer: view.link for view in await target.client.peers()}[peer_id(target.founder.public)] is not None


@pytest.mark.real("sockets")
async def test_a_flood_of_transactions_is_bounded_and_does_not_stop_decisions(target: Target) -> None:
    stranger = Identity.generate()
    height = (await target.client.status()).height
    async with link(target.address, target.chain_id, target.founder) as hostile:
        for number in range(2 * PENDING_PER_MEMBER_MAX):
            ahead = Transaction(10_000 + number, height + 100, "member/register", b"")
            await hostile.say(codec.encode(relay(target, ahead)))
            await hostile.say(codec.encode(relay(target, ahead, stranger)))
        before = await target.refused("unknown-transaction")
        await hostile.say(codec.encode(relay(target, Transaction(20_000, height + 100, "coins/mint", b""))))
        await counted(target, "unknown-transaction", before)
        assert (await target.client.stats()).transactions_pending <= PENDING_PER_MEMBER_MAX
        await target.decides()


def may_lead(target: Target, height: int, view: int) -> bool:
    """Return True if it may be the founder's turn. The schedule may leave out one voter, such as a slow daemon."""
    keys = target.voters.keys
    left_in = [keys, *(tuple(key for key in keys if key != left_out) for left_out in keys)]
    return any(LeaderSchedule(height, keys, present).leader_of_view(view) == target.founder.public for present in left_in)


@pytest.mark.real("processes")
async def test_a_proposal_out_of_turn_ends_the_connection(target: Target) -> None:
    before = await target.refused("not-the-leader")
    async with link(target.address, target.chain_id, target.founder) as hostile:
        with patience():
            while await target.refused("not-the-leader") == before:  # no effect if the height is decided meanwhile
                height = (await target.client.status()).height + 1
                view = next(view for view in range(4) if not may_lead(target, height, view))
                propose = Propose(target.voters.hash, height, view, bytes(32))
                await hostile.say(
                    codec.encode(
                        ProposeEnvelope(sign_message(target.founder, target.chain_id, propose), b"header", b"short", None)
                    )
                )
                with trio.move_on_after(1.0):
                    await hostile.closed()
        await hostile.closed()  # on a busy machine several proposals were sent and may be counted


@pytest.mark.real("sockets")
async def test_who_is_proven_to_have_signed_two_proposals_is_expelled_whoever_shows_the_proof(target: Target) -> None:
    """This is the founder's last attack, since every peer ignores it afterwards."""
    pair = [Proposal(bytes(32), 0, bytes(32), bytes([n]) * 32, 8, bytes(32), None) for n in range(2)]
    first, second = (sign_message(target.founder, target.chain_id, proposal) for proposal in pair)
    async with link(target.address, target.chain_id) as stranger:
        await stranger.say(codec.encode(EvidenceMessage(first, second)))
        me = peer_id(target.founder.public)
        for daemon in target.honest:
            await poll(lambda daemon=daemon: _shows_expelled(daemon, me))  # type: ignore[misc]
            assert (await daemon.client.stats()).expelled == (me,)
            assert f"({me[:8]}) was expelled: it signed two different proposals" in daemon.log
    assert me in (await target.client.stats()).evidence
    await target.decides()


async def _shows_expelled(daemon: Daemon, key: str) -> bool:
    view = next(view for view in await daemon.client.peers() if view.peer == key)
    return view.departed.startswith("expelled at height") and not view.member and not view.voter


@pytest.mark.real("sockets")
async def test_after_all_this_the_network_decides_and_no_daemon_has_complained_of_itself(target: Target) -> None:
    await target.decides()
    founders = {peer_id(target.founder.public), *(view.peer for view in await target.client.peers() if view.member)}
    for daemon in target.honest:
        assert "Traceback" not in daemon.log
        shown = [event for event in await daemon.client.events(0, 0.0) if event.kind in ("peer", "warning")]
        told = {str(event.fields["peer"]) for event in shown if "peer" in event.fields}
        assert told and told <= founders, "strangers could push out all that a person should see"
        assert (await daemon.client.stats()).refused.get("internal-error", 0) == 0
