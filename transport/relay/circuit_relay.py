"""The relay's part of circuits: admission of circuits, and order and rate of the records that it forwards. Sans-IO.

A circuit has two ends, each with its own link to the relay, and three lanes in each direction, one for each priority. On each hop
of a lane, a window limits the bytes that the receiver has not forwarded yet. The receiver gives the sender credit for bytes that
it has forwarded. So a slow end only slows down its own circuits, and the relay's memory is bounded. Records are encrypted from
end to end.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.limits import CIRCUIT_RECORD_BYTES_MAX, CIRCUIT_WINDOW_BYTES_MAX, RELAY_RESERVATIONS_MAX
from protocol.messages import CircuitCredit, CircuitData, CloseCircuit, IncomingCircuit, OpenCircuit, RelayReservations
from transport.quotas.memory_quota import MemoryAccount
from transport.wire.framing import MESSAGE_OVERHEAD_BYTES, TAG_BYTES, Priority

ROUNDING = 1e-6  # largest rounding error of a bucket's level after the computed wait


class TokenBucket:
    """A token bucket. An amount of any size may be spent as soon as the bucket has no debt."""

    def __init__(self, per_second: float, saved_max: float, least: int = 0) -> None:
        """Create a full bucket that gains `per_second` tokens, up to `saved_max`. An amount below `least` costs `least`."""
        self._rate, self._saved_max, self._least = per_second, saved_max, least
        self._saved, self._at = saved_max, -math.inf

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until the next amount may be spent; 0 means now."""
        self._saved = min(self._saved_max, self._saved + self._rate * (now - self._at))
        self._at = now
        return 0.0 if self._saved > -ROUNDING else -self._saved / self._rate

    def spend(self, amount: int) -> None:
        self._saved -= max(amount, self._least)


WINDOW_BYTES = (32 << 10, 32 << 10, CIRCUIT_WINDOW_BYTES_MAX)  # by lane; part of the protocol, as each sender's initial credit
# Records in a window, by lane: a valid record is longer than its tag.
RECORDS_MAX = tuple(size // TAG_BYTES for size in WINDOW_BYTES)
CREDIT_SHARE = 4  # credit is given for a quarter of a window, so that one message covers many records
CIRCUITS_MAX = 128  # concurrent circuits of a relay; their windows hold 48 MiB, charged to the members that send
CIRCUITS_PER_PEER_MAX = 32  # concurrent circuits of one member: a quarter of all circuits
# Bytes per second of a circuit, in both directions together: a million parameters in two seconds.
CIRCUIT_BYTES_PER_SECOND = 2 << 20
RELAY_BYTES_PER_SECOND = 8 << 20  # bytes per second of all circuits: affordable on the uplink of a home fibre connection
RECORD_COST_BYTES = 1 << 10  # least charge of a record, since a short one is as much work: at most 8,000 records per second
# By lane, the share of the relay's rate with which the lane precedes other lanes. Records above this share come after other
# lanes. So a quarter is left to bulk if a peer marks all its records as votes. Agreement needs far less than half.
PRIORITY_SHARES = (0.5, 0.25, 1.0)
BURST_SECONDS = 0.1  # burst of a rate, in seconds: unused bytes of the rate are saved that long
CIRCUITS_PER_PAIR_MAX = 3  # Each end may open a circuit while an old one ends. No peer can use up another's circuits.
# Circuits per second that one member opens, after CIRCUITS_PER_PEER_MAX: each costs the other end a handshake.
OPENINGS_PER_SECOND = 1.0
RESERVE_REQUESTS_PER_SECOND = 0.1  # rate per member, after RESERVE_REQUESTS_BURST: each reservation is announced to all links
# Requests of one member without a pause: a relay that was silent is asked again, every few seconds at most.
RESERVE_REQUESTS_BURST = 8
MEMBERS_MAX = 1024  # members whose request rates are remembered, so that a new link does not reset them
FORWARDED_AT_ONCE_MAX = 64  # records forwarded between turns of other tasks

# Queues a message on a direct link; False: no such link exists, or its queue is full.
PostMessage = Callable[[bytes, Any, Priority], bool]


def _take_token(budget: TokenBucket, now: float) -> bool:
    """Spend one token of `budget` if it has no debt, and return whether the token was spent."""
    if budget.wait_seconds(now) > 0:
        return False
    budget.spend(1)
    return True


def _byte_bucket(per_second: float) -> TokenBucket:
    return TokenBucket(per_second, per_second * BURST_SECONDS, RECORD_COST_BYTES)


@dataclass(slots=True, eq=False)
class CircuitQueue:
    """The relay's queue of one lane: one priority in one direction of a circuit."""

    circuit: Circuit
    source: bytes
    target: bytes
    priority: Priority
    account: MemoryAccount  # account of `source`, which pays for the queue
    credit: int  # bytes that `target` accepts now
    queue: deque[bytes] = field(default_factory=deque)
    waiting: int = 0  # bytes in `queue`
    owed_credit: int = 0  # bytes forwarded for which `source` has not received credit yet

    def push(self, record: bytes) -> None:
        self.queue.append(record)
        self.waiting += len(record)
        self.account.add_bytes(len(record) + MESSAGE_OVERHEAD_BYTES)

    def pop(self) -> bytes:
        record = self.queue.popleft()
        self.waiting -= len(record)
        self.account.add_bytes(-len(record) - MESSAGE_OVERHEAD_BYTES)
        return record


class Circuit:
    def __init__(self, name: bytes, opener: bytes, target: bytes, account: Callable[[bytes], MemoryAccount]) -> None:
        self.circuit_id, self.ends = name, (opener, target)
        self.budget = _byte_bucket(CIRCUIT_BYTES_PER_SECOND)
        self.queues = {
            source: tuple(CircuitQueue(self, source, to, lane, account(source), WINDOW_BYTES[lane]) for lane in Priority)
            for source, to in (self.ends, self.ends[::-1])
        }


class StartTimeFairQueue:
    """The relay's order of the lanes of one priority: start-time fair queueing of all lanes that have a record and credit for it.

    Members take turns by bytes, regardless of the number of their circuits. The lanes of a member take turns by records. The
    algorithm is of Goyal, Vin and Cheng (Start-time Fair Queuing, SIGCOMM 1996).
    """

    def __init__(self, first_share: float) -> None:
        self.first = _byte_bucket(RELAY_BYTES_PER_SECOND * first_share)  # budget within which this priority precedes others
        self._ready: dict[bytes, dict[CircuitQueue, None]] = {}  # member -> its lanes that have a record and credit for it
        self._at: dict[bytes, float] = {}  # member -> start of its next record, in virtual bytes of the algorithm
        self._now = 0.0  # start of the last forwarded record, in virtual bytes

    def add(self, lane: CircuitQueue) -> None:
        if lane.source not in self._ready:
            self._at[lane.source] = max(self._now, self._at.get(lane.source, 0.0))
        self._ready.setdefault(lane.source, {}).setdefault(lane)

    def remove(self, lane: CircuitQueue) -> None:
        ready = self._ready.get(lane.source, {})
        ready.pop(lane, None)
        if not ready:
            self._ready.pop(lane.source, None)

    def next_queue(self, now: float) -> tuple[CircuitQueue | None, float]:
        """Return the lane of the next record and `now`, or None and the time when a record may be sent."""
        wake, members = math.inf, sorted(self._ready, key=self._at.__getitem__)
        for position, member in enumerate(members):
            for lane in self._ready[member]:
                wait = lane.circuit.budget.wait_seconds(now)
                if wait == 0:
                    for other in members[:position]:  # Members whose circuits have to wait save no turns.
                        self._at[other] = self._at[member]
                    return lane, now
                wake = min(wake, now + wait)
        return None, wake

    def charge_member(self, member: bytes, size: int) -> None:
        self._now = self._at[member]
        self._at[member] += max(size, RECORD_COST_BYTES)

    def forget_member(self, member: bytes) -> None:
        self._at.pop(member, None)


class CircuitRelay:
    """The circuits and reservations of a relay.

    `serves(peer)` returns whether the relay forwards for a peer, and `takes()` whether the relay accepts reservations.
    `refuse(reason)` counts refusals. `account(peer)` returns the memory account of a peer.
    """

    def __init__(
        self,
        post: PostMessage,
        serves: Callable[[bytes], bool],
        takes: Callable[[], bool],
        refuse: Callable[[str], None],
        account: Callable[[bytes], MemoryAccount],
    ) -> None:
        self._post, self._serves, self._takes, self._refuse, self._account = post, serves, takes, refuse, account
        self._reservations: set[bytes] = set()
        self._circuits: dict[bytes, Circuit] = {}
        self._of_peer: Counter[bytes] = Counter()
        self._turns = tuple(map(StartTimeFairQueue, PRIORITY_SHARES))  # the ready lanes, by priority
        self._budget = _byte_bucket(RELAY_BYTES_PER_SECOND)
        # Member -> budgets of its reservations and of its openings of circuits.
        self._asking: OrderedDict[bytes, tuple[TokenBucket, TokenBucket]] = OrderedDict()

    @property
    def reservations(self) -> RelayReservations:
        return RelayReservations(tuple(sorted(self._reservations)))

    def set_reservation(self, peer: bytes, wanted: bool, now: float) -> None:
        problem = ""
        if not wanted:
            self._reservations.discard(peer)
        elif not self._serves(peer):
            problem = "relay-not-member"
        elif peer not in self._reservations:
            if not self._takes():
                problem = "relay-off"
            elif len(self._reservations) >= RELAY_RESERVATIONS_MAX:
                problem = "relay-full"
            elif not _take_token(self._budgets(peer)[0], now):
                problem = "relay-too-often"
            else:
                self._reservations.add(peer)
        if problem:
            self._refuse(problem)

    def _budgets(self, member: bytes) -> tuple[TokenBucket, TokenBucket]:
        if member not in self._asking:
            openings = TokenBucket(OPENINGS_PER_SECOND, CIRCUITS_PER_PEER_MAX)
            self._asking[member] = TokenBucket(RESERVE_REQUESTS_PER_SECOND, RESERVE_REQUESTS_BURST), openings
        self._asking.move_to_end(member)
        if len(self._asking) > MEMBERS_MAX:
            self._asking.popitem(last=False)
        return self._asking[member]

    def cancel_reservations(self) -> None:
        """Cancel all reservations. Circuits continue until they end."""
        self._reservations.clear()

    def on_unlinked(self, peer: bytes) -> None:
        for circuit in [circuit for circuit in self._circuits.values() if peer in circuit.ends]:
            self._close(circuit, "end-gone")
        self._reservations.discard(peer)
        for turns in self._turns:
            turns.forget_member(peer)

    def close_unserved(self) -> None:
        """Close the circuits and reservations of peers that are no longer members, such as expelled peers and old keys."""
        for circuit in list(self._circuits.values()):
            self._is_served(circuit)
        self._reservations = {peer for peer in self._reservations if self._serves(peer)}

    def _is_served(self, circuit: Circuit) -> bool:
        """Return whether both ends of a circuit are members. If not, close the circuit."""
        if all(map(self._serves, circuit.ends)):
            return True
        self._refuse("relay-not-member")
        self._close(circuit, "relay-not-member")
        return False

    def open_circuit(self, peer: bytes, message: OpenCircuit, now: float) -> None:
        problem = self._refusal_reason(peer, message, now)
        if problem or not self._post(message.peer, IncomingCircuit(message.circuit, peer), Priority.VOTE):
            self._refuse(problem or "relay-full")
            self._post(peer, CloseCircuit(message.circuit, problem or "relay-full"), Priority.VOTE)
            return
        circuit = self._circuits[message.circuit] = Circuit(message.circuit, peer, message.peer, self._account)
        self._of_peer.update(circuit.ends)

    def _refusal_reason(self, opener: bytes, message: OpenCircuit, now: float) -> str:
        if not (self._serves(opener) and self._serves(message.peer)) or opener == message.peer:
            return "relay-not-member"
        if not _take_token(self._budgets(opener)[1], now):
            return "relay-too-often"
        if message.peer not in self._reservations:
            return "relay-not-reserved"
        of_pair = sum({*circuit.ends} == {opener, message.peer} for circuit in self._circuits.values())
        crowded = (
            max(self._of_peer[opener], self._of_peer[message.peer]) >= CIRCUITS_PER_PEER_MAX
            or len(self._circuits) >= CIRCUITS_MAX
            or of_pair >= CIRCUITS_PER_PAIR_MAX
        )
        # An id that is in use is an error of the opener, since two random ids of 128 bits never collide.
        return "relay-full" if crowded or message.circuit in self._circuits else ""

    def on_message(self, peer: bytes, message: CircuitData | CircuitCredit | CloseCircuit) -> None:
        circuit = self._circuits.get(message.circuit)
        if circuit is None or peer not in circuit.ends:
            return  # The circuit was closed meanwhile, or is not this peer's.
        other = circuit.ends[peer == circuit.ends[0]]
        match message:
            case CircuitData(priority=priority, data=data):
                lane = circuit.queues[peer][priority]
                is_full = lane.waiting + lane.owed_credit + len(data) > WINDOW_BYTES[priority]
                if is_full or len(lane.queue) >= RECORDS_MAX[priority]:
                    self._refuse("circuit-overrun")
                    self._close(circuit, "circuit-overrun")
                else:
                    lane.push(data)
                    self._mark_ready(lane)
            case CircuitCredit(priority=priority):
                lane = circuit.queues[other][priority]
                lane.credit = min(WINDOW_BYTES[priority], lane.credit + message.bytes)
                self._mark_ready(lane)
            case CloseCircuit():
                self._forget(circuit)
                self._post(other, CloseCircuit(circuit.circuit_id, message.reason), Priority.VOTE)

    def forward_records(self, now: float) -> float:
        """Forward the records that may be sent now, and return the time at which to call this again.

        The time is `now` if more records could be sent, but other tasks get a turn first. Votes of all members come first, then
        control, then bulk. Votes and control above their PRIORITY_SHARES come last.
        """
        for _ in range(FORWARDED_AT_ONCE_MAX):
            if (wait := self._budget.wait_seconds(now)) > 0:
                return now + wait
            lane, wake = self._next(now)
            if lane is None:
                return wake
            if self._is_served(lane.circuit):
                self._pass_on(lane)
        return now

    def _next(self, now: float) -> tuple[CircuitQueue | None, float]:
        """Return the lane of the next record and `now`, or None and the time when a record may be sent."""
        wake = math.inf
        first = [turns for turns in self._turns if turns.first.wait_seconds(now) == 0]
        for turns in (*first, *(turns for turns in reversed(self._turns) if turns not in first)):
            lane, at = turns.next_queue(now)
            if lane is not None:
                if turns in first:
                    turns.first.spend(len(lane.queue[0]))
                return lane, now
            wake = min(wake, at)
        return None, wake

    def _pass_on(self, lane: CircuitQueue) -> None:
        record = lane.pop()
        size = len(record)
        lane.credit -= size
        lane.owed_credit += size
        lane.circuit.budget.spend(size)
        self._budget.spend(size)
        turns = self._turns[lane.priority]
        turns.charge_member(lane.source, size)
        turns.remove(lane)  # A lane with more records is added behind the other lanes.
        self._mark_ready(lane)
        if not self._post(lane.target, CircuitData(lane.circuit.circuit_id, lane.priority, record), lane.priority):
            self._close(lane.circuit, "relay-full")
        elif lane.owed_credit * CREDIT_SHARE >= WINDOW_BYTES[lane.priority]:
            self._post(lane.source, CircuitCredit(lane.circuit.circuit_id, lane.priority, lane.owed_credit), Priority.VOTE)
            lane.owed_credit = 0

    def _mark_ready(self, lane: CircuitQueue) -> None:
        """Add a lane to the queue of its priority if it has a record and enough credit for it."""
        if lane.queue and lane.credit >= len(lane.queue[0]):
            self._turns[lane.priority].add(lane)

    def _close(self, circuit: Circuit, reason: str) -> None:
        self._forget(circuit)
        for end in circuit.ends:
            self._post(end, CloseCircuit(circuit.circuit_id, reason), Priority.VOTE)

    def _forget(self, circuit: Circuit) -> None:
        del self._circuits[circuit.circuit_id]
        self._of_peer -= Counter(circuit.ends)
        for lanes in circuit.queues.values():
            for lane in lanes:
                self._turns[lane.priority].remove(lane)
                lane.account.add_bytes(-lane.waiting - MESSAGE_OVERHEAD_BYTES * len(lane.queue))


assert min(WINDOW_BYTES) >= 2 * CIRCUIT_RECORD_BYTES_MAX, "a record fits while a quarter of the credit is due"
