"""A false signature makes a batch invalid. The signatures of a block are bounded and verified once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from curation.ledger.curation_module import LOOKS_FOR_COST, CurationModule
from curation.ledger.curation_state import AssignmentState
from curation.ledger.state_changes import CurationChanges
from curation.ledger.transaction_types import StatementBatch
from curation.limits import BATCH_MAX, DRAW_LOOKS_MAX, LEASE_MS, LEASES_MAX, LOOKS_FOR_DRAW
from ledger.core.module import Refused
from ledger.ledger_state import BlockBody, LedgerRules, core_modules, decode_body
from ledger.members import RegisterRoles
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import CachingVerifier, Signed
from protocol.limits import COST_PER_BLOCK_MAX, TRANSACTIONS_PER_BLOCK_MAX
from protocol.messages import GossipEnvelope
from tests.curation.room import ONE, OTHER, PEER, SEVERAL, Room, annotators
from tests.ledger.world import PEOPLE, PlainJobs, World
from tests.peer.nodes import Pack, Shell
from tests.sim.keys import FastSigner, FastVerifier
from transport.network import DataReceived

(ANN, BOB) = annotators(2)
NOISE = bytes(range(64))


@pytest.fixture
def room() -> Room:
    return Room()


def _enrolments(room: Room, count: int, peer: FastSigner = PEER, name: str = "ann") -> list[Any]:
    return [room.enrolment(FastSigner(f"{name} {number}"), peer, name) for number in range(count)]


@pytest.mark.parametrize("kind", ["enrolments", "leases", "commits"])
def test_one_false_signature_refuses_a_batch_whatever_the_state_says_of_the_statement(room: Room, kind: str) -> None:
    """This holds for statements that could act and for statements that would be skipped."""
    true: dict[str, Callable[[], Any]] = {
        "enrolments": lambda: room.enrolment(BOB),
        "leases": lambda: room.wish(BOB),  # this annotator is not enrolled
        "commits": lambda: room.commit(BOB, bytes(32), (0,)),  # the assignment does not exist
    }
    statement = true[kind]()
    many = _enrolments(room, BATCH_MAX - 1)
    batch = {"enrolments": many, kind: [statement]} if kind != "enrolments" else {kind: [*many, statement]}
    before = room.state
    after = room.batch(**batch)
    assert after.passed_over == (kind != "enrolments") and after.annotators_count == BATCH_MAX - (kind != "enrolments")
    batch[kind] = [*batch[kind][:-1], replace(statement, signature=NOISE)]
    signed = room.tx(PEER, "curation/statements", StatementBatch(**{name: tuple(items) for name, items in batch.items()}))
    for curation in (before.modules["curation"], after):
        with pytest.raises(RemoteProtocolError, match="bad-signature"):
            room.rules.apply_transaction(room.state.with_modules(curation=curation), signed)


def _full(room: Room, batches: int, last: int) -> list[Signed]:
    """Return `batches` batches of 512 enrolments each, and one batch of `last` enrolments."""
    return [
        room.tx(
            PEER, "curation/statements", StatementBatch(enrolments=tuple(_enrolments(room, count, name=f"n{ahead}"))), ahead + 1
        )
        for ahead, count in enumerate([BATCH_MAX] * batches + [last])
    ]


def test_voters_refuse_a_block_with_more_signatures_and_a_leader_makes_none(room: Room) -> None:
    full = COST_PER_BLOCK_MAX // (BATCH_MAX + 1)
    last = COST_PER_BLOCK_MAX - full * (BATCH_MAX + 1) - 1
    fits, one_more = _full(room, full, last), _full(room, full, last + 1)
    assert room.rules.why_body_refused(room.state, codec.encode(BlockBody((), (), tuple(fits)))) is None
    assert "signature checks" in (room.rules.why_body_refused(room.state, codec.encode(BlockBody((), (), tuple(one_more)))) or "")
    for signed in one_more:
        assert room.ledger.mempool.add_transaction(signed)
    body = room.ledger.make_body(room.state.height + 1, 0)
    assert body is not None and decode_body(body).transactions == tuple(one_more[:full])
    assert room.ledger.why_body_refused(room.state.height + 1, body, PEER.public) is None


class Fresh(FastVerifier):
    """A verifier without a cache that counts the signatures that it verifies."""

    count = 0

    def verify(self, public: bytes, data: bytes, signature: bytes) -> bool:
        self.count += 1
        return super().verify(public, data, signature)


def test_statements_of_a_full_block_are_verified_once_from_arrival_to_decision(room: Room) -> None:
    verifier = Fresh()
    room.rules.verifier = verifier
    signed = _full(room, 3, 100)
    statements = 3 * BATCH_MAX + 100
    for each in signed:
        room.rules.check_embedded_statements(each, room.rules.open_transaction(each))
    assert verifier.count == statements + len(signed)
    body = codec.encode(BlockBody((), (), tuple(signed)))
    for _ in range(3):
        assert room.rules.why_body_refused(room.state, body) is None
        with pytest.raises(Refused):
            room.rules.apply_transaction(room.state, signed[-1])
    room.decide_body(body)
    assert room.curation.annotators_count == statements
    assert verifier.count < statements + 20 * len(signed), "only the transactions themselves are verified again"


# On a link -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pack() -> Pack:
    pack = Pack(modules=lambda: (CurationModule(),))
    pack[1].say(pack.world.tx(PEER, "member/register", RegisterRoles(("annotator",))))
    pack.until(lambda shell: shell.node.state.members.members[PEER.public].roles == ("annotator",))
    return pack


def _batch(pack: Pack, *enrolments: Any, nonce: int = 2) -> Signed:
    return pack.world.tx(PEER, "curation/statements", StatementBatch(enrolments=enrolments), nonce)


def _hears(shell: Shell, sender: FastSigner, signed: Signed) -> bool:
    """Return True if the sender keeps its link."""
    turn = shell.turn(DataReceived(sender.public, codec.encode(GossipEnvelope(signed))))
    return all(fault.peer != sender.public for fault in turn.faults)


def test_a_batch_with_a_false_signature_costs_its_sender_the_link_and_takes_no_memory(pack: Pack, room: Room) -> None:
    assert pack.world.chain == room.chain, "the same network"
    true, _ = room.enrolment(ANN), pack[0].said(GossipEnvelope)
    assert not _hears(pack[0], PEOPLE[2], _batch(pack, true, replace(room.enrolment(BOB), signature=NOISE))), (
        "the sender pays, whoever signed the batch"
    )
    assert len(pack[0].node.ledger.mempool) == 0 and not pack[0].said(GossipEnvelope)
    assert _hears(pack[0], PEER, _batch(pack, true)) and len(pack[0].node.ledger.mempool) == 1


def test_a_batch_of_statements_that_do_not_act_costs_nobody_a_link(pack: Pack, room: Room) -> None:
    enrolment = room.enrolment(ANN)
    pack[1].say(_batch(pack, enrolment))
    pack.until(lambda shell: shell.node.state.modules["curation"].annotators_count == 1)
    assert _hears(pack[0], PEER, _batch(pack, enrolment, nonce=3)) and len(pack[0].node.ledger.mempool) == 1


def test_a_leader_that_puts_a_false_signature_into_its_block_loses_its_view(pack: Pack, room: Room) -> None:
    body = codec.encode(BlockBody((), (), (_batch(pack, replace(room.enrolment(BOB), signature=NOISE)),)))
    ledger = pack[0].node.ledger
    problem = ledger.why_body_refused(ledger.state.height + 1, body, PEOPLE[2].public)
    assert problem is not None and "bad-signature" in problem


def test_a_statement_of_one_peer_is_false_in_another_peers_batch(room: Room) -> None:
    room.project(ONE)
    assert "bad-signature: enrol" in room.refused(
        OTHER, "curation/statements", StatementBatch(enrolments=(room.enrolment(ANN, PEER),))
    )


# Work without signatures -------------------------------------------------------------------------------------------------


def test_only_the_first_batch_of_a_block_looks_at_what_expires(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a thousand empty batches would cost a thousand times as much as one."""
    monkeypatch.setattr("curation.ledger.curation_module.EXPIRED_PER_BATCH_MAX", 1)
    room.project(SEVERAL, tasks=3)
    leases = [lease for (lease,) in room.leased(ANN, BOB)]
    room.later(LEASE_MS + 1)
    room.decide()
    room.decide(*(room.tx(PEER, "curation/statements", StatementBatch(), ahead) for ahead in (1, 2, 3)))
    assert [room.assignment(lease).state for lease in leases].count(AssignmentState.EXPIRED) == 1
    room.batch()
    assert [room.assignment(lease).state for lease in leases].count(AssignmentState.EXPIRED) == 2


def test_the_draws_of_a_batch_look_at_a_bounded_number_of_tasks(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.project(SEVERAL, tasks=3)
    people = annotators(4)
    room.leased(*people, count=3)  # each person has all begun tasks
    monkeypatch.setattr("curation.ledger.curation_module.DRAW_LOOKS_MAX", 0)
    monkeypatch.setattr("curation.ledger.curation_module.LOOKS_FOR_DRAW", 1)
    looked: list[bytes] = []
    real = CurationChanges._number_at

    def number_at(self: CurationChanges, project: bytes, which: bytes, place: int) -> int:
        looked.append(project)
        return real(self, project, which, place)

    monkeypatch.setattr(CurationChanges, "_number_at", number_at)
    before = [room.person(who).leases for who in people]
    room.batch(leases=[room.wish(who) for who in people])
    assert [room.person(who).leases for who in people] == before
    assert len(looked) <= len(people)


def test_the_dearest_batch_fits_into_a_block(room: Room) -> None:
    """Otherwise the batch would wait for ever, and its peer with it."""
    wishes = StatementBatch(leases=tuple(room.wish(who, LEASES_MAX) for who in annotators(BATCH_MAX)))
    for batch in (wishes, StatementBatch(openings=(room.opening(ANN, bytes(32), (0,)),) * BATCH_MAX)):
        signed = room.tx(PEER, "curation/statements", batch)
        assert room.rules.transaction_traits(signed.signer, room.rules.open_transaction(signed)).cost <= COST_PER_BLOCK_MAX
        assert room.problem(signed) is None


def test_small_batches_of_a_block_look_at_no_more_tasks_than_its_cost_allows(room: Room) -> None:
    """Each batch may look at `DRAW_LOOKS_MAX` tasks, even if it asks for few draws. A thousand such batches took 6 s."""
    signed = room.tx(PEER, "curation/statements", StatementBatch(leases=(room.wish(ANN),)))
    cost = room.rules.transaction_traits(signed.signer, room.rules.open_transaction(signed)).cost
    batches = min(COST_PER_BLOCK_MAX // cost, TRANSACTIONS_PER_BLOCK_MAX)
    assert batches * (DRAW_LOOKS_MAX + LOOKS_FOR_DRAW) <= COST_PER_BLOCK_MAX * LOOKS_FOR_COST


# Blocks that are new to this peer ----------------------------------------------------------------------------------------


def _left_after_verification(world: World, body: BlockBody) -> int:
    """Return the number of signatures that the judgement of a block verifies after `preverify_signatures`."""
    fresh = Fresh()
    rules = LedgerRules(world.genesis, CachingVerifier(fresh), (*core_modules(PlainJobs()), CurationModule()))
    rules.preverify_signatures(body)
    verified, fresh.count = fresh.count, 0
    assert verified and rules.why_body_refused(world.state, codec.encode(body)) is None
    return fresh.count


def test_a_batch_of_a_key_that_is_new_in_its_block_is_verified_ahead(room: Room) -> None:
    """No peer holds such a batch earlier, since its author is not a member yet."""
    new = PEOPLE[5]
    batches = [
        room.tx(
            new,
            "curation/statements",
            StatementBatch(enrolments=tuple(_enrolments(room, BATCH_MAX, new, f"n{number}"))),
            1 + number,
        )
        for number in range(4)
    ]
    assert _left_after_verification(room, BlockBody((), (), (room.rotation(PEER, new), *batches))) == 1, "of the rotation alone"
    register = room.tx(new, "member/register", RegisterRoles(("annotator",)), 2)
    batch = room.tx(new, "curation/statements", StatementBatch(enrolments=tuple(_enrolments(room, BATCH_MAX, new))), 3)
    left = _left_after_verification(room, BlockBody((), (), (room.admission(new), register, batch)))
    assert left == 2, "of the invitation and its token"


def test_closings_and_evidence_are_verified_ahead() -> None:
    world = World()
    assert _left_after_verification(world, BlockBody((world.closing(world.start()),), (world.double(PEOPLE[3]),), ())) == 0


def test_closings_and_evidence_are_verified_ahead_of_a_false_transaction() -> None:
    """The verification of a body opens its closings and evidence first, independent of its transactions."""
    world = World()
    closing, evidence = world.closing(world.start()), world.double(PEOPLE[3])
    false = replace(world.tx(PEOPLE[1], "member/register", RegisterRoles(("annotator",))), signature=NOISE)
    fresh = Fresh()
    rules = LedgerRules(world.genesis, CachingVerifier(fresh), core_modules(PlainJobs()))
    body = BlockBody((closing,), (evidence,), (false,))
    with pytest.raises(RemoteProtocolError, match="bad-signature"):
        rules.preverify_signatures(body)
    verified, fresh.count = fresh.count, 0
    assert verified and "bad-signature" in (rules.why_body_refused(world.state, codec.encode(body)) or "")
    assert fresh.count == 1, "of the false one alone"
