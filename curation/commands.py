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
from features.commands import Action, CommandContext, command, listing_command
from features.text_tables import Column, TextTable, pluralize
from protocol.errors import UserError

TOPIC = "Annotation"

SHORT = 8
FORMATS = ("jsonl", "csv", "label-studio", "preferences")
ENDINGS = {"csv": "csv", "label-studio": "json"}  # file extension by export format; all other formats are JSONL


async def _show(asked: CommandContext[CurationRpc], projects: tuple[ProjectView, ...] | AgreementView) -> None:
    if isinstance(projects, AgreementView):
        await _show_agreement(asked, projects)
        return
    if not projects:
        asked.show("no projects yet; create one with `tasks import FILE`")
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
    "Show annotation projects, or the agreement of a project's annotators",
    _show,
    Argument("project", nargs="?", default="", metavar="PROJECT", help="Name of a project, or the beginning of its id"),
    description="""
        It counts tasks, begun tasks, settled tasks, and tasks that wait for their author. With PROJECT it shows Krippendorff's
        alpha of settled tasks, and Cohen's kappa of each two annotators with at least ten common answers. Tasks that wait for
        their author are the disputed ones: until they are reviewed, alpha is too high.
        """,
)
async def projects(asked: CommandContext[CurationRpc]) -> tuple[ProjectView, ...] | AgreementView:
    return await asked.api.agreement(asked.options.project) if asked.options.project else await asked.api.projects()


IMPORT_OPTIONS = (
    Argument("--name", default="", metavar="NAME", help="Name of the new project (default the name of the file)"),
    Argument("--project", default="", metavar="ID", help="Project that gets the tasks (default a new project)"),
    Argument(
        "--kind",
        default="label",
        choices=("label", "rating", "pair", "ranking"),
        help="Kind of the tasks: label, rating, pair or ranking (default label)",
    ),
    Argument("--options", default="", metavar="A,B,…", help="Options of a label, or of a rating with the lowest first; 2 to 16"),
    Argument("--many", action="store_true", help="Allow several options in an answer"),
    Argument(
        "--votes",
        type=parse_integer_in(1, VOTES_MAX),
        default=1,
        metavar="N",
        help=f"Largest number of answers to a task, 1 to {VOTES_MAX} (default 1)",
    ),
    Argument(
        "--price", type=parse_integer_in(0, PRICE_MAX), default=1, metavar="N", help="Points for each settled task (default 1)"
    ),
    Argument("--guidelines", default="", metavar="FILE", help="File with instructions that pages show beside the tasks"),
    Argument(
        "--display",
        default="plain",
        choices=("plain", "markdown", "chat"),
        help="Display of texts on pages: plain, markdown or chat (default plain)",
    ),
    Argument("--suggest-first", action="store_true", help="Show suggestions with the task, not after the answer"),
    Argument(
        "--columns",
        default="",
        metavar="PART=NAME,…",
        help=f"Names of the file's fields for {', '.join(COLUMNS)}, such as text=prompt,gold=label",
    ),
    Argument("--gold-from", default="", metavar="FIELD", help="Field of the file with the right answers"),
    Argument("--again", action="store_true", help="Add the tasks of a file that was imported before"),
)
EXPORT_OPTIONS = (
    Argument(
        "--format",
        default="jsonl",
        choices=FORMATS,
        help="Format: jsonl, csv, label-studio, or preferences of a project of pairs (default jsonl)",
    ),
    Argument("--proofs", action="store_true", help="Write a folder with a proof of every line, for `tasks verify`"),
    Argument("-o", "--output", default="", metavar="FILE", help="New file, or new folder with --proofs (default PROJECT-labels)"),
)


@command(
    "Manage projects and tasks for annotators",
    Argument("what", metavar="FILE|PROJECT|TASK|DIR", help="File, project, task or folder, as the action needs it"),
    Argument("number", nargs="?", type=parse_integer_in(0), metavar="NUMBER", help="Number of a task in the project"),
    description="""
        PROJECT is the name of a project or the beginning of its id. TASK is an id of 64 digits. A member may have ten projects
        that are open or paused.

            peer tasks import sentences.jsonl --options intact,shuffled --votes 3 --guidelines how-to.txt
            peer tasks export sentences -o labels.jsonl
        """,
    actions=(
        Action(
            "import FILE",
            "Create a project from the tasks in a file, or add them to a project",
            IMPORT_OPTIONS,
            """
            FILE is JSONL, CSV, TSV, an array of JSON or a file of Label Studio, or `-` for standard input. A wrong line is
            named, and then nothing is imported. The same file again changes nothing without `--again`, and continues an
            interrupted import. A text has at most 20,000 characters, and a project a million tasks. Texts are not secret: any
            peer may fetch them.

            - `label`: a text and 2 to 16 options. `rating`: a text and 2 to 16 options in order.
            - `pair`: two items; the answer is the first, the second, a tie, or both bad.
            - `ranking`: three to nine items; the answer is their order, the best first.

            With `--votes 1` the only answer is the label. With more, two annotators are asked first, and further ones while no
            label is likely enough. A task without a label after N answers, or after four skips, waits for its author (`tasks
            review`).

            An answer in the file is the text of an option, a whole number (options count from 0, ratings from 1), or for a pair
            `the first`, `the second`, `a tie` or `both bad`. An answer with two readings is an error. `gold` in the file is the
            right answer, which stays secret until the project closes. Labels of other programs become suggestions, unless
            `--gold-from` names them.
            """,
        ),
        Action(
            "export PROJECT",
            "Write all settled tasks with their labels and votes",
            EXPORT_OPTIONS,
            """
            The default file is PROJECT-labels with the ending of the format. With `--proofs` the folder PROJECT-labels also has
            the rows of the ledger, their proofs and the signatures of a quorum. A cell of a table that a spreadsheet would run
            as a formula gets an apostrophe before it.
            """,
        ),
        Action(
            "verify DIR",
            "Verify the folder of an export with proofs, without a peer",
            (Argument("--chain-id", default="", metavar="ID", help="Chain id of the network, from `peer status --json`"),),
            "It names the first line that was changed, added or left out.",
        ),
        Action("pause PROJECT", "Give out no new tasks of your project"),
        Action("open PROJECT", "Give out tasks of your project again"),
        Action(
            "close PROJECT",
            "Close your project for ever",
            (),
            "It reveals the gold answers and pays annotators. After a minute the labels are final; export them then. Review "
            "waiting tasks before, or within the minute.",
        ),
        Action("stop PROJECT", "Vote to close a project, as a voter", (), "A quorum of voters closes it."),
        Action(
            "review PROJECT [NUMBER]",
            "Show the tasks that wait for their author, or decide the label of one",
            (
                Argument(
                    "--label",
                    default=None,
                    metavar="A,B,…",
                    help="Label of the task: names or numbers of options, or first, second, tie or bad for a pair",
                ),
            ),
            """
            With `--label` it decides the label of the task NUMBER, or of TASK in place of PROJECT.

                peer tasks review sentences
                peer tasks review sentences 7 --label intact
            """,
        ),
        Action(
            "redact PROJECT NUMBER",
            "Delete the text of a task for ever",
            (),
            "TASK may stand in place of PROJECT and NUMBER. The author of the project decides it alone. Otherwise more than f "
            "voters must vote for it. The label stays, and exports show `redacted` in place of the text.",
        ),
    ),
)
async def tasks(asked: CommandContext[CurationRpc]) -> None:
    options = asked.options
    match options.action_name:
        case "import":
            imported = await asked.api.import_tasks(_request(options))
            asked.show(f"project {imported.project[:SHORT]} ({imported.name}): {imported.tasks} tasks, {imported.state}")
            for note in imported.notes:
                asked.show(note)
        case "export" if options.proofs and options.format != "jsonl":
            raise UserError(f"--proofs cannot be combined with --format {options.format}: leave one out")
        case "export" if options.proofs:
            folder = options.output or f"{options.what}-labels"
            exported = await asked.api.export_task_proofs(options.what, str(Path(folder).expanduser().absolute()))
            asked.show(
                f"{exported.path}: {exported.tasks} settled tasks with proofs; verify them with `peer tasks verify {folder}`"
            )
        case "verify":
            # `peer tasks verify` works without a running peer. Its import loads the whole ledger, so no other command imports it.
            from curation.import_export.export_proofs import verification_table, verify_folder

            asked.show(verification_table(verify_folder(Path(options.what).expanduser(), options.chain_id), options.chain_id))
        case "export":
            path = options.output or f"{options.what}-labels.{ENDINGS.get(options.format, 'jsonl')}"
            exported = await asked.api.export_tasks(options.what, str(Path(path).expanduser().absolute()), options.format)
            asked.show(f"{exported.path}: {exported.tasks} settled tasks")
        case "review" if options.label is None and options.number is not None:
            raise UserError(f"task {options.number} needs a label: add --label; `tasks review PROJECT` shows all waiting tasks")
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
            view = await asked.api.set_project_phase(options.what, phases[options.action_name])
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
    """Return counts by text as one line, such as `3 × yes, 1 × no`, the highest count first."""
    return ", ".join(f"{count} × {text}" for text, count in sorted(texts.items(), key=lambda entry: -entry[1]))


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@command(
    "Create tokens for operators and invitations for annotators",
    actions=(
        Action(
            "token",
            "Print a token for operators of this peer",
            (Argument("--revoke", action="store_true", help="Revoke all tokens, and end their sessions"),),
            """
            The token is valid for a day. On a terminal the address of the operators' page is printed, too.

                curl -H "Authorization: Bearer $(peer web token)" http://127.0.0.1:7780/api/v1/projects
            """,
        ),
        Action("invite", "Print a code that enrols one annotator, and the end of a link that has the code filled in"),
    ),
)
async def web(asked: CommandContext[CurationRpc]) -> None:
    if asked.options.action_name == "invite":
        if asked.options.revoke:
            raise UserError("--revoke does not revoke invitations: use `web token --revoke`")
        code = await asked.api.create_annotator_invitation()
        asked.show(f"{code}\nlink: /join#{code} at the web address of this peer")
    elif asked.options.revoke:
        asked.show(f"revoked {pluralize(await asked.api.revoke_operator_tokens(), 'token')}")
    else:
        token = await asked.api.create_web_token()
        asked.show(token)
        if sys.stdout.isatty() and (address := await asked.api.web_address()):  # output to a program is the token alone
            asked.show(f"{address}/admin#{token} signs you in")


def _columns(text: str) -> dict[str, str]:
    """Parse `--columns`: return the file's column names by the names in `COLUMNS`.

    Raises `UserError` for a part that is not PART=NAME.
    """
    found: dict[str, str] = {}
    for part in _parts(text):
        ours, equals, theirs = map(str.strip, part.partition("="))
        if not (equals and theirs) or ours not in COLUMNS or ours in found:
            raise UserError(f"--columns {part!r} is not PART=NAME, such as text=prompt, with a new PART of {', '.join(COLUMNS)}")
        found[ours] = theirs
    return found


def _request(options: object) -> ImportRequest:
    given = vars(options)
    names = _parts(given["options"])
    if given["project"] and names:
        raise UserError("--options cannot be changed: leave them out, or leave out --project to create a project")
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
        raise UserError(
            f"--{said[0].replace('_', '-')} cannot be changed: leave it out, or leave out --project to create a project"
        )
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
