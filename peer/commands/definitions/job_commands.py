"""Commands about jobs, rounds and audits, and the fields of a job as users type them."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path

from features import exit_statuses
from features.command_arguments import (
    LAST_COUNT,
    SKIP_BAD,
    TRUNCATE,
    Argument,
    member_argument,
    parse_integer_in,
    parse_set_options,
)
from features.commands import CommandContext, command, listing_command
from features.text_tables import format_ordinal
from peer.commands import view_tables
from peer.runtime.telemetry.risk_warnings import (
    NO_AUDITS_WITHOUT_TOLERANCE_RISK,
    SAMPLED_AUDITS_RISK,
    SAMPLED_AUDITS_WITHOUT_TOLERANCE_RISK,
)
from protocol.api import AuditsView, EventView, JobView, PeerApi, RoundView, RoundVotesView, TrainRequest
from protocol.errors import UserError
from protocol.units import display_round_number, format_bytes

TOPIC = "Jobs, rounds and audits"

TEST_SECONDS_MAX = 180.0  # longest wait for a test round, derived from the slowest timers of a round

ROUNDS = Argument(
    "--rounds",
    type=parse_integer_in(1),
    default=0,
    metavar="N",
    help="Number of rounds (default 60, or 600 with --preset per-step)",
)
DATA = Argument(
    "--data", metavar="PATH", help="Text file or folder, - for standard input, or `local` (default the built-in text)"
)
COLUMN = Argument(
    "--column", default="", metavar="NAME", help="Field of JSON records or column of tables with the text (default text)"
)
NAME = Argument("--name", default="", metavar="NAME", help="Name of the job")
FROM_MODEL = Argument(
    "--from",
    dest="base",
    default="",
    metavar="JOB",
    help="Initial model: JOB, JOB@ROUND or a folder with a model in Llama's shape (default a new model)",
)
EXAMPLES = Argument(
    "examples",
    nargs="?",
    default="",
    metavar="FILE",
    help="File of prompts and responses, whose responses the model of --from learns",
)
ACCEPT_RISK = Argument(
    "--accept-risk", action="store_true", help="Start the job although sampled audits may find false updates too late"
)
VOCABULARY = Argument(
    "--vocabulary",
    type=parse_integer_in(256),
    default=0,
    metavar="N",
    help="Tokens of the vocabulary; more than 257 train a BPE (default 257)",
)

ROUND = Argument(
    "round",
    nargs="?",
    type=parse_integer_in(1),
    metavar="ROUND",
    help="Round to re-execute (default the newest that can be re-executed)",
)

# Names of presets -> purpose, for the help. The import of their settings in `training.job_spec` is slow and waits for their use.
PRESETS = {
    "local": "one update per ten local steps, for most links",
    "per-step": "one update per gradient step, for fast links and 300 rounds or more",
}
PRESET = Argument(
    "--preset",
    choices=tuple(PRESETS),
    metavar="NAME",
    help=f"Named settings of the job. {'. '.join(f'{name}: {about}' for name, about in PRESETS.items())} (default local)",
)
SET = Argument("--set", action="extend", nargs="+", default=[], metavar="FIELD=VALUE", help="Further fields of the job")

# Fields of presets that a job derives itself, from the number of rounds and the audit mode.
DERIVED_FIELDS_OF_PRESETS = ("warmup_rounds", "rule")
# Argument of `train` or `peer demo` -> field of the job specification that it sets.
ARGUMENTS = {"rounds": "rounds", "vocabulary": "model.vocabulary", "audit": "audit", "seed": "seed"}

# Rows (field, other field, values): the field has an effect only if the other field has one of these values.
USED_ONLY_WITH = (
    ("outer_rate", "outer", ("nesterov", "sgd", "sign")),
    ("outer_momentum", "outer", ("nesterov", "sign")),
    ("audit_rate", "audit", ("sampled",)),
    ("auditors", "audit", ("sampled",)),
    ("audit_window", "audit", ("sampled",)),
    ("uplink_mbit_min", "audit", ("sampled",)),
    ("final_full_audit_rounds", "audit", ("sampled",)),
)

TRAIN_DESCRIPTION = """
    One job trains at a time. Other jobs wait in the order of their decision and start by themselves; `jobs` shows them. A
    member may have four queued jobs, and all members together 32.

        peer train --name base --rounds 60 --data corpus
        peer train --preset per-step --set seed=4 licence=CC-BY-4.0
        peer train --from base --name helpful examples.jsonl
        peer train --from ./my-model --rounds 20

    `--data` names a file or a folder with text. Its text is hashed and sent to the other peers, so that they can re-execute
    work on it. A folder with `*.bin` holds token shards (`peer help shards`). With `--data local` each trainer uses the text of
    its own setting `local_data`. No peer can re-execute such work: audits are off, and the job needs `byzantine_max=0`.

    Files with text:

    - `.txt`, `.md`: the whole file is text. A file with another ending is read if `--data` names it and it does not begin like
      markup.
    - `.jsonl`, `.ndjson`, `.json`: the text is the field `text` of each record. The file has one object per line, an array of
      objects or of strings, or one object.
    - `.csv`, `.tsv`, `.tab`: the text is the column `text`. Separator, encoding and case of the header are detected.
    - `.parquet`: the text is the column `text`. It needs the extra `data`.

    Each file may be compressed with gzip, as `.txt.gz`. A table or an array has at most 64 MB, and a line at most 16 MB.
    Records without text are left out and counted. A row with a wrong number of cells is an error. HTML, XML, RTF, YAML and
    notebooks are refused, and so are text files in UTF-16 or Windows-1252. A `.txt` or `.md` file that begins like markup is
    read with a note.

    Files of a folder that are left out are listed with the reason: hidden files, other endings, links to folders, damaged
    files, and README and LICENSE beside other files. `jobs --json` has the list in `notes`.

    `--from JOB` takes the model, the sizes and the tokenizer of a finished job. `--from JOB@ROUND` takes its model after this
    round, if this peer has it and the round is final. `--from FOLDER` takes `config.json` and `model.safetensors` as
    `transformers` writes them. A text with a slash is a folder.

    FILE has one object per line, such as `{"prompt": "…", "response": "…"}`. A tenth of the prompts is held out. The job goes
    three times through the file unless `--rounds` is set. Lines that cannot be learned are listed, and no job starts without
    `--skip-bad`.
    """

RULES_WITH_BYZANTINE_MAX = ("arc-nnm-trim", "trimmed-mean", "krum")  # aggregation rules that use the field `byzantine_max`


@command(
    "Start a training job",
    *(EXAMPLES, SKIP_BAD, TRUNCATE, PRESET, ROUNDS, DATA, COLUMN, NAME, FROM_MODEL, VOCABULARY, ACCEPT_RISK, SET),
    description=TRAIN_DESCRIPTION,
)
async def train(asked: CommandContext[PeerApi]) -> None:
    request = build_train_request(asked.options)
    job = await asked.wait_for_decision(asked.api.start_job(request))
    view = next((view for view in await asked.api.jobs() if view.job == job), None)
    if view is None or not view.queue_position:
        how = "follow it with `watch`"
    elif view.initial_model_holders:
        how = "it starts when enough voters hold its initial model; `jobs` shows how many do"
    else:
        how = f"it is queued ({format_ordinal(view.queue_position)}) and starts automatically; `jobs` shows the queue"
    asked.show(f"job {job} is decided; {how}")
    if view and view.disk_bytes:
        asked.show(f"it needs up to {format_bytes(view.disk_bytes)} on this peer's disk")
    if no_room := (await asked.api.status()).disk_shortage:
        asked.show(no_room)
    for note in (view.machine_time, *view.notes) if view else ():
        if note:
            asked.show(note)
    for warning in setting_warnings(request, parse_set_options(asked.options.set), view.audit) if view else ():
        asked.show(f"{warning} (cancel the job with `cancel {view_tables.shorten_id(job)}`)")


@command(
    "Run a test round on the network",
    description="It proposes, judges, votes on and applies a known update of a scratch tensor, and shows each phase.",
)
async def test(asked: CommandContext[PeerApi]) -> None:
    import trio

    api = asked.api
    newest = await api.events(-1, 0.0)
    seen = newest[-1].number if newest else 0
    before, known = await api.jobs(), await asked.load_names()
    job = await asked.wait_for_decision(api.run_test_round())
    asked.show(f"test round, job {view_tables.shorten_id(job)}: a known update is proposed, judged, voted on and applied")
    with trio.move_on_after(TEST_SECONDS_MAX):
        async with aclosing(_phases(api, job, seen)) as phases:
            async for event in phases:
                asked.show(view_tables.event_line(event, known))
                if event.kind == "applied":
                    asked.show(_unchanged(before, await api.jobs(), job))
                    return
    raise UserError(f"the test round is not decided after {TEST_SECONDS_MAX:.0f} s; `peers` shows missing peers")


async def _phases(api: PeerApi, job: str, seen: int) -> AsyncGenerator[EventView, None]:
    """Yield the events of a job, and the events `decided` and `applied` of the block that closes the job's round."""
    decided: dict[str, EventView] = {}
    closing: str | None = None
    while True:
        for event in await api.events(seen, 1.0):
            seen = event.number
            height = event.fields.get("height", "")
            if event.kind == "decided":
                decided[height] = dataclasses.replace(event, text=f"{event.text}: {event.fields['signers']}")
            elif event.kind == "round" and event.fields.get("job") == job:
                closing = height
                if closing in decided:
                    yield decided[closing]
                yield event
            elif event.fields.get("job") == job or (event.kind == "applied" and height == closing):
                yield event


def _unchanged(before: tuple[JobView, ...], after: tuple[JobView, ...], test: str) -> str:
    """Return a line for each job with a model: the test round left the model unchanged, or the job's own rounds changed it."""
    now = {job.job: job for job in after}
    objective = now[test].objective if test in now else ""  # jobs of earlier tests trained no model
    models = [job for job in before if job.objective != objective and job.job in now]
    if not models:
        return "no model is being trained"
    lines = []
    for job in models:
        same = (now[job.job].round, now[job.job].model_root) == (job.round, job.model_root)
        moved = "unchanged" if same else f"changed by its own round {display_round_number(job.round)}"
        lines.append(f"job {view_tables.shorten_id(job.job)}: model root {job.model_root[:16]} {moved}")
    return "\n".join(lines)


@command(
    "Cancel a job",
    Argument("job", metavar="JOB", help="Name of the job, or first characters of its id"),
    description="""
        The job ends and gives up its open round. The author of the job can cancel it alone. Other voters need a quorum.
        Cancelling a job of a tuning plan ends the plan, too.
        """,
)
async def cancel(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.cancel_job(asked.options.job)))


@command(
    "Vote to return a job to an earlier model",
    Argument("job", metavar="JOB", help="Name of an unfinished job, or first characters of its id"),
    Argument(
        "round",
        type=parse_integer_in(0),
        metavar="ROUND",
        help="Number of rounds in the anchor's model, as in JOB@ROUND, or the open round to withdraw your request",
    ),
    description="""
        The job returns to the anchor JOB@ROUND when a quorum of voters has asked for it, and trains on from there. `jobs --json`
        lists the anchors. With `audit=full` there is only the newest one.
        """,
)
async def rollback(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.request_rollback(asked.options.job, asked.options.round)))


@listing_command(
    "Show jobs and their progress",
    view_tables.show_named_table(view_tables.jobs, "no jobs yet; start one with `train --rounds 80`"),
    description="""
        It lists running and queued jobs, finished jobs that are still audited, the last 32 other jobs that trained, and the
        last 16 that did not.

        States and counts:

        - `queued`: other jobs train first, or too few voters hold the initial model.
        - `settling`: all rounds are trained, and audits may still undo some.
        - `stopped`: the job ended early. It was cancelled, made no progress, or lost its trainers.
        - `absent`: no proposal came. `unjudged`: the voters could not re-execute it in time.
        - `diverging`: updates were far too large at more trainers than may be faulty.
        - `undone`: rounds that a conviction or a vote undid.
        - `suspended`: trainers that must not train until a round.
        - `re-executors`: voters that are not asked to re-execute after false vouches in 3 of 20 rounds, or are asked last
          after 3 rounds in a row without a vouch.

        Fields of `--json`:

        - `rounds_in_model`: number of rounds in the model. `round` also counts undone rounds.
        - `final_round`: the newest final model, as JOB@ROUND.
        - `anchors`: models to which a rollback may return.
        """,
)
async def jobs(asked: CommandContext[PeerApi]) -> tuple[JobView, ...]:
    return await asked.api.jobs()


@command(
    "Watch a job until it ends",
    Argument(
        "job",
        nargs="?",
        default="",
        metavar="JOB",
        help="Name of the job, or first characters of its id (default the running job)",
    ),
    description="""
        On a terminal it draws the loss curve, the last rounds, the trainers and the missing proposals. In a pipe it prints a
        line for each round. Ctrl-C ends the command, not the job.

            peer train --name base --rounds 200 && peer watch base && peer model base-model --job base
        """,
    exit_statuses={
        exit_statuses.SUCCESS: "All rounds of the job are in the model",
        exit_statuses.FAILURE: "The job ended before all its rounds",
    },
)
async def watch(asked: CommandContext[PeerApi]) -> int:
    from peer.commands.job_monitor import watch_job

    job = await watch_job(
        asked.api, asked.options.job, await asked.load_names(), asked.show, sys.stdout.isatty() and not asked.is_at_prompt
    )
    return exit_statuses.FAILURE if job.rounds_in_model < job.rounds else exit_statuses.SUCCESS


@listing_command(
    "Show the last closed rounds",
    view_tables.show_named_table(view_tables.rounds, "no round is closed yet"),
    LAST_COUNT,
    description="""
        It shows verdicts, the voters whose ballots were counted, the held-out loss and the time of each round. `--json` has the
        oldest round first, and counts rounds from 0.

        - `(undone)`: the step of the round is not in the model any more.
        - `(plain mean)`: no robust rule was applied, so only re-execution can find a false update.
        - `anna (ben, cora vouch)`: these voters re-executed anna's update and signed that it is right.
        """,
)
async def rounds(asked: CommandContext[PeerApi]) -> tuple[RoundView, ...]:
    return await asked.api.rounds(asked.options.last)


LAST_ROUNDS = Argument(
    "last", nargs="?", type=parse_integer_in(1), default=3, metavar="N", help="Number of closed rounds (default 3)"
)


@listing_command(
    "Show the ballots of open rounds and of the last closed ones",
    view_tables.show_named_table(view_tables.votes, "no round is open or closed yet"),
    LAST_ROUNDS,
    description="After a ballot it shows the voter's vouches: trainers that it vouches for, rejects, or is unsure of.",
)
async def votes(asked: CommandContext[PeerApi]) -> tuple[RoundVotesView, ...]:
    return await asked.api.votes(asked.options.last)


async def _show_audits(asked: CommandContext[PeerApi], view: AuditsView) -> None:
    if view.records:
        known = await asked.load_names()
        asked.show(view_tables.audits(view.results, known))
        asked.show(view_tables.audit_records(view.records, known))
        if view.suspensions:
            asked.show(view_tables.suspensions(view.suspensions, known))
    else:
        asked.show("no sampled audits yet; `train --set audit=sampled` starts a job with them")
    if any(job.audit == "full" for job in await asked.api.jobs()):
        asked.show(
            "audit=full: `rounds` shows verdicts, ballots and vouches; a voter that vouches for an update signed that it "
            "re-executed the update before the vote"
        )


@listing_command(
    "Show the last sampled audits and the record of each peer",
    _show_audits,
    LAST_COUNT,
    description="""
        The ledger keeps 64 audits. `log` has older ones.

        Results:

        - `passed`: the auditor found the same update.
        - `challenged`: the auditor reports a false update, and others judge it.
        - `lapsed`: no report came in time.
        - `suspended`: most judges confirm the challenge. The round is undone.
        - `refuted`: most judges find the update right.
        - `shunned`: too many judges could not get the trainer's buffers. The trainer is suspended.
        - `dropped`: too few judges reported in time.
        - `wrong-loss`: auditor and trainer report different losses, so one of them is wrong.
        - `lazy`: more trainers than may be faulty report a wrong loss of this auditor. The auditor is suspended.

        The record of a peer counts its accepted proposals without a conviction (rewards), lost rewards, suspensions, reports,
        lapsed audits, upheld and refuted challenges, and reports with a wrong loss.
        """,
)
async def audits(asked: CommandContext[PeerApi]) -> AuditsView:
    return await asked.api.audits(asked.options.last)


@command(
    "Re-execute the accepted proposals of a round and report on them",
    member_argument("trainer", "TRAINER"),
    ROUND,
    description="""
        It works for jobs with sampled audits. This peer volunteers to audit the round, and re-executes the proposal of TRAINER
        first. The command prints the result for TRAINER. The peer must be a voter that trained when the round opened. Meanwhile
        it does not train. A peer volunteers once for a round. Ctrl-C ends the command, not the audits. A challenge that most
        judges refute counts against this peer.
        """,
)
async def challenge(asked: CommandContext[PeerApi]) -> None:
    asked.show(
        await asked.wait_for_decision(
            asked.api.challenge_trainer(asked.options.trainer, None if (number := asked.options.round) is None else number - 1)
        )
    )


def build_train_request(options: argparse.Namespace) -> TrainRequest:
    said = job_overrides(options)
    overrides = preset_overrides(options.preset, said) | said
    if options.data == "":
        raise UserError("--data is empty: give a file or folder, or leave it out for the built-in text")
    data = options.data or ""
    if data not in ("", "local"):
        data = str(Path(data).expanduser().absolute())  # the daemon's working directory may differ
    examples = str(Path(options.examples).expanduser().absolute()) if options.examples else ""
    said_of_text = options.name, data, options.rounds, options.vocabulary, overrides
    if (options.skip_bad or options.truncate) and not examples:
        raise UserError("--skip-bad and --truncate need a file with responses: train --from JOB FILE.jsonl")
    if options.column and data in ("", "local"):
        raise UserError(f"--column {options.column} needs a file or folder: add --data PATH")
    of_file = options.skip_bad, options.truncate, options.column
    return TrainRequest(*said_of_text, options.base, examples, _folder(options.base), options.accept_risk, *of_file)


def _folder(base: str) -> str:
    """Return the folder that `--from` names, or "".

    A text with a slash is a path; a text without one is a path if such a folder exists.
    """
    path = Path(base).expanduser().absolute()
    return str(path) if "/" in base or (base and path.is_dir()) else ""


def preset_overrides(preset: str | None, said: Mapping[str, str]) -> dict[str, str]:
    """Return a preset's fields as texts, without the fields that `training.job_spec.complete_fields` derives from others.

    With `memory=estimates`, bits, momentum and rates are derived as well: the preset's values were measured without this setting.
    """
    from training.job_spec import PRESETS, fields_set_by_estimates

    fields = PRESETS[preset] if preset else {}
    follow: tuple[str, ...] = DERIVED_FIELDS_OF_PRESETS
    if said.get("memory") == "estimates":
        follow += fields_set_by_estimates({**fields, **said})
    return {name: str(value) for name, value in fields.items() if name not in follow}


def job_overrides(options: argparse.Namespace) -> dict[str, str]:
    """Return the values of `--set` by field. Raises `UserError` if a value is malformed or contradicts another argument."""
    said = parse_set_options(options.set)
    for argument, name in ARGUMENTS.items():
        value = getattr(options, argument, None)
        if value and said.get(name, str(value)) != str(value):
            raise UserError(f"--{argument} {value} and --set {name}={said[name]} contradict each other: leave one out")
    return said


def aggregation_rule(overrides: Mapping[str, str]) -> str:
    """Return the aggregation rule of a job with these fields."""
    from training.job_spec import JobSpec, complete_fields

    named = {name: overrides[name] for name in ("outer", "audit", "memory", "rule") if name in overrides}
    return str(JobSpec(name="rule", **complete_fields(named)).rule)


def setting_warnings(request: TrainRequest, said: Mapping[str, str], audit: str) -> Iterator[str]:
    """Yield warnings about settings of a job that are valid but probably a mistake.

    `said` holds the fields that the user typed, without those of the preset. `audit` is the job's audit mode.
    """
    overrides, local = {"outer": "nesterov", **request.overrides, "audit": audit}, request.data == "local"
    for name, other, users in USED_ONLY_WITH:
        value = overrides[other]
        if name in said and value not in users:
            yield f"{name}={said[name]} has no effect with {other}={value}, only with {' or '.join(users)}"
    rule = aggregation_rule(overrides)
    if "byzantine_max" in said and rule not in RULES_WITH_BYZANTINE_MAX:
        yield (
            f"byzantine_max={said['byzantine_max']} has no effect with rule={rule}, only with "
            f"{' or '.join(RULES_WITH_BYZANTINE_MAX)}"
        )
    if local:
        yield "each trainer uses its own text, so audits are off: no peer re-executes updates; voters check only form and norm"
    elif audit == "sampled":
        yield SAMPLED_AUDITS_RISK
        if overrides.get("byzantine_max") == "0":
            yield SAMPLED_AUDITS_WITHOUT_TOLERANCE_RISK
    if audit == "off" and overrides.get("byzantine_max", "0") == "0":  # with audits off, a job with any other value is refused
        yield NO_AUDITS_WITHOUT_TOLERANCE_RISK
    if overrides.get("outer") != "adamw":
        return
    if overrides.get("bits") == "1" and overrides.get("memory") != "estimates":
        yield (
            "bits=1 with outer=adamw trains badly, because one bit gives all elements of a chunk one size, and AdamW divides "
            "by sizes; set bits=4 (the default with adamw) or outer=nesterov"
        )
