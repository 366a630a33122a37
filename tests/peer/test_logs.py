"""The log and the observer of a node: one line for each event, written once, for people and programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio.testing

from consensus.effects import StoredBlock
from consensus.evidence import Evidence
from features.peer_names import PeerNames
from ledger.members import Member, RenameMember, RotateKey
from peer.commands.local_commands import _log_to
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.telemetry.health import why_halted, why_waiting
from peer.runtime.telemetry.node_observer import NodeObserver, key_rotations
from peer.settings.config import Config
from protocol import codec
from protocol.identity import peer_id, short_id, sign_message
from protocol.messages import Ballot, Commit, CutOff, Judgement, Proposal, Timeout, Transaction, Vouch
from protocol.verdicts import Verdict
from rounds.round_state import RoundResult
from tests.ledger.world import PEOPLE, World
from tests.peer.network import certified, network
from tests.sim.keys import FastSigner
from training.job_spec import AuditMode, JobSpec

OLD, NEW, CHAIN = FastSigner("old"), FastSigner("new"), bytes(32)


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the root logger after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(tmp_path: Path, **settings: Any) -> list[str]:
    """Return the log lines of an event, a detail, a plain line and a failure."""
    file = tmp_path / "peer.log"
    _log_to(Config(data_directory=tmp_path, log_file=str(file), **settings), None)
    events = EventLog()
    events.add("round", "round 3: accepted zoë", job=b"\x01\x02", peer=NEW.public, round=3, level="not the log's")
    events.add_detail("ballot", "round 3: ann votes")
    logging.getLogger("transport").warning("%s of %d", "one", 2)
    try:
        raise ValueError("a bug")
    except ValueError:
        logging.getLogger("peer").exception("it failed")
    return file.read_text().splitlines()


@pytest.mark.parametrize("number", [0, 1, -1])
async def test_who_asks_for_events_in_a_loop_lets_the_others_go_on(number: int) -> None:
    events = EventLog()
    events.add("round", "round 1: accepted")
    with trio.testing.assert_checkpoints():
        assert len(await events.wait_for_events(number, 0.0)) == (number < 1)


@pytest.mark.usefixtures("restored")
def test_every_line_begins_with_a_time_that_has_its_zone(tmp_path: Path) -> None:
    first, second, third, *_ = lines(tmp_path)
    for line in (first, second, third):
        assert datetime.fromisoformat(line.split()[0]).tzinfo is not None
    assert first.split(maxsplit=1)[1] == "INFO round 3: accepted zoë"
    assert second.split(maxsplit=1)[1] == "WARNING one of 2", "details are not told at info"


@pytest.mark.usefixtures("restored")
def test_json_is_one_object_a_line_with_the_fields_of_the_event(tmp_path: Path) -> None:
    event, plain, failure = map(json.loads, lines(tmp_path, log_format="json"))
    assert all(datetime.fromisoformat(line.pop("at")).tzinfo is not None for line in (event, plain, failure))
    fields = {"job": "0102", "peer": peer_id(NEW.public), "round": 3}
    assert event == {"level": "info", "kind": "round", "text": "round 3: accepted zoë"} | fields
    assert plain == {"level": "warning", "kind": "log", "text": "one of 2"}
    assert failure.pop("traceback").endswith("ValueError: a bug")
    assert failure == {"level": "error", "kind": "log", "text": "it failed"}


@pytest.mark.usefixtures("restored")
def test_json_has_no_word_for_what_is_no_number(tmp_path: Path) -> None:
    file = tmp_path / "peer.log"
    _log_to(Config(data_directory=tmp_path, log_file=str(file), log_format="json"), None)
    EventLog().add("measured", "it diverged", value=float("nan"), loss=float("inf"))
    line = file.read_text()
    assert "NaN" not in line and "Infinity" not in line and json.loads(line)["value"] is None


@pytest.mark.usefixtures("restored")
def test_debug_tells_the_details_too(tmp_path: Path) -> None:
    assert "DEBUG round 3: ann votes" in "\n".join(lines(tmp_path, log_level="debug"))


async def test_a_round_is_one_line_at_info(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "peer")
    async with network(tmp_path, founders=1) as made:
        (seat,) = made.seats
        await seat.until(certified(await seat.start_job()))
        kinds = [event.kind for event in await seat.driver.events.wait_for_events(0, 0.0)]
    assert {"decided", "proposal", "ballot", "applied"} < set(kinds), "people at the prompt see all of it"
    assert [record.getMessage() for record in caplog.records if record.name == "peer"] == ["round 1: accepted founder"]


async def test_a_key_that_replaces_another_is_one_line_in_the_log_of_everybody() -> None:
    transactions = [Transaction(1, 9, "member/rotate", codec.encode(RotateKey(NEW.public, bytes(64))))]
    transactions += [Transaction(2, 9, "member/resign", b"\x90")]
    (pair,) = key_rotations([sign_message(OLD, CHAIN, transaction) for transaction in transactions])
    assert pair == (OLD.public, NEW.public)
    witness = NodeObserver(EventLog(), lambda: 0.0)
    witness.report_rotation(*pair)
    ((event,),) = [await witness.events.wait_for_events(0, 0.0)]
    assert (event.kind, event.text) == ("member", f"{short_id(NEW.public)} is now the key of {short_id(OLD.public)}")


async def test_the_log_speaks_of_names_and_its_fields_keep_the_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events, short = EventLog(), short_id(NEW.public)
    events.names = PeerNames({peer_id(NEW.public): "erin"})
    with caplog.at_level(logging.INFO, "peer"):
        events.add("round", f"round 3: accepted {short}", peer=NEW.public)
    (record,) = caplog.records
    assert record.getMessage() == "round 3: accepted erin" and vars(record)["fields"]["peer"] == peer_id(NEW.public)
    (event,) = await events.wait_for_events(0, 0.0)
    assert event.text == f"round 3: accepted {short}", "consoles put the names in, as they are when it is read"


async def test_the_names_are_those_of_the_members_now(tmp_path: Path) -> None:
    async with network(tmp_path, founders=1) as made:
        (seat,) = made.seats
        assert seat.events.names[peer_id(seat.public)] == "founder", "from the start on"
        await seat.author.submit("member/rename", RenameMember("carl"))
        await seat.until(lambda driver: driver.state.members.members[seat.public].name == "carl")
        assert seat.events.names[peer_id(seat.public)] == "carl"


async def test_an_own_admission_that_came_in_a_snapshot_is_told(tmp_path: Path) -> None:
    before, world = World().state, World()
    after = world.decide(world.admission(PEOPLE[8]))
    witness = NodeObserver(EventLog(), lambda: 0.0, before)
    witness.record_restored_state(after, PEOPLE[8].public)
    witness.record_restored_state(after, PEOPLE[8].public)
    (event,) = await witness.events.wait_for_events(0, 0.0)
    assert event.text == f"{short_id(PEOPLE[8].public)} was admitted as a member, invited by {short_id(PEOPLE[0].public)}"


@pytest.mark.usefixtures("restored")
def test_a_log_that_cannot_be_written_is_told_once_and_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _log_to(Config(data_directory=tmp_path, log_file="/dev/full"), None)
    for number in range(3):
        logging.getLogger("peer").info("line %d", number)
    told = "the log cannot be written to /dev/full: No space left on device; the peer keeps running without a log"
    assert capsys.readouterr().err == f"peer: {told}\n"


@pytest.mark.usefixtures("restored")
def test_a_log_whose_folder_was_taken_away_stops_nobody_and_is_told_again_after_it_was_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    _log_to(Config(data_directory=tmp_path, log_file=str(folder / "peer.log")), None)
    for _ in range(2):
        folder.rename(tmp_path / "away")
        for number in range(2):
            logging.getLogger("peer").info("line %d", number)
        assert capsys.readouterr().err.count("No such file or directory") == 1
        (tmp_path / "away").rename(folder)
        logging.getLogger("peer").info("back")
        assert (folder / "peer.log").read_text().endswith("back\n")


LIAR, HISTORY, OTHER = FastSigner("liar"), bytes(32), b"o" * 32


@pytest.fixture
def log() -> EventLog:
    return EventLog()


async def event_texts(log: EventLog) -> list[str]:
    return [event.text for event in await log.wait_for_events(0, 0.0)]


@pytest.fixture
def witness(log: EventLog) -> NodeObserver:
    return NodeObserver(log, lambda: 0.0)


@pytest.mark.parametrize(
    ("report", "given", "told"),
    [
        pytest.param(
            NodeObserver.report_vote_lockout,
            [(5, 0), (5, 7), (6, 7), (7, 7)],
            "silent until height 7: the disk lacks signatures of this peer, as after a restore from a backup",
            id="silence, with its end and its likely cause",
        ),
        pytest.param(
            NodeObserver.report_muted_rounds,
            [(frozenset(rounds),) for rounds in ((), ((HISTORY, 3),), ((HISTORY, 3),), ())],
            "this peer signs nothing more in round 4: the disk lacks a message of it",
            id="a round of which something was forgotten",
        ),
    ],
)
async def test_what_holds_for_a_while_is_told_once(
    log: EventLog, witness: NodeObserver, report: Callable[..., None], given: list[tuple[Any, ...]], told: str
) -> None:
    for arguments in given:
        report(witness, *arguments)
    assert await event_texts(log) == [told]


@pytest.mark.parametrize(
    ("audit", "liars", "told"),
    [
        (AuditMode.SAMPLED, 1, ["with audit=sampled, each trainer needs a steady uplink of "]),
        (
            AuditMode.SAMPLED,
            0,
            [
                "with audit=sampled, each trainer needs a steady uplink of ",
                "audits are sampled and byzantine_max=0: no trainer is ",
            ],
        ),
        (AuditMode.OFF, 0, ["audits are off and byzantine_max=0: no trainer is assumed to"]),
        (AuditMode.OFF, 1, []),
        (AuditMode.FULL, 0, []),
    ],
)
async def test_every_peer_is_told_the_limits_of_a_job_that_starts(
    log: EventLog, audit: AuditMode, liars: int, told: list[str]
) -> None:
    spec = JobSpec(name="text", data=bytes(32), audit=audit, byzantine_max=liars)
    job = SimpleNamespace(name=spec.name, author=LIAR.public, spec=spec.encode())
    NodeObserver(log, lambda: 0.0).report_started_job(HISTORY, SimpleNamespace(jobs=SimpleNamespace(jobs={HISTORY: job})))
    found = await event_texts(log)
    assert [line.startswith(f"job text: {start}") for line, start in zip(found, told, strict=True)] == [True] * len(told)


async def test_each_message_of_a_round_is_told_in_words(log: EventLog) -> None:
    witness, trainers = NodeObserver(log, lambda: 0.0), sorted(FastSigner(f"trainer {number}").public for number in range(3))
    judgements = tuple(map(Judgement, trainers, [HISTORY] * 3, (Verdict.ACCEPT, Verdict.REPLAY, Verdict.UNJUDGED)))
    messages = (
        Proposal(HISTORY, 2, HISTORY, HISTORY, 1, HISTORY, None),
        Vouch(HISTORY, 2, judgements),
        Ballot(HISTORY, 2, HISTORY, judgements),
        CutOff(HISTORY, 2, ()),
    )
    for message in messages:
        witness.report_round_message(LIAR.public, message)
    one, other, third = map(short_id, trainers)
    said = [
        "proposes",
        f"vouches for {one}, rejects {other} (replay), is unsure of {third}",
        f"votes {one}: accept, {other}: replay, {third}: unjudged",
        "ends its wait for proposals",
    ]
    assert await event_texts(log) == [f"round 3: {short_id(LIAR.public)} {words}" for words in said]
    assert [event.kind for event in await log.wait_for_events(0, 0.0)] == ["proposal", "vouch", "ballot", "cut-off"]


async def test_an_expulsion_names_what_was_signed(log: EventLog, witness: NodeObserver) -> None:
    proposals = [Proposal(HISTORY, 0, HISTORY, bytes([n]) * 32, 1, HISTORY, None) for n in range(2)]
    given_up = (Commit(HISTORY, 1, 0, HISTORY), Timeout(HISTORY, 1, 0, -1, None))
    for first, second in (proposals, given_up):
        witness.report_expulsion(Evidence(sign_message(LIAR, HISTORY, first), sign_message(LIAR, HISTORY, second)))
    name = short_id(LIAR.public)
    assert await event_texts(log) == [
        f"{name} was expelled: it signed two different proposals",
        f"{name} was expelled: it signed a commit and a timeout that exclude each other",
    ]


def replica_of(**conditions: str | None) -> Any:
    fine = dict.fromkeys(("block_refusal", "state_root_split", "fork_proof", "duplicate_identity_reason"))
    return SimpleNamespace(height=5, **fine | conditions)


async def test_a_dispute_about_the_state_is_told_once_and_again_when_it_grows(log: EventLog, witness: NodeObserver) -> None:
    for text in (None, "2 of 4 differ", "2 of 4 differ", "3 of 4 differ", None):
        witness.report_conditions(replica_of(state_root_split=text), "")
    assert [line.split(";")[0] for line in await event_texts(log)] == ["2 of 4 differ", "3 of 4 differ"]
    assert all("docs/how-to/when-something-is-wrong.md" in line for line in await event_texts(log)), "and what to do"


async def test_another_history_is_told_once_and_is_no_halt(log: EventLog, witness: NodeObserver) -> None:
    for rivalry in (None, "block 12 is certified", "block 12 is certified"):
        witness.report_conditions(replica_of(fork_proof=rivalry), "")
    (line,) = await event_texts(log)
    assert line.startswith("DISPUTED: block 12 is certified; compare the blocks ")


def test_the_state_that_people_see_names_the_gravest_reason() -> None:
    fine = {
        "height": 9,
        "divergence": None,
        "state_root_split": None,
        "no_votes_below": 7,
        "duplicate_identity_reason": None,
        "is_outdated": False,
    }
    assert why_halted(SimpleNamespace(**fine), None) == ""
    assert why_halted(SimpleNamespace(**fine | {"no_votes_below": 10}), None).startswith("silent until height 10")
    disputed = SimpleNamespace(**fine | {"no_votes_below": 10, "state_root_split": "2 of 4 differ"})
    assert why_halted(disputed, None).startswith("HALTED: 2 of 4 differ; ")
    diverged = SimpleNamespace(**vars(disputed) | {"divergence": "height 8 was decided otherwise"})
    assert why_halted(diverged, None) == "HALTED: height 8 was decided otherwise; this peer restores the certified state"
    expelled = Member("ben", (), 0, None, 3, expelled=6)
    assert why_halted(diverged, expelled).startswith("EXPELLED at height 6: ")
    assert why_halted(SimpleNamespace(**fine), None, "it was used") == "not a member: it was used"
    assert why_halted(SimpleNamespace(**fine), replace(expelled, expelled=None), "it was used") == ""


@pytest.mark.parametrize(
    ("links", "may_speak", "words"),
    [
        (0, False, "waiting for a quorum: 1 of 4 voters are connected, 3 are needed"),
        (1, True, "waiting for a quorum: 2 of 4 voters are connected, 3 are needed"),
        (2, False, "waiting for a quorum: 3 voters must first report the statements that they heard from this peer"),
        (2, True, ""),
    ],
)
def test_a_voter_without_a_quorum_or_its_answers_says_so(links: int, may_speak: bool, words: str) -> None:
    keys = sorted(FastSigner(f"voter {number}").public for number in range(4))
    state = SimpleNamespace(height=4, members=SimpleNamespace(voters=tuple(keys)))
    replica = SimpleNamespace(
        is_voter=True,
        height=5,
        divergence=None,
        state_root_split=None,
        no_votes_below=0,
        duplicate_identity_reason=None,
        is_outdated=False,
    )
    node = SimpleNamespace(me=keys[0], state=state, replica=replica, may_sign_round_messages=may_speak)
    assert why_waiting(node, {LIAR.public, *keys[1 : 1 + links]}) == words
    state.height = 1
    assert words.endswith("are here") or why_waiting(node, set(keys)) == "", "it applies blocks"
    state.height, replica.no_votes_below = 4, 6
    assert words.endswith("are here") or why_waiting(node, set(keys)) == "", "it is silent for another reason"


async def test_what_was_only_replayed_has_no_times_and_what_was_not_judged_is_not_rejected(log: EventLog) -> None:
    now = iter(float(second) for second in range(100))
    witness = NodeObserver(log, lambda: next(now))
    refused = {LIAR.public: Verdict.UNJUDGED, HISTORY: Verdict.NORM, OTHER: Verdict.NORM}
    outcome = RoundResult({}, refused, frozenset(), frozenset(), {}, frozenset(), frozenset(), diverging=frozenset({HISTORY}))
    closed = SimpleNamespace(outcome=outcome, job=HISTORY, round=3)
    jobs = SimpleNamespace(jobs={HISTORY: SimpleNamespace(model_root=HISTORY)})
    certificate = SimpleNamespace(signatures={})
    for height, records in ((5, ()), (6, (StoredBlock(6, HISTORY, b""),))):
        decided = SimpleNamespace(height=height, certificate=certificate, decode=lambda: SimpleNamespace(time_ms=0))
        witness.record_step(SimpleNamespace(records=records, decided_blocks=(decided,)))
    replayed, lived = (witness.record_closed_round(closed, SimpleNamespace(height=height, jobs=jobs), 0.0) for height in (5, 6))
    assert replayed == {} and lived.keys() == {"decision_ms", "seconds"}
    told = f"round 4: unjudged {short_id(LIAR.public)}, diverging {short_id(HISTORY)}, rejected {short_id(OTHER)} (norm)"
    assert told in await event_texts(log)
