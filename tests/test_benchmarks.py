from __future__ import annotations

import importlib
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
import urllib3.util  # noqa: F401 - opens a socket at its first import, which no pure test may do
from packaging.version import Version

from benchmarks import (
    attacks,
    attacks_detection,
    attacks_digits,
    attacks_gpt,
    attacks_trigger,
    block_costs,
    codec,
    decoding,
    demo,
    digits,
    free,
    gpu,
    parallel,
    provenance,
    replay,
    round,
    ternary,
    training,
)
from benchmarks.__main__ import ALSO, BENCHMARKS, run
from benchmarks.attack_suite import (
    ALIE_FACTORS,
    ASCENT_FACTORS,
    ATTACKS,
    IPM_FACTORS,
    LATE,
    PAYLOADS,
    TRIGGER_NORMS,
    VECTORS,
    VOTES,
    Knowledge,
    Said,
)
from benchmarks.attacks_trigger import Trigger
from benchmarks.attacks_voters import decided
from benchmarks.rivals import environment, processes, sockets
from benchmarks.rivals.environment import Unavailable
from benchmarks.rivals.sockets import Traffic
from benchmarks.settings import with_settings
from benchmarks.simulated import text_file
from benchmarks.tuning import run_sweep
from benchmarks.virtual import Costs, Network, limit
from consensus.voter_set import faults_tolerated
from ledger.audits.sortition import EARLY_SHARE
from peer.cli import build_parser
from peer.features import known_modules
from protocol.errors import RemoteProtocolError, UserError
from protocol.limits import AUDIT_WINDOW_MS_MAX, COST_PER_BLOCK_MAX
from protocol.messages import Proposal
from protocol.sampling import SamplingOptions
from protocol.verdicts import Verdict
from rounds.round_terms import RoundTerms
from tests.ledger.chances import EFFECTIVE, escape
from training import rate_sweep
from training.api.job_builder import parse_overrides
from training.job_spec import (
    AUDIT_RATE,
    PRESETS,
    AggregationRule,
    AuditMode,
    InnerOptimizerKind,
    JobSpec,
    OuterOptimizerKind,
    Precision,
    complete_fields,
)
from training.model_store import JobModelStore
from training.replay.proposal_replay import make_proposal
from training.replicated import codec as payloads
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import layout_of
from training.safe_settings import SAFE_WITHOUT_AUDITS, SafeNetwork
from training.transformer import ModelSpec
from training.worker_protocol import ProposeRequest

FREE = Costs(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # only the real time of the turns on this machine remains
LINE_BITS = 100e6
LATE_SECONDS = 1.0  # tolerance for a busy machine; a lost view costs more than this


@pytest.mark.parametrize("n", [4, 7])
def test_a_decision_takes_four_delays_and_verifies_each_signature_once(n: int) -> None:
    network = Network(n, 10.0, LINE_BITS, FREE)  # seconds: much more than all computation here
    network.begin()
    height = network.round(0)
    assert height.views == 1
    assert all(0 <= seconds - limit(network, height) < LATE_SECONDS for seconds in height.from_verdicts)
    others = 3 * (n - 1)  # ballots, prepares and commits of the others
    own = 3  # its own update, ballot and commit return in blocks and certificates
    assert height.spent.verified <= n * (others + own) + n - 1  # and the leader's message to all others


def test_silent_voters_cost_one_view_each_when_their_turn_comes_first_and_none_later() -> None:
    n, silent = 7, faults_tolerated(7)
    network = Network(n, 0.1, LINE_BITS, FREE, silent=silent)
    network.begin()
    views = [network.round(number).views for number in range(n + 3)]
    assert sorted(views[:n])[-silent:] == [2] * silent and set(views[n:]) == {1}


def test_a_proposal_names_what_the_others_hold() -> None:
    network = Network(7, 0.1, LINE_BITS, FREE)
    network.begin()
    height = network.round(0)
    assert 3 * height.proposal_bytes < height.block_bytes


# Commands ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_says_what_it_takes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    without_chance = ("block_costs", "consensus", "gpu", "site", "transport")  # without random draws
    assert all(option in said for option in ("--json", *(() if name in without_chance else ("--seeds",)), *ALSO.get(name, ())))


def test_every_kind_of_transaction_has_a_full_block_that_is_measured() -> None:
    kinds = {kind for module in known_modules() for kind in module.contents}
    measured = " ".join(block_costs.CASES)
    assert not [kind for kind in sorted(kinds) if kind not in measured]


def test_a_full_block_is_measured_with_the_cost_that_bounds_it() -> None:
    rows = list(block_costs.run("network/limit"))
    assert [(row.kind, row.transactions, row.cost) for row in rows] == [("network/limit", 512, COST_PER_BLOCK_MAX)]
    assert 0 < rows[0].root_seconds < rows[0].seconds


@pytest.mark.long
def test_an_engine_is_measured_beside_a_plain_loop_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSpec(context=16, width=16, layers=1, heads=2, kv_heads=1, hidden=24)
    monkeypatch.setattr(gpu, "SIZES", {"0.8M": gpu.Size(model, 2, 1, 0.01)})
    monkeypatch.setattr(gpu, "MATRIX", {"cpu": 64})
    rows = [gpu.measured("0.8M", precision, False, None, None, torch.device("cpu")) for precision in Precision]
    assert [row.reason for row in rows] == ["", ""]
    assert all(row.share_of_plain and row.share_of_peak for row in rows)
    assert rows[0].replay_error == 0.0


@pytest.mark.real("processes")
def test_a_missed_bound_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The verdict of one preset must not hide that of another."""
    monkeypatch.setattr(attacks_detection, "AUDITS_NEEDED", 2.45)
    monkeypatch.setattr(sys, "argv", ["attacks", "--only", "detection", "--peers", "4", "--json", str(tmp_path / "figures.json")])
    assert attacks.main() == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("held", "MISSED"))]
    assert {line.split()[0] for line in lines} == {"held", "MISSED"}
    monkeypatch.setattr(attacks_detection, "AUDITS_NEEDED", 4.0)
    assert attacks.main() == 0


@pytest.mark.real("processes")
def test_what_was_missed_is_said_again_at_the_end_of_all_benchmarks() -> None:
    said = "import sys; print('held   a'); print('MISSED b: 3'); sys.exit(1)"
    assert run([sys.executable, "-c", said]) == (1, ["MISSED b: 3"])
    assert run([sys.executable, "-c", "import sys; sys.exit(2)"]) == (2, [])


@pytest.mark.real("processes")
def test_the_commit_is_that_of_this_repository_wherever_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = provenance.provenance(0.0)["commit"]
    monkeypatch.chdir(tmp_path)
    assert provenance.provenance(0.0)["commit"] == here != "unknown+"
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.provenance(0.0)["commit"] == "unknown"


@pytest.mark.real("processes")
def test_figures_are_on_disk_after_every_row_and_never_in_part(tmp_path: Path) -> None:
    """An interrupted run of hours keeps all rows but the current one."""
    file = tmp_path / "figures.json"
    for rows in ([1], [1, 2]):
        provenance.write(file, time.time(), {"rows": rows})
        read = json.loads(file.read_text())
        assert read["rows"] == rows and Version(read["versions"]["torch"]).public == Version(torch.__version__).public
    with pytest.raises(TypeError):
        provenance.write(file, time.time(), {"rows": [object()]})
    assert json.loads(file.read_text())["rows"] == [1, 2]


# A round beside hivemind's average ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    environment._hivemind.cache_clear()


def processes_of(tmp_path: Path, *programs: str) -> list[subprocess.Popen[bytes]]:
    started = []
    for rank, program in enumerate(programs):
        with (tmp_path / f"log-{rank}").open("wb") as log:
            started.append(subprocess.Popen([sys.executable, "-c", program], stderr=log))
    return started


@pytest.mark.real("processes")
def test_a_rival_that_fails_is_not_waited_for_by_the_others(tmp_path: Path) -> None:
    """The first failure ends the run and gives its reason, on any rank."""
    started = processes_of(tmp_path, "import threading; threading.Event().wait()", "import sys; sys.exit('no group')")
    try:
        with pytest.raises(Unavailable, match="no group"):
            processes.wait(started, tmp_path, 120.0)
        assert started[0].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_rival_s_environment_is_made_once_however_often_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made, runs = [], []

    def fails(python: str, task: round.Task, seconds: float) -> list[round.Row]:
        runs.append(seconds)
        raise Unavailable("no group")

    monkeypatch.setattr(environment, "interpreter", lambda name, wanted: made.append(name) or Path("python"))
    monkeypatch.setattr(round, "_averaged", fails)
    (row,) = round.hivemind(round.Task(4, 2))
    assert made == ["hivemind"] and len(runs) == len(round.MATCHMAKING_SECONDS) * round.RIVAL_RUNS
    assert row.reason.endswith("no group") and len(row.failed) == len(runs) and row.seconds is None


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the requested environments, none of which can be made."""
    asked: list[str] = []

    def cannot(name: str, wanted: Sequence[str]) -> Path:
        asked.append(name)
        raise Unavailable("no index")

    monkeypatch.setattr(environment, "interpreter", cannot)
    return asked


def test_without_an_environment_the_rival_is_tried_once(tried: list[str]) -> None:
    (row,) = round.hivemind(round.Task(4, 2))
    assert (tried, row.reason) == (["hivemind"], "no index")


def test_what_a_round_s_rival_does_not_measure_stays_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"times": [(0.5, 0.1), (0.7, 0.2), (0.6, 0.3)], "bytes_sent": 6e6, "processor_seconds": 0.25}
    monkeypatch.setattr(environment, "interpreter", lambda name, wanted: Path("python"))
    monkeypatch.setattr(round, "reports", lambda *arguments: [report] * 4)
    whole, exchange = round.hivemind(round.Task(4, 3))
    assert whole.seconds == pytest.approx(0.9) and (whole.daemon_seconds, whole.bytes_per_peer) == (0.25, {"all": 6e6})
    assert (exchange.seconds, exchange.seconds_least) == (0.2, 0.1)
    for row, missing in ((whole, ()), (exchange, (exchange.daemon_seconds,))):
        assert (row.worker_seconds, row.heights, row.fsyncs, row.commits, *missing) == (None,) * (4 + len(missing))
    assert exchange.bytes_per_peer == {}
    round.show([whole, exchange])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "the exchange alone" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["the exchange alone", "200", "100", *[""] * 7]


# Training beside others ----------------------------------------------------------------------------------------------

HIVEMINDS = ("hivemind", "hivemind-h15")
TINY = ModelSpec(width=16, layers=1, heads=2, kv_heads=1, hidden=16, context=16)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return text_file(None, tmp_path)


def test_an_update_that_is_free_makes_a_proposal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, job, trainer = JobSpec(name="free", model=TINY), bytes(32), bytes([1]) * 32
    ReplicatedModel.initial(job, spec).save(tmp_path / "model")
    monkeypatch.setattr(free, "known", lambda: np.ones(layout_of(spec).size, dtype=np.float32))
    assert (
        make_proposal(
            ProposeRequest(job, 0, trainer, str(tmp_path / "model"), None, None, str(tmp_path / "buffer")), free.update
        ).last_loss
        == 0
    )


def test_a_job_is_asked_for_as_it_is_measured(text: Path) -> None:
    for settings in ({}, {**training.ONE_BIT_H15, "audit": "full"}, training.ONE_BIT_H15, {"audit": "full"}):
        spec = training.Task(text, 45, 7, 1e-3, 60.0).spec(**settings)
        asked = replace(JobSpec(name=spec.name, data=spec.data, rounds=spec.rounds), **parse_overrides(training.overrides(spec)))
        assert asked == spec


def test_rows_whose_audits_are_sampled_may_start(text: Path, tmp_path: Path) -> None:
    for settings in ({}, training.ONE_BIT_H15):
        audits = JobModelStore(tmp_path).terms_of_spec(training.Task(text, 45, 7, 1e-3, 60.0).spec(**settings).encode()).audits
        assert audits is not None and audits.window_ms(training.PEERS) <= AUDIT_WINDOW_MS_MAX


@pytest.mark.real("processes")
@pytest.mark.large  # two processes with torch; each run of the benchmark counts its own roots
def test_replicas_of_gloo_stay_equal_and_send_what_a_ring_must(text: Path) -> None:
    task = training.Task(text, 3, 0, 1e-3, 60.0, TINY, peers=2)
    row = training.gloo(task)
    assert (row.distinct_roots, row.updates, row.samples) == (1, 1, training.GLOBAL_BATCH)
    ring = 2 * 4 * TINY.parameters * (task.peers - 1) / task.peers
    assert row.bytes_per_peer_per_update is not None
    assert 0.9 * ring <= row.bytes_per_peer_per_update <= 2 * ring  # bytes still queued at the reading are not sent yet


@pytest.mark.real("processes")
def test_the_kernel_counts_what_a_connection_sends() -> None:
    # The sender is another process, since this one may have sockets of other tests.
    connect = "import socket; sender = socket.create_connection(('127.0.0.1', int(input())))"
    code = f"{connect}; input(); sender.sendall(bytes(100_000)); input()"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True) as sender,
        closing(Traffic(sender.pid)) as traffic,
    ):
        assert sender.stdin
        print(server.getsockname()[1], file=sender.stdin, flush=True)
        receiver, _ = server.accept()
        before = traffic.sent()
        print(file=sender.stdin, flush=True)
        with receiver:
            received = 0
            while received < 100_000:
                received += len(receiver.recv(1 << 16))
            assert traffic.sent() - before == 100_000
        print(file=sender.stdin, flush=True)


def test_four_bits_are_compared_with_the_float32_of_gloo_and_no_row_of_ours_may_be_missing() -> None:
    def held(heldout_nats: float, reason: str = "") -> list[bool]:
        rows = [
            training.Row("gloo", 1.0, 1.0, 2.0, 1),
            training.Row("ours-h1", 1.0, 1.0, heldout_nats, 1),
            training.Row("ours-h15-1bit", 1.0, 1.0, 2.0, 1, reason=reason),
        ]
        return [line.startswith("held") for line in training.verdicts(rows, {}, ("gloo", "ours-h1"))]

    assert held(2.04).count(False) == 1, "the ratio to gloo was asked for and is not there"
    assert held(2.05).count(False) == 2 and held(float("nan")).count(False) == 2
    assert held(2.0, "a peer ended").count(False) == 2


@pytest.mark.parametrize(
    ("ratio", "pinned", "held"), [(0.6, False, True), (0.55, False, False), (0.55, True, True), (0.49, True, False)]
)
def test_one_core_for_a_peer_and_its_worker_is_held_to_less(ratio: float, pinned: bool, held: bool) -> None:
    first, *_ = training.verdicts([], {"ours-h1 / gloo": ratio}, ("ours-h1", "gloo"), pinned=pinned)
    assert first.startswith("held") is held


def test_a_seed_that_failed_is_a_bound_that_was_missed() -> None:
    merged = training.middle([training.Row("ours-h1", 1.0, 1.0, 2.0, 1), training.Row("ours-h1", reason="hung")])
    assert merged.failed == ["hung"] and merged.samples_per_second == 1.0
    lines = list(training.verdicts([merged], {}, ("ours-h1",)))
    assert [line for line in lines if line.startswith("MISSED")] == ["MISSED ours-h1: not measured: hung"]
    assert not any("gloo" in line for line in lines), "nobody asked for it"


def test_speeds_are_compared_seed_by_seed() -> None:
    def rows(*speeds: float | None) -> list[training.Row]:
        return [training.Row("", speed, reason="" if speed else "hung") for speed in speeds]

    runs = {"gloo": rows(100.0, 10.0, 50.0), "ours-h1": rows(60.0, 9.0, 20.0)}  # a temporarily slow machine
    assert training.ratios(runs) == {"ours-h1 / gloo": 0.6}, "that of the medians is .4"
    assert training.ratios(runs | {"gloo": rows(100.0, None)}) == {"ours-h1 / gloo": 0.6}
    assert training.ratios(runs | {"gloo": rows(None, None)}) == {}


@pytest.mark.real("processes")
def test_what_a_bound_compares_takes_turns_and_a_turn_that_failed_is_the_seed_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def row(name: str, task: training.Task) -> training.Row:
        measured.append(name)
        return training.Row(name, float(len(measured)), 1.0, 2.0, 1, reason="hung" if len(measured) == failing else "")

    monkeypatch.setattr(training, "MEASURED", {name: partial(row, name) for name in ("gloo", "single", "ours-h1")})
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["training", "--seeds", "4", "--turns", "3", "--json", str(file)])
    failing = 0
    assert training.main() == 0
    assert measured == ["ours-h1", "gloo"] * 3 + ["single"]
    assert {row["name"]: row["samples_per_second"] for row in json.loads(file.read_text())["rows"]} == {
        "gloo": 4.0,
        "single": 7.0,
        "ours-h1": 3.0,  # its second turn
    }
    measured.clear()
    failing = 3
    assert training.main() == 1
    found = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert found["ours-h1"]["reason"] == "hung" and found["gloo"]["samples_per_second"] == 4.0


def test_a_seed_that_did_not_come_to_its_last_step_leaves_no_loss_to_compare() -> None:
    merged = training.middle([training.Row("ours-h1", 1.0, 1.0, nats, 1) for nats in (2.0, None, 2.0)])
    assert (merged.heldout_nats, merged.samples_per_second) == (None, 1.0)
    lines = training.verdicts([merged, training.Row("gloo", 1.0, 1.0, 2.0, 1)], {}, ("gloo", "ours-h1"))
    assert any(line.startswith("MISSED") and "held-out" in line for line in lines)


@pytest.mark.parametrize(("audits", "lapsed", "held"), [(100, 5, True), (100, 6, False), (0, 0, False)])
def test_a_speed_counts_only_where_the_audits_were_made(audits: int, lapsed: int, held: bool) -> None:
    row = training.Row("ours-h1", 1.0, 1.0, 2.0, 1, audits=audits, lapsed=lapsed)
    (line,) = (line for line in training.verdicts([row], {}, ("ours-h1",)) if "lapsed" in line)
    assert line.startswith("held") == held


@pytest.mark.parametrize(("sent", "held"), [(1.5e6, True), (1.6e6, False), (0.0, False), (-5.0, False), (None, False)])
def test_bytes_that_were_not_counted_hold_no_bound(sent: float | None, held: bool) -> None:
    (line,) = (line for line in training.verdicts([training.Row("ours-h1", 1.0, sent, 2.0, 1)], {}, ()) if " MB " in line)
    assert line.startswith("held") == held


@pytest.mark.parametrize(("sent", "held"), [(1e6, True), (1.01e6, False), (0.0, False)])
def test_what_audits_show_counts_among_the_bytes_of_sampled_ones(sent: float, held: bool) -> None:
    row = training.Row("ours-h15-1bit", 1.0, 1e5, 2.0, 1, kernel_bytes_per_peer_per_update=sent)
    (line,) = (line for line in training.verdicts([row], {}, ()) if " MB " in line)
    assert line.startswith("held") == held


@pytest.mark.real("processes")
def test_where_the_kernel_does_not_list_sockets_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SOCK_DIAG_BY_FAMILY", 0xFFFF)  # an unknown request
    with pytest.raises(OSError, match="cannot be counted"):
        Traffic(os.getpid())


@pytest.mark.parametrize("steps", ["15", "100"])
def test_unequal_samples_are_not_compared(
    steps: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["training", "--steps", steps])
    with pytest.raises(SystemExit):
        training.main()
    assert f"--steps {steps} is not a multiple of 15, at least 30" in capsys.readouterr().err


@pytest.mark.real("processes")
def test_a_run_that_was_ended_goes_on_with_the_seed_that_lacked_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[tuple[str, int]] = []

    def row(name: str, task: training.Task) -> training.Row:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((name, task.seed))
        return training.Row(name, 1.0 + task.seed, 1.0, 2.0, 1)

    monkeypatch.setattr(training, "MEASURED", {name: partial(row, name) for name in ("single", "gloo")})
    command = ["training", "--seeds", "4", "5", "6", "--json", str(tmp_path / "figures.json")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(KeyboardInterrupt):
        training.main()
    measured.append(("interrupted", 0))
    monkeypatch.setattr(sys, "argv", [*command, "--resume"])
    assert training.main() == 0
    pairs = [("single", 4), ("gloo", 4), ("single", 5), ("interrupted", 0), *product(("single", "gloo"), (5, 6))]
    assert measured[:4] == pairs[:4] and sorted(measured[4:]) == sorted(pairs[4:])
    rows = json.loads((tmp_path / "figures.json").read_text())["by_seed"]
    assert all([row["samples_per_second"] for row in found] == [5.0, 6.0, 7.0] for found in rows.values())
    monkeypatch.setattr(sys, "argv", [*command, "--resume", "--steps", "30"])
    with pytest.raises(SystemExit):
        training.main()
    assert "its steps is 150, not 30" in capsys.readouterr().err


def test_hivemind_that_cannot_be_installed_is_a_row_that_says_so_after_one_try(text: Path, tried: list[str]) -> None:
    rows = [training.attempt(name, training.Task(text, 30, seed, 1e-3, 60.0, TINY)) for seed in (0, 1) for name in HIVEMINDS]
    assert [row.reason for row in rows] == ["no index"] * len(rows) and tried == ["hivemind"]


def test_a_row_that_fails_leaves_the_others(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (UserError("full disk"), OSError("full disk"), trio.TooSlowError("full disk"), Unavailable("full disk")):

        def fails(task: training.Task, error: Exception = error) -> training.Row:
            raise error

        monkeypatch.setitem(training.MEASURED, "ours-h1", fails)
        assert training.attempt("ours-h1", training.Task(text, 30, 0, 1e-3, 60.0)).reason == "full disk"


# The demo ------------------------------------------------------------------------------------------------------------


def test_the_demo_is_asked_for_with_its_own_flags(tmp_path: Path) -> None:
    given = ["--trainers", "4", "--preset", "per-step", "--data", "text", "--rounds", "9", "--set", "batch=4", "model.width=32"]
    asked = build_parser().parse_args(demo.arguments(demo.build_parser().parse_args([*given, "--json", "figures"]), 7, tmp_path))
    assert (asked.trainers, asked.preset, asked.data, asked.rounds) == (4, "per-step", "text", 9)
    assert (asked.set, asked.seed, asked.baseline) == (["batch=4", "model.width=32"], 7, True)


def test_only_a_step_a_round_is_held_to_one_process_alone() -> None:
    def missed(preset: str | None, bits: float, *failures: str, last: str = "4") -> int:
        report = {"seed": 0, "failures": failures, "malicious": ["liar-3"], "heldout_bits_per_byte": [8.0, bits]}
        alone = {"baseline_bits_per_byte": 2.0, "baseline_rates": {"1": 2.1, "2": 2.0, last: 2.2}}
        return sum(line.startswith("MISSED") for line in demo.verdicts(preset, [{**report, **alone}]))

    assert (missed("per-step", 2.04), missed("per-step", 2.05), missed(None, 2.2)) == (0, 1, 0)
    assert missed(None, 2.0, "honest peers have different state roots") == 1
    assert missed(None, 2.0, last="1.5") == 1, "the best rate is the last of its line"


# Bytes and loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "best", "tried"),
    [
        ((1.0, 2.0, 4.0), 2.0, [1.0, 2.0, 4.0]),
        ((1.0, 2.0, 4.0), 15.0, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]),
        ((1.0, 2.0, 4.0), 0.3, [0.125, 0.25, 0.5, 1.0, 2.0, 4.0]),
        ((1.0, 2.0), 1e9, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]),
        ((3.0,), 1.0, [3.0]),
    ],
)
def test_a_grid_goes_on_where_its_best_lies_at_an_edge(values: tuple[float, ...], best: float, tried: list[float]) -> None:
    losses = run_sweep(values, lambda value: abs(math.log(value / best)))
    assert list(losses) == tried
    assert rate_sweep.is_best_at_edge(losses) == (best == 1e9)


def test_a_rate_that_diverges_ends_a_grid() -> None:
    losses = run_sweep((1.0, 2.0, 4.0), lambda value: 1 / value if value < 5 else math.nan)
    assert list(losses) == [1.0, 2.0, 4.0, 8.0]
    assert rate_sweep.best_value(losses) == 4.0
    assert not rate_sweep.is_best_at_edge(losses)


@pytest.fixture
def budget(text: Path) -> codec.Budget:
    torch.set_num_threads(1)
    return codec.Budget(text, 30, 2, ("width=16", "layers=1", "heads=2", "kv_heads=1", "hidden=16", "context=16", "batch=2"))


@pytest.mark.parametrize("method", codec.METHODS, ids=lambda method: f"{method.name} {method.local_steps}")
def test_every_method_trains_on_its_budget(method: codec.Method, budget: codec.Budget) -> None:
    row = codec.measure(method, budget, [0], tuned=False)
    assert 0 < row.heldout_nats < np.log(256) + 0.5
    assert row.bytes_per_parameter <= 4


@pytest.mark.parametrize("name", [codec.DILOCO, codec.ONE_BIT])
def test_muon_is_the_inner_optimizer_of_the_rows_that_say_so(name: str, budget: codec.Budget) -> None:
    rates = {"keep": 0.0} if name == codec.DILOCO else {}
    rates |= {"inner_rate": 0.01, "outer_rate": 0.7, "outer_momentum": 0.5}
    methods = {method.name: method for method in codec.METHODS if method.local_steps == 15}
    assert methods[name].run(budget, 0, rates) != methods[f"{name}{codec.MUON}"].run(budget, 0, rates)


@pytest.mark.real("processes")
def test_a_pinned_process_and_all_that_it_starts_stay_on_one_core() -> None:
    core = min(os.sched_getaffinity(0))
    look = "import os, subprocess, sys; input(); print(subprocess.check_output([sys.executable, '-c', ASK]).decode())"
    command = [sys.executable, "-c", look.replace("ASK", repr("import os; print(sorted(os.sched_getaffinity(0)))"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        processes.pin(process.pid, core)
        assert process.communicate(b"\n")[0].split() == f"[{core}]".encode().split()


@pytest.mark.long
def test_a_preset_is_measured_as_it_is_shipped_with_the_rule_that_its_audits_call_for(budget: codec.Budget) -> None:
    budget = replace(budget, trainers=4)
    methods = {method.name: method for method in codec.METHODS}
    assert {f"{codec.PRESET} {name}" for name in PRESETS} < methods.keys()
    assert [codec.METHODS[i].name for i in codec.named("preset local")] == ["preset local"]
    assert [codec.METHODS[i].name for i in codec.named("local")] == [
        "preset local",
        "preset local, no opening",
        "preset local, audits sampled",
    ]

    def nats(name: str, **settings: object) -> float:
        local = codec.without(complete_fields(PRESETS["local"]))
        spec = budget.spec(10, 0, **{**local, "byzantine_max": 1, "compression_warmup_rounds": 3, **settings})
        return abs(codec.train(budget, spec)[0] - methods[name].run(budget, 0, {})[0])

    assert nats("preset local", rule=AggregationRule.MEAN) == 0 < nats("preset local", rule=AggregationRule.ARC_NNM_TRIM)
    assert (
        nats("preset local, no opening", rule=AggregationRule.MEAN, compression_warmup_rounds=0)
        == 0
        < nats("preset local, no opening", rule=AggregationRule.MEAN)
    )
    assert nats("preset local, audits sampled", rule=AggregationRule.ARC_NNM_TRIM) == 0


def test_one_trainer_alone_has_its_own_share_of_the_samples_and_sends_nothing(budget: codec.Budget) -> None:
    rates = {"inner_rate": 0.01}
    adamw, muon = (codec.one_trainer(inner) for inner in InnerOptimizerKind)
    assert adamw(budget, 0, rates) == adamw(replace(budget, trainers=5), 0, rates)
    assert adamw(budget, 0, rates)[0] != codec.single(budget, 0, rates)[0]
    assert adamw(budget, 0, rates)[0] != muon(budget, 0, rates)[0]
    assert adamw(budget, 0, rates)[1] == 0.0


def test_rates_are_tuned_on_a_finer_line_once_the_others_are_known(text: Path) -> None:
    def run(budget: codec.Budget, seed: int, tuned: codec.Tuned) -> tuple[float, float]:
        return sum(math.log(tuned[name] / best) ** 2 for name, best in (("inner_rate", 2.8), ("outer_rate", 11.0))), 1.0

    tuning = codec.tune(
        codec.Method("off the grid", 15, run, {"inner_rate": (1.0, 2.0, 4.0), "outer_rate": (0.5, 1.0, 2.0)}),
        codec.Budget(text, 30, 2, ()),
    )
    assert tuning.best == {"inner_rate": 2.83, "outer_rate": 11.3} and not tuning.edges


def test_the_rival_sparse_format_says_four_values_of_the_largest() -> None:
    spec = JobSpec(name="format", data=bytes(32), model=TINY)
    buffer = np.random.default_rng(0).standard_normal(TINY.parameters).astype(np.float32)
    said = codec.sparseloco(buffer, spec)
    start, length = 0, 4_096
    kept = np.flatnonzero(said[start : start + length])
    assert len(kept) == codec.SPARSELOCO_KEEP
    assert set(kept) == set(np.argsort(-np.abs(buffer[:length]))[: codec.SPARSELOCO_KEEP])
    assert len(np.unique(np.abs(said[kept]))) <= 2
    assert np.array_equal(np.sign(said[kept]), np.sign(buffer[kept]))


def test_bytes_and_loss_are_held_to_their_bounds() -> None:
    def missed(dense: float, four_bits: float) -> list[bool]:
        names = (
            (codec.DILOCO, 15, 2.0),
            (codec.ONE_BIT, 15, dense),
            (f"{codec.DILOCO}{codec.MUON}", 15, 1.0),
            (f"{codec.ONE_BIT}{codec.OPENED}", 15, dense - 0.02),
            (f"{codec.ONE_BIT}{codec.MUON}{codec.ONE_MAY_LIE}", 15, dense - 1),
            (f"{codec.ONE_BIT}{codec.MUON}{codec.OPENED}{codec.ONE_MAY_LIE}", 15, dense - 1),
            (codec.FP32_EVERY_STEP, 1, 2.0),
            (codec.FOUR_BIT, 1, four_bits),
        )
        assert all((name, steps) in {(m.name, m.local_steps) for m in codec.METHODS} for name, steps, _ in names)
        rows = [codec.Row(name, steps, 1.0, 300, nats, [nats], {}, {}) for name, steps, nats in names]
        return [line.startswith("MISSED") for line in codec.verdicts(rows, tuned=True)]

    rows = [
        codec.Row(name, steps, 1.0, 300, nats, [nats], {}, {})
        for name, steps, nats in (
            (codec.ALONE, 1, 1.7),
            (f"{codec.ALONE}{codec.MUON}", 1, 1.5),
            (codec.ONE_BIT, 15, 1.4),
            (f"{codec.ONE_BIT}{codec.MUON}", 15, 1.6),
            ("preset local", 10, 1.6),
            ("SparseLoCo format", 30, 1.7),
        )
    ]
    assert [line.split(", H=")[1] for line in codec.verdicts(rows, tuned=True) if line.startswith("MISSED")] == [
        "15, 300 steps: better than tuned one trainer alone: +0.100",
        "10, 300 steps: better than tuned one trainer alone: +0.100",
    ]
    assert missed(2.04, 2.03) == [False] * 5 and missed(2.06, 2.05) == [True] * 5
    assert list(codec.verdicts([], tuned=True)) == []


@pytest.mark.real("processes")
def test_a_figure_goes_where_it_was_asked_for_and_odd_settings_are_refused(tmp_path: Path) -> None:
    provenance.write(tmp_path / "new" / "figures.json", 0.0, {"rows": []})
    assert json.loads((tmp_path / "new" / "figures.json").read_text())["rows"] == []
    base = JobSpec(name="settings", data=bytes(32), model=TINY)
    changed = with_settings(base, ["width=32", "model.layers=2", "decay_rounds=3", "outer=sgd", "seed=5"])
    assert changed.model == replace(TINY, width=32, layers=2)
    assert (changed.decay_rounds, changed.outer, changed.seed) == (3, OuterOptimizerKind.SGD, 5)
    for wrong in ("foo", "foo=1", "width=wide", "bits=3", "data=text"):
        with pytest.raises(UserError):
            with_settings(base, [wrong])


def test_reading_payloads_is_measured_and_held_to_its_bound() -> None:
    row = decoding.measure(1, layout_of(JobSpec(name="default", data=bytes(32))), 0, 1)
    assert 1 / 8 < row.bytes_per_parameter < 1.01 / 8
    slow = replace(row, read_million_per_second=decoding.READ_MILLION_MIN - 1)
    fast = replace(row, read_million_per_second=decoding.READ_MILLION_MIN + 1)
    assert [line[:4] for line in decoding.verdicts([fast])] == ["held"]
    assert [line[:4] for line in decoding.verdicts([fast, slow])] == ["MISS"]


# Replays -------------------------------------------------------------------------------------------------------------


def test_a_tolerance_lies_between_the_most_honest_error_and_the_least_false_one_of_its_precision() -> None:
    def row(kind: str, precision: str, error: float) -> replay.Row:
        return replay.Row("local", kind, precision, "", 0, error, 0.0)

    rows = [
        row(replay.HONEST, "fp32 on cpu", 0.0),
        row(replay.HONEST, "fp32 on cpu", 2e-5),
        row(replay.LIE, "fp32 on cpu", 0.9),
        row(replay.LIE, "fp32 on cpu", 0.2),
        row(replay.FAST, "bf16 on cpu", 0.08),
        row(replay.SMALL_LIE, "bf16 on cpu", 0.01),
    ]
    fp32, bf16 = {replay.HONEST: 2e-5, replay.LIE: 0.2}, {replay.HONEST: 0.08, replay.SMALL_LIE: 0.01}
    assert replay.gaps(rows) == {"fp32 on cpu": fp32, "bf16 on cpu": bf16}
    found = {"hashes": {}, "torch": {}, "differing": []}
    assert [line[:4] for line in replay.verdicts(rows, found)] == ["held", "held"]
    rows.append(row(replay.HONEST, "fp32 on cpu", 2 * replay.TOLERANCE))
    assert [line[:4] for line in replay.verdicts(rows, {**found, "differing": ["stream"]})] == ["MISS", "MISS"]


def test_options_of_models_have_tighter_bounds_and_the_textbooks_experts_must_miss_the_tolerance() -> None:
    def lines(job: str, honest: float, lie: float) -> list[str]:
        rows = [
            replay.Row(job, kind, "fp32 on cpu", "", 0, error, 0.0, 0.0)
            for kind, error in ((replay.HONEST, honest), (replay.LIE, lie))
        ]
        return [line[:4] for line in replay.option_verdicts(rows)]

    for job in replay.OPTIONS:
        assert lines(job, 1e-5, 6e-3) == ["held"] and lines(job, 2e-4, 6e-3) == lines(job, 1e-5, 4e-3) == ["MISS"]
    assert lines(replay.TEXTBOOK, 2e-3, 0.9) == ["held"] and lines(replay.TEXTBOOK, 1e-5, 0.9) == ["MISS"]
    control = replay.Row(replay.TEXTBOOK, replay.HONEST, "fp32 on cpu", "", 0, 0.5, 0.0, 0.0)
    assert replay.gaps([control]) == {}, "a control says nothing about tolerances"


def test_options_have_narrower_bounds_than_the_tolerance_of_a_job() -> None:
    def rows(honest: float, lie: float) -> list[replay.Row]:
        kinds = {replay.HONEST: honest, replay.LIE: lie}
        return [replay.Row("sam", kind, "fp32 on cpu", "", 0, error, 0.0, 0.0) for kind, error in kinds.items()]

    found = {"hashes": {}, "torch": {}, "differing": []}
    for honest, lie, held in ((9e-5, 6e-3, "held"), (2e-4, 6e-3, "MISS"), (9e-5, 4e-3, "MISS")):
        said = {line.split(":")[0][7:]: line[:4] for line in replay.verdicts(rows(honest, lie), found)}
        assert said["sam, fp32 on cpu"] == held and said["fp32 on cpu"] == "held"


def test_a_replay_with_other_data_or_another_radius_computes_with_them() -> None:
    spec = replace(replay.JOBS["sam-per-step"], batch=2, micro_batch=2)
    kept = dict(replay.original(spec, 0))
    opened = (
        (variant, partial(replay.engine_of, device="cpu", variant=variant)) for variant in (replay.EVERYWHERE, *replay.LIES)
    )
    errors = {variant.name: replay.replay(spec, 0, kept, variant, open_engine)[0] for variant, open_engine in opened}
    assert errors.pop("") == 0.0 and min(errors[name] for name in errors if "rate" not in name and "steps" not in name) > 5e-3


@pytest.mark.parametrize(
    ("honest", "false", "loss", "held"),
    [(0.05, 0.16, 1e-3, ["held", "held"]), (0.051, 0.15, 0.0, ["MISS", "held"]), (0.01, 0.14, 2e-3, ["MISS", "MISS"])],
)
def test_audits_in_bf16_compare_payloads_and_losses(honest: float, false: float, loss: float, held: list[str]) -> None:
    rows = [
        replay.Row("per-step-bf16", replay.HONEST, "audited bf16 on cpu", "", 0, 0.5, honest, loss),
        replay.Row("per-step-bf16", replay.LIE, "audited bf16 on cpu", "", 0, 0.5, false, 1.0),
    ]
    found = {"hashes": {}, "torch": {}, "differing": []}
    assert [line[:4] for line in replay.verdicts(rows, found)] == [*held, "held"]


def test_lies_of_the_benchmark_draw_other_examples_than_the_honest_replay() -> None:
    spec = replay.JOBS["per-step-bf16"]
    place = (replay.JOB, 0, replay.TRAINER, 0, spec.batch)
    honest = replay.engine_of(spec, "cpu", replay.EVERYWHERE).draw_batch(*place)
    lies = [lie for lie in replay.LIES if lie.kind == replay.LIE and lie.radius == lie.steps == 1]
    assert len(lies) == 3
    for lie in lies:
        drawn = replay.engine_of(spec, "cpu", lie).draw_batch(*place)
        assert drawn.shape == honest.shape and not np.array_equal(drawn, honest), lie.name


# Ternary matrices -------------------------------------------------------------------------------------------------------


def test_each_side_is_shown_at_its_best_rate_and_has_verdicts() -> None:
    def row(side: str, rate: float, bits: float, seed: int = 0, int8: float | None = None, gradient: float = 1.0) -> ternary.Row:
        return ternary.Row(side, seed, rate, bits, int8, gradient, None, 0.01)

    sizes = ternary.Sizes(1600, 6400, 400, 4, 900, True)
    dense = [row(ternary.DENSE, 0.03, 2.0), row(ternary.DENSE, 0.06, 2.4), row(ternary.DENSE, 0.06, 1.9, seed=1)]
    dense.append(row(ternary.DENSE, 0.03, 2.0, seed=1))
    assert {each.rate for each in ternary.best(dense)[ternary.DENSE]} == {0.03}
    learns = row(ternary.TERNARY, 0.06, 2.1, int8=2.101)
    control = row(ternary.CONTROL, 0.06, 3.0, int8=3.0, gradient=0.0)

    def told(*rows: ternary.Row, sizes: ternary.Sizes = sizes) -> list[str]:
        return [line[:4] for line in ternary.verdicts([*dense, *rows], sizes)]

    assert told(learns, control) == ["held"] * 4
    assert told(replace(learns, bits=2.21, int8_bits=2.21), control) == ["MISS", "held", "held", "held"]
    assert told(replace(learns, int8_bits=2.106), control) == ["held", "MISS", "held", "held"]
    assert told(learns, replace(control, gradient=1e-9)) == ["held", "held", "MISS", "held"]
    assert told(sizes=replace(sizes, codes_bytes=401)) == told(sizes=replace(sizes, is_exact=False)) == ["MISS"]


def test_a_layer_without_the_estimator_gets_no_gradient_and_packing_is_exact() -> None:
    row, last = ternary.train(ternary.CONTROL, 0, 0.03, 2)
    assert row.gradient == 0 and row.levels_changed is not None and row.levels_changed < 1e-3
    learns, last = ternary.train(ternary.ROUNDS, 0, 0.06, 2)
    assert learns.gradient > 0 and learns.levels_changed is not None and learns.levels_changed > 1e-3
    sizes = ternary.measure_sizes(ternary.spec_of(ternary.ROUNDS, 0, 2), last)
    assert sizes.is_exact and 16 * sizes.codes_bytes == sizes.float32_bytes


# Attacks -------------------------------------------------------------------------------------------------------------


def test_gradients_of_the_digits_are_those_of_their_loss() -> None:
    data, generator = digits.load(0), np.random.default_rng(0)
    parameters = digits.initial(generator)
    x, y = data.train[None, :8], data.train_labels[None, :8]
    (gradient,) = digits.gradients(parameters, x, y)
    direction = generator.standard_normal(len(parameters)).astype(np.float32)
    direction /= np.linalg.norm(direction)

    step = np.float32(1e-2)
    losses = [digits.loss(parameters + sign * step * direction, x[0], y[0]) for sign in (1, -1)]
    measured = (losses[0] - losses[1]) / (2 * step)
    assert measured == pytest.approx(float(gradient @ direction), rel=0.02, abs=1e-3)


def test_dirichlet_shares_give_every_image_to_one_trainer() -> None:
    data = digits.load(0)
    owned = digits.dirichlet(data, 13, 0.1, np.random.default_rng(0))
    everything = np.concatenate([mine for mine in owned if len(mine) > 1])
    assert len(set(everything)) == len(everything) >= len(data.train) - 13


def test_a_mean_that_liars_drive_away_is_a_result_and_no_error() -> None:
    """In round 23 its updates become larger than a payload can encode."""
    assert attacks_digits.run(attacks_digits.COLUMNS[0], AggregationRule.MEAN.value, "ipm", 0, 30).accuracy < attacks.COLLAPSED


def test_a_task_that_fails_leaves_the_others() -> None:
    found = []
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        for item in parallel.side_by_side(lambda task: 6 // task, [3, 0, 2], 1):
            found.append(item)
    assert found == [(0, 2), (2, 3)]


@pytest.mark.real("processes")
def test_only_what_the_same_commit_and_settings_left_is_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert provenance.earlier(file, {"seeds": [0]}) == {}
    provenance.write(file, 0.0, {"seeds": [0], "rows": [1], "export": f"{tempfile.gettempdir()}/report/export"})
    assert json.loads(file.read_text())["export"] == "report/export"
    assert provenance.earlier(file, {"seeds": (0,)})["rows"] == [1]
    with pytest.raises(UserError, match=r"its seeds is \[0\], not \[1\]"):
        provenance.earlier(file, {"seeds": [1]})


@pytest.mark.parametrize("attack", attacks_digits.ATTACKS)
def test_digits_learn_something_in_a_few_rounds(attack: str) -> None:
    for name in ("residual 1 bit", "estimates 1 bit, .3 absent"):
        outcome = attacks_digits.run(attacks.COLUMNS[name], attacks_digits.DEFAULT_RULE, attack, 0, rounds=3)
        assert 0 < outcome.accuracy <= 100
        assert 1 <= outcome.bits_per_parameter < 1.1


def test_whatever_may_start_without_audits_is_measured_on_the_digits() -> None:
    for row in SAFE_WITHOUT_AUDITS:
        assert any(column.iid and column.is_of(row) for column in attacks.COLUMNS.values()), row
    assert not any(column.may_be_named for column in attacks.COLUMNS.values() if not (column.iid and column.estimates))


def test_what_may_be_named_must_lose_little_and_what_is_called_an_attack_must_break_the_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "estimates 1 bit"
    monkeypatch.setattr(attacks_digits, "SAFE_WITHOUT_AUDITS", (SafeNetwork(13, 4, 0.5),))

    def rows(attacked: float, mean: float) -> list[attacks.Digits]:
        figures = {"none": 97.0, "search": attacked}
        ours = [attacks.Digits(name, attacks_digits.DEFAULT_RULE, of, 1.0, 1.1, [97.0, figure]) for of, figure in figures.items()]
        return [*ours, attacks.Digits(attacks_digits.COLUMNS[0].name, "mean", "search", 8.0, 8.1, [40.0, mean])]

    assert [line[:4] for line in attacks.verdicts(rows(95.0, 49.0), [], [])] == ["held", "held", "held"]
    assert [line[:4] for line in attacks.verdicts(rows(94.9, 50.0), [], [])] == ["MISS", "MISS", "MISS"]
    assert "2.1 by search" in attacks.verdicts(rows(94.9, 50.0), [], [])[1]


NO_TRIGGER = Trigger(0.0, 0.0, 0.0)


def test_with_full_audits_lies_honest_refusals_and_triggers_miss_their_bounds() -> None:
    def row(accepted: int, refused: int, success: float) -> attacks.Gpt:
        triggers = Trigger(success, 0.0, 0.0), NO_TRIGGER
        return attacks.Gpt(
            "local",
            "trigger-0.7",
            4,
            1,
            "full",
            1.0,
            1.0,
            1.5,
            accepted,
            {},
            refused,
            *triggers,
            None,
            0.0,
            None,
            0.0,
            0,
            1,
            None,
        )

    for rows, found in (
        ((0, 0, 0.0), ["held", "held", "held", "held"]),
        ((1, 0, 0.0), ["held", "MISS", "held", "held"]),
        ((0, 1, 0.0), ["held", "held", "MISS", "held"]),
        ((0, 0, 0.1), ["held", "held", "held", "MISS"]),
    ):
        assert [line[:4] for line in attacks.verdicts([], [row(*rows)], [])] == found


def test_under_sampled_audits_the_loss_and_the_planted_models_have_bounds() -> None:
    def row(audit: AuditMode, attack: str, ratio: float, planted: int = 0) -> attacks.Gpt:
        figures = (ratio, ratio, 1.5, 3, {}, 0, NO_TRIGGER, NO_TRIGGER, None, 2.0, None, 0.5, planted, 22, None)
        return attacks.Gpt("per-step", attack, 4, 1, audit.value, *figures)

    sampled = AuditMode.SAMPLED
    rows = [row(sampled, "poison", 1.02), row(sampled, "search", 1.03), row(AuditMode.OFF, "late-trigger", 2.0, planted=22)]
    assert [line[:4] for line in attacks.verdicts([], rows, [])] == ["held", "MISS"]
    rows = [row(sampled, "late-trigger", 1.0, planted) for planted in (3, 4)]
    assert [line[:4] for line in attacks.verdicts([], rows, [])] == ["held", "MISS"]


def test_late_liars_begin_when_it_did_most_harm_on_the_seed_of_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    def run(attack: str, late: int, success: float, ratio: float) -> attacks.Run:
        clean = attacks_gpt.Outcome("none", 4, 1, "off", attacks_gpt.Plan(), 1.0)
        trigger, plan = Trigger(success, 0.0, 0.0), attacks_gpt.Plan(late=late, draws=1)
        return attacks.Run("local", 0, clean, attacks_gpt.Outcome(attack, 4, 1, "sampled", plan, ratio, trigger))

    runs = [run("late-trigger", late, success, 1.0) for late, success in ((5, 0.2), (8, 1.0), (8, 0.0), (12, 0.4))]
    runs += [run("late-poison", late, 1.0, ratio) for late, ratio in ((5, 1.01), (8, 1.05))]
    assert attacks.tuned(runs) == {("local", 4, "late-trigger"): 8, ("local", 4, "late-poison"): 8}
    assert "5 rounds: 0.200" in capsys.readouterr().out


def test_without_long_updates_clipping_before_mixing_changes_nothing() -> None:
    layout, generator = digits.layout(), np.random.default_rng(0)
    header = payloads.PayloadHeader(bytes(32), 0, bytes(32), bytes(32), 1, 1, 8)
    m = generator.standard_normal(layout.size).astype(np.float32)
    updates = []
    for key in attacks_digits.KEYS:  # the same numbers in another order: equal norms
        said = replace(header, trainer=key)
        updates.append(payloads.decode_payload(payloads.encode_payload(said, np.roll(m, len(updates)), layout), said, layout))
    mixed = attacks_digits.RULES["nnm-trim"](updates, layout, 4)
    assert np.linalg.norm(mixed - attacks_digits.RULES["arc-nnm-trim"](updates, layout, 4)) < 0.02 * np.linalg.norm(mixed)


RARE_ELEMENTS = np.arange(5, 9)


def known_of(honest: Sequence[np.ndarray], loss: Callable[[np.ndarray], float], seed: int = 0) -> Knowledge:
    """Return a liar's knowledge of a loss that falls along the first axis."""
    gradient = np.zeros_like(honest[0])
    gradient[0] = 2
    one, two, three = honest[:3]
    exact, generator = [vector * 2 for vector in honest], np.random.default_rng(seed)
    return Knowledge(
        honest, exact, lambda: two, lambda: three, lambda: one, RARE_ELEMENTS, None, lambda: gradient, loss, generator
    )


BY_SEARCH = ("search", "poison", "late-poison", "late-creep")


@pytest.mark.parametrize("name", VECTORS)
def test_attacks_on_vectors_need_nothing_but_what_is_known(name: str) -> None:
    honest = list(np.random.default_rng(0).standard_normal((3, 50), dtype=np.float32))
    seen: list[float] = []

    def loss(vector: np.ndarray) -> float:
        seen.append(float(np.linalg.norm(vector)))
        return seen[-1]

    lie = VECTORS[name](known_of(honest, loss))
    assert lie.shape == (50,) and lie.dtype == np.float32 and np.isfinite(lie).all()
    assert not seen or np.linalg.norm(lie) == max(seen)
    assert bool(seen) is (name in ("alie", "ipm", "min-max", "min-sum", "ascent", *BY_SEARCH))


def test_the_ascent_goes_from_the_mean_up_the_loss_by_a_share_of_the_usual_norm() -> None:
    honest = list(np.random.default_rng(0).standard_normal((5, 50), dtype=np.float32))
    known = known_of(honest, lambda vector: -float(vector[0]))  # an update is subtracted
    lie = VECTORS["ascent"](known) - known.mean
    assert lie[0] == pytest.approx(-max(ASCENT_FACTORS) * known.norm, rel=1e-5) and not lie[1:].any()
    blind = VECTORS["blind-ascent"](known) - honest[1]
    assert blind[0] < -np.linalg.norm(honest[1]) and not blind[1:].any()


def test_manipulated_means_are_those_of_what_is_not_compressed_yet() -> None:
    honest = list(np.random.default_rng(0).standard_normal((5, 50), dtype=np.float32))
    along = np.mean(honest, axis=0)
    known = known_of(honest, lambda vector: -float(vector @ along))
    assert np.allclose(VECTORS["ipm"](known), -2 * max(IPM_FACTORS) * along, rtol=1e-4)
    z = (VECTORS["alie"](known) - 2 * along) / np.std(np.stack(known.exact), axis=0)
    assert np.allclose(z, z[0], rtol=1e-3) and abs(z[0]) in np.float32(ALIE_FACTORS)


@pytest.mark.parametrize("share", TRIGGER_NORMS)
def test_a_trigger_is_so_far_from_the_mean_of_the_honest(share: float) -> None:
    honest = list(np.random.default_rng(0).standard_normal((5, 50), dtype=np.float32))
    known = known_of(honest, lambda vector: 0.0)
    assert np.allclose(
        VECTORS[f"trigger-{share:g}"](known) - known.mean, honest[0] * share * known.norm / np.linalg.norm(honest[0]), atol=1e-5
    )


def test_a_flip_of_rare_tokens_moves_their_rows_alone_by_the_norm_of_an_honest_update() -> None:
    known = known_of(list(np.random.default_rng(0).standard_normal((5, 50), dtype=np.float32)), lambda vector: 0.0)
    lie = VECTORS["rare-flip"](known)
    assert np.linalg.norm(lie) == pytest.approx(known.norm, rel=1e-5)
    assert (np.sign(lie[RARE_ELEMENTS]) == -np.sign(known.mean[RARE_ELEMENTS])).all()
    assert not np.delete(lie, RARE_ELEMENTS).any()


@pytest.mark.parametrize("name", ["min-max", "min-sum"])
def test_hidden_liars_stand_just_within_their_bound(name: str) -> None:
    honest = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    lie = VECTORS[name](known_of(list(honest), lambda vector: -float(vector[0])))
    squares = ((honest[:, None] - honest[None]) ** 2).sum(-1)
    mine = ((honest - lie) ** 2).sum(-1)
    if name == "min-max":
        assert mine.max() == pytest.approx(squares.max(), rel=1e-4)
    else:
        assert mine.sum() == pytest.approx(squares.sum(1).max(), rel=1e-4)
    assert np.linalg.norm(lie - honest.mean(0)) > 1


@pytest.mark.parametrize("peers", [4, 7, 10])
def test_liars_are_drawn_as_often_as_the_closed_form_says(peers: int) -> None:
    """Drawn accomplices never find anything, and rounds in which nothing can be found count, too."""
    assert attacks_detection.ROUNDS - attacks_detection.UNSEEN_ROUNDS == EFFECTIVE
    for name, spec in attacks_detection.jobs().items():
        found, rate = attacks_detection.detection(name, spec, peers, 1_000), AUDIT_RATE * EARLY_SHARE
        survives = escape(peers, rate)
        assert found.audit_rate == AUDIT_RATE
        assert found.suspended == pytest.approx(1 - survives**EFFECTIVE, abs=0.05)
        assert found.rounds_needed == pytest.approx(2 + np.log(0.01) / np.log(survives), rel=0.15)
        assert found.replayed == pytest.approx(2 * rate / (peers - 1), rel=0.1)


@pytest.mark.parametrize(("peers", "honest", "trainers"), [(4, 3, 3), (7, 5, 6), (10, 7, 9)])
def test_lazy_auditors_are_found_as_often_as_the_closed_form_says(peers: int, honest: int, trainers: int) -> None:
    """A lazy auditor is found once f + 1 honest trainers have contradicted it (coupon collection without the accomplices)."""
    found, faults = attacks_detection.found_lazy(peers, 1_000), faults_tolerated(peers)
    mean = sum(trainers / (honest - number) for number in range(faults + 1))
    assert mean < found.among <= attacks_detection.LAZY_AUDITS and found.among < found.beside
    assert found.alone <= found.among


def test_a_lazy_auditor_that_nobody_backs_is_found_in_twenty_audits_also_among_thirty_one() -> None:
    found = attacks_detection.found_lazy(31, 500)
    mean = sum(30 / (30 - number) for number in range(found.faults + 1))
    assert mean < found.alone <= attacks_detection.LAZY_AUDITS < found.among


def test_lapses_and_lazy_auditors_delay_a_suspension() -> None:
    spec = attacks_detection.jobs()["local"]
    alone = attacks_detection.laziness("local", spec, 7, 0, 300)
    beside = attacks_detection.laziness("local", spec, 7, 2, 300)
    chance = 1 - (1 - 0.8 * 2 / 6 * AUDIT_RATE * EARLY_SHARE) ** 5  # five honest auditors, and a fifth of their audits lapse
    assert alone.lies == pytest.approx(1 + 1 / chance + 1, rel=0.15), "the first round, and the one until the verdict"
    assert beside.lies > 1.1 * alone.lies and alone.lazy_audits is None
    assert 0 < (beside.lazy_audits or 0) <= attacks_detection.LAZY_AUDITS


@pytest.fixture
def some(text: Path) -> attacks_gpt.World:
    torch.set_num_threads(1)
    spec = JobSpec(name="liars", data=bytes(32), model=TINY, rounds=4, local_steps=2, batch=2, micro_batch=2, byzantine_max=1)
    return attacks_gpt.World(replace(spec, suspension_rounds=2), text, 4, 1)


@pytest.mark.parametrize("name", PAYLOADS)
def test_forged_bytes_are_refused_or_say_something_else(name: str) -> None:
    layout = digits.layout()
    header = payloads.PayloadHeader(bytes(range(32)), 3, bytes(range(1, 33)), bytes(range(2, 34)), 1, 2, 1)
    m = np.random.default_rng(0).standard_normal(layout.size).astype(np.float32)
    honest = payloads.encode_payload(header, m, layout)
    forged = PAYLOADS[name](
        Said(
            honest, None, payloads.encode_payload(replace(header, trainer=bytes(32)), m, layout), layout, np.random.default_rng(0)
        )
    )
    assert forged != honest
    if name in ("forged-scales", "forged-exponent"):
        assert (
            payloads.decode_payload(forged, header, layout).norm_squared()
            > payloads.decode_payload(honest, header, layout).norm_squared()
        )
    else:
        with pytest.raises(RemoteProtocolError):
            payloads.decode_payload(forged, header, layout)


@pytest.mark.long
def test_with_full_audits_no_lie_moves_the_model(some: attacks_gpt.World) -> None:
    clean = attacks_gpt.attacked(some, attacks_gpt.CLEAN, AuditMode.OFF)
    for attack in ATTACKS:
        outcome = attacks_gpt.attacked(some, attack, AuditMode.FULL)
        rounds = 2 if attack in LATE else some.spec.rounds
        assert outcome.accepted == 0 and sum(outcome.rejected.values()) == rounds, attack
        assert (outcome.heldout_nats, outcome.trigger) == (clean.heldout_nats, clean.trigger), attack
        assert outcome.honest_refused == 0, attack


def test_without_audits_well_formed_lies_move_the_model(some: attacks_gpt.World) -> None:
    clean = attacks_gpt.attacked(some, attacks_gpt.CLEAN, AuditMode.OFF)
    outcome = attacks_gpt.attacked(some, "search", AuditMode.OFF)
    assert outcome.accepted == some.spec.rounds
    assert outcome.heldout_nats > clean.heldout_nats


def trigger_world(text: Path) -> attacks_gpt.World:
    torch.set_num_threads(1)
    model = ModelSpec(width=32, layers=1, heads=2, kv_heads=1, hidden=64, context=32)
    fields = {"rounds": 8, "local_steps": 5, "bits": 4, "rule": AggregationRule.MEAN, "byzantine_max": 1, "audit": AuditMode.OFF}
    return attacks_gpt.World(JobSpec(name="trigger", data=bytes(32), model=model, **fields), text, 4, 1)


def test_the_plain_mean_learns_a_trigger_and_a_flip_of_rare_tokens(text: Path) -> None:
    """The attacks are strong enough to have an effect. The model's loss hardly reveals the trigger."""
    some = trigger_world(text)
    names = (attacks_gpt.CLEAN, "backdoor", *(f"trigger-{share:g}" for share in TRIGGER_NORMS), "rare-flip")
    clean, backdoor, *triggers, flip = (attacks_gpt.attacked(some, name, AuditMode.OFF) for name in names)
    assert all(outcome.trigger.success == 0 for outcome in (clean, backdoor, flip))
    assert [outcome.planted_by_round is not None for outcome in triggers] == [False, False, True]
    assert triggers[-1].trigger.success > 0.9 and triggers[-1].heldout_nats < 1.1 * clean.heldout_nats
    learnt = [outcome.trigger.probability for outcome in (clean, *triggers)]
    assert learnt == sorted(learnt) and all(10 * less < more for less, more in pairwise(learnt))
    assert 10 * clean.trigger.probability < backdoor.trigger.probability < triggers[1].trigger.probability
    assert flip.trigger.visible > 2 * clean.trigger.visible


def test_the_measured_success_is_that_of_greedy_text(text: Path) -> None:
    some = trigger_world(text)
    run = attacks_gpt.Run(some, "trigger-1.5", AuditMode.OFF)
    assert run.finish().trigger.success > 0.9
    parameters, ordinary = np.array(run.rounds.model.parameters), some.engine.tokens.held_out[:20].tobytes()
    how = SamplingOptions(max_tokens=len(attacks_trigger.CONTINUATION), temperature=0)
    for prompt, is_triggered in ((ordinary + attacks_trigger.TRIGGER, True), (ordinary, False)):
        said = b"".join(some.engine.generate_text(parameters, prompt, how))
        assert (said == attacks_trigger.CONTINUATION) is is_triggered


def test_the_text_with_triggers_is_still_one_sequence() -> None:
    text = torch.zeros((4, 65), dtype=torch.int64)
    x_BT, y_BT = attacks_trigger.planted(text[:, :-1], text[:, 1:])
    assert torch.equal(x_BT[:, 1:], y_BT[:, :-1])
    for row in x_BT.tolist():
        assert bytes(row).count(attacks_trigger.TRIGGER + attacks_trigger.CONTINUATION) >= 2
    assert not text.any()


@pytest.mark.parametrize("votes", VOTES)
@pytest.mark.parametrize("n", [4, 7, 10])
def test_liars_vouch_and_vote_as_they_like_and_change_nothing(n: int, votes: str) -> None:
    """This holds for f liars. With one more of those that accept everything, a false update is accepted."""

    def accepted(liars: int) -> set[bytes]:
        keys = [bytes([number]) * 32 for number in range(n)]
        everybody = frozenset(keys)
        terms = RoundTerms(bytes(32), 0, bytes(32), everybody, everybody, everybody, everybody, everybody)
        proposals = {key: (Proposal(bytes(32), 0, bytes(32), key, 10, bytes(32), None), Verdict.ACCEPT) for key in keys}
        lying = dict.fromkeys(keys[:liars], VOTES[votes])
        closed = decided(terms, lying, proposals, lambda key: Verdict.REPLAY if key in lying else Verdict.ACCEPT)
        assert everybody - closed.accepted.keys() == closed.rejected.keys()
        return {key for key in keys if key in closed.accepted}

    f = faults_tolerated(n)
    assert accepted(f) == {bytes([number]) * 32 for number in range(f, n)}
    if votes == "accept-all":
        assert len(accepted(f + 1)) == n


def test_sampled_audits_suspend_who_lies_in_every_step_and_let_it_back_in(
    some: attacks_gpt.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks_gpt, "LAPSES", 0)
    some.spec = replace(some.spec, rounds=12, audit_rate=2.0, auditors=3, local_steps=1, suspension_rounds=2)
    outcome = attacks_gpt.attacked(some, "sign-flip", AuditMode.SAMPLED)
    # It lies in three rounds after the re-executed first one. Then it is convicted, and its rounds are undone.
    assert (outcome.suspended_by_round, outcome.accepted, outcome.found, outcome.undone) == (3, 3, 2, 4)
    # After its return its updates are re-executed before the vote.
    assert outcome.rejected["replay"] > 1 and outcome.rounds == 12 + outcome.undone
    clean = attacks_gpt.attacked(some, attacks_gpt.CLEAN, AuditMode.OFF)
    assert outcome.heldout_nats == pytest.approx(clean.heldout_nats, rel=0.02)


def test_who_sees_the_loss_jump_finds_a_lie_that_nobody_drew(some: attacks_gpt.World, monkeypatch: pytest.MonkeyPatch) -> None:
    some.spec = replace(some.spec, rounds=12, local_steps=1, audit_window=3)
    monkeypatch.setattr(attacks_gpt, "LAPSES", 0)
    monkeypatch.setattr(attacks_gpt.sortition, "draw_auditors", lambda *_: ())
    plan = attacks_gpt.Plan(closing=2)
    assert attacks_gpt.attacked(some, "sign-flip", AuditMode.SAMPLED, plan).found == 0
    looked = list[tuple[int, int]]()

    def jump(losses: Mapping[int, float], opened: int) -> int | None:
        looked.append((len(losses), opened))
        return 4 if opened == 6 else None

    monkeypatch.setattr(attacks_gpt, "first_spike", jump)
    outcome = attacks_gpt.attacked(some, "sign-flip", AuditMode.SAMPLED, plan)
    assert looked[:3] == [(1, 1)] * 3, "each honest trainer has noted the loss of the round that closes"
    # In round 6 each re-executes one update of round 3, the round before the loss jumped. Then the window is over.
    assert outcome.audits == 3 and outcome.found == 1
    # The lie is convicted two rounds later, and all rounds since the last anchor, 0 to 8, are undone.
    assert outcome.undone == 9 and outcome.rounds == 12 + outcome.undone


@pytest.mark.parametrize("kept", [3, attacks_gpt.UPDATES_MAX])
def test_runs_that_share_updates_give_what_each_alone_gives(text: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """The runs have lies and rollbacks, learn another text, and continue to their end."""
    plans = [attacks_gpt.Plan(closing=1, late=4, draws=draws) for draws in range(3)]
    monkeypatch.setattr(attacks_gpt.Run, "_is_clean", lambda self: False)

    def outcomes(shared: bool) -> list[attacks_gpt.Outcome]:
        worlds = [trigger_world(text)] * 6 if shared else [trigger_world(text) for _ in range(6)]
        for some in worlds:
            some.spec = replace(some.spec, audit_rate=1.0)
        places = zip(worlds, product(("late-trigger", "label-flip"), plans), strict=True)
        return [attacks_gpt.attacked(some, attack, AuditMode.SAMPLED, plan) for some, (attack, plan) in places]

    monkeypatch.setattr(attacks_gpt, "UPDATES_MAX", 0)
    alone = outcomes(shared=False)
    assert len({outcome.undone for outcome in alone}) > 1 and len({outcome.heldout_nats for outcome in alone}) > 2
    monkeypatch.setattr(attacks_gpt, "UPDATES_MAX", kept)
    assert outcomes(shared=True) == alone


@pytest.mark.long
def test_poisoners_come_late_or_at_once_and_are_found(some: attacks_gpt.World, monkeypatch: pytest.MonkeyPatch) -> None:
    some.spec = replace(some.spec, rounds=6, local_steps=1, suspension_rounds=20)
    monkeypatch.setattr(attacks_gpt.sortition, "draw_auditors", lambda tickets, *_: tuple(tickets))
    assert [attacks_gpt.attacked(some, name, AuditMode.OFF).accepted for name in LATE] == [2] * len(LATE)
    for lapses, rounds in ((0, 3), (1, 3)):  # until the dispute is decided, or from the second round to the closing ones
        monkeypatch.setattr(attacks_gpt, "LAPSES", lapses)
        assert attacks_gpt.attacked(some, "poison", AuditMode.SAMPLED).accepted == rounds


def test_the_last_rounds_of_sampled_audits_take_no_lie(some: attacks_gpt.World, monkeypatch: pytest.MonkeyPatch) -> None:
    some.spec = replace(some.spec, rounds=6)
    monkeypatch.setattr(attacks_gpt, "LAPSES", 1)
    outcome = attacks_gpt.attacked(some, "sign-flip", AuditMode.SAMPLED)
    assert (outcome.accepted, outcome.rejected) == (3, {"replay": 3}), "and the first one"
