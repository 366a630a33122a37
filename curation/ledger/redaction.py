"""Redaction of a task: its page is replaced by a page in which the task is reduced to its Merkle leaf. Every peer with the old
page can compute the new page, and then deletes the old one. The Merkle root stays the same.
"""

from __future__ import annotations

from dataclasses import replace

from consensus.voter_set import VoterSet
from curation.ledger.curation_state import CurationState, Redaction, TaskPageRow, page_key, redaction_key
from curation.ledger.state_changes import CurationChanges
from curation.limits import PAGE_BYTES_MAX
from curation.tasks.task_pages import TaskPageBlob, page_merkle_root, redact_entry, task_id
from ledger.core.module import BlobReplacement, DecodedTransaction, Refused
from ledger.members import MembersState
from protocol import codec
from protocol.errors import RemoteProtocolError


def apply_redaction(work: CurationChanges, said: DecodedTransaction, members: MembersState) -> None:
    """Apply a redaction by the project's author, or record a voter's wish. More than f voters with the same wish redact the task.

    Each voter has one wish at a time.
    """
    wish: Redaction = said.content
    page, project = work.pages.get_record(page_key(wish.project, wish.page)), work.projects.get_record(wish.project)
    if project is None or page is None or wish.index >= page.count:
        raise Refused("unknown task")
    if page.digest != wish.old:
        raise Refused("the page has changed meanwhile: redact the task again")
    task = work.tasks.get_record(task_id(wish.project, page.first + wish.index))
    if task is not None and task.is_redacted:
        raise Refused("the task is already redacted")
    if members.current_key(project.author) != said.author:
        if said.author not in members.voters:
            raise Refused("only the project's author and voters may redact its tasks")
        work.wishes[said.author] = wish
        alike = [voter for voter in members.voters if work.wishes.get_record(voter) == wish]
        if len(alike) <= VoterSet(members.voters).faults_tolerated:
            return
        for voter in alike:
            work.wishes.delete_row(voter)
    work.pages[page_key(wish.project, wish.page)] = replace(page, digest=wish.digest, bytes=wish.bytes)
    work.redact_task(wish.project, page.first + wish.index)
    work.redactions[redaction_key(work.changed_fields.get("redacted", work.state.redacted))] = wish
    work.add_to_field("redacted")


def page_replacement(state: CurationState, place: int) -> BlobReplacement:
    """Return the blob replacement of the decided redaction number `place`."""
    said = state.redactions[redaction_key(place)]
    page = state.pages[page_key(said.project, said.page)]

    def make(old: bytes) -> bytes | None:
        found = find_replaced_page(state, page, said.old, old)
        return None if found is None else redact_entry(found, said.index)

    return BlobReplacement(said.old, PAGE_BYTES_MAX, make)


def find_replaced_page(state: CurationState, page: TaskPageRow, digest: bytes, data: bytes) -> TaskPageBlob | None:
    """Return the page in the blob `data` if peers must replace this blob; None if they keep it.

    A project may name any blob as its page. Therefore peers replace only a blob with exactly the tasks of `page`, and only if no
    row of a page names its digest.
    """
    try:
        found = codec.decode(TaskPageBlob, data, PAGE_BYTES_MAX)
        is_it = len(found.entries) == page.count and page_merkle_root(found) == page.root
    except RemoteProtocolError:
        return None
    return None if not is_it or any(other.digest == digest for _, other in state.pages.items()) else found
