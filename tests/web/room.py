"""A real daemon in this process that serves annotators on a real socket, and annotators that call it in their own threads."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio

from curation.rpc import CurationRpc, ImportRequest, ImportView
from peer import cli
from peer.api.running_peer import RunningPeer
from peer.daemon.daemon import running_daemon
from peer.settings.config import load_settings
from tests.waiting import PATIENCE_SECONDS, patience
from tests.web.client import Person, Reply, Site

T = TypeVar("T")
SAYS = "web pages are served at http://"


class Room:
    """A peer alone in its network. Its disk outlives its process, so it may be served again."""

    def __init__(self, folder: Path, network: str = "lab") -> None:
        self.folder, self.directory = folder, folder / "peer"
        assert cli.main(["init", "--network", network, "--listen", "127.0.0.1:0", "--data-dir", str(self.directory)]) == 0

    @asynccontextmanager
    async def serving(self, sign_up: str = "open", **more: Any) -> AsyncIterator[tuple[RunningPeer, Site]]:
        async with self.running(sign_up=sign_up, **more) as daemon:
            yield daemon, Site(*await served_at(daemon))

    @asynccontextmanager
    async def running(self, **more: Any) -> AsyncIterator[RunningPeer]:
        """Run the peer. It may have settings with which it serves nobody."""
        flags = {"data_directory": self.directory, "role": "annotator", "web_listen": "127.0.0.1:0", "sign_up": "open", **more}
        config = load_settings(flags, {"HOME": str(self.folder)}).config
        with patience(120.0):  # for projects, people and their answers
            async with running_daemon(config) as daemon:
                yield daemon

    async def project(
        self, daemon: RunningPeer, tasks: int = 3, votes: int = 1, name: str = "moods", gold: int = 0
    ) -> ImportView:
        """Import a project. The first `gold` tasks are gold, with the label `sad` at odd numbers."""
        file = self.folder / f"{name}.jsonl"
        lines = [
            {"text": f"text {number}"} | ({"gold": ("glad", "sad")[number % 2]} if number < gold else {})
            for number in range(tasks)
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        request = ImportRequest(str(file), name, "", "label", ("glad", "sad"), False, votes, 1, "", False)
        api: CurationRpc = daemon.api  # type: ignore[assignment]
        return await api.import_tasks(request)


async def served_at(daemon: RunningPeer) -> tuple[str, int]:
    seen = 0
    while True:
        for event in await daemon.api.events(seen, PATIENCE_SECONDS):
            seen = event.number
            if event.text.startswith(SAYS):
                host, _, port = event.text.removeprefix(SAYS).rstrip("/").rpartition(":")
                return host, int(port)


async def said(call: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """Run a blocking call in a thread and return its result."""
    return await trio.to_thread.run_sync(partial(call, *arguments, **more))


async def together(count: int, call: Callable[..., T], *arguments: Any) -> list[T]:
    """Run `count` equal calls at once and return their results."""
    replies: list[T] = []

    async def ask() -> None:
        replies.append(await said(call, *arguments))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(ask)
    return replies


async def enrolled(site: Site, *names: str) -> list[Person]:
    people = [Person(name) for name in names]
    for person in people:
        reply = await said(person.enrol, site)
        assert (reply.status, reply.body) == (201, {"annotator": person.key.hex()}), reply
    return people


async def assigned(site: Site, person: Person, limit: int = 1, least: int = 1, project: str = "") -> list[dict[str, Any]]:
    """Return at least `least` and at most `limit` tasks of this person. Retry, since a decision may take longer than one call."""
    while True:
        reply = await said(person.tasks, site, limit, project)
        assert reply.status == 200, reply
        tasks: list[dict[str, Any]] = reply.body["tasks"]
        if len(tasks) >= least:
            return tasks


async def settled(site: Site, assignment: str) -> Reply:
    """Wait until the annotation's task is settled, and return the site's reply."""
    while True:
        reply = await said(site.annotation, assignment)
        if reply.status == 200 and reply.body["state"] == "settled":
            return reply
        await trio.sleep(0.05)
