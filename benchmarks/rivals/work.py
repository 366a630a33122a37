"""Common parts of all rivals: the job, the batches, the schedule, the clock and the report.

A rival is a process of its own, `python -m benchmarks.rivals.NAME WORK RANK`, which may run in another environment. It only
imports `training`, whose requirements `environment` installs with the rival's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.corpus import open_tokens
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.engine import TorchEngine
from training.engines.pytorch.inner_optimizers import AdamW, Muon
from training.job_spec import JobSpec
from training.replicated.outer_optimizer import inner_rate
from training.replicated.tensor_layout import initial_parameters

JOB = hashlib.sha256(b"folkmoot/benchmarks/training").digest()
POLL_SECONDS = 0.02
# Setups of hivemind: `PLAIN` has its defaults. `FRUGAL` has float16 on the wire, fewer averages of the whole state and more
# frequent progress updates. `DELAYED` also runs averages and steps in the background, one step late. `LOCAL` makes separate steps
# between averages.
PLAIN, FRUGAL, DELAYED, LOCAL = "plain", "frugal", "delayed", "local steps"
SETUPS = (PLAIN, FRUGAL, DELAYED)


@dataclass(frozen=True)
class Work:
    """One task of all rivals, as a file: `spec` has the model, the schedule, the batch of one peer, and all fields of AdamW."""

    folder: str  # where ranks meet and leave their results
    text: str
    spec: str  # hex of an encoded JobSpec
    warm: int  # untimed steps
    peers: int
    threads: int  # of torch, in each process
    matchmaking_seconds: float = 1.0  # hivemind only
    setup: str = PLAIN  # hivemind only
    local_steps: int = 1  # hivemind only: from one average to the next
    seconds_max: float = 600.0  # a slower rival stops then, with its steps so far

    def save(self) -> Path:
        path = Path(self.folder) / "work.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: str) -> Work:
        return cls(**json.loads(Path(path).read_text()))

    def job(self) -> JobSpec:
        """The specification. Its rounds are the steps of a rival."""
        return JobSpec.decode(bytes.fromhex(self.spec))

    def result_file(self, rank: int) -> Path:
        return Path(self.folder) / f"result-{rank}.json"


@dataclass(frozen=True)
class Result:
    """Results of one process. Seconds and bytes are those of the timed part."""

    samples: int  # sequences whose gradients this process computed
    updates: int
    seconds: float
    bytes_sent: int
    heldout_nats: float
    root: str  # SHA-256 of its parameters


class Replica:
    """One process's copy of the model, and its share of every batch."""

    def __init__(self, work: Work, rank: int) -> None:
        torch.set_num_threads(work.threads)
        self.work, self.rank, self.spec = work, rank, work.job()
        self.engine = TorchEngine(self.spec, open_tokens(self.spec, Path(work.text), ByteTokenizer()), ByteTokenizer())
        self.engine.load_parameters(initial_parameters(self.spec))

    @property
    def parameters(self) -> Tensor:
        """The flat vector that the engine computes on."""
        return self.engine.model.parameters

    @property
    def gradients(self) -> Tensor:
        """The flat gradient of `TorchEngine.accumulate_gradient`."""
        return self.engine.model.gradients

    def optimizer(self) -> AdamW | Muon:
        return self.engine.make_optimizer()

    def share(self, step: int, rank: int) -> npt.NDArray[np.int64]:
        """Return the starts of one peer's sequences; all shares together are the global batch."""
        return self.engine.draw_batch(JOB, step, b"%d" % rank, 0, self.spec.batch)

    def rate(self, step: int) -> float:
        return inner_rate(self.spec, step)

    def report(self, samples: int, updates: int, seconds: float, bytes_sent: int) -> None:
        parameters = self.engine.read_parameters().copy()
        bits = self.engine.compute_main_metric(parameters)
        assert bits is not None, "the benchmark's job holds text out"
        root = hashlib.sha256(parameters.tobytes()).hexdigest()
        result = Result(samples, updates, seconds, bytes_sent, bits * math.log(2), root)
        file = self.work.result_file(self.rank)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(result)))
        os.replace(part, file)


def meet(work: Work, rank: int, what: str, seconds_max: float) -> bool:
    """Wait until every rank has arrived. Return False after `seconds_max`."""
    folder = Path(work.folder)
    (folder / f"{what}-{rank}").touch()
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        if all((folder / f"{what}-{other}").exists() for other in range(work.peers)):
            return True
        time.sleep(POLL_SECONDS)
    return False
