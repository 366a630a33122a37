from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock

from peer.settings import data_directory
from peer.settings.data_directory import ADDRESSES_KEPT, SAVE_SECONDS
from protocol.identity import peer_id


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def entry(number: int, port: int) -> str:
    return f"{peer_id(key(number))}@127.0.0.1:{port}"


async def test_members_addresses_are_on_disk_soon_and_forgotten_ones_stay(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)  # virtual time does not wait for threads
    file, known, gone = tmp_path / "addresses", {key(1): "127.0.0.1:1"}, set[bytes]()
    assert data_directory.load_addresses(file) == ()
    async with trio.open_nursery() as nursery:
        members = SimpleNamespace(members=known, is_departed_key=gone.__contains__)
        applied = SimpleNamespace(current=SimpleNamespace(members=members))
        nursery.start_soon(data_directory.save_addresses_periodically, file, lambda: known, applied)
        await trio.sleep(SAVE_SECONDS / 2)
        assert data_directory.load_addresses(file) == (entry(1, 1),)
        known.clear()
        known |= {key(2): "127.0.0.1:2"}
        await trio.sleep(SAVE_SECONDS)
        assert set(data_directory.load_addresses(file)) == {entry(1, 1), entry(2, 2)}, (
            "who is away now may be the one to dial later"
        )
        known[key(1)] = "127.0.0.1:9"
        await trio.sleep(SAVE_SECONDS)
        assert set(data_directory.load_addresses(file)) == {entry(1, 9), entry(2, 2)}, "one address a peer, the last one"
        del known[key(1)]
        known[key(3)] = "127.0.0.1:9"
        await trio.sleep(SAVE_SECONDS)
        assert set(data_directory.load_addresses(file)) == {entry(3, 9), entry(2, 2)}, "one peer an address, the last one"
        known |= {key(number): f"127.0.0.1:{number}" for number in range(3, 3 + 2 * ADDRESSES_KEPT)}
        await trio.sleep(SAVE_SECONDS)
        assert len(data_directory.load_addresses(file)) == ADDRESSES_KEPT
        for number in range(4, 3 + 2 * ADDRESSES_KEPT):
            del known[key(number)]
        assert {entry(2, 2), entry(4, 4)} <= set(data_directory.load_addresses(file))
        gone |= {key(2), key(4)}
        await trio.sleep(SAVE_SECONDS)
        assert not {entry(2, 2), entry(4, 4)} & set(data_directory.load_addresses(file)), "one that is linked, and one of earlier"
        nursery.cancel_scope.cancel()


def test_what_cannot_be_read_of_the_file_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    lines = (entry(1, 1), f"{peer_id(key(2))}@[fe80::1%a b]:7700", "nonsense", f"nobody@{entry(3, 3)}", "", entry(4, 4))
    file.write_bytes("".join(f"{line}\n" for line in lines).encode() + b"\xff\xfe\n")
    told: list[str] = []
    assert data_directory.load_addresses(file, told.append) == (entry(1, 1), entry(4, 4))
    (line,) = told
    assert str(file) in line and "5 lines" in line and "\n" not in line
    file.write_text(f"{entry(1, 1)}\n")
    data_directory.load_addresses(file, told.append)
    assert len(told) == 1
