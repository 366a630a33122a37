"""The scenarios themselves, small: real processes over real sockets."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from scenarios import bad_input, kill


async def test_a_killed_peer_comes_back_and_has_signed_nothing_twice(tmp_path: Path) -> None:
    report = tmp_path / "kill.json"
    options = argparse.Namespace(peers=4, malicious=0, trials=1, seed=1, small=True, keep=tmp_path / "peers", json=str(report))
    await kill.run(options)
    found = json.loads(report.read_text())
    # Times are the scenario's own command's affair: a machine that runs tests is busy.
    assert [failure for failure in found["failures"] if " took " not in failure and " take " not in failure] == []
    assert found["trials"][0]["votes"] > 10


def test_a_busy_port_is_one_line_and_the_peer_starts_afterwards(tmp_path: Path) -> None:
    place = bad_input.Place(tmp_path / "peer")
    place.found()
    height = place.height()
    case = bad_input.Case("busy port")
    bad_input.busy_port(place, case)
    assert case.problem == ""
    place.start()
    place.decide()
    place.stop()
    assert place.height() > height


def test_a_traceback_is_never_what_a_person_sees() -> None:
    for status, errors in ((0, "peer: error: x"), (1, "Traceback\npeer: error: x"), (2, "x"), (2, "peer: error: y")):
        case = bad_input.Case("planted")
        bad_input.judge(case, status, errors, "x")
        assert case.problem, errors
    case = bad_input.Case("right")
    bad_input.judge(case, 2, "INFO\npeer: error: x, do y", "x", "y")
    assert case.problem == ""
