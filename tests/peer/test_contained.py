"""Contained faults: a bug in a module, exhausted descriptors, and SIGTERM for a whole process group."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ledger.blocks.application import ROUND_DEFERRAL_SECONDS
from ledger.core.module import BlockContext, StateChange, StateReader
from ledger.jobs import ClosedRound, JobsModule, StartJob, job_id
from ledger.members import RenameMember
from peer.daemon import host_addresses
from peer.daemon.daemon import lacks_descriptors, restart_on_fault
from peer.features import founding_modules
from peer.node.node import StepAction
from peer.settings.process_resources import (
    DESCRIPTORS_NEEDED,
    DESCRIPTORS_PER_WEB_CONNECTION,
    DESCRIPTORS_RESERVED,
    PEER_CONNECTIONS_MAX,
    WEB_CONNECTIONS_MAX,
    ConnectionLimits,
    connection_limits,
)
from protocol.api import TrainRequest
from protocol.errors import LostVotesError, StorageError
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from rlhf.ledger.rlhf_module import RlhfModule, RlhfState
from storage.disk_blob_store import DiskBlobStore
from storage.durable_files import explain_os_errors, skip_without_descriptors
from tests.ledger.world import LANGUAGE, PEOPLE
from tests.peer.network import network
from tests.peer.nodes import Pack
from tests.peer.processes import Daemon, children, command, daemons, poll
from tests.waiting import patience
from tests.web.room import Room, enrolled
from transport.swarm import CONNECTIONS_MAX


async def test_peers_go_on_alike_and_say_it_where_a_module_fails_in_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, state: RlhfState, view: StateReader, context: BlockContext) -> StateChange:
        raise KeyError("planted")

    monkeypatch.setattr(RlhfModule, "settle_block", fails)
    async with network(tmp_path, 3, modules=founding_modules()) as made:
        with trio.fail_after(60):
            for number in range(3):
                await made.seats[0].author.submit("member/rename", RenameMember(f"name {number}"))
            for seat in made.seats:
                while seat.driver.state.height < made.seats[0].driver.state.height:
                    await seat.driver.block_applied.wait()
        roots = {
            seat.driver.state.state_root for seat in made.seats if seat.driver.state.height == made.seats[0].driver.state.height
        }
        assert len(roots) == 1
        for seat in made.seats:
            assert "settle_block of the module rlhf failed: KeyError: 'planted'" in seat.driver.observer.failure
            told = [event.text for event in seat.events.newest_events(1_000) if event.text.startswith("FAILED")]
            assert len(told) == 1, "once, however many blocks it fails in"


def test_a_round_whose_closing_failed_is_closed_later_on_an_idle_network(monkeypatch: pytest.MonkeyPatch) -> None:
    real = JobsModule.settle_block

    def fails(self: Any, state: Any, view: StateReader, context: BlockContext) -> StateChange:
        if context.facts_of(ClosedRound):
            raise KeyError("planted")
        return real(self, state, view, context)

    pack = Pack()
    signed = pack.world.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE))
    pack[0].say(signed)
    pack.until(lambda shell: bool(shell.node.state.jobs.jobs))
    job, height = job_id(signed.signer, pack.world.rules.open_transaction(signed)), pack[0].node.state.height
    monkeypatch.setattr(JobsModule, "settle_block", fails)
    ours = Proposal(job, 0, pack[0].node.state.jobs.jobs[job].model_root, bytes(32), 1, bytes(32), None)
    pack[0].turn(StepAction(lambda: pack[0].node.rounds.publish_proposal(ours, pack.now)))
    pack.settle()
    for shell in pack:
        shell.node.rounds.record_verdict((job, 0), PEOPLE[0].public, Verdict.ACCEPT, pack.now)
        if shell.me != PEOPLE[0].public:
            shell.node.rounds.record_replay_verdict((job, 0), PEOPLE[0].public, Verdict.ACCEPT, pack.now)
    pack.until(lambda shell: shell.node.state.height > height, seconds=3_600.0)
    blocks, started = pack[0].node.state.height, pack.now
    pack.pass_time(10 * ROUND_DEFERRAL_SECONDS)
    blocks = pack[0].node.state.height - blocks
    assert 0 < blocks <= (pack.now - started) / ROUND_DEFERRAL_SECONDS, "it is tried again, and not all the time"
    assert [shell.node.state.jobs.jobs[job].round for shell in pack] == [0] * 4
    monkeypatch.undo()
    pack.pass_time(2 * ROUND_DEFERRAL_SECONDS)
    assert all(shell.node.state.jobs.jobs[job].round for shell in pack)


def test_all_connections_fit_what_a_peer_needs() -> None:
    assert PEER_CONNECTIONS_MAX == CONNECTIONS_MAX
    assert (
        connection_limits(DESCRIPTORS_NEEDED)
        == connection_limits(1 << 20)
        == ConnectionLimits(PEER_CONNECTIONS_MAX, WEB_CONNECTIONS_MAX)
    )
    assert connection_limits(1_024) == ConnectionLimits(PEER_CONNECTIONS_MAX, 96)


@given(st.integers(16, 100_000))
def test_shares_leave_the_reserve_at_any_limit(limit: int) -> None:
    found = connection_limits(limit)
    assert found.peers + DESCRIPTORS_PER_WEB_CONNECTION * found.web <= limit - min(DESCRIPTORS_RESERVED, limit // 2)
    assert 0 < found.peers <= PEER_CONNECTIONS_MAX and 0 < found.web + 1 <= WEB_CONNECTIONS_MAX + 1


def full() -> OSError:
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


FAULTS: dict[str, Callable[[], Exception]] = {
    "descriptors": full,
    "all files": lambda: OSError(errno.ENFILE, os.strerror(errno.ENFILE)),
    "database": lambda: sqlite3.OperationalError("unable to open database file"),
    "storage": lambda: StorageError("cannot read addresses: Too many open files"),
    "group": lambda: ExceptionGroup("nursery", [full(), ExceptionGroup("inner", [full()])]),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_of_the_system_is_told_once_and_the_task_runs_again(fault: str) -> None:
    told, runs = list[str](), 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs < 4:
            raise FAULTS[fault]()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peer.daemon.daemon.RETRY_SECONDS", 0.001)
        await restart_on_fault("the check for alerts", run, told.append)
    assert runs == 4 and len(told) == 1 and told[0].startswith("the check for alerts failed (")


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), LostVotesError("the ledger is gone"), ExceptionGroup("nursery", [full(), KeyError("a bug")])]
)
async def test_a_fault_of_ours_and_lost_votes_pass_on(error: Exception) -> None:
    async def run() -> None:
        raise error

    with pytest.raises(type(error)):
        await restart_on_fault("a part", run, print)


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def explained_as_storage(error: OSError) -> StorageError:
    with pytest.raises(StorageError) as raised, explain_os_errors(Path("blobs")):
        raise error
    return raised.value


def test_a_full_disk_is_no_shortage_of_descriptors() -> None:
    for make in (full, FAULTS["all files"], FAULTS["group"], lambda: explained_as_storage(full())):
        assert lacks_descriptors(make())
    for other in (disk_full(), explained_as_storage(disk_full()), ValueError(), ExceptionGroup("", [full(), disk_full()])):
        assert not lacks_descriptors(other)
    with skip_without_descriptors("a look"):
        raise full()
    with pytest.raises(OSError, match="No space"), skip_without_descriptors("a look"):
        raise disk_full()


@pytest.mark.real("a daemon")
async def test_what_works_beside_agreement_goes_on_after_a_shortage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, failures = DiskBlobStore.retained_rounds, list[str]()

    def kept_together(blobs: DiskBlobStore) -> list[tuple[bytes, int]]:
        if len(failures) < 2:
            failures.append("")
            raise full()
        return kept(blobs)

    monkeypatch.setattr(DiskBlobStore, "retained_rounds", kept_together)
    monkeypatch.setattr("peer.daemon.daemon.RETRY_SECONDS", 0.01)
    async with Room(tmp_path).serving() as (daemon, site):

        async def has_failed() -> bool:
            return len(failures) == 2

        await poll(has_failed)
        await enrolled(site, "ann")
        assert any(
            event.text.startswith("auditing failed (Too many open files)") for event in daemon.driver.events.newest_events(99)
        )


@pytest.mark.real("descriptors of this process run out")
def test_a_machine_that_cannot_be_asked_for_its_addresses_has_none() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert host_addresses.host_addresses() == ()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


RUN = ("run", "--listen", "127.0.0.1:0", "--role", "full")
TINY = {"model.width": "16", "model.layers": "1", "model.hidden": "16", "byzantine_max": "0"}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    assert command("init", "--network", "lab", "--data-dir", str(tmp_path / "anna"))[0] == 0
    with daemons([tmp_path / "anna"]) as [made]:
        yield made


@pytest.mark.real("a daemon, its worker and their signals")
async def test_a_whole_group_that_is_terminated_ends_cleanly(daemon: Daemon) -> None:
    """The signal comes in the middle of training. The peer resumes from there."""
    daemon.start(*RUN)
    await daemon.answers()
    job = await daemon.client.start_job(TrainRequest("text", "", 1_000_000, 0, TINY))
    await _rounds(daemon, job, 2)
    workers = children(daemon.pid)
    assert workers and {os.getpgid(process) for process in (daemon.pid, *workers)} == {daemon.pid}
    for worker in workers:  # the worker's signal may be handled long before the daemon's
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
