"""The modules of a network and their versions, and the votes by which its voters change them.

The genesis names the modules of the first block. An upgrade vote names a module, a new version, and the height of the first block
on which this version acts. A quorum of equal votes decides the upgrade. A vote must leave `UPGRADE_NOTICE_HEIGHTS` until its
height, so that operators have time to see it.

| subject | becomes | when |
|---|---|---|
| a voter's upgrade vote | replaced | the voter votes again |
| a voter's upgrade vote | void | its author no longer votes, or the notice has become too short for its height |
| a quorum of equal votes | a due upgrade | the last of them is decided |
| a due upgrade | the network's version of the module | before its height is applied (`LedgerRules.with_due_upgrades`) |

A peer whose program lacks a version applies all blocks below the upgrade's height, and signs nothing from that height on.

Voters also set limits (`ledger.core.voted_limit`): this module's limit is `NetworkState.parameters_max`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from consensus.voter_set import VoterSet
from ledger.core.genesis import MODULES_MAX, Genesis, ModuleVersions
from ledger.core.module import BlockContext, DecodedTransaction, Module, Refused, StateChange, StateReader
from ledger.core.voted_limit import LimitTerms, VotedLimit
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

PARAMETERS_LIMIT = "parameters"  # name of the limit on parameters of a new job's model, the only limit of this module


@dataclass(frozen=True, slots=True)
class ModuleUpgrade:
    """`network/upgrade`: a voter's vote that the network runs this version of the module from this height on."""

    module: Name
    version: Annotated[int, Between(1, 2**31)]
    height: Count


@dataclass(frozen=True, slots=True)
class NetworkLimit:
    """`network/limit`: a voter's vote that the limit of this name is `most`. A quorum of equal votes sets the limit.

    The limit applies from the next transaction on. A voter has one vote for each limit. A vote for the present value withdraws
    the voter's former vote.
    """

    name: Name  # name of the limit: `PARAMETERS_LIMIT`
    most: Annotated[int, Between(1, PARAMETERS_ALLOWED_MAX)]


@dataclass(frozen=True, slots=True)
class NetworkState:
    modules: ModuleVersions  # running versions, in the order in which modules act in a block
    # Voter -> its vote for an upgrade.
    upgrade_votes: Annotated[dict[Key, ModuleUpgrade], Length(0, VOTERS_MAX)] = field(default_factory=dict)
    # Upgrades that a quorum has decided, ascending by height and name, at most one for each module.
    due_upgrades: Annotated[tuple[ModuleUpgrade, ...], Length(0, MODULES_MAX)] = ()
    parameters_max: Annotated[int, Between(1, PARAMETERS_ALLOWED_MAX)] = PARAMETERS_ALLOWED
    # Voter -> its vote for a limit.
    limit_votes: Annotated[dict[Key, NetworkLimit], Length(0, VOTERS_MAX)] = field(default_factory=dict)

    def module_version(self, module: str) -> int:
        """Return the version of this module that the network runs. 0: the network has no such module."""
        return next((running.version for running in self.modules if running.name == module), 0)

    @property
    def parameters_limit(self) -> VotedLimit:
        return VotedLimit(self.parameters_max, {voter: wish.most for voter, wish in self.limit_votes.items()})

    def require_parameters_allowed(self, parameters: int) -> None:
        """Raise `Refused` for a job whose model has too many parameters."""
        if parameters > self.parameters_max:
            size = f"the model has {parameters} parameters, but this network allows {self.parameters_max}"
            raise Refused(f"{size}: a quorum of voters can raise that with `peer limit {PARAMETERS_LIMIT} N`")


class NetworkModule(Module[NetworkState]):
    name = "network"
    # Cost in signature checks: each vote is counted with all others.
    costs: ClassVar[Mapping[str, int]] = {"network/upgrade": 4, "network/limit": 4}
    contents: ClassVar[Mapping[str, type]] = {"network/upgrade": ModuleUpgrade, "network/limit": NetworkLimit}
    limits: ClassVar[Mapping[str, LimitTerms]] = {
        PARAMETERS_LIMIT: LimitTerms(
            "network/limit", NetworkLimit, PARAMETERS_ALLOWED_MAX, "the model of a new job may have at most {most} parameters"
        )
    }
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
        """Remove votes of authors that no longer vote, and upgrade votes whose notice would be too short in the next block."""
        voters = view.module_state(MembersState).voters
        upgrades = {
            voter: wish
            for voter, wish in state.upgrade_votes.items()
            if voter in voters and wish.height > context.height + UPGRADE_NOTICE_HEIGHTS
        }
        limit = state.parameters_limit.with_votes_of(voters)
        return StateChange(replace(state, upgrade_votes=upgrades, limit_votes=_limit_votes(limit)))

    def voted_limits(self, state: NetworkState) -> Mapping[str, VotedLimit]:
        return {PARAMETERS_LIMIT: state.parameters_limit}


def _with_upgrade_wish(
    state: NetworkState, wish: ModuleUpgrade, author: bytes, members: MembersState, height: int
) -> NetworkState:
    """Return the state with this voter's upgrade vote. Raises `Refused`."""
    if author not in members.voters:
        raise Refused(f"{short_id(author)} is not a voter, so it cannot vote for an upgrade")
    check_name(wish.module)
    running = state.module_version(wish.module)
    if wish.version <= running:
        raise Refused(f"the network already runs version {running} of {wish.module}")
    joining = sum(not state.module_version(upgrade.module) for upgrade in state.due_upgrades)
    if not running and len(state.modules) + joining >= MODULES_MAX:
        raise Refused(f"the network already has {MODULES_MAX} modules, the maximum")
    if any(upgrade.module == wish.module for upgrade in state.due_upgrades):
        raise Refused(f"an upgrade of {wish.module} is already decided: wait until it takes effect")
    first, last = height + UPGRADE_NOTICE_HEIGHTS, height + UPGRADE_AHEAD_HEIGHTS_MAX
    if not first <= wish.height <= last:
        raise Refused(f"height {wish.height} is outside {first}..{last}: choose a height that leaves operators time to upgrade")
    return _decided(replace(state, upgrade_votes={**state.upgrade_votes, author: wish}), members)


def _with_limit_wish(state: NetworkState, wish: NetworkLimit, author: bytes, voters: VoterSet) -> NetworkState:
    """Return the state with this voter's vote for a limit. Raises `Refused`."""
    if wish.name != PARAMETERS_LIMIT:
        raise Refused(f"unknown limit {wish.name!r}: the only limit is {PARAMETERS_LIMIT!r}")
    limit = state.parameters_limit
    if problem := limit.vote_problem(wish.name, wish.most, author, voters):
        raise Refused(problem)
    limit = limit.with_vote(wish.most, author, voters)
    return replace(state, parameters_max=limit.most, limit_votes=_limit_votes(limit))


def _limit_votes(limit: VotedLimit) -> dict[bytes, NetworkLimit]:
    return {voter: NetworkLimit(PARAMETERS_LIMIT, most) for voter, most in limit.votes.items()}


def _decided(state: NetworkState, members: MembersState) -> NetworkState:
    """Return the state with one more due upgrade if a quorum votes for it.

    A block cannot decide two upgrades at once: two quorums share a voter, which has one vote.
    """
    voters = VoterSet(members.voters)
    counts = Counter(wish for voter, wish in state.upgrade_votes.items() if voter in voters)
    for wish, count in counts.items():
        if count >= voters.quorum:
            due = sorted((*state.due_upgrades, wish), key=lambda upgrade: (upgrade.height, upgrade.module))
            others = {voter: other for voter, other in state.upgrade_votes.items() if other.module != wish.module}
            return replace(state, upgrade_votes=others, due_upgrades=tuple(due))
    return state
