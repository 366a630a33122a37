"""Sessions of annotators. For custodial annotators, this peer keeps the key under a name and a passphrase, and signs for them."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import trio
from nacl.exceptions import CryptoError
from nacl.pwhash import argon2id
from nacl.secret import SecretBox
from nacl.utils import random

from curation.ledger.curation_state import Annotator, CurationState
from curation.ledger.transaction_types import EnrolmentEntry, EnrolStatement, SessionStatement
from curation.limits import NAME_CHARACTERS_MAX
from curation.service.access_control import AccessControl
from curation.service.annotators.statement_batcher import StatementBatcher
from curation.service.rate_limits import FairHostQueue, FairTable, HostRateLimiter
from features.services import ServiceContext
from ledger.members import MembersState
from protocol import codec
from protocol.identity import Ed25519Verifier, Identity, signing_preimage
from protocol.name_validation import name_problem
from storage.service_database import ServiceDatabase
from web.calls import HttpProblem, Json

CHALLENGE_MS: Final = 600_000
SESSION_MS: Final = 86_400_000
CHALLENGES_MAX: Final = 4_096  # unanswered challenges of all hosts
# unanswered challenges of one host: an office behind one address can sign in within ten minutes
CHALLENGES_OF_HOST_MAX: Final = 512
SESSIONS_MAX: Final = 20_000
SESSIONS_OF_ANNOTATOR_MAX: Final = 16  # sessions of one annotator, each in a browser
# Enrolments of one host at once. With the next interval, one host can enrol 750 annotators in three days, after which annotators
# without an answer are removed. If three peers serve, 750 is a quarter of a peer's maximum. Larger groups behind one address need
# invitations.
ENROLMENT_BURST: Final = 30
ENROLMENT_INTERVAL_SECONDS: Final = 360.0  # seconds until a host may enrol one more annotator
TOKEN_BYTES: Final = 24
PASSES: Final = argon2id.OPSLIMIT_INTERACTIVE
# memory of one Argon2id hash, 64 MiB: one hash at a time, so that a peer can run on a small machine
MEMORY_BYTES: Final = argon2id.MEMLIMIT_INTERACTIVE
PASSPHRASE_CHARACTERS_MIN, PASSPHRASE_CHARACTERS_MAX = 8, 256
WRONG_PASSPHRASES_FREE: Final = 5  # wrong passphrases in a row for a name before a wait, which each further one doubles
# longest wait after wrong passphrases: short, so that guesses by strangers do not lock out the owner for hours
BACKOFF_SECONDS_MAX: Final = 64.0
# pairs of name and host whose wrong passphrases are counted: a further pair replaces the oldest one
WRONG_PASSPHRASE_ENTRIES_MAX: Final = 10_000
WAITING_MAX: Final = 64  # calls of all hosts that wait for a hash, which takes 0.1 seconds
WAITING_OF_HOST_MAX: Final = 8


class CustodialAccounts(ServiceDatabase):
    """Accounts of custodial annotators: each has a name, and a key that this peer keeps encrypted under the person's passphrase.

    The key's seed is encrypted with XSalsa20-Poly1305 under the Argon2id hash (RFC 9106) of the passphrase, both from libsodium.
    An attacker with the file computes one Argon2id hash for each guess. `create_account` and `open_account` take 0.1 seconds and
    64 MiB: callers run one of them at a time, in a thread.
    """

    file_name, file_mode = "accounts.sqlite", 0o600
    schema = "CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, salt BLOB NOT NULL, sealed BLOB NOT NULL) WITHOUT ROWID"

    def create_account(self, name: str, passphrase: str) -> Identity | None:
        """Create a durable account, or open an existing one, and return its key.

        None: the account exists with another passphrase.
        """
        salt, identity = random(argon2id.SALTBYTES), Identity.generate()
        sealed = _box(passphrase, salt).encrypt(identity.seed)
        made = self._database.execute("INSERT OR IGNORE INTO accounts VALUES (?, ?, ?)", (name, salt, bytes(sealed)))
        return identity if made.rowcount else self.open_account(name, passphrase)

    def open_account(self, name: str, passphrase: str) -> Identity | None:
        """Return the key of an account. None: no account has this name, or its passphrase is another one."""
        found = self._database.execute("SELECT salt, sealed FROM accounts WHERE name = ?", (name,)).fetchone()
        salt, sealed = found or (bytes(argon2id.SALTBYTES), b"")  # an unknown name takes the same time as a known name
        try:
            return Identity(_box(passphrase, salt).decrypt(sealed))
        except (CryptoError, ValueError):
            return None

    def delete_account(self, name: str) -> None:
        self._database.execute("DELETE FROM accounts WHERE name = ?", (name,))


def _box(passphrase: str, salt: bytes) -> SecretBox:
    return SecretBox(argon2id.kdf(SecretBox.KEY_SIZE, passphrase.encode(), salt, opslimit=PASSES, memlimit=MEMORY_BYTES))


@dataclass
class AnnotatorSession:
    """Session of an annotator's client.

    The client has proven that it has the annotator's key. For a custodial annotator, it has sent the right passphrase instead.
    """

    key: bytes
    nonce: bytes
    expires_ms: int
    signature: bytes
    identity: Identity | None = None  # key of a custodial annotator, for which this peer signs


class SessionApi:
    """HTTP calls for sign-up and sign-in of annotators.

    Annotators have their own keys, or names and passphrases if this peer keeps their keys. The ledger marks such custodial
    annotators permanently. Their keys are in memory during their sessions.
    """

    def __init__(self, desk: ServiceContext, doors: AccessControl, gatherer: StatementBatcher) -> None:
        self._desk, self._doors, self._gatherer = desk, doors, gatherer
        self._accounts, self._verifier = CustodialAccounts(desk.folder), Ed25519Verifier()
        # annotator's key and expiry time, by nonce
        self._challenges = FairTable[bytes, tuple[bytes, int]](CHALLENGES_MAX, CHALLENGES_OF_HOST_MAX)
        self._sessions = FairTable[str, AnnotatorSession](SESSIONS_MAX, SESSIONS_OF_ANNOTATOR_MAX)
        # rate of enrolments by host, used only if sign-up is open
        self._enrolments = HostRateLimiter(ENROLMENT_BURST, ENROLMENT_INTERVAL_SECONDS)
        # Number of wrong passphrases in a row and the earliest time of the next attempt, by name and host. Guesses from one host
        # do not delay sign-ins from other hosts.
        self._wrong: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        self._turns = FairHostQueue(WAITING_MAX, WAITING_OF_HOST_MAX)

    @property
    def _state(self) -> CurationState:
        return self._desk.state.module_state(CurationState)

    async def enrol_annotator(
        self, key: bytes, name: str, signature: bytes, custodial: bool, invitation: str, host: str = ""
    ) -> Json:
        self._require_name(name)
        self.require_signature(key, EnrolStatement(name, self._desk.me, custodial), signature)
        if key not in self._state.annotators:
            self._count_enrolment(host)
        return await self._enrol(key, name, signature, custodial, invitation)

    async def _enrol(self, key: bytes, name: str, signature: bytes, custodial: bool, invitation: str) -> Json:
        if key in self._state.annotators:
            return self._enrolled(key, name)
        self._gatherer.require_room()
        if self._desk.get_setting("sign_up") != "open":
            codes = tuple(self._desk.get_setting("sign_up_invitations"))
            if not await trio.to_thread.run_sync(self._doors.redeem_invitation, invitation, key, codes):
                raise HttpProblem("forbidden", "a valid invitation is required: ask this peer's operator for an unused one")
        await self._gatherer.wait_for_decision(self._gatherer.add_statement(EnrolmentEntry(key, name, custodial, signature)))
        known = self._state.annotators.get_record(key)
        if known is None or not self.is_here(known.peer):
            await trio.to_thread.run_sync(self._doors.restore_invitation, key)
        if known is None:
            raise HttpProblem("forbidden", "this peer cannot enrol more annotators: try another peer")
        return self._enrolled(key, name)

    def _count_enrolment(self, host: str) -> None:
        """Count a host's enrolment if sign-up is open. Raises `HttpProblem` above the host's limit."""
        if self._desk.get_setting("sign_up") == "open":
            self._enrolments.acquire(host, "sign-ups")

    def _require_name(self, name: str) -> None:
        is_long = len(name) > NAME_CHARACTERS_MAX
        if problem := name_problem(name) or (f"is longer than {NAME_CHARACTERS_MAX}" if is_long else None):
            raise HttpProblem("misfit", f"the name {problem}")

    def _enrolled(self, key: bytes, name: str) -> Json:
        """Return the reply for an enrolled key.

        Raises `HttpProblem` if the key has another name, or is enrolled at another peer.
        """
        known = self.find_annotator(self._state, key)
        if known.name != name or not self.is_here(known.peer):
            raise HttpProblem("already-enrolled", f"this key is already enrolled as {known.name!r}, or at another peer")
        return {"annotator": key.hex()}

    async def create_challenge(self, key: bytes, host: str = "") -> Json:
        nonce, now = secrets.token_bytes(16), self.now_ms
        self._challenges.put(nonce, host, (key, now + CHALLENGE_MS))
        return {"nonce": nonce.hex(), "expires_ms": now + SESSION_MS}

    async def create_session(self, key: bytes, nonce: bytes, expires_ms: int, signature: bytes) -> Json:
        challenged = self._challenges.get(nonce)
        if challenged is None or challenged[0] != key or challenged[1] < self.now_ms:
            raise HttpProblem("unauthorized", "the nonce is unknown or has expired: request a new challenge")
        if not self.now_ms < expires_ms <= self.now_ms + SESSION_MS + CHALLENGE_MS:
            raise HttpProblem("misfit", "expires_ms has passed, or is later than the challenge allows")
        self.require_signature(key, SessionStatement(self._desk.me, nonce, expires_ms), signature)
        if self._state.annotators.get_record(key) is None:
            raise HttpProblem("forbidden", "this key is not enrolled")
        self._challenges.pop(nonce)
        return {"token": self._begin(AnnotatorSession(key, nonce, expires_ms, signature))}

    def _begin(self, session: AnnotatorSession) -> str:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._sessions.put(token, session.key, session)
        return token

    async def sign_out(self, session: AnnotatorSession, token: str) -> Json:
        self._sessions.pop(token)
        return {}

    async def session_info(self, session: AnnotatorSession) -> Json:
        person = self.find_annotator(self._state, session.key)
        return {"annotator": session.key.hex(), "name": person.name, "custodial": session.identity is not None}

    async def sign_up(self, name: str, passphrase: str, invitation: str, before: str, host: str = "") -> Json:
        """Create a custodial account and enrol its key.

        With the same passphrase, the call continues an earlier, interrupted call.
        """
        self._require_name(name)
        if not PASSPHRASE_CHARACTERS_MIN <= len(passphrase) <= PASSPHRASE_CHARACTERS_MAX:
            limits = f"{PASSPHRASE_CHARACTERS_MIN} to {PASSPHRASE_CHARACTERS_MAX} characters"
            raise HttpProblem("misfit", f"a passphrase must have {limits}; this one has {len(passphrase)}")
        self._count_enrolment(host)
        identity = await self._opened(self._accounts.create_account, name, passphrase, host)
        if identity is None:
            raise HttpProblem("already-enrolled", "this name is taken at this peer: choose another name, or sign in")
        signature = self.sign_statement(identity, EnrolStatement(name, self._desk.me, True))
        try:
            await self._enrol(identity.public, name, signature, True, invitation)
        except HttpProblem as problem:
            # after `no-quorum`, the enrolment may still be decided
            if problem.code != "no-quorum" and identity.public not in self._state.annotators:
                await trio.to_thread.run_sync(self._accounts.delete_account, name)
            raise
        return self._begun(identity, name, before)

    async def sign_in(self, name: str, passphrase: str, before: str, host: str = "") -> Json:
        self._require_name(name)  # must be short: names with wrong passphrases are stored
        identity = await self._opened(self._accounts.open_account, name, passphrase, host)
        if identity is None:
            raise HttpProblem("unauthorized", "wrong name or passphrase")
        if identity.public not in self._state.annotators:
            raise HttpProblem("forbidden", "this account is not enrolled yet: sign up again with the same name and passphrase")
        return self._begun(identity, name, before)

    def _begun(self, identity: Identity, name: str, before: str) -> Json:
        """Begin a session in which this peer signs for the annotator, and end the session `before`.

        Return the reply with the new token.
        """
        self._sessions.pop(before)
        nonce, expires_ms = secrets.token_bytes(16), self.now_ms + SESSION_MS
        signature = self.sign_statement(identity, SessionStatement(self._desk.me, nonce, expires_ms))
        token = self._begin(AnnotatorSession(identity.public, nonce, expires_ms, signature, identity))
        return {"annotator": identity.public.hex(), "name": name, "seconds": SESSION_MS // 1_000, "token": token}

    async def _opened(
        self, call: Callable[[str, str], Identity | None], name: str, passphrase: str, host: str
    ) -> Identity | None:
        async with self._turns.hold_turn(host):
            count, until = self._wrong.get((name, host), (0, 0.0))
            if (wait := until - trio.current_time()) > 0:
                raise HttpProblem(
                    "too-many", "too many wrong passphrases for this name: wait before you try again", 1 + int(wait)
                )
            identity = await trio.to_thread.run_sync(partial(call, name, passphrase))
            self._wrong.pop((name, host), None)
            if identity is not None:
                self._turns.trust_host(host)
                return identity
            count += 1
            wait = min(2.0 ** (count - WRONG_PASSPHRASES_FREE), BACKOFF_SECONDS_MAX) if count >= WRONG_PASSPHRASES_FREE else 0.0
            self._wrong[name, host] = count, trio.current_time() + wait
            if len(self._wrong) > WRONG_PASSPHRASE_ENTRIES_MAX:
                self._wrong.popitem(last=False)
            return None

    # Looking up ------------------------------------------------------------------------------------------------------

    def is_here(self, peer: bytes) -> bool:
        """Return whether `peer` is this peer's key, or one of its former keys."""
        return self._desk.state.module_state(MembersState).current_key(peer) == self._desk.me

    @property
    def now_ms(self) -> int:
        """Current network time: that of the last block plus the time since.

        The ledger compares the end of a session with block times.
        """
        return self._desk.time_ms + int(1_000 * self._desk.seconds_since_block)

    def is_annotator(self, token: str) -> bool:
        return self._sessions.get(token) is not None

    def require_session(self, token: str) -> AnnotatorSession:
        """Return the session of this token.

        Raises `HttpProblem` if it is unknown or has expired, or its annotator is not enrolled any more.
        """
        session = self._sessions.get(token)
        if session is None or session.expires_ms <= self.now_ms:
            raise HttpProblem("unauthorized", "your session has expired: sign in again, or request a new challenge")
        self.find_annotator(self._state, session.key)
        return session

    def find_annotator(self, state: CurationState, key: bytes) -> Annotator:
        """Return the row of an enrolled annotator. Raises `HttpProblem` if the key is not enrolled."""
        person = state.annotators.get_record(key)
        if person is None:
            raise HttpProblem(
                "unauthorized", "this key is not enrolled any more, since it gave no answer for three days: sign up again"
            )
        return person

    def sign_statement(self, identity: Identity, statement: Any) -> bytes:
        return identity.sign(signing_preimage(statement.TAG, self._desk.chain_id, codec.encode(statement)))

    def require_signature(self, key: bytes, statement: Any, signature: bytes) -> None:
        """Verify a key's signature of a statement. Raises `HttpProblem` if the signature is invalid."""
        signed = signing_preimage(statement.TAG, self._desk.chain_id, codec.encode(statement))
        if not self._verifier.verify(key, signed, signature):
            raise HttpProblem(
                "bad-signature", f"the signature does not match this key, this {statement.TAG} statement and this chain"
            )
