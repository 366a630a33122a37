"""A trainer whose updates come too late, round after round, learns it, with the reason and what helps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer.driver.eventlog import EventLog
from peer.driver.lateness import LATE_ROUNDS_MIN, LATE_SECONDS_MIN, Lateness
from peer.driver.witness import Witness
from peer.node.node import RoundClosed
from protocol.verdicts import Verdict
from rounds.round_state import RoundResult
from tests.peer.network import network, one_root, poll
from tests.sim.keys import FastSigner

ME, OTHER, JOB = FastSigner("me").public, FastSigner("other").public, bytes(32)
NO_VOUCHES: Any = ({}, frozenset(), frozenset())
ABSENT = RoundResult({OTHER: bytes(32)}, {}, frozenset({ME}), frozenset(), *NO_VOUCHES)
ACCEPTED = RoundResult({ME: bytes(32)}, {}, frozenset({OTHER}), frozenset(), *NO_VOUCHES)
UNJUDGED = RoundResult(
    {}, {ME: Verdict.UNJUDGED}, frozenset(), frozenset({ME}), *NO_VOUCHES
)  # the voters were late, not this trainer
ELSEWHERE = RoundResult({OTHER: bytes(32)}, {}, frozenset(), frozenset(), *NO_VOUCHES)  # it did not train in this round


def after(*proposed: bool, seconds: float = 20.0) -> Lateness:
    """After so many rounds that were closed without its update, whether or not it had said it by then."""
    late = Lateness()
    for said in proposed:
        late.follow(ABSENT, ME, said, seconds)
    return late


def test_a_few_rounds_or_seconds_say_nothing() -> None:
    assert after(*[False] * (LATE_ROUNDS_MIN - 1)).why("text") == ""
    assert after(*[False] * 9, seconds=LATE_SECONDS_MIN / 10).why("text") == "", "a worker that has just been started"
    assert after(*[False] * LATE_ROUNDS_MIN).why("text") != ""


def test_who_is_absent_nearly_always_is_late_although_it_comes_in_time_now_and_then() -> None:
    late = Lateness()
    told = []
    for number in range(40):
        outcome = ACCEPTED if number in (0, 1, 32) else ABSENT
        if late.follow(outcome, ME, False, 1.5):
            told.append(number)
        assert bool(late.why("text")) == (number >= 21), "after half a minute, and from then on"
    assert told == [21], "and not again when it was in time once"


@pytest.mark.parametrize("outcome", [ACCEPTED, UNJUDGED])
def test_who_comes_in_time_in_half_of_the_rounds_is_not_late(outcome: RoundResult) -> None:
    late = after(*[False] * LATE_ROUNDS_MIN)
    for _ in range(LATE_ROUNDS_MIN - 1):
        late.follow(outcome, ME, True, 20.0)
    assert late.why("text") != "", "it was late in most of the last rounds"
    late.follow(outcome, ME, True, 20.0)
    assert late.why("text") == ""


def test_rounds_in_which_it_does_not_train_count_for_nothing() -> None:
    late = after(*[False] * LATE_ROUNDS_MIN)
    for _ in range(100):
        assert not late.follow(ELSEWHERE, ME, True, 20.0)
    assert "in 3 of the last 3 rounds" in late.why("text")


def test_what_was_late_long_ago_is_forgotten() -> None:
    late = after(*[False] * 100, seconds=1.0)
    assert "in 60 of the last 60 rounds" in late.why("text")
    assert not any(late.follow(ACCEPTED, ME, True, 1.0) for _ in range(60))
    assert not any(late.follow(ABSENT, ME, True, 1.0) for _ in range(30)) and late.why("text") == ""
    assert late.follow(ABSENT, ME, True, 1.0), "late again, told again"


def test_who_computes_too_slowly_is_told_of_threads_and_steps() -> None:
    why = after(False, False, True).why("text")
    assert "missing in 3 of the last 3 rounds of 'text'" in why and "closes after 20.0 s, before they are computed" in why
    assert "`threads`" in why and "`local_steps`" in why and "`proposal_seconds`" in why and "link" not in why


def test_who_proposes_and_is_not_heard_is_told_of_its_link() -> None:
    why = after(True, False, True).why("text")
    assert "link is too slow, or cut" in why and "more `local_steps`" in why and "`proposal_seconds`" in why


def test_it_is_told_ever_more_rarely() -> None:
    late = Lateness()
    assert [number for number in range(1, 100) if late.follow(ABSENT, ME, False, 20.0)] == [3, 6, 12, 24, 48, 96]


async def test_the_log_says_it_once_in_a_while_and_the_status_as_long_as_it_lasts() -> None:
    now = 0.0
    witness = Witness(EventLog(), lambda: now)
    running = {JOB: SimpleNamespace(name="text")}
    state: Any = SimpleNamespace(jobs=SimpleNamespace(running=lambda: running))
    for number in range(5):
        assert bool(witness.why_late(running)) == (number >= 3)
        opened, now = now, now + 20.0
        closed: Any = SimpleNamespace(job=JOB, round=number, outcome=ABSENT)
        witness.took_part(closed, state, ME, RoundClosed((JOB, number), opened, False))
    (event,) = await witness.events.after(0, 0.0)
    assert event.kind == "warning" and event.fields["round"] == "2" and "last 3 rounds" in event.text
    assert "last 5 rounds" in witness.why_late(running)
    assert witness.why_late({}) == "", "the job has ended"
    for number in range(5, 9):
        closed = SimpleNamespace(job=JOB, round=number, outcome=ACCEPTED)
        witness.took_part(closed, state, ME, RoundClosed((JOB, number), now - 20.0, True))
    assert witness.why_late(running) == ""


async def test_a_peer_looks_at_every_round_that_closes_and_knows_whether_it_proposed_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[bytes, bool] = {}

    def took_part(witness: Witness, closed: Any, state: Any, me: bytes, round: RoundClosed) -> None:
        seen[me] = round.proposed

    monkeypatch.setattr(Witness, "took_part", took_part)
    async with network(tmp_path, founders=2) as made:
        await one_root(made.seats, await made.seats[0].scratch())
        await poll(lambda: len(seen) == 2)
    assert seen == {made.seats[0].public: True, made.seats[1].public: False}
