"""The page `/live` of real peers in a real browser: it shows their decisions at once and verifies them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from demo.network_demo import wait_for_web_address
from protocol import codec
from protocol.codec import Key
from protocol.messages import Certificate
from scenarios import network
from tests.browser import axe
from tests.browser.browser import NEEDED, Browser, browser
from tests.browser.test_annotate import address
from tests.waiting import patience
from tests.web.room import Room, said

pytestmark = [NEEDED, pytest.mark.real("browser")]
SEEN_SECONDS_MAX = 20.0  # the page updates at once; here four processes of tests and a browser share two cores or less
# Records when the page first shows a text, by this machine's clock.
SEEN = """
  window.seen = {};
  const look = () => document.querySelectorAll('[data-live]').forEach(({ dataset, textContent }) => {
    window.seen[`${dataset.live} ${textContent}`] ??= Date.now();
  });
  new MutationObserver(look).observe(document.body, { subtree: true, childList: true, characterData: true });
"""
# Replaces the peer's answer about a block.
INSTEAD = """
  const [block] = arguments;
  window.fetch = async () => new Response(block, { headers: { "Content-Type": "application/json" } });
"""


async def shown(page: Browser, name: str) -> str:
    """Wait until a live figure or list has a text, and return it."""
    found: str = await page.until(f"document.querySelector('[data-live={name}]')?.textContent")
    return found


JOB = {"job": "e" * 64, "name": "demo", "state": "running", "rounds_in_model": 7, "rounds": 9, "accepted": {}, "rejected": {}}


@pytest.mark.long
async def test_the_expelled_liar_is_named_as_soon_as_its_block_is_applied(tmp_path: Path) -> None:
    async with network.running(4, 1, attack="equivocate", web=True, folder=tmp_path) as peers, browser() as page:
        watched, (liar,) = peers.demo.watched, [peer for peer in peers.peers if peer.lies]
        await page.open(f"{await wait_for_web_address(watched)}live")
        assert await shown(page, "state") == "working"
        assert await page.texts("#nobody") == ["None so far."]
        await page.script(SEEN)
        await peers.train({**network.SMALL_JOB, "local_steps": "20"})
        with patience():
            while not (expelled := (await watched.client.stats()).expelled):  # noqa: ASYNC110 - in another process
                await trio.sleep(0.02)
        assert [peers.name(peer) for peer in expelled] == [liar.name]
        told = await shown(page, "expelled")
        assert told.startswith(f"{liar.name} expelled at height ")
        height = told.split("expelled at height ")[1].split()[0]
        seen = await page.script("return window.seen[Object.keys(window.seen).find((key) => key.startsWith('expelled liar'))]")
        (applied,) = [
            event.at_ms
            for event in await watched.client.events(0, 0.0)
            if event.kind == "applied" and event.fields["height"] == height
        ]
        assert seen - applied < 1_000 * SEEN_SECONDS_MAX
        assert f"{liar.name} expelled" in await shown(page, "alerts")

        # The page shows votes with their reasons, the common decision, and a way to verify it.
        # One of the two proposals is honest. Its accepts may arrive before a quorum has seen both.
        rounds = await page.until("document.querySelector('#rounds li') && document.querySelector('#rounds').textContent")
        assert ("✗ equivocation" in rounds) == ("two different proposals for this round" in rounds)
        await page.until("document.querySelectorAll('#round tbody tr').length >= 2")
        assert await page.until("document.querySelector('[data-live=roots]').textContent !== '–'")
        assert await shown(page, "roots") == "equal"
        await page.script("document.querySelector('[data-block] button').click()")
        assert (await page.until("document.querySelector('[data-check]')?.textContent")).startswith("✓ verified: ")
        await page.until("document.querySelector('svg.chart') && document.querySelectorAll('#points tr').length > 1")

        assert await page.until("document.querySelector('#samples blockquote')?.textContent"), "a text of the untrained model"
        assert await axe.found(page) == []
        for peer in peers.peers:
            if peer is not watched:
                peers.kill(peer)
        critical = await page.until("document.querySelector('[data-severity=critical]')?.textContent")
        assert critical.startswith("critical: waiting for a quorum: ") and await shown(page, "state") == "waiting"
        assert await page.errors() == []


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


async def test_a_block_with_anything_changed_fails_to_verify(room: Room) -> None:
    async with room.serving() as (daemon, site), browser() as page:
        await room.project(daemon)
        height = (await said(site.stats))["height"]
        block = (await said(site.get, f"/api/v1/blocks/{height}")).body
        before = (await said(site.get, f"/api/v1/blocks/{height - 1}")).body
        certificate = codec.decode(Certificate, bytes.fromhex(block["certificate"]), 1 << 16)
        (me,) = codec.decode(tuple[Key, ...], bytes.fromhex(block["voters"]), 1 << 16)
        stranger = bytes(32)

        def signed_by(signatures: dict[bytes, bytes]) -> str:
            return codec.encode([certificate.vote, [[key, signature] for key, signature in signatures.items()]]).hex()

        def flipped(data: bytes, place: int) -> bytes:
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

        signature = certificate.signatures[me]
        changed = {
            "✓ verified: 1 of 1 signatures": {},
            "✗ a signature is invalid": {"certificate": signed_by({me: flipped(signature, 5)})},
            "✗ a signer is not a voter": {"certificate": signed_by({me: signature, stranger: signature})},
            "✗ 0 of 1 required signatures": {"certificate": signed_by({})},
            "✗ the signatures belong to another header": {"header": flipped(bytes.fromhex(block["header"]), 40).hex()},
            "✗ the block names a different set of voters": {"voters": codec.encode((stranger, me)).hex()},
            "✗ the certificate belongs to another block": before,
        }
        for expected, changes in changed.items():
            await page.open(f"{address(site)}/live")
            await page.until(f"document.querySelector('[data-block=\"{height}\"]')")
            await page.script(INSTEAD, json.dumps(block | changes))
            await page.script(f"document.querySelector('[data-block=\"{height}\"] button').click()")
            assert await page.until("document.querySelector('[data-check]')?.textContent") == expected


async def test_what_happens_is_on_the_page_at_once_and_a_peer_that_is_away_is_told(room: Room) -> None:
    async with browser() as page:
        async with room.serving() as (daemon, site):
            await page.open(f"{address(site)}/live")
            await shown(page, "height")
            await page.script(SEEN)
            await room.project(daemon)
            height = (await said(site.stats))["height"]
            await page.until(f"document.querySelector('[data-live=height]').textContent >= {height}")
            seen = await page.script("return window.seen")
            applied = {
                f"height {event.fields['height']}": event.at_ms
                for event in await daemon.api.events(0, 0.0)
                if event.kind == "applied"
            }
            delays = [seen[text] - at for text, at in applied.items() if text in seen]
            assert delays and max(delays) < 1_000 * SEEN_SECONDS_MAX, delays
            assert await page.until("document.querySelector('[data-live=labels]')?.textContent") == "0"
            without = ["chart", "round", "rounds", "samples"]
            assert (
                await page.script(
                    "return arguments[0].filter((id) => document.getElementById(id).closest('section').hidden)", without
                )
                == without
            ), "there is nothing to show in them"
            assert await axe.found(page) == []
        await page.until("!document.getElementById('offline').hidden && document.querySelector('.away')")
        assert await axe.found(page) == []
        assert int(await shown(page, "height")) >= height, "what it said last stays"
        async with room.serving(web_listen=f"{site.host}:{site.port}") as (daemon, site):
            await page.until("document.getElementById('offline').hidden && document.querySelector('.here')")
            await room.project(daemon, name="more")
            higher = (await said(site.stats))["height"]
            await page.until(f"document.querySelector('[data-live=height]').textContent >= {higher}")


# Replaces the peer's stream, since no honest peer has another root than the voters.
TOLD = """
  window.EventSource = class extends EventTarget {
    constructor() {
      super();
      setTimeout(() => this.dispatchEvent(new MessageEvent("live", { data: JSON.stringify(%s) })));
    }
  };
"""
LINES = """
  return [...document.querySelectorAll('.votes tbody tr')]
    .map((row) => [...row.querySelectorAll('td')].map((cell) => cell.getBoundingClientRect().top));
"""


async def test_roots_that_differ_and_trainers_that_are_suspended_are_told_as_text(room: Room) -> None:
    async with room.serving() as (daemon, site), browser() as page:
        await room.project(daemon)
        live = (await said(site.get, "/api/v1/live")).body
        (me,) = live["peers"]
        me["name"] = "<img src=x onerror=alert(1)>"
        live["jobs"] = [JOB | {"suspended_until": {me["peer"]: 12}}]
        live["samples"] = [{"job": JOB["job"], "round": 4, "text": "a\u0007b\ufffd <b>c</b>\nd"}]
        live["blocks"][-1]["own_root"] = "5" * 64
        source = TOLD % json.dumps(live)
        await page.do(page.driver.execute_cdp_cmd, "Page.addScriptToEvaluateOnNewDocument", {"source": source})
        await page.open(f"{address(site)}/live")
        assert await shown(page, "roots") == "not equal"
        assert await shown(page, "suspended") == f"{me['name']} suspended until round 13"
        assert await page.texts("#samples blockquote") == ["a·b· <b>c</b>\nd"]
        assert await page.script("return document.querySelectorAll('main img, blockquote b').length") == 0
        assert await axe.found(page) == []


async def test_each_vote_has_a_line_of_its_own_on_a_phone(room: Room) -> None:
    async with room.serving() as (daemon, site), browser() as page:
        await room.project(daemon)
        live = (await said(site.get, "/api/v1/live")).body
        (me,) = live["peers"]
        names = {
            digit * 52: name for digit, name in zip("abcd", ("m", "שלום", "a-peer-with-quite-a-long-name", "b"), strict=True)
        }
        live["peers"] = [me | {"peer": peer, "name": name} for peer, name in names.items()]
        live["jobs"] = [
            {
                "job": "e" * 64,
                "name": "demo",
                "state": "running",
                "rounds_in_model": 7,
                "rounds": 9,
                "accepted": {},
                "rejected": {},
            }
        ]
        peers = list(names)
        votes = {voter: dict(zip(peers, ("accept", "equivocation", "replay"), strict=False)) for voter in peers}
        told = {"job": "e" * 64, "round": 6, "phase": "voting", "height": None, "quorum": 3, "voters": peers, "trainers": peers}
        live["votes"] = [told | {"proposed": peers, "votes": votes, "vouches": {}}]
        source = TOLD % json.dumps(live)
        await page.phone()
        await page.do(page.driver.execute_cdp_cmd, "Page.addScriptToEvaluateOnNewDocument", {"source": source})
        await page.open(f"{address(site)}/live")
        await page.until("document.querySelectorAll('#round tbody tr').length === 4")
        lines = await page.script(LINES)
        assert [len(set(tops)) for tops in lines] == [4] * 4
        assert not await page.script("return document.documentElement.scrollWidth > innerWidth")
        assert await axe.found(page) == []


@pytest.mark.parametrize("is_phone", [False, True])
async def test_a_vote_says_whether_its_voter_re_executed_the_update(is_phone: bool, room: Room) -> None:
    async with room.serving() as (daemon, site), browser() as page:
        await room.project(daemon)
        live = (await said(site.get, "/api/v1/live")).body
        (me,) = live["peers"]
        names = {"a" * 52: "anna", "b" * 52: "ben", "c" * 52: "cora", "d" * 52: "liar"}
        live["peers"] = [me | {"peer": peer, "name": name} for peer, name in names.items()]
        anna, ben, cora, liar = peers = list(names)
        job = JOB | {"reexecution_limits": {cora: "is asked last to re-execute until round 28"}}
        votes = {voter: dict.fromkeys((anna, ben, cora), "accept") | {liar: "replay"} for voter in (anna, ben)}
        vouches = {anna: {ben: "accept", liar: "replay"}, cora: {anna: "unjudged", ben: "accept"}}
        told = {"round": 6, "phase": "closed", "height": 9, "quorum": 0, "voters": [], "trainers": [], "proposed": peers}
        live["jobs"], live["votes"] = [job], [told | {"job": JOB["job"], "votes": votes, "vouches": vouches}]
        if is_phone:
            await page.phone()
        source = TOLD % json.dumps(live)
        await page.do(page.driver.execute_cdp_cmd, "Page.addScriptToEvaluateOnNewDocument", {"source": source})
        await page.open(f"{address(site)}/live")
        await page.until("document.querySelectorAll('#round tbody tr').length === 3")
        assert await page.script("return [...document.querySelectorAll('.votes td')].map((cell) => cell.innerText)") == [
            *("✓ accept", "✓ accept re-executed", "✓ accept", "✗ replay re-executed"),
            *("✓ accept", "✓ accept", "✓ accept", "✗ replay"),
            *("– unsure", "– re-executed: accept", "–", "–"),
        ]
        assert ["until round 28" in row for row in await page.texts("#peers tr")] == [False, False, True, False]
        assert "does not prove that it did" in (await page.texts("#round"))[0]
        assert not await page.script("return document.documentElement.scrollWidth > innerWidth")
        assert await axe.found(page) == []
