"""A network upgrades a module that one voter lacks, and a peer dies at the worst moments of a block's application."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consensus.effects import load_restart_state
from consensus.inputs import AppliedInput
from consensus.pbft.replica import Replica
from consensus.voter_set import VoterSet
from ledger.core.genesis import Genesis, ModuleVersion
from ledger.jobs import JobSpecRules, StartJob, job_id
from ledger.ledger_state import EMPTY_BODY, LedgerRules, core_modules
from ledger.members import RenameMember
from ledger.network_governance import ModuleUpgrade, NetworkState
from protocol.errors import StorageError
from protocol.identity import Ed25519Verifier, Verifier
from protocol.limits import UPGRADE_NOTICE_HEIGHTS
from tests.ledger.test_upgrades import NamedTallyModule, TallyModule
from tests.ledger.world import MODULES
from tests.peer.chain import Chain
from tests.peer.network import SCRATCH, Seat, assert_same, network, one_root, poll
from tests.waiting import patience
from training.replicated import model_files

TALLY = TallyModule.name


def first_rules(genesis: Genesis, job_rules: JobSpecRules, verifier: Verifier) -> LedgerRules:
    """The rules of a program that knows version 1 of the module `tally` alone."""
    return LedgerRules(genesis, verifier, (*core_modules(job_rules), TallyModule()))


def next_rules(genesis: Genesis, job_rules: JobSpecRules, verifier: Verifier) -> LedgerRules:
    """The rules of a program that knows versions 1 and 2."""
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

        # It follows the decisions beyond the upgrade, and stops applying them at the first one that it cannot judge.
        await poll(lambda: older.driver.replica.height > upgrade.height)
        await older.driver._applying_ended.wait()
        assert older.driver.state.height == upgrade.height - 1
        assert older.driver.replica.is_outdated and older.store.state_root(upgrade.height - 1) == newer[0].store.state_root(
            upgrade.height - 1
        )
        assert f"{TALLY} 2 at height {upgrade.height}" in older.driver.rules.why_version_unsupported(older.driver.state)

        await older.stop()
        await made.start(older)
        await older.until(lambda driver: driver.state.height > upgrade.height)
        assert older.driver.state.module_state(NetworkState).module_version(TALLY) == 2
        assert_same(made.seats)


@pytest.mark.parametrize("applied", [0, 1, 2])
async def test_a_peer_that_died_between_its_model_and_its_state_comes_back_to_the_same_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, applied: int
) -> None:
    """The block starts the job, closes its round, or certifies. The model is on disk already, but the state is older."""
    async with network(tmp_path, founders=4) as made:
        victim, *others = made.seats
        save, saved = victim.store.save_state, 0

        def die(*arguments: Any, **tables: Any) -> None:
            nonlocal saved
            if saved == applied:
                raise StorageError("the power fails")
            saved += 1
            save(*arguments, **tables)

        monkeypatch.setattr(victim.store, "save_state", die)
        job = await others[0].start_job()
        with patience():
            await victim.ended.wait()
        await one_root(others, job)
        assert (await made.start(victim)).driver.state.height < others[0].driver.state.height
        await one_root(made.seats, job)
        await others[2].stop()  # now every quorum needs the peer that came back
        await one_root(made.seats[:3], await others[0].start_job())


async def test_a_peer_whose_machine_stopped_computes_the_models_that_did_not_reach_its_disk(tmp_path: Path) -> None:
    """It computes them from the last durable model, the decided blocks and its payloads."""
    async with network(tmp_path, founders=4) as made:
        victim, *others = made.seats
        start = StartJob(replace(SCRATCH, rounds=60).encode())
        with patience():
            job = job_id(others[0].public, await others[0].author.submit("job/start", start))
        await victim.until(lambda driver: job in driver.state.jobs.jobs and driver.state.jobs.jobs[job].round >= 3)
        await victim.stop()
        reached = victim.driver.state.jobs.jobs[job]
        models = victim.driver.host.round_directory(job, 0).parent
        for file in (file for model in models.iterdir() if not model_files.is_durable(model) for file in model.iterdir()):
            file.write_bytes(bytes(file.stat().st_size))
        again = await made.start(victim)
        assert await again.event("warning", f"computed {reached.round} rounds")
        assert again.driver.host.open_model(job, reached.round).root == reached.model_root
        await again.until(lambda driver: driver.state.jobs.jobs[job].round >= reached.round + 2)


def test_a_wrong_state_is_noticed_after_a_restart_too_however_many_decided_blocks_wait(tmp_path: Path) -> None:
    """Only the block right behind the state shows it. The driver applies nothing on a wrong state, so no later block would."""
    chain = Chain(tmp_path / "chain")
    first = chain.ledger.state
    for _ in range(5):
        chain.decide(EMPTY_BODY)
    applied = AppliedInput(1, bytes(32), (VoterSet(first.members.voters),) * 3)
    restart = load_restart_state(chain.store, 1)
    chain.close()
    assert [decided.height for decided in restart.decided] == [2, 3, 4, 5]
    replica = Replica(chain.people[0], chain.id, Ed25519Verifier(), chain.ledger, applied, restart)
    assert replica.divergence is not None and replica.height == 6
