"""The decided state of curation, in tables of rows. A block changes only some rows. A task without a row was never leased.

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
    items: Annotated[int, Between(0, RANKED_MAX)]  # items per task: 2 for a pair, 3 to 9 for a ranking, 0 for other kinds
    guidelines: Digest | None  # digest of a blob with UTF-8 text, at most GUIDELINES_BYTES_MAX
    votes: Votes  # maximum of votes per task; if it is above 1, a task has at least two votes
    price: Price  # points for each settled task
    suggests_first: bool  # pages show a model's suggestion with the task; otherwise after the annotator's answer
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
    fresh_drawn: Count = 0  # number of tasks that were drawn from the project's list of fresh tasks
    begun: Count = 0  # length of the list of begun tasks with a free place
    settled: Count = 0
    review: Count = 0  # number of tasks that wait for their author's review
    golds: Count = 0  # number of tasks whose right answer is revealed
    paid: Count = 0  # points that the project's annotators got when it was closed
    stop_requests: Annotated[tuple[Key, ...], Length(0, VOTERS_MAX)] = ()  # voters that voted to close the project


@dataclass(frozen=True, slots=True)
class TaskPageRow:
    digest: Digest  # digest of the page's blob
    bytes: Annotated[int, Between(1, PAGE_BYTES_MAX)]
    root: Digest  # Merkle root over the page's tasks
    first: Count  # number of the page's first task
    count: Annotated[int, Between(1, PAGE_TASKS_MAX)]
    # Merkle root over one leaf per task; until gold is revealed, only the author knows which tasks are gold
    gold: Digest | None = None


class TaskStage(enum.StrEnum):
    BEGUN = "begun"  # votes are missing
    OPENING = "opening"  # all requested votes are committed
    SETTLED = "settled"
    REVIEW = "review"  # The author decides the label.
    REDACTED = "redacted"  # The task was redacted before it was settled: no annotator gets it.


@dataclass(frozen=True, slots=True)
class TaskRow:
    project: Digest
    number: Count
    stage: TaskStage
    votes_asked: Votes  # votes requested so far
    # number of leases and votes that occupy a place; a task has `votes_asked` places
    places_taken: Annotated[int, Between(0, ASSIGNED_MAX)]
    committed: Annotated[int, Between(0, VOTES_MAX)]
    opened: Annotated[int, Between(0, VOTES_MAX)]
    skipped: Annotated[int, Between(0, ASSIGNED_MAX)]
    index_slot: Count | None  # index of the task in the list of begun tasks with a free place
    # all annotators that ever leased the task, in order of their first leases
    annotators: Annotated[tuple[Key, ...], Length(0, ASSIGNED_MAX)]
    label: Choices | None = None
    height: Count = 0  # height of the block that settled the task
    time_ms: Count = 0  # network time of that block: the time in its parent's header
    is_reviewed: bool = False  # The author set the label, and no estimate changes it.
    is_redacted: bool = False  # The text is deleted.


class AssignmentState(enum.StrEnum):
    LEASED = "leased"
    EXPIRED = "expired"  # The lease expired; the annotator's answer still counts while the task has a free place.
    # The lease was given back; as with EXPIRED, an answer still counts, and the annotator may get the task again.
    RELEASED = "released"
    SKIPPED = "skipped"
    COMMITTED = "committed"
    OPENED = "opened"
    FORFEITED = "forfeited"  # The answer was committed, but not opened: it was late, or the task was stopped.
    SETTLED = "settled"


@dataclass(frozen=True, slots=True)
class Assignment:
    project: Digest
    number: Count  # number of the task
    annotator: Key
    peer: Key  # peer that took the lease; after the commitment, the peer that carried it
    deadline_ms: Count  # end of the lease; once openings are requested, the deadline of the opening
    state: AssignmentState
    commitment: Digest | None = None
    answer: Choices | None = None
    height: Count = 0  # height of the block that committed the answer
    time_ms: Count = 0  # network time of that block: the time in its parent's header
    is_blind: bool = False  # The answer was committed before any answer to the task was visible.
    seals: Seals = ()  # sealed answer for other serving peers, until it is opened or forfeited
    reason: Annotated[str, Length(0, REASON_CHARACTERS_MAX)] = ""  # reason of a skip


@dataclass(frozen=True, slots=True)
class Annotator:
    name: Pseudonym
    peer: Key  # serving peer that enrolled the annotator
    custodial: bool
    height: Count
    leases: Annotated[tuple[Digest, ...], Length(0, LEASES_MAX)] = ()  # leased assignments that wait for the annotator's answer
    annotations: Count = 0  # number of committed answers
    accepted: Count = 0  # number of opened answers that equal the task's label
    points: Count = 0


@dataclass(frozen=True, slots=True)
class AnnotatorSkill:
    """Number of an annotator's settled tasks in a project, by label and vote: counts[label × classes + vote].

    With `many`, each option has four counts: for label and vote off or on.
    """

    counts: Annotated[tuple[Count, ...], Length(0, OPTIONS_MAX * OPTIONS_MAX)]
    weight: Count = 0  # weight of the annotator's answers when the project was closed, in units of 1/WEIGHT_ONE (`reputation`)


class CloseStep(enum.StrEnum):
    READING = "reading"  # reads the project's tasks and their votes
    TURNING = "turning"  # runs the iterations of the estimate from all votes
    LABELLING = "labelling"  # changes labels of tasks to those of the estimate
    PAYING = "paying"  # gives points to the annotators


@dataclass(frozen=True, slots=True)
class ProjectCloseProgress:
    """Progress of the closing of a project, see `project_close`."""

    start_ms: Count  # time at which the first step begins; no vote is opened after it
    step: CloseStep = CloseStep.READING
    next_number: Count = 0  # number of the step's first unprocessed task, iteration or annotator


@dataclass(frozen=True, slots=True)
class AgreementCounts:
    """Coincidences of the votes in a project's settled tasks.

    counts[a × values + b] is how often two annotators gave the values a and b to one unit, in 1/COINCIDENCE_UNIT.
    """

    counts: Annotated[tuple[Count, ...], Length(1, OPTIONS_MAX * OPTIONS_MAX)]


@dataclass(frozen=True, slots=True)
class GoldRow:
    answer: Choices


@dataclass(frozen=True, slots=True)
class Redaction:
    """Replacement of a project's page by a page in which one task is reduced to its Merkle leaf."""

    project: Digest
    page: Annotated[int, Between(0, PAGES_MAX - 1)]
    index: Annotated[int, Between(0, PAGE_TASKS_MAX - 1)]  # index of the redacted task in the page
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
    assignment: Digest  # assignment that expires; in the queue `enrolments`, the key of the annotator
    due_ms: Count


@dataclass(frozen=True, slots=True)
class ExpiryQueue:
    """Queue of the entries in the table `due` from number `first` to `last` − 1.

    Their times ascend, since all entries wait equally long.
    """

    first: Count = 0
    last: Count = 0


@dataclass(frozen=True, slots=True)
class CurationState:
    open: Annotated[tuple[Digest, ...], Length(0, PROJECTS_MAX)] = ()  # open and paused projects, in the order of their creation
    annotators_count: Annotated[int, Between(0, ANNOTATORS_MAX)] = 0
    annotations: Count = 0  # number of committed answers
    settled: Count = 0
    passed_over: Count = 0  # number of statements that did not act
    redacted: Count = 0  # number of redacted tasks
    leases: ExpiryQueue = ExpiryQueue()
    openings: ExpiryQueue = ExpiryQueue()
    # closed projects whose results are not computed yet, in the order of their closing
    closing: Annotated[tuple[Digest, ...], Length(0, PROJECTS_MAX)] = ()
    enrolments: ExpiryQueue = ExpiryQueue()  # annotators that are removed if they have not answered by then
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
    # height of the last block whose first batch removed expired entries and continued the closing of a project
    expired_height: Count = 0
    serving_count: Count = 0  # number of serving peers at the first batch of that height


def page_key(project: bytes, page: int) -> bytes:
    return project + page.to_bytes(4, "big")


def redaction_key(place: int) -> bytes:
    return place.to_bytes(8, "big")
