"""Sets of preferences that people decided in a project. Pure rules: which set a plan may learn from is said by the voters.

The texts of a project are in pages, which the state names by digest alone. So no rule can make the set of a project itself. The
author of a plan names project, height and set. Every voter derives the set from the state and the pages that it has
(`rlhf.preference_derivation.decided_pairs`) and says by a transaction what it found. After each block:

| what the present voters have said of a set that is not decided yet | the plan |
|---|---|
| a quorum derived the set that the plan names | begins; the set is decided |
| so many derived another one, or none, that no quorum is left for it | is cancelled |
| anything, and a task of the set was redacted since the plan was decided | is cancelled |
| anything else | waits |

Of a quorum at least f + 1 voters are honest: so no set is decided that nobody honest has derived.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from consensus.voter_set import VoterSet
from curation.estimation.rank_aggregation import FIRST, SECOND, TIE
from curation.ledger.curation_module import runs_curation
from curation.ledger.curation_state import CurationState, TaskPageRow, TaskRow, page_key, redaction_key
from curation.tasks.answers import QuestionKind
from curation.tasks.task_pages import task_id
from ledger.core.module import Refused, StateReader
from ledger.members import MembersState
from protocol.codec import Count, Digest, Key, Length
from protocol.errors import UserError
from protocol.limits import VOTERS_MAX

Row = tuple[int, bytes, TaskRow]  # of a pair: its place in its page, its task, its row
NO_PROJECT: Final = "{} is no project of pairs: preferences come of those alone"
SETS_KEPT_MAX: Final = 64  # decided sets beside those of jobs and plans that are known: of these no redaction may be forgotten


def decided_pages(state: CurationState, project: bytes, height: int) -> Iterator[tuple[bytes, TaskPageRow, list[Row]]]:
    """Pages with pairs that were decided up to a height, by their keys.

    `UserError`: it is no project that compares responses.
    """
    row = state.projects.get_record(project)
    if row is None or row.spec.kind is not QuestionKind.PAIR:
        raise UserError(NO_PROJECT.format(project.hex()[:16]))
    for number in range(row.pages):
        key = page_key(project, number)
        entry = state.pages.get_record(key)
        assert entry is not None, "a project has the rows of its pages"
        tasks = ((index, task_id(project, entry.first + index)) for index in range(entry.count))
        rows = [(index, task, found) for index, task in tasks if (found := state.tasks.get_record(task)) is not None]
        settled = [item for item in rows if not item[2].is_redacted and is_decided_comparison(item[2], height)]
        if settled:
            yield key, entry, settled


def is_decided_comparison(row: TaskRow, height: int) -> bool:
    """It was decided up to this height which response is the better one, or that none is."""
    return row.label is not None and row.label[0] in (FIRST, SECOND, TIE) and row.height <= height


@dataclass(frozen=True, slots=True)
class PreferenceSetSource:
    """Where a set comes from."""

    project: Digest
    height: Count  # pairs that were decided up to it
    tokens: Digest | None = None  # what a manifest says of them: the voters take the author's word, trainers check it


@dataclass(frozen=True, slots=True)
class AttestPreferenceSet:
    """`rlhf/attest-set`, by a voter: what it derived."""

    plan: Digest
    set: Digest | None  # of the manifest; None: the project gives no set


@dataclass(frozen=True, slots=True)
class PreferenceSetClaim:
    """The set of a plan, as its author names it, and what the voters have said of it so far."""

    source: PreferenceSetSource
    set: Digest
    redactions_seen: Count  # of the redacted tasks of all projects, how many were looked at
    is_decided: bool = False
    attestations: Annotated[dict[Key, Digest | None], Length(0, VOTERS_MAX)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttestedPreferenceSet:
    source: PreferenceSetSource
    decided_height: Count  # height
    redactions_seen: Count  # as of a claim
    redacted: Count = 0  # tasks of it that were redacted since


class ClaimStatus(enum.Enum):
    WAITS = "waits"
    DECIDED = "decided"
    REFUSED = "refused"


def create_claim(view: StateReader, source: PreferenceSetSource, named: bytes, height: int) -> PreferenceSetClaim:
    """Raises `Refused` for a source of which no set can come."""
    if not runs_curation(view):
        raise Refused("this network does not run the module curation, so no project decides preferences")
    curation = view.module_state(CurationState)
    project = curation.projects.get_record(source.project)
    if project is None or project.spec.kind is not QuestionKind.PAIR:
        raise Refused(NO_PROJECT.format(source.project.hex()[:16]))
    if source.project in curation.closing:
        raise Refused(f"the project {project.spec.name!r} is being closed, which may change its labels: wait until that is done")
    if source.height >= height:
        raise Refused(f"height {source.height} is not decided yet")
    if not project.settled:
        raise Refused(f"nothing is decided in the project {project.spec.name!r} yet")
    return PreferenceSetClaim(source, named, curation.redacted)


def current_voters(members: MembersState) -> tuple[bytes, ...]:
    """By their keys of now: some heights pass until a voter votes with a key that it has changed."""
    return tuple(sorted(map(members.current_key, members.voters)))


def add_attestation(
    claim: PreferenceSetClaim | None, voters: Sequence[bytes], voter: bytes, found: bytes | None
) -> PreferenceSetClaim:
    """After a voter has said what it derived. Those that do not vote any more are dropped, as with projects that are stopped."""
    if claim is None or claim.is_decided:
        raise Refused("no such plan waits for its set")
    if voter not in voters:
        raise Refused("only a voter says which set a plan learns from")
    if voter in claim.attestations:
        raise Refused("this voter has said already what it derived")
    kept = {key: other for key, other in claim.attestations.items() if key in voters}
    return replace(claim, attestations=kept | {voter: found})


def tally_claim(
    claim: PreferenceSetClaim, voters: Sequence[bytes], curation: CurationState
) -> tuple[PreferenceSetClaim, ClaimStatus]:
    """The table above."""
    known = VoterSet.from_keys(voters)
    spoken = [claim.attestations[voter] for voter in voters if voter in claim.attestations]
    agree = sum(found == claim.set for found in spoken)
    redacted = redacted_since(curation, claim.source, claim.redactions_seen)
    claim = replace(claim, redactions_seen=curation.redacted)
    if redacted or len(spoken) - agree > len(known) - known.quorum:
        return claim, ClaimStatus.REFUSED
    if agree >= known.quorum:
        return replace(claim, is_decided=True, attestations={}), ClaimStatus.DECIDED
    return claim, ClaimStatus.WAITS


def redacted_since(curation: CurationState, source: PreferenceSetSource, seen: int) -> int:
    """How many pairs of a set were redacted after so many redactions."""
    found = 0
    for place in range(seen, curation.redacted):
        redaction = curation.redactions.get_record(redaction_key(place))
        if redaction is None or redaction.project != source.project:
            continue
        page = curation.pages.get_record(page_key(redaction.project, redaction.page))
        assert page is not None, "a redaction is of a page"
        row = curation.tasks.get_record(task_id(redaction.project, page.first + redaction.index))
        found += row is not None and is_decided_comparison(row, source.height)
    return found


def update_attested_sets(
    sets: Mapping[bytes, AttestedPreferenceSet], curation: CurationState, named: Set[bytes]
) -> dict[bytes, AttestedPreferenceSet]:
    """With what was redacted since the last block; without the oldest ones of those that are not `named` any more."""
    others = sorted(sets.keys() - named, key=lambda key: (sets[key].decided_height, key))
    kept = sets.keys() - set(others[: max(0, len(others) - SETS_KEPT_MAX)])
    counted = {key: redacted_since(curation, sets[key].source, sets[key].redactions_seen) for key in sorted(kept)}
    return {
        key: replace(sets[key], redacted=sets[key].redacted + more, redactions_seen=curation.redacted)
        for key, more in counted.items()
    }
