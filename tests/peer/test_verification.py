"""Signatures of large messages are verified beside the event loop, and the link that brought the message pays."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from curation.ledger.curation_state import CurationState
from curation.ledger.transaction_types import EnrolmentEntry, EnrolStatement, StatementBatch
from curation.limits import BATCH_MAX
from ledger.members import RegisterRoles
from peer.features import founding_modules
from peer.runtime import work_queues
from peer.runtime.work_queues import SignaturePreverifier
from protocol import codec
from protocol.identity import Identity, Signed, sign_message, signing_preimage
from protocol.messages import GossipEnvelope, Transaction
from tests.peer.network import Network, Seat, network, poll
from tests.waiting import patience
from transport.network import DataReceived

SECONDS_MAX = 60


def _enrolments(seat: Seat, count: int) -> list[EnrolmentEntry]:
    people = [Identity(bytes([1, *number.to_bytes(31)])) for number in range(count)]
    said = codec.encode(EnrolStatement("ann", seat.public, False))
    signed = signing_preimage(EnrolStatement.TAG, seat.driver.chain_id, said)
    return [EnrolmentEntry(person.public, "ann", False, person.sign(signed)) for person in people]


def _batch(seat: Seat, enrolments: Sequence[EnrolmentEntry]) -> Signed:
    nonce = seat.driver.state.members.members[seat.public].nonce + 1
    content = codec.encode(StatementBatch(enrolments=tuple(enrolments)))
    return sign_message(
        seat.identity, seat.driver.chain_id, Transaction(nonce, seat.driver.state.height + 50, "curation/statements", content)
    )


async def _serving(made: Network) -> tuple[Seat, Seat]:
    """Two voters, of which the first serves annotators."""
    await made.seats[0].author.submit("member/register", RegisterRoles(("annotator",)))
    await poll(lambda: made.seats[1].driver.state.members.members[made.seats[0].public].roles == ("annotator",))
    return made.seats[0], made.seats[1]


def _watched(seat: Seat, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[tuple[bytes, float]]]:
    """Threads in which this peer verifies what it has not verified before, and the seconds that it charges links for."""
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
    """A message beyond that is dropped: its author says it again every second, and each new link tells it."""
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
