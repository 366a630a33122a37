"""Construction of tuning plans from a person's request: specifications of jobs, and the blobs that they name.

The functions run in a thread, because they read and tokenize preference sets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from features.text_tables import pluralize
from ledger.jobs import ModelReference
from protocol import codec
from protocol.errors import UserError
from rlhf.api.supervised_jobs import (
    TokenizedSet,
    TruncationSide,
    attach_set,
    build_supervised_spec,
    count_stop_texts,
    default_stop_token,
    load_job_tokenizer,
    parse_objective_overrides,
    prepare_records,
    tokenize_set,
)
from rlhf.data import preference_sets, tokenized_records
from rlhf.data.dataset_files import InvalidLines
from rlhf.data.preference_sets import PreferencePair
from rlhf.ledger import tuning_plans
from rlhf.ledger.preference_set_attestation import PreferenceSetSource
from rlhf.moderation import blocklist
from rlhf.objectives import job_presets
from rlhf.objectives.ppo import MODEL_REWARD, ROLE, RULE_PREFIX, PpoSettings, PromptSourceKind
from rlhf.objectives.rule_rewards import RULES
from rlhf.objectives.supervised_objectives import DPO, MEAN, MEAN_REWARD, REWARDS, RewardModelObjective, TrainableParameters
from rlhf.pair_accuracy import can_beat_chance
from storage.regular_files import read_regular
from training.api.initial_model import initial_model_from_job, resolve_base_job
from training.api.job_builder import byzantine_trainers_max
from training.data import text_files
from training.job_spec import JobSpec, PreparationCounts, complete_fields
from training.round_context import TrainingPeer

FIELDS_NOT_SET_BY_NAME = frozenset({"reward", "reward_model", "blocklist"})  # settings not allowed in `--set`
REWARD_PREFIX = "reward."  # prefix of the reward model's fields in `--set`
SCORE_FIELD = "score"  # field in `--set` that selects one of `REWARDS`
# Prompts checked against a blocklist, which is refused if it blocks each of them; the check takes seconds.
PROMPTS_CHECKED_MAX = 1_000
UNTRAINED_BASE = ModelReference(bytes(32), 1, bytes(32))  # placeholder for a reward model that is not trained yet


# The plan, and the figures `odd` of its set (`PreferenceSetStatistics`).
BuiltPlan = tuple[tuning_plans.StartPlan, Mapping[str, float]]


@dataclass(frozen=True)
class TuningPlanBuilder:
    """A person's request for a plan, with methods that build the plan.

    They raise `UserError` for an invalid base, value or preference.
    """

    peer: TrainingPeer
    base: str  # name or id of a finished job whose model is tuned; empty: a new model, for a rule with its own vocabulary
    name: str
    iterations: int  # rounds of the policy; 0: the plan has only a reward model
    epochs: int  # passes over the set in the job that learns from preferences
    overrides: dict[str, str]  # values of `--set`; names of the reward model's fields begin with REWARD_PREFIX
    blocklist: bytes  # packed list of words that block a response; empty: no list
    skip_bad: bool = False  # Invalid lines of a file are left out.
    truncate: TruncationSide = TruncationSide.NOTHING  # end at which long texts of a file are cut
    ignore_accuracy: bool = False  # the policy starts with any accuracy of its reward model

    @property
    def reward_overrides(self) -> dict[str, str]:
        return {key.removeprefix(REWARD_PREFIX): text for key, text in self.overrides.items() if key.startswith(REWARD_PREFIX)}

    @property
    def policy_overrides(self) -> dict[str, str]:
        return {key: text for key, text in self.overrides.items() if not key.startswith(REWARD_PREFIX)}

    def build_rule_plan(self, reward: str) -> BuiltPlan:
        if reward == MODEL_REWARD:
            raise UserError(
                "--reward 'model': a plan trains the reward model itself: leave --reward out, and give --project or --preferences"
            )
        if self.reward_overrides:
            raise UserError(f"--set {REWARD_PREFIX}{next(iter(self.reward_overrides))}=…: a rule is not trained: leave it out")
        if not self.iterations:
            raise UserError("--ppo-iterations 0 tunes nothing with a rule: use at least 1")
        return tuning_plans.StartPlan(self._policy(reward).encode()), {}

    def check_preferences(self) -> None:
        if self.blocklist and not self.iterations:
            raise UserError("--blocklist applies only to a policy, and this plan tunes none: leave it out")
        if self.policy_overrides and not self.iterations:
            raise UserError(
                f"--set {next(iter(self.policy_overrides))}=…: no policy is tuned; reward model settings are `{REWARD_PREFIX}…`"
            )

    def build_reward_model_plan(self, given: str | list[PreferencePair], source: PreferenceSetSource | None) -> BuiltPlan:
        """Build a plan of a reward model and a policy. `given` is a list of pairs, or the path of a file of pairs."""
        called = f"{self.name}-reward" if self.name else "reward"
        of = initial_model_from_job(self.peer, self.base, "--base")
        kind, rest = parse_reward_overrides(self.reward_overrides)
        keeps_layers = kind is MEAN_REWARD and rest.get("learns", TrainableParameters.WORDS) == TrainableParameters.WORDS
        usual = job_presets.MEAN_REWARD_JOB if keeps_layers else job_presets.REWARD_JOB
        spec, said = build_supervised_spec(self.peer, kind, of, called, rest, usual, REWARD_PREFIX)
        found, file, preparation = self._prepared(given, spec)
        tokens = tokenize_set(self.peer, spec, found, file)
        if self.blocklist and self.policy_overrides.get("prompts") != PromptSourceKind.TEXT:
            _require_prompt(preference_sets.split_held_out(found, spec.held_out_permille)[0], self.blocklist)
        if self.iterations and not self.ignore_accuracy:
            _require_measurable(tokens)
        policy = self._policy(MODEL_REWARD, tokens) if self.iterations else None
        if preparation is not None:
            stop = policy.decoded_settings.stop_token if policy else None
            counts = replace(preparation, holding_stop=count_stop_texts(found, load_job_tokenizer(self.peer, spec), stop))
            spec, policy = replace(spec, preparation=counts), replace(policy, preparation=counts) if policy else None
        unread = b""
        if policy:  # The reward model is not known yet.
            unread = replace(
                policy, objective_settings=codec.encode(replace(policy.decoded_settings, reward_model=None))
            ).encode()
        return self._plan(spec, found, tokens, said.get("rounds"), source, unread)

    def build_dpo_plan(self, given: str | list[PreferencePair], source: PreferenceSetSource | None) -> BuiltPlan:
        """Build a plan of one DPO job. `given` is a list of pairs, or the path of a file of pairs."""
        of = initial_model_from_job(self.peer, self.base, "--base")
        spec, said = build_supervised_spec(self.peer, DPO, of, self.name or DPO.name, self.overrides, job_presets.DPO_JOB)
        found, file, preparation = self._prepared(given, spec)
        spec = replace(spec, preparation=preparation)
        tokens = tokenize_set(self.peer, spec, found, file)
        return self._plan(spec, found, tokens, said.get("rounds"), source)

    def _plan(
        self,
        spec: JobSpec,
        records: list[PreferencePair],
        tokens: TokenizedSet,
        rounds: int | None,
        source: PreferenceSetSource | None,
        policy: bytes = b"",
    ) -> BuiltPlan:
        spec, manifest = attach_set(self.peer, spec, records, tokens, rounds, self.epochs)
        source = replace(source, tokens=manifest.tokens) if source else None
        begin = tuning_plans.StartPlan(spec.encode(), policy, source, self.ignore_accuracy)
        return begin, tokens.statistics.odd if tokens.statistics else {}

    def _prepared(
        self, given: str | list[PreferencePair], spec: JobSpec
    ) -> tuple[list[PreferencePair], str, PreparationCounts | None]:
        """Return the pairs, the name of their source for messages, and counts of changed lines.

        Pairs of a project are not changed and have no counts.
        """
        if not isinstance(given, str):
            return given, "--project", None
        file, misfits = Path(given).name, InvalidLines(self.skip_bad)
        read = _read(given, misfits)
        found, counts = prepare_records(file, spec, read, load_job_tokenizer(self.peer, spec), misfits, self.truncate)
        return found, file, counts

    def _policy(self, reward: str, learned: tokenized_records.TokenizedPairs | None = None) -> JobSpec:
        """Build the specification of the policy, with a placeholder for its reward model, and store the blocklist as a blob."""
        name, liars = self.name or "ppo", byzantine_trainers_max(self.peer, ROLE)
        if not self.base:
            if self.blocklist:
                raise UserError("--blocklist: the toy model generates no text: leave it out")
            return build_toy_spec(reward, self.iterations, name, self.policy_overrides, liars)
        start, _, before = resolve_base_job(self.peer, self.base, "--base")
        said_of_own, said = parse_ppo_overrides(self.policy_overrides)
        if "stop_token" not in said_of_own:
            of = initial_model_from_job(self.peer, self.base, "--base")
            said_of_own["stop_token"] = default_stop_token(self.peer, of, learns_to_end=False)
        usual = job_presets.PPO_TERMS if reward == MODEL_REWARD else job_presets.RULE_TERMS
        words = hashlib.sha256(self.blocklist).digest() if self.blocklist else None
        own = PpoSettings(reward=reward, blocklist=words, **usual | said_of_own)
        if learned is not None:
            longest = int(np.diff(learned.prompts).max(initial=1))
            prompt_tokens = max(1, min(longest, before.model.context - own.response_tokens))
            usual = {"prompts": PromptSourceKind.SET, "prompt_tokens": prompt_tokens}
            own = replace(own, reward_model=UNTRAINED_BASE, **usual | said_of_own)
        if problem := own.settings_problem():
            raise UserError(f"job {name!r}: {problem}")
        if own.prompts is PromptSourceKind.SET and learned is not None and len(learned.prompts) < 2:
            way = "`--set prompts=text` takes windows of the base's text instead"
            raise UserError(f"no training pair has a prompt: {way}")
        if own.prompts is PromptSourceKind.TEXT and before.data is None:
            raise UserError(f"--base {self.base!r}: its text is local to each trainer, so peers cannot draw the same prompts")
        if "model" in said:
            raise UserError("--set model.…: the model is that of the base: leave it out")
        spec = JobSpec(
            name=name,
            objective="ppo",
            base=start,
            model=before.model,
            tokenizer=before.tokenizer,
            data=before.data if own.prompts is PromptSourceKind.TEXT else None,
            held_out_permille=before.held_out_permille,
            objective_settings=codec.encode(own),
            byzantine_max=liars,
        )
        spec = replace(spec, **complete_fields(job_presets.PPO_JOB | {"rounds": self.iterations} | said)).validated()
        if self.blocklist:
            self.peer.blobs.add_bytes(self.blocklist)
        return spec


def _require_measurable(learned: tokenized_records.TokenizedPairs) -> None:
    """Raise `UserError` if too few pairs are held out: even a perfect reward model could not be told from chance."""
    decided = int((learned.held_out_split.p != 0.5).sum())
    if not can_beat_chance(decided):
        few = (
            f"{pluralize(decided, 'pair')} of {len(learned.train_split) + len(learned.held_out_split)} "
            "would measure the reward model"
        )
        way = "give pairs of more prompts, a larger --set reward.held_out_permille=N, or --ignore-accuracy"
        raise UserError(f"{few}, too few to tell it from chance: {way}")


def parse_reward_overrides(of_reward: dict[str, str]) -> tuple[RewardModelObjective, dict[str, str]]:
    """Return the objective of the reward model, by default `reward-mean`, and the remaining overrides.

    Raises `UserError` for an unknown objective.
    """
    read = of_reward.get(SCORE_FIELD, MEAN)
    if read not in REWARDS:
        raise UserError(f"--set {REWARD_PREFIX}{SCORE_FIELD}={read}: must be one of {', '.join(REWARDS)}")
    return REWARDS[read], {key: text for key, text in of_reward.items() if key != SCORE_FIELD}


def build_toy_spec(reward: str, rounds: int, name: str, overrides: dict[str, str], liars: int) -> JobSpec:
    """Build a job without a base, for a rule with its own vocabulary.

    Its reference is a new model. Raises `UserError` for another rule.
    """
    rule = RULES.get(reward.removeprefix(RULE_PREFIX))
    if rule is None or rule.vocabulary is None:
        alone = ", ".join(RULE_PREFIX + known.name for known in RULES.values() if known.vocabulary is not None)
        raise UserError(f"--reward {reward!r} needs --base JOB, a finished job whose model is tuned; without a base, use {alone}")
    own, said = parse_ppo_overrides(overrides)
    settings = codec.encode(PpoSettings(reward=reward, **job_presets.TOY_TERMS | own))
    spec = JobSpec(name=name, objective="ppo", model=job_presets.TOY_MODEL, objective_settings=settings, byzantine_max=liars)
    return replace(spec, **complete_fields(job_presets.TOY_JOB | {"rounds": rounds} | said)).validated()


def parse_ppo_overrides(overrides: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse overrides of a policy into a pair: settings of the objective, and fields of the job.

    Raises `UserError` for an invalid override.
    """
    return parse_objective_overrides(overrides, PpoSettings, FIELDS_NOT_SET_BY_NAME)


def _read(file: str, misfits: InvalidLines) -> list[PreferencePair]:
    try:
        with text_files.open_unpacked(Path(file).expanduser()) as stream:
            return preference_sets.read_preference_file(Path(file).name, stream, misfits)
    except OSError as error:
        raise UserError(f"--preferences {text_files.printable_path(file)} cannot be read: {error.strerror}") from None


def pack_word_file(file: str) -> bytes:
    """Return the packed list of the words in a file. Raises `UserError` for an invalid or unreadable file."""
    from rlhf.moderation.word_matcher import parse_word_list

    try:
        return blocklist.pack_entries(parse_word_list(Path(file).name, read_regular(Path(file).expanduser())))
    except OSError as error:
        raise UserError(f"--blocklist {text_files.printable_path(file)} cannot be read: {error.strerror}") from None


def _require_prompt(trained: list[PreferencePair], listed: bytes) -> None:
    """Raise `UserError` if the blocklist `listed` blocks each of the first `PROMPTS_CHECKED_MAX` prompts."""
    texts, known = tokenized_records.prompt_texts(trained)[:PROMPTS_CHECKED_MAX], blocklist.Blocklist(listed)
    if texts and all(known.blocks_text(text.encode()) for text in texts):
        raise UserError(
            f"--blocklist blocks each of {pluralize(len(texts), 'prompt')} that were checked: no prompt would be left"
        )
