"""Shared layouts and buffers of the codec's tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.training.replicated.codec.reference import origin_of
from tests.training.replicated.support import RAGGED
from training.replicated import codec
from training.replicated.tensor_layout import layout_from_shapes

TOY = layout_from_shapes([("a", (3,)), ("b", (9,)), ("c", (8,)), ("d", (1,))])
LAYOUTS = {"toy": TOY, "ragged": RAGGED}

elements = st.one_of(
    st.floats(width=32, min_value=-(2.0**30), max_value=2.0**30, allow_nan=False),
    st.floats(width=32, min_value=-1.0, max_value=1.0, allow_nan=False),
    st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5]),  # equal values, and boundaries between levels
)
toy_buffers = st.lists(elements, min_size=TOY.size, max_size=TOY.size).map(lambda values: np.array(values, dtype=np.float32))


def fields_of(header: codec.PayloadHeader) -> tuple[int, bytes]:
    """Return the fields in the form of tests/training/replicated/codec/reference.py."""
    about = header.job, header.round, header.trainer, header.base, header.local_steps, header.batch
    return header.bits, origin_of(*about)


def changed(payload: bytes, at: int, new: bytes) -> bytes:
    return payload[:at] + new + payload[at + len(new) :]
