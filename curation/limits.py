"""Limits of curation, with their reasons. Times are milliseconds."""

from __future__ import annotations

from typing import Final

PROJECTS_OPEN_MAX: Final = 10  # per member, including paused ones: a team asks several questions at a time
PROJECTS_UNFINISHED_MAX: Final = 20  # per member, including unfinished closes: no member fills the queue of closes
PROJECTS_MAX: Final = 256  # per network, including unfinished closes: the state lists them
OPTIONS_MAX: Final = 16  # a confusion table of one annotator then has 16 × 16 counts and fits into a row
OPTION_CHARACTERS_MAX: Final = 64
GUIDELINES_BYTES_MAX: Final = 64 << 10
VOTES_MAX: Final = 7  # per task, which its author then reviews: more votes change few labels
RANKED_MIN, RANKED_MAX = 3, 9
CLOSING_ROWS_PER_BATCH: Final = 1_024  # rows that a batch reads or writes for a project's close, about 40 ms of one core
CLOSING_CELLS_PER_ROW: Final = 256  # votes × classes that an iteration of an estimate processes in the time of one row
PRICE_MAX: Final = 1_000_000  # points for one task

PAGE_TASKS_MAX: Final = 256  # a proof of one task then has eight digests
PROOF_DIGESTS_MAX: Final = 8  # per proof of one task
PAGE_BYTES_MAX: Final = 1 << 20
PAGES_MAX: Final = 4_096  # per project: a million tasks
TEXT_CHARACTERS_MAX: Final = 20_000  # per text or item of a task

ANNOTATORS_MAX: Final = 10_000  # per network
NAME_CHARACTERS_MAX: Final = 32
ENROLMENT_MS: Final = 3 * 86_400_000  # a key without an answer then loses its place, because keys cost strangers nothing
LEASES_MAX: Final = 8  # per annotator at a time
EXCLUDED_PROJECTS_MAX: Final = 32  # projects that a lease request excludes because the peer lacks pages of them
LEASE_MS: Final = 600_000  # no annotator needs longer for a task
OPENING_MS: Final = 60_000  # after all votes are committed; a vote that is not opened by then is forfeited
SKIPS_MAX: Final = 4  # per task, which its author then reviews
REASON_CHARACTERS_MAX: Final = 64
ASSIGNED_MAX: Final = 24  # annotators of one task, including skipped and expired assignments; then its author reviews it

BATCH_MAX: Final = 512  # statements in one transaction
EXPIRED_PER_BATCH_MAX: Final = 1_024  # entries that a batch takes out of each queue; a batch of the next block continues
DRAW_CANDIDATES_MAX: Final = 16  # tasks of a project that a draw tries: the annotator may have had some of them
DRAW_PROJECTS_MAX: Final = 32  # open projects that a draw tries; at the next height it begins at another one
DRAW_LOOKS_MAX: Final = 256  # begun tasks that the draws of one batch try, plus LOOKS_FOR_DRAW for each requested lease
LOOKS_FOR_DRAW: Final = 2  # most draws find a free task at the first try
SALT_BYTES: Final = 16
SEALS_MAX: Final = 2  # per commitment: other serving peers that can open it
SEAL_BYTES_MAX: Final = 128  # a sealed salt with 16 choices has 100
SCORED_MAX: Final = 2_000  # pairs for which an export computes strengths, in about two seconds
KAPPA_COMMON_MIN: Final = 10  # common answers of two annotators; with fewer of them, κ means nothing
KAPPA_PAIRS_MAX: Final = 200  # pairs of annotators that are shown: those with most common answers
KAPPA_TASKS_MAX: Final = 10_000  # settled tasks of a project from which κ is computed, in about a second
SESSION_MS_MAX: Final = 7 * 86_400_000  # longest session, in which a peer may take leases for an annotator
