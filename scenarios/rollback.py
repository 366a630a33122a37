"""`python -m scenarios.rollback`: a voter forgets its votes, because its disk is put back to an older state or is lost.

Its disk does not show this, so it must ask the others. It must sign nothing while one of its votes may be missing, and then come
back by itself. Without its vote log it must name the remedy, and come back under a new key.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

import trio

from consensus.voter_set import faults_tolerated
from demo import network_demo
from demo.demo_peers import DemoPeer
from peer.settings.data_directory import DataDirectory
from protocol import codec
from protocol.errors import UserError
from protocol.identity import Signed, peer_id
from scenarios import network
from scenarios.network import Network, Watch, holds, journal
from scenarios.pace import BACK_SECONDS_MAX, STALL_SECONDS_MAX, comes_back, goes_on, in_order, takes_part
from scenarios.trials import COUNT, Trial, arguments, conduct

ROUNDS_MAX = 4  # forgotten rounds
QUIET_SECONDS = 3.0  # several times a height: a premature vote would come within this time
HALTED = "another machine has this peer's key"
LEFT_OUT = ("control.sock", "peer.log")  # excluded from copies: the socket is not a file, and the log must continue

Vote = tuple[str, bytes]  # its slot (tag, height and view, or tag, job and round), and the signed statement


@dataclass
class Disk:
    """A copy of a voter's disk, and the votes that the voter forgets when the copy is put back."""

    peers: Network
    victim: DemoPeer
    copy: Path
    forgotten: list[Vote] = field(default_factory=list)

    @property
    def signed_to(self) -> int:
        """The highest height at which the voter signed a statement."""
        return max((height for slot, _ in self.forgotten if (height := _height(slot)) is not None), default=0)

    async def put_back(self) -> None:
        """Put the copy back after the victim was killed. Keep the recorded votes, so that a second, different one is found."""
        self.forgotten = await trio.to_thread.run_sync(_votes, self.victim)
        for path in self.victim.directory.iterdir():
            if path.name not in LEFT_OUT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        await trio.to_thread.run_sync(partial(shutil.copytree, self.copy, self.victim.directory, dirs_exist_ok=True))
        await trio.to_thread.run_sync(_add_votes, self.victim, self.forgotten)

    async def silence(self, trial: Trial) -> int:
        """Return the height below which the voter announced silence, and check that it was silent."""
        watch = Watch(self.victim)
        await watch.more(0.0)
        said = [re.match(r"silent until height (\d+)", event.text) for event in watch.events if event.kind == "warning"]
        below = max((int(match[1]) for match in said if match), default=0)
        trial.figures["silent until"] = str(below or "")
        known = {(slot, _body(signed)) for slot, signed in self.forgotten}
        for slot, signed in await trio.to_thread.run_sync(_votes, self.victim):
            height = _height(slot)
            early = height is not None and height < below and (slot, _body(signed)) not in known
            trial.require(not early, f"it signed {slot} although it was silent until height {below}")
        return below


def _height(slot: str) -> int | None:
    """Return the height of a vote of the agreement, or None for a vote of a round, which names a job."""
    _, of, *_ = slot.split()
    return int(of) if len(of) < 32 else None


def _body(signed: bytes) -> bytes:
    return codec.decode(Signed, signed).body


def _votes(peer: DemoPeer) -> list[Vote]:
    with journal(peer) as database:
        return database.execute("SELECT slot, signed FROM every_vote").fetchall()


def _add_votes(peer: DemoPeer, votes: Sequence[Vote]) -> None:
    with journal(peer) as database, database:
        database.executemany("INSERT INTO every_vote VALUES (?, ?)", votes)


def _decided(peer: DemoPeer) -> int:
    with journal(peer) as database:
        return int(database.execute("SELECT max(height) FROM blocks").fetchone()[0])


# Attempts ------------------------------------------------------------------------------------------------------------


def _copy(victim: DemoPeer, to: Path) -> None:
    shutil.copytree(victim.directory, to, ignore=shutil.ignore_patterns(*LEFT_OUT))


@asynccontextmanager
async def copied(peers: Network, victim: DemoPeer, random: Random) -> AsyncIterator[Disk]:
    """Stop and copy a voter's disk, and let the voter take part again for some rounds."""
    asked = _others(peers, victim)[0]
    with trio.fail_after(STALL_SECONDS_MAX):
        await in_order(peers)
    await peers.end(victim)
    copy = victim.directory.with_name(f"{victim.directory.name}.copy")
    await trio.to_thread.run_sync(_copy, victim, copy)
    try:
        await peers.restart(victim)
        if not await holds(partial(takes_part, victim, asked), BACK_SECONDS_MAX):
            raise trio.TooSlowError
        await goes_on(asked, random.randint(1, ROUNDS_MAX))
        await trio.sleep(random.uniform(0, 1))
        yield Disk(peers, victim, copy)
    finally:
        shutil.rmtree(copy)


async def at_once(random: Random, trains: bool, peers: Network, trial: Trial) -> None:
    """Put the disk back while the others are stopped: the forgotten votes are for open or just decided heights."""
    victim = _victim(random, trains, peers, trial)
    others = _others(peers, victim)
    async with copied(peers, victim, random) as disk:
        for other in others:
            peers.freeze(other)
        try:
            await _killed(peers, victim)
            await disk.put_back()
            decided = max(map(_decided, others))
            await peers.restart(victim)
        finally:
            for other in others:
                peers.thaw(other)
        await goes_on(others[0], 1)
        await comes_back(peers, victim, others[0], trial)
        trial.require(await disk.silence(trial) > 0 or disk.signed_to < decided, "it did not report that it was silent")
    await _counts(peers, victim, trial)


async def later(random: Random, trains: bool, peers: Network, trial: Trial) -> None:
    """Put the disk back after the others have continued and have forgotten most of its votes."""
    victim = _victim(random, trains, peers, trial)
    asked = _others(peers, victim)[0]
    async with copied(peers, victim, random) as disk:
        await _killed(peers, victim)
        await goes_on(asked, random.randint(1, ROUNDS_MAX))
        await disk.put_back()
        await peers.restart(victim)
        await comes_back(peers, victim, asked, trial)
        await disk.silence(trial)
    await _counts(peers, victim, trial)


async def one_down(random: Random, trains: bool, peers: Network, trial: Trial) -> None:
    """Put the disk back while another peer is down and every vote is needed.

    The victim's silence stops the network until that peer is back.
    """
    victim = _victim(random, trains, peers, trial)
    asked, *candidates = _others(peers, victim)
    down = random.choice(candidates)
    trial.figures["down"] = down.name
    async with copied(peers, victim, random) as disk:
        await peers.end(down)
        await goes_on(asked, 1)
        await _killed(peers, victim)
        await disk.put_back()
        await peers.restart(victim)

        async def is_there() -> bool:
            return await peers.height(victim) == await peers.height(asked)

        trial.require(await holds(is_there, BACK_SECONDS_MAX), "it does not fetch the decided blocks")
        before = await peers.height(asked)
        await trio.sleep(QUIET_SECONDS)
        after = await peers.height(asked)
        trial.require(after == before, f"{after - before} heights were decided with a vote that may have been a second one")
        await peers.restart(down)
        for peer in (down, victim):
            await comes_back(peers, peer, asked, trial)
        trial.require(await disk.silence(trial) > before, "it did not report that it was silent")
    await _counts(peers, victim, trial)


async def copy_runs(random: Random, trains: bool, peers: Network, trial: Trial) -> None:
    """Run a copy made earlier. One of the two must notice the other and stop before they contradict each other."""
    victim = _victim(random, trains, peers, trial)
    async with copied(peers, victim, random) as disk:
        await _run_both(peers, victim, disk.copy, trial)
    await _counts(peers, victim, trial)


async def both_start(random: Random, trains: bool, peers: Network, trial: Trial) -> None:
    """Run a copy made now, and start both at once: neither disk has forgotten a vote."""
    victim = _victim(random, trains, peers, trial)
    async with copied(peers, victim, random) as disk:
        await peers.end(victim)
        await trio.to_thread.run_sync(shutil.rmtree, disk.copy)
        await trio.to_thread.run_sync(_copy, victim, disk.copy)
        await _run_both(peers, victim, disk.copy, trial)
    await _counts(peers, victim, trial)


async def _run_both(peers: Network, victim: DemoPeer, copy: Path, trial: Trial) -> None:
    """Run both until one reports the other. Then stop the copy for good; the original must continue."""
    asked = _others(peers, victim)[0]
    twin = replace(victim, directory=copy, address="127.0.0.1:0", process=None)
    if victim.process is None or victim.process.poll() is not None:
        peers.launch(victim)
    place = peers.peers.index(victim)
    peers.peers[place] = twin  # so that the copy only gets the addresses of the others
    peers.launch(twin)
    peers.peers[place:place] = [victim]
    try:
        for peer in (victim, twin):
            await network_demo.wait_until_ready(peer)
        started = trio.current_time()

        async def one_stopped() -> bool:
            return any([HALTED in (await peer.client.status()).halted for peer in (twin, victim)])

        trial.require(await holds(one_stopped, BACK_SECONDS_MAX), "neither reports that another machine has its key")
        trial.figures["one stops after"] = trio.current_time() - started
        await goes_on(asked, 2)
        for name, peer in (("original", victim), ("copy", twin)):
            halted = (await peer.client.status()).halted
            trial.figures[name] = "stopped" if HALTED in halted else halted or "works"
    finally:
        await peers.end(twin)
        peers.peers.remove(twin)
    await peers.end(victim)
    await peers.restart(victim)
    await comes_back(peers, victim, asked, trial)


async def ledger_lost(random: Random, trains: bool, peers: Network, trial: Trial) -> None:
    """Delete the ledger but not the mark of cast votes: the peer must refuse to start with its key, and name the remedy."""
    victim = _victim(random, trains, peers, trial)
    old = peer_id(victim.identity.public)
    await _lose_ledger(peers, victim, random, with_mark=False)
    try:
        await peers.restart(victim)
        trial.problems.append("it started with its old key and without its votes")
    except UserError as refusal:
        trial.require("peer rekey" in str(refusal), f"it does not name the remedy: {refusal}")
    command = [sys.executable, "-m", "peer.cli", "rekey", "--data-dir", str(victim.directory)]
    ended = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    trial.require(ended.returncode == 0, f"peer rekey: {(ended.stderr or ended.stdout).decode().strip()}")
    victim.identity = DataDirectory(victim.directory).load_identity()
    await _back_without_ledger(peers, victim, trial)
    views = {view.peer: view for view in await _others(peers, victim)[0].client.peers()}
    trial.require(not views[old].voter, "its old key still votes")


async def all_lost(random: Random, trains: bool, peers: Network, trial: Trial) -> None:
    """Delete the mark, too, as on a disk from before the first vote."""
    victim = _victim(random, trains, peers, trial)
    votes = await _lose_ledger(peers, victim, random, with_mark=True)
    await _back_without_ledger(peers, victim, trial, votes)


async def _lose_ledger(peers: Network, victim: DemoPeer, random: Random, *, with_mark: bool) -> list[Vote]:
    """Delete the ledger and return the votes in it."""
    with trio.fail_after(STALL_SECONDS_MAX):
        await in_order(peers)
    await trio.sleep(random.uniform(0, 1))
    await _killed(peers, victim)
    votes = await trio.to_thread.run_sync(_votes, victim)
    ledger = DataDirectory(victim.directory).ledger
    for path in ledger.parent.glob(f"{ledger.name}*"):
        if with_mark or not path.name.endswith(".committed"):
            path.unlink()
    return votes


async def _back_without_ledger(peers: Network, victim: DemoPeer, trial: Trial, votes: Sequence[Vote] = ()) -> None:
    await peers.restart(victim)
    await trio.to_thread.run_sync(peers.record, victim)
    await trio.to_thread.run_sync(_add_votes, victim, votes)
    await comes_back(peers, victim, _others(peers, victim)[0], trial)
    await _counts(peers, victim, trial)


def _victim(random: Random, trains: bool, peers: Network, trial: Trial) -> DemoPeer:
    """Choose a victim other than the watched peer, which reports the network's state."""
    victim = random.choice([peer for peer in _others(peers, peers.demo.watched) if peer.trains == trains])
    trial.figures["victim"] = victim.name
    return victim


def _others(peers: Network, victim: DemoPeer) -> list[DemoPeer]:
    return [peer for peer in peers.honest if peer is not victim]


async def _killed(peers: Network, victim: DemoPeer) -> None:
    """Kill the victim with its worker, which writes to the same disk."""
    await network.ended(peers.kill(victim))


async def _counts(peers: Network, victim: DemoPeer, trial: Trial) -> None:
    """Check that no peer has expelled the victim."""
    key = peer_id(victim.identity.public)
    for other in _others(peers, victim):
        view = next(view for view in await other.client.peers() if view.peer == key)
        trial.require(view.voter and not view.departed, f"for {other.name} it is no voter any more: {view.departed}")


KINDS: dict[str, Callable[[Random, bool, Network, Trial], Awaitable[None]]] = {
    "put back at once": at_once,
    "put back later": later,
    "put back, one down": one_down,
    "a copy runs beside it": copy_runs,
    "a copy starts with it": both_start,
    "ledger lost": ledger_lost,
    "all votes lost": all_lost,
}


def main() -> int:
    parser = arguments("rollback", __doc__)
    parser.add_argument(
        "--trials", type=COUNT, default=2 * len(KINDS), metavar="N", help="number of trials, whose kinds alternate"
    )
    parser.add_argument("--only", choices=list(KINDS), metavar="KIND", help=f"one of: {', '.join(KINDS)}")
    options = parser.parse_args()
    if faults_tolerated(options.peers) < 1:
        parser.error("fewer than four peers bear no fault at all")
    random, kinds = Random(options.seed), [options.only] if options.only else list(KINDS)
    attempts = []
    for number in range(options.trials):
        turn, place = divmod(number, len(kinds))
        kind, trains = kinds[place], (turn + place) % 2 == 1
        attempts.append((f"{kind}, {'a trainer' if trains else 'a voter'}", partial(KINDS[kind], random, trains)))
    return network.main(partial(conduct, options, "a voter's disk put back or lost", attempts))


if __name__ == "__main__":
    sys.exit(main())
