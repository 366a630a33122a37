"""Lists and the end of a session over HTTP, and `peer clients`: a real daemon with a real worker."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest
import trio

from tests.clients.programs import Program
from tests.clients.test_gateway import BATCHES, Gateway
from tests.peer.processes import command, daemons, poll

pytestmark = pytest.mark.real("sockets, a daemon and its worker")


def check_lists(program: Program, model: str, sampler: str) -> None:
    """Check the lists of a program with one model and one sampler."""
    page = program.send("GET", "training_runs?limit=20&offset=0&access_scope=owned").json
    assert page["cursor"] == {"limit": 20, "offset": 0, "total_count": 1}
    ((run,),) = [page["training_runs"]]
    assert (run["training_run_id"], run["base_model"], run["lora_rank"], run["model_owner"]) == (model, "base", 4, "local")
    for path in (model, quote(model, safe="")):
        assert program.send("GET", f"training_runs/{path}?access_scope=owned").json == run
        assert program.send("GET", f"training_runs/{path}/checkpoints").json == {"checkpoints": []}
    assert program.send("GET", "training_runs?limit=1&offset=1").json["training_runs"] == []
    assert program.send("GET", "checkpoints?limit=100&offset=0").json["checkpoints"] == []
    assert program.send("GET", "sessions?limit=20&offset=0&access_scope=owned").json["sessions"] == [program.session]
    session = program.send("GET", f"sessions/{program.session}?access_scope=owned").json
    assert session == {"training_run_ids": [model], "sampler_ids": [sampler]}


def check_refusals(program: Program) -> None:
    for unknown in ("training_runs/x", "training_runs/x/checkpoints", "training_runs/a%2Fb", "sessions/x"):
        assert program.send("GET", unknown).status == 404
    for wrong in ("training_runs?limit=-1", "sessions?offset=x", "checkpoints?limit=1001", "sessions/%00"):
        reply = program.send("GET", wrong)
        assert reply.status == 400 and b"must be a" in reply.data
    reply = program.post("weights_info", {"tinker_path": "tinker://x/weights/step1"})
    assert reply.status == 404 and reply.json["detail"].startswith("no weights 'tinker://x/weights/step1'")
    assert program.post("cancel_future", {"request_id": "x#1"}).status == 200
    assert program.post("sessions/x/finish", {"reason": {"type": "success"}, "detail": None}).status == 200


def test_a_program_lists_what_it_has_and_ends_its_session(tmp_path: Path) -> None:
    told = command("init", "--network", "lab", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "peer"))
    assert told[0] == 0, told

    def listed(*options: str) -> str:
        status, output, error = command("clients", *options, "--data-dir", str(tmp_path / "peer"))
        assert status == 0, error
        return output

    async def is_over() -> bool:
        return "no client runs" in await trio.to_thread.run_sync(listed)

    with daemons([tmp_path / "peer"]) as (daemon,):
        gateway = Gateway(daemon)
        gateway.start()
        trio.run(gateway.train_base, tmp_path)
        assert listed().startswith("no client runs: a program opens one")
        program = gateway.program()
        model = program.create_model()
        program.result_of(program.request_losses(model, 1, BATCHES[0]))
        program.result_of(program.request_step(model, 2))
        saved = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0}
        sampler = program.result_of(program.post("save_weights_for_sampler", saved)).json["sampling_session_id"]
        check_lists(program, model, sampler)
        check_refusals(program)
        (run,) = json.loads(listed("--json"))
        assert (run["base"], run["steps"], run["open_step"], run["phase"]) == ("base", 1, None, "paused")
        assert run["last_outcome"] == {"step": 0, "accepted": True, "refused": {}}
        assert "step 1 accepted" in listed()
        step = [program.request_losses(model, 4, BATCHES[0]), program.request_step(model, 5)]
        assert program.post(f"sessions/{program.session}/finish", {"reason": {"type": "success"}, "detail": None}).status == 200
        assert program.result_of(step[1]).json["metrics"]["round:max"] == 1, "the run ends after its last request"
        trio.run(poll, is_over)
        check_lists(program, model, sampler)
        assert "this model is over" in program.result_of(program.request_losses(model, 6, BATCHES[0])).fault
