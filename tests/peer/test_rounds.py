"""The open rounds of one peer: their messages, its statements, each made only once, and their recovery after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consensus.effects import JournalRecord, OwnRoundStatement
from consensus.evidence import Evidence
from ledger.jobs import JobPhase
from ledger.ledger_state import LedgerState
from ledger.members import Member
from peer.node import future_messages
from peer.node import open_rounds as rounds_module
from peer.node.open_rounds import ROUND_REQUEST_SECONDS, OpenRounds, RoundEffects, RoundTimings
from protocol import codec
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.identity import Identity, Signed, sign_message
from protocol.messages import Ballot, CutOff, Judgement, Proposal, Vouch
from protocol.verdicts import Verdict
from rounds import round_state
from rounds.round_terms import RoundTerms, signed_body_digest
from storage.ledger_store import LedgerStore
from tests.peer.chain import LANGUAGE, Chain

ACCEPT = Verdict.ACCEPT
NOW = 1_700_000_000.0


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    made = Chain(tmp_path / "chain")
    yield made
    made.close()


@pytest.fixture
def key(chain: Chain) -> bytes:
    return chain.start(LANGUAGE)


def rounds_of(chain: Chain, me: int = 0) -> OpenRounds:
    return OpenRounds(chain.people[me], chain.id, {})


def open_all(rounds: OpenRounds, chain: Chain, now: float = NOW, spoken: dict[str, Signed] | None = None) -> RoundEffects:
    outcome = RoundEffects()
    opened, _ = rounds.apply_state(chain.ledger.state)
    for key, _ in opened:
        said = rounds.open_round(key, chain.ledger.state.jobs.jobs[key], now, spoken or {}, LANGUAGE.proposal_seconds)
        outcome.records += said.records
        outcome.sends += said.sends
        outcome.evidence += said.evidence
        outcome.counted_messages += said.counted_messages
    return outcome


@pytest.fixture
def rounds(chain: Chain, key: bytes) -> OpenRounds:
    """Return the rounds of the first person. The first round of the job is open."""
    made = rounds_of(chain)
    open_all(made, chain)
    return made


def proposal(chain: Chain, key: bytes, round: int = 0, variant: int = 0) -> Proposal:
    return Proposal(key, round, chain.ledger.state.jobs.jobs[key].model_root, bytes([variant]) * 32, 1, bytes(32), None)


def hear(
    rounds: OpenRounds, chain: Chain, who: Identity, message: Proposal | Ballot | Vouch | CutOff, now: float = NOW
) -> RoundEffects | None:
    return rounds.receive_message(sign_message(who, chain.id, message), message, now)


def ballot_on(chain: Chain, key: bytes, signed: Signed, verdict: Verdict = ACCEPT) -> Ballot:
    return Ballot(
        key, 0, chain.ledger.state.jobs.jobs[key].model_root, (Judgement(signed.signer, signed_body_digest(signed), verdict),)
    )


def vouch_on(key: bytes, *proposals: Signed, verdict: Verdict = ACCEPT, round: int = 0) -> Vouch:
    judged = (Judgement(signed.signer, signed_body_digest(signed), verdict) for signed in proposals)
    return Vouch(key, round, tuple(sorted(judged, key=lambda judgement: judgement.trainer)))


def vouch_all(rounds: OpenRounds, chain: Chain, key: bytes, verdict: Verdict = ACCEPT, now: float = NOW) -> None:
    """Let all other re-executors vouch for all present proposals."""
    book = rounds.books[key]
    for person in chain.people:
        if person.public in book.terms.reexecutors - {book.me}:
            hear(rounds, chain, person, vouch_on(key, *book.proposals.values(), verdict=verdict, round=book.terms.round), now)


def trainer_of(rounds: OpenRounds, chain: Chain, key: bytes) -> Identity:
    """Return the trainer for whose proposal this peer is the first re-executor."""
    first = rounds.books[key].vouching.vouches.reexecutors
    return next(person for person in chain.people if rounds.books[key].me == first(person.public)[0])


def reexecuted(rounds: OpenRounds, chain: Chain, key: bytes, trainer: Identity, verdict: Verdict = ACCEPT) -> Signed:
    """Return a trainer's proposal that passed the cheap checks and was re-executed here."""
    hear(rounds, chain, trainer, proposal(chain, key))
    rounds.record_verdict((key, 0), trainer.public, ACCEPT, NOW)
    rounds.record_replay_start((key, 0), trainer.public)
    rounds.record_replay_verdict((key, 0), trainer.public, verdict, NOW)
    return rounds.books[key].proposals[trainer.public]


def restarted(chain: Chain, key: bytes, record: JournalRecord) -> tuple[OpenRounds, RoundEffects]:
    """Open the round again at the first peer after a restart, with this record on its disk."""
    store, made = LedgerStore(chain.store.path.with_name("mine.db"), chain.id), rounds_of(chain)
    store.append_records([record])
    made.apply_state(chain.ledger.state)
    job, spoken = chain.ledger.state.jobs.jobs[key], store.round_votes(chain.people[0].public, key, 0)
    effects = made.open_round(key, job, NOW, spoken, 60.0, accepted=store.accepted_proposals(key, 0))
    store.close()
    return made, effects


def test_rounds_follow_the_applied_state(chain: Chain, key: bytes) -> None:
    rounds = rounds_of(chain)
    assert rounds.apply_state(chain.ledger.state) == ([(key, 0)], [])
    open_all(rounds, chain)
    assert rounds.apply_state(chain.ledger.state) == ([], [])
    chain.play(key)
    assert rounds.apply_state(chain.ledger.state) == ([(key, 1)], [(key, 0)]) and rounds.books == {}
    open_all(rounds, chain)
    chain.play(key)
    assert chain.ledger.state.jobs.jobs[key].phase is JobPhase.FINISHED
    assert rounds.apply_state(chain.ledger.state) == ([], [(key, 1)]) and rounds.books == {}


def test_our_proposal_is_signed_once_and_counts_here_at_once(chain: Chain, key: bytes) -> None:
    rounds = rounds_of(chain)
    assert rounds.publish_proposal(proposal(chain, key), NOW) == RoundEffects(), "the round is not open here yet"
    open_all(rounds, chain)
    said = rounds.publish_proposal(proposal(chain, key), NOW)
    (record,), (signed,) = said.records, said.sends
    assert record == OwnRoundStatement("proposal", key, 0, signed) and signed.signer == chain.people[0].public
    assert rounds.books[key].proposals == {chain.people[0].public: signed} and rounds.own_messages() == [signed]
    assert rounds.publish_proposal(proposal(chain, key, variant=1), NOW) == RoundEffects(), "not a second one"
    assert rounds.publish_proposal(proposal(chain, key, round=1), NOW) == RoundEffects(), "not for another round"


def test_our_ballot_is_recorded_before_anything_is_sent_and_cast_once(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    rounds.publish_proposal(proposal(chain, key), NOW)
    for person in chain.people[1:]:
        hear(rounds, chain, person, proposal(chain, key))
    assert rounds.sign_due_messages(NOW) == RoundEffects()
    for person in chain.people:
        rounds.record_verdict((key, 0), person.public, ACCEPT, NOW)
    vouch_all(rounds, chain, key)
    said = rounds.sign_due_messages(NOW)
    (record,), (signed,) = said.records, said.sends
    assert isinstance(record, OwnRoundStatement) and (record.tag, record.signed) == ("ballot", signed)
    assert [who for who, _ in said.counted_messages] == [chain.people[0].public]
    assert rounds.sign_due_messages(NOW + 1_000) == RoundEffects() and signed in rounds.own_messages()


@pytest.fixture
def before(chain: Chain) -> OpenRounds:
    return rounds_of(chain)


def test_after_a_restart_what_was_said_is_sent_again_and_nothing_else_is_said(
    chain: Chain, key: bytes, before: OpenRounds
) -> None:
    open_all(before, chain)
    before.publish_proposal(proposal(chain, key), NOW)
    before.record_verdict((key, 0), chain.people[0].public, ACCEPT, NOW)
    records = [record for record in before.sign_due_messages(NOW + 1_000).records if isinstance(record, OwnRoundStatement)]
    spoken = {"proposal": before.own_messages()[0], **{record.tag: record.signed for record in records}}
    after = rounds_of(chain)
    again = open_all(after, chain, spoken=spoken)
    assert again.sends == list(spoken.values()) and again.records == []
    assert after.publish_proposal(proposal(chain, key, variant=1), NOW) == RoundEffects()
    after.record_verdict((key, 0), chain.people[0].public, Verdict.REPLAY, NOW)
    assert after.sign_due_messages(NOW + 2_000) == RoundEffects()


def test_what_a_ballot_accepts_is_recorded_with_it_and_held_after_a_restart(chain: Chain, key: bytes, before: OpenRounds) -> None:
    """A closing needs these bytes: all voters may restart while a trainer's disk is lost."""
    open_all(before, chain)
    before.publish_proposal(proposal(chain, key), NOW)
    for person in chain.people[1:3]:
        hear(before, chain, person, proposal(chain, key))
    for person, verdict in zip(chain.people, (ACCEPT, ACCEPT, Verdict.REPLAY), strict=False):
        before.record_verdict((key, 0), person.public, verdict, NOW)
    vouch_all(before, chain, key)
    (record,) = before.sign_due_messages(NOW + 1_000).records
    assert record.accepted == (before.books[key].proposals[chain.people[1].public],), "not its own, nor what it rejects"
    after, _ = restarted(chain, key, record)
    assert after.books[key].proposals == {chain.people[1].public: record.accepted[0]}
    assert after.messages_of_round((key, 0)) == [*record.accepted, record.signed] and after.own_messages() == [record.signed]


def test_a_proposal_that_a_ballot_accepts_is_left_out_if_its_trainer_takes_no_part_any_more(chain: Chain, key: bytes) -> None:
    rounds, job = rounds_of(chain), chain.ledger.state.jobs.jobs[key]
    stranger = sign_message(Identity(bytes(31) + b"s"), chain.id, proposal(chain, key))
    rounds.apply_state(chain.ledger.state)
    rounds.open_round(key, job, NOW, {}, 60.0, accepted=(stranger,))
    assert rounds.books[key].proposals == {}


def test_who_comes_back_waits_by_what_it_measures_in_the_round_as_soon_as_it_has_measured_something(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    """Its first estimate is long, and the round may need its cut-off."""
    people, vouches = {person.public: person for person in chain.people}, rounds.books[key].vouching.vouches
    assert rounds.books[key].timers.replay_seconds == rounds_module.REPLAYS_FACTOR * rounds_module.VOUCH_SECONDS_START
    for trainer, verdict, expected in ((chain.people[1], Verdict.UNJUDGED, 10.0), (chain.people[2], ACCEPT, 2.0)):
        hear(rounds, chain, trainer, proposal(chain, key))
        rounds.record_verdict((key, 0), trainer.public, ACCEPT, NOW)
        first, second, _ = (people[voter] for voter in vouches.reexecutors(trainer.public))
        said = vouch_on(key, rounds.books[key].proposals[trainer.public], verdict=verdict)
        for voter, later in ((second, 1.0), (first, 2.0)):  # the estimate determines when the second one begins
            hear(rounds, chain, voter, said, NOW + later)
            timers = rounds.books[key].timers
            seconds = expected if voter is first else rounds_module.VOUCH_SECONDS_START
            assert (timers.replay_seconds, timers.vouch_usual_seconds) == (rounds_module.REPLAYS_FACTOR * seconds, seconds)


def test_the_store_refuses_what_these_rounds_would_never_sign_twice(chain: Chain, key: bytes) -> None:
    """With two processes that share a key, for example, the second record is refused, so the second message is never sent."""
    first, second = rounds_of(chain), rounds_of(chain)
    open_all(first, chain)
    open_all(second, chain)
    store: LedgerStore = chain.store
    store.append_records(first.publish_proposal(proposal(chain, key), NOW).records)
    with pytest.raises(LocalProtocolError, match="a second, different vote"):
        store.append_records(second.publish_proposal(proposal(chain, key, variant=1), NOW).records)


def test_messages_that_come_early_count_when_the_round_opens(chain: Chain, key: bytes) -> None:
    rounds = rounds_of(chain)
    rounds.apply_state(chain.ledger.state)
    message = proposal(chain, key)
    assert hear(rounds, chain, chain.people[1], message) is None
    assert hear(rounds, chain, chain.people[2], Ballot(key, 0, bytes(32), ())) is None
    outcome = open_all(rounds, chain)
    assert outcome.counted_messages == [(chain.people[1].public, message)], "what does not belong is not told to people"
    assert set(rounds.books[key].proposals) == {chain.people[1].public}


def test_messages_of_rounds_that_are_over_are_ignored_and_wrong_ones_are_refused(chain: Chain, key: bytes) -> None:
    old = proposal(chain, key)
    chain.play(key)
    rounds = rounds_of(chain)
    open_all(rounds, chain)
    assert hear(rounds, chain, chain.people[1], old) is None
    open_all(rounds, chain)
    assert rounds.books[key].proposals == {}
    with pytest.raises(RemoteProtocolError, match="not-a-trainer"):
        hear(rounds, chain, Identity(bytes(31) + b"s"), proposal(chain, key, round=1))


def with_members(state: LedgerState, *others: Identity) -> LedgerState:
    """Return the state after invitations of members that do not vote."""
    member = Member("newcomer", (), 1, None, 0)
    return state.with_modules(
        members=replace(state.members, members={**state.members.members, **{other.public: member for other in others}})
    )


def test_a_flood_of_early_messages_keeps_out_neither_voters_nor_what_we_said_ourselves(chain: Chain, key: bytes) -> None:
    rounds, others = rounds_of(chain), [Identity(number.to_bytes(32)) for number in range(1, 300)]
    rounds.apply_state(with_members(chain.ledger.state, *others))
    for number in range(future_messages.PER_VOTER_MAX + 10):
        for other in (*others, chain.people[1]) if number < future_messages.PER_MEMBER_MAX + 1 else chain.people[1:2]:
            hear(rounds, chain, other, CutOff(bytes([number]) * 32, 0, ()))
    assert len(rounds.early) == future_messages.OTHERS_MAX + future_messages.PER_VOTER_MAX
    assert hear(rounds, chain, chain.people[2], proposal(chain, key)) is None
    for number in range(50):
        assert hear(rounds, chain, chain.people[0], CutOff(bytes([number]) * 32, 0, ())) is None
    assert hear(rounds, chain, chain.people[0], Ballot(key, 0, chain.ledger.state.jobs.jobs[key].model_root, ())) is None
    open_all(rounds, chain)
    assert set(rounds.books[key].proposals) == {chain.people[2].public}
    assert set(rounds.books[key].ballots) == {chain.people[0].public} and rounds.muted == {(key, 0)}


def test_a_message_that_is_passed_on_often_takes_one_place(chain: Chain, key: bytes) -> None:
    rounds = rounds_of(chain)
    for _ in range(100):
        hear(rounds, chain, chain.people[1], CutOff(key, 0, ()))
    rounds.apply_state(chain.ledger.state)
    for _ in range(100):
        hear(rounds, chain, chain.people[1], CutOff(key, 0, ()))
    assert len(rounds.early) == 1


def test_who_is_expelled_or_has_another_key_says_nothing_early(chain: Chain, key: bytes) -> None:
    rounds, state = rounds_of(chain), chain.ledger.state
    table = dict(state.members.members)
    table[chain.people[1].public] = replace(table[chain.people[1].public], expelled=1)
    table[chain.people[2].public] = replace(table[chain.people[2].public], successor=bytes(32))
    rounds.apply_state(
        state.with_modules(members=replace(state.members, members=table | {bytes(32): table[chain.people[3].public]}))
    )
    for person in chain.people[1:]:
        hear(rounds, chain, person, proposal(chain, key))
    assert len(rounds.early) == 1


def test_what_is_for_no_round_is_forgotten_after_some_heights_but_not_what_we_said(chain: Chain, key: bytes) -> None:
    rounds, state = rounds_of(chain), chain.ledger.state
    rounds.apply_state(state)
    for person in chain.people[:2]:
        hear(rounds, chain, person, CutOff(b"x" * 32, 0, ()))
        hear(rounds, chain, person, CutOff(key, 10**6, ()))
    for height, count in ((future_messages.HEIGHTS_MAX - 1, 4), (future_messages.HEIGHTS_MAX, 2)):
        rounds.apply_state(replace(state, height=state.height + height))
        assert len(rounds.early) == count


def test_two_proposals_of_one_trainer_become_evidence_and_both_are_passed_on(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    liar = chain.people[3]
    pair = [sign_message(liar, chain.id, proposal(chain, key, variant=v)) for v in (0, 1)]
    hear(rounds, chain, liar, proposal(chain, key))
    outcome = hear(rounds, chain, liar, proposal(chain, key, variant=1))
    assert outcome is not None and outcome.evidence == [Evidence(*pair)] and outcome.sends[-1] == pair[1]
    assert rounds.books[key].current_verdict(liar.public) is Verdict.EQUIVOCATION
    assert hear(rounds, chain, liar, proposal(chain, key, variant=2)) == RoundEffects(), "once is enough"


def test_two_cut_offs_of_one_voter_become_evidence(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    liar = chain.people[3]
    pair = [CutOff(key, 0, ()), CutOff(key, 0, (bytes(32),))]
    said = [hear(rounds, chain, liar, message) for message in (pair[0], pair[0], pair[1])]
    assert [outcome.evidence for outcome in said if outcome] == [
        [],
        [],
        [Evidence(*(sign_message(liar, chain.id, message) for message in pair))],
    ]


def test_a_message_of_ours_that_we_do_not_know_is_kept_and_silences_us_for_the_round(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    me = chain.people[0]
    forgotten = sign_message(me, chain.id, proposal(chain, key))
    said = rounds.receive_message(forgotten, proposal(chain, key), NOW)
    assert said is not None and said.records == [OwnRoundStatement("proposal", key, 0, forgotten)] and said.evidence == []
    assert rounds.publish_proposal(proposal(chain, key, variant=1), NOW) == RoundEffects()
    rounds.record_verdict((key, 0), me.public, ACCEPT, NOW)
    assert rounds.sign_due_messages(NOW + 1_000) == RoundEffects() and rounds.own_messages() == [forgotten]


def test_while_we_are_silent_a_proposal_waits(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    rounds.is_silent = True
    assert rounds.publish_proposal(proposal(chain, key), NOW) == RoundEffects() == rounds.sign_due_messages(NOW)
    rounds.is_silent = False
    (signed,) = rounds.sign_due_messages(NOW).sends
    assert rounds.own_messages() == [signed] and rounds.sign_due_messages(NOW) == RoundEffects()


def test_what_was_heard_is_told_once(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    message = proposal(chain, key)
    told = [hear(rounds, chain, chain.people[1], message) for _ in range(2)]
    assert [outcome.counted_messages for outcome in told if outcome] == [[(chain.people[1].public, message)], []]


def test_while_everybody_trains_nobody_is_asked(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    hear(rounds, chain, chain.people[1], proposal(chain, key))
    assert list(rounds.rounds_to_request(NOW + LANGUAGE.proposal_seconds - 0.1)) == []
    assert list(rounds.rounds_to_request(NOW + LANGUAGE.proposal_seconds)) == [(key, 0)]


def test_a_ballot_shows_that_there_is_something_to_ask_for(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    hear(rounds, chain, chain.people[1], Ballot(key, 0, chain.ledger.state.jobs.jobs[key].model_root, ()))
    assert list(rounds.rounds_to_request(NOW + ROUND_REQUEST_SECONDS - 0.1)) == []
    assert rounds.deadline(NOW) == NOW + ROUND_REQUEST_SECONDS and list(
        rounds.rounds_to_request(NOW + ROUND_REQUEST_SECONDS)
    ) == [(key, 0)]


@pytest.mark.parametrize("is_vouch", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_ballot_or_vouch_on_another_proposal_is_asked_about_at_once_and_once_a_round(
    chain: Chain, key: bytes, rounds: OpenRounds, is_first: bool, is_vouch: bool
) -> None:
    liar, voter = chain.people[1:3]
    shown = sign_message(liar, chain.id, proposal(chain, key, variant=1))  # sent to this voter alone
    named = vouch_on(key, shown) if is_vouch else ballot_on(chain, key, shown, Verdict.UNJUDGED)
    said: list[tuple[Identity, Proposal | Ballot | Vouch]] = [(liar, proposal(chain, key)), (voter, named)]
    for who, message in reversed(said) if is_first else said:
        assert list(rounds.rounds_to_request(NOW)) == []
        hear(rounds, chain, who, message)
    assert rounds.deadline(NOW) == NOW and list(rounds.rounds_to_request(NOW)) == [(key, 0)]
    assert list(rounds.rounds_to_request(NOW)) == [], "a voter may have invented what it names"
    outcome = rounds.receive_message(shown, proposal(chain, key, variant=1), NOW)
    assert outcome is not None and outcome.evidence == [Evidence(sign_message(liar, chain.id, proposal(chain, key)), shown)]


def test_a_round_that_cannot_be_closed_is_asked_for_at_each_deadline_and_never_between(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    now, asked = NOW, []
    for _ in range(12):
        assert list(rounds.rounds_to_request(now)) == []
        deadline = rounds.deadline(now)
        assert deadline is not None and deadline > now, "no busy loop"
        now = deadline
        asked += [now - NOW for found in rounds.rounds_to_request(now) if found == (key, 0)]
    first = LANGUAGE.proposal_seconds
    assert asked[:3] == pytest.approx([first, first + ROUND_REQUEST_SECONDS, first + 2 * ROUND_REQUEST_SECONDS])


def test_what_comes_late_for_finished_jobs_takes_no_room_from_what_comes_early(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    chain.play(key)
    chain.play(key)
    open_all(rounds, chain)
    assert chain.ledger.state.jobs.jobs[key].phase is JobPhase.FINISHED
    for number in range(100):
        assert hear(rounds, chain, chain.people[0], Proposal(key, number, bytes(32), bytes(32), 1, bytes(32), None)) is None
    assert len(rounds.early) == 0


def test_a_round_that_can_be_closed_is_not_asked_for(chain: Chain, key: bytes) -> None:
    rounds = rounds_of(chain, me=3)
    open_all(rounds, chain)
    hear(rounds, chain, chain.people[0], proposal(chain, key))
    signed = rounds.books[key].proposals[chain.people[0].public]
    for person in chain.people[:3]:
        hear(rounds, chain, person, ballot_on(chain, key, signed))
    assert list(rounds.rounds_to_request(NOW + 100)) == [(key, 0)], "there is no vouch"
    vouch_all(rounds, chain, key)
    assert rounds.books[key].certificate() is not None and list(rounds.rounds_to_request(NOW + 100)) == []


def test_a_round_that_only_cut_offs_close_still_asks_for_ballots_that_liars_showed_to_others(chain: Chain, key: bytes) -> None:
    rounds = rounds_of(chain, me=3)
    open_all(rounds, chain)
    hear(rounds, chain, chain.people[0], proposal(chain, key))
    signed = rounds.books[key].proposals[chain.people[0].public]
    for person, verdict in zip(chain.people[:3], (ACCEPT, ACCEPT, Verdict.UNJUDGED), strict=True):
        hear(rounds, chain, person, ballot_on(chain, key, signed, verdict))
    for person in chain.people[:2]:
        hear(rounds, chain, person, CutOff(key, 0, ()))
    closing = rounds.books[key].certificate()
    assert closing is not None and closing.cut_offs
    assert list(rounds.rounds_to_request(NOW + 100)) == [(key, 0)]


def test_whoever_asks_gets_all_that_is_held_of_an_open_round_and_nothing_of_others(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    hear(rounds, chain, chain.people[1], proposal(chain, key))
    signed = rounds.books[key].proposals[chain.people[1].public]
    hear(rounds, chain, chain.people[2], vouch_on(key, signed))
    hear(rounds, chain, chain.people[2], ballot_on(chain, key, signed))
    hear(rounds, chain, chain.people[2], CutOff(key, 0, ()))
    held = [codec.decode_message(item.body, future_messages.ROUND_MESSAGES) for item in rounds.messages_of_round((key, 0))]
    assert [type(message) for message in held] == [Proposal, Vouch, Ballot, CutOff]
    assert rounds.messages_of_round((key, 1)) == rounds.messages_of_round((bytes(32), 0)) == []


def test_the_time_for_re_execution_doubles_with_the_patience_of_the_job_and_has_a_floor(chain: Chain, key: bytes) -> None:
    job = chain.ledger.state.jobs.jobs[key]

    def replays(vouches: list[float], patience: int) -> float:
        rounds = OpenRounds(chain.people[0], chain.id, {}, RoundTimings({key: vouches}))
        rounds.open_round(key, replace(job, timeout_doublings=patience), NOW, {}, LANGUAGE.proposal_seconds)
        return rounds.books[key].timers.replay_seconds

    assert replays([2.0], 0) == rounds_module.REPLAYS_FACTOR * 2.0
    assert replays([2.0], 3) == 8 * replays([2.0], 0)
    assert replays([0.0], 0) == rounds_module.REPLAYS_FACTOR * round_state.VOUCH_SECONDS_MIN
    assert replays([], 0) == rounds_module.REPLAYS_FACTOR * rounds_module.VOUCH_SECONDS_START


def test_the_terms_of_an_open_round_are_those_of_the_job(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    keys = frozenset(person.public for person in chain.people)
    assert rounds.books[key].terms == RoundTerms(
        key, 0, chain.ledger.state.jobs.jobs[key].model_root, keys, keys, keys, keys, keys
    )
    assert rounds.books[key].me == chain.people[0].public
    assert OpenRounds(Identity(bytes(32)), chain.id, {}).apply_state(chain.ledger.state)[0] == [(key, 0)]


def test_after_a_wrong_state_was_replaced_a_round_in_which_we_voted_on_it_hears_nothing_more_from_us(
    chain: Chain, key: bytes
) -> None:
    """Our ballot names the wrong model, so it does not count here. A second ballot would be evidence against us."""
    wrong = Ballot(key, 0, bytes(32), ())
    rounds = rounds_of(chain)
    open_all(rounds, chain, spoken={"ballot": sign_message(chain.people[0], chain.id, wrong)})
    hear(rounds, chain, chain.people[1], proposal(chain, key))
    rounds.record_verdict((key, 0), chain.people[1].public, ACCEPT, NOW)
    assert rounds.sign_due_messages(NOW + 1_000) == RoundEffects() and rounds.muted == {(key, 0)}


def tag_of(signed: Signed) -> str:
    message = codec.decode_message(signed.body, future_messages.ROUND_MESSAGES)
    return f"vouch:{message.judgements[0].trainer.hex()}" if isinstance(message, Vouch) else message.TAG


def renew(rounds: OpenRounds, chain: Chain, key: bytes, **changes: Any) -> RoundEffects:
    """Apply a later block that gives the open round to the peers in `changes`. This peer's earlier statements are in its book."""
    spoken = {tag_of(signed): signed for signed in rounds.own_messages()}
    state = chain.ledger.state
    job = replace(state.jobs.jobs[key], opened_height=state.height + 1, **changes)
    later = state.with_modules(jobs=replace(state.jobs, jobs={**state.jobs.jobs, key: job}))
    number = job.round
    assert rounds.apply_state(later) == ([(key, number)], [(key, number)]), "it is opened anew"
    return rounds.open_round(key, job, NOW + 50, spoken, LANGUAGE.proposal_seconds)


def test_a_round_that_is_given_to_others_keeps_what_was_said_in_it_by_those_that_stay(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    people = chain.people
    rounds.publish_proposal(proposal(chain, key), NOW)
    own = rounds.own_messages()[0]
    rounds.record_verdict((key, 0), people[0].public, ACCEPT, NOW)
    for person in people[1:]:
        hear(rounds, chain, person, ballot_on(chain, key, own))
    hear(rounds, chain, people[2], CutOff(key, 0, ()))
    hear(rounds, chain, people[1], CutOff(key, 0, ()))
    said = renew(
        rounds,
        chain,
        key,
        voters=tuple(sorted(person.public for person in (people[0], people[2], people[3], Identity(bytes(31) + b"n")))),
    )
    book = rounds.books[key]
    assert set(book.ballots) == {people[2].public, people[3].public} and set(book.cut_offs) == {people[2].public}
    assert book.proposals == {people[0].public: own} and book.verdicts == {people[0].public: ACCEPT}
    assert (said.records, said.counted_messages, said.evidence, book.opened_at) == ([], [], [], NOW + 50)
    assert {
        type(codec.decode_message(s.body, (Proposal, Ballot, CutOff))) for s in rounds.sign_due_messages(NOW + 1_000).sends
    } >= {Ballot}
    assert rounds.publish_proposal(proposal(chain, key, variant=1), NOW + 60) == RoundEffects(), "our proposal stands"


def test_a_ballot_stays_the_only_one_of_its_key_when_the_round_is_given_to_others(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    people = chain.people
    rounds.publish_proposal(proposal(chain, key), NOW)
    rounds.record_verdict((key, 0), people[0].public, ACCEPT, NOW)
    (ballot,) = rounds.sign_due_messages(NOW + 1_000).sends[:1]
    hear(rounds, chain, people[1], proposal(chain, key))
    renew(rounds, chain, key, trainers=tuple(sorted(person.public for person in people)))
    rounds.record_verdict((key, 0), people[1].public, ACCEPT, NOW + 60)
    for person in people[1:3]:
        hear(rounds, chain, person, ballot_on(chain, key, rounds.books[key].proposals[people[1].public]))
    said = rounds.sign_due_messages(NOW + 2_000).sends
    assert (
        all(isinstance(codec.decode_message(s.body, (Ballot, CutOff)), CutOff) for s in said) and ballot in rounds.own_messages()
    )


def test_a_muted_round_stays_muted_when_it_is_given_to_others(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    rounds.muted |= {(key, 0)}
    renew(rounds, chain, key, fully_audited=False)
    assert rounds.publish_proposal(proposal(chain, key), NOW) == RoundEffects() and rounds.muted == {(key, 0)}


def test_whoever_votes_no_more_in_a_round_may_still_train_in_it(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    hear(rounds, chain, chain.people[1], proposal(chain, key))
    rounds.record_verdict((key, 0), chain.people[1].public, ACCEPT, NOW)
    assert rounds.sign_due_messages(NOW + 1_000).sends
    renew(rounds, chain, key, voters=tuple(sorted(person.public for person in chain.people[1:])))
    assert rounds.muted == frozenset() and len(rounds.publish_proposal(proposal(chain, key), NOW).sends) == 1


def test_what_new_voters_say_before_we_know_that_they_vote_counts_when_we_do(chain: Chain, key: bytes) -> None:
    rounds, people = rounds_of(chain), chain.people
    only = tuple(sorted(person.public for person in people[:3]))
    state = chain.ledger.state
    job = replace(state.jobs.jobs[key], voters=only, reexecutors=only)
    rounds.apply_state(state)
    rounds.open_round(key, job, NOW, {}, LANGUAGE.proposal_seconds)
    ballot = Ballot(key, 0, job.model_root, ())
    with pytest.raises(RemoteProtocolError, match="not-a-voter"):
        hear(rounds, chain, people[3], ballot)
    renew(rounds, chain, key)
    assert rounds.books[key].ballots == {people[3].public: ballot}


def in_minority(rounds: OpenRounds, chain: Chain, key: bytes, now: float) -> float:
    """Open the job's round, let the first of four trainers propose at once, and return T1."""
    number = chain.ledger.state.jobs.jobs[key].round
    open_all(rounds, chain, now)
    hear(rounds, chain, chain.people[0], proposal(chain, key, round=number), now)
    rounds.record_verdict((key, number), chain.people[0].public, ACCEPT, now)
    return rounds.books[key].proposal_timeout_seconds


def closes_at_pace(rounds: OpenRounds, chain: Chain, key: bytes, now: float, pace: float) -> None:
    """Close a round in which three of four trainers propose after `pace` seconds, and the last one never does."""
    number = chain.ledger.state.jobs.jobs[key].round
    for person in chain.people[:3]:
        hear(rounds, chain, person, proposal(chain, key, round=number), now + pace)
        rounds.record_verdict((key, number), person.public, ACCEPT, now + pace)
    chain.play(key)


def test_a_round_learns_from_those_before_how_long_a_minority_waits(chain: Chain) -> None:
    rounds, key = rounds_of(chain), chain.start(replace(LANGUAGE, rounds=6))
    assert in_minority(rounds, chain, key, NOW) == LANGUAGE.proposal_seconds, "nothing is known yet"
    closes_at_pace(rounds, chain, key, NOW, 4.0)
    assert in_minority(rounds, chain, key, NOW) == round_state.MINORITY_FACTOR * 4.0
    assert rounds.books[key].timers.usual_trainers == {person.public for person in chain.people}
    closes_at_pace(rounds, chain, key, NOW, 2.0)
    assert in_minority(rounds, chain, key, NOW) == round_state.MINORITY_FACTOR * 4.0, "the slower of two counts"


@pytest.mark.parametrize(
    ("paces", "usual"),
    [
        pytest.param((2.0, 2.0, 40.0, 0.0, 2.0, 2.0), 2.0, id="it stood still; what was there when a round opened says nothing"),
        pytest.param((2.0, 2.0, 5.0) * 3, 5.0, id="slow in every third round"),
    ],
)
def test_what_is_slow_once_is_forgotten_and_what_is_slow_in_every_third_round_is_usual(
    chain: Chain, paces: tuple[float, ...], usual: float
) -> None:
    rounds, key = rounds_of(chain), chain.start(replace(LANGUAGE, rounds=12))
    for pace in paces:
        in_minority(rounds, chain, key, NOW)
        closes_at_pace(rounds, chain, key, NOW, pace)
    assert in_minority(rounds, chain, key, NOW) == round_state.MINORITY_FACTOR * usual


def test_what_one_job_learned_is_not_said_of_another_nor_kept_when_it_ends(chain: Chain) -> None:
    rounds, key = rounds_of(chain), chain.start(LANGUAGE)
    for _ in range(2):
        in_minority(rounds, chain, key, NOW)
        closes_at_pace(rounds, chain, key, NOW, 4.0)
    assert in_minority(rounds, chain, chain.start(replace(LANGUAGE, name="next")), NOW) == LANGUAGE.proposal_seconds
    assert rounds.measured.paces == {}


def test_a_round_without_a_majority_teaches_nothing(chain: Chain) -> None:
    rounds, key = rounds_of(chain), chain.start(replace(LANGUAGE, rounds=3))
    in_minority(rounds, chain, key, NOW)
    chain.play(key)
    in_minority(rounds, chain, key, NOW)
    assert rounds.measured.paces == {}


def test_who_has_learned_nothing_waits_as_the_others_do_once_a_job_accepts_updates(chain: Chain) -> None:
    """Otherwise a peer that has just come back, and one lost peer, would make each round as long as the job allows."""
    key = chain.start(replace(LANGUAGE, rounds=3))
    chain.play(key)
    back = rounds_of(chain)
    assert in_minority(back, chain, key, NOW) == round_state.MINORITY_SECONDS_MIN
    assert back.books[key].timers.usual_trainers == {person.public for person in chain.people}, "who was usual is not known"
    late = rounds_of(chain)
    open_all(late, chain)
    hear(late, chain, chain.people[0], proposal(chain, key, round=1), NOW + 19)
    late.record_verdict((key, 1), chain.people[0].public, ACCEPT, NOW + 19)
    assert late.books[key].proposal_timeout_seconds == round_state.PROPOSALS_FACTOR * 19


def test_what_was_measured_outlives_a_state_that_a_snapshot_replaced(chain: Chain) -> None:
    before, key = rounds_of(chain), chain.start(replace(LANGUAGE, rounds=3))
    in_minority(before, chain, key, NOW)
    closes_at_pace(before, chain, key, NOW, 4.0)
    before.apply_state(chain.ledger.state)
    assert (
        in_minority(OpenRounds(chain.people[0], chain.id, {}, before.measured), chain, key, NOW)
        == round_state.MINORITY_FACTOR * 4.0
    )


@pytest.mark.parametrize(("present", "arrival"), [(4, 0.0), (4, 20.0), (3, 0.0), (3, 20.0)])
def test_the_usual_time_of_a_vouch_contains_no_wait_for_a_trainer(chain: Chain, present: int, arrival: float) -> None:
    """Otherwise a dead or slow trainer, awaited in each round, would make each wait longer than the one before."""
    assert replays_after(chain, [[2.0] * 4, [11.0] * present], arrival) == rounds_module.REPLAYS_FACTOR * 11.0


@pytest.mark.parametrize(
    ("rounds_before", "usual"),
    [
        pytest.param([[3.0, 60.0, 3.0, 2.0]], 3.0, id="one liar"),
        pytest.param([[3.0, 60.0, 60.0, 2.0]], 3.0, id="its buffer is late, too"),
        pytest.param([[5_000.0] * 4] * 3, LANGUAGE.proposal_seconds, id="no longer than proposals may take"),
        pytest.param([[2.0] * 4, [2.0] * 4, [11.0] * 4, [2.0] * 4, [2.0] * 4], 2.0, id="a peer that stood still"),
        pytest.param([[2.0] * 4, [2.0] * 4, [5.0] * 4] * 3, 5.0, id="slow in every third round"),
        pytest.param([[3.0] * 4, []], 3.0, id="a round without a vouch"),
    ],
)
def test_a_quantile_of_a_round_and_the_upper_quartile_of_rounds_is_the_usual_time_of_a_vouch(
    chain: Chain, rounds_before: list[list[float]], usual: float
) -> None:
    assert LANGUAGE.proposal_seconds == 60.0
    assert replays_after(chain, rounds_before) == rounds_module.REPLAYS_FACTOR * usual


def test_the_usual_time_of_one_job_is_not_that_of_another(chain: Chain, key: bytes) -> None:
    rounds = OpenRounds(chain.people[0], chain.id, {}, RoundTimings({bytes(32): [1.0], key: [7.0]}))
    rounds.open_round(key, chain.ledger.state.jobs.jobs[key], NOW, {}, LANGUAGE.proposal_seconds)
    assert rounds.books[key].timers.vouch_usual_seconds == 7.0


def replays_after(chain: Chain, rounds_before: list[list[float]], arrival: float = 0.0) -> float:
    """Return T2 − T1 of a peer that does not vote.

    Each earlier round has a list of times from a proposal's delivery to its first vouch. Other re-executors vouch a minute later,
    since they were not called at once.
    """
    key = chain.start(replace(LANGUAGE, rounds=len(rounds_before) + 1))
    rounds, people = OpenRounds(Identity(bytes(31) + b"l"), chain.id, {}), {person.public: person for person in chain.people}
    for number, times in enumerate(rounds_before):
        open_all(rounds, chain)
        vouches = rounds.books[key].vouching.vouches
        for trainer, seconds in zip(chain.people, times, strict=False):
            hear(rounds, chain, trainer, proposal(chain, key, round=number), NOW)
            rounds.record_verdict((key, number), trainer.public, ACCEPT, NOW + arrival)
            said = vouch_on(key, rounds.books[key].proposals[trainer.public], round=number)
            first, *others = vouches.reexecutors(trainer.public)
            hear(rounds, chain, people[first], said, NOW + arrival + seconds)
            for other in others:
                hear(rounds, chain, people[other], said, NOW + arrival + seconds + 60)
        chain.play(key)
    open_all(rounds, chain)
    assert rounds.books[key].timers.vouch_usual_seconds * rounds_module.REPLAYS_FACTOR == rounds.books[key].timers.replay_seconds
    return rounds.books[key].timers.replay_seconds


# Vouches --------------------------------------------------------------------------------------------------------------


def test_a_vouch_is_recorded_before_it_is_sent_and_survives_a_restart(chain: Chain, key: bytes, before: OpenRounds) -> None:
    open_all(before, chain)
    trainer = trainer_of(before, chain, key)
    signed = reexecuted(before, chain, key, trainer)
    said = before.sign_due_messages(NOW)
    (record,), (vouch,) = said.records, said.sends
    assert record == OwnRoundStatement(f"vouch:{trainer.public.hex()}", key, 0, vouch)
    assert codec.decode_message(vouch.body, (Vouch,)) == vouch_on(key, signed)
    assert said.counted_messages == [(chain.people[0].public, vouch_on(key, signed))] and said.evidence == []
    assert before.sign_due_messages(NOW) == RoundEffects() and before.own_messages() == [vouch]

    after, again = restarted(chain, key, record)
    assert again.sends == after.own_messages() == [vouch] and again.records == []
    reexecuted(after, chain, key, trainer, Verdict.REPLAY)
    assert after.books[key].vouching.own_judgements[trainer.public].verdict is ACCEPT, "it was said"
    assert [tag_of(sent) for sent in after.sign_due_messages(NOW + 1_000).sends] == ["ballot"] and vouch in after.own_messages()
    assert set(after.books[key].vouching.assigned_at) == set(), "the proposal is not re-executed again"


def test_several_vouches_of_a_round_have_a_place_each_in_the_store(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    for trainer in chain.people[1:]:
        reexecuted(rounds, chain, key, trainer)
        (record,) = rounds.sign_due_messages(NOW).records
        chain.store.append_records([record])
    assert set(chain.store.round_votes(chain.people[0].public, key, 0)) == {
        f"vouch:{trainer.public.hex()}" for trainer in chain.people[1:]
    }


def test_a_vouch_of_another_is_passed_on_once(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    voter = chain.people[2]
    said = vouch_on(key, sign_message(chain.people[1], chain.id, proposal(chain, key)))
    first, second = (hear(rounds, chain, voter, said) for _ in range(2))
    assert (
        first == RoundEffects(sends=[sign_message(voter, chain.id, said)], counted_messages=[(voter.public, said)])
        and second == RoundEffects()
    )


def test_two_vouches_that_contradict_each_other_become_evidence_and_both_are_passed_on(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    liar = chain.people[3]
    one, two = (sign_message(person, chain.id, proposal(chain, key)) for person in chain.people[1:3])
    said = [vouch_on(key, one), vouch_on(key, one, two, verdict=Verdict.REPLAY)]
    pair = [sign_message(liar, chain.id, message) for message in said]
    hear(rounds, chain, liar, said[0])
    outcome = hear(rounds, chain, liar, said[1])
    assert outcome is not None and outcome.evidence == [Evidence(*pair)] and outcome.sends == pair
    for again in (*said, vouch_on(key, one, verdict=Verdict.NORM)):
        assert hear(rounds, chain, liar, again) == RoundEffects(), "once is enough, or peers would pass it on for ever"


def test_two_vouches_on_different_trainers_prove_nothing(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    voter = chain.people[3]
    for trainer, verdict in zip(chain.people[1:3], (ACCEPT, Verdict.REPLAY), strict=True):
        outcome = hear(
            rounds, chain, voter, vouch_on(key, sign_message(trainer, chain.id, proposal(chain, key)), verdict=verdict)
        )
        assert outcome is not None and outcome.evidence == [] and len(outcome.sends) == 1


def test_a_vouch_of_ours_that_we_do_not_know_is_kept_and_silences_us_for_the_round(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    me = chain.people[0]
    trainer = trainer_of(rounds, chain, key)
    forgotten = vouch_on(key, sign_message(trainer, chain.id, proposal(chain, key)), verdict=Verdict.REPLAY)
    said = hear(rounds, chain, me, forgotten)
    signed = sign_message(me, chain.id, forgotten)
    assert said is not None and (said.sends, said.evidence) == ([], [])
    assert said.records == [OwnRoundStatement(f"vouch:{trainer.public.hex()}", key, 0, signed)]
    reexecuted(rounds, chain, key, trainer)
    assert (
        rounds.sign_due_messages(NOW + 1_000) == RoundEffects()
        and rounds.own_messages() == [signed]
        and rounds.muted == {(key, 0)}
    )


def test_a_forgotten_vouch_that_names_what_we_have_vouched_for_since_silences_us_and_accuses_nobody(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    me = chain.people[0]
    early_one, late_one = sorted(chain.people[1:3], key=lambda person: person.public)
    signed = reexecuted(rounds, chain, key, early_one)
    rounds.sign_due_messages(NOW)
    said = hear(rounds, chain, me, vouch_on(key, signed, sign_message(late_one, chain.id, proposal(chain, key))))
    assert said == RoundEffects() and rounds.muted == {(key, 0)} and len(rounds.own_messages()) == 1


def test_a_vouch_that_came_early_counts_when_the_round_opens_and_is_passed_on(chain: Chain, key: bytes) -> None:
    rounds, (trainer, voter) = rounds_of(chain), chain.people[1:3]
    rounds.apply_state(chain.ledger.state)
    signed = sign_message(trainer, chain.id, proposal(chain, key))
    assert hear(rounds, chain, voter, vouch_on(key, signed)) is None
    assert open_all(rounds, chain).sends == [sign_message(voter, chain.id, vouch_on(key, signed))]
    assert rounds.books[key].vouching.vouches.accepting_voters(trainer.public, signed_body_digest(signed)) == [voter.public]


def test_a_renewed_round_keeps_the_vouches_of_its_re_executors_and_drops_those_of_others(
    chain: Chain, key: bytes, rounds: OpenRounds
) -> None:
    people = chain.people
    hear(rounds, chain, people[3], proposal(chain, key))
    signed = rounds.books[key].proposals[people[3].public]
    for person in people[1:3]:
        hear(rounds, chain, person, vouch_on(key, signed))
    said = renew(rounds, chain, key, reexecutors=tuple(sorted(person.public for person in (people[0], people[1], people[3]))))
    vouches = rounds.books[key].vouching.vouches
    assert vouches.accepting_voters(people[3].public, signed_body_digest(signed)) == [people[1].public]
    assert (said.sends, said.records, said.evidence) == ([], [], [])
    assert [item.signer for item in rounds.messages_of_round((key, 0))] == [people[3].public, people[1].public]


def test_a_renewed_round_keeps_our_finding_that_we_have_not_vouched_for_yet(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    signed = reexecuted(rounds, chain, key, chain.people[1])
    renew(rounds, chain, key)
    (vouch,) = rounds.sign_due_messages(NOW + 50).sends
    assert codec.decode_message(vouch.body, (Vouch,)) == vouch_on(key, signed)


def test_a_voter_that_re_executes_no_more_still_votes_in_a_renewed_round(chain: Chain, key: bytes, rounds: OpenRounds) -> None:
    people = chain.people
    reexecuted(rounds, chain, key, people[1])
    assert [tag_of(sent) for sent in rounds.sign_due_messages(NOW).sends] == [f"vouch:{people[1].public.hex()}"]
    renew(rounds, chain, key, reexecutors=tuple(sorted(person.public for person in people[1:])))
    assert rounds.muted == frozenset()
    assert [tag_of(sent) for sent in rounds.sign_due_messages(NOW + 2_000).sends] == ["ballot"]


def test_a_vouch_of_a_voter_that_is_not_known_to_re_execute_yet_counts_when_it_is(chain: Chain, key: bytes) -> None:
    rounds, people = rounds_of(chain), chain.people
    state = chain.ledger.state
    job = replace(state.jobs.jobs[key], reexecutors=tuple(sorted(person.public for person in people[:3])))
    rounds.apply_state(state)
    rounds.open_round(key, job, NOW, {}, LANGUAGE.proposal_seconds)
    signed = sign_message(people[1], chain.id, proposal(chain, key))
    with pytest.raises(RemoteProtocolError, match="not-a-voter"):
        hear(rounds, chain, people[3], vouch_on(key, signed))
    renew(rounds, chain, key)
    assert rounds.books[key].vouching.vouches.accepting_voters(people[1].public, signed_body_digest(signed)) == [people[3].public]


# Trainers that come back ----------------------------------------------------------------------------------------------


def returning(chain: Chain, rounds: int, hears: Callable[[int], float | None], me: int = 0, rejected: int = 1) -> list[bool]:
    """Return, for rounds that open at second 0, 1, …, whether the peer waits for the last trainer, which is never accepted.

    `hears` returns the time of the trainer's last message, or None without a link.
    """
    key = chain.start(replace(LANGUAGE, rounds=rounds + 1))
    mine, waited = rounds_of(chain, me), []
    for number in range(rounds):
        mine.apply_state(chain.ledger.state)
        job = chain.ledger.state.jobs.jobs[key]
        last, heard = job.trainers[-1], hears(number)
        links = {} if heard is None else {last: NOW + heard}
        mine.open_round(key, job, NOW + number, {}, LANGUAGE.proposal_seconds, links)
        waited.append(last in mine.books[key].awaited_trainers)
        assert (last in job.awaited) == (number == 0 or not rejected)
        chain.play(key, rejected, Verdict.NORM)  # a verdict that suspends nobody
    return waited


@pytest.mark.parametrize(
    ("rounds", "since", "expected"),
    [
        pytest.param(40, 0, [0, 2, 4, 8, 16, 32], id="who was missing once, half as often each time"),
        pytest.param(30, 25, [0, 26, 28], id="whoever comes back, soon, whatever it missed"),
        pytest.param(
            70, 7, [0, 8, 12, 16, 32, 64], id="idle ones in the same rounds, or each of many would cost rounds of its own"
        ),
    ],
)
def test_a_trainer_that_is_alive_is_waited_for_again(chain: Chain, rounds: int, since: int, expected: list[int]) -> None:
    """Otherwise a slow trainer that was missing once would never be accepted again."""
    waited = returning(chain, rounds, lambda number: number - 0.5 if number >= since else None)
    assert [number for number, waits in enumerate(waited) if waits] == expected


@pytest.mark.parametrize("heard", [lambda number: None, lambda number: min(number - 0.5, 0.5)])
def test_whoever_is_dead_or_stopped_is_not_waited_for(chain: Chain, heard: Callable[[int], float | None]) -> None:
    """A voter with a link and without messages has a stopped process."""
    assert returning(chain, 20, heard) == [True] + [False] * 19


def test_what_is_accepted_is_forgotten(chain: Chain) -> None:
    mine = rounds_of(chain)
    key = chain.start(replace(LANGUAGE, rounds=9))
    waited = []
    for number, rejected in enumerate((1, 1, 1, 0, 1, 1, 1)):
        mine.apply_state(chain.ledger.state)
        job = chain.ledger.state.jobs.jobs[key]
        mine.open_round(key, job, NOW + number, {}, LANGUAGE.proposal_seconds, dict.fromkeys(job.trainers, NOW + number - 0.5))
        waited.append(job.trainers[-1] in mine.books[key].timers.returning)
        chain.play(key, rejected=rejected)
    assert waited == [False, False, True, False, False, False, True]  # not only in round 8


def test_the_pause_is_bounded(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "RETURN_ROUNDS_MAX", 4)
    waited = returning(chain, 26, lambda number: number - 0.5)
    assert [number for number, waits in enumerate(waited) if waits] == [0, 2, 4, 8, 12, 16, 20, 24]


def test_our_own_trainer_needs_no_link(chain: Chain) -> None:
    assert returning(
        chain, 3, lambda number: None, me=max(range(len(chain.people)), key=lambda place: chain.people[place].public)
    ) == [True, False, True]
