"""Processor time that others may take here: for each link, for all strangers together, for handshakes of each host.

Each budget is a share of one processor, and some seconds of it that may be spent at once. Whoever has spent more is read again
when that is paid back. Strangers wait in one line, so that those who spend little are not behind those who spend much.

| who                       | what is spent                                  | and then                                        |
|---------------------------|------------------------------------------------|-------------------------------------------------|
| a link                    | decrypting, decoding, signatures, writing to it | it is read more slowly; a stranger that goes on |
|                           |                                                | sending all it can is dropped (PATIENCE_SECONDS) |
| all strangers             | the same                                       | they are read more slowly                       |
| handshakes, of one host and | keys and signatures                          | where both are spent they wait, until it is too |
| of all without members    |                                                | late for them                                   |

A member is not dropped: what it sends may be what a decision waits for, and its budget leaves the others theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import trio

from transport.standing import Standing

PATIENCE_SECONDS = 5.0  # of waiting for a stranger that has sent a full read each time: whoever only asks sends less than it gets
MANY_HOSTS_SECONDS = 5.0  # a host that spent little waits for others no more than so much less: there may be thousands of it
HOSTS_MAX = 1_024  # remembered; the one that was here longest ago is forgotten
WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.001, 1.0  # until a budget is looked at again


class Share(NamedTuple):
    processor: float  # of one
    at_once: float  # seconds


# A member's is what a link of 1 Gbit/s needs to be decrypted. A guest gets a state and a model, whose chunks cost little to send.
# A stranger needs some dozen answers until it is a member.
LINK = {
    Standing.STRANGER: Share(0.05, 0.25),
    Standing.GUEST: Share(0.25, 2.0),
    Standing.MEMBER: Share(0.75, 10.0),
    Standing.VOTER: Share(0.75, 10.0),
}
STRANGERS = Share(0.15, 0.1)  # and no more than a tenth of a second of theirs before a vote
HANDSHAKES = Share(0.1, 0.25)  # of hosts without members; a handshake costs about a millisecond
HANDSHAKES_OF_HOST = Share(0.02, 0.05)  # fifty at once, then twenty a second
HANDSHAKES_OF_MEMBERS_HOST = Share(0.1, 0.25)

assert STRANGERS.processor + HANDSHAKES.processor < 0.5, "most of a processor is left whatever strangers do"


class Bucket:
    def __init__(self, share: Share) -> None:
        self.share = share
        self._spent, self._at = 0.0, 0.0

    def spend(self, seconds: float, now: float) -> None:
        self._spent = max(0.0, self._spent - self.share.processor * (now - self._at)) + seconds
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until it has paid back what it spent too much."""
        return (self._spent - self.share.at_once) / self.share.processor - (now - self._at)


class Payer:
    """What one link spends, or the handshakes of one host."""

    def __init__(self, share: Share, shared: Bucket | None = None) -> None:
        self.own, self._shared = Bucket(share), shared

    def spend(self, seconds: float) -> None:
        now = trio.current_time()
        self.own.spend(seconds, now)
        if self._shared is not None:
            self._shared.spend(seconds, now)


class Effort:
    def __init__(self) -> None:
        self.strangers, self._handshakes = Bucket(STRANGERS), Bucket(HANDSHAKES)
        self._line = trio.Lock()  # of strangers: fair, first in, first out
        self._hosts: OrderedDict[tuple[str, bool], Payer] = OrderedDict()

    def link(self, standing: Standing) -> Payer:
        return Payer(LINK[standing], self.strangers if standing is Standing.STRANGER else None)

    def host(self, host: str, has_members: bool) -> Payer:
        key = host, has_members
        if key not in self._hosts:
            share = HANDSHAKES_OF_MEMBERS_HOST if has_members else HANDSHAKES_OF_HOST
            self._hosts[key] = Payer(share, None if has_members else self._handshakes)
        self._hosts.move_to_end(key)
        if len(self._hosts) > HOSTS_MAX:
            self._hosts.popitem(last=False)
        return self._hosts[key]

    async def turn(self, payer: Payer, standing: Standing) -> float:
        """Returns when more may be spent; the seconds that this took."""
        started = trio.current_time()
        await _until_paid(payer.own)
        if standing is Standing.STRANGER:
            async with self._line:
                await _until_paid(self.strangers)
        return trio.current_time() - started

    async def turn_of_handshake(self, payer: Payer) -> None:
        while True:
            now = trio.current_time()
            wait = payer.own.wait(now)
            if payer.own.share is HANDSHAKES_OF_HOST:
                shared = self._handshakes.wait(now)
                wait = max(min(wait, shared), shared - MANY_HOSTS_SECONDS)
            if wait <= 0:
                return
            await trio.sleep(min(wait + WAIT_SECONDS_MIN, WAIT_SECONDS_MAX))


async def _until_paid(bucket: Bucket) -> None:
    while (wait := bucket.wait(trio.current_time())) > 0:  # noqa: ASYNC110 - more may be spent meanwhile
        await trio.sleep(min(wait + WAIT_SECONDS_MIN, WAIT_SECONDS_MAX))
