"""The running parts of the daemon, for handlers of calls and for services."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from features.api_keys import ApiKeys
from features.feature import Feature
from ledger.jobs import Job
from ledger.ledger_state import LedgerState
from ledger.network_governance import NetworkState
from peer import features
from peer.api.alerts import AlertTracker
from peer.runtime.auditor import Auditor
from peer.runtime.driver import Driver
from peer.runtime.membership.liveness_reports import LivenessMonitor
from peer.runtime.membership.membership import Membership
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.settings.config import Config
from peer.settings.data_directory import DataDirectory
from peer.settings.invitation import InvitationBook
from peer.settings.process_resources import connection_limits, descriptor_limit
from protocol import messages
from protocol.api import PeerApi
from protocol.errors import UserError
from protocol.identity import Identity, Signed, sign_message
from storage.api_key_store import ApiKeyStore
from storage.batch_store import BatchStore
from training.job_spec import JobSpec
from training.round_context import OpenRoundContext
from transport.discovery.optional_service import OptionalService
from transport.swarm import Swarm

if TYPE_CHECKING:
    from peer.worker.supervisor import WorkerSupervisor

CONCURRENT_TEXTS_MAX: Final = 4  # texts that are generated at once: the worker keeps a state of the model for each text
PROTOCOL_TAGS = frozenset(tag for kind in vars(messages).values() if isinstance(tag := getattr(kind, "TAG", None), str))


@dataclass
class RunningPeer:
    """The parts of one running daemon.

    Implements `training.round_context.TrainingPeer`. The daemon sets `api` once after creation.
    """

    config: Config
    directory: DataDirectory
    identity: Identity
    driver: Driver
    network: Swarm
    worker: WorkerSupervisor | None
    batches: BatchStore
    submitter: TransactionSubmitter
    membership: Membership
    auditor: Auditor
    liveness_monitor: LivenessMonitor
    addresses: Callable[[], tuple[str, ...]]  # function that returns the known addresses at which other peers reach this peer
    optional_services: Sequence[OptionalService] = ()
    stopped: trio.Event = field(default_factory=trio.Event)  # set when a user requests that the peer stops
    # Set and replaced at SIGHUP, after which services read their files again.
    reloaded: trio.Event = field(default_factory=trio.Event)
    alerts: AlertTracker = field(default_factory=AlertTracker)
    text_slots: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(CONCURRENT_TEXTS_MAX))
    started: float = field(default_factory=time.monotonic)
    api: PeerApi = field(init=False)

    def __post_init__(self) -> None:
        driver, config = self.driver, self.config
        self.me, self.genesis = driver.signer.public, driver.rules.genesis
        self.store, self.blobs, self.models = driver.store, driver.blobs, driver.host
        self.worker_client = driver.round_executor.participant.worker_client
        self.role, self.local_data, self.evaluates_models = config.role, config.local_data, config.evaluate
        self.submit_transaction = self.submitter.submit
        self.newest_certified_state = driver.state_sync.newest_certified_state

    @property
    def state(self) -> LedgerState:
        return self.driver.state

    @property
    def now_ms(self) -> int:
        """Time in ms: the later of this machine's clock and the last block's time. An idle network decides no blocks."""
        return max(time.time_ns() // 1_000_000, self.state.time_ms)

    @cached_property
    def invitations(self) -> InvitationBook:
        return InvitationBook(self.directory.path / "invitations")

    @cached_property
    def api_keys(self) -> ApiKeys:
        return ApiKeys(ApiKeyStore(self.directory.api_keys))

    def service_context(self, service: str, /) -> RunningServiceContext:
        return RunningServiceContext(service, self)

    @contextmanager
    def text_slot(self) -> Iterator[None]:
        """Hold a slot for a generated text. Raises `UserError` if all `CONCURRENT_TEXTS_MAX` slots are taken."""
        try:
            self.text_slots.acquire_nowait()
        except trio.WouldBlock:
            raise UserError(f"this peer already generates {CONCURRENT_TEXTS_MAX} texts: try again when one has ended") from None
        try:
            yield
        finally:
            self.text_slots.release()

    def make_round_context(self, job: bytes, round: int, of: Job) -> OpenRoundContext:
        return self.driver.round_executor.make_context((job, round), of)

    def audit_window_ms(self, spec: JobSpec) -> int:
        return self.driver.rules.jobs_module.audit_window_ms(spec.encode(), self.state.members)

    async def fetch_blob(self, digest: bytes, size_max: int) -> None:
        await self.network.fetch_blob(digest, size_max, ())

    def runs_service(self, name: str) -> bool:
        return name in features.roles()[self.role].services

    def require_member(self) -> None:
        members = self.state.members
        if members.is_expelled(self.me):
            raise UserError("this peer was expelled: its key signed two statements that exclude each other")
        if not members.is_current_key(self.me):
            raise UserError("this peer is not a member yet: wait until its admission is decided")


class RunningServiceContext:
    """The running peer as one service of a feature sees it. Implements `features.services.ServiceContext`."""

    def __init__(self, service_name: str, peer: RunningPeer) -> None:
        """Make the context of a service. `service_name` is also the author of the service's events and the name of its folder."""
        self._name, self._driver = service_name, peer.driver
        self.me, self.chain_id, self.network, self.peer = peer.me, peer.genesis.chain_id, peer.genesis.network, peer
        self.api, self.text_folder, self.unseal = peer.api, peer.directory.texts, peer.identity.unseal
        self.http_connections_max = connection_limits(descriptor_limit()).web
        self.submit_transaction, self.api_keys = peer.submitter.submit, peer.api_keys
        self.read_blob, self.delete_blob, self.add_blob = peer.blobs.read_blob, peer.blobs.delete_blob, peer.blobs.add_bytes

    @property
    def folder(self) -> Path:
        made = self.peer.directory.path / "services" / self._name
        made.mkdir(parents=True, exist_ok=True)
        return made

    @property
    def state(self) -> LedgerState:
        return self._driver.state

    @property
    def height(self) -> int:
        return self.state.height

    @property
    def state_root(self) -> bytes:
        return self.state.state_root

    @property
    def time_ms(self) -> int:
        return self.state.time_ms

    @property
    def seconds_since_block(self) -> float:
        last = self._driver.observer.last_decision_at
        return max(0.0, self._driver.now() - last) if last else 0.0

    @property
    def running_features(self) -> Sequence[Feature]:
        running = {module.name for module in self.state.module_state(NetworkState).modules}
        return [feature for feature in features.FEATURES if features.versions_of(feature).keys() <= running]

    def get_setting(self, name: str) -> Any:
        return self.peer.config.feature_settings[name]

    def sign(self, statement: object) -> Signed:
        tag: str = getattr(statement, "TAG")  # noqa: B009 - each class of messages has a TAG
        assert tag not in PROTOCOL_TAGS, f"a service signs no {tag}"
        return sign_message(self._driver.signer, self.chain_id, statement)

    async def wait_for_block_above(self, height: int) -> None:
        while self.height <= height:
            await self._driver.block_applied.wait()

    async def wait_for_reload(self) -> None:
        await self.peer.reloaded.wait()

    async def fetch_blob(self, digest: bytes, size_max: int, sources: Iterable[bytes] = ()) -> None:
        await self._driver.network.fetch_blob(digest, size_max, sources)
        self._driver.blobs.pin_blob(digest)

    def log_event(self, text: str) -> None:
        self._driver.events.add(self._name, text)

    def log_warning(self, text: str) -> None:
        self._driver.events.add_warning(self._name, text)
