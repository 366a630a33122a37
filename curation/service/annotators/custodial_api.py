"""Annotators whose key this peer keeps: they sign up and sign in with a name and a passphrase, and the peer signs for them.

The log says of such an annotator for ever that it is custodial. The key is in memory while its session lasts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final

import trio
from nacl.exceptions import CryptoError
from nacl.pwhash import argon2id
from nacl.secret import SecretBox
from nacl.utils import random

from curation.annotator_statements import EnrolStatement
from curation.service.annotators.annotator_api import SESSION_MS, AnnotatorApi
from curation.service.rate_limits import FairHostQueue
from curation.service.sqlite_database import ServiceDatabase
from features.services import ServiceContext
from protocol.identity import Identity
from web.replies import HttpProblem, Json

PASSES: Final = argon2id.OPSLIMIT_INTERACTIVE
MEMORY_BYTES: Final = argon2id.MEMLIMIT_INTERACTIVE  # 64 MiB: a peer on a small machine has them, once at a time
PASSPHRASE_CHARACTERS_MIN, PASSPHRASE_CHARACTERS_MAX = 8, 256
WRONG_PASSPHRASES_FREE: Final = 5  # passphrases in a row for one name; each one more doubles the wait
BACKOFF_SECONDS_MAX: Final = 64.0  # whoever forgot it must not be kept out for hours by somebody who guesses
WRONG_PASSPHRASE_ENTRIES_MAX: Final = 10_000  # names and hosts whose wrong passphrases are counted; the oldest goes
WAITING_MAX: Final = 64  # that wait for their turn, a tenth of a second each
WAITING_OF_HOST_MAX: Final = 8


class CustodialAccounts(ServiceDatabase):
    """Accounts of custodial annotators: a name, and a key that this peer keeps under the person's passphrase.

    The key's seed is sealed (XSalsa20-Poly1305) under Argon2id of the passphrase (RFC 9106), both as libsodium has them. Somebody
    who has the file guesses at the price of one Argon2id each. `create_account` and `open_account` take a tenth of a second and
    64 MiB: one at a time, in a thread.
    """

    file_name, file_mode = "accounts.sqlite", 0o600
    schema = "CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, salt BLOB NOT NULL, sealed BLOB NOT NULL) WITHOUT ROWID"

    def create_account(self, name: str, passphrase: str) -> Identity | None:
        """A new account, on the disk; or the one that there is. None if that one has another passphrase."""
        salt, identity = random(argon2id.SALTBYTES), Identity.generate()
        sealed = _box(passphrase, salt).encrypt(identity.seed)
        made = self._database.execute("INSERT OR IGNORE INTO accounts VALUES (?, ?, ?)", (name, salt, bytes(sealed)))
        return identity if made.rowcount else self.open_account(name, passphrase)

    def open_account(self, name: str, passphrase: str) -> Identity | None:
        """None if there is no such account, or it has another passphrase."""
        found = self._database.execute("SELECT salt, sealed FROM accounts WHERE name = ?", (name,)).fetchone()
        salt, sealed = found or (bytes(argon2id.SALTBYTES), b"")  # a name that is nobody's takes as long
        try:
            return Identity(_box(passphrase, salt).decrypt(sealed))
        except (CryptoError, ValueError):
            return None

    def delete_account(self, name: str) -> None:
        self._database.execute("DELETE FROM accounts WHERE name = ?", (name,))


def _box(passphrase: str, salt: bytes) -> SecretBox:
    key = argon2id.kdf(SecretBox.KEY_SIZE, passphrase.encode(), salt, opslimit=PASSES, memlimit=MEMORY_BYTES)
    return SecretBox(key)


class CustodialApi:
    def __init__(self, desk: ServiceContext, accounts: CustodialAccounts, annotating: AnnotatorApi) -> None:
        self._desk, self._accounts, self._annotating = desk, accounts, annotating
        # By name and host, so that strangers that guess keep nobody else out: how many in a row, when it may go on.
        self._wrong: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        self._turns = FairHostQueue(WAITING_MAX, WAITING_OF_HOST_MAX)

    async def sign_up(self, name: str, passphrase: str, invitation: str, before: str, host: str = "") -> Json:
        """Said again with the same passphrase, it goes on where it was left."""
        self._annotating.require_name(name)
        if not PASSPHRASE_CHARACTERS_MIN <= len(passphrase) <= PASSPHRASE_CHARACTERS_MAX:
            limits = f"{PASSPHRASE_CHARACTERS_MIN} to {PASSPHRASE_CHARACTERS_MAX} characters"
            raise HttpProblem("misfit", f"a passphrase has {limits}, this one has {len(passphrase)}")
        self._annotating.count_enrolment(host)
        identity = await self._opened(self._accounts.create_account, name, passphrase, host)
        if identity is None:
            raise HttpProblem("already-enrolled", "somebody has this name here: choose another, or sign in with its passphrase")
        signature = self._annotating.sign_statement(identity, EnrolStatement(name, self._desk.me, True))
        try:
            await self._annotating.enrol_counted_annotator(identity.public, name, signature, True, invitation)
        except HttpProblem as problem:
            if problem.code != "no-quorum" and not self._annotating.is_enrolled(identity.public):  # else it may still be decided
                await trio.to_thread.run_sync(self._accounts.delete_account, name)
            raise
        return self._begun(identity, name, before)

    async def sign_in(self, name: str, passphrase: str, before: str, host: str = "") -> Json:
        self._annotating.require_name(name)  # wrong names are counted: they must be short
        identity = await self._opened(self._accounts.open_account, name, passphrase, host)
        if identity is None:
            raise HttpProblem("unauthorized", "no account here has this name and this passphrase")
        if not self._annotating.is_enrolled(identity.public):
            raise HttpProblem("forbidden", "this account is not enrolled yet: sign up again with the same name and passphrase")
        return self._begun(identity, name, before)

    def _begun(self, identity: Identity, name: str, before: str) -> Json:
        self._annotating.end_session(before)
        token = self._annotating.begin_custodial_session(identity)
        return {"annotator": identity.public.hex(), "name": name, "seconds": SESSION_MS // 1_000, "token": token}

    async def _opened(
        self, call: Callable[[str, str], Identity | None], name: str, passphrase: str, host: str
    ) -> Identity | None:
        async with self._turns.hold_turn(host):
            self._require_patience(name, host)
            identity = await trio.to_thread.run_sync(partial(call, name, passphrase))
            if identity is not None:
                self._wrong.pop((name, host), None)
                self._turns.trust_host(host)
            else:
                self._count_wrong(name, host)
            return identity

    def _require_patience(self, name: str, host: str) -> None:
        _, until = self._wrong.get((name, host), (0, 0.0))
        if (wait := until - trio.current_time()) > 0:
            raise HttpProblem(
                "too-many", "several wrong passphrases were given for this name: wait before the next one", 1 + int(wait)
            )

    def _count_wrong(self, name: str, host: str) -> None:
        count = self._wrong.pop((name, host), (0, 0.0))[0] + 1
        wait = min(2.0 ** (count - WRONG_PASSPHRASES_FREE), BACKOFF_SECONDS_MAX) if count >= WRONG_PASSPHRASES_FREE else 0.0
        self._wrong[name, host] = count, trio.current_time() + wait
        if len(self._wrong) > WRONG_PASSPHRASE_ENTRIES_MAX:
            self._wrong.popitem(last=False)
