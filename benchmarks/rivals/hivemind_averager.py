"""`hivemind.averaging.DecentralizedAverager` (github.com/learning-at-home/hivemind, MIT): one vector, averaged in f16.

`benchmarks.round` compares it with our rounds. The search for the group and the exchange have separate times, because hivemind's
optimizer searches while it computes. Each average is one attempt (`allow_retries=False`), since its time would hide a second one.
Processor time is hivemind's alone, without this module's meetings, fills, checks and byte counts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression

from benchmarks.rivals.hivemind_swarm import REQUEST_SHARE, START_SECONDS_MAX, join
from benchmarks.rivals.sockets import Traffic, family_of
from benchmarks.rivals.work import Work, meet

AVERAGING_SECONDS_MAX = 60.0  # to find the group, and then to exchange
TICKS = os.sysconf("SC_CLK_TCK")


class Averager(DecentralizedAverager):
    """An averager that notes when its own process has found a group, so that no polling is needed."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.found = multiprocessing.Value("d", 0.0)  # of the monotonic clock; set before the process starts, which inherits it
        super().__init__(*arguments, **settings)

    async def _aggregate_with_group(self, *arguments: Any, **settings: Any) -> Any:
        self.found.value = time.monotonic()
        return await super()._aggregate_with_group(*arguments, **settings)


def main() -> None:
    try:
        measure(Work.load(sys.argv[1]), int(sys.argv[2]))
        status = 0
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # its own shutdown waits for threads that wait for peers that are gone


def measure(work: Work, rank: int) -> None:
    torch.set_num_threads(work.threads)
    averager = Averager(
        [torch.zeros(work.job().model.parameters)],
        join(work, rank),
        start=True,
        prefix="folkmoot",
        target_group_size=work.peers,
        min_group_size=work.peers,
        min_matchmaking_time=work.matchmaking_seconds,
        request_timeout=REQUEST_SHARE * work.matchmaking_seconds,
        allreduce_timeout=AVERAGING_SECONDS_MAX,
        compression=Float16Compression(),
    )
    traffic, rounds = Traffic(os.getpid()), work.job().rounds

    def around() -> float:
        """Return the processor seconds of all work besides hivemind's, and of this thread's part in its averages."""
        return time.thread_time() + traffic.processor_seconds

    for number in range(work.warm):
        average(averager, work, rank, number)
    sent, processor = traffic.sent(), processor_seconds() - around()
    averages = [average(averager, work, rank, number) for number in range(work.warm, work.warm + rounds)]
    processor = processor_seconds() - around() - processor + sum(inside for _, _, inside in averages)
    report = {
        "times": [(finding, exchange) for finding, exchange, _ in averages],
        "bytes_sent": (traffic.sent() - sent) / rounds,
        "processor_seconds": processor / rounds,
    }
    traffic.close()
    part = work.result_file(rank).with_suffix(".part")
    part.write_text(json.dumps(report))
    part.replace(work.result_file(rank))
    meet(work, rank, "done", START_SECONDS_MAX)


def average(averager: Averager, work: Work, rank: int, number: int) -> tuple[float, float, float]:
    """Return the seconds to find the group, the seconds of the exchange, and this thread's processor seconds.

    The first time begins when all processes are present.
    """
    with averager.get_tensors() as tensors:
        tensors[0].fill_(float(rank))
    assert meet(work, rank, f"round-{number}", START_SECONDS_MAX), "a process ended"
    started, thread = time.monotonic(), time.thread_time()
    averager.step(timeout=AVERAGING_SECONDS_MAX, allow_retries=False)  # blocks on a future
    ended, thread = time.monotonic(), time.thread_time() - thread
    with averager.get_tensors() as tensors:
        off = float((tensors[0] - (work.peers - 1) / 2).abs().max())
    assert off < 0.01, f"the average is off by {off}"
    return averager.found.value - started, ended - averager.found.value, thread


def processor_seconds() -> float:
    """Return the processor seconds of this process and its children."""
    total = 0
    for process in family_of(os.getpid()):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


if __name__ == "__main__":
    main()
