"""What the prompt says unasked: who joined and stands for a vote, jobs, warnings, and now and then how a job goes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from features.peer_names import PeerNames
from peer.commands import view_tables
from protocol.api import EventView, PeerApi

EVENT_KINDS = ("member", "job", "warning", "evidence")
FIGURES_SECONDS = 60.0  # between two figures of loss, or of a round's responses
LINES_A_MINUTE_MAX = 10  # a peer that misbehaves must not fill the screen that somebody types on
WAIT_SECONDS = 30.0  # for the next event, in one question


class NotificationFilter:
    """Chooses among events, by their own times. What a command at this prompt answers is no news there."""

    def __init__(self, me: str = "") -> None:
        self._me = me
        self._met: set[str] = set()
        self._figures_ms: dict[str, int] = {}  # by the kind of event: when the last ones were said
        self._minute, self._lines = 0, 0

    def record_typed_line(self, line: str) -> None:
        """Its answer says what becomes of the addresses in it."""
        self._met |= {f"cannot reach {word.rpartition('@')[2]}" for word in line.split()}

    def filter_event(self, event: EventView) -> EventView | None:
        """What to show for this event."""
        if not self._is_worth_it(event):
            return None
        minute = event.at_ms // 60_000
        self._minute, self._lines = minute, self._lines + 1 if minute == self._minute else 1
        if self._lines == LINES_A_MINUTE_MAX:
            return replace(event, text=f"{event.text} (more than is shown happens this minute: see `log`)")
        return event if self._lines < LINES_A_MINUTE_MAX else None

    def _is_worth_it(self, event: EventView) -> bool:
        if event.kind == "peer":  # once each: links come and go, and what cannot be reached is tried again and again
            what = event.text.split(": ")[0]
            is_new = what not in self._met and not what.startswith("lost")
            self._met.add(what)
            return is_new
        if event.kind == "warning" and self._me and event.fields.get("author") == self._me:
            return False  # `train` has said it
        if event.fields.get("name") == "held_out_bits_per_byte" or event.kind == "figures":
            last = self._figures_ms.get(event.kind)
            is_due = last is None or event.at_ms - last >= 1_000 * FIGURES_SECONDS
            self._figures_ms |= {event.kind: event.at_ms} if is_due else {}
            return is_due
        return event.kind in EVENT_KINDS


async def print_notifications(
    api: PeerApi, names: Callable[[], Awaitable[PeerNames]], show: Callable[[str], None], chosen: NotificationFilter
) -> None:
    """Follows the events from now on, until cancelled. Raises `UserError` when the peer is gone."""
    newest = await api.events(-1, 0.0)
    seen = newest[-1].number if newest else 0
    while True:
        for event in await api.events(seen, WAIT_SECONDS):
            seen = event.number
            if (shown := chosen.filter_event(event)) is not None:
                line = view_tables.event_line(shown, await names())
                show(line.replace("`peer approve ", "`approve "))  # at the prompt it stands alone
