"""The running parts of the daemon, as the calls of the API find them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import trio

from ledger.core.genesis import Genesis
from ledger.jobs import Job
from ledger.ledger_state import LedgerState
from peer import features
from peer.api.alerts import AlertTracker
from peer.runtime.audits.auditor import Auditor
from peer.runtime.driver import Driver
from peer.runtime.membership.liveness_reports import LivenessMonitor
from peer.runtime.membership.membership import Membership
from peer.runtime.service_context import DriverServiceContext, ReloadSignal
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.settings.config import Config
from peer.settings.data_directory import DataDirectory
from peer.settings.invitation import InvitationBook
from protocol.api import PeerApi
from protocol.errors import UserError
from protocol.identity import Identity
from protocol.messages import LightBlock, Transaction
from storage.disk_blob_store import DiskBlobStore
from storage.ledger_store import LedgerStore
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.round_context import OpenRoundContext, WorkerClient
from transport.discovery.optional_service import OptionalService
from transport.swarm import Swarm

if TYPE_CHECKING:
    from peer.worker.supervisor import WorkerSupervisor

CONCURRENT_TEXTS_MAX: Final = 4  # that people wait for at once: the worker keeps what each has of the model


@dataclass
class RunningPeer:
    """`api` is set once, by whoever makes this."""

    config: Config
    directory: DataDirectory
    identity: Identity
    driver: Driver
    network: Swarm
    worker: WorkerSupervisor | None
    submitter: TransactionSubmitter
    membership: Membership
    auditor: Auditor
    liveness_monitor: LivenessMonitor
    addresses: Callable[[], tuple[str, ...]]  # where others reach this peer, as far as it knows
    optional_services: Sequence[OptionalService] = ()
    stopped: trio.Event = field(default_factory=trio.Event)  # somebody asked for the end
    reload_signal: ReloadSignal = field(default_factory=ReloadSignal)
    alerts: AlertTracker = field(default_factory=AlertTracker)
    text_slots: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(CONCURRENT_TEXTS_MAX))
    started: float = field(default_factory=time.monotonic)
    api: PeerApi = field(init=False)

    @property
    def me(self) -> bytes:
        return self.driver.signer.public

    @property
    def genesis(self) -> Genesis:
        return self.driver.rules.genesis

    @property
    def now_ms(self) -> int:
        """The later one of this clock and the last block's: an idle network's time stands still."""
        return max(time.time_ns() // 1_000_000, self.driver.state.time_ms)

    @cached_property
    def invitations(self) -> InvitationBook:
        return InvitationBook(self.directory.path / "invitations")

    def service_context(self, service: str, /) -> DriverServiceContext:
        return DriverServiceContext(
            service,
            self.config,
            self.driver,
            self.submitter,
            self.directory.path / "services",
            self.identity.unseal,
            self.api,
            self.directory.texts,
            self.reload_signal,
        )

    @contextmanager
    def text_slot(self) -> Iterator[None]:
        """`UserError` where too many texts are made already."""
        try:
            self.text_slots.acquire_nowait()
        except trio.WouldBlock:
            raise UserError(f"{CONCURRENT_TEXTS_MAX} texts are being made at this peer: wait until one of them ends") from None
        try:
            yield
        finally:
            self.text_slots.release()

    @property
    def role(self) -> str:
        return self.config.role

    @property
    def local_data(self) -> str:
        return self.config.local_data

    @property
    def evaluates_models(self) -> bool:
        return self.config.evaluate

    @property
    def state(self) -> LedgerState:
        return self.driver.state

    @property
    def store(self) -> LedgerStore:
        return self.driver.store

    @property
    def blobs(self) -> DiskBlobStore:
        return self.driver.blobs

    @property
    def models(self) -> JobModelStore:
        return self.driver.host

    @property
    def worker_client(self) -> WorkerClient | None:
        return self.driver.round_executor.participant.worker_client

    def make_round_context(self, job: bytes, round: int, of: Job) -> OpenRoundContext:
        return self.driver.round_executor.make_context((job, round), of)

    def audit_window_ms(self, spec: JobSpec) -> int:
        return self.driver.rules.jobs_module.audit_window_ms(spec.encode(), self.state.members)

    async def submit_transaction(self, kind: str, content: object) -> Transaction:
        return await self.submitter.submit(kind, content)

    async def fetch_blob(self, digest: bytes, size_max: int) -> None:
        await self.network.fetch_blob(digest, size_max, ())

    async def newest_certified_state(self) -> tuple[LedgerState, tuple[LightBlock, ...]] | None:
        return await self.driver.state_sync.newest_certified_state()

    def runs_service(self, name: str) -> bool:
        return name in features.roles()[self.config.role].services

    def require_member(self) -> None:
        members = self.driver.state.members
        if members.is_expelled(self.me):
            raise UserError("this peer was expelled: the network has proof that its key signed what no honest peer signs")
        if not members.is_current_key(self.me):
            raise UserError("this peer is not a member yet: it follows the log until its admission is decided")
