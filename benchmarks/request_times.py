"""A peer whose worker writes down when it computed each request.

`python -m benchmarks.request_times run …` is `peer run …` with a worker process of this module. The worker appends a line of JSON
for each request to the file `REQUEST_TIMES`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from peer.cli import build_parser
from peer.commands import local_commands
from peer.commands.command_line_parser import settings_from_options
from peer.daemon.daemon import ParticipantContext, make_honest_participant
from protocol.errors import UserError
from training.round_context import RoundParticipant

WORKER: Final = "worker"  # the argument that makes this process the worker
FILE: Final = "REQUEST_TIMES"


@dataclass(frozen=True, slots=True)
class RequestTimes:
    request: str  # name of the request's kind
    round: int | None  # None: the request is about no round
    began: float  # seconds of the monotonic clock, which is the same in all processes of a machine
    ended: float


def read_times(file: Path) -> list[RequestTimes]:
    """Return the requests of a worker that has replied to them."""
    return [RequestTimes(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def work() -> None:
    """Run as the worker process."""
    from peer.worker import main as worker_main  # it imports torch, which the peer itself must not

    handle: Callable[[Any, Any], Any] = worker_main.WorkerRequestHandler.handle_request

    with Path(os.environ[FILE]).open("a", buffering=1) as file:

        def handle_request(self: worker_main.WorkerRequestHandler, request: Any) -> Any:
            began = time.monotonic()
            try:
                return handle(self, request)
            finally:
                times = RequestTimes(request.TAG, getattr(request, "round", None), began, time.monotonic())
                file.write(json.dumps(asdict(times)) + "\n")

        worker_main.WorkerRequestHandler.handle_request = handle_request  # type: ignore[method-assign]
        worker_main.main()


def make_timed_participant(context: ParticipantContext) -> RoundParticipant:
    if context.worker is not None:
        context.worker.command = [sys.executable, "-m", "benchmarks.request_times", WORKER]
    return make_honest_participant(context)


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        del sys.argv[1]
        work()
        return 0
    config = settings_from_options(build_parser().parse_args(sys.argv[1:])).config
    return local_commands.run_peer_with_config(config, console=False, make_participant=make_timed_participant)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"peer: error: {error}")
