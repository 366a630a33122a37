"""People without their own key: the peer keeps a key under their passphrase and signs for them, and the log records it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, cast

import pytest

from curation.ledger.curation_state import CurationState
from curation.rpc import CurationRpc
from curation.service.annotators import session_api
from curation.service.annotators.session_api import CustodialAccounts
from peer.api.running_peer import RunningPeer
from tests.web.client import Person, Reply, Site
from tests.web.room import Room, assigned, said

PASSPHRASE = "correct horse battery"


async def signed(site: Site, way: str, name: str = "ann", passphrase: str = PASSPHRASE, **more: Any) -> Reply:
    return await said(site.ask, "POST", f"/api/v1/sign-{way}", {"name": name, "passphrase": passphrase, **more})


def browser(site: Site, reply: Reply) -> dict[str, str]:
    """Return the headers that the peer's own page sends."""
    cookie = reply.headers["set-cookie"].partition(";")[0]
    return {"Cookie": cookie, "Origin": f"http://{site.host}:{site.port}", "X-Folkmoot": "1"}


async def labelled(site: Site, headers: dict[str, str], answer: list[int]) -> tuple[str, Reply]:
    while not (tasks := (await said(site.ask, "GET", "/api/tasks", None, "", headers)).body["tasks"]):
        pass  # a decision may take longer than one call
    (task,) = tasks
    return task["assignment"], await said(
        site.ask, "POST", "/api/submit", {"assignment": task["assignment"], "answer": answer}, "", headers
    )


def person(daemon: RunningPeer, key: str) -> Any:
    return daemon.driver.state.module_state(CurationState).annotators.get_record(bytes.fromhex(key))


@pytest.mark.real("sockets")
async def test_somebody_without_a_key_labels_signs_out_and_comes_back_after_a_restart(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.serving() as (daemon, site):
        await room.project(daemon)
        reply = await signed(site, "up")
        assert reply.status == 201 and "token" not in reply.body and reply.body["name"] == "ann"
        key, ann = reply.body["annotator"], browser(site, reply)
        assert person(daemon, key).custodial
        who = {"annotator": key, "name": "ann", "custodial": True}
        assert (await said(site.ask, "GET", "/api/v1/session", None, "", ann)).body == who
        assignment, receipt = await labelled(site, ann, [1])
        assert receipt.status == 201
        body = {"assignment": assignment, "answer": [1]}
        assert (await said(site.ask, "POST", "/api/submit", body, "", ann)).status == 200, "the same salt each time"
        body = {"assignment": assignment, "answer": [0]}
        assert (await said(site.ask, "POST", "/api/submit", body, "", ann)).code == "already-answered"
        gone = await said(site.ask, "POST", "/api/v1/sign-out", None, "", ann)
        assert gone.status == 200 and 'folkmoot=""' in gone.headers["set-cookie"]
        assert (await said(site.ask, "GET", "/api/v1/session", None, "", ann)).code == "unauthorized"
        assert (await signed(site, "up", passphrase="another one")).code == "already-enrolled"
    async with room.serving() as (daemon, site):
        reply = await signed(site, "in")
        assert (reply.status, reply.body["annotator"]) == (201, key)
        assert (await labelled(site, browser(site, reply), [0]))[1].status == 201
        assert (await signed(site, "up")).body["annotator"] == key, "said again, it goes on where it was"


@pytest.mark.real("sockets")
async def test_a_program_with_a_key_of_its_own_is_not_signed_for(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.serving() as (daemon, site):
        await room.project(daemon)
        ann = Person("ann")
        await said(ann.enrol, site)
        token = await said(ann.token, site)
        (task,) = await assigned(site, ann)
        assert (
            await said(site.ask, "POST", "/api/submit", {"assignment": task["assignment"], "answer": [1]}, token)
        ).code == "malformed"
        assert not (await said(site.get, "/api/v1/session", token)).body["custodial"]


@pytest.mark.real("sockets")
async def test_what_fits_no_account_is_refused_and_keeps_no_name(tmp_path: Path) -> None:
    async with Room(tmp_path).serving(sign_up="invited") as (daemon, site):
        for name, passphrase, code in (
            ("ann", "short", "misfit"), ("ann", "x" * 257, "misfit"),
            ("a" * 33, PASSPHRASE, "misfit"), ("ann", PASSPHRASE, "forbidden"),
        ):  # fmt: skip
            assert (await signed(site, "up", name, passphrase)).code == code
        assert (await signed(site, "in")).code == "unauthorized", "the name that was not invited is free again"
        code = await cast(CurationRpc, daemon.api).create_annotator_invitation()
        assert (await signed(site, "up", passphrase="another one", invitation=code)).status == 201


@pytest.mark.real("sockets")
async def test_defence_wrong_passphrases_wait_longer_and_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Room(tmp_path).serving() as (_, site):
        assert (await signed(site, "up")).status == 201
        for free in (2, -3):  # the second attempt costs half a minute, so the next one is too early on any machine
            monkeypatch.setattr(session_api, "WRONG_PASSPHRASES_FREE", free)
            assert (await signed(site, "in", passphrase=f"wrong horse {free}")).code == "unauthorized"
        assert (await signed(site, "in", passphrase="wrong horse")).code == "too-many"
        reply = await signed(site, "in")
        assert reply.code == "too-many" and 1 < int(reply.headers["retry-after"]) <= 32, "nor is the right one looked at"
        assert (await signed(site, "in", "bob")).code == "unauthorized", "others are not kept out"


def test_defence_a_stolen_file_of_accounts_holds_no_key_and_nobody_else_reads_it(tmp_path: Path) -> None:
    accounts = CustodialAccounts(tmp_path)
    made = accounts.create_account("ann", PASSPHRASE)
    assert made is not None and made.public == getattr(accounts.open_account("ann", PASSPHRASE), "public", None)
    assert accounts.open_account("ann", "wrong") is None and accounts.open_account("bob", PASSPHRASE) is None
    accounts.close()
    for file in tmp_path.glob("accounts.sqlite*"):
        assert made.seed not in file.read_bytes() and PASSPHRASE.encode() not in file.read_bytes()
        assert os.name != "posix" or stat.S_IMODE(file.stat().st_mode) == 0o600, file
