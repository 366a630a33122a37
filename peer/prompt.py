"""A line editor at the bottom of the terminal. prompt_toolkit blocks, so it has a thread; cancelling ends the prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.patch_stdout import patch_stdout


class Words(Completer):
    """The first word is a command, later ones may be its options."""

    def __init__(self, commands: Mapping[str, tuple[str, ...]]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        before = document.text_before_cursor.split(" ")
        choices = self._commands if len(before) == 1 else self._commands.get(before[0], ())
        for choice in choices:
            if choice.startswith(before[-1]) and choice not in before[:-1]:
                yield Completion(choice, start_position=-len(before[-1]))


class Prompt:
    def __init__(self, text: str, history: Path | None, completions: Mapping[str, tuple[str, ...]], **session: Any) -> None:
        self._session: PromptSession[str] = PromptSession(
            text,
            history=FileHistory(str(history)) if history else InMemoryHistory(),
            completer=Words(completions),
            **session,
        )
        self._cancelled = False

    @staticmethod
    def above() -> Any:
        """Inside, everything printed appears above the prompt and leaves the line being typed intact."""
        return patch_stdout(raw=True)

    async def ask(self) -> str | None:
        """One line; None at Ctrl-D, or at Ctrl-C on an empty line. Ctrl-C otherwise drops what was typed."""
        while True:
            self._cancelled = False
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_when_cancelled)
                line, typed = await trio.to_thread.run_sync(self._read)
                nursery.cancel_scope.cancel()
            if line is not None or not typed:
                return line

    def _read(self) -> tuple[str | None, str]:
        """In the thread: a line, or None and what had been typed when Ctrl-C was pressed."""
        try:
            return self._session.prompt(pre_run=self._end_if_cancelled), ""
        except EOFError:
            return None, ""
        except KeyboardInterrupt:
            return None, self._session.default_buffer.text

    async def _end_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            # The thread either runs the application by now, or looks at the flag before it waits for a key.
            self._cancelled = True
            loop = self._session.app.loop
            if loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: the prompt has ended
                    loop.call_soon_threadsafe(self._end_if_cancelled)

    def _end_if_cancelled(self) -> None:
        future = self._session.app.future
        if self._cancelled and future is not None and not future.done():
            self._session.app.exit(exception=EOFError())
