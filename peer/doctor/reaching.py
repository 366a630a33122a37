"""Whether this peer can be reached, and reaches others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import trio

from peer.doctor.calling import Answer, call
from peer.doctor.findings import Finding, fault, ok, warning
from protocol.addresses import format_address, parse_address
from protocol.errors import UserError
from protocol.identity import parse_peer_id, short_id
from transport.reachability import Reachable

CALLS_MAX: Final = 16  # addresses that are dialed, the named ones first: the book holds 64
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # by wildcard


async def of_free_port(check: str, address: str, setting: str) -> Finding:
    """Whether a peer that is started now could listen there."""
    host, port = parse_address(address)
    try:
        for listener in await trio.open_tcp_listeners(port, host=host):
            await listener.aclose()
    except OSError as error:
        text = f"{address} cannot be listened on: {(error.strerror or str(error)).lower()}"
        return fault(check, text, f"stop the program that has it, or name another address with --{setting}")
    return ok(check, f"{address} is free")


async def of_own_port(address: str, advertised: Sequence[str], chain_id: bytes, me: bytes) -> list[Finding]:
    """Whether the running peer answers where it listens, and where it tells others to dial it."""
    host, port = parse_address(address)
    here = await call(format_address(LOOPBACK.get(host, host), port), chain_id, me)
    if here.peer is None:
        return [fault("port", f"{here.address}, where this peer listens: {here.why}", "look at its log; start it again")]
    found = [ok("port", f"{here.address} answers")]
    for answer in await _called(advertised, chain_id):
        if answer.peer is None:
            text = f"{answer.address}, which others are told to dial: {answer.why}"
            way = "forward that port to this machine, or correct --advertise; some routers let nobody inside dial their outside"
            found.append(warning("port", text, way))
        elif answer.peer != me:
            text = f"at {answer.address}, which others are told to dial, peer {short_id(answer.peer)} answers"
            found.append(fault("port", text, "correct --advertise, or the forwarding of that port"))
        else:
            found.append(ok("port", f"{answer.address} answers"))
    return found


def of_reachability(said: str) -> list[Finding]:
    """What other peers have found who dialed back. Too few have, at first."""
    if said == Reachable.DIRECT:
        return [ok("port", "others reach this peer, as they say")]
    if said == Reachable.RELAYED:
        advice = "forward its port in the router, open it in the firewall, name the outside with --advertise"
        return [warning("port", "others do not reach this peer, as they say: it links where it dials, or over members", advice)]
    return []


async def of_others(addresses: Sequence[str], chain_id: bytes, me: bytes | None, *, runs: bool, alone: bool) -> list[Finding]:
    """Whether those answer whom this peer dials first. `alone`: it is the only voter, and needs nobody."""
    answers = await _called(addresses[:CALLS_MAX], chain_id)
    if not runs and (copies := [answer.address for answer in answers if answer.peer is not None and answer.peer == me]):
        text = f"at {copies[0]} a peer runs with this peer's key"
        return [fault("peers", text, "never start both: they would contradict each other, and be expelled")]
    others = [answer for answer in answers if answer.peer is None or answer.peer != me]
    reached = [answer for answer in others if answer.peer is not None]
    if not others:
        if alone:
            return [ok("peers", "this peer is the only voter: it needs nobody")]
        return [warning("peers", "no address of another peer is known here", "name one with --bootstrap, or wait to be dialed")]
    lost = [warning("peers", f"{answer.address}: {answer.why}", answer.advice) for answer in others if answer.peer is None]
    if reached:
        return [ok("peers", f"{len(reached)} of {len(others)} addresses answer"), *lost]
    return [fault("peers", f"none of {len(others)} addresses answers", "mend what the next lines say"), *lost]


async def _called(addresses: Iterable[str], chain_id: bytes) -> list[Answer]:
    """All at once."""
    answers: dict[str, Answer] = {}

    async def dial(text: str) -> None:
        peer, _, address = text.rpartition("@")
        try:
            expected = parse_peer_id(peer) if peer else None
        except UserError as error:
            answers[text] = Answer(text, None, str(error), "write PEERID@HOST:PORT, or the address alone")
        else:
            answers[text] = await call(address, chain_id, expected)

    wanted = tuple(dict.fromkeys(addresses))
    async with trio.open_nursery() as nursery:
        for text in wanted:
            nursery.start_soon(dial, text)
    return [answers[text] for text in wanted]


def dialable_ones(bootstrap: Iterable[str], remembered: Iterable[str]) -> tuple[str, ...]:
    """Each place once, the named ones first."""
    places: dict[str, str] = {}
    for text in (*bootstrap, *remembered):
        places.setdefault(text.rpartition("@")[2], text)
    return tuple(places.values())
