"""PPO in the worker: what is proposed passes every check, and what was not sampled is named."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer import features
from peer.worker.main import Jobs
from protocol import codec
from protocol.reasons import Finding, Verdict, label
from rlhf import rollouts
from rlhf.objective import PPO, PpoTerms, Rollouts
from training import tasks
from training.data.default_text import default_text
from training.engines.pytorch.kind import KIND
from training.replay import trace
from training.replicated.model import ReplicatedModel
from training.spec import AuditMode, JobSpec
from training.transformer import ModelSpec

JOB, TRAINER = bytes([1]) * 32, bytes([2]) * 32
OWN = PpoTerms(reward="rule:vowels", prompt_tokens=4, response_tokens=6, epochs=2)
SPEC = JobSpec(
    name="ppo",
    objective="ppo",
    model=ModelSpec(context=16, width=16, layers=1, hidden=16),
    data=bytes(32),
    settings=codec.encode(OWN),
    local_steps=4,
    batch=8,
    rounds=3,
    feedback_decay=0.0,
    audit=AuditMode.SAMPLED,
)


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    features.install()


@dataclass
class World:
    """One trainer's round, and those who look at it. All work with one worker."""

    folder: Path
    spec: JobSpec

    def __post_init__(self) -> None:
        (self.folder / "text").write_bytes(default_text()[:20_000])
        self.model = ReplicatedModel.initial(JOB, self.spec)
        self.model.save(self.folder / "model")
        self.jobs = self.worker()

    def worker(self) -> Jobs:
        jobs = Jobs(KIND, lambda: None, 1 << 30)
        jobs.answer(tasks.OpenJob(JOB, self.spec.encode(), str(self.folder / "text"), None))
        return jobs

    @property
    def engine(self) -> Any:
        return self.jobs._engines[JOB]

    def propose(self, declared: tasks.Declared | None = None) -> tasks.Proposed:
        states = str(self.folder / "states") if self.spec.traces_states else None
        out = {"buffer_out": str(self.folder / "m"), "states_out": states, "declared_out": str(self.folder / "declared")}
        request = tasks.Propose(JOB, 0, TRAINER, str(self.folder / "model"), None, None, **out, declared=declared)
        done = self.jobs.answer(request)
        assert isinstance(done, tasks.Proposed)
        (self.folder / "payload").write_bytes(done.payload)
        return done

    def declared(self, done: tasks.Proposed) -> tasks.Declared:
        files = {bytes.fromhex(file.name): str(file) for file in (self.folder / "declared").iterdir()}
        return tasks.Declared(done.declaration, files)

    def audited(self, done: tasks.Proposed, jobs: Jobs | None = None) -> tasks.Audited:
        files = {"payload": str(self.folder / "payload"), "buffer": str(self.folder / "m")}
        request = tasks.Audit(
            JOB, 0, TRAINER, str(self.folder / "model"), **files, previous_buffer=None, previous_payload=None,
            declared=self.declared(done),
        )  # fmt: skip
        found = (jobs or self.worker()).answer(request)
        assert isinstance(found, tasks.Audited)
        return found

    def replayed(self, done: tasks.Proposed, step: int, jobs: Jobs | None = None) -> tasks.Replayed:
        assert done.trace is not None
        made = self.folder / "states"
        listed = trace.Trace.decode((made / done.trace.hex()).read_bytes(), self.spec)
        states = {digest: str(made / digest.hex()) for digest in trace.needed(listed, step, self.spec)}
        request = tasks.Replay(
            JOB, 0, TRAINER, step, str(self.folder / "model"), str(self.folder / "payload"), done.buffer_digest, None, None,
            str(made / done.trace.hex()), states, None, None, self.declared(done),
        )  # fmt: skip
        found = (jobs or self.worker()).answer(request)
        assert isinstance(found, tasks.Replayed)
        return found

    def say(self, responses: list[Any], done: tasks.Proposed) -> tasks.Declared:
        """A declaration of these responses, with the figures that it had."""
        blob = rollouts.encode(responses)
        digest, said = hashlib.sha256(blob).digest(), codec.decode(Rollouts, done.declaration)
        path = self.folder / "declared" / digest.hex()
        path.write_bytes(blob)
        tokens = sum(map(len, responses))
        unfinished = sum(not rollouts.is_finished(np.array(response), OWN.stop) for response in responses)
        return tasks.Declared(codec.encode(replace(said, blob=digest, tokens=tokens, unfinished=unfinished)), {digest: str(path)})

    def responses(self, done: tasks.Proposed) -> list[Any]:
        said = codec.decode(Rollouts, done.declaration)
        return rollouts.read(self.folder / "declared" / said.blob.hex(), PPO.bounds(self.spec, self.spec.own))


@pytest.fixture
def sampled(tmp_path: Path) -> World:
    return World(tmp_path, SPEC.checked())


@pytest.fixture
def full(tmp_path: Path) -> World:
    return World(tmp_path, replace(SPEC, audit=AuditMode.FULL).checked())


def test_honest_work_passes_at_every_step_bit_for_bit_where_it_was_done(sampled: World) -> None:
    done = sampled.propose()
    said = codec.decode(Rollouts, done.declaration)
    assert said.k1 == 0 and said.tokens > 0, "before its first round a policy is its reference"
    for step in range(SPEC.local_steps):
        found = sampled.replayed(done, step)
        assert (found.finding, found.relative_error) == (Finding.MATCH, 0), step


def test_honest_work_passes_whole(full: World) -> None:
    found = full.audited(full.propose())
    assert (found.verdict, found.relative_error) == (Verdict.ACCEPT, 0)


@pytest.mark.parametrize("lie", ["invented", "one-token"])
def test_invented_responses_are_named_by_full_audits(full: World, lie: str) -> None:
    """Their update follows from them: nothing else is false."""
    done = full.propose()
    responses = [list(response) for response in full.responses(done)]
    if lie == "invented":
        responses = [[ord("a")] * OWN.response_tokens for _ in responses]
    else:
        responses[3][0] = next(token for token in range(97, 123) if token != responses[3][0])
        responses[3] = responses[3][:1] + [97] * (OWN.response_tokens - 1)
    false = full.propose(full.say(responses, done))
    found = full.audited(false)
    assert label(found.verdict, PPO.labels) == "rollout"
