"""An operator's work at the pages `/admin` and `/review` of a real peer, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser import axe
from tests.browser.browser import NEEDED, Browser, browser
from tests.browser.test_annotate import address, exported
from tests.web.client import Person, Site
from tests.web.room import Room, assigned, enrolled, said
from tests.web.test_routes import disputed, founded, operator

pytestmark = [NEEDED, pytest.mark.real("browser")]
# Visible buttons and links.
BUTTON = (
    "[...document.querySelectorAll('button, main a')].findLast((one) => one.checkVisibility() && one.textContent.trim() === '{}')"
)


async def press_button(page: Browser, *texts: str, times: int = 1) -> None:
    for text in texts:
        await page.until(f"{BUTTON.format(text)} && ({f'{BUTTON.format(text)}.click(), ' * times} true)")


async def told(page: Browser, text: str) -> None:
    """Wait for this message. Names in it stand between isolates, which are invisible."""
    await page.until(r"document.querySelector('.told').textContent.replace(/[\u2068\u2069]/g, '').includes(arguments[0])", text)


async def types_into(page: Browser, name: str, text: str) -> None:
    def types() -> None:
        (field,) = [field for field in page.driver.find_elements(By.NAME, name) if field.is_displayed()]
        if name != "file":
            field.clear()
        field.send_keys(text)

    await page.do(types)


async def sign_in(page: Browser, site: Site, token: str, path: str = "/admin") -> None:
    await page.open(f"{address(site)}{path}#{token}")
    await page.until("document.querySelector('.here') && !document.querySelector('#work').hidden")


async def test_an_operator_makes_a_project_from_a_file_and_its_author_decides_closes_and_exports(tmp_path: Path) -> None:
    good, bad = tmp_path / "moods.jsonl", tmp_path / "bad.csv"
    good.write_text(json.dumps({"text": "<b>only</b> rain", "suggestion": "sad", "label": "glad"}) + "\n")
    bad.write_text("text,gold\nfine,angry\n")
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        token = await operator(daemon)
        await page.open(f"{address(site)}/admin")
        await page.until("document.activeElement.name === 'token'")
        await page.press("x" * 32, Keys.ENTER)
        await told(page, "unknown token")
        await page.open(f"{address(site)}/admin#{token[:9]}")
        await page.until("document.querySelector('.told').textContent.includes('incomplete') && !location.hash")
        await sign_in(page, site, token)
        assert token not in await page.script("return location.href + JSON.stringify(localStorage) + document.cookie")
        await press_button(page, "Projects", "New project")
        await types_into(page, "name", "moods")
        await types_into(page, "options", "glad\nsad")
        await types_into(page, "file", str(bad))
        await press_button(page, "Check file")
        problems = "[...document.querySelectorAll('[data-problems] li')].map((line) => line.textContent)"
        assert await page.until(f"document.querySelector('[data-problems]') && {problems}") == [
            "bad.csv:2: gold 'angry' is not one of the options: glad, sad"
        ]
        await types_into(page, "file", str(good))
        await press_button(page, "Check file")
        await page.until("document.querySelector('[data-preview] .text')?.textContent === '<b>only</b> rain'")
        await page.until("document.querySelector('[data-notes] li')?.textContent.startsWith(\"1 label of 'label' left out\")")
        await press_button(page, "Create project")
        await told(page, "The project has 1 task.")
        project = await page.until("document.querySelector('#projects [data-row]')?.dataset.row")
        ann, bob = await enrolled(site, "ann", "bob")
        (task,) = await assigned(site, ann)
        await disputed(site, task, ann, bob)

        await page.open(f"{address(site)}/review#{project}")
        await page.until("document.querySelector('[data-current][data-state=waiting]')")
        assert await page.script("return document.querySelector('#work h1').textContent") == "Review moods"
        votes = "[...document.querySelectorAll('[data-current] td:last-child')].map((cell) => cell.textContent)"
        assert sorted(await page.script(f"return {votes}")) == ["glad", "sad", "sad"], "the suggestion and two votes"
        assert await page.script("return document.querySelector('.task .text').textContent") == "<b>only</b> rain"
        await page.press("/", "2")
        assert await page.script("return document.querySelector('[name=search]').value") == "2", "no key acts in a field"
        await page.press(Keys.BACKSPACE, Keys.ESCAPE, "2")
        await page.until("document.querySelector('.answer[aria-pressed=true]')?.textContent.includes('sad')")
        await page.press(Keys.ENTER)
        await page.until("document.querySelector('[data-label]')?.textContent === 'sad'")
        (line,) = await exported(site, project)
        assert line["label"] == [1] and len(line["votes"]) == 2
        seen = "[...document.querySelectorAll('a[download]')].filter((link) => !link.hidden)"
        links = await page.script(f"return {seen}.map((link) => link.getAttribute('href'))")
        names = await page.script("return [...document.querySelectorAll('a[download]')].map((link) => link.download)")
        assert names == ["moods.jsonl", "moods.csv", "moods.json", "moods.preferences.jsonl"], "the last one is of pairs alone"
        assert links == [f"/api/v1/projects/{project}/export?format={form}" for form in ("jsonl", "csv", "label-studio")]

        await page.open(f"{address(site)}/admin#projects")
        await press_button(page, "Close")
        await page.until("document.querySelector('dialog[open]')")
        await press_button(page, "Go back")
        await page.until("!document.querySelector('dialog[open]')")
        await press_button(page, "Close", "Close project")
        await page.until("document.querySelector('#projects [data-row] td:nth-child(3)').textContent === 'closed'")
        assert (await said(site.stats))["projects"] == []
        assert [error for error in await page.errors() if "401" not in error] == []


async def test_an_operator_invites_refuses_and_allows_and_starts_and_ends_a_job(tmp_path: Path) -> None:
    async with (
        Room(tmp_path).serving(role="full", sign_up="invited", sign_up_invitations=("a",)) as (daemon, site),
        browser() as page,
    ):
        assert (await said(Person("ann").enrol, site, "a")).status == 201
        await sign_in(page, site, await operator(daemon))
        await page.until("document.querySelector('#facts dd').textContent === 'working'")
        assert not any("undefined" in fact for fact in await page.texts("#facts dd"))
        await page.until("!document.querySelector('#alerts + p').hidden")
        await press_button(page, "People")
        await press_button(page, "New invitation", times=2)
        link = await page.until("document.querySelector('#link').value")
        assert link.startswith(f"{address(site)}/join#")
        assert (await said(Person("bob").enrol, site, link.partition("#")[2])).status == 201
        names = "[...document.querySelectorAll('#people [data-row] b')].map((name) => name.textContent)"
        for name in ("bob", "ann"):  # the list before has ann alone, and a button that is pressed during its refresh does nothing
            await types_into(page, "search", name)
            await page.press(Keys.ENTER)
            await page.until(f"String({names}) === arguments[0]", name)
        await press_button(page, "Refuse", "Refuse annotator")
        await told(page, "ann gets no more tasks from this peer.")
        await press_button(page, "Allow")
        await told(page, "ann gets tasks from this peer.")
        await press_button(page, "Jobs", "New job")
        await types_into(page, "name", "proverbs")
        await types_into(page, "overrides", "model.width 64")
        await press_button(page, "Start job")
        await told(page, "overrides must be an object")
        await types_into(page, "overrides", "byzantine_max=0\nnonsense = 1")
        await press_button(page, "Start job")
        await told(page, "unknown job field 'nonsense'")
        await types_into(page, "overrides", "byzantine_max=0")
        await press_button(page, "Start job")
        await page.until("document.querySelector('#jobs [data-row]')?.textContent.includes('proverbs')")
        await press_button(page, "Cancel", "Cancel job")
        await told(page, "job 'proverbs' has ended")
        await press_button(page, "Log")
        actions = "[...document.querySelectorAll('#log td:nth-child(3)')].map((cell) => cell.textContent)"
        await page.until(f"String({actions}) === 'cancel,train,train,allow,refuse,invite,sign in'")
        await page.script("window.asks = fetch; window.fetch = () => Promise.reject(new TypeError())")
        await press_button(page, "Sign out")
        await told(page, "this peer is not responding")
        assert not await page.script("return document.querySelector('#work').hidden"), "nobody is signed out"
        await page.script("window.fetch = asks")
        await press_button(page, "Sign out")
        await page.until("document.activeElement.name === 'token'")


async def test_the_author_finds_tasks_by_keys_and_orders_a_ranking(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        token, items = await operator(daemon), ["red", "green", "blue"]
        project = (
            await founded(
                site,
                token,
                kind="ranking",
                options=[],
                votes=1,
                tasks=[{"text": f"text {number}", "items": items} for number in range(3)],
            )
        )["project"]
        for number in range(4):  # after four skips the author decides
            (person,) = await enrolled(site, f"person {number}")
            (lease,) = [task for task in await assigned(site, person, 8) if task["text"] == "text 1"]
            assert (await said(person.skip, site, lease["assignment"], "unclear")).status == 200
        await sign_in(page, site, token, "/review")
        await page.until("document.querySelector('[data-current][data-state=waiting]')")
        assert await page.texts("[data-reason]") == ["unclear"] * 4
        await page.press("j")
        await page.until("document.querySelector('[data-current]:not([data-state=waiting])')")
        await page.press("k", "3", "1")
        await page.until("document.querySelectorAll('[aria-pressed=true]').length === 2")
        await page.press("2", Keys.ENTER)
        await page.until("document.querySelector('[data-current] [data-label]')?.textContent === 'blue > red > green'")
        assert [row["label"] for row in await exported(site, project)] == [[2, 0, 1]]
        await page.press("/", "TEXT 2", Keys.ENTER)
        await page.until("String([...document.querySelectorAll('.list span')].map((text) => text.textContent)) === 'text 2'")
        await page.press(Keys.ESCAPE)
        assert await page.errors() == []


# The page's calls that list tasks. `isLost` fails them, `isHeld` holds them until `release`. `looks` counts earlier ones.
LISTS = """
  const asks = fetch;
  Object.assign(window, { looks: 0, isAsked: false, isLost: false, isHeld: false });
  window.fetch = async (path, ...more) => {
    if (path === '/api/v1/projects') looks += 1;
    if (path.includes('/review?')) {
      isAsked = true;
      if (isLost) throw new TypeError('no link');
      if (isHeld) await new Promise((resolve) => { window.release = resolve; });
    }
    return asks(path, ...more);
  };
"""


async def test_what_the_author_chooses_stays_while_the_list_is_read_again_and_a_list_that_fails_is_asked_again(
    tmp_path: Path,
) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        token = await operator(daemon)
        one = await founded(
            site, token, name="one", many=True, votes=2, tasks=[{"text": f"text {number}"} for number in range(2)]
        )
        other = await founded(site, token, name="other", votes=2)
        ann, bob = await enrolled(site, "ann", "bob")
        first, second = [task for task in await assigned(site, ann, 8) if task["project"] == one["project"]]
        await disputed(site, first, ann, bob)
        await sign_in(page, site, token, "/review")
        await page.script("location.hash = arguments[0]", one["project"])
        await page.until("document.querySelector('#work h1').textContent === 'Review one' && document.querySelector('.answer')")
        await page.script(LISTS + "isHeld = true;")
        await disputed(site, second, ann, bob)
        await page.until("isAsked")
        await page.press("2")
        await page.until("looks > arguments[0]", await page.script("isHeld = false; release(); return looks"))
        assert await page.texts("[aria-pressed=true] span") == [one["options"][1]]
        await page.press(Keys.ENTER, Keys.ENTER)
        await page.until("document.querySelector('.told').textContent.startsWith('Task ')")
        assert sorted(row["label"] for row in await exported(site, one["project"])) == [[1]]

        await page.script("isLost = true; isAsked = false; location.hash = arguments[0]", other["project"])
        await page.until("isAsked")
        await page.script("isLost = false")
        await page.until(
            "document.querySelector('#work h1').textContent === 'Review other' && document.querySelector('[data-current]')"
        )


async def test_axe_finds_nothing_on_the_pages_of_operators(tmp_path: Path) -> None:
    async with browser() as page:
        async with Room(tmp_path).serving() as (daemon, site):
            token = await operator(daemon)
            await page.open(f"{address(site)}/review")
            await page.until("document.activeElement.name === 'token'")
            assert await axe.found(page) == []
            await sign_in(page, site, token, "/review")
            await page.until("!document.querySelector('#none').hidden")
            assert await axe.found(page) == []
            await founded(site, token, votes=2)
            ann, bob = await enrolled(site, "ann", "bob")
            await disputed(site, (await assigned(site, ann))[0], ann, bob)
            await page.open(f"{address(site)}/review")
            await page.do(page.driver.refresh)
            await page.until("document.querySelector('[data-current]') && document.querySelector('#alpha').textContent")
            assert await axe.found(page) == []
            for tab in ("health", "projects", "people", "jobs", "log"):
                await page.open(f"{address(site)}/admin#{tab}")
                await page.until(f"!document.querySelector('[data-tab={tab}]').hidden")
                assert await axe.found(page) == [], tab
            await press_button(page, "Projects", "New project", "Close")
            await page.until("document.querySelector('dialog[open]')")
            assert await axe.found(page) == []
        await page.until("document.querySelector('.away')")
        assert await axe.found(page) == []
