"""The HTTP backend: one object that answers all calls of annotators, operators and programs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from curation.service.access_control import AccessControl
from curation.service.annotators.annotator_api import AnnotatorApi
from curation.service.annotators.custodial_accounts import CustodialAccounts
from curation.service.annotators.custodial_api import CustodialApi
from curation.service.operators.admin_api import AdminApi
from curation.service.operators.import_queue import ImportQueue
from curation.service.operators.operator_log import Operators
from curation.service.operators.project_api import ProjectApi
from curation.service.operators.review_api import ReviewApi
from curation.service.projects.page_fetcher import PageFetcher
from curation.service.public.health_api import HealthApi
from curation.service.public.live_feed import LiveFeed
from curation.service.public.public_api import PublicApi
from features.rpc import combine_handlers
from features.services import ServiceContext


@dataclass(frozen=True)
class AssembledApi:
    backend: Any  # a `web.api_backend.ApiBackend`
    background_tasks: tuple[Callable[[], Awaitable[None]], ...]  # run for as long as it is served


def assemble_api(desk: ServiceContext) -> AssembledApi:
    doors, fetching, live = AccessControl(desk.folder), PageFetcher(desk), LiveFeed(desk)
    annotating = AnnotatorApi(desk, doors, fetching)
    operators = Operators(desk.folder, doors, annotating.is_annotator)
    imports = ImportQueue(desk, operators)
    site = combine_handlers(
        (
            annotating,
            PublicApi(desk),
            CustodialApi(desk, CustodialAccounts(desk.folder), annotating),
            ProjectApi(desk, operators, imports),
            ReviewApi(desk, operators),
            AdminApi(desk, doors, operators, lambda: annotating.gatherer.waiting_count),
            live,
            HealthApi(desk, annotating.gatherer),
        )
    )
    return AssembledApi(
        site, (annotating.gatherer.run, annotating.run_openings_and_expiry, fetching.run, live.run_label_counter, imports.run)
    )
