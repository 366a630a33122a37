"""The decided state of curation. A block changes only some rows. A task without a row is not begun.

| table         | key                            | row                                                          |
|---------------|--------------------------------|--------------------------------------------------------------|
| `projects`    | project                        | its question and its progress                                |
| `pages`       | project ‖ page (u32)           | digest of the blob with the tasks, and their Merkle root     |
| `tasks`       | task                           | a begun task: its annotators, its number of votes, its label |
| `places`      | project ‖ list ‖ place (u32)   | an element of a list of task numbers, see `state_changes`    |
| `annotators`  | annotator's key                | name, serving peer, leases, counts                           |
| `assignments` | assignment                     | one annotator's lease of one task, and its vote              |
| `skills`      | project ‖ annotator's key      | number of tasks by label and this annotator's vote           |
| `shares`      | serving peer's key             | number of annotators that have its places                    |
| `due`         | queue ‖ place (u64)            | an entry that expires at a given time, see `curation_module` |
| `closings`    | project                        | progress of its close, until it is done, see `project_close` |
| `agreements`  | project                        | how often values coincide in its settled tasks               |
| `golds`       | task                           | the right answer, after its author has revealed it           |
| `redactions`  | place (u64)                    | redacted tasks, in the order of their redactions             |
| `wishes`      | voter's key                    | the redaction that a voter wants, until enough voters do     |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated

from curation.limits import (
    ANNOTATORS_MAX,
    ASSIGNED_MAX,
    LEASES_MAX,
    NAME_CHARACTERS_MAX,
    OPTION_CHARACTERS_MAX,
    OPTIONS_MAX,
    PAGE_BYTES_MAX,
    PAGE_TASKS_MAX,
    PAGES_MAX,
    PRICE_MAX,
    PROJECTS_MAX,
    RANKED_MAX,
    REASON_CHARACTERS_MAX,
    SEAL_BYTES_MAX,
    SEALS_MAX,
    VOTES_MAX,
)
from curation.tasks.answers import QuestionKind
from ledger.tables import Table
from protocol.codec import Between, Count, Digest, Key, Length
from protocol.limits import VOTERS_MAX
from protocol.messages import Name

Pseudonym = Annotated[str, Length(1, NAME_CHARACTERS_MAX)]
Options = Annotated[tuple[Annotated[str, Length(1, OPTION_CHARACTERS_MAX)], ...], Length(0, OPTIONS_MAX)]
Votes = Annotated[int, Between(1, VOTES_MAX)]
Price = Annotated[int, Between(0, PRICE_MAX)]
Choices = Annotated[tuple[Annotated[int, Between(0, 255)], ...], Length(0, OPTIONS_MAX)]
Reason = Annotated[str, Length(1, REASON_CHARACTERS_MAX)]
Seals = Annotated[tuple[Annotated[bytes, Length(0, SEAL_BYTES_MAX)], ...], Length(0, SEALS_MAX)]


class TextFormat(enum.StrEnum):
    """Form in which pages show the texts of tasks and of their items."""

    PLAIN = "plain"
    MARKDOWN = "markdown"
    CHAT = "chat"  # turns of role and text, each text as Markdown


@dataclass(frozen=True, slots=True)
class ProjectSpec:
    """Question of a project, as its author wrote it."""

    name: Name
    kind: QuestionKind
    options: Options
    many: bool
    items: Annotated[int, Between(0, RANKED_MAX)]  # items per task: 2 for a pair, 3 to 9 for a ranking, 0 for others
    guidelines: Digest | None  # digest of a blob with UTF-8 text, at most GUIDELINES_BYTES_MAX
    votes: Votes  # maximum for a task; if it is above 1, a task has at least two
    price: Price  # points for each settled task
    suggests_first: bool  # a suggestion is shown with the task, not after the answer
    display: TextFormat = TextFormat.PLAIN


class ProjectPhase(enum.StrEnum):
    OPEN = "open"
    PAUSED = "paused"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Project:
    author: Key
    spec: ProjectSpec
    phase: ProjectPhase
    pages: Annotated[int, Between(0, PAGES_MAX)] = 0
    tasks: Count = 0
    fresh_drawn: Count = 0  # tasks that were drawn from the list of fresh ones
    begun: Count = 0  # begun tasks with a free place: the length of their list
    settled: Count = 0
    review: Count = 0  # tasks that wait for their author
    golds: Count = 0  # tasks whose right answer is revealed
    paid: Count = 0  # points that its annotators got at the close
    stop_requests: Annotated[tuple[Key, ...], Length(0, VOTERS_MAX)] = ()  # voters that want it closed


@dataclass(frozen=True, slots=True)
class TaskPageRow:
    digest: Digest  # digest of the blob
    bytes: Annotated[int, Between(1, PAGE_BYTES_MAX)]
    root: Digest  # Merkle root over the tasks
    first: Count  # number of its first task
    count: Annotated[int, Between(1, PAGE_TASKS_MAX)]
    gold: Digest | None = None  # Merkle root over a leaf for each task; only the author knows which tasks are gold


class TaskStage(enum.StrEnum):
    BEGUN = "begun"  # votes are missing
    OPENING = "opening"  # all requested votes are committed
    SETTLED = "settled"
    REVIEW = "review"  # The author decides the label.
    REDACTED = "redacted"  # no annotator gets it; a task that was settled before stays settled


@dataclass(frozen=True, slots=True)
class TaskRow:
    project: Digest
    number: Count
    stage: TaskStage
    votes_asked: Votes  # votes requested so far
    places_taken: Annotated[int, Between(0, ASSIGNED_MAX)]  # leases and votes that hold a place
    committed: Annotated[int, Between(0, VOTES_MAX)]
    opened: Annotated[int, Between(0, VOTES_MAX)]
    skipped: Annotated[int, Between(0, ASSIGNED_MAX)]
    index_slot: Count | None  # place in the list of begun tasks with a free place
    annotators: Annotated[tuple[Key, ...], Length(0, ASSIGNED_MAX)]  # all that ever had it, in order
    label: Choices | None = None
    height: Count = 0  # height of the block that settled the task
    time_ms: Count = 0  # the network's time then: that of the block before
    is_reviewed: bool = False  # the author set the label, and no estimate changes it
    is_redacted: bool = False  # The text is deleted.


class AssignmentState(enum.StrEnum):
    LEASED = "leased"
    EXPIRED = "expired"  # an answer still counts while the place is free
    RELEASED = "released"  # like expired, and the annotator may get the task again
    SKIPPED = "skipped"
    COMMITTED = "committed"
    OPENED = "opened"
    FORFEITED = "forfeited"  # committed, but not opened in time
    SETTLED = "settled"


@dataclass(frozen=True, slots=True)
class Assignment:
    project: Digest
    number: Count  # number of the task
    annotator: Key
    peer: Key  # the peer that took the lease, and later the one that carried the commitment
    deadline_ms: Count  # deadline of the lease, and later of the opening
    state: AssignmentState
    commitment: Digest | None = None
    answer: Choices | None = None
    height: Count = 0  # height of the block that committed the answer
    time_ms: Count = 0  # the network's time then: that of the block before
    is_blind: bool = False  # committed before any answer to the task could be seen
    seals: Seals = ()  # seals of the commitment, until it is opened or forfeited
    reason: Annotated[str, Length(0, REASON_CHARACTERS_MAX)] = ""  # reason of a skip


@dataclass(frozen=True, slots=True)
class Annotator:
    name: Pseudonym
    peer: Key  # the peer that enrolled it
    custodial: bool
    height: Count
    leases: Annotated[tuple[Digest, ...], Length(0, LEASES_MAX)] = ()  # assignments that wait for an answer
    annotations: Count = 0  # committed answers
    accepted: Count = 0  # opened answers that equal the label
    points: Count = 0


@dataclass(frozen=True, slots=True)
class AnnotatorSkill:
    """Settled tasks by label and vote: counts[label × classes + vote].

    With `many`, each option has four counts, of off and on.
    """

    counts: Annotated[tuple[Count, ...], Length(0, OPTIONS_MAX * OPTIONS_MAX)]
    weight: Count = 0  # weight of answers at the project's close, in units of 1/WEIGHT_ONE (`reputation`)


class CloseStep(enum.StrEnum):
    READING = "reading"  # tasks and their votes
    TURNING = "turning"  # iterations of the whole estimate
    LABELLING = "labelling"  # tasks whose label the whole estimate changes
    PAYING = "paying"  # annotators


@dataclass(frozen=True, slots=True)
class ProjectCloseProgress:
    """Progress of a project's close."""

    start_ms: Count  # start of the close, after which no vote is opened
    step: CloseStep = CloseStep.READING
    next_number: Count = 0  # first task, iteration or annotator of the step that is not done


@dataclass(frozen=True, slots=True)
class AgreementCounts:
    """Coincidences: counts[a × values + b] is how often two annotators gave a and b to one unit, in 1/COINCIDENCE_UNIT."""

    counts: Annotated[tuple[Count, ...], Length(1, OPTIONS_MAX * OPTIONS_MAX)]


@dataclass(frozen=True, slots=True)
class GoldRow:
    answer: Choices


@dataclass(frozen=True, slots=True)
class Redaction:
    """Replacement of a project's page by another one, in which one entry is only its leaf."""

    project: Digest
    page: Annotated[int, Between(0, PAGES_MAX - 1)]
    index: Annotated[int, Between(0, PAGE_TASKS_MAX - 1)]  # index of the entry
    old: Digest  # digest of the page before the redaction
    digest: Digest  # digest of the page after the redaction
    bytes: Annotated[int, Between(1, PAGE_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class PeerAnnotators:
    annotators: Annotated[int, Between(0, ANNOTATORS_MAX)]


@dataclass(frozen=True, slots=True)
class IndexSlot:
    number: Count


@dataclass(frozen=True, slots=True)
class ExpiryEntry:
    assignment: Digest  # or an annotator's key
    due_ms: Count


@dataclass(frozen=True, slots=True)
class ExpiryQueue:
    """Entries of `due` at places from `first` to `last` − 1. Times ascend, since all entries of a queue wait equally long."""

    first: Count = 0
    last: Count = 0


@dataclass(frozen=True, slots=True)
class CurationState:
    open: Annotated[tuple[Digest, ...], Length(0, PROJECTS_MAX)] = ()  # projects, in the order of their creation
    annotators_count: Annotated[int, Between(0, ANNOTATORS_MAX)] = 0
    annotations: Count = 0  # committed answers
    settled: Count = 0
    passed_over: Count = 0  # statements that did not act
    redacted: Count = 0  # redacted tasks
    leases: ExpiryQueue = ExpiryQueue()
    openings: ExpiryQueue = ExpiryQueue()
    closing: Annotated[tuple[Digest, ...], Length(0, PROJECTS_MAX)] = ()  # projects whose close is not done, in order
    enrolments: ExpiryQueue = ExpiryQueue()  # annotators that lose their places unless they answer
    projects: Table[Project] = field(default_factory=lambda: Table(Project))
    pages: Table[TaskPageRow] = field(default_factory=lambda: Table(TaskPageRow))
    tasks: Table[TaskRow] = field(default_factory=lambda: Table(TaskRow))
    places: Table[IndexSlot] = field(default_factory=lambda: Table(IndexSlot))
    annotators: Table[Annotator] = field(default_factory=lambda: Table(Annotator))
    assignments: Table[Assignment] = field(default_factory=lambda: Table(Assignment))
    skills: Table[AnnotatorSkill] = field(default_factory=lambda: Table(AnnotatorSkill))
    shares: Table[PeerAnnotators] = field(default_factory=lambda: Table(PeerAnnotators))
    due: Table[ExpiryEntry] = field(default_factory=lambda: Table(ExpiryEntry))
    closings: Table[ProjectCloseProgress] = field(default_factory=lambda: Table(ProjectCloseProgress))
    agreements: Table[AgreementCounts] = field(default_factory=lambda: Table(AgreementCounts))
    golds: Table[GoldRow] = field(default_factory=lambda: Table(GoldRow))
    redactions: Table[Redaction] = field(default_factory=lambda: Table(Redaction))
    wishes: Table[Redaction] = field(default_factory=lambda: Table(Redaction))
    expired_height: Count = 0  # last height at which a batch removed expired entries and continued a close
    serving_count: Count = 0  # members that served annotators at the first batch of that height


def page_key(project: bytes, page: int) -> bytes:
    return project + page.to_bytes(4, "big")


def redaction_key(place: int) -> bytes:
    return place.to_bytes(8, "big")
