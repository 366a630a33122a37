"""Evidence in blocks, keys that are rotated, and the queue of changes through which both reach the voter set."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consensus.evidence import Evidence
from consensus.voter_set import faults_tolerated
from ledger import members
from ledger.blocks import application as ledger_module
from ledger.core.genesis import TRAINER
from ledger.jobs import JobPhase, StartJob, StopJob
from ledger.ledger_state import LedgerState, decode_body
from ledger.members import ROTATIONS_MAX, ApproveVoter, RegisterRoles, ResignAsVoter, RotateKey, StandAsVoter, rotation_preimage
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, sign_message
from protocol.limits import EVIDENCE_PER_BLOCK_MAX
from protocol.messages import Ballot, Prepare, Proposal
from protocol.verdicts import Verdict
from rounds.round_state import RoundCertificate
from tests.ledger.world import BY_KEY, LANGUAGE, PEOPLE, SCRATCH, World
from tests.sim.keys import FastSigner

LIAR, NEW, KEY = PEOPLE[3], PEOPLE[5], FastSigner("a new key")
BY_KEY[KEY.public] = KEY
ACCEPT = Verdict.ACCEPT


@pytest.fixture
def world() -> World:
    return World()


def settle(world: World, most: int = 50) -> None:
    """Empty blocks until the voter sets stand still."""
    for _ in range(most):
        if not members.is_voter_change_due(world.state.members):
            return
        world.decide()
    raise AssertionError("changes without end")


def standing(world: World, person: FastSigner, by: FastSigner = PEOPLE[0]) -> None:
    world.decide(world.admission(person, by, token=FastSigner(f"token of {person.public.hex()}")))
    height = world.state.height - 1
    world.decide(world.tx(person, "member/stand", StandAsVoter(height, world.state.certified_roots[height])))


# Evidence -------------------------------------------------------------------------------------------------------------


def test_who_is_expelled_stops_deciding_two_heights_later_and_has_lost_everything_else_at_once(world: World) -> None:
    world.decide(evidence=(world.double(LIAR),))
    state = world.state.members
    assert state.members[LIAR.public].expelled == 1 and state.members[LIAR.public].roles == ()
    assert LIAR.public in state.voters and LIAR.public not in state.upcoming and not state.is_current_key(LIAR.public)
    world.decide()
    assert LIAR.public not in world.state.members.voters and LIAR.public in world.state.members.members


def test_an_expelled_member_can_do_nothing_more_and_its_transactions_are_not_kept(world: World) -> None:
    standing(world, NEW)
    contents = [
        ("register", RegisterRoles(())),
        ("approve", ApproveVoter(NEW.public)),
        ("resign", ResignAsVoter()),
        ("stand", StandAsVoter(0, bytes(32))),
    ]
    spoken = [world.tx(LIAR, f"member/{kind}", content) for kind, content in contents]
    spoken += [
        world.tx(LIAR, "job/start", StartJob(SCRATCH)),
        world.rotation(LIAR, KEY),
        world.tx(LIAR, "job/stop", StopJob(bytes(32))),
    ]
    world.ledger.mempool.add_transaction(world.tx(LIAR, "member/register", RegisterRoles(()), ahead=2))
    world.decide(evidence=(world.double(LIAR),))
    assert [reason.split(":")[0] for _, reason in world.ledger.mempool.prune_transactions(world.rules, world.state)] == [
        "not-a-member"
    ]
    for signed in spoken:
        assert "is expelled" in (world.problem(signed) or "")
    assert "is expelled" in (world.problem(world.admission(LIAR)) or ""), "never admitted again"


def test_an_invitation_by_an_expelled_voter_is_refused_while_it_still_votes(world: World) -> None:
    world.decide(evidence=(world.double(LIAR),))
    assert LIAR.public in world.state.members.voters
    assert "is not a voter" in (world.problem(world.admission(NEW, by=LIAR)) or "")


def test_a_transaction_behind_the_evidence_of_its_block_is_that_of_an_expelled_member(world: World) -> None:
    signed = world.tx(LIAR, "member/register", RegisterRoles(()))
    assert world.problem(signed) is None
    assert "is expelled" in (world.problem(signed, evidence=(world.double(LIAR),)) or "")
    assert "is not a voter" in (world.problem(world.admission(NEW, by=LIAR), evidence=(world.double(LIAR),)) or "")


def test_what_an_expelled_member_approved_and_stood_for_is_void(world: World) -> None:
    standing(world, NEW)
    world.decide(*(world.tx(person, "member/approve", ApproveVoter(NEW.public)) for person in (PEOPLE[0], LIAR)))
    world.decide(evidence=(world.double(LIAR),))
    assert world.state.members.candidates == {NEW.public: (PEOPLE[0].public,)}
    world.decide(evidence=(world.double(NEW),))
    assert world.state.members.candidates == {} and "is not a candidate" in (
        world.problem(world.tx(PEOPLE[1], "member/approve", ApproveVoter(NEW.public))) or ""
    )


def test_a_candidate_that_is_expelled_in_the_block_of_its_last_approval_does_not_join(world: World) -> None:
    standing(world, NEW)
    world.decide(*(world.tx(PEOPLE[i], "member/approve", ApproveVoter(NEW.public)) for i in (0, 1)))
    approval = world.tx(PEOPLE[2], "member/approve", ApproveVoter(NEW.public))
    assert "is not a candidate" in (world.problem(approval, evidence=(world.double(NEW),)) or "")


def test_a_voter_that_leaves_and_is_expelled_goes_once(world: World) -> None:
    world.decide(world.tx(PEOPLE[0], "member/resign", ResignAsVoter()), world.tx(LIAR, "member/resign", ResignAsVoter()))
    assert world.state.members.resigning_voters == (LIAR.public,)
    world.decide(evidence=(world.double(LIAR),))
    assert world.state.members.resigning_voters == ()
    settle(world)
    assert world.state.members.voters == tuple(person.public for person in PEOPLE[1:3])


def wrong_evidence(world: World) -> dict[str, tuple[Evidence, ...]]:
    sound, other = world.double(LIAR), world.double(PEOPLE[2])
    ascending = tuple(sorted((sound, other), key=lambda item: item.signer))
    elsewhere = [sign_message(LIAR, bytes(32), Prepare(bytes(32), 1, 0, block * 32)) for block in (b"a", b"b")]
    return {
        "bad-signature": (Evidence(sound.first, replace(sound.second, signature=bytes(64))),),
        "no-evidence": (Evidence(sound.first, sound.first),),
        "no-evidence: ": (Evidence(sound.first, other.second),),
        "bad-signature:": (Evidence(*elsewhere),),
        "unknown-message": (Evidence(sound.first, world.tx(LIAR, "member/resign", ResignAsVoter())),),
        "is not the key of a member": (world.double(NEW),),
        "evidence must ascend": tuple(reversed(ascending)),
        "evidence must ascend by": (sound, Evidence(sound.second, sound.first)),
    }


@pytest.mark.parametrize("reason", list(wrong_evidence(World())))
def test_a_block_with_forged_useless_or_doubled_evidence_is_invalid(world: World, reason: str) -> None:
    assert reason.strip(": ") in (world.problem(evidence=wrong_evidence(world)[reason]) or "")


def test_nobody_is_expelled_twice(world: World) -> None:
    world.decide(evidence=(world.double(LIAR),))
    assert "is already expelled" in (world.problem(evidence=(world.double(LIAR, height=2),)) or "")


def test_the_last_voter_is_never_expelled_and_neither_is_the_last_that_would_stay() -> None:
    alone, two = World(voters=1), World(voters=2)
    assert "is the last voter" in (alone.problem(evidence=(alone.double(PEOPLE[0]),)) or "")
    both = tuple(two.double(person) for person in PEOPLE[:2])
    assert "is the last voter" in (two.problem(evidence=both) or "")
    two.decide(two.tx(PEOPLE[0], "member/resign", ResignAsVoter()))
    assert two.problem(evidence=both[:1]) is None and "is the last voter" in (two.problem(evidence=both[1:]) or "")
    two.decide(evidence=both[:1])
    assert "last voter" in (two.problem(two.tx(PEOPLE[1], "member/resign", ResignAsVoter())) or "")


def test_who_leaves_counts_on_nobody_whose_expulsion_waits_for_its_turn() -> None:
    world = World(voters=3)
    first, second = sorted((world.double(person) for person in PEOPLE[:2]), key=lambda item: item.signer)
    world.decide(evidence=(first, second))
    assert len(world.state.members.upcoming) == 2
    assert "last voter" in (world.problem(world.tx(PEOPLE[2], "member/resign", ResignAsVoter())) or "")


def test_a_change_that_waits_is_due_also_while_the_sets_stand_still(world: World) -> None:
    waiting = replace(world.state.members, resigning_voters=(LIAR.public,))
    assert members.is_voter_change_due(waiting) and not members.is_voter_change_due(world.state.members)


def test_a_trainer_that_does_not_vote_is_expelled_without_a_change_of_voters(world: World) -> None:
    world.decide(world.admission(NEW))
    settle(world)
    world.decide(evidence=(world.double(NEW),))
    assert not members.is_voter_change_due(world.state.members) and not world.state.members.is_current_key(NEW.public)


def test_the_open_round_keeps_an_expelled_voter_and_trainer_and_the_next_one_does_not_know_it() -> None:
    world = World(voters=6)  # of which five can close the open round
    key = world.start(spec=LANGUAGE + b":9")
    liar = BY_KEY[world.job(key).trainers[0]]
    world.decide(evidence=(world.double(liar),))
    assert liar.public in world.job(key).voters and liar.public in world.job(key).trainers
    closing = world.closing(key)
    assert liar.public in {ballot.signer for ballot in closing.ballots}
    world.decide(closings=(closing,))
    job = world.job(key)
    assert liar.public not in {*job.voters, *job.trainers, *job.reexecutors, *job.awaited} and len(job.voters) == 5


def test_a_round_opened_in_the_block_of_the_evidence_is_opened_without_the_liar(world: World) -> None:
    key = world.start(spec=LANGUAGE + b":9")
    liar = BY_KEY[world.job(key).trainers[0]]
    world.decide(closings=(world.closing(key),), evidence=(world.double(liar),))
    assert liar.public in world.state.members.voters
    assert liar.public not in {*world.job(key).voters, *world.job(key).trainers}


def test_a_round_has_voters_even_where_all_who_decide_the_next_height_are_expelled() -> None:
    world = World(voters=2, trainers=1)
    world.decide(world.tx(PEOPLE[0], "member/resign", ResignAsVoter()))
    assert world.state.members.upcoming == (PEOPLE[1].public,)
    expelled = members.expel_member(replace(world.state.members, voters=(PEOPLE[0].public,)), PEOPLE[0].public, 9)
    assert expelled.round_voters == (PEOPLE[1].public,)


def test_a_job_that_only_the_expelled_train_ends(world: World) -> None:
    key = world.start(PEOPLE[2], SCRATCH + b":9")
    other = world.start(PEOPLE[0], LANGUAGE + b":9")
    world.decide(evidence=(world.double(PEOPLE[2]),))
    assert world.job(key).phase is JobPhase.FINISHED and world.job(other).phase is JobPhase.RUNNING


def test_a_round_in_which_nobody_would_train_is_not_opened(world: World) -> None:
    key = world.start(spec=LANGUAGE + b":9")
    world.decide(*(world.tx(person, "member/register", RegisterRoles(())) for person in PEOPLE[:3]))
    world.decide(closings=(world.closing(key),))
    assert (world.job(key).phase, world.job(key).round) == (JobPhase.FINISHED, 1)


def test_two_proposals_or_ballots_of_one_round_expel_too(world: World) -> None:
    proposals = [
        sign_message(LIAR, world.chain, Proposal(bytes(32), 0, bytes(32), payload * 32, 1, bytes(32), None))
        for payload in (b"a", b"b")
    ]
    ballots = [sign_message(LIAR, world.chain, Ballot(bytes(32), 0, root * 32, ())) for root in (b"a", b"b")]
    for pair in (proposals, ballots):
        assert world.problem(evidence=(Evidence(*pair),)) is None


# Held evidence --------------------------------------------------------------------------------------------------------


def test_evidence_that_is_held_is_due_work_and_the_leader_puts_it_in(world: World) -> None:
    ledger, height = world.ledger, world.state.height + 1
    assert not ledger.has_work()
    assert ledger.add_evidence(world.double(LIAR)) and ledger.has_work()
    body = ledger.make_body(height, 0)
    assert body is not None and [item.signer for item in decode_body(body).evidence] == [LIAR.public]
    assert ledger.why_body_refused(height, body, b"") is None
    world.decide_body(body)
    assert ledger.pending_evidence == {}, "decided: nobody need hear of it any more"
    settle(world)
    world.decide()
    assert not ledger.has_work() and ledger.make_body(world.state.height + 1, 0) is None


def test_evidence_is_held_once_and_only_against_whom_it_would_expel(world: World) -> None:
    ledger = world.ledger
    assert ledger.add_evidence(world.double(LIAR)) and not ledger.add_evidence(world.double(LIAR, height=2))
    assert not ledger.add_evidence(world.double(NEW)), "no member"
    world.decide(evidence=(world.double(PEOPLE[2]),))
    assert not ledger.add_evidence(world.double(PEOPLE[2], height=2))
    assert set(ledger.pending_evidence) == {LIAR.public}
    forged = replace(world.double(PEOPLE[1]).first, signature=bytes(64))
    with pytest.raises(RemoteProtocolError, match="bad-signature"):
        ledger.add_evidence(Evidence(forged, forged))


def test_what_is_held_is_bounded_and_so_is_what_a_block_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(voters=12)
    monkeypatch.setattr(ledger_module, "PENDING_EVIDENCE_MAX", 5)
    monkeypatch.setattr(ledger_module, "EVIDENCE_PER_BLOCK_MAX", 2)
    assert [world.ledger.add_evidence(world.double(person)) for person in PEOPLE[:7]] == [True] * 5 + [False] * 2
    body = world.ledger.make_body(1, 0)
    assert body is not None and [item.signer for item in decode_body(body).evidence] == sorted(world.ledger.pending_evidence)[:2]
    world.decide_body(body)
    assert len(world.ledger.pending_evidence) == 3 and EVIDENCE_PER_BLOCK_MAX == 16


def test_a_leader_that_holds_evidence_against_everybody_makes_a_block_that_leaves_a_voter() -> None:
    world = World(voters=3)
    for person in PEOPLE[:3]:
        assert world.ledger.add_evidence(world.double(person))
    body = world.ledger.make_body(1, 0)
    assert body is not None and world.ledger.why_body_refused(1, body, b"") is None
    world.decide_body(body)
    assert len(decode_body(body).evidence) == 2 and world.ledger.pending_evidence == {}
    settle(world)
    assert len(world.state.members.voters) == 1


def test_the_leader_puts_no_transaction_of_whom_its_own_evidence_expels_into_the_block(world: World) -> None:
    world.ledger.mempool.add_transaction(world.tx(LIAR, "member/register", RegisterRoles(())))
    world.ledger.add_evidence(world.double(LIAR))
    body = world.ledger.make_body(1, 0)
    assert body is not None and world.ledger.why_body_refused(1, body, b"") is None and decode_body(body).transactions == ()


# Rotation -------------------------------------------------------------------------------------------------------------


def test_a_rotated_voter_is_a_member_by_its_new_key_at_once_and_votes_by_it_two_heights_later(world: World) -> None:
    old = PEOPLE[0]
    before = world.state.members.members[old.public]
    world.decide(world.rotation(old, KEY))
    state = world.state.members
    assert state.members[KEY.public] == replace(before, admitted=1, rotations=1)
    assert state.members[old.public].roles == () and state.current_key(old.public) == KEY.public
    assert old.public in state.voters and set(state.upcoming) == ({*state.voters} - {old.public}) | {KEY.public}
    world.decide()
    assert world.state.members.voters == state.upcoming
    settle(world)
    assert not members.is_voter_change_due(world.state.members)


def test_the_new_key_counts_its_transactions_anew_and_the_old_key_has_no_say_at_once(world: World) -> None:
    old = PEOPLE[0]
    spoken = [
        world.tx(old, "member/register", RegisterRoles(())),
        world.tx(old, "job/start", StartJob(SCRATCH)),
        world.rotation(old, NEW),
    ]
    invitation = world.admission(NEW, by=old)
    world.decide(world.rotation(old, KEY))
    for signed in spoken:
        assert "was replaced by a new key" in (world.problem(replace_nonce(world, signed)) or "")
    assert "is not a voter" in (world.problem(invitation) or "")
    assert world.problem(world.tx(KEY, "member/register", RegisterRoles(()))) is None
    settle(world)
    for signed in spoken:
        assert "was replaced by a new key" in (world.problem(replace_nonce(world, signed)) or "")
    assert "is not a voter" in (world.problem(invitation) or "")
    assert world.ledger.make_inclusion_list(old.public) is None
    assert world.problem(world.admission(NEW, by=KEY)) is None


def replace_nonce(world: World, signed: Signed) -> Signed:
    """The same with the nonce that would be next: only the key is stale."""
    transaction = world.rules.open_transaction(signed)
    return sign_message(BY_KEY[signed.signer], world.chain, replace(transaction, nonce=world.nonce(BY_KEY[signed.signer]) + 1))


def test_a_rotation_needs_the_signature_of_a_key_that_was_never_a_members(world: World) -> None:
    old = PEOPLE[0]
    stolen = RotateKey(KEY.public, NEW.sign(rotation_preimage(world.chain, old.public)))
    for_another = RotateKey(KEY.public, KEY.sign(rotation_preimage(world.chain, PEOPLE[1].public)))
    elsewhere = RotateKey(KEY.public, KEY.sign(rotation_preimage(bytes(32), old.public)))
    for rotate in (stolen, for_another, elsewhere):
        assert "bad-signature: rotation" in (world.problem(world.tx(old, "member/rotate", rotate)) or "")
    for taken in (old, PEOPLE[1]):
        assert "is or was the key of a member" in (world.problem(world.rotation(old, taken)) or "")
    world.decide(world.rotation(old, KEY))
    assert "is or was the key of a member" in (world.problem(world.rotation(PEOPLE[1], old)) or "")
    assert "was replaced by a new key" in (world.problem(world.admission(old)) or ""), "never admitted again"


def test_a_member_without_a_vote_rotates_at_once(world: World) -> None:
    world.decide(world.admission(NEW), world.tx(NEW, "member/register", RegisterRoles((TRAINER,)), ahead=2))
    world.decide(world.rotation(NEW, KEY))
    assert world.state.members.members[KEY.public].roles == (TRAINER,) and not members.is_voter_change_due(world.state.members)


def test_what_the_old_key_approved_or_stood_for_is_withdrawn_and_can_be_said_again(world: World) -> None:
    standing(world, NEW)
    world.decide(*(world.tx(PEOPLE[i], "member/approve", ApproveVoter(NEW.public)) for i in (0, 1)))
    world.decide(world.rotation(PEOPLE[0], KEY))
    assert world.state.members.candidates == {NEW.public: (PEOPLE[1].public,)}
    settle(world)
    world.decide(*(world.tx(person, "member/approve", ApproveVoter(NEW.public)) for person in (KEY, PEOPLE[2])))
    settle(world)
    assert NEW.public in world.state.members.voters
    standing(world, PEOPLE[7], KEY)
    world.decide(world.rotation(PEOPLE[7], FastSigner("another")))
    assert world.state.members.candidates == {}


def test_a_key_that_waits_for_its_vote_gets_no_second_one_and_does_not_rotate_again(world: World) -> None:
    keys = [FastSigner(f"new {i}") for i in range(4)]
    world.decide(*(world.rotation(PEOPLE[i], keys[i]) for i in range(4)))
    waiting = next(new for i, new in enumerate(keys) if PEOPLE[i].public in world.state.members.upcoming)
    stand = world.tx(waiting, "member/stand", StandAsVoter(0, world.state.certified_roots[0]))
    assert "is already a voter" in (world.problem(stand) or "")
    assert "waits for its vote" in (world.problem(world.rotation(waiting, KEY)) or "")
    settle(world)
    assert world.state.members.voters == tuple(sorted(new.public for new in keys))
    assert world.problem(world.rotation(waiting, KEY)) is None


def test_a_voter_that_leaves_does_not_rotate_meanwhile(world: World) -> None:
    world.decide(*(world.tx(person, "member/resign", ResignAsVoter()) for person in PEOPLE[:2]))
    assert "is resigning or waits" in (world.problem(world.rotation(PEOPLE[1], KEY)) or "")


def test_nobody_fills_the_table_of_members_by_rotating(world: World) -> None:
    world.decide(world.admission(NEW))
    keys = [NEW, *(FastSigner(f"rotated {i}") for i in range(ROTATIONS_MAX + 1))]
    for old, new in pairwise(keys[:-1]):
        world.decide(world.rotation(old, new))
    assert world.state.members.current_key(NEW.public) == keys[-2].public
    assert f"it has rotated {ROTATIONS_MAX} times, the maximum" in (world.problem(world.rotation(keys[-2], keys[-1])) or "")


def test_rounds_opened_after_a_rotation_know_the_new_key_alone(world: World) -> None:
    key = world.start(PEOPLE[1], LANGUAGE + b":9")
    old = PEOPLE[0]
    world.decide(world.rotation(old, KEY))
    assert old.public in world.job(key).trainers
    world.decide(closings=(world.closing(key),))
    job = world.job(key)
    for keys in (job.voters, job.trainers, job.reexecutors, job.awaited):
        assert KEY.public in keys and old.public not in keys
    assert old.public in world.state.members.previous
    assert "not-a-voter" in (world.problem(closings=(with_ballot(world, key, old),)) or "")


def with_ballot(world: World, key: bytes, voter: FastSigner) -> RoundCertificate:
    closing = world.closing(key)
    stale = world.ballot(key, voter.public, dict.fromkeys(world.job(key).trainers, ACCEPT))
    return replace(closing, ballots=tuple(sorted((*closing.ballots, stale), key=lambda signed: signed.signer)))


def test_a_round_opened_in_the_block_of_a_rotation_knows_the_new_key_though_the_old_one_still_decides(world: World) -> None:
    key = world.start(PEOPLE[1], LANGUAGE + b":9")
    world.decide(world.rotation(PEOPLE[0], KEY), closings=(world.closing(key),))
    assert PEOPLE[0].public in world.state.members.voters
    for keys in (world.job(key).voters, world.job(key).reexecutors, world.job(key).trainers):
        assert KEY.public in keys and PEOPLE[0].public not in keys


def test_a_job_follows_its_author_to_the_new_key(world: World) -> None:
    key = world.start(PEOPLE[2], SCRATCH + b":9")
    world.decide(world.rotation(PEOPLE[2], KEY))
    world.decide(closings=(world.closing(key),))
    assert world.job(key).trainers == (KEY.public,)
    world.decide(world.tx(KEY, "job/stop", StopJob(key)))
    assert world.job(key).phase is JobPhase.FINISHED


def test_evidence_against_an_old_key_that_still_votes_expels_its_member_and_a_retired_key_harms_nobody() -> None:
    during, after = World(), World()
    for world in (during, after):
        world.decide(world.rotation(PEOPLE[0], KEY))
    during.decide(evidence=(during.double(PEOPLE[0]),))
    assert not during.state.members.is_current_key(KEY.public) and during.state.members.members[KEY.public].expelled == 2
    settle(during)
    assert not {KEY.public, PEOPLE[0].public} & set(during.state.members.voters)
    settle(after)
    assert "is not the key of a member" in (after.problem(evidence=(after.double(PEOPLE[0]),)) or "")
    assert after.problem(evidence=(after.double(KEY),)) is None


def test_a_liar_does_not_escape_by_rotating_in_the_block_of_its_evidence_nor_by_its_new_key(world: World) -> None:
    rotation = world.rotation(LIAR, KEY)
    assert "is expelled" in (world.problem(rotation, evidence=(world.double(LIAR),)) or "")
    world.decide(rotation)
    world.decide(evidence=(world.double(KEY),))
    assert world.state.members.is_expelled(LIAR.public), "one member: the old key's vote goes too"
    settle(world)
    assert not {KEY.public, LIAR.public} & set(world.state.members.voters) and len(world.state.members.voters) == 3


# The queue ------------------------------------------------------------------------------------------------------------


def test_expulsions_come_before_rotations_before_leaves_before_joins_and_one_a_block_at_n_4(world: World) -> None:
    standing(world, NEW)
    world.decide(*(world.tx(PEOPLE[i], "member/approve", ApproveVoter(NEW.public)) for i in (0, 1)))
    last = world.tx(PEOPLE[2], "member/approve", ApproveVoter(NEW.public))
    leave = world.tx(PEOPLE[1], "member/resign", ResignAsVoter())
    sets = [set(world.state.members.upcoming)]
    world.decide(last, leave, world.rotation(PEOPLE[0], KEY), evidence=(world.double(LIAR),))
    sets.append(set(world.state.members.upcoming))
    while sets[-1] != sets[-2]:
        world.decide()
        sets.append(set(world.state.members.upcoming))
    steps = [(left - right, right - left) for left, right in pairwise(sets[:-1])]
    assert steps == [
        ({LIAR.public}, set()),
        ({PEOPLE[0].public}, {KEY.public}),
        ({PEOPLE[1].public}, set()),
        (set(), {NEW.public}),
    ]


def test_seven_voters_change_two_at_once() -> None:
    world = World(voters=7)
    world.decide(*(world.rotation(PEOPLE[i], FastSigner(f"new {i}")) for i in range(3)))
    assert len(set(world.state.members.upcoming) - set(world.state.members.voters)) == 2
    world.decide()
    assert len(set(world.state.members.upcoming) - set(world.state.members.previous)) == 3


steps = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["expel", "rotate", "leave", "stand", "approve", "admit"]), st.integers(0, 11)), max_size=6
    ),
    max_size=12,
)


@given(st.integers(1, 9), steps)
@settings(max_examples=60)
def test_sets_follow_at_h_plus_2_change_by_at_most_max_1_f_a_block_and_are_never_empty(
    founders: int, script: list[list[tuple[str, int]]]
) -> None:
    world = World(voters=founders)
    holders = list(PEOPLE)
    for block in [*script, *([[]] * 40)]:
        if not block and not members.is_voter_change_due(world.state.members):
            continue
        before = world.state.members
        act(world, holders, block)
        after = world.state.members
        assert (after.previous, after.voters) == (before.voters, before.upcoming), "decided in h, acts at h+2"
        most = max(1, faults_tolerated(len(before.upcoming)))
        gone, came = set(before.upcoming) - set(after.upcoming), set(after.upcoming) - set(before.upcoming)
        assert max(len(gone), len(came)) <= most and len(changes(after, gone, came)) <= most
        assert after.upcoming and after.round_voters and all(not after.is_expelled(key) for key in after.round_voters)
        assert all(key in after.members for key in after.upcoming)
        assert not any(after.is_expelled(key) for key in came), "nobody comes in who is expelled"
        people = [after.current_key(key) for key in after.upcoming]
        assert len(set(people)) == len(people), "one vote each"
    final = world.state.members
    assert not members.is_voter_change_due(final)
    assert all(final.is_current_key(key) for key in final.upcoming), "who was expelled or rotated away has had its turn"


def changes(state: members.MembersState, gone: set[bytes], came: set[bytes]) -> list[bytes]:
    """A rotation is one change: the key that came is of the member whose key went."""
    return [*gone, *(came - {state.current_key(key) for key in gone})]


def act(world: World, holders: list[FastSigner], block: list[tuple[str, int]]) -> None:
    """Decide one block with the valid ones among these steps, in their order."""
    evidence: dict[bytes, Evidence] = {}
    chosen: list[Signed] = []
    ahead: dict[bytes, int] = {}
    for action, number in block:
        person = holders[number]
        if action == "expel":
            trial = {**evidence, person.public: world.double(person, world.state.height)}
            if not chosen and world.problem(evidence=tuple(item for _, item in sorted(trial.items()))) is None:
                evidence = trial
            continue
        ahead[person.public] = nonce = ahead.get(person.public, 0) + 1
        signed = transaction(world, person, holders[(number * 5 + 1) % 12], action, nonce)
        if world.problem(*chosen, signed, evidence=tuple(item for _, item in sorted(evidence.items()))) is None:
            chosen.append(signed)
            if action == "rotate":
                holders[number] = new_key(person)
        else:
            ahead[person.public] -= 1
    world.decide(*chosen, evidence=tuple(item for _, item in sorted(evidence.items())))


def new_key(person: FastSigner) -> FastSigner:
    return FastSigner(f"after {person.public.hex()}")


def transaction(world: World, person: FastSigner, other: FastSigner, action: str, ahead: int) -> Signed:
    match action:
        case "rotate":
            return world.rotation(person, new_key(person), ahead)
        case "leave":
            return world.tx(person, "member/resign", ResignAsVoter(), ahead)
        case "stand":
            shown = max(world.state.height - 1, 0)
            return world.tx(person, "member/stand", StandAsVoter(shown, world.state.certified_roots.get(shown, bytes(32))), ahead)
        case "approve":
            return world.tx(person, "member/approve", ApproveVoter(other.public), ahead)
    return world.admission(person, token=FastSigner(f"token of {person.public.hex()}"))


def test_a_state_with_expelled_and_rotated_members_is_read_back(world: World) -> None:
    world.decide(world.rotation(PEOPLE[0], KEY), evidence=(world.double(LIAR),))
    state: LedgerState = world.read_back()
    assert state == world.state and state.state_root == world.state.state_root
