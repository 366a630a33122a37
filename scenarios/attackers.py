"""Strangers that attack peers: `python -m scenarios.attackers CHAIN ADDRESS…`, a part of `scenarios.hostile`.

Each kind of attack runs from its own loopback addresses until standard input ends. Then the program writes the reasons that peers
gave when they closed the attackers' links to standard output.
"""

from __future__ import annotations

import json
import resource
import secrets
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import count, cycle
from random import Random

import trio
import trio.lowlevel

from ledger.members import ADMIT_KIND, AdmitMember, Invitation
from protocol.addresses import parse_address
from protocol.codec import decode_message, encode
from protocol.errors import RemoteProtocolError
from protocol.identity import Identity, sign_message
from protocol.limits import FRAME_BYTES_MAX, MESSAGE_BYTES_MAX, TRANSACTION_LIFETIME_HEIGHTS
from protocol.messages import GetBlob, GetDecisions, GossipEnvelope, LinkClosing, Ping, Transaction
from transport.wire.framing import Channel, Message, Priority
from transport.wire.noise_session import KeyPair, NoiseSession

HALF_OPEN, SLOW, GARBAGE, OVERSIZE, DEAF = 300, 40, 40, 20, 20  # simultaneous connections, of all kinds but the flood
AGAIN_SECONDS = 0.5  # before a closed connection is made again
SIGNED_EACH = 200  # messages per flooding key; all together exceed a peer's cache of checked messages
SOURCES = 12  # hosts; the first is that of the honest peers, which share its limits

Attack = Callable[[trio.SocketStream], Awaitable[None]]


class Attackers:
    def __init__(self, chain: bytes, targets: list[str], keys: int) -> None:
        self.chain, self.random = chain, Random(0)
        self.targets, self.sources = cycle(targets), cycle(f"127.0.0.{number}" for number in range(1, SOURCES + 1))
        self.told = Counter[str]()  # reasons of closed links
        self.keys = [Identity.generate() for _ in range(keys)]
        self.floods = {key.public: list(self.signed(key)) for key in self.keys}

    def signed(self, key: Identity) -> Iterator[bytes]:
        """Return messages in order. Half of them cost two checks of signatures: admissions by an invitation of a non-member."""
        invitation = sign_message(key, self.chain, Invitation(key.public, 1 << 50))
        for number in range(SIGNED_EACH // 2):
            admit = encode(AdmitMember(invitation, bytes(64), f"nobody {number}", ()))
            for kind, content in (("member/rename", secrets.token_bytes(8)), (ADMIT_KIND, admit)):
                yield encode(
                    GossipEnvelope(sign_message(key, self.chain, Transaction(1, TRANSACTION_LIFETIME_HEIGHTS, kind, content)))
                )

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for number, attack in self.attacks():
                for _ in range(number):
                    nursery.start_soon(self.again, attack, next(self.targets), next(self.sources))
            for key in self.keys:
                nursery.start_soon(self.again, self.flooding(key), next(self.targets), next(self.sources))
            async for _ in trio.lowlevel.FdStream(0):
                pass
            nursery.cancel_scope.cancel()

    def attacks(self) -> Iterator[tuple[int, Attack]]:
        yield HALF_OPEN, self.hold
        yield SLOW, self.drip
        yield GARBAGE, self.babble
        yield OVERSIZE, self.oversize
        yield DEAF, self.ask_and_not_listen

    async def again(self, attack: Attack, target: str, source: str) -> None:
        host, port = parse_address(target)
        while True:
            with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError, RemoteProtocolError):
                async with await trio.open_tcp_stream(host, port, local_address=source) as stream:
                    await attack(stream)
            await trio.sleep(self.random.uniform(0, 2 * AGAIN_SECONDS))

    # Attacks ---------------------------------------------------------------------------------------------------------

    async def hold(self, stream: trio.SocketStream) -> None:
        await stream.receive_some(1)

    async def drip(self, stream: trio.SocketStream) -> None:
        for byte in self.session(Identity.generate()).data_to_send():
            await stream.send_all(bytes([byte]))
            await trio.sleep(0.5)

    async def babble(self, stream: trio.SocketStream) -> None:
        opening = self.session(Identity.generate()).data_to_send() if self.random.random() < 0.5 else b""
        await stream.send_all(opening + self.random.randbytes(10_000))
        await stream.receive_some(1)

    async def oversize(self, stream: trio.SocketStream) -> None:
        """Send messages of all priorities that are never complete."""
        session = await self.linked(stream, Identity.generate())
        for priority in reversed(Priority):
            session.outbox.push(Channel.APPLICATION, bytes(MESSAGE_BYTES_MAX), priority)
            for _ in range(MESSAGE_BYTES_MAX // (64 << 10) - 1):
                await stream.send_all(session.data_to_send())
        await self.listen(stream, session)

    async def ask_and_not_listen(self, stream: trio.SocketStream) -> None:
        session = await self.linked(stream, Identity.generate())
        for number in count():
            session.outbox.push(Channel.APPLICATION, encode(GetDecisions(1 + number % 8, 32)), Priority.CONTROL)
            session.outbox.push(Channel.LINK, encode(GetBlob(secrets.token_bytes(32), 0)), Priority.CONTROL)
            await stream.send_all(session.data_to_send())

    def flooding(self, key: Identity) -> Attack:
        async def flood(stream: trio.SocketStream) -> None:
            session = await self.linked(stream, key)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.listen_to_the_end, stream, session, nursery.cancel_scope)
                with suppress(trio.BrokenResourceError):
                    for message in cycle(self.floods[key.public]):
                        session.outbox.push(Channel.APPLICATION, message, Priority.VOTE)
                        if session.outbox.held > FRAME_BYTES_MAX:
                            await stream.send_all(session.data_to_send())

        return flood

    # Sessions --------------------------------------------------------------------------------------------------------

    def session(self, key: Identity) -> NoiseSession:
        static, ephemeral = (KeyPair.from_private(secrets.token_bytes(32)) for _ in range(2))
        return NoiseSession(key, self.chain, initiator=True, static=static, ephemeral=ephemeral)

    async def linked(self, stream: trio.SocketStream, key: Identity) -> NoiseSession:
        session = self.session(key)
        await stream.send_all(session.data_to_send())
        while session.peer is None:
            await self.hear(stream, session)
        session.outbox.push(Channel.LINK, encode(Ping(1)), Priority.VOTE)
        while data := session.data_to_send():
            await stream.send_all(data)
        return session

    async def listen(self, stream: trio.SocketStream, session: NoiseSession) -> None:
        while True:
            await self.hear(stream, session)

    async def listen_to_the_end(self, stream: trio.SocketStream, session: NoiseSession, scope: trio.CancelScope) -> None:
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError, RemoteProtocolError):
            await self.listen(stream, session)
        scope.cancel()

    async def hear(self, stream: trio.SocketStream, session: NoiseSession) -> None:
        data = await stream.receive_some(64 << 10)
        if not data:
            raise trio.BrokenResourceError
        for event in session.receive(bytes(data)):
            if isinstance(event, Message) and event.channel is Channel.LINK:
                with suppress(RemoteProtocolError):
                    closing: LinkClosing = decode_message(event.data, (LinkClosing,))
                    self.told[closing.reason] += 1
                    raise trio.BrokenResourceError


def main(arguments: list[str]) -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    attackers = Attackers(bytes.fromhex(arguments[0]), arguments[2:], int(arguments[1]))
    print("ready", flush=True)
    trio.run(attackers.run)
    print(json.dumps(attackers.told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
