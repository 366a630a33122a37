"""A line editor at the bottom of the terminal. prompt_toolkit blocks, so it runs in a thread; cancellation ends the prompt."""

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

END_SECONDS_MAX = 2.0  # time to restore the terminal; prompt_toolkit may wait forever for a closed one


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
        self._is_reading = False  # the thread owns the terminal, so only its loop may write there
        self._written: deque[str] = deque()  # text that waits for the thread
        self._context: contextvars.Context | None = None  # the context in which prompt_toolkit finds the running application

    async def read_line(self, dropped: Callable[[str], bool], other: str = "") -> str | None:
        """Return one line, or None at Ctrl-D. Ctrl-C drops the typed line and passes it to `dropped`, which returns True to end.

        `other` replaces the prompt for input that is no command: it has no completion and no history.
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
        """Read in the thread. Return (line, None), (None, None) at Ctrl-D, or (None, typed text) at Ctrl-C."""
        try:
            return self._session.prompt(pre_run=self._begin), None
        except (EOFError, OSError):  # OSError: the terminal is gone
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
            # Either the thread already runs the application, or it will check the flag before it waits for a key.
            self._cancelled = True
            self._soon(self._end_if_cancelled)
            reading.deadline = trio.current_time() + END_SECONDS_MAX

    def _soon(self, do: Callable[[], None]) -> None:
        """Schedule `do` in the thread, if it runs the application."""
        loop = self._session.app.loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, as the prompt has ended
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
            self._soon(self._write_above)  # if the application does not run yet, `_begin` or the end of the line writes
        else:
            self._write_waiting()
        return len(text)

    def _write_above(self) -> None:
        run_in_terminal(self._write_waiting)

    def _write_waiting(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone; SIGHUP is handled elsewhere
            while self._written:
                sys.stdout.write(self._written.popleft())
            sys.stdout.flush()
