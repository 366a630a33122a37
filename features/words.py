"""Words: what a person types, at the prompt and as `peer WORD`. Each is declared once, as an object of this module.

The prompt, the command line, the help, `--json` and the completion of shells follow from the declaration. Whoever declares words
imports nothing heavy at the top of the module: `peer --help` reads all declarations, and is to answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from features.arguments import JSON, Argument
from features.as_json import as_json
from features.names import Names
from features.tables import Shown, Verbatim

A = TypeVar("A")  # the calls that a word makes: a `Protocol` class
R = TypeVar("R")  # what its call answers


class Person(Protocol):
    """Whoever types, for words that go on asking."""

    async def line(self, prompt: str) -> str | None:
        """What is typed behind this prompt; None: nothing more comes."""

    async def interruptible(self, do: Callable[[], Awaitable[None]]) -> None:
        """Ctrl-C ends this alone."""


@dataclass(frozen=True, slots=True)
class Asked(Generic[A]):
    """A word that was said, with all that it may use."""

    api: A
    options: argparse.Namespace  # its arguments
    show: Callable[[Shown], None]
    names: Callable[[], Awaitable[Names]]  # what people are shown instead of peer ids
    decided: Callable[[Awaitable[str]], Awaitable[str]]  # the answer to a call on which voters decide; tells why it takes long
    words: Mapping[str, Word]  # all that there are
    person: Person
    is_at_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    name: str
    about: str  # one line of the help
    arguments: tuple[Argument, ...]
    do: Callable[[Asked[Any]], Awaitable[int | None]]  # returns the exit status that `peer WORD` has
    only_at_prompt: bool = False  # else it is a command of `peer`, too
    phrase: tuple[str, ...] = ()  # two words: a line of the prompt that begins with them means one that begins with `meaning`
    meaning: tuple[str, ...] = ()

    @property
    def has_json(self) -> bool:
        return JSON in self.arguments

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for argument in self.arguments:
            argument.add_to(parser)


def word(
    about: str,
    *arguments: Argument,
    only_at_prompt: bool = False,
    phrase: tuple[str, ...] = (),
    meaning: tuple[str, ...] = (),
) -> Callable[[Callable[[Asked[A]], Awaitable[int | None]]], Word]:
    """Declares a word, by what it does. It is called as the function is."""

    def declare(do: Callable[[Asked[A]], Awaitable[int | None]]) -> Word:
        return Word(do.__name__, about, arguments, do, only_at_prompt, phrase, meaning)

    return declare


def listing(
    about: str,
    show: Callable[[Asked[A], R], Awaitable[None]],
    *arguments: Argument,
    exit_status: Callable[[R], int] = lambda answer: 0,
) -> Callable[[Callable[[Asked[A]], Awaitable[R]]], Word]:
    """Declares a word that asks for something and shows it: to people as `show` does, to programs, with `--json`, as it is."""

    def declare(ask: Callable[[Asked[A]], Awaitable[R]]) -> Word:
        async def do(asked: Asked[A]) -> int:
            answer = await ask(asked)
            if asked.options.json:
                asked.show(Verbatim(as_json(answer)))
            else:
                await show(asked, answer)
            return exit_status(answer)

        return Word(ask.__name__, about, (JSON, *arguments), do)

    return declare


def words_of(module: ModuleType) -> Iterator[Word]:
    """The words that a module declares, in their order."""
    return (value for value in vars(module).values() if isinstance(value, Word))
