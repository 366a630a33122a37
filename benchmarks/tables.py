"""Costs of tables: a block's changes, memory, proofs, a restart, and histories: `python -m benchmarks.tables --json FILE`.

A ledger's store has a table of a million rows, which another process wrote. A block changes a thousand rows: of ten, seven get
another value, two are new and one is deleted. Its time runs from the changes to the end of the commit. Memory is this process's
peak above its size before it opened the store.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table as Screen

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from consensus.effects import DecidedBlock
from ledger.tables import RangeProof, Table, fetch_ranges, verify_key, verify_range
from peer.settings.process_resources import process_memory_mb
from protocol import codec
from protocol.codec import Digest, Length
from protocol.messages import Certificate
from scenarios.trials import COUNT, Parser
from storage.ledger_store import LedgerStore
from storage.sqlite_rows import SqliteBucketStore
from tests.ledger.tables.memory_store import MemoryBucketStore

NAME = "benchmark/rows"
CHAIN = bytes(32)
LAST_HEIGHT = 1_000_000  # the store then takes a state of any lower height
FILLED_AT_ONCE = 50_000
BLOCK_MS, MEMORY_MB, PROOF_BYTES = 150.0, 200.0, 1_000
HISTORY_KEYS = 160  # ten buckets, some of which blocks nearly empty


@dataclass(frozen=True, slots=True)
class Answer:
    """A row about as large as an answer to a task."""

    task: Digest
    options: Annotated[tuple[int, ...], Length(0, 9)]
    weight: int
    height: int


@dataclass
class Figures:
    seed: int
    rows: int
    changes: int
    block_ms: list[float]  # ascending
    root_ms: float  # of a block, median
    commit_ms: float
    memory_mb: float
    file_mb: float
    open_seconds: float  # of the store, SQLite's own check included
    load_seconds: float  # the table's part of it
    proof_bytes: float  # mean
    proof_bytes_max: int
    proof_ms: float
    ranges: int
    range_bytes_max: int
    ranges_seconds: float  # to cut a snapshot into ranges and to check them all, on one core


def answer(draw: random.Random, height: int) -> Answer:
    return Answer(draw.randbytes(32), tuple(draw.sample(range(16), draw.randint(1, 3))), draw.randrange(1 << 20), height)


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def fill(path: Path, count: int) -> None:
    """Fill the store in a process of its own, because making rows takes other memory than holding them."""
    store, table, draw = LedgerStore(path, CHAIN), Table(Answer), random.Random(1)
    store.append_records([DecidedBlock(LAST_HEIGHT, bytes(32), b"", Certificate(b"", {}))])
    for first in range(0, count, FILLED_AT_ONCE):
        table = table.with_rows({key(number): answer(draw, 0) for number in range(first, min(count, first + FILLED_AT_ONCE))})
        save(store, table, 0)
    store.close()


def save(store: LedgerStore, table: Table[Answer], height: int) -> None:
    store.save_state(height, table.root.hash, codec.encode(table.root), tables={NAME: table})


def measure(path: Path, count: int, changes: int, blocks: int, seed: int = 0) -> Figures:
    memory, began = process_memory_mb(os.getpid()), time.perf_counter()
    store = LedgerStore(path, CHAIN)
    opened = time.perf_counter()
    SqliteBucketStore(path).close()
    loaded = time.perf_counter()
    table = store.rows.table(NAME, Answer)
    assert len(table) == count and store.encoded_state() == codec.encode(table.root)

    draw, most = random.Random(seed), 0.0
    whole, roots, commits = list[float](), list[float](), list[float]()
    for height in range(blocks):
        old = draw.sample(range(count), changes * 8 // 10)
        changed: dict[bytes, Answer | None] = {key(number): answer(draw, height) for number in old[: changes * 7 // 10]}
        changed |= {draw.randbytes(32): answer(draw, height) for _ in range(changes * 2 // 10)}
        changed |= {key(number): None for number in old[changes * 7 // 10 :]}
        times = [time.perf_counter()]
        table = table.with_rows(changed)
        root = table.root
        times.append(time.perf_counter())
        save(store, table, 1 + height)
        times.append(time.perf_counter())
        assert root == table.root and store.encoded_state() == codec.encode(root)
        whole.append(1_000 * (times[2] - times[0]))
        roots.append(1_000 * (times[1] - times[0]))
        commits.append(1_000 * (times[2] - times[1]))
        most = max(most, process_memory_mb(os.getpid()) - memory)

    proofs, proof_ms = proven(table, [*(key(draw.randrange(count)) for _ in range(1_000)), *map(key, range(-1_000, 0))])
    parts, ranges_seconds = cut(table)
    most = max(most, process_memory_mb(os.getpid()) - memory)
    store.close()
    return Figures(
        seed=seed,
        rows=count,
        changes=changes,
        block_ms=sorted(whole),
        root_ms=median(roots),
        commit_ms=median(commits),
        memory_mb=most,
        file_mb=path.stat().st_size / 1e6,
        open_seconds=opened - began,
        load_seconds=loaded - opened,
        proof_bytes=sum(proofs) / len(proofs),
        proof_bytes_max=max(proofs),
        proof_ms=proof_ms,
        ranges=len(parts),
        range_bytes_max=max(parts),
        ranges_seconds=ranges_seconds,
    )


def proven(table: Table[Answer], asked: list[bytes]) -> tuple[list[int], float]:
    """Return the lengths of proofs of rows and of absent rows, and the milliseconds to make and check one."""
    sizes, root, began = list[int](), table.root.hash, time.perf_counter()
    for of in asked:
        proof, value = table.prove_key(of), table.get_record(of)
        assert verify_key(root, of, None if value is None else codec.encode(value), proof)
        sizes.append(len(codec.encode(proof)))
    return sizes, 1_000 * (time.perf_counter() - began) / len(asked)


def cut(table: Table[Answer]) -> tuple[list[int], float]:
    """Return the lengths of all ranges, and the seconds to cut and check them."""
    sizes, found, began = list[int](), 0, time.perf_counter()
    for of in fetch_ranges(table.root):
        data = codec.encode(table.prove_range(of))
        found += len(verify_range(table.root.hash, of, codec.decode(RangeProof, data, len(data))))
        sizes.append(len(data))
    assert found == len(table)
    return sizes, time.perf_counter() - began


# Histories ---------------------------------------------------------------------------------------------------------------


def history(seed: int) -> str | None:
    """Run one random history, and return its error or None.

    The table must equal a dictionary, and have the root of the same rows added at once. Between the blocks of the history, which
    have any size, bodies are made and discarded, and the peer restarts.
    """
    draw = random.Random(seed)
    names = [b"%d" % number for number in range(draw.randint(1, HISTORY_KEYS))]
    table, rows, store = Table(int), dict[bytes, int](), MemoryBucketStore()
    for _ in range(draw.randint(1, 12)):
        body = table.with_rows(drawn(draw, names))
        if draw.random() < 0.3:
            assert body.root and table is not body
            continue  # it is not decided
        changes = drawn(draw, names)
        table = table.with_rows(changes)
        rows = {of: value for of, value in {**rows, **changes}.items() if value is not None}
        if draw.random() < 0.5:
            store.save_table(table)
        if draw.random() < 0.2:
            store.save_table(table)
            table = store.load_table(int)
    if {of: table.get_record(of) for of in names} != {of: rows.get(of) for of in names} or dict(table.items()) != rows:
        return f"history {seed}: other rows than the dictionary's"
    other, order = Table(int), draw.sample(list(rows.items()), len(rows))
    for at in range(0, len(order), size := draw.randint(1, HISTORY_KEYS)):
        other = other.with_rows(dict(order[at : at + size]))
        assert other.root
    if other.root != table.root:
        return f"history {seed}: another root than the same rows have that were put in one after another"
    return None


def drawn(draw: random.Random, names: list[bytes]) -> dict[bytes, int | None]:
    gone = draw.choice((0.1, 0.5, 0.98))
    changed = draw.sample(names, draw.choice((draw.randint(0, len(names)), len(names), 3 % len(names))))
    return {of: None if draw.random() < gone else draw.randrange(2) for of in changed}


# Bounds --------------------------------------------------------------------------------------------------------------


def verdicts(figures: Figures) -> Iterator[str]:
    block = median(figures.block_ms)
    yield verdict(
        block <= BLOCK_MS, f"a block that changes {figures.changes:,} rows: ≤ {BLOCK_MS:g} ms in the median: {block:.0f}"
    )
    yield verdict(figures.memory_mb <= MEMORY_MB, f"memory: ≤ {MEMORY_MB:g} MB more: {figures.memory_mb:.0f}")
    longest = figures.proof_bytes_max
    yield verdict(longest <= PROOF_BYTES, f"a proof: ≤ {PROOF_BYTES:,} bytes, the longest of {2_000:,}: {longest:,}")


def show(figures: Figures) -> None:
    screen = Screen(title=f"a table of {figures.rows:,} rows", show_header=False)
    times = figures.block_ms
    rows = {
        f"block of {figures.changes:,} changes, in the median": f"{median(times):.0f} ms",
        f"the fastest and the slowest of {len(times)}": f"{times[0]:.0f}, {times[-1]:.0f} ms",
        "changing and hashing, in the median": f"{figures.root_ms:.0f} ms",
        "writing and commit, in the median": f"{figures.commit_ms:.0f} ms",
        "memory with the table, more than without": f"{figures.memory_mb:.0f} MB",
        "file": f"{figures.file_mb:.0f} MB",
        "opening the store": f"{figures.open_seconds:.1f} s",
        "of that, the branches": f"{figures.load_seconds:.1f} s",
        "proof, average (most)": f"{figures.proof_bytes:.0f} ({figures.proof_bytes_max}) bytes",
        "making and checking one": f"{figures.proof_ms:.2f} ms",
        "ranges of a snapshot (largest)": f"{figures.ranges} ({figures.range_bytes_max:,} bytes)",
        "cutting and checking them all": f"{figures.ranges_seconds:.1f} s",
    }
    for name, value in rows.items():
        screen.add_row(name, value)
    Console(width=130).print(screen)


def main() -> int:
    parser = Parser("tables", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--rows", type=COUNT, default=1_000_000, metavar="N", help="rows of the table")
    parser.add_argument("--changes", type=COUNT, default=1_000, metavar="N", help="changes of a block")
    parser.add_argument("--blocks", type=COUNT, default=20, metavar="N", help="number of blocks, whose median counts")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,), metavar="S", help="seeds of the changes and the histories")
    parser.add_argument("--histories", type=COUNT, default=20_000, metavar="N", help="number of random histories of each seed")
    parser.add_argument("--fill", type=Path, metavar="FILE", help="only write the rows to this file")
    options = parser.parse_args()
    if options.fill:
        fill(options.fill, options.rows)
        return 0
    started, rows, wrong, lines = time.time(), list[Figures](), list[str](), list[str]()
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(dir=".") as folder:  # on this disk: /tmp may be in memory, where a commit costs nothing
            path = Path(folder) / "ledger.sqlite"
            command = [sys.executable, "-m", "benchmarks.tables", "--fill", str(path), "--rows", str(options.rows)]
            subprocess.run(command, check=True)
            rows.append(measure(path, options.rows, options.changes, options.blocks, seed))
        show(rows[-1])
        lines += verdicts(rows[-1])
        histories = range(seed * options.histories, (seed + 1) * options.histories)
        wrong += [problem for of in histories if (problem := history(of))]
        lines.append(verdict(not wrong, f"{len(histories):,} histories equal a dictionary and each other{wrong[:3] or ''}"))
        figures = {"seeds": list(options.seeds), "rows": [asdict(row) for row in rows]}
        write(options.json, started, {**figures, "histories": options.histories, "wrong": wrong})
    return conclude(lines)


if __name__ == "__main__":
    sys.exit(main())
