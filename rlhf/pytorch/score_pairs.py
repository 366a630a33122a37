"""The child process of `peer rlhf score`: `python -m rlhf.pytorch.score_pairs MODEL FILE [TOKENIZER]` prints JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from protocol.errors import FolkmootError, UserError
from rlhf.data import tokenized_records
from rlhf.data.preference_sets import read_preference_file
from rlhf.objectives.supervised_objectives import OBJECTIVES, REWARD_NAMES
from rlhf.pytorch.supervised_objectives import scores_of_pairs
from training.data.tokenizer import load_tokenizer
from training.engines.pytorch.model import GPT
from training.formats import checkpoint
from training.objectives import registry

PAIRS_AT_ONCE = 32


def score_pairs(model: Path, file: Path, tokenizer: Path | None) -> Iterator[tuple[float, float]]:
    """Yield for each pair of a file the scores of the chosen and of the rejected response.

    Raises `UserError` for invalid files.
    """
    spec, parameters, _ = checkpoint.read_checkpoint(model)
    if spec.objective not in REWARD_NAMES:
        scoring = " or ".join(map(repr, REWARD_NAMES))
        raise UserError(f"{model} has the objective {spec.objective!r}: use a model of {scoring}")
    if (spec.tokenizer is None) != (tokenizer is None):
        takes = "takes bytes: leave --tokenizer out" if tokenizer else "has a tokenizer: give its JSON file with --tokenizer FILE"
        raise UserError(f"{model} {takes}")
    known = load_tokenizer(tokenizer.read_bytes() if tokenizer else None, spec.model.vocabulary)
    if spec.tokenizer is not None and known.digest != spec.tokenizer:
        raise UserError(f"{tokenizer} is not the tokenizer that {model} was trained with")
    with file.open("rb") as stream:
        found = read_preference_file(file.name, stream)
    tokens, side = tokenized_records.tokenize_all(spec, found, known)
    net = GPT(spec)
    np.copyto(net.parameters.numpy(), parameters)
    for start in range(0, len(side), PAIRS_AT_ONCE):
        numbers = np.arange(start, min(start + PAIRS_AT_ONCE, len(side)))
        x_N2S, last_N2, _ = map(torch.from_numpy, tokenized_records.pair_batch(tokens, side, numbers))
        yield from scores_of_pairs(net, x_N2S, last_N2).tolist()


def main() -> int:
    registry.register_objectives(OBJECTIVES)
    model, file, *tokenizer = map(Path, sys.argv[1:])
    try:
        for chosen, rejected in score_pairs(model, file, tokenizer[0] if tokenizer else None):
            print(json.dumps({"chosen_score": chosen, "rejected_score": rejected}))
    except FolkmootError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename} cannot be read: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
