"""Layouts, modes and buffers that the codec's tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.training.replicated.codec.reference import origin_of
from tests.training.replicated.support import RAGGED
from training.job_spec import Compression
from training.replicated import codec
from training.replicated.codec import PayloadMode
from training.replicated.tensor_layout import CHUNK, Float32Array, TensorLayout, layout_from_shapes

TOY = layout_from_shapes([("a", (3,)), ("b", (9,)), ("c", (8,)), ("d", (1,))])
LAYOUTS = {"toy": TOY, "ragged": RAGGED}
DENSE = [PayloadMode(Compression.DENSE, bits, CHUNK) for bits in (1, 2, 4, 8)]
SPARSE = [
    *(PayloadMode(Compression.SPARSE, bits, keep) for bits in (1, 2, 4, 8) for keep in (64, 2048)),
    *(PayloadMode(Compression.SPARSE, 1, keep) for keep in (4, 5, 1000, 3000, CHUNK)),
]
MODES = DENSE + SPARSE

elements = st.one_of(
    st.floats(width=32, min_value=-(2.0**30), max_value=2.0**30, allow_nan=False),
    st.floats(width=32, min_value=-1.0, max_value=1.0, allow_nan=False),
    st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5]),  # equals, and edges between levels
)
toy_buffers = st.lists(elements, min_size=TOY.size, max_size=TOY.size).map(lambda values: np.array(values, dtype=np.float32))


def name_of(mode: PayloadMode) -> str:
    return f"{mode.compression.value}-{mode.bits}-{mode.keep}"


def fields_of(header: codec.PayloadHeader) -> Any:
    """As tests/training/replicated/codec/reference.py has them."""
    mode = header.mode
    compression = {Compression.DENSE: 1, Compression.SPARSE: 2}[mode.compression]
    about = header.job, header.round, header.trainer, header.base, header.local_steps, header.batch
    return compression, mode.bits, mode.keep, origin_of(*about)


def chunks_of(m: Float32Array, layout: TensorLayout) -> list[Float32Array]:
    return np.split(m, np.cumsum(layout.chunk_lengths)[:-1])


def changed(payload: bytes, at: int, new: bytes) -> bytes:
    return payload[:at] + new + payload[at + len(new) :]
