"""A bug in a module, at peers of one network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from ledger.core.module import Change, Context, View
from ledger.members import Rename
from peer.features import founding_modules
from rlhf.module import RlhfModule, RlhfState
from tests.peer.network import network


async def test_peers_go_on_alike_and_say_it_where_a_module_fails_in_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, state: RlhfState, view: View, context: Context) -> Change:
        raise KeyError("planted")

    monkeypatch.setattr(RlhfModule, "settle", fails)
    async with network(tmp_path, 3, modules=founding_modules()) as made:
        with trio.fail_after(60):
            for number in range(3):
                await made.seats[0].author.submit("member/name", Rename(f"name {number}"))
            for seat in made.seats:
                while seat.driver.state.height < made.seats[0].driver.state.height:
                    await seat.driver.applied.wait()
        roots = {seat.driver.state.root for seat in made.seats if seat.driver.state.height == made.seats[0].driver.state.height}
        assert len(roots) == 1
        for seat in made.seats:
            assert "settle of the module rlhf failed: KeyError: 'planted'" in seat.driver.witness.failure
            told = [event.text for event in seat.events.last(1_000) if event.text.startswith("FAILED")]
            assert len(told) == 1, "once, however many blocks it fails in"
