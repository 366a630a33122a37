"""The session between the two ends of a circuit, whose records pass through a relay. Sans-IO.

The handshake is that of a direct link, with the circuit's name in the prologue. Then each priority is a lane with its own cipher.
So the relay can let a vote overtake bulk. It cannot read a record, and a changed, repeated or dropped one is noticed. Input and
output of the session are single records: a byte with the lane, then the bytes that the relay forwards.

A relay may withhold one lane and forward others (`RelayWatchdog`):

| lane | counts as withheld if the peer reports no new bytes |
|---|---|
| votes | for SILENT_SECONDS, since a ping is sent each second |
| control, bulk | for WITHHELD_SECONDS, while sent bytes are not reported as arrived |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from protocol.errors import RemoteProtocolError
from protocol.identity import Signer
from protocol.limits import CIRCUIT_RECORD_BYTES_MAX
from transport.wire.framing import TAG_BYTES, ByPriority, Message, Priority
from transport.wire.noise_session import CipherState, KeyPair, NoiseSession, PeerAuthenticated

CREDIT_BYTES_MIN: Final = 1 << 10  # bytes of credit below which a lane sends nothing, since small records are inefficient


class CircuitSession(NoiseSession):
    """A session over a circuit. `credit(lane)` returns the bytes that the relay accepts now in a lane."""

    def __init__(
        self,
        identity: Signer,
        chain_id: bytes,
        name: bytes,
        *,
        initiator: bool,
        static: KeyPair,
        ephemeral: KeyPair,
        expected: bytes,
        credit: Callable[[Priority], int],
    ) -> None:
        super().__init__(
            identity,
            chain_id,
            initiator=initiator,
            static=static,
            ephemeral=ephemeral,
            expected=expected,
            context=b"circuit" + name,
        )
        self._credit = credit
        self._sealing: Sequence[CipherState] = ()
        self._opening: Sequence[CipherState] = ()
        self._lane = Priority.VOTE  # lane of the record that is being decrypted

    def receive(self, data: bytes) -> list[PeerAuthenticated | Message]:
        self._lane = Priority(data[0])
        return super().receive(data[1:])

    def next_priority(self) -> Priority | None:
        """Return the first priority with a message and credit to send it. None: there is none."""
        return next((one for one in Priority if self.outbox.has_waiting(one) and self._credit(one) >= CREDIT_BYTES_MIN), None)

    def data_to_send(self, frame_bytes: int = CIRCUIT_RECORD_BYTES_MAX - TAG_BYTES) -> bytes:
        data, self._ready = self._ready, b""
        if data:
            return bytes([Priority.VOTE]) + data  # Handshake bytes use the lane that no other lane overtakes.
        lane = None if self._dead or not self._sealing else self.next_priority()
        if lane is None:
            return b""
        plaintext = self.outbox.next_frame(min(frame_bytes, self._credit(lane) - TAG_BYTES), (lane,))
        return bytes([lane]) + self._sealing[lane].encrypt(plaintext)

    def _establish(self) -> list[PeerAuthenticated | Message]:
        events = super()._establish()
        assert self._ciphers is not None
        self._sealing, self._opening = (cipher.split_by_priority(len(Priority)) for cipher in self._ciphers)
        return events

    def _read_frame(self) -> list[PeerAuthenticated | Message] | None:
        if not self._buffer:
            return None
        record = self._take(len(self._buffer))
        if len(record) <= TAG_BYTES:
            raise RemoteProtocolError("bad-frame", f"a record of {len(record)} bytes has no content")
        return list(self.inbox.receive_frame(self._opening[self._lane].decrypt(record)))


# Silence of a relay (two pings) after which this peer reserves another relay or opens another circuit.
SILENT_SECONDS: Final = 2.0
WITHHELD_SECONDS: Final = 8.0  # timeout of arrival; 2 Mbit/s carry a record of each of 64 circuits in four seconds


class RelayWatchdog:
    """A detector of lanes that a relay withholds. It watches one direction of a circuit, at the sender."""

    def __init__(self, now: float) -> None:
        self._arrived = [0, 0, 0]  # lane -> arrived bytes, by the last report of the other peer
        # By lane, the start of its timeout: the last time at which a report contained new bytes, or no report was due.
        self._since = [now, now, now]

    def on_arrived(self, arrived: ByPriority, now: float) -> None:
        for lane in Priority:
            if arrived[lane] > self._arrived[lane]:
                self._arrived[lane], self._since[lane] = arrived[lane], now

    def is_withholding(self, sent: ByPriority, now: float, *, listens: bool) -> bool:
        """Return whether the relay withholds a lane. Call this a few times a second.

        `listens`: this peer reads the reports of arrival. While it does not, the timeouts do not run.
        """
        for lane in Priority:
            if not listens or (lane is not Priority.VOTE and sent[lane] <= self._arrived[lane]):
                self._since[lane] = now
        limits = (SILENT_SECONDS, WITHHELD_SECONDS, WITHHELD_SECONDS)
        return any(now - since >= limit for since, limit in zip(self._since, limits, strict=True))
