"""Pings on clean and on bad links, in virtual time: only silent peers are suspected, and soon.

The peers are real networks (`scenarios.emulation.memory_network`) and real `LivenessMonitor`; an hour takes half a minute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio
from trio._core import _run
from trio.testing import MockClock

from benchmarks import provenance
from ledger.ledger_state import CurrentState
from peer.runtime.membership.liveness_reports import LivenessMonitor
from protocol.identity import Identity, peer_id
from scenarios.emulation.memory_network import LinkConditions, MemoryNetwork, Mesh
from tests.transport.helpers import MemoryBlobs
from transport.connections.peer_link import PeerLink

STARTED = time.time()
N = 7
SEEDS = (0, 3)
HOUR_SECONDS = 3_600.0
SUSPECTED_SECONDS = (15.0, 20.0)  # after which silence the last peer must suspect, and none before
LINKS = {
    "clean, 300 ms": LinkConditions(latency_seconds=0.3),
    "a fifth of all pings lost, 300 ms": LinkConditions(latency_seconds=0.3, lost_pings=0.2),
}
LOOK_SECONDS = 0.1


@dataclass
class Outcome:
    falsely: int = 0  # suspicions of peers that were not silent
    longest: float = 0.0  # longest gap between messages of a live peer, in seconds
    seconds: list[float] = field(default_factory=list)  # of silence before each other peer suspected the silent one
    unknown: int = 0  # rows of matrices that showed it too late

    @property
    def holds(self) -> bool:
        low, high = SUSPECTED_SECONDS
        return not self.falsely and not self.unknown and all(low <= seconds <= high for seconds in self.seconds)


def run(seeds: tuple[int, int], n: int, json: Path | None) -> int:
    outcomes = []
    for seed, (what, conditions) in product(range(*seeds), LINKS.items()):
        outcome = one(seed, n, conditions)
        outcomes.append({"seed": seed, "links": what, **asdict(outcome), "holds": outcome.holds})
        told = f"suspected falsely {outcome.falsely} times in an hour, silent for {outcome.longest:.1f} s at most"
        told += f"; one that fell silent was suspected after {_span(outcome.seconds)} s"
        print(f"seed {seed}, {n} peers, {what}: {told}{'' if outcome.holds else ' FAILED'}", flush=True)
        provenance.write(json, STARTED, {"peers": n, "hours": outcomes})
    failed = sum(not outcome["holds"] for outcome in outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _span(seconds: Sequence[float]) -> str:
    return f"{min(seconds):.1f} to {max(seconds):.1f}"


def one(seed: int, n: int, conditions: LinkConditions, seconds: float = HOUR_SECONDS) -> Outcome:
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # as pytest-trio does for reproducible examples
    _run._r.seed(seed)
    return trio.run(_one, seed, n, conditions, seconds, clock=MockClock(autojump_threshold=0))


async def _one(seed: int, n: int, conditions: LinkConditions, seconds: float) -> Outcome:
    mesh, outcome = Mesh(seed, conditions), Outcome()
    keys = sorted(Identity(bytes([number]) * 32).public for number in range(1, n + 1))
    members: Any = SimpleNamespace(voters=tuple(keys), is_current_key=lambda key: True)
    applied = CurrentState(cast(Any, SimpleNamespace(members=members)))
    networks = [mesh.network(key, MemoryBlobs()) for key in keys]
    hearings = [LivenessMonitor(network, applied) for network in networks]
    async with trio.open_nursery() as nursery:
        for network, hearing in zip(networks, hearings, strict=True):
            await nursery.start(network.run)
            nursery.start_soon(hearing.run)
        await _speak(networks, seconds, outcome)
        mesh.blackhole(silent := keys[seed % n])
        await _fall_silent([network for network in networks if network.me != silent], silent, outcome)
        rows = [hearing.liveness_matrix() for hearing in hearings if hearing is not hearings[seed % n]]
        for matrix, (a, b) in ((m, pair) for m in rows for pair in permutations(keys, 2) if pair[0] != silent):
            told = matrix[peer_id(a)][peer_id(b)]
            outcome.unknown += told is None or (told >= SUSPECTED_SECONDS[0]) != (b == silent)
        nursery.cancel_scope.cancel()
    return outcome


def silence(link: PeerLink) -> float:
    return link.failure_detector.silent_seconds(trio.current_time())


async def _speak(networks: Sequence[MemoryNetwork], seconds: float, outcome: Outcome) -> None:
    before: set[tuple[bytes, bytes]] = set()
    end = trio.current_time() + seconds
    while trio.current_time() < end:
        await trio.sleep(1.0)
        now = {(network.me, peer) for network in networks for peer in network.connected_peers() - network.live_peers()}
        outcome.falsely += len(now - before)
        outcome.longest = max(outcome.longest, *(silence(link) for network in networks for link in network.links()))
        before = now


async def _fall_silent(others: Sequence[MemoryNetwork], silent: bytes, outcome: Outcome) -> None:
    """Silence a peer until all others suspect it and have told each other."""
    end = trio.current_time() + SUSPECTED_SECONDS[1] + 2.0
    waiting = list(others)
    while trio.current_time() < end:
        await trio.sleep(LOOK_SECONDS)
        for network in tuple(waiting):
            links = {link.peer: link for link in network.links()}
            if links[silent].failure_detector.is_suspected(trio.current_time()):
                waiting.remove(network)
                outcome.seconds.append(silence(links[silent]))
    outcome.seconds += [float("inf")] * len(waiting)
