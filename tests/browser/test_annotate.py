"""Work of annotators at the page `/annotate` of a real peer, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser.browser import NEEDED, browser
from tests.web.client import Site
from tests.web.room import Room, said
from tests.web.test_routes import founded, operator

pytestmark = [NEEDED, pytest.mark.real("browser")]


def address(site: Site) -> str:
    return f"http://{site.host}:{site.port}"


async def exported(site: Site, project: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await said(site.export, project)).text.splitlines()]


async def test_an_invited_person_labels_by_keys_alone_until_all_is_settled(tmp_path: Path) -> None:
    async with (
        Room(tmp_path).serving("invited", sign_up_invitations=("sesame",)) as (daemon, site),
        browser(in_a_hurry=True) as page,
    ):
        project = await founded(site, await operator(daemon), tasks=[{"text": f"text {number}"} for number in range(6)])
        shown = await page.join(address(site), "ann", "sesame")
        chosen = {}
        for number in range(6):
            (text,) = await page.texts("[data-task] .text")
            chosen[text] = number % 2
            await page.press(str(number % 2 + 1))
            if number == 3:
                await page.until(f"document.querySelector('[data-answer=\"{shown}\"]')")  # stored; sent already on a slow machine
                await page.do(page.driver.refresh)  # the browser has the key and the unsent answers
            if number < 5:
                shown = await page.task(shown)
        await page.count("settled", 6)
        assert {row["text"]: row["votes"][0]["answer"] for row in await exported(site, project["project"])} == {
            text: [choice] for text, choice in chosen.items()
        }
        assert await page.errors() == []


async def test_an_answer_is_taken_back_until_it_is_sent(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        project = await founded(site, await operator(daemon), tasks=[{"text": "one"}, {"text": "two"}])
        first = await page.join(address(site), "ann")
        await page.press("1")
        await page.count("held", 1)
        assert "press U to undo" in (await page.texts("[data-answer]"))[0]
        second = await page.task(first)
        await page.press("u")
        assert await page.task(second) == first, "it is asked again"
        await page.until("!document.querySelector('[data-answer]')")
        await page.press("2")
        await page.task(first)
        await page.press("2")
        await page.count("settled", 1)
        assert [row["votes"][0]["answer"] for row in await exported(site, project["project"])] == [[1]]
        await page.press("u")
        assert await page.task() == second
        await page.until("!document.querySelector('[data-state=held]')")
        await page.press("u")
        await page.until("document.querySelector('.told').textContent.includes('cannot be undone')")
        assert (await said(site.stats))["annotations"] == 1


async def test_a_double_click_answers_one_task(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        await founded(site, await operator(daemon), tasks=[{"text": "one"}, {"text": "two"}])
        first = await page.join(address(site), "ann")
        answer = page.driver.find_element(By.CSS_SELECTOR, ".answer")
        await page.do(lambda: ActionChains(page.driver).double_click(answer).perform())
        await page.count("held", 1)
        assert await page.task(first), "the other one is still asked"


async def test_no_answer_is_lost_or_doubled_while_the_peer_is_away(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with browser(in_a_hurry=True) as page:
        async with room.serving() as (daemon, site):
            project = await founded(site, await operator(daemon), tasks=[{"text": f"text {number}"} for number in range(4)])
            shown = await page.join(address(site), "ann")
            await page.press("1")
            shown = await page.task(shown)
            await page.until("document.querySelector('[data-answer]')")  # held, or already sent on a slow machine
        await page.until("document.querySelector('.away')")
        await page.press("2")
        shown = await page.task(shown)
        await page.press("2")
        await page.until("document.querySelector('.resting')")
        assert (await page.script("return document.querySelector('main').innerText")).count("is not responding") == 1
        async with room.serving(web_listen=f"{site.host}:{site.port}") as (_, site):
            await page.until("document.querySelector('.here')")
            await page.task(shown)
            await page.press("2")
            await page.count("settled", 4)
            votes = [row["votes"] for row in await exported(site, project["project"])]
            assert sorted(vote["answer"] for (vote,) in votes) == [[0], [1], [1], [1]]
            assert (await said(site.stats))["annotations"] == 4


async def test_an_answer_whose_lease_was_lost_is_told_and_stays(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser(in_a_hurry=True) as page:
        token = await operator(daemon)
        project = await founded(site, token, tasks=[{"text": "one"}], votes=2)
        await page.join(address(site), "ann")
        assert (await said(site.ask, "POST", f"/api/v1/projects/{project['project']}/close", {}, token)).status == 200
        await page.press("1")
        await page.count("lost", 1)
        told = await page.until("document.querySelector('.told.bad').textContent")
        assert (
            told.startswith("Your answer to “\u2068one\u2069” does not count: ") and (await said(site.stats))["annotations"] == 0
        )


async def test_sides_of_a_pair_are_by_the_assignment_and_the_answer_names_the_item(tmp_path: Path) -> None:
    tasks = [{"text": f"question {number}", "items": [f"the cat sat {number}", f"the dog sat {number}"]} for number in range(6)]
    async with Room(tmp_path).serving() as (daemon, site), browser(in_a_hurry=True) as page:
        project = await founded(site, await operator(daemon), kind="pair", options=[], tasks=tasks)
        shown = await page.join(address(site), "ann")
        lefts = {}
        for number in range(6):
            question = await page.script("return document.querySelector('.asked ~ .text').textContent")
            left, right = await page.script(
                "return [...document.querySelectorAll('[data-side] .text')].map((p) => p.textContent)"
            )
            assert sorted(await page.script("return [...document.querySelectorAll('mark')].map((mark) => mark.textContent)")) == [
                "cat",
                "dog",
            ]
            lefts[question] = left
            assert ("dog" in left) == bool(int(shown[-1], 16) & 1) and left != right
            await page.press(Keys.ARROW_LEFT)
            if number < 5:
                shown = await page.task(shown)
        await page.count("settled", 6)
        for row in await exported(site, project["project"]):
            assert row["items"][row["votes"][0]["answer"][0]] == lefts[row["text"]]


async def test_two_tabs_share_one_queue_and_show_different_tasks(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        await founded(site, await operator(daemon), tasks=[{"text": f"text {number}"} for number in range(8)])
        first = await page.join(address(site), "ann")
        one = page.driver.current_window_handle
        await page.tab()
        await page.open(f"{address(site)}/annotate")
        second = await page.task()
        assert second != first
        await page.press("1")
        await page.task(second)
        await page.do(page.driver.switch_to.window, one)
        await page.count("held", 1)
        assert await page.task() == first
        await page.press("2")
        await page.until(f"!document.querySelector('[data-answer=\"{second}\"]').matches('[data-state=held]')")
        await page.until(f"document.querySelector('[data-answer=\"{first}\"][data-state=held]')")
        third = await page.task()
        await page.press("u")
        assert await page.task(third) == first, "the newest is taken back, wherever it was given"


async def test_several_options_and_reasons_to_skip_have_keys_that_do_nothing_in_text_fields(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser(in_a_hurry=True) as page:
        project = await founded(
            site, await operator(daemon), options=["glad", "sad", "loud"], many=True, tasks=[{"text": "one"}, {"text": "two"}]
        )
        first = await page.join(address(site), "ann")
        await page.script("document.body.append(document.createElement('input')); document.querySelector('input').focus()")
        await page.press("2", "s", "?")
        await page.until("document.querySelector('input').value === '2s?'")
        await page.script("document.querySelector('input').remove()")
        await page.press("3", "1")
        await page.until("document.querySelectorAll('[aria-pressed=true]').length === 2")
        await page.chord(Keys.CONTROL, Keys.ENTER)
        await page.task(first)
        await page.press("s", "3")
        await page.until("document.querySelector('[data-answer] b')?.textContent === 'skipped: private'")
        await page.count("settled", 1)
        assert [row["votes"][0]["answer"] for row in await exported(site, project["project"])] == [[0, 2]]
        await page.count("decided", 1)


@pytest.mark.parametrize(
    ("asked", "keys", "answer"),
    [
        ({"kind": "rating", "options": ["bad", "fair", "good"], "tasks": [{"text": "one"}]}, ("3",), [3]),
        ({"kind": "ranking", "options": [], "tasks": [{"text": "one", "items": ["a", "b", "c"]}]}, ("3", "1", "2"), [2, 0, 1]),
    ],
    ids=["rating", "ranking"],
)
async def test_other_kinds_are_answered_by_keys(
    asked: dict[str, Any], keys: tuple[str, ...], answer: list[int], tmp_path: Path
) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser(in_a_hurry=True) as page:
        project = await founded(site, await operator(daemon), **asked)
        await page.join(address(site), "ann")
        await page.press(*keys)
        if asked["kind"] == "ranking":
            await page.chord(Keys.CONTROL, Keys.ENTER)
        await page.count("settled", 1)
        assert [row["votes"][0]["answer"] for row in await exported(site, project["project"])] == [answer]
