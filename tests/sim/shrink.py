"""Minimal sets of faults that still break the same rule (delta debugging: Zeller and Hildebrandt 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.sim import campaign

Numbers = Sequence[int]


def minimal(numbers: Numbers, fails: Callable[[Numbers], bool]) -> list[int]:
    """Return a minimal failing subset: it passes without any one element. `numbers` must fail."""
    kept, parts = list(numbers), 2
    if kept and fails([]):
        return []
    while len(kept) >= 2:
        size = -(-len(kept) // parts)
        chunks = [kept[at : at + size] for at in range(0, len(kept), size)]
        rest = next((left for chunk in chunks if fails(left := [n for n in kept if n not in chunk])), None)
        if rest is not None:
            kept, parts = rest, max(2, parts - 1)
        elif parts >= len(kept):
            break
        else:
            parts = min(len(kept), 2 * parts)
    return kept


def shrink(kind: str, seed: int, n: int | None) -> int:
    whole = campaign.prepare(kind, seed, n)
    result = campaign.run_one(whole)
    if result.rule is None:
        print(f"seed {seed} passes: there is nothing to shrink")
        return 0
    print(f"seed {seed} FAILED: {result.problem}")

    def fails(numbers: Numbers) -> bool:
        rule = campaign.run_one(campaign.keeping(campaign.prepare(kind, seed, n), numbers)).rule
        print(f"  {len(numbers)} faults: {rule or 'passes'}", flush=True)
        return rule == result.rule

    kept = minimal([fault.number for fault in whole.plan.faults], fails)
    print(f"{len(kept)} of {len(whole.plan.faults)} faults are enough:")
    campaign.describe(whole.plan.keep(kept))
    print(f"again: {campaign.command(kind, seed, n, kept)}")
    return 1
