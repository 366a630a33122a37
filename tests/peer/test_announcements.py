"""What the prompt says unasked, and how much of it."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from features.peer_names import PeerNames
from peer.commands.console import LINES_A_MINUTE_MAX, NotificationFilter, print_notifications
from protocol.api import EventView
from tests.peer.fake_api import ME, OTHER, FakeApi

MINUTE_MS = 60_000


def event(kind: str, text: str, at_ms: int = 0, **fields: str) -> EventView:
    return EventView(1, at_ms, kind, text, fields)


def loss(at_ms: int) -> EventView:
    return event("measured", "before round 3: held-out loss 2.500 bits/byte", at_ms, name="held_out_bits_per_byte")


@pytest.mark.parametrize("kind", ["member", "job", "warning", "evidence"])
def test_what_concerns_people_is_said(kind: str) -> None:
    assert NotificationFilter().filter_event(event(kind, "something")) == event(kind, "something")


@pytest.mark.parametrize("kind", ["decided", "applied", "ballot", "proposal", "round", "audit"])
def test_what_happens_every_second_is_not(kind: str) -> None:
    assert NotificationFilter().filter_event(event(kind, "something")) is None


def test_the_loss_and_a_round_s_figures_are_said_once_a_minute() -> None:
    chosen = NotificationFilter()
    times = range(0, 3 * MINUTE_MS, 10_000)
    said = [(chosen.filter_event(loss(at)), chosen.filter_event(event("figures", "score 0.5", at))) for at in times]
    assert said == [(loss(at), event("figures", "score 0.5", at)) if at % MINUTE_MS == 0 else (None, None) for at in times]


def test_a_peer_is_said_to_be_here_once_however_often_its_link_breaks() -> None:
    chosen = NotificationFilter()
    links = [event("peer", text, peer=ME) for text in ("connected to anna", "lost the link to anna", "connected to anna")]
    assert [chosen.filter_event(link) for link in links] == [links[0], None, None]
    failed = [event("peer", f"cannot reach h:1: no route to host ({tries} tries)") for tries in (1, 3, 9)]
    assert [chosen.filter_event(dial) for dial in failed] == [failed[0], None, None]


def test_what_a_command_at_this_prompt_answers_is_no_news_there() -> None:
    chosen = NotificationFilter(ME)
    chosen.record_typed_line(f"connect h:1 {OTHER}@h:2")
    failed = [event("peer", f"cannot reach h:{port}: no route to host (1 tries)") for port in (1, 2, 3)]
    assert [chosen.filter_event(dial) for dial in failed] == [None, None, failed[2]]
    started = [event("warning", "job text: audit=sampled is not", author=author) for author in (ME, OTHER)]
    assert [chosen.filter_event(start) for start in started] == [None, started[1]], "of its own job `train` has said it"


def test_a_flood_of_warnings_does_not_fill_the_screen() -> None:
    chosen = NotificationFilter()
    said = [chosen.filter_event(event("warning", "dropped a liar", at)) for at in range(1_000)]
    shown = [line.text for line in said if line is not None]
    assert len(shown) == LINES_A_MINUTE_MAX and "see `log`" in shown[-1] and "see" not in shown[-2]
    assert chosen.filter_event(event("warning", "another", MINUTE_MS)) == event("warning", "another", MINUTE_MS), (
        "the next minute is new"
    )


async def test_announcements_begin_with_the_newest_and_speak_of_names_and_of_the_prompts_own_commands() -> None:
    short = OTHER[:8]
    old = EventView(7, 0, "member", "old news", {})
    new = EventView(8, 0, "member", f"{short} stands as a voter: `peer approve {short}` approves it", {})

    class Api(FakeApi):
        async def events(self, after: int, wait_seconds: float) -> tuple[EventView, ...]:
            if after == new.number:
                await trio.sleep_forever()
            return (old,) if after < 0 else (new,)

    async def names() -> PeerNames:
        return PeerNames({ME: "anna", OTHER: "erin II"})

    lines: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(print_notifications, Api(), names, lines.append, NotificationFilter())
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    (line,) = lines
    assert line.endswith("member    erin II stands as a voter: `approve 'erin II'` approves it")
