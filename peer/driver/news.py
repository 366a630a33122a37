"""What a block changed that people want to know: who belongs and votes now, and which jobs began and ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ledger.jobs import Job, Phase
from ledger.members import MembersState
from ledger.state import State
from protocol.identity import short_id


@dataclass(frozen=True, slots=True)
class News:
    kind: str  # of an event: member or job
    text: str
    about: bytes  # the member, or the job


def news(before: State, after: State) -> Iterator[News]:
    """Between the states of two heights, one after the other."""
    assert after.height == before.height + 1
    yield from _of_members(before.members, after.members)
    for key, job in after.jobs.jobs.items():
        yield from _of_job(key, before.jobs.jobs.get(key), job)


def _of_members(before: MembersState, after: MembersState) -> Iterator[News]:
    replaced = {member.successor for member in after.members.values()}  # a new key is no new member
    for key, member in after.members.items():
        known = before.members.get(key)
        if known is None and member.invited_by is not None and key not in replaced:
            yield News("member", f"{short_id(key)} was admitted as a member, invited by {short_id(member.invited_by)}", key)
        elif known is not None and known.name != member.name:
            yield News("member", f"{short_id(key)} was {known.name} before", key)
    voted, vote = (set(map(after.current, voters)) for voters in (before.voters, after.voters))
    for key in sorted(vote - voted):
        yield News("member", f"{short_id(key)} votes now, as one of {len(after.voters)}", key)
    for key in sorted(voted - vote):
        yield News("member", f"{short_id(key)} votes no more; {len(after.voters)} voters are left", key)


def _of_job(key: bytes, before: Job | None, after: Job) -> Iterator[News]:
    if before is None:
        yield News("job", f"job {after.name} of {short_id(after.author)} begins: {after.rounds} rounds", key)
    if after.phase is Phase.FINISHED and (before is None or before.phase is not Phase.FINISHED):
        ended = "ended early, after" if after.round < after.rounds else "is finished after"
        yield News("job", f"job {after.name} {ended} {after.round} rounds", key)
