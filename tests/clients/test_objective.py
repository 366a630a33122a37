"""Specifications of client runs that nobody could carry out are refused by name, and at little cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clients import objective
from clients.ledger.clients_module import BYTES_PER_PARAMETER
from protocol.errors import RemoteProtocolError
from tests.clients.runs import BASE, MODEL, client_spec
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.replicated.tensor_layout import layout_of
from training.transformer import LAYERS_MAX, PARAMETERS_MAX, TENSORS_MAX, ModelSpec


def spec_of(model: ModelSpec, **settings: object) -> JobSpec:
    return client_spec(replace(BASE, model=model), **settings)


def test_more_adapters_than_a_model_has_tensors_are_refused_and_never_an_assertion() -> None:
    deep = replace(MODEL, layers=LAYERS_MAX)
    refused = spec_of(deep, rank=1)
    assert refused.problem() == (
        f"its {14 * LAYERS_MAX + 2} trained tensors are more than {TENSORS_MAX}: "
        "use fewer layers, or train fewer of their matrices"
    )
    with pytest.raises(RemoteProtocolError, match="trained tensors are more than"):
        JobSpec.decode(refused.encode())
    for settings in ({"train_attn": False}, {"train_mlp": False}):
        allowed = spec_of(deep, rank=1, **settings)
        assert allowed.problem() is None and len(layout_of(allowed).tensors) <= TENSORS_MAX


def test_adapters_with_more_elements_than_the_largest_model_are_refused() -> None:
    model = ModelSpec(vocabulary=257, width=1024, layers=650, heads=2, kv_heads=2, hidden=1024)
    refused = spec_of(model, rank=1024)
    assert model.problem() is None and refused.trained_parameters > PARAMETERS_MAX
    assert "use a smaller model" in str(refused.problem())
    assert spec_of(model, rank=512).problem() is None


def test_the_ledger_counts_a_saved_model_of_a_run_by_its_adapters_and_its_work_by_the_model(tmp_path: Path) -> None:
    spec = spec_of(MODEL, rank=1)
    terms = JobModelStore(tmp_path).terms_of_spec(spec.encode())
    assert terms.trained_parameters == layout_of(spec).size < terms.parameters == MODEL.parameters
    assert BYTES_PER_PARAMETER * terms.trained_parameters == spec.model_bytes


def test_experts_of_a_base_have_no_adapters_and_their_work_is_that_of_a_token(tmp_path: Path) -> None:
    experts = replace(MODEL, feed_forward="experts", experts=8)
    why = "the 8 experts of the model's layers have no adapters: set train_mlp to false"
    assert spec_of(experts, rank=1).problem() == why
    spec = spec_of(experts, rank=1, train_mlp=False, train_unembed=False)
    assert spec.problem() is None
    assert JobModelStore(tmp_path).terms_of_spec(spec.encode()).pass_parameters == experts.pass_parameters < experts.parameters


def test_the_tensors_of_a_model_with_too_many_layers_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(*_: object) -> dict[str, tuple[int, int]]:
        raise AssertionError("a model with 2^31 layers has more tensors than any memory holds")

    monkeypatch.setattr(objective, "adapted_matrices", listed)
    refused = spec_of(replace(MODEL, layers=2**31))
    assert refused.problem() == f"layers {2**31} are more than {LAYERS_MAX}"


def test_adapters_of_a_ternary_base_are_refused() -> None:
    told = "the base has ternary matrices, whose levels would jump between merged adapters: use a base with dense ones"
    assert spec_of(replace(MODEL, linear="ternary")).problem() == told
