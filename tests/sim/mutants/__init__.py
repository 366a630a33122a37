"""Planted bugs: each breaks one rule of the production code. An invariant or a test must notice each within some seeds."""

from __future__ import annotations

from tests.sim.mutants.agreement import AGREEMENT
from tests.sim.mutants.audits import AUDITS
from tests.sim.mutants.client_runs import CLIENT_RUNS
from tests.sim.mutants.curation import CURATION
from tests.sim.mutants.lines import LINES, ChangedLine
from tests.sim.mutants.planting import Caught, Mutant, Planter, hunt
from tests.sim.mutants.standstill import STANDSTILL
from tests.sim.mutants.upkeep import UPKEEP

MUTANTS: tuple[Mutant, ...] = (*AGREEMENT, *UPKEEP, *AUDITS, *STANDSTILL, *CURATION, *CLIENT_RUNS)

__all__ = ["LINES", "MUTANTS", "Caught", "ChangedLine", "Mutant", "Planter", "hunt"]
