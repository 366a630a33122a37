"""A network of daemons on loopback that scenarios kill, stop, restart and read.

It is the network of `peer demo`, with access to the processes. `running` ends everything that it has started, also after errors.
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
WORKER_SECONDS_MAX = 5.0  # a worker notices the end of its daemon as soon as the kernel has closed the pipe
LEADER_SECONDS_MAX = 10.0  # a view has a leader as soon as the last block is applied
POLL_SECONDS = 0.02
ROUNDS_ENDLESS = 100_000  # the scenario ends before the job
SMALL_JOB = {
    "model.width": "32",
    "model.layers": "1",
    "model.hidden": "64",
    "model.context": "64",
    "local_steps": "2",
    "batch": "2",
    "micro_batch": "2",
    "audit": "full",
}  # short rounds, so that faults and not arithmetic take the time

# A table in the victim's own journal with every vote that it ever wrote, filled in the same transaction. The journal itself
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
        """Return the name of a peer id."""
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
        """Keep every later vote of this peer."""
        with journal(peer) as database:
            database.executescript(_RECORDER)

    async def restart(self, peer: DemoPeer, *command: str) -> None:
        """Restart a peer that has ended, in its old directory, and wait until it answers."""
        self.launch(peer, *command)
        await network_demo.wait_until_ready(peer)

    def launch(self, peer: DemoPeer, *command: str) -> None:
        others = ",".join(other.address for other in self.peers if other is not peer and other.address != NO_LISTEN_ADDRESS)
        network_demo.launch_peer(self.demo, peer, others, command or ("run",))

    async def end(self, peer: DemoPeer) -> None:
        """Stop a peer regularly."""
        assert peer.process is not None
        self.workers |= children(peer.process.pid)
        peer.process.terminate()
        if not await self.dies(peer, END_SECONDS_MAX):
            peer.process.kill()
            peer.process.wait()

    async def dies(self, peer: DemoPeer, seconds_max: float) -> bool:
        """Return whether the peer's process ends in time."""

        async def gone() -> bool:
            return peer.process is None or peer.process.poll() is not None

        return await holds(gone, seconds_max)

    def kill(self, peer: DemoPeer) -> set[int]:
        """Send SIGKILL to the daemon alone. Return the process ids of its workers, which get no signal."""
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
        """End all processes, by process id."""
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
        """Return the leader of the current view, as `asked` sees it.

        There is none between a decision and the application of its block.
        """
        with trio.move_on_after(LEADER_SECONDS_MAX):
            while True:
                for view in await asked.client.peers():
                    if view.leader and (named := self.named(view.peer)):
                        return named
                await trio.sleep(POLL_SECONDS)
        return None

    async def height(self, peer: DemoPeer) -> int:
        """Return the peer's height, or -1 if it does not answer."""
        try:
            return (await peer.client.status()).height
        except UserError:
            return -1

    # Reading disks ---------------------------------------------------------------------------------------------------

    def evidence(self) -> dict[str, int]:
        """Return the number of items of evidence on each honest peer's disk."""
        found = {}
        for peer in self.honest:
            with journal(peer) as database:
                found[peer.name] = database.execute("SELECT count(*) FROM evidence").fetchone()[0]
        return found

    def votes(self, peer: DemoPeer) -> tuple[int, list[str]]:
        """Return the number of votes that this peer has signed since the start, and the slots with two different votes."""
        slots: dict[str, set[bytes]] = {}
        with journal(peer) as database:
            for slot, signed in database.execute("SELECT slot, signed FROM every_vote"):
                slots.setdefault(slot, set()).add(codec.decode(Signed, signed).body)
        return sum(map(len, slots.values())), [slot for slot, bodies in slots.items() if len(bodies) > 1]

    def views(self, peer: DemoPeer) -> dict[int, int]:
        """Return height -> view of the heights that were not decided in their first view, from this peer's certificates."""
        with journal(peer) as database:
            rows = database.execute("SELECT height, certificate FROM blocks").fetchall()
        votes = {height: codec.decode_message(codec.decode(Certificate, data).vote, (Commit,)) for height, data in rows}
        return {height: vote.view for height, vote in votes.items() if vote.view}

    def decided(self, peer: DemoPeer) -> int:
        """Return the last height with a decision on this peer's disk. Its block, with its model, is applied later."""
        with journal(peer) as database:
            height: int = database.execute("SELECT coalesce(max(height), 0) FROM blocks").fetchone()[0]
        return height

    def forks(self) -> list[str]:
        """Return the heights for which two honest disks hold different blocks."""
        tables = []
        for peer in self.honest:
            with journal(peer) as database:
                tables.append(dict(database.execute("SELECT height, digest FROM blocks").fetchall()))
        return [f"height {height}" for height in _unequal(tables)]

    def failures(self) -> list[str]:
        """Return the violations on the disks of stopped peers: none is allowed, in any scenario."""
        found = [f"two blocks were decided at {where}" for where in self.forks()]
        found += [f"roots differ at {where}" for where in self.differences()]
        found += [f"{peer.name} signed {slot} twice" for peer in self.honest for slot in self.votes(peer)[1]]
        if len(self.honest) == len(self.peers):
            found += [
                f"{count} proofs of double signing on the disk of {name}" for name, count in self.evidence().items() if count
            ]
        return found

    def differences(self) -> list[str]:
        """Return the heights and rounds whose roots differ between honest disks that hold them."""
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
    """Return the last height at which this peer has signed a vote, from its own journal."""
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
    """Run a network during this block. Without a `folder` its data is deleted afterwards.

    `dress` can change a peer's start options before its start.
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
    """Run a scenario and return its exit status. Ctrl-C and SIGTERM end it with all its processes."""
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
    """Stop processes, or continue them."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP if stop else signal.SIGCONT)


def is_worker(process: int) -> bool:
    """Return whether this process is a running worker. A zombie has no command line."""
    try:
        return b"peer.worker.main" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


async def ended(workers: set[int]) -> bool:
    """Return whether these workers end by themselves, as they must without their daemon."""

    async def gone() -> bool:
        return not any(map(is_worker, workers))

    return await holds(gone, WORKER_SECONDS_MAX)


async def restored(peer: DemoPeer) -> EventView | None:
    """Return the peer's event of a restored snapshot since its start, or None."""
    events = await peer.client.events(0, 0.0)
    return next((event for event in events if event.kind == "snapshot" and "seconds" in event.fields), None)


async def holds(condition: Callable[[], Awaitable[bool]], seconds_max: float) -> bool:
    """Wait until `condition` holds. Return False after `seconds_max`."""
    with trio.move_on_after(seconds_max):
        while True:
            if await condition():
                return True
            await trio.sleep(POLL_SECONDS)
    return False


# Events --------------------------------------------------------------------------------------------------------------


class Watch:
    """All events of one peer, as far as they were requested."""

    def __init__(self, peer: DemoPeer) -> None:
        self.peer = peer
        self.events: list[EventView] = []

    async def more(self, wait_seconds: float) -> None:
        last = self.events[-1].number if self.events else 0
        self.events += await self.peer.client.events(last, wait_seconds)

    async def until_round(self, number: int) -> None:
        """Wait until round `number` is closed at this peer."""
        while not any(closed >= number for closed, _ in self.rounds()):
            await self.more(10.0)

    def rounds(self) -> list[tuple[int, float]]:
        """Return (round, time of its application here in seconds since the epoch), ascending."""
        return self._times("round", "round")

    def heights(self) -> list[tuple[int, float]]:
        """Return (height, time of its application here in seconds since the epoch), ascending."""
        return self._times("applied", "height")

    def _times(self, kind: str, counter: str) -> list[tuple[int, float]]:
        return [(int(event.fields[counter]), event.at_ms / 1000) for event in self.events if event.kind == kind]

    def durations(self) -> dict[int, float]:
        """Return the seconds from the previous round to each round."""
        rounds = self.rounds()
        return {after[0]: after[1] - before[1] for before, after in pairwise(rounds)}
