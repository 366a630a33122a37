"""A network upgrades a module, and one of its voters runs a program that lacks the new version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ledger.core.genesis import Genesis
from ledger.jobs import JobSpecRules
from ledger.ledger_state import LedgerRules, core_modules
from ledger.members import RenameMember
from ledger.network_governance import ModuleUpgrade, NetworkModuleV2, NetworkState
from peer.runtime import driver
from protocol.identity import Verifier
from protocol.limits import UPGRADE_NOTICE_HEIGHTS
from tests.ledger.world import MODULES
from tests.peer.network import Seat, assert_same, network, poll

NETWORK = NetworkModuleV2.name
BEFORE = tuple(replace(module, version=1) if module.name == NETWORK else module for module in MODULES)


def rules_of_before(genesis: Genesis, job_rules: JobSpecRules, verifier: Verifier) -> LedgerRules:
    """Of a program that was written before version 2 of the module."""
    known = [module for module in core_modules(job_rules) if not isinstance(module, NetworkModuleV2)]
    return LedgerRules(genesis, verifier, known)


async def decide_until(seat: Seat, height: int) -> None:
    while seat.driver.state.height < height:
        await seat.author.submit("member/name", RenameMember(f"name {seat.driver.state.height}"))


async def test_a_driver_applies_the_last_block_before_an_upgrade_that_it_lacks_and_the_next_program_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with network(tmp_path, founders=4, start=False, modules=BEFORE) as made:
        *newer, older = made.seats
        for seat in newer:
            await made.start(seat)
        with monkeypatch.context() as patch:
            patch.setattr(driver, "rules_of", rules_of_before)
            await made.start(older)
        upgrade = ModuleUpgrade(NETWORK, 2, newer[0].driver.state.height + len(newer) + UPGRADE_NOTICE_HEIGHTS + 5)
        for seat in newer:
            await seat.author.submit("network/upgrade", upgrade)
        await decide_until(newer[0], upgrade.height + 1)

        # It follows the decisions beyond the upgrade, and gives up applying them at the first one that it cannot judge.
        await poll(lambda: older.driver.replica.height > upgrade.height)
        await older.driver._applying_ended.wait()
        assert older.driver.state.height == upgrade.height - 1
        assert older.driver.replica.is_outdated and older.store.state_root(upgrade.height - 1) == newer[0].store.state_root(
            upgrade.height - 1
        )
        assert f"{NETWORK} 2 from height {upgrade.height}" in older.driver.rules.why_version_unsupported(older.driver.state)

        await older.stop()
        await made.start(older)
        await older.until(lambda driver: driver.state.height > upgrade.height)
        assert older.driver.state.module_state(NetworkState).module_version(NETWORK) == 2
        assert_same(made.seats)
