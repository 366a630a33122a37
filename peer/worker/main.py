"""The worker process, `python -m peer.worker.main`: it reads requests from stdin, computes, and replies on stdout.

It imports an engine, and with it torch; the daemon never imports them. It has no state that must survive, so it may be killed at
any instruction. It ends by itself when its daemon ends.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from features.lazy_import import import_object
from peer import features
from protocol.errors import FolkmootError, RemoteProtocolError, UserError
from training import worker_protocol
from training.engine_resources import EngineResources, add_arguments
from training.engines.engine import EngineBackend
from training.engines.request_handlers import WorkerContext

R = TypeVar("R")
NICENESS = 5
HEARTBEAT_SECONDS = 1.0  # seconds between two heartbeats during a request
OOM_SCORE = "500"  # the worker's `oom_score_adj` (-1000 to 1000, see proc(5)): the kernel kills the worker before the daemon


class RequestCancelled(Exception):
    """The error that ends the work on a request that the daemon has cancelled."""


class MessagePipes:
    """Framed messages to and from the daemon.

    A thread reads them, so that the worker notices cancellations and the daemon's end during work.
    """

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO, ended: Callable[[], None]) -> None:
        self._incoming, self._outgoing, self._ended = incoming, outgoing, ended
        # (number, request) that is not handled yet: the daemon sends one request at a time.
        self._requests: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._cancelled = -1  # requests up to this number are cancelled
        self._current = 0
        self._beaten = 0.0

    def start(self, kinds: tuple[type[Any], ...]) -> None:
        """Start the thread that reads messages of these kinds."""
        threading.Thread(target=self._read, args=(kinds,), daemon=True).start()

    def _read(self, kinds: tuple[type[Any], ...]) -> None:
        try:
            while header := self._incoming.read(worker_protocol.FRAME_HEADER_BYTES):
                length, number = worker_protocol.parse_header(header)
                message: Any
                try:
                    message = worker_protocol.parse_body(self._incoming.read(length), kinds)
                except RemoteProtocolError as error:  # for example a request that no feature of this worker declares
                    message = error
                if isinstance(message, worker_protocol.CancelRequest):
                    self._cancelled = number
                else:
                    self._requests.put((number, message))
        finally:
            self._ended()

    def next_request(self) -> Any:
        self._current, message = self._requests.get()
        self._beaten = time.monotonic()
        return message

    def send_message(self, message: Any) -> None:
        self._outgoing.write(worker_protocol.encode_frame(self._current, message))
        self._outgoing.flush()

    def heartbeat(self) -> None:
        """Send a heartbeat to the daemon.

        Engines call this between steps. Raises `RequestCancelled` if the request was cancelled.
        """
        if self._current <= self._cancelled:
            raise RequestCancelled
        if time.monotonic() - self._beaten >= HEARTBEAT_SECONDS:
            self._beaten = time.monotonic()
            self.send_message(worker_protocol.WorkerHeartbeat())


class WorkerRequestHandler:
    """The handlers of requests that features declare."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        kinds = features.worker_requests().values()
        self.requests = worker_protocol.messages_to_worker(kinds)
        self._handlers = {kind.request: import_object(kind.handler) for kind in kinds}

    def handle_request(self, request: worker_protocol.WorkerRequest[R]) -> R:
        """Return the reply of the request's handler. Exceptions of the handler are not caught."""
        reply: R = self._handlers[type(request)](self.context, request)
        return reply


def serve_requests(pipes: MessagePipes, handler: WorkerRequestHandler) -> None:
    """Answer requests until the process ends."""
    while True:
        request = pipes.next_request()
        try:
            if isinstance(request, RemoteProtocolError):
                known = ", ".join(kind.TAG for kind in handler.requests)
                raise FolkmootError(f"unknown request ({request}): this worker has {known}")
            pipes.send_message(handler.handle_request(request))  # raises an error if the reply contains infinite values
        except RequestCancelled:
            pipes.send_message(worker_protocol.RequestFailed("cancelled"))
        except FolkmootError as error:
            pipes.send_message(worker_protocol.RequestFailed(str(error)[: worker_protocol.ERROR_CHARACTERS_MAX]))
        except Exception as error:  # any error goes to the daemon, and the worker continues: the next request may succeed
            what = "out of memory" if handler.context.backend.is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            pipes.send_message(worker_protocol.RequestFailed(what[: worker_protocol.ERROR_CHARACTERS_MAX]))


def _own_pipes() -> MessagePipes:
    """Return pipes on stdin and stdout for messages.

    Later prints go to stderr, so that they cannot break the framing of messages.
    """
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # This process exits at once when the daemon closes the pipe or ends. That is safe, because files are written atomically.
    # Linux's PR_SET_PDEATHSIG is no alternative: it follows the daemon's *thread* that started us, and Trio's threads end.
    return MessagePipes(os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb"), ended=partial(os._exit, 0))


def main(make_context: Callable[[EngineBackend, Callable[[], None], int], WorkerContext] = WorkerContext) -> None:
    # Terminals send these signals to the whole process group, but only the daemon stops the worker.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    features.register_features()
    parser = argparse.ArgumentParser(prog="peer.worker.main", description="computes for one peer; started by its daemon")
    parser.add_argument("--engine", choices=tuple(features.engines()), default="pytorch", help="library that computes")
    add_arguments(parser)
    parser.add_argument("--micro-batch-max", type=int, default=1 << 30, help="upper bound of sequences per forward pass")
    parser.add_argument(
        "--rank", type=int, default=0, help="rank of a process that assists a worker (its requests come on stdin)"
    )
    parser.add_argument("--store", type=Path, help="rendezvous file of all processes of a worker")
    arguments = parser.parse_args()
    resources = EngineResources.from_options(arguments)
    if not arguments.rank:  # processes that assist a worker inherit niceness and OOM score
        # When cores are scarce, the daemon's votes have priority. When memory is scarce, the kernel kills this process first.
        os.nice(NICENESS)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    kind: EngineBackend = import_object(features.engines()[arguments.engine].backend)
    assert kind.name == arguments.engine, "a feature lists the engine under another name"
    if arguments.rank:
        kind.run_rank(resources, arguments.rank, arguments.store, sys.stdin.buffer)
    pipes = _own_pipes()
    try:
        kind.start_backend(resources, sys.orig_argv)
    except UserError as error:
        pipes.send_message(worker_protocol.RequestFailed(str(error)[: worker_protocol.ERROR_CHARACTERS_MAX]))
        return
    handler = WorkerRequestHandler(make_context(kind, pipes.heartbeat, arguments.micro_batch_max))
    gc.freeze()  # objects of imported modules stay until the end, so the garbage collector can skip them
    pipes.send_message(kind.describe_worker())
    pipes.start(handler.requests)
    serve_requests(pipes, handler)


if __name__ == "__main__":
    main()
