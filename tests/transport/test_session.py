"""Two connected sessions: all changes of bytes in flight, and all lies of a peer in a handshake."""

from __future__ import annotations

import itertools

import pytest

from protocol import codec
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.identity import Identity
from protocol.limits import BLOB_BYTES_MAX, BLOB_CHUNK_BYTES, MESSAGE_BYTES_MAX
from protocol.messages import BlobChunk
from tests.transport.helpers import ALICE, BOB, CAROL, CHAIN, digest, exchange_bytes, joined_sessions, make_session
from transport.wire import framing, noise_session
from transport.wire.framing import FRAME_PLAINTEXT_MAX, QUEUE_BYTES_MAX, Channel, Inbox, Message, Outbox, Priority
from transport.wire.noise_session import HANDSHAKE_BYTES, PREAMBLE_BYTES, KeyPair, NoiseSession, PeerAuthenticated


def send(session: NoiseSession, data: bytes, priority: Priority = Priority.CONTROL) -> bytes:
    assert session.outbox.push(Channel.APPLICATION, data, priority)
    return session.data_to_send()


def messages(events: list[PeerAuthenticated | Message]) -> list[bytes]:
    return [event.data for event in events if isinstance(event, Message)]


def refusal(session: NoiseSession, data: bytes) -> str | None:
    """Return the reason for which `data` is refused, or None. A refused session must be dead."""
    try:
        session.receive(data)
    except RemoteProtocolError as error:
        with pytest.raises(LocalProtocolError):
            session.receive(b"")
        session.data_to_send()  # the earlier part of the handshake
        assert session.data_to_send() == b""
        return error.reason
    return None


def test_both_sides_learn_each_others_key() -> None:
    initiator, responder = make_session(ALICE, True), make_session(BOB, False)
    events = dict(exchange_bytes(initiator, responder))
    assert (initiator.peer, responder.peer) == (BOB.public, ALICE.public)
    assert isinstance(events[initiator], PeerAuthenticated)
    assert events[initiator].peer == BOB.public
    assert events[responder].incarnation != events[initiator].incarnation


def recorded_conversation() -> tuple[list[bytes], list[bytes]]:
    """Return the chunks that each side sends in a handshake and one message each way."""
    initiator, responder = make_session(ALICE, True), make_session(BOB, False)
    sent: dict[NoiseSession, list[bytes]] = {initiator: [], responder: []}
    initiator.outbox.push(Channel.APPLICATION, b"from alice", Priority.VOTE)
    responder.outbox.push(Channel.APPLICATION, b"from bob" * 20, Priority.BULK)
    while True:
        before = sum(map(len, sent.values()))
        for sender, receiver in ((initiator, responder), (responder, initiator)):
            while data := sender.data_to_send():
                sent[sender].append(data)
                receiver.receive(data)
        if sum(map(len, sent.values())) == before:
            return sent[initiator], sent[responder]


def test_every_split_of_the_bytes_gives_the_same_events() -> None:
    to_responder = b"".join(recorded_conversation()[0])
    for cut in range(len(to_responder) + 1):
        responder = make_session(BOB, False)
        events = responder.receive(to_responder[:cut]) + responder.receive(to_responder[cut:])
        assert [type(event) for event in events] == [PeerAuthenticated, Message]
        assert messages(events) == [b"from alice"]
    responder = make_session(BOB, False)
    assert messages([event for byte in to_responder for event in responder.receive(bytes([byte]))]) == [b"from alice"]


@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_a_flipped_bit_anywhere_is_never_accepted(flip: int) -> None:
    """The data are refused, or awaited until the deadline if a length grew. They give no message and no other peer."""
    sent_by_initiator, sent_by_responder = (b"".join(chunks) for chunks in recorded_conversation())
    for receives, data in ((False, sent_by_initiator), (True, sent_by_responder)):
        frame_at = PREAMBLE_BYTES + sum(HANDSHAKE_BYTES[1:2] if receives else HANDSHAKE_BYTES[::2])
        for position in range(len(data)):
            changed = bytearray(data)
            changed[position] ^= flip
            receiver = make_session(ALICE if receives else BOB, receives)
            reason, before = None, []
            try:
                before = receiver.receive(bytes(changed[:frame_at]))
                before += receiver.receive(bytes(changed[frame_at:]))
            except RemoteProtocolError as error:
                reason = error.reason
            assert not messages(before), position
            if position < frame_at:
                # The first message holds only a key. The responder accepts a changed one, but its answer cannot be decrypted.
                assert reason is not None, position
            else:
                assert reason in ("bad-tag", "bad-frame") or position < frame_at + 2, position


def test_a_changed_first_message_is_noticed_by_the_initiator() -> None:
    for position in range(PREAMBLE_BYTES, PREAMBLE_BYTES + HANDSHAKE_BYTES[0]):
        initiator, responder = make_session(ALICE, True), make_session(BOB, False)
        first = bytearray(initiator.data_to_send())
        first[position] ^= 0x80
        responder.receive(bytes(first))
        assert refusal(initiator, responder.data_to_send()) == "handshake", position


def test_a_frame_length_that_was_made_longer_is_refused_with_the_next_frame() -> None:
    initiator, responder = joined_sessions()
    first = bytearray(send(initiator, b"one"))
    first[1] += 1
    assert refusal(responder, bytes(first)) is None
    assert refusal(responder, send(initiator, b"two")) == "bad-tag"


@pytest.mark.parametrize(
    ("position", "reason"), [(0, "not-folkmoot"), (7, "not-folkmoot"), (9, "wrong-version"), (10, "wrong-chain")]
)
def test_the_preamble_tells_why_two_programs_do_not_talk(position: int, reason: str) -> None:
    preamble = bytearray(make_session(ALICE, True).data_to_send())
    preamble[position] ^= 0x10
    assert refusal(make_session(BOB, False), bytes(preamble)) == reason


def test_another_protocol_is_refused_at_its_first_line() -> None:
    assert refusal(make_session(BOB, False), b"GET ") == "not-folkmoot"


def test_another_chain_is_refused_by_both_sides() -> None:
    assert refusal(make_session(BOB, False, chain=digest(b"another")), make_session(ALICE, True).data_to_send()) == "wrong-chain"
    initiator, responder = make_session(ALICE, True), make_session(BOB, False, chain=digest(b"another"))
    with pytest.raises(RemoteProtocolError, match="another network"):
        responder.receive(initiator.data_to_send())
    assert refusal(initiator, responder.data_to_send()) == "wrong-chain"


def rewritten(data: bytes, preamble: bytes) -> bytes:
    return preamble + data[PREAMBLE_BYTES:]


def test_a_chain_cannot_be_disguised_by_rewriting_the_preamble() -> None:
    initiator, responder = make_session(ALICE, True), make_session(BOB, False, chain=digest(b"another"))
    to_responder = initiator.data_to_send()
    responder.receive(rewritten(to_responder, make_session(BOB, True, chain=digest(b"another")).data_to_send()[:PREAMBLE_BYTES]))
    assert refusal(initiator, rewritten(responder.data_to_send(), to_responder[:PREAMBLE_BYTES])) == "handshake"


@pytest.mark.parametrize("newer_opens", [True, False])
def test_peers_of_two_versions_part_and_each_says_which_one_the_other_speaks(
    newer_opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(session: NoiseSession, data: bytes, ours: int, theirs: int) -> None:
        monkeypatch.setattr(noise_session, "WIRE_VERSION", ours)
        with pytest.raises(
            RemoteProtocolError, match=f"the peer speaks wire version {theirs}, this peer {ours}: update"
        ) as caught:
            session.receive(data)
        assert caught.value.reason == "wrong-version" and session.peer is None

    opens, answers = (4, 3) if newer_opens else (3, 4)
    monkeypatch.setattr(noise_session, "WIRE_VERSION", opens)
    initiator, responder = make_session(ALICE, True), make_session(BOB, False)
    receive(responder, initiator.data_to_send(), answers, opens)
    receive(initiator, responder.data_to_send(), opens, answers)


def test_a_version_cannot_be_disguised_by_rewriting_the_preamble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side learns in the handshake that the other one uses its own version."""
    responder, preamble = make_session(BOB, False), make_session(ALICE, True).data_to_send()[:PREAMBLE_BYTES]
    monkeypatch.setattr(noise_session, "WIRE_VERSION", 4)
    newer = make_session(ALICE, True)
    first = newer.data_to_send()
    monkeypatch.undo()
    responder.receive(rewritten(first, preamble))
    answer = responder.data_to_send()
    monkeypatch.setattr(noise_session, "WIRE_VERSION", 4)
    assert refusal(newer, rewritten(answer, first[:PREAMBLE_BYTES])) == "handshake"


class Forger:
    """A signer that claims a key and signs with another one."""

    def __init__(self, claimed: Identity, actual: Identity) -> None:
        self.public, self._actual = claimed.public, actual

    def sign(self, data: bytes) -> bytes:
        return self._actual.sign(data)


@pytest.mark.parametrize("forger_initiates", [True, False])
def test_a_key_that_the_peer_cannot_sign_for_is_refused(forger_initiates: bool) -> None:
    forger, honest = make_session(CAROL, forger_initiates), make_session(BOB, not forger_initiates)
    forger._identity = Forger(ALICE, CAROL)
    with pytest.raises(RemoteProtocolError) as caught:
        exchange_bytes(forger, honest)
    assert caught.value.reason == "bad-signature"
    assert honest.peer is None


def test_a_signature_of_one_handshake_is_refused_in_another() -> None:
    signatures: list[bytes] = []

    class Recorder(Forger):
        def sign(self, data: bytes) -> bytes:
            signatures.append(super().sign(data))
            return signatures[0]

    for ephemeral, accepted in ((0, True), (1, False)):
        replayer, honest = make_session(ALICE, True, ephemeral=ephemeral), make_session(BOB, False)
        replayer._identity = recorder = Recorder(ALICE, ALICE)
        assert recorder.public == ALICE.public
        if accepted:
            exchange_bytes(replayer, honest)
        else:
            with pytest.raises(RemoteProtocolError, match="bad-signature"):
                exchange_bytes(replayer, honest)


def test_a_signature_is_not_accepted_from_the_other_role() -> None:
    class Reflector(Forger):
        def sign(self, data: bytes) -> bytes:
            return super().sign(data.replace(b"responder", b"initiator"))

    reflector, honest = make_session(BOB, False), make_session(ALICE, True)
    reflector._identity = Reflector(BOB, BOB)
    with pytest.raises(RemoteProtocolError, match="bad-signature"):
        exchange_bytes(honest, reflector)


def test_only_the_expected_peer_is_accepted() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        exchange_bytes(make_session(ALICE, True, expected=CAROL.public), make_session(BOB, False))
    assert caught.value.reason == "wrong-peer"
    exchange_bytes(make_session(ALICE, True, expected=BOB.public), make_session(BOB, False))


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    to_responder = recorded_conversation()[0]
    fresh = NoiseSession(
        BOB, CHAIN, initiator=False, static=KeyPair.from_private(bytes([7]) * 32), ephemeral=KeyPair.from_private(bytes([8]) * 32)
    )
    assert refusal(fresh, b"".join(to_responder)) == "handshake"


def test_a_replayed_frame_is_refused() -> None:
    initiator, responder = joined_sessions()
    frame = send(initiator, b"once")
    assert messages(responder.receive(frame)) == [b"once"]
    assert refusal(responder, frame) == "bad-tag"


def test_a_reordered_frame_is_refused() -> None:
    initiator, responder = joined_sessions()
    send(initiator, b"first")
    assert refusal(responder, send(initiator, b"second")) == "bad-tag"


def test_a_reflected_frame_is_refused() -> None:
    initiator, _ = joined_sessions()
    assert refusal(initiator, send(initiator, b"to myself")) == "bad-tag"


def test_a_frame_that_holds_nothing_is_refused() -> None:
    for length in range(17):
        _, responder = joined_sessions()
        assert refusal(responder, length.to_bytes(2, "big")) == "bad-frame"


def test_a_connection_that_ends_inside_a_handshake_or_frame_is_truncated() -> None:
    initiator, responder = joined_sessions()
    responder.receive(send(initiator, b"cut")[:-1])
    for session in (responder, make_session(BOB, False)):
        with pytest.raises(RemoteProtocolError, match="truncated"):
            session.receive_eof()
    clean, _ = joined_sessions()
    clean.receive_eof()


# Framing: what an authenticated peer may get wrong --------------------------------------------------------------------


def record(flags: int, data: bytes) -> bytes:
    return bytes([flags]) + len(data).to_bytes(2, "big") + data


@pytest.mark.parametrize(
    "plaintext",
    [
        b"\x00",  # half a header
        b"\x00\x00",
        b"\x00\x00\x05abcd",  # longer than its frame
        record(3, b"x"),  # no such priority
        record(0b10000, b"x"),  # unknown flag
        record(8, b""),  # an empty fragment
        record(8, b"a") + record(0, b""),
        record(8, b"a") + record(4, b"b"),  # a message that changes its channel
    ],
)
def test_a_malformed_record_is_refused(plaintext: bytes) -> None:
    initiator, responder = joined_sessions()
    ciphertext = initiator._ciphers[0].encrypt(plaintext)
    assert refusal(responder, len(ciphertext).to_bytes(2, "big") + ciphertext) == "bad-record"


def test_an_oversized_message_is_refused_before_it_is_whole() -> None:
    inbox, fragment = Inbox(), record(8, bytes(FRAME_PLAINTEXT_MAX - 3))
    with pytest.raises(RemoteProtocolError) as caught:
        for _ in itertools.count():
            inbox.receive_frame(fragment)
    assert caught.value.reason == "oversized"
    assert sum(inbox.received) <= MESSAGE_BYTES_MAX + FRAME_PLAINTEXT_MAX


@pytest.mark.parametrize("size", [0, 1, FRAME_PLAINTEXT_MAX - 3, FRAME_PLAINTEXT_MAX - 2, 200_000, MESSAGE_BYTES_MAX])
def test_a_message_of_any_size_arrives_whole(size: int) -> None:
    initiator, responder = joined_sessions()
    data = bytes(range(256)) * (size // 256 + 1)
    initiator.outbox.push(Channel.LINK, data[:size], Priority.BULK)
    events = [event for _, event in exchange_bytes(initiator, responder)]
    assert events == [Message(Channel.LINK, Priority.BULK, data[:size])]
    assert initiator.outbox.sent == responder.inbox.received == (0, 0, size)


def test_messages_of_all_priorities_interleave_and_stay_whole() -> None:
    initiator, responder = joined_sessions()
    expected = {
        priority: [bytes([priority, n]) * size for n, size in enumerate((3, 70_000, 0, 150_000))] for priority in Priority
    }
    for priority, queue in expected.items():
        for data in queue:
            initiator.outbox.push(Channel.APPLICATION, data, priority)
    seen = [event for _, event in exchange_bytes(initiator, responder) if isinstance(event, Message)]
    for priority, queue in expected.items():
        assert [event.data for event in seen if event.priority == priority] == queue


def test_bulk_delays_a_vote_by_one_frame() -> None:
    initiator, responder = joined_sessions()
    initiator.outbox.push(Channel.APPLICATION, bytes(MESSAGE_BYTES_MAX), Priority.BULK)
    for _ in range(3):
        assert not responder.receive(initiator.data_to_send())
    initiator.outbox.push(Channel.APPLICATION, b"control", Priority.CONTROL)
    initiator.outbox.push(Channel.APPLICATION, b"vote", Priority.VOTE)
    assert messages(responder.receive(initiator.data_to_send())) == [b"vote", b"control"]


def test_no_bulk_travels_behind_a_vote_in_a_frame_of_a_slow_link() -> None:
    outbox = Outbox()
    outbox.push(Channel.APPLICATION, bytes(100_000), Priority.BULK)
    assert len(outbox.next_frame(6_000)) == 6_000
    for data, priority in ((b"control", Priority.CONTROL), (b"vote", Priority.VOTE)):
        outbox.push(Channel.APPLICATION, data, priority)
    assert [message.data for message in Inbox().receive_frame(outbox.next_frame(6_000))] == [b"vote", b"control"]
    outbox.push(Channel.APPLICATION, b"control", Priority.CONTROL)
    assert len(outbox.next_frame(6_000)) == 6_000, "behind anything else there is some"
    outbox.push(Channel.APPLICATION, b"vote", Priority.VOTE)
    assert len(outbox.next_frame()) == FRAME_PLAINTEXT_MAX, "and where frames are large, too"


def test_small_messages_share_one_frame() -> None:
    initiator, responder = joined_sessions()
    for n in range(100):
        initiator.outbox.push(Channel.APPLICATION, b"%d" % n, Priority.VOTE)
    assert messages(responder.receive(initiator.data_to_send())) == [b"%d" % n for n in range(100)]
    assert initiator.data_to_send() == b""


@pytest.mark.parametrize("priority", Priority)
def test_a_queue_is_bounded_by_bytes_also_for_empty_messages(priority: Priority, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox, count = Outbox(), 0
    with monkeypatch.context() as patched:
        bound = QUEUE_BYTES_MAX[priority] // 32
        patched.setattr(framing, "QUEUE_BYTES_MAX", dict.fromkeys(Priority, bound))
        while outbox.push(Channel.APPLICATION, b"", priority):
            count += 1
        assert 0 < count <= bound // 64
        assert outbox.push(Channel.APPLICATION, b"", Priority((priority + 1) % 3)), "each priority has a bound of its own"
    while outbox.next_frame():
        pass
    assert outbox.push(Channel.APPLICATION, bytes(MESSAGE_BYTES_MAX), priority)


def test_a_full_chunk_of_the_largest_blob_fits_one_frame() -> None:
    outbox = Outbox()
    chunk = BlobChunk(bytes(32), BLOB_BYTES_MAX - BLOB_CHUNK_BYTES, BLOB_BYTES_MAX, bytes(BLOB_CHUNK_BYTES))
    outbox.push(Channel.LINK, codec.encode(chunk), Priority.BULK)
    assert FRAME_PLAINTEXT_MAX - 64 < len(outbox.next_frame()) <= FRAME_PLAINTEXT_MAX
    assert not outbox
