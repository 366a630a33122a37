"""Calls of client runs that people send to their own peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class OpenStepView:
    step: int  # number of the step, from 0
    attempts: int  # closed rounds of this step, which accepted nothing
    requested_height: int  # height of the block with the request


@dataclass(frozen=True, slots=True)
class StepOutcomeView:
    """The outcome of a run's last step, or of the closed rounds of its open step."""

    step: int
    accepted: bool
    # Number of rounds that accepted nothing, by the reason: the label of a verdict, or `absent` for a trainer without an update.
    refused: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClientRunView:
    job: str
    base: str  # name of the finished job whose model the run tunes; its short id if the network has deleted this job
    owner: str  # gateway that opened the run
    phase: str  # phase of the run's job: `running` while a step's round is open, otherwise `paused`
    steps: int  # number of decided steps, including those that failed
    open_step: OpenStepView | None = None
    last_outcome: StepOutcomeView | None = None
    accepted_rounds: int = 0  # number of rounds with an accepted update
    kept_rounds: int = 0  # number of those rounds whose data this peer keeps (`keep_batches_gb`)
    first_kept_round: int | None = None


class ClientsRpc(Protocol):
    async def client_runs(self) -> tuple[ClientRunView, ...]:
        """Return the unfinished client runs of the network, the oldest first.

        Raises `UserError` if the network does not run the module `clients`.
        """
