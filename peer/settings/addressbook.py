"""Where members were last reached, on disk: a network that was stopped as a whole finds itself again without its first peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import trio

from peer.settings.datadir import storage_errors
from protocol.identity import peer_id
from storage import durable

ADDRESSES_KEPT = 64  # all are dialed at the next start; a quorum of a large network is among them
SAVE_SECONDS = 10.0  # between looks whether there is something new


def load(file: Path) -> tuple[str, ...]:
    """As `peer id@host:port`; nothing if the file is not there."""
    with storage_errors(file):
        return tuple(file.read_text().split()) if file.exists() else ()


async def keep(file: Path, addresses: Callable[[], Mapping[bytes, str]]) -> None:
    """Writes down what `addresses` says of members, newest first, whenever that has changed."""
    while True:
        before = load(file)
        now = {peer_id(peer): address for peer, address in addresses().items()}
        replaced = {*now, *now.values()}  # who moved, and who answered there before
        kept = [entry for entry in before if replaced.isdisjoint(entry.split("@"))]
        entries = tuple([f"{peer}@{address}" for peer, address in now.items()] + kept)[:ADDRESSES_KEPT]
        if set(entries) != set(before):
            await trio.to_thread.run_sync(_save, file, entries)
        await trio.sleep(SAVE_SECONDS)


def _save(file: Path, entries: tuple[str, ...]) -> None:
    with storage_errors(file), durable.writing(file) as stream:
        stream.write("".join(f"{entry}\n" for entry in entries).encode())
