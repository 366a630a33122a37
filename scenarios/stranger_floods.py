"""Floods of signed messages for `scenarios.strangers`: large ones of a stranger, and batches with a false signature of a member.

Each function attacks `target` inside its block and yields a line about what it sent. `chain` is the network's id.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count

import trio

from curation.contents import Batch, Enrolment
from curation.limits import BATCH_MAX
from curation.statements import Enrol
from ledger.members import ADMIT
from peer.api.memory import process_memory_mb
from peer.demo.cast import DemoPeer
from protocol.addresses import parse_address
from protocol.codec import encode
from protocol.errors import RemoteProtocolError
from protocol.identity import Identity, preimage, sign
from protocol.limits import FRAME_BYTES_MAX
from protocol.messages import Relay, Transaction
from scenarios.attackers import Attackers
from transport.framing import Channel, Priority

LARGE_BYTES, LARGE_COUNT = 200_000, 512  # 100 MB in all
GROWTH_MB_MAX = 40.0  # of the daemon: all strangers together may hold 32 MiB
BATCHES = 8  # each costs 511 true signatures before the false one
AGAIN_SECONDS = 0.5  # before the next link: a key is refused for some seconds after each false signature


def large_requests(chain: bytes, key: Identity) -> Iterator[bytes]:
    """Requests for admission with true signatures and a content that is none."""
    for _ in range(LARGE_COUNT):
        yield encode(Relay(sign(key, chain, Transaction(1, 100, ADMIT, secrets.token_bytes(LARGE_BYTES)))))


def batches_with_a_false_signature(chain: bytes, member: Identity, nonce: int) -> Iterator[bytes]:
    """Full batches of this member, which carry one false statement behind 511 true ones."""
    for number in range(BATCHES):
        people = [Identity(bytes([2, number, *place.to_bytes(30)])) for place in range(BATCH_MAX)]
        signed = preimage(Enrol.TAG, chain, encode(Enrol("noise", member.public, False)))
        true = [Enrolment(who.public, "noise", False, who.sign(signed)) for who in people[1:]]
        false = Enrolment(people[0].public, "noise", False, people[1].sign(signed))
        batch = encode(Batch(enrolments=(*true, false)))
        yield encode(Relay(sign(member, chain, Transaction(nonce, 10_000, "curation/batch", batch))))


@asynccontextmanager
async def large_messages(chain: bytes, target: DemoPeer) -> AsyncIterator[str]:
    """`grown` says afterwards by how much the daemon has grown: at most `GROWTH_MB_MAX`."""
    key = Identity.generate()
    sent = await _sent(chain, target, key, list(large_requests(chain, key)))
    yield f"sent {sent} of {LARGE_COUNT} messages of {LARGE_BYTES >> 10} kB with true signatures of a key that nobody admitted"


@asynccontextmanager
async def false_batches(chain: bytes, target: DemoPeer, member: DemoPeer, nonce: int) -> AsyncIterator[str]:
    """`member` must not run: its key is used here. `nonce` is the one of its next transaction."""
    assert member.process is None or member.process.poll() is not None, "two programs with one key halt each other"
    sent = await _sent(chain, target, member.identity, list(batches_with_a_false_signature(chain, member.identity, nonce)))
    yield f"sent {sent} full batches with a false signature, each over a link of its own"


def memory_mb(target: DemoPeer) -> float:
    return process_memory_mb(target.process.pid) if target.process is not None else 0.0


async def _sent(chain: bytes, target: DemoPeer, key: Identity, messages: list[bytes]) -> int:
    """How many messages left, over as many links as the target asks for by closing them."""
    attackers, (host, port), sent = Attackers(chain, [target.address], 0), parse_address(target.address), 0
    for attempt in count():
        if sent == len(messages) or attempt == len(messages) + BATCHES:
            return sent
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError, RemoteProtocolError):
            async with await trio.open_tcp_stream(host, port) as stream:
                session = await attackers.linked(stream, key)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(attackers.listen_to_the_end, stream, session, nursery.cancel_scope)
                    while sent < len(messages):
                        session.outbox.push(Channel.APPLICATION, messages[sent], Priority.VOTE)
                        while session.outbox.held > FRAME_BYTES_MAX or session.outbox:
                            await stream.send_all(session.data_to_send())
                        sent += 1
                    await trio.sleep(AGAIN_SECONDS)
                    nursery.cancel_scope.cancel()
        await trio.sleep(AGAIN_SECONDS)
    raise AssertionError("it counts for ever")
