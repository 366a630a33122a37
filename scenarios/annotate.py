"""`python -m scenarios.annotate --minutes 10`: 50 people annotate over HTTP while a job trains; `--abuse`: others cheat and lie.

Three of four peers serve annotators. After a third of the time one of them is killed (`kill -9`), and ten seconds later it is
started again. After two thirds another one is cut off from all others for ten seconds. A person without a reply sends the same
signature to another peer. At the end a newcomer joins by a snapshot, and its export must equal all others. `scenarios/abuse.py`
has the trials of `--abuse`.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import math
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import trio

from consensus.block import decode_block
from curation.ledger.transaction_types import StatementBatch
from curation.rpc import CurationRpc, ImportRequest
from demo import network_demo
from demo.demo_peers import DemoPeer
from ledger.ledger_state import decode_body
from protocol import codec
from protocol.api import INVITATION_DAYS
from protocol.errors import UserError
from protocol.identity import Identity
from protocol.messages import Transaction
from scenarios import abuse, network, serving
from scenarios.join import JOIN_SECONDS_MAX, Join, end, note_snapshot
from scenarios.network import SMALL_JOB, Network, Watch, journal
from scenarios.partition import between
from scenarios.proxy import Proxy, running_proxy
from scenarios.trials import COUNT, arguments, duration, report
from tests.fuzz.http import free_port
from tests.web.client import Person, Reply, Site

SERVING = (1, 2, 3)
KILLED, CUT = 1, 3
DOWN_SECONDS = 10.0
BEFORE_SECONDS = 20.0  # training without annotators
SETTLE_SECONDS_MAX = 120.0  # after the last answer; a person who forfeited a task waits a minute
LATE_SECONDS_MAX = 6.0  # a person who is late by less than this catches up with faster answers
PATIENCE_SECONDS = 90.0  # a person gives up an answer after this
P95_SECONDS_MAX = 2.0
ROUNDS_MAX = 1.3  # median round, relative to training alone
BLOCKS_MAX = 2.0  # blocks per second that hold only batches
BYTES_MAX = 1_200  # stored blocks, per answer
ANSWERED_MIN = 0.9  # share of the intended answers; one of three serving peers is down at times
RIGHT = 0.9  # share of a person's answers that are right
CALL_SECONDS_MAX = 15.0
OVER = (404, 409, 410, 422)  # no other peer would reply differently


@dataclass
class Said:
    """One answer of one person, with its outcome."""

    person: Person
    assignment: str
    task: str
    answer: tuple[int, ...]
    begun: float
    seconds: float | None = None  # until it was decided; None: no peer has confirmed it
    refusal: str = ""
    tries: int = 0


@dataclass
class Figures:
    rows: list[list[str]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def say(self, what: str, value: Any, bound: str = "", holds: bool | None = None) -> None:
        """Add a row to the table. `holds` tells whether the figure keeps its bound; None if it has no bound."""
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        self.rows.append([what, shown, bound, {None: "", True: "ok", False: "MISS"}[holds]])
        self.values[what] = value
        if holds is False:
            self.failures.append(f"{what}: {shown}, expected {bound}")


@dataclass
class Crowd:
    sites: list[Site]
    seed: int
    answers: list[Said] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)  # by reason; each retry counts
    threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(80))

    async def ask(self, call: Any, *arguments: Any) -> Reply | None:
        """Return the reply, or None if no peer answers."""
        try:
            reply: Reply = await trio.to_thread.run_sync(partial(call, *arguments), limiter=self.threads)
        except (OSError, http.client.HTTPException) as error:
            self.refusals[type(error).__name__] += 1
            return None
        if reply.status >= 400:
            self.refusals[f"{reply.status} {reply.code}"] += 1
        return reply

    async def person(self, number: int, pause: float, end: float) -> None:
        random, home = Random(f"{self.seed}/{number}"), number % len(self.sites)
        person = Person(f"person {number}", hashlib.sha256(f"{self.seed}/{number}".encode()).digest())
        # Each person has an address of its own, because about thirty can enrol from one address.
        at_home = replace(self.sites[home], source=f"127.1.{number // 250}.{1 + number % 250}")
        while (reply := await self.ask(person.enrol, at_home)) is None or reply.status != 201:  # noqa: ASYNC110
            await trio.sleep(1.0)
        wanted = trio.current_time() + random.uniform(0, pause)  # time of the next answer
        while trio.current_time() < end:
            site = self.sites[home]
            reply = await self._with_session(person, site, lambda site=site: person.tasks(site, 4))
            if reply is None or reply.status != 200 or not reply.body["tasks"]:
                home = (home + 1) % len(self.sites)
                await trio.sleep(0.5)
                continue
            for task in reply.body["tasks"]:
                if trio.current_time() >= end:
                    return
                await trio.sleep_until(wanted)
                home = await self._answer(person, home, task, random)
                wanted = max(wanted + pause * random.uniform(0.5, 1.5), trio.current_time() - LATE_SECONDS_MAX)

    async def _with_session(self, person: Person, site: Site, call: Any) -> Reply | None:
        for anew in (False, True):
            try:
                await trio.to_thread.run_sync(partial(person.token, site, anew=anew), limiter=self.threads)
            except (OSError, http.client.HTTPException, KeyError, ValueError):
                return None
            reply = await self.ask(call)
            if reply is None or reply.status != 401:
                return reply
        return reply

    async def _answer(self, person: Person, home: int, task: dict[str, Any], random: Random) -> int:
        """Submit an answer, with retries at other sites. Return the site for the person's next request."""
        truth = int(task["text"].split()[-1]) % 2
        answer = (truth if random.random() < RIGHT else 1 - truth,)
        made = Said(person, task["assignment"], task["task"], answer, trio.current_time())
        self.answers.append(made)
        salt = random.randbytes(16)
        while trio.current_time() < made.begun + PATIENCE_SECONDS:
            site = self.sites[home]
            made.tries += 1
            reply = await self._with_session(
                person, site, lambda site=site: person.submit(site, made.assignment, answer, salt)
            )  # fmt: skip
            if reply is not None and reply.status in (200, 201):
                made.seconds, made.refusal = trio.current_time() - made.begun, ""
                return home
            made.refusal = "silence" if reply is None else f"{reply.status}" + (f" {reply.code}" if reply.status >= 400 else "")
            if reply is not None and reply.status in OVER:
                return home
            home = (home + 1) % len(self.sites)
            await trio.sleep(0.3)
        return home


async def annotate(options: argparse.Namespace) -> int:
    ports = {number: free_port() for number in SERVING}

    def dress(proxy: Proxy, peer: DemoPeer) -> None:
        proxy.dress(peer)
        if peer.number in ports:
            serving.dress(peer, ports[peer.number])

    seconds, figures = options.minutes * 60, Figures()
    async with running_proxy() as proxy:
        running = network.running(options.peers, seed=options.seed, folder=options.keep, dress=partial(dress, proxy))
        async with running as peers:
            await peers.train({**SMALL_JOB, "seed": str(options.seed)})
            project = await _import(peers, round(options.people * options.rate * options.minutes))
            watch = Watch(peers.peers[0])
            crowd = Crowd([Site("127.0.0.1", port, CALL_SECONDS_MAX) for port in ports.values()], options.seed)
            await trio.sleep(BEFORE_SECONDS)
            await watch.more(0.0)
            figures.say("load of the machine before", os.getloadavg()[0])
            began = trio.current_time()
            since, height = watch.events[-1].at_ms / 1000, peers.decided(peers.peers[0])
            async with trio.open_nursery() as nursery:
                for number in range(options.people):
                    nursery.start_soon(crowd.person, number, 60 / options.rate, began + seconds)
                nursery.start_soon(_hurt, peers, proxy, began, seconds)
                nursery.start_soon(_watch, watch, began + seconds)
            figures.say("load of the machine at the end", os.getloadavg()[0])
            stored = (height, peers.decided(peers.peers[0]))
            wanted = options.people * options.rate
            rate = sum(made.seconds is not None for made in crowd.answers) / options.minutes
            figures.say("answers a minute", rate, f">= {ANSWERED_MIN * wanted:g} of {wanted:g}", rate >= ANSWERED_MIN * wanted)
            exports = await _exports(peers, crowd, project, figures)
            await _judge(crowd, exports, figures)
            _pace(watch, since, figures)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(peers.stop)
            figures.failures += peers.failures()
            _stored(peers.peers[0], *stored, figures)
    figures.say("refusals", ", ".join(f"{count} x {what}" for what, count in crowd.refusals.most_common()) or 0)
    title = f"{options.people} people, {options.peers} peers, {options.minutes:g} minutes, seed {options.seed}"
    return report(options, title, ["what", "figure", "bound", ""], figures.rows, figures.failures, figures.values)


async def _import(peers: Network, tasks: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tasks.jsonl"
        file.write_text("".join(json.dumps({"text": f"Is this number odd: {number}"}) + "\n" for number in range(tasks)))
        client: CurationRpc = peers.demo.watched.client  # type: ignore[assignment]
        request = ImportRequest(str(file), "parity", "", "label", ("even", "odd"), False, 7, 1, "", False)
        return (await client.import_tasks(request)).project


async def _hurt(peers: Network, proxy: Proxy, began: float, seconds: float) -> None:
    killed = peers.peers[KILLED]
    await trio.sleep_until(began + seconds / 3)
    peers.kill(killed)
    await trio.sleep(DOWN_SECONDS)
    await peers.restart(killed)
    await trio.sleep_until(began + seconds * 2 / 3)
    rest = [peer for peer in peers.peers if peer.number != CUT]
    proxy.cut(between([[peers.peers[CUT]], rest]))
    await trio.sleep(DOWN_SECONDS)
    proxy.heal()


async def _watch(watch: Watch, end: float) -> None:
    while trio.current_time() < end:
        await watch.more(0.0)
        await trio.sleep(1.0)


# Afterwards -----------------------------------------------------------------------------------------------------------


async def _exports(peers: Network, crowd: Crowd, project: str, figures: Figures) -> list[dict[str, Any]]:
    """Return the exported tasks, which must be equal at all peers and a newcomer once all answers are opened."""
    texts: list[str] = []
    with tempfile.TemporaryDirectory() as folder, trio.move_on_after(SETTLE_SECONDS_MAX):
        while len(texts) <= len(SERVING) or len(set(texts)) > 1 or await _opening(crowd):
            texts = [reply.text for site in crowd.sites if (reply := await crowd.ask(site.export, project)) is not None]
            texts.append(await _export(peers.peers[0], project, Path(folder)))
    different = len(set(texts))
    figures.say("exports of peers that differ", different - 1, "0", len(texts) > len(SERVING) and different == 1)
    async with _newcomer(peers) as newcomer:
        ours, theirs = texts[-1], ""
        with tempfile.TemporaryDirectory() as folder, trio.move_on_after(JOIN_SECONDS_MAX):
            await network.holds(partial(note_snapshot, newcomer, taken := Join(0)), JOIN_SECONDS_MAX)
            while theirs != ours:  # it fetches the texts of the tasks, and some answers may still be opened
                theirs = await _export(newcomer, project, Path(folder))
                ours = await _export(peers.peers[0], project, Path(folder))
    others = len(set(ours.splitlines()) ^ set(theirs.splitlines()))
    shown = f"{others} lines differ, snapshot of {taken.snapshot_height}"
    figures.say("a newcomer's export", shown, "0 lines", theirs == ours and taken.snapshot_seconds is not None)
    return [json.loads(line) for line in ours.splitlines()]


async def _export(peer: DemoPeer, project: str, folder: Path) -> str:
    """Return the peer's export, or "" if the peer does not know the project yet."""
    client: CurationRpc = peer.client  # type: ignore[assignment]
    path = folder / peer.name
    path.unlink(missing_ok=True)
    try:
        await client.export_tasks(project, str(path))
    except UserError:
        await trio.sleep(0.5)
        return ""
    return path.read_text(encoding="utf-8")


@asynccontextmanager
async def _newcomer(peers: Network) -> AsyncIterator[DemoPeer]:
    """Start a newcomer that serves annotators, and therefore fetches the tasks."""
    folder = peers.demo.folder / "newcomer"
    folder.mkdir()
    invitation = await peers.demo.watched.client.create_invitation(INVITATION_DAYS)
    place = len(peers.peers)
    newcomer = DemoPeer(place, Identity.generate(), folder, trains=False, lies=False, threads=1, without_avx=False)
    newcomer.serves = ("--web-listen", "127.0.0.1:0")
    try:
        network_demo.launch_peer(peers.demo, newcomer, ",".join(peer.address for peer in peers.peers), ("join", invitation))
        await network_demo.wait_until_ready(newcomer)
        yield newcomer
    finally:
        with trio.CancelScope(shield=True):
            await end(peers, newcomer)


async def _opening(crowd: Crowd) -> bool:
    """Return whether the decided state still changes, so that some task is still on its way."""
    stats = [await crowd.ask(crowd.sites[0].get, "/api/stats")]
    await trio.sleep(3.0)
    stats.append(await crowd.ask(crowd.sites[0].get, "/api/stats"))
    shown = [(found.body["annotations"], found.body["settled"]) for found in stats if found is not None]
    return len(shown) < 2 or shown[0] != shown[1]


async def _judge(crowd: Crowd, exports: Sequence[dict[str, Any]], figures: Figures) -> None:
    acknowledged = [made for made in crowd.answers if made.seconds is not None]
    votes = Counter((task["task"], vote["annotator"]) for task in exports for vote in task["votes"])
    exported = {(task["task"], vote["annotator"]): tuple(vote["answer"]) for task in exports for vote in task["votes"]}
    states: Counter[str] = Counter()
    lost = changed = 0
    for made in acknowledged:
        reply = await crowd.ask(crowd.sites[0].annotation, made.assignment)
        state = "unknown" if reply is None or reply.status != 200 else reply.body["state"]
        states[state] += 1
        lost += state in ("unknown", "forfeited")
        changed += exported.get((made.task, made.person.key.hex()), made.answer) != made.answer
    decided = await crowd.ask(crowd.sites[0].get, "/api/stats")
    assert decided is not None
    unclear = len(crowd.answers) - len(acknowledged)
    more = decided.body["annotations"] - len(acknowledged)
    doubled = sum(count - 1 for count in votes.values()) + max(0, more - unclear)
    seconds = sorted(made.seconds for made in acknowledged if made.seconds is not None)
    once = sorted(made.seconds for made in acknowledged if made.seconds is not None and made.tries == 1)
    right = sum(task["label"] == [int(task["text"].split()[-1]) % 2] for task in exports)
    refused = Counter(made.refusal for made in crowd.answers if made.refusal)
    figures.say("answers", len(crowd.answers))
    figures.say("decided, as somebody was told", len(acknowledged))
    figures.say("not decided", ", ".join(f"{count} x {what}" for what, count in refused.items()) or 0)
    figures.say("decided in all", decided.body["annotations"])
    figures.say("states", ", ".join(f"{count} {state}" for state, count in states.items()))
    for what, count in (("lost", lost), ("changed", changed), ("doubled", doubled)):
        figures.say(what, count, "0", count == 0)
    p95 = _part(seconds, 0.95)
    figures.say("submit to decided, p95, s", p95, f"< {P95_SECONDS_MAX:g}", p95 < P95_SECONDS_MAX)
    figures.say("the same, p50 p99 max", " ".join(f"{_part(seconds, part):.2f}" for part in (0.5, 0.99, 1.0)))
    figures.say("the same, p95 of those that one peer answered at once", _part(once, 0.95))
    figures.say("tasks settled, right", f"{len(exports)}, {right / max(1, len(exports)):.3f}")


def _part(seconds: Sequence[float], part: float) -> float:
    return seconds[min(len(seconds) - 1, int(len(seconds) * part))] if seconds else math.inf


def _pace(watch: Watch, since: float, figures: Figures) -> None:
    times = [at for _, at in watch.rounds()]
    before = [b - a for a, b in pairwise(times) if b < since]
    during = [b - a for a, b in pairwise(times) if a >= since]
    if not before or not during:
        figures.failures.append("too few rounds for a comparison")
        return
    alone, beside = statistics.median(before), statistics.median(during)
    figures.say("median round before and during, s", f"{alone:.2f} {beside:.2f}")
    figures.say("times as long", beside / alone, f"<= {ROUNDS_MAX:g}", beside / alone <= ROUNDS_MAX)


def _stored(peer: DemoPeer, after: int, last: int, figures: Figures) -> None:
    """Measure the share of annotation in this peer's blocks: blocks that hold only batches, and the batches in other blocks."""
    size = answers = alone = 0
    times: list[int] = []
    with journal(peer) as database:
        rows = database.execute(
            "SELECT block, certificate FROM blocks WHERE height > ? AND height <= ?", (after, last)
        ).fetchall()
    for data, certificate in rows:
        block = decode_block(data)
        body = decode_body(block.body)
        opened = [(signed, codec.decode_message(signed.body, (Transaction,))) for signed in body.transactions]
        batches = [(signed, said) for signed, said in opened if said.kind == "curation/statements"]
        answers += sum(len(codec.decode(StatementBatch, said.content).commits) for _, said in batches)
        is_alone = bool(batches) and len(batches) == len(opened) and not body.round_certificates and not body.evidence
        alone += is_alone
        size += len(data) + len(certificate) if is_alone else sum(len(codec.encode(signed)) for signed, _ in batches)
        times.append(block.time_ms)
    blocks, each = alone / ((times[-1] - times[0]) / 1_000), size / max(1, answers)
    figures.say("blocks for annotation alone, a second", blocks, f"<= {BLOCKS_MAX:g}", blocks <= BLOCKS_MAX)
    figures.say("bytes of stored blocks, an answer", round(each), f"<= {BYTES_MAX}", each <= BYTES_MAX)


def main() -> int:
    parser = arguments("annotate", __doc__)
    parser.add_argument("--abuse", action="store_true", help="try each way to cheat once")
    parser.add_argument("--minutes", type=duration, default=10.0, metavar="M", help="minutes of annotation")
    parser.add_argument("--people", type=COUNT, default=50, metavar="N", help="number of annotators")
    parser.add_argument("--rate", type=duration, default=20.0, metavar="R", help="answers of each annotator per minute")
    options = parser.parse_args()
    return network.main(partial(abuse.run if options.abuse else annotate, options))


if __name__ == "__main__":
    sys.exit(main())
