"""Nodes on virtual time: the links between peers, with order, delay and faults of messages in transit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.sim.plan import Fault

WEATHER = ("loss", "duplicate", "reorder", "delay")


@dataclass(slots=True)
class Link:
    """One direction between two peers."""

    sender: int
    receiver: int
    up: bool = False  # both ends know of the connection
    epoch: int = 0  # counts connections: a broken connection loses its messages in transit
    blocked: int = 0  # faults that let nothing through
    clogged: int = 0  # faults that hold everything back until they end
    held: list[tuple[int, list[bytes]]] = field(default_factory=list)  # (epoch, messages) behind a clog
    has_lost: bool = False  # something, since it came up
    weather: dict[str, float] = field(default_factory=dict)  # kind -> strength; empty: calm
    last: float = 0.0  # when the last message arrives: links keep the order


Arrive = Callable[[Link, int, list[bytes]], None]
After = Callable[[float, Callable[..., None], tuple[object, ...]], None]


class Network:
    """All links. `after(seconds, call, arguments)` schedules a call; `arrive(link, epoch, messages)` receives from a link."""

    def __init__(self, peers: int, delay: tuple[float, float], source: random.Random, after: After, arrive: Arrive) -> None:
        self.links = [[Link(one, other) for other in range(peers)] for one in range(peers)]
        self.delay = delay
        self.messages = 0
        self.filter: Callable[[int, int, bytes], bool] | None = None  # returns True for messages that may pass; None: all pass
        self._random = source
        self._after, self._arrive = after, arrive
        self._now: Callable[[], float] = lambda: 0.0
        self._faults: list[Fault] = []

    def use_clock(self, now: Callable[[], float]) -> None:
        self._now = now

    def between(self, one: int, other: int) -> tuple[Link, Link]:
        return self.links[one][other], self.links[other][one]

    # Messages --------------------------------------------------------------------------------------------------------

    def transmit(self, sender: int, receiver: int, messages: list[bytes]) -> None:
        """Send the messages of one turn to one peer. On a calm network they arrive together."""
        link = self.links[sender][receiver]
        if self.filter is not None:
            messages = [message for message in messages if self.filter(sender, receiver, message)]
        self.messages += len(messages)
        if not link.up or link.blocked or not messages:
            link.has_lost = link.has_lost or bool(messages)
            return
        if link.clogged:
            link.held.append((link.epoch, messages))
        elif not link.weather:
            self._travel(link, link.epoch, messages, self._draw(), True)
        else:
            for message in messages:
                self._through_weather(link, message)

    def _through_weather(self, link: Link, message: bytes) -> None:
        weather, source = link.weather, self._random
        if source.random() < weather.get("loss", 0.0):
            link.has_lost = True
            return
        copies = 2 if source.random() < weather.get("duplicate", 0.0) else 1
        for _ in range(copies):
            seconds = self._draw() + source.random() * weather.get("delay", 0.0)
            late = "reorder" in weather and source.random() < 0.5
            self._travel(link, link.epoch, [message], seconds + late * source.random() * weather.get("reorder", 0.0), not late)

    def _travel(self, link: Link, epoch: int, messages: list[bytes], seconds: float, in_order: bool) -> None:
        if in_order:
            now = self._now()
            at = now + seconds
            if at < link.last:
                seconds += link.last - at
            link.last = now + seconds
        self._after(seconds, self._arrive, (link, epoch, messages))

    def _draw(self) -> float:
        low, high = self.delay
        return low + (high - low) * self._random.random()

    # Faults ----------------------------------------------------------------------------------------------------------

    def begin(self, fault: Fault) -> None:
        self._faults.append(fault)
        self._apply_weather()

    def end(self, fault: Fault) -> None:
        self._faults = [other for other in self._faults if other.number != fault.number]
        self._apply_weather()

    def _apply_weather(self) -> None:
        for row in self.links:
            for link in row:
                link.weather = {}
                for fault in self._faults:
                    if not fault.nodes or link.sender in fault.nodes or link.receiver in fault.nodes:
                        link.weather[fault.kind] = max(fault.amount, link.weather.get(fault.kind, 0.0))

    def block(self, pairs: Sequence[tuple[int, int]], change: int) -> None:
        for one, other in pairs:
            self.links[one][other].blocked += change

    def clog(self, sender: int, receiver: int, change: int) -> None:
        link = self.links[sender][receiver]
        link.clogged += change
        if not link.clogged:
            held, link.held = link.held, []
            for epoch, messages in held:
                self._travel(link, epoch, messages, self._draw(), True)

    def heal(self) -> None:
        self._faults = []
        self._apply_weather()
        for row in self.links:
            for link in row:
                link.blocked = 0
                if link.clogged:
                    self.clog(link.sender, link.receiver, -link.clogged)
