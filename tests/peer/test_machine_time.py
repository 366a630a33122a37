"""The share of own steps and re-execution that `train` prints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ledger.jobs import Job, JobPhase
from peer.api.machine_time import describe_machine_time, replays_per_round
from tests.peer.chain import LANGUAGE
from tests.rounds.building import JOB, KEYS, ROOT
from training.job_spec import AuditMode, JobSpec


def job_of(machines: int, voters: int, is_audited: bool = True) -> Job:
    trainers, voting = KEYS[:machines], KEYS[:voters]
    return Job(
        b"spec",
        "job",
        KEYS[0],
        1,
        9,
        JobPhase.RUNNING,
        0,
        1,
        ROOT,
        is_audited,
        voting,
        tuple(key for key in voting if key in trainers),
        trainers,
        trainers,
    )


FULL = replace(LANGUAGE, audit=AuditMode.FULL)
SAMPLED = replace(LANGUAGE, audit=AuditMode.SAMPLED, audit_rate=0.1, auditors=2)


@pytest.mark.parametrize(
    ("machines", "voters", "spec", "replays"),
    [(4, 4, FULL, 1), (7, 7, FULL, 2), (13, 13, FULL, 4), (3, 4, FULL, 1), (5, 4, FULL, 1.5), (4, 4, SAMPLED, 0.2)],
)
def test_so_many_updates_are_re_executed_by_a_machine(machines: int, voters: int, spec: JobSpec, replays: float) -> None:
    job = job_of(machines, voters, spec is FULL)
    assert replays_per_round(JOB, job, spec) == pytest.approx(replays)
    assert f"{1 / (1 + replays):.0%} of its computing on its own steps" in describe_machine_time(JOB, job, spec)
    assert f"{machines / (1 + replays):.1f} times the samples of one" in describe_machine_time(JOB, job, spec)


def test_two_machines_that_re_execute_each_other_are_worth_one() -> None:
    assert describe_machine_time(JOB, job_of(2, 2), FULL).endswith("no more samples than one machine alone")


def test_nothing_is_said_of_one_machine_and_of_jobs_without_audits_only_the_samples() -> None:
    assert describe_machine_time(JOB, job_of(1, 1), FULL) == ""
    off = describe_machine_time(JOB, job_of(4, 4, False), replace(FULL, audit=AuditMode.OFF))
    assert off.startswith("a machine spends 100% of its computing on its own steps: ") and "4.0 times" in off
