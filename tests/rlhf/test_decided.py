"""People compare responses at real daemons, and what they decided teaches a reward model, each voter having derived it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from curation.calls import ImportRequest
from curation.tasks import task_id
from peer.demo.crowd import Person, Site
from peer.export.tracing import trace
from peer.serving.part import ADDRESS
from protocol.api import TrainRequest
from protocol.errors import UserError
from protocol.identity import Identity
from tests.peer.processes import Daemon
from tests.rlhf import test_daemons
from tests.rlhf.test_daemons import SECONDS_MAX, TINY, finished, start

network = test_daemons.network
PAIRS = {f"q{number}: ": number % 3 for number in range(12)}  # by prompt, what people say: the first, the second, a tie
OF_REWARD = {"rounds": "2", "local_steps": "2", "batch": "4", "proposal_seconds": "1"}
QUICK = {f"reward.{name}": value for name, value in OF_REWARD.items()}


async def imported(daemon: Daemon, folder: Path, name: str, prompts: list[str], response: str = "aeiou") -> str:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": prompt, "items": [response, "xkt"]}) + "\n" for prompt in prompts))
    request = ImportRequest(str(file), name, "", "pair", (), False, 1, 1, "", False)
    return (await daemon.client.import_tasks(request)).project


async def compared(daemon: Daemon, truth: dict[str, int]) -> None:
    """Four people answer all tasks that there are."""
    address = daemon.directory / "parts" / "serve" / ADDRESS
    while not address.exists():  # noqa: ASYNC110
        await trio.sleep(0.02)
    host, _, port = address.read_text().removeprefix("http://").rpartition(":")
    people = [Person(f"p{n}", Identity(bytes([n]) * 32), 1.0, Site(host, int(port)), truth, 0.0) for n in range(4)]
    async with trio.open_nursery() as crowd:
        for person in people:
            crowd.start_soon(person.take_part, trio.CapacityLimiter(4))
        while any(view.settled < view.tasks for view in await daemon.client.projects()):  # noqa: ASYNC110
            await trio.sleep(0.05)
        crowd.cancel_scope.cancel()


async def test_a_project_teaches_a_reward_model_without_its_author(network: list[Daemon], tmp_path: Path) -> None:
    first, author = network[:2]
    with trio.fail_after(SECONDS_MAX):
        await start(network, False, "--sign-up", "open")
        base = await first.client.train(TrainRequest("base", "", 1, 0, TINY))
        project = await imported(author, tmp_path, "pairs", list(PAIRS))
        await finished(author, base)
        begin = author.client.start_rlhf_training
        for named, why in (("pairs", "--project 'pairs': no pair of it is decided yet"), ("none", "'none' fits 0 projects")):
            with pytest.raises(UserError, match=why):
                await begin("base", "", 0, "", QUICK, project=named)
        await compared(author, PAIRS)
        reward = await begin("base", "", 0, "", QUICK, project="pairs")
        author.kill()
        done = await finished(first, reward)
        for daemon in (first, *network[2:]):
            while (status := await daemon.client.rlhf_status()).state != "finished":  # noqa: ASYNC110
                await trio.sleep(0.05)
            assert (status.stages[0].job, status.stages[0].model_root) == (reward, done.model_root)
        traces = [await first.client.trace_pair(task_id(bytes.fromhex(project), n).hex()) for n in range(len(PAIRS))]
        with pytest.raises(UserError, match="is in no set of 1 job with"):
            await first.client.trace_pair("00" * 32)
        await first.client.export(str(tmp_path / "run"))
        offline = await trio.to_thread.run_sync(trace, tmp_path / "run", traces[0].pair)
        assert offline == traces[0], "whoever has the export needs no peer"
    drawn = [draw for trace in traces for draw in trace.draws]
    assert {draw.job for draw in drawn} == {reward} and {draw.round for draw in drawn} == {0, 1}
    assert {draw.trainer for draw in drawn if draw.accepted} == set(done.accepted)
    assert {(trace.set, trace.height) for trace in traces} == {
        (status.stages[0].preferences.set, status.stages[0].preferences.height)
    }
    assert not any(trace.draws for trace in traces if trace.held_out) and not any(trace.unknown for trace in traces)
    assert done.origin.startswith(f"decided by annotators (project {project[:16]}, height ")
    preferences = status.stages[0].preferences
    assert preferences is not None and preferences.decided_by_annotators and preferences.project == project
    assert preferences.height > 0 and preferences.redacted == preferences.agree == preferences.disagree == 0
