from __future__ import annotations

import hmac
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol.errors import StorageError, UserError
from storage import api_key_store
from storage.api_key_store import ApiKey, ApiKeyStore, hash_secret


def key_of(name: str, created_ms: int = 1_000) -> ApiKey:
    return ApiKey(name, created_ms, 8, 10**9, 10**6)


@pytest.fixture
def store(tmp_path: Path) -> ApiKeyStore:
    return ApiKeyStore(tmp_path / "api_keys.sqlite")


def test_a_key_is_found_by_its_secret_alone(store: ApiKeyStore) -> None:
    anna, ben = (store.create_key(key_of(name)) for name in ("anna", "ben"))
    assert store.find_key(anna) == key_of("anna") and store.find_key(ben) == key_of("ben")
    for other in ("", "anna", anna[:-1], anna + "x", anna.upper(), "\ud800", hash_secret(anna).hex()):
        assert store.find_key(other) is None


def test_a_secret_is_random_url_safe_text_behind_its_prefix(store: ApiKeyStore) -> None:
    secrets = {store.create_key(key_of(str(number))) for number in range(20)}
    assert len(secrets) == 20
    assert all(re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", secret) for secret in secrets), "32 bytes in base64"


def test_no_file_has_the_secret_and_only_the_owner_may_read_the_file(store: ApiKeyStore) -> None:
    before = os.umask(0)
    try:
        secret = store.create_key(key_of("anna"))
    finally:
        os.umask(before)
    store.record_use("anna", 5)
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    data = b"".join(path.read_bytes() for path in store.path.parent.iterdir())
    assert hash_secret(secret) in data
    assert secret.encode() not in data and secret.removeprefix("tml-").encode() not in data


def test_changes_of_another_object_are_seen_at_once(store: ApiKeyStore) -> None:
    other = ApiKeyStore(store.path)
    assert not other.exists() and other.list_keys() == () and not other.revoke_key("anna")
    assert other.find_key("tml-x") is None and not store.path.exists(), "reading creates no file"
    secret = store.create_key(key_of("anna"))
    assert other.exists() and other.find_key(secret) == key_of("anna")
    other.record_use("anna", 7_000)
    assert [key.last_use_ms for key in store.list_keys()] == [7_000]
    assert store.revoke_key("anna") and other.find_key(secret) is None
    assert other.exists(), "without keys the peer is still closed"
    assert not other.revoke_key("anna")


def test_a_name_belongs_to_one_key_until_it_is_revoked(store: ApiKeyStore) -> None:
    first = store.create_key(key_of("anna"))
    with pytest.raises(UserError, match=r"there is a key 'anna' already: .*`peer key revoke anna`"):
        store.create_key(key_of("anna"))
    assert store.find_key(first) == key_of("anna")
    store.revoke_key("anna")
    second = store.create_key(key_of("anna", 2_000))
    assert store.find_key(first) is None and store.find_key(second) == key_of("anna", 2_000)


def test_keys_are_listed_from_the_oldest_on(store: ApiKeyStore) -> None:
    for name, created_ms in (("zoe", 1), ("anna", 3), ("ben", 2)):
        store.create_key(key_of(name, created_ms))
    assert [key.name for key in store.list_keys()] == ["zoe", "ben", "anna"]


def test_there_are_at_most_as_many_keys_as_a_request_can_be_compared_with(
    store: ApiKeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_key_store, "KEYS_MAX", 2)
    store.create_key(key_of("anna"))
    store.create_key(key_of("ben"))
    with pytest.raises(UserError, match="2 keys, and 'eve' would be one more"):
        store.create_key(key_of("eve"))
    assert [key.name for key in store.list_keys()] == ["anna", "ben"]


def test_every_hash_is_compared_in_constant_time(store: ApiKeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [store.create_key(key_of(str(number))) for number in range(3)]
    real, compared = hmac.compare_digest, []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for secret in secrets:
        compared.clear()
        assert store.find_key(secret) is not None
        assert set(compared) == set(map(hash_secret, secrets))


@pytest.mark.real("threads wait for one another's transactions")
def test_concurrent_writers_lose_nothing(store: ApiKeyStore) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda number: ApiKeyStore(store.path).create_key(key_of(str(number))), range(24)))
    assert {key.name for key in store.list_keys()} == {str(number) for number in range(24)}
    assert all(store.find_key(secret) for secret in made)


def test_a_first_key_that_was_interrupted_leaves_a_peer_without_access(store: ApiKeyStore) -> None:
    store.path.touch()  # the state after a crash behind the creation of the file
    assert store.exists() and store.list_keys() == () and store.find_key("tml-x") is None
    assert store.find_key(store.create_key(key_of("anna"))) == key_of("anna")


def test_a_damaged_file_is_an_error_with_a_way_out(store: ApiKeyStore) -> None:
    store.path.write_bytes(b"no database" * 100)
    for call in (store.list_keys, lambda: store.find_key("tml-x"), lambda: store.create_key(key_of("anna"))):
        with pytest.raises(StorageError, match=f"cannot use {store.path} .*move it away and create new keys"):
            call()


def test_a_missing_folder_is_an_error_with_its_path(tmp_path: Path) -> None:
    store = ApiKeyStore(tmp_path / "none" / "api_keys.sqlite")
    with pytest.raises(StorageError, match=r"cannot write .*none"):
        store.create_key(key_of("anna"))


def test_a_key_shows_no_secret_and_no_hash(store: ApiKeyStore) -> None:
    secret = store.create_key(key_of("anna"))
    shown = repr(store.find_key(secret))
    assert secret not in shown and hash_secret(secret).hex() not in shown and repr(hash_secret(secret)) not in shown
