"""One route and one page of the feature."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from features.services import ServiceContext
from protocol.prometheus_metrics import PrometheusMetric
from tests.notes.module import NotesState
from web.calls import TEXT, HttpProblem, Json, RequestField, hex_type
from web.routes import ClientClass, HtmlPage, PageSet, Route, RouteHandlers, RouteReply, RouteSet, authorize_by_token

READER = ClientClass("reader", "folkmoot-reader", "reader")


@dataclass
class NotesApi:
    desk: ServiceContext

    def authorize(self, token: str) -> str:
        """Authorize a reader of notes, whose token is the first note."""
        if token != self.desk.get_setting("first_note"):
            raise HttpProblem("unauthorized", "this is not the first note")
        return "reader of notes"

    async def count_notes(self, reader: str, member: bytes, text: str) -> Json:
        return {"reader": reader, "count": self._state.written.get(member, 0), "length": len(text)}

    def metrics(self) -> tuple[PrometheusMetric, ...]:
        return (PrometheusMetric("notes_total", "that are decided", {"": sum(self._state.written.values())}),)

    @property
    def _state(self) -> NotesState:
        found: NotesState = self.desk.state.module_state(NotesState)
        return found


def make_handlers(desk: ServiceContext) -> RouteHandlers:
    api = NotesApi(desk)
    return RouteHandlers(objects=(api,), authorizers={READER: authorize_by_token(api.authorize)}, metrics=api.metrics)


ROUTES = RouteSet(
    prefixes=("/api/notes",),
    routes=(
        Route(
            handler=NotesApi.count_notes,
            method="POST",
            path="/api/notes/{member}",
            about="counts the notes of a member",
            client=READER,
            body_bytes_max=256,
            path_fields=(RequestField("member", hex_type(32)),),
            body_fields=(RequestField("text", TEXT, default=""),),
            replies={200: RouteReply("reader count length")},
        ),
    ),
    make_handlers=make_handlers,
)
PAGES = PageSet(Path(__file__).parent, (HtmlPage("notes", "Notes"),), {"about": "<what> members want to remember"})
