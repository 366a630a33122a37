"""`hivemind.averaging.DecentralizedAverager` (github.com/learning-at-home/hivemind, MIT): one vector, averaged in f16.

What `benchmarks.round` holds a round of ours against. Finding the group is timed apart from the exchange: hivemind's optimizer
does it while it computes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression

from benchmarks.rivals.hivemind_swarm import START_SECONDS_MAX, join
from benchmarks.rivals.sockets import Traffic, family_of
from benchmarks.rivals.work import Work, meet

AVERAGING_SECONDS_MAX = 60.0
REQUEST_SHARE = 0.6  # of the matchmaking time, which it has to be smaller than
POLL_SECONDS = 0.002
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    work, rank = Work.load(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(work.threads)
    averager = DecentralizedAverager(
        [torch.zeros(work.job().model.parameters)],
        join(work, rank),
        start=True,
        prefix="folkmoot",
        target_group_size=work.peers,
        min_group_size=work.peers,
        min_matchmaking_time=work.matchmaking_seconds,
        request_timeout=REQUEST_SHARE * work.matchmaking_seconds,
        compression=Float16Compression(),
    )
    traffic, rounds = Traffic(os.getpid()), work.job().rounds
    times = [average(averager, work, rank, number) for number in range(work.warm)]
    sent, processor = traffic.sent(), processor_seconds()
    times = [average(averager, work, rank, number) for number in range(work.warm, work.warm + rounds)]
    report = {
        "times": times,
        "bytes_sent": (traffic.sent() - sent) / rounds,
        "processor_seconds": (processor_seconds() - processor) / rounds,
    }
    traffic.close()
    part = work.result_file(rank).with_suffix(".part")
    part.write_text(json.dumps(report))
    part.replace(work.result_file(rank))
    meet(work, rank, "done", START_SECONDS_MAX)
    os._exit(0)  # its own shutdown waits for threads that wait for peers that are gone


def average(averager: DecentralizedAverager, work: Work, rank: int, number: int) -> tuple[float, float]:
    """(seconds to find the group, seconds of the exchange), from when everybody is there."""
    with averager.get_tensors() as tensors:
        tensors[0].fill_(float(rank))
    assert meet(work, rank, f"round-{number}", START_SECONDS_MAX), "some process is gone"
    started = time.perf_counter()
    control = averager.step(wait=False, require_trigger=True, timeout=AVERAGING_SECONDS_MAX)
    while control.stage is not AveragingStage.AWAITING_TRIGGER and not control.done():
        time.sleep(POLL_SECONDS)
    found = time.perf_counter()
    control.allow_allreduce()
    control.result()
    ended = time.perf_counter()
    with averager.get_tensors() as tensors:
        off = float((tensors[0] - (work.peers - 1) / 2).abs().max())
    assert off < 0.01, f"the average is off by {off}"
    return found - started, ended - found


def processor_seconds() -> float:
    """Of this process and those it has started."""
    total = 0
    for process in family_of(os.getpid()):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


if __name__ == "__main__":
    main()
