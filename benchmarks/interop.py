"""Export and import of models, compared with transformers 5: `python -m benchmarks.interop --json FILE`.

A peer in a network of its own trains small jobs, of bytes and of a BPE, through its commands, and writes their models. They are
read by transformers and gguf, in an environment of their own (`benchmarks.rivals.transformers_oracle`). Their logits, greedy
tokens and token ids are compared with ours. In the other direction a job starts from a Llama that transformers made, and the
model of its round 0 is exported again. `--llama PYTHON`, an interpreter with `llama-cpp-python`, adds llama.cpp.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.dispatch import REPOSITORY
from benchmarks.provenance import write
from benchmarks.rivals import environment
from benchmarks.rivals.environment import Unavailable
from benchmarks.verdicts import conclude, verdict
from peer.api import control_socket
from peer.export.model_provenance import model_from_data_directory
from protocol.sampling import SamplingOptions
from scenarios.bad_input import Place
from scenarios.trials import Parser
from training.data.default_text import default_text
from training.data.tokenizer import load_tokenizer
from training.engines.pytorch.model import GPT
from training.engines.pytorch.sampling import sample_tokens

LOGITS_MAX, GGUF_LOGITS_MAX = 1e-4, 1e-2
GREEDY, PROMPT, WINDOWS = 64, 16, 4
KINDS = {"bytes": (), "bpe": ("--vocabulary", "400")}
SMALL = ("model.tied=false", "model.rope_base=50000", "model.norm_epsilon=1e-5")  # for the BPE: all features of models
ROUNDS = 6
JOB_SECONDS_MAX, THEIRS_SECONDS_MAX = 300.0, 600.0
TEXTS = ("don't they?  \n\n\t'll", "Grüße, 世界! 🙂\u200d\u00a0x", "\x00\x01\x7f", " ", "2026 = 2 · 1013")


@dataclass
class Row:
    seed: int
    kind: str
    what: str
    found: float
    bound: str
    holds: bool


class Home(Place):
    """A peer that trains alone."""

    def run(self, *more: str) -> list[str]:
        return super().run("--role", "full", *more)

    def says(self, command: str, *arguments: str) -> None:
        """Run a command of `peer`. An error ends the benchmark."""
        done = self.peer(command, *arguments, "--data-dir", str(self.path))
        if done.returncode:
            raise SystemExit(f"peer {command}: {done.stderr.strip()}")

    def train(self, name: str, *more: str) -> None:
        self.says("train", "--name", name, *more)
        deadline = time.monotonic() + JOB_SECONDS_MAX
        while not any(
            job.name == name and job.state == "finished" for job in trio.run(control_socket.make_client(self.path).jobs)
        ):
            if time.monotonic() > deadline:
                raise SystemExit(f"job {name} is not finished after {JOB_SECONDS_MAX:.0f} s")
            time.sleep(0.2)


def theirs(*arguments: str) -> None:
    """Run transformers. Raises `Unavailable` if it cannot run."""
    _ask(environment.interpreter("interop", environment.INTEROP), "transformers", *arguments)


def _ask(python: Path, who: str, *arguments: str) -> None:
    command = [str(python), "-m", f"benchmarks.rivals.{who}_oracle", *arguments]
    surroundings = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=THEIRS_SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{who} was not done after {THEIRS_SECONDS_MAX:.0f} s") from None
    if done.returncode:
        raise SystemExit(f"{who} failed:\n{done.stderr}")


def out(home: Home, folder: Path, seed: int) -> None:
    for kind, said in KINDS.items():
        fields = SMALL if kind == "bpe" else ()
        name, path = f"{kind}-{seed}", folder / f"{kind}-{seed}"
        home.train(name, *said, "--rounds", str(ROUNDS), "--set", f"seed={seed}", *fields)
        home.says("model", str(path / "transformers"), "--job", name)
        home.says("model", str(path / "gguf"), "--job", name, "--format", "gguf")


def ours(home: Home, path: Path) -> None:
    """Write the outputs of the peer's own model to files beside the others. No peer runs."""
    found = model_from_data_directory(home.path, path.name)
    model, tokenizer = GPT(found.spec), load_tokenizer(found.tokenizer, found.spec.model.vocabulary)
    model.parameters.copy_(torch.from_numpy(found.parameters.copy()))
    context = found.spec.model.context
    text = torch.from_numpy(tokenizer.encode(default_text()[:20_000]).astype("int64"))
    tokens = text[-WINDOWS * context :].view(WINDOWS, context)
    with torch.no_grad():
        logits = model.logits(model.features(tokens))
    prompt = tokens[0, :PROMPT].tolist()
    passes = sample_tokens(model, prompt, SamplingOptions(max_tokens=GREEDY, temperature=0.0), (), lambda: None)
    greedy = list(chain.from_iterable(passes))
    tensors = {"tokens": tokens, "logits": logits, "prompt": torch.tensor([prompt]), "greedy": torch.tensor([greedy])}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "ours.safetensors")
    np.savez(path / "ours.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
    ids = [(text, tokenizer.encode(text.encode()).tolist()) for text in (*TEXTS, default_text()[:2_000].decode(errors="ignore"))]
    (path / "texts.json").write_text(json.dumps(ids))


def came_back(home: Home, folder: Path, seed: int) -> Iterator[Row]:
    """Import and export a Llama."""
    theirs("make", str(folder), str(seed))
    for kind in KINDS:
        name = f"in-{kind}-{seed}"
        home.train(name, "--from", str(folder / kind), "--rounds", "1", "--set", "local_steps=1")
        home.says("model", str(folder / name), "--job", f"{name}@0")
        file, again = (path / "model.safetensors" for path in (folder / kind, folder / name))
        apart = sum(one != other for one, other in zip(file.read_bytes(), again.read_bytes(), strict=False))
        apart += abs(file.stat().st_size - again.stat().st_size)
        yield Row(seed, kind, "bytes of model.safetensors that changed on the way in and out", apart, "= 0", apart == 0)


def rows_of(name: str, found: dict[str, Any]) -> Iterator[Row]:
    kind, _, seed = name.partition("-")
    texts = len(TEXTS) + 1
    for what, value, bound, holds in (
        ("logits, largest difference", found["logits"], f"≤ {LOGITS_MAX:g}", found["logits"] <= LOGITS_MAX),
        ("greedy tokens that are ours", found["greedy_tokens"], f"= {GREEDY}", found["greedy_tokens"] == GREEDY),
        ("texts with our ids, which come back", found["texts"], f"= {texts}", found["texts"] == texts),
        (
            "GGUF float16: logits, largest difference",
            found["gguf_logits"],
            f"≤ {GGUF_LOGITS_MAX:g}",
            found["gguf_logits"] <= GGUF_LOGITS_MAX,
        ),
        ("GGUF: texts with our ids", found["gguf_texts"], f"= {texts}", found["gguf_texts"] == texts),
    ):
        yield Row(int(seed), kind, what, value, bound, holds)


def rows_of_llama(name: str, found: dict[str, Any]) -> Iterator[Row]:
    kind, _, seed = name.partition("-")
    apart, greedy, texts = found["logits"], found["greedy_tokens"], found["texts"]
    bound, count = f"≤ {GGUF_LOGITS_MAX:g}", len(TEXTS) + 1
    yield Row(int(seed), kind, "llama.cpp: logits, largest difference", apart, bound, apart <= GGUF_LOGITS_MAX)
    yield Row(int(seed), kind, "llama.cpp: greedy tokens that are ours", greedy, f"= {GREEDY}", greedy == GREEDY)
    yield Row(int(seed), kind, "llama.cpp: texts with our ids, which come back", texts, f"= {count}", texts == count)


def measure(folder: Path, seeds: list[int], llama: Path | None) -> tuple[list[Row], dict[str, str]]:
    models, rows = folder / "models", list[Row]()
    home = Home(folder / "peer")
    home.says("init", "--network", "interop")
    home.start()
    try:
        for seed in seeds:
            out(home, models, seed)
            rows += came_back(home, folder / f"theirs-{seed}", seed)
    finally:
        home.stop()
    for path in models.iterdir():
        ours(home, path)
    theirs("open", str(models), str(folder / "theirs.json"))
    found = json.loads((folder / "theirs.json").read_text())
    versions: dict[str, str] = found.pop("versions")
    rows = [*(row for name, of in found.items() for row in rows_of(name, of)), *rows]
    if llama is not None:
        _ask(llama, "llama", str(models), str(folder / "llama.json"))
        found = json.loads((folder / "llama.json").read_text())
        versions |= found.pop("versions")
        rows += [row for name, of in found.items() for row in rows_of_llama(name, of)]
    return rows, versions


def show(rows: list[Row]) -> None:
    table = Table(title="models that leave and come in")
    for heading in ("", "bytes", "BPE", "bound"):
        table.add_column(heading, justify="right" if heading else "left")
    for what, bound in dict.fromkeys((row.what, row.bound) for row in rows):
        cells = [", ".join(f"{row.found:.2g}" for row in rows if (row.what, row.kind) == (what, kind)) for kind in KINDS]
        table.add_row(what, *cells, bound)
    Console(width=120).print(table)


def verdicts(rows: list[Row]) -> Iterator[str]:
    for what, bound in dict.fromkeys((row.what, row.bound) for row in rows):
        found = [row for row in rows if row.what == what]
        values = ", ".join(f"{row.found:.2g}" for row in found)
        yield verdict(all(row.holds for row in found), f"{what}: {bound}: {values}")


def main() -> int:
    parser = Parser("interop", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0, 1), metavar="S", help="seeds of the jobs and of the models of transformers"
    )
    parser.add_argument(
        "--llama", type=Path, metavar="PYTHON", help="also compare with llama.cpp: an interpreter with llama-cpp-python"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="folkmoot-interop-") as folder:
        try:
            environment.interpreter("interop", environment.INTEROP)
        except Unavailable as error:
            print(f"nothing was compared, because transformers cannot be installed: {error}")
            return 0
        rows, versions = measure(Path(folder), list(options.seeds), options.llama)
    write(options.json, started, {"seeds": list(options.seeds), "theirs": versions, "rows": [asdict(row) for row in rows]})
    show(rows)
    return conclude(verdicts(rows))


if __name__ == "__main__":
    raise SystemExit(main())
