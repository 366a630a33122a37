"""One running peer: its parts, started inner ones first and stopped in the opposite order.

    control socket and parts of the role  →  driver and membership  →  worker  →  network  →  store

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

from features.lazily import named
from ledger.core.genesis import Genesis
from peer import features
from peer.api import control
from peer.api.running import RunningPeer
from peer.api.service import service
from peer.daemon.endurance import endure, lacks_descriptors
from peer.daemon.reachable import asides, hosts, own_addresses
from peer.driver.absence import Absence
from peer.driver.auditing import Auditing
from peer.driver.author import Author
from peer.driver.desk import DriverDesk, Hangup
from peer.driver.driver import Driver
from peer.driver.eventlog import EventLog
from peer.driver.hearing import Hearing
from peer.driver.holding import Holding
from peer.driver.keeping import Keeping
from peer.driver.membership import Membership
from peer.driver.payloads import Payloads
from peer.driver.standings import Standings, guest
from peer.driver.upgrades import UpgradeNews
from peer.roles.base import RoundWork
from peer.roles.trainer import Trainer
from peer.roles.voter import Voter
from peer.settings import addressbook
from peer.settings.config import Config, why_unlinked
from peer.settings.datadir import DataDirectory
from peer.settings.descriptors import limit_now, raise_limit, shares
from peer.settings.invitation import InvitationString, parse_invitation
from peer.settings.invitations import InvitationBook
from peer.worker.supervisor import Worker
from protocol.api import PeerApi
from protocol.errors import RemoteProtocolError, StorageError, UserError
from protocol.identity import Ed25519Verifier
from storage.disk_blob_store import DiskBlobStore
from storage.ledger_store import LedgerStore
from training.data.text_files import read_text
from training.model_store import JobModelStore
from transport.swarm import Swarm

log = logging.getLogger("peer")

ALERT_SECONDS = 1.0  # between looks at what the operator should know
STOP_SECONDS = 5.0  # for the parts to end after they were asked to


MakeRoundWork = Callable[[Config, Worker | None, Path, Callable[[], Driver]], RoundWork]


@dataclass
class Daemon:
    """What `running` gives to whoever started it."""

    api: PeerApi
    driver: Driver
    stopped: trio.Event  # somebody asked for the end
    hangup: Hangup = field(default_factory=Hangup)


@asynccontextmanager
async def running(config: Config, make_round_work: MakeRoundWork | None = None) -> AsyncIterator[Daemon]:
    """A peer that has caught up with its own disk and listens; it stops when the block ends. Raises `UserError`."""
    raise_limit()
    directory = DataDirectory.open(config.data_directory)
    with directory.lock():
        signer = directory.load_identity()
        genesis = read_genesis(directory)
        host, events = JobModelStore(directory.models, config.threads), EventLog()
        book = directory.addresses
        remembered = addressbook.load(book, lambda text: events.add("warning", text))
        if unlinked := why_unlinked(config, remembered):
            raise UserError(unlinked)
        store = LedgerStore(directory.ledger, genesis.chain_id)
        blobs = DiskBlobStore(directory.blobs, directory.buffers)
        texts = directory.path / "texts"
        texts.mkdir(exist_ok=True)
        invitation = _invitation(directory)
        standings = Standings(signer.public, genesis.chain_id, Ed25519Verifier(), lambda: driver.state)

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
            welcome=standings.welcome,
            guest=lambda: guest(invitation, signer.public, driver.state),
            tell=lambda text: events.add("peer", text),
            members=lambda peer: driver.state.members.is_current_key(peer),
            has_gone=has_gone,
            hosts=hosts,
            pace=config.pace,
            relay=config.relay,
            connections_max=shares(limit_now()).peers,
        )
        role = features.roles()[config.role]
        worker = Worker(config.resources, engine=config.engine) if role.needs_worker else None
        round_work = (make_round_work or configured_round_work)(config, worker, texts, lambda: driver)
        anchor = invitation.anchor if invitation else None
        driver = Driver(
            signer, genesis, store, blobs, host, network, round_work, events, anchor, config.payloads_gb * 1_000_000_000
        )
        author, stopped, hangup = Author(driver), trio.Event(), Hangup()
        beside = asides(config, genesis.chain_id, network, lambda text: events.add("peer", text))
        hearing = Hearing(network, lambda: driver.state.members, lambda text, peer: events.add("peer", text, peer=peer))
        absence = _absence(config, directory, driver, author)
        auditing = Auditing(driver, author)
        former = directory.load_former_identity()
        membership = Membership(
            driver,
            author,
            config.name,
            role.registers,
            config.stand,
            config.approve_invited,
            invitation,
            Author(driver, former) if former else None,
            directory.forget_former_identity,
        )

        def desk(part: str) -> DriverDesk:
            return DriverDesk(part, config, driver, author, directory.path / "parts", signer.unseal, api, texts, hangup)

        api = service(
            RunningPeer(
                config=config,
                genesis=genesis,
                driver=driver,
                network=network,
                addresses=lambda: own_addresses(network.addresses, config.advertise, network.external_address),
                worker=worker,
                stop_daemon=stopped.set,
                set_standing=lambda stands: setattr(membership, "stands", stands),
                asked_audits=auditing.asked,
                author=author,
                hearing=hearing,
                asides=beside,
                invited=InvitationBook(directory.path / "invitations"),
                started=time.monotonic(),
                desk=desk,
            )
        )

        def warn(text: str) -> None:
            events.warn("warning", text)

        parts = {name: named(features.parts()[name])(desk(name)) for name in (*role.parts, *features.everywhere())}
        try:
            async with trio.open_nursery() as outer:
                await outer.start(network.run)
                for aside in beside:
                    outer.start_soon(endure, aside.name, aside.run, warn)
                async with trio.open_nursery() as computing:
                    if worker is not None:
                        computing.start_soon(worker.run)
                    async with trio.open_nursery() as agreeing:
                        await agreeing.start(driver.run)
                        agreeing.start_soon(membership.run)
                        agreeing.start_soon(UpgradeNews(driver).run)
                        agreeing.start_soon(hearing.run)
                        for what, run in {
                            "the store of shared files": Keeping(driver).run,
                            "the check of first models": Holding(driver, author).run,
                            "the deletion of old payloads": Payloads(driver).run,
                            "auditing": auditing.run,
                        }.items():
                            agreeing.start_soon(endure, what, run, warn, lacks_descriptors)
                        if absence is not None:
                            agreeing.start_soon(endure, "the count of silent days", absence.run, warn)
                        agreeing.start_soon(endure, "the look for alerts", partial(_watch, api), warn)
                        keep_book = partial(addressbook.keep, book, lambda: _of_members(network, driver), has_gone)
                        agreeing.start_soon(endure, "the address book", keep_book, warn)
                        async with trio.open_nursery() as talking:
                            for name, part in parts.items():
                                talking.start_soon(endure, f"the part {name}", part.run, warn)
                            await talking.start(control.serve, api, directory.path, config.control_socket)
                            yield Daemon(api, driver, stopped, hangup)
                            talking.cancel_scope.cancel()
                        agreeing.cancel_scope.cancel()
                    computing.cancel_scope.cancel()
                outer.cancel_scope.cancel()
        finally:
            store.close()


def _absence(config: Config, directory: DataDirectory, driver: Driver, author: Author) -> Absence | None:
    """None: the operator has set no days."""
    if not config.retire_after_days:
        return None
    return Absence(
        driver.network,
        lambda: driver.state.members,
        driver.witness.take_signers,
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


def configured_round_work(config: Config, worker: Worker | None, texts: Path, driver: Callable[[], Driver]) -> RoundWork:
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


def collect_seldom() -> None:
    """For a process that is one peer, once it runs. Its code and what it has read are no garbage: nobody looks at them again.

    A block with 512 statements makes some 20,000 objects, hardly any of them in a cycle. By default a fifth of the block's time
    goes into looking for cycles, and now and then a tenth of a second at once.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def wait_for_end(
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
                daemon.hangup.tell()
                continue
            log.info("stopping on %s", signal.Signals(number).name)
            if daemon.stopped.is_set():
                os._exit(128 + number)  # asked twice: everything that matters is on disk already
            daemon.stopped.set()
            break
