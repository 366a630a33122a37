"""`python -m scenarios.bad_input`: wrong input from people, and faults of the machine.

Each case spoils one thing around a peer that has already decided blocks. `peer` must end with a nonzero exit status and one line
that names the value and the remedy. After the repair the peer must start again with all its data.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import trio
from rich.console import Console
from rich.table import Table

from demo.demo_peers import PeerDisk
from peer.api import control_socket
from peer.settings.data_directory import DataDirectory
from protocol.errors import UserError
from scenarios.trials import Parser, write

SECONDS_MAX = 90.0  # for a peer to start or to refuse, on a busy machine
SMALL_DISK_BYTES = 4 << 20
RESERVES_KIB = (0, 12, 24, 48, 96)  # free on the small disk; with each value another file is the first that cannot be written
PEER = [sys.executable, "-m", "peer.cli"]


@dataclass
class Case:
    name: str
    line: str = ""  # the line that the person saw
    problem: str = ""


class Place:
    """A data directory with a network of one voter that has decided a few blocks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = DataDirectory(path)
        self.process: subprocess.Popen[str] | None = None

    def peer(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        everything = {**os.environ, **environment}
        return subprocess.run([*PEER, *arguments], capture_output=True, text=True, timeout=SECONDS_MAX, env=everything)

    def run(self, *more: str) -> list[str]:
        return ["run", "--data-dir", str(self.path), "--role", "voter", "--listen", "127.0.0.1:0", "--no-console", *more]

    def start(self) -> None:
        self.process = subprocess.Popen([*PEER, *self.run()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + SECONDS_MAX
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(UserError):
                trio.run(control_socket.make_client(self.path).status)
                return
            time.sleep(0.05)
        _, errors = self.stop()
        raise UserError(f"it does not start: {errors.strip().splitlines()[-1:]}")

    def stop(self) -> tuple[int, str]:
        """Stop the peer. Return its exit status and its standard error."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            _, errors = self.process.communicate(timeout=SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, errors = self.process.communicate()
        return self.process.returncode, errors

    def found(self) -> None:
        self.peer("init", "--network", "scenario", "--data-dir", str(self.path))
        self.start()
        self.decide()
        self.stop()

    def decide(self) -> subprocess.CompletedProcess[str]:
        """Run a scratch round, which decides at least two blocks."""
        return self.peer("console", "--data-dir", str(self.path), "test")

    def height(self) -> int:
        disk = PeerDisk(self.path)
        try:
            return disk.state.height
        finally:
            disk.close()

    def refuses(self, case: Case, arguments: list[str], *named: str, **environment: str) -> None:
        """Check that `peer` ends with one line that contains all of `named`."""
        done = self.peer(*arguments, **environment)
        judge(case, done.returncode, done.stderr, *named)

    def refuses_to(self, case: Case, command: str, arguments: list[str], *named: str) -> None:
        """Check that the running peer refuses a command, with one line that contains all of `named`."""
        self.start()
        self.refuses(case, [command, "--data-dir", str(self.path), *arguments], *named)
        self.stop()


def judge(case: Case, status: int, errors: str, *named: str) -> None:
    lines = errors.strip().splitlines()
    complaints = [line for line in lines if line.startswith("peer: error: ")]
    case.line = complaints[-1] if complaints else " / ".join(lines[-2:])
    if status == 0:
        case.problem = "exit status 0"
    elif "Traceback" in errors:
        case.problem = "a traceback"
    elif len(complaints) != 1 or lines[-1] != complaints[0]:
        case.problem = f"{len(complaints)} lines of errors, expected one at the end"
    else:
        missing = [text for text in named if text not in case.line]
        case.problem = f"does not name {missing}" if missing else ""


# Cases: each spoils something, checks the reaction of `peer`, and repairs it ------------------------------------------------


def busy_port(place: Place, case: Case) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        place.refuses(case, place.run("--listen", f"127.0.0.1:{port}"), port, "another address")


def open_key(place: Place, case: Case) -> None:
    place.directory.identity_key.chmod(0o644)
    place.refuses(case, place.run(), "0644", "chmod 600")
    place.directory.identity_key.chmod(0o600)


def unknown_setting(place: Place, case: Case) -> None:
    place.directory.settings_file.write_text('rolle = "voter"\n')
    place.refuses(case, place.run(), "rolle", "did you mean role")
    place.directory.settings_file.unlink()


def wrong_type(place: Place, case: Case) -> None:
    place.directory.settings_file.write_text('threads = "many"\n')
    place.refuses(case, place.run(), "threads", "many", "whole number")
    place.directory.settings_file.unlink()


def wrong_flag(place: Place, case: Case) -> None:
    place.refuses(case, place.run("--lisen", "127.0.0.1:0"), "--lisen", "--listen")


def wrong_role(place: Place, case: Case) -> None:
    place.refuses(case, place.run("--role", "trayner"), "trayner", "trainer")


def missing_configuration(place: Place, case: Case) -> None:
    place.refuses(case, place.run("--config", "/nowhere/peer.toml"), "/nowhere/peer.toml")


def missing_directory(place: Place, case: Case) -> None:
    nowhere = str(place.path / "nowhere")
    place.refuses(case, ["run", "--data-dir", nowhere, "--no-console"], nowhere, "peer init")


def missing_key(place: Place, case: Case) -> None:
    key = place.directory.identity_key
    key.rename(key.with_suffix(".aside"))
    place.refuses(case, place.run(), "identity.key", "peer init")
    key.with_suffix(".aside").rename(key)


def missing_text(place: Place, case: Case) -> None:
    place.refuses_to(case, "console", ["train", "--data", "/nowhere/text.txt"], "/nowhere/text.txt")


def wrong_variable(place: Place, case: Case) -> None:
    place.refuses(case, place.run(), "PEER_LISTN", "did you mean PEER_LISTEN", PEER_LISTN="127.0.0.1:0")


def variable_of_others(place: Place, case: Case) -> None:
    """Set a variable that Kubernetes sets beside a service called `peer`. This must not be an error."""
    done = place.peer("config", "show", "--data-dir", str(place.path), PEER_SERVICE_HOST="10.0.0.1")
    case.line = (done.stdout + done.stderr).partition("\n")[0]
    case.problem = "" if done.returncode == 0 else f"exit status {done.returncode}"


def wrong_log_format(place: Place, case: Case) -> None:
    place.refuses(case, place.run("--log-format", "xml"), "xml", "text, json")


def nobody_runs(place: Place, case: Case) -> None:
    place.refuses(case, ["status", "--data-dir", str(place.path)], str(place.path), "peer run")


def demo_without_place(flag: str, below: str, named: str, place: Place, case: Case) -> None:
    """Run the demo with a path under the data directory that is a file or does not exist."""
    flags = {"--report": str(place.path / "run")} | {flag: str(place.path / below)}
    place.refuses(case, ["demo", *(word for pair in flags.items() for word in pair)], below, named)


def unknown_invitation(place: Place, case: Case) -> None:
    place.refuses_to(case, "revoke", ["abcdef"], "abcdef", "`invitations` lists the invitations")


def wrong_own_address(place: Place, case: Case) -> None:
    place.refuses_to(case, "invite", ["--address", "nowhere"], "nowhere", "HOST:PORT")


def too_many_days(place: Place, case: Case) -> None:
    place.refuses_to(case, "invite", ["--days", "1000"], "1000")


def wrong_address(place: Place, case: Case) -> None:
    place.refuses_to(case, "connect", ["nowhere"], "nowhere", "HOST:PORT")


def silent_address(place: Place, case: Case) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    place.refuses_to(case, "connect", [f"127.0.0.1:{port}"], f"127.0.0.1:{port}")  # nothing listens there any more


def nobody_to_retire(place: Place, case: Case) -> None:
    place.refuses_to(case, "retire", ["nobody"], "nobody", "`peer peers`")


def second_daemon(place: Place, case: Case) -> None:
    place.start()
    place.refuses(case, place.run(), str(place.path), "peer console")
    place.stop()


def damaged_database(place: Place, case: Case) -> None:
    whole = place.directory.ledger.read_bytes()
    place.directory.ledger.write_bytes(whole[:4096] + bytes(reversed(whole[4096:8192])) + whole[8192:])
    place.refuses(case, place.run(), "ledger.sqlite", "peer rekey")
    _remove_log(place)
    place.directory.ledger.write_bytes(whole)


def no_database(place: Place, case: Case) -> None:
    whole = place.directory.ledger.read_bytes()
    place.directory.ledger.write_bytes(b"this is a text\n" * 400)
    place.refuses(case, place.run(), "ledger.sqlite", "peer rekey")
    _remove_log(place)
    place.directory.ledger.write_bytes(whole)


def _remove_log(place: Place) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{place.directory.ledger}{suffix}").unlink(missing_ok=True)


def damaged_genesis(place: Place, case: Case) -> None:
    whole = place.directory.genesis.read_bytes()
    place.directory.genesis.write_bytes(whole[:-1])
    place.refuses(case, place.run(), "genesis", "copy it again")
    place.directory.genesis.write_bytes(whole)


def full_disk(reserve_bytes: int, place: Place, case: Case) -> None:
    """Fill the disk while the peer runs: the peer must stop, and must have all decided blocks once there is room again."""
    place.start()
    filler = place.path / "filler"
    with filler.open("wb") as file, suppress(OSError):
        while True:
            free = os.statvfs(place.path).f_bavail * os.statvfs(place.path).f_frsize
            if free <= reserve_bytes:
                break
            file.write(bytes(min(free - reserve_bytes, 64 << 10)))
            file.flush()
    assert place.process is not None
    deadline = time.monotonic() + SECONDS_MAX
    while place.process.poll() is None and time.monotonic() < deadline:
        place.decide()
    judge(case, *place.stop(), str(place.path), "free some space and start again")
    filler.unlink()


CASES: dict[str, Callable[[Place, Case], None]] = {
    "busy port": busy_port,
    "key readable by others": open_key,
    "unknown setting": unknown_setting,
    "setting of the wrong type": wrong_type,
    "wrong flag": wrong_flag,
    "wrong role": wrong_role,
    "missing configuration file": missing_configuration,
    "missing data directory": missing_directory,
    "missing key": missing_key,
    "missing training text": missing_text,
    "variable that is nearly a setting": wrong_variable,
    "variable of somebody else": variable_of_others,
    "wrong format of the log": wrong_log_format,
    "status where no peer runs": nobody_runs,
    "demo: report into no folder": partial(demo_without_place, "--json", "nowhere/x.json", "No such file or directory"),
    "demo: report into a file": partial(demo_without_place, "--report", "genesis", "is a file"),
    "demo: a file in the path": partial(demo_without_place, "--report", "genesis/run", "Not a directory"),
    "demo: no text": partial(demo_without_place, "--data", "nowhere.txt", "nowhere.txt"),
    "revoke no invitation": unknown_invitation,
    "invite to no address": wrong_own_address,
    "invite for too many days": too_many_days,
    "connect to no address": wrong_address,
    "connect where nobody listens": silent_address,
    "retire nobody": nobody_to_retire,
    "second daemon on one directory": second_daemon,
    "damaged database": damaged_database,
    "file that is no database": no_database,
    "damaged genesis": damaged_genesis,
    **{f"full disk, {kib} KiB left": partial(full_disk, kib << 10) for kib in RESERVES_KIB},
}


def run(options: argparse.Namespace) -> int:
    cases = []
    with small_disk() as folder:
        place = Place(folder / "peer")
        place.found()
        for name, spoil in CASES.items():
            if not name.startswith(options.only):
                continue
            before = place.height()
            case = Case(name)
            try:
                spoil(place, case)
                place.start()
                place.decide()
                place.stop()
                if place.height() <= before:
                    case.problem = case.problem or f"at height {place.height()} after it was mended, {before} before"
            except UserError as error:
                case.problem = case.problem or f"after it was mended: {error}"
            finally:
                if place.process is not None:
                    place.stop()
            cases.append(case)
    return report(options, cases)


@contextmanager
def small_disk() -> Iterator[Path]:
    """Mount a small file system that can be filled up without harm to others. This needs the right to mount."""
    folder = Path(tempfile.mkdtemp(prefix="folkmoot-scenario-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        raise UserError(
            f"cannot mount a small disk on {folder}: run this as root, or within `unshare --user --map-root-user --mount`"
        )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def report(options: argparse.Namespace, cases: list[Case]) -> int:
    table = Table(title="bad input", show_lines=True)
    for column in ("case", "what `peer` says", "ok"):
        table.add_column(column, overflow="fold")
    for case in cases:
        table.add_row(case.name, case.line, case.problem or "yes")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    write(options, {"cases": [asdict(case) for case in cases]})
    return 1 if any(case.problem for case in cases) else 0


def _case(text: str) -> str:
    if not any(name.startswith(text) for name in CASES):
        raise argparse.ArgumentTypeError(f"{text!r} begins no case")
    return text


def main() -> int:
    parser = Parser("bad_input", __doc__)
    parser.add_argument(
        "--only",
        type=_case,
        default="",
        metavar="CASE",
        help=f"run only the cases that begin with this text; all: {', '.join(CASES)}",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the table to this file")
    try:
        return partial(run, parser.parse_args())()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
