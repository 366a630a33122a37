"""How fast payloads are read and written, and what they cost: `python -m benchmarks.decoding --json FILE`.

One core, processor time. Reading is `codec.read`, which checks that a payload is canonical, and then the entries of every block
as integers. Buffers are nearly normal numbers made of integers, so that supports are uniform; the layout is a transformer's. The
sparse mode whose bytes are bounded is measured for the default model too, which is so small that the header counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from scenarios.trials import COUNT, Parser
from training import random_stream
from training.job_spec import BITS, Compression, JobSpec
from training.replicated import codec
from training.replicated.codec import PayloadMode, payload_bytes_max
from training.replicated.codec.payload_header import HEADER_BYTES
from training.replicated.tensor_layout import CHUNK, Float32Array, TensorLayout, layout_of
from training.transformer import ModelSpec

LAYERS = 4  # with the default width: 4.3 million parameters
MODES = (
    *(PayloadMode(Compression.DENSE, bits, CHUNK) for bits in BITS),
    *(PayloadMode(Compression.SPARSE, 1, keep) for keep in (4, 16, 64, 256, 1024, 2048, 4096)),
    *(PayloadMode(Compression.SPARSE, bits, 64) for bits in BITS[1:]),
)
FAST_KEEP_MAX = 64
BOUNDED = PayloadMode(Compression.SPARSE, 1, 64)
UNIFORM_BYTES_MAX, BYTES_MAX = 0.0172, 0.0185  # per parameter, header included


@dataclass
class Row:
    seed: int
    parameters: int
    compression: str
    bits: int
    keep: int
    bytes_per_parameter: float  # header included
    bytes_per_parameter_max: float  # whatever the support
    read_million_per_second: float  # parameters, in the median of all repeats
    write_million_per_second: float
    dense_million_per_second: float  # of a decoded update as float32

    @property
    def fast(self) -> bool:
        return self.compression == Compression.DENSE or self.keep <= FAST_KEEP_MAX


@lru_cache(maxsize=1)  # of one seed all modes are measured before the next
def buffer(size: int, seed: int) -> Float32Array:
    return random_stream.irwin_hall_integers(size, "decoding", seed).astype(np.float32)


def measure(mode: PayloadMode, layout: TensorLayout, seed: int, repeats: int) -> Row:
    m = buffer(layout.size, seed)
    header = codec.PayloadHeader(bytes(32), 0, bytes(32), bytes(32), 1, 1, mode)
    payload = codec.encode_payload(header, m, layout)
    update = codec.read_payload(payload, layout)

    def speed(work: Callable[[], object]) -> float:
        return layout.size / 1e6 / _median([_processor_seconds(work) for _ in range(repeats)])

    return Row(
        seed=seed,
        parameters=layout.size,
        compression=mode.compression.value,
        bits=mode.bits,
        keep=mode.keep,
        bytes_per_parameter=len(payload) / layout.size,
        bytes_per_parameter_max=payload_bytes_max(layout, mode) / layout.size,
        read_million_per_second=speed(lambda: _read(payload, layout)),
        write_million_per_second=speed(lambda: codec.encode_payload(header, m, layout)),
        dense_million_per_second=speed(update.to_dense),
    )


def _read(payload: bytes, layout: TensorLayout) -> None:
    update = codec.read_payload(payload, layout)
    for run in update.body.runs():
        update.entries(run)


def _processor_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def verdicts(rows: list[Row]) -> Iterator[str]:
    """What must hold: speeds of the large model, which is the first, and bytes of every one."""
    large = [row for row in rows if row.parameters == rows[0].parameters]
    for text, concerned, least in (
        ("read, dense and keep ≤ 64", [row for row in large if row.fast], 500),
        ("read, otherwise", [row for row in large if not row.fast], 150),
    ):
        slowest = min(row.read_million_per_second for row in concerned)
        yield verdict(slowest >= least, f"{text}: ≥ {least} M parameters/s: {slowest:.0f}")
    for row in rows:
        if (row.compression, row.bits, row.keep) == (BOUNDED.compression, BOUNDED.bits, BOUNDED.keep):
            yield _bytes("uniform", row, row.bytes_per_parameter, UNIFORM_BYTES_MAX)
            yield _bytes("at worst", row, row.bytes_per_parameter_max, BYTES_MAX)


def _bytes(support: str, row: Row, figure: float, most: float) -> str:
    header = HEADER_BYTES / row.parameters
    text = f"keep 64, 1 bit, {support}, {row.parameters:,} parameters: ≤ {most} B/parameter: {figure:.5f}"
    return verdict(figure <= most, f"{text} ({figure - header:.5f} without the header of {HEADER_BYTES} bytes)")


def show(rows: list[Row]) -> None:
    console, table = Console(width=130), Table(title="payloads; speeds in million parameters per second of one core")
    for heading in ("", "parameters", "bits", "keep", "B/parameter", "at worst", "read", "write", "dense"):
        table.add_column(heading, justify="right")
    for row in rows:
        about = f"{row.parameters:,}", str(row.bits), str(row.keep)
        sizes = f"{row.bytes_per_parameter:.5f}", f"{row.bytes_per_parameter_max:.5f}"
        speeds = row.read_million_per_second, row.write_million_per_second, row.dense_million_per_second
        table.add_row(row.compression, *about, *sizes, *(f"{speed:.0f}" for speed in speeds))
    console.print(table)


def main() -> int:
    parser = Parser("decoding", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--width", type=COUNT, default=256, metavar="N", help="features of the transformer's residual stream")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,), metavar="S", help="of the buffers: a row each")
    parser.add_argument("--repeats", type=COUNT, default=5, metavar="N", help="of which the median is shown")
    options = parser.parse_args()
    width = 8 * -(-options.width // 8)
    model = ModelSpec(vocabulary=4096, width=width, layers=LAYERS, hidden=3 * width)
    large, default = (layout_of(JobSpec(name="decoding", data=bytes(32), model=it)) for it in (model, ModelSpec()))
    started, rows = time.time(), list[Row]()
    for seed, (mode, layout) in product(options.seeds, (*((mode, large) for mode in MODES), (BOUNDED, default))):
        rows.append(row := measure(mode, layout, seed, options.repeats))
        print(f"{row.compression}, {row.bits} bits, keep {row.keep}: {row.read_million_per_second:.0f} M/s read", file=sys.stderr)
        write(options.json, started, {"seeds": list(options.seeds), "rows": [asdict(row) for row in rows]})
    show(rows)
    return conclude(verdicts(rows))


if __name__ == "__main__":
    sys.exit(main())
