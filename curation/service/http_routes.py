"""HTTP routes for annotators, operators and programs. Each route names the method that handles its requests."""

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
    authorize_by_token,
    key_path_field,
)

PROJECT_REPLY: Final = RouteReply(
    "project name kind state author votes tasks begun settled review options many items price display is_mine",
    short_text="fields of the project, as in the list of projects",
)
SIGN_IN_REPLY: Final = RouteReply(
    "annotator name seconds", "`seconds` is the lifetime of the session, whose token is set as the cookie `folkmoot`"
)
FILE_FORMATS: Final = ("jsonl", "csv", "json")
FILE_NAME: Final = RequestField("name", LINE, "name of the file, which is quoted in problems", default="")
PREVIEW_REPLY: Final = RouteReply(
    "count items preview problems",
    "Nothing is imported. There may be `notes` for people, and `already`, the number of these tasks that the project has from an "
    "earlier import",
)
IMPORT_REPLY: Final = RouteReply(
    PROJECT_REPLY.field_names,
    "There may be `notes` for people",
    short_text=PROJECT_REPLY.short_text,
)
GOLD_FROM: Final = RequestField("gold_from", TEXT, "field of the tasks with known answers, which make gold", default="")
TASKS: Final = RequestField("tasks", OBJECTS, "like lines of a [JSONL file](../reference/file-formats.md#task-files)")
DECISION_CODES: Final = {"misfit": "the project or a task is invalid", "refused": "the network refuses the transaction"}
_ROUTES: Final = (
    Route(
        handler=PublicApi.network_info, method="GET", path="/api/v1/network", about="Describe the network and this peer",
        replies={200: RouteReply(
            "name wire chain_id peer_key height time_ms sign_up",
            "`time_ms` is the time of the last block, and `sign_up` is `open` or `invited`",
        )},
    ),
    Route(
        handler=SessionApi.enrol_annotator, method="POST", path="/api/v1/annotators", about="Enrol an annotator", by_host=True,
        body_fields=(
            RequestField("key", KEY_TYPE), RequestField("name", LINE),
            RequestField("signature", SIGNATURE_TYPE, "of the EnrolStatement"),
            RequestField("custodial", FLAG, default=False), RequestField("invitation", TEXT, default=""),
        ),
        replies={201: RouteReply("annotator", "Sent once the enrolment is decided. A repeated call gets the same reply")},
        problem_codes={
            "forbidden": "no free invitation, or no place left", "already-enrolled": "", "bad-signature": "",
            "misfit": "the name is invalid", "too-many": "too many sign-ups of one address, where sign-up is open",
        },
    ),
    Route(
        handler=SessionApi.create_challenge, method="POST", path="/api/v1/challenges", about="Request a nonce for a session",
        by_host=True, body_fields=(RequestField("key", KEY_TYPE),),
        replies={201: RouteReply("nonce expires_ms", (
            "`expires_ms` is the end of the session, one day ahead. The nonce is valid for ten minutes"
        ))},
    ),
    Route(
        handler=SessionApi.create_session, method="POST", path="/api/v1/sessions", about="Begin a session",
        body_fields=(
            RequestField("key", KEY_TYPE), RequestField("nonce", hex_type(16)), RequestField("expires_ms", TIME_TYPE),
            RequestField("signature", SIGNATURE_TYPE, "of the SessionStatement"),
        ),
        replies={201: RouteReply("token", "A nonce is valid for one session")},
        problem_codes={
            "unauthorized": "the nonce is unknown, used or expired", "forbidden": "the key is not enrolled", "bad-signature": "",
            "misfit": "`expires_ms` has passed, or is later than in the challenge",
        },
    ),
    Route(
        handler=SessionApi.sign_up, method="POST", path="/api/v1/sign-up",
        about="Create the account of a custodial annotator, whose key this peer keeps, and begin a session", by_host=True,
        body_fields=(RequestField("name", LINE), RequestField("passphrase", TEXT, "8 to 256 characters"),
            RequestField("invitation", TEXT, default="")),
        sets_cookie=ANNOTATOR, replies={201: SIGN_IN_REPLY},
        problem_codes={
            "misfit": "the name or the passphrase is invalid", "already-enrolled": "the name is taken at this peer",
            "forbidden": "no free invitation, no place left, or a page of another site",
            "too-many": "too many calls of one address, or wrong passphrases",
        },
    ),
    Route(
        handler=SessionApi.sign_in, method="POST", path="/api/v1/sign-in", about="Begin a session of a custodial annotator",
        by_host=True,
        body_fields=(RequestField("name", LINE), RequestField("passphrase", TEXT)),
        sets_cookie=ANNOTATOR, replies={201: SIGN_IN_REPLY},
        problem_codes={
            "unauthorized": "the name or the passphrase is wrong",
            "forbidden": "the account is not enrolled, or a page of another site",
            "too-many": "too many calls of one address, or wrong passphrases",
        },
    ),
    Route(
        handler=SessionApi.sign_out, method="POST", path="/api/v1/sign-out", client=ANNOTATOR, about="End the session",
        ends_cookie=ANNOTATOR, replies={200: RouteReply("", "An empty object")},
    ),
    Route(
        handler=SessionApi.session_info, method="GET", path="/api/v1/session", client=ANNOTATOR,
        about="Describe the annotator of the session",
        replies={200: RouteReply("annotator name custodial")},
    ),
    Route(
        handler=AnnotatorApi.lease_tasks, method="GET", path="/api/tasks", client=ANNOTATOR,
        about="Fetch tasks, which are leased to the annotator",
        query_fields=(
            RequestField("limit", query_integer_type(1, 8), default=1),
            RequestField("project", KEY_TYPE, "only tasks of this open project", default=b""),
        ),
        replies={200: RouteReply("tasks", (
            "Sent after at most 3 s: leases of the annotator that can be answered, and new ones up to `limit`. Each task has "
            "`assignment`, `task`, `project`, `name` of the project, `kind`, `text` or `items` or both, `options`, `many` and "
            "`display`. It may have `guidelines`, a path, and `suggestion` if the project shows it first. With `project`, leases "
            "of other projects without a heartbeat are released if the limit of eight leases leaves too little room"
        ))},
        problem_codes={"not-found": "the project is not open"},
    ),
    Route(
        handler=AnnotatorApi.heartbeat, method="POST", path="/api/v1/heartbeat", client=ANNOTATOR,
        about="Keep leases alive while their tasks are shown",
        body_fields=(RequestField("assignments", hex_list_type(LEASES_MAX, 32)),),
        replies={200: RouteReply("assignments", (
            "The given assignments that are leased to this annotator. A lease is released 45 s after its last heartbeat. A lease "
            "without heartbeats ends after ten minutes"
        ))},
    ),
    Route(
        handler=AnnotatorApi.submit_answer, method="POST", path="/api/submit", client=ANNOTATOR, about="Submit an answer",
        body_fields=(
            RequestField("assignment", KEY_TYPE), RequestField("answer", integers_type(16, 255)),
            RequestField("salt", hex_type(16), "omitted by custodial annotators", default=None),
            RequestField(
                "signature", SIGNATURE_TYPE, "of the AnnotationStatement; omitted by custodial annotators", default=None
            ),
        ),
        replies={
            201: RouteReply("annotation height receipt", (
                "Sent once the commitment is decided. There is a `suggestion` if the task has one that was not shown first"
            )),
            200: RouteReply("annotation height receipt", "The commitment was decided before"),
            202: RouteReply("annotation", "The commitment is not decided after 10 s: send the same call again"),
        },
        problem_codes={
            "forbidden": "", "not-found": "", "already-answered": "", "gone": "", "bad-signature": "",
            "misfit": "the answer does not fit the task",
        },
    ),
    Route(
        handler=AnnotatorApi.skip_task, method="POST", path="/api/v1/assignments/{assignment}/skip", client=ANNOTATOR,
        about="Skip a task",
        path_fields=key_path_field("assignment"), body_fields=(RequestField("reason", LINE, "1 to 64 characters"),),
        replies={200: RouteReply("assignment state", "`state` is `skipped`")},
        problem_codes={
            "forbidden": "another peer took the lease", "not-found": "",
            "already-answered": "an answer waits for its decision", "gone": "", "misfit": "",
            "too-many": "more than 32 tasks returned at once, then more than one in 2 s",
        },
    ),
    Route(
        handler=AnnotatorApi.release_task, method="POST", path="/api/v1/assignments/{assignment}/release", client=ANNOTATOR,
        about="Release a task. The annotator may get it again", path_fields=key_path_field("assignment"),
        replies={200: RouteReply("assignment state", "`state` is `released`")},
        problem_codes={
            "forbidden": "another peer took the lease", "not-found": "",
            "already-answered": "an answer waits for its decision", "gone": "",
            "too-many": "more than 32 tasks returned at once, then more than one in 2 s",
        },
    ),
    Route(
        handler=AnnotatorApi.annotation_status, method="GET", path="/api/v1/annotations/{annotation}",
        about="Show the state of an answer", path_fields=key_path_field("annotation"),
        replies={200: RouteReply("annotation state height label", (
            "`state` is `committed`, `opened`, `settled` or `forfeited`. `label` is null until the task has one"
        ))},
        problem_codes={"not-found": ""},
    ),
    Route(
        handler=PublicApi.network_stats, method="GET", path="/api/stats", about="Show counts of the network",
        replies={200: RouteReply("height state_root annotators annotations settled projects", (
            "Each project that is not closed has `project`, `name`, `kind`, `tasks`, `settled`, `review` and `alpha` (null until "
            "it is computed)"
        ))},
    ),
    Route(
        handler=PublicApi.show_leaderboard, method="GET", path="/api/leaderboard", about="List annotators by points",
        query_fields=(RequestField("limit", query_integer_type(1, 1_000), default=20),),
        replies={200: RouteReply("height rows", "Each row has `rank`, `annotator`, `name`, `accepted` and `points`")},
    ),
    Route(
        handler=PublicApi.export_project, method="GET", path="/api/v1/projects/{project}/export",
        about="Export the settled tasks of a project", path_fields=key_path_field("project"),
        query_fields=(RequestField("format", choice_type(*FORMATS), default="jsonl"),),
        replies={200: RouteReply(
            "", "The file, in one of the [formats of exports](../protocol/curation.md#exports)", "application/octet-stream"
        )},
        problem_codes={"not-found": "", "misfit": "preferences of a project that does not compare pairs",
            "too-many": "too many exports at once"},
    ),
    Route(
        handler=PublicApi.project_agreement, method="GET", path="/api/v1/projects/{project}/agreement",
        about="Show the agreement of annotators",
        path_fields=key_path_field("project"),
        replies={200: RouteReply("project height alpha pairs", (
            "Fractions are texts such as `2/3`, or null. `pairs` has `first`, `second`, `common` and `kappa` of each two "
            f"annotators with at least {KAPPA_COMMON_MIN} common answers; at most {KAPPA_PAIRS_MAX} pairs, best covered first"
        ))},
        problem_codes={"not-found": "", "too-many": "too many exports at once"},
    ),
    Route(
        handler=AnnotatorApi.guidelines, method="GET", path="/api/v1/projects/{project}/guidelines",
        about="Show the guidelines for annotators", path_fields=key_path_field("project"),
        replies={200: RouteReply("", "The text", "text/plain")},
        problem_codes={"not-found": "no such project, or this peer does not have the text yet"},
    ),
    Route(
        handler=ProjectApi.list_projects, method="GET", path="/api/v1/projects", client=OPERATOR,
        about="List all projects, including closed ones",
        replies={200: RouteReply("projects", f"Each project has `{'`, `'.join(PROJECT_REPLY.field_names.split())}`")},
    ),
    Route(
        handler=ProjectApi.create_project, method="POST", path="/api/v1/projects", client=OPERATOR,
        about="Create a project of this peer",
        body_fields=(
            RequestField("name", LINE), RequestField("kind", choice_type("label", "rating", "pair", "ranking")),
            RequestField("options", TEXTS, default=()), RequestField("many", FLAG, default=False),
            RequestField("votes", integer_type(1, VOTES_MAX), default=1),
            RequestField("price", integer_type(0, PRICE_MAX), default=1),
            RequestField("guidelines", TEXT, default=""), RequestField("suggests_first", FLAG, default=False),
            RequestField("display", choice_type(*(display.value for display in TextFormat)), default="plain"),
            RequestField("items", integer_type(0, RANKED_MAX), "items of each task, if the call has no tasks", default=0),
            GOLD_FROM,
            replace(TASKS, default=()),
        ),
        replies={201: IMPORT_REPLY}, problem_codes=DECISION_CODES,
    ),
    Route(
        handler=ProjectApi.add_tasks, method="POST", path="/api/v1/projects/{project}/tasks", client=OPERATOR,
        about="Add tasks to a project, from JSON or from a file",
        path_fields=key_path_field("project"), upload=True,
        query_fields=(
            RequestField(
                "format", choice_type("", *FILE_FORMATS),
                f"format of the file, if the body is a file of at most {FILE_BYTES_MAX >> 20} MiB", default="",
            ),
            RequestField("check", query_integer_type(0, 1), "1 checks the file without an import", default=0),
            FILE_NAME, GOLD_FROM,
            RequestField("again", query_integer_type(0, 1), "1 also adds tasks that an earlier import has added", default=0),
        ),
        body_fields=(TASKS,),
        replies={
            201: IMPORT_REPLY,
            202: RouteReply(IMPORT_REPLY.field_names, "The import continues", short_text=IMPORT_REPLY.short_text),
            200: PREVIEW_REPLY,
        },
        problem_codes={
            "not-found": "", "too-many": "another file is being imported",
            "already-imported": "the project already has all tasks of the file, so nothing changes", **DECISION_CODES,
        },
    ),
    Route(
        handler=ProjectApi.preview_import, method="POST", path="/api/v1/projects/check", client=OPERATOR, upload=True,
        about="Check a file of tasks for a new project, without an import",
        query_fields=(
            RequestField("format", choice_type(*FILE_FORMATS)),
            RequestField("kind", choice_type("label", "rating", "pair", "ranking")),
            RequestField("options", TEXT, "one per line", default=""), RequestField("many", query_integer_type(0, 1), default=0),
            FILE_NAME,
            GOLD_FROM,
        ),
        replies={200: PREVIEW_REPLY}, problem_codes={"misfit": "the options are invalid", "too-large": ""},
    ),
    Route(
        handler=ProjectApi.redact_task, method="POST", path="/api/v1/projects/{project}/redact", client=OPERATOR,
        about="Redact a task: every peer deletes its text",
        path_fields=key_path_field("project"),
        body_fields=(
            RequestField("task", integer_type(0, PAGES_MAX * PAGE_TASKS_MAX), "number of the task"),
            RequestField("reason", TEXT, "kept in this peer's log", default=""),
        ),
        replies={200: RouteReply("said", "The result as a sentence")}, problem_codes={"not-found": "", "refused": ""},
    ),
    Route(
        handler=ReviewApi.list_review_tasks, method="GET", path="/api/v1/projects/{project}/review", client=OPERATOR,
        about="List tasks with their answers. Tasks that need the author come first",
        path_fields=key_path_field("project"),
        query_fields=(
            RequestField("state", choice_type("", *(state.value for state in ReviewState)), default=""),
            RequestField("search", TEXT, "part of the text", default=""),
            RequestField("label", choice_type("", *map(str, range(OPTIONS_MAX + 1))), "number of an option", default=""),
            RequestField("annotator", TEXT, "name, or first digits of the key", default=""),
            RequestField("after", CURSOR, default=()), RequestField("limit", query_integer_type(1, 100), default=20),
        ),
        replies={200: RouteReply("tasks next", (
            "`next` is null at the end. Each task has `task`, `number`, `state`, `text`, `items`, `suggestion`, `label`, "
            "`is_reviewed`, `height`, `skips` and `votes`. Each vote has `annotator`, `name`, `state` and `answer`; a skip has a "
            "`reason`"
        ))},
        problem_codes={"not-found": ""},
    ),
    Route(
        handler=ReviewApi.decide_task, method="POST", path="/api/v1/projects/{project}/tasks/{task}/decide", client=OPERATOR,
        about="Decide the label of a task that waits for its author",
        path_fields=(*key_path_field("project"), *key_path_field("task")),
        body_fields=(RequestField("answer", integers_type(16, 255)),), replies={200: RouteReply("task label")},
        problem_codes={
            "not-found": "",
            "misfit": "the answer does not fit the task",
            "refused": "the task does not wait for its author",
        },
    ),
    Route(
        handler=ReviewApi.confusion_matrices, method="GET", path="/api/v1/projects/{project}/confusions", client=OPERATOR,
        about="Count answers by label, for all annotators and for each", path_fields=key_path_field("project"),
        replies={200: RouteReply("values counts annotators", (
            "Rows of `counts` are labels, columns are answers. Each annotator has `annotator`, `name`, `count` and `counts`"
        ))},
        problem_codes={"not-found": ""},
    ),
    Route(
        handler=ProjectApi.show_project, method="GET", path="/api/v1/projects/{project}", client=OPERATOR, about="Show a project",
        path_fields=key_path_field("project"), replies={200: PROJECT_REPLY}, problem_codes={"not-found": ""},
    ),
    *(
        Route(
            handler=handler, method="POST", path=f"/api/v1/projects/{{project}}/{call}", client=OPERATOR,
            about=about,
            path_fields=key_path_field("project"), replies={200: PROJECT_REPLY},
            problem_codes={
                "not-found": "",
                "refused": "the project belongs to another peer, or the network refuses the transaction",
            },
        )
        for call, handler, about in (
            ("pause", ProjectApi.pause_project, "Pause a project: its tasks are not assigned any more"),
            ("open", ProjectApi.open_project, "Open a paused project"),
            ("close", ProjectApi.close_project, "Close a project permanently"),
        )
    ),
    Route(
        handler=AdminApi.operator_sign_in, method="POST", path="/api/v1/admin/sign-in",
        about="Begin a session of an operator's browser",
        body_fields=(RequestField("token", TEXT, "printed by `peer web token`"),), sets_cookie=OPERATOR,
        replies={201: RouteReply("operator seconds",
            "`seconds` is the lifetime of the session, whose token is set as the cookie `folkmoot-operator`")},
        problem_codes={"unauthorized": "", "forbidden": "a page of another site"},
    ),
    Route(
        handler=AdminApi.operator_sign_out, method="POST", path="/api/v1/admin/sign-out", client=OPERATOR,
        about="End the session",
        ends_cookie=OPERATOR, replies={200: RouteReply("", "An empty object")},
    ),
    Route(
        handler=AdminApi.admin_health, method="GET", path="/api/v1/admin/health", client=OPERATOR,
        about="Show the health of this peer",
        replies={200: RouteReply(
            "state problem height heights_behind decided_seconds_ago links uptime_seconds memory_bytes disk queues versions"
        )},
    ),
    Route(
        handler=AdminApi.list_alerts, method="GET", path="/api/v1/admin/alerts", client=OPERATOR,
        about="List active alerts",
        replies={200: RouteReply("alerts", (
            "Most severe first. Each alert has `severity` (`critical`, `warning`, `info`), `cause`, `about`, `text` and "
            "`since_ms`"
        ))},
    ),
    Route(
        handler=AdminApi.list_annotators, method="GET", path="/api/v1/admin/people", client=OPERATOR,
        about="List annotators of the network",
        query_fields=(
            RequestField("search", TEXT, "part of a name, or first digits of a key", default=""),
            RequestField("offset", query_integer_type(0, ANNOTATORS_MAX), default=0),
            RequestField("limit", query_integer_type(1, 100), default=50),
        ),
        replies={200: RouteReply("count people", (
            "Each person has `annotator`, `name`, `custodial`, `is_here`, `answers`, `accepted`, `points`, `leases`, `agreement` "
            "with labels, `weight` at the close of projects (both null until known), and `is_refused` at this peer"
        ))},
    ),
    Route(
        handler=AdminApi.create_invitation, method="POST", path="/api/v1/admin/invite", client=OPERATOR,
        about="Create an invitation",
        replies={201: RouteReply("invitation path", "The invitation enrols one annotator")},
        problem_codes={"refused": "sign-up is open, so no invitation is needed"},
    ),
    *(
        Route(
            handler=handler, method="POST", path=f"/api/v1/admin/people/{{annotator}}/{call}",
            client=OPERATOR, about=about,
            path_fields=key_path_field("annotator"), replies={200: RouteReply("annotator is_refused")},
            problem_codes={"not-found": ""},
        )
        for call, handler, about in (
            ("refuse", AdminApi.refuse_annotator, "Refuse tasks to an annotator at this peer"),
            ("allow", AdminApi.allow_annotator, "Allow tasks to a refused annotator again"),
        )
    ),
    Route(
        handler=AdminApi.operator_log, method="GET", path="/api/v1/admin/log", client=OPERATOR,
        about="List actions of operators at this peer, newest first",
        query_fields=(
            RequestField("before", query_integer_type(0, 2**53 - 1), "only entries below this `number`; 0: all", default=0),
            RequestField("limit", query_integer_type(1, 200), default=50),
        ),
        replies={200: RouteReply("entries", "Each entry has `number`, `at_ms`, `operator`, `action`, `about` and `result`")},
    ),
    Route(
        handler=AdminApi.list_jobs, method="GET", path="/api/v1/admin/jobs", client=OPERATOR, about="List jobs of the network",
        replies={200: RouteReply("jobs", "Each job as in `peer jobs --json`")},
    ),
    Route(
        handler=AdminApi.start_job, method="POST", path="/api/v1/admin/jobs", client=OPERATOR, about="Start a job",
        body_fields=(
            RequestField("name", LINE), RequestField("data", choice_type("built-in", "local"), default="built-in"),
            RequestField("rounds", integer_type(1, 1_000_000)),
            RequestField("overrides", TEXTS_BY_NAME, "values of other fields of the job, as with `peer train --set`", default=()),
        ),
        replies={201: RouteReply("job")}, problem_codes={"refused": "a field is unknown, or the network refuses the transaction"},
    ),
    Route(
        handler=AdminApi.cancel_job, method="POST", path="/api/v1/admin/jobs/{job}/cancel", client=OPERATOR,
        about="Cancel a job. A job of another member needs the same call at a quorum of voters",
        path_fields=key_path_field("job"), replies={200: RouteReply("said", "The result as a sentence")},
        problem_codes={"refused": ""},
    ),
    Route(
        handler=LiveFeed.live_snapshot, method="GET", path="/api/v1/live", about="Show the data of the page `/live`",
        replies={200: RouteReply(
            "status jobs rounds peers alerts votes blocks samples labels",
            "See [Live](#live)",
        )},
    ),
    Route(
        handler=LiveFeed.block_proof, method="GET", path="/api/v1/blocks/{height}",
        about="Fetch the proof that a block was decided",
        path_fields=(RequestField("height", query_integer_type(1, 2**53 - 1)),),
        replies={200: RouteReply("height header certificate voters", (
            "The last three are hex of the hashed and signed bytes; see [their verification](../protocol/curation.md#blocks)"
        ))},
        problem_codes={"not-found": "no such block, or this peer has not kept it"},
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
        authorizers={
            ANNOTATOR: authorize_by_token(sessions.require_session),
            OPERATOR: authorize_by_token(operators.require_operator),
        },
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
