"""`python -m scenarios.strangers`: strangers exhaust ports, places, queues and streams of a peer that votes and serves people.

Four peers train, each with 1,024 descriptors. One of them serves annotators, and its sign-up is open. During each attack the
attacked peer must still decide heights, and an honest visitor must be served.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import trio

from demo.demo_peers import DemoPeer, PeerDisk
from scenarios import network
from scenarios.network import Network
from scenarios.stranger_floods import GROWTH_MB_MAX, false_batches, large_messages, memory_mb
from scenarios.trials import Attempt, Trial, arguments, conduct
from tests.fuzz.http import free_port
from tests.web.client import Person, Reply, Site
from tests.web.half_requests import connected, strangers

DESCRIPTORS = 1_024  # of each peer, soft and hard
HEIGHTS = 4  # to decide during an attack
SECONDS_MAX = 120.0  # for these heights and the honest visitor; generous for a busy machine
HALF_REQUESTS = 5_000
SILENT = 600  # connections to the port for peers, which accepts four of strangers per second
ENROLMENTS = 120
STREAMS = 150
GUESSES = 80
ANSWER_SECONDS_MAX = 60.0  # for a command on a busy machine
STRANGER = "127.0.0.66"
SERVES = 0  # number of the peer that serves
PASSPHRASE = "correct horse battery"


@dataclass
class Stage:
    peers: Network
    port: int  # of the web pages
    trial: Trial
    owner: str = "owner"  # name of an account
    streams: list[http.client.HTTPResponse] = field(default_factory=list)

    @property
    def attacked(self) -> DemoPeer:
        return self.peers.peers[SERVES]

    @property
    def site(self) -> Site:
        return Site("127.0.0.1", self.port, SECONDS_MAX)

    def of(self, host: str) -> Site:
        return replace(self.site, source=host)


Running = Callable[[Stage], contextlib.AbstractAsyncContextManager[str]]


@dataclass(frozen=True)
class Attack:
    """An attack: `begin` runs inside its block and yields a line about the strangers. `visit` returns a problem, or ""."""

    name: str
    begin: Running
    visit: Callable[[Stage], str]


async def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    return await trio.to_thread.run_sync(partial(call, *arguments), limiter=trio.CapacityLimiter(1))


# Attacks --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def half_requests(hosts: int, stage: Stage) -> AsyncIterator[str]:
    with strangers(stage.port, HALF_REQUESTS, hosts) as processes:
        count = await trio.to_thread.run_sync(connected, processes)
        yield f"began {count} requests from {hosts} addresses and ended none"


@asynccontextmanager
async def silent_peers(stage: Stage) -> AsyncIterator[str]:
    port = int(stage.attacked.address.rpartition(":")[2])
    with strangers(port, SILENT, 60, "silent") as processes:
        count = await trio.to_thread.run_sync(connected, processes)
        yield f"made {count} connections to the port for peers and said nothing"


@asynccontextmanager
async def enrolments(stage: Stage) -> AsyncIterator[str]:
    statuses = Counter[int]()
    site = stage.of(STRANGER)
    for number in range(ENROLMENTS):
        statuses[(await in_thread(Person(f"s{number}").enrol, site)).status] += 1
    yield f"signed up {ENROLMENTS} times from one address: {told(statuses)}"


@asynccontextmanager
async def guesses(stage: Stage) -> AsyncIterator[str]:
    """Try wrong passphrases for the owner's account from twenty addresses at once."""
    statuses = Counter[int]()

    async def guess(host: str) -> None:
        while True:
            reply = await in_thread(signed, stage.of(host), "in", stage.owner, "wrong horse battery")
            statuses[reply.status] += 1

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(guess, f"127.0.2.{number + 1}")
        while statuses.total() < GUESSES:  # noqa: ASYNC110
            await trio.sleep(0.05)
        yield f"guessed {statuses.total()} times from 20 addresses by then: {told(statuses)}"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def event_streams(stage: Stage) -> AsyncIterator[str]:
    opened = [await in_thread(stream, stage.of(STRANGER)) for _ in range(STREAMS)]
    yield f"asked for {STREAMS} event streams from one address: {told(Counter(reply.status for reply in opened))}"
    for reply in opened:
        reply.close()


@asynccontextmanager
async def large_requests(stage: Stage) -> AsyncIterator[str]:
    """Send large messages with true signatures of unadmitted keys, and bound the growth of the daemon."""
    before = memory_mb(stage.attacked)
    async with large_messages(await chain_of(stage), stage.attacked) as sent:
        grown = memory_mb(stage.attacked) - before
        stage.trial.require(grown <= GROWTH_MB_MAX, f"the daemon grew by {grown:.0f} MB, more than {GROWTH_MB_MAX:.0f}")
        yield f"{sent}; the daemon grew by {grown:.0f} MB"


@asynccontextmanager
async def false_signatures(stage: Stage) -> AsyncIterator[str]:
    """Send full batches of a stopped member with one false signature each."""
    member = stage.peers.peers[-1]
    await stage.peers.end(member)
    nonce = await in_thread(next_nonce, member)
    before = await refusals(stage)
    async with false_batches(await chain_of(stage), stage.attacked, member, nonce) as sent:
        counted = await refusals(stage) - before
        stage.trial.require(counted > 0, "no false signature was counted, so no batch arrived")
        yield f"{sent}; {counted} were refused as such"
    await stage.peers.restart(member)


def next_nonce(member: DemoPeer) -> int:
    with contextlib.closing(PeerDisk(member.directory)) as disk:
        return disk.state.members.members[member.identity.public].nonce + 1


@asynccontextmanager
async def pipes(stage: Stage) -> AsyncIterator[str]:
    """Use named pipes without a writer as a text and as tasks. Each command must answer, and the peer must stop on SIGTERM."""
    peer = stage.attacked
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder) / "pipe.jsonl"
        os.mkfifo(pipe)
        for words in (("train", "--data", str(pipe)), ("tasks", "import", str(pipe), "--options", "a,b")):
            command = [sys.executable, "-m", "peer.cli", *words, "--data-dir", str(peer.directory)]
            with trio.move_on_after(ANSWER_SECONDS_MAX) as patience:
                done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
                stage.trial.require(done.returncode == 2 and b"is a pipe" in done.stderr, f"{words[0]}: {done.stderr.decode()}")
            stage.trial.require(not patience.cancelled_caught, f"{words[0]} did not answer in {ANSWER_SECONDS_MAX:.0f} s")
        yield "named a pipe as a text and as tasks"
        assert peer.process is not None
        peer.process.terminate()
        ends = await stage.peers.dies(peer, network.END_SECONDS_MAX)
        stage.trial.require(ends, f"the peer did not end {network.END_SECONDS_MAX:.0f} s after SIGTERM")
        await stage.peers.end(peer)
        await stage.peers.restart(peer)


async def refusals(stage: Stage) -> int:
    """Return the attacked peer's count of refused messages with a false signature or invalid contents since its start."""
    refused = (await stage.attacked.client.stats()).refused
    return sum(count for reason, count in refused.items() if reason in ("bad-signature", "bad-batch"))


async def chain_of(stage: Stage) -> bytes:
    return bytes.fromhex((await stage.attacked.client.status()).chain_id)


# Visitors -------------------------------------------------------------------------------------------------------------


def page(stage: Stage) -> str:
    return refusal(stage.site.get("/live"), 200)


def sign_up(stage: Stage) -> str:
    return refusal(Person("visitor").enrol(stage.site), 201)


def sign_in(stage: Stage) -> str:
    return refusal(signed(stage.site, "in", stage.owner, PASSPHRASE), 201)


def listen(stage: Stage) -> str:
    with contextlib.closing(stream(stage.site)) as reply:
        return "" if reply.status == 200 and reply.readline() else f"an honest stream has status {reply.status}"


def refusal(reply: Reply, status: int) -> str:
    return "" if reply.status == status else f"an honest visitor got {reply.status}: {reply.text[:120]}"


def signed(site: Site, way: str, name: str, passphrase: str) -> Reply:
    return site.ask("POST", f"/api/v1/sign-{way}", {"name": name, "passphrase": passphrase})


def stream(site: Site) -> http.client.HTTPResponse:
    source = (site.source, 0) if site.source else None
    connection = http.client.HTTPConnection(site.host, site.port, timeout=site.seconds, source_address=source)
    connection.request("GET", "/api/v1/events", headers={"Connection": "close"})
    return connection.getresponse()


def told(statuses: Counter[int]) -> str:
    return ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))


ATTACKS: Sequence[Attack] = (
    Attack("half requests of one host", partial(half_requests, 1), page),
    Attack("half requests of 300 hosts", partial(half_requests, 300), page),
    Attack("silent connections of peers", silent_peers, page),
    Attack("sign-ups", enrolments, sign_up),
    Attack("guesses of a passphrase", guesses, sign_in),
    Attack("event streams", event_streams, listen),
    Attack("large messages of strangers", large_requests, page),
    Attack("batches with a false signature", false_signatures, page),
    Attack("named pipes as files", pipes, page),
)


# The scenario -----------------------------------------------------------------------------------------------------------


async def attacked(attack: Attack, port: int, peers: Network, trial: Trial) -> None:
    stage = Stage(peers, port, trial)
    peer = stage.attacked
    reply = await in_thread(signed, stage.site, "up", stage.owner, PASSPHRASE)
    if reply.status not in (201, 409):  # the account of an earlier attack
        reply = await in_thread(signed, stage.site, "in", stage.owner, PASSPHRASE)
    before = await peers.height(peer)
    with trio.fail_after(SECONDS_MAX + SECONDS_MAX):
        async with attack.begin(stage) as what:
            started = trio.current_time()
            problem = await in_thread(visited, attack, stage)
            trial.figures |= {"strangers": what, "page after": trio.current_time() - started}
            at_peak = await peers.height(peer)
            while await peers.height(peer) < at_peak + HEIGHTS:
                assert peer.process is not None
                if peer.process.poll() is not None:
                    trial.problems.append(f"the peer ended with status {peer.process.returncode}")
                    break
                await trio.sleep(network.POLL_SECONDS)
            after = await peers.height(peer)
    trial.figures |= {"heights before": before, "after": after, "visitor served": "no" if problem else "yes"}
    trial.require(not problem, problem)


def visited(attack: Attack, stage: Stage) -> str:
    """Return the first problem of an honest visitor, or "". A page must answer, too."""
    try:
        return page(stage) or attack.visit(stage)
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        return f"nobody answers an honest visitor: {error}"


async def run(options: argparse.Namespace) -> int:
    port = free_port()
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))  # the peers inherit it

    def dress(peer: DemoPeer) -> None:
        if peer.number == SERVES:
            peer.serves = ("--web-listen", f"127.0.0.1:{port}", "--sign-up", "open")

    attempts: list[tuple[str, Attempt]] = [
        (attack.name, partial(attacked, attack, port)) for attack in ATTACKS if options.only in attack.name
    ]
    return await conduct(options, f"strangers at a peer with {DESCRIPTORS} descriptors", attempts, dress=dress)


def main() -> int:
    parser = arguments("strangers", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="run only attacks whose names contain this text")
    options = parser.parse_args()
    return network.main(partial(run, options))


if __name__ == "__main__":
    sys.exit(main())
