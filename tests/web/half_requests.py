"""`python -m tests.web.half_requests PORT COUNT HOSTS [silent]`: a stranger that begins COUNT requests and completes none.

The requests come from HOSTS addresses of this machine in turn: 127.0.0.2 and so on. The program prints the number of its
connections when it has made all of them, and keeps them until it is killed. One process has few descriptors, so several processes
make thousands.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

AT_ONCE = 100  # concurrent connection attempts: fewer than the backlog of the peer's kernel
PER_PROCESS = 800  # below the soft limit of 1,024 that many systems have
HALF = b"GET /api/v1/network HTTP/1.1\r\nHost: localhost\r\nX-Half: "


async def begin(port: int, source: str, said: bytes, ways: asyncio.Semaphore) -> asyncio.StreamWriter:
    """Send half a request. Retry until the connection is made."""
    while True:
        async with ways:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
                writer.write(said)
                return writer
            except OSError:
                await asyncio.sleep(0.1)


async def begin_all(port: int, count: int, hosts: int, said: bytes) -> None:
    ways = asyncio.Semaphore(AT_ONCE)
    sources = [f"127.0.{number // 250}.{2 + number % 250}" for number in range(hosts)]
    print(len(await asyncio.gather(*(begin(port, sources[number % hosts], said, ways) for number in range(count)))), flush=True)
    await asyncio.Event().wait()


@contextmanager
def strangers(port: int, count: int, hosts: int, *more: str) -> Iterator[Sequence[subprocess.Popen[str]]]:
    """Start processes that make `count` half requests together. End each one by its process id."""
    counts = [min(PER_PROCESS, count - start) for start in range(0, count, PER_PROCESS)]
    command = [sys.executable, "-m", "tests.web.half_requests", str(port)]
    processes = [
        subprocess.Popen([*command, str(part), str(hosts), *more], stdout=subprocess.PIPE, text=True) for part in counts
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def connected(processes: Sequence[subprocess.Popen[str]]) -> int:
    """Return the number of their connections when all are made."""
    made = 0
    for process in processes:
        assert process.stdout is not None
        made += int(process.stdout.readline())
    return made


if __name__ == "__main__":
    port, count, hosts = map(int, sys.argv[1:4])
    asyncio.run(begin_all(port, count, hosts, b"" if sys.argv[4:] == ["silent"] else HALF))
