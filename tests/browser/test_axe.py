"""Everybody can use each page in each of its states: axe-core finds nothing, and nothing is wider than the screen."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser import axe
from tests.browser.browser import NEEDED, browser
from tests.browser.test_annotate import address
from tests.web.room import Room
from tests.web.test_routes import founded, operator

VENDOR = Path(axe.__file__).parent / "vendor"


def test_axe_is_as_it_was_published() -> None:
    (digest,) = re.findall(r"`([0-9a-f]{64})`", (VENDOR / "README.md").read_text())
    assert hashlib.sha256(axe.SOURCE.encode()).hexdigest() == digest


@pytest.mark.real("sockets")
@NEEDED
@pytest.mark.real("browser")
@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        ({"tasks": [{"text": "the first"}, {"text": "the second", "suggestion": "sad"}]}, ("1",)),
        ({"kind": "pair", "options": [], "tasks": [{"text": "better?", "items": ["the cat sat", "the dog sat"]}]}, ()),
        ({"kind": "ranking", "options": [], "tasks": [{"text": "rank", "items": ["a", "b", "c"]}]}, ("2",)),
    ],
    ids=["label", "pair", "ranking"],
)
async def test_axe_finds_nothing_where_people_annotate(asked: dict[str, Any], keys: tuple[str, ...], tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        await founded(site, await operator(daemon), **asked)
        shown = await page.join(address(site), "ann")
        await page.press(*keys)
        if asked.get("kind") != "ranking" and keys:
            await page.task(shown)
        await page.press("?")
        await page.until("document.querySelector('.help:not([hidden])')")
        assert await axe.found(page) == []
        await page.press("s")
        assert await axe.found(page) == []


@pytest.mark.real("sockets")
@NEEDED
@pytest.mark.real("browser")
async def test_axe_finds_nothing_where_there_is_nothing_and_where_the_peer_is_away(tmp_path: Path) -> None:
    async with browser() as page:
        async with Room(tmp_path).serving() as (_, site):
            for path, there in (("/annotate", "[name=name]"), ("/leaderboard", "main p:not([hidden]) a")):
                await page.open(f"{address(site)}{path}")
                await page.until(f"document.querySelector('{there}')")
                assert await axe.found(page) == [], path
            await page.enrol(address(site), "ann")
            await page.until("document.querySelector('.resting h1')?.textContent.startsWith('No tasks')")
            assert await axe.found(page) == []
        await page.until("document.querySelector('.away')")
        assert await axe.found(page) == []
