"""Which modules a network runs, in which versions, and how its voters move on to others.

The genesis names the modules of the first block. A voter's wish names a module, the version it should run, and the height of the
first block that this version acts on. Once a quorum of the voters has one wish, that is decided, unless fewer than
`UPGRADE_NOTICE_HEIGHTS` are left until then: operators must have time to see it.

| a wish | becomes | when |
|---|---|---|
| of a voter | its former wish is forgotten | it has another one |
| of a voter | nothing | its author votes no more, or the notice is too short for its height |
| of a quorum of voters | an upgrade that is due | the q-th is decided |
| an upgrade that is due | the network's version of the module | the block before the named height is applied (`Rules.begun`) |

A peer whose program lacks a version applies all blocks below that height, and signs nothing at it or above.

From version 2 of this module on, voters also set limits of what the network allows: `Limit` says how.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from consensus.voter_set import VoterSet
from ledger.core.genesis import MODULES_MAX, Genesis, ModuleVersion, ModuleVersions
from ledger.core.module import Change, Context, Module, Refused, Said, View
from ledger.members import MembersState
from protocol import codec
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

# Of the module `audits`: from it on windows are counted in seconds, too, judges that did not see a step are told apart from those
# that found it false, proposals commit to losses, and reports carry one.
SECOND_AUDITS = 2
PARAMETERS = "parameters"  # of the model of a job that is started: the one limit there is
# Of the module `jobs`: from it on models may have other forms, and proposals name objects of more than 512 MiB.
THIRD_JOBS = 3


@dataclass(frozen=True, slots=True)
class Upgrade:
    """`network/upgrade`, by a voter: its wish that from this height on the network runs this version of the module."""

    module: Name
    version: Annotated[int, Between(1, 2**31)]
    height: Count


@dataclass(frozen=True, slots=True)
class Limit:
    """`network/limit`, by a voter: its wish that the network allows no more than `most`.

    A quorum with one wish decides it from the next transaction on. A voter has one wish for each limit. Its wish for what holds
    already takes back another one.
    """

    name: Name  # `PARAMETERS`
    most: Annotated[int, Between(1, PARAMETERS_ALLOWED_MAX)]


@dataclass(frozen=True, slots=True)
class NetworkState:
    modules: ModuleVersions  # in their order inside a block
    wishes: Annotated[dict[Key, Upgrade], Length(0, VOTERS_MAX)] = field(default_factory=dict)  # by voter
    due: Annotated[tuple[Upgrade, ...], Length(0, MODULES_MAX)] = ()  # one of a module at most, ascending by height and name
    parameters_max: Annotated[int, Between(1, PARAMETERS_ALLOWED_MAX)] = codec.added_field(PARAMETERS_ALLOWED)
    limits: Annotated[dict[Key, Limit], Length(0, VOTERS_MAX)] = codec.added_field(factory=dict)  # wishes, by voter

    def version(self, module: str) -> int:
        """The one that runs; 0 if the network has no such module."""
        return next((running.version for running in self.modules if running.name == module), 0)

    @property
    def has_second_audits(self) -> bool:
        return self.version("audits") >= SECOND_AUDITS

    @property
    def has_models(self) -> bool:
        """Whether jobs may have the models, and name the objects, that version 3 of `jobs` brought."""
        return self.version("jobs") >= THIRD_JOBS

    def require_allowed(self, parameters: int) -> None:
        """Raises `Refused` for a job whose model has too many."""
        if parameters > self.parameters_max:
            size = f"its model has {parameters} parameters, and this network allows {self.parameters_max}"
            raise Refused(f"{size}: `peer limit {PARAMETERS} N` raises that, said by a quorum of its voters")

    def due_at(self, height: int) -> tuple[Upgrade, ...]:
        """The upgrades that the block of this height begins with."""
        return tuple(upgrade for upgrade in self.due if upgrade.height <= height)

    def moved_on(self, upgrade: Upgrade) -> NetworkState:
        """With the upgraded module. One that joins acts after all others."""
        assert upgrade in self.due
        made = ModuleVersion(upgrade.module, upgrade.version)
        known = upgrade.module in {running.name for running in self.modules}
        modules = tuple(made if running.name == upgrade.module else running for running in self.modules)
        return replace(
            self,
            modules=modules if known else (*modules, made),
            due=tuple(other for other in self.due if other != upgrade),
        )

    def without(self, upgrade: Upgrade) -> NetworkState:
        """An upgrade that fails is over. The version of before goes on, and voters may decide another upgrade."""
        return replace(self, due=tuple(other for other in self.due if other != upgrade))


class NetworkModule(Module[NetworkState]):
    name = "network"
    costs: ClassVar[Mapping[str, int]] = {"network/upgrade": 4, "network/limit": 4}  # all voters' wishes are looked at
    contents: ClassVar[Mapping[str, type]] = {"network/upgrade": Upgrade}
    state_type = NetworkState

    def genesis(self, genesis: Genesis) -> NetworkState:
        return NetworkState(genesis.modules)

    def apply(self, state: NetworkState, said: Said, view: View, context: Context) -> Change:
        wish, author, members = said.content, said.author, view.of(MembersState)
        if author not in members.voters:
            raise Refused(f"{short_id(author)} does not vote, so it cannot wish for an upgrade")
        check_name(wish.module)
        running = state.version(wish.module)
        if wish.version <= running:
            raise Refused(f"the network runs {wish.module} {running} already")
        if not running and len(state.modules) + len(_joining(state)) >= MODULES_MAX:
            raise Refused(f"the network has {MODULES_MAX} modules, the most it can hold")
        if any(upgrade.module == wish.module for upgrade in state.due):
            raise Refused(f"an upgrade of {wish.module} is decided already, and has to be over first")
        first, last = context.height + UPGRADE_NOTICE_HEIGHTS, context.height + UPGRADE_AHEAD_HEIGHTS_MAX
        if not first <= wish.height <= last:
            raise Refused(f"height {wish.height} is not within {first} and {last}: name one that leaves operators time")
        return Change(_decided(replace(state, wishes={**state.wishes, author: wish}), members))

    def settle(self, state: NetworkState, view: View, context: Context) -> Change:
        """Wishes go with their author's vote, and when the next block would be too late for another one like them."""
        voters = view.of(MembersState).voters
        kept = {
            voter: wish
            for voter, wish in state.wishes.items()
            if voter in voters and wish.height > context.height + UPGRADE_NOTICE_HEIGHTS
        }
        return Change(replace(state, wishes=kept))


class NetworkOfLimitsModule(NetworkModule):
    version = 2
    contents: ClassVar[Mapping[str, type]] = {**NetworkModule.contents, "network/limit": Limit}

    def upgraded(self, old: NetworkState, version: int) -> NetworkState:
        return old

    def apply(self, state: NetworkState, said: Said, view: View, context: Context) -> Change:
        if not isinstance(said.content, Limit):
            return super().apply(state, said, view, context)
        wish, author, voters = said.content, said.author, VoterSet(view.of(MembersState).voters)
        if author not in voters.members:
            raise Refused(f"{short_id(author)} does not vote, so it cannot set a limit")
        if wish.name != PARAMETERS:
            raise Refused(f"there is no limit {wish.name!r}: {PARAMETERS!r} is one")
        others = {voter: other for voter, other in state.limits.items() if voter != author}
        if wish.most == state.parameters_max:
            if len(others) == len(state.limits):
                raise Refused(f"the network allows {wish.most} {PARAMETERS} already")
            return Change(replace(state, limits=others))
        limits = {**others, author: wish}
        if sum(limits.get(voter) == wish for voter in voters.members) >= voters.quorum:
            return Change(replace(state, parameters_max=wish.most, limits={}))
        return Change(replace(state, limits=limits))

    def settle(self, state: NetworkState, view: View, context: Context) -> Change:
        """Wishes go with their author's vote."""
        settled, voters = super().settle(state, view, context).state, view.of(MembersState).voters
        return Change(replace(settled, limits={voter: wish for voter, wish in settled.limits.items() if voter in voters}))


def _decided(state: NetworkState, members: MembersState) -> NetworkState:
    """An upgrade that a quorum wishes is due. There is never a second one: two quorums share a voter, and each has one wish."""
    voters = VoterSet(members.voters)
    counts = Counter(wish for voter, wish in state.wishes.items() if voter in voters)
    for wish, count in counts.items():
        if count >= voters.quorum:
            due = sorted((*state.due, wish), key=lambda upgrade: (upgrade.height, upgrade.module))
            others = {voter: other for voter, other in state.wishes.items() if other.module != wish.module}
            return replace(state, wishes=others, due=tuple(due))
    return state


def _joining(state: NetworkState) -> list[Upgrade]:
    return [upgrade for upgrade in state.due if not state.version(upgrade.module)]
