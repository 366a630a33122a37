"""Curation as a feature: its module, and the role that serves annotators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from features.feature import Feature, Role, Setting

if TYPE_CHECKING:
    from ledger.core.module import Module
    from ledger.jobs import JobSpecRules


def _modules(rules: JobSpecRules) -> tuple[Module[Any], ...]:
    from curation.ledger.curation_module import CurationModule

    return (CurationModule(),)


def _sign_up_problem(value: object) -> str | None:
    return None if value in ("open", "invited") else "must be open or invited"


CURATION = Feature(
    name="curation",
    about="tasks, answers of annotators, and labels",
    modules=_modules,
    roles=(
        Role(
            "annotator",
            "serves pages for annotators; never loads torch",
            registered_roles=("annotator",),
            services=("serve",),
            needs_package="aiohttp",
        ),
    ),
    commands="curation.commands",
    rpc="curation.rpc:CurationRpc",
    rpc_handler="curation.service.curation_rpc_handler:CurationRpcHandler",
    routes="curation.service.http_routes:HTTP_ROUTES",
    pages="curation.pages.annotation_pages:PAGES",
    settings=(
        Setting(
            "sign_up",
            "Enrolment of annotators at this peer: `open` or `invited`",
            "invited",
            _sign_up_problem,
            "With `open` everybody may enrol. With `invited` each annotator shows a code.",
        ),
        Setting(
            "sign_up_invitations",
            "Codes that enrol annotators if `sign_up` is `invited`",
            (),
            details="Each code enrols one annotator. `peer web invite` makes further codes.",
        ),
    ),
)
