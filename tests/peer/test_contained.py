"""A bug in a module, at peers of one network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from ledger.blocks.application import ROUND_DEFERRAL_SECONDS
from ledger.core.module import BlockContext, StateChange, StateReader
from ledger.jobs import ClosedRound, JobsModule, StartJob, job_id
from ledger.members import RenameMember
from peer.features import founding_modules
from peer.node.node import StepAction
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from rlhf.ledger.rlhf_module import RlhfModule, RlhfState
from tests.ledger.world import LANGUAGE, PEOPLE
from tests.peer.network import network
from tests.peer.nodes import Pack


async def test_peers_go_on_alike_and_say_it_where_a_module_fails_in_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, state: RlhfState, view: StateReader, context: BlockContext) -> StateChange:
        raise KeyError("planted")

    monkeypatch.setattr(RlhfModule, "settle_block", fails)
    async with network(tmp_path, 3, modules=founding_modules()) as made:
        with trio.fail_after(60):
            for number in range(3):
                await made.seats[0].author.submit("member/rename", RenameMember(f"name {number}"))
            for seat in made.seats:
                while seat.driver.state.height < made.seats[0].driver.state.height:
                    await seat.driver.block_applied.wait()
        roots = {
            seat.driver.state.state_root for seat in made.seats if seat.driver.state.height == made.seats[0].driver.state.height
        }
        assert len(roots) == 1
        for seat in made.seats:
            assert "settle_block of the module rlhf failed: KeyError: 'planted'" in seat.driver.observer.failure
            told = [event.text for event in seat.events.newest_events(1_000) if event.text.startswith("FAILED")]
            assert len(told) == 1, "once, however many blocks it fails in"


def test_a_round_whose_closing_failed_is_closed_later_on_an_idle_network(monkeypatch: pytest.MonkeyPatch) -> None:
    real = JobsModule.settle_block

    def fails(self: Any, state: Any, view: StateReader, context: BlockContext) -> StateChange:
        if context.facts_of(ClosedRound):
            raise KeyError("planted")
        return real(self, state, view, context)

    pack = Pack()
    signed = pack.world.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE))
    pack[0].say(signed)
    pack.until(lambda shell: bool(shell.node.state.jobs.jobs))
    job, height = job_id(signed.signer, pack.world.rules.open_transaction(signed)), pack[0].node.state.height
    monkeypatch.setattr(JobsModule, "settle_block", fails)
    ours = Proposal(job, 0, pack[0].node.state.jobs.jobs[job].model_root, bytes(32), 1, bytes(32), None)
    pack[0].turn(StepAction(lambda: pack[0].node.rounds.publish_proposal(ours, pack.now)))
    pack.settle()
    for shell in pack:
        shell.node.rounds.record_verdict((job, 0), PEOPLE[0].public, Verdict.ACCEPT, pack.now)
        if shell.me != PEOPLE[0].public:
            shell.node.rounds.record_replay_verdict((job, 0), PEOPLE[0].public, Verdict.ACCEPT, pack.now)
    pack.until(lambda shell: shell.node.state.height > height, seconds=3_600.0)
    blocks, started = pack[0].node.state.height, pack.now
    pack.pass_time(10 * ROUND_DEFERRAL_SECONDS)
    blocks = pack[0].node.state.height - blocks
    assert 0 < blocks <= (pack.now - started) / ROUND_DEFERRAL_SECONDS, "it is tried again, and not all the time"
    assert [shell.node.state.jobs.jobs[job].round for shell in pack] == [0] * 4
    monkeypatch.undo()
    pack.pass_time(2 * ROUND_DEFERRAL_SECONDS)
    assert all(shell.node.state.jobs.jobs[job].round for shell in pack)
