from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from features import api_keys
from features.api_keys import ApiKeys
from peer import cli
from peer.daemon.daemon import running_daemon
from peer.settings.config import load_settings
from peer.settings.data_directory import DataDirectory
from protocol.errors import StorageError
from storage.api_key_store import ApiKey, ApiKeyStore

Result = tuple[int, str, str]
ANNA = ApiKey("anna", 1_000, 8, 10**9, 600)


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    made = DataDirectory.create(tmp_path / "peer")
    made.create_identity()
    return made


@pytest.fixture
def key(directory: DataDirectory, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run `peer key` with these words on the data directory, and return the exit status and both outputs."""

    def run(*words: str) -> Result:
        status = cli.main(["key", *words, "--data-dir", str(directory.path)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def keys_in(directory: DataDirectory) -> ApiKeys:
    return ApiKeys(ApiKeyStore(directory.api_keys))


# Quotas --------------------------------------------------------------------------------------------------------------


def test_a_minute_of_tokens_may_be_spent_at_once_and_comes_back_evenly(directory: DataDirectory) -> None:
    keys = keys_in(directory)
    assert keys.spend_tokens(ANNA, 600, 0.0) is None
    assert keys.spend_tokens(ANNA, 1, 0.0) == "the key 'anna' has used up its quota of 600 tokens a minute: try again in 1 s"
    assert keys.spend_tokens(ANNA, 101, 10.0) is not None, "ten seconds bring 100 tokens"
    assert keys.spend_tokens(ANNA, 100, 10.0) is None, "a refusal costs nothing"
    assert "try again in 60 s" in (keys.spend_tokens(ANNA, 600, 10.0) or "")
    assert keys.spend_tokens(ANNA, 600, 70.0) is None
    assert keys.spend_tokens(ANNA, 600, 10_000.0) is None
    assert keys.spend_tokens(ANNA, 1, 10_000.0) is not None, "only one minute is saved"


def test_a_refusal_names_a_time_after_which_the_same_request_is_allowed(directory: DataDirectory) -> None:
    for count in (1, 7, 599, 600):
        keys = keys_in(directory)
        keys.spend_tokens(ANNA, 600, 0.0)
        seconds = re.search(r"in (\d+) s", keys.spend_tokens(ANNA, count, 0.0) or "")
        assert seconds and keys.spend_tokens(ANNA, count, float(seconds[1])) is None


def test_a_request_above_the_quota_is_never_allowed_and_costs_nothing(directory: DataDirectory) -> None:
    keys = keys_in(directory)
    refused = "601 tokens at once are more than the quota of the key 'anna', 600 a minute: send fewer"
    assert keys.spend_tokens(ANNA, 601, 0.0) == refused
    assert keys.spend_tokens(ANNA, 600, 0.0) is None


def test_keys_have_quotas_of_their_own(directory: DataDirectory) -> None:
    keys = keys_in(directory)
    assert keys.spend_tokens(ANNA, 600, 0.0) is None
    assert keys.spend_tokens(replace(ANNA, name="ben"), 600, 0.0) is None
    assert keys.spend_tokens(ANNA, 0, 0.0) is None


def test_a_clock_that_goes_back_gives_and_takes_nothing(directory: DataDirectory) -> None:
    keys = keys_in(directory)
    assert keys.spend_tokens(ANNA, 500, 100.0) is None
    assert keys.spend_tokens(ANNA, 101, 0.0) is not None
    assert keys.spend_tokens(ANNA, 100, 0.0) is None
    assert keys.spend_tokens(ANNA, 1, 100.0) is not None


def test_counts_of_revoked_keys_are_dropped(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "KEYS_MAX", 2)
    keys = keys_in(directory)
    for name in ("old", "anna", "ben"):
        assert keys.spend_tokens(replace(ANNA, name=name), 600, 0.0) is None
    assert keys._buckets.keys() == {"anna", "ben"}
    assert keys.spend_tokens(ANNA, 1, 0.0) is not None


# Finding keys --------------------------------------------------------------------------------------------------------


def test_a_peer_is_open_until_its_first_key(directory: DataDirectory, key: Callable[..., Result]) -> None:
    keys = keys_in(directory)
    assert keys.is_open() and keys.find_key("tml-anything") is None
    assert keys.is_open(), "a lookup creates no file"
    secret = key("new", "anna")[1].split()[-1]
    assert not keys.is_open() and keys.find_key(secret) is not None
    key("revoke", "anna")
    assert keys.find_key(secret) is None
    assert not keys.is_open(), "a revoked key gives nobody access"


def test_a_use_is_recorded_at_most_once_a_minute(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = ApiKeyStore(directory.api_keys), [0]
    secret, keys = store.create_key(ANNA), keys_in(directory)
    monkeypatch.setattr(time, "time_ns", lambda: now[0] * 10**9)
    recorded = []
    for seconds in (1_000, 1_059, 1_060, 1_100):
        now[0] = seconds
        assert keys.find_key(secret) is not None
        recorded.append(store.list_keys()[0].last_use_ms)
    assert recorded == [1_000_000, 1_000_000, 1_060_000, 1_060_000]


def test_a_full_disk_refuses_no_valid_key(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ApiKeyStore(directory.api_keys).create_key(ANNA)

    def fail(*_: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(ApiKeyStore, "record_use", fail)
    assert keys_in(directory).find_key(secret) == ANNA


def test_nothing_logs_a_secret(directory: DataDirectory, key: Callable[..., Result], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = key("new", "anna")[1].split()[-1]
    keys = keys_in(directory)
    assert keys.find_key(secret) is not None and keys.find_key("tml-wrong") is None
    assert secret not in caplog.text and "tml-wrong" not in caplog.text


# The command ---------------------------------------------------------------------------------------------------------


def test_a_new_key_is_printed_last_and_listed_without_its_secret(key: Callable[..., Result], directory: DataDirectory) -> None:
    status, out, error = key("new", "anna")
    secret = out.splitlines()[-1]
    assert (status, error) == (0, "") and re.fullmatch(r"tml-[\w-]{43}", secret)
    assert "programs on this machine need a key from now on" in out
    assert "8 open runs, 1,000 MB, 1,000,000 tokens a minute" in out
    found = keys_in(directory).find_key(secret)
    assert found is not None and (found.name, found.models_max, found.stored_bytes_max) == ("anna", 8, 10**9)
    out = key("new", "ben", "--models", "2", "--mb", "30", "--tokens-per-minute", "100K")[1]
    assert "from now on" not in out
    status, listed, error = key("list")
    assert (status, error) == (0, "") and "tml-" not in listed
    assert [line.split()[0] for line in listed.splitlines()] == ["name", "anna", "ben"]
    assert "never" in listed and all(word in listed for word in ("2", "30", "100,000"))


def test_a_list_for_programs_has_all_fields_and_no_hash(key: Callable[..., Result], directory: DataDirectory) -> None:
    assert json.loads(key("list", "--json")[1]) == []
    secret = key("new", "anna", "--models", "1", "--mb", "2", "--tokens-per-minute", "3")[1].split()[-1]
    (listed,) = json.loads(key("list", "--json")[1])
    assert listed.pop("created_ms") > 0 and listed.pop("last_use_ms") is None
    assert listed == {"name": "anna", "models_max": 1, "stored_bytes_max": 2_000_000, "tokens_per_minute_max": 3}
    keys_in(directory).find_key(secret)
    assert json.loads(key("list", "--json")[1])[0]["last_use_ms"] > 0
    assert "never" not in key("list")[1]


def test_an_empty_list_says_who_is_served(key: Callable[..., Result]) -> None:
    assert key("list") == (0, "no keys: programs on this machine need none; `peer key new NAME` creates a key\n", "")
    key("new", "anna")
    assert key("revoke", "anna") == (0, "revoked anna; no key is left, and no program is served\n", "")
    assert key("list") == (0, "all keys are revoked, and no program is served; `peer key new NAME` creates a key\n", "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("new",), "a name is missing: write `peer key new NAME`"),
        (("revoke",), "a name is missing: write `peer key revoke NAME`"),
        (("new", ""), "the name '' has 0 characters: give it 1 to 64"),
        (("new", "x" * 65), "has 65 characters: give it 1 to 64"),
        (("new", " ben"), "the name ' ben' begins or ends with a space: choose another name"),
        (("new", "b\u200ben"), "contains the character U+200B, which screens do not show correctly: choose another name"),
        (("new", "anna"), "there is a key 'anna' already: choose another name, or revoke that key with `peer key revoke anna`"),
        (("revoke", "ana"), "there is no key 'ana'; did you mean anna?"),
        (("revoke", "zebra"), "there is no key 'zebra'; `peer key list` shows all keys"),
        (("list", "anna"), "`peer key list` shows all keys: leave out 'anna'"),
        (("list", "--models", "2"), "--models is an option of `peer key new`: leave it out of `peer key list`"),
        (("revoke", "anna", "--tokens-per-minute", "2"), "--tokens-per-minute is an option of `peer key new`"),
        (("new", "ben", "--json"), "--json is an option of `peer key list`: leave it out of `peer key new`"),
        (("new", "ben", "--models", "0"), "--models: 0 is less than 1"),
        (("new", "ben", "--mb", "few"), "--mb: 'few' is not a whole number"),
        (("new", "ben", "--mb", str(10**10)), "--mb: 10000000000 is outside 1.."),
        (("new", "ben", "--tokens-per-minute", "0"), "--tokens-per-minute: 0 is outside 1.."),
        (("make", "ben"), "'make'"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    key: Callable[..., Result], directory: DataDirectory, words: tuple[str, ...], told: str
) -> None:
    key("new", "anna")
    status, out, error = key(*words)
    assert (status, out) == (2, "") and error.startswith("peer: error: ") and error.count("\n") == 1
    assert told in error
    assert [key.name for key in ApiKeyStore(directory.api_keys).list_keys()] == ["anna"]


def test_a_folder_without_a_peer_gets_no_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["key", "new", "anna", "--data-dir", str(tmp_path / "none")]) == 2
    assert "no data directory at" in capsys.readouterr().err and os.listdir(tmp_path) == []


@pytest.mark.real("sockets")
async def test_a_running_peer_notices_new_and_revoked_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--data-dir", str(tmp_path / "peer"))

    async def run(*words: str) -> str:
        assert await trio.to_thread.run_sync(cli.main, [*words, *place]) == 0
        return capsys.readouterr().out

    await run("init", "--network", "lab", "--listen", "127.0.0.1:0")
    config = load_settings({"data_directory": tmp_path / "peer", "role": "voter"}, {"HOME": str(tmp_path)}).config
    async with running_daemon(config) as daemon:
        keys = daemon.service_context("serve").api_keys
        assert keys.is_open() and keys is daemon.service_context("other").api_keys
        secret = (await run("key", "new", "anna")).split()[-1]
        found = keys.find_key(secret)
        assert not keys.is_open() and found is not None and found.name == "anna"
        assert "anna" in await run("key", "list")
        await run("key", "revoke", "anna")
        assert keys.find_key(secret) is None and not keys.is_open()
