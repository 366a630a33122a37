"""`python -m scenarios.nat --trials 10`: peers that accept no connections take part over relays, even over faulty ones.

Three of seven peers start with `--listen none`. The trials take turns:

- The hidden peers are restarted.
- The relay with the most circuits is killed.
- That relay is stopped, as if it had lost power.
- That relay drops, delays or changes the data that it should forward.

Meanwhile the first two hidden peers send each other a marker, and every relay records the data of circuits that it holds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from demo.demo_peers import DemoPeer
from peer import cli
from protocol.addresses import NO_LISTEN_ADDRESS
from protocol.api import PeerView
from protocol.errors import UserError
from protocol.identity import peer_id
from protocol.messages import CircuitCredit, CircuitData, CloseCircuit, NoBlob
from scenarios import network
from scenarios.join import MILLION
from scenarios.network import Network, holds
from scenarios.pace import STALL_SECONDS_MAX, in_order
from scenarios.trials import COUNT, Trial, arguments, conduct
from transport.blobs.blob_exchange import BlobExchange
from transport.relay.relay_client import RelayClient
from transport.session_links import RelayedLink
from transport.wire.framing import Priority

KINDS = ("starts", "dies", "hangs", "drops", "delays", "changes")
LINKED_SECONDS_MAX = 10.0  # from the start of the hidden peers until all are linked
REPLACED_SECONDS_MAX = 5.0  # from the death of a relay until all others are linked
MISBEHAVES_SECONDS = 20.0  # longer than the life of a circuit that delivers nothing
DELAY_SECONDS = 1.0
MARKER = b"a marker between two, unreadable"  # length of a digest
MARKER_SECONDS = 0.2
VARIABLE = "FOLKMOOT_NAT"  # the folder through which this scenario and its peers communicate
assert len(MARKER) == 32


class World:
    """Orders to the peers and their records: files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def dress(self, peer: DemoPeer, hidden: Sequence[int]) -> None:
        peer.module = ("scenarios.nat", *peer.module)
        peer.environment[VARIABLE] = f"{self.folder} {peer.name}"
        peer.address = NO_LISTEN_ADDRESS if peer.number in hidden else peer.address

    def tell(self, relay: DemoPeer, mode: str) -> None:
        (self.folder / f"{relay.name}.mode").write_text(mode)

    def held(self) -> list[tuple[str, bytes]]:
        return [(file.stem, file.read_bytes()) for file in sorted(self.folder.glob("*.held"))]

    def markers(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("*.heard"))


def hidden_of(peers: Network) -> list[DemoPeer]:
    return [peer for peer in peers.peers if peer.address == NO_LISTEN_ADDRESS]


async def views(peer: DemoPeer) -> tuple[PeerView, ...]:
    try:
        return await peer.client.peers()
    except UserError:  # it is still starting
        return ()


async def all_linked(peers: Sequence[DemoPeer]) -> bool:
    wanted = {peer_id(peer.identity.public) for peer in peers}
    return all([wanted <= {view.peer for view in await views(peer) if view.link or view.me} for peer in peers])


async def busiest(peers: Network) -> DemoPeer:
    """Return the relay with the most circuits."""
    carried = Counter(
        [view.link.relay for peer in hidden_of(peers) for view in await views(peer) if view.link and view.link.relay]
    )
    relay = peers.named(carried.most_common(1)[0][0])
    assert relay is not None
    return relay


async def starts(world: World, peers: Network, trial: Trial) -> None:
    hidden = hidden_of(peers)
    for peer in hidden:
        await peers.end(peer)
    for peer in hidden:
        await peers.restart(peer)
    await _linked(peers.peers, LINKED_SECONDS_MAX, trial)
    for one in hidden:
        relayed = {view.peer for view in await views(one) if view.link and view.link.kind == "relayed"}
        others = {peer_id(other.identity.public) for other in hidden if other is not one}
        trial.require(relayed == others, f"the relayed links of {one.name} are not exactly those to the hidden peers")


async def dies(world: World, peers: Network, trial: Trial) -> None:
    relay = await busiest(peers)
    peers.kill(relay)
    await _linked([peer for peer in peers.peers if peer is not relay], REPLACED_SECONDS_MAX, trial)
    await peers.restart(relay)


async def hangs(world: World, peers: Network, trial: Trial) -> None:
    """Stop a relay without closing its links, and check that all circuits soon use other relays."""
    relay, hidden = await busiest(peers), hidden_of(peers)
    peers.freeze(relay)
    started = trio.current_time()
    try:
        is_replaced = await holds(partial(all_avoid, relay, hidden), REPLACED_SECONDS_MAX)
        trial.require(is_replaced, f"a circuit still uses a relay without power after {REPLACED_SECONDS_MAX:g} s")
        trial.figures["replaced"] = trio.current_time() - started
    finally:
        peers.thaw(relay)


async def all_avoid(relay: DemoPeer, hidden: Sequence[DemoPeer]) -> bool:
    """Return whether these peers are linked with each other, none of them over this relay."""
    by = [view.link.relay for peer in hidden for view in await views(peer) if view.link]
    return await all_linked(hidden) and peer_id(relay.identity.public) not in by


async def misbehaves(mode: str, world: World, peers: Network, trial: Trial) -> None:
    """Let a relay misbehave. All direct links must stay, rounds must continue, and circuits must soon use other relays."""
    relay = await busiest(peers)
    before = await _direct(peers)
    world.tell(relay, mode)
    await trio.sleep(MISBEHAVES_SECONDS)
    trial.require(await _direct(peers) == before, "a direct link was lost")
    await _linked(peers.peers, REPLACED_SECONDS_MAX, trial)
    world.tell(relay, "")


async def _direct(peers: Network) -> set[tuple[str, str]]:
    """Return the pairs with a direct link."""
    found = set()
    for peer in peers.peers:
        found |= {(peer.name, view.peer) for view in await views(peer) if view.link and view.link.kind == "direct"}
    return found


async def _linked(peers: Sequence[DemoPeer], seconds_max: float, trial: Trial) -> None:
    started = trio.current_time()
    trial.require(await holds(partial(all_linked, peers), seconds_max), f"not all are linked after {seconds_max:g} s")
    trial.figures["linked"] = trio.current_time() - started


async def attempt(kind: str, world: World, peers: Network, trial: Trial) -> None:
    are_linked = await holds(partial(all_linked, peers.peers), LINKED_SECONDS_MAX)
    trial.require(are_linked, f"not all were linked {LINKED_SECONDS_MAX:g} s after the trial before")
    markers = world.markers()
    await {"starts": starts, "dies": dies, "hangs": hangs}.get(kind, partial(misbehaves, kind))(world, peers, trial)
    with trio.fail_after(STALL_SECONDS_MAX):
        trial.figures["round"] = await in_order(peers)
    trial.figures["markers"] = world.markers() - markers
    trial.require(trial.figures["markers"] > 0, "no marker arrived")


def read_by_relays(world: World, peers: Network) -> list[str]:
    held = world.held()
    found = [f"{name} contains the marker unencrypted" for name, data in held if MARKER in data]
    return found + ([] if sum(len(data) for _, data in held) else ["no relay has forwarded records"])


async def run(options: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="folkmoot-nat-"))
    world, hidden = World(folder), range(options.peers - options.hidden, options.peers)
    kinds = [options.kind or KINDS[number % len(KINDS)] for number in range(options.trials)]
    try:
        return await conduct(
            options,
            f"{options.hidden} peers accept nothing",
            [(kind, partial(attempt, kind, world)) for kind in kinds],
            dress=lambda peer: world.dress(peer, hidden),
            also=partial(read_by_relays, world),
            job=MILLION if options.million else {},
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# In the peers' own processes ------------------------------------------------------------------------------------------


class Changed:
    """Replacements of three functions of this process: the relay's forwarding, and the ends' sending and receiving."""

    def __init__(self, folder: Path, name: str) -> None:
        self.held, self.mode, self.heard = (folder / f"{name}.{end}" for end in ("held", "mode", "heard"))
        self.delayed: deque[tuple[float, Callable[[], None]]] = deque()
        self.forward, self.keep_alive, self.no_blob = RelayClient._on_relay, RelayedLink.run_keepalive, BlobExchange.on_no_blob
        changed = self
        setattr(RelayClient, "_on_relay", lambda *arguments: changed.on_relay(*arguments))  # noqa: B010
        setattr(RelayedLink, "run_keepalive", lambda link: changed.send_markers(link))  # noqa: B010
        setattr(BlobExchange, "on_no_blob", lambda *arguments: changed.on_no_blob(*arguments))  # noqa: B010

    def on_relay(self, detours: RelayClient, peer: bytes, message: CircuitData | CircuitCredit | CloseCircuit) -> None:
        mode = self.mode.read_text() if self.mode.exists() else ""
        if isinstance(message, CircuitData):
            _append(self.held, message.data)
            if mode == "changes":
                message = replace(message, data=bytes([message.data[0] ^ 1]) + message.data[1:])
        if mode == "delays":
            if not self.delayed:
                trio.lowlevel.spawn_system_task(self._forward_late)
            self.delayed.append((trio.current_time() + DELAY_SECONDS, partial(self.forward, detours, peer, message)))
        elif mode != "drops" or not isinstance(message, CircuitData):
            self.forward(detours, peer, message)

    async def _forward_late(self) -> None:
        while self.delayed:
            at, forward = self.delayed[0]
            await trio.sleep_until(at)
            forward()
            self.delayed.popleft()

    async def send_markers(self, link: RelayedLink) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.keep_alive, link)
            while True:
                link.queue_message(NoBlob(MARKER), Priority.CONTROL)  # a reply without a request; it is ignored without penalty
                await trio.sleep(MARKER_SECONDS)

    def on_no_blob(self, exchange: BlobExchange, peer: bytes, message: NoBlob) -> None:
        if message.digest == MARKER:
            _append(self.heard, b".")
        self.no_blob(exchange, peer, message)


def _append(file: Path, data: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(data)


def as_peer(module: str, arguments: list[str]) -> int:
    folder, name = os.environ[VARIABLE].split()
    Changed(Path(folder), name)
    assert module == cli.__name__
    return cli.main(arguments)


def main() -> int:
    if VARIABLE in os.environ:
        return as_peer(sys.argv[1], sys.argv[2:])
    parser = arguments("nat", __doc__, peers=7)
    parser.add_argument("--hidden", type=COUNT, default=3, metavar="N", help="number of peers that accept no connections")
    parser.add_argument("--trials", type=COUNT, default=10, metavar="N", help="number of trials, one after another")
    parser.add_argument("--million", action="store_true", help="train a model with a million parameters instead of a tiny one")
    parser.add_argument("--kind", choices=KINDS, help="kind of all trials; default: all kinds in turn")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
