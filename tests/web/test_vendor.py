"""Libraries of others are as they were published: nobody reviews minified code."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

VENDOR = Path(__file__).parents[2] / "web" / "vendor"


def test_every_library_has_the_digest_that_is_written_beside_it() -> None:
    listed = re.findall(r"^\| `([\w.]+)` \| .* \| `([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.MULTILINE)
    there = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDOR.glob("*.js")}
    assert there and dict(listed) == there


def test_every_licence_is_there() -> None:
    assert len(list(VENDOR.glob("LICENSE-*"))) == len(list(VENDOR.glob("*.js")))
