"""People join with keys of their browsers, label at two peers of which one is killed, and appear on the page `/leaderboard`."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from nacl.bindings import crypto_aead_aes256gcm_decrypt
from nacl.signing import SigningKey
from selenium.webdriver.common.keys import Keys

from curation.ledger.curation_state import CurationState
from curation.rpc import CurationRpc, ImportRequest
from ledger.jobs import StartJob
from peer.features import founding_modules
from peer.runtime.transaction_submitter import TransactionSubmitter
from tests.browser import axe
from tests.browser.browser import ELSEWHERE, NEEDED, Browser, browser
from tests.browser.test_annotate import address, exported
from tests.peer.chain import SCRATCH
from tests.peer.network import network, service_of
from tests.web.client import Site
from tests.web.room import Room, said
from tests.web.test_routes import founded, operator
from tests.web.test_sealed import served

pytestmark = [NEEDED, pytest.mark.real("browser")]
PASSPHRASE = "correct horse battery"


async def points(site: Site) -> list[tuple[str, int]]:
    return [(row["name"], row["accepted"]) for row in (await said(site.leaderboard))["rows"]]


async def saved(page: Browser, folder: Path) -> Path:
    """Save the backup as the browser does, and return its file. The page already asks for a passphrase."""
    folder.mkdir()
    await page.do(page.profile.downloads, folder)
    await page.press(PASSPHRASE, Keys.TAB, PASSPHRASE, Keys.ENTER)
    await page.until("document.querySelector('[data-state=known]')")
    while not (files := list(folder.glob("*.json"))):
        await page.script("return 1")
    return files[0]


async def restored(page: Browser, file: Path, passphrase: str) -> None:
    await page.script("document.querySelector('details').open = true; document.querySelector('input[type=file]').value = ''")
    await page.do(lambda: page.driver.find_element("css selector", "input[type=file]").send_keys(str(file)))
    await page.script("const field = document.querySelector('details input[type=password]'); field.value = ''; field.focus()")
    await page.press(passphrase, Keys.ENTER)


def seed_of(backup: dict[str, Any]) -> bytes:
    """Decrypt the seed of a backup as docs/protocol/curation.md describes. Raises an error if the passphrase is wrong."""
    kdf = backup["kdf"]
    assert (kdf["name"], kdf["hash"], backup["cipher"]) == ("PBKDF2", "SHA-256", "AES-256-GCM") and kdf["iterations"] >= 600_000
    key = hashlib.pbkdf2_hmac("sha256", PASSPHRASE.encode(), bytes.fromhex(kdf["salt"]), kdf["iterations"])
    beside = json.dumps([backup["version"], backup["name"], backup["public_key"]], separators=(",", ":")).encode()
    ciphertext, nonce = bytes.fromhex(backup["ciphertext"]), bytes.fromhex(backup["iv"])
    seed = crypto_aead_aes256gcm_decrypt(ciphertext, beside, nonce, key)[-32:]
    assert bytes(SigningKey(seed).verify_key).hex() == backup["public_key"]
    return seed


async def test_a_key_goes_on_in_a_fresh_browser_with_its_backup_and_passphrase_alone(tmp_path: Path) -> None:
    async with Room(tmp_path).serving("invited", sign_up_invitations=("sesame",)) as (daemon, site):
        await founded(site, await operator(daemon), tasks=[{"text": "one"}, {"text": "two"}])
        async with browser(in_a_hurry=True) as page:
            await page.open(f"{address(site)}/annotate#sesame")
            await page.until("document.activeElement.name === 'name'")
            assert await page.texts("[data-live=open]") == ["2"] and "sesame" not in page.driver.current_url
            await page.press("ann", Keys.ENTER)
            await page.until("document.activeElement.name === 'passphrase'")
            file = await saved(page, tmp_path / "downloads")
            await page.press(Keys.ENTER)
            await page.task()
            assert not await page.texts(".notice:not([hidden])"), "nothing reminds of a backup"
            await page.press("1")
            await page.count("settled", 1)
            assert await page.errors() == []
        assert file.name == "folkmoot-key-ann.json"
        assert seed_of(json.loads(file.read_text()))
        async with browser(in_a_hurry=True) as page:
            await page.open(f"{address(site)}/join")
            await page.until("document.activeElement.name === 'name'")
            await restored(page, file, "another passphrase")
            await page.until("document.querySelector('.told.bad')?.textContent.startsWith('Wrong passphrase')")
            await restored(page, file, PASSPHRASE)
            await page.task()
            await page.press("1")
            await page.count("settled", 1)
        assert await points(site) == [("ann", 2)]


async def test_a_backup_can_be_made_later_and_until_then_the_page_says_what_happens_without(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site), browser() as page:
        await founded(site, await operator(daemon), tasks=[{"text": "one"}])
        await TransactionSubmitter(daemon.driver).submit(
            "job/start", StartJob(replace(SCRATCH, name="proverbs", rounds=999).encode())
        )
        await page.open(f"{address(site)}/join")
        training = await page.until("document.querySelector('[data-live=training]')?.textContent")
        assert re.fullmatch(r"Now training: proverbs, round \d+ of 999\.", training)
        await page.join(address(site), "ann / bob")
        assert "it cannot be restored" in (await page.texts(".notice:not([hidden])"))[0]
        await page.open(f"{address(site)}/join")
        await page.until("document.activeElement.name === 'passphrase'")
        assert await axe.found(page) == []
        can_be_read = """
          const done = arguments[0], open = indexedDB.open((await indexedDB.databases())[0].name);
          open.onsuccess = () => open.result.transaction('me').objectStore('me').get(0).onsuccess =
            ({ target }) => done(target.result.secret.extractable);
        """
        assert await page.do(page.driver.execute_async_script, can_be_read)
        assert (await saved(page, tmp_path / "downloads")).name == "folkmoot-key-ann_bob.json"
        assert not await page.do(page.driver.execute_async_script, can_be_read), "now no script can read it"
        assert await axe.found(page) == []


async def test_the_page_of_a_single_voter_says_that_it_decides_alone(tmp_path: Path) -> None:
    """A network of one voter does not claim many people."""
    async with Room(tmp_path).serving() as (_, site), browser() as page:
        await page.open(f"{address(site)}/join")
        await page.until("document.querySelector('[data-live=who]')")
        alone = "One peer trains a model here, and its operator decides alone until other voters join."
        assert " ".join((await page.texts("[data-live=who]"))[0].split()) == alone


async def test_two_tabs_make_one_key(tmp_path: Path) -> None:
    """A second key would replace the first one, which has no backup."""
    async with Room(tmp_path).serving() as (_, site), browser() as page:
        await page.open(f"{address(site)}/join")
        await page.until("document.activeElement.name === 'name'")
        late = page.driver.current_window_handle
        await page.tab()
        await page.open(f"{address(site)}/join")
        await page.until("document.activeElement.name === 'name'")
        await page.press("ann", Keys.ENTER)
        await page.until("document.querySelector('[data-state=backup]')")
        await page.do(page.driver.switch_to.window, late)
        await page.press("bob", Keys.ENTER)
        await page.until("document.querySelector('[data-state=backup]')")
        assert "ann" in (await page.texts("#phase [data-text=name]"))
        assert (await said(site.stats))["annotators"] == 1


async def test_over_plain_http_the_peer_signs_for_somebody_who_comes_back_after_its_restart_and_elsewhere(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with browser(in_a_hurry=True) as page:
        async with room.serving(web_host_names=(ELSEWHERE,)) as (daemon, site):
            await founded(site, await operator(daemon), tasks=[{"text": f"text {number}"} for number in range(4)])
            there = f"http://{ELSEWHERE}:{site.port}"
            await page.open(f"{there}/annotate")
            await page.until("document.activeElement.name === 'name'")
            assert not await page.script("return isSecureContext")
            assert "This peer will keep your key and sign for you." in await page.texts(".notice b")
            assert await axe.found(page) == []
            await page.press("ann", Keys.TAB, PASSPHRASE, Keys.ENTER)
            shown = await page.task()
            await page.press("1")
            await page.count("settled", 1)
            shown = await page.task(shown)
            await page.press("s", "1")
            await page.task(shown)
            await page.count("decided", 1)
            assert await page.errors() == []
            await page.press("1")
        await page.until("document.querySelector('.away')")
        async with room.serving(web_host_names=(ELSEWHERE,), web_listen=f"{site.host}:{site.port}") as (_, site):
            await page.until("location.pathname === '/join' && document.activeElement.value === 'ann'")
            await page.press(Keys.TAB, PASSPHRASE, Keys.ENTER)
            await page.count("settled", 2)  # the waiting answers were sent
            await page.open(f"{there}/join")
            await page.until("document.querySelector('[data-state=known]')")
            await page.script("document.querySelector('details').open = true; document.querySelector('details button').click()")
            await page.until("document.activeElement.name === 'name'")
            await page.open(f"{there}/annotate")
            await page.until("location.pathname === '/join' && document.querySelector('[data-state=come]')")
            async with browser(in_a_hurry=True) as other:
                await other.open(f"{there}/join")
                await other.until("document.activeElement.name === 'name'")
                await other.script(
                    "document.querySelector('details').open = true; document.querySelector('details input').focus()"
                )
                await other.press("ann", Keys.TAB, PASSPHRASE, Keys.ENTER)
                await other.task()
                await other.press("1")
                await other.count("settled", 1)
            assert await points(site) == [("ann", 3)]


async def test_two_people_at_one_browser_see_and_send_their_own_answers_alone(tmp_path: Path) -> None:
    async with Room(tmp_path).serving(web_host_names=(ELSEWHERE,)) as (daemon, site), browser() as page:
        await founded(site, await operator(daemon), tasks=[{"text": f"text {number}"} for number in range(6)])
        there = f"http://{ELSEWHERE}:{site.port}"

        async def comes(name: str) -> None:
            await page.until("document.activeElement.name === 'name'")
            await page.press(name, Keys.TAB, PASSPHRASE, Keys.ENTER)
            await page.task()

        async def leaves() -> None:
            await page.open(f"{there}/join")
            await page.until("document.querySelector('[data-state=known]')")
            await page.script("document.querySelector('details').open = true; document.querySelector('details button').click()")
            await page.until("document.querySelector('[data-state=come]')")

        await page.open(f"{there}/annotate")
        await comes("ann")
        await page.press("1")
        await page.count("held", 1)
        one = page.driver.current_window_handle
        await page.tab()
        await leaves()
        await comes("bob")
        assert await page.texts("[data-answer]") == []
        await page.press("2")
        await page.count("held", 1)
        other = page.driver.current_window_handle
        await page.do(page.driver.switch_to.window, one)
        await page.until("location.pathname === '/join'")  # this tab does not continue as ann
        await page.do(page.driver.close)
        await page.do(page.driver.switch_to.window, other)
        await leaves()
        await page.script("document.querySelector('details').open = true; document.querySelector('details input').focus()")
        await comes("ann")
        await page.count("settled", 1)
        assert await points(site) == [("ann", 1), ("bob", 0)]


TASKS = 30


async def answer(page: Browser) -> None:
    """Press the key that the text names."""
    (text,) = await page.texts("[data-task] .text")
    await page.press(text[0])


async def label(page: Browser, shown: str, count: int) -> None:
    """Answer `count` tasks. The page already shows the first one."""
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
                await answer(anns)  # the browser has this task, and needs no peer for it
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
        await page.until("document.querySelector('main').innerText.includes('No annotators yet')")
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
