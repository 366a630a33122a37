"""Floods of signed messages for `scenarios.strangers`: large ones of a stranger, and batches with a false signature of a member.

Each function attacks `target` inside its block and yields a line about the messages that it sent. `chain` is the network's id.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice

import trio

from curation.ledger.transaction_types import EnrolmentEntry, EnrolStatement, StatementBatch
from curation.limits import BATCH_MAX
from demo.demo_peers import DemoPeer
from ledger.members import ADMIT_KIND
from peer.settings.process_resources import process_memory_mb
from protocol.addresses import parse_address
from protocol.codec import encode
from protocol.errors import RemoteProtocolError
from protocol.identity import Identity, sign_message, signing_preimage
from protocol.messages import GossipEnvelope, Transaction
from scenarios.attackers import Attackers
from transport.wire.framing import Channel, Priority

LARGE_BYTES, LARGE_COUNT = 200_000, 512  # 100 MB in all
LINKS = 48  # simultaneous, each from an address of its own; a single link is read slowly
GROWTH_MB_MAX = 40.0  # of the daemon; all strangers together may hold 32 MiB
SECONDS_MAX = 60.0  # for one flood: strangers are read slowly, and a key is refused for some seconds after a false signature
BATCHES = 8  # each costs 511 true signatures before the false one
AGAIN_SECONDS = 0.5  # before the next link


def large_requests(chain: bytes, key: Identity) -> Iterator[bytes]:
    """Return requests for admission with true signatures and invalid contents."""
    for _ in range(LARGE_COUNT):
        yield encode(GossipEnvelope(sign_message(key, chain, Transaction(1, 100, ADMIT_KIND, secrets.token_bytes(LARGE_BYTES)))))


def batches_with_a_false_signature(chain: bytes, member: Identity, nonce: int) -> Iterator[bytes]:
    """Return full batches of this member, each with one false statement after 511 true ones."""
    for number in range(BATCHES):
        people = [Identity(bytes([2, number, *place.to_bytes(30)])) for place in range(BATCH_MAX)]
        signed = signing_preimage(EnrolStatement.TAG, chain, encode(EnrolStatement("noise", member.public, False)))
        true = [EnrolmentEntry(who.public, "noise", False, who.sign(signed)) for who in people[1:]]
        false = EnrolmentEntry(people[0].public, "noise", False, people[1].sign(signed))
        batch = encode(StatementBatch(enrolments=(*true, false)))
        yield encode(GossipEnvelope(sign_message(member, chain, Transaction(nonce, 10_000, "curation/statements", batch))))


@asynccontextmanager
async def large_messages(chain: bytes, target: DemoPeer) -> AsyncIterator[str]:
    """Flood the target with large messages, over links with a key each.

    The daemon may grow by `GROWTH_MB_MAX` meanwhile (see `memory_mb`).
    """
    counts = []

    async def send(source: str) -> None:
        counts.append(await _sent(chain, target, Identity.generate, large_requests, LARGE_COUNT // LINKS, source))

    async with trio.open_nursery() as nursery:
        for number in range(LINKS):
            nursery.start_soon(send, f"127.0.3.{number + 1}")
    sent = sum(counts)
    yield f"sent {sent} messages of {LARGE_BYTES // 1_000} kB with true signatures of keys that nobody admitted"


@asynccontextmanager
async def false_batches(chain: bytes, target: DemoPeer, member: DemoPeer, nonce: int) -> AsyncIterator[str]:
    """Flood the target with batches that have a false signature.

    `member` must not run, because its key is used here. `nonce` is that of its next transaction.
    """
    assert member.process is None or member.process.poll() is not None, "two programs with one key halt each other"
    batches = partial(batches_with_a_false_signature, nonce=nonce)
    sent = await _sent(chain, target, lambda: member.identity, batches, BATCHES)
    yield f"sent {sent} full batches with a false signature, each over a link of its own"


def memory_mb(target: DemoPeer) -> float:
    return process_memory_mb(target.process.pid) if target.process is not None else 0.0


Messages = Callable[[bytes, Identity], Iterator[bytes]]


async def _sent(
    chain: bytes, target: DemoPeer, key: Callable[[], Identity], make: Messages, count: int, source: str = "127.0.0.1"
) -> int:
    """Send messages, and return the number of those that were sent.

    The target closes links, so there are as many links as needed.
    """
    attackers, (host, port), sent = Attackers(chain, [target.address], 0), parse_address(target.address), 0
    with trio.move_on_after(SECONDS_MAX):
        while sent < count:
            who = key()
            try:
                async with await trio.open_tcp_stream(host, port, local_address=source) as stream, trio.open_nursery() as nursery:
                    session = await attackers.linked(stream, who)
                    nursery.start_soon(attackers.listen_to_the_end, stream, session, nursery.cancel_scope)
                    for message in islice(make(chain, who), count - sent):
                        session.outbox.push(Channel.APPLICATION, message, Priority.VOTE)
                        while session.outbox:
                            await stream.send_all(session.data_to_send())
                        sent += 1
                    await trio.sleep(AGAIN_SECONDS)
                    nursery.cancel_scope.cancel()
            except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError, RemoteProtocolError):
                pass  # the target closed the link
            await trio.sleep(AGAIN_SECONDS)
    return sent
