"""Limits of curation, with their reasons. Times are milliseconds."""

from __future__ import annotations

from typing import Final

PROJECTS_OPEN_MAX: Final = 10  # open projects per member, including paused ones: a team asks several questions at a time
PROJECTS_UNFINISHED_MAX: Final = 20  # projects per member that are open or closing: no member fills the queue of closings
PROJECTS_MAX: Final = 256  # projects per network that are open or closing: the state lists all of them
OPTIONS_MAX: Final = 16  # options per project: one annotator's confusion table has 16 × 16 counts and fits into a row
OPTION_CHARACTERS_MAX: Final = 64
GUIDELINES_BYTES_MAX: Final = 64 << 10
VOTES_MAX: Final = 7  # votes per task, after which its author reviews it: more votes change few labels
RANKED_MIN, RANKED_MAX = 3, 9
CLOSING_ROWS_PER_BATCH: Final = 1_024  # rows that a batch reads or writes to close a project: about 40 ms of one core
CLOSING_CELLS_PER_ROW: Final = 256  # votes × classes that the estimate processes in the time of one row
PRICE_MAX: Final = 1_000_000  # points per task

PAGE_TASKS_MAX: Final = 256  # tasks per page: the Merkle proof of one task has eight digests
PROOF_DIGESTS_MAX: Final = 8  # digests in the Merkle proof of one task
PAGE_BYTES_MAX: Final = 1 << 20
PAGES_MAX: Final = 4_096  # pages per project: a million tasks
TEXT_CHARACTERS_MAX: Final = 20_000  # characters in a task's text or in one of its items

ANNOTATORS_MAX: Final = 10_000  # annotators per network
NAME_CHARACTERS_MAX: Final = 32
ENROLMENT_MS: Final = 3 * 86_400_000  # time until an annotator without an answer is removed: keys cost strangers nothing
LEASES_MAX: Final = 8  # leases per annotator at a time
EXCLUDED_PROJECTS_MAX: Final = 32  # projects that a lease request excludes because the peer lacks some of their pages
LEASE_MS: Final = 600_000  # duration of a lease: no annotator needs longer for a task
OPENING_MS: Final = 60_000  # time to open votes after the last requested one is committed: unopened votes are then forfeited
SKIPS_MAX: Final = 4  # skips per task, after which its author reviews it
REASON_CHARACTERS_MAX: Final = 64
ASSIGNED_MAX: Final = 24  # annotators per task, including skipped and expired assignments: after them its author reviews it

BATCH_MAX: Final = 512  # statements in one transaction
EXPIRED_PER_BATCH_MAX: Final = 1_024  # expired entries that a batch removes from each queue: a batch of the next block continues
DRAW_CANDIDATES_MAX: Final = 16  # tasks of a project that a draw for an annotator tries: it may have had some of them
DRAW_PROJECTS_MAX: Final = 32  # open projects that a draw tries: at the next height it begins at another project
DRAW_LOOKS_MAX: Final = 256  # begun tasks that all draws of a batch may try, in addition to LOOKS_FOR_DRAW per requested lease
LOOKS_FOR_DRAW: Final = 2  # tries of begun tasks that the cost of a requested lease includes: most draws succeed at the first
SALT_BYTES: Final = 16
SEALS_MAX: Final = 2  # seals per commitment: other serving peers that can open it
SEAL_BYTES_MAX: Final = 128  # bytes of a seal: a sealed salt with 16 choices takes 100
SCORED_MAX: Final = 2_000  # pairs in an export of preferences with the items' strengths: about two seconds
KAPPA_COMMON_MIN: Final = 10  # units that two annotators must share for a κ: with fewer units, κ means nothing
KAPPA_PAIRS_MAX: Final = 200  # pairs of annotators in a reply with κ: the pairs with most common units
KAPPA_TASKS_MAX: Final = 10_000  # settled tasks of a project from which κ is computed: about a second
SESSION_MS_MAX: Final = 7 * 86_400_000  # longest session: the time in which a peer may take leases for an annotator
