"""A peer that dies at the worst moments of applying a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from protocol.errors import StorageError
from tests.peer.network import SECONDS_MAX, network, one_root


@pytest.mark.parametrize("applied", [0, 1, 2])
async def test_a_peer_that_died_between_its_model_and_its_state_comes_back_to_the_same_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, applied: int
) -> None:
    """The block starts the job, closes its round, or certifies: its model is on disk already, the state is that of before."""
    async with network(tmp_path, founders=4) as made:
        victim, *others = made.seats
        save, saved = victim.store.save_state, 0

        def die(*arguments: Any) -> None:
            nonlocal saved
            if saved == applied:
                raise StorageError("the power fails")
            saved += 1
            save(*arguments)

        monkeypatch.setattr(victim.store, "save_state", die)
        job = await others[0].scratch()
        with trio.fail_after(SECONDS_MAX):
            await victim.ended.wait()
        await one_root(others, job)
        again = await made.start(victim)
        assert again.driver.state.height < others[0].driver.state.height
        await one_root(made.seats, job)
        await others[2].stop()  # now the one that came back is needed for every quorum
        remaining = made.seats[:3]
        await one_root(remaining, await others[0].scratch())
