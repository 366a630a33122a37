"""Data of other peers stays in memory only within bounds in bytes. Large messages are verified beside the event loop."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import trio

from consensus.pbft.block_sync import FUTURE_BYTES_MAX, PROPOSALS_BYTES_MAX, FutureHeightMessages
from curation.ledger.curation_state import CurationState
from curation.ledger.transaction_types import EnrolmentEntry, EnrolStatement, StatementBatch
from curation.limits import BATCH_MAX
from ledger.jobs import RUNNING_MAX
from ledger.ledger_state import OPENED_BYTES_MAX
from ledger.members import Member, RegisterRoles
from ledger.tables import Table
from ledger.tables.table import DECODED_RECORDS_BYTES_MAX
from peer.features import founding_modules
from peer.node.future_messages import (
    MEMBER_BYTES_MAX,
    OTHERS_MAX,
    PER_MEMBER_MAX,
    PER_VOTER_MAX,
    VOTER_BYTES_MAX,
    FutureRoundMessages,
    RoundMessage,
)
from peer.runtime import work_queues
from peer.runtime.driver import INBOX_BYTES_MAX as INBOX_BYTES_MAX_OF_DRIVER
from peer.runtime.state_sync import INBOX_BYTES_MAX
from peer.runtime.work_queues import SignaturePreverifier
from protocol import codec
from protocol.codec import Length
from protocol.identity import Identity, Signed, sign_message, signing_preimage
from protocol.limits import DECLARATION_BYTES_MAX, HEADER_BYTES_MAX, SNAPSHOT_PART_BYTES_MAX, TRAINERS_MAX, VOTERS_MAX
from protocol.messages import (
    Ballot,
    CutOff,
    GossipEnvelope,
    Judgement,
    LossCommitment,
    Proposal,
    ProposeEnvelope,
    SnapshotContent,
    SnapshotPart,
    Status,
    TimeoutCertificate,
    Transaction,
    ViewEnded,
    Vouch,
)
from protocol.verdicts import Verdict
from tests.ledger.world import PEOPLE
from tests.peer.chain import Chain
from tests.peer.network import Network, Seat, network, poll
from tests.peer.nodes import Pack
from tests.sim.keys import FastSigner
from tests.waiting import patience
from transport.network import DataReceived

STRANGER = FastSigner("nobody admitted this key")
SLACK_BYTES = 3 << 20  # for interpreter, counters, and messages in progress
LARGE = 200_000


def _retained(flood: Callable[[], object]) -> int:
    """Return the number of bytes that the flood allocates and that stay allocated."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    flood()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before


def _noise(number: int, size: int = LARGE) -> bytes:
    return random.Random(number).randbytes(size)


def _relays(pack: Pack, signer: FastSigner, kind: str, count: int, size: int = LARGE) -> None:
    """Deliver messages as a link does, each in its own bytes."""
    for number in range(count):
        data = codec.encode(GossipEnvelope(sign_message(signer, pack.world.chain, Transaction(1, 9, kind, _noise(number, size)))))
        pack[0].turn(DataReceived(signer.public, data))


def test_a_flood_of_a_key_that_nobody_admitted_leaves_nothing_behind() -> None:
    """The signatures are valid and the sender requests admission, so each message is verified and then refused."""
    pack = Pack(count=1)
    assert _retained(lambda: _relays(pack, STRANGER, "member/admit", 300)) < SLACK_BYTES
    rules = pack[0].node.rules
    assert rules._opened_bytes == 0 and not rules._opened and len(pack[0].node.ledger.mempool) == 0


def test_a_flood_of_a_members_transactions_that_never_apply_leaves_nothing_behind() -> None:
    pack = Pack(count=1)
    assert _retained(lambda: _relays(pack, PEOPLE[1], "member/unknown", 300)) < SLACK_BYTES
    assert not pack[0].node.rules._opened


def test_accepted_messages_stay_decoded_within_a_bound_in_bytes() -> None:
    """The pool has its own bound. This test is about the memory beside it."""
    pack = Pack(count=1)
    rules = pack[0].node.rules

    def flood() -> None:
        for number in range(300):
            signed = sign_message(STRANGER, pack.world.chain, Transaction(number, 9, "any", _noise(number)))
            rules.cache_opened_message(signed, rules.open_transaction(signed))

    assert 0.1 * OPENED_BYTES_MAX < _retained(flood) < OPENED_BYTES_MAX + SLACK_BYTES
    assert rules._opened_bytes <= OPENED_BYTES_MAX


def test_messages_for_later_heights_are_bounded_in_bytes_for_each_peer() -> None:
    future = FutureHeightMessages()
    signed = tuple(Signed(_noise(number, 250), bytes([number]) * 32, bytes(64)) for number in range(200))

    def flood() -> None:
        for number in range(200):
            large = codec.decode(ViewEnded, codec.encode(ViewEnded(TimeoutCertificate(signed, None))))
            future.add_message(bytes([number % 10]) * 32, 5, Status(1, 1) if number % 2 else large)

    assert _retained(flood) < 10 * 4 * FUTURE_BYTES_MAX + SLACK_BYTES
    for messages in future._small.values():
        assert sum(size for _, _, size in messages) <= FUTURE_BYTES_MAX
    assert len(future.pop_height(5)) > 10, "small ones stay"


def test_proposals_for_later_heights_are_counted_with_their_headers() -> None:
    future = FutureHeightMessages()
    for number in range(3_000):
        future.add_message(
            number.to_bytes(32),
            5,
            ProposeEnvelope(Signed(b"1", bytes(32), bytes(64)), _noise(number, HEADER_BYTES_MAX), b"", None),
        )
    held = sum(len(codec.encode(kept)) for _, kept, _ in future._proposals.values())
    assert PROPOSALS_BYTES_MAX // 2 < held <= PROPOSALS_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Row:
    text: Annotated[bytes, Length(0, 16_000)]


def test_rows_that_were_read_stay_decoded_within_a_bound_in_bytes() -> None:
    table: Table[Row] = Table(Row).with_rows({number.to_bytes(4): Row(_noise(number, 15_000)) for number in range(1_000)})
    table.hashed_tree()
    retained = _retained(lambda: [table.get_record(number.to_bytes(4)) for number in range(1_000)])
    assert retained < 2 * DECODED_RECORDS_BYTES_MAX + SLACK_BYTES
    assert table.get_record((7).to_bytes(4)) == Row(_noise(7, 15_000))


# With a driver ----------------------------------------------------------------------------------------------------------


async def test_parts_of_snapshots_that_nobody_asked_for_wait_within_a_bound_in_bytes(tmp_path: Path) -> None:
    async with network(tmp_path, founders=1) as made:
        snapshots = made.seats[0].driver.state_sync
        for number in range(100):
            snapshots.receive_message(
                STRANGER.public,
                codec.encode(SnapshotPart(1, SnapshotContent.BLOCK, b"", number, _noise(number, SNAPSHOT_PART_BYTES_MAX))),
            )
            assert snapshots._inbox_bytes <= INBOX_BYTES_MAX
        await poll(lambda: snapshots._inbox_bytes == 0)


async def test_what_waits_for_the_driver_is_bounded_in_bytes_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    async with network(tmp_path, founders=1) as made, trio.open_nursery() as nursery:
        driver = made.seats[0].driver
        data = codec.encode(GossipEnvelope(sign_message(STRANGER, driver.chain_id, Transaction(1, 9, "any", bytes(LARGE)))))
        waited, delivered = list[int](), 0

        async def deliver() -> None:
            nonlocal delivered
            for _ in range(400):
                await driver._deliver(DataReceived(STRANGER.public, data))
                waited.append(driver._inbox_bytes)
                delivered += 1

        nursery.start_soon(deliver)
        with trio.fail_after(60):
            await poll(lambda: delivered == 400 and driver._inbox_bytes == 0)
        assert max(waited) <= INBOX_BYTES_MAX_OF_DRIVER + len(data)


SECONDS_MAX = 60


def _enrolments(seat: Seat, count: int) -> list[EnrolmentEntry]:
    people = [Identity(bytes([1, *number.to_bytes(31)])) for number in range(count)]
    signed = signing_preimage(EnrolStatement.TAG, seat.driver.chain_id, codec.encode(EnrolStatement("ann", seat.public, False)))
    return [EnrolmentEntry(person.public, "ann", False, person.sign(signed)) for person in people]


def _batch(seat: Seat, enrolments: Sequence[EnrolmentEntry]) -> Signed:
    nonce = seat.driver.state.members.members[seat.public].nonce + 1
    content = codec.encode(StatementBatch(enrolments=tuple(enrolments)))
    return sign_message(
        seat.identity, seat.driver.chain_id, Transaction(nonce, seat.driver.state.height + 50, "curation/statements", content)
    )


async def _serving(made: Network) -> tuple[Seat, Seat]:
    """Return two voters. The first one serves annotators."""
    await made.seats[0].author.submit("member/register", RegisterRoles(("annotator",)))
    await poll(lambda: made.seats[1].driver.state.members.members[made.seats[0].public].roles == ("annotator",))
    return made.seats[0], made.seats[1]


def _watched(seat: Seat, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[tuple[bytes, float]]]:
    """Record the thread of each verification that is not cached, and the seconds that the peer charges to each link."""
    threads, spent = list[int](), list[tuple[bytes, float]]()
    verifier, charged = seat.driver.rules.verifier._verifier, seat.network.charge_cpu

    class Watched:
        def verify(self, public: bytes, data: bytes, signature: bytes) -> bool:
            threads.append(threading.get_ident())
            return verifier.verify(public, data, signature)

    def spend(peer: bytes, seconds: float) -> None:
        spent.append((peer, seconds))
        charged(peer, seconds)

    monkeypatch.setattr(seat.driver.rules.verifier, "_verifier", Watched())
    monkeypatch.setattr(seat.network, "charge_cpu", spend)
    return threads, spent


@pytest.mark.real("a thread that matters")
async def test_a_full_batch_is_verified_once_in_a_thread_and_charged_to_the_link_that_brought_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with network(tmp_path, founders=2, modules=founding_modules()) as made:
        with patience():
            sender, receiver = await _serving(made)
            signed = _batch(sender, _enrolments(sender, BATCH_MAX))
            threads, spent = _watched(receiver, monkeypatch)
            sender.network.send(receiver.public, codec.encode(GossipEnvelope(signed)))
            await poll(lambda: receiver.driver.state.module_state(CurationState).annotators_count == BATCH_MAX)
        beside = [thread for thread in threads if thread != threading.get_ident()]
        assert len(beside) == BATCH_MAX + 1, "each statement and the transaction, once, from arrival to the applied block"
        paid = max(seconds for peer, seconds in spent if peer == sender.public)
        assert paid > sum(seconds for peer, seconds in spent if peer == sender.public) / 2, (
            "the thread's time is the largest part"
        )


async def test_a_false_statement_costs_the_link_though_it_was_verified_beside_the_loop(tmp_path: Path) -> None:
    async with network(tmp_path, founders=2, modules=founding_modules()) as made:
        with trio.fail_after(SECONDS_MAX):
            sender, receiver = await _serving(made)
            statements = _enrolments(sender, 40)
            false = [*statements[:-1], replace(statements[-1], signature=bytes(range(64)))]
            sender.network.send(receiver.public, codec.encode(GossipEnvelope(_batch(sender, false))))
            await poll(lambda: any("bad-signature: enrol" in event.text for event in receiver.events.newest_events(1_000)))
        assert sender.public not in receiver.network.connected_peers()


async def test_what_waits_for_verification_is_bounded_for_each_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message beyond the bound is dropped. Its author repeats it every second, and each new link sends it again."""
    monkeypatch.setattr(work_queues, "BYTES_PER_PEER_MAX", 100_000)
    async with network(tmp_path, founders=2, modules=founding_modules()) as made:
        with trio.fail_after(SECONDS_MAX):
            sender, receiver = await _serving(made)

        async def deliver(event: Any) -> None:
            delivered.append(event)

        delivered: list[Any] = []
        queue = SignaturePreverifier(receiver.driver.rules, receiver.network, receiver.applied, deliver)
        event = DataReceived(sender.public, codec.encode(GossipEnvelope(_batch(sender, _enrolments(sender, 200)))))
        assert queue.should_preverify(event) and not queue.should_preverify(DataReceived(bytes(32), event.data)), (
            "strangers' are few and small"
        )
        for _ in range(50):
            queue.enqueue_message(event)
        assert queue.bytes_waiting <= 100_000 and queue.dropped == 50 - queue.bytes_waiting // len(event.data)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.run)
            with trio.fail_after(SECONDS_MAX):
                await poll(lambda: len(delivered) == 50 - queue.dropped)
            nursery.cancel_scope.cancel()
        assert queue.bytes_waiting == 0


KEYS = tuple(number.to_bytes(32, "big") for number in range(TRAINERS_MAX))
VOTERS = tuple(bytes([1]) + number.to_bytes(31, "big") for number in range(VOTERS_MAX))
OTHERS = tuple(bytes([2]) + number.to_bytes(31, "big") for number in range(OTHERS_MAX + 10))
LATER = 2**40  # a round that no job has reached
PYTHON_FACTOR = 1.1  # objects around the bytes of the largest messages


def job_of(number: int) -> bytes:
    return bytes([3]) + number.to_bytes(31, "big")


WORST = max(Verdict, key=lambda verdict: len(codec.encode(verdict)))
JUDGED = tuple(Judgement(key, bytes(32), WORST) for key in KEYS)
VOUCHES = (1, 1, 2, 4, 8, 16, 32, 2)  # trainers in each vouch of 66; the next vouch waits until it doubles the earlier ones


def largest_ballot(job: bytes) -> Ballot:
    return Ballot(job, LATER, bytes(32), JUDGED, bytes(16), bytes(32))


def vouches(job: bytes, counts: tuple[int, ...] = VOUCHES) -> list[Vouch]:
    ends = itertools.accumulate(counts)
    return [Vouch(job, LATER, JUDGED[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def largest_of_a_round(job: bytes) -> list[RoundMessage]:
    digest = bytes(32)
    declaration, loss = bytes(DECLARATION_BYTES_MAX), LossCommitment(digest, digest)
    proposal = Proposal(job, LATER, digest, digest, 2**30, digest, digest, digest, digest, declaration, loss)
    return [proposal, largest_ballot(job), CutOff(job, LATER, VOTERS)]


def put(early: FutureRoundMessages, signer: bytes, message: RoundMessage) -> None:
    """Deliver a message as a link does. Nothing else holds it."""
    body = codec.encode(message)
    early.add_message(Signed(body, signer, bytes(64)), codec.decode_message(body, (type(message),)))


@pytest.fixture
def early(tmp_path: Path) -> Iterator[FutureRoundMessages]:
    """Return a peer's early messages in a network of VOTERS_MAX voters and many other members."""
    chain = Chain(tmp_path / "chain")
    state = chain.ledger.state
    people = dict(sorted(dict.fromkeys((*VOTERS, *OTHERS), Member("somebody", (), 1, None, 0)).items()))
    members = replace(state.members, members=people, voters=VOTERS, previous=VOTERS, upcoming=VOTERS)
    made = FutureRoundMessages(Identity(bytes(32)).public)
    made.drop_old_messages(state.with_modules(members=members))
    yield made
    chain.close()


@pytest.mark.parametrize("counts", [VOUCHES, (TRAINERS_MAX,)])
def test_an_honest_voter_has_room_for_the_next_round_of_all_jobs_that_may_run(
    early: FutureRoundMessages, counts: tuple[int, ...]
) -> None:
    for number in range(RUNNING_MAX):
        for message in (*largest_of_a_round(job_of(number)), *vouches(job_of(number), counts)):
            put(early, VOTERS[0], message)
    assert len(early.signed_by(VOTERS[0])) == (3 + len(counts)) * RUNNING_MAX <= PER_VOTER_MAX


def test_a_member_without_a_vote_has_room_for_its_largest_proposals(early: FutureRoundMessages) -> None:
    for number in range(PER_MEMBER_MAX):
        put(early, OTHERS[0], largest_of_a_round(job_of(number))[0])
    assert len(early.signed_by(OTHERS[0])) == PER_MEMBER_MAX


def test_messages_of_a_liar_take_no_more_memory_than_its_bound(early: FutureRoundMessages) -> None:
    liars = VOTERS[:6]  # every voter has its own share
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for liar in liars:
            for number in range(PER_VOTER_MAX):
                put(early, liar, largest_ballot(job_of(number)))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    sizes = [sum(len(signed.body) for signed in early.signed_by(liar)) for liar in liars]
    assert 0.9 * VOTER_BYTES_MAX < max(sizes) <= VOTER_BYTES_MAX
    assert taken <= PYTHON_FACTOR * len(liars) * VOTER_BYTES_MAX, f"{taken / 2**20:.0f} MiB"


def test_messages_of_members_without_a_vote_are_bounded_in_bytes(early: FutureRoundMessages) -> None:
    for other in OTHERS:
        put(early, other, CutOff(job_of(0), LATER, VOTERS))  # the largest message that fits
        put(early, other, largest_ballot(job_of(0)))
        put(early, other, CutOff(job_of(1), LATER, VOTERS))
    sizes = [sum(len(signed.body) for signed in early.signed_by(other)) for other in OTHERS]
    assert max(sizes) <= MEMBER_BYTES_MAX and sum(sizes) <= OTHERS_MAX * MEMBER_BYTES_MAX
