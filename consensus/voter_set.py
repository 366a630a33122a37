"""Voter sets and their certificates. n voters tolerate f faulty ones, because any two quorums share an honest voter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Verifier, open_signed, short_id, signing_preimage
from protocol.limits import VOTERS_MAX
from protocol.messages import NO_VIEW, Certificate, Commit, Prepare, Timeout, TimeoutCertificate

V = TypeVar("V", Prepare, Commit)

TIMEOUT_BYTES_MAX = 256  # maximum bytes of a Timeout's body: unverified messages must be small while they wait


def faults_tolerated(n: int) -> int:
    """Return f, the number of faulty voters that n voters tolerate: the largest f with n ≥ 3f + 1."""
    return (n - 1) // 3


def quorum(n: int) -> int:
    """Return q = ⌈(n + f + 1) / 2⌉. Two quorums share at least f + 1 voters, and n − f honest voters always form a quorum."""
    return (n + faults_tolerated(n) + 2) // 2


@dataclass(frozen=True)
class VoterSet:
    """The voters of one height, as ascending keys. `VoterSet.from_keys` sorts the keys."""

    keys: tuple[bytes, ...]  # keys of the voters, ascending

    @classmethod
    def from_keys(cls, keys: Iterable[bytes]) -> VoterSet:
        return cls(tuple(sorted(keys)))

    def __post_init__(self) -> None:
        assert 1 <= len(self.keys) <= VOTERS_MAX, f"{len(self.keys)} voters, allowed 1..{VOTERS_MAX}"
        assert all(left < right for left, right in zip(self.keys, self.keys[1:], strict=False)), "voters must ascend"

    def __contains__(self, key: object) -> bool:
        return key in self.members

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def members(self) -> frozenset[bytes]:
        return frozenset(self.keys)

    @cached_property
    def hash(self) -> bytes:
        return hashlib.sha256(b"folkmoot/voters\x00" + codec.encode(self.keys)).digest()

    @cached_property
    def quorum(self) -> int:
        return quorum(len(self.keys))

    @cached_property
    def faults_tolerated(self) -> int:
        return faults_tolerated(len(self.keys))


def verify_certificate(certificate: Certificate, kind: type[V], voters: VoterSet, chain_id: bytes, verifier: Verifier) -> V:
    """Return the vote that a quorum of `voters` signed. Raises `RemoteProtocolError` if there is no such quorum."""
    vote = codec.decode_message(certificate.vote, (kind,))
    if vote.voters != voters.hash:
        raise RemoteProtocolError("foreign-voters", f"certificate of a different voter set at height {vote.height}")
    if len(certificate.signatures) < voters.quorum:
        raise RemoteProtocolError("no-quorum", f"{len(certificate.signatures)} signatures, quorum {voters.quorum}")
    data = signing_preimage(kind.TAG, chain_id, certificate.vote)
    for signer, signature in certificate.signatures.items():
        if signer not in voters:
            raise RemoteProtocolError("not-a-voter", f"{short_id(signer)} is not a voter at height {vote.height}")
        if not verifier.verify(signer, data, signature):
            raise RemoteProtocolError("bad-signature", f"{kind.TAG} of {short_id(signer)} in a certificate")
    return vote


def covers_timeout(high: Prepare | None, timeout: Timeout) -> bool:
    """Return whether the prepare certificate `high` covers `timeout`, which names this certificate or one of a lower view."""
    if high is None:
        return timeout.high_view == NO_VIEW
    return high.view > timeout.high_view or (high.view, high.block) == (timeout.high_view, timeout.high_block)


def check_timeout_sizes(certificate: TimeoutCertificate) -> None:
    """Raise `RemoteProtocolError` if a timeout is too large. The type `Signed` alone would allow timeouts of a message's size."""
    size = max(len(signed.body) for signed in certificate.timeouts)
    if size > TIMEOUT_BYTES_MAX:
        raise RemoteProtocolError("oversized", f"a timeout of {size} bytes, at most {TIMEOUT_BYTES_MAX} are allowed")


def verify_timeout_certificate(
    certificate: TimeoutCertificate, height: int, view: int, voters: VoterSet, chain_id: bytes, verifier: Verifier
) -> Prepare | None:
    """Return the vote for the block that the leader of `view + 1` must propose again. None: it may propose any block.

    Raises `RemoteProtocolError` if the certificate is invalid.
    """
    high: Prepare | None = None
    if certificate.high is not None:
        high = verify_certificate(certificate.high, Prepare, voters, chain_id, verifier)
        if high.height != height or high.view > view:
            raise RemoteProtocolError("bad-justification", f"prepare certificate of {high.height}.{high.view}")
    signers = set()
    for signed in certificate.timeouts:
        timeout = open_signed(signed, chain_id, verifier, (Timeout,))
        if (timeout.voters, timeout.height, timeout.view) != (voters.hash, height, view) or signed.signer not in voters:
            raise RemoteProtocolError("bad-justification", f"timeout of {timeout.height}.{timeout.view} for {height}.{view}")
        if not covers_timeout(high, timeout):
            raise RemoteProtocolError("bad-justification", f"certificate of view {timeout.high_view} is missing")
        signers.add(signed.signer)
    if len(signers) < voters.quorum or len(signers) != len(certificate.timeouts):
        raise RemoteProtocolError("no-quorum", f"{len(signers)} timeouts, quorum {voters.quorum}")
    return high
