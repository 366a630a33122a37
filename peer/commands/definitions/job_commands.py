"""Commands about jobs, their rounds, and audits of them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

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
from peer.commands.job_fields import PRESET, SET, build_train_request, setting_warnings
from peer.commands.view_tables import show_named_table
from protocol.api import AuditsView, EventView, JobView, PeerApi, RoundView, RoundVotesView
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


@listing_command("what is and was trained", show_named_table(view_tables.jobs, "no job yet; start one with `train --rounds 80`"))
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
    "the last closed rounds: verdicts, loss, time", show_named_table(view_tables.rounds, "no round is closed yet"), LAST_COUNT
)
async def rounds(asked: CommandContext[PeerApi]) -> tuple[RoundView, ...]:
    return await asked.api.rounds(asked.options.last)


LAST_ROUNDS = Argument(
    "last", nargs="?", type=parse_integer_in(1), default=3, metavar="N", help="how many closed rounds (default 3)"
)


@listing_command(
    "who votes what on whom: open rounds, and the last closed ones",
    show_named_table(view_tables.votes, "no round is open or closed yet"),
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
