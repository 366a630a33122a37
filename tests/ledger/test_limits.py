"""Votes on the largest size of the models of a network's jobs. The first limit is the same in every network."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ledger.network_governance
from consensus.voter_set import VoterSet
from ledger.core.module import Refused
from ledger.jobs import JobTerms, StartJob
from ledger.ledger_state import BlockBody, core_modules
from ledger.members import ResignAsVoter
from ledger.network_governance import PARAMETERS_LIMIT, NetworkLimit, NetworkState
from protocol import codec
from protocol.identity import Signed
from protocol.limits import PARAMETERS_ALLOWED, PARAMETERS_ALLOWED_MAX
from tests.ledger.world import PEOPLE, PlainJobs, World


class SizedJobs(PlainJobs):
    """Specifications are `kind:rounds:parameters`."""

    def terms_of_spec(self, spec: bytes) -> JobTerms:
        plain, _, parameters = spec.rpartition(b":")
        return replace(super().terms_of_spec(plain), parameters=int(parameters))


class Limited(World):
    def __init__(self) -> None:
        super().__init__()
        self.start_chain(self.genesis, core_modules(SizedJobs()))

    def wish(self, number: int, most: int, name: str = PARAMETERS_LIMIT) -> Signed:
        return self.tx(PEOPLE[number], "network/limit", NetworkLimit(name, most))

    def start(self, parameters: int, author: int = 0) -> Signed:
        return self.tx(PEOPLE[author], "job/start", StartJob(b"language:2:%d" % parameters))

    @property
    def network(self) -> NetworkState:
        return self.state.module_state(NetworkState)

    def refusal(self, signed: Signed) -> str:
        return self.rules.why_body_refused(self.state, codec.encode(BlockBody((), (), (signed,)))) or ""


@pytest.fixture
def world() -> Limited:
    return Limited()


def test_a_new_network_allows_the_first_limit_and_no_more(world: Limited) -> None:
    assert world.refusal(world.start(PARAMETERS_ALLOWED)) == ""
    told = world.refusal(world.start(PARAMETERS_ALLOWED + 1))
    assert "134217729 parameters, but this network allows 134217728: " in told and "with `peer limit parameters N`" in told


def test_a_quorum_raises_it_and_a_minority_does_not(world: Limited) -> None:
    world.decide(world.wish(0, 300_000_000))
    world.decide(world.wish(1, 300_000_000))
    world.decide(world.wish(2, 400_000_000))
    assert world.network.parameters_max == PARAMETERS_ALLOWED and len(world.network.limit_votes) == 3
    assert world.refusal(world.start(300_000_000))
    world.decide(world.wish(2, 300_000_000))
    assert world.network.parameters_max == 300_000_000 and not world.network.limit_votes
    assert world.refusal(world.start(300_000_001)) and not world.refusal(world.start(300_000_000))
    world.decide(*(world.wish(number, 1_000) for number in range(3)))
    assert world.refusal(world.start(1_001)) and not world.refusal(world.start(1_000)), "voters can lower it, too"
    again = world.read_back()
    assert again.state_root == world.state.state_root and again.module_state(NetworkState).parameters_max == 1_000


def test_a_wish_for_what_holds_takes_another_one_back(world: Limited) -> None:
    world.decide(world.wish(0, 5_000))
    world.decide(world.wish(0, PARAMETERS_ALLOWED))
    assert not world.network.limit_votes
    assert "already allows 134217728 parameters" in world.refusal(world.wish(0, PARAMETERS_ALLOWED))


def test_only_voters_set_limits_that_there_are(world: Limited) -> None:
    assert "the only limit is" in world.refusal(world.wish(0, 5, "layers"))
    assert world.refusal(world.wish(4, 5)), "no member"
    assert world.refusal(world.wish(0, PARAMETERS_ALLOWED_MAX)) == ""
    assert world.refusal(world.wish(0, PARAMETERS_ALLOWED_MAX + 1))


def test_wishes_go_with_their_author_s_vote(world: Limited) -> None:
    world.decide(world.wish(3, 5_000))
    world.decide(world.tx(PEOPLE[3], "member/resign", ResignAsVoter()), empty_after=2)
    assert not world.network.limit_votes


class Anybody(VoterSet):
    quorum = 1  # type: ignore[assignment]


def test_planted_bugs_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted, pytest.raises((AssertionError, Refused)):  # a minority raises it
        planted.setattr(ledger.network_governance, "VoterSet", Anybody)
        test_a_quorum_raises_it_and_a_minority_does_not(Limited())
    with monkeypatch.context() as planted, pytest.raises(AssertionError):  # a job above it starts
        planted.setattr(NetworkState, "require_parameters_allowed", lambda state, parameters: None)
        test_a_new_network_allows_the_first_limit_and_no_more(Limited())
