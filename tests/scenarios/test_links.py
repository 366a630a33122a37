"""What a run over links keeps for the next one, and what it finds wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UserError
from scenarios.emulation.link_profiles import PROFILES
from scenarios.links import Run, judged

LAN = PROFILES["lan"]


async def left(run: Run, called: str, figures: dict[str, Any] | None) -> None:
    async def measure() -> dict[str, Any]:
        if figures is None:
            raise UserError("it did not start")
        return figures

    await run.part(LAN, "proxy", called, measure)


@pytest.mark.real("processes")
async def test_what_an_ended_run_has_left_is_not_measured_again_and_what_failed_is(tmp_path: Path) -> None:
    options = argparse.Namespace(json=str(tmp_path / "links.json"))
    options.__dict__.update(peers=4, seed=0, seconds=20.0, rounds=20, trained=3, congestion="cubic")
    first = Run(options, ["proxy"], paces={"proxy": 3.0})
    await left(first, "link", {"round_trip_off": 0.5})
    await left(first, "test rounds", None)
    (trial,) = first.trials.values()
    assert trial.problems == ["round trip +50.0%", "it did not start"]
    second = Run(options, ["proxy"])
    second.resume()
    assert second.paces == first.paces and second.trials["lan proxy"].problems == ["round trip +50.0%"]
    assert not second.lacks(LAN, "proxy", "round_trip_off") and second.lacks(LAN, "proxy", "virtual_off")
    options.rounds = 5
    with pytest.raises(UserError, match="rounds"):
        Run(options, ["proxy"]).resume()


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"round_trip_off": -0.11, "up_off": 0.15, "down_off": -0.15, "virtual_off": 0.25}, ["round trip -11.0%"]),
        ({"round_trip_off": 0.10, "up_off": -0.16, "down_off": 0.16}, ["rate up -16.0%", "rate down +16.0%"]),
        ({"loss": 0.03, "loss_measured": 0.019, "virtual_off": -0.26}, ["virtual rounds -26%", "loss 1.90% instead of 3.00%"]),
        ({"join": 15.1}, ["a join took 15.1 s"]),
        ({"join": 15.0}, []),
    ],
)
def test_each_bound_counts_on_both_sides(figures: dict[str, Any], says: list[str]) -> None:
    assert judged("transatlantic kernel", figures) == says
    assert judged("dsl kernel", figures) == [one for one in says if "join" not in one]
