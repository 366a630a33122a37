"""The relay's part of circuits: admission, order and rate of records between two of its links. Sans-IO.

A circuit has two ends, each with its own link to the relay, and three lanes in each direction, one for each priority. Each hop of
a lane has a window of bytes that its receiver may hold. The receiver gives credit for bytes that it has passed on. So a slow end
only slows down its own circuits, and the relay's memory is bounded. Records are encrypted from end to end.
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
        """`per_second` units, with bursts of `saved_max`. Smaller amounts than `least` count as `least`."""
        self._rate, self._saved_max, self._least = per_second, saved_max, least
        self._saved, self._at = saved_max, -math.inf

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until the next amount may be spent; 0: now."""
        self._saved = min(self._saved_max, self._saved + self._rate * (now - self._at))
        self._at = now
        return 0.0 if self._saved > -ROUNDING else -self._saved / self._rate

    def spend(self, amount: int) -> None:
        self._saved -= max(amount, self._least)


WINDOW_BYTES = (32 << 10, 32 << 10, CIRCUIT_WINDOW_BYTES_MAX)  # by lane; part of the protocol: senders begin with it
RECORDS_MAX = tuple(size // TAG_BYTES for size in WINDOW_BYTES)  # valid records are longer than their tag
CREDIT_SHARE = 4  # credit is given in quarters of a window, so that several records share a message
CIRCUITS_MAX = 128  # circuits at the same time; their windows hold 48 MiB, which is charged to the senders
CIRCUITS_PER_PEER_MAX = 32  # at most a quarter of all circuits
CIRCUIT_BYTES_PER_SECOND = 2 << 20  # rate of a circuit in both directions: a million parameters in two seconds
RELAY_BYTES_PER_SECOND = 8 << 20  # rate of all circuits: affordable for the uplink of a home fibre
RECORD_COST_BYTES = 1 << 10  # least charge of a record, since short ones are as much work: at most 8,000 per second
# By lane, the share of the relay's rate that precedes the other lanes. Records beyond it come after them. So a peer that marks
# all records as votes leaves bulk a quarter. Agreement needs far less than half.
PRIORITY_SHARES = (0.5, 0.25, 1.0)
BURST_SECONDS = 0.1  # seconds of these rates that are saved while nothing is sent
CIRCUITS_PER_PAIR_MAX = 3  # Both ends may open one while an old one ends. One peer cannot use up the circuits of another.
OPENINGS_PER_SECOND = 1.0  # rate per peer, after CIRCUITS_PER_PEER_MAX: each opening costs the other end a handshake
RESERVE_REQUESTS_PER_SECOND = 0.1  # rate per peer, after RESERVE_REQUESTS_BURST: each reservation is announced to all links
RESERVE_REQUESTS_BURST = 8  # immediate requests: a relay that was silent is asked again, every few seconds at most
MEMBERS_MAX = 1024  # members with remembered rates, which a new link does not reset
FORWARDED_AT_ONCE_MAX = 64  # records between turns of other tasks

PostMessage = Callable[[bytes, Any, Priority], bool]  # posts to a direct link; False: none exists, or its queue is full


def _take_token(budget: TokenBucket, now: float) -> bool:
    """Spend one unit if it is available, and return whether it was."""
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
    account: MemoryAccount  # account of the source, which is charged for the queue
    credit: int  # bytes that the target accepts now
    queue: deque[bytes] = field(default_factory=deque)
    waiting: int = 0  # bytes in `queue`
    owed_credit: int = 0  # bytes passed on, without credit to the source yet

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
    """The lanes of one priority with a record and credit for it, in the order of start-time fair queueing.

    Members take turns by bytes, regardless of the number of their circuits. The lanes of a member take turns by records. The
    algorithm is of Goyal, Vin and Cheng (Start-time Fair Queuing, SIGCOMM 1996).
    """

    def __init__(self, first_share: float) -> None:
        self.first = _byte_bucket(RELAY_BYTES_PER_SECOND * first_share)  # budget that precedes the other priorities
        self._ready: dict[bytes, dict[CircuitQueue, None]] = {}  # member -> its ready lanes
        self._at: dict[bytes, float] = {}  # member -> start of its next record, in virtual bytes
        self._now = 0.0  # start of the last record

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
        """Return the lane of the next record, or None and the time when one may be sent."""
        wake, members = math.inf, sorted(self._ready, key=self._at.__getitem__)
        for position, member in enumerate(members):
            for lane in self._ready[member]:
                wait = lane.circuit.budget.wait_seconds(now)
                if wait == 0:
                    for other in members[:position]:  # Members with waiting circuits save no turns.
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

    `serves(peer)` returns whether the relay forwards for a peer, and `takes()` whether it accepts reservations. `refuse(reason)`
    counts refusals. `account(peer)` returns the memory account of a peer.
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
        self._turns = tuple(map(StartTimeFairQueue, PRIORITY_SHARES))  # by priority
        self._budget = _byte_bucket(RELAY_BYTES_PER_SECOND)
        self._asking: OrderedDict[bytes, tuple[TokenBucket, TokenBucket]] = OrderedDict()  # member -> reservations, openings

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
        """Return whether both ends are members. If not, close the circuit."""
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
        # A name that is in use is a fault, since two random names of 128 bits never collide.
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
        """Forward the records that may be sent now, and return the time of the next call.

        The time is `now` if more could be sent, but other tasks get a turn. Votes of all members come first, then control, then
        bulk. Votes and control beyond their share come last.
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
        """Return the lane of the next record, or None and the time when one may be sent."""
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
        turns.remove(lane)  # If the lane has more records, it goes behind the others.
        self._mark_ready(lane)
        if not self._post(lane.target, CircuitData(lane.circuit.circuit_id, lane.priority, record), lane.priority):
            self._close(lane.circuit, "relay-full")
        elif lane.owed_credit * CREDIT_SHARE >= WINDOW_BYTES[lane.priority]:
            self._post(lane.source, CircuitCredit(lane.circuit.circuit_id, lane.priority, lane.owed_credit), Priority.VOTE)
            lane.owed_credit = 0

    def _mark_ready(self, lane: CircuitQueue) -> None:
        """Add a lane to its queue if it has a record and enough credit."""
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
