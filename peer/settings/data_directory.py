"""The data directory of a peer, which holds all its data (`FILES`). The peer writes nowhere else."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from protocol.addresses import parse_address
from protocol.errors import StorageError, UserError
from protocol.identity import Identity, parse_peer_id, peer_id
from storage.crash_points import crash_points
from storage.durable_files import atomic_write, lock_file, sync_directory

if TYPE_CHECKING:
    from ledger.ledger_state import CurrentState  # only for types: commands that call a running peer need not import the ledger

SEED_CHARACTERS = 64  # length of a key's seed in its file: 32 bytes in hexadecimal
STARTING_SECONDS_MAX = 120  # longest normal start of a peer: a large ledger on a busy machine takes a minute
OTHERS_ACCESS_BITS = 0o077  # file mode bits with access of other users: the directory has keys, accounts and answers
# Addresses in the address book: the next start dials all of them, and they include a quorum of a large network.
ADDRESSES_KEPT = 64
SAVE_SECONDS = 10.0  # time between two checks for changed addresses of members
PID_CHARACTERS_MAX = 32  # length of a process id in the lock file; the largest process id on Linux has seven digits

# Name of a file or folder in the data directory -> its contents, for the documentation.
FILES = {
    "identity.key": "The secret Ed25519 seed, mode 0600. A peer with another mode does not start.",
    "identity.old": "The seed before it, after `peer rekey`, until the network has decided the change.",
    "identity.next": "The next seed during `peer rekey`. While it exists, the peer signs with no key.",
    "lost-N/": "Ledger and models that `peer rekey` could not read.",
    "genesis": "The network's genesis.",
    "ledger.sqlite": "Blocks, certificates, the peer's own votes, and rows of the ledger's tables.",
    "ledger.sqlite.committed": "Number of committed transactions. A database with fewer has lost votes, and the peer refuses it.",
    "blobs/": "Payloads and data, by digest.",
    "blobs/parts/": "Parts of objects above 16 MiB, also of those that are still being downloaded.",
    "models/": "Parameters, optimizer state and estimates of the last rounds and of anchors.",
    "buffers/": "Error feedback and kept inner state, as long as a re-execution may need them.",
    "batches/": "Data of steps of client runs, with `keep_batches_gb`: a folder for each round.",
    "texts/": "Texts of jobs, joined from their shards, with the tokens of a BPE.",
    "programs/": "Compiled programs of an engine. Without them, the next start compiles again.",
    "diagnostics/": "Wrong states of this peer, by height.",
    "services/serve/answers.sqlite": "Answers of annotators that are not opened yet. A peer without this file forfeits them.",
    "services/serve/accounts.sqlite": "Keys of annotators with an account, sealed by their passphrases.",
    "services/serve/golds.sqlite": "Right answers of this author's tasks, until the project is closed. Nobody else has them.",
    "services/serve/doors.sqlite": "Hashes of operators' tokens, sessions, used invitation codes, refused annotators.",
    "services/serve/log.sqlite": "Actions of operators by HTTP.",
    "services/serve/imported.sqlite": "Imported pages of tasks. A second import of the same file adds nothing.",
    "api_keys.sqlite": "Hashes, quotas and last uses of API keys, mode 0600. Without it, programs on this machine need no key.",
    "invitation": "The invitation that this peer joined with. It is secret until it is used.",
    "invitations": "The last 1,024 invitations of this peer, without their secrets.",
    "addresses": "Last addresses of members, `PEER@HOST:PORT` in each line. A stopped network restarts with them.",
    "silences": "With `retire_after_days`: the seconds of each member's silence.",
    "peer.toml": "Settings.",
    "peer.lock": "Lock of the running daemon, with its process id.",
    "peer.log": "The log while the prompt uses the terminal.",
    "control.sock": "Socket for commands and consoles, mode 0600.",
    "control.path": "Path of that socket, if the usual path is too long.",
    "console_history": "Lines that were typed at the prompt.",
}

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space and start again",
    errno.EDQUOT: "the disk quota is used up; free some space and start again",
    errno.EROFS: "the file system is read-only; mount it writable or choose another --data-dir",
    errno.EACCES: "permission denied; check the owner of the data directory",
    errno.EPERM: "permission denied; check the owner of the data directory",
    errno.EEXIST: "it is not a directory; choose another --data-dir",
    errno.ENOTDIR: "a part of the path is not a directory; choose another --data-dir",
}


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn errors of the operating system in this context into `StorageError`s, whose text names the path and a remedy."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise StorageError(f"{error.filename or path}: {reason}") from None


def _require_private(path: Path) -> None:
    """Remove the access of other users and print a notice. Raises `UserError` if the directory belongs to another user."""
    found = path.stat()
    if found.st_uid != os.geteuid():
        way = "run as that user, or choose another --data-dir"
        raise UserError(
            f"data directory {path} belongs to user {found.st_uid}, but this process runs as user {os.geteuid()}: {way}"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & OTHERS_ACCESS_BITS:
        path.chmod(mode & ~OTHERS_ACCESS_BITS)
        private = f"{mode & ~OTHERS_ACCESS_BITS:04o}"
        told = f"data directory {path} had mode {mode:04o}, which let other users open it: changed to {private}"
        with contextlib.suppress(OSError):
            print(f"peer: {told}", file=sys.stderr)


class DataDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity_key = path / "identity.key"
        self.addresses = path / "addresses"
        self.former_key = path / "identity.old"
        self.next_key = path / "identity.next"
        self.genesis = path / "genesis"
        self.ledger = path / "ledger.sqlite"
        self.blobs = path / "blobs"
        self.buffers = path / "buffers"
        self.batches = path / "batches"  # data of rounds of client runs, with the setting `keep_batches_gb`
        self.models = path / "models"
        self.texts = path / "texts"  # files with the texts of jobs, joined from shards
        self.control_socket = path / "control.sock"
        self.lock_file = path / "peer.lock"
        self.settings_file = path / "peer.toml"
        self.history = path / "console_history"
        self.api_keys = path / "api_keys.sqlite"

    @classmethod
    def create(cls, path: Path) -> DataDirectory:
        """Create a data directory with its missing folders, and return it.

        Existing files stay. Raises `UserError` or `StorageError`.
        """
        directory = cls(path)
        with storage_errors(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(path)
            directory.blobs.mkdir(exist_ok=True)
            directory.models.mkdir(exist_ok=True)
            directory.texts.mkdir(exist_ok=True)
        return directory

    @classmethod
    def open(cls, path: Path) -> DataDirectory:
        """Return the data directory of an existing peer. Raises `UserError` if the directory is missing or cannot be written."""
        if not path.is_dir():
            raise UserError(
                f"no data directory at {path}: create one with `peer init` or `peer join`, or choose another with --data-dir"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"data directory {path} cannot be written by this user; check its owner and mode")
        if not cls(path).identity_key.exists():
            raise UserError(f"{path} has no identity.key: create one with `peer init` or `peer join`")
        return cls.create(path)

    def create_identity(self) -> Identity:
        """Create the peer's key. Raises `UserError` if the peer has a key."""
        identity = Identity.generate()
        self.write_identity(identity)
        return identity

    def write_identity(self, identity: Identity) -> None:
        try:
            self._create(self.identity_key, identity.seed.hex().encode() + b"\n", 0o600)
        except FileExistsError:
            raise UserError(f"{self.identity_key} exists: this peer already has an identity") from None

    def begin_key_replacement(self) -> None:
        """Create the next key, and store the old key in a second file.

        Until `replace_identity`, `load_identity` fails, even after a crash, because the old key's votes may be removed meanwhile.
        After a crash, the same calls continue with the same next key.
        """
        if not self.next_key.exists():
            self._create(self.next_key, Identity.generate().seed.hex().encode() + b"\n", 0o600)
        if not self.former_key.exists():
            with storage_errors(self.former_key):
                os.link(self.identity_key, self.former_key)
                sync_directory(self.path)

    def replace_identity(self) -> Identity:
        """Replace the old key by the next key, and return the new key."""
        with storage_errors(self.identity_key):
            os.replace(self.next_key, self.identity_key)
            sync_directory(self.path)
        return self.load_identity()

    def load_former_identity(self) -> Identity | None:
        """Return the previous key, or None once the network has decided the change."""
        return self._load_key(self.former_key) if self.former_key.exists() else None

    def forget_former_identity(self) -> None:
        with storage_errors(self.former_key):
            self.former_key.unlink(missing_ok=True)

    def archive_state(self) -> Path:
        """Move models and ledger into a new folder, and return the folder.

        The next key starts without models and ledger, but with the blobs. Call it only between `begin_key_replacement` and
        `replace_identity`. After a crash, the same call continues. The file with the count of committed transactions is moved
        last: the store refuses to open with this file alone.
        """
        assert self.next_key.exists()
        number = next(n for n in itertools.count() if not (self.path / f"lost-{n}").exists())
        folder = self.path / f"lost-{number}"
        with storage_errors(folder):
            folder.mkdir()
            for file in (self.models, *sorted(self.path.glob(f"{self.ledger.name}*"))):
                file.rename(folder / file.name)
            self.models.mkdir()
            sync_directory(self.path)
        return folder

    def load_identity(self) -> Identity:
        """Return the peer's key.

        Raises `UserError` if the key is missing, damaged, readable by other users, or being replaced.
        """
        if self.next_key.exists():
            raise UserError(
                f"{self.next_key}: a change of this peer's key was interrupted; run `peer rekey` again to complete it"
            )
        return self._load_key(self.identity_key)

    def load_identity_to_replace(self) -> Identity:
        """Return the peer's present key for a replacement, also for one that a crash has interrupted.

        Raises `UserError` while the network has not decided an earlier replacement.
        """
        present, former = self._load_key(self.identity_key), self.load_former_identity()
        if former is not None and former.seed != present.seed:
            way = "run the peer until the network has decided it; if it cannot run, see docs/how-to/back-up-and-move.md"
            raise UserError(f"{self.former_key} belongs to a change of the key that is not decided yet: {way}")
        return present

    def _load_key(self, path: Path) -> Identity:
        try:
            with storage_errors(path), open(path, "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                text = file.read(SEED_CHARACTERS + 2)
        except StorageError as error:
            if not path.exists():
                raise UserError(f"{self.path} has no {path.name}: create one with `peer init` or `peer join`") from None
            raise error
        if mode & OTHERS_ACCESS_BITS:
            raise UserError(f"{path} has mode {mode:04o}, which lets other users read the key: run chmod 600 {path}")
        try:
            seed = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            seed = b""
        if len(seed) != SEED_CHARACTERS // 2:
            raise UserError(f"{path} is damaged: expected {SEED_CHARACTERS} hexadecimal digits; restore it from a copy")
        return Identity(seed)

    def write_genesis(self, data: bytes) -> None:
        """Store the network's genesis. Raises `UserError` if this peer already belongs to a network."""
        try:
            self._create(self.genesis, data, 0o644)
        except FileExistsError:
            raise UserError(f"{self.genesis} exists: this peer already belongs to a network; use another --data-dir") from None

    def read_genesis(self) -> bytes:
        if not self.genesis.exists():
            raise UserError(f"{self.path} does not belong to a network yet: run `peer init` or `peer join` first")
        with storage_errors(self.genesis):
            return self.genesis.read_bytes()

    def _create(self, path: Path, data: bytes, mode: int) -> None:
        """Create a file atomically: after a crash it is complete or absent. Raises `FileExistsError`."""
        draft = path.with_name(f"{path.name}.{os.getpid()}.new")
        with storage_errors(path), crash_points(path.name):
            draft.unlink(missing_ok=True)
            try:
                descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
                with open(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    os.link(draft, path)  # unlike a rename, a link never replaces a file
                except FileExistsError:
                    exists = True
                else:
                    exists = False
            finally:
                draft.unlink(missing_ok=True)
            sync_directory(path.parent)
        if exists:
            raise FileExistsError(path)

    def starting_process(self) -> int | None:
        """Return the id of a live process that locked this directory recently and may not answer calls yet, or None."""
        try:
            if time.time() - self.lock_file.stat().st_mtime > STARTING_SECONDS_MAX:
                return None  # another process may have the id by now
            process = int(self.lock_file.read_text())
            os.kill(process, 0)
        except (OSError, ValueError):
            return None
        return process

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of a daemon on this directory during the block.

        The operating system also releases the lock when the process ends. Raises `UserError` if another process holds the lock.
        """
        with storage_errors(self.lock_file):
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                lock_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, self.path)
            except BlockingIOError:
                holder = os.pread(descriptor, PID_CHARACTERS_MAX, 0).decode("ascii", "replace").strip() or "unknown"
                raise UserError(
                    f"a peer already runs on {self.path} (process {holder}); "
                    f"attach to it with `peer console --data-dir {shlex.quote(str(self.path))}`"
                ) from None
            with storage_errors(self.lock_file):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
            yield
        finally:
            os.close(descriptor)


def load_addresses(file: Path, tell: Callable[[str], None] = lambda text: None) -> tuple[str, ...]:
    """Return the entries of the address book, `PEER@HOST:PORT`. Invalid lines are skipped and reported to `tell`."""
    with storage_errors(file):
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    readable = tuple(line for line in lines if _is_readable(line))
    if len(readable) < len(lines):
        tell(f"{file}: {len(lines) - len(readable)} lines are not PEER@HOST:PORT and are ignored")
    return readable


def peer_of_entry(line: str) -> bytes:
    return parse_peer_id(line.rpartition("@")[0])


def _is_readable(line: str) -> bool:
    address = line.rpartition("@")[2]
    try:
        peer_of_entry(line)
        parse_address(address)
    except UserError:
        return False
    return True


async def save_addresses_periodically(file: Path, reached: Callable[[], Mapping[bytes, str]], applied: CurrentState) -> None:
    """Store the last addresses of members, newest first, whenever `reached` returns new addresses. Departed members are removed.

    With this address book, a network in which all peers were stopped can start again without its first peer.
    """
    while True:
        before, members = load_addresses(file), applied.current.members
        has_gone = members.is_departed_key
        now = {peer_id(peer): address for peer, address in reached().items() if peer in members.members and not has_gone(peer)}
        # Peers and addresses whose old entries are dropped: a peer has a new address, or an address belongs to another peer.
        replaced = {*now, *now.values()}
        kept = [entry for entry in before if replaced.isdisjoint(entry.split("@")) and not has_gone(peer_of_entry(entry))]
        entries = tuple([f"{peer}@{address}" for peer, address in now.items()] + kept)[:ADDRESSES_KEPT]
        if set(entries) != set(before):
            await trio.to_thread.run_sync(_save, file, entries)
        await trio.sleep(SAVE_SECONDS)


def _save(file: Path, entries: tuple[str, ...]) -> None:
    with storage_errors(file), atomic_write(file) as stream:
        stream.write("".join(f"{entry}\n" for entry in entries).encode())
