"""A relay: the order and the rate of its forwarding, its refusals, and its inability to read or change the data."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.identity import Identity
from protocol.limits import CIRCUIT_RECORD_BYTES_MAX, RELAY_RESERVATIONS_MAX
from protocol.messages import CircuitCredit, CircuitData, CloseCircuit, IncomingCircuit, OpenCircuit
from tests.transport.helpers import ALICE, BOB, CAROL, CHAIN, exchange_bytes
from transport.peer_policy import PeerClass
from transport.quotas.memory_quota import MemoryAccount, MemoryQuota
from transport.relay import circuit_relay as module
from transport.relay.circuit_relay import RECORD_COST_BYTES, RECORDS_MAX, WINDOW_BYTES, CircuitRelay, TokenBucket
from transport.relay.circuit_session import CircuitSession
from transport.wire.framing import MESSAGE_OVERHEAD_BYTES, Channel, Message, Priority
from transport.wire.noise_session import KeyPair, PeerAuthenticated

A, B, C, D = (bytes([number]) * 32 for number in range(4))
ONE, TWO = b"circuit one 0123", b"circuit two 0123"
RECORD = bytes(CIRCUIT_RECORD_BYTES_MAX)


class World:
    """A relay with a clock and a record of its messages."""

    def __init__(self, *members: bytes) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.refused: Counter[str] = Counter()
        self.deaf: set[bytes] = set()
        self.memory, self.takes = MemoryQuota(), True
        self.relay = CircuitRelay(
            self._post,
            lambda peer: not members or peer in members,
            lambda: self.takes,
            lambda reason: self.refused.update([reason]),
            self.account,
        )
        self.now = 0.0

    def _post(self, peer: bytes, message: Any, priority: Priority) -> bool:
        if peer in self.deaf:
            return False
        assert not isinstance(message, CircuitData) or priority == message.priority
        self.sent.append((peer, message))
        return True

    def account(self, peer: bytes) -> MemoryAccount:
        account = self.memory.account_of(peer, PeerClass.MEMBER)
        account.is_linked = True
        return account

    def open(self, opener: bytes, target: bytes, name: bytes = ONE) -> None:
        self.relay.set_reservation(target, True, self.now)
        self.relay.open_circuit(opener, OpenCircuit(name, target), self.now)

    def data(self, source: bytes, lane: Priority, data: bytes = RECORD, name: bytes = ONE) -> None:
        self.relay.on_message(source, CircuitData(name, lane, data))

    def forward(self, seconds: float = 0.0) -> list[CircuitData]:
        """Advance the clock and return the forwarded data. Both ends read at once."""
        before, end = len(self.sent), self.now + seconds
        now = self.now
        while now <= end:
            now = self.relay.forward_records(now)
        self.now = end
        return [message for _, message in self.sent[before:] if isinstance(message, CircuitData)]

    def to(self, peer: bytes, kind: type) -> list[Any]:
        return [message for target, message in self.sent if target == peer and isinstance(message, kind)]


@pytest.fixture
def world() -> World:
    return World()


def test_a_circuit_leads_to_a_peer_that_has_reserved_and_back(world: World) -> None:
    world.open(A, B)
    assert world.to(B, IncomingCircuit) == [IncomingCircuit(ONE, A)]
    world.data(A, Priority.VOTE, b"there")
    world.data(B, Priority.VOTE, b"back")
    world.forward()
    assert [message.data for message in world.to(B, CircuitData)] == [b"there"]
    assert [message.data for message in world.to(A, CircuitData)] == [b"back"]
    world.relay.on_message(A, CloseCircuit(ONE, "ended"))
    assert world.to(B, CloseCircuit) == [CloseCircuit(ONE, "ended")] and not world.relay._circuits


@pytest.mark.parametrize(
    ("members", "opener", "target", "reason"),
    [
        ((A, B), C, B, "relay-not-member"),
        ((A, B), A, C, "relay-not-member"),
        ((A, B, C), A, C, "relay-not-reserved"),
        ((A, B), B, B, "relay-not-member"),
    ],
)
def test_only_members_reach_members_that_have_reserved(
    members: tuple[bytes, ...], opener: bytes, target: bytes, reason: str
) -> None:
    world = World(*members)
    world.relay.set_reservation(B, True, 0.0)
    world.relay.open_circuit(opener, OpenCircuit(ONE, target), 0.0)
    assert world.to(opener, CloseCircuit) == [CloseCircuit(ONE, reason)]
    assert world.refused == {reason: 1} and not world.relay._circuits and not world.to(target, IncomingCircuit)


def test_a_relay_that_takes_no_more_keeps_what_it_has_until_it_gives_that_up(world: World) -> None:
    world.open(A, B)
    world.takes = False
    world.relay.set_reservation(B, True, 0.0)  # a repeated request for an existing one
    world.relay.set_reservation(C, True, 0.0)
    world.open(D, B, TWO)
    assert world.relay.reservations.peers == (B,) and world.refused == {"relay-off": 1} and len(world.relay._circuits) == 2
    world.relay.cancel_reservations()
    world.data(A, Priority.VOTE, b"still")
    assert [sent.data for sent in world.forward()] == [b"still"] and world.relay.reservations.peers == ()


def test_a_third_peer_can_neither_speak_in_a_circuit_nor_end_it(world: World) -> None:
    world.open(A, B)
    world.data(C, Priority.VOTE)
    world.relay.on_message(C, CloseCircuit(ONE, "ended"))
    world.open(C, D)  # the name is taken
    assert world.forward() == [] and len(world.relay._circuits) == 1
    assert world.to(C, CloseCircuit) == [CloseCircuit(ONE, "relay-full")]


def test_reservations_and_circuits_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(RELAY_RESERVATIONS_MAX + 1):
        world.relay.set_reservation(number.to_bytes(32, "big"), True, 0.0)
    assert len(world.relay.reservations.peers) == RELAY_RESERVATIONS_MAX and world.refused == {"relay-full": 1}

    monkeypatch.setattr(module, "CIRCUITS_PER_PEER_MAX", 3)
    monkeypatch.setattr(module, "CIRCUITS_MAX", 4)
    world = World()
    for number, (opener, target) in enumerate([(A, B), (A, C), (A, D), (A, B), (B, C), (B, D)]):
        world.open(opener, target, number.to_bytes(16, "big"))
    assert len(world.relay._circuits) == 4 and world.refused == {"relay-full": 2}
    world.relay.on_unlinked(A)
    assert len(world.relay._circuits) == 1
    world.now = 60.0
    world.open(A, B, bytes(16))  # the place is free again
    assert len(world.relay._circuits) == 2


def test_nobody_takes_all_circuits_that_another_may_have(world: World) -> None:
    for number in range(module.CIRCUITS_PER_PEER_MAX):
        world.open(A, B, number.to_bytes(16, "big"))
    assert len(world.relay._circuits) == module.CIRCUITS_PER_PAIR_MAX
    world.open(C, B, TWO)
    assert len(world.relay._circuits) == module.CIRCUITS_PER_PAIR_MAX + 1


def test_whoever_reserves_again_and_again_is_refused_also_over_a_new_link() -> None:
    world, told = World(), 0
    for second in range(200):
        for _ in range(3):
            world.relay.set_reservation(A, True, float(second))
            told += len(world.relay.reservations.peers)
            world.relay.set_reservation(A, False, float(second))
        world.relay.on_unlinked(A)
    assert told == module.RESERVE_REQUESTS_BURST + 200 * module.RESERVE_REQUESTS_PER_SECOND
    assert world.refused == {"relay-too-often": 600 - told}
    world.relay.set_reservation(B, True, 200.0)
    assert world.relay.reservations.peers == (B,), "others are not"


def test_whoever_opens_circuits_all_the_time_is_slowed_down(world: World) -> None:
    opened = 0
    for second in range(200):
        world.now = float(second)
        for number in range(5):
            name = (5 * second + number).to_bytes(16, "big")
            world.open(A, B, name)
            opened += len(world.relay._circuits)
            world.relay.on_message(A, CloseCircuit(name, "ended"))
        world.relay.on_unlinked(A)  # a new link pays nothing back
    assert opened == module.CIRCUITS_PER_PEER_MAX + 200 and world.refused == {"relay-too-often": 1_000 - opened}
    world.open(C, B)
    assert len(world.relay._circuits) == 1, "others are not"


def test_a_vote_overtakes_bulk_of_its_own_circuit_and_of_others(world: World) -> None:
    world.open(A, B)
    world.open(C, D, TWO)
    for _ in range(4):
        world.data(A, Priority.BULK)
        world.data(C, Priority.BULK, name=TWO)
    world.data(A, Priority.CONTROL, b"control")
    world.data(A, Priority.VOTE, b"a vote")
    assert [(message.circuit, message.priority) for message in world.forward()] == [
        (ONE, Priority.VOTE),
        (ONE, Priority.CONTROL),
        *[(ONE, Priority.BULK), (TWO, Priority.BULK)] * 4,
    ]


def crowd(world: World, source: bytes, count: int) -> list[bytes]:
    """Open circuits from one member to a number of others."""
    names = [source[:8] + bytes([number]) * 8 for number in range(count)]
    for number, name in enumerate(names):
        world.open(source, bytes([100 + number]) * 32, name)
    return names


def passed_on(world: World, seconds: int, *full: tuple[bytes, Priority, bytes]) -> Counter[tuple[bytes, Priority]]:
    """Return the bytes by circuit and lane. These lanes (source, lane, circuit) always have more, and all ends read at once."""
    sent: Counter[tuple[bytes, Priority]] = Counter()
    for _ in range(20 * seconds):
        for source, number, name in full:
            lane = world.relay._circuits[name].queues[source][number]
            lane.owed_credit = 0
            world.relay.on_message(lane.target, CircuitCredit(name, number, WINDOW_BYTES[number]))
            while lane.waiting + len(RECORD) <= WINDOW_BYTES[number]:
                world.data(source, number, name=name)
        sent.update({(message.circuit, message.priority): len(message.data) for message in world.forward(0.05)})
    return sent


def test_members_share_each_priority_alike_however_many_circuits_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A has ten circuits, and C has one."""
    monkeypatch.setattr(module, "RELAY_BYTES_PER_SECOND", 1 << 18)
    for priority in Priority:
        world = World()
        names = crowd(world, A, 10)
        world.open(C, D, TWO)
        sent = passed_on(world, 5, (C, priority, TWO), *((A, priority, name) for name in names))
        assert sent[TWO, priority] == pytest.approx(sent.total() / 2, rel=0.05)
        assert sent.total() == pytest.approx(5 << 18, rel=0.1), "nothing is left unused"


def test_a_member_saves_up_no_turns_while_its_circuits_have_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sends little for a while, and then as much as it may."""
    monkeypatch.setattr(module, "RELAY_BYTES_PER_SECOND", 1 << 18)
    monkeypatch.setattr(module, "CIRCUIT_BYTES_PER_SECOND", 1 << 14)
    world = World()
    others = [(C, Priority.BULK, name) for name in crowd(world, C, 14)]
    first, *more = crowd(world, A, 14)
    passed_on(world, 20, (A, Priority.BULK, first), *others)
    sent = passed_on(world, 5, *((A, Priority.BULK, name) for name in (first, *more)), *others)
    assert sum(sent[name, Priority.BULK] for _, _, name in others) == pytest.approx(sent.total() / 2, rel=0.1)


def test_whoever_marks_all_as_votes_leaves_others_their_votes_at_once_and_a_share_of_bulk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A and B mark all as votes."""
    monkeypatch.setattr(module, "RELAY_BYTES_PER_SECOND", 1 << 18)
    world = World()
    world.open(C, D, TWO)
    floods = [(source, Priority.VOTE, name) for source in (A, B) for name in crowd(world, source, 5)]
    assert passed_on(world, 5, *floods, (C, Priority.BULK, TWO))[TWO, Priority.BULK] >= (5 << 18) // 4
    for _ in range(10):
        passed_on(world, 1, *floods)
        world.data(C, Priority.VOTE, b"a vote", TWO)
        world.now += 2 * len(RECORD) / (1 << 18)  # the cost of the record before is paid back
        assert TWO in [message.circuit for message in world.forward()[:3]], "behind one record of each other member"


def test_while_budgets_hold_bulk_back_a_vote_waits_for_one_record(world: World) -> None:
    world.open(A, B)
    for _ in range(WINDOW_BYTES[Priority.BULK] // len(RECORD)):
        world.data(A, Priority.BULK)
    world.relay._circuits[ONE].budget = TokenBucket(len(RECORD), 0)  # one record a second
    world.forward(2.5)
    world.data(A, Priority.VOTE, b"a vote")
    assert world.forward(1.0)[0].priority == Priority.VOTE


def test_budgets_are_bytes_a_second_and_never_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CIRCUIT_BYTES_PER_SECOND", 100_000)
    world = World()
    world.open(A, B)
    world.open(C, D, TWO)
    sent = 0
    for _ in range(3_600):  # an hour
        while len(world.relay._circuits[ONE].queues[A][2].queue) < 7:
            world.data(A, Priority.BULK)
        sent += sum(len(message.data) for message in world.forward(1.0))
        world.relay._circuits[ONE].queues[A][2].owed_credit = 0
        world.relay.on_message(B, CircuitCredit(ONE, Priority.BULK, WINDOW_BYTES[2]))
    assert sent == pytest.approx(3_600 * 100_000, rel=0.01)
    world.data(C, Priority.BULK, name=TWO)
    assert [message.circuit for message in world.forward()] == [TWO], "another circuit has a budget of its own"


def test_short_records_fill_neither_the_memory_nor_the_processor_of_a_relay(world: World) -> None:
    """An entry of the queue takes some fifty bytes, and the work of a record of a kilobyte, for any contents."""
    world.open(A, B)
    world.relay._circuits[ONE].queues[A][Priority.BULK].credit = 0
    for _ in range(RECORDS_MAX[Priority.BULK] + 1):
        world.data(A, Priority.BULK, b"x")
    assert world.refused == {"circuit-overrun": 1} and not world.relay._circuits

    world = World()
    world.open(A, B)
    forwarded = 0
    for _ in range(10):
        for _ in range(1_000):
            world.data(A, Priority.VOTE, b"x")
        forwarded += len(world.forward(0.1))
    assert forwarded <= module.CIRCUIT_BYTES_PER_SECOND / RECORD_COST_BYTES * (1.0 + module.BURST_SECONDS) + 2


def test_an_end_that_reads_nothing_holds_up_its_circuit_alone_and_one_window_of_memory(world: World) -> None:
    world.open(A, B)
    world.open(A, D, TWO)
    records = WINDOW_BYTES[Priority.BULK] // len(RECORD)
    for _ in range(records):
        world.data(A, Priority.BULK)
    assert len(world.forward(1.0)) == records
    (credit,) = {message.bytes for message in world.to(A, CircuitCredit)}
    assert credit * len(world.to(A, CircuitCredit)) == WINDOW_BYTES[Priority.BULK], "what was passed on may be sent again"
    for _ in range(records):
        world.data(A, Priority.BULK)
    assert world.forward(1.0) == [], "B gave no credit"
    world.data(A, Priority.BULK, name=TWO)
    assert [message.circuit for message in world.forward(1.0)] == [TWO]
    world.data(A, Priority.BULK, b"one byte more than the window")
    assert world.refused == {"circuit-overrun": 1}
    assert world.to(A, CloseCircuit) == world.to(B, CloseCircuit) == [CloseCircuit(ONE, "circuit-overrun")]
    assert len(world.relay._circuits) == 1 and world.forward(1.0) == []


def test_a_circuit_ends_with_the_link_of_either_end(world: World) -> None:
    world.open(A, B)
    world.data(A, Priority.BULK)
    world.relay.on_unlinked(B)
    assert world.to(A, CloseCircuit) == [CloseCircuit(ONE, "end-gone")] and world.forward() == []
    assert world.relay.reservations.peers == ()
    world.open(A, B)
    world.data(A, Priority.BULK)
    world.deaf.add(B)  # its queue is full
    assert world.forward() == [] and not world.relay._circuits
    assert world.relay.forward_records(world.now) == math.inf


def test_nothing_is_forwarded_for_whoever_is_expelled_from_that_block_on() -> None:
    world, members = World(), {A, B, C, D}
    world.relay._serves = members.__contains__
    world.open(A, B)
    world.open(C, D, TWO)
    world.open(C, B, b"a circuit without records"[:16])
    world.data(A, Priority.VOTE, b"before the block")
    assert [message.data for message in world.forward()] == [b"before the block"]
    world.data(A, Priority.VOTE, b"on its way in the relay")
    members.remove(B)
    world.data(C, Priority.VOTE, b"of others", TWO)
    assert [message.data for message in world.forward()] == [b"of others"]
    assert world.to(A, CloseCircuit) == [CloseCircuit(ONE, "relay-not-member")]
    world.relay.close_unserved()
    assert len(world.relay._circuits) == 1 and world.relay.reservations.peers == (D,)
    assert {message.reason for message in world.to(B, CloseCircuit)} == {"relay-not-member"}


def test_what_waits_in_a_relay_is_paid_for_by_whoever_sent_it() -> None:
    """A's records wait for B, which reads none; the smallest ones cost most."""
    world, count = World(), 1_000
    world.open(A, B)
    for _ in range(count):
        world.data(A, Priority.VOTE, b".")
    assert world.account(A).held == world.memory.held == count * (1 + MESSAGE_OVERHEAD_BYTES)
    world.relay.on_unlinked(B)
    assert world.memory.held == 0


PEERS = st.sampled_from((A, B, C, D))
NAMES = st.sampled_from((ONE, TWO))
LANES = st.sampled_from(list(Priority))
STEPS = st.one_of(
    st.tuples(st.just("set_reservation"), PEERS, st.booleans()),
    st.tuples(st.just("open_circuit"), PEERS, st.builds(OpenCircuit, NAMES, PEERS)),
    st.tuples(st.just("on_message"), PEERS, st.builds(CircuitData, NAMES, LANES, st.sampled_from((b"x", RECORD)))),
    st.tuples(st.just("on_message"), PEERS, st.builds(CircuitCredit, NAMES, LANES, st.sampled_from((1, WINDOW_BYTES[2])))),
    st.tuples(st.just("on_message"), PEERS, st.builds(CloseCircuit, NAMES, st.just("ended"))),
    st.tuples(st.just("on_unlinked"), PEERS),
    st.tuples(st.just("deaf"), PEERS),
    st.tuples(st.just("forward"), st.floats(0, 2)),
)


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=60))
def test_whatever_its_links_say_a_relay_holds_no_more_than_its_windows(steps: list[tuple[Any, ...]]) -> None:
    world = World(A, B, C)
    for what, *arguments in steps:
        if what == "deaf":
            world.deaf ^= {*arguments}
        elif what == "forward":
            world.forward(*arguments)
        else:
            getattr(world.relay, what)(*arguments, *([world.now] if what in ("open_circuit", "set_reservation") else []))
        circuits = world.relay._circuits.values()
        lanes = [lane for circuit in circuits for both in circuit.queues.values() for lane in both]
        assert all(sum(map(len, lane.queue)) == lane.waiting <= WINDOW_BYTES[lane.priority] for lane in lanes)
        assert all(0 <= lane.credit <= WINDOW_BYTES[lane.priority] for lane in lanes)
        assert all({*circuit.ends} <= {A, B, C} for circuit in circuits)
        assert {lane for turns in world.relay._turns for ready in turns._ready.values() for lane in ready} <= {*lanes}
        assert world.memory.held == sum(len(record) + MESSAGE_OVERHEAD_BYTES for lane in lanes for record in lane.queue)
        assert world.relay._of_peer == Counter(end for circuit in circuits for end in circuit.ends)


# Sealed from end to end ----------------------------------------------------------------------------------------------


def sessions(one: bytes = ONE, other: bytes = ONE, answers: Identity = BOB) -> tuple[CircuitSession, CircuitSession]:
    """Return the sessions of Alice with Bob, and of the peer that `answers`."""

    def session(me: Any, peer: Any, name: bytes, initiator: bool) -> CircuitSession:
        static, fresh = (KeyPair.from_private(bytes([me.public[0] ^ number]) * 32) for number in range(2))
        return CircuitSession(
            me,
            CHAIN,
            name,
            initiator=initiator,
            static=static,
            ephemeral=fresh,
            expected=peer.public,
            credit=lambda lane: WINDOW_BYTES[lane],
        )

    return session(ALICE, BOB, one, True), session(answers, ALICE, other, False)


def records_of(session: CircuitSession) -> list[bytes]:
    found = []
    while record := session.data_to_send():
        found.append(record)
    return found


def established() -> tuple[CircuitSession, CircuitSession, list[bytes]]:
    """Return both ends and four records in flight: two votes and two of bulk."""
    alice, bob = sessions()
    events = exchange_bytes(alice, bob)
    assert [event.peer for _, event in events if isinstance(event, PeerAuthenticated)] == [BOB.public, ALICE.public]
    sent = []
    for number in range(2):
        alice.outbox.push(Channel.APPLICATION, b"vote %d" % number, Priority.VOTE)
        sent += records_of(alice)
    alice.outbox.push(Channel.APPLICATION, bytes(CIRCUIT_RECORD_BYTES_MAX), Priority.BULK)
    return alice, bob, sent + records_of(alice)


def test_lanes_overtake_each_other_and_keep_their_own_order() -> None:
    _, bob, (first, second, *bulk) = established()
    events = [event for record in (bulk[0], first, bulk[1], second) for event in bob.receive(record)]
    assert [event.data[:6] for event in events if isinstance(event, Message)] == [b"vote 0", bytes(6), b"vote 1"]
    assert max(map(len, bulk)) - 1 <= CIRCUIT_RECORD_BYTES_MAX


def test_whatever_the_relay_does_to_a_record_is_seen() -> None:
    def swapped(sent: list[bytes]) -> list[bytes]:
        return [sent[1], sent[0]]

    def dropped(sent: list[bytes]) -> list[bytes]:
        return sent[1:2]

    def repeated(sent: list[bytes]) -> list[bytes]:
        return [sent[0], sent[0]]

    def changed(sent: list[bytes]) -> list[bytes]:
        return [sent[0][:-1] + bytes([sent[0][-1] ^ 1])]

    def shortened(sent: list[bytes]) -> list[bytes]:
        return [sent[0][:9]]

    def moved_to_another_lane(sent: list[bytes]) -> list[bytes]:
        return [bytes([Priority.BULK]) + sent[0][1:]]

    for does in (swapped, dropped, repeated, changed, shortened, moved_to_another_lane):
        _, bob, sent = established()
        with pytest.raises(RemoteProtocolError, match=r"bad-tag|bad-frame"):
            for record in does(sent):
                bob.receive(record)


def test_a_handshake_fits_one_circuit() -> None:
    alice, bob = sessions(ONE, TWO)
    with pytest.raises(RemoteProtocolError, match="handshake"):
        exchange_bytes(alice, bob)


def test_a_relay_is_not_taken_for_the_far_end() -> None:
    alice, carol = sessions(answers=CAROL)
    with pytest.raises(RemoteProtocolError, match="wrong-peer"):
        exchange_bytes(alice, carol)


def test_nothing_is_sent_without_credit() -> None:
    alice, _, _ = established()
    alice._credit = lambda lane: 0 if lane == Priority.VOTE else WINDOW_BYTES[lane]
    alice.outbox.push(Channel.APPLICATION, b"vote", Priority.VOTE)
    alice.outbox.push(Channel.APPLICATION, b"bulk", Priority.BULK)
    assert [record[0] for record in records_of(alice)] == [Priority.BULK]
