"""Vendored libraries match their published files, since nobody reviews minified code."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from peer.features import FEATURES
from web.site import load_site

WEB = Path(__file__).parents[2] / "web"
VENDOR = WEB / "vendor"
LIBRARIES = [file for file in VENDOR.iterdir() if file.suffix in (".js", ".mjs", ".css")]
SENT_BYTES_MAX = 140_000  # of scripts and styles


def test_every_library_has_the_digest_that_is_written_beside_it() -> None:
    listed = re.findall(r"^\| `([\w.]+)` \| .* \| `([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.MULTILINE)
    there = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in LIBRARIES}
    assert there and dict(listed) == there


def test_every_licence_is_there() -> None:
    assert len(list(VENDOR.glob("LICENSE-*"))) == len(LIBRARIES)


def test_scripts_and_styles_are_small() -> None:
    sent = [*LIBRARIES, *(file for file in load_site(FEATURES).static_files.values() if file.suffix in (".js", ".css"))]
    assert 0 < sum(file.stat().st_size for file in sent) < SENT_BYTES_MAX
