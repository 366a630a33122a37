"""A line editor at the bottom of the terminal.

The library prompt_toolkit blocks, so it runs in a thread. Cancellation of the Trio task also ends the prompt in the thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory

END_SECONDS_MAX = 2.0  # longest wait for prompt_toolkit to restore the terminal: it may wait forever if the terminal is closed


class CommandCompleter(Completer):
    """Completion of a line: the first word is a command, later words may be its options."""

    def __init__(self, commands: Mapping[str, tuple[str, ...]]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        before = document.text_before_cursor.split(" ")
        choices = self._commands if len(before) == 1 else self._commands.get(before[0], ())
        for choice in choices:
            if choice.startswith(before[-1]) and choice not in before[:-1]:
                yield Completion(choice, start_position=-len(before[-1]))


class LineEditor(io.TextIOBase):
    """A line editor that is also an output stream. Written text appears above the typed line and leaves it intact."""

    def __init__(self, text: str, history: Path | None, completions: Mapping[str, tuple[str, ...]], **session: Any) -> None:
        self._session: PromptSession[str] = PromptSession(
            text,
            history=FileHistory(str(history)) if history else InMemoryHistory(),
            **session,
        )
        self._text, self._words, self._history = text, CommandCompleter(completions), self._session.default_buffer.history
        self._cancelled = False
        # True while the thread reads a line: only the loop of that thread may then write to the terminal.
        self._is_reading = False
        self._written: deque[str] = deque()  # texts that are not yet written to the terminal
        # Context variables of the thread, in which prompt_toolkit finds its running application.
        self._context: contextvars.Context | None = None

    async def read_line(self, dropped: Callable[[str], bool], other: str = "") -> str | None:
        """Return one line, or None at Ctrl-D.

        At Ctrl-C, drop the typed line and call `dropped` with it. If that returns True, return None. `other` is another prompt,
        for input that is no command: such input has no completion and no history.
        """
        self._session.message, self._session.completer = other or self._text, None if other else self._words
        self._session.default_buffer.history = InMemoryHistory() if other else self._history
        while True:
            self._cancelled = False
            line, typed = None, None
            async with trio.open_nursery() as nursery:
                with trio.CancelScope(shield=True) as reading:
                    nursery.start_soon(self._end_when_cancelled, reading)
                    self._is_reading = True
                    try:
                        line, typed = await trio.to_thread.run_sync(self._read, abandon_on_cancel=True)
                    finally:
                        self._is_reading = False
                        self._write_waiting()
                nursery.cancel_scope.cancel()
            if typed is None or dropped(typed):
                return line

    def _read(self) -> tuple[str | None, str | None]:
        """Read a line in the thread. Return (line, None), or (None, None) at Ctrl-D, or (None, typed text) at Ctrl-C."""
        try:
            return self._session.prompt(pre_run=self._begin), None
        except (EOFError, OSError):  # an OSError means that the terminal is closed
            return None, None
        except KeyboardInterrupt:
            return None, self._session.default_buffer.text

    def _begin(self) -> None:
        self._context = contextvars.copy_context()
        self._end_if_cancelled()
        if self._written:
            self._write_above()

    async def _end_when_cancelled(self, reading: trio.CancelScope) -> None:
        try:
            await trio.sleep_forever()
        finally:
            # A thread that runs the application gets a call. One that starts it later checks `_cancelled` before it waits for a
            # key.
            self._cancelled = True
            self._soon(self._end_if_cancelled)
            reading.deadline = trio.current_time() + END_SECONDS_MAX

    def _soon(self, do: Callable[[], None]) -> None:
        """Schedule `do` in the event loop of prompt_toolkit's thread, if the loop runs."""
        loop = self._session.app.loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, because the prompt has ended
                loop.call_soon_threadsafe(do, context=self._context)

    def _end_if_cancelled(self) -> None:
        future = self._session.app.future
        if self._cancelled and future is not None and not future.done():
            self._session.app.exit(exception=EOFError())

    # Writing

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._written.append(text)
        if self._is_reading:
            # Before the application runs, this call does nothing: `_begin` or the end of `read_line` writes the text.
            self._soon(self._write_above)
        else:
            self._write_waiting()
        return len(text)

    def _write_above(self) -> None:
        run_in_terminal(self._write_waiting)

    def _write_waiting(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is closed: the handler of SIGHUP ends the peer
            while self._written:
                sys.stdout.write(self._written.popleft())
            sys.stdout.flush()
