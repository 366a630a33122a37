"""A program with one more feature, which counts closed rounds: `python -m scenarios.tally VERSION run …` is its `peer run …`.

VERSION 1 only knows the module's first version. VERSION 2 knows both, as a later release of the program would.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from features.feature import Feature
from ledger.core.genesis import Genesis
from ledger.core.module import BlockContext, Module, StateChange, StateReader
from ledger.jobs import ClosedRound, JobSpecRules
from peer import cli, features
from protocol.codec import Count

NAME = "tally"


@dataclass(frozen=True, slots=True)
class Rounds:
    closed: Count = 0


@dataclass(frozen=True, slots=True)
class Updates:
    closed: Count
    accepted: Count = 0  # since the upgrade


class CountsRounds(Module[Rounds]):
    name = NAME
    contents: ClassVar[Mapping[str, type]] = {}
    state_type = Rounds

    def genesis_state(self, genesis: Genesis) -> Rounds:
        return Rounds()

    def settle_block(self, state: Rounds, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(Rounds(state.closed + len(context.facts_of(ClosedRound))))


class CountsUpdates(Module[Updates]):
    name = NAME
    version = 2
    contents: ClassVar[Mapping[str, type]] = {}
    state_type = Updates

    def genesis_state(self, genesis: Genesis) -> Updates:
        return Updates(0)

    def upgrade_state(self, old: Rounds, version: int) -> Updates:
        assert version == CountsRounds.version
        return Updates(old.closed)

    def settle_block(self, state: Updates, view: StateReader, context: BlockContext) -> StateChange:
        closed = context.facts_of(ClosedRound)
        accepted = sum(len(item.outcome.accepted) for item in closed)
        return StateChange(replace(state, closed=state.closed + len(closed), accepted=state.accepted + accepted))


def install(version: int) -> None:
    """Make this process the program of that version."""
    versions: tuple[Module[Any], ...] = (CountsRounds(), CountsUpdates())
    known = versions[:version]

    def modules(rules: JobSpecRules) -> tuple[Module[Any], ...]:
        return known

    others = [feature for feature in features.FEATURES if feature.name != NAME]
    features.FEATURES[:] = [*others, Feature(name=NAME, about="counts closed rounds", modules=modules)]


if __name__ == "__main__":
    install(int(sys.argv[1]))
    sys.exit(cli.main(sys.argv[2:]))
