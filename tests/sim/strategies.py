"""Liars. Each runs the real replica and changes what leaves it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from consensus.block import block_digest, decode_block, encode_block
from consensus.turn import Send
from protocol import codec
from protocol.identity import Signer, sign
from protocol.messages import NO_VIEW, Commit, Prepare, Propose, Proposed, TimedOut, Timeout, Vote

Strategy = Callable[[Signer, bytes, Send], list[Send]]  # signer, chain id, what an honest node would send


def honest(signer: Signer, chain_id: bytes, send: Send) -> list[Send]:
    return [send]


def silent(signer: Signer, chain_id: bytes, send: Send) -> list[Send]:
    return []


def silent_leader(signer: Signer, chain_id: bytes, send: Send) -> list[Send]:
    return [] if isinstance(send.message, Proposed) else [send]


def forgetful(signer: Signer, chain_id: bytes, send: Send) -> list[Send]:
    """Hides the prepare certificate it holds."""
    if not isinstance(send.message, TimedOut):
        return [send]
    timeout = codec.decode_message(send.message.timeout.body, (Timeout,))
    without = dataclasses.replace(timeout, high_view=NO_VIEW, high_block=None)
    return [Send(send.to, TimedOut(sign(signer, chain_id, without), None))]


def equivocator(signer: Signer, chain_id: bytes, send: Send) -> list[Send]:
    """Proposes two blocks, each to one half, and votes in both phases for both, to everybody."""
    if isinstance(send.message, Proposed):
        return _two_blocks(signer, chain_id, send, send.message)
    return forgetful(signer, chain_id, send)


def _two_blocks(signer: Signer, chain_id: bytes, send: Send, message: Proposed) -> list[Send]:
    propose = codec.decode_message(message.propose.body, (Propose,))
    block = decode_block(message.block)
    other = encode_block(dataclasses.replace(block, time_ms=block.time_ms + 1))
    second = dataclasses.replace(propose, block=block_digest(other))
    half = max(1, len(send.to) // 2)
    sends = [
        Send(send.to[:half], message),
        Send(send.to[half:], Proposed(sign(signer, chain_id, second), other, message.justification)),
    ]
    for kept in (propose, second):
        part = send.to[:half] if kept is propose else send.to[half:]
        for kind in (Prepare, Commit):
            vote = kind(kept.voters, kept.height, kept.view, kept.block)
            sends.append(Send(part, Vote(sign(signer, chain_id, vote))))
    return sends


LIARS: tuple[Strategy, ...] = (silent, silent_leader, forgetful, equivocator)
