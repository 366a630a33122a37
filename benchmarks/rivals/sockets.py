"""Bytes that processes have sent over TCP by the kernel's count: one method for every rival and for us.

`sock_diag` (RFC 3549 netlink) lists all TCP sockets with their `tcp_info`, and /proc has their processes. The figure is
`tcpi_bytes_sent`: stream bytes without headers, with retransmissions, which do not occur on loopback. If a socket closes between
two samples, its bytes since the first of them are lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

LOOK_SECONDS = 1.0  # between samples, each of which takes one or two milliseconds of the measured time
SOCK_DIAG_BY_FAMILY = 20
NETLINK_SOCK_DIAG = 4
DUMP_REQUEST = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
DONE, ERROR = 3, 2
INET_DIAG_INFO = 2
INODE_AT, ATTRIBUTES_AT = 68, 72  # in inet_diag_msg
BYTES_SENT_AT = 200  # in tcp_info, since Linux 4.19
EVERY_STATE = 0xFFFFFFFF

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBBI48x")  # family, protocol, extensions, padding, states, any socket


def sent_by_socket() -> dict[int, int]:
    """Return the bytes sent, by the inode of each TCP socket of this machine."""
    found: dict[int, int] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for body in _dump(family):
            inode = struct.unpack_from("=I", body, INODE_AT)[0]
            if inode:
                found[inode] = max(_bytes_sent(body), default=0)
    return found


def _dump(family: int) -> Iterator[bytes]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << INET_DIAG_INFO - 1, 0, EVERY_STATE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
        netlink.send(_HEADER.pack(_HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, DUMP_REQUEST, 1, 0) + request)
        while True:
            data = netlink.recv(1 << 20)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind == ERROR:
                    raise OSError("the kernel refused to list TCP sockets, so sent bytes cannot be counted")
                if kind == DONE:
                    return
                yield data[_HEADER.size : length]
                data = data[length + 3 & ~3 :]


def _bytes_sent(body: bytes) -> Iterator[int]:
    at = ATTRIBUTES_AT
    while at + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, at)
        if kind == INET_DIAG_INFO and length >= 4 + BYTES_SENT_AT + 8:
            yield struct.unpack_from("=Q", body, at + 4 + BYTES_SENT_AT)[0]
        at += length + 3 & ~3


def family_of(process: int) -> set[int]:
    """Return a process and all its descendants."""
    found, waiting = set(), [process]
    while waiting:
        found.add(one := waiting.pop())
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                waiting += [int(word) for word in task.read_text().split()]
    return found


def sockets_of(processes: Iterable[int]) -> set[int]:
    """Return the inodes of these processes' sockets."""
    inodes = set()
    for process in processes:
        for entry in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    inodes.add(int(target[8:-1]))
    return inodes


class Traffic:
    """A counter of the TCP bytes of a process and its children, sampled periodically so that closed sockets count too."""

    def __init__(self, process: int) -> None:
        self.processor_seconds = 0.0  # of its own samples so far
        self._process = process
        self._most: dict[int, int] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._look()  # raises an error if the kernel does not support it
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def sent(self) -> int:
        self._look()
        return sum(self._most.values())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._look()
            self.processor_seconds = time.thread_time()

    def _look(self) -> None:
        with self._lock:
            mine, counts = sockets_of(family_of(self._process)), sent_by_socket()
            for inode in mine & counts.keys():
                self._most[inode] = max(self._most.get(inode, 0), counts[inode])
