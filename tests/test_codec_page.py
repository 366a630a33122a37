"""docs/protocol/codec.md has the test vectors that the code computes: `python -m tests.test_codec_page --write`."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from training.replicated import codec
from training.replicated.codec.payload import HEADER_BYTES
from training.replicated.tensor_layout import Float32Array, layout_from_shapes

PAGE = Path(__file__).parents[1] / "docs" / "protocol" / "codec.md"
WIDTH = 96  # characters of a vector in one line
LAYOUT = layout_from_shapes([("a", (3, 3)), ("b", (5,))])


def payload(m: Float32Array, bits: int) -> bytes:
    job, root = hashlib.sha256(b"job").digest(), hashlib.sha256(b"root").digest()
    return codec.encode_payload(codec.PayloadHeader(job, 2, b"\x01" * 32, root, 10, 8, bits), m, LAYOUT)


def vectors() -> dict[str, str]:
    m = np.arange(-7, 7, dtype=np.float32) / np.float32(8)
    m[1] = -0.0
    payloads = {bits: payload(m, bits).hex() for bits in (1, 2, 4, 8)}
    return {
        "header of 1 bit": payloads[1][: 2 * HEADER_BYTES],
        **{f"{bits} bit": encoded[2 * HEADER_BYTES :] for bits, encoded in payloads.items()},
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


def test_every_number_in_the_table_of_the_header_is_the_code_s() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+|chunks) \| ", PAGE.read_text(), re.MULTILINE)
    header = [(int(at), int(size)) for at, size in rows if size.isdigit()][:3]
    assert [at for at, _ in header] == [sum(size for _, size in header[:i]) for i in range(len(header))]
    assert sum(size for _, size in header) == HEADER_BYTES


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(rewritten(PAGE.read_text()))
    else:
        print("\n".join(f"{name}:\n{shown(value)}" for name, value in vectors().items()))
