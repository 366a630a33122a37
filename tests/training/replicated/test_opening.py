"""The first rounds of a job send more bits than the others: job and round fix the format of a payload."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from protocol.errors import UserError
from protocol.verdicts import Verdict
from tests.training.replicated.support import JOB, SMALL, buffer, proposed, round_of, trainer
from training.job_spec import OPENING_BITS, AuditMode, FeedbackMemory, JobSpec
from training.replicated import codec, error_feedback
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel

OPENING = 2
SPEC = replace(SMALL, compression_warmup_rounds=OPENING)
ESTIMATES = replace(SPEC, memory=FeedbackMemory.ESTIMATES, feedback_decay=0.8, audit=AuditMode.OFF, byzantine_max=1)


def after(spec: JobSpec, rounds: int) -> ReplicatedModel:
    model = ReplicatedModel.initial(JOB, spec)
    for _ in range(rounds):
        model = model.apply_round(round_of(model, 3), {})
    return model


def with_bits_of(model: ReplicatedModel, spec: JobSpec) -> AcceptedProposal:
    """Return a valid proposal for this round of the job, except that `spec` sets the bits of its payload."""
    return proposed(replace(model, state=replace(model.state, spec=spec)), trainer(0), buffer(model.layout, "any"))


def verdict(model: ReplicatedModel, item: AcceptedProposal) -> Verdict:
    return model.check_proposal(item.trainer, item.proposal, item.payload)


def test_so_many_first_rounds_say_four_bits_of_every_element_and_all_later_ones_what_the_job_says() -> None:
    bits = [SPEC.payload_bits(number) for number in range(SPEC.rounds)]
    assert bits == [OPENING_BITS] * OPENING + [1] * (SPEC.rounds - OPENING)
    for number in range(OPENING + 2):
        payloads = [item.payload for item in round_of(after(SPEC, number), 2)]
        assert {codec.read_payload(payload, after(SPEC, 0).layout).bits for payload in payloads} == {bits[number]}


def test_a_trainer_that_goes_on_with_four_bits_after_the_opening_or_says_its_own_in_it_is_refused() -> None:
    never, always = replace(SPEC, compression_warmup_rounds=0), replace(SPEC, compression_warmup_rounds=SPEC.rounds)
    for number in range(OPENING + 2):
        model, is_open = after(SPEC, number), number < OPENING
        assert verdict(model, with_bits_of(model, always)) is (Verdict.ACCEPT if is_open else Verdict.MALFORMED), number
        assert verdict(model, with_bits_of(model, never)) is (Verdict.MALFORMED if is_open else Verdict.ACCEPT), number


@pytest.mark.parametrize("spec", [SPEC, ESTIMATES], ids=["residual", "estimates"])
def test_what_the_last_opening_round_left_unsaid_is_said_by_the_next_and_it_is_little(spec: JobSpec) -> None:
    key = trainer(0)
    left = []
    for opening in (OPENING, 0):
        model = after(replace(spec, compression_warmup_rounds=opening), OPENING - 1)
        levels = error_feedback.make_buffer(buffer(model.layout, "m"), model.header(key), model.spec)
        assert levels is not None
        m = levels.dequantize()
        item = proposed(model, key, m)
        next_model = model.apply_round([item], {})
        if spec.has_estimates:
            held = next_model.estimate_vector(key)
            assert held is not None and np.array_equal(next_model.feedback_of(key, levels, item.payload), m), (
                "the momentum stays whole"
            )
            unsaid = m - held
        else:
            unsaid = next_model.feedback_of(key, levels, item.payload)
            assert np.array_equal(unsaid, m - codec.read_payload(item.payload, model.layout).dequantize())
        assert verdict(next_model, proposed(next_model, key, buffer(model.layout, "next") + unsaid)) is Verdict.ACCEPT
        left.append(float(np.linalg.norm(unsaid) / np.linalg.norm(m)))
    assert left[0] < 0.2 < 0.5 < left[1], "of four bits, and of one"


def test_more_opening_rounds_than_there_are_and_those_that_say_less_than_the_others_are_refused() -> None:
    spec = JobSpec(name="job", data=bytes(32), compression_warmup_rounds=OPENING)
    replace(spec, compression_warmup_rounds=spec.rounds).validated()
    with pytest.raises(UserError, match="compression_warmup_rounds 61 is more than rounds 60: use bits 4 for all rounds"):
        replace(spec, compression_warmup_rounds=61).validated()
    for bits in (4, 8):
        with pytest.raises(UserError, match="compression_warmup_rounds 2 has no effect with bits"):
            replace(spec, bits=bits).validated()
