"""Real peers that restore the certified state from others, over in-memory links."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from consensus.chain_proof import Anchor
from ledger.jobs import Start, job_id
from ledger.store import Store
from peer import export
from peer.driver import Driver
from peer.transfer import HOLD_SECONDS
from protocol import codec
from protocol.errors import UserError
from protocol.identity import short_id
from protocol.messages import Status
from tests.peer.chain import lived
from tests.peer.network import SCRATCH, SECONDS_MAX, Network, Seat, network, one_root

LAG, BETWEEN = 4, 2  # heights, in place of LAG_HEIGHTS and SNAPSHOT_HEIGHTS: a round takes as long as it takes
ROUNDS = 10


@pytest.fixture(autouse=True)
def early_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.transfer.LAG_HEIGHTS", LAG)
    for module in ("peer.transfer", "ledger.snapshot"):
        monkeypatch.setattr(f"{module}.SNAPSHOT_HEIGHTS", BETWEEN)


async def job_of(seat: Seat, rounds: int = ROUNDS) -> bytes:
    spec = replace(SCRATCH, rounds=rounds).encode()
    with trio.fail_after(SECONDS_MAX):
        return job_id(seat.public, await seat.author.submit("job/start", Start(spec)))


def reached(height: int) -> Callable[[Driver], bool]:
    return lambda driver: driver.state.height >= height


async def test_a_newcomer_restores_a_snapshot_and_goes_on_with_the_rounds_that_are_open(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, observers=1, start=False) as made:
        seats = [await made.start(seat) for seat in made.seats[:4]]
        last = ROUNDS + 10
        job = await job_of(seats[0], rounds=last)
        await seats[0].until(reached(ROUNDS))
        newcomer = await made.start(made.seats[4])
        await newcomer.event("snapshot", "restored")
        for seat in made.seats:
            await seat.until(lambda driver: driver.state.jobs.jobs[job].round == last)
        height = min(seat.driver.state.height for seat in made.seats)
        assert len({seat.store.roots()[height] for seat in made.seats}) == 1
        assert len({seat.driver.host.model(job, last).root for seat in made.seats}) == 1
        newcomer.driver.host.model(job, last).verify()


async def test_what_was_restored_survives_a_restart_and_serves_the_next_newcomer(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, observers=2, start=False) as made:
        seats = [await made.start(seat) for seat in made.seats[:4]]
        await job_of(seats[0])
        await seats[0].until(reached(ROUNDS))
        first = await made.start(made.seats[4])
        await first.event("snapshot", "restored")
        await first.stop()
        await made.start(first)
        for seat in (*seats, first):
            await seat.until(lambda driver: not driver.state.jobs.running())
        await first.until(reached(ROUNDS + 2))
        for seat in seats:
            await seat.stop()
        second = await made.start(made.seats[5])
        await second.event("snapshot", "restored")
        await second.until(lambda driver: driver.state.height == first.driver.state.height)
        assert second.driver.state.root == first.driver.state.root


async def test_a_voter_that_was_away_for_long_votes_again_after_it_has_restored(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        seats = [await made.start(seat) for seat in made.seats]
        await job_of(seats[0], rounds=4)
        away = seats[3]
        await away.until(reached(3))
        await away.stop()
        await job_of(seats[0])
        await seats[0].until(reached(ROUNDS + 2))
        await made.start(away)
        await away.event("snapshot", "restored")
        await seats[2].stop()  # nothing is decided now without the one that was away
        job = await job_of(seats[0], rounds=1)
        await away.until(lambda driver: job in driver.state.jobs.jobs and not driver.state.jobs.running())


async def test_a_peer_whose_model_went_wrong_keeps_a_diagnostic_restores_and_goes_on(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        sick = made.seats[3]
        job = await job_of(made.seats[0])
        await sick.until(reached(4))
        number = sick.driver.state.jobs.jobs[job].round
        model = sick.driver.host.model(job, number)
        wrong = {**model.vectors, "parameters": model.parameters + np.float32(1)}  # as bad memory would make them
        sick.driver.host._models[job] = replace(model, vectors=wrong)
        await sick.event("snapshot", "restored")
        for seat in made.seats:
            await seat.until(lambda driver: driver.state.jobs.jobs[job].round == ROUNDS)
        assert len({seat.driver.host.model(job, ROUNDS).root for seat in made.seats}) == 1
        (folder,) = (sick.folder / "diagnostics").iterdir()
        content = json.loads((folder / "roots.json").read_text())
        height = content["height"]
        assert content["state_root"] != made.seats[0].store.roots()[height].hex()
        assert content["models"].keys() == {job.hex()} and content["modules"].keys() == {"audits", "jobs", "members"}
        assert sick.driver.rules.decode_state((folder / "state.msgpack").read_bytes()).root.hex() == content["state_root"]
        own, others = sick.store.roots(), made.seats[0].store.roots()
        assert {height: root for height, root in own.items() if others.get(height, root) != root} == {}


async def test_blocks_wait_for_a_proven_snapshot_but_not_for_ever(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    class Proven:
        progress = (100, 5)

    seat = Network(tmp_path, founders=1).seats[0]
    seat.open(None, lambda blobs: blobs)
    snapshots = seat.driver.snapshots

    async def waited() -> float:
        snapshots._hold_or_clear()
        began = trio.current_time()
        await snapshots.clear()
        return trio.current_time() - began

    assert await waited() == 0
    snapshots._transfer, snapshots._begun = Proven(), seat.driver.now()  # type: ignore[assignment]
    assert await waited() == pytest.approx(HOLD_SECONDS)
    assert await waited() == 0, "once a transfer has had its time, blocks are applied beside it"
    snapshots._transfer, snapshots._begun = None, seat.driver.now()
    assert await waited() == 0
    seat.store.close()


async def test_a_claim_of_a_great_height_makes_nobody_restore_anything(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, observers=1) as made:
        *voters, liar = made.seats
        await job_of(voters[0], rounds=3)
        await voters[0].until(lambda driver: not driver.state.jobs.running())
        for voter in voters:
            liar.network.send(voter.public, codec.encode(Status(1_000_000, 0)))
            await voter.event("snapshot", "asking")
        job = await voters[0].scratch()
        await one_root(voters, job)
        assert not [event for voter in voters for event in await voter.events.after(0, 0.0) if "restored" in event.text]


async def test_a_history_without_the_block_that_the_invitation_names_is_refused(tmp_path: Path) -> None:
    """A newcomer that is only a little behind takes decisions one by one: they must lead through its anchor too."""
    async with network(tmp_path, founders=4, observers=1, start=False) as made:
        seats = [await made.start(seat) for seat in made.seats[:4]]
        await seats[0].scratch()
        await seats[0].until(reached(2))
        newcomer = made.seats[4]
        newcomer.open(None, lambda blobs: blobs)
        newcomer.driver.snapshots._anchor = Anchor(2, bytes(32))
        await made._nursery.start(newcomer.run)
        with trio.fail_after(SECONDS_MAX):
            await newcomer.ended.wait()
        assert newcomer.failure is not None and "another block than the invitation names" in str(newcomer.failure)


def test_a_peer_that_began_with_a_snapshot_says_who_can_export(tmp_path: Path) -> None:
    chain = lived(tmp_path / "whole")
    state = chain.ledger.state
    store = Store(tmp_path / "ledger.db", chain.id)
    decided = [chain.store.decision(height) for height in (state.height - 2, state.height - 1, state.height)]
    encoded = chain.rules.encode_state(replace(state, height=state.height - 1))
    store.restore([item for item in decided if item], state.height - 1, state.root, encoded)
    with pytest.raises(UserError) as error:
        export.export(store, chain.blobs, chain.host, chain.genesis, tmp_path / "export")
    assert f"no block below {state.height - 2}" in str(error.value) and short_id(chain.people[0].public) in str(error.value)
    assert not (tmp_path / "export").exists()
    store.close()
    chain.close()
