"""Kept data of client runs: at a peer without a worker, in its exports, and in audits that re-execute them."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from clients.gateway.client_runs import ClientRuns
from clients.objective import ClientObjective
from clients.records import ListedBody, Manifest, StepBrief, StepDeclaration
from demo.lying_trainer import Liar
from ledger.jobs import JobPhase
from peer import cli
from peer.api.running_peer import RunningPeer
from peer.commands import local_commands
from peer.commands.offline_audit import audit_data_directory, audit_with_worker
from peer.daemon.daemon import ParticipantContext, make_honest_participant, running_daemon
from peer.export.batch_replay import NO_WORKER, FalseUpdate
from peer.export.export_replay import audit_export
from peer.export.run_export import BATCHES, MANIFEST, batch_path
from peer.runtime.batch_retention import BatchKeeper
from peer.runtime.driver import Driver
from peer.settings.config import load_settings
from protocol import codec
from protocol.blob_digest import blob_digest
from protocol.errors import UserError
from protocol.identity import peer_id
from storage.batch_store import BatchStore, KeptRound
from storage.disk_blob_store import DiskBlobStore
from tests.clients.runs import body, client_spec
from tests.clients.test_client_runs import ADAMW
from tests.clients.test_daemon import take_step, train_base
from tests.waiting import patience
from training.round_context import OpenRoundContext, RoundContext
from training.worker_protocol import ProposeRequest

FLIPPED, WRONG_LOSS = 2, 3  # rounds in which the trainer lies
STEPS = 6


# The keeper, at a peer that a test scripts ------------------------------------------------------------------------------

JOB = b"j" * 32
BODIES = [codec.encode(body(seed=seed)) for seed in range(2)]
LISTED = codec.encode(Manifest(tuple(ListedBody(blob_digest(data), len(data)) for data in BODIES)))
BRIEF = codec.encode(StepBrief(0, blob_digest(LISTED), sum(body(seed=seed).tokens for seed in range(2)), ADAMW))


class ScriptedPeer:
    """A peer whose ledger has one job. Blobs arrive as soon as `arrives` is set."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.arrives, self.block_applied = folder, trio.Event(), trio.Event()
        self.blobs, self.batches = DiskBlobStore(folder / "kept", folder / "passing"), BatchStore(folder / "batches", 10_000)
        self.job = SimpleNamespace(phase=JobPhase.RUNNING, round=4, brief=BRIEF, spec=client_spec().encode())
        self.closed = dict[int, SimpleNamespace]()
        self.texts = list[str]()
        self.events = SimpleNamespace(add=lambda kind, text, **fields: self.texts.append(text))
        self.signer, self.network, self.store, self.host = SimpleNamespace(public=b"k" * 32), self, self, self

    @property
    def state(self) -> Any:
        jobs = {JOB: self.job}
        running = {key: job for key, job in jobs.items() if job.phase is JobPhase.RUNNING}
        return SimpleNamespace(jobs=SimpleNamespace(jobs=jobs, running=lambda: running))

    def open_model(self, job: bytes, number: int) -> Any:
        return SimpleNamespace(job=job, round=number)

    def round_directory(self, job: bytes, number: int) -> Path:
        return self.folder / "models" / job.hex() / str(number)

    def closed_round(self, job: bytes, number: int) -> Any:
        return self.closed.get(number)

    async def fetch_blob(self, digest: bytes, size_max: int, sources: object) -> None:
        await self.arrives.wait()
        for data in (LISTED, *BODIES):
            if blob_digest(data) == digest:
                self.blobs.add_bytes(data)

    def close(self, verdict: str, height: int) -> None:
        self.closed[self.job.round] = SimpleNamespace(verdicts={b"k" * 32: verdict}, height=height)
        self.job.round, self.job.phase, self.job.brief = self.job.round + 1, JobPhase.PAUSED, b""

    async def apply_block(self) -> None:
        applied, self.block_applied = self.block_applied, trio.Event()
        applied.set()
        await wait_all_tasks_blocked()

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(BatchKeeper(cast(Driver, self), self.batches).run)
            await wait_all_tasks_blocked()
            yield
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    async def let_blobs_arrive(self) -> None:
        self.arrives.set()
        await wait_all_tasks_blocked()


async def test_the_data_of_an_accepted_round_are_kept_and_no_temporary_blob_stays(tmp_path: Path) -> None:
    peer = ScriptedPeer(tmp_path)
    async with peer.keeping():
        await peer.let_blobs_arrive()
        assert peer.batches.open_rounds() == {(JOB, 4)}
        peer.blobs.delete_unowned(set())
        assert all(peer.blobs.size(blob_digest(data)) is None for data in (LISTED, *BODIES)), "other code owns no blob here"
        peer.close("accept", 9)
        await peer.apply_block()
    assert peer.batches.kept_rounds() == [KeptRound(9, JOB, 4)] and peer.texts == []
    assert peer.batches.read_round(KeptRound(9, JOB, 4)) == {blob_digest(data): data for data in (LISTED, *BODIES)}


@pytest.mark.parametrize("verdict", ["replay", "absent"])
async def test_the_data_of_a_round_that_accepted_nothing_are_deleted(tmp_path: Path, verdict: str) -> None:
    peer = ScriptedPeer(tmp_path)
    async with peer.keeping():
        await peer.let_blobs_arrive()
        assert peer.batches.open_rounds() == {(JOB, 4)}
        peer.close(verdict, 9)
        await peer.apply_block()
    assert peer.batches.kept_rounds() == [] and peer.batches.open_rounds() == set()


async def test_a_round_that_closes_before_its_data_arrive_is_reported(tmp_path: Path) -> None:
    peer = ScriptedPeer(tmp_path)
    async with peer.keeping():
        peer.close("accept", 9)
        await peer.apply_block()
        await peer.let_blobs_arrive()
    assert peer.batches.kept_rounds() == [] and peer.batches.open_rounds() == set()
    assert peer.texts == ["the data of round 5 are not kept: it closed before this peer had them"]


async def test_a_round_that_closes_while_its_files_are_linked_is_kept_without_a_further_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, link = ScriptedPeer(tmp_path), BatchStore.add_open_round

    def close_first(self: BatchStore, job: bytes, round: int, files: Any) -> None:
        peer.close("accept", 9)
        link(self, job, round, files)

    monkeypatch.setattr(BatchStore, "add_open_round", close_first)
    async with peer.keeping():
        await peer.let_blobs_arrive()
    assert peer.batches.kept_rounds() == [KeptRound(9, JOB, 4)]


@pytest.mark.parametrize("verdict", ["accept", "replay", None])
async def test_a_restarted_peer_decides_about_the_rounds_that_were_open(tmp_path: Path, verdict: str | None) -> None:
    first = ScriptedPeer(tmp_path)
    async with first.keeping():
        await first.let_blobs_arrive()
    again = ScriptedPeer(tmp_path)
    again.arrives.set()
    if verdict:
        again.close(verdict, 9)
    async with again.keeping():
        pass
    assert again.batches.kept_rounds() == ([KeptRound(9, JOB, 4)] if verdict == "accept" else [])
    assert again.batches.open_rounds() == (set() if verdict else {(JOB, 4)})


async def test_deleted_rounds_are_events(tmp_path: Path) -> None:
    peer = ScriptedPeer(tmp_path)
    peer.batches.bytes_max = 10
    async with peer.keeping():
        await peer.let_blobs_arrive()
        assert peer.batches.open_rounds() == {(JOB, 4)}
        peer.close("accept", 9)
        await peer.apply_block()
    assert peer.batches.kept_rounds() == []
    assert peer.texts == ["deleted the data of round 5: keep_batches_gb is reached"]


async def test_a_malformed_brief_is_reported_and_the_peer_goes_on(tmp_path: Path) -> None:
    peer = ScriptedPeer(tmp_path)
    peer.job.brief = codec.encode(replace(codec.decode(StepBrief, BRIEF), tokens=1))
    async with peer.keeping():
        await peer.let_blobs_arrive()
    assert "the data of round 5 are not kept: bad-brief: 1 tokens have at most" in peer.texts[0]


# Two daemons, of which the one without a worker keeps the data ----------------------------------------------------------


@dataclass
class FalseTrainer(Liar):
    """A trainer that lies in two rounds of a client run. No other peer of its network re-executes."""

    async def propose(self, round: OpenRoundContext) -> None:
        self.attack = "sign-flip" if _is_client(round) and round.number == FLIPPED else "none"
        await super().propose(round)

    async def ask_worker(self, round: RoundContext, request: Any) -> Any:
        done = await super().ask_worker(round, request)
        if isinstance(request, ProposeRequest) and _is_client(round) and round.number == WRONG_LOSS:
            said = codec.decode(StepDeclaration, done.declaration)
            done = replace(done, declaration=codec.encode(replace(said, loss=said.loss + abs(said.loss) // 100)))
        return done


def _is_client(round: RoundContext) -> bool:
    return round.spec.objective == ClientObjective.name


def make_false_participant(context: ParticipantContext) -> FalseTrainer:
    assert context.worker is not None
    return FalseTrainer(context.worker, context.text_folder)


@dataclass
class Exports:
    keeper: Path  # export of the peer that keeps data
    gateway: Path  # export of the gateway, which deletes them
    job: str
    trainer: str  # peer id
    kept_rounds: list[int]


async def make_exports(folder: Path, capsys: pytest.CaptureFixture[str]) -> Exports:
    keeper, gateway = folder / "keeper", folder / "gateway"

    async def peer(*arguments: str) -> str:
        assert await trio.to_thread.run_sync(cli.main, list(arguments)) == 0
        return capsys.readouterr().out.strip()

    other = await peer("identity", "--data-dir", str(keeper))
    founding = ["init", "--data-dir", str(gateway), "--network", "lab", "--listen", "127.0.0.1:0", "--voter", other]
    await peer(*founding)
    shutil.copyfile(gateway / "genesis", keeper / "genesis")
    environment = {"HOME": str(folder)}
    config = load_settings({"data_directory": gateway, "role": "trainer"}, environment).config
    async with running_daemon(config, make_false_participant) as one:
        (address,) = (await one.api.status()).listen_addresses
        of_keeper = {"data_directory": keeper, "role": "voter", "bootstrap": address, "listen": "none", "keep_batches_gb": 1}
        config = load_settings(of_keeper, environment).config
        runs = ClientRuns(one)
        async with running_daemon(config, make_honest_participant) as two:
            await train_base(one, folder)
            key = await runs.open_run("base", rank=4, seed=7)
            for number in range(STEPS - 1):
                await take_step(runs, key, number, body(examples=3, seed=number))
                await until_kept(two, key, number)
            assert [kept.round for kept in two.batches.kept_rounds()] == list(range(STEPS - 1))
        async with running_daemon(config, make_honest_participant) as two:
            assert [kept.round for kept in two.batches.kept_rounds()] == list(range(STEPS - 1)), "they outlive a restart"
            two.batches.bytes_max -= two.batches.bytes_left  # The next round replaces the oldest ones.
            await take_step(runs, key, STEPS - 1, body(examples=3, seed=STEPS))
            await until_kept(two, key, STEPS - 1)
            kept = [each.round for each in two.batches.kept_rounds()]
            (run,) = await two.api.client_runs()  # type: ignore[attr-defined]
            assert (run.accepted_rounds, run.kept_rounds, run.first_kept_round) == (STEPS, len(kept), kept[0])
            assert not (gateway / "batches").exists()
            await two.api.export_run(str(folder / "kept"))
            await one.api.export_run(str(folder / "deleted"))
    return Exports(folder / "kept", folder / "deleted", key.hex(), peer_id(one.me), kept)


async def until_kept(daemon: RunningPeer, job: bytes, number: int) -> None:
    while (job, number) not in {(kept.job, kept.round) for kept in daemon.batches.kept_rounds()}:  # noqa: ASYNC110 - no event
        await trio.sleep(0.01)


@pytest.mark.real("sockets, and worker processes")
def test_an_audit_re_executes_kept_steps_and_names_false_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def make() -> Exports:
        with patience():
            return await make_exports(tmp_path, capsys)

    exports = trio.run(make)
    first, honest = exports.kept_rounds[0], set(exports.kept_rounds) - {FLIPPED, WRONG_LOSS}
    assert 0 < first <= FLIPPED and exports.kept_rounds == list(range(first, STEPS))

    found = audit_with_worker(exports.keeper, lambda done, total: None).requested_updates[exports.job]
    assert (found.updates, found.without_data, found.confirmed, found.first_confirmed, found.unjudged) == (
        STEPS,
        first,
        len(honest),
        min(honest),
        {},
    )
    reasons = {FLIPPED: "replay", WRONG_LOSS: "loss"}
    assert [(false.round, false.trainer, false.reason) for false in found.false_updates] == [
        (number, exports.trainer, reason) for number, reason in reasons.items()
    ]
    assert isinstance(found.false_updates[0], FalseUpdate)

    assert local_commands.run_audit(argparse.Namespace(directory=str(exports.keeper))) == local_commands.EXIT_FALSE_UPDATES
    text = capsys.readouterr().out
    assert f"in round {FLIPPED + 1} is false: replay (re-execution gave a different update)" in text
    assert f"in round {WRONG_LOSS + 1} is false: loss (the trainer declared another loss than the re-execution gave)" in text
    assert f"{len(honest)} updates re-executed from kept data from round {min(honest) + 1} on, with the same result" in text
    assert "but not re-executed: peers delete the requests of a person's own program after each round" in text
    assert "keep_batches_gb" in text and "but a quorum accepted 2 false updates: see above" in text

    found_again = audit_data_directory(tmp_path / "keeper", lambda done, total: None)
    assert found_again.requested_updates[exports.job] == found
    assert BatchStore(tmp_path / "keeper" / "batches", 10**9).kept_rounds()[0].round == first, "an audit deletes nothing"

    without = audit_export(exports.keeper).requested_updates[exports.job]
    assert without.unjudged == {NO_WORKER: len(exports.kept_rounds)} and without.false_updates == []

    assert json.loads((exports.gateway / MANIFEST).read_text())["format"] == 5 and not (exports.gateway / BATCHES).exists()
    assert json.loads((exports.keeper / MANIFEST).read_text())["format"] == 6
    deleted = audit_with_worker(exports.gateway, lambda done, total: None).requested_updates[exports.job]
    assert (deleted.updates, deleted.without_data, deleted.confirmed) == (STEPS, STEPS, 0)

    for file in sorted((exports.keeper / BATCHES).iterdir())[:3]:
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        name = batch_path(bytes.fromhex(file.name))
        with pytest.raises(UserError, match=f"{name}: its bytes do not have the digest in its name"):
            audit_with_worker(exports.keeper, lambda done, total: None)
        file.unlink()
        with pytest.raises(UserError, match=f"{name}: it is missing"):
            audit_export(exports.keeper)
        file.write_bytes(whole)
    (exports.keeper / batch_path(bytes(32))).write_bytes(b"x")
    with pytest.raises(UserError, match="does not belong to this export"):
        audit_export(exports.keeper)
