"""Words about audits and challenges."""

from __future__ import annotations

from features.arguments import HOW_MANY, Argument, member, whole_number
from features.words import Asked, listing, word
from peer.commands import views
from protocol.api import AuditsView, PeerApi

ROUND = Argument(
    "round",
    nargs="?",
    type=whole_number(1),
    metavar="ROUND",
    help="which of its proposals (default: the newest that can be re-executed)",
)


async def _show_audits(asked: Asked[PeerApi], view: AuditsView) -> None:
    if view.standings:
        known = await asked.names()
        asked.show(views.audits(view.log, known))
        asked.show(views.standings(view.standings, known))
        if view.suspended:
            asked.show(views.suspensions(view.suspended, known))
    else:
        asked.show("no sampled audit has come to a result yet; `train --set audit=sampled` starts a job that has them")
    if any(job.audit == "full" for job in await asked.api.jobs()):
        asked.show(
            "audit=full: `rounds` has the verdicts, whose ballots were counted, and who vouches for each accepted update: "
            "these voters signed that they re-executed it before the vote"
        )


@listing("sampled audits: who, by whom, what came out, and everybody's standing", _show_audits, HOW_MANY)
async def audits(asked: Asked[PeerApi]) -> AuditsView:
    return await asked.api.audits(asked.options.last)


@word(
    "re-execute the accepted proposals of a round, and report on them: challenge TRAINER [ROUND]",
    member("trainer", "TRAINER"),
    ROUND,
)
async def challenge(asked: Asked[PeerApi]) -> None:
    asked.show(
        await asked.decided(
            asked.api.challenge_trainer(asked.options.trainer, None if (number := asked.options.round) is None else number - 1)
        )
    )
