"""What a relay forwards, in which order, how fast, and what it refuses; and that it can neither read nor change it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.identity import WIRE_VERSIONS
from protocol.limits import CIRCUIT_RECORD_BYTES_MAX, RESERVATIONS_MAX
from protocol.messages import CircuitCredit, CircuitData, CloseCircuit, IncomingCircuit, OpenCircuit
from tests.transport.helpers import ALICE, BOB, CHAIN, exchange_bytes
from transport import relay as module
from transport.circuit import CircuitSession
from transport.framing import Channel, Message, Priority
from transport.noise import KeyPair
from transport.relay import WINDOW_BYTES, Budget, Relay
from transport.session import Established

A, B, C, D = (bytes([number]) * 32 for number in range(4))
ONE, TWO = b"circuit one 0123", b"circuit two 0123"
RECORD = bytes(CIRCUIT_RECORD_BYTES_MAX)


class World:
    """A relay; what it sends to whom, and when."""

    def __init__(self, *members: bytes) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.refused: Counter[str] = Counter()
        self.deaf: set[bytes] = set()
        self.relay = Relay(self._post, lambda peer: not members or peer in members, lambda reason: self.refused.update([reason]))
        self.now = 0.0

    def _post(self, peer: bytes, message: Any, priority: Priority) -> bool:
        if peer in self.deaf:
            return False
        assert not isinstance(message, CircuitData) or priority == message.lane
        self.sent.append((peer, message))
        return True

    def open(self, opener: bytes, target: bytes, name: bytes = ONE) -> None:
        self.relay.reserve(target, True)
        self.relay.open(opener, OpenCircuit(name, target), self.now)

    def data(self, source: bytes, lane: Priority, data: bytes = RECORD, name: bytes = ONE) -> None:
        self.relay.data(source, CircuitData(name, lane, data))

    def forward(self, seconds: float = 0.0) -> list[CircuitData]:
        """What is forwarded in that time, to ends that read it at once."""
        before, end = len(self.sent), self.now + seconds
        now = self.now
        while now <= end:
            now = self.relay.forward(now)
        self.now = end
        return [message for _, message in self.sent[before:] if isinstance(message, CircuitData)]

    def to(self, peer: bytes, kind: type) -> list[Any]:
        return [message for target, message in self.sent if target == peer and isinstance(message, kind)]


def test_a_circuit_leads_to_a_peer_that_has_reserved_and_back() -> None:
    world = World()
    world.open(A, B)
    assert world.to(B, IncomingCircuit) == [IncomingCircuit(ONE, A)]
    world.data(A, Priority.VOTE, b"there")
    world.data(B, Priority.VOTE, b"back")
    world.forward()
    assert [message.data for message in world.to(B, CircuitData)] == [b"there"]
    assert [message.data for message in world.to(A, CircuitData)] == [b"back"]
    world.relay.close(A, CloseCircuit(ONE, "ended"))
    assert world.to(B, CloseCircuit) == [CloseCircuit(ONE, "ended")] and not world.relay.circuits


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
    world.relay.reserve(B, True)
    world.relay.open(opener, OpenCircuit(ONE, target), 0.0)
    assert world.to(opener, CloseCircuit) == [CloseCircuit(ONE, reason)]
    assert world.refused == {reason: 1} and not world.relay.circuits and not world.to(target, IncomingCircuit)


def test_a_third_peer_can_neither_speak_in_a_circuit_nor_end_it() -> None:
    world = World()
    world.open(A, B)
    world.data(C, Priority.VOTE)
    world.relay.close(C, CloseCircuit(ONE, "ended"))
    world.open(C, D)  # a name that is taken
    assert world.forward() == [] and world.relay.circuits == 1
    assert world.to(C, CloseCircuit) == [CloseCircuit(ONE, "relay-full")]


def test_reservations_and_circuits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for number in range(RESERVATIONS_MAX + 1):
        world.relay.reserve(number.to_bytes(32, "big"), True)
    assert len(world.relay.reservations.peers) == RESERVATIONS_MAX and world.refused == {"relay-full": 1}

    monkeypatch.setattr(module, "CIRCUITS_PER_PEER_MAX", 3)
    monkeypatch.setattr(module, "CIRCUITS_MAX", 4)
    world = World()
    for number, (opener, target) in enumerate([(A, B), (A, C), (A, D), (A, B), (B, C), (B, D)]):
        world.open(opener, target, number.to_bytes(16, "big"))
    assert world.relay.circuits == 4 and world.refused == {"relay-full": 2}
    world.relay.gone(A)
    assert world.relay.circuits == 1
    world.open(A, B, bytes(16))  # the room is there again
    assert world.relay.circuits == 2


def test_whoever_opens_circuits_all_the_time_is_slowed_down() -> None:
    world = World()
    opened = 0
    for second in range(200):
        world.now = float(second)
        for number in range(5):
            name = (5 * second + number).to_bytes(16, "big")
            world.open(A, B, name)
            opened += world.relay.circuits
            world.relay.close(A, CloseCircuit(name, "ended"))
    assert opened == module.CIRCUITS_PER_PEER_MAX + 200 and world.refused == {"relay-too-often": 1_000 - opened}
    world.open(C, B)
    assert world.relay.circuits == 1, "others are not"


def test_a_vote_overtakes_bulk_of_its_own_circuit_and_of_others() -> None:
    world = World()
    world.open(A, B)
    world.open(C, D, TWO)
    for _ in range(4):
        world.data(A, Priority.BULK)
        world.data(C, Priority.BULK, name=TWO)
    world.data(A, Priority.CONTROL, b"control")
    world.data(A, Priority.VOTE, b"a vote")
    assert [(message.circuit, message.lane) for message in world.forward()] == [
        (ONE, Priority.VOTE),
        (ONE, Priority.CONTROL),
        *[(ONE, Priority.BULK), (TWO, Priority.BULK)] * 4,
    ]


def test_while_budgets_hold_bulk_back_a_vote_waits_for_one_record() -> None:
    world = World()
    world.open(A, B)
    for _ in range(WINDOW_BYTES[Priority.BULK] // len(RECORD)):
        world.data(A, Priority.BULK)
    world.relay._circuits[ONE].budget = Budget(len(RECORD), 0)  # one record a second
    world.forward(2.5)
    world.data(A, Priority.VOTE, b"a vote")
    assert world.forward(1.0)[0].lane == Priority.VOTE


def test_budgets_are_bytes_a_second_and_never_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CIRCUIT_BYTES_PER_SECOND", 100_000)
    world = World()
    world.open(A, B)
    world.open(C, D, TWO)
    sent = 0
    for _ in range(3_600):  # an hour
        while len(world.relay._circuits[ONE].lanes[A][2].queue) < 7:
            world.data(A, Priority.BULK)
        sent += sum(len(message.data) for message in world.forward(1.0))
        world.relay._circuits[ONE].lanes[A][2].owed = 0
        world.relay.credit(B, CircuitCredit(ONE, Priority.BULK, WINDOW_BYTES[2]))
    assert sent == pytest.approx(3_600 * 100_000, rel=0.01)
    world.data(C, Priority.BULK, name=TWO)
    assert [message.circuit for message in world.forward()] == [TWO], "another circuit has a budget of its own"


def test_an_end_that_reads_nothing_holds_up_its_circuit_alone_and_one_window_of_memory() -> None:
    world = World()
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
    assert world.relay.circuits == 1 and world.forward(1.0) == []


def test_a_circuit_ends_with_the_link_of_either_end() -> None:
    world = World()
    world.open(A, B)
    world.data(A, Priority.BULK)
    world.relay.gone(B)
    assert world.to(A, CloseCircuit) == [CloseCircuit(ONE, "end-gone")] and world.forward() == []
    assert world.relay.reservations.peers == ()
    world.open(A, B)
    world.data(A, Priority.BULK)
    world.deaf.add(B)  # its queue is full
    assert world.forward() == [] and not world.relay.circuits
    assert world.relay.forward(world.now) == math.inf


PEERS = st.sampled_from((A, B, C, D))
NAMES = st.sampled_from((ONE, TWO))
LANES = st.sampled_from(list(Priority))
STEPS = st.one_of(
    st.tuples(st.just("reserve"), PEERS, st.booleans()),
    st.tuples(st.just("open"), PEERS, st.builds(OpenCircuit, NAMES, PEERS)),
    st.tuples(st.just("data"), PEERS, st.builds(CircuitData, NAMES, LANES, st.sampled_from((b"x", RECORD)))),
    st.tuples(st.just("credit"), PEERS, st.builds(CircuitCredit, NAMES, LANES, st.sampled_from((1, WINDOW_BYTES[2])))),
    st.tuples(st.just("close"), PEERS, st.builds(CloseCircuit, NAMES, st.just("ended"))),
    st.tuples(st.just("gone"), PEERS),
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
            getattr(world.relay, what)(*arguments, *([world.now] if what == "open" else []))
        circuits = world.relay._circuits.values()
        lanes = [lane for circuit in circuits for both in circuit.lanes.values() for lane in both]
        assert all(sum(map(len, lane.queue)) == lane.waiting <= WINDOW_BYTES[lane.number] for lane in lanes)
        assert all(0 <= lane.credit <= WINDOW_BYTES[lane.number] for lane in lanes)
        assert all({*circuit.ends} <= {A, B, C} for circuit in circuits)
        assert {lane for ready in world.relay._ready for lane in ready} <= {*lanes}
        assert world.relay._of_peer == Counter(end for circuit in circuits for end in circuit.ends)


# Sealed from end to end ----------------------------------------------------------------------------------------------


def sessions(one: bytes = ONE, other: bytes = ONE) -> tuple[CircuitSession, CircuitSession]:
    def session(me: Any, peer: Any, name: bytes, initiator: bool) -> CircuitSession:
        static, fresh = (KeyPair.of(bytes([me.public[0] ^ number]) * 32) for number in range(2))
        return CircuitSession(
            me,
            CHAIN,
            name,
            initiator=initiator,
            static=static,
            ephemeral=fresh,
            expected=peer.public,
            versions=WIRE_VERSIONS,
            credit=lambda lane: WINDOW_BYTES[lane],
        )

    return session(ALICE, BOB, one, True), session(BOB, ALICE, other, False)


def records_of(session: CircuitSession) -> list[bytes]:
    found = []
    while record := session.data_to_send():
        found.append(record)
    return found


def established() -> tuple[CircuitSession, CircuitSession, list[bytes]]:
    """Both ends, and four records on their way: two votes, two of bulk."""
    alice, bob = sessions()
    events = exchange_bytes(alice, bob)
    assert [event.peer for _, event in events if isinstance(event, Established)] == [BOB.public, ALICE.public]
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


def test_nothing_is_sent_without_credit() -> None:
    alice, _, _ = established()
    alice._credit = lambda lane: 0 if lane == Priority.VOTE else WINDOW_BYTES[lane]
    alice.outbox.push(Channel.APPLICATION, b"vote", Priority.VOTE)
    alice.outbox.push(Channel.APPLICATION, b"bulk", Priority.BULK)
    assert [record[0] for record in records_of(alice)] == [Priority.BULK]
