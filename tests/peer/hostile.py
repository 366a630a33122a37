"""A peer that sends arbitrary messages over a real connection, in a real session that the test may corrupt."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from protocol import codec
from protocol.addresses import parse_address
from protocol.identity import Identity, Signer
from protocol.messages import AGREEMENT_MESSAGES, GOSSIP_MESSAGES, SNAPSHOT_MESSAGES, Ping, Status
from tests.waiting import patience
from transport.wire.framing import Channel, Message, Priority
from transport.wire.noise_session import KeyPair, NoiseSession


class Masquerade:
    """An identity that claims one key and signs with another."""

    def __init__(self, claimed: bytes) -> None:
        self.public = claimed
        self.sign = Identity.generate().sign


class Hostile:
    def __init__(self, stream: trio.SocketStream, session: NoiseSession) -> None:
        self.stream, self.session = stream, session
        self.heard: list[Any] = []  # the messages that the daemon sent, as far as they were read

    async def write(self, data: bytes) -> None:
        """Write raw bytes. The other side may have closed already, which the test checks next."""
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError:
            pass

    async def say(self, data: bytes, channel: Channel = Channel.APPLICATION) -> None:
        self.session.outbox.push(channel, data, Priority.VOTE)
        while frame := self.session.data_to_send():
            await self.write(frame)

    def sealed(self, plaintext: bytes) -> bytes:
        """Return a frame around any plaintext."""
        assert self.session._ciphers is not None
        ciphertext = self.session._ciphers[0].encrypt(plaintext)
        return len(ciphertext).to_bytes(2, "big") + ciphertext

    async def read(self) -> None:
        for event in self.session.receive(await self._some()):
            if isinstance(event, Message) and event.channel is Channel.APPLICATION:
                message: Any = codec.decode_message(event.data, (*AGREEMENT_MESSAGES, *GOSSIP_MESSAGES, *SNAPSHOT_MESSAGES))
                self.heard.append(message)

    async def _some(self) -> bytes:
        data = await self.stream.receive_some(1 << 16)
        if not data:
            raise trio.EndOfChannel
        return data

    async def greeted(self) -> Status:
        """Return the daemon's first status. From then on the daemon treats this connection as a peer."""
        await self.say(codec.encode(Ping(1)), Channel.LINK)
        with patience():
            while not any(isinstance(message, Status) for message in self.heard):
                await self.read()
        return next(message for message in self.heard if isinstance(message, Status))

    async def closed(self) -> None:
        """Wait until the daemon has ended the connection."""
        with patience():
            try:
                while True:
                    await self._some()
            except (trio.EndOfChannel, trio.BrokenResourceError):
                return

    async def shake_hands(self) -> None:
        await self.write(self.session.data_to_send())
        with patience():
            while self.session.peer is None:
                self.session.receive(await self._some())
                await self.write(self.session.data_to_send())


@asynccontextmanager
async def connection(address: str, chain_id: bytes, identity: Signer | None = None) -> AsyncIterator[Hostile]:
    """Open a connection without sending a message."""
    session = NoiseSession(
        identity or Identity.generate(),
        chain_id,
        initiator=True,
        static=KeyPair.from_private(secrets.token_bytes(32)),
        ephemeral=KeyPair.from_private(secrets.token_bytes(32)),
    )
    stream = await trio.open_tcp_stream(*parse_address(address))
    try:
        yield Hostile(stream, session)
    finally:
        await trio.aclose_forcefully(stream)


@asynccontextmanager
async def link(address: str, chain_id: bytes, identity: Signer | None = None) -> AsyncIterator[Hostile]:
    """Open a link that the daemon accepts."""
    async with connection(address, chain_id, identity) as hostile:
        await hostile.shake_hands()
        await hostile.greeted()
        yield hostile
