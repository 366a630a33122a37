"""What happened, numbered, for consoles and displays that follow along. In memory, bounded; the decided truth is in the store."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping

import trio

from features.peer_names import PeerNames
from protocol.api import EventView
from protocol.identity import peer_id

EVENTS_KEPT = 5_000  # a console that was away longer sees the newest ones

log = logging.getLogger("peer")


class EventLog:
    def __init__(self) -> None:
        self._events: deque[EventView] = deque(maxlen=EVENTS_KEPT)
        self._last = 0
        self._more = trio.Event()
        self.names = PeerNames({})  # of the members now; events keep the ids, and the log's lines are for people

    def add(self, kind: str, text: str, **fields: object) -> None:
        """Keys called `peer` become peer ids, other bytes hex."""
        self._add(logging.WARNING if kind in ("warning", "evidence") else logging.INFO, kind, text, fields)

    def add_warning(self, kind: str, text: str) -> None:
        self._add(logging.WARNING, kind, text, {})

    def add_detail(self, kind: str, text: str, **fields: object) -> None:
        """One of several lines about what gets one of its own, such as the votes of a round: the log has it at `debug`."""
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
        """Events above `number`, waiting for the first; a negative number asks for that many of the last ones, at once.

        It is a checkpoint even where it need not wait: who asks in a loop for an event still to come must let it happen.
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
