"""Traces of real inner steps: what honest work gives anywhere passes, and a lie is found at the step that tells it."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peer.worker.main import Jobs
from protocol.errors import RemoteProtocolError, UserError
from protocol.messages import Proposal
from protocol.reasons import Finding, Verdict
from tests.waiting import run_process
from training import tasks
from training.data import corpus as data
from training.data.corpus import open_tokens
from training.data.default_text import default_text
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch import muon
from training.engines.pytorch.engine import Engine
from training.engines.pytorch.kind import KIND
from training.replay import inner_state, proposals, trace
from training.replay.inner_state import InnerState, OnState, directions, hidden_matrices, inner_bytes, inner_size, slots
from training.replay.trace import States, Trace
from training.replicated import buffers, codec
from training.replicated.init import initial_parameters
from training.replicated.layout import Float32Array, layout_of
from training.replicated.model import Accepted, ReplicatedModel
from training.spec import AuditMode, Inner, InnerStatePolicy, JobSpec
from training.transformer import ModelSpec

JOB, TRAINER = hashlib.sha256(b"job").digest(), b"t" * 32
MODEL = ModelSpec(context=32, width=32, layers=2, heads=4, kv_heads=2, hidden=48)
STEPS = 5
SPEC = JobSpec(
    name="t", data=bytes(32), model=MODEL, local_steps=STEPS, batch=4, micro_batch=4, rounds=10, audit=AuditMode.SAMPLED
)

SPECS = {
    "adamw": SPEC,
    "muon": replace(SPEC, inner=Inner.MUON),
    "adamw kept": replace(SPEC, inner_state=InnerStatePolicy.KEEP, beta1=0.9),
    "muon kept": replace(SPEC, inner=Inner.MUON, inner_state=InnerStatePolicy.KEEP, beta1=0.9),
    "three steps at once": replace(SPEC, local_steps=6, replayed_steps=3, inner_state=InnerStatePolicy.KEEP, beta1=0.9),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(default_text()[:50_000])
    return path


@dataclass
class World:
    """Rounds 0 and 1 of one trainer, whose proposal of round 0 was accepted; what is tested is its proposal of round 1."""

    folder: Path
    engine: Engine
    done: tasks.Proposed | None = None

    @property
    def spec(self) -> JobSpec:
        return self.engine.spec

    def update(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        inner: InnerState | None,
        on_state: OnState,
        **_: object,
    ) -> tuple[Float32Array, Sequence[float]]:
        delta, metrics = self.engine.local_steps(parameters, job, round, trainer, inner=inner, on_state=on_state)
        return delta, metrics.losses

    def propose(self, round: int, update: proposals.Update | None = None) -> tasks.Proposed:
        previous = [str(self.folder / f"{name}{round - 1}") if round else None for name in ("m", "payload", "inner")]
        request = tasks.Propose(
            JOB,
            round,
            TRAINER,
            str(self.folder / f"model{round}"),
            previous[0],
            previous[1],
            str(self.folder / f"m{round}"),
            previous[2] if self.spec.keeps_inner_state else None,
            str(self.folder / f"states{round}"),
        )
        done = proposals.propose(request, update or self.update)
        Path(request.payload_out).rename(self.folder / f"payload{round}")
        if done.inner:
            shutil.copy(self.folder / f"states{round}" / done.inner.hex(), self.folder / f"inner{round}")
        return done

    def begin(self) -> None:
        model = ReplicatedModel.initial(JOB, self.spec)
        model.save(self.folder / "model0")
        done = self.propose(0)
        digests = done.payload_digest, done.payload_bytes, done.buffer_digest
        proposal = Proposal(JOB, 0, model.root, *digests, None, done.trace, done.inner, None)
        payload = (self.folder / "payload0").read_bytes()
        assert model.check(TRAINER, proposal, payload) is Verdict.ACCEPT
        model.apply([Accepted(TRAINER, proposal, payload)], {}).save(self.folder / "model1")

    @property
    def model(self) -> ReplicatedModel:
        return ReplicatedModel.open(self.folder / "model1")

    @property
    def listed(self) -> Trace:
        assert self.done is not None and self.done.trace is not None
        return Trace.decode((self.folder / "states1" / self.done.trace.hex()).read_bytes(), self.spec)

    def find(self, step: int, listed: Trace | None = None) -> tasks.Replayed:
        """What an auditor that was drawn for `step` finds; it has only what `needed` names."""
        assert self.done is not None and self.done.trace is not None
        (self.folder / "trace").write_bytes((listed or self.listed).encode())
        files = {}
        for digest, size in trace.needed(listed or self.listed, step, self.spec).items():
            path = self.folder / ("inner0" if digest == self.model.records[TRAINER].inner else f"states1/{digest.hex()}")
            assert path.stat().st_size in (size, size - 4)
            files[digest] = str(path)
        request = tasks.Replay(
            job=JOB,
            round=1,
            trainer=TRAINER,
            step=step,
            model_directory=str(self.folder / "model1"),
            payload=str(self.folder / "payload1"),
            buffer=hashlib.sha256((self.folder / "m1").read_bytes()).digest(),
            previous_buffer=str(self.folder / "m0"),
            previous_payload=str(self.folder / "payload0"),
            trace=str(self.folder / "trace"),
            states=files,
            inner=self.done.inner,
            inner_from=self.model.records[TRAINER].inner,
        )
        return proposals.replay(request, self.engine.inner_step)

    def findings(self) -> list[Finding]:
        return [self.find(step).finding for step in range(self.spec.replays)]


@pytest.fixture(params=SPECS, scope="module")
def honest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, text: Path) -> World:
    """Nobody changes it."""
    spec = SPECS[request.param]
    world = World(tmp_path_factory.mktemp("honest"), Engine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer()))
    world.begin()
    world.done = world.propose(1)
    return world


@pytest.fixture
def world(tmp_path: Path, text: Path) -> World:
    world = World(tmp_path, Engine(SPEC, open_tokens(SPEC, text, ByteTokenizer()), ByteTokenizer()))
    world.begin()
    return world


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


# Honest work


def test_every_step_of_honest_work_passes_bit_for_bit_where_it_was_done(honest: World) -> None:
    for step in range(honest.spec.replays):
        found = honest.find(step)
        assert (found.finding, found.relative_error) == (Finding.MATCH, 0), step


def test_every_step_of_honest_work_passes_with_another_number_of_threads(honest: World, two_threads: None) -> None:
    for step in range(honest.spec.replays):
        found = honest.find(step)
        assert found.finding is Finding.MATCH, step
        assert found.relative_error < SPEC.replay_tolerance / 3, "or the tolerance is too narrow"


def test_a_trace_begins_with_the_model_and_ends_with_what_the_buffer_says(honest: World) -> None:
    listed = honest.listed
    assert len(listed.states) == honest.spec.replays + 1
    assert listed.states[0].parameters == hashlib.sha256(honest.model.parameters.tobytes()).digest()
    if not honest.spec.keeps_inner_state:
        assert listed.states[0].inner == trace.fresh_digest(honest.spec)
    else:
        assert honest.done is not None and listed.states[-1].inner == honest.done.inner
        assert listed.states[0].inner == honest.model.records[TRAINER].inner != trace.fresh_digest(honest.spec)


def test_the_files_are_those_that_the_trace_names_and_no_others(honest: World) -> None:
    assert honest.done is not None and honest.done.trace is not None
    named = {honest.done.trace, *(d for state in honest.listed.states[1:] for d in (state.parameters, state.inner))}
    assert {file.name for file in (honest.folder / "states1").iterdir()} == {digest.hex() for digest in named}
    for file in (honest.folder / "states1").iterdir():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.name


def test_a_replay_costs_the_steps_between_two_states(honest: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    batch = Engine.batch

    def counted(engine: Engine, job: bytes, round: int, trainer: bytes, step: int, size: int, declaration: object) -> object:
        asked.append(step)
        return batch(engine, job, round, trainer, step, size)

    monkeypatch.setattr(Engine, "batch", counted)
    honest.find(1)
    assert asked == ([3, 4, 5] if honest.spec.replayed_steps == 3 else [1])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_replay_computes_with_no_subnormal_numbers_and_what_is_exact_does(text: Path, name: str) -> None:
    """A liar may choose a state with which a processor takes twenty times as long."""
    spec = SPECS[name]
    engine, tiny = Engine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer()), np.float32(1e-40)
    seen: list[float] = []

    def look() -> None:
        seen.append(float(torch.tensor(tiny) * 1))

    engine.inner_step(initial_parameters(spec) * tiny, InnerState.fresh(spec), JOB, 0, TRAINER, 0, look)
    engine.local_steps(initial_parameters(spec), JOB, 0, TRAINER, look)
    assert len(seen) == 1 + spec.local_steps and set(seen) == {0.0}
    assert tiny * np.float32(1) > 0 and float(torch.tensor(tiny) * 1) > 0


@pytest.mark.real("processes")
def test_so_do_all_threads_of_the_worker_and_none_of_exact_arithmetic() -> None:
    """In a process of its own: torch starts its threads once."""
    script = """
import numpy as np, torch
from training.engines.pytorch.engine import no_subnormal_numbers, start_threads
start_threads(2)
tiny = torch.full((1 << 20,), 1e-40)
with no_subnormal_numbers():
    print(torch.get_num_threads(), int((tiny * 1 != 0).sum()), int(((tiny.view(1 << 10, -1) @ torch.eye(1 << 10)) != 0).sum()))
print(int((tiny.numpy() * np.float32(1) != 0).sum()))
"""
    done = run_process([sys.executable, "-c", script], capture_output=True, text=True, check=True, idle=300.0)
    assert done.stdout.split() == ["2", "0", "0", str(1 << 20)], done.stdout


@pytest.mark.parametrize("size", 10.0 ** np.arange(-44, 0, 4))
def test_no_direction_is_made_of_subnormal_numbers_however_small_its_moments_are(size: float) -> None:
    spec = SPECS["muon"]
    moments = np.abs(np.random.default_rng(0).standard_normal(inner_size(spec), dtype=np.float32)) * np.float32(size)
    found = np.abs(directions(InnerState(1, moments), spec))
    matrices = np.concatenate([found[tensor.elements] for tensor in hidden_matrices(layout_of(spec))])
    assert matrices[matrices != 0].min(initial=1.0) >= np.finfo(np.float32).tiny


@pytest.mark.parametrize("file", ["m0", "payload0", "inner0"])
@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_who_lost_what_it_goes_on_from_begins_anew_and_says_so(tmp_path: Path, text: Path, file: str, how: str) -> None:
    spec = SPECS["adamw kept"]
    world = World(tmp_path, Engine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer()))
    world.begin()
    record = world.model.records[TRAINER]
    whole = world.propose(1)
    assert (whole.feedback, whole.inner_from) == (record.buffer, record.inner)
    path = tmp_path / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink() if how == "gone" else path.write_bytes(data if how == "flipped" else data[:-4])
    world.done = done = world.propose(1)
    assert (done.feedback, done.inner_from) == ((record.buffer, None) if file == "inner0" else (None, record.inner))
    digests = done.payload_digest, done.payload_bytes, done.buffer_digest
    proposal = Proposal(JOB, 1, world.model.root, *digests, done.feedback, done.trace, done.inner, done.inner_from)
    assert world.model.check(TRAINER, proposal, (tmp_path / "payload1").read_bytes()) is Verdict.ACCEPT
    first = InnerState.fresh(spec) if done.inner_from is None else InnerState.load(tmp_path / "inner0", spec)
    assert world.listed.states[0].inner == trace.inner_digest(first, spec)


@pytest.mark.parametrize("poison", [np.nan, 1e30, None])
def test_whatever_somebody_goes_on_from_a_re_execution_ends_and_leaves_states(
    tmp_path: Path, text: Path, poison: float | None
) -> None:
    spec = SPECS["adamw kept"]
    world = World(tmp_path, Engine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer()))
    world.begin()
    moments = np.full(len(InnerState.fresh(spec).moments), poison or 0, dtype=np.float32)
    data = b"".join(InnerState(1, moments).pieces())
    (tmp_path / "poisoned").write_bytes(data if poison else data[:-4])
    request = tasks.Reexecute(JOB, 1, TRAINER, str(tmp_path / "model1"), str(tmp_path / "poisoned"), str(tmp_path / "own"))
    done = proposals.reexecute(request, world.update)
    assert done.trace is None if poison is None else (tmp_path / "own" / (done.trace or b"").hex()).exists()


# Lies in a step


class Cheat:
    """Engine.local_steps with one step that is not what was assigned."""

    def __init__(self, world: World, step: int, how: str) -> None:
        self._world, self._step, self._how = world, step, how

    def __call__(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        inner: InnerState | None,
        on_state: OnState,
        **_: object,
    ) -> tuple[Float32Array, Sequence[float]]:
        now, state = parameters, inner or InnerState.fresh(self._world.spec)
        for step in range(self._world.spec.local_steps):
            lies = step == self._step
            if lies and self._how == "skipped":
                after, moments = now, InnerState(state.steps + 1, state.moments)
            else:
                data = step + 100 if lies and self._how == "wrong data" else step
                made, moments, _ = self._world.engine.inner_step(now, state, job, round, trainer, data)
                after, moments = made.copy(), InnerState(moments.steps, moments.moments.copy())
            if lies and self._how == "scaled":
                after = now + (after - now) * np.float32(1.01)
            if lies and self._how == "moments":
                moments = InnerState(moments.steps, moments.moments * np.float32(1.01))
            if lies and self._how == "small roots":  # a twentieth of the parameters, which a norm of second moments does not see
                moments.moments[self._smallest(moments)] = 0
            if lies and self._how == "turned":  # within the tolerance of the first moments, where it moves parameters most
                first = moments.moments[slots(self._world.spec)["first"]]
                before = state.moments[slots(self._world.spec)["first"]]
                chosen = self._smallest(moments) - len(first)
                allowed = np.float32(0.9 * SPEC.replay_tolerance) * np.linalg.norm(first - before)
                first[chosen] += allowed / np.float32(len(chosen) ** 0.5)
            if lies and self._how == "count":
                moments = InnerState(moments.steps + 1, moments.moments)
            on_state(after, moments)
            now, state = after, moments
        return parameters - now, [0.0]

    def _smallest(self, state: InnerState) -> npt.NDArray[np.int64]:
        """Where the least second moments lie, a twentieth of them."""
        part = slots(self._world.spec)["second"]
        return np.argsort(state.moments[part])[: (part.stop - part.start) // 20] + part.start


@pytest.mark.parametrize(
    ("how", "step"),
    [
        ("wrong data", 0),
        ("wrong data", STEPS - 1),
        ("skipped", 2),
        ("scaled", 0),
        ("scaled", 2),
        ("moments", 2),
        ("small roots", 2),
        ("turned", 0),
        ("turned", 2),
        ("count", 2),
    ],
)
def test_a_lie_in_a_step_fails_at_that_step_and_at_no_other(world: World, how: str, step: int) -> None:
    world.done = world.propose(1, Cheat(world, step, how))
    assert world.findings() == [Finding.MISMATCH if number == step else Finding.MATCH for number in range(STEPS)]
    assert world.find(step).relative_error > 5 * SPEC.replay_tolerance


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("how", ["wrong data", "skipped", "moments"])
def test_a_lie_in_any_of_several_steps_fails_where_these_are_replayed(tmp_path: Path, text: Path, how: str, step: int) -> None:
    spec = SPECS["three steps at once"]
    world = World(tmp_path, Engine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer()))
    world.begin()
    world.done = world.propose(1, Cheat(world, step, how))
    assert world.findings() == [Finding.MISMATCH if part == step // 3 else Finding.MATCH for part in range(2)]


def test_what_is_kept_and_said_of_several_steps_is_of_where_they_begin(tmp_path: Path, text: Path) -> None:
    spec, each = SPECS["three steps at once"], replace(SPECS["three steps at once"], replayed_steps=1)
    done = []
    for number, of in enumerate((spec, each)):
        world = World(tmp_path / str(number), Engine(of, open_tokens(of, text, ByteTokenizer()), ByteTokenizer()))
        world.folder.mkdir()
        ReplicatedModel.initial(JOB, of).save(world.folder / "model0")
        made = world.propose(0)
        assert made.trace is not None
        done.append((made, Trace.decode((world.folder / "states0" / made.trace.hex()).read_bytes(), of).states))
    (some, few), (every, many) = done
    said = [buffers.read(tmp_path / name / "m0", spec).dense() for name in "01"]
    assert few == many[::3] and some.losses == every.losses[::3] and np.array_equal(*said)


@pytest.mark.parametrize("honest", ["muon", "muon kept"], indirect=True)
def test_momentum_that_turns_the_directions_of_muon_fails_though_it_is_near(honest: World) -> None:
    """What is small in momentum is as large as all else once it is orthogonal."""
    spec, before = honest.spec, InnerState.fresh(honest.spec)
    parameters, made, _ = honest.engine.inner_step(honest.model.parameters, before, JOB, 1, TRAINER, 0)
    replayed = parameters.copy(), InnerState(made.steps, made.moments.copy())
    lie = InnerState(made.steps, made.moments.copy())
    for tensor in hidden_matrices(layout_of(spec)):
        matrix = lie.moments[tensor.elements].reshape(tensor.shape)
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        values[-4:] *= -1  # the least of at least 16
        matrix[:] = (left * values) @ right
    moved = trace.distance(lie.moments, replayed[1].moments) / float(np.linalg.norm(replayed[1].moments))
    lie.moments[:] = replayed[1].moments + np.float32(0.9 * spec.replay_tolerance / moved) * (lie.moments - replayed[1].moments)
    start = honest.model.parameters, before
    assert trace.step_error(start, (replayed[0], lie), replayed, spec) > spec.replay_tolerance
    assert trace.step_error(start, replayed, replayed, spec) == 0


def test_values_that_are_no_numbers_fail_like_any_other(world: World) -> None:
    def poisoned(*arguments: object, **_: object) -> tuple[Float32Array, Sequence[float]]:
        parameters, on_state = arguments[0], arguments[5]
        nothing = np.full_like(parameters, np.nan)  # type: ignore[call-overload]
        for number in range(STEPS):
            on_state(nothing, InnerState(number + 1, InnerState.fresh(SPEC).moments))  # type: ignore[operator]
        return np.zeros_like(nothing), [0.0]

    world.done = world.propose(1, poisoned)
    assert world.findings() == [Finding.PAYLOAD] * STEPS


# Links that do not hold fail whatever step is drawn


def everywhere(world: World, finding: Finding, listed: Callable[[Trace], Trace] = lambda listed: listed) -> bool:
    return all(world.find(step, listed(world.listed)).finding is finding for step in (0, 3, STEPS - 1))


def test_a_buffer_that_does_not_come_from_e_and_the_trace_fails_at_every_step(world: World) -> None:
    world.done = world.propose(1)
    m = buffers.read(world.folder / "m1", SPEC).dense()
    m[7] = np.nextafter(m[7], np.float32(9))
    m.tofile(world.folder / "m1")
    assert everywhere(world, Finding.PAYLOAD)


def test_a_payload_that_is_not_of_the_buffer_fails_at_every_step(world: World) -> None:
    world.done = world.propose(1)
    m = buffers.read(world.folder / "m1", SPEC).dense()
    (world.folder / "payload1").write_bytes(codec.encode(world.model.header(TRAINER), -m, world.model.layout))
    assert everywhere(world, Finding.PAYLOAD)


def test_an_update_that_the_trace_does_not_end_with_fails_at_every_step(world: World) -> None:
    """Everything fits the honest trace but what was sent."""

    def twice(*arguments: object, **_: object) -> tuple[Float32Array, Sequence[float]]:
        delta, loss = world.update(*arguments)  # type: ignore[arg-type]
        return 2 * delta, loss

    world.done = world.propose(1, twice)
    assert everywhere(world, Finding.PAYLOAD)


def test_a_trace_that_begins_elsewhere_than_at_the_model_fails_at_every_step(world: World) -> None:
    """Training from one's own better place, and telling the steps truly."""

    def elsewhere(parameters: Float32Array, *rest: object, **_: object) -> tuple[Float32Array, Sequence[float]]:
        delta, loss = world.update(parameters * np.float32(0.99), *rest)  # type: ignore[arg-type]
        return parameters - (parameters * np.float32(0.99) - delta), loss

    world.done = world.propose(1, elsewhere)
    other = trace.StateDigests(bytes(32), trace.fresh_digest(SPEC))
    assert everywhere(world, Finding.START, lambda listed: Trace((other, *listed.states[1:])))
    assert world.find(0).finding is not Finding.MATCH, "nor can it say that it began at the model"


def test_moments_out_of_nowhere_at_the_start_fail_at_every_step(world: World) -> None:
    world.done = world.propose(1)
    start = replace(world.listed.states[0], inner=world.listed.states[2].inner)
    assert everywhere(world, Finding.START, lambda listed: Trace((start, *listed.states[1:])))


def test_a_trace_of_another_length_is_malformed(world: World) -> None:
    world.done = world.propose(1)
    assert everywhere(world, Finding.MATCH)
    assert world.find(0, Trace(world.listed.states[:-1])).finding is Finding.MALFORMED


def test_a_buffer_of_another_size_that_it_goes_on_from_is_malformed(world: World) -> None:
    world.done = world.propose(1)
    (world.folder / "m0").write_bytes(b"short")
    assert everywhere(world, Finding.MALFORMED)


def test_an_inner_state_of_more_steps_than_the_job_has_is_malformed(honest: World) -> None:
    spec, path = honest.spec, honest.folder / "many"

    def load(steps: int) -> InnerState:
        path.write_bytes(b"".join(bytes(piece) for piece in InnerState(steps, InnerState.fresh(spec).moments).pieces()))
        return InnerState.load(path, spec)

    most = spec.rounds * spec.local_steps
    assert load(most).steps == most
    with pytest.raises(RemoteProtocolError, match=f"{most + 1} steps"):
        load(most + 1)


@pytest.mark.parametrize("lies", ["parameters", "inner"])
def test_a_committed_state_of_another_size_is_malformed(world: World, lies: str) -> None:
    world.done = world.propose(1)
    committed = world.folder / "states1" / getattr(world.listed.states[1], lies).hex()
    committed.write_bytes(committed.read_bytes()[:-4])
    assert world.find(0).finding is Finding.MALFORMED
    assert world.find(3).finding is Finding.MATCH, "which does not look at that state"


# Kept inner state under full audits


@pytest.fixture
def kept(tmp_path: Path, text: Path) -> World:
    spec = replace(SPECS["adamw kept"], audit=AuditMode.FULL)
    world = World(tmp_path, Engine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer()))
    world.begin()
    world.done = world.propose(1)
    return world


def audited(world: World, **changes: str | None) -> tasks.Audited:
    paths = [str(world.folder / name) for name in ("model1", "payload1", "m1", "m0", "payload0", "inner1", "inner0")]
    request = replace(tasks.Audit(JOB, 1, TRAINER, *paths), **changes)  # type: ignore[arg-type]
    return proposals.audit(request, world.update)


def test_only_the_last_inner_state_is_written_where_no_states_are_traced(kept: World) -> None:
    assert kept.done is not None and kept.done.trace is None and kept.done.inner is not None
    assert [file.name for file in (kept.folder / "states1").iterdir()] == [kept.done.inner.hex()]


def test_a_full_audit_goes_on_from_the_committed_inner_state(kept: World) -> None:
    assert audited(kept).verdict is Verdict.ACCEPT
    assert audited(kept, previous_inner=None).verdict is Verdict.REPLAY, "from fresh moments it is another update"


def test_an_inner_state_that_the_replay_does_not_give_fails_the_audit(kept: World) -> None:
    state = InnerState.load(kept.folder / "inner1", kept.spec)
    for lie in (InnerState(state.steps, state.moments * np.float32(1.01)), InnerState(state.steps + 1, state.moments)):
        (kept.folder / "inner1").write_bytes(b"".join(bytes(piece) for piece in lie.pieces()))
        assert audited(kept).verdict is Verdict.REPLAY
    (kept.folder / "inner1").write_bytes(b"short")
    assert audited(kept).verdict is Verdict.REPLAY


@pytest.fixture(scope="module", params=["adamw kept", "muon kept"])
def single(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, text: Path) -> World:
    """Kept inner state and one step a round, which is replayed whole."""
    spec = replace(SPECS[request.param], local_steps=1)
    world = World(tmp_path_factory.mktemp("single"), Engine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer()))
    world.begin()
    world.done = world.propose(1)
    return world


NO_NUMBERS = [bytes.fromhex("0100807f"), np.float32("nan").tobytes(), np.float32("inf").tobytes()]  # the first: signalling


@settings(max_examples=60)
@given(
    steps=st.integers(0, 2**64 - 1),
    moments=st.one_of(st.binary(min_size=1, max_size=12), st.sampled_from(NO_NUMBERS)),
    missing=st.one_of(st.just(0), st.integers(0, 10_000)),
    is_previous=st.booleans(),
)
@example(steps=2**64 - 1, moments=bytes(4), missing=0, is_previous=True)
def test_whatever_inner_state_a_trainer_commits_to_or_goes_on_from_an_audit_ends_with_a_verdict(
    single: World, steps: int, moments: bytes, missing: int, is_previous: bool
) -> None:
    size = inner_bytes(single.spec)
    (single.folder / "other").write_bytes((steps.to_bytes(8, "little") + moments * size)[: max(0, size - missing)])
    changed = {"previous_inner" if is_previous else "inner": str(single.folder / "other")}
    found = audited(single, **changed)
    assert found.verdict is Verdict.REPLAY and 0 < found.relative_error <= trace.RELATIVE_ERROR_MAX


# Bisecting


def states_of(world: World, folder: str, listed: Trace) -> States:
    return States(listed, world.spec, lambda digest: world.folder / folder / digest.hex(), world.model.parameters)


@pytest.mark.parametrize("step", range(STEPS))
def test_a_challenger_that_re_executes_all_finds_the_first_step_that_leads_away(
    world: World, step: int, two_threads: None
) -> None:
    torch.set_num_threads(1)
    world.done = world.propose(1, Cheat(world, step, "wrong data"))
    theirs = world.listed
    (world.folder / "states1").rename(world.folder / "theirs")
    torch.set_num_threads(2)
    world.done = world.propose(1)
    revealed: list[bytes] = []
    accused = states_of(world, "theirs", theirs)

    def reveal(digest: bytes) -> Path:
        revealed.append(digest)
        return accused.path(digest)

    found = trace.bisect(states_of(world, "states1", world.listed), replace(accused, path=reveal), SPEC.replay_tolerance, 5)
    assert found[0] == step and found[1] > SPEC.replay_tolerance
    assert len(set(revealed)) <= 2 * (1 + 3), "log2 of 5 steps, rounded up, and the last state; two files each"


def test_nothing_is_found_in_honest_work(world: World, two_threads: None) -> None:
    torch.set_num_threads(1)
    world.done = world.propose(1)
    theirs = world.listed
    (world.folder / "states1").rename(world.folder / "theirs")
    torch.set_num_threads(2)
    world.done = world.propose(1)
    own = states_of(world, "states1", world.listed)
    step, deviation = trace.bisect(own, states_of(world, "theirs", theirs), SPEC.replay_tolerance, SPEC.local_steps)
    assert step is None and deviation < SPEC.replay_tolerance / 3


@pytest.mark.parametrize("how", ["wrong data", "skipped", "scaled", "moments"])
@pytest.mark.parametrize("kept", list(InnerStatePolicy))
def test_a_worker_that_re_executes_somebody_elses_round_leads_to_the_false_step(
    tmp_path: Path, text: Path, how: str, kept: InnerStatePolicy
) -> None:
    """What the daemon does for a person: the worker's request, the search, and then one replay from the accused's own states."""
    spec = replace(SPEC, local_steps=8, inner_state=kept)
    world = World(tmp_path, Engine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer()))
    world.begin()
    world.done = world.propose(1, Cheat(world, 3, how))
    jobs = Jobs(KIND, lambda: None, 1 << 30)
    jobs.answer(tasks.OpenJob(JOB, spec.encode(), str(text), None))
    begun = str(tmp_path / "inner0") if world.done.inner else None
    place = (JOB, 1, TRAINER, str(tmp_path / "model1"))
    done = jobs.answer(tasks.Reexecute(*place, begun, str(tmp_path / "own")))
    assert isinstance(done, tasks.Reexecuted) and done.trace is not None
    own = Trace.decode((tmp_path / "own" / done.trace.hex()).read_bytes(), spec)
    assert own.states[0] == world.listed.states[0], "both begin at the same state"
    found, _ = trace.bisect(states_of(world, "own", own), states_of(world, "states1", world.listed), spec.replay_tolerance, 8)
    assert found == 3
    assert [world.find(step).finding for step in (2, 3, 4)] == [Finding.MATCH, Finding.MISMATCH, Finding.MATCH]


def test_a_committed_state_of_another_size_is_where_the_search_ends(world: World) -> None:
    world.done = world.propose(1)
    theirs = world.listed
    shutil.copytree(world.folder / "states1", world.folder / "theirs")
    for state in theirs.states[3:]:
        (world.folder / "theirs" / state.parameters.hex()).write_bytes(b"short")
    own, accused = states_of(world, "states1", theirs), states_of(world, "theirs", theirs)
    found = trace.bisect(own, accused, SPEC.replay_tolerance, SPEC.local_steps)
    assert found == (2, trace.RELATIVE_ERROR_MAX)


def test_a_worker_opens_no_job_of_which_it_makes_other_tokens(text: Path) -> None:
    jobs, named = Jobs(KIND, lambda: None, 1 << 30), data.digest_of(open_tokens(SPEC, text, ByteTokenizer()))
    assert jobs.answer(tasks.OpenJob(JOB, SPEC.encode(), str(text), None, False, named))
    with pytest.raises(UserError, match="other tokens"):
        jobs.answer(tasks.OpenJob(JOB, SPEC.encode(), str(text), None, False, bytes(32)))


def test_what_auditors_compare_of_muon_is_what_muon_does() -> None:
    for shape in ((16, 48), (48, 16)):
        matrix = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        np.testing.assert_allclose(inner_state._orthogonal(matrix), muon.orthogonal(torch.from_numpy(matrix)).numpy(), atol=1e-5)
