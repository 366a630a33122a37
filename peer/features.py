"""The features of this program. A feature is one folder and one line here; the order is that of its modules inside a block."""

from __future__ import annotations

from typing import Any

from features.feature import Feature
from ledger.core.genesis import Genesis, ModuleVersion
from ledger.core.module import Module
from ledger.jobs import JobRules, JobTerms
from ledger.state import Rules, core_modules, newest
from protocol.identity import Ed25519Verifier, Verifier

FEATURES: list[Feature] = [
    Feature(name="core", about="members, jobs and their audits", modules=core_modules),
]


def modules_of(job_rules: JobRules) -> tuple[Module[Any], ...]:
    """Those of all features in all their versions, in their order inside a block."""
    return tuple(module for feature in FEATURES for module in feature.modules(job_rules))


def founding_modules() -> tuple[ModuleVersion, ...]:
    """What a network is founded with: the newest version of every module."""
    return newest(modules_of(_NoJobs()))


class _NoJobs:
    """For whoever asks only which modules there are."""

    def terms(self, spec: bytes) -> JobTerms:
        raise AssertionError("no job is looked at")


def rules_of(genesis: Genesis, job_rules: JobRules, verifier: Verifier | None = None) -> Rules:
    """The transition rules of a network, with the modules of all features."""
    return Rules(genesis, verifier or Ed25519Verifier(), modules_of(job_rules))
