"""The blocks that one peer proposes and prepares: ordered transactions, closings of rounds, and empty blocks when due."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consensus.block import BODY_BYTES_MAX
from ledger.blocks import application as ledger_module
from ledger.blocks import mempool as pool_module
from ledger.blocks.application import LedgerApplication
from ledger.core.genesis import TRAINER
from ledger.jobs import StartJob
from ledger.ledger_state import BlockBody, CurrentState, LedgerState, decode_body
from ledger.members import ApproveVoter, RegisterRoles, ResignAsVoter, StandAsVoter
from protocol import codec
from protocol.identity import Signed
from protocol.messages import CutOff
from protocol.verdicts import Verdict
from rounds.round_terms import signed_body_digest
from tests.ledger.world import LANGUAGE, PEOPLE, SCRATCH, World
from tests.sim.keys import FastSigner

ACCEPT = Verdict.ACCEPT


@pytest.fixture
def world() -> World:
    return World()


def propose(world: World) -> bytes | None:
    return world.ledger.make_body(world.state.height + 1, 0)


def registrations(world: World, person: FastSigner, count: int) -> list[Signed]:
    return [world.tx(person, "member/register", RegisterRoles(()), ahead=i + 1) for i in range(count)]


def settle(world: World, most: int = 20) -> int:
    """Decide the proposed blocks until none is proposed. Return their number."""
    for count in range(most):
        assert world.ledger.has_work() == (propose(world) is not None)
        body = propose(world)
        if body is None:
            return count
        assert world.ledger.why_body_refused(world.state.height + 1, body, b"") is None
        world.decide_body(body)
        world.ledger.mempool.prune_transactions(world.rules, world.state)
    raise AssertionError("blocks without end")


# Pool -----------------------------------------------------------------------------------------------------------------


def test_transactions_are_put_into_an_order_in_which_they_apply_however_they_came(world: World) -> None:
    waiting = registrations(world, PEOPLE[0], 4)
    for signed in (waiting[2], waiting[0], waiting[3], waiting[1]):
        world.ledger.mempool.add_transaction(signed)
    assert world.ledger.mempool.select_transactions(world.rules, world.state) == tuple(waiting)


def test_a_transaction_that_follows_another_authors_is_put_behind_it(world: World) -> None:
    world.decide(world.admission(PEOPLE[5]), empty_after=2)
    approve = world.tx(PEOPLE[0], "member/approve", ApproveVoter(PEOPLE[5].public))
    stand = world.tx(PEOPLE[5], "member/stand", StandAsVoter(1, world.state.certified_roots[1]))
    world.ledger.mempool.add_transaction(approve)
    world.ledger.mempool.add_transaction(stand)
    assert world.ledger.mempool.select_transactions(world.rules, world.state) == (stand, approve)


def test_a_gap_in_the_nonces_waits_and_does_not_hold_up_the_others(world: World) -> None:
    first, _, third = registrations(world, PEOPLE[0], 3)
    other = registrations(world, PEOPLE[1], 1)[0]
    for signed in (third, first, other):
        world.ledger.mempool.add_transaction(signed)
    assert set(world.ledger.mempool.select_transactions(world.rules, world.state)) == {first, other}


def test_a_block_has_bounds_of_bytes_and_of_transactions(world: World) -> None:
    waiting = registrations(world, PEOPLE[0], 5)
    for signed in waiting:
        world.ledger.mempool.add_transaction(signed)
    size = len(waiting[0].body) + pool_module.SIGNED_BYTES
    select = world.ledger.mempool.select_transactions
    assert select(world.rules, world.state, size_max=3 * size - 1) == tuple(waiting[:2])
    assert select(world.rules, world.state, count_max=3) == tuple(waiting[:3])


def test_what_was_decided_expired_or_refused_is_forgotten_and_what_may_still_come_stays(world: World) -> None:
    decided, other, ahead = registrations(world, PEOPLE[0], 3)
    refused = world.tx(PEOPLE[1], "member/approve", ApproveVoter(PEOPLE[9].public))
    expiring = world.tx(PEOPLE[2], "member/register", RegisterRoles(()), ahead=2, expires=1)
    pool = world.ledger.mempool
    for signed in (decided, ahead, refused, expiring):
        assert pool.add_transaction(signed)
    world.decide(decided)
    gone = {signed.signer: reason for signed, reason in pool.prune_transactions(world.rules, world.state)}
    assert set(gone) == {person.public for person in PEOPLE[:3]} and list(pool) == [ahead]
    assert "is not a candidate" in gone[PEOPLE[1].public]
    assert pool.add_transaction(other) and pool.select_transactions(world.rules, world.state) == (other, ahead)


def test_a_transaction_waits_once(world: World) -> None:
    signed = registrations(world, PEOPLE[0], 1)[0]
    assert world.ledger.mempool.add_transaction(signed) and not world.ledger.mempool.add_transaction(signed)
    assert not world.ledger.mempool.add_transaction(replace(signed, signature=bytes(64))), (
        "another signature makes no other transaction"
    )
    assert len(world.ledger.mempool) == 1


def test_a_pool_full_of_hopeless_transactions_is_looked_through_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that sends its transactions backwards must not cost the square of their number."""
    for signed in reversed(registrations(world, PEOPLE[0], 60)):
        world.ledger.mempool.add_transaction(signed)
    calls = 0
    apply = world.rules.apply_transaction

    def counted(state: LedgerState, signed: Signed) -> LedgerState:
        nonlocal calls
        calls += 1
        return apply(state, signed)

    monkeypatch.setattr(world.rules, "apply_transaction", counted)
    assert len(world.ledger.mempool.select_transactions(world.rules, world.state)) == 60 and calls == 60
    assert world.ledger.has_work() and calls == 61


# Empty blocks ---------------------------------------------------------------------------------------------------------


def test_a_new_network_has_nothing_to_decide(world: World) -> None:
    assert not world.ledger.has_work() and propose(world) is None


def test_one_empty_block_certifies_the_last_root_and_no_more_follow(world: World) -> None:
    world.ledger.mempool.add_transaction(registrations(world, PEOPLE[0], 1)[0])
    assert settle(world) == 2 and world.ledger.certified_root == world.state.state_root


def test_a_change_of_voters_is_followed_by_empty_blocks_until_it_acts(world: World) -> None:
    world.ledger.mempool.add_transaction(world.tx(PEOPLE[0], "member/resign", ResignAsVoter()))
    assert settle(world) == 4
    members = world.state.members
    assert members.previous == members.voters == members.upcoming and PEOPLE[0].public not in members.voters
    assert world.ledger.certified_root == world.state.state_root


def test_an_open_round_is_not_certified_by_empty_blocks_but_its_last_root_is(world: World) -> None:
    key = world.start(spec=LANGUAGE + b":1")
    assert not world.ledger.has_work(), "its closing will certify the root"
    world.vote(key, dict.fromkeys(world.job(key).trainers, ACCEPT))
    assert settle(world) == 2
    assert world.ledger.certified_root == world.state.state_root


def test_an_invitation_that_is_forgotten_starts_no_endless_chain(world: World) -> None:
    world.ledger.mempool.add_transaction(world.admission(PEOPLE[5], expires=world.state.time_ms))
    assert settle(world) <= 4 and world.state.members.used_tokens == {}


# Propose and check ----------------------------------------------------------------------------------------------------


def test_a_round_is_closed_as_soon_as_it_can_be(world: World) -> None:
    key = world.start()
    trainers, voters = world.job(key).trainers, world.job(key).voters
    world.vote(key, dict.fromkeys(trainers, ACCEPT), voters[:2])
    assert not world.ledger.has_work() and propose(world) is None
    world.vote(key, dict.fromkeys(trainers, ACCEPT), voters[:3])
    body = propose(world)
    assert body is not None and world.ledger.has_work()
    assert world.ledger.why_body_refused(world.state.height + 1, body, b"") is None


def test_the_next_round_is_closed_by_what_was_said_in_it(world: World) -> None:
    key = world.start(spec=LANGUAGE + b":9")
    for number in (0, 1):
        world.vote(key, dict.fromkeys(world.job(key).trainers, ACCEPT))
        body = propose(world)
        assert body is not None and [closing.round for closing in decode_body(body).round_certificates] == [number]
        world.decide_body(body)


def test_what_could_be_decided_before_a_block_is_looked_at_anew_after_it(world: World) -> None:
    signed = registrations(world, PEOPLE[0], 1)[0]
    world.ledger.mempool.add_transaction(signed)
    assert world.ledger.has_work()
    for transactions in ((signed,), ()):
        world.decide(*transactions)
    assert not world.ledger.has_work() and propose(world) is None


def test_a_body_for_another_height_or_that_breaks_a_rule_is_not_prepared(world: World) -> None:
    closing = world.closing(world.start())
    sound, broken = codec.encode(BlockBody((closing,), (), ())), codec.encode(BlockBody((replace(closing, round=3),), (), ()))
    height = world.state.height + 1
    assert world.ledger.why_body_refused(height, sound, b"") is None
    assert "does not follow" in (world.ledger.why_body_refused(height + 1, sound, b"") or "")
    assert "is not open" in (world.ledger.why_body_refused(height, broken, b"") or "")


def test_a_body_that_leaves_out_a_ballot_of_our_cut_off_is_not_prepared(world: World) -> None:
    key = world.start()
    job, book = world.job(key), world.ledger.rounds[key]
    trainers = job.trainers
    world.vote(key, {trainers[0]: ACCEPT}, job.voters[:2])
    world.vote(key, {trainers[0]: Verdict.REPLAY}, job.voters[2:3])
    for voter in job.voters[1:3]:
        signed = world.cut_off(key, voter)
        book.add_cut_off(signed, codec.decode_message(signed.body, (CutOff,)))
    body = propose(world)
    assert body is not None and world.ledger.why_body_refused(world.state.height + 1, body, b"") is None
    world.vote(key, {trainers[0]: ACCEPT}, job.voters[3:])
    mine = CutOff(key, 0, tuple(sorted(signed_body_digest(s) for s in book.signed_ballots.values())))
    book.cut_offs[PEOPLE[0].public] = mine
    assert "omits 1 ballots" in (world.ledger.why_body_refused(world.state.height + 1, body, b"") or "")


def test_closings_that_do_not_fit_wait_for_the_next_block_and_transactions_take_what_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [world.start(PEOPLE[i], SCRATCH) for i in range(3)]
    sizes = [len(codec.encode(world.closing(key))) for key in sorted(keys)]
    for signed in registrations(world, PEOPLE[3], 9):
        world.ledger.mempool.add_transaction(signed)
    room = sum(sizes[:2]) + ledger_module.BODY_FIXED_BYTES + 400
    monkeypatch.setattr(ledger_module, "BODY_BYTES_MAX", room)
    encoded = propose(world)
    assert encoded is not None and len(encoded) <= room
    body = decode_body(encoded)
    assert len(body.round_certificates) == 2 and 1 <= len(body.transactions) < 9
    world.decide_body(encoded)
    assert len(decode_body(propose(world) or b"").round_certificates) == 1


actions = st.lists(
    st.tuples(st.sampled_from(["register", "admit", "leave", "stand", "approve", "start", "vote", "block"]), st.integers(0, 7)),
    max_size=25,
)


@given(actions)
@settings(max_examples=40)
def test_whoever_has_work_proposes_a_body_that_every_peer_with_the_same_state_prepares(script: list[tuple[str, int]]) -> None:
    world = World()
    for action, number in script:
        act(world, action, number)
        body = propose(world)
        assert world.ledger.has_work() == (body is not None)
        if body is not None:
            assert len(body) <= BODY_BYTES_MAX
            other = LedgerApplication(world.rules, CurrentState(world.state), world.ledger.certified_root)
            assert other.why_body_refused(world.state.height + 1, body, b"") is None
    settle(world)


def act(world: World, action: str, number: int) -> None:
    person, newcomer = PEOPLE[number], PEOPLE[4 + number]
    running = sorted(world.state.jobs.running())
    match action:
        case "register":
            world.ledger.mempool.add_transaction(
                world.tx(person, "member/register", RegisterRoles((TRAINER,)), ahead=1 + number % 2)
            )
        case "admit":
            world.ledger.mempool.add_transaction(world.admission(newcomer, token=FastSigner(f"token {number % 3}")))
        case "leave":
            world.ledger.mempool.add_transaction(world.tx(person, "member/resign", ResignAsVoter()))
        case "stand":
            shown = max(world.state.height - 1, 0)
            root = world.state.certified_roots.get(shown, bytes(32))
            world.ledger.mempool.add_transaction(world.tx(newcomer, "member/stand", StandAsVoter(shown, root)))
        case "approve":
            for voter in PEOPLE[:4]:
                world.ledger.mempool.add_transaction(world.tx(voter, "member/approve", ApproveVoter(newcomer.public)))
        case "start":
            world.ledger.mempool.add_transaction(world.tx(person, "job/start", StartJob((SCRATCH, LANGUAGE)[number % 2])))
        case "vote" if running:
            key = running[number % len(running)]
            verdict = (ACCEPT, Verdict.REPLAY)[number % 2]
            world.vote(key, dict.fromkeys(world.job(key).trainers, verdict), world.job(key).voters[: number + 1])
        case "block" if (body := propose(world)) is not None:
            world.decide_body(body)
            world.ledger.mempool.prune_transactions(world.rules, world.state)
