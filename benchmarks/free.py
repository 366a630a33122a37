"""A peer whose updates cost nothing, so that a round only has the costs of agreement.

`python -m benchmarks.free run …` is `peer run …` with a worker process of this module. The worker does all the work around an
update (feedback, payload, buffer, states) but has the numbers of the update ready. At its end it writes the times of its fsyncs,
without those of SQLite, to the file `FREE_FSYNCS`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np

from peer.cli import build_parser, settings_from_options
from peer.commands import local_commands
from peer.daemon.daemon import ParticipantContext
from peer.roles.trainer import Trainer
from protocol.errors import UserError
from training import random_stream
from training.replay import proposal_replay
from training.replay.inner_state import InnerState, OnState
from training.replicated.tensor_layout import Float32Array

WORKER = "worker"  # the argument that makes this process the worker
KNOWN_ELEMENTS = 1 << 20  # repeated over larger models
DEVIATION = 1e-3  # of the update's elements, as after a few inner steps
SHIFT = 4099  # offset between two trainers' updates, which have the same numbers at other places


@lru_cache(maxsize=1)
def known() -> Float32Array:
    return random_stream.irwin_hall_integers(KNOWN_ELEMENTS, "free").astype(np.float32) * np.float32(
        DEVIATION / random_stream.IRWIN_HALL_DEVIATION
    )


def update(
    parameters: Float32Array, job: bytes, round: int, trainer: bytes, inner: InnerState | None, on_state: OnState, **_: object
) -> tuple[Float32Array, Sequence[float]]:
    """Return other numbers for every round and trainer, at the cost of two copies."""
    return np.resize(np.roll(known(), trainer[0] * SHIFT + round), parameters.shape), (0.0,)


def work() -> None:
    """Run as the worker process."""
    from peer.worker import main as worker_main  # it imports torch, which the peer itself must not
    from training.engines.request_handlers import WorkerContext

    class Free(WorkerContext):
        def update_function(self, job: bytes) -> proposal_replay.ComputeUpdate:
            return update

    known()  # computed before the first round needs them
    worker_main.main(Free)


def make_free_trainer(context: ParticipantContext) -> Trainer:
    assert context.worker is not None, "who proposes trains"
    context.worker.command = [sys.executable, "-m", "benchmarks.free", WORKER]
    local = context.config.local_data
    return Trainer(context.worker, context.text_folder, Path(local) if local else None)


@contextmanager
def fsyncs_noted() -> Iterator[None]:
    times, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        times.append(time.time())
        fsync(descriptor)

    os.fsync = noted
    try:
        yield
    finally:
        if "FREE_FSYNCS" in os.environ:
            Path(os.environ["FREE_FSYNCS"]).write_text("\n".join(map(str, times)))


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        del sys.argv[1]
        work()
        return 0
    options = build_parser().parse_args(sys.argv[1:])
    with fsyncs_noted():
        return local_commands.run_peer_with_config(
            settings_from_options(options).config, console=False, make_participant=make_free_trainer
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"peer: error: {error}")
