"""`python -m tools.run_pages PAGE...`: executes the code blocks of tutorials and how-to pages, in order.

Each page gets a temporary directory, and in it a home directory for each machine. A block's title names its machine (```` ```sh
title="Anna" ````). The runner replaces ports by free ports, and numbers of rounds by FEW_ROUNDS. The runner obeys comments of a
page, which readers do not see:

    <!-- value: NAME -->   the longest word that the next block prints replaces NAME in later blocks
    <!-- until: COMMAND -->   repeats COMMAND on the next block's machine until it succeeds, before that block
    <!-- retry: REASON -->   repeats the next block until it succeeds
    <!-- stop: REASON -->   stops the peer of the next block's machine before that block
    <!-- before: COMMAND -->   runs COMMAND on the next block's machine before that block, in place of a person in a browser
    <!-- skip: REASON -->   leaves out the next block

A block that ends in `peer run` or `peer join` stays in the background until the page ends. A block of `text` is the expected
output of the block before it, where `…` stands for any text. A block of another language becomes the file that its title names.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = ("docs/tutorials", "docs/how-to")
BLOCK_SECONDS_MAX: Final = 180  # longest time of a block: a job of a few rounds on a busy machine
STOP_SECONDS_MAX: Final = 20
FEW_ROUNDS: Final = 3
# ports for peers, below the range that the system gives to outgoing connections
PORTS: Final = iter(range(20_000 + os.getpid() % 10_000, 32_000))
BLOCK: Final = re.compile(
    r"(?P<comments>(?:<!--[^>]*-->\s*)*)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)```", re.DOTALL
)
COMMENT: Final = re.compile(r"<!--\s*(value|until|retry|stop|before|skip):\s*(.*?)\s*-->", re.DOTALL)
STAYS: Final = re.compile(r"^peer (run|join)\b(?!.*--help)")


class PageError(Exception):
    """Failure of a block: its command failed, or its output differs from the page."""


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    title: str
    code: str
    orders: dict[str, str]


def read_blocks(text: str) -> Iterator[Block]:
    for found in BLOCK.finditer(text):
        orders = dict(COMMENT.findall(found["comments"]))
        yield Block(
            text.count("\n", 0, found.start("language")) + 1, found["language"], found["title"] or "", found["code"], orders
        )


def find_free_port() -> int:
    """Return a free port of PORTS. Each port is returned once, and the system gives none of them to outgoing connections."""
    for port in PORTS:
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise PageError("no free port is left")


def matches(expected: str, printed: str) -> bool:
    """Return whether the output has each expected line, in this order. `…` stands for any text, and several spaces for one."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    patterns = [
        ".*".join(re.escape(part.strip()) for part in " ".join(line.split()).split("…"))
        for line in expected.splitlines()
        if line.strip()
    ]
    return all(any(re.fullmatch(pattern, line) for line in lines) for pattern in patterns)


@dataclass
class Machine:
    """Machine of a page: a home directory with ports of its own, and the peers that run in it."""

    home: Path
    port: int = field(default_factory=find_free_port)
    web_port: int = field(default_factory=find_free_port)
    metrics_port: int = field(default_factory=find_free_port)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PEER_", "FOLKMOOT_"))}
        return kept | {
            "HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PEER_LISTEN": f"127.0.0.1:{self.port}",
            "PEER_WEB_LISTEN": f"127.0.0.1:{self.web_port}",
            "PEER_THREADS": "1",
        }

    def adapt(self, code: str) -> str:
        ports = {"0.0.0.0:7700": self.port, "127.0.0.1:7780": self.web_port, "127.0.0.1:7790": self.metrics_port}
        for address, port in ports.items():
            code = code.replace(address, f"127.0.0.1:{port}")
        return re.sub(r"--(rounds|ppo-iterations) \d+", rf"--\1 {FEW_ROUNDS}", code)

    def execute(self, code: str) -> str:
        with TemporaryFile() as printed:
            command = ["bash", "-euo", "pipefail", "-c", code]
            process = subprocess.Popen(
                command, cwd=self.home, env=self.environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT
            )
            try:
                status: int | str = process.wait(BLOCK_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = f"none after {BLOCK_SECONDS_MAX} s"
            printed.seek(0)
            text = printed.read().decode(errors="replace")
        if status != 0:
            raise PageError(f"exit status {status}:\n{text}")
        return text

    def start(self, command: str) -> None:
        """Start a command that runs in the background, and wait until its peer answers."""
        log = (self.home / "peer.log").open("ab")
        self.running.append(
            subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        )
        log.close()
        self.repeat("peer stats", self.running[-1])

    def repeat(self, command: str, process: subprocess.Popen[bytes] | None = None) -> str:
        """Repeat a command until it succeeds, and return its output.

        Raises `PageError` after BLOCK_SECONDS_MAX, or if `process` ends.
        """
        ends = time.monotonic() + BLOCK_SECONDS_MAX
        while True:
            try:
                return self.execute(command)
            except PageError as error:
                if time.monotonic() > ends or (process and process.poll() is not None):
                    log = self.home / "peer.log"
                    raise PageError(f"{command}: {error}\n{log.read_text() if log.exists() else ''}") from None
                time.sleep(0.5)

    def stop(self) -> None:
        for process in self.running:
            process.send_signal(signal.SIGTERM)
        for process in self.running:
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()


def run_page(page: Path, show: bool = False) -> int:
    """Execute a page's blocks and return their number. Raises `PageError` with the line of a block that failed."""
    machines: dict[str, Machine] = {}
    values: dict[str, str] = {}
    printed, count = "", 0
    with TemporaryDirectory(prefix="page-") as directory, ExitStack() as stack:
        for block in read_blocks(page.read_text(encoding="utf-8")):
            is_file = block.language not in ("sh", "text")
            name = "machine" if is_file else (block.title or "machine").lower()
            if name not in machines:
                machines[name] = Machine(Path(directory) / name)
                machines[name].home.mkdir()
                stack.callback(machines[name].stop)
            machine = machines[name]
            try:
                if "skip" in block.orders:
                    continue
                count += 1
                code = re.sub(r"\b[A-Z]+(?:_[A-Z]+)*\b", lambda word: values.get(word[0], word[0]), machine.adapt(block.code))
                if is_file:
                    (machine.home / block.title).write_text(code)
                    continue
                if block.language == "text":
                    if not matches(block.code, printed):
                        raise PageError(f"the page says\n{block.code}but the command printed\n{printed}")
                    continue
                if "stop" in block.orders:
                    machine.stop()
                if "before" in block.orders:
                    machine.execute(machine.adapt(block.orders["before"]))
                if "until" in block.orders:
                    machine.repeat(block.orders["until"])
                *before, last = code.strip().replace("\\\n", " ").split("\n")
                stays = STAYS.match(last)
                started = "\n".join(before) if stays else code
                printed = machine.repeat(started) if "retry" in block.orders else machine.execute(started)
                if stays:
                    machine.start(last)
                if show:
                    print(f"--- {page}:{block.line}\n{code}---\n{printed}", flush=True)
                if "value" in block.orders:
                    values[block.orders["value"]] = max(printed.split(), key=len)
            except PageError as error:
                raise PageError(f"{page}:{block.line}: {error}") from None
    return count


def report_page(page: Path, show: bool) -> int:
    """Execute a page, print one line with the result or the error, and return an exit status."""
    began = time.monotonic()
    try:
        print(f"{page}: {run_page(page, show)} blocks, {time.monotonic() - began:.1f} s", flush=True)
    except PageError as error:
        print(error, flush=True)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Execute the code blocks of pages.")
    parser.add_argument("pages", nargs="*", type=Path, help="files and folders; by default tutorials and how-to pages")
    jobs = (os.cpu_count() or 1) + 1  # a page often waits for a round or a block
    parser.add_argument("--jobs", type=int, default=jobs, help="pages at the same time (default: one more than cores)")
    parser.add_argument("--show", action="store_true", help="print each block with its output")
    options = parser.parse_args(arguments)
    if not shutil.which("bash"):
        parser.error("bash is missing")
    paths = options.pages or [ROOT / name for name in PAGES]
    pages = [page for path in paths for page in ([path] if path.is_file() else sorted(path.glob("*.md")))]
    if not pages:
        parser.error(f"no page in {', '.join(map(str, paths))}")
    with ThreadPoolExecutor(options.jobs) as pool:
        return max(pool.map(partial(report_page, show=options.show), pages))


if __name__ == "__main__":
    sys.exit(main())
