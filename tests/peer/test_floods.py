"""What others send stays in memory only within bounds in bytes, and nothing that was refused stays at all."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import trio

from consensus.pbft.block_sync import FUTURE_BYTES_MAX, PROPOSALS_BYTES_MAX, FutureHeightMessages
from ledger.ledger_state import OPENED_BYTES_MAX
from ledger.tables import Table
from ledger.tables.table import DECODED_RECORDS_BYTES_MAX
from peer.runtime.driver import INBOX_BYTES_MAX as INBOX_BYTES_MAX_OF_DRIVER
from peer.runtime.state_sync import INBOX_BYTES_MAX
from protocol import codec
from protocol.codec import Length
from protocol.identity import Signed, sign_message
from protocol.limits import HEADER_BYTES_MAX, SNAPSHOT_PART_BYTES_MAX
from protocol.messages import (
    GossipEnvelope,
    ProposeEnvelope,
    SnapshotContent,
    SnapshotPart,
    Status,
    TimeoutCertificate,
    Transaction,
    ViewEnded,
)
from tests.ledger.world import PEOPLE
from tests.peer.network import network, poll
from tests.peer.nodes import Pack
from tests.sim.keys import FastSigner
from transport.network import DataReceived

STRANGER = FastSigner("nobody admitted this key")
SLACK_BYTES = 3 << 20  # of interpreter, counters, and the messages at work
LARGE = 200_000


def _retained(flood: Callable[[], object]) -> int:
    """Bytes that are allocated after it, and were not before."""
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
    """As they come over a link: each in bytes of its own."""
    for number in range(count):
        transaction = Transaction(1, 9, kind, _noise(number, size))
        data = codec.encode(GossipEnvelope(sign_message(signer, pack.world.chain, transaction)))
        pack[0].turn(DataReceived(signer.public, data))


def test_a_flood_of_a_key_that_nobody_admitted_leaves_nothing_behind() -> None:
    """Its signatures are true, and it asks to be admitted: so each message is verified, and then refused."""
    pack = Pack(count=1)
    assert _retained(lambda: _relays(pack, STRANGER, "member/admit", 300)) < SLACK_BYTES
    rules = pack[0].node.rules
    assert rules._opened_bytes == 0 and not rules._opened and len(pack[0].node.ledger.mempool) == 0


def test_a_flood_of_a_members_transactions_that_never_apply_leaves_nothing_behind() -> None:
    pack = Pack(count=1)
    assert _retained(lambda: _relays(pack, PEOPLE[1], "member/unknown", 300)) < SLACK_BYTES
    assert not pack[0].node.rules._opened


def test_accepted_messages_stay_decoded_within_a_bound_in_bytes() -> None:
    """The pool has a bound of its own: this is about what is kept beside it."""
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
        proposed = ProposeEnvelope(Signed(b"1", bytes(32), bytes(64)), _noise(number, HEADER_BYTES_MAX), b"", None)
        future.add_message(number.to_bytes(32), 5, proposed)
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
            part = SnapshotPart(1, SnapshotContent.BLOCK, b"", number, _noise(number, SNAPSHOT_PART_BYTES_MAX))
            snapshots.receive_message(STRANGER.public, codec.encode(part))
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
