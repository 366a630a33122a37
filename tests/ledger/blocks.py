"""Ledger without consensus: the block that follows a state, and its certificate, because the test says so."""

from __future__ import annotations

from collections.abc import Iterable

from consensus.block import Block, block_digest, encode_block
from consensus.effects import DecidedBlock
from consensus.voter_set import VoterSet
from ledger.state import State, Transition
from protocol.identity import Signer
from protocol.messages import Commit
from tests.consensus.certificates import certificate_of


def decided_after(
    before: State, parent: DecidedBlock | None, chain: bytes, body: bytes, signers: Iterable[Signer]
) -> DecidedBlock:
    height, voters = before.height + 1, VoterSet(before.members.voters)
    block = encode_block(
        Block(
            height,
            parent.digest if parent else chain,
            before.time_ms + 1,
            voters.keys[0],
            voters.hash,
            VoterSet(before.members.upcoming).hash,
            before.root,
            parent.certificate if parent else None,
            {},
            body,
        )
    )
    digest = block_digest(block)
    return DecidedBlock(height, digest, block, certificate_of(chain, Commit(voters.hash, height, 0, digest), signers))


def stepped(transition: Transition) -> list[bytes]:
    """The jobs that get a new model."""
    return [*transition.started, *(closed.job for closed in transition.steps), *transition.back]
