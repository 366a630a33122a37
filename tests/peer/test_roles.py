from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from demo.lying_trainer import Liar
from ledger.audits.loss_commitments import LossOpening
from peer.roles import trainer, voter
from peer.roles.trainer import Trainer, _JobProgress
from peer.roles.voter import Voter, audit_request, read_bounded_blob, vouch_verdict
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Identity, Signed, sign_message
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from rounds.round_state import RoundTerms
from storage.disk_blob_store import JOB_BYTES, DiskBlobStore
from tests.ledger.power import Disk
from tests.peer.network import SCRATCH
from training import corpus as data
from training import worker_protocol
from training.job_disk_space import require_disk_space
from training.job_spec import AuditMode, FeedbackMemory, InnerStatePolicy, JobSpec
from training.model_store import JobModelStore
from training.replay import proposal_replay
from training.replay.inner_state import InnerState, OnState
from training.replicated import error_feedback
from training.replicated.codec import payload_bytes
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import layout_of
from training.round_context import OpenRoundContext
from training.transformer import ModelSpec

JOB, ME = bytes(32), Identity(bytes([1]) * 32)


class World:
    """One open scratch round. `fetch` finds the blobs of the store and records the requests."""

    def __init__(self, folder: Path, spec: JobSpec = SCRATCH) -> None:
        self.published: list[Proposal] = []
        self.fetched: list[bytes] = []
        self.begun: list[tuple[bytes, list[bytes]]] = []  # trainers, each with the blobs fetched before
        self.host = host = JobModelStore(folder / "models")
        root = host.create_model(JOB, spec.encode())
        keys = frozenset({ME.public})
        self.round = OpenRoundContext(
            me=ME.public,
            terms=RoundTerms(JOB, 0, root, keys, keys, keys, keys, keys),
            spec=spec,
            model=host.open_model(JOB, 0),
            model_directory=host.round_directory(JOB, 0),
            blobs=DiskBlobStore(folder / "blobs", folder / "buffers"),
            fetch=self._fetch,
            publish_proposal=self._publish,
            wait_to_propose=_ready,
            make_loss_opening=lambda loss: LossOpening(JOB, self.round.number, ME.public, bytes(32), loss),
            record_metrics=_measured,
            record_replay_start=self._begin,
        )

    async def _fetch(self, digest: bytes, size_max: int, sources: Iterable[bytes]) -> None:
        self.fetched.append(digest)
        assert (self.round.blobs.size(digest) or 0) <= size_max

    async def _publish(self, proposal: Proposal, opening: LossOpening | None) -> None:
        assert self.round.blobs.size(proposal.payload) == proposal.payload_bytes, "durable before it is sent"
        assert proposal.buffer is None or self.round.blobs.size(proposal.buffer) is not None
        self.published.append(proposal)

    async def proposed(self) -> Proposal:
        await Voter().propose(self.round)
        return self.published[-1]

    async def _begin(self, trainer: bytes) -> None:
        self.begun.append((trainer, list(self.fetched)))

    async def verdict(self, proposal: Proposal) -> Verdict:
        """Return the verdict of the cheap checks."""
        return await Voter().check_proposal(self.round, signed(proposal), proposal)

    async def vouch(self, proposal: Proposal) -> Verdict:
        """Return the verdict of the re-execution."""
        return await Voter().reexecute(self.round, ME.public, proposal)


async def _ready() -> None:
    pass


async def _measured(figures: Mapping[str, float]) -> None:
    pass


def signed(proposal: Proposal) -> Signed:
    return sign_message(ME, bytes(32), proposal)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_voter_proposes_the_known_update_of_a_scratch_round_and_accepts_it(world: World) -> None:
    proposal = await world.proposed()
    assert await world.verdict(proposal) is Verdict.ACCEPT
    assert world.fetched == [proposal.payload] and world.begun == [], "a check does not re-execute"
    assert await world.vouch(proposal) is Verdict.ACCEPT


async def test_a_re_execution_begins_when_all_it_needs_is_fetched(world: World) -> None:
    proposal = await world.proposed()
    await world.vouch(proposal)
    assert world.begun == [(ME.public, world.fetched)] and proposal.buffer in world.fetched


async def test_an_own_payload_is_lent_to_its_round_like_those_of_others(world: World) -> None:
    proposal, blobs = await world.proposed(), world.round.blobs
    assert blobs.round_references() == {proposal.payload: frozenset({(JOB, 0)})}
    blobs.release_round_references(proposal.payload, blobs.round_references()[proposal.payload], keeps=False)
    assert blobs.size(proposal.payload) is None, "the round has refused it"


async def test_a_payload_that_is_too_large_is_not_even_fetched(world: World) -> None:
    large = replace(
        await world.proposed(), payload_bytes=payload_bytes(world.round.model.layout, world.round.spec.payload_bits(0)) + 1
    )
    assert await world.verdict(large) is Verdict.MALFORMED
    assert world.fetched == []


async def test_the_first_round_after_the_opening_goes_on_from_a_payload_that_is_longer_than_its_own(tmp_path: Path) -> None:
    world = World(tmp_path, replace(SCRATCH, compression_warmup_rounds=1))
    first = await world.proposed()
    assert await world.verdict(first) is Verdict.ACCEPT
    accepted = AcceptedProposal(ME.public, first, world.round.blobs.read_range(first.payload))
    model, directory = world.round.model.apply_round([accepted], {}), world.host.round_directory(JOB, 1)
    model.save(directory)
    world.round = replace(
        world.round, terms=replace(world.round.terms, round=1, model_root=model.root), model=model, model_directory=directory
    )
    second = await world.proposed()
    assert second.feedback == first.buffer and second.payload_bytes < first.payload_bytes / 3
    assert await world.verdict(second) is await world.vouch(second) is Verdict.ACCEPT and first.payload in world.fetched
    assert await world.verdict(replace(second, payload_bytes=second.payload_bytes + 1)) is Verdict.MALFORMED


async def test_of_a_payload_that_is_here_as_something_larger_no_more_is_read_than_it_may_have(world: World) -> None:
    """A held blob is not fetched. A liar may name a blob that all peers have just fetched to audit it."""
    honest, blobs, read = await world.proposed(), world.round.blobs, list[int]()
    large = blobs.add_bytes(bytes(1_000_000))

    class Noting(DiskBlobStore):
        def read_range(self, digest: bytes, offset: int = 0, length: int = -1) -> bytes:
            read.append(length)
            return super().read_range(digest, offset, length)

    async def fetch(digest: bytes, size_max: int, sources: Iterable[bytes]) -> None:
        assert blobs.size(digest) == 1_000_000

    blobs.__class__ = Noting
    world.round = replace(world.round, fetch=fetch)
    assert await world.verdict(replace(honest, payload=large)) is Verdict.MALFORMED
    assert read == [honest.payload_bytes + 1]
    with pytest.raises(RemoteProtocolError, match="1000000 bytes, 99 at most are expected"):
        read_bounded_blob(world.round, large, 99)


async def test_a_payload_that_is_deleted_before_it_is_read_is_fetched_again(world: World) -> None:
    """A liar may name a blob of an audit that ends at this moment. The deletion is no disk failure."""
    honest, blobs, fetched = await world.proposed(), world.round.blobs, list[bytes]()
    payload = blobs.read_range(honest.payload)

    async def fetch(digest: bytes, size_max: int, sources: Iterable[bytes]) -> None:
        fetched.append(digest)
        if len(fetched) == 1:
            blobs.path(digest).unlink()
        else:
            blobs.add_bytes(payload)

    world.round = replace(world.round, fetch=fetch)
    assert await world.verdict(honest) is Verdict.ACCEPT
    assert fetched[:2] == [honest.payload] * 2


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"model_root": bytes(32)}, Verdict.STALE),
        ({"feedback": bytes(32)}, Verdict.COMMITMENT),
        ({"payload": "garbage"}, Verdict.MALFORMED),
    ],
)
async def test_each_lie_about_a_scratch_update_has_its_reason(world: World, change: dict[str, Any], verdict: Verdict) -> None:
    honest = await world.proposed()
    if change.get("payload"):
        change = {"payload": world.round.blobs.add_bytes(bytes(honest.payload_bytes))}
    assert await world.verdict(replace(honest, **change)) is verdict


@pytest.mark.parametrize(
    ("audited", "tolerances", "verdict"),
    [
        (Verdict.ACCEPT, 0.9, Verdict.ACCEPT),
        (Verdict.REPLAY, 1.1, Verdict.UNJUDGED),
        (Verdict.REPLAY, 2.0, Verdict.UNJUDGED),
        (Verdict.REPLAY, 2.1, Verdict.REPLAY),
        (Verdict.NORM, 0.0, Verdict.NORM),
    ],
)
def test_a_re_executor_is_unsure_from_the_tolerance_to_twice_the_tolerance(
    audited: Verdict, tolerances: float, verdict: Verdict
) -> None:
    spec = replace(SCRATCH, replay_tolerance=0.01)
    assert vouch_verdict(worker_protocol.AuditReply(audited, tolerances * spec.replay_tolerance, 0.0), spec) is verdict


@pytest.mark.parametrize("lies", [{"buffer"}, {"payload"}, {"buffer", "payload"}])
async def test_a_re_executor_rejects_another_buffer_or_payload_than_that_of_the_update(world: World, lies: set[str]) -> None:
    honest, blobs, model = await world.proposed(), world.round.blobs, world.round.model
    assert honest.buffer is not None
    other = -error_feedback.read_buffer(blobs.path(honest.buffer), world.round.spec).dequantize()
    buffer = error_feedback.make_buffer(other, model.header(ME.public), world.round.spec)
    assert buffer is not None
    changes = {"buffer": blobs.add_bytes(buffer.encode()), "payload": blobs.add_bytes(model.encode_payload(ME.public, other))}
    assert (
        await world.vouch(replace(honest, **{name: digest for name, digest in changes.items() if name in lies})) is Verdict.REPLAY
    )


@pytest.mark.parametrize("attack", ["sign-flip", "silent", "false-update"])
async def test_a_liar_accepts_its_accomplices_and_rejects_all_others_before_any_re_execution(
    world: World, tmp_path: Path, attack: str
) -> None:
    accomplice = Identity(bytes([2]) * 32).public
    liar = Liar(None, tmp_path, attack=attack, accomplices=frozenset({accomplice}))  # type: ignore[arg-type]
    proposal = await world.proposed()
    said = signed(proposal)
    world.round = replace(world.round, me=bytes(32))
    assert await liar.check_proposal(world.round, said, proposal) is Verdict.REPLAY
    assert await liar.check_proposal(world.round, replace(said, signer=accomplice), proposal) is Verdict.ACCEPT
    assert await liar.reexecute(world.round, accomplice, proposal) is Verdict.ACCEPT
    assert world.fetched == world.begun == [], "it looks at nothing"


async def test_a_trainer_without_local_text_says_how_to_name_it(world: World, tmp_path: Path) -> None:
    class Asleep:
        async def ask(self, request: object) -> object:
            raise AssertionError("there is nothing to open")

    role = Trainer(Asleep(), tmp_path)  # type: ignore[arg-type]
    local = replace(world.round, spec=JobSpec(name="own", audit=AuditMode.OFF))
    with pytest.raises(UserError, match="--local-data PATH"):
        await role.propose(local)


def test_a_text_that_does_not_fit_the_disk_is_not_fetched(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    require_disk_space(tmp_path, 1)
    with pytest.raises(UserError, match=r"needs twice its size and 256 MiB more, but .* MiB free"):
        require_disk_space(tmp_path, free // 2)


# Commitments of a language job beside payload and buffer -------------------------------------------------------------

MODEL = ModelSpec(context=8, width=8, layers=1, heads=2, kv_heads=1, hidden=8)


async def test_the_worker_is_told_which_tokens_the_manifest_of_a_job_names(world: World, tmp_path: Path) -> None:
    blobs, asked = world.round.blobs, list[Any]()

    class Worker:
        def __init__(self) -> None:
            self.open_jobs = set[bytes]()

        async def ask(self, request: Any) -> None:
            asked.append(request)
            self.open_jobs.add(request.job)

    manifest = replace(data.split_into_shards([b"text"], blobs.add_bytes), tokens=sha256(b"tokens").digest())
    (tmp_path / "texts").mkdir()
    role = Trainer(worker := Worker(), tmp_path / "texts")  # type: ignore[arg-type]
    opened = replace(world.round, spec=JobSpec(name="t", data=blobs.add_bytes(manifest.encode())))
    await role._open(opened)
    assert [request.tokens for request in asked] == [manifest.tokens]
    await role._open(opened)
    assert len(asked) == 1
    worker.open_jobs.clear()  # A worker closes a job after those that were used later.
    await role._open(opened)
    assert asked[1:] == asked[:1], "the job is opened again before it is needed"


class Steps:
    """A worker whose inner steps are sums, in numpy alone."""

    open_jobs = (JOB,)

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def ask(self, request: Any) -> Any:
        if isinstance(request, worker_protocol.OpenJobRequest):
            return None
        self.requests.append(request)
        done = (
            proposal_replay.make_proposal
            if isinstance(request, worker_protocol.ProposeRequest)
            else proposal_replay.audit_proposal
        )
        return done(request, self._update)

    def _update(
        self,
        parameters: Any,
        job: bytes,
        round: int,
        trainer: bytes,
        inner: InnerState | None,
        on_state: OnState | None,
        **_: object,
    ) -> tuple[Any, Sequence[float]]:
        spec = ReplicatedModel.open(Path(self.requests[-1].model_directory)).spec
        state, now = inner or InnerState.fresh(spec), parameters
        for _ in range(spec.local_steps):
            now, state = (
                now + np.linspace(1, 2, len(now), dtype=np.float32),
                InnerState(state.steps + 1, state.moments + np.float32(1)),
            )
            if on_state is not None:
                on_state(now, state)
        return parameters - now, [0.0] * spec.local_steps


def opened(world: World, tmp_path: Path, host: JobModelStore, number: int) -> tuple[Trainer, Steps]:
    spec = JobSpec.decode(host.open_model(JOB, number).spec.encode())
    terms = replace(world.round.terms, round=number, model_root=host.open_model(JOB, number).root)
    world.round = replace(
        world.round, spec=spec, model=host.open_model(JOB, number), model_directory=host.round_directory(JOB, number), terms=terms
    )
    steps = Steps()
    (tmp_path / "texts").mkdir(exist_ok=True)
    role = Trainer(steps, tmp_path / "texts", local_data=None)  # type: ignore[arg-type]
    role._jobs[JOB] = _JobProgress(opened=True)
    return role, steps


def language(world: World, folder: Path, **settings: Any) -> tuple[Trainer, Steps, JobModelStore]:
    """Open the first round of a language job with these settings. Return trainer, worker and model store."""
    host, spec = (
        JobModelStore(folder / "language"),
        JobSpec(name="t", data=bytes(32), model=MODEL, **{"initial_norm": 1e6, **settings}),
    )
    host.create_model(JOB, spec.encode())
    return *opened(world, folder, host, 0), host


async def in_second_round(world: World, folder: Path, **settings: Any) -> tuple[Proposal, Steps]:
    """Propose in two rounds of such a job. Return the first proposal, which was accepted alone, and the second round's worker."""
    role, _, host = language(world, folder, **settings)
    await role.propose(world.round)
    first = world.published[-1]
    accepted = AcceptedProposal(ME.public, first, world.round.blobs.read_range(first.payload))
    world.round.model.apply_round([accepted], {}).save(host.round_directory(JOB, 1))
    role, steps = opened(world, folder, host, 1)
    await role.propose(world.round)
    return first, steps


async def test_measuring_leaves_the_worker_to_training_for_most_of_the_time(
    world: World, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    begun, stored = list[float](), list[Mapping[str, float]]()

    async def measured(figures: Mapping[str, float]) -> None:
        stored.append(figures)

    role, steps, _ = language(world, tmp_path)
    role.evaluates = True

    async def evaluate(request: Any) -> Any:
        if isinstance(request, worker_protocol.GenerateRequest):
            return worker_protocol.GenerateReply("The end", is_over=True)
        assert isinstance(request, worker_protocol.EvaluateRequest)
        begun.append(trio.current_time())
        await trio.sleep(1.0)
        return worker_protocol.EvaluateReply({"bits": 2.5}, 1.0)

    steps.ask = evaluate  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        for number in range(40):  # rounds of a tenth of a second
            newest = replace(world.round, model=SimpleNamespace(job=JOB, round=number), record_metrics=measured)
            nursery.start_soon(role.observe_round, newest)
            await trio.sleep(0.1)
    assert begun == pytest.approx([begun[0], begun[0] + 4.0]), "the newest is measured in the end"
    await role.evaluate_model(newest)
    assert len(begun) == 2, "and not again"
    assert stored == [{"bits": 2.5, "evaluation_seconds": 1.0}] * 2, "all figures of a model at once"
    assert trainer.saved_samples(role.text_folder) == [(JOB.hex(), number, "The end") for number in (0, 39)]


def test_the_newest_text_of_a_model_is_kept_and_that_of_ten_rounds_before(tmp_path: Path) -> None:
    for number in (0, 4, 9, 13, 19, 20, 21, 34):
        if trainer.is_sample_due(tmp_path, JOB, number):
            trainer.save_sample(tmp_path, JOB, number, f"round {number}")
    assert [(number, text) for _, number, text in trainer.saved_samples(tmp_path)] == [(20, "round 20"), (34, "round 34")]


async def test_what_a_closed_round_left_is_deleted_once_the_worker_is_done_with_it(world: World, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for left in ("ab-7.buffer", "ab-7.buffer.inner"):
        (tmp_path / "texts" / left).touch()
    (tmp_path / "texts" / "ab.txt").touch()
    role, steps, _ = language(world, tmp_path, local_steps=2, inner_state=InnerStatePolicy.KEEP)
    ask = steps.ask

    async def late(request: Any) -> Any:
        await ask(request)
        closing.cancel()
        await trio.sleep_forever()

    steps.ask = late  # type: ignore[method-assign]
    with trio.CancelScope() as closing:
        await role.propose(world.round)
    assert len(list((tmp_path / "texts").iterdir())) == 2 + 1 + 3, "buffer, payload and inner state"
    steps.ask = ask  # type: ignore[method-assign]
    await role.propose(world.round)
    left = {path.name for path in (tmp_path / "texts").iterdir() if path.suffix != voter.SUFFIX}
    assert left == {"ab.txt"}


@pytest.mark.parametrize("audit", [AuditMode.SAMPLED, AuditMode.FULL])
async def test_what_a_proposal_commits_to_is_kept_for_audits_and_gone_on_from(
    world: World, tmp_path: Path, audit: AuditMode
) -> None:
    keeps = audit is AuditMode.FULL
    inner_state = InnerStatePolicy.KEEP if keeps else InnerStatePolicy.RESET
    role, steps, host = language(world, tmp_path, local_steps=3, audit=audit, inner_state=inner_state, outer_rate=0.1)
    await role.propose(world.round)
    first, blobs = world.published[-1], world.round.blobs
    assert (first.inner is not None) == keeps and first.inner_from is None
    assert world.round.model.check_proposal(ME.public, first, blobs.read_range(first.payload)) is Verdict.ACCEPT

    accepted = AcceptedProposal(ME.public, first, blobs.read_range(first.payload))
    world.round.model.apply_round([accepted], {}).save(host.round_directory(JOB, 1))
    blobs.release_owner((JOB, 0))
    blobs.delete_unowned({first.buffer, first.inner})  # as the workshop does when the next round opens
    role, steps = opened(world, tmp_path, host, 1)
    await role.propose(world.round)
    second = world.published[-1]
    assert (second.feedback, second.inner_from) == (first.buffer, first.inner)
    assert not keeps or InnerState.load(blobs.path(second.inner or b""), world.round.spec).steps == 6
    left = list((tmp_path / "texts").iterdir())
    assert all(path.suffix == voter.SUFFIX for path in left), "nothing is left where the worker wrote"
    kept = [voter.read_opening(tmp_path / "texts", JOB, number, ME.public) for number in (0, 1)]
    made = [LossOpening(JOB, number, ME.public, bytes(32), 0) for number in (0, 1)]
    assert kept == (made if audit is AuditMode.SAMPLED else [None, None])

    request = await audit_request(world.round, ME.public, second)
    inner = [str(blobs.path(digest)) if digest else None for digest in (second.inner, first.inner)]
    assert [request.inner, request.previous_inner] == inner
    assert proposal_replay.audit_proposal(request, steps._update).verdict is Verdict.ACCEPT

    blobs.release_owner((JOB, 1))
    blobs.delete_unowned(set())
    if audit is AuditMode.SAMPLED:
        assert None not in map(blobs.size, (second.buffer, first.buffer)), "audits of round 1 may ask for them"
        blobs.delete_rounds([(JOB[:JOB_BYTES], 0), (JOB[:JOB_BYTES], 1)])
    assert not any(blobs.size(digest) for digest in (second.buffer, second.inner, first.inner) if digest)
    assert blobs.size(second.payload) is not None


@pytest.mark.parametrize("audit", [AuditMode.SAMPLED, AuditMode.FULL])
@pytest.mark.parametrize("names_stay", [True, False])
async def test_what_audits_may_ask_for_is_durable_before_the_proposal_is_sent(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_stay: bool, audit: AuditMode
) -> None:
    disk = Disk(monkeypatch)
    kept = InnerStatePolicy.KEEP if audit is AuditMode.FULL else InnerStatePolicy.RESET
    role, _, _ = language(world, tmp_path, local_steps=3, audit=audit, inner_state=kept)

    async def power_cut(proposal: Proposal, opening: LossOpening | None) -> None:
        disk.cut(tmp_path / "buffers", names_stay)
        blobs = DiskBlobStore(tmp_path / "blobs", tmp_path / "buffers")
        blobs.verify_retained()
        if audit is AuditMode.FULL:
            blobs.mark_temporary(proposal.buffer, "round 0")
            blobs.mark_temporary(proposal.inner, "round 0")
        shown = {digest for digest in (proposal.buffer, proposal.inner) if digest}
        assert len(shown) == 1 + (audit is AuditMode.FULL)
        assert {digest: sha256(blobs.read_range(digest)).digest() for digest in shown} == {digest: digest for digest in shown}
        world.published.append(proposal)

    world.round = replace(world.round, publish_proposal=power_cut)
    await role.propose(world.round)
    assert len(world.published) == 1


async def test_without_full_audits_nobody_re_executes_before_the_ballot(world: World, tmp_path: Path) -> None:
    role, steps, _ = language(world, tmp_path, local_steps=2, audit=AuditMode.SAMPLED)
    await role.propose(world.round)
    world.fetched.clear()
    world.round = replace(world.round, me=bytes(32), terms=replace(world.round.terms, trainers_to_vouch_for=frozenset()))
    verdict = await role.check_proposal(world.round, signed(world.published[-1]), world.published[-1])
    assert verdict is Verdict.ACCEPT and len(steps.requests) == 1
    assert world.fetched == [world.published[-1].payload]


@pytest.mark.parametrize("decay", [0.95, 0.0])
async def test_where_nothing_is_said_again_no_earlier_buffer_is_named_and_so_none_revealed(
    world: World, tmp_path: Path, decay: float
) -> None:
    first, _ = await in_second_round(world, tmp_path, feedback_decay=decay)
    second = world.published[-1]
    assert second.round == 1 and second.feedback == first.buffer and (first.buffer is not None) == (decay > 0)
    world.fetched.clear()
    await audit_request(world.round, ME.public, second)
    assert world.fetched == ([second.buffer, first.buffer, first.payload] if decay else []), "the payload is here already"
    assert world.round.model.check_proposal(ME.public, second, world.round.blobs.read_range(second.payload)) is Verdict.ACCEPT


@pytest.mark.parametrize(
    ("memory", "fetched"), [(FeedbackMemory.RESIDUAL, ("buffer", "payload")), (FeedbackMemory.ESTIMATES, ("buffer",))]
)
async def test_of_the_proposal_before_only_what_the_update_continues_from_is_named_and_fetched(
    world: World, tmp_path: Path, memory: FeedbackMemory, fetched: tuple[str, ...]
) -> None:
    first, steps = await in_second_round(world, tmp_path, memory=memory, feedback_decay=0.8)
    world.fetched.clear()
    for said in (steps.requests[-1], await audit_request(world.round, ME.public, world.published[-1])):
        assert isinstance(said, worker_protocol.ProposeRequest | worker_protocol.AuditRequest)
        assert (said.previous_payload is not None) is ("payload" in fetched) and said.previous_buffer is not None
    assert world.fetched[1:] == [getattr(first, name) for name in fetched]  # after the buffer of this round


@pytest.mark.parametrize("lies", [{"buffer": None}, {"inner": None}, {"inner_from": bytes(32)}])
async def test_a_proposal_that_does_not_commit_to_what_the_job_needs_is_refused(
    world: World, tmp_path: Path, lies: dict[str, Any]
) -> None:
    role, _, _ = language(world, tmp_path, local_steps=2, inner_state=InnerStatePolicy.KEEP)
    await role.propose(world.round)
    honest = world.published[-1]
    payload = world.round.blobs.read_range(honest.payload)
    assert world.round.model.check_proposal(ME.public, honest, payload) is Verdict.ACCEPT
    assert world.round.model.check_proposal(ME.public, replace(honest, **lies), payload) is Verdict.COMMITMENT


@pytest.mark.parametrize(
    ("attack", "verdict"),
    [
        ("none", Verdict.ACCEPT),
        ("sign-flip", Verdict.REPLAY),
        ("scale", Verdict.REPLAY),
        ("stale", Verdict.REPLAY),
        ("free-rider", Verdict.REPLAY),
    ],
)
async def test_what_passes_the_cheap_checks_is_found_by_a_replay(
    world: World, tmp_path: Path, attack: str, verdict: Verdict
) -> None:
    role, steps, _ = language(world, tmp_path, local_steps=3, audit=AuditMode.SAMPLED, initial_norm=1e9)
    old = np.linspace(-1, 1, layout_of(world.round.spec).size, dtype=np.float32)
    liar = Liar(steps, tmp_path / "texts", attack=attack, _jobs=role._jobs, _stale=old)  # type: ignore[arg-type]
    await liar.propose(world.round)
    proposal = world.published[-1]
    assert world.round.model.check_proposal(ME.public, proposal, world.round.blobs.read_range(proposal.payload)) is Verdict.ACCEPT
    assert (await steps.ask(await audit_request(world.round, ME.public, proposal))).verdict is verdict


@pytest.mark.parametrize("attack", ["scale", "stale"])
async def test_lies_are_of_levels_too(world: World, tmp_path: Path, attack: str) -> None:
    """Otherwise the size of lies would reveal them, and no test would show that another check finds them."""
    role, steps, _ = language(world, tmp_path, initial_norm=1e9, audit=AuditMode.SAMPLED, local_steps=3)
    liar = Liar(steps, tmp_path / "texts", attack=attack, _jobs=role._jobs)  # type: ignore[arg-type]
    await liar.propose(world.round)
    proposal, blobs = world.published[-1], world.round.blobs
    m = error_feedback.read_buffer(blobs.path(proposal.buffer), world.round.spec).dequantize()
    assert world.round.model.encode_payload(ME.public, m) == blobs.read_range(proposal.payload)
