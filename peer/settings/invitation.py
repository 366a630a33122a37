"""The one string that lets somebody join: the genesis, where to dial, and a permission that works once."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Annotated

from consensus.light_client import TrustedBlock
from ledger.core.genesis import Genesis
from ledger.members import AdmitMember, Invitation, token_preimage
from protocol import codec
from protocol.addresses import check_dialable_address
from protocol.codec import Length
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Identity, Signed, Signer, sign_message
from protocol.limits import ADVERTISED_MAX
from protocol.messages import Address

INVITATION_PREFIX = "folkmoot1:"
DAY_MS = 86_400_000
INVITATION_BYTES_MAX = 64 << 10  # an invitation into a network of 200 founders is about 20 kB


@dataclass(frozen=True, slots=True)
class InvitationString:
    genesis: Genesis
    addresses: Annotated[tuple[Address, ...], Length(1, ADVERTISED_MAX)]
    invitation: Signed
    token_seed: Annotated[bytes, Length(32, 32)]  # whoever holds it can join, so it is as secret as the string
    anchor: (
        TrustedBlock | None
    )  # the last block that the inviter had applied: whoever trusts the invitation takes no history without it


def make_invitation(
    signer: Signer, genesis: Genesis, expires_ms: int, addresses: tuple[str, ...], anchor: TrustedBlock | None = None
) -> InvitationString:
    token = Identity.generate()
    signed = sign_message(signer, genesis.chain_id, Invitation(token.public, expires_ms))
    return InvitationString(genesis, addresses, signed, token.seed, anchor)


def invitation_text(invitation: InvitationString) -> str:
    """What people pass on."""
    return _text(zlib.compress(codec.encode(invitation), 9))


def _text(packed: bytes) -> str:
    return INVITATION_PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def parse_invitation(text: str) -> InvitationString:
    """`UserError` for text that is no whole invitation."""
    text = "".join(text.split())
    try:
        if not text.startswith(INVITATION_PREFIX):
            raise ValueError("prefix")
        packed = base64.urlsafe_b64decode(text.removeprefix(INVITATION_PREFIX) + "===")
        if _text(packed) != text.rstrip("="):  # decoding skips what is not base64
            raise ValueError("base64")
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, INVITATION_BYTES_MAX)
        if unpacker.unconsumed_tail or unpacker.unused_data or not unpacker.eof:
            raise ValueError("length")
        invitation = codec.decode(InvitationString, data)
        Genesis.decode(codec.encode(invitation.genesis))  # which also checks what types do not say
        for address in invitation.addresses:
            check_dialable_address(address, "the invitation")
        return invitation
    except (ValueError, zlib.error, RemoteProtocolError):
        shown = text if len(text) <= 24 else f"{text[:16]}…{text[-6:]}"
        raise UserError(f"{shown!r} is not a whole invitation: paste everything that `peer invite` printed") from None


def make_admission(invitation: InvitationString, newcomer: bytes, name: str) -> AdmitMember:
    """What the newcomer puts on the log. It registers its roles when it first runs with them."""
    token = Identity(invitation.token_seed)
    signature = token.sign(token_preimage(invitation.genesis.chain_id, newcomer))
    return AdmitMember(invitation.invitation, signature, name, ())
