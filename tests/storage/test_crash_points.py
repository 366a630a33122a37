"""A process kills itself exactly where it was told to, and only there."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from ledger.tables import Table
from protocol import codec
from protocol.messages import Ballot, Commit, CutOff, Prepare, Proposal, Propose, Timeout, Vouch
from storage import crash_points
from storage.crash_points import CRASH_POINT_VARIABLE, POINTS, WRITES
from storage.ledger_store import LedgerStore
from tests.ledger.tables.records import Note
from tests.packages import PACKAGES, ROOT
from tests.storage.records import CHAIN
from tests.waiting import run_process

SCRIPT = """
import sys
from pathlib import Path
from storage.ledger_store import LedgerStore
from tests.packages import PACKAGES, ROOT
from tests.storage.records import CHAIN, decided, vote, vouch_record
store = LedgerStore(Path(sys.argv[1]), CHAIN)
for height in (1, 2, 3):
    store.append_records([vote(height), decided(height)])
    store.append_records([vouch_record(height, bytes(32))])
"""


def crashed(folder: Path, point: str) -> tuple[int, str]:
    environment = {**os.environ, CRASH_POINT_VARIABLE: point, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(folder / "ledger.db")]
    done = run_process(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.real("processes")
@pytest.mark.parametrize(
    ("point", "height"), [("before-append-prepare:2", 1), ("after-append-decided:2", 2), ("before-append-vouch:3", 3)]
)
def test_a_process_dies_at_the_point_and_what_was_written_by_then_is_there(tmp_path: Path, point: str, height: int) -> None:
    status, said = crashed(tmp_path, point)
    assert status == -signal.SIGKILL and said == f"crash point {point.partition(':')[0]}\n"
    store = LedgerStore(tmp_path / "ledger.db", CHAIN)
    assert store.decided_height == height
    store.close()


@pytest.mark.real("processes")
def test_a_point_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    status, said = crashed(tmp_path, "before-lunch")
    assert status == 1 and "no such crash point" in said and not list(tmp_path.iterdir())


def test_without_the_variable_nothing_is_armed() -> None:
    assert crash_points._trap is None


def test_every_write_that_the_code_names_is_listed_and_every_listed_one_is_named() -> None:
    text = "".join(file.read_text() for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    named = set(re.findall(r'crash_points\("([\w.-]+)"\)', text))
    made = {write for write in WRITES if write.startswith(("append-", "file-", "identity.")) or write == "genesis"}
    assert named | made == WRITES.keys() and len(POINTS) == 2 * len(WRITES)
    voted = {kind.TAG for kind in (Propose, Prepare, Commit, Timeout, Proposal, Vouch, Ballot, CutOff)}
    assert {f"append-{kind}" for kind in (*voted, "block", "certificate", "decided", "evidence", "silence")} == {
        write for write in WRITES if write.startswith("append-")
    }


BLOCKS = """
import sys
from pathlib import Path
from ledger.tables import Table
from protocol import codec
from storage.ledger_store import LedgerStore
from tests.ledger.tables.records import Note
from tests.storage.records import CHAIN, decided
store, table = LedgerStore(Path(sys.argv[1]), CHAIN), Table(Note)
store.append_records([decided(height) for height in range(1, 6)])
for height in range(1, 6):
    table = table.with_rows({b"%d" % number: Note(height) for number in range(100 * height)})
    table = table.with_rows({b"%d" % number: None for number in range(30 * height)})
    store.save_state(height, table.root.hash, codec.encode(table.root), tables={"notes": table})
"""


@pytest.mark.real("processes")
@pytest.mark.parametrize("write", ["save-state", "rows", "store-count"])
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("time", [2, 3, 4])
def test_after_a_crash_the_rows_are_those_of_the_state(tmp_path: Path, side: str, write: str, time: int) -> None:
    environment = {**os.environ, CRASH_POINT_VARIABLE: f"{side}-{write}:{time}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BLOCKS, str(tmp_path / "ledger.db")]
    assert run_process(command, env=environment, capture_output=True).returncode == -signal.SIGKILL
    store = LedgerStore(tmp_path / "ledger.db", CHAIN)
    state, table, height = store.encoded_state(), store.rows.table("notes", Note), max(store.state_roots(), default=0)
    assert (state or codec.encode(Table(Note).root)) == codec.encode(table.root)
    assert height in (time - 2, time - 1, time)
    assert dict(table.items()) == {b"%d" % number: Note(height) for number in range(30 * height, 100 * height)}
    store.close()
