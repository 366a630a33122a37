from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol import codec as codec_of_messages
from protocol.errors import LocalProtocolError
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from training import worker_protocol
from training.job_spec import NORM_START_MAX, TOLERANCE_MIN, FeedbackMemory, JobSpec
from training.objectives.registry import ScratchObjective
from training.replay import proposal_replay
from training.replay.inner_state import RELATIVE_ERROR_MAX
from training.replicated import codec, error_feedback
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel

JOB, TRAINER = hashlib.sha256(b"job").digest(), b"t" * 32
SPEC = JobSpec(name="s", objective="scratch")
UPDATE = proposal_replay.known_update(SPEC)


def propose_request(folder: Path, round: int, previous: int | None = None) -> worker_protocol.ProposeRequest:
    buffer, payload = (None, None) if previous is None else (str(folder / f"m{previous}"), str(folder / f"p{previous}"))
    return worker_protocol.ProposeRequest(
        JOB, round, TRAINER, str(folder / f"model{round}"), buffer, payload, str(folder / f"m{round}")
    )


def propose(folder: Path, round: int, previous: int | None = None) -> worker_protocol.ProposeReply:
    proposed = proposal_replay.make_proposal(propose_request(folder, round, previous), UPDATE)
    (folder / f"m{round}.payload").rename(folder / f"p{round}")
    return proposed


def audit_of(folder: Path, round: int, previous: int | None = None) -> worker_protocol.AuditRequest:
    buffer, payload = (None, None) if previous is None else (str(folder / f"m{previous}"), str(folder / f"p{previous}"))
    paths = str(folder / f"model{round}"), str(folder / f"p{round}"), str(folder / f"m{round}")
    return worker_protocol.AuditRequest(JOB, round, TRAINER, *paths, buffer, payload)


def committed(path: Path, spec: JobSpec = SPEC) -> np.ndarray:
    """Return the values of the buffer in that file."""
    return error_feedback.read_buffer(path, spec).dequantize()


@pytest.fixture
def two_rounds(tmp_path: Path) -> Path:
    return _two_rounds(tmp_path, SPEC)


def _two_rounds(folder: Path, spec: JobSpec) -> Path:
    """Return the models of rounds 0 and 1, between which a proposal of round 0 was accepted."""
    model = ReplicatedModel.initial(JOB, spec)
    model.save(folder / "model0")
    proposed = propose(folder, 0)
    digests = proposed.payload_digest, proposed.payload_bytes, proposed.buffer_digest
    accepted = AcceptedProposal(TRAINER, Proposal(JOB, 0, model.root, *digests, None), (folder / "p0").read_bytes())
    model.apply_round([accepted], {}).save(folder / "model1")
    return folder


def test_the_digests_are_those_of_what_was_written(two_rounds: Path) -> None:
    proposed = propose(two_rounds, 1, previous=0)
    assert hashlib.sha256((two_rounds / "m1").read_bytes()).digest() == proposed.buffer_digest
    payload = (two_rounds / "p1").read_bytes()
    assert (hashlib.sha256(payload).digest(), len(payload)) == (proposed.payload_digest, proposed.payload_bytes)


@pytest.mark.parametrize("previous", [None, 0])
def test_an_honest_proposal_is_accepted_with_and_without_feedback(two_rounds: Path, previous: int | None) -> None:
    propose(two_rounds, 1, previous)
    audited = proposal_replay.audit_proposal(audit_of(two_rounds, 1, previous), UPDATE)
    assert audited.verdict is Verdict.ACCEPT and audited.relative_error == 0


@pytest.mark.parametrize("done, claimed", [(0, None), (None, 0)])
def test_feedback_other_than_the_claimed_one_is_a_failed_replay(two_rounds: Path, done: int | None, claimed: int | None) -> None:
    propose(two_rounds, 1, done)
    audited = proposal_replay.audit_proposal(audit_of(two_rounds, 1, claimed), UPDATE)
    assert audited.verdict is Verdict.REPLAY and audited.relative_error > 10 * TOLERANCE_MIN


def test_another_trainers_work_a_short_buffer_and_poisoned_arithmetic_fail_the_replay(two_rounds: Path) -> None:
    audit = audit_of(two_rounds, 0)
    assert proposal_replay.audit_proposal(replace(audit, trainer=b"u" * 32), UPDATE).verdict is Verdict.REPLAY
    for content in (b"short", bytes(error_feedback.buffer_bytes(SPEC)), np.full(4096, np.nan, "<f4").tobytes()):
        (two_rounds / "m0").write_bytes(content)
        audited = proposal_replay.audit_proposal(audit, UPDATE)
        assert (audited.verdict, audited.relative_error) == (Verdict.REPLAY, proposal_replay.RELATIVE_ERROR_MAX)


@pytest.mark.parametrize("off", [0.0, 5.0])
def test_a_payload_that_says_something_else_is_far_off_however_near_its_buffer_is(two_rounds: Path, off: float) -> None:
    """Errors between one and two tolerances are not reported, so a lie must not fit among them."""
    model = ReplicatedModel.open(two_rounds / "model0")
    buffer = error_feedback.make_buffer(
        committed(two_rounds / "m0") * np.float32(1 + off * TOLERANCE_MIN), model.header(TRAINER), SPEC
    )
    assert buffer is not None
    (two_rounds / "m0").write_bytes(buffer.encode())
    (two_rounds / "p0").write_bytes(codec.encode_payload(model.header(TRAINER), -buffer.dequantize(), model.layout))
    audited = proposal_replay.audit_proposal(audit_of(two_rounds, 0), UPDATE)
    assert (audited.verdict, audited.relative_error) == (Verdict.REPLAY, proposal_replay.RELATIVE_ERROR_MAX)


def test_a_model_of_another_round_and_feedback_out_of_nothing_are_our_own_mistakes(two_rounds: Path) -> None:
    with pytest.raises(LocalProtocolError, match="round 1 was requested"):
        proposal_replay.audit_proposal(replace(audit_of(two_rounds, 0), round=1), UPDATE)
    with pytest.raises(LocalProtocolError, match="without an accepted proposal"):
        proposal_replay.audit_proposal(replace(audit_of(two_rounds, 0, previous=0)), UPDATE)


@pytest.mark.parametrize(
    "said",
    [
        {"memory": FeedbackMemory.ESTIMATES},
        {"bits": 1},
        {"bits": 4},
        {"bits": 8, "feedback_decay": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_an_update_of_a_diverged_model_is_proposed_and_refused_as_too_large(
    tmp_path: Path, value: float, said: dict[str, Any]
) -> None:
    """A round without proposals would never be closed."""
    model = ReplicatedModel.initial(JOB, replace(SPEC, **said))
    model.save(tmp_path / "model0")
    delta = np.zeros(model.layout.size, dtype=np.float32)
    delta[3] = value
    proposed = proposal_replay.make_proposal(propose_request(tmp_path, 0), lambda *given, **named: (delta, (1.0, np.nan)))
    digests = proposed.payload_digest, proposed.payload_bytes, proposed.buffer_digest
    payload = (tmp_path / "m0.payload").read_bytes()
    assert model.check_proposal(TRAINER, Proposal(JOB, 0, model.root, *digests, None), payload) is Verdict.NORM
    assert (
        proposed.loss is None
        and codec_of_messages.decode(worker_protocol.ProposeReply, codec_of_messages.encode(proposed)) == proposed
    )


def test_an_update_without_an_encoding_is_not_proposed_where_its_norm_might_be_accepted(tmp_path: Path) -> None:
    """Re-execution would reject such a proposal."""
    model = ReplicatedModel.initial(JOB, replace(SPEC, initial_norm=NORM_START_MAX))
    model.save(tmp_path / "model0")
    delta = np.full(model.layout.size, np.nan, dtype=np.float32)
    delta[1:] = 0
    with pytest.raises(LocalProtocolError, match="non-finite"):
        proposal_replay.make_proposal(propose_request(tmp_path, 0), lambda *given, **named: (delta, (1.0,)))


# A buffer that nobody looked at when it was committed to -----------------------------------------------------------------

SIZE = error_feedback.buffer_bytes(SPEC)
HEAD = codec.payload.HEADER_BYTES
# its one scale is the largest one
LARGEST = codec.payload.pack_header(error_feedback.ESTIMATE_BITS, bytes(32), codec.EXPONENT_MAX) + b"\xff"
HEADS = st.sampled_from(
    [
        LARGEST,
        codec.payload.pack_header(error_feedback.ESTIMATE_BITS, bytes(32), codec.EXPONENT_MIN) + b"\0",
        bytes(HEAD + 1),
    ]
)
PATTERNS = st.one_of(st.binary(min_size=1, max_size=12), st.sampled_from([b"\x7f", b"\x7f\x81", b"\x80", b"\0"]))  # repeated
SIZES = st.one_of(st.sampled_from([0, 3, SIZE - 4, SIZE - 1, SIZE]), st.integers(0, SIZE))


def continued(folder: Path, blob: bytes, stepped: bool = True, rejected: int = 0) -> worker_protocol.AuditRequest:
    """Return the audit of an honest proposal that continues from `blob`, the commitment of round 0."""
    spec = replace(SPEC, accepted_min=1 if stepped else 2)
    model = ReplicatedModel.initial(JOB, spec)
    first = ScratchObjective().deterministic_update(JOB, 0, TRAINER, model.layout.size)
    payload = codec.encode_payload(model.header(TRAINER), first, model.layout)
    digests = hashlib.sha256(payload).digest(), len(payload), hashlib.sha256(blob).digest()
    following = model.apply_round([AcceptedProposal(TRAINER, Proposal(JOB, 0, model.root, *digests, None), payload)], {})
    for _ in range(rejected):
        following = following.apply_round([], {TRAINER: Verdict.NORM})
    following.save(folder / "model", durable=False)
    m = ScratchObjective().deterministic_update(JOB, following.round, TRAINER, model.layout.size)
    buffer = error_feedback.make_buffer(m, following.header(TRAINER), spec)
    assert buffer is not None
    (folder / "m").write_bytes(buffer.encode())
    (folder / "p").write_bytes(codec.encode_payload(following.header(TRAINER), buffer.dequantize(), model.layout))
    (folder / "before").write_bytes(blob)
    (folder / "p-before").write_bytes(payload)
    paths = (str(folder / name) for name in ("model", "p", "m", "before", "p-before"))
    return worker_protocol.AuditRequest(JOB, following.round, TRAINER, *paths)


@pytest.mark.parametrize("blob", [b"", b"12345", bytes(SIZE - 4), bytes(SIZE + 4)], ids=len)
def test_going_on_from_a_buffer_of_another_size_is_a_failed_replay(tmp_path: Path, blob: bytes) -> None:
    audited = proposal_replay.audit_proposal(continued(tmp_path, blob), UPDATE)
    assert (audited.verdict, audited.relative_error) == (Verdict.REPLAY, proposal_replay.RELATIVE_ERROR_MAX)


@settings(max_examples=200)
@given(head=HEADS, pattern=PATTERNS, size=SIZES, stepped=st.booleans(), rejected=st.integers(0, 2), is_previous=st.booleans())
@example(head=LARGEST, pattern=b"\x7f", size=SIZE, stepped=True, rejected=1, is_previous=True)
@example(head=LARGEST, pattern=b"\x7f\x81", size=SIZE, stepped=False, rejected=0, is_previous=True)
@example(head=LARGEST, pattern=b"\x81", size=SIZE, stepped=True, rejected=0, is_previous=False)
def test_whatever_a_trainer_commits_to_or_goes_on_from_an_audit_ends_with_a_verdict(
    tmp_path_factory: pytest.TempPathFactory,
    head: bytes,
    pattern: bytes,
    size: int,
    stepped: bool,
    rejected: int,
    is_previous: bool,
) -> None:
    blob, folder = (head + pattern * size)[:size], tmp_path_factory.mktemp("audit")
    request = continued(folder, blob if is_previous else bytes(SIZE), stepped, rejected)
    if not is_previous:
        (folder / "m").write_bytes(blob)
    audited = proposal_replay.audit_proposal(request, UPDATE)
    assert (
        audited.verdict in (Verdict.ACCEPT, Verdict.REPLAY) and 0 <= audited.relative_error <= proposal_replay.RELATIVE_ERROR_MAX
    )
    assert size == SIZE or audited.verdict is Verdict.REPLAY


# Of estimates --------------------------------------------------------------------------------------------------------


OF_ESTIMATES = JobSpec(name="s", objective="scratch", memory=FeedbackMemory.ESTIMATES, feedback_decay=0.75)


@pytest.fixture
def two_rounds_of_estimates(tmp_path: Path) -> Path:
    return _two_rounds(tmp_path, OF_ESTIMATES)


def test_what_is_sent_moves_the_estimate_towards_the_momentum(two_rounds_of_estimates: Path) -> None:
    folder = two_rounds_of_estimates
    propose(folder, 1, previous=0)
    before, v = (committed(folder / name, OF_ESTIMATES) for name in ("m0", "m1"))
    deltas = [ScratchObjective().deterministic_update(JOB, round, TRAINER, len(v)) for round in (0, 1)]
    models = [ReplicatedModel.open(folder / f"model{round}") for round in (0, 1)]
    # The trainer continues from the values of its levels.
    wanted = deltas[0] * np.float32(0.25), before * np.float32(0.75) + deltas[1] * np.float32(0.25)
    for model, said, m in zip(models, (before, v), wanted, strict=True):
        levels = error_feedback.make_buffer(m, model.header(TRAINER), OF_ESTIMATES)
        assert levels is not None and np.array_equal(said, levels.dequantize())
    held = models[1].estimate_vector(TRAINER)
    assert held is not None
    assert (folder / "p1").read_bytes() == codec.encode_payload(models[1].header(TRAINER), v - held, models[1].layout)


def test_an_update_continues_from_the_momentum_alone(two_rounds_of_estimates: Path) -> None:
    folder = two_rounds_of_estimates
    said = propose(folder, 1, previous=0).payload_digest
    (folder / "p0").unlink()
    request = replace(propose_request(folder, 1, previous=0), previous_payload=None)
    assert proposal_replay.make_proposal(request, UPDATE).payload_digest == said
    audit = replace(audit_of(folder, 1, previous=0), previous_payload=None)
    assert proposal_replay.audit_proposal(audit, UPDATE).verdict is Verdict.ACCEPT


def test_a_momentum_that_is_lost_costs_no_more_than_that_it_begins_anew(two_rounds_of_estimates: Path) -> None:
    (two_rounds_of_estimates / "m0").write_bytes(bytes(12))
    assert propose(two_rounds_of_estimates, 1, previous=0).feedback is None
    assert proposal_replay.audit_proposal(audit_of(two_rounds_of_estimates, 1), UPDATE).verdict is Verdict.ACCEPT


@pytest.mark.parametrize(
    "done, claimed, verdict", [(0, 0, Verdict.ACCEPT), (None, None, Verdict.ACCEPT), (None, 0, Verdict.REPLAY)]
)
def test_a_momentum_is_audited_as_a_buffer_is(
    two_rounds_of_estimates: Path, done: int | None, claimed: int | None, verdict: Verdict
) -> None:
    propose(two_rounds_of_estimates, 1, done)
    assert proposal_replay.audit_proposal(audit_of(two_rounds_of_estimates, 1, claimed), UPDATE).verdict is verdict


def test_a_payload_that_forgets_the_estimate_is_no_encoding_of_the_momentum(two_rounds_of_estimates: Path) -> None:
    folder = two_rounds_of_estimates
    propose(folder, 1, previous=0)
    model = ReplicatedModel.open(folder / "model1")
    (folder / "p1").write_bytes(codec.encode_payload(model.header(TRAINER), committed(folder / "m1", OF_ESTIMATES), model.layout))
    audited = proposal_replay.audit_proposal(audit_of(folder, 1, 0), UPDATE)
    assert audited.verdict is Verdict.REPLAY and audited.relative_error == RELATIVE_ERROR_MAX
