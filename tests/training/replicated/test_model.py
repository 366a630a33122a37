from __future__ import annotations

import hashlib
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import LocalProtocolError, RemoteProtocolError, StorageError
from protocol.verdicts import Verdict
from tests.training.replicated.support import JOB, ODD, SMALL, aggregate_updates, buffer, committed, proposed, round_of, trainer
from training.job_spec import BITS, InnerStatePolicy, JobSpec, OuterOptimizerKind
from training.objectives.registry import ScratchObjective
from training.replicated import codec, error_feedback, model_files, outer_optimizer
from training.replicated.model_directory import NORM_ROUNDS
from training.replicated.replicated_model import NORM_RATIO, AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import initial_parameters

NOTHING = None, None


@pytest.fixture
def first() -> ReplicatedModel:
    return ReplicatedModel.initial(JOB, SMALL)


@pytest.fixture
def second(first: ReplicatedModel) -> ReplicatedModel:
    return first.apply_round(round_of(first, 3), {})


def verdict(model: ReplicatedModel, item: AcceptedProposal) -> Verdict:
    return model.check_proposal(item.trainer, item.proposal, item.payload)


def with_payload(item: AcceptedProposal, payload: bytes) -> AcceptedProposal:
    digest = hashlib.sha256(payload).digest()
    return replace(item, proposal=replace(item.proposal, payload=digest, payload_bytes=len(payload)), payload=payload)


def scaled(model: ReplicatedModel, number: int, norm: float) -> AcceptedProposal:
    """Return a proposal whose payload has this norm within the 3 % of a scale: all its elements have one size."""
    signs = np.sign(buffer(model.layout, "scaled", number) + np.float32(1e-9))
    return proposed(model, trainer(number), signs * np.float32(norm / model.layout.size**0.5))


# Judging -------------------------------------------------------------------------------------------------------------


def test_honest_proposals_are_accepted(first: ReplicatedModel, second: ReplicatedModel) -> None:
    for model in (first, second):
        assert {verdict(model, item) for item in round_of(model, 4)} == {Verdict.ACCEPT}


@pytest.mark.parametrize(("field", "value"), [("job", b"x" * 32), ("round", 1), ("model_root", b"x" * 32)])
def test_a_proposal_for_another_model_is_stale(first: ReplicatedModel, field: str, value: object) -> None:
    item = round_of(first, 1)[0]
    changed = replace(item, proposal=replace(item.proposal, **{field: value}))  # type: ignore[arg-type]
    assert verdict(first, changed) is Verdict.STALE


def test_an_old_payload_under_a_new_proposal_is_malformed(first: ReplicatedModel, second: ReplicatedModel) -> None:
    old, new = round_of(first, 1)[0], round_of(second, 1)[0]
    assert verdict(second, old) is Verdict.STALE
    assert verdict(second, with_payload(new, old.payload)) is Verdict.MALFORMED


def test_anothers_payload_is_malformed(first: ReplicatedModel) -> None:
    mine, others = round_of(first, 2)
    assert verdict(first, with_payload(mine, others.payload)) is Verdict.MALFORMED


def test_bytes_that_are_not_what_was_signed_are_malformed(first: ReplicatedModel) -> None:
    item = round_of(first, 1)[0]
    assert (
        first.check_proposal(item.trainer, item.proposal, item.payload[:-1] + bytes([item.payload[-1] ^ 1])) is Verdict.MALFORMED
    )
    assert first.check_proposal(item.trainer, replace(item.proposal, payload_bytes=1), item.payload) is Verdict.MALFORMED
    assert verdict(first, with_payload(item, b"garbage")) is Verdict.MALFORMED


def test_the_first_limit_is_sixteen_times_the_norm_of_the_job(first: ReplicatedModel) -> None:
    assert verdict(first, scaled(first, 0, 15.5 * SMALL.initial_norm)) is Verdict.ACCEPT
    assert verdict(first, scaled(first, 0, 16.6 * SMALL.initial_norm)) is Verdict.NORM


def test_later_limits_follow_the_accepted_norms(first: ReplicatedModel) -> None:
    model = first.apply_round([scaled(first, number, norm) for number, norm in enumerate((0.1, 0.2, 30.0))], {})
    assert NORM_RATIO == 16
    assert verdict(model, scaled(model, 0, 16 * 0.15)) is Verdict.ACCEPT
    assert verdict(model, scaled(model, 0, 16 * 0.21)) is Verdict.NORM


@pytest.fixture
def model(first: ReplicatedModel) -> ReplicatedModel:
    return first


def test_a_million_times_the_norm_is_refused_in_every_round(model: ReplicatedModel) -> None:
    for _ in range(3):
        honest = round_of(model, 3)
        assert verdict(model, scaled(model, 3, 1e6 * SMALL.initial_norm)) is Verdict.NORM
        model = model.apply_round(honest, {trainer(3): Verdict.NORM})


def test_the_limit_looks_back_a_bounded_number_of_rounds(model: ReplicatedModel) -> None:
    for number in range(NORM_ROUNDS + 3):
        model = model.apply_round([scaled(model, 0, 1.0 + number)], {})
    assert len(model.state.median_norms_squared) == NORM_ROUNDS
    assert model.norm_squared_max == pytest.approx(256 * (3 + NORM_ROUNDS // 2) ** 2, rel=0.07)


def test_one_liar_of_two_cannot_raise_the_limit_beyond_what_the_job_begins_with(model: ReplicatedModel) -> None:
    for _ in range(3 * NORM_ROUNDS):
        model = model.apply_round([scaled(model, 0, 0.1), scaled(model, 1, 0.95 * math.sqrt(model.norm_squared_max))], {})
    assert math.sqrt(model.norm_squared_max) == NORM_RATIO * SMALL.initial_norm


def test_one_liar_of_two_raises_no_limit_that_the_other_has_outgrown(model: ReplicatedModel) -> None:
    for _ in range(3 * NORM_ROUNDS):
        model = model.apply_round([scaled(model, 0, 5.0), scaled(model, 1, 0.95 * math.sqrt(model.norm_squared_max))], {})
    assert math.sqrt(model.norm_squared_max) == pytest.approx(NORM_RATIO * 5.0, rel=0.04)


def test_one_liar_of_two_cannot_shut_the_other_out_by_saying_next_to_nothing(model: ReplicatedModel) -> None:
    for _ in range(2 * NORM_ROUNDS):
        honest = scaled(model, 0, 8 * SMALL.initial_norm)
        assert verdict(model, honest) is Verdict.ACCEPT
        model = model.apply_round([honest, scaled(model, 1, 1e-6)], {})


@pytest.mark.parametrize("bits", BITS)
def test_the_limit_is_exact_with_any_bits(bits: int) -> None:
    """Sixteen times an update, encoded by a greater exponent, is at the limit, and anything more is beyond it."""
    model = ReplicatedModel.initial(JOB, replace(SMALL, bits=bits))
    m = buffer(model.layout, "limit")
    model = model.apply_round([proposed(model, trainer(0), m)], {})
    assert verdict(model, proposed(model, trainer(0), m * np.float32(16))) is Verdict.ACCEPT
    assert verdict(model, proposed(model, trainer(0), m * np.float32(17))) is Verdict.NORM
    update = codec.read_payload(proposed(model, trainer(0), m * np.float32(16)).payload, model.layout)
    assert update.norm_squared() == model.norm_squared_max == math.fsum(np.square(update.dequantize(), dtype=np.float64))


def test_a_round_of_zeros_does_not_shut_everybody_out(first: ReplicatedModel) -> None:
    model = first.apply_round([proposed(first, trainer(0), np.zeros(first.layout.size, dtype=np.float32))], {})
    assert verdict(model, round_of(model, 2)[1]) is Verdict.ACCEPT


def test_feedback_must_continue_the_last_accepted_buffer_or_start_again(second: ReplicatedModel) -> None:
    item = round_of(second, 1)[0]
    assert item.proposal.feedback == second.records[item.trainer].buffer
    for digest, expected in ((None, Verdict.ACCEPT), (b"invented e" + bytes(22), Verdict.COMMITMENT)):
        assert verdict(second, replace(item, proposal=replace(item.proposal, feedback=digest))) is expected


def test_a_newcomer_has_no_feedback_to_continue(second: ReplicatedModel) -> None:
    item = proposed(second, trainer(9), buffer(second.layout, "newcomer"))
    stolen = second.records[trainer(0)].buffer
    assert verdict(second, item) is Verdict.ACCEPT
    assert verdict(second, replace(item, proposal=replace(item.proposal, feedback=stolen))) is Verdict.COMMITMENT


def test_what_was_accepted_longer_ago_than_a_suspension_takes_is_not_gone_on_from() -> None:
    """A detected lie is still in its author's buffer, and perhaps in its inner state. Audits would start from it."""
    model = ReplicatedModel.initial(JOB, replace(SMALL, suspension_rounds=3, inner_state=InnerStatePolicy.KEEP))
    liar, inner = trainer(0), b"moments" + bytes(25)
    poison = proposed(model, liar, buffer(model.layout, "poison"))
    model = model.apply_round([replace(poison, proposal=replace(poison.proposal, inner=inner))], {})
    for round in range(1, 5):
        item = proposed(model, liar, buffer(model.layout, "back", round))
        began_anew = replace(item, proposal=replace(item.proposal, feedback=None, inner=inner))
        assert verdict(model, began_anew) is Verdict.ACCEPT
        for named in ({"feedback": poison.proposal.buffer}, {"inner_from": inner}):
            went_on = replace(began_anew, proposal=replace(began_anew.proposal, **named))  # type: ignore[arg-type]
            assert verdict(model, went_on) is (Verdict.ACCEPT if round <= 3 else Verdict.COMMITMENT), round
        model = model.apply_round(round_of(model, 4)[1:], {liar: Verdict.NORM})
    assert liar not in model.records and trainer(1) in model.records


# Applying ------------------------------------------------------------------------------------------------------------


def test_a_step_is_aggregation_and_outer_step(first: ReplicatedModel, second: ReplicatedModel) -> None:
    updates = [codec.read_payload(item.payload, first.layout) for item in round_of(first, 3)]
    gradient = aggregate_updates(updates, first.layout, SMALL.rule, SMALL.byzantine_max)
    parameters, momentum = np.array(first.parameters), np.array(first.vectors["momentum"])
    outer_optimizer.make_outer_optimizer(SMALL, 0, ()).step(parameters, [momentum], gradient, True)
    assert np.array_equal(second.parameters, parameters) and np.array_equal(second.vectors["momentum"], momentum)
    assert second.round == 1 and second.root != first.root


def test_what_was_checked_before_makes_no_difference_to_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, fresh = ReplicatedModel.initial(JOB, SMALL), ReplicatedModel.initial(JOB, SMALL)
    items, others = round_of(fresh, 4), [proposed(fresh, trainer(n), buffer(fresh.layout, "other", n)) for n in range(2)]
    for item in (*others, *items):
        assert verdict(checked, item) is Verdict.ACCEPT
    for accepted in (items, [*others, *items[2:]]):  # the second time with two payloads that were not checked last
        assert checked.apply_round(accepted, {}).root == fresh.apply_round(accepted, {}).root
    with pytest.raises(LocalProtocolError):
        checked.apply_round([replace(items[0], payload=items[1].payload)], {})
    monkeypatch.setattr("training.replicated.replicated_model.CHECKED_BYTES_MAX", len(items[0].payload))
    bounded = ReplicatedModel.initial(JOB, SMALL)
    assert [verdict(bounded, item) for item in items] == [Verdict.ACCEPT] * 4 and list(bounded._checked) == [items[0].trainer]
    assert bounded.apply_round(items, {}).root == fresh.apply_round(items, {}).root


def test_the_model_before_is_left_alone(first: ReplicatedModel, second: ReplicatedModel) -> None:
    assert np.array_equal(first.parameters, initial_parameters(SMALL)) and not first.vectors["momentum"].any()
    assert first.round == 0 and not first.records
    first.verify()
    for vector in (first.parameters, second.vectors["momentum"]):
        with pytest.raises(ValueError, match="read-only"):
            vector[0] = 1


def test_the_order_of_the_accepted_does_not_matter(first: ReplicatedModel) -> None:
    items = round_of(first, 4)
    assert first.apply_round(items, {}).root == first.apply_round(items[::-1], {}).root


def test_too_few_accepted_take_no_step_but_are_remembered(first: ReplicatedModel) -> None:
    model = ReplicatedModel.initial(JOB, replace(SMALL, accepted_min=3))
    items = round_of(model, 2)
    after = model.apply_round(items, {})
    assert np.array_equal(after.parameters, model.parameters) and not after.vectors["momentum"].any()
    assert after.round == 1 and after.root != model.root
    record = after.records[trainer(1)]
    assert record == error_feedback.FeedbackRecord(items[1].proposal.buffer, items[1].proposal.payload, 0, False, 0)
    after.verify()


def test_a_round_without_proposals_only_counts(first: ReplicatedModel) -> None:
    after = first.apply_round([], {trainer(0): Verdict.REPLAY})
    assert after.round == 1 and after.root != first.root and after.state.median_norms_squared == ()
    assert after.parameters is first.parameters


def test_only_a_norm_rejection_halves_what_remains(second: ReplicatedModel) -> None:
    rejected = {trainer(0): Verdict.NORM, trainer(1): Verdict.REPLAY, trainer(7): Verdict.NORM}
    after = second.apply_round([], rejected).apply_round([], rejected)
    assert after.records[trainer(0)] == replace(second.records[trainer(0)], halvings=2)
    assert after.records[trainer(1)] == second.records[trainer(1)]
    assert trainer(7) not in after.records


def test_acceptance_starts_the_record_anew(second: ReplicatedModel) -> None:
    halved = second.apply_round([], {trainer(0): Verdict.NORM})
    item = round_of(halved, 1)[0]
    assert halved.apply_round([item], {}).records[trainer(0)] == error_feedback.FeedbackRecord(
        item.proposal.buffer, item.proposal.payload, 2, True, 0
    )


def test_what_cannot_have_been_decided_is_our_own_mistake(first: ReplicatedModel) -> None:
    items = round_of(first, 2)
    with pytest.raises(LocalProtocolError, match="both"):
        first.apply_round(items, {trainer(0): Verdict.NORM})
    with pytest.raises(LocalProtocolError, match="a trainer has more than one"):
        first.apply_round([*items, items[0]], {})
    with pytest.raises(LocalProtocolError, match="differs from the accepted one"):
        first.apply_round([replace(items[0], payload=items[1].payload)], {})
    with pytest.raises(RemoteProtocolError, match="malformed"):
        first.apply_round([with_payload(items[0], items[1].payload)], {})


def test_the_root_covers_everything(second: ReplicatedModel) -> None:
    def root(**changes: object) -> bytes:
        state = replace(second.state, **changes)  # type: ignore[arg-type]
        return ReplicatedModel.from_vectors(state, {name: vector.copy() for name, vector in second.vectors.items()}).root

    record = second.records[trainer(0)]
    roots = {
        root(),
        root(round=7),
        root(job=b"x" * 32),
        root(median_norms_squared=()),
        root(records={}),
        root(spec=replace(SMALL, outer_rate=0.6)),
    }
    roots.add(root(records={**second.records, trainer(0): replace(record, halvings=1)}))
    for changed in second.vectors:
        for element in (0, second.layout.size - 1):
            vectors = {name: vector.copy() for name, vector in second.vectors.items()}
            vectors[changed][element] += 1
            roots.add(ReplicatedModel.from_vectors(second.state, vectors).root)
    assert root() == second.root and len(roots) == 11


def test_a_model_with_ragged_tensors_runs_as_well() -> None:
    model = ReplicatedModel.initial(JOB, ODD)
    for _ in range(3):
        items = round_of(model, 4)
        assert {verdict(model, item) for item in items} == {Verdict.ACCEPT}
        model = model.apply_round(items, {})
    model.verify()


def test_a_scratch_job_can_be_replayed_by_anybody() -> None:
    spec = JobSpec(name="test", objective="scratch")
    model = ReplicatedModel.initial(JOB, spec)
    delta = ScratchObjective().deterministic_update(model.job, model.round, trainer(0), model.layout.size)
    item = proposed(model, trainer(0), delta)
    assert verdict(model, item) is Verdict.ACCEPT
    again = ScratchObjective().deterministic_update(model.job, model.round, trainer(0), model.layout.size)
    levels, e = committed(delta, model.layout), error_feedback.next_feedback(None, None, None, model.layout)
    of_spec = model.header(trainer(0)), model.layout, spec.feedback_decay
    assert error_feedback.replay_deviation(item.payload, levels, e, again, *of_spec) == (
        0.0,
        pytest.approx(np.linalg.norm(delta)),
    )


def test_training_converges_with_a_liar_and_error_feedback() -> None:
    """Descent on ½‖θ − target‖² with honest trainers, one liar that flips its sign, and the whole pipeline in between."""
    model = ReplicatedModel.initial(JOB, replace(SMALL, initial_norm=100.0))
    target = buffer(model.layout, "target", deviation=0.5)
    start = np.linalg.norm(model.parameters - target)
    sent: dict[bytes, tuple[codec.QuantizedUpdate | None, bytes | None]] = {}
    for number in range(40):
        items = []
        for key in (trainer(i) for i in range(4)):
            noise = buffer(model.layout, "noise", number, key, deviation=0.05)
            delta = (model.parameters - target) * np.float32(0.2) + noise
            e = error_feedback.next_feedback(model.records.get(key), *sent.get(key, NOTHING), model.layout)
            m = error_feedback.accumulate_feedback(e, -delta if key == trainer(3) else delta, 0.95)
            items.append(proposed(model, key, m))
            sent[key] = error_feedback.make_buffer(m, model.header(key), model.spec), items[-1].payload
        assert {verdict(model, item) for item in items[:3]} == {Verdict.ACCEPT}
        model = model.apply_round(items, {})
    assert np.linalg.norm(model.parameters - target) < 0.15 * start


# On disk -------------------------------------------------------------------------------------------------------------


def test_a_saved_model_opens_as_the_same_model(second: ReplicatedModel, tmp_path: Path) -> None:
    second.save(tmp_path / "model")
    opened = ReplicatedModel.open(tmp_path / "model")
    opened.verify()
    assert opened.root == second.root and opened.state == second.state and opened.spec == SMALL
    assert all(np.array_equal(opened.vectors[name], vector) for name, vector in second.vectors.items())


def test_an_opened_model_continues_to_the_same_root(second: ReplicatedModel, tmp_path: Path) -> None:
    second.save(tmp_path / "model")
    opened = ReplicatedModel.open(tmp_path / "model")
    items = round_of(second, 4)
    continued = opened.apply_round(items, {})
    assert continued.root == second.apply_round(items, {}).root and type(continued.parameters) is np.ndarray


@pytest.mark.parametrize("kind", OuterOptimizerKind)
@pytest.mark.parametrize("least", [1, 9], ids=["step", "no step"])
def test_applying_block_by_block_to_disk_gives_the_same_model(tmp_path: Path, kind: OuterOptimizerKind, least: int) -> None:
    spec = replace(SMALL, outer=kind, local_steps=1 if kind is OuterOptimizerKind.ADAMW else 15, accepted_min=least)
    model = ReplicatedModel.initial(JOB, spec)
    for number in range(3):
        items = round_of(model, 4)
        in_memory = model.apply_round(items, {})
        model = model.apply_round_into(tmp_path / f"{number}", items, {}, durable=number == 0)
        model.verify()
        assert model.root == in_memory.root and model.state == in_memory.state
    assert model.round == 3


def test_only_a_durable_model_says_that_it_is(second: ReplicatedModel, tmp_path: Path) -> None:
    second.save(tmp_path / "model", durable=False)
    assert not model_files.is_durable(tmp_path / "model")
    second.save(tmp_path / "model")
    assert model_files.is_durable(tmp_path / "model")
    second.save(tmp_path / "model", durable=False)
    assert model_files.is_durable(tmp_path / "model")


def test_an_opened_model_is_mapped_not_read(second: ReplicatedModel, tmp_path: Path) -> None:
    second.save(tmp_path / "model")
    opened = ReplicatedModel.open(tmp_path / "model")
    assert isinstance(opened.parameters.base, np.memmap) and not opened.parameters.flags.writeable


def test_the_parameters_file_is_the_flat_vector(second: ReplicatedModel, tmp_path: Path) -> None:
    second.save(tmp_path / "model")
    assert (tmp_path / "model" / "parameters.f32").read_bytes() == second.parameters.tobytes()
    names = ["durable", "model", "momentum.f32", "parameters.f32", "state.msgpack"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == names


def test_saving_replaces_what_was_there(first: ReplicatedModel, second: ReplicatedModel, tmp_path: Path) -> None:
    for model in (first, second, second):
        model.save(tmp_path / "model")
        assert ReplicatedModel.open(tmp_path / "model").root == model.root
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("over_a_retired", [False, True])
def test_a_crash_at_any_step_of_saving_leaves_the_old_model_or_the_new(
    first: ReplicatedModel, second: ReplicatedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over_a_retired: bool
) -> None:
    steps = 0

    def home() -> Path:
        place = tmp_path / f"{steps}"
        if over_a_retired:
            first.save(place / "retired", durable=False)
            model_files.recycle_directory(place / "retired")
        return place

    while _crashes_at(steps, first, second, home(), monkeypatch):
        steps += 1
    assert steps >= 10


def _crashes_at(step: int, old: ReplicatedModel, new: ReplicatedModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Save, and crash at call number `step` to the file system. Return False if saving needs fewer calls."""
    old.save(home / "model")
    left = step

    def dies(function: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return function(*args, **kwargs)  # type: ignore[operator]

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", dies(os.fsync))
        for name in ("rename", "open", "mkdir"):
            patch.setattr(Path, name, dies(getattr(Path, name)))
        patch.setattr(shutil, "rmtree", dies(shutil.rmtree))
        try:
            new.save(home / "model")
            crashed = False
        except KeyboardInterrupt:
            crashed = True
    opened = ReplicatedModel.open(home / "model")
    opened.verify()
    assert crashed or not (home / ".spare").exists()
    assert opened.root in (old.root, new.root) and (crashed or opened.root == new.root)
    new.save(home / "model")
    assert ReplicatedModel.open(home / "model").root == new.root
    return crashed


@pytest.mark.parametrize(("file", "name"), [("parameters.f32", "final_norm.weight"), ("momentum.f32", "momentum of final_norm")])
def test_a_flipped_bit_is_found_and_named(second: ReplicatedModel, tmp_path: Path, file: str, name: str) -> None:
    second.save(tmp_path / "model")
    path = tmp_path / "model" / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=name):
        ReplicatedModel.open(tmp_path / "model").verify()


def test_every_flipped_byte_of_the_state_is_found(second: ReplicatedModel, tmp_path: Path) -> None:
    second.save(tmp_path / "model")
    path = tmp_path / "model" / "state.msgpack"
    good = path.read_bytes()
    for position in range(0, len(good), 7):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(StorageError, match=r"state\.msgpack|parameters"):
            ReplicatedModel.open(tmp_path / "model").verify()
    path.write_bytes(good)
    ReplicatedModel.open(tmp_path / "model").verify()


@pytest.mark.parametrize("file", ["parameters.f32", "momentum.f32", "state.msgpack"])
def test_a_missing_or_shortened_file_is_one_clear_error(second: ReplicatedModel, tmp_path: Path, file: str) -> None:
    second.save(tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(StorageError, match=file):
        ReplicatedModel.open(tmp_path / "model")
    path.unlink()
    with pytest.raises(StorageError, match=file):
        ReplicatedModel.open(tmp_path / "model")


def test_a_full_disk_is_one_clear_error_and_loses_nothing(
    first: ReplicatedModel, second: ReplicatedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.save(tmp_path / "model")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            second.save(tmp_path / "model")
    assert ReplicatedModel.open(tmp_path / "model").root == first.root
