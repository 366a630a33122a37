"""Transactions of curation. Members found projects and add tasks; serving peers carry what annotators said.

Whoever carries a commitment seals its answer for two more serving peers, which open it if the carrier is gone. They are drawn by
hash, so that everybody knows whose turn it is. Nothing decided looks into a seal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from curation.ledger.curation_state import Choices, ProjectPhase, ProjectSpec, Pseudonym, Reason, Seals
from curation.limits import (
    BATCH_MAX,
    EXCLUDED_PROJECTS_MAX,
    LEASES_MAX,
    PAGE_BYTES_MAX,
    PAGE_TASKS_MAX,
    PAGES_MAX,
    PROOF_DIGESTS_MAX,
    SEALS_MAX,
)
from curation.tasks.answers import Salt
from protocol.codec import Between, Count, Digest, Key, Length, SignatureBytes

Nonce = Annotated[bytes, Length(16, 16)]


# Signed statements -----------------------------------------------------------------------------------------------------

# Annotators sign these with their own keys. Serving peers carry them; nobody else can make one.


@dataclass(frozen=True, slots=True)
class EnrolStatement:
    """I want to annotate in this network under this name, and begin at this peer."""

    TAG: ClassVar[str] = "enrol"
    name: Pseudonym
    peer: Key
    custodial: bool  # the peer keeps the key for me, and could sign in my place


@dataclass(frozen=True, slots=True)
class SessionStatement:
    """This peer may take leases of tasks for me until then."""

    TAG: ClassVar[str] = "session"
    peer: Key
    nonce: Nonce  # that the peer gave me
    expires_ms: Count


@dataclass(frozen=True, slots=True)
class AnnotationStatement:
    """My answer to the assignment is the one that this commits to, see `answers.answer_commitment`."""

    TAG: ClassVar[str] = "annotation"
    assignment: Digest
    commitment: Digest


# Transactions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateProject:
    """`curation/create-project`, by any member: a project. Its id is `project_id`."""

    spec: ProjectSpec


@dataclass(frozen=True, slots=True)
class AddTaskPage:
    """`curation/add-page`, by the project's author: tasks, which follow those that it has."""

    project: Digest
    digest: Digest
    bytes: Annotated[int, Between(1, PAGE_BYTES_MAX)]
    root: Digest
    count: Annotated[int, Between(1, PAGE_TASKS_MAX)]
    gold: Digest | None = None  # as in `curation_state.TaskPageRow`


@dataclass(frozen=True, slots=True)
class GoldAnswerProof:
    """The leaf of a task, and that it is under the page's root of gold."""

    index: Annotated[int, Between(0, PAGE_TASKS_MAX - 1)]  # of the task in its page
    answer: Choices
    salt: Salt
    proof: Annotated[tuple[Digest, ...], Length(0, PROOF_DIGESTS_MAX)]


@dataclass(frozen=True, slots=True)
class RevealGold:
    """`curation/reveal-gold`, by the project's author: the right answers of some tasks of a page, before the close begins."""

    project: Digest
    page: Annotated[int, Between(0, PAGES_MAX - 1)]
    answers: Annotated[tuple[GoldAnswerProof, ...], Length(1, PAGE_TASKS_MAX)]


@dataclass(frozen=True, slots=True)
class SetProjectPhase:
    """`curation/set-phase`, by the project's author: pause it, go on, or close it for ever."""

    project: Digest
    phase: ProjectPhase


@dataclass(frozen=True, slots=True)
class VoteToStopProject:
    """`curation/vote-to-stop`, by a voter: the project closes once a quorum of the voters has said so."""

    project: Digest


@dataclass(frozen=True, slots=True)
class ReviewTask:
    """`curation/review-task`, by the project's author: the label of a task that waits for one."""

    task: Digest
    label: Choices


@dataclass(frozen=True, slots=True)
class EnrolmentEntry:
    annotator: Key
    name: Pseudonym
    custodial: bool
    signature: SignatureBytes  # by the annotator, over `EnrolStatement` with the batch's author as the peer


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """So many more tasks for this annotator, of one project or of all, except those `without`: the peer lacks tasks of these."""

    annotator: Key
    nonce: Nonce
    expires_ms: Count
    # by the annotator, over `SessionStatement` with the batch's author as the peer
    signature: SignatureBytes
    count: Annotated[int, Between(1, LEASES_MAX)]
    excluded_projects: Annotated[tuple[Digest, ...], Length(0, EXCLUDED_PROJECTS_MAX)] = ()
    project: Digest | None = None


@dataclass(frozen=True, slots=True)
class AnswerCommitment:
    assignment: Digest
    annotator: Key  # whose the assignment is: the signature can be verified without the state
    commitment: Digest
    signature: SignatureBytes  # by the annotator, over `AnnotationStatement`
    seals: Seals = ()  # the answer for each of `seal_recipients`; nothing decided depends on what is in them


@dataclass(frozen=True, slots=True)
class AnswerOpening:
    assignment: Digest
    salt: Salt
    answer: Choices


@dataclass(frozen=True, slots=True)
class SkipAssignment:
    """By the peer that took the lease."""

    assignment: Digest
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReleaseAssignment:
    """By the peer that took the lease: nobody looks at the task any more."""

    assignment: Digest


@dataclass(frozen=True, slots=True)
class StatementBatch:
    """`curation/statements`, by a serving peer: at most BATCH_MAX statements in all. They act in this order; any that cannot is
    passed over.
    """

    enrolments: Annotated[tuple[EnrolmentEntry, ...], Length(0, BATCH_MAX)] = ()
    leases: Annotated[tuple[LeaseRequest, ...], Length(0, BATCH_MAX)] = ()
    commits: Annotated[tuple[AnswerCommitment, ...], Length(0, BATCH_MAX)] = ()
    openings: Annotated[tuple[AnswerOpening, ...], Length(0, BATCH_MAX)] = ()
    skips: Annotated[tuple[SkipAssignment, ...], Length(0, BATCH_MAX)] = ()
    releases: Annotated[tuple[ReleaseAssignment, ...], Length(0, BATCH_MAX)] = ()

    @property
    def size(self) -> int:
        return sum(map(len, (self.enrolments, self.leases, self.commits, self.openings, self.skips, self.releases)))


@dataclass(frozen=True, slots=True)
class OpeningSecret:
    """What opens a commitment."""

    salt: Salt
    answer: Choices


def seal_recipients(serving: Iterable[bytes], assignment: bytes, carrier: bytes) -> tuple[bytes, ...]:
    """The serving peers that this answer is sealed for, in the order in which they open it."""
    others = (key for key in serving if key != carrier)
    return tuple(sorted(others, key=lambda key: hashlib.sha256(b"folkmoot/seal\x00" + assignment + key).digest())[:SEALS_MAX])
