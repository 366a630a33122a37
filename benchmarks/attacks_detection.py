"""How soon sampled audits suspend who cheats in some of its steps, and what they replay: drawn with the ledger's own code.

No training: who is drawn for which step follows from nonces alone (`ledger.audits.draws`), and a replay of a false step finds it.
All n train and re-execute. The liar's f − 1 accomplices reveal their nonces, and report that all is well whatever they are drawn
for; what liars gain by withholding nonces or by leading is in decision 28. Two kinds of liars: 40 % of the steps are false, for
which there is a bound; and one step a round is, into which any change fits, since nothing bounds a step's size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from consensus.quorum import faults_tolerated
from ledger.audits import draws
from training.spec import PRESETS, AuditMode, JobSpec

JOB = bytes(32)
CHEATED = 0.4  # share of the liar's steps that are not honest
ROUNDS = 10  # in which it is to be suspended
UNSEEN_ROUNDS = 2  # of them: the first, whose draw can be foreseen, and the last, which is reported and judged after it
FOUND_MIN = 0.99  # of the liars, and the share that `rounds_needed` is for
ROUNDS_MAX = 1_000  # that a liar is looked for: a rate of nearly 0 finds nobody
NONCE_BYTES = 16
MANY_STEPS, ONE_STEP = f"{CHEATED:.0%} of its steps", "one step"


def _many(steps: int, chance: random.Random) -> set[int]:
    return {step for step in range(steps) if chance.random() < CHEATED}


def _one(steps: int, chance: random.Random) -> set[int]:
    return {chance.randrange(steps)}


# Which steps of a round are false.
LIES: dict[str, Callable[[int, random.Random], set[int]]] = {MANY_STEPS: _many, ONE_STEP: _one}


@dataclass(frozen=True)
class Detection:
    preset: str
    peers: int
    liars: int
    local_steps: int
    lie: str
    audit_rate: float
    auditors: int
    suspended: float  # share of the liars, after `ROUNDS`
    rounds_needed: int | None  # until `FOUND_MIN` of them were; None: longer than was looked
    replayed: float  # steps, over those that audits full replay: every step, by everybody but its trainer

    @property
    def replayed_max(self) -> float:
        return 1 / self.local_steps


def jobs() -> dict[str, JobSpec]:
    """Every preset that has audits, under sampled ones at the rate it says; `local` says what a job says that names none, the
    default. And local steps at the rate of `per-step`, at which their speed has a bound.
    """
    base = JobSpec(name="detection", data=bytes(32))
    audited = {name: preset for name, preset in PRESETS.items() if preset.get("audit") != AuditMode.OFF}
    found = {name: replace(base, **{**preset, "audit": AuditMode.SAMPLED}) for name, preset in audited.items()}
    if {"sparse", "per-step"} <= found.keys():
        seldom = found["per-step"]
        found["sparse, seldom"] = replace(found["sparse"], local_steps=15, audit_rate=seldom.audit_rate, auditors=seldom.auditors)
    return found


def detection(preset: str, spec: JobSpec, peers: int, count: int, lie: str = MANY_STEPS) -> Detection:
    """What became of `count` liars, each among others."""
    liars, chance = faults_tolerated(peers), random.Random(f"{preset} {peers} {lie}")
    lives = [list(_rounds(spec, peers, liars, lie, chance)) for _ in range(count)]
    ends = sorted(UNSEEN_ROUNDS + len(life) if life[-1][1] else math.inf for life in lives)
    needed = ends[math.ceil(FOUND_MIN * count) - 1]
    steps = [drawn for life in lives for drawn, _ in life]
    return Detection(
        preset,
        peers,
        liars,
        spec.local_steps,
        lie,
        spec.audit_rate,
        spec.auditors,
        suspended=sum(end <= ROUNDS for end in ends) / count,
        rounds_needed=None if needed == math.inf else int(needed),
        replayed=sum(steps) / len(steps) / (spec.local_steps * (peers - 1)),
    )


def _rounds(spec: JobSpec, peers: int, liars: int, lie: str, chance: random.Random) -> Iterator[tuple[int, bool]]:
    """Of each round until the liar, peer 0, is found: how many steps of its proposal are replayed, and whether that finds it."""
    keys = [number.to_bytes(32, "big") for number in range(peers)]
    for number in range(1, ROUNDS_MAX + 1):
        false = LIES[lie](spec.local_steps, chance)
        nonces = {key: chance.randbytes(NONCE_BYTES) for key in keys}
        tickets = draws.tickets_for(JOB, number, nonces, keys[0], keys[1:])
        drawn = draws.draw(tickets, peers - 1, spec.auditors, spec.audit_rate, spec.local_steps)
        found = any(step in false for key, step in drawn.items() if key in keys[liars:])
        yield len(drawn), found
        if found:
            return


def detections(peers: Sequence[int], count: int) -> Iterator[Detection]:
    for preset, spec in jobs().items():
        for lie in LIES:
            for n in filter(faults_tolerated, peers):
                yield detection(preset, spec, n, count, lie)
