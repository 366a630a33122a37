"""Why a link was closed, as the other side said in its last message, in words for a person."""

from __future__ import annotations

import re
from typing import Final

from protocol.codec import decode_message
from protocol.errors import RemoteProtocolError
from protocol.messages import LinkClosing
from transport.wire.framing import Channel, Message

CLOSING_SECONDS: Final = 1.0  # for the last message to arrive: some round trips; then the connection ends anyway

CLOSE_REASON_TEXTS: Final = {
    "banned": "this peer's key is refused there for some minutes, after what it sent",
    "gave-way": "it has as many links as it takes, and members go before strangers",
    "half-open": "too many others were connecting to it",
    "memory-full": "this peer did not take what was sent to it, and held too much memory there",
    "too-busy": "this peer sent more than a stranger may",
    "too-many-links": "it has as many links as it takes",
    "vote-queue-full": "this peer took votes too slowly",
}
_CODE = re.compile(r"[a-z0-9-]+")


class LinkClosedByPeer(RemoteProtocolError):
    """The other side has ended the link and said why: nobody is to blame here."""

    def __init__(self, reason: str) -> None:
        super().__init__("closed", describe_close_reason(reason))


def describe_close_reason(reason: str) -> str:
    """Of what a stranger sent: nothing else of it is shown."""
    code = reason if _CODE.fullmatch(reason) else "for a reason that is no word"
    return f"it closed the link: {CLOSE_REASON_TEXTS.get(reason, code)}"


def raise_if_closed(message: Message) -> None:
    """Raises `LinkClosedByPeer` where the first message on a link is the last."""
    if message.channel is Channel.LINK:
        try:
            closing: LinkClosing = decode_message(message.data, (LinkClosing,))
        except RemoteProtocolError:
            return  # another message, which is read when its turn comes
        raise LinkClosedByPeer(closing.reason)
