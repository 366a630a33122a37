"""Results of TRL (github.com/huggingface/trl, Apache-2.0) as tensors in a file. Arguments: the file, and a seed.

TRL's own trainers run on random models of 3,000 parameters. PPO's loop is one function, so its variables are read when it calls
the whitening and the backward pass. Prompts are padded at the front and responses at the end. Some responses have a stop token.
The step is large, so that ratios and values leave their clip. It runs in an environment of its own, see `environment.TRL`.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

VOCABULARY = 11
PAD, STOP, UNKNOWN = "<pad>", "<stop>", "<unk>"
PROMPTS = 16
RESPONSE_LENGTH = 7
EPOCHS, MINI_BATCHES, MICRO_BATCH = 3, 2, 8
PAIRS = 6
QUIET: dict[str, Any] = {"report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate((PAD, STOP, UNKNOWN, *"abcdefgh"))}
    assert len(words) == VOCABULARY
    made = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    special = {"pad_token": PAD, "eos_token": STOP, "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", model_input_names=["input_ids"], **special)


def model(kind: type, **more: Any) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **more,
    )
    made = kind(config)
    if kind is LlamaForCausalLM:
        made.lm_head = torch.nn.Linear(config.hidden_size, VOCABULARY)
        torch.nn.init.normal_(made.lm_head.weight, std=0.5)
        # Padding is never drawn, since TRL would end there; the stop token is drawn often.
        made.lm_head.bias.data.copy_(torch.tensor([-1e4, 1.5, *[0.0] * (VOCABULARY - 2)]))
    return made


class Watch:
    """A reader of the variables of PPO's loop while it runs."""

    MASKS = ("padding_mask", "padding_mask_p1")
    ROLLOUTS = ("logprobs", "ref_logprobs", "values", "scores", "rewards", "advantages", "returns", *MASKS)
    BATCH = (*(f"mb_{name}" for name in ("responses", "logprobs", "values", "advantage", "return")), "logits", "vpred")
    LOSSES = ("pg_loss", "vf_loss", "loss")

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.batches = 0
        self._whiten = ppo_trainer.masked_whiten
        ppo_trainer.masked_whiten = self.whiten

    def whiten(self, values: Tensor, mask: Tensor) -> Tensor:
        found = self._whiten(values, mask)
        self._keep("rollouts", _caller(), self.ROLLOUTS)
        self.tensors["rollouts.whitened"] = found
        return found

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Keep the variables of the last epoch, in which most ratios have left their clip."""
        frame = _caller()
        if frame.f_locals["ppo_epoch_idx"] == EPOCHS - 1:
            where = f"batch{self.batches}"
            variables, rows = frame.f_locals, frame.f_locals["micro_batch_inds"]
            self._keep(where, frame, (*self.BATCH, *self.LOSSES))
            for mask in self.MASKS:
                self.tensors[f"{where}.{mask}"] = variables[mask][rows]
            for name, of in (("gradient.logits", "logits"), ("gradient.vpred", "vpred")):
                (self.tensors[f"{where}.{name}"],) = torch.autograd.grad(loss, variables[of], retain_graph=True)
            self.batches += 1
        loss.backward()

    def _keep(self, where: str, frame: FrameType, names: tuple[str, ...]) -> None:
        self.tensors |= {f"{where}.{name}": frame.f_locals[name].detach().clone() for name in names}


def _caller() -> FrameType:
    return sys._getframe(2)


def ppo(folder: str, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    words = [torch.randint(3, VOCABULARY, (length,)).tolist() for length in torch.randint(1, 5, (PROMPTS,)).tolist()]
    arguments = PPOConfig(
        output_dir=folder,
        seed=seed,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PROMPTS // MICRO_BATCH,
        num_mini_batches=MINI_BATCHES,
        num_ppo_epochs=EPOCHS,
        total_episodes=PROMPTS,
        num_sample_generations=0,
        response_length=RESPONSE_LENGTH,
        stop_token="eos",
        missing_eos_penalty=1.0,
        temperature=1.0,
        kl_coef=0.1,
        learning_rate=0.02,
        **QUIET,
    )
    trainer = PPOTrainer(
        args=arguments,
        processing_class=tokenizer(),
        model=model(LlamaForCausalLM),
        ref_model=model(LlamaForCausalLM),
        reward_model=model(LlamaForSequenceClassification, num_labels=1),
        value_model=model(LlamaForSequenceClassification, num_labels=1),
        train_dataset=Dataset.from_dict({"input_ids": words}),
        eval_dataset=Dataset.from_dict({"input_ids": words}),
    )
    watch = Watch()
    trainer.accelerator.backward = watch.backward
    trainer.train()
    return watch.tensors


def reward(folder: str, seed: int) -> dict[str, Tensor]:
    """Return the loss of each pair with the first response chosen, and with the second."""
    generator = torch.Generator().manual_seed(seed)
    rows = {"prompt": ["a", "b"], "chosen": [" c", " d"], "rejected": [" e", " f"]}
    arguments = RewardConfig(output_dir=folder, center_rewards_coefficient=0.01, **QUIET)
    trainer = RewardTrainer(
        model=model(LlamaForSequenceClassification, num_labels=1),
        args=arguments,
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict(rows),
    )
    scores = torch.randn(2, PAIRS, generator=generator) * 2
    found = [_losses_both_ways(trainer, scores[:, pair], {"attention_mask": torch.ones(2, 1)}) for pair in range(PAIRS)]
    return {"scores": scores, **_stacked(found)}


def _losses_both_ways(trainer: Any, scores: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (2,) losses, and their gradients (2, 2) on the scores of the first and the second response."""
    losses, gradients = [], []
    for order in ([0, 1], [1, 0]):
        leaf = scores.clone().requires_grad_()
        loss = trainer.compute_loss(lambda **_: SimpleNamespace(logits=leaf[order][:, None]), dict(inputs))  # noqa: B023 - called here
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    return torch.stack(losses), torch.stack(gradients)


def dpo(folder: str, seed: int) -> dict[str, Tensor]:
    """Return the same as `reward`, from logits of padded responses."""
    generator = torch.Generator().manual_seed(seed)
    rows = {"prompt": ["a", "b"], "chosen": [" c", " d"], "rejected": [" e", " f"]}
    arguments = DPOConfig(output_dir=folder, beta=0.3, **QUIET)
    trainer = DPOTrainer(
        model=model(LlamaForCausalLM),
        ref_model=model(LlamaForCausalLM),
        args=arguments,
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict(rows),
    )
    length = RESPONSE_LENGTH + 1  # one token of prompt before each response
    logits, reference = (torch.randn(2, PAIRS, length, VOCABULARY, generator=generator) for _ in range(2))
    tokens = torch.randint(0, VOCABULARY, (2, PAIRS, length), generator=generator)
    lengths = torch.randint(1, RESPONSE_LENGTH + 1, (2, PAIRS, 1), generator=generator)
    place = torch.arange(length)
    mask = (place > 0) & (place <= lengths)
    found = []
    for pair in range(PAIRS):
        losses, gradients = [], []
        for order in ([0, 1], [1, 0]):
            leaf = logits[:, pair].clone().requires_grad_()
            of = {"input_ids": tokens[order, pair], "completion_mask": mask[order, pair].long()}
            of["attention_mask"] = torch.ones_like(of["input_ids"])
            trainer.ref_model = lambda **_: SimpleNamespace(logits=reference[order, pair])  # noqa: B023 - called here
            loss = trainer.compute_loss(lambda **_: SimpleNamespace(logits=leaf[order]), of)  # noqa: B023
            losses.append(loss.detach())
            gradients.append(torch.autograd.grad(loss, leaf)[0])
        found.append((torch.stack(losses), torch.stack(gradients)))
    return {"logits": logits, "reference": reference, "tokens": tokens, "mask": mask, **_stacked(found)}


def _stacked(found: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return (pairs, 2) losses and (pairs, 2, …) gradients."""
    losses, gradients = zip(*found, strict=True)
    return {"losses": torch.stack(losses), "gradients": torch.stack(gradients)}


def main() -> None:
    file, seed = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="folkmoot-trl-") as folder:
        made = {"ppo": ppo(folder, seed), "reward": reward(folder, seed), "dpo": dpo(folder, seed)}
    tensors = {f"{part}.{name}": tensor.contiguous() for part, found in made.items() for name, tensor in found.items()}
    save_file(tensors, file, {name: version(name) for name in ("trl", "transformers", "torch")})


if __name__ == "__main__":
    main()
