"""Vouches as people see them: in the calls of a peer, and in the tables of the commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import trio

from demo.demo_report import replays_per_round
from ledger.audits.audit_state import JobAudits
from ledger.jobs import JobsState, TrainerRecord, VouchRecord
from peer.api.handlers.local_peer_handler import describe_own_limits, limited_reexecutors, suspended_trainers
from peer.commands import view_tables
from peer.roles.voter import Voter
from peer.runtime.auditor import suspension_reason
from protocol.identity import Signed, peer_id
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from rounds.vouch_set import reexecutor_order
from tests.ledger.world import LANGUAGE, PEOPLE, World
from tests.peer import fake_api
from tests.peer.network import network, one_root, poll, service_of
from tests.peer.test_views import KEYS, NAMES, round_view, shown
from training.round_context import REPLAYS, OpenRoundContext


class Slow(Voter):
    """Never finishes the checks of a proposal, unless it made it, or is called first to re-execute it."""

    async def check_proposal(self, round: OpenRoundContext, signed: Signed, proposal: Proposal) -> Verdict:
        if round.me not in (signed.signer, reexecutor_order(round.terms, signed.signer)[0]):
            await trio.sleep_forever()
        return await super().check_proposal(round, signed, proposal)


async def test_a_closed_round_names_the_voters_whose_vouches_its_block_carries(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        await one_root(made.seats, await made.seats[0].scratch())
        trainer, voters = peer_id(made.seats[0].public), {peer_id(seat.public) for seat in made.seats}
        told = [await service_of(seat).rounds(1) for seat in made.seats]
        assert {round.vouchers[trainer] for (round,) in told} == {(vouchers := told[0][0].vouchers[trainer])}
        assert set(vouchers) < voters - {trainer} and len(vouchers) == 1, "of the others f = 1 is called"
        (votes,) = await service_of(made.seats[3]).votes(1)
        assert votes.vouches == {vouchers[0]: {trainer: "accept"}}
        assert votes.votes[trainer] == {trainer: "accept"}


async def test_each_peer_counts_the_re_executions_that_it_has_begun(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        job = await made.seats[0].scratch()
        await one_root(made.seats, job)
        (view,) = await service_of(made.seats[0]).rounds(1)
        (voter,) = view.vouchers[peer_id(made.seats[0].public)]
        for seat in made.seats:
            counted = seat.store.measurements(job).get(0, {}).get(REPLAYS)
            assert counted == (1.0 if peer_id(seat.public) == voter else None)


def test_the_demo_reports_re_executions_of_each_machine_and_round() -> None:
    replays: dict[str, dict[int, float]] = {"a": {0: 1.0, 1: 2.0}, "b": {1: 1.0, 3: 2.0}, "c": {}}
    assert replays_per_round(replays) == {"a": 1.0, "b": 1.0, "c": 0.0}
    assert replays_per_round({"a": {}, "b": {}}) == {}


async def test_an_open_round_shows_each_vouch_that_has_come(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        seats = [await made.start(seat, Slow()) for seat in made.seats]
        job, trainer = await seats[0].scratch(), seats[0].public
        for seat in seats:
            await poll(lambda seat=seat: bool(seat.driver.node.rounds.books[job].vouching.signed))
            (votes,) = await service_of(seat).votes(0)
            voter = reexecutor_order(seat.driver.node.rounds.books[job].terms, trainer)[0]
            assert (votes.height, votes.vouches) == (None, {peer_id(voter): {peer_id(trainer): "accept"}})


def test_rounds_name_the_voters_that_vouch_for_each_accepted_update() -> None:
    first, second, third, *_ = KEYS
    view = replace(round_view(), vouchers={first: (second, third), second: (first,)})
    names = [NAMES[key] for key in KEYS]
    told = view_tables.format_verdicts(view, NAMES)
    assert told.startswith(f"accept: {names[0]} ({names[1]}, {names[2]} vouch) {names[1]} ({names[0]} vouches) {names[2]} ")
    for width in (80, 120):
        printed = " ".join(shown(view_tables.rounds([view], NAMES), width).split())
        assert printed.count("vouch)") == printed.count("vouches)") == 1


def test_votes_show_vouches_beside_the_ballot_and_before_it() -> None:
    first, second, third, liar = KEYS[0], KEYS[1], KEYS[2], KEYS[6]
    (_, open_round) = fake_api.VOTES
    vouches = {
        first: {second: "accept", third: "accept", liar: "replay"},
        second: {third: "unjudged"},
    }
    view = replace(open_round, votes={first: {second: "accept"}}, vouches=vouches)
    lines = shown(view_tables.votes([view], NAMES), 400).splitlines()
    told = {line.split()[3]: line for line in lines}
    vouched = f"vouches for {NAMES[second]}, {NAMES[third]}; rejects {NAMES[liar]} (replay)"
    assert f"{NAMES[second]}: accept; {vouched}" in told[NAMES[first]]
    assert f"no ballot yet; unsure of {NAMES[third]}" in told[NAMES[second]] and len(lines) == 3


def test_a_re_executor_that_is_not_asked_or_asked_last_is_shown_with_the_reason() -> None:
    world = World()
    job = world.job(world.start(spec=LANGUAGE))
    silent, liar, both, former, honest = (person.public for person in PEOPLE[:5])
    records = {
        silent: VouchRecord(assigned_last_until=28),
        liar: VouchRecord(suspended_until=30),
        both: VouchRecord(assigned_last_until=28, suspended_until=20),
        former: VouchRecord(assigned_last_until=9, suspended_until=9, missed_vouches=1),
        honest: VouchRecord(missed_vouches=2, wrong_vouch_rounds=(8,)),
    }
    told = limited_reexecutors(replace(job, round=9, vouch_records=records))
    assert told == {
        peer_id(silent): "is asked last to re-execute until round 29: it gave no vouch in 3 closings in a row",
        peer_id(liar): "is not asked to re-execute until round 31: it vouched falsely in 3 of 20 rounds",
        peer_id(both): "is not asked to re-execute until round 21: it vouched falsely in 3 of 20 rounds",
    }
    (view,) = fake_api.JOBS
    printed = shown(view_tables.jobs([replace(view, reexecution_limits={KEYS[0]: told[peer_id(silent)]})], NAMES), 1_000)
    assert f"re-executors: {NAMES[KEYS[0]]} {told[peer_id(silent)]}" in printed


def test_the_status_of_a_re_executor_says_that_it_is_not_asked() -> None:
    world = World()
    key = world.start(spec=LANGUAGE)
    me, other = PEOPLE[0].public, PEOPLE[1].public
    jobs = {key: replace(world.job(key), vouch_records={me: VouchRecord(suspended_until=30)})}
    text = "in language this peer is not asked to re-execute until round 31: it vouched falsely in 3 of 20 rounds"
    assert [describe_own_limits(person, JobsState(jobs)) for person in (me, other)] == [text, ""]
    printed = " ".join(shown(view_tables.status(replace(fake_api.STATUS, reexecution_limits=text)), 80).split())
    assert f"re-executes {text}" in printed
    assert "re-executes" not in shown(view_tables.status(fake_api.STATUS), 80)


def test_a_trainer_whose_updates_were_found_false_is_shown_as_suspended_with_the_reason() -> None:
    world = World()
    key = world.start(spec=LANGUAGE)
    liar = PEOPLE[1].public
    trainers = tuple(trainer for trainer in world.job(key).trainers if trainer != liar)
    job = replace(world.job(key), trainers=trainers, trainer_records={liar: TrainerRecord(suspended_until=24, suspensions=1)})
    assert suspended_trainers(job, JobAudits()) == {liar: 24}
    assert suspended_trainers(job, JobAudits(suspended={liar: 30})) == {liar: 30}, "the later one, of an audit after the vote"
    assert suspended_trainers(replace(job, round=24), JobAudits()) == {}
    state = world.state.with_modules(jobs=JobsState({key: job}))
    reason = "suspended until round 25: re-execution found three of its updates false"
    assert [suspension_reason(person, state) for person in (liar, trainers[0])] == [reason, ""]
