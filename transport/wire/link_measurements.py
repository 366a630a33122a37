"""Passive measurements of a link from its normal traffic: round trips, throughput, retransmissions. Sans-IO.

A `LinkMeter` belongs to one connection, and limits the size of that connection's frames. A `LinkHistory` belongs to a peer, and
outlives the peer's connections. Time is an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

import statistics
import struct
from collections import deque
from dataclasses import dataclass
from typing import Final

from transport.wire.framing import FRAME_PLAINTEXT_MAX

VOTE_WAIT_SECONDS: Final = 0.025  # longest wait of a vote for the current frame, and as long again for unsent bytes in the kernel
# Least size of a frame, and least limit of unsent bytes: smaller ones cost more headers, calls and wake-ups than they save.
PIECE_BYTES_MIN: Final = 4 << 10
PIECE_BYTES_START: Final = 16 << 10  # frame size and limit of unsent bytes before a measurement: 130 ms at 2 Mbit/s
# Most unsent bytes in the kernel: two frames of the largest size, so that a fast link is never idle between frames.
UNSENT_BYTES_MAX: Final = 128 << 10
WINDOW_SECONDS: Final = 0.1  # duration of one sample: on most links, the peer's kernel answers sooner
BURST_SECONDS_MIN: Final = 0.005  # least duration of a burst that measures the link; shorter or smaller bursts only fill buffers
BURST_BYTES_MIN: Final = 64 << 10
TRIPS_KEPT: Final = 5  # round trips of pings whose median is used: it ignores two that waited behind other bytes
MINUTE_SECONDS: Final = 60.0
MINUTES_KEPT: Final = 60

assert PIECE_BYTES_MIN < PIECE_BYTES_START < FRAME_PLAINTEXT_MAX < UNSENT_BYTES_MAX

# The fields total_retrans, bytes_acked, notsent_bytes, data_segs_out and dsack_dups in `tcp_info` of Linux 4.19 and later.
_TCP_INFO = struct.Struct("=100xI16xQ16xI8xI56xI")
TCP_INFO_BYTES: Final = _TCP_INFO.size


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """The kernel's counters of a TCP connection since its start."""

    delivered: int  # bytes that the peer's kernel acknowledged
    unsent: int  # bytes that the kernel has not sent yet
    sent: int  # segments with data that the kernel sent, including retransmissions; 0: unknown
    retransmitted: int  # retransmitted segments, except those that the peer reported as duplicates

    @classmethod
    def parse(cls, tcp_info: bytes) -> TcpInfo | None:
        """Parse the structure `tcp_info` of Linux. None: the kernel is too old to have all fields."""
        if len(tcp_info) < TCP_INFO_BYTES:
            return None
        retransmitted, delivered, unsent, sent, needless = _TCP_INFO.unpack_from(tcp_info)
        return cls(delivered, unsent, sent, retransmitted - needless)


@dataclass(slots=True)
class MinuteStats:
    number: int  # the monotonic clock in whole minutes
    trips: int = 0
    trip_least: float = 0.0  # shortest round trip in seconds; the next two fields also have seconds
    trip_sum: float = 0.0
    trip_most: float = 0.0
    carried: int = 0  # bytes delivered in samples during which bytes always waited to be sent
    carrying: float = 0.0  # duration of those samples in seconds
    burst: float = 0.0  # bytes per second of the fastest burst, a lower bound of the throughput
    sent: int = 0  # segments that were sent, including retransmissions
    retransmitted: int = 0

    def add_round_trip(self, seconds: float) -> None:
        self.trip_least = min(self.trip_least, seconds) if self.trips else seconds
        self.trips, self.trip_sum, self.trip_most = self.trips + 1, self.trip_sum + seconds, max(self.trip_most, seconds)

    @property
    def bytes_per_second(self) -> float | None:
        return self.carried / self.carrying if self.carrying else self.burst or None


class LinkHistory:
    """Measurements of one peer's links in the last hour, by the minute. Minutes without a measurement are omitted."""

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
        """Return the throughput of the last hour, or None.

        The latest minute with a sample during which bytes always waited decides, or else the fastest burst.
        """
        minutes = self.minutes(now)
        full = [minute.carried / minute.carrying for minute in minutes if minute.carrying]
        return full[-1] if full else max((minute.burst for minute in minutes), default=0.0) or None

    def retransmitted(self, now: float) -> float | None:
        """Return the share of retransmitted segments. None: none were counted."""
        minutes = self.minutes(now)
        sent, again = sum(minute.sent for minute in minutes), sum(minute.retransmitted for minute in minutes)
        return max(0, again) / sent if sent else None  # A duplicate is reported later, maybe in the next minute.


class LinkMeter:
    """The meter of one connection: it estimates the throughput, and derives the sizes of frames.

    | during a sample                                | the estimated rate becomes                        |
    |---|---|
    | bytes always waited, here and in the kernel    | the geometric mean of the old and the sample's rate |
    | the kernel's queue was empty once              | the sample's rate if that is higher               |

    If the kernel's queue is empty, this peer was slow, and not the link. Without the second row, a busy peer would mistake its
    pauses for a slow link, send smaller frames, and become slower.
    """

    def __init__(self, history: LinkHistory) -> None:
        self.history = history
        self.bytes_per_second: float | None = None  # estimated rate; None: not measured
        self._trips: deque[float] = deque(maxlen=TRIPS_KEPT)
        self._since: float | None = None  # start of the current sample; None: no bytes wait to be sent
        self._delivered = 0  # bytes that were delivered at the start of the sample
        self._was_dry = True
        self._sent = self._retransmitted = 0  # segments that the history already includes

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
        """Measure the rate. Called before each frame, while bytes wait to be sent."""
        if self._since is None:
            self._open(kernel, now, was_dry=True)  # The first delivered bytes were sent before the sample.
            return
        self._was_dry = self._was_dry or kernel.unsent == 0
        if now - self._since >= WINDOW_SECONDS:
            self._sample(kernel, now)
            self._open(kernel, now, was_dry=kernel.unsent == 0)

    def on_idle(self, kernel: TcpInfo, now: float) -> None:
        """End the sample. Called when the kernel has taken over all bytes."""
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
