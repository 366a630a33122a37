"""`python -m scenarios.pictures`: the screenshots of README and pages, taken from running peers (`make pictures`).

Four peers train, and one of them lies. People answer tasks at another one, whose pages a real browser shows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from curation.rpc import CurationRpc, ImportRequest
from curation.simulated_annotators import OPTIONS, ServingPeerClient, make_annotators, make_tasks
from demo.demo_peers import DemoPeer
from protocol.api import TrainRequest
from protocol.errors import UserError
from scenarios import network
from scenarios.network import Watch
from scenarios.trials import Parser
from tests.browser.axe import look
from tests.browser.browser import CHROMIUM, DRIVER, Browser, browser
from tests.fuzz.http import free_port
from training.data.default_text import default_text

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SERVES = 0  # the peer whose pages are shown
TASKS, PEOPLE = 240, 6
ROUNDS = 24  # closed before the screenshots
JOB = {"local_steps": "4", "batch": "4", "micro_batch": "4"}
GUIDELINES = (
    "A sentence is intact if its words are in their original order.\n\nRead it aloud. If you stumble, its words are shuffled."
)


@dataclass(frozen=True)
class Picture:
    name: str
    path: str
    there: str  # selector of an element that must be on the page
    size: str = "desktop"
    scheme: str = "light"
    before: Callable[[Browser], Awaitable[None]] | None = None  # actions of a person before the screenshot


async def _answer(page: Browser) -> None:
    """Answer three tasks, so that the list of answers is not empty."""
    shown = await page.task()
    for key in "121":
        await page.press(key)
        shown = await page.task(shown)
    await page.until("document.querySelectorAll('[data-answer]').length >= 3")


PICTURES = (
    Picture("live", "/live", "main svg"),
    Picture("live-dark", "/live", "main svg", scheme="dark"),
    Picture("annotate", "/annotate", "[data-task]", before=_answer),
    Picture("annotate-phone", "/annotate", "[data-task]", size="phone", scheme="dark"),
    Picture("review", "/review", "[data-current]"),
    Picture("admin", "/admin#people", "#people td"),
)


async def _take(page: Browser, address: str, picture: Picture, folder: Path) -> None:
    await look(page, picture.size, picture.scheme)
    if not (await page.do(lambda: page.driver.current_url)).endswith(picture.path):
        await page.open(f"{address}{picture.path}")
    await page.until(f"document.querySelector('{picture.there}')")
    if picture.before:
        await picture.before(page)
    await page.do(page.driver.save_screenshot, str(folder / f"{picture.name}.png"))
    print(f"{picture.name}.png", flush=True)


async def pictures(folder: Path, seed: int) -> int:
    port, truth = free_port(), make_tasks(default_text().decode(), TASKS, seed)
    address = f"http://127.0.0.1:{port}"

    def dress(peer: DemoPeer) -> None:
        if peer.number == SERVES:
            peer.serves = ("--web-listen", f"127.0.0.1:{port}", "--sign-up", "open")

    async with network.running(4, 1, seed=seed, attack="sign-flip", dress=dress) as peers:
        shown = peers.peers[SERVES]
        await shown.client.start_job(TrainRequest("sentences", "", 200, 0, {**JOB, "seed": str(seed), "byzantine_max": "1"}))
        await _import(shown, truth)
        crowd = make_annotators(PEOPLE, [ServingPeerClient("127.0.0.1", port)], truth, seed)
        limiter = trio.CapacityLimiter(PEOPLE)
        async with browser() as page, trio.open_nursery() as nursery:
            for person in crowd:
                nursery.start_soon(person.take_part, limiter)
            await Watch(shown).until_round(ROUNDS)
            calls: CurationRpc = shown.client  # type: ignore[assignment]
            await _join(page, address)
            await page.open(f"{address}/admin#{await calls.create_web_token()}")
            await page.until("document.querySelector('#work:not([hidden])')")
            for picture in PICTURES:
                await _take(page, address, picture, folder)
            nursery.cancel_scope.cancel()
    return 0


async def _join(page: Browser, address: str) -> None:
    await page.join(address, "ada")


async def _import(peer: DemoPeer, truth: dict[str, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, guidelines = Path(folder) / "tasks.jsonl", Path(folder) / "guidelines.md"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in truth))
        guidelines.write_text(GUIDELINES)
        calls: CurationRpc = peer.client  # type: ignore[assignment]
        request = ImportRequest(str(file), "sentences", "", "label", OPTIONS, False, 7, 1, str(guidelines), False)
        await calls.import_tasks(request)


def main() -> int:
    parser = Parser("pictures", (__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the pictures")
    parser.add_argument("--seed", type=int, default=0, help="seed of the network, its job and its tasks")
    options = parser.parse_args()
    if not (CHROMIUM and DRIVER):
        raise UserError("pictures need a browser and its driver; Debian: apt install chromium chromium-driver")
    options.folder.mkdir(parents=True, exist_ok=True)
    return network.main(partial(pictures, options.folder, options.seed))


if __name__ == "__main__":
    raise SystemExit(main())
