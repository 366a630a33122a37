"""`peer doctor`: each planted fault is found by its check, and reported with advice."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from peer import features
from peer.doctor import doctor, machine, reachability_checks
from peer.doctor.doctor import _of_status, examine_peer
from peer.doctor.findings import EXIT_STATUS, DoctorFinding, FindingLevel, gravest_level, ok, warning
from peer.settings.config import load_settings
from peer.settings.data_directory import DataDirectory
from protocol.addresses import format_address
from protocol.api import AlertCause, AlertSeverity, AlertView, BlockView, EventView, OptionalServiceView
from protocol.identity import WIRE_VERSION, peer_id
from scenarios.gateway import Router, running
from storage.ledger_store import LedgerStore
from tests.peer.fake_api import BLOCK, ME, OTHER, STATUS
from tests.peer.processes import command, daemons
from tests.transport.helpers import ALICE, BOB, CAROL, CHAIN, MemoryBlobs
from transport.discovery.reachability import ReachabilityState
from transport.discovery.upnp import Gateway
from transport.swarm import Swarm
from transport.wire.noise_session import MAGIC, chain_tag

VOTER, TRAINER = features.roles()["voter"], features.roles()["trainer"]
CONFIG = load_settings({}, {}).config


def of(check: str, findings: Iterable[DoctorFinding]) -> Iterator[DoctorFinding]:
    return (finding for finding in findings if finding.check == check)


def fault_of(check: str, findings: Iterable[DoctorFinding]) -> DoctorFinding:
    """Return the check's only finding with a fault, which must contain advice."""
    [found] = [finding for finding in of(check, findings) if finding.level != FindingLevel.OK]
    assert found.advice
    return found


# A peer that does not run ---------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    assert command("init", "--network", "lab", "--data-dir", str(tmp_path / "peer"))[0] == 0
    return DataDirectory(tmp_path / "peer")


async def looked(directory: DataDirectory, **flags: str) -> list[DoctorFinding]:
    given = {"data_directory": directory.path, "role": "voter", "listen": "127.0.0.1:0", **flags}
    return await examine_peer(lambda: load_settings(given, {}))


def test_each_cause_of_an_alert_has_advice() -> None:
    found = list(_of_status(STATUS, [AlertView(cause, "", AlertSeverity.WARNING, "what") for cause in AlertCause]))
    assert len([finding for finding in found if finding.text == "what" and finding.advice]) == len(AlertCause) - 1, (
        "but for the disk"
    )


@pytest.mark.real("sockets")
async def test_a_peer_that_could_start_has_no_fault(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_clock_synchronized", lambda: True)
    monkeypatch.setattr(machine, "available_bytes", lambda: (1 << 40, "machine"))
    found = [finding for finding in await looked(directory) if finding.check not in ("disk", "files")]  # they vary by machine
    assert {finding.check for finding in found} == {"version", "data", "key", "peer", "port", "peers", "clock", "memory"}
    assert gravest_level(found) == FindingLevel.OK and not any(finding.advice for finding in found)


@pytest.mark.real("sockets")
async def test_an_open_key_is_named_with_its_mode(directory: DataDirectory) -> None:
    directory.identity_key.chmod(0o640)
    found = fault_of("key", await looked(directory))
    assert found.level == FindingLevel.FAULT and "0640" in found.text and found.advice.startswith("chmod 600 ")
    directory.identity_key.chmod(0o600)
    directory.identity_key.write_text("no key")
    assert "damaged" in fault_of("key", await looked(directory)).text
    directory.identity_key.unlink()
    assert "peer init" in fault_of("key", await looked(directory)).advice


@pytest.mark.real("sockets")
async def test_a_directory_that_is_missing_or_damaged_is_named(directory: DataDirectory) -> None:
    missing = fault_of("data", await looked(DataDirectory(directory.path / "nowhere")))
    assert "nowhere does not exist" in missing.text and "peer join" in missing.advice
    directory.path.chmod(0o777)
    assert "chmod go-w" in fault_of("data", await looked(directory)).advice
    directory.path.chmod(0o700)
    directory.ledger.write_bytes(b"this is a text\n" * 400)
    assert "ledger.sqlite" in fault_of("data", await looked(directory)).text
    directory.ledger.unlink()
    directory.genesis.write_bytes(directory.genesis.read_bytes()[:-1])
    assert "is damaged" in fault_of("data", await looked(directory)).text
    directory.genesis.unlink()
    assert "no network yet" in fault_of("data", await looked(directory)).text


@pytest.mark.real("sockets")
async def test_a_taken_port_is_a_fault_and_one_that_the_peer_can_do_without_a_warning(directory: DataDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = fault_of("port", await looked(directory, listen=address))
        assert found.level == FindingLevel.FAULT and address in found.text and "--listen" in found.advice
        found = fault_of("metrics", await looked(directory, metrics=address))
        assert found.level == FindingLevel.WARNING and "--metrics" in found.advice
        found = fault_of("web", await looked(directory, role="annotator", web_listen=address))
        assert found.level == FindingLevel.WARNING and "--web-listen" in found.advice


@pytest.mark.real("sockets")
async def test_looking_at_a_stopped_peer_changes_nothing_of_it(directory: DataDirectory) -> None:
    genesis, _ = doctor.check_network(directory)
    assert genesis is not None
    LedgerStore(directory.ledger, genesis.chain_id).close()
    before = {path.name: path.read_bytes() for path in directory.path.glob("ledger*")}
    assert not [finding for finding in of("data", await looked(directory)) if finding.level != FindingLevel.OK]
    assert {path.name: path.read_bytes() for path in directory.path.glob("ledger*")} == before


@pytest.mark.real("sockets")
async def test_the_router_and_the_local_network_have_a_row_each_where_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_settings({"upnp": True, "mdns": True}, {}).config
    with running(Router()) as router:
        found = await reachability_checks.check_stopped_services(config, lambda: Gateway(description=router.url))
        assert router.table == {}
    assert [(row.check, row.level) for row in found] == [
        ("upnp", FindingLevel.OK),
        ("mdns", FindingLevel.OK),
    ] and "1.1.1.1" in found[0].text
    assert (
        await reachability_checks.check_stopped_services(load_settings({}, {}).config) == []
        and reachability_checks.check_running_services([]) == []
    )
    [away, _] = await reachability_checks.check_stopped_services(config, lambda: Gateway(description=router.url))
    assert away.level == FindingLevel.WARNING and "no router answers" in away.text and "--advertise" in away.advice
    monkeypatch.setattr(reachability_checks, "_is_there", lambda package: False)
    lacking = await reachability_checks.check_stopped_services(config)
    assert [row.advice.split(",")[0] for row in lacking] == ["pip install miniupnpc", "pip install zeroconf"]
    said = reachability_checks.check_running_services(
        [OptionalServiceView("upnp", True, "forwards"), OptionalServiceView("mdns", False, "no")]
    )
    assert [row.level for row in said] == [FindingLevel.OK, FindingLevel.WARNING]


@pytest.mark.real("sockets")
async def test_a_peer_that_could_never_have_a_link_is_not_started_and_the_doctor_says_so(directory: DataDirectory) -> None:
    found = fault_of("port", await looked(directory, listen="none"))
    assert found.level == FindingLevel.FAULT and "knows no address to dial" in found.text and "--bootstrap" in found.advice
    status, _, error = command("run", "--listen", "none", "--role", "voter", "--data-dir", str(directory.path))
    assert status == 2 and f"{found.text}; {found.advice}" in error


@pytest.mark.real("sockets")
async def test_a_daemon_that_answers_nobody_is_a_fault(directory: DataDirectory) -> None:
    with directory.lock():
        found = fault_of("peer", await looked(directory))
    assert f"process {os.getpid()}" in found.text


async def test_settings_that_cannot_be_read_are_a_finding() -> None:
    [found] = await examine_peer(lambda: load_settings({"role": "trayner"}, {}))
    assert (
        (found.check, found.level) == ("settings", FindingLevel.FAULT) and "trayner" in found.text and "trainer" in found.advice
    )


@pytest.mark.real("sockets")
def test_the_command_says_it_all_in_json_and_by_its_exit_status(directory: DataDirectory) -> None:
    directory.identity_key.chmod(0o644)
    words = ("doctor", "--data-dir", str(directory.path), "--listen", "127.0.0.1:0", "--role", "voter")
    status, out, _ = command(*words, "--json")
    assert (
        status == EXIT_STATUS[FindingLevel.FAULT] == 4
        and "0644" in fault_of("key", [DoctorFinding(**one) for one in json.loads(out)]).text
    )
    status, out, _ = command(*words)
    assert status == 4 and "chmod 600" in out
    assert command("doctor", "--config", str(directory.path / "none.toml"))[0] == 4
    assert EXIT_STATUS[gravest_level([ok("a", ""), warning("b", "", ""), ok("c", "")])] == 3


# A peer that runs -----------------------------------------------------------------------------------------------------


def dial_all_but(silent: int) -> Callable[[str, int], Awaitable[trio.SocketStream]]:
    """Return a dial function without a timeout, except that the dial of the silent port times out at once."""
    dial = trio.open_tcp_stream

    async def dial_or_give_up(host: str, port: int) -> trio.SocketStream:
        if port == silent:
            raise trio.TooSlowError
        return await dial(host, port)

    return dial_or_give_up


@pytest.mark.real("sockets")
async def test_a_running_peer_that_does_not_answer_is_named(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemons([directory.path]) as [daemon], socket.create_server(("127.0.0.1", 0)) as other:
        nobody = f"127.0.0.1:{other.getsockname()[1]}"
        said = ("--role", "voter", "--listen", "127.0.0.1:0,[::1]:0", "--advertise", nobody, "--metrics", "127.0.0.1:0")
        await daemon.start("run", *said).answers()
        monkeypatch.setattr(reachability_checks, "DIAL_SECONDS_MAX", 60.0)
        monkeypatch.setattr(trio, "open_tcp_stream", dial_all_but(other.getsockname()[1]))
        # The doctor gets other settings than the peer. A running peer reports its own addresses and services.
        found = await examine_peer(lambda: load_settings({"data_directory": directory.path}, {}))
        right = {finding.check for finding in found if finding.level == FindingLevel.OK}
        assert {"peer", "port", "metrics", "key", "peers"} <= right and not list(of("web", found))
        assert f"process {daemon.pid}" in next(of("peer", found)).text
        told = fault_of("port", found)
        assert told.level == FindingLevel.WARNING and f"the announced address {nobody} does not answer" in told.text
        listening = [finding.text.removesuffix(" answers") for finding in of("port", found) if finding.level == FindingLevel.OK]
        assert len(listening) == 2 and f"listens on {', '.join(listening)} (announced as {nobody})" in daemon.log
        (directory.path / "services" / "metrics" / "address").write_text(nobody)
        monkeypatch.undo()
        for module, name in ((reachability_checks, "HTTP_SECONDS_MAX"), (reachability_checks, "DIAL_SECONDS_MAX")):
            monkeypatch.setattr(module, name, 0.1)
        assert "another peer answers at" in fault_of("metrics", await looked(directory)).text
        other.close()
        monkeypatch.setattr(reachability_checks, "DIAL_SECONDS_MAX", 60.0)
        found = fault_of("port", await looked(directory, advertise=nobody))
        assert found.level == FindingLevel.WARNING and f"the announced address {nobody} does not answer" in found.text
        moved = list(of("port", await looked(directory, listen="127.0.0.2:7")))
        assert any("the settings name 127.0.0.2:7, but the running peer listens at 127.0.0.1:" in one.text for one in moved)
        assert any(one.level == FindingLevel.OK for one in moved), "it is dialed where it listens"
        assert daemon.terminate() == 0 and "Traceback" not in daemon.log and "truncated" not in daemon.log


# Calls ----------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def answering(chain: bytes = CHAIN) -> AsyncIterator[Swarm]:
    swarm = Swarm(ALICE, chain, "127.0.0.1:0", (), MemoryBlobs())
    async with trio.open_nursery() as nursery:
        await nursery.start(swarm.run)
        yield swarm
        nursery.cancel_scope.cancel()


@pytest.mark.real("sockets")
async def test_a_call_tells_who_answers_or_why_nobody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering() as swarm:
        assert (await reachability_checks.dial_peer(swarm.address, CHAIN)).peer == ALICE.public
        assert "answers there, expected" in (await reachability_checks.dial_peer(swarm.address, CHAIN, BOB.public)).why
        foreign = await reachability_checks.dial_peer(swarm.address, b"\0" * 32)
        assert (
            foreign.peer is None
            and "another network" in foreign.why
            and foreign.advice == reachability_checks.ADVICE["wrong-chain"]
        )
        listening = reachability_checks.check_own_port(swarm.address, CHAIN, BOB.public)
        assert [finding.level for finding in await listening] == [FindingLevel.FAULT], (
            "somebody else answers where this peer listens"
        )
        assert [finding.level for finding in await reachability_checks.check_own_port(swarm.address, CHAIN, ALICE.public)] == [
            FindingLevel.OK
        ]
        for me, level in ((ALICE, FindingLevel.OK), (BOB, FindingLevel.FAULT)):
            told = await reachability_checks.check_advertised_addresses([swarm.address], CHAIN, me.public, are_reached=True)
            assert [finding.level for finding in told] == [level]
    gone = await reachability_checks.dial_peer(swarm.address, CHAIN)
    assert (gone.why, gone.advice) == ("connection refused", reachability_checks.FIREWALL_ADVICE)
    for are_reached, level in ((True, FindingLevel.OK), (False, FindingLevel.WARNING)):
        [found] = await reachability_checks.check_advertised_addresses(
            [gone.address], CHAIN, ALICE.public, are_reached=are_reached
        )
        assert found.level == level
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(reachability_checks, "DIAL_SECONDS_MAX", 0.05)
        assert "no answer within" in (await reachability_checks.dial_peer(f"127.0.0.1:{silent.getsockname()[1]}", CHAIN)).why


@pytest.mark.real("sockets")
async def test_a_peer_of_another_wire_version_is_named_with_both_versions() -> None:
    preamble = MAGIC + (WIRE_VERSION + 1).to_bytes(2, "big") + chain_tag(CHAIN)
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, lambda stream: stream.send_all(preamble), [listener])
        found = await reachability_checks.dial_peer(format_address(*listener.socket.getsockname()), CHAIN)
        nursery.cancel_scope.cancel()
    versions = f"the peer speaks wire version {WIRE_VERSION + 1}, this peer {WIRE_VERSION}: update the older one"
    assert found.peer is None and found.why == versions
    assert found.advice == reachability_checks.ADVICE["wrong-version"]


@pytest.mark.real("sockets")
async def test_others_are_needed_one_of_them_at_least_and_nobody_with_our_key() -> None:
    async def others(*addresses: str, me: bytes = BOB.public, links: int | None = 0, alone: bool = False) -> list[DoctorFinding]:
        return await reachability_checks.check_other_peers(addresses, CHAIN, me, links=links, alone=alone)

    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    async with answering() as swarm:
        here, pinned = swarm.address, f"{peer_id(CAROL.public)}@{swarm.address}"
        assert [one.level for one in await others(here, nobody)] == [FindingLevel.OK, FindingLevel.WARNING]
        assert [one.level for one in await others(nobody, pinned)] == [
            FindingLevel.FAULT,
            FindingLevel.WARNING,
            FindingLevel.WARNING,
        ]
        lost = (await others(f"{peer_id(CAROL.public)}@{nobody}"))[1]
        assert lost.text == f"{nobody} ({peer_id(CAROL.public)[:8]}): connection refused"
        assert [one.level for one in await others(nobody, links=1)] == [FindingLevel.WARNING, FindingLevel.WARNING], (
            "somebody has dialed it"
        )
        assert [one.level for one in await others()] == [FindingLevel.WARNING]
        assert [one.level for one in await others(here, "nobody@h:1")] == [FindingLevel.OK, FindingLevel.WARNING], "no peer id"
        assert [one.level for one in await others(alone=True)] == [FindingLevel.OK]
        assert [one.level for one in await others(here, me=ALICE.public, alone=True)] == [FindingLevel.OK], "it dials itself"
        [copy] = await others(here, me=ALICE.public, links=None)
        assert copy.level == FindingLevel.FAULT and "with the key of this peer" in copy.text


def test_what_others_say_of_reaching_this_peer_is_told() -> None:
    assert {said: [found.level for found in reachability_checks.check_reachability(said)] for said in ReachabilityState} == {
        ReachabilityState.DIRECT: [FindingLevel.OK],
        ReachabilityState.RELAYED: [FindingLevel.WARNING],
        ReachabilityState.UNKNOWN: [],
    }


def test_a_peer_that_listens_elsewhere_than_the_settings_say_is_named() -> None:
    assert reachability_checks.check_listen_settings(["0.0.0.0:0", "[::1]:7"], ["[::1]:7", "0.0.0.0:4711"]) == []
    for wanted, listening in ((["h:1"], ["h:2"]), (["h:1", "h:1"], ["h:1"]), (["h:0"], [])):
        [found] = reachability_checks.check_listen_settings(wanted, listening)
        assert found.level == FindingLevel.WARNING and (", ".join(listening) or "no address") in found.text


def test_each_place_is_dialed_once_and_the_named_ones_first() -> None:
    assert reachability_checks.dial_candidates(["h:1", "h:2"], ["x@h:2", "y@h:3"]) == ("h:1", "h:2", "y@h:3")


# The machine ----------------------------------------------------------------------------------------------------------


def test_little_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, level in ((100 << 20, FindingLevel.FAULT), (1 << 30, FindingLevel.WARNING), (100 << 30, FindingLevel.OK)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free, total=1 << 40))
        [found] = machine.check_disk(tmp_path / "not" / "there")
        assert found.level == level and bool(found.advice) == (level != FindingLevel.OK)
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_files=10, f_favail=3))
    assert "3 more files" in fault_of("disk", machine.check_disk(tmp_path)).text


def test_little_memory_is_named_with_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def levels(free: int) -> list[str]:
        monkeypatch.setattr(machine, "available_bytes", lambda: (free, "control group"))
        cases = ((VOTER, False), (TRAINER, False), (TRAINER, True))
        return [finding.level for role, runs in cases for finding in machine.check_memory(CONFIG, role, runs=runs)]

    assert levels(50_000_000) == [FindingLevel.FAULT, FindingLevel.FAULT, FindingLevel.WARNING]
    assert levels(200_000_000) == [FindingLevel.OK, FindingLevel.FAULT, FindingLevel.OK], (
        "a peer that runs has its memory already"
    )
    assert levels(10**9) == [FindingLevel.OK] * 3
    found = fault_of("memory", machine.check_memory(replace(CONFIG, memory_mb_max=10**7), TRAINER, runs=False))
    assert found.level == FindingLevel.WARNING and "10000000 MB" in found.text


def test_the_least_bound_of_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, left in {"_left_in_group": 7_000, "_address_space": None}.items():
        monkeypatch.setattr(machine, name, lambda left=left: left)
    monkeypatch.setattr(machine, "_meminfo", lambda: {"MemAvailable": 9_000})
    assert machine.available_bytes() == (7_000, "control group")
    monkeypatch.setattr(machine, "_left_in_group", lambda: None)
    assert machine.available_bytes() == (9_000, "machine")
    monkeypatch.setattr(machine, "_meminfo", dict)
    assert machine.available_bytes() == (None, "")


def test_few_open_files_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    assert "LimitNOFILE" in fault_of("files", machine.check_open_files()).advice


def test_a_package_that_the_role_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    monkeypatch.setattr(features, "find_spec", lambda name: None)
    lacking = fault_of("train", machine.check_engine(TRAINER, "pytorch"))
    assert lacking.text == "the role trainer trains, and the package torch is not installed"
    assert lacking.advice == "run `pip install 'folkmoot[train]'`, or take --role voter, which does not train"
    assert "folkmoot[web]" in fault_of("version", machine.check_version(features.roles()["annotator"])).advice
    assert [finding.level for finding in machine.check_version(VOTER)] == [FindingLevel.OK]
    assert list(machine.check_engine(VOTER, "pytorch")) == []
    assert list(machine.check_engine(TRAINER, "toy")) == [], "another engine needs no torch"


def test_another_torch_than_the_one_of_this_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding.level for finding in machine.check_engine(TRAINER, "pytorch")] == [FindingLevel.OK]
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=2.1", 'torch==1.0.0; extra == "train"'])
    [other] = machine.check_engine(TRAINER, "pytorch")
    assert other.level is FindingLevel.WARNING and other.advice == "install torch==1.0.0"
    installed = metadata.version("torch").partition("+")[0]
    assert other.text == f"torch {installed} is installed, but this program needs 1.0.0: re-executions may round differently"


# The clock ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "last_seconds", "kept", "level"),
    [
        (3_600.0, None, True, FindingLevel.FAULT),
        (-3_600.0, None, True, FindingLevel.FAULT),
        (0.3, None, False, FindingLevel.OK),  # the other peers are better evidence than the kernel
        (None, -3_600.0, True, FindingLevel.OK),
        (None, 3_600.0, True, FindingLevel.FAULT),  # decisions seem to lie in the future
        (None, None, False, FindingLevel.WARNING),
        (None, None, None, FindingLevel.OK),
    ],
)
def test_a_wrong_clock_is_named(
    ahead: float | None, last_seconds: float | None, kept: bool | None, level: FindingLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "is_clock_synchronized", lambda: kept)
    last_ms = None if last_seconds is None else int(1_000 * (time.time() + last_seconds))
    found = machine.check_clock(ahead, last_ms, 0)
    assert found.level == level and bool(found.advice) == (level != FindingLevel.OK)


async def test_the_clock_is_compared_with_the_other_leaders_of_decisions_that_this_peer_saw() -> None:
    leaders, wrong = [OTHER, "c" * 52, "d" * 52, ME], {"d" * 52: -9_000}  # one voter's clock is wrong, which proves nothing

    class Api:
        async def events(self, after: int, wait_seconds: float) -> tuple[EventView, ...]:
            seen = [EventView(n, 1_000 * n + 3_040, "decided", "", {"height": str(n), "seen": "True"}) for n in range(5, 13)]
            missed = [EventView(n, 90_000_000, "decided", "", {"height": str(n), "seen": "False"}) for n in range(1, 5)]
            return (*missed, EventView(0, 0, "job", "", {}), *seen)

        async def block(self, height: int) -> BlockView:
            leader = leaders[height % len(leaders)]
            return replace(BLOCK, height=height, proposer=leader, time_ms=1_000 * height + wrong.get(leader, 0))

    assert await machine.clock_offset(Api(), ME) == pytest.approx(3.04)  # type: ignore[arg-type]
    leaders[:] = [ME]
    assert await machine.clock_offset(Api(), ME) is None  # type: ignore[arg-type]
