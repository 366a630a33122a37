"""Finds the peer or the job that a person means by a text."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from features.peer_names import NAMED_MARK
from ledger.jobs import Job, QueuedJob
from ledger.members import MembersState
from protocol.errors import UserError
from protocol.identity import parse_peer_id, peer_id, short_id

CHOICES_SHOWN = 8  # of those that a text may mean


def resolve_peer(text: str, members: MembersState) -> bytes:
    """The present key of the peer that `text` names. Raises `UserError` where it names nobody, or may mean several.

    A whole peer id means that key, whatever somebody calls itself. Else the name of one present member counts, or the beginning
    of one key's id. A text that is both, of two peers, is refused: names are not unique, and anybody may take another's.
    """
    wanted = text.strip()
    with contextlib.suppress(UserError):
        return parse_peer_id(wanted)
    named = {key for key, member in members.members.items() if member.name == wanted and members.is_current_key(key)}
    beginning = {members.current_key(key) for key in members.members if wanted and peer_id(key).startswith(wanted.lower())}
    found = sorted(named | beginning)
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(f"no member is called {text!r}, and no peer id begins so; `peers` lists them")
    names = ", ".join(_shown(key, members) for key in found[:CHOICES_SHOWN]) + ", …" * (len(found) > CHOICES_SHOWN)
    raise UserError(f"{text!r} fits {len(found)} peers: {names}; type more of the peer id")


def resolve_job(text: str, jobs: Mapping[bytes, Job | QueuedJob], among: str) -> bytes:
    """The one of these jobs that has this name, or whose id begins so. Raises `UserError`, which calls them `among`."""
    wanted = text.strip()
    found = [key for key, job in jobs.items() if wanted and (wanted == job.name or key.hex().startswith(wanted.lower()))]
    if len(found) != 1:
        names = ", ".join(f"{key.hex()[:8]} {job.name!r}" for key, job in jobs.items()) or "none"
        raise UserError(f"{text!r} fits {len(found) or 'no'} {among} (there are: {names})")
    return found[0]


def _shown(key: bytes, members: MembersState) -> str:
    name = members.members[key].name
    return short_id(key) if name == short_id(key) else f"{short_id(key)} {NAMED_MARK} {name}"
