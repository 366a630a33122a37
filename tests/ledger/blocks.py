"""Ledger without consensus: the block that follows a state, with a certificate that the test makes."""

from __future__ import annotations

from collections.abc import Iterable

from consensus.block import Block, block_digest, encode_block
from consensus.effects import DecidedBlock
from consensus.voter_set import VoterSet
from ledger.ledger_state import BlockBody, LedgerRules, LedgerState, StateTransition, _dated
from protocol.identity import Signer
from protocol.messages import Commit
from tests.consensus.certificates import certificate_of


def decided_after(
    before: LedgerState, parent: DecidedBlock | None, chain: bytes, body: bytes, signers: Iterable[Signer]
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
            before.state_root,
            parent.certificate if parent else None,
            {},
            body,
        )
    )
    digest = block_digest(block)
    return DecidedBlock(height, digest, block, certificate_of(chain, Commit(voters.hash, height, 0, digest), signers))


def stepped(transition: StateTransition) -> list[bytes]:
    """Return the jobs that get a new model."""
    return [*transition.started_jobs, *(closed.job for closed in transition.model_steps), *transition.rolled_back]


def compute_transition(
    rules: LedgerRules, state: LedgerState, height: int, time_ms: int, certified_root: bytes, body: BlockBody
) -> StateTransition:
    """Return the effects of a block with this body. Raises `Refused` or `RemoteProtocolError` if it may not follow `state`."""
    assert height == state.height + 1
    return _dated(rules._effect(state, body), time_ms, certified_root)


def with_rows_of(state: LedgerState, other: LedgerState) -> LedgerState:
    """Return the same state with tables read as those of `other`, which has the same rows."""
    for name, table in state.tables.items():
        table.adopt_rows_of(other.tables[name])
    return state
