"""Commands about audits and challenges."""

from __future__ import annotations

from features.command_arguments import LAST_COUNT, Argument, member_argument, parse_integer_in
from features.commands import CommandContext, command, listing_command
from peer.commands import view_tables
from protocol.api import AuditsView, PeerApi

ROUND = Argument(
    "round",
    nargs="?",
    type=parse_integer_in(1),
    metavar="ROUND",
    help="which of its proposals (default: the newest that can be re-executed)",
)


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
