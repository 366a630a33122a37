"""Daemons in one process: real drivers, ledgers and stores over in-memory links. Only TCP and torch are left out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import trio

from consensus.light_client import TrustedBlock
from ledger.core.genesis import Genesis, ModuleVersion
from ledger.jobs import JobPhase, StartJob, job_id
from ledger.ledger_state import CurrentState
from peer.api.rpc_handlers import make_peer_api
from peer.api.running_peer import RunningPeer
from peer.features import rules_of
from peer.roles.voter import Voter
from peer.runtime.auditor import Auditor
from peer.runtime.blob_retention import StartModelAttester
from peer.runtime.driver import Driver, load_state
from peer.runtime.membership.liveness_reports import LivenessMonitor
from peer.runtime.membership.membership import Membership
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.settings.config import Config
from peer.settings.data_directory import DataDirectory
from protocol.api import PeerApi
from protocol.errors import StorageError
from protocol.identity import CachingVerifier, Ed25519Verifier, Identity
from scenarios.emulation.memory_network import Mesh
from storage.batch_store import BatchStore
from storage.disk_blob_store import DiskBlobStore
from storage.ledger_store import LedgerStore
from tests.peer.chain import SCRATCH, genesis_of, identities
from tests.waiting import patience
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.round_context import RoundParticipant

SECONDS_MAX = 35.0  # for anything that takes well under one second when it works; a silent link ends later


async def poll(condition: Callable[[], bool]) -> None:
    """Poll a condition that no event announces."""
    with patience(SECONDS_MAX):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


class Seat:
    """One peer. Its disk outlives its process, so it may be stopped and started again."""

    def __init__(self, mesh: Mesh, genesis: Genesis, identity: Identity, folder: Path) -> None:
        self.mesh, self.genesis, self.identity, self.folder = mesh, genesis, identity, folder
        self.anchor: TrustedBlock | None = None  # from its invitation
        self.failure: StorageError | None = None
        self._scope = trio.CancelScope()
        self.ended = trio.Event()

    @property
    def public(self) -> bytes:
        return self.identity.public

    def open(self, role: RoundParticipant | None, serve: Callable[[DiskBlobStore], Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        self.store = LedgerStore(self.folder / "ledger.db", self.genesis.chain_id)
        self.blobs = DiskBlobStore(self.folder / "blobs", self.folder / "buffers")
        self.network = self.mesh.network(self.public, serve(self.blobs))
        host = JobModelStore(self.folder / "models")
        self.events = EventLog()
        rules = rules_of(self.genesis, host, CachingVerifier(Ed25519Verifier()))
        self.applied = CurrentState(load_state(rules, self.store))
        self.driver = Driver(
            self.identity,
            rules,
            self.applied,
            self.store,
            self.blobs,
            host,
            self.network,
            role or Voter(),
            self.events,
            self.anchor,
        )
        self.author = TransactionSubmitter(self.driver)
        self.hearing = LivenessMonitor(self.network, self.applied)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._scope, self.ended = trio.CancelScope(), trio.Event()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(self.network.run)
                    await nursery.start(self.driver.run)
                    self.auditing = Auditor(self.driver, self.author)
                    nursery.start_soon(self.auditing.run)
                    nursery.start_soon(self.hearing.run)
                    nursery.start_soon(StartModelAttester(self.driver, self.author).run)
                    task_status.started()
        except* StorageError as group:
            self.failure = _innermost(group)
        finally:
            self.store.close()
            self.ended.set()

    async def stop(self) -> None:
        """Stop the peer as a crash would: it sends and writes nothing more."""
        self._scope.cancel()
        await self.ended.wait()

    async def until(self, condition: Callable[[Driver], bool]) -> None:
        """Wait until `condition` holds after a block was applied. Blocks may be late on a busy machine."""
        while not condition(self.driver):
            with self._in_time():
                await self.driver.block_applied.wait()

    async def event(self, kind: str, text: str) -> str:
        """Return the first event of this kind that contains this text."""
        seen = 0
        with self._in_time():
            while True:
                for event in await self.events.wait_for_events(seen, SECONDS_MAX):
                    seen = event.number
                    if event.kind == kind and text in event.text:
                        return event.text

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Bound a wait. A `trio.TooSlowError` gets notes about this peer's height, jobs, newest events and failure."""
        try:
            with patience(SECONDS_MAX):
                yield
        except trio.TooSlowError as error:
            rounds = {key.hex()[:8]: (job.phase.name, job.round) for key, job in self.driver.state.jobs.jobs.items()}
            error.add_note(f"height {self.driver.state.height}, jobs {rounds}, failure {self.failure}")
            error.add_note("\n".join(f"{event.kind}: {event.text}" for event in self.events.newest_events(20)))
            raise

    async def start_job(self, spec: JobSpec = SCRATCH, **changes: Any) -> bytes:
        """Start a job by a transaction, and return its id when that is decided."""
        with patience(SECONDS_MAX):
            content = StartJob(replace(spec, **changes).encode())
            return job_id(self.public, await self.author.submit("job/start", content))


def service_of(seat: Seat) -> PeerApi:
    return running(seat).api


def running(seat: Seat) -> RunningPeer:
    peer = RunningPeer(
        config=Config(data_directory=seat.folder),
        directory=DataDirectory(seat.folder),
        identity=seat.identity,
        driver=seat.driver,
        network=seat.network,  # type: ignore[arg-type]
        addresses=lambda: ("127.0.0.1:7700",),
        worker=None,
        batches=BatchStore(seat.folder / "batches", 0),
        submitter=seat.author,
        membership=Membership(seat.driver, seat.author, "", (), False, 0, None),
        auditor=seat.auditing,
        liveness_monitor=seat.hearing,
    )
    peer.api = make_peer_api(peer)
    return peer


def _innermost(group: BaseExceptionGroup[StorageError]) -> StorageError:
    error = group.exceptions[0]
    return _innermost(error) if isinstance(error, BaseExceptionGroup) else error


class Network:
    def __init__(
        self,
        folder: Path,
        founders: int,
        observers: int = 0,
        roles: tuple[str, ...] = (),
        modules: tuple[ModuleVersion, ...] = (),
    ) -> None:
        keys = identities(founders + observers)
        genesis = genesis_of(keys[:founders], roles, modules=modules)
        self.mesh = Mesh(seed=1)
        self.seats = [Seat(self.mesh, genesis, key, folder / str(number)) for number, key in enumerate(keys)]
        self._nursery: trio.Nursery

    async def start(
        self, seat: Seat, role: RoundParticipant | None = None, serve: Callable[[DiskBlobStore], Any] = lambda blobs: blobs
    ) -> Seat:
        seat.open(role, serve)
        await self._nursery.start(seat.run)
        return seat


@asynccontextmanager
async def network(
    folder: Path,
    founders: int,
    observers: int = 0,
    start: bool = True,
    roles: tuple[str, ...] = (),
    modules: tuple[ModuleVersion, ...] = (),
) -> AsyncIterator[Network]:
    made = Network(folder, founders, observers, roles, modules)
    with mock.patch("os.fsync"):  # no power failure happens here, and written data survives a stopped peer without a sync
        async with trio.open_nursery() as made._nursery:
            if start:
                for seat in made.seats:
                    await made.start(seat)
            yield made
            made._nursery.cancel_scope.cancel()


def certified(job: bytes) -> Callable[[Driver], bool]:
    """The job is over, and the empty block that certifies its last root is applied."""
    return lambda driver: has_finished(job)(driver) and driver.node.ledger.certified_root == driver.state.state_root


def has_finished(job: bytes) -> Callable[[Driver], bool]:
    return lambda driver: job in driver.state.jobs.jobs and driver.state.jobs.jobs[job].phase is JobPhase.FINISHED


def has_trained(job: bytes) -> Callable[[Driver], bool]:
    """All its rounds are closed. Audits may continue."""
    return lambda driver: job in driver.state.jobs.jobs and driver.state.jobs.jobs[job].is_trained


def settled(job: bytes) -> Callable[[Driver], bool]:
    """The job and its audits are over, and their result is certified."""
    return lambda driver: certified(job)(driver) and job not in driver.state.audits.jobs


def assert_same(seats: Sequence[Seat]) -> None:
    """Assert that all computed one root at the last height that all have reached. Some may be a block ahead."""
    height = min(seat.driver.state.height for seat in seats)
    roots = {seat.store.state_root(height) for seat in seats}
    assert len(roots) == 1 and None not in roots


async def one_root(seats: Sequence[Seat], job: bytes) -> bytes:
    """Return the state root after the job, which each peer computes for itself. All must agree."""
    for seat in seats:
        await seat.until(certified(job))
    assert_same(seats)
    roots = {seat.driver.host.open_model(job, 1).root for seat in seats}
    assert len(roots) == 1
    assert roots == {seats[0].driver.state.jobs.jobs[job].model_root}
    return seats[0].driver.state.state_root


def accepted(seat: Seat, job: bytes) -> dict[bytes, int]:
    return dict(seat.driver.state.jobs.jobs[job].accepted)
