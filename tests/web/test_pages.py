"""Pages and files as a browser gets them: what they may load, and that nothing in them runs but the files of this peer."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from curation.pages.annotation_pages import PAGES
from peer.features import FEATURES
from tests.web.room import Room, said
from web.web_service import WebService

pytestmark = pytest.mark.real("sockets")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
INLINE = re.compile(r"<style|<script(?![^>]* src=\"/)|\sstyle=|\son\w+=|javascript:", re.IGNORECASE)


async def test_defence_pages_and_their_files_have_a_policy_and_nothing_inline(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        start = await said(site.get, "/")
        assert (start.status, start.headers["location"]) == (302, PAGES.pages[0].path)
        for page in PAGES.pages:
            shown = await said(site.get, page.path)
            assert shown.headers["content-type"] == "text/html; charset=utf-8"
            assert not INLINE.search(shown.text), page
            assert "<noscript>" in shown.text and f'href="{page.path}" aria-current="page"' in shown.text
            files = re.findall(r'(?:src|href)="(/(?:static|vendor)/[^"]+)"', shown.text)
            assert f"/static/{page.name}.js" in files
            for reply in [shown, *[await said(site.get, file) for file in files]]:
                assert reply.status == 200
                assert reply.headers["content-security-policy"] == POLICY
                assert reply.headers["x-content-type-options"] == "nosniff"
                assert reply.headers["referrer-policy"] == "no-referrer"


async def test_a_peer_without_the_package_of_pages_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    warned: list[str] = []
    desk: Any = SimpleNamespace(folder=tmp_path, running_features=FEATURES, log_warning=warned.append)
    await WebService(desk).run()
    assert warned == ["web pages are not served: the package jinja2 is not installed; the extra `web` has it"]
