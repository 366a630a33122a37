"""The memory quota of links, without sockets: a peer within its share loses nothing."""

from __future__ import annotations

import random

from transport.peer_policy import PeerClass
from transport.quotas.memory_quota import MemoryAccount, MemoryQuota

MEMBERS, STRANGERS = 100_000, 10_000


def test_whoever_keeps_to_its_share_never_gives_way_and_the_budget_is_kept() -> None:
    draws = random.Random(1)
    memory = MemoryQuota(MEMBERS, STRANGERS)
    modest, *greedy = [memory.account_of(bytes([number]), PeerClass.STRANGER) for number in range(8)]
    for account in (modest, *greedy):
        account.is_linked = True
    share = STRANGERS // 8
    for _ in range(2_000):
        account = draws.choice([modest, *greedy])
        size = draws.randrange(1, share)
        if account is modest and account.held + size > share:
            account.add_bytes(-account.held)
        while (other := account.account_to_evict(size)) not in (None, account):
            assert other is not modest
            other.add_bytes(-other.held)
        if other is None:
            account.add_bytes(size)
        else:
            assert account is not modest, "there is room for whoever keeps to its share"
        assert memory.held == sum(one.held for one in (modest, *greedy)) <= STRANGERS


def test_a_stranger_that_becomes_a_member_takes_what_it_holds_along() -> None:
    memory = MemoryQuota(MEMBERS, STRANGERS)
    account = memory.account_of(b"a", PeerClass.STRANGER)
    account.add_bytes(STRANGERS)
    assert memory.account_of(b"b", PeerClass.STRANGER).account_to_evict(1) is account
    assert memory.account_of(b"a", PeerClass.MEMBER) is account
    assert memory.account_of(b"b", PeerClass.STRANGER).account_to_evict(1) is None
    assert account.account_to_evict(MEMBERS - STRANGERS) is None
    assert account.account_to_evict(MEMBERS - STRANGERS + 1) is account


def test_an_account_without_a_link_lasts_as_long_as_it_holds_something() -> None:
    memory = MemoryQuota(MEMBERS, STRANGERS)
    account = memory.account_of(b"a", PeerClass.MEMBER)
    account.add_bytes(5)
    assert memory.account_of(b"a", PeerClass.MEMBER) is account
    account.add_bytes(-5)
    assert memory.account_of(b"a", PeerClass.MEMBER) is not account


def test_what_no_network_counts_is_not_bounded() -> None:
    account = MemoryAccount()
    account.add_bytes(1 << 40)
    assert account.account_to_evict(1) is None
