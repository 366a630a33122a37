"""Four daemons train a model and tune it; one of them invents its samples."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

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
SECONDS_MAX = 60.0
ROUNDS = 2
TINY = {"model.width": "16", "model.layers": "1", "model.hidden": "16", "model.context": "24", "local_steps": "1", "batch": "2"}
TERMS = {"prompt_tokens": "4", "response_tokens": "8", "epochs": "2", "local_steps": "4", "batch": "8"}
REFUSED = {  # base, reward, other fields
    ("bass", "rule:vowels"): r"'bass' fits 0 finished jobs \(there are: [0-9a-f]+ 'base'\)",
    ("base", "rule:consonants"): "reward 'rule:consonants' is none of rule:vowels, rule:bigram",
    ("base", "rule:bigram"): "is for a vocabulary of 6 tokens, the model has 256",
    (
        "base",
        "rule:vowels",
        ("response_tokens", "21"),
    ): "and response_tokens 21 are more than the model's context of 24",
    ("base", "rule:vowels", ("local_steps", "3")): "local_steps 3 must be a multiple of epochs 2",
    ("base", "rule:vowels", ("audit", "off")): "audit 'off' would let everybody invent responses",
    ("base", "rule:vowels", ("beta", "much")): "beta = 'much' is not a number",
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


async def start(network: list[Daemon]) -> None:
    bootstrap: list[str] = []
    for number, daemon in enumerate(network):
        module = ["peer.liar", "fabricate-rollouts", "-"] if number == LIAR else ["peer.cli"]
        settings = ("--listen", "127.0.0.1:0", "--web-listen", "127.0.0.1:0", "--no-evaluate", *bootstrap)
        daemon.start(*module[1:], "run", *settings, module=module[0])
        if not bootstrap:
            bootstrap = ["--bootstrap", (await daemon.answers()).address]


async def finished(daemon: Daemon, job: str) -> JobView:
    while True:
        view = next(view for view in await daemon.client.jobs() if view.job == job)
        if view.state == "finished":
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
        job = await first.client.start_rlhf_training("base", "rule:vowels", ROUNDS, "", TERMS)
        view = await finished(first, job)
        status = await first.client.rlhf_status()
        (figures,) = await first.client.rlhf_figures()
        compared = await first.client.compare_policy("The ", 20, 1.0, 0)
    liar = view.rejected.pop(peer_id(DataDirectory(network[LIAR].directory).load_identity().public))
    assert liar.keys() <= {"rollout", "absent"} and liar["rollout"] > 0, "nobody waits for it from the second round on"
    assert view.rejected == {} and len(view.accepted) == 3
    assert status == RlhfView("finished", (StageView("ppo", job, "finished", ROUNDS, ROUNDS, view.model_root),))
    assert (figures.job, figures.round) == (job, ROUNDS - 1) and figures.accepted >= 2 and 1 <= figures.tokens <= 8
    assert compared.job == job and compared.round == ROUNDS and compared.reference
