"""The supervisor of the worker process: it starts the process, sends it one request at a time, and restarts it when it dies.

The daemon computes no gradients and never imports torch. Requests wait in the order of priorities that features declare
(`training.worker_protocol`): proposals come before audits, and audits before evaluations and texts for people. Requests of equal
priority are served in order of arrival.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import trio

import peer
from peer import features
from protocol.errors import LocalProtocolError, RemoteProtocolError, UserError
from training import worker_protocol
from training.engine_resources import EngineResources
from training.job_spec import JobSpec

R = TypeVar("R")
log = logging.getLogger(__name__)

START_SECONDS_MAX = 120.0  # longest start of the process, for an import of torch from a cold disk on a slow machine
SILENCE_SECONDS_MAX = 120.0  # longest time without a heartbeat during a request: one step of a large model takes far less
# Longest wait for a new description of the worker: a user waits, and the last description is nearly as good.
DESCRIBE_SECONDS_MAX = 1.0
PING_SECONDS = 30.0  # seconds between pings of an idle worker
REQUEST_SECONDS_MAX = 3_600.0  # longest computation of one request: rounds have their own, shorter timeouts
STOP_SECONDS = 4.0  # time in which the process must end by itself before it is killed
BACKOFF_SECONDS_MAX = 60.0
STARTS_MAX = 3  # failed starts after which the supervisor gives up, if no start has succeeded before
QUEUE_MAX = 1_024  # waiting requests: a round needs one proposal and at most TRAINERS_MAX re-executions
JOBS_MAX = 8  # jobs that a restarted worker opens again, equal to the worker's own limit
STDERR_LINES = 20  # last lines of the worker's stderr that are stored, to explain its end
STDERR_LINE_BYTES_MAX = 4_096
# Errors of a start for which the machine lacks resources: a later start may succeed. After others, as for a missing program, none
# can.
TRANSIENT_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
ONE_THREAD = EngineResources(threads=1)
# Folder of this program's packages, for a worker of a checkout that is not installed.
CODE_FOLDER = Path(peer.__file__).parents[1]


@dataclass(order=True)
class _PendingRequest:
    priority: int
    order: int
    request: Any = field(compare=False)
    deadline_seconds: float = field(compare=False)
    reply: Any = field(compare=False, default=None)
    error: str | None = field(compare=False, default=None)
    done: trio.Event = field(compare=False, default_factory=trio.Event)
    abandoned: trio.Event = field(compare=False, default_factory=trio.Event)


class WorkerSupervisor:
    """The supervisor of a worker process. `run` keeps the process alive, and any number of tasks may call `ask` meanwhile."""

    def __init__(
        self,
        resources: EngineResources = ONE_THREAD,
        command: Sequence[str] | None = None,
        backoff_seconds: float = 1.0,
        engine: str = "pytorch",
    ) -> None:
        """Create a supervisor. `command` replaces `python -m peer.worker.main`; the worker's arguments are appended to it."""
        # last description that the current worker process sent; None without a process
        self.description: worker_protocol.WorkerInfo | None = None
        self.pid: int | None = None
        self.restarts = 0
        self._resources, self._engine = resources, engine
        kinds = features.worker_requests().values()
        self._kinds = {kind.request: kind for kind in kinds}
        self.replies = worker_protocol.messages_from_worker(kinds)
        self.command = list(command or (sys.executable, "-m", "peer.worker.main"))
        self._backoff_seconds = backoff_seconds
        self._micro_batch_max: int | None = None
        self._queue: list[_PendingRequest] = []
        self._numbers = itertools.count(1)
        self._wake = trio.Event()
        self.open_jobs: dict[bytes, worker_protocol.OpenJobRequest] = {}  # the least recently used one first
        self._stopped = False
        self._refusal = ""  # why no process can start, for people; empty: one may start

    async def ask(self, request: worker_protocol.WorkerRequest[R], deadline_seconds: float = REQUEST_SECONDS_MAX) -> R:
        """Return the worker's reply to a request. `deadline_seconds` begins when the worker gets the request.

        Raises `WorkerDied` if the process ends first (a retry is safe), `WorkerFailed` if the request fails or no process can
        start, and `LocalProtocolError` if the queue is full or no feature declares the request. Cancellation withdraws a waiting
        request and stops a running one at its next step.
        """
        if self._refusal:
            raise worker_protocol.WorkerFailed(self._refusal)
        if self._stopped:
            raise worker_protocol.WorkerDied("the worker has been stopped")
        if len(self._queue) >= QUEUE_MAX:
            raise LocalProtocolError(f"{QUEUE_MAX} requests are waiting for the worker")
        pending = self.pending_request(request, next(self._numbers), deadline_seconds)
        heapq.heappush(self._queue, pending)
        self._wake.set()
        try:
            await pending.done.wait()
        finally:
            pending.abandoned.set()
        if pending.error is not None:
            raise worker_protocol.WorkerDied(pending.error)
        if isinstance(pending.reply, worker_protocol.RequestFailed):
            raise worker_protocol.WorkerFailed(pending.reply.text)
        self._record_use(request)
        return cast(R, pending.reply)

    def _record_use(self, request: worker_protocol.WorkerRequest[Any]) -> None:
        """Close the least recently used job if too many are open, as the worker does."""
        job = getattr(request, "job", b"")  # Some requests are about no job.
        opening = request if isinstance(request, worker_protocol.OpenJobRequest) else self.open_jobs.get(job)
        if opening is None:
            return
        self.open_jobs.pop(job, None)
        self.open_jobs[job] = opening
        while len(self.open_jobs) > JOBS_MAX:
            del self.open_jobs[next(iter(self.open_jobs))]

    def pending_request(
        self, request: worker_protocol.WorkerRequest[Any], order: int = 0, deadline_seconds: float = REQUEST_SECONDS_MAX
    ) -> _PendingRequest:
        """Return a queue entry for a request, with the declared priority.

        Raises `LocalProtocolError` if no feature declares the request.
        """
        kind = self._kinds.get(type(request))
        if kind is None:
            known = ", ".join(known.TAG for known in self._kinds)
            raise LocalProtocolError(f"unknown worker request {request.TAG!r}: this program has {known}")
        return _PendingRequest(kind.priority, order, request, deadline_seconds)

    async def refresh_description(self) -> worker_protocol.WorkerInfo | None:
        """Return a new description of an idle worker, or the last description of a busy one. Return None without a process."""
        if self.description is not None:
            with trio.move_on_after(DESCRIBE_SECONDS_MAX), contextlib.suppress(worker_protocol.WorkerDied):
                self.description = await self.ask(worker_protocol.DescribeRequest())
        return self.description

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a worker process alive until cancelled. `task_status` is started when the first process is ready.

        Raises `UserError` if no process becomes ready.
        """
        failures = 0
        try:
            while True:
                session = _WorkerProcess(self)
                try:
                    await session.run(task_status if self.restarts == 0 else trio.TASK_STATUS_IGNORED)
                finally:
                    self.description = self.pid = None
                failures = 0 if session.was_useful else failures + 1
                if self.restarts == 0 and not session.was_ready:
                    if failures >= STARTS_MAX and not session.has_no_room:
                        raise self.give_up(
                            f"the worker process does not start: {session.reason}; try it by hand: {' '.join(self.command)}"
                        )
                else:
                    self.restarts += 1
                # The kernel sends SIGKILL when memory is scarce. The next process has smaller micro-batches, which need less
                # memory.
                if session.returncode == -signal.SIGKILL and not session.killed and self.open_jobs:
                    most = max(JobSpec.decode(job.spec).micro_batch for job in self.open_jobs.values())
                    self._micro_batch_max = max(1, min(most, self._micro_batch_max or most) // 2)
                log.warning("the worker ended (%s): restarting it", session.reason)
                await trio.sleep(min(BACKOFF_SECONDS_MAX, self._backoff_seconds * 2**failures))
        finally:
            self._stopped = True
            for pending in self._queue:
                if self._refusal:
                    pending.reply = worker_protocol.RequestFailed(self._refusal)
                else:
                    pending.error = "the worker has been stopped"
                pending.done.set()

    def give_up(self, reason: str) -> UserError:
        """Let all requests fail with the reason for which no process can start, and return an error with this reason."""
        self._refusal = reason
        return UserError(reason)

    async def next_request(self) -> _PendingRequest | None:
        """Return the most urgent waiting request whose caller still waits, or None if there is none within PING_SECONDS."""
        with trio.move_on_after(PING_SECONDS):
            while True:
                while self._queue:
                    pending = heapq.heappop(self._queue)
                    if not pending.abandoned.is_set():
                        return pending
                self._wake = trio.Event()
                await self._wake.wait()
        return None

    def arguments(self) -> list[str]:
        limit = [] if self._micro_batch_max is None else ["--micro-batch-max", str(self._micro_batch_max)]
        return [*self.command, "--engine", self._engine, *self._resources.arguments(), *limit]

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(part for part in (str(CODE_FOLDER), os.environ.get("PYTHONPATH")) if part)
        count = self._resources.threads
        threads = {"OMP_NUM_THREADS": str(count)} if count else {}
        return {**os.environ, **threads, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


class _WorkerProcess:
    """One worker process from its start to its end, with the tasks that write and read its pipes."""

    def __init__(self, worker: WorkerSupervisor) -> None:
        self.reason = "it was stopped"
        self.returncode: int | None = None
        self.was_ready = self.was_useful = self.killed = self.has_no_room = False
        self._worker = worker
        self._scope = trio.CancelScope()
        self._number = 0  # number of the last request that was sent to the process
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._send_frames, self._frames = trio.open_memory_channel[Any](0)

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Run the process until it ends, and set `reason` to the cause.

        At return or cancellation, the process and its tasks have ended.
        """
        try:
            pipe, environment = subprocess.PIPE, self._worker.environment()
            self._process = await trio.lowlevel.open_process(
                self._worker.arguments(), stdin=pipe, stdout=pipe, stderr=pipe, env=environment
            )
        except OSError as error:
            self.reason = f"{error.strerror or error}: {self._worker.command[0]}"
            self.has_no_room = error.errno in TRANSIENT_ERRORS
            return
        async with trio.open_nursery() as around:
            around.start_soon(self._read_stderr)
            try:
                with self._scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._read_frames)
                        await self._serve(task_status)
            finally:
                await self._stop()

    def _end(self, reason: str) -> None:
        """Set `reason`, and cancel all tasks of this process at their next checkpoint."""
        self.reason = reason
        self._scope.cancel()

    # Asking ----------------------------------------------------------------------------------------------------------

    async def _serve(self, task_status: trio.TaskStatus[None]) -> None:
        self._worker.pid = self._process.pid
        ready = await self._receive(START_SECONDS_MAX, "was not ready")
        # Unless an earlier process has been ready, a later start would fail for the same reason.
        if isinstance(ready, worker_protocol.RequestFailed):
            if self._worker.restarts == 0:
                raise self._worker.give_up(ready.text)
            self._end(ready.text)
            await trio.sleep_forever()
        self._worker.description = ready
        self.was_ready = True
        task_status.started()
        # A new process must open the jobs of the earlier process before other requests.
        for job in list(self._worker.open_jobs.values()):
            await self._answer(self._worker.pending_request(job))
        while True:
            next_request = await self._worker.next_request()
            await self._answer(next_request or self._worker.pending_request(worker_protocol.PingRequest()))
            self.was_useful = True

    async def _answer(self, pending: _PendingRequest) -> None:
        """Send a request to the process, and set the request's reply, or its error if the process ends first."""
        try:
            self._number += 1
            await self._send(pending.request)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_when_abandoned, pending)
                with trio.move_on_after(pending.deadline_seconds) as deadline:
                    pending.reply = await self._reply()
                nursery.cancel_scope.cancel()
            if deadline.cancelled_caught:
                self._end(f"{pending.request.TAG} took longer than {pending.deadline_seconds:g} s")
                await trio.lowlevel.checkpoint()
        finally:
            if pending.reply is None:
                pending.error = f"the worker process ended during {pending.request.TAG}: {self.reason}"
            pending.done.set()

    async def _reply(self) -> Any:
        while isinstance(message := await self._receive(SILENCE_SECONDS_MAX, "was silent"), worker_protocol.WorkerHeartbeat):
            pass
        return message

    async def _cancel_when_abandoned(self, pending: _PendingRequest) -> None:
        await pending.abandoned.wait()
        await self._send(worker_protocol.CancelRequest())

    async def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(worker_protocol.encode_frame(self._number, message))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await trio.sleep_forever()  # the process is ending, and `_read_frames` reports the reason

    async def _receive(self, seconds: float, complaint: str) -> Any:
        with trio.move_on_after(seconds) as patience:
            message = await self._frames.receive()
        if patience.cancelled_caught:
            self._end(f"it {complaint} for {seconds:g} s")
            await trio.sleep_forever()
        return message

    # The process -----------------------------------------------------------------------------------------------------

    async def _read_frames(self) -> None:
        try:
            while True:
                length, number = worker_protocol.parse_header(await self._read_exactly(worker_protocol.FRAME_HEADER_BYTES))
                message = worker_protocol.parse_body(await self._read_exactly(length), self._worker.replies)
                if number == self._number:  # replies with another number belong to earlier requests
                    await self._send_frames.send(message)
        except EOFError:
            with trio.move_on_after(STOP_SECONDS):
                await self._process.wait()
            self._end(self._exit_reason())
        except RemoteProtocolError as error:
            self._end(f"it sent an invalid frame: {error}")

    async def _read_exactly(self, count: int) -> bytes:
        assert self._process.stdout is not None
        data = bytearray()
        while len(data) < count:
            piece = await self._process.stdout.receive_some(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _exit_reason(self) -> str:
        code = self._process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        return f"{how}: {self._stderr[-1]}" if self._stderr else how

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        rest = b""
        async for piece in self._process.stderr:
            *lines, rest = (rest + piece).split(b"\n")
            rest = rest[-STDERR_LINE_BYTES_MAX:]
            for line in filter(None, lines):
                self._stderr.append(line[:STDERR_LINE_BYTES_MAX].decode(errors="replace"))
                log.info("worker: %s", self._stderr[-1])

    async def _stop(self) -> None:
        """Close the process's stdin, which ends the process.

        Send SIGKILL if the end takes longer than STOP_SECONDS. The worker ignores SIGTERM, because this signal may be sent to the
        daemon's whole process group.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with trio.CancelScope(shield=True):
            await self._process.stdin.aclose()
            with trio.move_on_after(STOP_SECONDS):
                await self._process.wait()
            if self._process.returncode is None:
                self.killed = True
                self._process.kill()
            self.returncode = await self._process.wait()
            await self._process.stdout.aclose()
