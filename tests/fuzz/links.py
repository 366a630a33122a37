"""Random messages to the links of a peer, in any order: they raise only `RemoteProtocolError`, and all memory is freed."""

from __future__ import annotations

import hashlib
import secrets
from random import Random
from typing import Any

import trio
import trio.lowlevel
from hypothesis import given, seed
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.errors import RemoteProtocolError
from protocol.identity import Identity, sign_message
from protocol.messages import LINK_MESSAGES, AgedPeerRecord, PeerRecord, PeerRecords
from tests.fuzz.checks import profile
from tests.fuzz.mutations import mutate
from tests.fuzz.strategies import strategy_of
from tests.transport.helpers import ALICE, CHAIN, MemoryBlobs, PolicyDouble, make_session
from transport.peer_policy import PeerClass
from transport.session_links import TcpLink
from transport.swarm import Swarm
from transport.wire.framing import Channel, Message, Priority

STRANGERS = [Identity(hashlib.sha256(b"stranger" + bytes([number])).digest()) for number in range(4)]
MESSAGES = 60  # in one run
Said = tuple[int, Any, bool, int]  # sender, message, whether it is changed, and how


def _records() -> st.SearchStrategy[PeerRecords]:
    """Return records with valid signatures, which random bytes never have."""
    signed = st.tuples(st.sampled_from([ALICE, *STRANGERS]), strategy_of(PeerRecord)).map(
        lambda one: sign_message(one[0], CHAIN, one[1])
    )
    return st.lists(st.builds(AgedPeerRecord, signed, st.integers(0, 1000)), min_size=1, max_size=3).map(tuple).map(PeerRecords)


def hear_anything(values: int, number: int) -> None:
    messages = st.one_of(*map(strategy_of, LINK_MESSAGES), _records())
    said = st.tuples(st.integers(0, len(STRANGERS) - 1), messages, st.booleans(), st.integers(0, 2**32))

    @seed(number)
    @profile(values)
    @given(st.lists(said, max_size=MESSAGES))
    def check(heard: list[Said]) -> None:
        trio.run(_hear, heard)

    check()


async def _hear(heard: list[Said]) -> None:
    network = Swarm(
        ALICE, CHAIN, "127.0.0.1:0", [], MemoryBlobs(b"held"), PolicyDouble(standing_of=lambda peer: PeerClass.STRANGER)
    )
    network._dial = _nobody_is_there  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        host, port = network.address.rsplit(":", 1)
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            links = [_link(network, identity, stream) for identity in STRANGERS]
            for at, message, is_changed, how in heard:
                if links[at].closed:
                    links[at] = _link(network, STRANGERS[at], stream)
                data = mutate(encode(message), Random(how)) if is_changed else encode(message)
                try:
                    await network.deliver_message(links[at], Message(Channel.LINK, Priority.CONTROL, data))
                except RemoteProtocolError as error:
                    network.ban_peer(links[at].peer, error)
                await trio.lowlevel.checkpoint()
            for link in links:
                network.detach(link)
        assert network.memory_quota.held == 0
        nursery.cancel_scope.cancel()
    assert "internal-error" not in network.refusal_counts()


async def _nobody_is_there(known: Any) -> float:
    await trio.sleep_forever()
    return 0.0


def _link(network: Swarm, identity: Identity, stream: trio.SocketStream) -> TcpLink:
    link = TcpLink(identity.public, "192.0.2.7:7700", False, make_session(identity, False), secrets.token_bytes(32), stream, None)
    network.attach(link)
    return link
