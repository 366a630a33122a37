"""A changed byte anywhere on the disk, or a truncated log: all durable data come back, or the peer stops."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from consensus.effects import JournalRecord, StoredCertificate
from consensus.evidence import Evidence
from ledger.tables import Table
from protocol import codec
from protocol.errors import StorageError
from protocol.messages import Ballot, Commit, CutOff, Prepare, Proposal, Propose, Timeout, Vouch
from storage import crash_points, ledger_integrity
from storage.crash_points import CRASH_POINT_VARIABLE, POINTS, WRITES
from storage.ledger_store import LedgerStore
from tests.ledger.tables.records import Note
from tests.packages import PACKAGES, ROOT
from tests.storage.records import CHAIN, JOB, ME, certificate, decided, fill, round_vote, stored_block, vote
from tests.waiting import run_process

FRAME_BYTES = ledger_integrity.FRAME_HEADER_BYTES + 4_096
LOG, COUNT = "-wal", ".committed"
FLIPS = 150  # of each file; `python -m tests.storage.test_damage` flips every byte
Change = Callable[[bytes], bytes]

TURNS: tuple[tuple[JournalRecord, ...], ...] = (
    (decided(3), vote(4)),
    (stored_block(4, b"long" * 2_000), vote(4, view=1)),
    (StoredCertificate(4, certificate(4)),),
    (round_vote("ballot", 2, Ballot(JOB, 2, b"r" * 32, ())),),
    (Evidence(vote(4).signed, vote(4, block=bytes(32)).signed), vote(5)),
    (vote(5, view=1),),
)


@dataclass(frozen=True)
class Disk:
    files: dict[str, bytes]  # by suffix
    ends: tuple[int, ...]  # of the log after each turn

    def put(self, folder: Path, changed: dict[str, Change]) -> Path:
        path = folder / "ledger.db"
        for suffix in ("", LOG, "-shm", COUNT):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        for suffix, content in self.files.items():
            path.with_name(path.name + suffix).write_bytes(changed.get(suffix, bytes)(content))
        return path


def content(store: LedgerStore) -> object:
    """Return all data that a peer relies on."""
    votes = [store.round_votes(ME.public, JOB, number) for number in (1, 2)]
    blocks = [store.get_decision(height) for height in range(1, store.decided_height + 2)]
    return (
        store.read_restart_state(),
        blocks,
        votes,
        store.evidence(),
        store.encoded_state(),
        store.state_roots(),
        store.closed_rounds(9),
    )


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Disk:
    return killed(tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="module")
def stopped(disk: Disk, tmp_path_factory: pytest.TempPathFactory) -> Disk:
    return closed(disk, tmp_path_factory.mktemp("closed"))


def killed(folder: Path) -> Disk:
    """Return the files of a killed peer: half of the records are in the database, half in the log."""
    path = folder / "ledger.db"
    log = path.with_name(path.name + LOG)
    store = LedgerStore(path, CHAIN)
    fill(store)
    store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    ends = []
    for turn in TURNS:
        store.append_records(turn)
        ends.append(log.stat().st_size)
    files = {suffix: path.with_name(path.name + suffix).read_bytes() for suffix in ("", LOG, COUNT)}
    store.close()
    return Disk(files, tuple(ends))


def closed(disk: Disk, folder: Path) -> Disk:
    """Return the same files after an ordinary stop: all records are in the database."""
    path = disk.put(folder, {})
    LedgerStore(path, CHAIN).close()
    return Disk({suffix: path.with_name(path.name + suffix).read_bytes() for suffix in ("", COUNT)}, ())


def loaded(path: Path) -> object:
    """Return the `content` of the store, or None if it refuses the files."""
    try:
        store = LedgerStore(path, CHAIN)
    except StorageError:
        return None
    try:
        return content(store)
    except StorageError:
        return None
    finally:
        store.close()


def flip(position: int, mask: int) -> Change:
    def change(data: bytes) -> bytes:
        return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]

    return change


def flips(data: bytes, random: Random) -> Iterator[tuple[int, int]]:
    for _ in range(FLIPS):
        yield random.randrange(len(data)), random.choice((0xFF, 1 << random.randrange(8)))


def test_a_flipped_byte_in_the_log_never_makes_less_come_back(disk: Disk, tmp_path: Path) -> None:
    assert refusals(disk, LOG, tmp_path) > FLIPS // 2


def test_a_flipped_byte_in_the_database_never_makes_less_come_back(disk: Disk, stopped: Disk, tmp_path: Path) -> None:
    refusals(disk, "", tmp_path)
    assert refusals(stopped, "", tmp_path) > FLIPS // 10


def test_a_flipped_byte_in_the_count_costs_nothing(disk: Disk, tmp_path: Path) -> None:
    assert refusals(disk, COUNT, tmp_path) == 0


def refusals(disk: Disk, suffix: str, folder: Path) -> int:
    whole = loaded(disk.put(folder, {}))
    assert whole is not None
    found = []
    for position, mask in flips(disk.files[suffix], Random(suffix)):
        found.append(loaded(disk.put(folder, {suffix: flip(position, mask)})))
        assert found[-1] in (None, whole), f"byte {position} of ledger.db{suffix} ^ {mask:#x}"
    return found.count(None)


def test_a_flipped_byte_before_the_last_transaction_of_the_log_is_found_without_the_count(disk: Disk, tmp_path: Path) -> None:
    """After a power failure the count may be old. The last transaction may then be taken for torn, but no earlier one."""
    for position, mask in flips(disk.files[LOG][: disk.ends[-2]], Random(1)):
        change = {LOG: flip(position, mask), COUNT: lambda _: b""}
        assert loaded(disk.put(tmp_path, change)) is None, f"byte {position} ^ {mask:#x}"


def test_every_byte_of_the_frame_that_commits_the_last_transaction_but_one_counts(disk: Disk, tmp_path: Path) -> None:
    """Its own header alone shows that it commits, and that it belongs to this log."""
    start = disk.ends[-2] - FRAME_BYTES
    for position in (*range(start, start + ledger_integrity.FRAME_HEADER_BYTES), start + FRAME_BYTES - 1):
        change = {LOG: flip(position, 0xFF), COUNT: lambda _: b""}
        assert loaded(disk.put(tmp_path, change)) is None, f"byte {position - start} of the frame"


def test_a_log_torn_anywhere_in_its_last_transaction_keeps_all_before_it(disk: Disk, tmp_path: Path) -> None:
    before = loaded(disk.put(tmp_path, {LOG: lambda log: log[: disk.ends[-2]], COUNT: lambda _: b""}))
    for length in [*range(disk.ends[-2], disk.ends[-1], 97), disk.ends[-1] - 1]:
        torn = {LOG: lambda log, length=length: log[:length], COUNT: lambda _: b""}
        assert loaded(disk.put(tmp_path, torn)) == before != loaded(disk.put(tmp_path, {}))


def test_a_last_transaction_of_which_only_the_end_reached_the_disk_keeps_all_before_it(disk: Disk, tmp_path: Path) -> None:
    """The disk writes the pages of a transaction in any order until it is synced."""
    start, end = disk.ends[-2:]
    assert end - start >= 2 * FRAME_BYTES
    before = loaded(disk.put(tmp_path, {LOG: lambda log: log[:start], COUNT: lambda _: b""}))
    holes = {LOG: lambda log: log[:start] + bytes(FRAME_BYTES) + log[start + FRAME_BYTES :], COUNT: lambda _: b""}
    assert loaded(disk.put(tmp_path, holes)) == before is not None


def test_a_log_that_began_anew_hides_nothing_behind_its_old_frames(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger.db", CHAIN)
    store.append_records([vote(view, view=view) for view in range(1, 200)])
    log = tmp_path / "ledger.db-wal"
    long = log.stat().st_size
    store._database.execute("PRAGMA wal_checkpoint(RESTART)")
    store.append_records([vote(300)])
    data = log.read_bytes()
    assert log.stat().st_size == long and ledger_integrity.find_log_damage(data) is None, "old frames stand behind the new ones"
    store.append_records([vote(301)])
    data = log.read_bytes()
    assert (
        ledger_integrity.find_log_damage(flip(40, 1)(data)) is not None
        and ledger_integrity.find_log_damage(flip(long - 1, 1)(data)) is None
    )
    store.close()


def test_a_log_without_any_transaction_is_not_damaged(disk: Disk) -> None:
    log = disk.files[LOG]
    assert [ledger_integrity.find_log_damage(log[:length]) for length in (0, 7, 32, 33, 32 + FRAME_BYTES - 1)] == [None] * 5
    assert ledger_integrity.find_log_damage(flip(20, 1)(log)) == "its header does not match its checksum"


def every_flip(disk: Disk, folder: Path) -> int:
    """Return the number of flips after which the store loads other data than the durable ones."""
    whole, wrong = loaded(disk.put(folder, {})), 0
    for suffix, data in disk.files.items():
        for position in range(len(data)):
            for mask in (0xFF, 1 << position % 8):
                if loaded(disk.put(folder, {suffix: flip(position, mask)})) not in (None, whole):
                    print(f"byte {position} of ledger.db{suffix} ^ {mask:#x}", flush=True)
                    wrong += 1
    return wrong


if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        first = killed(place)
        found = every_flip(closed(first, place), place) + every_flip(first, place)
        print(f"{found} flips were not noticed")
        sys.exit(1 if found else 0)


# Crash points ---------------------------------------------------------------------------------------------------------


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
    assert status == 1 and "unknown crash point" in said and not list(tmp_path.iterdir())


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
