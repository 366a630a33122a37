"""Texts of people on all pages: in their own direction, as their project displays them, and without effect on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from curation.ledger.curation_state import AssignmentState, CurationState
from curation.ledger.transaction_types import SkipAssignment, StatementBatch
from peer.runtime.transaction_submitter import TransactionSubmitter
from tests.browser.browser import NEEDED, Browser, browser
from tests.browser.test_annotate import address
from tests.browser.test_phone import require_fit
from tests.web.room import Room, assigned, enrolled, said
from tests.web.test_routes import founded, operator

pytestmark = [NEEDED, pytest.mark.real("a browser")]
STRINGS = (Path(__file__).parents[1] / "web" / "xss.txt").read_text().splitlines()
MARK = "שלום"  # in each text of a person here
# Text nodes with the mark that have another text direction than their own.
ASTRAY = """
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const { data, parentElement } = walker.currentNode;
    if (data.includes(arguments[0]) && !parentElement.closest('[dir=auto], bdi, template')) found.push(parentElement.outerHTML);
  }
  for (const field of document.querySelectorAll('input:is(:not([type]), [type=search], [type=text]), textarea')) {
    if (!field.readOnly && field.dir !== 'auto') found.push(field.outerHTML);
  }
  return found;
"""
MARKED = "document.body.innerText.includes(arguments[0])"
OFF_SCREEN = """
  return [...document.querySelectorAll(arguments[0])].filter((element) => {
    const { left, right, width } = element.getBoundingClientRect();
    return width && (left < 0 || right > innerWidth);
  }).map((element) => element.outerHTML);
"""
RELEASED = """
  performance.getEntriesByType("resource").some((entry) => entry.name.endsWith(arguments[0]) && entry.responseStatus === 200)
"""


# Renders a text as `RowWithProof` does.
SHOWN = """
  return Promise.all([import('/static/shown.js'), import('/static/page.js')]).then(([{ Shown }, { html, render }]) => {
    const place = document.createElement('div');
    render(html`<${Shown} text=${arguments[0]} display=${arguments[1]} />`, place);
    return place.firstChild.innerHTML;
  });
"""
CONTROLS = "\x85\u2028\u202e\u2066\u2069"
MARKDOWN = {  # the nodes of each text
    "a *b* __c__": '<p dir="auto">a <em>b</em> <strong>c</strong></p>',
    "a\r\nb": '<p dir="auto">a\nb</p>',
    "# a\n# b": '<p class="heading" dir="auto">a</p><p class="heading" dir="auto">b</p>',
    "> a\n> b\n\nc": '<blockquote dir="auto">a\nb</blockquote><p dir="auto">c</p>',
    "- a\n* b": '<ul><li dir="auto">a</li><li dir="auto">b</li></ul>',
    "3. a\n4. b": '<ol start="3"><li dir="auto">a</li><li dir="auto">b</li></ol>',
    "|a|b|\n|-|-|\n|c|d|": (
        '<table><tr><td dir="auto">a</td><td dir="auto">b</td></tr><tr><td dir="auto">c</td><td dir="auto">d</td></tr></table>'
    ),
    "~~~\n- a\n\n**b**\n~~~\nc": '<pre dir="auto"><code>- a\n\n**b**</code></pre><p dir="auto">c</p>',
    "[a](http://b/)": '<p dir="auto">a <code class="address" dir="ltr">http://b/</code></p>',
    f"a{CONTROLS}": '<p dir="auto">a⟨U+0085⟩⟨U+2028⟩⟨U+202E⟩⟨U+2066⟩⟨U+2069⟩</p>',
}
HELLO = '<div class="turn" data-role="{}"><b class="role" dir="auto">{}</b><p dir="auto">{}</p></div>'
CHATS = {
    json.dumps([{"role": "user", "content": "a"}]): HELLO.format("user", "user", "a"),
    json.dumps({"messages": [{"role": "system", "content": "a"}]}): HELLO.format("system", "system", "a"),
    json.dumps({"conversations": [{"from": "gpt", "value": "a"}]}): HELLO.format("gpt", "gpt", "a"),
    json.dumps([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]): HELLO.format(
        "user", "user", "a\n[image]"
    ),
    json.dumps([{"role": "\u202euser", "content": "a\u2069"}]): HELLO.format("\u202euser", "⟨U+202E⟩user", "a⟨U+2069⟩"),
    "**Human:** a\nb": HELLO.format("human", "Human", "a\nb"),
    "**Human**: a": HELLO.format("human", "Human", "a"),
    "User: **a** b": HELLO.format("user", "User", "<strong>a</strong> b"),
    "<|user|>: a": HELLO.format("user", "user", "a"),
    "a\nUser: b": '<div class="turn" data-role=""><p dir="auto">a</p></div>' + HELLO.format("user", "User", "b"),
    '{"a": 1}': '<div class="turn" data-role=""><p dir="auto">{"a": 1}</p></div>',
}


async def require_own_directions(page: Browser) -> None:
    await page.until(MARKED, MARK)
    assert await page.script(ASTRAY, MARK) == []


async def test_each_text_of_people_has_its_own_direction(tmp_path: Path) -> None:
    options = [f"{MARK} yes", f"{MARK} no"]
    tasks = [{"text": f"{MARK} text {number}", "suggestion": 0} for number in range(2)]
    more = {"guidelines": f"{MARK} guidelines", "suggests_first": True, "votes": 2}
    async with Room(tmp_path, MARK).serving() as (daemon, site), browser() as page:
        token = await operator(daemon)
        label = await founded(site, token, name=f"{MARK} label", options=options, tasks=tasks, **more)
        (person,) = await enrolled(site, f"{MARK} person")
        lease, other = await assigned(site, person, 2, 2)
        assert (await said(person.submit, site, lease["assignment"], (0,))).status == 201
        assert (await said(person.skip, site, other["assignment"], f"{MARK} reason")).status == 200
        shown = await page.join(address(site), f"{MARK} ann")
        await require_own_directions(page)
        for kind, items in (("pair", 2), ("ranking", 3)):
            await page.press("1")
            things = [f"{MARK} item {number}" for number in range(items)]
            await founded(site, token, name=f"{MARK} {kind}", kind=kind, options=[], tasks=[{"text": MARK, "items": things}])
            while await page.script("return document.querySelector('.answers').className") != f"answers {kind}":
                await page.press("1")
                shown = await page.task(shown)
            await require_own_directions(page)
        await page.press("1")
        await page.script("document.querySelector('[data-item] .move:last-child').click()")
        await require_own_directions(page)
        await page.open(f"{address(site)}/leaderboard")
        await require_own_directions(page)
        await page.open(f"{address(site)}/join")
        await require_own_directions(page)
        await page.open(f"{address(site)}/admin#{token}")
        await page.until("document.querySelector('#work:not([hidden])')")
        for section in ("projects", "people", "log"):
            await page.open(f"{address(site)}/admin#{section}")
            await require_own_directions(page)
        await page.open(f"{address(site)}/review#{label['project']}")
        await page.until("document.querySelector('[data-current] tbody td')")
        await require_own_directions(page)
        assert await page.texts("[data-reason]") == [f"{MARK} reason"]
        assert await page.errors() == []


async def test_a_project_shows_markdown_or_the_turns_of_a_chat_and_nothing_of_it_runs(tmp_path: Path) -> None:
    hostile = "\n\n".join(STRINGS)
    markdown = "# Head\n\n**bold** `code` _it_ [a](javascript:alert(1))\n\n```\n<b>\n```\n\n- one\n- two\n\n"
    markdown += "3. three\n\n| a | b |\n|--|--|\n| 1 | 2 |"
    turns = [{"role": "user", "content": "**Hi**"}, {"from": "gpt", "value": "- a\n- b"}]
    kinds = (
        ("markdown", f"{markdown}\n\n{hostile}"), ("chat", json.dumps(turns)), ("chat", f"User: Hi\nthere\nAssistant: {hostile}"),
        ("plain", f"**bold** \x07\x00\x1b[31m \u202eevil\u202c\n{hostile}"),
    )  # fmt: skip
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        token, shown = await operator(daemon), ""
        for number, (display, text) in enumerate(kinds):
            project = await founded(site, token, name=f"p {number}", display=display, tasks=[{"text": text}])
            assert project["display"] == display
            shown = await (page.task(shown) if number else page.join(address(site), "ann"))
            match number:
                case 0:
                    assert (await page.texts("[data-task] :is(strong, em, p > code:not(.address), .heading)"))[:4] == [
                        "Head", "bold", "code", "it",
                    ]  # fmt: skip
                    assert (await page.texts("[data-task] .address"))[0] == "javascript:alert(1)"
                    assert (await page.texts("[data-task] pre"))[0] == "<b>"
                    assert (await page.texts("[data-task] li"))[:3] == ["one", "two", "three"]
                    assert (await page.texts("[data-task] td"))[:4] == ["a", "b", "1", "2"]
                case 1:
                    assert await page.texts("[data-task] .turn") == ["userHi", "gptab"]
                case 2:
                    assert await page.texts("[data-task] .role") == ["User", "Assistant"]
                    assert (await page.texts("[data-task] .turn"))[0] == "UserHi\nthere"
                case 3:
                    (text,) = await page.texts("[data-task] .text")
                    assert text.startswith("**bold** ⟨U+0007⟩⟨U+0000⟩⟨U+001B⟩[31m ⟨U+202E⟩evil⟨U+202C⟩\n")
            assert await page.texts("[data-task] :is(script, a, img, iframe, svg, form, input, style, object, video, math)") == []
            await page.press("1")
        assert await page.errors() == []


async def test_each_form_of_markdown_and_of_a_chat_becomes_its_nodes(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site), browser() as page:
        await page.open(f"{address(site)}/leaderboard")
        for display, cases in (("markdown", MARKDOWN), ("chat", CHATS)):
            for text, nodes in cases.items():
                assert await page.script(SHOWN, text, display) == nodes, text
        assert await page.script(SHOWN, f"**a**\r\n{CONTROLS}", "plain") == "**a**\n⟨U+0085⟩⟨U+2028⟩⟨U+202E⟩⟨U+2066⟩⟨U+2069⟩"


HIDDEN = "\u202e"  # shows the rest of its line from right to left
WITH_HIDDEN = """
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) if (walker.currentNode.data.includes(arguments[0])) found.push(walker.currentNode.data);
  return found;
"""


async def test_texts_guidelines_and_reasons_hide_nothing_and_have_the_display_of_their_project(tmp_path: Path) -> None:
    more = {"options": [], "display": "markdown", "guidelines": f"a{HIDDEN}", "votes": 2}
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        token = await operator(daemon)
        pair = {"text": f"# a{HIDDEN}", "items": [f"**{item}**{HIDDEN}" for item in "bc"]}
        made = await founded(site, token, name="pair", kind="pair", tasks=[pair], **more)
        (bob,) = await enrolled(site, "bob")
        (lease,) = await assigned(site, bob)
        skip = SkipAssignment(bytes.fromhex(lease["assignment"]), f"d{HIDDEN}")  # the annotation page sends no such reason
        await TransactionSubmitter(daemon.driver).submit("curation/statements", StatementBatch(skips=(skip,)))
        shown = await page.join(address(site), "ann")
        await page.until("document.querySelector('.guidelines')")
        assert sorted(await page.texts("[data-task] :is(.heading, strong)")) == ["a⟨U+202E⟩", "b", "c"]
        assert await page.script(WITH_HIDDEN, HIDDEN) == []
        ranking = {"items": [f"{item}{HIDDEN}" for item in "abc"]}
        await founded(site, token, name="ranking", kind="ranking", tasks=[ranking], **more)
        await page.press("1")
        await page.task(shown)
        assert len(await page.texts("[data-item]")) == 3 and await page.script(WITH_HIDDEN, HIDDEN) == []
        await page.open(f"{address(site)}/admin#{token}")
        await page.until("document.querySelector('#work:not([hidden])')")
        await page.open(f"{address(site)}/review#{made['project']}")
        await page.until("document.querySelector('[data-current] tbody td')")
        assert await page.texts("[data-current] :is(.heading, strong)") == ["a⟨U+202E⟩", "b", "c"]
        assert await page.texts("[data-reason]") == ["d⟨U+202E⟩"]
        assert await page.script(WITH_HIDDEN, HIDDEN) == [] and await page.errors() == []


async def test_sixteen_options_and_both_sides_of_a_pair_have_keys(tmp_path: Path) -> None:
    options = [f"option {number}" for number in range(1, 17)]
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        token, shown = await operator(daemon), ""
        await founded(site, token, name="sixteen", options=options, tasks=[{"text": f"text {number}"} for number in range(3)])
        shown = await page.join(address(site), "ann")
        await page.until("document.querySelector('[data-progress]')?.textContent.includes('0 of 3 tasks labeled')")
        for key in ("0", "a", "f"):
            await page.press(key)
            shown = await page.task(shown) if key != "f" else shown
        await page.until("document.querySelectorAll('[data-answer]').length === 3")
        assert await page.texts("[data-answer] b") == ["option 16", "option 11", "option 10"]
        await founded(
            site, token, name="pairs", kind="pair", options=[], tasks=[{"text": f"{n}", "items": ["a", "b"]} for n in "12"]
        )
        shown = await page.task(shown)
        await page.press("1")
        await page.task(shown)
        await page.press("2")
        await page.until("document.querySelectorAll('[data-answer]').length === 5")
        assert (await page.texts("[data-answer] b"))[:2] == ["B is better", "A is better"]
        assert await page.errors() == []


async def choose(page: Browser, name: str) -> None:
    """Choose the project on the page. The page then shows its task."""
    await page.script(
        "const list = document.querySelector('#choice select');"
        "list.value = [...list.options].find(({ text }) => text.includes(arguments[0])).value;"
        "list.dispatchEvent(new Event('change', { bubbles: true }));",
        name,
    )
    await shown_of(page, name)


async def shown_of(page: Browser, name: str) -> None:
    await page.until("document.querySelector('[data-task] .text')?.textContent.startsWith(arguments[0])", name)


async def test_people_choose_among_projects(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        token = await operator(daemon)
        await founded(site, token, name="first", tasks=[{"text": f"first {number}"} for number in range(9)])
        await page.join(address(site), "ann")
        await page.script("let ticks = 0; Date.now = () => ++ticks")  # an answer is held until the next one
        project = await founded(site, token, name="second", tasks=[{"text": f"second {number}"} for number in range(5)])
        await page.until("document.querySelectorAll('#choice option').length === 3")
        assert await page.script("return document.querySelector('#choice select').value") == "", "all"
        assert (await page.texts("#choice option"))[1:] == [
            f"\u2068{name}\u2069 (0 of {n} labeled)" for name, n in (("first", 9), ("second", 5))
        ]
        given_back = await page.task()
        await choose(page, "second")
        await page.until(RELEASED, f"/{given_back}/release")  # at once; without that call 45 s later
        row = daemon.driver.state.module_state(CurationState).assignments.get_record(bytes.fromhex(given_back))
        assert row is not None and row.state is AssignmentState.RELEASED
        for name in ("second", "first"):
            await choose(page, name)
            for _ in range(2):
                shown = await page.task()
                await page.press("1")
                await page.task(shown)
                await shown_of(page, name)
        await choose(page, "second")
        await page.press("u")
        await shown_of(page, "first")
        await page.press("2")
        await shown_of(page, "second")
        await page.until("document.querySelectorAll('[data-answer]').length === 4")
        answers = await page.texts("[data-answer]")
        assert [text.split()[0] for text in answers] == ["first", "first", "second", "second"]
        await page.open(f"{address(site)}/annotate")
        await shown_of(page, "second")
        assert (await said(site.ask, "POST", f"/api/v1/projects/{project['project']}/close", {}, token)).status == 200
        await page.count("settled", 4)
        await page.until("document.querySelector('#choice').childElementCount === 0")
        await shown_of(page, "first")
        assert [message for message in await page.errors() if "/api/tasks" not in message] == []


async def test_pages_of_operators_fit_a_phone(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        token = await operator(daemon)
        await founded(site, token, tasks=[{"text": "text"}])
        await page.phone()
        await page.open(f"{address(site)}/admin#{token}")
        await page.until("document.querySelector('#work:not([hidden])')")
        for path in ("admin#projects", "admin#people", "review"):
            await page.open(f"{address(site)}/{path}")
            await page.until("document.querySelector('#work:not([hidden])')")
            assert await page.script(OFF_SCREEN, ".site a, nav.tabs a, button, input, select") == []
            await require_fit(page)
        assert await page.errors() == []
