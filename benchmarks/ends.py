"""One end of a connection that `benchmarks.transport` measures: `python -m benchmarks.ends '{"who": "ours", …}'`.

A receiver prints its port, and at its end the received amounts. A sender connects, sends for some seconds and ends. Times are
those of the machine's monotonic clock, which all processes share. Plain TCP and TLS are blocking Python sockets with
length-prefixed messages and without priorities. A due vote is sent after the current call returns, and its delay counts from the
due time.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import selectors
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trio

from protocol import codec
from protocol.addresses import format_address, parse_address
from protocol.identity import Ed25519Verifier, Identity, Signed, signing_preimage
from protocol.limits import MESSAGE_BYTES_MAX
from protocol.messages import Prepare
from storage.disk_blob_store import DiskBlobStore
from transport.network import DataReceived, PeerConnected, PeerDisconnected, Priority
from transport.swarm import Swarm

CHAIN = hashlib.sha256(b"benchmarks.transport").digest()
BULK_BYTES = 65_408  # of one message, as of a blob's chunk
WAITING_BYTES = 2 << 20  # bulk bytes in the queue of one of our senders
POLL_SECONDS = 0.002  # a link of 1 GB/s sends this amount in that time
READ_BYTES = 256 << 10  # per read, as in `transport.swarm`
PRESIGNED = 500  # messages of a sender that repeats them, because signing is not measured
WARM_SECONDS = 1.0  # not counted
LENGTH = struct.Struct(">I")
STAMP = struct.Struct(">d")
BULK, VOTE, SMALL = b"b", b"v", b"s"


@dataclass(frozen=True)
class Plan:
    who: str  # "ours", "tcp", "tls"
    seconds: float
    bulk: bool = False
    vote_every: float = 0.0  # seconds; 0: none
    small: bool = False
    host: str = "127.0.0.1"
    port: int = 0  # 0: this is the receiver
    number: int = 0  # of the sender
    senders: int = 1
    blob: int = 0  # bytes of an object that the receiver holds and the sender fetches, without other messages
    digest: str = ""


@dataclass
class Tally:
    """Received data, without the first second."""

    began: float = 0.0  # time of the first message
    last: float = 0.0
    bytes: int = 0
    messages: int = 0
    waits: list[float] = field(default_factory=list)  # seconds of each vote since its due time
    wrong: int = 0
    _processor: float = 0.0  # at the start of counting

    def take(self, message: bytes) -> None:
        now = time.monotonic()
        self.began = self.began or now
        if message[:1] == SMALL and not _is_signed(message[1:]):
            self.wrong += 1
        if now < self.began + WARM_SECONDS:
            self._processor = time.process_time()
            return
        self.last = now
        self.bytes += len(message)
        self.messages += 1
        if message[:1] == VOTE:
            self.waits.append(now - STAMP.unpack_from(message, 1)[0])

    def report(self) -> dict[str, Any]:
        found = asdict(self)
        del found["_processor"]
        seconds = self.last - self.began - WARM_SECONDS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024
        return {**found, "seconds": seconds, "processor": time.process_time() - self._processor, "memory_mb": peak}


def _is_signed(data: bytes) -> bool:
    signed = codec.decode(Signed, data, MESSAGE_BYTES_MAX)
    return Ed25519Verifier().verify(signed.signer, signing_preimage("prepare", CHAIN, signed.body), signed.signature)


def _presigned(number: int) -> list[bytes]:
    identity = Identity(hashlib.sha256(b"%d" % number).digest())
    found = []
    for height in range(PRESIGNED):
        body = codec.encode(Prepare(bytes(32), height, 0, bytes(32)))
        found.append(SMALL + codec.encode(Signed(body, identity.public, identity.sign(signing_preimage("prepare", CHAIN, body)))))
    return found


def _vote(due: float) -> bytes:
    return VOTE + STAMP.pack(due) + bytes(200)  # about the length of a signed vote


def _bulk() -> bytes:
    return BULK + os.urandom(BULK_BYTES - 1)


# Plain TCP and TLS ------------------------------------------------------------------------------------------------------


def _tls(folder: Path, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if is_server:
        files = str(folder / "key"), str(folder / "certificate")
        make = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-days", "1", "-subj", "/CN=end"]
        subprocess.run([*make, "-keyout", files[0], "-out", files[1]], check=True, capture_output=True)
        context.load_cert_chain(files[1], files[0])
    return context


def send_plainly(plan: Plan, folder: Path) -> None:
    connection = socket.create_connection((plan.host, plan.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    if plan.who == "tls":
        connection = _tls(folder, is_server=False).wrap_socket(connection)
    steady = [_bulk()] if plan.bulk else _presigned(plan.number) if plan.small else []
    due, end, count = time.monotonic(), time.monotonic() + plan.seconds, 0
    with connection:
        while time.monotonic() < end:
            if plan.vote_every and (not steady or time.monotonic() >= due):
                time.sleep(max(0.0, due - time.monotonic()))
                message = _vote(due)
                due = max(due + plan.vote_every, time.monotonic())  # skip votes that could not be sent in time
            else:
                message = steady[count % len(steady)]
                count += 1
            connection.sendall(LENGTH.pack(len(message)) + message)
    _say({})


def receive_plainly(plan: Plan, folder: Path) -> Tally:
    tally, selector = Tally(), selectors.DefaultSelector()
    context = _tls(folder, is_server=True) if plan.who == "tls" else None
    with socket.create_server((plan.host, 0)) as server:
        _say({"port": server.getsockname()[1]})
        for _ in range(plan.senders):
            connection, _ = server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
            if context is not None:
                connection = context.wrap_socket(connection, server_side=True)
            selector.register(connection, selectors.EVENT_READ, bytearray())
    while selector.get_map():
        for key, _ in selector.select():
            connection = key.fileobj  # type: ignore[assignment]
            data = _read(connection)
            if not data:
                selector.unregister(connection)
                connection.close()
            for message in _split(key.data, data):
                tally.take(message)
    return tally


def _read(connection: socket.socket) -> bytes:
    """Read all available data, with the data that TLS has decrypted already, which the selector does not see."""
    try:
        data = connection.recv(READ_BYTES)
        while isinstance(connection, ssl.SSLSocket) and connection.pending():
            data += connection.recv(connection.pending())
    except OSError:
        return b""
    return data


def _split(buffer: bytearray, data: bytes) -> Iterator[bytes]:
    buffer += data
    at = 0
    while len(buffer) >= at + LENGTH.size:
        end = at + LENGTH.size + LENGTH.unpack_from(buffer, at)[0]
        if end > len(buffer):
            break
        yield bytes(memoryview(buffer)[at + LENGTH.size : end])
        at = end
    del buffer[:at]


# Ours -------------------------------------------------------------------------------------------------------------------


def _swarm(plan: Plan, number: int, blobs: DiskBlobStore) -> Swarm:
    identity = Identity(hashlib.sha256(b"end %d" % number).digest())
    bootstrap = [format_address(plan.host, plan.port)] if plan.port else []
    return Swarm(identity, CHAIN, f"{'127.0.0.1' if plan.port else plan.host}:0", bootstrap, blobs)


async def send_ours(plan: Plan, blobs: DiskBlobStore) -> None:
    network = _swarm(plan, 1 + plan.number, blobs)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        while (await network.events.receive()) != PeerConnected(peer := next(iter(network.connected_peers()), b"")):
            pass
        if plan.blob:
            began = time.monotonic()
            await network.fetch_blob(bytes.fromhex(plan.digest), plan.blob)
            _say({"seconds": time.monotonic() - began})
        else:
            with trio.move_on_after(plan.seconds):
                async with trio.open_nursery() as sending:
                    if plan.vote_every:
                        sending.start_soon(_send_votes, plan, network, peer)
                    if plan.bulk or plan.small:
                        sending.start_soon(_send_steadily, plan, network, peer)
            link = network.links()[0]
            now = trio.current_time()
            _say({"rate": link.meter.history.bytes_per_second(now), "retransmitted": link.meter.history.retransmitted(now)})
        nursery.cancel_scope.cancel()


async def _send_votes(plan: Plan, network: Swarm, peer: bytes) -> None:
    due = time.monotonic()
    while True:
        await trio.sleep(max(0.0, due - time.monotonic()))
        network.send(peer, _vote(due), Priority.VOTE)
        due = max(due + plan.vote_every, time.monotonic())


async def _send_steadily(plan: Plan, network: Swarm, peer: bytes) -> None:
    pieces, handed = [_bulk()] if plan.bulk else _presigned(plan.number), 0
    start = sum(network.links()[0].outbox.sent)
    while True:
        while handed - sum(network.links()[0].outbox.sent) + start < WAITING_BYTES:
            for piece in pieces:
                network.send(peer, piece, Priority.BULK if plan.bulk else Priority.CONTROL)
                handed += len(piece)
        await trio.sleep(POLL_SECONDS)


async def receive_ours(plan: Plan, blobs: DiskBlobStore) -> Tally:
    tally, network = Tally(), _swarm(plan, 0, blobs)
    digest = blobs.add_bytes(os.urandom(plan.blob)) if plan.blob else b""
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        _say({"port": parse_address(network.address)[1], "digest": digest.hex()})
        left = plan.senders
        while left:
            event = await network.events.receive()
            if isinstance(event, DataReceived):
                tally.take(event.data)
            left -= isinstance(event, PeerDisconnected)
        nursery.cancel_scope.cancel()
    return tally


def _say(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


def main(arguments: list[str] | None = None) -> int:
    (text,) = sys.argv[1:] if arguments is None else arguments
    plan = Plan(**json.loads(text))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        blobs = DiskBlobStore(folder / "kept", folder / "passing")
        if plan.port and plan.who == "ours":
            trio.run(send_ours, plan, blobs)
        elif plan.port:
            send_plainly(plan, folder)
        else:
            tally = trio.run(receive_ours, plan, blobs) if plan.who == "ours" else receive_plainly(plan, folder)
            _say(tally.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
