"""One running peer. Each part uses the parts to its right:

    control socket and services of the role  →  driver and membership  →  worker  →  network  →  store

Parts start from right to left and stop from left to right, so that users are disconnected before agreement stops.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from features.lazy_import import import_object
from ledger.core.genesis import Genesis
from ledger.ledger_state import CurrentState
from peer import features
from peer.api.control_socket import serve_control_socket
from peer.api.rpc_handlers import make_peer_api
from peer.api.running_peer import RunningPeer
from peer.daemon.host_addresses import host_addresses, make_optional_services, own_addresses
from peer.roles.voter import Voter
from peer.runtime.auditor import Auditor
from peer.runtime.blob_retention import BlobPinner, PayloadPruner, StartModelAttester
from peer.runtime.driver import Driver, load_state
from peer.runtime.membership.liveness_reports import LivenessMonitor
from peer.runtime.membership.membership import Membership, PeerClassifier
from peer.runtime.model_retention import ModelPruner
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.settings.config import Config, why_unlinked
from peer.settings.data_directory import DataDirectory, load_addresses, save_addresses_periodically
from peer.settings.invitation import parse_invitation
from peer.settings.process_resources import connection_limits, descriptor_limit, raise_descriptor_limit
from protocol.api import PeerApi
from protocol.errors import LostVotesError, RemoteProtocolError, StorageError, UserError
from protocol.identity import CachingVerifier, Ed25519Verifier, Signer
from storage.batch_store import BatchStore
from storage.disk_blob_store import DiskBlobStore
from storage.durable_files import is_descriptor_shortage
from storage.ledger_store import LedgerStore
from training.model_store import JobModelStore
from training.round_context import RoundParticipant
from transport.swarm import Swarm

if TYPE_CHECKING:
    from peer.worker.supervisor import WorkerSupervisor


log = logging.getLogger("peer")

ALERT_SECONDS = 1.0  # seconds between two searches for alerts

RETRY_SECONDS: Final = 5.0  # wait before a failed task runs again: a shortage of descriptors often lasts only seconds
SYSTEM_FAULTS: Final = (OSError, StorageError, sqlite3.Error)


@dataclass(frozen=True, slots=True)
class ParticipantContext:
    """The parts of a peer that a round participant (voter or trainer) needs."""

    config: Config
    worker: WorkerSupervisor | None
    text_folder: Path
    network: Swarm
    signer: Signer
    chain_id: bytes


MakeParticipant = Callable[[ParticipantContext], RoundParticipant]


def make_honest_participant(context: ParticipantContext) -> RoundParticipant:
    if context.worker is None:
        return Voter()
    from peer.roles.trainer import Trainer
    from training.data.text_files import read_text

    local = Path(context.config.local_data).expanduser() if context.config.local_data else None
    if local is not None:
        next(read_text(local))  # an unreadable file must fail at the start, and not during a round
    return Trainer(context.worker, context.text_folder, local, context.config.evaluate)


@asynccontextmanager
async def running_daemon(
    config: Config, make_participant: MakeParticipant = make_honest_participant
) -> AsyncIterator[RunningPeer]:
    """Run a peer while the block runs. At the start of the block, the peer has restored its state from disk and listens.

    Raises `UserError` if the peer cannot start.
    """
    raise_descriptor_limit()
    directory = DataDirectory.open(config.data_directory)
    with directory.lock():
        try:
            genesis = Genesis.decode(directory.read_genesis())
        except RemoteProtocolError as error:
            way = "copy it again from a peer of the same network"
            raise StorageError(f"{directory.genesis} is damaged ({error}); {way}") from None
        with contextlib.closing(LedgerStore(directory.ledger, genesis.chain_id)) as store:
            peer = _assemble_peer(config, directory, genesis, store, make_participant)
            async with _running_tasks(peer):
                yield peer


def _assemble_peer(
    config: Config, directory: DataDirectory, genesis: Genesis, store: LedgerStore, make_participant: MakeParticipant
) -> RunningPeer:
    """Make all parts of the peer without starting a task.

    Raises `UserError` if an error of the disk or the settings prevents that.
    """
    identity, events = directory.load_identity(), EventLog()
    models, blobs = JobModelStore(directory.models, config.threads), DiskBlobStore(directory.blobs, directory.buffers)
    rules = features.rules_of(genesis, models, CachingVerifier(Ed25519Verifier()))
    applied = CurrentState(load_state(rules, store))
    written = directory.path / "invitation"
    invitation = parse_invitation(written.read_text()) if written.exists() else None
    remembered = load_addresses(directory.addresses, lambda text: events.add("warning", text))
    if unlinked := why_unlinked(config, remembered):
        raise UserError(unlinked)
    network = Swarm(
        identity,
        genesis.chain_id,
        config.listen,
        config.bootstrap,
        blobs,
        PeerClassifier(identity.public, genesis.chain_id, Ed25519Verifier(), applied, invitation),
        remembered=remembered,
        advertise=config.advertise,
        tell=lambda text: events.add("peer", text),
        hosts=host_addresses,
        pace=config.keepalive,
        relay=config.relay,
        connections_max=connection_limits(descriptor_limit()).peers,
    )
    role = features.roles()[config.role]
    worker = None
    if role.needs_worker:
        from peer.worker.supervisor import WorkerSupervisor

        worker = WorkerSupervisor(config.resources, engine=config.engine)
    participant = make_participant(ParticipantContext(config, worker, directory.texts, network, identity, genesis.chain_id))
    anchor, payload_bytes = invitation.anchor if invitation else None, config.payloads_gb * 1_000_000_000
    driver = Driver(identity, rules, applied, store, blobs, models, network, participant, events, anchor, payload_bytes)
    batches = BatchStore(directory.batches, config.keep_batches_gb * 1_000_000_000)
    driver.round_executor.disk_space.batches = batches
    submitter, former = TransactionSubmitter(driver), directory.load_former_identity()
    peer = RunningPeer(
        config=config,
        directory=directory,
        identity=identity,
        driver=driver,
        network=network,
        worker=worker,
        batches=batches,
        submitter=submitter,
        membership=Membership(
            driver,
            submitter,
            config.name,
            role.registered_roles,
            config.stand,
            config.approve_invited,
            invitation,
            TransactionSubmitter(driver, former) if former else None,
            directory.forget_former_identity,
        ),
        auditor=Auditor(driver, submitter),
        liveness_monitor=LivenessMonitor(network, applied, lambda text, peer: events.add("peer", text, peer=peer)),
        addresses=lambda: own_addresses(network.addresses, config.advertise, network.external_address),
        optional_services=make_optional_services(config, genesis.chain_id, network, lambda text: events.add("peer", text)),
    )
    peer.api = make_peer_api(peer)
    return peer


@asynccontextmanager
async def _running_tasks(peer: RunningPeer) -> AsyncIterator[None]:
    driver, network = peer.driver, peer.network

    warn = partial(driver.events.add, "warning")
    everywhere = [name for feature in features.FEATURES for name in feature.services_everywhere]
    services = {
        name: import_object(features.services()[name])(peer.service_context(name))
        for name in (*features.roles()[peer.config.role].services, *everywhere)
    }
    beside_agreement = {
        "the blob store": BlobPinner(driver).run,
        "the check of initial models": StartModelAttester(driver, peer.submitter).run,
        "the deletion of old payloads": PayloadPruner(driver).run,
        "the deletion of old models": ModelPruner(driver).run,
        "auditing": peer.auditor.run,
    }
    if peer.config.keep_batches_gb:
        from peer.runtime.batch_retention import BatchKeeper

        beside_agreement["the data of client runs"] = BatchKeeper(driver, peer.batches).run
    watchers: dict[str, Callable[[], Awaitable[None]]] = {
        "the check for alerts": partial(_watch_alerts, peer.api),
        "the address book": partial(
            save_addresses_periodically, peer.directory.addresses, network.peer_addresses, driver.applied
        ),
    }
    if peer.config.retire_after_days:
        from peer.runtime.membership.inactivity import InactivityTracker

        watchers["the count of silent days"] = InactivityTracker(
            network,
            driver.applied,
            driver.observer.take_signers,
            peer.submitter,
            peer.config.retire_after_days,
            peer.directory.path / "silences",
            lambda text, peer: driver.events.add("member", text, peer=peer),
        ).run
    async with trio.open_nursery() as outer:
        await outer.start(network.run)
        for optional in peer.optional_services:
            outer.start_soon(restart_on_fault, optional.name, optional.run, warn)
        async with trio.open_nursery() as computing:
            if peer.worker is not None:
                computing.start_soon(peer.worker.run)
            async with trio.open_nursery() as agreeing:
                await agreeing.start(driver.run)
                agreeing.start_soon(peer.membership.run)
                agreeing.start_soon(peer.membership.report_upgrades)
                agreeing.start_soon(peer.liveness_monitor.run)
                for what, run in beside_agreement.items():
                    agreeing.start_soon(restart_on_fault, what, run, warn, lacks_descriptors)
                for what, watch in watchers.items():
                    agreeing.start_soon(restart_on_fault, what, watch, warn)
                async with trio.open_nursery() as talking:
                    for name, service in services.items():
                        talking.start_soon(restart_on_fault, f"the service {name}", service.run, warn)
                    await talking.start(serve_control_socket, peer.api, peer.directory.path, peer.config.control_socket)
                    yield
                    talking.cancel_scope.cancel()
                agreeing.cancel_scope.cancel()
            computing.cancel_scope.cancel()
        outer.cancel_scope.cancel()


async def _watch_alerts(api: PeerApi) -> None:
    """Update the alerts every `ALERT_SECONDS`, so that their start times do not depend on requests."""
    while True:
        await api.alerts()
        await trio.sleep(ALERT_SECONDS)


def tune_garbage_collector() -> None:
    """Exempt all present objects from garbage collection and collect less often. Only a process with a single peer may call this.

    A block with 512 statements makes about 20,000 objects, of which hardly any is in a reference cycle. With Python's defaults
    the search for cycles takes a fifth of the block's time, and sometimes pauses the peer for 0.1 seconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def wait_for_stop(
    peer: RunningPeer, ending: tuple[signal.Signals, ...], hung_up: Callable[[], bool], ready: Callable[[], None]
) -> None:
    """Wait until a user, one of the signals `ending`, or SIGHUP stops the peer.

    `ready` is called once signal handlers are installed. `hung_up` is called at SIGHUP, and returns True if the peer continues.
    """
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_on_signal, peer, ending, hung_up)
        ready()
        await peer.stopped.wait()
        nursery.cancel_scope.cancel()


async def _stop_on_signal(
    peer: RunningPeer,
    ending: tuple[signal.Signals, ...],
    hung_up: Callable[[], bool],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    with trio.open_signal_receiver(*ending, signal.SIGHUP) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGHUP and hung_up():
                reloaded, peer.reloaded = peer.reloaded, trio.Event()
                reloaded.set()
                continue
            log.info("stopping on %s", signal.Signals(number).name)
            if peer.stopped.is_set():
                os._exit(128 + number)  # a second signal ends the process, because all essential data is on the disk
            peer.stopped.set()
            break


async def restart_on_fault(
    what: str, run: Callable[[], Awaitable[None]], tell: Callable[[str], None], faults: Callable[[Exception], bool] | None = None
) -> None:
    """Run a task, and restart it after a system fault. `tell` gets a line for the operator whenever the reason changes.

    Other exceptions are our own bugs and propagate. `faults` decides which exceptions are system faults; by default these
    are `SYSTEM_FAULTS` without `LostVotesError`.
    """
    is_endured = faults or _is_of_the_system
    told = ""
    while True:
        try:
            return await run()
        except Exception as error:
            if not is_endured(error):
                raise
            reason = _fault_reason(error)
        if reason != told:
            tell(f"{what} failed ({reason}); the peer continues and retries it every {RETRY_SECONDS:g} s")
            told = reason
        await trio.sleep(RETRY_SECONDS)


def lacks_descriptors(error: Exception) -> bool:
    """Return True if the error, or each error of a group, is a shortage of file descriptors.

    Other faults end the peer, as a full disk does.
    """
    if isinstance(error, ExceptionGroup):
        return all(map(lacks_descriptors, error.exceptions))
    return is_descriptor_shortage(error)


def _is_of_the_system(error: Exception) -> bool:
    """Return True if the error, or each error of a group, is in `SYSTEM_FAULTS`.

    `LostVotesError` is excluded, because it must stop the peer.
    """
    if isinstance(error, ExceptionGroup):
        return all(map(_is_of_the_system, error.exceptions))
    return isinstance(error, SYSTEM_FAULTS) and not isinstance(error, LostVotesError)


def _fault_reason(error: Exception) -> str:
    if isinstance(error, ExceptionGroup):
        return _fault_reason(error.exceptions[0])
    return (error.strerror if isinstance(error, OSError) else "") or str(error)
