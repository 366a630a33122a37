"""The decided state of curation. Rows of tables cost a block only what it changes; what has no row yet is as its project says.

| table         | key                            | row                                                              |
|---------------|--------------------------------|------------------------------------------------------------------|
| `projects`    | project                        | what is asked, and how far it is                                 |
| `pages`       | project ‖ page (u32)           | digest of the blob with the tasks, and their Merkle root         |
| `tasks`       | task                           | a task that was begun: who has it, how many votes, the label     |
| `places`      | project ‖ list ‖ place (u32)   | an element of a list of task numbers, see `state_changes`        |
| `annotators`  | annotator's key                | name, serving peer, leases, counts                               |
| `assignments` | assignment                     | one annotator's lease of one task, and its vote                  |
| `skills`      | project ‖ annotator's key      | how often labels and this annotator's votes came together        |
| `shares`      | serving peer's key             | how many annotators have places of it                            |
| `due`         | queue ‖ place (u64)            | what is looked at when its time has come: `curation_module`      |
| `closings`    | project                        | how far its close is, until it is done: see `project_close`      |
| `agreements`  | project                        | how often values were said together, of its settled tasks        |
| `golds`       | task                           | the right answer, which its author knew before: after it said so |
| `redactions`  | place (u64)                    | tasks whose text is taken out, in the order in which they were   |
| `wishes`      | voter's key                    | the redaction that a voter wants, until enough of them do        |
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
    """How pages show the texts of tasks and their items."""

    PLAIN = "plain"
    MARKDOWN = "markdown"
    CHAT = "chat"  # turns of role and text, each text as Markdown


@dataclass(frozen=True, slots=True)
class ProjectSpec:
    """The question of a project, as its author wrote it."""

    name: Name
    kind: QuestionKind
    options: Options
    many: bool
    items: Annotated[int, Between(0, RANKED_MAX)]  # of each task: 2 of a pair, 3 to 9 of a ranking, else none
    guidelines: Digest | None  # of a blob: text in UTF-8, at most GUIDELINES_BYTES_MAX
    votes: Votes  # of a task at most; more than one: at least two
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
    fresh_drawn: Count = 0  # tasks that were taken out of the fresh ones
    begun: Count = 0  # begun tasks that have a free place: the length of their list
    settled: Count = 0
    review: Count = 0  # tasks that wait for their author
    golds: Count = 0  # tasks of which the author has said the right answer
    paid: Count = 0  # points that its annotators got at the close
    stop_requests: Annotated[tuple[Key, ...], Length(0, VOTERS_MAX)] = ()  # voters that want it closed


@dataclass(frozen=True, slots=True)
class TaskPageRow:
    digest: Digest  # of the blob
    bytes: Annotated[int, Between(1, PAGE_BYTES_MAX)]
    root: Digest  # over the tasks
    first: Count  # number of its first task
    count: Annotated[int, Between(1, PAGE_TASKS_MAX)]
    gold: Digest | None = None  # root over a leaf for each task, of which only the author knows which are gold


class TaskStage(enum.StrEnum):
    BEGUN = "begun"  # votes are missing
    OPENING = "opening"  # all votes asked for are committed
    SETTLED = "settled"
    REVIEW = "review"  # its author decides
    REDACTED = "redacted"  # nobody is asked any more; one that was settled before stays so


@dataclass(frozen=True, slots=True)
class TaskRow:
    project: Digest
    number: Count
    stage: TaskStage
    votes_asked: Votes  # votes asked for so far
    places_taken: Annotated[int, Between(0, ASSIGNED_MAX)]  # leases and votes that have a place
    committed: Annotated[int, Between(0, VOTES_MAX)]
    opened: Annotated[int, Between(0, VOTES_MAX)]
    skipped: Annotated[int, Between(0, ASSIGNED_MAX)]
    index_slot: Count | None  # in the list of begun tasks with a free place
    annotators: Annotated[tuple[Key, ...], Length(0, ASSIGNED_MAX)]  # all that ever had it, as they came
    label: Choices | None = None
    height: Count = 0  # of the block that settled it
    time_ms: Count = 0  # the network's time then: that of the block before it
    is_reviewed: bool = False  # the author said the label, and no estimate changes it
    is_redacted: bool = False  # its text is taken out


class AssignmentState(enum.StrEnum):
    LEASED = "leased"
    EXPIRED = "expired"  # it counts until somebody has its place
    RELEASED = "released"  # as expired, and the annotator may get the task again
    SKIPPED = "skipped"
    COMMITTED = "committed"
    OPENED = "opened"
    FORFEITED = "forfeited"  # committed, and not opened in time
    SETTLED = "settled"


@dataclass(frozen=True, slots=True)
class Assignment:
    project: Digest
    number: Count  # of the task
    annotator: Key
    peer: Key  # that took the lease, and then the one that carried the commitment
    deadline_ms: Count  # of the lease, and then of the opening
    state: AssignmentState
    commitment: Digest | None = None
    answer: Choices | None = None
    height: Count = 0  # of the block that committed it
    time_ms: Count = 0  # the network's time then: that of the block before it
    is_blind: bool = False  # committed before anybody's answer to the task could be seen
    seals: Seals = ()  # of the commitment, until it is opened or forfeited
    reason: Annotated[str, Length(0, REASON_CHARACTERS_MAX)] = ""  # of a skip


@dataclass(frozen=True, slots=True)
class Annotator:
    name: Pseudonym
    peer: Key  # that enrolled it
    custodial: bool
    height: Count
    leases: Annotated[tuple[Digest, ...], Length(0, LEASES_MAX)] = ()  # assignments that wait for an answer
    annotations: Count = 0  # committed
    accepted: Count = 0  # opened, and as the label says
    points: Count = 0


@dataclass(frozen=True, slots=True)
class AnnotatorSkill:
    """counts[label × classes + vote], over settled tasks; where an answer is of many options: of each option, off and on."""

    counts: Annotated[tuple[Count, ...], Length(0, OPTIONS_MAX * OPTIONS_MAX)]
    weight: Count = 0  # of its answers at the project's close, in units of 1/WEIGHT_ONE, see `reputation`


class CloseStep(enum.StrEnum):
    READING = "reading"  # tasks and their votes
    TURNING = "turning"  # the whole estimate
    LABELLING = "labelling"  # tasks whose label the whole estimate changes
    PAYING = "paying"  # annotators


@dataclass(frozen=True, slots=True)
class ProjectCloseProgress:
    """How far a project's close is."""

    start_ms: Count  # from then on nothing is opened any more, and it begins
    step: CloseStep = CloseStep.READING
    next_number: Count = 0  # of that step: the number of the first task, turn or annotator that is still to be done


@dataclass(frozen=True, slots=True)
class AgreementCounts:
    """counts[a × values + b]: how often one annotator said a and another b of one unit, in units of 1/agreement.UNIT."""

    counts: Annotated[tuple[Count, ...], Length(1, OPTIONS_MAX * OPTIONS_MAX)]


@dataclass(frozen=True, slots=True)
class GoldRow:
    answer: Choices


@dataclass(frozen=True, slots=True)
class Redaction:
    """Another page in the place of one of a project's: the same, but that one entry has its leaf alone."""

    project: Digest
    page: Annotated[int, Between(0, PAGES_MAX - 1)]
    index: Annotated[int, Between(0, PAGE_TASKS_MAX - 1)]  # of the entry
    old: Digest  # of the page as it was
    digest: Digest  # of the page as it is then
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
    """The places of `due` from `first` on, up to before `last`. Times ascend, since every entry waits equally long."""

    first: Count = 0
    last: Count = 0


@dataclass(frozen=True, slots=True)
class CurationState:
    open: Annotated[tuple[Digest, ...], Length(0, PROJECTS_MAX)] = ()  # projects, as they came
    annotators_count: Annotated[int, Between(0, ANNOTATORS_MAX)] = 0
    annotations: Count = 0  # committed
    settled: Count = 0
    passed_over: Count = 0  # statements that did not apply
    redacted: Count = 0  # tasks
    leases: ExpiryQueue = ExpiryQueue()
    openings: ExpiryQueue = ExpiryQueue()
    closing: Annotated[tuple[Digest, ...], Length(0, PROJECTS_MAX)] = ()  # projects whose close is not done, as they came
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
    expired_height: Count = 0  # height of the last block whose batches have seen what expires, and gone on with a close
    serving_count: Count = 0  # members that served annotators when the first batch of that block acted


def page_key(project: bytes, page: int) -> bytes:
    return project + page.to_bytes(4, "big")


def redaction_key(place: int) -> bytes:
    return place.to_bytes(8, "big")
