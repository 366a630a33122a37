"""What people are told, once each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from consensus.effects import StoredBlock
from consensus.evidence import Evidence
from ledger.members import Member
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.telemetry.node_observer import NodeObserver, fork_text, why_halted, why_waiting
from protocol.identity import short_id, sign_message
from protocol.messages import Ballot, Commit, CutOff, Judgement, Proposal, Timeout, Vouch
from protocol.verdicts import Verdict
from rounds.round_state import RoundResult
from tests.sim.keys import FastSigner
from training.job_spec import AuditMode, JobSpec

LIAR, CHAIN, OTHER = FastSigner("liar"), bytes(32), b"o" * 32


@pytest.fixture
def log() -> EventLog:
    return EventLog()


async def lines(log: EventLog) -> list[str]:
    return [event.text for event in await log.wait_for_events(0, 0.0)]


@pytest.fixture
def witness(log: EventLog) -> NodeObserver:
    return NodeObserver(log, lambda: 0.0)


async def test_silence_is_told_once_with_its_end_and_its_likely_cause(log: EventLog, witness: NodeObserver) -> None:
    for height, below in ((5, 0), (5, 7), (6, 7), (7, 7)):
        witness.report_vote_lockout(height, below)
    (line,) = await lines(log)
    assert line == "silent until height 7: signatures of ours are missing from this disk (was it restored from a backup?)"


async def test_a_round_of_which_something_was_forgotten_is_told_once(log: EventLog, witness: NodeObserver) -> None:
    for rounds in ((), ((CHAIN, 3),), ((CHAIN, 3),), ()):
        witness.report_muted_rounds(frozenset(rounds))
    (line,) = await lines(log)
    assert line == "saying nothing more in round 4: a message of ours in it is missing from this disk"


@pytest.mark.parametrize(
    ("audit", "liars", "told"),
    [
        (AuditMode.SAMPLED, 1, ["audit=sampled needs a steady uplink of "]),
        (AuditMode.SAMPLED, 0, ["audit=sampled needs a steady uplink of ", "audits are sampled and byzantine_max=0: nobody is "]),
        (AuditMode.OFF, 0, ["audits are off and byzantine_max=0: nobody is assumed to"]),
        (AuditMode.OFF, 1, []),
        (AuditMode.FULL, 0, []),
    ],
)
async def test_every_peer_is_told_the_limits_of_a_job_that_starts(
    log: EventLog, audit: AuditMode, liars: int, told: list[str]
) -> None:
    spec = JobSpec(name="text", data=bytes(32), audit=audit, byzantine_max=liars)
    job = SimpleNamespace(name=spec.name, author=LIAR.public, spec=spec.encode())
    NodeObserver(log, lambda: 0.0).report_started_job(CHAIN, SimpleNamespace(jobs=SimpleNamespace(jobs={CHAIN: job})))
    found = await lines(log)
    assert [line.startswith(f"job text: {start}") for line, start in zip(found, told, strict=True)] == [True] * len(told)


async def test_each_message_of_a_round_is_told_in_words(log: EventLog) -> None:
    witness, trainers = NodeObserver(log, lambda: 0.0), sorted(FastSigner(f"trainer {number}").public for number in range(3))
    judgements = tuple(map(Judgement, trainers, [CHAIN] * 3, (Verdict.ACCEPT, Verdict.REPLAY, Verdict.UNJUDGED)))
    messages = (
        Proposal(CHAIN, 2, CHAIN, CHAIN, 1, CHAIN, None),
        Vouch(CHAIN, 2, judgements),
        Ballot(CHAIN, 2, CHAIN, judgements),
        CutOff(CHAIN, 2, ()),
    )
    for message in messages:
        witness.report_round_message(LIAR.public, message)
    one, other, third = map(short_id, trainers)
    said = [
        "proposes",
        f"vouches for {one}, rejects {other} (replay), is unsure of {third}",
        f"votes {one}: accept, {other}: replay, {third}: unjudged",
        "wants to close",
    ]
    assert await lines(log) == [f"round 3: {short_id(LIAR.public)} {words}" for words in said]
    assert [event.kind for event in await log.wait_for_events(0, 0.0)] == ["proposal", "vouch", "ballot", "cut-off"]


async def test_an_expulsion_names_what_was_signed(log: EventLog, witness: NodeObserver) -> None:
    proposals = [Proposal(CHAIN, 0, CHAIN, bytes([n]) * 32, 1, CHAIN, None) for n in range(2)]
    given_up = (Commit(CHAIN, 1, 0, CHAIN), Timeout(CHAIN, 1, 0, -1, None))
    for first, second in (proposals, given_up):
        witness.report_expulsion(Evidence(sign_message(LIAR, CHAIN, first), sign_message(LIAR, CHAIN, second)))
    name = short_id(LIAR.public)
    assert await lines(log) == [
        f"{name} was expelled: it signed two different proposals",
        f"{name} was expelled: it signed a commit and a timeout that exclude each other",
    ]


async def test_a_dispute_about_the_state_is_told_once_and_again_when_it_grows(log: EventLog, witness: NodeObserver) -> None:
    for text in (None, "2 of 4 differ", "2 of 4 differ", "3 of 4 differ", None):
        witness.report_state_root_split(text)
    assert [line.split(";")[0] for line in await lines(log)] == ["2 of 4 differ", "3 of 4 differ"]
    assert all("When peers do not hold the same state" in line for line in await lines(log)), "and what to do"


async def test_another_history_is_told_once_and_is_no_halt(log: EventLog, witness: NodeObserver) -> None:
    for rivalry in (None, "block 12 is certified", "block 12 is certified"):
        witness.report_fork(fork_text(SimpleNamespace(fork_proof=rivalry)))
    (line,) = await lines(log)
    assert line.startswith("DISPUTED: block 12 is certified; compare the blocks ")


def test_the_state_that_people_see_names_the_gravest_reason() -> None:
    fine = {
        "height": 9,
        "divergence": None,
        "state_root_split": None,
        "no_votes_below": 7,
        "duplicate_identity_reason": None,
        "is_outdated": False,
    }
    assert why_halted(SimpleNamespace(**fine), None) == ""
    assert why_halted(SimpleNamespace(**fine | {"no_votes_below": 10}), None).startswith("silent until height 10")
    disputed = SimpleNamespace(**fine | {"no_votes_below": 10, "state_root_split": "2 of 4 differ"})
    assert why_halted(disputed, None).startswith("HALTED: 2 of 4 differ; ")
    diverged = SimpleNamespace(**vars(disputed) | {"divergence": "height 8 was decided otherwise"})
    assert why_halted(diverged, None) == "HALTED: height 8 was decided otherwise; the certified state is being restored"
    expelled = Member("ben", (), 0, None, 3, expelled=6)
    assert why_halted(diverged, expelled).startswith("EXPELLED at height 6: ")
    assert why_halted(SimpleNamespace(**fine), None, "it was used") == "not a member: it was used"
    assert why_halted(SimpleNamespace(**fine), replace(expelled, expelled=None), "it was used") == ""


@pytest.mark.parametrize(
    ("links", "may_speak", "words"),
    [
        (0, False, "waiting for a quorum: 1 of 4 voters are here, 3 are needed"),
        (1, True, "waiting for a quorum: 2 of 4 voters are here, 3 are needed"),
        (2, False, "waiting for a quorum: 3 voters must first say what they heard this peer sign"),
        (2, True, ""),
    ],
)
def test_a_voter_without_a_quorum_or_its_answers_says_so(links: int, may_speak: bool, words: str) -> None:
    keys = sorted(FastSigner(f"voter {number}").public for number in range(4))
    state = SimpleNamespace(height=4, members=SimpleNamespace(voters=tuple(keys)))
    replica = SimpleNamespace(
        is_voter=True,
        height=5,
        divergence=None,
        state_root_split=None,
        no_votes_below=0,
        duplicate_identity_reason=None,
        is_outdated=False,
    )
    node = SimpleNamespace(me=keys[0], state=state, replica=replica, may_sign_round_messages=may_speak)
    assert why_waiting(node, {LIAR.public, *keys[1 : 1 + links]}) == words
    state.height = 1
    assert words.endswith("are here") or why_waiting(node, set(keys)) == "", "it applies blocks"
    state.height, replica.no_votes_below = 4, 6
    assert words.endswith("are here") or why_waiting(node, set(keys)) == "", "it is silent for another reason"


async def test_what_was_only_replayed_has_no_times_and_what_was_not_judged_is_not_rejected(log: EventLog) -> None:
    now = iter(float(second) for second in range(100))
    witness = NodeObserver(log, lambda: next(now))
    refused = {LIAR.public: Verdict.UNJUDGED, CHAIN: Verdict.NORM, OTHER: Verdict.NORM}
    outcome = RoundResult({}, refused, frozenset(), frozenset(), {}, frozenset(), frozenset(), diverging=frozenset({CHAIN}))
    closed = SimpleNamespace(outcome=outcome, job=CHAIN, round=3)
    jobs = SimpleNamespace(jobs={CHAIN: SimpleNamespace(model_root=CHAIN)})
    certificate = SimpleNamespace(signatures={})
    for height, records in ((5, ()), (6, (StoredBlock(6, CHAIN, b""),))):
        decided = SimpleNamespace(height=height, certificate=certificate, decode=lambda: SimpleNamespace(time_ms=0))
        witness.record_step(SimpleNamespace(records=records, decided_blocks=(decided,)))
    replayed, lived = (witness.record_closed_round(closed, SimpleNamespace(height=height, jobs=jobs), 0.0) for height in (5, 6))
    assert replayed == {} and lived.keys() == {"decision_ms", "seconds"}
    told = f"round 4: unjudged {short_id(LIAR.public)}, diverging {short_id(CHAIN)}, rejected {short_id(OTHER)} (norm)"
    assert told in await lines(log)
