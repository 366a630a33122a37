"""Rounds until sampled audits suspend a false trainer, and rounds that auditors replay, from the ledger's own draws.

No model is trained: nonces alone determine the draws (`ledger.audits.sortition`), and the replay of a round finds a lie in it,
however few of its steps are false. All n peers train and re-execute. The liar's f − 1 accomplices reveal their nonces and report
a match in each of their audits. Decision 28 covers the gain from withheld nonces and from leadership.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from consensus.voter_set import faults_tolerated
from ledger.audits import loss_commitments, sortition
from ledger.audits.loss_commitments import LossComparisons
from training.job_spec import PRESETS, AuditMode, JobSpec, complete_fields

JOB = bytes(32)
ROUNDS = 10  # rounds after which suspended liars are counted
# Rounds until a liar must be suspended, times the rate of early rounds; 3.5 for many voters by the closed form.
AUDITS_NEEDED = 4.0
UNSEEN_ROUNDS = 2  # the first, whose draw is predictable, and the last, whose report and verdict come after it
FOUND_MIN = 0.99  # of the liars; also the share for `rounds_needed`
ROUNDS_MAX = 1_000  # rounds of a search for a liar; a rate near 0 finds none
NONCE_BYTES = 16
# Constants of the second table.
LAPSES = 0.2  # share of late reports, from auditors whose core is busy
GUESSED = 0.01  # share of a lazy auditor's guesses within 1e-3 nat, measured on the default job
LAZY_AUDITS = 20  # audits until a lazy auditor must be found
JUDGED_ROUNDS = 1  # from a report to its verdict


@dataclass(frozen=True)
class Detection:
    preset: str
    peers: int
    liars: int
    local_steps: int
    audit_rate: float
    auditors: int
    suspended: float  # share of the liars, after `ROUNDS`
    rounds_needed: int | None  # until `FOUND_MIN` of them were suspended; None: beyond the search
    replayed: float  # replayed rounds relative to full audits, in which every peer but the trainer replays every round


def jobs() -> dict[str, JobSpec]:
    """Return every preset under sampled audits, at its own rate or the rate of its steps, and `local` with 30 steps."""
    base = JobSpec(name="detection", data=bytes(32))
    said = {**PRESETS, "local, H=30": PRESETS["local"] | {"local_steps": 30}}
    return {name: replace(base, **complete_fields({**fields, "audit": AuditMode.SAMPLED})) for name, fields in said.items()}


def detection(preset: str, spec: JobSpec, peers: int, count: int) -> Detection:
    """Simulate `count` liars, each among other peers."""
    liars, chance = faults_tolerated(peers), random.Random(f"{preset} {peers}")
    lives = [list(_rounds(spec, peers, liars, chance)) for _ in range(count)]
    ends = sorted(UNSEEN_ROUNDS + len(life) if life[-1][1] else math.inf for life in lives)
    needed = ends[math.ceil(FOUND_MIN * count) - 1]
    replays = [drawn for life in lives for drawn, _ in life]
    return Detection(
        preset,
        peers,
        liars,
        spec.local_steps,
        spec.audit_rate,
        spec.auditors,
        suspended=sum(end <= ROUNDS for end in ends) / count,
        rounds_needed=None if needed == math.inf else int(needed),
        replayed=sum(replays) / len(replays) / (peers - 1),
    )


def _rounds(spec: JobSpec, peers: int, liars: int, chance: random.Random) -> Iterator[tuple[int, bool]]:
    """Yield, for each round until the liar (peer 0) is found, the number of its auditors and whether they find it."""
    keys = [number.to_bytes(32, "big") for number in range(peers)]
    for number in range(1, ROUNDS_MAX + 1):
        nonces = {key: chance.randbytes(NONCE_BYTES) for key in keys}
        tickets = sortition.lottery_tickets(JOB, number, nonces, keys[0], keys[1:])
        rate = sortition.audit_rate_of_round(spec.audit_rate, 0, spec.rounds, 0)  # the liar begins early, when draws are rarest
        drawn = sortition.draw_auditors(tickets, peers - 1, spec.auditors, rate)
        found = not set(drawn).isdisjoint(keys[liars:])
        yield len(drawn), found
        if found:
            return


def detections(peers: Sequence[int], count: int) -> Iterator[Detection]:
    for preset, spec in jobs().items():
        for n in filter(faults_tolerated, peers):
            yield detection(preset, spec, n, count)


# Lapses and lazy auditors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Laziness:
    """Results when a fifth of all reports lapse.

    Beside f liars that back one another, `lazy` others report `match` without a replay.
    """

    preset: str
    peers: int
    liars: int
    lazy: int
    suspended_median: int  # rounds until the liar is suspended
    rounds_needed: int | None  # until `FOUND_MIN` of the liars were suspended; None: beyond the search
    lies: float  # false updates that the model took meanwhile, on average
    lies_most: int  # for `FOUND_MIN` of the liars
    lazy_audits: int | None  # reports until `FOUND_MIN` of the lazy auditors are suspended; None: there are none


@dataclass
class _Lazy:
    known: LossComparisons = field(default_factory=LossComparisons)
    reports: int = 0
    found_after: int | None = None
    back_in: int = 0  # the round in which its suspension ends
    suspensions: int = 0


def laziness(preset: str, spec: JobSpec, peers: int, lazy: int, count: int) -> Laziness:
    """Simulate `count` liars, each among other peers, and the lazy auditors beside them."""
    chance = random.Random(f"lazy {preset} {peers} {lazy}")
    lives = [_lazy_life(spec, peers, lazy, chance) for _ in range(count)]
    at = math.ceil(FOUND_MIN * count) - 1
    ends, told = sorted(life[0] for life in lives), sorted(life[1] for life in lives)
    audits = sorted(number for life in lives for number in life[2])
    needed = ends[at]
    return Laziness(
        preset,
        peers,
        faults_tolerated(peers),
        lazy,
        ends[count // 2],
        needed if needed < ROUNDS_MAX else None,
        sum(told) / count,
        told[at],
        audits[math.ceil(FOUND_MIN * len(audits)) - 1] if audits else None,
    )


def _lazy_life(spec: JobSpec, peers: int, lazy: int, chance: random.Random) -> tuple[int, int, list[int]]:
    """Simulate one liar (peer 0). Return its rounds until suspension, its false updates, and the reports of each lazy auditor.

    Peers 1 to f − 1 are its accomplices: they report a match for it, and reveal losses that equal the guesses of lazy auditors.
    The lazy peers follow, then the honest ones. A round's losses are opened at the end of its window.
    """
    liars, window = faults_tolerated(peers), spec.audit_window
    lazies = {peer: _Lazy() for peer in range(liars, liars + lazy)}
    opened: dict[int, list[tuple[int, int]]] = {}  # round -> (lazy auditor, trainer) of the losses opened in it
    told, found_in = 0, None
    for number in range(1, ROUNDS_MAX + 1):
        for auditor, trainer in opened.pop(number, ()):
            _compare(lazies[auditor], trainer, trainer < liars, liars, chance, number, spec)
        if found_in == number:
            break
        present = [peer for peer in range(peers) if peer not in lazies or lazies[peer].back_in <= number]
        drawn = min(1.0, sortition.audit_rate_of_round(spec.audit_rate, 0, spec.rounds, 0) * spec.auditors / (len(present) - 1))
        for peer in present:
            if peer in lazies:
                seen = [
                    trainer for trainer in present if trainer != peer and chance.random() < drawn and chance.random() >= LAPSES
                ]
                opened.setdefault(number + window + 1, []).extend((peer, trainer) for trainer in seen)
        told += 1
        honest = [peer for peer in present if peer >= liars + lazy]
        replays = sum(chance.random() < drawn and chance.random() >= LAPSES for _ in honest)
        if number > 1 and found_in is None and replays:
            found_in = number + 1 + JUDGED_ROUNDS
    else:
        number = ROUNDS_MAX
    return number, told, [of.found_after for of in lazies.values() if of.found_after is not None]


def _compare(of: _Lazy, trainer: int, backs: bool, liars: int, chance: random.Random, number: int, spec: JobSpec) -> None:
    """Compare one opened report of a lazy auditor. With `backs` the trainer opens the auditor's guess."""
    if of.back_in > number:
        return
    of.reports += 1
    wrong = not backs and chance.random() >= GUESSED
    of.known = loss_commitments.add_comparison(of.known, trainer.to_bytes(32, "big"), wrong, liars)
    if loss_commitments.is_lazy_auditor(of.known, of.known.wrong.keys(), liars):
        of.found_after = of.found_after or of.reports
        of.back_in = number + 1 + (spec.suspension_rounds << of.suspensions)
        of.suspensions, of.known = of.suspensions + 1, LossComparisons()


def lazinesses(peers: Sequence[int], count: int) -> Iterator[Laziness]:
    """Run each preset and size with no and with f lazy auditors."""
    for preset, spec in jobs().items():
        for n in filter(faults_tolerated, peers):
            for lazy in (0, faults_tolerated(n)):
                yield laziness(preset, spec, n, lazy, count)


@dataclass(frozen=True)
class FoundLazy:
    """Number of compared reports until a lazy auditor is suspended with probability 0.99.

    No rule that never suspends an honest auditor needs fewer (decision 61).
    """

    peers: int
    faults: int
    alone: int  # no peer backs it: all trainers open true losses, and so do the other lazy auditors
    among: int  # it is one of f faulty peers: f − 1 trainers open its guess
    beside: int  # f trainers besides it open its guess


def found_lazy(peers: int, count: int) -> FoundLazy:
    faults = faults_tolerated(peers)
    return FoundLazy(peers, faults, *(_reports_needed(peers, backing, count) for backing in (0, faults - 1, faults)))


def _reports_needed(peers: int, backing: int, count: int) -> int:
    chance, faults, ends = random.Random(f"found {peers} {backing}"), faults_tolerated(peers), list[int]()
    for _ in range(count):
        known, lazy = LossComparisons(), False
        while not lazy:
            trainer = chance.randrange(peers - 1)
            wrong = trainer >= backing and chance.random() >= GUESSED
            known = loss_commitments.add_comparison(known, trainer.to_bytes(32, "big"), wrong, faults)
            lazy = loss_commitments.is_lazy_auditor(known, known.wrong.keys(), faults)
        ends.append(known.reports)
    return sorted(ends)[math.ceil(FOUND_MIN * count) - 1]
