"""One running peer: its parts, started inner ones first and stopped in the opposite order.

    control socket and services of the role  →  driver and membership  →  worker  →  network  →  store

People are turned away first, then agreement stops, then what it stands on.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from features.lazy_import import import_object
from ledger.core.genesis import Genesis
from peer import features
from peer.api import control_socket
from peer.api.rpc_handlers import make_peer_api
from peer.api.running_peer import RunningPeer
from peer.daemon.host_addresses import host_addresses, make_optional_services, own_addresses
from peer.daemon.restart_policy import lacks_descriptors, restart_on_fault
from peer.roles.trainer import Trainer
from peer.roles.voter import Voter
from peer.runtime.audits.auditor import Auditor
from peer.runtime.driver import Driver
from peer.runtime.membership.inactivity import InactivityTracker
from peer.runtime.membership.liveness_reports import LivenessMonitor
from peer.runtime.membership.membership import Membership
from peer.runtime.membership.peer_classifier import PeerClassifier, make_guest_invitation
from peer.runtime.service_context import DriverServiceContext, ReloadSignal
from peer.runtime.storage.blob_pinning import BlobPinner
from peer.runtime.storage.payload_pruner import PayloadPruner
from peer.runtime.storage.start_model_availability import StartModelAttester
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.runtime.upgrade_events import UpgradeReporter
from peer.settings import address_book_file
from peer.settings.config import Config, why_unlinked
from peer.settings.data_directory import DataDirectory
from peer.settings.file_descriptors import connection_limits, descriptor_limit, raise_descriptor_limit
from peer.settings.invitation import InvitationString, parse_invitation
from peer.settings.invitation_book import InvitationBook
from peer.worker.supervisor import WorkerSupervisor
from protocol.api import PeerApi
from protocol.errors import RemoteProtocolError, StorageError, UserError
from protocol.identity import Ed25519Verifier
from storage.disk_blob_store import DiskBlobStore
from storage.ledger_store import LedgerStore
from training.data.text_files import read_text
from training.model_store import JobModelStore
from training.round_context import RoundParticipant
from transport.swarm import Swarm

log = logging.getLogger("peer")

ALERT_SECONDS = 1.0  # between looks at what the operator should know
STOP_SECONDS = 5.0  # for the parts to end after they were asked to


MakeParticipant = Callable[[Config, WorkerSupervisor | None, Path, Callable[[], Driver]], RoundParticipant]


@dataclass
class Daemon:
    """What `running_daemon` gives to whoever started it."""

    api: PeerApi
    driver: Driver
    stopped: trio.Event  # somebody asked for the end
    reload_signal: ReloadSignal = field(default_factory=ReloadSignal)


@asynccontextmanager
async def running_daemon(config: Config, make_round_work: MakeParticipant | None = None) -> AsyncIterator[Daemon]:
    """A peer that has caught up with its own disk and listens; it stops when the block ends. Raises `UserError`."""
    raise_descriptor_limit()
    directory = DataDirectory.open(config.data_directory)
    with directory.lock():
        signer = directory.load_identity()
        genesis = read_genesis(directory)
        host, events = JobModelStore(directory.models, config.threads), EventLog()
        book = directory.addresses
        remembered = address_book_file.load_addresses(book, lambda text: events.add("warning", text))
        if unlinked := why_unlinked(config, remembered):
            raise UserError(unlinked)
        store = LedgerStore(directory.ledger, genesis.chain_id)
        blobs = DiskBlobStore(directory.blobs, directory.buffers)
        texts = directory.path / "texts"
        texts.mkdir(exist_ok=True)
        invitation = _invitation(directory)
        standings = PeerClassifier(signer.public, genesis.chain_id, Ed25519Verifier(), lambda: driver.state)

        def has_gone(peer: bytes) -> bool:
            return driver.state.members.is_departed_key(peer)

        network = Swarm(
            signer,
            genesis.chain_id,
            config.listen,
            config.bootstrap,
            blobs,
            remembered=remembered,
            advertise=config.advertise,
            standing_of=standings,
            welcome=standings.admit_guest,
            guest=lambda: make_guest_invitation(invitation, signer.public, driver.state),
            tell=lambda text: events.add("peer", text),
            members=lambda peer: driver.state.members.is_current_key(peer),
            has_gone=has_gone,
            hosts=host_addresses,
            pace=config.keepalive,
            relay=config.relay,
            connections_max=connection_limits(descriptor_limit()).peers,
        )
        role = features.roles()[config.role]
        worker = WorkerSupervisor(config.resources, engine=config.engine) if role.needs_worker else None
        round_work = (make_round_work or make_participant)(config, worker, texts, lambda: driver)
        anchor = invitation.anchor if invitation else None
        driver = Driver(
            signer, genesis, store, blobs, host, network, round_work, events, anchor, config.payloads_gb * 1_000_000_000
        )
        author, stopped, hangup = TransactionSubmitter(driver), trio.Event(), ReloadSignal()
        beside = make_optional_services(config, genesis.chain_id, network, lambda text: events.add("peer", text))
        hearing = LivenessMonitor(network, lambda: driver.state.members, lambda text, peer: events.add("peer", text, peer=peer))
        absence = _absence(config, directory, driver, author)
        auditing = Auditor(driver, author)
        former = directory.load_former_identity()
        membership = Membership(
            driver,
            author,
            config.name,
            role.registered_roles,
            config.stand,
            config.approve_invited,
            invitation,
            TransactionSubmitter(driver, former) if former else None,
            directory.forget_former_identity,
        )

        def desk(part: str) -> DriverServiceContext:
            return DriverServiceContext(part, config, driver, author, directory.path / "parts", signer.unseal, api, texts, hangup)

        api = make_peer_api(
            RunningPeer(
                config=config,
                genesis=genesis,
                driver=driver,
                network=network,
                addresses=lambda: own_addresses(network.addresses, config.advertise, network.external_address),
                worker=worker,
                stop_daemon=stopped.set,
                set_candidacy=lambda stands: setattr(membership, "wants_to_vote", stands),
                asked_audits=auditing.asked,
                submitter=author,
                liveness_monitor=hearing,
                optional_services=beside,
                invitations=InvitationBook(directory.path / "invitations"),
                started=time.monotonic(),
                service_context=desk,
            )
        )

        def warn(text: str) -> None:
            events.add_warning("warning", text)

        parts = {
            name: import_object(features.services()[name])(desk(name))
            for name in (*role.services, *features.services_everywhere())
        }
        try:
            async with trio.open_nursery() as outer:
                await outer.start(network.run)
                for aside in beside:
                    outer.start_soon(restart_on_fault, aside.name, aside.run, warn)
                async with trio.open_nursery() as computing:
                    if worker is not None:
                        computing.start_soon(worker.run)
                    async with trio.open_nursery() as agreeing:
                        await agreeing.start(driver.run)
                        agreeing.start_soon(membership.run)
                        agreeing.start_soon(UpgradeReporter(driver).run)
                        agreeing.start_soon(hearing.run)
                        for what, run in {
                            "the store of shared files": BlobPinner(driver).run,
                            "the check of first models": StartModelAttester(driver, author).run,
                            "the deletion of old payloads": PayloadPruner(driver).run,
                            "auditing": auditing.run,
                        }.items():
                            agreeing.start_soon(restart_on_fault, what, run, warn, lacks_descriptors)
                        if absence is not None:
                            agreeing.start_soon(restart_on_fault, "the count of silent days", absence.run, warn)
                        agreeing.start_soon(restart_on_fault, "the look for alerts", partial(_watch, api), warn)
                        keep_book = partial(
                            address_book_file.save_addresses_periodically, book, lambda: _of_members(network, driver), has_gone
                        )
                        agreeing.start_soon(restart_on_fault, "the address book", keep_book, warn)
                        async with trio.open_nursery() as talking:
                            for name, part in parts.items():
                                talking.start_soon(restart_on_fault, f"the service {name}", part.run, warn)
                            await talking.start(control_socket.serve_control_socket, api, directory.path, config.control_socket)
                            yield Daemon(api, driver, stopped, hangup)
                            talking.cancel_scope.cancel()
                        agreeing.cancel_scope.cancel()
                    computing.cancel_scope.cancel()
                outer.cancel_scope.cancel()
        finally:
            store.close()


def _absence(config: Config, directory: DataDirectory, driver: Driver, author: TransactionSubmitter) -> InactivityTracker | None:
    """None: the operator has set no days."""
    if not config.retire_after_days:
        return None
    return InactivityTracker(
        driver.network,
        lambda: driver.state.members,
        driver.observer.take_signers,
        author,
        config.retire_after_days,
        directory.path / "silences",
        lambda text, peer: driver.events.add("member", text, peer=peer),
    )


async def _watch(api: PeerApi) -> None:
    """So that an alert is dated when it comes, whoever asks for it and whenever."""
    while True:
        await api.alerts()
        await trio.sleep(ALERT_SECONDS)


def _of_members(network: Swarm, driver: Driver) -> dict[bytes, str]:
    return {peer: address for peer, address in network.peer_addresses().items() if peer in driver.state.members.members}


def make_participant(
    config: Config, worker: WorkerSupervisor | None, texts: Path, driver: Callable[[], Driver]
) -> RoundParticipant:
    if worker is None:
        return Voter()
    local = Path(config.local_data).expanduser() if config.local_data else None
    if local is not None:
        next(read_text(local))  # what cannot be read is told now, not when the others wait for it
    return Trainer(worker, texts, local, config.evaluate)


def read_genesis(directory: DataDirectory) -> Genesis:
    try:
        return Genesis.decode(directory.read_genesis())
    except RemoteProtocolError as error:
        raise StorageError(f"{directory.genesis} is damaged ({error}); copy it again from a peer of the same network") from None


def _invitation(directory: DataDirectory) -> InvitationString | None:
    file = directory.path / "invitation"
    return parse_invitation(file.read_text()) if file.exists() else None


def tune_garbage_collector() -> None:
    """For a process that is one peer, once it runs. Its code and what it has read are no garbage: nobody looks at them again.

    A block with 512 statements makes some 20,000 objects, hardly any of them in a cycle. By default a fifth of the block's time
    goes into looking for cycles, and now and then a tenth of a second at once.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def wait_for_stop(
    daemon: Daemon, ending: tuple[signal.Signals, ...], hung_up: Callable[[], bool], ready: Callable[[], None]
) -> None:
    """Returns when the peer was asked to stop: by a person, by one of the signals `ending`, or by SIGHUP.

    `ready` is called as soon as signals are heard. `hung_up` is called at SIGHUP and says whether the peer goes on.
    """
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_on_signal, daemon, ending, hung_up)
        ready()
        await daemon.stopped.wait()
        nursery.cancel_scope.cancel()


async def _stop_on_signal(
    daemon: Daemon,
    ending: tuple[signal.Signals, ...],
    hung_up: Callable[[], bool],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    with trio.open_signal_receiver(*ending, signal.SIGHUP) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGHUP and hung_up():
                daemon.reload_signal.notify()
                continue
            log.info("stopping on %s", signal.Signals(number).name)
            if daemon.stopped.is_set():
                os._exit(128 + number)  # asked twice: everything that matters is on disk already
            daemon.stopped.set()
            break
