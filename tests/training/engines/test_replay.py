"""Re-execution of rounds with a kept inner state, and of rounds with a fresh one."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peer.worker.main import WorkerRequestHandler
from protocol.errors import RemoteProtocolError, UserError
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from tests.training.engines.stepping import inner_step
from tests.waiting import run_process
from training import corpus as data
from training import worker_protocol
from training.corpus import open_tokens
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch import inner_optimizers
from training.engines.pytorch.backend import BACKEND
from training.engines.pytorch.engine import TorchEngine
from training.engines.request_handlers import WorkerContext
from training.job_spec import InnerOptimizerKind, InnerStatePolicy, JobSpec
from training.objectives.objective import InnerStep
from training.replay import inner_state, proposal_replay
from training.replay.inner_state import (
    RELATIVE_ERROR_MAX,
    InnerState,
    OnState,
    hidden_matrices,
    inner_bytes,
    inner_error,
    inner_size,
    l2_distance,
    moment_slots,
    update_directions,
)
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import Float32Array, initial_parameters, layout_of
from training.transformer import ModelSpec

JOB, TRAINER = hashlib.sha256(b"job").digest(), b"t" * 32
MODEL = ModelSpec(context=32, width=32, layers=2, heads=4, kv_heads=2, hidden=48)
STEPS = 5
SPEC = JobSpec(name="t", data=bytes(32), model=MODEL, local_steps=STEPS, batch=4, micro_batch=4, rounds=10)

SPECS = {
    "adamw": SPEC,
    "muon": replace(SPEC, inner=InnerOptimizerKind.MUON),
    "adamw kept": replace(SPEC, inner_state=InnerStatePolicy.KEEP, beta1=0.9),
    "muon kept": replace(SPEC, inner=InnerOptimizerKind.MUON, inner_state=InnerStatePolicy.KEEP, beta1=0.9),
}


@dataclass
class World:
    """Rounds 0 and 1 of one trainer. Its proposal of round 0 was accepted, and tests re-execute that of round 1."""

    folder: Path
    engine: TorchEngine
    done: worker_protocol.ProposeReply | None = None

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
        return self.engine.local_steps(parameters, job, round, trainer, inner=inner, on_state=on_state)

    def propose(self, round: int, update: proposal_replay.ComputeUpdate | None = None) -> worker_protocol.ProposeReply:
        previous = [str(self.folder / f"{name}{round - 1}") if round else None for name in ("m", "payload", "inner")]
        request = worker_protocol.ProposeRequest(
            JOB,
            round,
            TRAINER,
            str(self.folder / f"model{round}"),
            previous[0],
            previous[1],
            str(self.folder / f"m{round}"),
            previous[2] if self.spec.keeps_inner_state else None,
            str(self.folder / f"inner{round}") if self.spec.keeps_inner_state else None,
        )
        done = proposal_replay.make_proposal(request, update or self.update)
        Path(request.payload_out).rename(self.folder / f"payload{round}")
        return done

    def begin(self) -> None:
        model = ReplicatedModel.initial(JOB, self.spec)
        model.save(self.folder / "model0")
        done = self.propose(0)
        digests = done.payload_digest, done.payload_bytes, done.buffer_digest
        proposal = Proposal(JOB, 0, model.root, *digests, None, done.inner, None)
        payload = (self.folder / "payload0").read_bytes()
        assert model.check_proposal(TRAINER, proposal, payload) is Verdict.ACCEPT
        model.apply_round([AcceptedProposal(TRAINER, proposal, payload)], {}).save(self.folder / "model1")

    @property
    def model(self) -> ReplicatedModel:
        return ReplicatedModel.open(self.folder / "model1")


def begun(folder: Path, spec: JobSpec, text: Path, proposes: bool = False) -> World:
    world = World(folder, TorchEngine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer()))
    world.begin()
    if proposes:
        world.done = world.propose(1)
    return world


@pytest.fixture(params=SPECS, scope="module")
def honest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, text: Path) -> World:
    """The honest world, which no test changes."""
    return begun(tmp_path_factory.mktemp("honest"), SPECS[request.param], text, proposes=True)


@pytest.fixture
def world(tmp_path: Path, text: Path) -> World:
    return begun(tmp_path, SPEC, text)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_replay_computes_with_no_subnormal_numbers_and_what_is_exact_does(text: Path, name: str) -> None:
    """With subnormal numbers in its state a liar could make an auditor's processor twenty times slower."""
    spec = SPECS[name]
    engine, tiny = TorchEngine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer()), np.float32(1e-40)
    seen: list[float] = []

    def look() -> None:
        seen.append(float(torch.tensor(tiny) * 1))

    engine.local_steps(initial_parameters(spec) * tiny, JOB, 0, TRAINER, look)
    assert len(seen) == spec.local_steps and set(seen) == {0.0}
    assert tiny * np.float32(1) > 0 and float(torch.tensor(tiny) * 1) > 0


@pytest.mark.real("processes")
def test_so_do_all_threads_of_the_worker_and_none_of_exact_arithmetic() -> None:
    """In a process of its own: torch starts its threads once."""
    script = """
import numpy as np, torch
from training.engines.pytorch.engine import no_subnormal_numbers, start_torch_threads
start_torch_threads(2)
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
    found = np.abs(update_directions(InnerState(1, moments), spec))
    matrices = np.concatenate([found[tensor.elements] for tensor in hidden_matrices(layout_of(spec))])
    assert matrices[matrices != 0].min(initial=1.0) >= np.finfo(np.float32).tiny


@pytest.mark.parametrize("file", ["m0", "payload0", "inner0"])
@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_who_lost_what_it_goes_on_from_begins_anew_and_says_so(tmp_path: Path, text: Path, file: str, how: str) -> None:
    spec = SPECS["adamw kept"]
    world = World(tmp_path, TorchEngine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer()))
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
    proposal = Proposal(JOB, 1, world.model.root, *digests, done.feedback, done.inner, done.inner_from)
    assert world.model.check_proposal(TRAINER, proposal, (tmp_path / "payload1").read_bytes()) is Verdict.ACCEPT
    begun = {"previous_inner": None} if done.inner_from is None else {}
    gone_on = {} if done.feedback else {"previous_buffer": None, "previous_payload": None}
    assert audited(world, **begun, **gone_on).verdict is Verdict.ACCEPT


@pytest.fixture
def kept(tmp_path: Path, text: Path) -> World:
    return begun(tmp_path, SPECS["adamw kept"], text, proposes=True)


def audited(world: World, **changes: str | None) -> worker_protocol.AuditReply:
    kept = ("inner1", "inner0") if world.spec.keeps_inner_state else ()
    paths = [str(world.folder / name) for name in ("model1", "payload1", "m1", "m0", "payload0", *kept)]
    request = replace(worker_protocol.AuditRequest(JOB, 1, TRAINER, *paths), **changes)  # type: ignore[arg-type]
    return proposal_replay.audit_proposal(request, world.update)


def test_the_last_inner_state_is_committed_to_where_the_job_keeps_it(kept: World, world: World) -> None:
    assert kept.done is not None and kept.done.inner == hashlib.sha256((kept.folder / "inner1").read_bytes()).digest()
    assert InnerState.load(kept.folder / "inner1", kept.spec).steps == 2 * STEPS
    assert world.propose(1).inner is None


def test_an_honest_round_passes_bit_for_bit_where_it_was_done(honest: World) -> None:
    found = audited(honest)
    assert (found.verdict, found.relative_error) == (Verdict.ACCEPT, 0)


def test_an_honest_round_passes_with_another_number_of_threads(honest: World, two_threads: None) -> None:
    found = audited(honest)
    assert found.verdict is Verdict.ACCEPT
    assert found.relative_error < SPEC.replay_tolerance / 3, "or the tolerance is too narrow"


def smallest(state: InnerState, spec: JobSpec) -> npt.NDArray[np.int64]:
    """Return the indices of the least twentieth of the second moments."""
    part = moment_slots(spec)["second"]
    return np.argsort(state.moments[part])[: (part.stop - part.start) // 20] + part.start


def test_a_full_audit_goes_on_from_the_committed_inner_state(kept: World) -> None:
    assert audited(kept).verdict is Verdict.ACCEPT
    assert audited(kept, previous_inner=None).verdict is Verdict.REPLAY, "from fresh moments it is another update"


def test_an_inner_state_that_the_replay_does_not_give_fails_the_audit(kept: World) -> None:
    state = InnerState.load(kept.folder / "inner1", kept.spec)
    small, turned = state.moments.copy(), state.moments.copy()
    small[smallest(state, kept.spec)] = 0  # a twentieth of the parameters, without effect on a norm of second moments
    first = turned[moment_slots(kept.spec)["first"]]  # within the tolerance, where they move parameters most
    chosen = smallest(state, kept.spec) - len(first)
    first[chosen] += np.float32(0.9 * SPEC.replay_tolerance) * np.linalg.norm(first) / np.float32(len(chosen) ** 0.5)
    lies = [InnerState(state.steps, moments) for moments in (state.moments * np.float32(1.01), small, turned)]
    for lie in (*lies, InnerState(state.steps + 1, state.moments)):
        (kept.folder / "inner1").write_bytes(b"".join(bytes(piece) for piece in lie.iter_bytes()))
        assert audited(kept).verdict is Verdict.REPLAY
    (kept.folder / "inner1").write_bytes(b"short")
    assert audited(kept).verdict is Verdict.REPLAY


def test_momentum_that_turns_the_directions_of_muon_fails_though_it_is_near(text: Path) -> None:
    """Orthogonalization makes a small part of the momentum as large as all others."""
    spec = SPECS["muon kept"]
    engine = TorchEngine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer())
    _, replayed = inner_step(engine, initial_parameters(spec), InnerState.fresh(spec), InnerStep(JOB, 1, TRAINER, 0))
    lie = InnerState(replayed.steps, replayed.moments.copy())
    for tensor in hidden_matrices(layout_of(spec)):
        matrix = lie.moments[tensor.elements].reshape(tensor.shape)
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        values[-4:] *= -1  # the least of at least 16
        matrix[:] = (left * values) @ right
    moved = l2_distance(lie.moments, replayed.moments) / float(np.linalg.norm(replayed.moments))
    lie.moments[:] = replayed.moments + np.float32(0.9 * spec.replay_tolerance / moved) * (lie.moments - replayed.moments)
    assert inner_error(lie, replayed, spec) > spec.replay_tolerance
    assert inner_error(replayed, replayed, spec) == 0


def test_values_that_are_no_numbers_fail_like_any_other(world: World) -> None:
    def poisoned(*arguments: object, **_: object) -> tuple[Float32Array, Sequence[float]]:
        return np.zeros(layout_of(SPEC).size, dtype=np.float32), [float("nan")] * STEPS

    world.done = world.propose(1, poisoned)
    assert audited(world).verdict is Verdict.REPLAY


def test_a_buffer_of_another_size_that_it_goes_on_from_fails(world: World) -> None:
    world.done = world.propose(1)
    assert audited(world).verdict is Verdict.ACCEPT
    (world.folder / "m0").write_bytes(b"short")
    assert audited(world).verdict is Verdict.REPLAY


def test_an_inner_state_of_more_steps_than_the_job_has_is_malformed(kept: World) -> None:
    spec, path = kept.spec, kept.folder / "many"

    def load(steps: int) -> InnerState:
        path.write_bytes(b"".join(bytes(piece) for piece in InnerState(steps, InnerState.fresh(spec).moments).iter_bytes()))
        return InnerState.load(path, spec)

    most = spec.rounds * spec.local_steps
    assert load(most).steps == most
    with pytest.raises(RemoteProtocolError, match=f"{most + 1} steps"):
        load(most + 1)


@pytest.fixture(scope="module", params=["adamw kept", "muon kept"])
def single(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, text: Path) -> World:
    """Return a specification with kept inner state and one step a round, which is replayed completely."""
    return begun(tmp_path_factory.mktemp("single"), replace(SPECS[request.param], local_steps=1), text, proposes=True)


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
    found = audited(single, **{"previous_inner" if is_previous else "inner": str(single.folder / "other")})
    assert found.verdict is Verdict.REPLAY and 0 < found.relative_error <= RELATIVE_ERROR_MAX


def test_a_worker_opens_no_job_of_which_it_makes_other_tokens(text: Path) -> None:
    jobs, named = (
        WorkerRequestHandler(WorkerContext(BACKEND, lambda: None, 1 << 30)),
        data.tokens_digest(open_tokens(SPEC, text, ByteTokenizer())),
    )
    assert jobs.handle_request(worker_protocol.OpenJobRequest(JOB, SPEC.encode(), str(text), None, False, named))
    with pytest.raises(UserError, match="does not make the job's tokens"):
        jobs.handle_request(worker_protocol.OpenJobRequest(JOB, SPEC.encode(), str(text), None, False, bytes(32)))


def test_what_auditors_compare_of_muon_is_what_muon_does() -> None:
    for shape in ((16, 48), (48, 16)):
        matrix = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        np.testing.assert_allclose(
            inner_state._orthogonal(matrix), inner_optimizers.orthogonalize(torch.from_numpy(matrix)).numpy(), atol=1e-5
        )
