"""All that `peer doctor` looks at, of a peer that runs or does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Final

import trio

from features.names import Names
from features.roles import Role
from features.tables import Column, Fitted, counted
from ledger.core.genesis import Genesis
from peer import features
from peer.api import control
from peer.doctor import asides, files, machine, monitors
from peer.doctor.clock import ahead_of_others, of_clock
from peer.doctor.findings import Finding, fault, ok, refused, warning
from peer.doctor.reaching import dialable_ones, of_free_port, of_others, of_own_port, of_reachability, of_settings, of_told
from peer.settings import addressbook
from peer.settings.config import Config, Settings, why_unlinked
from peer.settings.datadir import DataDirectory
from protocol.addresses import parse_listen_addresses
from protocol.api import AlertCause, AlertSeverity, AlertView, StatusView
from protocol.errors import NotRunningError, RemoteProtocolError, UserError
from protocol.identity import parse_peer_id
from protocol.prometheus_metrics import why_unhealthy
from transport.discovery.reachability import ReachabilityState

ANSWER_SECONDS: Final = 10.0  # for all questions to the peer that runs: each takes some hundredths
LOG = "`peer log` says what came before"
DIALS_ONLY: Final = ok("port", "this peer accepts no connections: it dials only")
ADVICE = {  # by the cause of an alert
    AlertCause.HALTED: f"{LOG}; the guide has a section for each halt",
    AlertCause.DISPUTED: "leave the disk as it is, and tell the other operators: more voters may lie than are tolerated",
    AlertCause.NO_QUORUM: "`peer peers` shows which voters are away, `peer reach` who hears whom: ask their operators",
    AlertCause.NO_SPARE: "ask the operators of those voters; `peer retire` takes the vote of one that is gone for good",
    AlertCause.STALLED: f"`peer peers` shows who is linked, and {LOG}",
    AlertCause.BEHIND: "let it catch up; if it does not, give it a faster disk, processor or link",
    AlertCause.NO_ROOM: "free some space: until then it does not train that job",
    AlertCause.WORKER_GONE: f"{LOG}: most often memory, torch or the setting `device`",
    AlertCause.MODULE_FAILED: f"tell the authors of this program, and start the peer again; {LOG}",
    AlertCause.TRAINING_FAILED: "`peer rounds` has the verdicts",
    AlertCause.NO_PROGRESS: "`peer rounds` has the verdicts; if they are `diverging`, a lower learning rate helps",
    AlertCause.LIAR_FOUND: "`peer audits` shows of what it is accused",
}


async def examine(load: Callable[[], Settings]) -> list[Finding]:
    """Raises nothing that a person can mend: that is a finding."""
    try:
        settings = load()
    except UserError as error:
        return [refused("settings", error)]
    config, role = settings.config, features.roles()[settings.config.role]
    found, process = await _of_peer(settings, role, DataDirectory(config.data_directory))
    return [
        *machine.of_version(role),
        *found,
        *machine.of_disk(config.data_directory),
        *machine.of_memory(config, role, runs=process is not None),
        *machine.of_open_files("serve" in role.parts, process or 0),
    ]


async def _of_peer(settings: Settings, role: Role, directory: DataDirectory) -> tuple[list[Finding], int | None]:
    """All about this peer and its network, and its process if it runs; 0 for one that does not say which it is."""
    config = settings.config
    if unusable := files.why_unusable(directory.path):
        return [unusable], None
    genesis, of_network = files.of_network(directory)
    key, of_key = files.of_key(directory)
    found = [*files.of_folder(directory.path), *of_network, *of_key]
    client = control.client(directory.path, config.control_socket)
    try:
        with trio.fail_after(ANSWER_SECONDS):
            status, alerts = await client.status(), await client.alerts()
            names = Names({view.peer: view.name for view in await client.peers() if not view.gone})
            ahead = await ahead_of_others(client, status.peer)
    except NotRunningError:
        return [*found, *await _of_stopped(config, role, directory, genesis, key)], None
    except trio.TooSlowError:
        text = f"the peer that runs on {directory.path} has not answered for {ANSWER_SECONDS:g} s"
        return [*found, fault("peer", text, "look at its log and at the machine's load; start it again")], 0
    except RemoteProtocolError as error:
        text = f"the answer of the peer that runs cannot be read ({error}): it is of another version than this program"
        return [*found, fault("peer", text, "ask with the program that it runs, or start it again with this one")], 0
    except UserError as error:
        return [*found, refused("peer", error)], 0
    if genesis is None:  # that is told already
        return [*found, *_of_status(status, alerts)], status.process
    found += [*_of_status(status, alerts), *await _of_running(settings, directory, genesis, status)]
    found = [replace(finding, text=names.in_text(finding.text)) for finding in found]
    return [*found, of_clock(ahead, None, genesis.created_ms)], status.process


async def _of_stopped(
    config: Config, role: Role, directory: DataDirectory, genesis: Genesis | None, key: bytes | None
) -> list[Finding]:
    listens = [await of_free_port("port", address, "listen") for address in parse_listen_addresses(config.listen)]
    if unlinked := why_unlinked(config, _known(config, directory)):
        listens = [refused("port", UserError(unlinked))]
    ports = [*(listens or [DIALS_ONLY]), *await asides.of_stopped(config), *await monitors.of_free_ports(config, role)]
    if genesis is None:
        return ports
    try:
        with directory.lock():
            last_ms, damaged = files.last_block_ms(directory, genesis)
    except UserError as error:  # a daemon that answers nobody
        return [refused("peer", error, "kill that process, and start the peer again")]
    others = await of_others(_known(config, directory), genesis.chain_id, key, links=None, alone=set(genesis.founders) == {key})
    return [*damaged, ok("peer", "it does not run"), *ports, *others, of_clock(None, last_ms, genesis.created_ms)]


async def _of_running(settings: Settings, directory: DataDirectory, genesis: Genesis, status: StatusView) -> list[Finding]:
    """What answers at its addresses, and at those of others. Which ones it has, and which role, it says itself."""
    config, key, chain_id = settings.config, parse_peer_id(status.peer), genesis.chain_id
    # A peer may have been started with `--listen`; where nobody says it again there is nothing to compare.
    own = of_settings(parse_listen_addresses(config.listen), status.listening) if settings.origins["listen"] != "default" else []
    own += of_reachability(status.reachable) if status.listening else [DIALS_ONLY]
    for address in status.listening:
        own += await of_own_port(address, chain_id, key)
    own += await of_told(config.advertise, chain_id, key, are_reached=False)  # their host may be wrong although others dial back
    found = [address for address in status.told if address not in (*status.listening, *config.advertise)]
    own += await of_told(found, chain_id, key, are_reached=status.reachable == ReachabilityState.DIRECT)
    return [
        *own,
        *asides.of_running(status.asides),
        *await monitors.of_served(config, features.roles()[status.role], directory.path / "parts", status.peer),
        *await of_others(_known(config, directory), chain_id, key, links=status.links, alone=status.voter and status.voters == 1),
    ]


def _of_status(status: StatusView, alerts: Iterable[AlertView]) -> Iterator[Finding]:
    """What the peer says of itself. The disk is looked at anyway."""
    if status.version != (here := metadata.version("folkmoot")):
        yield warning("version", f"{status.version} runs, and this program is {here}", "start the peer again")
    told = [alert for alert in alerts if alert.severity != AlertSeverity.INFO and alert.cause != AlertCause.DISK_LOW]
    for alert in told:
        make = fault if alert.severity == AlertSeverity.CRITICAL else warning
        yield make("peer", alert.text, ADVICE[AlertCause(alert.cause)])
    if why := why_unhealthy(status) if not told else "":
        yield warning("peer", why, f"wait a minute; then {LOG}")
    elif not told:
        yield ok("peer", f"it runs, process {status.process}, height {status.height}, {counted(status.links, 'link')}")


def _known(config: Config, directory: DataDirectory) -> tuple[str, ...]:
    """Where others may be dialed: the addresses of the settings first."""
    return dialable_ones(config.bootstrap, addressbook.load(directory.path / "addresses"))


def table(findings: Iterable[Finding]) -> Fitted:
    shown = Fitted("is", "what", Column("found", wraps=True), Column("what to do", wraps=True))
    for finding in findings:
        shown.add_row(finding.level, finding.check, finding.text, finding.advice)
    return shown
