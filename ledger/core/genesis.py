"""The genesis of a network: the data that its peers agree on before the first block. Its hash is the chain id."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

from consensus.voter_set import VoterSet
from protocol.codec import Between, Count, Key, Length, decode, encode
from protocol.errors import RemoteProtocolError
from protocol.limits import VOTERS_MAX
from protocol.messages import Name
from protocol.name_validation import check_name

TRAINER = "trainer"  # computes updates; if it also votes, it re-executes those of other trainers
# A lightweight voter has no role beside its vote. Features define the other roles. The ledger also keeps roles that this program
# does not know and checks only their spelling, so that old and new programs compute the same state.
ROLES_MAX = 8  # roles of one member; a feature has one or two

Roles = Annotated[tuple[Name, ...], Length(0, ROLES_MAX)]  # ascending, each once


@dataclass(frozen=True, slots=True)
class Founder:
    name: Name
    roles: Roles


MODULES_MAX = 32  # modules of one network; each is a leaf under every state root


@dataclass(frozen=True, slots=True)
class ModuleVersion:
    """A module of a network and the version of it that the network runs."""

    name: Name
    version: Annotated[int, Between(1, 2**31)]


ModuleVersions = Annotated[tuple[ModuleVersion, ...], Length(0, MODULES_MAX)]  # in their order inside a block, each name once


@dataclass(frozen=True, slots=True)
class Genesis:
    network: Name
    created_ms: Count
    salt: Annotated[bytes, Length(16, 16)]  # distinguishes networks with one name and time
    founders: Annotated[dict[Key, Founder], Length(1, VOTERS_MAX)]  # the first voters
    modules: ModuleVersions  # modules of the first block

    @property
    def chain_id(self) -> bytes:
        return hashlib.sha256(b"folkmoot/genesis\x00" + encode(self)).digest()

    @property
    def voters(self) -> VoterSet:
        return VoterSet(tuple(sorted(self.founders)))

    @classmethod
    def decode(cls, data: bytes) -> Genesis:
        genesis = decode(cls, data)
        check_name(genesis.network)
        for founder in genesis.founders.values():
            check_name(founder.name)
            check_roles(founder.roles)
        names = [module.name for module in genesis.modules]
        for name in names:
            check_name(name)
        if len(set(names)) < len(names):
            raise RemoteProtocolError("bad-genesis", f"a module is listed twice: {names}")
        return genesis


def check_roles(roles: tuple[str, ...]) -> None:
    for role in roles:
        check_name(role)
    if list(roles) != sorted(set(roles)):
        raise RemoteProtocolError("bad-roles", f"roles {roles} must ascend, without duplicates")
