"""The part of `peer demo` that is specific to `--rlhf toy|text`.

`toy` is one job. `text` is three jobs in sequence: a base model that learns a text, a reward model that learns preferences, and a
policy that is tuned with the reward model.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Final, cast

import trio

from demo.demo_peers import TEXT, Demo, PeerDisk
from demo.demo_report import RlhfResult, path_errors_as_user_errors, write_text
from peer.settings.data_directory import storage_errors
from protocol.api import TrainRequest
from protocol.errors import UserError
from rlhf import synthetic_preferences
from rlhf.api.tuning_plan_builder import REWARD_PREFIX, build_toy_spec, parse_ppo_overrides, parse_reward_overrides
from rlhf.data import preference_sets
from rlhf.objectives.ppo import PpoSettings, PromptSourceKind, current_beta
from rlhf.rpc import PolicyMetricsView, RlhfRpc
from storage.regular_files import open_regular
from training.api.job_builder import parse_field, parse_overrides
from training.data import default_text
from training.formats import checkpoint
from training.replicated.replicated_model import ReplicatedModel

REWARD: Final = "rule:bigram"
ROUNDS: Final = {"toy": 40, TEXT: 20}
BASE_PREFIX: Final = "base."  # prefix in `--set` of fields of the base model's job, like `REWARD_PREFIX` for the reward model
SHARED_FIELDS: Final = ("seed", "byzantine_max", "audit")  # fields in `--set` that apply to all three jobs
EXAMPLES: Final = 3_000  # number of synthetic preferences, which the demo makes if `--preferences` names no file
EPOCHS: Final = 3
BEGIN_SECONDS_MAX: Final = 60.0  # longest wait until the next stage of the plan starts, which takes two blocks
POLICY_FILE, REFERENCE_FILE, REWARD_MODEL_FILE = "policy.safetensors", "reference.safetensors", "reward.safetensors"
SAMPLES, PREFERENCES, TOKENIZER = "samples.jsonl", "preferences.jsonl", "tokenizer.json"


def check_demo(demo: Demo) -> None:
    """Check the options of the demo before a peer starts. Raises `UserError` for values that no job can have."""
    options = demo.options
    rounds = options.rounds or ROUNDS[options.rlhf]
    if options.rlhf != TEXT:
        build_toy_spec(REWARD, rounds, "demo", demo.overrides, 0)
        return
    base, reward, policy = _said(demo)
    _taken(base, "vocabulary", 0)
    _taken(reward, "epochs", EPOCHS)
    parse_overrides(base)
    parse_overrides(parse_reward_overrides(reward)[1])
    parse_ppo_overrides(policy)
    if options.preferences:
        path = Path(options.preferences)
        with (
            path_errors_as_user_errors("--preferences", path, "give a readable JSONL file"),
            open_regular(path) as stream,
        ):
            preference_sets.read_preference_file(path.name, stream)


async def start_first_job(demo: Demo) -> str:
    """Start the first job of the demo and return its id."""
    options, calls = demo.options, demo.watched.client
    if options.rlhf != TEXT:
        rounds = options.rounds or ROUNDS[options.rlhf]
        return await cast(RlhfRpc, calls).start_rlhf_training("", REWARD, rounds, "demo", demo.overrides)
    said, _, _ = _said(demo)
    rounds, vocabulary = _taken(said, "rounds", 0), _taken(said, "vocabulary", 0)
    return await calls.start_job(TrainRequest("base", options.data or "", rounds, vocabulary, said, accept_risk=True))


async def wait_for_next_job(demo: Demo, job: str) -> str:
    """Wait for the job after a finished job, and return its id, or "" after the last job.

    Raises `UserError` if the next job does not start.
    """
    if demo.options.rlhf != TEXT:
        return ""
    calls = cast(RlhfRpc, demo.watched.client)
    stages = [stage.job for stage in (await calls.rlhf_status()).stages]
    if job in stages[-1:]:
        return ""
    then = stages[1] if stages else await _tune(demo, calls, job)
    with trio.move_on_after(BEGIN_SECONDS_MAX):
        while all(view.job != then for view in await demo.watched.client.jobs()):  # noqa: ASYNC110
            await trio.sleep(0.1)
        return then
    raise UserError(f"the stage after job {job[:8]} does not start: the plan is {(await calls.rlhf_status()).state}")


async def _tune(demo: Demo, calls: RlhfRpc, base: str) -> str:
    options, (_, reward, policy) = demo.options, _said(demo)
    epochs = _taken(reward, "epochs", EPOCHS)
    # The demo measures the policy on windows of held-out text, so the policy is also tuned on windows of text.
    said = {"prompts": PromptSourceKind.TEXT.value} | policy | {f"{REWARD_PREFIX}{name}": text for name, text in reward.items()}
    file = options.preferences
    if not file:
        path = demo.folder / PREFERENCES
        made = synthetic_preferences.synthetic_pairs(default_text.default_text(), EXAMPLES)
        path.write_text("".join(json.dumps(pair) + "\n" for pair in made))
        file = str(path)
    return await calls.start_rlhf_training(
        base, "", options.rounds or ROUNDS[TEXT], "demo", said, file, epochs, ignore_accuracy=True
    )


def _said(demo: Demo) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return the overrides of the base model's job, of the reward model's job and of the policy's job."""
    said = demo.overrides
    parts: dict[str, dict[str, str]] = {BASE_PREFIX: {}, REWARD_PREFIX: {}, "": {}}
    for name, text in said.items():
        prefix = next((prefix for prefix in (BASE_PREFIX, REWARD_PREFIX) if name.startswith(prefix)), "")
        parts[prefix][name.removeprefix(prefix)] = text
    common = {name: said[name] for name in SHARED_FIELDS if name in said}
    return common | parts[BASE_PREFIX], common | parts[REWARD_PREFIX], parts[""]


def _taken(said: dict[str, str], name: str, usual: int) -> int:
    """Remove a number from the overrides that is no field of a job, and return it, by default `usual`.

    Raises `UserError` if it is invalid.
    """
    return cast(int, parse_field(int, name, said.pop(name, str(usual))))


async def evaluate_policy(demo: Demo, job: str, watched: tuple[PolicyMetricsView, ...]) -> RlhfResult:
    """Measure the policy, and write models and responses to the demo's folder.

    A separate process measures, because it must import torch.
    """
    beta, files = await trio.to_thread.run_sync(_write, demo, bytes.fromhex(job))
    command = [sys.executable, "-m", "rlhf.pytorch.policy_evaluation", str(beta), *files]
    found = json.loads((await trio.run_process(command, capture_stdout=True)).stdout)
    write_text(demo.folder / SAMPLES, "".join(json.dumps(sample) + "\n" for sample in found["samples"]))
    spec, _, origin = checkpoint.read_checkpoint(demo.folder / POLICY_FILE)
    own: PpoSettings = spec.decoded_settings
    names = ("distinct_2", "response_tokens", "length_correlation")
    seen = {name: getattr(watched[-1], name) for name in names} if watched else {}
    return RlhfResult(algorithm=own.algorithm.value, beta=beta, rounds=origin.round, **found["figures"], **seen)


def _write(demo: Demo, job: bytes) -> tuple[float, list[str]]:
    """Write the models to the demo's folder.

    Returns β for the policy's value, and file arguments of `rlhf.pytorch.policy_evaluation`.
    """
    with contextlib.closing(PeerDisk(demo.watched.directory)) as disk:
        policy = disk.model(job)
        spec = policy.spec
        base = disk.model(spec.base.job) if spec.base else None
        first = ReplicatedModel.initial(job, spec, base)
        files = [_saved(demo, POLICY_FILE, policy), _saved(demo, REFERENCE_FILE, first)]
        read = spec.resolved_objective.required_model(spec)
        if read is None or base is None:
            return spec.decoded_settings.beta, files
        beta = current_beta(policy.state.steering, spec.decoded_settings.beta)  # β that one more round would have
        reward = disk.model(read.job)
        files += [_saved(demo, REWARD_MODEL_FILE, reward), *(str(disk.text(of)) for of in (base.spec, reward.spec))]
        if spec.tokenizer is not None:
            with storage_errors(demo.folder / TOKENIZER):
                (demo.folder / TOKENIZER).write_bytes(disk.blob(spec.tokenizer))
            files.append(str(demo.folder / TOKENIZER))
        return beta, files


def _saved(demo: Demo, name: str, model: ReplicatedModel) -> str:
    path = demo.folder / name
    checkpoint.write_checkpoint(
        path, model.spec, model.parameters, checkpoint.CheckpointOrigin(model.job, model.round, model.root)
    )
    return str(path)
