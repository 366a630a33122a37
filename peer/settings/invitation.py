"""The invitation string: the genesis, addresses to dial, and a permission that admits one member.

A peer stores a list of the invitations that it has issued, without their secrets, to show and to revoke them.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import trio

from consensus.light_client import TrustedBlock
from ledger.core.genesis import Genesis
from ledger.ledger_state import LedgerState
from ledger.members import AdmitMember, Invitation, token_preimage
from peer.settings.data_directory import storage_errors
from protocol import codec
from protocol.addresses import check_dialable_address
from protocol.codec import Count, Length
from protocol.errors import RemoteProtocolError, StorageError, UserError
from protocol.identity import Identity, Signed, Signer, peer_id, sign_message
from protocol.limits import ADVERTISED_MAX
from protocol.messages import Address
from storage import durable_files

INVITATION_PREFIX = "folkmoot1:"
DAY_MS = 86_400_000
INVITATION_BYTES_MAX = 64 << 10  # largest invitation without compression: in a network of 200 founders, it has about 20 kB

INVITATIONS_KEPT = 1_024  # newest invitations that a peer stores: few voters invite more members
OPEN_STATUS = "open"


@dataclass(frozen=True, slots=True)
class InvitationString:
    genesis: Genesis
    addresses: Annotated[tuple[Address, ...], Length(1, ADVERTISED_MAX)]
    invitation: Signed
    token_seed: Annotated[bytes, Length(32, 32)]  # seed of the token's secret key: anybody with it can join, so it is secret
    anchor: TrustedBlock | None  # last block that the inviter had applied: the joining peer accepts no history without this block


def make_invitation(
    signer: Signer, genesis: Genesis, expires_ms: int, addresses: tuple[str, ...], anchor: TrustedBlock | None = None
) -> InvitationString:
    token = Identity.generate()
    signed = sign_message(signer, genesis.chain_id, Invitation(token.public, expires_ms))
    return InvitationString(genesis, addresses, signed, token.seed, anchor)


def invitation_text(invitation: InvitationString) -> str:
    """Return the invitation as a string that people can send and paste."""
    return _text(zlib.compress(codec.encode(invitation), 9))


def _text(packed: bytes) -> str:
    return INVITATION_PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def parse_invitation(text: str) -> InvitationString:
    """Return the invitation that a text contains. Raises `UserError` if the text is not a complete invitation."""
    text = "".join(text.split())
    try:
        if not text.startswith(INVITATION_PREFIX):
            raise ValueError("prefix")
        packed = base64.urlsafe_b64decode(text.removeprefix(INVITATION_PREFIX) + "===")
        if _text(packed) != text.rstrip("="):  # the decoder skips characters outside base64, which are errors here
            raise ValueError("base64")
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, INVITATION_BYTES_MAX)
        if unpacker.unconsumed_tail or unpacker.unused_data or not unpacker.eof:
            raise ValueError("length")
        invitation = codec.decode(InvitationString, data)
        Genesis.decode(codec.encode(invitation.genesis))  # checks rules of a genesis that its types do not express
        for address in invitation.addresses:
            check_dialable_address(address, "the invitation")
        return invitation
    except (ValueError, zlib.error, RemoteProtocolError):
        shown = text if len(text) <= 24 else f"{text[:16]}…{text[-6:]}"
        raise UserError(
            f"{shown!r} is not a complete invitation: paste the whole line of `peer invite` that begins with {INVITATION_PREFIX}"
        ) from None


def make_admission(invitation: InvitationString, newcomer: bytes, name: str) -> AdmitMember:
    """Return the content of the transaction that admits the newcomer. The first run of the new peer registers its roles later."""
    token = Identity(invitation.token_seed)
    return AdmitMember(invitation.invitation, token.sign(token_preimage(invitation.genesis.chain_id, newcomer)), name, ())


@dataclass(frozen=True, slots=True)
class IssuedInvitation:
    signed: Signed
    made_ms: Count
    addresses: tuple[Address, ...]

    @property
    def invitation(self) -> Invitation:
        return codec.decode_message(self.signed.body, (Invitation,))

    @property
    def token(self) -> str:
        """Name of the invitation for people: the public key of the token, whose secret key is in the invitation string."""
        return peer_id(self.invitation.token)

    def outcome(self, state: LedgerState) -> str:
        """Return a word or a phrase: whether the invitation is open, used, revoked or expired.

        The state forgets used and revoked invitations at expiry.
        """
        members, invitation = state.members, self.invitation
        if invitation.expires < state.time_ms:
            return "expired"
        if invitation.token in members.used_tokens:
            return "used"
        if invitation.token in members.revoked_tokens.get(self.signed.signer, {}):
            return "revoked"
        may_invite = self.signed.signer in members.voters and members.is_current_key(self.signed.signer)
        return OPEN_STATUS if may_invite else "without effect: its key does not vote"


_KEPT: Any = Annotated[tuple[IssuedInvitation, ...], Length(0, INVITATIONS_KEPT)]


class InvitationBook:
    """The file of issued invitations in a data directory. Methods raise `StorageError` if the file cannot be read or written."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, trio.Lock()
        self.issued = self._load()

    def _load(self) -> tuple[IssuedInvitation, ...]:
        with storage_errors(self._file):
            data = self._file.read_bytes() if self._file.exists() else codec.encode(())
        try:
            made: tuple[IssuedInvitation, ...] = codec.decode(_KEPT, data)
            # Decodes all signed bodies, so that a damaged one is found now.
            assert all(item.invitation.expires >= 0 for item in made)
            return made
        except RemoteProtocolError as error:
            raise StorageError(
                f"{self._file} is damaged ({error}): move it away; its invitations stay valid until they expire"
            ) from None

    async def add_invitation(self, made: IssuedInvitation) -> None:
        """Add an issued invitation and return when it is durable. The list drops the oldest one above `INVITATIONS_KEPT`."""
        async with self._lock:
            kept = (*self.issued, made)[-INVITATIONS_KEPT:]
            await trio.to_thread.run_sync(self._save, kept)
            self.issued = kept

    def _save(self, made: tuple[IssuedInvitation, ...]) -> None:
        with storage_errors(self._file), durable_files.atomic_write(self._file, 0o600) as stream:
            stream.write(codec.encode(made))

    def find_invitation(self, text: str) -> IssuedInvitation:
        """Return the invitation whose token begins with `text`. Raises `UserError` unless exactly one token does."""
        found = [made for made in self.issued if text.strip() and made.token.startswith(text.strip().lower())]
        if not found:
            raise UserError(f"unknown invitation {text!r}: `invitations` lists the invitations of this peer")
        if len(found) > 1:
            raise UserError(f"{text!r} matches {len(found)} invitations: give more characters of the token, from `invitations`")
        return found[0]
