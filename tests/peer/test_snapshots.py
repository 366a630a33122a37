"""Real peers that restore the certified state from others, over in-memory links."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import trio
import trio.testing

from consensus.block import decode_header
from consensus.light_client import TrustedBlock
from consensus.pbft.block_sync import BlockSync
from ledger.jobs import StartJob
from ledger.members import ResignAsVoter
from ledger.snapshots.snapshot_assembly import RestoredSnapshot
from ledger.snapshots.snapshot_download import SOURCES_MAX
from ledger.snapshots.snapshot_server import SNAPSHOT_HEIGHTS
from peer.export import run_export as export
from peer.runtime.driver import Driver
from peer.runtime.state_sync import APPLY_PAUSE_SECONDS_MAX
from protocol import codec
from protocol.errors import StorageError, UserError
from protocol.identity import short_id
from protocol.messages import GetSnapshot, Status
from storage.ledger_store import LedgerStore
from tests.ledger import snapshots as snapshots_of_ledgers
from tests.ledger.world import MODULES
from tests.peer.chain import lived
from tests.peer.network import SCRATCH, Network, Seat, certified, network, one_root, poll, service_of
from tests.waiting import patience
from training.job_spec import FeedbackMemory

LAG, BETWEEN = 4, 2  # heights, instead of LAG_HEIGHTS and SNAPSHOT_HEIGHTS: the duration of a round varies
ROUNDS = 10


@pytest.fixture(autouse=True)
def early_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.runtime.state_sync.SNAPSHOT_LAG_HEIGHTS", LAG)
    for module in ("peer.runtime.state_sync", "ledger.snapshots.snapshot_server", "ledger.snapshots.snapshot_download"):
        monkeypatch.setattr(f"{module}.SNAPSHOT_HEIGHTS", BETWEEN)


async def job_of(seat: Seat, rounds: int = ROUNDS, memory: FeedbackMemory = FeedbackMemory.RESIDUAL) -> bytes:
    return await seat.start_job(rounds=rounds, memory=memory)


@contextmanager
def no_decisions() -> Iterator[None]:
    """Disable requests for missed decisions. On a busy machine they would all arrive before the snapshot."""
    with mock.patch.object(BlockSync, "deadline", lambda self, now: None):
        yield


def reached(height: int) -> Callable[[Driver], bool]:
    return lambda driver: driver.state.height >= height


async def test_a_newcomer_restores_a_snapshot_and_goes_on_with_the_rounds_that_are_open(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, observers=1, start=False) as made:
        seats = [await made.start(seat) for seat in made.seats[:4]]
        last = ROUNDS + 10
        job = await job_of(seats[0], rounds=last)
        await seats[0].until(reached(ROUNDS))
        with no_decisions():
            newcomer = await made.start(made.seats[4])
            await newcomer.event("snapshot", "restored")
        for seat in made.seats:
            await seat.until(lambda driver: driver.state.jobs.jobs[job].round == last)
        height = min(seat.driver.state.height for seat in made.seats)
        assert len({seat.store.state_roots()[height] for seat in made.seats}) == 1
        assert len({seat.driver.host.open_model(job, last).root for seat in made.seats}) == 1
        newcomer.driver.host.open_model(job, last).verify()
        told = Counter(event.text for event in await newcomer.events.wait_for_events(0, 0.0) if event.kind == "peer")
        assert told == {f"connected to {short_id(seat.public)}": 1 for seat in seats}


async def test_models_of_jobs_that_a_snapshot_no_longer_has_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledger.jobs.UNTRAINED_KEPT_MAX", 1)
    async with network(tmp_path, founders=4, observers=1) as made:
        forgotten = await job_of(made.seats[0], rounds=1)
        await one_root(made.seats, forgotten)
        away = made.seats[4]
        await away.stop()
        for rounds in (ROUNDS, 1):
            job = await job_of(made.seats[0], rounds=rounds)
            await made.seats[0].until(certified(job))
        assert forgotten not in made.seats[0].driver.state.jobs.jobs
        with no_decisions():
            await made.start(away)
            assert away.driver.host.stored_rounds(forgotten)
            await away.event("snapshot", "restored")
        await away.until(certified(await job_of(made.seats[0])))
        for seat in (away, made.seats[0]):
            await poll(lambda host=seat.driver.host: not host.stored_rounds(forgotten))  # type: ignore[misc]


async def test_what_was_restored_survives_a_restart_and_serves_the_next_newcomer(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, observers=2, start=False) as made:
        seats = [await made.start(seat) for seat in made.seats[:4]]
        job = await job_of(seats[0], memory=FeedbackMemory.ESTIMATES)
        await seats[0].until(reached(ROUNDS))
        with no_decisions():
            first = await made.start(made.seats[4])
            await first.event("snapshot", "restored")
        await first.stop()
        await made.start(first)
        for seat in (*seats, first):
            await seat.until(lambda driver: not driver.state.jobs.running())
        await first.until(reached(ROUNDS + 2))
        for seat in seats:
            await seat.stop()
        with no_decisions():
            second = await made.start(made.seats[5])
            await second.event("snapshot", "restored")
        await poll(lambda: second.driver.state.height == first.driver.state.height)
        assert second.driver.state.state_root == first.driver.state.state_root
        model = second.driver.host.open_model(job, ROUNDS)
        model.verify()
        assert model.estimates.keys() == {seats[0].public}


async def test_a_voter_that_was_away_for_long_votes_again_after_it_has_restored(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        seats = [await made.start(seat) for seat in made.seats]
        await job_of(seats[0], rounds=4)
        away = seats[3]
        await away.until(reached(3))
        await away.stop()
        await job_of(seats[0])
        await seats[0].until(reached(ROUNDS + 2))
        with no_decisions():
            await made.start(away)
            before = away.driver.node
            await away.event("snapshot", "restored")
        assert away.driver.node is not before
        assert away.driver.node.rounds.measured is before.rounds.measured, "how long rounds take is no part of the state"
        await seats[2].stop()  # now nothing is decided without the peer that was away
        job = await job_of(seats[0], rounds=1)
        await away.until(lambda driver: job in driver.state.jobs.jobs and not driver.state.jobs.running())


async def test_a_peer_whose_model_went_wrong_keeps_a_diagnostic_restores_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with network(tmp_path, founders=4) as made:
        sick = made.seats[3]
        host, step, went_wrong = sick.driver.host, sick.driver.host.apply_round, list[bool]()

        def step_and_go_wrong(closed: Any, payload: Any) -> bytes:
            root = step(closed, payload)
            if closed.round == 3 and not went_wrong:
                went_wrong.append(True)
                model = host._models[closed.job]
                wrong = {**model.vectors, "parameters": model.parameters + np.float32(1)}  # as defective memory would change them
                host._models[closed.job] = replace(model, vectors=wrong)
            return root

        monkeypatch.setattr(host, "apply_round", step_and_go_wrong)
        job = await job_of(made.seats[0])
        await sick.event("snapshot", "restored")
        for seat in made.seats:
            await seat.until(lambda driver: driver.state.jobs.jobs[job].round == ROUNDS)
        assert len({seat.driver.host.open_model(job, ROUNDS).root for seat in made.seats}) == 1
        (folder,) = (sick.folder / "diagnostics").iterdir()
        content = json.loads((folder / "roots.json").read_text())
        height = content["height"]
        assert content["state_root"] != made.seats[0].store.state_roots()[height].hex()
        assert content["models"].keys() == {job.hex()} and content["modules"].keys() == {module.name for module in MODULES}
        assert sick.driver.rules.decode_state((folder / "state.msgpack").read_bytes()).state_root.hex() == content["state_root"]
        own, others = sick.store.state_roots(), made.seats[0].store.state_roots()
        assert {height: root for height, root in own.items() if others.get(height, root) != root} == {}


@pytest.fixture
async def seat(tmp_path: Path) -> AsyncIterator[Seat]:
    made = Network(tmp_path, founders=1).seats[0]
    made.open(None, lambda blobs: blobs)
    yield made
    made.store.close()


async def test_blocks_wait_for_a_proven_snapshot_but_not_for_ever(autojump_clock: trio.testing.MockClock, seat: Seat) -> None:
    class Proven:
        progress = (100, 5)

    snapshots = seat.driver.state_sync

    async def waited() -> float:
        snapshots._hold_or_clear()
        began = trio.current_time()
        await snapshots.wait_to_apply()
        return trio.current_time() - began

    assert await waited() == 0
    snapshots._transfer, snapshots._begun = Proven(), seat.driver.now()  # type: ignore[assignment]
    assert await waited() == pytest.approx(APPLY_PAUSE_SECONDS_MAX)
    assert await waited() == 0, "once a transfer has had its time, blocks are applied beside it"
    snapshots._transfer, snapshots._begun = None, seat.driver.now()
    assert await waited() == 0


async def test_a_claim_of_a_great_height_makes_nobody_restore_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.runtime.state_sync.SNAPSHOT_HEIGHTS", SNAPSHOT_HEIGHTS)  # more than the two jobs take
    async with network(tmp_path, founders=4, observers=1) as made:
        *voters, liar = made.seats
        await job_of(voters[0], rounds=3)
        await voters[0].until(lambda driver: not driver.state.jobs.running())
        for voter in voters:
            liar.network.send(voter.public, codec.encode(Status(1_000_000, 0)))
            await voter.event("snapshot", "requesting")
        await one_root(voters, await voters[0].start_job())
        assert not [event for voter in voters for event in await voter.events.wait_for_events(0, 0.0) if "restored" in event.text]


@pytest.mark.parametrize("applies", [True, False])
async def test_a_history_without_the_block_that_the_invitation_names_is_refused(tmp_path: Path, applies: bool) -> None:
    """A newcomer that is only a little behind fetches decisions one by one. These must also lead through its anchor.

    This holds also while it applies nothing, since a snapshot is verified by decided blocks.
    """
    async with network(tmp_path, founders=4, observers=1, start=False) as made:
        seats = [await made.start(seat) for seat in made.seats[:4]]
        await seats[0].start_job()
        await seats[0].until(reached(2))
        newcomer = made.seats[4]
        newcomer.anchor = TrustedBlock(2, bytes(32))
        newcomer.open(None, lambda blobs: blobs)
        if not applies:
            newcomer.driver.state_sync.wait_to_apply = trio.sleep_forever  # type: ignore[method-assign]
        await made._nursery.start(newcomer.run)
        with patience():
            await newcomer.ended.wait()
        assert newcomer.failure is not None and "differs from the one in the invitation" in str(newcomer.failure)
        store = LedgerStore(newcomer.store.path, newcomer.genesis.chain_id)
        assert store.decided_height < 2, "a block that is refused is not kept"
        store.close()


async def test_a_newcomer_that_began_with_another_history_goes_on_with_the_one_of_its_invitation(tmp_path: Path) -> None:
    """The same founders have signed two histories. An unapplied block of the false one is no anchor."""

    async def begin(made: Network, newcomer: Seat) -> None:
        async def applies_nothing_before_it_is_restored() -> None:
            if newcomer.driver.state.height == 0:
                await trio.sleep_forever()

        newcomer.open(None, lambda blobs: blobs)
        newcomer.driver.state_sync.wait_to_apply = applies_nothing_before_it_is_restored  # type: ignore[method-assign]
        await made._nursery.start(newcomer.run)

    for history in ("false", "true"):
        (tmp_path / history).mkdir()
    async with network(tmp_path / "false", founders=4, observers=1, start=False) as false:
        for seat in false.seats[:4]:
            await false.start(seat)
        await begin(false, led_astray := false.seats[4])
        await job_of(false.seats[0], rounds=2)
        await poll(lambda: led_astray.store.decided_height >= 2)
    async with network(tmp_path / "true", founders=4, observers=1, start=False) as true:
        voters = [await true.start(seat) for seat in true.seats[:4]]
        await job_of(voters[0], rounds=2 * ROUNDS)
        await voters[0].until(reached(2 * ROUNDS))
        trusted = voters[0].store.get_decision(ROUNDS)
        assert trusted is not None
        newcomer = true.seats[4]
        newcomer.folder, newcomer.anchor = led_astray.folder, TrustedBlock(ROUNDS, trusted.digest)
        with no_decisions():
            await begin(true, newcomer)
            await newcomer.event("snapshot", "restored")
        assert newcomer.store.get_decision(1) is None, "nothing of the false history is left"
        await poll(lambda: newcomer.driver.state.height == voters[0].driver.state.height)  # either may be first
        assert newcomer.driver.state.state_root == voters[0].driver.state.state_root
        assert not [
            event
            for seat in (newcomer, *voters)
            for event in await seat.events.wait_for_events(0, 0.0)
            if "dropped" in event.text
        ]


async def test_a_newcomer_led_astray_drops_none_of_the_voters_that_lead_it_back(tmp_path: Path) -> None:
    """In its first history a founder left, so the true one's decisions have signatures of other voters than it expects."""
    for history in ("false", "true"):
        (tmp_path / history).mkdir()
    async with network(tmp_path / "false", founders=4, observers=1) as false:
        *voters, led_astray = false.seats
        await job_of(voters[0], rounds=4)
        await voters[3].author.submit("member/resign", ResignAsVoter())
        await led_astray.until(lambda driver: len(driver.state.members.voters) == 3)
    async with network(tmp_path / "true", founders=4, observers=1, start=False) as true:
        voters = [await true.start(seat) for seat in true.seats[:4]]
        await job_of(voters[0], rounds=2 * ROUNDS)
        await voters[0].until(reached(2 * ROUNDS))
        trusted = voters[0].store.get_decision(2 * ROUNDS - LAG)
        assert trusted is not None
        newcomer = true.seats[4]
        newcomer.folder, newcomer.anchor = led_astray.folder, TrustedBlock(trusted.height, trusted.digest)
        await true.start(newcomer)
        await newcomer.event("snapshot", "restored")
        await poll(lambda: newcomer.driver.state.height == voters[0].driver.state.height)  # either may be first
        assert newcomer.driver.state.state_root == voters[0].driver.state.state_root
        assert not [
            event
            for seat in (newcomer, *voters)
            for event in await seat.events.wait_for_events(0, 0.0)
            if "dropped" in event.text
        ]


async def test_a_peer_that_decided_another_block_than_its_new_invitation_names_does_not_start(tmp_path: Path) -> None:
    async with network(tmp_path, founders=1) as made:
        (seat,) = made.seats
        await seat.start_job()
        await seat.until(reached(3))
        await seat.stop()
        true = LedgerStore(seat.store.path, seat.genesis.chain_id)
        decided = true.get_decision(2)
        assert decided is not None
        seat.anchor = TrustedBlock(2, decided.digest)
        true.close()
        await made.start(seat)
        await seat.stop()
        seat.anchor = TrustedBlock(2, bytes(32))
        with pytest.raises(StorageError, match="join with a new data directory"):
            seat.open(None, lambda blobs: blobs)
        seat.store.close()


async def test_each_transfer_asks_others_first_than_the_one_before(seat: Seat) -> None:
    """Otherwise silent peers, in any number, could receive all requests."""
    snapshots = seat.driver.state_sync
    snapshots._links = frozenset(bytes([number]) * 32 for number in range(3 * SOURCES_MAX))
    asked: list[bytes] = []
    for _ in range(3):
        snapshots._begin(*snapshots._when_behind(0))
        assert snapshots._transfer is not None
        asked += [peer for peer, source in snapshots._transfer._sources.items() if source.waits]
        snapshots._end_transfer()
    assert sorted(asked) == sorted(snapshots._links)


async def test_what_proves_the_heights_before_a_transfer_is_kept_for_those_who_ask_this_peer(seat: Seat) -> None:
    chain = snapshots_of_ledgers.lived(40)
    snapshots, (first, *later) = seat.driver.state_sync, chain.light_blocks(0, 40)
    seat.store.restore_snapshot([chain.decided[1]], 1, chain.states[1].state_root, b"", links=[first], tables={})
    installed: list[Any] = []

    async def install(restored: Any, links: Any, repairs: bool) -> bool:
        installed.extend(links)
        return True

    snapshots._restore_state = install
    ended = SimpleNamespace(
        trusted_height=decode_header(first.header).height, light_blocks=tuple(later), asked_last=b"", discard_parts=lambda: None
    )
    await snapshots._finish(ended, RestoredSnapshot((), chain.states[40], (), ()))  # type: ignore[arg-type]
    assert installed == [first, *later] and later


@pytest.mark.parametrize(("height", "abandoned"), [(40, 0), (0, 1)])
async def test_a_peer_that_is_stopped_while_it_installs_deletes_nothing_of_it(height: int, abandoned: int, seat: Seat) -> None:
    """The driver's thread completes the installation despite a cancel. Parts that are not installed are deleted."""
    snapshots, scope, deleted = seat.driver.state_sync, trio.CancelScope(), [0]

    async def install(restored: Any, links: Any, repairs: bool) -> bool:
        scope.cancel()
        await trio.sleep_forever()
        return True

    def delete() -> None:
        deleted[0] += 1

    restored = RestoredSnapshot((), replace(seat.driver.state, height=height), (), ())
    ended = SimpleNamespace(trusted_height=0, light_blocks=(), asked_last=b"", discard_parts=delete, restored=restored)
    snapshots._restore_state = install
    snapshots._transfer = ended  # type: ignore[assignment]
    with scope:
        await snapshots._finish(ended, restored)  # type: ignore[arg-type]
    snapshots._end_transfer()  # as `run` does at its end
    assert deleted == [abandoned]


async def test_a_snapshot_that_blocks_overtook_while_it_was_handed_over_is_not_installed(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        seat = made.seats[0]
        await one_root(made.seats, await seat.start_job())
        before = seat.driver.state
        restored = RestoredSnapshot((), before, (), (SimpleNamespace(install=pytest.fail),))  # type: ignore[arg-type]
        with patience():
            assert not await seat.driver.restore_state(restored, (), repairs=False)
        assert seat.driver.state.state_root == before.state_root
        await one_root(made.seats, await seat.start_job())


async def test_requests_of_peers_whose_link_is_broken_are_forgotten(seat: Seat) -> None:
    """A link may break, or be replaced, between a peer's message and its processing."""
    snapshots = seat.driver.state_sync
    for number in range(100):
        snapshots._update_links()
        snapshots.receive_message(bytes([number]) * 32, codec.encode(GetSnapshot(0, 0, 0)))
        await snapshots._take_messages()
    snapshots._update_links()
    assert not snapshots._queue.askers


@pytest.mark.parametrize("existed", [False, True])
def test_a_peer_that_lacks_an_accepted_update_says_so_too_and_leaves_nothing(tmp_path: Path, existed: bool) -> None:
    """Blocks come one by one until a snapshot is faster. A snapshot contains no payloads of the heights below it."""
    chain, folder = lived(tmp_path / "whole"), tmp_path / "export"
    next(file for file in (tmp_path / "whole" / "blobs").iterdir()).unlink()
    if existed:
        folder.mkdir()
    with pytest.raises(UserError) as error:
        export.export_run(chain.store, chain.blobs, chain.host, chain.genesis, folder)
    assert "as after a snapshot" in str(error.value) and short_id(chain.people[0].public) in str(error.value)
    assert folder.exists() == existed and not (existed and list(folder.iterdir()))
    chain.close()


async def test_a_job_is_ended_by_its_name_too_and_what_fits_none_or_two_is_told(tmp_path: Path) -> None:
    async with network(tmp_path, founders=1) as made:
        seat = made.seats[0]
        service, kept = service_of(seat), replace(SCRATCH, rounds=1_000_000, name="long")
        await seat.author.submit("job/start", StartJob(kept.encode()))
        for text in ("", "other", "zz"):
            with pytest.raises(UserError, match=r"matches no running or queued jobs .* 'long'"):
                await service.cancel_job(text)
        assert await service.cancel_job("long") == "job 'long' has ended"


async def test_what_a_snapshot_spared_a_peer_is_fetched_for_its_export(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        seat = made.seats[0]
        job = await seat.start_job()
        for other in made.seats:
            await other.until(certified(job))
        lost = export.accepted_payloads(seat.store.get_decision(seat.driver.state.jobs.jobs[job].opened_height).decode().body)
        assert lost and not export.missing_payloads(seat.store, seat.blobs)
        for digest in lost:
            seat.blobs.path(digest).unlink()
        assert export.missing_payloads(seat.store, seat.blobs) == lost
        with patience():
            view = await service_of(seat).export_run(str(tmp_path / "export"))
        assert view.height >= 2 and {file.stem for file in (tmp_path / "export" / export.PAYLOADS).iterdir()} >= {
            digest.hex() for digest in lost
        }


def test_a_peer_that_began_with_a_snapshot_says_who_can_export(tmp_path: Path) -> None:
    chain = lived(tmp_path / "whole")
    state = chain.ledger.state
    store = LedgerStore(tmp_path / "ledger.db", chain.id)
    decided = [chain.store.get_decision(height) for height in (state.height - 2, state.height - 1, state.height)]
    store.restore_snapshot(
        [item for item in decided if item],
        state.height - 1,
        state.state_root,
        chain.rules.encode_state(replace(state, height=state.height - 1)),
        tables={},
    )
    with pytest.raises(UserError) as error:
        export.export_run(store, chain.blobs, chain.host, chain.genesis, tmp_path / "export")
    assert f"no block below {state.height - 2}" in str(error.value) and short_id(chain.people[0].public) in str(error.value)
    assert not (tmp_path / "export").exists()
    store.close()
    chain.close()
