"""Real peers in one process that serve annotators: their batches, a killed peer that held an answer, seals that fail to open."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from curation.ledger.curation_module import serving_peers
from curation.ledger.curation_state import AssignmentState, CurationState
from curation.ledger.transaction_types import LeaseRequest, SessionStatement, seal_recipients
from curation.limits import BATCH_MAX, EXCLUDED_PROJECTS_MAX, LEASES_MAX
from curation.rpc import CurationRpc, ImportRequest
from curation.service.annotators import annotator_api, answer_openings
from curation.service.annotators.statement_batcher import StatementBatcher
from ledger.members import MembersState
from peer.api.running_peer import RunningServiceContext
from peer.features import founding_modules
from peer.settings.config import Config, load_settings
from protocol import codec
from protocol.identity import Identity, signing_preimage
from tests.peer.network import Seat, network, running, service_of
from tests.waiting import PATIENCE_SECONDS, patience
from tests.web.client import Person, Site
from tests.web.room import SAYS, assigned, said, settled
from web.web_service import WebService

SEAL_MS = 300
DOES_NOT_OPEN = "sealed answers for this peer that do not match its commitments"


@dataclass
class Server:
    seat: Seat
    site: Site
    scope: trio.CancelScope

    async def kill(self) -> None:
        self.scope.cancel()
        await self.seat.stop()

    @property
    def state(self) -> CurationState:
        return self.seat.driver.state.module_state(CurationState)


def desk_of(seat: Seat, config: Config) -> RunningServiceContext:
    peer = running(seat)
    peer.config = config
    return peer.service_context("serve")


async def served(seat: Seat, nursery: trio.Nursery, **more: Any) -> Server:
    flags = {"data_directory": seat.folder, "role": "annotator", "web_listen": "127.0.0.1:0", "sign_up": "open", **more}
    desk = desk_of(seat, load_settings(flags, {"HOME": str(seat.folder)}).config)
    scope = trio.CancelScope()

    async def run() -> None:
        with scope:
            await WebService(desk).run()

    nursery.start_soon(run)
    host, _, port = (await seat.event("serve", SAYS)).removeprefix(SAYS).rstrip("/").rpartition(":")
    return Server(seat, Site(host, int(port)), scope)


@asynccontextmanager
async def servers(folder: Path) -> AsyncIterator[list[Server]]:
    async with network(folder, 4, roles=("annotator",), modules=founding_modules()) as made, trio.open_nursery() as nursery:
        with patience():
            yield [await served(seat, nursery) for seat in made.seats]
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_openings, "SEAL_DELAY_MS", SEAL_MS)
    # One of four peers is down, and may be the one whose turn it is.
    monkeypatch.setattr(annotator_api, "DECISION_WAIT_SECONDS", PATIENCE_SECONDS)


async def two_with_one_task(folder: Path, first: Server, second: Server) -> list[tuple[Person, str]]:
    """Return Ann at the first peer and Bob at the second one, each with an assignment of the only task."""
    file = folder / "moods.jsonl"
    file.write_text(json.dumps({"text": "text"}))
    api = cast(CurationRpc, service_of(second.seat))
    await api.import_tasks(ImportRequest(str(file), "moods", "", "label", ("glad", "sad"), False, 7, 1, "", False))
    found = []
    for server, name in ((first, "ann"), (second, "bob")):
        person = Person(name)
        assert (await said(person.enrol, server.site)).status == 201
        found.append((person, (await assigned(server.site, person))[0]["assignment"]))
    return found


def drawn(server: Server, assignment: str) -> list[bytes]:
    return list(
        seal_recipients(
            serving_peers(server.seat.driver.state.module_state(MembersState)), bytes.fromhex(assignment), server.seat.public
        )
    )


@pytest.mark.real("sockets")
async def test_a_killed_peer_loses_no_answer_that_it_carried(tmp_path: Path) -> None:
    async with servers(tmp_path) as (first, second, third, _):
        (ann, anns), (bob, bobs) = await two_with_one_task(tmp_path, first, second)
        assert (await said(ann.submit, first.site, anns, (1,))).status == 201
        row = first.state.assignments.get_record(bytes.fromhex(anns))
        assert row is not None and row.peer == first.seat.public and len(row.seals) == 2
        await first.kill()
        assert (await said(bob.submit, second.site, bobs, (1,))).status == 201
        assert (await settled(third.site, anns)).body["label"] == [1]
        rows = [row for _, row in third.state.assignments.items()]
        assert [row.state for row in rows] == [AssignmentState.SETTLED] * 2 and not any(row.seals for row in rows)


@pytest.mark.real("sockets")
@pytest.mark.parametrize("forged", [b"", b"x" * 69, "another answer"])
async def test_a_seal_that_does_not_open_is_told_and_the_next_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forged: bytes | str
) -> None:
    seal = answer_openings.seal
    async with servers(tmp_path) as made:
        first, second = made[:2]
        (ann, anns), (bob, bobs) = await two_with_one_task(tmp_path, first, second)
        liar, honest = (next(server for server in made if server.seat.public == key) for key in drawn(first, anns))

        def sealed(key: bytes, data: bytes) -> bytes | None:
            if key != liar.seat.public:
                return seal(key, data)
            return seal(key, data[:-1] + b"\0") if isinstance(forged, str) else forged

        look = answer_openings.AnswerOpenings.process_due_openings

        async def look_in_turn(openings: answer_openings.AnswerOpenings, state: CurationState, now_ms: int) -> None:
            """Delay the honest peer's turn until the liar has tried."""
            has_tried = any(DOES_NOT_OPEN in event.text for event in await liar.seat.events.wait_for_events(0, 0.0))
            is_too_soon = openings._desk.me == honest.seat.public and not has_tried
            await look(openings, state, 0 if is_too_soon else now_ms)

        with monkeypatch.context() as lies:
            lies.setattr(answer_openings, "seal", sealed)
            assert (await said(ann.submit, first.site, anns, (1,))).status == 201
        monkeypatch.setattr(answer_openings.AnswerOpenings, "process_due_openings", look_in_turn)
        await first.kill()
        assert (await said(bob.submit, second.site, bobs, (1,))).status == 201
        assert (await settled(honest.site, anns)).body["label"] == [1]
        await liar.seat.event("serve", DOES_NOT_OPEN)


def _wish(seat: Seat, person: Identity, without: tuple[bytes, ...] = ()) -> LeaseRequest:
    signature = person.sign(
        signing_preimage(SessionStatement.TAG, seat.driver.chain_id, codec.encode(SessionStatement(seat.public, bytes(16), 1)))
    )
    return LeaseRequest(person.public, bytes(16), 1, signature, LEASES_MAX, without)


async def gathered(folder: Path, make: Callable[[Seat], list[LeaseRequest]]) -> CurationState:
    """Return the state after all these statements have been in a decided batch."""
    async with network(folder, 1, roles=("annotator",), modules=founding_modules()) as made, trio.open_nursery() as nursery:
        (seat,) = made.seats
        gatherer = StatementBatcher(desk_of(seat, load_settings({"data_directory": seat.folder}, {"HOME": str(folder)}).config))
        decided = [gatherer.add_statement(wish) for wish in make(seat)]
        nursery.start_soon(gatherer.run)
        with trio.fail_after(60):
            for event in decided:
                await event.wait()
        assert gatherer.waiting_count == 0
        nursery.cancel_scope.cancel()
        return seat.driver.state.module_state(CurationState)


async def test_statements_that_no_single_transaction_takes_go_into_several_batches(tmp_path: Path) -> None:
    """Otherwise the peer would retry the same batch for ever, and none of its annotators could get or answer a task."""
    without = tuple(bytes([number]) * 32 for number in range(EXCLUDED_PROJECTS_MAX))
    await gathered(tmp_path, lambda seat: [_wish(seat, Identity(n.to_bytes(32)), without) for n in range(BATCH_MAX)])


async def test_a_statement_with_a_false_signature_goes_and_takes_no_other_with_it(tmp_path: Path) -> None:
    """Otherwise every batch with this statement would be refused for ever."""

    def true_and_false(seat: Seat) -> list[LeaseRequest]:
        true = _wish(seat, Identity(bytes(32)))
        return [true, replace(true, expires_ms=2)]

    state = await gathered(tmp_path, true_and_false)
    assert state.passed_over == 1, "the true one was decided, and is of a stranger"
