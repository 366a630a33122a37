"""The objects that answer the HTTP calls of annotators, operators and programs."""

from __future__ import annotations

from curation.service.access_control import ANNOTATOR, AccessControl
from curation.service.annotators.annotator_api import AnnotatorApi
from curation.service.annotators.custodial_accounts import CustodialAccounts
from curation.service.annotators.custodial_api import CustodialApi
from curation.service.operators.admin_api import AdminApi
from curation.service.operators.import_queue import ImportQueue
from curation.service.operators.operator_log import Operators
from curation.service.operators.project_api import ProjectApi
from curation.service.operators.review_api import ReviewApi
from curation.service.projects.page_fetcher import PageFetcher
from curation.service.public.block_feed import BlockFeed
from curation.service.public.live_feed import LiveFeed
from curation.service.public.public_api import PublicApi
from features.services import ServiceContext
from web.routes import OPERATOR, RouteHandlers


def make_handlers(desk: ServiceContext) -> RouteHandlers:
    doors, fetching, live = AccessControl(desk.folder), PageFetcher(desk), LiveFeed(desk)
    annotating = AnnotatorApi(desk, doors, fetching)
    operators = Operators(desk.folder, doors, annotating.is_annotator)
    imports = ImportQueue(desk, operators)
    blocks = BlockFeed(desk, annotating.gatherer)
    return RouteHandlers(
        objects=(
            annotating,
            PublicApi(desk),
            CustodialApi(desk, CustodialAccounts(desk.folder), annotating),
            ProjectApi(desk, operators, imports),
            ReviewApi(desk, operators),
            AdminApi(desk, doors, operators, lambda: annotating.gatherer.waiting_count),
            live,
        ),
        authorizers={ANNOTATOR: annotating.require_session, OPERATOR: operators.require_operator},
        metrics=blocks.metrics,
        event_feeds=(blocks.event_feed, live.event_feed),
        background_tasks=(
            annotating.gatherer.run,
            annotating.run_openings_and_expiry,
            fetching.run,
            live.run_label_counter,
            imports.run,
        ),
    )
