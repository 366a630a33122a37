"""The control socket: the `PeerApi` of a running daemon, for consoles and scripts on the same machine.

A connection carries one call. The request is length-prefixed msgpack, `[version, method, arguments]`. The reply is
`["ok", value]` or `["error", text]`. A streamed answer is any number of `["part", value]` before `["ok", null]`; the daemon makes
a part after it has sent the part before. The file system controls access: the socket has mode 0600. A caller that disconnects or
stops reading cancels its call.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
import sqlite3
import stat
import tempfile
import typing
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import trio

from features.rpc import RpcMethod
from peer.api.rpc_handlers import rpc_methods
from peer.settings.data_directory import DataDirectory, storage_errors
from protocol import codec
from protocol.api import PeerApi
from protocol.errors import NotRunningError, RemoteProtocolError, UserError
from protocol.limits import MESSAGE_BYTES_MAX

VERSION = "folkmoot-control/1"
VERSION_MISMATCH_HINT = "restart the peer if the program was updated after its start"
REQUEST_SECONDS_MAX = 10.0  # longest time from connection to complete request: callers are local programs
REPLY_SECONDS_MAX = 10.0  # longest time in which a caller must read a reply or one part of it
CALLS_MAX = 32  # concurrent calls of all callers; one console makes two at most
SOCKET_PATH_BYTES_MAX = 100  # longest path of a socket: the address field `sun_path` has 104 bytes on BSD and macOS, 108 on Linux
TEXT_SHOWN_MAX = 64  # characters of a caller's text that an error message quotes
SOCKET_PATH_FILE = "control.path"  # file of the data directory with the socket's path, if the usual path is too long

logger = logging.getLogger(__name__)


async def _send(stream: trio.abc.SendStream, plain: Any) -> None:
    try:
        data: bytes = msgpack.packb(plain, use_bin_type=True)
    except UnicodeEncodeError as error:  # Python decodes invalid bytes of a command line as lone surrogates
        raise UserError(f"{error.object[:TEXT_SHOWN_MAX]!r} is not UTF-8: type it in a UTF-8 terminal") from None
    await stream.send_all(len(data).to_bytes(4, "big") + data)


async def _receive(stream: trio.abc.Stream) -> Any:
    """Return the next message of the stream. Raises `RemoteProtocolError` if the message is oversized, cut short or malformed."""
    size = int.from_bytes(await _receive_exactly(stream, 4), "big")
    if size > MESSAGE_BYTES_MAX:
        raise RemoteProtocolError("oversized", f"{size} bytes")
    return codec.unpack(await _receive_exactly(stream, size), MESSAGE_BYTES_MAX)


async def _receive_exactly(stream: trio.abc.Stream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = await stream.receive_some(size - len(data))
        if not part:
            raise RemoteProtocolError("cut-short", f"{len(data)} of {size} bytes")
        data += part
    return bytes(data)


# Path of the socket -------------------------------------------------------------------------------------------------


def socket_path(directory: Path, configured: str = "") -> Path:
    """Return the path of the control socket of this data directory's daemon, also if no daemon runs."""
    if configured:
        return Path(configured).expanduser().absolute()
    pointer = directory / SOCKET_PATH_FILE
    if pointer.is_file():
        return Path(pointer.read_text(encoding="utf-8").strip())
    return directory / "control.sock"


def _place_for(directory: Path, configured: str) -> Path:
    """Return `socket_path`, or a path in a new temporary directory if `socket_path` is too long for a socket address."""
    path = socket_path(directory, configured)
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX and path.parent.is_dir():
        return path
    if configured:
        raise UserError(
            f"control_socket {configured!r}: its directory must exist, its path has at most {SOCKET_PATH_BYTES_MAX} bytes"
        )
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    is_usable = given and len(given) < SOCKET_PATH_BYTES_MAX // 2 and os.access(given, os.W_OK)
    path = Path(tempfile.mkdtemp(prefix="folkmoot-", dir=given if is_usable else "/tmp")) / "control.sock"
    (directory / SOCKET_PATH_FILE).write_text(f"{path}\n", encoding="utf-8")
    return path


async def _bind(path: Path) -> trio.SocketListener:
    # A killed daemon leaves its socket without a listener. Only such a socket is removed, and no other file at this path.
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None:
        if not stat.S_ISSOCK(mode):
            raise UserError(f"the control socket needs {path}, which is another file; move it away")
        try:
            stream = await trio.open_unix_socket(str(path))
        except OSError:
            path.unlink(missing_ok=True)
        else:
            await stream.aclose()
            raise UserError(f"another process listens on {path}; stop it, or set control_socket to another path")
    listening = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        with storage_errors(path):
            await listening.bind(str(path))
            path.chmod(0o600)  # the mode is set before `listen`, so that no other user can connect
        listening.listen(CALLS_MAX)
    except BaseException:
        listening.close()
        raise
    return trio.SocketListener(listening)


# Server --------------------------------------------------------------------------------------------------------------


async def serve_control_socket(
    api: PeerApi,
    directory: Path,
    configured: str = "",
    *,
    task_status: trio.TaskStatus[Path] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled, then remove the socket. `task_status` gets the path when consoles can connect.

    Raises `UserError` if the socket cannot be made. An error of a caller ends only that caller's connection.
    """
    path = _place_for(directory, configured)
    listener = await _bind(path)
    calls = trio.CapacityLimiter(CALLS_MAX)

    async def handle(stream: trio.SocketStream) -> None:
        async with stream, calls:
            await _answer(api, stream)

    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, handle, [listener])
            task_status.started(path)
    finally:
        path.unlink(missing_ok=True)
        if path.parent != directory and not configured:
            (directory / SOCKET_PATH_FILE).unlink(missing_ok=True)
            path.parent.rmdir()


async def _answer(api: PeerApi, stream: trio.SocketStream) -> None:
    try:
        with trio.fail_after(REQUEST_SECONDS_MAX):
            request = await _receive(stream)
        reply = await _call_unless_caller_leaves(stream, lambda: _reply(api, request, stream))
        if reply is not None:
            with trio.fail_after(REPLY_SECONDS_MAX):
                await _send(stream, reply)
    except RemoteProtocolError as error:
        logger.warning("control socket: %s", error)
    except (trio.BrokenResourceError, trio.TooSlowError):
        pass  # the caller has disconnected


async def _call_unless_caller_leaves(stream: trio.SocketStream, call: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of `call`. Cancel it and return None if the caller disconnects or sends more than one request."""
    result = None

    async def watch(scope: trio.CancelScope) -> None:
        try:
            await stream.receive_some(1)
        except trio.BrokenResourceError:
            pass
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, nursery.cancel_scope)
        result = await call()
        nursery.cancel_scope.cancel()
    return result


async def _reply(api: PeerApi, request: Any, stream: trio.abc.SendStream) -> list[Any] | None:
    """Return the final reply, or None if the caller reads the parts of its answer too slowly or has left."""
    if not isinstance(request, list) or len(request) != 3 or request[0] != VERSION:
        return ["error", f"this peer uses the control protocol {VERSION}; use the `peer` command of the same installation"]
    call = rpc_methods().get(request[1]) if isinstance(request[1], str) else None
    if call is None:
        return ["error", f"this peer has no method {str(request[1])[:40]!r}; {VERSION_MISMATCH_HINT}"]
    try:
        arguments = call.decode_arguments(request[2])
    except RemoteProtocolError as error:
        return ["error", f"{error}; {VERSION_MISMATCH_HINT}"]
    try:
        answer = getattr(api, call.name)(*arguments)
        if not call.is_streamed:
            return ["ok", codec.to_plain(await answer)]
        async with contextlib.aclosing(answer):
            async for part in answer:
                try:
                    with trio.fail_after(REPLY_SECONDS_MAX):
                        await _send(stream, ["part", codec.to_plain(part)])
                except (trio.BrokenResourceError, trio.TooSlowError):
                    return None
        return ["ok", None]
    except (UserError, RemoteProtocolError) as error:
        return ["error", str(error)]
    except (OSError, sqlite3.Error) as error:  # for example a full disk
        logger.warning("control socket: %s failed: %s", request[1], error)
        way = "free some space, or check the disk and its permissions"
        return ["error", f"the peer failed at {request[1]!r}: {getattr(error, 'strerror', None) or error}; {way}"]
    except Exception:  # a failed call must not stop the daemon
        logger.exception("control socket: %s failed", request[1])
        return ["error", f"the peer failed at {request[1]!r}; `peer log` has the cause"]


# Client --------------------------------------------------------------------------------------------------------------


def make_client(directory: Path, configured: str = "") -> PeerApi:
    """Return a client of the daemon that runs on `directory`, with the calls of its features."""
    return typing.cast(PeerApi, _Client(directory, configured))


class _Client:
    def __init__(self, directory: Path, configured: str) -> None:
        self._directory = directory
        self._configured = configured

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method that sends this call to the daemon, with the arguments and the result of the call's declaration."""
        if name not in rpc_methods():
            raise AttributeError(f"no call {name!r} is declared")
        return partial(self._stream if rpc_methods()[name].is_streamed else self._call, rpc_methods()[name])

    async def _call(self, call: RpcMethod, *arguments: Any, **named: Any) -> Any:
        async with contextlib.aclosing(self._replies(call, call.encode_arguments(*arguments, **named))) as replies:
            return call.decode_result((await anext(replies))[1])

    async def _stream(self, call: RpcMethod, *arguments: Any, **named: Any) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(self._replies(call, call.encode_arguments(*arguments, **named))) as replies:
            async for kind, value in replies:
                if kind == "part":
                    yield call.decode_result(value)

    async def _replies(self, call: RpcMethod, plain: list[Any]) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield the replies to one call: the parts, then `ok`.

        Raises `UserError` if the peer reports an error, stops, or does not run.
        """
        stream = await self._connect()
        async with stream:
            kind = "part"
            try:
                await _send(stream, [VERSION, call.name, plain])
                while kind == "part":
                    kind, value = await _receive(stream)
                    if kind == "error":
                        raise UserError(str(value))
                    yield kind, value
            except (RemoteProtocolError, trio.BrokenResourceError):
                raise UserError(f"the peer on {self._directory} stopped before it answered {call.name!r}") from None

    async def _connect(self) -> trio.SocketStream:
        path = socket_path(self._directory, self._configured)
        try:
            return await trio.open_unix_socket(str(path))
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise UserError(f"{path}: permission denied; the peer runs as another user") from None
            way = f"start it with `peer run --data-dir {shlex.quote(str(self._directory))}`"
            if not self._directory.exists():
                way = "it does not exist; create it with `peer init` or `peer join`, or choose another --data-dir"
            if process := DataDirectory(self._directory).starting_process():
                way = f"process {process} is starting or stopping; try again in a few seconds"
            raise NotRunningError(f"no peer runs on {self._directory}: {way}", self._directory) from None

    async def stop_peer(self) -> None:
        """Tell the peer to stop, and return when it has confirmed or has closed the connection."""
        stream = await self._connect()
        async with stream:
            try:
                await _send(stream, [VERSION, "stop_peer", []])
                await _receive(stream)
            except (RemoteProtocolError, trio.BrokenResourceError):
                pass
