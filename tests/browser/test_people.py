"""Two people in two browsers, at two of four peers, one of which is killed and started again; and the page `/leaderboard`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import trio

from curation.ledger.curation_state import CurationState
from curation.rpc import CurationRpc, ImportRequest
from peer.features import founding_modules
from tests.browser.browser import NEEDED, Browser, browser
from tests.browser.test_annotate import address, exported
from tests.peer.network import network, service_of
from tests.web.room import Room, said
from tests.web.test_routes import founded, operator
from tests.web.test_sealed import served

pytestmark = [NEEDED, pytest.mark.real("browser")]
TASKS = 30


async def answer(page: Browser) -> None:
    """By key; the text says which one."""
    (text,) = await page.texts("[data-task] .text")
    await page.press(text[0])


async def label(page: Browser, shown: str, count: int) -> None:
    """So many tasks, of which the first is shown."""
    for number in range(count):
        await answer(page)
        if number < count - 1:
            shown = await page.task(shown)


@pytest.mark.long
async def test_no_answer_of_thirty_is_lost_or_doubled_while_a_peer_is_killed_and_all_peers_say_the_same(tmp_path: Path) -> None:
    async with (
        network(tmp_path, 4, roles=("annotator",), modules=founding_modules()) as made,
        trio.open_nursery() as nursery,
        browser(in_a_hurry=True) as anns,
        browser(in_a_hurry=True) as bobs,
    ):
        invited = {"sign_up": "invited", "sign_up_invitations": ("sesame",)}
        first, second, third = [await served(seat, nursery, **invited) for seat in made.seats[:3]]
        file = tmp_path / "moods.jsonl"
        file.write_text("".join(json.dumps({"text": f"{1 + number % 2}, says {number}"}) + "\n" for number in range(TASKS)))
        author = cast(CurationRpc, service_of(third.seat))
        project = (
            await author.import_tasks(ImportRequest(str(file), "moods", "", "label", ("glad", "sad"), False, 2, 1, "", False))
        ).project

        async def bob() -> None:
            await label(bobs, await bobs.join(address(second.site), "bob", "sesame"), TASKS)

        async def ann() -> None:
            await label(anns, await anns.join(address(first.site), "ann", "sesame"), 10)
            await first.kill()
            await anns.until("document.querySelector('.away')")
            shown = await anns.script("return document.querySelector('[data-task]')?.dataset.assignment ?? ''")
            if shown:
                await answer(anns)  # it has this one, and needs no peer for it
            await made.start(first.seat)
            await served(first.seat, nursery, **invited, web_listen=f"{first.site.host}:{first.site.port}")
            await label(anns, await anns.task(shown), TASKS - 10 - bool(shown))

        async with trio.open_nursery() as both:
            both.start_soon(ann)
            both.start_soon(bob)
        for server in (first, second, third):
            await server.seat.until(lambda driver: driver.state.module_state(CurationState).settled == TASKS)
        assert (await said(third.site.stats))["annotations"] == 2 * TASKS
        board, rows = (await said(third.site.leaderboard))["rows"], await exported(third.site, project)
        people = {row["annotator"] for row in board}
        assert len(rows) == TASKS
        for row in rows:
            assert {vote["annotator"] for vote in row["votes"]} == people and len(row["votes"]) == 2
            assert [vote["answer"] for vote in row["votes"]] == [[int(row["text"][0]) - 1]] * 2
        for server in (first, second):
            assert await exported(server.site, project) == rows
            assert (await said(server.site.leaderboard))["rows"] == board
        nursery.cancel_scope.cancel()


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
