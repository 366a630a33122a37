"""Certificates of any statement, signed by given voters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protocol.identity import Signer, sign_message
from protocol.messages import Certificate


def certificate_of(chain: bytes, statement: Any, signers: Iterable[Signer]) -> Certificate:
    votes = {signer.public: sign_message(signer, chain, statement) for signer in signers}
    return Certificate(next(iter(votes.values())).body, {key: votes[key].signature for key in sorted(votes)})
