"""Which modules a network runs, in which versions, and how its voters move on to others.

The genesis names the modules of the first block. A voter's wish names a module, the version it should run, and the height of the
first block that this version acts on. Once a quorum of the voters has one wish, that is decided, unless fewer than
`UPGRADE_NOTICE_HEIGHTS` are left until then: operators must have time to see it.

| a wish | becomes | when |
|---|---|---|
| of a voter | its former wish is forgotten | it has another one |
| of a voter | nothing | its author votes no more, or the notice is too short for its height |
| of a quorum of voters | an upgrade that is due | the q-th is decided |
| an upgrade that is due | the network's version of the module | before its height is applied (`LedgerRules.with_due_upgrades`) |

A peer whose program lacks a version applies all blocks below that height, and signs nothing at it or above.

Voters also set limits of what the network allows: `NetworkLimit` says how.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from consensus.voter_set import VoterSet
from ledger.core.genesis import MODULES_MAX, Genesis, ModuleVersions
from ledger.core.module import BlockContext, DecodedTransaction, Module, Refused, StateChange, StateReader
from ledger.members import MembersState
from protocol.codec import Between, Count, Key, Length
from protocol.identity import short_id
from protocol.limits import (
    PARAMETERS_ALLOWED,
    PARAMETERS_ALLOWED_MAX,
    UPGRADE_AHEAD_HEIGHTS_MAX,
    UPGRADE_NOTICE_HEIGHTS,
    VOTERS_MAX,
)
from protocol.messages import Name
from protocol.name_validation import check_name

PARAMETERS_LIMIT = "parameters"  # of the model of a job that is started: the one limit there is


@dataclass(frozen=True, slots=True)
class ModuleUpgrade:
    """`network/upgrade`, by a voter: its wish that from this height on the network runs this version of the module."""

    module: Name
    version: Annotated[int, Between(1, 2**31)]
    height: Count


@dataclass(frozen=True, slots=True)
class NetworkLimit:
    """`network/limit`, by a voter: its wish that the network allows no more than `most`.

    A quorum with one wish decides it from the next transaction on. A voter has one wish for each limit. Its wish for what holds
    already takes back another one.
    """

    name: Name  # `PARAMETERS_LIMIT`
    most: Annotated[int, Between(1, PARAMETERS_ALLOWED_MAX)]


@dataclass(frozen=True, slots=True)
class NetworkState:
    modules: ModuleVersions  # in their order inside a block
    upgrade_votes: Annotated[dict[Key, ModuleUpgrade], Length(0, VOTERS_MAX)] = field(default_factory=dict)  # by voter
    # one of a module at most, ascending by height and name
    due_upgrades: Annotated[tuple[ModuleUpgrade, ...], Length(0, MODULES_MAX)] = ()
    parameters_max: Annotated[int, Between(1, PARAMETERS_ALLOWED_MAX)] = PARAMETERS_ALLOWED
    limit_votes: Annotated[dict[Key, NetworkLimit], Length(0, VOTERS_MAX)] = field(default_factory=dict)  # wishes, by voter

    def module_version(self, module: str) -> int:
        """The one that runs; 0 if the network has no such module."""
        return next((running.version for running in self.modules if running.name == module), 0)

    def require_parameters_allowed(self, parameters: int) -> None:
        """Raises `Refused` for a job whose model has too many."""
        if parameters > self.parameters_max:
            size = f"its model has {parameters} parameters, and this network allows {self.parameters_max}"
            raise Refused(f"{size}: `peer limit {PARAMETERS_LIMIT} N` raises that, said by a quorum of its voters")


class NetworkModule(Module[NetworkState]):
    name = "network"
    costs: ClassVar[Mapping[str, int]] = {"network/upgrade": 4, "network/limit": 4}  # all voters' wishes are looked at
    contents: ClassVar[Mapping[str, type]] = {"network/upgrade": ModuleUpgrade, "network/limit": NetworkLimit}
    state_type = NetworkState

    def genesis_state(self, genesis: Genesis) -> NetworkState:
        return NetworkState(genesis.modules)

    def apply_transaction(
        self, state: NetworkState, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        members = view.module_state(MembersState)
        if isinstance(said.content, NetworkLimit):
            return StateChange(_with_limit_wish(state, said.content, said.author, VoterSet(members.voters)))
        return StateChange(_with_upgrade_wish(state, said.content, said.author, members, context.height))

    def settle_block(self, state: NetworkState, view: StateReader, context: BlockContext) -> StateChange:
        """Wishes go with their author's vote, and when the next block would be too late for another one like them."""
        voters = view.module_state(MembersState).voters
        upgrades = {
            voter: wish
            for voter, wish in state.upgrade_votes.items()
            if voter in voters and wish.height > context.height + UPGRADE_NOTICE_HEIGHTS
        }
        limits = {voter: wish for voter, wish in state.limit_votes.items() if voter in voters}
        return StateChange(replace(state, upgrade_votes=upgrades, limit_votes=limits))


def _with_upgrade_wish(
    state: NetworkState, wish: ModuleUpgrade, author: bytes, members: MembersState, height: int
) -> NetworkState:
    """Raises `Refused`."""
    if author not in members.voters:
        raise Refused(f"{short_id(author)} does not vote, so it cannot wish for an upgrade")
    check_name(wish.module)
    running = state.module_version(wish.module)
    if wish.version <= running:
        raise Refused(f"the network runs {wish.module} {running} already")
    joining = sum(not state.module_version(upgrade.module) for upgrade in state.due_upgrades)
    if not running and len(state.modules) + joining >= MODULES_MAX:
        raise Refused(f"the network has {MODULES_MAX} modules, the most it can hold")
    if any(upgrade.module == wish.module for upgrade in state.due_upgrades):
        raise Refused(f"an upgrade of {wish.module} is decided already, and has to be over first")
    first, last = height + UPGRADE_NOTICE_HEIGHTS, height + UPGRADE_AHEAD_HEIGHTS_MAX
    if not first <= wish.height <= last:
        raise Refused(f"height {wish.height} is not within {first} and {last}: name one that leaves operators time")
    return _decided(replace(state, upgrade_votes={**state.upgrade_votes, author: wish}), members)


def _with_limit_wish(state: NetworkState, wish: NetworkLimit, author: bytes, voters: VoterSet) -> NetworkState:
    """Raises `Refused`."""
    if author not in voters.members:
        raise Refused(f"{short_id(author)} does not vote, so it cannot set a limit")
    if wish.name != PARAMETERS_LIMIT:
        raise Refused(f"there is no limit {wish.name!r}: {PARAMETERS_LIMIT!r} is one")
    others = {voter: other for voter, other in state.limit_votes.items() if voter != author}
    if wish.most == state.parameters_max:
        if len(others) == len(state.limit_votes):
            raise Refused(f"the network allows {wish.most} {PARAMETERS_LIMIT} already")
        return replace(state, limit_votes=others)
    limits = {**others, author: wish}
    if sum(limits.get(voter) == wish for voter in voters.members) >= voters.quorum:
        return replace(state, parameters_max=wish.most, limit_votes={})
    return replace(state, limit_votes=limits)


def _decided(state: NetworkState, members: MembersState) -> NetworkState:
    """An upgrade that a quorum wishes is due. There is never a second one: two quorums share a voter, and each has one wish."""
    voters = VoterSet(members.voters)
    counts = Counter(wish for voter, wish in state.upgrade_votes.items() if voter in voters)
    for wish, count in counts.items():
        if count >= voters.quorum:
            due = sorted((*state.due_upgrades, wish), key=lambda upgrade: (upgrade.height, upgrade.module))
            others = {voter: other for voter, other in state.upgrade_votes.items() if other.module != wish.module}
            return replace(state, upgrade_votes=others, due_upgrades=tuple(due))
    return state
