"""Whether this machine's clock is right. Voters refuse a block that is too far ahead of their clocks."""

from __future__ import annotations

import statistics
import time
from typing import Final

from peer.doctor.findings import DoctorFinding, fault, ok, warning
from peer.doctor.machine import is_clock_synchronized
from protocol.api import PeerApi
from protocol.limits import CLOCK_AHEAD_SECONDS

EVENTS_READ: Final = 500  # the last ones; decisions are among them
BLOCKS_READ: Final = 32  # of the last decisions: each voter's turn to lead comes, in most networks
CLOCK_ADVICE = "set it by the network's time (timedatectl set-ntp true, or chrony), then start the peer again"


def check_clock(ahead: float | None, last_block_ms: int | None, genesis_ms: int) -> DoctorFinding:
    """`ahead`: seconds before the clocks of the others, where they tell; `last_block_ms`: of the last block that is here."""
    late = max(last_block_ms or 0, genesis_ms) / 1_000 - time.time()
    if ahead is not None and ahead > CLOCK_AHEAD_SECONDS:
        return fault("clock", f"it is {ahead:.0f} s ahead of the others: they refuse what this peer proposes", CLOCK_ADVICE)
    if ahead is not None and ahead < -CLOCK_AHEAD_SECONDS:
        return fault("clock", f"it is {-ahead:.0f} s behind the others: this peer refuses what they propose", CLOCK_ADVICE)
    if ahead is not None:
        return ok("clock", f"{abs(ahead):.1f} s from the others'")
    if late > CLOCK_AHEAD_SECONDS:
        return fault("clock", f"it is {late:.0f} s or more behind: so much later the last block was decided", CLOCK_ADVICE)
    if is_clock_synchronized() is False:
        return warning(
            "clock",
            "the kernel says that nothing keeps it right, and no decision of others was seen here",
            CLOCK_ADVICE,
        )
    return ok("clock", "nothing contradicts it")


async def clock_offset(api: PeerApi, me: str) -> float | None:
    """Seconds by which this clock is before those of the other leaders of the last blocks; None if there was none.

    A block has the time at which its leader began it, by the leader's clock; its decision has that of this machine, and comes
    some hundredths of a second later, so the quickest one says most. The median of the leaders bears some whose clocks are wrong.
    Decisions that were made while this peer was away say nothing.
    """
    events = await api.events(-EVENTS_READ, 0.0)
    decided = [event for event in events if event.kind == "decided" and event.fields.get("seen") == str(True)]
    seconds: dict[str, float] = {}
    for event in decided[-BLOCKS_READ:]:
        block = await api.block(int(event.fields["height"]))
        if block.proposer != me:
            passed = (event.at_ms - block.time_ms) / 1_000
            seconds[block.proposer] = min(passed, seconds.get(block.proposer, passed))
    return statistics.median(seconds.values()) if seconds else None
