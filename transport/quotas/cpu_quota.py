"""Processor time that others may take here: for each link, for all strangers together, for handshakes of each host.

Each budget is a share of one processor, and some seconds of it that may be spent at once. Whoever has spent more is read again
when that is paid back. Strangers wait in one line, so that those who spend little are not behind those who spend much.

| who                        | what is spent                                  | and then                                         |
|----------------------------|------------------------------------------------|--------------------------------------------------|
| a link                     | decrypting, decoding, signatures, writing to   | it is read more slowly; a stranger that goes on  |
|                            | it, its part of the node's turns               | sending all it can is dropped (PATIENCE_SECONDS) |
| all strangers              | the same, and STEP_SECONDS for each read       | they are read more slowly                        |
| handshakes of hosts        | keys, signatures, making links of them,        | they wait in line, the host that has spent least |
| without members            | and STEP_SECONDS for each step                 | first, behind one of each host that has begun,   |
|                            |                                                | until it is too late for them                    |
| handshakes of a host       | the same                                       | they wait in a line of their own host, whoever   |
| with members               |                                                | came first before the others                     |

A member is not dropped: what it sends may be what a decision waits for, and its budget leaves the others theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import trio

from transport.peer_policy import PeerClass

# of waiting for a stranger that has sent a full read each time: whoever only asks sends less than it gets
STRANGER_WAIT_SECONDS_MAX = 5.0
STEP_SECONDS = 0.0005  # of a handshake, or of a stranger's link, beside what is measured: socket, tasks, the loop's turns
HOSTS_MAX = 1_024  # remembered; the one that was here longest ago is forgotten
STRANGERS_LEAD_SECONDS = 0.2  # what strangers said is dealt with so long before more is read of them; reading would take all
WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.001, 1.0  # until a budget is looked at again


class CpuShare(NamedTuple):
    cpu_fraction: float  # of one
    burst_seconds: float  # seconds


# A member's is what a link of 1 Gbit/s needs to be decrypted. A guest gets a state and a model, whose chunks cost little to send.
# A stranger needs some dozen answers until it is a member.
LINK_SHARES = {
    PeerClass.STRANGER: CpuShare(0.02, 0.1),
    PeerClass.GUEST: CpuShare(0.25, 2.0),
    PeerClass.MEMBER: CpuShare(0.75, 10.0),
    PeerClass.VOTER: CpuShare(0.75, 10.0),
}
STRANGERS_SHARE = CpuShare(0.005, 0.02)  # and no more than a fiftieth of a second of theirs before a vote
# Of hosts without members: some two links of strangers a second, a newcomer's among the first. Four hundred at once, thirty on a
# slow computer: a peer that starts again does not know yet where members are. Votes go in between: they are taken step by step.
HANDSHAKES_SHARE = CpuShare(0.006, 1.0)
# how soon is forgotten what a host has spent: it is only compared with what others have
HOST_HANDSHAKES_SHARE = CpuShare(0.01, 0.0)
MEMBER_HOST_HANDSHAKES_SHARE = CpuShare(0.01, 0.5)  # as many at once: a network that was cut off behind one address comes back


class CpuBucket:
    def __init__(self, share: CpuShare) -> None:
        self.share = share
        self._spent, self._at = 0.0, 0.0

    def spend(self, seconds: float, now: float) -> None:
        self._spent = self.debt_seconds(now) + seconds
        self._at = now

    def debt_seconds(self, now: float) -> float:
        """Seconds of a processor that it has spent and not paid back."""
        return max(0.0, self._spent - self.share.cpu_fraction * (now - self._at))

    def wait_seconds(self, now: float) -> float:
        """Seconds until it has paid back what it spent too much."""
        return (self._spent - self.share.burst_seconds) / self.share.cpu_fraction - (now - self._at)


class CpuAccount:
    """What one link spends, or the handshakes of one host."""

    def __init__(self, share: CpuShare, shared: CpuBucket | None = None) -> None:
        self.own, self._shared = CpuBucket(share), shared

    def spend(self, seconds: float) -> None:
        now = trio.current_time()
        self.own.spend(seconds, now)
        if self._shared is not None:
            self._shared.spend(seconds, now)

    def wait_seconds(self) -> float:
        """Seconds until both are paid back."""
        now = trio.current_time()
        return max(bucket.wait_seconds(now) for bucket in (self.own, self._shared) if bucket is not None)


class HandshakeQueue:
    """Waits for one budget: one at a time. Called is, of each host, a handshake that has begun: else new hosts would go first,
    and of many none would come to an end. Then whoever has spent least lately, and of one host the connection that came first."""

    def __init__(self, budget: CpuBucket) -> None:
        self.budget = budget
        self._waiting: dict[trio.Event, tuple[HostCpuAccount, float]] = {}  # the one whose turn it is has been called

    async def wait_for_turn(self, host: HostCpuAccount, came: float) -> None:
        called = trio.Event()
        if not self._waiting:
            called.set()
        self._waiting[called] = host, came
        try:
            await called.wait()
            await wait_until_paid(self.budget)
            host.begun = came
        finally:
            del self._waiting[called]
            if called.is_set() and self._waiting:
                min(self._waiting, key=partial(self._rank, trio.current_time())).set()

    def _rank(self, now: float, called: trio.Event) -> tuple[bool, float, float]:
        host, came = self._waiting[called]
        return host.begun != came, host.own.wait_seconds(now), came


class HostCpuAccount(CpuAccount):
    def __init__(self, shared: HandshakeQueue | None) -> None:
        super().__init__(HOST_HANDSHAKES_SHARE if shared else MEMBER_HOST_HANDSHAKES_SHARE, shared.budget if shared else None)
        self.line = shared or HandshakeQueue(self.own)
        self.begun: float | None = None  # when the connection came whose handshake had the last turn


class CpuQuota:
    def __init__(self) -> None:
        self.strangers = CpuBucket(STRANGERS_SHARE)
        self._line = trio.Lock()  # of strangers: fair, first in, first out
        self._handshakes = HandshakeQueue(CpuBucket(HANDSHAKES_SHARE))  # of hosts without members
        self._hosts: OrderedDict[tuple[str, bool], HostCpuAccount] = OrderedDict()

    def link_account(self, standing: PeerClass) -> CpuAccount:
        return CpuAccount(LINK_SHARES[standing], self.strangers if standing is PeerClass.STRANGER else None)

    def host_account(self, host: str, has_members: bool) -> HostCpuAccount:
        key = host, has_members
        if key not in self._hosts:
            self._hosts[key] = HostCpuAccount(None if has_members else self._handshakes)
        self._hosts.move_to_end(key)
        if len(self._hosts) > HOSTS_MAX:
            self._hosts.popitem(last=False)
        return self._hosts[key]

    def strangers_wait_seconds(self) -> float:
        """Seconds until what was read of them may be dealt with."""
        return self.strangers.wait_seconds(trio.current_time()) - STRANGERS_LEAD_SECONDS

    async def wait_for_link(self, payer: CpuAccount, standing: PeerClass) -> float:
        """Returns when more may be spent; the seconds that this took."""
        started = trio.current_time()
        await wait_until_paid(payer.own)
        if standing is PeerClass.STRANGER:
            async with self._line:
                await wait_until_paid(self.strangers)
            payer.spend(STEP_SECONDS)
        return trio.current_time() - started

    async def wait_for_handshake(self, payer: CpuAccount, came: float) -> None:
        """Returns when the next step may be taken. It is paid for in part, so that the next one in line sees that."""
        if isinstance(payer, HostCpuAccount):
            await payer.line.wait_for_turn(payer, came)
        else:
            await wait_until_paid(payer.own)
        payer.spend(STEP_SECONDS)


async def wait_until_paid(bucket: CpuBucket) -> None:
    while (wait := bucket.wait_seconds(trio.current_time())) > 0:  # noqa: ASYNC110 - more may be spent meanwhile
        await trio.sleep(min(wait + WAIT_SECONDS_MIN, WAIT_SECONDS_MAX))
