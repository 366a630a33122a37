"""Decisions of curation: assignment of tasks, conditions under which an answer counts, and treatment of all other input."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curation import limits
from curation.import_export.export_formats import label_record
from curation.ledger.curation_module import serving_peers
from curation.ledger.curation_state import (
    AssignmentState,
    CurationState,
    PeerAnnotators,
    ProjectPhase,
    ProjectSpec,
    Redaction,
    TaskRow,
    TaskStage,
    page_key,
)
from curation.ledger.state_changes import BEGUN_LIST, CurationChanges, index_slot_key
from curation.ledger.transaction_types import (
    AddTaskPage,
    CreateProject,
    GoldAnswerProof,
    ReleaseAssignment,
    RevealGold,
    ReviewTask,
    SetProjectPhase,
    SkipAssignment,
    StatementBatch,
    VoteToStopProject,
    seal_recipients,
)
from curation.limits import (
    ASSIGNED_MAX,
    DRAW_CANDIDATES_MAX,
    ENROLMENT_MS,
    LEASE_MS,
    LEASES_MAX,
    OPENING_MS,
    PROJECTS_OPEN_MAX,
    SKIPS_MAX,
)
from curation.tasks.answers import Answer, QuestionKind
from curation.tasks.task_pages import (
    AnnotationTask,
    PageEntry,
    TaskPageBlob,
    assignment_id,
    decode_page,
    entry_leaf,
    page_merkle_root,
    redact_entry,
    task_id,
)
from ledger.members import MembersState, RegisterRoles, ResignAsVoter, RotateKey, rotation_preimage
from protocol import codec
from tests.curation.room import AUTHOR, ONE, OTHER, PEER, SEVERAL, Room, annotators, gold_answers, held
from tests.ledger.world import PEOPLE
from tests.sim.keys import FastSigner

ANN, BOB, CAT, DAN = annotators(4)


@pytest.fixture
def room() -> Room:
    return Room()


def test_one_vote_is_a_label(room: Room) -> None:
    project = room.project(ONE, tasks=1)
    ((lease,),) = room.leased(ANN)
    assert room.assignment(lease).state is AssignmentState.LEASED and room.row(project).fresh_drawn == 1
    room.answered([(ANN, lease, (1,))])
    task = room.task(lease)
    assert (task.stage, task.label, room.assignment(lease).state) == (TaskStage.SETTLED, (1,), AssignmentState.SETTLED)
    assert (room.row(project).settled, room.curation.settled, room.curation.annotations) == (1, 1, 1)
    assert (room.person(ANN).accepted, room.person(ANN).leases) == (1, ())


def test_one_vote_may_be_committed_and_opened_in_one_batch(room: Room) -> None:
    room.project(ONE, tasks=1)
    ((lease,),) = room.leased(ANN)
    room.batch(commits=[room.commit(ANN, lease, (0,))], openings=[room.opening(ANN, lease, (0,))])
    assert room.task(lease).label == (0,)


def test_a_seal_stands_until_its_commitment_is_opened_or_forfeited(room: Room) -> None:
    room.project(SEVERAL, tasks=1)
    (ann,), (bob,) = room.leased(ANN, BOB)
    room.batch(
        OTHER, commits=[replace(room.commit(who, lease, (1,)), seals=(b"one", b"")) for who, lease in ((ANN, ann), (BOB, bob))]
    )
    assert all((row.seals, row.peer) == ((b"one", b""), OTHER.public) for row in map(room.assignment, (ann, bob)))
    room.batch(openings=[room.opening(ANN, ann, (1,))])
    assert (room.assignment(ann).seals, room.assignment(bob).seals) == ((), (b"one", b""))
    room.later(OPENING_MS, batches=2)
    assert (room.assignment(bob).state, room.assignment(bob).seals) == (AssignmentState.FORFEITED, ())


def test_a_commitment_is_sealed_for_two_others_who_are_drawn(room: Room) -> None:
    peers = [bytes([number]) * 32 for number in range(9)]
    drawn = Counter(
        key for number in range(300) for key in seal_recipients(peers, bytes([number % 256, number // 256]), peers[0])
    )
    assert drawn.total() == 600 and set(drawn) == set(peers[1:]) and max(drawn.values()) < 2 * min(drawn.values())
    assert seal_recipients(reversed(peers), b"task", peers[0]) == seal_recipients(peers, b"task", peers[0])
    assert seal_recipients(peers[:2], b"task", peers[1]) == (peers[0],) and seal_recipients(peers[:1], b"task", peers[0]) == ()


def test_an_opening_counts_once_all_votes_asked_for_are_committed(room: Room) -> None:
    room.project(SEVERAL, tasks=1)
    (ann,), (bob,) = room.leased(ANN, BOB)
    room.batch(commits=[room.commit(ANN, ann, (1,))], openings=[room.opening(ANN, ann, (1,))])
    assert room.assignment(ann).state is AssignmentState.COMMITTED and room.curation.passed_over == 1
    room.batch(commits=[room.commit(BOB, bob, (1,))])
    assert room.task(ann).stage is TaskStage.OPENING
    room.batch(openings=[room.opening(ANN, ann, (1,)), room.opening(BOB, bob, (1,))])
    assert room.task(ann).label == (1,), "two who agree are enough"


def test_where_two_differ_a_third_is_asked(room: Room) -> None:
    room.project(SEVERAL, tasks=1)
    (ann,), (bob,) = room.leased(ANN, BOB)
    room.answered([(ANN, ann, (1,)), (BOB, bob, (0,))])
    assert (room.task(ann).stage, room.task(ann).votes_asked) == (TaskStage.BEGUN, 3)
    ((cat,),) = room.leased(CAT)
    assert room.assignment(cat).number == room.assignment(ann).number
    room.answered([(CAT, cat, (1,))])
    assert not room.assignment(cat).is_blind and room.assignment(ann).is_blind
    assert room.task(ann).votes_asked == 4, "2 : 1 of strangers is 3 : 1, which is not nine tenths"


def test_the_author_reviews_what_seven_votes_do_not_settle(room: Room) -> None:
    project = room.project(replace(SEVERAL, votes=3), tasks=1)
    votes = [(ANN, 1), (BOB, 0), (CAT, 1)]
    for who, _ in votes[:2]:
        room.leased(who)
    leases = [room.person(who).leases[0] for who, _ in votes[:2]]
    room.answered([(who, lease, (answer,)) for (who, answer), lease in zip(votes[:2], leases, strict=True)])
    ((cat,),) = room.leased(CAT)
    room.answered([(CAT, cat, (1,))])
    task = room.task(cat)
    assert task.stage is TaskStage.REVIEW and room.row(project).review == 1
    key = task_id(project, task.number)
    assert "belongs to another member" in room.refused(PEER, "curation/review-task", ReviewTask(key, (1,)))
    assert "[5] is not a valid answer: expected one of 0..1" in room.refused(
        AUTHOR, "curation/review-task", ReviewTask(key, (5,))
    )
    room.say(AUTHOR, "curation/review-task", ReviewTask(key, (1,)))
    assert room.task(cat).label == (1,) and room.row(project).review == 0 and room.person(BOB).accepted == 0


def test_a_proven_annotator_weighs_more(room: Room) -> None:
    """Ann was right twelve times, so her answer alone outweighs a stranger's."""
    project = room.project(SEVERAL, tasks=14)
    for _ in range(12):
        leases = room.leased(ANN, BOB)
        while not leases[0] or not leases[1]:
            leases = room.leased(ANN, BOB)
        room.answered([(ANN, leases[0][0], (1,)), (BOB, leases[1][0], (1,))])
    assert held(room.curation.skills.get_record(project + ANN.public)).counts[3] > 8
    (ann,), (cat,) = room.leased(ANN, CAT)
    assert room.assignment(ann).number == room.assignment(cat).number
    room.answered([(ANN, ann, (1,)), (CAT, cat, (0,))])
    assert room.task(ann).label is None, "but only nine tenths are enough"


def test_nobody_gets_a_task_twice_and_begun_ones_come_first(room: Room) -> None:
    room.project(SEVERAL, tasks=40)
    first, second = room.leased(ANN, BOB, count=LEASES_MAX)
    assert len(set(first)) == len(first) == LEASES_MAX
    assert {room.assignment(key).number for key in first} == {room.assignment(key).number for key in second}
    ((more),) = room.leased(ANN, count=8)
    assert more == first, "no more than eight at a time"


def test_no_task_is_of_a_project_that_the_wish_leaves_out(room: Room) -> None:
    lost, here = room.project(ONE, tasks=40), room.project(ONE, tasks=40)
    room.batch(enrolments=[room.enrolment(ANN), room.enrolment(CAT)])
    room.leased(BOB, count=8)  # from both projects, begun tasks first
    room.batch(leases=[replace(room.wish(ANN, 8), excluded_projects=(lost,))])
    assert {room.assignment(key).project for key in room.person(ANN).leases} == {here}
    room.batch(leases=[replace(room.wish(CAT), excluded_projects=tuple(sorted((lost, here))))])
    assert room.person(CAT).leases == ()


def test_all_tasks_are_of_the_project_that_the_wish_names(room: Room) -> None:
    other, chosen = room.project(SEVERAL, tasks=40), room.project(SEVERAL, tasks=3)
    closed = room.project(ONE, tasks=3)
    room.say(AUTHOR, "curation/set-phase", SetProjectPhase(closed, ProjectPhase.CLOSED))
    room.leased(BOB, count=4)  # begun tasks of both projects come first
    room.batch(enrolments=[room.enrolment(ANN), room.enrolment(CAT)])
    room.batch(
        leases=[replace(room.wish(ANN, 8), project=chosen), replace(room.wish(CAT), project=chosen, excluded_projects=(chosen,))]
    )
    assert [room.assignment(key).project for key in room.person(ANN).leases] == [chosen] * 3
    assert room.person(CAT).leases == ()
    for none in (closed, bytes(32)):
        room.batch(leases=[replace(room.wish(CAT), project=none)])
        assert room.person(CAT).leases == ()
    assert {room.assignment(key).project for key in room.leased(BOB, count=8)[0]} == {other, chosen}


def test_what_is_drawn_depends_on_root_task_and_annotator(room: Room) -> None:
    room.project(ONE, tasks=200)
    numbers = [room.assignment(lease).number for (lease,) in room.leased(*annotators(20))]
    assert len(set(numbers)) == 20 and numbers != sorted(numbers) and max(numbers) > 100


def test_an_expired_lease_counts_until_somebody_has_its_place(room: Room) -> None:
    project = room.project(ONE, tasks=1)
    ((ann,),) = room.leased(ANN)
    room.later(LEASE_MS - 1)
    assert room.leased(BOB) == [()], "there is no place yet"
    room.later(1, batches=2)
    assert (
        room.assignment(ann).state is AssignmentState.EXPIRED and room.row(project).begun == 1 and room.person(ANN).leases == ()
    )
    room.batch(commits=[room.commit(ANN, ann, (0,))])
    assert room.assignment(ann).state is AssignmentState.COMMITTED and room.row(project).begun == 0


def test_a_lease_is_gone_when_somebody_has_its_place(room: Room) -> None:
    room.project(ONE, tasks=1)
    ((ann,),) = room.leased(ANN)
    room.later(LEASE_MS, batches=1)
    ((bob,),) = room.leased(BOB)
    room.batch(commits=[room.commit(ANN, ann, (0,))])
    assert room.assignment(ann).state is AssignmentState.EXPIRED and room.curation.passed_over == 1
    room.answered([(BOB, bob, (1,))])
    assert room.task(bob).label == (1,)


def test_who_does_not_open_forfeits_and_another_is_asked(room: Room) -> None:
    project = room.project(SEVERAL, tasks=1)
    (ann,), (bob,) = room.leased(ANN, BOB)
    room.batch(commits=[room.commit(ANN, ann, (1,)), room.commit(BOB, bob, (0,))])
    room.batch(openings=[room.opening(ANN, ann, (1,))])
    room.later(OPENING_MS, batches=2)
    assert room.assignment(bob).state is AssignmentState.FORFEITED and room.assignment(ann).state is AssignmentState.OPENED
    assert room.row(project).begun == 1 and room.task(ann).stage is TaskStage.BEGUN
    room.batch(openings=[room.opening(BOB, bob, (0,))])
    assert room.assignment(bob).answer is None, "too late"
    ((cat,),) = room.leased(CAT)
    room.answered([(CAT, cat, (1,))])
    assert room.task(ann).label == (1,) and room.person(BOB).accepted == 0


def test_four_skips_send_a_task_to_its_author(room: Room) -> None:
    project = room.project(ONE, tasks=1)
    for number, who in enumerate(annotators(SKIPS_MAX), 1):
        ((lease,),) = room.leased(who)
        room.batch(OTHER, skips=[SkipAssignment(lease, "unclear")])
        assert room.assignment(lease).state is AssignmentState.LEASED, "another peer took the lease"
        room.batch(skips=[SkipAssignment(lease, f"unclear {number}")])
        assert (room.assignment(lease).state, room.assignment(lease).reason) == (AssignmentState.SKIPPED, f"unclear {number}")
        assert (room.task(lease).stage is TaskStage.REVIEW) == (number == SKIPS_MAX)
    assert room.row(project).review == 1 and room.row(project).begun == 0


@pytest.mark.parametrize("how", ["annotator", "commitment", "misfit", "twice", "unknown", "stranger", "over", "name"])
def test_what_cannot_act_is_passed_over_and_changes_nothing(room: Room, how: str) -> None:
    room.project(ONE, tasks=2)
    ((ann,),) = room.leased(ANN)
    commit = room.commit(ANN, ann, (0,))
    statements: dict[str, list[object]] = {
        "annotator": {"commits": [room.commit(BOB, ann, (0,))]},
        "commitment": {"commits": [commit], "openings": [room.opening(ANN, ann, (1,))]},
        "misfit": {"commits": [room.commit(ANN, ann, (7,))], "openings": [room.opening(ANN, ann, (7,))]},
        "twice": {"commits": [commit, room.commit(ANN, ann, (1,))]},
        "unknown": {"commits": [room.commit(ANN, bytes(32), (0,))]},
        "stranger": {"leases": [room.wish(BOB)]},
        "over": {"leases": [room.wish(ANN, expires_ms=0)]},
        "name": {"enrolments": [room.enrolment(BOB, name="b\u202eob")]},
    }[how]  # type: ignore[assignment]
    before = room.curation
    after = room.batch(**statements)  # type: ignore[arg-type]
    assert after.passed_over == before.passed_over + 1
    if how not in ("commitment", "misfit", "twice"):
        assert replace(after, passed_over=before.passed_over, expired_height=before.expired_height) == before
    assert after.settled == 0 and after.annotators_count == 1
    assert room.task(ann).opened == 0


def test_a_batch_of_a_peer_that_does_not_serve_is_refused(room: Room) -> None:
    assert "only members with the role 'annotator'" in room.refused(AUTHOR, "curation/statements", StatementBatch())
    assert "600 statements, more than 512" in room.refused(
        PEER, "curation/statements", StatementBatch(leases=(room.wish(ANN),) * 300, enrolments=(room.enrolment(ANN),) * 300)
    )


def test_a_session_is_of_one_peer(room: Room) -> None:
    room.project(ONE)
    room.leased(ANN)
    assert "bad-signature: session" in room.refused(
        OTHER, "curation/statements", StatementBatch(leases=(room.wish(ANN, peer=PEER),))
    )


def test_a_peer_enrols_no_more_than_its_share(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curation.ledger.curation_module.ANNOTATORS_MAX", 6)
    people = annotators(8)
    room.batch(enrolments=[room.enrolment(who) for who in people])
    assert room.curation.annotators_count == 3, "two peers serve"
    room.batch(OTHER, enrolments=[room.enrolment(who, peer=OTHER) for who in people])
    assert room.curation.annotators_count == 6


def test_serving_peers_are_counted_once_a_block(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count reads all members, and a block may hold a thousand batches with enrolments."""
    counts: list[int] = []

    def counted(members: MembersState) -> tuple[bytes, ...]:
        counts.append(room.state.height)
        return serving_peers(members)

    monkeypatch.setattr("curation.ledger.curation_module.serving_peers", counted)
    monkeypatch.setattr("curation.ledger.curation_module.ANNOTATORS_MAX", 6)
    for _ in range(2):
        people = annotators(8)
        mine = [
            room.tx(PEER, "curation/statements", StatementBatch(enrolments=(room.enrolment(who),)), ahead)
            for ahead, who in enumerate(people, 1)
        ]
        room.decide(
            *mine, room.tx(OTHER, "curation/statements", StatementBatch(enrolments=(room.enrolment(people[7], peer=OTHER),)))
        )
    assert counts == [room.state.height - 2, room.state.height - 1]
    assert room.curation.shares.get_record(PEER.public) == PeerAnnotators(3), "two peers serve"
    room.decide(room.tx(AUTHOR, "member/register", RegisterRoles(("annotator",))))
    room.batch()
    assert room.curation.serving_count == 3


def test_a_key_that_never_answered_loses_its_place_to_others(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curation.ledger.curation_module.ANNOTATORS_MAX", 6)
    strangers, people = annotators(7)[:3], annotators(7)[3:]
    room.batch(enrolments=[room.enrolment(who) for who in strangers])
    room.batch(enrolments=[room.enrolment(who) for who in people])
    assert room.curation.annotators_count == 3 and people[0].public not in room.curation.annotators
    room.later(ENROLMENT_MS)
    room.batch()  # the later time counts after this block
    room.batch(enrolments=[room.enrolment(who) for who in people])
    assert [who.public in room.curation.annotators for who in (*strangers, *people)] == 3 * [False] + 3 * [True] + [False]
    assert room.curation.annotators_count == 3 and room.curation.shares.get_record(PEER.public) == PeerAnnotators(3)
    room.later(ENROLMENT_MS, batches=1)
    room.batch(enrolments=[room.enrolment(strangers[0])])
    assert strangers[0].public in room.curation.annotators, "a key may enrol again"


def test_an_annotator_that_answered_once_keeps_its_place(room: Room) -> None:
    room.project(ONE, tasks=2)
    (ann,), (bob,) = room.leased(ANN, BOB)
    room.batch(commits=[room.commit(ANN, ann, (1,))])
    room.later(ENROLMENT_MS, batches=2)
    assert ANN.public in room.curation.annotators and BOB.public not in room.curation.annotators
    assert room.assignment(bob).state is AssignmentState.EXPIRED and room.task(bob).places_taken == 0
    passed = room.curation.passed_over
    room.batch(commits=[room.commit(BOB, bob, (1,))])
    assert room.curation.passed_over == passed + 1, "nobody answers without a place"
    room.batch(enrolments=[room.enrolment(CAT)])
    room.batch(leases=[room.wish(CAT, 2, expires_ms=room.now + 1)])
    numbers = [room.assignment(lease).number for lease in room.person(CAT).leases]
    assert bob not in room.person(CAT).leases and room.assignment(bob).number in numbers, "others may have its task"


def test_a_place_expires_in_the_block_in_which_its_peer_has_a_new_key(room: Room) -> None:
    room.batch(enrolments=[room.enrolment(ANN), room.enrolment(BOB)])
    room.later(ENROLMENT_MS, batches=1)
    new = PEOPLE[6]
    rotate = RotateKey(new.public, new.sign(rotation_preimage(room.chain, PEER.public)))
    room.decide(
        room.tx(PEER, "member/rotate", rotate),
        room.tx(new, "curation/statements", StatementBatch(enrolments=(room.enrolment(CAT, peer=new),))),
    )
    assert room.curation.annotators_count == 1 and CAT.public in room.curation.annotators
    assert (room.curation.shares.get_record(PEER.public), room.curation.shares.get_record(new.public)) == (
        None,
        PeerAnnotators(1),
    )


def test_a_serving_peer_knows_when_a_place_expires(room: Room) -> None:
    room.batch(enrolments=[room.enrolment(ANN)])
    assert CurationChanges(room.curation, b"").next_expiry_ms() == room.now + ENROLMENT_MS
    room.later(ENROLMENT_MS, batches=2)
    assert ANN.public not in room.curation.annotators and CurationChanges(room.curation, b"").next_expiry_ms() is None


def test_every_queue_has_a_time_at_which_a_batch_looks_at_it(room: Room) -> None:
    for field in fields(CurationState):
        if field.type == "ExpiryQueue":
            work = CurationChanges(CurationState(), b"")
            work.enqueue_expiry(field.name, bytes(32), 5)
            assert work.next_expiry_ms() == 5, field.name


def test_a_place_expires_after_its_peer_had_new_keys(room: Room) -> None:
    room.batch(enrolments=[room.enrolment(ANN), room.enrolment(BOB)])
    old = PEER
    for new in PEOPLE[6:8]:
        room.decide(room.tx(old, "member/rotate", RotateKey(new.public, new.sign(rotation_preimage(room.chain, old.public)))))
        old = new
    room.later(ENROLMENT_MS)
    room.batch(OTHER)
    room.batch(OTHER)
    assert room.curation.annotators_count == 0 and room.curation.shares.get_record(old.public) == PeerAnnotators(0)


def test_a_lease_that_is_new_does_not_keep_a_place(room: Room) -> None:
    room.project(ONE, tasks=2)
    room.batch(enrolments=[room.enrolment(ANN)])
    room.later(ENROLMENT_MS - 1, batches=1)
    room.batch(leases=[room.wish(ANN, expires_ms=room.now + 1)])
    (lease,) = room.person(ANN).leases
    room.later(1, batches=2)
    assert ANN.public not in room.curation.annotators
    assert room.assignment(lease).state is AssignmentState.EXPIRED and room.task(lease).places_taken == 0


def test_one_wish_of_an_annotator_acts_in_a_batch(room: Room) -> None:
    """A lease request that finds no task looks at all projects. 512 such requests in a batch would be expensive."""
    room.project(SEVERAL, tasks=3)
    room.batch(enrolments=[room.enrolment(ANN), room.enrolment(BOB)])
    room.batch(leases=[room.wish(ANN), room.wish(ANN, 2), room.wish(BOB)])
    assert (len(room.person(ANN).leases), len(room.person(BOB).leases), room.curation.passed_over) == (1, 1, 1)
    room.batch(leases=[room.wish(ANN)])
    assert len(room.person(ANN).leases) == 2


def test_projects_are_of_members_who_have_ten_open_ones_at_most(room: Room) -> None:
    first = room.project()
    for _ in range(PROJECTS_OPEN_MAX - 1):
        room.project()
    assert "10 projects of this member are open" in room.refused(AUTHOR, "curation/create-project", CreateProject(ONE))
    room.closed(first)
    assert room.refused(AUTHOR, "curation/create-project", CreateProject(ONE)) == ""
    assert "closed permanently" in room.refused(AUTHOR, "curation/set-phase", SetProjectPhase(first, ProjectPhase.OPEN))
    assert "the project is closed" in room.refused(AUTHOR, "curation/add-page", AddTaskPage(first, bytes(32), 1, bytes(32), 1))
    assert "belongs to another member" in room.refused(PEER, "curation/set-phase", SetProjectPhase(first, ProjectPhase.OPEN))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (replace(ONE, options=("a",)), "a label needs 2 to 16 options, not 1"),
        (replace(ONE, options=("a", "a")), "two options are the same"),
        (replace(ONE, items=2), "a label has a text and no items"),
        (ProjectSpec("p", QuestionKind.PAIR, (), False, 0, None, 3, 0, False), "a pair has 2 `items`, not 0"),
        (ProjectSpec("p", QuestionKind.PAIR, ("a",), False, 2, None, 3, 0, False), "a pair takes no options"),
        (ProjectSpec("p", QuestionKind.RANKING, (), False, 2, None, 3, 0, False), "a ranking has 3 to 9 `items`, not 2"),
        (ProjectSpec("p", QuestionKind.RATING, ("1", "2"), True, 0, None, 3, 0, False), "a rating has one answer, not several"),
    ],
)
def test_a_project_that_asks_nonsense_is_refused(room: Room, asked: ProjectSpec, why: str) -> None:
    assert why in room.refused(AUTHOR, "curation/create-project", CreateProject(asked))


def test_a_paused_project_gives_out_no_tasks_and_a_closed_one_takes_no_answers(room: Room) -> None:
    project = room.project(ONE, tasks=3)
    ((ann,),) = room.leased(ANN)
    room.say(AUTHOR, "curation/set-phase", SetProjectPhase(project, ProjectPhase.PAUSED))
    assert room.leased(BOB) == [()]
    room.answered([(ANN, ann, (1,))])
    assert room.task(ann).label == (1,), "an answer to a paused project counts"
    room.say(AUTHOR, "curation/set-phase", SetProjectPhase(project, ProjectPhase.OPEN))
    ((bob,),) = room.leased(BOB)
    room.say(AUTHOR, "curation/set-phase", SetProjectPhase(project, ProjectPhase.CLOSED))
    room.batch(commits=[room.commit(BOB, bob, (0,))])
    assert room.assignment(bob).state is AssignmentState.LEASED


# Invariants under arbitrary statements --------------------------------------------------------------------------------

CROWD = annotators(6)
steps = st.lists(
    st.tuples(
        st.sampled_from(["lease", "commit", "open", "skip", "wait", "redact"]), st.sampled_from(range(6)), st.sampled_from([0, 1])
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=60)
@given(steps, st.integers(1, 7))
def test_every_count_is_that_of_the_rows(history: list[tuple[str, int, int]], votes: int) -> None:
    room = Room()
    project = room.project(replace(ONE, votes=votes), tasks=4)
    answers: dict[bytes, tuple[FastSigner, Answer]] = {}
    room.leased(*CROWD)
    for what, number, answer in history:
        who = CROWD[number]
        mine = room.person(who).leases
        match what:
            case "lease":
                room.leased(who)
            case "commit" if mine:
                answers[mine[0]] = who, (answer,)
                room.batch(commits=[room.commit(who, mine[0], (answer,))])
            case "open":
                room.batch(openings=[room.opening(who, key, said) for key, (who, said) in answers.items()])
            case "skip" if mine:
                room.batch(skips=[SkipAssignment(mine[0], "unclear")])
            case "redact":
                wish = redaction(room, project, number % 4, bytes([number]) * 32)
                if not room.refused(AUTHOR, "curation/redact", wish):
                    room.say(AUTHOR, "curation/redact", wish)
            case "wait":
                room.later(OPENING_MS if answer else LEASE_MS, batches=1)
        check(room, project)


def check(room: Room, project: bytes) -> None:
    state, row = room.curation, room.row(project)
    tasks = dict(state.tasks.items())
    assignments = dict(state.assignments.items())
    assert sum(bool(task.annotators) for task in tasks.values()) <= row.fresh_drawn <= row.tasks
    assert len(tasks) <= row.fresh_drawn + sum(task.is_redacted and not task.annotators for task in tasks.values())
    assert row.settled == state.settled == sum(task.stage is TaskStage.SETTLED for task in tasks.values())
    assert row.review == sum(task.stage is TaskStage.REVIEW for task in tasks.values())
    free = {task.number for task in tasks.values() if task.stage is TaskStage.BEGUN and task.places_taken < task.votes_asked}
    places = [state.places.get_record(index_slot_key(project, BEGUN_LIST, place)) for place in range(row.begun)]
    assert {place.number for place in places if place} == free and len(free) == row.begun
    for key, task in tasks.items():
        of = [assignments[assignment_id(key, annotator)] for annotator in task.annotators]
        states = Counter(vote.state for vote in of)
        done = states[AssignmentState.COMMITTED] + states[AssignmentState.OPENED] + states[AssignmentState.SETTLED]
        assert task.committed == done and task.opened == states[AssignmentState.OPENED] + states[AssignmentState.SETTLED]
        if task.stage is not TaskStage.REVIEW:
            assert task.places_taken == done + states[AssignmentState.LEASED] <= task.votes_asked <= limits.VOTES_MAX
        assert (task.label is None) == (task.stage is not TaskStage.SETTLED)
    for who in CROWD:
        person = room.person(who)
        mine = {key for key, vote in assignments.items() if vote.annotator == who.public and vote.state is AssignmentState.LEASED}
        assert set(person.leases) == mine and len(mine) <= LEASES_MAX


# A task that waits for its author ----------------------------------------------------------------------------------------


def crowded(room: Room) -> tuple[list[FastSigner], list[bytes]]:
    """Return the people of a task that has reached its limit of assignments. All but the last two let their leases expire."""
    people = annotators(limits.ASSIGNED_MAX)
    for who in people[:-2]:
        room.leased(who)
        room.later(LEASE_MS, batches=1)
    return people[-2:], [lease for (lease,) in room.leased(*people[-2:])]


def test_two_that_forfeit_at_once_send_their_task_to_its_author_once(room: Room) -> None:
    project = room.project(SEVERAL, tasks=1)
    people, leases = crowded(room)
    room.batch(commits=[room.commit(who, lease, (1,)) for who, lease in zip(people, leases, strict=True)])
    assert room.task(leases[0]).stage is TaskStage.OPENING
    room.later(OPENING_MS, batches=2)
    task = room.task(leases[0])
    assert (task.stage, task.committed, task.places_taken, room.row(project).review) == (TaskStage.REVIEW, 0, 0, 1)
    room.say(AUTHOR, "curation/review-task", ReviewTask(task_id(project, task.number), (1,)))
    assert room.row(project).review == 0 and room.row(project).settled == 1


def test_a_vote_on_a_task_that_goes_to_its_author_is_free(room: Room) -> None:
    project = room.project(SEVERAL, tasks=1)
    ((ann,),) = room.leased(ANN)
    for number, who in enumerate(annotators(8)[4:], 1):
        ((lease,),) = room.leased(who)
        if number == SKIPS_MAX:
            room.batch(commits=[room.commit(ANN, ann, (1,))])
        room.batch(skips=[SkipAssignment(lease, "unclear")])
    assert (room.task(ann).stage, room.assignment(ann).state) == (TaskStage.REVIEW, AssignmentState.FORFEITED)
    assert (room.task(ann).committed, room.task(ann).places_taken, room.row(project).review) == (0, 0, 1)


def test_a_task_that_waits_for_its_author_takes_no_votes(room: Room) -> None:
    room.project(SEVERAL, tasks=1)
    ((ann,),) = room.leased(ANN)
    for who in annotators(8)[4:]:
        ((lease,),) = room.leased(who)
        room.batch(skips=[SkipAssignment(lease, "unclear")])
    assert (room.task(ann).stage, room.assignment(ann).state) == (TaskStage.REVIEW, AssignmentState.LEASED)
    room.batch(commits=[room.commit(ANN, ann, (1,))])
    assert room.assignment(ann).state is AssignmentState.LEASED and room.curation.annotations == 0


# Stopped by voters -------------------------------------------------------------------------------------------------------


def test_a_quorum_of_voters_closes_a_project(room: Room) -> None:
    """Two voters of four are too few, even if they repeat their vote. Three are enough."""
    project = room.project(ONE, tasks=1)
    outsider = PEOPLE[5]
    room.decide(room.admission(outsider))
    assert "only voters" in room.refused(outsider, "curation/vote-to-stop", VoteToStopProject(project))
    for who in (PEER, OTHER, OTHER, PEER):
        room.say(who, "curation/vote-to-stop", VoteToStopProject(project))
    assert room.row(project).phase is ProjectPhase.OPEN and set(room.row(project).stop_requests) == {PEER.public, OTHER.public}
    room.say(PEOPLE[3], "curation/vote-to-stop", VoteToStopProject(project))
    assert (
        room.row(project).phase is ProjectPhase.CLOSED
        and room.curation.closing == (project,)
        and project not in room.curation.open
    )
    assert "unknown project, or it is closed already" in room.refused(PEER, "curation/vote-to-stop", VoteToStopProject(project))


def test_the_wish_of_a_voter_that_left_does_not_count(room: Room) -> None:
    """After it left, two of three voters are enough."""
    project = room.project(ONE, tasks=1)
    room.say(OTHER, "curation/vote-to-stop", VoteToStopProject(project))
    room.decide(room.tx(OTHER, "member/resign", ResignAsVoter()))
    while OTHER.public in room.state.members.voters:
        room.decide()
    room.say(PEER, "curation/vote-to-stop", VoteToStopProject(project))
    assert room.row(project).phase is ProjectPhase.OPEN and room.row(project).stop_requests == (PEER.public,)
    room.say(PEOPLE[3], "curation/vote-to-stop", VoteToStopProject(project))
    assert room.row(project).phase is ProjectPhase.CLOSED


# A member with another key -----------------------------------------------------------------------------------------------


def test_a_serving_peer_goes_on_with_another_key(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """The places of its annotators stay taken, and it may skip its earlier leases."""
    monkeypatch.setattr("curation.ledger.curation_module.ANNOTATORS_MAX", 4)
    room.project(ONE, tasks=3)
    new = PEOPLE[5]
    ((ann,), _) = room.leased(ANN, BOB)
    room.decide(room.rotation(PEER, new))
    assert dict(room.curation.shares.items()) == {new.public: PeerAnnotators(2)}
    room.batch(new, enrolments=[room.enrolment(CAT, peer=new)])
    assert room.curation.annotators.get_record(CAT.public) is None, "two peers serve four people: two each"
    room.batch(OTHER, skips=[SkipAssignment(ann, "unclear")])
    assert room.assignment(ann).state is AssignmentState.LEASED
    room.batch(new, skips=[SkipAssignment(ann, "unclear")])
    assert room.assignment(ann).state is AssignmentState.SKIPPED


def test_an_author_goes_on_with_another_key(room: Room) -> None:
    project, new = room.project(ONE, tasks=1), PEOPLE[5]
    room.decide(room.rotation(AUTHOR, new))
    for _ in range(PROJECTS_OPEN_MAX - 1):
        room.project(ONE, author=new)
    assert "10 projects of this member are open" in room.refused(new, "curation/create-project", CreateProject(ONE))
    room.page(project, 1, new)
    room.say(new, "curation/set-phase", SetProjectPhase(project, ProjectPhase.PAUSED))
    assert room.row(project).phase is ProjectPhase.PAUSED and room.row(project).tasks == 2


# Redaction ---------------------------------------------------------------------------------------------------------------


def redaction(room: Room, project: bytes, number: int, digest: bytes = b"n" * 32) -> Redaction:
    page = held(room.curation.pages.get_record(page_key(project, 0)))
    return Redaction(project, 0, number, page.digest, digest, 99)


def row_of(room: Room, project: bytes, number: int) -> TaskRow:
    return held(room.curation.tasks.get_record(task_id(project, number)))


def test_a_redacted_task_is_drawn_no_more(room: Room) -> None:
    """One redacted task is fresh. The other one is Ann's, whose lease expires. The page's bytes change, its root stays."""
    project = room.project(SEVERAL, tasks=3)
    ((ann,),) = room.leased(ANN)
    begun = room.assignment(ann).number
    fresh = (begun + 1) % 3
    before = room.curation.pages.get_record(page_key(project, 0))
    room.say(AUTHOR, "curation/redact", redaction(room, project, fresh))
    assert before and room.curation.pages.get_record(page_key(project, 0)) == replace(before, digest=b"n" * 32, bytes=99)
    room.say(AUTHOR, "curation/redact", redaction(room, project, begun, b"m" * 32))
    assert (
        room.assignment(ann).state is AssignmentState.EXPIRED and room.person(ANN).leases == () and room.row(project).begun == 0
    )
    room.batch(commits=[room.commit(ANN, ann, (1,))])
    assert room.curation.annotations == 0
    assert {room.assignment(lease).number for mine in room.leased(BOB, CAT, count=8) for lease in mine} == {3 - begun - fresh}
    assert [row_of(room, project, number).stage for number in (begun, fresh)] == 2 * [TaskStage.REDACTED]
    assert "already redacted" in room.refused(AUTHOR, "curation/redact", redaction(room, project, begun))
    assert "unknown task" in room.refused(AUTHOR, "curation/redact", redaction(room, project, 3))


def test_a_draw_looks_at_few_redacted_tasks_and_the_next_one_goes_on(room: Room) -> None:
    """Otherwise an author that redacts many texts would make each lease request cost as much as all of them."""
    project = room.project(SEVERAL, tasks=DRAW_CANDIDATES_MAX + 2)
    for number in range(DRAW_CANDIDATES_MAX + 1):
        room.say(AUTHOR, "curation/redact", redaction(room, project, number, bytes([number]) * 32))
    drawn = [0]
    while not room.leased(ANN)[0]:
        drawn.append(room.row(project).fresh_drawn)
        assert drawn[-1] == drawn[-2] + DRAW_CANDIDATES_MAX and CurationChanges(room.curation, bytes(32)).has_task_to_draw(
            ANN.public, ()
        )
    assert room.row(project).fresh_drawn <= drawn[-1] + DRAW_CANDIDATES_MAX
    assert room.assignment(room.person(ANN).leases[0]).number == DRAW_CANDIDATES_MAX + 1
    room.say(AUTHOR, "curation/redact", redaction(room, project, DRAW_CANDIDATES_MAX + 1, b"n" * 32))
    while room.row(project).fresh_drawn < DRAW_CANDIDATES_MAX + 2:
        assert not room.leased(BOB)[0]
    assert not CurationChanges(room.curation, bytes(32)).has_task_to_draw(BOB.public, ())


def test_votes_on_a_redacted_task_are_free_and_a_settled_one_keeps_its_label(room: Room) -> None:
    project = room.project(SEVERAL, tasks=2)
    (ann, other), _ = room.leased(ANN, BOB, count=2)
    bob = assignment_id(task_id(project, room.assignment(ann).number), BOB.public)
    room.batch(commits=[room.commit(who, key, (1,)) for who, key in ((ANN, ann), (BOB, bob), (ANN, other))])
    room.batch(openings=[room.opening(ANN, ann, (1,)), room.opening(BOB, bob, (1,))])
    settled, open_ = room.assignment(ann).number, room.assignment(other).number
    for number, digest in ((settled, b"n" * 32), (open_, b"m" * 32)):
        room.say(AUTHOR, "curation/redact", redaction(room, project, number, digest))
    row = row_of(room, project, settled)
    assert (row.stage, row.label, row.is_redacted) == (TaskStage.SETTLED, (1,), True)
    assert row_of(room, project, open_).stage is TaskStage.REDACTED and room.assignment(other).state is AssignmentState.FORFEITED
    line = label_record(SEVERAL, row, AnnotationTask("text"), [])
    assert line["redacted"] is True and "text" not in line and line["label_text"] == [SEVERAL.options[1]]
    room.later(LEASE_MS, batches=2)
    assert (room.row(project).begun, room.row(project).settled) == (0, 1)


def test_an_export_has_the_times_of_the_answers_and_of_the_label(room: Room) -> None:
    project = room.project(SEVERAL, tasks=1)
    (ann,), (bob,) = room.leased(ANN, BOB)
    times = []
    for who, lease in ((ANN, ann), (BOB, bob)):
        room.later(1_000)
        times.append(room.state.time_ms)
        room.batch(commits=[room.commit(who, lease, (1,))])
    room.later(5_000)
    times.append(room.state.time_ms)
    room.batch(openings=[room.opening(ANN, ann, (1,)), room.opening(BOB, bob, (1,))])
    line = label_record(SEVERAL, row_of(room, project, 0), AnnotationTask("text"), [room.assignment(ann), room.assignment(bob)])
    assert [*(vote["time_ms"] for vote in line["votes"]), line["time_ms"]] == times and len(set(times)) == 3


def test_a_task_that_waits_for_its_author_waits_no_more_when_it_is_redacted(room: Room) -> None:
    project = room.project(replace(SEVERAL, votes=2), tasks=1)
    (ann,), (bob,) = room.leased(ANN, BOB)
    room.answered([(ANN, ann, (1,)), (BOB, bob, (0,))])
    assert room.row(project).review == 1
    room.say(AUTHOR, "curation/redact", redaction(room, project, 0))
    assert room.row(project).review == 0
    assert "does not wait for its author" in room.refused(AUTHOR, "curation/review-task", ReviewTask(task_id(project, 0), (1,)))


def test_two_voters_of_four_redact_if_they_say_the_same(room: Room) -> None:
    """f is 1. A request with other bytes is a different one. A request for a page that changed meanwhile does not count."""
    project = room.project(ONE, tasks=3)
    outsider = PEOPLE[5]
    room.decide(room.admission(outsider))
    wish = redaction(room, project, 1)
    assert "only the project's author and voters" in room.refused(outsider, "curation/redact", wish)
    room.say(PEER, "curation/redact", wish)
    room.say(PEER, "curation/redact", wish)
    room.say(OTHER, "curation/redact", replace(wish, digest=b"o" * 32))
    assert room.curation.redacted == 0
    room.say(OTHER, "curation/redact", wish)
    assert room.curation.redacted == 1 and row_of(room, project, 1).is_redacted and len(room.curation.wishes) == 0
    assert "the page has changed meanwhile" in room.refused(AUTHOR, "curation/redact", replace(wish, index=2, digest=b"p" * 32))


def test_only_a_page_of_these_tasks_goes_and_none_that_a_project_has(room: Room) -> None:
    """A project that names another project's page, or a job's data, as its own page deletes neither."""
    page = TaskPageBlob(tuple(PageEntry(bytes([number]) * 16, AnnotationTask(f"text {number}")) for number in range(2)))
    data, made = codec.encode(page), redact_entry(page, 1)
    old, new = hashlib.sha256(data).digest(), hashlib.sha256(made).digest()
    first, second = room.project(ONE, tasks=0), room.project(ONE, tasks=0)
    for project in (first, second):
        room.say(AUTHOR, "curation/add-page", AddTaskPage(project, old, len(data), page_merkle_root(page), 2))
    room.say(AUTHOR, "curation/redact", Redaction(first, 0, 1, old, new, len(made)))
    (replaced,) = room.module.replaced_blobs(room.curation, 0)
    assert replaced.old == old and replaced.make(data) is None, "the second project has it"
    room.say(AUTHOR, "curation/redact", Redaction(second, 0, 1, old, new, len(made)))
    (replaced,) = room.module.replaced_blobs(room.curation, 1)
    assert replaced.make(data) == made and replaced.make(b"of a job") is None and replaced.make(made + b"\0") is None
    after = decode_page(made, QuestionKind.LABEL, page_merkle_root(page), 2)
    assert after.entries[0] == page.entries[0] and after.entries[1] == PageEntry(None, None, entry_leaf(page.entries[1]))


# Gold --------------------------------------------------------------------------------------------------------------------


def test_gold_is_what_its_author_knew_when_the_page_was_added(room: Room) -> None:
    golds = {1: (1,), 3: (0,), 4: (7,)}
    project = room.project(ONE, tasks=5, gold=golds)
    plain = room.project(ONE, tasks=2)
    first, second, misfit = gold_answers(5, golds)

    def refused(*answers: GoldAnswerProof, who: FastSigner = AUTHOR, of: bytes = project, page: int = 0) -> str:
        return room.refused(who, "curation/reveal-gold", RevealGold(of, page, answers))

    assert "belongs to another member" in refused(first, who=PEER)
    assert "unknown page, or it has no gold" in refused(first, of=plain) and "unknown page" in refused(first, page=1)
    for false in (
        replace(first, answer=(0,)),
        replace(first, salt=bytes(16)),
        replace(first, proof=first.proof[:-1]),
        replace(second, index=1),
        replace(first, answer=(0,), proof=second.proof),
    ):
        assert refused(false) == "this is not the gold that was committed for task 1"
    assert "for task 3" in refused(first, replace(first, index=3)) and "for task 200" in refused(replace(first, index=200))
    assert "[7] is not a valid answer: expected one of 0..1" in refused(misfit)
    assert "task 1 is already revealed" in refused(first, first)
    room.say(AUTHOR, "curation/reveal-gold", RevealGold(project, 0, (first, second)))
    assert {key: tuple(row.answer) for key, row in room.curation.golds.items()} == {
        task_id(project, 1): (1,), task_id(project, 3): (0,)
    }  # fmt: skip
    assert room.row(project).golds == 2 and "task 3 is already revealed" in refused(second)


def test_gold_comes_before_the_close_begins(room: Room) -> None:
    golds = {0: (1,), 1: (0,)}
    project = room.project(ONE, tasks=2, gold=golds)
    first, second = gold_answers(2, golds)
    room.say(AUTHOR, "curation/set-phase", SetProjectPhase(project, ProjectPhase.CLOSED))
    room.later(OPENING_MS - 1, batches=1)
    room.say(AUTHOR, "curation/reveal-gold", RevealGold(project, 0, (first,)))
    room.later(1)
    room.decide()
    assert "the project is already being closed" in room.refused(
        AUTHOR, "curation/reveal-gold", RevealGold(project, 0, (second,))
    )
    assert room.row(project).golds == 1


def test_whoever_could_read_the_right_answer_did_not_vote_blind(room: Room) -> None:
    golds: dict[int, Answer] = {0: (1,)}
    project = room.project(SEVERAL, tasks=1, gold=golds)
    (ann,), (bob,) = room.leased(ANN, BOB)
    room.batch(commits=[room.commit(ANN, ann, (1,))])
    room.say(AUTHOR, "curation/reveal-gold", RevealGold(project, 0, gold_answers(1, golds)))
    room.batch(commits=[room.commit(BOB, bob, (1,))])
    assert room.assignment(ann).is_blind and not room.assignment(bob).is_blind


# Released leases ---------------------------------------------------------------------------------------------------------


def test_a_released_task_is_free_for_others_at_once_and_can_be_answered_late(room: Room) -> None:
    room.project(ONE, tasks=1)
    ((ann,),) = room.leased(ANN)
    assert room.leased(BOB) == [()]
    room.batch(OTHER, releases=[ReleaseAssignment(ann)])
    assert room.assignment(ann).state is AssignmentState.LEASED, "another peer took the lease"
    room.batch(releases=[ReleaseAssignment(ann)])
    assert (room.assignment(ann).state, room.task(ann).places_taken, room.person(ANN).leases) == (AssignmentState.RELEASED, 0, ())
    room.batch(commits=[room.commit(ANN, ann, (1,))])
    assert room.assignment(ann).state is AssignmentState.COMMITTED, "nobody has its place"
    room.batch(releases=[ReleaseAssignment(ann)])
    assert room.assignment(ann).state is AssignmentState.COMMITTED
    room.project(ONE, tasks=1)
    ((cat,),) = room.leased(CAT)
    room.batch(releases=[ReleaseAssignment(cat)])
    ((bob,),) = room.leased(BOB)
    assert room.task(bob).number == room.task(cat).number
    before = room.curation.passed_over
    room.batch(commits=[room.commit(CAT, cat, (1,))])
    assert room.assignment(cat).state is AssignmentState.RELEASED and room.curation.passed_over == before + 1


def test_a_released_task_comes_back_to_its_annotator_for_a_whole_lease(room: Room) -> None:
    room.project(ONE, tasks=1)
    ((ann,),) = room.leased(ANN)
    room.later(LEASE_MS // 2)
    room.batch(releases=[ReleaseAssignment(ann)])
    for _ in range(ASSIGNED_MAX + 1):  # the person counts once among those that had the task
        assert room.leased(ANN) == [(ann,)]
        room.batch(releases=[ReleaseAssignment(ann)])
    assert room.leased(ANN) == [(ann,)] and room.task(ann).annotators == (ANN.public,)
    room.later(LEASE_MS // 2, batches=2)
    assert room.assignment(ann).state is AssignmentState.LEASED, "the first lease would be over"
    room.later(LEASE_MS // 2, batches=2)
    assert room.assignment(ann).state is AssignmentState.EXPIRED and room.leased(ANN) == [()]
