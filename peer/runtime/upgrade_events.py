"""Tells people how the network moves on: what voters wish for, what is decided, what has begun."""

from __future__ import annotations

from dataclasses import dataclass

from ledger.network_governance import PARAMETERS_LIMIT, NetworkState
from peer.runtime.driver import Driver


@dataclass
class UpgradeReporter:
    driver: Driver

    async def run(self) -> None:
        """After every block."""
        before = self._network
        while True:
            applied = self.driver.block_applied
            now = self._network
            if now is not before:
                self._report_changes(before, now)
            before = now
            await applied.wait()

    @property
    def _network(self) -> NetworkState:
        return self.driver.state.module_state(NetworkState)

    def _report_changes(self, before: NetworkState, now: NetworkState) -> None:
        me, add = self.driver.signer.public, self.driver.events.add
        is_voter = me in self.driver.state.members.voters
        for wish in dict.fromkeys(now.upgrade_votes.values()):
            if is_voter and wish not in before.upgrade_votes.values() and now.upgrade_votes.get(me) != wish:
                command = f"`peer upgrade {wish.module} {wish.version} --at {wish.height}`"
                add("network", f"a voter wants {wish.module} {wish.version} from height {wish.height} on: {command} says so, too")
        for upgrade in now.due_upgrades:
            if upgrade not in before.due_upgrades:
                add("network", f"decided: {upgrade.module} {upgrade.version} from height {upgrade.height} on")
        for limit in dict.fromkeys(now.limit_votes.values()):
            if is_voter and limit not in before.limit_votes.values() and now.limit_votes.get(me) != limit:
                wanted = f"{limit.name} {limit.most}"
                add("network", f"a voter wants the limit {wanted}: `peer limit {wanted}` says so, too")
        if now.parameters_max != before.parameters_max:
            add("network", f"decided: models of jobs have {now.parameters_max} {PARAMETERS_LIMIT} at most from now on")
        for running in now.modules:
            if running not in before.modules:
                add("network", f"the network runs {running.name} {running.version} now")
