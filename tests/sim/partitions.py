"""Network partitions, silent or noticed, single or flapping: no fork, and normal work three heights after healing."""

from __future__ import annotations

import random

from tests.sim.invariants import Violation
from tests.sim.plan import Fault, Plan
from tests.sim.simulation import RECOVERY_HEIGHTS, Simulation

SHAPES = {4: ((2, 2), (3, 1)), 7: ((4, 3), (5, 2))}
BLOCKS = 20


def expand(seed: int, n: int | None) -> Plan:
    source = random.Random(f"partition {seed} {n}")
    size = n or (4, 7)[seed % 2]
    if size not in SHAPES:
        raise SystemExit(f"partitions are drawn for n = {' and '.join(map(str, SHAPES))}, not {size}")
    faults: list[Fault] = []
    end = source.uniform(4.0, 12.0)
    for _ in range(source.randint(1, 3)):
        faults.append(_split(source, len(faults), size, end))
    low = source.choice((0.001, 0.01, 0.05))
    return Plan(
        seed,
        size,
        0,
        0,
        (low, low * source.choice((1.5, 4.0))),
        round(end, 3),
        tuple(faults),
        blocks=BLOCKS,
        work=source.choice((0.3, 1.0, 2.0)),
        jobs=source.random() < 0.5,
    )


def _split(source: random.Random, number: int, n: int, end: float) -> Fault:
    shape = source.choice(SHAPES[n])
    side = tuple(sorted(source.sample(range(n), shape[1])))
    at = round(source.uniform(0.2, end * 0.6), 3)
    until = round(min(end, at + source.uniform(1.0, 8.0)), 3)
    if source.random() < 0.4:
        return Fault(number, "flap", at, until, side, source.choice((0.1, 0.3, 0.9, 1.7)))
    return Fault(number, "partition", at, until, side, float(source.random() < 0.5))


class Partitions(Simulation):
    def _go_on(self) -> None:
        super()._go_on()
        healed = self.height_healed + RECOVERY_HEIGHTS
        late = {height: view for height, view in self.invariants.views.items() if height > healed and view}
        if late:
            raise Violation("healed", f"{RECOVERY_HEIGHTS} heights after the split, decided in later views: {late}")


def simulation(plan: Plan) -> Simulation:
    return Partitions(plan)
