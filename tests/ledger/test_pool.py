"""The mempool depends on no order of arrival between two blocks, so that no leader lacks an awaited transaction."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.blocks import mempool as pool_module
from ledger.blocks.application import LedgerApplication
from ledger.blocks.mempool import (
    PENDING_PER_MEMBER_MAX,
    PENDING_STRANGERS_MAX,
    REFUSED_PER_MEMBER_MAX,
    SELECTION_PASSES_MAX,
    SIGNED_BYTES,
    Mempool,
    transaction_digest,
)
from ledger.core.module import BlockContext
from ledger.ledger_state import CurrentState, LedgerRules, LedgerState, OpenedTransaction, TransactionTraits, core_modules
from ledger.members import ApproveVoter, RegisterRoles, RenameMember
from protocol.identity import Signed
from protocol.limits import COST_PER_BLOCK_MAX
from tests.ledger.world import PEOPLE, PlainJobs, World
from tests.sim.keys import FastSigner

AUTHOR, OTHER = PEOPLE[0], PEOPLE[1]


@pytest.fixture
def world() -> World:
    return World()


def registration(world: World, ahead: int = 1, roles: int = 0, person: FastSigner = AUTHOR) -> Signed:
    """Return a registration. Registrations with other roles have other sizes."""
    return world.tx(person, "member/register", RegisterRoles(("trainer", "voter-with-a-long-name")[:roles]), ahead)


def one_of(world: World, kind: str, ahead: int) -> Signed:
    """Return a transaction of the author of this kind. A refused one approves a member that is no candidate."""
    if kind == "refused":
        return world.tx(AUTHOR, "member/approve", ApproveVoter(PEOPLE[6].public), ahead)
    return registration(world, ahead, roles=int(kind == "larger"))


def far(world: World, count: int, person: FastSigner = AUTHOR) -> list[Signed]:
    """Return transactions with far nonces, which cannot be next."""
    return [registration(world, ahead, person=person) for ahead in range(2, 2 + count)]


def arrived(world: World, transactions: list[Signed]) -> LedgerApplication:
    """Return the mempool of a peer at which they arrived in this order."""
    ledger = LedgerApplication(world.rules, CurrentState(world.state), world.ledger.certified_root)
    for signed in transactions:
        ledger.mempool.add_transaction(signed)
    return ledger


named = st.tuples(st.sampled_from(["small", "larger", "refused"]), st.integers(1, 5))


@given(st.data())
@settings(max_examples=100)
def test_pools_that_got_the_same_transactions_in_any_order_hold_and_offer_the_same(data: st.DataObject) -> None:
    """Invariant: if one honest voter waits for a transaction of a member, then every honest leader that got the same ones has it.

    Several of them have one nonce, some can never apply, and there are more of them, in number or in bytes, than there is room.
    Blocks come between, after each of which all have heard the same again.
    """
    world = World()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "PENDING_PER_MEMBER_MAX", 4)
        patch.setattr(pool_module, "PENDING_BYTES_PER_MEMBER_MAX", 4 * (len(registration(world).body) + SIGNED_BYTES) + 10)
        first, second = (LedgerApplication(world.rules, CurrentState(world.state), world.ledger.certified_root) for _ in range(2))
        for chosen in data.draw(st.lists(st.sets(named, max_size=7), min_size=1, max_size=4)):
            transactions = [one_of(world, kind, ahead) for kind, ahead in sorted(chosen)]
            for ledger in (first, second):
                for signed in data.draw(st.permutations(transactions)):
                    ledger.mempool.add_transaction(signed)
            assert set(first.mempool) == set(second.mempool)
            assert first.has_work() == second.has_work()
            assert len(first.mempool.select_transactions(world.rules, world.state)) == len(
                second.mempool.select_transactions(world.rules, world.state)
            )
            world.decide(*first.mempool.select_transactions(world.rules, world.state))
            for ledger in (first, second):
                ledger.advance_state(world.state, world.ledger.certified_root)
                ledger.mempool.prune_transactions(world.rules, world.state)


def test_a_member_cannot_keep_its_next_transaction_from_a_leader_by_filling_its_places_there(world: World) -> None:
    """Invariant: as above. The leader got those of far nonces first, the other voters the next one."""
    flood, following = far(world, PENDING_PER_MEMBER_MAX), registration(world)
    leader, other = arrived(world, [*flood, following]), arrived(world, [following, *flood])
    assert leader.has_work() == other.has_work() and set(leader.mempool) == set(other.mempool)


def test_whose_transactions_are_too_many_loses_all_and_is_heard_again_after_the_next_block(world: World) -> None:
    pool = world.ledger.mempool
    within = far(world, PENDING_PER_MEMBER_MAX)
    assert all(pool.add_transaction(signed) for signed in within) and len(pool) == PENDING_PER_MEMBER_MAX, "as many as fit stay"
    assert pool.add_transaction(registration(world, person=OTHER))
    assert pool.add_transaction(registration(world)), "it is passed on, so that others find the same"
    assert [signed.signer for signed in pool] == [OTHER.public] and pool.quota_share(AUTHOR.public) == 0
    assert not pool.add_transaction(registration(world, roles=1)) and not pool.add_transaction(within[0])
    world.decide()
    pool.prune_transactions(world.rules, world.state)
    assert pool.add_transaction(registration(world, roles=1)) and pool.quota_share(AUTHOR.public) > 0


def test_large_transactions_are_too_many_sooner(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PENDING_BYTES_PER_MEMBER_MAX", 2 * (len(registration(world).body) + SIGNED_BYTES))
    pool = Mempool()
    assert all(pool.add_transaction(signed) for signed in far(world, 2)) and len(pool) == 2
    assert pool.add_transaction(registration(world)) and len(pool) == 0


@pytest.mark.parametrize("descending", [False, True])
def test_of_a_members_flood_no_more_is_passed_on_between_two_blocks_than_fits_and_one(world: World, descending: bool) -> None:
    """Invariant: the transactions of one member that all others forward are bounded, for any order of its nonces."""
    flood = sorted(far(world, 3 * PENDING_PER_MEMBER_MAX), key=lambda signed: world.rules.open_transaction(signed).nonce)
    added = [world.ledger.mempool.add_transaction(signed) for signed in (reversed(flood) if descending else flood)]
    assert sum(added) == PENDING_PER_MEMBER_MAX + 1


def test_who_has_little_waiting_is_heard_though_others_have_filled_the_pool(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant: in a full mempool the member with the most transactions loses one, so that a few cannot exclude the others."""
    monkeypatch.setattr(pool_module, "TRANSACTIONS_PENDING_MAX", 9)
    pool, mine = Mempool(), registration(world, person=PEOPLE[3])
    for person, count in ((PEOPLE[0], 4), (PEOPLE[1], 5)):
        assert all(pool.add_transaction(signed) for signed in far(world, count, person))
    assert not pool.add_transaction(world.admission(PEOPLE[9]), member=False), "a stranger has to wait"
    assert pool.add_transaction(mine) and mine in pool
    assert {key: len(list(of)) for key, of in groupby(pool, lambda signed: signed.signer)} == {
        PEOPLE[0].public: 4,
        PEOPLE[3].public: 1,
    }


def test_who_fills_the_memory_with_large_transactions_makes_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant: as above, for bytes. At no time does the mempool hold more than its bound and one transaction."""
    small, large = registration(world, person=OTHER), registration(world, roles=2)
    monkeypatch.setattr(pool_module, "PENDING_BYTES_MAX", 3 * (len(large.body) + SIGNED_BYTES))
    pool = Mempool()
    assert all(pool.add_transaction(registration(world, ahead, roles=2)) for ahead in (1, 2, 3)) and len(pool) == 3
    assert pool.add_transaction(small) and list(pool) == [small]


def test_strangers_share_a_small_part_and_take_no_members_place(world: World) -> None:
    pool = Mempool()
    added = [
        pool.add_transaction(world.admission(FastSigner(f"stranger {i}")), member=False) for i in range(PENDING_STRANGERS_MAX + 5)
    ]
    assert sum(added) == PENDING_STRANGERS_MAX == len(pool)
    assert all(pool.add_transaction(signed) for signed in far(world, PENDING_PER_MEMBER_MAX))
    assert len(pool) == PENDING_PER_MEMBER_MAX + PENDING_STRANGERS_MAX


class CountingRules(LedgerRules):
    """Rules that count the applied transactions."""

    applied = 0

    def apply_transaction(self, state: LedgerState, signed: Signed) -> LedgerState:
        self.applied += 1
        return super().apply_transaction(state, signed)


def test_refused_transactions_of_one_nonce_cost_a_leader_few_tries(world: World) -> None:
    """A refusal may come after costly work, which no bound of a block counts."""
    rules = CountingRules(world.genesis, world.rules.verifier, core_modules(PlainJobs()))
    ledger = LedgerApplication(rules, CurrentState(world.state), world.ledger.certified_root)
    approvals = [
        world.tx(AUTHOR, "member/approve", ApproveVoter(bytes([number]) * 32)) for number in range(PENDING_PER_MEMBER_MAX)
    ]
    last = registration(world, person=OTHER)
    for signed in (*approvals, last):
        ledger.mempool.add_transaction(signed)
    assert ledger.mempool.select_transactions(rules, world.state) == (last,)
    assert rules.applied <= 1 + REFUSED_PER_MEMBER_MAX


class CostlyRules(CountingRules):
    """Rules that sum up the cost of the transactions that a module judges."""

    cost = 0

    def _act(self, state: LedgerState, read: OpenedTransaction, context: BlockContext) -> tuple[LedgerState, tuple[Any, ...]]:
        member = state.members.members[read.said.author]
        self.cost += read.cost if read.said.transaction.nonce == member.nonce + 1 else 0
        return super()._act(state, read, context)


def crowded(refused: bool) -> tuple[World, CostlyRules, LedgerApplication]:
    """Return a mempool in which ten members have the maximum of transactions with their next nonce, worth several blocks."""
    world = World(voters=10)
    rules = CostlyRules(world.genesis, world.rules.verifier, core_modules(PlainJobs()))
    ledger = LedgerApplication(rules, CurrentState(world.state), world.ledger.certified_root)
    contents: list[Any] = [ApproveVoter(bytes([number]) * 32) if refused else RenameMember(f"n{number}") for number in range(256)]
    for person in PEOPLE[:10]:
        for content in contents[:PENDING_PER_MEMBER_MAX]:
            ledger.mempool.add_transaction(world.tx(person, "member/approve" if refused else "member/rename", content))
    return world, rules, ledger


@pytest.mark.parametrize("refused", [True, False])
def test_after_a_block_waiting_transactions_are_tried_for_the_cost_of_one_block(refused: bool) -> None:
    world, rules, ledger = crowded(refused)
    waiting = list(ledger.mempool)
    cost = sum(rules.transaction_traits(signed.signer, rules.open_transaction(signed)).cost for signed in waiting)
    calls = -(-cost // COST_PER_BLOCK_MAX)
    assert calls > 3
    gone: list[Signed] = []
    for number in range(1, calls + 1):
        gone += [signed for signed, _ in ledger.mempool.prune_transactions(rules, world.state)]
        assert rules.cost <= number * COST_PER_BLOCK_MAX
    assert (gone == waiting and not len(ledger.mempool)) if refused else (not gone and list(ledger.mempool) == waiting)
    assert rules.cost == cost, "each is tried in its turn"


def test_a_notice_costs_no_more_than_a_block() -> None:
    """Refused transactions that are not pruned yet are tried as well."""
    world, rules, ledger = crowded(refused=True)
    late = replace(world.state, height=2)
    assert ledger.mempool.overdue_transactions(rules, late) == () and 0 < rules.cost <= COST_PER_BLOCK_MAX


def test_costly_transactions_keep_no_cheap_one_out_of_a_notice(world: World) -> None:
    """Two members keep their old transactions waiting: each one fits a block, but both together cost more than a block."""
    costs = {person.public: COST_PER_BLOCK_MAX * share // 10 for person, share in ((AUTHOR, 8), (OTHER, 9))}
    pool = Mempool(traits=lambda author, transaction: TransactionTraits(cost=costs.get(author, 1)))
    hogs = [registration(world, person=person) for person in (AUTHOR, OTHER)]
    late = [registration(world, person=person) for person in PEOPLE[2:4]]
    for signed in hogs:
        pool.add_transaction(signed)
    pool.height = 1
    for signed in late:
        pool.add_transaction(signed)
    noticed = pool.overdue_transactions(world.rules, replace(world.state, height=3))
    assert noticed == tuple(sorted(map(transaction_digest, (hogs[0], *late))))


@pytest.mark.parametrize("costly_first", [True, False])
def test_a_notice_names_the_cheapest_of_one_height(world: World, costly_first: bool) -> None:
    costs = {AUTHOR.public: COST_PER_BLOCK_MAX, OTHER.public: COST_PER_BLOCK_MAX - 1}
    pool = Mempool(traits=lambda author, transaction: TransactionTraits(cost=costs.get(author, 1)))
    arriving = [registration(world, person=person) for person in (AUTHOR, OTHER, PEOPLE[2])]
    for signed in arriving if costly_first else reversed(arriving):
        pool.add_transaction(signed)
    noticed = pool.overdue_transactions(world.rules, replace(world.state, height=2))
    assert noticed == tuple(sorted(map(transaction_digest, arriving[1:])))


def test_a_costly_transaction_is_tried_however_much_it_costs(world: World) -> None:
    traits = TransactionTraits(cost=2 * COST_PER_BLOCK_MAX)
    pool = Mempool(traits=lambda author, transaction: traits)
    for person in PEOPLE[:3]:
        pool.add_transaction(world.tx(person, "member/approve", ApproveVoter(bytes(32))))
    assert [len(pool.prune_transactions(world.rules, world.state)) for _ in range(4)] == [1, 1, 1, 0]


def test_a_noticed_transaction_is_offered_behind_refused_ones_of_its_nonce(world: World) -> None:
    """Otherwise a member could make the blocks of every leader fail the check for omitted transactions."""
    pool = arrived(world, []).mempool
    refused = [
        world.tx(AUTHOR, "member/approve", ApproveVoter(bytes([number]) * 32)) for number in range(PENDING_PER_MEMBER_MAX - 1)
    ]
    good = registration(world)
    for signed in (*refused, good):
        pool.add_transaction(signed)
    noticed = frozenset(map(transaction_digest, (*refused, good)))
    assert pool.select_transactions(world.rules, world.state, first=noticed) == (good,)


@pytest.mark.parametrize("count", [1, SELECTION_PASSES_MAX])
def test_a_transaction_that_others_must_precede_is_not_given_up(world: World, count: int) -> None:
    """An honest member has at most one refused transaction in a pass."""
    assert REFUSED_PER_MEMBER_MAX >= SELECTION_PASSES_MAX
    refused = [world.tx(AUTHOR, "member/approve", ApproveVoter(bytes([number]) * 32)) for number in range(count)]
    good = registration(world)
    assert arrived(world, [*refused, good]).mempool.select_transactions(world.rules, world.state) == (good,)
