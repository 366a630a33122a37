"""Pages on a phone: pairs and rankings by touch and by keys, and axe on all pages and on planted faults."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser import axe
from tests.browser.browser import NEEDED, Browser, browser
from tests.browser.test_annotate import address, exported
from tests.web.room import Room
from tests.web.test_routes import founded, operator

TOUCHED_MIN = 44  # pixels, the least size of a touch target
TOO_SMALL = """
  return [...document.querySelectorAll('button, input, summary, .site nav a, .handle')].filter((element) => {
    const { width, height } = element.getBoundingClientRect();
    return width && (width < arguments[0] || height < arguments[0]);
  }).map((element) => element.outerHTML);
"""
WRONG_SIGN_IN = """
  const form = document.querySelector('#sign-in');
  for (const field of form.querySelectorAll('input')) field.value = 'nobody';
  scrollTo(0, 0);
  form.requestSubmit();
"""
IN_SIGHT = "(({ top, bottom }) => top >= 0 && bottom <= innerHeight)(document.querySelector('.told').getBoundingClientRect())"
LONG = "An unhurried heron, which nobody had disturbed since it came at dawn, waited in the shallow water. " * 3


async def require_fit(page: Browser, *reached: str) -> None:
    assert not await page.script("return document.documentElement.scrollWidth > innerWidth")
    assert await page.script(TOO_SMALL, TOUCHED_MIN) == []
    for below in reached:
        await page.script("document.querySelector(arguments[0]).scrollIntoView()", below)
        await page.until("(({ top, right }) => top >= 0 && top < innerHeight && right <= innerWidth)"
                         f"(document.querySelector('{below} :is(summary, h2)').getBoundingClientRect())")  # fmt: skip


@NEEDED
@pytest.mark.real("browser")
async def test_a_pair_is_answered_by_a_finger_and_by_a_key(tmp_path: Path) -> None:
    tasks = [{"text": "better?", "items": [LONG, f"{LONG} It saw {number} fish."]} for number in range(2)]
    async with Room(tmp_path).serving() as (daemon, site), browser(in_a_hurry=True) as page:
        project = await founded(site, await operator(daemon), kind="pair", options=[], tasks=tasks)
        await page.phone()
        await page.open(f"{address(site)}/join")
        await page.until("document.activeElement.name === 'name'")
        await page.script("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        await require_fit(page)
        await page.script(WRONG_SIGN_IN)
        await page.until(f"document.querySelector('.told').textContent.startsWith('wrong name') && {IN_SIGHT}")
        assert ["401" in error for error in await page.errors()] == [True]
        shown = await page.join(address(site), "ann")
        left = {shown: int(shown[-1], 16) & 1}
        await page.until("document.querySelector('.guidelines')")
        await require_fit(page, ".guidelines", ".history")
        await page.touch("[aria-keyshortcuts^=ArrowLeft]")
        shown = await page.task(shown)
        left[shown] = int(shown[-1], 16) & 1
        await page.press(Keys.ARROW_LEFT)
        await page.count("settled", 2)
        votes = [row["votes"][0]["answer"] for row in await exported(site, project["project"])]
        assert sorted(votes) == sorted([side] for side in left.values())
        assert await page.errors() == []


@NEEDED
@pytest.mark.real("browser")
async def test_a_ranking_is_made_by_drawing_by_buttons_and_by_keys(tmp_path: Path) -> None:
    tasks = [{"text": f"rank {number}", "items": ["a", LONG[:120], "c"]} for number in range(3)]
    async with Room(tmp_path).serving() as (daemon, site), browser(in_a_hurry=True) as page:
        project = await founded(site, await operator(daemon), kind="ranking", options=[], tasks=tasks)
        await page.phone()
        shown = await page.join(address(site), "ann")
        await page.until("document.querySelector('.guidelines')")
        await require_fit(page, ".guidelines", ".history")
        await page.touch("[data-item='0'] .handle", onto=".tools")
        await order(page, "120")
        await page.touch(".tools .primary")
        shown = await page.task(shown)
        await page.touch("[data-item='2'] .move")
        await order(page, "021")
        await page.touch(".tools .primary")
        await page.task(shown)
        await page.script("document.querySelector(\"[data-item='1'] .answer\").focus()")
        await page.press(Keys.ARROW_UP)
        await order(page, "102")
        await page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
        await order(page, "021")
        await page.press(Keys.ARROW_DOWN, "1", "1")
        await order(page, "210")
        await page.chord(Keys.CONTROL, Keys.ENTER)
        await page.count("settled", 3)
        assert sorted([row["votes"][0]["answer"] for row in await exported(site, project["project"])]) == [
            [0, 2, 1],
            [1, 2, 0],
            [2, 1, 0],
        ]
        assert await page.errors() == []


async def order(page: Browser, items: str) -> None:
    await page.until(f"[...document.querySelectorAll('[data-item]')].map(({{ dataset }}) => dataset.item).join('') === '{items}'")


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
