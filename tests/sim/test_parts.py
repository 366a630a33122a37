"""The simulator's own parts: its disk tears like a real one, its plans are explicit, its shrinker finds the necessary faults."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from consensus.effects import JournalRecord, OwnRoundStatement, OwnStatement, StoredBlock
from ledger.audits.audit_state import AuditFinding
from ledger.audits.loss_commitments import LossOpening
from ledger.ledger_state import BlockBody
from ledger.members import ApproveVoter, ResignAsVoter, RetireMember
from protocol import codec
from protocol.errors import StorageError
from protocol.identity import Signed, sign_message
from protocol.limits import CLOCK_AHEAD_SECONDS
from protocol.messages import Transaction
from protocol.verdicts import ReplayFinding
from tests.packages import PACKAGES
from tests.sim import campaign, client_runs, heartbeats, invariants, progress, twins
from tests.sim.__main__ import main
from tests.sim.disk import Disk, frame, read
from tests.sim.keys import FastSigner, FastVerifier
from tests.sim.plan import SKEW_ACCEPTED, Fault, calm, expand, faults_tolerated
from tests.sim.shrink import minimal
from tests.sim.simulation import Simulation
from tests.sim.strategies import HONEST_MAJORITY
from transport.wire import failure_detector

SIGNED = Signed(b"body", bytes(32), bytes(64))


def vote(view: int) -> OwnStatement:
    return OwnStatement(("prepare", 1, view), SIGNED)


def test_an_append_that_was_cut_off_anywhere_leaves_what_was_before() -> None:
    first: list[JournalRecord] = [vote(0), StoredBlock(1, bytes(32), b"block")]
    second: list[JournalRecord] = [vote(1), vote(2)]
    log = frame(first)
    for kept in range(len(frame(second))):
        assert list(read(log + frame(second)[:kept])) == [first]
    assert list(read(log + frame(second))) == [first, second]


def test_wrong_bytes_in_the_last_frame_are_a_torn_append() -> None:
    log = frame([vote(0)]) + frame([vote(1)])
    assert list(read(log[:-1] + bytes([log[-1] ^ 1]))) == [[vote(0)]]


def test_wrong_bytes_before_the_end_are_damage_wherever_they_are() -> None:
    first = frame([vote(0)])
    log = first + frame([vote(1)])
    for position in range(len(first)):
        with pytest.raises(StorageError, match="damaged"):
            list(read(log[:position] + bytes([log[position] ^ 1]) + log[position + 1 :]))


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_a_damaged_disk_keeps_its_peer_from_starting(disk: Disk) -> None:
    disk.append_records([vote(0)])
    disk.append_records([vote(1)])
    disk.damage(30)
    with pytest.raises(StorageError):
        disk.read_restart_state()


def test_a_disk_forgets_what_a_crash_tore_and_keeps_what_it_had_said_was_safe(disk: Disk) -> None:
    disk.append_records([vote(0), OwnRoundStatement("ballot", bytes(32), 0, SIGNED)])
    disk.tear([vote(1)], 0.7, garbled=False)
    assert [voted.slot for voted in disk.read_restart_state().votes] == [("prepare", 1, 0)]
    assert disk.spoken(bytes(32), 0) == {"ballot": SIGNED}


def test_an_image_of_a_disk_does_not_change_with_it(disk: Disk) -> None:
    disk.append_records([vote(0)])
    image = disk.image()
    disk.append_records([vote(1)])
    assert len(image.read_restart_state().votes) == 1 and len(disk.read_restart_state().votes) == 2


def test_a_failing_disk_says_so(disk: Disk) -> None:
    disk.fails = True
    with pytest.raises(StorageError):
        disk.append_records([vote(0)])


# Plans ------------------------------------------------------------------------------------------------------------------


def test_a_seed_expands_into_the_same_numbered_faults_each_time() -> None:
    assert expand(12, 4, HONEST_MAJORITY) == expand(12, 4, HONEST_MAJORITY)
    numbers = [fault.number for fault in expand(12, 4, HONEST_MAJORITY).faults]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("n", [4, 7, 10])
def test_no_plan_has_more_faulty_peers_than_are_tolerated(n: int) -> None:
    for seed in range(300):
        plan = expand(seed, n, HONEST_MAJORITY)
        leaving = len(plan.of("leave"))
        assert n - leaving >= 2
        sick = {fault.nodes[0] for kind in ("rollback", "damage", "wrong-state") for fault in plan.of(kind)}
        assert len(plan.liars.keys() | sick) == len(plan.liars) + len(sick) <= faults_tolerated(n)
        assert len(plan.liars) <= faults_tolerated(n - leaving)


def test_no_clock_is_far_off_where_one_leaves_and_whoever_else_is_sick_is_one_too_many() -> None:
    seen = 0
    for seed in range(4_000):
        plan = expand(seed, 4, HONEST_MAJORITY)
        leavers = {fault.nodes[0] for fault in plan.of("leave")}
        sick = {fault.nodes[0] for kind in ("rollback", "damage", "wrong-state") for fault in plan.of(kind)}
        if leavers and sick - leavers:
            seen += len(plan.of("skew"))
            assert all(abs(fault.amount) <= CLOCK_AHEAD_SECONDS for fault in plan.of("skew"))
    assert seen > 10
    assert any(fault.amount == SKEW_ACCEPTED for fault in expand(17134, 4, HONEST_MAJORITY).of("skew")), "it was an hour"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("--keep 1", "name it with --seed"), ("--shrink --seeds 0:1", "name it with --seed"), ("--n 1", "1 is less")],
)
def test_what_is_about_one_history_needs_its_seed(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert words in capsys.readouterr().err


def test_only_the_faults_that_are_kept_remain() -> None:
    assert [fault.number for fault in expand(12).keep([1, 3]).faults] == [1, 3]


def test_shrinking_leaves_exactly_what_is_needed() -> None:
    assert minimal(range(40), lambda kept: {3, 17, 31} <= set(kept)) == [3, 17, 31]
    assert minimal(range(9), lambda kept: 8 in kept) == [8]
    assert minimal(range(9), lambda kept: True) == []


def test_the_generator_draws_each_kind_of_change_in_some_history() -> None:
    plans = [expand(seed, 4, HONEST_MAJORITY) for seed in range(200)]
    for kind in ("leave", "stop", "clock", "join", "rotate", "rollback", "damage", "wrong-state"):
        assert any(plan.of(kind) for plan in plans), kind
    assert any(len(plan.of("leave")) > 1 for plan in plans) and any(plan.keeps_links for plan in plans)
    assert {twins.expand(seed, 4).of("twin")[0].amount for seed in range(50)} == {1, *twins.LATER_HEIGHTS}


def test_client_runs_are_in_some_histories_and_not_in_others() -> None:
    plans = [expand(seed, 4, HONEST_MAJORITY) for seed in range(400)]
    serving = [plan for plan in plans if plan.gateways]
    assert 0.1 < len(serving) / len(plans) < 0.3 and {len(plan.gateways) for plan in serving} >= {1, 2, 3}
    assert any(plan.liars.keys() & set(plan.gateways) for plan in serving), "who lies withholds data"
    assert all(plan.gateways[-1] < plan.n for plan in serving) and any(not plan.jobs for plan in serving)


# The checker, the campaign --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checker", [invariants, progress, client_runs])
def test_what_checks_is_written_apart_from_the_code_that_it_checks(checker: ModuleType) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(checker))):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    ours = {*PACKAGES, "tests"} - {"protocol"}
    assert {name for name in imported if name.split(".")[0] in ours} <= {invariants.__name__, progress.__name__}


def test_a_report_on_an_open_loss_is_noticed_by_the_key_that_proposed() -> None:
    """A member that rotated in a round has two proposals in it, and opens both with its present key."""
    former, present, auditor = (FastSigner(name) for name in ("former", "present", "auditor"))
    keys, job = tuple(sorted(signer.public for signer in (former, present, auditor))), bytes(32)

    def seen(*said: tuple[FastSigner, int, str, object]) -> None:
        checker = invariants.Invariants(keys, bytes(32), FastVerifier(), set(keys), lambda height, block: (None, b""))
        for signer, nonce, kind, content in said:
            signed = sign_message(signer, bytes(32), Transaction(nonce, 9, kind, codec.encode(content)))
            checker._check_body(1, codec.encode(BlockBody((), (), (signed,))))

    opening = LossOpening(job, 0, former.public, bytes(32), 0)
    report = AuditFinding(job, 0, former.public, ReplayFinding.MATCH, 0)
    first = (present, 1, "audit/open-loss", opening)
    seen(first, (auditor, 1, "audit/report", replace(report, trainer=present.public)))
    seen((auditor, 1, "audit/report", report), (present, 1, "audit/open-loss", opening))
    seen(first, (present, 2, "audit/open-loss", replace(opening, trainer=present.public)))
    with pytest.raises(invariants.Violation, match="opened early"):
        seen(first, (auditor, 1, "audit/report", report))
    with pytest.raises(invariants.Violation, match="opened twice"):
        seen(first, (present, 2, "audit/open-loss", opening))


def test_a_job_that_trains_is_expected_to_close_rounds_whatever_runs_beside_it() -> None:
    keys = tuple(bytes([number]) * 32 for number in range(4))
    seen = progress.Progress(keys, bytes(32), FastVerifier(), keys, {1: keys, 2: keys})
    seen.begin(0.0, 1)
    seen.jobs = {number: progress.JobSeen(keys[0], 8, number == b"a", 0.0) for number in (b"b", b"a", b"c")}
    demands = [demand.what for demand in seen.demands(9.0, keys) if demand.rule == "rounds"]
    assert demands == [f"job {number.hex()} (round 0) closes no round" for number in (b"a", b"b")], "the third waits in line"


def test_wishes_that_retired_a_candidate_are_not_counted_again_when_it_votes() -> None:
    """A wish also ends with its author's vote, and approvals end with a leave."""
    signers = [FastSigner(f"voter {number}") for number in range(5)]
    subject, *others = signers
    without = tuple(sorted(signer.public for signer in others))
    everybody, sets, nonces = tuple(sorted((subject.public, *without))), dict[int, tuple[bytes, ...]](), Counter[bytes]()
    seen = progress.Progress(everybody, bytes(32), FastVerifier(), everybody, sets)

    def decide(height: int, voters: tuple[bytes, ...], *said: tuple[FastSigner, str, object]) -> None:
        sets[height + 1] = voters
        transactions = list[Signed]()
        for signer, kind, content in said:
            nonces[signer.public] += 1
            transactions.append(
                sign_message(signer, bytes(32), Transaction(nonces[signer.public], 99, kind, codec.encode(content)))
            )
        seen.on_block(height, codec.encode(BlockBody((), (), tuple(transactions))), 0.0)

    wish, approval = RetireMember(subject.public, True, 2**53 - 1), ApproveVoter(subject.public)
    sets[1] = everybody
    decide(1, everybody, (subject, "member/resign", ResignAsVoter()))
    decide(2, without, *((other, "member/approve", approval) for other in others[:2]))
    decide(3, without, *((other, "member/retire", wish) for other in others[:3]))
    decide(4, without, *((other, "member/approve", approval) for other in others[1:3]))
    assert subject.public not in seen.coming, "approvals of before its retirement do not count"
    decide(5, without, (others[3], "member/approve", approval))
    assert subject.public in seen.coming and subject.public not in seen.going
    decide(6, everybody, (others[3], "member/retire", wish))
    assert subject.public not in seen.going, "one wish of five"
    decide(7, everybody, *((other, "member/retire", wish) for other in others[:2]))
    decide(8, tuple(key for key in everybody if key != others[0].public))
    assert subject.public not in seen.going, "one of the three votes no more"
    decide(9, everybody, (others[0], "member/retire", wish), (others[2], "member/retire", wish))
    assert subject.public in seen.going


@pytest.mark.real("processes")
def test_an_interrupted_campaign_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    ran: list[int] = []

    def quick(task: tuple[str, int, int | None]) -> campaign.Result:
        ran.append(task[1])
        return campaign.Result(task[1], 4, None, "", 50, 10, 1.0, 0.1, "", {"crash": 2})

    monkeypatch.setattr(campaign, "_work", quick)
    assert main(["--seeds", "0:3", "--json", str(path)]) == 0
    assert main(["--seeds", "0:5", "--json", str(path), "--resume"]) == 0
    tally = json.loads(path.read_text())
    assert ran == [0, 1, 2, 3, 4]
    assert (tally["passed"], tally["failed"], tally["blocks"], tally["faults"]) == (5, 0, 250, {"crash": 10})
    assert tally["commit"] and tally["command"]


@pytest.mark.real("processes")
def test_a_failing_seed_prints_the_command_that_runs_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        campaign, "_work", lambda task: campaign.Result(task[1], 4, "agreement", "agreement: two", 3, 1, 1.0, 0.1, "", {})
    )
    assert main(["--seeds", "7:8", "--n", "4"]) == 1
    printed = capsys.readouterr().out
    assert "python -m tests.sim --n 4 --seed 7" in printed and "0 passed, 1 failed" in printed


@pytest.mark.real("processes")
def test_a_campaign_says_what_its_histories_had_in_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"liar": 1, "skew": 1, "crash": 2, "restored": 3, "transfer": 4, "justified": 5, "unseen": 1, "dropped garbage": 9}
    result = campaign.Result(0, 4, None, "", 50, 10, 1.0, 0.1, "", counts, {"fork": 1})
    monkeypatch.setattr(campaign, "_work", lambda task: replace(result, seed=task[1]))
    assert main(["--seeds", "0:2", "--json", str(tmp_path / "figures.json")]) == 0
    printed = capsys.readouterr().out.splitlines()
    expected = "1 kinds of liars: fork 2; faults: crash 4, skew 2; snapshots restored: 6; prepares in later views: "
    assert expected + "10 with a reason that was checked, 2 of leaders that sent none" in printed
    tally = json.loads((tmp_path / "figures.json").read_text())
    assert tally["liars"] == {"fork": 2} and tally["faults"]["skew"] == 2


def test_a_wrong_clock_is_counted() -> None:
    assert Simulation(replace(calm(liars=()), faults=(Fault(0, "skew", 0.0, 1.0, (1,), 0.5),))).counts == {"skew": 1}


@pytest.mark.parametrize(
    ("words", "says"),
    [(("--seeds", "3:3"), "'3:3' is empty: LAST is excluded, 3:4 is one history"), (("--jobs", "0"), "0 is less than 1")],
)
def test_a_campaign_of_nothing_is_refused_in_one_line(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.real("processes")
def test_a_reader_that_has_read_enough_ends_a_history_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tests.sim", "--seed", "5", "--keep", ","]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


# Heartbeats -----------------------------------------------------------------------------------------------------------


LINKS = heartbeats.LINKS | {"worse": replace(heartbeats.LINKS["clean, 300 ms"], lost_pings=0.4)}


@pytest.mark.virtual
@pytest.mark.parametrize("links", LINKS)
def test_a_silent_peer_is_suspected_in_time_and_nobody_else(links: str) -> None:
    outcome = heartbeats.one(0, 3, LINKS[links], seconds=300.0)
    assert outcome.holds, outcome


@pytest.mark.virtual
def test_with_three_pings_alone_lost_ones_look_like_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: no further pings after an overdue answer, and no history."""
    monkeypatch.setattr(failure_detector.LinkFailureDetector, "next_ping_at", lambda silence, now, due: due)
    monkeypatch.setattr(failure_detector, "SILENCES_MIN", failure_detector.SILENCES_KEPT + 1)
    assert heartbeats.one(0, 3, LINKS["worse"], seconds=300.0).falsely > 0
