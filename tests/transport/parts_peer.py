"""A process with a real swarm and a real store, for `test_parts`.

    python -m tests.transport.parts_peer NUMBER FOLDER PART_BYTES [ADDRESS DIGEST BYTES]

It says where it listens. With ADDRESS it fetches DIGEST from there, and names each part that has come. It ends with its standard
input, or when the object is there, and says by how many bytes its anonymous memory has grown at most.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import trio

from protocol.identity import Identity
from storage.disk_blob_store import DiskBlobStore
from storage.multipart_objects import PartWriter
from tests.transport.helpers import CHAIN
from transport.swarm import Swarm

SAMPLE_SECONDS = 0.02


def anonymous_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


def say(word: str, what: object) -> None:
    """Print a whole line, from any thread."""
    os.write(sys.stdout.fileno(), f"{word} {what}\n".encode())


class Telling(DiskBlobStore):
    def open_writer(self, digest: bytes, total: int, of: bytes | None = None):  # type: ignore[no-untyped-def]
        writer = super().open_writer(digest, total, of)
        if isinstance(writer, PartWriter):
            finish = writer.finish

            def tell() -> None:
                finish()
                say("came", digest.hex())

            writer.finish = tell  # type: ignore[method-assign]
        return writer


async def main(number: int, folder: Path, part_bytes: int, address: str = "", digest: str = "", size: int = 0) -> None:
    blobs = Telling(folder / "kept", folder / "passing", part_bytes)
    swarm = Swarm(Identity(bytes([number]) * 32), CHAIN, "127.0.0.1:0", [address] if address else [], blobs)
    async with trio.open_nursery() as nursery:
        await nursery.start(swarm.run)
        say("listens", swarm.address)
        start = largest = anonymous_bytes()

        async def measure() -> None:
            nonlocal largest
            while True:
                largest = max(largest, anonymous_bytes())
                await trio.sleep(SAMPLE_SECONDS)

        nursery.start_soon(measure)
        if digest:
            await swarm.fetch_blob(bytes.fromhex(digest), size)
        else:
            await trio.to_thread.run_sync(sys.stdin.read)
        say("received", swarm.traffic().blobs_received)
        say("grew", largest - start)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    number, folder, part_bytes, *wanted = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt):
        if wanted:
            trio.run(main, int(number), Path(folder), int(part_bytes), wanted[0], wanted[1], int(wanted[2]))
        else:
            trio.run(main, int(number), Path(folder), int(part_bytes))
