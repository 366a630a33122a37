"""The prompt `peer>`: reads commands, asks a `PeerApi`, prints tables. Works inside the daemon and attached to one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import shlex
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import trio
from rich.console import Console, RenderableType

from peer.api.naming import Names
from peer.commands import views
from peer.commands.announcements import announce
from peer.commands.as_json import as_json
from peer.commands.grammar import COMMANDS, help_text, option_names, parse, set_overrides, train_request
from peer.commands.tables import Pairs, wrapped
from peer.driver.caveats import SAMPLED_AUDITS
from peer.driver.condition import EXIT_STATUS, PeerState
from protocol.api import EventView, PeerApi, TrainRequest
from protocol.errors import UserError

if TYPE_CHECKING:
    from peer.commands.prompt import Prompt  # prompt_toolkit is slow to import, and a script needs none of it

logger = logging.getLogger(__name__)

PROMPT = "peer> "
PATIENCE_SECONDS = 3.0  # decisions take a fraction of one; then a person is told what this one waits for
TEST_SECONDS_MAX = 180.0  # a scratch round waits at most for the slowest timers of a round
WIDTH_WITHOUT_TERMINAL = 100_000  # columns: nothing is wrapped or cut

# A field, the field that decides whether it counts, with which of its values, and what that is unless it was set.
USED_ONLY_WITH = (
    ("keep", "compression", ("sparse",), "dense"),
    ("outer_rate", "outer", ("nesterov", "sgd", "sign"), "nesterov"),
    ("outer_momentum", "outer", ("nesterov", "sign"), "nesterov"),
    ("audit_rate", "audit", ("sampled",), "full"),
    ("auditors", "audit", ("sampled",), "full"),
    ("audit_window", "audit", ("sampled",), "full"),
)


class Verbatim(str):
    """Text for programs, or of a model: it is shown as it is. Other text wraps between words."""


Print = Callable[[RenderableType], None]
Action = Callable[[PeerApi, argparse.Namespace, Print], Awaitable[int | None]]  # the exit status of `peer COMMAND`


# Commands ------------------------------------------------------------------------------------------------------------


async def _status(api: PeerApi, options: argparse.Namespace, show: Print) -> int:
    status = await api.status()
    show(Verbatim(as_json(status)) if options.json else views.status(status))
    return EXIT_STATUS[PeerState(status.state)]


async def _stats(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    stats = await api.stats()
    show(Verbatim(as_json(stats)) if options.json else views.stats(stats))


async def _peers(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    peers = await api.peers()
    show(Verbatim(as_json(peers)) if options.json else views.peers(peers))
    if not options.json:
        for dial in (await api.status()).unreached:
            show(dial.text)


async def names(api: PeerApi) -> Names:
    """What people are shown instead of peer ids."""
    known = {view.peer: (view.name, view.gone) for view in await api.peers()}
    present = {peer: name for peer, (name, gone) in known.items() if not gone}
    return Names(present, {peer: name for peer, (name, _) in known.items()})


async def _jobs(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    jobs = await api.jobs()
    table = views.jobs(jobs, await names(api)) if jobs else "no job yet; start one with `train --rounds 80`"
    show(Verbatim(as_json(jobs)) if options.json else table)


async def _rounds(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    rounds = await api.rounds(options.last)
    table = views.rounds(rounds, await names(api)) if rounds else "no round is closed yet"
    show(Verbatim(as_json(rounds)) if options.json else table)


async def _audits(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    view = await api.audits(options.last)
    if view.standings:
        known = await names(api)
        show(views.audits(view.log, known))
        show(views.standings(view.standings, known))
        if view.suspended:
            show(views.suspensions(view.suspended, known))
    else:
        show("no sampled audit has come to a result yet; `train --set audit=sampled` starts a job that has them")
    if any(job.audit == "full" for job in await api.jobs()):
        show(
            "audit=full: `rounds` has the verdicts and whose ballots were counted; of those voters, the trainers (`peers`) "
            "re-execute every proposal before their ballots"
        )


async def _log(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    known = await names(api)
    for event in await api.events(-options.last, 0.0):
        show(views.event(event, known))


async def _decided(api: PeerApi, show: Print, call: Awaitable[str]) -> str:
    """The answer to what the voters have to decide first. Whoever waits long is told for what."""
    answer: str | Exception
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_tell_why, api, show)
        try:
            answer = await call
        except Exception as error:  # raised below, by itself
            answer = error
        nursery.cancel_scope.cancel()
    if isinstance(answer, Exception):
        raise answer
    return answer


async def _tell_why(api: PeerApi, show: Print) -> None:
    await trio.sleep(PATIENCE_SECONDS)
    with contextlib.suppress(UserError):  # then the call fails as well
        status = await api.status()
        why = status.halted or status.waiting
        show(f"{why}; what you ask for may be decided even after you interrupt this" if why else "not decided yet")


async def _train(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    request = train_request(options)
    job = await _decided(api, show, api.train(request))
    place = next((view.place for view in await api.jobs() if view.job == job), 0)
    waits = f"waits in line as number {place}: it starts by itself when its turn comes, `jobs` shows the line"
    show(f"job {job} is decided{f', and {waits}' if place else '; `rounds` shows how it goes'}")
    for warning in warnings_of(request, set_overrides(options.set)):
        show(f"{warning} (`cancel {views.short(job)}` ends this job)")


def warnings_of(request: TrainRequest, said: Mapping[str, str]) -> Iterator[str]:
    """What is possible, but seldom meant. `said` are the fields that the person named, not a preset."""
    overrides, local = request.overrides, request.data == "local"
    for name, other, users, default in USED_ONLY_WITH:
        value = "off" if local and other == "audit" else overrides.get(other, default)
        if name in said and value not in users:
            yield f"{name}={said[name]} does nothing with {other}={value}: it counts with {' or '.join(users)}"
    if local:
        yield "each trainer uses its own text, so nobody can re-execute: audits are off, and votes check the form of updates only"
    elif overrides.get("audit") == "sampled":
        yield SAMPLED_AUDITS
    if overrides.get("outer") != "adamw":
        return
    if overrides.get("bits") == "1":
        yield (
            "bits=1 with outer=adamw trains badly: one bit gives all elements of a chunk one size, and AdamW divides by sizes; "
            "take bits=4 (the default with adamw), or outer=nesterov"
        )
    if (local or overrides.get("audit") == "off") and overrides.get("rule") in (None, "centered-clipping"):
        yield (
            "without audits nobody finds liars, and centered clipping lets more of their gradients through: "
            "rule=arc-nnm-trim stands better against them, and learns a few per cent worse where nobody lies"
        )


async def _test(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    newest = await api.events(-1, 0.0)
    seen = newest[-1].number if newest else 0
    before, known = await _trained_roots(api), await names(api)
    job = await _decided(api, show, api.test())
    show(f"scratch round, job {views.short(job)}: a known update is proposed, judged, voted and applied")
    with trio.move_on_after(TEST_SECONDS_MAX):
        async with aclosing(_phases(api, job, seen)) as phases:
            async for event in phases:
                show(views.event(event, known))
                if event.kind == "applied":
                    show(_unchanged(before, await _trained_roots(api)))
                    return
    raise UserError(f"the scratch round is not decided after {TEST_SECONDS_MAX:.0f} s; `peers` shows who is missing")


async def _phases(api: PeerApi, job: str, seen: int) -> AsyncGenerator[EventView, None]:
    """The job's own events, and the deciding and applying of the block that closes its round."""
    decided: dict[str, EventView] = {}
    closing: str | None = None
    while True:
        for event in await api.events(seen, 1.0):
            seen = event.number
            height = event.fields.get("height", "")
            if event.kind == "decided":
                decided[height] = dataclasses.replace(event, text=f"{event.text}: {event.fields['signers']}")
            elif event.kind == "round" and event.fields.get("job") == job:
                closing = height
                if closing in decided:
                    yield decided[closing]
                yield event
            elif event.fields.get("job") == job or (event.kind == "applied" and height == closing):
                yield event


async def _trained_roots(api: PeerApi) -> dict[str, tuple[int, str]]:
    return {job.job: (job.round, job.model_root) for job in await api.jobs() if job.objective != "scratch"}


def _unchanged(before: dict[str, tuple[int, str]], after: dict[str, tuple[int, str]]) -> str:
    """Says of every model in training whether the scratch round touched it; its own rounds may have gone on meanwhile."""
    if not before:
        return "no model is being trained, so there is none that the test could have touched"
    lines = []
    for job, (number, root) in before.items():
        same = after[job] == (number, root)
        lines.append(
            f"job {views.short(job)}: model root {root[:16]} " + ("unchanged" if same else f"moved on by its own round {number}")
        )
    return "\n".join(lines)


async def _invite(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    show(await api.invite(options.days, tuple(options.addresses)))
    note = f"whoever joins with it dials {' '.join((await api.invitations())[-1].addresses)}"
    if sys.stdout.isatty():
        show(note)
    else:
        print(note, file=sys.stderr)  # standard output is for what reads the invitation


async def _connect(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    """All at once. `UserError` with every reason if one of them is not reached."""
    failed: list[str] = []

    async def dial(address: str) -> None:
        try:
            show(await api.connect(address))
        except UserError as error:
            failed.append(str(error))

    async with trio.open_nursery() as nursery:
        for address in dict.fromkeys(options.addresses):
            nursery.start_soon(dial, address)
    if failed:
        raise UserError("; ".join(failed))


async def _invitations(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    made = await api.invitations()
    table = views.invitations(made) if made else "this peer has made no invitation yet; `invite` makes one"
    show(Verbatim(as_json(made)) if options.json else table)


async def _revoke(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    show(await _decided(api, show, api.revoke(options.token)))


async def _cancel(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    show(await _decided(api, show, api.cancel(options.job)))


async def _approve(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    show(await _decided(api, show, api.approve(options.peer)))


async def _retire(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    show(await _decided(api, show, api.retire(options.peer, options.lower_tolerance)))


async def _challenge(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    show(await _decided(api, show, api.challenge(options.peer, options.round)))


async def _leave(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    show(await _decided(api, show, api.leave()))


async def _sample(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    show(Verbatim(await api.sample(options.prompt, options.tokens, options.temperature, options.seed)))


async def _export(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    view = await api.export(str(Path(options.directory).expanduser().absolute()))
    model_root = view.model_root or "none: no job was started yet"
    show(
        f"{view.path}: {view.files} files, {view.bytes / 1e6:.1f} MB, up to height {view.height}\n"
        f"state root {view.state_root}\nmodel root of the last job {model_root}\n"
        f"check it anywhere with `peer audit {shlex.quote(view.path)}`"
    )


async def _help(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    show(help_text(options.topic) if options.topic else Pairs(COMMANDS))


async def _quit(api: PeerApi, options: argparse.Namespace, show: Print) -> None:
    """Done by the reader of the lines, which knows what quitting means here."""


ACTIONS: dict[str, Action] = {
    "stats": _stats,
    "status": _status,
    "peers": _peers,
    "train": _train,
    "test": _test,
    "jobs": _jobs,
    "rounds": _rounds,
    "audits": _audits,
    "log": _log,
    "connect": _connect,
    "invite": _invite,
    "invitations": _invitations,
    "revoke": _revoke,
    "cancel": _cancel,
    "approve": _approve,
    "retire": _retire,
    "challenge": _challenge,
    "leave": _leave,
    "sample": _sample,
    "export": _export,
    "help": _help,
    "quit": _quit,
}
assert ACTIONS.keys() == COMMANDS.keys()


async def execute(api: PeerApi, options: argparse.Namespace, show: Print) -> int:
    """Carries out one parsed command and returns the exit status that `peer COMMAND` has. Raises `UserError`."""
    return await ACTIONS[options.command](api, options, show) or 0


# Reading lines -------------------------------------------------------------------------------------------------------


def printer(out: TextIO | None = None) -> Print:
    """Prints to this stream, else to standard output."""
    out = out or sys.stdout
    console = Console(
        file=out, width=None if out.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False, markup=False, soft_wrap=False
    )

    def show(what: RenderableType) -> None:
        if isinstance(what, str) and not isinstance(what, Verbatim):
            what = "\n".join(shown for line in what.split("\n") for shown in wrapped(line, console.width))
        console.print(what, soft_wrap=isinstance(what, str), crop=False)

    return show


async def run(api: PeerApi, *, attached: bool, history: Path | None = None) -> int:
    """Reads and executes commands until `quit` or the end of the input; `quit` stops the peer unless attached to it.

    Returns the exit status: 1 if a command from a pipe failed.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return await _run_lines(api, printer(), attached=attached)
    from peer.commands.prompt import Prompt

    prompt = Prompt(PROMPT, history, {name: option_names(name) for name in COMMANDS})
    await _run_prompt(api, prompt, printer(cast(TextIO, prompt)), "leaves the peer running" if attached else "stops the peer")
    if not attached:
        await api.stop()
    return 0


async def _run_prompt(api: PeerApi, prompt: Prompt, show: Print, quitting: str) -> None:
    """Until `quit`, or what else ends the prompt."""
    status = await api.status()
    who = f"{status.name} ({views.short(status.peer)})" if status.name else views.short(status.peer)
    show(f"network {status.network}, {who} at {status.address}: {(await names(api)).in_text(views.state(status))}")
    show(f"type `help`; `quit` {quitting}")
    interrupts = _Interrupts(show, quitting)
    async with trio.open_nursery() as nursery:
        await nursery.start(interrupts.follow, nursery.cancel_scope)
        nursery.start_soon(_announce, api, show)
        while (line := await prompt.ask(interrupts.dropped)) is not None:
            if await interrupts.run(line, partial(_do, api, line, show)) == "quit":
                break
        nursery.cancel_scope.cancel()


async def _announce(api: PeerApi, show: Print) -> None:
    """Above the line that is being typed."""
    try:
        await announce(api, lambda: names(api), show)
    except UserError as error:
        show(f"error: {error}")
    except Exception:  # what cannot be announced must not stop a peer that votes
        logger.exception("the prompt announces nothing any more")


class _Interrupts:
    """Ctrl-C is a key while the prompt waits for a line. While a command runs it is a signal, which ends that command alone."""

    def __init__(self, show: Print, quitting: str) -> None:
        self._show, self._quitting = show, quitting
        self._running: trio.CancelScope | None = None
        self._was_warned = False

    async def run(self, line: str, command: Callable[[], Awaitable[str]]) -> str:
        """The command's name, or empty if it was interrupted."""
        self._was_warned = False
        try:
            with trio.CancelScope() as self._running:
                return await command()
        finally:
            self._running = None
        self._show(f"interrupted: {line.strip()!r}; what it asked the others for may still be decided")
        return ""

    def dropped(self, typed: str) -> bool:
        """Whether this Ctrl-C at the prompt ends it: the second one in a row with nothing typed."""
        if typed:
            self._was_warned = False
        elif self._was_warned:
            return True
        else:
            self._was_warned = True
            self._show(f"`quit`, Ctrl-D, or Ctrl-C once more {self._quitting}")
        return False

    async def follow(self, prompt: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            task_status.started()
            async for _ in signals:
                if self._running is not None:
                    self._running.cancel()
                elif self.dropped(""):  # the command ended just before, or somebody signals this process
                    prompt.cancel()


async def _do(api: PeerApi, line: str, show: Print) -> str:
    """Executes a line and returns the command's name; `error` if it failed."""
    try:
        options = parse(line)
        if options is None:
            return ""
        await execute(api, options, show)
    except UserError as error:
        show(f"error: {error}")
        return "error"
    except Exception:  # a typed line must not stop a peer that votes
        logger.exception("the prompt failed at %r", line)
        show(f"error: the peer failed at {line.strip()!r}; its log says why")
        return "error"
    return str(options.command)


async def _run_lines(api: PeerApi, show: Print, *, attached: bool) -> int:
    failed = 0
    # A thread waiting for a pipe that never speaks must not hold up the end of the program.
    while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        done = await _do(api, line, show)
        failed |= done == "error"
        if done == "quit":
            if not attached:
                await api.stop()
            break
    return int(failed)
