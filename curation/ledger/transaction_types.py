"""Transactions of curation. Members create projects and add tasks; serving peers carry the statements of annotators.

The serving peer that sends a commitment, its carrier, encrypts (seals) the answer for two other serving peers, which open it if
the carrier is unreachable. A hash selects these two peers and their order, so that every peer knows them. No decision depends on
the content of a seal.
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

# Annotators sign these statements with their own keys, and serving peers carry them.


@dataclass(frozen=True, slots=True)
class EnrolStatement:
    """Annotator's request to enrol in this network under a name, at the serving peer `peer`."""

    TAG: ClassVar[str] = "enrol"
    name: Pseudonym
    peer: Key
    custodial: bool  # the peer keeps the annotator's key, and could sign without the annotator


@dataclass(frozen=True, slots=True)
class SessionStatement:
    """Permission for a peer to take leases for the annotator until `expires_ms`."""

    TAG: ClassVar[str] = "session"
    peer: Key
    nonce: Nonce  # random number of the peer's challenge
    expires_ms: Count


@dataclass(frozen=True, slots=True)
class AnnotationStatement:
    """The annotator's commitment to its answer to an assignment, see `answers.answer_commitment`."""

    TAG: ClassVar[str] = "annotation"
    assignment: Digest
    commitment: Digest


# Transactions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateProject:
    """`curation/create-project`, by any member: creates a project. The function `project_id` returns its id."""

    spec: ProjectSpec


@dataclass(frozen=True, slots=True)
class AddTaskPage:
    """`curation/add-page`, by the project's author: adds tasks, whose numbers follow those of the project's earlier tasks."""

    project: Digest
    digest: Digest
    bytes: Annotated[int, Between(1, PAGE_BYTES_MAX)]
    root: Digest
    count: Annotated[int, Between(1, PAGE_TASKS_MAX)]
    gold: Digest | None = None  # Merkle root of the gold answers, see `curation_state.TaskPageRow`


@dataclass(frozen=True, slots=True)
class GoldAnswerProof:
    """Right answer of a task, with a proof that its leaf is under the page's root of gold."""

    index: Annotated[int, Between(0, PAGE_TASKS_MAX - 1)]  # index of the task in its page
    answer: Choices
    salt: Salt
    proof: Annotated[tuple[Digest, ...], Length(0, PROOF_DIGESTS_MAX)]


@dataclass(frozen=True, slots=True)
class RevealGold:
    """`curation/reveal-gold`, by the project's author until a minute after it closed: reveals right answers of a page's tasks."""

    project: Digest
    page: Annotated[int, Between(0, PAGES_MAX - 1)]
    answers: Annotated[tuple[GoldAnswerProof, ...], Length(1, PAGE_TASKS_MAX)]


@dataclass(frozen=True, slots=True)
class SetProjectPhase:
    """`curation/set-phase`, by the project's author: pauses the project, opens it again, or closes it for ever."""

    project: Digest
    phase: ProjectPhase


@dataclass(frozen=True, slots=True)
class VoteToStopProject:
    """`curation/vote-to-stop`, by a voter: the project closes once a quorum of the voters has sent it."""

    project: Digest


@dataclass(frozen=True, slots=True)
class ReviewTask:
    """`curation/review-task`, by the project's author: sets the label of a task that waits for its author."""

    task: Digest
    label: Choices


@dataclass(frozen=True, slots=True)
class EnrolmentEntry:
    annotator: Key
    name: Pseudonym
    custodial: bool
    signature: SignatureBytes  # the annotator's signature of `EnrolStatement` with the batch's author as the peer


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Request for `count` more tasks, of one project or of all. `excluded_projects`: projects whose tasks the peer lacks."""

    annotator: Key
    nonce: Nonce
    expires_ms: Count
    # the annotator's signature of `SessionStatement` with the batch's author as the peer
    signature: SignatureBytes
    count: Annotated[int, Between(1, LEASES_MAX)]
    excluded_projects: Annotated[tuple[Digest, ...], Length(0, EXCLUDED_PROJECTS_MAX)] = ()
    project: Digest | None = None


@dataclass(frozen=True, slots=True)
class AnswerCommitment:
    assignment: Digest
    annotator: Key  # annotator of the assignment: a peer can verify the signature without the state
    commitment: Digest
    signature: SignatureBytes  # the annotator's signature of `AnnotationStatement`
    seals: Seals = ()  # the answer, sealed for each of `seal_recipients`; no decision depends on the content of seals


@dataclass(frozen=True, slots=True)
class AnswerOpening:
    assignment: Digest
    salt: Salt
    answer: Choices


@dataclass(frozen=True, slots=True)
class SkipAssignment:
    """Statement of the peer that took the lease: the annotator skips the task."""

    assignment: Digest
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReleaseAssignment:
    """Statement of the peer that took the lease: nobody works on the task, and the lease ends."""

    assignment: Digest


@dataclass(frozen=True, slots=True)
class StatementBatch:
    """`curation/statements`, by a serving peer: at most BATCH_MAX statements.

    Statements act in the order of the fields. A statement that cannot act is passed over.
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
    """Content of a seal: the salt and the answer, which open a commitment."""

    salt: Salt
    answer: Choices


def seal_recipients(serving: Iterable[bytes], assignment: bytes, carrier: bytes) -> tuple[bytes, ...]:
    """Return the serving peers that get a seal of this assignment's answer, in the order in which they try to open it."""
    others = (key for key in serving if key != carrier)
    return tuple(sorted(others, key=lambda key: hashlib.sha256(b"folkmoot/seal\x00" + assignment + key).digest())[:SEALS_MAX])
