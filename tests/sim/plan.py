"""Faults of one history: a seed expands into a numbered list of faults, so that a shrinker can remove some.

Swarm testing (Groce et al. 2012): every seed draws which kinds of fault it has at all, and how strong each is. Histories in which
every kind of fault occurs are all alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from protocol.limits import CLOCK_AHEAD_SECONDS
from tests.sim.client_runs import LOST_MS_MAX

BLOCKS = 50  # decided by everybody before a history ends
TROUBLE_SECONDS = (5.0, 12.0)  # virtual; then the network heals
ED25519_EVERY = 50  # seeds; every such seed signs with real keys, decodes all messages anew and shares no computation


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, from `at` until `until` (virtual seconds after the start)."""

    number: int
    kind: str
    at: float
    until: float
    nodes: tuple[int, ...] = ()  # peers by number; empty: all peers
    amount: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        peers = ",".join(map(str, self.nodes)) or "all"
        when = f"{self.at:6.2f}–{self.until:6.2f} s"
        return f"#{self.number:<3} {when}  {self.kind:<11} peers {peers:<8} {self.amount:.3f} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    n: int  # founding voters, peers 0 … n−1
    joiners: int  # more peers, n …, that come later
    successors: int  # more peers after those, each the new key of a founder
    delay: tuple[float, float]  # seconds one way, of a calm network
    heal_at: float
    faults: tuple[Fault, ...]
    blocks: int = BLOCKS
    ed25519: bool = False
    shares: bool = True  # peers share the results of equal computations: much faster, and the same history
    work: float = 1.0  # average number of transactions in a block
    jobs: bool = True
    minute_ms: int = 0  # of curation; 0: the network has none
    second_job: bool = False  # beside the first one
    gateways: tuple[int, ...] = ()  # peers that serve client runs; none: the network has no such module
    lost_ms_max: int = LOST_MS_MAX  # lost time of a gateway whose steps are not late
    keeps_links: bool = False  # links that lost no message stay connected: delayed messages arrive after healing
    wake: float = 0.0  # seconds from the first message to a peer's turn, which includes messages that arrive meanwhile

    def keep(self, numbers: Sequence[int]) -> Plan:
        """Return the plan with only these faults."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault.number in numbers))

    def of(self, kind: str) -> tuple[Fault, ...]:
        return tuple(fault for fault in self.faults if fault.kind == kind)

    @property
    def liars(self) -> dict[int, str]:
        """Strategies of the liars, by peer."""
        return {fault.nodes[0]: fault.detail for fault in self.of("liar")}

    @property
    def peers(self) -> int:
        return self.n + self.joiners + self.successors


def calm(seed: int = 0, n: int = 4, liars: Sequence[str] = (), **fixed: object) -> Plan:
    """Return a network without faults, except that its first peers lie."""
    faults = tuple(Fault(i, "liar", 0.0, 0.0, (i,), detail=name) for i, name in enumerate(liars))
    plan = Plan(seed, n, 0, 0, (0.005, 0.01), 1.0, faults)
    return replace(plan, **fixed)  # type: ignore[arg-type]


def faults_tolerated(n: int) -> int:
    return (n - 1) // 3


@dataclass
class Draw:
    """The state of one expansion."""

    random: random.Random
    n: int
    peers: int
    end: float
    liars: set[int]  # nothing is expected of them, so further faults of theirs would be wasted
    faults: list[Fault]

    def add(self, kind: str, at: float, until: float, nodes: tuple[int, ...] = (), amount: float = 0.0, detail: str = "") -> None:
        self.faults.append(Fault(len(self.faults), kind, round(at, 3), round(until, 3), nodes, round(amount, 4), detail))

    def span(self, low: float, high: float) -> tuple[float, float]:
        at = self.random.uniform(0.0, self.end * 0.95)
        return at, min(self.end, at + self.random.uniform(low, high))

    def peer(self) -> int:
        return self.random.randrange(self.peers)

    def one(self) -> tuple[int, ...]:
        return (self.peer(),)

    def pair(self) -> tuple[int, int]:
        one, other = self.random.sample(range(self.peers), 2)
        return one, other

    def some(self) -> tuple[int, ...]:
        """Draw all peers, or a few."""
        if self.random.random() < 0.5:
            return ()
        return tuple(sorted(self.random.sample(range(self.peers), self.random.randint(1, max(1, self.peers // 2)))))

    def side(self) -> tuple[int, ...]:
        return tuple(sorted(self.random.sample(range(self.peers), self.random.randint(1, max(1, self.peers // 2)))))


Maker = Callable[[Draw], None]


def _spell(kind: str, low: float, high: float, whom: Callable[[Draw], tuple[int, ...]], amounts: Sequence[float] = ()) -> Maker:
    """Draw a fault of `low` to `high` seconds, with one of these amounts."""

    def make(draw: Draw) -> None:
        draw.add(kind, *draw.span(low, high), whom(draw), draw.random.choice(amounts) if amounts else 0.0)

    return make


def _partition(draw: Draw) -> None:
    """Draw a partition. `amount` 1: the peers notice their broken links; 0: messages are lost silently."""
    draw.add("partition", *draw.span(0.5, 6), draw.side(), float(draw.random.random() < 0.5))


def _crash(draw: Draw) -> None:
    """Draw a crash. `amount`: share of the current append that reaches the disk; `detail` "garbled": its last byte is wrong."""
    share = draw.random.choice((0.0, 1.0, draw.random.random(), draw.random.random()))
    draw.add("crash", *draw.span(0.1, 4), (draw.peer(),), share, draw.random.choice(("", "garbled")))


def _crash_all(draw: Draw) -> None:
    at, until = draw.span(0.1, 2)
    for peer in range(draw.peers):
        draw.add("crash", at, until + draw.random.uniform(0, 0.5), (peer,), draw.random.random())


SKEW_ACCEPTED = 1.5  # seconds: the largest that is drawn below what voters accept of each other


def _skew(draw: Draw) -> None:
    """Draw a clock skew that other peers accept, or a larger one."""
    draw.add("skew", 0.0, draw.end, (draw.peer(),), draw.random.choice((-1.5, -0.5, 0.5, 1.5, 4.0, -10.0, 3_600.0)))


def _leave(draw: Draw) -> None:
    draw.add("leave", *draw.span(0, 0), (draw.random.randrange(draw.n),))


def _rotate(draw: Draw) -> None:
    """Draw a rotation: the first peer continues with the key of the second."""
    draw.add("rotate", *draw.span(0, 0), (draw.random.randrange(draw.n), draw.peers))


KINDS: dict[str, tuple[Maker, int]] = {  # kind -> (maker, most faults of it in one history)
    "loss": (_spell("loss", 0.5, 6, Draw.some, (0.02, 0.1, 0.3, 0.6)), 4),
    "duplicate": (_spell("duplicate", 0.5, 8, Draw.some, (0.05, 0.3, 0.9)), 3),
    "reorder": (_spell("reorder", 0.5, 8, Draw.some, (0.05, 0.3, 1.5)), 3),
    "delay": (_spell("delay", 0.5, 5, Draw.some, (0.1, 0.4, 1.2)), 3),
    "one-way": (_spell("one-way", 0.3, 6, Draw.pair), 6),
    "partition": (_partition, 4),
    "flap": (_spell("flap", 1, 6, Draw.side, (0.15, 0.5, 1.1)), 2),
    "clog": (_spell("clog", 0.3, 5, Draw.pair), 5),
    "break": (_spell("break", 0.0, 0.5, Draw.pair), 6),
    "slow": (_spell("slow", 1, 8, Draw.one, (0.005, 0.03, 0.1)), 3),
    "slow-disk": (_spell("slow-disk", 1, 8, Draw.some, (0.02, 0.1, 0.6)), 3),
    "crash": (_crash, 6),
    "crash-all": (_crash_all, 1),
    "fsync": (_spell("fsync", 0.5, 4, Draw.one), 2),
    "skew": (_skew, 2),
}
KIND_PROBABILITY = 0.35  # that a history has faults of one kind
SECOND_JOB_PROBABILITY = 0.15  # where there is one at all


STOP_PROBABILITY = 0.3  # where there is a job
CLOCK_PROBABILITY = 0.3
TOGETHER_PROBABILITY = 0.2  # where nobody else is away, or lies
KEEPS_LINKS_PROBABILITY = 0.5
CURATES_PROBABILITY = 0.2
BACK_PROBABILITY = 0.25  # where there is a job
RUNS_PROBABILITY = 0.2  # that a network has client runs
GATEWAYS_MAX = 3
LYING_GATEWAYS_SHARE = 0.5  # of the histories with liars and runs
MINUTE_MS = 500  # some heights


def expand(seed: int, n: int = 4, strategies: Sequence[str] = (), **fixed: object) -> Plan:
    """Return the plan of one seed. Liars draw from the names in `strategies`."""
    plan = first_draws(seed, n, strategies)
    source = random.Random(f"folkmoot more {seed} {n}")
    draw = Draw(source, n, plan.n + plan.joiners, plan.heal_at, set(plan.liars), list(plan.faults))
    if plan.jobs and source.random() < STOP_PROBABILITY:
        _stop(draw)
    if source.random() < TOGETHER_PROBABILITY and n > 2 and not draw.liars and not _away(draw.faults):
        _leave_together(draw)
    if source.random() < CLOCK_PROBABILITY:
        _clock(draw)
    plan = replace(plan, faults=tuple(draw.faults), keeps_links=source.random() < KEEPS_LINKS_PROBABILITY)
    if random.Random(f"folkmoot curates {seed} {n}").random() < CURATES_PROBABILITY:
        plan = replace(plan, minute_ms=MINUTE_MS)
    source = random.Random(f"folkmoot goes back {seed} {n}")
    if plan.jobs and source.random() < BACK_PROBABILITY:
        at, amount = source.uniform(0.2, 1.0) * plan.heal_at, float(source.random() < 0.7)
        plan = replace(plan, faults=(*plan.faults, Fault(len(plan.faults), "back", at, at, (), amount)))
    source = random.Random(f"folkmoot client runs {seed} {n}")
    if source.random() < RUNS_PROBABILITY:
        serving = source.sample(range(n), source.randint(1, min(n, GATEWAYS_MAX)))
        also = plan.liars if source.random() < LYING_GATEWAYS_SHARE else ()  # it withholds data
        plan = replace(plan, gateways=tuple(sorted({*serving, *also})))
    return replace(plan, **fixed)  # type: ignore[arg-type]


def _away(faults: Sequence[Fault]) -> bool:
    """Return True if a peer counts as one of the f faulty ones, or leaves."""
    return any(fault.kind in ("leave", "rollback", "damage", "wrong-state") for fault in faults)


def _stop(draw: Draw) -> None:
    """Draw a stop: the author of a job ends it, and begins another one."""
    draw.add("stop", *draw.span(0, 0))


def _leave_together(draw: Draw) -> None:
    """Let several peers leave at once; at least two stay. If the rest tolerates no fault, no clock is far off."""
    at, _ = draw.span(0, 0)
    for peer in sorted(draw.random.sample(range(draw.n), min(draw.random.randint(2, max(2, draw.n // 2)), draw.n - 2))):
        draw.add("leave", at, at, (peer,))
    for number, fault in enumerate(draw.faults):
        if fault.kind == "skew" and abs(fault.amount) > CLOCK_AHEAD_SECONDS:
            draw.faults[number] = replace(fault, amount=math.copysign(SKEW_ACCEPTED, fault.amount))


def _clock(draw: Draw) -> None:
    """Draw a restart with a changed clock: a clock that was far off is set right, any other a little wrong."""
    peer = draw.random.randrange(draw.n)
    before = sum(fault.amount for fault in draw.faults if fault.kind == "skew" and fault.nodes == (peer,))
    amount = draw.random.choice((-1.5, -0.5, 0.5, 1.5)) if not before else -before
    draw.add("clock", *draw.span(0.1, 2), (peer,), amount)


def first_draws(seed: int, n: int = 4, strategies: Sequence[str] = (), **fixed: object) -> Plan:
    """Draw the faults of the first generator. Later kinds have their own random source, so these histories stay the same."""
    source = random.Random(f"folkmoot {seed} {n}")
    end = source.uniform(*TROUBLE_SECONDS)
    joiners = source.choice((0, 0, 1, 2)) if n < 10 else source.choice((0, 0, 1))
    draw = Draw(source, n, n + joiners, end, set(), [])
    budget = faults_tolerated(n)
    budget -= _draw_liars(draw, budget, strategies)
    for maker, most in KINDS.values():
        if source.random() < KIND_PROBABILITY:
            for _ in range(source.randint(1, most)):
                maker(draw)
    rotates = _draw_changes(draw, joiners)
    _draw_sicknesses(draw, budget)
    _draw_retirement(draw, seed)
    _set_clocks_right(draw)
    low = source.choice((0.001, 0.005, 0.02))
    plain = seed % ED25519_EVERY == ED25519_EVERY - 1
    plan = Plan(
        seed,
        n,
        joiners,
        int(rotates),
        (low, low * source.choice((1.5, 4.0))),
        round(end, 3),
        tuple(draw.faults),
        ed25519=plain,
        shares=not plain,
        work=source.choice((0.3, 1.0, 2.0)),
        jobs=source.random() < 0.8,
        wake=source.choice((0.0, 0.001, 0.003)),
    )
    plan = replace(plan, second_job=plan.jobs and source.random() < SECOND_JOB_PROBABILITY)
    return replace(plan, **fixed)  # type: ignore[arg-type]


def _draw_liars(draw: Draw, budget: int, strategies: Sequence[str]) -> int:
    if not strategies or draw.random.random() < 0.4:
        return 0
    count = draw.random.randint(1, budget) if budget else 0
    for peer in sorted(draw.random.sample(range(draw.n), count)):
        draw.liars.add(peer)
        draw.add("liar", 0.0, draw.end, (peer,), detail=draw.random.choice(sorted(strategies)))
    return count


def _draw_changes(draw: Draw, joiners: int) -> bool:
    """Draw early joins, a leave that keeps the liars tolerable, and a rotation. Return True if a key is rotated."""
    for joiner in range(joiners):
        draw.add("join", draw.random.uniform(0.2, draw.end * 0.7), draw.end, (draw.n + joiner,))
    if draw.random.random() < 0.25 and faults_tolerated(draw.n - 1) >= len(draw.liars) and draw.n > 1:
        _leave(draw)
    rotates = draw.random.random() < 0.25
    if rotates:
        _rotate(draw)
    return rotates


def _draw_retirement(draw: Draw, seed: int) -> None:
    """Draw the retirement of a founder, if the rest tolerates all liars and sick peers. Its own source keeps other draws."""
    source = random.Random(f"folkmoot retires {seed} {draw.n}")
    at, subject, lowers = source.uniform(0.0, draw.end * 0.95), source.randrange(draw.n), source.choice((0.0, 1.0))
    faulty = {fault.nodes[0] for fault in draw.faults if fault.kind in FAULTY}
    if source.random() < RETIREMENT_PROBABILITY and len(faulty) <= faults_tolerated(draw.n - 1) and draw.n > 1:
        draw.add("retire", at, at, (subject,), lowers)


def _rollback(draw: Draw, peer: int) -> None:
    """Draw a rollback: at `until` a peer stops, and returns with its disk of time `at`."""
    draw.add("rollback", *draw.span(0.2, 3), (peer,))


def _damage(draw: Draw, peer: int) -> None:
    """Draw damage: at `at` the durable byte at the fraction `amount` changes, and the peer stays down."""
    draw.add("damage", *draw.span(0.2, 3), (peer,), draw.random.random())


def _wrong_state(draw: Draw, peer: int) -> None:
    """Draw a wrong state: the first state that a peer computes after `at` has one wrong bit."""
    draw.add("wrong-state", *draw.span(0.2, 3), (peer,), detail=draw.random.choice(("counter", "model")))


def _set_clocks_right(draw: Draw) -> None:
    """Limit clock skews to the accepted range if a leave makes the faulty peers too many.

    A sick peer beyond f is tolerable: it recovers or is not needed. A wrong clock would be one fault more, which may stop blocks.
    """
    leavers = {fault.nodes[0] for fault in draw.faults if fault.kind == "leave"}
    sick = {fault.nodes[0] for fault in draw.faults if fault.kind in ("rollback", "damage", "wrong-state")}
    if leavers and len(draw.liars) + len(sick - leavers) > faults_tolerated(draw.n - len(leavers)):
        for at, fault in enumerate(draw.faults):
            if fault.kind == "skew" and abs(fault.amount) > CLOCK_AHEAD_SECONDS:
                draw.faults[at] = replace(fault, amount=math.copysign(SKEW_ACCEPTED, fault.amount))


SICKNESSES = (_rollback, _damage, _wrong_state)  # of honest peers; a sick peer counts as one of the f, as a liar does
RETIREMENT_PROBABILITY = 0.15
FAULTY = ("liar", "leave", "rollback", "damage", "wrong-state")  # each is one of the f, or makes f smaller
SICKNESS_PROBABILITY = 0.25  # for each of the f faulty peers that is not a liar


def _draw_sicknesses(draw: Draw, budget: int) -> None:
    for peer in draw.random.sample([peer for peer in range(draw.n) if peer not in draw.liars], budget):
        if draw.random.random() < SICKNESS_PROBABILITY:
            draw.random.choice(SICKNESSES)(draw, peer)
