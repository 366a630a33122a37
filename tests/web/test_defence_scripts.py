"""Defence: all text that people write is shown as text, and no script in it runs. `xss.txt` holds one string per line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from curation.limits import NAME_CHARACTERS_MAX, OPTION_CHARACTERS_MAX, OPTIONS_MAX
from curation.pages.annotation_pages import PAGES
from tests.browser.browser import NEEDED, Browser, browser
from tests.browser.test_admin import sign_in
from tests.browser.test_annotate import address
from tests.web.room import Room, enrolled
from tests.web.test_routes import founded, operator

pytestmark = [NEEDED, pytest.mark.real("browser")]
CORPUS = Path(__file__).with_name("xss.txt").read_text("utf-8").split("\n")[:-1]
OPTIONS = [text for text in CORPUS if len(text) <= OPTION_CHARACTERS_MAX][:OPTIONS_MAX]
NAMES = [text for text in CORPUS if len(text) <= NAME_CHARACTERS_MAX]
PER_TASK = 24
# Every string calls this function if it runs.
ALARM = "window.alert = () => { document.documentElement.dataset.ran = 'true'; };"
# Elements, event handlers and script addresses that none of our pages contains.
STRANGE = """
  const strange = 'script, iframe, frame, img, object, embed, link, style, meta, base, video, audio, math, marquee, '
    + 'template:not(main > template)';
  const isOurs = (element) => !element.matches(strange)
    && [...element.attributes].every(({ name, value }) => !name.startsWith('on') && !/^\\s*javascript:|evil/.test(value));
  return [...document.querySelectorAll('main *')].filter((element) => !isOurs(element)).map((element) => element.outerHTML);
"""


def visible(text: str) -> str:
    """Return the text as a page shows it: a control character as its code."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", _code, text)


def _code(found: re.Match[str]) -> str:
    return f"⟨U+{ord(found[0]):04X}⟩"


def test_defence_the_corpus_is_large_enough() -> None:
    assert len(set(CORPUS)) == len(CORPUS) >= 100 and len(OPTIONS) == OPTIONS_MAX and NAMES


@pytest.mark.parametrize("kind", ["label", "pair"])
async def test_defence_nothing_that_people_write_runs(kind: str, tmp_path: Path) -> None:
    texts = ["\n".join(CORPUS[at : at + PER_TASK]) for at in range(0, len(CORPUS), PER_TASK)]
    left = [visible(text) for text in texts]
    asked: dict[str, Any] = {"name": NAMES[0], "guidelines": "\n".join(CORPUS)}
    if kind == "label":
        asked |= {"options": OPTIONS, "tasks": [{"text": text, "suggestion": OPTIONS[-1]} for text in texts]}
    else:
        asked |= {"kind": kind, "options": [], "tasks": [{"text": text, "items": [text, f"{text} "]} for text in texts]}
    async with Room(tmp_path).serving() as (daemon, site), browser(in_a_hurry=True) as page:
        await page.do(page.driver.execute_cdp_cmd, "Page.addScriptToEvaluateOnNewDocument", {"source": ALARM})
        token = await operator(daemon)
        await founded(site, token, **asked)
        await enrolled(site, *NAMES[1:4])
        shown = await page.join(address(site), NAMES[0])
        while left:
            left.remove(await page.script("return document.querySelector('.asked ~ .text').textContent"))
            if kind == "label":
                assert await page.texts("button.answer span") == [visible(option) for option in OPTIONS]
            await page.until("[...document.querySelectorAll('.guidelines .text')].some((text) => text.textContent)")
            assert await page.texts(".guidelines .text") == [visible("\n".join(CORPUS))]
            await harmless(page)
            await page.press("1" if kind == "label" else "t")
            if left:
                shown = await page.task(shown)
        await page.count("settled", len(texts))
        await harmless(page)
        await sign_in(page, site, token)
        others = (*(other.path for other in PAGES.pages), "/admin#projects", "/admin#people", "/admin#log")
        for path in others if kind == "label" else ("/review",):  # pairs differ only on this page
            await page.open(f"{address(site)}{path}")
            await page.until(
                "document.querySelector('.here') && !document.querySelector('main').textContent.includes('Loading …')"
            )
            await harmless(page)


async def harmless(page: Browser) -> None:
    assert await page.script(STRANGE) == []
    assert not await page.script("return document.documentElement.dataset.ran")
    assert await page.errors() == [], "the policy had to stop something"
