"""Defaults that a peer adds to a person's job, and how drivers fetch and verify its initial model."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import trio

from ledger.core.genesis import TRAINER
from ledger.jobs import Job, JobPhase, JobsModule, ModelReference, StopJob
from peer.api.handlers.job_handler import describe_machine_time, replays_per_round
from peer.runtime.blob_retention import StartModelAttester
from protocol.api import TrainRequest
from protocol.blob_digest import blob_digest
from protocol.errors import UserError
from rlhf.api import supervised_jobs, tuning_plan_builder
from rlhf.data.dataset_files import InvalidLines
from rlhf.objectives.ppo import PpoSettings
from tests.peer.chain import LANGUAGE
from tests.peer.network import Network, Seat, network
from tests.rounds.building import JOB, KEYS, ROOT
from tests.waiting import patience
from training.api import job_builder
from training.api.initial_model import InitialModel
from training.api.job_builder import (
    add_compression_warmup_rounds,
    add_final_full_audit_rounds,
    require_safe_settings,
)
from training.data.text_files import TextFileReport
from training.job_spec import (
    PRESETS,
    AggregationRule,
    AuditMode,
    FeedbackMemory,
    InnerOptimizerKind,
    InnerStatePolicy,
    JobSpec,
    OuterOptimizerKind,
    complete_fields,
)
from training.model_store import JobModelStore
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import ModelSpec, complete_model_fields
from transport.blobs import blob_exchange

SMALL = JobSpec(name="small", tokenizer=bytes(32), data=bytes(32))


def peer_of(voters: int = 4, strangers: int = 0, silent: int = 0) -> Any:
    """Return a peer whose network has these trainers: all voters but the `silent` ones, and `strangers` without a vote."""
    keys = [bytes([number]) * 32 for number in range(voters + strangers)]
    roles = [("voter",) if number < silent else (TRAINER,) for number in range(len(keys))]
    members = SimpleNamespace(
        voters=tuple(keys[:voters]),
        members={key: SimpleNamespace(roles=of) for key, of in zip(keys, roles, strict=True)},
        round_voters=tuple(keys[:voters]),
    )
    jobs_module = JobsModule(JobModelStore(Path()))
    return SimpleNamespace(
        state=SimpleNamespace(members=members), audit_window_ms=lambda spec: jobs_module.audit_window_ms(spec.encode(), members)
    )


SAMPLED = replace(SMALL, audit=AuditMode.SAMPLED, rounds=60)


@pytest.mark.parametrize(
    ("spec", "said", "closing"),
    [
        (SAMPLED, (), 10),
        (replace(SAMPLED, rounds=12), (), 4),
        (replace(SAMPLED, final_full_audit_rounds=2), ("final_full_audit_rounds",), 2),
        (replace(SAMPLED, local_steps=1), (), 10),
        (SMALL, (), 0),
    ],
)
def test_the_last_rounds_of_sampled_jobs_are_re_executed(spec: JobSpec, said: tuple[str, ...], closing: int) -> None:
    assert add_final_full_audit_rounds(spec, said) == replace(spec, final_full_audit_rounds=closing)


@pytest.mark.parametrize(
    ("changes", "said", "opening"),
    [
        ({}, (), 3),
        ({"rounds": 2}, (), 2),
        ({"compression_warmup_rounds": 9}, ("compression_warmup_rounds",), 9),
        ({"bits": 4}, (), 0),
        ({"outer": OuterOptimizerKind.ADAMW, "local_steps": 1}, (), 0),
        ({"memory": FeedbackMemory.ESTIMATES}, (), 0),
    ],
)
def test_the_first_rounds_of_one_bit_jobs_say_more(changes: dict[str, Any], said: tuple[str, ...], opening: int) -> None:
    spec = replace(SMALL, **changes)
    made = add_compression_warmup_rounds(spec, said)
    assert made == replace(spec, compression_warmup_rounds=opening)
    assert JobSpec.decode(made.encode()) == made


def test_who_accepts_the_risk_may_sample_where_liars_are_found_late_and_nobody_may_do_without_audits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_builder, "count_trainers", lambda peer: 4)
    careful = TrainRequest("small", "", 0, 0, {})
    daring = replace(careful, accept_risk=True)
    with pytest.raises(UserError, match=r"was not measured to hold; use audit 'full', or accept the risk with --accept-risk"):
        require_safe_settings(peer_of(), SAMPLED, careful)
    require_safe_settings(peer_of(), SAMPLED, daring)
    with pytest.raises(UserError, match="audit 'off' with byzantine_max 1"):
        require_safe_settings(peer_of(), replace(SMALL, audit=AuditMode.OFF), daring)


GRADIENTS = {name: value for name, value in PRESETS["per-step"].items() if name != "audit"}
LARGER, TOO_LARGE = ModelSpec(width=256, layers=6), ModelSpec(width=512, layers=12)


@pytest.mark.parametrize(
    ("peer", "said", "is_sampled"),
    [
        (peer_of(), {}, True),
        (peer_of(voters=7), {}, False),
        (peer_of(voters=7), GRADIENTS, True),
        (peer_of(voters=6), {"rounds": 12, "batch": 4, "inner_rate": 0.01, "local_steps": 5}, True),
        (peer_of(), {"compression_warmup_rounds": 0}, True),
        (peer_of(), {"audit_window": 5, "audit_rate": 0.5}, True),
        (peer_of(), GRADIENTS, True),
        (peer_of(), {"model": LARGER}, True),
        # The person names the audit mode.
        (peer_of(), {"audit": AuditMode.FULL}, False),
        (peer_of(), {"audit": AuditMode.OFF}, False),
        # No faulty trainer is tolerated, or more than the measurements cover.
        (peer_of(voters=3), {}, False),
        (peer_of(), {"byzantine_max": 0}, False),
        (peer_of(silent=1), {}, False),
        (peer_of(voters=10), {}, False),
        (peer_of(voters=10), {"byzantine_max": 1}, False),
        (peer_of(strangers=1), {}, False),
        (peer_of(strangers=3), {"byzantine_max": 1}, False),
        (peer_of(voters=6, strangers=1), {}, False),  # 2 liars of 7
        (peer_of(voters=6, strangers=1), GRADIENTS, True),
        (peer_of(voters=6, strangers=2), {}, False),
        # Liars would be found late, or would do more harm.
        *(
            (peer_of(), {name: value}, False)
            for name, value in {
                "local_steps": 30,
                "compression_warmup_rounds": 20,
                "audit_rate": 0.01,
                "audit_window": 1,
                "suspension_rounds": 1,
                "feedback_decay": 1.0,
                "initial_norm": 1e3,
                "outer_rate": 5.0,
                "inner_rate": 0.3,
                "inner": InnerOptimizerKind.ADAMW,
                "rule": AggregationRule.MEAN,
            }.items()
        ),
        # Sampled audits exclude these settings.
        (peer_of(), {"inner_state": InnerStatePolicy.KEEP}, False),
        (peer_of(), {"memory": FeedbackMemory.ESTIMATES, "outer": OuterOptimizerKind.ADAMW, "local_steps": 1}, False),
        # A replay would take too long over the slowest permitted link.
        (peer_of(), {"model": TOO_LARGE}, False),
    ],
)
def test_audits_are_sampled_where_that_was_measured_to_hold_unless_a_person_says_which(
    peer: Any, said: dict[str, Any], is_sampled: bool
) -> None:
    """The resulting job may be started, except one without audits."""
    spec = replace(SMALL, **complete_fields({"byzantine_max": job_builder.byzantine_trainers_max(peer), **said}))
    made = job_builder.choose_sampled_audits(peer, add_compression_warmup_rounds(spec, said), said)
    assert (made.audit is AuditMode.SAMPLED) is is_sampled and made.problem() is None
    assert is_sampled or made == add_compression_warmup_rounds(spec, said)
    if made.audit is not AuditMode.OFF:
        assert job_builder.add_audits(peer, made, TrainRequest("small", "", 0, 0, {}), said) == add_final_full_audit_rounds(
            made, said
        )


def test_preferences_may_be_packed_by_gzip(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n"
    (tmp_path / "plain.jsonl").write_text(line)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    plain, packed = (
        tuning_plan_builder._read(str(tmp_path / name), InvalidLines()) for name in ("plain.jsonl", "packed.jsonl.gz")
    )
    assert plain == packed and len(packed) == 1
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(line.encode())[:-9])
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz is a damaged gzip file"):
        tuning_plan_builder._read(str(tmp_path / "cut.jsonl.gz"), InvalidLines())


def test_what_learns_from_responses_is_held_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_builder, "count_trainers", lambda peer: 4)
    start = SimpleNamespace(tokenizer=None, name="base")
    monkeypatch.setattr(supervised_jobs, "resolve_initial_model", lambda peer, request: start)
    monkeypatch.setattr(supervised_jobs, "build_supervised_spec", lambda *arguments: (SAMPLED, {}))
    with pytest.raises(UserError, match="with --accept-risk"):
        supervised_jobs.build_instruct_spec(
            peer_of(), TrainRequest("small", "", 0, 0, {}, initial_model="base", examples="nowhere.jsonl")
        )


def test_defaults_follow_from_the_model_that_a_job_starts_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon, the default of other models, would be refused for experts."""
    monkeypatch.setattr(job_builder, "count_trainers", lambda peer, role=TRAINER: 4)
    experts = ModelSpec(**complete_model_fields({"experts": 4}))
    for model, inner in ((ModelSpec(), InnerOptimizerKind.MUON), (experts, InnerOptimizerKind.ADAMW)):
        start = InitialModel("job 'base'", model, None, ModelReference(JOB, 1, ROOT))
        monkeypatch.setattr(job_builder, "resolve_initial_model", lambda peer, request, start=start: start)
        peer, findings = peer_of(), TextFileReport()
        peer.blobs = SimpleNamespace(add_bytes=blob_digest)
        spec = job_builder.build_job_spec(peer, TrainRequest("more", "", 3, 0, {"audit": "full"}, "base"), findings)
        assert (spec.model, spec.inner) == (model, inner)
        with pytest.raises(UserError, match="the job starts from the model of job 'base', which fixes this value"):
            job_builder.build_job_spec(peer, TrainRequest("more", "", 3, 0, {"model.width": "32"}, "base"), findings)
        start = InitialModel("a folder", model, None)  # A job may change the context of a folder's model.
        monkeypatch.setattr(job_builder, "resolve_initial_model", lambda peer, request, start=start: start)
        request = TrainRequest("more", "", 3, 0, {"audit": "full", "model.context": "64"}, "folder")
        spec = job_builder.build_job_spec(peer, request, findings)
        assert (spec.model, spec.inner) == (replace(model, context=64), inner)


def test_an_unknown_field_is_answered_with_the_fields_of_the_objective_too() -> None:
    with pytest.raises(UserError, match=r"unknown job field 'kl'.* kl_target"):
        supervised_jobs.parse_objective_overrides({"kl": "3"}, PpoSettings, frozenset())


MODEL = ModelSpec(context=16, width=16, layers=1, heads=2, kv_heads=1, hidden=24, tied=False, rope_base=5e5)


def own(seed: int = 0) -> Float32Array:
    return np.random.default_rng(seed).normal(size=layout_of(JobSpec(name="own", data=bytes(32), model=MODEL)).size).astype("<f4")


async def started(seat: Seat, start: bytes) -> bytes:
    return await seat.start_job(JobSpec(name="own", data=bytes(32), model=MODEL, initial_model=start, byzantine_max=0))


async def has_model(made: Network, job: bytes, values: Float32Array) -> None:
    for seat in made.seats:
        await seat.until(lambda driver: job in driver.state.jobs.jobs)
        assert np.array_equal(seat.driver.host.open_model(job, 0).parameters, values)
    assert len({seat.driver.state.jobs.jobs[job].model_root for seat in made.seats}) == 1


async def test_voters_fetch_it_from_whoever_has_it_and_all_make_one_model(tmp_path: Path) -> None:
    values = own()
    async with network(tmp_path, 4, roles=(TRAINER,)) as made:
        start = made.seats[0].blobs.add_bytes(values.tobytes())
        await has_model(made, await started(made.seats[0], start), values)
        assert all(seat.blobs.size(start) == values.nbytes for seat in made.seats)


async def test_nothing_waits_for_what_nobody_has_and_it_starts_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_exchange, "RETRY_SECONDS_MAX", 0.5)
    values, other = own(1), own(2)
    async with network(tmp_path, 4, roles=(TRAINER,)) as made:
        first, second, *_ = made.seats
        start = first.blobs.add_bytes(values.tobytes())
        first.blobs.delete_blob(start)
        job = await started(first, start)
        passing = await started(second, second.blobs.add_bytes(other.tobytes()))
        await has_model(made, passing, other)
        assert [waiting.job for waiting in first.driver.state.jobs.queue] == [job]
        await second.author.submit("job/stop", StopJob(passing))
        first.blobs.add_bytes(values.tobytes())
        await has_model(made, job, values)


@pytest.mark.parametrize("bad", ["a number that is not finite", "1 parameters"])
async def test_voters_end_what_is_unsound(tmp_path: Path, bad: str) -> None:
    values = own(3)
    values[-1] = np.nan
    if bad == "1 parameters":
        values = values[:-1]
    async with network(tmp_path, 4, roles=(TRAINER,)) as made:
        job = await started(made.seats[1], made.seats[1].blobs.add_bytes(values.tobytes()))
        for seat in made.seats:
            await seat.event("warning", "this voter votes to end it")
            await seat.until(lambda driver: not driver.state.jobs.queue)
            assert job not in seat.driver.state.jobs.jobs and seat.failure is None


async def test_bytes_of_another_digest_are_taken_by_nobody(tmp_path: Path) -> None:
    values = own(4)
    async with network(tmp_path, 4, observers=1, roles=(TRAINER,)) as made:
        *voters, damaged = made.seats
        start = damaged.blobs.add_bytes(values.tobytes())
        data = damaged.blobs.read_range(start)
        damaged.blobs.path(start).write_bytes(bytes([data[0] ^ 1]) + data[1:])
        job = await started(voters[0], start)
        await damaged.event("peer", "lost the link")
        assert all(seat.blobs.size(start) is None for seat in voters)
        voters[0].blobs.add_bytes(values.tobytes())
        made.seats.remove(damaged)
        await has_model(made, job, values)


async def test_planted_a_quorum_that_does_not_look_whether_numbers_are_finite(tmp_path: Path) -> None:
    values = own(5)
    values[0] = np.inf
    async with network(tmp_path, 4, roles=(TRAINER,)) as made:
        with mock.patch("training.parameter_blob.blob_problem", return_value=None):
            await started(made.seats[0], made.seats[0].blobs.add_bytes(values.tobytes()))
            for seat in made.seats:
                with patience():
                    await seat.ended.wait()
                assert "has a non-finite number" in str(seat.failure)


async def test_planted_a_peer_that_takes_bytes_of_another_digest(tmp_path: Path) -> None:
    """It builds another initial model than the others, and the next block shows that its state is not the decided one."""
    values = own(6)
    async with network(tmp_path, 4, roles=(TRAINER,)) as made:
        *honest, careless = made.seats
        start = honest[0].blobs.add_bytes(values.tobytes())
        careless.blobs.path(start).write_bytes(bytes([values.tobytes()[0] ^ 1]) + values.tobytes()[1:])
        job = await started(honest[0], start)
        made.seats.remove(careless)
        await has_model(made, job, values)
        await honest[0].start_job()
        await careless.event("warning", "restoring the certified state")


async def test_what_a_fault_of_the_system_ended_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bytes] = []

    async def answer(self: StartModelAttester, key: bytes, spec: JobSpec) -> None:
        begun.append(key)
        raise OSError("too many open files")

    waiting = SimpleNamespace(spec=JobSpec(name="own", data=bytes(32), model=MODEL).encode())
    monkeypatch.setattr(StartModelAttester, "_due", lambda self: {bytes(32): waiting})
    monkeypatch.setattr(StartModelAttester, "_attest", answer)
    driver: Any = SimpleNamespace(block_applied=trio.Event())
    holding = StartModelAttester(driver, driver)
    for _ in range(2):
        with pytest.raises(ExceptionGroup), trio.fail_after(1):
            await holding.run()
    assert begun == [bytes(32)] * 2


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
SAMPLED_JOB = replace(LANGUAGE, audit=AuditMode.SAMPLED, audit_rate=0.1, auditors=2)


@pytest.mark.parametrize(
    ("machines", "voters", "spec", "replays"),
    [(4, 4, FULL, 1), (7, 7, FULL, 2), (13, 13, FULL, 4), (3, 4, FULL, 1), (5, 4, FULL, 1.5), (4, 4, SAMPLED_JOB, 0.2)],
)
def test_so_many_updates_are_re_executed_by_a_machine(machines: int, voters: int, spec: JobSpec, replays: float) -> None:
    job = job_of(machines, voters, spec is FULL)
    assert replays_per_round(JOB, job, spec) == pytest.approx(replays)
    assert f"{1 / (1 + replays):.0%} of its compute on its own steps" in describe_machine_time(JOB, job, spec)
    assert f"{machines / (1 + replays):.1f} times the samples of one" in describe_machine_time(JOB, job, spec)


def test_two_machines_that_re_execute_each_other_are_worth_one() -> None:
    assert describe_machine_time(JOB, job_of(2, 2), FULL).endswith("no more samples than one machine alone")


def test_nothing_is_said_of_one_machine_and_of_jobs_without_audits_only_the_samples() -> None:
    assert describe_machine_time(JOB, job_of(1, 1), FULL) == ""
    off = describe_machine_time(JOB, job_of(4, 4, False), replace(FULL, audit=AuditMode.OFF))
    assert off.startswith("a machine spends 100% of its compute on its own steps: ") and "4.0 times" in off
