"""A network upgrades a module, and one of its voters runs a program that lacks the new version."""

from __future__ import annotations

from pathlib import Path

import pytest

from ledger.core.genesis import Genesis, ModuleVersion
from ledger.jobs import JobSpecRules
from ledger.ledger_state import LedgerRules, core_modules
from ledger.members import RenameMember
from ledger.network_governance import ModuleUpgrade, NetworkState
from protocol.identity import Verifier
from protocol.limits import UPGRADE_NOTICE_HEIGHTS
from tests.ledger.test_upgrades import NamedTallyModule, TallyModule
from tests.ledger.world import MODULES
from tests.peer.network import Seat, assert_same, network, poll

TALLY = TallyModule.name


def first_rules(genesis: Genesis, job_rules: JobSpecRules, verifier: Verifier) -> LedgerRules:
    """Of a program that knows version 1 of the module `tally` alone."""
    return LedgerRules(genesis, verifier, (*core_modules(job_rules), TallyModule()))


def next_rules(genesis: Genesis, job_rules: JobSpecRules, verifier: Verifier) -> LedgerRules:
    """Of a program that knows versions 1 and 2."""
    return LedgerRules(genesis, verifier, (*core_modules(job_rules), TallyModule(), NamedTallyModule()))


async def decide_until(seat: Seat, height: int) -> None:
    while seat.driver.state.height < height:
        await seat.author.submit("member/rename", RenameMember(f"name {seat.driver.state.height}"))


async def test_a_driver_applies_the_last_block_before_an_upgrade_that_it_lacks_and_the_next_program_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with network(tmp_path, founders=4, start=False, modules=(*MODULES, ModuleVersion(TALLY, 1))) as made:
        *newer, older = made.seats
        with monkeypatch.context() as patch:
            patch.setattr("tests.peer.network.rules_of", first_rules)
            await made.start(older)
        monkeypatch.setattr("tests.peer.network.rules_of", next_rules)
        for seat in newer:
            await made.start(seat)
        upgrade = ModuleUpgrade(TALLY, 2, newer[0].driver.state.height + len(newer) + UPGRADE_NOTICE_HEIGHTS + 5)
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
        assert f"{TALLY} 2 from height {upgrade.height}" in older.driver.rules.why_version_unsupported(older.driver.state)

        await older.stop()
        await made.start(older)
        await older.until(lambda driver: driver.state.height > upgrade.height)
        assert older.driver.state.module_state(NetworkState).module_version(TALLY) == 2
        assert_same(made.seats)
