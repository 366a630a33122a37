"""Shares of the descriptors, and tasks that outlast faults of the system."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.daemon import host_addresses
from peer.daemon.daemon import lacks_descriptors, restart_on_fault
from peer.settings.process_resources import (
    DESCRIPTORS_NEEDED,
    DESCRIPTORS_PER_WEB_CONNECTION,
    DESCRIPTORS_RESERVED,
    PEER_CONNECTIONS_MAX,
    WEB_CONNECTIONS_MAX,
    ConnectionLimits,
    connection_limits,
)
from protocol.errors import LostVotesError, StorageError
from storage.disk_blob_store import DiskBlobStore
from storage.durable_files import explain_os_errors, skip_without_descriptors
from tests.peer.processes import poll
from tests.web.room import Room, enrolled
from transport.swarm import CONNECTIONS_MAX


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
        await restart_on_fault("the look for alerts", run, told.append)
    assert runs == 4 and len(told) == 1 and told[0].startswith("the look for alerts failed (")


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
