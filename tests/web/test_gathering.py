"""Batches of a serving peer, at a real network of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import trio

from curation.ledger.curation_state import CurationState
from curation.ledger.transaction_types import LeaseRequest, SessionStatement
from curation.limits import BATCH_MAX, EXCLUDED_PROJECTS_MAX, LEASES_MAX
from curation.service.annotators.statement_batcher import StatementBatcher
from peer.features import founding_modules
from peer.settings.config import load_settings
from protocol import codec
from protocol.identity import Identity, signing_preimage
from tests.peer.network import Seat, network
from tests.web.test_sealed import desk_of


def _wish(seat: Seat, person: Identity, without: tuple[bytes, ...] = ()) -> LeaseRequest:
    session = SessionStatement(seat.public, bytes(16), 1)
    signature = person.sign(signing_preimage(SessionStatement.TAG, seat.driver.chain_id, codec.encode(session)))
    return LeaseRequest(person.public, bytes(16), 1, signature, LEASES_MAX, without)


async def test_statements_that_no_single_transaction_takes_go_into_several_batches(tmp_path: Path) -> None:
    """Else the peer tries the same batch for ever, and none of its annotators gets or answers a task any more."""
    without = tuple(bytes([number]) * 32 for number in range(EXCLUDED_PROJECTS_MAX))
    async with network(tmp_path, 1, roles=("annotator",), modules=founding_modules()) as made, trio.open_nursery() as nursery:
        (seat,) = made.seats
        gatherer = StatementBatcher(desk_of(seat, load_settings({"data_directory": seat.folder}, {"HOME": str(tmp_path)}).config))
        wishes = [_wish(seat, Identity(number.to_bytes(32)), without) for number in range(BATCH_MAX)]
        decided = [gatherer.add_statement(wish) for wish in wishes]
        nursery.start_soon(gatherer.run)
        with trio.fail_after(60):
            for event in decided:
                await event.wait()
        assert gatherer.waiting_count == 0
        nursery.cancel_scope.cancel()


async def test_a_statement_with_a_false_signature_goes_and_takes_no_other_with_it(tmp_path: Path) -> None:
    """Else every batch with it is refused, for ever."""
    async with network(tmp_path, 1, roles=("annotator",), modules=founding_modules()) as made, trio.open_nursery() as nursery:
        (seat,) = made.seats
        gatherer = StatementBatcher(desk_of(seat, load_settings({"data_directory": seat.folder}, {"HOME": str(tmp_path)}).config))
        true = _wish(seat, Identity(bytes(32)))
        decided = [gatherer.add_statement(true), gatherer.add_statement(replace(true, expires_ms=2))]
        nursery.start_soon(gatherer.run)
        with trio.fail_after(60):
            for event in decided:
                await event.wait()
        assert gatherer.waiting_count == 0
        state = seat.driver.state.module_state(CurationState)
        assert state.passed_over == 1, "the true one was decided, and is of a stranger"
        nursery.cancel_scope.cancel()
