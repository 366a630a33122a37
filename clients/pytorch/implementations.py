"""PyTorch's implementation of the objective of client runs."""

from __future__ import annotations

from typing import Final

from clients.objective import ClientObjective
from clients.pytorch.engine import ClientEngine
from training.engine_implementations import EngineImplementations, ObjectiveFunctions

IMPLEMENTATIONS: Final = EngineImplementations(objectives={ClientObjective.name: ObjectiveFunctions(engine=ClientEngine)})
