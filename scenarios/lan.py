"""`python -m scenarios.lan`: five peers in network namespaces: the steps of the README, a cut link, and changed addresses.

The namespaces are connected by one bridge in another namespace and have no default route. No packet leaves them. The scenario
needs the right to make them (root on Linux, with iproute2); without it, it says so and exits with 77.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import trio

from peer.api import control_socket
from protocol.addresses import parse_address
from protocol.api import PeerApi
from protocol.errors import UserError
from scenarios import network
from scenarios.network import SMALL_JOB
from scenarios.trials import Trial, arguments, report, table_of

NOT_PERMITTED = 77  # the status that test runners read as "skipped"
PEERS, FOUNDERS = 5, 4  # the fifth joins later
PORT = 7700  # of the README
COMMAND_SECONDS_MAX = 60.0  # for a command that starts Python and asks the daemon; allows for a busy machine
START_SECONDS_MAX = 60.0  # until a started peer answers
LINKED_SECONDS_MAX = 60.0  # until all have found one another after a start
TRAINED_SECONDS_MAX = 240.0  # for a small job of one round, with the first start of the workers
VOTES_SECONDS_MAX = 60.0  # from the last approval to the vote
CUT_SECONDS = 45.0  # longer than a silent link lives (38 s), so that both ends have to dial again
TOLD_SECONDS_MAX = 30.0  # after that, until the cut-off peer names the peers that it does not reach
HEALED_SECONDS_MAX = 45.0  # the longest pause between dials, and the timeout of a dial that has just begun
MOVED_SECONDS_MAX = 120.0  # both ends must notice the silence (38 s), then as above
RELINKED_SECONDS_MAX = 20.0  # after one `connect`
POLL_SECONDS = 0.25


@dataclass
class Machine:
    name: str  # name of its network namespace
    host: str
    home: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{PORT}"

    @property
    def client(self) -> PeerApi:
        return control_socket.make_client(self.home / "folkmoot")

    @property
    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.name, sys.executable, "-m", "peer.cli"]

    @property
    def environment(self) -> dict[str, str]:
        others = {name: value for name, value in os.environ.items() if not name.startswith("PEER_")}
        # One setting differs from the README: five trainers share these cores.
        return others | {"XDG_DATA_HOME": str(self.home), "PEER_THREADS": "1"}

    def run(self, *words: str) -> None:
        """Start a command that keeps running."""
        with (self.home / "peer.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )

    async def ask(self, *words: str, text: str = "") -> str:
        """Run a command and return its output. Raises `UserError` with its message if it fails."""
        with trio.fail_after(COMMAND_SECONDS_MAX):
            done = await trio.run_process(
                [*self.command, *words], stdin=text.encode(), capture_stdout=True, capture_stderr=True, check=False,
                env=self.environment,
            )  # fmt: skip
        if done.returncode:
            raise UserError(f"{self.host}: `peer {words[0]}`: {(done.stderr or done.stdout).decode().strip()}")
        return done.stdout.decode()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


@dataclass
class Lan:
    """The namespaces, the bridge and the peers."""

    bridge: str
    machines: list[Machine] = field(default_factory=list)

    def cut(self, at: int, *, heal: bool = False) -> None:
        ip("-n", self.bridge, "link", "set", f"port{at}", "up" if heal else "down")

    def move(self, machine: Machine, host: str) -> None:
        # The order matters: deleting the first address of a network also deletes its others.
        ip("-n", machine.name, "address", "del", f"{machine.host}/24", "dev", "eth0")
        ip("-n", machine.name, "address", "add", f"{host}/24", "dev", "eth0")
        machine.host = host

    def stop(self) -> None:
        """End every peer, by process id."""
        deadline = time.monotonic() + network.END_SECONDS_MAX
        for machine in self.machines:
            machine.stop()
        for machine in self.machines:
            if machine.process is not None:
                try:
                    machine.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    machine.stop(signal.SIGKILL)
                    machine.process.wait()


def ip(*words: str) -> None:
    """Run iproute2. Raises `UserError` with its message if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX)
    if done.returncode:
        raise UserError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def refusal() -> str:
    """Return the reason why no namespace can be made here, or ""."""
    if shutil.which("ip") is None:
        return "the command `ip` (iproute2) is not installed"
    name = f"folkmoot-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
    except UserError as error:
        return f"cannot make network namespaces ({error}): run this as root"
    ip("netns", "del", name)
    return ""


@contextmanager
def lan(folder: Path, count: int = PEERS) -> Iterator[Lan]:
    """Make `count` machines with one address each and no default route. Remove all of it at the end of the block."""
    stem = f"folkmoot-{os.getpid()}"
    made, result = list[str](), Lan(f"{stem}-bridge")
    try:
        _namespace(result.bridge, made)
        ip("-n", result.bridge, "link", "add", "bridge0", "type", "bridge")
        ip("-n", result.bridge, "link", "set", "bridge0", "up")
        for at in range(count):
            machine = Machine(f"{stem}-{at}", f"10.77.0.{at + 1}", folder / f"peer-{at}")
            machine.home.mkdir()
            _namespace(machine.name, made)
            cable = ("type", "veth", "peer", "name", "eth0", "netns", machine.name)
            ip("-n", result.bridge, "link", "add", f"port{at}", *cable)
            ip("-n", result.bridge, "link", "set", f"port{at}", "master", "bridge0", "up")
            ip("-n", machine.name, "address", "add", f"{machine.host}/24", "dev", "eth0")
            ip("-n", machine.name, "link", "set", "lo", "up")
            ip("-n", machine.name, "link", "set", "eth0", "up")
            result.machines.append(machine)
        yield result
    finally:
        result.stop()
        for name in reversed(made):
            with contextlib.suppress(UserError):  # remove the others even if this one fails
                ip("netns", "del", name)


def _namespace(name: str, made: list[str]) -> None:
    ip("netns", "add", name)
    made.append(name)


# Steps -----------------------------------------------------------------------------------------------------------------


async def run(options: argparse.Namespace) -> int:
    folder = options.keep or Path(tempfile.mkdtemp(prefix="folkmoot-lan-"))
    folder.mkdir(parents=True, exist_ok=True)
    trials = list[Trial]()
    steps: list[tuple[str, Callable[[Lan, Trial], Awaitable[None]]]] = [
        ("the README's steps", readme),
        ("a link is cut and heals", cut),
        ("two move while they run", two_move),
        ("all move while they are stopped", all_move),
    ]
    try:
        with lan(folder) as made:
            for what, step in steps:
                trials.append(trial := Trial(what))
                try:
                    await step(made, trial)
                except UserError as error:
                    trial.problems.append(str(error))
                except trio.TooSlowError:
                    trial.problems.append(f"it took too long; {await state_of(made)}")
                print(f"{what}: {'; '.join(trial.problems) or trial.figures}", file=sys.stderr, flush=True)
                if trial.problems:
                    break
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    failures = [f"{trial.what}: {problem}" for trial in trials for problem in trial.problems]
    result = {"trials": [asdict(trial) for trial in trials]}
    return report(options, f"{PEERS} peers in namespaces of their own; seconds", *table_of(trials), failures, result)


async def readme(made: Lan, trial: Trial) -> None:
    first, *others = made.machines
    founders, late = others[: FOUNDERS - 1], made.machines[-1]
    ids = [(await machine.ask("identity")).split()[-1] for machine in founders]
    voters = [word for key in ids for word in ("--voter", key)]
    await first.ask("init", "--network", "lab", "--listen", f"0.0.0.0:{PORT}", *voters)
    first.run("run")
    await answer([first])
    invitation = (await first.ask("invite")).strip()
    for machine in founders:
        machine.run("join", invitation)
    async with timed(trial, "linked", LINKED_SECONDS_MAX):
        await answer(founders)
        await linked(made.machines[:FOUNDERS])
    invitation = (await first.ask("invite")).strip()
    async with timed(trial, "voting", VOTES_SECONDS_MAX):
        late.run("join", invitation)
        await answer([late])
        await linked(made.machines)
        key = (await late.client.status()).peer
        for machine in made.machines[: FOUNDERS - 1]:
            await until(partial(stands, machine, key))
            await machine.ask("approve", key)
        await until(partial(votes, late))
    await works(made, trial)


async def cut(made: Lan, trial: Trial) -> None:
    alone = made.machines[2]
    made.cut(2)
    try:
        await trio.sleep(CUT_SECONDS)
        async with timed(trial, "told", TOLD_SECONDS_MAX):
            await until(partial(says_whom_it_misses, alone))
        trial.require("cannot reach 10.77.0." in await alone.ask("peers"), "`peers` does not say who is not reached")
    finally:
        made.cut(2, heal=True)
    async with timed(trial, "linked", HEALED_SECONDS_MAX):
        await linked(made.machines)
    await works(made, trial)


async def two_move(made: Lan, trial: Trial) -> None:
    for machine, host in zip(made.machines[3:], ("10.77.0.104", "10.77.0.105"), strict=True):
        made.move(machine, host)
    async with timed(trial, "linked", MOVED_SECONDS_MAX):
        await linked(made.machines)
    await works(made, trial)


async def all_move(made: Lan, trial: Trial) -> None:
    await trio.to_thread.run_sync(made.stop)
    for at, machine in enumerate(made.machines):
        made.move(machine, f"10.77.0.{201 + at}")
        machine.run("run")
    await answer(made.machines)
    trial.require(
        not sum([(await machine.client.status()).links for machine in made.machines]),
        "some peers found each other without an address",
    )
    first, *others = made.machines
    async with timed(trial, "linked", RELINKED_SECONDS_MAX):
        await first.ask("connect", *(machine.address for machine in others))
        await linked(made.machines)
    await works(made, trial)


# Checks ----------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def timed(trial: Trial, what: str, seconds_max: float) -> AsyncIterator[None]:
    """Note the seconds that the block takes. Raises `trio.TooSlowError` after `seconds_max`."""
    started = trio.current_time()
    with trio.fail_after(seconds_max):
        yield
    trial.figures[what] = trio.current_time() - started


async def answer(machines: list[Machine]) -> None:
    """Wait until all machines answer on their control sockets."""
    with trio.fail_after(START_SECONDS_MAX):
        for machine in machines:
            while True:
                if machine.process is None or machine.process.poll() is not None:
                    raise UserError(f"{machine.host} has ended: {(machine.home / 'peer.log').read_text()[-200:].strip()}")
                with contextlib.suppress(UserError):
                    await machine.client.status()
                    break
                await trio.sleep(POLL_SECONDS)


async def linked(machines: list[Machine]) -> None:
    """Wait until each machine has a link with each other one at its current address."""
    hosts = {machine.host for machine in machines}
    for machine in machines:
        await until(partial(is_linked, machine, hosts - {machine.host}))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await condition():
            return
        await trio.sleep(POLL_SECONDS)


async def is_linked(machine: Machine, hosts: set[str]) -> bool:
    return await hosts_of_links(machine) == hosts


async def stands(machine: Machine, key: str) -> bool:
    return any(view.peer == key and "candidate" in view.membership for view in await machine.client.peers())


async def votes(machine: Machine) -> bool:
    return (await machine.client.status()).voter


async def says_whom_it_misses(machine: Machine) -> bool:
    return any(dial.text.startswith("cannot reach 10.77.0.") for dial in (await machine.client.status()).unreached_addresses)


async def has_finished(machine: Machine, job: str) -> bool:
    return any(view.job == job and view.state == "finished" for view in await machine.client.jobs())


async def hosts_of_links(machine: Machine) -> set[str]:
    return {parse_address(view.link.address)[0] for view in await machine.client.peers() if view.link}


async def works(made: Lan, trial: Trial) -> None:
    """Check that a small job is decided, trained and closed at all peers with the same model."""
    script = "train --rounds 1 " + " ".join(f"--set {name}={value}" for name, value in SMALL_JOB.items())
    async with timed(trial, "trained", TRAINED_SECONDS_MAX):
        said = await made.machines[1].ask("console", text=f"{script}\n")
        new = said.partition("job ")[2].split()[0]
        for machine in made.machines:
            await until(partial(has_finished, machine, new))
    roots = {view.model_root for machine in made.machines for view in await machine.client.jobs() if view.job == new}
    trial.require(len(roots) == 1, f"{len(roots)} different models")


async def state_of(made: Lan) -> str:
    found = []
    for machine in made.machines:
        try:
            status = await machine.client.status()
            found.append(f"{machine.host} {status.state} height {status.height}, links {sorted(await hosts_of_links(machine))}")
        except UserError as error:
            found.append(f"{machine.host}: {error}")
    return "; ".join(found)


def in_namespaces(name: str, about: str | None, conduct: Callable[[argparse.Namespace], Awaitable[int]]) -> int:
    """Run the command of a scenario that needs namespaces, and return its exit status."""
    options = arguments(name, about, peers=None).parse_args()
    if why := refusal():
        print(f"python -m scenarios.{name}: no trial ran: {why}", file=sys.stderr)
        return NOT_PERMITTED
    return network.main(partial(conduct, options))


def main() -> int:
    return in_namespaces("lan", __doc__, run)


if __name__ == "__main__":
    sys.exit(main())
