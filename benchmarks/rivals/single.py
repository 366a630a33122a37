"""One process with the whole batch: the cost of training without a network."""

from __future__ import annotations

import sys
import time

import numpy as np

from benchmarks.rivals.work import Replica, Work


def main() -> None:
    work = Work.load(sys.argv[1])
    replica = Replica(work, 0)
    optimizer = replica.optimizer()
    started = 0.0
    for step in range(replica.spec.rounds):
        if step == work.warm:
            started = time.perf_counter()
        offsets = np.concatenate([replica.share(step, rank) for rank in range(work.peers)])
        replica.engine.accumulate_gradient(offsets)
        optimizer.step(replica.rate(step))
    seconds, steps = time.perf_counter() - started, replica.spec.rounds - work.warm
    replica.report(steps * work.peers * replica.spec.batch, steps, seconds, 0)


if __name__ == "__main__":
    main()
