from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from protocol.errors import LocalProtocolError
from protocol.verdicts import Verdict
from tests.training.replicated.support import RAGGED, buffer, committed, header
from training.job_spec import TOLERANCE_MIN
from training.replicated import codec
from training.replicated.error_feedback import (
    FeedbackRecord,
    accumulate_feedback,
    buffer_digest,
    judge_deviation,
    next_feedback,
    replay_deviation,
)
from training.replicated.tensor_layout import Float32Array

BUFFER = committed(buffer(RAGGED, "m"))
M = BUFFER.dequantize()
PAYLOAD = codec.encode_payload(header(), M, RAGGED)
RECORD = FeedbackRecord(buffer_digest(BUFFER), hashlib.sha256(PAYLOAD).digest(), 3, True, 0)
E_0, DELTA = buffer(RAGGED, "e"), buffer(RAGGED, "delta")
DECAY = 0.95


def judged(
    m: Float32Array | codec.QuantizedUpdate,
    e: Float32Array = E_0,
    replay: Float32Array = DELTA,
    payload: bytes | None = None,
    held: Float32Array | None = None,
) -> Verdict:
    levels = m if isinstance(m, codec.QuantizedUpdate) else committed(m)
    said = levels.dequantize() if held is None else levels.dequantize() - held
    sent = codec.encode_payload(header(), said, RAGGED) if payload is None else payload
    return judge_deviation(*replay_deviation(sent, levels, e, replay, header(), RAGGED, DECAY, held=held), TOLERANCE_MIN)


def test_a_first_proposal_starts_from_zero() -> None:
    assert not next_feedback(None, None, None, RAGGED).any()


def test_after_a_step_what_the_payload_left_out_remains() -> None:
    assert np.array_equal(next_feedback(RECORD, BUFFER, PAYLOAD, RAGGED), M - codec.read_payload(PAYLOAD, RAGGED).dequantize())


def test_after_a_round_without_a_step_everything_remains() -> None:
    e = next_feedback(replace(RECORD, took_step=False), BUFFER, PAYLOAD, RAGGED)
    assert np.array_equal(e, M) and e is not M


def test_each_norm_rejection_halves_what_remains() -> None:
    whole, halved = (next_feedback(replace(RECORD, halvings=n), BUFFER, PAYLOAD, RAGGED) for n in (0, 3))
    assert np.array_equal(halved * 8, whole)


@pytest.mark.parametrize(
    ("levels", "payload"), [(committed(M + 1), PAYLOAD), (BUFFER, PAYLOAD + b"\0"), (None, PAYLOAD), (BUFFER, None)]
)
def test_other_bytes_than_the_record_names_are_our_own_mistake(
    levels: codec.QuantizedUpdate | None, payload: bytes | None
) -> None:
    with pytest.raises(LocalProtocolError, match="record"):
        next_feedback(RECORD, levels, payload, RAGGED)


def test_accumulation_rounds_after_each_operation() -> None:
    m = accumulate_feedback(E_0, DELTA, DECAY)
    scaled = [np.float32(x) * np.float32(DECAY) for x in E_0[:50]]
    assert m[:50].tolist() == [float(x + y) for x, y in zip(scaled, DELTA[:50], strict=True)]


def test_nothing_is_lost_over_rounds() -> None:
    """Without decay, sent updates plus the residual equal the computed updates, up to rounding."""
    e, sent, computed = (np.zeros(RAGGED.size, dtype=np.float32) for _ in range(3))
    for number in range(10):
        delta = buffer(RAGGED, "nothing lost", number)
        m = accumulate_feedback(e, delta, 1.0)
        update = codec.read_payload(codec.encode_payload(header(), m, RAGGED), RAGGED).dequantize()
        e, sent, computed = m - update, sent + update, computed + delta
    assert np.allclose(sent + e, computed, atol=1e-6)


def test_an_honest_replay_is_accepted_though_it_differs_in_rounding() -> None:
    noise = buffer(RAGGED, "other vector unit", deviation=0.01 * 5e-6)
    assert judged(accumulate_feedback(E_0, DELTA + noise, DECAY)) is Verdict.ACCEPT


@pytest.mark.parametrize(("error", "verdict"), [(1e-3, Verdict.ACCEPT), (1e-2, Verdict.REPLAY)])
def test_of_an_error_that_few_levels_show_a_hundredth_is_found(error: float, verdict: Verdict) -> None:
    assert judged(accumulate_feedback(E_0, DELTA * np.float32(1 + error), DECAY)) is verdict


@pytest.mark.parametrize(("distance", "verdict"), [(1e-3, Verdict.ACCEPT), (1.001e-3, Verdict.REPLAY), (np.inf, Verdict.REPLAY)])
def test_the_tolerance_is_a_share_of_the_norm(distance: float, verdict: Verdict) -> None:
    assert judge_deviation(8 * distance, 8.0, 1e-3) is verdict
    assert judge_deviation(distance, 0.0, 1e-3) is Verdict.REPLAY and judge_deviation(0.0, 0.0, 1e-3) is Verdict.ACCEPT


def test_other_work_is_found() -> None:
    honest = accumulate_feedback(E_0, DELTA, DECAY)
    m = committed(honest).dequantize()
    assert judged(honest) is Verdict.ACCEPT
    assert judged(accumulate_feedback(E_0, buffer(RAGGED, "other data"), DECAY)) is Verdict.REPLAY
    assert judged(accumulate_feedback(E_0, -DELTA, DECAY)) is Verdict.REPLAY
    assert judged(accumulate_feedback(buffer(RAGGED, "invented e"), DELTA, DECAY)) is Verdict.REPLAY
    assert judged(honest, payload=codec.encode_payload(header(), -m, RAGGED)) is Verdict.REPLAY
    assert judged(honest, payload=codec.encode_payload(header(1), m, RAGGED)) is Verdict.REPLAY


def test_a_payload_follows_from_the_levels_and_not_from_what_was_rounded_to_them() -> None:
    honest = accumulate_feedback(E_0, DELTA, DECAY)
    assert judged(honest, payload=codec.encode_payload(header(), honest, RAGGED)) is Verdict.REPLAY


def test_what_everybody_holds_already_is_not_said_again() -> None:
    honest, held = accumulate_feedback(E_0, DELTA, DECAY), buffer(RAGGED, "held")
    assert judged(honest, held=held) is Verdict.ACCEPT
    said = codec.encode_payload(header(), committed(honest).dequantize(), RAGGED)
    assert judged(honest, held=held, payload=said) is Verdict.REPLAY


def test_one_flipped_sign_in_the_payload_is_found() -> None:
    honest = accumulate_feedback(E_0, DELTA, DECAY)
    payload = bytearray(codec.encode_payload(header(), committed(honest).dequantize(), RAGGED))
    payload[-1] ^= 1
    assert judged(honest, payload=bytes(payload)) is Verdict.REPLAY


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_a_poisoned_replay_is_a_failed_one(poison: float) -> None:
    replayed = DELTA.copy()
    replayed[7] = poison
    assert judged(accumulate_feedback(E_0, DELTA, DECAY), replay=replayed) is Verdict.REPLAY


def test_the_largest_levels_that_can_be_written_are_a_failed_replay() -> None:
    honest = committed(accumulate_feedback(E_0, DELTA, DECAY))
    forged = replace(honest, exponent=codec.EXPONENT_MAX, codes=np.full_like(honest.codes, 255))
    assert judged(forged, payload=PAYLOAD) is Verdict.REPLAY


def test_a_replay_of_nothing_leaves_no_tolerance() -> None:
    still = np.zeros(RAGGED.size, dtype=np.float32)
    assert judged(accumulate_feedback(E_0, still, DECAY), replay=still) is Verdict.ACCEPT
    assert judged(accumulate_feedback(E_0, DELTA * np.float32(1e-3), DECAY), replay=still) is Verdict.REPLAY
