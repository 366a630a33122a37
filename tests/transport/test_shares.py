"""The memory that links may hold, as a pure thing: whoever keeps to its share loses nothing."""

from __future__ import annotations

import random

from transport.shares import Account, Memory
from transport.standing import Standing

MEMBERS, STRANGERS = 100_000, 10_000


def test_whoever_keeps_to_its_share_never_gives_way_and_the_budget_is_kept() -> None:
    draws = random.Random(1)
    memory = Memory(MEMBERS, STRANGERS)
    modest, *greedy = [memory.account(bytes([number]), Standing.STRANGER) for number in range(8)]
    for account in (modest, *greedy):
        account.is_linked = True
    share = STRANGERS // 8
    for _ in range(2_000):
        account = draws.choice([modest, *greedy])
        size = draws.randrange(1, share)
        if account is modest and account.held + size > share:
            account.add(-account.held)
        while (other := account.gives_way(size)) not in (None, account):
            assert other is not modest
            other.add(-other.held)
        if other is None:
            account.add(size)
        else:
            assert account is not modest, "there is room for whoever keeps to its share"
        assert memory.held == sum(one.held for one in (modest, *greedy)) <= STRANGERS


def test_a_stranger_that_becomes_a_member_takes_what_it_holds_along() -> None:
    memory = Memory(MEMBERS, STRANGERS)
    account = memory.account(b"a", Standing.STRANGER)
    account.add(STRANGERS)
    assert memory.account(b"b", Standing.STRANGER).gives_way(1) is account
    assert memory.account(b"a", Standing.MEMBER) is account
    assert memory.account(b"b", Standing.STRANGER).gives_way(1) is None
    assert account.gives_way(MEMBERS - STRANGERS) is None
    assert account.gives_way(MEMBERS - STRANGERS + 1) is account


def test_an_account_without_a_link_lasts_as_long_as_it_holds_something() -> None:
    memory = Memory(MEMBERS, STRANGERS)
    account = memory.account(b"a", Standing.MEMBER)
    account.add(5)
    assert memory.account(b"a", Standing.MEMBER) is account
    account.add(-5)
    assert memory.account(b"a", Standing.MEMBER) is not account


def test_what_no_network_counts_is_not_bounded() -> None:
    account = Account()
    account.add(1 << 40)
    assert account.gives_way(1) is None
