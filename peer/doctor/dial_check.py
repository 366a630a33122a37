"""Dials an address as a peer does, up to the proof of who answers there, and hangs up.

It calls with a key of its own that nobody knows: with the peer's own key a second link would take the place of the first.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from dataclasses import dataclass
from typing import Final

import trio

from protocol.addresses import parse_address
from protocol.errors import RemoteProtocolError
from protocol.identity import Identity
from transport.wire.framing import Message
from transport.wire.noise_session import KeyPair, NoiseSession, PeerAuthenticated

DIAL_SECONDS_MAX: Final = 5.0  # for connection and handshake together: slower links are no use to a vote either
READ_BYTES: Final = 4_096  # a handshake has a tenth of that

FIREWALL_ADVICE = "let its operator start it, and open that port in firewalls and routers on the way"
NETWORK_ADVICE = "this machine has no way there: look at its network, its routes and its firewall"
BUSY_PEER_ADVICE = "that peer may be full, or have banned this machine: wait a minute"
ADVICE = {  # by reason of the handshake
    "not-folkmoot": "something else than a peer has that port: correct the address",
    "wrong-version": "one of the two programs is too old: update it",
    "wrong-chain": "that peer belongs to another network: correct the address, or take an invitation of yours",
    "wrong-peer": "the peer there has another key: ask its operator for the present one",
}


@dataclass(frozen=True, slots=True)
class DialResult:
    address: str
    peer: bytes | None  # whoever proved its key there
    why: str = ""  # nobody did
    advice: str = ""


async def dial_peer(address: str, chain_id: bytes, expected: bytes | None = None) -> DialResult:
    """Who answers at HOST:PORT in this network. `expected`: anybody else counts as nobody."""
    host, port = parse_address(address)
    try:
        with trio.fail_after(DIAL_SECONDS_MAX):
            async with await trio.open_tcp_stream(host, port) as stream:
                return DialResult(address, await _shaken(stream, chain_id, expected))
    except trio.TooSlowError:
        return DialResult(address, None, f"no answer within {DIAL_SECONDS_MAX:g} s", FIREWALL_ADVICE)
    except RemoteProtocolError as error:
        return DialResult(address, None, error.detail or error.reason, ADVICE.get(error.reason, FIREWALL_ADVICE))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return DialResult(address, None, "the connection was closed", BUSY_PEER_ADVICE)
    except (OSError, ValueError) as error:
        return DialResult(address, None, *_of_error(error))


async def _shaken(stream: trio.SocketStream, chain_id: bytes, expected: bytes | None) -> bytes:
    static, ephemeral = (KeyPair.from_private(secrets.token_bytes(32)) for _ in range(2))
    me = Identity.generate()
    session = NoiseSession(me, chain_id, initiator=True, static=static, ephemeral=ephemeral, expected=expected)
    events: list[PeerAuthenticated | Message] = []
    while not events:
        await stream.send_all(session.data_to_send())
        if not (data := await stream.receive_some(READ_BYTES)):
            raise trio.BrokenResourceError("closed by the peer")
        events = session.receive(data)
    await stream.send_all(session.data_to_send())  # the proof of our key: without it the peer would tell of a broken handshake
    assert isinstance(events[0], PeerAuthenticated)
    return events[0].peer


def _of_error(error: OSError | ValueError) -> tuple[str, str]:
    """Trio tries all addresses of a name and hangs their errors behind its own."""
    if isinstance(error, (socket.gaierror, ValueError)):
        return "no such name", "correct the address, or mend this machine's name service"
    group = error.__cause__.exceptions if isinstance(error.__cause__, BaseExceptionGroup) else (error,)
    numbers = {cause.errno for cause in group if isinstance(cause, OSError) and cause.errno}
    told = ", ".join(sorted(os.strerror(number).lower() for number in numbers)) or str(error)
    return told, FIREWALL_ADVICE if errno.ECONNREFUSED in numbers else NETWORK_ADVICE
