"""`peer evaluate`: what a folder's model makes of a text is what the job's own figure would say of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.errors import UserError
from tests.training.folders import shapes, tensors, written
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import load_tokenizer
from training.engines.pytorch.implementations import held_out_bits
from training.engines.pytorch.model import GPT
from training.engines.pytorch.model_evaluation import evaluate_model
from training.formats.huggingface_model import open_huggingface_model
from training.job_spec import JobSpec
from training.replicated.tensor_layout import layout_of

TEXT = "".join(f"line {number} of a text\n" for number in range(40))


def test_a_model_that_knows_nothing_takes_eight_bits_a_byte(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", {name: np.zeros(shape, "<f4") for name, shape in shapes().items()})
    (tmp_path / "text.txt").write_text(TEXT)
    found = evaluate_model(folder, tmp_path / "text.txt", 1 << 20)
    assert found["bits_per_byte"] == pytest.approx(8, rel=1e-5) and found["perplexity"] == pytest.approx(256, rel=1e-5)
    assert found["of_tokens"] == len(TEXT) - 1 and found["tokens"] == (len(TEXT) - 1) // 32 * 32
    assert evaluate_model(folder, tmp_path / "text.txt", 100)["tokens"] == 96


def test_it_is_the_figure_of_a_job(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", tensors())
    (tmp_path / "text.txt").write_text(TEXT)
    own = open_huggingface_model(folder)
    spec = JobSpec(name="own", data=bytes(32), model=own.model)
    net = GPT(spec)
    flat = [
        np.concatenate([block.ravel() for block in own.tensors[tensor.name].iter_blocks()]) for tensor in layout_of(spec).tensors
    ]
    net.parameters.copy_(torch.from_numpy(np.concatenate(flat)))
    known = load_tokenizer(None, 256)
    held_out = known.encode(TEXT.encode())
    with torch.no_grad():
        figures = held_out_bits(net, spec, TokenizedText(held_out[:0], held_out, known.token_bytes), lambda: None)
    found = evaluate_model(folder, tmp_path / "text.txt", 16_384)
    assert figures == {"held_out_bits_per_byte": pytest.approx(found["bits_per_byte"])}
    assert found["bits_per_byte"] != pytest.approx(8, abs=1e-4)


def test_a_text_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(UserError, match="has 6 tokens, and the model's context is 32"):
        evaluate_model(written(tmp_path / "model", tensors()), tmp_path / "text.txt", 100)


def test_a_model_whose_loss_is_no_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    huge = {name: np.full_like(tensor, 3e38) if "norm" in name else tensor for name, tensor in tensors().items()}
    with pytest.raises(UserError, match="it foretells nothing"):
        evaluate_model(written(tmp_path / "model", huge), tmp_path / "text.txt", 100)
