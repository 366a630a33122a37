"""One round: the decisions of its ballots, the time of a voter's ballot, and the messages that close it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consensus.voter_set import faults_tolerated, quorum
from protocol.codec import encode
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, sign_message
from protocol.messages import Ballot, CutOff, Judgement
from protocol.verdicts import Verdict
from rounds import round_state
from rounds.round_state import OpenRoundState, RoundCertificate, RoundTimeouts, compute_round_result, is_round_settled
from rounds.round_terms import RoundTerms, signed_body_digest
from tests.rounds.building import (
    ACCEPT,
    BY_KEY,
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
    judge_proposal,
    opened,
    problem,
    proposal,
    rotated,
    terms,
    vouched,
)

# Decisions of ballots -------------------------------------------------------------------------------------------------

judgements = st.dictionaries(st.integers(0, 2), st.tuples(st.sampled_from(Verdict), st.integers(0, 1)), max_size=3)


@st.composite
def full_votes(draw: st.DrawFn) -> tuple[RoundTerms, dict[bytes, Ballot]]:
    """Draw a ballot of every voter. A trainer may have signed two proposals."""
    rotations = draw(st.sampled_from([(), ((0, 1),), ((0, 2),), ((0, 1), (1, 2))]))
    of = dataclasses.replace(terms(draw(st.integers(1, 10))), successors=rotated(*rotations))
    votes = {}
    for voter in sorted(of.voters):
        said = draw(judgements)
        votes[voter] = ballot({t: v for t, (v, _) in said.items()}, {t: variant for t, (_, variant) in said.items()})
    return of, votes


def some(draw: st.DataObject, of: RoundTerms, votes: dict[bytes, Ballot]) -> dict[bytes, Ballot]:
    chosen = draw.draw(st.lists(st.sampled_from(sorted(votes)), unique=True, min_size=of.quorum))
    return {voter: votes[voter] for voter in chosen}


@given(full_votes(), st.data())
def test_no_further_ballot_changes_what_a_settled_round_accepts(
    case: tuple[RoundTerms, dict[bytes, Ballot]], data: st.DataObject
) -> None:
    of, votes = case
    chosen = some(data, of, votes)
    if is_round_settled(of, chosen, vouched(of)):
        accepted = compute_round_result(of, chosen, vouched(of)).accepted
        assert compute_round_result(of, votes, vouched(of)).accepted == accepted
        assert is_round_settled(of, chosen | {voter: votes[voter] for voter in votes if voter not in chosen}, vouched(of))


@given(full_votes(), st.data())
def test_two_valid_closings_without_cut_offs_accept_the_same(
    case: tuple[RoundTerms, dict[bytes, Ballot]], data: st.DataObject
) -> None:
    of, votes = case
    left, right = some(data, of, votes), some(data, of, votes)
    if is_round_settled(of, left, vouched(of)) and is_round_settled(of, right, vouched(of)):
        assert compute_round_result(of, left, vouched(of)).accepted == compute_round_result(of, right, vouched(of)).accepted


@given(full_votes(), st.data())
def test_whatever_is_accepted_has_a_quorum_of_accepts_and_no_trainer_is_in_two_groups(
    case: tuple[RoundTerms, dict[bytes, Ballot]], data: st.DataObject
) -> None:
    of, votes = case
    chosen = some(data, of, votes)
    result = compute_round_result(of, chosen, vouched(of))
    for trainer, accepted in result.accepted.items():
        says = [j for b in chosen.values() for j in b.judgements if (j.trainer, j.proposal) == (trainer, accepted)]
        assert sum(j.verdict is ACCEPT for j in says) >= of.quorum
    replaced = set(compute_round_result(dataclasses.replace(of, successors=frozenset()), chosen, vouched(of)).accepted) - set(
        result.accepted
    )
    groups = [set(result.accepted), set(result.rejected), set(result.absent), replaced]
    assert set().union(*groups) == of.trainers and sum(map(len, groups)) == len(of.trainers)
    assert result.unjudged <= set(result.rejected)


@given(st.integers(4, 13), st.data())
def test_all_ballots_of_honest_voters_settle_a_round_whatever_f_liars_say(n: int, data: st.DataObject) -> None:
    """This holds also if the liars name proposals that nobody else has seen. The round must not wait for cut-offs then."""
    of, f = terms(n), faults_tolerated(n)
    votes = dict.fromkeys(KEYS[: n - f], ballot({0: ACCEPT, 1: REPLAY}))
    for liar in KEYS[n - f : n]:
        said = data.draw(judgements)
        votes[liar] = ballot({t: v for t, (v, _) in said.items()}, {t: variant for t, (_, variant) in said.items()})
    assert is_round_settled(of, votes, vouched(of))
    assert compute_round_result(of, votes, vouched(of)).accepted == {KEYS[0]: digest(0)}


@pytest.mark.parametrize("enough", [said for count in range(5) for said in itertools.combinations(range(4), count)])
def test_of_the_keys_of_one_member_the_last_one_with_a_quorum_is_accepted(enough: tuple[int, ...]) -> None:
    """Trainers 0, 1 and 2 are one member, and 3 is another. A replaced update does not count."""
    of = dataclasses.replace(terms(trainers=4), successors=rotated((0, 1), (1, 2)))
    votes = dict.fromkeys(KEYS[:4], ballot({trainer: ACCEPT if trainer in enough else REPLAY for trainer in range(4)}))
    last = max((trainer for trainer in enough if trainer < 3), default=None)
    result = compute_round_result(of, votes, vouched(of))
    assert set(result.accepted) == {KEYS[trainer] for trainer in enough if trainer in (last, 3)}
    assert set(result.rejected) == {KEYS[trainer] for trainer in range(4) if trainer not in enough} and not result.absent
    held = book(0, of)
    for trainer in range(4):
        hear_proposal(held, trainer)
    for voter in range(4):
        hear_ballot(held, voter, votes[KEYS[voter]])
    closing = held.certificate()
    assert closing is not None and {signed.signer for signed in closing.proposals} == set(result.accepted)
    assert problem(of, closing) is None
    if len(enough) > len(result.accepted):
        both = ascending([proposal(trainer)[0] for trainer in enough])
        assert "exactly the accepted" in (problem(of, dataclasses.replace(closing, proposals=both)) or "")


@pytest.mark.parametrize("n", range(1, 14))
def test_one_accept_less_than_a_quorum_accepts_nothing(n: int) -> None:
    of = terms(n, trainers=1)
    for accepts in (quorum(n) - 1, quorum(n)):
        votes = {key: ballot({0: ACCEPT if i < accepts else REPLAY}) for i, key in enumerate(KEYS[:n])}
        assert bool(compute_round_result(of, votes, vouched(of)).accepted) == (accepts == quorum(n))


@pytest.mark.parametrize("n", range(4, 14))
def test_a_proposal_is_settled_by_the_very_ballot_that_leaves_too_few_for_a_quorum(n: int) -> None:
    of, enough = terms(n, trainers=1), n - quorum(n) + 1
    for without in (enough - 1, enough):
        votes = {key: ballot({0: REPLAY if i < without else ACCEPT}) for i, key in enumerate(KEYS[: quorum(n)])}
        assert is_round_settled(of, votes, vouched(of)) == (without == enough)


def test_what_no_more_than_f_ballots_name_counts_as_absent() -> None:
    votes = {key: ballot({0: ACCEPT}) for key in KEYS[:3]} | {KEYS[3]: ballot({1: REPLAY})}
    assert compute_round_result(terms(), votes, vouched(terms())).absent == {KEYS[1], KEYS[2]}
    votes[KEYS[2]] = ballot({0: ACCEPT, 1: REPLAY})
    assert compute_round_result(terms(), votes, vouched(terms())).rejected == {KEYS[1]: REPLAY}


def test_the_reason_is_the_one_given_most_often_by_more_than_liars_and_else_unjudged() -> None:
    def reason(*verdicts: Verdict) -> Verdict:
        votes = {key: ballot({0: verdict}) for key, verdict in zip(KEYS, verdicts, strict=False)}
        return compute_round_result(terms(7), votes, vouched(terms(7))).rejected[KEYS[0]]

    assert reason(REPLAY, REPLAY, REPLAY, NORM, NORM) is REPLAY
    assert reason(NORM, NORM, NORM, UNJUDGED, UNJUDGED, UNJUDGED, UNJUDGED) is NORM
    assert reason(REPLAY, REPLAY, NORM, ACCEPT, ACCEPT) is UNJUDGED
    assert reason(NORM, NORM, UNJUDGED, UNJUDGED, UNJUDGED) is UNJUDGED
    assert reason(UNJUDGED, UNJUDGED, UNJUDGED, ACCEPT, ACCEPT) is UNJUDGED


def test_more_than_f_ballots_that_could_not_judge_are_told() -> None:
    votes = {KEYS[0]: ballot({0: UNJUDGED}), KEYS[1]: ballot({0: ACCEPT}), KEYS[2]: ballot({0: ACCEPT})}
    assert compute_round_result(terms(), votes, vouched(terms())).unjudged == frozenset()
    votes[KEYS[1]] = ballot({0: UNJUDGED})
    assert compute_round_result(terms(), votes, vouched(terms())).unjudged == {KEYS[0]}


@pytest.mark.parametrize(("too_large", "diverging"), [((0,), ()), ((0, 1), (0, 1)), ((0, 1, 2, 3), (0, 1, 2, 3))])
def test_updates_of_more_than_f_trainers_that_are_too_large_are_called_diverging(
    too_large: tuple[int, ...], diverging: tuple[int, ...]
) -> None:
    """One of them may be a lie, but of two in a network of four one is honest."""
    of = terms(trainers=4)
    votes = dict.fromkeys(KEYS[:4], ballot({trainer: NORM if trainer in too_large else REPLAY for trainer in range(4)}))
    result = compute_round_result(of, votes, vouched(of))
    words = {key: result.rejection_reason(key) for key in KEYS[:4]}
    assert words == {KEYS[i]: "diverging" if i in diverging else "norm" if i in too_large else "replay" for i in range(4)}
    assert all(result.rejected[KEYS[i]] is NORM for i in too_large), "the model takes it as any other update that is too large"


# Received messages ----------------------------------------------------------------------------------------------------


def test_two_different_proposals_are_evidence_once_and_judged_as_equivocation_for_good() -> None:
    mine = book(3, terms())
    assert hear_proposal(mine, 0) is None and hear_proposal(mine, 0) is None
    assert hear_proposal(mine, 0, variant=1) == (proposal(0)[0], proposal(0, 1)[0])
    assert hear_proposal(mine, 0, variant=2) is None
    mine.record_verdict(KEYS[0], ACCEPT, OPENED)
    assert mine.current_verdict(KEYS[0]) is Verdict.EQUIVOCATION


def test_the_first_ballot_of_a_voter_counts_and_a_second_one_is_evidence_once() -> None:
    mine, first, second = book(0, terms()), ballot({0: ACCEPT}), ballot({0: REPLAY})
    assert hear_ballot(mine, 1, first) is None and hear_ballot(mine, 1, first) is None
    pair = hear_ballot(mine, 1, second)
    assert pair is not None and [p.body for p in pair] == [encode(first), encode(second)]
    assert hear_ballot(mine, 1, second) is None and mine.ballots[KEYS[1]] == first


@pytest.mark.parametrize(
    "reason, change",
    [
        ("wrong-round", {"round": 1}),
        ("wrong-round", {"job": b"k" * 32}),
        ("wrong-round", {"model_root": b"s" * 32}),
        ("not-a-trainer", {"judgements": (Judgement(KEYS[5], bytes(32), ACCEPT),)}),
        ("non-canonical", {"judgements": (Judgement(KEYS[1], bytes(32), ACCEPT), Judgement(KEYS[0], bytes(32), ACCEPT))}),
        ("non-canonical", {"judgements": (Judgement(KEYS[0], bytes(32), ACCEPT), Judgement(KEYS[0], bytes(31) + b"1", ACCEPT))}),
    ],
)
def test_a_ballot_that_does_not_belong_is_refused(reason: str, change: dict[str, object]) -> None:
    mine, fields = book(0, terms()), {"job": JOB, "round": 0, "model_root": ROOT, "judgements": ()}
    with pytest.raises(RemoteProtocolError) as refused:
        hear_ballot(mine, 1, Ballot(**(fields | change)))  # type: ignore[arg-type]
    assert refused.value.reason == reason and not mine.ballots


def test_only_voters_vote_and_only_trainers_propose() -> None:
    mine = book(0, terms(n=4, trainers=2))
    with pytest.raises(RemoteProtocolError, match="not-a-voter"):
        hear_ballot(mine, 4, ballot({}))
    with pytest.raises(RemoteProtocolError, match="not-a-voter"):
        hear_cut_off(mine, 4)
    with pytest.raises(RemoteProtocolError, match="not-a-trainer"):
        hear_proposal(mine, 2)
    with pytest.raises(RemoteProtocolError, match="wrong-round"):
        mine.add_proposal(*proposal(0, round=1))


# Time of a ballot -----------------------------------------------------------------------------------------------------


def test_a_voter_speaks_once_all_awaited_trainers_are_judged_and_not_before() -> None:
    mine = book(3, terms(awaited=2))
    for trainer in (0, 1):
        assert mine.make_ballot_if_due(OPENED) is None
        judge_proposal(mine, trainer, ACCEPT)
    due = mine.make_ballot_if_due(OPENED)
    assert due == ballot({0: ACCEPT, 1: ACCEPT})
    assert due is not None
    hear_ballot(mine, 3, due)
    assert mine.make_ballot_if_due(OPENED + 1_000) is None


def test_a_proposal_that_nobody_awaits_is_judged_too_if_it_came() -> None:
    mine = book(3, terms(awaited=1))
    hear_proposal(mine, 0)
    hear_proposal(mine, 2)
    mine.record_verdict(KEYS[0], ACCEPT, OPENED)
    assert mine.make_ballot_if_due(OPENED) is None
    mine.record_verdict(KEYS[2], NORM, OPENED)
    assert mine.make_ballot_if_due(OPENED) == ballot({0: ACCEPT, 2: NORM})


def test_a_trainer_that_returns_is_waited_for_until_t1_and_no_longer() -> None:
    timers = dataclasses.replace(TIMERS, returning=frozenset({KEYS[2], KEYS[9]}))  # the latter does not train here
    for comes in (True, False):
        mine = book(3, terms(awaited=2), timers)
        for trainer in (0, 1):
            judge_proposal(mine, trainer, ACCEPT, OPENED + 1.0)
        assert mine.make_ballot_if_due(OPENED + 2.9) is None and mine.proposals_due_at == OPENED + 3.0, (
            "its time does not count as theirs"
        )
        if comes:
            judge_proposal(mine, 2, ACCEPT, OPENED + 2.9)
            assert mine.make_ballot_if_due(OPENED + 2.9) == ballot({0: ACCEPT, 1: ACCEPT, 2: ACCEPT})
        else:
            assert mine.make_ballot_if_due(OPENED + 3.0) == ballot({0: ACCEPT, 1: ACCEPT})


def test_without_a_proposal_there_is_no_ballot_ever() -> None:
    assert book(3, terms()).make_ballot_if_due(OPENED + 1e6) is None


def test_whoever_does_not_vote_says_nothing() -> None:
    for me in (None, 9):
        mine = book(me, terms())
        hear_proposal(mine, 0)
        assert mine.make_ballot_if_due(OPENED + 1e6) is None and mine.make_cut_off_if_due(OPENED + 1e6) is None


def walk(mine: OpenRoundState) -> list[tuple[str, float]]:
    """Follow the deadlines alone until none is left. Return each sent message with its seconds after the opening."""
    sent, now = [], OPENED
    for _ in itertools.repeat(None, 20):
        if (due := mine.make_ballot_if_due(now)) is not None:
            sent.append(("ballot", now - OPENED))
            assert mine.me is not None
            mine.add_ballot(sign_message(BY_KEY[mine.me], CHAIN, due), due, now)
        if (cut := mine.make_cut_off_if_due(now)) is not None:
            sent.append(("cut-off", now - OPENED))
            assert mine.me is not None
            mine.add_cut_off(sign_message(BY_KEY[mine.me], CHAIN, cut), cut)
        later = mine.next_deadline(now)
        if later is None:
            return sent
        assert later > now, "a deadline that has passed would be a busy loop"
        now = later
    raise AssertionError("deadlines never end")


@given(st.floats(0.001, 100), st.floats(0.001, 100), st.floats(0, 2e9))
def test_the_four_timers_are_reached_in_order_by_deadlines_alone(maximum: float, replays: float, at: float) -> None:
    """No timer expires unseen, for any rounding of the times."""
    of, timers = terms(auditors=3), RoundTimeouts(maximum, replays)
    for me, speaks_at in ((0, maximum + replays), (3, maximum + replays + round_state.LIGHT_VOTER_SECONDS)):
        mine = OpenRoundState(of, KEYS[me], OPENED, timers)
        mine.opened_at = OPENED + at
        hear_proposal(mine, 1)
        for voter in (1, 2):
            hear_ballot(mine, voter, ballot({1: (ACCEPT, REPLAY)[voter - 1]}))
        said = walk(mine)
        assert [what for what, _ in said][:1] == ["ballot"]
        assert said[0][1] == pytest.approx(at + speaks_at, abs=1e-5)


def test_a_round_that_the_ballots_do_not_settle_is_cut_off_at_the_fourth_timer() -> None:
    mine = book(0, terms())
    hear_proposal(mine, 0)
    for voter, verdict in ((1, ACCEPT), (2, ACCEPT)):
        hear_ballot(mine, voter, ballot({0: verdict}))
    end = 60.0 + 30.0 + round_state.LIGHT_VOTER_SECONDS + round_state.CUT_OFF_SECONDS
    assert walk(mine) == [("ballot", pytest.approx(90.0, abs=1e-5)), ("cut-off", pytest.approx(end, abs=1e-5))]
    assert mine.cut_offs[KEYS[0]].ballots == tuple(sorted(signed_body_digest(s) for s in mine.signed_ballots.values()))


def test_a_settled_round_and_one_without_a_quorum_are_not_cut_off() -> None:
    settled_book, thin = book(0, terms()), book(0, terms())
    for voter in range(3):
        hear_ballot(settled_book, voter, ballot({0: ACCEPT}))
    for voter in range(2):
        hear_ballot(thin, voter, ballot({0: (ACCEPT, REPLAY)[voter]}))
    assert settled_book.make_cut_off_if_due(OPENED + 1e6) is None and thin.make_cut_off_if_due(OPENED + 1e6) is None


def test_the_majority_of_the_awaited_trainers_sets_the_pace_for_the_others() -> None:
    mine = book(3, terms(trainers=3))
    assert mine.proposal_timeout_seconds == 60.0
    hear_proposal(mine, 0, now=OPENED + 5)
    assert mine.proposal_timeout_seconds == 60.0
    hear_proposal(mine, 1, now=OPENED + 8)
    assert mine.proposal_timeout_seconds == pytest.approx(round_state.PROPOSALS_FACTOR * 8, abs=1e-3)
    hear_proposal(mine, 2, now=OPENED + 50)
    assert mine.proposal_timeout_seconds == pytest.approx(round_state.PROPOSALS_FACTOR * 8, abs=1e-3)


USUAL = RoundTimeouts(proposals_max_seconds=60.0, replay_seconds=30.0, proposals_usual_seconds=3.0)  # as in the rounds before


def test_where_a_majority_is_missing_the_rounds_before_say_how_long_it_is_worth_waiting() -> None:
    """One trainer is frozen, and the worker of another is stopped. The round must not take the longest time of the job."""
    mine = book(3, terms(trainers=4), USUAL)
    hear_proposal(mine, 0, now=OPENED + 1)
    hear_proposal(mine, 1, now=OPENED + 2)
    assert mine.proposal_timeout_seconds == round_state.MINORITY_FACTOR * 3.0 < 60.0
    for trainer in (0, 1):
        mine.record_verdict(KEYS[trainer], ACCEPT, OPENED + 2)
    assert mine.make_ballot_if_due(OPENED + round_state.MINORITY_FACTOR * 3.0 - 1) is None
    assert mine.make_ballot_if_due(OPENED + round_state.MINORITY_FACTOR * 3.0 + 1) == ballot({0: ACCEPT, 1: ACCEPT})


def test_while_no_awaited_trainer_is_here_nothing_tells_that_this_round_is_as_the_others_were() -> None:
    mine = book(3, terms(trainers=4, awaited=3), USUAL)
    hear_proposal(mine, 3, now=OPENED + 1)
    assert mine.proposal_timeout_seconds == 60.0


def test_who_was_awaited_in_the_rounds_before_is_a_minority_too() -> None:
    """The last round accepted only one trainer, which is absent now. The others must not wait a minute for it."""
    timers = dataclasses.replace(USUAL, usual_trainers=frozenset({KEYS[2]}))
    mine, late, strange = (book(3, terms(trainers=4, awaited=1), timers) for _ in range(3))
    hear_proposal(mine, 2, now=OPENED + 1)
    assert mine.proposal_timeout_seconds == round_state.MINORITY_FACTOR * 3.0
    hear_proposal(late, 2, now=OPENED + 15)
    assert late.proposal_timeout_seconds == pytest.approx(round_state.PROPOSALS_FACTOR * 15, abs=1e-3)
    hear_proposal(strange, 3, now=OPENED + 1)
    assert strange.proposal_timeout_seconds == 60.0


def test_a_round_in_which_even_the_first_is_late_gives_the_others_three_times_as_long() -> None:
    """All trainers became slower, and the first one must not be the only one that is accepted."""
    mine = book(3, terms(trainers=4), USUAL)
    hear_proposal(mine, 0, now=OPENED + 19)
    assert mine.proposal_timeout_seconds == pytest.approx(round_state.PROPOSALS_FACTOR * 19, abs=1e-3)
    hear_proposal(mine, 1, now=OPENED + 50)
    assert mine.proposal_timeout_seconds == 60.0


def test_a_majority_says_more_than_the_rounds_before() -> None:
    mine = book(3, terms(trainers=3), USUAL)
    for trainer in (0, 1):
        hear_proposal(mine, trainer, now=OPENED + 1)
    assert mine.proposal_timeout_seconds == pytest.approx(round_state.PROPOSALS_FACTOR, abs=1e-3)


def test_quick_rounds_do_not_make_a_minority_hasty_and_the_job_has_the_last_word() -> None:
    for maximum, expected in ((60.0, round_state.MINORITY_SECONDS_MIN), (4.0, 4.0)):
        mine = book(3, terms(trainers=3), RoundTimeouts(maximum, 30.0, proposals_usual_seconds=0.01))
        hear_proposal(mine, 0, now=OPENED + 0.01)
        assert mine.proposal_timeout_seconds == expected


def test_who_measured_nothing_and_has_no_update_of_its_own_yet_waits_for_its_worker() -> None:
    """After a restart of all peers, workers start. A liar that needs no worker must not be accepted alone."""
    back = RoundTimeouts(60.0, 30.0, proposals_usual_seconds=0.0)
    trains, votes = book(1, terms(trainers=3), back), book(3, terms(trainers=3), back)
    for mine in (trains, votes):
        hear_proposal(mine, 0, now=OPENED + 1)
    assert (trains.proposal_timeout_seconds, votes.proposal_timeout_seconds) == (60.0, round_state.MINORITY_SECONDS_MIN)
    late = book(1, terms(trainers=4), back)
    for trainer in (0, 1):
        hear_proposal(late, trainer, now=OPENED + 8)
    assert late.proposal_timeout_seconds == round_state.PROPOSALS_FACTOR * 8


def test_the_pace_has_a_floor_a_ceiling_and_does_not_hear_trainers_that_nobody_awaits() -> None:
    fast, slow, strange = (book(3, terms(trainers=3, awaited=1)) for _ in range(3))
    hear_proposal(fast, 0, now=OPENED + 0.01)
    hear_proposal(slow, 0, now=OPENED + 55)
    hear_proposal(strange, 1, now=OPENED + 0.01)
    assert fast.proposal_timeout_seconds == round_state.PROPOSALS_SECONDS_MIN
    assert slow.proposal_timeout_seconds == strange.proposal_timeout_seconds == 60.0


def test_after_the_first_timer_only_those_that_came_are_waited_for() -> None:
    mine = book(3, terms())
    judge_proposal(mine, 0, ACCEPT)
    assert mine.make_ballot_if_due(OPENED + 59) is None
    assert mine.make_ballot_if_due(OPENED + 61) == ballot({0: ACCEPT})


def test_what_could_not_be_judged_in_time_is_said_to_be_unjudged() -> None:
    mine = book(3, terms())
    hear_proposal(mine, 0)
    assert mine.make_ballot_if_due(OPENED + 89) is None
    assert mine.make_ballot_if_due(OPENED + 91) == ballot({0: UNJUDGED})


# Closing --------------------------------------------------------------------------------------------------------------


def voted(
    said: Mapping[int, Mapping[int, Verdict]], me: int = 0, n: int = 4, proposals: tuple[int, ...] = (0, 1, 2)
) -> OpenRoundState:
    mine = book(me, terms(n))
    for trainer in proposals:
        hear_proposal(mine, trainer)
    for voter, verdicts in said.items():
        hear_ballot(mine, voter, ballot(verdicts))
    return mine


def test_a_settled_round_closes_with_a_quorum_of_ballots_and_exactly_the_accepted_proposals() -> None:
    said = {0: ACCEPT, 1: REPLAY, 2: ACCEPT}
    assert voted({0: said, 1: said}).certificate() is None
    closing = voted({0: said, 1: said, 2: said}).certificate()
    assert closing is not None and problem(terms(), closing) is None
    assert [signed.signer for signed in closing.proposals] == [KEYS[0], KEYS[2]]


def test_a_round_does_not_close_here_without_an_accepted_proposal_or_with_the_trainers_other_one() -> None:
    said = {voter: {0: ACCEPT} for voter in (0, 1, 2)}
    assert voted(said, proposals=()).certificate() is None
    mine = book(0, terms())
    hear_proposal(mine, 0, variant=1)
    for voter, verdicts in said.items():
        hear_ballot(mine, voter, ballot(verdicts))
    assert mine.certificate() is None


def test_an_unsettled_round_closes_with_f_plus_one_cut_offs_and_not_with_f() -> None:
    mine = voted({0: {0: ACCEPT}, 1: {0: ACCEPT}, 2: {0: REPLAY}})
    assert not is_round_settled(mine.terms, mine.ballots, vouched(mine.terms))
    hear_cut_off(mine, 0)
    assert mine.certificate() is None
    hear_cut_off(mine, 1)
    closing = mine.certificate()
    assert closing is not None and problem(terms(), closing) is None
    assert compute_round_result(terms(), opened(closing)[0], vouched(terms())).accepted == {}
    hear_cut_off(mine, 2)
    third = mine.certificate()
    assert third is not None and len(third.cut_offs) == 2, "no more than needed: blocks are bounded"


UNSETTLED = {voter: {0: ACCEPT if voter < 4 else REPLAY} for voter in range(6)}  # of seven voters


def test_a_leader_that_leaves_out_a_ballot_of_our_cut_off_is_refused() -> None:
    short, mine = voted({voter: UNSETTLED[voter] for voter in range(5)}, n=7), voted(UNSETTLED, me=1, n=7)
    for voter in (2, 3, 4):
        hear_cut_off(short, voter)
    closing = short.certificate()
    assert closing is not None and mine.why_certificate_refused(closing) is None
    hear_cut_off(mine, 1, tuple(sorted(signed_body_digest(s) for s in mine.signed_ballots.values())))
    assert "omits 1 ballots" in (mine.why_certificate_refused(closing) or "")


def test_a_ballot_that_came_after_our_cut_off_may_be_left_out() -> None:
    """Otherwise one late ballot would make each of us refuse the leader's closing, which is already in flight."""
    mine = voted({voter: UNSETTLED[voter] for voter in range(5)}, n=7)
    hear_cut_off(mine, 0, tuple(sorted(signed_body_digest(s) for s in mine.signed_ballots.values())))
    for voter in (1, 2):
        hear_cut_off(mine, voter)
    closing = mine.certificate()
    hear_ballot(mine, 5, ballot({0: NORM}))
    assert closing is not None and mine.why_certificate_refused(closing) is None


def test_a_leader_that_leaves_out_a_proposal_with_all_its_accepts_is_refused() -> None:
    mine = voted({voter: UNSETTLED[voter] for voter in range(5)}, n=7)
    for voter in (0, 1, 2):
        hear_cut_off(mine, voter)
    closing = mine.certificate()
    hear_ballot(mine, 5, ballot({0: ACCEPT}))
    assert closing is not None and "omits 1 proposals" in (mine.why_certificate_refused(closing) or "")


def test_a_liar_that_gives_each_voter_another_ballot_does_not_keep_the_round_open() -> None:
    honest = {0: {0: ACCEPT}, 1: {0: ACCEPT}}
    left, right = voted(honest | {2: {0: REPLAY}}, me=0), voted(honest | {2: {0: NORM}}, me=1)
    for mine, me in ((left, 0), (right, 1)):
        hear_cut_off(mine, me, tuple(sorted(signed_body_digest(s) for s in mine.signed_ballots.values())))
        hear_cut_off(mine, 2)
    closing = left.certificate()
    assert closing is not None and right.why_certificate_refused(closing) is None


@given(full_votes(), st.data())
def test_every_closing_that_a_book_makes_is_valid(case: tuple[RoundTerms, dict[bytes, Ballot]], data: st.DataObject) -> None:
    of, votes = case
    mine = OpenRoundState(of, KEYS[0], OPENED, TIMERS)
    for trainer, variant in data.draw(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 1)))):
        mine.add_proposal(*proposal(trainer, variant))
    for voter, message in some(data, of, votes).items():
        mine.add_ballot(sign_message(BY_KEY[voter], CHAIN, message), message, OPENED)
    for voter in data.draw(st.sets(st.sampled_from(sorted(of.voters)))):
        message = CutOff(JOB, 0, ())
        mine.add_cut_off(sign_message(BY_KEY[voter], CHAIN, message), message)
    closing = mine.certificate()
    if closing is not None:
        assert problem(of, closing) is None


def test_a_closing_is_valid_only_as_it_is() -> None:
    accepted = voted({voter: {0: ACCEPT, 1: ACCEPT} for voter in range(3)}).certificate()
    unsettled = voted({0: {0: ACCEPT}, 1: {0: ACCEPT}, 2: {0: REPLAY}})
    for voter in (0, 1):
        hear_cut_off(unsettled, voter)
    cut = unsettled.certificate()
    assert accepted is not None and cut is not None
    foreign_cut = sign_message(SIGNERS[5], CHAIN, CutOff(JOB, 0, ()))
    other_round = sign_message(SIGNERS[1], CHAIN, CutOff(JOB, 1, ()))

    def parts(of: RoundCertificate, **changed: tuple[Signed, ...]) -> RoundCertificate:
        fields = {"ballots": of.ballots, "cut_offs": of.cut_offs, "proposals": of.proposals, "vouches": ()} | changed
        return RoundCertificate(JOB, 0, **fields)

    wrong = {
        "2 ballots, quorum 3": parts(accepted, ballots=accepted.ballots[:2]),
        "signers must ascend": parts(accepted, ballots=accepted.ballots[::-1]),
        "without duplicates": parts(accepted, proposals=(*accepted.proposals[:1], *accepted.proposals)),
        "not exactly the accepted": parts(accepted, proposals=accepted.proposals[:1]),
        "exactly the accepted": parts(accepted, proposals=ascending([*accepted.proposals[:1], proposal(1, 1)[0]])),
        "a settled round needs no cut-offs": parts(accepted, cut_offs=cut.cut_offs),
        "1 cut-offs are fewer than 2": parts(cut, cut_offs=cut.cut_offs[:1]),
        "is not a voter": parts(cut, cut_offs=ascending([cut.cut_offs[0], foreign_cut])),
        "a different round": parts(cut, cut_offs=ascending([cut.cut_offs[0], other_round])),
    }
    assert problem(terms(), accepted) is None and problem(terms(), cut) is None
    for text, closing in wrong.items():
        assert text in (problem(terms(), closing) or "nothing"), text


def test_a_closing_with_a_ballot_of_a_stranger_or_of_another_round_is_refused() -> None:
    accepted = voted({voter: {0: ACCEPT} for voter in range(3)}).certificate()
    assert accepted is not None
    for signed in (
        sign_message(SIGNERS[5], CHAIN, ballot({0: ACCEPT})),
        sign_message(SIGNERS[3], CHAIN, Ballot(JOB, 1, ROOT, ())),
    ):
        with pytest.raises(RemoteProtocolError):
            problem(terms(), RoundCertificate(JOB, 0, ascending([*accepted.ballots, signed]), (), accepted.proposals, ()))


# Rounds that may close without a proposal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("voter", [0, 3])
def test_a_ballot_without_a_proposal_is_cast_after_t1_where_the_round_may_be_empty(voter: int) -> None:
    of = dataclasses.replace(terms(4, auditors=3, trainers=1), may_be_empty=True)
    mine, usual = book(voter, of), book(voter, terms(4, auditors=3, trainers=1))
    t1 = mine.proposals_due_at
    assert t1 == OPENED + TIMERS.proposals_max_seconds and mine.next_deadline(OPENED) == t1
    assert mine.make_ballot_if_due(t1 - 0.01) is None
    cast = mine.make_ballot_if_due(t1)
    assert cast is not None and cast.judgements == ()
    assert usual.make_ballot_if_due(t1 + 1e6) is None


def test_empty_ballots_of_a_quorum_close_the_round_without_an_update() -> None:
    of = dataclasses.replace(terms(4, auditors=3, trainers=1), may_be_empty=True)
    leader = book(0, of)
    for voter in range(3):
        assert leader.certificate() is None
        hear_ballot(leader, voter, ballot({}))
    closing = leader.certificate()
    assert closing is not None and problem(of, closing) is None and not closing.proposals
    result = compute_round_result(of, opened(closing)[0], vouched(of))
    assert not result.accepted and result.absent == of.trainers


def test_a_proposal_that_arrives_before_t1_is_judged() -> None:
    of = dataclasses.replace(terms(4, trainers=1), may_be_empty=True)
    mine = book(1, of)
    hear_proposal(mine, 0, now=OPENED + 1)
    t1 = mine.proposals_due_at
    assert mine.make_ballot_if_due(t1) is None, "its checks are not over"
    judge_proposal(mine, 0, ACCEPT, now=t1)
    cast = mine.make_ballot_if_due(t1)
    assert cast is not None and [judged.verdict for judged in cast.judgements] == [ACCEPT]
