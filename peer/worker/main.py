"""The worker process: `python -m peer.worker.main`. Reads requests from stdin, computes, answers on stdout.

Only here an engine, and with it torch, is imported. The process holds nothing that matters: it may be killed at any instruction,
and it ends by itself as soon as the daemon that started it is gone.
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
HEARTBEAT_SECONDS = 1.0  # between signs of progress
OOM_SCORE = "500"  # of -1000..1000, see proc(5)


class RequestCancelled(Exception):
    """Nobody waits for the request any more."""


class MessagePipes:
    """Framed messages on two byte streams; a thread reads, so that a Cancel or the daemon's end is seen during work."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO, ended: Callable[[], None]) -> None:
        self._incoming, self._outgoing, self._ended = incoming, outgoing, ended
        self._requests: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()  # the daemon asks one thing at a time
        self._cancelled = -1  # requests up to this number are not waited for
        self._current = 0
        self._beaten = 0.0

    def start(self, kinds: tuple[type[Any], ...]) -> None:
        """Reads messages of these kinds from now on."""
        threading.Thread(target=self._read, args=(kinds,), daemon=True).start()

    def _read(self, kinds: tuple[type[Any], ...]) -> None:
        try:
            while header := self._incoming.read(worker_protocol.FRAME_HEADER_BYTES):
                length, number = worker_protocol.parse_header(header)
                message: Any
                try:
                    message = worker_protocol.parse_body(self._incoming.read(length), kinds)
                except RemoteProtocolError as error:  # such as a request that no feature of this process declares
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
        """Called between steps: shows the daemon progress, and stops the work if nobody waits for it."""
        if self._current <= self._cancelled:
            raise RequestCancelled
        if time.monotonic() - self._beaten >= HEARTBEAT_SECONDS:
            self._beaten = time.monotonic()
            self.send_message(worker_protocol.WorkerHeartbeat())


class WorkerRequestHandler:
    """Answers requests by the handlers that features declare."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        kinds = features.worker_requests().values()
        self.requests = worker_protocol.messages_to_worker(kinds)
        self._handlers = {kind.request: import_object(kind.handler) for kind in kinds}

    def handle_request(self, request: worker_protocol.WorkerRequest[R]) -> R:
        """Raises what the handler raises."""
        reply: R = self._handlers[type(request)](self.context, request)
        return reply


def serve_requests(pipes: MessagePipes, handler: WorkerRequestHandler) -> None:
    """Answers requests for ever."""
    while True:
        request = pipes.next_request()
        try:
            if isinstance(request, RemoteProtocolError):
                known = ", ".join(kind.TAG for kind in handler.requests)
                raise FolkmootError(f"no feature of this worker has such a request ({request}): it has {known}")
            pipes.send_message(
                handler.handle_request(request)
            )  # an answer that is no number has no encoding: that fails here too
        except RequestCancelled:
            pipes.send_message(worker_protocol.RequestFailed("cancelled"))
        except FolkmootError as error:
            pipes.send_message(worker_protocol.RequestFailed(str(error)[: worker_protocol.ERROR_CHARACTERS_MAX]))
        except Exception as error:  # the boundary of the process: the daemon is told, and the next request may well succeed
            what = "out of memory" if handler.context.backend.is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            pipes.send_message(worker_protocol.RequestFailed(what[: worker_protocol.ERROR_CHARACTERS_MAX]))


def _own_pipes() -> MessagePipes:
    """Takes stdin and stdout for the conversation; whatever prints from now on lands on stderr and cannot break the framing."""
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # When the daemon closed the pipe or is gone, this process ends at once: every file is written whole or not at all. (Linux's
    # PR_SET_PDEATHSIG would not do: it follows the daemon's *thread* that started us, and Trio's threads come and go.)
    return MessagePipes(os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb"), ended=partial(os._exit, 0))


def main(make_context: Callable[[EngineBackend, Callable[[], None], int], WorkerContext] = WorkerContext) -> None:
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # they reach a whole group; the daemon stops us in its own order
        signal.signal(number, signal.SIG_IGN)
    features.register_features()
    parser = argparse.ArgumentParser(prog="peer.worker.main", description="computes for one peer; started by its daemon")
    parser.add_argument("--engine", choices=tuple(features.engines()), default="pytorch", help="what computes")
    add_arguments(parser)
    parser.add_argument("--micro-batch-max", type=int, default=1 << 30, help="sequences per forward pass, whatever the job says")
    parser.add_argument("--rank", type=int, default=0, help="of a process that assists a worker; its orders come on stdin")
    parser.add_argument("--store", type=Path, help="file where all processes of a worker meet")
    arguments = parser.parse_args()
    resources = EngineResources.from_options(arguments)
    if not arguments.rank:  # an assistant is as modest as who started it
        # The daemon's votes come first when cores are short, and it outlives us when memory is.
        os.nice(NICENESS)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    kind: EngineBackend = import_object(features.engines()[arguments.engine])
    assert kind.name == arguments.engine, "a feature lists it under another name, by which no objective has a loss"
    if arguments.rank:
        kind.run_rank(resources, arguments.rank, arguments.store, sys.stdin.buffer)
    pipes = _own_pipes()
    try:
        kind.start_backend(resources, sys.orig_argv)
    except UserError as error:
        pipes.send_message(worker_protocol.RequestFailed(str(error)[: worker_protocol.ERROR_CHARACTERS_MAX]))
        return
    handler = WorkerRequestHandler(make_context(kind, pipes.heartbeat, arguments.micro_batch_max))
    gc.freeze()  # what was imported is no garbage
    pipes.send_message(kind.describe_worker())
    pipes.start(handler.requests)
    serve_requests(pipes, handler)


if __name__ == "__main__":
    main()
