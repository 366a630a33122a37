"""The command `peer clients`, which lists client runs."""

from __future__ import annotations

from clients.rpc import ClientRunView, ClientsRpc, StepOutcomeView
from features.commands import CommandContext, listing_command
from features.text_tables import Column, TextTable, format_ordinal
from protocol.units import display_round_number

TOPIC = "Tuning"

SHORT = 8


async def _show(asked: CommandContext[ClientsRpc], runs: tuple[ClientRunView, ...]) -> None:
    if not runs:
        asked.show("no client runs: a program opens one with `create_lora_training_client` at a gateway")
        return
    names = await asked.load_names()
    table = TextTable(
        "job",
        Column("base", truncates=True),
        Column("owner", truncates=True),
        "state",
        Column("steps", is_number=True),
        "open step",
        Column("last outcome", wraps=True),
        "data kept",
    )
    for run in runs:
        step, outcome = run.open_step, run.last_outcome
        table.add_row(
            run.job[:SHORT],
            run.base,
            names[run.owner],
            run.phase,
            str(run.steps),
            f"{display_round_number(step.step)}, {format_ordinal(step.attempts + 1)} attempt" if step is not None else "–",
            _outcome(outcome) if outcome is not None else "–",
            _kept(run),
        )
    asked.show(table)


def _outcome(outcome: StepOutcomeView) -> str:
    """Return an outcome as text, such as `step 4 accepted`, with the reasons of rounds that accepted nothing."""
    refused = ", ".join(f"{reason} {count}" for reason, count in outcome.refused.items())
    result = "accepted" if outcome.accepted else "refused"
    return f"step {display_round_number(outcome.step)} {result}" + (f" ({refused})" if refused else "")


def _kept(run: ClientRunView) -> str:
    """Return how many rounds' data this peer keeps, such as `3 of 5, from round 3 on`."""
    if run.first_kept_round is None:
        return "–"
    return f"{run.kept_rounds} of {run.accepted_rounds}, from round {display_round_number(run.first_kept_round)} on"


@listing_command(
    "Show client runs and their steps",
    _show,
    description="""
        A client run is a training loop of a person's own program. Its gateway opens the run, and requests one step after the
        other. Each step is a round of the run's job. It lists unfinished runs; `jobs` also shows finished ones.

        - `running`: a round of the open step is open. `paused`: the run has no step, or its step waits for its turn.
        - `steps`: number of decided steps, including those that failed.
        - `last outcome`: result of the last step, or of the open step so far. In parentheses are the rounds that accepted
          nothing, by the reason. `absent` means that no update came.
        - `data kept`: number of accepted rounds whose data this peer keeps (setting `keep_batches_gb`), and of all accepted ones.

        Steps count from 1 in the table, and from 0 in JSON, as rounds do.
        """,
)
async def clients(asked: CommandContext[ClientsRpc]) -> tuple[ClientRunView, ...]:
    return await asked.api.client_runs()
