"""One daemon as a process: what it loads, how it ends, what it says when its disk fails."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from protocol.api import TrainRequest
from protocol.errors import UserError
from tests.peer.processes import SECONDS_MAX, Daemon, children, command, daemons, has_torch, peer
from training.host import ModelHost


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    directory = tmp_path / "peer"
    assert command("init", "--network", "lab", "--data-dir", str(directory))[0] == 0
    with daemons([directory]) as made:
        yield made[0]


RUN = ("run", "--role", "voter", "--listen", "127.0.0.1:0")


async def test_it_answers_stops_on_sigterm_and_comes_back_to_its_root(daemon: Daemon) -> None:
    await daemon.start(*RUN).answers()
    await daemon.client.test()
    before = await daemon.until(height=3)  # the job, its round, and the block that certifies the last root
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.log
    after = await daemon.start(*RUN).answers()
    assert (after.height, after.state_root) == (before.height, before.state_root)


async def test_with_its_default_settings_it_trains(daemon: Daemon) -> None:
    await daemon.start("run", "--listen", "127.0.0.1:0").answers()
    tiny = {"model.width": "16", "model.layers": "1", "model.hidden": "16", "local_steps": "1", "batch": "1"}
    await daemon.client.train(TrainRequest("tiny", "", 1, 0, tiny))
    with trio.fail_after(SECONDS_MAX):
        while not (rounds := await daemon.client.rounds(1)):
            await daemon.client.events(-1, 0.1)
            await trio.sleep(0.05)
    assert list(rounds[0].verdicts.values()) == ["accept"]
    assert (await daemon.client.stats()).worker.startswith("torch")
    with pytest.raises(UserError, match="fits 0 finished jobs"):
        await daemon.client.train(TrainRequest("more", "", 1, 0, {}, "huge"))
    with pytest.raises(UserError, match="the model is that of job 'tiny'"):
        await daemon.client.train(TrainRequest("more", "", 1, 0, tiny | {"model.width": "32"}, "tiny"))
    await daemon.client.train(TrainRequest("more", "", 1, 0, {"local_steps": "1", "batch": "1"}, "tiny"))
    with trio.fail_after(SECONDS_MAX):
        while len(await daemon.client.rounds(2)) < 2:
            await daemon.client.events(-1, 0.1)
            await trio.sleep(0.05)
    more = next(bytes.fromhex(view.job) for view in await daemon.client.jobs() if view.name == "more")
    export = str(daemon.directory.parent / "export")
    await daemon.client.export(export)
    assert daemon.terminate() == 0
    host = ModelHost(daemon.directory / "models")
    assert (host.model(bytes.fromhex(rounds[0].job), 1).parameters == host.model(more, 0).parameters).all(), (
        "it starts where the other one ended"
    )
    assert command("audit", export)[0] == 0, "whoever replays the run comes to the same models"


async def test_killed_at_any_time_it_comes_back_to_a_root_it_had(daemon: Daemon) -> None:
    await daemon.start(*RUN).answers()
    await daemon.client.test()
    daemon.kill()
    await daemon.start(*RUN).answers()
    await daemon.until(height=3)
    (job,) = await daemon.client.jobs()
    assert (job.state, list(job.accepted.values())) == ("finished", [1])


async def test_a_voter_loads_no_torch_not_even_after_a_round(daemon: Daemon) -> None:
    await daemon.start(*RUN).answers()
    await daemon.client.test()
    await daemon.until(height=3)
    assert not has_torch(daemon.pid)
    assert children(daemon.pid) == []  # and nobody who could have


async def test_a_full_disk_ends_it_with_one_line_and_nothing_lost(daemon: Daemon) -> None:
    before = await daemon.start(*RUN).answers()
    size = (daemon.directory / "ledger.sqlite-wal").stat().st_size
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    assert daemon.process is not None
    with trio.move_on_after(SECONDS_MAX):
        try:
            await daemon.client.test()
        except Exception as error:  # whatever a client sees of a peer that stops
            assert "peer" in str(error)
    status = await trio.to_thread.run_sync(daemon.process.wait, SECONDS_MAX)
    assert status == 2, daemon.log
    assert "Traceback" not in daemon.log
    last = daemon.log.strip().splitlines()[-1]
    assert last.startswith("peer: error: ")
    assert "ledger.sqlite" in last
    after = await daemon.start(*RUN).answers()
    assert after.state_root == before.state_root
    await daemon.client.test()
    await daemon.until(height=before.height + 3)


async def test_what_cannot_start_says_so_in_one_line(daemon: Daemon, tmp_path: Path) -> None:
    place = ("--data-dir", str(daemon.directory), "--no-console", "--role", "voter")
    address = (await daemon.start(*RUN).answers()).address
    other = tmp_path / "other"
    assert command("init", "--network", "lab", "--data-dir", str(other))[0] == 0
    for arguments, words in (
        (("run", *place), "runs on"),
        (("run", "--no-console", "--role", "voter", "--data-dir", str(other), "--listen", address), address),
        (("run", "--no-console", "--data-dir", str(tmp_path / "none")), "none"),
    ):
        status, _, error = peer(*arguments)
        assert status == 2, (arguments, error)
        assert error.startswith("peer: error: ")
        assert error.count("\n") == 1
        assert words in error
    daemon.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]


async def test_a_damaged_genesis_or_ledger_is_named(daemon: Daemon) -> None:
    place = ("--data-dir", str(daemon.directory), "--no-console", "--role", "voter", "--listen", "127.0.0.1:0")
    ledger, genesis = daemon.directory / "ledger.sqlite", daemon.directory / "genesis"
    whole = genesis.read_bytes()
    genesis.write_bytes(whole[:-1])
    status, _, error = peer("run", *place)
    assert (status, error.count("\n")) == (2, 1)
    assert f"{genesis} is damaged" in error
    genesis.write_bytes(whole)
    ledger.write_bytes(b"this is no database" * 100)
    status, _, error = peer("run", *place)
    assert (status, error.count("\n")) == (2, 1)
    assert str(ledger) in error
