"""Compact bodies: a peer that holds all parts expands the same bytes, and any other peer expands none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.blocks import application as short_module
from ledger.blocks.application import (
    WHOLE_BYTES_MAX,
    CompactBody,
    CompactRoundCertificate,
    LedgerApplication,
    compact_body,
)
from ledger.blocks.mempool import signed_digest
from ledger.jobs import StartJob
from ledger.ledger_state import EMPTY_BODY, BlockBody, CurrentState, decode_body
from ledger.members import RegisterRoles
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import sign_message
from protocol.limits import CLOSING_VOUCHES_MAX
from protocol.messages import Ballot, Judgement, Proposal, Vouch
from protocol.verdicts import Verdict
from rounds.round_state import OpenRoundState
from rounds.round_terms import RoundTerms
from tests.ledger.world import LANGUAGE, PEOPLE, SCRATCH, TIMERS, World, world_with_job
from tests.sim.keys import FastSigner

ACCEPT = Verdict.ACCEPT


def busy() -> tuple[World, bytes]:
    """Return a world whose next block closes a round and carries evidence and transactions."""
    world, key = world_with_job(spec=LANGUAGE + b":9")
    world.vote(key, dict.fromkeys(world.job(key).trainers, ACCEPT))
    for ahead in (1, 2, 3):
        world.ledger.mempool.add_transaction(world.tx(PEOPLE[0], "member/register", RegisterRoles(()), ahead))
    world.ledger.add_evidence(world.double(PEOPLE[3]))
    body = world.ledger.make_body(world.state.height + 1, 0)
    assert body is not None and len(body) > WHOLE_BYTES_MAX
    return world, body


def test_what_is_held_comes_out_as_it_went_in_and_takes_less_on_the_way() -> None:
    world, body = busy()
    short = world.ledger.make_compact_body(body)
    assert world.ledger.expand_body(short) == body and len(short) < len(body)
    content = decode_body(body)
    assert content.evidence and content.round_certificates and len(content.transactions) == 3


def test_a_small_body_goes_whole_so_that_nobody_need_hold_anything_for_it() -> None:
    world = World()
    stranger = LedgerApplication(world.rules, CurrentState(world.state), world.state.state_root)
    for body in (EMPTY_BODY, codec.encode(BlockBody((), (), (world.tx(PEOPLE[0], "member/register", RegisterRoles(())),)))):
        assert stranger.expand_body(world.ledger.make_compact_body(body)) == body
    assert len(world.ledger.make_compact_body(EMPTY_BODY)) < 20


def holder(world: World, lacks: str | None = None) -> LedgerApplication:
    """Return a peer with the same state that holds all parts, except the first one of the kind `lacks`."""
    ledger = LedgerApplication(world.rules, CurrentState(world.state), world.state.state_root)
    ((key, full),) = world.ledger.rounds.items()
    book = ledger.rounds[key] = OpenRoundState(full.terms, None, 0.0, TIMERS)
    for signed in list(full.proposals.values())[lacks == "proposals" :]:
        book.add_proposal(signed, codec.decode_message(signed.body, (Proposal,)))
    for signed in list(full.signed_ballots.values())[lacks == "ballots" :]:
        book.add_ballot(signed, codec.decode_message(signed.body, (Ballot,)), 0.0)
    closing = full.certificate()
    assert closing is not None
    for signed in closing.vouches[lacks == "vouches" :]:
        book.add_vouch(signed, codec.decode_message(signed.body, (Vouch,)), 0.0)
    for signed in list(world.ledger.mempool)[lacks == "transactions" :]:
        ledger.mempool.add_transaction(signed)
    return ledger


def test_a_part_that_is_not_here_is_waited_for() -> None:
    world, body = busy()
    for part in ("ballots", "proposals", "vouches", "transactions"):
        assert holder(world, part).expand_body(compact_body(body)) is None, part
    assert holder(world).expand_body(compact_body(body)) == body
    assert (
        LedgerApplication(world.rules, CurrentState(world.state), world.state.state_root).expand_body(compact_body(body)) is None
    ), "no round is open here"


def test_a_ballot_that_comes_later_completes_it() -> None:
    world, body = busy()
    peer, (key,) = holder(world, "ballots"), world.ledger.rounds
    assert peer.expand_body(compact_body(body)) is None
    missing = next(iter(world.ledger.rounds[key].signed_ballots.values()))
    peer.rounds[key].add_ballot(missing, codec.decode_message(missing.body, (Ballot,)), 0.0)
    assert peer.expand_body(compact_body(body)) == body


def test_a_vouch_that_comes_later_completes_it() -> None:
    world, body = busy()
    peer, (key,) = holder(world, "vouches"), world.ledger.rounds
    assert peer.expand_body(compact_body(body)) is None
    missing = decode_body(body).round_certificates[0].vouches[0]
    peer.rounds[key].add_vouch(missing, codec.decode_message(missing.body, (Vouch,)), 0.0)
    assert peer.expand_body(compact_body(body)) == body


def test_a_second_ballot_or_other_signature_bytes_do_not_stand_for_what_was_condensed() -> None:
    world, body = busy()
    content = decode_body(body)
    closing = content.round_certificates[0]
    ballot = codec.decode_message(closing.ballots[0].body, (Ballot,))
    voter = next(person for person in PEOPLE if person.public == closing.ballots[0].signer)
    second = sign_message(voter, world.chain, replace(ballot, judgements=()))
    for other in (second, replace(closing.ballots[0], signature=bytes(64))):
        changed = replace(content, round_certificates=(replace(closing, ballots=(other, *closing.ballots[1:])),))
        assert world.ledger.expand_body(compact_body(codec.encode(changed))) is None
    changed = replace(content, transactions=(replace(content.transactions[0], signature=bytes(64)),))
    assert world.ledger.expand_body(compact_body(codec.encode(changed))) is None


def test_the_round_before_or_after_is_not_taken_for_the_open_one() -> None:
    world, body = busy()
    content = decode_body(body)
    other = replace(content, round_certificates=(replace(content.round_certificates[0], round=1),))
    assert world.ledger.expand_body(compact_body(codec.encode(other))) is None
    assert world.ledger.expand_body(compact_body(body)) == body
    world.decide_body(body)
    assert world.ledger.expand_body(compact_body(body)) is None, "closed: its book is gone"
    assert world.ledger._indexed == {}, "and nothing is kept of it"
    (key,) = world.ledger.rounds
    world.vote(key, dict.fromkeys(world.job(key).trainers, ACCEPT))
    following = world.ledger.make_body(world.state.height + 1, 0)
    assert following is not None and world.ledger.expand_body(compact_body(following)) == following


@given(st.binary(max_size=400))
def test_bytes_that_are_no_short_body_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        World().ledger.expand_body(b"\x00" + data)


@given(st.data())
@settings(max_examples=200)
def test_a_changed_short_body_is_refused_waited_for_or_stands_for_another_body(data: st.DataObject) -> None:
    world, body = SHARED
    short = world.ledger.make_compact_body(body)
    place = data.draw(st.integers(0, len(short) - 1))
    changed = short[:place] + bytes([short[place] ^ data.draw(st.integers(1, 255))]) + short[place + 1 :]
    try:
        found = world.ledger.expand_body(changed)
    except RemoteProtocolError:
        return
    assert found is None or (found != body and compact_body(found) == changed)


SHARED = busy()


@given(st.data())
@settings(max_examples=50)
def test_every_body_of_what_is_held_goes_round(data: st.DataObject) -> None:
    world = World()
    for key in [world.start(PEOPLE[i], spec) for i, spec in enumerate((LANGUAGE, SCRATCH, SCRATCH))]:
        job = world.job(key)
        voters = data.draw(st.sets(st.sampled_from(job.voters), max_size=4))
        world.vote(key, dict.fromkeys(job.trainers, data.draw(st.sampled_from((ACCEPT, Verdict.REPLAY)))), tuple(sorted(voters)))
    for number in range(data.draw(st.integers(0, 12))):
        world.ledger.mempool.add_transaction(
            world.tx(PEOPLE[number % 4], "job/start", StartJob(b"x" * number), ahead=1 + number // 4)
        )
    body = world.ledger.make_body(world.state.height + 1, 0) or EMPTY_BODY
    chosen = data.draw(st.lists(st.sampled_from(list(world.ledger.mempool)), max_size=20)) if len(world.ledger.mempool) else []
    for each in (body, codec.encode(replace(decode_body(body), transactions=tuple(chosen)))):
        short = world.ledger.make_compact_body(each)
        assert world.ledger.expand_body(short) == each and len(short) <= len(each) + 16


def test_a_few_digests_named_a_thousand_times_cost_no_memory() -> None:
    world = World()
    large = world.tx(PEOPLE[0], "job/start", StartJob(bytes(200 << 10)))
    world.ledger.mempool.add_transaction(large)
    with pytest.raises(RemoteProtocolError, match="oversized"):
        world.ledger.expand_body(codec.encode(CompactBody((), (), (signed_digest(large),) * 1_000)))


def hundred(voters: int = 100, trainers: int = 100) -> tuple[LedgerApplication, bytes]:
    """Return a round with one hundred ballots on one hundred proposals, and a vouch of every voter, all of them held."""
    people = sorted((FastSigner(f"one of many {i}") for i in range(max(voters, trainers))), key=lambda person: person.public)
    chain, job, root = bytes(32), b"j" * 32, b"r" * 32
    keys = [person.public for person in people]
    voting, training = frozenset(keys[:voters]), frozenset(keys[:trainers])
    book = OpenRoundState(RoundTerms(job, 0, root, voting, voting, training, training, training), None, 0.0, TIMERS)
    for person in people[:trainers]:
        proposal = Proposal(job, 0, root, person.public, 1 << 20, person.public, person.public)
        book.add_proposal(sign_message(person, chain, proposal), proposal)
    judged = tuple(Judgement(key, short_module.signed_digest(book.proposals[key]), ACCEPT) for key in sorted(training))
    ballot = Ballot(job, 0, root, judged)
    vouch = Vouch(job, 0, judged)
    for person in people[:voters]:
        book.add_ballot(sign_message(person, chain, ballot), ballot, 0.0)
        book.add_vouch(sign_message(person, chain, vouch), vouch, 0.0)
    tables = (book.signed_ballots, {}, book.proposals, book.vouching.signed)
    parts = (tuple(sorted(table.values(), key=lambda signed: signed.signer)) for table in tables)
    body = codec.encode(BlockBody((short_module.RoundCertificate(job, 0, *parts),), (), ()))
    ledger = World().ledger
    ledger.rounds = {job: book}
    return ledger, body


def test_a_round_of_a_hundred_voters_and_trainers_travels_in_a_hundredth_of_its_bytes() -> None:
    ledger, body = hundred()
    short = compact_body(body)
    assert len(body) > 1_400_000 and len(short) < 11_000
    assert ledger.expand_body(short) == body


def test_only_what_is_new_in_a_book_is_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, body = hundred(20, 20)
    short, hashed = compact_body(body), []
    real = short_module.signed_digest
    monkeypatch.setattr(short_module, "signed_digest", lambda signed: hashed.append(signed) or real(signed))
    for _ in range(5):
        assert ledger.expand_body(short) == body
    assert len(hashed) == 60


def test_a_short_closing_is_bounded_like_a_closing() -> None:
    closing = CompactRoundCertificate(bytes(32), 0, (bytes(32),), (), (), ())
    many = (bytes(32),) * (CLOSING_VOUCHES_MAX + 1)
    for other in (replace(closing, ballots=many[:201]), replace(closing, vouches=many)):
        with pytest.raises(RemoteProtocolError, match="oversized"):
            World().ledger.expand_body(codec.encode(CompactBody((other,), (), ())))
