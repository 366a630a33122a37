"""Objects of parts between peers with real stores: from several holders, with liars among them, and over a `kill -9`."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from protocol.blob_digest import BlobHasher, BlobPartList
from protocol.identity import Identity
from protocol.limits import BLOB_CHUNK_BYTES, BLOB_PART_BYTES
from scenarios.emulation.memory_network import LinkConditions, Mesh
from storage.disk_blob_store import DiskBlobStore
from storage.multipart_objects import write_list
from tests.transport.conftest import MemoryWorld, World, open_world
from tests.transport.helpers import ALICE, BOB, CAROL, DAVE, linked, until
from transport.blobs.blob_exchange import TURN_SECONDS

PART = 2 * BLOB_CHUNK_BYTES + 1000  # three chunks each
COUNT = 24
DATA = random.Random(3).randbytes(COUNT * PART - 7)


class Counting(DiskBlobStore):
    """A store that counts the pieces that it serves and the writes that it begins."""

    def __init__(self, folder: Path, *held: bytes, part_bytes: int = PART) -> None:
        super().__init__(folder / "kept", folder / "passing", part_bytes)
        self.served, self.begun = Counter[bytes](), Counter[bytes]()
        for data in held:
            self.add_bytes(data)

    def read_piece(self, digest: bytes, offset: int, length: int) -> bytes:
        self.served[digest] += 1
        return super().read_piece(digest, offset, length)

    def open_writer(self, digest: bytes, total: int, of: bytes | None = None) -> Any:
        self.begun[digest] += 1
        return super().open_writer(digest, total, of)


class Lying(Counting):
    """A store that serves its third requested part with a changed byte."""

    wrong = b""

    def read_piece(self, digest: bytes, offset: int, length: int) -> bytes:
        data = super().read_piece(digest, offset, length)
        if len(self.served.keys() - {DIGEST}) == 3:
            self.wrong = self.wrong or digest
        return bytes([data[0] ^ 1]) + data[1:] if digest == self.wrong else data


def listed(data: bytes = DATA) -> BlobPartList:
    hasher = BlobHasher(part_bytes=PART)
    hasher.update(data)
    assert hasher.part_list is not None
    return hasher.part_list


def lacking(blobs: DiskBlobStore) -> set[bytes]:
    wanted = blobs.missing_parts(DIGEST)
    return set(wanted.lacking) if wanted is not None else set(PARTS.digests)


PARTS = listed()
DIGEST = PARTS.blob_digest


async def test_an_object_comes_part_by_part_each_once_and_from_several_holders(world: World, tmp_path: Path) -> None:
    alice, carol = Counting(tmp_path / "alice", DATA), Counting(tmp_path / "carol", DATA)
    bob = Counting(tmp_path / "bob")
    networks = [await world.start(*pair) for pair in ((ALICE, alice), (CAROL, carol), (BOB, bob))]
    await linked(*networks)
    await networks[2].fetch_blob(DIGEST, len(DATA), [networks[0].me])
    assert bob.read_range(DIGEST) == DATA
    assert bob.begun == dict.fromkeys((DIGEST, *PARTS.digests), 1)
    served = [sum(holder.served[part] for part in PARTS.digests) for holder in (alice, carol)]
    assert sum(served) == 3 * COUNT and min(served) > COUNT // 4, "each chunk once, and by both"
    assert not any(network.refusal_counts() for network in networks)


async def test_two_peers_that_fetch_give_each_other_what_they_have(tmp_path: Path, autojump_clock: MockClock) -> None:
    stores = Counting(tmp_path / "alice", DATA), Counting(tmp_path / "bob"), Counting(tmp_path / "carol")
    async with open_world(MemoryWorld) as world:
        assert isinstance(world, MemoryWorld)
        for one, other in ((ALICE, BOB), (ALICE, CAROL)):
            world.mesh.set_conditions(one.public, other.public, LinkConditions(bytes_per_second=500_000))
        networks = [await world.start(*pair) for pair in zip((ALICE, BOB, CAROL), stores, strict=True)]
        await linked(*networks)
        async with trio.open_nursery() as nursery:
            for network in networks[1:]:
                nursery.start_soon(network.fetch_blob, DIGEST, len(DATA))
    _, bob, carol = stores
    assert bob.read_range(DIGEST) == carol.read_range(DIGEST) == DATA
    assert sum(bob.served.values()) + sum(carol.served.values()) >= 3 * 4, "four parts of three chunks, or more"


async def seconds_of_a_fetch(folder: Path, others: int) -> float:
    """Fetch from the one holder, which is named, beside `others` peers without the object, and return the seconds."""
    folder.mkdir()
    async with open_world(MemoryWorld) as world:
        assert isinstance(world, MemoryWorld)
        world.mesh = Mesh(seed=1, conditions=LinkConditions(latency_seconds=0.1, bytes_per_second=2_000_000))
        alice, bob = await world.start(ALICE, Counting(folder / "alice", DATA)), await world.start(BOB, Counting(folder / "bob"))
        empty = [await world.start(Identity(bytes([100 + n]) * 32), Counting(folder / str(n))) for n in range(others)]
        await linked(alice, bob, *empty)
        start = trio.current_time()
        await bob.fetch_blob(DIGEST, len(DATA), [alice.me])
        return trio.current_time() - start


async def test_peers_that_have_nothing_cost_little_time(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A round trip of 0.2 s to each of them would take seconds."""
    assert await seconds_of_a_fetch(tmp_path / "many", 20) < 1.0 + await seconds_of_a_fetch(tmp_path / "none", 0)


async def test_a_holder_that_drips_costs_a_turn(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A part of 24 chunks would take 22 s."""
    part_bytes, data = 24 * BLOB_CHUNK_BYTES, DATA * 2
    alice, carol = (Counting(tmp_path / name, data, part_bytes=part_bytes) for name in ("alice", "carol"))
    bob = Counting(tmp_path / "bob", part_bytes=part_bytes)
    async with open_world(MemoryWorld) as world:
        assert isinstance(world, MemoryWorld)
        world.mesh.set_conditions(BOB.public, CAROL.public, LinkConditions(bytes_per_second=BLOB_CHUNK_BYTES / 0.9))
        networks = [await world.start(*pair) for pair in ((ALICE, alice), (BOB, bob), (CAROL, carol))]
        await linked(*networks)
        start = trio.current_time()
        hasher = BlobHasher(part_bytes=part_bytes)
        hasher.update(data)
        await networks[1].fetch_blob(hasher.digest(), len(data), [networks[0].me, networks[2].me])
        assert TURN_SECONDS <= trio.current_time() - start < TURN_SECONDS + 2
        assert bob.read_range(hasher.digest()) == data and networks[2].me in networks[1].connected_peers()


async def test_a_wrong_part_costs_its_sender_the_link_and_nothing_else(world: World, tmp_path: Path) -> None:
    liar, carol, bob = Lying(tmp_path / "alice", DATA), Counting(tmp_path / "carol", DATA), Counting(tmp_path / "bob")
    alice, carols, bobs = [await world.start(*pair) for pair in ((ALICE, liar), (CAROL, carol), (BOB, bob))]
    await linked(alice, carols, bobs)
    await bobs.fetch_blob(DIGEST, len(DATA))
    assert bob.read_range(DIGEST) == DATA
    assert (
        bobs.refusal_counts()["bad-blob"] == 1 and alice.me not in bobs.connected_peers() and carols.me in bobs.connected_peers()
    )
    again = {part for part, times in bob.begun.items() if times > 1}
    assert liar.wrong in again and len(again) <= 4, "it, and what the liar was sending beside it"
    assert all(bob.begun[part] <= 2 for part in PARTS.digests)


async def test_a_liar_alone_ends_nothing_and_the_part_comes_of_another_later(world: World, tmp_path: Path) -> None:
    liar, bob = Lying(tmp_path / "alice", DATA), Counting(tmp_path / "bob")
    alice, bobs = await world.start(ALICE, liar), await world.start(BOB, bob)
    await linked(alice, bobs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bobs.fetch_blob, DIGEST, len(DATA))
        await until(lambda: bobs.refusal_counts().get("bad-blob"))
        good = set(PARTS.digests) - lacking(bob)
        before = bob.begun.copy()
        await world.start(DAVE, Counting(tmp_path / "dave", DATA))
    assert bob.read_range(DIGEST) == DATA
    assert all(bob.begun[part] == before[part] for part in good), "nothing that was good is lost"


@pytest.mark.real("sockets")
async def test_a_fetch_that_is_given_up_goes_on_later_where_it_was(world: World, tmp_path: Path) -> None:
    alice, bob = Counting(tmp_path / "alice", DATA), Counting(tmp_path / "bob")
    alices, bobs = await world.start(ALICE, alice), await world.start(BOB, bob)
    await linked(alices, bobs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bobs.fetch_blob, DIGEST, len(DATA))
        await until(lambda: 0 < len(lacking(bob)) < COUNT)
        nursery.cancel_scope.cancel()
    here = set(PARTS.digests) - lacking(bob)
    before = bob.begun.copy()
    await bobs.fetch_blob(DIGEST, len(DATA))
    assert here and bob.read_range(DIGEST) == DATA and all(bob.begun[part] == before[part] for part in here)


async def test_a_list_of_more_bytes_than_were_promised_is_no_object(world: World, tmp_path: Path) -> None:
    """A liar's list must not fill the disk, since nobody requests its parts."""
    alice, bob = Counting(tmp_path / "alice", DATA), Counting(tmp_path / "bob")
    alices, bobs = await world.start(ALICE, alice), await world.start(BOB, bob)
    await linked(alices, bobs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bobs.fetch_blob, DIGEST, len(DATA) - 1)
        await until(lambda: DIGEST in bob.begun)
        await trio.sleep(0.5)
        assert nursery.child_tasks, "it waits for somebody who has it"
        nursery.cancel_scope.cancel()
    assert set(bob.begun) == {DIGEST}


async def test_an_object_of_one_part_comes_whole(world: World, tmp_path: Path) -> None:
    alice, bob = Counting(tmp_path / "alice"), Counting(tmp_path / "bob")
    digest = alice.add_bytes(DATA[:PART])
    alices, bobs = await world.start(ALICE, alice), await world.start(BOB, bob)
    await linked(alices, bobs)
    await bobs.fetch_blob(digest, PART)
    assert bob.read_range(digest) == DATA[:PART] and set(bob.begun) == {digest}


# Processes -------------------------------------------------------------------------------------------------------------


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.transport.parts_peer", *map(str, arguments)]
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        for stream in (running.stdin, running.stdout):
            assert stream is not None
            stream.close()


def said(running: subprocess.Popen[str], word: str) -> str:
    """Return the rest of the next line that begins with this word."""
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith(word):
            return line.split()[1]
    raise AssertionError(f"it ended without a word of {word!r}")


def give(folder: Path, size: int, part_bytes: int) -> BlobPartList:
    """Make a store with an object that was never in memory."""
    blobs, file, hasher = (
        DiskBlobStore(folder / "kept", folder / "passing", part_bytes),
        folder / "made",
        BlobHasher(part_bytes=part_bytes),
    )
    source = random.Random(5)
    with file.open("wb") as stream:
        for start in range(0, size, 1 << 20):
            piece = source.randbytes(min(1 << 20, size - start))
            hasher.update(piece)
            stream.write(piece)
    assert hasher.part_list is not None
    write_list(file, hasher.part_list)
    blobs.adopt_file(file, hasher.digest())
    return hasher.part_list


def fetched_over_a_kill(folder: Path, size: int, part_bytes: int, kill_after: int) -> tuple[int, int]:
    """Return the growth of the memory of both processes."""
    parts = give(folder / "alice", size, part_bytes)
    here: list[str] = []
    with process(1, folder / "alice", part_bytes) as alice:
        wanted = folder / "bob", part_bytes, said(alice, "listens"), parts.blob_digest.hex(), size
        with process(2, *wanted) as first:
            here += [said(first, "came") for _ in range(kill_after)]
            first.kill()
            assert first.stdout is not None
            here += [line.split()[1] for line in first.stdout if line.startswith("came")]
        with process(2, *wanted) as second:
            output, _ = second.communicate(timeout=600)
        lines = [line.split() for line in output.splitlines()]
        came = [line[1] for line in lines if line[0] == "came"]
        (received,) = [int(line[1]) for line in lines if line[0] == "received"]
        (grown,) = [int(line[1]) for line in lines if line[0] == "grew"]
        assert alice.stdin is not None
        alice.stdin.close()
        served = int(said(alice, "grew"))
    assert len(here) >= kill_after and len(came) == len(set(came)) and not set(came) & set(here), "no part comes twice"
    # The last part is shorter, and the list was sent once more if it was missing.
    assert received <= size - (len(here) - 1) * part_bytes, "nor is any asked for"
    with DiskBlobStore(folder / "bob/kept", folder / "bob/passing", part_bytes).path(parts.blob_digest).open("rb") as stream:
        hasher = BlobHasher(part_bytes=part_bytes)
        hasher.update_from_stream(stream)
    assert hasher.digest() == parts.blob_digest
    return served, grown


@pytest.mark.real("processes")
def test_after_kill_9_no_part_comes_twice(tmp_path: Path) -> None:
    fetched_over_a_kill(tmp_path, 200 * PART + 5, PART, kill_after=20)


@pytest.mark.real("processes")
@pytest.mark.large
def test_two_gibibytes_pass_between_two_processes_that_hold_a_few_chunks(tmp_path: Path) -> None:
    served, grown = fetched_over_a_kill(tmp_path, 2 << 30, BLOB_PART_BYTES, kill_after=40)
    print(f"grew by {served / 2**20:.1f} MiB (sends) and {grown / 2**20:.1f} MiB (receives)")
    assert max(served, grown) <= 64_000_000
