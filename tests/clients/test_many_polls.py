"""Hundreds of samples that one machine waits for at once, over sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import trio

from clients.gateway.request_store import RequestStore, StoredSampler, owner_of
from clients.gateway.samplers import SampleFault, Samplers
from clients.gateway.tinker_api import LOCAL_PROGRAMS
from storage.api_key_store import ApiKey, ApiKeyStore
from tests.clients.programs import Program
from tests.web.client import Site
from tests.web.room import Room, said
from web import asyncio_bridge
from web.connection_limits import ConnectionSlots
from web.held_replies import HeldReplies

pytestmark = pytest.mark.real("hundreds of sockets")
SAMPLER = "s:sample:0"
CONNECTIONS = 400  # samples that a machine waits for at once
SAMPLES = 2  # samples of each connection, one after the other


class Connection:
    """A connection that a client keeps, as the SDK does. It fails if the server closes it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream, self._read = stream, b""

    async def post(self, call: str, fields: dict[str, Any]) -> tuple[int, Any]:
        """Return the status of the reply and its JSON."""
        body = json.dumps(fields).encode()
        headers = ["Host: localhost", "X-API-Key: tml-any", f"Content-Length: {len(body)}", "", ""]
        await self._stream.send_all("\r\n".join([f"POST /tinker/api/v1/{call} HTTP/1.1", *headers]).encode() + body)
        while b"\r\n\r\n" not in self._read:
            await self._receive()
        header, _, self._read = self._read.partition(b"\r\n\r\n")
        (length,) = [int(line.split(b":")[1]) for line in header.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        while len(self._read) < length:
            await self._receive()
        content, self._read = self._read[:length], self._read[length:]
        return int(header.split()[1]), json.loads(content)

    async def _receive(self) -> None:
        data = await self._stream.receive_some()
        assert data, "the server has closed the connection"
        self._read += data


@asynccontextmanager
async def connection(site: Site) -> AsyncIterator[Connection]:
    async with await trio.open_tcp_stream(site.host, site.port) as stream:
        yield Connection(stream)


async def test_a_machine_may_wait_for_hundreds_of_samples_and_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, finished = list[HeldReplies](), {number: trio.Event() for number in range(SAMPLES)}
    hold = HeldReplies.hold

    async def record(replies: HeldReplies, *arguments: Any) -> Any:
        held.append(replies)
        return await hold(replies, *arguments)

    async def compute(samplers: Samplers, name: str, *_: Any) -> None:
        await finished[int(name.partition("#")[2]) % SAMPLES].wait()
        samplers._store_result(name, SampleFault(name, is_of_client=True))

    monkeypatch.setattr(HeldReplies, "hold", record)
    monkeypatch.setattr(Samplers, "_compute", compute)
    async with Room(tmp_path).serving() as (daemon, site):
        store = RequestStore(daemon.directory.path / "services" / "serve")
        store.add_sampler(StoredSampler(SAMPLER, owner_of(LOCAL_PROGRAMS), bytes(32), 0))
        store.close()

        async def draw(place: int) -> None:
            async with connection(site) as program:
                for number in range(place * SAMPLES, (place + 1) * SAMPLES):
                    status, accepted = await program.post("asample", {"sampling_session_id": SAMPLER, "seq_id": number})
                    assert status == 200, accepted
                    reply: dict[str, Any] = {"type": "try_again"}
                    while reply.get("type") == "try_again":
                        status, reply = await program.post("retrieve_future", {"request_id": accepted["request_id"]})
                        assert status == 200, reply
                    assert reply == {"error": f"{SAMPLER}#{number}", "category": "user"}

        async def are_held(number: int) -> None:
            """Wait until all connections wait for their sample with this number."""
            names = {f"{SAMPLER}#{place * SAMPLES + number}" for place in range(CONNECTIONS)}
            while not held or held[0]._waiting.keys() != names:  # noqa: ASYNC110
                await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            for place in range(CONNECTIONS):
                nursery.start_soon(draw, place)
            for number in range(SAMPLES):
                await are_held(number)
                assert (await said(Program(site.host, site.port).post, "client/config", {})).status == 200
                assert (await said(site.get, "/annotate")).status == 200
                finished[number].set()


async def test_a_waiting_program_gives_way_to_one_with_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[ConnectionSlots]()

    class TwoHeldSlots(ConnectionSlots):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._held_max = 2
            made.append(self)

    monkeypatch.setattr(asyncio_bridge, "ConnectionSlots", TwoHeldSlots)
    monkeypatch.setattr(HeldReplies.hold, "__defaults__", (3_600.0,))  # so that no wait ends by itself
    replies, released = list[tuple[str, Any]](), trio.Event()

    async def compute(samplers: Samplers, name: str, *_: Any) -> None:
        await released.wait()
        samplers._store_result(name, SampleFault(name, is_of_client=True))

    monkeypatch.setattr(Samplers, "_compute", compute)
    async with Room(tmp_path).serving() as (daemon, site):
        store, keys = RequestStore(daemon.directory.path / "services" / "serve"), ApiKeyStore(daemon.directory.api_keys)
        secrets = dict[str, str]()
        for name in ("anna", "ben"):
            secrets[name] = keys.create_key(key := ApiKey(name, 1, 2, 1 << 20, 1 << 20))
            store.add_sampler(StoredSampler(f"{name}:sample:0", owner_of(key), bytes(32), 0))
        store.close()

        async def wait(name: str) -> None:
            program = Program(site.host, site.port, secrets[name])
            accepted = await said(program.post, "asample", {"sampling_session_id": f"{name}:sample:0", "seq_id": 0})
            replies.append((name, (await said(program.retrieve, accepted.json["request_id"])).json))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, "anna")
            nursery.start_soon(wait, "anna")

            async def are_held(count: int) -> None:
                while sum(place.is_held for place in made[0]._open) != count:  # noqa: ASYNC110
                    await trio.sleep(0.01)

            await are_held(2)
            nursery.start_soon(wait, "ben")
            while not replies:  # noqa: ASYNC110
                await trio.sleep(0.01)
            ((name, reply),) = replies
            assert name == "anna" and reply["type"] == "try_again"
            await are_held(2)
            released.set()
        assert sorted(replies[1:], key=itemgetter(0)) == [
            (name, {"error": f"{name}:sample:0#0", "category": "user"}) for name in ("anna", "ben")
        ]


async def test_a_call_that_cannot_wait_asks_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.connection_limits.VISITOR_SHARE_DIVISOR", 1)  # no connection may be held
    async with Room(tmp_path).serving() as (_, site):
        program = await said(Program(site.host, site.port).begin)
        await said(program.request_model)
        accepted = await said(program.request_step, f"{program.session}:train:0", 2)  # it waits for number 1
        reply = await said(program.retrieve, accepted.json["request_id"])
        assert reply.status == 429 and "too many calls wait for results" in reply.json["detail"]
