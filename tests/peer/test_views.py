"""Tables on screens of every width: whole words, names, and vouches. The least important columns are dropped first."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from rich.console import Console

from demo.demo_report import replays_per_round
from features.peer_names import PeerNames
from features.text_tables import Column, KeyValueTable, TextTable
from ledger.audits.audit_state import JobAudits
from ledger.jobs import JobsState, TrainerRecord, VouchRecord
from peer.api.handlers.local_peer_handler import describe_own_limits, limited_reexecutors, suspended_trainers
from peer.commands import view_tables
from peer.commands.definitions import all_commands
from peer.commands.definitions.job_commands import _unchanged
from peer.commands.table_renderer import make_printer, to_renderable
from peer.roles.voter import Voter
from peer.runtime.auditor import suspension_reason
from protocol.api import DialView, JobView
from protocol.identity import Signed, peer_id
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from rounds.vouch_set import reexecutor_order
from tests.ledger.world import LANGUAGE, PEOPLE, World
from tests.peer import fake_api
from tests.peer.network import network, one_root, poll, service_of
from training.round_context import REPLAYS, OpenRoundContext

PEERS = {
    f"{number}{letter * 51}": name
    for number, (letter, name) in enumerate(
        zip("abcdefg", ("anna", "ben", "carl", "dora", "erin", "fritz", "liar-with-a-long-name"), strict=True)
    )
}
NAMES = PeerNames(PEERS)
KEYS = tuple(PEERS)
REASONS = {"replay": 60, "norm": 12, "unjudged": 3}


def shown(what: Any, width: int) -> str:
    out = io.StringIO()
    Console(width=width, file=out, highlight=False, markup=False).print(to_renderable(what), crop=False)
    return out.getvalue()


def job() -> Any:
    (view,) = fake_api.JOBS
    return replace(
        view, name="everything that was ever said", round=80, accepted=dict.fromkeys(KEYS[:6], 60), rejected={KEYS[6]: REASONS}
    )


def peers() -> list[Any]:
    link = fake_api.PEERS[1].link
    assert link is not None
    far = replace(link, address="192.168.100.200:47700", round_trip_ms=120.4, connected_seconds=200.0, bytes_sent=123_456_789)
    return [
        replace(fake_api.PEERS[1], peer=peer, name=name, link=far, membership="60 proposals accepted")
        for peer, name in PEERS.items()
    ]


def round_view() -> Any:
    (view,) = fake_api.ROUNDS
    return replace(
        view, round=60, height=1234, verdicts=dict.fromkeys(KEYS[:6], "accept") | {KEYS[6]: "replay"}, ballots=KEYS, seconds=12.5
    )


TABLES: dict[str, Callable[[], Any]] = {
    "jobs": lambda: view_tables.jobs([job()], NAMES),
    "rounds": lambda: view_tables.rounds([round_view()], NAMES),
    "peers": lambda: view_tables.peers(peers()),
    "audits": lambda: view_tables.audits(
        [replace(item, trainer=KEYS[6], auditor=KEYS[0]) for item in fake_api.AUDITS.results], NAMES
    ),
    "standings": lambda: view_tables.audit_records([replace(fake_api.STANDING, peer=peer) for peer in KEYS], NAMES),
    "suspensions": lambda: view_tables.suspensions(fake_api.AUDITS.suspensions, NAMES),
    "status": lambda: view_tables.status(
        replace(fake_api.STATUS, waiting="waiting for a quorum: 1 of 2 voters are connected, 2 are needed")
    ),
    "reach": lambda: view_tables.reachability({a: {b: 17.0 for b in KEYS if a != b} for a in KEYS}, NAMES, KEYS[0]),
    "help": lambda: KeyValueTable({name: word.about for name, word in all_commands().items()}),
    "stats": lambda: view_tables.stats(fake_api.STATS),
    "engines": lambda: view_tables.engines(fake_api.ENGINES),
    "devices": lambda: view_tables.devices(fake_api.ENGINES[0].devices),
}


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("name", TABLES)
def test_no_line_is_wider_than_the_terminal_and_no_word_is_broken(name: str, width: int) -> None:
    whole = shown(TABLES[name](), 10_000)
    printed = shown(TABLES[name](), width)
    assert max(map(len, printed.splitlines())) <= width, printed
    words = {word.strip("(),") for word in f"{whole} a wider terminal also shows {' '.join(PEERS.values())}".split()}
    for word in printed.split():
        is_cut = word.endswith("…") and any(name.startswith(word[:-1]) for name in (*PEERS.values(), "everything", "that", "was"))
        assert is_cut or word.strip("(),") in words, f"{word!r} is no word of\n{whole}\nbut in\n{printed}"


def test_what_goes_into_a_pipe_is_neither_wrapped_nor_cut() -> None:
    for make in TABLES.values():
        printed = shown(make(), 100_000)
        assert not re.search(r"\S…", printed) and "wider terminal" not in printed
    assert len(shown(TABLES["rounds"](), 100_000).splitlines()) == 2


@pytest.mark.parametrize("width", [80, 120])
def test_the_liar_s_row_has_all_its_reasons_at_every_width(width: int) -> None:
    printed = " ".join(shown(TABLES["jobs"](), width).split())
    for part in ("norm", "12", "replay", "60", "unjudged", "3"):
        assert part in printed, printed


@pytest.mark.parametrize("width", [80, 120])
def test_everybody_who_voted_is_named_in_full(width: int) -> None:
    printed = shown(TABLES["rounds"](), width)
    for name in PEERS.values():
        assert len(re.findall(rf"(?<!\S){re.escape(name)}[;)]?(?!\S)", printed)) == 2, printed


def test_the_least_important_columns_go_first_and_are_named() -> None:
    table = TextTable(Column("kept", truncates=True), Column("second", drop_order=2), Column("first", drop_order=1))
    table.add_row("a" * 30, "b" * 10, "c" * 10)
    assert shown(table, 54).split("\n")[1].split() == ["a" * 30, "b" * 10, "c" * 10]
    assert shown(table, 33).split("\n")[1].split() == ["a" * 8 + "…", "b" * 10, "c" * 10]
    narrow = shown(table, 24)
    assert "c" not in narrow.split("\n")[1] and "b" * 10 in narrow and "(a wider terminal also" in narrow


def test_a_silent_peer_is_shown_as_one() -> None:
    (view, *_) = peers()
    silent = replace(view, link=replace(view.link, silent_seconds=17.3))
    assert "(silent for 17 s)" in shown(view_tables.peers([silent]), 200) and "silent" not in shown(
        view_tables.peers([view]), 200
    )


def test_a_link_over_another_peer_names_that_peer() -> None:
    first, *others = peers()
    relayed = replace(first, link=replace(first.link, kind="relayed", relay=KEYS[3]))
    assert "relayed by dora" in shown(view_tables.peers([relayed, *others]), 200)
    assert f"relayed by {KEYS[3][:8]}" in shown(view_tables.peers([relayed]), 200)


def test_diverging_updates_are_told_apart_from_rejected_ones() -> None:
    rejected = {KEYS[0]: {"diverging": 8, "replay": 1}, KEYS[1]: {"diverging": 8}}
    told = " ".join(shown(view_tables.jobs([replace(job(), accepted={}, rejected=rejected)], NAMES), 400).split())
    assert "rejected: anna (replay 1); diverging: anna 8, ben 8; " in told


def five(view: Any) -> Any:
    """Return a job or a round with five trainers, of which one was absent."""
    if isinstance(view, JobView):
        return replace(view, accepted=dict.fromkeys(KEYS[:4], 12), rejected={KEYS[4]: {"absent": 3}}, suspended_until={})
    return replace(view, verdicts=dict.fromkeys(KEYS[:4], "accept") | {KEYS[4]: "absent"}, ballots=KEYS[:5])


def test_of_five_trainers_no_row_is_higher_than_three_lines_at_80_columns() -> None:
    few_rounds = shown(view_tables.rounds([five(round_view())] * 2, NAMES), 80).splitlines()
    for lines in (few_rounds, shown(view_tables.jobs([five(job())] * 2, NAMES), 80).splitlines()):
        rows = [at for at, line in enumerate(lines) if "eeeeeeee" in line]
        assert rows[1] - rows[0] <= 3 and lines[-1].startswith("(a wider terminal also shows"), "\n".join(lines)


def test_each_line_of_a_value_stands_in_the_column_of_values() -> None:
    unreached = tuple(DialView(f"h:{n}", "", "no route to host", 3, 9.0, f"cannot reach h:{n}: no route to host") for n in (1, 2))
    lines = shown(view_tables.status(replace(fake_api.STATUS, unreached_addresses=unreached)), 80).splitlines()
    first, second = (line for line in lines if "cannot reach" in line)
    assert first.split()[0] == "unreached" and second.index("cannot") == first.index("cannot") > 0


def test_a_word_wider_than_the_terminal_is_left_whole() -> None:
    path = "/data/" + "x" * 100
    assert path in shown(KeyValueTable({"data": path}), 80)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (59, "59 s"), (200, "3 min"), (7_300, "2 h"), (100_000, "27 h"), (200_000, "2 days")]
)
def test_an_age_is_said_as_people_do(seconds: float, said: str) -> None:
    assert view_tables.format_age(seconds) == said


def test_a_name_stands_alone_only_where_nobody_else_can_be_meant() -> None:
    anna, other, former, odd, nameless = (letter * 52 for letter in "abcde")
    names = PeerNames(
        {anna: "anna", other: "ben", odd: "bbbbbbbb", nameless: nameless[:8]}, {former: "anna", anna: "anna", other: "ben"}
    )
    assert names[anna] == "anna", "a key that is gone takes no name away"
    assert names[former] == "anna (cccccccc)"
    assert names[odd] == "bbbbbbbb (dddddddd)", "it reads as another's id"
    assert (names[nameless], names["f" * 52]) == ("eeeeeeee", "ffffffff")
    twice = PeerNames({anna: "anna", other: "anna"})
    assert (twice[anna], twice[other]) == ("anna (aaaaaaaa)", "anna (bbbbbbbb)")


def test_sentences_speak_of_names_and_commands_of_what_they_understand() -> None:
    anna, ben, other = (letter * 52 for letter in "abc")
    names = PeerNames({anna: "anna b", ben: "ben", other: "ben"})
    text = "aaaaaaaa stands: `approve aaaaaaaa`; bbbbbbbb: `approve bbbbbbbb`; xaaaaaaaa dddddddd aaaaaaaaa"
    assert names.replace_ids(text) == (
        "anna b stands: `approve 'anna b'`; ben (bbbbbbbb): `approve bbbbbbbb`; xaaaaaaaa dddddddd aaaaaaaaa"
    )


def test_a_long_name_is_cut_and_stays_on_its_line() -> None:
    table = TextTable(Column("name", truncates=True))
    table.add_row("one two three four")
    assert shown(table, 10).split("\n")[1:] == ["one two t…", ""]


def test_a_scratch_round_says_of_each_model_whether_it_is_as_before() -> None:
    (model,) = fake_api.JOBS
    test, ended = (replace(model, job=letter * 64, objective="scratch") for letter in "ab")
    forgotten, stepped = replace(model, job="c" * 64), replace(model, round=4, model_root="1" * 64)
    before = (model, forgotten, ended)
    assert _unchanged(before, (model, ended, test), test.job) == f"job eeeeeeee: model root {'f' * 16} unchanged"
    assert (
        _unchanged(before, (stepped, ended, test), test.job) == f"job eeeeeeee: model root {'f' * 16} changed by its own round 4"
    )
    assert _unchanged((ended, forgotten), (ended, test), test.job).startswith("no model is being trained")


def test_control_characters_of_a_cell_do_nothing_to_a_terminal() -> None:
    table = TextTable("text", "skips")
    table.add_row("a\x1b[31mb\x00\u202ec\u2066d", "\x9b2J")
    out = io.StringIO()
    make_printer(out)(table)
    assert out.getvalue().split("\n")[1].rstrip() == "a\ufffd[31mb\ufffd\ufffdc\ufffdd  \ufffd2J"


class Slow(Voter):
    """A role that completes checks only of its own proposal, or of one that it is called first to re-execute."""

    async def check_proposal(self, round: OpenRoundContext, signed: Signed, proposal: Proposal) -> Verdict:
        if round.me not in (signed.signer, reexecutor_order(round.terms, signed.signer)[0]):
            await trio.sleep_forever()
        return await super().check_proposal(round, signed, proposal)


async def test_a_closed_round_names_the_voters_whose_vouches_its_block_carries(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        await one_root(made.seats, await made.seats[0].start_job())
        trainer, voters = peer_id(made.seats[0].public), {peer_id(seat.public) for seat in made.seats}
        told = [await service_of(seat).rounds(1) for seat in made.seats]
        assert {round.vouchers[trainer] for (round,) in told} == {(vouchers := told[0][0].vouchers[trainer])}
        assert set(vouchers) < voters - {trainer} and len(vouchers) == 1, "of the others f = 1 is called"
        (votes,) = await service_of(made.seats[3]).votes(1)
        assert votes.vouches == {vouchers[0]: {trainer: "accept"}}
        assert votes.votes[trainer] == {trainer: "accept"}


async def test_each_peer_counts_the_re_executions_that_it_has_begun(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        job = await made.seats[0].start_job()
        await one_root(made.seats, job)
        (view,) = await service_of(made.seats[0]).rounds(1)
        (voter,) = view.vouchers[peer_id(made.seats[0].public)]
        for seat in made.seats:
            assert seat.store.measurements(job).get(0, {}).get(REPLAYS) == (1.0 if peer_id(seat.public) == voter else None)


def test_the_demo_reports_re_executions_of_each_machine_and_round() -> None:
    replays: dict[str, dict[int, float]] = {"a": {0: 1.0, 1: 2.0}, "b": {1: 1.0, 3: 2.0}, "c": {}}
    assert replays_per_round(replays) == {"a": 1.0, "b": 1.0, "c": 0.0}
    assert replays_per_round({"a": {}, "b": {}}) == {}


async def test_an_open_round_shows_each_vouch_that_has_come(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, start=False) as made:
        seats = [await made.start(seat, Slow()) for seat in made.seats]
        job, trainer = await seats[0].start_job(), seats[0].public
        for seat in seats:
            await poll(lambda seat=seat: bool(seat.driver.node.rounds.books[job].vouching.signed))
            (votes,) = await service_of(seat).votes(0)
            assert (votes.height, votes.vouches) == (
                None,
                {peer_id(reexecutor_order(seat.driver.node.rounds.books[job].terms, trainer)[0]): {peer_id(trainer): "accept"}},
            )


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
        peer_id(silent): "is asked last to re-execute until round 29: it missed its vouches in 3 successive rounds",
        peer_id(liar): "is not asked to re-execute until round 31: its vouches were false in 3 of 20 rounds",
        peer_id(both): "is not asked to re-execute until round 21: its vouches were false in 3 of 20 rounds",
    }
    (view,) = fake_api.JOBS
    printed = shown(view_tables.jobs([replace(view, reexecution_limits={KEYS[0]: told[peer_id(silent)]})], NAMES), 1_000)
    assert f"re-executors: {NAMES[KEYS[0]]} {told[peer_id(silent)]}" in printed


def test_the_status_of_a_re_executor_says_that_it_is_not_asked() -> None:
    world = World()
    key = world.start(spec=LANGUAGE)
    me, other = PEOPLE[0].public, PEOPLE[1].public
    jobs = {key: replace(world.job(key), vouch_records={me: VouchRecord(suspended_until=30)})}
    text = "in language this peer is not asked to re-execute until round 31: its vouches were false in 3 of 20 rounds"
    assert [describe_own_limits(person, JobsState(jobs)) for person in (me, other)] == [text, ""]
    printed = " ".join(shown(view_tables.status(replace(fake_api.STATUS, reexecution_limits=text)), 80).split())
    assert f"re-execution {text}" in printed
    assert "re-execution" not in shown(view_tables.status(fake_api.STATUS), 80)


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
