"""All checks of `peer doctor`, for a running or a stopped peer."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Final

import trio

from features.feature import Role
from features.peer_names import PeerNames
from features.text_tables import Column, TextTable, pluralize
from ledger.core.genesis import Genesis
from peer import features
from peer.api import control_socket
from peer.api.alerts import ALERT_KINDS
from peer.doctor import machine
from peer.doctor.findings import DoctorFinding, fault, fault_of_error, ok, warning
from peer.doctor.reachability_checks import (
    check_advertised_addresses,
    check_free_port,
    check_free_ports,
    check_listen_settings,
    check_other_peers,
    check_own_port,
    check_reachability,
    check_running_services,
    check_served_endpoints,
    check_stopped_services,
    dial_candidates,
)
from peer.settings.config import Config, ResolvedSettings, why_unlinked
from peer.settings.data_directory import DataDirectory, load_addresses
from protocol.addresses import parse_listen_addresses
from protocol.api import AlertCause, AlertSeverity, AlertView, StatusView
from protocol.errors import LostVotesError, NotRunningError, RemoteProtocolError, UserError
from protocol.identity import parse_peer_id, peer_id
from protocol.prometheus_metrics import why_unhealthy
from storage.ledger_store import ReadOnlyStore
from transport.discovery.reachability import ReachabilityState

ANSWER_SECONDS: Final = 10.0  # time limit of all calls to the running peer together: a call takes some hundredths of a second
DIALS_ONLY: Final = ok("port", "this peer accepts no connections: it only dials")
NO_PEER_ADVICE = "create a peer there with `peer init` or `peer join`, or choose another directory with --data-dir"


async def examine_peer(load: Callable[[], ResolvedSettings]) -> list[DoctorFinding]:
    """Run all checks and return their findings. An error that the user can fix becomes a finding."""
    try:
        settings = load()
    except UserError as error:
        return [fault_of_error("settings", error)]
    config, role = settings.config, features.roles()[settings.config.role]
    found, process = await _of_peer(settings, role, DataDirectory(config.data_directory))
    return [
        *machine.check_version(role),
        *machine.check_engine(role, config.engine),
        *found,
        *machine.check_disk(config.data_directory),
        *machine.check_memory(config, role, runs=process is not None),
        *machine.check_open_files("serve" in role.services, process or 0),
    ]


async def _of_peer(settings: ResolvedSettings, role: Role, directory: DataDirectory) -> tuple[list[DoctorFinding], int | None]:
    """Return the findings on the peer and its network, and the peer's process id:

    None if the peer is stopped, 0 if the id is unknown.
    """
    config = settings.config
    if unusable := why_unusable(directory.path):
        return [unusable], None
    genesis, of_network = check_network(directory)
    key, of_key = check_key(directory)
    found = [*check_folder(directory.path), *of_network, *of_key]
    client = control_socket.make_client(directory.path, config.control_socket)
    try:
        with trio.fail_after(ANSWER_SECONDS):
            status, alerts = await client.status(), await client.alerts()
            names = PeerNames({view.peer: view.name for view in await client.peers() if not view.departed})
            ahead = await machine.clock_offset(client, status.peer)
    except NotRunningError:
        return [*found, *await _of_stopped(config, role, directory, genesis, key)], None
    except trio.TooSlowError:
        text = f"the running peer of {directory.path} has not answered for {ANSWER_SECONDS:g} s"
        return [*found, fault("peer", text, "read its log and check the machine's load; then restart the peer")], 0
    except RemoteProtocolError as error:
        text = f"cannot read the answer of the running peer ({error}): its version differs from this program's"
        return [*found, fault("peer", text, "use the program of the running peer, or restart the peer with this one")], 0
    except UserError as error:
        return [*found, fault_of_error("peer", error)], 0
    if genesis is None:  # no further checks: `check_network` has reported the missing genesis
        return [*found, *_of_status(status, alerts)], status.process
    found += [*_of_status(status, alerts), *await _of_running(settings, directory, genesis, status)]
    found = [replace(finding, text=names.replace_ids(finding.text)) for finding in found]
    return [*found, machine.check_clock(ahead, None, genesis.created_ms)], status.process


async def _of_stopped(
    config: Config, role: Role, directory: DataDirectory, genesis: Genesis | None, key: bytes | None
) -> list[DoctorFinding]:
    listens = [await check_free_port("port", address, "listen") for address in parse_listen_addresses(config.listen)]
    if unlinked := why_unlinked(config, _known(config, directory)):
        listens = [fault_of_error("port", UserError(unlinked))]
    ports = [
        *(listens or [DIALS_ONLY]),
        *await check_stopped_services(config),
        *await check_free_ports(config, role),
    ]
    if genesis is None:
        return ports
    try:
        with directory.lock():
            last_ms, damaged = last_block_ms(directory, genesis)
    except UserError as error:  # a process holds the lock, but does not answer as a daemon
        return [fault_of_error("peer", error, "kill that process, and restart the peer")]
    others = await check_other_peers(
        _known(config, directory), genesis.chain_id, key, links=None, alone=set(genesis.founders) == {key}
    )
    return [*damaged, ok("peer", "the peer is stopped"), *ports, *others, machine.check_clock(None, last_ms, genesis.created_ms)]


async def _of_running(
    settings: ResolvedSettings, directory: DataDirectory, genesis: Genesis, status: StatusView
) -> list[DoctorFinding]:
    """Check the running peer's addresses, services and links. The peer's status names its addresses and its role."""
    config, key, chain_id = settings.config, parse_peer_id(status.peer), genesis.chain_id
    # The peer may run with `--listen`. If `peer doctor` has no setting `listen`, it has no address to compare.
    own = (
        check_listen_settings(parse_listen_addresses(config.listen), status.listen_addresses)
        if settings.origins["listen"] != "default"
        else []
    )
    own += check_reachability(status.reachability) if status.listen_addresses else [DIALS_ONLY]
    for address in status.listen_addresses:
        own += await check_own_port(address, chain_id, key)
    # The host in the setting `advertise` may be wrong even if other peers reach this peer at another address.
    own += await check_advertised_addresses(config.advertise, chain_id, key, are_reached=False)
    found = [address for address in status.announced_addresses if address not in (*status.listen_addresses, *config.advertise)]
    own += await check_advertised_addresses(found, chain_id, key, are_reached=status.reachability == ReachabilityState.DIRECT)
    return [
        *own,
        *check_running_services(status.optional_services),
        *await check_served_endpoints(config, features.roles()[status.role], directory.path / "services", status.peer),
        *await check_other_peers(
            _known(config, directory), chain_id, key, links=status.links, alone=status.voter and status.voters == 1
        ),
    ]


def _of_status(status: StatusView, alerts: Iterable[AlertView]) -> Iterator[DoctorFinding]:
    """Yield findings from the peer's status and alerts. Alerts about the disk are left to `machine.check_disk`."""
    if status.version != (here := metadata.version("folkmoot")):
        yield warning("version", f"the running peer has version {status.version}, this program {here}", "restart the peer")
    told = [alert for alert in alerts if alert.severity != AlertSeverity.INFO and alert.cause != AlertCause.DISK_LOW]
    for alert in told:
        make = fault if alert.severity == AlertSeverity.CRITICAL else warning
        yield make("peer", alert.text, ALERT_KINDS[AlertCause(alert.cause)].remedy)
    if why := why_unhealthy(status) if not told else "":
        yield warning("peer", why, "wait a minute; then read `peer log`")
    elif not told:
        yield ok("peer", f"the peer runs: process {status.process}, height {status.height}, {pluralize(status.links, 'link')}")


def _known(config: Config, directory: DataDirectory) -> tuple[str, ...]:
    """Return the known addresses of other peers. Addresses in the settings come first."""
    return dial_candidates(config.bootstrap, load_addresses(directory.path / "addresses"))


def findings_table(findings: Iterable[DoctorFinding]) -> TextTable:
    shown = TextTable("level", "check", Column("finding", wraps=True), Column("remedy", wraps=True))
    for finding in findings:
        shown.add_row(finding.level, finding.check, finding.text, finding.advice)
    return shown


def check_key(directory: DataDirectory) -> tuple[bytes | None, list[DoctorFinding]]:
    """Return the peer's public key and the findings on the key file.

    The key is None if the file is missing, damaged or readable by others.
    """
    path = directory.identity_key
    if not path.exists():
        return None, [fault("key", f"{path} does not exist", NO_PEER_ADVICE)]
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        text = f"{path} has mode {mode:04o}: other users of this machine can sign as this peer"
        advice = f"chmod 600 {shlex.quote(str(path))}; if another user may have read it, stop the peer and run `peer rekey`"
        return None, [fault("key", text, advice)]
    try:
        key = directory.load_identity().public
    except UserError as error:
        return None, [fault_of_error("key", error, "restore it from a backup")]
    found = [ok("key", f"{peer_id(key)}, mode {mode:04o}")]
    if directory.former_key.exists():
        text = f"{directory.former_key} exists: the network has not decided the change of this key yet"
        found.append(warning("key", text, "run the peer until the change is decided; this needs a quorum of connected voters"))
    return key, found


def why_unusable(path: Path) -> DoctorFinding | None:
    """Return the finding that the data directory cannot be examined, or None if it can."""
    if not path.is_dir():
        return fault("data", f"{path} does not exist", NO_PEER_ADVICE)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return fault(
            "data",
            f"user {os.getuid()} has no access to {path}",
            f"run the command as user {path.stat().st_uid}, or change the owner with chown",
        )
    return None


def check_folder(path: Path) -> Iterator[DoctorFinding]:
    if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o022:
        yield warning(
            "data", f"{path} has mode {mode:04o}: other users of this machine can replace files in it", f"chmod go-w {path}"
        )


def check_network(directory: DataDirectory) -> tuple[Genesis | None, list[DoctorFinding]]:
    """Return the genesis of the peer's network, or None, and the findings on the genesis file."""
    if not directory.genesis.exists():
        text = f"{directory.path} has no network yet"
        return None, [fault("data", text, "create one with `peer init`, or join one with `peer join INVITATION`")]
    try:
        genesis = Genesis.decode(directory.genesis.read_bytes())
    except (RemoteProtocolError, OSError) as error:
        return None, [fault("data", f"{directory.genesis} is damaged: {error}", "copy it from a peer of the same network")]
    return genesis, [ok("data", f"{directory.path}, network {genesis.network}")]


def last_block_ms(directory: DataDirectory, genesis: Genesis) -> tuple[int | None, list[DoctorFinding]]:
    """Return the time in ms of a stopped peer's last block, or None, and the findings on the peer's database.

    The database is not changed. The caller holds the directory's lock.
    """
    if not directory.ledger.exists() and not directory.ledger.with_name("ledger.sqlite.committed").exists():
        return None, []  # the peer has never run
    try:
        with contextlib.closing(ReadOnlyStore(directory.ledger, genesis.chain_id)) as store:
            if store.is_older:
                text = f"{directory.ledger} is complete and has the older format {store.version}: the next start converts it"
                return None, [ok("data", f"{text}; its blocks were not read")]
            height = store.decided_height
            decided = store.get_decision(height) if height else None
    except LostVotesError as error:
        return None, [fault_of_error("data", error, "run `peer rekey`: a new key cannot contradict signatures of the old one")]
    except UserError as error:
        return None, [fault_of_error("data", error, "check the disk and the owner of the file")]
    return (None if decided is None else decided.decode().time_ms), []
