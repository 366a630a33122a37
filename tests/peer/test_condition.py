"""What counts as working: for people, and for what watches a peer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from consensus.pbft.block_sync import BlockSync
from peer.commands.definitions.status_commands import EXIT_STATUS
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.telemetry.health import (
    BEHIND_MIN,
    BEHIND_SECONDS,
    STALLED_SECONDS,
    heights_behind,
    peer_state,
    why_stalled,
)
from peer.runtime.telemetry.node_observer import NodeObserver
from protocol.api import PeerState
from protocol.identity import short_id
from tests.peer.network import network, one_root, poll, service_of
from tests.sim.keys import FastSigner
from transport.wire.failure_detector import KeepaliveConfig

KEYS = sorted(FastSigner(f"voter {number}").public for number in range(4))
STRANGER, JOB = FastSigner("stranger").public, bytes(32)
HALTED = "HALTED: 2 of 4 differ"


def node(
    me: bytes = KEYS[0], voters: int = 4, claims: dict[bytes, int] | None = None, books: dict[bytes, Any] | None = None
) -> Any:
    """At height 10, with one more that is decided and not applied."""
    catch_up = BlockSync()
    for peer, height in (claims or {}).items():
        catch_up.record_claim(peer, height)
    return SimpleNamespace(
        me=me,
        state=SimpleNamespace(
            height=10,
            members=SimpleNamespace(voters=tuple(KEYS[:voters])),
            jobs=SimpleNamespace(jobs={JOB: SimpleNamespace(name="text")}),
        ),
        replica=SimpleNamespace(height=11, height_claimed_by=catch_up.height_claimed_by),
        rounds=SimpleNamespace(books=books or {}),
    )


def book(proposals: int = 1, opened: float = 0.0, times_up: float = 20.0) -> Any:
    terms = SimpleNamespace(round=3, quorum=3, trainers=frozenset(KEYS[1:3]))
    return SimpleNamespace(
        terms=terms,
        opened_at=opened,
        cut_off_due_at=times_up,
        proposals=dict.fromkeys(KEYS[:proposals]),
        ballots=dict.fromkeys(KEYS[:2]),
    )


# One word ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("halted", "waiting", "behind", "ago", "suspended", "state", "status"),
    [
        ("", "", 0, 4.0, "", PeerState.WORKING, 0),
        ("", "", 0, 86_400.0, "", PeerState.WORKING, 0),  # an idle network works
        ("", "", None, None, "", PeerState.WORKING, 0),  # alone from the beginning
        ("", "", BEHIND_MIN - 1, BEHIND_SECONDS - 1, "", PeerState.WORKING, 0),  # votes on their way
        ("", "", 0, 4.0, "suspended until round 9", PeerState.SUSPENDED, 0),
        ("", "", BEHIND_MIN, 0.0, "", PeerState.BEHIND, 3),
        ("", "", 1, BEHIND_SECONDS, "suspended until round 9", PeerState.BEHIND, 3),
        ("", "", 1, None, "", PeerState.BEHIND, 3),  # a newcomer
        ("", "waiting for a quorum", 9, 4.0, "suspended", PeerState.WAITING, 3),
        ("silent until height 7: …", "waiting", 9, 4.0, "", PeerState.SILENT, 3),
        ("not a member: …", "waiting", 9, None, "", PeerState.JOINING, 3),
        (HALTED, "waiting", 9, 4.0, "", PeerState.HALTED, 4),
        ("EXPELLED at height 6: …", "waiting", 9, 4.0, "", PeerState.EXPELLED, 4),
    ],
)
def test_the_gravest_state_is_told_and_becomes_the_exit_status(
    halted: str, waiting: str, behind: int | None, ago: float | None, suspended: str, state: PeerState, status: int
) -> None:
    assert peer_state(halted, waiting, behind, ago, suspended) is state
    assert EXIT_STATUS[state] == status


# How far behind ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("linked", "claims", "behind"),
    [
        ((), {}, None),
        ((STRANGER,), {STRANGER: 99}, None),
        (KEYS[1:], {}, 0),
        (KEYS[1:], {KEYS[1]: 99}, 0),  # one of four may lie
        (KEYS[1:], {KEYS[1]: 99, KEYS[2]: 14}, 3),
        (KEYS[1:], {STRANGER: 99, KEYS[2]: 14}, 0),
        (KEYS[1:2], {KEYS[1]: 14}, 3),  # nobody else is there to say
        (KEYS[1:], {KEYS[1]: 5, KEYS[2]: 6}, 0),  # this peer has passed them since
    ],
)
def test_as_many_heights_behind_as_an_honest_voter_says(linked: tuple[bytes, ...], claims: dict[bytes, int], behind: int) -> None:
    assert heights_behind(node(claims=claims), frozenset(linked)) == behind


def test_the_only_voter_is_never_behind() -> None:
    assert heights_behind(node(voters=1), frozenset()) == 0


# Waiting although others are linked ----------------------------------------------------------------------------------


def test_without_work_nothing_is_waited_for() -> None:
    assert why_stalled(node(), frozenset(KEYS), 0.0, 1e6) == ""


def test_work_without_a_decision_is_waited_for_after_a_while() -> None:
    assert why_stalled(node(), frozenset(KEYS[1:3]), STALLED_SECONDS - 1, 0.0) == ""
    words = "waiting for a decision: height 11 has not come for 30 s (3 of 4 voters are here)"
    assert why_stalled(node(), frozenset(KEYS[1:3]), STALLED_SECONDS, 0.0) == words


def test_a_peer_without_a_vote_needs_one_voter_only() -> None:
    assert why_stalled(node(me=STRANGER), frozenset(), 0.0, 0.0) == "waiting for the voters: none of 4 is here"
    assert why_stalled(node(me=STRANGER), frozenset(KEYS[:1]), 0.0, 0.0) == ""


def test_a_round_whose_times_are_up_waits_for_ballots() -> None:
    stalled = node(books={JOB: book()})
    assert why_stalled(stalled, frozenset(KEYS), 0.0, 20.0 + STALLED_SECONDS - 1) == ""
    words = "waiting for the ballots of round 4 of 'text', open for 50 s: 2 of 3 needed are here"
    assert why_stalled(stalled, frozenset(KEYS), 0.0, 20.0 + STALLED_SECONDS) == words


def test_a_round_in_which_somebody_may_still_compute_waits_for_nobody() -> None:
    training = node(books={JOB: book(proposals=0)})
    assert why_stalled(training, frozenset(KEYS[1:2]), 0.0, 1e6) == ""
    words = "waiting for a trainer of round 4 of 'text', open for 60 s: none of 2 is here"
    assert why_stalled(training, frozenset(KEYS[3:]), 0.0, 60.0) == words


async def test_the_time_of_waiting_begins_with_the_work_and_ends_with_a_decision() -> None:
    now = 100.0
    witness = NodeObserver(EventLog(), lambda: now)
    witness.record_pending_work(True)
    now = 130.0
    witness.record_pending_work(True)
    assert witness.pending_work_seconds == 30.0
    block = SimpleNamespace(time_ms=1_000)
    decided = SimpleNamespace(height=5, certificate=SimpleNamespace(signatures={}), decode=lambda: block)
    witness.record_step(SimpleNamespace(records=(), decided_blocks=(decided,)))
    witness.record_pending_work(True)
    assert (witness.pending_work_seconds, witness.last_decision_at) == (0.0, 1.0), "decided long ago, heard now"
    now = 140.0
    witness.record_pending_work(False)
    assert witness.pending_work_seconds == 0.0


# In a network --------------------------------------------------------------------------------------------------------


async def test_a_cut_off_peer_waits_and_an_idle_one_works(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, observers=1) as made:
        *voters, observer = made.seats
        await one_root(made.seats, await voters[0].scratch())
        await poll(lambda: len({seat.driver.state.height for seat in made.seats}) == 1)
        status = await service_of(voters[0]).status()
        assert (status.state, status.heights_behind) == ("working", 0)
        assert status.decided_seconds_ago is not None and status.decided_seconds_ago < 60
        assert (await service_of(observer).status()).state == "joining"
        for seat in voters[2:]:
            await seat.stop()
        await poll(lambda: len(voters[0].network.connected_peers()) == 2)
        status = await service_of(voters[0]).status()
        assert (status.state, status.waiting) == ("waiting", "waiting for a quorum: 2 of 4 voters are here, 3 are needed")
        voters[0].network.keepalive = KeepaliveConfig(suspect_seconds=0.1)
        await poll(lambda: bool(voters[0].hearing.partition_text(voters[0].events.names)))
        status = await service_of(voters[0]).status()
        sides = [sorted(short_id(seat.public) for seat in side) for side in (voters[:2], voters[2:])]
        here, there = (", ".join(f"founder ({key})" for key in side) for side in sides)
        told = f"partition: 2 of 4 voters here ({here}), 3 are needed: nothing is decided until 1 more comes; not heard: {there}"
        assert (status.state, status.waiting) == ("waiting", told)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(voters[0].scratch)
            await poll(lambda: voters[0].driver.observer.pending_work_seconds > 0)
            nursery.cancel_scope.cancel()
