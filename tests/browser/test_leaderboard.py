"""The page `/leaderboard` of a real peer, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.browser import NEEDED, browser
from tests.browser.test_annotate import address
from tests.web.room import Room, said
from tests.web.test_routes import founded, operator

pytestmark = [NEEDED, pytest.mark.real("browser")]


async def test_annotators_are_listed_by_points_as_soon_as_there_are_any(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser(in_a_hurry=True) as page:
        token = await operator(daemon)
        project = await founded(site, token, tasks=[{"text": "one"}, {"text": "two"}], price=3)
        await page.open(f"{address(site)}/leaderboard")
        await page.until("document.querySelector('main').innerText.includes('Nobody has joined yet')")
        shown = await page.join(address(site), "<b>ann</b>")
        await page.press("1")
        await page.task(shown)
        await page.press("1")
        await page.count("settled", 2)
        assert (await said(site.ask, "POST", f"/api/v1/projects/{project['project']}/close", {}, token)).status == 200
        await page.open(f"{address(site)}/leaderboard")
        cells = "[...document.querySelectorAll('tbody tr:first-child td')].map((cell) => cell.textContent)"
        told = await page.until(f"document.querySelector('tbody td') && {cells}")
        (row,) = (await said(site.leaderboard))["rows"]
        assert told == ["1", f"<b>ann</b> {row['annotator'][:8]} you", "2", str(row["points"])]
        await page.until("document.querySelector('#status a')?.textContent === '<b>ann</b>'")
        await page.open(f"{address(site)}/live")
        await page.until("document.querySelector('#status a')?.textContent === '<b>ann</b>'")
        assert await page.errors() == []
