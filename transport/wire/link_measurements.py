"""Passive measurements of a link from its normal traffic: round trips, throughput, retransmissions. Sans-IO.

A `LinkMeter` belongs to one connection, and limits the size of its frames. A `LinkHistory` belongs to a peer, and outlives its
connections. Time is an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

import statistics
import struct
from collections import deque
from dataclasses import dataclass
from typing import Final

from transport.wire.framing import FRAME_PLAINTEXT_MAX

VOTE_WAIT_SECONDS: Final = 0.025  # longest wait of a vote for the current frame, and again for unsent bytes in the kernel.
# Smaller frames or limits of unsent bytes cost more headers, calls and wake-ups than they save.
PIECE_BYTES_MIN: Final = 4 << 10
PIECE_BYTES_START: Final = 16 << 10  # bytes before the first measurement: 130 ms in all at 2 Mbit/s
UNSENT_BYTES_MAX: Final = 128 << 10  # two frames of the largest size, so that a fast link is never idle between frames
WINDOW_SECONDS: Final = 0.1  # duration of one sample: on most links longer than an answer of the peer's kernel
BURST_SECONDS_MIN: Final = 0.005  # Shorter or smaller bursts only fill buffers, and do not measure the link.
BURST_BYTES_MIN: Final = 64 << 10
TRIPS_KEPT: Final = 5  # pings, whose median ignores two that waited behind other bytes
MINUTE_SECONDS: Final = 60.0
MINUTES_KEPT: Final = 60

assert PIECE_BYTES_MIN < PIECE_BYTES_START < FRAME_PLAINTEXT_MAX < UNSENT_BYTES_MAX

# Fields total_retrans, bytes_acked, notsent_bytes, data_segs_out and dsack_dups of Linux 4.19 and later.
_TCP_INFO = struct.Struct("=100xI16xQ16xI8xI56xI")
TCP_INFO_BYTES: Final = _TCP_INFO.size


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """The kernel's counters of a connection since its start, in bytes unless another unit is named."""

    delivered: int  # bytes that the peer's kernel acknowledged
    unsent: int  # bytes that the kernel has not sent yet
    sent: int  # segments with data, including retransmissions; 0: unknown
    retransmitted: int  # segments, except those reported as duplicates

    @classmethod
    def parse(cls, tcp_info: bytes) -> TcpInfo | None:
        """Parse the structure `tcp_info` of Linux. None: the kernel is too old."""
        if len(tcp_info) < TCP_INFO_BYTES:
            return None
        retransmitted, delivered, unsent, sent, needless = _TCP_INFO.unpack_from(tcp_info)
        return cls(delivered, unsent, sent, retransmitted - needless)


@dataclass(slots=True)
class MinuteStats:
    number: int  # minute of the clock
    trips: int = 0
    trip_least: float = 0.0  # seconds, like the next two fields
    trip_sum: float = 0.0
    trip_most: float = 0.0
    carried: int = 0  # bytes of samples in which bytes always waited
    carrying: float = 0.0  # seconds of these samples
    burst: float = 0.0  # bytes per second of the fastest burst, a lower bound of the throughput
    sent: int = 0  # segments, including retransmissions
    retransmitted: int = 0

    def add_round_trip(self, seconds: float) -> None:
        self.trip_least = min(self.trip_least, seconds) if self.trips else seconds
        self.trips, self.trip_sum, self.trip_most = self.trips + 1, self.trip_sum + seconds, max(self.trip_most, seconds)

    @property
    def bytes_per_second(self) -> float | None:
        return self.carried / self.carrying if self.carrying else self.burst or None


class LinkHistory:
    """The last hour of one peer's links, by the minute, without minutes that have no measurement."""

    def __init__(self) -> None:
        self._minutes: deque[MinuteStats] = deque(maxlen=MINUTES_KEPT)

    def minute_at(self, now: float) -> MinuteStats:
        number = int(now // MINUTE_SECONDS)
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(MinuteStats(number))
        return self._minutes[-1]

    def minutes(self, now: float) -> tuple[MinuteStats, ...]:
        return tuple(minute for minute in self._minutes if minute.number > now // MINUTE_SECONDS - MINUTES_KEPT)

    def bytes_per_second(self, now: float) -> float | None:
        """Return the throughput of the last minute in which bytes always waited during a sample, or else of the fastest burst."""
        minutes = self.minutes(now)
        full = [minute.carried / minute.carrying for minute in minutes if minute.carrying]
        return full[-1] if full else max((minute.burst for minute in minutes), default=0.0) or None

    def retransmitted(self, now: float) -> float | None:
        """Return the share of retransmitted segments. None: none were counted."""
        minutes = self.minutes(now)
        sent, again = sum(minute.sent for minute in minutes), sum(minute.retransmitted for minute in minutes)
        return max(0, again) / sent if sent else None  # A duplicate is reported a round trip later, perhaps in the next minute.


class LinkMeter:
    """The throughput of one connection, and the sizes of frames that follow from it.

    | during a sample                                | the estimated rate becomes                        |
    |---|---|
    | bytes always waited, here and in the kernel    | the geometric mean of the old and the sample's rate |
    | the kernel's queue was empty once              | the sample's rate if that is higher               |

    An empty queue means that this peer was slow, and not the link. Without the second rule, a busy peer would mistake its pauses
    for a slow link, send smaller frames, and become slower.
    """

    def __init__(self, history: LinkHistory) -> None:
        self.history = history
        self.bytes_per_second: float | None = None  # estimated rate; None: not measured
        self._trips: deque[float] = deque(maxlen=TRIPS_KEPT)
        self._since: float | None = None  # start of the sample; None: no bytes wait
        self._delivered = 0  # delivered bytes at the start of the sample
        self._was_dry = True
        self._sent = self._retransmitted = 0  # segments that are in the history already

    @property
    def round_trip_seconds(self) -> float | None:
        return statistics.median_low(self._trips) if self._trips else None

    @property
    def frame_bytes(self) -> int:
        return self._piece(FRAME_PLAINTEXT_MAX)

    @property
    def unsent_bytes(self) -> int:
        return self._piece(UNSENT_BYTES_MAX)

    @property
    def is_slow(self) -> bool:
        return self.bytes_per_second is not None and self.frame_bytes < FRAME_PLAINTEXT_MAX

    def _piece(self, most: int) -> int:
        if self.bytes_per_second is None:
            return PIECE_BYTES_START
        return max(PIECE_BYTES_MIN, min(most, int(VOTE_WAIT_SECONDS * self.bytes_per_second)))

    def add_round_trip(self, seconds: float, now: float) -> None:
        self._trips.append(seconds)
        self.history.minute_at(now).add_round_trip(seconds)

    def on_busy(self, kernel: TcpInfo, now: float) -> None:
        """Measure before each frame, while bytes wait to be sent."""
        if self._since is None:
            self._open(kernel, now, was_dry=True)  # The first delivered bytes were under way before the sample.
            return
        self._was_dry = self._was_dry or kernel.unsent == 0
        if now - self._since >= WINDOW_SECONDS:
            self._sample(kernel, now)
            self._open(kernel, now, was_dry=kernel.unsent == 0)

    def on_idle(self, kernel: TcpInfo, now: float) -> None:
        """End the sample when all bytes are in the kernel."""
        if self._since is not None and now - self._since >= BURST_SECONDS_MIN:
            self._was_dry = True
            self._sample(kernel, now)
        self._since = None

    def count_retransmissions(self, kernel: TcpInfo, now: float) -> None:
        if kernel.sent > self._sent:
            minute = self.history.minute_at(now)
            minute.sent += kernel.sent - self._sent
            minute.retransmitted += kernel.retransmitted - self._retransmitted
            self._sent, self._retransmitted = kernel.sent, kernel.retransmitted

    def _open(self, kernel: TcpInfo, now: float, *, was_dry: bool) -> None:
        self._since, self._delivered, self._was_dry = now, kernel.delivered, was_dry

    def _sample(self, kernel: TcpInfo, now: float) -> None:
        assert self._since is not None and now > self._since
        carried, seconds = kernel.delivered - self._delivered, now - self._since
        rate, minute, old = max(1.0, carried / seconds), self.history.minute_at(now), self.bytes_per_second
        if not self._was_dry:
            minute.carried, minute.carrying = minute.carried + carried, minute.carrying + seconds
            self.bytes_per_second = rate if old is None else (rate * old) ** 0.5
        elif carried >= BURST_BYTES_MIN:
            minute.burst = max(minute.burst, rate)
            self.bytes_per_second = max(rate, old or 0.0)
