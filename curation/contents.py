"""Transactions of curation. Members found projects and add tasks; serving peers carry what annotators said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from curation.limits import BATCH_MAX, LEASES_MAX, PAGE_BYTES_MAX, PAGE_TASKS_MAX, PAGES_MAX, PROOF_DIGESTS_MAX, WITHOUT_MAX
from curation.state import Asked, Choices, Phase, Reason, Seals
from curation.statements import Nonce, Pseudonym, Salt
from protocol.codec import Between, Count, Digest, Key, Length, SignatureBytes


@dataclass(frozen=True, slots=True)
class Found:
    """`curation/found`, by any member: a project. Its id is `project_id`."""

    asked: Asked


@dataclass(frozen=True, slots=True)
class AddPage:
    """`curation/page`, by the project's author: tasks, which follow those that it has."""

    project: Digest
    digest: Digest
    bytes: Annotated[int, Between(1, PAGE_BYTES_MAX)]
    root: Digest
    count: Annotated[int, Between(1, PAGE_TASKS_MAX)]
    gold: Digest | None = None  # as in `state.TaskPage`


@dataclass(frozen=True, slots=True)
class GoldAnswer:
    """The leaf of a task, and that it is under the page's root of gold."""

    index: Annotated[int, Between(0, PAGE_TASKS_MAX - 1)]  # of the task in its page
    answer: Choices
    salt: Salt
    proof: Annotated[tuple[Digest, ...], Length(0, PROOF_DIGESTS_MAX)]


@dataclass(frozen=True, slots=True)
class SayGold:
    """`curation/gold`, by the project's author: the right answers of some tasks of a page, before the close begins."""

    project: Digest
    page: Annotated[int, Between(0, PAGES_MAX - 1)]
    answers: Annotated[tuple[GoldAnswer, ...], Length(1, PAGE_TASKS_MAX)]


@dataclass(frozen=True, slots=True)
class Move:
    """`curation/move`, by the project's author: pause it, go on, or close it for ever."""

    project: Digest
    phase: Phase


@dataclass(frozen=True, slots=True)
class StopProject:
    """`curation/stop`, by a voter: the project closes once a quorum of the voters has said so."""

    project: Digest


@dataclass(frozen=True, slots=True)
class Review:
    """`curation/review`, by the project's author: the label of a task that waits for one."""

    task: Digest
    label: Choices


@dataclass(frozen=True, slots=True)
class Enrolment:
    annotator: Key
    name: Pseudonym
    custodial: bool
    signature: SignatureBytes  # by the annotator, over `statements.Enrol` with the batch's author as the peer


@dataclass(frozen=True, slots=True)
class LeaseWish:
    """So many more tasks for this annotator, of one project or of all, except those `without`: the peer lacks tasks of these."""

    annotator: Key
    nonce: Nonce
    expires_ms: Count
    signature: SignatureBytes  # by the annotator, over `statements.Session` with the batch's author as the peer
    count: Annotated[int, Between(1, LEASES_MAX)]
    without: Annotated[tuple[Digest, ...], Length(0, WITHOUT_MAX)] = ()
    project: Digest | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    assignment: Digest
    annotator: Key  # whose the assignment is: the signature can be verified without the state
    commitment: Digest
    signature: SignatureBytes  # by the annotator, over `statements.Annotation`
    seals: Seals = ()  # the answer for each of `seals.keepers`; nothing decided depends on what is in them


@dataclass(frozen=True, slots=True)
class Opening:
    assignment: Digest
    salt: Salt
    answer: Choices


@dataclass(frozen=True, slots=True)
class Skip:
    """By the peer that took the lease."""

    assignment: Digest
    reason: Reason


@dataclass(frozen=True, slots=True)
class Release:
    """By the peer that took the lease: nobody looks at the task any more."""

    assignment: Digest


@dataclass(frozen=True, slots=True)
class Batch:
    """`curation/batch`, by a serving peer: at most BATCH_MAX statements in all. They act in this order; any that cannot is passed
    over.
    """

    enrolments: Annotated[tuple[Enrolment, ...], Length(0, BATCH_MAX)] = ()
    leases: Annotated[tuple[LeaseWish, ...], Length(0, BATCH_MAX)] = ()
    commits: Annotated[tuple[Commit, ...], Length(0, BATCH_MAX)] = ()
    openings: Annotated[tuple[Opening, ...], Length(0, BATCH_MAX)] = ()
    skips: Annotated[tuple[Skip, ...], Length(0, BATCH_MAX)] = ()
    releases: Annotated[tuple[Release, ...], Length(0, BATCH_MAX)] = ()

    @property
    def size(self) -> int:
        return sum(map(len, (self.enrolments, self.leases, self.commits, self.openings, self.skips, self.releases)))
