"""Routes and pages of one HTTP server, from all features that it serves, with the objects that handle requests."""

from __future__ import annotations

import itertools
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from features.feature import Feature
from features.lazy_import import import_object
from features.services import ServiceContext
from protocol.prometheus_metrics import PrometheusMetric
from web.calls import STATUS_BY_CODE, Credentials, HttpProblem
from web.held_replies import HeldReplies
from web.metrics_endpoint import StatsCache
from web.routes import ClientClass, EventFeed, HtmlPage, PageSet, Route, RouteSet, is_below
from web.server_routes import SERVER_PREFIXES, SERVER_ROUTES, page_route

STATIC = Path(__file__).with_name("static")


@dataclass(frozen=True, slots=True)
class Site:
    route_sets: tuple[RouteSet, ...]
    page_sets: tuple[PageSet, ...]

    @property
    def pages(self) -> tuple[HtmlPage, ...]:
        return tuple(page for page_set in self.page_sets for page in page_set.pages)

    @property
    def routes(self) -> tuple[Route, ...]:
        """Routes of the site: those of features, then of the server itself, then of pages."""
        of_features = (route for route_set in self.route_sets for route in route_set.routes)
        return (*of_features, *SERVER_ROUTES, *map(page_route, self.pages))

    @property
    def problem_statuses(self) -> dict[str, int]:
        return STATUS_BY_CODE | dict(item for route_set in self.route_sets for item in route_set.problem_statuses.items())

    @property
    def static_files(self) -> dict[str, Path]:
        """Files that are served under `/static/`, by name."""
        return {path.name: path for path in _static_files(self.page_sets)}


def load_site(features: Iterable[Feature]) -> Site:
    """Return the site of these features.

    Asserts that no path, operation, problem code, cookie or static file is declared twice.
    """
    route_sets: list[RouteSet] = []
    page_sets: list[PageSet] = []
    taken = [("web", prefix) for prefix in SERVER_PREFIXES]
    for feature in features:
        own: list[str] = []
        if feature.routes:
            route_sets.append(import_object(feature.routes))
            own += route_sets[-1].prefixes
        if feature.pages:
            page_sets.append(import_object(feature.pages))
            own += [page.path for page in page_sets[-1].pages]
        for path, (other, theirs) in itertools.product(own, taken):
            is_shared = is_below(path, theirs) or is_below(theirs, path)
            assert not is_shared, (
                f"the features {other!r} and {feature.name!r} bring the paths {theirs} and {path}: one prefix each"
            )
        taken += [(feature.name, path) for path in own]
    site = Site(tuple(route_sets), tuple(page_sets))
    clients = {route.client for route in site.routes if route.client}
    _require_distinct("a route", (f"{route.method} {re.sub(r'{[^}]*}', '{}', route.path)}" for route in site.routes))
    _require_distinct("an operation", (route.operation for route in site.routes))
    _require_distinct(
        "a problem code", (*STATUS_BY_CODE, *(code for route_set in route_sets for code in route_set.problem_statuses))
    )
    _require_distinct("a client class", (client.name for client in clients))
    _require_distinct("a cookie", (client.cookie_name for client in clients))
    _require_distinct("a static file", (path.name for path in _static_files(page_sets)))
    return site


def _require_distinct(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        assert name not in seen, f"{what} is declared twice: {name!r}"
        seen.add(name)


def _static_files(page_sets: Iterable[PageSet]) -> Iterator[Path]:
    folders = (STATIC, *(page_set.folder / "static" for page_set in page_sets))
    return (path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_file())


class SiteHandlers:
    """Handlers of a site's routes at a running peer."""

    def __init__(self, site: Site, desk: ServiceContext) -> None:
        self.stats = StatsCache(desk)
        self._made = [route_set.make_handlers(desk) for route_set in site.route_sets]
        self._objects = [item for made in self._made for item in made.objects]
        authorizers = [item for made in self._made for item in made.authorizers.items()]
        _require_distinct("an authorizer", (client.name for client, _ in authorizers))
        self._authorizers = dict(authorizers)

    def bind(self, route: Route) -> Callable[[Credentials, dict[str, Any]], Awaitable[Any]]:
        """Return a function of (credentials, fields) that handles a route.

        It authorizes the client before it calls the route's handler.
        """
        answer = bind_method(route.handler, self._objects)

        async def answer_authorized(credentials: Credentials, fields: dict[str, Any]) -> Any:
            if route.client is not None:
                fields = {**fields, route.client.argument: await self.authorize(route.client, credentials)}
            return await answer(**fields)

        return answer_authorized

    def find_held_replies(self, route: Route) -> HeldReplies:
        """Return the waiting replies of the feature that handles this route."""
        return next(made.held_replies for made in self._made if find_owner(route.handler, made.objects) is not None)

    async def authorize(self, client: ClientClass, credentials: Credentials) -> object:
        """Return the identity of the client. Raises `HttpProblem` if no client of this class has the token."""
        if client not in self._authorizers:
            raise HttpProblem("unauthorized", f"this peer has no {client.name}s: none of its features authorizes them")
        return await self._authorizers[client](credentials)

    async def read_metrics(self) -> tuple[PrometheusMetric, ...]:
        return (*await self.stats.metrics(), *(metric for made in self._made for metric in made.metrics()))

    @property
    def event_feeds(self) -> tuple[EventFeed, ...]:
        return tuple(feed for made in self._made for feed in made.event_feeds)

    @property
    def background_tasks(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        return tuple(task for made in self._made for task in made.background_tasks)


def bind_method(function: Callable[..., Awaitable[Any]], objects: Sequence[object]) -> Callable[..., Awaitable[Any]]:
    """Return the function as a bound method of the object whose class declares it. One of the objects must be of this class."""
    owner = find_owner(function, objects)
    assert owner is not None, f"a route names {function.__qualname__}, and no handler object is of that class"
    return cast(Callable[..., Awaitable[Any]], getattr(owner, function.__name__))


def find_owner(function: Callable[..., Awaitable[Any]], objects: Sequence[object]) -> object | None:
    """Return the object whose class declares the function."""
    for item in objects:
        if any(f"{kind.__qualname__}.{function.__name__}" == function.__qualname__ for kind in type(item).__mro__):
            return item
    return None
