"""Annotators sign these statements with their own keys. Serving peers carry these statements; nobody else can make one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from curation.limits import NAME_CHARACTERS_MAX, SALT_BYTES
from protocol.codec import Count, Digest, Key, Length

Pseudonym = Annotated[str, Length(1, NAME_CHARACTERS_MAX)]
Nonce = Annotated[bytes, Length(16, 16)]
Salt = Annotated[bytes, Length(SALT_BYTES, SALT_BYTES)]


@dataclass(frozen=True, slots=True)
class EnrolStatement:
    """I want to annotate in this network under this name, and begin at this peer."""

    TAG: ClassVar[str] = "enrol"
    name: Pseudonym
    peer: Key
    custodial: bool  # the peer keeps the key for me, and could sign in my place


@dataclass(frozen=True, slots=True)
class SessionStatement:
    """This peer may take leases of tasks for me until then."""

    TAG: ClassVar[str] = "session"
    peer: Key
    nonce: Nonce  # that the peer gave me
    expires_ms: Count


@dataclass(frozen=True, slots=True)
class AnnotationStatement:
    """My answer to the assignment is the one that this commits to, see `answers.commitment`."""

    TAG: ClassVar[str] = "annotation"
    assignment: Digest
    commitment: Digest
