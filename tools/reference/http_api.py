"""The page of the HTTP API: all calls, from the declarations of the routes, with the rules for each client class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from clients.gateway.http_routes import BODY_BYTES_MAX as GRADIENT_BYTES_MAX
from clients.gateway.http_routes import SAMPLE_BYTES_MAX
from curation.service.annotators.annotator_api import ANSWERS_PER_MINUTE, GIVE_BACK_BURST, GIVE_BACK_INTERVAL_SECONDS
from curation.service.annotators.session_api import ENROLMENT_BURST, ENROLMENT_INTERVAL_SECONDS
from curation.service.public_api import OPEN_EXPORTS_MAX, TURN_WAIT_SECONDS
from peer.features import FEATURES
from tools.reference import table
from web import connection_limits
from web.app import UPLOADS_MAX
from web.calls import REQUIRED, RequestField
from web.event_stream import KEEPALIVE_SECONDS, LISTENER_QUEUE_MAX, LISTENERS_MAX, LISTENERS_OF_HOST_MAX, REPLAY_EVENTS_MAX
from web.large_bodies import LARGE_BODIES_BYTES_MAX
from web.routes import BODY_BYTES_MAX, FILE_BYTES_MAX, OPERATOR, ClientClass, Route
from web.site import load_site

METHOD_STATUS: Final = {"method": 405}  # problem code with its HTTP status that the server itself sends: no handler raises it
CAUSES: Final = {
    "malformed": "The body is no JSON object, or a field has a wrong type or value.",
    "unauthorized": "There is no token, or this peer did not issue it, or it has expired.",
    "forbidden": "The client may not make this call: an annotator's token at a call of operators, a key that "
    "is not enrolled, another annotator's lease, a missing invitation, or a foreign page.",
    "not-found": "There is no such path, project, assignment or block.",
    "method": "The path has no such method.",
    "already-answered": "Another answer to the assignment is decided, or waits for its decision.",
    "already-enrolled": "The key is enrolled under another name or at another peer.",
    "already-imported": "The project already has all tasks of the file. `again=1` adds them once more.",
    "refused": "The network or this peer refuses an operator's request, such as an eleventh open project of one member.",
    "gone": "The annotator has skipped the task, the lease has expired and its place is taken, the task is redacted, or the "
    "project is closed.",
    "too-large": "The body is larger than the call allows.",
    "misdirected": "The `Host` header is no address, not `localhost`, and not in `web_host_names`.",
    "misfit": "A value has the right type, but is invalid: a name, passphrase, time, task or answer.",
    "bad-signature": "The signature is not by this key, or not over this statement, or of another chain.",
    "too-many": "A limit is reached: see [Limits](#limits).",
    "internal": "The peer has an error, which is in its log. It continues.",
    "no-quorum": "The network has not decided the transaction within 10 s. It may still decide it.",
    "stopping": "The peer is stopping.",
    "unhealthy": "The peer does not take part: it is halted, silent, joining, behind, or waits for others.",
}
INTRODUCTION: Final = """\
# HTTP API

A peer with the role `annotator` or `full` serves its pages and this API at the address of the setting `web_listen`.
[Serve annotators](../how-to/serve-annotators.md) shows how to set it up. `python -m tools.reference` writes this page from \
the
declarations of the routes.

Request bodies are JSON objects, except an operator's file of tasks. Replies are JSON objects, unless the call names \
another type.
Bytes are in lower-case hex. All peers of a network give the same replies at one height, except for calls about one peer: \
`network`,
challenges, sessions, tokens, health, logs and live data.

## Authentication

| calls | token |
|---|---|
| public calls | none |
| calls of annotators | token of a session (`POST /api/v1/sessions`), or the cookie `folkmoot` of a custodial annotator |
| calls of operators | token that `peer web token` prints on the peer's machine, valid for a day, or the cookie \
`folkmoot-operator` |

A program sends its token as `Authorization: Bearer TOKEN`. A browser sends the cookie; over TLS the cookies' names have \
the prefix
`__Host-`. A `POST` with a cookie also needs the header `X-Folkmoot: 1` and an `Origin` of this peer. Otherwise the reply is
`forbidden`.

    curl -H "Authorization: Bearer $(peer web token)" http://127.0.0.1:7780/api/v1/projects

A program annotates in these steps:

1. Request the chain id and the peer's key: `GET /api/v1/network`.
2. Sign an [EnrolStatement](../protocol/curation.md#enrolstatement-enrol), once, and send it: `POST /api/v1/annotators`.
3. Request a challenge, sign a [SessionStatement](../protocol/curation.md#sessionstatement-session) with its nonce and
   `expires_ms`, and exchange it for a token: `POST /api/v1/challenges`, then `POST /api/v1/sessions`.
4. Fetch tasks. For each answer draw a salt, sign an
   [AnnotationStatement](../protocol/curation.md#annotationstatement-annotation), and submit: `GET /api/tasks`, then
   `POST /api/submit`.

**Keep each answer with its salt.** After a status 202, a broken connection or a lost reply, send the same bytes again. The \
same
answer with another salt is another answer. A peer writes answer, salt and signature to its disk before it proposes the \
commitment.
After a restart it proposes the commitment again. After the decision, [two more peers](../protocol/curation.md#seals) can \
open it.

## Errors

An error is an object of the type `application/problem+json` (RFC 9457) with `title`, `status`, `code` and `detail`. \
Programs compare
`code`; `detail` is a sentence for people. `too-many` and `no-quorum` often have the header `Retry-After`, in seconds.

"""
LIMITS: Final = f"""
## Limits

A host is an IPv4 address, or a /64 network of IPv6.

| resource | limit | beyond it |
|---|---|---|
| body of a request | {BODY_BYTES_MAX >> 10} KiB; a file of tasks {FILE_BYTES_MAX >> 20} MiB; a request for a gradient \
{GRADIENT_BYTES_MAX >> 20} MiB, for samples {SAMPLE_BYTES_MAX >> 20} MiB | `too-large` |
| larger bodies of programs in memory | {LARGE_BODIES_BYTES_MAX >> 20} MiB; of one token half of the bytes that others leave | \
`too-many` |
| connections | 512, fewer if `ulimit -n` is low; of one host 1/{connection_limits.HOST_SHARE_DIVISOR} of them | the host's \
oldest connection is closed, idle ones first; one that began less than {connection_limits.YOUNG_SECONDS:g} s ago does not count |
| calls that wait for a result | all connections but 1/{connection_limits.VISITOR_SHARE_DIVISOR}; they count for no host | \
a call of the token with the most is answered early; `too-many` if it is the caller's own |
| time until a request's header is complete | {connection_limits.HEADER_SECONDS:g} s | the connection is closed |
| time of a request | {connection_limits.REQUEST_SECONDS:g} s; with a file {connection_limits.FILE_SECONDS:g} s | the \
connection is closed |
| event streams | {LISTENERS_MAX}; of one host {LISTENERS_OF_HOST_MAX} | `too-many` |
| answers of an annotator | {ANSWERS_PER_MINUTE} in a minute | `too-many` |
| tasks that an annotator returns | {GIVE_BACK_BURST} at once, then one in {GIVE_BACK_INTERVAL_SECONDS:g} s | `too-many` |
| sign-ups of one host, where sign-up is open | {ENROLMENT_BURST} at once, then one in {ENROLMENT_INTERVAL_SECONDS / 60:g} \
minutes | `too-many` |
| files of tasks being received | {UPLOADS_MAX}; of one host 1 | `too-many` |
| files of tasks being imported | 1 | `too-many` |
| exports and agreements being computed | 1; others wait for at most {TURN_WAIT_SECONDS:g} s | `too-many` |
| exports being sent | {OPEN_EXPORTS_MAX} | `too-many` |
"""
EVENTS: Final = f"""
## Server-sent events

`GET /api/v1/events` is a stream that lasts until one side closes it. Each event has its number as `id`, and a JSON object \
as data.
Numbers grow, also after a restart of the peer. A new client first gets the newest state. A client with the header \
`Last-Event-ID`
continues after that event. The peer keeps the last {REPLAY_EVENTS_MAX} events; if the event is older, the newest state \
comes first.

| event | sent | data |
|---|---|---|
| `block` | after a block was applied; of several at once, only the last | `height`, `state_root`, `time_ms` |
| `project` | after the counts of a project changed | `height`, `project`, `state`, `tasks`, `settled`, `review` |
| `settled` | after tasks were settled | `height`, `settled`: number of settled tasks in the network |
| `live` | only with `?live=1`: after a new block at once, after other changes at most four times a second | the fields of \
[Live](#live) that changed; of `rounds` and `blocks` only new or changed items |

A comment is sent every {KEEPALIVE_SECONDS:g} s. All clients share the same observations of the peer. A slow client with
{LISTENER_QUEUE_MAX} unread observations is disconnected.

## Live

`GET /api/v1/live` is this peer's view, at most one second old. Peers are named by their
[peer ids](../protocol/values.md#identity). Addresses, paths and processes are left out, since they are only for the operator.

| field | meaning |
|---|---|
| `status` | this peer: name, role, height, view, voters, quorum, state, and the reason that it waits or halts |
| `jobs` | running and finished jobs: the open round, accepted and rejected proposals, suspended trainers, and in \
`reexecution_limits` re-executors that are called last or not at all, with reasons |
| `rounds` | the last 200 closed rounds: verdicts, `vouchers` (voters that vouch for the update of each accepted trainer), \
held-out bits per byte (null: not measured by this peer), seconds |
| `peers` | members and links; `departed` is the end of an expelled or retired member, `round_trip_ms` is of this peer's \
own link |
| `alerts` | active alerts without those for the operator alone, most severe first: `cause`, `about`, `severity` \
(`critical`, `warning`, `info`), `text`, `since_ms` |
| `votes` | open rounds and the last six closed ones: `phase` (`training`, `voting`, `closing`, `closed`), trainers with a \
proposal, and each voter's verdict on each proposal: `accept`, or a reason. `vouches` has the verdicts of re-executors, \
`unjudged` if they could not judge |
| `blocks` | the last ten blocks: proposer, signers, and the state root that the signers certify (`certified_root`) beside \
this peer's own (`own_root`) |
| `samples` | texts of the models in training; empty at a peer that does not train |
| `labels` | answers in the last minute; null if no project is open |

## OpenAPI

`GET /api/v1/openapi.json` describes the same calls as an OpenAPI 3.1 document, for generators of clients.
"""


def render() -> str:
    site = load_site(FEATURES)
    statuses = site.problem_statuses | METHOD_STATUS
    assert statuses.keys() == CAUSES.keys(), f"CAUSES lacks or exceeds the problem codes: {statuses.keys() ^ CAUSES.keys()}"
    rows = ((f"`{code}`", str(statuses[code]), cause) for code, cause in CAUSES.items())
    parts = [INTRODUCTION, "\n".join(table(("code", "status", "cause"), rows)), LIMITS, EVENTS]
    groups: list[tuple[str, ClientClass | None]] = [("Public calls", None)]
    clients = dict.fromkeys(route.client for route in site.routes if route.client not in (None, OPERATOR))
    groups += [(f"Calls of {client.name}s", client) for client in (*clients, OPERATOR) if client]
    for title, client in groups:
        calls = (route for route in site.routes if route.client == client and not route.takes_request)
        parts += [f"\n## {title}\n", *map(route_section, calls)]
    parts += ["\n## Calls of every HTTP server\n", *map(route_section, (route for route in site.routes if route.takes_request))]
    return "".join(parts)


def route_section(route: Route) -> str:
    """Return the section of one route as Markdown: its fields, its replies and its problems."""
    fields = [*_field_rows("path", route.path_fields), *_field_rows("query", route.query_fields)]
    fields += _field_rows("body", route.body_fields)
    replies = [(str(status), reply.text) for status, reply in route.replies.items()]
    replies += [(f"`{code}`", when or CAUSES.get(code, "").rstrip(".")) for code, when in route.problem_codes.items()]
    lines = ["", f"### `{route.method} {route.path}`", "", f"{route.about}.", ""]
    if fields:
        lines += table(("field", "in", "value", "default"), fields)
    lines += table(("reply", "content"), replies)
    return "\n".join(lines)


def _field_rows(place: str, fields: Iterable[RequestField]) -> Iterator[tuple[str, str, str, str]]:
    for item in fields:
        value = "; ".join(part for part in (item.kind.description, item.about) if part)
        yield f"`{item.name}`", place, value, _default(item.default)


def _default(value: object) -> str:
    if value is REQUIRED:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value in (None, (), b"", "") else str(value)
