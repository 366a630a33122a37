"""Bugs in the rules of client runs and of jobs on request. In these histories all founders serve clients, and one may lie."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from clients.ledger import clients_module
from clients.ledger.clients_module import ClientsModule
from ledger import jobs
from ledger.jobs import ClosedRound, Job, JobsModule
from ledger.ledger_state import LedgerRules, LedgerState
from ledger.snapshots import snapshot_server
from rounds.round_state import RoundResult
from tests.sim.mutants.lines import ChangedLine
from tests.sim.mutants.planting import Mutant, Plant, everywhere, replaced, together, wrapped
from tests.sim.mutants.scenarios import Scenario

models_in_state = snapshot_server.models_in_state  # as it is without a planted bug
SERVES = Scenario(serves=True, blocks=40)
SERVES_LONG = replace(SERVES, blocks=90)  # so that runs with checkpoints end
SERVES_ALONE = replace(SERVES, jobs=False, blocks=90)  # so that many runs have rounds
WITHHELD = replace(SERVES, liars=("signs-again",), blocks=60)  # half of the liar's steps have data that only it has
# The only gateway lies. Its steps are soon late, and a training job goes on.
LATE = replace(WITHHELD, serves=False, is_liar_gateway=True, blocks=120, lost_ms_max=500)
WITHHELD_LONG = replace(WITHHELD, jobs=False, blocks=120)  # such steps come to their end
LATE_ALONE = replace(LATE, jobs=False)  # nothing else waits, so late steps begin


def changed(function: Any, line: str, instead: str) -> Plant:
    """Return the bug that replaces a part of a function's source, which occurs there once."""
    return lambda planter: planter.enter(ChangedLine("client-runs", "", function, line, instead, "").planted())


def _refused_updates_count(real: Any, rules: LedgerRules, state: LedgerState, closing: Any) -> ClosedRound:
    """Plant: a round of a step that accepts nothing still changes the model."""
    closed: ClosedRound = real(rules, state, closing)
    refused: RoundResult = closed.outcome
    if not closed.brief or refused.accepted:
        return closed
    return replace(closed, outcome=replace(refused, accepted={closed.ballots[0]: bytes(32)}))


@partial(everywhere, snapshot_server.models_in_state)
def _saved_models_not_kept(state: LedgerState) -> dict[tuple[bytes, int], bytes]:
    unsaved: dict[bytes, Job] = {key: replace(job, saved_models=()) for key, job in state.jobs.jobs.items()}
    return models_in_state(state.with_modules(jobs=replace(state.jobs, jobs=unsaved)))


CLIENT_RUNS = (
    Mutant(
        "held-run-opens-a-round",
        "a run without a brief opens a round",
        ("client idle",),
        changed(JobsModule.end_block, "terms.on_request == (brief is not None)", "True"),
        SERVES,
    ),
    Mutant(
        "new-run-opens-a-round",
        "a run opens its first round unasked",
        ("client idle",),
        changed(JobsModule._made, "replace(job, phase=JobPhase.PAUSED) if terms.on_request else job", "job"),
        SERVES,
    ),
    Mutant(
        "step-of-a-stranger",
        "any member requests steps of a run",
        ("client owner",),
        changed(clients_module._own, "members.current_key(run.owner) != author", "False"),
        SERVES,
    ),
    Mutant(
        "step-twice",
        "a step is requested again",
        ("client order",),
        changed(ClientsModule.apply_transaction, "brief.step != run.next_step", "False"),
        SERVES,
    ),
    Mutant(
        "step-beside-a-step",
        "a step is requested while another one of its run is open",
        ("client order",),
        changed(
            ClientsModule.apply_transaction,
            'raise Refused(f"step {run.open_step.brief.step} is open: request the next step after its outcome")',
            "pass",
        ),
        SERVES,
    ),
    Mutant(
        "saved-during-a-step",
        "a model is saved while a step is open",
        ("client order",),
        changed(
            ClientsModule.apply_transaction,
            'raise Refused(f"step {run.open_step.brief.step} is open: save the model after its outcome")',
            "pass",
        ),
        SERVES,
    ),
    Mutant(
        "step-of-an-over-run",
        "a run that is over has steps",
        ("client order",),
        changed(clients_module._own, "run.is_over and not also_over", "False"),
        SERVES_LONG,
    ),
    Mutant(
        "failed-step-advances",
        "a round that accepts nothing changes the model",
        ("client model",),
        wrapped(LedgerRules, "close_round", _refused_updates_count),
        WITHHELD,
    ),
    Mutant(
        "failed-step-stays-open",
        "a step that nobody's update ends blocks its run for ever",
        ("client steps",),
        changed(clients_module._after_round, "outcome.accepted or has_failed", "outcome.accepted"),
        WITHHELD_LONG,
    ),
    Mutant(
        "failed-at-once",
        "a step fails with its first round",
        ("client steps",),
        changed(clients_module._after_round, "outcome.accepted or has_failed", "True"),
        WITHHELD,
    ),
    Mutant(
        "one-trainer-again",
        "a step that is refused goes to the same trainer again",
        ("client trainer",),
        changed(clients_module.trainers_in_order, "able.difference(tried)", "able"),
        WITHHELD,
    ),
    Mutant(
        "gateway-last",
        "the gateway is not the first trainer of its step",
        ("client trainer",),
        changed(clients_module.trainers_in_order, "member != owner", "member == owner"),
        SERVES,
    ),
    Mutant(
        "all-train-a-step",
        "a round on request has all trainers",
        ("client trainer",),
        changed(JobsModule.open_round, "able = {brief.trainer} & may_train", "pass"),
        SERVES,
    ),
    Mutant(
        "steps-starve-a-job",
        "one step follows the other, and a training job waits",
        ("client turns",),
        changed(ClientsModule._requests, "bool((closed | ended) & runs.keys())", "False"),
        SERVES,
    ),
    Mutant(
        "job-starves-steps",
        "a training job does not make room for a step",
        ("client turns",),
        changed(ClientsModule._requests, "for other in running - runs.keys()", "for other in ()"),
        SERVES,
    ),
    Mutant(
        "young-steps-first",
        "a step begins before an older one",
        ("client turns",),
        changed(ClientsModule._requests, "_since(runs[key]), key)", "-_since(runs[key]), key)"),
        SERVES,
    ),
    Mutant(
        "finished-run-in-line",
        "a run that ends in a block takes the next round from the others",
        ("client turns",),
        changed(clients_module._ends, "job is not None and", "False and"),
        SERVES_ALONE,
    ),
    Mutant(
        "ended-run-blocks-a-block",
        "no step begins in the block that ends the run with the open round",
        ("client turns",),
        changed(ClientsModule._requests, "running - closed - over", "running - closed"),
        SERVES_ALONE,
    ),
    Mutant(
        "late-steps-begin",
        "steps of a gateway that lost too much time still take turns with a training job",
        ("client turns", "client late"),
        changed(ClientsModule._requests, "> LOST_MS_MAX", "> 1 << 40"),
        LATE,
    ),
    Mutant(
        "late-step-pauses-a-job",
        "a late step pauses a training job",
        ("client late",),
        changed(ClientsModule._requests, "if not is_late[key]:", "if True:"),
        LATE,
    ),
    Mutant(
        "late-steps-wait-for-ever",
        "late steps do not begin although nothing else waits",
        ("client turns",),
        changed(ClientsModule._requests, "if not waiting or stay_open:", "if not waiting or stay_open or is_late[waiting[0]]:"),
        LATE_ALONE,
    ),
    Mutant(
        "lost-time-of-abandoned-rounds",
        "who ends a run in time loses no time",
        ("client late",),
        changed(ClientsModule.settle_block, "key in closed or run.is_over or is_finished", "key in closed"),
        LATE,
    ),
    Mutant(
        "lost-time-not-forgiven",
        "lost time stays for ever",
        ("client late",),
        replaced(clients_module, "LOST_PART", 1 << 40),
        LATE,
    ),
    Mutant(
        "ended-run-trains-on",
        "the job of a run goes on after the run's end",
        ("client steps",),
        changed(ClientsModule.settle_block, "[JobHalt(key, run.owner)] if run.is_over and not is_finished else []", "[]"),
        SERVES,
    ),
    Mutant(
        "absent-trainer-stops-a-step",
        "a round on request waits for its trainer without end",
        ("steps", "idle"),
        changed(Job.round_terms, "may_be_empty=bool(self.brief)", "may_be_empty=False"),
        WITHHELD_LONG,
    ),
    Mutant(
        "checkpoint-dropped-early",
        "a checkpoint with an expiry is dropped at once",
        ("client checkpoints",),
        changed(ClientsModule.settle_block, "0 < of.expires_ms <= now", "0 < of.expires_ms"),
        SERVES,
    ),
    Mutant(
        "checkpoints-end-with-their-run",
        "the end of a run drops its checkpoints",
        ("client steps",),
        changed(ClientsModule.end_block, "run.checkpoints or not run.is_over", "not run.is_over"),
        SERVES_LONG,
    ),
    Mutant(
        "job-of-checkpoints-forgotten",
        "the job of a run that is over is forgotten, although it has checkpoints",
        ("client steps",),
        together(replaced(jobs, "UNTRAINED_KEPT_MAX", 0), changed(ClientsModule.settle_block, "[JobRetained(key), *(", "[*(")),
        SERVES_LONG,
    ),
    Mutant(
        "unsaved-model-continued",
        "a run continues from a model that nobody saved",
        ("client checkpoints",),
        changed(
            JobsModule._require_saved,
            "job is None or (named.round, named.root) not in",
            "False and (named.round, named.root) not in",
        ),
        SERVES,
    ),
    Mutant(
        "saved-models-not-kept",
        "peers do not keep the models of checkpoints",
        ("client checkpoints",),
        _saved_models_not_kept,
        SERVES_LONG,
    ),
)
