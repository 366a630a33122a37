"""What people are told, once each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from consensus.evidence import Evidence
from ledger.members import Member
from peer.eventlog import EventLog
from peer.witness import Witness, why_halted
from protocol.identity import short_id, sign
from protocol.messages import Commit, Proposal, Timeout
from tests.sim.keys import FastSigner

LIAR, CHAIN = FastSigner("liar"), bytes(32)


@pytest.fixture
def log() -> EventLog:
    return EventLog()


async def lines(log: EventLog) -> list[str]:
    return [event.text for event in await log.after(0, 0.0)]


async def test_silence_is_told_once_with_its_end_and_its_likely_cause(log: EventLog) -> None:
    witness = Witness(log, lambda: 0.0)
    for height, below in ((5, 0), (5, 7), (6, 7), (7, 7)):
        witness.silence(height, below)
    (line,) = await lines(log)
    assert line == "silent until height 7: signatures of ours are missing from this disk (was it restored from a backup?)"


async def test_a_round_of_which_something_was_forgotten_is_told_once(log: EventLog) -> None:
    witness = Witness(log, lambda: 0.0)
    for rounds in ((), ((CHAIN, 3),), ((CHAIN, 3),), ()):
        witness.muted(frozenset(rounds))
    (line,) = await lines(log)
    assert line == "saying nothing more in round 3: a message of ours in it is missing from this disk"


async def test_an_expulsion_names_what_was_signed(log: EventLog) -> None:
    witness = Witness(log, lambda: 0.0)
    proposals = [Proposal(CHAIN, 0, CHAIN, bytes([n]) * 32, 1, CHAIN, None) for n in range(2)]
    given_up = (Commit(CHAIN, 1, 0, CHAIN), Timeout(CHAIN, 1, 0, -1, None))
    for first, second in (proposals, given_up):
        witness.expelled(Evidence(sign(LIAR, CHAIN, first), sign(LIAR, CHAIN, second)))
    name = short_id(LIAR.public)
    assert await lines(log) == [
        f"{name} was expelled: it signed two different proposals",
        f"{name} was expelled: it signed a commit and a timeout that exclude each other",
    ]


async def test_a_dispute_about_the_state_is_told_once_and_again_when_it_grows(log: EventLog) -> None:
    witness = Witness(log, lambda: 0.0)
    for text in (None, "2 of 4 differ", "2 of 4 differ", "3 of 4 differ", None):
        witness.dispute(text)
    assert [line.split(";")[0] for line in await lines(log)] == ["2 of 4 differ", "3 of 4 differ"]
    assert all("When peers do not hold the same state" in line for line in await lines(log)), "and what to do"


def test_the_state_that_people_see_names_the_gravest_reason() -> None:
    fine = {"height": 9, "divergence": None, "dispute": None, "silent_below": 7}
    assert why_halted(SimpleNamespace(**fine), None) == ""
    assert why_halted(SimpleNamespace(**fine | {"silent_below": 10}), None).startswith("silent until height 10")
    disputed = SimpleNamespace(**fine | {"silent_below": 10, "dispute": "2 of 4 differ"})
    assert why_halted(disputed, None).startswith("HALTED: 2 of 4 differ; ")
    diverged = SimpleNamespace(**vars(disputed) | {"divergence": "height 8 was decided otherwise"})
    assert why_halted(diverged, None) == "HALTED: height 8 was decided otherwise; the certified state is being restored"
    expelled = Member("ben", (), 0, None, 3, expelled=6)
    assert why_halted(diverged, expelled).startswith("EXPELLED at height 6: ")
    assert why_halted(SimpleNamespace(**fine), replace(expelled, expelled=None)) == ""
