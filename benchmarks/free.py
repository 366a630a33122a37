"""A peer whose updates cost nothing, so that what is left of a round is what agreeing on it costs.

`python -m benchmarks.free run …` is `peer run …` with a worker process of this module: it does all that the real one does around
an update (feedback, payload, buffer, states), but has the numbers of the update ready. When it ends it leaves the times of its
fsyncs in the file `FREE_FSYNCS` names; SQLite's own are not among them.
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
DEVIATION = 1e-3  # of the update's elements: that of a few inner steps
SHIFT = 4099  # between two trainers' updates, which are the same numbers at other places


@lru_cache(maxsize=1)
def known() -> Float32Array:
    return random_stream.irwin_hall_integers(KNOWN_ELEMENTS, "free").astype(np.float32) * np.float32(
        DEVIATION / random_stream.IRWIN_HALL_DEVIATION
    )


def update(
    parameters: Float32Array, job: bytes, round: int, trainer: bytes, inner: InnerState | None, on_state: OnState, **_: object
) -> tuple[Float32Array, Sequence[float]]:
    """Other numbers for every round and trainer, for the price of two copies."""
    return np.resize(np.roll(known(), trainer[0] * SHIFT + round), parameters.shape), (0.0,)


def work() -> None:
    """Runs as the worker process."""
    from peer.worker import main as worker_main  # it imports torch, which the peer itself must not
    from training.engines.request_handlers import WorkerContext

    class Free(WorkerContext):
        def update_function(self, job: bytes) -> proposal_replay.ComputeUpdate:
            return update

    known()  # before the first round asks for them
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
