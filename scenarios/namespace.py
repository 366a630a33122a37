"""A process in a network namespace of its own: `python -m scenarios.namespace MODULE …` runs a module behind a TUN device.

It imports little: a process that makes a user namespace must have one thread, and numpy starts more. It needs neither root nor
iproute2.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from protocol.errors import UserError

VARIABLE = "FOLKMOOT_TUN"  # the router's socket, this peer's host, and the congestion control
NETMASK = "255.255.255.0"
PACKET_BYTES = 1_500
# Constants of Linux headers.
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
TUN_SET, TUN_PACKETS = 0x400454CA, 0x1001
SET_FLAGS, SET_ADDRESS, SET_NETMASK, SET_MTU = 0x8914, 0x8916, 0x891C, 0x8922
UP_AND_RUNNING = 0x41


def enter() -> None:
    """Move this process to new namespaces, before any thread starts. Raises `UserError` if that is not allowed."""
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        raise UserError("network namespaces exist only on Linux")
    if libc.unshare(NEW_USER | NEW_NETWORK):
        raise UserError(f"cannot make user and network namespaces: {os.strerror(ctypes.get_errno())}")
    # Keep the same user inside, so that files keep their owner. Its rights in the namespace end with this process.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def open_device(host: str) -> int:
    """Make a TUN device with this address, set it up, and return its file. Raises `UserError` if that fails."""
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUN_SET, struct.pack("16sH22x", b"tun0", TUN_PACKETS))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for request, address in ((SET_ADDRESS, host), (SET_NETMASK, NETMASK)):
                where = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
                fcntl.ioctl(control, request, struct.pack("16s16s8x", b"tun0", where))
            fcntl.ioctl(control, SET_MTU, struct.pack("16si20x", b"tun0", PACKET_BYTES))
            for name in (b"lo", b"tun0"):
                fcntl.ioctl(control, SET_FLAGS, struct.pack("16sH22x", name, UP_AND_RUNNING))
    except OSError as error:
        raise UserError(f"cannot make a TUN device (/dev/net/tun): {error.strerror}") from None
    return device


def pin_congestion_control(name: str) -> None:
    """Set the congestion control of every TCP socket of this process.

    A namespace's default is limited to the algorithms that the machine allows to all users.
    """
    make = socket.socket.__init__

    def pinned(self: socket.socket, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        if self.family in (socket.AF_INET, socket.AF_INET6) and self.type == socket.SOCK_STREAM:
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())

    setattr(socket.socket, "__init__", pinned)  # noqa: B010 - as in the proxy: one function of the library below
    try:
        socket.socket().close()
    except OSError as error:
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        raise UserError(f"congestion control {name!r}: {error.strerror}; this kernel has {' '.join(known)}") from None


def join(path: str, host: str, congestion: str) -> None:
    """Attach this process to the router at `host`."""
    enter()
    device = open_device(host)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.connect(path)
        socket.send_fds(control, [json.dumps({"device": host}).encode()], [device])
        control.recv(1 << 16)
    os.close(device)
    pin_congestion_control(congestion)


def main() -> int:
    module, *arguments = sys.argv[1:]
    try:
        if module == "try":
            host, congestion = arguments
            enter()
            os.close(open_device(host))
            pin_congestion_control(congestion)
            return 0
        path, host, congestion = os.environ[VARIABLE].split()
        join(path, host, congestion)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    result: int = importlib.import_module(module).main(arguments)
    return result


if __name__ == "__main__":
    sys.exit(main())
