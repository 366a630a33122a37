"""The relay's part of circuits: what it forwards between two of its links, to whom, in which order and how fast. Sans-IO.

A circuit has two ends, each over a link of its own, and three lanes in each direction, one for each priority. Each hop of a lane
has a window: the receiver of the hop holds at most so many bytes of it, and gives credit for what it has passed on. So a slow
end slows down its own circuits alone, and the relay's memory is bounded. What is inside is sealed from end to end.
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

ROUNDING = 1e-6  # of what a budget saves, after a while that was just long enough


class TokenBucket:
    """So many units a second, and `saved` at once. Whatever is due goes if nothing is owed for what went before."""

    def __init__(self, per_second: float, saved_max: float, least: int = 0) -> None:
        """`least`: counted for whatever is less."""
        self._rate, self._saved_max, self._least = per_second, saved_max, least
        self._saved, self._at = saved_max, -math.inf

    def wait_seconds(self, now: float) -> float:
        """0: the next one may go."""
        self._saved = min(self._saved_max, self._saved + self._rate * (now - self._at))
        self._at = now
        return 0.0 if self._saved > -ROUNDING else -self._saved / self._rate

    def spend(self, amount: int) -> None:
        self._saved -= max(amount, self._least)


WINDOW_BYTES = (32 << 10, 32 << 10, CIRCUIT_WINDOW_BYTES_MAX)  # by lane; part of the protocol: senders begin with as much credit
RECORDS_MAX = tuple(size // TAG_BYTES for size in WINDOW_BYTES)  # none that holds anything is as short as its tag
CREDIT_SHARE = 4  # credit is given in quarters of a window: one small message for several records
CIRCUITS_MAX = 128  # forwarded at once; their windows hold 48 MiB of data, which the members that sent it pay for
CIRCUITS_PER_PEER_MAX = 32  # one peer takes a quarter of them at most
CIRCUIT_BYTES_PER_SECOND = 2 << 20  # of one circuit, both directions: a million parameters in two seconds
RELAY_BYTES_PER_SECOND = 8 << 20  # of all circuits: what a home fibre's uplink can spare
RECORD_COST_BYTES = 1 << 10  # of these budgets at least: shorter ones are as much work, and so 8,000 a second are the most
# by lane, of that: so much of it goes before the other lanes, the rest behind them. So whoever
PRIORITY_SHARES = (0.5, 0.25, 1.0)
# marks all as votes leaves bulk a quarter; what agreement needs is far less than half
BURST_SECONDS = 0.1  # what these budgets save up while nothing is sent
CIRCUITS_PER_PAIR_MAX = 3  # both ends open one at once while an old one ends; so nobody takes all that another peer may have
OPENINGS_PER_SECOND = 1.0  # of one peer, once it has opened as many circuits as it may have: each costs the other end a handshake
RESERVE_REQUESTS_PER_SECOND = 0.1  # of one peer, after RESERVINGS_AT_ONCE: each is told to all links
RESERVE_REQUESTS_BURST = 8  # a relay in use is asked anew after it was silent, every few seconds at most
MEMBERS_MAX = 1024  # whose openings and reservings are remembered: a link that ends pays nothing back
FORWARDED_AT_ONCE_MAX = 64  # records; then other tasks have their turn

PostMessage = Callable[[bytes, Any, Priority], bool]  # to a directly linked peer; False: it is not, or its queue is full


def _take_token(budget: TokenBucket, now: float) -> bool:
    """One unit, if it is there."""
    if budget.wait_seconds(now) > 0:
        return False
    budget.spend(1)
    return True


def _byte_bucket(per_second: float) -> TokenBucket:
    return TokenBucket(per_second, per_second * BURST_SECONDS, RECORD_COST_BYTES)


@dataclass(slots=True, eq=False)
class CircuitQueue:
    """One priority of one direction, inside the relay."""

    circuit: Circuit
    source: bytes
    target: bytes
    priority: Priority
    account: MemoryAccount  # the source's: pays for what waits
    credit: int  # what the target takes now
    queue: deque[bytes] = field(default_factory=deque)
    waiting: int = 0  # bytes in `queue`
    owed_credit: int = 0  # bytes passed on, for which the source has no credit yet

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
    """The lanes of one priority that have a record, and credit for it: members that send take turns by bytes, however many
    circuits they have, and the lanes of a member by records. This is start-time fair queueing (Goyal, Vin and Cheng, 1996).
    """

    def __init__(self, first_share: float) -> None:
        self.first = _byte_bucket(RELAY_BYTES_PER_SECOND * first_share)  # what goes before the other priorities
        self._ready: dict[bytes, dict[CircuitQueue, None]] = {}  # by member
        self._at: dict[bytes, float] = {}  # bytes: of each member, where its next record begins
        self._now = 0.0  # where the last one began

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
        """Whose record goes, or None and when one may."""
        wake, members = math.inf, sorted(self._ready, key=self._at.__getitem__)
        for position, member in enumerate(members):
            for lane in self._ready[member]:
                wait = lane.circuit.budget.wait_seconds(now)
                if wait == 0:
                    for other in members[:position]:  # while their circuits have to wait, they save up no turns
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
    """`serves`: whether this peer forwards for that one. `takes`: whether it takes reservations now. `refuse` counts what was
    refused, by reason. `account`: that peer's one."""

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
        self._asking: OrderedDict[bytes, tuple[TokenBucket, TokenBucket]] = OrderedDict()  # of each member: reservings, openings

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
        """All reservations. Circuits go on until they end."""
        self._reservations.clear()

    def on_unlinked(self, peer: bytes) -> None:
        for circuit in [circuit for circuit in self._circuits.values() if peer in circuit.ends]:
            self._close(circuit, "end-gone")
        self._reservations.discard(peer)
        for turns in self._turns:
            turns.forget_member(peer)

    def close_unserved(self) -> None:
        """Ends what it holds for peers that it serves no more: expelled ones, old keys."""
        for circuit in list(self._circuits.values()):
            self._is_served(circuit)
        self._reservations = {peer for peer in self._reservations if self._serves(peer)}

    def _is_served(self, circuit: Circuit) -> bool:
        """If it is not, it ends."""
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
        # A name that is taken: nobody draws one of 2^128 by accident.
        return "relay-full" if crowded or message.circuit in self._circuits else ""

    def on_message(self, peer: bytes, message: CircuitData | CircuitCredit | CloseCircuit) -> None:
        circuit = self._circuits.get(message.circuit)
        if circuit is None or peer not in circuit.ends:
            return  # it was closed while this message was on its way, or it is none of this peer's
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
        """Pass on what may go now; when more may go (`now`: at once, other tasks had to have their turn).

        Votes of all members go first, then control, then bulk; votes and control beyond their share go last.
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
        """Whose record goes, or None and when one may."""
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
        turns.remove(lane)  # and behind the others, if it has more
        self._mark_ready(lane)
        if not self._post(lane.target, CircuitData(lane.circuit.circuit_id, lane.priority, record), lane.priority):
            self._close(lane.circuit, "relay-full")
        elif lane.owed_credit * CREDIT_SHARE >= WINDOW_BYTES[lane.priority]:
            self._post(lane.source, CircuitCredit(lane.circuit.circuit_id, lane.priority, lane.owed_credit), Priority.VOTE)
            lane.owed_credit = 0

    def _mark_ready(self, lane: CircuitQueue) -> None:
        """It may have become ready: a record has come, or credit."""
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


assert min(WINDOW_BYTES) >= 2 * CIRCUIT_RECORD_BYTES_MAX, "with a quarter of the credit still to come, a record fits"
