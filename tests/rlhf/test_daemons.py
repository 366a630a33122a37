"""Four daemons train and tune a model; one of them invents its samples, or stops.

A start of four daemons with their workers takes longer than a round, so each network runs several checks in a row.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from string import ascii_lowercase, digits

import pytest
import trio

from curation.rpc import ImportRequest
from curation.simulated_annotators import ServingPeerClient, SimulatedAnnotator
from curation.tasks.task_pages import task_id
from ledger.core.genesis import Founder, Genesis
from peer.export.export_replay import ask_export
from peer.features import founding_modules, roles
from peer.settings.data_directory import DataDirectory
from protocol import codec
from protocol.api import JobView, TrainRequest
from protocol.errors import UserError
from protocol.identity import Identity, peer_id
from protocol.sampling import SamplingOptions
from rlhf.api.pair_trace import ExportedPairTrace
from rlhf.rpc import RlhfView, StageView
from tests.peer.processes import LATE, Daemon, children, daemons
from tests.waiting import patience
from training.transformer import BYTES
from web.web_service import ADDRESS_FILE

NAMES = ("ada", "bea", "cyd", "liar")
LIAR = 3
SECONDS_MAX = 300.0  # for work that takes ten seconds on an idle machine
ROUNDS = 2
TINY = {"model.width": "16", "model.layers": "1", "model.hidden": "16", "model.context": "24", "local_steps": "1", "batch": "2"}
PAIRS = {f"q{number}: ": number % 3 for number in range(12)}  # answers by prompt: the first, the second, a tie
OF_PROJECT = {"reward.rounds": "2", "reward.local_steps": "2", "reward.batch": "4"}
OPEN = ("--sign-up", "open")
SERVES = Path("services", "serve", ADDRESS_FILE)
OF_SETS = {"local_steps": "2", "batch": "4"}
TERMS = {"prompt_tokens": "4", "response_tokens": "8", "epochs": "2", "local_steps": "4", "batch": "8"}
REFUSED = {  # base, reward, other fields
    ("bass", "rule:vowels"): r"'bass' matches no finished jobs \(choices: [0-9a-f]+ 'base'\)",
    ("base", "model"): "a plan trains the reward model itself: leave --reward out",
    ("base", "rule:consonants"): "unknown reward 'rule:consonants': choose one of rule:vowels, rule:bigram",
    ("base", "rule:bigram"): "needs a vocabulary of 6 tokens, but the model has 257",
    (
        "base",
        "rule:vowels",
        ("response_tokens", "21"),
    ): "and response_tokens 21 are more than the model's context of 24",
    ("base", "rule:vowels", ("local_steps", "3")): "local_steps 3 must be a multiple of epochs 2",
    ("base", "rule:vowels", ("epochs", "0")): r"job 'ppo': epochs: 0 is outside 1\.\.64$",
    ("base", "rule:vowels", ("reward.batch", "4")): "--set reward.batch=…: a rule is not trained",
    ("base", "rule:vowels", ("audit", "off")): "audit 'off' would let trainers invent responses",
    ("base", "rule:vowels", ("beta", "much")): "beta = 'much' is not a number",
    ("base", "rule:vowels", ("clip_ramp", "nan")): "clip_ramp must be in 0..1000, not nan",
    ("base", "rule:vowels", ("betas", "1")): "unknown job field 'betas'",
}


@pytest.fixture
def network(tmp_path: Path) -> Iterator[list[Daemon]]:
    identities = [Identity.generate() for _ in NAMES]
    registers = roles()["full"].registered_roles
    founders = {one.public: Founder(name, registers) for one, name in zip(identities, NAMES, strict=True)}
    genesis = Genesis("lab", int(time.time() * 1000), secrets.token_bytes(16), dict(sorted(founders.items())), founding_modules())
    for name, identity in zip(NAMES, identities, strict=True):
        directory = DataDirectory.create(tmp_path / name)
        directory.write_identity(identity)
        directory.write_genesis(codec.encode(genesis))
    with daemons([tmp_path / name for name in NAMES]) as made:
        yield made


PLACES = ("--listen", "127.0.0.1:0", "--web-listen", "127.0.0.1:0")


async def start(network: list[Daemon], lies: bool = True, *more: str) -> None:
    bootstrap: list[str] = []
    for number, daemon in enumerate(network):
        module = ["demo.lying_trainer", "fabricate-rollouts", "-"] if lies and number == LIAR else ["peer.cli"]
        quiet = ["--no-evaluate"] if number else []
        daemon.start(*module[1:], "run", *PLACES, *quiet, *more, *bootstrap, module=module[0])
        if not bootstrap:
            bootstrap = ["--bootstrap", (await daemon.answers()).address]


def liar_of(network: list[Daemon]) -> str:
    return peer_id(DataDirectory(network[LIAR].directory).load_identity().public)


def assert_only_lies_are_refused(view: JobView, lies: set[str]) -> None:
    assert {key for key, reasons in view.rejected.items() if reasons.keys() - LATE} == lies
    assert len(view.accepted.keys() - lies) == len(view.accepted) >= 2


async def finished(daemon: Daemon, job: str) -> JobView:
    while True:
        for view in await daemon.client.jobs():
            if view.job == job and view.state == "finished":
                return view
        await trio.sleep(0.05)


@pytest.mark.long
@pytest.mark.real("processes")
async def test_a_trained_model_learns_responses_and_pairs_and_is_tuned_and_who_invents_samples_is_named(
    network: list[Daemon], tmp_path: Path
) -> None:
    first = network[0]
    with patience(SECONDS_MAX):
        await start(network)
        assert (await first.client.rlhf_status()).state == "none"
        async with nobody_trains(network[1:]):
            base = await first.client.start_job(TrainRequest("base", "", 1, 0, TINY))
            with pytest.raises(UserError, match="--base 'base': the job is not finished"):
                await first.client.start_rlhf_training("base", "rule:vowels", ROUNDS, "", TERMS)
        await finished(first, base)
        for wrong, told in REFUSED.items():
            with pytest.raises(UserError, match=told):
                await first.client.start_rlhf_training(*wrong[:2], ROUNDS, "", TERMS | dict(wrong[2:]))
        await learns_responses_and_then_preferences(network, tmp_path)
        job = await first.client.start_rlhf_training("base", "rule:vowels", ROUNDS, "", TERMS | {"kl_target": "0.5"})
        view = await finished(first, job)
        status = await first.client.rlhf_status()
        (figures,) = await first.client.policy_metrics()
        compared = await first.client.compare_policy("The ", 20, 1.0, 0)
        await first.client.export_model(str(tmp_path / "ppo"), job, "transformers")
        assert json.loads((tmp_path / "ppo" / "generation_config.json").read_text())["eos_token_id"] == 10, (
            "its base knows no end"
        )
    liar = view.rejected[liar_of(network)]
    assert liar.keys() <= {"rollout", *LATE} and liar["rollout"] > 0, "nobody waits for it from the second round on"
    assert_only_lies_are_refused(view, {liar_of(network)})
    assert status == RlhfView("finished", (StageView("ppo", job, "finished", ROUNDS, ROUNDS, view.model_root),))
    assert (figures.job, figures.round) == (job, ROUNDS - 1) and figures.accepted >= 2 and 1 <= figures.response_tokens <= 8
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


async def learns_responses_and_then_preferences(network: list[Daemon], folder: Path) -> None:
    """The trainer that invents samples lies about its update in jobs without sampling."""
    first, lies = network[0], {liar_of(network)}
    responses = [json.dumps({"prompt": f"q{number}: ", "response": "aeiou"}) for number in range(40)]
    pairs = [json.dumps({"prompt": f"q{number}: ", "chosen": "aeiou", "rejected": "xkt"}) for number in range(40)]
    file = pairs_file(folder / "examples.jsonl", responses[0], '{"prompt": "a"}')
    wrong = [
        (TrainRequest("", "", 1, 0, {}, "bass", file), r"'bass' matches no finished jobs"),
        (TrainRequest("", "", 1, 0, {}, "", file), "give --from JOB or --from FOLDER"),
        (TrainRequest("", "", 1, 0, {"model.width": "32"}, "base", file), "the model is that of job 'base'"),
        (TrainRequest("", "", 1, 0, {}, "base", file), r"examples.jsonl:2: response must be a text"),
        (TrainRequest("", "", 1, 0, {}, "base", str(folder / "none")), "none cannot be read"),
    ]
    for request, told in wrong:
        with pytest.raises(UserError, match=told):
            await first.client.start_job(request)
    lines = (*responses, *(json.dumps({"prompt": "q: ", "completion": "k", "label": good}) for good in (True, False)))
    file = pairs_file(folder / "examples.jsonl", *lines, json.dumps({"prompt": "q" * 30, "response": "a\nb"}), "{")
    prepared = {"skip_bad": True, "truncate": "left"}
    tuned = await first.client.start_job(TrainRequest("", "", 1, 0, OF_SETS, "base", file, **prepared))  # type: ignore[arg-type]
    view = await finished(first, tuned)
    assert view.objective == "instruct"
    assert view.notes == ("2 lines left out: unusable, or labelled as bad", "1 line shortened to the context of 24 tokens")
    assert_only_lies_are_refused(view, lies)
    while (status := await first.client.rlhf_status()).stages[0].held_out_nats is None:  # noqa: ASYNC110
        await trio.sleep(0.05)
    file = pairs_file(folder / "pairs.jsonl", *pairs, json.dumps({"prompt": "q: ", "chosen": "aei", "rejected": "aei"}))
    how = (1, "", OF_SETS | {"rounds": "1", "beta": "0.5"}, file, 1, "", "", "dpo", True)
    with pytest.raises(UserError, match="dpo takes no --reward"):
        await first.client.start_rlhf_training("instruct", "rule:vowels", 1, "", OF_SETS, "", 1, "", "", "dpo")
    preferring = await first.client.start_rlhf_training("instruct", "", *how)
    view = await finished(first, preferring)
    assert_only_lies_are_refused(view, lies)
    for job, end in (("base", BYTES), (tuned, BYTES), (preferring, BYTES)):
        await first.client.export_model(str(folder / job), job, "transformers")
        assert json.loads((folder / job / "generation_config.json").read_text())["eos_token_id"] == end
    while (status := await first.client.rlhf_status()).stages[0].held_out_accuracy is None:  # noqa: ASYNC110
        await trio.sleep(0.05)
    while status.state != "finished":
        status = await first.client.rlhf_status()
    compared = await first.client.compare_policy("q1: ", 10, 1.0, 0)
    (stage,) = status.stages
    (cut,) = stage.notes
    assert cut == "1 line left out: unusable, or labelled as bad"
    assert (stage.objective, stage.job, stage.state) == ("dpo", preferring, "finished")
    assert stage.preferences is not None and not stage.preferences.decided_by_annotators
    assert compared.job == preferring
    assert "\n" not in await chats(first, "base"), "a line break ends an answer of a model that has learned no end"
    assert "\n" in await chats(first, tuned)


async def chats(daemon: Daemon, job: str) -> str:
    """Return first answers of many chats at a high temperature: a line break is as likely as an end of text."""
    said = []
    for seed in range(40):
        async with aclosing(daemon.client.sample_text("q1: ", SamplingOptions(200, 9.0, seed=seed), job, ())) as pieces:
            said += [piece.text async for piece in pieces]
    return "".join(said)


@asynccontextmanager
async def nobody_trains(network: Sequence[Daemon]) -> AsyncIterator[None]:
    """Stop the workers of most trainers: rounds wait for them, while blocks are decided."""
    workers: list[int] = []
    for daemon in network:
        while not (started := children(daemon.pid)):  # noqa: ASYNC110
            await trio.sleep(0.02)
        workers += started
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)


@pytest.mark.real("processes")
@pytest.mark.long
async def test_plans_go_from_preferences_to_a_tuned_policy_and_from_a_project_to_a_reward_model_without_their_author(
    network: list[Daemon], tmp_path: Path
) -> None:
    first, author = network[:2]
    lines = [json.dumps({"prompt": f"q{number}: ", "chosen": "aeiou", "rejected": "xkt"}) for number in range(60)]
    quick = {"rounds": "2", "local_steps": "2", "batch": "4"}
    said = TERMS | {"prompt_tokens": "5", "stop_token": "none"} | {f"reward.{name}": value for name, value in quick.items()}
    left = (first, *network[2:])
    with patience(SECONDS_MAX):
        await start(network, False, *OPEN)
        base = await first.client.start_job(TrainRequest("base", "", 1, 0, TINY))
        project = await imported(author, tmp_path, "pairs", list(PAIRS))
        await finished(author, base)
        for wrong, told in WRONG_PAIRS.items():
            file = pairs_file(tmp_path / "pairs.jsonl", lines[0], wrong, lines[1])
            with pytest.raises(UserError, match=told):
                await author.client.start_rlhf_training("base", "", 1, "", said, file)
        file = pairs_file(tmp_path / "pairs.jsonl", *lines)
        all_of_them, words = (tmp_path / name for name in ("all.txt", "words.txt"))
        all_of_them.write_text("q*\n")
        words.write_text("".join(f"{letter}*\n" for letter in ascii_lowercase + digits if letter != "q"))
        with pytest.raises(UserError, match="--blocklist blocks each of 49 prompts that were checked"):
            await author.client.start_rlhf_training("base", "", 1, "", said, file, 3, "", str(all_of_them))
        with pytest.raises(UserError, match=r"--set reward.score=first: must be one of last, mean"):
            await author.client.start_rlhf_training("base", "", 1, "", said | {"reward.score": "first"}, file)
        async with nobody_trains(left):
            reward = await author.client.start_rlhf_training("base", "", 1, "", said, file, 3, "", str(words))
            with pytest.raises(UserError, match=r"a plan of .* is already running"):
                await author.client.start_rlhf_training("base", "", 1, "", said, file)
            await author.client.pause_rlhf_training()
        while (status := await first.client.rlhf_status()).stages[0].state not in ("paused", "finished"):  # noqa: ASYNC110
            await trio.sleep(0.05)
        assert status.state == "paused" and status.stages[1].state == "waiting"
        async with nobody_trains(left):
            await author.client.resume_rlhf_training()
            author.kill()
        root = (await finished(first, reward)).model_root
        for daemon in left:
            while (status := await daemon.client.rlhf_status()).state != "finished":  # noqa: ASYNC110
                await trio.sleep(0.05)
        while (status := await first.client.rlhf_status()).stages[0].held_out_accuracy is None:  # noqa: ASYNC110
            await trio.sleep(0.05)
        decided, seen = zip(*[(await daemon.client.rlhf_status()).stages for daemon in left], strict=True)
        compared = [await first.client.compare_policy("q1: ", 64, 1.0, seed) for seed in range(4)]
        (figures,) = await first.client.policy_metrics()
        policy = next(view for view in await first.client.jobs() if view.job == seen[0].job)
        (author.directory / SERVES).unlink()  # of the killed daemon
        author.start("run", *PLACES, "--no-evaluate", *OPEN, "--bootstrap", (await first.answers()).address)
        await author.answers()
        await project_teaches_a_reward_model(network, tmp_path, project)
    assert [(stage.objective, stage.state, stage.round, stage.rounds) for stage in status.stages] == [
        ("reward-mean", "finished", 2, 2),
        ("ppo", "finished", 1, 1),
    ]
    assert (status.stages[0].job, status.stages[0].model_root) == (reward, root)
    assert status.stages[0].measured_rounds == 2 and status.stages[0].word_count_accuracy == 1.0
    # Peers that measure no models of themselves have the accuracy that voters reported.
    assert all(stage.held_out_accuracy > 0.8 and stage.held_out_pairs == 11 for stage in decided)
    assert (tmp_path / "export" / f"{reward}.safetensors").exists(), "`rlhf score` takes it"
    assert len({stage.model_root for stage in seen}) == 1 and seen[0].model_root
    assert policy.data == "", "its prompts are those of the pairs, so it reads no text"
    # Only the author had the list, and it was gone before the policy began. Some responses have no letter at the start of a word.
    withheld = [(of.policy, of.reference) for of in compared if of.withheld == ("policy", "reference")]
    assert withheld and set(withheld) == {("", "")}
    assert figures.score < -5 and figures.blocked > 0.5, "nearly every response holds a listed word"


async def imported(daemon: Daemon, folder: Path, name: str, prompts: list[str], response: str = "aeiou") -> str:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": prompt, "items": [response, "xkt"]}) + "\n" for prompt in prompts))
    return (await daemon.client.import_tasks(ImportRequest(str(file), name, "", "pair", (), False, 1, 1, "", False))).project


async def people_compare(daemon: Daemon, truth: dict[str, int]) -> None:
    """Let four people answer all tasks."""
    address = daemon.directory / SERVES
    while not address.exists():  # noqa: ASYNC110
        await trio.sleep(0.02)
    host, _, port = address.read_text().removeprefix("http://").rpartition(":")
    people = [
        SimulatedAnnotator(f"p{n}", Identity(bytes([n]) * 32), 1.0, ServingPeerClient(host, int(port)), truth, 0.0)
        for n in range(4)
    ]
    async with trio.open_nursery() as crowd:
        for person in people:
            crowd.start_soon(person.take_part, trio.CapacityLimiter(4))
        while any(view.settled < view.tasks for view in await daemon.client.projects()):  # noqa: ASYNC110
            await trio.sleep(0.05)
        crowd.cancel_scope.cancel()


async def project_teaches_a_reward_model(network: list[Daemon], folder: Path, project: str) -> None:
    """People compare responses, and each voter derives the set of decided pairs."""
    first, author = network[:2]
    begin = author.client.start_rlhf_training
    for named, why in (("pairs", "--project 'pairs': it has no usable pair yet"), ("none", "'none' matches no projects")):
        with pytest.raises(UserError, match=why):
            await begin("base", "", 0, "", OF_PROJECT, project=named)
    await people_compare(author, PAIRS)
    reward = await begin("base", "", 0, "", OF_PROJECT, project="pairs")
    author.kill()
    done = await finished(first, reward)
    for daemon in (first, *network[2:]):
        while ((status := await daemon.client.rlhf_status()).state, status.stages[0].job) != ("finished", reward):  # noqa: ASYNC110
            await trio.sleep(0.05)
        assert status.stages[0].model_root == done.model_root
    traces = [await first.client.trace_pair(task_id(bytes.fromhex(project), n).hex()) for n in range(len(PAIRS))]
    with pytest.raises(UserError, match="the preference sets of 2 jobs do not have it"):
        await first.client.trace_pair("00" * 32)
    await first.client.export_run(str(folder / "export"))
    offline = await trio.to_thread.run_sync(ask_export, folder / "export", ExportedPairTrace(traces[0].pair))
    assert offline == traces[0], "whoever has the export needs no peer"
    drawn = [draw for trace in traces for draw in trace.draws]
    assert {draw.job for draw in drawn} == {reward} and {draw.round for draw in drawn} == {0, 1}
    assert {draw.trainer for draw in drawn if draw.accepted} == set(done.accepted)
    assert {(trace.set, trace.height) for trace in traces} == {
        (status.stages[0].preferences.set, status.stages[0].preferences.height)
    }
    assert not any(trace.draws for trace in traces if trace.held_out) and not any(trace.unknown_rounds for trace in traces)
    assert done.data_origin.startswith(f"decided by annotators (project {project[:16]}, height ")
    preferences = status.stages[0].preferences
    assert preferences is not None and preferences.decided_by_annotators and preferences.project == project
    assert preferences.height > 0 and preferences.redacted == preferences.attesting_voters == preferences.dissenting_voters == 0
