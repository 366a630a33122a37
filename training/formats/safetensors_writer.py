"""A safetensors file (github.com/huggingface/safetensors), written as it is computed: no model has to fit into memory twice.

The bytes are those that the library itself writes for the same tensors, so that one model has one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import BinaryIO, Final

from training.replicated.tensor_layout import Float32Array, float32_bytes

METADATA: Final = {"format": "pt"}  # as `transformers` writes it, and asks for
ALIGNMENT: Final = 8


def write_safetensors(stream: BinaryIO, tensors: Iterable[tuple[str, Float32Array]]) -> None:
    """Little-endian float32, in the order of the names."""
    ordered = sorted(tensors, key=lambda item: item[0])
    header: dict[str, object] = {"__metadata__": METADATA}
    offset = 0
    for name, values in ordered:
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, offset + 4 * values.size]}
        offset += 4 * values.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little") + text)
    for _, values in ordered:
        stream.write(float32_bytes(values))
