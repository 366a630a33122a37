"""PPO in the worker: it samples responses, declares them, verifies declarations, and trains."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rlhf.data.tokenized_records import TokenizedPairs
from rlhf.moderation import blocklist
from rlhf.moderation.blocklist import Blocklist
from rlhf.objectives import rollouts
from rlhf.objectives.ppo import (
    FIGURES,
    MILLIONTHS,
    PPO,
    ROLLOUT,
    VALUE_HEAD,
    AdvantageScale,
    PolicyAlgorithm,
    PpoSettings,
    PromptSourceKind,
    RolloutBatches,
    RolloutDeclaration,
    current_beta,
    in_millionths,
)
from rlhf.objectives.rollouts import RolloutId, TokenIds, is_finished
from rlhf.pytorch import losses, rollout_passes
from rlhf.pytorch.supervised_objectives import NormalizedRewardModel
from training.engines.engine import OnProgress
from training.engines.pytorch.backend import TorchDeclaringEngine
from training.engines.pytorch.log_probabilities import log_probabilities
from training.engines.pytorch.model import GPT
from training.objectives.objective import Brief, Declaration, RejectionReason
from training.replicated.tensor_layout import Float32Array

EPSILON: Final = 2.0**-10  # tolerated lead of another token in logit plus noise: logits differ by 1e-5 between processors
# Tolerance of the correlation: twice the effect of `FIGURE_TOLERANCE` in each score (`rlhf.objectives.rollouts.SCORE_VARIANCE`).
CORRELATION_TOLERANCE: Final = 0.02
FIGURE_TOLERANCE: Final = 1e-4  # tolerance of sums, per token or response: no setting depends on smaller differences


def ppo_loss(
    model: GPT,
    share_B: Tensor,
    x_BS: Tensor,
    begin_B: Tensor,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    old_BT: Tensor,
    advantage_BT: Tensor,
    old_value_BT: Tensor,
    return_BT: Tensor,
) -> Tensor:
    """Return the clipped policy loss, plus the value loss if the model has a value head. Each is a mean over tokens."""
    own: PpoSettings = model.job.decoded_settings
    features_BTC = rollout_passes.response_features(model, x_BS, begin_B, tokens_BT.shape[1])
    logp_BT = log_probabilities(model.logits(features_BTC), tokens_BT)
    edges = {"clip": own.clip_range, "ramp": own.clip_ramp}
    loss_BT = losses.policy_losses(logp_BT, old_BT, advantage_BT, mask_BT, **edges)
    if own.algorithm is PolicyAlgorithm.PPO:
        value_BT = features_BTC @ model.heads[VALUE_HEAD]
        loss_BT = loss_BT + own.value_weight * losses.value_losses(value_BT, old_value_BT, return_BT, mask_BT, **edges)
    return losses.token_mean(loss_BT, mask_BT, share_B.sum())


@dataclass(frozen=True, slots=True)
class _ScoredRollouts:
    """A trainer's responses, with the outputs of the round's first model, of the reference model and of the reward for them."""

    key: tuple[RolloutId, bytes]
    responses: Sequence[TokenIds]
    x_BS: Tensor
    begin_B: Tensor
    tokens_BT: Tensor
    mask_BT: Tensor
    old_BT: Tensor
    reference_BT: Tensor
    value_BT: Tensor
    score_B: Tensor
    excess_BT: Tensor | None  # excess of each token, as in `rollout_passes.ForwardPassResult`
    blocked: int


class PpoDeclarer:
    """The `training.replay.proposal_replay.Declarer` of PPO: makes and verifies declarations, and derives the data of steps."""

    def __init__(self, engine: TorchDeclaringEngine) -> None:
        self._engine, self._spec = engine, engine.spec
        self._own: PpoSettings = engine.spec.decoded_settings
        self._bounds = PPO.rollout_limits(engine.spec, self._own)
        self._scorer: NormalizedRewardModel | None = None  # created at the first use, when the engine has loaded the reward model
        self._asked: tuple[RolloutId, list[TokenIds]] | None = None  # prompts of the last use, which are drawn only once
        self._last: _ScoredRollouts | None = None  # result of the last use, since a proposal is used more than once in a row

    def make_declaration(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        folder: Path,
        on_step: OnProgress = lambda: None,
        brief: Brief | None = None,
    ) -> Declaration:
        place = RolloutId(job, round, trainer)
        self._engine.load_parameters(parameters)
        noise = partial(rollouts.gumbel_noise, place, vocabulary=self._bounds.vocabulary)
        asked = self._prompts(place, on_step)
        responses = rollout_passes.sample_responses(self._engine.model, asked, noise, self._bounds, on_step)
        blob = rollouts.encode_rollouts(responses)
        digest = hashlib.sha256(blob).digest()
        path = folder / digest.hex()
        path.write_bytes(blob)
        known = self._known(parameters, place, digest, path, on_step)
        return Declaration(self._record(known), {digest: path})

    def why_declaration_refused(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = lambda: None,
    ) -> RejectionReason | None:
        place, said = RolloutId(job, round, trainer), declaration.record
        known = self._known(parameters, place, said.blob, declaration.files[said.blob], on_step, is_checked=True)
        assert known.excess_BT is not None
        if not (known.excess_BT[known.mask_BT] <= EPSILON).all():  # `<=` is also false for NaN
            return ROLLOUT
        return FIGURES if self._differ(said, self._record(known)) else None

    def derive_step_data(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = lambda: None,
    ) -> Declaration:
        place, blob = RolloutId(job, round, trainer), declaration.record.blob
        known, own = self._known(parameters, place, blob, declaration.files[blob], on_step), self._own
        mask_BT, beta = known.mask_BT, current_beta(declaration.steering, own.beta)
        unfinished_B = torch.tensor([not is_finished(response, own.stop_token) for response in known.responses])
        score_B = known.score_B - own.unfinished_penalty * unfinished_B
        rewards_BT = losses.token_rewards(
            known.old_BT, known.reference_BT, score_B, mask_BT, beta=beta, score_clip=own.score_clip
        )
        advantage_BT, return_BT = losses.gae_advantages(rewards_BT, known.value_BT, mask_BT, decay=own.gae_lambda)
        advantage_BT = losses.whiten_advantages(advantage_BT, mask_BT)
        if own.algorithm is PolicyAlgorithm.GRPO:
            by_deviation = own.group_scale is AdvantageScale.DEVIATION
            advantage_B = losses.group_advantages(rewards_BT.sum(1), own.group_size, by_deviation=by_deviation)
            advantage_BT = advantage_B[:, None] * mask_BT
        epochs = range(own.epochs)
        order = np.concatenate([rollouts.epoch_order(place, self._bounds.responses, epoch) for epoch in epochs])
        counts = mask_BT.sum(1).numpy()
        tokens_of_steps = counts[order].reshape(-1, self._spec.batch).mean(1)
        batches = RolloutBatches(
            order=order,
            share=np.repeat(tokens_of_steps, self._spec.batch).astype(np.float32),
            x=known.x_BS.numpy(),
            begin=known.begin_B.numpy(),
            tokens=known.tokens_BT.numpy(),
            mask=mask_BT.numpy(),
            old=known.old_BT.numpy(),
            advantages=advantage_BT.numpy(),
            values=known.value_BT.numpy(),
            returns=return_BT.numpy(),
        )
        return replace(declaration, step_data=batches)

    def _known(
        self, parameters: Float32Array, place: RolloutId, blob: bytes, path: Path, on_step: OnProgress, is_checked: bool = False
    ) -> _ScoredRollouts:
        """Score the responses of a blob. Raises `RemoteProtocolError` for an invalid blob."""
        last = self._last
        if last is not None and last.key == (place, blob) and (last.excess_BT is not None or not is_checked):
            return last
        engine, length = self._engine, self._own.response_tokens
        asked, responses = self._prompts(place, on_step), rollouts.read_rollouts(path, self._bounds)
        tokens_BT = torch.from_numpy(np.stack([np.pad(response, (0, length - len(response))) for response in responses]))
        lengths = [len(response) for response in responses]
        mask_BT = torch.arange(length) < torch.tensor(lengths)[:, None]
        begins = [len(prompt) for prompt in asked]
        rows = [np.concatenate(row) for row in zip(asked, responses, strict=True)]
        whole_BS = torch.from_numpy(np.stack([np.pad(row, (0, max(begins) + length - len(row))) for row in rows]))
        x_BS, begin_B = whole_BS[:, :-1], torch.tensor(begins)
        assert engine.first_parameters is not None
        engine.load_parameters(engine.first_parameters)
        reference = rollout_passes.forward_pass(engine.model, x_BS, tokens_BT, lengths, VALUE_HEAD, on_step, begin_B=begin_B)
        engine.load_parameters(parameters)
        noise = partial(rollouts.gumbel_noise, place, vocabulary=self._bounds.vocabulary) if is_checked else None
        now = rollout_passes.forward_pass(
            engine.model, x_BS, tokens_BT, lengths, VALUE_HEAD, on_step, noise=noise, begin_B=begin_B
        )
        score_B = self._scores(whole_BS, begins, responses, on_step)
        blocked = [False] * len(responses)
        if self._own.blocklist is not None:  # blocked responses get the lowest score, instead of their reward
            blocked = [self._blocks_response(*row, on_step) for row in zip(asked, responses, strict=True)]
            score_B[torch.tensor(blocked)] = -self._own.score_clip
        self._last = _ScoredRollouts(
            key=(place, blob),
            responses=responses,
            x_BS=x_BS,
            begin_B=begin_B,
            tokens_BT=tokens_BT,
            mask_BT=mask_BT,
            old_BT=now.logp_BT,
            reference_BT=reference.logp_BT,
            value_BT=now.value_BT,
            score_B=score_B,
            excess_BT=now.excess_BT,
            blocked=sum(blocked),
        )
        return self._last

    def _scores(self, whole_BS: Tensor, begins: Sequence[int], responses: Sequence[TokenIds], on_step: OnProgress) -> Tensor:
        rule = self._own.reward_rule
        if rule is not None:
            reward = rule.make(self._spec.seed)
            return torch.tensor([reward([int(token) for token in of], self._text(self._said(of))) for of in responses])
        if self._scorer is None:
            assert self._engine.required_model is not None
            self._scorer = NormalizedRewardModel(self._engine.required_model, on_step, self._engine.device)
        # The reward model was trained on texts without stop tokens, so it scores responses without their stop tokens.
        last = [begin + len(self._said(response)) - 1 for begin, response in zip(begins, responses, strict=True)]
        return self._scorer.scores(whole_BS, torch.tensor(last), on_step)

    def _said(self, response: TokenIds) -> TokenIds:
        """Return the response without its stop token."""
        stop = self._own.stop_token
        return response[:-1] if stop is not None and is_finished(response, stop) else response

    def _text(self, tokens: TokenIds) -> bytes:
        return self._engine.tokenizer.decode([int(token) for token in tokens])

    def _prompts(self, place: RolloutId, on_step: OnProgress) -> list[TokenIds]:
        """Return the prompt of each response."""
        if self._asked is not None and self._asked[0] == place:
            return self._asked[1]
        text, own, count = self._engine.tokens.train, self._own, self._bounds.responses
        alike = own.group_size if own.algorithm is PolicyAlgorithm.GRPO else 1
        if own.prompts is PromptSourceKind.SET:
            assert self._engine.required_model is not None and isinstance(self._engine.required_model.data, TokenizedPairs)
            source: rollouts.PreferenceSetPrompts | rollouts.TextWindows = rollouts.PreferenceSetPrompts(
                self._engine.required_model.data, own.prompt_tokens
            )
        elif len(text):
            source = rollouts.TextWindows(text, own.prompt_tokens)
        else:
            return [np.zeros(own.prompt_tokens, dtype=np.int64)] * count
        one_each = rollouts.draw_prompts(place, count // alike, source, partial(self._blocks, on_step=on_step))
        self._asked = place, [prompt for prompt in one_each for _ in range(alike)]
        return self._asked[1]

    @property
    def _blocklist(self) -> Blocklist | None:
        words = self._own.blocklist
        return None if words is None else blocklist.read_blocklist(self._engine.required_files[words])

    def _blocks(self, prompt: TokenIds, on_step: OnProgress) -> bool:
        on_step()
        return self._blocklist is not None and self._blocklist.blocks_text(self._text(prompt))

    def _blocks_response(self, prompt: TokenIds, response: TokenIds, on_step: OnProgress) -> bool:
        on_step()
        assert self._blocklist is not None
        return self._blocklist.blocks_response(self._text(prompt), self._text(self._said(response)))

    def _record(self, known: _ScoredRollouts) -> RolloutDeclaration:
        k1 = (known.old_BT - known.reference_BT)[known.mask_BT].double().sum()
        lengths = known.mask_BT.sum(1).double().numpy()
        return RolloutDeclaration(
            blob=known.key[1],
            tokens=int(known.mask_BT.sum()),
            unfinished=sum(not is_finished(response, self._own.stop_token) for response in known.responses),
            k1=in_millionths(float(k1)),
            score=in_millionths(float(known.score_B.sum())),
            distinct=rollouts.distinct_2(known.responses, self._bounds.vocabulary),
            correlation=rollouts.length_score_correlation(lengths, known.score_B.double().numpy()),
            blocked=known.blocked,
        )

    def _differ(self, said: RolloutDeclaration, found: RolloutDeclaration) -> bool:
        counts = ("tokens", "unfinished", "distinct", "blocked")
        counted = any(getattr(said, name) != getattr(found, name) for name in counts)
        allowed = FIGURE_TOLERANCE * MILLIONTHS
        return (
            counted
            or abs(said.k1 - found.k1) > allowed * found.tokens
            or abs(said.score - found.score) > allowed * self._bounds.responses
            or abs(said.correlation - found.correlation) > CORRELATION_TOLERANCE * MILLIONTHS
        )
