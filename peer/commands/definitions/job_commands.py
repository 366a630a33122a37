"""Commands about jobs, their rounds, and audits of them; and the fields of a job, as a person says them."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path

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
from peer.commands import view_tables
from peer.runtime.telemetry.risk_warnings import (
    NO_AUDITS_WITHOUT_TOLERANCE_RISK,
    SAMPLED_AUDITS_RISK,
    SAMPLED_AUDITS_WITHOUT_TOLERANCE_RISK,
)
from protocol.api import AuditsView, EventView, JobView, PeerApi, RoundView, RoundVotesView, TrainRequest
from protocol.errors import UserError
from protocol.units import display_round_number, format_bytes

TEST_SECONDS_MAX = 180.0  # a scratch round waits at most for the slowest timers of a round

ROUNDS = Argument("--rounds", type=parse_integer_in(1), default=0, metavar="N", help="how many rounds to train")
DATA = Argument("--data", metavar="PATH", help="text file or folder, or `local`; default: the built-in text")
COLUMN = Argument(
    "--column", default="", metavar="NAME", help="field of JSON, or column of a table, with the text (default: text)"
)
NAME = Argument("--name", default="", metavar="NAME", help="what people call the job")
FROM_MODEL = Argument(
    "--from",
    dest="base",
    default="",
    metavar="JOB",
    help="start from the model of a job, by its name or id (@ROUND: after so many rounds), or of a folder",
)
EXAMPLES = Argument(
    "examples", nargs="?", default="", metavar="FILE", help="with --from: JSONL with prompt, response; the responses are learned"
)
ACCEPT_RISK = Argument("--accept-risk", action="store_true", help="start it also where sampled audits find liars late")
VOCABULARY = Argument("--vocabulary", type=parse_integer_in(256), default=0, metavar="N", help="more than 257: train a BPE")

ROUND = Argument(
    "round",
    nargs="?",
    type=parse_integer_in(1),
    metavar="ROUND",
    help="which of its proposals (default: the newest that can be re-executed)",
)

# Of `training.job_spec`, which is imported only where they are used: name -> what for.
PRESETS = {
    "local": "one bit of every element after ten steps of one's own; for most links, from 30 rounds on (default)",
    "per-step": "four bits of every gradient; most progress a sample, for fast links, from 300 rounds on",
}
PRESET = Argument(
    "--preset",
    choices=tuple(PRESETS),
    metavar="NAME",
    help="settings that go together. " + ". ".join(f"{name}: {about}" for name, about in PRESETS.items()),
)
SET = Argument("--set", action="extend", nargs="+", default=[], metavar="FIELD=VALUE", help="other fields of the job")

DERIVED_FIELDS_OF_PRESETS = ("warmup_rounds", "rule")  # the first from how many rounds there are, the second from who re-executes
# Fields of a job that `train` or `peer demo` have an argument for.
ARGUMENTS = {"rounds": "rounds", "vocabulary": "model.vocabulary", "audit": "audit", "seed": "seed"}

# A field, the field that decides whether it counts, and with which of its values.
USED_ONLY_WITH = (
    ("outer_rate", "outer", ("nesterov", "sgd", "sign")),
    ("outer_momentum", "outer", ("nesterov", "sign")),
    ("audit_rate", "audit", ("sampled",)),
    ("auditors", "audit", ("sampled",)),
    ("audit_window", "audit", ("sampled",)),
    ("uplink_mbit_min", "audit", ("sampled",)),
    ("final_full_audit_rounds", "audit", ("sampled",)),
)

RULES_WITH_BYZANTINE_MAX = ("arc-nnm-trim", "trimmed-mean", "krum")  # they ask for the number; the others get along without it


@command(
    "start a job: --preset NAME --rounds N --data PATH --column NAME --name NAME --from JOB --vocabulary N --accept-risk "
    "--set FIELD=VALUE; "
    "train --from JOB FILE.jsonl learns responses",
    *(EXAMPLES, SKIP_BAD, TRUNCATE, PRESET, ROUNDS, DATA, COLUMN, NAME, FROM_MODEL, VOCABULARY, ACCEPT_RISK, SET),
)
async def train(asked: CommandContext[PeerApi]) -> None:
    request = build_train_request(asked.options)
    job = await asked.wait_for_decision(asked.api.start_job(request))
    view = next((view for view in await asked.api.jobs() if view.job == job), None)
    if view is None or not view.queue_position:
        how = "; `watch` shows how it goes"
    elif view.initial_model_holders:
        how = ", and starts by itself when enough voters hold its model; `jobs` shows how many do"
    else:
        how = (
            f", and waits in line as number {view.queue_position}: it starts by itself when its turn comes, `jobs` shows the line"
        )
    asked.show(f"job {job} is decided{how}")
    if view and view.disk_bytes:
        asked.show(f"it takes up to {format_bytes(view.disk_bytes)} of this peer's disk")
    if no_room := (await asked.api.status()).disk_shortage:
        asked.show(no_room)
    for note in (view.machine_time, *view.notes) if view else ():
        if note:
            asked.show(note)
    for warning in setting_warnings(request, parse_set_options(asked.options.set), view.audit) if view else ():
        asked.show(f"{warning} (`cancel {view_tables.shorten_id(job)}` ends this job)")


@command("a scratch round on the live network, phase by phase")
async def test(asked: CommandContext[PeerApi]) -> None:
    import trio

    api = asked.api
    newest = await api.events(-1, 0.0)
    seen = newest[-1].number if newest else 0
    before, known = await api.jobs(), await asked.load_names()
    job = await asked.wait_for_decision(api.run_test_round())
    asked.show(f"scratch round, job {view_tables.shorten_id(job)}: a known update is proposed, judged, voted and applied")
    with trio.move_on_after(TEST_SECONDS_MAX):
        async with aclosing(_phases(api, job, seen)) as phases:
            async for event in phases:
                asked.show(view_tables.event_line(event, known))
                if event.kind == "applied":
                    asked.show(_unchanged(before, await api.jobs(), job))
                    return
    raise UserError(f"the scratch round is not decided after {TEST_SECONDS_MAX:.0f} s; `peers` shows who is missing")


async def _phases(api: PeerApi, job: str, seen: int) -> AsyncGenerator[EventView, None]:
    """The job's own events, and the deciding and applying of the block that closes its round."""
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
    """Says of every model that is still there whether the scratch round touched it; its own rounds may have gone on meanwhile."""
    now = {job.job: job for job in after}
    objective = now[test].objective if test in now else ""  # earlier tests trained no model either
    models = [job for job in before if job.objective != objective and job.job in now]
    if not models:
        return "no model is being trained, so there is none that the test could have touched"
    lines = []
    for job in models:
        same = (now[job.job].round, now[job.job].model_root) == (job.round, job.model_root)
        moved = "unchanged" if same else f"moved on by its own round {display_round_number(job.round)}"
        lines.append(f"job {view_tables.shorten_id(job.job)}: model root {job.model_root[:16]} {moved}")
    return "\n".join(lines)


@command(
    "end a job: cancel JOB (its author alone, voters by a quorum)",
    Argument("job", metavar="JOB", help="a running job's id; its first characters are enough"),
)
async def cancel(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.cancel_job(asked.options.job)))


@command(
    "take a job back to an anchor: rollback JOB ROUND (voters by a quorum)",
    Argument("job", metavar="JOB", help="the id of a job that goes on; its first characters are enough"),
    Argument(
        "round",
        type=parse_integer_in(0),
        metavar="ROUND",
        help="an anchor, as in JOB@ROUND; the open round: take your request back",
    ),
)
async def rollback(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.request_rollback(asked.options.job, asked.options.round)))


@listing_command(
    "what is and was trained", view_tables.show_named_table(view_tables.jobs, "no job yet; start one with `train --rounds 80`")
)
async def jobs(asked: CommandContext[PeerApi]) -> tuple[JobView, ...]:
    return await asked.api.jobs()


@command(
    "a job as it goes: rounds, loss, who is waited for; ends with the job: watch JOB",
    Argument(
        "job", nargs="?", default="", metavar="JOB", help="its name, or the first characters of its id (default: what runs)"
    ),
)
async def watch(asked: CommandContext[PeerApi]) -> int:
    from peer.commands.job_monitor import watch_job

    job = await watch_job(
        asked.api, asked.options.job, await asked.load_names(), asked.show, sys.stdout.isatty() and not asked.is_at_prompt
    )
    return int(job.rounds_in_model < job.rounds)


@listing_command(
    "the last closed rounds: verdicts, loss, time",
    view_tables.show_named_table(view_tables.rounds, "no round is closed yet"),
    LAST_COUNT,
)
async def rounds(asked: CommandContext[PeerApi]) -> tuple[RoundView, ...]:
    return await asked.api.rounds(asked.options.last)


LAST_ROUNDS = Argument(
    "last", nargs="?", type=parse_integer_in(1), default=3, metavar="N", help="how many closed rounds (default 3)"
)


@listing_command(
    "who votes what on whom: open rounds, and the last closed ones",
    view_tables.show_named_table(view_tables.votes, "no round is open or closed yet"),
    LAST_ROUNDS,
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
        asked.show("no sampled audit has come to a result yet; `train --set audit=sampled` starts a job that has them")
    if any(job.audit == "full" for job in await asked.api.jobs()):
        asked.show(
            "audit=full: `rounds` has the verdicts, whose ballots were counted, and who vouches for each accepted update: "
            "these voters signed that they re-executed it before the vote"
        )


@listing_command("sampled audits: who, by whom, what came out, and everybody's standing", _show_audits, LAST_COUNT)
async def audits(asked: CommandContext[PeerApi]) -> AuditsView:
    return await asked.api.audits(asked.options.last)


@command(
    "re-execute the accepted proposals of a round, and report on them: challenge TRAINER [ROUND]",
    member_argument("trainer", "TRAINER"),
    ROUND,
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
        raise UserError("--data '' names no text: give a file or folder, or leave --data out for the built-in text")
    data = options.data or ""
    if data not in ("", "local"):
        data = str(Path(data).expanduser().absolute())  # the daemon may have another working directory
    examples = str(Path(options.examples).expanduser().absolute()) if options.examples else ""
    said_of_text = options.name, data, options.rounds, options.vocabulary, overrides
    if (options.skip_bad or options.truncate) and not examples:
        raise UserError("--skip-bad and --truncate are about a file with responses: train --from JOB FILE.jsonl")
    if options.column and data in ("", "local"):
        raise UserError(f"--column {options.column} is about a file or folder: name it by --data PATH")
    of_file = options.skip_bad, options.truncate, options.column
    return TrainRequest(*said_of_text, options.base, examples, _folder(options.base), options.accept_risk, *of_file)


def _folder(base: str) -> str:
    """What is typed with a slash is a path; any other text may also be the name of a folder that is here."""
    path = Path(base).expanduser().absolute()
    return str(path) if "/" in base or (base and path.is_dir()) else ""


def preset_overrides(preset: str | None, said: Mapping[str, str]) -> dict[str, str]:
    """A preset's fields as a person would type them, but for those that follow from other fields
    (`training.job_spec.complete_fields`).

    Beside `memory=estimates` that are bits, momentum and rates as well: those of the preset were not measured with it.
    """
    from training.job_spec import PRESETS, fields_set_by_estimates

    fields = PRESETS[preset] if preset else {}
    follow: tuple[str, ...] = DERIVED_FIELDS_OF_PRESETS
    if said.get("memory") == "estimates":
        follow += fields_set_by_estimates({**fields, **said})
    return {name: str(value) for name, value in fields.items() if name not in follow}


def job_overrides(options: argparse.Namespace) -> dict[str, str]:
    """The values that `--set` gives, by field. Raises `UserError`, too, where another argument contradicts."""
    said = parse_set_options(options.set)
    for argument, name in ARGUMENTS.items():
        value = getattr(options, argument, None)
        if value and said.get(name, str(value)) != str(value):
            raise UserError(f"both --{argument} {value} and --set {name}={said[name]}: say one")
    return said


def aggregation_rule(overrides: Mapping[str, str]) -> str:
    """The rule that a job with these fields has."""
    from training.job_spec import JobSpec, complete_fields

    named = {name: overrides[name] for name in ("outer", "audit", "memory", "rule") if name in overrides}
    return str(JobSpec(name="rule", **complete_fields(named)).rule)


def setting_warnings(request: TrainRequest, said: Mapping[str, str], audit: str) -> Iterator[str]:
    """Warns of settings that are possible, but seldom meant. `said` are the fields that the person named, without a preset;
    `audit` is the job's audit mode.
    """
    overrides, local = {"outer": "nesterov", **request.overrides, "audit": audit}, request.data == "local"
    for name, other, users in USED_ONLY_WITH:
        value = overrides[other]
        if name in said and value not in users:
            yield f"{name}={said[name]} does nothing with {other}={value}: it counts with {' or '.join(users)}"
    rule = aggregation_rule(overrides)
    if "byzantine_max" in said and rule not in RULES_WITH_BYZANTINE_MAX:
        yield (
            f"byzantine_max={said['byzantine_max']} does nothing with rule={rule}: it counts with "
            f"{' or '.join(RULES_WITH_BYZANTINE_MAX)}"
        )
    if local:
        yield "each trainer uses its own text, so nobody can re-execute: audits are off, and votes check the form of updates only"
    elif audit == "sampled":
        yield SAMPLED_AUDITS_RISK
        if overrides.get("byzantine_max") == "0":
            yield SAMPLED_AUDITS_WITHOUT_TOLERANCE_RISK
    if audit == "off" and overrides.get("byzantine_max", "0") == "0":  # any other is refused
        yield NO_AUDITS_WITHOUT_TOLERANCE_RISK
    if overrides.get("outer") != "adamw":
        return
    if overrides.get("bits") == "1" and overrides.get("memory") != "estimates":
        yield (
            "bits=1 with outer=adamw trains badly: one bit gives all elements of a chunk one size, and AdamW divides by sizes; "
            "take bits=4 (the default with adamw), or outer=nesterov"
        )
