"""Vouching: the vouches that an accepted proposal needs, the voters that are asked for them, and the contents of a closing.

The proof: while at most f of a round's voters lie, an honest voter has re-executed each accepted proposal, or made it itself.
Liars accept everything; honest voters accept nothing false. The cases are all numbers of voters from 1 to 13, of re-executors,
and of liars among the trainer, the other re-executors and the other voters. Within such a group voters are alike.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from consensus.block import BODY_BYTES_MAX
from consensus.evidence import are_conflicting
from consensus.voter_set import faults_tolerated, quorum
from ledger.jobs import Job, JobPhase, JobsModule
from ledger.members import Member, MembersState
from protocol.codec import decode_message, encode
from protocol.errors import RemoteProtocolError
from protocol.identity import sign_message
from protocol.limits import BLOB_BYTES_MAX
from protocol.messages import CutOff, Judgement, Proposal, Vouch
from protocol.verdicts import Verdict
from rounds import vouch_set
from rounds.round_state import OpenRoundState, RoundResult, RoundTimeouts, compute_round_result, is_round_settled
from rounds.round_terms import RoundTerms, signed_body_digest
from rounds.vouch_set import VouchSet, reexecutor_order, vouches_needed
from tests.ledger.world import LANGUAGE, PlainJobs
from tests.rounds.building import (
    ACCEPT,
    CHAIN,
    JOB,
    KEYS,
    NORM,
    OPENED,
    REPLAY,
    ROOT,
    SIGNERS,
    TIMERS,
    UNJUDGED,
    ascending,
    ballot,
    book,
    digest,
    hear_ballot,
    hear_cut_off,
    hear_proposal,
    hear_vouch,
    judge_proposal,
    opened,
    problem,
    terms,
    vouch,
    vouched,
)
from tests.sim.keys import FastSigner

EVERYBODY = range(1, 14)
CUT = CutOff(JOB, 0, ())
LARGEST = Proposal(JOB, 0, ROOT, bytes(32), BLOB_BYTES_MAX, bytes(32), bytes(32))


# The proof --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A false proposal in a round that was opened once. `liars` vote, and the trainer is one of them if it votes."""

    terms: RoundTerms
    trainer: int
    liars: frozenset[int]


def cases(n: int) -> Iterator[Case]:
    f = faults_tolerated(n)
    for auditors in range(n + 1):
        # The trainer re-executes, only votes, or does neither.
        for trainer in {0 if auditors else None, n - 1 if auditors < n else None, n} - {None}:
            assert trainer is not None
            key = trainer if trainer < n else 12
            if trainer == n == 13:
                continue  # there is no fourteenth key
            of = replace(terms(n, auditors, trainers=13), trainers_to_vouch_for=frozenset(KEYS))
            reexecuting = [voter for voter in range(auditors) if voter != trainer]
            others = [voter for voter in range(auditors, n) if voter != trainer]
            for first, second in itertools.product(range(len(reexecuting) + 1), range(len(others) + 1)):
                if first + second + (trainer < n) <= f or (first + second == 0 and trainer < n):
                    yield Case(of, key, frozenset({*reexecuting[:first], *others[:second], *((trainer,) * (trainer < n))}))


def unsafe(case: Case, honest: Verdict) -> bool:
    """Return whether the false proposal is accepted if honest re-executors vouch `honest` and other voters follow the rules."""
    of, trainer = case.terms, case.trainer
    re_executing = [voter for voter in range(13) if KEYS[voter] in of.reexecutors]
    vouches = {voter: {trainer: ACCEPT if voter in case.liars else honest} for voter in re_executing}
    said = {KEYS[liar]: ballot({trainer: ACCEPT}) for liar in case.liars}
    for voter in range(len(of.voters)):
        if voter not in case.liars:
            mine = book(voter, of)
            hear_proposal(mine, trainer)
            mine.record_verdict(KEYS[trainer], ACCEPT, OPENED)  # the cheap checks find no fault
            for other, verdicts in vouches.items():
                hear_vouch(mine, other, vouch(verdicts))
            if voter in vouches:
                mine.record_replay_verdict(KEYS[trainer], honest, OPENED)
            said[KEYS[voter]] = mine.make_ballot_if_due(mine.cut_off_due_at) or ballot({})
    return bool(compute_round_result(of, said, vouched(of, vouches)).accepted)


def unsafe_cases(n: int) -> Iterator[Case]:
    return (case for case in cases(n) for honest in (REPLAY, UNJUDGED) if unsafe(case, honest))


@pytest.mark.parametrize("n", EVERYBODY)
def test_no_false_proposal_is_accepted_while_at_most_f_voters_lie(n: int) -> None:
    """A lone voter that trains cannot be checked. Its proposal is accepted, as nobody else votes."""
    assert [case for case in unsafe_cases(n) if len(case.liars) <= case.terms.faults] == []


def test_seven_voters_accept_nothing_false() -> None:
    assert list(unsafe_cases(7)) == []


def test_the_proof_finds_a_bound_that_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = vouches_needed
    monkeypatch.setattr(vouch_set, "vouches_needed", lambda of, trainer: max(0, needed(of, trainer) - 1))
    assert all(any(unsafe_cases(n)) for n in range(4, 14))


def test_the_proof_finds_f_where_the_trainer_does_not_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vouch_set, "vouches_needed", lambda of, trainer: of.faults)
    assert all(any(unsafe_cases(n)) for n in range(1, 13))


def test_the_proof_finds_trainers_that_vouch_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VouchSet, "add_vouch", _adds_everything)
    assert all(any(unsafe_cases(n)) for n in range(4, 14))


def _adds_everything(self: VouchSet, voter: bytes, said: Vouch) -> None:
    for judgement in said.judgements:
        self.verdicts.setdefault((judgement.trainer, judgement.proposal), {}).setdefault(voter, judgement.verdict)


def _adds_all_but_the_same_key(self: VouchSet, voter: bytes, said: Vouch) -> None:
    others = tuple(judgement for judgement in said.judgements if judgement.trainer != voter)
    _adds_everything(self, voter, replace(said, judgements=others))


# Renewed rounds -----------------------------------------------------------------------------------------------------------
#
# The first members of a network of n voters open a round, and a later block renews it. Until then each of them stays, leaves the
# voters, rotates its key, or is expelled, and some others join. Every liar has signed vouches with each key that it ever had.

FATES = ("stays", "leaves", "rotates", "is expelled")
SIGNERS_AFTER = tuple(FastSigner(f"after {number}") for number in range(13))
RENEWED_MAX = 7  # first voters


@dataclasses.dataclass(frozen=True)
class Renewal:
    """The fates of the trainer and of the others, the number of other liars by fate, and the number of joining peers, which may
    lie, too."""

    trainer: str
    others: tuple[int, int, int, int]
    lying: tuple[int, int, int, int]
    joining: int
    lying_joining: int


def renewals(n: int) -> Iterator[Renewal]:
    for trainer, joining in itertools.product(FATES, range(3)):
        for others in itertools.product(range(n), repeat=4):
            is_empty = trainer in ("leaves", "is expelled") and not others[0] and not others[2] and not joining
            if sum(others) != n - 1 or is_empty:
                continue  # the last voter neither leaves nor is expelled
            for lying in itertools.product(*(range(count + 1) for count in others)):
                for lying_joining in range(joining + 1):
                    yield Renewal(trainer, others, lying, joining, lying_joining)


def renewed_terms(case: Renewal) -> tuple[RoundTerms, set[bytes], bytes, bytes]:
    """Return the terms of the renewed round, all keys of liars, the trainer's first key, and its present key."""
    fates = [case.trainer, *(fate for fate, count in zip(FATES, case.others, strict=True) for _ in range(count))]
    first, joining = KEYS[: len(fates)], KEYS[len(fates) : len(fates) + case.joining]
    members = {key: Member(f"m{at}", ("trainer",), 0, None, 0) for at, key in enumerate((*first, *joining))}
    now, liars, left = list(joining), {first[0], *joining[: case.lying_joining]}, dict(zip(FATES, case.lying, strict=True))
    present = {}
    for at, (key, fate) in enumerate(zip(first, fates, strict=True)):
        present[key] = SIGNERS_AFTER[at].public if fate == "rotates" else key
        if at and left[fate]:
            left[fate] -= 1
            liars |= {key, present[key]}
        if fate == "rotates":
            members[key] = replace(members[key], successor=present[key])
            members[present[key]] = Member(f"m{at}", ("trainer",), 0, None, 0, rotations=1)
        if fate == "is expelled":
            members[key] = replace(members[key], expelled=5)
        if fate in ("stays", "rotates"):
            now.append(present[key])
    state = MembersState(members, *((tuple(sorted(now)),) * 3))
    opened = Job(LANGUAGE, "job", first[0], 1, 9, JobPhase.RUNNING, 0, 1, ROOT, True, *((tuple(sorted(first)),) * 4))
    job = JobsModule(PlainJobs())._renewed(opened, state, 9, {})
    return job.round_terms(JOB), liars | {present[first[0]]}, first[0], present[first[0]]


def is_fooled(case: Renewal) -> bool:
    """Return whether vouches of at most f liars in the renewed round suffice for a false proposal of a key of the trainer."""
    of, liars, *keys = renewed_terms(case)
    if len(liars & of.voters) > of.faults:
        return False
    signed = sorted(liars & of.reexecutors)
    false = b"p" * 32
    return any(
        VouchSet.from_vouches(
            of, [(liar, Vouch(JOB, 0, (Judgement(key, false, ACCEPT),))) for liar in signed]
        ).has_enough_vouches(key, false)
        for key in keys
        if key in of.trainers
    )


def fooled(*founders: int) -> Iterator[Renewal]:
    """Yield the cases of so many first voters in which a false proposal is accepted."""
    return (case for n in founders for case in renewals(n) if is_fooled(case))


def test_no_false_proposal_is_accepted_in_a_renewed_round_of_at_most_six() -> None:
    assert list(fooled(*range(1, RENEWED_MAX))) == []


def test_no_false_proposal_is_accepted_in_a_renewed_round_of_seven() -> None:
    assert list(fooled(RENEWED_MAX)) == []


def test_the_proof_finds_a_trainer_that_vouches_for_itself_under_a_new_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VouchSet, "add_vouch", _adds_all_but_the_same_key)
    assert any(case.trainer == "rotates" for case in fooled(*range(1, 6)))


def test_the_proof_finds_a_bound_of_the_opening_in_a_renewed_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer voted when the round was opened and votes no more, so that f liars are left besides it."""
    monkeypatch.setattr(vouch_set, "vouches_needed", lambda of, trainer: max(1, of.faults))
    assert any(case.trainer in ("leaves", "is expelled") for case in fooled(*range(1, RENEWED_MAX)))


def test_the_proof_finds_vouches_of_former_voters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A liar that rotated could vouch with two keys."""
    of, liars, trainer, _ = renewed_terms(Renewal("stays", (3, 0, 3, 0), (0, 0, 1, 0), 0, 0))
    former = sorted(liars - of.voters)
    assert len(former) == 1 and len(liars & of.voters) == of.faults == 2
    with pytest.raises(RemoteProtocolError, match="not-a-voter"):
        vouch_set.check_vouch(of, former[0], Vouch(JOB, 0, (Judgement(trainer, bytes(32), ACCEPT),)))
    said = [(key, Vouch(JOB, 0, (Judgement(trainer, bytes(32), ACCEPT),))) for key in sorted(liars)]
    assert VouchSet.from_vouches(of, said).has_enough_vouches(trainer, bytes(32)), "with the check left out it would be accepted"


# Order of requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", EVERYBODY)
def test_each_re_executor_is_called_for_as_many_trainers_as_the_others(n: int) -> None:
    for number in (0, 7, 8, 16, 800):
        of = replace(terms(n, n, trainers=n), round=number)
        load = Counter(voter for trainer in of.trainers for voter in reexecutor_order(of, trainer)[: vouches_needed(of, trainer)])
        assert set(load.values()) <= {vouches_needed(of, KEYS[0])}


def test_the_order_of_calls_stays_for_eight_rounds_and_nobody_is_before_itself() -> None:
    of = terms(7, 7, trainers=7)
    orders = [tuple(reexecutor_order(replace(of, round=number), KEYS[0])) for number in range(24)]
    assert [len(set(orders[at : at + 8])) for at in (0, 8, 16)] == [1, 1, 1] and len(set(orders)) == 3
    assert all(KEYS[0] not in order and len(order) == 6 for order in orders)


@pytest.mark.parametrize(
    "n, auditors, trainer, needed",
    [
        (1, 1, 0, 0),
        (1, 1, 5, 1),
        (2, 1, 0, 0),
        (2, 1, 1, 1),
        (2, 2, 0, 1),
        (3, 3, 0, 1),
        (4, 3, 0, 1),
        (4, 4, 5, 2),
        (13, 9, 0, 4),
    ],
)
def test_so_many_vouches_are_needed(n: int, auditors: int, trainer: int, needed: int) -> None:
    assert (
        vouches_needed(replace(terms(n, auditors, trainers=13), trainers_to_vouch_for=frozenset(KEYS)), KEYS[trainer]) == needed
    )


def test_in_a_round_without_re_execution_nobody_vouches() -> None:
    assert vouches_needed(terms(), KEYS[0]) == 0 and not reexecutor_order(terms(), KEYS[0])
    with pytest.raises(RemoteProtocolError, match="not-a-voter"):
        hear_vouch(book(0, terms()), 1, vouch({0: ACCEPT}))


def test_silent_re_executors_are_called_last_and_suspended_ones_not_at_all_while_enough_are_left() -> None:
    of = terms(7, 7, trainers=7)
    first, second, *rest = reexecutor_order(of, KEYS[0])
    assert reexecutor_order(replace(of, called_last=frozenset({first})), KEYS[0]) == (second, *rest, first)
    assert reexecutor_order(replace(of, suspended=frozenset({first, second})), KEYS[0]) == tuple(rest)
    assert reexecutor_order(replace(of, suspended=frozenset({first, second, rest[0]})), KEYS[0])[-3:] == (first, second, rest[0])


LIES: Mapping[str, Callable[[bool], Verdict | None]] = {
    "accepts all": lambda honest: ACCEPT,
    "rejects all": lambda honest: REPLAY,
    "is unsure": lambda honest: UNJUDGED,
    "is silent": lambda honest: None,
}


def asked(of: RoundTerms, trainer: int, is_honest: bool, lies: Mapping[bytes, str]) -> tuple[VouchSet, set[bytes]]:
    """Return the vouches and the asked voters at the end. All of them answer in turn, until it is late."""
    made, key, proposal, is_late = VouchSet(of), KEYS[trainer], digest(trainer), False
    answered = set[bytes]()
    while True:
        called = [] if made.is_settled(key, proposal) else made.assigned_reexecutors(key, proposal, is_late)
        new = [voter for voter in called if voter not in answered]
        if not new and is_late:
            return made, answered
        is_late = not new
        for voter in new:
            answered.add(voter)
            verdict = LIES[lies[voter]](is_honest) if voter in lies else ACCEPT if is_honest else REPLAY
            if verdict is not None:
                made.add_vouch(voter, Vouch(JOB, 0, (Judgement(key, proposal, verdict),)))


def liars_of(of: RoundTerms, trainer: int, is_honest: bool) -> Iterator[dict[bytes, str]]:
    """Yield all places of liars in the ring, which do the same or two things in turn. A false proposal's trainer is a liar."""
    ring = reexecutor_order(of, KEYS[trainer])
    most = max(0, of.faults - (not is_honest and KEYS[trainer] in of.voters))
    for places in itertools.combinations(range(len(ring)), min(most, len(ring))):
        for kinds in itertools.product(LIES, repeat=2):
            yield {ring[place]: kinds[at % 2] for at, place in enumerate(places)}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_two_f_plus_one_re_executors_decide_whatever_f_liars_do(n: int) -> None:
    """Honest work gets its vouches, and more than f voters reject a false proposal."""
    f = faults_tolerated(n)
    for auditors, trainer in itertools.product(range(2 * f + 1, n + 1), (0, 12)):
        of = terms(n, auditors, trainers=13)
        if trainer and not auditors:
            continue
        for lies in liars_of(of, trainer, is_honest=True):
            made, answered = asked(of, trainer, True, lies)
            assert made.has_enough_vouches(KEYS[trainer], digest(trainer)), (auditors, trainer, lies)
            assert len(answered - lies.keys()) <= max(1, 2 * f + (trainer == 12)), "at most f more than without liars"
        for lies in liars_of(of, trainer, is_honest=False):
            made, _ = asked(of, trainer, False, lies)
            needed = vouches_needed(of, KEYS[trainer])
            assert not needed or made.rejection_reason(KEYS[trainer], digest(trainer)) is not None, (auditors, trainer, lies)


@pytest.mark.parametrize("n", EVERYBODY)
def test_n_minus_q_silent_voters_do_not_keep_a_proposal_from_its_vouches(n: int) -> None:
    """With three voters one may be absent, though f is 0, if there are k + n − q re-executors besides the trainer."""
    for auditors in range(1, n + 1):
        of = terms(n, auditors, trainers=1)
        ring = reexecutor_order(of, KEYS[0])
        if len(ring) < vouches_needed(of, KEYS[0]) + of.spare_voters:
            continue
        for down in itertools.combinations(ring, of.spare_voters):
            made, _ = asked(of, 0, True, dict.fromkeys(down, "is silent"))
            assert made.has_enough_vouches(KEYS[0], digest(0)), (auditors, down)


def test_without_liars_only_k_are_asked() -> None:
    for n in EVERYBODY:
        _, answered = asked(terms(n, n, trainers=13), 0, True, {})
        assert len(answered) == vouches_needed(terms(n, n, trainers=13), KEYS[0])


# Time of re-execution ------------------------------------------------------------------------------------------------------

SLOW = RoundTimeouts(60.0, 40.0, vouch_usual_seconds=5.0)


def ring_of(of: RoundTerms, trainer: int = 0) -> list[int]:
    return [KEYS.index(voter) for voter in reexecutor_order(of, KEYS[trainer])]


def checked(me: int, of: RoundTerms, verdict: Verdict = ACCEPT) -> OpenRoundState:
    """Return the open round of a voter that has checked proposal 0."""
    mine = book(me, of, SLOW)
    judge_proposal(mine, 0, verdict)
    mine.assign_reexecutions(OPENED)
    return mine


@pytest.fixture
def of() -> RoundTerms:
    return terms(4, 4, trainers=1)


def test_the_first_begin_at_once_and_others_when_vouches_are_late(of: RoundTerms) -> None:
    first, second, third = ring_of(of)
    assert KEYS[0] in checked(first, of).vouching.assigned_at
    backup = checked(second, of)
    assert not backup.vouching.assigned_at and backup.next_deadline(backup.proposals_due_at) == OPENED + 10.0
    backup.assign_reexecutions(OPENED + 9.9)
    assert not backup.vouching.assigned_at
    backup.assign_reexecutions(OPENED + 10.0)
    assert backup.vouching.assigned_at == {KEYS[0]: OPENED + 10.0}
    last = checked(third, of)
    last.assign_reexecutions(OPENED + 1e6)
    assert not last.vouching.assigned_at


@pytest.mark.parametrize("verdict", [REPLAY, UNJUDGED])
def test_one_more_begins_for_each_vouch_that_does_not_accept(verdict: Verdict) -> None:
    of = terms(7, 7, trainers=1)
    first, _, third, fourth, *_ = ring_of(of)
    mine = checked(third, of)
    hear_vouch(mine, fourth, vouch({0: verdict}))
    mine.assign_reexecutions(OPENED)
    assert not mine.vouching.assigned_at, "only those that are called count"
    hear_vouch(mine, first, vouch({0: verdict}))
    mine.assign_reexecutions(OPENED)
    assert mine.vouching.assigned_at


def test_nobody_begins_when_more_than_f_reject_it(of: RoundTerms) -> None:
    first, second, third = ring_of(of)
    mine = checked(second, of)
    for voter in (first, third):
        hear_vouch(mine, voter, vouch({0: REPLAY}))
    mine.assign_reexecutions(OPENED + 1e6)
    assert not mine.vouching.assigned_at


def test_as_many_as_reject_a_proposal_begin_at_once_if_the_last_one_was_not_accepted() -> None:
    """Otherwise each round with the same liar would take one re-execution after another."""
    of = replace(terms(4, 4, trainers=2), awaited=frozenset({KEYS[1]}))
    called = [voter for voter in range(1, 4) if KEYS[0] in checked(voter, of).vouching.assigned_at]
    assert len(called) == 2 and VouchSet(of).first_assigned(KEYS[1]) == reexecutor_order(of, KEYS[1])[:1]
    assert vouches_needed(of, KEYS[0]) == 1


def test_nobody_begins_when_there_are_enough_vouches(of: RoundTerms) -> None:
    first, _, third = ring_of(of)
    mine = book(first, of, SLOW)
    hear_vouch(mine, third, vouch({0: ACCEPT}))
    judge_proposal(mine, 0, ACCEPT)
    mine.assign_reexecutions(OPENED + 100)
    assert not mine.vouching.assigned_at and mine.make_ballot_if_due(OPENED) == ballot({0: ACCEPT})


def test_a_re_executor_goes_on_after_its_ballot(of: RoundTerms) -> None:
    first, _, third = ring_of(of)
    mine = checked(first, of)
    hear_vouch(mine, third, vouch({0: ACCEPT}))
    due = mine.make_ballot_if_due(OPENED)
    assert due is not None
    hear_ballot(mine, first, due)
    mine.record_replay_verdict(KEYS[0], ACCEPT, OPENED + 1)
    assert mine.vouching.make_vouch_if_due() == vouch({0: ACCEPT})


def test_what_a_cheap_check_refuses_is_vouched_for_without_re_execution(of: RoundTerms) -> None:
    assert checked(ring_of(of)[0], of, NORM).vouching.make_vouch_if_due() == vouch({0: NORM})


def test_what_does_not_arrive_in_time_makes_unsure_for_good(of: RoundTerms) -> None:
    mine = checked(ring_of(of)[0], of)
    given_up = OPENED + 10.0
    assert mine.next_deadline(mine.proposals_due_at) == given_up
    mine.assign_reexecutions(given_up - 0.1)
    assert mine.vouching.make_vouch_if_due() is None
    mine.assign_reexecutions(given_up)
    said = mine.vouching.make_vouch_if_due()
    assert said == vouch({0: UNJUDGED})
    hear_vouch(mine, ring_of(of)[0], said)
    mine.record_replay_verdict(KEYS[0], ACCEPT, given_up + 1)
    assert mine.vouching.make_vouch_if_due() is None and mine.vouching.own_judgements[KEYS[0]].verdict is UNJUDGED, (
        "a second one is evidence"
    )


def test_what_has_begun_is_not_given_up(of: RoundTerms) -> None:
    mine = checked(ring_of(of)[0], of)
    mine.vouching.started.add(KEYS[0])
    mine.assign_reexecutions(OPENED + 1e6)
    assert mine.vouching.make_vouch_if_due() is None


def test_a_vouch_waits_while_others_are_computed_until_it_doubles_what_was_said() -> None:
    of = terms(13, 13, trainers=13)
    me = 0
    mine = book(me, of, SLOW)
    trainers = [trainer for trainer in range(13) if me in ring_of(of, trainer)[:4]]
    for trainer in trainers:
        judge_proposal(mine, trainer, ACCEPT)
    mine.assign_reexecutions(OPENED)
    mine.vouching.started |= mine.vouching.assigned_at.keys()
    sizes = []
    for trainer in trainers:
        mine.record_replay_verdict(KEYS[trainer], ACCEPT, OPENED)
        if (due := mine.vouching.make_vouch_if_due()) is not None:
            sizes.append(len(due.judgements))
            hear_vouch(mine, me, due)
    assert len(trainers) == 4 and sizes == [1, 1, 2]


def test_a_voter_that_re_executes_no_more_after_a_renewal_says_nothing_of_what_it_found(of: RoundTerms) -> None:
    me = ring_of(of)[0]
    before = checked(me, of)
    before.record_replay_verdict(KEYS[0], ACCEPT, OPENED)
    for auditors, says in ((of.reexecutors, vouch({0: ACCEPT})), (of.reexecutors - {KEYS[me]}, None)):
        after = book(me, replace(of, reexecutors=auditors), SLOW)
        after.import_from(before)
        assert after.vouching.make_vouch_if_due() == says


# A voter's use of vouches ---------------------------------------------------------------------------------------------------


def light(vouches: Mapping[int, Verdict], n: int = 7) -> Verdict | None:
    """Return the verdict of a voter without a worker on proposal 0, which passed its own checks."""
    mine = book(n - 1, terms(n, n - 1, trainers=1))
    judge_proposal(mine, 0, ACCEPT)
    for voter, verdict in vouches.items():
        hear_vouch(mine, voter, vouch({0: verdict}))
    return mine.current_verdict(KEYS[0])


def test_a_voter_accepts_with_k_vouches_and_rejects_with_more_than_f_rejections() -> None:
    assert light({1: ACCEPT}) is None and light({1: ACCEPT, 2: ACCEPT}) is ACCEPT
    assert light({0: ACCEPT, 1: ACCEPT}) is None, "nobody vouches for itself"
    assert light({1: REPLAY, 2: REPLAY}) is None and light({1: REPLAY, 2: NORM, 3: REPLAY}) is REPLAY
    assert light({1: REPLAY, 2: REPLAY, 3: UNJUDGED}) is None, "an unsure one rejects nothing"
    assert light({1: REPLAY, 2: REPLAY, 3: ACCEPT, 4: ACCEPT}) is ACCEPT, "f rejections never block"


def test_vouches_for_another_proposal_of_the_same_trainer_do_not_count() -> None:
    mine = book(6, terms(7, 6, trainers=1))
    judge_proposal(mine, 0, ACCEPT)
    for voter in (1, 2, 3):
        hear_vouch(mine, voter, vouch({0: ACCEPT}, {0: 1}))
    assert mine.current_verdict(KEYS[0]) is None


def test_our_own_rejection_stands_whoever_vouches(of: RoundTerms) -> None:
    mine = checked(ring_of(of)[0], of)
    mine.record_replay_verdict(KEYS[0], REPLAY, OPENED)
    for voter in ring_of(of)[1:]:
        hear_vouch(mine, voter, vouch({0: ACCEPT}))
    assert mine.current_verdict(KEYS[0]) is REPLAY


def test_our_own_re_execution_is_enough_for_our_ballot_and_an_unsure_one_is_not() -> None:
    of = terms(7, 7, trainers=1)
    for verdict, expected in ((ACCEPT, ACCEPT), (UNJUDGED, None)):
        mine = checked(ring_of(of)[0], of)
        mine.record_replay_verdict(KEYS[0], verdict, OPENED)
        assert mine.current_verdict(KEYS[0]) is expected


def test_a_proposal_that_nobody_can_judge_any_more_is_not_named() -> None:
    """It costs a round only the time of its vouches, and gives no later round more time."""
    mine = book(1, terms(4, 4, trainers=2))
    for trainer in (0, 1):
        judge_proposal(mine, trainer, ACCEPT)
    hear_vouch(mine, 2, vouch({0: UNJUDGED, 1: ACCEPT}))
    assert mine.trainers_in_ballot == {KEYS[0], KEYS[1]}
    hear_vouch(mine, 3, vouch({0: UNJUDGED}))
    assert mine.trainers_in_ballot == {KEYS[1]}, "more than f are unsure"
    mine.record_verdict(KEYS[0], NORM, OPENED)
    assert mine.trainers_in_ballot == {KEYS[0], KEYS[1]}, "our own checks say why"


def test_a_proposal_that_nobody_can_judge_is_named_if_there_is_no_other() -> None:
    """Otherwise no ballot would be cast, and the round would never be closed."""
    five = frozenset(KEYS[:5])
    mine = book(3, replace(terms(4, 2, trainers=1), trainers=five, trainers_to_vouch_for=five))
    judge_proposal(mine, 4, ACCEPT)
    hear_vouch(mine, 0, vouch({4: ACCEPT}))
    assert mine.trainers_in_ballot == {KEYS[4]} and mine.current_verdict(KEYS[4]) is None
    hear_vouch(mine, 1, vouch({4: REPLAY}))
    assert mine.trainers_in_ballot == {KEYS[4]}, "there is no other"
    assert mine.make_ballot_if_due(mine.proposals_due_at) == ballot({4: UNJUDGED}), "further vouches cannot help"


# Evidence -------------------------------------------------------------------------------------------------------------------


def test_a_second_different_verdict_on_a_trainer_is_evidence_once_and_the_first_counts() -> None:
    mine = book(0, terms(4, 4, trainers=3))
    first, second = vouch({1: ACCEPT}), vouch({1: REPLAY, 2: ACCEPT})
    assert hear_vouch(mine, 3, first) is None and hear_vouch(mine, 3, first) is None
    pair = hear_vouch(mine, 3, second)
    assert pair is not None and [signed.body for signed in pair] == [encode(first), encode(second)]
    assert hear_vouch(mine, 3, second) is None and mine.vouching.vouches.has_enough_vouches(KEYS[1], digest(1))


@pytest.mark.parametrize(
    "first, second, is_evidence",
    [
        (vouch({0: ACCEPT}), vouch({0: REPLAY}), True),
        (vouch({0: UNJUDGED}), vouch({0: ACCEPT}), True),
        (vouch({0: ACCEPT}), vouch({0: ACCEPT}, {0: 1}), True),
        (vouch({0: ACCEPT, 1: REPLAY}), vouch({1: ACCEPT, 2: ACCEPT}), True),
        (vouch({0: ACCEPT}), vouch({1: REPLAY}), False),
        (vouch({0: ACCEPT}), vouch({0: ACCEPT, 1: REPLAY}), True),
        (vouch({0: ACCEPT}), vouch({0: ACCEPT}), False),
        (vouch({0: ACCEPT}), replace(vouch({0: REPLAY}), round=1), False),
    ],
)
def test_two_vouches_prove_a_lie_if_they_differ_and_name_one_trainer_of_a_round(
    first: Vouch, second: Vouch, is_evidence: bool
) -> None:
    assert are_conflicting(first, second) == are_conflicting(second, first) == is_evidence


@pytest.mark.parametrize(
    "reason, said",
    [
        ("wrong-round", replace(vouch({0: ACCEPT}), round=1)),
        ("wrong-round", replace(vouch({0: ACCEPT}), job=b"k" * 32)),
        ("not-a-trainer", vouch({5: ACCEPT})),
        ("non-canonical", Vouch(JOB, 0, vouch({0: ACCEPT, 1: ACCEPT}).judgements[::-1])),
    ],
)
def test_a_vouch_that_does_not_belong_is_refused(reason: str, said: Vouch) -> None:
    mine = book(0, terms(4, 3))
    with pytest.raises(RemoteProtocolError, match=reason):
        hear_vouch(mine, 1, said)
    assert not mine.vouching.signed


# Closings -------------------------------------------------------------------------------------------------------------------


def voted(
    of: RoundTerms, ballots: Mapping[int, Mapping[int, Verdict]], vouches: Mapping[int, Mapping[int, Verdict]]
) -> OpenRoundState:
    mine = book(0, of)
    for trainer in range(3):
        hear_proposal(mine, trainer)
    for voter, verdicts in vouches.items():
        hear_vouch(mine, voter, vouch(verdicts))
    for voter, verdicts in ballots.items():
        hear_ballot(mine, voter, ballot(verdicts))
    return mine


ACCEPTS = {voter: {0: ACCEPT} for voter in range(3)}


def test_a_closing_carries_the_vouches_and_needs_no_ballot_of_those_that_vouch() -> None:
    of = terms(4, 4)
    closing = voted(of, ACCEPTS, {3: {0: ACCEPT}}).certificate()
    assert closing is not None and problem(of, closing) is None and not closing.cut_offs
    assert {signed.signer for signed in closing.vouches} == {KEYS[3]} and KEYS[3] not in {s.signer for s in closing.ballots}
    assert [signed.signer for signed in closing.proposals] == [KEYS[0]]


def test_a_closing_carries_the_vouches_of_an_update_that_gives_way_to_a_later_key() -> None:
    """Otherwise that proposal would not be settled, and the round would never be closed."""
    of = replace(terms(4, 4), successors=frozenset({(KEYS[0], KEYS[1])}))
    closing = voted(of, {voter: {0: ACCEPT, 1: ACCEPT} for voter in range(4)}, {2: {0: ACCEPT}, 3: {1: ACCEPT}}).certificate()
    assert closing is not None and problem(of, closing) is None
    assert [signed.signer for signed in closing.proposals] == [KEYS[1]] and len(closing.vouches) == 2


def test_accepts_without_vouches_are_not_settled_and_need_cut_offs() -> None:
    of = terms(4, 4)
    mine = voted(of, ACCEPTS, {3: {0: REPLAY}})
    assert not is_round_settled(of, mine.ballots, mine.vouching.vouches) and mine.certificate() is None
    for voter in (0, 1):
        hear_cut_off(mine, voter)
    closing = mine.certificate()
    assert closing is not None and problem(of, closing) is None and not closing.proposals


def test_a_closing_without_the_vouches_is_invalid() -> None:
    of = terms(4, 4)
    closing = voted(of, ACCEPTS, {3: {0: ACCEPT}}).certificate()
    assert closing is not None
    assert "not settled" in (problem(of, replace(closing, vouches=())) or "")
    cut = ascending([sign_message(SIGNERS[voter], CHAIN, cut_off) for voter, cut_off in ((0, CUT), (1, CUT))])
    assert "exactly the accepted" in (problem(of, replace(closing, vouches=(), cut_offs=cut)) or "")
    assert problem(of, replace(closing, vouches=(), cut_offs=cut, proposals=())) is None
    assert "without duplicates" in (problem(of, replace(closing, vouches=closing.vouches * 2)) or "")
    with pytest.raises(RemoteProtocolError, match="not-a-voter"):
        problem(of, replace(closing, vouches=ascending([*closing.vouches, sign_message(SIGNERS[9], CHAIN, vouch({0: ACCEPT}))])))


def test_a_voter_prepares_no_block_that_leaves_out_what_it_knows_to_be_accepted() -> None:
    of = terms(4, 4)
    poor, mine = voted(of, ACCEPTS, {}), voted(of, ACCEPTS, {3: {0: ACCEPT}})
    for voter in (1, 2):
        hear_cut_off(poor, voter)
    closing = poor.certificate()
    assert closing is not None and problem(of, closing) is None
    assert poor.why_certificate_refused(closing) is None and "omits 1 proposals" in (mine.why_certificate_refused(closing) or "")


def test_voters_that_contradict_themselves_do_not_make_us_refuse_blocks() -> None:
    of = terms(4, 4)
    poor, mine = voted(of, ACCEPTS, {3: {0: REPLAY}}), voted(of, ACCEPTS, {3: {0: ACCEPT}})
    for voter in (1, 2):
        hear_cut_off(poor, voter)
    closing = poor.certificate()
    assert hear_vouch(mine, 3, vouch({0: REPLAY})) is not None
    assert closing is not None and mine.why_certificate_refused(closing) is None


def test_a_closing_carries_an_unsure_vouch_of_a_voter_that_was_called_at_once() -> None:
    of = terms(4, 4)
    first, second, _ = ring_of(of)
    closing = voted(of, ACCEPTS, {first: {0: UNJUDGED}, second: {0: ACCEPT}}).certificate()
    assert closing is not None and problem(of, closing) is None
    assert {signed.signer for signed in closing.vouches} == {KEYS[first], KEYS[second]}
    assert not compute_round_result(
        of, {KEYS[v]: ballot(said) for v, said in ACCEPTS.items()}, vouched(of, {first: {0: UNJUDGED}, second: {0: ACCEPT}})
    ).silent_reexecutors


def test_a_closing_carries_no_more_vouches_than_it_needs() -> None:
    of = terms(7, 7)
    accepts = {voter: {0: ACCEPT, 1: REPLAY} for voter in range(5)}
    vouches = {voter: {0: ACCEPT, 1: REPLAY} for voter in range(2, 7)}
    closing = voted(of, accepts, {**vouches, 1: {0: REPLAY}}).certificate()
    assert closing is not None and problem(of, closing) is None
    carried = Counter(signed.signer for signed in closing.vouches)
    assert len(carried) <= 2 + 3 + 1 and carried[KEYS[1]] == 1, "k that accept, f + 1 that reject"


def test_the_outcome_says_who_vouched_who_did_so_falsely_and_who_was_silent() -> None:
    of = terms(4, 4)
    first, second, third = ring_of(of)
    votes = {KEYS[voter]: ballot({0: ACCEPT, 1: REPLAY}) for voter in range(4)}
    against = ring_of(of, 1)

    def told(said: Mapping[int, Mapping[int, Verdict]]) -> RoundResult:
        return compute_round_result(of, votes, vouched(of, said))

    result = told({second: {0: ACCEPT}, third: {0: REPLAY}})
    assert result.vouchers == {KEYS[0]: (KEYS[second],)}
    assert (result.wrong_vouchers, result.silent_reexecutors) == ({KEYS[third]}, {KEYS[first]})
    unsure = told({first: {0: UNJUDGED}, second: {0: ACCEPT}})
    assert (unsure.wrong_vouchers, unsure.silent_reexecutors) == (frozenset(), frozenset())
    liar, *honest = against
    refused = told({liar: {1: ACCEPT}, **{voter: {1: REPLAY} for voter in honest}})
    assert KEYS[liar] in refused.wrong_vouchers and not refused.accepted
    assert not told({liar: {1: ACCEPT}, honest[0]: {1: REPLAY}}).wrong_vouchers, "f that reject prove nothing"


@pytest.mark.parametrize("n", [3, 4, 7])
def test_an_update_is_false_if_more_than_f_voters_and_at_least_two_find_it_so_by_re_execution(n: int) -> None:
    of = terms(n, n)
    needed = max(1, of.faults) + 1
    ring = ring_of(of)

    def false(verdicts: Sequence[Verdict], accepted: Mapping[bytes, bytes] | None = None) -> set[bytes]:
        said = {voter: {0: verdict} for voter, verdict in zip(ring, verdicts, strict=False)}
        return set(vouched(of, said).trainers_with_invalid_updates(accepted or {}))

    assert false([REPLAY] * needed) == {KEYS[0]} == false([Verdict.OWN_0] * needed)
    assert not false([REPLAY] * (needed - 1)), "one broken machine, or liars alone"
    assert not false([REPLAY] * (needed - 1) + [NORM]), "an honest voter refused its norm, and liars say it is false"
    assert not false([NORM] * needed)
    assert not false([REPLAY] * needed, {KEYS[0]: digest(0)}), "it was accepted all the same"


def test_a_closing_carries_the_rejections_by_re_execution_first() -> None:
    """Otherwise a liar that gives another reason would shield its accomplice."""
    of = terms(4, 4)
    first, second, third = ring_of(of, 1)
    rejects = {voter: {1: REPLAY} for voter in range(4)}
    closing = voted(of, rejects, {first: {1: NORM}, second: {1: REPLAY}, third: {1: REPLAY}}).certificate()
    assert closing is not None
    said = VouchSet.from_vouches(of, [(signed.signer, decode_message(signed.body, (Vouch,))) for signed in closing.vouches])
    assert said.trainers_with_invalid_updates({}) == {KEYS[1]}


def test_a_vouch_that_repeats_a_trainer_is_evidence_and_fills_no_block() -> None:
    """One, two, three … trainers: each vouch would be new, and a closing would have to carry all of them."""
    mine = book(0, terms(4, 4, trainers=3))
    assert hear_vouch(mine, 1, vouch({0: REPLAY})) is None
    pair = hear_vouch(mine, 1, vouch({0: REPLAY, 2: REPLAY}))
    assert pair is not None and len(mine.vouching.signed) == 1
    assert hear_vouch(mine, 1, vouch({0: REPLAY, 1: REPLAY, 2: REPLAY})) is None, "evidence once"


def test_a_voter_that_re_executes_a_proposal_names_it_however_many_are_unsure(of: RoundTerms) -> None:
    first, second, third = ring_of(of)
    mine = checked(second, of)
    for voter in (first, third):
        hear_vouch(mine, voter, vouch({0: UNJUDGED}))
    mine.assign_reexecutions(OPENED)
    mine.vouching.started.add(KEYS[0])
    assert mine.make_ballot_if_due(mine.proposals_due_at) is None
    mine.record_replay_verdict(KEYS[0], ACCEPT, mine.proposals_due_at)
    assert mine.make_ballot_if_due(mine.proposals_due_at) == ballot({0: ACCEPT})


def test_a_closing_carries_accepting_vouches_of_what_more_than_f_reject() -> None:
    of = terms(4, 4)
    rejects = {voter: {1: REPLAY} for voter in range(4)}
    closing = voted(of, rejects, {0: {1: REPLAY}, 2: {1: ACCEPT}, 3: {1: REPLAY}}).certificate()
    assert closing is not None and problem(of, closing) is None
    told = compute_round_result(of, *opened(closing)[:1], VouchSet.from_vouches(of, opened(closing)[3]))
    assert told.wrong_vouchers == {KEYS[2]}


def test_a_closing_of_two_hundred_voters_fits_into_a_block() -> None:
    """200 trainers are each re-executed by 66 others. Every third voter is a liar that vouches for each of them separately."""
    signers = sorted((FastSigner(f"voter {number}") for number in range(200)), key=lambda signer: signer.public)
    keys = frozenset(signer.public for signer in signers)
    of = RoundTerms(JOB, 0, ROOT, keys, keys, keys, keys, keys)
    mine = OpenRoundState(of, signers[0].public, OPENED, TIMERS)
    proposals = {}
    for at, signer in enumerate(signers):
        message = dataclasses.replace(LARGEST, payload=bytes([at]) * 32)
        proposals[signer.public] = sign_message(signer, CHAIN, message)
        mine.add_proposal(proposals[signer.public], message)
    digests = {key: signed_body_digest(signed) for key, signed in proposals.items()}
    called: dict[bytes, list[bytes]] = {key: [] for key in keys}
    for trainer in sorted(keys):
        for voter in mine.vouching.vouches.reexecutors(trainer)[:66]:
            called[voter].append(trainer)
    for at, signer in enumerate(signers):
        judgements = [Judgement(trainer, digests[trainer], ACCEPT) for trainer in called[signer.public]]
        bounds = range(len(judgements) + 1) if at % 3 == 0 else (0, 1, 2, 4, 8, 16, 32, 64, 66)
        for left, right in itertools.pairwise(bounds):
            said = Vouch(JOB, 0, tuple(judgements[left:right]))
            mine.add_vouch(sign_message(signer, CHAIN, said), said, OPENED)
    accept = dataclasses.replace(ballot({}), judgements=tuple(Judgement(key, digests[key], ACCEPT) for key in sorted(keys)))
    for signer in signers:
        mine.add_ballot(sign_message(signer, CHAIN, accept), accept, OPENED)
    closing = mine.certificate()
    assert closing is not None and len(closing.proposals) == 200 and len(of.voters) - quorum(200) == 66
    assert len(encode(closing)) + 67 * 6_900 < BODY_BYTES_MAX, "with the largest cut-offs of f + 1 voters"
