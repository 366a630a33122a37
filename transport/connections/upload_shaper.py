"""What strangers may take of this peer's uplink: all that is left, and a little where members wait for something.

| something waits for a member, a guest or a voter | then a frame goes to a stranger |
|---|---|
| no | at once |
| yes | when as much time has gone by as an eighth of what the slowest of those links carries needs for the frame before |

So members and voters have seven eighths at least, and a stranger is never left without. A link that has no measurement yet
counts as the slowest one that a peer may have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import trio

from protocol.limits import UPLINK_MBIT_MIN
from transport.peer_policy import PeerClass
from transport.wire.framing import Outbox
from transport.wire.link_measurements import LinkMeter

STRANGERS_SHARE = 1 / 8
LEAST_RATE = UPLINK_MBIT_MIN * 1_000_000 / 8  # bytes a second; also where a member takes what it is sent more slowly than this
LOOK_SECONDS = 0.1  # while strangers wait, whether somebody else still does


class UploadLink(Protocol):
    peer_class: PeerClass
    closed: bool
    outbox: Outbox
    meter: LinkMeter


class UploadShaper:
    def __init__(self, links: Mapping[bytes, UploadLink]) -> None:
        self._links = links
        self._free_at = -math.inf

    async def wait_for_turn(self, link: UploadLink) -> None:
        """Returns when the next frame may go over this link."""
        while link.peer_class is PeerClass.STRANGER and not link.closed and (rate := self._rate()) is not None:
            now = trio.current_time()
            if now >= self._free_at:
                self._free_at = now + min(link.outbox.held, link.meter.frame_bytes) / (STRANGERS_SHARE * rate)
                return
            await trio.sleep(min(LOOK_SECONDS, self._free_at - now))

    def _rate(self) -> float | None:
        """Bytes a second of the slowest link for which something waits, but for strangers'; None: nothing does."""
        waiting = [link for link in self._links.values() if link.peer_class is not PeerClass.STRANGER and link.outbox]
        return min((max(LEAST_RATE, link.meter.bytes_per_second or 0.0) for link in waiting), default=None)
