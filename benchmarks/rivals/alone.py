"""Separate trainers, each with its own share of the data: the upper bound for a network's throughput."""

from __future__ import annotations

import sys
import time

from benchmarks.rivals.work import Replica, Work, meet

START_SECONDS_MAX = 120.0


def main() -> None:
    work, rank = Work.load(sys.argv[1]), int(sys.argv[2])
    replica = Replica(work, rank)
    optimizer = replica.optimizer()
    assert meet(work, rank, "ready", START_SECONDS_MAX), "a process did not start"
    started = 0.0
    for step in range(replica.spec.rounds):
        if step == work.warm:
            started = time.perf_counter()
        replica.engine.accumulate_gradient(replica.share(step, rank))
        optimizer.step(replica.rate(step))
    steps = replica.spec.rounds - work.warm
    replica.report(steps * replica.spec.batch, steps, time.perf_counter() - started, 0)


if __name__ == "__main__":
    main()
