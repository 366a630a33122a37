"""Outputs of llama.cpp (github.com/ggml-org/llama.cpp, MIT) for our models: `FOLDER FILE`.

It reads in each folder in FOLDER the model `gguf/model.gguf`, and our outputs in `ours.npz` and `texts.json`. Its results go to
FILE. It runs under an interpreter with `llama-cpp-python`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


def compare(folder: Path) -> dict[str, Any]:
    ours, texts = np.load(folder / "ours.npz"), json.loads((folder / "texts.json").read_text())
    prompt, greedy = (ours[name][0].tolist() for name in ("prompt", "greedy"))
    context = ours["tokens"].shape[1]
    model = llama_cpp.Llama(str(folder / "gguf" / "model.gguf"), n_ctx=context, logits_all=True, n_threads=1, verbose=False)
    apart = 0.0
    for tokens, logits in zip(ours["tokens"], ours["logits"], strict=True):
        model.reset()
        model.eval(tokens.tolist())
        apart = max(apart, float(np.abs(model.scores[: len(tokens)] - logits).max()))
    model.reset()
    model.eval(prompt)
    made: list[int] = []
    while len(made) < len(greedy):
        made.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(made[-1:])
    ids = [model.tokenize(text.encode(), add_bos=False, special=False) == ids for text, ids in texts]
    back = [model.detokenize(ids) == text.encode() for text, ids in texts]
    return {
        "logits": apart,
        "greedy_tokens": sum(one == other for one, other in zip(made, greedy, strict=True)),
        "texts": sum(one and other for one, other in zip(ids, back, strict=True)),
    }


def main() -> None:
    found: dict[str, Any] = {path.name: compare(path) for path in sorted(Path(sys.argv[1]).iterdir())}
    found["versions"] = {"llama-cpp-python": llama_cpp.__version__}
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
