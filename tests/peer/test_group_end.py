"""SIGTERM reaches a whole process group, as systemd and containers send it: the daemon ends cleanly, and its worker with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from protocol.api import TrainRequest
from tests.peer.processes import Daemon, children, command, daemons
from tests.waiting import patience

pytestmark = pytest.mark.real("a daemon, its worker and their signals")
RUN = ("run", "--listen", "127.0.0.1:0", "--role", "full")
TINY = {"model.width": "16", "model.layers": "1", "model.hidden": "16", "byzantine_max": "0"}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    assert command("init", "--network", "lab", "--data-dir", str(tmp_path / "anna"))[0] == 0
    with daemons([tmp_path / "anna"]) as [made]:
        yield made


async def test_a_whole_group_that_is_terminated_ends_cleanly(daemon: Daemon) -> None:
    """In the middle of training; and the peer goes on from there."""
    daemon.start(*RUN)
    await daemon.answers()
    job = await daemon.client.start_job(TrainRequest("text", "", 1_000_000, 0, TINY))
    await _rounds(daemon, job, 2)
    workers = children(daemon.pid)
    assert workers and {os.getpgid(process) for process in (daemon.pid, *workers)} == {daemon.pid}
    for worker in workers:  # its signal may be handled long before the daemon's
        os.kill(worker, signal.SIGTERM)
    await _rounds(daemon, job, next(view.round for view in await daemon.client.jobs() if view.job == job) + 3)
    assert children(daemon.pid) == workers and "restarted" not in (await daemon.client.stats()).worker
    height = (await daemon.client.status()).height
    os.killpg(daemon.pid, signal.SIGTERM)
    with patience():
        status = await trio.to_thread.run_sync(daemon.process.wait)  # type: ignore[union-attr]
    assert status == 0, daemon.log
    assert "Traceback" not in daemon.log and "ERROR" not in daemon.log and "WARNING" not in daemon.log, daemon.log
    assert "worker" not in daemon.log.partition("stopping on SIGTERM")[2], daemon.log
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
    daemon.start(*RUN)
    await daemon.answers()
    assert (await daemon.client.status()).height >= height
    view = next(view for view in await daemon.client.jobs() if view.job == job)
    await _rounds(daemon, job, view.round + 2)
    assert daemon.terminate() == 0


async def _rounds(daemon: Daemon, job: str, count: int) -> None:
    with patience():
        while next(view.round for view in await daemon.client.jobs() if view.job == job) < count:  # noqa: ASYNC110
            await trio.sleep(0.05)
