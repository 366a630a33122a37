"""The light client: proof of the current voters by certified headers, without the blocks between them.

A client knows the voter set of one height, from the genesis or from its own decided blocks. A header in which the set changes
is a link to the next set, and a chain of links proves the voters of a later height. Retired voters could still sign another
chain from the heights at which they voted. A new peer therefore also trusts one recent block, and accepts only chains through it.
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
    """A decided block that a client trusts without proof."""

    height: Count
    digest: Digest


@dataclass(frozen=True, slots=True)
class VerifiedHeader:
    header: BlockHeader
    digest: bytes
    certificate: Certificate


def make_light_block(decided: DecidedBlock, next_voters: VoterSet) -> LightBlock | None:
    """Return the light block that links this block to `next_voters`.

    None: the voter set does not change, or the block names another set.
    """
    header = make_header(decided.decode())
    if header.voters == header.next_voters or header.next_voters != next_voters.hash:
        return None
    return LightBlock(encode_header(header), decided.certificate, next_voters.keys)


class LightClient:
    """A chain of links up to `height`.

    It proves that `voters` decide the next height, and the heights after it until another link.
    """

    def __init__(self, chain_id: bytes, verifier: Verifier, height: int, voters: VoterSet, anchor: TrustedBlock | None) -> None:
        self.height, self.voters = height, voters
        self._chain_id, self._verifier = chain_id, verifier
        self._anchor = anchor if anchor is not None and anchor.height > height else None

    @property
    def pending_trusted_height(self) -> int:
        """Height of the trusted block, if the chain has not reached it yet; 0 otherwise."""
        return self._anchor.height if self._anchor else 0

    def verify_light_block(self, link: LightBlock) -> VerifiedHeader:
        """Add one link. Raises `RemoteProtocolError` if the link does not continue the chain, and then changes nothing."""
        header, digest = decode_header(link.header), header_digest(link.header)
        if header.height <= self.height:
            raise RemoteProtocolError("bad-proof", f"height {header.height} does not follow height {self.height}")
        if header.voters != self.voters.hash:
            raise RemoteProtocolError("foreign-voters", f"the voters of height {header.height} differ from the proven voter set")
        vote = verify_certificate(link.certificate, Commit, self.voters, self._chain_id, self._verifier)
        if (vote.height, vote.block) != (header.height, digest):
            raise RemoteProtocolError("bad-proof", f"the certificate does not match the header of height {header.height}")
        following, keys = self.voters, link.next_voters
        if header.next_voters != header.voters or keys:
            if not keys or any(left >= right for left, right in pairwise(keys)):
                raise RemoteProtocolError("bad-proof", f"the next voters after height {header.height} do not ascend")
            following = VoterSet(keys)
            if following.hash != header.next_voters:
                raise RemoteProtocolError("bad-proof", f"the next voters do not match the header of height {header.height}")
        if self._anchor is not None and header.height >= self._anchor.height:
            if header.height > self._anchor.height:
                passed = f"the proof skips the trusted block of height {self._anchor.height}"
                raise RemoteProtocolError("foreign-chain", passed)
            if digest != self._anchor.digest:
                raise RemoteProtocolError("foreign-chain", f"the block at height {header.height} is not the trusted one")
            self._anchor = None
        self.height, self.voters = header.height, following
        return VerifiedHeader(header, digest, link.certificate)
