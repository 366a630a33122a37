"""Several transactions of one author at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ledger.genesis import TRAINER
from ledger.jobs import Stop
from ledger.members import Register
from protocol.errors import UserError
from protocol.messages import Transaction
from tests.peer.network import SECONDS_MAX, network


async def test_what_one_author_says_at_once_is_decided_in_that_order_without_waiting_for_each_other(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        seat = await made.start(made.seats[0])
        done: dict[str, Transaction] = {}

        async def register(name: str, *roles: str) -> None:
            done[name] = await seat.author.submit("member/register", Register(roles))

        with trio.fail_after(SECONDS_MAX):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(register, "first", TRAINER)
                while not len(seat.driver.ledger.pool):  # noqa: ASYNC110 - nothing tells of it
                    await trio.sleep(0.01)
                nursery.start_soon(register, "second")
                while len(seat.driver.ledger.pool) < 2:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                for other in made.seats[1:]:  # now there is a quorum
                    await made.start(other)
        assert (done["first"].nonce, done["second"].nonce) == (1, 2)
        assert seat.driver.state.members.members[seat.public].roles == ()


async def test_what_follows_a_transaction_that_left_the_pool_for_good_is_signed_anew_and_decided(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        seat = await made.start(made.seats[0])
        pool, given_up = seat.driver.ledger.pool, trio.CancelScope()

        async def give_up() -> None:
            with given_up:
                await seat.author.submit("member/register", Register((TRAINER,)))

        async def go_on() -> None:
            await seat.author.submit("member/register", Register(()))

        with trio.fail_after(SECONDS_MAX):
            async with trio.open_nursery() as nursery:
                for say, count in ((give_up, 1), (go_on, 2)):
                    nursery.start_soon(say)
                    while len(pool) < count:  # noqa: ASYNC110 - nothing tells of it
                        await trio.sleep(0.01)
                given_up.cancel()
                pool._forget(next(iter(pool._waiting.values())))  # as when a block makes it impossible
                others = [await made.start(other) for other in made.seats[1:]]
                await others[0].author.submit("member/register", Register((TRAINER,)))
        assert seat.author.nonce >= 1


async def test_what_is_refused_is_said_at_once(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        with pytest.raises(UserError, match="no such job"), trio.fail_after(SECONDS_MAX):
            await made.seats[0].author.submit("job/stop", Stop(bytes(32)))
