"""The objective of client runs: adapters of a finished model, trained by the gradients of people's own programs.

An adapter of a matrix W with shape (outputs, inputs) consists of A (rank, inputs) and B (outputs, rank). The model computes with
W + (`SCALE` / rank) · B·A (Hu et al. 2021, arXiv:2106.09685, equation 3). B starts at zero, so the first model is the base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from clients.records import (
    BYTES_OF_SETTINGS_MAX,
    BYTES_OF_TOKEN_MAX,
    MANIFEST_BYTES_MAX,
    AdapterSettings,
    Manifest,
    OptimizerStep,
    StepBrief,
    StepDeclaration,
)
from ledger.jobs import ModelReference
from protocol import codec
from protocol.errors import RemoteProtocolError
from training.objectives.objective import (
    AdamWTerms,
    FirstModel,
    JobSpecProtocol,
    MergedModel,
    Objective,
    RejectionReason,
    Shape,
    Tensors,
)
from training.transformer import (
    EMBEDDING,
    OUTPUT_MATRIX,
    BlockKind,
    LayerParameter,
    LayerPlace,
    LinearKind,
    ModelSpec,
    TernaryLinear,
    find_layer,
    model_tensors,
)

MODULE: Final = "clients"
# Longest wait for the update of one trainer: another trainer then gets the step. Other jobs wait for the step's place, too.
PROPOSAL_SECONDS_MAX: Final = 60.0
SCALE: Final = 32  # scale of an adapter's product, divided by its rank
A_SUFFIX, B_SUFFIX = ".adapter_a", ".adapter_b"
BASES: Final = ("language", "instruct", "dpo", "ppo")  # objectives of jobs whose models have adapters
TOKENS_DIFFER: Final = RejectionReason("tokens", "the trainer declared another number of tokens than the step has")
LOSS_DIFFERS: Final = RejectionReason("loss", "the trainer declared another loss than the re-execution gave")


class ClientObjective(Objective):
    name = "client"
    description = "adapters of a finished model, trained by the loop of a person's own program"
    module, version = MODULE, 1
    settings_type = AdapterSettings
    on_request = True
    limits_norm = False  # Losses are sums, so the norm follows the size of a batch.
    reads_text = False
    data_without_text = "the requests of a person's own program"
    reads_required_data = False
    makes_text = False
    start_command = "client"
    declaration_type = StepDeclaration
    required_objectives = BASES
    rejection_reasons = (TOKENS_DIFFER, LOSS_DIFFERS)
    loss_unit = "nats"
    changes_required_model = True

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        wanted = {
            "audit": "full",
            "bits": 16,
            "feedback_decay": 0.0,
            "outer": "adamw",
            "rule": "mean",
            "byzantine_max": 0,
            "local_steps": 1,
            "memory": "residual",
            "initial_model": None,
            "base": None,
        }
        if job.proposal_seconds > PROPOSAL_SECONDS_MAX:
            return f"proposal_seconds {job.proposal_seconds:g} is more than {PROPOSAL_SECONDS_MAX:g}"
        for name, value in wanted.items():
            if getattr(job, name) != value:
                return f"a job of the objective {self.name!r} has {name} {value}, not {getattr(job, name)}"
        if job.model.linear == TernaryLinear.name:
            return "the base has ternary matrices, whose levels would jump between merged adapters: use a base with dense ones"
        if settings.rank > job.model.width:
            return f"rank {settings.rank} is more than the model's width {job.model.width}"
        if job.model.experts and settings.train_mlp:
            return f"the {job.model.experts} experts of the model's layers have no adapters: set train_mlp to false"
        if not adapted_matrices(job.model, settings):
            return "no matrix would have an adapter: set train_attn, train_mlp or train_unembed"
        return None

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        found = list[tuple[str, Shape]]()
        for name, (outputs, inputs) in adapted_matrices(job.model, settings).items():
            found += [(f"{name}{A_SUFFIX}", (settings.rank, inputs)), (f"{name}{B_SUFFIX}", (outputs, settings.rank))]
        return found

    def initial_parameter(self, name: str, shape: Shape) -> LayerParameter:
        """Return the initial values of a tensor: A is uniform, as in the LoRA of Hu et al., and B is zero."""
        is_a = name.endswith(A_SUFFIX)
        return LayerParameter(name, shape, uniform=1 / math.sqrt(shape[1]) if is_a else 0.0)

    def pass_parameters(self, job: JobSpecProtocol) -> int:
        """Return the parameters of the merged model: a pass costs as much as one that trains all of them."""
        return untied_model(job.model, job.decoded_settings).pass_parameters

    def required_model(self, job: JobSpecProtocol) -> ModelReference | None:
        base: ModelReference = job.decoded_settings.base
        return base

    def merge_into_required(
        self, job: JobSpecProtocol, tensors: Tensors, required: ModelSpec, of_required: Tensors
    ) -> MergedModel:
        import numpy as np

        settings: AdapterSettings = job.decoded_settings
        model = untied_model(required, settings)
        merged = {name: of_required[name if name in of_required else EMBEDDING] for name in model_tensors(model)}
        for name in adapted_matrices(job.model, settings):
            product = tensors[f"{name}{B_SUFFIX}"] @ tensors[f"{name}{A_SUFFIX}"]
            merged[name] = merged[name] + np.float32(SCALE / settings.rank) * product
        return MergedModel(model, merged)

    def first_model(self, job: JobSpecProtocol) -> FirstModel | None:
        settings: AdapterSettings = job.decoded_settings
        return FirstModel(settings.start, settings.start_moments) if settings.start is not None else None

    def outer_terms(self, job: JobSpecProtocol, brief: bytes) -> AdamWTerms | None:
        if not brief:
            return None
        terms: OptimizerStep = codec.decode(StepBrief, brief).optimizer
        return AdamWTerms(terms.rate, terms.beta1, terms.beta2, terms.epsilon, terms.weight_decay)

    def round_files(self, job: JobSpecProtocol, brief: bytes, files: Mapping[bytes, Path]) -> Mapping[bytes, int]:
        step = codec.decode(StepBrief, brief)
        manifest = step.manifest
        if manifest not in files:
            return {manifest: MANIFEST_BYTES_MAX}
        listed = codec.decode(Manifest, files[manifest].read_bytes(), MANIFEST_BYTES_MAX)
        size = sum(body.bytes for body in listed.bodies)
        most = BYTES_OF_TOKEN_MAX * step.tokens + BYTES_OF_SETTINGS_MAX * len(listed.bodies)
        if size > most:
            raise RemoteProtocolError("bad-brief", f"{step.tokens} tokens have at most {most} bytes, but the bodies have {size}")
        return {manifest: MANIFEST_BYTES_MAX} | {body.digest: body.bytes for body in listed.bodies}


def untied_model(model: ModelSpec, settings: AdapterSettings) -> ModelSpec:
    """Return the model with merged adapters. The embedding does not change, so a tied output matrix becomes a separate one."""
    return replace(model, tied=model.tied and not settings.train_unembed)


def adapted_matrices(model: ModelSpec, settings: AdapterSettings) -> dict[str, tuple[int, int]]:
    """Return the shapes (outputs, inputs) of the matrices with adapters, by name, in the order of the flat vector."""
    attention = {parameter.name for parameter in _parameters_of(model, LayerPlace.ATTENTION)}
    found = dict[str, tuple[int, int]]()
    for name, tensor in model_tensors(model).items():
        shape = tensor.parameter.shape
        if len(shape) != 2 or tensor.layer is None:
            continue
        if settings.train_attn if tensor.parameter.name in attention else settings.train_mlp:
            found[name] = (shape[0], shape[1])
    if settings.train_unembed:
        found[OUTPUT_MATRIX] = (model.vocabulary, model.width)
    return found


def _parameters_of(model: ModelSpec, place: LayerPlace) -> Sequence[LayerParameter]:
    """Return the tensors of one block of a layer."""
    kind, linear = find_layer(getattr(model, place.value), place), find_layer(model.linear, LayerPlace.LINEAR)
    assert isinstance(kind, BlockKind) and isinstance(linear, LinearKind)
    return kind.parameters(model, linear)


OBJECTIVES: Final = (ClientObjective(),)
