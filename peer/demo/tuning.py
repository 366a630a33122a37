"""`peer demo --rlhf toy`: what such a demo does in its own way. Everything else is as in every demo."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Final, cast

import trio

from peer.demo.cast import Demo
from peer.demo.report import Rlhf
from peer.export.writing import model_path
from rlhf.calls import FiguresView, RlhfCalls
from rlhf.objective import PpoTerms
from training import checkpoint
from training.replicated.model import ReplicatedModel

REWARD: Final = "rule:bigram"
ROUNDS: Final = 40
POLICY, REFERENCE, SAMPLES = "policy.safetensors", "reference.safetensors", "samples.jsonl"


async def begin(demo: Demo) -> str:
    """The job."""
    rounds = demo.options.rounds or ROUNDS
    return await cast(RlhfCalls, demo.watched.client).start_rlhf_training("", REWARD, rounds, "demo", demo.overrides)


async def measure(demo: Demo, job: str, export: str, watched: tuple[FiguresView, ...]) -> Rlhf:
    """Writes both models and responses of them into the demo's folder. A process of its own computes: this one loads no torch."""
    policy, reference = demo.folder / POLICY, demo.folder / REFERENCE
    shutil.copyfile(Path(export) / model_path(bytes.fromhex(job)), policy)
    spec, _, origin = checkpoint.read(policy)
    first = ReplicatedModel.initial(origin.job, spec)
    checkpoint.export(reference, spec, first.parameters, checkpoint.Origin(origin.job, 0, first.root))
    command = [sys.executable, "-m", "rlhf.pytorch.toy", str(policy), str(reference)]
    found = json.loads((await trio.run_process(command, capture_stdout=True)).stdout)
    (demo.folder / SAMPLES).write_text("".join(json.dumps(sample) + "\n" for sample in found["samples"]))
    own: PpoTerms = spec.own
    seen = {name: getattr(watched[-1], name) for name in ("distinct_2", "tokens", "length_correlation")} if watched else {}
    return Rlhf(algorithm=own.algorithm.value, beta=own.beta, rounds=origin.round, **found["figures"], **seen)
