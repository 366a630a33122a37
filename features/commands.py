"""Commands that a person types at the prompt or as `peer COMMAND`.

Each command is declared once, with a decorator of this module. The prompt, the command line, the help, the reference page,
`--json` and the shells' completion follow from the declaration. Modules with declarations import heavy packages inside functions
only, because `peer --help` imports all these modules.

The help line of a command is an imperative sentence without a full stop. Descriptions are paragraphs, list items that begin with
`- `, and examples that are indented by four blanks. `peer help` prints descriptions, and the reference page shows them as
Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from features.command_arguments import JSON, Argument
from features.json_output import to_json
from features.peer_names import PeerNames
from features.text_tables import Printable, Verbatim

# Beginning of the title of a group of options in the help, before the names of the actions that have these options.
OPTIONS_OF = "options of "

A = TypeVar("A")  # a `Protocol` class with the RPC calls that a command makes
R = TypeVar("R")  # the result of a listing command, which is shown to a person


class UserInput(Protocol):
    """The terminal's input, for commands that ask a person for more input."""

    async def read_line(self, prompt: str) -> str | None:
        """Show the prompt and return the next line. Return None at the end of the input."""

    async def run_interruptible(self, do: Callable[[], Awaitable[None]]) -> None:
        """Run `do`. Ctrl-C cancels `do`, and the command continues."""


@dataclass(frozen=True, slots=True)
class CommandContext(Generic[A]):
    """The arguments of a command that a person typed, and everything that the command may use."""

    api: A
    options: argparse.Namespace  # the command's arguments
    show: Callable[[Printable], None]
    load_names: Callable[[], Awaitable[PeerNames]]  # loads the names that people see instead of peer ids
    # Awaits a call whose result voters decide, and shows the reason of a long wait.
    wait_for_decision: Callable[[Awaitable[str]], Awaitable[str]]
    commands: Mapping[str, Command]  # all commands by name
    user: UserInput
    is_at_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """A subcommand, such as `import` of `tasks`."""

    usage: str  # name and arguments of the action, such as `export PROJECT`
    about: str  # one line of the help
    options: tuple[Argument, ...] = ()  # options of the action; several actions may have the same option
    description: str = ""

    @property
    def name(self) -> str:
        return self.usage.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    about: str  # one line of the help
    arguments: tuple[Argument, ...]
    run: Callable[[CommandContext[Any]], Awaitable[int | None]]  # runs the command; returns the exit status of `peer COMMAND`
    only_at_prompt: bool = False  # True: the command exists only at the prompt, and not as `peer COMMAND`
    alias: tuple[str, ...] = ()  # two words: in a line at the prompt that begins with these words, `alias_target` replaces them
    alias_target: tuple[str, ...] = ()
    description: str = ""
    actions: tuple[Action, ...] = ()  # subcommands: the first argument of the command is the name of an action
    exit_statuses: Mapping[int, str] = field(default_factory=dict)  # meanings of the exit statuses that only this command has

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_arguments_and_actions(parser, self.arguments, self.actions)


def add_arguments_and_actions(
    parser: argparse.ArgumentParser, arguments: tuple[Argument, ...], actions: tuple[Action, ...]
) -> None:
    """Add the name of an action, the arguments, and the options of each action to a parser."""
    if actions:
        names = tuple(action.name for action in actions)
        parser.add_argument("action_name", choices=names, metavar="ACTION", help=", ".join(names))
    for argument in arguments:
        argument.add_to(parser)
    users: dict[Argument, list[str]] = {}
    for action in actions:
        for option in action.options:
            users.setdefault(option, []).append(action.name)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option, names_of_users in users.items():
        title = f"{OPTIONS_OF}{' and '.join(names_of_users)}"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        option.add_to(groups[title])


def command(
    about: str,
    *arguments: Argument,
    description: str = "",
    actions: tuple[Action, ...] = (),
    exit_statuses: Mapping[int, str] | None = None,
    only_at_prompt: bool = False,
    alias: tuple[str, ...] = (),
    alias_target: tuple[str, ...] = (),
) -> Callable[[Callable[[CommandContext[A]], Awaitable[int | None]]], Command]:
    """Declare a command that runs the decorated function. The command has the function's name."""

    def declare(do: Callable[[CommandContext[A]], Awaitable[int | None]]) -> Command:
        return Command(
            do.__name__, about, arguments, do, only_at_prompt, alias, alias_target, description, actions, exit_statuses or {}
        )

    return declare


def listing_command(
    about: str,
    show: Callable[[CommandContext[A], R], Awaitable[None]],
    *arguments: Argument,
    description: str = "",
    exit_status: Callable[[R], int] = lambda answer: 0,
    exit_statuses: Mapping[int, str] | None = None,
) -> Callable[[Callable[[CommandContext[A]], Awaitable[R]]], Command]:
    """Declare a command that runs the decorated function and shows its result with `show`, or as JSON with `--json`."""

    def declare(ask: Callable[[CommandContext[A]], Awaitable[R]]) -> Command:
        async def do(asked: CommandContext[A]) -> int:
            answer = await ask(asked)
            if asked.options.json:
                asked.show(Verbatim(to_json(answer)))
            else:
                await show(asked, answer)
            return exit_status(answer)

        return Command(ask.__name__, about, (JSON, *arguments), do, description=description, exit_statuses=exit_statuses or {})

    return declare


def commands_in(module: ModuleType) -> Iterator[Command]:
    """Yield the commands of a module, in the order of their declarations."""
    return (value for value in vars(module).values() if isinstance(value, Command))
