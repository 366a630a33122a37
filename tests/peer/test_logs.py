"""The log: one line for one thing, which people and programs can read."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from features.peer_names import PeerNames
from ledger.members import RenameMember, RotateKey
from peer.commands.local_commands import _log_to
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.telemetry.node_observer import NodeObserver, key_rotations
from peer.settings.config import Config
from protocol import codec
from protocol.identity import peer_id, short_id, sign_message
from protocol.messages import Transaction
from tests.ledger.world import PEOPLE, World
from tests.peer.network import certified, network
from tests.sim.keys import FastSigner

OLD, NEW, CHAIN = FastSigner("old"), FastSigner("new"), bytes(32)


@pytest.fixture
def restored() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(tmp_path: Path, **settings: Any) -> list[str]:
    """What is written of an event, of a detail, of a plain line and of a failure."""
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
        await seat.until(certified(await seat.scratch()))
        kinds = [event.kind for event in await seat.driver.events.wait_for_events(0, 0.0)]
    assert {"decided", "proposal", "ballot", "applied"} < set(kinds), "people at the prompt see all of it"
    told = [record.getMessage() for record in caplog.records if record.name == "peer"]
    assert told == ["round 1: accepted founder"]


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
    told = "the log cannot be written to /dev/full: No space left on device; the peer goes on without it"
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
