"""HTTP calls of annotators, operators and programs. Each names the method that handles it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

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
from curation.service.access_control import ANNOTATOR, AccessControl, Operators
from curation.service.annotators.annotator_api import AnnotatorApi
from curation.service.annotators.session_api import SessionApi
from curation.service.annotators.statement_batcher import StatementBatcher
from curation.service.event_feeds import BlockFeed, LiveFeed
from curation.service.operators.admin_api import AdminApi
from curation.service.operators.project_api import ImportQueue, ProjectApi
from curation.service.operators.review_api import ReviewApi, ReviewState
from curation.service.project_tasks import PageFetcher
from curation.service.public_api import PublicApi
from features.services import ServiceContext
from web.calls import (
    CURSOR,
    FLAG,
    LINE,
    OBJECTS,
    TEXT,
    TEXTS,
    TEXTS_BY_NAME,
    RequestField,
    choice_type,
    hex_list_type,
    hex_type,
    integer_type,
    integers_type,
    query_integer_type,
)
from web.routes import (
    FILE_BYTES_MAX,
    KEY_TYPE,
    OPERATOR,
    SIGNATURE_TYPE,
    TIME_TYPE,
    Route,
    RouteHandlers,
    RouteReply,
    RouteSet,
    key_path_field,
)

PROJECT_REPLY: Final = RouteReply(
    "project name kind state author votes tasks begun settled review options many items price display is_mine",
    short_text="the project, as in the list",
)
SIGN_IN_REPLY: Final = RouteReply("annotator name seconds", "that the session lasts; its token comes as the cookie `folkmoot`")
FILE_FORMATS: Final = ("jsonl", "csv", "json")
FILE_NAME: Final = RequestField("name", LINE, "the file's, for what is said of its lines", default="")
PREVIEW_REPLY: Final = RouteReply(
    "count items preview problems",
    ": nothing is imported. Where there are any, `notes`, sentences for people, and `already`, the number of tasks that an "
    "earlier import of the same tasks has added to the project",
)
IMPORT_REPLY: Final = RouteReply(
    PROJECT_REPLY.field_names,
    "and, where there are any, `notes`, sentences for people",
    short_text=PROJECT_REPLY.short_text + ",",
)
GOLD_FROM: Final = RequestField("gold_from", TEXT, "the field of the tasks with the right answers", default="")
TASKS: Final = RequestField("tasks", OBJECTS, "as lines of a [JSONL file](../reference/file-formats.md#task-files)")
DECISION_CODES: Final = {"misfit": "for what fits no project", "refused": "if the network does"}
_ROUTES: Final = (
    Route(
        handler=PublicApi.network_info, method="GET", path="/api/v1/network", about="which network and peer this is",
        replies={200: RouteReply(
            "name wire chain_id peer_key height time_ms sign_up", "; `time_ms` of the last block, `sign_up` `open` or `invited`"
        )},
    ),
    Route(
        handler=SessionApi.enrol_annotator, method="POST", path="/api/v1/annotators", about="enrols an annotator", by_host=True,
        body_fields=(
            RequestField("key", KEY_TYPE), RequestField("name", LINE), RequestField("signature", SIGNATURE_TYPE, "of the Enrol"),
            RequestField("custodial", FLAG, default=False), RequestField("invitation", TEXT, default=""),
        ),
        replies={201: RouteReply("annotator", "once decided; said again, the same")},
        problem_codes={
            "forbidden": "without an invitation that is free, or without a place", "already-enrolled": "", "bad-signature": "",
            "misfit": "for a name", "too-many": "for one address, where sign-up is open",
        },
    ),
    Route(
        handler=SessionApi.create_challenge, method="POST", path="/api/v1/challenges", about="a nonce for a session",
        by_host=True, body_fields=(RequestField("key", KEY_TYPE),),
        replies={201: RouteReply("nonce expires_ms", "of the session to come, a day ahead. The nonce waits ten minutes")},
    ),
    Route(
        handler=SessionApi.create_session, method="POST", path="/api/v1/sessions", about="begins a session",
        body_fields=(
            RequestField("key", KEY_TYPE), RequestField("nonce", hex_type(16)), RequestField("expires_ms", TIME_TYPE),
            RequestField("signature", SIGNATURE_TYPE, "of the Session"),
        ),
        replies={201: RouteReply("token", "; a nonce serves once")},
        problem_codes={
            "unauthorized": "for another nonce", "forbidden": "if the key is not enrolled", "bad-signature": "",
            "misfit": "if `expires_ms` is over or further away than was said",
        },
    ),
    Route(
        handler=SessionApi.sign_up, method="POST", path="/api/v1/sign-up",
        about="enrols an annotator whose key this peer keeps", by_host=True,
        body_fields=(RequestField("name", LINE), RequestField("passphrase", TEXT, "8..256 characters"),
            RequestField("invitation", TEXT, default="")),
        sets_cookie=ANNOTATOR, replies={201: SIGN_IN_REPLY},
        problem_codes={
            "misfit": "for a name or a passphrase", "already-enrolled": "if the name is taken here",
            "forbidden": "as for annotators, or from another site's page",
            "too-many": "for one address, or after wrong passphrases",
        },
    ),
    Route(
        handler=SessionApi.sign_in, method="POST", path="/api/v1/sign-in", about="begins a session of such an annotator",
        by_host=True,
        body_fields=(RequestField("name", LINE), RequestField("passphrase", TEXT)),
        sets_cookie=ANNOTATOR, replies={201: SIGN_IN_REPLY},
        problem_codes={
            "unauthorized": "for another name or passphrase", "forbidden": "if it is not enrolled, or from another site's page",
            "too-many": "for one address, or after wrong passphrases",
        },
    ),
    Route(
        handler=SessionApi.sign_out, method="POST", path="/api/v1/sign-out", client=ANNOTATOR, about="ends a session",
        ends_cookie=ANNOTATOR, replies={200: RouteReply("", "an empty object")},
    ),
    Route(
        handler=SessionApi.session_info, method="GET", path="/api/v1/session", client=ANNOTATOR, about="whose session this is",
        replies={200: RouteReply("annotator name custodial")},
    ),
    Route(
        handler=AnnotatorApi.lease_tasks, method="GET", path="/api/tasks", client=ANNOTATOR, about="tasks for this annotator",
        query_fields=(
            RequestField("limit", query_integer_type(1, 8), default=1),
            RequestField("project", KEY_TYPE, "of this open project alone", default=b""),
        ),
        replies={200: RouteReply("tasks", (
            "after at most 3 s: leases that there are and can be answered, and new ones up to `limit`. Each has "
            "`assignment`, `task`, `project`, its `name`, `kind`, `text` or `items` or both, `options`, `many`, `display`; "
            "`guidelines`, a path, where the project has any; and `suggestion` where the project shows it first. With `project`, "
            "leases of other projects that have no heartbeat are released where eight leases leave too little room"
        ))},
        problem_codes={"not-found": "for a `project` that is not open"},
    ),
    Route(
        handler=AnnotatorApi.heartbeat, method="POST", path="/api/v1/heartbeat", client=ANNOTATOR,
        about="says that somebody looks at these tasks",
        body_fields=(RequestField("assignments", hex_list_type(LEASES_MAX, 32)),),
        replies={200: RouteReply("assignments", (
            "that are this annotator's leases. A lease with a heartbeat is released 45 s after the last one. A lease without any "
            "ends after ten minutes"
        ))},
    ),
    Route(
        handler=AnnotatorApi.submit_answer, method="POST", path="/api/submit", client=ANNOTATOR, about="answers a task",
        body_fields=(
            RequestField("assignment", KEY_TYPE), RequestField("answer", integers_type(16, 255)),
            RequestField("salt", hex_type(16), default=None),
            RequestField("signature", SIGNATURE_TYPE, "of the Annotation", default=None),
        ),
        replies={
            201: RouteReply("annotation height receipt", (
                "once the commitment is decided; `suggestion`, too, where the task has one and the project did not show it first"
            )),
            200: RouteReply("annotation height receipt", "alike, if it was decided before"),
            202: RouteReply("annotation", "if it is not decided after 10 s: ask again"),
        },
        problem_codes={
            "forbidden": "", "not-found": "", "already-answered": "", "gone": "", "bad-signature": "",
            "misfit": "for an answer that fits not the task",
        },
    ),
    Route(
        handler=AnnotatorApi.skip_task, method="POST", path="/api/v1/assignments/{assignment}/skip", client=ANNOTATOR,
        about="gives a task back",
        path_fields=key_path_field("assignment"), body_fields=(RequestField("reason", LINE, "1..64 characters"),),
        replies={200: RouteReply("assignment state", ": `skipped`")},
        problem_codes={
            "forbidden": "at another peer than the one that took the lease", "not-found": "",
            "already-answered": "while an answer waits for its decision", "gone": "", "misfit": "",
            "too-many": "above 32 given back at once, and then one in 2 s",
        },
    ),
    Route(
        handler=AnnotatorApi.release_task, method="POST", path="/api/v1/assignments/{assignment}/release", client=ANNOTATOR,
        about="gives a task back, which the annotator may get again", path_fields=key_path_field("assignment"),
        replies={200: RouteReply("assignment state", ": `released`")},
        problem_codes={
            "forbidden": "at another peer than the one that took the lease", "not-found": "",
            "already-answered": "while an answer waits for its decision", "gone": "",
            "too-many": "above 32 given back at once, and then one in 2 s",
        },
    ),
    Route(
        handler=AnnotatorApi.annotation_status, method="GET", path="/api/v1/annotations/{annotation}",
        about="what became of an answer", path_fields=key_path_field("annotation"),
        replies={200: RouteReply("annotation state height label", (
            "; `state` is `committed`, `opened`, `settled` or `forfeited`, `label` null while there is none"
        ))},
        problem_codes={"not-found": ""},
    ),
    Route(
        handler=PublicApi.network_stats, method="GET", path="/api/stats", about="counts of the network",
        replies={200: RouteReply("height state_root annotators annotations settled projects", (
            "; of each project that is not closed `project`, `name`, `kind`, `tasks`, `settled`, `review`, `alpha` (null: not "
            "computed yet)"
        ))},
    ),
    Route(
        handler=PublicApi.show_leaderboard, method="GET", path="/api/leaderboard", about="annotators by points",
        query_fields=(RequestField("limit", query_integer_type(1, 1_000), default=20),),
        replies={200: RouteReply("height rows", "; of each row `rank`, `annotator`, `name`, `accepted`, `points`")},
    ),
    Route(
        handler=PublicApi.export_project, method="GET", path="/api/v1/projects/{project}/export",
        about="settled tasks of a project", path_fields=key_path_field("project"),
        query_fields=(RequestField("format", choice_type(*FORMATS), default="jsonl"),),
        replies={200: RouteReply("", "the file, see [below](#exports)", "application/octet-stream")},
        problem_codes={"not-found": "", "misfit": "for preferences of a project that is not of pairs",
            "too-many": "beside others"},
    ),
    Route(
        handler=PublicApi.project_agreement, method="GET", path="/api/v1/projects/{project}/agreement",
        about="how far annotators agree",
        path_fields=key_path_field("project"),
        replies={200: RouteReply("project height alpha pairs", (
            "; fractions are texts such as `2/3`, or null. `pairs`: of each two annotators with at least "
            f"{KAPPA_COMMON_MIN} common answers `first`, `second`, `common`, `kappa`; the {KAPPA_PAIRS_MAX} with most of them"
        ))},
        problem_codes={"not-found": "", "too-many": "beside others"},
    ),
    Route(
        handler=AnnotatorApi.guidelines, method="GET", path="/api/v1/projects/{project}/guidelines",
        about="what annotators read first", path_fields=key_path_field("project"),
        replies={200: RouteReply("", "the text", "text/plain")},
        problem_codes={"not-found": "also where this peer does not have the text yet"},
    ),
    Route(
        handler=ProjectApi.list_projects, method="GET", path="/api/v1/projects", client=OPERATOR,
        about="all projects, closed ones too",
        replies={200: RouteReply("projects", f"; of each `{'`, `'.join(PROJECT_REPLY.field_names.split())}`")},
    ),
    Route(
        handler=ProjectApi.create_project, method="POST", path="/api/v1/projects", client=OPERATOR,
        about="makes a project of this peer",
        body_fields=(
            RequestField("name", LINE), RequestField("kind", choice_type("label", "rating", "pair", "ranking")),
            RequestField("options", TEXTS, default=()), RequestField("many", FLAG, default=False),
            RequestField("votes", integer_type(1, VOTES_MAX), default=1),
            RequestField("price", integer_type(0, PRICE_MAX), default=1),
            RequestField("guidelines", TEXT, default=""), RequestField("suggests_first", FLAG, default=False),
            RequestField("display", choice_type(*(display.value for display in TextFormat)), default="plain"),
            RequestField("items", integer_type(0, RANKED_MAX), "of each task, where none is here yet", default=0), GOLD_FROM,
            replace(TASKS, default=()),
        ),
        replies={201: IMPORT_REPLY}, problem_codes=DECISION_CODES,
    ),
    Route(
        handler=ProjectApi.add_tasks, method="POST", path="/api/v1/projects/{project}/tasks", client=OPERATOR,
        about="adds tasks to a project",
        path_fields=key_path_field("project"), upload=True,
        query_fields=(
            RequestField("format", choice_type("", *FILE_FORMATS), f"of a file as the body, at most {FILE_BYTES_MAX >> 20} MiB",
                default=""),
            RequestField("check", query_integer_type(0, 1), "1: see what a file is", default=0), FILE_NAME, GOLD_FROM,
            RequestField("again", query_integer_type(0, 1), "1: also tasks of a file that was imported before", default=0),
        ),
        body_fields=(TASKS,),
        replies={
            201: IMPORT_REPLY, 202: RouteReply(IMPORT_REPLY.field_names, "if a file goes on being imported", short_text="alike,"),
            200: PREVIEW_REPLY,
        },
        problem_codes={
            "not-found": "", "too-many": "while another file is imported",
            "already-imported": "for a file whose tasks are all there: nothing changes", **DECISION_CODES,
        },
    ),
    Route(
        handler=ProjectApi.preview_import, method="POST", path="/api/v1/projects/check", client=OPERATOR, upload=True,
        about="sees what a file is for a project that is still to be made",
        query_fields=(
            RequestField("format", choice_type(*FILE_FORMATS)),
            RequestField("kind", choice_type("label", "rating", "pair", "ranking")),
            RequestField("options", TEXT, "one a line", default=""), RequestField("many", query_integer_type(0, 1), default=0),
            FILE_NAME,
            GOLD_FROM,
        ),
        replies={200: PREVIEW_REPLY}, problem_codes={"misfit": "for options", "too-large": ""},
    ),
    Route(
        handler=ProjectApi.redact_task, method="POST", path="/api/v1/projects/{project}/redact", client=OPERATOR,
        about="takes a task's text out",
        path_fields=key_path_field("project"),
        body_fields=(
            RequestField("task", integer_type(0, PAGES_MAX * PAGE_TASKS_MAX), "by its number"),
            RequestField("reason", TEXT, "for the log of this peer", default=""),
        ),
        replies={200: RouteReply("said", ", what came of it")}, problem_codes={"not-found": "", "refused": ""},
    ),
    Route(
        handler=ReviewApi.list_review_tasks, method="GET", path="/api/v1/projects/{project}/review", client=OPERATOR,
        about="tasks and their votes, those first that need the author",
        path_fields=key_path_field("project"),
        query_fields=(
            RequestField("state", choice_type("", *(state.value for state in ReviewState)), default=""),
            RequestField("search", TEXT, "in the text", default=""),
            RequestField("label", choice_type("", *map(str, range(OPTIONS_MAX + 1))), "a number of an answer", default=""),
            RequestField("annotator", TEXT, "its name, or the beginning of its key", default=""),
            RequestField("after", CURSOR, default=()), RequestField("limit", query_integer_type(1, 100), default=20),
        ),
        replies={200: RouteReply("tasks next", (
            ", null at the end; of each `task`, `number`, `state`, `text`, `items`, `suggestion`, `label`, `is_reviewed`, "
            "`height`, `skips`, `votes` (`annotator`, `name`, `state`, `answer`, and of a skip its `reason`)"
        ))},
        problem_codes={"not-found": ""},
    ),
    Route(
        handler=ReviewApi.decide_task, method="POST", path="/api/v1/projects/{project}/tasks/{task}/decide", client=OPERATOR,
        about="says the label of a task that waits for its author",
        path_fields=(*key_path_field("project"), *key_path_field("task")),
        body_fields=(RequestField("answer", integers_type(16, 255)),), replies={200: RouteReply("task label")},
        problem_codes={"not-found": "", "misfit": "for an answer that fits not the task", "refused": "if it does not wait"},
    ),
    Route(
        handler=ReviewApi.confusion_matrices, method="GET", path="/api/v1/projects/{project}/confusions", client=OPERATOR,
        about="how annotators answered, against the labels", path_fields=key_path_field("project"),
        replies={200: RouteReply("values counts annotators", (
            "; rows of `counts` are labels, columns answers; of each annotator `annotator`, `name`, `count`, `counts`"
        ))},
        problem_codes={"not-found": ""},
    ),
    Route(
        handler=ProjectApi.show_project, method="GET", path="/api/v1/projects/{project}", client=OPERATOR, about="one project",
        path_fields=key_path_field("project"), replies={200: PROJECT_REPLY}, problem_codes={"not-found": ""},
    ),
    *(
        Route(
            handler=handler, method="POST", path=f"/api/v1/projects/{{project}}/{call}", client=OPERATOR,
            about=about,
            path_fields=key_path_field("project"), replies={200: PROJECT_REPLY},
            problem_codes={"not-found": "", "refused": "also another peer's project"},
        )
        for call, handler, about in (
            ("pause", ProjectApi.pause_project, "gives out no new tasks of it"),
            ("open", ProjectApi.open_project, "gives them out again"),
            ("close", ProjectApi.close_project, "ends it for ever"),
        )
    ),
    Route(
        handler=AdminApi.operator_sign_in, method="POST", path="/api/v1/admin/sign-in",
        about="begins a session of an operator's browser",
        body_fields=(RequestField("token", TEXT, "of `peer web token`"),), sets_cookie=OPERATOR,
        replies={201: RouteReply("operator seconds",
            "that the session lasts; its token comes as the cookie `folkmoot-operator`")},
        problem_codes={"unauthorized": "", "forbidden": "from another site's page"},
    ),
    Route(
        handler=AdminApi.operator_sign_out, method="POST", path="/api/v1/admin/sign-out", client=OPERATOR, about="ends it",
        ends_cookie=OPERATOR, replies={200: RouteReply("", "an empty object")},
    ),
    Route(
        handler=AdminApi.admin_health, method="GET", path="/api/v1/admin/health", client=OPERATOR, about="how this peer is",
        replies={200: RouteReply(
            "state problem height heights_behind decided_seconds_ago links uptime_seconds memory_bytes disk queues versions"
        )},
    ),
    Route(
        handler=AdminApi.list_alerts, method="GET", path="/api/v1/admin/alerts", client=OPERATOR,
        about="what an operator should look at",
        replies={200: RouteReply("alerts", (
            "that are on, the gravest first; of each `severity` (`critical`, `warning`, `info`), `cause`, `about`, `text`, "
            "`since_ms`"
        ))},
    ),
    Route(
        handler=AdminApi.list_annotators, method="GET", path="/api/v1/admin/people", client=OPERATOR,
        about="annotators of the network",
        query_fields=(
            RequestField("search", TEXT, "in names, or the beginning of a key", default=""),
            RequestField("offset", query_integer_type(0, ANNOTATORS_MAX), default=0),
            RequestField("limit", query_integer_type(1, 100), default=50),
        ),
        replies={200: RouteReply("count people", (
            "; of each `annotator`, `name`, `custodial`, `is_here`, `answers`, `accepted`, `points`, `leases`, `agreement` with "
            "labels, `weight` at closes (both null: not known yet), `is_refused` at this peer"
        ))},
    ),
    Route(
        handler=AdminApi.create_invitation, method="POST", path="/api/v1/admin/invite", client=OPERATOR,
        about="makes an invitation",
        replies={201: RouteReply("invitation path", "; it enrols one annotator")},
        problem_codes={"refused": "where sign-up is open: nobody needs one"},
    ),
    *(
        Route(
            handler=handler, method="POST", path=f"/api/v1/admin/people/{{annotator}}/{call}",
            client=OPERATOR, about=about,
            path_fields=key_path_field("annotator"), replies={200: RouteReply("annotator is_refused")},
            problem_codes={"not-found": ""},
        )
        for call, handler, about in (
            ("refuse", AdminApi.refuse_annotator, "gives an annotator no more tasks here"),
            ("allow", AdminApi.allow_annotator, "gives it tasks again"),
        )
    ),
    Route(
        handler=AdminApi.operator_log, method="GET", path="/api/v1/admin/log", client=OPERATOR,
        about="what operators did here, the newest first",
        query_fields=(
            RequestField("before", query_integer_type(0, 2**53 - 1), "that `number`", default=0),
            RequestField("limit", query_integer_type(1, 200), default=50),
        ),
        replies={200: RouteReply("entries", "; of each `number`, `at_ms`, `operator`, `action`, `about`, `result`")},
    ),
    Route(
        handler=AdminApi.list_jobs, method="GET", path="/api/v1/admin/jobs", client=OPERATOR, about="jobs of the network",
        replies={200: RouteReply("jobs", "as of `peer jobs --json`")},
    ),
    Route(
        handler=AdminApi.start_job, method="POST", path="/api/v1/admin/jobs", client=OPERATOR, about="starts a job",
        body_fields=(
            RequestField("name", LINE), RequestField("data", choice_type("built-in", "local"), default="built-in"),
            RequestField("rounds", integer_type(1, 1_000_000)),
            RequestField("overrides", TEXTS_BY_NAME, "of other fields of a job, as of `peer train --set`", default=()),
        ),
        replies={201: RouteReply("job")}, problem_codes={"refused": "also for a field that is none"},
    ),
    Route(
        handler=AdminApi.cancel_job, method="POST", path="/api/v1/admin/jobs/{job}/cancel", client=OPERATOR,
        about="asks for a job's end",
        path_fields=key_path_field("job"), replies={200: RouteReply("said", ", what came of it")}, problem_codes={"refused": ""},
    ),
    Route(
        handler=LiveFeed.live_snapshot, method="GET", path="/api/v1/live", about="what the page `/live` shows",
        replies={200: RouteReply(
            "status jobs rounds peers alerts votes blocks samples labels",
            "as [below](#live)",
        )},
    ),
    Route(
        handler=LiveFeed.block_proof, method="GET", path="/api/v1/blocks/{height}", about="what shows that a block was decided",
        path_fields=(RequestField("height", query_integer_type(1, 2**53 - 1)),),
        replies={200: RouteReply("height header certificate voters", (
            "; the last three in hex, byte by byte as they are hashed and signed: [how to verify them](#blocks)"
        ))},
        problem_codes={"not-found": "also where this peer has not kept it"},
    ),
)  # fmt: skip


def make_handlers(desk: ServiceContext) -> RouteHandlers:
    doors, fetching, live, gatherer = AccessControl(desk.folder), PageFetcher(desk), LiveFeed(desk), StatementBatcher(desk)
    sessions = SessionApi(desk, doors, gatherer)
    annotating = AnnotatorApi(desk, doors, fetching, sessions, gatherer)
    operators = Operators(desk.folder, doors, sessions.is_annotator)
    imports, blocks = ImportQueue(desk, operators), BlockFeed(desk, gatherer)
    return RouteHandlers(
        objects=(
            sessions,
            annotating,
            PublicApi(desk),
            ProjectApi(desk, operators, imports),
            ReviewApi(desk, operators),
            AdminApi(desk, doors, operators, gatherer),
            live,
        ),
        authorizers={ANNOTATOR: sessions.require_session, OPERATOR: operators.require_operator},
        metrics=blocks.metrics,
        event_feeds=(blocks.event_feed, live.event_feed),
        background_tasks=(
            gatherer.run,
            annotating.run_openings_and_expiry,
            fetching.run,
            live.run_label_counter,
            imports.run,
        ),
    )


HTTP_ROUTES: Final = RouteSet(
    prefixes=("/api/v1", "/api/tasks", "/api/submit", "/api/stats", "/api/leaderboard"),
    routes=_ROUTES,
    make_handlers=make_handlers,
    problem_statuses={"already-answered": 409, "already-enrolled": 409, "already-imported": 409, "bad-signature": 422},
)
