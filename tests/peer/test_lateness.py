"""A trainer whose updates come too late, round after round, learns it, with the reason and what helps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer.node.node import RoundEnded
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.telemetry.node_observer import NodeObserver
from peer.runtime.telemetry.straggler import LATE_ROUNDS_MIN, LATE_SECONDS_MIN, StragglerDetector
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


def after(*proposed: bool, seconds: float = 20.0) -> StragglerDetector:
    """After so many rounds that were closed without its update, whether or not it had said it by then."""
    late = StragglerDetector()
    for said in proposed:
        late.record_round(ABSENT, ME, said, seconds)
    return late


def test_a_few_rounds_or_seconds_say_nothing() -> None:
    assert after(*[False] * (LATE_ROUNDS_MIN - 1)).describe_cause("text") == ""
    assert after(*[False] * 9, seconds=LATE_SECONDS_MIN / 10).describe_cause("text") == "", "a worker that has just been started"
    assert after(*[False] * LATE_ROUNDS_MIN).describe_cause("text") != ""


def test_who_is_absent_nearly_always_is_late_although_it_comes_in_time_now_and_then() -> None:
    late = StragglerDetector()
    told = []
    for number in range(40):
        if late.record_round(ACCEPTED if number in (0, 1, 32) else ABSENT, ME, False, 1.5):
            told.append(number)
        assert bool(late.describe_cause("text")) == (number >= 21), "after half a minute, and from then on"
    assert told == [21], "and not again when it was in time once"


@pytest.mark.parametrize("outcome", [ACCEPTED, UNJUDGED])
def test_who_comes_in_time_in_half_of_the_rounds_is_not_late(outcome: RoundResult) -> None:
    late = after(*[False] * LATE_ROUNDS_MIN)
    for _ in range(LATE_ROUNDS_MIN - 1):
        late.record_round(outcome, ME, True, 20.0)
    assert late.describe_cause("text") != "", "it was late in most of the last rounds"
    late.record_round(outcome, ME, True, 20.0)
    assert late.describe_cause("text") == ""


def test_rounds_in_which_it_does_not_train_count_for_nothing() -> None:
    late = after(*[False] * LATE_ROUNDS_MIN)
    for _ in range(100):
        assert not late.record_round(ELSEWHERE, ME, True, 20.0)
    assert "in 3 of the last 3 rounds" in late.describe_cause("text")


def test_what_was_late_long_ago_is_forgotten() -> None:
    late = after(*[False] * 100, seconds=1.0)
    assert "in 60 of the last 60 rounds" in late.describe_cause("text")
    assert not any(late.record_round(ACCEPTED, ME, True, 1.0) for _ in range(60))
    assert not any(late.record_round(ABSENT, ME, True, 1.0) for _ in range(30)) and late.describe_cause("text") == ""
    assert late.record_round(ABSENT, ME, True, 1.0), "late again, told again"


def test_who_computes_too_slowly_is_told_of_threads_and_steps() -> None:
    why = after(False, False, True).describe_cause("text")
    assert "missing in 3 of the last 3 rounds of 'text'" in why and "closes after 20.0 s, before they are computed" in why
    assert "`threads`" in why and "`local_steps`" in why and "`proposal_seconds`" in why and "link" not in why


def test_who_proposes_and_is_not_heard_is_told_of_its_link() -> None:
    why = after(True, False, True).describe_cause("text")
    assert "link is too slow, or cut" in why and "more `local_steps`" in why and "`proposal_seconds`" in why


def test_it_is_told_ever_more_rarely() -> None:
    late = StragglerDetector()
    assert [number for number in range(1, 100) if late.record_round(ABSENT, ME, False, 20.0)] == [3, 6, 12, 24, 48, 96]


async def test_the_log_says_it_once_in_a_while_and_the_status_as_long_as_it_lasts() -> None:
    now = 0.0
    witness = NodeObserver(EventLog(), lambda: now)
    running = {JOB: SimpleNamespace(name="text")}
    state: Any = SimpleNamespace(jobs=SimpleNamespace(running=lambda: running))
    for number in range(5):
        assert bool(witness.straggler_text(running)) == (number >= 3)
        opened, now = now, now + 20.0
        closed: Any = SimpleNamespace(job=JOB, round=number, outcome=ABSENT)
        witness.check_straggling(closed, state, ME, RoundEnded((JOB, number), opened, False))
    (event,) = await witness.events.wait_for_events(0, 0.0)
    assert event.kind == "warning" and event.fields["round"] == "2" and "last 3 rounds" in event.text
    assert "last 5 rounds" in witness.straggler_text(running)
    assert witness.straggler_text({}) == "", "the job has ended"
    for number in range(5, 9):
        closed = SimpleNamespace(job=JOB, round=number, outcome=ACCEPTED)
        witness.check_straggling(closed, state, ME, RoundEnded((JOB, number), now - 20.0, True))
    assert witness.straggler_text(running) == ""


async def test_a_peer_looks_at_every_round_that_closes_and_knows_whether_it_proposed_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[bytes, bool] = {}

    def took_part(witness: NodeObserver, closed: Any, state: Any, me: bytes, round: RoundEnded) -> None:
        seen[me] = round.has_proposed

    monkeypatch.setattr(NodeObserver, "check_straggling", took_part)
    async with network(tmp_path, founders=2) as made:
        await one_root(made.seats, await made.seats[0].scratch())
        await poll(lambda: len(seen) == 2)
    assert seen == {made.seats[0].public: True, made.seats[1].public: False}
