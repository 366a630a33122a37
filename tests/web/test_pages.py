"""Pages and files as a browser gets them: what they may load, and that nothing in them runs but the files of this peer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from curation.pages.annotation_pages import PAGES
from tests.web.room import Room, said

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
            replies = [shown, *[await said(site.get, file) for file in files]]
            for reply in replies:
                assert reply.status == 200
                assert reply.headers["content-security-policy"] == POLICY
                assert reply.headers["x-content-type-options"] == "nosniff"
                assert reply.headers["referrer-policy"] == "no-referrer"
