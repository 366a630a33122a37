"""`python -m benchmarks`: all measurements, and the commands that repeat them.

Each benchmark is `python -m benchmarks.NAME --json FILE`. Without `--only` all of them run, the shortest first. Each writes its
file after every row, so an interrupted run only loses its current row. The exit status is 1 if a bound was missed. The other
benchmarks still run, and the missed bounds are repeated at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.verdicts import MISSED

BENCHMARKS = {
    "gpu": "samples per second on a GPU compared with a plain loop of torch, memory, replays; one line without a GPU",
    "decoding": "payloads of 1 to 8 bits: bytes, and speed of reading and writing on one core",
    "rlhf_oracle": "losses and gradients of RLHF compared with TRL, on random models",
    "generate": "text generation: speed with and without the cache, and the wait of a proposal",
    "interop": "exported and imported models compared with transformers 5: logits, tokens, tokenizers, GGUF, bytes",
    "rollouts": "responses of a policy: speed of sampling and checks, and time until tuning begins",
    "safety": "the safety filter: recall of disguised words, ours and others', and precision on innocent texts",
    "labels": "labels and points with annotators that guess, lie or copy: accuracy, and shares of points",
    "tables": "a table of a million rows: blocks, memory, proofs, restarts, ranges; random histories",
    "block_costs": "a full block of each kind of transaction: time of a voter that has seen none of them",
    "curation": "a million settled answers: batches, memory of the daemon, the close of a project",
    "transport": "links compared with plain TCP and TLS: bytes, signed messages, votes under bulk, also at 2 Mbit/s",
    "apply": "computations of a voter after the vote: decoding, aggregation, outer step, hashes; time and memory",
    "model_options": "dense models, experts and windows at equal steps: loss, seconds, errors of replays, bytes",
    "replay": "distances of honest and of dishonest updates from replays, and results that must be bit-equal",
    "ternary": "ternary matrices compared with dense ones at equal steps: held-out bits, eight-bit activations, bytes",
    "round": "a whole round compared with the computation of updates: time, processor time, bytes, durable writes",
    "tinker": "a step of a program with the SDK tinker compared with plain torch: seconds, and costs of idle models",
    "tolerance": "a trainer that lies within the tolerance of audited bf16: held-out loss compared with honest ones",
    "tuning": "the default hyperparameters compared with others and with one process, without a network",
    "grokking": "SAM and Grokfast at equal weight decay: steps until addition modulo 97 generalizes, and bits of text",
    "site": "the pages in a browser: first page, next task, events, a reader, and the cost of 50 dashboards for decisions",
    "rlhf": "a toy with a known best policy: distance of a network with a liar and of one process from it",
    "demo": "the main job as a person runs it: time, loss compared with one process, decisions, bytes, memory",
    "consensus": "decisions of 4 to 100 voters: time, processor time and bytes, compared with the physical limits",
    "value": "held-out loss at equal machine time: one machine, networks with full, vouched and sampled audits",
    "training": "training compared with gloo, hivemind and one process: samples per second, bytes, loss, equal replicas",
    "codec": "bytes and loss of all formats of updates, DiLoCo, the format of SparseLoCo, FedAvg and one process",
    "attacks": "harm by liars: digits under every aggregation rule, and a GPT with audits full, sampled and off",
}
# Approximate wall-clock minutes on two idle cores, for a person who starts all of them.
MINUTES = {
    "gpu": 1,
    "decoding": 1,
    "rlhf_oracle": 1,
    "generate": 4,
    "interop": 2,
    "rollouts": 4,
    "safety": 1,
    "labels": 1,
    "tables": 4,
    "block_costs": 4,
    "curation": 8,
    "transport": 3,
    "apply": 4,
    "model_options": 15,
    "replay": 3,
    "ternary": 8,
    "round": 3,
    "tinker": 4,
    "tolerance": 8,
    "tuning": 4,
    "grokking": 25,
    "site": 9,
    "rlhf": 6,
    "demo": 10,
    "consensus": 20,
    "value": 40,
    "training": 180,
    "codec": 65,
    "attacks": 150,
}
ALSO = {"apply": ("--large",)}  # 100 million parameters, with bounds of their own
assert MINUTES.keys() == BENCHMARKS.keys() >= ALSO.keys()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__.splitlines()[0],
        epilog="\n".join(f"{name:12}{MINUTES[name]:4} min  {about}" for name, about in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, default=tuple(BENCHMARKS), metavar="NAME", help="run only these benchmarks"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder for the JSON files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed, missed = [], []
    print(f"about {sum(map(MINUTES.__getitem__, options.only))} minutes in all, on two idle cores", flush=True)
    for name in options.only:
        print(f"== {name}, about {MINUTES[name]} min: {BENCHMARKS[name]}", flush=True)
        started = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", *ALSO.get(name, ()), "--json", str(options.out / f"{name}.json")]
        status, lines = run(command)
        missed += [f"{name}: {line}" for line in lines]
        if status and not lines:
            failed.append(name)
        print(f"== {name}: {(time.monotonic() - started) / 60:.1f} min", flush=True)
    for line in (*missed, *(f"{name}: failed" for name in failed)):
        print(line, file=sys.stderr)
    return int(bool(missed or failed))


def run(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command. Return its exit status and the lines of missed bounds in its output."""
    missed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(MISSED):
                missed.append(line.rstrip())
    return process.returncode, missed


if __name__ == "__main__":
    sys.exit(main())
