"""Commands of curation."""

from __future__ import annotations

import os
import sys
from fractions import Fraction
from pathlib import Path

from curation.limits import KAPPA_COMMON_MIN, PRICE_MAX, VOTES_MAX
from curation.rpc import AgreementView, CurationRpc, ImportRequest, ProjectView, TaskInReviewView
from curation.tasks.answers import COLUMNS
from features.command_arguments import Argument, parse_integer_in
from features.commands import CommandContext, command, listing_command
from features.text_tables import Column, TextTable, pluralize
from protocol.errors import UserError

SHORT = 8
FORMATS = ("jsonl", "csv", "label-studio", "preferences")
ENDINGS = {"csv": "csv", "label-studio": "json"}  # of files of other formats than JSONL
ACTIONS = ("import", "export", "verify", "pause", "open", "close", "stop", "review", "redact")


async def _show(asked: CommandContext[CurationRpc], projects: tuple[ProjectView, ...] | AgreementView) -> None:
    if isinstance(projects, AgreementView):
        await _show_agreement(asked, projects)
        return
    if not projects:
        asked.show("no project: `tasks import FILE` makes one")
        return
    table = TextTable(
        "project",
        Column("name", truncates=True),
        "kind",
        "state",
        Column("votes", is_number=True, drop_order=1),
        Column("tasks", is_number=True),
        Column("begun", is_number=True, drop_order=2),
        Column("settled", is_number=True),
        Column("review", is_number=True),
    )
    for row in projects:
        counts = (row.votes, row.tasks, row.begun, row.settled, row.review)
        table.add_row(row.project[:SHORT], row.name, row.kind, row.state, *map(str, counts))
    asked.show(table)


async def _show_agreement(asked: CommandContext[CurationRpc], found: AgreementView) -> None:
    asked.show(f"project {found.project[:SHORT]} ({found.name}): Krippendorff's alpha of settled tasks {_decimal(found.alpha)}")
    if not found.pairs:
        asked.show(f"no two annotators have {KAPPA_COMMON_MIN} common answers yet")
        return
    table = TextTable("annotator", "and", Column("common", is_number=True), Column("kappa", is_number=True))
    for row in found.pairs:
        table.add_row(row.first_name, row.second_name, str(row.common), _decimal(row.kappa))
    asked.show(table)


def _decimal(fraction: str) -> str:
    return f"{float(Fraction(fraction)):.3f}" if fraction else "–"


@listing_command(
    "projects of annotation; of one, how far its annotators agree",
    _show,
    Argument("project", nargs="?", default="", metavar="PROJECT", help="the beginning of an id, or a name"),
)
async def projects(asked: CommandContext[CurationRpc]) -> tuple[ProjectView, ...] | AgreementView:
    return await asked.api.agreement(asked.options.project) if asked.options.project else await asked.api.projects()


@command(
    "tasks for annotators: import FILE; export, pause, open, close, stop or review PROJECT; review or redact TASK; verify DIR",
    Argument("do", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS)),
    Argument("what", metavar="FILE|PROJECT|TASK|DIR", help="a file of tasks (JSONL, CSV, Label Studio's JSON), or an id"),
    Argument("number", nargs="?", type=parse_integer_in(0), metavar="NUMBER", help="of one of the project's tasks"),
    Argument("--label", default=None, metavar="A,B,…", help="of `tasks review`: what the task's label is"),
    Argument("--name", default="", metavar="NAME", help="of a new project (default: the file's)"),
    Argument("--project", default="", metavar="ID", help="the project that gets more tasks; else a new one is made"),
    Argument("--kind", default="label", choices=("label", "rating", "pair", "ranking"), help="what is asked (default: label)"),
    Argument("--options", default="", metavar="A,B,…", help="of a label or a rating, 2 to 16, with commas between them"),
    Argument(
        "--columns",
        default="",
        metavar="PART=NAME,…",
        help="what the file calls text, gold, item1 …: text=prompt,gold=label",
    ),
    Argument("--gold-from", default="", metavar="FIELD", help="of `tasks import`: the file's field with the right answers"),
    Argument("--again", action="store_true", help="of `tasks import`: add the tasks of a file that was imported before"),
    Argument("--many", action="store_true", help="several options may fit"),
    Argument("--votes", type=parse_integer_in(1, VOTES_MAX), default=1, metavar="N", help="of a task at most (default: 1)"),
    Argument(
        "--price", type=parse_integer_in(0, PRICE_MAX), default=1, metavar="N", help="points for a settled task (default: 1)"
    ),
    Argument("--guidelines", default="", metavar="FILE", help="text that annotators read first"),
    Argument(
        "--display",
        default="plain",
        choices=("plain", "markdown", "chat"),
        help="how pages show texts: plain, markdown or chat (default: plain)",
    ),
    Argument("--suggest-first", action="store_true", help="show suggestions with the task, not after the answer"),
    Argument(
        "--proofs", action="store_true", help="`tasks export` writes a folder with a proof of every line, for `tasks verify`"
    ),
    Argument("--chain-id", default="", metavar="ID", help="for `tasks verify`: 64 digits of `peer init` or `peer status --json`"),
    Argument(
        "--format",
        default="jsonl",
        choices=FORMATS,
        help="of `tasks export`: jsonl, csv, label-studio or preferences",
    ),
    Argument("-o", "--output", default="", metavar="FILE", help="of `tasks export`: a new file (default: named by the project)"),
)
async def tasks(asked: CommandContext[CurationRpc]) -> None:
    options = asked.options
    match options.do:
        case "import":
            imported = await asked.api.import_tasks(_request(options))
            asked.show(f"project {imported.project[:SHORT]} ({imported.name}): {imported.tasks} tasks, {imported.state}")
            for note in imported.notes:
                asked.show(note)
        case "export" if options.proofs and options.format != "jsonl":
            raise UserError("--proofs writes jsonl alone: leave out --format, or export once more without --proofs")
        case "export" if options.proofs:
            folder = options.output or f"{options.what}-labels"
            exported = await asked.api.export_task_proofs(options.what, str(Path(folder).expanduser().absolute()))
            asked.show(f"{exported.path}: {exported.tasks} settled tasks, each with its proof: `peer tasks verify {folder}`")
        case "verify":
            # it needs all of the ledger, and no peer
            from curation.import_export.export_proofs import verification_table, verify_folder

            asked.show(verification_table(verify_folder(Path(options.what).expanduser(), options.chain_id), options.chain_id))
        case "export":
            path = options.output or f"{options.what}-labels.{ENDINGS.get(options.format, 'jsonl')}"
            exported = await asked.api.export_tasks(options.what, str(Path(path).expanduser().absolute()), options.format)
            asked.show(f"{exported.path}: {exported.tasks} settled tasks")
        case "review" if options.label is None and options.number is not None:
            raise UserError(f"say the label of task {options.number} with --label; `tasks review PROJECT` shows all that wait")
        case "review" if options.label is None:
            _show_waiting(asked, await asked.api.tasks_in_review(options.what))
        case "review":
            asked.show(await asked.api.review_task(options.what, options.number, _parts(options.label)))
        case "redact":
            asked.show(await asked.api.redact_task(options.what, options.number))
        case "stop":
            asked.show(await asked.api.vote_to_stop_project(options.what))
        case _:
            phases = {"pause": "paused", "open": "open", "close": "closed"}
            view = await asked.api.set_project_phase(options.what, phases[options.do])
            asked.show(f"project {view.project[:SHORT]} ({view.name}) is {view.state}")


def _show_waiting(asked: CommandContext[CurationRpc], tasks: tuple[TaskInReviewView, ...]) -> None:
    if not tasks:
        asked.show("no task of this project waits for its author")
        return
    table = TextTable(Column("number", is_number=True), Column("text", wraps=True), "votes", "skips")
    for task in tasks:
        text = "\n".join([task.text, *(f"{number}: {item}" for number, item in enumerate(task.items))]).strip()
        votes, skips = map(_counted, (task.votes, task.skips))
        table.add_row(str(task.number), text, votes or "none", skips or "none")
    asked.show(table)


def _counted(texts: dict[str, int]) -> str:
    """The most frequent first."""
    return ", ".join(f"{count} × {text}" for text, count in sorted(texts.items(), key=lambda entry: -entry[1]))


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@command(
    "the HTTP API of this peer: web token prints one for an operator, web invite a code that enrols one annotator",
    Argument("do", choices=("token", "invite"), metavar="ACTION", help="token, invite"),
    Argument("--revoke", action="store_true", help="of `web token`: take back all tokens that there are"),
)
async def web(asked: CommandContext[CurationRpc]) -> None:
    if asked.options.do == "invite":
        if asked.options.revoke:
            raise UserError("--revoke takes tokens back, and no code: say `web token --revoke`")
        code = await asked.api.create_annotator_invitation()
        asked.show(f"{code}\nlink: /join#{code} at the address where this peer serves annotators")
    elif asked.options.revoke:
        asked.show(f"taken back: {pluralize(await asked.api.revoke_operator_tokens(), 'token')}")
    else:
        token = await asked.api.create_web_token()
        asked.show(token)
        if sys.stdout.isatty() and (address := await asked.api.web_address()):  # a program wants the token alone
            asked.show(f"{address}/admin#{token} signs you in")


def _columns(text: str) -> dict[str, str]:
    """Raises `UserError`."""
    found: dict[str, str] = {}
    for part in _parts(text):
        ours, equals, theirs = map(str.strip, part.partition("="))
        if not (equals and theirs) or ours not in COLUMNS or ours in found:
            raise UserError(f"--columns {part!r}: write PART=NAME, such as text=prompt, once for each of {', '.join(COLUMNS)}")
        found[ours] = theirs
    return found


def _request(options: object) -> ImportRequest:
    given = vars(options)
    names = _parts(given["options"])
    if given["project"] and names:
        raise UserError("--options are those of the project already: leave them out, or make a new project")
    of_new: dict[str, object] = {
        "name": "",
        "kind": "label",
        "many": False,
        "votes": 1,
        "price": 1,
        "guidelines": "",
        "suggest_first": False,
        "display": "plain",
    }
    if said := [name for name, default in of_new.items() if given["project"] and given[name] != default]:
        raise UserError(f"--{said[0].replace('_', '-')} is of a new project: leave it out, or leave out --project")
    return ImportRequest(
        file=os.fspath(Path(given["what"]).expanduser().absolute()),
        name=given["name"],
        project=given["project"],
        kind=given["kind"],
        options=names,
        many=given["many"],
        votes=given["votes"],
        price=given["price"],
        guidelines=os.fspath(Path(given["guidelines"]).expanduser().absolute()) if given["guidelines"] else "",
        suggests_first=given["suggest_first"],
        display=given["display"],
        columns=_columns(given["columns"]),
        gold_from=given["gold_from"].strip(),
        again=given["again"],
    )
