"""A daemon whose worker is two processes that train together, all on the processor: one of them dies in the middle of a job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from tests.peer.processes import children, command, daemons
from tests.waiting import patience

SECONDS_MAX = 300.0  # for what takes fifteen seconds on a machine that has time
ROUNDS = 12
JOB = ("--rounds", str(ROUNDS), "--set", "local_steps=5", "batch=4", "audit=off", "byzantine_max=0", "proposal_seconds=5")


@pytest.mark.real("processes")
@pytest.mark.large
async def test_the_round_after_a_process_was_killed_has_the_trainer_again(tmp_path: Path) -> None:
    assert command("init", "--data-dir", str(tmp_path / "ada"), "--network", "alone")[0] == 0
    with daemons([tmp_path / "ada"]) as (ada,), patience():
        ada.start("run", "--listen", "127.0.0.1:0", "--role", "full", "--device", "cpu", "--gpus", "2", "--parallel", "ddp")
        await ada.answers()
        status, _, told = command("train", "--data-dir", str(ada.directory), *JOB)
        assert status == 0, told
        while not (await ada.client.jobs())[0].round:  # noqa: ASYNC110
            await trio.sleep(0.05)
        (worker,) = children(ada.pid)
        (rank,) = children(worker)
        os.kill(rank, signal.SIGKILL)
        while (job := (await ada.client.jobs())[0]).state != "finished":  # noqa: ASYNC110
            await trio.sleep(0.05)
        rounds = await ada.client.rounds(ROUNDS)
        assert children(ada.pid) != [worker]
    absent = [of.round for of in rounds if "absent" in of.verdicts.values()]
    assert len(absent) <= 1, f"the trainer was away in rounds {absent}"
    assert sum(job.accepted.values()) == ROUNDS - len(absent)
