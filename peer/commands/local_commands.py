"""The commands `peer identity`, `rekey`, `init`, `join`, `run`, `audit`, `verify`, `shards` and `doctor`, and the setup of the
log."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from consensus.voter_set import VoterSet
from features.json_output import to_json, to_json_value
from features.lazy_import import garbage_collection_paused
from features.peer_names import PeerNames
from features.text_tables import format_quorum, pluralize
from ledger.core.genesis import Founder, Genesis
from peer import features
from peer.commands.command_line_parser import settings_from_options
from peer.commands.standard_streams import detach_descriptors, program_name, terminal_descriptors
from peer.features import founding_modules, roles, rules_of
from peer.settings.config import Config, ResolvedSettings, format_toml_value, load_settings, setting_value
from peer.settings.data_directory import DataDirectory, load_addresses, peer_of_entry, storage_errors
from peer.settings.invitation import InvitationString, parse_invitation
from protocol import codec
from protocol.addresses import format_listen_addresses
from protocol.errors import LostVotesError, UserError
from protocol.identity import Identity, parse_peer_id, peer_id, short_id
from protocol.limits import NAME_CHARACTERS_MAX
from protocol.name_validation import name_problem
from protocol.units import display_round_number
from storage import durable_files
from storage.regular_files import require_writable_kind

if TYPE_CHECKING:
    from peer.daemon.daemon import MakeParticipant
    from peer.export.batch_replay import RequestedUpdates

EXIT_FALSE_UPDATES = 1  # exit status of `peer audit` for a sound export with false updates, and 2 for an export that is not sound


def _config(options: argparse.Namespace) -> Config:
    return settings_from_options(options).config


def _identity(directory: DataDirectory) -> Identity:
    return directory.load_identity() if directory.identity_key.exists() else directory.create_identity()


def show_identity(options: argparse.Namespace) -> None:
    print(peer_id(_identity(DataDirectory.create(_config(options).data_directory)).public))


def rekey_peer(options: argparse.Namespace) -> None:
    """Give a stopped peer a new key. A peer with a lost vote log begins a new one: only a new key may vote without the old log.

    Raises `UserError` if the network could not decide the change of keys.
    """
    config = _config(options)
    directory = DataDirectory.open(config.data_directory)
    with directory.lock():
        genesis, old = Genesis.decode(directory.read_genesis()), directory.load_identity_to_replace()
        lost = None
        try:
            voters = _voters(directory, genesis)
        except LostVotesError as error:
            if not config.bootstrap:
                _require_others(directory, genesis, old)
            print(error)
            directory.begin_key_replacement()
            lost = directory.archive_state()
        else:
            # The old key stops voting, so the others must have a quorum. An interrupted rekey has checked that, and may have
            # emptied the log.
            if not directory.next_key.exists() and old.public in voters and voters.quorum == len(voters):
                raise UserError(
                    f"replacing this key needs all {len(voters)} voters, including this one: let another member vote first"
                )
            directory.begin_key_replacement()
        new = directory.replace_identity()
    print(f"old key     {peer_id(old.public)}, kept in {directory.former_key.name} until the network has decided the change")
    print(f"new key     {peer_id(new.public)}")
    if lost is not None:
        print(f"moved to    {lost}: the peer downloads the ledger again from other peers")
    where = _place(options) + (f" --bootstrap {shlex.quote(options.bootstrap)}" if options.bootstrap else "")
    print(f"next        {program_name()} run{where}    # asks for the change, and votes with the new key two heights later")


def _voters(directory: DataDirectory, genesis: Genesis) -> VoterSet:
    """Return the voters of the last ledger state on this peer's disk."""
    from storage.ledger_store import LedgerStore
    from training.model_store import JobModelStore

    with contextlib.closing(LedgerStore(directory.ledger, genesis.chain_id)) as store:
        encoded = store.encoded_state()
    return VoterSet(rules_of(genesis, JobModelStore(directory.models)).restore_state(encoded).members.voters)


def _require_others(directory: DataDirectory, genesis: Genesis, old: Identity) -> None:
    """Raise `UserError` if the founders have no quorum without the old key, and this peer knows no address of a later member."""
    founders = genesis.voters
    later = {peer_of_entry(line) for line in load_addresses(directory.addresses)} - founders.members
    if old.public not in founders or founders.quorum < len(founders) or later:
        return
    alone = "this peer is the only founder" if len(founders) == 1 else f"a decision needs all {len(founders)} founders"
    lost = f"{directory.ledger} is lost, and {alone}, so the network cannot replace the key; nothing was changed"
    way = f"create a new network with `peer init --network {shlex.quote(genesis.network)} --data-dir NEW`"
    raise UserError(f"{lost}. If further voters have joined, give one with `peer rekey --bootstrap PEER@HOST:PORT`, or {way}")


def init_network(options: argparse.Namespace) -> None:
    """Found a network: write its genesis, and an identity if there is none. Raises `UserError` for invalid arguments."""
    config = _config(options)
    network = options.network.strip()
    if not 1 <= len(network) <= NAME_CHARACTERS_MAX:
        raise UserError(f"--network {options.network!r} must have 1 to {NAME_CHARACTERS_MAX} characters")
    if problem := name_problem(network):
        raise UserError(f"--network {options.network!r} {problem}")
    others = [parse_peer_id(text) for text in options.voter]
    for at, key in enumerate(others):
        if key in others[:at]:
            raise UserError(f"--voter {options.voter[at]} is repeated")
    directory = DataDirectory.create(config.data_directory)
    me = _identity(directory)
    founders = {key: Founder(short_id(key), ()) for key in others}
    founders[me.public] = Founder(config.name or short_id(me.public), ())
    modules = founding_modules()
    genesis = Genesis(network, int(time.time() * 1000), secrets.token_bytes(16), dict(sorted(founders.items())), modules)
    directory.write_genesis(codec.encode(genesis))
    _keep_settings(options, directory, ())
    program, place = program_name(), _place(options)
    print(
        f"network     {network}\nchain id    {genesis.chain_id.hex()}\npeer id     {peer_id(me.public)}",
        f"voters      {format_quorum(len(founders), genesis.voters.faults_tolerated, genesis.voters.quorum)}",
        f"data        {directory.path}",
        f"next        {program} run{place}    # keeps this terminal",
        f"then        {program} invite{place}    # in a second terminal: prints an invitation for another peer",
        f"others      {program} join INVITATION",
        sep="\n",
    )
    if genesis.voters.quorum > 1:
        print(f"            no block is decided before {genesis.voters.quorum} of the {len(founders)} founders run")


def _place(options: argparse.Namespace) -> str:
    """Return the option `--data-dir` that the next command needs for this peer, or an empty text."""
    return f" --data-dir {shlex.quote(options.data_directory)}" if options.data_directory else ""


def join_network(options: argparse.Namespace) -> int:
    """Store an invitation and run the peer, which catches up and asks for admission. Raises `UserError` for a bad invitation."""
    config = _config(options)
    require_engine_of_role(config)
    invitation = parse_invitation(options.invite)
    directory = DataDirectory.create(config.data_directory)
    with directory.lock():  # fails if the peer runs: its files must not change
        me = _identity(directory)
        genesis = codec.encode(invitation.genesis)
        # A repeated `join` finds the same genesis and leaves it.
        if not (directory.genesis.exists() and directory.read_genesis() == genesis):
            directory.write_genesis(genesis)
        with storage_errors(directory.path), durable_files.atomic_write(directory.path / "invitation", 0o600) as stream:
            stream.write(options.invite.strip().encode() + b"\n")
        _keep_settings(options, directory, _addresses(config, invitation))
    options.bootstrap = ",".join(_addresses(config, invitation))
    print(f"joining {invitation.genesis.network} as {peer_id(me.public)}, data in {directory.path}", flush=True)
    return run_peer_with_config(_config(options), options.console)


def _addresses(config: Config, invitation: InvitationString) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*config.bootstrap, *invitation.addresses)))


def _keep_settings(options: argparse.Namespace, directory: DataDirectory, bootstrap: tuple[str, ...]) -> None:
    """Write the settings of the command line and the addresses to dial into the settings file.

    Other settings of the file stay.
    """
    settings, file = settings_from_options(options), directory.settings_file
    said = _settings_from(settings, "command line")
    said.pop("data_directory", None)
    if bootstrap:
        said["bootstrap"] = bootstrap
    written = _settings_from(load_settings({}, {}, file), str(file)) if file.exists() else {}
    if written | said != written:
        with storage_errors(file), durable_files.atomic_write(file) as stream:
            stream.write("".join(f"{name} = {format_toml_value(value)}\n" for name, value in (written | said).items()).encode())


def _settings_from(settings: ResolvedSettings, origin: str) -> dict[str, Any]:
    return {name: setting_value(settings.config, name) for name, where in settings.origins.items() if where == origin}


def run_peer(options: argparse.Namespace) -> int:
    config = _config(options)
    require_engine_of_role(config)
    return run_peer_with_config(config, options.console)


def require_engine_of_role(config: Config) -> None:
    """Raise `UserError` if the role computes and the package of its engine is not installed."""
    if roles()[config.role].needs_worker:
        others = " or ".join(f"--role {role.name}" for role in roles().values() if not role.needs_worker)
        features.require_engine(config.engine, f"the role {config.role} trains", f"take {others}")


def run_peer_with_config(config: Config, console: bool, make_participant: MakeParticipant | None = None) -> int:
    on_terminal = console and sys.stdin.isatty() and sys.stdout.isatty()
    _log_to(config, Path(config.data_directory) / "peer.log" if on_terminal else None)
    return trio.run(partial(_run, config, on_terminal, make_participant), strict_exception_groups=True)


async def _run(config: Config, on_terminal: bool, make_participant: MakeParticipant | None) -> int:
    with garbage_collection_paused():
        from peer.daemon.daemon import make_honest_participant, running_daemon, tune_garbage_collector, wait_for_stop

    logs_to_terminal = not config.log_file and sys.stderr.isatty()
    hung_up = partial(_end_with_terminal, terminal_descriptors()) if on_terminal or logs_to_terminal else _reopen_log
    async with running_daemon(config, make_participant or make_honest_participant) as daemon:
        tune_garbage_collector()
        status = await daemon.api.status()
        where = format_listen_addresses(status.listen_addresses, status.announced_addresses)
        ready = partial(logging.getLogger("peer").info, "%s of network %s %s", status.peer, status.network, where)
        if on_terminal:
            async with trio.open_nursery() as nursery:

                async def prompt() -> None:
                    from peer.commands import console

                    await console.run_console(daemon.api, attached=False, history=DataDirectory(config.data_directory).history)
                    daemon.stopped.set()

                nursery.start_soon(prompt)
                await wait_for_stop(daemon, (signal.SIGTERM,), hung_up, ready)  # SIGINT is not in the list: the prompt handles it
                nursery.cancel_scope.cancel()
        else:
            await wait_for_stop(daemon, (signal.SIGINT, signal.SIGTERM), hung_up, ready)
    return 0


# When the terminal closes ---------------------------------------------------------------------------------------------


def _end_with_terminal(streams: tuple[int, ...]) -> bool:
    """Handle SIGHUP of a peer whose prompt or log uses the terminal. Returns False: the peer stops, as after `quit`."""
    detach_descriptors(streams)
    return False


def _reopen_log() -> bool:
    """Handle SIGHUP of a peer without a terminal: create a log file again that was moved away.

    Returns True: the peer continues.
    """
    for lines in logging.getLogger().handlers:
        if isinstance(lines, WatchedFileHandler):
            with contextlib.suppress(OSError):  # the next write to the log reports the failure
                lines.reopenIfNeeded()
    logging.getLogger("peer").info("SIGHUP: reopened the log, the peer keeps running")
    return True


def _log_to(config: Config, file: Path | None) -> None:
    """Direct the log to the file of the setting `log_file`, otherwise to `file`, otherwise to standard error."""
    file = Path(config.log_file).expanduser() if config.log_file else file
    with storage_errors(file or Path("standard error")):
        if file is not None:
            require_writable_kind(file)
        lines = LogStreamHandler() if file is None else LogFileHandler(file)
    text_format = "%(asctime)s %(levelname)s %(message)s"
    lines.setFormatter(JsonLines() if config.log_format == "json" else TextLines(text_format))
    logging.basicConfig(level=config.log_level.upper(), handlers=[lines], force=True)


def run_audit(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from peer.commands.offline_audit import audit_data_directory, audit_with_worker

    folder = Path(options.directory)
    replay = audit_data_directory if DataDirectory(folder).genesis.is_file() else audit_with_worker
    with Progress(transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("replaying blocks", total=None)
        found = replay(folder, lambda done, total: progress.update(task, completed=done, total=total))
    print(
        f"network {found.network}, chain id {found.chain_id}",
        f"{found.blocks} blocks with {found.signatures} valid commit signatures",
        f"{found.rounds} rounds with {found.proposals} accepted updates",
        sep="\n",
    )
    for job, root in found.models.items():
        print(f"job {found.names[job]} ({job[:16]}): model root {root} reproduced")
    for job, vouched in found.vouch_counts.items():
        known = PeerNames(found.members)
        who = ", ".join(f"{known[peer]} {count}" for peer, count in vouched.vouchers.most_common())
        print(f"job {job[:16]}: {pluralize(vouched.updates, 'update')} re-executed before the vote, vouched for by {who}")
    for job, requested in found.requested_updates.items():
        for line in _requested_lines(requested, PeerNames(found.members)):
            print(f"job {job[:16]}: {line}")
    for job, (before, rounds) in found.initial_models.items():
        print(f"job {job[:16]} starts from job {before[:16]}@{rounds}, reproduced")
    print(f"certified state root {found.state_root} reproduced")
    print("the export is sound: every certificate verified, every block replayed, nothing missing, changed or added")
    if false := sum(len(requested.false_updates) for requested in found.requested_updates.values()):
        print(f"but a quorum accepted {pluralize(false, 'false update')}: see above")
        return EXIT_FALSE_UPDATES
    return 0


def _requested_lines(requested: RequestedUpdates, names: PeerNames) -> Iterator[str]:
    """Yield lines for people about the accepted updates of a job on request."""
    if requested.without_data:
        what = f"{pluralize(requested.without_data, 'update')} replayed from payloads, but not re-executed"
        yield f"{what}: peers delete {requested.description} after each round, unless one keeps them with `keep_batches_gb`"
    if requested.first_confirmed is not None:
        since = f"from round {display_round_number(requested.first_confirmed)} on"
        yield f"{pluralize(requested.confirmed, 'update')} re-executed from kept data {since}, with the same result"
    for reason, count in requested.unjudged.items():
        yield f"{pluralize(count, 'update')} with kept data not re-executed: {reason}"
    for false in requested.false_updates:
        whose = f"the update of {names[false.trainer]} in round {display_round_number(false.round)}"
        yield f"{whose} is false: {false.reason} ({false.meaning})"


def verify_row_proof(options: argparse.Namespace) -> int:
    from peer.commands import view_tables
    from peer.commands.table_renderer import make_printer
    from peer.export.row_proof_file import verify_row_proof as check

    genesis = Path(options.genesis) if options.genesis else None
    found = check(Path(options.file), options.chain_id or "", genesis, options.unknown_module)
    if options.json:
        print(to_json(found))
    else:
        make_printer()(view_tables.proven_row(found))
    return 0


def describe_token_shards(options: argparse.Namespace) -> int:
    from training.data.token_shards import make_manifest

    print(make_manifest(Path(options.directory)))
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    from peer.commands.table_renderer import make_printer
    from peer.doctor.doctor import examine_peer, findings_table
    from peer.doctor.findings import EXIT_STATUS, gravest_level

    findings = trio.run(examine_peer, partial(settings_from_options, options))
    if options.json:
        print(to_json(findings))
    else:
        make_printer()(findings_table(findings))
    return EXIT_STATUS[gravest_level(findings)]


class LogStreamHandler(logging.StreamHandler):
    """A handler that logs to standard error. A failed write does not stop the peer.

    The failure is reported once, and again only after a write has succeeded.
    """

    _fails = _is_told = False

    @property
    def place(self) -> str:
        return "standard error"

    def emit(self, record: logging.LogRecord) -> None:
        self._fails = False
        try:
            super().emit(record)
        except OSError:  # the log file was moved away and cannot be created again
            self.handleError(record)
        self._is_told = self._fails

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)  # other errors come from the format of a line, which is a bug
            return
        self._fails = True
        if not self._is_told:
            told = f"peer: the log cannot be written to {self.place}: {error.strerror}; the peer keeps running without a log"
            with contextlib.suppress(OSError):
                print(told, file=sys.stderr, flush=True)


class LogFileHandler(LogStreamHandler, WatchedFileHandler):
    """A handler that logs to a file.

    Other programs may move the file away; it is then created again. Raises `OSError` if the file cannot be opened.
    """

    @property
    def place(self) -> str:
        return self.baseFilename

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the failed write has reported the error
            super().close()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(sep="T", timespec="milliseconds")


class TextLines(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)


class JsonLines(logging.Formatter):
    """A formatter with one JSON object per line.

    The line of an event (`peer.runtime.telemetry`) has the event's `kind` and fields. Other lines have the kind `log`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": _time(record),
            "level": record.levelname.lower(),
            "kind": getattr(record, "kind", "log"),
            "text": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        fields: dict[str, Any] = getattr(record, "fields", {})
        return json.dumps(
            to_json_value(line | {name: value for name, value in fields.items() if name not in line}), ensure_ascii=False
        )
