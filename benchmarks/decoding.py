"""Speed and size of encoded payloads: `python -m benchmarks.decoding --json FILE`.

Times are processor time of one core. Reading is `codec.read_payload`, which checks that a payload is canonical, and the levels of
every block as integers. Buffers are nearly normal numbers made from integers, in the layout of a transformer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from scenarios.trials import COUNT, Parser
from training import random_stream
from training.job_spec import BITS, JobSpec
from training.replicated import codec
from training.replicated.tensor_layout import Float32Array, TensorLayout, layout_of
from training.transformer import ModelSpec

LAYERS = 4  # with the default width: 4.3 million parameters
READ_MILLION_MIN = 500  # parameters per second


@dataclass
class Row:
    seed: int
    parameters: int
    bits: int
    bytes_per_parameter: float  # header included
    read_million_per_second: float  # parameters, median of all repeats
    write_million_per_second: float
    dequantize_million_per_second: float  # of a decoded update to float32


@lru_cache(maxsize=1)  # all bits of one seed are measured before the next seed
def buffer(size: int, seed: int) -> Float32Array:
    return random_stream.irwin_hall_integers(size, "decoding", seed).astype("float32")


def measure(bits: int, layout: TensorLayout, seed: int, repeats: int) -> Row:
    m = buffer(layout.size, seed)
    header = codec.PayloadHeader(bytes(32), 0, bytes(32), bytes(32), 1, 1, bits)
    payload = codec.encode_payload(header, m, layout)
    update = codec.read_payload(payload, layout)

    def speed(work: Callable[[], object]) -> float:
        return layout.size / 1e6 / _median([_processor_seconds(work) for _ in range(repeats)])

    return Row(
        seed=seed,
        parameters=layout.size,
        bits=bits,
        bytes_per_parameter=len(payload) / layout.size,
        read_million_per_second=speed(lambda: _read(payload, layout)),
        write_million_per_second=speed(lambda: codec.encode_payload(header, m, layout)),
        dequantize_million_per_second=speed(update.dequantize),
    )


def _read(payload: bytes, layout: TensorLayout) -> None:
    update = codec.read_payload(payload, layout)
    for block in layout.blocks:
        update.levels_of(block)


def _processor_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def verdicts(rows: list[Row]) -> Iterator[str]:
    slowest = min(row.read_million_per_second for row in rows)
    yield verdict(slowest >= READ_MILLION_MIN, f"read: ≥ {READ_MILLION_MIN} M parameters/s: {slowest:.0f}")


def show(rows: list[Row]) -> None:
    console, table = Console(width=130), Table(title="payloads; speeds in million parameters per second of one core")
    for heading in ("parameters", "bits", "B/parameter", "read", "write", "dequantize"):
        table.add_column(heading, justify="right")
    for row in rows:
        speeds = row.read_million_per_second, row.write_million_per_second, row.dequantize_million_per_second
        about = f"{row.parameters:,}", str(row.bits), f"{row.bytes_per_parameter:.5f}"
        table.add_row(*about, *(f"{speed:.0f}" for speed in speeds))
    console.print(table)


def main() -> int:
    parser = Parser("decoding", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--width", type=COUNT, default=256, metavar="N", help="features of the transformer's residual stream")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0,), metavar="S", help="seeds of the buffers, with a row for each"
    )
    parser.add_argument("--repeats", type=COUNT, default=5, metavar="N", help="number of repetitions, whose median is shown")
    options = parser.parse_args()
    width = 8 * -(-options.width // 8)
    model = ModelSpec(vocabulary=4096, width=width, layers=LAYERS, hidden=3 * width)
    layout = layout_of(JobSpec(name="decoding", data=bytes(32), model=model))
    started, rows = time.time(), list[Row]()
    for seed, bits in product(options.seeds, BITS):
        rows.append(row := measure(bits, layout, seed, options.repeats))
        print(f"{row.bits} bits: {row.read_million_per_second:.0f} M/s read", file=sys.stderr)
        write(options.json, started, {"seeds": list(options.seeds), "rows": [asdict(row) for row in rows]})
    show(rows)
    return conclude(verdicts(rows))


if __name__ == "__main__":
    sys.exit(main())
