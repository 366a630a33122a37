"""docs/protocol/codec.md has the test vectors that the code computes: `python -m tests.test_codec_page --write`."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from training.job_spec import Compression
from training.replicated import codec
from training.replicated.codec import PayloadMode
from training.replicated.codec.payload_header import HEADER_BYTES
from training.replicated.codec.top_k_support import rice_parameter
from training.replicated.tensor_layout import CHUNK, Float32Array, TensorLayout, layout_from_shapes

PAGE = Path(__file__).parents[1] / "docs" / "protocol" / "codec.md"
WIDTH = 96  # characters of a vector in one line
SMALL = layout_from_shapes([("a", (3, 3)), ("b", (5,))])
LARGE = layout_from_shapes([("a", (CHUNK,))])


def payload(m: Float32Array, layout: TensorLayout, bits: int, keep: int | None = None) -> bytes:
    mode = PayloadMode(Compression.DENSE, bits, CHUNK) if keep is None else PayloadMode(Compression.SPARSE, bits, keep)
    job, root = hashlib.sha256(b"job").digest(), hashlib.sha256(b"root").digest()
    return codec.encode_payload(codec.PayloadHeader(job, 2, b"\x01" * 32, root, 10, 8, mode), m, layout)


def vectors() -> dict[str, str]:
    m = np.arange(-7, 7, dtype=np.float32) / np.float32(8)
    m[1] = -0.0
    large = ((7919 * np.arange(CHUNK) % CHUNK - 2048) / 1024).astype(np.float32)
    dense = {f"dense {bits}": payload(m, SMALL, bits).hex()[2 * HEADER_BYTES :] for bits in (1, 2, 4, 8)}
    kinds = ((1, 2048), (2, 64), (4, 2048), (8, 2048))
    sparse = {f"sparse {bits}, keep {keep}": payload(m, SMALL, bits, keep).hex() for bits, keep in kinds}
    return {
        "header of dense 1": payload(m, SMALL, 1).hex()[: 2 * HEADER_BYTES],
        **dense,
        **sparse,
        "body of sparse 1, keep 64": payload(large, LARGE, 1, 64).hex()[2 * HEADER_BYTES :],
        "body of sparse 2, keep 512, SHA-256": hashlib.sha256(payload(large, LARGE, 2, 512)[HEADER_BYTES:]).hexdigest(),
    }


def shown(value: str) -> str:
    return "".join(f"    {value[start : start + WIDTH]}\n" for start in range(0, len(value), WIDTH))


def rewritten(page: str) -> str:
    for name, value in vectors().items():
        page = re.sub(rf"(?m)^({re.escape(name)}:\n)(?:[ \t]+[^\n]+\n)*", rf"\g<1>{shown(value)}", page)
    return page


@pytest.mark.parametrize(("name", "value"), list(vectors().items()), ids=list(vectors()))
def test_vectors_on_the_page_are_what_the_code_computes(name: str, value: str) -> None:
    found = re.search(rf"^{re.escape(name)}:((?:\n[ \t]+[^\n]+)+)$", PAGE.read_text(), re.MULTILINE)
    assert found and "".join(found[1].split()) == value


def test_what_the_page_says_of_the_rice_parameter_holds() -> None:
    assert rice_parameter(64) == 5
    assert [keep for keep in range(4, 4097) if rice_parameter(keep) == 0] == list(range(1366, 4097))


def test_every_number_in_the_table_of_the_header_is_the_code_s() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+|chunks) \| ", PAGE.read_text(), re.MULTILINE)
    header = [(int(at), int(size)) for at, size in rows if size.isdigit()][:5]
    assert [at for at, _ in header] == [sum(size for _, size in header[:i]) for i in range(len(header))]
    assert sum(size for _, size in header) == HEADER_BYTES


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(rewritten(PAGE.read_text()))
    else:
        print("\n".join(f"{name}:\n{shown(value)}" for name, value in vectors().items()))
