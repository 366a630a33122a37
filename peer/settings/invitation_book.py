"""The invitations that this peer made, on disk: to list them, and to take one back. No secret is among them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import trio

from ledger.ledger_state import LedgerState
from ledger.members import Invitation, MembersState
from peer.settings.data_directory import storage_errors
from protocol import codec
from protocol.codec import Count, Length
from protocol.errors import RemoteProtocolError, StorageError, UserError
from protocol.identity import Signed, peer_id
from protocol.messages import Address
from storage import durable_files

INVITATIONS_KEPT = 1_024  # the newest: more than one voter's share of the members of all but the smallest networks
OPEN_STATUS = "open"


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
        """How people call it: the public half of what the invitation's string keeps secret."""
        return peer_id(self.invitation.token)

    def outcome(self, state: LedgerState) -> str:
        """What has become of it, by the state alone: that forgets who was admitted or refused when the invitation expires."""
        members, invitation = state.members, self.invitation
        if invitation.expires < state.time_ms:
            return "expired"
        if invitation.token in members.used_tokens:
            return "used"
        if invitation.token in members.revoked_tokens.get(self.signed.signer, {}):
            return "revoked"
        return OPEN_STATUS if _may_invite(members, self.signed.signer) else "without effect: its key does not vote"


def _may_invite(members: MembersState, key: bytes) -> bool:
    return key in members.voters and members.is_current_key(key)


_KEPT: Any = Annotated[tuple[IssuedInvitation, ...], Length(0, INVITATIONS_KEPT)]


class InvitationBook:
    """What a data directory remembers. Raises `StorageError` where the file cannot be read or written."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, trio.Lock()
        self.issued = self._load()

    def _load(self) -> tuple[IssuedInvitation, ...]:
        with storage_errors(self._file):
            data = self._file.read_bytes() if self._file.exists() else codec.encode(())
        try:
            made: tuple[IssuedInvitation, ...] = codec.decode(_KEPT, data)
            assert all(item.invitation.expires >= 0 for item in made)  # what was signed can be read, too
            return made
        except RemoteProtocolError as error:
            raise StorageError(
                f"{self._file} is damaged ({error}): move it away; what it lists stays valid until it expires"
            ) from None

    async def add_invitation(self, made: IssuedInvitation) -> None:
        """Returns when it is durable."""
        async with self._lock:
            kept = (*self.issued, made)[-INVITATIONS_KEPT:]
            await trio.to_thread.run_sync(self._save, kept)
            self.issued = kept

    def _save(self, made: tuple[IssuedInvitation, ...]) -> None:
        with storage_errors(self._file), durable_files.atomic_write(self._file, 0o600) as stream:
            stream.write(codec.encode(made))

    def find_invitation(self, text: str) -> IssuedInvitation:
        """By the token, of which the first characters are enough. Raises `UserError`."""
        found = [made for made in self.issued if text.strip() and made.token.startswith(text.strip().lower())]
        if not found:
            raise UserError(f"no invitation that this peer made begins with {text!r}; `invitations` lists them")
        if len(found) > 1:
            raise UserError(f"{text!r} fits {len(found)} invitations that this peer made; `invitations` lists them")
        return found[0]
