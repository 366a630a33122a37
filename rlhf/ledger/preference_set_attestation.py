"""Attestation of preference sets: the voters decide whether a plan's set equals the labels of its project. Pure rules.

The ledger holds only digests of a project's pages, so its rules cannot derive the set. The author of a plan names a project, a
height and a set. Each voter derives the set from the ledger and the pages (`rlhf.ledger.decided_pairs`), and
attests its result in a transaction. After each block, while the set is undecided:

| attestations of the present voters | the plan |
|---|---|
| any, if a task of the set was redacted after the plan was decided | is cancelled |
| too many voters derived another set, or none, for a quorum | is cancelled |
| a quorum derived the plan's set | starts; the set is decided |
| otherwise | waits |

A quorum has at least f + 1 honest voters, so an honest voter has derived each decided set.
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

Row = tuple[int, bytes, TaskRow]  # settled task with a pair: index in its page, task id, row
NO_PROJECT: Final = "{} does not compare pairs: preferences need a project of pairs"
# decided sets that no known job or plan uses: used sets stay in any case, because their redactions count
SETS_KEPT_MAX: Final = 64


def decided_pages(state: CurationState, project: bytes, height: int) -> Iterator[tuple[bytes, TaskPageRow, list[Row]]]:
    """Yield each page of a project that has pairs decided up to `height`: key of the page, its row, and these pairs.

    Raises `UserError` if the project does not compare pairs.
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
    """Return True if the task's label names the better response or a tie, and was decided up to `height`."""
    return row.label is not None and row.label[0] in (FIRST, SECOND, TIE) and row.height <= height


@dataclass(frozen=True, slots=True)
class PreferenceSetSource:
    """Origin of a preference set: a project, and a height of its labels."""

    project: Digest
    height: Count  # the set has the pairs that were decided up to this height
    tokens: Digest | None = None  # `DataManifest.tokens`: voters copy the author's value, trainers verify it


@dataclass(frozen=True, slots=True)
class AttestPreferenceSet:
    """`rlhf/attest-set`, by a voter: attests the preference set that the voter derived for a plan."""

    plan: Digest
    set: Digest | None  # digest of the derived set's manifest; None: the project gives no set


@dataclass(frozen=True, slots=True)
class PreferenceSetClaim:
    """Claim of a plan's author that a set follows from a project, with the voters' attestations so far."""

    source: PreferenceSetSource
    set: Digest
    redactions_seen: Count  # number of redactions, in all projects, that the claim has taken into account
    is_decided: bool = False
    attestations: Annotated[dict[Key, Digest | None], Length(0, VOTERS_MAX)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttestedPreferenceSet:
    source: PreferenceSetSource
    decided_height: Count
    redactions_seen: Count  # number of redactions, in all projects, that `redacted` has taken into account
    redacted: Count = 0  # number of pairs of the set that were redacted after the decision


class ClaimStatus(enum.Enum):
    WAITS = "waits"
    DECIDED = "decided"
    REFUSED = "refused"


def create_claim(view: StateReader, source: PreferenceSetSource, named: bytes, height: int) -> PreferenceSetClaim:
    """Return the claim of a new plan. Raises `Refused` if no set can come from this source."""
    if not runs_curation(view):
        raise Refused("this network does not run the module curation, so no project decides preferences")
    curation = view.module_state(CurationState)
    project = curation.projects.get_record(source.project)
    if project is None or project.spec.kind is not QuestionKind.PAIR:
        raise Refused(NO_PROJECT.format(source.project.hex()[:16]))
    if source.project in curation.closing:
        raise Refused(f"the project {project.spec.name!r} is being closed, which may change its labels: wait until it is closed")
    if source.height >= height:
        raise Refused(f"height {source.height} is not decided yet")
    if not project.settled:
        raise Refused(f"the project {project.spec.name!r} has no labels yet")
    return PreferenceSetClaim(source, named, curation.redacted)


def current_voters(members: MembersState) -> tuple[bytes, ...]:
    """Return the current keys of the voters.

    `MembersState.voters` has a voter's old key for some heights after a key rotation.
    """
    return tuple(sorted(map(members.current_key, members.voters)))


def add_attestation(
    claim: PreferenceSetClaim | None, voters: Sequence[bytes], voter: bytes, found: bytes | None
) -> PreferenceSetClaim:
    """Return the claim with a voter's attestation added, and without attestations of former voters. Raises `Refused`."""
    if claim is None or claim.is_decided:
        raise Refused("no plan waits for this preference set")
    if voter not in voters:
        raise Refused("only voters report the preference set of a plan")
    if voter in claim.attestations:
        raise Refused("this voter has already reported its preference set")
    kept = {key: other for key, other in claim.attestations.items() if key in voters}
    return replace(claim, attestations=kept | {voter: found})


def tally_claim(
    claim: PreferenceSetClaim, voters: Sequence[bytes], curation: CurationState
) -> tuple[PreferenceSetClaim, ClaimStatus]:
    """Return a claim after a block with its status, by the table in the docstring of this module."""
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
    """Return the number of pairs of a set among the redactions from number `seen` on."""
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
    """Return the decided sets with their new redactions counted. Sets in `named` stay, and the SETS_KEPT_MAX newest others."""
    others = sorted(sets.keys() - named, key=lambda key: (sets[key].decided_height, key))
    kept = sets.keys() - set(others[: max(0, len(others) - SETS_KEPT_MAX)])
    counted = {key: redacted_since(curation, sets[key].source, sets[key].redactions_seen) for key in sorted(kept)}
    return {
        key: replace(sets[key], redacted=sets[key].redacted + more, redactions_seen=curation.redacted)
        for key, more in counted.items()
    }
