"""Search for the peer or the job that a person named by a name or the beginning of an id."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from features.peer_names import NAMED_MARK
from ledger.jobs import Job, QueuedJob
from ledger.members import MembersState
from protocol.errors import UserError
from protocol.identity import parse_peer_id, peer_id, short_id

CHOICES_SHOWN = 8  # most candidates in the error about an ambiguous text


def resolve_peer(text: str, members: MembersState) -> bytes:
    """Return the current key of the peer that `text` names. Raises `UserError` if `text` fits no peer, or more than one.

    A whole peer id means that key, even if a member has it as its name. Otherwise the text is the name of a present member or the
    beginning of a peer id. Names are not unique, and any member may take the name of another peer, so ambiguous texts are
    refused.
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
        raise UserError(f"unknown member {text!r}: `peer peers` lists names and peer ids")
    names = ", ".join(_shown(key, members) for key in found[:CHOICES_SHOWN]) + ", …" * (len(found) > CHOICES_SHOWN)
    raise UserError(f"{text!r} matches {len(found)} members: {names}; type more of the peer id")


def resolve_job(text: str, jobs: Mapping[bytes, Job | QueuedJob], among: str) -> bytes:
    """Return the key of the job with this name or with an id that begins with `text`.

    Raises `UserError` unless exactly one job fits. `among` is the noun for the jobs in the error.
    """
    wanted = text.strip()
    found = [key for key, job in jobs.items() if wanted and (wanted == job.name or key.hex().startswith(wanted.lower()))]
    if len(found) != 1:
        names = ", ".join(f"{key.hex()[:8]} {job.name!r}" for key, job in jobs.items()) or "none"
        raise UserError(f"{text!r} matches {len(found) or 'no'} {among} (choices: {names})")
    return found[0]


def _shown(key: bytes, members: MembersState) -> str:
    name = members.members[key].name
    return short_id(key) if name == short_id(key) else f"{short_id(key)} {NAMED_MARK} {name}"
