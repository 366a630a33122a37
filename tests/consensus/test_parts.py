"""Voter sets, certificates, blocks, leaders, evidence and the executor, each alone."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consensus.block import (
    Block,
    assemble_block,
    block_digest,
    decode_block,
    decode_header,
    encode_block,
    encode_header,
    header_digest,
    make_header,
)
from consensus.effects import (
    OwnStatement,
    SendDecisions,
    SendMessage,
    StepEffects,
    execute_effects_in_thread,
    merge_effects,
    persist_effects,
    send_messages,
)
from consensus.evidence import Evidence, verify_evidence
from consensus.pbft.pacemaker import REPEAT_SECONDS_MAX, TAIL_FACTOR, VIEW_SECONDS_MAX, VIEW_SECONDS_MIN, Pacemaker
from consensus.voter_set import VoterSet, verify_certificate
from protocol.errors import RemoteProtocolError
from protocol.identity import CachingVerifier, Signed
from protocol.messages import Ballot, Certificate, Commit, CutOff, Judgement, Prepare, Proposal, Status, Vouch
from protocol.verdicts import Verdict
from tests.consensus.bench import CHAIN_ID, Bench
from tests.consensus.journal import MemoryJournal
from tests.sim.keys import FastVerifier

KEYS = tuple(bytes([i]) * 32 for i in range(1, 11))


def block(height: int, failed: dict[bytes, int] | None = None, signers: tuple[bytes, ...] = KEYS) -> Block:
    certificate = Certificate(b"vote", {key: bytes(64) for key in sorted(signers)})
    return Block(height, bytes(32), height, KEYS[0], bytes(32), bytes(32), bytes(32), certificate, failed or {}, b"body")


# Voters and certificates ---------------------------------------------------------------------------------------------


def test_the_hash_of_a_voter_set_does_not_depend_on_the_order_of_its_keys() -> None:
    assert VoterSet.from_keys(KEYS).hash == VoterSet.from_keys(reversed(KEYS)).hash != VoterSet.from_keys(KEYS[1:]).hash


def test_each_good_signature_is_verified_once_and_a_bad_one_each_time() -> None:
    calls = []

    class Counting(FastVerifier):
        def verify(self, public: bytes, data: bytes, signature: bytes) -> bool:
            calls.append(public)
            return super().verify(public, data, signature)

    bench, verifier = Bench(), CachingVerifier(Counting())
    certificate = bench.certificate(Commit, bench.block(0), 0, (0, 1, 2))
    for _ in range(3):
        verify_certificate(certificate, Commit, bench.voters, CHAIN_ID, verifier)
    assert len(calls) == 3
    for _ in range(2):
        assert not verifier.verify(KEYS[0], b"data", bytes(64))
    assert len(calls) == 5


def test_a_good_signature_is_good_under_what_was_signed_alone() -> None:
    bench, verifier = Bench(), CachingVerifier(FastVerifier())
    signature, key = bench.signers[0].sign(b"data"), bench.signers[0].public
    other = next(signer.public for signer in bench.signers if signer.public != key)
    assert verifier.verify(key, b"data", signature)
    assert not verifier.verify(key, b"other data", signature) and not verifier.verify(other, b"data", signature)


@pytest.mark.parametrize("signers", [(0, 1), (0, 1, 2)])
def test_a_certificate_needs_its_kind_its_chain_and_a_quorum(signers: tuple[int, ...]) -> None:
    bench = Bench()
    certificate = bench.certificate(Commit, bench.block(0), 0, signers)
    with pytest.raises(RemoteProtocolError):
        verify_certificate(certificate, Prepare, bench.voters, CHAIN_ID, FastVerifier())
    with pytest.raises(RemoteProtocolError):
        verify_certificate(certificate, Commit, bench.voters, bytes(32), FastVerifier())
    if len(signers) < 3:
        with pytest.raises(RemoteProtocolError, match="no-quorum"):
            verify_certificate(certificate, Commit, bench.voters, CHAIN_ID, FastVerifier())


# Blocks --------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=64), st.dictionaries(st.binary(min_size=32, max_size=32), st.integers(0, 2**53 - 1), max_size=4))
def test_a_block_survives_its_bytes(body: bytes, failed: dict[bytes, int]) -> None:
    original = dataclasses.replace(block(3, failed), body=body)
    assert decode_block(encode_block(original)) == original


@given(st.integers(0, 7), st.data())
def test_a_flipped_bit_changes_the_digest_or_is_refused(bit: int, data: st.DataObject) -> None:
    original = encode_block(block(3))
    at = data.draw(st.integers(0, len(original) - 1))
    flipped = original[:at] + bytes([original[at] ^ (1 << bit)]) + original[at + 1 :]
    try:
        assert block_digest(flipped) != block_digest(original)
    except RemoteProtocolError:
        return


@given(st.binary(max_size=64))
def test_a_header_has_the_digest_of_its_block_and_only_its_body_makes_the_block_again(body: bytes) -> None:
    original = dataclasses.replace(block(3), body=body)
    header = make_header(original)
    assert header_digest(encode_header(header)) == block_digest(encode_block(original))
    assert decode_header(encode_header(header)) == header
    assert assemble_block(header, body) == encode_block(original)
    with pytest.raises(RemoteProtocolError, match="wrong-block"):
        assemble_block(header, body + b"x")


# Pacemaker -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pacemaker() -> Pacemaker:
    return Pacemaker()


def test_who_waits_for_nothing_itself_says_things_again_only_now_and_then(pacemaker: Pacemaker) -> None:
    pacemaker.set_repeat_timer(True, 10.0)
    assert pacemaker.repeat_deadline() == 10.0 + REPEAT_SECONDS_MAX
    pacemaker.set_view_timer(True, 10.0)
    assert pacemaker.repeat_deadline() == 10.0 + VIEW_SECONDS_MIN


def test_view_timers_grow_up_to_the_cap_and_follow_slow_decisions(pacemaker: Pacemaker) -> None:
    assert pacemaker.view_seconds() == VIEW_SECONDS_MIN
    pacemaker.enter_view(2)
    assert pacemaker.view_seconds() == pytest.approx(2.25 * VIEW_SECONDS_MIN)
    pacemaker.enter_view(10_000)
    assert pacemaker.view_seconds() == VIEW_SECONDS_MAX
    pacemaker.enter_view(0)
    pacemaker.set_view_timer(True, 100.0)
    pacemaker.record_decision(b"a" * 32, VoterSet.from_keys([b"a" * 32]), 102.0)
    assert pacemaker.view_seconds() == pytest.approx(6.0)


def test_leaders_that_are_slow_on_purpose_do_not_make_the_views_longer() -> None:
    voters = VoterSet.from_keys(bytes([number]) * 32 for number in range(7))

    def after(slow: int) -> float:
        pacemaker = Pacemaker()
        for height in range(100):
            pacemaker.enter_view(0)
            pacemaker.set_view_timer(True, 0.0)
            leader = height % 7
            pacemaker.record_decision(voters.keys[leader], voters, 0.99 * pacemaker.view_seconds() if leader < slow else 0.1)
        return pacemaker.view_seconds()

    assert after(voters.faults_tolerated) == VIEW_SECONDS_MIN
    assert after(voters.faults_tolerated + 1) == VIEW_SECONDS_MAX, "more than can lie: they are just slow"


def test_a_leader_that_no_longer_votes_is_no_longer_measured(pacemaker: Pacemaker) -> None:
    keys = [bytes([number]) * 32 for number in range(3)]
    for key, seconds in zip(keys, (5.0, 2.0, 0.1), strict=True):
        pacemaker.enter_view(0)
        pacemaker.set_view_timer(True, 0.0)
        pacemaker.record_decision(key, VoterSet.from_keys(keys), seconds)
    assert pacemaker.view_seconds() == 15.0
    pacemaker.record_decision(keys[1], VoterSet.from_keys(keys[1:]), 0.0)
    assert pacemaker.view_seconds() == 6.0


def test_while_no_more_leaders_are_known_than_may_lie_the_fastest_decision_sets_the_timer() -> None:
    voters = VoterSet.from_keys(bytes([number]) * 32 for number in range(7))
    pacemaker, timers = Pacemaker(), []
    for height in range(12):
        pacemaker.enter_view(0)
        pacemaker.set_view_timer(True, 0.0)
        pacemaker.record_decision(voters.keys[height % 2], voters, 0.95 * pacemaker.view_seconds())
        timers.append(pacemaker.view_seconds())
    assert timers == [pytest.approx(TAIL_FACTOR * 0.95 * VIEW_SECONDS_MIN)] * 12, "two liars of seven led alone"


def test_a_network_of_slow_decisions_has_its_timer_after_the_first_one(pacemaker: Pacemaker) -> None:
    pacemaker.enter_view(4)
    pacemaker.set_view_timer(True, 0.0)
    pacemaker.record_decision(KEYS[0], VoterSet.from_keys(KEYS), 5.0)
    pacemaker.enter_view(0)
    assert pacemaker.view_seconds() == TAIL_FACTOR * 5.0


def test_a_leader_whose_link_broke_is_waited_for_less_long_but_longer_with_every_view(pacemaker: Pacemaker) -> None:
    pacemaker.set_view_timer(True, 100.0)
    assert pacemaker.view_deadline(90.0) == 100.0, "it was gone long before the work turned up"
    assert pacemaker.view_deadline(99.9) == pytest.approx(100.15), "it has not been gone for long"
    assert pacemaker.view_deadline(100.5) == pytest.approx(100.75), "a link that flaps has time to come back"
    assert pacemaker.view_deadline(100.9) == 101.0, "never longer than a silent leader"
    pacemaker.enter_view(4)
    pacemaker.set_view_timer(True, 200.0)
    assert pacemaker.view_deadline(90.0) == pytest.approx(200 + 0.25 * (1.5**4 - 1))
    assert pacemaker.view_deadline(200.5) == pytest.approx(200.5 + 0.25 * 1.5**4)


def test_a_timer_starts_with_the_work_and_stops_with_it(pacemaker: Pacemaker) -> None:
    pacemaker.set_view_timer(True, 100.0)
    pacemaker.set_view_timer(True, 100.5)
    assert pacemaker.view_deadline(None) == 101.0
    pacemaker.set_view_timer(False, 100.6)
    assert pacemaker.view_deadline(None) is None


# Evidence ------------------------------------------------------------------------------------------------------------


def test_evidence_names_its_culprit_and_anything_else_is_refused() -> None:
    bench = Bench()
    one, two = bench.block(0), bench.block(0, b"\x91\x02")
    proof = Evidence(bench.prepare(1, one).vote, bench.prepare(1, two).vote)
    assert verify_evidence(proof, CHAIN_ID, FastVerifier()) == bench.signers[1].public
    harmless = [
        Evidence(bench.prepare(1, one).vote, bench.prepare(1, one).vote),
        Evidence(bench.prepare(1, one).vote, bench.prepare(2, two).vote),
        Evidence(bench.prepare(1, one, 0).vote, bench.prepare(1, two, 1).vote),
        Evidence(bench.prepare(1, one).vote, bench.commit(1, two).vote),
        Evidence(bench.commit(1, one, 1).vote, bench.timed_out(1, 1, None, (1, one)).timeout),
        Evidence(bench.commit(1, one, 1).vote, bench.timed_out(1, 0).timeout),
    ]
    for evidence in harmless:
        proves_nothing(evidence)


def proves_nothing(evidence: Evidence) -> None:
    with pytest.raises(RemoteProtocolError, match="no-evidence"):
        verify_evidence(evidence, CHAIN_ID, FastVerifier())


@pytest.mark.parametrize("kind", [Proposal, Ballot, Vouch, CutOff])
def test_whoever_says_two_things_of_one_kind_in_one_round_lies_and_nobody_else(kind: type) -> None:
    bench = Bench()

    def said(number: int = 3, variant: int = 0, job: bytes = bytes(32), of: type = kind) -> Signed:
        digest = bytes([variant]) * 32
        kinds = (
            Proposal(job, number, bytes(32), digest, 1, bytes(32), None),
            Ballot(job, number, digest, ()),
            Vouch(job, number, (Judgement(bytes(32), digest, Verdict.ACCEPT),)),
            CutOff(job, number, (digest,)),
        )
        return bench.sign(1, next(statement for statement in kinds if isinstance(statement, of)))

    first = said()
    assert verify_evidence(Evidence(first, said(variant=1)), CHAIN_ID, FastVerifier()) == bench.signers[1].public
    proves_nothing(Evidence(first, first))
    proves_nothing(Evidence(first, said(number=4, variant=1)))
    proves_nothing(Evidence(first, said(variant=1, job=bytes([1]) * 32)))
    proves_nothing(Evidence(first, said(variant=1, of=CutOff if kind is Ballot else Ballot)))


# Executor ------------------------------------------------------------------------------------------------------------


class Order(MemoryJournal):
    """An outlet and store that record the order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def append_records(self, records: object) -> None:
        self.log.append("append")

    def send(self, to: tuple[bytes, ...], message: object) -> None:
        self.log.append("send")


def a_turn() -> StepEffects:
    vote = Bench().prepare(0, Bench().block(0)).vote
    return StepEffects(
        (OwnStatement(("prepare", 1, 0), vote),), (SendMessage((KEYS[0],), Status(1, 0)), SendDecisions(KEYS[0], 1, 9)), 7.0
    )


def test_everything_is_durable_before_anything_is_sent() -> None:
    order = Order()
    send_messages(persist_effects(a_turn(), order), order)
    assert order.log == ["append", "send"]


async def test_the_twin_for_threads_does_the_same() -> None:
    order = Order()

    async def run_in_thread(function: object, *arguments: object) -> object:
        return function(*arguments)  # type: ignore[operator]

    await execute_effects_in_thread(a_turn(), order, order, run_in_thread)
    assert order.log == ["append", "send"]


async def test_a_turn_that_needs_no_disk_needs_no_thread() -> None:
    order = Order()

    async def run_in_thread(function: object, *arguments: object) -> object:
        order.log.append("thread")
        return function(*arguments)  # type: ignore[operator]

    await execute_effects_in_thread(StepEffects(sends=(SendMessage((KEYS[0],), Status(1, 0)),)), order, order, run_in_thread)
    assert order.log == ["send"]
    await execute_effects_in_thread(StepEffects(sends=(SendDecisions(KEYS[0], 1, 9),)), order, order, run_in_thread)
    assert order.log == ["send", "thread"], "decisions are read from the disk"


def test_nothing_is_sent_when_the_journal_fails() -> None:
    class Full(Order):
        def append_records(self, records: object) -> None:
            raise OSError("disk full")

    order = Full()
    with pytest.raises(OSError, match="disk full"):
        send_messages(persist_effects(a_turn(), order), order)
    assert order.log == []


def test_merged_turns_keep_their_order_and_the_last_deadline() -> None:
    merged = merge_effects([a_turn(), StepEffects()], 9.0)
    assert len(merged.records) == 1 and len(merged.sends) == 2 and merged.deadline == 9.0
