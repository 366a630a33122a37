"""Profiles of home links for every emulation of them: the in-memory network, the proxy and TUN devices. Without I/O.

Each peer has an access: an uplink and a downlink that all its links share, a delay and a loss. A path between two peers has the
mean of both delays and of both losses. A profile is a repeating list of moments. Carriers with packets lose packets. In other
carriers a `TcpFlow` emulates TCP: lost segments arrive late, and a window limits the rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from random import Random

from protocol.errors import UserError

MEGABIT_BYTES = 125_000
SEGMENT_BYTES = 1_448  # TCP payload in a packet of 1,500 bytes
CONGESTION_CONTROL = "cubic"  # emulated by flows and set in kernels; the default of most machines
QUEUE_SECONDS = 0.05  # queue of the router before the uplink; more is dropped
WINDOW_SEGMENTS_FIRST = 10  # RFC 6928
HYSTART_SECONDS = 0.004, 0.016  # a delay above an eighth of the round trip, within these bounds, ends slow start
RETRANSMISSION_SECONDS_MIN = 0.2  # Linux, plus the round trip: timeout for a loss without other signs
PROBE_TRIPS = 2  # round trips before the last segment is sent again, unless it was alone in flight (RFC 8985)
DUPLICATES = 3  # segments after a lost one before a fast retransmission
CUBIC_SHRINKS, CUBIC_SCALE = 0.7, 0.4  # window factor after a loss, and scale of its growth (RFC 9438)
MOMENTS_MAX = 100_000  # of a trace file: a day of seconds


@dataclass(frozen=True, slots=True)
class ProfileSegment:
    """One peer's access during one moment of a profile."""

    seconds: float = 1.0
    up: float = math.inf  # bytes per second; 0: no connection
    down: float = math.inf
    round_trip_seconds: float = 0.0  # to a peer with the same access
    loss: float = 0.0  # probability that a packet is lost


@dataclass(frozen=True)
class AccessProfile:
    name: str
    moments: tuple[ProfileSegment, ...]
    shift_seconds: float = 0.0  # start offset in the moments; outages of different peers must not coincide
    _ends: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert all(moment.seconds > 0 for moment in self.moments)
        assert any(moment.up for moment in self.moments) and any(moment.down for moment in self.moments), (
            "nothing would ever arrive"
        )
        object.__setattr__(self, "_ends", tuple(accumulate(moment.seconds for moment in self.moments)))

    def shifted(self, seconds: float) -> AccessProfile:
        return replace(self, shift_seconds=self.shift_seconds + seconds)

    @property
    def seconds(self) -> float:
        """Duration of one repetition."""
        return self._ends[-1]

    @property
    def up_max(self) -> float:
        return max(moment.up for moment in self.moments)

    def segment_at(self, now: float) -> ProfileSegment:
        return self.moments[self._place(now)[0]]

    def _place(self, now: float) -> tuple[int, float]:
        """Return the index of the current moment and its remaining seconds."""
        into = (now + self.shift_seconds) % self._ends[-1]
        place = min(bisect_right(self._ends, into), len(self.moments) - 1)
        return place, self._ends[place] - into

    def finish_time(self, begin: float, size: int, *, up: bool) -> float:
        """Return the time at which the uplink (else the downlink) has carried these bytes, if it begins at `begin`."""
        place, left = self._place(begin)
        while True:
            rate = self.moments[place].up if up else self.moments[place].down
            if len(self.moments) == 1 or size <= rate * left:
                return begin + size / rate
            size, begin = max(0, size - int(rate * left)), begin + left
            place = (place + 1) % len(self.moments)
            left = self.moments[place].seconds


class BottleneckQueue:
    """One direction of an access. All links share it, and it carries their bytes one after another."""

    def __init__(self, profile: AccessProfile, *, up: bool) -> None:
        self.profile, self._up, self.free_at = profile, up, -math.inf

    def finish_time(self, now: float, size: int) -> float:
        return self.profile.finish_time(max(now, self.free_at), size, up=self._up)

    def queue_bytes(self, now: float, size: int) -> float:
        """Queue these bytes and return the time at which they have passed."""
        self.free_at = self.finish_time(now, size)
        return self.free_at

    def queue_packet(self, now: float, size: int) -> float | None:
        """Queue a packet like `queue_bytes`, or drop it and return None if the queue is full."""
        done = self.finish_time(now, size)
        rate = self.profile.segment_at(now).up if self._up else self.profile.segment_at(now).down
        if done - now > QUEUE_SECONDS + (size / rate if rate else 0.0):
            return None
        self.free_at = done
        return done


class AccessLink:
    """One peer's uplink and downlink in one carrier."""

    def __init__(self, profile: AccessProfile) -> None:
        self.profile = profile
        self.up, self.down = BottleneckQueue(profile, up=True), BottleneckQueue(profile, up=False)


@dataclass(frozen=True, slots=True)
class NetworkPath:
    speaker: AccessLink
    hearer: AccessLink

    def round_trip(self, now: float) -> float:
        return (
            self.speaker.profile.segment_at(now).round_trip_seconds + self.hearer.profile.segment_at(now).round_trip_seconds
        ) / 2

    def loss(self, now: float) -> float:
        return (self.speaker.profile.segment_at(now).loss + self.hearer.profile.segment_at(now).loss) / 2


class TcpFlow:
    """One direction of a TCP connection for carriers without packets: slow start, CUBIC (RFC 9438), late segments.

    A sender calls `next_send_at` before each `send`.
    """

    def __init__(self, way: NetworkPath, random: Random) -> None:
        self.way, self._random = way, random
        self.segments = self.lost = 0
        self.window = float(WINDOW_SEGMENTS_FIRST)  # in segments, like the next fields
        self._threshold = math.inf  # below it the window doubles with each round trip
        self._origin = self._begun = self.window  # before and after the last reduction
        self._since = self._lost_at = self._round_ends = self._sent_at = self._arrival = -math.inf
        self._flying = deque[tuple[float, float]]()  # (time of the acknowledgement, segments)
        self._in_flight = 0.0

    def next_send_at(self, now: float) -> float:
        """Return `now` if the window has room, or else the time of the next attempt."""
        while self._flying and self._flying[0][0] <= now:
            at, count = self._flying.popleft()
            self._in_flight -= count
            self._grow(at, count)
        return now if self._in_flight < self.window else self._flying[0][0]

    def send(self, now: float, size: int, *, more: bool = False) -> float:
        """Return the time at which bytes that join the uplink's queue arrive, in order, at the hearer's downlink.

        `more` means that other bytes follow them.
        """
        uplink, round_trip, segments = self.way.speaker.up, self.way.round_trip(now), -(-size // SEGMENT_BYTES)
        if not self._flying:  # an unused window is halved with each timeout
            timeouts = min(64.0, (now - self._sent_at) / (round_trip + RETRANSMISSION_SECONDS_MIN))
            self.window = max(min(self.window, WINDOW_SEGMENTS_FIRST), self.window / 2 ** int(timeouts))
        waits = uplink.free_at - now
        at = uplink.queue_bytes(now, size)
        lost = segments if waits > QUEUE_SECONDS else sum(self._random.random() < self.way.loss(at) for _ in range(segments))
        delay = round_trip / 2
        if lost:
            delay += self._recovery(round_trip, segments, lost, more=more)
        self._note(now, round_trip, waits, lost=bool(lost))
        self.segments, self.lost, self._sent_at = self.segments + segments, self.lost + lost, now
        self._arrival = max(self._arrival, at + delay)
        self._flying.append((at + round_trip, size / SEGMENT_BYTES))  # selective: later segments do not wait for lost ones
        self._in_flight += size / SEGMENT_BYTES
        return self._arrival

    def _recovery(self, round_trip: float, segments: int, lost: int, *, more: bool) -> float:
        """Return the delay of a retransmission. Segments behind the loss reveal it; without any, a probe or the timeout does."""
        if more or segments > DUPLICATES:
            return round_trip
        late = round_trip + RETRANSMISSION_SECONDS_MIN
        if segments + self._in_flight <= 1:
            return late
        return min(late, (PROBE_TRIPS if lost == 1 else PROBE_TRIPS + 1) * round_trip)  # the probe repairs one of several losses

    def _note(self, now: float, round_trip: float, waits: float, *, lost: bool) -> None:
        """Update the window after a send."""
        if lost and now - self._lost_at > round_trip:  # several losses in one round trip count once
            self._lost_at = now
            self._begin(now, max(2.0, CUBIC_SHRINKS * self.window))
        if now >= self._round_ends:  # HyStart: a queue at the start of a round shows that the window is large enough
            self._round_ends = now + round_trip
            if self.window < self._threshold and waits > min(HYSTART_SECONDS[1], max(HYSTART_SECONDS[0], round_trip / 8)):
                self._begin(now, self.window)

    def _begin(self, now: float, window: float) -> None:
        self._since, self._origin = now, self.window
        self.window = self._threshold = self._begun = window

    def _grow(self, now: float, acknowledged: float) -> None:
        if self.window < self._threshold:
            self.window += acknowledged
            return
        elapsed = now - self._since
        flat_after = ((self._origin - self._begun) / CUBIC_SCALE) ** (1 / 3)
        trips = elapsed / max(self.way.round_trip(now), 1e-3)
        friendly = self._begun + 3 * (1 - CUBIC_SHRINKS) / (1 + CUBIC_SHRINKS) * trips  # the growth of Reno
        self.window = max(self.window, CUBIC_SCALE * (elapsed - flat_after) ** 3 + self._origin, friendly)


# Profiles ----------------------------------------------------------------------------------------------------------------


def steady_profile(name: str, up_mbit: float, down_mbit: float, round_trip_ms: float, loss: float = 0.0) -> AccessProfile:
    return AccessProfile(name, (_moment(1.0, up_mbit, down_mbit, round_trip_ms, loss),))


def _moment(seconds: float, up_mbit: float, down_mbit: float, round_trip_ms: float, loss: float) -> ProfileSegment:
    return ProfileSegment(seconds, up_mbit * MEGABIT_BYTES, down_mbit * MEGABIT_BYTES, round_trip_ms / 1e3, loss)


def _flaky() -> AccessProfile:
    """Return two minutes of a bad mobile link: round trips of 50 to 300 ms, losses of 0 to 5 %, and outages."""
    random, moments, round_trip = Random(29), list[ProfileSegment](), 150.0
    for number in range(60):
        round_trip = min(300.0, max(50.0, round_trip + random.uniform(-80.0, 80.0)))
        up = random.uniform(2.0, 10.0)
        if number % 15 == 14:
            moments.append(_moment(1.0, 0.0, 0.0, round_trip, 0.0))  # an outage
        moments.append(_moment(2.0, up, 2 * up, round_trip, random.uniform(0.0, 0.05)))
    return AccessProfile("flaky", tuple(moments))


PROFILES = {
    profile.name: profile
    for profile in (
        steady_profile("lan", 100, 100, 4),  # a home's Wi-Fi
        steady_profile("dsl", 2, 20, 30),
        steady_profile("transatlantic", 100, 100, 90),
        _flaky(),
    )
}
UNLIMITED = AccessProfile("free", (ProfileSegment(),))  # bytes pass without delay
SHIFT_SECONDS = 11.0  # between the profiles of two peers, so that their outages do not coincide


def load_profile(name: str) -> AccessProfile:
    """Return one of `PROFILES`, or the profile of a trace file. Raises `UserError` if `name` is neither."""
    return PROFILES[name] if name in PROFILES else read_trace(Path(name))


def read_trace(file: Path) -> AccessProfile:
    """Read a trace. Each line is a moment: seconds, up and down in Mbit/s, round trip in ms, loss in %; `#` begins a comment.

    Raises `UserError` if the file is not a valid trace.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{str(file)!r} is no profile ({', '.join(PROFILES)}) and no trace file: {error}") from None
    moments = tuple(_moments(file, lines))
    if not any(moment.up for moment in moments) or not any(moment.down for moment in moments):
        raise UserError(f"{file}: a trace needs a row with a positive rate in each direction")
    return AccessProfile(str(file), moments)


def _moments(file: Path, lines: Iterable[str]) -> Iterable[ProfileSegment]:
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            seconds, up, down, round_trip, percent = values = [float(word) for word in words]
            if not (all(map(math.isfinite, values)) and min(values) >= 0 < seconds and percent < 100):
                raise ValueError("out of range")
        except ValueError:
            what = "seconds, up and down in Mbit/s, round trip in ms, loss in %"
            raise UserError(f"{file}:{number}: {line.strip()!r} is not {what}") from None
        if number > MOMENTS_MAX:
            raise UserError(f"{file}: a trace has at most {MOMENTS_MAX:,} lines")
        yield _moment(seconds, up, down, round_trip, percent / 100)
