"""The model of a job whose voters hold estimates: `training.replicated.error_feedback`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ledger.jobs import ClosedRound
from protocol import codec as codec_of_messages
from protocol.errors import RemoteProtocolError, StorageError, UserError
from protocol.identity import Signed
from protocol.verdicts import Verdict
from rounds.round_state import RoundResult
from tests.training.replicated.support import JOB, SMALL, aggregate_updates, buffer, proposed, round_of, trainer
from training import job_spec as specification
from training.job_spec import AuditMode, FeedbackMemory
from training.model_store import JobModelStore
from training.replicated import codec, error_feedback, outer_optimizer
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import Float32Array

SPEC = replace(SMALL, audit=AuditMode.OFF, memory=FeedbackMemory.ESTIMATES, suspension_rounds=3, byzantine_max=1)


@pytest.fixture
def first() -> ReplicatedModel:
    return ReplicatedModel.initial(JOB, SPEC)


@pytest.fixture
def third(first: ReplicatedModel) -> ReplicatedModel:
    """Return the model after two rounds of five trainers. The last trainer proposed nothing in the second."""
    second = first.apply_round(round_of(first, 5), {})
    return second.apply_round(round_of(second, 4), {})


def verdict(model: ReplicatedModel, item: AcceptedProposal) -> Verdict:
    return model.check_proposal(item.trainer, item.proposal, item.payload)


def of_norm(model: ReplicatedModel, number: int, norm: float) -> AcceptedProposal:
    """Return a proposal that moves the trainer's estimate to this norm, with all elements of one size."""
    signs = np.sign(buffer(model.layout, "signs", number) + np.float32(1e-9))
    return proposed(model, trainer(number), signs * np.float32(norm / model.layout.size**0.5))


def stepped(model: ReplicatedModel, gradient: Float32Array) -> Float32Array:
    """Return the parameters after an outer step by `gradient`."""
    parameters, momentum = np.array(model.parameters), np.array(model.vectors["momentum"])
    for block in model.layout.blocks:
        parts = parameters[block.elements], [momentum[block.elements]]
        outer_optimizer.make_outer_optimizer(model.spec, model.rounds_in_model, ()).step(
            *parts, np.array(gradient[block.elements]), block.decayed
        )
    return parameters


def dense(model: ReplicatedModel, number: int) -> Float32Array:
    estimate = model.estimate(trainer(number))
    assert estimate is not None
    return estimate.dequantize()


def test_a_round_moves_the_estimates_by_what_was_said_and_aggregates_them_all(first: ReplicatedModel) -> None:
    second = first.apply_round(round_of(first, 5), {})
    items = round_of(second, 4)
    after = second.apply_round(items, {})
    held = []
    for number, item in enumerate(items):
        moved = error_feedback.update_estimate(second.estimate(trainer(number)), codec.read_payload(item.payload, second.layout))
        assert bytes(after.estimates[trainer(number)]) == moved.encode()
        held.append(moved)
    absent = second.estimate(trainer(4))
    assert absent is not None and bytes(after.estimates[trainer(4)]) == absent.encode(), "it stays as it was"
    gradient = aggregate_updates([*held, absent], second.layout, SPEC.rule, SPEC.byzantine_max)
    assert np.array_equal(after.parameters, stepped(second, gradient))
    without = aggregate_updates(held, second.layout, SPEC.rule, SPEC.byzantine_max)
    assert not np.array_equal(after.parameters, stepped(second, without))


def test_estimates_follow_what_trainers_mean(first: ReplicatedModel) -> None:
    model, meant = first, [buffer(first.layout, "meant", number) for number in range(4)]
    for _ in range(12):
        model = model.apply_round([proposed(model, trainer(number), meant[number]) for number in range(4)], {})
    for number in range(4):
        assert np.linalg.norm(dense(model, number) - meant[number]) < 0.2 * np.linalg.norm(meant[number])


def test_who_says_nothing_for_as_many_rounds_as_a_suspension_takes_leaves_the_rule(third: ReplicatedModel) -> None:
    model, said_last = third, 0
    for _ in range(4):
        assert (trainer(4) in model.estimates) is (model.round - said_last <= SPEC.suspension_rounds)
        assert model.estimates.keys() == model.records.keys()
        model = model.apply_round(round_of(model, 4), {})
    assert trainer(4) not in model.estimates
    returned = proposed(model, trainer(4), buffer(model.layout, "returned"))
    assert verdict(model, returned) is Verdict.ACCEPT, "it begins as a newcomer does"


def test_a_key_that_trains_no_more_leaves_the_rule_at_once_and_who_is_away_stays(third: ReplicatedModel, tmp_path: Path) -> None:
    """Otherwise a liar with a new key each round would have a place in the rule for each of its keys."""
    host, items = JobModelStore(tmp_path), round_of(third, 3)
    third.save(host.round_directory(JOB, third.round))
    payloads = {item.proposal.payload: item.payload for item in items}
    signed = tuple(Signed(codec_of_messages.encode(item.proposal), item.trainer, bytes(64)) for item in items)
    outcome = RoundResult({}, {}, frozenset({trainer(3)}), frozenset(), {}, frozenset(), frozenset())
    host.apply_round(ClosedRound(JOB, third.round, outcome, signed, ()), payloads.__getitem__)
    after = host.open_model(JOB, third.round + 1)
    assert after.estimates.keys() == after.records.keys() == {trainer(number) for number in range(4)}
    assert after.root == third.apply_round(items, {}, {trainer(4)}).root != third.apply_round(items, {}).root
    after.verify()


def test_the_root_depends_neither_on_the_order_nor_on_what_was_checked_before_nor_on_the_disk(
    third: ReplicatedModel, tmp_path: Path
) -> None:
    items = round_of(third, 5)[1:]
    root = third.apply_round(items, {}).root
    orders: Sequence[Sequence[AcceptedProposal]] = (items[::-1], items[2:] + items[:2])
    assert {third.apply_round(order, {}).root for order in orders} == {root}
    third.save(tmp_path / "3")
    opened = ReplicatedModel.open(tmp_path / "3")
    assert {verdict(opened, item) for item in items} == {Verdict.ACCEPT}
    assert opened.apply_round_into(tmp_path / "4", items, {}).root == root
    assert ReplicatedModel.open(tmp_path / "4").root == root
    ReplicatedModel.open(tmp_path / "4").verify()


def test_the_root_covers_every_byte_of_an_estimate(third: ReplicatedModel, tmp_path: Path) -> None:
    third.save(tmp_path / "model")
    file = tmp_path / "model" / "estimates.payloads"
    right = file.read_bytes()
    assert len(right) == 5 * error_feedback.estimate_bytes(third.layout)
    for at in (0, len(right) // 2, len(right) - 1):
        file.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
        damaged = ReplicatedModel.open(tmp_path / "model")
        with pytest.raises(StorageError, match="the estimate of"):
            damaged.verify()
    file.write_bytes(right[:-1])
    with pytest.raises(StorageError, match="damaged"):
        ReplicatedModel.open(tmp_path / "model")
    swapped = {**third.estimates, trainer(0): third.estimates[trainer(1)], trainer(1): third.estimates[trainer(0)]}
    assert ReplicatedModel.from_vectors(third.state, third.vectors, swapped).root != third.root
    assert ReplicatedModel.from_vectors(third.state, third.vectors, third.estimates).root == third.root


def test_a_payload_says_nothing_of_another_trainers_estimate(third: ReplicatedModel) -> None:
    """The payload is bound to the model root, and so to the estimate that it moves."""
    item = round_of(third, 1)[0]
    changed = {**third.estimates, trainer(0): third.estimates[trainer(1)]}
    other = ReplicatedModel.from_vectors(third.state, third.vectors, changed)
    assert verdict(other, item) is Verdict.STALE


def test_a_round_with_too_few_proposals_takes_no_step_but_what_was_said_is_known(first: ReplicatedModel) -> None:
    model = ReplicatedModel.initial(JOB, replace(SPEC, accepted_min=3))
    after = model.apply_round(round_of(model, 2), {})
    assert np.array_equal(after.parameters, model.parameters)
    assert after.estimates.keys() == {trainer(0), trainer(1)}
    after.verify()


def test_the_norm_of_the_moved_estimate_is_judged(first: ReplicatedModel) -> None:
    """The payload's own norm is not judged: small steps must not add up beyond the limit, and a large one may lead back."""
    limit = 16 * SPEC.initial_norm
    assert verdict(first, of_norm(first, 0, 0.95 * limit)) is Verdict.ACCEPT
    assert verdict(first, of_norm(first, 0, 1.05 * limit)) is Verdict.NORM
    model = first.apply_round([of_norm(first, 0, 0.9 * limit)], {})
    model = replace(model, state=replace(model.state, median_norms_squared=()))  # the initial limit
    assert verdict(model, of_norm(model, 0, 1.05 * limit)) is Verdict.NORM
    back = of_norm(model, 0, -0.9 * limit)
    assert codec.read_payload(back.payload, model.layout).norm_squared() > limit**2
    assert verdict(model, back) is Verdict.ACCEPT


def test_a_payload_beyond_all_estimates_is_refused_for_its_norm(first: ReplicatedModel) -> None:
    model = ReplicatedModel.initial(JOB, replace(SPEC, bits=8))
    model = model.apply_round([proposed(model, trainer(0), np.full(model.layout.size, 2.0**38.5, dtype=np.float32))], {})
    again = proposed(model, trainer(0), np.zeros(model.layout.size, dtype=np.float32))
    payload = codec.encode_payload(
        model.header(trainer(0)), np.full(model.layout.size, 2.0**38.5, dtype=np.float32), model.layout
    )
    digest = hashlib.sha256(payload).digest()
    more = replace(again, proposal=replace(again.proposal, payload=digest, payload_bytes=len(payload)), payload=payload)
    assert verdict(model, more) is Verdict.NORM


def test_no_more_estimates_are_held_than_the_bound_allows(first: ReplicatedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specification, "ESTIMATES_BYTES_MAX", 3 * SPEC.model.parameters)
    assert SPEC.estimates_max == 3
    after = first.apply_round(round_of(first, 5), {})
    assert sorted(after.records) == sorted(after.estimates) == sorted(map(trainer, range(5)))[:3]
    held, new = (next(of for of in range(5) if (trainer(of) in after.records) is known) for known in (True, False))
    assert verdict(after, proposed(after, trainer(held), buffer(first.layout, "m"))) is Verdict.ACCEPT
    assert verdict(after, proposed(after, trainer(new), buffer(first.layout, "m"))) is Verdict.COMMITMENT
    with pytest.raises(UserError, match=r"byzantine_max 2 needs 5 trainers, but only 3 estimates of .* bytes fit into"):
        replace(SPEC, tokenizer=bytes(32), byzantine_max=2).validated()


def test_estimates_are_part_of_a_snapshot(third: ReplicatedModel, tmp_path: Path) -> None:
    source, target = JobModelStore(tmp_path / "from"), JobModelStore(tmp_path / "to")
    third.save(source.round_directory(JOB, 2))
    incoming = target.start_receiving(JOB, 2, third.root, source.read_manifest(JOB, 2))
    for index in reversed(range(incoming.parts)):
        part = source.read_part(JOB, 2, index)
        if index == incoming.parts - 1:
            with pytest.raises(RemoteProtocolError, match=r"the estimate of .* does not match the model root"):
                incoming.add_part(index, part[:-1] + bytes([part[-1] ^ 1]))
        incoming.add_part(index, part)
    incoming.install()
    assert target.has_model(JOB, 2, third.root)
    fetched = target.open_model(JOB, 2)
    assert {key: bytes(data) for key, data in fetched.estimates.items()} == {k: bytes(v) for k, v in third.estimates.items()}
    items = round_of(third, 5)
    assert fetched.apply_round_into(tmp_path / "next", items, {}).root == third.apply_round(items, {}).root
