"""A line editor at the bottom of the terminal. prompt_toolkit blocks, so it has a thread; cancelling ends the prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import NestedCompleter
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.patch_stdout import patch_stdout


class Prompt:
    def __init__(self, text: str, history: Path | None, completions: Mapping[str, tuple[str, ...]], **session: Any) -> None:
        tree = {name: dict.fromkeys(options) or None for name, options in completions.items()}
        self._session: PromptSession[str] = PromptSession(
            text,
            history=FileHistory(str(history)) if history else InMemoryHistory(),
            completer=NestedCompleter.from_nested_dict(tree),
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
