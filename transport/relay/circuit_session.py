"""The session of a circuit's two ends, whose records go through a relay. Sans-IO.

The handshake is that of a direct link, with the circuit's name in the prologue. Then each priority is a lane with a cipher of its
own, so that the relay can let a vote overtake bulk without being able to read, change, repeat or drop any record unnoticed.
Data that goes in and out is one record: the lane in the first byte, then what crosses the relay.

A relay may hold one lane back and let others pass (`RelayWatchdog`):

| lane | it is held back, if the peer says of nothing new that it has arrived |
|---|---|
| votes | for SILENT_SECONDS: a ping goes out each second |
| control, bulk | for WITHHELD_SECONDS, while something is under way |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from protocol.errors import RemoteProtocolError
from protocol.identity import Signer
from protocol.limits import CIRCUIT_RECORD_BYTES_MAX
from transport.wire.framing import TAG_BYTES, ByPriority, Message, Priority
from transport.wire.noise_session import CipherState, KeyPair, NoiseSession, PeerAuthenticated

CREDIT_BYTES_MIN: Final = 1 << 10  # with less credit nothing is sent: slivers cost more than they fill


class CircuitSession(NoiseSession):
    """`credit`: the bytes that the relay takes now in a lane."""

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
        self._lane = Priority.VOTE  # of the record being read

    def receive(self, data: bytes) -> list[PeerAuthenticated | Message]:
        self._lane = Priority(data[0])
        return super().receive(data[1:])

    def next_priority(self) -> Priority | None:
        """The first one in which something waits and may be sent."""
        return next((one for one in Priority if self.outbox.has_waiting(one) and self._credit(one) >= CREDIT_BYTES_MIN), None)

    def data_to_send(self, frame_bytes: int = CIRCUIT_RECORD_BYTES_MAX - TAG_BYTES) -> bytes:
        data, self._ready = self._ready, b""
        if data:
            return bytes([Priority.VOTE]) + data  # the lane that nothing overtakes
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
            raise RemoteProtocolError("bad-frame", f"a record of {len(record)} bytes holds nothing")
        return list(self.inbox.receive_frame(self._opening[self._lane].decrypt(record)))


SILENT_SECONDS: Final = 2.0  # of a relay in use, or a circuit: two pings; then another one is reserved at, or opened
WITHHELD_SECONDS: Final = 8.0  # an uplink of 2 Mbit/s that 64 circuits share carries a record of each in four


class RelayWatchdog:
    """One direction of a circuit, as its speaker sees it."""

    def __init__(self, now: float) -> None:
        self._arrived = [0, 0, 0]  # bytes
        self._since = [now, now, now]  # when more of it had arrived, or nothing was under way

    def on_arrived(self, arrived: ByPriority, now: float) -> None:
        for lane in Priority:
            if arrived[lane] > self._arrived[lane]:
                self._arrived[lane], self._since[lane] = arrived[lane], now

    def is_withholding(self, sent: ByPriority, now: float, *, listens: bool) -> bool:
        """To be asked a few times a second. `listens`: what the peer says is being read; else nothing is known."""
        for lane in Priority:
            if not listens or (lane is not Priority.VOTE and sent[lane] <= self._arrived[lane]):
                self._since[lane] = now
        limits = (SILENT_SECONDS, WITHHELD_SECONDS, WITHHELD_SECONDS)
        return any(now - since >= limit for since, limit in zip(self._since, limits, strict=True))
