"""Outputs of transformers (github.com/huggingface/transformers, Apache-2.0) for models: `make FOLDER SEED` or `open FOLDER FILE`.

`make` leaves random Llamas in FOLDER: `bytes`, tied like most of ours, and `bpe`, with a tokenizer and features that ours seldom
have. `open` reads in each folder in FOLDER the model in `transformers`, the file `gguf/model.gguf`, and our outputs in
`ours.safetensors` and `texts.json`. Its results go to FILE. It runs in an environment of its own, see `environment.INTEROP`.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VERSIONS = ("transformers", "tokenizers", "accelerate", "gguf", "torch", "safetensors")
TEXT = "Somebody has a model of their own, and wants to go on with it among others. It's theirs!\n" * 20
BPE = 290


def make(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 128}
    of_bytes = LlamaConfig(
        vocab_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        **small,
    )
    LlamaForCausalLM(of_bytes).save_pretrained(folder / "bytes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=BPE, initial_alphabet=alphabet, show_progress=False))
    other = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        **small,
    )
    LlamaForCausalLM(other).save_pretrained(folder / "bpe")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "bpe")


def compare(folder: Path) -> dict[str, Any]:
    ours, texts = load_file(folder / "ours.safetensors"), json.loads((folder / "texts.json").read_text())
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder / "transformers"),
        AutoModelForCausalLM.from_pretrained(folder / "transformers"),
    )
    half = AutoModelForCausalLM.from_pretrained(folder / "gguf", gguf_file="model.gguf", dtype=torch.float32)
    of_half = AutoTokenizer.from_pretrained(folder / "gguf", gguf_file="model.gguf")
    with torch.no_grad():
        logits, from_half = (found(ours["tokens"]).logits for found in (model, half))
        prompt = ours["prompt"]
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=ours["greedy"].shape[1],
            do_sample=False,
            eos_token_id=None,
        )
    return {
        "logits": _apart(logits, ours["logits"]),
        "gguf_logits": _apart(from_half, ours["logits"]),
        "greedy_tokens": int((made[:, prompt.shape[1] :] == ours["greedy"]).sum()),
        "texts": sum(tokenizer(text)["input_ids"] == ids and tokenizer.decode(ids) == text for text, ids in texts),
        "gguf_texts": sum(of_half(text)["input_ids"] == ids for text, ids in texts),
    }


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "make":
        make(folder, int(sys.argv[3]))
        return
    found = {path.name: compare(path) for path in sorted(folder.iterdir())}
    found["versions"] = {name: version(name) for name in VERSIONS}
    Path(sys.argv[3]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
