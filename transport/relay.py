"""The relay's part of circuits: what it forwards between two of its links, to whom, in which order and how fast. Sans-IO.

A circuit has two ends, each over a link of its own, and three lanes in each direction, one for each priority. Each hop of a lane
has a window: the receiver of the hop holds at most so many bytes of it, and gives credit for what it has passed on. So a slow
end slows down its own circuits alone, and the relay's memory is bounded. What is inside is sealed from end to end.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.limits import CIRCUIT_RECORD_BYTES_MAX, CIRCUIT_WINDOW_BYTES_MAX, RESERVATIONS_MAX
from protocol.messages import CircuitCredit, CircuitData, CloseCircuit, IncomingCircuit, OpenCircuit, Reserved
from transport.framing import Priority

WINDOW_BYTES = (32 << 10, 32 << 10, CIRCUIT_WINDOW_BYTES_MAX)  # by lane; part of the protocol: senders begin with as much credit
CREDIT_SHARE = 4  # credit is given in quarters of a window: one small message for several records
CIRCUITS_MAX = 128  # forwarded at once; their windows hold 48 MiB if every end fills them and no other end reads
CIRCUITS_PER_PEER_MAX = 32  # one peer takes a quarter of them at most
CIRCUIT_BYTES_PER_SECOND = 2 << 20  # of one circuit, both directions: a million parameters in two seconds
RELAY_BYTES_PER_SECOND = 8 << 20  # of all circuits: what a home fibre's uplink can spare
BURST_SECONDS = 0.1  # what these budgets save up while nothing is sent
OPENINGS_PER_SECOND = 1.0  # of one peer, once it has opened as many circuits as it may have: each costs the other end a handshake
ROUNDING = 1e-6  # of what a budget saves, after a while that was just long enough
FORWARDED_AT_ONCE_MAX = 64  # records; then other tasks have their turn

Post = Callable[[bytes, Any, Priority], bool]  # to a directly linked peer; False: it is not, or its queue is full


class Budget:
    """So many units a second, and `saved` at once. Whatever is due goes if nothing is owed for what went before."""

    def __init__(self, per_second: float, saved_max: float) -> None:
        self._rate, self._saved_max = per_second, saved_max
        self._saved, self._at = saved_max, -math.inf

    def wait_seconds(self, now: float) -> float:
        """0: the next one may go."""
        self._saved = min(self._saved_max, self._saved + self._rate * (now - self._at))
        self._at = now
        return 0.0 if self._saved > -ROUNDING else -self._saved / self._rate

    def spend(self, amount: int) -> None:
        self._saved -= amount


def _of_bytes(per_second: float) -> Budget:
    return Budget(per_second, per_second * BURST_SECONDS)


@dataclass(slots=True, eq=False)
class Lane:
    """One priority of one direction, inside the relay."""

    circuit: Circuit
    source: bytes
    target: bytes
    number: Priority
    credit: int  # what the target takes now
    queue: deque[bytes] = field(default_factory=deque)
    waiting: int = 0  # bytes in `queue`
    owed: int = 0  # bytes passed on, for which the source has no credit yet


class Circuit:
    def __init__(self, name: bytes, opener: bytes, target: bytes) -> None:
        self.name, self.ends = name, (opener, target)
        self.budget = _of_bytes(CIRCUIT_BYTES_PER_SECOND)
        self.lanes = {
            source: tuple(Lane(self, source, to, lane, WINDOW_BYTES[lane]) for lane in Priority)
            for source, to in (self.ends, self.ends[::-1])
        }


class Relay:
    """`serves`: whether this peer forwards for that one. `refuse` counts what was refused, by reason."""

    def __init__(self, post: Post, serves: Callable[[bytes], bool], refuse: Callable[[str], None]) -> None:
        self._post, self._serves, self._refuse = post, serves, refuse
        self._reservations: set[bytes] = set()
        self._circuits: dict[bytes, Circuit] = {}
        self._of_peer: Counter[bytes] = Counter()
        self._ready: tuple[dict[Lane, None], ...] = ({}, {}, {})  # lanes with a record and credit for it, in turn
        self._budget = _of_bytes(RELAY_BYTES_PER_SECOND)
        self._openings: dict[bytes, Budget] = {}  # of each peer with a link that has opened any
        self.forwarded = 0  # bytes since the start

    @property
    def reservations(self) -> Reserved:
        return Reserved(tuple(sorted(self._reservations)))

    @property
    def circuits(self) -> int:
        return len(self._circuits)

    def reserve(self, peer: bytes, wanted: bool) -> None:
        if not wanted:
            self._reservations.discard(peer)
        elif not self._serves(peer):
            self._refuse("relay-not-member")
        elif len(self._reservations) >= RESERVATIONS_MAX and peer not in self._reservations:
            self._refuse("relay-full")
        else:
            self._reservations.add(peer)

    def gone(self, peer: bytes) -> None:
        """Its link has ended."""
        for circuit in [circuit for circuit in self._circuits.values() if peer in circuit.ends]:
            self._close(circuit, "end-gone")
        self._reservations.discard(peer)
        self._openings.pop(peer, None)

    def open(self, peer: bytes, message: OpenCircuit, now: float) -> None:
        problem = self._problem(peer, message, now)
        if problem or not self._post(message.peer, IncomingCircuit(message.circuit, peer), Priority.VOTE):
            self._refuse(problem or "relay-full")
            self._post(peer, CloseCircuit(message.circuit, problem or "relay-full"), Priority.VOTE)
            return
        circuit = self._circuits[message.circuit] = Circuit(message.circuit, peer, message.peer)
        self._of_peer.update(circuit.ends)

    def _problem(self, opener: bytes, message: OpenCircuit, now: float) -> str:
        """Why this circuit is not opened."""
        openings = self._openings.setdefault(opener, Budget(OPENINGS_PER_SECOND, CIRCUITS_PER_PEER_MAX))
        if openings.wait_seconds(now) > 0:
            return "relay-too-often"
        openings.spend(1)
        if not (self._serves(opener) and self._serves(message.peer)) or opener == message.peer:
            return "relay-not-member"
        if message.peer not in self._reservations:
            return "relay-not-reserved"
        crowded = max(self._of_peer[opener], self._of_peer[message.peer]) >= CIRCUITS_PER_PEER_MAX
        # A name that is taken: nobody draws one of 2^128 by accident.
        return "relay-full" if crowded or len(self._circuits) >= CIRCUITS_MAX or message.circuit in self._circuits else ""

    def data(self, peer: bytes, message: CircuitData) -> None:
        circuit = self._find(peer, message.circuit)
        if circuit is None:
            return
        lane = circuit.lanes[peer][message.lane]
        if lane.waiting + lane.owed + len(message.data) > WINDOW_BYTES[message.lane]:
            self._refuse("circuit-overrun")
            self._close(circuit, "circuit-overrun")
            return
        lane.queue.append(message.data)
        lane.waiting += len(message.data)
        self._look(lane)

    def credit(self, peer: bytes, message: CircuitCredit) -> None:
        circuit = self._find(peer, message.circuit)
        if circuit is None:
            return
        lane = circuit.lanes[_other(circuit, peer)][message.lane]
        lane.credit = min(WINDOW_BYTES[message.lane], lane.credit + message.bytes)
        self._look(lane)

    def close(self, peer: bytes, message: CloseCircuit) -> None:
        circuit = self._find(peer, message.circuit)
        if circuit is not None:
            self._forget(circuit)
            self._post(_other(circuit, peer), CloseCircuit(circuit.name, message.reason), Priority.VOTE)

    def forward(self, now: float) -> float:
        """Pass on what may go now; when more may go (`now`: at once, other tasks had to have their turn).

        Votes of all circuits go first, then control, then bulk; within each of these, circuits take turns by records.
        """
        wake, records = math.inf, 0
        for ready in self._ready:
            turns = deque(ready)
            while turns:
                if (wait := self._budget.wait_seconds(now)) > 0 or records == FORWARDED_AT_ONCE_MAX:
                    return now + wait
                lane = turns.popleft()
                if (wait := lane.circuit.budget.wait_seconds(now)) > 0:
                    wake = min(wake, now + wait)
                elif lane in ready:  # its circuit is not closed since
                    self._pass_on(lane)
                    records += 1
                    turns.extend([lane] if lane in ready else [])
        return wake

    def _pass_on(self, lane: Lane) -> None:
        record = lane.queue.popleft()
        size = len(record)
        lane.waiting -= size
        lane.credit -= size
        lane.owed += size
        lane.circuit.budget.spend(size)
        self._budget.spend(size)
        self.forwarded += size
        self._ready[lane.number].pop(lane)  # and behind the others, if it has more
        self._look(lane)
        if not self._post(lane.target, CircuitData(lane.circuit.name, lane.number, record), lane.number):
            self._close(lane.circuit, "relay-full")
        elif lane.owed * CREDIT_SHARE >= WINDOW_BYTES[lane.number]:
            self._post(lane.source, CircuitCredit(lane.circuit.name, lane.number, lane.owed), Priority.VOTE)
            lane.owed = 0

    def _look(self, lane: Lane) -> None:
        """It may have become ready: a record has come, or credit."""
        if lane.queue and lane.credit >= len(lane.queue[0]):
            self._ready[lane.number].setdefault(lane)

    def _find(self, peer: bytes, name: bytes) -> Circuit | None:
        """None: it was closed while this message was on its way, or it is none of this peer's."""
        circuit = self._circuits.get(name)
        return circuit if circuit is not None and peer in circuit.ends else None

    def _close(self, circuit: Circuit, reason: str) -> None:
        self._forget(circuit)
        for end in circuit.ends:
            self._post(end, CloseCircuit(circuit.name, reason), Priority.VOTE)

    def _forget(self, circuit: Circuit) -> None:
        del self._circuits[circuit.name]
        self._of_peer -= Counter(circuit.ends)
        for lanes in circuit.lanes.values():
            for lane in lanes:
                self._ready[lane.number].pop(lane, None)


def _other(circuit: Circuit, peer: bytes) -> bytes:
    return circuit.ends[peer == circuit.ends[0]]


assert min(WINDOW_BYTES) >= 2 * CIRCUIT_RECORD_BYTES_MAX, "with a quarter of the credit still to come, a record fits"
