"""The HTTP API: each call is declared here alone.

The application's routes, the reading of what strangers send, the OpenAPI document and the table in docs/protocol/curation.md
follow from the declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from curation.import_export.export_formats import FORMATS
from curation.ledger.curation_state import TextFormat
from curation.limits import (
    ANNOTATORS_MAX,
    KAPPA_COMMON_MIN,
    KAPPA_PAIRS_MAX,
    LEASES_MAX,
    OPTIONS_MAX,
    PAGE_TASKS_MAX,
    PAGES_MAX,
    PRICE_MAX,
    RANKED_MAX,
    VOTES_MAX,
)
from web.fields import (
    CURSOR,
    FLAG,
    LINE,
    NEEDED,
    OBJECTS,
    TEXT,
    TEXTS,
    TEXTS_BY_NAME,
    Field,
    hexadecimal,
    hexadecimals,
    one_of,
    whole,
    whole_in_query,
    wholes,
)
from web.listening import LISTENERS_MAX, LISTENERS_OF_HOST_MAX
from web.pages import PAGES, START
from web.problems import STATUS

ANNOTATOR, OPERATOR = "annotator", "operator"
SETS, ENDS = "sets", "ends"  # what a call does to the cookie of a session
LETTERS: Final = {"": "", ANNOTATOR: "T", OPERATOR: "O"}  # of the table
FILE_BYTES_MAX: Final = 16 << 20
STATES: Final = ("waiting", "skipped", "disputed", "begun", "settled", "decided", "fresh", "redacted")
SIGNATURE, KEY = hexadecimal(64), hexadecimal(32)
TIME: Final = whole(0, 2**53 - 1)


@dataclass(frozen=True, slots=True)
class Reply:
    names: str = ""  # fields of the JSON object, with blanks between them
    about: str = ""
    content_type: str = "application/json"
    brief: str = ""  # instead of the names, for people

    @property
    def text(self) -> str:
        names = self.brief or ", ".join(f"`{name}`" for name in self.names.split())
        return " ".join(part for part in (names, self.about) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    call: str  # the method of `web.site.Site`, or of the application itself
    method: str
    path: str  # fields stand in braces
    about: str
    who: str = ""  # whose token it takes
    ids: tuple[Field, ...] = ()  # in the path
    query: tuple[Field, ...] = ()
    body: tuple[Field, ...] = ()
    cookie: str = ""
    of: str = ANNOTATOR  # whose cookie
    by_host: bool = False  # the site is told which host asks, as the argument `host`
    upload: bool = False  # a file is its body, and the argument `file`, where the query names a `format`
    replies: Mapping[int, Reply]
    codes: Mapping[str, str] = field(default_factory=dict)  # of problems that are its own, and when

    @property
    def status(self) -> int:
        """Unless the site says otherwise."""
        return next(iter(self.replies))


def _id(name: str) -> tuple[Field, ...]:
    return (Field(name, KEY),)


PROJECT: Final = Reply(
    "project name kind state author votes tasks begun settled review options many items price display is_mine",
    brief="the project, as in the list",
)
SIGNED_IN: Final = Reply("annotator name seconds", "that the session lasts; its token comes as the cookie `folkmoot`")
DISPLAYS: Final = tuple(display.value for display in TextFormat)
FILE_FORMATS: Final = ("jsonl", "csv", "json")
FILE_NAME: Final = Field("name", LINE, "the file's, for what is said of its lines", default="")
CHECKED: Final = Reply(
    "count items preview problems",
    ": nothing is imported. Where there are any, `notes`, sentences for people, and `already`, the number of tasks that an "
    "earlier import of the same tasks has added to the project",
)
IMPORTED: Final = Reply(PROJECT.names, "and, where there are any, `notes`, sentences for people", brief=PROJECT.brief + ",")
GOLD_FROM: Final = Field("gold_from", TEXT, "the field of the tasks with the right answers", default="")
TASKS: Final = Field("tasks", OBJECTS, "as lines of a [JSONL file](../guide.md#a-project)")
DECIDES: Final = {"misfit": "for what fits no project", "refused": "if the network does"}
ROUTES: Final = (
    Route(
        call="network", method="GET", path="/api/v1/network", about="which network and peer this is",
        replies={200: Reply(
            "name wire chain_id peer_key height time_ms sign_up", "; `time_ms` of the last block, `sign_up` `open` or `invited`"
        )},
    ),
    Route(
        call="enrol", method="POST", path="/api/v1/annotators", about="enrols an annotator", by_host=True,
        body=(
            Field("key", KEY), Field("name", LINE), Field("signature", SIGNATURE, "of the Enrol"),
            Field("custodial", FLAG, default=False), Field("invitation", TEXT, default=""),
        ),
        replies={201: Reply("annotator", "once decided; said again, the same")},
        codes={
            "forbidden": "without an invitation that is free, or without a place", "already-enrolled": "", "bad-signature": "",
            "misfit": "for a name", "too-many": "for one address, where sign-up is open",
        },
    ),
    Route(
        call="challenge", method="POST", path="/api/v1/challenges", about="a nonce for a session",
        by_host=True, body=(Field("key", KEY),),
        replies={201: Reply("nonce expires_ms", "of the session to come, a day ahead. The nonce waits ten minutes")},
    ),
    Route(
        call="session", method="POST", path="/api/v1/sessions", about="begins a session",
        body=(
            Field("key", KEY), Field("nonce", hexadecimal(16)), Field("expires_ms", TIME),
            Field("signature", SIGNATURE, "of the Session"),
        ),
        replies={201: Reply("token", "; a nonce serves once")},
        codes={
            "unauthorized": "for another nonce", "forbidden": "if the key is not enrolled", "bad-signature": "",
            "misfit": "if `expires_ms` is over or further away than was said",
        },
    ),
    Route(
        call="sign_up", method="POST", path="/api/v1/sign-up", about="enrols an annotator whose key this peer keeps",
        by_host=True,
        body=(Field("name", LINE), Field("passphrase", TEXT, "8..256 characters"), Field("invitation", TEXT, default="")),
        cookie=SETS, replies={201: SIGNED_IN},
        codes={
            "misfit": "for a name or a passphrase", "already-enrolled": "if the name is taken here",
            "forbidden": "as for annotators, or from another site's page",
            "too-many": "for one address, or after wrong passphrases",
        },
    ),
    Route(
        call="sign_in", method="POST", path="/api/v1/sign-in", about="begins a session of such an annotator",
        by_host=True,
        body=(Field("name", LINE), Field("passphrase", TEXT)), cookie=SETS, replies={201: SIGNED_IN},
        codes={
            "unauthorized": "for another name or passphrase", "forbidden": "if it is not enrolled, or from another site's page",
            "too-many": "for one address, or after wrong passphrases",
        },
    ),
    Route(
        call="sign_out", method="POST", path="/api/v1/sign-out", who=ANNOTATOR, about="ends a session", cookie=ENDS,
        replies={200: Reply("", "an empty object")},
    ),
    Route(
        call="who", method="GET", path="/api/v1/session", who=ANNOTATOR, about="whose session this is",
        replies={200: Reply("annotator name custodial")},
    ),
    Route(
        call="tasks", method="GET", path="/api/tasks", who=ANNOTATOR, about="tasks for this annotator",
        query=(
            Field("limit", whole_in_query(1, 8), default=1),
            Field("project", KEY, "of this open project alone", default=b""),
        ),
        replies={200: Reply("tasks", (
            "after at most 3 s: leases that there are and can be answered, and new ones up to `limit`. Each has "
            "`assignment`, `task`, `project`, its `name`, `kind`, `text` or `items` or both, `options`, `many`, `display`; "
            "`guidelines`, a path, where the project has any; and `suggestion` where the project shows it first. With `project`, "
            "leases of other projects that have no heartbeat are released where eight leases leave too little room"
        ))},
        codes={"not-found": "for a `project` that is not open"},
    ),
    Route(
        call="heartbeat", method="POST", path="/api/v1/heartbeat", who=ANNOTATOR,
        about="says that somebody looks at these tasks",
        body=(Field("assignments", hexadecimals(LEASES_MAX, 32)),),
        replies={200: Reply("assignments", (
            "that are this annotator's leases. A lease with a heartbeat is released 45 s after the last one. A lease without any "
            "ends after ten minutes"
        ))},
    ),
    Route(
        call="submit", method="POST", path="/api/submit", who=ANNOTATOR, about="answers a task",
        body=(
            Field("assignment", KEY), Field("answer", wholes(16, 255)), Field("salt", hexadecimal(16), default=None),
            Field("signature", SIGNATURE, "of the Annotation", default=None),
        ),
        replies={
            201: Reply("annotation height receipt", (
                "once the commitment is decided; `suggestion`, too, where the task has one and the project did not show it first"
            )),
            200: Reply("annotation height receipt", "alike, if it was decided before"),
            202: Reply("annotation", "if it is not decided after 10 s: ask again"),
        },
        codes={
            "forbidden": "", "not-found": "", "already-answered": "", "gone": "", "bad-signature": "",
            "misfit": "for an answer that fits not the task",
        },
    ),
    Route(
        call="skip", method="POST", path="/api/v1/assignments/{assignment}/skip", who=ANNOTATOR, about="gives a task back",
        ids=_id("assignment"), body=(Field("reason", LINE, "1..64 characters"),),
        replies={200: Reply("assignment state", ": `skipped`")},
        codes={
            "forbidden": "at another peer than the one that took the lease", "not-found": "",
            "already-answered": "while an answer waits for its decision", "gone": "", "misfit": "",
            "too-many": "above 32 given back at once, and then one in 2 s",
        },
    ),
    Route(
        call="release", method="POST", path="/api/v1/assignments/{assignment}/release", who=ANNOTATOR,
        about="gives a task back, which the annotator may get again", ids=_id("assignment"),
        replies={200: Reply("assignment state", ": `released`")},
        codes={
            "forbidden": "at another peer than the one that took the lease", "not-found": "",
            "already-answered": "while an answer waits for its decision", "gone": "",
            "too-many": "above 32 given back at once, and then one in 2 s",
        },
    ),
    Route(
        call="annotation", method="GET", path="/api/v1/annotations/{annotation}", about="what became of an answer",
        ids=_id("annotation"),
        replies={200: Reply("annotation state height label", (
            "; `state` is `committed`, `opened`, `settled` or `forfeited`, `label` null while there is none"
        ))},
        codes={"not-found": ""},
    ),
    Route(
        call="stats", method="GET", path="/api/stats", about="counts of the network",
        replies={200: Reply("height state_root annotators annotations settled projects", (
            "; of each project that is not closed `project`, `name`, `kind`, `tasks`, `settled`, `review`, `alpha` (null: not "
            "computed yet)"
        ))},
    ),
    Route(
        call="leaderboard", method="GET", path="/api/leaderboard", about="annotators by points",
        query=(Field("limit", whole_in_query(1, 1_000), default=20),),
        replies={200: Reply("height rows", "; of each row `rank`, `annotator`, `name`, `accepted`, `points`")},
    ),
    Route(
        call="export", method="GET", path="/api/v1/projects/{project}/export", about="settled tasks of a project",
        ids=_id("project"), query=(Field("format", one_of(*FORMATS), default="jsonl"),),
        replies={200: Reply("", "the file, see [below](#exports)", "application/octet-stream")},
        codes={"not-found": "", "misfit": "for preferences of a project that is not of pairs", "too-many": "beside others"},
    ),
    Route(
        call="agreement", method="GET", path="/api/v1/projects/{project}/agreement", about="how far annotators agree",
        ids=_id("project"),
        replies={200: Reply("project height alpha pairs", (
            "; fractions are texts such as `2/3`, or null. `pairs`: of each two annotators with at least "
            f"{KAPPA_COMMON_MIN} common answers `first`, `second`, `common`, `kappa`; the {KAPPA_PAIRS_MAX} with most of them"
        ))},
        codes={"not-found": "", "too-many": "beside others"},
    ),
    Route(
        call="guidelines", method="GET", path="/api/v1/projects/{project}/guidelines", about="what annotators read first",
        ids=_id("project"), replies={200: Reply("", "the text", "text/plain")},
        codes={"not-found": "also where this peer does not have the text yet"},
    ),
    Route(
        call="projects", method="GET", path="/api/v1/projects", who=OPERATOR, about="all projects, closed ones too",
        replies={200: Reply("projects", f"; of each `{'`, `'.join(PROJECT.names.split())}`")},
    ),
    Route(
        call="found", method="POST", path="/api/v1/projects", who=OPERATOR, about="makes a project of this peer",
        body=(
            Field("name", LINE), Field("kind", one_of("label", "rating", "pair", "ranking")),
            Field("options", TEXTS, default=()), Field("many", FLAG, default=False),
            Field("votes", whole(1, VOTES_MAX), default=1), Field("price", whole(0, PRICE_MAX), default=1),
            Field("guidelines", TEXT, default=""), Field("suggests_first", FLAG, default=False),
            Field("display", one_of(*DISPLAYS), default="plain"),
            Field("items", whole(0, RANKED_MAX), "of each task, where none is here yet", default=0), GOLD_FROM,
            replace(TASKS, default=()),
        ),
        replies={201: IMPORTED}, codes=DECIDES,
    ),
    Route(
        call="add", method="POST", path="/api/v1/projects/{project}/tasks", who=OPERATOR, about="adds tasks to a project",
        ids=_id("project"), upload=True,
        query=(
            Field("format", one_of("", *FILE_FORMATS), f"of a file as the body, at most {FILE_BYTES_MAX >> 20} MiB", default=""),
            Field("check", whole_in_query(0, 1), "1: see what a file is", default=0), FILE_NAME, GOLD_FROM,
            Field("again", whole_in_query(0, 1), "1: also tasks of a file that was imported before", default=0),
        ),
        body=(TASKS,),
        replies={
            201: IMPORTED, 202: Reply(IMPORTED.names, "if a file goes on being imported", brief="alike,"),
            200: CHECKED,
        },
        codes={
            "not-found": "", "too-many": "while another file is imported",
            "already-imported": "for a file whose tasks are all there: nothing changes", **DECIDES,
        },
    ),
    Route(
        call="check", method="POST", path="/api/v1/projects/check", who=OPERATOR, upload=True,
        about="sees what a file is for a project that is still to be made",
        query=(
            Field("format", one_of(*FILE_FORMATS)), Field("kind", one_of("label", "rating", "pair", "ranking")),
            Field("options", TEXT, "one a line", default=""), Field("many", whole_in_query(0, 1), default=0), FILE_NAME,
            GOLD_FROM,
        ),
        replies={200: CHECKED}, codes={"misfit": "for options", "too-large": ""},
    ),
    Route(
        call="redact", method="POST", path="/api/v1/projects/{project}/redact", who=OPERATOR, about="takes a task's text out",
        ids=_id("project"),
        body=(
            Field("task", whole(0, PAGES_MAX * PAGE_TASKS_MAX), "by its number"),
            Field("reason", TEXT, "for the log of this peer", default=""),
        ),
        replies={200: Reply("said", ", what came of it")}, codes={"not-found": "", "refused": ""},
    ),
    Route(
        call="review", method="GET", path="/api/v1/projects/{project}/review", who=OPERATOR,
        about="tasks and their votes, those first that need the author",
        ids=_id("project"),
        query=(
            Field("state", one_of("", *STATES), default=""), Field("search", TEXT, "in the text", default=""),
            Field("label", one_of("", *map(str, range(OPTIONS_MAX + 1))), "a number of an answer", default=""),
            Field("annotator", TEXT, "its name, or the beginning of its key", default=""),
            Field("after", CURSOR, default=()), Field("limit", whole_in_query(1, 100), default=20),
        ),
        replies={200: Reply("tasks next", (
            ", null at the end; of each `task`, `number`, `state`, `text`, `items`, `suggestion`, `label`, `is_reviewed`, "
            "`height`, `skips`, `votes` (`annotator`, `name`, `state`, `answer`, and of a skip its `reason`)"
        ))},
        codes={"not-found": ""},
    ),
    Route(
        call="decide", method="POST", path="/api/v1/projects/{project}/tasks/{task}/decide", who=OPERATOR,
        about="says the label of a task that waits for its author", ids=(*_id("project"), *_id("task")),
        body=(Field("answer", wholes(16, 255)),), replies={200: Reply("task label")},
        codes={"not-found": "", "misfit": "for an answer that fits not the task", "refused": "if it does not wait"},
    ),
    Route(
        call="confusions", method="GET", path="/api/v1/projects/{project}/confusions", who=OPERATOR,
        about="how annotators answered, against the labels", ids=_id("project"),
        replies={200: Reply("values counts annotators", (
            "; rows of `counts` are labels, columns answers; of each annotator `annotator`, `name`, `count`, `counts`"
        ))},
        codes={"not-found": ""},
    ),
    Route(
        call="project", method="GET", path="/api/v1/projects/{project}", who=OPERATOR, about="one project",
        ids=_id("project"), replies={200: PROJECT}, codes={"not-found": ""},
    ),
    *(
        Route(
            call=call, method="POST", path=f"/api/v1/projects/{{project}}/{call}", who=OPERATOR, about=about,
            ids=_id("project"), replies={200: PROJECT}, codes={"not-found": "", "refused": "also another peer's project"},
        )
        for call, about in (
            ("pause", "gives out no new tasks of it"), ("open", "gives them out again"), ("close", "ends it for ever")
        )
    ),
    Route(
        call="operator_sign_in", method="POST", path="/api/v1/admin/sign-in", about="begins a session of an operator's browser",
        body=(Field("token", TEXT, "of `peer web token`"),), cookie=SETS, of=OPERATOR,
        replies={201: Reply("operator seconds", "that the session lasts; its token comes as the cookie `folkmoot-operator`")},
        codes={"unauthorized": "", "forbidden": "from another site's page"},
    ),
    Route(
        call="operator_sign_out", method="POST", path="/api/v1/admin/sign-out", who=OPERATOR, about="ends it", cookie=ENDS,
        of=OPERATOR, replies={200: Reply("", "an empty object")},
    ),
    Route(
        call="admin_health", method="GET", path="/api/v1/admin/health", who=OPERATOR, about="how this peer is",
        replies={200: Reply(
            "state problem height behind decided_seconds_ago links uptime_seconds memory_bytes disk queues versions"
        )},
    ),
    Route(
        call="alerts", method="GET", path="/api/v1/admin/alerts", who=OPERATOR, about="what an operator should look at",
        replies={200: Reply("alerts", (
            "that are on, the gravest first; of each `severity` (`critical`, `warning`, `info`), `cause`, `about`, `text`, "
            "`since_ms`"
        ))},
    ),
    Route(
        call="people", method="GET", path="/api/v1/admin/people", who=OPERATOR, about="annotators of the network",
        query=(
            Field("search", TEXT, "in names, or the beginning of a key", default=""),
            Field("offset", whole_in_query(0, ANNOTATORS_MAX), default=0), Field("limit", whole_in_query(1, 100), default=50),
        ),
        replies={200: Reply("count people", (
            "; of each `annotator`, `name`, `custodial`, `is_here`, `answers`, `accepted`, `points`, `leases`, `agreement` with "
            "labels, `weight` at closes (both null: not known yet), `is_refused` at this peer"
        ))},
    ),
    Route(
        call="invite", method="POST", path="/api/v1/admin/invite", who=OPERATOR, about="makes an invitation",
        replies={201: Reply("invitation path", "; it enrols one annotator")},
        codes={"refused": "where sign-up is open: nobody needs one"},
    ),
    *(
        Route(
            call=call, method="POST", path=f"/api/v1/admin/people/{{annotator}}/{call}", who=OPERATOR, about=about,
            ids=_id("annotator"), replies={200: Reply("annotator is_refused")}, codes={"not-found": ""},
        )
        for call, about in (("refuse", "gives an annotator no more tasks here"), ("allow", "gives it tasks again"))
    ),
    Route(
        call="operator_log", method="GET", path="/api/v1/admin/log", who=OPERATOR,
        about="what operators did here, the newest first",
        query=(
            Field("before", whole_in_query(0, 2**53 - 1), "that `number`", default=0),
            Field("limit", whole_in_query(1, 200), default=50),
        ),
        replies={200: Reply("entries", "; of each `number`, `at_ms`, `operator`, `action`, `about`, `result`")},
    ),
    Route(
        call="jobs", method="GET", path="/api/v1/admin/jobs", who=OPERATOR, about="jobs of the network",
        replies={200: Reply("jobs", "as of `peer jobs --json`")},
    ),
    Route(
        call="train", method="POST", path="/api/v1/admin/jobs", who=OPERATOR, about="starts a job",
        body=(
            Field("name", LINE), Field("data", one_of("built-in", "local"), default="built-in"),
            Field("rounds", whole(1, 1_000_000)),
            Field("overrides", TEXTS_BY_NAME, "of other fields of a job, as of `peer train --set`", default=()),
        ),
        replies={201: Reply("job")}, codes={"refused": "also for a field that is none"},
    ),
    Route(
        call="cancel", method="POST", path="/api/v1/admin/jobs/{job}/cancel", who=OPERATOR, about="asks for a job's end",
        ids=_id("job"), replies={200: Reply("said", ", what came of it")}, codes={"refused": ""},
    ),
    Route(
        call="live", method="GET", path="/api/v1/live", about="what the page `/live` shows",
        replies={200: Reply(
            "status jobs rounds peers alerts votes blocks samples labels",
            "as [below](#live)",
        )},
    ),
    Route(
        call="block", method="GET", path="/api/v1/blocks/{height}", about="what shows that a block was decided",
        ids=(Field("height", whole_in_query(1, 2**53 - 1)),),
        replies={200: Reply("height header certificate voters", (
            "; the last three in hex, byte by byte as they are hashed and signed: [how to verify them](#blocks)"
        ))},
        codes={"not-found": "also where this peer has not kept it"},
    ),
    Route(
        call="events", method="GET", path="/api/v1/events", about="what happens, as it does",
        query=(Field("live", whole_in_query(0, 1), "1: `live` events, too", default=0),),
        replies={200: Reply("", "a stream of [server-sent events](#events)", "text/event-stream")},
        codes={"too-many": f"above {LISTENERS_OF_HOST_MAX} streams of one address, {LISTENERS_MAX} in all"},
    ),
    Route(
        call="openapi", method="GET", path="/api/v1/openapi.json", about="this table, for programs",
        replies={200: Reply("openapi info paths components")},
    ),
    Route(
        call="health", method="GET", path="/healthz", about="whether this peer works",
        replies={200: Reply("", "`ok`", "text/plain")}, codes={"unhealthy": "with the reason"},
    ),
    Route(
        call="metrics", method="GET", path="/metrics", about="counts of this peer, for Prometheus",
        replies={200: Reply("", "Prometheus' text format", "text/plain")},
        codes={"unauthorized": "without `O`, unless a program of this machine asks by itself"},
    ),
    Route(
        call="start", method="GET", path="/", about="leads to a page for people",
        replies={302: Reply("", f"to `{START.path}`", "text/plain")},
    ),
    *(
        Route(
            call=page.call, method="GET", path=page.path, about="a page for people",
            replies={200: Reply("", "HTML", "text/html")},
        )
        for page in PAGES
    ),
    *(
        Route(
            call=call, method="GET", path=f"/{call}/{{name}}", about="its files", ids=(Field("name", TEXT),),
            replies={200: Reply("", "a file", "application/octet-stream")}, codes={"not-found": ""},
        )
        for call in ("static", "vendor")
    ),
)  # fmt: skip


# The documents --------------------------------------------------------------------------------------------------------


def table() -> list[str]:
    """Rows of docs/protocol/curation.md."""
    return [f"| `{route.method} {route.path}` | {_sends(route)} | {_replies(route)} |" for route in ROUTES]


def _sends(route: Route) -> str:
    said = [_shown(item) for item in (*route.query, *route.body)]
    return "; ".join(part for part in (LETTERS[route.who], ", ".join(said)) if part)


def _shown(item: Field) -> str:
    shown = {
        NEEDED: "",
        None: " (custodial: none)",
        False: " (else false)",
        "": " (else empty)",
        (): " (else none)",
        b"": " (else of all)",
    }
    is_number = type(item.default) is int  # 0 is no False
    default = f" (else {item.default})" if is_number else shown.get(item.default, f" (else {item.default})")
    kind = "" if item.kind in (KEY, SIGNATURE, TIME, FLAG, LINE, TEXT) or item.about else f" {item.kind.says}"
    return f"`{item.name}`{kind}{' ' * bool(item.about)}{item.about}{default}"


def _replies(route: Route) -> str:
    said = [f"{status} {reply.text}".replace(" ;", ";").replace(" :", ":") for status, reply in route.replies.items()]
    return ". ".join(["; ".join(said), ", ".join(f"`{code}` {when}".strip() for code, when in route.codes.items())]).rstrip(". ")


def openapi(version: str) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    problem = {
        "type": "object",
        "required": ["title", "status", "code", "detail"],
        "properties": {"status": {"type": "integer"}, "code": {"enum": list(STATUS)}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Folkmoot", "version": version},
        "paths": paths,
        "components": {
            "schemas": {"Problem": problem},
            "securitySchemes": {who: {"type": "http", "scheme": "bearer"} for who in (ANNOTATOR, OPERATOR)},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = {"operationId": route.call, "summary": route.about}
    if route.who:
        found["security"] = [{route.who: []}]
    placed = [("path", item) for item in route.ids] + [("query", item) for item in route.query]
    if placed:
        found["parameters"] = [
            {"name": item.name, "in": place, "required": item.default is NEEDED, "schema": item.kind.schema}
            for place, item in placed
        ]
    if route.body:
        needed = [item.name for item in route.body if item.default is NEEDED]
        properties = {item.name: item.kind.schema for item in route.body}
        schema = {"type": "object", "required": needed, "properties": properties}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    found["responses"] = {str(status): _response(reply) for status, reply in route.replies.items()}
    return found | {"responses": found["responses"] | _problems(route)}


def _response(reply: Reply) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "required": reply.names.split()} if reply.names else {"type": "string"}
    return {"description": reply.text or "the reply", "content": {reply.content_type: {"schema": schema}}}


def _problems(route: Route) -> dict[str, Any]:
    """Its own by status; of all others, `default`."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    by_status: dict[str, list[str]] = {"default": ["a problem"]}
    for code, when in route.codes.items():
        by_status.setdefault(str(STATUS[code]), []).append(f"{code} {when}".strip())
    return {status: {"description": "; ".join(said), "content": content} for status, said in by_status.items()}
