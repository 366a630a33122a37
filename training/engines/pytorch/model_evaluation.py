"""The program of `peer evaluate`: `python -m training.engines.pytorch.model_evaluation FOLDER TEXT TOKENS` prints JSON."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from features.json_output import print_json_result
from protocol.errors import UserError
from training.data.text_files import read_text
from training.data.tokenizer import load_tokenizer
from training.engines.held_out_evaluation import evaluation_windows
from training.engines.pytorch.implementations import total_nats
from training.engines.pytorch.model import GPT
from training.formats.huggingface_model import open_huggingface_model
from training.job_spec import JobSpec

NATS_MAX: Final = 700.0  # largest loss in nats per token: e to a higher power overflows
TEXT_BYTES_MAX: Final = 64 << 20  # bytes of a text: the text is in memory, and its tokens, too


def evaluate_model(folder: Path, text: Path, tokens_max: int) -> dict[str, Any]:
    """Return the metrics of a model on windows that are spread evenly over a text. Raises `UserError`.

    The windows have at most `tokens_max` tokens together, but there is at least one window of the model's context.
    """
    own = open_huggingface_model(folder)
    spec = JobSpec(name="own", data=bytes(32), model=own.model)
    tokenizer, context = load_tokenizer(own.tokenizer, own.model.vocabulary), own.model.context
    known = tokenizer.encode(_whole(text))
    if len(known) <= context:
        raise UserError(f"{text} has {len(known)} tokens, but the model's context is {context}: use a longer text")
    net = GPT(spec)
    parameters = io.BytesIO()
    own.write_parameters(spec, parameters)
    np.copyto(net.parameters.numpy(), np.frombuffer(parameters.getbuffer(), dtype="<f4"))
    starts = evaluation_windows(len(known), context, tokens_max)
    with torch.no_grad():
        nats, size = total_nats(net, known, starts, tokenizer.token_bytes)
    tokens = len(starts) * context
    if not nats / tokens < NATS_MAX:
        raise UserError(f"{folder}: the model's loss on this text is {nats / tokens:g} nats per token, so it predicts nothing")
    return {
        "bits_per_byte": nats / math.log(2) / size,
        "nats_per_token": nats / tokens,
        "perplexity": math.exp(nats / tokens),
        "tokens": tokens,
        "of_tokens": len(known) - 1,  # The first token is not predicted.
    }


def _whole(path: Path) -> bytes:
    pieces, size = list[bytes](), 0
    for piece in read_text(path):
        pieces.append(piece)
        size += len(piece)
        if size > TEXT_BYTES_MAX:
            raise UserError(f"{path} has more than {TEXT_BYTES_MAX >> 20} MiB: use a part of it")
    return b"".join(pieces)


def main() -> int:
    folder, text, tokens = sys.argv[1:]
    return print_json_result(lambda: evaluate_model(Path(folder), Path(text), int(tokens)))


if __name__ == "__main__":
    sys.exit(main())
