"""`python -m scenarios.annotate --minutes 10`: 50 people annotate over HTTP while a job trains; `--abuse`: others cheat and lie.

Three of four peers serve. At a third of the time one of them is killed (`kill -9`) and started again ten seconds later. At two
thirds another one is cut off from all others for ten seconds. Whoever gets no answer asks another peer, with the same signature.
The abuse is in `scenarios/abuse.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import trio

from curation.calls import CurationCalls, ImportRequest
from peer.demo.cast import DemoPeer
from scenarios import abuse, network, serving
from scenarios.network import SMALL_JOB, Network, Watch
from scenarios.partition import between
from scenarios.proxy import Proxy, running_proxy
from scenarios.trials import COUNT, arguments, duration, report
from tests.fuzz.http import free_port
from tests.web.client import Person, Reply, Site

SERVING = (1, 2, 3)
KILLED, CUT = 1, 3
DOWN_SECONDS = 10.0
BEFORE_SECONDS = 20.0  # of training alone
SETTLE_SECONDS_MAX = 120.0  # after the last answer: who forfeited has a minute
PATIENCE_SECONDS = 90.0  # of a person with one answer
P95_SECONDS_MAX = 2.0
ROUNDS_MAX = 1.3  # times as long
RIGHT = 0.9  # of a person's answers
CALL_SECONDS_MAX = 15.0
OVER = (404, 409, 410, 422)  # no other peer would say otherwise


@dataclass
class Said:
    """One answer of one person, and what became of it."""

    person: Person
    assignment: str
    task: str
    answer: tuple[int, ...]
    begun: float
    seconds: float | None = None  # until it was decided; None: nobody said so
    refusal: str = ""
    tries: int = 0


@dataclass
class Crowd:
    sites: list[Site]
    seed: int
    answers: list[Said] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)  # of calls, those that were tried again included
    threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(80))

    async def ask(self, call: Any, *arguments: Any) -> Reply | None:
        """None: nobody answers."""
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
        while (reply := await self.ask(person.enrol, self.sites[home])) is None or reply.status != 201:  # noqa: ASYNC110
            await trio.sleep(1.0)
        await trio.sleep(random.uniform(0, pause))
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
                begun = trio.current_time()
                home = await self._answer(person, home, task, random)
                await trio.sleep(max(0.0, pause * random.uniform(0.5, 1.5) - (trio.current_time() - begun)))

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
        """The site that the person asks next."""
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

    seconds, failures, figures = options.minutes * 60, list[str](), dict[str, Any]()
    async with running_proxy() as proxy:
        running = network.running(options.peers, seed=options.seed, folder=options.keep, dress=partial(dress, proxy))
        async with running as peers:
            await peers.train({**SMALL_JOB, "seed": str(options.seed)})
            project = await _import(peers, round(options.people * options.rate * options.minutes))
            watch, crowd = (
                Watch(peers.peers[0]),
                Crowd([Site("127.0.0.1", p, CALL_SECONDS_MAX) for p in ports.values()], options.seed),
            )
            await trio.sleep(BEFORE_SECONDS)
            await watch.more(0.0)
            began = trio.current_time()
            since = watch.events[-1].at_ms / 1000
            async with trio.open_nursery() as nursery:
                for number in range(options.people):
                    nursery.start_soon(crowd.person, number, 60 / options.rate, began + seconds)
                nursery.start_soon(_hurt, peers, proxy, began, seconds)
                nursery.start_soon(_watch, watch, began + seconds)
            figures["answers a minute"] = round(sum(s.seconds is not None for s in crowd.answers) / (options.minutes), 1)
            exports = await _exports(peers, crowd, project, failures)
            await _judge(crowd, exports, failures, figures)
            _pace(watch, since, failures, figures)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(peers.stop)
            failures += peers.failures()
    figures["refusals"] = ", ".join(f"{count} x {what}" for what, count in crowd.refusals.most_common())
    title = f"{options.people} people, {options.peers} peers, {options.minutes:g} minutes, seed {options.seed}"
    return report(options, title, ["what", "figure"], [[name, str(value)] for name, value in figures.items()], failures, figures)


async def _import(peers: Network, tasks: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tasks.jsonl"
        file.write_text("".join(json.dumps({"text": f"Is this number odd: {number}"}) + "\n" for number in range(tasks)))
        client: CurationCalls = peers.demo.watched.client  # type: ignore[assignment]
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


async def _exports(peers: Network, crowd: Crowd, project: str, failures: list[str]) -> list[dict[str, Any]]:
    """The tasks as all peers export them once everything is opened that can be."""
    texts: list[str] = []
    with tempfile.TemporaryDirectory() as folder, trio.move_on_after(SETTLE_SECONDS_MAX):
        for number in range(1_000):
            texts = [reply.text for site in crowd.sites if (reply := await crowd.ask(site.export, project)) is not None]
            client: CurationCalls = peers.peers[0].client  # type: ignore[assignment]
            path = Path(folder) / str(number)
            await client.export_tasks(project, str(path))
            texts.append(path.read_text(encoding="utf-8"))
            if len(texts) == len(SERVING) + 1 and len(set(texts)) == 1 and not await _opening(crowd):
                break
            await trio.sleep(2.0)
    if len(texts) != len(SERVING) + 1 or len(set(texts)) != 1:
        failures.append(f"exports of {len(texts)} peers are {len(set(texts))} different ones")
    return [json.loads(line) for line in texts[-1].splitlines()]


async def _opening(crowd: Crowd) -> bool:
    """Whether some task is on the way: what is decided still changes."""
    stats = [await crowd.ask(crowd.sites[0].get, "/api/stats")]
    await trio.sleep(3.0)
    stats.append(await crowd.ask(crowd.sites[0].get, "/api/stats"))
    shown = [(found.body["annotations"], found.body["settled"]) for found in stats if found is not None]
    return len(shown) < 2 or shown[0] != shown[1]


async def _judge(crowd: Crowd, exports: Sequence[dict[str, Any]], failures: list[str], figures: dict[str, Any]) -> None:
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
    p50, p95, p99 = (seconds[min(len(seconds) - 1, int(len(seconds) * part))] for part in (0.5, 0.95, 0.99))
    once = sorted(made.seconds for made in acknowledged if made.seconds is not None and made.tries == 1)
    right = sum(task["label"] == [int(task["text"].split()[-1]) % 2] for task in exports)
    figures |= {
        "answers": len(crowd.answers),
        "decided, as somebody was told": len(acknowledged),
        "not decided": ", ".join(f"{n} x {what}" for what, n in Counter(m.refusal for m in crowd.answers if m.refusal).items())
        or 0,
        "decided in all": decided.body["annotations"],
        "states": ", ".join(f"{count} {state}" for state, count in states.items()),
        "lost": lost,
        "changed": changed,
        "doubled": doubled,
        "submit to decided, p50 p95 p99 max, s": f"{p50:.2f} {p95:.2f} {p99:.2f} {seconds[-1]:.2f}",
        "p95 of those that one peer answered at once, s": f"{once[int(len(once) * 0.95)]:.2f} of {len(once)}",
        "tasks settled, right": f"{len(exports)}, {right / max(1, len(exports)):.3f}",
    }
    failures += [
        f"{count} answers were {what}" for what, count in (("lost", lost), ("changed", changed), ("doubled", doubled)) if count
    ]
    if p95 >= P95_SECONDS_MAX:
        failures.append(f"p95 from submission to decision is {p95:.2f} s, not below {P95_SECONDS_MAX} s")


def _pace(watch: Watch, since: float, failures: list[str], figures: dict[str, Any]) -> None:
    times = [at for _, at in watch.rounds()]
    before = [b - a for a, b in pairwise(times) if b < since]
    during = [b - a for a, b in pairwise(times) if a >= since]
    if not before or not during:
        failures.append("too few rounds to compare")
        return
    ratio = statistics.median(during) / statistics.median(before)
    figures["median round before and during, s"] = (
        f"{statistics.median(before):.2f} {statistics.median(during):.2f}: x {ratio:.2f}"
    )
    if ratio > ROUNDS_MAX:
        failures.append(f"rounds took {ratio:.2f} times as long, at most {ROUNDS_MAX} is allowed")


def main() -> int:
    parser = arguments("annotate", __doc__)
    parser.add_argument("--abuse", action="store_true", help="cheat and lie, once in each way")
    parser.add_argument("--minutes", type=duration, default=10.0, metavar="M", help="how long people annotate")
    parser.add_argument("--people", type=COUNT, default=50, metavar="N", help="annotators")
    parser.add_argument("--rate", type=duration, default=20.0, metavar="R", help="answers of each in a minute")
    options = parser.parse_args()
    return network.main(partial(abuse.run if options.abuse else annotate, options))


if __name__ == "__main__":
    sys.exit(main())
