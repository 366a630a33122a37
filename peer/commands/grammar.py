"""The language of the prompt: from a line to a command. `peer COMMAND` on the command line has the same arguments."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from peer.commands.arguments import Parser, not_negative, whole_number
from peer.settings.config import nearest
from protocol.api import INVITATION_DAYS, INVITATION_DAYS_MAX, TrainRequest
from protocol.errors import UserError

PRESETS = ("local", "sparse", "per-step")  # of `training.spec`, which is imported only where they are used
PEER_ABOUT = "a member's name, or its peer id, of which the first characters are enough"
IN_JSON = ("status", "stats", "peers", "jobs", "rounds", "invitations")  # what also speaks to programs
LINES_SHOWN = 20  # of rounds, audits and log, unless told otherwise

COMMANDS = {
    "stats": "decisions, traffic, refusals, memory",
    "status": "who and where this peer is",
    "peers": "who takes part, and the links to them",
    "train": "start a job: --preset NAME --rounds N --data PATH --name NAME --vocabulary N --set FIELD=VALUE",
    "test": "a scratch round on the live network, phase by phase",
    "cancel": "end a job: cancel JOB (its author alone, voters by a quorum)",
    "jobs": "what is and was trained",
    "rounds": "the last closed rounds: verdicts, loss, time",
    "audits": "sampled audits: who, by whom, what came out, and everybody's standing",
    "log": "what happened last",
    "connect": "dial an address at once, and keep to it: connect HOST:PORT …",
    "invite": "a string that lets somebody join as a member",
    "invitations": "those that this peer made, and what has become of them",
    "revoke": "take an invitation back: revoke TOKEN",
    "approve": "let a member vote: approve PEER",
    "retire": "take the vote and the place in rounds from a member that is gone: retire PEER (voters by a quorum)",
    "challenge": "re-execute an accepted proposal, and challenge what is false in it: challenge TRAINER [ROUND]",
    "leave": "stop voting",
    "sample": 'text from the current model: sample "PROMPT"',
    "export": "everything decided so far, for `peer audit`: export DIR",
    "help": "this list, or one command: help COMMAND",
    "quit": "stop the peer; in an attached console: leave it running",
}


def parser() -> Parser:
    """The grammar of the prompt; `peer COMMAND` uses the same one."""
    whole = Parser(prog="", add_help=False)
    commands = whole.add_subparsers(dest="command", metavar="command")
    for name, about in COMMANDS.items():
        add_arguments(name, commands.add_parser(name, help=about, prog=name, add_help=False))
    return whole


def add_arguments(name: str, command: argparse.ArgumentParser) -> None:
    """The arguments of one command of the prompt."""
    if name in IN_JSON:
        command.add_argument("--json", action="store_true", help="one JSON document, for programs")
    if name in ("rounds", "audits", "log"):
        command.add_argument("last", nargs="?", type=whole_number(1), default=LINES_SHOWN, metavar="N", help="how many")
    elif name == "cancel":
        command.add_argument("job", metavar="JOB", help="a running job's id; its first characters are enough")
    elif name == "invite":
        about = f"how long it is valid, 1 to {INVITATION_DAYS_MAX} (default {INVITATION_DAYS})"
        days = whole_number(1, INVITATION_DAYS_MAX)
        command.add_argument("--days", type=days, default=INVITATION_DAYS, metavar="N", help=about)
        about = "where newcomers reach this peer (default: the setting advertise, or where it listens)"
        command.add_argument(
            "--address", dest="addresses", action="extend", nargs="+", default=[], metavar="HOST:PORT", help=about
        )
    elif name == "connect":
        command.add_argument("addresses", nargs="+", metavar="ADDRESS", help="HOST:PORT, or PEER-ID@HOST:PORT")
    elif name == "revoke":
        command.add_argument("token", metavar="TOKEN", help="of `invitations`; its first characters are enough")
    elif name == "approve":
        command.add_argument("peer", metavar="PEER", help=PEER_ABOUT)
    elif name == "retire":
        command.add_argument("peer", metavar="PEER", help=PEER_ABOUT)
        about = "also where fewer liars are tolerated without it; a quorum must say so"
        command.add_argument("--lower-tolerance", action="store_true", help=about)
    elif name == "challenge":
        command.add_argument("peer", metavar="TRAINER", help=PEER_ABOUT)
        about = "which of its proposals (default: the last one that can be challenged)"
        command.add_argument("round", nargs="?", type=whole_number(0), metavar="ROUND", help=about)
    elif name == "export":
        command.add_argument("directory", metavar="DIR", help="a new directory")
    elif name == "help":
        command.add_argument("topic", nargs="?", default="", metavar="COMMAND", help="a command of this list")
    elif name == "train":
        _add_train_arguments(command)
    elif name == "sample":
        command.add_argument("prompt", metavar="PROMPT", help="text to go on from")
        command.add_argument("--tokens", type=whole_number(1, 100_000), default=200, metavar="N", help="how many (default 200)")
        command.add_argument("--temperature", type=not_negative, default=0.8, metavar="T", help="0: the likeliest (default 0.8)")
        command.add_argument("--seed", type=whole_number(0), default=0, metavar="S", help="of the choice of tokens (default 0)")


def _add_train_arguments(command: argparse.ArgumentParser) -> None:
    add_preset_argument(command)
    command.add_argument("--rounds", type=whole_number(1), default=0, metavar="N", help="how many rounds to train")
    command.add_argument("--data", metavar="PATH", help="text file or folder, or `local`; default: the built-in text")
    command.add_argument("--name", default="", metavar="NAME", help="what people call the job")
    command.add_argument("--vocabulary", type=whole_number(256), default=0, metavar="N", help="more than 256: train a BPE")
    add_set_argument(command)


def add_set_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--set", action="extend", nargs="+", default=[], metavar="FIELD=VALUE", help="other fields of the job")


def add_preset_argument(command: argparse.ArgumentParser) -> None:
    about = "settings that go together (default: those of `local`)"
    command.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"{', '.join(PRESETS)}: {about}")


def preset_overrides(preset: str | None) -> dict[str, str]:
    """A preset's fields as a person would type them, but for the warm-up, which follows from how many rounds there are."""
    from training.spec import PRESETS

    return {name: str(value) for name, value in PRESETS[preset].items() if name != "warmup_rounds"} if preset else {}


def parse(line: str) -> argparse.Namespace | None:
    """The command in a line, None for an empty one. Raises `UserError`."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UserError(f"{line.strip()!r}: {error}; close the quotation") from None
    return parse_words(words) if words else None


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    for word in words:
        if any("\ud800" <= character <= "\udfff" for character in word):  # as Python reads bytes that are no characters
            raise UserError(f"{word!r} is not UTF-8: type it in a UTF-8 terminal, or save the commands as UTF-8")
    if words[0] not in COMMANDS:
        raise UserError(f"no command {words[0]!r}{nearest(words[0], COMMANDS)}")
    if not {"-h", "--help"}.isdisjoint(words[1:]):
        return argparse.Namespace(command="help", topic=words[0])
    return parser().parse_args(words)


def train_request(options: argparse.Namespace) -> TrainRequest:
    overrides = preset_overrides(options.preset) | said_of_job(options)
    if options.data == "":
        raise UserError("--data '' names no text: give a file or folder, or leave --data out for the built-in text")
    data = options.data or ""
    if data not in ("", "local"):
        data = str(Path(data).expanduser().absolute())  # the daemon may have another working directory
    return TrainRequest(options.name, data, options.rounds, options.vocabulary, overrides)


# Fields of a job that `train` or `peer demo` have an argument for.
ARGUMENTS = {"rounds": "rounds", "vocabulary": "model.vocabulary", "audit": "audit", "seed": "seed"}


def said_of_job(options: argparse.Namespace) -> dict[str, str]:
    """What `--set` says, by field. Raises `UserError`, too, where another argument says something else."""
    said = set_overrides(options.set)
    for argument, name in ARGUMENTS.items():
        value = getattr(options, argument, None)
        if value and said.get(name, str(value)) != str(value):
            raise UserError(f"both --{argument} {value} and --set {name}={said[name]}: say one")
    return said


def set_overrides(items: Sequence[str]) -> dict[str, str]:
    """What `--set` says, by field. Raises `UserError`."""
    overrides: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise UserError(f"--set {item!r}: write FIELD=VALUE, such as --set local_steps=10")
        if overrides.setdefault(name, value) != value:
            raise UserError(f"both --set {name}={overrides[name]} and --set {name}={value}: say one")
    return overrides


def option_names(command: str) -> tuple[str, ...]:
    """What a command's arguments may begin with, for completion."""
    parser = Parser(add_help=False)
    add_arguments(command, parser)
    return tuple(name for name in parser.known_options() if name.startswith("--"))


def help_text(topic: str) -> str:
    """One command with its arguments. Raises `UserError`."""
    if topic not in COMMANDS:
        raise UserError(f"no command {topic!r}{nearest(topic, COMMANDS)}")
    command = Parser(prog=topic, description=COMMANDS[topic], add_help=False)
    add_arguments(topic, command)
    return command.format_help().strip()
