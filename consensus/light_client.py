"""Proof of who decides: a chain of certified headers from one voter set to the next, without the blocks between them.

Who knows the set of one height, from the genesis or from its own decided blocks, follows the links to any later height. Keys that
have retired could still sign another chain from where they voted: a newcomer therefore also trusts one recent block, its anchor,
and takes no chain that does not go through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from consensus.block import BlockHeader, decode_header, encode_header, header_digest, make_header
from consensus.effects import DecidedBlock
from consensus.voter_set import VoterSet, verify_certificate
from protocol.codec import Count, Digest
from protocol.errors import RemoteProtocolError
from protocol.identity import Verifier
from protocol.messages import Certificate, Commit, LightBlock


@dataclass(frozen=True, slots=True)
class TrustedBlock:
    """A decided block that is trusted without proof."""

    height: Count
    digest: Digest


@dataclass(frozen=True, slots=True)
class VerifiedHeader:
    header: BlockHeader
    digest: bytes
    certificate: Certificate


def make_light_block(decided: DecidedBlock, next_voters: VoterSet) -> LightBlock | None:
    """What proves that `next_voters` decide the height after this block; None if they are the same, or others are named."""
    header = make_header(decided.decode())
    if header.voters == header.next_voters or header.next_voters != next_voters.hash:
        return None
    return LightBlock(encode_header(header), decided.certificate, next_voters.keys)


class LightClient:
    """What is proven so far: `voters` decide the height after `height`, as far as no later link says otherwise."""

    def __init__(self, chain_id: bytes, verifier: Verifier, height: int, voters: VoterSet, anchor: TrustedBlock | None) -> None:
        self.height, self.voters = height, voters
        self._chain_id, self._verifier = chain_id, verifier
        self._anchor = anchor if anchor is not None and anchor.height > height else None

    @property
    def pending_trusted_height(self) -> int:
        """What the proof must still go through; 0: nothing."""
        return self._anchor.height if self._anchor else 0

    def verify_light_block(self, link: LightBlock) -> VerifiedHeader:
        """Takes one link. Raises `RemoteProtocolError`, and stays where it is, if it proves nothing here."""
        header, digest = decode_header(link.header), header_digest(link.header)
        if header.height <= self.height:
            raise RemoteProtocolError("bad-proof", f"height {header.height} after {self.height}")
        if header.voters != self.voters.hash:
            raise RemoteProtocolError("foreign-voters", f"height {header.height} was decided by another set than was named")
        vote = verify_certificate(link.certificate, Commit, self.voters, self._chain_id, self._verifier)
        if (vote.height, vote.block) != (header.height, digest):
            raise RemoteProtocolError("bad-proof", f"the certificate is of another block than the header of {header.height}")
        following, keys = self.voters, link.next_voters
        if header.next_voters != header.voters or keys:
            if not keys or any(left >= right for left, right in pairwise(keys)):
                raise RemoteProtocolError("bad-proof", f"the next voters of {header.height} do not ascend")
            following = VoterSet(keys)
            if following.hash != header.next_voters:
                raise RemoteProtocolError("bad-proof", f"other next voters than the header of {header.height} names")
        if self._anchor is not None and header.height >= self._anchor.height:
            if header.height > self._anchor.height:
                passed = f"the proof passes by the trusted block of height {self._anchor.height}"
                raise RemoteProtocolError("foreign-chain", passed)
            if digest != self._anchor.digest:
                raise RemoteProtocolError("foreign-chain", f"another block at height {header.height} than the trusted one")
            self._anchor = None
        self.height, self.voters = header.height, following
        return VerifiedHeader(header, digest, link.certificate)
