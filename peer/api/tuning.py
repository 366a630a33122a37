"""A plan to tune a model, made of what a person asks for: specifications of jobs, and the blobs that they name.

All of it runs in a thread: sets of preferences are read and turned into tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from features.tables import counted
from ledger.jobs import ModelReference
from ledger.network_governance import NetworkState
from peer.api.new_job import checked, tolerated
from peer.api.running import RunningPeer
from peer.api.starting import base_of, of_finished
from peer.api.supervised import parsed as parsed_terms
from peer.api.supervised import set_as_tokens, supervised_spec, tokenizer_of, usual_stop, with_set
from protocol import codec
from protocol.errors import UserError
from rlhf import blocklist, pairs, plans, preferences, presets
from rlhf.accuracy import could_be_better
from rlhf.fitting import Truncate, fitted, holding
from rlhf.jsonl import Misfits
from rlhf.objective import MODEL, MODULE, ROLE, RULE, PpoTerms, Prompts
from rlhf.preferences import Pair
from rlhf.reward import LAST, MEAN, MEAN_REWARD, REWARDS, Learns, RewardModel
from rlhf.rules import RULES
from rlhf.sets import Source
from rlhf.supervised import DPO
from storage.regular_files import read_regular
from training.data import text_files
from training.spec import JobSpec, Preparation, completed

APART = frozenset({"reward", "reward_model", "words"})  # of a policy's terms: `--set` does not say them
OF_REWARD = "reward."  # begins what `--set` says of the job that trains a reward model
SCORE = "score"  # which of `REWARDS`
PROMPTS_LOOKED_AT = 1_000  # before a list that blocks all of them is refused: some seconds
UNKNOWN = ModelReference(bytes(32), 1, bytes(32))  # in the place of a reward model that is not trained yet


class Made(NamedTuple):
    begin: plans.Begin
    odd: Mapping[str, float]  # pairs of its set: `rlhf.set_figures.odd_pairs`


@dataclass(frozen=True)
class Tuning:
    """What a person asks for. Every method raises `UserError` for a base, values or preferences that cannot be used."""

    peer: RunningPeer
    base: str  # a finished job, by name or id; empty: a first model, where the reward has a vocabulary of its own
    name: str
    iterations: int  # rounds of the policy; 0: a reward model alone
    epochs: int  # over the preferences
    said: dict[str, str]  # other values; those of the reward model begin with OF_REWARD
    words: bytes  # a packed list of those that no text of the policy may hold; empty: none
    skip_bad: bool = False  # leave out lines of a file that cannot be used
    truncate: Truncate = Truncate.NOTHING  # which end of long texts of a file is cut off
    anyway: bool = False  # the policy starts, whatever the accuracy of its reward model

    @property
    def of_reward(self) -> dict[str, str]:
        return {key.removeprefix(OF_REWARD): text for key, text in self.said.items() if key.startswith(OF_REWARD)}

    @property
    def of_policy(self) -> dict[str, str]:
        return {key: text for key, text in self.said.items() if not key.startswith(OF_REWARD)}

    def check_rule(self, reward: str) -> None:
        if reward == MODEL:
            raise UserError("--reward 'model': a plan trains it: leave --reward out, and say --project or --preferences")
        if self.of_reward:
            raise UserError(f"--set {OF_REWARD}{next(iter(self.of_reward))}=…: a rule is not trained: leave it out")
        if not self.iterations:
            raise UserError("--ppo-iterations 0 would tune nothing by a rule: take 1 at least")

    def check_preferences(self) -> None:
        if self.words and not self.iterations:
            raise UserError("--words: no policy is tuned, and a reward model says nothing: leave it out")
        if self.of_policy and not self.iterations:
            raise UserError(f"--set {next(iter(self.of_policy))}=…: no policy is tuned; of the reward model say `{OF_REWARD}…`")

    def by_rule(self, reward: str) -> Made:
        return Made(plans.Begin(self._policy(reward).encode()), {})

    def by_preferences(self, given: str | list[Pair], source: Source | None) -> Made:
        """A reward model, and then the policy. The set is given as pairs, or as the name of a file with them."""
        called = f"{self.name}-reward" if self.name else "reward"
        of = of_finished(self.peer, self.base, "--base")
        knows_means = self.peer.driver.state.module_state(NetworkState).module_version(MODULE) >= MEAN_REWARD.version
        kind, rest = reward_said(self.of_reward, MEAN if knows_means else LAST)
        keeps_layers = kind is MEAN_REWARD and rest.get("learns", Learns.WORDS) == Learns.WORDS
        usual = presets.MEAN_REWARD if keeps_layers else presets.REWARD
        spec, said = supervised_spec(self.peer, kind, of, called, rest, usual, OF_REWARD)
        found, file, preparation = self._prepared(given, spec)
        tokens = set_as_tokens(self.peer, spec, found, file)
        if self.words and self.of_policy.get("prompts") != Prompts.TEXT:
            _require_prompt(preferences.parted(found, spec.held_out_permille)[0], self.words)
        if self.iterations and not self.anyway:
            _require_measurable(tokens)
        policy = self._policy(MODEL, tokens) if self.iterations else None
        if preparation is not None:
            stop = policy.own.stop if policy else None
            counts = replace(preparation, holding_stop=holding(found, tokenizer_of(self.peer, spec), stop))
            spec, policy = replace(spec, preparation=counts), replace(policy, preparation=counts) if policy else None
        spec, manifest = with_set(self.peer, spec, found, tokens, said.get("rounds"), self.epochs)
        source = replace(source, tokens=manifest.tokens) if source else None
        begin = plans.Begin(spec.encode(), _without_model(policy).encode() if policy else b"", source, self.anyway)
        return Made(begin, tokens.of_set.odd)

    def by_dpo(self, given: str | list[Pair], source: Source | None) -> Made:
        """One job, which learns from the pairs itself."""
        of = of_finished(self.peer, self.base, "--base")
        spec, said = supervised_spec(self.peer, DPO, of, self.name or DPO.name, self.said, presets.DPO)
        found, file, preparation = self._prepared(given, spec)
        if preparation is not None:
            stopping = holding(found, tokenizer_of(self.peer, spec), spec.own.stop)
            spec = replace(spec, preparation=replace(preparation, holding_stop=stopping))
        tokens = set_as_tokens(self.peer, spec, found, file)
        spec, manifest = with_set(self.peer, spec, found, tokens, said.get("rounds"), self.epochs)
        begin = plans.Begin(spec.encode(), b"", replace(source, tokens=manifest.tokens) if source else None)
        return Made(begin, tokens.of_set.odd)

    def _prepared(self, given: str | list[Pair], spec: JobSpec) -> tuple[list[Pair], str, Preparation | None]:
        """The pairs, the name of their source for people, and counts of a file. Pairs of a project stay as they were derived."""
        if not isinstance(given, str):
            return given, "--project", None
        file, misfits = Path(given).name, Misfits(self.skip_bad)
        read = _read(given, misfits)
        found, counts = fitted(file, spec, read, tokenizer_of(self.peer, spec), misfits, self.truncate)
        return found, file, counts

    def _policy(self, reward: str, learned: pairs.Pairs | None = None) -> JobSpec:
        """Makes the blob of the listed words. What learns from the pairs is left open."""
        name, liars = self.name or "ppo", tolerated(self.peer, ROLE)
        if not self.base:
            if self.words:
                raise UserError("--words: the toy says no text, so it says no words: leave it out")
            return toy_spec(reward, self.iterations, name, self.of_policy, liars)
        start, _, before = base_of(self.peer, self.base, "--base")
        said_of_own, said = parsed(self.of_policy)
        if "stop" not in said_of_own:
            of = of_finished(self.peer, self.base, "--base")
            said_of_own["stop"] = usual_stop(self.peer, of, learns_to_end=False)
        usual = presets.TERMS if reward == MODEL else presets.RULE_TERMS
        words = hashlib.sha256(self.words).digest() if self.words else None
        own = PpoTerms(reward=reward, words=words, **usual | said_of_own)
        if learned is not None:
            own = replace(own, reward_model=UNKNOWN, **_of_set(learned, before, own) | said_of_own)
        if problem := own.problem():
            raise UserError(f"job {name!r}: {problem}")
        if problem := self._prompt_problem(own, before, learned):
            raise UserError(problem)
        if "model" in said:
            raise UserError("--set model.…: the model is that of the base; leave it out")
        spec = JobSpec(
            name=name,
            objective="ppo",
            base=start,
            model=before.model,
            tokenizer=before.tokenizer,
            data=before.data if own.prompts is Prompts.TEXT else None,
            held_out_permille=before.held_out_permille,
            settings=codec.encode(own),
            liars=liars,
        )
        spec = checked(self.peer, replace(spec, **completed(presets.PPO | {"rounds": self.iterations} | said)))
        if self.words:
            self.peer.driver.blobs.add_bytes(self.words)
        return spec

    def _prompt_problem(self, own: PpoTerms, before: JobSpec, learned: pairs.Pairs | None) -> str:
        if own.prompts is Prompts.SET and learned is not None and len(learned.prompts) < 2:
            return "no pair that is trained on has a prompt: `--set prompts=text` takes windows of the base's text instead"
        if own.prompts is Prompts.TEXT and before.data is None:
            return f"--base {self.base!r}: that job's text is local, so no prompts can be drawn that everybody knows"
        return ""


def _require_measurable(learned: pairs.Pairs) -> None:
    """`UserError` where so few pairs are held out that no reward model could be told from chance."""
    decided = int((learned.measured.p != 0.5).sum())
    if not could_be_better(decided):
        few = f"{counted(decided, 'pair')} of {len(learned.trained) + len(learned.measured)} would measure the reward model"
        way = "give pairs of more prompts, a larger --set reward.held_out_permille=N, or --anyway"
        raise UserError(f"{few}, too few to tell it from chance: {way}")


def reward_said(of_reward: dict[str, str], usual: str = MEAN) -> tuple[RewardModel, dict[str, str]]:
    """The objective of the reward model, `usual` if nothing is said of it, and the values of its fields. Raises `UserError`."""
    read = of_reward.get(SCORE, usual)
    if read not in REWARDS:
        raise UserError(f"--set {OF_REWARD}{SCORE}={read}: a score is read at one of {', '.join(REWARDS)}")
    return REWARDS[read], {key: text for key, text in of_reward.items() if key != SCORE}


def toy_spec(reward: str, rounds: int, name: str, overrides: dict[str, str], liars: int) -> JobSpec:
    """A job without a base: the reward has a vocabulary of its own, the reference is the first model. Raises `UserError`."""
    rule = RULES.get(reward.removeprefix(RULE))
    if rule is None or rule.vocabulary is None:
        alone = ", ".join(RULE + known.name for known in RULES.values() if known.vocabulary is not None)
        raise UserError(
            f"--reward {reward!r} needs --base JOB, a finished job whose model is tuned; without one there is {alone}"
        )
    own, said = parsed(overrides)
    settings = codec.encode(PpoTerms(reward=reward, **presets.TOY_TERMS | own))
    spec = JobSpec(name=name, objective="ppo", model=presets.TOY_MODEL, settings=settings, liars=liars)
    return replace(spec, **completed(presets.TOY | {"rounds": rounds} | said)).checked()


def parsed(overrides: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the objective, and fields of the job. Raises `UserError`."""
    return parsed_terms(overrides, PpoTerms, APART)


def _read(file: str, misfits: Misfits) -> list[Pair]:
    try:
        with text_files.opened(Path(file).expanduser()) as stream:
            return preferences.read_file(Path(file).name, stream, misfits)
    except OSError as error:
        raise UserError(f"--preferences {text_files.shown(file)} cannot be read: {error.strerror}") from None


def _of_set(learned: pairs.Pairs, base: JobSpec, own: PpoTerms) -> dict[str, Any]:
    """What is said of prompts where a reward model learns from pairs, unless somebody sets something else."""
    longest = int(np.diff(learned.prompts).max(initial=1))
    return {"prompts": Prompts.SET, "prompt_tokens": max(1, min(longest, base.model.context - own.response_tokens))}


def read_words(file: str) -> bytes:
    """A packed list."""
    from rlhf.filter import read_words

    try:
        return blocklist.packed(read_words(Path(file).name, read_regular(Path(file).expanduser())))
    except OSError as error:
        raise UserError(f"--words {text_files.shown(file)} cannot be read: {error.strerror}") from None


def _require_prompt(trained: list[Pair], listed: bytes) -> None:
    """`UserError` where the list blocks every prompt that could be drawn, as far as some of them tell."""
    texts, known = pairs.prompt_texts(trained)[:PROMPTS_LOOKED_AT], blocklist.Blocklist(listed)
    if texts and all(known.blocks(text.encode()) for text in texts):
        raise UserError(f"--words blocks each of {counted(len(texts), 'prompt')} that were looked at: nothing would be answered")


def _without_model(policy: JobSpec) -> JobSpec:
    return replace(policy, settings=codec.encode(replace(policy.own, reward_model=None)))
