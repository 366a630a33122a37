"""Accessibility problems that axe-core finds on a page: on a desktop and on a phone, light and dark."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Final

from tests.browser.browser import Browser

SOURCE: Final = gzip.decompress((Path(__file__).parent / "vendor" / "axe.min.js.gz").read_bytes()).decode()
SIZES: Final = {"desktop": (1280, 900, False), "phone": (390, 844, True)}
RUN: Final = """
  const done = arguments[arguments.length - 1];
  const told = ({ id, help, nodes }) => nodes.map(({ html }) => `${id}: ${help}: ${html.slice(0, 160)}`);
  const ask = axe.run(document, { resultTypes: ["violations"] });
  ask.then(({ violations }) => done(violations.flatMap(told)), (error) => done([`${error}`]));
"""


async def look(page: Browser, size: str, scheme: str) -> None:
    """Emulate a screen of this size and a person that prefers this color scheme."""
    width, height, is_phone = SIZES[size]
    screen = {"width": width, "height": height, "deviceScaleFactor": 2 if is_phone else 1, "mobile": is_phone}
    features = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    await page.do(page.driver.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride", screen)
    await page.do(page.driver.execute_cdp_cmd, "Emulation.setEmulatedMedia", {"features": features})


async def found(page: Browser) -> list[str]:
    """Return the problems of the page's current state, and the elements that are wider than the screen."""
    if not await page.script("return !!window.axe"):
        await page.do(page.driver.execute_cdp_cmd, "Runtime.evaluate", {"expression": SOURCE})
    problems: list[str] = []
    for size in SIZES:
        for scheme in ("light", "dark"):
            await look(page, size, scheme)
            told = await page.do(page.driver.execute_async_script, RUN)
            if await page.script("return document.documentElement.scrollWidth > innerWidth"):
                told += [f"too wide: {text}" for text in await page.script(WIDEST)]
            problems += [f"{size}, {scheme}: {text}" for text in told]
    return problems


WIDEST: Final = """
  return [...document.querySelectorAll('body *')].filter((element) => element.getBoundingClientRect().right > innerWidth)
    .map((element) => element.outerHTML.slice(0, 120));
"""
