"""How far a token may trail: a little more than 2⁻¹⁰ behind the largest sum it was not sampled, a little less it was."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peer import features
from protocol import codec
from rlhf.objectives import rollouts
from rlhf.objectives.ppo import MILLIONTHS, PPO, ROLLOUT, PpoSettings
from rlhf.objectives.rule_rewards import RULES
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.backend import BACKEND
from training.job_spec import JobSpec
from training.objectives.objective import Declaration, RejectionReason
from training.replicated.tensor_layout import initial_parameters
from training.transformer import ModelSpec

JOB, TRAINER = bytes([1]) * 32, bytes([2]) * 32
MARGIN = 2.0**-10
RESPONSES = 4_096  # of one token, so it is the last: about every thousandth has a runner-up within a margin
VOWELS = RULES["vowels"]


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, model = folder, ModelSpec(context=8, width=16, layers=1, hidden=16)
        own = PpoSettings(reward="rule:vowels", prompt_tokens=1, response_tokens=1, stop_token=None, epochs=1)
        self.spec = JobSpec(
            name="ppo", objective="ppo", model=model, objective_settings=codec.encode(own), local_steps=1, batch=RESPONSES
        ).validated()
        self.first = initial_parameters(self.spec)
        self.engine: Any = BACKEND.open_engine(
            self.spec, TokenizedText.without_text(ByteTokenizer().token_bytes), ByteTokenizer(), self.first
        )
        self.honest: Declaration = self.engine.make_declaration(self.first, JOB, 0, TRAINER, folder)
        (path,) = self.honest.files.values()
        self.responses = rollouts.read_rollouts(path, PPO.rollout_limits(self.spec, own))

    def runners_up(self) -> tuple[Any, Any]:
        """Of each response: by how much it trails, and which token it is."""
        self.engine.load_parameters(self.first)
        with torch.no_grad():
            features = self.engine.model.features(torch.zeros((1, 1), dtype=torch.int64))[0]
            logits = self.engine.model.logits(features)  # the prompt is token 0, so they are alike
        noise = rollouts.gumbel_noise(rollouts.RolloutId(JOB, 0, TRAINER), ((row, 0) for row in range(RESPONSES)), 256)
        best = (logits + torch.from_numpy(noise)).topk(2, dim=1)
        assert [int(response[0]) for response in self.responses] == best.indices[:, 0].tolist()
        return best.values[:, 0] - best.values[:, 1], best.indices[:, 1]

    def refutation(self, row: int, token: int) -> RejectionReason | None:
        """Of the honest responses with another token in one place, and with their own figures."""
        told, reward = [[*map(int, response)] for response in self.responses], VOWELS.make(self.spec.seed)
        was, told[row] = told[row], [token]
        moved = reward([token], bytes([token])) - reward(was, bytes(was))
        blob = rollouts.encode_rollouts(told)
        path, digest, said = self.folder / "told", hashlib.sha256(blob).digest(), self.honest.record
        path.write_bytes(blob)
        record = replace(said, blob=digest, score=said.score + round(moved * MILLIONTHS))
        found: RejectionReason | None = self.engine.why_declaration_refused(
            self.first, JOB, 0, TRAINER, Declaration(record, {digest: path})
        )
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    features.register_features()
    return World(tmp_path_factory.mktemp("epsilon"))


def test_a_runner_up_a_little_further_behind_is_no_sample(world: World) -> None:
    behind, tokens = world.runners_up()
    row = int(behind.where(behind > 1.01 * MARGIN, torch.inf).argmin())
    assert behind[row] < 1.5 * MARGIN
    assert world.refutation(row, int(tokens[row])) is ROLLOUT


def test_a_runner_up_just_within_passes(world: World) -> None:
    behind, tokens = world.runners_up()
    row = int(behind.where(behind < 0.99 * MARGIN, -torch.inf).argmax())
    assert behind[row] > 0.5 * MARGIN
    assert world.refutation(row, int(tokens[row])) is None
