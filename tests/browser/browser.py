"""A real Chromium that a test drives as a person does: by keys, and by elements of the page."""

from __future__ import annotations

import atexit
import itertools
import json
import shutil
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import trio
import websocket
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.keys import Keys

from tests.waiting import PatienceEnded, patience_seconds

T = TypeVar("T")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDED = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="browser tests need a browser and its driver; Debian: apt install chromium chromium-driver"
)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,900"
)
ELSEWHERE = "peer.test"  # another host to the browser, without WebCrypto over plain HTTP; this machine in fact
# The page's clock runs ten times as fast, so an answer is held for one second. Later pages continue with the same clock.
HURRY = """
  const [now, later] = [Date.now, setTimeout], began = BEGAN;
  Date.now = () => began + 10 * (now() - began);
  window.setTimeout = (call, ms, ...more) => later(call, ms / 10, ...more);
"""
MIDDLE = """
  const { left, right, top, bottom } = document.querySelector(arguments[0]).getBoundingClientRect();
  return [(left + right) / 2, (top + bottom) / 2];
"""


class Browser:
    def __init__(self, profile: Profile) -> None:
        self.profile, self.driver = profile, profile.program.driver

    async def do(self, call: Callable[..., T], *arguments: Any) -> T:
        return await trio.to_thread.run_sync(call, *arguments)

    async def tab(self) -> None:
        """Open another tab, and use it from now on."""
        await self.do(self.profile.tab)

    async def open(self, address: str) -> None:
        await self.do(self.driver.get, address)

    async def script(self, text: str, *arguments: Any) -> Any:
        return await self.do(lambda: self.driver.execute_script(text, *arguments))

    async def texts(self, selector: str) -> list[str]:
        found: list[str] = await self.script(
            "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)", selector
        )
        return found

    async def press(self, *keys: str) -> None:
        await self.do(lambda: ActionChains(self.driver).send_keys(*keys).perform())

    async def chord(self, held: str, key: str) -> None:
        await self.do(lambda: ActionChains(self.driver).key_down(held).send_keys(key).key_up(held).perform())

    async def until(self, expression: str, *arguments: Any) -> Any:
        """Wait until an expression is true on the page, and return its value. The page evaluates it at each frame."""
        text = f"""
          const done = arguments[arguments.length - 1];
          const look = () => {{ const found = ({expression}); if (found) done(found); else requestAnimationFrame(look); }};
          look();
        """
        try:
            return await self.do(lambda: self.driver.execute_async_script(text, *arguments))
        except TimeoutException as error:
            raise PatienceEnded(expression) from error

    async def count(self, state: str, at_least: int) -> None:
        """Wait until at least this number of answers are in this state."""
        await self.until(f"document.querySelectorAll('[data-answer][data-state={state}]').length >= {at_least}")

    async def task(self, other_than: str = "") -> str:
        """Wait until the page shows an assignment other than `other_than`, and return it."""
        found: str = await self.until(
            f"[...document.querySelectorAll('[data-task][data-state=ready]')].map((task) => task.dataset.assignment)"
            f".find((assignment) => assignment !== '{other_than}')"
        )
        return found

    async def join(self, address: str, name: str, code: str = "") -> str:
        """Join by keys alone, postpone the key's backup, and return the first task's assignment."""
        await self.enrol(address, name, code)
        return await self.task()

    async def enrol(self, address: str, name: str, code: str = "") -> None:
        await self.open(f"{address}/annotate" + (f"#{code}" if code else ""))
        await self.until("document.activeElement.name === 'name'")
        await self.press(name, Keys.ENTER)
        await self.until("document.activeElement.name === 'passphrase'")
        await self.press(Keys.TAB, Keys.TAB, Keys.TAB, Keys.ENTER)

    async def phone(self) -> None:
        """Emulate a phone's screen and touch input from now on."""
        await self.do(
            self.driver.execute_cdp_cmd,
            "Emulation.setDeviceMetricsOverride",
            {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True},
        )
        await self.do(self.driver.execute_cdp_cmd, "Emulation.setTouchEmulationEnabled", {"enabled": True})

    async def touch(self, selector: str, onto: str = "") -> None:
        """Tap an element, or drag it onto another one in some steps."""
        await self.script("document.querySelector(arguments[0]).scrollIntoView({ block: 'center' })", selector)
        (x, y), (_, end) = [await self.script(MIDDLE, other) for other in (selector, onto or selector)]
        began = time.time()
        await self._finger("touchStart", began, x, y)
        for step in range(1, 5 if onto else 1):
            await self._finger("touchMove", began + step, x, y + (end - y) * step / 4)  # slow, since a flung element takes no tap
        await self._finger("touchEnd", began + (5 if onto else 0))

    async def _finger(self, kind: str, when: float, *place: float) -> None:
        points = [dict(zip("xy", place, strict=True))] if place else []
        await self.do(
            self.driver.execute_cdp_cmd, "Input.dispatchTouchEvent", {"type": kind, "timestamp": when, "touchPoints": points}
        )

    async def errors(self) -> list[str]:
        """Return the errors that the console has logged since the last call."""
        return [entry["message"] for entry in await self.do(self.driver.get_log, "browser") if entry["level"] == "SEVERE"]


@asynccontextmanager
async def browser(*, in_a_hurry: bool = False) -> AsyncIterator[Browser]:
    """Open a browser with an empty profile of its own."""
    profile = await trio.to_thread.run_sync(_begun, in_a_hurry)
    try:
        yield Browser(profile)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(profile.end)


class Program:
    """A browser program that tests use in turn, since a start takes as long as a short test."""

    idle: ClassVar[list[Program]] = []

    def __init__(self) -> None:
        profile = tempfile.TemporaryDirectory(prefix="folkmoot-browser-", ignore_cleanup_errors=True)
        options = ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS.split(), f"--user-data-dir={profile.name}", f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = Chrome(options, ChromeService(str(DRIVER)))
        atexit.register(profile.cleanup)
        atexit.register(self.driver.quit)  # runs before the cleanup, since handlers run last in, first out
        self.driver.set_script_timeout(patience_seconds())
        self.first, self._calls = self.driver.current_window_handle, itertools.count(1)
        place = self.driver.capabilities["goog:chromeOptions"]["debuggerAddress"]
        with urllib.request.urlopen(f"http://{place}/json/version", timeout=patience_seconds()) as told:
            tools = json.load(told)["webSocketDebuggerUrl"]
        self._tools = websocket.create_connection(tools, timeout=patience_seconds(), suppress_origin=True)

    def ask(self, method: str, **how: Any) -> Any:
        """Send a command to the whole program that the driver does not support."""
        number = next(self._calls)
        self._tools.send(json.dumps({"id": number, "method": method, "params": how}))
        while (said := json.loads(self._tools.recv())).get("id") != number:
            pass
        return said["result"]


class Profile:
    """A fresh profile for one test."""

    def __init__(self, program: Program) -> None:
        self.program, self.name = program, program.ask("Target.createBrowserContext")["browserContextId"]
        self.tab()
        program.driver.get_log("browser")  # drops the log of the profile before

    def tab(self) -> None:
        made = self.program.ask("Target.createTarget", url="about:blank", browserContextId=self.name)
        self.program.driver.switch_to.window(made["targetId"])

    def downloads(self, folder: Path) -> None:
        self.program.ask(
            "Browser.setDownloadBehavior",
            browserContextId=self.name,
            behavior="allow",
            downloadPath=str(folder),
            eventsEnabled=True,
        )

    def end(self) -> None:
        self.program.ask("Target.disposeBrowserContext", browserContextId=self.name)
        self.program.driver.switch_to.window(self.program.first)
        Program.idle.append(self.program)


def _begun(in_a_hurry: bool) -> Profile:
    profile = Profile(Program.idle.pop() if Program.idle else Program())
    if in_a_hurry:
        source = HURRY.replace("BEGAN", str(int(1_000 * time.time())))
        profile.program.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    return profile
