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

TRAINER = "trainer"  # role of a member that computes updates and, if it also votes, re-executes updates of other trainers
# The roles of features are defined in the features, and a lightweight voter has no role. The ledger also accepts unknown roles
# and checks only their spelling, so that old and new programs compute the same state.
ROLES_MAX = 8  # roles of one member: each feature defines one or two

Roles = Annotated[tuple[Name, ...], Length(0, ROLES_MAX)]  # ascending, without duplicates


@dataclass(frozen=True, slots=True)
class Founder:
    name: Name
    roles: Roles


MODULES_MAX = 32  # modules of one network: each adds a leaf to the tree under every state root


@dataclass(frozen=True, slots=True)
class ModuleVersion:
    """The name of a module, and the version of the module that the network runs."""

    name: Name
    version: Annotated[int, Between(1, 2**31)]


# Versions in the order in which modules act in a block, each name once.
ModuleVersions = Annotated[tuple[ModuleVersion, ...], Length(0, MODULES_MAX)]


@dataclass(frozen=True, slots=True)
class Genesis:
    network: Name
    created_ms: Count
    salt: Annotated[bytes, Length(16, 16)]  # distinguishes networks with the same name and time
    founders: Annotated[dict[Key, Founder], Length(1, VOTERS_MAX)]  # first voters of the network, by their keys
    modules: ModuleVersions  # modules and versions of the first block

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
