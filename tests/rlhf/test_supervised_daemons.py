"""Four daemons: a trained model learns the responses of a file, and what it is then prefers the better ones of pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from protocol.api import TrainRequest
from protocol.errors import UserError
from tests.peer.processes import Daemon
from tests.rlhf.test_daemons import SECONDS_MAX, TINY, finished, network, pairs_file, start

__all__ = ["network"]
QUICK = {"local_steps": "2", "batch": "4"}


async def test_a_trained_model_learns_responses_and_then_preferences(network: list[Daemon], tmp_path: Path) -> None:
    first = network[0]
    responses = [json.dumps({"prompt": f"q{number}: ", "response": "aeiou"}) for number in range(40)]
    pairs = [json.dumps({"prompt": f"q{number}: ", "chosen": "aeiou", "rejected": "xkt"}) for number in range(40)]
    with trio.fail_after(SECONDS_MAX):
        await start(network, lies=False)
        base = await first.client.train(TrainRequest("base", "", 1, 0, TINY))
        await finished(first, base)
        file = pairs_file(tmp_path / "examples.jsonl", responses[0], '{"prompt": "a"}')
        wrong = [
            (TrainRequest("", "", 1, 0, {}, "bass", file), r"'bass' fits 0 finished jobs"),
            (TrainRequest("", "", 1, 0, {}, "", file), "say --from JOB, a finished job"),
            (TrainRequest("", "", 1, 0, {"model.width": "32"}, "base", file), "the model is that of the base"),
            (TrainRequest("", "", 1, 0, {}, "base", file), r"examples.jsonl:2: response must be a text"),
            (TrainRequest("", "", 1, 0, {}, "base", str(tmp_path / "none")), "none cannot be read"),
        ]
        for request, told in wrong:
            with pytest.raises(UserError, match=told):
                await first.client.train(request)
        file = pairs_file(tmp_path / "examples.jsonl", *responses)
        tuned = await first.client.train(TrainRequest("", "", 1, 0, QUICK, "base", file))
        view = await finished(first, tuned)
        assert view.objective == "instruct" and view.rejected == {} and len(view.accepted) == 4
        while (status := await first.client.rlhf_status()).stages[0].held_out_nats is None:  # noqa: ASYNC110
            await trio.sleep(0.05)
        file = pairs_file(tmp_path / "pairs.jsonl", *pairs)
        how = (1, "", QUICK | {"rounds": "1", "beta": "0.5"}, file, 1, "", "", "dpo")
        with pytest.raises(UserError, match="dpo takes no --reward"):
            await first.client.start_rlhf_training("instruct", "rule:vowels", 1, "", QUICK, "", 1, "", "", "dpo")
        preferring = await first.client.start_rlhf_training("instruct", "", *how)
        view = await finished(first, preferring)
        assert view.rejected == {} and len(view.accepted) == 4
        while (status := await first.client.rlhf_status()).stages[0].held_out_accuracy is None:  # noqa: ASYNC110
            await trio.sleep(0.05)
        while status.state != "finished":
            status = await first.client.rlhf_status()
        compared = await first.client.compare_policy("q1: ", 10, 1.0, 0)
    (stage,) = status.stages
    assert (stage.objective, stage.job, stage.state) == ("dpo", preferring, "finished")
    assert stage.preferences is not None and not stage.preferences.decided_by_annotators
    assert compared.job == preferring
