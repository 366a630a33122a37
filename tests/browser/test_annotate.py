"""People at the page `/annotate` of a real peer, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selenium.webdriver.common.keys import Keys

from tests.browser.browser import NEEDED, browser
from tests.web.client import Site
from tests.web.room import Room, said
from tests.web.test_routes import founded, operator

pytestmark = NEEDED


def address(site: Site) -> str:
    return f"http://{site.host}:{site.port}"


async def exported(site: Site, project: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await said(site.export, project)).text.splitlines()]


async def test_an_invited_person_labels_by_keys_alone_until_all_is_settled(tmp_path: Path) -> None:
    async with Room(tmp_path).serving("invited", sign_up_codes=("sesame",)) as (daemon, site), browser(in_a_hurry=True) as page:
        project = (await founded(site, await operator(daemon), tasks=[{"text": f"text {number}"} for number in range(6)]))["project"]
        shown = await page.join(address(site), "ann", "sesame")
        chosen = {}
        for number in range(6):
            text = await page.script("return document.querySelector('[data-task] .text').textContent")
            chosen[text] = number % 2
            await page.press(str(number % 2 + 1))
            if number < 5:
                shown = await page.task(shown)
        await page.count("settled", 6)
        assert {row["text"]: row["votes"][0]["answer"] for row in await exported(site, project)} == {
            text: [choice] for text, choice in chosen.items()
        }
        assert await page.errors() == []
