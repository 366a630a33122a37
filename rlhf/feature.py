"""RLHF as a feature: its module, its objectives, and the role of those who train and check them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from features.feature import Feature
from features.roles import Role

if TYPE_CHECKING:
    from ledger.core.module import Module
    from ledger.jobs import JobSpecRules


def _modules(rules: JobSpecRules) -> tuple[Module[Any], ...]:
    from rlhf.ledger.rlhf_module import RlhfModule, RlhfModuleV2

    return RlhfModule(rules), RlhfModuleV2(rules)


RLHF = Feature(
    name="rlhf",
    about="tuning a model by rewards for its own responses",
    modules=_modules,
    objectives="rlhf.objectives.registry:OBJECTIVES",
    parts={
        "sets": "peer.driver.deriving:Deriving",
        "ahead": "peer.driver.ahead:Ahead",
        "measuring": "peer.driver.measuring:Measuring",
    },
    everywhere=("sets", "measuring"),
    words="rlhf.commands",
    calls="rlhf.rpc:RlhfRpc",
    news="rlhf.ledger.event_lines:policy_event_lines",
    answers="peer.api.rlhf:RlhfAnswers",
    roles=(
        Role(
            "rlhf",
            "tunes models by rewards, and re-executes what others have tuned",
            registers=("rlhf",),
            parts=("ahead",),
            needs_worker=True,
        ),
    ),
)
