from __future__ import annotations

import errno
import os
import shlex
import socket
import sqlite3
import stat
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgpack
import pytest
import trio

from peer.api import control_socket
from peer.api.control_socket import serve_control_socket, socket_path
from peer.api.rpc_handlers import rpc_methods
from peer.settings.data_directory import DataDirectory
from protocol.api import PeerApi, TextPieceView, TrainRequest
from protocol.errors import UserError
from protocol.sampling import SamplingOptions
from tests.peer.fake_api import JOBS, ME, PEERS, ROUNDS, STATS, STATUS, FakeApi


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
async def client(api: FakeApi, tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[PeerApi]:
    await nursery.start(serve_control_socket, api, tmp_path)
    yield control_socket.make_client(tmp_path)


@pytest.mark.real("sockets")
async def test_every_value_arrives_as_it_was_given(client: PeerApi, api: FakeApi) -> None:
    assert await client.status() == STATUS
    assert await client.stats() == STATS
    assert await client.peers() == PEERS
    assert await client.jobs() == JOBS
    assert await client.rounds(5) == ROUNDS
    job = await client.run_test_round()
    assert await client.events(0, 0) == tuple(api.log)
    async with aclosing(client.sample_text("once", SamplingOptions(3, top_k=9, stop=("\n",)), "e@7", ("a turn",))) as pieces:
        assert [piece.text async for piece in pieces] == ["once", " goes", " on"]
    assert api.asked.pop() == ("once", SamplingOptions(3, top_k=9, stop=("\n",)), "e@7", ("a turn",))
    assert job == "2" * 64
    assert (await client.export_run("/x")).path == "/x"
    assert await client.approve_voter(ME) == "1 of 3 approvals"
    assert [await client.challenge_trainer(ME, number) for number in (None, 4)] == [f"no false step of {ME}"] * 2
    request = TrainRequest("n", "local", 3, 0, {"seed": "4"})
    assert await client.start_job(request) == "1" * 64
    assert api.asked == [ME, (ME, None), (ME, 4), request]
    await client.stop_peer()
    assert api.stopped


async def all_of(pieces: AsyncGenerator[TextPieceView, None]) -> list[TextPieceView]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]


def test_the_client_offers_every_declared_call_and_no_other(tmp_path: Path) -> None:
    client = control_socket.make_client(tmp_path)
    assert all(callable(getattr(client, name)) for name in rpc_methods())
    assert {"status", "stop_peer"} < set(rpc_methods())
    assert not hasattr(client, "undeclared")


@pytest.mark.real("sockets")
async def test_what_a_person_can_mend_travels_as_text(client: PeerApi) -> None:
    with pytest.raises(UserError, match="the last voter cannot resign"):
        await client.resign_as_voter()


@pytest.mark.real("sockets")
async def test_a_text_that_no_message_can_hold_is_told(client: PeerApi) -> None:
    """The command line contains bytes that are not UTF-8."""
    with pytest.raises(UserError, match=r"'\\udcff' is not UTF-8"):
        await all_of(client.sample_text("\udcff", SamplingOptions()))


@pytest.mark.real("sockets")
async def test_a_bug_in_one_call_is_logged_and_stops_nothing(client: PeerApi, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match="failed at 'sample_text'"):
        await all_of(client.sample_text("bug", SamplingOptions()))
    assert "KeyError" in caplog.text
    assert await client.status() == STATUS


@pytest.mark.real("sockets")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (sqlite3.OperationalError("database or disk is full"), "database or disk is full"),
    ],
)
async def test_fault_of_the_disk_is_told_to_the_caller(
    client: PeerApi, api: FakeApi, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(api, "export_run", fail)
    with pytest.raises(UserError, match=f"failed at 'export_run': {reason}; free some space"):
        await client.export_run("/x")


@pytest.mark.real("sockets")
async def test_a_caller_that_leaves_cancels_its_call_only(client: PeerApi, api: FakeApi) -> None:
    async with aclosing(client.sample_text("wait", SamplingOptions())) as pieces:
        assert (await anext(pieces)).text == "once"
        await api.waiting.wait()
    await api.cancelled.wait()
    assert await client.status() == STATUS


async def test_a_caller_that_takes_no_part_of_its_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is made after the previous one was taken, so nothing is buffered for a slow caller."""
    monkeypatch.setattr(control_socket, "REPLY_SECONDS_MAX", 0.05)
    made, ended = list[int](), trio.Event()

    class Endless(FakeApi):
        async def sample_text(self, *asked: object) -> AsyncGenerator[TextPieceView, None]:  # type: ignore[override]
            try:
                while True:
                    made.append(len(made))
                    yield TextPieceView("x" * 50_000)
            finally:
                ended.set()

    ours, theirs = (trio.SocketStream(end) for end in trio.socket.socketpair())
    async with ours, theirs:
        await control_socket._send(
            theirs, [control_socket.VERSION, "sample_text", rpc_methods()["sample_text"].encode_arguments("p", SamplingOptions())]
        )
        with trio.fail_after(90):
            await control_socket._answer(Endless(), ours)
    assert ended.is_set() and len(made) < 100


@pytest.mark.real("sockets")
async def test_only_the_owner_may_connect(client: PeerApi, tmp_path: Path) -> None:
    assert stat.S_IMODE(socket_path(tmp_path).stat().st_mode) == 0o600


@pytest.mark.real("sockets")
async def test_without_a_daemon_the_way_to_start_one_is_named(tmp_path: Path) -> None:
    lock = DataDirectory(tmp_path).lock_file
    lock.write_text(f"{os.getpid()}\n")
    with pytest.raises(UserError, match=f"process {os.getpid()} is starting or stopping"):
        await control_socket.make_client(tmp_path).status()
    os.utime(lock, (0, 0))  # another process may have its number by now
    with pytest.raises(UserError, match=f"no peer runs on {tmp_path}: start it with `peer run --data-dir {tmp_path}`"):
        await control_socket.make_client(tmp_path).status()


@pytest.mark.real("sockets")
async def test_a_socket_left_by_a_killed_daemon_is_no_daemon_and_is_replaced(tmp_path: Path, nursery: trio.Nursery) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "control.sock"))
    with pytest.raises(UserError, match="no peer runs"):
        await control_socket.make_client(tmp_path).status()
    await nursery.start(serve_control_socket, FakeApi(), tmp_path)
    assert await control_socket.make_client(tmp_path).status() == STATUS


@pytest.mark.real("sockets")
async def test_a_socket_in_use_is_not_taken_away(client: PeerApi, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another process listens"):
        await serve_control_socket(FakeApi(), tmp_path)
    assert await client.status() == STATUS


async def test_a_file_in_the_way_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "control.sock").write_text("precious")
    with pytest.raises(UserError, match="which is another file"):
        await serve_control_socket(FakeApi(), tmp_path)
    assert (tmp_path / "control.sock").read_text() == "precious"


@pytest.mark.real("sockets")
async def test_the_socket_goes_when_the_server_stops(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control_socket, FakeApi(), tmp_path)
        nursery.cancel_scope.cancel()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real("processes")
async def test_a_path_too_long_for_a_socket_is_replaced_by_a_short_one_that_consoles_find(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    async with trio.open_nursery() as nursery:
        place = await nursery.start(serve_control_socket, FakeApi(), deep)
        assert len(os.fsencode(place)) <= control_socket.SOCKET_PATH_BYTES_MAX
        assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
        assert await control_socket.make_client(deep).status() == STATUS
        nursery.cancel_scope.cancel()
    assert not place.parent.exists()
    assert list(deep.iterdir()) == []


@pytest.mark.real("sockets")
async def test_a_pointer_left_by_a_killed_daemon_does_not_stop_the_next(tmp_path: Path, nursery: trio.Nursery) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    (deep / control_socket.SOCKET_PATH_FILE).write_text("/nowhere/at/all/control.sock\n")
    await nursery.start(serve_control_socket, FakeApi(), deep)
    assert await control_socket.make_client(deep).status() == STATUS


@pytest.mark.real("sockets")
async def test_the_socket_can_be_put_elsewhere(tmp_path: Path, nursery: trio.Nursery) -> None:
    elsewhere = str(tmp_path / "here.sock")
    await nursery.start(serve_control_socket, FakeApi(), tmp_path, elsewhere)
    assert await control_socket.make_client(tmp_path, elsewhere).status() == STATUS
    with pytest.raises(UserError, match="control_socket"):
        await serve_control_socket(FakeApi(), tmp_path, str(tmp_path / "missing" / "here.sock"))


async def raw(directory: Path, data: bytes) -> bytes:
    stream = await trio.open_unix_socket(str(socket_path(directory)))
    async with stream:
        await stream.send_all(data)
        try:
            return bytes(await stream.receive_some())
        except trio.BrokenResourceError:
            return b""


def framed(plain: object) -> bytes:
    data: bytes = msgpack.packb(plain)
    return len(data).to_bytes(4, "big") + data


@pytest.mark.real("sockets")
@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (b"\xff\xff\xff\xff", b""),
        (b"\x00\x00\x00\x01\xc1", b""),
        (framed(None), b"uses the control protocol"),
        (framed(["folkmoot-control/0", "status", []]), b"uses the control protocol"),
        (framed([control_socket.VERSION, "__class__", []]), b"no method"),
        (framed([control_socket.VERSION, ["status"], []]), b"no method"),
        (framed([control_socket.VERSION, "status", [1]]), b"mistyped"),
        (framed([control_socket.VERSION, "rounds", ["x"]]), b"restart the peer"),
    ],
)
async def test_a_bad_request_costs_its_sender_only(client: PeerApi, tmp_path: Path, request_bytes: bytes, answer: bytes) -> None:
    assert answer in await raw(tmp_path, request_bytes) if answer else await raw(tmp_path, request_bytes) == b""
    assert await client.status() == STATUS


async def test_a_caller_that_never_finishes_its_request_is_dropped(api: FakeApi, autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.send_all(b"\x00\x00")
    async with ours:
        await control_socket._answer(api, ours)
    assert trio.current_time() >= control_socket.REQUEST_SECONDS_MAX


@pytest.mark.real("sockets")
async def test_a_peer_that_stops_while_it_is_asked_says_so(api: FakeApi, tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control_socket, api, tmp_path)

        async def stop_when_asked() -> None:
            await api.waiting.wait()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as inner:
            inner.cancel_scope.shield = True
            inner.start_soon(stop_when_asked)
            with pytest.raises(UserError, match="stopped before it answered 'sample_text'"):
                await all_of(control_socket.make_client(tmp_path).sample_text("wait", SamplingOptions()))


@pytest.mark.real("sockets")
async def test_a_path_in_advice_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    directory = tmp_path / "my peer's data"
    directory.mkdir()
    with pytest.raises(UserError) as caught:
        await control_socket.make_client(directory).status()
    assert shlex.split(str(caught.value).split("`")[1]) == ["peer", "run", "--data-dir", str(directory)]
