from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from protocol.errors import LocalProtocolError
from protocol.reasons import Verdict
from tests.training.replicated.support import RAGGED, buffer, header
from training.replicated import codec
from training.replicated.feedback import Record, accumulate, buffer_digest, feedback_after, judge_replay
from training.replicated.layout import Float32Array
from training.spec import TOLERANCE_MIN

M = buffer(RAGGED, "m")
PAYLOAD = codec.encode(header(), M, RAGGED)
RECORD = Record(buffer_digest(M), hashlib.sha256(PAYLOAD).digest(), 3, True, 0)
E_0, DELTA = buffer(RAGGED, "e"), buffer(RAGGED, "delta")
DECAY = 0.95


def judge(m: Float32Array, e: Float32Array = E_0, replay: Float32Array = DELTA, payload: bytes | None = None) -> Verdict:
    sent = codec.encode(header(), m, RAGGED) if payload is None else payload
    return judge_replay(m, e, replay, sent, header(), RAGGED, DECAY, TOLERANCE_MIN)


def test_a_first_proposal_starts_from_zero() -> None:
    assert not feedback_after(None, None, None, RAGGED).any()


def test_after_a_step_what_the_payload_left_out_remains() -> None:
    assert np.array_equal(feedback_after(RECORD, M, PAYLOAD, RAGGED), M - codec.read(PAYLOAD, RAGGED).dense())


def test_after_a_round_without_a_step_everything_remains() -> None:
    e = feedback_after(replace(RECORD, stepped=False), M, PAYLOAD, RAGGED)
    assert np.array_equal(e, M) and e is not M


def test_each_norm_rejection_halves_what_remains() -> None:
    whole, halved = (feedback_after(replace(RECORD, halvings=n), M, PAYLOAD, RAGGED) for n in (0, 3))
    assert np.array_equal(halved * 8, whole)


@pytest.mark.parametrize(("m", "payload"), [(M + 1, PAYLOAD), (M, PAYLOAD + b"\0"), (None, PAYLOAD), (M, None)])
def test_other_bytes_than_the_record_names_are_our_own_mistake(m: Float32Array | None, payload: bytes | None) -> None:
    with pytest.raises(LocalProtocolError, match="record"):
        feedback_after(RECORD, m, payload, RAGGED)


def test_the_buffer_digest_is_over_little_endian_float32() -> None:
    assert buffer_digest(np.array([1, -2], dtype=np.float32)) == hashlib.sha256(bytes.fromhex("0000803f000000c0")).digest()


def test_accumulation_rounds_after_each_operation() -> None:
    m = accumulate(E_0, DELTA, DECAY)
    scaled = [np.float32(x) * np.float32(DECAY) for x in E_0[:50]]
    assert m[:50].tolist() == [float(x + y) for x, y in zip(scaled, DELTA[:50], strict=True)]


def test_nothing_is_lost_over_rounds() -> None:
    """What was sent plus what remains is what was computed, up to rounding, without decay."""
    e, sent, computed = (np.zeros(RAGGED.size, dtype=np.float32) for _ in range(3))
    for number in range(10):
        delta = buffer(RAGGED, "nothing lost", number)
        m = accumulate(e, delta, 1.0)
        update = codec.read(codec.encode(header(), m, RAGGED), RAGGED).dense()
        e, sent, computed = m - update, sent + update, computed + delta
    assert np.allclose(sent + e, computed, atol=1e-6)


def test_an_honest_replay_is_accepted_though_it_differs_in_rounding() -> None:
    noise = buffer(RAGGED, "other vector unit", deviation=0.01 * 5e-6)
    assert judge(accumulate(E_0, DELTA + noise, DECAY)) is Verdict.ACCEPT


@pytest.mark.parametrize(("error", "verdict"), [(0.5e-3, Verdict.ACCEPT), (2e-3, Verdict.REPLAY)])
def test_the_tolerance_is_a_thousandth_of_the_update(error: float, verdict: Verdict) -> None:
    assert judge(accumulate(E_0, DELTA * np.float32(1 + error), DECAY)) is verdict


def test_other_work_is_found() -> None:
    honest = accumulate(E_0, DELTA, DECAY)
    assert judge(honest) is Verdict.ACCEPT
    assert judge(accumulate(E_0, buffer(RAGGED, "other data"), DECAY)) is Verdict.REPLAY
    assert judge(accumulate(E_0, -DELTA, DECAY)) is Verdict.REPLAY
    assert judge(accumulate(buffer(RAGGED, "invented e"), DELTA, DECAY)) is Verdict.REPLAY
    assert judge(honest, payload=codec.encode(header(), -honest, RAGGED)) is Verdict.REPLAY
    assert judge(honest, payload=codec.encode(header(1), honest, RAGGED)) is Verdict.REPLAY


def test_one_flipped_sign_in_the_payload_is_found() -> None:
    honest = accumulate(E_0, DELTA, DECAY)
    payload = bytearray(codec.encode(header(), honest, RAGGED))
    payload[-1] ^= 1
    assert judge(honest, payload=bytes(payload)) is Verdict.REPLAY


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_a_poisoned_buffer_is_a_failed_replay(poison: float) -> None:
    m = accumulate(E_0, DELTA, DECAY)
    m[7] = poison
    assert judge(m, payload=PAYLOAD) is Verdict.REPLAY
    assert judge(accumulate(E_0, DELTA, DECAY), replay=m) is Verdict.REPLAY
    assert judge(M[:5], payload=PAYLOAD) is Verdict.REPLAY


def test_a_replay_of_nothing_leaves_no_tolerance() -> None:
    still = np.zeros(RAGGED.size, dtype=np.float32)
    assert judge(accumulate(E_0, still, DECAY), replay=still) is Verdict.ACCEPT
    assert judge(accumulate(E_0, DELTA * np.float32(1e-4), DECAY), replay=still) is Verdict.REPLAY
