"""What a role does in open rounds begins and ends with them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from peer.driver.eventlog import EventLog
from peer.driver.workshop import Workshop, _figure
from peer.node.rounds import Rounds
from peer.roles.base import Judged, OpenRound
from protocol.identity import Signed
from protocol.messages import Proposal
from protocol.reasons import Verdict
from rlhf.objective import PPO
from tests.peer.chain import LANGUAGE, Chain


class Busy:
    """A role that trains for ever."""

    computing = None

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.began = trio.Event()

    async def propose(self, round: OpenRound) -> None:
        self.begun += 1
        self.began.set()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled += 1

    async def judge(self, round: OpenRound, signed: Signed, proposal: Proposal) -> Judged:
        return Judged(Verdict.UNJUDGED)

    async def observe(self, round: OpenRound) -> None:
        return


def shop_of(chain: Chain, role: Busy) -> Workshop:
    nothing: Any = SimpleNamespace(fetch=None, reveals_sent=dict)  # nobody asks the network, or calls the driver
    me, rounds, events = chain.people[0], Rounds(chain.people[0], chain.id, {}), EventLog()
    rooms = chain.store, chain.blobs, chain.host, nothing
    return Workshop(me.public, role, rounds, *rooms, events, nothing, lambda: 0.0, lambda: chain.ledger.state)


async def test_a_round_that_is_given_to_others_as_soon_as_it_was_opened_is_worked_on_once(tmp_path: Path) -> None:
    chain, role = Chain(tmp_path / "chain"), Busy()
    key = chain.start(LANGUAGE)
    job = chain.ledger.state.jobs.jobs[key]
    shop = shop_of(chain, role)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(shop.run)
            shop.open((key, 0), job, False)
            shop.close((key, 0))
            shop.open((key, 0), job, False)
            await role.began.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert (role.begun, role.cancelled) == (1, 0)
            nursery.cancel_scope.cancel()
    chain.close()


@pytest.mark.virtual(threads=True)
async def test_tidying_that_comes_rounds_too_late_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, role = Chain(tmp_path / "chain"), Busy()
    spec = replace(LANGUAGE, rounds=9)
    key = chain.start(spec)
    chain.play(key)
    shop, prune, released = shop_of(chain, role), chain.host.prune, threading.Event()
    began = trio.Event()

    def late(*asked: Any) -> None:
        trio.from_thread.run_sync(began.set)
        released.wait(90)
        prune(*asked)

    monkeypatch.setattr(chain.host, "prune", late)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(shop.run)
            shop.open((key, 1), chain.ledger.state.jobs.jobs[key], False)
            await began.wait()
            shop.close((key, 1))
            for _ in range(3):
                chain.play(key)
            prune(key, 4, spec)
            assert not chain.host.directory(key, 1).exists()
            released.set()
            nursery.cancel_scope.cancel()  # waits for the thread, and raises what it raised
    assert chain.host.directory(key, 4).exists()
    chain.close()


def test_figures_are_told_in_words() -> None:
    assert _figure("held_out_bits_per_byte", 2.5, 3, "nats/token") == "before round 4: held-out loss 2.500 bits/byte"
    assert _figure("worker_seconds", 1.25, 3, "nats/token") == "in round 4: the worker took 1.2 s"
    assert _figure("training_nats", 1.25, 3, "nats/token") == "in round 4: training loss 1.2500 nats/token"
    assert _figure("training_loss", -0.5, 3, PPO.loss_unit) == "in round 4: training loss -0.5000 (clipped surrogate)"
