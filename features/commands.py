"""Commands: what a person types, at the prompt and as `peer COMMAND`. Each is declared once, as an object of this module.

The prompt, the command line, the help, `--json` and the completion of shells follow from the declaration. Modules
of declarations import nothing heavy at their top: `peer --help` reads them all, and must answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from features.command_arguments import JSON, Argument
from features.json_output import to_json
from features.peer_names import PeerNames
from features.text_tables import Printable, Verbatim

A = TypeVar("A")  # the calls that a command makes: a `Protocol` class
R = TypeVar("R")  # what its call answers


class UserInput(Protocol):
    """The person at the terminal, for commands that ask again."""

    async def read_line(self, prompt: str) -> str | None:
        """What is typed behind this prompt; None: nothing more comes."""

    async def run_interruptible(self, do: Callable[[], Awaitable[None]]) -> None:
        """Ctrl-C ends this alone."""


@dataclass(frozen=True, slots=True)
class CommandContext(Generic[A]):
    """A command that was typed, with all that it may use."""

    api: A
    options: argparse.Namespace  # its arguments
    show: Callable[[Printable], None]
    load_names: Callable[[], Awaitable[PeerNames]]  # what people are shown instead of peer ids
    # the answer to a call on which voters decide; tells why it takes long
    wait_for_decision: Callable[[Awaitable[str]], Awaitable[str]]
    commands: Mapping[str, Command]  # all that there are
    user: UserInput
    is_at_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    about: str  # one line of the help
    arguments: tuple[Argument, ...]
    run: Callable[[CommandContext[Any]], Awaitable[int | None]]  # returns the exit status that `peer COMMAND` has
    only_at_prompt: bool = False  # else it is a command of `peer`, too
    alias: tuple[str, ...] = ()  # two words: a line of the prompt that begins with them means one that begins with `alias_target`
    alias_target: tuple[str, ...] = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for argument in self.arguments:
            argument.add_to(parser)


def command(
    about: str,
    *arguments: Argument,
    only_at_prompt: bool = False,
    alias: tuple[str, ...] = (),
    alias_target: tuple[str, ...] = (),
) -> Callable[[Callable[[CommandContext[A]], Awaitable[int | None]]], Command]:
    """Declares a command, by what it does. It is called as the function is."""

    def declare(do: Callable[[CommandContext[A]], Awaitable[int | None]]) -> Command:
        return Command(do.__name__, about, arguments, do, only_at_prompt, alias, alias_target)

    return declare


def listing_command(
    about: str,
    show: Callable[[CommandContext[A], R], Awaitable[None]],
    *arguments: Argument,
    exit_status: Callable[[R], int] = lambda answer: 0,
) -> Callable[[Callable[[CommandContext[A]], Awaitable[R]]], Command]:
    """Declares a command that asks for something and shows it: to people as `show` does, to programs, with `--json`, as it is."""

    def declare(ask: Callable[[CommandContext[A]], Awaitable[R]]) -> Command:
        async def do(asked: CommandContext[A]) -> int:
            answer = await ask(asked)
            if asked.options.json:
                asked.show(Verbatim(to_json(answer)))
            else:
                await show(asked, answer)
            return exit_status(answer)

        return Command(ask.__name__, about, (JSON, *arguments), do)

    return declare


def commands_in(module: ModuleType) -> Iterator[Command]:
    """The commands that a module declares, in their order."""
    return (value for value in vars(module).values() if isinstance(value, Command))
