"""`python -m scenarios.deploy`: the compose file's nine peers as processes on loopback, under monitors and `peer doctor`.

The command of each service runs with ports of this machine in place of a container. The peers must found one network, train, and
report good health over HTTP. Then each fault is planted, and `peer doctor` must name it. Where a docker daemon runs, both images
are built, and they must not run as root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from peer.doctor.findings import DoctorFinding, FindingLevel
from protocol.errors import UserError
from scenarios import bad_input
from scenarios.clock import VARIABLE as CLOCK
from scenarios.network import SMALL_JOB
from scenarios.trials import Parser, report

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SECONDS_MAX = 120.0  # for anything that normally takes seconds, with nine peers on two cores
POLL_SECONDS = 0.2
ROUNDS = 3
HOUR = 3_600
LISTEN, WEB = "0.0.0.0:7700", "0.0.0.0:7780"  # inside a container
VICTIM, OTHERS = "voter-1", ("voter-2", "voter-3")  # no block is decided without these three
WRAPPER = f"""#!/bin/sh
exec {sys.executable} -m ${{{CLOCK}:+scenarios.clock}} peer.cli "$@"
"""


@dataclass
class Service:
    name: str
    command: list[str]
    environment: dict[str, str]
    address: str
    directory: Path
    metrics: str
    process: subprocess.Popen[bytes] | None = None

    def start(self, **more: str) -> None:
        with (self.directory.parent / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment | more,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Stop the peer and all processes that its start script left behind."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGCONT)
                os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(SECONDS_MAX)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process = None

    def peer(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return self.ran(["peer", *words], more)

    def ran(self, command: list[str], more: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command with the environment of the container."""
        program = shutil.which(command[0], path=self.environment["PATH"]) or command[0]
        return subprocess.run(
            [program, *command[1:]],
            env=self.environment | dict(more),
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )

    def doctor(self, bound: str = "", /, **more: str) -> list[DoctorFinding]:
        """Return the findings of `peer doctor`.

        `bound` is a limit that the shell sets first. Raises `UserError` if the output has no findings.
        """
        done = self.ran(["sh", "-c", f"{bound}\nexec peer doctor --json"], more)
        try:
            return [DoctorFinding(**finding) for finding in json.loads(done.stdout)]
        except ValueError:
            raise UserError(f"`peer doctor` of {self.name} ended with {done.returncode}: {done.stderr.strip()[-300:]}") from None

    def asked(self, path: str) -> tuple[int, str]:
        """Return status and text of a page, or status 0 if no peer answers."""
        try:
            with urlopen(f"http://{self.metrics}{path}", timeout=SECONDS_MAX) as reply:
                return reply.status, reply.read().decode()
        except HTTPError as error:  # 503 is one
            return error.code, error.read().decode()
        except (OSError, HTTPException) as error:
            return 0, str(error)

    def samples(self) -> list[Sample]:
        """Return the samples of /metrics, by the parser of Prometheus."""
        return [one for family in text_string_to_metric_families(self.asked("/metrics")[1]) for one in family.samples]

    def figure(self, name: str) -> float:
        """Return a metric without labels, or -1 while the peer does not answer."""
        return next((one.value for one in self.samples() if one.name == f"folkmoot_{name}" and not one.labels), -1.0)


@dataclass
class Fleet:
    folder: Path
    services: dict[str, Service] = field(default_factory=dict)

    @property
    def victim(self) -> Service:
        return self.services[VICTIM]

    def until(self, what: str, holds: Callable[[], bool]) -> float:
        """Wait for a condition and return the seconds that it took. Raises `UserError` after `SECONDS_MAX`."""
        started = time.monotonic()
        while not holds():
            if time.monotonic() > started + SECONDS_MAX:
                health = {name: service.asked("/healthz") for name, service in self.services.items()}
                raise UserError(f"{what}: this did not happen within {SECONDS_MAX:g} s; {health}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - started

    def all_well(self) -> bool:
        return all(service.asked("/healthz") == (200, "ok\n") for service in self.services.values())

    def agree(self) -> bool:
        states = [json.loads(service.peer("status", "--json").stdout) for service in self.services.values()]
        return len({(state["height"], state["state_root"]) for state in states}) == 1

    @contextmanager
    def stopped(self) -> Iterator[Service]:
        """Stop the victim, and start it again afterwards."""
        self.victim.stop()
        try:
            yield self.victim
        finally:
            self.victim.start()
            self.until(f"{VICTIM} is back", lambda: self.victim.asked("/healthz")[0] == 200)

    @contextmanager
    def started_again(self, **more: str) -> Iterator[Service]:
        with self.stopped() as victim:
            victim.start(**more)
            try:
                self.until(f"{VICTIM} answers", lambda: victim.peer("status", **more).returncode != 2)
                yield victim
            finally:
                victim.stop()

    def copy(self, **more: str) -> Service:
        """Copy the victim's key and genesis to a new folder, as after the loss of a disk."""
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="copy-"))
        for name in ("identity.key", "genesis"):
            shutil.copy2(self.victim.directory / name, folder / name)
        environment = self.victim.environment | {
            "PEER_DATA_DIRECTORY": str(folder),
            "PEER_LISTEN": "127.0.0.1:0",
            "PEER_METRICS": "",
        }
        return Service("copy", [], environment | more, "", folder, "")


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """Start the services of the compose file on loopback ports, and stop them at the end."""
    made = Fleet(folder)
    described: Mapping[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    ports = {name: free_ports() for name in described}
    addresses = {f"{name}:7700": f"127.0.0.1:{ports[name][0]}" for name in described}
    for place in ("bin", "meeting"):
        (folder / place).mkdir()
    (folder / "bin" / "peer").write_text(WRAPPER)
    (folder / "bin" / "peer").chmod(0o755)
    (folder / "bin" / "start").symlink_to(DEPLOY / "start.sh")
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PEER_")} | {
        "MEETING": str(folder / "meeting"),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    for name, service in described.items():
        listen, web, metrics = (f"127.0.0.1:{port}" for port in ports[name])
        (folder / name).mkdir(mode=0o700)
        places = {"PEER_DATA_DIRECTORY": str(folder / name), "PEER_METRICS": metrics}
        said = {key: mapped(value, {**addresses, LISTEN: listen, WEB: web}) for key, value in service["environment"].items()}
        made.services[name] = Service(name, service["command"], ours | said | places, listen, folder / name, metrics)
    with ExitStack() as stack:
        for service in made.services.values():
            stack.callback(service.stop)
            service.start()
        yield made


def mapped(value: str, places: Mapping[str, str]) -> str:
    """Return a variable's value with each address in its list replaced."""
    return ",".join(places.get(part, part) for part in value.split(","))


def free_ports() -> list[int]:
    """Return ports for links, pages and metrics. If another program takes one meanwhile, the peer does not start."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        return [one.getsockname()[1] for one in held]


# Faults: each function plants one, returns the findings of `peer doctor`, and repairs it --------------------------------------


def nothing(fleet: Fleet) -> list[DoctorFinding]:
    return [finding for service in fleet.services.values() for finding in service.doctor()]


def taken_port(fleet: Fleet) -> list[DoctorFinding]:
    with fleet.stopped() as victim, listening(victim.address):
        return victim.doctor()


def open_key(fleet: Fleet) -> list[DoctorFinding]:
    key = fleet.victim.directory / "identity.key"
    key.chmod(0o644)
    try:
        return fleet.victim.doctor()
    finally:
        key.chmod(0o600)


def silent_bootstrap(fleet: Fleet) -> list[DoctorFinding]:
    return fleet.copy(PEER_BOOTSTRAP=nobody()).doctor()


def other_network(fleet: Fleet) -> list[DoctorFinding]:
    stranger = fleet.copy(PEER_BOOTSTRAP=fleet.victim.address)
    (stranger.directory / "genesis").unlink()
    stranger.peer("init", "--network", "other")
    return stranger.doctor()


def copied_key(fleet: Fleet) -> list[DoctorFinding]:
    return fleet.copy(PEER_BOOTSTRAP=fleet.victim.address).doctor()


def wrong_advertise(fleet: Fleet) -> list[DoctorFinding]:
    return fleet.victim.doctor(PEER_ADVERTISE=nobody())


def taken_metrics(fleet: Fleet) -> list[DoctorFinding]:
    with fleet.stopped() as victim:
        with listening(victim.metrics):
            victim.start()
            fleet.until(f"{VICTIM} answers", lambda: victim.peer("status").returncode != 2)
            found = victim.doctor()
        victim.stop()
    return found


def late_clock_of_one_that_is_stopped(fleet: Fleet) -> list[DoctorFinding]:
    with fleet.stopped() as victim:
        return victim.doctor(**{CLOCK: f"{-HOUR} 0"})


def wrong_clock(fleet: Fleet, seconds: int) -> list[DoctorFinding]:
    wrong = {CLOCK: f"{seconds} 0"}
    with fleet.started_again(**wrong) as victim:
        full = fleet.services["full"]
        before = full.figure("height")
        full.peer("console", "test")
        fleet.until("a round", lambda: full.figure("height") >= before + 3)
        fleet.until(f"{VICTIM} follows", lambda: victim.figure("height") >= before + 3)
        return victim.doctor(**wrong)


def full_disk(fleet: Fleet) -> list[DoctorFinding]:
    with bad_input.small_disk() as small:
        copy = fleet.copy()
        shutil.copytree(copy.directory, small / "peer")
        return copy.doctor(PEER_DATA_DIRECTORY=str(small / "peer"))


def little_memory(fleet: Fleet) -> list[DoctorFinding]:
    kib = 390_000  # below the needs of a peer with a worker, and above those of the doctor
    return fleet.copy(PEER_ROLE="trainer", OPENBLAS_NUM_THREADS="1").doctor(f"ulimit -v {kib}")


def few_files(fleet: Fleet) -> list[DoctorFinding]:
    return fleet.copy().doctor("ulimit -n 256")


def no_torch(fleet: Fleet) -> list[DoctorFinding]:
    hidden = _shadow(fleet, "sitecustomize.py", 'import sys\n\nsys.modules["torch"] = None\n')
    return fleet.copy(PEER_ROLE="trainer").doctor(PYTHONPATH=hidden)


def other_version(fleet: Fleet) -> list[DoctorFinding]:
    metadata = "Metadata-Version: 2.1\nName: folkmoot\nVersion: 9.9.9\n"
    return fleet.victim.doctor(PYTHONPATH=_shadow(fleet, "folkmoot-9.9.9.dist-info/METADATA", metadata))


def _shadow(fleet: Fleet, name: str, text: str) -> str:
    """Return a search path of modules on which this file comes first."""
    folder = Path(tempfile.mkdtemp(dir=fleet.folder, prefix="shadow-"))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return f"{folder}:{fleet.victim.environment['PYTHONPATH']}"


def damaged_ledger(fleet: Fleet) -> list[DoctorFinding]:
    with fleet.stopped() as victim:
        ledger = victim.directory / "ledger.sqlite"
        whole = ledger.read_bytes()
        ledger.write_bytes(whole[:4096] + bytes(reversed(whole[4096:8192])) + whole[8192:])
        try:
            return victim.doctor()
        finally:
            for suffix in ("-wal", "-shm"):
                ledger.with_name(ledger.name + suffix).unlink(missing_ok=True)
            ledger.write_bytes(whole)


def damaged_genesis(fleet: Fleet) -> list[DoctorFinding]:
    copy = fleet.copy()
    (copy.directory / "genesis").write_bytes((copy.directory / "genesis").read_bytes()[:-1])
    return copy.doctor()


def no_directory(fleet: Fleet) -> list[DoctorFinding]:
    return fleet.victim.doctor(PEER_DATA_DIRECTORY=str(fleet.folder / "nowhere"))


def wrong_setting(fleet: Fleet) -> list[DoctorFinding]:
    return fleet.victim.doctor(PEER_ROLE="trayner")


def frozen(fleet: Fleet) -> list[DoctorFinding]:
    assert fleet.victim.process is not None
    fleet.victim.process.send_signal(signal.SIGSTOP)
    try:
        return fleet.victim.doctor()
    finally:
        fleet.victim.process.send_signal(signal.SIGCONT)


def no_quorum(fleet: Fleet) -> list[DoctorFinding]:
    """Stop three of six voters. A monitor must see it, too."""
    gone, full = [fleet.services[name] for name in (VICTIM, *OTHERS)], fleet.services["full"]
    for service in gone:
        service.stop()
    try:
        fleet.until("/healthz tells of it", lambda: full.asked("/healthz")[0] == 503)
        fleet.until("/metrics has the alert", lambda: any(one.labels.get("cause") == "no-quorum" for one in full.samples()))
        return full.doctor()
    finally:
        for service in gone:
            service.start()
        fleet.until("all are well again", fleet.all_well)


@contextmanager
def listening(address: str) -> Iterator[None]:
    host, _, port = address.rpartition(":")
    with closing(socket.create_server((host, int(port)))):
        yield


def nobody() -> str:
    """Return an address of this machine at which nothing listens."""
    return f"127.0.0.1:{free_ports()[0]}"


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Callable[[Fleet], list[DoctorFinding]]
    check: str
    level: FindingLevel
    text: str  # part of the finding's text


FAULTS = (
    Fault("port taken", taken_port, "port", FindingLevel.FAULT, "address already in use"),
    Fault("key readable by others", open_key, "key", FindingLevel.FAULT, "mode 0644"),
    Fault("nobody at the bootstrap address", silent_bootstrap, "peers", FindingLevel.FAULT, "none of 1 addresses answers"),
    Fault("another network at the address", other_network, "peers", FindingLevel.WARNING, "another network"),
    Fault("a copy of the key that would be started", copied_key, "peers", FindingLevel.FAULT, "with the key of this peer"),
    Fault("wrong advertised address", wrong_advertise, "port", FindingLevel.WARNING, "announced address"),
    Fault("port of the metrics taken", taken_metrics, "metrics", FindingLevel.WARNING, "the address was taken"),
    Fault("stopped, clock an hour late", late_clock_of_one_that_is_stopped, "clock", FindingLevel.FAULT, "behind"),
    Fault(
        "running, clock an hour late",
        lambda fleet: wrong_clock(fleet, -HOUR),
        "clock",
        FindingLevel.FAULT,
        "behind the other peers",
    ),
    Fault(
        "running, clock an hour ahead",
        lambda fleet: wrong_clock(fleet, HOUR),
        "clock",
        FindingLevel.FAULT,
        "ahead of the other peers",
    ),
    Fault("disk of 4 MB", full_disk, "disk", FindingLevel.FAULT, "are free"),
    Fault("390 MB of address space for a trainer", little_memory, "memory", FindingLevel.FAULT, "ulimit -v"),
    Fault("256 open files", few_files, "files", FindingLevel.WARNING, "256 files"),
    Fault("a trainer without torch", no_torch, "train", FindingLevel.FAULT, "torch is not installed"),
    Fault("another version runs", other_version, "version", FindingLevel.WARNING, "9.9.9"),
    Fault("damaged ledger", damaged_ledger, "data", FindingLevel.FAULT, "ledger.sqlite"),
    Fault("damaged genesis", damaged_genesis, "data", FindingLevel.FAULT, "genesis is damaged"),
    Fault("no data directory", no_directory, "data", FindingLevel.FAULT, "does not exist"),
    Fault("a setting that is none", wrong_setting, "settings", FindingLevel.FAULT, "trayner"),
    Fault("a daemon that stands still", frozen, "peer", FindingLevel.FAULT, "has not answered"),
    Fault("three of six voters away", no_quorum, "peer", FindingLevel.FAULT, "3 of 6 voters"),
)


# The run ---------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    what: str
    found: str
    problem: str = ""


def run(options: argparse.Namespace) -> int:
    rows = [*images(), *unit()]
    folder = Path(tempfile.mkdtemp(prefix="folkmoot-scenario-"))
    try:
        with fleet(folder) as made:
            for step in (started, trained, *(lambda made, fault=fault: named(made, fault) for fault in FAULTS), well_at_last):
                rows.append(tried(made, step))
                print(f"{rows[-1].what}: {rows[-1].problem or 'held'}", file=sys.stderr, flush=True)
    finally:
        if options.keep:
            shutil.copytree(folder, options.keep, ignore_dangling_symlinks=True)
        shutil.rmtree(folder)
    failures = [f"{row.what}: {row.problem}" for row in rows if row.problem]
    shown = [[str(number + 1), row.what, row.found, "no" if row.problem else "yes"] for number, row in enumerate(rows)]
    return report(options, "deployment", ["", "what", "figures", "held"], shown, failures, {"rows": [vars(row) for row in rows]})


def tried(made: Fleet, step: Callable[[Fleet], Row]) -> Row:
    try:
        return step(made)
    except UserError as error:
        return Row(getattr(step, "__name__", "a step"), "", str(error))


def started(made: Fleet) -> Row:
    """Check that all nine are healthy members of one network, and that six vote."""
    services = made.services.values()
    seconds = made.until("all nine are well", made.all_well)
    seconds += made.until("all are members", lambda: all(one.figure("members") == len(services) for one in services))
    voters = {one.figure("voters") for one in services}
    wrong = [finding.text for finding in nothing(made) if finding.level == FindingLevel.FAULT]
    problem = "" if voters == {6} and not wrong else f"voters {voters}, faults where none was planted: {wrong}"
    memory = ", ".join(f"{one.name} {one.figure('memory_bytes') / 1e6:.0f}" for one in services)
    return Row("from nothing to nine members", f"{seconds:.0f} s; MB: {memory}", problem)


def trained(made: Fleet) -> Row:
    """Train a job with full audits. Three of the six voters can re-execute."""
    began = time.monotonic()
    full = made.services["full"]
    fields = [f"{name}={value}" for name, value in SMALL_JOB.items()]
    made.until("roles are known", lambda: full.peer("train", "--rounds", str(ROUNDS), "--set", *fields).returncode == 0)
    made.until(f"{ROUNDS} rounds", lambda: len(json.loads(full.peer("rounds", "--json").stdout)) == ROUNDS)
    made.until("all hold the same state", made.agree)
    rounds = json.loads(full.peer("rounds", "--json").stdout)
    accepted = sum(verdict == "accept" for one in rounds for verdict in one["verdicts"].values())
    problem = "" if accepted else "no update was accepted"
    return Row(
        f"{ROUNDS} rounds", f"{time.monotonic() - began:.0f} s; {accepted} updates accepted, same roots at all nine", problem
    )


def named(made: Fleet, fault: Fault) -> Row:
    try:
        findings = fault.plant(made)
    except UserError as error:
        return Row(fault.name, "", str(error))
    wrong = [finding for finding in findings if finding.level != FindingLevel.OK]
    for finding in wrong:
        if (finding.check, finding.level) == (fault.check, fault.level) and fault.text in finding.text:
            return Row(fault.name, f"{finding.text} → {finding.advice}", "" if finding.advice else "no finding names a remedy")
    return Row(fault.name, "; ".join(finding.text for finding in wrong), f"no {fault.level} of {fault.check} has {fault.text!r}")


def well_at_last(made: Fleet) -> Row:
    seconds = made.until("all are well again", made.all_well) + made.until("all hold the same state", made.agree)
    return Row("afterwards all are well", f"{seconds:.0f} s")


def images() -> Iterator[Row]:
    """Build both images where a docker daemon runs. Tests check the contents of the files without one."""
    if ran("docker", "info").returncode:
        print("the images are not built: no docker daemon runs on this machine", file=sys.stderr)
        yield Row("images", "not built: no docker daemon runs here")
        return
    for target in ("light", "full"):
        tag = f"folkmoot:{target}"
        built = ran("docker", "build", "-f", str(DEPLOY / "Dockerfile"), "--target", target, "-t", tag, str(ROOT))
        if built.returncode:
            yield Row(tag, "", built.stderr[-300:])
            continue
        who = ran("docker", "run", "--rm", tag, "id", "-u").stdout.strip()
        said = ran("docker", "run", "--rm", tag, "peer", "identity")
        size = int(ran("docker", "image", "inspect", "-f", "{{.Size}}", tag).stdout or 0)
        problem = "" if said.returncode == 0 and who not in ("", "0") else f"user {who!r}; {said.stderr[-300:]}"
        yield Row(tag, f"{size / 1e6:.0f} MB, runs as user {who}", problem)


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command. The status is 127, as in a shell, if there is no such program."""
    if not shutil.which(command[0]):
        return subprocess.CompletedProcess(command, 127, "", f"no {command[0]}")
    return subprocess.run(command, capture_output=True, text=True, check=False)


def unit() -> Iterator[Row]:
    """Check the unit with systemd's own reader, without its complaint that the program is not installed here."""
    done = ran("systemd-analyze", "verify", str(DEPLOY / "folkmoot.service"))
    if done.returncode == 127:
        yield Row("unit", "not read: no systemd-analyze is here")
        return
    wrong = [line for line in done.stderr.splitlines() if "is not executable" not in line]
    yield Row("unit", "read by systemd-analyze", "; ".join(wrong))


def main() -> int:
    parser = Parser("deploy", __doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the table to this file")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for the peers' data and logs, which are kept")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
