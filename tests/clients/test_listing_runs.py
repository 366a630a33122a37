"""`peer clients`: the runs in the ledger's state as a reply and as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from clients.commands import clients
from clients.ledger.clients_module import ClientsState, EndRun
from clients.rpc import ClientRunView, ClientsRpc, OpenStepView, StepOutcomeView
from clients.rpc_handler import ClientsRpcHandler, list_client_runs
from features.commands import CommandContext
from features.peer_names import PeerNames
from features.text_tables import Printable, TextTable
from ledger.core.module import StateReader
from ledger.jobs import JobsState
from ledger.network_governance import NetworkState
from protocol.errors import UserError
from protocol.identity import peer_id
from protocol.verdicts import Verdict
from storage.batch_store import KeptRound
from tests.clients.runs import BASE_JOB, client_spec
from tests.ledger.test_client_runs import OTHER, OWNER, Clients
from tests.ledger.world import LANGUAGE

pytestmark = pytest.mark.virtual
OWNER_ID = peer_id(OWNER.public)


def state_of(world: Clients, base: bytes | None = None, version: int = 1) -> StateReader:
    """Return a world's state in which all runs have the specification of a run of the job `base`."""
    runs, jobs = world.state.module_state(ClientsState), world.state.module_state(JobsState)
    spec = client_spec().encode()
    found = {key: replace(job, spec=spec) if key in runs.runs else job for key, job in jobs.jobs.items()}
    if base is not None:
        found[BASE_JOB] = found.pop(base)
    network = SimpleNamespace(module_version=lambda module: version if module == "clients" else 0)
    states: dict[type, Any] = {ClientsState: runs, JobsState: replace(jobs, jobs=found), NetworkState: network}
    return cast(StateReader, SimpleNamespace(module_state=states.__getitem__))


def shown(state: StateReader, *options: str, kept: Sequence[KeptRound] = ()) -> list[Printable]:
    parser, printed = argparse.ArgumentParser(), list[Printable]()
    clients.add_arguments(parser)

    async def load_names() -> PeerNames:
        return PeerNames({OWNER_ID: "anna"})

    unused: Any = None
    api: ClientsRpc = ClientsRpcHandler(
        cast(Any, SimpleNamespace(state=state, batches=SimpleNamespace(kept_rounds=lambda: kept)))
    )
    context = CommandContext(api, parser.parse_args(options), printed.append, load_names, unused, {}, unused)
    trio.run(clients.run, context)
    return printed


def rows(state: StateReader, kept: Sequence[KeptRound] = ()) -> list[tuple[str, ...]]:
    (table,) = shown(state, kept=kept)
    assert isinstance(table, TextTable)
    return table.rows


def test_a_run_is_listed_with_its_steps_from_the_request_to_the_outcome() -> None:
    world = Clients()
    base, key = world.start(OTHER, LANGUAGE + b":1"), world.open()
    world.close(base)
    name, idle = world.job(base).name, ClientRunView(key.hex(), world.job(base).name, OWNER_ID, "paused", 0)
    assert list_client_runs(state_of(world, base), ()) == (idle,)
    assert rows(state_of(world, base)) == [(key.hex()[:8], name, "anna", "paused", "0", "–", "–", "–")]

    world.request(key, 0)
    asked = replace(idle, phase="running", open_step=OpenStepView(0, 0, world.state.height))
    assert list_client_runs(state_of(world, base), ()) == (asked,)
    assert rows(state_of(world, base))[0][3:] == ("running", "0", "1, 1st attempt", "–", "–")

    world.close(key, Verdict.REPLAY)
    assert asked.open_step is not None
    again = replace(asked, open_step=replace(asked.open_step, attempts=1), last_outcome=StepOutcomeView(0, False, {"replay": 1}))
    assert list_client_runs(state_of(world, base), ()) == (again,)
    assert rows(state_of(world, base))[0][5:] == ("1, 2nd attempt", "step 1 refused (replay 1)", "–")

    world.close(key)
    done = replace(idle, steps=1, last_outcome=StepOutcomeView(0, True, {"replay": 1}), accepted_rounds=1)
    assert list_client_runs(state_of(world, base), ()) == (done,)
    assert rows(state_of(world, base))[0][3:] == ("paused", "1", "–", "step 1 accepted (replay 1)", "–")


def test_runs_are_listed_from_the_oldest_and_without_those_that_are_over() -> None:
    world = Clients()
    keys = [world.open(owner) for owner in (OTHER, OWNER, OTHER)]
    assert [run.job for run in list_client_runs(state_of(world), ())] == [key.hex() for key in keys]
    assert [run.owner for run in list_client_runs(state_of(world), ())] == [
        peer_id(each.public) for each in (OTHER, OWNER, OTHER)
    ]
    world.decide(world.tx(OTHER, "client/end", EndRun(keys[0])))
    assert [run.job for run in list_client_runs(state_of(world), ())] == [key.hex() for key in keys[1:]]


def test_the_rounds_whose_data_this_peer_keeps_are_counted_for_each_run() -> None:
    world = Clients()
    key, other = world.open(), world.open(OTHER)
    for number in range(3):
        world.request(key, number)
        world.close(key)
    kept = [KeptRound(9, key, 1), KeptRound(11, key, 2), KeptRound(8, other, 0), KeptRound(7, b"x" * 32, 0)]
    mine, of_other = list_client_runs(state_of(world), kept)
    assert (mine.accepted_rounds, mine.kept_rounds, mine.first_kept_round) == (3, 2, 1)
    assert (of_other.accepted_rounds, of_other.kept_rounds, of_other.first_kept_round) == (0, 1, 0)
    assert rows(state_of(world), kept)[0][-1] == "2 of 3, from round 2 on"


def test_a_base_that_the_network_has_deleted_is_its_short_id() -> None:
    world = Clients()
    world.open()
    (run,) = list_client_runs(state_of(world), ())
    assert run.base == BASE_JOB.hex()[:8]


def test_json_has_the_fields_of_the_reply() -> None:
    world = Clients()
    key = world.open()
    world.request(key, 0)
    (text,) = shown(state_of(world), "--json")
    (run,) = json.loads(str(text))
    assert run == {
        "job": key.hex(),
        "base": BASE_JOB.hex()[:8],
        "owner": OWNER_ID,
        "phase": "running",
        "steps": 0,
        "open_step": {"step": 0, "attempts": 0, "requested_height": world.state.height},
        "last_outcome": None,
        "accepted_rounds": 0,
        "kept_rounds": 0,
        "first_kept_round": None,
    }


def test_a_network_without_runs_or_without_their_module_says_so() -> None:
    world = Clients()
    assert shown(state_of(world)) == ["no client runs: a program opens one with `create_lora_training_client` at a gateway"]
    with pytest.raises(UserError, match="does not run the module clients: a quorum of voters must run `upgrade clients 1`"):
        shown(state_of(world, version=0))
