"""The event log: numbered events for consoles and pages. The log is bounded and in memory only: decided data is in the store."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping

import trio

from features.peer_names import PeerNames
from protocol.api import EventView
from protocol.identity import peer_id

EVENTS_KEPT = 5_000  # newest events in memory: a console that connects later does not get older ones

log = logging.getLogger("peer")


class EventLog:
    def __init__(self) -> None:
        self._events: deque[EventView] = deque(maxlen=EVENTS_KEPT)
        self._last = 0
        self._more = trio.Event()
        self.names = PeerNames({})  # current names of members, for lines of the log file; events have ids

    def add(self, kind: str, text: str, **fields: object) -> None:
        """Add an event. The field `peer` is shown as a peer id, and bytes in other fields as hex."""
        self._add(logging.WARNING if kind in ("warning", "evidence") else logging.INFO, kind, text, fields)

    def add_warning(self, kind: str, text: str) -> None:
        self._add(logging.WARNING, kind, text, {})

    def add_detail(self, kind: str, text: str, **fields: object) -> None:
        """Add an event that is one detail of another event, such as a vote of a round. The log file has it at level `debug`."""
        self._add(logging.DEBUG, kind, text, fields)

    def _add(self, level: int, kind: str, text: str, fields: Mapping[str, object]) -> None:
        self._last += 1
        shown = {name: _shown(name, value) for name, value in fields.items()}
        self._events.append(EventView(self._last, int(time.time() * 1000), kind, text, shown))
        numbers = {name: value for name, value in fields.items() if isinstance(value, (int, float))}
        log.log(level, "%s", self.names.replace_ids(text), extra={"kind": kind, "fields": shown | numbers})
        more, self._more = self._more, trio.Event()
        more.set()

    def newest_events(self, count: int) -> tuple[EventView, ...]:
        return tuple(self._events)[max(0, len(self._events) - count) :]

    async def wait_for_events(self, number: int, wait_seconds: float) -> tuple[EventView, ...]:
        """Return the events above `number`, and wait up to `wait_seconds` for the first.

        If `number` is negative, return the newest `-number` events at once. The call is always a checkpoint, so that a caller's
        loop lets other tasks run.
        """
        await trio.lowlevel.checkpoint()
        if number < 0:
            return self.newest_events(-number)
        with trio.move_on_after(max(0.0, wait_seconds)):
            while self._last <= number:
                await self._more.wait()
        return tuple(event for event in self._events if event.number > number)


def _shown(name: str, value: object) -> str:
    if isinstance(value, bytes):
        return peer_id(value) if name == "peer" else value.hex()
    return str(value)
