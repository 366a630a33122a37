"""The prompt `peer>`, which reads commands, calls a `PeerApi` and prints tables.

It runs inside a daemon, or in a process of its own that is attached to a running daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar, cast

import trio

from features.commands import CommandContext, UserInput
from features.peer_names import PeerNames
from features.text_tables import Printable
from peer.commands import view_tables
from peer.commands.command_line_parser import option_names, parse_line
from peer.commands.definitions import all_commands
from peer.commands.table_renderer import make_printer
from protocol.addresses import format_listen_addresses
from protocol.api import EventView, PeerApi
from protocol.errors import UserError

if TYPE_CHECKING:
    from peer.commands.line_editor import LineEditor  # prompt_toolkit is slow to import, and scripts do not need it


logger = logging.getLogger(__name__)

PROMPT = "peer> "
DECISION_NOTICE_SECONDS = 3.0  # wait for a decision before a notice explains it: most decisions take a fraction of a second

# Wait for an answer to `status` before a notice: it takes hundredths of a second, but a peer that applies a large model is busy.
UNRESPONSIVE_NOTICE_SECONDS = 7.0

Print = Callable[[Printable], None]
T = TypeVar("T")


# Executing a command --------------------------------------------------------------------------------------------------


EVENT_KINDS = ("member", "job", "warning", "evidence", "serve")
FIGURES_SECONDS = 60.0  # time between two notices of the loss, or of a round's responses
LINES_A_MINUTE_MAX = 10  # notices in a minute at the prompt: a faulty peer must not flood the screen
WAIT_SECONDS = 30.0  # longest wait for an event in one call


async def execute_command(api: PeerApi, options: argparse.Namespace, show: Print, at_prompt: UserInput | None = None) -> int:
    """Execute one parsed command and return the exit status of `peer COMMAND`. Raises `UserError` if the command fails."""
    known = all_commands()
    person, is_at_prompt = at_prompt or LineInput(), at_prompt is not None
    asked = CommandContext(
        api, options, show, partial(load_peer_names, api), partial(_decided, api, show), known, person, is_at_prompt
    )
    try:
        return await known[options.command].run(asked) or 0
    except UserError as error:
        raise UserError(await _with_names(api, str(error))) from None


async def _with_names(api: PeerApi, text: str) -> str:
    """Return the text with the names of peers instead of their ids."""
    try:
        return (await load_peer_names(api)).replace_ids(text)
    except UserError:  # the peer has stopped answering, so the text is shown unchanged
        return text


async def load_peer_names(api: PeerApi) -> PeerNames:
    """Return the names that replace peer ids in output."""
    known = {view.peer: (view.name, view.departed) for view in await api.peers()}
    present = {peer: name for peer, (name, gone) in known.items() if not gone}
    return PeerNames(present, {peer: name for peer, (name, _) in known.items()})


async def _decided(api: PeerApi, show: Print, call: Awaitable[str]) -> str:
    """Return the answer of a call that waits for a decision of the voters.

    After `DECISION_NOTICE_SECONDS`, show why the call waits.
    """
    return await _with_names(api, await _while(partial(_tell_why, api, show), call))


async def _while(beside: Callable[[], Awaitable[None]], call: Awaitable[T]) -> T:
    """Return the result of `call`, or raise its error. The task `beside` runs until the call ends."""
    answer: T | Exception
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beside)
        try:
            answer = await call
        # The error is raised again below, outside the nursery, which would wrap it in an exception group.
        except Exception as error:
            answer = error
        nursery.cancel_scope.cancel()
    if isinstance(answer, Exception):
        raise answer
    return answer


async def _tell_why(api: PeerApi, show: Print) -> None:
    await trio.sleep(DECISION_NOTICE_SECONDS)
    with contextlib.suppress(UserError):  # without an answer, the main call fails as well
        status = await api.status()
        why = status.halted or status.waiting
        show(f"{why}; your request may be decided even after Ctrl-C" if why else "not decided yet")


async def execute_attached(api: PeerApi, options: argparse.Namespace, show: Print) -> int:
    """Execute one command that a shell has started. If the peer does not answer, a notice on standard error tells the user."""
    return await _while(partial(_tell_of_silence, api), execute_command(api, options, show))


async def _tell_of_silence(api: PeerApi) -> None:
    await trio.sleep(DECISION_NOTICE_SECONDS)
    try:
        with trio.fail_after(UNRESPONSIVE_NOTICE_SECONDS):
            await api.status()
    except trio.TooSlowError:
        seconds = DECISION_NOTICE_SECONDS + UNRESPONSIVE_NOTICE_SECONDS
        what = f"the peer has not answered for {seconds:g} s: it hangs, or its machine is overloaded; check it with `peer doctor`"
        print(f"{what}. Still waiting; Ctrl-C cancels", file=sys.stderr)
    except UserError:  # without an answer, the main call fails as well
        pass


# Reading lines -------------------------------------------------------------------------------------------------------


async def run_console(api: PeerApi, *, attached: bool, history: Path | None = None) -> int:
    """Read and execute commands until `quit` or the end of the input. `quit` also stops the peer, unless `attached`.

    Returns the exit status: 1 if a command from a pipe failed.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return await _run_lines(api, make_printer(), attached=attached)
    from peer.commands.line_editor import LineEditor

    prompt = LineEditor(PROMPT, history, {name: option_names(word) for name, word in all_commands().items()})
    await _run_prompt(
        api, prompt, make_printer(cast(TextIO, prompt)), "leaves the peer running" if attached else "stops the peer"
    )
    if not attached:
        await api.stop_peer()
    return 0


async def _run_prompt(api: PeerApi, prompt: LineEditor, show: Print, quitting: str) -> None:
    """Run the interactive prompt until `quit`, Ctrl-D or a second Ctrl-C."""
    status = await api.status()
    who = f"{status.name} ({view_tables.shorten_id(status.peer)})" if status.name else view_tables.shorten_id(status.peer)
    where, state = (
        format_listen_addresses(status.listen_addresses, status.announced_addresses),
        (await load_peer_names(api)).replace_ids(view_tables.format_state(status)),
    )
    show(f"{who} of network {status.network} {where}: {state}")
    show(f"type `help` to list commands; `quit` {quitting}")
    interrupts, chosen = _Interrupts(show, quitting), NotificationFilter(status.peer)
    person = _AtPrompt(prompt, interrupts)
    async with trio.open_nursery() as nursery:
        await nursery.start(interrupts.follow, nursery.cancel_scope)
        nursery.start_soon(_announce, api, show, chosen)
        while (line := await prompt.read_line(interrupts.dropped)) is not None:
            chosen.record_typed_line(line)
            if await interrupts.run(line, partial(_do, api, line, show, person)) == "quit":
                break
        nursery.cancel_scope.cancel()


async def _announce(api: PeerApi, show: Print, chosen: NotificationFilter) -> None:
    """Show notifications above the line that the user types."""
    try:
        await print_notifications(api, lambda: load_peer_names(api), show, chosen)
    except UserError as error:
        show(f"error: {error}")
    except Exception:  # an error in a notification must not stop a peer that votes
        logger.exception("the prompt shows no further notifications")


class _Interrupts:
    """Handling of Ctrl-C at the prompt: a key while the prompt reads a line, and a signal that ends the running command."""

    def __init__(self, show: Print, quitting: str) -> None:
        self._show, self._quitting = show, quitting
        self._running: trio.CancelScope | None = None
        self._was_warned = False

    async def run(self, line: str, command: Callable[[], Awaitable[str]]) -> str:
        """Run the command and return its name, or an empty string if it was interrupted."""
        self._was_warned = False
        try:
            with trio.CancelScope() as self._running:
                return await command()
        finally:
            self._running = None
        self._show(f"interrupted: {line.strip()!r}; its request may still be decided")
        return ""

    async def run_interruptible(self, do: Callable[[], Awaitable[None]]) -> None:
        """Run `do` as a part of the running command. Ctrl-C ends only this part."""
        command = self._running
        try:
            with trio.CancelScope() as self._running:
                await do()
        finally:
            self._running = command

    def dropped(self, typed: str) -> bool:
        """Return True if this Ctrl-C ends the prompt, because it is the second one in a row on an empty line.

        `typed` is the dropped line.
        """
        if typed:
            self._was_warned = False
        elif self._was_warned:
            return True
        else:
            self._was_warned = True
            self._show(f"`quit`, Ctrl-D or a second Ctrl-C {self._quitting}")
        return False

    async def follow(self, prompt: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            task_status.started()
            async for _ in signals:
                if self._running is not None:
                    self._running.cancel()
                elif self.dropped(""):  # no command runs: it has just ended, or another process sent the signal
                    prompt.cancel()


@dataclass(frozen=True)
class _AtPrompt:
    """Implements `features.commands.UserInput`."""

    prompt: LineEditor
    interrupts: _Interrupts

    async def read_line(self, prompt: str) -> str | None:
        """Return a line, or None at Ctrl-D and at Ctrl-C on an empty line."""
        return await self.prompt.read_line(lambda typed: not typed, prompt)

    async def run_interruptible(self, do: Callable[[], Awaitable[None]]) -> None:
        await self.interrupts.run_interruptible(do)


async def _do(api: PeerApi, line: str, show: Print, person: UserInput) -> str:
    """Execute a typed line and return the command's name, or `error` if the command failed."""
    try:
        options = parse_line(all_commands(), line)
        if options is None:
            return ""
        await execute_command(api, options, show, person)
    except UserError as error:
        show(f"error: {error}")
        return "error"
    except Exception:  # a typed line must not stop a peer that votes
        logger.exception("the prompt failed at %r", line)
        show(f"error: {line.strip()!r} failed because of a bug; the peer's log has the traceback")
        return "error"
    return str(options.command)


async def _run_lines(api: PeerApi, show: Print, *, attached: bool) -> int:
    failed, person = 0, LineInput()
    while (line := await person.read_line("")) is not None:
        done = await _do(api, line, show, person)
        failed |= done == "error"
        if done == "quit":
            if not attached:
                await api.stop_peer()
            break
    return int(failed)


class NotificationFilter:
    """A filter of the events that the prompt shows.

    It drops events that the answer to a command already shows. It also limits the events per minute, by the times at which they
    occurred.
    """

    def __init__(self, me: str = "") -> None:
        self._me = me
        self._met: set[str] = set()
        self._figures_ms: dict[str, int] = {}  # kind of event -> time of its last notice in ms
        self._minute, self._lines = 0, 0

    def record_typed_line(self, line: str) -> None:
        """Suppress later events about failed dials to the addresses in this line: the line's answer reports them."""
        self._met |= {f"cannot reach {word.rpartition('@')[2]}" for word in line.split()}

    def filter_event(self, event: EventView) -> EventView | None:
        """Return the event to show, or None to drop it. The last event of a full minute notes that further ones are hidden."""
        if not self._is_worth_it(event):
            return None
        minute = event.at_ms // 60_000
        self._minute, self._lines = minute, self._lines + 1 if minute == self._minute else 1
        if self._lines == LINES_A_MINUTE_MAX:
            return replace(event, text=f"{event.text} (`log` has further events of this minute)")
        return event if self._lines < LINES_A_MINUTE_MAX else None

    def _is_worth_it(self, event: EventView) -> bool:
        if event.kind == "peer":  # each text is shown once: links break often, and failed dials are repeated
            what = event.text.split(": ")[0]
            is_new = what not in self._met and not what.startswith("lost")
            self._met.add(what)
            return is_new
        if event.kind == "warning" and self._me and event.fields.get("author") == self._me:
            return False  # the answer of this peer's `train` has shown the warning
        if event.fields.get("name") == "held_out_bits_per_byte" or event.kind == "figures":
            last = self._figures_ms.get(event.kind)
            is_due = last is None or event.at_ms - last >= 1_000 * FIGURES_SECONDS
            self._figures_ms |= {event.kind: event.at_ms} if is_due else {}
            return is_due
        return event.kind in EVENT_KINDS


async def print_notifications(
    api: PeerApi, names: Callable[[], Awaitable[PeerNames]], show: Callable[[str], None], chosen: NotificationFilter
) -> None:
    """Show the address of the pages, then new events until cancelled. Raises `UserError` when the peer stops."""
    earlier = await api.events(0, 0.0)
    seen, due = earlier[-1].number if earlier else 0, tuple(event for event in earlier if event.kind == "serve")[-1:]
    while True:
        for event in due:
            if (shown := chosen.filter_event(event)) is not None:
                show(view_tables.event_line(shown, await names()))
        if due := await api.events(seen, WAIT_SECONDS):
            seen = due[-1].number


class LineInput:
    """Input of the user on standard input: a pipe or a terminal without a prompt. Implements `features.commands.UserInput`."""

    async def read_line(self, prompt: str) -> str | None:
        if sys.stdin.isatty() and sys.stdout.isatty():
            print(prompt, end="", flush=True)
        # A thread that waits for a silent pipe must not delay the end of the program.
        line = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        return line.rstrip("\n") if line else None

    async def run_interruptible(self, do: Callable[[], Awaitable[None]]) -> None:
        """Run `do`. On a terminal, Ctrl-C ends only `do`; in a script, it ends the whole program."""
        if not sys.stdin.isatty():
            await do()
            return
        with trio.CancelScope() as scope, trio.open_signal_receiver(signal.SIGINT) as signals:
            await _while(partial(_cancel_at_signal, scope, signals), do())


async def _cancel_at_signal(scope: trio.CancelScope, signals: AsyncIterator[int]) -> None:
    async for _ in signals:
        scope.cancel()
