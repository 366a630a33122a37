"""`python -m benchmarks`: what is measured here, and how to measure it again.

Each benchmark is `python -m benchmarks.NAME --json FILE`; without `--only` all of them run, one after the other.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

BENCHMARKS = {
    "demo": "the main job as a person runs it: time, loss against one process, decisions, bytes, memory",
    "training": "ours beside gloo, hivemind and one process: samples per second, bytes, loss, equal replicas",
    "codec": "bytes and loss of every way to say an update, against DiLoCo, SparseLoCo's format, FedAvg and one process",
    "attacks": "what liars can do: digits under every aggregation rule, a GPT with audits full, sampled and off",
    "consensus": "decisions of 4 to 100 voters: time, processor time and bytes, against what is physically possible",
    "apply": "what a voter computes after the vote: decoding, aggregation, outer step, hashes; time and memory",
    "decoding": "payloads in every mode: bytes, and how fast one core reads and writes them",
    "round": "a whole round beside computing the updates: time, processor time, bytes, durable writes",
    "replay": "how far honest replays lie apart and how far lies, and what must be bit-equal on this machine",
    "tuning": "the default hyper-parameters against others and against one process, without a network",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=BENCHMARKS, help="run just this one")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder for the JSON files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in [options.only] if options.only else BENCHMARKS:
        print(f"== {name}: {BENCHMARKS[name]}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(options.out / f"{name}.json")]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
