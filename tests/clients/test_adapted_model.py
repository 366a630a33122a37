"""Adapters of a base: losses, gradients, and the base that stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from clients.objective import SCALE, adapted_matrices
from clients.pytorch.adapted_model import AdaptedModel
from clients.pytorch.losses import token_losses
from clients.records import BETA, HIGH, LOSS_DEFAULTS, LOW, RATIO_MASK, ClientLoss, RequestBody
from tests.clients.runs import BASE, base_model, body, client_spec
from training.engines.pytorch.device import CPU
from training.engines.pytorch.model import GPT
from training.job_spec import JobSpec
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import EMBEDDING, FINAL_NORM, OUTPUT_MATRIX, tensor_shapes

TIED, UNTIED = BASE, replace(BASE, model=replace(BASE.model, tied=False))
CHOICES = [
    {},
    {"train_unembed": False},
    {"train_attn": False},
    {"train_mlp": False, "train_unembed": False},
    {"train_attn": False, "train_mlp": False},
]


def random_adapters(spec: object, seed: int = 0) -> Float32Array:
    size = layout_of(spec).size  # type: ignore[arg-type]
    return np.random.default_rng(seed).normal(0, 0.05, size).astype(np.float32)


def adapted(base: object = BASE, **settings: object) -> AdaptedModel:
    return AdaptedModel(client_spec(base, **settings), base_model(base), CPU)  # type: ignore[arg-type]


# The base ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("settings", CHOICES)
def test_the_first_model_is_the_base_bit_for_bit(base: object, settings: dict[str, object]) -> None:
    spec, known = client_spec(base, **settings), base_model(base)  # type: ignore[arg-type]
    model, plain = AdaptedModel(spec, known, CPU), GPT(known.spec)
    plain.load_parameters(known.parameters)
    model.load_adapters(ReplicatedModel.initial(b"c" * 32, spec).parameters)
    x = torch.tensor([[5, 6, 7, 8, 256]])
    with torch.no_grad():
        assert torch.equal(model.gpt.logits(model.gpt.features(x)), plain.logits(plain.features(x)))


def test_the_first_adapters_are_uniform_in_a_and_zero_in_b() -> None:
    spec = client_spec(rank=16)
    views = layout_of(spec).tensor_views(ReplicatedModel.initial(b"c" * 32, spec).parameters)
    for name, (outputs, inputs) in adapted_matrices(spec.model, spec.decoded_settings).items():
        a, b = views[f"{name}.adapter_a"], views[f"{name}.adapter_b"]
        assert a.shape == (16, inputs) and b.shape == (outputs, 16) and not b.any()
        assert np.abs(a).max() <= inputs**-0.5 and a.std() == pytest.approx((3 * inputs) ** -0.5, rel=0.15)


def test_other_adapters_change_the_matrices_by_their_product() -> None:
    spec, model = client_spec(), adapted()
    adapters = random_adapters(spec)
    model.load_adapters(adapters)
    views = layout_of(spec).tensor_views(adapters)
    merged = layout_of(model.gpt.job).tensor_views(model.gpt.parameters.numpy())
    base = layout_of(BASE).tensor_views(base_model().parameters)
    for name in adapted_matrices(spec.model, spec.decoded_settings):
        before = base["embedding.weight" if name == OUTPUT_MATRIX else name]
        change = SCALE / 4 * views[f"{name}.adapter_b"].astype(float) @ views[f"{name}.adapter_a"]
        assert np.abs(merged[name] - before - change).max() < 1e-6
    assert np.array_equal(merged["embedding.weight"], base["embedding.weight"])


# Gradients ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ClientLoss)
@pytest.mark.parametrize("settings", CHOICES)
def test_the_gradient_is_that_of_autograd_through_the_product(loss: ClientLoss, settings: dict[str, object]) -> None:
    spec, model, request = client_spec(**settings), adapted(**settings), body(loss)
    adapters = random_adapters(spec)
    model.load_adapters(adapters)
    model.clear_gradient()
    model.run_pass(request, backward=True)
    of_matrices = layout_of(model.gpt.job).tensor_views(model.gpt.gradients.numpy().copy())
    found, values = layout_of(spec).tensor_views(model.read_gradient()), layout_of(spec).tensor_views(adapters)
    for name in adapted_matrices(spec.model, spec.decoded_settings):
        a, b = (torch.tensor(values[f"{name}.adapter_{x}"], dtype=torch.float64, requires_grad=True) for x in "ab")
        of_a, of_b = torch.autograd.grad(SCALE / 4 * b @ a, (a, b), torch.tensor(of_matrices[name], dtype=torch.float64))
        for said, wanted in ((found[f"{name}.adapter_a"], of_a), (found[f"{name}.adapter_b"], of_b)):
            assert np.abs(said - wanted.numpy()).max() <= 1e-5 * float(wanted.abs().max())


# The weights of CISPO and the ratio of a response in GSPO are constants for the gradient.
@pytest.mark.parametrize("loss", [loss for loss in ClientLoss if loss not in (ClientLoss.CISPO, ClientLoss.GSPO)])
def test_the_loss_changes_along_its_gradient(loss: ClientLoss) -> None:
    spec, model, request = client_spec(), adapted(), body(loss)
    adapters, along = random_adapters(spec), random_adapters(spec, 1)
    model.load_adapters(adapters)
    model.clear_gradient()
    model.run_pass(request, backward=True)
    slope, step = float(model.read_gradient().astype(float) @ along), 2e-3
    losses = []
    for sign in (1, -1):
        model.load_adapters(adapters + np.float32(sign * step) * along)
        losses.append(model.run_pass(request, backward=False).loss)
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=2e-2)


@pytest.mark.parametrize("loss", ClientLoss)
def test_a_gradient_is_the_sum_over_requests_and_does_not_depend_on_micro_batches(loss: ClientLoss) -> None:
    spec = client_spec()
    adapters = random_adapters(spec)
    whole, one = (AdaptedModel(replace(spec, micro_batch=size), base_model(), CPU) for size in (8, 1))
    requests = [body(loss, 7, seed) for seed in range(3)]
    gradients = []
    for model in (whole, one):
        model.load_adapters(adapters)
        model.clear_gradient()
        for request in requests:
            model.run_pass(request, backward=True)
        gradients.append(model.read_gradient())
    distance = np.linalg.norm(gradients[0] - gradients[1]) / np.linalg.norm(gradients[0])
    assert np.linalg.norm(gradients[0]) > 0 and distance < 2e-5


def test_a_forward_pass_leaves_the_gradient_and_gives_the_log_probabilities_of_the_targets() -> None:
    model, request = adapted(), body(examples=11)
    model.load_adapters(random_adapters(client_spec()))
    model.clear_gradient()
    found = model.run_pass(request, backward=False)
    assert not model.gpt.gradients.any()
    for example, said in zip(request.examples, found.logprobs, strict=True):
        read = (np.frombuffer(data, dtype="<u2").astype(np.int64) for data in (example.tokens, example.targets))
        x, y = (torch.tensor(ids)[None] for ids in read)
        with torch.no_grad():
            wanted = torch.log_softmax(model.gpt.logits(model.gpt.features(x)), -1).gather(2, y[..., None])[0, :, 0]
        assert said.shape == (example.length,) and np.abs(said - wanted.numpy()).max() < 1e-5
    weights = [np.frombuffer(example.inputs["weights"], dtype="<f4") for example in request.examples]
    wanted_loss = -sum(float(w.astype(float) @ p) for w, p in zip(weights, found.logprobs, strict=True))
    assert found.loss == pytest.approx(wanted_loss, rel=1e-6)


# Losses ------------------------------------------------------------------------------------------------------------------


def formula(loss: ClientLoss, p: Tensor, q: Tensor, a: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """Return the loss of one response as its paper writes it, with default settings, in float64."""
    of = LOSS_DEFAULTS[loss]
    ratio = (p - q).exp()
    if loss is ClientLoss.CROSS_ENTROPY:
        return -(w * p).sum()
    if loss is ClientLoss.IMPORTANCE_SAMPLING:
        return -(ratio * a).sum()
    if loss is ClientLoss.PPO:
        return -torch.minimum(ratio * a, ratio.clamp(of[LOW], of[HIGH]) * a).sum()
    if loss is ClientLoss.CISPO:
        return -(ratio.clamp(of[LOW], of[HIGH]).detach() * p * a).sum()
    if loss is ClientLoss.DRO:
        return -(p * a - of[BETA] / 2 * (p - q) ** 2).sum()
    sequence = ((p - q)[m != 0].sum() / max(1, int(m.sum()))).exp().detach()
    ratio = sequence * (p - p.detach()).exp()
    return -torch.minimum(ratio * a, ratio.clamp(of[LOW], of[HIGH]) * a).sum()


@pytest.mark.parametrize("loss", ClientLoss)
@pytest.mark.parametrize("seed", range(4))
def test_losses_and_their_gradients_are_those_of_their_papers(loss: ClientLoss, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    lengths, shape = (6, 3, 1), (3, 6)
    p, q, a, w = (torch.randn(shape, generator=draw) * spread - shift for spread, shift in ((1, 3), (1, 3), (1, 0), (1, 0)))
    a = a * (torch.rand(shape, generator=draw) < 0.8)
    mask = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
    spoiled = torch.where(mask, p, torch.nan).requires_grad_()
    m = (torch.rand(shape, generator=draw) < 0.6).float()
    inputs = {"weights": w, "logprobs": q, "advantages": a, RATIO_MASK: m}
    found = token_losses(loss, spoiled, inputs, mask, {})
    (gradient,) = torch.autograd.grad(found.sum(), spoiled)
    for row, length in enumerate(lengths):
        exact = p[row, :length].double().requires_grad_()
        wanted = formula(loss, exact, *(x[row, :length].double() for x in (q, a, w, m)))
        (of_exact,) = torch.autograd.grad(wanted, exact)
        assert float(found[row].sum().detach()) == pytest.approx(float(wanted.detach()), rel=1e-5, abs=1e-5)
        assert torch.allclose(gradient[row, :length].double(), of_exact, rtol=1e-5, atol=1e-6)
    assert not found.detach()[~mask].any() and not gradient[~mask].any()


def by_autograd(request: RequestBody, spec: JobSpec, adapters: Float32Array) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a request and the gradient of each adapter, by autograd through a model in float64 without padding."""
    known = base_model()
    own = {name: torch.tensor(x).double().requires_grad_() for name, x in layout_of(spec).tensor_views(adapters).items()}
    base = {name: torch.tensor(x).double() for name, x in layout_of(known.spec).tensor_views(known.parameters).items()}
    base[OUTPUT_MATRIX] = base[EMBEDDING]
    adapted_names = adapted_matrices(spec.model, spec.decoded_settings)

    def matrix(name: str) -> Tensor:
        product = own[f"{name}.adapter_b"] @ own[f"{name}.adapter_a"] if name in adapted_names else torch.zeros(())
        return base[name] + SCALE / 4 * product

    plain = GPT(replace(known.spec, model=replace(known.spec.model, tied=False)))
    plain.embedding_VC, plain.output_VC, plain.final_norm_C = base[EMBEDDING], matrix(OUTPUT_MATRIX), base[FINAL_NORM]
    for index, layer in enumerate(plain.layers):
        for block in plain.blocks:
            for leaf, names in block.leaves.items():
                layer[leaf] = torch.cat([matrix(f"layers.{index}.{name}") for name in names])  # type: ignore[index]
    total = torch.zeros((), dtype=torch.float64)
    for example in request.examples:
        x, y = (torch.tensor(np.frombuffer(ids, "<u2").astype(np.int64)) for ids in (example.tokens, example.targets))
        p = torch.log_softmax(plain.logits(plain.features(x[None]))[0], -1).gather(1, y[:, None])[:, 0]
        names = ("logprobs", "advantages", "weights", RATIO_MASK)
        values = (np.frombuffer(example.inputs.get(name, bytes(4 * len(x))), "<f4").astype(float) for name in names)
        total = total + formula(request.loss, p, *map(torch.tensor, values))
    return float(total.detach()), dict(zip(own, torch.autograd.grad(total, own.values()), strict=True))


@pytest.mark.parametrize("loss", ClientLoss)
def test_a_pass_has_the_loss_and_the_gradient_of_a_plain_loop(loss: ClientLoss) -> None:
    spec, model, request = client_spec(), adapted(), body(loss, examples=7)
    adapters = random_adapters(spec)
    model.load_adapters(adapters)
    model.clear_gradient()
    found = model.run_pass(request, backward=True)
    wanted, of_adapters = by_autograd(request, spec, adapters)
    assert abs(found.loss - wanted) <= 1e-5 * abs(wanted)
    for name, gradient in layout_of(spec).tensor_views(model.read_gradient()).items():
        exact = of_adapters[name].numpy()
        assert np.abs(gradient - exact).max() <= 1e-5 * np.abs(exact).max() > 0


@pytest.mark.parametrize("loss", [ClientLoss.PPO, ClientLoss.CISPO, ClientLoss.GSPO])
def test_thresholds_bound_the_ratio(loss: ClientLoss) -> None:
    p, q = torch.tensor([[2.0, 0.0]]), torch.tensor([[-1.0, -1.0]])
    inputs = {"logprobs": q, "advantages": torch.tensor([[1.0, 1.0]]), RATIO_MASK: torch.ones(1, 2)}
    wide, narrow = (
        token_losses(loss, p, inputs, torch.ones(1, 2, dtype=torch.bool), {LOW: 1 - x, HIGH: 1 + x}) for x in (0.99, 0.1)
    )
    assert not torch.equal(wide, narrow)


@pytest.mark.parametrize("base", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("settings", CHOICES)
def test_a_merged_model_has_the_matrices_that_a_pass_computes_with(base: JobSpec, settings: dict[str, object]) -> None:
    spec, model, adapters = (
        client_spec(base, **settings),
        adapted(base, **settings),
        random_adapters(client_spec(base, **settings)),
    )
    model.load_adapters(adapters)
    tensors, of_base = layout_of(spec).tensor_views(adapters), layout_of(base).tensor_views(base_model(base).parameters)
    merged = spec.resolved_objective.merge_into_required(spec, tensors, base.model, of_base)
    assert merged.model.tied == (base.model.tied and not spec.decoded_settings.train_unembed)
    wanted = layout_of(model.gpt.job).tensor_views(model.gpt.parameters.numpy())
    assert merged.tensors.keys() == wanted.keys() == dict(tensor_shapes(merged.model)).keys()
    for name, values in wanted.items():
        assert np.abs(merged.tensors[name] - values).max() <= 1e-6
