"""A router of packets between the TUN devices of a scenario, with their profiles. `scenarios/tun.py` starts it.

It is a process of its own, because a scenario's disk reads would delay packets. A packet waits for the speaker's uplink, where a
full queue drops it; it may be lost; it is delayed; and it waits for the hearer's downlink. Packets of one path keep their order.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import signal
import socket
import statistics
import sys
import time
from collections import deque
from pathlib import Path

from scenarios.alarm import hurried
from scenarios.emulation.link_profiles import AccessLink, AccessProfile, NetworkPath, ProfileSegment

READ_BYTES = 1 << 16
PACKETS_AT_ONCE = 64  # from one device, before due packets are delivered
LATE_MAX = 10_000  # packets whose lateness is remembered


class Router:
    def __init__(self) -> None:
        self._accesses: dict[bytes, AccessLink] = {}  # by address, four bytes
        self._devices: dict[int, bytes] = {}  # file -> address
        self._files: dict[bytes, int] = {}
        # (time, number, source, target, packet). Without a source, the packet has passed the downlink as well.
        self._due: list[tuple[float, int, bytes, bytes, bytes]] = []
        self._arrivals: dict[tuple[bytes, bytes], float] = {}
        self._random, self._number = random.Random(0), 0
        self._packets = self._lost = self._dropped = 0
        self._late = deque[float](maxlen=LATE_MAX)

    def learn(self, file: Path) -> None:
        """Read a profile from a file with the name of its host."""
        shift, moments = json.loads(file.read_text())
        profile = AccessProfile(file.name, tuple(ProfileSegment(*moment) for moment in moments), shift)
        self._accesses[socket.inet_aton(file.name)] = AccessLink(profile)

    def attach(self, host: str, file: int) -> None:
        """Attach a device to a host."""
        os.set_blocking(file, False)
        address = socket.inet_aton(host)
        if (old := self._files.get(address)) is not None:
            self._detach(old)
        self._files[address], self._devices[file] = file, address

    def counted(self) -> dict[str, float]:
        late = statistics.median(self._late) if self._late else 0.0
        return {"packets": self._packets, "lost": self._lost, "dropped": self._dropped, "late": late}

    def step(self, listener: socket.socket | None = None) -> bool:
        """Wait for a packet or a due time, and handle it. Return whether a client connects to `listener`."""
        wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
        also = [] if listener is None else [listener.fileno()]
        ready = select.select([*self._devices, *also], [], [], wait)[0]  # takes microseconds, unlike `epoll`
        for file in ready:
            if file in self._devices:
                self._read(file)
        self._deliver()
        return any(file in ready for file in also)

    def _detach(self, file: int) -> None:
        self._files.pop(self._devices.pop(file))
        os.close(file)

    def _read(self, file: int) -> None:
        whence = self._devices.get(file)
        try:
            for _ in range(PACKETS_AT_ONCE if whence is not None else 0):
                packet = os.read(file, READ_BYTES)
                if packet[0] >> 4 == 4:  # IPv6 looks for routers; there are none
                    self._send(whence or b"", packet[16:20], packet)
        except BlockingIOError:
            pass
        except OSError:  # the namespace ended with its last process
            self._detach(file)

    def _send(self, whence: bytes, whither: bytes, packet: bytes) -> None:
        if whither not in self._accesses or whence not in self._accesses:
            return
        now, way = time.monotonic(), NetworkPath(self._accesses[whence], self._accesses[whither])
        self._packets += 1
        sent = way.speaker.up.queue_packet(now, len(packet))
        if sent is None:
            self._dropped += 1
        elif self._random.random() < way.loss(now):
            self._lost += 1
        else:
            arrival = max(self._arrivals.get((whence, whither), 0.0), sent + way.round_trip(now) / 2)
            self._arrivals[whence, whither] = arrival
            self._push(arrival, whence, whither, packet)

    def _push(self, at: float, whence: bytes, whither: bytes, packet: bytes) -> None:
        self._number += 1
        heapq.heappush(self._due, (at, self._number, whence, whither, packet))

    def _deliver(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            at, _, whence, whither, packet = heapq.heappop(self._due)
            if whence:
                through = self._accesses[whither].down.queue_packet(at, len(packet))
                if through is None:
                    self._dropped += 1
                else:
                    self._push(through, b"", whither, packet)
            elif whither in self._files:
                self._late.append(time.monotonic() - at)
                try:
                    os.write(self._files[whither], packet)
                except BlockingIOError:
                    self._dropped += 1
                except OSError:
                    self._detach(self._files[whither])


def obey(router: Router, listener: socket.socket) -> None:
    """Handle one order: a profile's file, a host's device, or none, which only asks for the counters."""
    control, _ = listener.accept()
    with control:
        data, files, _, _ = socket.recv_fds(control, READ_BYTES, 1)
        order = json.loads(data)
        if "profile" in order:
            router.learn(Path(order["profile"]))
        if "device" in order:
            router.attach(order["device"], files[0])
        control.send(json.dumps(router.counted()).encode())


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        router = Router()
        with hurried():
            while True:
                if router.step(listener):
                    obey(router, listener)


if __name__ == "__main__":
    sys.exit(main())
