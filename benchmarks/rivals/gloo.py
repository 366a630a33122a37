"""`torch.distributed` with gloo: each step all-reduces the flat gradient without checks; one lie or crash ends the training."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from torch import distributed

from benchmarks.rivals.sockets import Traffic
from benchmarks.rivals.work import Replica, Work, meet

STOP_SECONDS_MAX = 60.0


def main() -> None:
    work, rank = Work.load(sys.argv[1]), int(sys.argv[2])
    replica = Replica(work, rank)
    optimizer = replica.optimizer()
    gradients = replica.gradients
    store = f"file://{Path(work.folder).absolute() / 'gloo-store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=work.peers)
    traffic, started, before = Traffic(os.getpid()), 0.0, 0
    for step in range(replica.spec.rounds):
        if step == work.warm:
            distributed.barrier()
            started, before = time.perf_counter(), traffic.sent()
        replica.engine.accumulate_gradient(replica.share(step, rank))
        distributed.all_reduce(gradients)
        gradients /= work.peers
        optimizer.step(replica.rate(step))
    steps = replica.spec.rounds - work.warm
    seconds, sent = time.perf_counter() - started, traffic.sent() - before
    traffic.close()
    replica.report(steps * replica.spec.batch, steps, seconds, sent)
    meet(work, rank, "done", STOP_SECONDS_MAX)  # a closed connection is an error for the others
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
