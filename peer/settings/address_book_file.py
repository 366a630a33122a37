"""Where members were last reached, on disk: a network that was stopped as a whole finds itself again without its first peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import trio

from ledger.ledger_state import CurrentState
from peer.settings.data_directory import storage_errors
from protocol.addresses import parse_address
from protocol.errors import UserError
from protocol.identity import parse_peer_id, peer_id
from storage import durable_files

ADDRESSES_KEPT = 64  # all are dialed at the next start; a quorum of a large network is among them
SAVE_SECONDS = 10.0  # between looks whether there is something new


def load_addresses(file: Path, tell: Callable[[str], None] = lambda text: None) -> tuple[str, ...]:
    """As `peer id@host:port`; nothing if the file is not there. What is no such line is told, and passed over."""
    with storage_errors(file):
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    readable = tuple(line for line in lines if _is_readable(line))
    if len(readable) < len(lines):
        tell(f"{file}: {len(lines) - len(readable)} lines are no PEER@HOST:PORT and are passed over")
    return readable


def peer_of_entry(line: str) -> bytes:
    return parse_peer_id(line.rpartition("@")[0])


def _is_readable(line: str) -> bool:
    address = line.rpartition("@")[2]
    try:
        peer_of_entry(line)
        parse_address(address)
    except UserError:
        return False
    return True


async def save_addresses_periodically(file: Path, addresses: Callable[[], Mapping[bytes, str]], applied: CurrentState) -> None:
    """Writes down where members were reached last, newest first, whenever that has changed; who has gone is left out."""
    while True:
        before, members = load_addresses(file), applied.current.members
        has_gone = members.is_departed_key
        now = {peer_id(peer): address for peer, address in addresses().items() if peer in members.members and not has_gone(peer)}
        replaced = {*now, *now.values()}  # who moved, and who answered there before
        kept = [entry for entry in before if replaced.isdisjoint(entry.split("@")) and not has_gone(peer_of_entry(entry))]
        entries = tuple([f"{peer}@{address}" for peer, address in now.items()] + kept)[:ADDRESSES_KEPT]
        if set(entries) != set(before):
            await trio.to_thread.run_sync(_save, file, entries)
        await trio.sleep(SAVE_SECONDS)


def _save(file: Path, entries: tuple[str, ...]) -> None:
    with storage_errors(file), durable_files.atomic_write(file) as stream:
        stream.write("".join(f"{entry}\n" for entry in entries).encode())
