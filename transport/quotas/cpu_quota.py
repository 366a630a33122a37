"""Limits of processor time for each link, for all strangers together, and for the handshakes of each host.

A budget is a share of one processor, with a burst of some seconds. A link above its budget is not read until it has paid back the
debt. Strangers are read in one queue, so that a stranger that spends little does not wait behind those that spend much.

| budget of                  | is charged for                                 | and beyond it                                    |
|----------------------------|------------------------------------------------|--------------------------------------------------|
| a link                     | decryption, decoding, signatures, writing,     | the link is read more slowly; a stranger that    |
|                            | and its part of the node's turns               | fills each read is dropped after                 |
|                            |                                                | STRANGER_WAIT_SECONDS_MAX                        |
| all strangers              | the same, and STEP_SECONDS for each read       | they are read more slowly                        |
| handshakes of hosts        | keys, signatures, attaching links,             | they wait in a queue until their deadline: first |
| without members            | and STEP_SECONDS for each step                 | the begun ones of each host, then by host's debt |
| handshakes of a host       | the same                                       | they wait in a queue of this host, first come,   |
| with members               |                                                | first served                                     |

A member is never dropped, since a decision may wait for its messages, and its budget leaves the others theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import trio

from transport.peer_policy import PeerClass

# The longest wait of a stranger that fills each read. A stranger with mere requests sends less than it receives.
STRANGER_WAIT_SECONDS_MAX = 5.0
STEP_SECONDS = 0.0005  # time per handshake step or stranger's read, in addition to the measured time: socket, tasks, event loop
HOSTS_MAX = 1_024  # remembered hosts; the least recent one is forgotten
STRANGERS_LEAD_SECONDS = 0.2  # time to handle strangers' messages before more are read, or reads would take all time
WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.001, 1.0  # shortest and longest pause between checks of a budget


class CpuShare(NamedTuple):
    cpu_fraction: float  # share of one processor
    burst_seconds: float  # seconds


# A member's share decrypts a link of 1 Gbit/s. A guest downloads a state and a model, whose chunks cost little to send. A
# stranger needs a few dozen answers until it is a member.
LINK_SHARES = {
    PeerClass.STRANGER: CpuShare(0.02, 0.1),
    PeerClass.GUEST: CpuShare(0.25, 2.0),
    PeerClass.MEMBER: CpuShare(0.75, 10.0),
    PeerClass.VOTER: CpuShare(0.75, 10.0),
}
STRANGERS_SHARE = CpuShare(0.005, 0.02)  # budget of all strangers; its burst of 20 ms may delay a vote
# This budget of hosts without members allows two links of strangers per second. The burst allows 400 links, or 30 on
# a slow computer, since a restarted peer does not know the hosts of members yet. Votes are handled between two steps.
HANDSHAKES_SHARE = CpuShare(0.006, 1.0)
# The rate is the decay of a host's debt. Debts of hosts are only compared with each other.
HOST_HANDSHAKES_SHARE = CpuShare(0.01, 0.0)
MEMBER_HOST_HANDSHAKES_SHARE = CpuShare(0.01, 0.5)  # The burst serves a whole network that reconnects from one address.


class CpuBucket:
    def __init__(self, share: CpuShare) -> None:
        self.share = share
        self._spent, self._at = 0.0, 0.0

    def spend(self, seconds: float, now: float) -> None:
        self._spent = self.debt_seconds(now) + seconds
        self._at = now

    def debt_seconds(self, now: float) -> float:
        """Return the seconds of processor time that are not paid back yet."""
        return max(0.0, self._spent - self.share.cpu_fraction * (now - self._at))

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until the debt is within the burst; 0 or less: it is."""
        return (self._spent - self.share.burst_seconds) / self.share.cpu_fraction - (now - self._at)


class CpuAccount:
    """The processor time of one link, or of the handshakes of one host."""

    def __init__(self, share: CpuShare, shared: CpuBucket | None = None) -> None:
        self.own, self._shared = CpuBucket(share), shared

    def spend(self, seconds: float) -> None:
        now = trio.current_time()
        self.own.spend(seconds, now)
        if self._shared is not None:
            self._shared.spend(seconds, now)

    def wait_seconds(self) -> float:
        """Return the seconds until its own and the shared budget allow more."""
        now = trio.current_time()
        return max(bucket.wait_seconds(now) for bucket in (self.own, self._shared) if bucket is not None)


class HandshakeQueue:
    """A queue of handshakes for one budget, which admits one at a time.

    First comes, for each host, the handshake that has begun: else new hosts would always go first, and no handshake would finish.
    Then comes the host with the least debt, and among its connections the earliest.
    """

    def __init__(self, budget: CpuBucket) -> None:
        self.budget = budget
        self._waiting: dict[trio.Event, tuple[HostCpuAccount, float]] = {}  # The event is set at the turn.

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
        self.begun: float | None = None  # arrival of the connection with the last turn


class CpuQuota:
    def __init__(self) -> None:
        self.strangers = CpuBucket(STRANGERS_SHARE)
        self._line = trio.Lock()  # queue of strangers, first in, first out
        self._handshakes = HandshakeQueue(CpuBucket(HANDSHAKES_SHARE))  # queue of hosts without members
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
        """Return the seconds until messages of strangers may be handled."""
        return self.strangers.wait_seconds(trio.current_time()) - STRANGERS_LEAD_SECONDS

    async def wait_for_link(self, payer: CpuAccount, standing: PeerClass) -> float:
        """Wait until a link may be read, and return the seconds that this took."""
        started = trio.current_time()
        await wait_until_paid(payer.own)
        if standing is PeerClass.STRANGER:
            async with self._line:
                await wait_until_paid(self.strangers)
            payer.spend(STEP_SECONDS)
        return trio.current_time() - started

    async def wait_for_handshake(self, payer: CpuAccount, came: float) -> None:
        """Wait for the next step of a handshake. A part of its cost is charged at once, so that the queue orders by it."""
        if isinstance(payer, HostCpuAccount):
            await payer.line.wait_for_turn(payer, came)
        else:
            await wait_until_paid(payer.own)
        payer.spend(STEP_SECONDS)


async def wait_until_paid(bucket: CpuBucket) -> None:
    while (wait := bucket.wait_seconds(trio.current_time())) > 0:  # noqa: ASYNC110 - The debt may grow meanwhile.
        await trio.sleep(min(wait + WAIT_SECONDS_MIN, WAIT_SECONDS_MAX))
