from __future__ import annotations

import pytest

from benchmarks.virtual import Costs, Network, limit
from consensus.quorum import faults_tolerated

FREE = Costs(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # what is left is what the turns themselves take on this machine
LINE_BITS = 100e6
LATE_SECONDS = 1.0  # beyond the limit: a busy machine is slow, a lost view costs more than this


@pytest.mark.parametrize("n", [4, 7])
def test_a_decision_takes_four_delays_and_verifies_each_signature_once(n: int) -> None:
    network = Network(n, 10.0, LINE_BITS, FREE)  # seconds: nothing that is computed here comes near them
    network.begin()
    height = network.round(0)
    assert height.views == 1
    assert all(0 <= seconds - limit(network, height) < LATE_SECONDS for seconds in height.from_verdicts)
    others = 3 * (n - 1)  # their ballots, prepares and commits
    own = 3  # update, ballot and commit of its own come back in blocks and certificates
    assert height.spent.verified <= n * (others + own) + n - 1  # and the leader's word to everybody else


def test_silent_voters_are_led_past_after_two_heights() -> None:
    n = 7
    network = Network(n, 0.1, LINE_BITS, FREE, silent=faults_tolerated(n))
    network.begin()
    views = [network.round(number).views for number in range(2 + 2 * n)]
    assert set(views[2:]) == {1}


def test_a_proposal_names_what_the_others_hold() -> None:
    network = Network(7, 0.1, LINE_BITS, FREE)
    network.begin()
    height = network.round(0)
    assert 3 * height.proposal_bytes < height.block_bytes
