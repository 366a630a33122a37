"""Daemons in processes, which scenarios hurt: each is one on loopback, to be killed, stopped, started again and read.

It is the network of `peer demo`, with handles. Whatever happens, everything that was started here has ended when `running` ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio

from demo import network_demo
from demo.demo_peers import DemoPeer, PeerDisk
from demo.shutdown_signals import map_signals_to_interrupt
from peer.settings.data_directory import DataDirectory
from protocol import codec
from protocol.addresses import NO_LISTEN_ADDRESS
from protocol.api import EventView, TrainRequest
from protocol.errors import UserError
from protocol.identity import Signed, peer_id
from protocol.messages import Certificate, Commit

END_SECONDS_MAX = 20.0  # for a peer that was asked to stop
WORKER_SECONDS_MAX = 5.0  # a worker notices that its daemon is gone as soon as the kernel has closed the pipe
LEADER_SECONDS_MAX = 10.0  # somebody leads as soon as the last block is applied
POLL_SECONDS = 0.02
ROUNDS_ENDLESS = 100_000  # the scenario ends before the job does
SMALL_JOB = {
    "model.width": "32",
    "model.layers": "1",
    "model.hidden": "64",
    "model.context": "64",
    "local_steps": "2",
    "batch": "2",
    "micro_batch": "2",
    "audit": "full",
}  # rounds of a fraction of a second, so that faults, not arithmetic, take the time

# Inside the victim's own journal: every vote that was ever written there, in the transaction that wrote it. The journal itself
# forgets the votes of decided heights.
_RECORDER = """
CREATE TABLE IF NOT EXISTS every_vote (slot TEXT, signed BLOB);
CREATE TRIGGER IF NOT EXISTS record_vote AFTER INSERT ON votes BEGIN
    INSERT INTO every_vote VALUES (NEW.tag || ' ' || NEW.height || ' ' || NEW.view, NEW.signed); END;
CREATE TRIGGER IF NOT EXISTS record_round_vote AFTER INSERT ON round_votes WHEN NEW.tag <> 'accepted' BEGIN
    INSERT INTO every_vote VALUES (NEW.tag || ' ' || hex(NEW.job) || ' ' || NEW.round || ' ' || hex(NEW.signer), NEW.signed); END;
"""


@dataclass
class Network:
    demo: network_demo.Demo
    workers: set[int] = field(default_factory=set)  # process ids of all workers that were seen

    @property
    def peers(self) -> list[DemoPeer]:
        return self.demo.peers

    @property
    def honest(self) -> list[DemoPeer]:
        return self.demo.honest

    def name(self, key: str) -> str:
        """Of a peer id."""
        return next((peer.name for peer in self.peers if key == peer_id(peer.identity.public)), key[:8])

    def key(self, name: str) -> str:
        return next(peer_id(peer.identity.public) for peer in self.peers if peer.name == name)

    def named(self, key: str) -> DemoPeer | None:
        return next((peer for peer in self.peers if key == peer_id(peer.identity.public)), None)

    # Starting, hurting ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        network_demo.make_directories(self.demo)
        await network_demo.start_peers(self.demo)
        for peer in self.peers:
            self.record(peer)

    def record(self, peer: DemoPeer) -> None:
        """From now on every vote of this peer is kept."""
        with journal(peer) as database:
            database.executescript(_RECORDER)

    async def restart(self, peer: DemoPeer, *command: str) -> None:
        """Starts a peer that has ended where it was, as its operator would; returns when it answers."""
        self.launch(peer, *command)
        await network_demo.wait_until_ready(peer)

    def launch(self, peer: DemoPeer, *command: str) -> None:
        others = ",".join(other.address for other in self.peers if other is not peer and other.address != NO_LISTEN_ADDRESS)
        network_demo.launch_peer(self.demo, peer, others, command or ("run",))

    async def end(self, peer: DemoPeer) -> None:
        """Stops it in good order."""
        assert peer.process is not None
        self.workers |= children(peer.process.pid)
        peer.process.terminate()
        if not await self.dies(peer, END_SECONDS_MAX):
            peer.process.kill()
            peer.process.wait()

    async def dies(self, peer: DemoPeer, seconds_max: float) -> bool:
        """Whether its process ends in time."""

        async def gone() -> bool:
            return peer.process is None or peer.process.poll() is not None

        return await holds(gone, seconds_max)

    def kill(self, peer: DemoPeer) -> set[int]:
        """SIGKILL to the daemon alone; the process ids of its workers, which nobody told anything."""
        assert peer.process is not None
        workers = children(peer.process.pid)
        self.workers |= workers
        peer.process.kill()
        peer.process.wait()
        return workers

    def freeze(self, peer: DemoPeer) -> None:
        assert peer.process is not None
        peer.process.send_signal(signal.SIGSTOP)

    def thaw(self, peer: DemoPeer) -> None:
        assert peer.process is not None
        peer.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends everything, by process id."""
        for peer in self.peers:
            if peer.process is not None and peer.process.poll() is None:
                self.workers |= children(peer.process.pid)
                self.thaw(peer)
        network_demo.stop_peers(self.demo)
        deadline = time.monotonic() + WORKER_SECONDS_MAX
        while any(map(is_worker, self.workers)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for worker in filter(is_worker, self.workers):
            os.kill(worker, signal.SIGKILL)

    # Asking ----------------------------------------------------------------------------------------------------------

    async def train(self, overrides: dict[str, str], rounds: int = ROUNDS_ENDLESS, vocabulary: int = 0) -> str:
        settings = {"byzantine_max": str((len(self.peers) - 1) // 3), **overrides}
        return await self.demo.watched.client.start_job(
            TrainRequest("scenario", "", rounds, vocabulary, settings, accept_risk=True)
        )

    async def leader(self, asked: DemoPeer) -> DemoPeer | None:
        """Who leads the current view, as `asked` sees it; nobody does between a decision and its block's application."""
        with trio.move_on_after(LEADER_SECONDS_MAX):
            while True:
                for view in await asked.client.peers():
                    if view.leader and (named := self.named(view.peer)):
                        return named
                await trio.sleep(POLL_SECONDS)
        return None

    async def height(self, peer: DemoPeer) -> int:
        """-1 if it does not answer."""
        try:
            return (await peer.client.status()).height
        except UserError:
            return -1

    # Reading disks ---------------------------------------------------------------------------------------------------

    def evidence(self) -> dict[str, int]:
        """How many proven contradictions each honest peer has on its disk."""
        found = {}
        for peer in self.honest:
            with journal(peer) as database:
                found[peer.name] = database.execute("SELECT count(*) FROM evidence").fetchone()[0]
        return found

    def votes(self, peer: DemoPeer) -> tuple[int, list[str]]:
        """How many votes this peer has signed since the network started, and the slots that hold two different ones."""
        slots: dict[str, set[bytes]] = {}
        with journal(peer) as database:
            for slot, signed in database.execute("SELECT slot, signed FROM every_vote"):
                slots.setdefault(slot, set()).add(codec.decode(Signed, signed).body)
        return sum(map(len, slots.values())), [slot for slot, bodies in slots.items() if len(bodies) > 1]

    def views(self, peer: DemoPeer) -> dict[int, int]:
        """Height -> the view that decided it, where that was not the first, from the certificates on this peer's disk."""
        with journal(peer) as database:
            rows = database.execute("SELECT height, certificate FROM blocks").fetchall()
        votes = {height: codec.decode_message(codec.decode(Certificate, data).vote, (Commit,)) for height, data in rows}
        return {height: vote.view for height, vote in votes.items() if vote.view}

    def decided(self, peer: DemoPeer) -> int:
        """The last height whose decision is on this peer's disk; applying it, with its model, comes after."""
        with journal(peer) as database:
            height: int = database.execute("SELECT coalesce(max(height), 0) FROM blocks").fetchone()[0]
        return height

    def forks(self) -> list[str]:
        """The heights for which two honest disks hold different blocks."""
        tables = []
        for peer in self.honest:
            with journal(peer) as database:
                tables.append(dict(database.execute("SELECT height, digest FROM blocks").fetchall()))
        return [f"height {height}" for height in _unequal(tables)]

    def failures(self) -> list[str]:
        """What must never be found on the disks of peers that have stopped, whatever was done to them."""
        found = [f"two blocks were decided at {where}" for where in self.forks()]
        found += [f"roots differ at {where}" for where in self.differences()]
        found += [f"{peer.name} signed {slot} twice" for peer in self.honest for slot in self.votes(peer)[1]]
        if len(self.honest) == len(self.peers):
            found += [
                f"{count} proofs of double signing on the disk of {name}" for name, count in self.evidence().items() if count
            ]
        return found

    def differences(self) -> list[str]:
        """The heights and rounds whose roots are not the same on all honest disks that hold them."""
        with contextlib.ExitStack() as stack:
            disks = []
            for peer in self.honest:
                disks.append(disk := PeerDisk(peer.directory))
                stack.callback(disk.close)
            heights = [disk.roots() for disk in disks]
            rounds = [disk.model_roots() for disk in disks]
        return [f"height {key}" for key in _unequal(heights)] + [f"round {key[1]}" for key in _unequal(rounds)]


def _unequal(tables: list[dict[Any, Any]]) -> list[Any]:
    keys = sorted(set().union(*tables))
    return [key for key in keys if len({table[key] for table in tables if key in table}) > 1]


@contextlib.contextmanager
def journal(peer: DemoPeer) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(DataDirectory(peer.directory).ledger, timeout=30)
    try:
        yield connection
    finally:
        connection.close()


def voted(peer: DemoPeer) -> int:
    """The last height at which this peer has signed a vote, as its own journal has it."""
    with journal(peer) as database:
        height: int = database.execute("SELECT coalesce(max(height), 0) FROM votes").fetchone()[0]
    return height


@asynccontextmanager
async def running(
    peers: int,
    malicious: int = 0,
    *,
    seed: int = 0,
    attack: str = "sign-flip",
    mixed: bool = False,
    web: bool = False,
    folder: Path | None = None,
    dress: Callable[[DemoPeer], None] = lambda peer: None,
) -> AsyncIterator[Network]:
    """A network that runs inside this block; without a `folder` its data is deleted afterwards.

    `dress` may change how a peer is started, before it is.
    """
    place = folder or Path(tempfile.mkdtemp(prefix="folkmoot-scenario-"))
    options = argparse.Namespace(peers=peers, malicious=malicious, seed=seed, attack=attack, mixed=mixed, web=web, web_port=0)
    network = Network(network_demo.Demo(options, place, network_demo.assign_roles(options, place)))
    for peer in network.peers:
        dress(peer)
    try:
        await network.start()
        yield network
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(network.stop)
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)


def main(scenario: Callable[[], Awaitable[int]]) -> int:
    """Runs a scenario; its exit status. Ctrl-C and SIGTERM end it with everything it has started."""
    map_signals_to_interrupt()
    try:
        return trio.run(scenario)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if isinstance(error, BaseExceptionGroup) and not error.subgroup(KeyboardInterrupt):
            raise
        print("interrupted; everything is stopped", file=sys.stderr)
        return 130
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


# Processes -----------------------------------------------------------------------------------------------------------


def children(process: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{process}/task").glob("*"):
        with contextlib.suppress(OSError):
            found |= {int(word) for word in (task / "children").read_text().split()}
    return found


def signal_all(processes: Iterable[int], *, stop: bool) -> None:
    """Stops processes, or lets them go on."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP if stop else signal.SIGCONT)


def is_worker(process: int) -> bool:
    """Whether this process is a worker that still runs; one that has ended and waits for its parent has no command line."""
    try:
        return b"peer.worker.main" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


async def ended(workers: set[int]) -> bool:
    """Whether these workers end by themselves, as they must once their daemon is gone."""

    async def gone() -> bool:
        return not any(map(is_worker, workers))

    return await holds(gone, WORKER_SECONDS_MAX)


async def restored(peer: DemoPeer) -> EventView | None:
    """What this peer said when it had restored a snapshot, since it was started; None: it has restored none."""
    events = await peer.client.events(0, 0.0)
    return next((event for event in events if event.kind == "snapshot" and "seconds" in event.fields), None)


async def holds(condition: Callable[[], Awaitable[bool]], seconds_max: float) -> bool:
    """Waits until `condition` holds; False if it does not in time."""
    with trio.move_on_after(seconds_max):
        while True:
            if await condition():
                return True
            await trio.sleep(POLL_SECONDS)
    return False


# Events --------------------------------------------------------------------------------------------------------------


class Watch:
    """All events of one peer, as far as they were asked for."""

    def __init__(self, peer: DemoPeer) -> None:
        self.peer = peer
        self.events: list[EventView] = []

    async def more(self, wait_seconds: float) -> None:
        last = self.events[-1].number if self.events else 0
        self.events += await self.peer.client.events(last, wait_seconds)

    async def until_round(self, number: int) -> None:
        """Returns once round `number` is closed here."""
        while not any(closed >= number for closed, _ in self.rounds()):
            await self.more(10.0)

    def rounds(self) -> list[tuple[int, float]]:
        """(round, when it was closed and applied here, in seconds since the epoch), ascending."""
        return self._times("round", "round")

    def heights(self) -> list[tuple[int, float]]:
        """(height, when its block was applied here), as above."""
        return self._times("applied", "height")

    def _times(self, kind: str, counter: str) -> list[tuple[int, float]]:
        return [(int(event.fields[counter]), event.at_ms / 1000) for event in self.events if event.kind == kind]

    def durations(self) -> dict[int, float]:
        """Seconds from the round before to each round."""
        rounds = self.rounds()
        return {after[0]: after[1] - before[1] for before, after in pairwise(rounds)}
