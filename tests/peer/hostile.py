"""A peer that says whatever a test wants, over a real connection, with a real session that may be bent."""

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
    """Claims one key and signs with another."""

    def __init__(self, claimed: bytes) -> None:
        self.public = claimed
        self.sign = Identity.generate().sign


class Hostile:
    def __init__(self, stream: trio.SocketStream, session: NoiseSession) -> None:
        self.stream, self.session = stream, session
        self.heard: list[Any] = []  # what the daemon said, as far as it was read

    async def write(self, data: bytes) -> None:
        """Bytes as they are. The other side may have closed already: that is what the test looks at next."""
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError:
            pass

    async def say(self, data: bytes, channel: Channel = Channel.APPLICATION) -> None:
        self.session.outbox.push(channel, data, Priority.VOTE)
        while frame := self.session.data_to_send():
            await self.write(frame)

    def sealed(self, plaintext: bytes) -> bytes:
        """A frame around any plaintext."""
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
        """The daemon's first status: from now on it takes us for a peer."""
        await self.say(codec.encode(Ping(1)), Channel.LINK)
        with patience():
            while not any(isinstance(message, Status) for message in self.heard):
                await self.read()
        return next(message for message in self.heard if isinstance(message, Status))

    async def closed(self) -> None:
        """Returns when the daemon has ended the connection."""
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
    """A connection on which nothing was said yet."""
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
    """A link that the daemon believes in."""
    async with connection(address, chain_id, identity) as hostile:
        await hostile.shake_hands()
        await hostile.greeted()
        yield hostile
