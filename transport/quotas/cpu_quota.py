"""Limits of processor time for each link, for all strangers together, and for the handshakes of each host.

A budget is a share of one processor, with a burst of some seconds. A link above its budget is not read until time has paid back
its debt. Strangers take turns in one queue, and a stranger joins it only when its own debt is paid. So strangers that spend much
do not delay the others.

| budget of                  | is charged for                                 | effect above the budget                          |
|----------------------------|------------------------------------------------|--------------------------------------------------|
| a link                     | decryption, decoding, signatures, writing,     | the link is read more slowly; a stranger that    |
|                            | and its part of the node's turns               | fills each read is dropped after                 |
|                            |                                                | STRANGER_WAIT_SECONDS_MAX                        |
| all strangers              | work as for a link, and STEP_SECONDS for       | all strangers are read more slowly               |
|                            | each read                                      |                                                  |
| handshakes of all hosts    | keys, signatures, attaching links,             | handshakes wait in a queue until their deadline: |
| without members            | and STEP_SECONDS for each step                 | begun ones come first, then by the host's debt   |
| handshakes of one host     | work as for the other handshakes               | handshakes wait in a queue of this host, first   |
| with members               |                                                | come, first served                               |

A member's link is never dropped, since a decision may wait for its messages, and its budget does not reduce the budgets of
others.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import trio

from transport.peer_policy import PeerClass

# Longest wait in seconds of a stranger that fills each read; then its link is dropped. A stranger that only sends requests sends
# less than it receives.
STRANGER_WAIT_SECONDS_MAX = 5.0
# Charged per handshake step or read from a stranger, besides the measured time: for socket, tasks, event loop.
STEP_SECONDS = 0.0005
HOSTS_MAX = 1_024  # remembered hosts; the least recent one is forgotten first
# Seconds by which strangers' messages are handled earlier than more bytes are read. Otherwise reads would use all the time.
STRANGERS_LEAD_SECONDS = 0.2
WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.001, 1.0  # shortest and longest sleep between checks of a budget


class CpuShare(NamedTuple):
    cpu_fraction: float  # part of one processor's time
    burst_seconds: float  # seconds of processor time that may be spent at once


# CPU shares of one link. A member's share decrypts a link of 1 Gbit/s. A guest downloads a state and a model, whose chunks cost
# little to send. A stranger needs a few dozen answers until it is a member.
LINK_SHARES = {
    PeerClass.STRANGER: CpuShare(0.02, 0.1),
    PeerClass.GUEST: CpuShare(0.25, 2.0),
    PeerClass.MEMBER: CpuShare(0.75, 10.0),
    PeerClass.VOTER: CpuShare(0.75, 10.0),
}
STRANGERS_SHARE = CpuShare(0.005, 0.02)  # all strangers together; the burst of 20 ms may delay a vote
# CPU share of handshakes from all hosts at which no member is known. It allows two links of strangers per second. The burst
# allows 400 links, or 30 on a slow computer, since a restarted peer does not know the hosts of members yet. Votes are handled
# between two steps of a handshake.
HANDSHAKES_SHARE = CpuShare(0.006, 1.0)
# CPU share of the handshakes of one host without members. It only orders hosts by debt, which decays at this rate.
HOST_HANDSHAKES_SHARE = CpuShare(0.01, 0.0)
# CPU share of the handshakes of one host with members. The burst serves a whole network that reconnects from one address.
MEMBER_HOST_HANDSHAKES_SHARE = CpuShare(0.01, 0.5)


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
        """Return the seconds until the debt is at most the burst. 0 or less: more may be spent now."""
        return (self._spent - self.share.burst_seconds) / self.share.cpu_fraction - (now - self._at)


class CpuAccount:
    """An account of the processor time that one link uses, or the handshakes of one host.

    It may share a further budget with others.
    """

    def __init__(self, share: CpuShare, shared: CpuBucket | None = None) -> None:
        self.own, self._shared = CpuBucket(share), shared

    def spend(self, seconds: float) -> None:
        now = trio.current_time()
        self.own.spend(seconds, now)
        if self._shared is not None:
            self._shared.spend(seconds, now)

    def wait_seconds(self) -> float:
        """Return the seconds until the account's own budget and the shared one allow more spending."""
        now = trio.current_time()
        return max(bucket.wait_seconds(now) for bucket in (self.own, self._shared) if bucket is not None)


class HandshakeQueue:
    """A queue of handshakes for one budget, which admits one at a time.

    Each host may have one begun handshake, and begun handshakes come first. Otherwise new hosts would always go first, and no
    handshake would finish. Then comes the host with the least debt, and of its connections the earliest one.
    """

    def __init__(self, budget: CpuBucket) -> None:
        self.budget = budget
        self._waiting: dict[trio.Event, tuple[HostCpuAccount, float]] = {}  # turn -> (host, arrival)

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
        self.begun: float | None = None  # arrival time of the host's connection that had the last turn


class CpuQuota:
    def __init__(self) -> None:
        self.strangers = CpuBucket(STRANGERS_SHARE)
        self._line = trio.Lock()  # queue of strangers' links: first come, first served
        self._handshakes = HandshakeQueue(CpuBucket(HANDSHAKES_SHARE))  # handshakes from hosts without members
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
        """Return the seconds until messages of strangers may be handled. 0 or less: now."""
        return self.strangers.wait_seconds(trio.current_time()) - STRANGERS_LEAD_SECONDS

    async def wait_for_link(self, payer: CpuAccount, standing: PeerClass) -> float:
        """Wait until the link that `payer` accounts for may be read, and return the seconds of waiting."""
        started = trio.current_time()
        await wait_until_paid(payer.own)
        if standing is PeerClass.STRANGER:
            async with self._line:
                await wait_until_paid(self.strangers)
            payer.spend(STEP_SECONDS)
        return trio.current_time() - started

    async def wait_for_handshake(self, payer: CpuAccount, came: float) -> None:
        """Wait for the next step of a handshake.

        STEP_SECONDS of its cost are charged at once, so that the queue's order takes them into account.
        """
        if isinstance(payer, HostCpuAccount):
            await payer.line.wait_for_turn(payer, came)
        else:
            await wait_until_paid(payer.own)
        payer.spend(STEP_SECONDS)


async def wait_until_paid(bucket: CpuBucket) -> None:
    while (wait := bucket.wait_seconds(trio.current_time())) > 0:  # noqa: ASYNC110 - The debt may grow meanwhile.
        await trio.sleep(min(wait + WAIT_SECONDS_MIN, WAIT_SECONDS_MAX))
