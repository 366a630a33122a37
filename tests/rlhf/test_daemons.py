"""Four daemons train a model and tune it; one of them invents its samples, or goes away."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase, digits

import pytest
import trio

from ledger.core.genesis import Founder, Genesis
from peer.features import founding_modules, roles
from peer.settings.datadir import DataDirectory
from protocol import codec
from protocol.api import JobView, TrainRequest
from protocol.errors import UserError
from protocol.identity import Identity, peer_id
from rlhf.calls import RlhfView, StageView
from tests.peer.processes import Daemon, daemons

NAMES = ("ada", "bea", "cyd", "liar")
LIAR = 3
SECONDS_MAX = 120.0  # for what takes ten seconds on a machine that has time
ROUNDS = 2
TINY = {"model.width": "16", "model.layers": "1", "model.hidden": "16", "model.context": "24", "local_steps": "1", "batch": "2"}
TERMS = {"prompt_tokens": "4", "response_tokens": "8", "epochs": "2", "local_steps": "4", "batch": "8"}
REFUSED = {  # base, reward, other fields
    ("bass", "rule:vowels"): r"'bass' fits 0 finished jobs \(there are: [0-9a-f]+ 'base'\)",
    ("base", "model"): "a plan trains it: leave --reward out",
    ("base", "rule:consonants"): "reward 'rule:consonants' is none of rule:vowels, rule:bigram",
    ("base", "rule:bigram"): "is for a vocabulary of 6 tokens, the model has 256",
    (
        "base",
        "rule:vowels",
        ("response_tokens", "21"),
    ): "and response_tokens 21 are more than the model's context of 24",
    ("base", "rule:vowels", ("local_steps", "3")): "local_steps 3 must be a multiple of epochs 2",
    ("base", "rule:vowels", ("epochs", "0")): r"job 'ppo': epochs: 0 is outside 1\.\.64$",
    ("base", "rule:vowels", ("reward.batch", "4")): "--set reward.batch=…: a rule is not trained",
    ("base", "rule:vowels", ("audit", "off")): "audit 'off' would let everybody invent responses",
    ("base", "rule:vowels", ("beta", "much")): "beta = 'much' is not a number",
    ("base", "rule:vowels", ("ramp", "nan")): "ramp must lie in 0..1000, is nan",
    ("base", "rule:vowels", ("betas", "1")): "'betas' is not a field of a job",
}


@pytest.fixture
def network(tmp_path: Path) -> Iterator[list[Daemon]]:
    identities = [Identity.generate() for _ in NAMES]
    registers = roles()["full"].registers
    founders = {one.public: Founder(name, registers) for one, name in zip(identities, NAMES, strict=True)}
    genesis = Genesis("lab", int(time.time() * 1000), secrets.token_bytes(16), dict(sorted(founders.items())), founding_modules())
    for name, identity in zip(NAMES, identities, strict=True):
        directory = DataDirectory.create(tmp_path / name)
        directory.write_identity(identity)
        directory.write_genesis(codec.encode(genesis))
    with daemons([tmp_path / name for name in NAMES]) as made:
        yield made


async def start(network: list[Daemon], lies: bool = True, *more: str) -> None:
    bootstrap: list[str] = []
    for number, daemon in enumerate(network):
        module = ["peer.liar", "fabricate-rollouts", "-"] if lies and number == LIAR else ["peer.cli"]
        quiet = ["--no-evaluate"] if lies or number else []
        settings = ("--listen", "127.0.0.1:0", "--web-listen", "127.0.0.1:0", *quiet, *more, *bootstrap)
        daemon.start(*module[1:], "run", *settings, module=module[0])
        if not bootstrap:
            bootstrap = ["--bootstrap", (await daemon.answers()).address]


async def finished(daemon: Daemon, job: str) -> JobView:
    while True:
        for view in await daemon.client.jobs():
            if view.job == job and view.state == "finished":
                return view
        await trio.sleep(0.05)


async def test_a_trained_model_is_tuned_and_who_invents_samples_is_named(network: list[Daemon]) -> None:
    first = network[0]
    with trio.fail_after(SECONDS_MAX):
        await start(network)
        assert (await first.client.rlhf_status()).state == "none"
        base = await first.client.train(TrainRequest("base", "", 1, 0, TINY))
        with pytest.raises(UserError, match="--base 'base': that job is not finished yet"):
            await first.client.start_rlhf_training("base", "rule:vowels", ROUNDS, "", TERMS)
        await finished(first, base)
        for wrong, told in REFUSED.items():
            with pytest.raises(UserError, match=told):
                await first.client.start_rlhf_training(*wrong[:2], ROUNDS, "", TERMS | dict(wrong[2:]))
        job = await first.client.start_rlhf_training("base", "rule:vowels", ROUNDS, "", TERMS | {"kl_target": "0.5"})
        view = await finished(first, job)
        status = await first.client.rlhf_status()
        (figures,) = await first.client.rlhf_figures()
        compared = await first.client.compare_policy("The ", 20, 1.0, 0)
    liar = view.rejected.pop(peer_id(DataDirectory(network[LIAR].directory).load_identity().public))
    assert liar.keys() <= {"rollout", "absent"} and liar["rollout"] > 0, "nobody waits for it from the second round on"
    assert view.rejected == {} and len(view.accepted) == 3
    assert status == RlhfView("finished", (StageView("ppo", job, "finished", ROUNDS, ROUNDS, view.model_root),))
    assert (figures.job, figures.round) == (job, ROUNDS - 1) and figures.accepted >= 2 and 1 <= figures.tokens <= 8
    assert 0 < figures.distinct_2 <= 1 and (figures.beta, figures.kl_stop, figures.warning) == (None, None, "")
    assert compared.job == job and compared.round == ROUNDS and compared.reference


WRONG_PAIRS = {  # the second of three lines
    '{"prompt": "a", "chosen": "b"}': "pairs.jsonl:2: rejected must be a text that is not empty, not null",
    '{"prompt": "a", "chosen": "b", "rejected": "c", "p": 2}': r"pairs.jsonl:2: p must be a number in 0..1",
    json.dumps({"prompt": "a" * 24, "chosen": "b", "rejected": "c"}): "pairs.jsonl: line 2: prompt and response are 25 tokens",
}


def pairs_file(path: Path, *lines: str) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


async def test_a_plan_goes_from_preferences_to_a_tuned_policy_without_its_author(network: list[Daemon], tmp_path: Path) -> None:
    first, author = network[:2]
    lines = [json.dumps({"prompt": f"q{number}: ", "chosen": "aeiou", "rejected": "xkt"}) for number in range(60)]
    quick = {"proposal_seconds": "2", "rounds": "2", "local_steps": "2", "batch": "4"}
    said = (
        TERMS
        | {"proposal_seconds": "2", "prompt_tokens": "5", "stop": "none"}
        | {f"reward.{name}": value for name, value in quick.items()}
    )
    with trio.fail_after(SECONDS_MAX):
        await start(network, lies=False)
        base = await first.client.train(TrainRequest("base", "", 1, 0, TINY))
        await finished(author, base)
        for wrong, told in WRONG_PAIRS.items():
            file = pairs_file(tmp_path / "pairs.jsonl", lines[0], wrong, lines[1])
            with pytest.raises(UserError, match=told):
                await author.client.start_rlhf_training("base", "", 1, "", said, file)
        file = pairs_file(tmp_path / "pairs.jsonl", *lines)
        all_of_them, words = (tmp_path / name for name in ("all.txt", "words.txt"))
        all_of_them.write_text("q*\n")
        words.write_text("".join(f"{letter}*\n" for letter in ascii_lowercase + digits if letter != "q"))
        with pytest.raises(UserError, match="--words blocks each of 49 prompts that were looked at"):
            await author.client.start_rlhf_training("base", "", 1, "", said, file, 3, "", str(all_of_them))
        reward = await author.client.start_rlhf_training("base", "", 1, "", said, file, 3, "", str(words))
        with pytest.raises(UserError, match=r"a plan of .* goes on"):
            await author.client.start_rlhf_training("base", "", 1, "", said, file)
        await author.client.pause_rlhf_training()
        while (status := await first.client.rlhf_status()).stages[0].state not in ("paused", "finished"):  # noqa: ASYNC110
            await trio.sleep(0.05)
        assert status.state == "paused" and status.stages[1].state == "waiting"
        await author.client.resume_rlhf_training()
        root = (await finished(first, reward)).model_root
        author.kill()
        left = (first, *network[2:])
        for daemon in left:
            while (status := await daemon.client.rlhf_status()).state != "finished":  # noqa: ASYNC110
                await trio.sleep(0.05)
        while (status := await first.client.rlhf_status()).stages[0].held_out_accuracy is None:  # noqa: ASYNC110
            await trio.sleep(0.05)
        seen = [(await daemon.client.rlhf_status()).stages[1] for daemon in left]
        compared = await first.client.compare_policy("q1: ", 64, 1.0, 0)
        (figures,) = await first.client.rlhf_figures()
        policy = next(view for view in await first.client.jobs() if view.job == seen[0].job)
        await first.client.export(str(tmp_path / "export"))
    assert [(stage.objective, stage.state, stage.round, stage.rounds) for stage in status.stages] == [
        ("reward", "finished", 2, 2),
        ("ppo", "finished", 1, 1),
    ]
    assert (status.stages[0].job, status.stages[0].model_root) == (reward, root)
    assert (tmp_path / "export" / f"{reward}.safetensors").exists(), "`rlhf score` takes it"
    assert len({stage.model_root for stage in seen}) == 1 and seen[0].model_root
    assert policy.data == "", "its prompts are those of the pairs, so it reads no text"
    # Its author alone had the list, and was gone before the policy began.
    assert (compared.policy, compared.reference, compared.withheld) == ("", "", ("policy", "reference"))
    assert figures.score < -5, "nearly every response holds a listed word"
