"""Every bound of curation, with its reason. Times are milliseconds."""

from __future__ import annotations

from typing import Final

PROJECTS_OPEN_MAX: Final = 10  # of one member, paused ones too: a team has several questions at a time
PROJECTS_UNFINISHED_MAX: Final = 20  # of one member, with those whose close is not done: nobody fills the queue of closes
PROJECTS_MAX: Final = 256  # of one network, with those whose close is not done: they are listed in the state
OPTIONS_MAX: Final = 16  # a confusion table of one annotator has 16 × 16 counts, and fits into a row
OPTION_CHARACTERS_MAX: Final = 64
GUIDELINES_BYTES_MAX: Final = 64 << 10
VOTES_MAX: Final = 7  # of a task: more of them change few labels; then its author reviews
RANKED_MIN, RANKED_MAX = 3, 9
CLOSING_ROWS_PER_BATCH: Final = 1_024  # rows that a batch reads or writes for a project's close, about 40 ms of one core
CLOSING_CELLS_PER_ROW: Final = 256  # votes × classes that a turn of an estimate does in the time of a row
PRICE_MAX: Final = 1_000_000  # points of one task

PAGE_TASKS_MAX: Final = 256  # a proof of one task is then eight digests
PROOF_DIGESTS_MAX: Final = 8  # of one task of a page
PAGE_BYTES_MAX: Final = 1 << 20
PAGES_MAX: Final = 4_096  # of one project: a million tasks
TEXT_CHARACTERS_MAX: Final = 20_000  # of a task's text, or of one of its items

ANNOTATORS_MAX: Final = 10_000  # of one network
NAME_CHARACTERS_MAX: Final = 32
ENROLMENT_MS: Final = 3 * 86_400_000  # a key that has not answered by then loses its place: keys alone cost strangers nothing
LEASES_MAX: Final = 8  # of one annotator at a time
EXCLUDED_PROJECTS_MAX: Final = 32  # projects that a wish for leases leaves out: of so many open ones a peer may lack tasks
LEASE_MS: Final = 600_000  # nobody thinks longer about a task
OPENING_MS: Final = 60_000  # from the moment that all votes are committed; then a vote without an opening is forfeited
SKIPS_MAX: Final = 4  # of one task: then its author reviews it
REASON_CHARACTERS_MAX: Final = 64
ASSIGNED_MAX: Final = 24  # annotators of one task, with all who skipped it or let it expire; then its author reviews it

BATCH_MAX: Final = 512  # statements in one transaction
EXPIRED_PER_BATCH_MAX: Final = 1_024  # that a batch sees; the next one sees more
DRAW_CANDIDATES_MAX: Final = 16  # tasks that a draw looks at: the annotator may have had some of them
DRAW_PROJECTS_MAX: Final = 32  # open projects that a draw looks at; at the next height it begins at another one
DRAW_LOOKS_MAX: Final = 256  # at begun tasks, by the draws of one batch; and LOOKS_FOR_DRAW more for each draw that it asks for
LOOKS_FOR_DRAW: Final = 2  # most draws find a free task at the first look
SALT_BYTES: Final = 16
SEALS_MAX: Final = 2  # of one commitment: peers beside its own that can open it
SEAL_BYTES_MAX: Final = 128  # salt and 16 choices, sealed, are 100
SCORED_MAX: Final = 2_000  # pairs of which an export computes strengths: about two seconds
KAPPA_COMMON_MIN: Final = 10  # answers to the same tasks: of fewer, the agreement of two annotators says nothing
KAPPA_PAIRS_MAX: Final = 200  # of annotators, that are shown: those with most common answers
KAPPA_TASKS_MAX: Final = 10_000  # settled ones of a project, that it is computed from: about a second
SESSION_MS_MAX: Final = 7 * 86_400_000  # a peer may take leases for an annotator that long
