"""RLHF as a feature: its module, its objectives, its services, and the role of trainers of policies and reward models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from features.feature import Feature, Role

if TYPE_CHECKING:
    from ledger.core.module import Module
    from ledger.jobs import JobSpecRules


def _modules(rules: JobSpecRules) -> tuple[Module[Any], ...]:
    from rlhf.ledger.rlhf_module import RlhfModule

    return (RlhfModule(rules),)


RLHF = Feature(
    name="rlhf",
    about="tuning a model by rewards for its own responses",
    modules=_modules,
    objectives="rlhf.objectives.supervised_objectives:OBJECTIVES",
    implementations={"pytorch": "rlhf.pytorch.implementations:IMPLEMENTATIONS"},
    services={
        "sets": "rlhf.services:PreferenceDatasetBuilder",
        "ahead": "rlhf.services:BlobPrefetcher",
        "measuring": "rlhf.services:FinalModelEvaluator",
    },
    services_everywhere=("sets", "measuring"),
    commands="rlhf.commands",
    rpc="rlhf.rpc:RlhfRpc",
    event_lines="rlhf.ledger.rlhf_module:policy_event_lines",
    failures="rlhf.ledger.rlhf_module:find_failed_plans",
    rpc_handler="rlhf.api.rlhf_rpc_handler:RlhfRpcHandler",
    roles=(
        Role(
            "rlhf",
            "tunes models by rewards, and re-executes updates of others",
            registered_roles=("rlhf",),
            services=("ahead",),
            needs_worker=True,
        ),
    ),
)
