"""A task's text is taken out: its page makes room for another one, in which that task has its leaf alone.

Everybody who has the old page can make the new one, and the Merkle root stays. Whoever has the old one deletes it then.
"""

from __future__ import annotations

from dataclasses import replace

from consensus.voter_set import VoterSet
from curation.limits import PAGE_BYTES_MAX
from curation.state import CurationState, Redaction, TaskPage, page_key, redaction_key
from curation.tasks import Page, redacted, root_of, task_id
from curation.work import Work
from ledger.core.module import BlobReplacement, DecodedTransaction, Refused
from ledger.members import MembersState
from protocol import codec
from protocol.errors import RemoteProtocolError


def redact(work: Work, said: DecodedTransaction, members: MembersState) -> None:
    """The author alone, or as many voters as one honest one is among, each with the same wish. A voter has one at a time."""
    wish: Redaction = said.content
    page, project = work.pages.get_record(page_key(wish.project, wish.page)), work.projects.get_record(wish.project)
    if project is None or page is None or wish.index >= page.count:
        raise Refused("there is no such task")
    if page.digest != wish.old:
        raise Refused("that page has changed meanwhile: say it again")
    task = work.tasks.get_record(task_id(wish.project, page.first + wish.index))
    if task is not None and task.is_redacted:
        raise Refused("the task is redacted already")
    if members.current_key(project.author) != said.author:
        if said.author not in members.voters:
            raise Refused("only the project's author or a voter can redact its tasks")
        work.wishes[said.author] = wish
        alike = [voter for voter in members.voters if work.wishes.get_record(voter) == wish]
        if len(alike) <= VoterSet(members.voters).faults_tolerated:
            return
        for voter in alike:
            work.wishes.drop(voter)
    work.pages[page_key(wish.project, wish.page)] = replace(page, digest=wish.digest, bytes=wish.bytes)
    work.redact(wish.project, page.first + wish.index)
    work.redactions[redaction_key(work.changed.get("redacted", work.state.redacted))] = wish
    work.count("redacted")


def replacement(state: CurationState, place: int) -> BlobReplacement:
    """What a decided redaction does to blobs."""
    said = state.redactions.get_record(redaction_key(place))
    assert said is not None
    page = state.pages.get_record(page_key(said.project, said.page))
    assert page is not None

    def make(old: bytes) -> bytes | None:
        found = outdated(state, page, said.old, old)
        return None if found is None else redacted(found, said.index)

    return BlobReplacement(said.old, PAGE_BYTES_MAX, make)


def outdated(state: CurationState, page: TaskPage, digest: bytes, data: bytes) -> Page | None:
    """The page in a blob that had this row's place; None if this blob stays.

    A project may name any blob as its page. So only a page of these very tasks goes, and none that any row names now.
    """
    try:
        found = codec.decode(Page, data, PAGE_BYTES_MAX)
        is_it = len(found.entries) == page.count and root_of(found) == page.root
    except RemoteProtocolError:
        return None
    return None if not is_it or any(other.digest == digest for _, other in state.pages.items()) else found
