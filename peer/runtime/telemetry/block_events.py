"""What a block changed that people want to know: who belongs and votes now, and which jobs began and ended."""

from __future__ import annotations

from collections.abc import Iterator

from features.feature import EventLine
from features.peer_names import NAMED_MARK, SHORT_ID_LENGTH, PeerNames
from ledger.jobs import NO_PROGRESS_ROUNDS, Job, JobPhase
from ledger.ledger_state import LedgerState
from ledger.members import MembersState
from ledger.model_anchors import format_undone_rounds
from peer import features
from protocol.identity import peer_id, short_id
from protocol.units import display_round_number

FEATURE_EVENT_SOURCES = tuple(features.event_sources())  # loaded before a block comes: an import needs a descriptor


def block_events(before: LedgerState, after: LedgerState) -> Iterator[EventLine]:
    """Between the states of two heights, one after the other."""
    assert after.height == before.height + 1
    yield from _of_members(before.members, after.members)
    for key, job in after.jobs.jobs.items():
        yield from _of_job(key, before.jobs.jobs.get(key), job)
    for of_feature in FEATURE_EVENT_SOURCES:
        yield from of_feature(before, after)


def _of_members(before: MembersState, after: MembersState) -> Iterator[EventLine]:
    replaced = {member.successor for member in after.members.values()}  # a new key is no new member
    for key, member in after.members.items():
        known = before.members.get(key)
        if known is None and key not in replaced and (item := admission_event(key, before, after)) is not None:
            yield item
        elif known is not None and known.name != member.name:
            yield EventLine("member", _called(key, known.name, member.name), key)
    voted, vote = (set(map(after.current_key, voters)) for voters in (before.voters, after.voters))
    for key in sorted(vote - voted):
        yield EventLine("member", f"{short_id(key)} votes now, as one of {len(after.voters)}", key)
    for key in sorted(voted - vote):
        yield EventLine("member", f"{short_id(key)} votes no more; {len(after.voters)} voters are left", key)


def admission_event(key: bytes, before: MembersState, after: MembersState) -> EventLine | None:
    """If somebody's invitation has made this key a member meanwhile."""
    member = after.members.get(key)
    if member is None or member.invited_by is None or key in before.members:
        return None
    return EventLine("member", f"{short_id(key)} was admitted as a member, invited by {short_id(member.invited_by)}", key)


def member_names(members: MembersState) -> PeerNames:
    present = {peer_id(key): member.name for key, member in members.members.items() if members.is_current_key(key)}
    return PeerNames(present, {peer_id(key): member.name for key, member in members.members.items()})


def _called(key: bytes, before: str, now: str) -> str:
    """A founder whom the genesis does not name is called as its id begins."""
    return f"{short_id(key)} {NAMED_MARK} {now}" + (f", and was {before} before" if before != short_id(key) else "")


def _of_job(key: bytes, before: Job | None, after: Job) -> Iterator[EventLine]:
    if before is None:
        yield EventLine("job", f"job {after.name} of {short_id(after.author)} begins: {after.rounds} rounds", key)
    if before is not None and (before.phase, after.phase) == (JobPhase.RUNNING, JobPhase.PAUSED):
        yield EventLine("job", f"job {after.name} is paused after {after.rounds_in_model} rounds", key)
    if before is not None and (before.phase, after.phase) == (JobPhase.PAUSED, JobPhase.RUNNING):
        yield EventLine("job", f"job {after.name} goes on with round {display_round_number(after.round)}", key)
    if after.phase is JobPhase.FINISHED and (before is None or before.phase is not JobPhase.FINISHED):
        ended = "ended early, after" if after.rounds_in_model < after.rounds else "is finished after"
        why = f": its last {NO_PROGRESS_ROUNDS} accepted nothing" * after.made_no_progress
        yield EventLine("job", f"job {after.name} {ended} {after.rounds_in_model} rounds{why}", key)
    asked = before.rollback_requests if before is not None else {}
    for voter, number in after.rollback_requests.items():
        if asked.get(voter) != number:
            text = f"{short_id(voter)} asks that job {after.name} goes back to @{number}"
            yield EventLine("job", f"{text}; whoever agrees says `rollback {key.hex()[:SHORT_ID_LENGTH]} {number}`", key)
    for undone in after.undone_rounds[-1:] if before is not None and after.undone_rounds != before.undone_rounds else ():
        yield EventLine("job", f"job {after.name}: {format_undone_rounds(undone)}", key)
